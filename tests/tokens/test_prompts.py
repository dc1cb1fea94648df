"""Prompts of rows of all shapes: what is asked, what is left out and why, in which order they come."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import prepare
from groundup.demo import debug_data
from groundup.errors import UserError
from groundup.files.turns import BadRow
from groundup.tokens.batches import Batches
from groundup.tokens.conversations import ChatCorpus
from groundup.tokens.pairs import LabelCorpus, PairCorpus
from groundup.tokens.prompts import PromptCorpus, prompt_of
from groundup.tokens.rows import reasons_of, steps_of
from groundup.train import ranks
from tokenizer import Tokenizer, chat_ready


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / "data"
    debug_data.make_debug_data(folder)
    return chat_ready(Tokenizer.load(folder))


def write(path: Path, rows: list) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


ASK, ANSWER = {"role": "user", "content": "为什么?"}, {"role": "assistant", "content": "因为。"}


@pytest.mark.parametrize(
    "row, messages",
    [
        ({"messages": [ASK, ANSWER]}, [ASK]),
        ({"messages": [ASK, ANSWER, ASK, ANSWER]}, [ASK, ANSWER, ASK]),
        ({"messages": [ASK, ANSWER, ASK]}, [ASK, ANSWER, ASK]),  # not answered yet
        ({"prompt": "为什么?"}, [ASK]),
        ({"prompt": [ASK], "solution": 42}, [ASK]),
        ({"prompt": "为什么?", "chosen": "a", "rejected": "b"}, [ASK]),
        ({"instruction": "为什么?", "input": "", "output": "因为。"}, [ASK]),
        ({"question": "为什么?"}, [ASK]),  # questions alone, or with an answer that is no text
        ({"prompt": [ASK, ANSWER]}, [ASK]),
        ({"prompt": "为什么?", "answer": 42, "system": "短"}, [{"role": "system", "content": "短"}, ASK]),
        ({"instruction": "为什么?", "input": "天", "output": None}, [{"role": "user", "content": "为什么?\n天"}]),
        ({"messages": [ANSWER]}, None),
        ({"text": "nothing to answer"}, None),
        ([1, 2], None),
    ],
)
def test_a_prompt_is_what_stands_before_the_last_answer(row, messages):
    if messages:
        assert prompt_of(row) == messages
        return
    with pytest.raises(BadRow, match="no prompt"):
        prompt_of(row)


def test_what_is_left_out_is_counted_and_named(tmp_path, tokenizer):
    rows = [{"prompt": f"Question {i}?", "right": i} for i in range(30)]
    rows += [{"prompt": "long " * 200}, {"nothing": 1}, {"messages": [ANSWER]}]
    path = write(tmp_path / "a.jsonl", rows)
    corpus = PromptCorpus(str(path), tokenizer, 40, seed=1, val_fraction=0.2)
    assert corpus.n_rows + len(corpus.held_out) == 30 and len(corpus.held_out) > 1
    text = "\n".join(corpus.report())
    assert "1 left out: longer than 40 tokens" in text and f"{path}:31" in text and "2 left out: no prompt" in text
    every = {prompt.row["right"]: prompt for prompt in [*corpus.train[0].prompts, *corpus.held_out]}
    assert every[7].place == f"{path}:8" and every[7].messages[0]["content"] == "Question 7?"
    assert tokenizer.decode(every[7].ids).endswith("assistant\n")
    for rows in ([{"nothing": 1}], []):
        with pytest.raises(UserError, match="no usable prompt|is empty") as caught:
            PromptCorpus(str(write(tmp_path / "b.jsonl", rows)), tokenizer, 40, seed=1)
        assert isinstance(caught.value, UserError)


def test_every_prompt_comes_once_an_epoch_and_a_redraw_has_another_order(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"Question {i}?", "number": i} for i in range(24)])
    corpus = PromptCorpus(str(path), tokenizer, 40, seed=1, val_fraction=0.0)

    def numbers(seed: int, attempt: int) -> list[int]:
        other = PromptCorpus(str(path), tokenizer, 40, seed=seed, val_fraction=0.0)
        return [prompt.row["number"] for prompt in other.take(other.redrawn_order(8, attempt), np.arange(48))]

    first = numbers(1, 0)
    assert sorted(first[:24]) == sorted(first[24:]) == list(range(24)) and first[:24] != first[24:]
    assert first != numbers(1, 1) and first != numbers(2, 0) and first == numbers(1, 0)
    changed = write(tmp_path / "c.jsonl", [{"prompt": f"Question {i}?", "number": -i} for i in range(24)])
    other = PromptCorpus(str(changed), tokenizer, 40, seed=1, val_fraction=0.0)
    assert other.record()["data"] != corpus.record()["data"]  # what a reward function sees is another


def test_sources_are_mixed_by_weight_and_a_prompt_is_never_on_both_sides(tmp_path, tokenizer):
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i % 20}?"} for i in range(40)]) for name in ("a", "b")
    ]
    corpus = PromptCorpus(f"{paths[0]}=0.75,{paths[1]}=0.25", tokenizer, 40, seed=1, val_fraction=0.3)
    taken = corpus.take(corpus.redrawn_order(8), np.arange(1024))
    assert sum(prompt.place.startswith(str(paths[0])) for prompt in taken) == 768
    trained = {tuple(prompt.ids) for prompts in corpus.train for prompt in prompts.prompts}
    assert corpus.val and not trained & {tuple(prompt.ids) for prompt in corpus.held_out}
    given = PromptCorpus(str(paths[0]), tokenizer, 40, seed=1, val_data=str(paths[1]))
    assert given.n_rows == 40 and len(given.held_out) == 40


def test_a_prepared_directory_keeps_its_split(tmp_path, tokenizer):
    rows = [{"messages": [{"role": "user", "content": f"Question {i}?"}, ANSWER]} for i in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    tokenizer.save(tmp_path / "tokenizer")
    config = prepare.__dict__ | {"input": str(path), "kind": "chat", "out_dir": str(tmp_path / "d")}
    config |= {"tokenizer_dir": str(tmp_path / "tokenizer"), "val_fraction": 0.25, "workers": 1}
    assert prepare.main({key: value for key, value in config.items() if not key.startswith("_")}) == 0
    corpus = PromptCorpus(str(tmp_path / "d"), tokenizer, 40, seed=1)
    sizes = [len((tmp_path / "d" / f"{split}.jsonl").read_text().splitlines()) for split in ("train", "val")]
    assert [corpus.n_rows, len(corpus.held_out)] == sizes and sizes[1] > 2


@pytest.mark.parametrize(
    "corpus, longest, answers, reason",
    [
        (PromptCorpus, [30], {}, "longer than 30 tokens: no room for an answer"),
        (PairCorpus, [60], {"chosen": "good", "rejected": "bad"}, "block_size=60; block_size=512 takes it"),
        (ChatCorpus, [60], {"response": "good"}, "block_size=60; block_size=512 takes it"),
    ],
)
def test_what_was_too_long_for_validation_is_said(tmp_path, tokenizer, corpus, longest, answers, reason):
    """A larger val_fraction would not help: one prompt is left, or those of the validation file are all too long."""
    shorts, long = ([{"prompt": text} | answers for text in texts] for texts in (["What?", "Who?"], ["long " * 99]))
    data = write(tmp_path / "a.jsonl", shorts if corpus is ChatCorpus else shorts[:1] + long)
    more = {}
    if corpus is ChatCorpus:  # drops conversations that are too long after the split
        more["pack"] = False
        more["val_data"] = str(write(tmp_path / "b.jsonl", long))
    with pytest.raises(UserError, match="is held out for validation: left out: 1") as caught:
        corpus(str(data), tokenizer, *longest, seed=1, **more).need_validation(0.02)
    said = str(caught.value)
    assert reason in said and "raise block_size" in said and "val_fraction" not in said and "\n" not in said
    assert corpus is ChatCorpus or f"{data}:2" in said


SHORTEN = "give shorter rows, or a model with a longer context, which pretrain.py --block_size decides"


@pytest.mark.parametrize(("needs", "context", "says"), [
    ([70, 300], math.inf, "; block_size=512 takes them all"),
    ([70], 512, "; block_size=128 takes it"),
    ([70, 300], 384, "; block_size=384 takes them all"),
    ([70, 90, 300, 700], 384, "; block_size=384 takes 3 of them; "
                              f"for 1 of them even 384 tokens are too few (1024 would do): {SHORTEN}"),
    ([70, 300], 64, f"; even 64 tokens are too few (512 would do): {SHORTEN}"),
    ([300] * 9 + [2000], 256, "; even 256 tokens are too few (512 would do for 90 % of them, 2048 for all): "
                              f"{SHORTEN}"),
])  # fmt: skip
def test_no_block_size_beyond_the_models_context_is_advised(needs, context, says):
    assert reasons_of({"too long": len(needs)}, {"too long": needs}, context) == [f"{len(needs)} too long{says}"]


@pytest.mark.parametrize("corpus", [PromptCorpus, PairCorpus, LabelCorpus, ChatCorpus])
@pytest.mark.parametrize("longer", [True, False])
def test_every_line_about_long_rows_knows_the_models_context(tmp_path, tokenizer, capsys, corpus, longer):
    """Of the report, of a run without training rows, without validation rows, and of too few steps."""
    answers = {"chosen": "good", "rejected": "bad"} if issubclass(corpus, PairCorpus) else {"response": "good"}
    short, long = ([{"prompt": text} | answers for text in texts] for texts in (["What?", "Who?"], ["long " * 99]))
    context = 512 if longer else 60
    settings = {"seed": 1, "context": context} | ({"pack": False} if corpus is ChatCorpus else {})
    said = []
    for rows, val in ((short * 3 + long, short), (long, short), (short, long)):
        data, val_data = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", val)
        try:
            found = corpus(str(data), tokenizer, 60, val_data=str(val_data), **settings)
            found.need_validation(0.02)
            run = {"max_steps": 0, "epochs": 1, "batch_size": 8, "world_size": 1, "n": 8, "plan_only": False}
            said += found.report()
            steps_of(run, found.n_rows, 8, "n", lost=found.left_out())
        except UserError as error:
            said.append(str(error))
    text = "\n".join(said) + capsys.readouterr().err
    assert "too few to learn from" in text
    assert ("raise block_size" in text or "; block_size=" in text) == longer
    if not longer:
        fix = "lower max_new_tokens" if corpus is PromptCorpus else "give shorter rows, or a model with a longer"
        assert fix in text


@pytest.mark.parametrize(("kind", "settings"), [
    (PairCorpus, {}), (LabelCorpus, {}), (ChatCorpus, {"pack": True}), (ChatCorpus, {"pack": False}),
])  # fmt: skip
def test_the_tokens_of_a_step_are_the_ids_of_its_batches_that_are_no_padding(tmp_path, tokenizer, kind, settings):
    answers = {"chosen": "good", "rejected": "bad, so bad"} if issubclass(kind, PairCorpus) else {"response": "good"}
    for name, n in (("a", 6), ("b", 12)):
        write(tmp_path / f"{name}.jsonl", [{"prompt": "What? " * (1 + k)} | answers for k in range(n)])
    corpus = kind(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", tokenizer, 128, seed=1, val_fraction=0.0, **settings)
    n_steps = corpus.n_rows // 2
    order = corpus.order(1, 2, n_steps)
    batches = Batches(corpus, order, 1, 2, ranks.World(0, 0, 1))
    counts = []
    for step in range(n_steps):
        found = [batches.next().x for _ in range(2)]
        counts.append(sum(int((x != tokenizer.pad_id).sum()) for x in found))
        assert batches.count_tokens(step) == counts[-1]
    batches.close()
    assert len(set(counts)) > 1
    seen = corpus.tokens_seen(order, 2 * n_steps)
    assert seen["tokens"] == pytest.approx(sum(counts), rel=0.1) and seen.keys() > {"tokens/a.jsonl", "tokens/b.jsonl"}


def test_without_validation_the_line_says_what_would_help(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "What?"}])
    for fraction, advice in ((0.02, "give more rows"), (0.0, "raise val_fraction above 0")):
        with pytest.raises(UserError, match=f"no prompt is held out for validation; {advice} or name"):
            PromptCorpus(str(path), tokenizer, 30, seed=1, val_fraction=fraction).need_validation(fraction)
