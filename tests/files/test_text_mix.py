"""text_mix.py: whose turn it is, by hand."""

import random
from collections import Counter

from groundup.files.text_mix import mix_texts


def test_a_mixture_follows_its_weights(capsys):
    """By every moment each source has given its share of bytes, up to one text; the order of a source is kept."""
    rng = random.Random(14)
    sources = [[f"{name}{i} " + "甲" * rng.randrange(300) for i in range(5000)] for name in "abc"]
    weights = [0.6, 0.3, 0.1]
    mixed = list(mix_texts(list(zip("xyz", sources, weights, strict=True)), 400_000))
    given = [0, 0, 0]
    for text in mixed:
        given["abc".index(text[0])] += len(text.encode())
        assert all(abs(g - w * sum(given)) < 1000 for g, w in zip(given, weights, strict=True))
    assert 400_000 <= sum(given) < 401_000
    for name, texts in zip("abc", sources, strict=True):
        mine = [text for text in mixed if text[0] == name]
        assert mine == texts[: len(mine)]
    assert mixed == list(mix_texts(list(zip("xyz", sources, weights, strict=True)), 400_000))
    assert f"tokenizer: x: {given[0] / 1e6:.2f} MB" in capsys.readouterr().out


def test_a_mixture_goes_on_when_a_source_ends(capsys):
    long_and_short = ["b" * 200_000, *["b" * 100] * 500]
    sources = [("x", iter(["a" * 100] * 10), 1.0), ("y", iter(long_and_short), 1.0), ("z", ["c" * 100] * 900, 3.0)]
    mixed = list(mix_texts(sources, 10**9))
    sizes = Counter(text[0] for text in mixed)
    assert sizes == {"a": 10, "b": 501, "c": 900} and max(map(len, mixed)) == 100_000
    out = capsys.readouterr().out
    assert out.count("read to its end") == 3 and "501 texts, 1 of them cut to 100,000 characters" in out
