"""Make tokenizers: train one on text, or add tokens to another's, as files that Tokenizer takes."""

import json
import unicodedata
from collections.abc import Iterable, Sequence

from groundup.errors import UserError, counted
from groundup.tokens import bpe
from groundup.tokens.bpe import PATTERNS
from groundup.tokens.engines import (
    SIZE_STEP,
    TO_CHAR,
    ByteLevelBPE,
    Unsupported,
    added_token,
    merge_words,
    to_json,
)
from groundup.tokens.text_tokenizer import FAST
from tokenizer import CHAT_TEMPLATE, SPECIALS, Tokenizer, reserved, with_specials

CONFIG = {  # the part of tokenizer_config.json that both backends share
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}
# Fewer ids cost bits per byte: docs/measurements.md, "Size of the vocabulary".
FOR_CHINESE = 4096
SMALLEST_MEASURED = 300_000  # bytes
SMALLEST = 384  # the multiple of SIZE_STEP that holds 256 bytes and the special tokens
# The step of a tokenizer.json that writes bytes as characters; a Split before it cuts the text
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def train(
    texts: Iterable[str], vocab_size: int, backend: str = "bpe", pattern: str = "qwen"
) -> Tokenizer:
    """Return a tokenizer trained on `texts` with vocab_size ids, rounded up to SIZE_STEP.

    Ids of bpe: 256 bytes, merges, SPECIALS, <|reserved_i|>; there are fewer than asked for if no
    pair is left to merge. Raise UserError."""
    check_settings(vocab_size, backend, pattern)
    size = rounded_up(vocab_size)
    if size != vocab_size:
        rounded = f"rounded up to {size}, a multiple of {SIZE_STEP}"
        print(f"tokenizer: vocab_size={vocab_size} is {rounded}")
    if backend == "sentencepiece":
        return Tokenizer(sentencepiece_files(bpe.train_sentencepiece(texts, size, SPECIALS)))

    counts = bpe.count_chunks(texts, PATTERNS[pattern])
    if not counts:
        raise UserError("tokenizer: the input holds no text to learn from")
    if line := advice(counts, size, pattern):
        print(line)
    # what is left of the ids, behind those of single bytes and special tokens
    n_merges = size - 256 - len(SPECIALS)
    if pattern == "zh":
        counts = bpe.characters_first(counts, n_merges // 2)
        pattern = "qwen"  # llama.cpp has it; no merge is longer than zh's chunks
    tokenizer = Tokenizer(bpe_files(bpe.train_bpe(counts, n_merges), PATTERNS[pattern]))
    if tokenizer.vocab_size < size:
        print(
            f"tokenizer: vocab_size is {tokenizer.vocab_size} instead of {size}: every pair left "
            "is rare. Phrases that repeat are tokens by now, so a smaller one may learn better"
        )
    return tokenizer


def check_settings(vocab_size: int, backend: str, pattern: str) -> None:
    """Raise UserError for settings that no tokenizer can be trained with."""
    if backend not in ("bpe", "sentencepiece"):
        raise UserError(f"tokenizer: unknown backend {backend!r}; use 'bpe' or 'sentencepiece'")
    if backend == "sentencepiece" and pattern != "qwen":
        other = "is for backend=bpe; sentencepiece splits text its own way"
        raise UserError(f"tokenizer: pattern={pattern!r} {other}")
    if pattern not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise UserError(f"tokenizer: unknown pattern {pattern!r}; use one of {known}")
    if rounded_up(vocab_size) < SMALLEST:
        small = f"vocab_size={vocab_size} cannot hold bytes and specials"
        raise UserError(f"tokenizer: {small}; use >= {SMALLEST}")


def advice(counts: dict[bytes, int], size: int, pattern: str) -> str:
    """Return a line for a Chinese text with too small a vocabulary or another pattern than zh, else
    "". counts: of chunks."""
    n_bytes = sum(len(chunk) * n for chunk, n in counts.items())
    # E4 to E9 begin the characters from U+4000 to U+9FFF, in three bytes.
    n_chinese = sum(3 * n * sum(0xE4 <= b <= 0xE9 for b in chunk) for chunk, n in counts.items())
    if n_chinese < n_bytes / 2 or n_bytes < SMALLEST_MEASURED:
        return ""
    wanted = []
    if size < FOR_CHINESE:
        wanted.append(f"--vocab_size={FOR_CHINESE}")
    if pattern != "zh":
        wanted.append("--pattern=zh")
    if not wanted:
        return ""
    return (
        f"tokenizer: {n_bytes / 1e6:.1f} MB of mostly Chinese text want {' '.join(wanted)}: "
        "else many characters are split into bytes (docs/data.md)"
    )


def extended(tokenizer: Tokenizer, texts: Iterable[str], n_new: int) -> Tokenizer:
    """Return `tokenizer` (bpe) with about n_new more tokens, learned from `texts`.

    Every old id stays, special ones included; new ids follow, then reserved special tokens up to a
    multiple of SIZE_STEP. Raise UserError."""
    if tokenizer.backend == "sentencepiece":
        only = "only a tokenizer.json (byte-level BPE) can be extended, not a sentencepiece model"
        raise UserError(f"tokenizer: {only}")
    first = tokenizer.vocab_size
    if n_new <= 0:
        raise UserError(f"tokenizer: it has {first} ids already; give a larger vocab_size")
    return Tokenizer(extended_bpe(tokenizer.files, texts, first, rounded_up(first + n_new)))


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> str:
    """Return a line on how well the tokenizer fits the texts."""
    n_bytes = n_chars = n_tokens = 0
    # per byte to compare vocabularies; per character, because a Chinese one has three bytes
    for text in texts:
        n_bytes += len(text.encode())
        n_chars += len(text)
        n_tokens += len(tokenizer.encode_array(text))
    per_token = f"{n_bytes / max(n_tokens, 1):.2f} bytes per token"
    per_character = f"{n_tokens / max(n_chars, 1):.2f} tokens per character"
    return f"{n_bytes / 1e6:.2f} MB, {counted(n_tokens, 'token')}: {per_token}, {per_character}"


def rounded_up(vocab_size: int) -> int:
    return -(-vocab_size // SIZE_STEP) * SIZE_STEP


# ---- files of new tokenizers -----------------------------------------------------------------


def bpe_files(merges: Sequence[tuple[int, int]], pattern: str) -> dict[str, bytes]:
    """Return {file name: content} of a byte-level BPE with these merges and our special tokens."""
    n_reserved = -(256 + len(merges) + len(SPECIALS)) % SIZE_STEP
    description = bpe_description(merges, (*SPECIALS, *reserved(n_reserved, ())), pattern)
    config = CONFIG | {"tokenizer_class": FAST}
    return {"tokenizer.json": to_json(description), "tokenizer_config.json": to_json(config)}


def in_chars(token: bytes) -> str:
    """Return a token as tokenizer.json writes it."""
    return "".join([TO_CHAR[byte] for byte in token])


def bpe_description(
    merges: Iterable[tuple[int, int]], specials: Iterable[str], pattern: str
) -> dict:
    """Return the content of tokenizer.json: 256 bytes, merges, special tokens, in order of ids."""
    tokens = [bytes([b]) for b in range(256)]
    pairs = []
    for left, right in merges:
        pairs.append([in_chars(tokens[left]), in_chars(tokens[right])])
        tokens.append(tokens[left] + tokens[right])
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {in_chars(token): i for i, token in enumerate(tokens)},
        "merges": pairs,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(name, i) for i, name in enumerate(specials, len(tokens))],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]},
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": model,
    }


