"""Answers to a file of prompts: written as they finish, continued after an interruption.

A line of prompts is {"prompt": text or messages}, {"text": text to continue}, or a row in any
format of groundup/files/row_formats.py, read as in training: what stands before the assistant's
last answer is asked. In a .txt file any other line is plain text; elsewhere it may be a JSON
string. The elements of a JSON array and the rows of a CSV or TSV file are read like lines. The
answer is the same line with its number (from 0) as "index" and with "completions" (format:
groundup/files/answer_files.py).
"""

import contextlib
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from groundup.errors import UserError, counted, json_fault, naming, one_line
from groundup.files import records, streams
from groundup.files.answer_files import check_settings, continued_text, conversation_of
from groundup.files.disk import lock
from groundup.files.encodings import Decoder
from groundup.files.paths import check_replaceable
from groundup.files.row_formats import recognise
from groundup.files.streams import Record
from groundup.files.turns import BadRow
from groundup.files.untrusted import loads, mended
from groundup.generate.engine import Engine, Result
from groundup.generate.sampling import SamplingParams
from groundup.tokens.templates import opened_thoughts
from tokenizer import Tokenizer

CELL = 40  # places on a line for a cell of the table; a longer text takes more
SHOWN = 3  # of the prompts that cannot be answered, the others are counted
LONGEST = 60  # places of a question or expected answer; a longer one is cut
CONTROL = re.compile("[\x7f-\x9f]")  # what JSON leaves alone
# What an answer has beside the fields of its prompt
OWN_KEYS = ("index", "completions", "prompt_logprobs")

# (prompt, whether it is a text to continue) -> ids
Encode = Callable[[str | list[dict], bool], list[int]]
# (result, what was asked) -> the best completions, each with its reward
Rank = Callable[[Result, str | list[dict]], Result]
# Engine.answer, or another way
Draw = Callable[[Iterator[list[int]], SamplingParams], Iterator[tuple[int, Result]]]


