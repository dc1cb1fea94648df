"""The formulas of GRPO and PPO: advantages, policy, value and KL losses of sampled tokens.

Tensors of tokens are flat, the tokens of R answers end to end: logps (n,) of the policy in
training, old (n,) of the policy that sampled, ref (n,) of the reference, all float32; row (n,)
int64, ascending, is the number of the token's answer, so a value per answer, x (R,), is x[row] per
token. The token that ends an answer is an action like the others."""

import torch
from torch import Tensor

SCALES = ("none", "group")  # of group_advantages
NORMALISERS = ("dapo", "grpo", "dr_grpo")  # of normalise

# Keeps divisions finite where a standard deviation is nearly 0; trl's values.
STD_FLOOR = 1e-4
VARIANCE_FLOOR = 1e-8


def flat_groups(rewards: Tensor, group_size: int, counts: Tensor | None = None) -> Tensor:
    """Return (R / group_size,) bool: groups whose answers all have the same reward.

    They teach nothing. So does a group with fewer than two answers that count. Arguments: see
    group_advantages."""
    groups = rewards.view(-1, group_size)
    # Largest and smallest reward of each group: equal, or -inf below inf if none counts
    kept = torch.ones_like(groups, dtype=torch.bool) if counts is None else counts.view_as(groups)
    most = groups.masked_fill(~kept, -torch.inf).amax(1)
    return most <= groups.masked_fill(~kept, torch.inf).amin(1)


def group_advantages(
    rewards: Tensor, group_size: int, scale: str = "none", counts: Tensor | None = None
) -> Tensor:
    """Return how much better each answer is than its group's mean, (R,); 0 in flat_groups.

    rewards (R,) float32: the answers to one prompt are group_size rewards in a row, at least two.
    scale: what it is divided by, nothing or the group's standard deviation. counts (R,) bool:
    answers that have a reward; the others are in no mean and get 0."""
    assert scale in SCALES and group_size > 1, f"{scale=} {group_size=}"
    groups = rewards.view(-1, group_size)
    kept = torch.ones_like(groups, dtype=torch.bool) if counts is None else counts.view_as(groups)
    n = kept.sum(1, keepdim=True)
    mean = groups.masked_fill(~kept, 0.0).sum(1, keepdim=True) / n.clamp(min=1)
    # the mean of equal numbers may be a rounding error off, and that would be divided by STD_FLOOR
    idle = ~kept | flat_groups(rewards, group_size, counts)[:, None]
    advantages = (groups - mean).masked_fill(idle, 0.0)
    # GRPO divides (arXiv:2402.03300, section 4.1.2), which weighs easy and hard prompts more than
    # those in the middle; Dr. GRPO does not (arXiv:2503.20783, section 3.1).
    if scale == "group":
        std = (advantages.square().sum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std + STD_FLOOR)
    return advantages.reshape(-1)


def policy_losses(
    logps: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (losses, ratios of new to old probability, where clipping stops the gradient), (n,).

    advantages (n,). Ratios from 1 - clip_low to 1 + clip_high are not clipped. Only the loss has a
    gradient."""
    # The negative of PPO's objective (arXiv:1707.06347, equation 7):
    # min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    ratio = torch.exp(logps - old)
    free, bounded = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bounded), ratio.detach(), (bounded < free).detach()


def normalise(
    losses: Tensor, row: Tensor, how: str, n_answers_all: int, n_tokens_all: int, max_tokens: int
) -> Tensor:
    """Return this micro-batch's part of a step's loss, which is the sum over all of them.

    losses, row (n,). n_answers_all, n_tokens_all: of the step, over all ranks. max_tokens: the most
    that an answer can have."""
    # the mean over all tokens (arXiv:2503.14476, section 3.3)
    if how == "dapo":
        return losses.sum() / max(1, n_tokens_all)
    # the mean over answers of their means (arXiv:2402.03300, equation 3)
    if how == "grpo":
        return (losses / row.bincount()[row]).sum() / max(1, n_answers_all)
    # each answer's sum over a constant, so that no length is preferred (arXiv:2503.20783)
    assert how == "dr_grpo", how
    return losses.sum() / (max(1, n_answers_all) * max_tokens)


def kl_penalty(logps: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """Return penalties (n,) for the loss, whose mean gradient is that of KL(policy || ref).

    The mean is over tokens that `old` sampled, the divergence that of the next token."""
    # k3 = ref/p - 1 - log(ref/p) (http://joschu.net/blog/kl-approx.html) times the ratio of new to
    # old probability, with the ratio's gradient. Without the ratio, as GRPO was published
    # (arXiv:2402.03300, equation 4), the first gradient is that of KL(ref || policy).
    return torch.exp(logps - old) * (torch.expm1(ref - logps) - (ref - logps))


def last_tokens(row: Tensor) -> Tensor:
    """Return (n,) bool: the last token of each answer."""
    return torch.cat((row[1:] != row[:-1], row.new_ones(min(1, len(row)), dtype=torch.bool)))


def token_rewards(scores: Tensor, kl: Tensor, row: Tensor, kl_coef: float) -> Tensor:
    """Return (n,): -kl_coef times a token's KL estimate, old - ref, and at the last the score.

    scores (R,), kl, row (n,). arXiv:2203.02155, equation 2."""
    return scores[row].masked_fill(~last_tokens(row), 0.0) - kl_coef * kl


def gae(
    rewards: Tensor, values: Tensor, row: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), (n,): generalised advantage estimation.

    rewards (n,): of the tokens as actions; values (n,): of the critic, before each."""
    if not len(row):
        return values.clone(), values.clone()
    # arXiv:1506.02438, equation 16: A_t = delta_t + gamma lam A_t+1, with
    # delta_t = reward_t + gamma value_t+1 - value_t. After the last token of an answer the value is
    # 0, whether the answer is finished or cut.
    following = torch.cat((values[1:], values.new_zeros(1))).masked_fill(last_tokens(row), 0.0)
    deltas = rewards + gamma * following - values
    # A column for each answer: the loop runs over the tokens of the longest answer.
    lengths = row.bincount()
    position = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]
    table = deltas.new_zeros(int(lengths.max()), len(lengths))
    table[position, row] = deltas
    for t in range(len(table) - 2, -1, -1):
        table[t] += gamma * lam * table[t + 1]
    advantages = table[position, row]
    return advantages, advantages + values


def power_sums(values: Tensor) -> Tensor:
    """Return (3,) float64 on the CPU: number, sum and sum of squares. Ranks can add them up."""
    # in float32 the difference of two large sums of squares would be noise
    values = values.detach().cpu().double()
    n = values.new_tensor(float(values.numel()))
    return torch.stack((n, values.sum(), values.square().sum()))


def moments(sums: Tensor) -> tuple[float, float]:
    """Return (mean, unbiased variance) from power_sums; fewer than two values have variance 0."""
    n, total, squares = sums.tolist()
    mean = total / max(1.0, n)
    return mean, max(0.0, squares - n * mean**2) / max(1.0, n - 1)


def whiten(values: Tensor, mean: float, var: float) -> Tensor:
    """Return (values - mean) / standard deviation, (n,); mean and var: over all ranks."""
    return (values - mean) * (var + VARIANCE_FLOOR) ** -0.5


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return (n,): half the squared error of the critic; clip=0: no clipping.

    The error of the value clipped to old_values +- clip counts if it is larger, as in the code of
    arXiv:2005.12729, section 3."""
    error = (values - returns).square()
    if clip:  # a critic, too, moves only so far in one step
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error
