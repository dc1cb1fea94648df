"""The arithmetic of reinforcement learning: advantages, policy, value and KL losses of sampled tokens, in tensors.

A batch holds the tokens of R answers, one answer behind the other. Tensors of tokens are flat: logps (n,) of the policy
that is trained, old (n,) of the policy that sampled, ref (n,) of the reference, all float32; row (n,) int64, ascending,
is the number of the token's answer. What is known per answer, x (R,), is x[row] per token. An answer's last token, its
end token if it is finished, is an action like the others. An answer whose tokens are left out has no entry in row.
"""


import torch
from torch import Tensor

SCALES = ("none", "group")  # of group_advantages
KL_ESTIMATORS = ("k1", "k2", "k3")  # of kl_estimate: to log, and k1 in the reward
KL_PENALTIES = ("rho_k3", "k2", "k3")  # of kl_penalty: in the loss
NORMALISERS = ("dapo", "grpo", "bnpo", "dr_grpo")  # of normalise

# Keeps the division finite where a standard deviation is nearly 0; as trl has it.
STD_FLOOR = 1e-4
VARIANCE_FLOOR = 1e-8


# ---- advantages of answers: GRPO -------------------------------------------------------------------------------------


def flat_groups(rewards: Tensor, group_size: int, counts: Tensor | None = None) -> Tensor:
    """(R / group_size,) bool: groups whose answers all have the same reward, which teach nothing. Arguments: of
    group_advantages. A group with fewer than two answers that count is one of them."""
    groups = rewards.view(-1, group_size)
    kept = torch.ones_like(groups, dtype=torch.bool) if counts is None else counts.view_as(groups)
    most = groups.masked_fill(~kept, -torch.inf).amax(1)
    return most <= groups.masked_fill(~kept, torch.inf).amin(1)


def group_advantages(
    rewards: Tensor, group_size: int, scale: str = "none", counts: Tensor | None = None
) -> Tensor:
    """How much better each answer is than its group's mean, (R,) float32; exactly 0 in flat_groups.

    rewards (R,) float32: the answers to one prompt are group_size rewards in a row, at least two. scale: divided by
    nothing (arXiv:2503.20783) or the group's standard deviation (GRPO, arXiv:2402.03300, section 4.1.2). counts (R,)
    bool: answers that have a reward; the others are in no mean and get 0."""
    assert scale in SCALES and group_size > 1, f"{scale=} {group_size=}"
    groups = rewards.view(-1, group_size)
    kept = torch.ones_like(groups, dtype=torch.bool) if counts is None else counts.view_as(groups)
    n = kept.sum(1, keepdim=True)
    mean = groups.masked_fill(~kept, 0.0).sum(1, keepdim=True) / n.clamp(min=1)
    # the mean of equal numbers may be a rounding error off, and that would be divided by STD_FLOOR
    idle = ~kept | flat_groups(rewards, group_size, counts)[:, None]
    advantages = (groups - mean).masked_fill(idle, 0.0)
    if scale == "group":
        std = (advantages.square().sum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std + STD_FLOOR)
    return advantages.reshape(-1)


# ---- the policy's loss -----------------------------------------------------------------------------------------------


def policy_losses(
    logps: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss of each token, ratio of new to old probability, where the clipping stops the gradient), (n,) each.

    advantages (n,). PPO's clipped objective, arXiv:1707.06347, equation 7, to be made small; ratios from 1 - clip_low
    to 1 + clip_high are free. The gradient is in the loss alone."""
    ratio = torch.exp(logps - old)
    free, bounded = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bounded), ratio.detach(), (bounded < free).detach()


def normalise(
    losses: Tensor, row: Tensor, n_rows: int, how: str, n_answers_all: int, n_tokens_all: int, max_tokens: int
) -> Tensor:
    """Scalar: this micro-batch's part of the loss of an optimizer step, which is the sum over micro-batches and ranks.

    losses, row (n,); n_rows answers are in the micro-batch, those without a token too. n_answers_all, n_tokens_all: of
    the step, over all ranks. max_tokens: the most that an answer can have.
    dapo: mean over all tokens (arXiv:2503.14476). grpo: mean over answers of their means (arXiv:2402.03300). dr_grpo:
    an answer's sum counts 1 / max_tokens, so that no length is preferred (arXiv:2503.20783). bnpo: mean over the
    micro-batch's tokens, weighted by its share of the answers; the only one that depends on the split."""
    assert how in NORMALISERS, how
    if how == "dapo":
        return losses.sum() / max(1, n_tokens_all)
    if how == "grpo":
        return (losses / row.bincount()[row]).sum() / max(1, n_answers_all)
    if how == "dr_grpo":
        return losses.sum() / (max(1, n_answers_all) * max_tokens)
    return losses.sum() / max(1, len(losses)) * (n_rows / max(1, n_answers_all))


