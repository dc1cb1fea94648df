"""A page to talk to a model, and a server for any OpenAI client.

python serve.py                                            # newest run, at http://127.0.0.1:8000
python serve.py --init_from=out/demo_sft --port=8001
python serve.py --init_from=sft=out/sft,dpo=out/dpo        # two models; the page compares them
python serve.py --host=0.0.0.0 --api_key=SECRET            # for other machines

It answers /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.

Each model has a thread that runs its engine (generate/engine.py); requests join and leave the
batch between steps. What a body may say is in generate/openai_api.py, the page in
generate/page.html. An answer depends on its request and seed, not on other requests, and is
sample.py's for the same prompt, parameters and seed (but for near ties in bfloat16 and float16).
"""

if __name__ == "__main__":  # before the slow imports: Ctrl-C is then one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import asyncio
import contextlib
import errno
import json
import queue
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from configurator import configure
from groundup.align import reward_model
from groundup.errors import UserError
from groundup.files.paths import shown_name
from groundup.generate import page
from groundup.generate.completion import never_sampled
from groundup.generate.decode import to_int8
from groundup.generate.engine import Engine, Request, Sample, Token, check
from groundup.generate.http import (
    KEEP_S,
    THIS_MACHINE,
    Guard,
    Metrics,
    Refused,
    bounded_protocol,
    error_response,
)
from groundup.generate.openai_api import (
    Choice,
    Event,
    Job,
    ParsedRequest,
    encode,
    parse,
    shown_messages,
    template_settings,
)
from groundup.generate.rendering import Renderer
from groundup.generate.sampling import SamplingParams
from groundup.generate.tools import MAX_TURNS, Tools, ToolTurn, check_template
from groundup.train import checkpoint, huggingface
from groundup.train.device import autocast, choose_device, choose_dtype
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help ------------------------------
init_from = ""  # run, checkpoint, Hugging Face directory, or NAME=DIR,NAME=DIR; empty = newest run
host = "127.0.0.1"  # address to listen at; any but this machine's own needs api_key
port = 8000  # port to listen at
api_key = ""  # clients send it as "Authorization: Bearer KEY"; empty = none is needed
insecure = False  # listen to other machines without api_key
cors_origins = ""  # other sites whose pages may ask: https://a.example,https://b.example; * = all
preferences = "data/preferences.jsonl"  # comparisons made on the page, for dpo.py and reward.py
max_batch = 16  # samples generated together; the others wait
max_queue = 64  # samples that wait or are generated; beyond them clients get a 429
max_body_kb = 1024  # of a request
max_seconds = 600  # for a request, with its wait
drain_seconds = 30  # after SIGTERM, for requests that run
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
system = ""  # system message of every chat that has none
tools = ""  # Python file of functions that chats without tools may call; see docs/tools.md
temperature = 0.8  # this and the following: of requests that do not say
top_k = -1  # only the k likeliest tokens; -1 or 0 = off
top_p = 0.95  # only the likeliest tokens that together have this probability; 1 = off
min_p = 0.0  # only tokens at least this times as likely as the likeliest; 0 = off
repetition_penalty = 1.0  # divide logits of tokens in prompt or output (multiply if < 0); 1 = off
max_new_tokens = 1024  # tokens per sample; the end of the context ends it earlier
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16
weights = "full"  # full | int8 (matrices rounded to 8 bits: faster on a CPU)
compile = True  # on a GPU: a compiled decoding step with CUDA graphs; the start takes 20 s longer

BODY_S = 20  # for a client to send its body
UNICODE_LINE_ENDS = "\x85\u2028\u2029"
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
LIBRARIES = ("starlette", "uvicorn", "markdown_it", "mdit_py_plugins", "latex2mathml", "nh3")


