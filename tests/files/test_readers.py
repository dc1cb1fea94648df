"""readers.py: against plain in-memory readers of the same content."""

import bz2
import gzip
import io
import json
import lzma
import random
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from groundup.errors import UserError
from groundup.files import encodings, readers, records, streams
from groundup.files.paths import find_files
from groundup.files.records import Report

TEXTS = [
    "plain English, with \"quotes\" and a \\ backslash",
    "中文文档：第一行\n第二行\n\n空行之后",
    "",
    "\u2028line separator\u2029 \u0085 next line \x0c form feed \x1c",
    "emoji 🙂👩‍👩‍👧 and 𠀀",
    "  spaces kept  ",
    "[1, {not json",
    "结尾的文字" * 2000,
]
ONE_LINE = [text.replace("\n", " ") for text in TEXTS if text.strip()]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def zstd(raw: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(raw)


def read(path: Path | str, report: Report | None = None, **options: str | int) -> list[str]:
    """The texts; an unexpected problem fails the test."""
    texts = [document.value for document in readers.read_documents(str(path), report=report or Report(True), **options)]
    return texts


def jsonl(texts: list[str], ascii_only: bool = False) -> bytes:
    return b"".join(json.dumps({"text": t}, ensure_ascii=ascii_only).encode() + b"\n" for t in texts)


def as_csv(texts: list[str], delimiter: str) -> bytes:
    rows = [delimiter.join([str(i), '"' + t.replace('"', '""') + '"']) for i, t in enumerate(texts)]
    return "\n".join([f"id{delimiter}text", *rows]).encode()


# ---- containers -------------------------------------------------------------------------------------------

CONTAINERS = {
    "a.jsonl": (jsonl(TEXTS), TEXTS),
    "b.ndjson": (jsonl(TEXTS, ascii_only=True), TEXTS),
    "c.json": (jsonl(TEXTS).replace(b"\n", b"\r\n"), TEXTS),
    "d.json": (json.dumps([{"text": t} for t in TEXTS]).encode(), TEXTS),
    "e.json": (b" \n\n" + json.dumps([{"text": t} for t in TEXTS], ensure_ascii=False, indent=2).encode(), TEXTS),
    "f.json": (json.dumps(TEXTS, ensure_ascii=False).encode(), TEXTS),
    "g.json": (json.dumps({"id": 1, "text": TEXTS[1]}, ensure_ascii=False, indent=2).encode(), TEXTS[1:2]),
    "h.csv": (as_csv(TEXTS, ","), TEXTS),
    "i.tsv": ("\n".join(["id\ttext", *(f"{i}\t{t}" for i, t in enumerate(ONE_LINE))]).encode(), ONE_LINE),
    "j.txt": (TEXTS[1].encode(), TEXTS[1:2]),
    "k.md": (b"# no suffix of ours\n", ["# no suffix of ours\n"]),
}


@pytest.mark.parametrize(
    "name, suffix, read_bytes",
    [(name, "", n) for name in CONTAINERS for n in (16, 61, 2**20)]
    + [(name, suffix, 61) for name in CONTAINERS for suffix in (*COMPRESS, ".zst") if suffix],
)
def test_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str, read_bytes: int) -> None:
    monkeypatch.setattr(streams, "READ_BYTES", read_bytes)
    raw, expected = CONTAINERS[name]
    path = tmp_path / (name + suffix)
    path.write_bytes(zstd(raw) if suffix == ".zst" else COMPRESS[suffix](raw))
    assert read(path) == expected


