"""A chat in the terminal: streamed answers, commands, Ctrl-C, and a history that fits the context.

On a terminal a message is a line, or several pasted at once; otherwise standard input is read line by line, so that a
chat can be scripted. Answers go to standard output, everything else to standard error.
"""

import contextlib
import dataclasses
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from typing import NamedTuple

from groundup.errors import UserError
from groundup.generate.engine import Session
from groundup.generate.sampling import SamplingParams
from model import Transformer
from tokenizer import Tokenizer

HISTORY_FILE = "~/.groundup_history"
HELP = """\
/regen        another answer to the last message
/reset        forget the conversation
/system TEXT  set the system message; without TEXT there is none
/temp X       set the temperature; 0 = always the likeliest token
/exit         leave, as Ctrl-D does; Ctrl-C stops an answer"""


class Turn(NamedTuple):
    question: list[int]  # ids from the user's <|im_start|> to the beginning of the answer
    answer: list[int]  # without the token that ended it


class Chat:
    """A conversation as token ids. Answers are kept as generated, so that the session's cache stays valid."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, params: SamplingParams, system: str = "", compile: bool = False
    ) -> None:
        """Raise UserError for parameters that make no sense in a chat."""
        for key in ("n", "num_beams", "best_of"):
            if getattr(params, key) > 1:
                raise UserError(f"sample: a chat has one answer at a time, got {key}={getattr(params, key)}")
        self.tokenizer, self.params, self.system = tokenizer, params, system
        self.context = model.cfg.block_size
        self.session = Session(model, tokenizer, compile)
        self.turns: list[Turn] = []
        self.n_answers = 0  # answer i draws from seed + i
        self.dropped = 0  # turns that did not fit before the last answer

    def ask(self, message: str) -> Iterator[str]:
        """Yield the answer in pieces. If it is closed early, what was said so far stays in the history."""
        ids, _ = self.tokenizer.render([{"role": "user", "content": message}], add_generation_prompt=True)
        return self._answer(ids)

    def ask_again(self) -> Iterator[str]:
        """Yield another answer to the last message, which replaces the last one."""
        if not self.turns:
            raise UserError("chat: there is no message to answer again")
        last = self.turns.pop()
        try:
            yield from self._answer(last.question)
        except UserError:
            self.turns.append(last)
            raise

    def _answer(self, question: list[int]) -> Iterator[str]:
        prompt = self._fitted(question)
        seed = (self.params.seed + self.n_answers) % 2**63
        self.n_answers += 1
        ids, texts = [], []
        try:
            for token in self.session.stream(prompt, dataclasses.replace(self.params, seed=seed)):
                ids.append(token.id)
                texts.append(token.text)
                yield token.text
        finally:
            if ids:
                self.turns.append(Turn(question, self._said(ids, "".join(texts))))

    def _fitted(self, question: list[int]) -> list[int]:
        """Return the prompt of an answer. Drop the oldest turns until max_new_tokens fit, at most half the context."""
        room = self.context - min(self.params.max_new_tokens, self.context // 2)
        system = [{"role": "system", "content": self.system}] if self.system else []
        head = self.tokenizer.render(system)[0] if system else []
        if len(head) + len(question) > self.context:
            raise UserError(
                f"chat: message and system message have {len(head) + len(question)} tokens, the context "
                f"{self.context}; shorten them"
            )
        end = [self.tokenizer.im_end_id, *self.tokenizer.encode("\n")]
        turns = [turn.question + turn.answer + end for turn in self.turns]
        self.dropped = 0
        while turns and len(head) + sum(map(len, turns)) + len(question) > room:
            turns.pop(0)
            self.dropped += 1
        del self.turns[: self.dropped]
        return head + sum(turns, []) + question

    def _said(self, ids: list[int], text: str) -> list[int]:
        """Return the ids of an answer as it was shown, without stop texts and characters cut in half."""
        if ids and ids[-1] in self.params.stop_ids:
            ids = ids[:-1]
        same = self.tokenizer.decode(ids, self.params.skip_special_tokens) == text
        return ids if same else self.tokenizer.encode(text)


def converse(chat: Chat) -> None:
    """Read messages and print answers until /exit, the end of the input or a second Ctrl-C."""
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    terminal = sys.stdin.isatty()
    with input_history() if terminal else contextlib.nullcontext():
        if terminal:
            note(f"A context of {chat.context:,} tokens. /help lists the commands.")
        interrupted = False
        while True:
            try:
                message = read_message() if terminal else next(sys.stdin, "/exit").rstrip("\n")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if interrupted or not terminal:
                    return
                interrupted = True
                note("Ctrl-C again, Ctrl-D or /exit leaves.")
                continue
            if message.strip() == "/exit":
                return
            interrupted = bool(message.strip()) and respond(chat, message)


def respond(chat: Chat, message: str) -> bool:
    """Answer a message or obey a command. Return whether Ctrl-C interrupted the answer."""
    command = re.fullmatch(r"\s*/([a-z]+)(?:\s+(.*))?", message, re.DOTALL)
    try:
        if not command:
            return show(chat, chat.ask(message))
        if command[1] == "regen":
            return show(chat, chat.ask_again())
        change(chat, command[1], (command[2] or "").strip())
    except UserError as error:
        note(str(error))
    return False


def change(chat: Chat, command: str, argument: str) -> None:
    if command == "help":
        note(HELP)
    elif command == "reset":
        chat.turns.clear()
        note("The conversation is forgotten.")
    elif command == "system":
        chat.system = argument
        note("The system message is set." if argument else "There is no system message now.")
    elif command == "temp":
        try:
            temperature = float(argument)
        except ValueError:
            raise UserError(f"chat: /temp needs a number, got {argument!r}") from None
        chat.params = dataclasses.replace(chat.params, temperature=temperature)
        note(f"The temperature is {temperature:g}.")
    else:
        note(f"There is no command /{command}; /help lists them.")


def show(chat: Chat, pieces: Iterator[str]) -> bool:
    """Print an answer as it is generated. Return whether Ctrl-C interrupted it."""
    with ctrl_c_noted() as pressed, contextlib.closing(pieces):
        for number, piece in enumerate(pieces):
            if number == 0 and chat.dropped:
                note(f"The context of {chat.context} tokens is full: turns forgotten, the oldest: {chat.dropped}.")
            print(piece, end="", flush=True)
            if pressed:
                break
    print(flush=True)
    return bool(pressed)


@contextlib.contextmanager
def ctrl_c_noted() -> Iterator[list[int]]:
    """Yield a list that grows with each Ctrl-C, so that a token is never cut in half; the third one raises."""
    pressed = []

    def handler(number: int, frame: object) -> None:
        pressed.append(number)
        if len(pressed) > 2:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def read_message() -> str:
    """Return a line from the terminal, with the lines pasted with it. Raise EOFError or KeyboardInterrupt."""
    lines = [input("> ")]
    # A paste arrives at once; where readline takes several lines as one (bracketed paste), nothing is left to wait for.
    while os.name == "posix" and select.select([sys.stdin], [], [], 0.05)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)


@contextlib.contextmanager
def input_history() -> Iterator[None]:
    """Load the messages of earlier chats for line editing, if Python has readline, and save them at the end."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = os.path.expanduser(HISTORY_FILE)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        with contextlib.suppress(OSError):
            readline.write_history_file(path)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
