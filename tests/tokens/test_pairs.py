"""pairs.py: ids against hand-written ones, batches against loops over them, the order against a plain sort."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
from configurator import is_key
from groundup.demo import python_docs as corpora
from groundup.errors import UserError
from groundup.files.row_formats import Pair
from groundup.files.turns import BadRow
from groundup.tokens.batches import Batches
from groundup.tokens.conversations import ChatReader
from groundup.tokens.mixture import Sampler
from groundup.tokens.pairs import (
    LabelReader,
    PairBatch,
    PairCorpus,
    load_pairs,
    tokenize_pair,
    usable_pair,
)
from groundup.tokens.training import train
from groundup.train.ranks import World
from tokenizer import Tokenizer

KEYS = {key: value for key, value in vars(prepare).items() if is_key(key, value)}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


class Toy:
    """One id per character, and the renderer of the real one."""

    IDS = {"user": [10], "assistant": [14], "\n": [11], "H": [12], "i": [13], "你": [15], "好": [16], "b": [20]}
    im_start_id, im_end_id, turn_end_id, pad_id, vocab_size, foreign_template = 1, 2, 2, 0, 64, False
    render, left_out = Tokenizer.render, Tokenizer.left_out

    def recent_ids(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        role, newline, rest = text.partition("\n")
        if newline and role in self.IDS and not rest:
            return self.IDS[role] + self.IDS["\n"]
        return [i for char in text for i in self.IDS[char]]

    def chat_fingerprint(self) -> str:
        return "toy"


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return train(corpora.debug_texts()[:40] + corpora.chinese_sample()[:40], 512)


def write(path: Path, rows: list) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def rows_of(n: int, seed: int = 0, longest: int = 45) -> list[dict]:
    """n different pairs, whose lengths differ much."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, (n, 2)).tolist()
    return [
        {"prompt": f"Q{i} 问?", "chosen": f"good {i} " + "x y " * a, "rejected": f"bad {i} " + "z 不" * b}
        for i, (a, b) in enumerate(sizes)
    ]


def corpus_of(path: Path, rows: list, tokenizer, block_size: int = 256, **more) -> PairCorpus:
    return PairCorpus(write(path, rows), tokenizer, block_size, 1, **{"val_fraction": 0.0} | more)


def texts(corpus: PairCorpus, batch: PairBatch) -> list[str]:
    """Each row of a batch as the text that it is."""
    return [corpus.tokenizer.decode(ids[:n]) for ids, n in zip(batch.x.tolist(), batch.lengths.tolist(), strict=True)]


# ---- one pair --------------------------------------------------------------------------------------------------------


def test_worked_example():
    pair = Pair([user("Hi")], "你好", "b")
    prompt, chosen, rejected = [1, 10, 11, 12, 13, 2, 11, 1, 14, 11], [15, 16, 2], [20, 2]
    ids = tokenize_pair(pair, Toy())
    assert [part.tolist() for part in ids[:3]] == [prompt, chosen, rejected]
    assert ids.margin == 0 and ids.prompt.dtype == np.uint16


def test_worked_batch(tmp_path):
    rows = [
        {"prompt": "Hi", "chosen": "你好", "rejected": "b", "margin": 0.5},
        {"prompt": "i", "chosen": "i", "rejected": "好好好好"},
    ]
    corpus = corpus_of(tmp_path / "p.jsonl", rows, Toy(), 32)
    batch = load_pairs(corpus.train * 2, np.array([0, 1]))
    assert batch.x.tolist() == [
        [1, 10, 11, 12, 13, 2, 11, 1, 14, 11, 15, 16, 2, 0, 0, 0],  # the chosen ones, then
        [1, 10, 11, 13, 2, 11, 1, 14, 11, 13, 2, 0, 0, 0, 0, 0],
        [1, 10, 11, 12, 13, 2, 11, 1, 14, 11, 20, 2, 0, 0, 0, 0],  # the rejected ones
        [1, 10, 11, 13, 2, 11, 1, 14, 11, 16, 16, 16, 16, 2, 0, 0],
    ]
    assert batch.index.tolist() == [9, 10, 11, 24, 25, 41, 42, 56, 57, 58, 59, 60]
    assert batch.targets.tolist() == [15, 16, 2, 13, 2, 20, 2, 16, 16, 16, 16, 2]
    assert batch.row.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert batch.lengths.tolist() == [13, 11, 12, 14] and batch.number.tolist() == [0, 1]
    assert batch.margin.tolist() == [0.5, 0] and batch.margin.dtype == torch.float32


