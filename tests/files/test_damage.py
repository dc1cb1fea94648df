"""Damaged files: what is kept, dropped and lost adds up to what was there, and nothing garbled is kept.

encoding_battery.py does the same by hand, with real pages in many languages and encodings.
"""

import gzip
import json
import os
import pickle
import random
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

import prepare
from groundup.errors import UserError
from groundup.files import encodings, readers, records, streams
from groundup.files.paths import find_files
from groundup.files.records import Report
from groundup.files.row_formats import messages_of
from groundup.text.clean import clean

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
    assert (report.lost_bytes > 0) == bool(report.problems) and report.n_bytes >= len(raw)
    assert not report.lost_bytes or -3 < report.lost_bytes - len(rows[place]) < 5  # with the end of an array


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
    assert f"in 1 of 1 file: {tmp_path}/a.json ({len(rows[9]) - 1} bytes); errors.tsv says where; mend them" in said
    assert "60 read = 59 kept + 0 dropped + 1 lost" in said
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


MULTI_BYTE = "utf-8 gb18030 big5 shift_jis euc_jp euc_kr".split()


@pytest.mark.parametrize("encoding", SAMPLES)
def test_nothing_garbled_is_kept(tmp_path: Path, encoding: str) -> None:
    """A file of one line: whole, with every fifth byte missing, cut at every fifth."""
    text, path = SAMPLES[encoding], tmp_path / "a.txt"
    raw = text.encode(encoding)
    files = {"whole": [raw], "byte missing": [raw[:k] + raw[k + 1 :] for k in range(0, len(raw), 5)]}
    files["cut"] = [raw[:k] for k in range(1, len(raw), 5)]
    for fault, contents in files.items():
        for content in contents:
            path.write_bytes(content)
            report = Report()
            kept = [row.value for row in readers.read_documents(str(path), report=report)]
            assert len(kept) + report.problems.total() == 1 and report.n_bytes == len(content)
            assert report.lost_bytes == (0 if kept else len(content))
            for found in kept:
                # an ASCII character may be the byte that is missing; a text may be cut between characters
                one_less = found.isascii() or found in (text[:k] + text[k + 1 :] for k in range(len(text)))
                assert found == text or (text.startswith(found) if fault == "cut" else one_less), (fault, found)
        if fault == "whole":
            assert kept == [text] * (encoding in MULTI_BYTE)
            assert kept or "; give --encoding=" in report.places[0][3]
    path.write_bytes(raw)
    given = [row.value for row in readers.read_documents(str(path), encoding=encoding)]
    assert given == [text]


SHORT = ["一个人在家里看书", "他们说这个问题很重要。", "好好学习\n天天向上\n我们都来", "这是第1个"]


def test_a_small_file_of_everyday_chinese_in_gbk_is_read(tmp_path: Path) -> None:
    """Whole; with a byte missing anywhere its line is left out, or all of it."""
    path = tmp_path / "a.txt"
    for text in SHORT:
        raw = text.encode("gb18030")
        for place in (None, *range(len(raw))):
            path.write_bytes(raw if place is None else raw[:place] + raw[place + 1 :])
            kept = [row.value for row in readers.read_documents(str(path), txt_split="line")]
            lines = text.split("\n")
            if place is None:
                assert kept == (lines if text != SHORT[-1] else [])  # too short to tell
            less = {line[:k] + line[k + 1 :] for line in lines for k in range(len(line)) if line[k].isascii()}
            joined = {a + b for a, b in zip(lines, lines[1:], strict=False)}
            assert set(kept) <= {*lines, *less, *joined}, (text, place, kept)


