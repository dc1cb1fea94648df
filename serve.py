"""A page to talk to a model, and a server for any OpenAI client: /v1/chat/completions,
/v1/completions, /v1/models, /health, /metrics.

python serve.py                                            # the newest run, at http://127.0.0.1:8000
python serve.py --init_from=out/demo_sft --port=8001
python serve.py --init_from=sft=out/sft,dpo=out/dpo        # two models, by these names; the page compares them
python serve.py --host=0.0.0.0 --api_key=SECRET            # for other machines

Each model has a thread that runs its engine (generate/engine.py); requests come and go between
two tokens. What a body may say is in generate/openai_format.py, the page in generate/page.html.
An answer depends on its request and seed, not on other requests, and is sample.py's for the same
prompt, parameters and seed (but for near ties in bfloat16 and float16).
"""

if __name__ == "__main__":  # before the slow imports: Ctrl-C is then one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import asyncio
import contextlib
import hmac
import json
import queue
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configurator import configure
from groundup.align import reward_model
from groundup.errors import UserError
from groundup.generate import page
from groundup.generate.completion import Request, Sample, Token, check, never_sampled
from groundup.generate.engine import Engine
from groundup.generate.metrics import Metrics
from groundup.generate.openai_format import Asked, Choice, Refused, encode, parse, usage
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
max_queue = (
    64  # samples that wait or are generated; beyond them clients are told to come back (429)
)
max_body_kb = 1024  # of a request
max_seconds = 600  # for a request, with its wait
drain_seconds = 30  # after SIGTERM, for requests that run
system = ""  # system message of every chat that has none
temperature = 0.8  # this and the following: of requests that do not say
top_k = -1  # only the k likeliest tokens; -1 or 0 = off
top_p = 0.95  # only the likeliest tokens that together have this probability; 1 = off
min_p = 0.0  # only tokens at least this times as likely as the likeliest; 0 = off
repetition_penalty = 1.0  # divide logits of tokens in prompt or output (multiply if < 0); 1 = off
max_new_tokens = 1024  # tokens per sample; the end of the context ends it earlier
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
BODY_SECONDS = 20  # for a client to send its body
KEEP_SECONDS = 30  # of an idle connection: clients that drop it after 5, as httpx does, never use it as it closes
HERE = ("127.0.0.1", "localhost", "::1", "[::1]")

Event = tuple[Sample, Token, dict[int, float]] | Exception


