"""Answers to a file of prompts: read line by line, written as they finish, continued where they were interrupted.

A line of prompts is {"prompt": text or messages}, {"messages": [...]}, {"text": text to continue} or just a text. Its
answer is the line itself with its number (from 0) as "index" and with "completions" (answer_files.py has the format).
Messages that end with the assistant's answer are answered from what precedes it; the line keeps its own answer.
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
from groundup.generate.engine import Result, completed
from groundup.generate.sampling import SamplingParams
from model import Transformer
from tokenizer import Tokenizer

OWN_KEYS = ("index", "completions", "prompt_logprobs")  # what an answer has beside the fields of its prompt

Encode = Callable[[str | list[dict], bool], list[int]]  # a prompt, whether it is a text to continue -> ids
Rank = Callable[[Result], Result]  # gives each completion a reward, and leaves the best


def lock(file: TextIO) -> None:
    """Raise SampleError if another process writes the same answers; held until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"sample: another process is writing {file.name}; wait for it, or use another out") from None


class Row(NamedTuple):
    index: int
    fields: dict
    ids: list[int]


class Answers:
    """The answers in `out` ("" = standard output) to a file of prompts, or, if `prompts` is "", to `prompt`.

    Raises SampleError: prompts cannot be read; `out` is damaged, or answers other prompts. Raises AnswerFileError: it
    has other settings.
    """

    def __init__(self, prompts: str, prompt: str, out: str, settings: dict) -> None:
        self.prompts, self.prompt, self.out = prompts, prompt, out
        self.name = prompts or "prompt"
        self.problems = 0  # prompts that cannot be answered
        if next(self._lines(), None) is None:
            raise UserError(f"sample: {self.name} has no prompts")
        if out:
            check_settings(out, settings)
        self.done = finished(out) if out else {}
        self.n_prompts = self._count()

    def write(
        self, model: Transformer, tokenizer: Tokenizer, params: SamplingParams, encode: Encode, batch_size: int,
        compile: bool, rank: Rank | None = None,
    ) -> None:  # fmt: skip
        """Append a line for each prompt as it is finished, so that a kill costs those in the batch."""
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
            for number, result in completed(model, tokenizer, prompts(), params, batch_size, compile):
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
        """The number of prompts. Raises SampleError if `done` answers others."""
        n_prompts, same = 0, set()
        for index, line in enumerate(self._lines()):
            n_prompts += bool(line.strip())
            if index in self.done:
                with contextlib.suppress(ValueError):
                    if json_line(parse(line)[0]) == self.done[index]:
                        same.add(index)
        for index in sorted(self.done.keys() - same):
            raise UserError(
                f"sample: {self.out} answers a prompt that is not in line {index + 1} of {self.name}; use another out"
            )
        return n_prompts

    def _rows(self, encode: Encode, context: int) -> Iterator[Row]:
        """The prompts that are not done. What is wrong with others is printed and counted."""
        for index, line in enumerate(self._lines()):
            if not line.strip() or index in self.done:
                continue
            try:
                fields, key = parse(line)
                ids = encode(fields[key], key == "text")
                if len(ids) > context:
                    raise ValueError(f"the prompt has {len(ids)} tokens, the context {context}; shorten it")
            except (ValueError, RecursionError) as error:
                self.problems += 1
                tqdm.write(f"{self.name}:{index + 1}: {error}", file=sys.stderr)
            else:
                yield Row(index, fields, ids)


def parse(line: bytes) -> tuple[dict, str]:
    """(fields of a line, which of them is the prompt). Raises ValueError, which says what is wrong."""
    row = json.loads(line)
    row = {"prompt": row} if isinstance(row, str) else row
    kinds = {"messages": list, "prompt": (str, list), "text": str}
    key = next((key for key in kinds if isinstance(row, dict) and key in row), "")
    if not key:
        raise ValueError("a line must be a text, or an object with prompt, messages or text")
    if not isinstance(row[key], kinds[key]):
        raise ValueError(f"{key} must be a {'list' if key == 'messages' else 'text'}, got {row[key]!r:.40}")
    taken = [own for own in OWN_KEYS if own in row]
    if taken:
        raise ValueError(f"the key {taken[0]!r} is the answer's; rename it")
    return row, key


def json_line(value: dict) -> str:
    """JSON in one line that UTF-8 can write: half a surrogate pair, which it cannot, keeps its escape."""
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
    """Log-probabilities with the texts of their tokens; ids that the model has beyond the tokenizer have none."""
    text = {i: tokenizer.pieces.get(i, b"").decode("utf-8", "replace") for found in positions for i in found or ()}
    return [found and [{"id": i, "token": text[i], "logprob": found[i]} for i in found] for found in positions]


# ---- the file of answers --------------------------------------------------------------------------------------------


def finished(out: str) -> dict[int, str]:
    """{index: the fields that it answers, as a JSON line} of a file of answers; a last line cut short is removed."""
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