class Answers:
    """The answers in `out` ("" = standard output) to a file of prompts or, if `prompts` is "", to
    `prompt`.

    Raise UserError if the prompts cannot be read, or if `out` is damaged or has other prompts or
    settings."""

    def __init__(self, prompts: str, prompt: str, out: str, settings: dict) -> None:
        self.name, self.out, self.settings = prompts or "prompt", out, settings
        self.lines = {0: Record(json_line({"prompt": prompt}), 1, 0)}
        if prompts:
            self.lines = read_prompts(prompts)
        if not self.lines:
            raise UserError(f"sample: {self.name} has no prompts")
        self.problems = 0  # prompts that cannot be answered
        self.n_cut = 0  # prompts with an answer that the model's context ended
        self.done: set[int] = set()
        if out:
            check_replaceable(Path(out))  # its settings go beside it
            check_settings(out, settings)
            self.done = self._read_done()

    def write(
        self,
        engine: Engine,
        params: SamplingParams,
        encode: Encode,
        rank: Rank | None = None,
        draw: Draw | None = None,
    ) -> None:
        """Append the answer to each prompt as it finishes: a kill loses only the unfinished ones.
        Without `out`, and without log-probabilities, print them for people, see Table."""
        # line number, fields and question of each prompt given to the engine
        begun: list[tuple[int, dict, str | list[dict]]] = []
        context = engine.model.cfg.block_size
        prompts = self._prompts(encode, context, begun)
        for_people = not self.out and params.logprobs < 0 and params.prompt_logprobs < 0
        table = Table(self.settings) if for_people else None
        bar = tqdm(total=len(self.lines), initial=len(self.done), disable=None, unit="prompt")
        with self._output() as file, bar:
            # They come in the order of finishing, so a table waits for those before.
            for number, result in (draw or engine.answer)(prompts, params):
                index, fields, asked = begun[number]
                reasons = [completion.finish_reason for completion in result.completions]
                self.n_cut += context_ended(len(result.prompt_ids), reasons, params, context)
                result = rank(result, asked) if rank else result
                if not isinstance(asked, str):  # no text to continue
                    result = with_opened_thoughts(result, engine.tokenizer)
                if table:
                    texts = [completion.text for completion in result.completions]
                    file.write(table.add(number, fields, asked, texts))
                else:
                    answer = answer_fields(result, engine.tokenizer, params, bool(rank))
                    file.write(json_line({"index": index} | fields | answer))
                file.flush()
                bar.update()
            if table:
                file.write(table.summary())
        if self.problems and len(self.lines) > 1:
            what = f"{self.problems} of {len(self.lines)} prompts are not answered"
            above = f"the first {SHOWN} are" if self.problems > SHOWN else "see"
            print(f"sample: {what}, {above} above", file=sys.stderr)
        if self.n_cut:
            what = f"the answers to {self.n_cut} of {counted(len(self.lines), 'prompt')}"
            print(f"sample: {context_ended_words(context, what)}", file=sys.stderr)

    @contextlib.contextmanager
    def _output(self) -> Iterator:
        """Open `out`, locked against other processes."""
        if not self.out:
            sys.stdout.reconfigure(encoding="utf-8")  # JSON, whatever the terminal has
            yield sys.stdout
            return
        with naming(self.out), open(self.out, "a", encoding="utf-8") as file:
            try:
                lock(file)
            except BlockingIOError:
                what = f"another process is writing {self.out}; wait, or use another out"
                raise UserError(f"sample: {what}") from None
            yield file

    def _prompts(self, encode: Encode, context: int, begun: list) -> Iterator[list[int]]:
        """Yield the ids of the prompts that are not done; add their lines to `begun`.

        Count those that cannot be answered, and print the first."""
        for index, line in self.lines.items():
            if index in self.done:
                continue
            try:
                fields = parse(line)
                asked = asked_of(fields, self.settings)
                ids = encode(asked, isinstance(asked, str))
                if len(ids) > context:
                    what = f"the prompt has {len(ids)} tokens, the context {context}; shorten it"
                    raise ValueError(what)
            except ValueError as error:
                self.problems += 1
                if self.problems <= SHOWN:
                    tqdm.write(f"{self.name}:{index + 1}: {error}", file=sys.stderr)
            else:
                begun.append((index, fields, asked))
                yield ids

    def _read_done(self) -> set[int]:
        """Return the lines that `out` answers. Raise UserError for other prompts."""
        done: set[int] = set()
        if not os.path.exists(self.out):
            return done
        with open(self.out, "r+b") as f:
            # A whole file ends with a line break: half is then empty.
            *lines, half = f.read().split(b"\n")
            f.truncate(f.tell() - len(half))  # a kill may have left half a line
        # An answer repeats its prompt, which must be that of the same line.
        for number, line in enumerate(lines, 1):
            try:
                fields = loads(line)
                index = int(fields["index"])
                asked = {k: v for k, v in fields.items() if k not in OWN_KEYS}
            except (ValueError, TypeError, KeyError, AttributeError):
                what = f"{self.out}:{number} is damaged; remove that line"
                raise UserError(f"sample: {what}") from None
            # A line that the prompts lack, or cannot be read, is another prompt.
            with contextlib.suppress(KeyError, ValueError):
                if json_line(asked) == json_line(parse(self.lines[index])):
                    done.add(index)
                    continue
            what = f"answers a prompt that is not in line {index + 1} of {self.name}"
            raise UserError(f"sample: {self.out} {what}; use another out")
        return done