def test_answers_are_what_a_rendered_conversation_learns(tok):
    """Against the mask of the whole conversation, in which the prompt's answers are learnt, too."""
    prompt = [{"role": "system", "content": "规则"}, user("one"), assistant("1"), user("two\n")]
    pair = Pair(prompt, " 2 <|im_end|>\n", "twenty-two")  # text that looks like a marker is none
    ids = tokenize_pair(pair, tok)
    for answer, part in ((pair.chosen, ids.chosen), (pair.rejected, ids.rejected)):
        whole, mask = tok.render([*prompt, assistant(answer)])
        n = len(ids.prompt)
        assert [*ids.prompt, *part] == whole[: n + len(part)] and whole[n + len(part) :] == tok.encode("\n")
        assert mask[n:] == [1] * len(part) + [0] * (len(mask) - n - len(part)) and mask[n - 1] == 0
        assert part.tolist().count(tok.im_end_id) == 1 and part[-1] == tok.im_end_id


def test_batches_equal_a_loop_whatever_their_mates(tok, tmp_path):
    rows = rows_of(30)
    corpus = corpus_of(tmp_path / "p.jsonl", rows, tok)
    for size in (1, 3, 8):
        chosen = np.random.default_rng(size).permutation(30)[:size]
        batch = load_pairs(corpus.train * size, chosen)
        assert batch.number.tolist() == chosen.tolist()
        assert batch.x.shape[1] == min(t for t in range(32, 257, 32) if t >= batch.lengths.max())
        index = batch.index.tolist()
        found = []
        for b, (i, side) in enumerate((i, side) for side in ("chosen", "rejected") for i in chosen):
            prompt = tok.render([user(rows[i]["prompt"])], add_generation_prompt=True)[0]
            ids = prompt + tok.encode(rows[i][side]) + [tok.im_end_id]
            assert batch.x[b].tolist() == ids + [tok.pad_id] * (batch.x.shape[1] - len(ids))
            places = [b * batch.x.shape[1] + t - 1 for t in range(len(prompt), len(ids))]
            found += places
            own = (batch.row == b).nonzero().flatten().tolist()
            assert [index[k] for k in own] == places
            assert batch.targets[own].tolist() == ids[len(prompt) :]
            assert (batch.targets[own] == tok.im_end_id).sum() == 1
        assert index == found


def test_batches_are_laid_out_as_those_of_trl(tok, tmp_path):
    """Against its collator, of ids that Hugging Face's side would have: prompt, answers, where the answers are."""
    collator = pytest.importorskip("trl.trainer.dpo_trainer").DataCollatorForPreference(pad_token_id=tok.pad_id)
    corpus = corpus_of(tmp_path / "p.jsonl", rows_of(12), tok)
    parts = [[part.tolist() for part in corpus.train[0].ids(i)] for i in range(12)]
    theirs = collator([dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), part, strict=True)) for part in parts])
    ours = corpus.load(np.zeros(12, int), np.arange(12))
    width = theirs["input_ids"].shape[1]
    assert torch.equal(ours.x[:, :width], theirs["input_ids"]) and (ours.x[:, width:] == tok.pad_id).all()
    assert ours.lengths.tolist() == theirs["attention_mask"].sum(1).tolist()
    rows, columns = theirs["completion_mask"].nonzero(as_tuple=True)
    assert torch.equal(ours.row, rows) and torch.equal(ours.index + 1, rows * ours.x.shape[1] + columns)


# ---- what is left out ------------------------------------------------------------------------------------------------


