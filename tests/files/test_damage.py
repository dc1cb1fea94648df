"""Damaged files: what is kept, dropped and lost adds up to what was there, and nothing garbled is kept."""

import gzip
import json
import os
import random
import zlib
from pathlib import Path

import pytest

import prepare
from groundup.errors import UserError
from groundup.files import readers, records, streams
from groundup.files.readers import Report
from groundup.files.row_formats import messages_of
from groundup.text.cleaning import CURATED, clean

N = 60  # records of a planted file
WORDS = "the quick brown fox jumps over a lazy dog while nobody in the garden looks 春 江 潮 水 连 海 平".split()
HEADS = {"csv": "id,text\n", "tsv": "id\ttext\n", "json": "[\n"}


def planted(kind: str) -> list[bytes]:
    """The records of a file as they stand in it."""
    rng = random.Random(1)
    texts = [f"Record {i}: {' '.join(rng.choices(WORDS, k=60))}." for i in range(N)]
    if kind in ("csv", "tsv"):
        return [f"{i}{',' if kind == 'csv' else chr(9)}{text}\n".encode() for i, text in enumerate(texts)]
    if kind == "txt":
        return [f"{text}\n".encode() for text in texts]
    rows = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    return [row + (b",\n" if kind == "json" and i < N - 1 else b"\n") for i, row in enumerate(rows)]


def faulty(kind: str, fault: str, record: bytes) -> bytes:
    """A record with a fault: a bad byte, a stray comma or quote, or the loss of its second half."""
    half = len(record) // 2
    if fault == "byte":
        return record[:half] + b"\xff" + record[half:]
    if fault == "cut":
        return record[:half] + b"\n"
    return record.replace(b'"}', b'",}') if kind in ("json", "jsonl") else record.replace(b"Record", b'"Record', 1)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("place", [0, N // 2, N - 1])
@pytest.mark.parametrize("fault", ["byte", "syntax", "cut"])
@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "csv", "tsv"])
def test_a_fault_costs_one_record(tmp_path: Path, kind: str, fault: str, place: int, suffix: str) -> None:
    rows = planted(kind)
    rows[place] = faulty(kind, fault, rows[place])
    raw = HEADS.get(kind, "").encode() + b"".join(rows) + (b"]\n" if kind == "json" else b"")
    path, report = tmp_path / f"a.{kind}{suffix}", Report()
    path.write_bytes(packed(raw, suffix))
    kept = [row.value for row in readers.read_documents(str(path), txt_split="line", text_key="text", report=report)]
    numbers = [int(text.removeprefix('"').split(":")[0].split()[1]) for text in kept]
    assert numbers == sorted(set(numbers)) and N - 1 <= len(kept)
    # half a line of text is text, half a row of CSV is one whose field ends early; a quote is a character in TSV
    whole = fault == "cut" and kind in ("txt", "csv", "tsv") or fault == "syntax" and kind in ("txt", "tsv")
    assert len(kept) == (N if whole else N - 1)
    assert len(kept) + report.problems.total() == N
    damaged = (kind == "json" and fault != "byte") or (kind == "csv" and fault == "syntax" and place < N - 1)
    assert (report.lost_bytes > 0) == damaged


