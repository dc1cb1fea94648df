"""bpe.py against byte pair encoding by its definition, and its patterns against three libraries' engines."""

import itertools
import random
import time
from collections import Counter

import pytest
import regex
import tiktoken
import tokenizers

from groundup.demo.python_docs import chinese_sample
from groundup.tokens import bpe as bpe_module
from groundup.tokens import engines
from groundup.tokens.bpe import (
    PATTERNS,
    SAFE_CUT,
    blocks,
    characters_first,
    count_chunks,
    learn_in_python,
    learn_merges,
    train_bpe,
)
from groundup.tokens.training import train
from tokenizer import Tokenizer

ENGLISH = """The generator is initialised from a seed; the same seed gives the same numbers, so that a run can be
repeated. It's not for secrets: they're what the "secrets" module is for, and we'll say so again. I'd read it twice.
There are 12 functions, 3 classes and 1024 lines; in 2019 there were 845.  The older ones don't change, the new do.
"""
CHINESE = """学而时习之，不亦说乎？有朋自远方来，不亦乐乎？人不知而不愠，不亦君子乎？
床前明月光，疑是地上霜。举头望明月，低头思故乡。白日依山尽，黄河入海流。欲穷千里目，更上一层楼。
语言模型学习预测下一个词：先读大量的文本，再读对话。“你好！”他说；我们有3个模型、12层。
"""
CODE = """def tokens(self, text: str) -> list[int]:
    \"\"\"Ids of a text.\"\"\"
    if not text:
        return []
\tids = [self.vocab[word] for word in text.split(" ")]  # 0 <= id < len(self)
    return ids
"""
CORPUS = [ENGLISH, CHINESE, CODE, ENGLISH.upper(), CHINESE.replace("，", ","), CODE.replace("    ", "\t")]

# What texts are made of: whitespace of all kinds, contractions with letters that fold to "s" and "k", combining marks,
# other scripts, private use, text that looks like special tokens.
PARTS = [
    *"aZ19 .,!?_-=/\\'\"<|>(){}\n\r\t\x00\x0b\x0c\x1c\x7f\x85\u00a0\u2028\u3000\u200b\ufeff\ufffd",
    *("  ", "    ", "\r\n", "\n\n", " \n ", "the ", " model", "don't", "'S", "'\u017f", "\u212a", "e\u0301", "\u00e9"),
    *("你", "好", "学习", "，", "。", "𠮷", "😀", "👩‍👩‍👧", "हिन्दी", "שלום", "مرحبا", "ไทย", "한국어"),
    *("١٢", "½", "ⅷ", "\ue000"),
    *("<|endoftext|>", "<|im_end|>", "<|im_start|>tool\n", "<|im_", "end|>", "<s>", "</s>", "<unk>", "<0x41>"),
]


def random_texts(n: int, seed: int, longest: int = 40) -> list[str]:
    """Texts of parts, of words of the corpus and of any characters, without surrogates."""
    rng = random.Random(seed)
    words = "".join(CORPUS).split(" ")

    def part() -> str:
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(PARTS)
        if kind < 0.85:
            return rng.choice(words)
        return chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000), rng.randrange(0x3000, 0xA000))))

    return ["".join(part() for _ in range(rng.randrange(longest))) for _ in range(n)]


TEXTS = [*CORPUS, "", " ", "\n", *random_texts(300, seed=1)]


# ---- the trainer -----------------------------------------------------------------------------


def brute_force(counts: dict[bytes, int], max_merges: int) -> list[tuple[int, int]]:
    """Byte pair encoding by its definition: count everything again for every merge."""
    words = [(list(chunk), count) for chunk, count in counts.items()]
    merges = []
    while len(merges) < max_merges:
        pairs = Counter()
        for ids, count in words:
            for pair in zip(ids, ids[1:], strict=False):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        words = [(replaced(ids, best, 256 + len(merges)), count) for ids, count in words]
        merges.append(best)
    return merges


