"""The server of serve.py: its routes, who may ask, and a thread for the engine of each model.

A request is read, parsed (openai_api.py) and admitted to the queue as a Job. Its prompts become
ids and go to the engine of its model; the tokens come back one by one, and are sent as one answer
or as a stream. The settings, `config`, are serve.py's.
"""

import asyncio
import contextlib
import hmac
import json
import queue
import re
import secrets
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from groundup.errors import UserError
from groundup.generate import page
from groundup.generate.completion import is_tuned, never_sampled
from groundup.generate.decode import to_int8
from groundup.generate.engine import Engine, Request, Sample, Token
from groundup.generate.openai_api import (
    Choice,
    ParsedRequest,
    Refused,
    encode,
    parse,
    shown_messages,
    template_settings,
)
from groundup.generate.rendering import Renderer
from groundup.generate.sampling import SamplingParams
from groundup.generate.tools import MAX_TURNS, Tools, ToolTurn
from groundup.train import huggingface
from groundup.train.device import autocast
from tokenizer import Tokenizer

# Settings of serve.py that a request may change
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
THIS_MACHINE = ("127.0.0.1", "localhost", "::1", "[::1]")
BODY_S = 20  # for a client to send its body
# Prices of what could keep the engine waiting, see `pay`: some 30 times the CPU time that it takes
BIG_BODY = 2**16  # bytes; smaller bodies have no price
BYTE_S = 1e-6  # of a byte of a big body, which takes up to 3e-8 s to parse and encode
ERROR_S = 0.05  # of an answer that is an error, which takes up to 2e-3 s
BODY_MOST_S = 10  # the highest price of a body
ERROR_WAIT_S = 1  # an error that waited so long is sent, whatever the price of those before it
HEAD_S = 10  # for the head of a connection's first request
# Of an idle connection: clients that drop it after 5, as httpx does, never meet its end
KEEP_S = 30
STALL_S = 60  # of a client that does not read what is sent to it
# Buckets of the time to the first token
TTFT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
UNICODE_LINE_ENDS = "\x85\u2028\u2029"

Event = tuple[Sample, Token] | Exception  # what the engine says of a job


# ---- a request in the queue ----------------------------------------------------------------------