def packed(raw: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(raw)
    return gzip.compress(raw, mtime=0) if suffix else raw


@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_bad_row_of_parquet_costs_one_record(tmp_path: Path, place: int) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    texts = pa.array([f"Record {i}: plain".encode() + b"\xff" * (i == place) for i in range(10)], pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 10, texts.buffers())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    report = Report()
    kept = list(readers.read_documents(str(tmp_path / "a.parquet"), report=report))
    assert [row.offset for row in kept] == [i for i in range(10) if i != place] and report.problems.total() == 1


SETTINGS = {key: v for key, v in vars(prepare).items() if isinstance(v, bool | int | float | str) and key.islower()}


def status(tmp_path: Path, name: str, raw: bytes, *options: tuple[str, object]) -> int:
    """The exit status of prepare.py on one file; its output is in tmp_path/out."""
    (tmp_path / name).write_bytes(raw)
    config = SETTINGS | {"input": str(tmp_path / name), "out_dir": str(tmp_path / "out")}
    return prepare.main(config | {"vocab_size": 384, "workers": 1, "overwrite": True} | dict(options))


def test_a_damaged_file_ends_in_status_1_unless_the_loss_is_accepted(tmp_path: Path, capsys) -> None:
    rows = planted("json")
    rows[9] = faulty("json", "syntax", rows[9])
    raw = b"[" + b"".join(rows) + b"]"
    assert status(tmp_path, "a.json", raw) == 1
    said = capsys.readouterr().out
    assert f"files are damaged: {tmp_path}/a.json ({len(rows[9]) - 1} bytes lost); mend them, or accept" in said
    assert "60 read = 59 kept + 1 dropped" in said
    fraction = float(said.split("--max_bad_fraction=")[1].split()[0])
    assert status(tmp_path, "a.json", raw, ("max_bad_fraction", fraction)) == 0
    assert status(tmp_path, "a.json", raw, ("max_bad_fraction", fraction / 100)) == 1
    good = b"[" + b"".join(planted("json")) + b"]"
    assert status(tmp_path, "a.json", good) == 0 and status(tmp_path, "a.json", good[:-2]) == 1


# ---- encodings --------------------------------------------------------------------------------------------

SAMPLES = {
    "utf-8": "人生就像一场旅行，不必在乎目的地，在乎的是沿途的风景以及看风景的心情。让我们一起学习机器学习的知识。",
    "gb18030": "人生就像一场旅行，不必在乎目的地，在乎的是沿途的风景以及看风景的心情。让我们一起学习机器学习的知识。",
    "big5": "人生就像一場旅行，不必在乎目的地，在乎的是沿途的風景以及看風景的心情。讓我們一起學習機器學習的知識。",
    "shift_jis": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。薄暗いじめじめした所で泣いていた。",
    "euc_jp": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。薄暗いじめじめした所で泣いていた。",
    "euc_kr": "안녕하세요. 오늘은 날씨가 매우 좋습니다. 우리는 함께 공원에 가서 산책을 하고 점심을 먹었습니다.",
    "latin-1": "Les élèves étaient très fatigués après la journée passée à l'école, où l'été s'achève déjà.",
    "koi8-r": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
}


@pytest.mark.parametrize("encoding", SAMPLES)
def test_nothing_garbled_is_kept(tmp_path: Path, encoding: str) -> None:
    text, path = SAMPLES[encoding], tmp_path / "a.txt"
    raw = text.encode(encoding)
    files = {"whole": [raw], "byte missing": [raw[:k] + raw[k + 1 :] for k in range(len(raw))]}
    files["cut"] = [raw[:k] for k in range(1, len(raw))]
    for fault, contents in files.items():
        for content in contents:
            path.write_bytes(content)
            report = Report()
            kept = [row.value for row in readers.read_documents(str(path), report=report)]
            assert len(kept) + report.problems.total() == 1
            for found in kept:
                # an ASCII character may be the byte that is missing; a text may be cut between characters
                one_less = found.isascii() or found in (text[:k] + text[k + 1 :] for k in range(len(text)))
                assert found == text or (text.startswith(found) if fault == "cut" else one_less), (fault, found)
        if fault == "whole":
            assert kept == [text] * (encoding in ("utf-8", "gb18030"))
    path.write_bytes(raw)
    report = Report()
    if not list(readers.read_documents(str(path), report=report)):
        assert "convert the file: iconv -f" in report.places[0][3]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_simplified_gb18030_may_hold_characters_that_end_in_a_letter(tmp_path: Path, name: str) -> None:
    """Symbols, before a letter too, rare names, a traditional line. Three lost bytes are seen: one before a word, and
    two after which only wrong characters run to the next ASCII, a letter."""
    own = ["朱镕基说，2010–2015年要学习。", "人生讓我們一起學習機器學習。", "王玥\t和李珺、张祎在学习", "读书之镕"]
    own += ["由Cauchy–Schwarz不等式", "从A–Z排列，⊿ABC中", "每日5㎎Na，100㎡A座", "李钰和王玥、张珺"]
    own += ["看《スーパーマン》"]
    base = SAMPLES["gb18030"]
    lines = [*(f"{base[k:]}{base[:k]}" for k in range(len(base))), *own]
    damaged = [(f"我们用Python学习{base}", 5), (f"{base}机器学习A。", 30), (f"知识{base}学习HPV", 7)]
    texts = lines + [text for text, _ in damaged]
    if name != "a.txt":
        texts = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    raws = [text.encode("gb18030") for text in texts]
    shift = raws[0].index(lines[0].encode("gb18030"))
    for i, (_, place) in enumerate(damaged, len(lines)):
        raws[i] = raws[i][: place + shift] + raws[i][place + shift + 1 :]
        raws[i].decode("gb18030")  # decoding alone shows nothing
    (tmp_path / name).write_bytes(b"[" + b",".join(raws) + b"]" if name == "a.json" else b"\n".join(raws))
    report = Report()
    kept = [row.value for row in readers.read_documents(str(tmp_path / name), txt_split="line", report=report)]
    assert kept == lines and report.problems == {"bad_encoding": 3}


def test_gb18030_is_known_beside_other_alphabets_and_lines(tmp_path: Path) -> None:
    text = f"{SAMPLES['gb18030']} Ряд Фурье и ряд Тейлора, α и Ω\n├── a\n└── b"
    (tmp_path / "a.txt").write_text(text, encoding="gb18030")
    assert [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), report=Report())] == [text]


