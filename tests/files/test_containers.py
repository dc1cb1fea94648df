"""Files that are not what their names say, or that several programs write differently."""

import gzip
import io
import json
import lzma
import os
import pickle
import random
import sqlite3
import tarfile
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from groundup.errors import UserError
from groundup.files import readers, records, streams
from groundup.files.encodings import check_codec
from groundup.files.paths import find_files
from groundup.files.records import Report
from groundup.text import unit
from groundup.tokens.mixture import parse_weights


def read(path: Path, report: Report | None = None, **options) -> list[str]:
    found = readers.read_documents(str(path), report=report or Report(strict=True), **options)
    return [row.value for row in found]


# ---- what is no text ---------------------------------------------------------------------------


def tar_of(mode: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for k in range(3):
            raw = f"Text {k} of the archive.\n".encode()
            info = tarfile.TarInfo(f"{k}.txt")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return out.getvalue()


def zip_of(how: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        archive.writestr("a.txt", "A text that is stored as it is.\n" * 3)
    return out.getvalue()


def npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(["a text", "another"]))
    return out.getvalue()


def sqlite(folder: Path) -> bytes:
    with sqlite3.connect(folder / "x.db") as base:
        base.execute("create table texts (text)")
        base.execute("insert into texts values ('a text in a table')")
    return (folder / "x.db").read_bytes()


def arrow() -> bytes:
    pa = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    table = pa.table({"text": ["a text in a column"] * 3})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write(table)
    return out.getvalue()


ZIPPED = b"PK\x03\x04" + b"\1" * 26 + b"docProps/app.xml" + b"\0" * 99
OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 99
OTHERS = {
    "a.tar": (lambda _: tar_of("w"), "a tar archive; unpack it: tar -xf "),
    "a.tar.gz": (lambda _: tar_of("w:gz"), "a tar archive; unpack it: tar -xzf "),
    "a.tgz": (lambda _: tar_of("w:gz"), "tar -xzf "),
    "a.tar.xz": (lambda _: tar_of("w:xz"), "tar -xJf "),
    "stored.zip": (lambda _: zip_of(zipfile.ZIP_STORED), "a zip archive; unpack it: unzip "),
    "packed.zip": (lambda _: zip_of(zipfile.ZIP_DEFLATED), "a zip archive; unpack it: unzip "),
    "a.npy": (lambda _: npy(), "a NumPy array; write its texts as JSON lines"),
    "a.arrow": (lambda _: arrow(), "an Arrow file; write it as parquet"),
    "a.sqlite": (sqlite, "an SQLite database; export a table: sqlite3"),
    "a.pkl": (lambda _: pickle.dumps(["a text", "another"] * 9), "a Python pickle"),
    "a.7z": (lambda _: b"7z\xbc\xaf\x27\x1c" + b"text\n" * 9, "a 7z archive; unpack it: 7z x "),
    "a.pdf": (lambda _: b"%PDF-1.7\n" + b"text\n" * 9, "a PDF; extract its text: pdftotext "),
    "a.warc.gz": (
        lambda _: gzip.compress(b"WARC/1.0\r\nWARC-Type: conversion\r\n"),
        "a web archive",
    ),
    "wiki_00": (lambda _: b'<doc id="1" url="u" title="T">\nT\n</doc>\n', "run it with --json"),
    "a.docx": (lambda _: b"PK\x03\x04" + b"\1" * 26 + b"[Content_Types].xml", "pandoc -t plain"),
    "a.epub": (lambda _: b"PK\x03\x04" + b"\1" * 26 + b"mimetypeapplication", "pandoc -t plain"),
    "made_by_openpyxl.xlsx": (lambda _: ZIPPED, "a spreadsheet; save it as CSV: libreoffice "),
    "a.xlsm": (lambda _: ZIPPED, "a spreadsheet; save it as CSV: "),
    "a.XLS": (lambda _: OLD_OFFICE, "a spreadsheet; save it as CSV: "),
    "a.ods": (lambda _: b"PK\x03\x04" + b"\1" * 26 + b"mimetype", "a spreadsheet; save it as CSV"),
    "a.numbers": (lambda _: ZIPPED, "a spreadsheet; save it as CSV: "),
    "a.doc": (lambda _: OLD_OFFICE, "a document; write it as text: libreoffice "),
    "a.odt": (lambda _: b"PK\x03\x04" + b"\1" * 26 + b"mimetype", "pandoc -t plain "),
    "other.docx": (lambda _: ZIPPED, "a document; write it as text: pandoc -t plain "),
    "a.pptx": (lambda _: ZIPPED, "slides; save them as PDF: libreoffice "),
    "a.ppt": (lambda _: OLD_OFFICE, "slides; save them as PDF: libreoffice "),
    "old_without_a_suffix": (lambda _: OLD_OFFICE, "an old file of Office; write it as text: "),
    "a.rtf": (lambda _: b"{\\rtf1\\ansi a text}", "pandoc -t plain"),
    "a.txt.lz4": (lambda _: b"\x04\x22\x4d\x18" + b"text", "packed with lz4; unpack it: lz4 -d "),
    "a.jsonl.gz": (lambda _: gzip.compress(gzip.compress(b"text")), "packed twice; unpack it once"),
    "a.avro": (lambda _: b"Obj\x01\x02\x16avro.codec\x0edeflate" + b"text\n" * 9, "an Avro file"),
    "random.bin": (
        lambda _: random.Random(1).randbytes(5000),
        "is NUL, and the file is not UTF-16",
    ),
    "nul.txt": (lambda _: b"a line\nand a \0 byte\n", "not text: byte 13 is NUL"),
    "a.txt": (lambda _: tar_of("w"), "a tar archive"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make, said = OTHERS[name]
    raw = make(tmp_path)
    path, report = tmp_path / name, Report()
    path.write_bytes(raw)
    assert read(path, report) == [] and report.problems == {"not_text": 1}
    assert said in report.places[0][3]
    assert report.lost_bytes == report.n_bytes == len(raw)
    assert readers.work_units(str(path), "line", 10) == [(0, None)]


@pytest.mark.parametrize("name", ["table.xls", "notes.doc", "slides.key", "table.numbers"])
def test_text_under_the_name_of_a_document_is_read(tmp_path: Path, name: str) -> None:
    """Programs write tables and web pages as .xls and .doc."""
    (tmp_path / name).write_text("a\tb\n1\t2\n")
    assert read(tmp_path / name, Report())


# ---- compression -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_members", [1, 3])
def test_nothing_of_a_gzip_member_with_a_wrong_checksum_is_kept(
    tmp_path: Path, n_members: int
) -> None:
    lines = [
        json.dumps({"text": f"document {k} of member {m}"})
        for m in range(n_members)
        for k in range(200)
    ]
    members = [gzip.compress("".join(f"{line}\n" for line in lines[200 * m : 200 * m + 200]).encode(), mtime=0)
               for m in range(n_members)]  # fmt: skip
    last = bytearray(members[-1])
    last[-6] ^= 1  # the checksum: what is unpacked looks right
    path, report = tmp_path / "a.jsonl.gz", Report()
    path.write_bytes(b"".join(members[:-1]) + last)
    found = read(path, report)
    assert found == [json.loads(line)["text"] for line in lines[: 200 * (n_members - 1)]]
    assert report.problems == {"truncated_file": 1} and "can be trusted" in report.places[0][3]
    assert report.lost_bytes > 0
    path.write_bytes(b"".join(members)[:-30])  # cut: what there is of it is read
    report = Report()
    assert len(read(path, report)) > 200 * n_members - 60 and report.problems == {
        "truncated_file": 1
    }


def test_xz_that_needs_much_memory_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(streams, "XZ_MEMORY", 2**20)  # the default preset needs 8 MiB
    path, report = tmp_path / "a.txt.xz", Report()
    path.write_bytes(lzma.compress(b"A text.\n" * 99))
    assert read(path, report) == [] and report.problems == {"truncated_file": 1}
    assert "takes more memory than there is or may be used" in report.places[0][3]
    assert "unpack it yourself, and give the result: xz -d FILE" in report.places[0][3]


def test_a_long_window_of_zstd_is_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(
        compression_params=parameters
    ).compressobj()  # no size in its head
    raw = packer.compress(b'{"text": "a document"}\n' * 9) + packer.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(raw)
    assert read(tmp_path / "a.jsonl.zst") == ["a document"] * 9


def test_a_parquet_bomb_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from groundup.files import parquet

    monkeypatch.setattr(parquet, "BOMB_BYTES", 2**20)
    pq.write_table(
        pa.table({"text": ["x" * 2**16] * 1500}), tmp_path / "a.parquet", compression="zstd"
    )
    report = Report()
    assert len(read(tmp_path / "a.parquet", report)) < 500
    assert report.problems == {"truncated_file": 1} and "like a bomb" in report.places[0][3]


def test_dates_beyond_python_do_not_matter(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    far = pa.array([2**62, 5], pa.int64()).view(pa.timestamp("us"))
    zone = pa.array([1, 2], pa.int64()).view(pa.timestamp("us", tz="Mars/Olympus"))
    days = pa.array([10**8, 1], pa.int32()).view(pa.date32())
    table = pa.table({
        "question": ["a", "b"],
        "answer": ["c", "d"],
        "at": far,
        "zone": zone,
        "day": days,
    })
    pq.write_table(table, tmp_path / "a.parquet")
    rows = list(records.read_records(str(tmp_path / "a.parquet")))
    assert [(row.problem, row.value["question"], row.value["answer"]) for row in rows] == [
        ("", "a", "c"),
        ("", "b", "d"),
    ]
    assert rows[0].value["at"] == 2**62 and rows[0].value["day"] == 10**8


# ---- JSON --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a"}{"text": "b"} {"text": "c"}\n',
        '{"text": "a"}\n{"text": "b"}{"text": "c"}\n',
        '{ "text":\n "a" }\n{ "text":\n "b" }\n{"text": "c"}',
        '{\n "text": "a"\n}\n{\n "text": "b"\n}\n{\n "text": "c"\n}\n',
        '[{"text": "a"}, {"text": "b"}]\n[{"text": "c"}]\n',
        '[\n{"text": "a"}\n]\n\ufeff[\n{"text": "b"},\n{"text": "c"}\n]\n',
        '\ufeff{"text": "a"}\n\ufeff{"text": "b"}\n{"text": "c"}\n',
        '\x1e{"text": "a"}\n\x1e{"text": "b"}\n\x1e{"text": "c"}\n',
        '\x1e{"text":\n "a"}\n\x1e{"text":\n "b"}\n\x1e{"text":\n "c"}\n',
        '{"text": "a"},\n{"text": "b"},\n{"text": "c"}\n',
    ],
)
def test_values_one_after_the_other(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    assert read(tmp_path / name) == ["a", "b", "c"]


def test_many_values_on_a_line_take_linear_time() -> None:
    def seconds(n: int) -> float:
        line = records.Record('{"text": "a b"}' * n, 1, 0)
        start = time.process_time()
        assert sum(not row.problem for row in records.jsonl_records(iter([line]))) == n
        return time.process_time() - start

    assert seconds(100_000) < 40 * max(seconds(10_000), 0.005)


@pytest.mark.parametrize("depth", [90, 500, 900, 5000])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_row_nested_too_deep_costs_itself(tmp_path: Path, name: str, depth: int) -> None:
    deep = '{"text": "deep", "more": ' + '{"a": [' * (depth // 2) + "1" + "]}" * (depth // 2) + "}"
    rows = ['{"text": "a"}', deep, '{"text": "b"}']
    (tmp_path / name).write_text(
        "\n".join(rows) if name == "a.jsonl" else f"[{','.join(rows)}]", "utf-8"
    )
    report = Report()
    found = read(tmp_path / name, report)
    assert found == (["a", "deep", "b"] if depth == 90 else ["a", "b"])
    assert report.problems == ({} if depth == 90 else {"bad_json": 1})


# ---- tables and text ---------------------------------------------------------------------------


def test_tsv_as_csv_writers_write_it(tmp_path: Path) -> None:
    import csv

    texts = ['He said "hi"', "two\nlines", "tab\there", "plain", '"quoted"']
    with open(tmp_path / "a.tsv", "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, delimiter="\t", lineterminator="\n")
        writer.writerows([("id", "text"), *enumerate(texts)])
    assert read(tmp_path / "a.tsv") == texts
    (tmp_path / "b.tsv").write_text('id\ttext\n1\t"open\n2\ta "b" c\n3\t"x" y\n', "utf-8")
    assert read(tmp_path / "b.tsv") == ['"open', 'a "b" c', '"x" y']
    (tmp_path / "c.tsv").write_bytes(b"id\ttext\n1\thello\rworld\n2\tb\n")
    assert read(tmp_path / "c.tsv") == ["hello\rworld", "b"]


def test_the_null_of_databases_is_no_text(tmp_path: Path) -> None:
    """MySQL, PostgreSQL and Hive write it so."""
    (tmp_path / "a.tsv").write_text("title\tcontent\n\\N\tone\ntwo\t\\N b\n", "utf-8")
    (tmp_path / "b.csv").write_text('title,content\n\\N,"one"\n"two",\\N b\n', "utf-8")
    for name in ("a.tsv", "b.csv"):
        assert read(tmp_path / name) == ["one", "two\n\\N b"]


def test_csv_of_spreadsheets_and_columns_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;text\n1;a, b\n2;c\n", "utf-8")
    assert read(tmp_path / "a.csv") == ["a, b", "c"]
    for k, mark in enumerate(",;\t|"):
        for head in (f"id{mark}text", f'"id"{mark}"text"{mark}"free, or ; or | not"'):
            line = mark.join(["1", '"a, b; c | d"', "x"][: 2 + head.count("free")])
            path = tmp_path / f"{k}.csv"
            path.write_text(f"\ufeff{head}\r\n{line}\r\n", "utf-8")
            assert read(path) == ["a, b; c | d"]
    # a mark within a field, or as a byte of a character, is none
    for rows, codec in (
        ("text | note;a;b;c,label\nsome,1\nother,2\n", "utf-8"),
        ("text,\u30dd\u30a4\u30f3\u30c8\n\u3042\u308a\u304c\u3068\u3046,\u6587\n", "cp932"),
        ("id,text\r1,a\r2,b\r", "utf-8"),
    ):
        path = tmp_path / "c.csv"
        path.write_bytes(rows.encode(codec))
        found = list(records.read_records(str(path), encoding="" if codec == "utf-8" else codec))
        assert [sorted(row.value) for row in found if not row.problem] in (
            [["label", "text | note;a;b;c"]] * 2, [["text", "\u30dd\u30a4\u30f3\u30c8"]], [],
        )  # fmt: skip
        assert bool(found[0].problem) == ("\r" in rows)
    # of a table whose first rows do not tell, too
    long = "word " * 40_000
    for rows, n_rows in (
        (f'id,text\n1,"{long}"\n2,x\n', 2),
        (f'id;text\n1;"{long}"\n' + "2;x\n" * 50, 51),
        ('id,text\n1,"He" said; a\n' + '2,"x; w, words words"\n' * 5000, 5000),
        ("id,text\n" + "1,Hello, world\n" * 12 + "2,fine\n" * 100, 100),
    ):
        path.write_text(rows, "utf-8")
        found = [row.value for row in records.read_records(str(path)) if not row.problem]
        assert len(found) == n_rows and all(list(row) == ["id", "text"] for row in found)
    names = ("question", *"ABCD", "answer")
    path.write_text(
        "Which equals |ab|?,|a||b|,|a|+|b|,|a|-|b|,|a|/|b|,A\nWhy?,a,b,c,d,B\n", "utf-8"
    )
    assert [row.value["answer"] for row in records.read_records(str(path), names=names)] == [
        "A",
        "B",
    ]
    (tmp_path / "b.csv").write_text("text,text,n\nfirst,second,1\n", "utf-8")
    (row,) = records.read_records(str(tmp_path / "b.csv"))
    assert row.value == {"text": "first", "text_2": "second", "n": "1"}


def test_quotes_with_backslashes_in_a_long_table(tmp_path: Path) -> None:
    """Spark writes them so. What is looked at ends within a row, and perhaps within quotes."""
    path = tmp_path / "a.csv"
    for n in range(5):
        rows = [f'{k},"the {k}. \\"word\\", {"x" * 100 * n}"' for k in range(20_000)]
        path.write_text("id,text\n" + "\n".join(rows) + "\n", "utf-8")
        assert read(path) == [row.partition('"')[2][:-1].replace("\\", "") for row in rows]
    path.write_text('id,text\n1,"""a"" C:\\"\n' + '2,"x\n\\"\n' * 200_000, "utf-8")  # doubled
    assert read(path)[:2] == ['"a" C:\\', "x\n\\"] and len(read(path)) == 200_001


@pytest.mark.parametrize(
    "text",
    [
        "ends, C:\\",
        "C:\\new\\",
        '\\"',
        '"\\',
        "a\\\\b",
        "\\\\",
        '{"a": "b\\"c", "d": "\\\\"}',
        "two\nlines\\\nof it\\",
        "$\\alpha \\\\ \\beta$, \\N",
        'he said "yes", \\"',
    ],
)
def test_fields_with_backslashes_as_spark_writes_them(tmp_path: Path, text: str) -> None:
    """Within quotes it puts a backslash before each quote and each backslash."""
    path = tmp_path / "a.csv"

    def written(field: str) -> str:
        return '"' + field.replace("\\", "\\\\").replace('"', '\\"') + '"'

    texts = ['a "quoted", word', text, "plain", text + ', and "more"'] * 3
    path.write_text("text,n\n" + "".join(f"{written(one)},1\n" for one in texts), "utf-8")
    report = Report()
    rows = records.read_records(str(path), report=report)
    assert [row.value["text"] for row in rows] == texts
    assert not report.problems


@pytest.mark.parametrize("key", ["data", "train", "rows"])
def test_rows_within_an_object_are_named(tmp_path: Path, key: str) -> None:
    """As in SQuAD's files and many exports: no kind reads them, and the reason is not another kind."""
    (tmp_path / "a.json").write_text(
        json.dumps({"version": "1", key: [{"text": "a"}] * 2}), "utf-8"
    )
    report = Report()
    assert not list(readers.read_documents(str(tmp_path / "a.json"), report=report))
    assert f"{key!r} holds rows: give a file of that list alone" in report.places[0][3]


def test_a_line_too_long_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_BYTES", 1000)
    paragraphs = [f"Paragraph {k}.\nIts second line." for k in range(9)]
    text = "\n\n".join([*paragraphs[:4], "x" * 5000, *paragraphs[4:]])
    (tmp_path / "a.txt").write_text(text, "utf-8")
    for cut in (0, 40, 100, 400, 3000):
        report, parts = Report(), [(0, cut), (cut, len(text))] if cut else [(0, None)]
        found = []
        for begin, end in parts:
            found += read(tmp_path / "a.txt", report, txt_split="blank", begin=begin, end=end)
        assert [t.rstrip("\n") for t in found] == paragraphs and report.problems == {"too_long": 1}
        assert report.n_bytes == len(text) and report.lost_bytes == 5001


@pytest.mark.parametrize("unit", ["A sentence. ", "一句话。", "\U0001f600 ok\n", "A line\n\n"])
def test_a_long_text_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    monkeypatch.setattr(records, "PIECE_CHARS", 1000)
    monkeypatch.setattr(records, "LINE_BYTES", 300)
    text = unit * 700
    (tmp_path / "a.txt").write_text(text, "utf-8")
    rows = list(readers.read_documents(str(tmp_path / "a.txt")))
    assert (
        "".join(row.value for row in rows) == text and max(len(row.value) for row in rows) <= 1000
    )
    assert [row.piece for row in rows] == list(range(len(rows))) and {
        row.offset for row in rows
    } == {0}
    assert all(row.value.endswith(unit) for row in rows[:-1]) or "\n" not in unit


def test_pieces_and_line_numbers_take_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, "HUGE_CHARS", 100)
    text = "word " * 20_000
    pieces = unit.pieces_of(text)
    assert "".join(pieces) == text and max(map(len, pieces)) <= 100

    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{bad\n' * 5000)
    units = readers.work_units(str(path), unit_bytes=950)
    n_read, opened = 0, open

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            nonlocal n_read
            raw = super().read(size)
            n_read += len(raw)
            return raw

    monkeypatch.setattr(readers, "open", lambda name, mode: Counting(name, mode), raising=False)
    report = Report()
    for begin, end in units:
        list(readers.read_documents(str(path), begin=begin, end=end, report=report))
    lines = [line for _, line, _, _ in report.places]
    assert lines == list(range(2, 10_001, 2)) and n_read < 2 * path.stat().st_size
    assert opened is open


def test_an_encoding_that_is_given(tmp_path: Path) -> None:
    lines = ["Les élèves étaient très fatigués", "plain", "caf\u00e9"]
    raw = "\n".join(lines[:2]).encode("latin-1") + b"\n" + lines[2].encode()
    (tmp_path / "a.txt").write_bytes(raw)
    assert read(tmp_path / "a.txt", txt_split="line", encoding="latin-1") == lines
    with pytest.raises(UserError, match="encoding='latn' is not known"):
        check_codec("latn")


def test_the_head_of_a_large_file_does_not_decide_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "READ_BYTES", 2**12)
    monkeypatch.setattr(streams, "SAMPLE_BYTES", 2**11)
    lines = [f"{k}: 人生就像一场旅行，不必在乎目的地，在乎的是沿途的风景。" for k in range(900)]
    raw = b"plain ASCII text\n" * 2000 + "\n".join(lines).encode("gb18030")
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    units = readers.work_units(str(path), "line", 2**14)
    found = [t for begin, end in units for t in read(path, txt_split="line", begin=begin, end=end)]
    assert found == ["plain ASCII text"] * 2000 + lines
    path.write_bytes(zlib.compress(raw, 0, 31))  # packed, only its head can be seen
    report = Report()
    assert read(path, report, txt_split="line") == ["plain ASCII text"] * 2000
    assert report.problems == {"bad_encoding": 900} and report.lost_bytes == len(
        "\n".join(lines).encode("gb18030")
    )


def test_columns_of_one_name_in_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table([pa.array(["first"]), pa.array(["second"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = records.read_records(str(tmp_path / "a.parquet"))
    assert row.value == {"text": "first", "text_2": "second"}
    assert read(tmp_path / "a.parquet") == ["first"]


@pytest.mark.parametrize("mark", ",;|")
def test_spaces_behind_the_separators_of_a_table_typed_by_hand(tmp_path: Path, mark: str) -> None:
    lines = [f"question{mark} answer", f'What?{mark} "Tea{mark} hot"', f"Who?{mark} Ann "]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n", "utf-8")
    rows = [row.value for row in records.read_records(str(tmp_path / "a.csv"))]
    assert rows == [
        {"question": "What?", "answer": f"Tea{mark} hot"},
        {"question": "Who?", "answer": "Ann "},
    ]
    # without them in the first row they belong to the values
    (tmp_path / "a.csv").write_text(f"question{mark}answer\nWhat?{mark} Tea\n", "utf-8")
    (row,) = records.read_records(str(tmp_path / "a.csv"))
    assert row.value == {"question": "What?", "answer": " Tea"}


@pytest.mark.parametrize("suffix", ["gz", "gzip", "bz2", "bz", "xz", "zst", "zstd"])
def test_names_of_packed_files(tmp_path: Path, suffix: str, capsys) -> None:
    import bz2

    zstandard = pytest.importorskip("zstandard")
    pack = {"g": gzip.compress, "b": bz2.compress, "x": lzma.compress, "z": zstandard.compress}
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(pack[suffix[0]](ROW.encode()))
    assert read(path) == [LONG]
    assert find_files(str(tmp_path)) == [str(path)] and capsys.readouterr().out == ""


def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for path in (tmp_path / "a.jsonl", "/dev/zero", tmp_path):
        with pytest.raises(UserError, match="cannot read .*: is no regular file; of a pipe give -"):
            next(records.read_records(str(path)))


def test_a_folder_that_cannot_be_entered_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.jsonl").write_text(ROW, "utf-8")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def locked(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)  # root may enter any folder
    for path in (tmp_path, tmp_path / "locked"):
        with pytest.raises(UserError, match="cannot read .*locked: Permission denied"):
            find_files(str(path))


def test_a_source_that_is_given_under_two_names_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(ROW, "utf-8")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    for other in (
        "./a.jsonl",
        str(tmp_path / "a.jsonl"),
        "b.jsonl",
        "../" + tmp_path.name + "/a.jsonl",
    ):
        for spec in (f"a.jsonl,{other}", f"a.jsonl=0.5,{other}=0.5"):
            with pytest.raises(UserError, match="comes twice"):
                parse_weights(spec, spec)


def test_a_space_before_the_name_of_a_column_is_no_part_of_it(tmp_path: Path) -> None:
    """As people type tables: question, answer."""
    (tmp_path / "a.csv").write_text("question, answer \nWhat?,Tea\n", encoding="utf-8")
    (row,) = records.read_records(str(tmp_path / "a.csv"))
    assert row.value == {"question": "What?", "answer": "Tea"}


# What public reports about readers of pandas, datasets and datatrove are about: (name, content, rows
# that are read, problems). Nothing of it may be read wrongly or in silence.
LONG = "This is a text that is long enough"
ROW = json.dumps({"text": LONG})
ODD_FILES = [
    ("eof.csv", b'text,b\r\n"a \x1a within",1\r\nsecond,2\r\n', ["a \x1a within", "second"], {}),
    ("quote.csv", b'a|text|c\n1|first|x\n2|"|y\n3|third|z\n', ["first", "third"], {"bad_csv": 1}),
    ("nul.csv", b"text,b\nfirst\0,1\nsecond,2\n", [], {"not_text": 1}),
    ("ragged.csv", b"text,b\nfirst,1,extra\nsecond\nthird,3\n", ["third"], {"bad_csv": 2}),
    (
        "mysql.csv",
        b'text,b\n"he said \\"yes\\", and went",1\nsecond,2\n',
        ['he said "yes", and went', "second"],
        {},
    ),
    ("backslash.csv", b'text,b\n"ends so \\",1\n"a ""b"" c",2\n', ["ends so \\", 'a "b" c'], {}),
    (
        "json.csv",  # quotes are doubled, and a row has a field too many
        b'text,b\n"{""a"": ""\\""x\\""""}",1\nfirst,2\nsecond,3,4\n',
        ['{"a": "\\"x\\""}', "first"],
        {"bad_csv": 1},
    ),
    ("excel.csv", b"\xef\xbb\xbfsep=;\r\ntext;b\r\nfirst, 1;1\r\n", ["first, 1"], {}),
    ("excel2.csv", b'"sep=,"\ntext,b\nfirst,1\n', ["first"], {}),
    ("sep.csv", b"sep=,text\n1,first\n", ["first"], {}),
    ("mac.csv", b"text,b\rfirst,1\r", [], {"bad_csv": 1}),
    ("open.csv", b'text,b\nfirst,1\n"never ends,2\n', ["first"], {"bad_csv": 1}),
    ("arrays.jsonl", f"[{ROW}]\n[{ROW}]\n".encode(), [LONG] * 2, {}),
    ("types.jsonl", b'{"text":"a","x":[0,"y"]}\n{"text":"b","x":{"z":1}}\n', ["a", "b"], {}),
    ("python.jsonl", b"{'text': 'a dict of Python'}\n", [], {"bad_json": 1}),
    ("nan.jsonl", b'{"text":"a","x":NaN}\n{"text":"b","x":1e999}\n', ["a", "b"], {}),
    ("nan.json", b'[{"text":NaN,"content":"a"},{"text":NaN}]', ["a"], {"bad_field": 1}),
    ("a.jsonlines", f"{ROW}\n{ROW}\n".encode(), [LONG] * 2, {}),
    ("comma.jsonl", f'{{"text":"a",}}\n{ROW}\n'.encode(), [LONG], {"bad_json": 1}),
    ("comments.jsonl", f"// a\n{ROW}\n# b\n".encode(), [LONG], {"bad_json": 2}),
    ("open_string.jsonl", f'{{"text":"a\nb"}}\n{ROW}\n'.encode(), [LONG], {"bad_json": 2}),
    (
        "conflict.jsonl",
        f"<<<<<<< HEAD\n{ROW}\n=======\n>>>>>>> x\n".encode(),
        [LONG],
        {"bad_json": 3},
    ),
    ("two_marks.jsonl", b"\xef\xbb\xbf\xef\xbb\xbf" + ROW.encode(), [LONG], {}),
    ("html.jsonl", b"<!DOCTYPE html><html>403 Forbidden</html>\n", [], {"bad_json": 1}),
    ("sequence.json", f"\x1e{ROW}\n\x1e{ROW}\n".encode(), [LONG] * 2, {}),
    ("no_comma.json", f"[{ROW} {ROW}]".encode(), [LONG] * 2, {}),
    ("cut.json", f"[{ROW},{ROW[:-9]}".encode(), [LONG], {"bad_json": 1}),
    ("columns.json", b'{"text":{"0":"a","1":"b"}}', [], {"bad_field": 1}),
    ("split.json", b'{"columns":["text"],"data":[["a"]]}', [], {"bad_field": 1}),
    ("twice.jsonl.gz", gzip.compress(gzip.compress(ROW.encode())), [], {"not_text": 1}),
    ("zlib.jsonl.gz", zlib.compress(ROW.encode()), [], {"truncated_file": 1}),
    ("plain.jsonl.gz", ROW.encode(), [], {"truncated_file": 1}),
    ("tail.jsonl.gz", gzip.compress(ROW.encode() + b"\n") + b"tail", [LONG], {"truncated_file": 1}),
    ("zeros.jsonl.gz", gzip.compress(ROW.encode()) + bytes(512), [LONG], {}),
    ("x.lz4", b"\x04\x22\x4d\x18\x64\x40\xa7" + bytes(range(256)), [], {"not_text": 1}),
    ("alone.lzma", lzma.compress(ROW.encode(), lzma.FORMAT_ALONE), [], {"not_text": 1}),
    ("orc.parquet", b"ORC" + bytes(range(200)) + b"ORC", [], {"truncated_file": 1}),
    ("crash.jsonl", ROW.encode() + b"\n" + bytes(4096), [], {"not_text": 1}),
    ("cesu8.txt", b"half \xed\xa0\xbd and half \xed\xb8\x80\n" * 10, [], {"bad_encoding": 1}),
    ("ebcdic.txt", "A TEXT OF A MAINFRAME\n".encode("cp037") * 20, [], {"bad_encoding": 1}),
]


@pytest.mark.parametrize(
    "name, raw, expected, problems", ODD_FILES, ids=[one[0] for one in ODD_FILES]
)
def test_odd_files_are_read_right_or_counted(
    tmp_path: Path, name: str, raw: bytes, expected, problems
) -> None:
    (tmp_path / name).write_bytes(raw)
    report = Report()
    rows = [row.value for row in readers.read_documents(str(tmp_path / name), report=report)]
    assert rows == expected and dict(report.problems) == problems
    whole_loss = report.problems.keys() - {"bad_field"}
    assert bool(report.lost_bytes) == bool(whole_loss)
