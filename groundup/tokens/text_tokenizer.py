"""A tokenizer's directory, opened: text to ids and back. It is what pretraining needs of one.

A tokenizer is stored as Hugging Face stores it: tokenizer.json or tokenizer.model, with
tokenizer_config.json. engines.py turns texts into ids. Ordinary text never becomes a special token:
`encode` cannot produce one. The root's tokenizer.py adds conversations.
"""

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np

from groundup.errors import UserError, naming
from groundup.files.untrusted import parse_object, read_bytes, read_json
from groundup.tokens.engines import (
    ByteLevelBPE,
    Engine,
    LibraryTokenizer,
    PanicsInOneLine,
    SentencePieceBPE,
    Unsupported,
    added_token,
    to_json,
    vocab_of,
)

FAST = "PreTrainedTokenizerFast"  # transformers' class that reads all of tokenizer.json
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # a directory has one of them; the first wins
FILES = (*TOKENIZERS, "tokenizer_config.json", "chat_template.jinja")
REWRITE = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes the right files"
MOST_IDS = 2**24  # of a tokenizer; a file may give a token any number

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
        self.files = files  # what `save` writes, byte for byte
        self.generation_config = generation_config  # as it was read
        self.config = config = parse_object(files.get("tokenizer_config.json", b"{}"))
        if "tokenizer.json" in files:
            self.engine = engine_of(files["tokenizer.json"])
        else:
            self.engine = SentencePieceBPE(files["tokenizer.model"], config)
        self.backend = self.engine.backend
        self.special_tokens = self.engine.special_tokens
        self.special_ids = frozenset(self.special_tokens.values())
        # what each id writes; special tokens write their names
        self.pieces = Pieces(self.engine.token_bytes)
        self.pieces |= {i: name.encode() for name, i in self.special_tokens.items()}
        self.vocab_size = 1 + max(self.pieces)  # ids may have gaps
        # the head of a model has a row for every id, so one wild id would take all memory
        least, most = min(self.pieces), MOST_IDS
        if not 0 <= least <= self.vocab_size <= most:
            raise UserError(f"its ids reach from {least} to {self.vocab_size - 1}, over {most}")

        # By our own name of the token, or by the role that the files give to one of theirs.
        self.generation = parse_object(generation_config)
        self.eot_id = self._find_special("eos_token", name="<|endoftext|>")
        self.pad_id = self._find_special("pad_token", name="<|pad|>")
        self.bos_id = self._find_special("bos_token", default=self.eot_id)  # ours has no other
        begins = config.get("add_bos_token", self.engine.begins)
        self.begins = self.bos_id >= 0 and bool(begins)
        # markers of our own chat format; others' are found by their template
        self.im_start_id = self.special_tokens.get("<|im_start|>", -1)
        self.im_end_id = self.special_tokens.get("<|im_end|>", -1)
        # a chat model often has several: the end of a text, of a turn, of a call
        ends = self.generation.get("eos_token_id")
        ends = set(ends if isinstance(ends, list) else [ends]) & self.special_ids
        self.stop_ids = frozenset((ends | {self.eot_id, self.im_end_id}) - {-1})

    def _find_special(self, key: str, name: str = "", default: int = -1) -> int:
        """Return the id of the special token `name`, or else of the one that the files name `key`.

        tokenizer_config.json has it as a text or {"content": text}."""
        token = self.config.get(key)  # such as "eos_token"
        token = token["content"] if isinstance(token, dict) else token
        candidates = [self.special_tokens.get(name), self.special_tokens.get(token)]
        ids = self.generation.get(key + "_id")  # a number or a list
        candidates += ids if isinstance(ids, list) else [ids]
        return next((i for i in candidates if i in self.special_tokens.values()), default)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Self:
        """Return the tokenizer of a Hugging Face directory. Raise UserError."""
        directory, files = find_tokenizer(Path(directory)), {}
        for name in (*FILES, "generation_config.json"):
            path = directory / name
            try:
                files[name] = read_bytes(path)
            except FileNotFoundError:  # none of them has to be there
                continue
            except OSError as error:
                raise UserError(f"tokenizer: cannot read {path}: {error.strerror}") from None
        if not has_tokenizer(directory):
            nothing = f"no tokenizer.json or tokenizer.model in {directory}"
            how = "train a tokenizer"
            if (directory / "config.json").exists():  # of a model
                how = "copy the model's tokenizer files there"
            if (directory / "vocab.json").exists():
                how = REWRITE
            raise UserError(f"tokenizer: {nothing}; {how}")
        if "tokenizer.json" not in files and "tokenizer_config.json" not in files:
            lacks = f"{directory} has a tokenizer.model but no tokenizer_config.json"
            raise UserError(f"tokenizer: {lacks}; add it")
        # it belongs to the model, and only its special tokens are read
        generation_config = files.pop("generation_config.json", None)
        if generation_config is None:
            generation_config = ids_of_model(directory)
        # whatever is wrong inside a file is one line for the user
        damage = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
        try:
            return cls(cls.read_more(directory, files), generation_config)
        except UserError as error:
            raise UserError(f"tokenizer: cannot use {directory}: {error}") from None
        except damage as error:
            for name in (*files, "generation_config.json"):
                if name.endswith(".json") and (directory / name).exists():
                    read_json(directory / name, "tokenizer")  # raises for one that is no JSON
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"tokenizer: {directory} is damaged: {what}") from None

    @staticmethod
    def read_more(directory: Path, files: dict[str, bytes]) -> dict[str, bytes]:
        """Return the FILES of a tokenizer with what a directory's other files say.

        In old directories these are special_tokens_map.json, {"eos_token": name}, and
        added_tokens.json, {name: id}."""
        read = parse_object(files.get("tokenizer_config.json", b"{}"))
        config, tokens = dict(read), read.get("added_tokens_decoder") or {}
        # Newer directories have all this in tokenizer_config.json, which then wins.
        names, added = directory / "special_tokens_map.json", directory / "added_tokens.json"
        if not tokens and names.exists():  # the names of eos_token and so on
            config |= {key: n for key, n in read_json(names).items() if key.endswith("_token")}
        if added.exists():
            tokens = {str(i): added_token(name) for name, i in read_json(added).items()} | tokens
        if "tokenizer.json" in files:
            files = files | {"tokenizer.json": with_added(files["tokenizer.json"], tokens)}
        elif tokens:
            config["added_tokens_decoder"] = tokens
        return files if config == read else files | {"tokenizer_config.json": to_json(config)}

    def save(self, directory: str | os.PathLike) -> None:
        """Write the files that transformers.AutoTokenizer and `load` read."""
        os.makedirs(directory, exist_ok=True)  # a new one, or a checkpoint's
        files, config = self.files, dict(self.config)
        reads_all = config.get("tokenizer_class", FAST) in (FAST, "TokenizersBackend")
        if "tokenizer.json" in files and not reads_all:
            # transformers 5 builds another tokenizer from the vocabulary for a class such as
            # GPT2Tokenizer
            config["tokenizer_class"] = FAST
            files = files | {"tokenizer_config.json": to_json(config)}
        # complete files under other names first
        for name, content in files.items():
            path = os.path.join(directory, name)
            with naming(path), open(path + ".tmp", "wb") as f:
                f.write(content)
        # A kill here leaves no tokenizer, never half of one or a mixture with the one before: what
        # `load` and others look for, tokenizer.json or tokenizer.model, goes first and comes last.
        for name in (*TOKENIZERS, *set(FILES) - set(files)):
            Path(directory, name).unlink(missing_ok=True)
        for name in sorted(files, key=lambda name: name in TOKENIZERS):
            path = os.path.join(directory, name)
            os.replace(path + ".tmp", path)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text, never a special one; lone surrogates become U+FFFD."""
        with PanicsInOneLine():
            return self.engine.encode(text)

    def encode_token(self, token: bytes) -> list[int]:
        """Return the ids of a token's bytes, which may be part of a character; [] if unknown."""
        # for a new token's embedding: the mean of those of the tokens that it was made of
        if isinstance(self.engine, ByteLevelBPE):
            # what a tokenizer that extends this one would find in one chunk
            token = token.translate(None, self.engine.missing)  # bytes without a token are left out
            return self.engine.encoding._encode_single_piece(token) if token else []
        try:
            return self.encode(token.decode())
        except UnicodeDecodeError:  # part of a character
            return []

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that make no character become U+FFFD."""
        return b"".join([self.pieces[i] for i in ids]).decode("utf-8", errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """Return bytes of text per id, int32 (vocab_size,), 0 for special ones."""
        # what makes a loss per token a loss per byte, which tokenizers can be compared by
        lengths = np.zeros(self.vocab_size, np.int32)
        for i, token in self.engine.token_bytes.items():
            lengths[i] = len(token)
        return lengths

    def fingerprint(self) -> str:
        """Return a SHA-256 of all that decides the ids; token files and checkpoints store it."""
        # Not a digest of the files: a template or a comment in them changes no id.
        specials = sorted(self.special_tokens.items())
        identity = [self.backend, specials, self.engine.identity()]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


@functools.lru_cache(maxsize=4)
def engine_of(tokenizer_json: bytes) -> Engine:
    """Return the engine that runs a tokenizer.json.

    A run opens the tokenizer of its data, its start and its checkpoint: most often the same one,
    and checking the merges of 50,000 tokens takes a second."""
    description = parse_object(tokenizer_json)
    # the library ignores empty ones
    added = [token for token in description.get("added_tokens") or [] if token["content"]]
    description["added_tokens"] = added
    try:
        engine = ByteLevelBPE(description)
    except Unsupported as why:
        engine = LibraryTokenizer(description, str(why))
    check_ids(added, vocab_of(description))
    engine.begins = begins_text(description)
    return engine


def check_ids(added: list[dict], vocab: dict[str, int]) -> None:
    """Raise UserError for an added token that has another id in the library tokenizers.

    That numbers those that are not in the vocabulary on from its size, whatever the file says."""
    new = dict.fromkeys(token["content"] for token in added if token["content"] not in vocab)
    wanted = vocab | dict(zip(new, itertools.count(len(vocab)), strict=False))
    for token in added:
        name, i = token["content"], token["id"]
        if i != wanted[name]:
            has = f"its token {name!r} has the id {i}, but in transformers {wanted[name]}"
            raise UserError(f"{has}; {REWRITE}")


class Pieces(dict):
    """{id: bytes}, with an error of our own for an id that is not there."""

    def __missing__(self, token_id: int) -> bytes:
        known = f"the tokenizer's {len(self)} ids"
        raise UserError(f"tokenizer: id {token_id} is not one of {known}")


# ---- what the files say beside the ids -------------------------------------------------------


def find_tokenizer(directory: Path) -> Path:
    """Return where a tokenizer's files are: those of a run are in its newest checkpoint."""
    # a run directory may hold a tokenizer of its own beside its checkpoints: that one is meant
    is_run = (directory / "latest").is_dir() and not has_tokenizer(directory)
    return directory / "latest" if is_run else directory


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in TOKENIZERS)


