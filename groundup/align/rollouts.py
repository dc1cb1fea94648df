"""Rollouts: answers that the policy samples to prompts, and the batches that it learns from, for a step of rl.py.

Tokens are sampled from exactly the distribution that is trained: softmax of logits / temperature over all ids, with no
top-k, top-p or forbidden ids. The token that ends an answer, <|im_end|> or the end of text, was sampled like the
others, so it is learned like the others. An answer depends only on the weights, its prompt and (seed, step, attempt,
number of the prompt in the step, sample): not on the ranks, nor, but for near ties, on the rest of the batch. How many
rows there are changes the rounding: log-probabilities differ by some 5e-6 in float32, 0.03 in bfloat16 (SmolLM2-135M),
between batches and between drawing and training; ids next to never in float32, now and then in bfloat16.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from groundup.align.losses import token_logps
from groundup.align.policy_gradient import flat_groups
from groundup.align.rewards import Rewards, Rollout
from groundup.generate.completion import check
from groundup.generate.engine import Engine, cache_bytes, generate
from groundup.generate.kv_cache import row_length
from groundup.generate.sampling import SamplingParams
from groundup.tokens.batches import in_each
from groundup.tokens.conversations import columns_for
from groundup.tokens.mixture import hash_words
from groundup.tokens.prompts import Prompt, PromptCorpus
from groundup.train import plan as memory_plan
from groundup.train import ranks
from groundup.train.base import adapters_of, frozen_dtype
from groundup.train.device import autocast
from groundup.train.log import RunLog
from groundup.train.lora import trainable_table
from groundup.train.plan import parameter_table
from model import IGNORE, ModelConfig, Transformer, chunk_rows, compute_dtype
from tokenizer import Tokenizer

Drawing = Callable[..., list[Rollout]]  # `draw` with all arguments but prompts, seeds and n


def seed_of(seed: int, *place: int) -> int:
    """Return the seed of a prompt; the engine hashes it with the prompt's ids and the number of the sample."""
    return int(hash_words(1, "rollouts", seed, *place)[0]) >> 2


def draw(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Prompt], seeds: Sequence[int], n: int,
    max_new_tokens: int, temperature: float, batch_size: int, dtype: torch.dtype, engine: Engine | None = None,
) -> list[Rollout]:  # fmt: skip
    """Return n rollouts of each prompt, those of the first prompt first. seeds: of `seed_of`, one per prompt.
    batch_size: answers at a time, 0 = all. dtype: of the matrix products, as in training. engine: with compiled steps,
    kept from call to call."""
    if not prompts:
        return []
    how = {"temperature": temperature, "eos_ids": tokenizer.stop_ids, "n": n}
    params = [SamplingParams(max_new_tokens, **how, seed=seed) for seed in seeds]
    with autocast(model.embed_tokens.weight.device, dtype):
        if engine is None:
            results = generate(model, tokenizer, [prompt.ids for prompt in prompts], params, batch_size)
        else:
            engine.update(model)
            of_each = zip(prompts, params, strict=True)
            requests = [check(i, prompt.ids, own, model.cfg, tokenizer) for i, (prompt, own) in enumerate(of_each)]
            deque(engine.run(requests), maxlen=0)
            results = [request.result() for request in requests]
    return [
        Rollout(prompt, found.ids, found.text, found.finish_reason == "stop", found.cumulative_logprob)
        for prompt, result in zip(prompts, results, strict=True)
        for found in result.completions
    ]


def drawing(model: Transformer, tokenizer: Tokenizer, config: Mapping, world_size: int, dtype: torch.dtype) -> Drawing:
    """Return `draw` as a run uses it: with compile=True steps of drawing are compiled too, where that is faster."""
    rows, sampling = rows_at_a_time(config, world_size), {key: config[key] for key in ("max_new_tokens", "temperature")}
    engine = None
    if config["compile"]:
        with autocast(model.embed_tokens.weight.device, dtype):
            engine = Engine(model, tokenizer, rows, compile=True)
    engine = engine if engine and engine.compile else None
    return partial(draw, model, tokenizer, batch_size=rows, dtype=dtype, engine=engine, **sampling)


