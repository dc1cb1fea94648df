"""The pipeline of prepare.py on texts with planted faults, against what was planted and against brute force."""

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import forks
import numpy as np
import pytest
from planted import UNIT, Planted, jaccard, plant, score, shingles

import prepare
from configurator import defaults_of, is_key
from groundup.demo import python_docs as corpora
from groundup.errors import UserError
from groundup.files.turns import BadRow
from groundup.text import unit
from groundup.text.recipe import check_config
from groundup.tokens import conversations, pairs
from groundup.tokens.token_files import TokenData
from groundup.tokens.training import train
from tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
KEYS = {key: value for key, value in vars(prepare).items() if is_key(key, value)}


def run(out_dir: Path, **settings) -> int:
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    return prepare.main(KEYS | {"workers": 1, "out_dir": str(out_dir), "overwrite": True} | plain)  # of other settings


def manifest_of(out_dir: Path) -> dict:
    return json.loads((out_dir / "manifest.json").read_text("utf-8"))


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def texts_of(out_dir: Path, split: str = "train", source: str | None = None) -> list[str]:
    """Documents of a prepared directory in the order of its files."""
    part, tokenizer, found = TokenData(out_dir, split, source), Tokenizer.load(out_dir), []
    for shard, offsets in zip(part.shards, part.offsets, strict=True):
        for begin, end in zip(offsets, offsets[1:], strict=False):
            found.append(tokenizer.decode(shard[begin + 1 : end].tolist()))
    return found


def pieces(n: int) -> list[str]:
    """n different texts of 200 to 900 characters, English and Chinese."""
    reference = "\n".join(corpora.debug_texts()[:-8])
    english = [reference[i : i + 700] for i in range(0, len(reference), 700)]
    chinese = [text for text in corpora.chinese_sample() if len(text) > 100]
    found = [text for pair in zip(english, chinese, strict=False) for text in pair] + english[len(chinese) :]
    return [text for text in dict.fromkeys(found) if len(UNIT.findall(text)) > 30][:n]


@pytest.fixture(scope="module")
def tok(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    train(pieces(60), 512).save(path)
    return str(path)


@pytest.fixture(scope="module")
def planted() -> Planted:
    """In texts that are no near copies of each other, as some of the documentation of other Pythons are."""
    kept: list[tuple[str, set]] = []
    for text in pieces(400):
        own = shingles(text)
        if all(2 * len(own & other) < len(own | other) for _, other in kept):
            kept.append((text, own))
    return plant([text for text, _ in kept])


@pytest.fixture(scope="module")
def planted_files(planted, tmp_path_factory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("planted")
    (path / "corpus.jsonl").write_bytes(b"\n".join(planted.lines) + b"\n")
    write_rows(path / "questions.jsonl", planted.questions)
    return {"input": str(path / "corpus.jsonl"), "decontaminate": str(path / "questions.jsonl")}


# ---- what was planted is found ---------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(planted_files, tok, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    assert run(out, tokenizer_dir=tok, max_bad_fraction=1.0, **planted_files) == 0
    return out


def test_planted_faults_are_found_and_nothing_else(planted, prepared):
    found = score(planted, prepared)
    assert set(found["exact"]) == {"exact_duplicate"}
    assert set(found["truncated"]) == {"bad_json"} and set(found["encoding"]) == {"bad_encoding"}
    assert set(found["contaminated"]) == {"contaminated"}
    assert set(found["original"]) == {"kept"}
    assert set(found.get("near J>=0.9", {"near_duplicate": 0})) == {"near_duplicate"}
    assert set(found["near J<0.8"]) <= {"kept", "near_duplicate"} and "kept" in found["near J<0.8"]
    assert sum(n for counts in found.values() for n in counts.values()) == len(planted.lines)


def test_totals_are_those_of_the_lines_and_add_up(planted, prepared):
    info = manifest_of(prepared)["info"]
    documents, n_bytes = info["documents"], info["bytes"]
    left_out = sum(documents["dropped"].values()) + sum(documents["lost"].values())
    assert documents["read"] == len(planted.lines) == documents["kept"] + left_out
    readable = [json.loads(line)["text"] for line, label in zip(planted.lines, planted.labels, strict=True)
                if label not in ("truncated", "encoding")]  # fmt: skip
    assert n_bytes["read"] == sum(len(text.encode()) for text in readable)
    assert n_bytes["read"] == n_bytes["kept"] + n_bytes["cleaned"] + n_bytes["cut"] + sum(n_bytes["dropped"].values())
    splits = manifest_of(prepared)["splits"]
    assert sum(split["documents"] for split in splits.values()) == documents["kept"]
    assert sum(split["bytes"] for split in splits.values()) == n_bytes["kept"]


def test_dropped_copies_name_a_document_that_was_kept(planted, prepared):
    offsets = np.cumsum([0] + [len(line) + 1 for line in planted.lines]).tolist()
    rows = [row.split("\t") for row in (prepared / "dropped.tsv").read_text("utf-8").splitlines()[1:]]
    dropped = {offsets.index(int(row[1])) for row in rows}
    copies = [row for row in rows if row[2] in ("exact_duplicate", "near_duplicate")]
    assert len(copies) > 20
    for row in copies:
        i, j = offsets.index(int(row[1])), offsets.index(int(row[4]))
        texts = [json.loads(planted.lines[k])["text"] for k in (i, j)]
        assert j < i
        if row[2] == "exact_duplicate":
            assert "".join(texts[0].lower().split()) == "".join(texts[1].lower().split())
        else:
            assert j not in dropped
            assert abs(jaccard(*texts) - float(row[5])) < 0.15  # of 128 numbers: a standard deviation of 0.035


def test_report_shows_samples_of_every_reason(prepared):
    report = (prepared / "report.md").read_text("utf-8")
    for reason in ("kept", "exact_duplicate", "near_duplicate", "contaminated"):
        section = report.partition(f"## {reason}\n")[2].partition("\n## ")[0]
        assert section.count("\n  > ") == 20 or reason == "near_duplicate" or "contaminated"
        assert section.count("\n  > ") > 0, reason


def content(out_dir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out_dir)): path.read_bytes() for path in out_dir.rglob("*")
            if path.is_file() and path.name != "config.py"}  # fmt: skip


