"""Tokens of texts and conversations: encode and decode, the chat template; train a tokenizer.

    python tokenizer.py --input='books/*.txt' --out_dir=data/tok --vocab_size=32768      # train
    python tokenizer.py --input='books/*.txt' --out_dir=data/sp --backend=sentencepiece
    python tokenizer.py --input='wiki/=0.7,code/=0.3' --max_mb=100                # on a mixture
    python tokenizer.py --extend=path/to/qwen --input=zh/ --vocab_size=160000 --out_dir=data/zh

Two kinds ("backend") are trained here. "bpe" merges bytes within the chunks that a regular
expression cuts (groundup/tokens/bpe.py). "sentencepiece" is that library's BPE over characters with
byte fallback, set up so that text decodes to itself, too. transformers.AutoTokenizer reads ours and
gives the same ids; `Tokenizer.load` reads those of Llama, Qwen or GPT-2.

groundup/tokens/text_tokenizer.py encodes and decodes texts, and is all that pretraining needs. Here
conversations are added. Ordinary text never becomes a special token; only `render` writes them.
"""

if __name__ == "__main__":  # before the slow imports: from here on Ctrl-C prints one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import codecs
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from groundup.errors import UserError
from groundup.files.untrusted import parse_object, read_bytes, read_json
from groundup.tokens import engines
from groundup.tokens.spans import Spans, encode_parts, encode_spans, position
from groundup.tokens.templates import TRIAL, ChatTemplate, Piece, take_tools
from groundup.tokens.text_tokenizer import TextTokenizer, find_tokenizer

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # files, globs, a=0.7,b=0.3; or as prepare.py: 'x: files, text_key=KEY; ...'; - = stdin
text_key = ""  # where the text is in JSON, csv, parquet: text, a.b or title,body; "" = detected
out_dir = "data/tokenizer"  # where the trained tokenizer goes
backend = "bpe"  # bpe | sentencepiece
pattern = "qwen"  # qwen | gpt4 (not in llama.cpp) | gpt2 | cl100k | zh (Chinese): how bpe splits
vocab_size = 32_768  # all ids, special ones included; rounded up to a multiple of 128
max_mb = 256  # megabytes of text to read; more changes a tokenizer little (at least 1)
overwrite = False  # replace another tokenizer in out_dir
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
OWNERS = {  # files, and what the directory is that has one
    "config.json": "model",
    "adapter_config.json": "model",
    "manifest.json": "directory of prepared data",
    "log.jsonl": "run",
}
RECENT = 32  # texts whose ids are kept: openings of turns, the prompt of a pair


