"""A page to talk to a model, and a server for any OpenAI client.

python serve.py                                            # newest run, at http://127.0.0.1:8000
python serve.py --init_from=out/demo_sft --port=8001
python serve.py --init_from=sft=out/sft,dpo=out/dpo        # two models; the page compares them
python serve.py --host=0.0.0.0 --api_key=SECRET            # for other machines

It answers /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.

Here are the settings and the start. The routes are in groundup/generate/server.py, with a thread
for each model that runs its engine (groundup/generate/engine.py); requests join and leave the batch
between steps. What a body may say is in groundup/generate/openai_api.py, the page in
groundup/generate/page.html. An answer depends on its request and seed, not on other requests, and
is sample.py's for the same prompt, parameters and seed (but for near ties in bfloat16 and float16).
"""

if __name__ == "__main__":  # before the slow imports: Ctrl-C is then one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import errno
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from configurator import configure
from groundup.errors import UserError, say
from groundup.files.paths import shown_name
from groundup.generate.tools import Tools, check_template
from groundup.train import checkpoint
from groundup.train.device import choose_device, choose_dtype

# ---- config: override with a config file or --key=value; see --help ------------------------------
init_from = ""  # run, checkpoint, Hugging Face directory, or NAME=DIR,NAME=DIR; empty = newest run
host = "127.0.0.1"  # address to listen at; any but this machine's own needs api_key
port = 8000  # port to listen at; from 0 to 65535
api_key = ""  # clients send it as "Authorization: Bearer KEY"; empty = none is needed
insecure = False  # listen to other machines without api_key
cors_origins = ""  # other sites whose pages may ask: https://a.example,https://b.example; * = all
preferences = "data/preferences.jsonl"  # comparisons made on the page, for dpo.py and reward.py
max_batch = 16  # samples generated together, at least 1; the others wait
max_queue = 64  # samples that wait or are generated, at least 1; beyond them clients get a 429
max_body_kb = 1024  # of a request, at least 1
max_seconds = 600  # for a request, with its wait; at least 1
drain_seconds = 30  # after SIGTERM, for requests that run; at least 1
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

LIBRARIES = ("starlette", "uvicorn", "markdown_it", "mdit_py_plugins", "latex2mathml", "nh3")


def directories(value: str) -> dict[str, Path]:
    """Return the checkpoint of each name: "a=out/sft,b=out/dpo", or one directory, which gives
    the name of its run."""
    if "=" in value and not Path(value).exists():  # "=" may be part of a folder's name
        pairs = [part.strip().partition("=")[::2] for part in value.split(",")]
    else:
        value = value or str(checkpoint.newest_run())
        pairs = [(shown_name(Path(value).absolute().name), value)]
    if not all(map(all, pairs)) or len(dict(pairs)) < len(pairs):
        what = "must be a directory or NAME=DIR,NAME=DIR with names that differ"
        raise UserError(f"serve: init_from={value!r} {what}")
    return {name: checkpoint.resolve(path) for name, path in pairs}


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
    # The engine's thread gets the interpreter back soon from one that reads a request (usual:
    # 0.005 s).
    sys.setswitchinterval(0.0002)
    for library in LIBRARIES:
        if not find_spec(library):
            words = f"serve: {library} is missing; pip install -r requirements-serve.txt"
            raise UserError(words)
    import uvicorn

    from groundup.generate.completion import untuned
    from groundup.generate.server import KEEP_S, Model, Server, bounded_protocol, check_config

    check_config(config)
    listening = bind(host, port)
    found = directories(init_from)

    # One engine for each model
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(dtype, torch_device)
    compiled = compile and torch_device.type == "cuda"
    int8 = weights == "int8"
    settings = (torch_device, torch_dtype, max_batch, compiled, chat_template_kwargs, int8)
    models = {name: Model(name, path, *settings) for name, path in found.items()}
    toolbox = Tools(tools) if tools else None
    for name, model in models.items():
        if toolbox:
            check_template(model.tokenizer, toolbox)
        if not model.card["tuned"]:
            say(f"serve: warning: {untuned(found[name])}")
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