def rows_at_a_time(config: Mapping, world_size: int) -> int:
    """Return how many answers a rank draws together."""
    most = config["prompts_per_step"] * config["group_size"] // world_size
    return min(config["draw_batch_size"] or most, most)


def plan(
    cfg: ModelConfig, config: dict, world_size: int, device: torch.device, dtype: torch.dtype, peak: float,
    rewards: Rewards,
) -> str:  # fmt: skip
    """Return what a run of rl.py will take at most, as text; the time is that of the updates, without drawing."""
    total, T = parameter_table(cfg)["total"], config["block_size"]
    other = {
        "reference": float(frozen_dtype(config, dtype).itemsize * total)
        * (config["reference"] == "model" and config["kl_coef"] > 0),
        "reward models": (2.0 if dtype == torch.bfloat16 else 4.0) * rewards.n_parameters,
        "cache": float(cache_bytes(cfg, rows_at_a_time(config, world_size), row_length(cfg, T), dtype)),
        "copy to draw with": float(dtype.itemsize * total),
    }  # fmt: skip
    if config["algorithm"] == "ppo":
        trained = trainable_table(cfg, config["trainable"], adapters_of(config))["trainable"]
        copied = config["async_save"] and device.type == "cpu"  # to save from
        other["critic"] = 4.0 * total + (24.0 if copied else 12.0) * trained
    n_answers, n_epochs = config["prompts_per_step"] * config["group_size"], config["epochs_per_step"]
    n_updates = n_epochs * config["minibatches"]
    batch = f"{n_answers} answers and {n_updates} updates per step, {config['max_steps']:,} steps"
    size = cfg, config, batch, n_answers * T * config["max_steps"] * n_epochs, world_size, device, dtype, peak
    return memory_plan.describe(*size, other=other, note="of the updates below ")


def draw_step(
    draw: Drawing, rewards: Rewards, corpus: PromptCorpus, step: int, slots: Sequence[int], config: Mapping
) -> tuple[list[Rollout], Tensor, Tensor, dict[str, float]]:
    """Return this rank's group_size rollouts for each of these prompt numbers (`slots`) of a step; and of all ranks
    the rewards (1 + parts, R), the answers' lengths in tokens (R,), and figures for the log. All ranks call it.

    Replace groups with equal rewards by groups of other prompts, at most filter_groups times (arXiv:2503.14476, 3.2).
    The other prompt depends only on step, slot and attempt."""
    kept: dict[int, tuple[list[Rollout], Tensor]] = {}
    G, wanted = config["group_size"], np.array(slots)
    counts = {"redrawn": 0, "drawn": 0, "draw_s": 0.0}
    for attempt in range(1 + config["filter_groups"]):
        order = corpus.redrawn_order(config["prompts_per_step"], attempt)
        prompts = corpus.take(order, (step - 1) * config["prompts_per_step"] + wanted)
        began = time.perf_counter()
        drawn = draw(prompts, [seed_of(config["seed"], step, attempt, slot) for slot in wanted.tolist()], n=G)
        counts["draw_s"] += time.perf_counter() - began
        counts["drawn"] += sum(len(one.ids) for one in drawn)
        counts["redrawn"] += len(wanted) if attempt else 0
        table = rewards.table(drawn)
        parts = [slice(k * G, (k + 1) * G) for k in range(len(wanted))]
        kept |= {slot: (drawn[part], table[:, part]) for slot, part in zip(wanted.tolist(), parts, strict=True)}
        if config["filter_groups"]:
            learned, which = learned_rewards(table[0], config)
            wanted = wanted[flat_groups(learned, G, which).numpy()]
        if not len(wanted):
            break
    every = [one for slot in slots for one in kept[slot][0]]
    table, lengths, of_ranks = gather(torch.cat([kept[slot][1] for slot in slots], dim=1), every, counts)
    figures = describe_answers(table, lengths, rewards.names, config)
    figures |= {key: sum(counts[key] for counts in of_ranks) for key in ("redrawn", "drawn")}
    figures["draw_s"] = max(counts["draw_s"] for counts in of_ranks)  # the other ranks wait for the slowest
    return every, table, lengths, figures


