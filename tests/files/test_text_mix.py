"""text_mix.py: whose turn it is, by hand."""

import io
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from groundup.errors import UserError
from groundup.files import readers
from groundup.files.sources import parse_sources
from groundup.files.text_mix import Part, check_parts, mix_texts, parts_of, size_of, texts_of


def parts(spec: str, text_key: str = "") -> list[Part]:
    return parts_of(parse_sources({"input": spec, "text_key": text_key}), Path())


def test_a_mixture_follows_its_weights(capsys):
    """By every moment each source has given its share of bytes, up to one text; the order of a source is kept."""
    rng = random.Random(14)
    sources = [[f"{name}{i} " + "甲" * rng.randrange(300) for i in range(5000)] for name in "abc"]
    weights = [0.6, 0.3, 0.1]
    mixed = list(mix_texts(list(zip("xyz", sources, weights, strict=True)), 400_000))
    given = [0, 0, 0]
    for text in mixed:
        given["abc".index(text[0])] += len(text.encode())
        assert all(abs(g - w * sum(given)) < 1000 for g, w in zip(given, weights, strict=True))
    assert 400_000 <= sum(given) < 401_000
    for name, texts in zip("abc", sources, strict=True):
        mine = [text for text in mixed if text[0] == name]
        assert mine == texts[: len(mine)]
    assert mixed == list(mix_texts(list(zip("xyz", sources, weights, strict=True)), 400_000))
    assert f"tokenizer: x: {given[0] / 1e6:.2f} MB" in capsys.readouterr().out


def test_a_mixture_goes_on_when_a_source_ends(capsys):
    long_and_short = ["b" * 200_000, *["b" * 100] * 500]
    sources = [
        ("x", iter(["a" * 100] * 10), 1.0),
        ("y", iter(long_and_short), 1.0),
        ("z", ["c" * 100] * 900, 3.0),
    ]
    mixed = list(mix_texts(sources, 10**9))
    sizes = Counter(text[0] for text in mixed)
    assert sizes == {"a": 10, "b": 501, "c": 900} and max(map(len, mixed)) == 100_000
    out = capsys.readouterr().out
    assert (
        out.count("read to its end") == 3
        and "501 texts, 1 of them cut to 100,000 characters" in out
    )


