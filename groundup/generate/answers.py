"""Answers to a file of prompts: read line by line, written as they finish, continued after an interruption.

A line of prompts is {"prompt": text or messages}, {"messages": [...]}, {"text": text to continue} or a JSON string. Its
answer is the same line with its number (from 0) as "index" and with "completions" (format: files/answer_files.py).
If messages end with an assistant's answer, the model answers what precedes it; the line keeps its own answer.
"""

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, TextIO

from tqdm import tqdm

from groundup.errors import UserError
from groundup.files.answer_files import check_settings
from groundup.generate.completion import Result
from groundup.generate.engine import generate_each
from groundup.generate.sampling import SamplingParams
from model import Transformer
from tokenizer import Tokenizer

OWN_KEYS = ("index", "completions", "prompt_logprobs")  # what an answer has beside the fields of its prompt

Encode = Callable[[str | list[dict], bool], list[int]]  # (prompt, whether it is a text to continue) -> ids
Rank = Callable[[Result], Result]  # gives each completion a reward, and keeps the best ones


def lock(file: TextIO) -> None:
    """Lock the file until it is closed. Raise UserError if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"sample: another process is writing {file.name}; wait for it, or use another out") from None


class Row(NamedTuple):
    index: int  # of the line, from 0
    fields: dict
    ids: list[int]  # of the prompt


class Answers:
    """The answers in `out` ("" = standard output) to a file of prompts or, if `prompts` is "", to `prompt`.

    Raise UserError if the prompts cannot be read, or if `out` is damaged or has other prompts or settings.
    """

    def __init__(self, prompts: str, prompt: str, out: str, settings: dict) -> None:
        self.prompts, self.prompt, self.out = prompts, prompt, out
        self.name = prompts or "prompt"
        self.problems = 0  # prompts that cannot be answered
        if next(self._lines(), None) is None:
            raise UserError(f"sample: {self.name} has no prompts")
        if out:
            check_settings(out, settings)
        self.done = read_done(out) if out else {}
        self.n_prompts = self._count()

    def write(
        self, model: Transformer, tokenizer: Tokenizer, params: SamplingParams, encode: Encode, batch_size: int,
        compile: bool, rank: Rank | None = None,
    ) -> None:  # fmt: skip
        """Append the answer to each prompt as it finishes: a kill loses only the unfinished ones."""
        begun: dict[int, Row] = {}

        def prompts() -> Iterator[list[int]]:
            for number, row in enumerate(self._rows(encode, model.cfg.block_size)):
                begun[number] = row
                yield row.ids

        output = open(self.out, "a", encoding="utf-8") if self.out else contextlib.nullcontext(sys.stdout)
        if self.out:
            lock(output)
        bar = tqdm(total=self.n_prompts, initial=len(self.done), disable=None, unit="prompt")
        with output as file, bar:
            for number, result in generate_each(model, tokenizer, prompts(), params, batch_size, compile):
                row = begun.pop(number)
                result = rank(result) if rank else result
                fields = {"index": row.index} | row.fields | answer_fields(result, tokenizer, params, bool(rank))
                file.write(json_line(fields))
                file.flush()
                bar.update()
        if self.problems and self.prompts:
            print(f"sample: {self.problems} of {self.n_prompts} prompts are not answered, see above", file=sys.stderr)

    def _lines(self) -> Iterator[bytes]:
        if not self.prompts:
            yield json_line({"prompt": self.prompt}).encode()
            return
        try:
            with open(self.prompts, "rb") as f:
                yield from f
        except OSError as error:
            raise UserError(f"sample: cannot read {self.prompts!r}: {error.strerror}") from None

    def _count(self) -> int:
        """Return the number of prompts. Raise UserError if `done` answers others."""
        n_prompts, same = 0, set()
        for index, line in enumerate(self._lines()):
            n_prompts += bool(line.strip())
            if index in self.done:
                with contextlib.suppress(ValueError):
                    if json_line(parse(line)) == self.done[index]:
                        same.add(index)
        for index in sorted(self.done.keys() - same):
            raise UserError(
                f"sample: {self.out} answers a prompt that is not in line {index + 1} of {self.name}; use another out"
            )
        return n_prompts

    def _rows(self, encode: Encode, context: int) -> Iterator[Row]:
        """Yield the prompts that are not done; print and count those that cannot be answered."""
        for index, line in enumerate(self._lines()):
            if not line.strip() or index in self.done:
                continue
            try:
                fields = parse(line)
                key = prompt_key(fields)
                ids = encode(fields[key], key == "text")
                if len(ids) > context:
                    raise ValueError(f"the prompt has {len(ids)} tokens, the context {context}; shorten it")
            except (ValueError, RecursionError) as error:
                self.problems += 1
                tqdm.write(f"{self.name}:{index + 1}: {error}", file=sys.stderr)
            else:
                yield Row(index, fields, ids)


def parse(line: bytes) -> dict:
    """Return the fields of a line of prompts. Raise ValueError, which says what is wrong with them."""
    row = json.loads(line)
    row = {"prompt": row} if isinstance(row, str) else row
    prompt_key(row)
    taken = [own for own in OWN_KEYS if own in row]
    if taken:
        raise ValueError(f"the key {taken[0]!r} is the answer's; rename it")
    return row


def prompt_key(row: object) -> str:
    """Return which field is the prompt. Raise ValueError if there is none, or if it is of the wrong type."""
    types = {"messages": list, "prompt": (str, list), "text": str}
    key = next((key for key in types if isinstance(row, dict) and key in row), "")
    if not key:
        raise ValueError("a line must be a text, or an object with prompt, messages or text")
    if not isinstance(row[key], types[key]):
        raise ValueError(f"{key} must be a {'list' if key == 'messages' else 'text'}, got {row[key]!r:.40}")
    return key


def json_line(value: dict) -> str:
    """Return one line of JSON that UTF-8 can encode: half a surrogate pair keeps its escape."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def answer_fields(result: Result, tokenizer: Tokenizer, params: SamplingParams, rewarded: bool) -> dict:
    completions = []
    for found in result.completions:
        fields = {"text": found.text, "finish_reason": found.finish_reason, "stop_reason": found.stop_reason}
        if rewarded:
            fields["reward"] = found.reward
        if params.logprobs >= 0:
            fields |= {"ids": found.ids, "cumulative_logprob": found.cumulative_logprob}
            fields["logprobs"] = named(found.logprobs, tokenizer)
        completions.append(fields)
    if params.prompt_logprobs < 0:
        return {"completions": completions}
    return {"completions": completions, "prompt_logprobs": named(result.prompt_logprobs, tokenizer)}


def named(positions: list[dict[int, float] | None], tokenizer: Tokenizer) -> list[list[dict] | None]:
    """Return log-probabilities with the texts of their tokens, "" for ids beyond the tokenizer's."""
    text = {i: tokenizer.pieces.get(i, b"").decode("utf-8", "replace") for found in positions for i in found or ()}
    return [found and [{"id": i, "token": text[i], "logprob": found[i]} for i in found] for found in positions]


def read_done(out: str) -> dict[int, str]:
    """Return {index: the fields of the prompt as a JSON line} of a file of answers; cut off a half line at its end."""
    done: dict[int, str] = {}
    if not os.path.exists(out):
        return done
    with open(out, "r+b") as f:
        size = 0
        for number, line in enumerate(f, 1):
            if not line.endswith(b"\n"):
                f.truncate(size)
                break
            size += len(line)
            try:
                fields = json.loads(line)
                done[fields["index"]] = json_line({k: v for k, v in fields.items() if k not in OWN_KEYS})
            except (ValueError, TypeError, KeyError, AttributeError):
                raise UserError(f"sample: {out}:{number} is damaged; remove that line") from None
    return done
