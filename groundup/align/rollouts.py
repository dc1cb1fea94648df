"""Rollouts: answers that the policy samples to prompts, and the batches that it learns from.

Tokens are sampled from exactly the distribution that is trained: softmax of logits / temperature
over all ids, without top-k, top-p or forbidden ids. The token that ends an answer, <|im_end|> or
the end of text, was sampled like the others, so it is trained like the others.

An answer depends only on the weights, its prompt, and the numbers that `seed_of` hashes: not on the
ranks, nor, except for near ties, on the rest of the batch. Another number of rows rounds
differently: between batches, and between sampling and training, log-probabilities differ by about
5e-6 in float32 and 0.03 in bfloat16 (SmolLM2-135M). So ids differ now and then in bfloat16, hardly
ever in float32.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from groundup.align.rewards import Rewards, Rollout
from groundup.errors import counted, one_line
from groundup.generate.engine import Engine
from groundup.generate.kv_cache import cache_bytes, row_length
from groundup.generate.sampling import SamplingParams
from groundup.generate.tools import MAX_TURNS, Tools, read_calls
from groundup.kernels.cross_entropy import token_entropies, token_logps
from groundup.tokens import IGNORE
from groundup.tokens.batches import map_tensors
from groundup.tokens.conversations import padded_length
from groundup.tokens.mixture import hash_words
from groundup.tokens.prompts import Prompt
from groundup.train import plan, ranks
from groundup.train.device import autocast
from groundup.train.plan import parameter_table
from model import Transformer
from tokenizer import Tokenizer

# ---- sample answers ------------------------------------------------------------------------------


def seed_of(seed: int, step: int, attempt: int, number: int) -> int:
    """Return the seed of a prompt. The engine hashes it with the prompt's ids and the sample.

    number: of the prompt in the step. attempt: 0, or which replacement of that prompt."""
    return int(hash_words(1, "rollouts", seed, step, attempt, number)[0]) >> 2


class AnswerSampler:
    """Sample answers from the policy with the weights it has now.

    n_rows: answers at a time. dtype: of the matrix products, as in training. compile: also compile
    the steps of decoding, where that is faster. stop: asked before each token; if it is true,
    `draw` returns nothing. tools: that answers may call.
    seconds, n_tokens: of `draw` since `reset`.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        n_rows: int,
        max_new_tokens: int,
        temperature: float,
        dtype: torch.dtype,
        compile: bool,
        stop: Callable[[], bool] | None = None,
        tools: Tools | None = None,
    ) -> None:
        self.tools = tools
        self.model, self.tokenizer, self.stop = model, tokenizer, stop
        self.n_rows, self.dtype = n_rows, dtype
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        # An engine with recorded steps is kept, because recording takes long. Without one each draw
        # makes a new engine, which reads the weights as they are then.
        self.engine = None
        if compile:
            with autocast(model.embed_tokens.weight.device, dtype):
                engine = Engine(model, tokenizer, n_rows, compile=True)
            self.engine = engine if engine.compile else None
        self.reset()

    def reset(self) -> None:
        """Count time and tokens from here on."""
        self.seconds, self.n_tokens = 0.0, 0

    def draw(self, prompts: Sequence[Prompt], seeds: Sequence[int], n: int) -> list[Rollout]:
        """Return n answers to each prompt, those to the first prompt first.

        seeds: of `seed_of`, one per prompt."""
        if not prompts:
            return []
        began = time.perf_counter()
        params = [self._params(self.max_new_tokens, seed, n) for seed in seeds]
        results = self._generate([prompt.ids for prompt in prompts], params)
        if not results:
            return []
        drawn = []  # n answers to the first prompt, n to the second, ...
        for prompt, result in zip(prompts, results, strict=True):
            for found in result.completions:
                finished = found.finish_reason == "stop"
                answer = Rollout(prompt, found.ids, found.text, finished, found.cumulative_logprob)
                drawn.append(answer)
        if self.tools and not self._use_tools(drawn, seeds, n):
            return []
        self.seconds += time.perf_counter() - began
        self.n_tokens += sum(int(answer.sampled.sum()) for answer in drawn)
        return drawn

    def _use_tools(self, drawn: list[Rollout], seeds: Sequence[int], n: int) -> bool:
        """Run the tools that answers call, and let these answers go on, until none calls. An answer
        that calls in its last turn is unfinished. Return False if a signal to stop comes."""
        for turn in range(1, MAX_TURNS + 1):
            called = []
            for one in drawn:
                if self.stop and self.stop():  # tools may take long
                    return False
                called.append(self._call(one, turn == MAX_TURNS))
            # an answer that ends with a tool's result goes on
            waiting = [k for k, one in enumerate(called) if one.last_turn == len(one.ids)]
            drawn[:] = called
            if not waiting:
                break
            params = []
            for k in waiting:  # the number of an answer does not depend on the ranks
                room = self.max_new_tokens - len(drawn[k].ids)
                params.append(self._params(room, seed_of(seeds[k // n], turn, 0, k % n), n=1))
            prompts = [drawn[k].prompt.ids + drawn[k].ids for k in waiting]
            results = self._generate(prompts, params)
            if not results:
                return False
            for k, result in zip(waiting, results, strict=True):
                (found,), so_far = result.completions, drawn[k]
                drawn[k] = so_far._replace(
                    ids=so_far.ids + found.ids,
                    text=found.text,
                    finished=found.finish_reason == "stop",
                    logprob=so_far.logprob + found.cumulative_logprob,
                )
        return True

    def _call(self, answer: Rollout, last: bool) -> Rollout:
        """Return the answer with the results of the tools that its last turn calls, if it does.
        last: no turn may follow."""
        if not answer.finished:
            return answer
        ids = answer.ids[answer.last_turn : -1]  # without the id that ended it
        if last:  # a call in the last turn gets no result
            _, calls = read_calls(self.tokenizer, ids)
            return answer._replace(finished=not calls)
        room = self.max_new_tokens - len(answer.ids)
        turn = self.tools.answer(self.tokenizer, answer.messages, ids, room)
        if not turn:  # it calls nothing
            return answer
        answer = answer._replace(
            finished=False,
            n_calls=answer.n_calls + turn.n_calls,
            n_failed=answer.n_failed + turn.n_failed,
        )
        # The template cannot write the results, or they leave no room for another turn: unfinished.
        if not turn.ids:
            return answer
        ids = answer.ids + turn.ids
        return answer._replace(
            ids=ids,
            turns=(*answer.turns, *turn.messages),
            given=(*answer.given, (len(answer.ids), len(ids))),
        )

    def _params(self, max_new_tokens: int, seed: int, n: int) -> SamplingParams:
        # No id is left out, or the distribution would be another than the one that is trained.
        ends = self.tokenizer.stop_ids
        return SamplingParams(max_new_tokens, 0, self.temperature, eos_ids=ends, n=n, seed=seed)

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list:
        """Return the engine's result for each prompt (token ids)."""
        with autocast(self.model.embed_tokens.weight.device, self.dtype):
            if self.engine:
                self.engine.update(self.model)
            engine = self.engine or Engine(self.model, self.tokenizer, self.n_rows)
            requests = [engine.request(i, ids, params[i]) for i, ids in enumerate(prompts)]
            # Run to the end; requests hold the results.
            deque(engine.run(requests, self.stop), maxlen=0)
        if self.stop and self.stop():
            return []
        return [request.result() for request in requests]


# ---- rewards of all ranks ------------------------------------------------------------------------


def gather(table: Tensor, drawn: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Return of the answers of all ranks the rewards (1 + parts, R) and the lengths (R,) in sampled
    tokens. All ranks call it. table: of Rewards, for this rank's answers `drawn`."""
    # as objects: ranks may have different numbers of answers
    lengths = torch.tensor([int(answer.sampled.sum()) for answer in drawn])
    tables, lengths = zip(*ranks.gather_objects((table, lengths)), strict=True)
    return torch.cat(tables, dim=1), torch.cat(lengths)


def replace_groups(
    drawn: list[Rollout], table: Tensor, groups: list[int], new: list[Rollout], new_table: Tensor
) -> None:
    """Put the answers `new`, with their rewards, in the place of these groups, in place."""
    size = len(new) // len(groups)
    for k, group in enumerate(groups):
        to, source = slice(group * size, (group + 1) * size), slice(k * size, (k + 1) * size)
        drawn[to], table[:, to] = new[source], new_table[:, source]


def learned_rewards(rewards: Tensor, config: Mapping) -> tuple[Tensor, Tensor]:
    """Return (rewards (R,) float32, which answers are trained on, (R,) bool).

    rewards (R,): nan for unfinished answers."""
    # unfinished='penalty' gives them unfinished_reward, 'mask' leaves them out.
    unfinished, penalty = rewards.isnan(), config["unfinished"] == "penalty"
    filled = rewards.masked_fill(unfinished, config["unfinished_reward"] if penalty else 0.0)
    return filled.float(), ~unfinished | penalty


def describe_answers(
    table: Tensor, lengths: Tensor, names: Sequence[str], config: Mapping
) -> dict[str, float]:
    """Return figures of answers for the log, by their rewards (1 + parts, R) and lengths (R,).

    Mean and standard deviation of the rewards (with unfinished='mask' of finished answers only),
    the share of finished answers, the mean length, the mean of each part over finished answers."""
    finished = ~table[0].isnan()
    rewards, learned = learned_rewards(table[0], config)
    rewards = rewards[learned].double()
    figures = {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std().item() if len(rewards) > 1 else 0.0,
        "finished": finished.double().mean().item(),
        "length": lengths.double().mean().item(),
    }
    if len(names) > 1:
        for name, values in zip(names, table[1:], strict=True):
            figures[f"reward/{name}"] = values[finished].mean().item()
    return figures


# ---- batches -------------------------------------------------------------------------------------


class RolloutBatch(NamedTuple):
    """B prompts with their answers, padded on the right to T, and the n tokens to train on."""

    x: Tensor  # (B, T) int64, all but the last token of each
    index: Tensor  # (n,) int64: positions in the flat x, ascending
    targets: Tensor  # (n,) int64: the tokens that follow them
    row: Tensor  # (n,) int64: their answers, of B
    token: Tensor  # (n,) int64: their numbers among all tokens of the Rollouts

    def to(self, device: torch.device) -> "RolloutBatch":
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


class Rollouts:
    """The answers of one step on this rank. Their n tokens are numbered, answer by answer.

    row (n,) int64: the answer of each token. sampled (n,) bool: the tokens that the policy chose,
    not those of tools. learned (n,) bool: which tokens are trained on, the sampled ones of the
    answers in `which`. The other answers are in batches too, without tokens.
    """

    def __init__(
        self, drawn: Sequence[Rollout], which: Sequence[bool], block_size: int, pad_id: int
    ) -> None:
        self.drawn, self.which = list(drawn), list(which)
        self.block_size, self.pad_id = block_size, max(pad_id, 0)
        sizes = np.array([len(answer.ids) for answer in drawn], np.int64)
        self.offsets = np.cumsum(sizes) - sizes
        prompts = np.array([len(answer.prompt.ids) for answer in drawn], np.int64)
        self.lengths = prompts + sizes - 1  # without the last token, which is only a target
        self.row = torch.from_numpy(np.repeat(np.arange(len(drawn)), sizes))
        sampled = [answer.sampled for answer in drawn]
        self.sampled = torch.from_numpy(np.concatenate(sampled)) if drawn else torch.zeros(0).bool()
        self.learned = torch.tensor(self.which, dtype=torch.bool)[self.row] & self.sampled

    def batch(self, chosen: np.ndarray) -> RolloutBatch:
        """Return the answers with these numbers (B,); T is rounded up, so there are few shapes."""
        T = int(padded_length(self.lengths[chosen].max(), self.block_size))
        # x are the ids that are read, y those that follow, token their numbers: (B, T)
        x = np.full((len(chosen), T), self.pad_id, np.int64)
        y, token = np.zeros_like(x), np.zeros_like(x)
        learned = np.zeros(x.shape, bool)
        for b, i in enumerate(chosen.tolist()):
            answer, end = self.drawn[i], int(self.lengths[i])
            begin = end - len(answer.ids)  # the position that its first token was sampled from
            ids = answer.prompt.ids + answer.ids
            x[b, :end], y[b, :end] = ids[:-1], ids[1:]
            learned[b, begin:end] = answer.sampled & self.which[i]
            token[b, begin:end] = self.offsets[i] + np.arange(len(answer.ids))
        index = np.flatnonzero(learned)
        return RolloutBatch(
            x=torch.from_numpy(x),
            index=torch.from_numpy(index),
            targets=torch.from_numpy(y.reshape(-1)[index]),
            row=torch.from_numpy(index // T),
            token=torch.from_numpy(token.reshape(-1)[index]),
        )

    def batches(self, batch_size: int, chosen: np.ndarray | None = None) -> Iterator[RolloutBatch]:
        """Yield batches of at most batch_size answers of like length.

        chosen: numbers of answers; None = all."""
        chosen = np.arange(len(self.drawn)) if chosen is None else chosen
        by_length = chosen[np.argsort(self.lengths[chosen], kind="stable")]
        for first in range(0, len(by_length), batch_size):
            yield self.batch(by_length[first : first + batch_size])


def minibatch_of(n: int, n_minibatches: int, seed: int, step: int, epoch: int) -> np.ndarray:
    """Return the minibatch of each of the n answers of all ranks, (n,) int64.

    n is a multiple of n_minibatches."""
    # Each minibatch gets one, at random, of every n_minibatches consecutive answers. So a rank with
    # a multiple of that has equally many in each minibatch.
    assert n % n_minibatches == 0, f"{n=} {n_minibatches=}"
    words = "minibatches", seed, step, epoch
    lots = [hash_words(n_minibatches, *words, block) for block in range(n // n_minibatches)]
    return np.concatenate([np.argsort(lot) for lot in lots])


# ---- log-probabilities ---------------------------------------------------------------------------


def answer_logps(
    model: Transformer,
    batch: RolloutBatch,
    temperature: float,
    dtype: torch.dtype,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (n,) float32 of a batch's tokens, with gradient, and the
    entropies (n,) of their distributions, without; empty unless with_entropy."""
    n = len(batch.index)
    extra = -n % max(1, batch.x.numel() // 16)  # tensors of ever new sizes fragment the memory
    index, targets = F.pad(batch.index, (0, extra)), F.pad(batch.targets, (0, extra), value=IGNORE)
    head = model.lm_head.weight
    with autocast(batch.x.device, dtype):
        hidden = model(batch.x, index=index)  # (n + extra, C)
        # The temperature divides the logits in float32. Hidden states in bfloat16 would be rounded.
        logps = token_logps(hidden, head, targets, temperature)[:n]
        if not with_entropy:
            return logps, logps.new_zeros(0)
        return logps, token_entropies(hidden[:n], head, temperature)


@torch.no_grad()
def measure_logps(
    model: Transformer, answers: Rollouts, batch_size: int, temperature: float, dtype: torch.dtype
) -> Tensor:
    """Return the log-probability of each token of the answers, (n,) float32 on the model's device.

    It is 0 for tokens that are not trained on."""
    device = model.embed_tokens.weight.device
    found = torch.zeros(len(answers.row), device=device)
    for batch in answers.batches(batch_size):
        batch = batch.to(device)
        found[batch.token], _ = answer_logps(model, batch, temperature, dtype)
    return found


def measure_divergence(
    model: Transformer,
    reference: Transformer,
    answers: Rollouts,
    batch_size: int,
    temperature: float,
    dtype: torch.dtype,
) -> float:
    """Return the mean of log p(model) - log p(reference) over the tokens of all ranks' answers: an
    estimate of KL(model || reference) per token. All ranks call it."""
    gaps = measure_logps(model, answers, batch_size, temperature, dtype)
    gaps = gaps - measure_logps(reference, answers, batch_size, temperature, dtype)
    sums = torch.tensor([gaps.sum(), answers.learned.sum()], dtype=torch.float64)
    total, n = ranks.all_reduce_sum(sums)
    return (total / n.clamp(min=1)).item()


# ---- figures for the log -------------------------------------------------------------------------


def describe_drawing(sampler: AnswerSampler, n_redrawn: int) -> dict[str, float]:
    """Return what drawing the answers of a step took, over all ranks. All ranks call it.

    n_redrawn: groups that replaced others."""
    of_ranks = ranks.gather_objects((sampler.seconds, sampler.n_tokens, n_redrawn))
    seconds, n_tokens, redrawn = zip(*of_ranks, strict=True)
    # The other ranks wait for the slowest.
    return {"draw_s": max(seconds), "drawn": sum(n_tokens), "redrawn": sum(redrawn)}


def describe_calls(drawn: Sequence[Rollout]) -> dict[str, float]:
    """Return means over all ranks' answers: turns, calls, failed calls, and the share of answers
    that call nothing. All ranks call it."""
    n_turns = sum(1 + len(answer.given) for answer in drawn)
    n_calls, n_failed = (sum(getattr(one, key) for one in drawn) for key in ("n_calls", "n_failed"))
    n_without = sum(not answer.n_calls for answer in drawn)
    sums = torch.tensor([n_turns, n_calls, n_failed, n_without, len(drawn)], dtype=torch.float64)
    *totals, n = ranks.all_reduce_sum(sums).tolist()
    names = ("turns", "calls", "failed_calls", "without_call")
    return {name: total / n for name, total in zip(names, totals, strict=True)}


# What is added up over the micro-steps of a step
TOTALS = ("tokens", "loss", "value_loss", "entropy", "kl", "clipped", "positions")


def describe_updates(
    totals: Mapping[str, Tensor | float],
    ratio_max: Tensor,
    n_updates: int,
    n_epochs: int,
    n_answers: int,
) -> dict[str, float]:
    """Return the means over a step of the TOTALS of all ranks. All ranks call it.

    n_answers: those that are trained on, over all ranks."""
    mine = torch.tensor([float(totals[key]) for key in TOTALS], dtype=torch.float64)
    total = dict(zip(TOTALS, ranks.all_reduce_sum(mine).tolist(), strict=True))
    n_tokens = max(1.0, total["tokens"])  # each counts n_epochs times, but its entropy once
    # Losses per update, the rest per token, the KL divergence also per answer
    return {
        "loss": total["loss"] / n_updates,
        "value_loss": total["value_loss"] / n_updates,
        "kl": total["kl"] / n_tokens,
        "kl_answer": total["kl"] / n_epochs / max(1, n_answers),
        "clipped": total["clipped"] / n_tokens,
        "entropy": total["entropy"] * n_epochs / n_tokens,
        "ratio_max": max(ranks.gather_objects(ratio_max.item())),
        "positions": total["positions"],  # tokens of the batches, with prompts and padding
    }


def mean_figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of the figures of these steps; of ratio_max the largest."""
    means = {}
    for key in steps[-1]:
        # a step without a finished answer has no mean reward
        finite = [step[key] for step in steps if math.isfinite(step[key])]
        means[key] = sum(finite) / len(finite) if finite else math.nan
    means["ratio_max"] = max(step["ratio_max"] for step in steps)
    draw_s = means.pop("draw_s")
    # total tokens over total seconds, not the mean of rates
    means["draw_tokens_per_s"] = means.pop("drawn") / draw_s
    means["draw_ms"] = 1000 * draw_s  # per step
    return means


def warn_of_cut_answers(steps: Sequence[Mapping[str, float]], max_new_tokens: int) -> str:
    """Return a line if in some of these steps no answer was finished, else ""."""
    n_cut = sum(step["finished"] == 0 for step in steps)
    if not n_cut:
        return ""
    text = f"in {n_cut} of these {len(steps)} steps every answer was cut off at {max_new_tokens=}"
    fix = "raise it, or teach the model to end answers (sft.py)"
    return f"train: {text}, so no reward was learned; {fix}"


def show(drawn: Sequence[Rollout], rewards: Sequence[float]) -> list[str]:
    """Return a line for each answer: its reward, the question and the answer, shortened."""
    lines = []
    for answer, reward in zip(drawn, rewards, strict=False):  # drawn: the first ones
        question, text = one_line(answer.prompt.messages[-1]["content"]), one_line(answer.text)
        figure = f"{reward:8.3f}" if answer.finished else "     cut"
        lines.append(f"{figure}  {question:.60} -> {text:.100}")
    return lines


# ---- the plan ------------------------------------------------------------------------------------


def describe_plan(
    model: Transformer,
    config: dict,
    rewards: Rewards,
    n_rows: int,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    peak: float,
    teacher: Path | None = None,
) -> str:
    """Return the plan of a run of rl.py as text. Its time is that of the updates, without drawing.

    n_rows: answers that a rank draws at once. peak: FLOP/s of a rank. teacher: its directory."""
    total = parameter_table(model)["total"]
    trained = parameter_table(model, trained=True)["total"]
    cache = cache_bytes(model.cfg, n_rows, row_length(model.cfg, config["block_size"]), dtype)
    # Bytes beside the policy's weights, gradients and optimizer state
    others = {
        "reward models": (2.0 if dtype == torch.bfloat16 else 4.0) * rewards.n_parameters,
        "cache": float(cache),
        "copy to draw with": float(dtype.itemsize * total),
    }
    if teacher:
        others["teacher"] = plan.teacher_bytes(teacher, dtype)
    elif config["kl_coef"] and config["trainable"] != "lora":
        others["reference"] = 4.0 * total
    if config["algorithm"] == "ppo":  # weights; gradients and two moments; on a CPU a copy to save
        others["critic"] = 4.0 * total + (24.0 if device.type == "cpu" else 12.0) * trained

    n_answers = config["prompts_per_step"] * config["group_size"]
    n_steps, n_epochs = config["max_steps"], config["epochs_per_step"]
    n_updates = n_epochs * config["minibatches"]
    batch = f"{counted(n_answers, 'answer')} and {counted(n_updates, 'update')} per step, "
    batch += counted(n_steps, "step")
    n_tokens = n_answers * config["block_size"] * n_steps * n_epochs
    return plan.describe(
        model, config, batch, n_tokens, world_size, device, dtype, peak, others,
        note="of the updates below ", bound="at most ",
    )  # fmt: skip
