"""How hard each row of a file is for a model: loss, bits per byte and IFD, which prepare.py filters and sorts by.

    python evaluate.py --init_from=out/demo --score=rows.jsonl --out=scored.jsonl
    python prepare.py --input=scored.jsonl --score='bpb=0.3..1.5' --order=score ...         # texts, easy ones first
    python prepare.py --input=scored.jsonl --kind=chat --score='ifd=5%..95%,bpb=..2' ...    # conversations

A row that is a conversation is scored by its answers, each with its <|im_end|>, given all that precedes them, as sft.py
trains on them; any other row by its whole text, as a document of domains.py.

    loss  nats per token
    bpb   bits per byte of the answers or the text
    ifd   instruction-following difficulty (arXiv:2308.12032): nats per token of the first answer given its prompt, over
          those of the same tokens as a text of their own; null where nothing precedes the answer. Above 1 the prompt
          does not help; <|im_end|> is not part of it.

Fields of these names, and score_problem, that a row has had before are replaced; it is said how many rows had any.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from groundup.errors import UserError
from groundup.files import readers, row_formats, streams
from groundup.scores import reward_scores
from groundup.scores.domains import SHOWN_PLACES, Settings, begin_id, notes_of, windows, without_list
from groundup.scores.likelihood import Scored, score_tokens
from groundup.train import ranks
from model import Transformer
from tokenizer import Tokenizer

KEYS = ("loss", "bpb", "ifd", "score_problem")  # what a row gets
ROWS = 64  # at a time, times batch_size; a kill costs that much





class Work(NamedTuple):
    """What is computed of a row: rows for likelihood.score_tokens, by what they are for."""

    fields: dict  # of the row as it was read
    problem: str = ""  # why it has no score
    n_bytes: int = 0
    text: tuple[tuple[list[int], int], ...] = ()  # the loss is theirs
    given: tuple[tuple[list[int], int], ...] = ()  # the first answer, with its prompt
    alone: tuple[tuple[list[int], int], ...] = ()  # and without


# ---- one row --------------------------------------------------------------------------------------------------------


def read_work(source: str, tokenizer: Tokenizer, settings: Settings, report: readers.Report) -> Iterator[Work]:
    """Each row of the files, also those that cannot be read or scored."""
    for path in readers.find_files(source):
        for record in readers.read_records(path, settings.txt_split):
            if record.problem:
                report.add(path, record.line, record.offset, record.problem, record.detail)
                yield Work({"line": record.line}, f"{record.problem}: {record.detail}")
                continue
            if record.encoding != "utf-8":
                report.mended[record.encoding] += 1
            if isinstance(record.value, dict) and not record.value.keys().isdisjoint(KEYS):
                report.mended["replaced"] += 1
            yield work_of(streams.mended(record.value), tokenizer, settings)


def work_of(row: object, tokenizer: Tokenizer, settings: Settings) -> Work:
    """With a text_key a row is a document; else a conversation if it can be read as one."""
    fields = row if isinstance(row, dict) else {"text" if isinstance(row, str) else "row": row}
    fields = {key: value for key, value in fields.items() if key not in KEYS}
    messages, not_chat = ([], "") if settings.text_key else row_formats.messages_of(row)
    if messages:
        return chat_work(fields, messages, tokenizer, settings)
    text, problem = row_formats.document_of(row, settings.text_key)
    if problem:
        why = not_chat if row_formats.format_name(row, "chat") and not settings.text_key else problem
        hint = "; neither a conversation nor a text, give text_key" if why.startswith("unknown format") else ""
        return Work(fields, f"not understood: {without_list(why)}{hint}")
    if not text.strip():
        return Work(fields, "empty text")
    ids = [begin_id(tokenizer), *tokenizer.encode(text)]
    return Work(fields, "", len(text.encode()), tuple(windows(ids, settings.block_size, settings.stride)))


def chat_work(fields: dict, messages: list[dict], tokenizer: Tokenizer, settings: Settings) -> Work:
    if problem := row_formats.chat_problem(messages):
        return Work(fields, problem)
    messages = row_formats.trim_chat(messages)
    ids, learnt = tokenizer.render(messages)
    if len(ids) > settings.block_size + 1:
        return Work(fields, f"too long: {len(ids)} tokens, block_size={settings.block_size}")
    answers = spans(learnt)
    n_bytes = sum(len(m["content"].encode()) for m in messages if m["role"] == "assistant")
    begin, end = answers[0]
    given, alone = (), ()
    if messages[0]["role"] != "assistant":
        given = ((ids[: end - 1], begin),)
        alone = (([begin_id(tokenizer), *ids[begin : end - 1]], 1),)
    return Work(fields, "", n_bytes, tuple((ids[:end], begin) for begin, end in answers), given, alone)


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """[(begin, end)] of the runs of 1."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def numbers_of(work: Work, text: list[Scored], given: list[Scored], alone: list[Scored]) -> dict:
    """The fields that a row gets. A text of no tokens has no score."""
    nats, n_tokens = sum(scored.nats for scored in text), sum(scored.n_tokens for scored in text)
    if work.problem or not n_tokens:
        return {"loss": None, "bpb": None, "score_problem": work.problem or "no tokens"}
    found = {"loss": nats / n_tokens, "bpb": nats / math.log(2) / work.n_bytes}
    if not math.isfinite(nats):
        return {"loss": None, "bpb": None, "score_problem": "the loss is not finite"}
    if given:
        found["ifd"] = given[0].nats / alone[0].nats if alone[0].nats > 0 else None
    return found


