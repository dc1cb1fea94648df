"""sampling.py: processors against transformers and plain loops, draws against their law, parameters by hand."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from groundup.errors import UserError
from groundup.generate import sampling
from groundup.generate.sampling import (
    RowParams,
    SamplingParams,
    Seen,
    choose,
    keep_likeliest,
    process,
    top_logprobs,
)

INF = float("inf")


def rows_of(*params: SamplingParams, V: int = 5) -> RowParams:
    return RowParams(params, V)


def seen_of(prompts: list[list[int]], outputs: list[list[int]], V: int) -> Seen:
    """As the engine fills it: token by token; a row that is already longer gets the others' tokens undone by reset."""
    seen = Seen(prompts, V)
    for step in range(max(map(len, outputs), default=0)):
        assert all(len(out) == len(outputs[0]) for out in outputs)
        seen.add(torch.tensor([out[step] for out in outputs]))
    return seen


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# ---- against transformers -------------------------------------------------------------------------------------------


def random_params(draw: random.Random, V: int) -> SamplingParams:
    ids = range(V)
    return SamplingParams(
        max_new_tokens=9,
        min_new_tokens=draw.choice([0, 0, 2, 5]),
        temperature=draw.choice([0, 1e-6, 0.1, 0.8, 1.0, 2.5]),
        top_k=draw.choice([-1, 0, 1, 4, 50, V - 1, V, 10**6]),
        top_p=draw.choice([0.0, 0.1, 0.5, 0.8, 0.9, 0.999, 1.0]),
        min_p=draw.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
        repetition_penalty=draw.choice([1.0, 1.0, 0.7, 1.3, 2.0]),
        stop_token_ids=frozenset(draw.sample(ids, draw.choice([0, 1]))),
        eos_ids=frozenset(draw.sample(ids, draw.choice([0, 1]))),
        ignore_eos=draw.random() < 0.3,
        banned_ids=tuple(draw.sample(ids, draw.choice([0, 0, 1, 2]))),
    )


def their_processors(params: SamplingParams, n_prompt: int):
    """What generate() puts into its list for these parameters, in its order."""
    import transformers as hf

    chain = hf.LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    stop_ids = params.stop_token_ids | (frozenset() if params.ignore_eos else params.eos_ids)
    if stop_ids:
        chain.append(hf.MinNewTokensLengthLogitsProcessor(n_prompt, params.min_new_tokens, sorted(stop_ids)))
    if params.banned_ids:
        chain.append(hf.SuppressTokensLogitsProcessor(list(params.banned_ids)))
    return chain


def their_warpers(params: SamplingParams):
    import transformers as hf

    chain = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k > 0:
        chain.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(hf.MinPLogitsWarper(params.min_p))
    return chain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_keeps_what_a_cpu_keeps():
    draw, logits = random.Random(0), torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    params, prompts, kept = [random_params(draw, 1000) for _ in range(64)], [[1, 2, 3]] * 64, []
    for device in ("cpu", "cuda"):
        rows, seen = RowParams(params, 1000, device), Seen(prompts, 1000, device)
        n_out = torch.zeros(64, dtype=torch.int64, device=device)
        kept.append(keep_likeliest(process(logits.to(device, copy=True), rows, seen, n_out), rows).cpu())
    torch.testing.assert_close(kept[1], kept[0])


