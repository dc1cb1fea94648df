"""Files of rows with a model's scores, in the order of the rows; what has no score stays, and its
problem is named.

A language model (evaluate.py --score) scores the answers of a conversation (each with its
<|im_end|>, given all that precedes it, as sft.py trains on them) and the whole text of any other
row (as a document of domains.py), for prepare.py --score='bpb=0.3..1.5,ifd=5%..95%' to choose from:

    loss  nats per token
    bpb   bits per byte of the answers or the text
    ifd   instruction-following difficulty (arXiv:2308.12032): nats per token of the first answer
          (without <|im_end|>) given its prompt, divided by those of the same tokens alone. Above 1
          the prompt does not help.

A reward model (reward.py --score) adds "reward" to a conversation, that of its last answer, or
to each finished one of the "completions" in a file of answers (files/answer_files.py). A score
of null comes with "score_problem" or "reward_problem". Older fields of these names are replaced.
"""

import functools
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from groundup.align.reward_model import RewardModel, answered_ids, score_ids
from groundup.errors import UserError, counted, naming
from groundup.files import answer_files, records, row_formats, turns, untrusted
from groundup.files.answer_files import need_settings, read_settings
from groundup.files.paths import check_replaceable, find_files
from groundup.files.turns import BadRow
from groundup.scores import domains
from groundup.scores.domains import SHOWN_PLACES, Settings, begin_id, windows, without_list
from groundup.scores.likelihood import score_tokens
from groundup.tokens.token_files import file_sha256
from groundup.train import huggingface, ranks
from model import Transformer
from tokenizer import Tokenizer

KEYS = ("loss", "bpb", "ifd", "score_problem")  # that a language model adds
# Rows at a time, times batch_size: enough to batch similar lengths, and a kill costs no more.
ROWS = 64

# ---- files that are read, and one that is resumed ------------------------------------------------


def read_rows(
    paths: Sequence[str], report: records.Report, txt_split: str = "file"
) -> Iterator[tuple[str, object, str]]:
    """Yield (file, row, "") for each row; for one that cannot be read (file, {"line": its number},
    why)."""
    # Every row of the input is a row of the output, also one that cannot be read.
    for path in paths:
        for record in records.read_records(path, txt_split):
            if record.problem:
                report.add(path, record.line, record.offset, record.problem, record.detail)
                yield path, {"line": record.line}, f"{record.problem}: {record.detail}"
                continue
            if record.encoding != "utf-8":
                report.mended[record.encoding] += 1
            yield path, untrusted.mended(record.value), ""


def add_scores(
    rows: Iterator,
    score: Callable[[list], Iterable[dict]],
    source: str,
    out: Path,
    key: str,
    n_rows: int,
    field: str,
) -> tuple[Counter, Path]:
    """Append the scored rows, n_rows at a time, to a hidden file beside `out`, after those that it
    has. Return why rows or their completions have no score, as `field` says, counted by reason, ""
    being those with one, and the file, which the caller renames.

    key: fingerprint of model and rows. All ranks call this; the main one writes. Raise UserError
    if no row has a score."""
    check_replaceable(out)
    # The fingerprint is in its name: another model or other rows do not continue it.
    part = out.with_name(f".{out.name}.{key[:16]}.part")
    is_main = ranks.rank() == 0
    n_done = ranks.gather_objects(n_lines(part) if is_main else 0)[0]
    if is_main and part.exists():
        print(f"{out}: done already: {counted(n_done, 'row')}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Rows are scored in their order, so those that are done are the first ones.
    rows = islice(rows, n_done, None)
    while some := list(islice(rows, n_rows)):
        done = score(some)
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in done)
        if is_main:
            with naming(part), open(part, "a", encoding="utf-8") as f:
                f.writelines(lines)
    # counted in the file: an earlier call may have written a part of it
    problems = ranks.gather_objects(count_problems(part, field) if is_main else None)[0]
    if not problems[""]:
        part.unlink(missing_ok=True)
        why = reasons(problems) or "there is none"
        raise UserError(f"score: no row of {source} has a score: {why}")
    return problems, part