@pytest.mark.slow
def test_any_number_of_workers_and_units_gives_the_same_bytes(planted_files, prepared, tok, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import prepare
from groundup.text import inputs, unit
inputs.UNIT_BYTES, unit.BATCH_CHARS = 2**14, 2**11
if __name__ == "__main__":
    sys.exit(prepare.main({KEYS | {"out_dir": str(tmp_path / "out"), "tokenizer_dir": tok, "workers": 3,
                       "max_bad_fraction": 1.0}
             | planted_files}))
"""
    (tmp_path / "prepare_all.py").write_text(code, encoding="utf-8")
    forks.run([sys.executable, tmp_path / "prepare_all.py"], check=True, capture_output=True, cwd=ROOT)
    found, expected = content(tmp_path / "out"), content(prepared)
    for one in (found, expected):  # inputs.tsv has a hash of each part
        manifest = json.loads(one.pop("manifest.json"))
        del one["inputs.tsv"], manifest["info"]["inputs"], manifest["crc32"]
        one["manifest"] = manifest
    assert found == expected


@pytest.mark.parametrize(
    "settings, says",
    [({"kind": "chat", "decontaminate": "cut: x.jsonl"}, "has no effect with kind=chat"),
     ({"decontaminate": "cut:"}, "names no files")],
)  # fmt: skip
def test_cutting_that_has_no_effect_is_refused(tmp_path, settings, says):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    given = defaults_of(ROOT / "prepare.py") | {"input": str(tmp_path / "x.jsonl"), "out_dir": str(tmp_path / "o")}
    with pytest.raises(UserError, match=says):
        check_config(given | settings)


def test_contaminated_places_can_be_cut_out(tmp_path, tok):
    question = {"question": "Which of these rivers flows north through eleven countries into the sea?",
                "choices": ["The Nile", "The Rhine", "The Volga", "The Po"]}  # fmt: skip
    asked = question["question"] + " " + " ".join(question["choices"])
    around = ["A text about rivers. " + "Water runs down, as it always did, and nobody asks it why it does. " * 9,
              "Another begins here. " + "Boats go up and down all day with fish, salt, people, with mail. " * 9]
    documents = [around[0] + asked.upper() + around[1], *around]
    documents.append(around[0][:-4] + "(a) " + asked + around[1])  # of which the same is left
    path = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in documents])
    questions = write_rows(tmp_path / "q.jsonl", [question])
    settings = {"input": path, "tokenizer_dir": tok, "decontaminate": questions, "near": 0.0, "val_fraction": 0.0}
    run(tmp_path / "dropped", **settings)
    assert texts_of(tmp_path / "dropped") == around
    run(tmp_path / "cut", **settings | {"decontaminate": f"cut: {questions}"})
    kept = texts_of(tmp_path / "cut")
    assert kept[1:] == around and "rivers" in kept[0] and "NILE" not in kept[0] and "mail" in kept[0]
    info = manifest_of(tmp_path / "cut")["info"]
    assert info["bytes"]["cut"] > len(asked) and info["documents"]["mended"] == {"contamination_cut": 2}
    assert info["documents"]["dropped"] == {"exact_duplicate": 1}


def test_evaluation_questions_are_found_in_every_part_of_a_row(tmp_path):
    asked = "Which of these long rivers flows north through eleven different countries into the sea?"
    call = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello there."},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "content": "Found."},
        {"role": "assistant", "content": "Good day."},
    ]
    chats = [[turn | {"content": asked} if k == at else turn for k, turn in enumerate(turns)] for at in (0, 1, 3, 4)]
    pair = {"prompt": turns[:2], "chosen": "Good day.", "rejected": "Go away."}
    pairs = [pair | {"prompt": chat[:2]} for chat in chats[:2]] + [pair | {"chosen": asked}, pair | {"rejected": asked}]
    questions = write_rows(tmp_path / "q.jsonl", [{"question": asked}])
    for kind, rows in (("chat", [{"messages": chat} for chat in (turns, *chats)]), ("preference", [pair, *pairs])):
        path = write_rows(tmp_path / f"{kind}.jsonl", rows)
        run(tmp_path / kind, input=path, kind=kind, decontaminate=questions, val_fraction=0.0)
        assert manifest_of(tmp_path / kind)["info"]["documents"]["dropped"] == {"contaminated": 4}, kind


# ---- settings --------------------------------------------------------------------------------


def test_sources_have_settings_and_files_of_their_own(tmp_path, tok):
    articles = [{"title": f"标题{i}", "content": t, "uniqueKey": "x"} for i, t in enumerate(pieces(20))]
    write_rows(tmp_path / "wudao.json", articles)
    write_rows(tmp_path / "qa.jsonl", [{"ask": t[:90], "answer": t[90:], "n": 1} for t in pieces(60)[20:]])
    lines = "二\n" + "".join(f"第{i}行也有几个字，比第一行长多了吧？\n" for i in range(11))
    (tmp_path / "lines.txt").write_text(lines, "utf-8")
    spec = (f"wiki: {tmp_path}/wudao.json, weight=0.5, text_key=content; qa: {tmp_path}/qa.jsonl, weight=0.3, "
            f'text_key=ask+answer; zh: {tmp_path}/lines.txt, txt_split=line, weight=0.2, rules=length=5..')
    run(tmp_path / "out", input=spec, tokenizer_dir=tok, val_fraction=0.1, near=0.0)
    both = {s: texts_of(tmp_path / "out", "train", s) + texts_of(tmp_path / "out", "val", s)
            for s in ("wiki", "qa", "zh")}  # fmt: skip
    assert sorted(both["wiki"]) == sorted(pieces(20))
    assert sorted(both["qa"]) == sorted(t[:90] + "\n" + t[90:] for t in pieces(60)[20:])
    assert len(both["zh"]) == 11
    sources = manifest_of(tmp_path / "out")["sources"]
    assert {name: entry["weight"] for name, entry in sources.items()} == {"wiki": 0.5, "qa": 0.3, "zh": 0.2}
    assert (tmp_path / "out" / "qa" / "train_00000.npy").exists()
    assert prepare.main(KEYS | {"verify": str(tmp_path / "out")}) == 0
    assert run(tmp_path / "out", input=spec.replace("length=5", "length=1"), tokenizer_dir=tok, near=0.0) == 0
    assert len(texts_of(tmp_path / "out", "train", "zh") + texts_of(tmp_path / "out", "val", "zh")) == 12


@pytest.mark.parametrize(
    "spec, said",
    [
        ("a: x.txt; y.txt", "'y.txt' is not of the form 'name: files, key=value, ...'"),
        ("a: x.txt; a: y.txt", "two sources have the same name"),
        ("a: x.txt, weight=1; b: y.txt", "give a weight to every source, or to none"),
        ("a: x.txt, weight=much", "weight=much of source a is not a number"),
        ("a: x.txt, quality=fine", "quality must be one of curated, web, got 'fine'"),
        ("a: x.txt, weigth=0.4", "source a has a setting 'weigth'; a source has weight, text_key"),
        ("a: weight=1", "source a names no files"),
    ],
)
def test_malformed_sources_are_one_line(spec, said):
    with pytest.raises(UserError) as caught:
        prepare.check_config(KEYS | {"input": spec, "out_dir": "x"})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_rules_and_hook_drop_and_are_counted(tmp_path, tok):
    (tmp_path / "rules.py").write_text("def keep(text):\n    return 'parachute' not in text\n", "utf-8")
    documents = [*pieces(30), "A parachute opens, and the one below it is glad of that."]
    path = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in documents] + [{"text": "short"}])
    settings = {"rules": f"keep={tmp_path}/rules.py:keep", "tokenizer_dir": tok}
    run(tmp_path / "out", input=path, **settings)
    dropped = {"min_length": 1, "keep": 1}
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == dropped
    (tmp_path / "rules.py").write_text("def keep(text):\n    return True\n", "utf-8")
    run(tmp_path / "out", input=path, **settings)  # what a setting's file holds counts, too
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"min_length": 1}
    settings["rules"] += ", min_length=off"
    run(tmp_path / "out", input=path, **settings)
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {}


def test_scores_filter_by_value_and_by_share(tmp_path, tok):
    rows = [{"text": t, "bpb": i / 100, "ifd": 1 - i / 100} for i, t in enumerate(pieces(100))]
    path = write_rows(tmp_path / "x.jsonl", [*rows, {"text": "without any number, though long enough"}])
    common = {"input": path, "tokenizer_dir": tok, "near": 0.0, "val_fraction": 0.0}
    run(tmp_path / "out", score="bpb=0.2..0.5,ifd=..0.7", **common)
    assert texts_of(tmp_path / "out") == [row["text"] for row in rows if 0.2 <= row["bpb"] <= 0.5 and row["ifd"] <= 0.7]
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"]["score"] == 101 - 21
    run(tmp_path / "out", score="bpb=10%..90%", **common)
    low, high = np.percentile([row["bpb"] for row in rows], [10, 90])
    kept = {row["text"] for row in rows if low <= row["bpb"] <= high}
    assert set(texts_of(tmp_path / "out")) == kept
    for wrong in ("bpb", "bpb=1", "bpb=a..b"):
        with pytest.raises(UserError, match="is not key=least..most"):
            run(tmp_path / "no", score=wrong, **common)


def test_infinite_scores_do_not_switch_a_share_off(tmp_path, tok):
    """A perplexity that overflowed is infinite, and numpy's percentile beside it is nan."""
    scores = [*range(80), *[float("inf")] * 10, *[float("-inf")] * 10]
    rows = [{"text": t, "ppl": score} for t, score in zip(pieces(100), scores, strict=True)]
    settings = {"tokenizer_dir": tok, "near": 0.0, "val_fraction": 0.0, "score": "ppl=5%..95%"}
    for name, some in (("all", rows), ("finite", rows[:80])):
        run(tmp_path / name, input=write_rows(tmp_path / f"{name}.jsonl", some), **settings)
    assert texts_of(tmp_path / "all") == texts_of(tmp_path / "finite") == [row["text"] for row in rows[4:76]]


def test_folds_cover_every_document_once(tmp_path, tok):
    path = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in pieces(120)])
    vals = []
    for i in (1, 2, 3):
        run(tmp_path / str(i), input=path, tokenizer_dir=tok, fold=f"{i}/3")
        val = texts_of(tmp_path / str(i), "val")
        assert sorted(val + texts_of(tmp_path / str(i))) == sorted(pieces(120))
        vals += val
    assert sorted(vals) == sorted(pieces(120))
    for wrong in ("0/3", "4/3", "1/1", "half"):
        with pytest.raises(UserError, match="fold"):
            run(tmp_path / "no", input=path, tokenizer_dir=tok, fold=wrong)


def test_huge_documents_are_cut_at_paragraphs(tmp_path, tok, monkeypatch):
    monkeypatch.setattr(unit, "HUGE_CHARS", 1000)
    paragraphs = [t.replace("\n\n", "\n") for t in pieces(12)]
    documents = ["\n\n".join(paragraphs), "x" * 2500, paragraphs[0]]
    path = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in documents])
    run(tmp_path / "out", input=path, tokenizer_dir=tok, near=-1, val_fraction=0.0)
    found = texts_of(tmp_path / "out")
    info = manifest_of(tmp_path / "out")["info"]["documents"]
    assert info["mended"]["split_huge"] == len(found) - 3 and info["read"] == info["kept"] == len(found)
    assert max(map(len, found)) <= 1000 and "".join(found) == "\n\n".join(paragraphs) + "x" * 2500 + paragraphs[0]
    assert all(text.endswith("\n\n") for text in found[:-5])


def test_too_many_bad_records_are_told_by_the_exit_status(tmp_path, tok):
    path = tmp_path / "x.jsonl"
    write_rows(path, [{"text": t} for t in pieces(8)] + [{"no": 1}, {"no": 2}])
    assert run(tmp_path / "a", input=path, tokenizer_dir=tok) == 0
    assert run(tmp_path / "b", input=path, tokenizer_dir=tok, max_bad_fraction=0.1) == 1
    assert run(tmp_path / "c", input=path, tokenizer_dir=tok, max_bad_fraction=0.2) == 0


def test_optional_keys_are_found_in_any_capitals_and_a_file_without_them_is_told(tmp_path, tok, capsys):
    text, faq = tmp_path / "a.txt", tmp_path / "faq.csv"
    text.write_text(pieces(1)[0], "utf-8")
    lines = [f"How is {k}?,{k} is as good as it gets.\n" for k in range(20)]
    faq.write_text("Question,Answer\n" + "".join(lines), "utf-8")
    settings = {"input": f"{text},{faq}", "tokenizer_dir": tok, "val_fraction": 0.0, "near": 0.0}
    assert run(tmp_path / "a", text_key="question?,answer?", **settings) == 0
    assert "How is 3?\n3 is as good as it gets." in texts_of(tmp_path / "a")
    capsys.readouterr()
    assert run(tmp_path / "b", text_key="ask?,reply?", **settings) == 1  # as without ?
    out = capsys.readouterr().out
    assert "no text under 'ask?', 'reply?' (keys Question, Answer)" in out
    assert f"1 of 2 files could not be read: {faq}" in out
    assert "warning: 20 of 21 rows could not be understood; errors.tsv says why" in out