PAGES = {  # lines of prose, most of them different
    "gb18030": [f"{SAMPLES['gb18030'][k:]}{SAMPLES['gb18030'][:k]}" for k in range(0, 40, 2)],
    "big5": [f"{SAMPLES['big5'][k:]}{SAMPLES['big5'][:k]}" for k in range(0, 40, 2)],
    "shift_jis": [f"{SAMPLES['shift_jis'][k:]}{SAMPLES['shift_jis'][:k]}" for k in range(0, 40, 2)],
    "euc_jp": [f"{SAMPLES['euc_jp'][k:]}{SAMPLES['euc_jp'][:k]}" for k in range(0, 40, 2)],
    "euc_kr": [f"{SAMPLES['euc_kr'][k:]}{SAMPLES['euc_kr'][:k]}" for k in range(0, 40, 2)],
    "latin-1": [f"{SAMPLES['latin-1']} {k}" for k in range(20)],
    "koi8-r": [f"{SAMPLES['koi8-r']} {k}" for k in range(20)],
    "iso2022_jp": [f"{SAMPLES['euc_jp']} {k}" for k in range(20)],
    "hz": [f"{SAMPLES['gb18030']} {k}" for k in range(20)],
    "utf-16": [f"{SAMPLES['gb18030']} {k}" for k in range(20)],
    "utf-16-le": [f"{SAMPLES['gb18030']} and {k}" for k in range(20)],
    "utf-32": [f"{SAMPLES['gb18030']} {k}" for k in range(20)],
}
ASCII_LINES = [f"An English line, number {k}." for k in range(20)]
READ = {*MULTI_BYTE, "utf-16", "utf-16-le", "utf-32"}


@pytest.mark.parametrize("packed_as", ["", ".gz"])
@pytest.mark.parametrize("encoding", PAGES)
def test_a_file_in_another_encoding_is_read_or_refused_whole(tmp_path: Path, encoding: str, packed_as: str) -> None:
    lines = [line for pair in zip(PAGES[encoding], ASCII_LINES, strict=True) for line in pair]
    if encoding == "gb18030":
        lines.insert(0, "\u04fd\u016e".encode().decode("gb18030"))  # valid UTF-8 by accident
    raw = "\n".join(lines).encode(encoding)
    path, report = tmp_path / f"a.txt{packed_as}", Report()
    path.write_bytes(packed(raw, packed_as))
    kept = [row.value for row in readers.read_documents(str(path), txt_split="line", report=report)]
    assert kept == (lines if encoding in READ else [])
    if encoding not in READ:
        assert report.problems.total() == 1 and report.lost_bytes == report.n_bytes == path.stat().st_size
        seven_bit = {"iso2022_jp": "iconv -f ISO-2022-JP-2 ", "hz": "iconv -f HZ "}
        assert seven_bit.get(encoding, "; give --encoding=") in report.places[0][3]


@pytest.mark.parametrize("given", ["utf-8", "UTF8", "ascii"])
def test_an_encoding_that_is_not_the_files_is_one_problem_with_advice(tmp_path: Path, given: str) -> None:
    path, lines = tmp_path / "a.txt", PAGES["gb18030"] * 4
    path.write_bytes("\n".join(lines).encode("gb18030"))
    report = readers.Report()
    codec = encodings.check_codec(given)
    assert not list(readers.read_documents(str(path), txt_split="line", encoding=codec, report=report))
    [(_, _, _, problem)] = report.places
    assert "leave encoding out" in problem and codec in problem
    path.write_bytes(b"\n".join([*(line.encode() for line in lines), b"\xff", b"\xff"]))
    report = readers.Report()
    read = readers.read_documents(str(path), txt_split="line", encoding="utf-8", report=report)
    assert [row.value for row in read] == lines and report.problems == {"bad_encoding": 2}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("encoding", ["gb18030", "big5", "shift_jis", "euc_jp", "euc_kr"])
