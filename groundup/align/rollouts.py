"""Answers that the policy draws to prompts, and the batches that it learns from: what a step of rl.py begins with.

    draw(...)              -> the answers to prompts, by the engine of generate.py
    draw_groups(...)       -> those of a step with their rewards
    Rollouts(answers)      -> their tokens, one answer behind the other, and batches of some of them
    answer_logps(...)      -> log-probabilities of a batch's answer tokens, as training computes them

The tokens are drawn from exactly the distribution whose log-probabilities are trained: softmax of logits / temperature
over all ids, none cut off, none forbidden, not even those that no text has. What ends an answer, <|im_end|> or the end
of a text, was drawn like the others, so it is learnt like the others. An answer's tokens depend on the weights, its
prompt and (seed, step, attempt, place of the prompt, number of the sample) alone: not on the ranks, nor on what is
beside it (in float32 to the bit, see generate.py).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from groundup.align.policy_gradient import flat_groups
from groundup.align.rewards import Answer, Rewards
from groundup.align.token_logps import token_logps
from groundup.generate.engine import generate
from groundup.generate.sampling import SamplingParams
from groundup.tokens.batches import in_each
from groundup.tokens.conversations import columns_for
from groundup.tokens.mixture import hash_words
from groundup.tokens.prompts import Prompt, PromptCorpus
from groundup.train.device import autocast
from model import CHUNK_ELEMENTS, IGNORE, Transformer, compute_dtype
from tokenizer import Tokenizer


class Drawn(NamedTuple):
    """An answer as it was drawn."""

    prompt: Prompt
    ids: list[int]  # with the id that ended it, if one did
    text: str  # without
    finished: bool
    logprob: float  # the engine's sum over its tokens, before the temperature

    def answer(self) -> Answer:
        """What a reward is given for."""
        prompt = self.prompt
        return Answer(prompt.messages, self.text, prompt.ids + self.ids, self.finished, prompt.row, prompt.place)


def seed_of(seed: int, *place: int) -> int:
    """The seed of a prompt's first sample; its others are the numbers that follow."""
    return int(hash_words(1, "rollouts", seed, *place)[0]) >> 2


def draw(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Prompt], seeds: Sequence[int], n: int,
    max_new_tokens: int, temperature: float, batch_size: int, dtype: torch.dtype,
) -> list[Drawn]:  # fmt: skip
    """n answers to each prompt, those of the first one first. seeds: of `seed_of`, one for each prompt. batch_size:
    answers at a time, 0 = all. dtype: of the matrix products, as in training."""
    if not prompts:
        return []
    params = [
        SamplingParams(max_new_tokens, temperature=temperature, eos_ids=tokenizer.stop_ids, n=n, seed=seed)
        for seed in seeds
    ]
    with autocast(model.embed_tokens.weight.device, dtype):
        results = generate(model, tokenizer, [prompt.ids for prompt in prompts], params, batch_size)
    return [
        Drawn(prompt, found.ids, found.text, found.finish_reason == "stop", found.cumulative_logprob)
        for prompt, result in zip(prompts, results, strict=True)
        for found in result.completions
    ]


# ---- a step's answers and what they get ------------------------------------------------------------------------------


class Groups(NamedTuple):
    """The answers of one rank in a step, group by group."""

    drawn: list[Drawn]
    scores: Tensor  # (1 + parts, R) float64: the reward, then its parts; nan for unfinished answers
    n_redrawn: int  # groups that were drawn anew
    n_tokens: int  # drawn, with those that were not kept
    seconds: float  # that drawing took, without the rewards