def test_compression_is_recognised_by_content_and_several_streams_follow_each_other(tmp_path: Path) -> None:
    raw = jsonl(TEXTS)
    for compress in (gzip.compress, bz2.compress, lzma.compress, zstd):
        path = tmp_path / "no_such_suffix.jsonl"
        path.write_bytes(compress(raw[:5000]) + compress(raw[5000:]))
        assert read(path) == TEXTS
    path.write_bytes(gzip.compress(raw) + bytes(10_000))  # padded to a block, as on tapes
    assert read(path) == TEXTS


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_txt_split(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.txt"
    lines = ["", "一", "二 2", "", "  \t", "three", "\u2028four", "", ""]
    path.write_bytes(end.join(lines).encode())
    assert read(path) == ["\n".join(lines)]
    assert read(path, txt_split="blank") == ["一\n二 2", "three\n\u2028four"]
    assert read(path, txt_split="line") == ["一", "二 2", "three", "\u2028four"]
    with pytest.raises(UserError, match="txt_split must be file, blank or line, got 'page'"):
        read(path, txt_split="page")


def test_parquet_columns_and_row_groups(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = str(tmp_path / "a.parquet")
    rows = [{"text": t, "meta": {"title": f"题{i}"}, "n": i} for i, t in enumerate(TEXTS)] + [{"text": None, "n": 9}]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    units = readers.work_units(path, unit_bytes=1)
    assert units == [(0, 1), (1, 2), (2, 3)] and readers.work_units(path) == [(0, 3)]
    report = Report()
    parts = [list(readers.read_documents(path, begin=a, end=b, report=report)) for a, b in units]
    assert [d.value for part in parts for d in part] == TEXTS and [len(part) for part in parts] == [3, 3, 2]
    assert report.places == [(path, 9, 8, "bad_field: no text under 'text' (keys text, meta, n)")]
    assert [d.offset for part in parts for d in part] == list(range(8))
    assert read(path, Report(), text_key="meta.title,text")[1] == "题1\n" + TEXTS[1]
    report = Report()
    assert read(path, report, text_key="body") == [] and report.problems == {"bad_field": 9}
    Path(path).write_bytes(Path(path).read_bytes()[:-100])
    report = Report()
    assert readers.work_units(path) == [(0, None)] and read(path, report) == []
    assert report.problems == {"truncated_file": 1}


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.txt").write_bytes(b"\x28\xb5\x2f\xfd....")
    (tmp_path / "a.parquet").write_bytes(b"PAR1....")
    with pytest.raises(UserError, match=r"a\.txt needs zstandard; run: pip install zstandard"):
        read(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a\.parquet needs pyarrow; run: pip install pyarrow"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (jsonl(TEXTS), TEXTS),
        (gzip.compress(json.dumps([{"text": "甲"}]).encode(), mtime=0), ["甲"]),
        ("只是文字\n[1]\n".encode(), ["只是文字\n[1]\n"]),
        (b"[note] plain text", ["[note] plain text"]),
        (b"", [""]),
    ],
)
def test_standard_input(monkeypatch: pytest.MonkeyPatch, raw: bytes, expected: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    assert find_files("-") == ["-"] and readers.work_units("-") == [(0, None)]
    assert read("-") == expected


# ---- JSON arrays ------------------------------------------------------------------------------------------


def in_pieces(text: str, size: int) -> list[tuple[object, int, int]]:
    found = list(records.JsonStream(text[i : i + size] for i in range(0, len(text), size)))
    return [(record.value, record.line, record.offset) for record in found if not record.problem]


def random_json(rng: random.Random, depth: int = 0) -> object:
    simple = [
        None, True, False, 0, -1, 1.5, -2.25e-7, 1e99, 10**18, "", "a", "中文 🙂", 'q"\\/\n\t\u2028', "]", ",", "[{",
        float("inf"), -float("inf"), "\ud83d",
    ]  # fmt: skip
    if depth == 3 or rng.random() < 0.5:
        return rng.choice(simple)
    items = [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    return items if rng.random() < 0.5 else {rng.choice("ab中\"") + str(i): item for i, item in enumerate(items)}


def test_json_array_equals_json_loads() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        value = [random_json(rng) for _ in range(rng.randrange(5))]
        text = json.dumps(value, indent=rng.choice([None, 0, 2]), ensure_ascii=rng.random() < 0.5)
        text = text.replace("\ud83d", "\\ud83d")  # no decoder returns half a surrogate
        text = rng.choice(["", " \n"]) + text + rng.choice(["", "\r\n\t "])
        found = in_pieces(text, rng.randrange(1, 31))
        assert [element for element, _, _ in found] == json.loads(text) == value
        raw = text.encode("utf-8", "surrogatepass")
        for element, line, offset in found:
            rest = raw[offset:].decode("utf-8", "surrogatepass")
            assert json.JSONDecoder().raw_decode(rest)[0] == element and line == 1 + raw[:offset].count(b"\n")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "values", "problem"),
    [
        ("[1,2", [1, 2], "truncated_file"),
        ("[{} {}]", [{}, {}], ""),  # nothing is lost
        ("[1]]", [1], ""),
        ("[1,]", [1], ""),
        ("[,1]", [1], ""),
        ("[", [], "truncated_file"),
        ("[1][2]", [1, 2], ""),  # two files that were put together
        ("x", [], "bad_json"),
        ('["a', [], "bad_json"),
        ("[tru]", [], "bad_json"),
        ('["a, "b", "c"]', ["c"], "bad_json"),
        ('[\n "a,\n "b",\n "c"\n]', ["b", "c"], "bad_json"),
        ('[{"a": 1,}, {"a": 2}, {"b": 3}]', [{"a": 2}, {"b": 3}], "bad_json"),
        ('[{"a": [{"b": 1}], "c": }, {"a": 2}]', [{"a": 2}], "bad_json"),  # what is within the bad one is no element
        ('[\n {"a": {\n  "a": 1}, x\n },\n {"a": 2}\n]', [{"a": 2}], "bad_json"),
        ('[[{"r": 1}], [{"r": 2} x], [{"r": 3}]]', [[{"r": 1}], [{"r": 3}]], "bad_json"),
        ('[{"a": 1}x{"a": 2}]', [{"a": 1}, {"a": 2}], ""),
    ],
)
def test_json_array_malformed(text: str, values: list, problem: str, size: int) -> None:
    assert [value for value, _, _ in in_pieces(text, size)] == values
    problems = [record for record in records.JsonStream(text[i : i + size] for i in range(0, len(text), size))
                if record.problem]  # fmt: skip
    assert [record.problem for record in problems] == [problem] * bool(problem)
    assert not problem or problems[0].lost or problem == "truncated_file"


def test_json_array_large_element_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[object, int]:
            parsed.append(len(s) - idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(json, "JSONDecoder", Counting)
    text = json.dumps(["x" * 1_000_000, 1])
    assert len(in_pieces(text, 1000)) == 2
    assert sum(parsed) < 4 * len(text)


def test_memory_is_bounded_by_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_BYTES", 2**14)
    monkeypatch.setattr(streams, "SAMPLE_BYTES", 2**10)
    texts = ["汉字 and English " * 240] * 500  # 2.4 MB
    files = {"a.jsonl": jsonl(texts), "a.json": json.dumps([{"text": t} for t in texts]).encode()}
    files |= {"a.csv": as_csv(texts, ","), "a.jsonl.gz": gzip.compress(jsonl(texts), 1)}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
        tracemalloc.start()
        n = sum(1 for _ in readers.read_documents(str(tmp_path / name)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert n == len(texts) and peak < 1_600_000, (name, peak)


# ---- parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n"])
def test_every_cut_reads_every_record_once(tmp_path: Path, bom: bytes, end: bytes, last: bytes) -> None:
    lines = [b'{"text": "a"}', '{"text": "中\u2028文"}'.encode(), b"", b"bad", b" ", b"", b'{"text": "z"}', b"[]"]
    raw = bom + (end.join(lines) + last.replace(b"\n", end))
    for name, split in (("a.jsonl", "file"), ("a.txt", "line"), ("a.txt", "blank")):
        path = str(tmp_path / name)
        Path(path).write_bytes(raw)
        whole = Report()
        expected = list(readers.read_documents(path, txt_split=split, report=whole))
        assert len(expected) == {"file": 3, "line": 5, "blank": 3}[split]
        for cut in range(1, len(raw)):
            report, documents = Report(), []
            for begin, stop in ((0, cut), (cut, len(raw))):
                documents += readers.read_documents(path, "text", split, begin, stop, report)
            assert documents == expected, cut
            assert report.places == whole.places and report.problems == whole.problems, cut
    assert readers.work_units(path, "blank", 7) == [(a, min(a + 7, len(raw))) for a in range(0, len(raw), 7)]
    units = readers.work_units(path, "blank", 7)
    assert [d for a, b in units for d in readers.read_documents(path, "text", "blank", a, b)] == expected
    assert readers.work_units(path, "file", 7) == [(0, None)]


def test_parts_of_one_long_paragraph_do_not_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n" * 1000)
    with streams.open_stream(str(path), 99) as stream:
        assert list(records.paragraphs(stream, 100, 200)) == []
        assert stream.raw.file.tell() < 400
    parts = [list(readers.read_documents(str(path), "text", "blank", a, a + 100)) for a in range(0, 5000, 100)]
    assert [len(part) for part in parts] == [1] + [0] * 49 and len(parts[0][0].value) == 4999


def test_what_cannot_be_cut_is_one_part(tmp_path: Path) -> None:
    for name, (raw, _) in CONTAINERS.items():
        path = tmp_path / name
        path.write_bytes(raw)
        cut = name in ("a.jsonl", "b.ndjson", "c.json")
        assert (len(readers.work_units(str(path), unit_bytes=10)) > 1) == cut, name
    path.write_bytes(gzip.compress(jsonl(TEXTS)))
    assert readers.work_units(str(path), unit_bytes=10) == [(0, None)]
    path = tmp_path / "wide.jsonl"
    path.write_bytes(jsonl(TEXTS).decode().encode("utf-16"))
    assert readers.work_units(str(path), unit_bytes=10) == [(0, None)] and read(path) == TEXTS


# ---- what is wrong with them ------------------------------------------------------------------------------


def test_bad_lines_are_reported_with_file_line_and_offset(tmp_path: Path) -> None:
    path = str(tmp_path / "a.jsonl")
    lines = [
        (b'{"text": "one"}', ""),
        (b'{"text": "cut', "bad_json"),
        (b'{"text": null}', "bad_field"),
        (b'{"text": 7}', "bad_field"),
        ('{"text": "二"}'.encode(), ""),
        (b'{"body": "x"}', "bad_field"),
        (b"", ""),
        (b'["text"]', "bad_field"),
        ('{"text": "中'.encode() + b'\xff\xe6\x96\x87"}', "bad_encoding"),
        (b"[" * 100_000, "bad_json"),
        (b'{"text": "last"}', ""),
    ]
    Path(path).write_bytes(b"\n".join(raw for raw, _ in lines))
    report = Report()
    assert read(path, report) == ["one", "二", "last"]
    offsets = np.cumsum([0] + [len(raw) + 1 for raw, _ in lines])
    expected = [(path, i + 1, offsets[i], reason) for i, (_, reason) in enumerate(lines) if reason]
    assert [(p, line, offset, reason.split(":")[0]) for p, line, offset, reason in report.places] == expected
    assert report.problems == {"bad_json": 2, "bad_field": 4, "bad_encoding": 1}
    assert "keys body" in report.places[3][3]
    with pytest.raises(UserError, match=r"a\.jsonl:2: bad_json at byte 16: Unterminated string") as strict:
        read(path, Report(strict=True))
    assert isinstance(strict.value, UserError) and "\n" not in str(strict.value)
    few = Report(max_places=2)
    read(path, few)
    assert len(few.places) == 2 and few.problems == report.problems


def test_bad_elements_of_an_array(tmp_path: Path) -> None:
    path = str(tmp_path / "a.json")
    Path(path).write_bytes('[{"text": "中"},\n {"t": 1},\n\n {"text": "b"}, 5,\n oops, {"text": "c"}]'.encode())
    report = Report()
    assert read(path, report) == ["中", "b", "c"]
    places = [(line, offset, reason.split(":")[0]) for _, line, offset, reason in report.places]
    assert places == [(2, 19, "bad_field"), (4, 46, "bad_field"), (5, 50, "bad_json")]
    assert report.places[2][3].endswith("left out: 6 bytes") and report.lost_bytes == 6


def test_bad_rows_of_csv(tmp_path: Path) -> None:
    path = str(tmp_path / "a.csv")
    rows = [b"text,n", b'"a', b'b",1', b"c", "文,2".encode(), b'"x"y,3']
    rows += [b"\xe4\xb8\xad\xff\xe6\x96\x87,4", b"d,5", b'"open,6', b"e,7"]
    Path(path).write_bytes(b"\n".join(rows))
    report = Report()
    assert read(path, report) == ["a\nb", "文", "d", "e"]
    places = [(line, offset, reason.split(":")[0]) for _, line, offset, reason in report.places]
    starts = np.cumsum([0] + [len(row) + 1 for row in rows])
    expected = {4: "bad_csv", 6: "bad_csv", 7: "bad_encoding", 9: "bad_csv"}
    assert places == [(line, starts[line - 1], reason) for line, reason in expected.items()]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "gb18030"])
@pytest.mark.parametrize("name", ["a.jsonl", "d.json", "e.json", "h.csv", "j.txt"])
def test_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, encoding: str) -> None:
    monkeypatch.setattr(streams, "READ_BYTES", 2**15)
    raw, expected = CONTAINERS[name]
    if name == "d.json":
        raw = json.dumps(json.loads(raw), ensure_ascii=False).encode()
    text = raw.decode().removeprefix(" \n\n")
    path = tmp_path / name
    path.write_bytes((b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding))
    report = Report(strict=True)
    given = encoding if encoding == "gb18030" else ""  # these are random characters
    assert read(path, report, encoding=given) == expected
    assert bool(report.mended["gb18030"]) == (encoding == "gb18030")


def test_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rb'{"text": "\ud83d\ude00 \ud83d x"}' + b"\n" + rb'{"text": "\ufeff\ud83d\ude00"}')
    report = Report()
    assert read(path, report) == ["\U0001f600 \ufffd x", "\ufeff\U0001f600"]
    assert report.mended == {"surrogates": 1} and not report.problems