def test_every_reason_is_counted_and_the_first_are_named(tok, tmp_path):
    rows = [
        *rows_of(3),
        {"prompt": "q", "chosen": "same ", "rejected": "same"},
        {"prompt": "q", "chosen": "same", "rejected": "same"},
        {"prompt": "q", "chosen": "\n", "rejected": "b"},
        {"prompt": "q", "chosen": "a"},
        {"prompt": "q", "chosen": None, "rejected": "b"},
        {"chosen": [user("q"), assistant("a")], "rejected": [user("p"), assistant("b")]},
        "{broken",
        {"prompt": [user("q"), assistant("a")], "chosen": "b", "rejected": "c"},
        *({"prompt": "q", "chosen": "word " * n, "rejected": "b"} for n in (900, 901, 902, 903)),
    ]
    corpus = corpus_of(tmp_path / "p.jsonl", rows, tok)
    assert corpus.train[0].n_rows == 3
    assert corpus.sources[0].reader.dropped == Counter({
        "equal answers": 2, "empty answer": 1, "not understood": 2, "different prompts": 1, "bad_json": 1,
        "two assistant turns in a row": 1, "too long for block_size=256": 4,
    })  # fmt: skip
    report = "\n".join(corpus.report())
    for line, reason in (
        (4, "equal answers"), (5, "equal answers"), (6, "empty answer"),
        (7, "not understood: a chosen answer but none under 'rejected'"), (9, "different prompts"),
        (8, "not understood: a rejected answer but none under 'chosen'"), (10, "bad_json"),
        (12, "too long for block_size=256: "), (14, "too long"),
    ):  # fmt: skip
        assert f"p.jsonl:{line}: {reason}" in report
    assert "4 left out: too long for block_size=256; " in report and "p.jsonl:15:" not in report


def test_an_answer_is_whole_or_not_there(tok, tmp_path):
    """The longer side decides; what fits to the token stays, one token more does not, and nothing is ever cut."""
    rows = rows_of(20, longest=40)
    prompts = [tok.render([user(row["prompt"])], add_generation_prompt=True)[0] for row in rows]
    sizes = [
        len(prompt) + 1 + max(len(tok.encode(row[side])) for side in ("chosen", "rejected"))
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    for limit in (sorted(sizes)[10], sorted(sizes)[10] - 1):
        corpus = corpus_of(tmp_path / "p.jsonl", rows, tok, limit)
        pairs = corpus.train[0]
        kept = [row for row, size in zip(rows, sizes, strict=True) if size <= limit]
        assert pairs.n_rows == len(kept) < 20 and pairs.lengths.max() <= limit >= pairs.columns.max()
        assert corpus.sources[0].reader.dropped == {f"too long for block_size={limit}": 20 - len(kept)}
        for i, row in enumerate(kept):
            _, chosen, rejected = pairs.ids(i)
            assert [tok.decode(ids.tolist()) for ids in (chosen, rejected)] == [
                row[side] + "<|im_end|>" for side in ("chosen", "rejected")
            ]


def test_unfinished_answers_are_left_out(tok, tmp_path):
    """A pair that says that it was cut off teaches to stop anywhere; in the completions it is the text that tells."""
    marks = [{}, {"finish_reason": "length"}, {"chosen_finish_reason": "length"}, {"rejected_finish_reason": "length"}]
    rows = [row | mark for row, mark in zip(rows_of(6), [*marks, {}, {"finish_reason": "stop"}], strict=True)]
    rows[4]["completions"] = [{"text": rows[4]["rejected"], "finish_reason": "length"}]
    corpus = corpus_of(tmp_path / "p.jsonl", rows, tok)
    answers = [tok.decode(corpus.train[0].ids(i)[1].tolist()[:-1]) for i in range(corpus.train[0].n_rows)]
    assert answers == [rows[0]["chosen"], rows[5]["chosen"]]
    assert corpus.sources[0].reader.dropped == {"unfinished answer": 4}


def test_a_prepared_directory_is_split_as_its_raw_file(tok, tmp_path):
    """By the prompt alone, and with the margins of its rows."""
    rows = [row | {"prompt": f"Q{i // 3} 问", "margin": i / 8} for i, row in enumerate(rows_of(90))]
    path = write(tmp_path / "p.jsonl", rows)
    make(tmp_path / "out", path)
    raw = PairCorpus(path, tok, 256, 1, val_fraction=0.2)
    prepared = PairCorpus(str(tmp_path / "out"), tok, 256, 1)
    assert raw.train[0].fingerprint == prepared.train[0].fingerprint
    assert raw.val["p.jsonl"].fingerprint == prepared.val["out"].fingerprint
    assert prepared.val["out"].n_rows > 8 and prepared.train[0].margin.max() > 10


def test_answers_that_are_equal_as_tokens_are_equal(tok, tmp_path):
    class Lower(Toy):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("B", "b"))

    rows = [{"prompt": "Hi", "chosen": "b", "rejected": "B"}, {"prompt": "Hi", "chosen": "b", "rejected": "i"}]
    corpus = corpus_of(tmp_path / "p.jsonl", rows, Lower(), 32)
    assert corpus.train[0].n_rows == 1 and corpus.sources[0].reader.dropped == {"equal answers": 1}


