"""NgramModel of quality.py: against counts in dictionaries."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from groundup.text.quality import NgramModel


def brute_difficulty(texts: list[list[int]], ids: list[int], order: int) -> float:
    counts = [Counter(tuple(t[i : i + n]) for t in texts for i in range(len(t) - n + 1)) for n in (1, 2, 3)]
    n_tokens, n_different = sum(map(len, texts)), len(counts[0])
    bits = 0.0
    for i, token in enumerate(ids):
        p = (counts[0][token,] + 1) / (n_tokens + n_different + 1)
        for n in range(2, min(order, i + 1) + 1):
            gram = tuple(ids[i - n + 1 : i + 1])
            if context := counts[n - 2][gram[:-1]]:
                p = 0.7 * counts[n - 1][gram] / context + 0.3 * p
        bits -= math.log2(p)
    return bits / len(ids)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_difficulty_against_dictionaries(order: int) -> None:
    rng = random.Random(order)
    texts = [rng.choices(range(7), k=rng.randint(1, 50)) for _ in range(20)]
    one = NgramModel(order, 16)
    for ids in texts:
        one.add(np.array(ids, np.uint16))
    assert one.n_different == 7
    for ids in [*texts[:5], rng.choices(range(12), k=40), [3], [60_000]]:
        expected = brute_difficulty(texts, ids, order)
        assert one.difficulty(np.array(ids)) == pytest.approx(expected)
        assert one.difficulty(np.array(ids, np.uint32)) == pytest.approx(expected)
    assert one.difficulty(np.array([], np.uint16)) == 0.0


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_text_that_was_added_is_judged_by_the_others(order: int) -> None:
    rng = random.Random(order)
    texts = [rng.choices(range(9), k=rng.randint(5, 50)) for _ in range(12)]
    model = NgramModel(order, 16)
    for ids in texts:
        model.add(np.array(ids))
    for i, ids in enumerate(texts):
        others = texts[:i] + texts[i + 1 :]
        assert len({token for text in others for token in text}) == 9  # as many different ones as with this text
        assert model.difficulty(np.array(ids), added=True) == pytest.approx(brute_difficulty(others, ids, order))


def test_probabilities_of_all_tokens_are_at_most_one() -> None:
    model = NgramModel(3, 16)
    model.add(np.array([1, 2, 3, 1, 2, 4, 1, 2, 3]))
    total = sum(2 ** -(3 * model.difficulty(np.array([1, 2, token]))) for token in range(50))
    start = 2 ** -(2 * model.difficulty(np.array([1, 2])))
    assert 0.9 < total / start < 1.5  # tokens never seen share one count