class Tokenizer(TextTokenizer):
    """Text <-> ids (see TextTokenizer), and conversations -> ids with a mask of what is learned.

    It comes from `Tokenizer.load` or groundup/tokens/training.py.

    foreign_template: whether conversations are rendered by a chat template: another's, or ours
        where a space is put before a text, so that its parts cannot be encoded one by one
    turn_end_id: the id that ends an assistant's turn, -1 if there is no chat template
    """

    def __init__(self, files: dict[str, bytes], generation_config: bytes = b"{}") -> None:
        super().__init__(files, generation_config)
        templates = find_templates(files, self.config)
        self.template_source = templates.get("default", "")
        self.tool_template_source = templates.get("tool_use", "")
        self.foreign_template = self.template_source not in ("", CHAT_TEMPLATE)
        if self.template_source == CHAT_TEMPLATE:
            inside = encode_spans(self.engine, "a", engines.INSIDE)[0]
            self.foreign_template = self.encode("a") != inside
        self.template_settings = dict(self.config.get("chat_template_kwargs") or {})
        self.recent_ids = lru_cache(maxsize=RECENT)(self._ids)  # remembers those of recent texts
        self.turn_end_id = self._find_turn_end()
        self.stop_ids |= {self.turn_end_id} - {-1}

    def __reduce__(self) -> tuple:
        """Pickle the files: a compiled template cannot be."""
        return type(self), (self.files, self.generation_config)

    @staticmethod
    def read_more(directory: Path, files: dict[str, bytes]) -> dict[str, bytes]:
        """Return also the templates of additional_chat_templates/NAME.jinja, in the config."""
        files = TextTokenizer.read_more(directory, files)
        more = sorted(directory.glob("additional_chat_templates/[!.]*.jinja"))
        if not more:
            return files
        config = parse_object(files.get("tokenizer_config.json", b"{}"))
        named = find_templates(files, config)
        named |= {path.stem: read_bytes(path).decode() for path in more}
        listed = [{"name": name, "template": source} for name, source in named.items() if source]
        config["chat_template"] = listed
        files = {name: text for name, text in files.items() if name != "chat_template.jinja"}
        return files | {"tokenizer_config.json": engines.to_json(config)}

    def encode_array(self, text: str) -> np.ndarray:
        """Return `encode` as uint32 (n,): faster than a list for a long text."""
        with engines.PanicsInOneLine():
            return self.engine.encode_array(text)

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

    # ---- our own form

    def render(
        self, messages: Sequence[dict], add_generation_prompt: bool = False, only_last: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return (ids, mask) of a conversation [{"role": ..., "content": ...}, ...].

        A published checkpoint's conversations are written by its own template (templates.py). Ours
        are ChatML: each message is <|im_start|> role newline content <|im_end|> newline; the prompt
        for an answer ends after "assistant" newline. Markers are ids and all the rest is ordinary
        text, so no content can open or close a turn. mask is 1 where the model is trained: on the
        assistant's words and the token that ends its turn, at which generation stops. An answer
        with "learn": False has the mask 0. only_last: the caller needs the mask of the last answer;
        a template's mask may then be 0 on the others, which takes less time.

        Raise UserError."""
        if self.turn_end_id < 0:
            self.check_turn_end()
        check_messages(messages)
        if self.foreign_template:
            return self._render_by_template(messages, add_generation_prompt, only_last)
        ids: list[int] = []
        mask: list[int] = []
        for message in messages:
            opening = [self.im_start_id, *self.recent_ids(message["role"] + "\n")]
            content = [*self.recent_ids(message["content"]), self.im_end_id]
            newline = self.recent_ids("\n")
            learned = int(message["role"] == "assistant" and message.get("learn", True))
            ids += opening + content + newline
            mask += [0] * len(opening) + [learned] * len(content) + [0] * len(newline)
        if add_generation_prompt:
            opening = [self.im_start_id, *self.recent_ids("assistant\n")]
            ids += opening
            mask += [0] * len(opening)
        return ids, mask

    def chat_fingerprint(self) -> str:
        """Return a SHA-256 of all that decides the ids of a conversation."""
        if not self.foreign_template:
            return self.fingerprint()
        settings = self.template_settings | ({"date": self.date} if self.template.dated else {})
        written = json.dumps(settings, sort_keys=True) if settings else ""
        sources = self.template_source + self.tool_template_source
        identity = f"{self.fingerprint()}{sources}{written}"
        return hashlib.sha256(identity.encode()).hexdigest()

    # ---- a template of the checkpoint's own

    @cached_property
    def template(self) -> ChatTemplate:
        return self._compile(self.template_source)

    @cached_property
    def tool_template(self) -> ChatTemplate | None:
        """The template of conversations with tools, if that is another one."""
        return self._compile(self.tool_template_source) if self.tool_template_source else None

    def _compile(self, source: str) -> ChatTemplate:
        texts = {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            if name := self.config.get(key):
                texts[key] = name["content"] if isinstance(name, dict) else name
        variables = texts | self.template_settings
        flags = ("lstrip", "rstrip")
        strips = {
            token["content"]: tuple(bool(token.get(flag)) for flag in flags)
            for token in self.engine.added_tokens
        }
        words = self.engine.words
        return ChatTemplate(source, self.special_tokens, variables, words, strips, self.date)

    @cached_property
    def date(self) -> str:
        """What the chat template takes for today, YYYY-MM-DD."""
        return self.config.get("chat_template_date") or today()

    def with_template_settings(self, written: str, *directories: str | Path) -> "Tokenizer":
        """Return the tokenizer with settings of its chat template: 'enable_thinking=False'.

        If the template writes the date, also with that: the one recorded in the first of these
        directories, or in its own files, or in the others, or today's. Its files keep all this, so
        a checkpoint saved with it does, too. Raise UserError if the template reads no such setting.
        """
        config, dated = dict(self.config), self.foreign_template and self.template.dated
        if written:
            config["chat_template_kwargs"] = self.template.settings(written)
        elif not dated:
            return self
        if dated:
            recorded = [recorded_date(Path(directory)) for directory in directories]
            recorded.insert(1, config.get("chat_template_date", ""))
            config["chat_template_date"] = next(filter(None, recorded), self.date)
        files = self.files | {"tokenizer_config.json": engines.to_json(config)}
        return Tokenizer(files, self.generation_config)

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
        pieces = self.template.markers.cut(self.template.closing, [])
        return [i for piece in pieces for i in self._piece_ids(piece, engines.INSIDE)[0]]

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

    def left_out(self, messages: Sequence[dict]) -> Counter[str]:
        """Count what the chat template leaves out of a conversation, by kind."""
        if not self.foreign_template:
            return Counter()
        return self._template_of(messages).left_out(messages)

    def _template_of(self, messages: Sequence[dict]) -> ChatTemplate:
        has_tools = self.tool_template and take_tools(list(messages))[1] is not None
        return self.tool_template if has_tools else self.template

    def _render_by_template(
        self, messages: Sequence[dict], asks: bool, only_last: bool
    ) -> tuple[list[int], list[int]]:
        template = self._template_of(messages)
        pieces = template.pieces(messages, asks, only_last)
        ids, mask = [], []
        for k, piece in enumerate(pieces):
            place = engines.AFTER_MARKER if k else engines.START
            new, learned = self._piece_ids(piece, place)
            ids += new
            mask += learned
        return ids, mask

    def _spans(self, text: str, cuts: tuple[int, ...], place: str) -> Spans:
        """Return the ids of a piece's text, and where each begins and ends."""
        with engines.PanicsInOneLine():
            return encode_parts(self.engine, text, cuts, place)

    def _ids(self, text: str, cuts: tuple[int, ...] = (), place: str = engines.START) -> list[int]:
        """Return the ids of a piece's text."""
        if cuts or (place != engines.START and self.backend != "bpe"):
            return self._spans(text, cuts, place)[0]
        return self.encode(text)

    def _piece_ids(self, piece: Piece, place: str) -> tuple[list[int], list[int]]:
        """Return (ids, mask) of a piece. place: where it stands, see engines.py."""
        if piece.special:
            return [self._marker_id(piece.text)], [int(bool(piece.learned))]
        text, cuts = piece.text, tuple(piece.cuts)
        if not piece.learned:
            ids = self.recent_ids(text, cuts, place)
            return ids, [0] * len(ids)
        if piece.learned == [(0, len(text))]:
            ids = self._ids(text, cuts, place)
            return ids, [1] * len(ids)
        ids, begins, ends = self._spans(text, cuts, place)
        begins, ends = np.array(begins, int), np.array(ends, int)
        mask = np.zeros(len(ids), int)
        for span in piece.learned:
            begin, end = (position(self.engine, text, at) for at in span)
            inside = np.flatnonzero((begins < end) & (ends > begin))
            if len(inside):
                mask[inside[0] : inside[-1] + 1] = 1
        return ids, mask.tolist()


def find_templates(files: dict[str, bytes], config: dict) -> dict[str, str]:
    """Return the chat templates of a tokenizer by their names, "default" and "tool_use" ..."""
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        named = {one["name"]: one["template"] for one in found}
    else:
        named = found if isinstance(found, dict) else {"default": found}
    if "chat_template.jinja" in files:
        named["default"] = files["chat_template.jinja"].decode()
    return named


def split_answer(ids: Sequence[int], mask: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (what stands before the last answer, the answer with what closes it), from `render`.

    Raise UserError if nothing is learned."""
    learned = bytes(mask)
    end = learned.rfind(1) + 1
    if not end:
        raise UserError("tokenizer: the chat template leaves nothing to learn of an answer")
    begin = learned.rfind(0, 0, end) + 1
    return list(ids[:begin]), list(ids[begin:end])


def today() -> str:
    return datetime.now().date().isoformat()


def recorded_date(directory: Path) -> str:
    """Return the date that the chat template of a run or of prepared data writes, "" if unknown."""
    path = find_tokenizer(directory) / "tokenizer_config.json"
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


# ---- more special tokens ---------------------------------------------------------------------


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
        n_reserved = -(first + len(names)) % engines.SIZE_STEP
        names += reserved(n_reserved, tokenizer.special_tokens)
        files = with_specials(files, names, first)
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    config["chat_template"] = CHAT_TEMPLATE
    if tokenizer.pad_id < 0:
        config["pad_token"] = "<|pad|>"
    files["tokenizer_config.json"] = engines.to_json(config)
    return Tokenizer(files, tokenizer.generation_config)


def reserved(n: int, taken: Iterable[str]) -> list[str]:
    """Return `n` names for special tokens without a meaning, numbered on from those taken."""
    found = [re.fullmatch(r"<\|reserved_(\d+)\|>", name) for name in taken]
    start = 1 + max((int(match[1]) for match in found if match), default=-1)
    return [f"<|reserved_{start + i}|>" for i in range(n)]


def with_specials(files: dict[str, bytes], names: list[str], first: int) -> dict[str, bytes]:
    """Return `files` with the special tokens `names` added; their ids count from `first`."""
    numbered = list(enumerate(names, start=first))
    if "tokenizer.json" not in files:
        config = json.loads(files["tokenizer_config.json"])
        tokens = config.get("added_tokens_decoder") or {}
        tokens |= {str(i): engines.added_token(name) for i, name in numbered}
        config["added_tokens_decoder"] = tokens
        return files | {"tokenizer_config.json": engines.to_json(config)}
    # a tokenizer.model beside it is a copy without the new tokens
    files = {name: content for name, content in files.items() if name != "tokenizer.model"}
    description = json.loads(files["tokenizer.json"])
    added = description["added_tokens"]
    added += [engines.added_token(name, i) for i, name in numbered]
    # A library that reads the file numbers added tokens on from the size of "vocab", unless they
    # are in it.
    if isinstance(description["model"]["vocab"], dict):  # Unigram's is a list
        description["model"]["vocab"] |= {token["content"]: token["id"] for token in added}
    return files | {"tokenizer.json": engines.to_json(description)}


def check_place(directory: str) -> None:
    """Raise UserError if a tokenizer cannot be saved in a directory: it cannot be made, or belongs
    to a model, prepared data or a run."""
    if not directory:
        raise UserError("tokenizer: out_dir is empty; give --out_dir=DIR")
    place = Path(directory).absolute()
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "cannot be written" if there.is_dir() else "is no directory"
        raise UserError(f"tokenizer: out_dir={directory!r}: {there} {why}; choose another")
    if found := [name for name in OWNERS if Path(directory, name).exists()]:
        of = f"holds {found[0]}, so it is a {OWNERS[found[0]]}, which another tokenizer would break"
        raise UserError(f"tokenizer: out_dir={directory!r} {of}; use another out_dir")


def check_same(directory: str | Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if a directory holds another tokenizer, which data or a model may need."""
    try:
        old = Tokenizer.load(directory)
    except UserError:  # none, or a damaged one
        return
    if old.fingerprint() != tokenizer.fingerprint():
        holds = f"{directory} holds another tokenizer ({old.backend}, {old.vocab_size:,} ids)"
        hint = "use another --out_dir, or --overwrite=True to replace it"
        raise UserError(f"tokenizer: {holds}; {hint}")


# ---- command line ----------------------------------------------------------------------------

if __name__ == "__main__":
    import tempfile
    import time

    from configurator import configure
    from groundup.files import text_mix
    from groundup.files.records import Report
    from groundup.files.sources import parse_sources
    from groundup.tokens.training import extended, measure, train

    SHOWN_MB = 10  # of each part of `input` that a new tokenizer is measured on

    configure(globals())
    started = time.perf_counter()
    if not overwrite and Path(out_dir, "tokenizer_config.json").exists():
        print(f"{out_dir} holds a tokenizer; another one needs --overwrite=True to replace it")
    made = tempfile.TemporaryDirectory()  # for python-docs, demo-en, demo-zh; gone at the end
    sources = parse_sources({"input": input, "text_key": text_key})
    parts = text_mix.parts_of(sources, Path(made.name))
    if not parts:
        raise UserError("tokenizer: nothing to learn from; give --input=FILES")
    check_place(out_dir)  # before the training, which may take an hour
    text_mix.check_parts(parts)
    texts = text_mix.texts_of(parts, max_mb)
    if extend:
        old = Tokenizer.load(extend)
        if pattern != "qwen" or backend not in ("bpe", old.backend):
            keeps = f"{extend} keeps its own backend and pattern"
            raise UserError(f"tokenizer: {keeps}; leave out these options")
        tokenizer = extended(old, texts, vocab_size - old.vocab_size)
    else:
        tokenizer = train(texts, vocab_size, backend, pattern)
    if not overwrite:
        check_same(out_dir, tokenizer)
    tokenizer.save(out_dir)

    seconds = time.perf_counter() - started
    kind = f"{tokenizer.backend}, {tokenizer.vocab_size:,} ids"
    print(f"in {seconds:.1f} s, {out_dir}: {kind}, {tokenizer.fingerprint()[:16]}")
    for part in parts:
        if "-" not in part.files:  # standard input cannot be read again
            shown = text_mix.first_of(text_mix.read(part, Report()), SHOWN_MB * 1_000_000)
            print(f"{part.name}: {measure(tokenizer, shown)}")
