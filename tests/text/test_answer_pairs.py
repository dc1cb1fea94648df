"""answer_pairs.py against hand-made files of answers and a plain search through all pairs of a line."""

import io
import json
import random
from pathlib import Path

import pytest

import prepare
from configurator import is_key
from groundup.errors import UserError
from groundup.files.answer_files import is_answers
from groundup.text.answer_pairs import describe, lengths_fit, write_pairs

KEYS = {key: value for key, value in vars(prepare).items() if is_key(key, value)}
MODEL = "step_000200 0123456789abcdef"
SETTINGS = {"temperature": 0.8, "seed": 7, "system": "", "chat": True, "model": MODEL}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


def answer(text: str, finish: str = "stop", **more) -> dict:
    return {"text": text, "finish_reason": finish, "stop_reason": None} | more


def scored(*rewards: float | None, finish: str = "stop") -> list[dict]:
    return [answer(f"answer {k}", finish, reward=reward) for k, reward in enumerate(rewards)]


def write(path: Path, rows: list, settings: dict | None = SETTINGS) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if settings is not None:
        Path(f"{path}.config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(path)


def setting_of(by: str, margin: float, within: float) -> str:
    margin = f", margin={margin}" if margin else ""
    return f"{by}{margin}" + (f", length_within={within}" if within else "")


def pairs_of(tmp_path: Path, rows: list, by: str, margin: float = 0.0, within: float = 0.0, settings: dict = SETTINGS):
    """(the rows made, what the manifest says)."""
    path = Path(write(tmp_path / "a.jsonl", rows, settings))
    info, _ = write_pairs(str(path), tmp_path / "out.jsonl", setting_of(by, margin, within))
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    for row in found:
        line, byte = row.pop("@answers")
        source = path.read_text("utf-8").split("\n")[line - 1]
        assert path.read_bytes()[byte:].startswith(source.encode()) and row["rejected"] in source
    return found, info


def prepared(out: Path, **settings) -> tuple[dict[str, list[dict]], dict]:
    """({split: rows}, manifest) of what prepare.py makes."""
    plain = {"workers": 1, "near": 0.0, "kind": "preference", "out_dir": str(out), "val_fraction": 0.0}
    assert prepare.main(KEYS | plain | settings) == 0
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    found = {}
    for split, entry in manifest["splits"].items():
        found[split] = [json.loads(line) for line in (out / entry["file"]).read_text("utf-8").splitlines()]
    return found, manifest


# ---- the data set's answer and the model's -------------------------------------------------------


def test_each_finished_answer_that_differs_makes_a_pair_with_the_data_sets_own(tmp_path):
    question = [user("法国的首都是哪里？")]
    rows = [
        {"messages": [*question, assistant("是巴黎。")], "difficulty": 2, "index": 0,
         "completions": [answer("是里昂。"), answer("是巴黎，因为", "length"), answer(" 是巴黎。\n"),
                         answer("是里昂。"), answer("  "), answer("马赛。")]},
        {"messages": question, "index": 1, "completions": [answer("a"), answer("b", "length")]},  # no answer of its own
        {"prompt": "Why?", "answer": "Because.", "index": 2, "completions": [answer("No.")]},
        {"text": "Once upon", "index": 3, "completions": [answer(" a time")]},
        "{broken",
        {"prompt": "q"},
        {"prompt": "q", "completions": ["a"]},
        {"messages": [assistant("I begin")], "completions": [answer("x")]},
    ]  # fmt: skip
    found, info = pairs_of(tmp_path, rows, "dataset")
    assert found == [
        {"prompt": question, "chosen": "是巴黎。", "rejected": "是里昂。", "difficulty": 2, "made_by": MODEL},
        {"prompt": question, "chosen": "是巴黎。", "rejected": "马赛。", "difficulty": 2, "made_by": MODEL},
        {"prompt": [user("Why?")], "chosen": "Because.", "rejected": "No.", "made_by": MODEL},
    ]
    assert info == {
        "path": str(tmp_path / "a.jsonl"), "settings": SETTINGS, "lines": 8, "answers": 9, "pairs": 3, "lines_bad": 3,
        "lines_left_out": {
            "no answer of the data set": 1, "a text that was continued, not a question that was answered": 1,
            "bad_json": 1, "no list of completions": 1, "a completion without a text": 1,
            "no question before the answer": 1,
        },
        "answers_left_out": {
            "unfinished": 2, "equal to the data set's": 1, "equal to an earlier one": 1, "empty": 1,
            "in a line that gives no pair": 1,
        },
    }  # fmt: skip
    assert info["answers"] == info["pairs"] + sum(info["answers_left_out"].values())
    lines = describe([info])
    assert lines[0].endswith("a.jsonl: 8 lines with 9 answers: 3 pairs") and len(lines) == 12
    assert any(line.endswith("2 answers left out: unfinished") for line in lines)


def test_the_prompt_is_what_the_model_was_asked(tmp_path):
    """A conversation of several turns whole, and the system message that sample.py put before it."""
    turns = [user("1+1?"), assistant("2"), user("再加一呢？")]
    other = [{"role": "system", "content": "own"}, user("q")]
    named = [answer("b<|im_end|>\n"), answer("a<|im_end|>")]  # of sample.py --skip_special_tokens=False
    rows = [
        {"messages": [*turns, assistant("3")], "completions": [answer("4")]},
        {"prompt": [*other, assistant("a")], "completions": named},
    ]
    found, info = pairs_of(tmp_path, rows, "dataset", settings=SETTINGS | {"system": "Be brief."})
    assert [row["prompt"] for row in found] == [[{"role": "system", "content": "Be brief."}, *turns], other]
    assert [row["rejected"] for row in found] == ["4", "b"]
    assert info["answers_left_out"] == {"equal to the data set's": 1}
    continued, info = pairs_of(tmp_path, [{"prompt": "q", "answer": "a", "completions": [answer("b")]}], "dataset",
                               settings=SETTINGS | {"chat": False})  # fmt: skip
    assert not continued and list(info["lines_left_out"]) == [
        "a text that was continued, not a question that was answered"
    ]


def test_lengths_within_a_fifth():
    assert lengths_fit("x" * 5, "x" * 6, 0.2) and lengths_fit("x" * 6, "x" * 5, 0.2)
    assert not lengths_fit("x" * 5, "x" * 7, 0.2) and not lengths_fit("x" * 10, "x" * 13, 0.2)
    assert lengths_fit("一二三四五六七八九十", "一二三四五六七八九十一二", 0.2)  # characters, not bytes
    assert not lengths_fit("一二三四五", "x" * 15, 0.2)  # 15 bytes each
    assert lengths_fit("x", "x" * 100, 0.0)


def test_the_length_of_a_pair_can_be_matched(tmp_path):
    rows = [{"prompt": "q", "answer": "x" * 10, "completions": [answer("y" * n) for n in (8, 9, 12, 13)]}]
    found, info = pairs_of(tmp_path, rows, "dataset", within=0.2)
    assert [len(row["rejected"]) for row in found] == [9, 12]
    assert info["answers_left_out"] == {"the lengths differ too much": 2}


# ---- the best and the worst ----------------------------------------------------------------------


def test_best_and_worst_by_reward(tmp_path):
    rows = [
        {"prompt": "一", "completions": scored(0.5, -1.0, 2.25, 1.0)},
        {"prompt": "b", "completions": scored(1.0, 1.0, 1.0)},
        {"prompt": "c", "completions": [*scored(0.0, None), *scored(9.0, finish="length")]},
        {"prompt": "d", "completions": [answer("same", reward=1.0), answer("same ", reward=2.0)]},
        {"prompt": "e", "completions": [answer("x", reward=1.0), answer("y", reward=0.75), answer("", reward=5.0)]},
    ]
    found, info = pairs_of(tmp_path, rows, "reward")
    first = {"prompt": [user("一")], "chosen": "answer 2", "rejected": "answer 1", "margin": 3.25, "made_by": MODEL}
    assert found == [
        first, {"prompt": [user("e")], "chosen": "x", "rejected": "y", "margin": 0.25, "made_by": MODEL}
    ]  # fmt: skip
    assert info["lines_left_out"] == {"the rewards differ too little": 1, "fewer than two different answers": 2}
    assert info["answers_left_out"] == {
        "neither best nor worst": 2, "in a line that gives no pair": 6, "unfinished": 1, "no reward": 1, "empty": 1,
    }  # fmt: skip
    assert info["answers"] == 2 * info["pairs"] + sum(info["answers_left_out"].values()) == 15
    assert pairs_of(tmp_path, rows, "reward", margin=0.5)[0] == [first]
    assert pairs_of(tmp_path, rows, "reward", margin=0.25)[0] == found  # at least


def test_the_pair_is_that_of_the_largest_gap_that_fits(tmp_path):
    rng = random.Random(5)
    rows, expected, n_none = [], [], 0
    for k in range(200):
        texts = [rng.choice("ab好") * rng.randint(1, 30) for _ in range(rng.randint(0, 7))]
        rewards = [rng.randint(-20, 20) / 4 for _ in texts]
        rows.append({"prompt": f"q{k}", "completions": [
            answer(text, reward=reward) for text, reward in zip(texts, rewards, strict=True)]})  # fmt: skip
        gaps = []
        for i in range(len(texts)):
            for j in range(len(texts)):
                small, large = sorted((len(texts[i]), len(texts[j])))
                if texts[i] != texts[j] and rewards[i] - rewards[j] >= 0.5 and 10 * large <= 13 * small:
                    gaps.append(rewards[i] - rewards[j])
        expected += [(f"q{k}", max(gaps))] if gaps else []
        n_none += not gaps
    found, info = pairs_of(tmp_path, rows, "reward", margin=0.5, within=0.3)
    assert [(row["prompt"][0]["content"], row["margin"]) for row in found] == expected
    assert 20 < n_none == sum(info["lines_left_out"].values()) and len(info["lines_left_out"]) == 3
    for row, line in ((row, rows[int(row["prompt"][0]["content"][1:])]) for row in found):
        reward = {}
        for one in line["completions"]:
            reward.setdefault(one["text"], []).append(one["reward"])
        assert any(a - b == row["margin"] for a in reward[row["chosen"]] for b in reward[row["rejected"]])


def test_rewards_that_are_missing_altogether_are_one_line(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "completions": [answer("a"), answer("b", reward=True)]}])
    with pytest.raises(UserError, match="no answer in .*a.jsonl has a reward, which pair_by=reward needs; .*score"):
        write_pairs(path, tmp_path / "out", "reward")


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, said",
    [(None, "is missing"), ({"seed": 1}, "does not name the model"), ("{", "is damaged"), ([], "is damaged")],
)
def test_answers_of_unknown_origin_are_refused(tmp_path, settings, said):
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "answer": "a", "completions": [answer("b")]}], None)
    if settings is not None:
        text = settings if isinstance(settings, str) else json.dumps(settings)
        Path(f"{path}.config.json").write_text(text, "utf-8")
    with pytest.raises(UserError, match=f"a.jsonl.config.json {said}") as caught:
        write_pairs(path, tmp_path / "out", "dataset")
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)