def test_nothing_usable_is_one_clear_line(tok, tmp_path):
    chat = write(tmp_path / "chat.jsonl", [{"messages": [user("a"), assistant("b")]}] * 2)
    said = "no preference pairs; first: .*chat.jsonl:1: .*kind='chat'; preference is known by: messages,"
    with pytest.raises(UserError, match=said):
        PairCorpus(chat, tok, 64, 1)
    lone = write(tmp_path / "lone.jsonl", [{"prompt": "q", "rejected": "b"}])
    with pytest.raises(UserError, match="lone.jsonl:1: not understood: a rejected answer but none under 'chosen'"):
        PairCorpus(lone, tok, 64, 1)
    long = [{"prompt": "q", "chosen": "a " * 99, "rejected": "b"}] * 2 + [{"prompt": "q", "chosen": "a"}]
    why = r"no usable preference pair \(2 too .*=16; block_size=\d+ takes them all, 1 not und.*\)"
    with pytest.raises(UserError, match=why) as bad:
        PairCorpus(write(tmp_path / "long.jsonl", long), tok, 16, 1)
    assert isinstance(bad.value, UserError) and "\n" not in str(bad.value)
    with pytest.raises(UserError, match="no file matches"):
        PairCorpus(str(tmp_path / "none.jsonl"), tok, 16, 1)
    other = [{"chosen": [user("q"), assistant("a")], "rejected": [user("p"), assistant("b")]}]
    with pytest.raises(UserError, match=r"other.jsonl:1: different prompts"):
        PairCorpus(write(tmp_path / "other.jsonl", other), tok, 64, 1)
    with pytest.raises(BadRow) as problem:
        usable_pair(["a list"])
    assert problem.value.reason == "not understood"


# ---- files -----------------------------------------------------------------------------------------------------------


def test_every_shape_and_container_is_the_same_pair(tok, tmp_path):
    turns, good, bad = [user("q"), assistant("a"), user("r")], "yes", "no"
    hh = "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: "
    rows = [
        {"prompt": turns, "chosen": good, "rejected": bad},
        {"prompt": turns, "chosen": assistant(good), "rejected": assistant(bad)},
        {"prompt": turns, "chosen": [assistant(good)], "reject": [assistant(bad)]},
        {"messages": [*turns, assistant(good)], "rejected_response": bad},
        {"chosen": [*turns, assistant(good)], "rejected": [*turns, assistant(bad)]},
        {"chosen": hh + good, "rejected": hh + bad},
        {"conversations": [{"from": "human", "value": "r"}], "chosen": good, "rejected": bad, "history": [["q", "a"]]},
        {"conversations": [{"from": {"user": "human"}.get(t["role"], "gpt"), "value": t["content"]} for t in turns],
         "chosen": {"from": "gpt", "value": good}, "rejected": {"from": "gpt", "value": bad}},
        {"question": "r", "response_chosen": good, "response_rejected": bad, "history": [["q", "a"]]},
        {"instruction": "r", "output": [good, bad], "history": [["q", "a"]]},
    ]  # fmt: skip
    del rows[6]  # a list of turns has no history beside it
    expected = tokenize_pair(Pair(turns, good, bad), tok)
    assert tok.decode(expected.prompt.tolist()).count("<|im_start|>") == 4
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("a.jsonl", "b.json", "c.jsonl.gz"):
        pairs = PairCorpus(str(tmp_path / name), tok, 64, 1, val_fraction=0.0).train[0]
        assert pairs.n_rows == len(rows)
        for i in range(len(rows)):
            assert [part.tolist() for part in pairs.ids(i)] == [part.tolist() for part in expected[:3]], rows[i]


