"""Tokenizers in the file formats of other libraries: read, checked, and given more special tokens.

A tokenizer is here its files, {name: content}, as in a Hugging Face directory: tokenizer.json
(byte-level BPE) or tokenizer.model (sentencepiece), with tokenizer_config.json. tokenizer.py runs
them, training.py makes new ones.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import regex
import sentencepiece
import tiktoken

from groundup.errors import UserError
from groundup.files.untrusted import parse_object, read_bytes, read_json, scrub, why_unusable

TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # a directory has one of them; the first wins
SIZE_STEP = 128  # vocabularies are padded to a multiple: the matrix products of the head are faster
MOST_IDS = 2**24  # of a tokenizer; a file may give a token any number

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
    # To learn from text with Chinese, where the others make tokens of whole clauses, comma
    # included. Here a token has at most four characters, the length of an idiom. Digits are
    # single. [^\P{L}\p{Han}] is a letter that is not Han. The tokenizer itself splits text by
    # "qwen", so that words lie where they are and not at every fourth character.
    "zh": r"'(?i:[sdmt]|ll|ve|re)|\p{Han}{1,4}|[^\r\n\p{L}\p{N}]?+[^\P{L}\p{Han}]++|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "cl100k": CL100K,
    "qwen": CL100K.replace("{1,3}", ""),  # the default: llama.cpp knows it, as qwen2
}
# SmolLM's Digits and ByteLevel: each digit is a chunk, and GPT-2's pattern takes white space before
# it as a text's end.
DIGITS_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# Inputs that expose catastrophic backtracking: none of them ends like it begins.
REPEATED = ("a", "A", "1", " ", "\n", ".", "\u7532", "ab", "a ", "a1")
REPETITIVE = [part * 400 + end for part in REPEATED for end in "!\0"]

# tiktoken's regular expressions overflow their stack on about a million white-space characters, so
# it gets text in blocks. A text may be cut between a letter or digit and one of these (U+3001 and
# on: Chinese punctuation): no pattern here has a chunk across the two, looks back, or looks further
# ahead than to the end of a run of white space.
MAX_CHARS = 100_000
SAFE_CUT = re.compile("(?<=[^\\W_])(?=[ \n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")


def blocks(text: str) -> Iterator[str]:
    """Yield `text` in parts of at most MAX_CHARS, cut where that cannot change the ids.

    A stretch of more than MAX_CHARS / 2 characters without such a place is cut anywhere."""
    start = 0
    while len(text) - start > MAX_CHARS:
        cut = SAFE_CUT.search(text, start + MAX_CHARS // 2, start + MAX_CHARS)
        end = cut.start() if cut else start + MAX_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


# ---- tokenizer.json: byte-level BPE ----------------------------------------------------------


def byte_alphabet() -> dict[int, str]:
    """Return {byte: the printable character that stands for it in tokenizer.json}, as in GPT-2.

    Printable Latin-1 stands for itself, the characters from U+0100 on for the other 68 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


TO_CHAR = byte_alphabet()
TO_BYTE = {char: byte for byte, char in TO_CHAR.items()}


def in_chars(token: bytes) -> str:
    """Return a token as tokenizer.json writes it."""
    return "".join([TO_CHAR[byte] for byte in token])


def in_bytes(word: str) -> bytes:
    """Return the bytes of a word of tokenizer.json, the inverse of in_chars."""
    try:
        return bytes([TO_BYTE[char] for char in word])
    except KeyError:
        raise UserError(f"its token {word!r} is not in byte-level BPE's alphabet") from None


def to_json(value: dict) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


class ByteLevel(NamedTuple):
    """A tokenizer.json as tiktoken runs it."""

    ranks: dict[bytes, int]  # {token: id}
    specials: dict[str, int]  # {text: id} of tokens that ordinary text never becomes
    words: dict[str, int]  # {text: id} of added words (Qwen's "<think>"), found before the split
    pattern: str  # the regular expression that splits text into chunks
    nfc: bool  # whether text is first brought to Unicode's form C (Qwen)