def gather(table: Tensor, drawn: Sequence[Rollout], other: object = None) -> tuple[Tensor, Tensor, list]:
    """Return the rewards (1 + parts, R) and lengths (R,) of the answers of all ranks, and each rank's `other`."""
    of_ranks = ranks.gather_objects((table, torch.tensor([len(one.ids) for one in drawn]), other))
    tables, lengths, others = zip(*of_ranks, strict=True)
    return torch.cat(tables, dim=1), torch.cat(lengths), list(others)


def evaluate(
    draw: Drawing, rewards: Rewards, corpus: PromptCorpus, world: ranks.World, config: Mapping
) -> tuple[dict[str, float], list[str]]:
    """Return figures of one answer to each held-out prompt, with the same seeds each time, and eval_answers lines that
    show an answer with its reward. The ranks share the prompts out; all call it."""
    prompts = corpus.held_out[: config["eval_prompts"] or None]
    seeds = [seed_of(config["seed"], 0, 0, k) for k in range(len(prompts))]  # no step has number 0
    drawn = draw(prompts[world.rank :: world.world_size], seeds[world.rank :: world.world_size], n=1)
    own, shown = rewards.table(drawn), []
    table, lengths, _ = gather(own, drawn)
    for one, reward in zip(drawn[: config["eval_answers"]], own[0].tolist(), strict=False):
        question, answer = (" ".join(text.split()) for text in (one.prompt.messages[-1]["content"], one.text))
        figure = f"{reward:8.3f}" if one.finished else "     cut"
        shown.append(f"    {figure}  {question:.60} -> {answer:.100}")
    return describe_answers(table, lengths, rewards.names, config), shown


def learned_rewards(rewards: Tensor, config: Mapping) -> tuple[Tensor, Tensor]:
    """Return (rewards (R,) float32, where the setting `unfinished` replaces nan; which answers count, (R,) bool)."""
    unfinished, penalty = rewards.isnan(), config["unfinished"] == "penalty"
    filled = rewards.masked_fill(unfinished, config["unfinished_reward"] if penalty else 0.0).float()
    return filled, ~unfinished | penalty


def describe_answers(table: Tensor, lengths: Tensor, names: Sequence[str], config: Mapping) -> dict[str, float]:
    """Return mean and standard deviation of the rewards (with unfinished='mask' of finished answers only), the share of
    finished answers, their mean length in tokens, and the mean of each part over finished answers."""
    finished = ~table[0].isnan()
    rewards, counts = learned_rewards(table[0], config)
    rewards = rewards[counts].double()
    figures = {
        "reward": rewards.mean().item(), "reward_std": rewards.std().item() if len(rewards) > 1 else 0.0,
        "finished": finished.double().mean().item(), "length": lengths.double().mean().item(),
    }  # fmt: skip
    parts = zip(names, table[1:], strict=True) if len(names) > 1 else ()
    return figures | {f"reward/{name}": values[finished].mean().item() for name, values in parts}


class RolloutBatch(NamedTuple):
    """B prompts with their answers, padded on the right to T, and the n answer tokens that are learned."""

    x: Tensor  # (B, T) int64, all but the last token of each
    index: Tensor  # (n,) int64: positions in the flat x, ascending
    targets: Tensor  # (n,) int64: the tokens that follow them
    row: Tensor  # (n,) int64: their answers, of B
    place: Tensor  # (n,) int64: their numbers among all tokens of the Rollouts

    def to(self, device: str | torch.device) -> "RolloutBatch":
        return in_each(self, lambda tensor: tensor.to(device, non_blocking=True))


