"""mixture.py: every map from sample to window against enumeration, and what the strings say."""

import math
from fractions import Fraction

import numpy as np
import pytest

from groundup.errors import UserError
from groundup.files.paths import find_files
from groundup.tokens import mixture
from groundup.tokens.mixture import (
    Mixture,
    Sampler,
    Stage,
    parse_data_dir,
    parse_weights,
    window_sampler,
)

# ---- one source ------------------------------------------------------------------------------------------------------


def test_permute_is_a_bijection() -> None:
    for n in [*range(1, 131), 255, 256, 257, 4096, 4097, 99_991]:
        for epoch in range(2):
            keys = mixture.hash_words(8, n, epoch)
            found = mixture.permute(np.arange(n), n, keys)
            assert np.array_equal(np.sort(found), np.arange(n)), n
            some = np.random.default_rng(n).integers(0, n, (2, 3))
            assert np.array_equal(mixture.permute(some, n, keys), found[some])  # any shape, order, repetition
    n = 10**12 + 39
    found = mixture.permute(np.arange(100_000), n, mixture.hash_words(8, "large"))
    assert len(set(found.tolist())) == 100_000 and 0 <= found.min() and found.max() < n


def test_permutation_looks_random() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for key in range(2400):
        order = tuple(mixture.permute(np.arange(4), 4, mixture.hash_words(8, "small", key)))
        counts[order] = counts.get(order, 0) + 1
    chi2 = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert len(counts) == 24 and chi2 < 49.7  # 23 degrees of freedom: one in a thousand is above
    n = 100_003
    order = mixture.permute(np.arange(n), n, mixture.hash_words(8, 1)).astype(float)
    other = mixture.permute(np.arange(n), n, mixture.hash_words(8, 2)).astype(float)
    for a, b in ((order[:-1], order[1:]), (order, np.arange(n)), (order, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5


def test_windows_of_an_epoch() -> None:
    """Every position is the target of exactly one window, but for fewer than 2T at the ends."""
    for block_size in (1, 2, 3, 8):
        for n_tokens in range(2 * block_size + 1, 8 * block_size + 4):
            sampler = window_sampler(n_tokens, block_size, seed=7)
            n = (n_tokens - 1) // block_size - 1
            assert sampler.per_epoch == n >= 1
            for epoch in range(4):
                starts = sampler.starts_of(np.arange(epoch * n, (epoch + 1) * n))
                targets = np.sort((starts[:, None] + 1 + np.arange(block_size)).ravel())
                assert starts.min() >= 0 and targets.max() < n_tokens
                assert np.array_equal(targets, np.arange(targets[0], targets[0] + n * block_size))
                assert n_tokens - 1 - len(targets) < 2 * block_size


def test_epochs_differ_in_order_and_borders_and_seeds_differ() -> None:
    sampler = window_sampler(10_000, 16, seed=1)
    n = sampler.per_epoch
    epochs = [tuple(sampler.starts_of(np.arange(e * n, (e + 1) * n))) for e in range(20)]
    assert len({epoch[0] % 16 for epoch in epochs}) > 8 and len({epoch[:8] for epoch in epochs}) == 20
    mixed = np.random.default_rng(0).permutation(20 * n)  # any order, many epochs at once
    assert np.array_equal(sampler.starts_of(mixed), np.concatenate(epochs)[mixed])
    assert not np.array_equal(window_sampler(10_000, 16, seed=2).starts_of(np.arange(n)), epochs[0])
    # fixed for ever: a changed order would break the resumption of every run
    starts = window_sampler(1000, 10, seed=1337).starts_of(np.array([0, 1, 2, 98, 10**9]))
    assert starts.tolist() == [281, 171, 881, 963, 624]


def test_rows_come_once_per_epoch() -> None:
    sampler = Sampler(23, seed=3)
    epochs = sampler.starts_of(np.arange(4 * 23)).reshape(4, 23)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(23), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    starts = [window_sampler(10_000, 16, 1, source).starts_of(np.arange(300)) // 16 for source in range(3)]
    assert all((starts[a] == starts[b]).mean() < 0.05 for a, b in ((0, 1), (0, 2), (1, 2)))


# ---- strings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        ("data/x", [Stage(0, {"data/x": None})]),
        (" data/x/wiki , data/b", [Stage(0, {"data/x/wiki": None, "data/b": None})]),
        ("data/a=0.7,data/x/wiki=.3", [Stage(0, {"data/a": 0.7, "data/x/wiki": 0.3})]),
        ("a=b=2", [Stage(0, {"a=b": 2.0})]),
        ("0: d/a=1; 8000: d/a=0.5,d/b=5e-1", [Stage(0, {"d/a": 1.0}), Stage(8000, {"d/a": 0.5, "d/b": 0.5})]),
        ("0:a;10 :b;20: a=1,b=2", [Stage(0, {"a": None}), Stage(10, {"b": None}), Stage(20, {"a": 1.0, "b": 2.0})]),
        ("0: a", [Stage(0, {"a": None})]),
        ("C:/data/a=1", [Stage(0, {"C:/data/a": 1.0})]),
    ],
)  # fmt: skip
def test_data_dir(spec: str, stages: list[Stage]) -> None:
    assert parse_data_dir(spec) == stages


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "data_dir is empty; give --data_dir=PATH"),
        ("a=1,,b=1", "'' in data_dir="),
        ("a=1,b=zero", "'b=zero' in data_dir="),
        ("a=1,b=0", "'b=0' in data_dir="),
        ("a=1,b=-1", "'b=-1' in data_dir="),
        ("a=nan", "'a=nan' in data_dir="),
        ("a=inf", "'a=inf' in data_dir="),
        ("=0.5", "'=0.5' in data_dir="),
        ("a=1,b", "'b' in data_dir='a=1,b' has no weight but others have"),
        ("a=1,a=2", "'a' comes twice"),
        ("0: a=1; b=1", "'b=1' in data_dir='0: a=1; b=1' has no first step"),
        ("5: a=1", r"begin at steps \[5\]; begin at 0"),
        ("0: a; 9: b; 9: a", r"begin at steps \[0, 9, 9\]"),
        ("0: a; 9: b;", "'' in data_dir='0: a; 9: b;' has no first step"),
    ],
)
def test_mistakes_in_data_dir_name_the_part(spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_data_dir(spec)
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)