def test_an_optional_key_that_no_row_of_a_source_has_is_told(tmp_path, tok, capsys):
    texts = pieces(12)
    a = write_rows(tmp_path / "a.jsonl", [{"Title": f"About {k}", "text": texts[k], "n": None} for k in range(6)])
    b = write_rows(tmp_path / "b.jsonl", [{"text": text} for text in texts[6:]])
    settings = {"tokenizer_dir": tok, "val_fraction": 0.0}
    assert run(tmp_path / "a", input=f"{a},{b}", text_key="title?,text", **settings) == 0
    assert "warning: text_key" not in capsys.readouterr().out  # in some files it may be missing
    sources = f"a: {a}, text_key=titel?+n?+text; b: {b}, text_key=title?+text"
    assert run(tmp_path / "b", input=sources, **settings) == 0
    out = capsys.readouterr().out
    assert "warning: text_key of a: no row has titel?, n?\n" in out
    assert "warning: text_key of b: no row has title?\n" in out
    run(tmp_path / "c", input=b, text_key="a.b?,text", **settings)
    assert "warning: text_key: no row has a.b?\n" in capsys.readouterr().out
    assert "no row has a.b?" in (tmp_path / "c/report.md").read_text("utf-8")


def test_keys_of_several_layouts_need_not_all_occur(tmp_path, tok, capsys):
    """The text_key of docs/data.md for files of any layout warned of those that a corpus lacks."""
    page = (ROOT / "docs/data.md").read_text("utf-8")
    (union,) = re.findall(r"all of these, and texts under `text` \| `--text_key='(.*)'` \|", page)
    texts = pieces(12)
    a = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts[:6]])
    talks = [{"messages": [{"role": "user", "content": text}]} for text in texts[6:]]
    b, c = write_rows(tmp_path / "b.jsonl", talks), tmp_path / "c.txt"
    c.write_text(pieces(13)[12], "utf-8")
    settings = {"tokenizer_dir": tok, "val_fraction": 0.0}
    for k, files in enumerate((f"{a},{b},{c}", f"{b},{c}", f"texts: {a}; talks: {b}")):
        assert run(tmp_path / f"out{k}", input=files, text_key=union, **settings) == 0
        assert "warning: text_key" not in capsys.readouterr().out
    assert run(tmp_path / "out", input=f"{b},{c}", text_key=f"{union},titel?", **settings) == 0
    assert "warning: text_key: no row has titel?\n" in capsys.readouterr().out  # no layout has it
    sources = {"input": f"pages: {c}; talks: {b}, text_key=messages.content"}
    assert run(tmp_path / "pages", text_key="body?", **sources, **settings) == 0
    assert "warning: text_key" not in capsys.readouterr().out  # pages has no rows


# ---- conversations and pairs -----------------------------------------------------------------


def test_conversations_are_filtered_by_question_and_answer(tmp_path):
    def talk(question: str, answer: str) -> dict:
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    answers = pieces(40)
    rows = [talk(f"第{i}个问题是什么？请说说看。", answer) for i, answer in enumerate(answers)]
    rows += [talk("第3个问题是什么？请说说看。", answers[3]), talk("Hi?", answers[5][::-1])]
    rows += [talk("这个问题没有回答，怎么办呢？", "")]
    rows += [talk("第7个问题是什么？请说说看。", answers[7] + "。"), {"messages": "none"}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    run(tmp_path / "out", input=path, kind="chat", rules="question_length=5..", val_fraction=0.2)
    manifest = manifest_of(tmp_path / "out")
    dropped = {"bad_field": 1, "exact_duplicate": 1, "question_length": 1, "empty_answer": 1, "near_duplicate": 1}
    assert manifest["info"]["documents"]["dropped"] == dropped
    found = [json.loads(line) for split in ("train", "val") for line in
             (tmp_path / "out" / f"{split}.jsonl").read_text("utf-8").splitlines()]  # fmt: skip
    questions = [{"role": "user", "content": f"第{i}个问题是什么？请说说看。"} for i in range(len(answers))]
    expected = [{"messages": [q, {"role": "assistant", "content": a}]} for q, a in zip(questions, answers, strict=True)]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert {split: entry["rows"] for split, entry in manifest["splits"].items()}["val"] > 0
    assert run(tmp_path / "out", input=path, kind="chat", rules="question_length=5..", val_fraction=0.2) == 0
    assert run(tmp_path / "again", input=tmp_path / "out" / "train.jsonl", kind="chat") == 0  # its own output


def talk(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_questions_on_one_passage_are_no_copies(tmp_path):
    """Neither with answers of their own nor with the same short one; a near copy in question and answer is."""
    texts = [" ".join(text.split()) for text in pieces(60)]
    asked = ("Who is it about?", "Where was that?", "Why is that so?", "What came then?", "Is it true, yes or no?")
    rows = [talk(f"{texts[k] * 2}\n{question}", answer) for k in range(20) for question, answer in
            zip(asked, (texts[20 + k], texts[20 + k][::-1], "Nobody knows.", "yes", "yes"), strict=True)]  # fmt: skip
    copies = [talk(f"{texts[k] * 3} Please.", f"Well: {texts[k + 1] * 2}") for k in range(40, 50)]
    rows += [talk(f"{texts[k] * 3}", f"{texts[k + 1] * 2}") for k in range(40, 50)] + copies
    run(tmp_path / "out", input=write_rows(tmp_path / "x.jsonl", rows), kind="chat", val_fraction=0.0)
    assert rows_in(tmp_path / "out")["train"] == rows[:-10]
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"near_duplicate": 10}


def test_rows_under_other_system_messages_tools_or_results_are_no_copies(tmp_path, capsys):
    question, answer, other = pieces(3)
    asked, said = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    tools = [[{"type": "function", "function": {"name": name}}] for name in ("f", "g")]
    systems = ("", "Answer as a pirate.", "You are the support assistant", other)
    rows = [{"messages": [{"role": "system", "content": text}][: len(text)] + [asked, said]} for text in systems]
    rows += [{"messages": [asked, said], "tools": tool} for tool in tools]
    rows += [{"messages": [asked, call, {"role": "tool", "content": text}, said]} for text in ("4", "It is cold.")]
    near = [{"messages": [{"role": "system", "content": other.upper()}, asked | {"content": f"{question}!"}, said]}]
    path = write_rows(tmp_path / "x.jsonl", rows + near)
    run(tmp_path / "out", input=path, kind="chat", val_fraction=0.0)
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"near_duplicate": 1}
    assert len(rows_in(tmp_path / "out")["train"]) == len(rows)
    # pairs alike
    pairs = [{"prompt": row["messages"][:-1], "chosen": answer, "rejected": other, **row, "messages": None}
             for row in rows + near]  # fmt: skip
    run(tmp_path / "pairs", input=write_rows(path, pairs), kind="preference", val_fraction=0.0)
    assert manifest_of(tmp_path / "pairs")["info"]["documents"]["dropped"] == {"near_duplicate": 1}
    assert "are copies of rows" not in capsys.readouterr().out


def test_a_source_that_is_mostly_copies_of_others_is_named(tmp_path, capsys):
    texts = pieces(20)
    first = write_rows(tmp_path / "a.jsonl", [talk(texts[k], texts[k + 1]) for k in range(8)])
    last = write_rows(tmp_path / "b.jsonl", [talk(f"{texts[k]}!", f"Well: {texts[k + 1]}") for k in range(3, 13)])
    sources = f"a: {first}; b: {last}"
    run(tmp_path / "out", input=sources, kind="chat", val_fraction=0.0)
    assert "are copies of rows" not in capsys.readouterr().out  # 5 of 10
    write_rows(last, [talk(f"{texts[k]}!", f"Well: {texts[k + 1]}") for k in range(3, 12)])
    run(tmp_path / "out", input=sources, kind="chat", val_fraction=0.0)
    line = "warning: 5 of 9 rows of b are copies of rows of a; dropped.tsv has both places"
    assert capsys.readouterr().out.count(line) == 1 and line in (tmp_path / "out/report.md").read_text("utf-8")


def test_short_chats_in_a_corpus_are_kept_and_short_texts_are_not(tmp_path):
    """A turn in Chinese has half the characters that it has in English."""
    write_rows(tmp_path / "chat.jsonl", [talk("你好", "你好！"), talk("Hi", "Hello")])
    (tmp_path / "asked.jsonl").write_text('{"question": "几点了？", "answer": "三点。"}\n', "utf-8")
    texts = ["太短了。", "a line", "A text that is long enough to be kept."]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), "utf-8")
    named = f"c: {tmp_path}/chat.jsonl, text_key=messages.content; a: {tmp_path}/asked.jsonl; t: {tmp_path}/text.jsonl"
    run(tmp_path / "out", input=named, vocab_size=384, val_fraction=0.0)
    info = manifest_of(tmp_path / "out")["info"]
    assert {name: of["kept"] for name, of in info["sources"].items()} == {"c": 2, "a": 1, "t": 1}
    assert info["documents"]["dropped"] == {"min_length": 2}
    run(tmp_path / "own", input=named, vocab_size=384, val_fraction=0.0, rules="length=8..")  # the user's own holds
    info = manifest_of(tmp_path / "own")["info"]
    assert {name: of["kept"] for name, of in info["sources"].items()} == {"c": 1, "a": 1, "t": 1}