class Rollouts:
    """The answers of one step on one rank; their tokens are numbered consecutively, answer by answer.

    row (n,) int64: the answer of each token. counts (R,) bool: answers that are learned; the others are in batches too,
    but none of their tokens."""

    def __init__(self, drawn: Sequence[Rollout], counts: Sequence[bool], block_size: int, pad_id: int) -> None:
        self.drawn, self.block_size, self.pad_id = list(drawn), block_size, max(pad_id, 0)
        self.counts = torch.tensor(counts, dtype=torch.bool)
        self.sizes = np.array([len(one.ids) for one in drawn], np.int64)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.lengths = np.array([len(one.prompt.ids) for one in drawn], np.int64) + self.sizes - 1
        self.row = torch.from_numpy(np.repeat(np.arange(len(drawn)), self.sizes))
        self.learned = self.counts[self.row]  # (n,) bool: tokens of answers that are learned

    def batch(self, answers: np.ndarray) -> RolloutBatch:
        """Return these answers (B,) int64 as a batch, with T rounded up so that there are few shapes."""
        T = int(columns_for(self.lengths[answers].max(), self.block_size))
        x = np.full((len(answers), T), self.pad_id, np.int64)
        y, learned, place = np.zeros_like(x), np.zeros(x.shape, bool), np.zeros_like(x)
        for b, i in enumerate(answers.tolist()):
            one, end = self.drawn[i], int(self.lengths[i])
            ids = one.prompt.ids + one.ids
            x[b, :end], y[b, :end] = ids[:-1], ids[1:]
            at = slice(end - len(one.ids), end)
            learned[b, at], place[b, at] = bool(self.counts[i]), np.arange(len(one.ids)) + self.offsets[i]
        index = np.flatnonzero(learned)
        arrays = x, index, y.reshape(-1)[index], index // T, place.reshape(-1)[index]
        return RolloutBatch(*map(torch.from_numpy, arrays))

    def batches(self, batch_size: int, answers: np.ndarray | None = None) -> Iterator[RolloutBatch]:
        """Yield batches of at most batch_size answers, sorted by length; answers: some of them, None = all."""
        answers = np.arange(len(self.drawn)) if answers is None else answers
        by_length = answers[np.argsort(self.lengths[answers], kind="stable")]
        for first in range(0, len(by_length), batch_size):
            yield self.batch(by_length[first : first + batch_size])

    @torch.no_grad()
    def of_each(self, function: Callable[[RolloutBatch], Tensor], batch_size: int, device: torch.device) -> Tensor:
        """Return (n,) float32 on the CPU: `function` of the tokens of each batch; 0 for tokens that are not learned."""
        found = torch.zeros(len(self.row))
        for batch in self.batches(batch_size):
            found[batch.place] = function(batch.to(device)).float().cpu()
        return found


