"""The benchmark: every measurement with its peer beside it and with what this machine allows, in one table.

    OMP_NUM_THREADS=2 python tools/bench.py --quick=True                                    # every row, about a minute
    OMP_NUM_THREADS=2 python tools/bench.py --nanogpt=../nanoGPT --out=bench.json           # a checkout of nanoGPT
    python tools/bench.py --rows=train --compile=none,blocks,whole,whole:max-autotune       # on a GPU: what pays there

Sides take turns after a warm-up; a line gives the median of the repeats, their spread, (most - least) / median, and how
many times as fast as each peer ours is: median, least and most of the rounds. "of limit" is the share of what the
machine allows, measured in the same turns: train, the matrix products in the same dtype; ddp, the step without
communication; generate, reading weights and cache once per token; checkpoint, the bare disk. For memory it is the peak
against the printed estimate, for startup the time against what was promised. The seconds of tokenize and dedup are
those of the processor, of bpe both; so are those of train and generate on a CPU with one thread (OMP_NUM_THREADS=1).
A row that fails is a line with the error, the others go on, and the exit status is 1.
tools/bench_*.py measure the same subjects, and tuning (bench_sft.py, bench_dpo.py), in more cases.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import timing
from timing import ROOT, Line

from configurator import configure
from groundup.errors import UserError

# ---- config ---------------------------------------------------------------------------------------------------------
rows = "all"  # all, or some of train,ddp,generate,tokenize,bpe,dedup,checkpoint,startup
quick = False  # small cases, nothing compiled, three repeats, where the keys below leave the choice
out = ""  # JSON file with all samples; "" = none
repeats = 0  # of each side; 0 = 3 with quick and for generate, bpe, checkpoint and startup, else 7
shapes = "auto"  # train: some of tiny,10M,25M,124M,350M,1.1B; auto = 10M with quick, up to 124M on a CPU, else all
tokens = 0  # train: in a step; 0 = 1024 with quick, 4096 on a CPU, else 16384
optimizer = "adamw,muon"  # train, ours: adamw, muon or both
compile = "auto"  # train, ours: some of none,blocks,whole; these two also with :max-autotune, :reduce-overhead (GPU)
nanogpt = ""  # train: checkout of karpathy/nanoGPT; "" = without
input = ""  # tokenize, bpe: corpora by name, en:books/*.txt,zh:poems/*.json; "" = prose and code of Python
checkpoint_dir = "out"  # checkpoint: where it is written for a while, on the disk that is meant; it is removed
memory = "auto"  # train: the peak of a process beside the printed estimate: True | False | auto = unless quick
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # train, generate: auto | float32 | bfloat16

PROMISED_S = {"tokenizer.py --help": 0.5, "prepare.py --help": 0.5, "pretrain.py, first step": 6.0}  # other --help: 2


def few(n: int) -> int:
    """How often what takes long is repeated: at most three times, unless somebody has said how often."""
    return n if repeats else min(n, 3)


def train(n: int, folder: Path) -> Iterator[Line]:
    """Tokens/s of a training step beside transformers and nanoGPT; memory beside the estimate."""
    import bench_train

    from groundup.train import device

    torch_device = device.choose_device(device)
    on_gpu = torch_device.type == "cuda"
    options = bench_train.Options(
        torch_device, device.choose_dtype(dtype, torch_device), n,
        n_tokens=tokens or (1024 if quick else 16384 if on_gpu else 4096),
        optimizers=optimizer.split(","),
        compiles=bench_train.parse_compile(("none" if quick else "none,blocks") if compile == "auto" else compile),
        nanogpt=nanogpt,
    )  # fmt: skip
    names = list(bench_train.SHAPES)
    if shapes != "auto":
        chosen = shapes.split(",")
    else:
        chosen = names[1:2] if quick else names[1:] if on_gpu else names[1:4]
    with_memory = not quick if memory == "auto" else memory == "True"
    yield from bench_train.measure(chosen, options, with_memory, folder)


def ddp(n: int, folder: Path) -> Iterator[Line]:
    """Steps of two processes over loopback, one thread each, beside torch DDP; the limit is a step without exchange."""
    found, steps, cases = folder / "ddp.json", 1 if quick else 3, "compute,torch,ours" + (",forward" * (not quick))
    flags = [f"--rounds={n}", f"--steps={steps}", "--mbit=0", f"--cases={cases}", f"--out={found}"]
    done = subprocess.run([sys.executable, ROOT / "tools/bench_ddp.py", *flags], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"bench: bench_ddp.py: status {done.returncode}: {done.stderr.strip()[-300:]!r}")
    cases = json.loads(found.read_text(encoding="utf-8"))["cases"]
    seconds = {key: [ms / 1e3 for ms in case["ms"]] for key, case in cases.items() if key != "compute"}
    names = {"torch": "torch DDP", "ours": "ours", "forward": "ours, step in forward"}
    seconds = {names[key]: times for key, times in seconds.items()}
    limit = 1 / (cases["compute"]["median"] / 1e3)
    yield from timing.lines("ddp", "7M, 2 ranks x 4 x 128", seconds, "step/s", ["torch DDP"], 1, limit)


def generate(n: int, folder: Path) -> Iterator[Line]:
    """Tokens/s of greedy generation beside transformers."""
    import bench_generate

    from groundup.train import device

    torch_device = device.choose_device(device)
    torch_dtype = device.choose_dtype(dtype, torch_device)
    kinds = ["static", "compiled"] if torch_device.type == "cuda" and not quick else ["static"]
    for shape in ["26M"] if quick else ["26M", "124M"]:
        for batch in [1] if quick else [1, 8]:
            yield from bench_generate.compare(
                shape, batch, torch_dtype, torch_device, few(n), new_tokens=32 if quick else 128, prompt_tokens=16,
                kinds=kinds, compiled=not quick,
            )  # fmt: skip


def corpora(folder: Path, most_mb: float) -> Iterator[tuple[str, Path]]:
    """(name and size, JSON file of the texts) of `input`."""
    import bench_tokenizer

    found = bench_tokenizer.named_corpora(input, "text") if input else bench_tokenizer.python_corpora()
    for name, texts in list(found.items())[: 1 if quick else None]:
        path = folder / f"{name}.json"
        yield f"{name} {bench_tokenizer.write_corpus(texts, path, most_mb):.1f} MB", path


def tokenize(n: int, folder: Path) -> Iterator[Line]:
    """Encoding beside tiktoken alone and beside Hugging Face's tokenizers; the ids are compared first."""
    import bench_tokenizer

    import tokenizer

    size = 2048 if quick else 32768
    for case, path in corpora(folder, 0.5 if quick else 5.0):
        texts = json.loads(path.read_text(encoding="utf-8"))
        tokenizer.train(texts, size).save(folder / path.stem)
        yield from bench_tokenizer.compare_encoding(f"{case}, {size} ids", texts, folder / path.stem, n)


