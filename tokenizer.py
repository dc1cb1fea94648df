"""Text to token ids and back: encoding and decoding, special tokens, the chat template, training.

    python tokenizer.py --input='books/*.txt' --out_dir=data/tok --vocab_size=32768      # train
    python tokenizer.py --input='books/*.txt' --out_dir=data/sp --backend=sentencepiece
    python tokenizer.py --input='wiki/=0.7,code/=0.3' --max_mb=100                # on a mixture
    python tokenizer.py --extend=path/to/qwen --input=zh/ --vocab_size=160000 --out_dir=data/zh

There are two kinds of tokenizer ("backend"). "bpe" splits text into chunks by a regular expression
and merges the most frequent neighbours inside them, starting from the 256 bytes, so that every text
has ids and decodes to itself; we train it (groundup/tokens/bpe.py), tiktoken runs it.
"sentencepiece" is that library's BPE over characters, with byte fallback, set up so that text
decodes to itself too.

A tokenizer is stored as Hugging Face stores it (tokenizer.json or tokenizer.model, with
tokenizer_config.json): transformers.AutoTokenizer reads ours and gives the same ids;
`Tokenizer.load` reads those of Llama, Qwen or GPT-2.

Ordinary text never becomes a special token: `encode` cannot produce one, only `render` writes them.
"""

if __name__ == "__main__":  # before the slow imports: from here on Ctrl-C prints one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import codecs
import hashlib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import regex
import tiktoken

from groundup.errors import UserError, naming
from groundup.files.untrusted import parse_object, read_bytes, read_json, scrub
from groundup.tokens import foreign
from groundup.tokens.templates import TRIAL, ChatTemplate, Piece, take_tools

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # text to train on: files, directories, globs, comma-separated, a=0.7,b=0.3; - is stdin
text_key = ""  # where the text is in JSON, csv, parquet: text, a.b or title,body; "" = detected
out_dir = "data/tokenizer"  # where the trained tokenizer goes
backend = "bpe"  # bpe | sentencepiece
pattern = "qwen"  # qwen | gpt4 (not in llama.cpp) | gpt2 | cl100k | zh (Chinese): how bpe splits
vocab_size = 32_768  # all ids, special ones included; rounded up to a multiple of 128
max_mb = 256  # megabytes of text to read; more changes a tokenizer little (at least 1)
extend = ""  # add tokens learned from `input` to this directory's tokenizer, up to vocab_size

SPECIALS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant", "tool")
# Tokenizer.render in Jinja, for tokenizer_config.json; "generation" marks what is trained on.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG = {  # the part of tokenizer_config.json that both backends share
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}
FAST = "PreTrainedTokenizerFast"  # transformers' class that reads all of tokenizer.json
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


def chat_ready(tokenizer: "Tokenizer") -> "Tokenizer":
    """Return `tokenizer` with what conversations need.

    One that has a chat template of its own stays as it is. Any other gets ours and, after all other
    ids, those of <|im_start|>, <|im_end|> and <|pad|> that it lacks. Raise UserError if a template
    of its own teaches no end of an answer."""
    if tokenizer.foreign_template:
        tokenizer.check_turn_end()
        return tokenizer
    files, first = dict(tokenizer.files), tokenizer.vocab_size
    wanted = ("<|im_start|>", "<|im_end|>")
    names = [name for name in wanted if name not in tokenizer.special_tokens]
    if tokenizer.pad_id < 0:
        names.append("<|pad|>")
    if names:
        n_reserved = -(first + len(names)) % foreign.SIZE_STEP
        names += foreign.reserved(n_reserved, tokenizer.special_tokens)
        files = foreign.with_specials(files, names, first)
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    config["chat_template"] = CHAT_TEMPLATE
    if tokenizer.pad_id < 0:
        config["pad_token"] = "<|pad|>"
    files["tokenizer_config.json"] = foreign.to_json(config)
    return Tokenizer(files, tokenizer.generation_config)


# ---- encoding: for the other backends see foreign.py -----------------------------------------


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
        ids = self.encode(text)
        borders = np.cumsum([0, *(len(self.token_bytes[i]) for i in ids)]).tolist()
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


# ---- the tokenizer ---------------------------------------------------------------------------