def test_files_in_two_encodings_that_were_put_together(tmp_path: Path, encoding: str, first: bool) -> None:
    chinese = [*PAGES["gb18030"], "一", "中文", "caf\u00e9"]
    parts = ["\n".join(PAGES[encoding]).encode(encoding), "\n".join(chinese).encode("utf-8-sig")]
    lines = [PAGES[encoding], chinese]
    path, report = tmp_path / "a.txt", Report()
    path.write_bytes(b"\n".join(parts if first else parts[::-1]))
    kept = [row.value for row in readers.read_documents(str(path), txt_split="line", report=report)]
    assert kept == [line for part in (lines if first else lines[::-1]) for line in part]
    assert report.mended == {codec: len(PAGES[encoding]) for codec in report.mended} and report.mended


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030"])
@pytest.mark.parametrize("txt_split", ["blank", "line", "file"])
def test_a_bad_line_of_a_text_file_is_named_by_its_own_number(tmp_path: Path, encoding: str, txt_split: str) -> None:
    """Not by that of its paragraph, in whichever part of the file it is."""
    lines = [f"春江潮水连海平，海上明月共潮生，这是第{k}行。".encode(encoding) for k in range(60)]
    for k in range(9, 60, 10):
        lines[k] = b""  # paragraphs of nine lines
    bad = lines[34] = lines[34] + b"\xff" + "的".encode(encoding)  # line 35, in the paragraph from line 31 on
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n".join(lines))
    place = path.read_bytes().index(bad)
    for unit_bytes in (2**26, 300):
        report = Report()
        for begin, end in readers.work_units(str(path), txt_split, unit_bytes):
            list(readers.read_documents(str(path), "", txt_split, begin, end, report))
        (where, line, offset, detail), = report.places
        assert (where, line) == (str(path), 35) and detail.startswith("bad_encoding: "), detail
        position = len(bad) - len("的".encode(encoding)) - 1  # in its line
        assert place <= offset < place + len(bad) and f"in position {position}" in detail


def test_lines_of_a_paragraph_may_be_in_two_encodings(tmp_path: Path) -> None:
    pages = [PAGES["gb18030"][k : k + 4] for k in range(0, 20, 4)]
    paragraphs = ["\n".join([*page, "这一行是UTF-8的中文。"]) for page in pages]
    raw = [b"\n".join(line.encode("utf-8" if "UTF" in line else "gb18030") for line in text.split("\n"))
           for text in paragraphs]  # fmt: skip
    (tmp_path / "a.txt").write_bytes(b"\n\n".join(raw))
    for split, expected in (("blank", paragraphs), ("file", ["\n\n".join(paragraphs)])):
        kept = [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split=split)]
        assert kept == expected


@pytest.mark.parametrize("encoding", ["gb18030", "big5", "euc_kr"])
def test_few_accents_behind_another_encoding_are_no_chinese(tmp_path: Path, encoding: str) -> None:
    western = ["fünf Männer", "più vecchie", "é il primo", "il est là", "Все счастливые семьи", "Ü"] * 4
    raw = "\n".join(PAGES[encoding]).encode(encoding) + b"\n" + "\n".join(western).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    report = Report()
    kept = [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split="line", report=report)]
    assert set(kept) <= {*PAGES[encoding], *western} and len(kept) > len(PAGES[encoding]) + 15
    assert len(kept) + report.problems.total() == len(PAGES[encoding]) + len(western)


@pytest.mark.parametrize("word", ["pi\u00f9", "non \u00e8 o"])
@pytest.mark.parametrize("encoding", ["big5", "gb18030"])
def test_an_accent_at_the_end_of_a_word_or_alone_tells_utf8(tmp_path: Path, encoding: str, word: str) -> None:
    chinese = "\u9019\u662f\u4e00\u500b\u6587\u4ef6\uff0c\u7528\u4f86\u8a66\u9a57\n" * 60
    western = f"se uno {word} comandi"
    path = tmp_path / "x.txt"
    path.write_bytes(chinese.encode(encoding) + western.encode())
    rows = [row.value for row in readers.read_documents(str(path), txt_split="line")]
    assert rows == [*chinese.splitlines(), western]


def test_words_of_gbk_that_are_valid_utf8_are_chinese(tmp_path: Path) -> None:
    lines = [*PAGES["gb18030"], "\\fI系统\\fP, \\fI系统\\fP", "系统"]
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode("gb18030"))
    assert [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split="line")] == lines


def test_two_other_encodings_in_a_file_are_refused(tmp_path: Path) -> None:
    raw = "\n".join(PAGES["gb18030"] * 30).encode("gb18030") + b"\n" + "\n".join(PAGES["big5"] * 30).encode("big5")
    (tmp_path / "a.txt").write_bytes(raw)
    report = Report()
    assert not list(readers.read_documents(str(tmp_path / "a.txt"), report=report))
    assert "in several encodings: big5hkscs, gb18030" in report.places[0][3]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("encoding", ["utf-8", "gb18030", "big5", "shift_jis", "euc_jp", "euc_kr"])
