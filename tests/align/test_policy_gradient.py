"""The arithmetic of reinforcement learning: the losses of trl, gradients by enumeration, sums by hand, toy policies."""

import math
import statistics
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from groundup.align.policy_gradient import (
    NORMALISERS,
    SCALES,
    flat_groups,
    gae,
    group_advantages,
    kl_penalty,
    last_tokens,
    moments,
    normalise,
    policy_losses,
    power_sums,
    token_rewards,
    value_losses,
    whiten,
)

LENGTHS = (4, 1, 6, 0, 3, 5)  # tokens of the answers; one is left out
LONGEST = 7


def table_of(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """(mask (R, LONGEST) bool of the tokens, row (n,)): the padded table whose flat tokens are table[mask]."""
    mask = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    return mask, mask.nonzero()[:, 0]


def random_values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- advantages of answers


def test_group_advantages_golden():
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0])
    plain, scaled = group_advantages(rewards, 4), group_advantages(rewards, 4, "group")
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25]
    a, b, c = 0.86588, 1.49970, -0.49990
    assert scaled.tolist() == pytest.approx([a, -a, -a, a, b, c, c, c], abs=5e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_answers_without_a_reward_are_in_no_mean(scale):
    """The others have the advantages they would have in a group of their own; NaN in their place does no harm."""
    rewards = torch.tensor([1.0, math.nan, 4, 2, 7, 5, math.nan, math.nan, 3, math.nan, math.nan, math.nan])
    found = group_advantages(rewards, 4, scale, ~rewards.isnan())
    first, second = group_advantages(rewards[[0, 2, 3]], 3, scale), group_advantages(rewards[4:6], 2, scale)
    wanted = torch.zeros(12)
    wanted[[0, 2, 3]], wanted[4:6] = first, second
    torch.testing.assert_close(found, wanted)
    assert flat_groups(rewards, 4, ~rewards.isnan()).tolist() == [False, False, True]


@pytest.mark.parametrize("scale", SCALES)
def test_group_without_variance_gives_no_gradient(scale):
    """Exactly none, although the mean of these equal float32 numbers is not that number."""
    rewards = torch.tensor([0.1] * 7 + [0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert rewards[:7].mean() != rewards[0]
    assert flat_groups(rewards, 7).tolist() == [True, False]
    advantages = group_advantages(rewards, 7, scale)
    logps = random_values(0, 14).requires_grad_()
    policy_losses(logps, logps.detach() - 0.1, advantages, 0.2, 0.2)[0].sum().backward()
    assert (logps.grad[:7] == 0).all() and (logps.grad[7:] != 0).all()


# ---- the policy's loss


def test_policy_losses_by_hand():
    ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]), torch.tensor([1.0, -1, 1, -1, 2])
    logps = ratio.log().requires_grad_()
    losses, found, clipped = policy_losses(logps, torch.zeros(5), advantages, 0.2, 0.3)
    assert losses.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8, -2.2])
    assert found.tolist() == pytest.approx(ratio.tolist()) and not found.requires_grad
    assert clipped.tolist() == [True, False, False, True, False]
    losses.sum().backward()
    assert logps.grad.tolist() == pytest.approx([0, 1.5, -0.5, 0, -2.2])


def test_first_step_has_ratio_one_and_the_gradient_of_reinforce():
    logps, advantages = random_values(0, 9).requires_grad_(), random_values(1, 9)
    losses, ratio, clipped = policy_losses(logps, logps.detach(), advantages, 0.2, 0.2)
    losses.sum().backward()
    assert (ratio == 1).all() and not clipped.any()
    assert torch.equal(logps.grad, -advantages)