def draw_groups(
    draw: Callable[[Sequence[Prompt], Sequence[int]], list[Drawn]], rewards: Rewards, corpus: PromptCorpus, step: int,
    slots: Sequence[int], config: Mapping,
) -> Groups:  # fmt: skip
    """group_size answers to the prompts of these places of a step. draw: as the function above, of prompts and seeds.

    With filter_groups, a group of equal rewards gives way to one of another prompt, so often at most (arXiv:2503.14476,
    3.2). Which prompt that is depends on step, place and attempt alone."""
    kept: dict[int, tuple[list[Drawn], Tensor]] = {}
    G, wanted = config["group_size"], np.array(slots)
    n_redrawn, n_tokens, seconds = 0, 0, 0.0
    for attempt in range(1 + config["filter_groups"]):
        n_redrawn += len(wanted) if attempt else 0
        order = corpus.redrawn_order(config["prompts_per_step"], attempt)
        prompts = corpus.take(order, (step - 1) * config["prompts_per_step"] + wanted)
        began = time.perf_counter()
        drawn = draw(prompts, [seed_of(config["seed"], step, attempt, slot) for slot in wanted.tolist()])
        seconds, n_tokens = seconds + time.perf_counter() - began, n_tokens + sum(len(one.ids) for one in drawn)
        scores = score(rewards, drawn)
        parts = [slice(k * G, (k + 1) * G) for k in range(len(wanted))]
        kept |= {slot: (drawn[part], scores[:, part]) for slot, part in zip(wanted.tolist(), parts, strict=True)}
        if config["filter_groups"]:
            learnt, counts = learnt_rewards(scores[0], config)
            wanted = wanted[flat_groups(learnt, G, counts).numpy()]
        if not len(wanted):
            break
    every = [one for slot in slots for one in kept[slot][0]]
    return Groups(every, torch.cat([kept[slot][1] for slot in slots], dim=1), n_redrawn, n_tokens, seconds)


def score(rewards: Rewards, drawn: Sequence[Drawn]) -> Tensor:
    """(1 + parts, R) float64: the reward of each answer and its parts, nan for unfinished ones."""
    found = rewards.score([one.answer() for one in drawn])
    table = [found.total, *found.parts.values()]
    return torch.tensor(table, dtype=torch.float64).view(len(table), len(drawn))


def learnt_rewards(scores: Tensor, config: Mapping) -> tuple[Tensor, Tensor]:
    """(rewards (R,) float32 with what the rule has for unfinished answers, whose scores are nan; which count (R,))."""
    unfinished, penalty = scores.isnan(), config["unfinished"] == "penalty"
    rewards = scores.masked_fill(unfinished, config["unfinished_reward"] if penalty else 0.0).float()
    return rewards, ~unfinished | penalty


def describe_answers(scores: Tensor, lengths: Tensor, names: Sequence[str], config: Mapping) -> dict[str, float]:
    """Mean and standard deviation of the rewards (of the finished answers alone with unfinished='mask'), share of the
    finished answers, mean length in tokens; the mean of each part over the finished ones."""
    finished = ~scores[0].isnan()
    rewards, counts = learnt_rewards(scores[0], config)
    rewards = rewards[counts].double()
    found = {
        "reward": rewards.mean().item(), "reward_std": rewards.std().item() if len(rewards) > 1 else 0.0,
        "finished": finished.double().mean().item(), "length": lengths.double().mean().item(),
    }  # fmt: skip
    parts = zip(names, scores[1:], strict=True) if len(names) > 1 else ()
    return found | {f"reward/{name}": values[finished].mean().item() for name, values in parts}


# ---- batches --------------------------------------------------------------------------------------------------------


class RolloutBatch(NamedTuple):
    """B answers behind their prompts, padded on the right to T, and the n tokens that are learnt of them."""

    x: Tensor  # (B, T) int64, all but the last token of each
    index: Tensor  # (n,) int64: places in the flat x, ascending
    targets: Tensor  # (n,) int64: the tokens that follow them
    row: Tensor  # (n,) int64: which of the B answers they are in
    place: Tensor  # (n,) int64: where they are among all tokens of the Rollouts

    def to(self, device: str | torch.device) -> "RolloutBatch":
        return in_each(self, lambda tensor: tensor.to(device, non_blocking=True))


