"""Tokenizers in the file formats of other libraries: written, read, checked, and extended by new tokens.

A tokenizer is here its files, {name: content}, as in a Hugging Face directory: tokenizer.json (byte-level BPE) or
tokenizer.model (sentencepiece), with tokenizer_config.json. tokenizer.py runs them.
"""

import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import regex
import sentencepiece
import tiktoken

from groundup.errors import UserError
from groundup.files.streams import scrub
from groundup.files.untrusted import why_unusable
from groundup.tokens.bpe import PATTERNS, SIZE_STEP, Chunks, count_chunks

# ---- tokenizer.json: byte-level BPE --------------------------------------------------------------------------


def byte_alphabet() -> dict[int, str]:
    """Return {byte: the printable character that stands for it in tokenizer.json}, as in GPT-2: printable Latin-1 for
    itself, the characters from U+0100 on for the other 68 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # a directory has one of them
TO_CHAR = byte_alphabet()
TO_BYTE = {char: byte for byte, char in TO_CHAR.items()}


def in_chars(token: bytes) -> str:
    return "".join([TO_CHAR[byte] for byte in token])


def in_bytes(word: str) -> bytes:
    """Return the bytes of a word of tokenizer.json, the inverse of in_chars."""
    try:
        return bytes([TO_BYTE[char] for char in word])
    except KeyError:
        raise UserError(f"its token {word!r} is not written in byte-level BPE's alphabet") from None


def bpe_description(merges: Iterable[tuple[int, int]], specials: Iterable[str], pattern: str) -> dict:
    """Return the content of tokenizer.json: 256 bytes, then merges, then special tokens, in this order of ids."""
    tokens = [bytes([b]) for b in range(256)]
    pairs = []
    for left, right in merges:
        pairs.append([in_chars(tokens[left]), in_chars(tokens[right])])
        tokens.append(tokens[left] + tokens[right])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {in_chars(token): i for i, token in enumerate(tokens)}, "merges": pairs,
    }  # fmt: skip
    added = [added_token(name, i) for i, name in enumerate(specials, start=len(tokens))]
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip


def added_token(content: str, token_id: int = -1) -> dict:
    """Return a special token's entry in tokenizer.json, or without an id in tokenizer_config.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return ({"id": token_id} if token_id >= 0 else {}) | {"content": content} | flags


def to_json(value: dict) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


# SmolLM's Digits and ByteLevel: each digit is a chunk, and GPT-2's pattern takes white space before it as a text's end.
DIGITS_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"


# Texts on which a regular expression that backtracks without end shows it, as none of them ends like it begins.
REPETITIVE = [part * 400 + end for part in ("a", "A", "1", " ", "\n", ".", "\u7532", "ab", "a ", "a1") for end in "!\0"]


MOST_IDS = 2**24  # of a tokenizer; a file may give a token any number


class ByteLevel(NamedTuple):
    """A tokenizer.json as tiktoken runs it."""

    ranks: dict[bytes, int]  # {token: id}
    specials: dict[str, int]  # {text: id} of tokens that ordinary text never becomes
    words: dict[str, int]  # {text: id} of words added to the vocabulary (Qwen's "<think>"), found before text is split
    pattern: str  # the regular expression that splits text into chunks
    nfc: bool  # whether text is first brought to Unicode's form C (Qwen)


class Unsupported(Exception):
    """tiktoken would give other ids than a tokenizer.json says; the text tells why."""


def read_bpe(description: dict) -> ByteLevel:
    """Return the content of a parsed tokenizer.json. Raise Unsupported if tiktoken would not give the same ids."""
    model, added = description["model"], description.get("added_tokens") or []
    specials = {token["content"]: token["id"] for token in added if token["special"]}
    words = {token["content"]: token["id"] for token in added if not token["special"]}
    flags = [token.get(flag) for token in added if not token["special"] for flag in ("lstrip", "rstrip", "single_word")]
    names = sorted([*specials, *words])
    if any(flags) or (words and any(b.startswith(a) for a, b in zip(names, names[1:], strict=False))):
        raise Unsupported("its added words overlap, or take in the white space around them")
    normalizer = (description.get("normalizer") or {}).get("type", "")
    if normalizer not in ("", "NFC") and description["normalizer"] != {"type": "Sequence", "normalizers": []}:
        raise Unsupported(f"its normalizer {normalizer!r} is not supported; none and NFC are")
    pattern = split_pattern(description.get("pre_tokenizer"))
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(key) for key in others):
        raise Unsupported(f"its model, of type {model.get('type')!r}, is not byte-level BPE")
    ranks = {in_bytes(word): i for word, i in model["vocab"].items() if word not in specials and word not in words}
    ids = [*ranks.values(), *specials.values(), *words.values()]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids) or len(set(ids)) < len(ids):
        raise UserError("two of its tokens have the same id, or an id is not a number")
    merges = [(in_bytes(left), in_bytes(right)) for left, right in merge_words(model)]
    check_merges(ranks, merges, model.get("ignore_merges", False))
    return ByteLevel(ranks, specials, words, pattern, normalizer == "NFC")