def test_short_answers_are_kept(tmp_path):
    """Rules on length are for texts, unless a length is given; what is garbled is dropped, in any answer."""
    rows = [talk("谢谢", "不客气！"), talk("What is 2+2?", "4"), talk("2+2?", "4\ufffd4")]
    path = write_rows(tmp_path / "x.jsonl", rows)
    run(tmp_path / "out", input=path, kind="chat", val_fraction=0.0)
    assert rows_in(tmp_path / "out")["train"] == rows[:2]
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"replacement_characters": 1}
    run(tmp_path / "out", input=path, kind="chat", val_fraction=0.0, rules="length=9.., replacement_characters=off")
    assert rows_in(tmp_path / "out")["train"] == rows[1:2]
    rows = [{"prompt": "2+2?", "chosen": "4", "rejected": answer} for answer in ("5", "4\ufffd4")]
    run(tmp_path / "pairs", input=write_rows(path, rows), kind="preference", val_fraction=0.0)
    assert [row["rejected"] for row in rows_in(tmp_path / "pairs")["train"]] == ["5"]
    with pytest.raises(UserError, match="quality=web has no effect with kind=chat; leave it out"):
        run(tmp_path / "out", input=f"a: {path}, quality=web", kind="chat")


def test_prepare_keeps_what_the_trainers_keep(tmp_path, tok):
    """Every row, alone: kept by both or by none."""
    empty = ("", " \n", "\u200b", "\ufeff\x00", "\u200d")
    answers = ("a", "b", "4 ", "4", "e\u0301", "\u00e9", "a\u200b", "<|im_end|>", *empty)
    roles = ("system", "user", "assistant", "tool")
    rows = [{"messages": [{"role": role, "content": "x"} for role in some]}
            for n in (1, 2, 3, 4) for some in itertools.product(roles, repeat=n)]  # fmt: skip
    rows += [talk("q", answer) for answer in answers] + [talk("q", "a") | {"label": label} for label in (True, False)]
    kept = {}
    for kind in ("chat", "preference"):
        recipe = prepare.check_config(KEYS | {"input": "x", "out_dir": "x", "kind": kind})
        judge = unit.Judge(recipe.sources[0], recipe, tmp_path)
        reader = conversations.ChatReader(Tokenizer.load(tok))
        if kind == "preference":
            prompts = [row["messages"] for row in rows if row["messages"][-1]["role"] != "assistant"]
            rows = [{"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in prompts]
            rows += [{"prompt": "q", "chosen": a, "rejected": b} for a, b in itertools.product(answers, repeat=2)]
            rows += [{"prompt": "q", "chosen": "a", "rejected": "b", "finish_reason": "length"}]
            reader = pairs.PairReader(Tokenizer.load(tok), 10**6)
        for row in rows:
            item, problem = judge.understand(row)
            ours = not problem and judge.judge(item)[0] == "kept" and not item.text.isspace()
            try:
                theirs = bool(reader.item(row, ""))
            except BadRow:
                theirs = False
            assert ours == theirs, row
            kept[kind, ours] = kept.get((kind, ours), 0) + 1
    assert len(kept) == 4 and min(kept.values()) > 10


TALK = [{"who": "Ann", "says": "How much is 2 + 2, please?"}, {"who": "Bot", "says": "It is 4."}]


@pytest.mark.parametrize(("kind", "row", "text_key"), [
    ("chat", {"talk": TALK}, ""),
    ("chat", {"talk": TALK}, "messages=talk"),
    ("chat", {"talk": TALK}, "content=says,messages=talk"),
    ("chat", {"ask": "2 + 2?", "reply": "4"}, "answer=reply"),
    ("preference", {"ask": "2 + 2?", "good": "4", "bad": "5"}, "question=ask"),
])  # fmt: skip
def test_the_text_key_of_a_hint_can_be_typed_as_it_stands(tmp_path, kind, row, text_key):
    """Each hint repeats what was given; only KEY and ROLE are for the user to replace."""
    path = write_rows(tmp_path / "a.jsonl", [row])
    blanks = {"answer=KEY": "answer=reply", "question=KEY": "question=ask", "chosen=KEY": "chosen=good",
              "rejected=KEY": "rejected=bad", "ROLE=Ann": "user=Ann", "ROLE=Bot": "assistant=Bot"}  # fmt: skip
    for _ in range(4):
        try:
            run(tmp_path / "out", input=path, kind=kind, text_key=text_key, val_fraction=0.0, near=0.0)
            break
        except UserError as error:
            pieces = re.search("--text_key='([^']*)'", str(error))[1].split(",")
        given = text_key.split(",") if text_key else []
        assert pieces[: len(given)] == given
        text_key = ",".join(blanks.get(piece, piece) for piece in pieces)
    assert manifest_of(tmp_path / "out")["splits"]["train"]["rows"] == 1


@pytest.mark.parametrize("key", ["messages", "thread_of_mine"])
def test_turns_that_text_key_skips_are_left_out_and_counted(tmp_path, capsys, key):
    """Support threads hold notes that customers never saw; no role of training fits them."""
    turns = [{"author": name, "body": f"{name} says: good morning to you"}
             for name in ("customer", "internal_note", "agent", "bot.log", "internal_note")]  # fmt: skip
    path = write_rows(tmp_path / "a.jsonl", [{key: turns, "internal_note": "n"}, {key: turns[1:2]}])
    names = f"messages={key},role=author,content=body,user=customer,assistant=agent,skip=internal_note,skip=bot.log"
    settings = {"input": path, "kind": "chat", "val_fraction": 0.0, "near": 0.0}
    with pytest.raises(UserError, match="'internal_note'.*for ROLE, or skip to leave such turns out"):
        run(tmp_path / "out", text_key=names.partition(",skip")[0], **settings, strict=True)
    run(tmp_path / "out", text_key=names, **settings)
    question, answer = (turn["body"] for turn in (turns[0], turns[2]))
    assert rows_in(tmp_path / "out")["train"] == [talk(question, answer)]
    assert manifest_of(tmp_path / "out")["info"]["documents"]["mended"] == {"turns_skipped": 3}
    printed = capsys.readouterr().out
    assert "mended: 3 turns_skipped" in printed and "keys not read: internal_note in 1 row" in printed
    assert (tmp_path / "out" / "errors.tsv").read_text("utf-8").rstrip().endswith("no turns")


def test_text_key_gives_other_names_to_the_keys_of_rows(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("编号,问题,回答\n1,水的沸点？,一百度。\n2,,没有问题。\n", "utf-8")
    with pytest.raises(UserError, match="text_key='question=KEY,answer=KEY' reads other names"):
        run(tmp_path / "out", input=path, kind="chat", strict=True)
    run(tmp_path / "out", input=f"qa: {path}, text_key=question=问题+answer=回答", kind="chat", val_fraction=0.0)
    rows = [talk("水的沸点？", "一百度。"), talk("", "没有问题。")]
    assert rows_in(tmp_path / "out")["train"] == [row | {"source": "qa"} for row in rows]
    pair = {"ask": {"text": "q"}, "good": "a", "bad": "b"}
    settings = {"kind": "preference", "text_key": "prompt=ask.text, chosen=good, rejected=bad", "val_fraction": 0.0}
    run(tmp_path / "pairs", input=write_rows(tmp_path / "p.jsonl", [pair]), **settings)
    assert rows_in(tmp_path / "pairs")["train"] == [
        {"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"}
    ]
    with pytest.raises(UserError, match="text_key='question'; for conversations and pairs write question=KEY"):
        run(tmp_path / "out", input=path, kind="chat", text_key="question")


def test_files_that_are_not_what_their_name_says_are_named(tmp_path, tok, capsys):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "a.jsonl.gz").write_text(pointer, "utf-8")
    write_rows(tmp_path / "b.txt", [{"text": text} for text in pieces(3)])
    (tmp_path / "c.html").write_text("<!DOCTYPE html>\n<p>A text on a page.</p>", "utf-8")
    assert run(tmp_path / "out", input=f"{tmp_path}/*.*", tokenizer_dir=tok) == 1
    printed = capsys.readouterr().out
    assert "a.jsonl.gz: cannot be read: a pointer of Git LFS, not the file; run git lfs pull" in printed
    hint = "if its rows are meant, let its name end in .jsonl"
    assert f"b.txt looks like JSON lines but is read as plain text; {hint}" in printed
    assert "c.html looks like HTML or XML but is read as plain text; " in printed


@pytest.mark.parametrize("label", ["label", "kto_tag"])
def test_bad_answers_of_kto_are_dropped(tmp_path, tok, label):
    """By prepare.py and by sft.py, which share the rule, whatever layout a row has."""
    rows = [talk(f"Question {k}?", f"answer {k}") | {label: good} for k, good in enumerate((True, False, 0, None))]
    rows += [{"prompt": "P?", "completion": "c", label: good} for good in (True, False, "False")]
    turns = talk("In turns?", "yes")["messages"]
    rows += [{"prompt": turns[:1], "completion": turns[1:], label: good} for good in (True, False)]
    rows += [{"question": "Is it?", "answer": "No.", label: False}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    run(tmp_path / "out", input=path, kind="chat", val_fraction=0.0)
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"bad_answer": 6}
    expected = [talk(f"Question {k}?", f"answer {k}") for k in (0, 3)]
    expected += [talk("P?", "c"), talk("In turns?", "yes")]
    assert rows_in(tmp_path / "out")["train"] == expected
    source = conversations.read_chat(str(path), Tokenizer.load(tok), 0.0)
    assert len(source.train) == 4 and source.reader.dropped == {"bad answer": 6}


def test_answers_not_to_learn_from_have_no_mask(tmp_path, tok):
    """The same in sft.py and in prepare.py, with its tokens and with its rows."""
    turns = [("user", "One?"), ("assistant", "bad words"), ("user", "Two?"), ("assistant", "good words")]
    flags = ({}, {"weight": 0}, {"train": False}, {"loss": False}, {"loss_scale": 0.0}, {"loss_mask": 0})
    flags += ({"loss_weight": 0},)
    rows = []
    for k, flag in enumerate(flags):
        messages = [{"role": role, "content": f"{said} {k}"} for role, said in turns]
        rows.append({"messages": [messages[0], messages[1] | flag, *messages[2:]]})
    path = write_rows(tmp_path / "x.jsonl", rows)
    run(tmp_path / "out", input=path, kind="chat", val_fraction=0.0, tokenizer_dir=tok)
    tokenizer = Tokenizer.load(tok)
    raw = conversations.read_chat(str(path), tokenizer, 0.0).train
    mapped = conversations.read_chat(str(tmp_path / "out"), tokenizer, 0.0).train
    again = conversations.read_chat(str(tmp_path / "out" / "train.jsonl"), tokenizer, 0.0).train
    for k in range(len(flags)):
        ids, mask = raw.ids(k)
        learned = tokenizer.decode([int(i) for i, one in zip(ids, mask, strict=True) if one])
        both = f"bad words {k}<|im_end|>good words {k}<|im_end|>"
        assert learned == (both if k == 0 else f"good words {k}<|im_end|>")
        plain = [{key: turn[key] for key in ("role", "content")} for turn in rows[k]["messages"]]
        assert ids.tolist() == tokenizer.render(plain)[0]
        for other in (mapped, again):
            assert [one.tolist() for one in other.ids(k)] == [ids.tolist(), mask.tolist()]


def test_keys_that_are_not_read_are_named_once(tmp_path, tok, capsys):
    """By prepare.py, in its report and with --show, and by a trainer's corpus."""
    rows = [talk(f"Question {k}?", f"answer {k}") | {"summary": "s", "id": k, "meta": {}} for k in range(5)]
    rows[0]["messages"][0]["name"] = "Ann"
    path = write_rows(tmp_path / "x.jsonl", rows)
    named = "not read: summary in 5 rows, messages.name in 1 row"
    run(tmp_path / "out", input=f"own: {path}; other: {write_rows(tmp_path / 'y.jsonl', rows[1:2])}", kind="chat")
    of_sources = named.replace("read: ", "read: own: ").replace("rows, ", "rows, other: summary in 1 row, own: ")
    printed = capsys.readouterr().out
    assert printed.count("not read") == 1 and f"keys {of_sources}" in printed
    assert f"- keys {of_sources}\n" in (tmp_path / "out" / "report.md").read_text()
    run(tmp_path / "out2", input=path, kind="chat", show=3)
    assert "keys not read: summary in 3 rows, messages.name in 1 row" in capsys.readouterr().out
    reader = conversations.read_chat(str(path), Tokenizer.load(tok), 0.0).reader
    assert reader.report("x.jsonl") == [f"x.jsonl: {named}"]


def test_texts_with_markers_of_turns_are_warned_of(tmp_path, tok, capsys):
    """minimind's pretrain_hq.jsonl holds conversations as text."""
    texts = [f"<|im_start|>user\nWhat is {k}?<|im_end|>\n<|im_start|>assistant\nA number.<|im_end|>" for k in range(9)]
    path = write_rows(tmp_path / "x.jsonl", [{"text": text} for text in (*texts, "A text without any of them.")])
    run(tmp_path / "out", input=path, tokenizer_dir=tok, near=0.0)
    printed = capsys.readouterr().out
    named = "as <|im_start|> or <s> at the beginning: they stay text"
    assert printed.count(f"warning: names of special tokens in 9 documents, {named}") == 1
    old = ("<s>An older form of it.</s>", "A line of <|user|> and more.", "It ends here.<|endoftext|>")
    run(tmp_path / "old", input=write_rows(tmp_path / "o.jsonl", [{"text": text} for text in old]), tokenizer_dir=tok)
    assert f"names of special tokens in 3 documents, {named}" in capsys.readouterr().out
    plain = ("Quite another text, without.", "Parsers of Haskell: a <|> b, f <| g |> h.", "struck <s>out</s>")
    other = write_rows(tmp_path / "y.jsonl", [{"text": text} for text in plain])
    run(tmp_path / "none", input=other, tokenizer_dir=tok)
    assert "special tokens" not in capsys.readouterr().out


def test_an_unknown_format_is_said_once(tmp_path, tok, capsys):
    rows = [{"问": f"{k}?", "答": "x"} for k in range(30)]
    path = write_rows(tmp_path / "x.jsonl", [*rows, talk("Question?", "answer")])
    run(tmp_path / "out", input=path, kind="chat")
    assert capsys.readouterr().out.count("unknown format") == 1
    reader = conversations.read_chat(str(path), Tokenizer.load(tok), 0.0).reader
    assert "".join(reader.report("x")).count("unknown format") == 1
    assert reader.dropped == {"not understood": 30}


def test_pairs_without_two_different_answers_are_dropped(tmp_path):
    texts = pieces(23)
    rows = [{"prompt": f"Question {i}: {t[:40]}", "chosen": t, "rejected": t[::-1]}
            for i, t in enumerate(texts[:20])]  # fmt: skip
    rows += [{"prompt": "Equal answers?", "chosen": texts[20], "rejected": texts[20]}]
    rows += [{"prompt": "One is empty?", "chosen": texts[21], "rejected": " "}]
    run(tmp_path / "out", input=write_rows(tmp_path / "x.jsonl", rows), kind="preference", val_fraction=0.0)
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"bad_field": 2}
    errors = (tmp_path / "out" / "errors.tsv").read_text("utf-8")
    assert "chosen and rejected are the same" in errors and "empty answer" in errors
    found = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text("utf-8").splitlines()]
    assert [row["chosen"] for row in found] == texts[:20]
    assert found[0]["prompt"] == [{"role": "user", "content": f"Question 0: {texts[0][:40]}"}]