def sentencepiece_files(model: bytes) -> dict[str, bytes]:
    """Return {file name: content} of a model made by bpe.train_sentencepiece."""
    config = CONFIG | {
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": False,
        "add_eos_token": False,
        # <unk> has id 0, the special tokens follow
        "added_tokens_decoder": {
            str(i): added_token(name) for i, name in enumerate(SPECIALS, start=1)
        },
    }
    return {"tokenizer.model": model, "tokenizer_config.json": to_json(config)}


# ---- more tokens -----------------------------------------------------------------------------


def extended_bpe(
    files: dict[str, bytes], texts: Iterable[str], first: int, size: int
) -> dict[str, bytes]:
    """Return `files` with tokenizer.json extended by merges learned from `texts`.

    They go on where the old merges leave the text. Their ids count from `first` up to `size`,
    filled up to a multiple of SIZE_STEP by reserved special tokens."""
    # with the special tokens in "vocab", so that no merge makes one of them
    description = json.loads(with_specials(files, [], first)["tokenizer.json"])
    model = description["model"]
    try:  # what tiktoken cannot run could not be extended by its own merges either
        old = ByteLevelBPE(description)
    except Unsupported as why:
        raise UserError(f"tokenizer: this tokenizer.json cannot be extended: {why}") from None
    if old.nfc:
        texts = (unicodedata.normalize("NFC", text) for text in texts)
    counts = bpe.count_chunks(texts, old.pattern)
    if not counts:
        raise UserError("tokenizer: the input holds no text to learn from")
    # The chunks as the old merges leave them, without bytes that have no token.
    left = [chunk.translate(None, old.missing) for chunk in counts]
    chunks = [old.encoding._encode_single_piece(chunk) if chunk else [] for chunk in left]
    merges = bpe.learn_merges(chunks, list(counts.values()), size - first, first)

    vocab, pairs, top = model["vocab"], merge_words(model), first
    words = {i: in_chars(token) for token, i in old.ranks.items()}
    for i, (left, right) in enumerate(merges, start=first):
        words[i] = words[left] + words[right]
        # ids without a gap: those of merges that make nothing new are given to later ones
        if words[i] not in vocab:  # else an old token to which the old merges do not lead
            vocab[words[i]] = top
            pairs.append([words[left], words[right]])
            top += 1
    if model.get("ignore_merges"):
        pairs = with_all_splits(pairs, set(words.values()), vocab)
    model["merges"] = pairs
    # the matrix products of the head are faster at a multiple of SIZE_STEP
    names = reserved(-top % SIZE_STEP, old.special_tokens)
    return with_specials(files | {"tokenizer.json": to_json(description)}, names, top)


def with_all_splits(
    pairs: list[list[str]], words: set[str], vocab: dict[str, int]
) -> list[list[str]]:
    """Return the merges with every split of a word into two tokens, in the order of the ids.

    New tokens may lead to old ones to which no merges led, see engines.check_merges."""
    # without these, check_merges would refuse what this file made
    listed = {(left, right) for left, right in pairs}
    for word in words:
        for i in range(1, len(word)):
            left, right = word[:i], word[i:]
            if left in vocab and right in vocab and (left, right) not in listed:
                pairs.append([left, right])
    return sorted(pairs, key=lambda pair: (vocab[pair[0] + pair[1]], len(pair[0])))