class Job:
    """The requests of one HTTP request (one for each prompt), and what the engine says of them."""

    def __init__(self, requests: list[Request], loop: asyncio.AbstractEventLoop) -> None:
        self.requests, self.loop = requests, loop
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    def send(self, event: Event) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Model(threading.Thread):
    """A model and its engine, which runs in this thread; jobs come by `commands`."""

    def __init__(
        self, name: str, directory: Path, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        super().__init__(name=name, daemon=True)
        if reward_model.is_reward_model(directory):
            raise UserError(
                f"serve: {directory} is a reward model, which writes no text; give another init_from"
            )
        self.created = int(time.time())
        self.tokenizer = Tokenizer.load(huggingface.tokenizer_dir(directory))
        net = huggingface.load_model(directory, device, dtype=dtype)
        with autocast(device, dtype):
            self.engine = Engine(net, self.tokenizer, rows)
        self.cfg = net.cfg
        self.own = {
            "eos_ids": self.tokenizer.stop_ids,
            "banned_ids": never_sampled(self.tokenizer, net.cfg.vocab_size),
        }
        self.commands: queue.SimpleQueue[tuple[str, Job]] = queue.SimpleQueue()

    def run(self) -> None:
        jobs: dict[Request, Job] = {}
        while True:
            while not self.engine.busy or not self.commands.empty():
                self.obey(jobs, *self.commands.get())
            try:
                drawn = self.engine.step()
            except (
                Exception
            ) as error:  # of the model or its device; the next requests may fare better
                traceback.print_exc()
                self.engine.clear()
                for job in set(jobs.values()):
                    job.send(error)
                jobs.clear()
                continue
            for sample, token in drawn:
                jobs[sample.request].send((sample, token, sample.logprobs[-1]))
                if sample.last:
                    del jobs[sample.request]

    def obey(self, jobs: dict[Request, Job], command: str, job: Job) -> None:
        for request in job.requests:
            if command == "cancel":
                self.engine.cancel(request)
                jobs.pop(request, None)
                continue
            try:
                self.engine.add(request)
                jobs[request] = job
            except UserError as error:  # it has no room in the memory
                job.send(error)

    def requests(self, asked: Asked, system: str) -> list[Request]:
        """Return a request for each prompt. Raise Refused with the numbers if one does not fit
        the context."""
        every, C = encode(self.tokenizer, asked, system), self.cfg.block_size
        params = replace(asked.params, **self.own)
        for ids in every:
            n_new = asked.params.max_new_tokens if asked.limited else 1
            if len(ids) + n_new - 1 > C:
                words = (
                    f"This model's maximum context length is {C} tokens; the prompt has {len(ids)}"
                )
                words += f" and {n_new} more are asked for" if asked.limited else ""
                raise Refused(
                    400, words, "messages" if asked.chat else "prompt", "context_length_exceeded"
                )
        try:
            return [check(i, ids, params, self.cfg, self.tokenizer) for i, ids in enumerate(every)]
        except UserError as error:
            raise Refused(400, str(error).removeprefix("sample: ")) from None


class Server:
    """The routes. config: the settings."""

    def __init__(self, models: dict[str, Model], config: dict) -> None:
        self.models, self.config, self.metrics = models, config, Metrics()
        self.defaults = {key: config[key] for key in DEFAULTS}

    def app(self) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware.cors import CORSMiddleware
        from starlette.responses import JSONResponse, PlainTextResponse, Response
        from starlette.routing import Route

        html, page_headers = page.read_page()

        async def home(_http: Any) -> Any:
            return Response(html, headers=page_headers, media_type="text/html")

        async def refused(http: Any, error: Exception) -> Any:
            if isinstance(error, HTTPException):
                error = Refused(
                    error.status_code, f"{error.detail}: {http.method} {http.url.path[:200]}"
                )
            elif not isinstance(error, Refused):
                error = Refused(500, "The server had an error while processing your request")
            return JSONResponse(
                error.body, error.status, {"Retry-After": "1"} if error.status == 429 else None
            )

        async def health(_http: Any) -> Any:
            alive = all(model.is_alive() for model in self.models.values())
            return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

        async def metrics(_http: Any) -> Any:
            engines = [model.engine for model in self.models.values()]
            running = sum(len(engine.running) + len(engine.reading) for engine in engines)
            return PlainTextResponse(
                self.metrics.text(running), media_type="text/plain; version=0.0.4"
            )

        async def models(_http: Any) -> Any:
            return JSONResponse({
                "object": "list",
                "data": [self.card(name) for name in self.models],
            })

        async def model(http: Any) -> Any:
            return JSONResponse(self.card(self.named(http.path_params["name"]).name))

        routes = [
            Route("/", home),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/preferences", self.prefer, methods=["POST"]),
        ]
        handlers = {Refused: refused, HTTPException: refused, Exception: refused}
        inner = Starlette(routes=routes, exception_handlers=handlers)
        paths = {route.path for route in routes}

        async def guarded(scope: dict, receive: Any, send: Any) -> None:
            """Check who asks, and count the answers."""
            if scope["type"] != "http":
                return await inner(scope, receive, send)

            async def counted(message: dict) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if scope["path"] in paths else "other"
                    self.metrics.requests[path, message["status"]] += 1
                await send(message)

            error = self.stranger(scope)
            if error is None:
                return await inner(scope, receive, counted)
            return await JSONResponse(error.body, error.status)(scope, receive, counted)

        origins = origins_of(self.config["cors_origins"])
        cors = {"allow_origins": origins, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        return CORSMiddleware(guarded, **cors) if origins else guarded

    def stranger(self, scope: dict) -> Refused | None:
        """Return what is wrong with who asks. Without a key only this machine is answered, and
        by its own name: a web page that gives its host's name this address cannot talk to the
        server (DNS rebinding)."""
        headers = dict(scope["headers"])
        key = self.config["api_key"]
        if key and scope["path"] not in ("/", "/health"):  # the page asks for the key
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, key.encode()):
                words = "Incorrect API key provided; send it as Authorization: Bearer KEY"
                return Refused(401, words, None, "invalid_api_key")
        name = headers.get(b"host", b"").decode("latin-1").rpartition(":")
        name = name[0] if name[0] and name[2].isdigit() else "".join(name)
        if not key and not self.config["insecure"] and name not in (*HERE, self.config["host"]):
            return Refused(
                403, f"this server answers to {self.config['host']}, not to {name[:80]!r}"
            )
        return None

    def card(self, name: str) -> dict:
        return {
            "id": name,
            "object": "model",
            "created": self.models[name].created,
            "owned_by": "groundup",
            "max_model_len": self.models[name].cfg.block_size,
            "defaults": self.defaults,
        }

    def named(self, name: str) -> Model:
        """Return the model of this name; "" = the first."""
        found = self.models.get(name) if name else next(iter(self.models.values()))
        if found is None:
            words = f"The model {name[:80]!r} does not exist; there is {', '.join(self.models)}"
            raise Refused(404, words, "model", "model_not_found")
        return found

    async def chat(self, http: Any) -> Any:
        return await self.answer(http, chat=True)

    async def completions(self, http: Any) -> Any:
        return await self.answer(http, chat=False)

    async def prefer(self, http: Any) -> Any:
        """Keep which of two answers somebody found better."""
        from starlette.responses import JSONResponse

        row, unused = page.preference(await self.read_body(http), self.config["system"])
        path = Path(self.config["preferences"])
        path = path.with_suffix(".ties" + path.suffix) if unused == "tie" else path
        try:
            await asyncio.to_thread(page.append, path, row)
        except OSError as error:
            raise Refused(500, f"cannot write {path}: {error.strerror or error}") from None
        return JSONResponse({"path": str(path), "unused": unused})

    async def answer(self, http: Any, chat: bool) -> Any:
        """Answer a request for text, in one piece or as a stream."""
        from starlette.responses import JSONResponse, Response, StreamingResponse

        began = time.monotonic()
        asked = parse(await self.read_body(http), chat, self.defaults, secrets.randbits(62))
        model = self.named(asked.model)
        requests = await asyncio.to_thread(model.requests, asked, self.config["system"])
        n_samples, most = len(requests) * asked.params.n, self.config["max_queue"]
        if n_samples > most:
            raise Refused(
                400, f"{n_samples} samples are asked for at once, max_queue is {most}", "n"
            )
        if self.metrics.samples + n_samples > most:
            raise Refused(429, "The server is busy; try again soon", None, "rate_limit_exceeded")
        job = Job(requests, asyncio.get_running_loop())
        head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model.name,
            "object": "chat.completion" if chat else "text_completion",
        }
        events = self.events(model, job, n_samples, began)
        if asked.stream:
            response = StreamingResponse(
                self.streamed(model, asked, job, events, head), media_type="text/event-stream"
            )
            response.headers["Cache-Control"] = "no-cache"
            return Watched(response, events)
        async with contextlib.aclosing(events):
            body = await unless_gone(self.whole(model, asked, job, events), http.receive)
        return Response(status_code=400) if body is None else JSONResponse(head | body)

    async def read_body(self, http: Any) -> bytes:
        """Return the body. Raise Refused if it is not JSON by its type, too large, slow or not
        whole."""
        from starlette.requests import ClientDisconnect

        most = 1024 * self.config["max_body_kb"]
        # A page of another site may send a form without asking, but not this type.
        if (
            http.headers.get("content-type", "").partition(";")[0].strip().lower()
            != "application/json"
        ):
            raise Refused(
                400, "send the body as JSON, with the header Content-Type: application/json"
            )
        raw = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in http.stream():
                    raw += chunk
                    if len(raw) > most:
                        raise Refused(413, f"the body is larger than {most:,} bytes")
        except TimeoutError:
            raise Refused(408, f"the body did not come within {BODY_SECONDS} s") from None
        except ClientDisconnect:
            raise Refused(400, "the client went away") from None
        return bytes(raw)

    async def events(
        self, model: Model, job: Job, n_samples: int, began: float
    ) -> AsyncIterator[Event]:
        """Yield the tokens of a job. When this is closed, the engine forgets what is left of it."""
        left, first = n_samples, True
        self.metrics.tokens["prompt"] += sum(len(request.ids) for request in job.requests)
        self.metrics.samples += n_samples
        try:
            model.commands.put(("add", job))
            while left:
                try:
                    remaining = self.config["max_seconds"] - (time.monotonic() - began)
                    event = await asyncio.wait_for(job.events.get(), remaining)
                except TimeoutError:
                    raise Refused(
                        504, f"the answer was not complete after {self.config['max_seconds']} s"
                    ) from None
                if isinstance(event, UserError):
                    raise Refused(400, str(event).removeprefix("sample: "))
                if isinstance(event, Exception):
                    raise Refused(500, "The model could not go on")
                if first:
                    self.metrics.first_token(time.monotonic() - began)
                first = False
                self.metrics.tokens["generated"] += 1
                left -= bool(event[1].finish)
                yield event
        finally:
            self.metrics.samples -= n_samples
            if left:
                model.commands.put(("cancel", job))

    async def whole(
        self, model: Model, asked: Asked, job: Job, events: AsyncIterator[Event]
    ) -> dict:
        n, n_new = asked.params.n, 0
        choices = [Choice(model.tokenizer, asked, i) for i in range(len(job.requests) * n)]
        async for sample, token, logprobs in events:
            choices[sample.request.index * n + sample.index].push(
                token, logprobs, ends(sample, token)
            )
            n_new += 1
        n_prompt = sum(len(request.ids) for request in job.requests)
        answers = []
        for choice in choices:
            request = job.requests[choice.index // n]
            prompt = model.tokenizer.decode(request.ids) if asked.echo else ""
            answers.append(choice.whole(prompt, request.prompt_logprobs if asked.echo else None))
        return {"choices": answers, "usage": usage(n_prompt, n_new)}

    async def streamed(
        self, model: Model, asked: Asked, job: Job, events: AsyncIterator[Event], head: dict
    ) -> AsyncIterator[str]:
        """Yield server-sent events. An error after the first of them is an event too."""
        head = head | {"object": "chat.completion.chunk" if asked.chat else "text_completion"}
        head |= {"usage": None} if asked.include_usage else {}
        n, n_new = asked.params.n, 0
        choices = [Choice(model.tokenizer, asked, i) for i in range(len(job.requests) * n)]
        try:
            for choice in choices if asked.chat else ():
                delta = {"role": "assistant", "content": ""}
                yield sse(
                    head
                    | {"choices": [{"index": choice.index, "delta": delta, "finish_reason": None}]}
                )
            async for sample, token, logprobs in events:
                n_new += 1
                place = sample.request.index * n + sample.index
                said = choices[place].push(token, logprobs, ends(sample, token))
                if said:
                    yield sse(head | {"choices": [said]})
            if asked.include_usage:
                n_prompt = sum(len(request.ids) for request in job.requests)
                yield sse(head | {"choices": [], "usage": usage(n_prompt, n_new)})
        except Refused as error:
            yield sse(error.body)
        yield "data: [DONE]\n\n"


class Watched:
    """A stream that ends when its client goes away, also while it waits for a token."""

    def __init__(self, response: Any, events: Any) -> None:
        self.response, self.events = response, events

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self.events):
            await unless_gone(self.response.stream_response(send), receive)