def rows_in(out_dir: Path) -> dict[str, list[dict]]:
    """{split: rows} of a prepared directory of conversations or pairs."""
    splits = manifest_of(out_dir)["splits"]
    return {split: [json.loads(line) for line in (out_dir / entry["file"]).read_text("utf-8").splitlines()]
            for split, entry in splits.items()}  # fmt: skip


def place(text: str, key: bytes) -> float:
    """Where in [0, 1) the hash of a text falls, as the comments of splits.py have it."""
    return int.from_bytes(hashlib.blake2b(text.encode(), key=key, digest_size=8).digest(), "little") / 2**64


def test_held_out_prompts_are_a_share_of_their_own(tmp_path, tok, capsys):
    """By the first question alone: all that was said after it stays together, whatever the system message."""
    rows, prompts = [], {}
    for k in range(300):
        asked = [("user", f"第{k}个问题？")] + [("assistant", "好"), ("user", f"and {k}?")] * (k % 3 == 0)
        asked = [("system", f"be {k}")] * (k % 5 == 0) + asked
        for answer in range(1 + (k % 4 == 0)):
            turns = [*asked, ("assistant", f"answer {answer} of {k}")]
            rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
            prompts[str(rows[-1])] = f"第{k}个问题？"
    rows += [{"messages": [{"role": "assistant", "content": f"I am number {k}."}]} for k in range(40)]  # nothing asked
    path = write_rows(tmp_path / "x.jsonl", rows)
    settings = {"kind": "chat", "rules": "length=1..", "near": 0.0, "val_fraction": 0.2, "tokenizer_dir": tok}
    run(tmp_path / "out", input=path, hold_out=0.25, **settings)
    found = rows_in(tmp_path / "out")
    held_out = [row for row in rows if str(row) in prompts and place(prompts[str(row)], b"hold-out-v1") < 0.25]
    assert found.pop("held_out") == held_out and 50 < len(held_out) < 150
    texts = {str(row): "\n".join(m["content"] for m in row["messages"] if m["role"] != "system") for row in rows}
    for split, least, most in (("train", 0.2, 1), ("val", 0, 0.2)):
        own = [row for row in rows if row not in held_out and least <= place(texts[str(row)], b"split-v1") < most]
        assert found.pop(split) == own
    assert not found
    manifest = manifest_of(tmp_path / "out")
    assert manifest["info"]["documents"]["kept"] == len(rows) == sum(e["rows"] for e in manifest["splits"].values())
    assert "tokens" in manifest["splits"]["val"] and "tokens" not in manifest["splits"]["held_out"]
    out = capsys.readouterr().out
    assert f"held_out{len(held_out):>12} rows" in out and "so do not pretrain on the input" in out
    learnt = conversations.read_chat(str(tmp_path / "out"), Tokenizer.load(tok), 0.0)
    assert len(learnt.train) + len(learnt.val) == len(rows) - len(held_out)
    assert run(tmp_path / "out", input=path, hold_out=0.25, **settings) == 0
    assert "is up to date" in capsys.readouterr().out
    assert prepare.main(KEYS | {"verify": str(tmp_path / "out")}) == 0
    assert "held_out" in capsys.readouterr().out
    with open(tmp_path / "out" / "held_out.jsonl", "r+", encoding="utf-8") as f:
        f.write("[")
    with pytest.raises(ValueError, match=r"held_out\.jsonl"):
        prepare.main(KEYS | {"verify": str(tmp_path / "out")})
    run(tmp_path / "out", input=path, **settings)
    assert "is made anew: hold_out" in capsys.readouterr().out and "held_out" not in rows_in(tmp_path / "out")


