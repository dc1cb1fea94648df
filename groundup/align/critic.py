"""The critic of PPO: before each token of an answer it predicts the reward that is still to come.

It is a reward model (reward_model.py), read at the position from which a token is sampled. rl.py
builds it beside the policy, with its own DDP, optimizer and scaler. It trains the parts that the
policy trains, and its score.
"""

import math

import torch
from torch import Tensor

from ddp import DDP
from groundup.align import policy_gradient as pg
from groundup.align.reward_model import RewardModel
from groundup.align.rollouts import RolloutBatch, Rollouts
from groundup.train import ranks
from groundup.train.device import autocast
from groundup.train.optim import Optimizer


def predict(critic: RewardModel, batch: RolloutBatch, dtype: torch.dtype) -> Tensor:
    """Return the value before each token to train on, (n,) float32 with gradient."""
    with autocast(batch.x.device, dtype):
        return critic(batch.x, index=batch.index)


@torch.no_grad()
def measure_values(
    critic: RewardModel, answers: Rollouts, batch_size: int, dtype: torch.dtype
) -> Tensor:
    """Return the value before each token of the answers, (n,) float32 on the critic's device.

    It is 0 for tokens that are not trained on."""
    device = critic.score.weight.device
    found = torch.zeros(len(answers.row), device=device)
    for batch in answers.batches(batch_size):
        batch = batch.to(device)
        found[batch.token] = predict(critic, batch, dtype)
    return found


def estimate_advantages(
    token_rewards: Tensor, values: Tensor, answers: Rollouts, gamma: float, lam: float
) -> tuple[Tensor, Tensor, float]:
    """Return (advantages (n,), returns (n,), explained variance). All ranks call it.

    token_rewards, values (n,): of the answers' tokens. Advantages are whitened over the trained
    tokens of all ranks. The results are on the device of `values`."""
    device, values = values.device, values.cpu()  # a loop over tokens is faster on the CPU
    # What a tool said is no action: the value before it is that before the next sampled token.
    chosen = answers.sampled
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[chosen], returns[chosen] = pg.gae(
        token_rewards.cpu()[chosen], values[chosen], answers.row[chosen], gamma, lam
    )
    # One all-reduce for the mean and variance of advantages, returns and errors over all ranks
    columns = (advantages, returns, returns - values)
    sums = torch.stack([pg.power_sums(column[answers.learned]) for column in columns])
    of_advantages, of_returns, of_errors = ranks.all_reduce_sum(sums)
    mean, variance = pg.moments(of_advantages)
    advantages = pg.whiten(advantages, mean, variance)

    # 1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 as good as a constant
    _, returns_variance = pg.moments(of_returns)
    _, errors_variance = pg.moments(of_errors)
    explained = math.nan  # where all returns are equal, there is nothing to predict
    if returns_variance > pg.VARIANCE_FLOOR:
        explained = 1 - errors_variance / returns_variance
    return advantages.to(device), returns.to(device), explained


# ---- checkpoints: kept in train_state.pt, beside the policy's state ------------------------------


def state_of(critic: RewardModel, ddp: DDP, opt: Optimizer, scaler: torch.amp.GradScaler) -> dict:
    """Return what a resume needs. All ranks call it."""
    ddp.flush()  # apply the updates that wait for the next forward
    trained = {name: p.detach() for name, p in critic.named_parameters() if p.requires_grad}
    return {
        "weights": trained,
        "optimizer": opt.state_dict(keep=ranks.rank() == 0),
        "scaler": scaler.state_dict(),
        "n_updates": ddp.n_updates,
        "skipped": ddp.skipped.tolist(),
    }


@torch.no_grad()
def restore(
    saved: dict, critic: RewardModel, ddp: DDP, opt: Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Restore what `state_of` returned. All ranks call it."""
    # The frozen weights are not in it: they were loaded as in a new run.
    if ranks.rank() == 0:
        params = dict(critic.named_parameters())
        for name, weight in saved["weights"].items():
            params[name].copy_(weight)
    ranks.broadcast_weights(critic)
    opt.load_state_dict(saved["optimizer"])
    if saved["scaler"]:  # empty unless that run was in float16
        scaler.load_state_dict(saved["scaler"])
    ddp.n_updates = saved["n_updates"]
    ddp.skipped.copy_(torch.tensor(saved["skipped"]))