@pytest.mark.parametrize("every, own", [(200, "維他命C很重要，維他命C也好吃。"), (19, ""), (3, "")])
def test_a_byte_missing_in_traditional_gb18030_is_seen(tmp_path: Path, every: int, own: str) -> None:
    """Half its characters end in the byte of an ASCII letter. Letters that the text has of its own are no fault, and
    much damage does not pass as the text's own letters."""
    base = SAMPLES["big5"] + own
    lines = [f"{base[k:]}{base[:k]}" for k in range(len(base))] * 20
    raws = [line.encode("gb18030") for line in lines]
    damaged = range(0, len(raws), every)
    for k, i in enumerate(damaged):
        place = 11 * k % len(raws[i])
        raws[i] = raws[i][:place] + raws[i][place + 1 :]
    (tmp_path / "a.txt").write_bytes(b"\n".join(raws))
    report = Report()
    kept = [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split="line", report=report)]
    assert kept == [line for i, line in enumerate(lines) if i not in damaged]
    assert report.problems == {"bad_encoding": len(damaged)}


OF_THE_TEXT = [
    "簪玉步河堤，妖韶援綠{𥫗/戢}。", "憐芳若兮{臨/手}中洲。", "[甲{乙}丙]霹靂", "{𥫗}",
    "a{𠮷b", "援綠{𠮷野", "A. 步河堤 (B)",
]  # fmt: skip
OF_DAMAGE = ["援綠{河堤", "[淅]瀝[河堤", "{臨/手}步W堤"]