class Model(threading.Thread):
    """A model and its engine, which runs in this thread; jobs come by `commands`.

    Another thread takes what it draws to the server's. To wake that one lets it run, and the engine
    would wait for it (the GIL) instead of being in step.c meanwhile."""

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
        if reward_model.is_reward_model(directory):
            what = f"{directory} is a reward model, which writes no text"
            raise UserError(f"serve: {what}; give another init_from")
        self.created = int(time.time())
        self.examples = page.examples(directory)
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
        self.commands: queue.SimpleQueue[tuple[str, Job, list[Request]]] = queue.SimpleQueue()
        self.drawn: queue.SimpleQueue[list[tuple[Job, Event]]] = queue.SimpleQueue()  # of a step

    def run(self) -> None:
        threading.Thread(target=self.hand_over, daemon=True).start()
        if self.engine.compile:  # in this thread, and before the first request
            list(self.engine.stream([0], SamplingParams(max_new_tokens=2)))
        jobs: dict[Request, Job] = {}
        while True:
            while not self.engine.busy or not self.commands.empty():
                self.handle_command(jobs, *self.commands.get())
            try:
                drawn = self.engine.step()
            except Exception as error:
                # Of the model or its device; the next requests may fare better.
                traceback.print_exc()
                self.engine.clear()
                self.drawn.put([(job, error) for job in set(jobs.values())])
                jobs.clear()
                continue
            self.drawn.put([(jobs[sample.request], (sample, token)) for sample, token in drawn])
            for sample, _ in drawn:
                if sample.last:
                    del jobs[sample.request]

    def hand_over(self) -> None:
        """Give what the engine draws to the jobs, in the server's thread."""

        def receive(events: list[tuple[Job, Event]]) -> None:
            for job, event in events:
                job.receive(event)

        while True:
            if events := self.drawn.get():
                with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
                    events[0][0].loop.call_soon_threadsafe(receive, events)

    def handle_command(
        self, jobs: dict[Request, Job], command: str, job: Job, requests: list[Request]
    ) -> None:
        for request in requests:
            if command == "cancel":
                self.engine.cancel(request)
                jobs.pop(request, None)
                continue
            try:
                self.engine.add(request)
                jobs[request] = job
            except UserError as error:  # it has no room in the memory
                self.drawn.put([(job, error)])

    @contextlib.contextmanager
    def cancelling(self, job: Job) -> Iterator[None]:
        """At the end, make the engine forget what is left of a job."""
        try:
            yield
        finally:
            if job.left:
                self.commands.put(("cancel", job, job.requests))
                job.give_back(job.left)

    def requests(self, asked: ParsedRequest, system: str) -> list[Request]:
        """Return a request for each prompt. Raise Refused if one does not fit the context."""
        every, C = encode(self.tokenizer, self.renderer, asked, system), self.cfg.block_size
        params = replace(asked.params, **self.own)
        n_new = asked.params.max_new_tokens if asked.limited else 1
        for ids in every:
            if len(ids) + n_new - 1 > C:
                words = f"This model's maximum context length is {C} tokens"
                words += f"; the prompt has {len(ids)}"
                words += f" and {n_new} more are asked for" if asked.limited else ""
                where = "messages" if asked.chat else "prompt"
                raise Refused(400, words, where, "context_length_exceeded")
        try:
            found = enumerate(every)
            return [check(i, ids, params, self.cfg, self.tokenizer) for i, ids in found]
        except UserError as error:
            raise Refused(400, str(error).removeprefix("sample: ")) from None

    def use_tools(
        self, tools: Tools, asked: ParsedRequest, system: str, choice: Choice, sample: Sample
    ) -> tuple[ToolTurn, Request] | None:
        """Run what a sample calls. Return the turn and the request of the next one; None if it
        calls nothing, or no further turn has room."""
        request, ids = sample.request, sample.ids[:-1]
        room = request.limit - len(sample.ids)
        messages = [*shown_messages(asked, system), *choice.turns]
        if asked.proceeds:  # the last message of the request is the beginning of the first turn
            *before, begun = shown_messages(asked, system)
            messages = [*before, *choice.turns]
            if not choice.turns:
                ids = self.tokenizer.encode(begun["content"]) + ids
        follow = None
        if self.renderer:
            settings = template_settings(self.tokenizer, asked.template_settings)
            follow = partial(self.renderer.render, settings=settings, follows=True)
        turn = tools.answer(self.tokenizer, messages, ids, room, follow)
        if not turn or not turn.ids:
            return None
        seed = (request.params.seed + choice.index) % 2**63  # choices may have called the same
        own = {"max_new_tokens": room - len(turn.ids), "min_new_tokens": 0, "n": 1, "seed": seed}
        params = replace(request.params, **own)
        ids = request.ids + sample.ids + turn.ids
        return turn, check(0, ids, params, self.cfg, self.tokenizer)