# ---- the distance to the reference -----------------------------------------------------------------------------------


def kl_estimate(logps: Tensor, ref: Tensor, kind: str = "k1") -> Tensor:
    """(n,): estimates of KL(policy || ref) from tokens that the policy of logps sampled.

    k1: log-ratio, unbiased, of any sign. k2: half its square, biased. k3: unbiased and never negative. See
    http://joschu.net/blog/kl-approx.html. These are values to log and to put into rewards; a loss needs kl_penalty."""
    assert kind in KL_ESTIMATORS, kind
    if kind == "k1":
        return logps - ref
    if kind == "k2":
        return 0.5 * (logps - ref).square()
    return torch.expm1(ref - logps) - (ref - logps)


def kl_penalty(logps: Tensor, old: Tensor, ref: Tensor, kind: str = "rho_k3") -> Tensor:
    """(n,), for the loss: for tokens that old sampled, its mean gradient is that of KL(policy || ref), the distance of
    the two distributions of the next token behind the text so far.

    rho_k3: k3 times the ratio of new to old, and its gradient with it. k2: times the same ratio, held fixed. k3 alone
    is another thing, at first the gradient of KL(ref || policy), as GRPO was published (arXiv:2402.03300, equation 4).
    k1 is not here: its gradient is 0 in the mean."""
    assert kind in KL_PENALTIES, kind
    if kind == "k3":
        return kl_estimate(logps, ref, "k3")
    ratio = torch.exp(logps - old)
    if kind == "k2":
        return ratio.detach() * kl_estimate(logps, ref, "k2")
    return ratio * kl_estimate(logps, ref, "k3")


def last_tokens(row: Tensor) -> Tensor:
    """(n,) bool: where an answer ends."""
    return torch.cat((row[1:] != row[:-1], row.new_ones(min(1, len(row)), dtype=torch.bool)))


def token_rewards(scores: Tensor, kl: Tensor, row: Tensor, kl_coef: float) -> Tensor:
    """(n,): -kl_coef times each token's KL estimate (k1 of old and ref), and an answer's score at its last token.

    scores (R,), kl, row (n,). arXiv:2203.02155, equation 2."""
    return scores[row].masked_fill(~last_tokens(row), 0.0) - kl_coef * kl


def gae(rewards: Tensor, values: Tensor, row: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns), (n,) each: generalised advantage estimation, arXiv:1506.02438, equation 16.

    rewards (n,): of the tokens as actions; values (n,): what the critic says before each. Behind an answer's last token
    the value is 0, whether it is the end token or the answer was cut there. returns = advantages + values."""
    if not len(row):
        return values.clone(), values.clone()
    following = torch.cat((values[1:], values.new_zeros(1))).masked_fill(last_tokens(row), 0.0)
    deltas = rewards + gamma * following - values
    # a column for each answer: as many operations as the longest has tokens, not as all have together
    lengths = row.bincount()
    position = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]
    table = deltas.new_zeros(int(lengths.max()), len(lengths))
    table[position, row] = deltas
    for t in range(len(table) - 2, -1, -1):
        table[t] += gamma * lam * table[t + 1]
    advantages = table[position, row]
    return advantages, advantages + values


def power_sums(values: Tensor) -> Tensor:
    """(3,) float64 on the CPU: number, sum and sum of squares, to be added up over batches and ranks for `moments`."""
    values = values.detach().cpu().double()
    return torch.stack((values.new_tensor(float(values.numel())), values.sum(), values.square().sum()))


def moments(sums: Tensor) -> tuple[float, float]:
    """(mean, unbiased variance) of the values behind power_sums; a variance of 0 for fewer than two."""
    n, total, squares = sums.tolist()
    mean = total / max(1.0, n)
    return mean, max(0.0, squares - n * mean**2) / max(1.0, n - 1)


def whiten(values: Tensor, mean: float, var: float) -> Tensor:
    """(n,): values less their mean, over their standard deviation; both of the values of all ranks."""
    return (values - mean) * (var + VARIANCE_FLOOR) ** -0.5


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """(n,): half the squared error of the critic, or what it would be with a value that has moved by `clip` at most
    since the rollout, if that is more; clip 0 = the plain error. As in the code of arXiv:2005.12729, section 3."""
    error = (values - returns).square()
    if clip:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error
