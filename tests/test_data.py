"""data.py: readers against plain in-memory ones, token files against numpy, order of samples against enumeration."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import random
import sys
import threading
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import Batches, DataError, Report, Sampler, ShardWriter, TokenData

TEXTS = [
    "plain English, with \"quotes\" and a \\ backslash",
    "中文文档：第一行\n第二行\n\n空行之后",
    "",
    "\u2028line separator\u2029 \u0085 next line \x0c form feed \x1c",
    "emoji 🙂👩‍👩‍👧 and 𠀀",
    "  spaces kept  ",
    "[1, {not json",
    "末尾" * 5000,
]
ONE_LINE = [text.replace("\n", " ") for text in TEXTS if text.strip()]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def zstd(raw: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(raw)


def read(path: Path | str, report: Report | None = None, **options: str | int) -> list[str]:
    """The texts; an unexpected problem fails the test."""
    texts = [document.text for document in data.read_documents(str(path), report=report or Report(True), **options)]
    return texts


def jsonl(texts: list[str], ascii_only: bool = False) -> bytes:
    return b"".join(json.dumps({"text": t}, ensure_ascii=ascii_only).encode() + b"\n" for t in texts)


def as_csv(texts: list[str], delimiter: str) -> bytes:
    rows = [delimiter.join([str(i), '"' + t.replace('"', '""') + '"']) for i, t in enumerate(texts)]
    return "\n".join([f"id{delimiter}text", *rows]).encode()


# ---- raw files: containers -------------------------------------------------------------------------------------------

CONTAINERS = {
    "a.jsonl": (jsonl(TEXTS), TEXTS),
    "b.ndjson": (jsonl(TEXTS, ascii_only=True), TEXTS),
    "c.json": (jsonl(TEXTS).replace(b"\n", b"\r\n"), TEXTS),
    "d.json": (json.dumps([{"text": t} for t in TEXTS]).encode(), TEXTS),
    "e.json": (b" \n\n" + json.dumps([{"text": t} for t in TEXTS], ensure_ascii=False, indent=2).encode(), TEXTS),
    "f.json": (json.dumps(TEXTS, ensure_ascii=False).encode(), TEXTS),
    "g.json": (json.dumps({"id": 1, "text": TEXTS[1]}, ensure_ascii=False, indent=2).encode(), TEXTS[1:2]),
    "h.csv": (as_csv(TEXTS, ","), TEXTS),
    "i.tsv": (as_csv(TEXTS, "\t"), TEXTS),
    "j.txt": (TEXTS[1].encode(), TEXTS[1:2]),
    "k.md": (b"# no suffix of ours\n", ["# no suffix of ours\n"]),
}


@pytest.mark.parametrize("read_bytes", [16, 61, 2**20])
@pytest.mark.parametrize("suffix", [*COMPRESS, ".zst"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str, read_bytes: int) -> None:
    monkeypatch.setattr(data, "READ_BYTES", read_bytes)
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
    with pytest.raises(DataError, match="txt_split must be file, blank or line, got 'page'"):
        read(path, txt_split="page")


def test_parquet_columns_and_row_groups(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = str(tmp_path / "a.parquet")
    rows = [{"text": t, "meta": {"title": f"题{i}"}, "n": i} for i, t in enumerate(TEXTS)] + [{"text": None, "n": 9}]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    units = data.work_units(path)
    assert units == [(0, 1), (1, 2), (2, 3)]
    report = Report()
    parts = [list(data.read_documents(path, begin=a, end=b, report=report)) for a, b in units]
    assert [d.text for part in parts for d in part] == TEXTS and [len(part) for part in parts] == [3, 3, 2]
    assert report.places == [(path, 9, 8, "bad_field: no text under 'text' (keys: text)")]
    assert [d.offset for part in parts for d in part] == list(range(8))
    assert read(path, Report(), text_key="meta.title,text")[1] == "题1\n" + TEXTS[1]
    report = Report()
    assert read(path, report, text_key="body") == [] and report.problems == {"bad_field": 9}
    Path(path).write_bytes(Path(path).read_bytes()[:-100])
    report = Report()
    assert data.work_units(path) == [(0, None)] and read(path, report) == []
    assert report.problems == {"truncated_file": 1}


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.txt").write_bytes(b"\x28\xb5\x2f\xfd....")
    (tmp_path / "a.parquet").write_bytes(b"PAR1....")
    with pytest.raises(DataError, match=r"a\.txt needs zstandard; run: pip install zstandard"):
        read(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.parquet needs pyarrow; run: pip install pyarrow"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (jsonl(TEXTS), TEXTS),
        (gzip.compress(json.dumps([{"text": "甲"}]).encode()), ["甲"]),
        ("只是文字\n[1]\n".encode(), ["只是文字\n[1]\n"]),
        (b"[note] plain text", ["[note] plain text"]),
        (b"", [""]),
    ],
)
def test_standard_input(monkeypatch: pytest.MonkeyPatch, raw: bytes, expected: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    assert data.find_files("-") == ["-"] and data.work_units("-") == [(0, None)]
    assert read("-") == expected


# ---- raw files: JSON arrays ------------------------------------------------------------------------------------------


def in_pieces(text: str, size: int) -> list[tuple[object, int, int]]:
    return list(data.JsonStream(text[i : i + size] for i in range(0, len(text), size)))


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
    for _ in range(3000):
        value = [random_json(rng) for _ in range(rng.randrange(5))]
        text = json.dumps(value, indent=rng.choice([None, 0, 2]), ensure_ascii=rng.random() < 0.5)
        text = rng.choice(["", " \n"]) + text + rng.choice(["", "\r\n\t "])
        found = in_pieces(text, rng.randrange(1, 31))
        assert [element for element, _, _ in found] == json.loads(text) == value
        raw = text.encode("utf-8", "surrogatepass")
        for element, line, offset in found:
            rest = raw[offset:].decode("utf-8", "surrogatepass")
            assert json.JSONDecoder().raw_decode(rest)[0] == element and line == 1 + raw[:offset].count(b"\n")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", ["[1,2", "[1 2]", "[1,]", "[1,]x", "[", "[,1]", "[1]]", "[1][2]", "x", '["a', "[tru]"])
def test_json_array_malformed(text: str, size: int) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        in_pieces(text, size)


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
    monkeypatch.setattr(data, "READ_BYTES", 2**16)
    texts = ["汉字 and English " * 60] * 4000  # 5 MB
    files = {"a.jsonl": jsonl(texts), "a.json": json.dumps([{"text": t} for t in texts]).encode()}
    files |= {"a.csv": as_csv(texts, ","), "a.jsonl.gz": gzip.compress(jsonl(texts), 1)}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
        tracemalloc.start()
        n = sum(1 for _ in data.read_documents(str(tmp_path / name)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert n == len(texts) and peak < 2_500_000, (name, peak)


# ---- raw files: parts ------------------------------------------------------------------------------------------------


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
        expected = list(data.read_documents(path, txt_split=split, report=whole))
        assert len(expected) == {"file": 3, "line": 5, "blank": 3}[split]
        for cut in range(1, len(raw)):
            report, documents = Report(), []
            for begin, stop in ((0, cut), (cut, len(raw))):
                part = Report()
                documents += data.read_documents(path, "text", split, begin, stop, part)
                report.merge(part)
            assert documents == expected, cut
            assert report.places == whole.places and report.problems == whole.problems, cut
    assert data.work_units(path, "blank", 7) == [(a, min(a + 7, len(raw))) for a in range(0, len(raw), 7)]
    units = data.work_units(path, "blank", 7)
    assert [d for a, b in units for d in data.read_documents(path, "text", "blank", a, b)] == expected
    assert data.work_units(path, "file", 7) == [(0, None)]


def test_parts_of_one_long_paragraph_do_not_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "READ_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n" * 1000)
    with data.open_stream(str(path), 99) as stream:
        assert list(data.paragraphs(stream, 100, 200)) == []
        assert stream.raw.file.tell() < 400
    parts = [list(data.read_documents(str(path), "text", "blank", a, a + 100)) for a in range(0, 5000, 100)]
    assert [len(part) for part in parts] == [1] + [0] * 49 and len(parts[0][0].text) == 4999


def test_what_cannot_be_cut_is_one_part(tmp_path: Path) -> None:
    for name, (raw, _) in CONTAINERS.items():
        path = tmp_path / name
        path.write_bytes(raw)
        cut = name in ("a.jsonl", "b.ndjson", "c.json")
        assert (len(data.work_units(str(path), unit_bytes=10)) > 1) == cut, name
    path.write_bytes(gzip.compress(jsonl(TEXTS)))
    assert data.work_units(str(path), unit_bytes=10) == [(0, None)]
    path = tmp_path / "wide.jsonl"
    path.write_bytes(jsonl(TEXTS).decode().encode("utf-16"))
    assert data.work_units(str(path), unit_bytes=10) == [(0, None)] and read(path) == TEXTS


# ---- raw files: what is wrong with them ------------------------------------------------------------------------------


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
        (b'{"text": "\xff\xfe\xff"}', "bad_encoding"),
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
    assert "keys: body" in report.places[3][3]
    with pytest.raises(DataError, match=r"a\.jsonl:2: bad_json at byte 16: Unterminated string") as strict:
        read(path, Report(strict=True))
    assert strict.value.one_line and "\n" not in str(strict.value)
    few = Report(max_places=2)
    read(path, few)
    assert len(few.places) == 2 and few.problems == report.problems


def test_bad_elements_of_an_array(tmp_path: Path) -> None:
    path = str(tmp_path / "a.json")
    Path(path).write_bytes('[{"text": "中"},\n {"t": 1},\n\n {"text": "b"}, 5,\n oops, {"text": "c"}]'.encode())
    report = Report()
    assert read(path, report) == ["中", "b"]
    places = [(line, offset, reason.split(":")[0]) for _, line, offset, reason in report.places]
    assert places == [(2, 19, "bad_field"), (4, 46, "bad_field"), (5, 50, "bad_json")]
    assert report.places[2][3].endswith("the rest of the file is left out")


def test_bad_rows_of_csv(tmp_path: Path) -> None:
    path = str(tmp_path / "a.csv")
    rows = [b"text,n", b'"a', b'b",1', b"c", "文,2".encode(), b'"x"y,3', b"\xff\xff,4", b"d,5", b'"open,6', b"e,7"]
    Path(path).write_bytes(b"\n".join(rows))
    report = Report()
    assert read(path, report) == ["a\nb", "文", "d"]
    places = [(line, offset, reason.split(":")[0]) for _, line, offset, reason in report.places]
    starts = np.cumsum([0] + [len(row) + 1 for row in rows])
    expected = {4: "bad_csv", 6: "bad_csv", 7: "bad_encoding", 9: "bad_csv"}
    assert places == [(line, starts[line - 1], reason) for line, reason in expected.items()]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "gb18030"])
@pytest.mark.parametrize("name", ["a.jsonl", "d.json", "e.json", "h.csv", "j.txt"])
def test_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, encoding: str) -> None:
    monkeypatch.setattr(data, "READ_BYTES", 512)
    raw, expected = CONTAINERS[name]
    if name == "d.json":
        raw = json.dumps(json.loads(raw), ensure_ascii=False).encode()
    text = raw.decode().removeprefix(" \n\n")
    path = tmp_path / name
    path.write_bytes((b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding))
    report = Report(strict=True)
    assert read(path, report) == expected
    assert bool(report.mended["gb18030"]) == (encoding == "gb18030")


def test_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rb'{"text": "\ud83d\ude00 \ud83d x"}' + b"\n" + rb'{"text": "\ufeff\ud83d\ude00"}')
    report = Report()
    assert read(path, report) == ["\U0001f600 \ufffd x", "\ufeff\U0001f600"]
    assert report.mended == {"surrogates": 1} and not report.problems


def test_invalid_utf8_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"line one\n\xff\xff\xff\n")
    report = Report()
    assert read(path, report) == [] and report.places[0][:3] == (str(path), 2, 9)
    assert report.problems == {"bad_encoding": 1}
    path.write_bytes("好".encode("utf-16") + b"\x00")  # half a character
    report = Report()
    assert read(path, report) == ["好"] and report.problems == {"bad_encoding": 1}


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_truncated_compressed_file_keeps_what_was_read(tmp_path: Path, suffix: str) -> None:
    small_blocks = {"gz": gzip.compress, "bz2": partial(bz2.compress, compresslevel=1), "zst": zstd}
    compress = small_blocks.get(suffix, partial(lzma.compress, preset=0))
    rng = random.Random(1)
    texts = ["".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(1000)) for _ in range(200)]
    for name, raw in (("a.jsonl", jsonl(texts)), ("a.json", json.dumps(texts).encode()), ("a.csv", as_csv(texts, ","))):
        path, whole = tmp_path / name, compress(raw)
        path.write_bytes(whole[: len(whole) * 3 // 4])
        report = Report()
        found = read(path, report)
        assert found == texts[: len(found)] and 50 < len(found) < 200
        # the row of a CSV file that is cut within its quotes is reported too
        assert report.problems["truncated_file"] == 1 and report.problems.total() <= 1 + (name == "a.csv")
        path.write_bytes(whole[: len(whole) // 2] + bytes(range(256)) + whole[len(whole) // 2 :])
        report = Report()
        assert read(path, report)[:30] == texts[:30] and report.problems
    path = tmp_path / "a.txt"
    path.write_bytes(compress("".join(texts).encode())[:-20])
    report = Report()
    (text,) = read(path, report)
    assert "".join(texts).startswith(text) and text and report.problems == {"truncated_file": 1}


def test_text_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "题", "body": {"content": "文"}}\n"bare"\n{"title": "x"}\n', encoding="utf-8")
    report = Report()
    assert read(path, report, text_key="title, body.content") == ["题\n文", "bare"]
    assert report.places == [(str(path), 3, 52, "bad_field: no text under 'body.content' (keys: title)")]


def test_find_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["d/b.txt", "d/a/z.txt", "d/a-1.txt", "d/.hidden.txt", "d/.git/x.txt", "d/part.tmp", "d/中.txt", "e.txt"]
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name, encoding="utf-8")
    tree = ["d/a-1.txt", "d/a/z.txt", "d/b.txt", "d/中.txt"]
    assert data.find_files("d") == tree
    assert data.find_files("e.txt, d,e.txt") == ["e.txt", *tree]
    assert data.find_files("*.txt") == ["e.txt"]
    assert data.find_files("d/**/*.txt") == sorted(tree)
    with pytest.raises(DataError, match=r"no file matches 'f/\*.txt'"):
        data.find_files("e.txt,f/*.txt")
    with pytest.raises(DataError, match=r"cannot read nothing.txt: No such file or directory"):
        read("nothing.txt")


# ---- token files -----------------------------------------------------------------------------------------------------

VOCAB, EOT = 1000, 3


def write(
    path: Path, documents: list[np.ndarray], split: str = "train", shard_tokens: int = 2**27, vocab_size: int = VOCAB
) -> np.ndarray:
    """A data directory of one split; the tokens that it must hold, put together by hand."""
    writer = ShardWriter(path, split, vocab_size, EOT, shard_tokens)
    for ids in documents:
        writer.add(ids, n_bytes=2 * len(ids))
    data.write_manifest(path, vocab_size, EOT, "f" * 64, writer.close(), {"config": {"text_key": "text"}})
    return np.concatenate([[EOT, *ids] for ids in documents] + [[EOT]]).astype(np.int64)


def random_documents(seed: int = 0, n: int = 60, longest: int = 90) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCAB, rng.integers(0, longest)) for _ in range(n)]


def row(path: Path, n_tokens: int, split: str = "train") -> TokenData:
    """One document such that the split holds n_tokens tokens, 4, 5, 6, ... between the delimiters."""
    write(path, [4 + np.arange(n_tokens - 2) % (VOCAB - 4)], split)
    return TokenData(path, split)


@pytest.mark.parametrize("shard_tokens", [64, 91, 512, 4096])
def test_round_trip_with_windows_across_shards(tmp_path: Path, shard_tokens: int) -> None:
    documents = random_documents()
    expected = write(tmp_path, documents, shard_tokens=shard_tokens)
    split = TokenData(tmp_path, "train")
    assert split.n_tokens == len(expected) == sum(len(ids) + 1 for ids in documents) + 1
    assert split.n_documents == len(documents) and split.n_bytes == 2 * sum(map(len, documents))
    assert (split.vocab_size, split.eot_id, split.manifest["info"]["config"]) == (VOCAB, EOT, {"text_key": "text"})
    rng = random.Random(0)
    for _ in range(300):
        start = rng.randrange(len(expected))
        length = rng.randrange(len(expected) - start + 1)
        found = split.window(start, length)
        assert found.dtype == np.int64 and np.array_equal(found, expected[start : start + length])
    # what numpy itself reads from the files
    shards = [np.load(path) for path in sorted(tmp_path.glob("train_?????.npy"))]
    offsets = [np.load(path) for path in sorted(tmp_path.glob("train_*.off.npy"))]
    assert np.array_equal(np.concatenate(shards), expected) and {shard.dtype for shard in shards} == {np.dtype("u2")}
    found = [shard[a + 1 : b] for shard, off in zip(shards, offsets, strict=True) for a, b in itertools.pairwise(off)]
    assert all(np.array_equal(a, b) for a, b in zip(found, documents, strict=True))
    for shard, off in zip(shards[:-1], offsets[:-1], strict=True):
        assert off[-1] == len(shard) and (len(shard) <= shard_tokens or len(off) == 2)
    assert offsets[-1][-1] == len(shards[-1]) - 1 and (len(shards) > 1) == (shard_tokens < 2000)
    assert data.verify(tmp_path) == split.manifest
    assert not list(tmp_path.glob("*.tmp"))


def test_shards_end_exactly_on_the_border_and_small_documents(tmp_path: Path) -> None:
    documents = [np.full(31, 7), np.full(31, 8), np.zeros(0, int), np.full(63, 9), np.full(1, 5), np.full(500, 6)]
    expected = write(tmp_path, documents, shard_tokens=64)
    lengths = [len(np.load(path)) for path in sorted(tmp_path.glob("train_?????.npy"))]
    assert lengths == [64, 1, 64, 2, 502]  # 32+32 | 1 | 64 | 2 | 501 and the closing delimiter
    assert np.array_equal(TokenData(tmp_path, "train").window(0, 633), expected)


def test_chinese_text_comes_back(tmp_path: Path) -> None:
    texts = ["床前明月光，疑是地上霜。", "emoji 🙂", "", "def f(x):\n\treturn x"]
    writer = ShardWriter(tmp_path, "val", 384, 256, 40)
    for text in texts:
        writer.add(np.frombuffer(text.encode(), dtype=np.uint8), len(text.encode()))  # a tokenizer of bytes
    data.write_manifest(tmp_path, 384, 256, "bytes", writer.close(), {})
    split = TokenData(tmp_path, "val")
    ids = split.window(0, split.n_tokens).tolist()
    parts = [list(part) for is_eot, part in itertools.groupby(ids, lambda i: i == 256) if not is_eot]
    assert [bytes(part).decode() for part in parts] == [text for text in texts if text]
    assert split.n_bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(40_064, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_dtype(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = [32_767, 32_768, 40_000, min(65_535, vocab_size - 1), vocab_size - 1]
    write(tmp_path, [np.array(ids)], vocab_size=vocab_size)
    assert np.load(tmp_path / "train_00000.npy").dtype == np.dtype(dtype)
    assert TokenData(tmp_path, "train").window(0, 7).tolist() == [EOT, *ids, EOT]


@pytest.mark.parametrize("bad", [70_000, 1000, -1])
def test_writer_refuses_ids_outside_the_vocabulary(tmp_path: Path, bad: int) -> None:
    writer = ShardWriter(tmp_path, "train", VOCAB, EOT)
    with pytest.raises(DataError, match=f"data: token id {bad} is outside the tokenizer's vocab_size=1000"):
        writer.add(np.array([5, bad, 6]), 3)


def test_header_is_numpys(tmp_path: Path) -> None:
    for array in (np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.int64), np.zeros(123_456, dtype=np.uint32)):
        np.save(tmp_path / "a.npy", array)
        assert (tmp_path / "a.npy").read_bytes().startswith(data.npy_header(array.dtype, len(array)))


def test_memory_map_is_read_only(tmp_path: Path) -> None:
    split = row(tmp_path, 100)
    assert isinstance(split.shards[0].base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        split.shards[0][0] = 1


def test_splits_live_side_by_side_and_fingerprints_tell_them_apart(tmp_path: Path) -> None:
    shards = []
    for split, n in (("train", 30), ("val", 5), ("test", 0)):
        writer = ShardWriter(tmp_path, split, VOCAB, EOT)
        for ids in random_documents(n=n):
            writer.add(ids, 1)
        shards += writer.close()
    data.write_manifest(tmp_path, VOCAB, EOT, "a" * 64, shards, {})
    data.verify(tmp_path)
    train, val = TokenData(tmp_path, "train"), TokenData(tmp_path, "val")
    assert train.n_documents == 30 and val.n_documents == 5
    with pytest.raises(DataError, match=r"has no split 'test' \(has: train, val\); rerun prepare.py with more text"):
        TokenData(tmp_path, "test")
    assert train.fingerprint == TokenData(tmp_path, "train").fingerprint != val.fingerprint
    write(tmp_path / "b", [*random_documents(n=29), np.array([5])])
    assert TokenData(tmp_path / "b", "train").fingerprint != train.fingerprint
    train.check_tokenizer("a" * 64)
    with pytest.raises(DataError, match=r"prepared with another tokenizer \(aaaaaaaaaaaa, not bbbbbbbbbbbb\); put"):
        train.check_tokenizer("b" * 64)


def edit(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    (path / "manifest.json").write_text(json.dumps(manifest | changes), encoding="utf-8")


def test_errors_at_open(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(DataError) as caught:
            TokenData(tmp_path / "x", "train")
        assert caught.value.one_line and "\n" not in str(caught.value)
        return str(caught.value)

    run = f"run: python prepare.py --input=... --out_dir={tmp_path}/x"
    assert message() == f"data: no directory {tmp_path}/x; {run}"
    (tmp_path / "x").mkdir()
    assert message() == f"data: {tmp_path}/x is not prepared, or not completely: no manifest.json; {run}"
    documents = random_documents()
    write(tmp_path / "x", documents, shard_tokens=512)
    shard = tmp_path / "x" / "train_00001.npy"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-10])
    assert message() == f"data: {shard} ends at byte {len(raw) - 10} instead of {len(raw)}; " + (
        "copy it again or rerun prepare.py"
    )
    shard.write_bytes(raw[:50])
    assert message().startswith(f"data: {shard} is no .npy file")
    np.arange(500, dtype=np.uint16).tofile(shard)
    assert message().startswith(f"data: {shard} is no .npy file")
    np.save(shard, np.load(io.BytesIO(raw)).astype(np.int16))
    assert f"{shard} is no .npy file of {len(raw) // 2 - 64} uint16 (begins \"{{'descr': '<i2'," in message()
    shard.unlink()
    assert message() == f"data: {shard} is missing; copy it again or rerun prepare.py"
    shard.write_bytes(raw)
    TokenData(tmp_path / "x", "train")
    offsets = tmp_path / "x" / "train_00001.off.npy"
    np.save(offsets, np.load(offsets)[:-1])
    assert message().startswith(f"data: {offsets} is no .npy file of")
    edit(tmp_path / "x", format="other 2")
    assert "manifest.json is not of the format 'groundup tokens 1'" in message()
    (tmp_path / "x" / "manifest.json").write_text("{", encoding="utf-8")
    assert "manifest.json is damaged (" in message()


def test_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    documents = random_documents()
    expected = write(tmp_path, documents, shard_tokens=512)
    place = 700 + int(np.argmax(expected[700:] > 900))
    edit(tmp_path, vocab_size=int(expected[place]))
    split = TokenData(tmp_path, "train")
    lengths = [len(shard) for shard in split.shards]
    shard = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
    text = (
        f"data: {tmp_path}/train_{shard:05d}.npy holds token id {expected[place]} at offset "
        f"{place - sum(lengths[:shard])}, but the tokenizer has vocab_size={expected[place]}; rerun prepare.py"
    )
    for start, length in ((place, 1), (place, 3), (place - 1, 2)):
        if expected[start : start + length].argmax() == place - start or length == 1:
            with pytest.raises(DataError) as caught:
                split.window(start, length)
            assert str(caught.value) == text
    with pytest.raises(DataError, match="holds token id"):
        data.verify(tmp_path)


def test_verify_notices_every_flipped_byte_and_wrong_structure(tmp_path: Path) -> None:
    write(tmp_path, random_documents(n=20), shard_tokens=300)
    rng = random.Random(0)
    for path in sorted(tmp_path.glob("*.npy")):
        raw = path.read_bytes()
        for _ in range(10):
            place = rng.randrange(len(raw))
            path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :])
            with pytest.raises(DataError, match=path.name):
                data.verify(tmp_path)
        path.write_bytes(raw)
    manifest = data.verify(tmp_path)
    manifest["splits"]["train"]["documents"] += 1
    edit(tmp_path, **manifest)
    with pytest.raises(DataError, match="documents of train do not add up"):
        data.verify(tmp_path)


@pytest.mark.parametrize(
    ("starts", "complaint"),
    [([0, 6, 11], None), ([0, 5, 11], "no <.endoftext.> at offset 5"), ([1, 6, 11], "not increasing"),
     ([0, 6, 12], "not increasing"), ([0, 0, 11], "not increasing")],
)  # fmt: skip
def test_verify_offsets(tmp_path: Path, starts: list[int], complaint: str | None) -> None:
    write(tmp_path, [np.full(5, 9), np.full(4, 9)])
    path = tmp_path / "train_00000.off.npy"
    np.save(path, np.array(starts, dtype=np.int64))
    manifest = data.read_manifest(tmp_path)
    manifest["splits"]["train"]["shards"][0]["offsets_sha256"] = data.file_sha256(path)
    edit(tmp_path, **manifest)
    if complaint is None:
        assert data.verify(tmp_path)
    else:
        with pytest.raises(DataError, match=complaint):
            data.verify(tmp_path)


# ---- order of samples ------------------------------------------------------------------------------------------------


def test_permute_is_a_bijection() -> None:
    for n in [*range(1, 301), 1000, 4096, 4097, 65_536, 99_991]:
        for epoch in range(3):
            keys = data.hash_words(8, n, epoch)
            found = data.permute(np.arange(n), n, keys)
            assert np.array_equal(np.sort(found), np.arange(n)), n
            some = np.random.default_rng(n).integers(0, n, (2, 3))
            assert np.array_equal(data.permute(some, n, keys), found[some])  # any shape, order, repetition
    n = 10**12 + 39
    found = data.permute(np.arange(100_000), n, data.hash_words(8, "large"))
    assert len(set(found.tolist())) == 100_000 and 0 <= found.min() and found.max() < n


def test_permutation_looks_random() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for key in range(4800):
        order = tuple(data.permute(np.arange(4), 4, data.hash_words(8, "small", key)))
        counts[order] = counts.get(order, 0) + 1
    chi2 = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert len(counts) == 24 and chi2 < 49.7  # 23 degrees of freedom: one in a thousand is above
    n = 100_003
    order = data.permute(np.arange(n), n, data.hash_words(8, 1)).astype(float)
    other = data.permute(np.arange(n), n, data.hash_words(8, 2)).astype(float)
    for a, b in ((order[:-1], order[1:]), (order, np.arange(n)), (order, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5


def test_windows_of_an_epoch() -> None:
    """Every position is the target of exactly one window, but for fewer than 2T at the ends."""
    for block_size in (1, 2, 3, 8):
        for n_tokens in range(2 * block_size + 1, 8 * block_size + 4):
            sampler = Sampler(n_tokens, block_size, seed=7)
            n = data.window_count(n_tokens, block_size)
            assert sampler.n_windows == n >= 1
            for epoch in range(4):
                starts = sampler.start(np.arange(epoch * n, (epoch + 1) * n))
                targets = np.sort((starts[:, None] + 1 + np.arange(block_size)).ravel())
                assert starts.min() >= 0 and targets.max() < n_tokens
                assert np.array_equal(targets, np.arange(targets[0], targets[0] + n * block_size))
                assert n_tokens - 1 - len(targets) < 2 * block_size


def test_epochs_differ_in_order_and_borders_and_seeds_differ() -> None:
    sampler = Sampler(10_000, 16, seed=1)
    n = sampler.n_windows
    epochs = [tuple(sampler.start(np.arange(e * n, (e + 1) * n))) for e in range(20)]
    assert len({epoch[0] % 16 for epoch in epochs}) > 8 and len({epoch[:8] for epoch in epochs}) == 20
    mixed = np.random.default_rng(0).permutation(20 * n)  # any order, many epochs at once
    assert np.array_equal(sampler.start(mixed), np.concatenate(epochs)[mixed])
    assert not np.array_equal(Sampler(10_000, 16, seed=2).start(np.arange(n)), epochs[0])
    # fixed for ever: a changed order would break the resumption of every run
    assert Sampler(1000, 10, seed=1337).start(np.array([0, 1, 2, 98, 10**9])).tolist() == [281, 171, 881, 963, 624]


def test_a_late_step_costs_no_more_than_the_first(tmp_path: Path) -> None:
    split = row(tmp_path, 5000)

    def seconds(step: int) -> float:
        begin = time.perf_counter()
        batches = Batches(split, 16, 4, 1, seed=1, start_step=step)
        batches.next()
        batches.close()
        return time.perf_counter() - begin

    seconds(0)
    assert min(seconds(10**6) for _ in range(5)) < 5 * min(seconds(0) for _ in range(5)) + 0.01


def test_corpus_shorter_than_needed(tmp_path: Path) -> None:
    Batches(row(tmp_path / "a", 129), 64, 1, 1, 0).close()
    with pytest.raises(DataError, match=r"128 training tokens are too few for block_size=64, which needs 129;"):
        Batches(row(tmp_path / "b", 128), 64, 1, 1, 0)
    assert len(list(data.val_batches(row(tmp_path / "c", 65, "val"), 64, 4))) == 1
    with pytest.raises(DataError, match=r"val split of .* has 64 tokens, but block_size=64 needs 65;"):
        list(data.val_batches(row(tmp_path / "d", 64, "val"), 64, 4))


# ---- batches ---------------------------------------------------------------------------------------------------------


def take(
    split: TokenData, batch_size: int, accum_steps: int, n_steps: int, rank: int = 0, world_size: int = 1,
    start: int = 0,
) -> torch.Tensor:
    """Inputs of n_steps steps of one rank, (n_steps, accum_steps * batch_size, 16); x and y are checked."""
    batches = Batches(split, 16, batch_size, accum_steps, 5, rank, world_size, "cpu", start)
    steps = []
    for _ in range(n_steps * accum_steps):
        x, y = batches.next()
        assert x.shape == y.shape == (batch_size, 16) and x.dtype == y.dtype == torch.int64
        assert x.is_contiguous() and y.is_contiguous() and torch.equal(x[:, 1:], y[:, :-1])
        steps.append(x)
    batches.close()
    assert not batches.thread.is_alive()
    return torch.stack(steps).view(n_steps, accum_steps * batch_size, 16)


def test_batches_hold_the_samples_of_the_sampler(tmp_path: Path) -> None:
    expected = write(tmp_path, random_documents(), shard_tokens=256)
    split = TokenData(tmp_path, "train")
    batches = Batches(split, 16, 3, 2, seed=9, start_step=4)
    assert batches.position(4) == 24
    starts = Sampler(split.n_tokens, 16, 9).start(np.arange(24, 24 + 60))
    for k in range(20):
        assert batches.epoch == (24 + 6 * (k // 2)) // batches.sampler.n_windows
        x, y = batches.next()
        for row_x, row_y, start in zip(x, y, starts[3 * k : 3 * k + 3], strict=True):
            assert row_x.tolist() == expected[start : start + 16].tolist()
            assert row_y.tolist() == expected[start + 1 : start + 17].tolist()
    batches.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_samples_and_their_order_do_not_depend_on_ranks_or_accumulation(tmp_path: Path, world_size: int) -> None:
    split = row(tmp_path, 16 * 101 + 5)  # 100 windows
    expected = take(split, batch_size=48, accum_steps=1, n_steps=5)
    for accum_steps in (1, 2, 4, 6):
        if 48 % (world_size * accum_steps):
            continue
        batch_size = 48 // world_size // accum_steps
        ranks = [take(split, batch_size, accum_steps, 5, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(ranks, dim=1), expected), (accum_steps,)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_epoch_is_every_window_once_over_all_ranks(tmp_path: Path, world_size: int) -> None:
    split = row(tmp_path, 16 * 97 + 1)  # 96 windows: 8 steps of 12
    ranks = [take(split, 12 // world_size, 1, 8, rank, world_size) for rank in range(world_size)]
    windows = torch.cat(ranks).view(-1, 16)
    assert len(windows) == 96 and len({tuple(window.tolist()) for window in windows}) == 96
    offset = Sampler(split.n_tokens, 16, 5).start(np.arange(96)).min()
    expected = split.window(int(offset), 96 * 16).reshape(96, 16)
    assert sorted(windows.tolist()) == sorted(expected.tolist())


def test_resume_at_every_step(tmp_path: Path) -> None:
    split = row(tmp_path, 500)
    whole = take(split, 2, 3, 30)
    for step in range(30):
        assert torch.equal(take(split, 2, 3, min(3, 30 - step), start=step), whole[step : step + 3])


def test_error_of_the_thread_surfaces(tmp_path: Path) -> None:
    write(tmp_path, [np.full(3000, 500), np.full(3000, 999)])
    edit(tmp_path, vocab_size=999)
    batches = Batches(TokenData(tmp_path, "train"), 16, 4, 1, seed=0)
    with pytest.raises(DataError, match=r"train_00000.npy holds token id 999 at offset \d+, but the tokenizer has"):
        for _ in range(100):
            batches.next()
    with pytest.raises(DataError):  # and again, instead of waiting for ever
        batches.next()
    batches.thread.join(timeout=10)
    assert not batches.thread.is_alive()
    batches.close()


def test_queue_is_bounded_and_close_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    batches = Batches(row(tmp_path, 500), 16, 4, 2, seed=0, ahead=3)
    deadline = time.monotonic() + 10
    while batches.queue.qsize() < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert batches.queue.qsize() == 3
    batches.close()
    batches.close()
    assert not batches.thread.is_alive() and threading.active_count() == before
    with pytest.raises(RuntimeError, match="after close"):
        batches.next()


@pytest.mark.parametrize("eval_steps", [0, 1, 3, 1000])
def test_validation_windows(tmp_path: Path, eval_steps: int) -> None:
    split = row(tmp_path, 16 * 41 + 9, "val")  # 41 windows
    tokens = split.window(0, split.n_tokens)
    whole = [(x.tolist(), y.tolist()) for x, y in data.val_batches(split, 16, 4, eval_steps)]
    windows = [window for x, _ in whole for window in x]
    places = [next(k for k in range(41) if tokens[16 * k : 16 * k + 16].tolist() == window) for window in windows]
    n = {0: 41, 1: 4, 3: 12, 1000: 41}[eval_steps]
    assert places == sorted(set(places)) and len(places) == n
    assert max(np.diff([*places, 41])) <= -(-41 // n)  # evenly spread
    targets = [target for _, y in whole for target in y]
    assert targets == [tokens[16 * k + 1 : 16 * k + 17].tolist() for k in places]
    for world_size in (2, 3, 4, 16):
        shares = [list(data.val_batches(split, 16, 4, eval_steps, rank, world_size)) for rank in range(world_size)]
        for i, batch in enumerate(whole):
            x, y = shares[i % world_size][i // world_size]
            assert (x.tolist(), y.tolist()) == batch
        assert sum(map(len, shares)) == len(whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_cuda(tmp_path: Path) -> None:
    split = row(tmp_path, 500)
    expected = take(split, 4, 2, 5).view(10, 4, 16)
    batches = Batches(split, 16, 4, 2, 5, device="cuda")
    for x in expected:
        found, _ = batches.next()
        assert found.is_cuda and torch.equal(found.cpu(), x)
    batches.close()