class TrlStep:
    """What trl's GRPOTrainer makes of a padded table of log-probabilities, as one optimizer step."""

    def __init__(self, how: str, n_micro: int, n_ranks: int):
        self.accelerator = SimpleNamespace(
            num_processes=n_ranks, gather=lambda x: x, gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        )  # fmt: skip
        self.args = SimpleNamespace(delta=None, use_bias_correction_kl=True, steps_per_generation=n_micro)
        self.loss_type, self.beta, self.epsilon_low, self.epsilon_high = how, 0.3, 0.2, 0.25
        self.max_completion_length, self.current_gradient_accumulation_steps = LONGEST, n_micro
        self.top_entropy_quantile, self.importance_sampling_level = 1.0, "token"
        self.aux_loss_enabled = self.use_vllm = self._entropy_bonus_enabled = False
        self.off_policy_mask_threshold, self.model = None, SimpleNamespace(training=True)
        self._metrics = defaultdict(lambda: defaultdict(list))

    def loss(self, part: slice, mask: Tensor, logps: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
        from trl import GRPOTrainer

        self._get_per_token_logps_and_entropies = lambda *_, **__: (logps[part], torch.zeros_like(logps[part]), None)
        tokens = torch.zeros_like(mask[part], dtype=torch.long)
        inputs = {"prompt_ids": tokens[:, :1], "prompt_mask": tokens[:, :1] + 1, "completion_ids": tokens}
        inputs |= {"completion_mask": mask[part].long(), "advantages": advantages[part]}
        inputs |= {"old_per_token_logps": old[part], "ref_per_token_logps": ref[part]}
        inputs |= {"num_items_in_batch": mask.sum()}
        return GRPOTrainer._compute_loss(self, self.model, inputs)


@pytest.mark.parametrize("how", NORMALISERS)
def test_losses_and_gradients_are_those_of_trl(how):
    """Two ranks with three micro-batches each, of one answer, of which one has no token: loss and gradient of the step,
    which for trl is the mean over ranks."""
    mask, row = table_of()
    logps, old, ref = (random_values(seed, *mask.shape) * 0.4 - 2 for seed in range(3))
    logps.requires_grad_()
    advantages, trl = random_values(3, 6), TrlStep(how, 3, 2)
    parts = [slice(i, i + 1) for i in range(6)]
    theirs = sum(trl.loss(part, mask, logps, old, ref, advantages) for part in parts) / 2
    their_grad = torch.autograd.grad(theirs, logps)[0][mask]

    mine, clipped_share = torch.zeros(()), 0
    for i in range(6):
        here = row == i
        lp, op, rp = (x[mask][here] for x in (logps, old, ref))
        losses, _, clipped = policy_losses(lp, op, advantages[row[here]], 0.2, 0.25)
        losses = losses + 0.3 * kl_penalty(lp, op, rp)
        mine = mine + normalise(losses, row[here] - i, how, 6, len(row), LONGEST)
        clipped_share += clipped.float().mean().nan_to_num() / 6
    my_grad = torch.autograd.grad(mine, logps)[0][mask]
    assert mine.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(my_grad, their_grad, atol=1e-7, rtol=1e-5)
    assert clipped_share > 0
    logged = trl._metrics["train"]["clip_ratio/region_mean"]
    assert clipped_share.item() == pytest.approx(sum(logged) / 6, abs=1e-6)


@pytest.mark.parametrize("how", NORMALISERS)
def test_step_does_not_depend_on_the_split(how):
    mask, row = table_of()
    losses = random_values(0, len(row))

    def step(cuts: tuple[int, ...]) -> float:
        total = 0.0
        for a, b in zip((0, *cuts), (*cuts, 6), strict=True):
            here = (row >= a) & (row < b)
            total += normalise(losses[here], row[here] - a, how, 6, len(row), LONGEST).item()
        return total

    whole, halves = step(()), step((2, 3, 4))
    sums = [losses[row == i].sum().item() for i in range(6)]
    wanted = {"dapo": sum(sums) / 19, "dr_grpo": sum(sums) / 42}
    wanted["grpo"] = sum(s / max(1, n) for s, n in zip(sums, LENGTHS, strict=True)) / 6
    assert whole == pytest.approx(wanted[how], abs=1e-6) and halves == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("how", NORMALISERS)
def test_micro_batch_without_a_token_has_loss_0_and_a_gradient(how):
    losses = torch.zeros(0, requires_grad=True)
    loss = normalise(losses, torch.zeros(0, dtype=torch.int64), how, 0, 0, LONGEST)
    loss.backward()
    assert loss.item() == 0 and losses.grad.shape == (0,)


# ---- the distance to the reference


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """(logits of the policy, log-probabilities of what sampled, of the reference) over five tokens, in float64."""
    theta, old, ref = (random_values(seed, 5).double() for seed in (0, 1, 2))
    return theta.requires_grad_(), old.log_softmax(0), ref.log_softmax(0)


def kl(a: Tensor, b: Tensor) -> Tensor:
    return torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (a, b)))


def mean_gradient(theta: Tensor, of_token: Tensor, sampler: Tensor) -> Tensor:
    """Of a loss per token: the mean over tokens as often as they are sampled."""
    return torch.autograd.grad((sampler.exp().detach() * of_token).sum(), theta)[0]


def test_kl_estimates_have_the_mean_they_should():
    theta, _, ref = distributions()
    logps = theta.detach().log_softmax(0)
    k1, k3 = logps - ref, kl_penalty(logps, logps, ref)
    for estimate in (k1, k3):
        assert (logps.exp() * estimate).sum().item() == pytest.approx(kl(logps, ref).item())
    assert (k3 >= 0).all() and (k1 < 0).any()