def test_more_conversations_and_other_splits_do_not_move_what_is_held_out(tmp_path):
    def held_out(rows: list, **settings) -> list:
        path = write_rows(tmp_path / "x.jsonl", rows)
        run(tmp_path / "out", input=path, kind="chat", rules="length=1..", near=0.0, hold_out=0.3, **settings)
        return rows_in(tmp_path / "out")["held_out"]

    rows = [{"messages": [{"role": "user", "content": f"q {k}"}, {"role": "assistant", "content": "a"}]}
            for k in range(200)]  # fmt: skip
    few = held_out(rows[100:], val_fraction=0.0)
    many = held_out(rows, fold="2/3")
    assert [row for row in many if row in rows[100:]] == few and 15 < len(few) < 45
    assert len(rows_in(tmp_path / "out")["val"]) > 20  # of another hash: the fold has its share of the rest


def test_no_first_question_that_is_held_out_is_learnt(tmp_path):
    """Tuning learns each answer of a conversation, so a longer one goes with its first question, however it is set."""
    rows = []
    for k in range(200):
        asked = [{"role": "user", "content": f"第{k}个问题？"}, {"role": "assistant", "content": f"answer {k}"}]
        more = [{"role": "user", "content": f"and {k}?"}, {"role": "assistant", "content": f"more {k}"}]
        spaced = [asked[0] | {"content": asked[0]["content"] + " \n"}, asked[1]]
        rows += [asked, asked + more, [{"role": "system", "content": "brief"}, *asked], spaced]
    path = write_rows(tmp_path / "x.jsonl", [{"messages": row} for row in rows])
    run(tmp_path / "out", input=path, kind="chat", rules="length=1..", near=-1, hold_out=0.25, val_fraction=0.1)
    found = rows_in(tmp_path / "out")
    asked = {split: {next(m["content"] for m in row["messages"] if m["role"] == "user").strip() for row in own}
             for split, own in found.items()}  # fmt: skip
    assert sum(map(len, found.values())) == 800 and 30 < len(asked["held_out"]) < 70
    assert len(found["held_out"]) == 4 * len(asked["held_out"])
    assert not asked["held_out"] & (asked["train"] | asked["val"])


@pytest.mark.parametrize("kind", ["chat", "preference", "text"])
def test_the_training_rows_of_a_prepared_directory_are_split_again(tmp_path, capsys, kind):
    """Its val took the lowest hashes away, so by them the second val would be empty."""
    rows = [{"prompt": f"q{k}", "chosen": f"good {k}", "rejected": "bad"} for k in range(400)]
    if kind == "chat":
        talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        rows = [{"messages": [talk[0] | {"content": f"q{k}"}, talk[1]]} for k in range(400)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    if kind == "text":  # rows of a documents' file, not written by prepare.py itself
        texts = [f"text {k}" for k in range(400)]
        path = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in texts if place(t, b"split-v1") >= 0.1])
    settings = {"kind": kind, "rules": "length=1..", "near": -1, "val_fraction": 0.1}
    if kind != "text":
        run(tmp_path / "once", input=path, **settings)
        path = tmp_path / "once" / "train.jsonl"
    n = len(Path(path).read_text("utf-8").splitlines())
    capsys.readouterr()
    run(tmp_path / "twice", input=path, **settings | {"val_fraction": 0.05, "test_fraction": 0.04})
    assert "picked none" not in capsys.readouterr().out
    splits = manifest_of(tmp_path / "twice")["splits"]
    count = "documents" if kind == "text" else "rows"
    assert abs(splits["val"][count] - 0.05 * n) <= 1 and abs(splits["test"][count] - 0.04 * n) <= 1


def test_too_few_conversations_to_hold_out_are_told(tmp_path, capsys):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write_rows(tmp_path / "x.jsonl", [{"messages": talk}])
    share = place("q", b"hold-out-v1")
    settings = {"input": path, "kind": "chat", "rules": "length=1..", "val_fraction": 0.0}
    run(tmp_path / "out", hold_out=share * 0.99, **settings)
    said = capsys.readouterr().out
    assert "warning: hold_out=" in said and " of 1 conversation picked none" in said
    with pytest.raises(UserError, match="no document is left for train; lower val_fraction or hold_out"):
        run(tmp_path / "other", hold_out=share * 1.01, **settings)


def test_pairs_keep_their_numbers_and_their_prompts_together(tmp_path):
    numbers = [{"margin": 0.5, "difficulty": "3"}, {"score": 7, "margin": None}, {"margin": float("inf"), "extra": 1},
               {"made_by": "model 12", "margin": True}]  # fmt: skip
    kept = [{"margin": 0.5, "difficulty": 3.0}, {"score": 7.0}, {}, {"made_by": "model 12"}]
    rows, expected = [], []
    for k in range(120):
        pair = {"chosen": f"好 {k}", "rejected": f"bad {k}"}
        prompt = [{"role": "system", "content": f"s{k}"}, {"role": "user", "content": f"Question {k // 3}？"}]
        rows.append({"prompt": prompt} | pair | numbers[k % 4])
        expected.append({"prompt": prompt} | pair | kept[k % 4])
    rows.append(rows[0] | {"margin": 0.75})  # the same pair, if not the same row
    path = write_rows(tmp_path / "x.jsonl", rows)
    settings = {"kind": "preference", "rules": "length=1..", "near": 0.0}
    run(tmp_path / "out", input=path, val_fraction=0.2, test_fraction=0.1, **settings)
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"exact_duplicate": 1}
    found = rows_in(tmp_path / "out")
    for split, least, most in (("test", 0, 0.1), ("val", 0.1, 0.3), ("train", 0.3, 1)):
        own = [row for row in expected if least <= place(row["prompt"][1]["content"], b"split-v1") < most]
        assert found[split] == own and 3 <= len(own)
    again = tmp_path / "out" / "train.jsonl"
    run(tmp_path / "again", input=again, kind="preference", rules="length=1..", near=0.0, val_fraction=0.0)
    assert rows_in(tmp_path / "again")["train"] == found["train"]  # its own output


def test_pairs_of_one_prompt_are_learnt(tmp_path):
    rows = [{"prompt": "The only one?", "chosen": f"good {k}", "rejected": f"bad {k}"} for k in range(5)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    run(tmp_path / "out", input=path, kind="preference", rules="length=1..", near=0.0, val_fraction=0.5)
    assert {split: len(own) for split, own in rows_in(tmp_path / "out").items()} == {"train": 5}


def test_no_prompt_of_two_sources_is_in_two_splits(tmp_path):
    """Also where one has so few that val would take the next one of it, or one is all that it has."""
    def rows(numbers: range, side: str) -> list[dict]:
        return [{"prompt": f"Question {k}?", "chosen": "good", "rejected": f"{side} {k}"} for k in numbers]

    for n in range(2, 12):
        first = write_rows(tmp_path / "a.jsonl", rows(range(n), "bad"))
        second = write_rows(tmp_path / "b.jsonl", rows(range(1, n, 2), "worse"))
        settings = {"kind": "preference", "rules": "length=1..", "near": 0.0, "val_fraction": 0.02}
        run(tmp_path / "out", input=f"a: {first}; b: {second}", **settings)
        found = rows_in(tmp_path / "out")
        train, val = ({row["prompt"][0]["content"] for row in found.get(split, [])} for split in ("train", "val"))
        assert not train & val and len(train | val) == n and len(val) == 1


def test_only_pairs_to_listed_questions_are_kept(tmp_path):
    """By the first question, as hold_out has it; the others are counted, and the file is part of what is compared."""
    listed = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": f"问题 {k}？ "},
                            {"role": "assistant", "content": "其他"}]} for k in range(0, 40, 4)]  # fmt: skip
    questions = write_rows(tmp_path / "held_out.jsonl", listed)
    asked = [[{"role": "user", "content": f"问题 {k}？"}] for k in range(40)]
    asked[4] += [{"role": "assistant", "content": "好"}, {"role": "user", "content": "然后呢？"}]
    rows = [{"prompt": prompt, "chosen": f"好 {k}", "rejected": f"坏 {k}"} for k, prompt in enumerate(asked)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    settings = {"input": path, "kind": "preference", "rules": "length=1..", "near": 0.0, "val_fraction": 0.0}
    run(tmp_path / "out", prompts_from=questions, **settings)
    assert rows_in(tmp_path / "out")["train"] == rows[::4]
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"other_prompt": 30}
    write_rows(questions, listed[1:])
    run(tmp_path / "out", prompts_from=questions, **settings)
    assert rows_in(tmp_path / "out")["train"] == rows[4::4]
    write_rows(questions, [*listed, {"text": "no conversation"}])
    with pytest.raises(UserError, match=r"prompts_from: .*held_out.jsonl:11: another kind: .*; give conversations"):
        run(tmp_path / "out", prompts_from=questions, **settings)


def test_pairs_with_an_answer_that_was_cut_off_are_dropped(tmp_path):
    pair = {"chosen": "好的回答", "rejected": "bad answer"}
    marks = [
        {"finish_reason": "length"}, {"chosen_finish_reason": "length"}, {"rejected_finish_reason": "length"},
        {"completions": [{"text": "bad answer", "finish_reason": "length"}]},
    ]  # fmt: skip
    whole = [{"finish_reason": "stop"}, {"completions": [{"text": "another", "finish_reason": "length"}]}, {}]
    rows = [{"prompt": f"Question {k}?"} | pair | mark for k, mark in enumerate(marks + whole)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    run(tmp_path / "out", input=path, kind="preference", rules="length=1..", near=0.0, val_fraction=0.0)
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"unfinished_answer": 4}
    kept = [row["prompt"][0]["content"] for row in rows_in(tmp_path / "out")["train"]]
    assert kept == ["Question 4?", "Question 5?", "Question 6?"]