class Job:
    """An HTTP request: the engine's requests (one for each prompt), the tokens that it draws, and
    the choices that they become (n for each prompt).

        with Job(...) as job:  # at the end, the engine forgets what is left of it

    Its samples count in `metrics.samples` from here on, each until it has ended. All methods are
    called in the server's thread."""

    def __init__(
        self, asked: ParsedRequest, model: "Model", metrics: "Metrics", began: float
    ) -> None:
        self.asked, self.model, self.metrics, self.began = asked, model, metrics, began
        self.left = asked.n_samples
        metrics.samples += self.left
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.requests: list[Request] = []
        self.n_new = 0

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        if self.left:
            self.model.commands.put(partial(self.model.cancel, self.requests))
            self.give_back(self.left)

    def begin(self, requests: list[Request]) -> None:
        # The choices of a prompt stand one behind another.
        n, each = self.asked.n, [request for request in requests for _ in range(self.asked.n)]
        self.n_prompt = sum(len(request.ids) for request in requests)
        how = self.model.tokenizer, self.asked
        self.choices = [Choice(*how, i, request) for i, request in enumerate(each)]
        self.firsts = {request: i * n for i, request in enumerate(requests)}  # of its choices
        self.metrics.tokens["prompt"] += self.n_prompt
        self.add(requests)

    def add(self, requests: list[Request]) -> None:
        """Give requests to the engine."""
        self.requests += requests
        self.model.commands.put(partial(self.model.add, self, requests))

    def receive(self, event: Event) -> None:
        # A place is free once its sample is generated, whether or not the client reads it.
        if not isinstance(event, Exception) and event[1].finish:
            self.give_back(1)
        self.events.put_nowait(event)

    def give_back(self, n_samples: int) -> None:
        n_samples = min(n_samples, self.left)  # a job that failed has given back all already
        self.left -= n_samples
        self.metrics.samples -= n_samples

    def choices_of(self, sample: Sample) -> list[Choice]:
        """Return the choices of a sample: greedy ones are copies."""
        # At temperature 0 one sample is drawn, and is every choice of its prompt.
        first = self.firsts[sample.request] + sample.index
        return self.choices[first : first + self.asked.n // self.asked.params.n]

    def push(self, sample: Sample, token: Token) -> list[dict]:
        """Take a token; return what a stream says of it."""
        chosen = self.choices_of(sample)
        self.n_new += 0 if self.asked.scores_only else len(chosen)
        return [said for choice in chosen if (said := choice.push(token))]

    def go_on(self, sample: Sample, turn: ToolTurn, request: Request) -> list[dict]:
        """Take a turn that called the server's tools instead of its last token, and the request of
        the next one; return what a stream says of it."""
        chosen = self.choices_of(sample)
        self.n_new += len(chosen)
        self.n_prompt += len(turn.ids)
        self.firsts[request] = chosen[0].index
        self.left += 1
        self.metrics.samples += 1
        self.add([request])
        return [choice.go_on(turn, request) for choice in chosen]

    def head(self) -> dict:
        """Return what the answer, or every piece of it, begins with."""
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return {
            "id": ("chatcmpl-" if self.asked.chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": self.model.name,
            "object": kind + ".chunk" * (self.asked.chat and self.asked.stream),
        }

    def usage(self) -> dict:
        counts = {"prompt_tokens": self.n_prompt, "completion_tokens": self.n_new}
        return counts | {"total_tokens": self.n_prompt + self.n_new}


# ---- a model -------------------------------------------------------------------------------------


class Model(threading.Thread):
    """A model and its engine, which runs in this thread; jobs come by `commands`."""

    def __init__(
        self,
        name: str,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        compile: bool = False,
        template_settings: str = "",
        int8: bool = False,
    ) -> None:
        super().__init__(name=name, daemon=True)
        files = huggingface.tokenizer_dir(directory)
        self.tokenizer = Tokenizer.load(files).with_template_settings(template_settings)
        # A foreign template may loop for ever, so it runs in a process that can be ended.
        self.renderer = Renderer(files) if self.tokenizer.foreign_template else None
        net = huggingface.load_model(directory, device, dtype=dtype)
        net = to_int8(net) if int8 else net
        with autocast(device, dtype):
            self.engine = Engine(net, self.tokenizer, rows, compile)
        self.cfg = net.cfg
        self.own = {
            "eos_ids": self.tokenizer.stop_ids,
            "banned_ids": never_sampled(self.tokenizer, net.cfg.vocab_size),
        }
        self.card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "groundup",
            "max_model_len": net.cfg.block_size,
            "tuned": is_tuned(directory, self.tokenizer),  # for the page
            "examples": page.examples(directory),
        }
        self.jobs: dict[Request, Job] = {}  # that the engine has
        # What other threads want done in this one
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    # ---- in the thread of the engine

    def run(self) -> None:
        if self.engine.compile:  # in this thread, and before the first request
            list(self.engine.stream([0], SamplingParams(max_new_tokens=2)))
        while True:
            # Without work, wait for a command.
            while not self.engine.busy or not self.commands.empty():
                self.commands.get()()
            try:
                drawn = self.engine.step()
            except Exception as error:
                # Of the model or its device; the next requests may fare better.
                traceback.print_exc()
                self.engine.clear()
                self.hand_over([(job, error) for job in set(self.jobs.values())])
                self.jobs.clear()
                continue
            jobs = self.jobs
            self.hand_over([(jobs[sample.request], (sample, token)) for sample, token in drawn])
            for sample, _ in drawn:
                if sample.last:
                    del jobs[sample.request]

    def add(self, job: Job, requests: list[Request]) -> None:
        for request in requests:
            try:
                self.engine.add(request)
                self.jobs[request] = job
            except UserError as error:  # it has no room in the memory
                self.hand_over([(job, error)])

    def cancel(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request)
            self.jobs.pop(request, None)

    def hand_over(self, events: list[tuple[Job, Event]]) -> None:
        """Give what the engine draws to the jobs, in the server's thread."""

        def receive() -> None:
            for job, event in events:
                job.receive(event)

        if events:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
                events[0][0].loop.call_soon_threadsafe(receive)

    # ---- in others

    def requests(self, asked: ParsedRequest, system: str) -> list[Request]:
        """Return a request for each prompt. Raise Refused if one does not fit the context."""
        every, C = encode(self.tokenizer, self.renderer, asked, system), self.cfg.block_size
        params = replace(asked.params, **self.own)
        # Without a limit of its own a request needs room for one token only.
        n_new = asked.params.max_new_tokens if asked.limited else 1
        # The last token is not read, so it needs no position.
        for ids in every:
            if len(ids) + n_new - 1 > C:
                words = f"This model's maximum context length is {C} tokens"
                words += f"; the prompt has {len(ids)}"
                words += f" and {n_new} more are asked for" if asked.limited else ""
                where = "messages" if asked.chat else "prompt"
                raise Refused(400, words, where, "context_length_exceeded")
        try:
            return [self.engine.request(i, ids, params) for i, ids in enumerate(every)]
        except UserError as error:
            raise Refused(400, str(error).removeprefix("sample: ")) from None

    def use_tools(
        self, tools: Tools, asked: ParsedRequest, system: str, choice: Choice, sample: Sample
    ) -> tuple[ToolTurn, Request] | None:
        """Run what a sample calls. Return the turn and the request of the next one; None if it
        calls nothing, or no further turn has room."""
        messages, begun = [*shown_messages(asked, system)], []
        if asked.proceeds:  # the last message of the request is the beginning of the first turn
            last = messages.pop()
            begun = [] if choice.turns else self.tokenizer.encode(last["content"])
        # The conversation so far has the turns that called tools before.
        messages += choice.turns
        # A foreign template writes the tools' turns in its own process.
        follow = None
        if self.renderer:
            settings = template_settings(self.tokenizer, asked.template_settings)
            follow = partial(self.renderer.render, settings=settings, follows=True)
        request, number = sample.request, choice.index
        return tools.go_on(self.engine, request, sample.ids, messages, number, begun, follow)


# ---- routes --------------------------------------------------------------------------------------


class Server:
    """The routes. config: the settings. tools: that the server runs."""

    def __init__(self, models: dict[str, Model], config: dict, tools: Tools | None = None) -> None:
        self.models, self.config, self.metrics = models, config, Metrics()
        self.tools, self.tool_thread = tools, ThreadPoolExecutor(1)  # one call at a time
        self.page = page.read_page()
        self.defaults = {key: config[key] for key in DEFAULTS}
        self.errors, self.big_bodies = asyncio.Lock(), asyncio.Lock()
        self.n_big_bodies = 0  # that wait for their turn
        for model in models.values():
            model.card["defaults"] = self.defaults

        self.routes = [
            Route("/", self.home),
            Route("/health", self.health),
            Route("/metrics", self.counts),
            Route("/v1/models", self.cards),
            Route("/v1/models/", self.cards),  # some clients end it so
            Route("/v1/models/{name:path}", self.one_card),
            Route("/v1/chat/completions", partial(self.answer, chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self.answer, chat=False), methods=["POST"]),
            Route("/v1/preferences", self.prefer, methods=["POST"]),
            Route("/v1/render", self.render, methods=["POST"]),
        ]
        kinds = Refused, HTTPException, RecursionError, Exception
        handlers = dict.fromkeys(kinds, error_response)
        self.answering = Starlette(routes=self.routes, exception_handlers=handlers)

    def app(self) -> Any:
        """Return the ASGI application, with the headers for pages of other sites."""
        origins = origins_of(self.config["cors_origins"])
        cors = {"allow_origins": origins, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        cors["allow_private_network"] = True  # what a browser asks before a site reaches 127.0.0.1
        return CORSMiddleware(self, **cors) if origins else self

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        """Answer a request if its client may ask; count the answer, and let errors wait."""

        async def counted(message: dict) -> None:
            if message["type"] == "http.response.start":
                # By its path, those of unknown paths together
                known = {route.path for route in self.routes}
                path = scope["path"] if scope["path"] in known else "other"
                self.metrics.requests[path, message["status"]] += 1
                if message["status"] >= 400:
                    # Each connection has waited, so their number bounds the errors too.
                    with contextlib.suppress(TimeoutError):
                        await pay(self.errors, ERROR_S, ERROR_WAIT_S)
            await send(message)

        if scope["type"] != "http":
            return await self.answering(scope, receive, send)
        error = auth_error(scope, self.config)
        answer = JSONResponse(error.body, error.status) if error else self.answering
        return await answer(scope, receive, counted)

    async def home(self, _http: Any) -> Response:
        html, headers = self.page
        return Response(html, headers=headers, media_type="text/html")

    async def health(self, _http: Any) -> Response:
        alive = all(model.is_alive() for model in self.models.values())
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    async def counts(self, _http: Any) -> Response:
        engines = [model.engine for model in self.models.values()]
        running = sum(len(engine.running) + len(engine.prefilling) for engine in engines)
        text = self.metrics.text(running)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def cards(self, _http: Any) -> Response:
        cards = [model.card for model in self.models.values()]
        return JSONResponse({"object": "list", "data": cards})

    async def one_card(self, http: Any) -> Response:
        return JSONResponse(self.named(http.path_params["name"]).card)

    def named(self, name: str) -> Model:
        """Return the model of this name; "" = the first."""
        found = self.models.get(name) if name else next(iter(self.models.values()))
        if found is None:
            words = f"The model {name[:80]!r} does not exist; available: {', '.join(self.models)}"
            raise Refused(404, words, "model", "model_not_found")
        return found

    async def prefer(self, http: Any) -> Response:
        """Keep which of two answers somebody found better."""
        raw = await self.body(http)
        await self.take_turn(raw)
        row, unused = page.preference(raw, self.config["system"])
        path = Path(self.config["preferences"])
        # Ties are kept beside, where training does not read them.
        path = path.with_suffix(".ties" + path.suffix) if unused == "tie" else path
        try:
            await asyncio.to_thread(page.append, path, row)
        except OSError as error:
            raise Refused(500, f"cannot write {path}: {error.strerror or error}") from None
        return JSONResponse({"path": str(path), "unused": unused})

    async def render(self, http: Any) -> Response:
        """Return the HTML of the Markdown of an answer."""
        raw = await self.body(http)
        await self.take_turn(raw)
        return JSONResponse(await asyncio.to_thread(page.render, raw))

    async def answer(self, http: Any, chat: bool) -> Any:
        """Take a request for text. Return an ASGI application that answers it."""
        began = time.monotonic()
        return partial(self.respond, await self.body(http), chat, began)

    async def respond(
        self, raw: bytes, chat: bool, began: float, scope: dict, receive: Any, send: Any
    ) -> None:
        """Answer a body in one piece or as a stream, until the client goes away."""

        async def work() -> None:
            await self.take_turn(raw)
            own_tools = self.tools.schemas if self.tools else None
            asked = parse(raw, chat, self.defaults, secrets.randbits(62), own_tools)
            # The queue is asked before the prompts are encoded, which takes longest.
            with self.admit(asked, self.named(asked.model), began) as job:
                # Encoding a long prompt takes time, in which other requests go on.
                given = asked, self.config["system"]
                job.begin(await asyncio.to_thread(job.model.requests, *given))
                if asked.stream:
                    no_proxy_keeps = {"Cache-Control": "no-cache"}  # pieces back
                    pieces, kind = self.streamed(job), "text/event-stream"
                    answer = StreamingResponse(pieces, headers=no_proxy_keeps, media_type=kind)
                    await answer.stream_response(send)
                else:
                    await JSONResponse(await self.whole(job))(scope, receive, send)

        await or_disconnect(work(), receive)

    async def body(self, http: Any) -> bytes:
        """Return the body. Raise Refused if it is not JSON by its type, too large, slow or not
        whole."""
        most = 1024 * self.config["max_body_kb"]
        # A page of another site may send a form without asking, but not this type.
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            what = "send the body as JSON, with the header Content-Type: application/json"
            raise Refused(400, what)
        coding = http.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise Refused(415, f"Content-Encoding {coding!r} is not read; send the body as it is")
        # Its length is checked as it comes: a header may lie, or be missing.
        raw = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in http.stream():
                    raw += chunk
                    if len(raw) > most:
                        raise Refused(413, f"the body is larger than {most:,} bytes")
        except TimeoutError:
            raise Refused(408, f"the body did not come within {BODY_S} s") from None
        except ClientDisconnect:
            raise Refused(400, "the client went away") from None
        return bytes(raw)

    async def take_turn(self, raw: bytes) -> None:
        """Wait until it is the turn of a body, if it is a big one. Raise Refused if max_queue
        others wait already, and after max_seconds."""
        if len(raw) < BIG_BODY:
            return
        if self.n_big_bodies >= self.config["max_queue"]:
            raise busy()
        self.n_big_bodies += 1
        try:
            price = min(len(raw) * BYTE_S, BODY_MOST_S)
            await pay(self.big_bodies, price, self.config["max_seconds"])
        except TimeoutError:
            raise busy() from None
        finally:
            self.n_big_bodies -= 1

    def admit(self, asked: ParsedRequest, model: Model, began: float) -> Job:
        """Return a job. Raise Refused if the queue has no room for its samples."""
        n_samples, most = asked.n_samples, self.config["max_queue"]
        # Before anything is encoded: a body may hold 200,000 prompts.
        if n_samples > most:
            what = f"{n_samples} samples are asked for at once, max_queue is {most}"
            raise Refused(400, what, "n")
        if self.metrics.samples + n_samples > most:
            raise busy()
        return Job(asked, model, self.metrics, began)

    async def pieces(self, job: Job) -> AsyncIterator[dict]:
        """Hand the tokens of a job to its choices; yield what a stream says of them."""
        n_left, limit = job.left, self.config["max_seconds"]  # job.left is what is not generated
        is_first = True
        while n_left:
            try:
                async with asyncio.timeout(limit - (time.monotonic() - job.began)):
                    sample, token, turn = await self.token(job)
            except TimeoutError:
                raise Refused(504, f"the answer was not complete after {limit} s") from None
            if is_first:
                self.metrics.first_token(time.monotonic() - job.began)
            is_first = False
            self.metrics.tokens["generated"] += 1
            n_left -= bool(token.finish and not turn)
            for said in job.go_on(sample, *turn) if turn else job.push(sample, token):
                yield said

    async def token(self, job: Job) -> tuple[Sample, Token, tuple[ToolTurn, Request] | None]:
        """Return the next token of a job; with the last one of a turn that calls the server's tools
        this turn, and the request of the next one. Raise Refused if the engine could not go on."""
        event = await job.events.get()
        # A UserError is about this request; any other error ends all requests of the model.
        if isinstance(event, UserError):
            raise Refused(400, str(event).removeprefix("sample: "))
        if isinstance(event, Exception):
            raise Refused(500, "The model could not go on")
        sample, token = event
        choice = job.choices_of(sample)[0]
        n_turns = sum(turn["role"] == "assistant" for turn in choice.turns)
        # An answer that its limit cut calls nothing, nor does its last turn.
        if not job.asked.runs_tools or not token.is_end or n_turns == MAX_TURNS - 1:
            return sample, token, None
        # Tools take long, and are one process: another thread runs them, one answer at a time.
        given = self.tools, job.asked, self.config["system"], choice, sample
        run = job.loop.run_in_executor(self.tool_thread, job.model.use_tools, *given)
        return sample, token, await run

    async def whole(self, job: Job) -> dict:
        async for _ in self.pieces(job):
            pass
        choices = [choice.whole() for choice in job.choices]
        return job.head() | {"choices": choices, "usage": job.usage()}

    async def streamed(self, job: Job) -> AsyncIterator[str]:
        """Yield server-sent events. An error after the first of them is an event too."""
        asked, head = job.asked, job.head()
        head |= {"usage": None} if asked.include_usage else {}
        try:
            # A chat's choices open with a role.
            for choice in job.choices if asked.chat else ():
                delta = {"role": "assistant", "content": ""}
                opening = {"index": choice.index, "delta": delta, "finish_reason": None}
                yield sse(head | {"choices": [opening]})
            async for said in self.pieces(job):
                yield sse(head | {"choices": [said]})
            if asked.include_usage:
                yield sse(head | {"choices": [], "usage": job.usage()})
        except Refused as error:
            yield sse(error.body)
        yield "data: [DONE]\n\n"


def busy() -> Refused:
    words = "The server is busy; try again soon"
    return Refused(429, words, None, "rate_limit_exceeded")


async def or_disconnect(work: Awaitable, receive: Any) -> None:
    """Await `work`, and end it if the client goes away before."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    # Take whichever ends first, and cancel the other.
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()  # raises what it raised
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def sse(body: dict) -> str:
    """Return a server-sent event. Escape what some clients take for the end of its line."""
    text = json.dumps(body, ensure_ascii=False)
    for char in UNICODE_LINE_ENDS:
        text = text.replace(char, f"\\u{ord(char):04x}")
    return f"data: {text}\n\n"


async def error_response(http: Any, error: Exception) -> Response:
    """Return the answer to a request that failed: in OpenAI's shape, whatever the error."""
    headers = {}
    if isinstance(error, HTTPException):
        words = f"{error.detail}: {http.method} {http.url.path[:200]}"
        headers = error.headers or {}  # Allow: of a 405
        error = Refused(error.status_code, words)
    elif isinstance(error, RecursionError):
        error = Refused(400, "the body is nested too deeply")
    elif not isinstance(error, Refused):
        error = Refused(500, "The server had an error while processing your request")
    headers |= {"Retry-After": "1"} if error.status == 429 else {}
    return JSONResponse(error.body, error.status, headers)


async def pay(turns: asyncio.Lock, price: float, most: float) -> None:
    """Wait for a turn, which then lasts for `price` seconds, in the order of coming. After `most`
    seconds raise TimeoutError.

    So errors, or big bodies, get a small share of the engine's time, whatever clients send."""
    async with asyncio.timeout(most):
        await turns.acquire()
    asyncio.get_running_loop().call_later(price, turns.release)


# ---- who may ask ---------------------------------------------------------------------------------


def origins_of(value: str) -> list[str]:
    """Return the sites that the setting cors_origins names."""
    return [part.strip() for part in value.split(",") if part.strip()]


def check_config(config: dict) -> None:
    """Raise UserError for settings that would let strangers in."""
    for origin in origins_of(config["cors_origins"]):
        # A browser sends it without a path
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            what = f"must be like https://a.example, without a path, got {origin!r}"
            raise UserError(f"serve: cors_origins {what}")
    if config["host"] not in THIS_MACHINE and not config["api_key"] and not config["insecure"]:
        what = f"host={config['host']} lets other machines in"
        raise UserError(f"serve: {what}; give --api_key=SECRET, or --insecure=True")


def auth_error(scope: dict, config: dict) -> Refused | None:
    """Return why a request is not answered, None if it is."""
    headers = dict(scope["headers"])
    # Whoever has the key is answered, wherever the request comes from.
    key = config["api_key"]
    if key and scope["path"] not in ("/", "/health"):  # the page asks for the key
        # HTTP compares the word without case.
        given = re.sub(rb"(?i)\Abearer +", b"", headers.get(b"authorization", b""))
        if not hmac.compare_digest(given, key.encode()):
            words = "Incorrect API key provided; send it as Authorization: Bearer KEY"
            return Refused(401, words, None, "invalid_api_key")
    # Without a key only this machine is answered, and by its own name: a web page that gives its
    # host's name this address cannot talk to the server (DNS rebinding).
    name = headers.get(b"host", b"").decode("latin-1").lower()
    name = re.sub(r"(?<=.):\d+\Z", "", name)  # without the port
    own = (*THIS_MACHINE, config["host"].lower())
    if not key and not config["insecure"] and name not in own:
        words = f"this server answers to {config['host']}, not to {name[:80]!r}"
        return Refused(403, words)
    return None


class BoundedProtocol(H11Protocol):
    """HTTP for uvicorn with at most `most` connections without a request; see `bounded_protocol`.

    When one more comes, the oldest of them is closed: a client that sends its request at once is
    answered, however many others are silent."""

    most: int
    waiting: dict[H11Protocol, asyncio.TimerHandle]  # without a request, the oldest first
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
        self.waiting[self] = self.loop.call_later(seconds, self.transport.abort)
        if len(self.waiting) > self.most:
            oldest = next(iter(self.waiting))
            oldest.stop_waiting()  # at once: many may come before it is closed
            oldest.transport.abort()

    def stop_waiting(self) -> None:
        if timer := self.waiting.pop(self, None):
            timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self.stalled:
            self.stalled.cancel()
            self.stalled = None
        super().resume_writing()


def bounded_protocol(most: int) -> type:
    """Return the protocol of one server: its connections are counted by themselves."""
    return type("BoundedProtocol", (BoundedProtocol,), {"most": most, "waiting": {}})


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
        # A bucket counts all that came within its time, so those of shorter times, too.
        name, total = "groundup_time_to_first_token_seconds", 0
        lines.append(f"# TYPE {name} histogram")
        for most, count in zip((*TTFT_SECONDS, "+Inf"), self.waits, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{most}"}} {total}')
        return "\n".join([*lines, f"{name}_sum {self.wait_s:.6f}", f"{name}_count {total}", ""])
