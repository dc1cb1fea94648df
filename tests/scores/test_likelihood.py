"""likelihood.py against transformers and against each row by itself."""

import random

import pytest
import torch
from no_float64 import on_device
from transformers import LlamaForCausalLM

from groundup.kernels import cross_entropy
from groundup.scores import likelihood
from groundup.scores.likelihood import Scored, score_tokens
from groundup.tokens.training import train
from groundup.train import huggingface
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

BLOCK = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["the cat sat on the mat; 猫坐在垫子上。" * 4], 320)


@pytest.fixture(scope="module")
def model(tokenizer) -> Transformer:
    """With a spread of logits that makes some tokens likely."""
    torch.manual_seed(0)
    cfg = ModelConfig(tokenizer.vocab_size, block_size=BLOCK, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    model = Transformer(cfg)
    model.embed_tokens.weight.data *= 20
    return model


def make_rows(n: int, vocab_size: int) -> list[tuple[list[int], int]]:
    rng = random.Random(0)
    rows = []
    for _ in range(n):
        ids = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, BLOCK + 2))]
        rows.append((ids, rng.randrange(1, len(ids) + 1)))
    return rows


@torch.no_grad()
def by_hand(hf: LlamaForCausalLM, ids: list[int], first: int) -> Scored:
    """One row through transformers, one token after the other."""
    logps = hf(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    places = range(first, len(ids))
    nats = -sum(logps[i - 1, ids[i]].item() for i in places)
    return Scored(nats, len(ids) - first, all(logps[i - 1].argmax().item() == ids[i] for i in places))


def test_rows_as_transformers_scores_them_one_by_one(model, tokenizer, tmp_path):
    huggingface.write_model(tmp_path, model, tokenizer)
    hf = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    hf.config.max_position_embeddings = BLOCK + 1  # a last id that is only scored is never read
    rows = make_rows(40, tokenizer.vocab_size)
    likeliest = hf(torch.tensor([rows[0][0][:5]])).logits[0, -1].argmax().item()
    rows += [(rows[0][0][:5] + [likeliest], 5), (rows[0][0][:5] + [likeliest ^ 1], 5), ([7], 1)]
    found = score_tokens(model, rows, 7, torch.float32)
    for row, scored in zip(rows, found, strict=True):
        expected = by_hand(hf, *row)
        assert scored.nats == pytest.approx(expected.nats, abs=1e-4)
        assert scored[1:] == expected[1:]
    assert [scored.greedy for scored in found[-3:]] == [True, False, True]
    assert found[-1] == (0.0, 0, True)


@pytest.mark.parametrize("batch_size", [1, 5, 1000])
def test_batch_size_changes_nothing(model, tokenizer, batch_size):
    rows = make_rows(60, tokenizer.vocab_size)
    alone = [score_tokens(model, [row], 1, torch.float32)[0] for row in rows]
    together = score_tokens(model, rows, batch_size, torch.float32)
    assert [scored.nats for scored in together] == pytest.approx([scored.nats for scored in alone], abs=1e-4)
    assert [scored[1:] for scored in together] == [scored[1:] for scored in alone]


def test_rows_that_read_the_same_are_computed_once(model, monkeypatch):
    """Four letters behind one question; and the same row scored from different places on."""
    n_read = 0
    forward = Transformer.forward

    def count(self, idx, *args, **kwargs):
        nonlocal n_read
        n_read += len(idx)
        return forward(self, idx, *args, **kwargs)

    question = [5, 6, 7, 8]
    rows = [([*question, letter], 4) for letter in (1, 2, 3, 4)] + [([*question, 2], 1)]
    alone = [score_tokens(model, [row], 1, torch.float32)[0] for row in rows]
    monkeypatch.setattr(Transformer, "forward", count)
    together = score_tokens(model, rows, 16, torch.float32)
    assert n_read == 1
    assert [scored.nats for scored in together] == pytest.approx([scored.nats for scored in alone], abs=1e-5)
    assert [scored.n_tokens for scored in together] == [1, 1, 1, 1, 4]


def test_scores_need_no_float64_on_the_device(model, monkeypatch):
    rows = [(list(range(1, 9)), 3), (list(range(2, 6)), 1)]
    want = score_tokens(model, rows, 2, torch.float32)
    monkeypatch.setattr(likelihood, "token_scores", on_device(likelihood.token_scores))
    assert score_tokens(model, rows, 2, torch.float32) == want


def test_the_model_is_left_in_its_mode_and_without_dropout_meanwhile(tokenizer):
    torch.manual_seed(1)
    model = Transformer(ModelConfig(tokenizer.vocab_size, BLOCK, 1, 2, 0, 16, dropout=0.5))
    rows = make_rows(4, tokenizer.vocab_size)
    assert score_tokens(model.train(), rows, 2, torch.float32) == score_tokens(model, rows, 2, torch.float32)
    assert model.training
    score_tokens(model.eval(), rows, 2, torch.float32)
    assert not model.training


def test_logits_are_never_held_for_all_tokens(model, monkeypatch):
    sizes = []
    entropy = cross_entropy.softmax_cross_entropy
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 3 * model.cfg.vocab_size)
    monkeypatch.setattr(cross_entropy, "softmax_cross_entropy", lambda z, t: (sizes.append(len(z)), entropy(z, t))[1])
    rows = make_rows(8, model.cfg.vocab_size)
    score_tokens(model, rows, 8, torch.float32)
    assert max(sizes) == 3
    assert sum(sizes) == sum(len(ids) - first for ids, first in rows)  # none for what is not scored


def test_no_rows_and_a_row_that_does_not_fit(model):
    assert score_tokens(model, [], 4, torch.float32) == []
    with pytest.raises(AssertionError, match="row 1"):
        score_tokens(model, [([1, 2], 1), ([1] * (BLOCK + 2), 1)], 4, torch.float32)