class Server:
    """The routes. config: the settings. tools: that the server runs."""

    def __init__(self, models: dict[str, Model], config: dict, tools: Tools | None = None) -> None:
        self.models, self.config, self.metrics = models, config, Metrics()
        self.tools, self.tool_thread = tools, ThreadPoolExecutor(1)  # one call at a time
        self.page = page.read_page()
        self.defaults = {key: config[key] for key in DEFAULTS}

    def app(self) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware.cors import CORSMiddleware
        from starlette.routing import Route

        routes = [
            Route("/", self.home),
            Route("/health", self.health),
            Route("/metrics", self.counts),
            Route("/v1/models", self.cards),
            Route("/v1/models/", self.cards),
            Route("/v1/models/{name:path}", self.one_card),
            Route("/v1/chat/completions", partial(self.answer, chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self.answer, chat=False), methods=["POST"]),
            Route("/v1/preferences", self.prefer, methods=["POST"]),
            Route("/v1/render", self.render, methods=["POST"]),
        ]

        async def failed(http: Any, error: Exception) -> Any:
            return error_response(http, error)

        handlers = {Refused: failed, HTTPException: failed, Exception: failed}
        inner = Starlette(routes=routes, exception_handlers=handlers)
        guarded = Guard(inner, {route.path for route in routes}, self.config, self.metrics)
        origins = origins_of(self.config["cors_origins"])
        cors = {"allow_origins": origins, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        cors["allow_private_network"] = True  # what a browser asks before a site reaches 127.0.0.1
        return CORSMiddleware(guarded, **cors) if origins else guarded

    async def home(self, _http: Any) -> Any:
        from starlette.responses import Response

        html, headers = self.page
        return Response(html, headers=headers, media_type="text/html")

    async def health(self, _http: Any) -> Any:
        from starlette.responses import JSONResponse

        alive = all(model.is_alive() for model in self.models.values())
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    async def counts(self, _http: Any) -> Any:
        from starlette.responses import PlainTextResponse

        engines = [model.engine for model in self.models.values()]
        running = sum(len(engine.running) + len(engine.reading) for engine in engines)
        text = self.metrics.text(running)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def cards(self, _http: Any) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({"object": "list", "data": [self.card(name) for name in self.models]})

    async def one_card(self, http: Any) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse(self.card(self.named(http.path_params["name"]).name))

    def card(self, name: str) -> dict:
        return {
            "id": name,
            "object": "model",
            "created": self.models[name].created,
            "owned_by": "groundup",
            "max_model_len": self.models[name].cfg.block_size,
            "defaults": self.defaults,
            "examples": self.models[name].examples,
        }

    def named(self, name: str) -> Model:
        """Return the model of this name; "" = the first."""
        found = self.models.get(name) if name else next(iter(self.models.values()))
        if found is None:
            words = f"The model {name[:80]!r} does not exist; there is {', '.join(self.models)}"
            raise Refused(404, words, "model", "model_not_found")
        return found

    async def prefer(self, http: Any) -> Any:
        """Keep which of two answers somebody found better."""
        from starlette.responses import JSONResponse

        raw = await read_body(http, self.config["max_body_kb"])
        row, unused = page.preference(raw, self.config["system"])
        path = Path(self.config["preferences"])
        path = path.with_suffix(".ties" + path.suffix) if unused == "tie" else path
        try:
            await asyncio.to_thread(page.append, path, row)
        except OSError as error:
            raise Refused(500, f"cannot write {path}: {error.strerror or error}") from None
        return JSONResponse({"path": str(path), "unused": unused})

    async def render(self, http: Any) -> Any:
        """Return the HTML of the Markdown of an answer."""
        from starlette.responses import JSONResponse

        raw = await read_body(http, self.config["max_body_kb"])
        return JSONResponse(await asyncio.to_thread(page.render, raw))

    async def answer(self, http: Any, chat: bool) -> Any:
        """Answer a request for text, in one piece or as a stream."""
        from starlette.responses import JSONResponse, Response, StreamingResponse

        began = time.monotonic()
        own_tools = self.tools.schemas if self.tools else None
        body = await read_body(http, self.config["max_body_kb"])
        asked = parse(body, chat, self.defaults, secrets.randbits(62), own_tools)
        model = self.named(asked.model)
        job = self.admit(asked)
        try:
            requests = await asyncio.to_thread(model.requests, asked, self.config["system"])
            job.begin(model.tokenizer, requests)
        except BaseException:
            job.give_back(job.left)
            raise
        head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model.name,
            "object": "chat.completion" if chat else "text_completion",
        }
        events = self.events(model, job, began)
        if asked.stream:
            texts = self.streamed(job, events, head)
            response = StreamingResponse(texts, media_type="text/event-stream")
            response.headers["Cache-Control"] = "no-cache"
            return CancelOnDisconnect(response, model.cancelling(job))
        with model.cancelling(job):
            body = await or_disconnect(self.whole(job, events), http.receive)
        return Response(status_code=400) if body is None else JSONResponse(head | body)

    def admit(self, asked: ParsedRequest) -> Job:
        """Return a job. Raise Refused if the queue has no room for its samples."""
        n_samples, most = asked.n_samples, self.config["max_queue"]
        if n_samples > most:
            what = f"{n_samples} samples are asked for at once, max_queue is {most}"
            raise Refused(400, what, "n")
        if self.metrics.samples + n_samples > most:
            raise Refused(429, "The server is busy; try again soon", None, "rate_limit_exceeded")
        return Job(asked, self.metrics)

    async def events(self, model: Model, job: Job, began: float) -> AsyncIterator[Event]:
        """Yield the tokens of a job, and its turns that call the server's tools."""
        n_left, first = job.left, True  # job.left counts what is generated, n_left what is taken
        self.metrics.tokens["prompt"] += job.n_prompt
        limit = self.config["max_seconds"]
        model.commands.put(("add", job, list(job.requests)))
        while n_left:
            try:
                async with asyncio.timeout(limit - (time.monotonic() - began)):
                    event = await self.event(model, job)
            except TimeoutError:
                raise Refused(504, f"the answer was not complete after {limit} s") from None
            if isinstance(event, UserError):
                raise Refused(400, str(event).removeprefix("sample: "))
            if isinstance(event, Exception):
                raise Refused(500, "The model could not go on")
            if first:
                self.metrics.first_token(time.monotonic() - began)
            first = False
            self.metrics.tokens["generated"] += 1
            n_left -= isinstance(event[1], Token) and bool(event[1].finish)
            yield event

    async def event(self, model: Model, job: Job) -> Event:
        """Return the next token of a job, or a turn whose last token it is."""
        event = await job.events.get()
        if isinstance(event, Exception) or not job.asked.runs_tools:
            return event
        sample, token = event
        choice = job.choices_of(sample)[0]
        n_turns = sum(turn["role"] == "assistant" for turn in choice.turns)
        if not token.is_end or n_turns == MAX_TURNS - 1:
            return event
        given = self.tools, job.asked, self.config["system"], choice, sample
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self.tool_thread, model.use_tools, *given)
        if not found:
            return event
        _, request = found
        job.go_on(request)
        model.commands.put(("add", job, [request]))
        return sample, found

    async def whole(self, job: Job, events: AsyncIterator[Event]) -> dict:
        async for event in events:
            job.push(*event)
        return {"choices": [choice.whole() for choice in job.choices], "usage": job.usage()}

    async def streamed(
        self, job: Job, events: AsyncIterator[Event], head: dict
    ) -> AsyncIterator[str]:
        """Yield server-sent events. An error after the first of them is an event too."""
        asked = job.asked
        head = head | {"object": "chat.completion.chunk" if asked.chat else "text_completion"}
        head |= {"usage": None} if asked.include_usage else {}
        try:
            for choice in job.choices if asked.chat else ():
                delta = {"role": "assistant", "content": ""}
                opening = {"index": choice.index, "delta": delta, "finish_reason": None}
                yield sse(head | {"choices": [opening]})
            async for event in events:
                for said in job.push(*event):
                    yield sse(head | {"choices": [said]})
            if asked.include_usage:
                yield sse(head | {"choices": [], "usage": job.usage()})
        except Refused as error:
            yield sse(error.body)
        yield "data: [DONE]\n\n"