@pytest.mark.slow
def test_processors_equal_transformers_bit_for_bit():
    """150 batches of four rows, each row with parameters of its own."""
    draw, happened = random.Random(0), Counter()
    for trial in range(150):
        V = draw.choice([5, 97, 1000, 5000])
        logits = torch.randn(4, V, generator=torch.Generator().manual_seed(trial)) * draw.choice([0.1, 3.0])
        if trial % 3 == 0:
            logits = (logits * 2).round() / 2  # ties, also at the k-th value and inside the nucleus
        if trial % 5 == 0:
            logits[:, 1::4] = -INF
        params = [random_params(draw, V) for _ in range(4)]
        prompts = [[draw.randrange(V) for _ in range(draw.randint(1, 6))] for _ in range(4)]
        n_out = draw.choice([0, 1, 2, 4, 5])
        outputs = [[draw.randrange(V) for _ in range(n_out)] for _ in range(4)]
        rows, before = RowParams(params, V), logits.clone()
        processed = process(logits, rows, seen_of(prompts, outputs, V), torch.full((4,), n_out))
        kept = keep_likeliest(processed, rows)
        chosen = choose(processed, rows, [None if p.temperature == 0 else seeded(7)[0] for p in params])
        for row, p in enumerate(params):
            ids = torch.tensor([prompts[row] + outputs[row]])
            want = their_processors(p, len(prompts[row]))(ids, logits[row : row + 1].clone())
            assert torch.equal(processed[row : row + 1], want), (trial, row, p)
            happened["processed"] += not torch.equal(want, logits[row : row + 1])
            if p.temperature == 0:
                assert chosen[row] == want.argmax()
                continue
            warped = their_warpers(p)(ids, want.clone())
            assert torch.equal(kept[row : row + 1], warped), (trial, row, p)
            assert warped[0, chosen[row]] > -INF
            happened["cut"] += bool((warped == -INF).sum() > (want == -INF).sum())
        assert torch.equal(logits, before)  # the raw ones are still needed for logprobs
    assert happened["processed"] > 180 and happened["cut"] > 260


# ---- what top_k, top_p and min_p keep, by hand ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (-1, 1.0, 0.0, 5), (0, 1.0, 0.0, 5), (5, 1.0, 0.0, 5), (10**6, 1.0, 0.0, 5), (1, 1.0, 0.0, 1), (3, 1.0, 0.0, 3),
        (-1, 0.0, 0.0, 1), (-1, 0.49, 0.0, 1), (-1, 0.79, 0.0, 2), (-1, 0.8, 0.0, 2), (-1, 0.81, 0.0, 3),
        (-1, 0.999, 0.0, 5),
        (2, 0.61, 0.0, 1), (2, 0.63, 0.0, 2),  # after top_k=2 the likeliest has 0.5 / 0.8 = 0.625
        (-1, 1.0, 0.07, 5), (-1, 1.0, 0.09, 4), (-1, 1.0, 0.19, 3), (-1, 1.0, 0.21, 2), (-1, 1.0, 1.0, 1),
    ],
)  # fmt: skip
def test_kept_ids_by_hand(top_k, top_p, min_p, kept):
    logits = torch.tensor([[0.06, 0.5, 0.04, 0.3, 0.1]]).log()
    got = keep_likeliest(logits, rows_of(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)))[0]
    likeliest = [1, 3, 4, 0, 2]
    assert sorted(i for i in range(5) if got[i] > -INF) == sorted(likeliest[:kept])