@pytest.mark.parametrize("line", OF_THE_TEXT + OF_DAMAGE)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_letters_of_traditional_gb18030_that_no_lost_byte_makes_are_kept(tmp_path: Path, line: str, name: str) -> None:
    """Brackets that pair, and letters beside a character of four bytes. Others are what is left of a character."""
    base = SAMPLES["big5"]
    lines = [*(f"{base[k:]}{base[:k]}" for k in range(len(base))), line]
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in lines]
    texts = {"a.txt": "\n".join(lines), "a.jsonl": "\n".join(rows), "a.json": f"[{','.join(rows)}]"}
    (tmp_path / name).write_bytes(texts[name].encode("gb18030"))
    report = Report()
    kept = [row.value for row in readers.read_documents(str(tmp_path / name), txt_split="line", report=report)]
    assert kept == (lines if line in OF_THE_TEXT else lines[:-1])
    assert report.problems == ({} if line in OF_THE_TEXT else {"bad_encoding": 1})


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_the_encoding_is_one_for_the_file(tmp_path: Path, name: str) -> None:
    texts = [f"{i} {SAMPLES['gb18030']}" for i in range(20)]
    rows = {"a.jsonl": "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts)}
    rows |= {"a.json": json.dumps([{"text": t} for t in texts], ensure_ascii=False)}
    rows |= {"a.csv": "\n".join(["text", *texts])}
    for encoding in ("utf-8", "gb18030"):
        raw = rows[name].encode(encoding)
        place = raw.index(texts[7].encode(encoding)) + 33
        (tmp_path / name).write_bytes(raw[:place] + raw[place + 1 :])
        report = Report()
        kept = [row.value for row in readers.read_documents(str(tmp_path / name), report=report)]
        assert kept == texts[:7] + texts[8:] and report.problems == {"bad_encoding": 1}
        assert report.mended == ({"gb18030": 19} if encoding == "gb18030" else {})


# ---- sizes, lines of arrays, directories, names ------------------------------------------------------------


def test_a_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_BYTES", 2**14)
    monkeypatch.setattr(streams, "READ_BYTES", 2**12)
    good, bomb = {"text": "a good document"}, {"text": "a" * 2**18}
    rows = [json.dumps(row) for row in (good, bomb, good)]
    for name, text in {"a.jsonl": "\n".join(rows), "a.json": f"[{','.join(rows)}]"}.items():
        (tmp_path / f"{name}.gz").write_bytes(zlib.compress(text.encode(), 9, 31))
        report = Report()
        kept = [row.value for row in readers.read_documents(str(tmp_path / f"{name}.gz"), report=report)]
        assert kept == [good["text"]] * 2 and report.problems == {"too_long": 1}, name


def test_an_open_quote_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_CSV_LINES", 10)
    rows = ["text,n", *(f"row {i},{i}" for i in range(30)), '"two\nlines",30', '"open,31']
    rows += [f"row {i},1" for i in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(rows), "utf-8")
    report = Report()
    kept = [row.value for row in readers.read_documents(str(tmp_path / "a.csv"), report=report)]
    assert len(kept) == 71 and kept[30] == "two\nlines" and report.problems == {"bad_csv": 1} and report.lost_bytes == 9


def test_a_line_may_hold_an_array(tmp_path: Path) -> None:
    """nanochat's CustomJSON; LLaMA-Factory's parts of a content have "value"."""
    talks = [[{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": f"a {i}"}] for i in range(9)]
    talks.append([talks[0][0], {"role": "assistant", "content": [{"type": "text", "value": "a 0"}]}])
    lines = "\n".join(map(json.dumps, talks))
    files = {"a.jsonl": lines, "a.json": lines, "b.json": json.dumps(talks), "b.jsonl": json.dumps(talks, indent=1)}
    for name, raw in files.items():
        (tmp_path / name).write_text(raw, "utf-8")
        report = Report(strict=True)
        found = [row.value for row in readers.read_rows(str(tmp_path / name), messages_of, report=report)]
        assert found == [*talks[:9], talks[0]], name
    (tmp_path / "one.jsonl").write_text(json.dumps(talks[0]), "utf-8")
    found = [row.value for row in readers.read_rows(str(tmp_path / "one.jsonl"), messages_of)]
    assert found == [talks[0]]
    report = Report()
    assert not list(readers.read_documents(str(tmp_path / "a.jsonl"), report=report))
    assert "of kind='chat'" in report.places[0][3]


def test_a_directory_is_read_without_prepared_ones_and_links_to_what_is_in_it(tmp_path: Path, capsys) -> None:
    data = tmp_path / "data"
    (data / "old").mkdir(parents=True)
    (data / "a.txt").write_text("a", "utf-8")
    (data / "0.txt").symlink_to(data / "a.txt")
    for name in ("manifest.json", "report.md", "dropped.tsv", "train.jsonl"):
        (data / "old" / name).write_text("{}", "utf-8")
    assert readers.find_files(str(data)) == [str(data / "a.txt")]
    assert f"{data}/old is left out: prepare.py made it" in capsys.readouterr().out
    assert readers.find_files(f"{data}/0.txt,{data}/a.txt") == [str(data / "a.txt")]
    assert readers.find_files(str(data / "old" / "train.jsonl"))
    with pytest.raises(UserError, match="is a directory that prepare.py made, not raw data; give"):
        readers.find_files(str(data / "old"))


def test_of_a_directory_only_data_files_are_read_and_the_others_are_named(tmp_path: Path, capsys) -> None:
    top = tmp_path / "set"
    data = ["a.TXT", "b.jsonl.gz", "c.json", "d.csv", "deep/e.parquet", "f.ndjson.zst", "g.tsv"]
    others = ["README.md", "readme.txt", "LICENSE", "LICENSE.txt.gz", "load.py", "deep/cat.png", "x.tmp", ".hidden"]
    for name in [*data, *others]:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(b"x")
    assert readers.find_files(str(top)) == [str(top / name) for name in data]
    said = capsys.readouterr().out
    assert f"{top}: passed over 8 that are no data by name: " in said and all(name in said for name in others)
    assert readers.find_files(f"{top}/*.md,{top}/load.py") == [f"{top}/README.md", f"{top}/load.py"]
    (top / "a.TXT").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(UserError, match="a.TXT is a pointer of Git LFS, not the file; run git lfs pull"):
        list(readers.read_documents(str(top / "a.TXT")))


def test_names_that_are_not_utf8_or_break_lines(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"\xd6\xd0\xce\xc4.jsonl", b"tab\tline\n.jsonl"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"".join(planted("jsonl")) + b"bad\n")
    assert status(tmp_path, "x.txt", b"", ("input", str(folder))) == 0
    rows = [line.split("\t") for line in (tmp_path / "out" / "errors.tsv").read_text("utf-8").splitlines()]
    assert [row[0] for row in rows[1:]] == [f"{folder}/tab\\tline\\n.jsonl", f"{folder}/\\xd6\\xd0\\xce\\xc4.jsonl"]
    assert {len(row) for row in rows} == {5}


def test_cleaning_keeps_words_apart_and_counts_what_it_adds(tmp_path: Path, capsys) -> None:
    assert clean("one\ftwo\x0bthree\x1efour\0five", CURATED) == "one\ntwo\nthree\nfourfive"
    raw = "\n".join(f'{{"text": "第{i}句很长很长的话,又是一句话."}}' for i in range(50)).encode()
    assert status(tmp_path, "a.jsonl", raw, ("punctuation", True), ("near", 0.0)) == 0
    assert "- 100 added by cleaning" in capsys.readouterr().out
