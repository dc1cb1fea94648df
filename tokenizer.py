"""Text to token ids and back: training, encoding and decoding, special tokens, the chat template.

    python tokenizer.py --input='books/*.txt' --out_dir=data/tok --vocab_size=32768      # train
    python tokenizer.py --input='books/*.txt' --out_dir=data/sp --backend=sentencepiece
    python tokenizer.py --input='wiki/=0.7,code/=0.3' --max_mb=100                       # train on a mixture
    python tokenizer.py --extend=path/to/qwen --input=zh/ --vocab_size=160000 --out_dir=data/zh

Two kinds of tokenizer ("backend"). "bpe" splits text into chunks by a regular expression and merges the most frequent
neighbours inside them, starting from the 256 bytes, so that every text has ids and decodes to itself; we train it
(groundup/tokens/bpe.py), tiktoken runs it. "sentencepiece" is that library's BPE over characters, with byte fallback,
set up so that text decodes to itself too.

A tokenizer is stored as Hugging Face stores it (tokenizer.json or tokenizer.model, with tokenizer_config.json):
transformers.AutoTokenizer reads ours and gives the same ids; `Tokenizer.load` reads those of Llama, Qwen or GPT-2.

Ordinary text never becomes a special token: `encode` cannot produce one, only `render` writes them.
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C is one line from here on
    from groundup.errors import end_in_one_line

    end_in_one_line()

import codecs
import hashlib
import json
import os
import re
import time
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import regex
import tiktoken

from configurator import configure
from groundup.errors import UserError, naming
from groundup.files.streams import scrub
from groundup.files.text_mix import first_texts, parts_of, texts_by_weight
from groundup.files.untrusted import check_no_owner, parse_object, read_bytes
from groundup.tokens import bpe, foreign
from groundup.tokens.bpe import PATTERNS, SIZE_STEP, SMALLEST
from groundup.tokens.templates import ChatTemplate

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # text to train on: files, directories, globs, comma-separated, a=0.7,b=0.3; - is stdin
text_key = ""  # where the text is in JSON, csv and parquet: text, a.b or title,body; "" = detected
out_dir = "data/tokenizer"  # where the trained tokenizer goes
backend = "bpe"  # bpe | sentencepiece
pattern = "qwen"  # how bpe splits text: qwen | gpt4 (llama.cpp lacks it) | gpt2 | cl100k | zh (for text with Chinese)
vocab_size = 32_768  # all ids, special ones included; rounded up to a multiple of 128
max_mb = 256  # megabytes of text to read; more changes a tokenizer little
extend = ""  # directory of a tokenizer to which tokens learnt from `input` are added, up to vocab_size, into out_dir

SPECIALS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant", "tool")
# Tokenizer.render in Jinja, for tokenizer_config.json; "generation" marks what the model is trained on.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG = {  # of tokenizer_config.json, the part that both backends share
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}
FAST = "PreTrainedTokenizerFast"  # transformers' class that reads all of tokenizer.json
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
SHOWN_MB = 10  # of each part of `input` that a new tokenizer is measured on


# ---- training --------------------------------------------------------------------------------


def train(texts: Iterable[str], vocab_size: int, backend: str = "bpe", pattern: str = "qwen") -> "Tokenizer":
    """Return a tokenizer trained on `texts` with `vocab_size` ids in all, rounded up to a multiple of SIZE_STEP.
    Ids of bpe: 256 bytes, merges, SPECIALS, <|reserved_i|>; fewer than asked for if no pair is left to merge."""
    if backend not in ("bpe", "sentencepiece"):
        raise UserError(f"tokenizer: unknown backend {backend!r}; use 'bpe' or 'sentencepiece'")
    if backend == "sentencepiece" and pattern != "qwen":
        raise UserError(f"tokenizer: pattern={pattern!r} is for backend=bpe; sentencepiece splits text its own way")
    if pattern not in PATTERNS:
        raise UserError(f"tokenizer: unknown pattern {pattern!r}; use one of {', '.join(PATTERNS)}")
    size = -(-vocab_size // SIZE_STEP) * SIZE_STEP
    if size < SMALLEST:
        raise UserError(f"tokenizer: vocab_size={vocab_size} cannot hold bytes and specials; use >= {SMALLEST}")
    if size != vocab_size:
        print(f"tokenizer: vocab_size={vocab_size} is rounded up to {size}, a multiple of {SIZE_STEP}")
    if backend == "sentencepiece":
        return Tokenizer(sentencepiece_files(bpe.train_sentencepiece(texts, size, SPECIALS)))
    counts, n_merges = bpe.count_chunks(texts, PATTERNS[pattern]), size - 256 - len(SPECIALS)
    if not counts:
        raise UserError("tokenizer: the input holds no text to learn from")
    counts = bpe.characters_first(counts, n_merges // 2) if pattern == "zh" else counts
    written = PATTERNS["qwen" if pattern == "zh" else pattern]  # llama.cpp has it; no merge is longer than zh's chunks
    tokenizer = Tokenizer(bpe_files(bpe.train_bpe(counts, n_merges), written))
    if tokenizer.vocab_size < size:
        why = "every pair left is rare. Phrases that repeat are tokens by now, so a smaller one may learn better"
        print(f"tokenizer: vocab_size is {tokenizer.vocab_size} instead of {size}: {why}")
    return tokenizer


def bpe_files(merges: Sequence[tuple[int, int]], pattern: str) -> dict[str, bytes]:
    """Return {file name: content} of a byte-level BPE with these merges and our special tokens."""
    n_reserved = -(256 + len(merges) + len(SPECIALS)) % SIZE_STEP
    description = foreign.bpe_description(merges, (*SPECIALS, *foreign.reserved(n_reserved, ())), pattern)
    config = CONFIG | {"tokenizer_class": FAST}
    return {"tokenizer.json": foreign.to_json(description), "tokenizer_config.json": foreign.to_json(config)}


def sentencepiece_files(model: bytes) -> dict[str, bytes]:
    """Return {file name: content} of a model made by train_sentencepiece."""
    config = CONFIG | {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "legacy": False}
    config |= {"add_prefix_space": False, "add_bos_token": False, "add_eos_token": False}
    # <unk> has id 0, the special tokens follow
    config["added_tokens_decoder"] = {str(i): foreign.added_token(name) for i, name in enumerate(SPECIALS, start=1)}
    return {"tokenizer.model": model, "tokenizer_config.json": foreign.to_json(config)}


def extended(tokenizer: "Tokenizer", texts: Iterable[str], n_new: int) -> "Tokenizer":
    """Return `tokenizer` (bpe) with about n_new more tokens, learnt from `texts`. Every old id stays, special ones
    included; new ids follow, then reserved special tokens up to a multiple of SIZE_STEP. Raise UserError."""
    if tokenizer.backend == "sentencepiece":
        raise UserError("tokenizer: only a tokenizer.json (byte-level BPE) can be extended, not a sentencepiece model")
    if n_new <= 0:
        raise UserError(f"tokenizer: it has {tokenizer.vocab_size} ids already; give a larger vocab_size")
    size = -(-(tokenizer.vocab_size + n_new) // SIZE_STEP) * SIZE_STEP
    return Tokenizer(foreign.extended_bpe(tokenizer.files, texts, tokenizer.vocab_size, size))


def chat_ready(tokenizer: "Tokenizer") -> "Tokenizer":
    """Return `tokenizer` with what conversations need. One that has a chat template of its own stays as it is; any
    other gets ours, and after all other ids <|im_start|>, <|im_end|> and <|pad|> where it has none."""
    if tokenizer.foreign_template:
        return tokenizer
    files, first = dict(tokenizer.files), tokenizer.vocab_size
    names = [name for name in ("<|im_start|>", "<|im_end|>") if name not in tokenizer.special_tokens]
    names += ["<|pad|>"] if tokenizer.pad_id < 0 else []
    if names:
        names += foreign.reserved(-(first + len(names)) % SIZE_STEP, tokenizer.special_tokens)
        files = foreign.with_specials(files, names, first)
    config = json.loads(files.get("tokenizer_config.json", b"{}")) | {"chat_template": CHAT_TEMPLATE}
    config |= {"pad_token": "<|pad|>"} if tokenizer.pad_id < 0 else {}
    return Tokenizer(files | {"tokenizer_config.json": foreign.to_json(config)}, tokenizer.generation_config)


# ---- encoding: for the other backend see foreign.SentencePieceBPE ----------------------------


class ByteLevelBPE:
    """The backend "bpe": a tokenizer.json, our own or another's, run by tiktoken.

    special_tokens {text: id};  token_bytes {id: bytes} of all other tokens
    """

    def __init__(self, description: dict) -> None:
        """Take a parsed tokenizer.json. Raise foreign.Unsupported if tiktoken would not give the same ids."""
        ranks, self.special_tokens, words, self.pattern, self.nfc = foreign.read_bpe(description)
        self.words = set(words)
        self.encoding = tiktoken.Encoding(
            "bpe", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens | words
        )
        self.token_bytes = {i: token for token, i in ranks.items()} | {i: word.encode() for word, i in words.items()}
        self.missing = bytes(b for b in IN_UTF8 if bytes([b]) not in ranks)
        foreign.check_pattern(self.encoding, self.pattern)
        if self.encoding.decode_bytes(self.encode(ALL_KINDS)) != ALL_KINDS.encode().translate(None, self.missing):
            raise foreign.Unsupported(f"its pattern leaves out part of the text: {self.pattern!r:.200}")

    def encode(self, text: str) -> list[int]:
        if len(text) > bpe.MAX_CHARS:
            return self.encode_array(text).tolist()
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        if self.missing and len(data := scrub(text).encode()) > len(data.translate(None, self.missing)):
            return self.encode_without(data.decode())
        if self.words:
            return self.encoding.encode(text, allowed_special=self.words, disallowed_special=())
        return self.encoding.encode_ordinary(text)  # replaces surrogates itself

    def encode_array(self, text: str) -> np.ndarray:
        if self.missing and len(text) <= bpe.MAX_CHARS:
            return np.array(self.encode(text), np.uint32)
        text = scrub(unicodedata.normalize("NFC", text) if self.nfc else text)
        encode = partial(self.encoding.encode_to_numpy, allowed_special=self.words, disallowed_special=())
        parts = [self.encode_array(block) if self.missing else encode(block) for block in bpe.blocks(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def encode_without(self, text: str) -> list[int]:
        """Return the ids of a text with bytes that have no token: each chunk is merged without them."""
        ids = []
        for part in re.split(f"({'|'.join(map(re.escape, self.words))})", text) if self.words else [text]:
            if part in self.words:
                ids.append(self.encoding.encode_single_token(part))
                continue
            for chunk in regex.findall(self.pattern, part):
                if data := chunk.encode().translate(None, self.missing):
                    ids += self.encoding._encode_single_piece(data)
        return ids

    def identity(self) -> list:
        """Return all that decides the ids, besides the special tokens, as plain values."""
        tokens = [(i, token.hex()) for i, token in sorted(self.token_bytes.items())]  # in the order of the merges
        return [self.pattern, self.nfc, sorted(self.words), tokens]


IN_UTF8 = (*range(0xC0), *range(0xC2, 0xF5))  # bytes; a vocabulary may lack the others, and some of these
ALL_KINDS = "a Z1\u0664 \u00e9\u0915\u093f \u7532\U0001f600 _'s'!\u3002 \t\r\n\n \x00\x85\u00a0\u2028\u200b\ufffd  "


# ---- the tokenizer ---------------------------------------------------------------------------


class Tokenizer:
    """Text <-> ids, and conversations -> ids with a mask of what is trained on. From `train` or `Tokenizer.load`.

    backend: "bpe" | "sentencepiece" | "tokenizers" (a tokenizer.json that tiktoken cannot run)
    vocab_size: every id is below it;  special_tokens {text: id}
    pieces {id: bytes of the token, or the name of a special one}
    eot_id, pad_id, im_start_id, im_end_id, bos_id: -1 where another's tokenizer has none; in ours bos_id is eot_id
    turn_end_id: the id that ends an assistant's turn, -1 if there is no chat template
    foreign_template: whether conversations are written by a chat template that is not ours
    begins: whether bos_id stands before every text, as the tokenizer's own files say
    stop_ids: the ids that end a text or a turn
    """

    def __init__(self, files: dict[str, bytes], generation_config: bytes = b"{}") -> None:
        """Take the files of a directory in Hugging Face's layout, {name: content}; `save` writes them unchanged."""
        self.files, self.generation_config = files, generation_config
        config = parse_object(files.get("tokenizer_config.json", b"{}"))
        self.engine: ByteLevelBPE | foreign.SentencePieceBPE | foreign.LibraryTokenizer
        if "tokenizer.model" in files:
            self.backend = "sentencepiece"
            self.engine = foreign.SentencePieceBPE(files["tokenizer.model"], config.get("added_tokens_decoder") or {})
        else:
            description = parse_object(files["tokenizer.json"])
            try:
                self.backend, self.engine = "bpe", ByteLevelBPE(description)
            except foreign.Unsupported as why:
                self.backend, self.engine = "tokenizers", foreign.LibraryTokenizer(description, str(why))
        self.special_tokens = self.engine.special_tokens
        self.special_ids = frozenset(self.special_tokens.values())
        self.pieces = Pieces(self.engine.token_bytes | {i: s.encode() for s, i in self.special_tokens.items()})
        self.vocab_size = 1 + max(self.pieces)
        if not 0 <= min(self.pieces) <= self.vocab_size <= foreign.MOST_IDS:
            raise UserError(f"its ids reach from {min(self.pieces)} to {self.vocab_size - 1}, over {foreign.MOST_IDS}")

        generation = parse_object(generation_config)
        find = partial(foreign.find_special, self.special_tokens, config, generation)
        self.eot_id = find("eos_token", name="<|endoftext|>")
        self.pad_id = find("pad_token", name="<|pad|>")
        self.bos_id = find("bos_token", default=self.eot_id)
        self.begins = self.bos_id >= 0 and foreign.begins_text(files, config)
        self.im_start_id = self.special_tokens.get("<|im_start|>", -1)
        self.im_end_id = self.special_tokens.get("<|im_end|>", -1)
        self.template_source = foreign.find_template(files, config)
        self.foreign_template = self.template_source not in ("", CHAT_TEMPLATE)
        self.template_settings = dict(config.get("chat_template_kwargs") or {})
        self.turn_end_id = self._find_turn_end()
        ends = generation.get("eos_token_id")
        ends = {i for i in (ends if isinstance(ends, list) else [ends]) if i in self.special_ids}
        self.stop_ids = frozenset({self.eot_id, self.turn_end_id, self.im_end_id, *ends} - {-1})

    def __reduce__(self) -> tuple:
        """Pickle the files: a compiled template cannot be."""
        return Tokenizer, (self.files, self.generation_config)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Tokenizer":
        """Return the tokenizer of a Hugging Face directory. Raise UserError: there is none, damaged, not supported."""
        directory, files = foreign.files_of(Path(directory)), {}
        for name in (*FILES, "generation_config.json"):
            try:
                files[name] = read_bytes(directory / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UserError(f"tokenizer: cannot read {directory / name}: {error.strerror}") from None
        generation_config = files.pop("generation_config.json", b"{}")
        if not {"tokenizer.json", "tokenizer.model"} & set(files):
            raise UserError(f"tokenizer: no tokenizer.json or tokenizer.model in {directory}; train a tokenizer")
        if "tokenizer.model" in files and "tokenizer_config.json" not in files:
            raise UserError(f"tokenizer: {directory} has a tokenizer.model but no tokenizer_config.json; add it")
        try:
            return cls(files, generation_config)
        except UserError as error:
            raise UserError(f"tokenizer: cannot use {directory}: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise UserError(f"tokenizer: {directory} is damaged: {type(error).__name__}: {error}") from None

    def save(self, directory: str | os.PathLike) -> None:
        """Write the files that transformers.AutoTokenizer and `load` read. Each appears whole or not at all."""
        os.makedirs(directory, exist_ok=True)
        files, config = self.files, json.loads(self.files.get("tokenizer_config.json", b"{}"))
        if "tokenizer.json" in files and config.get("tokenizer_class", FAST) not in (FAST, "TokenizersBackend"):
            # transformers 5 builds another tokenizer from the vocabulary for a class such as GPT2Tokenizer
            files = files | {"tokenizer_config.json": foreign.to_json(config | {"tokenizer_class": FAST})}
        for name, content in files.items():
            path = os.path.join(directory, name)
            with naming(path), open(path + ".tmp", "wb") as f:
                f.write(content)
            os.replace(path + ".tmp", path)
        for name in set(FILES) - set(self.files):  # another tokenizer's, which would be read together with these
            Path(directory, name).unlink(missing_ok=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text: never a special one. Works for any str; lone surrogates become U+FFFD."""
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
        """Return the ids of a token's bytes, which may be part of a character; [] where that cannot be said."""
        if isinstance(self.engine, ByteLevelBPE):  # what a tokenizer that extends this one would find in one chunk
            token = token.translate(None, self.engine.missing)
            return self.engine.encoding._encode_single_piece(token) if token else []
        try:
            return self.encode(token.decode())
        except UnicodeDecodeError:
            return []

    def token_bytes(self, token_id: int) -> bytes:
        """Return what an id adds to the text, possibly part of a character; b"" for special ones. Raise UserError."""
        return b"" if token_id in self.special_ids else self.pieces[token_id]

    def decode_bytes(self, ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of `ids`, with the names of special ones or without them. Raise UserError: unknown id."""
        return b"".join([self.token_bytes(i) if skip_special_tokens else self.pieces[i] for i in ids])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; bytes that make no character become U+FFFD. For ids as they come: StreamDecoder."""
        return self.decode_bytes(ids, skip_special_tokens).decode("utf-8", errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """Return bytes of text per id, int32 (vocab_size,), 0 for special ones: for bits per byte."""
        lengths = np.zeros(self.vocab_size, np.int32)
        for i, token in self.engine.token_bytes.items():
            lengths[i] = len(token)
        return lengths

    def with_template_settings(self, written: str) -> "Tokenizer":
        """Return the tokenizer whose chat template reads these settings, such as 'enable_thinking=False'; its files
        keep them, so a checkpoint saved with it does, too. Raise UserError: the template reads no such setting."""
        if not written:
            return self
        config = json.loads(self.files.get("tokenizer_config.json", b"{}"))
        config |= {"chat_template_kwargs": self.template.settings(written)}
        return Tokenizer(self.files | {"tokenizer_config.json": foreign.to_json(config)}, self.generation_config)

    def fingerprint(self) -> str:
        """Return a SHA-256 of all that decides the ids; token files and checkpoints store it."""
        identity = [self.backend, sorted(self.special_tokens.items()), self.engine.identity()]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def chat_fingerprint(self) -> str:
        """Return a SHA-256 of all that decides the ids of a conversation."""
        if not self.foreign_template:
            return self.fingerprint()
        settings = json.dumps(self.template_settings, sort_keys=True) if self.template_settings else ""
        return hashlib.sha256(f"{self.fingerprint()}{self.template_source}{settings}".encode()).hexdigest()

    @cached_property
    def template(self) -> ChatTemplate:
        config = json.loads(self.files.get("tokenizer_config.json", b"{}"))
        names = {f"{name}_token": config.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
        texts = {key: name["content"] if isinstance(name, dict) else name for key, name in names.items() if name}
        return ChatTemplate(self.template_source, self.special_tokens, texts | self.template_settings)

    def _find_turn_end(self) -> int:
        if not self.foreign_template:
            return self.im_end_id
        try:
            talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            last = [piece.text for piece in self.template.pieces(talk) if piece.special and piece.learned]
        except UserError:  # render() will say it
            return self.eot_id
        return self.special_tokens[last[-1]] if last else self.eot_id

    def render(self, messages: Sequence[dict], add_generation_prompt: bool = False) -> tuple[list[int], list[int]]:
        """Return (ids, mask) of a conversation [{"role": ..., "content": ...}, ...]. Raise UserError.

        A published checkpoint's conversations are written by its own template (groundup/tokens/templates.py). Ours
        are ChatML: each message is <|im_start|> role newline content <|im_end|> newline; the prompt for an answer ends
        after "assistant" newline. Markers are ids and all the rest is ordinary text, so no content can open or close a
        turn. mask is 1 where the model is trained: on the assistant's words and the token that ends its turn, at which
        generation stops.
        """
        if self.turn_end_id < 0:
            raise UserError("tokenizer: this tokenizer has no chat template and no <|im_end|>, so no conversations")
        if not messages:
            raise UserError("tokenizer: a conversation needs at least one message")
        for i, message in enumerate(messages):
            message = message if isinstance(message, dict) else {}
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                raise UserError(f"tokenizer: message {i} has the role {role!r}; use one of {', '.join(ROLES)}")
            if not isinstance(content, str):
                raise UserError(f"tokenizer: message {i} ({role}) has the content {content!r:.80}; it must be a string")
        if self.foreign_template:
            return self._render_by_template(messages, add_generation_prompt)
        segments = []  # (ids, mask value)
        for message in messages:
            segments.append(([self.im_start_id, *self.encode(message["role"] + "\n")], 0))
            ids = [*self.encode(message["content"]), self.im_end_id]
            segments.append((ids, int(message["role"] == "assistant")))
            segments.append((self.encode("\n"), 0))
        if add_generation_prompt:
            segments.append(([self.im_start_id, *self.encode("assistant\n")], 0))
        return [i for ids, _ in segments for i in ids], [value for ids, value in segments for _ in ids]

    def _render_by_template(self, messages: Sequence[dict], add_generation_prompt: bool) -> tuple[list[int], list[int]]:
        ids, mask = [], []
        for piece in self.template.pieces(messages, add_generation_prompt, learn=not add_generation_prompt):
            new = [self.special_tokens[piece.text]] if piece.special else self.encode(piece.text)
            ends = np.cumsum([len(self.pieces[i]) for i in new])
            n_bytes = partial(bytes_until, piece.text, self.engine)
            ends -= ends[-1:] - n_bytes(len(piece.text))  # a space that the tokenizer puts in front
            begins, learned = np.concatenate([[0], ends[:-1]]), np.zeros(len(new), int)
            for begin, end in piece.learned:
                learned |= (begins < n_bytes(end)) & (ends > n_bytes(begin))
            ids += new
            mask += learned.tolist()
        return ids, mask


def bytes_until(text: str, engine: object, end: int) -> int:
    """Return how many bytes the tokenizer sees of text[:end]."""
    return len((unicodedata.normalize("NFC", text[:end]) if getattr(engine, "nfc", False) else text[:end]).encode())


class Pieces(dict):
    """{id: bytes}, with an error of our own for an id that is not there."""

    def __missing__(self, token_id: int) -> bytes:
        raise UserError(f"tokenizer: id {token_id} is not one of the tokenizer's {len(self)} ids")


class StreamDecoder:
    """Text from ids as they are generated: a character comes out whole, once its last byte is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return what the id adds to the text; "" for special ones and inside a character."""
        return self.decoder.decode(self.tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return the rest at the end of a text: U+FFFD if it broke off inside a character. Ready for the next text."""
        return self.decoder.decode(b"", final=True)


# ---- command line ----------------------------------------------------------------------------


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> str:
    """Return a line on how well the tokenizer fits the texts."""
    n_bytes = n_chars = n_tokens = 0
    for text in texts:
        n_bytes += len(text.encode())
        n_chars += len(text)
        n_tokens += len(tokenizer.encode_array(text))
    return (
        f"{n_bytes / 1e6:.2f} MB, {n_tokens:,} tokens: {n_bytes / max(n_tokens, 1):.2f} bytes per token, "
        f"{n_tokens / max(n_chars, 1):.2f} tokens per character"
    )


if __name__ == "__main__":
    configure(globals())
    started = time.perf_counter()
    parts = parts_of(input)
    if not parts:
        raise UserError("tokenizer: nothing to learn from; give --input=FILES")
    check_no_owner(out_dir)
    texts = texts_by_weight(parts, text_key, max_mb)
    if extend:
        old = Tokenizer.load(extend)
        if pattern != "qwen" or backend not in ("bpe", old.backend):
            raise UserError(f"tokenizer: {extend} keeps its own backend and pattern; leave out these options")
        tokenizer = extended(old, texts, vocab_size - old.vocab_size)
    else:
        tokenizer = train(texts, vocab_size, backend, pattern)
    tokenizer.save(out_dir)
    about = f"{tokenizer.backend}, {tokenizer.vocab_size:,} ids, {tokenizer.fingerprint()[:16]}"
    print(f"in {time.perf_counter() - started:.1f} s, {out_dir}: {about}")
    for part in parts:
        if part.files != ["-"]:  # standard input cannot be read again
            print(f"{part.name}: {measure(tokenizer, first_texts(part, text_key, SHOWN_MB))}")