def test_invalid_utf8_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"line one\n\xe4\xb8\xad\xff\xe6\x96\x87\n")
    report = Report()
    assert read(path, report) == ["line one\n"] and report.places[0][:3] == (str(path), 2, 12)
    assert report.problems == {"bad_encoding": 1}
    path.write_bytes("好\n啊".encode("utf-16") + b"\x00")  # half a character, or a line that lost a byte
    report = Report()
    assert read(path, report) == ["好\n"] and report.problems == {"bad_encoding": 1}


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_truncated_compressed_file_keeps_what_was_read(tmp_path: Path, suffix: str) -> None:
    small_blocks = {"gz": gzip.compress, "bz2": partial(bz2.compress, compresslevel=1), "zst": zstd}
    compress = small_blocks.get(suffix, partial(lzma.compress, preset=0))
    noise = np.random.default_rng(1).integers(0x4E00, 0x9FFF, (120, 1000)).tolist()
    texts = ["".join(map(chr, codes)) for codes in noise]
    for name, raw in (("a.jsonl", jsonl(texts)), ("a.json", json.dumps(texts).encode()), ("a.csv", as_csv(texts, ","))):
        path, whole = tmp_path / name, compress(raw)
        path.write_bytes(whole[: len(whole) * 3 // 4])
        report = Report()
        found = read(path, report)
        assert found == texts[: len(found)] and 30 < len(found) < 120
        # the row of a CSV file that is cut within its quotes is reported too
        assert report.problems["truncated_file"] == 1 and report.problems.total() <= 1 + (name == "a.csv")
        path.write_bytes(whole[: len(whole) // 2] + bytes(range(256)) + whole[len(whole) // 2 :])
        report = Report()
        # the sum of gzip comes last: nothing before it can be trusted
        assert read(path, report)[:30] == texts[: 0 if suffix == "gz" else 30] and report.problems
    path = tmp_path / "a.txt"
    path.write_bytes(compress("".join(texts).encode())[:-20])
    report = Report()
    (text,) = read(path, report)
    assert "".join(texts).startswith(text) and text and report.problems == {"truncated_file": 1}


def test_text_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "题", "body": {"content": "文"}}\n"bare"\n{"title": "x"}\n', encoding="utf-8")
    for text_key in ("title, body.content", "title+body.content"):  # + as in a named source
        report = Report()
        assert read(path, report, text_key=text_key) == ["题\n文", "bare"]
    assert report.places == [(str(path), 3, 52, "bad_field: no text under 'body.content' (keys title)")]


def test_find_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["d/b.txt", "d/a/z.txt", "d/a-1.txt", "d/.hidden.txt", "d/.git/x.txt", "d/part.tmp", "d/中.txt", "e.txt"]
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name, encoding="utf-8")
    tree = ["d/a-1.txt", "d/a/z.txt", "d/b.txt", "d/中.txt"]
    assert find_files("d") == tree
    assert find_files("e.txt, d,e.txt") == ["e.txt", *tree]
    assert find_files("*.txt") == ["e.txt"]
    assert find_files("d/**/*.txt") == sorted(tree)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no file matches .*empty'; the directory holds no data"):
        find_files(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="nothing is downloaded from here; first: curl -LO https://example.com/a.txt"):
        find_files("https://example.com/a.txt")
    with pytest.raises(UserError, match=r"no file matches 'f/\*.txt'"):
        find_files("e.txt,f/*.txt")
    with pytest.raises(UserError, match="no file matches 'e.txt，d' in --val_data; .*separated by commas"):
        find_files("e.txt，d", "val_data")
    for name in ("s/state.json", "s/dataset_info.json", "s/data-00000-of-00001.arrow"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    with pytest.raises(UserError, match=r"datasets; first: .*load_from_disk\('s'\).to_json"):
        find_files("s")
    with pytest.raises(UserError, match=r"cannot read nothing.txt: No such file or directory"):
        read("nothing.txt")


def test_names_that_promise_other_bytes_are_damage(tmp_path: Path) -> None:
    for name in ("empty.jsonl.gz", "pointer.parquet", "plain.jsonl.xz", "empty.parquet"):
        raw = b"" if "empty" in name else b'{"text": "version https://git-lfs.github.com/spec/v1"}\n'
        (tmp_path / name).write_bytes(raw)
        report = Report()
        assert read(tmp_path / name, report) == [] and report.problems == {"truncated_file": 1}, name


def test_a_parquet_row_that_is_not_utf8_costs_only_itself(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    texts = pa.array([f"text {i}".encode() if i != 5 else b"\xff\xfe" for i in range(9)], pa.binary())
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 9, texts.buffers())}), tmp_path / "a.parquet")
    report = Report()
    assert read(tmp_path / "a.parquet", report) == [f"text {i}" for i in range(9) if i != 5]
    assert report.problems == {"bad_encoding": 1} and report.places[0][1:3] == (6, 5)


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("a/x.txt", "a/b/y.txt", "elsewhere/z.txt"):
        (tmp_path / name).write_text(name, "utf-8")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    found = [str(Path(file).relative_to(tmp_path)) for file in find_files(str(tmp_path / "a"))]
    assert found == ["a/b/y.txt", "a/link/z.txt", "a/x.txt"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_number_of_thousands_of_digits_costs_its_line(tmp_path: Path, name: str) -> None:
    """Also in the first line, which tells the layout."""
    (tmp_path / name).write_text('{"n": ' + "9" * 5000 + '}\n{"n": 1}\n', "utf-8")
    first, second = records.read_records(str(tmp_path / name))
    assert first.problem == "bad_json" and second.value == {"n": 1}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"a": 1}\n{"question"：1}', "2: bad_json: Expecting ':' delimiter at character 12 (is ： for :"),
        ("a.jsonl", "{“a”: 1}", "in double quotes at character 2 (is “ for \" intended?)"),
        ("a.jsonl", '{"a": "b”}', "Unterminated string starting at character 7 (is ” for \" intended?)"),
        ("a.jsonl", '{"a": "b，c', "Unterminated string starting at character 7"),
        ("a.jsonl", '{"a": 1}，{"a": 2}', "1: bad_json: Expecting value at character 9 (is ， for , intended?)"),
        ("a.json", '[\n {"a": 1},\n {\n  "a"：2\n }\n]', "3: bad_json: Expecting ':' delimiter in line 4, column 6"),
    ],
)  # fmt: skip
def test_a_fault_in_json_has_one_place_and_marks_of_chinese_typing_are_named(tmp_path, name, content, says):
    path, report = tmp_path / name, Report()
    path.write_text(content, encoding="utf-8")
    list(readers.read_rows(str(path), lambda row: (row, ""), report=report))
    ((_, line, _, why),) = report.places
    assert says in f"{line}: {why}" and ("intended" in why) is ("b，c" not in content)