# ---- several sources -------------------------------------------------------------------------------------------------

STAGES = [(0, [0.7, 0.2, 0.1]), (3000, [0.0, 1.0, 0.0]), (3700, [1 / 3, 1 / 3, 1 / 3])]


def of_sizes(*n_windows: int) -> list[Sampler]:
    return [window_sampler((n + 1) * 8 + 1, 8, 5, source) for source, n in enumerate(n_windows)]


def largest_remainder(weights: list[float]) -> list[int]:
    """With exact fractions, one sample at a time."""
    exact = [Fraction(weight) * 1024 / sum(map(Fraction, weights)) for weight in weights]
    found = [math.floor(x) for x in exact]
    while sum(found) < 1024:
        remainders = [x - n for x, n in zip(exact, found, strict=True)]
        found[remainders.index(max(remainders))] += 1
    return found


def test_quotas_are_the_largest_remainders() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 7, 40):
        for _ in range(20):
            weights = rng.integers(1, 2000, n).tolist()
            assert mixture.quotas(np.array(weights, dtype=float)).tolist() == largest_remainder(weights)
    assert mixture.quotas(np.array([1.0, 1.0, 1.0])).tolist() == [342, 341, 341]
    assert mixture.quotas(np.array([0.7, 0.3])).tolist() == [717, 307]


def test_three_stages_against_counting() -> None:
    """Numbers within a source count up without a gap; each block has the quotas; counts agree at every sample."""
    order = Mixture(of_sizes(50, 333, 1000), 5, STAGES)
    n = 9000
    sources, numbers = order.locate(np.arange(n))
    seen = [0, 0, 0]
    for i in range(n):
        assert order.counts(i).tolist() == seen
        assert numbers[i] == seen[sources[i]]
        seen[sources[i]] += 1
    for (first, weights), stop in zip(STAGES, (3000, 3700, n), strict=True):
        for block in range(first, stop - 1023, 1024):
            assert np.bincount(sources[block : block + 1024], minlength=3).tolist() == largest_remainder(weights)
    assert set(sources[3000:3700]) == {1}
    some = np.random.default_rng(0).integers(0, n, (40, 7))
    for found, whole in zip(order.locate(some), (sources, numbers), strict=True):
        assert np.array_equal(found, whole[some])
    starts = order.starts_of(some)[1]
    for source, number, start in zip(sources[some].flat, numbers[some].flat, starts.flat, strict=True):
        assert order.samplers[source].starts_of(np.array([number])) == [start]


def test_the_pattern_is_shuffled_and_seeded() -> None:
    sources = Mixture(of_sizes(50, 50), 5, [(0, [1, 1])]).locate(np.arange(2048))[0]
    runs = 1 + (np.diff(sources[:1024]) != 0).sum()
    assert abs(runs - 513) < 5 * 16  # of 1024 fair coins: 512.5 +- 16
    assert np.array_equal(sources[:1024], sources[1024:])
    assert not np.array_equal(Mixture(of_sizes(50, 50), 6, [(0, [1, 1])]).locate(np.arange(2048))[0], sources)


def test_a_later_stage_changes_nothing_before_it() -> None:
    before = Mixture(of_sizes(100, 100), 5, [(0, [1, 0])])
    after = Mixture(of_sizes(100, 100), 5, [(0, [1, 0]), (2000, [1, 1])])
    for a, b in zip(before.starts_of(np.arange(2000)), after.starts_of(np.arange(2000)), strict=True):
        assert np.array_equal(a, b)
    assert set(after.locate(np.arange(2000, 2100))[0]) == {0, 1}