def minibatch_of(n: int, n_minibatches: int, *seed: int) -> np.ndarray:
    """Return the minibatch of each of the n answers of all ranks, (n,) int64; n is a multiple of n_minibatches.

    Each minibatch gets one, at random, of every n_minibatches consecutive answers, so a rank whose number of answers is
    such a multiple has equally many in each minibatch."""
    assert n % n_minibatches == 0, f"{n=} {n_minibatches=}"
    blocks = range(n // n_minibatches)
    lots = [np.argsort(hash_words(n_minibatches, "minibatches", *seed, block)) for block in blocks]
    return np.concatenate(lots)


def answer_logps(
    model: Transformer, batch: RolloutBatch, temperature: float, device: torch.device, dtype: torch.dtype,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the log-probabilities of the learned tokens (n,) float32 with gradient, and the entropies of their
    distributions without gradient, or empty."""
    n = len(batch.index)
    extra = -n % max(1, batch.x.numel() // 16)  # tensors of ever new sizes fragment the memory
    index, targets = F.pad(batch.index, (0, extra)), F.pad(batch.targets, (0, extra), value=IGNORE)
    with autocast(device, dtype):
        hidden = model(batch.x, index=index)  # the logits are divided, in float32, not these: bfloat16 would round them
        logps = token_logps(hidden, model.lm_head.weight, targets, temperature)[:n]
        found = token_entropies(hidden[:n], model.lm_head.weight, temperature) if with_entropy else logps.new_zeros(0)
    return logps, found


@torch.no_grad()
def token_entropies(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropies of softmax(hidden @ weight.T / temperature) in nats, (N,) float32. hidden (N, C), weight
    (V, C). Like token_logps it never holds all the logits."""
    dtype, chunk = compute_dtype(hidden), chunk_rows(weight.shape[0], hidden.device.type)
    w, found = weight.to(dtype), [hidden.new_zeros(0, dtype=torch.float32)]
    with torch.autocast(hidden.device.type, enabled=False):
        for h in hidden.split(chunk) if len(hidden) else ():
            logps = (h.to(dtype) @ w.T).float().div_(temperature).log_softmax(dim=1)
            found.append(-(logps.exp() * logps).sum(1))
    return torch.cat(found)


# What is added up over the tokens of a step's updates, in this order.
TOKEN_SUMS = ("tokens", "loss", "value_loss", "entropy", "kl", "clipped", "positions")


def describe_updates(
    sums: Tensor, ratio_max: Tensor, n_updates: int, n_epochs: int, n_answers: int
) -> dict[str, float]:  # fmt: skip
    """Return means over a step of this rank's TOKEN_SUMS added over all ranks: losses per update, the KL per answer as
    well, all else per token; and the number of positions. n_answers: learned, over all ranks. All ranks call it."""
    total = dict(zip(TOKEN_SUMS, ranks.all_reduce_sum(sums.cpu().double()).tolist(), strict=True))
    n_tokens = max(1.0, total["tokens"])  # each is counted n_epochs times, but its entropy once
    figures = {key: total[key] / n_updates for key in ("loss", "value_loss")}
    figures |= {key: total[key] / n_tokens for key in ("kl", "clipped")}
    figures |= {"entropy": total["entropy"] * n_epochs / n_tokens}
    figures |= {"kl_answer": total["kl"] / n_epochs / max(1, n_answers)}
    return figures | {"ratio_max": max(ranks.gather_objects(ratio_max.item())), "positions": total["positions"]}


def mean_figures(steps: Sequence[Mapping[str, float]], seconds: float) -> dict[str, float]:
    """Return the means of the figures of these steps, which took so many seconds; of ratio_max the largest; and how
    fast answers were drawn, and in which share of the time."""
    finite = {key: [one[key] for one in steps if math.isfinite(one[key])] for key in steps[-1]}
    means = {key: sum(values) / len(values) if values else math.nan for key, values in finite.items()}
    means["ratio_max"] = max(one["ratio_max"] for one in steps)
    draw_s = means.pop("draw_s")
    return means | {"draw_tokens_per_s": means.pop("drawn") / draw_s, "draw_share": len(steps) * draw_s / seconds}


def report_evaluation(log: RunLog, step: int, figures: Mapping[str, float], shown: Sequence[str]) -> None:
    """Write an evaluation's figures to the log, and print them with the answers shown."""
    parts = ["held out", f"reward {figures['reward']:.4f}", f"std {figures['reward_std']:.3f}"]
    parts += [f"finished {100 * figures['finished']:.1f}%", f"length {figures['length']:.1f}"]
    parts += [f"{key.partition('/')[2]} {value:.3f}" for key, value in figures.items() if key.startswith("reward/")]
    log.report(step, figures, parts, shown)
