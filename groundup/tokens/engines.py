"""Engines that turn text into ids and back: how the files of a tokenizer are read, checked, run.

"bpe" splits text into chunks by a regular expression and merges the most frequent neighbours inside
them, starting from the 256 bytes, so that every text has ids and decodes to itself. tiktoken runs
it, if it gives the ids that tokenizer.json says (ByteLevelBPE checks that). "tokenizers" runs any
other tokenizer.json by the library of that name. "sentencepiece" is that library's BPE over
characters, with byte fallback: a tokenizer.model.

text_tokenizer.py opens a tokenizer's directory and chooses the engine.
"""

import hashlib
import heapq
import itertools
import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np
import regex
import sentencepiece
import tiktoken

from groundup.errors import UserError
from groundup.files.untrusted import scrub, why_unusable

SIZE_STEP = 128  # vocabularies are padded to a multiple: the matrix products of the head are faster

# ---- how text is cut into chunks -------------------------------------------------------------

# Every character matches some branch; "?+" and "++" do not give back what they matched. Use only
# syntax that tiktoken (Rust), tokenizers (Oniguruma) and regex (Python) interpret the same: no set
# differences, no "{1,3}+".
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    # Hugging Face's "ByteLevel"
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # cl100k with at most two digits per chunk: better for vocabularies of about 32k (nanochat)
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "cl100k": CL100K,
    "qwen": CL100K.replace("{1,3}", ""),  # the default: llama.cpp knows it, as qwen2
}
# SmolLM's Digits and ByteLevel: each digit is a chunk, and GPT-2's pattern takes white space before
# it as a text's end.
DIGITS_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# Inputs that expose catastrophic backtracking: none of them ends like it begins.
PARTS = ("a", "A", "1", " ", "\n", ".", "\u7532", "ab", "a ", "a1")
REPETITIVE = [part * 400 + end for part in PARTS for end in "!\0"]

# tiktoken's regular expressions overflow their stack on about a million white-space characters, so
# a text is cut where so many of them stand in a row.
MAX_SPACE = 100_000

# ---- how tokenizer.json writes tokens --------------------------------------------------------

# {byte: the character that stands for it in tokenizer.json}, as in GPT-2. Printable Latin-1 stands
# for itself, the characters from U+0100 on for the other 68 bytes.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
TO_CHAR = {b: chr(b) for b in PRINTABLE} | {b: chr(0x100 + i) for i, b in enumerate(OTHERS)}
TO_BYTE = {char: byte for byte, char in TO_CHAR.items()}


def in_bytes(word: str) -> bytes:
    """Return the bytes of a word of tokenizer.json."""
    try:
        return bytes([TO_BYTE[char] for char in word])
    except KeyError:
        raise UserError(f"its token {word!r} is not in byte-level BPE's alphabet") from None