def n_lines(part: Path) -> int:
    """Return the number of rows in a file; cut off half a line, which a kill may leave."""
    if not part.exists():
        return 0
    with open(part, "rb+") as f:
        content = f.read()
        f.truncate(content.rfind(b"\n") + 1)
    return content.count(b"\n")


def count_problems(part: Path, field: str) -> Counter:
    """Return {reason: rows or completions without a score}, "" being those with one."""
    problems = Counter()
    if part.exists():  # it is not where there was no row
        with open(part, encoding="utf-8") as f:
            for row in map(json.loads, f):
                # rewards of a file of answers are those of its completions
                is_one = field == "score_problem" or field in row or "completions" not in row
                parts = [row] if is_one else row["completions"]
                problems.update(one.get(field, "").partition(":")[0] for one in parts)
    return problems


def reasons(problems: Counter) -> str:
    """Return 'too long 3, no answer at the end 1'."""
    return ", ".join(f"{reason} {n}" for reason, n in problems.most_common() if reason)


def reward_key(directory: Path, source: str, dtype: torch.dtype) -> str:
    """Return a fingerprint of all that decides the rewards of the files in `source`."""
    paths = find_files(source)
    known = [huggingface.weights_fingerprint(directory), str(dtype)]
    known += [file_sha256(Path(path)) for path in paths]
    known += [json.dumps(read_settings(path)) for path in paths]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()


def loss_key(
    directory: Path, tokenizer: Tokenizer, source: str, settings: Settings, dtype: torch.dtype
) -> str:
    """Return a fingerprint of all that decides the losses."""
    parts = [reward_key(directory, source, dtype), tokenizer.fingerprint()]
    # the batch size changes roundings only
    return hashlib.sha256(repr([*parts, settings._replace(batch_size=0)]).encode()).hexdigest()


# ---- losses --------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A row and what to compute for it: rows (ids, first) for likelihood.score_tokens."""

    fields: dict  # of the row as it was read
    problem: str = ""  # why it has no score
    n_bytes: int = 0
    text: Sequence[tuple[list[int], int]] = ()  # for the loss
    # For ifd: the first answer after its prompt, and alone
    first: Sequence[tuple[list[int], int]] = ()


def write_losses(
    model: Transformer,
    tokenizer: Tokenizer,
    source: str,
    out: Path,
    key: str,
    settings: Settings,
    dtype: torch.dtype,
    is_main: bool,
) -> tuple[Counter, list[str]]:
    """Write the rows of `source` with their numbers to `out`, which appears when it is whole; a
    killed call goes on.

    Return the problems of the rows, counted, and notes on how the files were read. All ranks
    call this."""
    report = records.Report(max_places=SHOWN_PLACES)
    found = read_rows(find_files(source), report, settings.txt_split)
    works = (
        Work(row, problem) if problem else work_of(row, tokenizer, settings, report)
        for _, row, problem in found
    )

    def score(some: list[Work]) -> list[dict]:
        rows = [row for work in some for row in (*work.text, *work.first)]
        found = iter(score_tokens(model, rows, settings.batch_size, dtype))
        return [work.fields | numbers_of(work, found) for work in some]

    # a generator: of a file of gigabytes only ROWS batches are in memory
    works = islice(works, settings.limit or None)
    n_rows = ROWS * settings.batch_size
    problems, part = add_scores(works, score, source, out, key, n_rows, "score_problem")
    if is_main:
        os.replace(part, out)
    return problems, domains.notes_of(report)


