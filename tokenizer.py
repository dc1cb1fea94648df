"""Text to token ids and back: one class, two backends, the chat template, and the trainer of our own BPE.

    python tokenizer.py --input='books/*.txt' --out_dir=data/tok --vocab_size=32768      # train
    python tokenizer.py --input='books/*.txt' --out_dir=data/sp --backend=sentencepiece
    python tokenizer.py --inspect=data/tok --text='print("hello")'                       # see the pieces
    python tokenizer.py --inspect=data/tok --input='books/en*.txt,books/zh*.txt'         # bytes per token, of each part
    python tokenizer.py --input='wiki/=0.7,code/=0.3' --max_mb=100                       # learn from a mixture
    python tokenizer.py --convert=qwen.tiktoken --out_dir=data/qwen                      # another's, for transformers
    python tokenizer.py --extend=data/qwen --input=zh/ --vocab_size=160000 --out_dir=data/zh

"bpe" splits text into chunks by a regular expression and joins the most frequent neighbours inside them, starting
from the 256 bytes, so that every text has ids and comes back exactly. It is trained here (`train_bpe`) and run by
tiktoken. "sentencepiece" is its BPE over characters with byte fallback, set so that text comes back exactly too.

A tokenizer is stored as Hugging Face stores it (tokenizer.json or tokenizer.model, with tokenizer_config.json):
transformers.AutoTokenizer reads ours and gives the same ids, `Tokenizer.load` reads those of Llama, Qwen, ChatGLM2 or
GPT-2, also as tiktoken's list of ranks or a bare model of sentencepiece.

Ordinary text never becomes a special token: `encode` cannot produce one, only `render` writes them.
"""

import base64
import codecs
import hashlib
import io
import itertools
import json
import os
import re
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import tiktoken
from tqdm import tqdm

from configurator import configure
from groundup.errors import UserError
from groundup.files.readers import Report, find_files, read_documents
from groundup.tokens.bpe import (
    MAX_CHARS,
    PATTERNS,
    Corpus,
    blocks,
    count_chunks,
    merge_below,
    merges_of,
    scrub,
    train_bpe,
)

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # text to learn from, or to measure: files, directories, globs, comma-separated, a=0.7,b=0.3; - is stdin
text_key = "text"  # where the text is in JSON, csv and parquet; a.b for b within a
out_dir = "data/tokenizer"  # where the trained tokenizer goes
backend = "bpe"  # bpe | sentencepiece
pattern = ""  # how bpe cuts text: gpt4 (what "" means) | gpt2 | zh | cl100k | qwen; with convert "" = by its name
vocab_size = 32_768  # all ids, special ones included; rounded up to a multiple of 128
max_mb = 256  # megabytes of text to read; more changes a tokenizer little
inspect = ""  # directory of a tokenizer to look at, instead of training one
text = ""  # with inspect: the text whose pieces to show
convert = ""  # another's tokenizer (qwen.tiktoken, tokenizer.model, a directory) to write to out_dir for transformers
specials = ""  # with convert: its special tokens, comma-separated, whose ids follow all others
extend = ""  # directory of a tokenizer to which the tokens of `input` are added, up to vocab_size, into out_dir

SPECIALS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
SIZE_STEP = 128  # vocabularies are padded to a multiple, which makes the matrix products of the head faster
SMALLEST = 384  # the multiple of SIZE_STEP that holds 256 bytes and the specials
SENTENCEPIECE_MB = 200  # sentencepiece holds all of its text in memory, several times over
MAX_DOC_CHARS = 100_000  # of each document of a mixture, so that no single one decides the merges

ROLES = ("system", "user", "assistant", "tool")
# The Jinja twin of Tokenizer.render, for tokenizer_config.json; "generation" marks what the model learns to say.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)





# ---- training: both backends -----------------------------------------------------------------