def test_min_p_comes_after_top_p():
    """Before it, the third id would be enough for top_p among the four that min_p leaves."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
    got = keep_likeliest(logits, rows_of(SamplingParams(top_p=0.92, min_p=0.11)))
    assert (got > -INF).sum() == 4


def test_ties_with_the_kth_stay():
    got = keep_likeliest(torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]]), rows_of(SamplingParams(top_k=2)))
    assert (got > -INF).tolist() == [[False, True, True, True, True]]


def test_each_row_of_a_batch_has_its_own_limits():
    """A row with top_k off beside one with top_k on, and so on for each."""
    logits = torch.tensor([[0.06, 0.5, 0.04, 0.3, 0.1]]).log().expand(5, 5)
    params = [{}, {"top_k": 2}, {"top_p": 0.81}, {"min_p": 0.19}, {"top_k": 4, "temperature": 2.0}]
    got = keep_likeliest(logits, rows_of(*[SamplingParams(**p) for p in params]))
    assert (got > -INF).sum(dim=1).tolist() == [5, 2, 3, 3, 4]
    torch.testing.assert_close(got[4, 1], torch.tensor(0.5).log() / 2)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.5, "min_p": 0.02}])
def test_a_draw_on_a_cpu_sorts_few_rows_and_is_the_draw_from_the_kept_ids(monkeypatch, params):
    n_sorted, confine = [], sampling.confine
    g, B, V = torch.Generator().manual_seed(1), 64, 500
    rows = rows_of(*[SamplingParams(temperature=t, **params) for t in (0.6, 1.3)] * (B // 2), V=V)
    for scale in (0.1, 2.0, 6.0):
        logits = (torch.randn(B, V, generator=g) * scale).bfloat16().float()  # with many ties
        noise = [
            torch.empty(V, dtype=torch.float64).uniform_(generator=g).log().neg().float() for g in seeded(*range(B))
        ]
        want = (keep_likeliest(logits, rows).softmax(dim=-1) / torch.stack(noise)).argmax(dim=-1)
        with monkeypatch.context() as patched:
            patched.setattr(sampling, "confine", lambda *args: n_sorted.append(1) or confine(*args))
            assert choose(logits, rows, seeded(*range(B))).equal(want)
    assert 0 < len(n_sorted) < 3 * B * 0.7


# ---- penalties ------------------------------------------------------------------------------------------------------


def test_penalties_example():
    params = SamplingParams(repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=0.4)
    seen = seen_of([[0, 1]], [[2, 3, 2]], 5)
    got = process(torch.tensor([[2.0, -1.0, 0.5, 3.0, 0.0]]), rows_of(params), seen, 3)
    torch.testing.assert_close(got, torch.tensor([[1.6, -1.25, -1.0, 1.5, 0.0]]))


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.5, 0.0]),  # prompt and output
        ({"repetition_penalty": 0.5}, [4.0, -0.5, 2.0, 0.0]),  # below 1 it makes them likelier
        ({"presence_penalty": 0.5}, [2.0, -1.0, 0.5, 0.0]),  # output only
        ({"frequency_penalty": 0.5}, [2.0, -1.0, 0.0, 0.0]),  # and for each time
        ({"presence_penalty": -2.0}, [2.0, -1.0, 3.0, 0.0]),
        ({}, [2.0, -1.0, 1.0, 0.0]),
    ],
)
def test_each_penalty_by_hand(params, want):
    got = process(torch.tensor([[2.0, -1.0, 1.0, 0.0]]), RowParams([SamplingParams(**params)], 4),
                  seen_of([[0, 1, 1]], [[2, 2]], 4), 2)  # fmt: skip
    assert got.tolist() == [want]


def test_penalties_of_different_rows_equal_a_plain_loop():
    draw, V = random.Random(1), 11
    for _ in range(50):
        params = [
            SamplingParams(
                repetition_penalty=draw.choice([1.0, 1.5]),
                frequency_penalty=draw.choice([0.0, -1.0, 0.75]),
                presence_penalty=draw.choice([0.0, 2.0, -0.5]),
            )
            for _ in range(3)
        ]
        prompts = [[draw.randrange(V) for _ in range(3)] for _ in params]
        outputs = [[draw.randrange(V) for _ in range(5)] for _ in params]
        logits = torch.tensor([[draw.gauss(0, 2) for _ in range(V)] for _ in params])
        got = process(logits, RowParams(params, V), seen_of(prompts, outputs, V), 5)
        for row, p in enumerate(params):
            for i in range(V):
                x, times = logits[row, i].item(), outputs[row].count(i)
                if i in prompts[row] + outputs[row]:
                    x = x * p.repetition_penalty if x < 0 else x / p.repetition_penalty
                x -= p.frequency_penalty * times + (p.presence_penalty if times else 0)
                assert got[row, i].item() == pytest.approx(x, abs=1e-5)


def test_greedy_choice_is_made_after_the_penalties():
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    rows = rows_of(params, V=3)
    got = process(torch.tensor([[3.0, 2.0, 1.0]]), rows, Seen([[0]], 3), 0)
    assert choose(got, rows, [None]).tolist() == [1]


def test_seen_follows_rows():
    seen = Seen([[0, 1], [2]], 4)
    seen.add(torch.tensor([3, 3]))
    seen.add(torch.tensor([0, 3]))
    assert seen.counts.tolist() == [[1, 0, 0, 1], [0, 0, 0, 2]]
    seen.select(torch.tensor([1, 1]))
    assert seen.counts.tolist() == [[0, 0, 0, 2]] * 2 and seen.present.tolist() == [[False, False, True, True]] * 2
    later = Seen([[0, 1], [2]], 4, outputs=[[3, 0], [3, 3]])  # the same at once
    assert later.counts.tolist() == [[1, 0, 0, 1], [0, 0, 0, 2]]
    assert later.present.tolist() == [[True, True, False, True], [False, False, True, True]]


def test_which_parameters_need_seen():
    assert not SamplingParams().has_penalty
    for key in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{key: 0.5}).has_penalty


# ---- ids that may not come ------------------------------------------------------------------------------------------


def blocked(params: SamplingParams, n_out: int) -> list[int]:
    got = process(torch.zeros(1, 6), rows_of(params, V=6), None, torch.tensor([n_out]))
    return (got[0] == -INF).nonzero().flatten().tolist()


def test_min_new_tokens_holds_back_all_stop_ids():
    params = SamplingParams(min_new_tokens=2, eos_ids=frozenset({1}), stop_token_ids=frozenset({4}), banned_ids=(0,))
    assert [blocked(params, n) for n in range(4)] == [[0, 1, 4], [0, 1, 4], [0], [0]]


def test_min_new_tokens_does_not_hold_back_an_ignored_eos():
    params = SamplingParams(
        min_new_tokens=2, eos_ids=frozenset({1}), stop_token_ids=frozenset({4}), banned_ids=(0,), ignore_eos=True
    )
    assert params.stop_ids == {4}
    assert [blocked(params, n) for n in range(3)] == [[0, 4], [0, 4], [0]]


def test_rows_of_different_age_and_different_minimum():
    stop = frozenset({1})
    params = [SamplingParams(min_new_tokens=m, stop_token_ids=stop) for m in (0, 3, 3)]
    got = process(torch.zeros(3, 2), RowParams(params, 2), None, torch.tensor([0, 2, 3]))
    assert (got[:, 1] == -INF).tolist() == [False, True, False]


def test_ids_beyond_the_vocabulary_and_nothing_left():
    for key, value in (("banned_ids", (7,)), ("stop_token_ids", frozenset({7})), ("eos_ids", frozenset({7}))):
        with pytest.raises(UserError, match=f"sample: {key} has id 7, the model has vocab_size=7"):
            rows_of(SamplingParams(**{key: value}), V=7)
    with pytest.raises(UserError, match="leave none of the 3 ids"):
        rows_of(SamplingParams(banned_ids=(0, 1, 2, 0)), V=3)
    everything = SamplingParams(banned_ids=(0, 1), eos_ids=frozenset({2}), min_new_tokens=1)
    with pytest.raises(UserError, match="leave none of the 3 ids"):
        rows_of(everything, V=3)


# ---- the choice -----------------------------------------------------------------------------------------------------


def chi_square_is_fine(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Within 5 standard deviations of the statistic's mean (degrees of freedom d: mean d, variance 2 d)."""
    n, freedom = counts.sum(), len(probs) - 1
    statistic = ((counts - n * probs) ** 2 / (n * probs)).sum()
    return statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("one_generator", [True, False])