def vocab_of(description: dict) -> dict[str, int]:
    """Return {word: id} of a parsed tokenizer.json; added tokens may be missing there."""
    vocab = description["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {piece: i for i, (piece, _) in enumerate(vocab)}  # Unigram: [[piece, score], ...]


def added_token(content: str, token_id: int = -1) -> dict:
    """Return a special token's entry in tokenizer.json, or, without an id, in the config."""
    entry = {"id": token_id} if token_id >= 0 else {}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return entry | {"content": content} | flags | {"special": True}


def to_json(value: dict) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


# ---- what every engine has -------------------------------------------------------------------

# Where a text stands: some tokenizers put a space before every text, others not after a marker.
# Only conversations have texts in other places than START (spans.py).
START, AFTER_MARKER, INSIDE = "start", "after a marker", "inside a text"
SPACE = "\u2581"  # stands for a space in sentencepiece's pieces, so in text it is written as bytes


class Unsupported(Exception):
    """tiktoken would give other ids than a tokenizer.json says; the text tells why."""


class Engine:
    """Ids of ordinary text.

    backend: its name
    added_tokens: [{"content": text, "id": id, "special": bool}, ...], as the files have them
    special_tokens {text: id}: ordinary text never becomes one of them
    words {text: id}: added words that ordinary text does become (Qwen's "<think>")
    token_bytes {id: bytes} of all tokens that are not special
    begins: whether the begin token stands before every text, unless tokenizer_config.json says it

    A subclass defines encode(text), the ids of a text of any length, and identity(), all that
    decides them besides the special tokens, as plain values.
    """

    backend: str
    token_bytes: dict[int, bytes]
    begins: bool

    def __init__(self, added_tokens: list[dict]) -> None:
        self.added_tokens = added_tokens
        self.special_tokens: dict[str, int] = {}
        self.words: dict[str, int] = {}
        for token in added_tokens:
            named = self.special_tokens if token["special"] else self.words
            named[token["content"]] = token["id"]

    def encode_array(self, text: str) -> np.ndarray:
        """Return `encode` as uint32 (n,)."""
        return np.array(self.encode(text), np.uint32)


# ---- byte-level BPE: tokenizer.json by tiktoken ----------------------------------------------

# Letters, digits, marks, emoji, quotes and white space of many kinds: a pattern must match them all
ALL_KINDS = (
    "a Z1\u0664 \u00e9\u0915\u093f \u7532\U0001f600 _'s'!\u3002 "
    "\t\r\n\n \x00\x85\u00a0\u2028\u200b\ufffd  "
)


class ByteLevelBPE(Engine):
    """The engine "bpe": a tokenizer.json, our own or another's, run by tiktoken.

    ranks {token: id}: bytes and what merges make of them
    pattern: the regular expression that cuts text into chunks
    nfc: whether text is first brought to Unicode's form C (Qwen)
    missing: bytes that have no token
    """

    backend = "bpe"

    def __init__(self, description: dict) -> None:
        """Take a parsed tokenizer.json. Raise Unsupported if tiktoken would differ."""
        super().__init__(description.get("added_tokens") or [])
        self._check_words()
        self.pattern, self.nfc = byte_level_steps(description)
        # newer files list added tokens among the others, too
        added = self.special_tokens | self.words
        self.ranks = read_ranks(description["model"], added)  # checked: tiktoken merges alike
        self.missing = bytes(b for b in range(256) if bytes([b]) not in self.ranks)

        self.added_words = set(self.words)  # tiktoken takes no other collection
        self.encoding = tiktoken.Encoding(
            "bpe", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=added
        )
        self.token_bytes = {i: token for token, i in self.ranks.items()}
        self.token_bytes |= {i: word.encode() for word, i in self.words.items()}
        self._try_pattern()

    def _try_pattern(self) -> None:
        """Raise UserError or Unsupported for a pattern that cannot be used: it may be anybody's."""

        def cut_repetitive() -> None:
            # as both libraries do
            for text in REPETITIVE:
                self.encoding.encode_ordinary(text)
                regex.findall(self.pattern, text)

        is_ours = self.pattern in (*PATTERNS.values(), DIGITS_GPT2)  # these are tested
        if not is_ours and (why := why_unusable(cut_repetitive)):
            raise UserError(f"its pattern cannot be used: {why}: {self.pattern!r:.200}")
        wanted = ALL_KINDS.encode().translate(None, self.missing)
        if self.encoding.decode_bytes(self.encode(ALL_KINDS)) != wanted:
            raise Unsupported(f"its pattern leaves out part of the text: {self.pattern!r:.200}")

    def _check_words(self) -> None:
        """Raise Unsupported for added words that tiktoken would not find in the same places."""
        flags = ("lstrip", "rstrip", "single_word")
        words = [token for token in self.added_tokens if not token["special"]]
        flagged = any(token.get(flag) for token in words for flag in flags)
        # in sorted order a name stands right before those that begin with it
        names = sorted([*self.special_tokens, *self.words])
        overlap = any(after.startswith(name) for name, after in itertools.pairwise(names))
        if flagged or (words and overlap):
            raise Unsupported("its added words overlap, or take in the white space around them")

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        text = scrub(unicodedata.normalize("NFC", text) if self.nfc else text)
        ends = range(MAX_SPACE, len(text), MAX_SPACE)
        cuts = [end for end in ends if text[end - MAX_SPACE : end].isspace()]
        if not cuts:
            return self._encode(text)
        parts = itertools.pairwise([0, *cuts, len(text)])
        return np.concatenate([self._encode(text[begin:end]) for begin, end in parts])

    def _encode(self, text: str) -> np.ndarray:
        """Return the ids of a text without too much white space in a row."""
        data = text.encode() if self.missing else b""
        if len(data) == len(data.translate(None, self.missing)):
            # tiktoken finds the added words before the pattern cuts the text
            to_numpy = self.encoding.encode_to_numpy
            return to_numpy(text, allowed_special=self.added_words, disallowed_special=())
        # The text has bytes without a token: merge the chunks without them.
        ids = []
        words = "|".join(map(re.escape, self.words)) or "(?!)"  # (?!) matches nothing
        for part in re.split(f"({words})", text):
            if part in self.words:
                ids.append(self.words[part])
                continue
            for chunk in regex.findall(self.pattern, part):
                if data := chunk.encode().translate(None, self.missing):
                    ids += self.encoding._encode_single_piece(data)
        return np.array(ids, np.uint32)

    def identity(self) -> list:
        # in the order of the merges
        tokens = [(i, token.hex()) for i, token in sorted(self.token_bytes.items())]
        return [self.pattern, self.nfc, sorted(self.words), tokens]


def byte_level_steps(description: dict) -> tuple[str, bool]:
    """Return (pattern that splits text, whether text is first brought to form C) of the byte-level
    BPE in a parsed tokenizer.json. Raise Unsupported for any other tokenizer."""
    model = description["model"]  # a file without it is damaged
    normalizer = (description.get("normalizer") or {}).get("type", "")
    no_steps = {"type": "Sequence", "normalizers": []}
    if normalizer not in ("", "NFC") and description["normalizer"] != no_steps:
        raise Unsupported(f"its normalizer {normalizer!r} is not supported; none and NFC are")
    pattern = split_pattern(description.get("pre_tokenizer"))
    others = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(key) for key in others):
        raise Unsupported(f"its model, of type {model.get('type')!r}, is not byte-level BPE")
    return pattern, normalizer == "NFC"