class Unsupported(Exception):
    """tiktoken would give other ids than a tokenizer.json says; the text tells why."""


def read_bpe(description: dict) -> ByteLevel:
    """Return the content of a parsed tokenizer.json. Raise Unsupported if tiktoken would differ."""
    model, added = description["model"], description.get("added_tokens") or []
    specials, words = added_ids(added)
    check_words(added, specials, words)

    normalizer = (description.get("normalizer") or {}).get("type", "")
    no_steps = {"type": "Sequence", "normalizers": []}
    if normalizer not in ("", "NFC") and description["normalizer"] != no_steps:
        raise Unsupported(f"its normalizer {normalizer!r} is not supported; none and NFC are")
    pattern = split_pattern(description.get("pre_tokenizer"))
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(key) for key in others):
        raise Unsupported(f"its model, of type {model.get('type')!r}, is not byte-level BPE")

    names = specials.keys() | words.keys()
    ranks = {in_bytes(word): i for word, i in model["vocab"].items() if word not in names}
    ids = [*ranks.values(), *specials.values(), *words.values()]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids) or len(set(ids)) < len(ids):
        raise UserError("two of its tokens have the same id, or an id is not a number")
    merges = [(in_bytes(left), in_bytes(right)) for left, right in merge_words(model)]
    check_merges(ranks, merges, model.get("ignore_merges", False))
    return ByteLevel(ranks, specials, words, pattern, normalizer == "NFC")


def added_ids(added: list[dict]) -> tuple[dict[str, int], dict[str, int]]:
    """Return {text: id} of the added tokens that are special, and of the others."""
    specials, words = {}, {}
    for token in added:
        (specials if token["special"] else words)[token["content"]] = token["id"]
    return specials, words


def check_words(added: list[dict], specials: dict[str, int], words: dict[str, int]) -> None:
    """Raise Unsupported for added words that tiktoken would not find in the same places."""
    flags = ("lstrip", "rstrip", "single_word")
    flagged = any(token.get(flag) for token in added if not token["special"] for flag in flags)
    names = sorted([*specials, *words])
    overlap = any(after.startswith(name) for name, after in itertools.pairwise(names))
    if flagged or (words and overlap):
        raise Unsupported("its added words overlap, or take in the white space around them")


def split_pattern(pre_tokenizer: dict | None) -> str:
    """Return the regular expression that splits text into chunks.

    Raise Unsupported for other ways to split text."""
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
            # Both keep every match as a chunk. ByteLevelBPE tries whether the pattern matches all
            # text.
            way = (splits[0]["behavior"], splits[0]["invert"])
            if way in (("Isolated", False), ("Removed", True)):
                return splits[0]["pattern"]["Regex"]
    supported = "Split by a Regex and ByteLevel is"
    raise Unsupported(f"it splits text by {kinds}, which is not supported; {supported}")


def check_pattern(encoding: tiktoken.Encoding, pattern: str) -> None:
    """Raise UserError if an unknown pattern takes too long, or fails, where backtracking shows."""

    def split() -> None:
        for text in REPETITIVE:
            encoding.encode_ordinary(text)
            regex.findall(pattern, text)

    if pattern in (*PATTERNS.values(), DIGITS_GPT2):
        return
    if why := why_unusable(split):
        raise UserError(f"its pattern cannot be used: {why}: {pattern!r:.200}")