def test_draws_have_the_multinomial_law(one_generator):
    """Also the first draws of neighbouring seeds, which is what the samples of a prompt are."""
    probs, n = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01]), 8000
    rows = RowParams([SamplingParams()] * n, 7)
    generators = seeded(5) * n if one_generator else seeded(*range(n))
    got = choose(probs.log().expand(n, 7), rows, generators)
    assert chi_square_is_fine(np.bincount(got, minlength=7), probs.double().numpy())


def test_draws_after_temperature_and_top_p_have_their_law():
    probs, n = np.array([0.5, 0.3, 0.15, 0.05]), 8000
    rows = RowParams([SamplingParams(temperature=0.5, top_p=0.95)] * n, 4)
    got = choose(torch.tensor(probs).float().log().expand(n, 4), rows, seeded(6) * n)
    want = probs[:3] ** 2 / (probs[:3] ** 2).sum()  # of squares the first two have 0.93, the first three 0.993
    counts = np.bincount(got, minlength=4)
    assert counts[3] == 0 and chi_square_is_fine(counts[:3], want)


def test_a_seed_draws_the_same_whatever_its_batch_mates():
    logits = torch.randn(12, 4, 50, generator=torch.Generator().manual_seed(0))
    mine = SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01)
    mates = [SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams(top_p=0.3, banned_ids=(4,))]
    alone = RowParams([mine], 50)
    generator = seeded(42)
    want = [choose(process(x[2:3], alone, None, 0), alone, generator).item() for x in logits]
    batch, generators = RowParams([*mates[:2], mine, mates[2]], 50), [None, *seeded(3, 42, 9)]
    assert [choose(process(x, batch, None, 0), batch, generators)[2].item() for x in logits] == want
    other = seeded(43)
    assert [choose(x[2:3], alone, other).item() for x in logits] != want