@pytest.mark.parametrize("on_policy", (True, False))
def test_kl_gradient_by_enumeration(on_policy):
    """It is that of KL(policy || ref), whatever sampled."""
    theta, old, ref = distributions()
    logps = theta.log_softmax(0)
    sampler = logps.detach() if on_policy else old
    found = mean_gradient(theta, kl_penalty(logps, sampler, ref), sampler)
    wanted = torch.autograd.grad(kl(theta, ref), theta)[0]
    torch.testing.assert_close(found, wanted)


def test_k1_is_no_loss_but_a_reward():
    theta, _, ref = distributions()
    own = theta.detach().log_softmax(0)
    assert mean_gradient(theta, theta.log_softmax(0) - ref, own).abs().max() < 1e-12
    losses = policy_losses(theta.log_softmax(0), own, ref - own, 0.2, 0.2)[0]
    torch.testing.assert_close(mean_gradient(theta, losses, own), torch.autograd.grad(kl(theta, ref), theta)[0])


# ---- advantages of tokens, the value's loss


def test_token_rewards_by_hand():
    """The score comes with the last token, in answers of three tokens, of one, of none and of two."""
    row, kl = torch.tensor([0, 0, 0, 1, 3, 3]), torch.tensor([1.0, 2, 3, 4, 5, 6])
    scores = torch.tensor([10.0, 20, math.nan, 30])
    assert last_tokens(row).tolist() == [False, False, True, True, False, True]
    found = token_rewards(scores, kl, row, 0.5).tolist()
    assert found == [-0.5, -1.0, 10 - 1.5, 20 - 2.0, -2.5, 30 - 3.0]


def test_gae_by_hand():
    """gamma 1, lambda 1/2. Differences: 0 + 0.25 - 0.5, 0 + 0.5 - 0.25, 1 - 0.5; the second answer: 2 - 0.5."""
    row, values = torch.tensor([0, 0, 0, 1]), torch.tensor([0.5, 0.25, 0.5, 0.5])
    advantages, returns = gae(torch.tensor([0.0, 0, 1, 2]), values, row, 1.0, 0.5)
    assert advantages.tolist() == [0.0, 0.5, 0.5, 1.5] and returns.tolist() == [0.5, 0.75, 1.0, 2.0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.97, 0.0), (0.95, 1.0)])