def train(texts: Iterable[str], vocab_size: int, backend: str = "bpe", pattern: str = "gpt4") -> "Tokenizer":
    """A tokenizer learnt from `texts` with `vocab_size` ids in all, rounded up to a multiple of SIZE_STEP.

    bpe: 256 bytes, merges, the special tokens, <|reserved_i|>; fewer ids than asked for if no pair is left to merge.
    pattern, for bpe: a name of PATTERNS. Raises TokenizerError: no text, vocab_size too small, unknown names; for
    sentencepiece also too small or too large for the text.
    """
    if backend == "sentencepiece" and pattern != "gpt4":
        raise UserError(f"tokenizer: pattern={pattern!r} is for backend=bpe; sentencepiece cuts text its own way")
    if backend not in ("bpe", "sentencepiece"):
        raise UserError(f"tokenizer: unknown backend {backend!r}; use 'bpe' or 'sentencepiece'")
    check_pattern(pattern)
    size = -(-vocab_size // SIZE_STEP) * SIZE_STEP
    if size < SMALLEST:
        raise UserError(f"tokenizer: vocab_size={vocab_size} cannot hold bytes and specials; use >= {SMALLEST}")
    if size != vocab_size:
        print(f"tokenizer: vocab_size={vocab_size} is rounded up to {size}, a multiple of {SIZE_STEP}")
    if backend == "sentencepiece":
        return Tokenizer(sentencepiece_files(train_sentencepiece(texts, size)))
    counts = count_chunks(texts, PATTERNS[pattern])
    if not counts:
        raise UserError("tokenizer: the input holds no text to learn from")
    tokenizer = Tokenizer(bpe_files(train_bpe(counts, size - 256 - len(SPECIALS)), PATTERNS[pattern]))
    if tokenizer.vocab_size < size:
        print(f"tokenizer: every pair left is rare; vocab_size is {tokenizer.vocab_size} instead of {size}")
    return tokenizer


def check_pattern(pattern: str) -> None:
    if pattern not in PATTERNS:
        raise UserError(f"tokenizer: unknown pattern {pattern!r}; use one of {', '.join(PATTERNS)}")


def train_sentencepiece(texts: Iterable[str], vocab_size: int, exactly: bool = True) -> bytes:
    """A model of sentencepiece, the content of tokenizer.model, that gives text back exactly. Raises TokenizerError.

    exactly: whether a text too small for vocab_size is an error; else the model is smaller.
    """
    lines = list(lines_of(texts))  # an error of `texts` would be lost inside sentencepiece
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=exactly,
            character_coverage=0.9995,  # the rarest characters are spelt in bytes
            byte_fallback=True,
            split_digits=True,
            control_symbols=list(SPECIALS),  # unlike user_defined_symbols, never found in text
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            normalization_rule_name="identity",  # the rest undoes defaults that change the text
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 20,  # bytes; longer lines would be dropped without a word, see lines_of
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(f"tokenizer: {sentencepiece_advice(str(error), vocab_size)}") from None
    return model.getvalue()


def lines_of(texts: Iterable[str]) -> Iterator[str]:
    """The lines of `texts`, long ones in parts, until SENTENCEPIECE_MB; newlines themselves stay byte pieces."""
    room = SENTENCEPIECE_MB * 1_000_000
    for text in texts:
        for line in scrub(text).split("\n"):
            for start in range(0, len(line), MAX_CHARS):
                part = line[start : start + MAX_CHARS]
                room -= len(part.encode())
                yield part
        if room <= 0:
            print(f"tokenizer: sentencepiece learns from the first {SENTENCEPIECE_MB} MB; the rest is not read")
            return


def sentencepiece_advice(error: str, vocab_size: int) -> str:
    """What to do about an error of sentencepiece's trainer."""
    if found := re.search(r"value <= (\d+)", error):
        most = int(found[1]) // SIZE_STEP * SIZE_STEP
        smaller = f"vocab_size <= {most}, " if most >= SMALLEST else ""
        return f"the text is too small for vocab_size={vocab_size}; use {smaller}more text, or backend=bpe"
    if found := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return f"vocab_size={vocab_size} is too small for the characters of the text; use >= {found[1]}, or backend=bpe"
    if "sentences_.empty" in error:
        return "the input holds no text to learn from"
    return f"sentencepiece: {' '.join(error.split())}"


# ---- files: the layout of Hugging Face -------------------------------------------------------


def byte_alphabet() -> dict[int, str]:
    """{byte: the printable character that stands for it in tokenizer.json}, as in GPT-2: printable Latin-1 stands for
    itself, the other 68 bytes take the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


TO_CHAR = byte_alphabet()
TO_BYTE = {char: byte for byte, char in TO_CHAR.items()}


def bpe_files(merges: Sequence[tuple[int, int]], pattern: str) -> dict[str, bytes]:
    """{file name: content} of a byte-level BPE with these merges and our special tokens."""
    tokens = [bytes([b]) for b in range(256)]
    for left, right in merges:
        tokens.append(tokens[left] + tokens[right])
    names = [*SPECIALS, *reserved(-(len(tokens) + len(SPECIALS)) % SIZE_STEP, SPECIALS)]
    specials = {name: i for i, name in enumerate(names, start=len(tokens))}
    pairs = [(tokens[left], tokens[right]) for left, right in merges]
    description = bpe_description({token: i for i, token in enumerate(tokens)}, pairs, specials, pattern)
    config = config_of("PreTrainedTokenizerFast")
    return {"tokenizer.json": to_json(description), "tokenizer_config.json": to_json(config)}


def reserved(n: int, taken: Iterable[str]) -> list[str]:
    """`n` names for special tokens without a meaning, numbered on from those that are taken."""
    found = [re.fullmatch(r"<\|reserved_(\d+)\|>", name) for name in taken]
    start = 1 + max((int(match[1]) for match in found if match), default=-1)
    return [f"<|reserved_{start + i}|>" for i in range(n)]


def bpe_description(
    ranks: dict[bytes, int],
    merges: list[tuple[bytes, bytes]],
    specials: dict[str, int],
    pattern: str,
    whole_chunks: bool = False,
) -> dict:
    """The content of tokenizer.json. whole_chunks: see check_merges."""
    top = max(ranks.values())
    vocab = {in_chars(token): i for token, i in ranks.items()} | {name: i for name, i in specials.items() if i < top}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i} | added_token(name) for name, i in sorted(specials.items(), key=itemgetter(1))],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_chunks,
            "vocab": dict(sorted(vocab.items(), key=itemgetter(1))),
            "merges": [[in_chars(left), in_chars(right)] for left, right in merges],
        },
    }


def sentencepiece_files(model: bytes) -> dict[str, bytes]:
    """{file name: content} of a model made by train_sentencepiece. Read by transformers' LlamaTokenizer."""
    ids = {special: i for i, special in enumerate(SPECIALS, start=1)}  # control symbols follow <unk>, id 0
    config = config_of("LlamaTokenizer") | {
        "unk_token": "<unk>",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": {str(i): added_token(special) for special, i in ids.items()},
    }
    return {"tokenizer.model": model, "tokenizer_config.json": to_json(config)}


def config_of(tokenizer_class: str) -> dict:
    return {
        "tokenizer_class": tokenizer_class,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def added_token(content: str) -> dict:
    return {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def to_json(value: dict) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


# ---- encoding: the two backends --------------------------------------------------------------


class ByteLevelBPE:
    """The backend "bpe": a tokenizer.json of the byte-level kind, our own or another's, run by tiktoken.

    special_tokens {text: id};  token_bytes {id: bytes} for all other tokens
    """

    def __init__(self, description: dict) -> None:
        """From a parsed tokenizer.json. Raises TokenizerError if tiktoken would not give the same ids."""
        model, added = description["model"], description.get("added_tokens") or []
        self.special_tokens = {token["content"]: token["id"] for token in added if token["special"]}
        words = added_words(added)
        self.words = set(words)
        self.nfc = needs_nfc(description.get("normalizer"))
        self.pattern = split_pattern(description.get("pre_tokenizer"))
        if model.get("type") != "BPE" or any(model.get(key) for key in NOT_BYTE_LEVEL):
            raise UserError(f"its model, of type {model.get('type')!r}, is not byte-level BPE")
        extra = self.special_tokens | words
        ranks = {in_bytes(word): i for word, i in model["vocab"].items() if word not in extra}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        check_ids([*ranks.values(), *extra.values()])
        check_merges(ranks, [(in_bytes(a), in_bytes(b)) for a, b in merges], model.get("ignore_merges", False))
        self.encoding = tiktoken.Encoding("bpe", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=extra)
        self.token_bytes = {i: token for token, i in ranks.items()} | {i: word.encode() for word, i in words.items()}
        if self.encoding.decode_bytes(self.encode(ALL_KINDS)) != ALL_KINDS.encode():
            raise UserError(f"its pattern leaves out part of the text: {self.pattern!r:.200}")

    def encode(self, text: str) -> list[int]:
        if len(text) > MAX_CHARS:
            return self.encode_array(text).tolist()
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        if self.words:
            return self.encoding.encode(text, allowed_special=self.words, disallowed_special=())
        return self.encoding.encode_ordinary(text)  # mends surrogates itself

    def encode_array(self, text: str) -> np.ndarray:
        text = scrub(unicodedata.normalize("NFC", text) if self.nfc else text)
        encode = self.encoding.encode_to_numpy
        parts = [encode(block, allowed_special=self.words, disallowed_special=()) for block in blocks(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def identity(self) -> list:
        """All that decides the ids, besides the special tokens, as plain values."""
        tokens = [(i, token.hex()) for i, token in sorted(self.token_bytes.items())]  # in the order of the merges
        return [self.pattern, self.nfc, sorted(self.words), tokens]


def added_words(added: list[dict]) -> dict[str, int]:
    """{word: id} of the words added to a finished vocabulary (Qwen's "<think>"): text, but found before it is split.
    Raises TokenizerError where tiktoken would find others."""
    words = {token["content"]: token["id"] for token in added if not token["special"]}
    flags = [token.get(flag) for token in added if not token["special"] for flag in ("lstrip", "rstrip", "single_word")]
    names = sorted(token["content"] for token in added)
    if any(flags) or (words and any(b.startswith(a) for a, b in zip(names, names[1:], strict=False))):
        raise UserError("its added words overlap, or take in the white space around them, which is not supported")
    return words


NOT_BYTE_LEVEL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
ALL_KINDS = "a Z1\u0664 \u00e9\u0915\u093f \u7532\U0001f600 _'s'!\u3002 \t\r\n\n \x00\x85\u00a0\u2028\u200b\ufffd  "


def needs_nfc(normalizer: dict | None) -> bool:
    """Whether text is first brought to Unicode's form C (Qwen). Raises TokenizerError for other changes to the text."""
    if normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}:
        return False
    if normalizer["type"] != "NFC":
        raise UserError(f"its normalizer {normalizer['type']!r} is not supported; none and NFC are")
    return True


def split_pattern(pre_tokenizer: dict | None) -> str:
    """The regular expression by which text is split into chunks. Raises TokenizerError for other ways to split."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    *splits, last = steps
    kinds = [step.get("type") for step in steps]
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        own_regex = last.get("use_regex", True)
        if not splits and own_regex:
            return PATTERNS["gpt2"]
        if kinds[:-1] == ["Split"] and not own_regex and "Regex" in splits[0]["pattern"]:
            # Every match is a chunk, either way. Whether all text matches is tried with ALL_KINDS.
            if (splits[0]["behavior"], splits[0]["invert"]) in (("Isolated", False), ("Removed", True)):
                return splits[0]["pattern"]["Regex"]
    raise UserError(f"it splits text by {kinds}, which is not supported; Split by a Regex and ByteLevel is")


def in_chars(token: bytes) -> str:
    return "".join([TO_CHAR[byte] for byte in token])


def in_bytes(word: str) -> bytes:
    """A word of tokenizer.json, written in the byte alphabet, as the bytes it stands for."""
    try:
        return bytes([TO_BYTE[char] for char in word])
    except KeyError:
        raise UserError(f"its token {word!r} is not written in byte-level BPE's alphabet") from None


def check_ids(ids: list) -> None:
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids) or len(set(ids)) < len(ids):
        raise UserError("two of its tokens have the same id, or an id is not a number")


def check_merges(ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]], whole_chunks: bool) -> None:
    """Raise TokenizerError unless tiktoken, which knows no merges, does what the list of merges says.

    tiktoken joins the two neighbours whose union has the smallest id. That is the same if the ids are in the order of
    the merges and joining a token's bytes, up to its own id, ends in a pair of the list.
    whole_chunks ("ignore_merges"): a chunk that is a token is taken at once, which tiktoken does anyway. Then merges
    need not lead to a token if the list has all its splits into two tokens (Llama 3's was made from the tokens).
    """
    if missing := sum(bytes([b]) not in ranks for b in range(256)):
        raise UserError(f"{missing} of the 256 bytes have no token")
    order = [ranks.get(left + right, -1) for left, right in merges]
    if order and (order[0] < 0 or any(a > b for a, b in zip(order, order[1:], strict=False))):
        raise UserError("its merges are not in the order of the token ids, or make tokens that do not exist")
    listed = set(merges)
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        parts = merge_below(token, rank, ranks)
        if len(parts) == 2:
            known = tuple(parts) in listed
        else:
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            known = whole_chunks and all(s in listed for s in splits if s[0] in ranks and s[1] in ranks)
        if not known:
            raise UserError(f"its token {rank} ({token!r}) does not follow from its merges")


class SentencePieceBPE:
    """The backend "sentencepiece": a tokenizer.model, run by sentencepiece. Attributes as in ByteLevelBPE."""

    def __init__(self, model: bytes, added_tokens: dict) -> None:
        """From the content of tokenizer.model, and "added_tokens_decoder" of tokenizer_config.json."""
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
        # One that puts a space before every text (Llama 2) would put one after each U+2581 too: its own ids are given.
        self.has_prefix = self.processor.encode("a", out_type=str)[0].startswith(SPACE)
        self.space_in_bytes = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]

    def encode(self, text: str) -> list[int]:
        if self.has_prefix:
            return self.processor.encode(scrub(text))
        first, *rest = scrub(text).split(SPACE)
        ids = self.processor.encode(first)
        for part in rest:
            ids += self.space_in_bytes + self.processor.encode(part)
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.uint32)

    def identity(self) -> list:
        """All that decides the ids, besides the special tokens, as plain values."""
        return [self.sha256]


SPACE = "\u2581"  # stands for a space in sentencepiece's pieces, so one that is in the text is spelt in bytes


# ---- what others store otherwise -------------------------------------------------------------


class RankFile(NamedTuple):
    """A published list of ranks: how it cuts text, how many tokens it has, and its special tokens' ids after these."""

    pattern: str
    n_tokens: int
    specials: dict[str, int]


FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
RANK_FILES = {  # by what their names hold
    "gpt2": RankFile("gpt2", 50_256, {"<|endoftext|>": 0}),
    "r50k": RankFile("gpt2", 50_256, {"<|endoftext|>": 0}),
    "cl100k": RankFile(
        "cl100k", 100_256, {"<|endoftext|>": 1, **{name: 2 + i for i, name in enumerate(FIM)}, "<|endofprompt|>": 20}
    ),
    "qwen": RankFile("qwen", 151_643, {name: i for i, name in enumerate(QWEN)}),
}
CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")  # its code adds them to the pieces of ChatGLM2's model


def imported(files: dict[str, bytes], pattern: str = "", specials: str = "") -> dict[str, bytes]:
    """`files` in Hugging Face's layout: a list of ranks becomes a tokenizer.json; a model of sentencepiece that comes
    without a configuration, or with that of ChatGLM, gets one. Others stay as they are."""
    names = [name.strip() for name in specials.split(",") if name.strip()]
    if "tokenizer.json" in files:
        if pattern or names:
            raise UserError("tokenizer.json has a pattern and special tokens of its own; leave out these options")
        return files
    for name, content in files.items():
        if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", content):
            return rank_files(read_ranks(content), name, pattern, names)
    if "tokenizer.model" not in files:
        raise UserError("it is neither a list of ranks nor a model of sentencepiece nor a tokenizer.json")
    if pattern:
        raise UserError(f"it is a model of sentencepiece, which has no use for pattern={pattern!r}")
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    if "ChatGLM" in config.get("tokenizer_class", ""):
        names = names or list(CHATGLM)
    elif config and not names:
        return files
    return files | {"tokenizer_config.json": to_json(config_of_model(files["tokenizer.model"], names))}


def read_ranks(content: bytes) -> dict[bytes, int]:
    """{token: rank} of tiktoken's format: on each line a token in base64 and its rank. Raises ValueError."""
    fields = [line.split() for line in content.splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in fields}
    if len(ranks) < len(fields):
        raise UserError(f"{len(fields) - len(ranks)} of its tokens are listed twice")
    return ranks


def rank_files(ranks: dict[bytes, int], name: str, pattern: str, specials: list[str]) -> dict[str, bytes]:
    """{file name: content} of a list of ranks called `name`. Raises TokenizerError: pattern not known."""
    matching = [kind for key, kind in RANK_FILES.items() if key in name.lower() or kind.n_tokens == len(ranks)]
    if not matching and not pattern:
        raise UserError(f"{name} does not say how it cuts text; give --pattern={'|'.join(PATTERNS)}")
    kind = matching[0] if matching else RankFile(pattern, 0, {"<|endoftext|>": 0})
    check_pattern(pattern := pattern or kind.pattern)
    above = 1 + max(ranks.values())
    offsets = {special: i for i, special in enumerate(specials)} or kind.specials
    ids = {special: above + i for special, i in offsets.items()}
    gaps = sorted(set(range(1 + max(ids.values()))) - set(ranks.values()) - set(ids.values()))
    ids |= dict(zip(reserved(len(gaps), ids), gaps, strict=True))
    merges, by_hand = merges_of(ranks)
    description = bpe_description(ranks, merges, ids, PATTERNS[pattern], whole_chunks=by_hand)
    if pattern == "qwen":
        description["normalizer"] = {"type": "NFC"}  # which its own code does
    end = next(iter(offsets))
    config = config_of("PreTrainedTokenizerFast") | {"bos_token": None, "eos_token": end, "pad_token": None}
    if "<|im_start|>" not in ids:
        del config["chat_template"]
    return {"tokenizer.json": to_json(description), "tokenizer_config.json": to_json(config)}


def config_of_model(model: bytes, added: list[str]) -> dict:
    """tokenizer_config.json for a bare tokenizer.model of the kind of Llama 2's, with special tokens added to it."""
    engine = SentencePieceBPE(model, {})
    processor = engine.processor
    names = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id(), "unk_token": processor.unk_id()}
    first = processor.get_piece_size()
    return {
        "tokenizer_class": "LlamaTokenizer",
        **{key: processor.id_to_piece(i) for key, i in names.items() if i >= 0},
        "legacy": False,
        "add_prefix_space": engine.has_prefix,  # transformers, unlike sentencepiece, puts none before a space
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(first + i): added_token(name) for i, name in enumerate(added)},
    }


# ---- more tokens for another language --------------------------------------------------------


def extended(tokenizer: "Tokenizer", texts: Iterable[str], n_new: int) -> "Tokenizer":
    """`tokenizer` with about n_new tokens more, learnt from `texts`: every old id stays, special ones included; new ids
    follow all of them, and reserved special tokens up to a multiple of SIZE_STEP. Fewer, if the text has no more.

    bpe goes on merging where the old merges leave the text; sentencepiece gets the pieces that a model of the new text
    has and the old one lacks, ranked after the old ones. (What ChatGLM2's code adds to its model is in the model then;
    transformers, unlike sentencepiece, would make "sop" of an "s" and an "op" in text.)
    Raises TokenizerError: no text, protobuf is not installed.
    """
    if n_new <= 0:
        raise UserError(f"tokenizer: it has {tokenizer.vocab_size} ids already; give a larger vocab_size")
    size = -(-(tokenizer.vocab_size + n_new) // SIZE_STEP) * SIZE_STEP
    if tokenizer.backend == "sentencepiece":
        return Tokenizer(tokenizer.files | extended_model(tokenizer, texts, size))
    return Tokenizer(tokenizer.files | extended_bpe(tokenizer, texts, size))


def extended_bpe(tokenizer: "Tokenizer", texts: Iterable[str], size: int) -> dict[str, bytes]:
    engine, first = tokenizer.engine, tokenizer.vocab_size
    texts = (unicodedata.normalize("NFC", text) if engine.nfc else text for text in texts)
    counts = count_chunks(texts, engine.pattern)
    if not counts:
        raise UserError("tokenizer: the input holds no text to learn from")
    description = json.loads(tokenizer.files["tokenizer.json"])
    model, added = description["model"], description["added_tokens"]
    names = {token["content"]: token["id"] for token in added}
    ranks = {in_bytes(word): i for word, i in model["vocab"].items() if word not in names}
    whole = tiktoken.Encoding("chunks", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={})
    ids = [whole.encode_to_numpy(chunk.decode(), disallowed_special=()) for chunk in counts]
    lengths, weights = np.array([len(i) for i in ids]), np.array(list(counts.values()))
    merges = Corpus(np.concatenate(ids), lengths, weights).train(size - first, first)

    # A library that reads the file numbers added tokens on from the size of "vocab", unless they are in it.
    model["vocab"] |= names
    top = append_merges(model, merges, {i: in_chars(token) for token, i in ranks.items()}, first)
    for i, name in enumerate(reserved(-top % SIZE_STEP, tokenizer.special_tokens), start=top):
        model["vocab"][name] = i
        added.append({"id": i} | added_token(name))
    return {"tokenizer.json": to_json(description)}


def chat_ready(tokenizer: "Tokenizer") -> "Tokenizer":
    """`tokenizer` with what conversations take: <|im_start|>, <|im_end|> and <|pad|> behind all other ids where it has
    none, and our chat template in place of its own. Every old id stays."""
    files, special_tokens = tokenizer.files, tokenizer.special_tokens
    names = [name for name in ("<|im_start|>", "<|im_end|>") if name not in special_tokens]
    names += ["<|pad|>"] if tokenizer.pad_id < 0 else []
    first = tokenizer.vocab_size
    names += reserved(-(first + len(names)) % SIZE_STEP, special_tokens) if names else []
    config = json.loads(files.get("tokenizer_config.json", b"{}")) | {"chat_template": CHAT_TEMPLATE}
    config |= {"pad_token": "<|pad|>"} if tokenizer.pad_id < 0 else {}
    files = {name: content for name, content in files.items() if name != "chat_template.jinja"}
    if tokenizer.backend == "sentencepiece":
        decoder = config.setdefault("added_tokens_decoder", {})
        decoder |= {str(i): added_token(name) for i, name in enumerate(names, start=first)}
    elif names:
        description = json.loads(files["tokenizer.json"])
        description["model"]["vocab"] |= {token["content"]: token["id"] for token in description["added_tokens"]}
        for i, name in enumerate(names, start=first):
            description["model"]["vocab"][name] = i
            description["added_tokens"].append({"id": i} | added_token(name))
        files["tokenizer.json"] = to_json(description)
    return Tokenizer(files | {"tokenizer_config.json": to_json(config)}, tokenizer.generation_config)


def append_merges(model: dict, merges: list[tuple[int, int]], words: dict[int, str], first: int) -> int:
    """Add what was learnt to the "model" of a tokenizer.json; return the id after the last new one.

    words {id: token} of the old tokens, whose merges number `first` on
    """
    vocab, pairs = model["vocab"], [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    for i, (left, right) in enumerate(merges, start=first):
        words[i] = words[left] + words[right]
        if words[i] not in vocab:  # else an old token to which the old merges do not lead, see below
            vocab[words[i]] = first
            pairs.append([words[left], words[right]])
            first += 1
    if model.get("ignore_merges"):  # new parts may lead to old tokens to which no merges led, see check_merges
        splits = [[word[:i], word[i:]] for word in set(words.values()) for i in range(1, len(word))]
        listed = {(left, right) for left, right in pairs}
        pairs += [s for s in splits if s[0] in vocab and s[1] in vocab and tuple(s) not in listed]
        pairs.sort(key=lambda pair: (vocab[pair[0] + pair[1]], len(pair[0])))
    model["merges"] = pairs
    return first


def extended_model(tokenizer: "Tokenizer", texts: Iterable[str], size: int) -> dict[str, bytes]:
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError:
        raise UserError("tokenizer: to extend a sentencepiece model: pip install protobuf") from None
    model, config = ModelProto(), json.loads(tokenizer.files.get("tokenizer_config.json", b"{}"))
    model.ParseFromString(tokenizer.files["tokenizer.model"])
    decoder = config.setdefault("added_tokens_decoder", {})
    for i in range(len(model.pieces), tokenizer.vocab_size):  # ids outside the model, which no new piece may take
        model.pieces.add(piece=decoder[str(i)]["content"], score=0, type=ModelProto.SentencePiece.CONTROL)
    lowest = min(piece.score for piece in model.pieces)
    known = {piece.piece for piece in model.pieces}
    for i, piece in enumerate(missing_pieces(known, texts, size - len(known)), start=1):
        model.pieces.add(piece=piece, score=lowest - i)
    top = len(model.pieces)
    for i, name in enumerate(reserved(-top % SIZE_STEP, tokenizer.special_tokens), start=top):
        model.pieces.add(piece=name, score=0, type=ModelProto.SentencePiece.CONTROL)
        decoder[str(i)] = added_token(name)
    return {"tokenizer.model": model.SerializeToString(), "tokenizer_config.json": to_json(config)}


def missing_pieces(known: set[str], texts: Iterable[str], n: int) -> list[str]:
    """At most n pieces of a model of `texts` that are not in `known`, in its order, each after its characters: without
    these nothing would merge into it."""
    # Many of the new text's pieces are old ones, so more are learnt than needed, and the first of those missing taken;
    # 16,384, for sentencepiece wants room for all characters, of which Chinese text has thousands.
    learnt = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(texts, 2 * n + 16_384, exactly=False))
    missing: dict[str, None] = {}
    for i in range(learnt.get_piece_size()):
        if learnt.is_control(i) or learnt.is_unknown(i) or learnt.is_byte(i):
            continue
        piece = learnt.id_to_piece(i)
        new = dict.fromkeys(part for part in (*piece, piece) if part not in known and part not in missing)
        if len(missing) + len(new) <= n:
            missing |= new
    return list(missing)


# ---- the tokenizer ---------------------------------------------------------------------------

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


class Tokenizer:
    """Text <-> ids, and conversations -> ids with a mask of what is learnt. From `train` or `Tokenizer.load`.

    backend: "bpe" | "sentencepiece";  vocab_size: every id is below it;  special_tokens {text: id}
    eot_id, pad_id, im_start_id, im_end_id, bos_id: -1 where another's tokenizer has none; in ours bos_id is eot_id
    stop_ids: the ids that end a text or a turn
    """

    def __init__(self, files: dict[str, bytes], generation_config: bytes = b"{}") -> None:
        """From the files of a directory in Hugging Face's layout, {name: content}; `save` writes them as they are."""
        self.files, self.generation_config = files, generation_config
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        self.engine: ByteLevelBPE | SentencePieceBPE
        if "tokenizer.model" in files:
            self.backend = "sentencepiece"
            self.engine = SentencePieceBPE(files["tokenizer.model"], config.get("added_tokens_decoder") or {})
        else:
            self.backend = "bpe"
            self.engine = ByteLevelBPE(json.loads(files["tokenizer.json"]))
        self.special_tokens = self.engine.special_tokens
        self.special_ids = frozenset(self.special_tokens.values())
        self.pieces = Pieces(self.engine.token_bytes | {i: s.encode() for s, i in self.special_tokens.items()})
        self.vocab_size = 1 + max(self.pieces)

        find = partial(find_special, self.special_tokens, config, json.loads(generation_config))
        self.eot_id = find("eos_token", name="<|endoftext|>")
        self.pad_id = find("pad_token", name="<|pad|>")
        self.bos_id = find("bos_token", default=self.eot_id)
        self.im_start_id = self.special_tokens.get("<|im_start|>", -1)
        self.im_end_id = self.special_tokens.get("<|im_end|>", -1)
        self.stop_ids = frozenset({self.eot_id, self.im_end_id} - {-1})

    @classmethod
    def load(cls, path: str | os.PathLike, pattern: str = "", specials: str = "") -> "Tokenizer":
        """The tokenizer of a Hugging Face directory. Or another's: a list of ranks (*.tiktoken), a bare
        tokenizer.model, or a directory with one of these; pattern and specials, as on the command line, are for them.

        Raises TokenizerError: there is none, damaged, not supported.
        """
        files, generation_config = read_files(path)
        if not set(files) - {"tokenizer_config.json", "chat_template.jinja"}:
            raise UserError(f"tokenizer: no tokenizer.json or tokenizer.model in {path}; train a tokenizer")
        try:
            return cls(imported(files, pattern, specials), generation_config)
        except UserError as error:
            raise UserError(f"tokenizer: cannot use {path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # what a malformed file makes of the parsing
            raise UserError(f"tokenizer: {path} is damaged: {type(error).__name__}: {error}") from None

    def save(self, directory: str | os.PathLike) -> None:
        """Write the files that transformers.AutoTokenizer and `load` read. Each appears whole or not at all."""
        os.makedirs(directory, exist_ok=True)
        for name, content in self.files.items():
            path = os.path.join(directory, name)
            with open(path + ".tmp", "wb") as f:
                f.write(content)
            os.replace(path + ".tmp", path)
        for name in set(FILES) - set(self.files):  # another tokenizer's, that would be read together with these
            Path(directory, name).unlink(missing_ok=True)

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text: never a special one. Works for any str; lone surrogates become U+FFFD."""
        return self.engine.encode(text)

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as uint32 (n,), without a Python integer for each id where the backend allows it."""
        return self.engine.encode_array(text)

    def token_bytes(self, token_id: int) -> bytes:
        """What an id adds to the text, possibly a part of a character; b"" for special ones. Raises TokenizerError."""
        return b"" if token_id in self.special_ids else self.pieces[token_id]

    def decode_bytes(self, ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """The bytes of `ids`, with the names of special ones or without them. Raises TokenizerError: unknown id."""
        if skip_special_tokens:
            return b"".join([self.token_bytes(i) for i in ids])
        return b"".join([self.pieces[i] for i in ids])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that make no character become U+FFFD. While ids still come in: StreamDecoder."""
        return self.decode_bytes(ids, skip_special_tokens).decode("utf-8", errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """Bytes of text per id, int32 (vocab_size,), 0 for special ones: turns nats per token into bits per byte."""
        lengths = np.zeros(self.vocab_size, np.int32)
        for i, token in self.engine.token_bytes.items():
            lengths[i] = len(token)
        return lengths

    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids. Token files and checkpoints carry it, so that they are not mixed up."""
        identity = [self.backend, sorted(self.special_tokens.items()), self.engine.identity()]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def render(self, messages: Sequence[dict], add_generation_prompt: bool = False) -> tuple[list[int], list[int]]:
        """(ids, mask) of a conversation [{"role": ..., "content": ...}, ...] in ChatML. Raises TokenizerError.

        Each message is <|im_start|> role newline content <|im_end|> newline; the prompt for an answer ends after
        "assistant" newline. The markers are written as ids and the rest is ordinary text, so no content can open or
        close a turn. mask is 1 where the model learns: an assistant's content and its <|im_end|>, at which generation
        stops, so that the newline is never the model's to say.
        """
        if self.im_start_id < 0 or self.im_end_id < 0:
            raise UserError("tokenizer: this tokenizer has no <|im_start|> and <|im_end|>, so no conversations")
        if not messages:
            raise UserError("tokenizer: a conversation needs at least one message")
        segments = []  # (ids, whether they are learnt)
        for i, message in enumerate(messages):
            role, content = checked_message(message, i)
            segments.append(([self.im_start_id, *self.encode(role + "\n")], 0))
            segments.append(([*self.encode(content), self.im_end_id], int(role == "assistant")))
            segments.append((self.encode("\n"), 0))
        if add_generation_prompt:
            segments.append(([self.im_start_id, *self.encode("assistant\n")], 0))
        return [i for ids, _ in segments for i in ids], [learnt for ids, learnt in segments for _ in ids]


class Pieces(dict):
    """{id: bytes}, with an error of our own for an id that is not there."""

    def __missing__(self, token_id: int) -> bytes:
        raise UserError(f"tokenizer: id {token_id} is not one of the tokenizer's {len(self)} ids")


def find_special(
    special_tokens: dict[str, int], config: dict, generation_config: dict, key: str, name: str = "", default: int = -1
) -> int:
    """The id of the special token `name`; else of the one that tokenizer_config.json has under `key`, as a text or as
    {"content": text}; else what generation_config.json has under `key`_id, a number or a list; else `default`."""
    token = config.get(key)
    token = token["content"] if isinstance(token, dict) else token
    ids = generation_config.get(key + "_id")
    for i in (special_tokens.get(name), special_tokens.get(token), *(ids if isinstance(ids, list) else [ids])):
        if i in special_tokens.values():
            return i
    return default


def checked_message(message: dict, i: int) -> tuple[str, str]:
    """(role, content) of message number i. Raises TokenizerError."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role not in ROLES:
        raise UserError(f"tokenizer: message {i} has the role {role!r}; use one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise UserError(f"tokenizer: message {i} ({role}) has the content {content!r:.80}; it must be a string")
    return role, content


def read_files(path: str | os.PathLike) -> tuple[dict[str, bytes], bytes]:
    """({name: content} of a tokenizer, the content of generation_config.json), of a directory or a single file."""
    if os.path.isfile(path):
        kinds = {".json": "tokenizer.json", ".model": "tokenizer.model"}
        contents = {kinds.get(os.path.splitext(path)[1], os.path.basename(path)): read_bytes(str(path))}
    else:
        contents = {name: read_bytes(os.path.join(path, name)) for name in (*FILES, "generation_config.json")}
        contents |= {file.name: read_bytes(str(file)) for file in sorted(Path(path).glob("*.tiktoken"))[:1]}
    files = {name: content for name, content in contents.items() if content is not None}
    generation_config = files.pop("generation_config.json", b"{}")
    return files, generation_config


def read_bytes(path: str) -> bytes | None:
    """The content of a file, None if there is none. Raises TokenizerError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"tokenizer: cannot read {path}: {error.strerror}") from None


class StreamDecoder:
    """Text from ids as they are generated: a character comes out whole, once its last byte is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """What the id adds to the text; "" for special ones and inside a character."""
        return self.decoder.decode(self.tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest at the end of a text: U+FFFD if it broke off inside a character. Ready for another text then."""
        return self.decoder.decode(b"", final=True)


# ---- command line ----------------------------------------------------------------------------


class Usage(NamedTuple):
    """What became of some text. counts int64 (vocab_size,): how often each id was used."""

    n_bytes: int
    n_chars: int
    counts: np.ndarray


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> Usage:
    n_bytes, n_chars, counts = 0, 0, np.zeros(tokenizer.vocab_size, np.int64)
    for text in texts:
        n_bytes += len(text.encode())
        n_chars += len(text)
        counts += np.bincount(tokenizer.encode_array(text), minlength=len(counts))
    return Usage(n_bytes, n_chars, counts)


def describe(tokenizer: Tokenizer, usage: Usage) -> str:
    """Three lines on how well the tokenizer fits the text."""
    n_tokens = int(usage.counts.sum())
    if n_tokens == 0:
        return "  no text"
    lengths = tokenizer.token_byte_lengths()
    text_ids = np.flatnonzero(lengths)
    by_length = sorted(text_ids[usage.counts[text_ids] > 0], key=lambda i: -lengths[i])
    longest = [tokenizer.pieces[i] for i in by_length[:10]]
    shown = [repr(token.decode(errors="backslashreplace")).replace("\\\\x", "\\x") for token in longest]
    return (
        f"  {usage.n_bytes / 1e6:.2f} MB, {n_tokens:,} tokens: {usage.n_bytes / n_tokens:.2f} bytes per token, "
        f"{n_tokens / usage.n_chars:.2f} tokens per character\n"
        f"  {usage.counts[fallback_ids(tokenizer)].sum() / n_tokens:.1%} of the tokens are bytes of a character; "
        f"{(usage.counts[text_ids] == 0).sum():,} of {len(text_ids):,} ids are not used\n"
        f"  longest used: {' '.join(shown)}"
    )


def fallback_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that are one byte of a character of several; of sentencepiece all byte pieces, which also spell line ends."""
    if tokenizer.backend == "sentencepiece":
        processor = tokenizer.engine.processor
        return [i for i in range(processor.get_piece_size()) if processor.is_byte(i)]
    return [i for i, token in tokenizer.engine.token_bytes.items() if len(token) == 1 and token[0] >= 0x80]


def readable(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as Python writes it: a string, or bytes where it is not whole characters; a special one by its name."""
    token = tokenizer.pieces[token_id]
    if token_id in tokenizer.special_ids:
        return token.decode()
    try:
        return repr(token.decode())
    except UnicodeDecodeError:
        return repr(token)


def mix_texts(sources: list[tuple[Iterable[str], float]], max_bytes: int) -> Iterator[str]:
    """Texts of all sources by turns, so that the bytes read of each follow its weight, until max_bytes; deterministic.

    The next text is of the source that is furthest behind its weight. One that ends leaves the others at their weights.
    Of each text the first MAX_DOC_CHARS are taken. What every source gave is printed in the end. Weights are above 0.
    """
    iterators = [iter(texts) for texts, _ in sources]
    weights = [weight for _, weight in sources]
    n_bytes, n_texts, n_cut = ([0] * len(sources) for _ in range(3))
    going = list(range(len(sources)))
    while going and sum(n_bytes) < max_bytes:
        k = min(going, key=lambda k: n_bytes[k] / weights[k])
        text = next(iterators[k], None)
        if text is None:
            going.remove(k)
            continue
        n_texts[k] += 1
        n_cut[k] += len(text) > MAX_DOC_CHARS
        text = scrub(text[:MAX_DOC_CHARS])
        n_bytes[k] += len(text.encode())
        yield text
    for k, weight in enumerate(weights):
        print(
            f"tokenizer: source {k + 1}, weight {weight:g}: {n_bytes[k] / 1e6:.2f} MB "
            f"({n_bytes[k] / max(sum(n_bytes), 1):.1%}), {n_texts[k]:,} texts, {n_cut[k]:,} of them cut to "
            f"{MAX_DOC_CHARS:,} characters{'' if k in going else '; read to its end'}"
        )


def parse_mixture(spec: str) -> list[tuple[str, float]]:
    """[(paths, weight), ...] of 'a=0.7,b=0.3'; [] without weights. Raises TokenizerError: some have none, or 0."""
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    found = [re.fullmatch(r"(.+)=(\d+\.?\d*|\.\d+)", part) for part in parts]
    if not any(found):
        return []
    if not all(match and float(match[2]) > 0 for match in found):
        raise UserError(f"tokenizer: input={spec!r}: give every part a weight above 0, as in a=0.7,b=0.3, or none")
    return [(match[1], float(match[2])) for match in found if match]


def read_texts(files: list[str], text_key: str) -> Iterator[str]:
    """The documents of `files`; says in the end what could not be read. Raises DataError."""
    report = Report()
    try:
        with tqdm(desc="reading", unit="B", unit_scale=True, disable=None) as progress:
            for path in files:
                for document in read_documents(path, text_key, report=report):
                    yield document.text
                    progress.update(len(document.text.encode()))
    finally:  # also where a limit ends it
        for path, line, _, why in report.places[:10]:
            print(f"tokenizer: {path}:{line}: {why}")
        if lost := sum(report.problems.values()):
            print(f"tokenizer: {lost} documents could not be read")


def first_mb(texts: Iterable[str], max_mb: int) -> Iterator[str]:
    n_bytes = 0
    for text in texts:
        if n_bytes >= max_mb * 1_000_000:
            print(f"tokenizer: the first {n_bytes / 1e6:.0f} MB are read, no more; max_mb sets this")
            return
        yield text
        n_bytes += len(text.encode())


def keep_some(texts: Iterable[str], kept: list[str], max_bytes: int = 10_000_000) -> Iterator[str]:
    """`texts`, the first of which are also put into `kept`, to be looked at afterwards."""
    n_bytes = 0
    for text in texts:
        if n_bytes < max_bytes:
            kept.append(text)
            n_bytes += len(text.encode())
        yield text


class Source(NamedTuple):
    """One part of `input`: its name, documents, and weight, 0 where none is given."""

    name: str
    texts: Iterable[str]
    weight: float


def sources_of(spec: str, text_key: str) -> list[Source]:
    """The parts of `input`; a file that several of them name belongs to the first. Raises DataError, TokenizerError."""
    parts = parse_mixture(spec) or [(part.strip(), 0.0) for part in spec.split(",") if part.strip()]
    sources, taken = [], set()
    for part, weight in parts:
        files = [file for file in find_files(part) if file not in taken]
        taken.update(files)
        sources.append(Source(part, read_texts(files, text_key), weight))
    return sources


def learning_texts(sources: list[Source], max_mb: int, kept: dict[str, list[str]]) -> Iterator[str]:
    """What is learnt from; the first texts of every source are also put into `kept`, to be looked at afterwards."""
    streams = [keep_some(source.texts, kept.setdefault(source.name, [])) for source in sources]
    if all(source.weight for source in sources):
        return mix_texts([(s, source.weight) for s, source in zip(streams, sources, strict=True)], max_mb * 1_000_000)
    return first_mb(itertools.chain.from_iterable(streams), max_mb)


def show(tokenizer: Tokenizer, title: str, texts_of: dict[str, Iterable[str]]) -> None:
    print(f"{title}: {tokenizer.backend}, {tokenizer.vocab_size:,} ids, {tokenizer.fingerprint()[:16]}")
    for name, texts in texts_of.items():
        print(f"{name}:\n{describe(tokenizer, measure(tokenizer, texts))}")


if __name__ == "__main__":
    configure(globals())
    started = time.perf_counter()
    kept: dict[str, list[str]] = {}
    if inspect:
        tokenizer = Tokenizer.load(inspect, pattern, specials)
        for token_id in tokenizer.encode(text):
            print(f"{token_id:>8}  {readable(tokenizer, token_id)}")
        texts_of = {"text": [scrub(text)]} if text else {}
        texts_of |= {source.name: first_mb(source.texts, max_mb) for source in sources_of(input, text_key)}
        show(tokenizer, inspect, texts_of)
    elif convert:
        tokenizer = Tokenizer.load(convert, pattern, specials)
        tokenizer.save(out_dir)
        show(tokenizer, out_dir, {})
    elif not input:
        raise UserError("tokenizer: nothing to learn from; give --input=FILES, or look at one with --inspect=DIR")
    else:
        old = Tokenizer.load(extend, pattern, specials) if extend else None
        if old and old.backend != backend and backend != "bpe":
            raise UserError(f"tokenizer: {extend} is {old.backend}, so leave out backend={backend}")
        texts = learning_texts(sources_of(input, text_key), max_mb, kept)
        if old:
            tokenizer = extended(old, texts, vocab_size - old.vocab_size)
        else:
            tokenizer = train(texts, vocab_size, backend, pattern or "gpt4")
        tokenizer.save(out_dir)
        if old:
            show(old, f"before, {extend}", kept)
        show(tokenizer, f"in {time.perf_counter() - started:.1f} s, {out_dir}", kept)
