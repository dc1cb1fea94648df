"""Requests to an OpenAI-compatible /chat/completions with the standard library alone, and a journal
of the replies.

A request is repeated while the endpoint is busy or broken. A reply is on disk before it is used.
"""

import contextlib
import http.client
import json
import os
import random
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from tqdm import tqdm

from groundup.errors import UserError
from groundup.files.disk import lock

MAX_WAIT = 600.0  # seconds before a retry
# Fields that some models do not take (OpenAI's reasoning models), and what is sent instead
INSTEAD = {"max_tokens": "max_completion_tokens", "temperature": None}
# {(base_url, model): the fields that it has refused}, so that each is tried only once
REFUSED: dict[tuple[str, str], list[str]] = {}


class Endpoint(NamedTuple):
    base_url: str  # /chat/completions is added
    model: str  # as the service calls it
    key: str = ""  # "" = none is sent
    fields: dict = {}  # further fields of each request
    parallel: int = 8  # requests at once
    timeout: float = 300.0  # seconds without a byte
    max_retries: int = 8
    retry_wait: float = 1.0  # seconds before the first retry, then twice as many each time


class Reply(NamedTuple):
    text: str
    finish: str  # stop | length | content_filter ...; refused: HTTP 400, 413 or 422 with this text
    tokens: int  # of prompt and reply as the endpoint counts them; 0 = it does not


def read_key(name: str) -> str:
    """Return the key in the environment variable `name`, "" without a name. Raise UserError if
    it is not there."""
    key = os.environ.get(name, "").strip()
    if name and not key:
        what = f"there is no environment variable {name!r} with a key, as api_key_env says"
        raise UserError(f"config: {what}")
    if not re.fullmatch(r"[!-~]*", key):  # printable ASCII; a header holds nothing else
        what = f"the key in {name} has characters that are not allowed in a key; copy it again"
        raise UserError(f"config: {what}")
    return key


class Trouble(Exception):
    """A failure that a retry may mend. args: what happened, seconds that the endpoint asks to
    wait."""


class Unsupported(Exception):
    """The model does not take a field of INSTEAD. args: its name."""


class Unreachable(Trouble):
    """Nothing listens at the address, or there is no such address."""


def ask_in_order(
    endpoint: Endpoint, prompts: Iterator[str], begin: int, most: int
) -> Iterator[Reply]:
    """Yield the replies in the order of the prompts. Raise UserError when retries fail.

    begin: number of the first request. most: requests that are sent before their turn. Close early
    to cancel the rest."""
    # waiting: futures of the requests that were sent, in the order of their prompts
    waiting, numbered = deque(), enumerate(prompts, begin)
    pool = ThreadPoolExecutor(endpoint.parallel)
    try:
        # The first request goes alone: if nobody answers, waiting makes no sense.
        for number, prompt in islice(numbered, 1):
            yield ask(endpoint, prompt, f"request {number}", is_first=True)
        while True:
            # Ask ahead, so that a slow reply does not hold up the others.
            for number, prompt in islice(numbered, most - len(waiting)):
                waiting.append(pool.submit(ask, endpoint, prompt, f"request {number}"))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def ask(endpoint: Endpoint, prompt: str, name: str, is_first: bool = False) -> Reply:
    """Return the reply to one user message. Raise UserError if retries are used up or cannot help.

    `name` is printed. is_first: do not retry if nobody is there: the address may be wrong."""
    if not re.fullmatch(r"https?://[!-~]+", endpoint.base_url):  # no retry mends it
        what = f"base_url={endpoint.base_url!r} must be like http://127.0.0.1:8000/v1"
        raise UserError(f"config: {what}")
    rng = random.Random(name)
    messages = [{"role": "user", "content": prompt}]
    body = {"model": endpoint.model, "messages": messages, **endpoint.fields}
    refused = REFUSED.setdefault((endpoint.base_url, endpoint.model), [])
    attempt = 0
    while attempt <= endpoint.max_retries:
        for field in refused:
            without(body, field)
        try:
            return post(endpoint, body)
        except Unsupported as problem:
            (field,) = problem.args
            without(body, field)
            if field not in refused:  # another thread may have found out before
                refused.append(field)
                said = f"{INSTEAD[field]} is sent" if INSTEAD[field] else "the service's own holds"
                tqdm.write(f"chat: {endpoint.model} takes no {field}; {said}", file=sys.stderr)
            continue  # this was no attempt: send the changed request at once
        except Trouble as trouble:
            what, least_pause = trouble.args
            if is_first and isinstance(trouble, Unreachable):
                what = f"{endpoint.base_url}: {what}; start the service, or mend base_url"
                raise UserError(f"chat: {what}") from None
        if attempt < endpoint.max_retries:
            # Twice as long each time, unless Retry-After asks for more; the random factor spreads
            # out threads that failed together.
            pause = endpoint.retry_wait * 2**attempt * rng.uniform(0.5, 1)
            pause = min(max(pause, least_pause), MAX_WAIT)
            tqdm.write(f"{name}: {what}; again in {pause:.1f} s", file=sys.stderr)
            time.sleep(pause)
        attempt += 1
    what = f"{endpoint.base_url}: {what}, {endpoint.max_retries + 1} times"
    raise UserError(f"chat: {what}; give the same command when it answers again")