def split_pattern(pre_tokenizer: dict | None) -> str:
    """Return the regular expression that splits text into chunks.

    Raise Unsupported for other ways to split text."""
    # Three ways are known: ByteLevel alone (GPT-2), with Digits (SmolLM), with a Split (all newer).
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    *splits, last = steps  # what cuts the text, then what writes bytes as characters
    kinds = [step.get("type") for step in steps]
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        own_regex = last.get("use_regex", True)
        if not splits and own_regex:
            return PATTERNS["gpt2"]
        if kinds[:-1] == ["Digits"] and splits[0].get("individual_digits") and own_regex:
            return DIGITS_GPT2
        if kinds[:-1] == ["Split"] and not own_regex and "Regex" in splits[0]["pattern"]:
            # Both keep every match as a chunk. ByteLevelBPE tries whether the pattern matches all
            # text.
            way = (splits[0]["behavior"], splits[0]["invert"])
            if way in (("Isolated", False), ("Removed", True)):
                return splits[0]["pattern"]["Regex"]
    supported = "Split by a Regex and ByteLevel is"
    raise Unsupported(f"it splits text by {kinds}, which is not supported; {supported}")


def read_ranks(model: dict, added: dict[str, int]) -> dict[bytes, int]:
    """Return {token: id} of the "model" in a tokenizer.json without its added tokens {text: id}."""
    ranks = {in_bytes(word): i for word, i in model["vocab"].items() if word not in added}
    ids = [*ranks.values(), *added.values()]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids) or len(set(ids)) < len(ids):
        raise UserError("two of its tokens have the same id, or an id is not a number")
    merges = [(in_bytes(left), in_bytes(right)) for left, right in merge_words(model)]
    check_merges(ranks, merges, model.get("ignore_merges", False))
    return ranks