def test_files_of_answers_are_told_from_pairs(tmp_path):
    assert is_answers(write(tmp_path / "a.jsonl", ["{broken", {"completions": []}]))
    assert not is_answers(write(tmp_path / "b.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}]))
    (tmp_path / "empty.jsonl").write_text("")
    assert not is_answers(str(tmp_path / "empty.jsonl"))


def test_half_a_surrogate_pair_reaches_prepare_as_it_is(tmp_path):
    rows = ['{"prompt": "q", "answer": "good", "completions": [{"text": "bad \\ud83d", "finish_reason": "stop"}]}']
    write(tmp_path / "a.jsonl", rows)
    found, manifest = prepared(tmp_path / "out", input=str(tmp_path / "a.jsonl"), pair_by="dataset",
                               rules="replacement_characters=off")  # fmt: skip
    assert manifest["info"]["documents"]["mended"] == {"surrogates": 1} and len(found["train"]) == 1


# ---- through prepare.py --------------------------------------------------------------------------


def test_answers_become_prepared_pairs_beside_rows_that_are_pairs(tmp_path, capsys):
    own = [{"messages": [user(f"问题{k}"), assistant(f"好的回答{k}")], "completions": [answer(f"坏的{k}")]}
           for k in range(8)]  # fmt: skip
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", own)  # its .config.json is no input
    ready = [{"prompt": f"p{k}", "chosen": "c", "rejected": "r", "margin": k} for k in range(3)]
    pairs = write(tmp_path / "p.jsonl", ready, None)
    settings = {"input": f"docs: {pairs}; own: {tmp_path / 'in'}", "pair_by": "dataset"}
    found, manifest = prepared(tmp_path / "out", **settings)
    expected = [
        {"prompt": [user(row["prompt"])]} | {k: v for k, v in row.items() if k != "prompt"} | {"source": "docs"}
        for row in ready
    ]
    expected += [
        {"prompt": row["messages"][:1], "chosen": f"好的回答{k}", "rejected": f"坏的{k}", "made_by": MODEL,
         "source": "own"}
        for k, row in enumerate(own)
    ]  # fmt: skip
    assert found["train"] == expected
    (entry,) = manifest["info"]["answers"]
    assert entry["settings"] == SETTINGS and entry["pairs"] == 8 and len(entry["sha256"]) == 64
    assert manifest["info"]["failed"] == [] and manifest["info"]["documents"]["read"] == 11
    assert "8 lines with 8 answers: 8 pairs" in capsys.readouterr().out
    prepared(tmp_path / "out", **settings)
    assert "is up to date, with report.md; next: python " in capsys.readouterr().out
    Path(tmp_path / "in" / "a.jsonl.config.json").write_text(json.dumps(SETTINGS | {"seed": 8}), "utf-8")
    settings["overwrite"] = True
    prepared(tmp_path / "out", **settings)
    assert "is made anew: answers" in capsys.readouterr().out
    prepared(tmp_path / "out", **settings | {"pair_by": "dataset, length_within=1"})
    assert "is made anew: pair_by" in capsys.readouterr().out


def test_what_gives_no_pair_is_one_line(tmp_path):
    def error(**settings) -> str:
        with pytest.raises((UserError, UserError)) as caught:
            prepared(tmp_path / "out", **settings)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
        return str(caught.value)

    pairs = write(tmp_path / "p.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}], None)
    cut = write(tmp_path / "a.jsonl", [{"prompt": "q", "answer": "a", "completions": [answer("b", "length")]}])
    assert "no input has them; leave pair_by out" in error(input=pairs, pair_by="dataset")
    assert "no pair: " in error(input=cut, pair_by="dataset") and "1 answer left out: unfinished" in error(
        input=cut, pair_by="dataset"
    )
    for wrong in ("dataset, margin=0.5", "reward, margin=-1", "reward, length_within=", "best", "reward, within=1"):
        assert f"pair_by={wrong!r} is not understood; give dataset or reward" in error(input=cut, pair_by=wrong)
    assert "pair_by=dataset has no effect with kind=chat" in error(input=cut, kind="chat", pair_by="dataset")
    assert "answers of sample.py: prepare.py --pair_by=dataset" in error(input=cut)
    broken = write(tmp_path / "b.jsonl", [{"prompt": "q", "answer": "a", "completions": [answer("b")]}, "{"])
    assert "b.jsonl:2: bad_json" in error(input=broken, pair_by="dataset", strict=True)


def test_show_tells_what_answers_become(tmp_path, capsys):
    write(tmp_path / "a.jsonl", [{"prompt": "问？", "answer": "好答案", "completions": [answer("坏答案")]}])
    shown = {"input": str(tmp_path / "a.jsonl"), "kind": "preference", "pair_by": "dataset", "show": 3}
    assert prepare.main(KEYS | shown) == 0
    out = capsys.readouterr().out
    assert "rejected : assistant: [[坏答案]]" in out and "1 row: 1 would be kept" in out


def test_places_are_those_of_the_answers(tmp_path, capsys):
    """In dropped.tsv, report.md and --show: not those of the file of pairs, which is gone when one looks."""
    wrong = [answer("短"), answer("坏坏")]
    rows = [{"prompt": f"问{k}？", "answer": "好的", "completions": wrong} for k in (2, 25, 3)]
    path = write(tmp_path / "a.jsonl", rows)
    settings = {"input": path, "pair_by": "dataset", "rules": "question_length=..3"}
    _, manifest = prepared(tmp_path / "out", **settings)
    assert manifest["info"]["documents"]["dropped"] == {"question_length": 2}
    dropped = [line.split("\t")[:3] for line in (tmp_path / "out" / "dropped.tsv").read_text("utf-8").splitlines()[1:]]
    byte = len(Path(path).read_bytes().split(b"\n")[0]) + 1
    assert dropped == [[path, str(byte), "question_length"]] * 2
    assert f"{path} at byte {byte}: 4 characters" in (tmp_path / "out" / "report.md").read_text("utf-8")
    capsys.readouterr()
    assert prepare.main(KEYS | settings | {"kind": "preference", "show": 9}) == 0
    shown = capsys.readouterr().out
    assert f"==== {path}\n" in shown and shown.count(f"-- {path} at byte {byte}\n") == 2 and "pairs_0" not in shown


def test_lines_that_are_no_answers_are_told_as_those_of_other_files(tmp_path, capsys):
    """In errors.tsv with line and byte, in the report, and by the exit status, by lines and not by pairs."""
    good = {"prompt": "问题？", "answer": "好的回答", "completions": [answer(f"坏的 {k}") for k in range(4)]}
    rows = [good, "{broken", good | {"prompt": "另一个？"}, {"prompt": "q"}, good | {"prompt": "三"}]
    path = write(tmp_path / "a.jsonl", rows)
    settings = {"input": path, "pair_by": "dataset", "max_bad_fraction": 0.4}
    found, manifest = prepared(tmp_path / "out", **settings)
    raw = Path(path).read_bytes()
    errors = [line.split("\t") for line in (tmp_path / "out" / "errors.tsv").read_text("utf-8").splitlines()[1:]]
    assert [error[:4] for error in errors] == [
        [path, "2", str(raw.index(b"{broken")), "bad_json"],
        [path, "4", str(raw.index(b'{"prompt": "q"')), "bad_field"],
    ] and errors[1][4] == "no list of completions"
    documents = manifest["info"]["documents"]
    assert documents["dropped"] == {"bad_field": 1} and documents["lost"] == {"bad_json": 1}
    assert documents["read"] == 14 and manifest["info"]["input"]["lost"] == len("{broken\n")
    assert manifest["info"]["input"]["bytes"] == len(raw)
    assert len(found["train"]) == 12
    report = (tmp_path / "out" / "report.md").read_text("utf-8")
    assert f"{path}: 5 lines with 12 answers: 12 pairs" in report and "- lost: 1 bad_json\n" in report
    assert f"{path}:2: bad_json" in capsys.readouterr().out
    few = {"kind": "preference", "out_dir": str(tmp_path / "out"), "near": 0.0, "val_fraction": 0.0}
    assert prepare.main(KEYS | few | settings | {"workers": 1, "max_bad_fraction": 0.39}) == 1
    assert "2 of 5 records could not be read" in capsys.readouterr().out


def test_answers_have_numbers_that_settings_name(tmp_path):
    rows = [{"prompt": f"q{k}", "answer": "good", "completions": [answer("bad")], "ifd": k, "difficulty": k, "other": 1}
            for k in range(4)]  # fmt: skip
    path = write(tmp_path / "a.jsonl", rows)
    found, manifest = prepared(tmp_path / "out", input=path, pair_by="dataset", score="ifd=1..2")
    assert [row["difficulty"] for row in found["train"]] == [1.0, 2.0] and "other" not in found["train"][0]
    assert manifest["info"]["documents"]["dropped"] == {"score": 2}


def test_the_road_from_held_out_prompts_to_pairs(tmp_path):
    """Prompts held out of a chat set, answered, are all found again in pairs, and in none of what tuning sees."""
    rows = [{"messages": [user(f"Question {k}: 第{k}个？"), assistant(f"Right {k}.")]} for k in range(80)]
    chat = write(tmp_path / "chat.jsonl", rows, None)
    found, _ = prepared(tmp_path / "chat", input=chat, kind="chat", hold_out=0.25, val_fraction=0.1)
    asked = [row | {"index": k, "completions": [answer(f"Wrong {k}.")]} for k, row in enumerate(found["held_out"])]
    answers = write(tmp_path / "answers.jsonl", asked)
    pairs, _ = prepared(tmp_path / "pairs", input=answers, pair_by="dataset", val_fraction=0.1)
    questions = {row["prompt"][0]["content"] for split in pairs.values() for row in split}
    assert questions == {row["messages"][0]["content"] for row in found["held_out"]} and len(questions) > 8
    assert not questions & {row["messages"][0]["content"] for row in found["train"] + found["val"]}


def test_answers_from_standard_input_are_refused_by_name(tmp_path, monkeypatch):
    line = json.dumps({"prompt": "q", "answer": "a", "completions": [answer("b")]}).encode()
    for more in ({}, {"show": 2}):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line + b"\n"), encoding="utf-8"))
        with pytest.raises(UserError, match=r"answers cannot come from standard input \(-\); write them to a file"):
            prepared(tmp_path / "out", input="-", pair_by="dataset", **more)
