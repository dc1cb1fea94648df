"""What stands between a socket and serve.py's routes: bounds of connections, who may ask, errors in
OpenAI's shape, counts. Nothing here knows what is asked.
"""

import asyncio
import hmac
import re
from collections import Counter
from typing import Any

THIS_MACHINE = ("127.0.0.1", "localhost", "::1", "[::1]")
HEAD_S = 10  # for the head of a connection's first request
# Of an idle connection: clients that drop it after 5, as httpx does, never meet its end
KEEP_S = 30
STALL_S = 60  # of a client that does not read what is sent to it
# Buckets of the time to the first token
TTFT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


# ---- connections ---------------------------------------------------------------------------------


def bounded_protocol(most: int) -> type:
    """Return a protocol for uvicorn that keeps at most `most` connections without a request.

    When one more comes, the oldest of them is closed: a client that sends its request at once is
    answered, however many others are silent."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # without a request, the oldest first

    class BoundedProtocol(H11Protocol):
        stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.expect_request(HEAD_S)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # no other request has come already
                self.expect_request(KEEP_S)

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_waiting()
            self.resume_writing()
            super().connection_lost(exc)

        def expect_request(self, seconds: float) -> None:
            self.stop_waiting()
            waiting[self] = self.loop.call_later(seconds, self.transport.abort)
            if len(waiting) > most:
                oldest = next(iter(waiting))
                oldest.stop_waiting()  # at once: many may come before it is closed
                oldest.transport.abort()

        def stop_waiting(self) -> None:
            if timer := waiting.pop(self, None):
                timer.cancel()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stalled = self.loop.call_later(STALL_S, self.transport.abort)

        def resume_writing(self) -> None:
            if self.stalled:
                self.stalled.cancel()
                self.stalled = None
            super().resume_writing()

    return BoundedProtocol


# ---- requests ------------------------------------------------------------------------------------


class Refused(Exception):
    """A request that is answered with an error, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status = status
        self.body = {
            "error": {"message": message[:1000], "type": kind, "param": param, "code": code}
        }


class Guard:
    """An ASGI application that checks who asks, and counts the answers of another."""

    def __init__(self, inner: Any, paths: set[str], config: dict, metrics: "Metrics") -> None:
        self.inner, self.paths, self.config, self.metrics = inner, paths, config, metrics

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.inner(scope, receive, send)

        async def counted(message: dict) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.metrics.requests[path, message["status"]] += 1
            await send(message)

        error = auth_error(scope, self.config)
        if error is None:
            return await self.inner(scope, receive, counted)
        return await error_response(None, error)(scope, receive, counted)


def auth_error(scope: dict, config: dict) -> Refused | None:
    """Return why a request is not answered, None if it is.

    Without a key only this machine is answered, and by its own name: a web page that gives its
    host's name this address cannot talk to the server (DNS rebinding)."""
    headers = dict(scope["headers"])
    key = config["api_key"]
    if key and scope["path"] not in ("/", "/health"):  # the page asks for the key
        # HTTP compares the word without case.
        given = re.sub(rb"(?i)\Abearer +", b"", headers.get(b"authorization", b""))
        if not hmac.compare_digest(given, key.encode()):
            words = "Incorrect API key provided; send it as Authorization: Bearer KEY"
            return Refused(401, words, None, "invalid_api_key")
    name = headers.get(b"host", b"").decode("latin-1").lower()
    name = re.sub(r"(?<=.):\d+\Z", "", name)
    own = (*THIS_MACHINE, config["host"].lower())
    if not key and not config["insecure"] and name not in own:
        words = f"this server answers to {config['host']}, not to {name[:80]!r}"
        return Refused(403, words)
    return None


def error_response(http: Any, error: Exception) -> Any:
    """Return the answer to a request that failed: in OpenAI's shape, whatever the error."""
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    headers = {}
    if isinstance(error, HTTPException):
        words = f"{error.detail}: {http.method} {http.url.path[:200]}"
        headers = error.headers or {}  # Allow: of a 405
        error = Refused(error.status_code, words)
    elif not isinstance(error, Refused):
        error = Refused(500, "The server had an error while processing your request")
    headers |= {"Retry-After": "1"} if error.status == 429 else {}
    return JSONResponse(error.body, error.status, headers)


# ---- counts --------------------------------------------------------------------------------------


class Metrics:
    """What the server counts, in Prometheus's text format."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.tokens: Counter[str] = Counter()  # prompt | generated
        self.samples = 0  # that wait or are generated
        # Requests whose first token came within the bucket
        self.waits: list[int] = [0] * (len(TTFT_SECONDS) + 1)
        self.wait_s = 0.0

    def first_token(self, seconds: float) -> None:
        self.waits[next((i for i, most in enumerate(TTFT_SECONDS) if seconds <= most), -1)] += 1
        self.wait_s += seconds

    def text(self, running: int) -> str:
        """running: samples that the engines generate now; the others of `samples` wait."""
        lines = ["# TYPE groundup_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'groundup_requests_total{{path="{path}",status="{status}"}} {count}')
        for kind in ("prompt", "generated"):
            name = f"groundup_{kind}_tokens_total"
            lines += [f"# TYPE {name} counter", f"{name} {self.tokens[kind]}"]
        gauges = {"samples_running": running, "samples_waiting": max(0, self.samples - running)}
        for name, value in gauges.items():
            lines += [f"# TYPE groundup_{name} gauge", f"groundup_{name} {value}"]
        name, total = "groundup_time_to_first_token_seconds", 0
        lines.append(f"# TYPE {name} histogram")
        for most, count in zip((*TTFT_SECONDS, "+Inf"), self.waits, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{most}"}} {total}')
        return "\n".join([*lines, f"{name}_sum {self.wait_s:.6f}", f"{name}_count {total}", ""])