async def unless_gone(work: Awaitable, receive: Any) -> Any:
    """Return what `work` does, None if the client goes away before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ends(sample: Sample, token: Token) -> bool:
    """Return whether the token is the id that ends the text, which is not part of it."""
    return token.finish == "stop" and token.id in sample.request.params.stop_ids


def sse(body: dict) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def directories(value: str) -> dict[str, Path]:
    """Return the checkpoint of each name: "a=out/sft,b=out/dpo", or one directory, which gives
    the name of its run."""
    if "=" not in value:
        value = value or str(checkpoint.newest_run())
        return {Path(value).absolute().name: checkpoint.resolve(value)}
    pairs = [part.strip().partition("=") for part in value.split(",")]
    if not all(name and path for name, _, path in pairs) or len({pair[0] for pair in pairs}) < len(
        pairs
    ):
        raise UserError(
            f"serve: init_from={value!r} must be a directory or NAME=DIR,NAME=DIR with names that differ"
        )
    return {name: checkpoint.resolve(path) for name, _, path in pairs}


def origins_of(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def check_config(config: dict) -> None:
    for key in ("max_batch", "max_queue", "max_body_kb", "max_seconds", "drain_seconds"):
        if config[key] < 1:
            raise UserError(f"serve: {key} must be at least 1, got {config[key]}")
    if not 0 <= config["port"] < 2**16:
        raise UserError(f"serve: port must be from 0 to 65535, got {config['port']}")
    for origin in origins_of(config["cors_origins"]):
        if origin != "*" and not re.fullmatch(
            r"https?://[^/\s]+", origin
        ):  # a browser sends it without a path
            raise UserError(
                f"serve: cors_origins must be like https://a.example, without a path, got {origin!r}"
            )
    if config["host"] not in HERE and not config["api_key"] and not config["insecure"]:
        raise UserError(
            f"serve: host={config['host']} lets other machines in; give --api_key=SECRET, or --insecure=True"
        )


def bind(host: str, port: int) -> socket.socket:
    """Return a socket of this address, before the models are loaded. Raise UserError if another
    program has it."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise UserError(
            f"serve: cannot listen at {host}:{port}: {error.strerror}; try --port={port + 1}"
        ) from None
    return listening


if __name__ == "__main__":
    config = configure(globals())
    check_config(config)
    try:
        import starlette  # noqa: F401  (Server.app imports it)
        import uvicorn
    except ImportError:
        raise UserError(
            "serve: this needs two libraries; pip install -r requirements-serve.txt"
        ) from None
    listening = bind(host, port)
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(dtype, torch_device)
    found = directories(init_from)
    models = {
        name: Model(name, path, torch_device, torch_dtype, max_batch)
        for name, path in found.items()
    }
    for model in models.values():
        model.start()
    print(f"serving {', '.join(models)} at http://{host}:{port} (API: /v1)", file=sys.stderr)
    how = uvicorn.Config(
        Server(models, config).app(),
        log_level="warning",
        server_header=False,
        limit_concurrency=4 * max_queue,
        timeout_graceful_shutdown=drain_seconds,
        timeout_keep_alive=KEEP_SECONDS,
    )
    try:
        uvicorn.Server(how).run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn has let the answers under way come to their end
        print("serve: stopped", file=sys.stderr)