def split_pattern(pre_tokenizer: dict | None) -> str:
    """Return the regular expression that splits text into chunks. Raise Unsupported for ways to split that are none."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    *splits, last = steps
    kinds = [step.get("type") for step in steps]
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        own_regex = last.get("use_regex", True)
        if not splits and own_regex:
            return PATTERNS["gpt2"]
        if kinds[:-1] == ["Digits"] and splits[0].get("individual_digits") and own_regex:
            return DIGITS_GPT2
        if kinds[:-1] == ["Split"] and not own_regex and "Regex" in splits[0]["pattern"]:
            # Both keep every match as a chunk. ByteLevelBPE tries whether the pattern matches all text.
            if (splits[0]["behavior"], splits[0]["invert"]) in (("Isolated", False), ("Removed", True)):
                return splits[0]["pattern"]["Regex"]
    raise Unsupported(f"it splits text by {kinds}, which is not supported; Split by a Regex and ByteLevel is")


def check_pattern(encoding: tiktoken.Encoding, pattern: str) -> None:
    """Raise UserError if a pattern that is not known takes too long, or fails, on texts where backtracking shows."""

    def split() -> None:
        for text in REPETITIVE:
            encoding.encode_ordinary(text)
            regex.findall(pattern, text)

    if pattern not in (*PATTERNS.values(), DIGITS_GPT2) and (why := why_unusable(split)):
        raise UserError(f"its pattern cannot be used: {why}: {pattern!r:.200}")


def named_panic(error: BaseException) -> BaseException:
    """Return a UserError for a panic, by which the library that splits text gives up; any other error as it is."""
    if type(error).__name__ != "PanicException":
        return error
    what = " ".join(str(error).split())
    return UserError(f"tokenizer: the pattern that splits text fails on this text ({what:.200})")


def merge_words(model: dict) -> list[list[str]]:
    """Return the merges of a tokenizer.json's "model" as [left, right]; older files write "left right"."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]


def check_merges(ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]], whole_chunks: bool) -> None:
    """Raise Unsupported unless tiktoken, which has no list of merges, does what the list says.

    tiktoken joins the two neighbours whose union has the smallest id. That is the same if the ids are in the order of
    the merges, and joining a token's bytes, up to its own id, ends in a pair of the list.
    whole_chunks ("ignore_merges"): a chunk that is a token is taken at once, as tiktoken always does. Then no merges
    need to lead to a token if the list has all its splits into two tokens (Llama 3's was made from the tokens).
    """
    order = [ranks.get(left + right, -1) if left in ranks and right in ranks else -1 for left, right in merges]
    if order and (min(order) < 0 or any(a > b for a, b in zip(order, order[1:], strict=False))):
        raise Unsupported("its merges are not in the order of the token ids, or make tokens that do not exist")
    listed = set(merges)
    for token, rank in ranks.items():
        parts = merge_below(token, rank, ranks)
        if len(parts) > 2 and whole_chunks:
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            follows = all(split in listed for split in splits if split[0] in ranks and split[1] in ranks)
        else:
            follows = len(parts) < 2 or tuple(parts) in listed
        if not follows:
            raise Unsupported(f"its token {rank} ({token!r}) does not follow from its merges")