def test_one_source_alone_has_the_order_of_its_sampler() -> None:
    sampler = window_sampler(1000, 10, seed=1337)
    samples = np.array([0, 1, 2, 98, 1023, 1024, 10**9, 10**15])
    sources, starts = Mixture([sampler], 1337).starts_of(samples)
    assert not sources.any() and np.array_equal(starts, sampler.starts_of(samples))
    assert starts[[0, 1, 2, 3, 6]].tolist() == [281, 171, 881, 963, 624]  # fixed for ever


def test_a_weight_below_the_resolution_is_refused() -> None:
    with pytest.raises(UserError, match=r"data: weight 0.0004 of tiny is too small: shares are multiples of 1/1024"):
        Mixture(of_sizes(50, 50), 5, [(0, [0.9996, 0.0004])], names=["big", "tiny"])
    order = Mixture(of_sizes(50, 50), 5, [(0, [0.999, 0.001])])
    assert order.counts(1024).tolist() == [1023, 1]


@pytest.mark.parametrize("limits", [[math.inf, 500.0, math.inf], [800.0, 500.0, 90.0], [1.0, 2.0, 3000.0]])
def test_limits_against_counting(limits: list[float]) -> None:
    """Each source is used to its limit exactly, in the free order until the first is; then the rest share by weight."""
    free, order = (Mixture(of_sizes(50, 333, 1000), 5, STAGES, limits=lim) for lim in ([], limits))
    end = 9000 if order.end is None else order.end
    sources, numbers = order.locate(np.arange(end))
    counts = np.bincount(sources, minlength=3)
    assert (counts <= limits).all() and np.array_equal(order.counts(end), counts)
    for source in range(3):
        assert np.array_equal(numbers[sources == source], np.arange(counts[source]))
    free_sources, free_numbers = free.locate(np.arange(9000))
    first = int(np.argmax(free_numbers >= np.array(limits)[free_sources]))
    assert np.array_equal(sources[:first], free_sources[:first])
    left = [w if numbers[:first][sources[:first] == s].size < limits[s] else 0.0 for s, w in enumerate(STAGES[0][1])]
    if first + 1024 < min(end, 3000) and len(order.segments) == 4:
        assert np.bincount(sources[first : first + 1024], minlength=3).tolist() == largest_remainder(left)
    if order.end is not None:  # the weights of the stage in which it ends are all of used up sources
        weights = [weights for start, weights in STAGES if start <= order.end][-1]
        assert all(counts[s] == limits[s] for s, weight in enumerate(weights) if weight)


def test_the_data_end_when_all_is_used_up() -> None:
    order = Mixture(of_sizes(50, 20), 5, [(0, [1, 3])], limits=[100.0, 40.0])
    assert order.end == 140 and order.counts(140).tolist() == [100, 40]
    assert Mixture(of_sizes(50), 5, limits=[200.0]).end == 200
    assert Mixture(of_sizes(50, 20), 5, [(0, [1, 3])], limits=[math.inf, 40.0]).end is None


def test_changes_and_epochs() -> None:
    order = Mixture(of_sizes(50, 100), 5, [(0, [3, 1]), (640, [0, 1])], names=["a", "b"], limits=[300.0, math.inf])
    changes = order.changes(samples_per_step=8)
    steps = list(changes)
    assert changes[1] == {"a": 0.75, "b": 0.25} and changes[81] == {"a": 0.0, "b": 1.0}
    assert len(steps) == 3 and order.locate(np.arange(8 * (steps[1] - 1), 8 * steps[1]))[1].max() >= 90
    assert order.counts(640).tolist() == [300, 340] and order.epochs(640).tolist() == [6.0, 3.4]


def test_names_with_commas_equals_signs_and_brackets(tmp_path, monkeypatch):
    """What exists is meant; a weight is a number behind the last "="."""
    monkeypatch.chdir(tmp_path)
    names = ("a,b.jsonl", "lang=zh/x.jsonl", "[v2]/y.jsonl", "c=1.jsonl", "d,e=f.jsonl")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    for name in names:
        assert parse_weights(name, name) == {name: None}
        assert parse_weights(f"{name}=0.5", name) == {name: 0.5}
        assert find_files(name) == [name]
    every = ",".join(names)
    assert list(parse_weights(every, every)) == list(names)
    assert find_files(every) == list(names)
    weighed = "lang=zh/x.jsonl=2,a,b.jsonl=1,[v2]/y.jsonl=3"
    assert parse_weights(weighed, "") == {names[1]: 2.0, names[0]: 1.0, names[2]: 3.0}
    with pytest.raises(UserError, match="weigh all or none"):
        parse_weights("c=1.jsonl=2,a,b.jsonl", "")
    assert find_files("[v2]/*.jsonl") == ["[v2]/y.jsonl"]
    assert find_files("lang=*/*.jsonl") == ["lang=zh/x.jsonl"]
    assert parse_weights("lang=*/*.jsonl=2", "") == {"lang=*/*.jsonl": 2.0}
    (tmp_path / "[v2]" / "dataset_info.json").write_text("{}")
    assert find_files("[v2]") == ["[v2]/y.jsonl"]