def work_of(row: object, tokenizer: Tokenizer, settings: Settings, report: records.Report) -> Work:
    """Return what to compute for a row. With a text_key every row is a document; otherwise a row is
    a conversation if it can be read as one."""
    # A row may be a text, or a list: what is written is always an object.
    fields = row if isinstance(row, dict) else {"text" if isinstance(row, str) else "row": row}
    if not fields.keys().isdisjoint(KEYS):
        report.mended["replaced"] += 1
    fields = {key: value for key, value in fields.items() if key not in KEYS}
    messages, not_chat = ([], "") if settings.text_key else row_formats.messages_of(row)
    if messages:
        return chat_work(fields, messages, tokenizer, settings)
    text, problem = row_formats.document_of(row, settings.text_key)
    if problem:
        # It is neither. Say what is wrong with the shape that it looks like.
        why = not_chat if row_formats.recognise(row, "chat") and not settings.text_key else problem
        hint = "; neither a conversation nor a text"
        hint = hint if why.startswith("unknown format") else ""
        return Work(fields, f"not understood: {without_list(why)}{hint}")
    if not text.strip():
        return Work(fields, "empty text")
    ids = [begin_id(tokenizer), *tokenizer.encode(text)]
    parts = list(windows(ids, settings.block_size, settings.stride))
    return Work(fields, "", len(text.encode()), parts)


def chat_work(fields: dict, messages: list[dict], tokenizer: Tokenizer, settings: Settings) -> Work:
    """Return what to compute for a conversation: its answers as sft.py trains on them."""
    if problem := turns.chat_problem(messages):
        return Work(fields, problem)
    messages = turns.trim_chat(messages)
    ids, learnt = tokenizer.render(messages)
    if len(ids) > settings.block_size + 1:
        return Work(fields, f"too long: {len(ids)} tokens, block_size={settings.block_size}")
    # learnt is 1 for tokens to train on. Where it changes, an answer begins or ends.
    edges = [i for i, (a, b) in enumerate(zip([0, *learnt], [*learnt, 0], strict=True)) if a != b]
    answers = list(zip(edges[::2], edges[1::2], strict=True))  # (begin, end)
    n_bytes = sum(len(m["content"].encode()) for m in messages if m["role"] == "assistant")
    (begin, end), first = answers[0], []
    if messages[0]["role"] != "assistant":  # else there is no prompt to follow
        # without <|im_end|>, which is easy in any case
        first = [(ids[: end - 1], begin), ([begin_id(tokenizer), *ids[begin : end - 1]], 1)]
    return Work(fields, "", n_bytes, [(ids[:end], begin) for begin, end in answers], first)


def numbers_of(work: Work, found: Iterator) -> dict:
    """Return the new fields of a row; `found` yields what score_tokens says of its parts. A text
    without tokens has no score."""
    text, first = (list(islice(found, len(part))) for part in (work.text, work.first))
    nats, n_tokens = sum(scored.nats for scored in text), sum(scored.n_tokens for scored in text)
    problem = work.problem or "no tokens" * (not n_tokens)
    if not math.isfinite(nats):
        problem = problem or "the loss is not finite"
    if problem:
        return {"loss": None, "bpb": None, "score_problem": problem}
    numbers = {"loss": nats / n_tokens, "bpb": nats / math.log(2) / work.n_bytes}
    if first:
        given, alone = first  # of the same tokens, so the ratio of sums is that of means
        numbers["ifd"] = given.nats / alone.nats if alone.nats > 0 else None
    return numbers


# ---- rewards -------------------------------------------------------------------------------------


class Talks(NamedTuple):
    """A row and the conversations in it to score."""

    row: dict
    talks: list[list[dict]]  # the row's own, or one for each completion; [] for an unfinished one
    problem: str = ""  # why there are none


def write_rewards(
    model: RewardModel,
    tokenizer: Tokenizer,
    source: str,
    out: Path,
    key: str,
    batch_size: int,
    dtype: torch.dtype,
    settings: dict | None = None,
) -> Counter:
    """Write the rows of `source` with their rewards to `out`, which appears when it is whole,
    and the `settings` of the answers beside it; a killed call goes on. Return the problems of
    the rows and completions, counted."""
    paths, settings_of = files_of(source), functools.cache(need_settings)
    talks = (
        Talks(row, [], problem) if problem else talks_of(row, lambda path=path: settings_of(path))
        for path, row, problem in read_rows(paths, records.Report())
    )

    def score(some: list[Talks]) -> list[dict]:
        return list(with_rewards(model, tokenizer, some, batch_size, dtype))

    problems, part = add_scores(talks, score, source, out, key, ROWS * batch_size, "reward_problem")
    if out not in map(Path, paths):
        # Before the rename: old settings must never stand beside new answers.
        answer_files.settings_path(out).unlink(missing_ok=True)
    os.replace(part, out)
    if settings:
        answer_files.write_settings(out, settings)
    return problems