class PanicsInOneLine:
    """Within `with` it raises UserError for a panic of the library that splits text."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        # Rust's panics come as a BaseException of a class that no module exports
        if kind and kind.__name__ == "PanicException":
            fails = "the pattern that splits text fails on this text"
            what = " ".join(str(error).split())
            raise UserError(f"tokenizer: {fails} ({what:.200})") from None


def merge_words(model: dict) -> list[list[str]]:
    """Return the merges of a tokenizer.json's "model" as [left, right].

    Older files write "left right"."""
    merges = model["merges"]
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def check_merges(
    ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]], whole_chunks: bool
) -> None:
    """Raise Unsupported unless tiktoken, which has no list of merges, does what the list says.

    tiktoken joins the two neighbours whose union has the smallest id. That is the same if the ids
    are in the order of the merges, and joining a token's bytes, up to its own id, ends in a pair of
    the list.

    whole_chunks ("ignore_merges"): a chunk that is a token is taken at once, as tiktoken always
    does. Then no merges need to lead to a token if the list has all its splits into two tokens
    (Llama 3's was made from the tokens).
    """
    # First condition: the ids of what the merges make ascend.
    made = [
        ranks.get(left + right, -1) if left in ranks and right in ranks else -1
        for left, right in merges
    ]
    if made and (min(made) < 0 or made != sorted(made)):
        why = "are not in the order of the token ids, or make tokens that do not exist"
        raise Unsupported(f"its merges {why}")
    # Second condition: joining leads to each token by way of a listed pair.
    listed = set(merges)  # as (left, right)
    for token, rank in ranks.items():
        parts = merge_below(token, rank, ranks)  # two, if merges lead to the token
        if len(parts) > 2 and whole_chunks:
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            known = [(left, right) for left, right in splits if left in ranks and right in ranks]
            follows = listed.issuperset(known)
        else:
            follows = len(parts) < 2 or tuple(parts) in listed
        if not follows:
            raise Unsupported(f"its token {rank} ({token!r}) does not follow from its merges")


def merge_below(token: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the parts of `token`, two or more, after all merges that make a token with an id below
    `limit`."""
    n = n_parts = len(token)
    ends = list(range(1, n + 1))  # of the part that begins at each byte; 0: none begins there
    before = list(range(-1, n - 1))  # where the part in front of it begins

    def rank_of(i: int) -> int:
        """Return the id of the token that the part at i makes with the one behind it."""
        return ranks.get(token[i : ends[ends[i]]], limit) if ends[i] < n else limit

    # A heap, since a run of equal characters may be a token of thousands of bytes.
    pairs = [(rank_of(i), i) for i in range(n - 1)]
    heapq.heapify(pairs)
    while n_parts > 2 and pairs and pairs[0][0] < limit:
        rank, i = heapq.heappop(pairs)
        if not ends[i] or rank_of(i) != rank:  # one of the two parts is gone or has grown
            continue
        j = ends[i]
        ends[i], ends[j] = ends[j], 0
        n_parts -= 1
        if ends[i] < n:
            before[ends[i]] = i
        for changed in (i, before[i]):
            if changed >= 0:
                heapq.heappush(pairs, (rank_of(changed), changed))
    return [token[i : ends[i]] for i in range(n) if ends[i]]


# ---- any other tokenizer.json: the library tokenizers ----------------------------------------


class LibraryTokenizer(Engine):
    """The engine "tokenizers": a tokenizer.json that tiktoken cannot run."""

    backend = "tokenizers"

    def __init__(self, description: dict, why: str) -> None:
        """Take a parsed tokenizer.json. why: what tiktoken cannot do, for errors (UserError)."""
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"{why}; to use it: pip install tokenizers==0.23.3") from None
        self.sha256 = hashlib.sha256(to_json(description)).hexdigest()
        # Its post-processor would add special tokens, and change where tokens begin. Truncation,
        # padding and dropout, which merges at random, are for training in other frameworks.
        plain = description | {"truncation": None, "padding": None, "post_processor": None}
        plain["model"] = description["model"] | {"dropout": None}
        self.plain, self.make = json.dumps(plain), tokenizers.Tokenizer.from_str
        self.runners: dict[str, Any] = {}
        try:
            self.runner(START)
        except BaseException as error:  # the library's own Exception, or a panic
            raise UserError(f"{why}, and tokenizers cannot read it: {str(error)[:200]}") from None
        if reason := why_unusable(lambda: self.runner(START).encode_batch(REPETITIVE)):
            raise UserError(f"{why}, and tokenizers cannot run it: {reason}")

        super().__init__(description.get("added_tokens") or [])
        self.names = re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")
        # the decoder says how the vocabulary writes bytes
        decoder = json.dumps(description.get("decoder"))
        if '"ByteLevel"' in decoder:
            to_bytes = in_bytes
        elif SPACE in decoder or "\\u2581" in decoder:
            to_bytes = bytes_of_piece
        else:
            raise UserError(f"{why}, and its decoder {decoder:.100} is not supported")
        vocab = vocab_of(description)
        ordinary = {word: i for word, i in vocab.items() if word not in self.special_tokens}
        self.token_bytes = {i: to_bytes(word) for word, i in ordinary.items()}
        self.token_bytes |= {i: word.encode() for word, i in self.words.items()}

    def runner(self, place: str) -> Any:
        """Return the library's tokenizer for texts that stand there."""
        # The space before a text is a setting of the file, so each place has a runner of its own.
        if place not in self.runners:
            text = self.plain
            if place != START:
                text = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
            if place == INSIDE:
                text = text.replace('"prepend_scheme": "always"', '"prepend_scheme": "never"')
                text = text.replace('"add_prefix_space": true', '"add_prefix_space": false')
                text = re.sub(r'("type": "Prepend", "prepend": )"[^"]*"', r'\1""', text)
            if place != START and text == self.plain:  # one runner for all places: no space
                return self.runner(START)
            self.runners[place] = self.make(text)
            # names of special tokens in a text are ordinary text
            self.runners[place].encode_special_tokens = True
        return self.runners[place]

    def encode(self, text: str) -> list[int]:
        return [i for _, found in self.parts(scrub(text), START) for i in found.ids]

    def parts(self, text: str, place: str) -> Iterator[tuple[int, Any]]:
        """Yield (where it begins, the library's Encoding) of each part that is encoded alone."""
        found = self.runner(place).encode(text, add_special_tokens=False)
        cuts = []  # where parts begin
        if not {*self.special_tokens.values()}.isdisjoint(found.ids):
            # a Unigram vocabulary may hold the names of special tokens as words: cut those
            cuts = [match.start() + 1 for match in self.names.finditer(text)]
        if not cuts:
            yield 0, found
            return
        for begin, end in itertools.pairwise([0, *cuts, len(text)]):
            for start, part in self.parts(text[begin:end], INSIDE if begin else place):
                yield begin + start, part

    def identity(self) -> list:
        return [self.sha256]


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes of a piece in sentencepiece's writing: U+2581 = space, <0x0A> = a byte."""
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