async def read_body(http: Any, max_kb: int) -> bytes:
    """Return the body. Raise Refused if it is not JSON by its type, too large, slow or not
    whole."""
    from starlette.requests import ClientDisconnect

    most = 1024 * max_kb
    # A page of another site may send a form without asking, but not this type.
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        what = "send the body as JSON, with the header Content-Type: application/json"
        raise Refused(400, what)
    coding = http.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise Refused(415, f"Content-Encoding {coding!r} is not read; send the body as it is")
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


class CancelOnDisconnect:
    """A stream that ends when its client goes away, also while it waits for a token."""

    def __init__(self, response: Any, cancelling: contextlib.AbstractContextManager) -> None:
        self.response, self.cancelling = response, cancelling

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        with self.cancelling:
            await or_disconnect(self.response.stream_response(send), receive)


async def or_disconnect(work: Awaitable, receive: Any) -> Any:
    """Return what `work` does, None if the client goes away before."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
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


# ---- the start -----------------------------------------------------------------------------------


def directories(value: str) -> dict[str, Path]:
    """Return the checkpoint of each name: "a=out/sft,b=out/dpo", or one directory, which gives
    the name of its run."""
    if "=" not in value or Path(value).exists():  # "=" may be part of a folder's name
        value = value or str(checkpoint.newest_run())
        return {shown_name(Path(value).absolute().name): checkpoint.resolve(value)}
    pairs = [part.strip().partition("=")[::2] for part in value.split(",")]
    if not all(map(all, pairs)) or len(dict(pairs)) < len(pairs):
        what = "must be a directory or NAME=DIR,NAME=DIR with names that differ"
        raise UserError(f"serve: init_from={value!r} {what}")
    return {name: checkpoint.resolve(path) for name, path in pairs}


def origins_of(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def check_config(config: dict) -> None:
    for key in ("max_batch", "max_queue", "max_body_kb", "max_seconds", "drain_seconds"):
        if config[key] < 1:
            raise UserError(f"serve: {key} must be at least 1, got {config[key]}")
    if not 0 <= config["port"] < 2**16:
        raise UserError(f"serve: port must be from 0 to 65535, got {config['port']}")
    for origin in origins_of(config["cors_origins"]):
        # A browser sends it without a path
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            what = f"must be like https://a.example, without a path, got {origin!r}"
            raise UserError(f"serve: cors_origins {what}")
    if config["host"] not in THIS_MACHINE and not config["api_key"] and not config["insecure"]:
        what = f"host={config['host']} lets other machines in"
        raise UserError(f"serve: {what}; give --api_key=SECRET, or --insecure=True")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket of this address, before the models are loaded. Raise UserError if another
    program has it."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), port))
    except OSError as error:
        what = f"cannot listen at {host}:{port}: {error.strerror}"
        hint = "give an address of this machine as --host"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            # Those below 1024 are for root alone.
            hint = f"try --port={port + 1 if 1024 <= port < 65535 else 8000}"
        raise UserError(f"serve: {what}; {hint}") from None
    return listening


def url_of(listening: socket.socket) -> str:
    """Return the address that a browser takes; with port=0 the system has chosen the port."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    config = configure(globals())
    check_config(config)
    for library in LIBRARIES:
        if not find_spec(library):
            words = f"serve: {library} is missing; pip install -r requirements-serve.txt"
            raise UserError(words)
    import uvicorn

    listening = bind(host, port)
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(dtype, torch_device)
    found = directories(init_from)
    compiled = compile and torch_device.type == "cuda"
    int8 = weights == "int8"
    settings = (torch_device, torch_dtype, max_batch, compiled, chat_template_kwargs, int8)
    models = {name: Model(name, path, *settings) for name, path in found.items()}
    toolbox = Tools(tools) if tools else None
    for model in models.values():
        if toolbox:
            check_template(model.tokenizer, toolbox)
        model.start()
    print(f"serving {', '.join(models)} at {url_of(listening)} (API: /v1)", file=sys.stderr)
    how = uvicorn.Config(
        Server(models, config, toolbox).app(),
        log_level="warning",
        server_header=False,
        limit_concurrency=4 * max_queue,
        timeout_graceful_shutdown=drain_seconds,
        timeout_keep_alive=KEEP_S,
        http=bounded_protocol(2 * max_queue),
    )
    try:
        uvicorn.Server(how).run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn has let the answers under way come to their end
        print("serve: stopped", file=sys.stderr)
    finally:
        if toolbox:  # the thread that waits for a tool would hold up the end
            toolbox.close()