def test_gae_against_brute_force(gamma, lam):
    """Equation 16 as it is written; with lambda 1 the discounted rewards that follow less the value."""
    _, row = table_of()
    rewards, values = random_values(0, len(row)), random_values(1, len(row))
    advantages, returns = gae(rewards, values, row, gamma, lam)
    wanted, to_come = [], []
    for i in range(6):
        r, v = rewards[row == i].tolist(), [*values[row == i].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        wanted += [sum((gamma * lam) ** j * d for j, d in enumerate(deltas[t:])) for t in range(len(r))]
        to_come += [sum(gamma**j * x for j, x in enumerate(r[t:])) for t in range(len(r))]
    assert advantages.tolist() == pytest.approx(wanted, abs=1e-6)
    assert returns.tolist() == pytest.approx((advantages + values).tolist(), abs=1e-6)
    if lam == 1:
        assert returns.tolist() == pytest.approx(to_come, abs=1e-6)


def test_gae_of_nothing():
    empty = torch.zeros(0)
    advantages, returns = gae(empty, empty, torch.zeros(0, dtype=torch.int64), 1.0, 0.95)
    assert advantages.shape == returns.shape == (0,)


def test_whitening_over_ranks_is_that_of_all_tokens():
    """Over the tokens of three ranks, of which each has its sums only and one has no token. As trl's PPO did it."""
    mask, row = table_of()
    table = random_values(0, *mask.shape) * 3 + 5
    flat = table[mask]
    mean, var = moments(sum(power_sums(part) for part in (flat[:4], flat[:0], flat[4:])))
    assert mean == pytest.approx(statistics.fmean(flat.tolist()), rel=1e-6)
    assert var == pytest.approx(statistics.variance(flat.tolist()), rel=1e-5)
    expected = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()
    torch.testing.assert_close(whiten(flat, mean, var), expected, atol=1e-6, rtol=1e-5)


def test_moments_of_few_and_of_large_values():
    assert moments(power_sums(torch.zeros(0))) == (0.0, 0.0)
    assert moments(power_sums(torch.tensor([3.0]))) == (3.0, 0.0)
    far = 1e4 + random_values(0, 1000)
    mean, var = moments(power_sums(far))
    assert mean == pytest.approx(statistics.fmean(far.tolist()))
    assert var == pytest.approx(statistics.variance(far.tolist()), rel=1e-5)


def test_value_losses_by_hand():
    """Old value 1, at most 0.5 away: near enough; beyond, towards the return and past it; away from it; no clipping."""
    values = torch.tensor([1.25, 2.5, 2.5, 0.0]).requires_grad_()
    old, returns = torch.ones(4), torch.tensor([2.0, 3.0, 1.0, 2.0])
    losses = value_losses(values, old, returns, 0.5)
    assert losses.tolist() == [0.5 * 0.75**2, 0.5 * 1.5**2, 0.5 * 1.5**2, 0.5 * 2.0**2]
    losses.sum().backward()
    assert values.grad.tolist() == [-0.75, 0.0, 1.5, -2.0]
    assert value_losses(values, old, returns, 0.0).tolist() == [0.5 * e**2 for e in (0.75, 0.5, 1.5, 2.0)]


# ---- do they teach?


def sample_answers(logits: Tensor, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens (n, 3) of a policy that only knows the place, mask): token 0 ends an answer and belongs to it."""
    tokens = torch.stack([torch.multinomial(p, n, True, generator=generator) for p in logits.softmax(1)], 1)
    ended = (tokens == 0).cumsum(1) - (tokens == 0).long()
    return tokens, ended == 0


def score(tokens: Tensor) -> Tensor:
    """1 for the answer "3, end"; 0.1 where only the first is right."""
    right = tokens[:, 0] == 3
    return 0.1 * right + 0.9 * (right & (tokens[:, 1] == 0))


def expected_score(logits: Tensor) -> float:
    p = logits.detach().softmax(1)
    return (p[0, 3] * (0.1 + 0.9 * p[1, 0])).item()


def token_logps(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    return logits.log_softmax(1).expand(len(tokens), 3, 5).gather(2, tokens[..., None])[..., 0][mask]


@pytest.mark.parametrize("how", NORMALISERS)
def test_bandit_improves(how):
    """Grouped answers, three updates per rollout in two micro-batches, with a KL penalty: 0.06 becomes above 0.9."""
    generator, logits = torch.Generator().manual_seed(0), torch.zeros(3, 5, requires_grad=True)
    optimizer, ref = torch.optim.Adam([logits], lr=0.1), torch.zeros(3, 5)
    assert expected_score(logits) == pytest.approx(0.2 * (0.1 + 0.9 * 0.2))
    for _ in range(60):
        tokens, mask = sample_answers(logits.detach(), 32, generator)
        row, old = mask.nonzero()[:, 0], token_logps(logits, tokens, mask).detach()
        advantages, ref_logps = group_advantages(score(tokens), 8), token_logps(ref, tokens, mask)
        for _ in range(3):
            for half in (row < 16, row >= 16):
                logps = token_logps(logits, tokens, mask)[half]
                losses = policy_losses(logps, old[half], advantages[row[half]], 0.2, 0.2)[0]
                losses = losses + 1e-3 * kl_penalty(logps, old[half], ref_logps[half])
                normalise(losses, row[half] - row[half].min(), how, 32, len(row), 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert expected_score(logits) > 0.9


def test_bandit_improves_with_a_critic():
    """PPO: scores less the KL at each token, whitened advantages, and values that learn what the answers are worth."""
    generator, logits = torch.Generator().manual_seed(0), torch.zeros(3, 5, requires_grad=True)
    critic, ref = torch.zeros(3, requires_grad=True), torch.zeros(3, 5)
    optimizer = torch.optim.Adam([logits, critic], lr=0.1)
    for _ in range(60):
        tokens, mask = sample_answers(logits.detach(), 32, generator)
        row, old = mask.nonzero()[:, 0], token_logps(logits, tokens, mask).detach()
        kl, old_values = old - token_logps(ref, tokens, mask), critic.detach().expand(32, 3)[mask]
        rewards = token_rewards(score(tokens), kl, row, 1e-3)
        advantages, returns = gae(rewards, old_values, row, 1.0, 0.95)
        advantages = whiten(advantages, *moments(power_sums(advantages)))
        for _ in range(3):
            losses = policy_losses(token_logps(logits, tokens, mask), old, advantages, 0.2, 0.2)[0]
            losses = losses + value_losses(critic.expand(32, 3)[mask], old_values, returns, 0.2)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert expected_score(logits) > 0.9
    assert critic[0].item() == pytest.approx(1.0, abs=0.1)
