"""Which documents are in which split, and which of a text are cut into the splits."""

import math

import numpy as np
import pytest

from groundup.files.splits import FEW, assign, least_to_cut, split_of, split_position

BOOKS = [50_000, 40_000, 30_000]


@pytest.mark.parametrize(
    ("sizes", "least"),
    [
        ([1000] * FEW, 0),  # few: all are cut
        ([1000] * (FEW + 1), math.inf),
        ([1000] * 20 + [2000] * 30, math.inf),  # none is much longer than the others
        (BOOKS, 0),
        ([9000, 8000, 7000, *[50] * 37], 7000),  # 40, whose ends would be short
        ([*BOOKS, *[50] * 500], 30_000),
        ([*BOOKS, *[500] * 200], 30_000),
        ([*BOOKS, *[500] * 250], math.inf),  # rows are more than half of the text
        ([900] * 3 + [5] * 100, 900),  # up to ten: their ends are made longer
        ([900] * 12 + [1] * 100, math.inf),  # more, and their ends would be a few bytes
        ([], math.inf),
    ],
)
def test_a_few_long_documents_are_cut_whatever_stands_beside_them(sizes, least):
    sizes = np.array(sizes, np.int64)
    for given in (sizes, np.sort(sizes)[-FEW:]):  # on a cluster only the longest are known
        assert least_to_cut(given, len(sizes), int(sizes.sum()), 0.1) == least
        assert least_to_cut(given, len(sizes), int(sizes.sum()), 0.0) == math.inf  # no val is wanted, or a fold


def positions_of(n: int) -> np.ndarray:
    return np.array([split_position(f"text {k}".encode()) for k in range(n)], np.uint64)


@pytest.mark.parametrize(("before", "again"), [(0.05, 0.02), (0.05, 0.05), (0.3, 0.1)])
def test_what_was_split_before_is_split_again(before, again):
    """The rows of val are the lowest hashes; those that train keeps have none of them."""
    every = positions_of(1200)
    positions = every[split_of(every, before) == 0]
    n = len(positions)
    assert not split_of(positions, again).any()
    splits, moved = assign(positions, again)
    assert not moved and (splits == 1).sum() == round(again * n)
    assert positions[splits == 1].max() < positions[splits == 0].min()
    # with a test split, which is the lowest: it alone would be empty, or both would
    splits, moved = assign(positions, 0.1, again)
    sizes = np.bincount(splits, minlength=3).tolist()
    assert not moved and sizes[1:] == [round((again + 0.1) * n) - sizes[2], round(again * n)]
    assert positions[splits == 2].max() < positions[splits == 1].min()
    # again and again
    for _ in range(5):
        positions = positions[assign(positions, again)[0] == 0]
        n_val, expected = (assign(positions, again)[0] == 1).sum(), again * len(positions)
        assert abs(n_val - expected) <= 0.5 if expected >= 8 else n_val == 1


def test_copies_stay_together_when_it_is_split_again():
    every = positions_of(1000)
    positions = every[split_of(every, 0.1) == 0]
    copies = np.random.default_rng(0).permutation(np.repeat(positions, 3))
    splits, moved = assign(copies, 0.1)
    assert not moved and abs((splits == 1).sum() - 0.1 * len(copies)) <= 1.5
    assert not set(copies[splits == 1].tolist()) & set(copies[splits == 0].tolist())
    # 300 rows of three prompts: that none is picked may be chance, as before
    splits, moved = assign(np.repeat(np.sort(positions)[-3:], 100), 0.1, by_prompt=True)
    assert moved and (splits == 1).sum() == 100


def test_folds_of_what_was_split_before_are_all_rows_once():
    every = positions_of(1000)
    positions = every[split_of(every, 0.25) == 0]
    folds = [assign(positions, 0.0, fold=f"{i}/5")[0] == 1 for i in range(1, 6)]
    assert (sum(fold.astype(int) for fold in folds) == 1).all()
    assert {int(fold.sum()) for fold in folds} <= {len(positions) // 5, len(positions) // 5 + 1}


def test_the_hash_alone_decides_in_all_other_data():
    rng = np.random.default_rng(1)
    for n in (2, 5, 79, 80, 1000):
        for fractions in ((0.1,), (0.1, 0.1), (0.0, 0.1), (0.02,), (0.0,)):
            positions = rng.integers(2**64, size=n, dtype=np.uint64)
            splits, moved = assign(positions, *fractions)
            assert moved or (splits == split_of(positions, *fractions)).all()
    used = positions_of(80)
    used = used[split_of(used, 0.1) == 0]  # fewer than 80: that 10 % is none may be chance
    splits, moved = assign(used, 0.1)
    assert moved and (splits == 1).sum() == 1 and splits[used.argmin()] == 1
