"""Tools that a model may call: the functions of a Python file, run in a process that can be ended.

    tools = Tools("calculator.py")
    messages = tools.shown(messages)               # the schemas, where the template shows them
    turn = tools.answer(tokenizer, messages, ids, room)  # runs what a drawn turn calls
    ids += turn.ids                                      # and the model writes on

A conversation with tools grows by ids, and the ids of a turn that was drawn are never made anew
from its text: the tokenizer may cut the text in another way, and training would then learn tokens
that were not drawn. Results and whatever the template writes around them are appended.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from groundup.errors import UserError
from groundup.files.turns import call_text, with_system
from groundup.files.untrusted import scrub
from groundup.generate.call_forms import THINK, THINK_END, divide_calls, divide_thoughts
from groundup.generate.completion import asked_messages
from groundup.generate.engine import Engine, Request, Result
from groundup.generate.rendering import LineProcess, tool_ids
from groundup.generate.sampling import SamplingParams
from groundup.tokens.templates import CALL_ID
from tokenizer import Tokenizer

SECONDS = 5.0  # for a call
MAX_CALLS = 8  # in one turn; more are refused
MAX_TURNS = 6  # of an answer, the last one included


class ToolTurn(NamedTuple):
    """A turn that called tools, and what they said."""

    messages: list[dict]  # the turn itself and one message of each tool
    # That the template writes behind the drawn ones; [] = it refuses such a turn, or there is no
    # room for them and another turn
    ids: list[int]
    n_calls: int
    n_failed: int


class Tools:
    """The functions, in a process that is started again after it had to be ended.

    schemas: of the functions, in OpenAI's form, [] if prompts do not show them. Raise UserError for
    a file that offers none."""

    def __init__(self, path: str, seconds: float = SECONDS) -> None:
        if not path.endswith(".py") or not Path(path).is_file():
            raise UserError(f"config: tools={path!r}: there is no such Python file")
        # The process also ends itself, a second later, should this one be killed.
        self.seconds, limit = seconds, str(math.ceil(seconds) + 1)
        self.process = LineProcess("groundup.generate.tool_process", path, limit, seconds=seconds)
        found = self.process.start()
        if isinstance(found, str) or not found[0]:
            problem = found if isinstance(found, str) else "it defines no function"
            raise UserError(f"config: tools={path!r}: {problem}")
        self.schemas = found[0] if found[1] else []

    def run(self, calls: Sequence[dict]) -> tuple[list[dict], int]:
        """Return the messages of the tools, in order, and how many calls failed."""
        messages, n_failed = [], 0
        # A tool that fails says so to the model, which may try again.
        for number, one in enumerate(calls):
            if number < MAX_CALLS:
                found = self.process.ask({"name": one["name"], "arguments": one["arguments"]})
                text = f"Error: it took more than {self.seconds:g} s, or too much memory"
            else:
                found, text = None, f"Error: at most {MAX_CALLS} calls at a time"
            found = found or {"text": text, "failed": True}
            messages.append({"role": "tool", "content": scrub(found["text"])})
            n_failed += found["failed"]
        return messages, n_failed

    def answer(
        self,
        tokenizer: Tokenizer,
        messages: list[dict],
        ids: Sequence[int],
        room: int,
        follow: Callable[[list[dict]], list[int]] | None = None,
    ) -> ToolTurn | None:
        """Run what a turn calls; None if it calls nothing.

        messages: before the turn. ids: of the turn as drawn, without the one that ended it. room:
        tokens that may follow the turn. follow: `tool_ids` of the tokenizer, or what does the same
        in another process."""
        # The text is for the template; the ids stay as they were drawn.
        content, calls = read_calls(tokenizer, ids)
        if not calls:
            return None
        results, n_failed = self.run(calls)
        turns = [{"role": "assistant", "content": content}, *results]
        # Mistral's calls have ids, and the result of each has the same.
        ids_of_calls = [one.get("id", "") for one in calls]
        if any(ids_of_calls):
            turns[0]["tool_call_ids"] = ids_of_calls
            for result, call_id in zip(results, ids_of_calls, strict=True):
                result["tool_call_id"] = call_id
        try:
            new = (follow or partial(tool_ids, tokenizer))([*messages, *turns])
        except UserError:  # Llama 3.1's template refuses two calls in a turn
            new = []
        return ToolTurn(turns, new if len(new) < room else [], len(calls), n_failed)

    def go_on(
        self,
        engine: Engine,
        request: Request,
        ids: list[int],
        messages: list[dict],
        choice: int = 0,
        begun: Sequence[int] = (),
        follow: Callable[[list[dict]], list[int]] | None = None,
    ) -> tuple[ToolTurn, Request] | None:
        """Run what the answer to a request calls. Return the turn and the request for the next one;
        None if the answer calls nothing, or another turn has no room.

        ids: of the answer, with the one that ended it. begun: those of it that were in the prompt.
        messages, follow: see `answer`. choice: number among the answers to the prompt."""
        # All turns share the first one's limit.
        room = request.limit - len(ids)
        turn = self.answer(engine.tokenizer, messages, [*begun, *ids[:-1]], room, follow)
        if not turn or not turn.ids:
            return None
        # Choices may have called the same, so each goes on with a seed of its own.
        seed = (request.params.seed + choice) % 2**63
        own = {"max_new_tokens": room - len(turn.ids), "min_new_tokens": 0, "n": 1, "seed": seed}
        params = replace(request.params, **own)
        return turn, engine.request(request.index, request.ids + ids + turn.ids, params)

    def shown(self, messages: list[dict]) -> list[dict]:
        """Return the messages with the schemas in the first."""
        return with_system(messages, {"tools": self.schemas})

    def close(self) -> None:
        """End the process, also in the middle of a call."""
        self.process.end()


class ToolAnswers:
    """`encode` and `draw` of answers.py for conversations whose answers may call tools."""

    def __init__(self, tools: Tools, engine: Engine, system: str) -> None:
        self.tools, self.engine, self.system = tools, engine, system
        self.talks: dict[tuple[int, ...], list[dict]] = {}  # messages of each prompt

    def encode(self, asked: str | list[dict], _plain: bool = False) -> list[int]:
        messages = self.tools.shown(asked_messages(self.system, asked))
        ids, _ = self.engine.tokenizer.render(messages, add_generation_prompt=True)
        self.talks[tuple(ids)] = messages
        return ids

    def draw(
        self, prompts: Iterable[list[int]], params: SamplingParams
    ) -> Iterator[tuple[int, Result]]:
        """Yield (index of the prompt, Result with the last turn of its answer).

        An answer that calls a tool waits until the others have ended."""
        # Each round runs all answers to their end, then the tools of those that called.
        waiting = (self.engine.request(i, ids, params) for i, ids in enumerate(prompts))
        talks: dict[int, list[dict]] = {}  # of each answer that called, its messages so far
        for _ in range(MAX_TURNS - 1):
            called = []
            for request in self.engine.finish(waiting):
                talk = talks.get(request.index) or self.talks[tuple(request.ids)]
                (found,), goes_on = request.completions.values(), None
                if found.stop_reason in params.stop_ids:  # not cut by its limit
                    goes_on = self.tools.go_on(self.engine, request, found.ids, talk)
                if not goes_on:
                    yield request.index, request.result()
                    continue
                turn, following = goes_on
                talks[request.index] = talk + turn.messages
                called.append(following)
            waiting = called
        for request in self.engine.finish(waiting):
            yield request.index, request.result()


def read_calls(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[dict]]:
    """Return the text of an answer and its calls [{"name", "arguments"}, ...], [] = none.

    ids: as drawn, without the one that ended it. The text is as our own models write calls. A call
    has an "id" if the model wrote one as Mistral's do."""
    # Rows that pad the vocabulary may be drawn, and have no text.
    text = tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])
    # The template may have begun the thoughts; what is thought about is not called
    opened = THINK in tokenizer.template_source and THINK_END in text
    _, rest = divide_thoughts(text, opened, last=True)
    said, found = divide_calls(rest, last=True)
    calls = []
    for one in found:
        function = one["function"]
        call = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        calls.append(call | ({"id": one["id"]} if CALL_ID.fullmatch(one["id"]) else {}))
    # What was said and each call, a line each, as in training data
    written = [said] * bool(said) + [call_text(call) for call in calls]
    return text.removesuffix(rest) + "\n".join(written), calls


def check_template(tokenizer: Tokenizer, tools: Tools) -> None:
    """Raise UserError if the chat template does not write calls and results of tools."""
    call = call_text({"name": "f", "arguments": {}})
    # A short conversation shows whether a call can be read, and a result comes back.
    asked = tools.shown([{"role": "user", "content": "a"}])
    talk = [*asked, {"role": "assistant", "content": call}]
    ids, mask = tokenizer.render(talk)
    drawn = [i for i, is_drawn in zip(ids, mask, strict=True) if is_drawn]
    text = tokenizer.decode([i for i in drawn if i not in tokenizer.stop_ids])
    if not divide_calls(text, last=True)[1]:
        raise UserError("tools: the chat template writes calls in a form that is not read")
    talk.append({"role": "tool", "content": "7 swans"})
    if "7 swans" not in tokenizer.decode(tool_ids(tokenizer, talk)):
        raise UserError("tools: the chat template does not write the results of tools")
