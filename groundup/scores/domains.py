"""Perplexity by domain: how well a model predicts each of several sets of texts.

The loss of a document is the negative log-probability of its whole text, so models are compared on
the same documents whatever their tokenizers (as in arXiv:2310.19341): per byte and per character
always, per token (and perplexity) only if the tokenizer is the same. The token that begins a text
is read, not scored; none ends it. A document longer than block_size is read in windows.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from configurator import split_names
from groundup.errors import UserError, counted, listed
from groundup.files import readers, records
from groundup.files.paths import find_files
from groundup.scores.likelihood import score_tokens
from model import Transformer
from tokenizer import Tokenizer

GROUP_TOKENS = 2**20  # at most, that are scored at a time: enough to batch rows of similar length
SHOWN_PLACES = 5  # of what could not be read, per domain
FOR_CHATS = "for conversations use --tasks=generation, or for losses --score=FILE --out=OUT.jsonl"


class Domain(NamedTuple):
    name: str
    files: list[str]


class Settings(NamedTuple):
    batch_size: int
    block_size: int  # tokens that the model reads at a time
    stride: int  # from 1 to block_size
    limit: int = 0  # documents per domain; 0 = all
    text_key: str = ""
    txt_split: str = "file"


def parse_domains(spec: str) -> list[Domain]:
    """Return the domains of 'name=files,name=files': a file, directory or glob each. Without a
    name a directory or file is a domain of its own name."""
    domains = []
    for part in filter(None, split_names(spec)):
        # 'zh=zh/*.txt' has a name, unless a file is really called that
        named = None if os.path.exists(part) else re.fullmatch(r"([^/=]+)=(.+)", part)
        if named or os.path.isdir(part):
            name = named[1].strip() if named else os.path.basename(os.path.abspath(part))
            domains.append(Domain(name, find_files(named[2] if named else part, "data")))
            continue
        for path in find_files(part, "data"):  # wiki.jsonl.gz is the domain wiki
            name = os.path.splitext(re.sub(r"\.(gz|bz2|xz|zst)$", "", os.path.basename(path)))[0]
            domains.append(Domain(name, [path]))
    if not domains:
        example = "--data='zh=zh/*.txt,code=code.jsonl'"
        raise UserError(f"perplexity: data is empty; give texts, such as {example}")
    names = [domain.name for domain in domains]
    for name in {name for name in names if names.count(name) > 1}:
        what = f"two domains are called {name!r}; name them apart"
        raise UserError(f"perplexity: {what}: --data='one=FILES,two=FILES'")
    return domains


def read_texts(domain: Domain, settings: Settings, report: records.Report) -> Iterator[str]:
    """Yield the texts of a domain; empty ones are counted in report.mended."""
    for path in domain.files:
        how = settings.text_key, settings.txt_split
        for document in readers.read_documents(path, *how, report=report):
            if document.value.strip():
                yield document.value
            else:
                report.mended["empty"] += 1


def begin_id(tokenizer: Tokenizer) -> int:
    """Return the id that the first token of a text is predicted from. Raise UserError if there is
    none."""
    # What the model saw before a text in training: its begin token if the tokenizer puts one
    # before every text, else the token between documents.
    found = tokenizer.bos_id
    if tokenizer.eot_id >= 0 and not tokenizer.begins:
        found = tokenizer.eot_id
    if found < 0:
        raise UserError("perplexity: this tokenizer has no token that begins or ends a text")
    return found


def windows(ids: Sequence[int], block_size: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Yield rows (ids, first) for likelihood.score_tokens that together score ids[1:], each id
    once."""
    # Windows of block_size tokens begin `stride` apart. A token is scored in the first window that
    # has it, so all but those of the first window see at least block_size - stride tokens before.
    scored = 1
    for begin in range(0, len(ids), stride):
        if scored == len(ids):
            return
        row = list(ids[begin : begin + block_size + 1])  # the last id is only a target
        yield row, scored - begin
        scored = begin + len(row)


class Loss(NamedTuple):
    """Of one document."""

    nats: float
    n_tokens: int
    n_bytes: int
    n_chars: int


