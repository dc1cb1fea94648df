"""Conversations rendered by a model's own chat template, in a process that can be ended.

A published template is a program: for some conversation it may loop for ever, or fill the memory.
The time limit of templates.py works in the main thread only, and serve.py has many threads. So
serve.py asks this process. The page's Markdown and the model's tools run in such processes, too.
"""

import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TextIO

from groundup.errors import UserError
from groundup.files.untrusted import limit_memory
from groundup.tokens import templates
from tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
LOAD_S = 60  # for the process to start and read the tokenizer
MEMORY_MB = 1000  # beside what it has after that
MAX_KEPT = 16  # tokenizers with other settings of the template


# ---- a process that answers lines ----------------------------------------------------------------


class LineProcess:
    """A module of ours in a process of its own, which answers each line of JSON with one. It is
    started when it is needed, and ended when an answer takes too long. Several threads may ask."""

    def __init__(self, module: str, *arguments: str, seconds: float) -> None:
        # -P: what lies in the current directory does not stand in for our modules
        self.command = [sys.executable, "-P", "-m", module, *arguments]
        self.seconds = seconds
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.has_ended = False  # for good

    def ask(self, question: Any) -> Any:
        """Return the answer, None if the process ends before it."""
        with self.lock:
            if self.has_ended:
                return None
            # Started by the first question, and again after it had to be ended
            if self.process is None or self.process.poll() is not None:
                self.start()
            return self.exchange(json.dumps(question), self.seconds)

    def start(self) -> Any:
        """Return the answer to an empty line."""
        pipe, paths = subprocess.PIPE, [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # In a session of its own: Ctrl-C is for the one that asks.
        how = {"start_new_session": True, "env": env, "text": True, "encoding": "utf-8"}
        self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, **how)
        answer = self.exchange("", LOAD_S)
        if answer is None:
            raise UserError(f"{' '.join(self.command[3:])}: the process does not start")
        return answer

    def exchange(self, line: str, seconds: float) -> Any:
        # A process that is killed closes its output, which ends the wait for a line.
        timer, answer = threading.Timer(seconds, self.process.kill), ""
        timer.start()
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except (OSError, ValueError):  # it has ended, or left half a character
            pass
        except BaseException:  # Ctrl-C: its answer must not be taken for that of the next line
            self.close()
            raise
        finally:
            timer.cancel()
        if answer.endswith("\n"):
            return json.loads(answer)
        self.close()
        return None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Answer nothing from now on, nor what another thread waits for."""
        self.has_ended = True
        if self.process:
            self.close()


def answer_lines(
    first: Any, answer: Callable[[Any], Any], lines: TextIO = sys.stdin, out: TextIO = sys.stdout
) -> None:
    """In a LineProcess: answer the empty line with `first`, and each question until they end."""
    for line in lines:
        found = answer(json.loads(line)) if line.strip() else first
        print(json.dumps(found), file=out, flush=True)


# ---- templates in one ----------------------------------------------------------------------------


class Renderer:
    """Renders conversations with the template of the tokenizer in `directory`."""

    def __init__(self, directory: Path, seconds: float = templates.RENDER_S) -> None:
        arguments, wait = (str(directory.absolute()), str(seconds)), templates.WAIT * seconds + 2
        self.seconds = seconds
        self.helper = LineProcess(__name__, *arguments, seconds=wait)

    def render(self, messages: list[dict], settings: dict, follows: bool = False) -> list[int]:
        """Return the ids of the prompt for an answer; follows: those of `tool_ids`.

        settings: of the template. Raise UserError."""
        found = self.helper.ask([messages, settings, follows])
        if found is None:
            limit = f"it takes more than {self.seconds:g} s or {MEMORY_MB} MB"
            raise UserError(f"tokenizer: the chat template cannot render this: {limit}")
        if isinstance(found, str):
            raise UserError(found)
        return found


def tool_ids(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """Return the ids that the template writes behind an answer that called tools.

    messages: up to the tools' turns, which are the last. Raise UserError for a template that writes
    no tools' turns."""
    # These turns, and the opened turn of the next answer
    ids, mask = tokenizer.render(messages)
    opened, _ = tokenizer.render(messages, add_generation_prompt=True)
    end = len(mask) - mask[::-1].index(1) if 1 in mask else 0  # of the answer that calls
    if not 0 < end < len(ids) or opened[: len(ids)] != ids:
        raise UserError("tools: the chat template does not write the results of tools")
    return opened[end:]


@lru_cache(MAX_KEPT)
def with_settings(tokenizer: Tokenizer, settings: str) -> Tokenizer:
    """Return the tokenizer with further settings (JSON) of its template, which is compiled once for
    each of them."""
    own = copy.copy(tokenizer)
    vars(own).pop("template", None)  # that was made with other settings
    own.template_settings = tokenizer.template_settings | json.loads(settings)
    return own


def answer(tokenizer: Tokenizer, question: tuple[list[dict], dict, bool]) -> list[int] | str:
    """Return the ids of (messages, settings, follows), or the error."""
    messages, settings, follows = question
    try:
        own = with_settings(tokenizer, json.dumps(settings, sort_keys=True))
        if follows:
            return tool_ids(own, messages)
        return own.render(messages, add_generation_prompt=True)[0]
    except UserError as error:
        with_settings.cache_clear()  # with "too slow": another conversation may take less
        return str(error)


if __name__ == "__main__":
    templates.RENDER_S = float(sys.argv[2])
    tokenizer = Tokenizer.load(sys.argv[1])
    limit_memory(MEMORY_MB)
    answer_lines("ready", partial(answer, tokenizer))