def bpe(n: int, folder: Path) -> Iterator[Line]:
    """Training a tokenizer beside Hugging Face's and sentencepiece, each in a process of its own."""
    import bench_tokenizer

    size, n_threads = 2048 if quick else 32768, [1] if quick else [1, 2]
    for case, path in corpora(folder, 0.5 if quick else 10.0):
        yield from bench_tokenizer.compare(f"{case}, {size} ids", path, size, n_threads, few(n))


def dedup(n: int, folder: Path) -> Iterator[Line]:
    """Near duplicates beside the usual loop of datasketch; the survivors are compared first."""
    import bench_data

    languages = {"English": (bench_data.python_docs(), 2000), "Chinese": (bench_data.chinese_text(), 600)}
    for language, (texts, size) in languages.items():
        if cut := bench_data.pieces(texts, size, 100 if quick else 500):
            yield from bench_data.language_lines(language, cut, n)


def checkpoint(n: int, folder: Path) -> Iterator[Line]:
    """Saving and loading a training state beside torch.save and the bare disk."""
    import bench_checkpoint
    import bench_train

    import tokenizer

    shape = "10M" if quick else "124M"
    Path(checkpoint_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkpoint_dir) as place:
        learnt = tokenizer.train(["Three letters, and a few more: abc."], 384)
        yield from bench_checkpoint.measure(shape, bench_train.SHAPES[shape], learnt, few(n), Path(place))


