"""Requests to an OpenAI-compatible /chat/completions, with the standard library alone, and a file of its answers.

A request is repeated while the endpoint is busy or broken; an answer is on the disk before anything is made of it.
"""

import fcntl
import http.client
import json
import os
import random
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import NamedTuple

from tqdm import tqdm

from groundup.errors import UserError

MAX_WAIT = 600.0  # seconds before a retry





class Trouble(Exception):
    """A request that may go well later. args: what happened, seconds that the endpoint asks to wait."""


class Unreachable(Trouble):
    """Nothing listens at the address, or there is no such address."""


class Waits:
    """What is printed of the waits of requests that run side by side: one line per wait, not one for each of them."""

    def __init__(self) -> None:
        self.lock, self.until = threading.Lock(), 0.0

    def say(self, line: str, pause: float) -> None:
        with self.lock:
            now = time.monotonic()
            if now >= self.until:
                self.until = now + pause
                tqdm.write(line, file=sys.stderr)


class Answer(NamedTuple):
    text: str
    finish: str  # stop | length | content_filter ...; refused = HTTP 400, 413 or 422, with the text that came
    tokens: int  # of prompt and answer as the endpoint counts them; 0 = it does not


def ask(
    base_url: str, key: str, body: dict, timeout: float, max_retries: int, retry_wait: float, name: str,
    waits: Waits | None = None, is_first: bool = False,
) -> Answer:  # fmt: skip
    """The answer to `body`. Waits retry_wait seconds before the first retry, twice as many each time after it, or as
    long as Retry-After says; `name` is for what is printed, through `waits` if requests share one. is_first: the first
    request of all, to an address that may be wrong: if nobody is there it is not repeated. Raises ChatError where
    retries are used up or cannot help."""
    rng = random.Random(name)  # so that threads that failed together do not come back together
    waits = waits or Waits()
    for attempt in range(max_retries + 1):
        try:
            return post(base_url, key, json.dumps(body).encode(), timeout)
        except Trouble as trouble:
            what, asked_wait = trouble.args
            if is_first and isinstance(trouble, Unreachable):
                raise UserError(f"chat: {base_url}: {what}; start the service, or mend base_url") from None
        pause = min(max(retry_wait * 2**attempt * rng.uniform(0.5, 1), asked_wait), MAX_WAIT)
        if attempt < max_retries:
            waits.say(f"{name}: {what}; again in {pause:.1f} s", pause)
            time.sleep(pause)
    raise UserError(f"chat: {base_url}: {what}, {max_retries + 1} times; give the same command when it answers again")


def post(base_url: str, key: str, body: bytes, timeout: float) -> Answer:
    """One try. Raises Trouble, or ChatError for what a retry does not mend (a wrong key, model or address)."""
    call = urllib.request.Request(base_url.rstrip("/") + "/chat/completions", body)
    call.add_header("Content-Type", "application/json")
    if key:
        call.add_unredirected_header("Authorization", f"Bearer {key}")  # never to another host
    try:
        with urllib.request.urlopen(call, timeout=timeout) as response:
            return answer_of(json.loads(response.read()))
    except urllib.error.HTTPError as error:
        return failed(base_url, error)
    except (OSError, http.client.HTTPException) as error:  # also URLError and timeouts
        nobody = isinstance(getattr(error, "reason", error), ConnectionRefusedError | socket.gaierror)
        raise (Unreachable if nobody else Trouble)(f"{type(error).__name__} {error}", 0.0) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Trouble("what came is not an answer of /chat/completions", 0.0) from None


def answer_of(values: dict) -> Answer:
    choice, usage = values["choices"][0], values.get("usage") or {}
    text = "" + (choice["message"].get("content") or "")  # a list of parts raises TypeError
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half an emoji of a cut answer
    return Answer(text, str(choice.get("finish_reason") or ""), int(usage.get("total_tokens") or 0))


def failed(base_url: str, error: urllib.error.HTTPError) -> Answer:
    try:
        said = error.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        said = "(the connection broke)"
    what = " ".join(f"HTTP {error.code} {error.reason} {said}".split())
    if error.code in (400, 413, 422):  # not to the endpoint's liking: this prompt, or every one
        return Answer(what, "refused", 0)
    if error.code not in (408, 409, 425, 429) and error.code < 500:
        raise UserError(f"chat: {base_url}: {what}")
    after = error.headers.get("Retry-After", "")
    raise Trouble(what, float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else 0.0)


def json_line(values: dict) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"


class Journal:
    """All answers in the order of their requests, in a file whose first line has the settings; locked while open.

    Half a line at the end, of a process that was killed, is cut off. Raises ChatError.
    """

    def __init__(self, path: str, settings: dict) -> None:
        self.file = open(path, "a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"chat: another process is writing {path}; wait for it") from None
        self.file.seek(0)
        *lines, half = self.file.read().split(b"\n")
        self.file.truncate(self.file.tell() - len(half))
        if not lines:
            self.add(settings)
        try:
            first, *rest = map(json.loads, lines or [json.dumps(settings)])
            self.answers = [Answer(**values) for values in rest]
            changed = [f"{key}={first.get(key)!r}" for key in settings if first.get(key) != settings[key]]
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"chat: {path} is damaged ({error}); use another out") from None
        if changed:
            raise UserError(f"chat: {path} was made with {', '.join(changed)}; use another out")

    def add(self, values: dict) -> None:
        self.file.write(json_line(values))
        self.file.flush()
        os.fsync(self.file.fileno())
