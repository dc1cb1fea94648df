"""A chat in the terminal: streamed answers, commands, Ctrl-C, and a history that fits the context.

Standard input is read line by line, so that a chat can be scripted. Answers go to standard output, everything else to
standard error.
"""

import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import Iterator

from groundup.errors import UserError
from groundup.generate.engine import Engine
from groundup.generate.sampling import SamplingParams
from model import Transformer
from tokenizer import Tokenizer

COMMANDS = "/reset forgets the conversation; /system TEXT; /temp NUMBER; /exit; Ctrl-C stops an answer."


class Chat:
    """A conversation as token ids. Answers are kept as generated, so that the engine's cache stays valid."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, params: SamplingParams, system: str = "", compile: bool = False
    ) -> None:
        """Raise UserError for parameters that make no sense in a chat."""
        if max(params.n, params.num_beams, params.best_of) > 1:
            raise UserError("sample: a chat has one answer at a time; leave out n, num_beams and best_of")
        self.tokenizer, self.params, self.system = tokenizer, params, system
        self.context = model.cfg.block_size
        self.engine = Engine(model, tokenizer, rows=1, compile=compile)
        self.turns: list[list[int]] = []  # ids of each question and its answer
        self.dropped = 0  # turns that did not fit before the last answer

    def ask(self, message: str) -> Iterator[str]:
        """Yield the answer in pieces. If it is closed early, what was said so far stays in the history."""
        question, _ = self.tokenizer.render([{"role": "user", "content": message}], add_generation_prompt=True)
        prompt = self._fitted(question)
        ids, texts = [], []
        try:
            for token in self.engine.stream(prompt, self.params):
                ids.append(token.id)
                texts.append(token.text)
                yield token.text
        finally:
            if ids:
                end = [self.tokenizer.im_end_id, *self.tokenizer.encode("\n")]
                self.turns.append(question + self._said(ids, "".join(texts)) + end)

    def _fitted(self, question: list[int]) -> list[int]:
        """Return the prompt of an answer. Drop the oldest turns until max_new_tokens fit, at most half the context."""
        room = self.context - min(self.params.max_new_tokens, self.context // 2)
        head = self.tokenizer.render([{"role": "system", "content": self.system}])[0] if self.system else []
        n_fixed = len(head) + len(question)
        if n_fixed > self.context:
            raise UserError(f"chat: message and system message have {n_fixed} tokens, over {self.context}; shorten it")
        self.dropped = 0
        while self.turns and n_fixed + sum(map(len, self.turns)) > room:
            self.turns.pop(0)
            self.dropped += 1
        return head + sum(self.turns, []) + question

    def _said(self, ids: list[int], text: str) -> list[int]:
        """Return the ids of an answer as it was shown, without stop texts and characters cut in half."""
        if ids and ids[-1] in self.params.stop_ids:
            ids = ids[:-1]
        same = self.tokenizer.decode(ids, self.params.skip_special_tokens) == text
        return ids if same else self.tokenizer.encode(text)


def converse(chat: Chat) -> None:
    """Read messages and print answers until /exit, the end of the input or a Ctrl-C between answers."""
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing in input)
        note(f"A context of {chat.context:,} tokens. {COMMANDS}")
    while True:
        try:
            message = input("> ") if terminal else next(sys.stdin, "/exit").rstrip("\n")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if message.strip() == "/exit":
            return
        command = re.fullmatch(r"\s*/([a-z]+)(?:\s+(.*))?", message)
        try:
            if command:
                obey(chat, command[1], (command[2] or "").strip())
            elif message.strip():
                show(chat, chat.ask(message))
        except UserError as error:
            note(str(error))


def obey(chat: Chat, command: str, argument: str) -> None:
    if command == "reset":
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
        note(f"There is no command /{command}. {COMMANDS}")


def show(chat: Chat, pieces: Iterator[str]) -> None:
    """Print an answer as it is generated; Ctrl-C ends it after the token at work, so that no token is cut in half."""
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        with contextlib.closing(pieces):
            for number, piece in enumerate(pieces):
                if number == 0 and chat.dropped:
                    note(f"The context of {chat.context} tokens is full: turns forgotten, the oldest: {chat.dropped}.")
                print(piece, end="", flush=True)
                if pressed:
                    break
    finally:
        signal.signal(signal.SIGINT, before)
    print(flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