# ---- show ------------------------------------------------------------------------------------


def shown(capsys, **settings) -> str:
    prepare.main(KEYS | settings)
    return capsys.readouterr().out


def test_show_tells_format_tokens_and_what_is_dropped(tmp_path, tok, capsys):
    rows = [{"text": pieces(3)[0]}, {"text": pieces(3)[0].upper()}, {"text": "short"}, {"txt": "unknown"}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    out = shown(capsys, input=str(path), show=9, tokenizer_dir=tok)
    assert "4 rows: 1 would be kept, 3 not" in out
    assert f"exact_duplicate: 1.00 like {path} at byte 0" in out and "DROPPED: min_length" in out
    assert "NOT UNDERSTOOD: " in out and "txt" in out.partition("NOT UNDERSTOOD")[2]
    tokenizer = Tokenizer.load(tok)
    assert len(tokenizer.encode(rows[0]["text"])) > 100
    first = out.partition("   kept\n   ")[2].splitlines()[0]
    names = [tokenizer.decode([i]) for i in tokenizer.encode(rows[0]["text"])[:20]]
    assert first.startswith("|".join(repr(name)[1:-1] for name in names))
    assert not list(tmp_path.glob("out*"))


def test_show_marks_what_the_model_learns_to_say(tmp_path, tok, capsys):
    talk = [("system", "be kind"), ("user", "你好吗？这是一个问题。"), ("assistant", "很好，谢谢你这样问我。")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in talk]}]
    out = shown(capsys, input=str(write_rows(tmp_path / "x.jsonl", rows)), show=1, kind="chat", tokenizer_dir=tok)
    marked = out.partition("[[")[2].partition("]]")[0]
    tokenizer = Tokenizer.load(tok)
    ids, mask = tokenizer.render(rows[0]["messages"])
    assert marked.endswith("<|im_end|>") and out.count("[[") == 2  # the line that explains the marks has them, too
    assert f"({sum(mask)} of " in out
    learnt = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    plain = "".join(c for c in marked if c not in "|~0123456789")
    assert plain == learnt.replace("|", "")
    out = shown(capsys, input=str(tmp_path / "x.jsonl"), show=1, tokenizer_dir=tok)
    assert "NOT UNDERSTOOD" in out and "chat" in out  # as a text it is nothing


def test_show_counts_the_files_that_so_few_rows_do_not_reach(tmp_path, capsys):
    for name in "abc":
        write_rows(tmp_path / f"{name}.jsonl", [{"text": pieces(3)[0]}])
    out = shown(capsys, input=str(tmp_path), show=1)
    assert "==== " in out and "b.jsonl" not in out and "2 files not looked at: a larger --show reaches more" in out
    assert "not looked at" not in shown(capsys, input=str(tmp_path), show=3)


def test_a_conversation_that_the_template_refuses_is_counted(tmp_path, tok, capsys):
    """The template of a published checkpoint wants user and assistant in turn; the other rows stay."""
    config = json.loads((Path(tok) / "tokenizer_config.json").read_bytes())
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turn order') }}{% endif %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    shutil.copytree(tok, tmp_path / "foreign")
    to = tmp_path / "foreign" / "tokenizer_config.json"
    to.write_text(json.dumps(config | {"chat_template": template}), encoding="utf-8")
    roles = [("user", "assistant"), ("system", "user", "assistant"), ("system", "user", "assistant")]
    talks = [[{"role": role, "content": f"{role} 说 {k}"} for role in talk] for k, talk in enumerate(roles)]
    write_rows(tmp_path / "x.jsonl", [{"messages": talk} for talk in talks])
    settings = {"input": str(tmp_path / "x.jsonl"), "kind": "chat", "tokenizer_dir": str(tmp_path / "foreign")}
    out = shown(capsys, **settings, show=3)
    assert out.count("turn order") == 2
    run(tmp_path / "out", **settings)
    documents = manifest_of(tmp_path / "out")["info"]["documents"]
    assert documents["dropped"] == {"not_rendered": 2} and documents["kept"] == 1


# ---- runs that follow runs ---------------------------------------------------------------------


class Killed(BaseException):
    pass


def killed_in(monkeypatch: pytest.MonkeyPatch, module, name: str, out_dir: Path, at: int = 1, **settings) -> None:
    """A run that ends, as by a kill, when it calls a function for the `at`-th time; what it has written stays."""
    real, calls = getattr(module, name), []

    def dies(*args, **options):
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, dies)
        with pytest.raises(Killed):
            run(out_dir, **settings)


def test_what_another_run_rewrote_is_not_taken_for_done(tmp_path, tok, monkeypatch):
    """Killed, then run with other settings and killed in the middle of a unit, then as at first."""
    path = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in pieces(60)])
    first = {"input": path, "tokenizer_dir": tok, "near": 0.0}
    run(tmp_path / "straight", **first)
    killed_in(monkeypatch, prepare.selection, "select", tmp_path / "out", **first)
    killed_in(monkeypatch, unit.dedup, "exact_key", tmp_path / "out", at=9, **first | {"rules": "stop_words=on"})
    run(tmp_path / "out", **first)
    assert content(tmp_path / "out") == content(tmp_path / "straight")
    (tmp_path / "small").mkdir()
    train(pieces(60), 400).save(tmp_path / "small")
    killed_in(monkeypatch, prepare.selection, "write_splits", tmp_path / "again", **first)
    other = first | {"tokenizer_dir": tmp_path / "small"}
    killed_in(monkeypatch, unit.np, "array", tmp_path / "again", at=3, **other)
    run(tmp_path / "again", **first)
    assert content(tmp_path / "again") == content(tmp_path / "straight")


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, path.stat().st_size - 5), Path.unlink])
def test_a_file_of_a_unit_that_a_power_cut_shortened_is_made_again(tmp_path, tok, monkeypatch, change):
    """The small record that is written last may be on the disk before all of a large file is."""
    path = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in pieces(60)] + [{"number": 1}])
    settings = {"input": path, "tokenizer_dir": tok, "max_bad_fraction": 1.0}
    run(tmp_path / "straight", **settings)
    for name in ("rows", "docs", "sigs", "problems", "tokens", "lengths"):
        killed_in(monkeypatch, prepare.report, "write_report", tmp_path / name, **settings)
        change(tmp_path / f".{name}.work.tmp" / "units" / f"000000.{name}")
        run(tmp_path / name, **settings)
        assert content(tmp_path / name) == content(tmp_path / "straight"), name


def test_other_copies_and_held_out_questions_need_no_second_reading(tmp_path, monkeypatch):
    rows = [talk(f"Question {k}?", f"{t[:200]} {k}") for k, t in enumerate(pieces(30))]
    settings = {"input": write_rows(tmp_path / "x.jsonl", rows), "kind": "chat", "val_fraction": 0.1}
    killed_in(monkeypatch, prepare.selection, "select", tmp_path / "out", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(unit, "Inspector", None)
        for k, other in enumerate(({"near": 0.95, "hold_out": 0.3}, {"near": 0.5}, {"near": 0})):
            shutil.copytree(tmp_path / ".out.work.tmp", tmp_path / f".{k}.work.tmp")
            run(tmp_path / str(k), **settings | other)
    for k, other in enumerate(({"near": 0.95, "hold_out": 0.3}, {"near": 0.5}, {"near": 0})):
        run(tmp_path / f"again{k}", **settings | other)
        assert content(tmp_path / str(k)) == content(tmp_path / f"again{k}")


def test_a_tokenizer_is_not_kept_for_text_in_other_case(tmp_path, monkeypatch):
    path, settings = tmp_path / "x.jsonl", {"vocab_size": 512, "near": 0.0}
    write_rows(path, [{"text": t} for t in pieces(60)])
    killed_in(monkeypatch, prepare.selection, "write_splits", tmp_path / "out", input=path, **settings)
    write_rows(path, [{"text": t.upper()} for t in pieces(60)])
    run(tmp_path / "out", input=path, **settings)
    run(tmp_path / "straight", input=path, **settings)
    assert content(tmp_path / "out") == content(tmp_path / "straight")


def test_two_runs_in_one_process_do_not_share_tokenizer_or_questions(tmp_path, tok):
    (tmp_path / "small").mkdir()
    train(pieces(60), 400).save(tmp_path / "small")
    path = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in pieces(20)])
    for name, directory in (("a", tok), ("b", str(tmp_path / "small"))):
        run(tmp_path / name, input=path, tokenizer_dir=directory, near=0.0, val_fraction=0.0)
        assert texts_of(tmp_path / name) == pieces(20)
    for k in (3, 8):
        questions = write_rows(tmp_path / f"q{k}.jsonl", [{"question": pieces(20)[k][:150]}])
        settings = {"near": 0.0, "val_fraction": 0.0, "decontaminate": questions}
        run(tmp_path / f"c{k}", input=path, tokenizer_dir=tok, **settings)
        assert texts_of(tmp_path / f"c{k}") == [t for i, t in enumerate(pieces(20)) if i != k]


