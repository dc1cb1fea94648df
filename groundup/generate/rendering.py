"""Conversations rendered by a model's own chat template, in a process that can be ended.

A published template is a program: for some conversation it may loop for ever, or fill the memory.
The time limit of templates.py works in the main thread only. So serve.py, which has many threads,
asks this process; it answers one line of JSON with one.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from groundup.errors import UserError
from groundup.tokens import templates
from tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
LOAD_S = 60  # for the process to start and read the tokenizer
MEMORY_MB = 1000  # beside what it has after that
MAX_KEPT = 16  # tokenizers with other settings of the template


class LineProcess:
    """A module of ours in a process of its own, which answers each line with one. It is started
    when it is needed, and ended when an answer takes too long. Several threads may call it."""

    def __init__(self, module: str, *arguments: str, seconds: float) -> None:
        # -P: what lies in the current directory does not stand in for our modules
        self.command = [sys.executable, "-P", "-m", module, *arguments]
        self.seconds = seconds
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.has_ended = False  # for good

    def ask(self, line: str) -> str:
        """Return the answer to a line, "" if the process ends before it."""
        with self.lock:
            if self.has_ended:
                return ""
            if self.process is None or self.process.poll() is not None:
                self.start()
            return self.exchange(line, self.seconds)

    def start(self) -> str:
        """Return the answer to an empty line."""
        pipe, paths = subprocess.PIPE, [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            self.command,
            stdin=pipe,
            stdout=pipe,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            text=True,
            encoding="utf-8",
        )
        answer = self.exchange("", LOAD_S)
        if not answer:
            raise UserError(f"{' '.join(self.command[3:])}: the process does not start")
        return answer

    def exchange(self, line: str, seconds: float) -> str:
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
            return answer
        self.close()
        return ""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Answer nothing from now on, nor what another thread waits for."""
        self.has_ended = True
        if self.process:
            self.close()


class Renderer:
    """Renders conversations with the template of the tokenizer in `directory`."""

    def __init__(self, directory: Path, seconds: float = templates.RENDER_S) -> None:
        where = str(directory.absolute())
        self.seconds = seconds
        self.helper = LineProcess(
            __name__, where, str(seconds), seconds=templates.WAIT * seconds + 2
        )

    def render(self, messages: list[dict], settings: dict, follows: bool = False) -> list[int]:
        """Return the ids of the prompt for an answer; follows: those of `tool_ids`.

        settings: of the template. Raise UserError."""
        answer = self.helper.ask(json.dumps([messages, settings, follows]))
        if not answer:
            limit = f"it takes more than {self.seconds:g} s or {MEMORY_MB} MB"
            raise UserError(f"tokenizer: the chat template cannot render this: {limit}")
        found = json.loads(answer)
        if isinstance(found, str):
            raise UserError(found)
        return found


def tool_ids(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """Return the ids that the template writes behind an answer that called tools.

    They are the turns of the tools and the opened turn of the next answer. messages: up to the
    tools' turns, which are the last. Raise UserError for a template that writes no tools' turns."""
    ids, mask = tokenizer.render(messages)
    opened, _ = tokenizer.render(messages, add_generation_prompt=True)
    end = len(mask) - mask[::-1].index(1) if 1 in mask else 0  # of the answer that calls
    if not 0 < end < len(ids) or opened[: len(ids)] != ids:
        raise UserError("tools: the chat template does not write the results of tools")
    return opened[end:]


def serve(directory: str, seconds: float) -> None:
    """Answer the lines of standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when this ends
    templates.RENDER_S = seconds
    tokenizer = Tokenizer.load(directory)
    limit_memory(MEMORY_MB)
    kept = {}
    for line in sys.stdin:
        print(json.dumps(answer(line, tokenizer, kept)), flush=True)


def answer(line: str, tokenizer: Tokenizer, kept: dict[str, Tokenizer]) -> list[int] | str:
    """Return the ids of [messages, settings, follows], or the error.

    kept: tokenizers by their settings."""
    if not line.strip():
        return "ready"
    messages, settings, follows = json.loads(line)
    key = json.dumps(settings, sort_keys=True)
    try:
        if key not in kept:
            if len(kept) == MAX_KEPT:
                del kept[next(iter(kept))]
            kept[key] = with_settings(tokenizer, settings)
        if follows:
            return tool_ids(kept[key], messages)
        return kept[key].render(messages, add_generation_prompt=True)[0]
    except UserError as error:
        kept.pop(key, None)  # with "too slow": another conversation may take less
        return str(error)


def with_settings(tokenizer: Tokenizer, settings: dict) -> Tokenizer:
    """Return the tokenizer with these settings of its template besides its own."""
    own = copy.copy(tokenizer)
    vars(own).pop("template", None)  # that was made with other settings
    own.template_settings = tokenizer.template_settings | settings
    return own


def limit_memory(megabytes: int) -> None:
    """Let this process take so much more memory than it has now, where the system can do that."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + megabytes * 10**6
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
