"""The critic of PPO: a second model that says before each token of an answer what reward is still to come.

It is a reward model (reward_model.py: the body reads the text, one head of C numbers reads the last layer's result,
normed once) and is read where the token was drawn from, not behind it. Its weights, gradients and optimizer are its
own; it trains the parts that the policy trains, and its head.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from groundup.align import policy_gradient as pg
from groundup.align import reward_model
from groundup.align.reward_model import RewardModel, find_model
from groundup.align.rollouts import RolloutBatch, Rollouts
from groundup.errors import UserError
from groundup.train import checkpoint, ranks, run
from groundup.train.base import adapters_of, count_known_ids, tuned_architecture
from groundup.train.device import autocast
from groundup.train.lora import set_trainable
from tokenizer import Tokenizer


def find_critic(config: dict, source: Path | None, tokenizer: Tokenizer) -> Path | None:
    """Where the critic begins: the reward model critic_from, or what the policy begins with. Raises RewardError."""
    return find_model(config["critic_from"], tokenizer, "critic_from") if config["critic_from"] else source


def make_critic(
    config: dict, source: Path | None, tokenizer: Tokenizer, saved: dict, world: ranks.World, device: torch.device,
    dtype: torch.dtype,
) -> run.Parts:  # fmt: skip
    """The critic and what trains it; with `saved`, of `critic_state`, exactly as it was then. Without a reward model to
    begin with its head is 0, and so is every value. Raises RewardError if the weights it began with have changed."""
    cfg = tuned_architecture(config, source, tokenizer.vocab_size)
    model = RewardModel(cfg)
    if source:
        reward_model.load_start(model, source, count_known_ids(source, tokenizer, "the chat tokenizer"))
    if config["normalise_rewards"]:  # returns are on another scale than the scores that its head has learnt
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
    """What is still to come before each learnt token is drawn, (n,) float32 with gradient."""
    with autocast(device, dtype):
        return model(batch.x, index=batch.index)


def estimate_advantages(
    rewards: Tensor, kls: Tensor, values: Tensor, answers: Rollouts, kl_coef: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor, float]:
    """(advantages (n,), whitened over the learnt tokens of all ranks; returns (n,); share of the variance of these
    returns that the values foresaw, nan if all are the same). By all ranks. rewards (R,) of the answers, kls and values
    (n,) of their tokens."""
    of_tokens = pg.token_rewards(rewards, kls, answers.row, kl_coef)
    advantages, returns = pg.gae(of_tokens, values, answers.row, gamma, lam)
    columns = torch.stack((advantages, returns, returns - values))[:, answers.learnt]
    sums = ranks.all_reduce_sum(torch.stack([pg.power_sums(column) for column in columns]))
    (mean, var), (_, var_returns), (_, var_errors) = map(pg.moments, sums)
    explained = 1 - var_errors / var_returns if var_returns > pg.VARIANCE_FLOOR else math.nan
    return pg.whiten(advantages, mean, var), returns, explained


def critic_state(parts: run.Parts, step: int, zero1: bool, source: Path | None) -> dict:
    """What a resume needs, by all ranks: what is trained, its optimizer, and which weights the rest is from."""
    parts.ddp.flush()  # updates and gathers that wait for the next forward
    opt_state = parts.opt.state_dict(parts.ddp.gather if zero1 else None, keep=parts.world.is_main)
    weights = {name: p.detach() for name, p in parts.model.named_parameters() if p.requires_grad}
    base_key = checkpoint.weights_key(source) if source else ""
    return {
        "step": step, "weights": weights, "base_key": base_key, "optimizer": opt_state,
        "scaler": parts.scaler.state_dict(),
    }  # fmt: skip


@torch.no_grad()
def load(model: RewardModel, saved: dict, source: Path | None) -> None:
    """The trained weights as they were. Raises RewardError if the others, of `source`, are not what they were."""
    params = dict(model.named_parameters())
    frozen = any(not p.requires_grad for p in params.values())
    if frozen and saved["base_key"] != checkpoint.weights_key(source):
        raise UserError(f"critic: the weights in {source} are not those that the critic began with")
    for name, weight in saved["weights"].items():
        params[name].copy_(weight)