def ids_of_model(directory: Path) -> bytes:
    """Return what generation_config.json would say of special tokens, from config.json."""
    # transformers takes them from there, too
    path = directory / "config.json"
    config = read_json(path, "tokenizer") if path.exists() else {}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return to_json({name: config[name] for name in names if name in config})


def begins_text(description: dict) -> bool:
    """Return whether a parsed tokenizer.json puts a special token before every text."""
    processor = description.get("post_processor") or {}
    steps = processor.get("processors") or [processor]  # one step, or a sequence
    templates = [step for step in steps if step.get("type") == "TemplateProcessing"]
    return any("SpecialToken" in part for step in templates for part in step["single"][:1])


def with_added(tokenizer_json: bytes, tokens: dict[str, dict]) -> bytes:
    """Return a tokenizer.json with those of the tokens {id: token} that it lacks."""
    # Look for the names in the bytes first: to parse a large tokenizer.json takes a second.
    lacking = [
        {"id": int(i)} | token
        for i, token in tokens.items()
        if json.dumps(token["content"], ensure_ascii=False).encode() not in tokenizer_json
    ]
    if not lacking:  # as in nearly all directories
        return tokenizer_json
    description = parse_object(tokenizer_json)
    added = description.get("added_tokens") or []
    # an id that is taken already keeps its token
    taken = {*vocab_of(description).values(), *(token["id"] for token in added)}
    description["added_tokens"] = added + [one for one in lacking if one["id"] not in taken]
    return to_json(description)