class Table:
    """Answers for people, in the order of the prompts: question, answer, and between them what the
    data set expects, if it says so. Answers are right or wrong where the expected one is shown
    whole: a model seldom writes a long one word by word."""

    def __init__(self, settings: dict) -> None:
        self.settings = settings
        self.n_printed = 0
        # Lines by number of the prompt, and whether they are rows, until those before come
        self.waiting: dict[int, tuple[list[str], bool]] = {}
        self.has_header = False
        self.n_expected, self.n_right, self.n_long = 0, 0, 0

    def add(self, number: int, fields: dict, asked: str | list[dict], texts: list[str]) -> str:
        """Take the answers to prompt `number`; return the lines that can be printed now."""
        # Of several answers the first is compared with what the data set expects.
        question = asked if isinstance(asked, str) else asked[-1]["content"]
        expected = ""
        with contextlib.suppress(BadRow):  # a text to continue
            expected = conversation_of(fields, self.settings)[1]
        right = texts[0].strip() == expected.strip()
        is_short = 0 < width_of(one_line(expected)) <= LONGEST
        self.n_expected += is_short
        self.n_right += is_short and right
        self.n_long += bool(expected) and not is_short
        if expected:
            verdict = ("right" if right else "wrong") if is_short else ""
            verdicts = [verdict, *[""] * (len(texts) - 1)]
            question, expected = shortened(question), shortened(expected)
            cells = zip(texts, verdicts, strict=True)
            lines = [row(question, expected, *pair) for pair in cells]
        else:
            lines = [f"{one_line(question)}  ->  {one_line(text)}" for text in texts]
        self.waiting[number] = lines, bool(expected)

        # The line is printed once all prompts before it are.
        found = []
        while self.n_printed in self.waiting:
            lines, are_rows = self.waiting.pop(self.n_printed)
            if are_rows and not self.has_header:
                found.append(row("question", "expected", "answer", ""))
                self.has_header = True
            found += lines
            self.n_printed += 1
        return "".join(f"{line}\n" for line in found)

    def summary(self) -> str:
        if not self.n_expected:
            return ""
        what = f"{self.n_right} of {self.n_expected} answers are the expected ones"
        if self.n_long:
            what += f" ({self.n_long} {'is' if self.n_long == 1 else 'are'} too long to compare)"
        return f"{what}\n"


def row(*cells: str) -> str:
    """Return cells of a table beside each other."""
    # Empty cells at the end are left out.
    padded = [cell + " " * (CELL - width_of(cell)) for cell in map(one_line, cells)]
    while padded and not padded[-1].strip():
        padded.pop()
    return " | ".join(padded).rstrip()


def width_of(text: str) -> int:
    """Return the places of a text on a terminal: two for a Chinese character."""
    # East Asian width (Unicode annex 11): W = wide, F = fullwidth
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def shortened(text: str) -> str:
    """Return a text on one line, cut to LONGEST places."""
    text = one_line(text)[: LONGEST + 1]
    if width_of(text) <= LONGEST:
        return text
    # Room for the dots
    while width_of(text) > LONGEST - 3:
        text = text[:-1]
    return text + "..."


def context_ended(
    n_prompt_ids: int, finish_reasons: list[str], params: SamplingParams, context: int
) -> bool:
    """Return whether the model's context, and not max_new_tokens, ended an answer to a prompt."""
    # the last token of an answer is not read
    has_room = n_prompt_ids + params.max_new_tokens <= context + 1
    return "length" in finish_reasons and not has_room


def context_ended_words(context: int, what: str) -> str:
    """Return the message for a person. what: was ended."""
    longer = f"for longer ones train with --block_size={4 * context} and a smaller --batch_size"
    return f"the model's context of {context} tokens ended {what}; {longer}"