def replaced(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    out, i = [], 0
    while i < len(ids):
        found = tuple(ids[i : i + 2]) == pair
        out.append(new if found else ids[i])
        i += 2 if found else 1
    return out


def random_counts(rng: random.Random, alphabet: bytes, n_chunks: int, longest: int) -> dict[bytes, int]:
    chunks = [bytes(rng.choices(alphabet, k=rng.randint(1, longest))) for _ in range(n_chunks)]
    return {chunk: rng.randint(1, 5) for chunk in chunks}


@pytest.mark.parametrize("alphabet", [b"a", b"ab", b"abc", b"abcdefgh\xe4\xbd\xa0"])
def test_trainer_is_brute_force(alphabet: bytes):
    """Small alphabets are full of the hard cases: aaaa, abab, a pair that touches itself, ties."""
    rng = random.Random(len(alphabet))
    for _ in range(60):
        counts = random_counts(rng, alphabet, n_chunks=rng.randint(1, 12), longest=rng.choice((4, 12, 40)))
        max_merges = rng.choice((1, 5, 60))
        want = brute_force(counts, max_merges)
        assert train_bpe(counts, max_merges) == want, counts
        assert learn_in_python(list(counts), list(counts.values()), max_merges, 256) == want, counts


def test_training_goes_on_from_any_tokens():
    """After 100 merges the chunks hold tokens above 255; the next 100 are those of an uninterrupted training."""
    counts = count_chunks(CORPUS)
    whole = train_bpe(counts, 200)
    ids = [list(chunk) for chunk in counts]
    for new, pair in enumerate(whole[:100], start=256):
        ids = [replaced(chunk, pair, new) for chunk in ids]
    assert learn_merges(ids, list(counts.values()), 100, first_id=356) == whole[100:]
    assert learn_in_python(ids, list(counts.values()), 100, first_id=356) == whole[100:]


def test_c_and_python_learn_the_same_from_real_text():
    """All merges there are, of characters that count before words, too: some of these counts need 64 bits."""
    counts = count_chunks(chinese_sample(), PATTERNS["zh"])
    counts = characters_first({chunk: count << 20 for chunk, count in counts.items()}, 2000)
    merges = train_bpe(counts, 20_000)
    assert len(merges) > 4000
    assert merges == learn_in_python(list(counts), list(counts.values()), 20_000, first_id=256)


def test_trainer_is_brute_force_on_text():
    counts = count_chunks(CORPUS)
    assert train_bpe(counts, 200) == brute_force(counts, 200)


def test_a_smaller_vocabulary_is_a_prefix():
    counts = count_chunks(CORPUS)
    whole = train_bpe(counts, 300)
    assert all(train_bpe(counts, n) == whole[:n] for n in (0, 1, 17, 150))


def test_order_of_documents_does_not_matter():
    counts = count_chunks(CORPUS)
    assert count_chunks(CORPUS[::-1]) == counts
    assert train_bpe(dict(reversed(counts.items())), 300) == train_bpe(counts, 300)


def test_trainer_stops_when_every_pair_is_rare():
    assert train_bpe({}, 10) == []
    assert train_bpe({b"abc": 1, b"d": 9}, 10) == []
    assert train_bpe({b"ab": 2, b"abc": 1}, 10) == [(97, 98)]  # ab three times, then abc once
    assert train_bpe({b"aaaaa": 1}, 10) == [(97, 97)]  # aaaa a, as [aa][aa]a: no pair twice


def test_hand_worked_example():
    """Wikipedia's "aaabdaaabac": Z=aa, then a tie of Za and ab (2 each): the smaller pair of ids, then Zab."""
    a, b = 97, 98
    assert train_bpe({b"aaabdaaabac": 1}, 10) == [(a, a), (a, b), (256, 257)]


@pytest.mark.parametrize("name", PATTERNS)
def test_chunks_are_the_matches_of_the_pattern(monkeypatch: pytest.MonkeyPatch, name: str):
    """With bpe.c, where texts are counted together, and without it."""
    monkeypatch.setattr(bpe_module, "BATCH_CHARS", 500)
    codes = [*range(0x500), *range(0x500, 0x3100, 3), *range(0xF900, 0x33000, 99)]
    everything = "".join(f"a{chr(c)}b1{chr(c)} {chr(c)}!" for c in codes)
    texts = [*TEXTS, everything, *PARTS]
    want = Counter(chunk.encode() for text in texts for chunk in regex.findall(PATTERNS[name], text))
    assert count_chunks(texts, PATTERNS[name]) == want
    monkeypatch.setattr(bpe_module, "load_library", lambda: None)
    assert count_chunks(texts, PATTERNS[name]) == want


def test_c_knows_the_class_of_every_character():
    """Beyond its table no character is a letter, a number or white space."""
    n = len(bpe_module.character_classes())
    assert not regex.search(r"[\p{L}\p{N}\s\p{Han}]", "".join(map(chr, range(n, 0x110000))))


def test_the_default_pattern_by_hand():
    chunks = ["don", "'t", " ", " stop", " ", "1", "2", "3", "4", " 你好", "，世界", "!\n\n", " ", " x"]
    assert count_chunks(["don't  stop 1234 你好，世界!\n\n  x"]) == Counter(chunk.encode() for chunk in chunks)


def test_long_chunks_are_counted_whole_endless_ones_in_parts_and_rare_ones_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    assert count_chunks(["=" * 1000 + " " + "甲" * 300]) == {b"=" * 1000: 1, (" " + "甲" * 300).encode(): 1}
    assert count_chunks(["=" * 250_000]) == {b"=" * 100_000: 2, b"=" * 50_000: 1}
    monkeypatch.setattr(bpe_module, "MAX_BYTES", 100)
    counts = count_chunks([f"word word word x{chr(97 + i)}{chr(97 + j)}" for i in range(9) for j in range(9)])
    assert sum(map(len, counts)) <= 120 and counts[b" word"] == 2 * 81  # the frequent ones keep their exact counts
    assert "are dropped" in capsys.readouterr().out


# ---- patterns --------------------------------------------------------------------------------

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALL_PATTERNS = [*PATTERNS.values(), LLAMA3_PATTERN, O200K_PATTERN]


@pytest.mark.parametrize("pattern", ALL_PATTERNS)
def test_blocks_do_not_change_the_chunks(monkeypatch: pytest.MonkeyPatch, pattern: str):
    """At each place where a text may be cut, the chunks of the parts are the chunks of the whole."""
    cuts = 0
    for text in TEXTS:
        whole = regex.findall(pattern, text)
        for cut in SAFE_CUT.finditer(text):
            cuts += 1
            parts = regex.findall(pattern, text[: cut.start()]) + regex.findall(pattern, text[cut.start() :])
            assert parts == whole, (text, cut.start())
    assert cuts > 250


@pytest.mark.parametrize("name", PATTERNS)
def test_long_texts_without_a_safe_cut_have_the_chunks_of_the_whole(monkeypatch: pytest.MonkeyPatch, name: str):
    """Tables of numbers, minified code, random text, and chunks of nearly a block."""
    monkeypatch.setattr(bpe_module, "MAX_CHARS", 512)
    rng = random.Random(name)
    parts = [*PARTS, *"'s 're (){}[]; ==\n\n \n\n\n".split(" "), " ", "\n  ", "0x1f,", "\t\t"]
    texts = ["".join(rng.choices(parts, k=3000)) for _ in range(20)]
    texts += ["0x00ff,0x1b\n," * 1000, "a=b;c(d){'ll}\n\n;" * 500, "1\n\n" * 1000, ("x" + "=" * 400 + "'re") * 9]
    texts = [SAFE_CUT.sub("!", text) for text in texts]  # none is left
    want = Counter()
    for text in texts:
        want.update(chunk.encode() for chunk in regex.findall(PATTERNS[name], text))
        found = list(blocks(text, PATTERNS[name]))
        assert "".join(found) == text and max(map(len, found)) <= 512
    assert count_chunks(texts, PATTERNS[name]) == want


def chunks_of_tiktoken(pattern: str, texts: list[str], chunks: list[list[str]]) -> list[bool]:
    """Whether tiktoken cuts each text into these chunks: all of them are tokens, and so is, later, the whole text."""
    ranks = {bytes([b]): b for b in range(256)}
    for chunk in [chunk for cut in chunks for chunk in cut] + texts:
        ranks.setdefault(chunk.encode(), len(ranks))
    encoding = tiktoken.Encoding("chunks", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    wanted = [[ranks[chunk.encode()] for chunk in cut] for cut in chunks]
    return [encoding.encode_ordinary(text) == ids for text, ids in zip(texts, wanted, strict=True)]


@pytest.mark.parametrize("name", PATTERNS)
def test_two_engines_cut_every_character_alike(name: str):
    """Rust's and Oniguruma's: the tokenizer and its copy in transformers. And nothing is left out."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[name]), "isolated")
    codes = [*range(0x3000), *range(0x3000, 0xD800, 15), *range(0xE000, 0x34000, 15)]
    characters = [chr(c) for c in codes]
    for start in range(0, len(characters), 20_000):
        texts = [f"a{c}甲" for c in characters[start : start + 20_000]]
        chunks = [[chunk for chunk, _ in split.pre_tokenize_str(text)] for text in texts]
        assert ["".join(cut) for cut in chunks] == texts
        assert all(chunks_of_tiktoken(PATTERNS[name], texts, chunks))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("gpt2", ["It", "'s", " 你好", "，", "世界", " 2024", "!"]),
        ("gpt4", ["It", "'s", " 你好", "，世界", " ", "20", "24", "!"]),
        ("zh", ["It", "'s", " ", "你好", "，", "世界", " ", "2", "0", "2", "4", "!"]),
        ("cl100k", ["It", "'s", " 你好", "，世界", " ", "202", "4", "!"]),
        ("qwen", ["It", "'s", " 你好", "，世界", " ", "2", "0", "2", "4", "!"]),
    ],
)
def test_what_the_patterns_do(name: str, chunks: list[str]):
    assert regex.findall(PATTERNS[name], "".join(chunks)) == chunks


def test_a_table_of_empty_cells_is_two_blocks():
    """Each of its chunks ends with a line end, and none is safe to cut by SAFE_CUT."""
    text = ",,,,\n" * 20_200
    parts = list(blocks(text, bpe_module.PATTERN))
    assert len(parts) == 2 and "".join(parts) == text


def plainly_merged(token: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The leftmost pair of the lowest id below the limit, again and again, until two parts are left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        made = [ranks.get(left + right, limit) for left, right in itertools.pairwise(parts)]
        rank = min(made)
        if rank >= limit:
            break
        i = made.index(rank)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def test_merges_below_an_id_are_those_of_the_definition():
    rng = random.Random(7)
    for _ in range(400):
        alphabet = rng.choice([b"a", b"ab", b"abcd"])
        pieces = {bytes(rng.choices(alphabet, k=rng.randint(2, 6))) for _ in range(rng.randint(1, 30))}
        ranks = {bytes([byte]): byte for byte in range(256)}
        ranks |= {piece: 256 + i for i, piece in enumerate(rng.sample(sorted(pieces), len(pieces)))}
        token = bytes(rng.choices(alphabet, k=rng.randint(2, 40)))
        limit = rng.randint(256, len(ranks) + 1)
        assert engines.merge_below(token, limit, ranks) == plainly_merged(token, limit, ranks), (token, ranks)


def test_a_run_of_one_character_is_trained_on_and_loaded_in_time(tmp_path):
    start = time.perf_counter()
    train(["=" * 99_000] * 2, 640).save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    seconds = time.perf_counter() - start
    text = "=" * 99_000
    assert loaded.decode(loaded.encode(text)) == text
    assert seconds < 10


def test_chinese_is_cut_in_fours():
    text = "学而时习之不亦说乎，GPT模型café有3个"
    chunks = ["学而时习", "之不亦说", "乎", "，GPT", "模型", "café", "有", "3", "个"]
    assert regex.findall(PATTERNS["zh"], text) == chunks


# ---- Chinese: characters before words ----------------------------------------------------------------------------


def test_frequent_characters_are_one_token_before_any_word():
    """Of the characters of the Chinese sample at least 99.98 % are one token, where the pattern alone gives far less;
    what there is room for decides, and other text is untouched."""
    texts = [*chinese_sample(), "for the words of it " * 3000]
    counts = count_chunks(texts, PATTERNS["zh"])
    han = Counter(regex.findall(r"\p{Han}", "".join(texts)))
    share = {}
    for name, used in (("plain", counts), ("first", characters_first(counts, 4000))):
        tokens = [bytes([i]) for i in range(256)]
        for left, right in train_bpe(used, 3800):
            tokens.append(tokens[left] + tokens[right])
        whole = {token.decode(errors="ignore") for token in tokens}
        share[name] = sum(count for one, count in han.items() if one in whole) / han.total()
    assert share["plain"] < 0.99 < 0.9998 < share["first"]
    few = {one.decode() for one, count in characters_first(counts, 40).items() if count > counts.get(one, 0)}
    most = [one for one, _ in sorted(han.items(), key=lambda item: (-item[1], item[0]))]
    assert few == set(most[: len(few)]) and 10 < len(few) < 40
    assert characters_first({b"ab": 3, b" c": 2}, 100) == {b"ab": 3, b" c": 2}


def test_a_full_stop_that_always_ends_a_line_is_one_token():
    """Its last byte was merged with the line end. Where it stands alone elsewhere nothing changes."""
    for text, added in (("他来了。\n我们走。\n" * 30, {"。"}), ("他来了。我们走。\n" * 30, set())):
        counts = count_chunks([text], PATTERNS["zh"])
        first = characters_first(counts, 200)
        alone = {one.decode() for one in first.keys() - counts.keys()}
        assert {one for one in alone if not regex.match(r"\p{Han}", one)} == added
        tokenizer = train([text], 384, "bpe", "zh")
        assert len(tokenizer.encode("。")) == 1
    assert characters_first({"。\n".encode(): 1}, 100) == {"。\n".encode(): 1}  # seen once