class Tokenizer:
    """Text <-> ids, and conversations -> ids with a mask of what is trained on.

    It comes from `Tokenizer.load` or groundup/tokens/training.py.

    backend: "bpe" | "sentencepiece" | "tokenizers" (a tokenizer.json that tiktoken cannot run)
    vocab_size: every id is below it;  special_tokens {text: id}
    pieces {id: bytes of the token, or the name of a special one}
    eot_id, pad_id, im_start_id, im_end_id, bos_id: -1 if there is none; in ours bos_id is eot_id
    turn_end_id: the id that ends an assistant's turn, -1 if there is no chat template
    foreign_template: whether conversations are written by a chat template that is not ours
    begins: whether bos_id stands before every text, as the tokenizer's own files say
    stop_ids: the ids that end a text or a turn
    """

    def __init__(self, files: dict[str, bytes], generation_config: bytes = b"{}") -> None:
        """Take the files of a Hugging Face directory, {name: content}; `save` writes them."""
        self.files = files
        self.generation_config = generation_config
        config = parse_object(files.get("tokenizer_config.json", b"{}"))
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

        templates = foreign.find_templates(files, config)
        self.template_source = templates.get("default", "")
        self.tool_template_source = templates.get("tool_use", "")
        self.foreign_template = self.template_source not in ("", CHAT_TEMPLATE)
        self.template_settings = dict(config.get("chat_template_kwargs") or {})
        self.turn_end_id = self._find_turn_end()
        ends = generation.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        ends = {i for i in ends if i in self.special_ids}
        ends |= {self.eot_id, self.turn_end_id, self.im_end_id}
        self.stop_ids = frozenset(ends - {-1})

    def _choose_engine(
        self, config: dict
    ) -> tuple[str, "ByteLevelBPE | foreign.SentencePieceBPE | foreign.LibraryTokenizer"]:
        if "tokenizer.json" not in self.files:
            engine = foreign.SentencePieceBPE(self.files["tokenizer.model"], config)
            return "sentencepiece", engine
        description = parse_object(self.files["tokenizer.json"])
        try:
            return "bpe", ByteLevelBPE(description)
        except foreign.Unsupported as why:
            return "tokenizers", foreign.LibraryTokenizer(description, str(why))

    def __reduce__(self) -> tuple:
        """Pickle the files: a compiled template cannot be."""
        return Tokenizer, (self.files, self.generation_config)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Tokenizer":
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
        files, config = self.files, json.loads(self.files.get("tokenizer_config.json", b"{}"))
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

    # ---- conversations

    def chat_fingerprint(self) -> str:
        """Return a SHA-256 of all that decides the ids of a conversation."""
        if not self.foreign_template:
            return self.fingerprint()
        settings = self.template_settings | ({"date": self.date} if self.template.dated else {})
        written = json.dumps(settings, sort_keys=True) if settings else ""
        sources = self.template_source + self.tool_template_source
        identity = f"{self.fingerprint()}{sources}{written}"
        return hashlib.sha256(identity.encode()).hexdigest()

    def with_template_settings(self, written: str, *directories: str | Path) -> "Tokenizer":
        """Return the tokenizer with settings of its chat template: 'enable_thinking=False'.

        If the template writes the date, also with that: the one recorded in the first of these
        directories, or in its own files, or in the others, or today's. Its files keep all this, so
        a checkpoint saved with it does, too. Raise UserError if the template reads no such setting.
        """
        config = json.loads(self.files.get("tokenizer_config.json", b"{}"))
        if written:
            config["chat_template_kwargs"] = self.template.settings(written)
        elif not (self.foreign_template and self.template.dated):
            return self
        if self.foreign_template and self.template.dated:
            recorded = [recorded_date(Path(directory)) for directory in directories]
            recorded.insert(1, config.get("chat_template_date", ""))
            config["chat_template_date"] = next(filter(None, recorded), self.date)
        files = self.files | {"tokenizer_config.json": foreign.to_json(config)}
        return Tokenizer(files, self.generation_config)

    @cached_property
    def template(self) -> ChatTemplate:
        return self._compile(self.template_source)

    @cached_property
    def tool_template(self) -> ChatTemplate | None:
        """The template of conversations with tools, if that is another one."""
        return self._compile(self.tool_template_source) if self.tool_template_source else None

    def _compile(self, source: str) -> ChatTemplate:
        config = json.loads(self.files.get("tokenizer_config.json", b"{}"))
        texts = {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            if name := config.get(key):
                texts[key] = name["content"] if isinstance(name, dict) else name
        variables = texts | self.template_settings
        added = list((config.get("added_tokens_decoder") or {}).values())
        if "tokenizer.json" in self.files:
            added = json.loads(self.files["tokenizer.json"]).get("added_tokens") or []
        flags = ("lstrip", "rstrip")
        strips = {token["content"]: tuple(bool(token.get(k)) for k in flags) for token in added}
        words = self.engine.words
        return ChatTemplate(source, self.special_tokens, variables, words, strips, self.date)

    @cached_property
    def date(self) -> str:
        """What the chat template takes for today, YYYY-MM-DD."""
        config = json.loads(self.files.get("tokenizer_config.json", b"{}"))
        return config.get("chat_template_date") or today()

    def _find_turn_end(self) -> int:
        if not self.foreign_template:
            return self.im_end_id
        try:
            pieces = self.template.pieces(TRIAL)
        except UserError:  # render() will say it
            return self.eot_id
        ends = [piece.text for piece in pieces if piece.special and piece.learned]
        return self._marker_id(ends[-1]) if ends else self.eot_id

    def _marker_id(self, name: str) -> int:
        return self.special_tokens.get(name, self.engine.words.get(name, -1))

    @cached_property
    def closing_ids(self) -> list[int]:
        """The ids that end an assistant's turn: turn_end_id, and what a template writes before."""
        if not self.foreign_template or not self.template.closing:
            return [self.turn_end_id]
        pieces = self.template.cut(self.template.closing, [])
        return [i for piece in pieces for i in self._piece_ids(piece, foreign.INSIDE)[0]]

    def check_turn_end(self) -> None:
        """Raise UserError unless what is learned of an answer ends with a token that stops it."""
        if self.turn_end_id < 0:
            lacks = "this tokenizer has no chat template and no <|im_end|>, so no conversations"
            raise UserError(f"tokenizer: {lacks}")
        if not self.foreign_template:
            return
        pieces = self.template.pieces(TRIAL)
        said = "".join(p.text[a:b] for p in pieces if not p.special for a, b in p.learned)
        jinja = "chat_template.jinja"
        file = jinja if jinja in self.files else "tokenizer_config.json"
        does = f"tokenizer: the chat template ({file})"
        if TRIAL[-1]["content"] not in said:
            raise UserError(f"{does} leaves out answers that are text; use one that writes them")
        if not self.template.closing:
            how = "so no model would learn to stop; let it write eos_token after each answer"
            raise UserError(f"{does} writes no special token after an answer, {how}")

    def render(
        self,
        messages: Sequence[dict],
        add_generation_prompt: bool = False,
        only_last: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Return (ids, mask) of a conversation [{"role": ..., "content": ...}, ...].

        A published checkpoint's conversations are written by its own template (templates.py). Ours
        are ChatML: each message is <|im_start|> role newline content <|im_end|> newline; the prompt
        for an answer ends after "assistant" newline. Markers are ids and all the rest is ordinary
        text, so no content can open or close a turn. mask is 1 where the model is trained: on the
        assistant's words and the token that ends its turn, at which generation stops. An answer
        with "learn": False has the mask 0. only_last: a template's mask may have the last answer
        only, which takes less time.

        Raise UserError."""
        if self.turn_end_id < 0:
            self.check_turn_end()
        check_messages(messages)
        if self.foreign_template:
            return self._render_by_template(messages, add_generation_prompt, only_last)
        ids: list[int] = []
        mask: list[int] = []
        for message in messages:
            opening = [self.im_start_id, *self.encode(message["role"] + "\n")]
            content = [*self.encode(message["content"]), self.im_end_id]
            newline = self.encode("\n")
            learned = int(message["role"] == "assistant" and message.get("learn", True))
            ids += opening + content + newline
            mask += [0] * len(opening) + [learned] * len(content) + [0] * len(newline)
        if add_generation_prompt:
            opening = [self.im_start_id, *self.encode("assistant\n")]
            ids += opening
            mask += [0] * len(opening)
        return ids, mask

    def left_out(self, messages: Sequence[dict]) -> Counter[str]:
        """Count what the chat template leaves out of a conversation, by kind."""
        return self._template_of(messages).left_out(messages) if self.foreign_template else Counter()

    def _template_of(self, messages: Sequence[dict]) -> ChatTemplate:
        has_tools = self.tool_template and take_tools(list(messages))[1] is not None
        return self.tool_template if has_tools else self.template

    def _render_by_template(
        self, messages: Sequence[dict], asks: bool, only_last: bool
    ) -> tuple[list[int], list[int]]:
        template = self._template_of(messages)
        pieces = template.pieces(messages, asks, learn=not asks, only_last=only_last)
        ids, mask = [], []
        for k, piece in enumerate(pieces):
            place = foreign.AFTER_MARKER if k else foreign.START
            new, learned = self._piece_ids(piece, place)
            ids += new
            mask += learned
        return ids, mask

    def _piece_ids(self, piece: Piece, place: str) -> tuple[list[int], list[int]]:
        """Return (ids, mask) of a piece. place: where it stands, see foreign.py."""
        if piece.special:
            return [self._marker_id(piece.text)], [int(bool(piece.learned))]
        engine, text = self.engine, piece.text
        cuts, size = piece.cuts, lambda part: engine.position(part, len(part))
        try:
            found = foreign.joined(engine.encode_spans, text, cuts, place, size)
        except BaseException as error:
            raise foreign.named_panic(error) from None
        ids, begins, ends = found[0], np.array(found[1], int), np.array(found[2], int)
        mask = np.zeros(len(ids), int)
        for span in piece.learned:
            begin, end = (engine.position(text, place) for place in span)
            inside = np.flatnonzero((begins < end) & (ends > begin))
            if len(inside):
                mask[inside[0] : inside[-1] + 1] = 1
        return ids, mask.tolist()


def split_answer(ids: Sequence[int], mask: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (what stands before the last answer, the answer with what closes it), from `render`.

    Raise UserError if nothing is learned."""
    mask = np.asarray(mask)
    learned = np.flatnonzero(mask)
    if not len(learned):
        raise UserError("tokenizer: the chat template leaves nothing to learn of an answer")
    end = int(learned[-1]) + 1
    begin = 1 + max(np.flatnonzero(mask[:end] == 0).tolist(), default=-1)
    return list(ids[:begin]), list(ids[begin:end])


def today() -> str:
    return datetime.now().date().isoformat()


def recorded_date(directory: Path) -> str:
    """Return the date that the chat template of a run or of prepared data writes, "" if unknown."""
    path = foreign.files_of(directory) / "tokenizer_config.json"
    return read_json(path).get("chat_template_date", "") if path.exists() else ""


def check_messages(messages: Sequence[dict]) -> None:
    """Raise UserError unless these are messages of known roles."""
    if not messages:
        raise UserError("tokenizer: a conversation needs at least one message")
    for i, message in enumerate(messages):
        message = message if isinstance(message, dict) else {}
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            use = f"use one of {', '.join(ROLES)}"
            raise UserError(f"tokenizer: message {i} has the role {role!r}; {use}")
        if not isinstance(content, str):
            has = f"message {i} ({role}) has the content {content!r:.80}"
            raise UserError(f"tokenizer: {has}; it must be a string")


class Pieces(dict):
    """{id: bytes}, with an error of our own for an id that is not there."""

    def __missing__(self, token_id: int) -> bytes:
        known = f"the tokenizer's {len(self)} ids"
        raise UserError(f"tokenizer: id {token_id} is not one of {known}")


class StreamDecoder:
    """Text from ids as they are generated: a character comes out whole, with its last byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return what the id adds to the text; "" for special ones and inside a character."""
        return self.decoder.decode(self.tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return the rest of the text: U+FFFD if it broke off inside a character.

        Then the decoder is ready for the next text."""
        return self.decoder.decode(b"", final=True)


# ---- command line ----------------------------------------------------------------------------

if __name__ == "__main__":
    import time

    from configurator import configure
    from groundup.files.text_mix import first_texts, parts_of, texts_by_weight
    from groundup.files.text_sample import sampled_texts, size_of
    from groundup.files.untrusted import check_no_owner
    from groundup.tokens.training import extended, measure, train

    SHOWN_MB = 10  # of each part of `input` that a new tokenizer is measured on

    configure(globals())
    started = time.perf_counter()
    parts = parts_of(input)
    if not parts:
        raise UserError("tokenizer: nothing to learn from; give --input=FILES")
    check_no_owner(out_dir)
    weighted = any(part.weight for part in parts)
    if not weighted and size_of(parts) > max_mb * 1_000_000:
        texts = sampled_texts(parts, text_key, max_mb)
    else:
        texts = texts_by_weight(parts, text_key, max_mb)
    if extend:
        old = Tokenizer.load(extend)
        if pattern != "qwen" or backend not in ("bpe", old.backend):
            keeps = f"{extend} keeps its own backend and pattern"
            raise UserError(f"tokenizer: {keeps}; leave out these options")
        tokenizer = extended(old, texts, vocab_size - old.vocab_size)
    else:
        tokenizer = train(texts, vocab_size, backend, pattern)
    tokenizer.save(out_dir)

    seconds = time.perf_counter() - started
    kind = f"{tokenizer.backend}, {tokenizer.vocab_size:,} ids"
    print(f"in {seconds:.1f} s, {out_dir}: {kind}, {tokenizer.fingerprint()[:16]}")
    for part in parts:
        if part.files != ["-"]:  # standard input cannot be read again
            texts = first_texts(part, text_key, SHOWN_MB)
            print(f"{part.name}: {measure(tokenizer, texts)}")