def read_prompts(path: str) -> dict[int, Record]:
    """Return {number from 0: decoded line} of the lines that are not blank. Raise UserError.

    The file is read as prepare.py reads it: packed or not, in UTF-8, GBK or UTF-16. In a .txt file
    a line of plain text becomes JSON, and so does an element of an array or a row of a table."""
    with streams.open_stream(path) as stream:
        kind = records.container(path, stream.peek(), "line")
        if kind in ("json", "csv", "tsv"):
            found = dict(enumerate(records.records_of(stream, kind, 0, None, ())))
            for row in found.values():
                row.value = json_line(row.value)
        else:
            # Numbers are those of the file, blank lines included.
            lines = records.decoded(records.read_lines(stream), Decoder(stream.raw.verdict))
            found = {line.line - 1: line for line in lines if line.problem or line.value.strip()}
        if stream.raw.damage:
            raise UserError(f"sample: cannot read {path}: {stream.raw.damage[1]}")
    for line in found.values():
        if records.suffix_of(path) == ".txt" and not line.problem and not is_row(line.value):
            line.value = json_line({"prompt": line.value.strip()})
    return found


def is_row(text: str) -> bool:
    """Return whether a line is an object in JSON that holds a prompt. Others are prompts."""
    try:
        fields = loads(text)
    except ValueError:
        return False
    if not isinstance(fields, dict):
        return False
    kinds = ("question", "chat", "preference")
    return "text" in fields or any(recognise(fields, kind) for kind in kinds)


def parse(line: Record) -> dict:
    """Return the fields of a line of prompts. Raise ValueError with what is wrong."""
    if line.problem:
        raise ValueError(line.detail)
    try:
        row = loads(line.value)
    except ValueError as error:
        how = 'write "a prompt" or {"prompt": "..."} in each line, or plain text in a .txt'
        raise ValueError(f"not JSON: {json_fault(error)}; {how}") from None
    row = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a text or an object, got {row!r:.40}")
    if taken := [own for own in OWN_KEYS if own in row]:
        raise ValueError(f"the key {taken[0]!r} is the answer's; rename it")
    return row


def asked_of(fields: dict, settings: dict) -> str | list[dict]:
    """Return the text to continue or the messages to answer. Raise ValueError for a bad row."""
    fields = mended(fields)
    try:
        text = continued_text(fields, settings.get("chat", True))
        return conversation_of(fields, settings)[0] if text is None else text
    except BadRow as problem:
        words, known = problem.detail or problem.reason, "; give prompt, messages or text; a chat"
        raise ValueError(words.replace("; chat is known", f"{known} is known")) from None


def json_line(value: object) -> str:
    """Return one line of JSON that UTF-8 can encode."""
    # Half a surrogate pair keeps its escape; a control character that a terminal obeys gets one.
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def with_opened_thoughts(result: Result, tokenizer: Tokenizer) -> Result:
    """Return the answers with the <think> that their prompt has opened, if it has."""
    begin = opened_thoughts(tokenizer.decode(result.prompt_ids))
    whole = [found._replace(text=begin + found.text) for found in result.completions]
    return result._replace(completions=whole)


def answer_fields(
    result: Result, tokenizer: Tokenizer, params: SamplingParams, rewarded: bool
) -> dict:
    fields: dict = {"completions": []}
    for found in result.completions:
        # Ids and probabilities are long: only where they were asked for.
        keys = "text", "finish_reason", "stop_reason", *["reward"] * rewarded
        if params.logprobs >= 0:
            keys += "ids", "cumulative_logprob"
        completion = {key: getattr(found, key) for key in keys}
        if params.logprobs >= 0:
            completion["logprobs"] = named(found.logprobs, tokenizer)
        fields["completions"].append(completion)
    if params.prompt_logprobs >= 0:
        fields["prompt_logprobs"] = named(result.prompt_logprobs, tokenizer)
    return fields


def named(
    positions: list[dict[int, float] | None], tokenizer: Tokenizer
) -> list[list[dict] | None]:
    """Return log-probabilities with the texts of tokens, "" for ids beyond the tokenizer's."""

    def entry(i: int, logprob: float) -> dict:
        text = tokenizer.pieces.get(i, b"").decode("utf-8", "replace")
        return {"id": i, "token": text, "logprob": logprob}

    return [found and [entry(*pair) for pair in found.items()] for found in positions]