def test_parquet(tok, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = rows_of(9)
    turns = [row | {"prompt": [user(row["prompt"])], "margin": 0.25} for row in rows]
    pyarrow.parquet.write_table(pa.Table.from_pylist(turns), tmp_path / "p.parquet")
    ours = PairCorpus(str(tmp_path / "p.parquet"), tok, 256, 1, val_fraction=0.0).train[0]
    plain = corpus_of(tmp_path / "p.jsonl", rows, tok).train[0]
    assert ours.tokens.tolist() == plain.tokens.tolist() and ours.offsets.tolist() == plain.offsets.tolist()
    assert ours.margin.tolist() == [0.25] * 9 and ours.fingerprint != plain.fingerprint


def make(out: Path, path: str, **settings) -> int:
    plain = {"workers": 1, "near": -1, "kind": "preference", "val_fraction": 0.2, "rules": "length=1.."}
    return prepare.main(KEYS | plain | {"out_dir": str(out), "input": path} | settings)


def test_a_prepared_directory_gives_the_pairs_of_its_splits(tok, tmp_path):
    rows = rows_of(40)
    make(tmp_path / "out", write(tmp_path / "p.jsonl", rows))
    corpus = PairCorpus(str(tmp_path / "out"), tok, 256, 1)
    pairs = [corpus.train[0], *corpus.val.values()]
    assert [part.n_rows for part in pairs][1] > 0 and sum(part.n_rows for part in pairs) == 40
    for part, split in zip(pairs, ("train", "val"), strict=True):
        lines = (tmp_path / "out" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        answers = [tok.decode(part.ids(i)[1].tolist()[:-1]) for i in range(part.n_rows)]
        assert answers == [json.loads(line)["chosen"] for line in lines]
    chat = write(tmp_path / "c.jsonl", [{"messages": [user(f"q{k}"), assistant(f"a{k}")]} for k in range(9)])
    make(tmp_path / "chat", chat, kind="chat")
    with pytest.raises(UserError, match="prepared with kind='chat', not 'preference'"):
        PairCorpus(str(tmp_path / "chat"), tok, 256, 1)
    (tmp_path / "out" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json is damaged"):
        PairCorpus(str(tmp_path / "out"), tok, 256, 1)


def test_no_prompt_is_in_both_splits(tok, tmp_path):
    rows = [row | {"prompt": f"Q{i // 3}"} for i, row in enumerate(rows_of(120))]  # three pairs of each prompt
    corpus = corpus_of(tmp_path / "p.jsonl", rows, tok, val_fraction=0.2)
    train_, val = corpus.train[0], corpus.val["p.jsonl"]
    prompts = [{tuple(part.ids(i)[0].tolist()) for i in range(part.n_rows)} for part in (train_, val)]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 40
    assert train_.n_rows == 3 * len(prompts[0]) and val.n_rows == 3 * len(prompts[1]) and 1 < len(prompts[1]) < 20
    more = corpus_of(tmp_path / "p.jsonl", [*rows_of(50, 3), *rows], tok, val_fraction=0.2).val["p.jsonl"]
    assert prompts[1] <= {tuple(more.ids(i)[0].tolist()) for i in range(more.n_rows)}  # others move nothing
    one = corpus_of(tmp_path / "p.jsonl", [row | {"prompt": "Q"} for row in rows_of(9)], tok, val_fraction=0.2)
    assert one.train[0].n_rows == 9 and not one.val and "p.jsonl: 0 rows for validation" in "\n".join(one.report())


def test_validation_data_of_its_own(tok, tmp_path):
    val = write(tmp_path / "v.jsonl", [*rows_of(7, 5), {"prompt": "q"}])
    corpus = corpus_of(tmp_path / "p.jsonl", rows_of(20), tok, val_fraction=0.5, val_data=val)
    assert corpus.train[0].n_rows == 20 and {name: part.n_rows for name, part in corpus.val.items()} == {"v.jsonl": 7}
    assert corpus.val_shares() == [1.0] and "v.jsonl: 1 left out: not understood" in corpus.report()
    numbers = [batch.number.tolist() for batch in corpus.val_batches(2, 0)["v.jsonl"]]
    assert sorted(sum(numbers, [])) == list(range(20, 27))  # behind those that are trained on


def test_margins_are_kept(tok, tmp_path):
    margins = [0.5, "0.25", None, float("inf"), True]
    rows = [row | {"margin": margin} for row, margin in zip(rows_of(5), margins, strict=True)]
    pairs = corpus_of(tmp_path / "p.jsonl", rows, tok).train[0]
    assert pairs.margin.tolist() == [0.5, 0.25, 0, 0, 0]


# ---- the order -------------------------------------------------------------------------------------------------------


def order_of(corpus: PairCorpus, n: int, batch: int = 8, seed: int = 3, **more) -> np.ndarray:
    """The pairs of the first n samples."""
    order = corpus.order(seed, batch, 10**6, **more)
    return order.starts_of(np.arange(n))[1]


@pytest.mark.parametrize("n", [5, 64, 203, 1300])
def test_an_epoch_has_each_pair_once_and_steps_are_of_one_length(tok, tmp_path, n):
    """Against a plain sort of the sampler's own order in windows of 64 steps, no two epochs in one window."""
    corpus = corpus_of(tmp_path / "p.jsonl", rows_of(n), tok)
    pairs = corpus.train[0]
    plain = Sampler(n, 3).starts_of(np.arange(3 * n))
    ours = order_of(corpus, 3 * n)
    for epoch in range(3):
        now = ours[epoch * n : (epoch + 1) * n].tolist()
        assert sorted(now) == list(range(n))
    windows = sorted({0, *range(0, n, 512), n, *range(8 * (n // 8) + 512, 2 * n, 512), 2 * n})
    seen = []
    for begin, end in zip(windows, windows[1:], strict=False):
        members = plain[begin:end].tolist()
        assert sorted(ours[begin:end].tolist()) == sorted(members)
        steps = [ours[max(s, begin) : min(s + 8, end)].tolist() for s in range(begin - begin % 8, end, 8)]
        expected = sorted(members, key=lambda i: pairs.columns[i])
        joined = [i for step in sorted(steps, key=lambda step: expected.index(step[0])) for i in step]
        assert joined == expected
        seen.append([pairs.columns[step[0]] for step in steps])
    if n > 64:
        assert seen[0] != sorted(seen[0])  # long and short ones alternate
        assert ours[:n].tolist() != ours[n : 2 * n].tolist()
        assert {frozenset(ours[s : s + 8]) for s in range(0, n - 8, 8)} != {
            frozenset(ours[s : s + 8]) for s in range(n + -n % 8, 2 * n - 8, 8)
        }  # pairs meet others in another epoch


def test_batches_need_less_padding(tok, tmp_path):
    corpus = corpus_of(tmp_path / "p.jsonl", rows_of(400), tok)
    columns = corpus.train[0].columns

    def tokens(order: np.ndarray) -> int:
        return sum(8 * int(columns[order[s : s + 8]].max()) for s in range(0, 400, 8))

    ours, plain = order_of(corpus, 400), np.random.default_rng(0).permutation(400)
    assert tokens(ours) <= 1.05 * columns.sum() < 1.2 * columns.sum() < tokens(plain)


def test_the_order_is_a_function_of_the_number_and_the_seed(tok, tmp_path):
    corpus = corpus_of(tmp_path / "p.jsonl", rows_of(150), tok)
    whole = order_of(corpus, 1000)
    order = corpus.order(3, 8, 10**6)
    shuffled = np.random.default_rng(0).permutation(1000)
    assert (order.starts_of(shuffled)[1] == whole[shuffled]).all()
    assert (order.starts_of(shuffled.reshape(10, 100))[1].reshape(-1) == whole[shuffled]).all()
    assert 0 <= order.starts_of(np.array([10**12]))[1] < 150
    assert (whole != order_of(corpus, 1000, seed=4)).mean() > 0.9
    again = corpus_of(tmp_path / "q.jsonl", rows_of(150), tok)
    assert (order_of(again, 1000) == whole).all() and again.record() == corpus.record()


def test_ranks_micro_steps_and_resumed_runs_see_the_same_pairs(tok, tmp_path):
    corpus = corpus_of(tmp_path / "p.jsonl", rows_of(50), tok)
    order = corpus.order(3, 8, 100)

    def steps(batch_size: int, accum: int, world: int, first: int = 0) -> list[list[str]]:
        found = [[] for _ in range(first, 12)]
        for rank in range(world):
            batches = Batches(corpus, order, batch_size, accum, World(rank, rank, world), first_step=first)
            for step in found:
                for _ in range(accum):
                    batch = batches.next()
                    assert isinstance(batch, PairBatch) and batch.number.shape == (batch_size,)
                    sides = texts(corpus, batch)
                    step += zip(sides[:batch_size], sides[batch_size:], strict=True)
            batches.close()
        return found

    straight = steps(8, 1, 1)
    assert steps(2, 2, 2) == straight and steps(4, 2, 1) == straight and steps(2, 4, 1, first=5) == straight[5:]
    for good, bad in (pair for step in straight for pair in step):
        prompt = good.partition("good")[0]
        assert bad.startswith(prompt + "bad ") and good.endswith("<|im_end|>") and bad.endswith("<|im_end|>")


def test_several_sources(tok, tmp_path):
    a, b = write(tmp_path / "a.jsonl", rows_of(40)), write(tmp_path / "b.jsonl", rows_of(60, 1))
    corpus = PairCorpus(f"{a}=0.75,{b}=0.25", tok, 256, 1, val_fraction=0.1)
    sizes = [part.n_rows for part in (*corpus.train, *corpus.val.values())]
    assert corpus.names == ["a.jsonl", "b.jsonl"] and sum(sizes) == corpus.n_pairs == 100 and len(sizes) == 4
    order = corpus.order(3, 8, 100)
    sources, starts = order.starts_of(np.arange(2048))
    assert np.bincount(sources).tolist() == [1536, 512]
    for k, n in enumerate(sizes[:2]):
        for end in range(8, 2048, 8):  # after any step no pair of a source has come more than once before another
            seen = np.bincount(starts[:end][sources[:end] == k], minlength=n)
            assert len(seen) == n and seen.max() - seen.min() <= 1
        numbers = corpus.load(sources[sources == k], starts[sources == k]).number
        assert set(numbers.tolist()) == set(range(sum(sizes[:k]), sum(sizes[: k + 1])))
    proportional = PairCorpus(f"{a},{b}", tok, 256, 1, val_fraction=0.0)
    assert np.bincount(proportional.order(3, 8, 100).starts_of(np.arange(1024))[0]).tolist() == [410, 614]
    staged = PairCorpus(f"0: {a}=1; 4: {b}=1", tok, 256, 1, val_fraction=0.0).order(3, 8, 100)
    assert staged.starts_of(np.arange(64))[0].tolist() == [0] * 32 + [1] * 32
    text, warnings = corpus.describe(order, 2048)
    assert "epochs of" in text and "rows (a.jsonl)" in text and len(warnings) == 2


def test_every_pair_has_a_number_and_comes_once_in_all_batches(tok, tmp_path):
    corpus = corpus_of(tmp_path / "p.jsonl", rows_of(90), tok, val_fraction=0.2)
    alone = [batch.number.tolist() for batch in corpus.all_batches(8)]
    assert sorted(sum(alone, [])) == list(range(90)) and max(map(len, alone)) == 8
    shared = [batch.number.tolist() for rank in range(3) for batch in corpus.all_batches(8, rank, 3)]
    assert sorted(shared) == sorted(alone)
    prompts = {corpus.n_pairs: None}
    for batch in corpus.all_batches(4):
        for number, text in zip(batch.number.tolist(), texts(corpus, batch), strict=False):
            prompts[number] = text
    split = corpus.train[0].n_rows
    for number, part, i in ((0, corpus.train[0], 0), (split + 1, corpus.val["p.jsonl"], 1)):
        assert prompts[number] == tok.decode([*part.ids(i)[0].tolist(), *part.ids(i)[1].tolist()])
    lengths = [int(batch.lengths.max()) for batch in corpus.all_batches(8)]
    assert lengths == sorted(lengths)
    val = [batch.number.tolist() for r in range(2) for batch in corpus.val_batches(4, 2, r, 2)["p.jsonl"]]
    assert len(sum(val, [])) == 8 and set(sum(val, [])) <= set(range(split, 90))


def test_the_fingerprint_is_of_all_that_a_reference_depends_on(tok, tmp_path):
    rows = rows_of(30)
    plain = corpus_of(tmp_path / "p.jsonl", rows, tok, val_fraction=0.2)
    assert corpus_of(tmp_path / "other.jsonl", rows, tok, val_fraction=0.2).fingerprint == plain.fingerprint
    changed = [
        corpus_of(tmp_path / "q.jsonl", [*rows[:-1], rows[-1] | {"rejected": "bad"}], tok, val_fraction=0.2),
        corpus_of(tmp_path / "r.jsonl", rows[::-1], tok, val_fraction=0.2),
        corpus_of(tmp_path / "p.jsonl", rows, tok, val_fraction=0.0),
        corpus_of(tmp_path / "p.jsonl", rows, train(corpora.debug_texts()[:20], 640), val_fraction=0.2),
        corpus_of(tmp_path / "p.jsonl", rows, tok, 512, val_fraction=0.2),
    ]
    assert len({corpus.fingerprint for corpus in (plain, *changed)}) == 6
    of_toys = [  # texts of one length
        corpus_of(tmp_path / "t.jsonl", [{"prompt": "Hi", "chosen": answer, "rejected": "b"}], Toy(), 32).fingerprint
        for answer in "你好"
    ]
    assert of_toys[0] != of_toys[1]


def test_data_that_end_too_soon_are_refused(tok, tmp_path):
    corpus = corpus_of(tmp_path / "p.jsonl", rows_of(40), tok)
    corpus.order(1, 8, 10, max_epochs="2")
    with pytest.raises(UserError, match="the data end after step 10"):
        corpus.order(1, 8, 11, max_epochs="2")


def test_labels_mean_the_same_to_kto_and_to_sft(tok: Tokenizer) -> None:
    """A bad answer of kto is left out by sft, whatever layout it has and however the label is written."""
    asked = {"instruction": "q", "input": "", "output": "a"}, {"question": "q", "answer": "a"}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    layouts = *asked, {"messages": talk}, {"prompt": "q", "completion": "a"}
    labels = [(label, 1) for label in (True, 1, 1.0, "true", "1")]
    labels += [(label, -1) for label in (False, 0, 0.0, "False", "0")]
    for layout in layouts:
        for key in ("label", "kto_tag"):
            for label, expected in labels:
                row = layout | {key: label}
                _, (answer,) = LabelReader(tok, 128).item(row, "")
                assert answer.margin == expected
                reader = ChatReader(tok)
                try:
                    reader.item(row, "")
                    found = 1
                except BadRow as problem:
                    found = -1 if problem.reason == "bad answer" else 0
                assert found == expected
    with pytest.raises(BadRow, match="bad answer"):
        LabelReader(tok, 128).item({"messages": [talk[0], talk[1] | {"weight": 0}], "label": True}, "")