def test_a_lost_byte_costs_its_line(tmp_path: Path, encoding: str, name: str) -> None:
    lines = [f"{line} {k}" for k, line in enumerate(PAGES.get(encoding, PAGES["gb18030"]))]
    rows = {"a.txt": "\n".join(lines)}
    rows["a.jsonl"] = "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in lines)
    rows["a.json"] = json.dumps([{"text": t} for t in lines], ensure_ascii=False)
    rows["a.csv"] = "\n".join(["text", *lines])
    raw, own = rows[name].encode(encoding), lines[7].encode(encoding)
    for place in range(raw.index(own), raw.index(own) + len(own) - 2, 23):
        (tmp_path / name).write_bytes(raw[:place] + raw[place + 1 :])
        report = Report()
        kept = [row.value for row in readers.read_documents(str(tmp_path / name), txt_split="line", report=report)]
        less = {lines[7][:k] + lines[7][k + 1 :] for k in range(len(lines[7])) if lines[7][k].isascii()}
        others = [line for line in kept if line not in less]
        assert others == lines[:7] + lines[8:], (place, set(others) - set(lines))
        assert len(kept) + report.problems["bad_encoding"] == len(lines)


@pytest.mark.parametrize("line", ["维他命C有益", "我们用\u2013和镕基", "2010\u20132015年", "每日5\u338e", "答\u2014好"])
def test_rare_characters_and_letters_of_the_text_are_kept(tmp_path: Path, line: str) -> None:
    for encoding, page in (("gb18030", PAGES["gb18030"]), ("gb18030", PAGES["big5"])):
        lines = [*page, line, f"再说{line}"]
        (tmp_path / "a.txt").write_bytes("\n".join(lines).encode(encoding))
        assert [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split="line")] == lines


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
@pytest.mark.parametrize("note", ["覺來[一]天下{二}平", "鳥[一作故]人", "覺[1]間[a]"])
def test_brackets_of_an_editor_are_kept_and_half_a_pair_is_not(tmp_path: Path, note: str, name: str) -> None:
    """A lost byte may leave one bracket of a text, but not a pair."""
    page = [*PAGES["big5"], "孟浩然詩集，春眠不覺曉，處處聞啼鳥。"]
    half = note.replace("]", "", 1)
    lines = [*page, note, half, *page]
    texts = lines if name == "a.txt" else [json.dumps({"text": line}, ensure_ascii=False) for line in lines]
    raw = "\n".join(texts) if name != "a.json" else "[" + ",\n".join(texts) + "]"
    (tmp_path / name).write_bytes(raw.encode("gb18030"))
    report = Report()
    read = readers.read_documents(str(tmp_path / name), txt_split="line", report=report)
    assert [row.value for row in read] == [line for line in lines if line != half]
    assert report.problems == {"bad_encoding": 1}


@pytest.mark.parametrize("rare", ["\U0001f604", "\u00f6", "\U0001f604\U0001f604 \u0219", "\u5803"])
def test_a_letter_beside_rare_characters_that_hold_none_is_kept(tmp_path: Path, rare: str) -> None:
    """An emoji has digits for second bytes in GB18030, so no lost byte of it leaves a letter alone."""
    line = f"DNA的 X射线，{rare}，第n行很好。"
    lines = [*PAGES["gb18030"], line, *PAGES["gb18030"]]
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode("gb18030"))
    assert [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split="line")] == lines
    raw, decoder = line.encode("gb18030"), encodings.Decoder(encodings.Verdict("gb18030"))
    for place in range(len(raw)):
        if raw[place] >= 0x80:
            with pytest.raises(UnicodeDecodeError):
                decoder.decode(raw[:place] + raw[place + 1 :])


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_utf16_a_surrogate_costs_a_line_and_a_lost_byte_the_rest(tmp_path: Path, encoding: str) -> None:
    lines = [f"{k}: {SAMPLES['gb18030']} \U0001f600" for k in range(300)]
    text = "\n".join(["\ufeff" + lines[0], *lines[1:100], lines[100] + "\ud83d", *lines[101:]])
    raw = text.encode(encoding, "surrogatepass")
    (tmp_path / "a.txt").write_bytes(raw)
    report = Report()
    kept = [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split="line", report=report)]
    assert kept == lines[:100] + lines[101:] and report.problems == {"bad_encoding": 1}
    place = raw.index("200: ".encode(encoding)) + 13
    (tmp_path / "a.txt").write_bytes(raw[:place] + raw[place + 1 :])
    report = Report()
    kept = [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split="line", report=report)]
    assert kept == lines[:100] + lines[101:200] and report.problems == {"bad_encoding": 2}
    lost = raw[raw.index("200: ".encode(encoding)) :]
    assert report.lost_bytes - (len(lines[100].encode()) + 4) == len(lost) - 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_lost_byte_of_shift_jis_may_leave_a_control_character(tmp_path: Path, name: str) -> None:
    lines = [*PAGES["shift_jis"][:9], "先読みは行われ、システムの他の動作", *PAGES["shift_jis"][9:]]
    rows = [json.dumps({"text": line}, ensure_ascii=False) for line in lines]
    raw = ("\n".join(rows) if name == "a.jsonl" else f"[{','.join(rows)}]").encode("shift_jis")
    raw = raw.replace("テム".encode("shift_jis"), b"\x83\x83\x80")
    (tmp_path / name).write_bytes(raw)
    report = Report()
    kept = [row.value for row in readers.read_documents(str(tmp_path / name), report=report)]
    assert kept == [*lines[:9], *lines[10:]] and report.problems == {"bad_encoding": 1}