def test_a_copy_of_something_dropped_is_kept(tmp_path, tok, capsys):
    good = pieces(6)
    rows = [{"text": good[0], "bpb": 9.0}, *({"text": t, "bpb": 0.5} for t in good)]
    common = {"input": write_rows(tmp_path / "x.jsonl", rows), "tokenizer_dir": tok, "near": 0.0, "val_fraction": 0.0}
    run(tmp_path / "out", score="bpb=0..1", **common)
    assert texts_of(tmp_path / "out") == good
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"score": 1}
    out = shown(capsys, show=9, score="bpb=0..1", **common | {"input": str(common["input"])})
    assert "7 rows: 6 would be kept, 1 not" in out and "DROPPED: score: bpb 9 is outside 0..1" in out


def test_a_file_belongs_to_the_first_source_that_names_it(tmp_path, tok, capsys):
    a, b = (write_rows(tmp_path / f"{name}.jsonl", [{"text": t} for t in ts])
            for name, ts in (("a", pieces(40)[:20]), ("b", pieces(40)[20:])))  # fmt: skip
    settings = {"tokenizer_dir": tok, "near": 0.0}
    run(tmp_path / "out", input=f"a: {a}; b: {a}, {b}; c: {b}", **settings)
    out = capsys.readouterr().out
    assert "nothing is left for train of source c" in out and f"{a} is in an earlier source already" in out
    assert " more)" not in out
    assert len(texts_of(tmp_path / "out", "train", "a") + texts_of(tmp_path / "out", "val", "a")) == 20
    run(tmp_path / "none", input=f"a: {a}, {b}; b: {a}, {b}", **settings)  # one is named, the other counted
    assert capsys.readouterr().out.count("is in an earlier source already, and is left out of b (and 1 more)") == 1
    run(tmp_path / "out", input=f"a: {a}, {b}; b: {b}", **settings)  # moved: not up to date
    assert len(texts_of(tmp_path / "out", "train", "a") + texts_of(tmp_path / "out", "val", "a")) == 40


def test_a_tokenizer_is_trained_on_every_source(tmp_path, capsys):
    """Each by its own documents: a name that is shared between the sources would give those of the last one only."""
    a, b = (write_rows(tmp_path / f"{k}.jsonl", [{"text": t} for t in pieces(60)[k::2]]) for k in (0, 1))
    run(tmp_path / "out", input=f"a: {a}; b: {b}", vocab_size=400, near=0.0, val_fraction=0.0)
    assert capsys.readouterr().out.count(", 30 texts, 0 of them cut") == 2


def test_the_only_document_of_a_source_gives_its_end(tmp_path, tok):
    many = write_rows(tmp_path / "x.jsonl", [{"text": t} for t in pieces(30)])
    (tmp_path / "book.txt").write_text(pieces(31)[30], "utf-8")
    run(tmp_path / "out", input=f"web: {many}; book: {tmp_path}/book.txt", tokenizer_dir=tok, val_fraction=0.5)
    train, val = (texts_of(tmp_path / "out", split, "book") for split in ("train", "val"))
    assert train[0] + val[0] == pieces(31)[30] and abs(len(train[0]) - len(val[0])) < 2


def test_conversations_are_cleaned_like_texts(tmp_path):
    talk = {"messages": [{"role": "user", "content": "Tell\u200b me about\r\ncafe\u0301s, please."},
                         {"role": "assistant", "content": "\ufeffThey serve coffee,\x00 mostly in the morning."}]}
    path = write_rows(tmp_path / "x.jsonl", [talk] * 2)
    run(tmp_path / "out", input=path, kind="chat", val_fraction=0.0, near=-1)
    row = json.loads((tmp_path / "out" / "train.jsonl").read_text("utf-8").splitlines()[0])
    expected = ["Tell me about\ncaf\u00e9s, please.", "They serve coffee, mostly in the morning."]
    assert [message["content"] for message in row["messages"]] == expected
    info = manifest_of(tmp_path / "out")["info"]["bytes"]
    removed = sum(len(m["content"].encode()) for m in talk["messages"]) - sum(len(text.encode()) for text in expected)
    assert info["cleaned"] == 2 * removed
    assert prepare.main(KEYS | {"verify": str(tmp_path / "out")}) == 0


def test_pairs_that_differ_in_the_rejected_answer_are_no_copies(tmp_path):
    rows = [{"prompt": "Which of these two is better?", "chosen": pieces(1)[0], "rejected": t} for t in pieces(4)[1:]]
    run(tmp_path / "out", input=write_rows(tmp_path / "x.jsonl", rows + rows[:1]), kind="preference", val_fraction=0.0)
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"exact_duplicate": 1}


def test_unlike_rejected_answers_to_one_prompt_are_no_copies(tmp_path):
    """However long the prompt and the chosen answer are; near copies of whole pairs are, in every part of them."""
    texts = [text[:240] for text in pieces(60)]
    rows, copies = [], []
    for k in range(0, 60, 6):
        prompt, chosen = f"Question {k}: {texts[k] * 3}", texts[k + 1] * 3
        rows += [{"prompt": prompt, "chosen": chosen, "rejected": text} for text in texts[k + 2 : k + 6]]
        like = {"prompt": prompt + " Please.", "chosen": "Yes. " + chosen, "rejected": rows[-1]["rejected"] + " 好"}
        copies.append(like)
        shorter = rows[-1] | {"rejected": rows[-1]["rejected"][:100]}  # less than half of it is the same
        rows.append(shorter)
        rows.append({"prompt": texts[k + 2], "chosen": texts[k + 1], "rejected": texts[2]})  # so often said, and wrong
    path = write_rows(tmp_path / "x.jsonl", rows + copies)
    run(tmp_path / "out", input=path, kind="preference", val_fraction=0.0)
    kept = [(row["prompt"][0]["content"], row["chosen"], row["rejected"]) for row in rows_in(tmp_path / "out")["train"]]
    assert kept == [(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
    assert manifest_of(tmp_path / "out")["info"]["documents"]["dropped"] == {"near_duplicate": len(copies)}


def test_pairs_without_words_are_no_copies(tmp_path):
    pair = {"prompt": "How was the film that we saw?", "chosen": "It was good."}
    rows = [pair | {"rejected": mark} for mark in ("!?", "...")]
    run(tmp_path / "out", input=write_rows(tmp_path / "x.jsonl", rows), kind="preference", val_fraction=0.0)
    assert len(rows_in(tmp_path / "out")["train"]) == 2


def test_numbers_of_csv_count_as_scores(tmp_path, tok):
    lines = ["text,bpb"] + [f'"{t.replace(chr(34), "")}",{i / 10}' for i, t in enumerate(pieces(10))]
    (tmp_path / "x.csv").write_text("\n".join(lines), "utf-8")
    settings = {"tokenizer_dir": tok, "near": 0.0, "score": "bpb=0.3..0.55", "val_fraction": 0.0}
    run(tmp_path / "out", input=tmp_path / "x.csv", **settings)
    assert len(texts_of(tmp_path / "out")) == 3


def test_many_units_need_few_open_files(tmp_path, tok, monkeypatch):
    import resource

    monkeypatch.setattr(unit, "GROUP_BYTES", 0)
    (tmp_path / "in").mkdir()
    for i, text in enumerate(pieces(90)):
        (tmp_path / "in" / f"{i:03d}.txt").write_text(text, "utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 60, hard))
    try:
        run(tmp_path / "out", input=tmp_path / "in", tokenizer_dir=tok, near=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(texts_of(tmp_path / "out") + texts_of(tmp_path / "out", "val")) == 90


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"kind": "chat", "pack": 8}, "pack=8 has no effect with kind=chat"),
        ({"near": -0.5}, "near must be from 0 (off) to 1, or -1, got -0.5"),
        ({"hold_out": 0.25}, "hold_out=0.25 has no effect with kind=text"),
        ({"kind": "preference", "hold_out": 0.25}, "hold_out=0.25 has no effect with kind=preference"),
        ({"kind": "chat", "prompts_from": "x"}, "prompts_from=x has no effect with kind=chat"),
        ({"kind": "chat", "hold_out": 1.0}, "hold_out must be from 0 to below 1, got 1.0"),
        ({"rules": "question_length=3.."}, "rules: question_length has no effect with kind=text"),
        ({"kind": "chat", "input": "a: x, weight=1"}, "weight has no effect with kind=chat; weigh when you train"),
        ({"input": "a: -; b: -"}, "standard input (-) can be read once only"),
        ({"input": "a: x, weight=nan; b: y, weight=1"}, "weight=nan of source a is not a number above 0"),
        ({"input": "a: x, weight=0"}, "weight=0 of source a is not a number above 0"),
        ({"input": "a: x, rules=length=5"}, "rules: 'length=5' is not length=least..most"),
        ({"score": "bpb=5%..950%"}, "per cent from 0 to 100"),
        ({"score": "bpb=3..1"}, "the least first"),
    ],
)
def test_settings_that_cannot_work_are_one_line(settings, said):
    with pytest.raises(ValueError) as caught:
        prepare.check_config(KEYS | {"input": "x", "out_dir": "x"} | settings)
    assert said in str(caught.value) and "\n" not in str(caught.value) and isinstance(caught.value, UserError)


def test_threads_keep_the_order_and_pass_errors_on() -> None:
    """A single text is one unit, so that threads share its documents; only so many are in memory at once."""
    lock, running, most = threading.Lock(), 0, 0

    def slow(text: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.001 * (int(text) % 5))
        with lock:
            running -= 1
        return text * 2

    asked = []
    texts = (asked.append(i) or str(i) for i in range(40))
    found = unit.in_threads(slow, texts, 3)
    assert next(found) == "00" and len(asked) == 6
    assert list(found) == [str(i) * 2 for i in range(1, 40)] and most == 3
    with pytest.raises(ValueError, match="invalid literal"):
        list(unit.in_threads(slow, ["1", "x", "2"], 2))