def startup(n: int, folder: Path) -> Iterator[Line]:
    """Seconds until --help has answered, and until the first step of a debug run, beside `import torch`."""
    import prepare

    texts = {path.stem: path.read_text("utf-8") for path in sorted(ROOT.glob("*.py"))}
    scripts = [name for name, text in texts.items() if '\nif __name__ == "__main__":' in text]
    commands = {"import torch": [sys.executable, "-c", "import torch"]}
    for name in ["tokenizer"] if quick else scripts:
        commands[f"{name}.py --help"] = [sys.executable, str(ROOT / f"{name}.py"), "--help"]
    quiet = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    sides = {name: partial(timing.wall_seconds, partial(quiet, command)) for name, command in commands.items()}
    debug = [sys.executable, "pretrain.py", "config/debug.py", "--max_steps=1", "--log_every=1", "--resume=never"]
    debug += ["--overwrite=True", f"--data_dir={folder / 'debug'}", f"--out_dir={folder / 'run'}"]
    sides["pretrain.py, first step"] = lambda: timing.until_line(debug, "step      1/")[0]
    with contextlib.redirect_stdout(io.StringIO()):  # before the clock runs
        prepare.make_debug_data(folder / "debug")
    seconds = timing.alternate(sides, few(n), warmups=0 if quick else 1)
    for line in timing.lines("startup", "a fresh process", seconds, "s", ["import torch"]):
        line.limit = PROMISED_S.get(line.side, 2.0 if "--help" in line.side else 0.0)
        yield line


ROWS = {row.__name__: row for row in (train, ddp, generate, tokenize, bpe, dedup, checkpoint, startup)}


def check() -> list[str]:
    """The names of the rows that are asked for. Raises ConfigError, SetupError, DataError for a value that cannot be
    used."""
    import bench_tokenizer
    import bench_train

    from groundup.train import device

    names = list(ROWS) if rows == "all" else rows.split(",")
    for key, value, allowed in [
        *(("rows", name, ROWS) for name in names),
        *(("optimizer", name, ("adamw", "muon")) for name in optimizer.split(",")),
        *(("shapes", name, bench_train.SHAPES) for name in shapes.split(",") if shapes != "auto"),
        ("memory", memory, ("auto", "True", "False")),
        ("dtype", dtype, ("auto", "float32", "bfloat16")),
    ]:
        if value not in allowed:
            raise UserError(f"config: {key}={value!r} is none of {', '.join(allowed)}")
    if min(repeats, tokens) < 0:
        raise UserError(f"config: {repeats=} and {tokens=} must not be negative")
    if nanogpt and not Path(nanogpt, "model.py").exists():
        raise UserError(f"config: nanogpt={nanogpt!r} holds no model.py; give a checkout of karpathy/nanoGPT")
    if compile != "auto":
        bench_train.parse_compile(compile)
    if input:
        bench_tokenizer.named_corpora(input, "text")
    device.choose_device(device)
    return names


def machine() -> str:
    """What the figures were measured on."""
    import torch

    from groundup.train import device

    devices = [torch.device("cpu"), device.choose_device(device)]
    return ", ".join(dict.fromkeys(map(device.hardware, devices)))


def attempted(row: str, n: int, folder: Path) -> Iterator[Line]:
    """The lines of a row; if it fails, with the error as the last one. Raises ConfigError."""
    folder.mkdir(exist_ok=True)
    try:
        yield from ROWS[row](n, folder)
    except UserError:
        raise
    except ImportError as error:
        yield Line(row, "", "", "", note=timing.needs(error))
    except Exception as error:
        yield timing.failure(row, "", "", error)


if __name__ == "__main__":
    configure(globals())
    chosen, found = check(), []
    hardware = machine()
    print(f"{hardware}, load average {os.getloadavg()[0]:.1f}")
    print(", ".join(f"{name} {version}" for name, version in timing.versions().items()))
    print(timing.HEADER)
    try:
        with tempfile.TemporaryDirectory() as name:
            for row in chosen:
                for line in attempted(row, repeats or (3 if quick else 7), Path(name, row)):
                    print(timing.text(line), flush=True)
                    found.append(line)
    finally:  # what was measured until then is kept
        if out:
            timing.write_json(out, found, hardware, " ".join(["python", *sys.argv]))
    sys.exit(int(any(line.failed for line in found)))
