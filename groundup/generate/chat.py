"""A chat in the terminal: streamed answers, commands, Ctrl-C, and a history that fits the context.

Standard input is read line by line, so that a chat can be scripted. Answers go to standard
output, everything else to standard error.
"""

import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import Iterator

from groundup.errors import UserError
from groundup.generate.completion import asked_messages
from groundup.generate.engine import Engine
from groundup.generate.sampling import SamplingParams
from groundup.generate.tools import MAX_TURNS, Tools

COMMANDS = (
    "/reset forgets the conversation; /system TEXT; /temp NUMBER; /help shows this; "
    "/exit or /quit; Ctrl-C stops an answer."
)


class Chat:
    """A conversation. Each prompt repeats what was said before: the engine's cache has most of it.

    tools: that answers may call. Raise UserError for parameters that are not for a chat."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        system: str = "",
        tools: Tools | None = None,
    ) -> None:
        if params.n_samples > 1:
            raise UserError("sample: a chat has one answer at a time; leave out n and best_of")
        self.engine, self.params, self.system, self.tools = engine, params, system, tools
        self.context = engine.model.cfg.block_size
        # Tokens of the context that are left to the answer
        self.kept = min(params.max_new_tokens, self.context // 2)
        self.turns: list[dict] = []  # messages: a question, its answer, the next question ...
        self.dropped = 0  # questions that did not fit before the last answer

    def ask(self, message: str) -> Iterator[str]:
        """Yield the answer in pieces. If it is closed early, what was said so far stays in the
        history. A call of a tool is a piece, too, and what the tool says."""
        asked = [{"role": "user", "content": message}]  # then the turns that call tools
        # A turn that calls tools has a request of its own, as has the one that follows.
        request = self.engine.request(0, self._fitted(asked[0]), self.params)
        texts: list[str] = []
        try:
            for number in range(1, MAX_TURNS + 1):
                ids, texts = [], []
                for _, token in self.engine.run([request]):
                    ids.append(token.id)
                    texts.append(token.text)
                    yield token.text
                # A turn that its limit cut may end within a call.
                has_ended = ids[-1] in self.params.stop_ids
                if not self.tools or not has_ended or number == MAX_TURNS:
                    break
                found = self.tools.go_on(self.engine, request, ids, self._shown(asked))
                if not found:
                    break
                turn, request = found
                asked += turn.messages
                texts = []
                yield "\n" + "".join(f"-> {one['content']}\n" for one in turn.messages[1:])
        finally:
            if texts:
                self.turns += [*asked, {"role": "assistant", "content": "".join(texts)}]
            elif asked[1:]:  # stopped before a word was said about the tools' results
                self.turns += asked

    def _shown(self, asked: list[dict]) -> list[dict]:
        """Return the conversation with what is asked now, as the template gets it."""
        messages = asked_messages(self.system, [*self.turns, *asked])
        return self.tools.shown(messages) if self.tools else messages

    def _fitted(self, question: dict) -> list[int]:
        """Return the prompt of an answer. Drop the oldest turns until it fits."""
        # The answer keeps its room, or it would be cut after a few words.
        room = self.context - self.kept
        self.dropped = 0
        while True:
            messages = self._shown([question])
            ids, _ = self.engine.tokenizer.render(messages, add_generation_prompt=True)
            if len(ids) <= room or not self.turns:
                break
            # A question goes with its answer, up to the next question.
            questions = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
            del self.turns[: [*questions, len(self.turns)][1]]
            self.dropped += 1
        if len(ids) > self.context:
            what = f"message and system message have {len(ids)} tokens, over {self.context}"
            raise UserError(f"chat: {what}; shorten it")
        return ids


def converse(chat: Chat) -> None:
    """Read messages and print answers until /exit, /quit, the end of the input or a Ctrl-C
    between answers."""
    terminal = sys.stdin.isatty()
    # None: as the terminal has it
    sys.stdin.reconfigure(encoding=None if terminal else "utf-8", errors="replace")
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing in input)
        room = f"A context of {chat.context:,} tokens, {chat.kept:,} of them for the answer"
        note(f"{room}. {COMMANDS}")
    while True:
        try:
            # Scripted input ends like /exit.
            message = input("> ") if terminal else next(sys.stdin, "/exit").rstrip("\n")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        # A line like /name is a command, whether there is such a one or not, also with the slash of
        # Chinese typing. /usr/bin is none.
        command = re.fullmatch(r"\s*[/\uff0f]([^\s/]+)(?:\s+(.*))?", message)
        if command and command[1] in ("exit", "quit"):
            return
        try:
            if command:
                handle_command(chat, command[1], (command[2] or "").strip())
            elif message.strip():
                show(chat, chat.ask(message))
        except UserError as error:
            note(str(error))


def handle_command(chat: Chat, command: str, argument: str) -> None:
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
    elif command == "help":
        note(COMMANDS)
    else:
        note(f"There is no command /{command}. {COMMANDS}")


def show(chat: Chat, pieces: Iterator[str]) -> None:
    """Print an answer as it is generated; Ctrl-C ends it after the token at work."""
    # A signal handler that raised might cut a token in half.
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        with contextlib.closing(pieces):
            for number, piece in enumerate(pieces):
                # Turns were dropped when the prompt was made, before the first piece.
                if number == 0 and chat.dropped:
                    n, kept = chat.dropped, f"{chat.kept} of {chat.context} tokens"
                    turns = "the oldest turn is" if n == 1 else f"the {n} oldest turns are"
                    why = f"{kept} are kept for the answer (max_new_tokens)"
                    note(f"The context is full, as {why}: {turns} forgotten.")
                print(piece, end="", flush=True)
                if pressed:
                    break
    finally:
        signal.signal(signal.SIGINT, before)
    print(flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