SHORT = {  # ten beginnings and five ends of each: fifty texts of 4 to 20 wide characters
    "gb18030": (
        "你好 我们 医生 这本书 天气 老师 小狗 北京 他的朋友 春天".split(),
        "在哪里？ 说，谢谢你 很好吃。 已经回家了 今天真的不错！".split(),
    ),
    "big5": (
        "你好 我們 醫生 這本書 天氣 老師 小狗 臺灣 他的朋友 春天".split(),
        "在哪裡？ 說，謝謝你 很好吃。 已經回家了 今天真的不錯！".split(),
    ),
    "cp932": (
        "こんにちは 私たち 医者 この本 天気 先生 子犬 東京 彼の友達 春".split(),
        "はどこですか？ はありがとうと言う とてもおいしい。 はもう帰った は今日も元気です".split(),
    ),
    "cp949": (
        "안녕하세요 우리는 의사가 이것은 날씨가 선생님이 강아지가 서울은 친구는 봄이".split(),
        "어디에_있습니까? 고맙다고_말했다 정말_맛있어요. 이미_집에_갔다 오늘도_좋습니다".split(),
    ),
}


@pytest.mark.parametrize("codec", SHORT)
def test_the_likely_encoding_of_a_short_text(codec: str) -> None:
    """charset-normalizer takes most short Chinese for Korean."""
    beginnings, ends = SHORT[codec]
    texts = [f"{one} {end}".replace("_", " ") if codec == "cp949" else one + end for one in beginnings for end in ends]
    assert len(texts) == 50 and max(sum(not char.isascii() for char in text) for text in texts) <= 20
    found = []
    for text in texts:
        verdict = encodings.judge(text.encode(codec))
        found.append(verdict.other or verdict.refused.partition("perhaps ")[2].partition(";")[0])
    assert found.count(codec) >= 49, [text for text, name in zip(texts, found, strict=True) if name != codec]