# ---- tokenizer.model: sentencepiece ----------------------------------------------------------

# A ModelProto with normalizer_spec.add_dummy_prefix = false: behind another one it overrides that
NO_PREFIX = b"\x1a\x02\x18\x00"
# Types of pieces; one that is user-defined is found in every text
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class SentencePieceBPE(Engine):
    """The engine "sentencepiece": a tokenizer.model, run by sentencepiece.

    breaks: where text is cut before the library encodes it. That is at added words, at U+2581, and
    within user-defined names of special tokens."""

    backend = "sentencepiece"

    def __init__(self, model: bytes, config: dict) -> None:
        """Take a tokenizer.model, and tokenizer_config.json: "added_tokens_decoder", "legacy"."""
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model or b"empty")
        except RuntimeError:
            why = "is damaged, or not of sentencepiece, as Llama 3's in tiktoken's form"
            raise UserError(f"tokenizer.model {why}; tokenizer.json will do") from None
        self.processor = processor
        self.sha256 = hashlib.sha256(model).hexdigest()  # stands for all pieces and scores
        added = config.get("added_tokens_decoder") or {}
        super().__init__([token | {"id": int(i)} for i, token in added.items()])
        # Llama 2's puts a space before every text, so it would put one after each U+2581, too;
        # then the ids of U+2581 are its own.
        self.has_prefix = processor.encode("a", out_type=str)[0].startswith(SPACE)
        names = [f"<0x{byte:02X}>" for byte in SPACE.encode()]
        self.space_in_bytes = [processor.piece_to_id(name) for name in names]
        # the one for texts before which no space is put
        self.bare = processor
        if self.has_prefix:
            self.bare = sentencepiece.SentencePieceProcessor(model_proto=model + NO_PREFIX)
        self.legacy = bool(config.get("legacy"))
        # what transformers does
        self.begins = str(config.get("tokenizer_class", "")).startswith("Llama")
        self._add_pieces(pieces_of(model))

    def _add_pieces(self, pieces: list[tuple[str, int]]) -> None:
        """Sort the pieces into special tokens, words and others, and find where text is cut."""
        # so far these are the tokens behind the pieces, which the library does not know
        known, within = dict(pieces), []
        words = [word for word in self.words if word not in known]
        self.token_bytes = {i: word.encode() for word, i in self.words.items()}
        for i, (piece, kind) in enumerate(pieces):
            if kind in (UNKNOWN, CONTROL):
                self.special_tokens[piece] = i  # <unk>, <s>, </s>
            elif kind == BYTE:
                self.token_bytes[i] = bytes_of_piece(piece)
            else:
                self.token_bytes[i] = piece.replace(SPACE, " ").encode()
            if kind == USER_DEFINED and piece in self.special_tokens:
                within.append(piece)
            elif kind == USER_DEFINED:
                self.words[piece] = i
        for i in self.special_tokens.values():
            self.token_bytes.pop(i, None)

        breaks = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in within]
        breaks += map(re.escape, words)
        breaks += [] if self.has_prefix else [SPACE]
        self.breaks = re.compile("|".join(breaks) or "(?!)")

    def encode(self, text: str) -> list[int]:
        text = scrub(text)
        if not self.breaks.search(text):  # nearly always
            return self.processor.encode(text)
        ids = []
        for part, processor, own_ids in self.parts(text, START):
            ids += own_ids or processor.encode(part)
        return ids

    def parts(self, text: str, place: str) -> Iterator[tuple[str, Any, list[int]]]:
        """Yield (part, the processor that encodes it, []), or (a word, None, its ids), in turn."""
        at = 0
        for found in self.breaks.finditer(text):
            name = found[0]
            is_word = name in self.words or name == SPACE
            # within the name of a special token the cut is behind its first character
            end = found.start() + (0 if is_word else 1)
            yield text[at:end], self._processor(place), []
            at, place = end, INSIDE
            if is_word:
                own_ids = [self.words[name]] if name in self.words else self.space_in_bytes
                yield name, None, own_ids
                at, place = found.end(), AFTER_MARKER if name in self.words else START
        yield text[at:], self._processor(place), []

    def _processor(self, place: str) -> Any:
        """Return the processor for a text that stands there."""
        # transformers' "legacy" puts a space after a marker, too
        has_prefix = place == START or (place == AFTER_MARKER and self.legacy)
        return self.processor if has_prefix else self.bare

    def identity(self) -> list:
        return [self.sha256, self.legacy, sorted(self.words)]


def pieces_of(model: bytes) -> list[tuple[str, int]]:
    """Return (text, type) of the pieces of a ModelProto (sentencepiece_model.proto), by id.

    A piece is field 1, a message of its text (field 1), score (2) and type (3)."""
    found = [dict(fields(piece)) for number, piece in fields(model) if number == 1]
    return [(piece[1].decode(), piece.get(3, NORMAL)) for piece in found]


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of the fields of a message in protobuf's wire format."""
    rest = iter(message)
    # The low three bits of a key say how the value is written: 0 = a varint, 1 and 5 = eight and
    # four bytes, 2 = its size, then bytes. No key is 0, so that is the end.
    while key := varint(rest):
        wire = key & 7  # how the value is written
        if wire == 0:
            yield key >> 3, varint(rest)
        else:
            size = varint(rest) if wire == 2 else {1: 8, 5: 4}[wire]
            yield key >> 3, bytes(itertools.islice(rest, size))


def varint(rest: Iterator[int]) -> int:
    """Read a number: seven bits a byte, the lowest first; the eighth bit says that more follow."""
    value = shift = 0
    for byte in rest:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value
