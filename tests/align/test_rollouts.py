"""Answers are drawn from the distribution that is trained, to the last token.

Batches hold their tokens once.
"""

import copy

import numpy as np
import pytest
import torch

from groundup.align.rewards import Rollout
from groundup.align.rollouts import (
    AnswerSampler,
    Rollouts,
    answer_logps,
    measure_logps,
    minibatch_of,
    seed_of,
)
from groundup.demo import debug_data
from groundup.generate import decode, engine
from groundup.tokens.prompts import Prompt
from groundup.train import huggingface
from groundup.train.device import autocast
from groundup.train.lora import LoRAConfig, set_trainable
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, chat_ready

QUESTIONS = [
    "What is 2 plus 3?",
    "为什么天是蓝的?",
    "Say yes.",
    "Name a colour, and then another one, please.",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / "data"
    debug_data.make_debug_data(folder)
    return chat_ready(Tokenizer.load(folder))


@pytest.fixture(scope="module")
def model(tokenizer) -> Transformer:
    """Of random weights that end an answer after some ten tokens."""
    torch.manual_seed(0)
    cfg = ModelConfig(
        tokenizer.vocab_size, block_size=96, n_layer=2, n_head=4, n_kv_head=2, n_embd=32
    )
    model = Transformer(cfg)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
        model.embed_tokens.weight[tokenizer.im_end_id] *= 2
    return model


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    talks = [[{"role": "user", "content": text}] for text in QUESTIONS]
    rendered = [tokenizer.render(talk, add_generation_prompt=True)[0] for talk in talks]
    return [
        Prompt(talk, ids, {}, f"x:{i}")
        for i, (talk, ids) in enumerate(zip(talks, rendered, strict=True))
    ]


def draw(
    model, tokenizer, prompts, seeds, n, max_new_tokens=24, temperature=1.0, n_rows=1000
) -> list[Rollout]:
    sampler = AnswerSampler(
        model, tokenizer, n_rows, max_new_tokens, temperature, torch.float32, compile=False
    )
    return sampler.draw(prompts, seeds, n)


def drawn_of(model, tokenizer, prompts, n=6, n_rows=1000) -> list[Rollout]:
    seeds = [seed_of(1, 1, 0, k) for k in range(len(prompts))]
    return draw(model, tokenizer, prompts, seeds, n, n_rows=n_rows)


@pytest.fixture(scope="module")
def drawn(model, tokenizer, prompts) -> list[Rollout]:
    found = drawn_of(model, tokenizer, prompts)
    assert 4 < sum(one.finished for one in found) < len(found) - 4  # both kinds
    return found


def by_hand(model: Transformer, one: Rollout, temperature: float) -> torch.Tensor:
    """Log-probabilities of an answer's tokens from all the logits of its text alone."""
    ids = torch.tensor([one.prompt.ids + one.ids])
    with torch.no_grad():
        logps = (
            (model(ids[:, :-1])[0] / temperature).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        )
    return logps[-len(one.ids) :]


# ---- the distribution ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7])  # at 1 a division that is left out would not show
def test_tokens_come_as_often_as_training_believes(model, tokenizer, prompts, temperature):
    """First tokens of 1000 answers, counted, against the probabilities that answer_logps gives."""
    found = draw(model, tokenizer, prompts[:1], [5], 1000, 1, temperature, n_rows=100)
    counts = torch.bincount(
        torch.tensor([one.ids[0] for one in found]), minlength=model.cfg.vocab_size
    )
    likely = counts.topk(12).indices.tolist()
    examples = [Rollout(prompts[0], [token], "", False, 0.0) for token in likely]
    batch = Rollouts(examples, [True] * 12, 96, tokenizer.pad_id).batch(np.arange(12))
    p = answer_logps(model, batch, temperature, torch.float32)[0].exp().detach()
    spread = (p * (1 - p) * 1000).sqrt()
    assert ((counts[likely] - 1000 * p).abs() < 5 * spread).all()
    other = answer_logps(model, batch, 1.7 - temperature, torch.float32)[0].exp().detach()
    assert not (
        (counts[likely] - 1000 * other).abs() < 5 * spread
    ).all()  # so the comparison can fail


def test_sums_are_those_of_the_engine(model, tokenizer, drawn):
    answers = Rollouts(drawn, [True] * len(drawn), 96, tokenizer.pad_id)
    logps = measure_logps(model, answers, 5, 1.0, torch.float32)
    sums = torch.zeros(len(drawn)).index_add(0, answers.row, logps)
    torch.testing.assert_close(
        sums, torch.tensor([one.logprob for one in drawn]), atol=1e-4, rtol=1e-5
    )


def test_any_id_may_come(model, tokenizer, prompts):
    """Reserved ids and padding too.

    The probabilities of what may come add up to 1 in training only with them.
    """
    strange = tokenizer.pad_id
    with torch.no_grad():
        before = model.lm_head.weight[strange].clone()
        model.lm_head.weight[strange] = 2 * model.embed_tokens.weight[tokenizer.im_end_id]
        found = drawn_of(model, tokenizer, prompts, n=4)
        model.lm_head.weight[strange] = before
    assert any(strange in one.ids for one in found)


def test_answers_depend_on_nothing_beside_them(model, tokenizer, prompts, drawn):
    """One at a time, and the third prompt by itself, as another rank would draw it."""
    assert [one.ids for one in drawn_of(model, tokenizer, prompts, n_rows=1)] == [
        one.ids for one in drawn
    ]
    alone = draw(model, tokenizer, prompts[2:3], [seed_of(1, 1, 0, 2)], 6)
    assert [one.ids for one in alone] == [one.ids for one in drawn[12:18]]
    assert len({tuple(one.ids) for one in drawn[:6]}) == 6
    places = [(1, 1, 0, 0), (2, 1, 0, 0), (1, 2, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1)]
    assert len({seed_of(*place) for place in places}) == 5


@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_an_engine_that_is_kept_draws_with_the_weights_as_they_are(
    model, tokenizer, prompts, monkeypatch, trainable
):
    """In place.

    A CUDA graph reads weights and cache where they were when it was recorded. (Not compiled here.)
    """
    monkeypatch.setattr(engine, "can_record", lambda device: True)
    monkeypatch.setattr(decode, "RecordedStep", lambda view: decode.decode_step)
    monkeypatch.setattr(decode, "step_c", lambda *_: None)
    policy, found = copy.deepcopy(model), []
    set_trainable(policy, trainable, LoRAConfig())

    def new_sampler(dtype: torch.dtype = torch.bfloat16, compile: bool = True) -> AnswerSampler:
        return AnswerSampler(policy, tokenizer, 18, 24, 1.0, dtype, compile)

    kept = new_sampler()
    own = kept.engine
    places, cache = [p.data_ptr() for p in own.model.parameters()], None
    for _ in range(2):
        alone = new_sampler()
        found.append([one.ids for one in kept.draw(prompts[:3], [7, 8, 9], n=6)])
        assert found[-1] == [one.ids for one in alone.draw(prompts[:3], [7, 8, 9], n=6)]
        caches = list(own.cache.caches.values())
        assert [p.data_ptr() for p in own.model.parameters()] == places
        assert caches[0] is (cache or caches[0])
        cache = caches[0]
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(torch.randn_like(p), alpha=0.03)
    assert found[0] != found[1]
    assert new_sampler(compile=False).engine is None
    monkeypatch.setattr(engine, "can_record", decode.can_record)
    assert new_sampler().engine is None  # on a CPU nothing is recorded


# ---- batches -------------------------------------------------------------------------------------


def test_the_end_is_learnt_where_it_was_drawn(model, tokenizer, drawn):
    """Each answer's targets are all its ids.

    The end token once, last, of finished ones; none of unfinished ones.
    """
    answers = Rollouts(drawn, [True] * len(drawn), 96, tokenizer.pad_id)
    for batch in answers.batches(7):
        for b in range(len(batch.x)):
            targets = batch.targets[batch.row == b].tolist()
            (i,) = {int(i) for i in answers.row[batch.token[batch.row == b]]}
            assert targets == drawn[i].ids
            ends = [k for k, token in enumerate(targets) if token in tokenizer.stop_ids]
            assert ends == ([len(targets) - 1] if drawn[i].finished else [])
            logps, _ = answer_logps(model, batch, 0.7, torch.float32)
            torch.testing.assert_close(
                logps[batch.row == b], by_hand(model, drawn[i], 0.7), atol=1e-4, rtol=1e-4
            )


def test_answers_that_do_not_count_have_no_token(tokenizer, drawn):
    counts = [one.finished for one in drawn]
    answers = Rollouts(drawn, counts, 96, tokenizer.pad_id)
    batches = list(answers.batches(5))
    assert sum(len(batch.x) for batch in batches) == len(drawn)
    places = torch.cat([batch.token for batch in batches]).sort().values
    assert torch.equal(places, answers.learned.nonzero().flatten())
    assert len(places) == sum(len(one.ids) for one in drawn if one.finished)


def test_a_batch_without_tokens_has_gradients_of_zero(model, tokenizer, drawn):
    batch = Rollouts(drawn, [False] * len(drawn), 96, tokenizer.pad_id).batch(np.arange(3))
    logps, entropies = answer_logps(model, batch, 1.0, torch.float32, with_entropy=True)
    logps.sum().backward()
    assert not len(logps) and not len(entropies)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad()


def test_the_temperature_divides_logits_not_hidden_states(model, tokenizer, drawn):
    """In bfloat16 a hidden state divided by 0.7 is rounded.

    The engine divides the logits, and so must training.
    """
    batch = Rollouts(drawn, [True] * len(drawn), 96, tokenizer.pad_id).batch(np.arange(len(drawn)))
    with torch.no_grad(), autocast(torch.device("cpu"), torch.bfloat16):
        logits = (
            model.lm_head(model(batch.x, index=batch.index)).float() / 0.7
        )  # as sampling.keep_likeliest has it
        found, entropies = answer_logps(model, batch, 0.7, torch.bfloat16, with_entropy=True)
    want = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(found, want.log_prob(batch.targets), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, want.entropy(), atol=1e-5, rtol=0)


def test_minibatches_are_the_same_on_any_ranks_and_of_one_size():
    whole = minibatch_of(24, 4, 7, 3, 0)
    assert sorted(whole.tolist()) == sorted([0, 1, 2, 3] * 6)
    for n_ranks in (2, 3, 6):
        n = 24 // n_ranks
        parts = [whole[rank * n : (rank + 1) * n] for rank in range(n_ranks)]
        assert all((np.bincount(part) == n // 4).all() for part in parts)
    assert not np.array_equal(minibatch_of(24, 4, 7, 3, 1), whole)  # another epoch


def test_checkpoints_hold_such_a_model(model, tokenizer, prompts, drawn, tmp_path):
    """What was saved draws the same answers."""
    huggingface.write_model(tmp_path, model, tokenizer)
    again = drawn_of(huggingface.load_model(tmp_path), Tokenizer.load(tmp_path), prompts)
    assert [one.ids for one in again] == [one.ids for one in drawn]
