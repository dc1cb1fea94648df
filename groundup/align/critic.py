"""The critic of PPO: a second model that predicts, before each token of an answer, the reward still to come.

It is a reward model (see reward_model.py), read at the position from which a token is sampled. It has its own weights,
gradients and optimizer, and trains the parts that the policy trains, and its head.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from groundup.align import policy_gradient as pg
from groundup.align import reward_model
from groundup.align.reward_model import RewardModel
from groundup.align.rollouts import RolloutBatch, Rollouts
from groundup.errors import UserError
from groundup.train import checkpoint, ranks, run
from groundup.train.base import adapters_of, count_known_ids, new_model, tuned_architecture
from groundup.train.device import autocast
from groundup.train.lora import set_trainable
from tokenizer import Tokenizer


def make_critic(
    config: dict, source: Path | None, tokenizer: Tokenizer, saved: dict, world: ranks.World, device: torch.device,
    dtype: torch.dtype,
) -> run.Parts:  # fmt: skip
    """Return the critic with its optimizer; with `saved`, of `critic_state`, exactly as it was then. Unless it starts
    from a reward model its head, and so every value, is 0. Raise UserError if the first weights have changed."""
    cfg = tuned_architecture(config, source, tokenizer.vocab_size)
    model = new_model(RewardModel, cfg, config, dtype)
    if source:
        n_known = count_known_ids(source, tokenizer, "the chat tokenizer")
        reward_model.load_start(model, source, n_known, tokenizer)
    if config["normalise_rewards"]:  # returns have another scale than the scores of its head
        torch.nn.init.zeros_(model.score.weight)
    set_trainable(model, config["trainable"], adapters_of(config))
    model.score.requires_grad_(True)
    if saved:
        load(model, saved, source)
    plain = {"compress": "none"} if config["compress"] == "powersgd" else {}
    parts = run.set_up(config | {"overlap_step": "off"} | plain, model, world, device, dtype, saves=False)
    if saved:
        run.load_state(parts, saved)
    return parts


def values_of(model: RewardModel, batch: RolloutBatch, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the value before each learned token, (n,) float32 with gradient."""
    with autocast(device, dtype):
        return model(batch.x, index=batch.index)


def estimate_advantages(
    rewards: Tensor, kls: Tensor, values: Tensor, answers: Rollouts, kl_coef: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor, float]:
    """Return (advantages (n,), whitened over the learned tokens of all ranks; returns (n,); explained variance of the
    returns by the values, nan if they are all equal). All ranks call it. rewards (R,) of answers; kls, values (n,) of
    their tokens."""
    of_tokens = pg.token_rewards(rewards, kls, answers.row, kl_coef)
    advantages, returns = pg.gae(of_tokens, values, answers.row, gamma, lam)
    columns = torch.stack((advantages, returns, returns - values))[:, answers.learned]
    sums = ranks.all_reduce_sum(torch.stack([pg.power_sums(column) for column in columns]))
    (mean, var), (_, var_returns), (_, var_errors) = map(pg.moments, sums)
    explained = 1 - var_errors / var_returns if var_returns > pg.VARIANCE_FLOOR else math.nan
    return pg.whiten(advantages, mean, var), returns, explained


def critic_state(parts: run.Parts, step: int, zero1: bool, source: Path | None) -> dict:
    """Return what a resume needs: trained weights, optimizer, and a key of the frozen weights. All ranks call it."""
    parts.ddp.flush()  # updates and gathers that wait for the next forward
    opt_state = parts.opt.state_dict(parts.ddp.gather if zero1 else None, keep=parts.world.is_main)
    weights = {name: p.detach() for name, p in parts.model.named_parameters() if p.requires_grad}
    base_key = checkpoint.weights_key(source) if source else ""
    state = {"step": step, "weights": weights, "base_key": base_key}
    return state | {"optimizer": opt_state, "scaler": parts.scaler.state_dict()}


@torch.no_grad()
def load(model: RewardModel, saved: dict, source: Path | None) -> None:
    """Restore the trained weights. Raise UserError if the frozen ones, in `source`, have changed."""
    params = dict(model.named_parameters())
    frozen = any(not p.requires_grad for p in params.values())
    if frozen and saved["base_key"] != checkpoint.weights_key(source):
        raise UserError(f"critic: the weights in {source} are not those that the critic began with")
    for name, weight in saved["weights"].items():
        params[name].copy_(weight)