class Rollouts:
    """Answers of one step on one rank. Their tokens are numbered through, one answer behind the other.

    row (n,) int64: the answer of each token. counts (R,) bool: answers that are learnt; the others stay in batches, but
    have no token there."""

    def __init__(self, drawn: Sequence[Drawn], counts: Sequence[bool], block_size: int, pad_id: int) -> None:
        self.drawn, self.block_size, self.pad_id = list(drawn), block_size, max(pad_id, 0)
        self.counts = torch.tensor(counts, dtype=torch.bool)
        self.sizes = np.array([len(one.ids) for one in drawn], np.int64)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.lengths = np.array([len(one.prompt.ids) for one in drawn], np.int64) + self.sizes - 1
        self.row = torch.from_numpy(np.repeat(np.arange(len(drawn)), self.sizes))

    @property
    def learnt(self) -> Tensor:
        """(n,) bool: tokens of answers that are learnt."""
        return self.counts[self.row]

    def batch(self, answers: np.ndarray) -> RolloutBatch:
        """These answers (B,) int64, T rounded up so that there are few shapes."""
        T = int(columns_for(self.lengths[answers].max(), self.block_size))
        x = np.full((len(answers), T), self.pad_id, np.int64)
        y, learnt, place = np.zeros_like(x), np.zeros(x.shape, bool), np.zeros_like(x)
        for b, i in enumerate(answers.tolist()):
            one, end = self.drawn[i], int(self.lengths[i])
            ids = one.prompt.ids + one.ids
            x[b, :end], y[b, :end] = ids[:-1], ids[1:]
            at = slice(end - len(one.ids), end)
            learnt[b, at], place[b, at] = bool(self.counts[i]), np.arange(len(one.ids)) + self.offsets[i]
        index = np.flatnonzero(learnt)
        arrays = x, index, y.reshape(-1)[index], index // T, place.reshape(-1)[index]
        return RolloutBatch(*map(torch.from_numpy, arrays))

    def batches(self, batch_size: int, answers: np.ndarray | None = None) -> Iterator[RolloutBatch]:
        """Batches of at most batch_size answers, of all or of these, those of like length together."""
        answers = np.arange(len(self.drawn)) if answers is None else answers
        by_length = answers[np.argsort(self.lengths[answers], kind="stable")]
        for first in range(0, len(by_length), batch_size):
            yield self.batch(by_length[first : first + batch_size])

    @torch.no_grad()
    def of_each(self, function: Callable[[RolloutBatch], Tensor], batch_size: int, device: torch.device) -> Tensor:
        """(n,) float32 on the CPU: what `function` gives for the tokens (n,) of a batch; 0 where none is learnt."""
        found = torch.zeros(len(self.row))
        for batch in self.batches(batch_size):
            found[batch.place] = function(batch.to(device)).float().cpu()
        return found


def minibatch_of(n: int, n_minibatches: int, *seed: int) -> np.ndarray:
    """Which minibatch each of the n answers of all ranks is in, (n,) int64.

    Of every n_minibatches answers in a row each minibatch gets one, by lot. So a rank whose answers are a multiple of
    n_minibatches has as many in each as any other. n must be such a multiple."""
    assert n % n_minibatches == 0, f"{n=} {n_minibatches=}"
    blocks = range(n // n_minibatches)
    lots = [np.argsort(hash_words(n_minibatches, "minibatches", *seed, block)) for block in blocks]
    return np.concatenate(lots)


# ---- what the model says --------------------------------------------------------------------------------------------


def answer_logps(
    model: Transformer, batch: RolloutBatch, temperature: float, device: torch.device, dtype: torch.dtype,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(log-probabilities of the learnt tokens (n,) float32 with gradient; entropies of their distributions likewise,
    without gradient, or empty)."""
    n = len(batch.index)
    extra = -n % max(1, batch.x.numel() // 16)  # tensors of ever new sizes leave holes in the memory
    index, targets = F.pad(batch.index, (0, extra)), F.pad(batch.targets, (0, extra), value=IGNORE)
    with autocast(device, dtype):
        hidden = model(batch.x, index=index)
        hidden = hidden if temperature == 1 else hidden / temperature  # the head has no bias
        logps = token_logps(hidden, model.lm_head.weight, targets)[:n]
        found = token_entropies(hidden[:n], model.lm_head.weight) if with_entropy else logps.new_zeros(0)
    return logps, found


@torch.no_grad()
def token_entropies(hidden: Tensor, weight: Tensor) -> Tensor:
    """Entropies of softmax(hidden @ weight.T) in nats, (N,) float32. hidden (N, C), weight (V, C). As in token_logps,
    never with all the logits in memory."""
    dtype, chunk = compute_dtype(hidden), max(1, CHUNK_ELEMENTS // weight.shape[0])
    w, found = weight.to(dtype), [hidden.new_zeros(0, dtype=torch.float32)]
    with torch.autocast(hidden.device.type, enabled=False):
        for h in hidden.split(chunk) if len(hidden) else ():
            logps = (h.to(dtype) @ w.T).float().log_softmax(dim=1)
            found.append(-(logps.exp() * logps).sum(1))
    return torch.cat(found)
