"""answer_files.py: the settings beside a file of answers."""

import json

import pytest

from groundup.errors import UserError
from groundup.files.answer_files import (
    check_settings,
    conversation_of,
    is_settings_file,
    need_settings,
    read_settings,
    settings_path,
    write_settings,
)

SETTINGS = {"model": "step_000008 0123456789abcdef", "system": "请用中文回答。", "seed": 7, "temperature": 0.5}


def test_settings_are_read_as_they_were_written(tmp_path):
    answers = tmp_path / "new" / "a.jsonl"
    assert read_settings(answers) is None
    write_settings(answers, SETTINGS)
    (only,) = (tmp_path / "new").iterdir()
    assert only.name == "a.jsonl.config.json" and settings_path(answers) == only
    assert json.loads(only.read_bytes()) == SETTINGS == read_settings(answers) == need_settings(str(answers))


def test_a_settings_file_is_one_that_lies_beside_its_answers(tmp_path):
    for name in ("a.jsonl", "a.jsonl.config.json", "b.jsonl.config.json", "config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    found = [path.name for path in tmp_path.iterdir() if is_settings_file(path) and is_settings_file(str(path))]
    assert found == ["a.jsonl.config.json"]


@pytest.mark.parametrize("text, says", [
    (b'{"model": "m"', "is damaged"),
    (b'{"model": "\xff"}', "is damaged"),
    (b'["model"]', "is damaged: it holds a list"),
    (b'{"model": null}', "does not name the model"),
    (b"{}", "does not name the model"),
    (None, "is missing"),
])  # fmt: skip
def test_missing_or_damaged_settings_are_one_line(tmp_path, text, says):
    if text is not None:
        (tmp_path / "a.jsonl.config.json").write_bytes(text)
    with pytest.raises(UserError, match=f"a.jsonl.config.json {says}") as caught:
        need_settings(tmp_path / "a.jsonl")
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)


def test_a_file_of_answers_is_continued_with_the_same_settings_only(tmp_path):
    answers = tmp_path / "a.jsonl"
    answers.touch()  # as good as none
    check_settings(answers, SETTINGS)
    answers.write_text("{}\n", encoding="utf-8")
    check_settings(answers, SETTINGS)
    for other in (SETTINGS | {"seed": 8}, SETTINGS | {"top_k": 3}, {"model": SETTINGS["model"]}):
        with pytest.raises(UserError, match="was begun with (seed=7, not 8|top_k=None, not 3|s.*, not None)"):
            check_settings(answers, other)
        assert read_settings(answers) == SETTINGS
    settings_path(answers).unlink()
    with pytest.raises(UserError, match=r"has no a.jsonl.config.json beside it"):
        check_settings(answers, SETTINGS)
    assert not settings_path(answers).exists()


def test_settings_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        write_settings(tmp_path / "file" / "a.jsonl", SETTINGS)


def test_questions_in_every_layout_and_answers_that_are_bad():
    user, good = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    asked = [({"question": "q", "answer": 4}, ""), ({"prompt": [user]}, ""), ({"instruction": "q", "output": None}, "")]
    asked += [({"messages": [user, good]}, "a"), ({"messages": [user, good | {"weight": 0}]}, "")]
    said = {"prompt": "q", "response": "a"}
    asked += [(said | {"label": False}, ""), (said | {"label": 1}, "a")]
    asked += [({"prompt": "q", "chosen": "a", "rejected": "b"}, "a")]
    for row, own in asked:
        assert conversation_of(row, {}) == ([user], own), row
    turns = [user, good | {"train": False}, user, good]
    assert conversation_of({"messages": turns}, {}) == ([user, good, user], "a")
    whole = {"context": "c", "question": "q", "options": ["x", "y"], "answer": 1.5, "system_prompt": "s"}
    system = {"role": "system", "content": "s"}
    assert conversation_of(whole, {}) == ([system, user | {"content": "c\nq\nA. x\nB. y"}], "")