def test_temperature_0_ignores_what_shapes_draws():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0, top_k=k, top_p=p, min_p=m) for k, p, m in
              [(-1, 1.0, 0.0), (1, 0.0, 1.0), (3, 0.5, 0.1), (7, 0.9, 0.0)]]  # fmt: skip
    assert torch.equal(choose(logits, RowParams(params, 30), [None] * 4), logits.argmax(dim=1))
    mixed = [*params[:3], SamplingParams()]
    state = torch.get_rng_state()
    got = choose(logits, RowParams(mixed, 30), [None] * 3 + seeded(0))
    assert torch.equal(got[:3], logits[:3].argmax(dim=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_greedy_beside_a_draw_sees_the_smallest_difference():
    logits = torch.tensor([[0.0, 1e-12, -1.0]]).expand(2, 3)
    assert choose(logits, rows_of(SamplingParams(temperature=0), SamplingParams(), V=3), [None, *seeded(0)])[0] == 1


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_the_only_id_left_is_chosen(params):
    logits = torch.full((1, 9), -INF)
    logits[0, 6] = -3.0
    rows = rows_of(SamplingParams(**params), V=9)
    assert {choose(logits, rows, seeded(seed)).item() for seed in range(20)} == {6}


def test_an_id_without_probability_is_never_drawn():
    logits = torch.tensor([[0.0, -INF, -200.0, 0.0]]).expand(3000, 4)
    got = choose(logits, RowParams([SamplingParams()] * 3000, 4), seeded(1) * 3000)
    assert set(got.tolist()) == {0, 3}


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_logits_that_are_not_finite(bad):
    logits = torch.zeros(3, 4)
    logits[0, 0] = -INF
    sampling.check_logits(logits)
    logits[1] = bad
    with pytest.raises(UserError, match="the logits of row 1 are not finite"):
        sampling.check_logits(logits)
    logits[1] = torch.tensor([0.0, float("nan"), 1.0, -INF])
    with pytest.raises(UserError, match="row 1"):
        sampling.check_logits(logits)


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_top_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    chosen = torch.tensor([int(logits[0].argmax()), 1, 2, 3, 4, 5])
    ks = [2, 0, 4, 1, 40, 10**6]
    for row, k in enumerate(ks):
        ids, values = (x[row].tolist() for x in top_logprobs(logits, chosen, k))
        got = dict(zip(ids, values, strict=True))
        x = logits[row].double().numpy()
        logps = x - np.log(np.exp(x).sum())
        best = np.argsort(-logps)[:k].tolist()
        assert list(got) == [int(chosen[row]), *[i for i in best if i != chosen[row]]]
        assert all(abs(value - logps[i]) < 1e-5 for i, value in got.items())
        assert len(got) == [2, 1, 5, 2, 40, 40][row]  # the chosen one is among the k highest, or one more


def test_logprobs_of_the_chosen_id_only():
    logits = torch.tensor([[0.0, math.log(3.0)]]).bfloat16()
    ids, logps = top_logprobs(logits, torch.tensor([0]), 0)
    assert ids.tolist() == [[0]] and logps.dtype == torch.float32
    assert logps.item() == pytest.approx(math.log(0.25), abs=1e-2)


# ---- parameters -----------------------------------------------------------------------------------------------------


NAN = float("nan")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("max_new_tokens", value) for value in (0, -1)],
        *[("min_new_tokens", value) for value in (-1, 257)],
        *[("temperature", value) for value in (-0.5, 1e-9, INF, NAN)],
        *[("top_k", value) for value in (-2,)],
        *[(key, value) for key in ("top_p", "min_p") for value in (-0.1, 1.1, NAN)],
        *[(key, value) for key in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, NAN)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, INF, NAN)],
        *[("stop", value) for value in (("",), ("a", ""), (1,))],
        *[("stop_token_ids", value) for value in (frozenset({-1}),)],
        *[("eos_ids", value) for value in (frozenset({-1}),)],
        *[("banned_ids", value) for value in ((3, -1),)],
        *[("n", value) for value in (0, -1)],
        *[("best_of", value) for value in (-1,)],
        *[("best_of_by", value) for value in ("", "reward")],
        *[(key, value) for key in ("logprobs", "prompt_logprobs") for value in (-2,)],
        *[("seed", value) for value in (-1, 2**63)],
        ("stop", "User:"), ("stop_token_ids", {1}), ("temperature", "1"), ("n", True), ("n", 1.0), ("ignore_eos", 1),
        ("skip_special_tokens", 0),
    ],
)  # fmt: skip
def test_impossible_parameters_are_one_line(key, value):
    with pytest.raises(UserError) as caught:
        SamplingParams(**{key: value})
    text = str(caught.value)
    shown = list(value) if isinstance(value, frozenset) else value
    assert text.startswith(f"sample: {key} must be ") and text.endswith((f"got {shown}", f"got {value!r}"))
    assert "\n" not in text


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": 0, "n": 2}, "temperature must be above 0 for n=2, got 0"),
        ({"temperature": 0, "best_of": 3}, "temperature must be above 0 for best_of=3, got 0"),
        ({"n": 3, "best_of": 2}, "best_of must be 0 (as n) or at least n=3, got 2"),
    ],
)
def test_parameters_that_contradict_each_other(params, words):
    with pytest.raises(UserError) as caught:
        SamplingParams(**params)
    assert str(caught.value) == f"sample: {words}"


def test_edges_of_the_ranges_are_allowed():
    for params in (
        {"temperature": 0}, {"temperature": 1e-6}, {"top_k": 10**9}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1},
        {"min_p": 1}, {"presence_penalty": -2, "frequency_penalty": 2}, {"repetition_penalty": 1e-3},
        {"min_new_tokens": 256}, {"n": 2, "best_of": 2}, {"n": 2, "best_of": 5, "best_of_by": "mean"},
        {"logprobs": 0, "prompt_logprobs": 0}, {"seed": 2**63 - 1},
    ):  # fmt: skip
        assert SamplingParams(**params)
    assert (SamplingParams(n=2).n_samples, SamplingParams(n=2, best_of=5).n_samples) == (2, 5)
