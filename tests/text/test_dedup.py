"""dedup.py: against regex, datasketch, brute force over all pairs, and theory."""

import json
import random
import subprocess
import sys
import tracemalloc
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import regex
from datasketch import LeanMinHash, MinHash, MinHashLSH

from groundup.text import dedup
from groundup.text.dedup import near_duplicates
from groundup.text.unit import Item

# marks of length and voice are of both Hiragana and Katakana, radicals are symbols to Unicode: one character each
SINGLE = r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
SINGLE += r"\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\u3099\u309a\u30fc\uff70\uff9e\uff9f]"
UNIT = regex.compile(rf"(?=[\p{{L}}\p{{M}}\p{{N}}\u2e80-\u2fd5]){SINGLE}|(?:(?!{SINGLE})[\p{{L}}\p{{M}}\p{{N}}])+")
WORDS = [f"w{i}" for i in range(3000)]
HAN = [chr(0x4E00 + i) for i in range(3000)]
EDGE_TEXTS = ["", " \n!?。", "a", "甲", "a b c d", "甲乙丙丁", "a b c d e", "甲乙丙丁戊", "a b c d e f", "同" * 50]


def half_width(text: str) -> str:
    """Full width forms as half width, without a change of length."""
    return "".join(unicodedata.normalize("NFKC", c) if "\uff01" <= c <= "\uff5e" else c for c in text)


def unit_strings(text: str) -> list[str]:
    return [match.group() for match in UNIT.finditer(half_width(text))]


def folded(strings: list[str]) -> list[str]:
    return ["".join(c.lower() if len(c.lower()) == 1 else c for c in string) for string in strings]