def merge_below(token: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the parts of `token` after all merges that make a token with an id below `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        made = [ranks.get(a + b, limit) for a, b in zip(parts, parts[1:], strict=False)]
        least = min(made)
        if least >= limit:
            break
        at = made.index(least)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


# ---- any other tokenizer.json: the library tokenizers ---------------------------------------------------------


class LibraryTokenizer:
    """A tokenizer.json that tiktoken cannot run, by the library it was made for. Attributes as in ByteLevelBPE."""

    def __init__(self, description: dict, why: str) -> None:
        """Take a parsed tokenizer.json. why: what tiktoken cannot do, for the errors. Raise UserError."""
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"{why}; to use it: pip install tokenizers==0.23.3") from None
        model, added = description["model"], description.get("added_tokens") or []
        vocab = model["vocab"]
        words = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        self.special_tokens = {token["content"]: token["id"] for token in added if token["special"]}
        self.sha256 = hashlib.sha256(to_json(description)).hexdigest()
        try:
            plain = description | {"truncation": None, "padding": None}
            self.runner = tokenizers.Tokenizer.from_str(json.dumps(plain))
        except BaseException as error:  # the library's own Exception, or a panic
            raise UserError(f"{why}, and tokenizers cannot read it: {str(error)[:200]}") from None
        if reason := why_unusable(lambda: [self.runner.encode(text) for text in REPETITIVE]):
            raise UserError(f"{why}, and tokenizers cannot run it: {reason}")
        self.runner.encode_special_tokens = True  # their names in a text are ordinary text
        self.names = re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")
        decoder = json.dumps(description.get("decoder"))
        if '"ByteLevel"' in decoder:
            to_bytes = in_bytes
        elif SPACE in decoder or "\\u2581" in decoder:
            to_bytes = bytes_of_piece
        else:
            raise UserError(f"{why}, and its decoder {decoder:.100} is not supported")
        self.token_bytes = {i: to_bytes(word) for word, i in words.items() if word not in self.special_tokens}
        self.token_bytes |= {token["id"]: token["content"].encode() for token in added if not token["special"]}

    def encode(self, text: str) -> list[int]:
        text = scrub(text)
        ids = self.runner.encode(text, add_special_tokens=False).ids
        if not {*self.special_tokens.values()} & {*ids}:  # a Unigram vocabulary may hold their names as words
            return ids
        cuts = [0, *(match.start() + 1 for match in self.names.finditer(text)), len(text)]
        parts = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
        return [i for part in parts for i in self.runner.encode(part, add_special_tokens=False).ids]

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.uint32)

    def identity(self) -> list:
        return [self.sha256]


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes of a piece in sentencepiece's writing: U+2581 for a space, <0x0A> for a byte."""
    is_byte = re.fullmatch("<0x[0-9A-F]{2}>", piece)
    return bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(SPACE, " ").encode()


# ---- tokenizer.model: sentencepiece --------------------------------------------------------------------------


class SentencePieceBPE:
    """The backend "sentencepiece": a tokenizer.model, run by sentencepiece. Attributes as in ByteLevelBPE."""

    def __init__(self, model: bytes, added_tokens: dict) -> None:
        """Take the content of tokenizer.model, and "added_tokens_decoder" of tokenizer_config.json."""
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model or b"empty")
        except RuntimeError:
            raise UserError("tokenizer.model is damaged") from None
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.special_tokens = {token["content"]: int(i) for i, token in added_tokens.items() if token["special"]}
        self.token_bytes = {}
        for i in range(self.processor.get_piece_size()):
            piece = self.processor.id_to_piece(i)
            if self.processor.is_control(i) or self.processor.is_unknown(i):
                self.special_tokens[piece] = i
            elif self.processor.is_byte(i):
                self.token_bytes[i] = bytes([int(piece[3:5], 16)])  # written <0xE4>
            else:
                self.token_bytes[i] = piece.replace(SPACE, " ").encode()
        # Llama 2's puts a space before every text, so it would put one after each U+2581 too: its own ids are given.
        self.has_prefix = self.processor.encode("a", out_type=str)[0].startswith(SPACE)
        self.space_in_bytes = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    def encode(self, text: str) -> list[int]:
        first, *rest = [scrub(text)] if self.has_prefix else scrub(text).split(SPACE)
        ids = self.processor.encode(first)
        for part in rest:
            ids += self.space_in_bytes + self.processor.encode(part)
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.uint32)

    def identity(self) -> list:
        return [self.sha256]


SPACE = "\u2581"  # stands for a space in sentencepiece's pieces, so in text it is written as bytes


# ---- how a text begins ---------------------------------------------------------------------------------------


def begins_text(files: dict[str, bytes], config: dict) -> bool:
    """Return whether the tokenizer puts its begin token before every text: what tokenizer_config.json says, else the
    template in tokenizer.json, else what transformers does for Llama's sentencepiece models."""
    if "add_bos_token" in config:
        return bool(config["add_bos_token"])
    if "tokenizer.model" in files:
        return str(config.get("tokenizer_class", "")).startswith("Llama")
    processor = json.loads(files["tokenizer.json"]).get("post_processor") or {}
    steps = processor.get("processors") or [processor]
    return any("SpecialToken" in step["single"][0] for step in steps if step.get("type") == "TemplateProcessing")


# ---- special tokens and the chat template, as tokenizer_config.json and generation_config.json name them -------


def files_of(directory: Path) -> Path:
    """Return where a tokenizer's files are: those of a run are in its newest checkpoint."""
    run = (directory / "latest").is_dir() and not any((directory / name).exists() for name in TOKENIZERS)
    return directory / "latest" if run else directory


def find_template(files: dict[str, bytes], config: dict) -> str:
    """Return the chat template of a tokenizer's files, "" if there is none; of several the one called default."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    found = config.get("chat_template") or ""
    named = {one["name"]: one["template"] for one in found} if isinstance(found, list) else {"default": found}
    return named.get("default", "")


def find_special(
    special_tokens: dict[str, int], config: dict, generation_config: dict, key: str, name: str = "", default: int = -1
) -> int:
    """Return the id of the special token `name`; else of the one that tokenizer_config.json has under `key`, as a text
    or {"content": text}; else what generation_config.json has under `key`_id, a number or a list; else `default`."""
    token, ids = config.get(key), generation_config.get(key + "_id")
    token = token["content"] if isinstance(token, dict) else token
    candidates = special_tokens.get(name), special_tokens.get(token), *(ids if isinstance(ids, list) else [ids])
    return next((i for i in candidates if i in special_tokens.values()), default)


# ---- more tokens ---------------------------------------------------------------------------------------------


def reserved(n: int, taken: Iterable[str]) -> list[str]:
    """Return `n` names for special tokens without a meaning, numbered on from those that are taken."""
    found = [re.fullmatch(r"<\|reserved_(\d+)\|>", name) for name in taken]
    start = 1 + max((int(match[1]) for match in found if match), default=-1)
    return [f"<|reserved_{start + i}|>" for i in range(n)]


def with_specials(files: dict[str, bytes], names: list[str], first: int) -> dict[str, bytes]:
    """Return `files` with the special tokens `names` added; their ids count from `first`."""
    if "tokenizer.model" in files:
        config = json.loads(files["tokenizer_config.json"])
        tokens = {str(i): added_token(name) for i, name in enumerate(names, start=first)}
        config["added_tokens_decoder"] = (config.get("added_tokens_decoder") or {}) | tokens
        files = {name: content for name, content in files.items() if name != "tokenizer.json"}  # a copy without these
        return files | {"tokenizer_config.json": to_json(config)}
    description = json.loads(files["tokenizer.json"])
    description["added_tokens"] += [added_token(name, i) for i, name in enumerate(names, start=first)]
    # A library that reads the file numbers added tokens on from the size of "vocab", unless they are in it.
    description["model"]["vocab"] |= {token["content"]: token["id"] for token in description["added_tokens"]}
    return files | {"tokenizer.json": to_json(description)}


def extended_bpe(files: dict[str, bytes], texts: Iterable[str], first: int, size: int) -> dict[str, bytes]:
    """Return `files` with tokenizer.json extended by merges learnt from `texts`, which go on where the old merges leave
    the text; ids from `first` up to `size`, rounded up to SIZE_STEP by reserved special tokens."""
    description = json.loads(with_specials(files, [], first)["tokenizer.json"])  # no merge may make an old one
    old, model = read_bpe(description), description["model"]
    counts = count_chunks((unicodedata.normalize("NFC", text) if old.nfc else text for text in texts), old.pattern)
    if not counts:
        raise UserError("tokenizer: the input holds no text to learn from")
    whole = tiktoken.Encoding("chunks", pat_str="(?s:.+)", mergeable_ranks=old.ranks, special_tokens={})
    ids = [whole.encode_to_numpy(chunk.decode(), disallowed_special=()) for chunk in counts]
    lengths, weights = np.array([len(i) for i in ids]), np.array(list(counts.values()))
    merges = Chunks(np.concatenate(ids), lengths, weights).train(size - first, first)

    vocab, pairs, top = model["vocab"], merge_words(model), first
    words = {i: in_chars(token) for token, i in old.ranks.items()}
    for i, (left, right) in enumerate(merges, start=first):
        words[i] = words[left] + words[right]
        if words[i] not in vocab:  # else an old token to which the old merges do not lead, see below
            vocab[words[i]] = top
            pairs.append([words[left], words[right]])
            top += 1
    if model.get("ignore_merges"):  # new parts may lead to old tokens to which no merges led, see check_merges
        listed = {(left, right) for left, right in pairs}
        splits = [(word[:i], word[i:]) for word in set(words.values()) for i in range(1, len(word))]
        pairs += [list(s) for s in splits if s[0] in vocab and s[1] in vocab and s not in listed]
        pairs.sort(key=lambda pair: (vocab[pair[0] + pair[1]], len(pair[0])))
    model["merges"] = pairs
    names = reserved(-top % SIZE_STEP, old.specials)
    return with_specials(files | {"tokenizer.json": to_json(description)}, names, top)