def without(body: dict, field: str) -> None:
    """Take a field out, and send its value under the name that it has instead."""
    if field in body:
        value, other = body.pop(field), INSTEAD[field]
        if other:
            body.setdefault(other, value)


def post(endpoint: Endpoint, body: dict) -> Reply:
    """Try once. Raise Trouble, Unsupported, or UserError for what a retry does not mend (a wrong
    key, model or address)."""
    url, raw = endpoint.base_url.rstrip("/") + "/chat/completions", json.dumps(body).encode()
    call = urllib.request.Request(url, raw)
    call.add_header("Content-Type", "application/json")
    if endpoint.key:
        # Unredirected: a redirect to another host does not get the key.
        call.add_unredirected_header("Authorization", f"Bearer {endpoint.key}")
    try:
        with urllib.request.urlopen(call, timeout=endpoint.timeout) as response:
            values = json.loads(response.read())
        choice, usage = values["choices"][0], values.get("usage") or {}
        text = "" + (choice["message"].get("content") or "")  # a list of parts raises TypeError
        # A reply that was cut may end in half a surrogate pair, which no file can hold.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        finish = str(choice.get("finish_reason") or "")
        return Reply(text, finish, int(usage.get("total_tokens") or 0))
    except urllib.error.HTTPError as error:
        return failed(endpoint.base_url, error, body)
    except (OSError, http.client.HTTPException) as error:  # also URLError and timeouts
        nobody = ConnectionRefusedError | socket.gaierror
        refused = isinstance(getattr(error, "reason", error), nobody)
        kind = Unreachable if refused else Trouble
        raise kind(f"{type(error).__name__} {error}", 0.0) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Trouble("what came is not an answer of /chat/completions", 0.0) from None


def failed(base_url: str, error: urllib.error.HTTPError, body: dict) -> Reply:
    """Return a refusal as a Reply; raise Unsupported, UserError or Trouble for others."""
    try:
        said = error.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        said = "(the connection broke)"
    # "Unsupported parameter: 'max_tokens' is not supported with this model."
    for field in INSTEAD:
        is_named = re.search(rf"nsupported.*['\"]{field}['\"]", said)
        if error.code == 400 and field in body and is_named:
            raise Unsupported(field)
    what = " ".join(f"HTTP {error.code} {error.reason} {said}".split())
    if error.code in (400, 413, 422):  # the endpoint refuses this prompt, or every one
        return Reply(what, "refused", 0)
    # 408 timeout, 409 conflict, 425 too early, 429 too many requests: worth another try
    if error.code not in (408, 409, 425, 429) and error.code < 500:
        raise UserError(f"chat: {base_url}: {what}")
    after = error.headers.get("Retry-After", "")
    raise Trouble(what, float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else 0.0)


class Journal:
    """All replies in the order of their requests, in a file whose first line has the settings;
    locked while open. Raises UserError if the file is damaged or of other settings."""

    def __init__(self, path: str, settings: dict) -> None:
        self.file = open(path, "a+b")
        try:
            lock(self.file)
        except BlockingIOError:
            raise UserError(f"chat: another process is writing {path}; wait for it") from None
        # A kill may leave half a line at the end: cut it off, the request is sent again.
        self.file.seek(0)
        *lines, half = self.file.read().split(b"\n")
        self.file.truncate(self.file.tell() - len(half))
        if not lines:
            self.add(settings)
        try:
            first, *rest = map(json.loads, lines or [json.dumps(settings)])
            self.replies = [Reply(**values) for values in rest]
            changed = [key for key in settings if first.get(key) != settings[key]]
            changed = [f"{key}={first.get(key)!r}" for key in changed]
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"chat: {path} is damaged ({error}); use another out") from None
        if changed:
            raise UserError(f"chat: {path} was made with {', '.join(changed)}; use another out")

    def ask(self, endpoint: Endpoint, prompts: Iterator[str], most: int) -> Iterator[Reply]:
        """Yield what ask_in_order does for the prompts after those that have replies; each is on
        disk before."""
        asked = ask_in_order(endpoint, prompts, len(self.replies), most)
        with self.file, contextlib.closing(asked) as replies:
            for reply in replies:
                self.add(reply._asdict())  # first: a reply that is used is never asked for again
                self.replies.append(reply)
                yield reply

    def add(self, values: dict) -> None:
        """Append a line and sync it to the disk."""
        self.file.write(json.dumps(values, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