def named_panic(error: BaseException) -> BaseException:
    """Return a UserError for a panic of the library that splits text; other errors as they are."""
    if type(error).__name__ != "PanicException":
        return error
    what = " ".join(str(error).split())
    return UserError(f"tokenizer: the pattern that splits text fails on this text ({what:.200})")


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
    made = [
        ranks.get(left + right, -1) if left in ranks and right in ranks else -1
        for left, right in merges
    ]
    if made and (min(made) < 0 or made != sorted(made)):
        why = "are not in the order of the token ids, or make tokens that do not exist"
        raise Unsupported(f"its merges {why}")
    listed = set(merges)
    for token, rank in ranks.items():
        parts = merge_below(token, rank, ranks)
        if len(parts) > 2 and whole_chunks:
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            known = [(left, right) for left, right in splits if left in ranks and right in ranks]
            follows = listed.issuperset(known)
        else:
            follows = len(parts) < 2 or tuple(parts) in listed
        if not follows:
            raise Unsupported(f"its token {rank} ({token!r}) does not follow from its merges")


def merge_below(token: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the parts of `token` after all merges that make a token with an id below `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        made = [ranks.get(a + b, limit) for a, b in itertools.pairwise(parts)]
        least = min(made)
        if least >= limit:
            break
        at = made.index(least)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


# ---- any other tokenizer.json: the library tokenizers ----------------------------------------

# Where a text stands: some tokenizers put a space before every text, others not after a marker
START, AFTER_MARKER, INSIDE = "start", "after a marker", "inside a text"
Spans = tuple[list[int], list[int], list[int]]  # ids, where each begins and ends in the text


class LibraryTokenizer:
    """A tokenizer.json that tiktoken cannot run, by the library it was made for.

    Attributes as in ByteLevelBPE."""

    def __init__(self, description: dict, why: str) -> None:
        """Take a parsed tokenizer.json. why: what tiktoken cannot do, for errors (UserError)."""
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"{why}; to use it: pip install tokenizers==0.23.3") from None
        self.sha256 = hashlib.sha256(to_json(description)).hexdigest()
        # its post-processor would add special tokens, and change where tokens begin
        plain = description | {"truncation": None, "padding": None, "post_processor": None}
        self.plain, self.make = json.dumps(plain), tokenizers.Tokenizer.from_str
        self.runners: dict[str, Any] = {}
        try:
            self.runner(START)
        except BaseException as error:  # the library's own Exception, or a panic
            raise UserError(f"{why}, and tokenizers cannot read it: {str(error)[:200]}") from None
        if reason := why_unusable(lambda: self.runner(START).encode_batch(REPETITIVE)):
            raise UserError(f"{why}, and tokenizers cannot run it: {reason}")

        self.special_tokens, self.words = added_ids(description.get("added_tokens") or [])
        self.names = re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")
        decoder = json.dumps(description.get("decoder"))
        if '"ByteLevel"' in decoder:
            to_bytes = in_bytes
        elif SPACE in decoder or "\\u2581" in decoder:
            to_bytes = bytes_of_piece
        else:
            raise UserError(f"{why}, and its decoder {decoder:.100} is not supported")
        vocab = description["model"]["vocab"]
        if not isinstance(vocab, dict):  # Unigram: [[piece, score], ...]
            vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
        special = self.special_tokens
        self.token_bytes = {i: to_bytes(word) for word, i in vocab.items() if word not in special}
        self.token_bytes |= {i: word.encode() for word, i in self.words.items()}

    def runner(self, place: str) -> Any:
        """Return the library's tokenizer for texts that stand there."""
        if place not in self.runners:
            text = self.plain
            if place != START:
                text = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
            if place == INSIDE:
                text = text.replace('"prepend_scheme": "always"', '"prepend_scheme": "never"')
                text = text.replace('"add_prefix_space": true', '"add_prefix_space": false')
                text = re.sub(r'("type": "Prepend", "prepend": )"[^"]*"', r'\1""', text)
            if place != START and text == self.plain:
                return self.runner(START)
            self.runners[place] = self.make(text)
            # names of special tokens in a text are ordinary text
            self.runners[place].encode_special_tokens = True
        return self.runners[place]

    def encode_spans(self, text: str, place: str = START) -> Spans:
        """Return the ids of a text, and the characters at which each begins and ends."""
        text = scrub(text)
        found = self.runner(place).encode(text, add_special_tokens=False)
        if not {*self.special_tokens.values()}.isdisjoint(found.ids):
            # a Unigram vocabulary may hold the names of special tokens as words: cut those
            if cuts := [match.start() + 1 for match in self.names.finditer(text)]:
                return joined(self, text, cuts, place)
        begins, ends = zip(*found.offsets, strict=True) if found.ids else ((), ())
        return found.ids, list(begins), list(ends)

    def encode(self, text: str) -> list[int]:
        return self.encode_spans(text)[0]

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.uint32)

    def position(self, text: str, end: int) -> int:
        """Return where text[:end] ends, as encode_spans counts."""
        return end

    def identity(self) -> list:
        return [self.sha256]


def joined(engine: Any, text: str, cuts: Sequence[int], place: str) -> Spans:
    """Return the Spans of a text that an engine encodes in parts."""
    ids, begins, ends, start = [], [], [], 0
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
        part = text[begin:end]
        new, part_begins, part_ends = engine.encode_spans(part, INSIDE if begin else place)
        ids += new
        begins += [start + one for one in part_begins]
        ends += [start + one for one in part_ends]
        start += engine.position(part, len(part))
    return ids, begins, ends


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes of a piece in sentencepiece's writing: U+2581 = space, <0x0A> = a byte."""
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


# ---- tokenizer.model: sentencepiece ----------------------------------------------------------

# A ModelProto with normalizer_spec.add_dummy_prefix = false: behind another one it overrides that
NO_PREFIX = b"\x1a\x02\x18\x00"
USER_DEFINED = 4  # the type of a piece that is found in every text


class SentencePieceBPE:
    """The backend "sentencepiece": a tokenizer.model, run by sentencepiece.

    Attributes as in ByteLevelBPE."""

    def __init__(self, model: bytes, config: dict) -> None:
        """Take a tokenizer.model, and tokenizer_config.json: "added_tokens_decoder", "legacy"."""
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model or b"empty")
        except RuntimeError:
            raise UserError("tokenizer.model is damaged") from None
        self.processor = processor
        self.sha256 = hashlib.sha256(model).hexdigest()
        added = config.get("added_tokens_decoder") or {}
        # words: tokens behind the pieces that are found in text
        self.special_tokens, self.words = added_ids([
            token | {"id": int(i)} for i, token in added.items()
        ])
        self.token_bytes = {i: word.encode() for word, i in self.words.items()}
        user_defined = []
        for i, kind in enumerate(piece_types(model)):
            piece = processor.id_to_piece(i)
            if processor.is_control(i) or processor.is_unknown(i):
                self.special_tokens[piece] = i
            elif processor.is_byte(i):
                self.token_bytes[i] = bytes_of_piece(piece)
            else:
                self.token_bytes[i] = piece.replace(SPACE, " ").encode()
            if kind == USER_DEFINED:
                user_defined.append(piece)
                if piece not in self.special_tokens:
                    self.words[piece] = i
        for i in self.special_tokens.values():
            self.token_bytes.pop(i, None)
        # Llama 2's puts a space before every text, so it would put one after each U+2581, too;
        # then the ids of U+2581 are its own.
        self.has_prefix = processor.encode("a", out_type=str)[0].startswith(SPACE)
        names = [f"<0x{byte:02X}>" for byte in SPACE.encode()]
        self.space_in_bytes = [processor.piece_to_id(name) for name in names]
        # where no space is put before a text; transformers' "legacy" puts one after a marker
        self.bare = processor
        if self.has_prefix:
            self.bare = sentencepiece.SentencePieceProcessor(model_proto=model + NO_PREFIX)
        self.legacy = bool(config.get("legacy"))

        # Text is cut at added words, at U+2581, and within user-defined names of special tokens.
        pieces = {processor.id_to_piece(i) for i in range(processor.get_piece_size())}
        whole = [re.escape(word) for word in self.words if word not in pieces]
        whole += [] if self.has_prefix else [SPACE]
        within = [name for name in user_defined if name in self.special_tokens]
        within = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in within]
        self.breaks = re.compile("|".join([*within, *whole]) or "(?!)")

    def encode(self, text: str) -> list[int]:
        text = scrub(text)
        if self.breaks.search(text):
            return self.encode_spans(text)[0]
        return self.processor.encode(text)

    def encode_spans(self, text: str, place: str = START) -> Spans:
        """Return the ids of a text, and the bytes at which each begins and ends."""
        text = scrub(text)
        ids, begins, ends, start, at = [], [], [], 0, 0
        for found in [*self.breaks.finditer(text), None]:
            name = found[0] if found else ""
            is_whole = name in self.words or name == SPACE
            end = found.start() + (not is_whole) if found else len(text)
            new = self._encode_part(text[at:end], place)
            ids += [i for i, _, _ in new]
            begins += [start + begin for _, begin, _ in new]
            ends += [start + end for _, _, end in new]
            start += len(text[at:end].encode())
            at, place = end, INSIDE
            if is_whole:
                own = [self.words[name]] if name in self.words else self.space_in_bytes
                ids += own
                begins += [start] * len(own)
                start += len(name.encode())
                ends += [start] * len(own)
                at, place = found.end(), AFTER_MARKER if name in self.words else START
        return ids, begins, ends

    def _encode_part(self, text: str, place: str) -> list[tuple[int, int, int]]:
        """Return (id, begin, end) of each token of a text without breaks."""
        with_prefix = place == START or (place == AFTER_MARKER and self.legacy)
        processor = self.processor if with_prefix else self.bare
        pieces = processor.encode(text, out_type="proto").pieces
        found = [[piece.id, piece.begin, piece.end] for piece in pieces]
        # of a character in several bytes only the last has its place
        for one, following in reversed(list(itertools.pairwise(found))):
            if one[1] == one[2]:
                one[2] = following[2]
        return found

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.uint32)

    def position(self, text: str, end: int) -> int:
        """Return where text[:end] ends, as encode_spans counts."""
        return len(scrub(text[:end]).encode())

    def identity(self) -> list:
        return [self.sha256, self.legacy, sorted(self.words)]


def piece_types(model: bytes) -> list[int]:
    """Return the types of the pieces of a ModelProto (sentencepiece_model.proto): 1 = normal.

    A piece is field 1: its text (field 1), score (2) and type (3), in protobuf's wire format."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (model[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if model[at - 1] < 128:
                return value, at

    def fields(at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number, begin, end or value) of the fields there."""
        while at < end:
            key, at = varint(at)
            number, wire = key >> 3, key & 7
            size, begin = varint(at) if wire in (0, 2) else ({1: 8, 5: 4}[wire], at)
            yield number, begin, size if wire == 0 else begin + size
            at = begin if wire == 0 else begin + size

    pieces = [(begin, end) for number, begin, end in fields(0, len(model)) if number == 1]
    return [next((v for n, _, v in fields(*one) if n == 3), 1) for one in pieces]


SPACE = "\u2581"  # stands for a space in sentencepiece's pieces, so in text it is written as bytes


# ---- what the files say beside the ids -------------------------------------------------------


def files_of(directory: Path) -> Path:
    """Return where a tokenizer's files are: those of a run are in its newest checkpoint."""
    has_own = any((directory / name).exists() for name in TOKENIZERS)
    is_run = (directory / "latest").is_dir() and not has_own
    return directory / "latest" if is_run else directory


def begins_text(files: dict[str, bytes], config: dict) -> bool:
    """Return whether the tokenizer puts its begin token before every text.

    Ask tokenizer_config.json, then the template in tokenizer.json; for a sentencepiece model do
    what transformers does for Llama's."""
    if "add_bos_token" in config:
        return bool(config["add_bos_token"])
    if "tokenizer.json" not in files:
        return str(config.get("tokenizer_class", "")).startswith("Llama")
    processor = json.loads(files["tokenizer.json"]).get("post_processor") or {}
    steps = processor.get("processors") or [processor]
    templates = [step for step in steps if step.get("type") == "TemplateProcessing"]
    return any("SpecialToken" in step["single"][0] for step in templates)


def find_templates(files: dict[str, bytes], config: dict) -> dict[str, str]:
    """Return the chat templates of a tokenizer by their names, "default" and "tool_use" ..."""
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        named = {one["name"]: one["template"] for one in found}
    else:
        named = {"default": found}
    if "chat_template.jinja" in files:
        named["default"] = files["chat_template.jinja"].decode()
    return named


def read_more(directory: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the FILES of a tokenizer with what a directory's other files say.

    These are additional_chat_templates/NAME.jinja and, in old directories, special_tokens_map.json:
    {"eos_token": name}, and added_tokens.json: {name: id}."""
    config = parse_object(files.get("tokenizer_config.json", b"{}"))
    changes = {}
    more = sorted(directory.glob("additional_chat_templates/*.jinja"))
    if more:
        named = find_templates(files, config) | {
            path.stem: read_bytes(path).decode() for path in more
        }
        listed = [{"name": name, "template": source} for name, source in named.items() if source]
        changes["chat_template"] = listed
        files = {name: text for name, text in files.items() if name != "chat_template.jinja"}
    tokens, names = config.get("added_tokens_decoder") or {}, directory / "special_tokens_map.json"
    if not tokens and names.exists():
        for key, name in read_json(names).items():
            if key.endswith("_token") and config.get(key) != name:
                changes[key] = name
    added = directory / "added_tokens.json"
    if added.exists():
        tokens = {str(i): added_token(name) for name, i in read_json(added).items()} | tokens
        changes["added_tokens_decoder"] = tokens
    if "tokenizer.json" in files:
        files = files | {"tokenizer.json": with_added(files["tokenizer.json"], tokens)}
        changes.pop("added_tokens_decoder", None)
    return files | ({"tokenizer_config.json": to_json(config | changes)} if changes else {})


def with_added(tokenizer_json: bytes, tokens: dict[str, dict]) -> bytes:
    """Return a tokenizer.json with those of the tokens {id: token} that it lacks."""
    lacking = [
        {"id": int(i)} | token
        for i, token in tokens.items()
        if not any(form in tokenizer_json for form in as_written(token["content"]))
    ]
    if not lacking:
        return tokenizer_json
    description = parse_object(tokenizer_json)
    added, vocab = description.get("added_tokens") or [], description["model"]["vocab"]
    taken = {*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))}
    taken |= {token["id"] for token in added}
    description["added_tokens"] = added + [one for one in lacking if one["id"] not in taken]
    return to_json(description)


def as_written(text: str) -> list[bytes]:
    """Return a text as JSON files write it, with and without escapes."""
    return [json.dumps(text, ensure_ascii=escaped).encode() for escaped in (False, True)]


def find_special(
    special_tokens: dict[str, int],
    config: dict,
    generation_config: dict,
    key: str,
    name: str = "",
    default: int = -1,
) -> int:
    """Return the id of the special token `name`, or else of the one that the files name `key`.

    tokenizer_config.json has it as a text or {"content": text}, generation_config.json under
    `key`_id as a number or a list."""
    token = config.get(key)
    token = token["content"] if isinstance(token, dict) else token
    ids = generation_config.get(key + "_id")
    candidates = [special_tokens.get(name), special_tokens.get(token)]
    candidates += ids if isinstance(ids, list) else [ids]
    return next((i for i in candidates if i in special_tokens.values()), default)


def added_token(content: str, token_id: int = -1) -> dict:
    """Return a special token's entry in tokenizer.json, or, without an id, in the config."""
    entry = {"id": token_id} if token_id >= 0 else {}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return entry | {"content": content} | flags | {"special": True}