def english(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


def chinese(rng: random.Random, n: int) -> str:
    return "".join(rng.choices(HAN, k=n))


def signatures_of(texts: list[str]) -> np.ndarray:
    return dedup.signatures(dedup.units(texts))


def noisy_copies(n: int, seed: int, columns: int = 128) -> np.ndarray:
    """Signatures, half of them copies of an earlier one with up to 40 % of the values changed; some without units."""
    rng = np.random.default_rng(seed)
    result = rng.integers(0, 2**32 - 1, (n, columns), dtype=np.uint32)
    for i in range(1, n):
        if rng.random() < 0.5:
            fresh, result[i] = result[i].copy(), result[rng.integers(i)]
            changed = rng.random(columns) < rng.uniform(0, 0.4)
            result[i, changed] = fresh[changed]
    result[rng.random(n) < 0.02] = 2**32 - 1
    return result


def survivors_by_brute_force(signatures: np.ndarray, threshold: float, bands: int, rows: int) -> dict[int, int]:
    """{dropped: partner} by the definition, over all pairs."""
    kept: list[int] = []
    dropped = {}
    for i, signature in enumerate(signatures):
        same = signatures[kept] == signature
        met = same[:, : bands * rows].reshape(len(kept), bands, rows).all(axis=2).any(axis=1)
        similarity = {kept[k]: same[k].mean() for k in np.flatnonzero(met)}
        best = max(similarity, key=lambda other: (similarity[other], -other), default=None)
        if min(signature) == 2**32 - 1:
            continue
        if best is not None and similarity[best] >= threshold:
            dropped[i] = best
        else:
            kept.append(i)
    return dropped


class DatasketchBuckets:
    """Kept documents in datasketch's MinHashLSH, in place of `dedup.Buckets`."""

    def __init__(self, signatures: np.ndarray, bands: int, rows: int) -> None:
        # params: what datasketch would choose for a threshold finds 40 % of the pairs at 0.8
        self.index = MinHashLSH(num_perm=signatures.shape[1], params=(bands, rows))
        self.sketch = lambda i: LeanMinHash(seed=1, hashvalues=signatures[i], scheme="affine32")
        self.documents = np.flatnonzero((signatures[:, : bands * rows] != dedup.NO_UNITS).any(axis=1))
        self.capped = 0

    def kept_beside(self, i: int) -> np.ndarray:
        return np.array(sorted(self.index.query(self.sketch(i))), np.int64)

    def keep(self, i: int) -> None:
        self.index.insert(i, self.sketch(i), check_duplication=False)


def by_datasketch(*arguments) -> dedup.NearDuplicates:
    """`near_duplicates` with the index of datasketch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "Buckets", DatasketchBuckets)
        return near_duplicates(*arguments)


# ---- units ----------------------------------------------------------------------------------------------------


def test_every_code_point_is_classed_as_unicode_says() -> None:
    characters = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) != "Cn" and not 0xD800 <= i < 0xE000]
    doubled = [c + c for c in characters]  # of a separator 0 units, of a character that is a unit of its own 2, else 1
    counts = np.diff(dedup.units(doubled).starts)
    places = [match.start() for match in UNIT.finditer(half_width("\n".join(doubled)))]  # three characters each
    expected = np.bincount(np.array(places) // 3, minlength=len(doubled)).tolist()
    wrong = [(hex(ord(c)), e) for c, e, n in zip(characters, expected, counts.tolist(), strict=True) if e != n]
    assert not wrong, wrong[:20]


@pytest.mark.parametrize("size", [20, 300, 70_000])
def test_units_and_their_places_equal_a_regular_expression(size: int) -> None:
    rng = random.Random(size)
    alphabet = list("aZé1٣_-' \n\u3000．，Ａｚ９ßİΣςが゙ガｶﾞー々〇甲乙𠀀𪜀한국ไทย\u0301\u200d🙂ﬁ\ud800\x00⺮")
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(size))) for _ in range(max(3, 60_000 // size))]
    found = dedup.units(texts)
    assert len(found.starts) == len(texts) + 1 and found.hashes.dtype == np.uint64
    hash_of: dict[str, int] = {}
    for t, text in enumerate(texts):
        (begin, end), plain = found.starts[t : t + 2], half_width(text)
        places = zip(found.begins[begin:end].tolist(), found.ends[begin:end].tolist(), strict=True)
        strings = [plain[b:e] for b, e in places]
        assert strings == unit_strings(text)
        for string, h in zip(folded(strings), found.hashes[begin:end].tolist(), strict=True):
            assert hash_of.setdefault(string, h) == h
    assert len(set(hash_of.values())) == len(hash_of)


def test_units_do_not_depend_on_the_batch_and_long_texts_work() -> None:
    rng = random.Random(3)
    long = " ".join("x" * rng.randrange(1, 30_000) for _ in range(40)) + chinese(rng, 100_000)
    assert len(dedup.units([long]).hashes) == 100_040
    texts = [*EDGE_TEXTS, english(rng, 30_000), long, *EDGE_TEXTS, chinese(rng, 65_537), "a b c"]
    together = dedup.units(texts)
    signatures = dedup.signatures(together)
    for t, text in enumerate(texts):
        alone, part = dedup.units([text]), slice(*together.starts[t : t + 2])
        for k in (0, 2, 3):
            assert np.array_equal(alone[k], together[k][part])
        assert np.array_equal(dedup.signatures(alone)[0], signatures[t])
    assert len(dedup.units([]).hashes) == 0 and signatures_of([]).shape == (0, 128)


def test_a_run_without_any_break_is_cut_and_nothing_is_lost() -> None:
    found = dedup.units(["。" + "a" * 1_000_000])
    assert found.begins[0] == 1 and found.ends[-1] == 1_000_001
    assert np.array_equal(found.begins[1:], found.ends[:-1])
    later = dedup.units(["甲" * 1000, "b" * 1000 + " " + "a" * 1_000_000])  # cut at the same places
    assert np.array_equal(later.hashes[1001:], found.hashes)


def test_memory_does_not_grow_with_the_text() -> None:
    text = english(random.Random(0), 100_000) + "\n"
    signatures_of([text])
    tracemalloc.start()
    found = dedup.units([text * 10])  # 6 MB
    held = sum(column.nbytes for column in found)
    tracemalloc.reset_peak()
    dedup.signatures(found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.hashes) == 1_000_000 and peak - held < 2**24


def test_importing_loads_neither_datasketch_nor_torch() -> None:
    code = "import sys; from groundup.text import dedup; print({'datasketch', 'scipy', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.stdout.strip() == "set()", run.stderr


# ---- exact ----------------------------------------------------------------------------------------------------


def test_exact_key_ignores_amounts_of_white_space_case_and_composition_only() -> None:
    same = ["Caf\u00e9, ok.", "cafe\u0301,  OK.", "\u3000CAF\u00c9,\n\nok.\t\u00a0"]
    chinese = ["中文，一样 a b", "中 文，\n一样a  b"]
    assert len({dedup.exact_key(text) for text in chinese}) == 1
    assert len({dedup.exact_key(text) for text in same}) == 1
    different = ["Café ok", "Cafe, ok.", "Ｃafé, ok.", "", "中文，一样。", "中文一样", "中文，一样", "\ud800"]
    assert len({dedup.exact_key(text) for text in [*different, same[0]]}) == len(different) + 1
    assert all(len(dedup.exact_key(text)) == 16 for text in different)


def test_exact_key_keeps_code_of_other_indentation_and_other_words_apart() -> None:
    loops = ["for x in y:\n    a()\n    b()", "for x in y:\n    a()\nb()", "for x in y:\n    a()\n  b()"]
    rows = [Item("", 0, row=json.dumps({"messages": [loop]})).content for loop in loops]
    # a line end is no backslash with an n, of a program or of LaTeX
    written = ['print("a\nb")', r'print("a\nb")', "Let u be small.", r"Let \nu be small.", r"Let \tu be small."]
    apart = [*loops, "1 23 4", "12 3 4", "ab", "a b", *rows, *written]
    assert len({dedup.exact_key(text) for text in apart}) == len(apart)
    same = [loops[0], "for  x in y:\n\n    a()  \n    b()\n", loops[0].upper()]
    assert len({dedup.exact_key(text) for text in same}) == 1


def test_near_copies_of_thai_are_found() -> None:
    """Thai puts no spaces between words: a sentence would be one unit."""
    rng = random.Random(1)
    letters = [chr(code) for code in range(0xE01, 0xE2F)]
    words = ["".join(rng.choices(letters, k=rng.randrange(2, 7))) for _ in range(800)]
    texts = ["".join(rng.choices(words, k=120)) for _ in range(40)]
    edited = [text[:200] + rng.choice(words) + text[205:] for text in texts]
    found = near_duplicates(dedup.signatures(dedup.units([*texts, *edited])), 0.8, 16, 8).dropped
    assert set(range(40, 80)) == set(np.flatnonzero(found).tolist() if found.dtype == bool else found.tolist())


def test_first_copies_equals_a_dictionary() -> None:
    rng = np.random.default_rng(0)
    for n, values in ((0, 1), (1, 1), (50, 1), (2000, 40), (2000, 10**6)):
        keys = rng.integers(0, values, (n, 2)).astype(np.uint64) * np.uint64(2**44 + 1)
        seen: dict[tuple, int] = {}
        expected = [seen.setdefault(tuple(key), i) for i, key in enumerate(keys.tolist())]
        found = dedup.first_copies(keys)
        assert found.dtype == np.int64 and found.tolist() == expected
    keys = np.frombuffer(b"".join(map(dedup.exact_key, ["x", "y", "X ", "z"])), np.uint64).reshape(-1, 2)
    assert dedup.first_copies(keys).tolist() == [0, 1, 0, 3]


# ---- signatures -----------------------------------------------------------------------------------------------


def elements(hashes: list[int]) -> list[int]:
    """Hashes of 5 consecutive units, of all units where there are fewer, in Python's own arithmetic."""
    found, length = [], min(dedup.SHINGLE, len(hashes))
    for i in range(len(hashes) - length + 1 if hashes else 0):
        h = 0
        for unit in hashes[i : i + length]:
            h = (h * int(dedup.UNIT_FACTOR) + unit) % 2**64
        found.append(h >> 32)
    return found


def test_signatures_equal_datasketch() -> None:
    rng = random.Random(128)
    texts = [english(rng, rng.choice([5, 40, 300])) for _ in range(60)]
    texts += [chinese(rng, rng.choice([5, 40, 600])) for _ in range(60)] + EDGE_TEXTS + [english(rng, 70_000)]
    rng.shuffle(texts)
    found = dedup.units(texts)
    signatures = dedup.signatures(found)
    assert signatures.dtype == np.uint32 and signatures.shape == (len(texts), 128)
    for t, signature in enumerate(signatures):
        oracle = MinHash(num_perm=128, seed=1, hashfunc=lambda element: element, scheme="affine32")
        if these := elements(found.hashes[slice(*found.starts[t : t + 2])].tolist()):
            oracle.update_batch(these)
        assert np.array_equal(oracle.hashvalues, signature), texts[t][:50]


def test_chance_of_meeting_and_estimate_follow_theory() -> None:
    """2000 pairs of sets of known similarity s: they meet with 1 - (1 - s**8)**16, their signatures agree in s."""
    rng = np.random.default_rng(1)
    pairs, union = 400, 300
    for common in (150, 195, 225, 240, 264):
        s = common / union
        values = rng.integers(0, 2**32, (pairs, union), dtype=np.uint32)
        half = (union - common) // 2
        firsts, seconds = values[:, : common + half], np.hstack([values[:, :common], values[:, common + half :]])
        sets = [row for both in zip(firsts, seconds, strict=True) for row in both]
        begins = np.cumsum([0] + [len(row) for row in sets])[:-1]
        signatures = dedup.least(np.concatenate(sets), begins)
        met = near_duplicates(signatures, 1e-9, 16, 8)
        assert np.array_equal(met.dropped, met.partner + 1)  # none met another pair's
        chance = 1 - (1 - s**8) ** 16
        assert abs(len(met.dropped) / pairs - chance) < 4 * (chance * (1 - chance) / pairs) ** 0.5, s
        estimate = (signatures[::2] == signatures[1::2]).mean(axis=1)
        sigma = (s * (1 - s) / 128) ** 0.5
        assert abs(estimate.mean() - s) < 4 * sigma / pairs**0.5 and 0.8 < estimate.std() / sigma < 1.2


# ---- near duplicates ------------------------------------------------------------------------------------------


def test_bands() -> None:
    assert [dedup.bands_for(t) for t in (0.8, 0.7, 0.6)] == [(16, 8), (21, 6), (25, 5)]
    for percent in range(1, 101):
        bands, rows = dedup.bands_for(percent / 100)
        assert bands * rows <= 128
        assert 1 - (1 - (percent / 100) ** rows) ** bands > 0.72  # most pairs right at the threshold meet


@pytest.mark.parametrize("threshold, bands, rows", [(0.8, 16, 8), (0.7, 21, 6), (0.6, 25, 5), (0.5, 128, 1)])
def test_survivors_equal_brute_force_and_datasketch(threshold: float, bands: int, rows: int) -> None:
    signatures = noisy_copies(400 if rows > 1 else 200, seed=rows)
    expected = survivors_by_brute_force(signatures, threshold, bands, rows)
    assert len(expected) > 40
    for find in (near_duplicates, by_datasketch):
        found = find(signatures, threshold, bands, rows)
        assert dict(zip(found.dropped.tolist(), found.partner.tolist(), strict=True)) == expected, find
        assert found.dropped.dtype == found.partner.dtype == np.int64 and found.similarity.dtype == np.float32
        similarity = [(signatures[i] == signatures[j]).mean() for i, j in expected.items()]
        assert np.allclose(found.similarity, similarity) and found.capped == 0


def test_the_same_texts_survive_as_with_datasketch() -> None:
    rng = random.Random(5)
    texts = []
    for _ in range(500):
        if texts and rng.random() < 0.4:
            copy = list(rng.choice(texts))
            for _ in range(rng.randrange(1 + len(copy) // 40)):
                copy[rng.randrange(len(copy))] = rng.choice("xyz甲乙丙 ")
            texts.append("".join(copy))
        else:
            texts.append(english(rng, 60) if rng.random() < 0.5 else chinese(rng, 150))
    signatures = signatures_of(texts)
    ours, theirs = near_duplicates(signatures, 0.8, 16, 8), by_datasketch(signatures, 0.8, 16, 8)
    assert len(ours.dropped) > 80
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_every_dropped_document_has_a_kept_partner_and_kept_ones_differ() -> None:
    signatures = noisy_copies(600, seed=9)
    found = near_duplicates(signatures, 0.8, 16, 8)
    dropped = set(found.dropped.tolist())
    assert not dropped & set(found.partner.tolist()) and (found.partner < found.dropped).all()
    assert (found.similarity >= 0.8).all() and np.array_equal(found.dropped, np.sort(found.dropped))
    kept = [i for i in range(len(signatures)) if i not in dropped and signatures[i].min() < 2**32 - 1]
    for place, i in enumerate(kept):
        same = signatures[kept[:place]] == signatures[i]
        meets = same.reshape(-1, 16, 8).all(axis=2).any(axis=1)
        assert not (meets & (same.mean(axis=1) >= 0.8)).any()


def test_appended_documents_do_not_change_what_happened_before() -> None:
    signatures = noisy_copies(1200, seed=2)
    every = near_duplicates(signatures, 0.8, 16, 8)
    for n in (0, 1, 100, 777, 1199):
        some = near_duplicates(signatures[:n], 0.8, 16, 8)
        m = len(some.dropped)
        assert (every.dropped[m:] >= n).all()
        assert all(np.array_equal(a, b[:m]) for a, b in zip(some[:3], every[:3], strict=True))


def test_a_chain_of_near_copies_does_not_drop_its_far_end() -> None:
    a = np.arange(128, dtype=np.uint32)
    b, c = a.copy(), a.copy()
    b[:20] += 1000  # a and b share 108 of 128, b and c 108, a and c 88
    c[:40] += 1000
    found = near_duplicates(np.stack([a, b, c]), 0.8, 16, 8)
    assert found.dropped.tolist() == [1] and found.partner.tolist() == [0]
    assert near_duplicates(np.stack([b, a, c]), 0.8, 16, 8).dropped.tolist() == [1, 2]
    assert near_duplicates(np.stack([a, b, c]), 108 / 128, 16, 8).dropped.tolist() == [1]  # the threshold itself counts
    assert near_duplicates(np.stack([a, b, c]), 109 / 128, 16, 8).dropped.tolist() == []


def test_many_identical_documents(tmp_path: Path) -> None:
    signatures = np.tile(noisy_copies(1, seed=0), (3000, 1))
    np.save(tmp_path / "s.npy", signatures)
    found = near_duplicates(np.load(tmp_path / "s.npy", mmap_mode="r"), 0.8, 16, 8)
    assert np.array_equal(found.dropped, np.arange(1, 3000)) and not found.partner.any() and found.capped == 0
    nothing = np.full((1000, 128), 2**32 - 1, np.uint32)
    assert len(near_duplicates(nothing, 0.8, 16, 8).dropped) == 0


def test_a_bucket_of_many_different_documents_is_capped() -> None:
    signatures = np.random.default_rng(0).integers(0, 2**32 - 1, (3000, 128), dtype=np.uint32)
    signatures[:, :8] = 7  # all meet in the first band
    signatures = np.vstack([signatures, signatures[[3, 2900]]])
    index = dedup.Buckets(signatures, 16, 8)
    compared = []
    index_beside = index.kept_beside
    for i in range(len(signatures)):
        compared.append(len(index_beside(i)))
        index.keep(i)
    assert max(compared) <= dedup.COMPARED + 1  # and one of the copy's other bands
    found = near_duplicates(signatures, 0.8, 16, 8)
    assert found.dropped.tolist() == [3000, 3001] and found.partner.tolist() == [3, 2900]
    assert found.capped == 3000 - dedup.COMPARED


@pytest.mark.parametrize("kind", ["distinct", "pairs", "identical"])
def test_index_memory_per_document(kind: str) -> None:
    n = 30_000
    signatures = np.random.default_rng(0).integers(0, 2**32 - 1, (n, 128), dtype=np.uint32)
    if kind == "pairs":
        signatures[n // 2 :] = signatures[: n // 2]
    elif kind == "identical":
        signatures[:] = signatures[0]
    tracemalloc.start()
    if kind == "distinct":
        near_duplicates(signatures, 0.8, 16, 8)
    else:
        dedup.Buckets(signatures, 16, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak / n < 300  # 30 to 60 bytes of it for a slice of the signatures


# ---- texts ----------------------------------------------------------------------------------------------------


def dropped_texts(texts: list[str]) -> list[int]:
    return near_duplicates(signatures_of(texts), 0.8, 16, 8).dropped.tolist()


def test_near_copies_are_found_and_what_only_looks_alike_is_not() -> None:
    rng = random.Random(11)
    for text in (english(rng, 500), chinese(rng, 800), english(rng, 200) + chinese(rng, 400)):
        parts = text.split(" ") if " " in text and not regex.search(r"\p{Han}", text) else list(text)
        glue = " " if len(parts) < len(text) else ""
        edited = parts.copy()
        for place in rng.sample(range(len(parts)), max(1, len(parts) // 100)):
            edited[place] = "改"
        one = [*parts[:100], "changed", *parts[101:]]
        shuffled = rng.sample(parts, len(parts))
        layout = text.upper().replace(" ", "  \n")
        assert dropped_texts([text, glue.join(edited), glue.join(one), layout]) == [1, 2, 3]
        assert dropped_texts([text, glue.join(shuffled), text[: len(text) // 2]]) == []


def test_a_template_with_other_content_is_no_copy() -> None:
    rng = random.Random(12)
    forms = ["病历摘要。姓名：{}。主诉：{}。诊断：{}。处理意见：{}。以上内容仅供参考，请遵医嘱。".format(
        *(chinese(rng, 20) for _ in range(4))) for _ in range(50)]  # fmt: skip
    assert dropped_texts(forms) == []
    readmes = [f"Module {english(rng, 3)}\n\nUsage: {english(rng, 30)}\nReturns: {english(rng, 10)}" for _ in range(50)]
    assert dropped_texts(readmes) == []


def test_texts_without_units_are_never_copies_and_short_ones_only_of_the_same() -> None:
    assert dropped_texts(["", "。！", "  ", "...", ""]) == []
    assert dropped_texts(["甲乙", "乙甲", "甲，乙", "甲", "甲乙丙", "甲乙丙丁", "甲乙丙丁戊", "甲 乙"]) == [2, 7]