# ---- a file ---------------------------------------------------------------------------------------------------------


def scored(
    model: Transformer, works: list[Work], settings: Settings, device: torch.device, dtype: torch.dtype
) -> list[dict]:
    """The rows with their numbers. The ranks share the work; all get all."""
    rows = [row for work in works for row in (*work.text, *work.given, *work.alone)]
    found = iter(score_tokens(model, rows, settings.batch_size, device, dtype))
    done = []
    for work in works:
        parts = [list(islice(found, len(part))) for part in (work.text, work.given, work.alone)]
        done.append(work.fields | numbers_of(work, *parts))
    return done


def score_file(
    model: Transformer, tokenizer: Tokenizer, source: str, out: Path, key: str, settings: Settings,
    device: torch.device, dtype: torch.dtype, is_main: bool,
) -> tuple[Counter, list[str]]:  # fmt: skip
    """Write the rows of `source` to `out` in their order, each with its numbers. Returns why rows have none, counted,
    "" being those that have them; and notes on how the files were read.

    A row without a score keeps its place: its loss is null and "score_problem" says why. `out` is whole or not there;
    what a killed call has done is kept under a hidden name with `key` in it and not done again. On all ranks; the main
    one writes. Raises ScoreError if no row has a score."""
    part = out.with_name(f".{out.name}.{key[:16]}.part")
    if is_main:
        out.parent.mkdir(parents=True, exist_ok=True)
    n_done = ranks.gather_objects(reward_scores.whole_lines(part) if is_main else 0)[0]
    if n_done and is_main:
        print(f"{out}: {n_done:,} rows were done already", flush=True)
    report = readers.Report(max_places=SHOWN_PLACES)
    works = islice(read_work(source, tokenizer, settings, report), n_done, settings.limit or None)
    while some := list(islice(works, ROWS * settings.batch_size)):
        done = scored(model, some, settings, device, dtype)
        if is_main:
            with open(part, "a", encoding="utf-8") as f:
                f.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in done)
    problems = ranks.gather_objects(finish(part, out) if is_main else None)[0]
    if not problems[""]:
        why = reward_scores.reasons(problems) or "there is no row"
        raise UserError(f"score: no row of {source} has a score: {why}")
    return problems, notes_of(report)


def finish(part: Path, out: Path) -> Counter:
    """Rename the whole file, if any of its rows has a score. Returns the problems of the rows, counted."""
    if not part.exists():
        return Counter()
    with open(part, encoding="utf-8") as f:
        problems = Counter(json.loads(line).get("score_problem", "").partition(":")[0] for line in f)
    if problems[""]:
        os.replace(part, out)
    else:
        part.unlink()
    return problems


def summary(problems: Counter) -> str:
    """What became of the rows."""
    n = problems.total()
    left = f", {n - problems['']:,} not: {reward_scores.reasons(problems)}" if n > problems[""] else ""
    return f"{problems['']:,} of {n:,} rows scored{left}"


def scoring_key(directory: Path, tokenizer: Tokenizer, source: str, settings: Settings, dtype: torch.dtype) -> str:
    """Fingerprint of all that decides the scores."""
    parts = [reward_scores.scoring_key(directory, source, dtype), tokenizer.fingerprint()]
    return hashlib.sha256(repr([*parts, settings._replace(batch_size=0)]).encode()).hexdigest()
