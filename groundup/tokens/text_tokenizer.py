"""Text to token ids and back: what pretraining needs of a tokenizer.

There are three engines. "bpe" splits text into chunks by a regular expression and merges the most
frequent neighbours inside them, starting from the 256 bytes, so that every text has ids and decodes
to itself; tiktoken runs it. "sentencepiece" is that library's BPE over characters, with byte
fallback. "tokenizers" runs any other tokenizer.json by the library of that name.

A tokenizer is stored as Hugging Face stores it: tokenizer.json or tokenizer.model, with
tokenizer_config.json. Ordinary text never becomes a special token: `encode` cannot produce one.
The root's tokenizer.py adds conversations.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import regex
import tiktoken

from groundup.errors import UserError, naming
from groundup.files.untrusted import parse_object, read_bytes, scrub
from groundup.tokens import foreign

FAST = "PreTrainedTokenizerFast"  # transformers' class that reads all of tokenizer.json
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")

# ---- byte-level BPE; for the other engines see foreign.py ------------------------------------


class ByteLevelBPE:
    """The backend "bpe": a tokenizer.json, our own or another's, run by tiktoken.

    special_tokens {text: id};  token_bytes {id: bytes} of all other tokens
    """

    def __init__(self, description: dict) -> None:
        """Take a parsed tokenizer.json. Raise foreign.Unsupported if tiktoken would differ."""
        found = foreign.read_bpe(description)
        self.special_tokens = found.specials
        self.pattern = found.pattern
        self.nfc = found.nfc
        self.words = found.words
        self.added_words = set(found.words)
        self.encoding = tiktoken.Encoding(
            "bpe",
            pat_str=found.pattern,
            mergeable_ranks=found.ranks,
            special_tokens=found.specials | found.words,
        )
        self.token_bytes = {i: token for token, i in found.ranks.items()}
        self.token_bytes |= {i: word.encode() for word, i in found.words.items()}
        self.sizes = {i: len(token) for i, token in self.token_bytes.items()}
        self.missing = bytes(b for b in IN_UTF8 if bytes([b]) not in found.ranks)
        foreign.check_pattern(self.encoding, self.pattern)
        wanted = ALL_KINDS.encode().translate(None, self.missing)
        if self.encoding.decode_bytes(self.encode(ALL_KINDS)) != wanted:
            leaves_out = f"its pattern leaves out part of the text: {self.pattern!r:.200}"
            raise foreign.Unsupported(leaves_out)

    def encode(self, text: str) -> list[int]:
        if len(text) > foreign.MAX_CHARS:
            return self.encode_array(text).tolist()
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        if self.missing:
            data = scrub(text).encode()
            if len(data) > len(data.translate(None, self.missing)):
                return self.encode_without(data.decode())
        if self.words:
            words = self.added_words
            return self.encoding.encode(text, allowed_special=words, disallowed_special=())
        return self.encoding.encode_ordinary(text)  # replaces surrogates itself

    def encode_array(self, text: str) -> np.ndarray:
        if self.missing and len(text) <= foreign.MAX_CHARS:
            return np.array(self.encode(text), np.uint32)
        text = scrub(unicodedata.normalize("NFC", text) if self.nfc else text)
        parts = []
        for block in foreign.blocks(text):
            if self.missing:
                parts.append(self.encode_array(block))
            else:
                to_numpy, words = self.encoding.encode_to_numpy, self.added_words
                parts.append(to_numpy(block, allowed_special=words, disallowed_special=()))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def encode_without(self, text: str) -> list[int]:
        """Return the ids of a text with bytes that have no token: merge chunks without them."""
        ids = []
        words = "|".join(map(re.escape, self.words))
        for part in re.split(f"({words})", text) if words else [text]:
            if part in self.words:
                ids.append(self.encoding.encode_single_token(part))
                continue
            for chunk in regex.findall(self.pattern, part):
                if data := chunk.encode().translate(None, self.missing):
                    ids += self.encoding._encode_single_piece(data)
        return ids

    def encode_spans(self, text: str, place: str = "") -> foreign.Spans:
        """Return the ids of a text, and the bytes at which each begins and ends."""
        ids, sizes = self.encode(text), self.sizes
        borders = [0, *itertools.accumulate([sizes[i] for i in ids])]
        return ids, borders[:-1], borders[1:]

    def position(self, text: str, end: int) -> int:
        """Return where text[:end] ends, as encode_spans counts."""
        seen = scrub(text[:end])
        if self.nfc:
            seen = unicodedata.normalize("NFC", seen)
        return len(seen.encode().translate(None, self.missing))

    def identity(self) -> list:
        """Return all that decides the ids, besides the special tokens, as plain values."""
        # in the order of the merges
        tokens = [(i, token.hex()) for i, token in sorted(self.token_bytes.items())]
        return [self.pattern, self.nfc, sorted(self.words), tokens]


IN_UTF8 = (*range(0xC0), *range(0xC2, 0xF5))  # bytes; a vocabulary may lack the others, or some
ALL_KINDS = (
    "a Z1\u0664 \u00e9\u0915\u093f \u7532\U0001f600 _'s'!\u3002 "
    "\t\r\n\n \x00\x85\u00a0\u2028\u200b\ufffd  "
)


# ---- the tokenizer ----------------------------------------------------------------------------


class TextTokenizer:
    """Text <-> ids.

    backend: "bpe" | "sentencepiece" | "tokenizers" (a tokenizer.json that tiktoken cannot run)
    vocab_size: every id is below it;  special_tokens {text: id}
    pieces {id: bytes of the token, or the name of a special one}
    eot_id, pad_id, im_start_id, im_end_id, bos_id: -1 if there is none; in ours bos_id is eot_id
    begins: whether bos_id stands before every text, as the tokenizer's own files say
    stop_ids: the ids that end a text or a turn
    """

    def __init__(self, files: dict[str, bytes], generation_config: bytes = b"{}") -> None:
        """Take the files of a Hugging Face directory, {name: content}; `save` writes them."""
        self.files = files
        self.generation_config = generation_config
        self.config = config = parse_object(files.get("tokenizer_config.json", b"{}"))
        self.backend, self.engine = self._choose_engine(config)
        self.special_tokens = self.engine.special_tokens
        self.special_ids = frozenset(self.special_tokens.values())
        self.pieces = Pieces(self.engine.token_bytes)
        self.pieces |= {i: name.encode() for name, i in self.special_tokens.items()}
        self.vocab_size = 1 + max(self.pieces)
        least, most = min(self.pieces), foreign.MOST_IDS
        if not 0 <= least <= self.vocab_size <= most:
            raise UserError(f"its ids reach from {least} to {self.vocab_size - 1}, over {most}")

        generation = parse_object(generation_config)
        find = partial(foreign.find_special, self.special_tokens, config, generation)
        self.eot_id = find("eos_token", name="<|endoftext|>")
        self.pad_id = find("pad_token", name="<|pad|>")
        self.bos_id = find("bos_token", default=self.eot_id)
        self.begins = self.bos_id >= 0 and foreign.begins_text(files, config)
        self.im_start_id = self.special_tokens.get("<|im_start|>", -1)
        self.im_end_id = self.special_tokens.get("<|im_end|>", -1)
        ends = generation.get("eos_token_id")
        ends = set(ends if isinstance(ends, list) else [ends]) & self.special_ids
        self.stop_ids = frozenset((ends | {self.eot_id, self.im_end_id}) - {-1})

    def _choose_engine(
        self, config: dict
    ) -> tuple[str, "ByteLevelBPE | foreign.SentencePieceBPE | foreign.LibraryTokenizer"]:
        if "tokenizer.json" not in self.files:
            self.added_tokens = list((config.get("added_tokens_decoder") or {}).values())
            engine = foreign.SentencePieceBPE(self.files["tokenizer.model"], config)
            return "sentencepiece", engine
        backend, engine, self.added_tokens = engine_of(self.files["tokenizer.json"])
        return backend, engine

    def __reduce__(self) -> tuple:
        """Pickle the files: a compiled template cannot be."""
        return type(self), (self.files, self.generation_config)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Self:
        """Return the tokenizer of a Hugging Face directory. Raise UserError."""
        directory, files = foreign.files_of(Path(directory)), {}
        for name in (*FILES, "generation_config.json"):
            try:
                files[name] = read_bytes(directory / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                where = directory / name
                raise UserError(f"tokenizer: cannot read {where}: {error.strerror}") from None
        generation_config = files.pop("generation_config.json", b"{}")
        if not set(foreign.TOKENIZERS) & set(files):
            nothing = f"no tokenizer.json or tokenizer.model in {directory}"
            raise UserError(f"tokenizer: {nothing}; train a tokenizer")
        if "tokenizer.json" not in files and "tokenizer_config.json" not in files:
            lacks = f"{directory} has a tokenizer.model but no tokenizer_config.json"
            raise UserError(f"tokenizer: {lacks}; add it")
        damage = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
        try:
            return cls(foreign.read_more(directory, files), generation_config)
        except UserError as error:
            raise UserError(f"tokenizer: cannot use {directory}: {error}") from None
        except damage as error:
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"tokenizer: {directory} is damaged: {what}") from None

    def save(self, directory: str | os.PathLike) -> None:
        """Write the files that transformers.AutoTokenizer and `load` read."""
        os.makedirs(directory, exist_ok=True)
        files, config = self.files, dict(self.config)
        reads_all = config.get("tokenizer_class", FAST) in (FAST, "TokenizersBackend")
        if "tokenizer.json" in files and not reads_all:
            # transformers 5 builds another tokenizer from the vocabulary for a class such as
            # GPT2Tokenizer
            config["tokenizer_class"] = FAST
            files = files | {"tokenizer_config.json": foreign.to_json(config)}
        for name, content in files.items():
            path = os.path.join(directory, name)
            with naming(path), open(path + ".tmp", "wb") as f:
                f.write(content)
        # A kill here leaves no tokenizer, never half of one or a mixture with the one before: what
        # `load` and others look for, tokenizer.json or tokenizer.model, goes first and comes last.
        for name in (*foreign.TOKENIZERS, *set(FILES) - set(files)):
            Path(directory, name).unlink(missing_ok=True)
        for name in sorted(files, key=lambda name: name in foreign.TOKENIZERS):
            path = os.path.join(directory, name)
            os.replace(path + ".tmp", path)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text, never a special one; lone surrogates become U+FFFD."""
        try:
            return self.engine.encode(text)
        except BaseException as error:
            raise foreign.named_panic(error) from None

    def encode_array(self, text: str) -> np.ndarray:
        """Return `encode` as uint32 (n,)."""
        try:
            return self.engine.encode_array(text)
        except BaseException as error:
            raise foreign.named_panic(error) from None

    def encode_token(self, token: bytes) -> list[int]:
        """Return the ids of a token's bytes, which may be part of a character; [] if unknown."""
        if isinstance(self.engine, ByteLevelBPE):
            # what a tokenizer that extends this one would find in one chunk
            token = token.translate(None, self.engine.missing)
            return self.engine.encoding._encode_single_piece(token) if token else []
        try:
            return self.encode(token.decode())
        except UnicodeDecodeError:
            return []

    def token_bytes(self, token_id: int) -> bytes:
        """Return what an id adds to the text, possibly part of a character; b"" if special."""
        return b"" if token_id in self.special_ids else self.pieces[token_id]

    def decode_bytes(self, ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of `ids`, with the names of special ones or without them."""
        piece = self.token_bytes if skip_special_tokens else self.pieces.__getitem__
        return b"".join([piece(i) for i in ids])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; bytes that make no character become U+FFFD.

        For ids as they are generated see StreamDecoder."""
        return self.decode_bytes(ids, skip_special_tokens).decode("utf-8", errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """Return bytes of text per id, int32 (vocab_size,), 0 for special ones."""
        lengths = np.zeros(self.vocab_size, np.int32)
        for i, token in self.engine.token_bytes.items():
            lengths[i] = len(token)
        return lengths

    def fingerprint(self) -> str:
        """Return a SHA-256 of all that decides the ids; token files and checkpoints store it."""
        specials = sorted(self.special_tokens.items())
        identity = [self.backend, specials, self.engine.identity()]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


@functools.lru_cache(maxsize=4)
def engine_of(tokenizer_json: bytes) -> tuple:
    """Return (backend, engine, added tokens) of a tokenizer.json.

    A run opens the tokenizer of its data, its start and its checkpoint: most often the same one,
    and checking the merges of 50,000 tokens takes a second."""
    description = parse_object(tokenizer_json)
    added = description.get("added_tokens") or []
    try:
        return "bpe", ByteLevelBPE(description), added
    except foreign.Unsupported as why:
        return "tokenizers", foreign.LibraryTokenizer(description, str(why)), added


class Pieces(dict):
    """{id: bytes}, with an error of our own for an id that is not there."""

    def __missing__(self, token_id: int) -> bytes:
        known = f"the tokenizer's {len(self)} ids"
        raise UserError(f"tokenizer: id {token_id} is not one of {known}")
