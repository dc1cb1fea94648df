"""Which documents of a text are cut into the splits."""

import math

import numpy as np
import pytest

from groundup.files.splits import FEW, least_to_cut

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