def files_of(source: str) -> list[str]:
    """Return the files of rows in `source`: files, directories or globs. Raise UserError if
    there are none."""
    if "-" in (paths := find_files(source, "score")):
        what = "standard input cannot be scored, for it is read more than once"
        raise UserError(f"reward: {what}; give a file")
    # a directory of answers also holds the settings beside each file
    found = [path for path in paths if not answer_files.is_settings_file(path)]
    if not found:
        what = f"{source} holds the settings of answers only"
        raise UserError(f"reward: {what}; give the file beside them")
    return found


def common_settings(source: str) -> dict | None:
    """Return the settings of the answers in `source` without their reward model; None if there
    are no answers. Raise UserError if two files differ."""
    # What differs was answered by two models, or in two ways: one file of settings beside the
    # scored rows could not describe both.
    known = []
    for path in files_of(source):
        settings = need_settings(path) if answer_files.is_answers(path) else read_settings(path)
        if settings is not None:
            settings = {key: value for key, value in settings.items() if key != "reward_model"}
            known.append((path, settings))
    for path, settings in known[1:]:
        first, others = known[0]
        differ = [key for key in sorted(others | settings) if settings.get(key) != others.get(key)]
        if differ:
            what = f"{first} and {path} were answered with another {differ[0]}"
            raise UserError(f"reward: {what}; score them apart")
    return known[0][1] if known else None


def talks_of(value: object, settings_of: Callable[[], dict]) -> Talks:
    """Return the conversations in a row of a file. settings_of raises UserError where answers
    have no settings."""
    row = value if isinstance(value, dict) else {"row": value}
    row.pop("reward_problem", None)  # from an earlier model
    if "completions" not in row:
        messages, detail = row_formats.messages_of(value)
        problem = f"not understood: {detail}" if detail else turns.chat_problem(messages)
        if not problem and messages[-1]["role"] != "assistant":
            problem = "no answer at the end"
        return Talks(row, [] if problem else [messages], problem)
    # only now: rows without completions need no settings
    settings = settings_of()
    found = row["completions"] if isinstance(row["completions"], list) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in found):
        return Talks(row, [], "not understood: completions without a text")
    # a row of sample.py: its prompt, with each completion as the answer
    try:
        prompt, _ = answer_files.conversation_of(row, settings)
    except BadRow as problem:
        return Talks(row, [], f"not understood: {problem}")
    talks = []
    for one in found:
        answer = {"role": "assistant", "content": answer_files.text_of(one)}
        talks.append([*prompt, answer] if one.get("finish_reason") == "stop" else [])
    return Talks(row, talks)


def with_rewards(
    model: RewardModel, tokenizer: Tokenizer, rows: list[Talks], batch_size: int, dtype: torch.dtype
) -> Iterator[dict]:
    """Yield the rows with their rewards: for each conversation that is finished and fits in the
    block."""
    most = model.cfg.block_size
    # ids of each conversation of each row; [] for an unfinished one
    ids = [[answered_ids(talk, tokenizer) if talk else [] for talk in one.talks] for one in rows]
    fit = [one for of_row in ids for one in of_row if 0 < len(one) <= most]
    rewards = iter(score_ids(model, fit, batch_size, dtype))

    def rewarded(row: dict, ids: list[int]) -> dict:
        row = {key: value for key, value in row.items() if key != "reward_problem"}
        if 0 < len(ids) <= most:
            return row | {"reward": next(rewards)}
        problem = f"too long: {len(ids)} tokens, block_size={most}" if ids else "unfinished answer"
        return row | {"reward": None, "reward_problem": problem}

    for (row, _, problem), of_row in zip(rows, ids, strict=True):
        if problem:
            yield row | {"reward": None, "reward_problem": problem}
        elif "completions" in row:
            yield row | {"completions": list(map(rewarded, row["completions"], of_row))}
        else:
            yield rewarded(row, of_row[0])