def test_all_files_are_sampled_in_proportion(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "en").mkdir()
    (tmp_path / "zh").mkdir()
    sizes = {"en/a.txt": 800_000, "en/b.jsonl": 400_000, "zh/c.txt": 400_000, "zh/d.txt": 200_000}
    for name, size in sizes.items():
        mark = name[3]
        line = json.dumps({"text": mark * 99}) + "\n" if "json" in name else mark * 99 + "\n"
        (tmp_path / name).write_text(line * (size // len(line)), "utf-8")
    cut = readers.work_units
    monkeypatch.setattr(
        readers,
        "work_units",
        lambda path, *_, **settings: cut(path, unit_bytes=100_000, **settings),
    )
    found = "".join(texts_of(parts(f"{tmp_path}/en,{tmp_path}/zh"), 1))
    share = 1_000_000 / sum(sizes.values())
    for name, size in sizes.items():
        n = found.count(name[3])
        assert 0.9 < n / (size * share) < 1.1, (name, n)
    said = capsys.readouterr().out
    assert f"{tmp_path}/zh: 0.3" in said and f"{tmp_path}/en: 0.6" in said
    assert size_of(parts("-")) == 0


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def test_conversations_and_pairs_are_text_of_their_turns(tmp_path: Path, capsys) -> None:
    """A corpus with chats lost all of them: ten lines "another kind", and a tokenizer without them."""
    question, answer = {"role": "user", "content": "问"}, {"role": "assistant", "content": "答"}
    write(
        tmp_path / "a.jsonl", {"text": "文"}, {"messages": [question, answer]},
        {"conversations": [{"from": "human", "value": "头痛"}, {"from": "gpt", "value": "休息"}]},
        {"instruction": "做", "input": "", "output": "好"}, {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"prompt": "q", "response": "s"}, [question, answer], {"nothing": 1}, {"nothing": 2}, {"nothing": 3},
    )  # fmt: skip
    found = list(texts_of(parts(str(tmp_path)), 1))
    assert found == ["文", "问\n答", "头痛\n休息", "做\n好", "p\nc\nr", "q\ns", "问\n答"]
    said = capsys.readouterr().out
    assert said.count("bad_field") == 1 and "a.jsonl:8" in said and "could not be read: 3 records" in said


def test_files_are_looked_at_as_by_prepare(tmp_path: Path, capsys) -> None:
    """A link is no second file, and what looks like rows is said."""
    a = write(tmp_path / "a.jsonl", {"text": "one"})
    (tmp_path / "b.jsonl").symlink_to(a)
    (tmp_path / "c.txt").write_bytes(Path(a).read_bytes())
    found = parts(f"{a},{tmp_path}/b.jsonl,{tmp_path}/c.txt")
    assert [part.files for part in found] == [[str(a)], [f"{tmp_path}/c.txt"]]
    said = capsys.readouterr().out
    assert "b.jsonl: all its files belong to earlier parts" in said
    assert "c.txt looks like JSON lines but is read as plain text; if its rows are meant, let its name" in said


def test_sources_have_settings_of_their_own_as_in_prepare(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"x": {"y": "one"}}, {"x": {"y": "two"}})
    (tmp_path / "b.txt").write_bytes("第一\n第二\n".encode("gb18030"))
    named = parts(
        f"a: {a}, text_key=x.y, weight=2; b: {tmp_path}/b.txt, txt_split=line, encoding=gb18030, weight=1"
    )
    assert [(part.name, part.weight) for part in named] == [("a", 2), ("b", 1)]
    assert sorted(texts_of(named, 1)) == ["one", "two", "第一", "第二"]
    check_parts(named)
    with pytest.raises(
        UserError,
        match=r"a has no text: .*a.jsonl:1: bad_field: no text under 'z' .*; name its text",
    ):
        check_parts(parts(f"b: {tmp_path}/b.txt, encoding=gb18030; a: {a}, text_key=z"))


@pytest.mark.parametrize(
    "settings, says",
    [
        ("encoding=foo", "encoding='foo' is not known"),
        ("encoding=utf-16", "encoding='utf-16' does not hold ASCII"),
        ("txt_split=lines", "txt_split must be one of file, blank, line, got 'lines'"),
        ("quality=foo", "quality must be one of curated, web, got 'foo'"),
        ("quality=web", "x: quality and rules are prepare.py's; leave them out"),
        ("rules=bar", "x: quality and rules are prepare.py's; leave them out"),
    ],
)
def test_settings_of_a_source_that_cannot_be_used_are_refused(
    tmp_path: Path, settings: str, says: str
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a text\n", "utf-8")
    with pytest.raises(UserError, match=says):
        parts(f"x: {tmp_path}/a.txt, {settings}; y: {tmp_path}/b.txt")


@pytest.mark.parametrize("weights", [("", ""), ("=0.7", "=0.3")])
def test_a_part_whose_files_belong_to_earlier_ones_is_none(
    tmp_path: Path, capsys, weights: tuple[str, str]
) -> None:
    b = write(tmp_path / "b.jsonl", {"text": "one"})
    found = parts(f"{b}{weights[0]},{tmp_path}/b*.jsonl{weights[1]}")
    assert [part.files for part in found] == [[str(b)]]
    assert "b*.jsonl: all its files belong to earlier parts" in capsys.readouterr().out
    check_parts(found)
    assert list(texts_of(found, 1)) == ["one"]


@pytest.mark.parametrize("spec", ["-", "x: -", "x: {a}, -", "x: -, {a}", "x: {a}; y: -", "{a},-"])
def test_standard_input_is_read_once_also_beside_files(
    tmp_path: Path, monkeypatch, spec: str
) -> None:
    a = write(tmp_path / "a.jsonl", {"text": "one"})
    raw = io.BytesIO(b'{"text": "two"}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="utf-8"))
    found = parts(spec.format(a=a))
    check_parts(found)
    texts = "".join(texts_of(found, 1))
    assert "two" in texts and ("one" in texts) == ("{a}" in spec)