def test_bytes_that_an_array_in_another_encoding_loses_are_those_of_the_file(tmp_path: Path) -> None:
    rows = [json.dumps({"text": line}, ensure_ascii=False) for line in PAGES["gb18030"]]
    rows[5] = rows[5].replace(":", ";")
    raw = ("[\n" + ",\n".join(rows) + "\n]\n").encode("gb18030")
    path, report = tmp_path / "a.json", Report()
    path.write_bytes(raw)
    kept = [row.value for row in readers.read_documents(str(path), report=report)]
    assert kept == PAGES["gb18030"][:5] + PAGES["gb18030"][6:] and report.n_bytes == len(raw)
    _, line, offset, _ = report.places[0]
    assert line == 7 and offset == raw.index(rows[5].encode("gb18030"))
    assert 0 <= report.lost_bytes - len(rows[5].encode("gb18030")) <= len(",\n")


def test_utf32_with_no_code_point_and_a_lost_byte_is_no_error(tmp_path: Path) -> None:
    raw = [f"Line {k}.\n".encode("utf-32") if not k else f"Line {k}.\n".encode("utf-32-le") for k in range(9)]
    raw[3] = raw[3][:10] + b"\x7f" + raw[3][11:]  # a code point beyond Unicode
    raw[6], raw[7] = raw[6][1:], raw[7][3:]
    path, report = tmp_path / "a.txt", Report()
    path.write_bytes(b"".join(raw))
    kept = [row.value for row in readers.read_documents(str(path), txt_split="line", report=report)]
    assert kept == [f"Line {k}." for k in range(3)] and report.problems == {"bad_encoding": 1}
    assert report.lost_bytes == sum(map(len, raw[3:]))


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
    assert find_files(str(data)) == [str(data / "a.txt")]
    assert f"{data}/old is left out: prepare.py made it" in capsys.readouterr().out
    assert find_files(f"{data}/0.txt,{data}/a.txt") == [str(data / "a.txt")]
    assert find_files(str(data / "old" / "train.jsonl"))
    with pytest.raises(UserError, match="made, not raw data; its texts are stored as tokens only"):
        find_files(str(data / "old"))


