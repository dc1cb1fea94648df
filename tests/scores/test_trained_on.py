"""evaluate.py: questions that a model was tuned on are named, whichever of its runs saw them."""

import json
from pathlib import Path

import pytest

from configurator import defaults_of, write_config
from groundup.scores import trained_on
from groundup.scores.trained_on import warnings_of_questions as warnings_of

ROOT = Path(trained_on.__file__).parents[2]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(i: int, before: int = 0) -> dict:
    turns = [f"\u7b2c {i} \u4e2a\u95ee\u9898 {k}" for k in range(2 * before + 1)]
    roles = ("user", "assistant")
    messages = [{"role": roles[k % 2], "content": turn} for k, turn in enumerate(turns)]
    return {"messages": [*messages, {"role": "assistant", "content": f"\u7b54 {i}"}]}


def pair(i: int) -> dict:
    return {"prompt": chat(i)["messages"][0]["content"], "chosen": f"good {i}", "rejected": f"bad {i}"}


def run(directory: Path, script: str, data: str, init_from: object = "", **settings: object) -> Path:
    """Write what a run leaves that is read here, and return its checkpoint."""
    step = directory / "step_000010"
    step.mkdir(parents=True)
    defaults = {k: v for k, v in defaults_of(ROOT / script).items() if k == k.lower()}
    config = defaults | {"data": data, "init_from": str(init_from), **settings}
    write_config(config, str(directory / "config.py"), command=f"python {script} {directory}/config.py")
    return step


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Base -> sft.py on chats 0 to 39 -> dpo.py on pairs 40 to 49."""
    monkeypatch.setattr(trained_on.checkpoint, "resolve", lambda path, rewards: Path(path) / "step_000010")
    chats = write(tmp_path / "chats.jsonl", [chat(i, before=i % 2) for i in range(40)])
    pairs = write(tmp_path / "pairs.jsonl", [pair(i) for i in range(40, 50)])
    run(tmp_path / "base", "pretrain.py", "")
    run(tmp_path / "sft", "sft.py", chats, tmp_path / "base", val_data="x")
    return run(tmp_path / "dpo", "dpo.py", pairs, tmp_path / "sft", val_data="x")


def test_questions_of_each_run_are_counted(chain, tmp_path):
    held_out = write(tmp_path / "held_out.jsonl", [chat(i) for i in range(30, 60)])
    first, second = warnings_of(held_out, "chat", chain)
    assert first.startswith("warning: dpo was trained on 10 of these 30 questions (data=")
    assert "began with it" not in first and ", and the model began with it: scores may be too good" in second
    assert second.startswith("warning: sft was trained on 5 of these 30 questions")  # five have turns before
    pairs = write(tmp_path / "others.jsonl", [pair(i) for i in range(45, 55)])
    assert [line[:52] for line in warnings_of(pairs, "preference", chain)] == [
        "warning: dpo was trained on 5 of these 10 questions "
    ]


def test_rl_is_trained_on_questions(tmp_path):
    rows = [chat(i) for i in range(20)] + [{"prompt": chat(i)["messages"][0]["content"]} for i in range(20, 40)]
    step = run(tmp_path / "rl", "rl.py", write(tmp_path / "questions.jsonl", rows), val_data="x")
    (line,) = warnings_of(write(tmp_path / "held_out.jsonl", [chat(i) for i in range(10, 60)]), "chat", step)
    assert line.startswith("warning: rl was trained on 30 of these 50 questions ")


def test_a_merged_model_has_the_data_of_its_run(chain, tmp_path):
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.py").write_bytes((chain.parent / "config.py").read_bytes())
    pairs = write(tmp_path / "others.jsonl", [pair(i) for i in range(45, 55)])
    first, *others = warnings_of(pairs, "preference", merged)
    assert first.startswith("warning: merged was trained on 5 of these 10 questions") and not others


def test_a_damaged_config_ends_the_search(chain, tmp_path):
    config = tmp_path / "sft" / "config.py"
    config.write_text(config.read_text(encoding="utf-8") + "\nx = (\n", encoding="utf-8")
    held_out = write(tmp_path / "held_out.jsonl", [chat(i) for i in range(30, 60)])
    assert [line[:34] for line in warnings_of(held_out, "chat", chain)] == ["warning: dpo was trained on 10 of "]


def test_other_questions_held_out_rows_and_data_that_is_gone_give_no_warning(chain, tmp_path):
    clean = write(tmp_path / "clean.jsonl", [chat(i) for i in range(60, 90)])
    assert warnings_of(clean, "chat", chain) == []
    step = run(tmp_path / "half", "sft.py", str(tmp_path / "chats.jsonl"), val_fraction=0.5)
    all_rows = warnings_of(str(tmp_path / "chats.jsonl"), "chat", step)
    assert len(all_rows) == 1 and "on 40 of" not in all_rows[0]  # not on those that it held out itself
    (tmp_path / "chats.jsonl").unlink()
    (tmp_path / "pairs.jsonl").unlink()
    assert warnings_of(clean, "chat", chain) == []
    assert warnings_of(clean, "chat", tmp_path / "no_run" / "step_000001") == []