def document_losses(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Iterator[str],
    settings: Settings,
    dtype: torch.dtype,
) -> list[Loss]:
    """Return the loss of each text, in order. The ranks share the work; all get all losses."""
    first = begin_id(tokenizer)
    found: list[list[float]] = []  # fields of Loss

    def numbered_rows() -> Iterator[tuple[int, tuple[list[int], int]]]:
        for number, text in enumerate(texts):
            found.append([0.0, 0, len(text.encode()), len(text)])
            ids = [first, *tokenizer.encode_array(text).tolist()]
            for row in windows(ids, settings.block_size, settings.stride):
                yield number, row

    # Some rows at a time: a domain of gigabytes is never in memory as a whole.
    numbered = numbered_rows()
    while group := list(islice(numbered, max(1, GROUP_TOKENS // settings.block_size))):
        of_rows = score_tokens(model, [row for _, row in group], settings.batch_size, dtype)
        for (number, _), scored in zip(group, of_rows, strict=True):
            found[number][0] += scored.nats
            found[number][1] += scored.n_tokens
    return [Loss(*of) for of in found]


def summarize(losses: Sequence[Loss]) -> dict[str, float]:
    """Return the figures of a domain: sums over its documents, divided."""
    # Bytes and characters are those of the text itself, even if a tokenizer normalises it.
    # Sums divided by sums: a mean of documents' means would give a short one the weight of a long
    # one.
    nats = math.fsum(loss.nats for loss in losses)
    tokens, n_bytes, chars = (sum(column) for column in list(zip(*losses, strict=True))[1:])
    per_token = nats / tokens if tokens else math.nan
    return {
        "documents": len(losses),
        "tokens": tokens,
        "bytes": n_bytes,
        "characters": chars,
        "nats_per_document": nats / len(losses),
        "nats_per_token": per_token,
        # exp(710) overflows
        "perplexity": math.inf if per_token > 709 else math.exp(per_token),
        "bits_per_byte": nats / math.log(2) / n_bytes,
        "bits_per_character": nats / math.log(2) / chars,
    }


def evaluate_domains(
    model: Transformer,
    tokenizer: Tokenizer,
    domains: Sequence[Domain],
    settings: Settings,
    dtype: torch.dtype,
) -> dict[str, dict]:
    """Return {"domains": {name: `summarize` and "notes"}, "all": of all documents}. Raise
    UserError if a domain has no text. notes: a line for everything that was left out, or not
    read as UTF-8."""
    found, everything = {}, []
    for domain in domains:
        report = records.Report(max_places=SHOWN_PLACES)
        # the files are read while they are scored: no domain is in memory as a whole
        texts = islice(read_texts(domain, settings, report), settings.limit or None)
        losses = document_losses(model, tokenizer, texts, settings, dtype)
        if not losses:
            why = "; ".join([listed(domain.files, 3), *notes_of(report, max_places=1)])
            if "kind='chat'" in why:
                why += f"; {FOR_CHATS}"
            raise UserError(f"perplexity: domain {domain.name!r} has no text in {why}")
        found[domain.name] = summarize(losses) | {"notes": notes_of(report)}
        everything += losses
    return {"domains": found, "all": summarize(everything)}


def notes_of(report: records.Report, max_places: int = SHOWN_PLACES) -> list[str]:
    """Return notes for people on how the files were read."""
    kinds = {
        "gb18030": "read as GB18030 (GBK), not UTF-8",
        "surrogates": "broken characters mended",
        "empty": "empty, left out",
        "replaced": "an older score, or a field of that name, replaced",
    }
    notes = [f"{kinds[kind]}: {counted(n, 'document')}" for kind, n in report.mended.items()]
    if lost := sum(report.problems.values()):
        reasons = ", ".join(f"{reason} {n}" for reason, n in report.problems.items())
        places = []
        for path, line, _, why in report.places[:max_places]:
            places.append(f"{path}:{line}: {without_list(why)}")
        notes.append(f"not read: {counted(lost, 'record')} ({reasons}); {'; '.join(places)}")
    return notes


def without_list(problem: str) -> str:
    """Return the reason why a row was not understood, without the list of all known fields."""
    return re.sub(r"; \w+ is known by: .*", "", problem)