def test_of_a_directory_only_data_files_are_read_and_the_others_are_named(tmp_path: Path, capsys) -> None:
    top = tmp_path / "set"
    data = ["a.TXT", "b.jsonl.gz", "c.json", "d.csv", "deep/e.parquet", "f.ndjson.zst", "g.tsv", "h.jsonlines"]
    others = ["README.md", "readme.txt", "LICENSE", "LICENSE.txt.gz", "load.py", "deep/cat.png", "x.tmp", ".hidden"]
    for name in [*data, *others]:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(b"x")
    assert find_files(str(top)) == [str(top / name) for name in data]
    said = capsys.readouterr().out
    assert f"{top}: passed over 8 that are no data by name: " in said and all(name in said for name in others)
    assert find_files(f"{top}/*.md,{top}/load.py") == [f"{top}/README.md", f"{top}/load.py"]
    # of a table on a cluster, rows that are not written yet, and rows that are no longer there
    (top / "deep" / "_temporary" / "0").mkdir(parents=True)
    (top / "deep" / "_temporary" / "0" / "part-1.json").write_bytes(b"x")
    assert find_files(str(top)) == [str(top / name) for name in data]
    assert "passed over 9 that" in (said := capsys.readouterr().out) and "deep/_temporary/" in said
    assert "no folders that begin with _" in said
    for log in ("_delta_log", ".hoodie"):
        (tmp_path / log / log).mkdir(parents=True)
        (tmp_path / log / "part-0.parquet").write_bytes(b"x")
        with pytest.raises(UserError, match=f"a table whose {log} tells which rows count; export"):
            find_files(str(tmp_path / log))
    (top / "a.TXT").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(UserError, match="a.TXT: it is a pointer of Git LFS, not the file; run git lfs pull"):
        list(readers.read_documents(str(top / "a.TXT")))


def test_names_that_are_not_utf8_or_break_lines(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"\xd6\xd0\xce\xc4.jsonl", b"tab\tline\n.jsonl"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"".join(planted("jsonl")) + b"bad\n")
    assert status(tmp_path, "x.txt", b"", ("input", str(folder))) == 1
    rows = [line.split("\t") for line in (tmp_path / "out" / "errors.tsv").read_text("utf-8").splitlines()]
    assert [row[0] for row in rows[1:]] == [f"{folder}/tab\\tline\\n.jsonl", f"{folder}/\\xd6\\xd0\\xce\\xc4.jsonl"]
    assert {len(row) for row in rows} == {5}


def test_cleaning_keeps_words_apart_and_counts_what_it_adds(tmp_path: Path, capsys) -> None:
    assert clean("one\ftwo\x0bthree\x1efour\0five", white_space=False) == "one\ntwo\nthree\nfourfive"
    raw = "\n".join(f'{{"text": "第{i}句很长很长的话,又是一句话."}}' for i in range(50)).encode()
    assert status(tmp_path, "a.jsonl", raw, ("rules", "punctuation=on"), ("near", 0.0)) == 0
    assert "- 100 added by cleaning" in capsys.readouterr().out


def test_kana_tell_japanese_whatever_the_detector_says_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of Shift-JIS below a long English head are valid GB18030, too: charset-normalizer takes them for that."""
    japanese = "このファイルの設定を読み込みます。\n" * 5
    chinese = "这个文件的设置会被读取，然后使用。\n" * 5
    monkeypatch.setattr(encodings, "from_bytes", lambda raw: [SimpleNamespace(encoding="gb18030")])
    assert encodings.name_of(japanese.encode("cp932")) == ("cp932", "")
    assert encodings.name_of(japanese.encode("euc_jp")) == ("euc_jis_2004", "")
    assert encodings.name_of(chinese.encode("gb18030")) == ("gb18030", "")


@pytest.mark.parametrize(
    ("line", "letter", "byte"), [("剂量为每天〇mg/(kg﹒d)体重。", "d", 21), ("镕基后h内服用药物", "h", 7)]
)
def test_what_looks_like_a_lost_byte_is_said_as_that(tmp_path: Path, line: str, letter: str, byte: int) -> None:
    """Python's words were that a byte cannot be decoded, which is not so: the heuristic may be wrong."""
    text = "这是一个普通的中文句子，用来说明文件的编码。\n" * 30 + line + "\n"
    (tmp_path / "a.txt").write_bytes(text.encode("gb18030"))
    report = Report()
    rows = [row.value for row in readers.read_documents(str(tmp_path / "a.txt"), txt_split="line", report=report)]
    ((_, number, _, why),) = report.places
    where = f"it looks as if a byte was lost before '{letter}', byte {byte} of the line"
    assert number == 31 and len(rows) == 30
    assert why == f"bad_encoding: {where}; if the line is right, convert the file: iconv -f gb18030 -t UTF-8"
    with pytest.raises(encodings.LostByte) as raised:  # which a process may hand to another
        encodings.Decoder(encodings.Verdict("gb18030")).decode(line.encode("gb18030"))
    error = raised.value
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.args == error.args
