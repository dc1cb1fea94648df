"""Rows checkpoint and startup: what a run costs beside its steps.

The bare disk writes as many bytes into the same directory, in large blocks that cannot be compressed, and waits until
they are stored; or it reads the files of the checkpoint. What is read was read in the warm-up, so it is in the page
cache on all sides. Training waits for the copy in memory that write_behind.py then saves from. The model is on the CPU,
also on a machine with a GPU.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import timing
import torch
from bench_train import SHAPES, shapes_of
from timing import ROOT, Line, Options

import ddp
import tokenizer
from groundup.demo import debug_data
from groundup.train import checkpoint, ranks
from groundup.train.device import rng_state
from groundup.train.optim import Optimizer
from groundup.train.write_behind import Writer
from model import ModelConfig, Transformer

PROMISED_S = {"tokenizer.py --help": 0.5, "prepare.py --help": 0.5, "pretrain.py, first step": 6.0}  # other --help: 2


def checkpoint_row(options: Options) -> Iterator[Line]:
    """MB/s of saving and loading a training state; the limit is the bare disk in the same rounds."""
    place = Path(options.keys["checkpoint_dir"])
    place.mkdir(parents=True, exist_ok=True)
    for shape in shapes_of(options, ["10M" if options.quick else "124M"]):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            saves, loads, n_bytes = checkpoint_sides(SHAPES[shape], Path(folder))
            for kind, calls in (("save", saves), ("load", loads)):
                sides = {name: partial(timing.wall_seconds, call) for name, call in calls.items()}
                seconds = timing.alternate(sides, options.few)
                limit = n_bytes / 1e6 / median(seconds["disk"])
                case, peers = f"{kind} {shape}, {n_bytes / 1e6:,.0f} MB, CPU", ("disk", "torch.save", "torch.load")
                yield from timing.lines("checkpoint", case, seconds, "MB/s", peers, n_bytes / 1e6, limit)


def startup_row(options: Options) -> Iterator[Line]:
    """Seconds until --help has answered, and until the first step of a debug run, beside `import torch`."""
    texts = {path.stem: path.read_text("utf-8") for path in sorted(ROOT.glob("*.py"))}
    scripts = [name for name, text in texts.items() if '\nif __name__ == "__main__":' in text]
    commands = {"import torch": [sys.executable, "-c", "import torch"]}
    for name in ["tokenizer"] if options.quick else scripts:
        commands[f"{name}.py --help"] = [sys.executable, str(ROOT / f"{name}.py"), "--help"]
    quiet = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    sides = {name: partial(timing.wall_seconds, partial(quiet, command)) for name, command in commands.items()}
    debug = [sys.executable, "pretrain.py", "config/debug.py", "--max_steps=1", "--log_every=1", "--resume=never"]
    debug += ["--overwrite=True", f"--data_dir={options.folder / 'debug'}", f"--out_dir={options.folder / 'run'}"]
    sides["pretrain.py, first step"] = lambda: timing.until_line(debug, "step      1/")[0]
    with contextlib.redirect_stdout(io.StringIO()):  # before the clock starts
        debug_data.make_debug_data(options.folder / "debug")
    seconds = timing.alternate(sides, options.few, warmups=0 if options.quick else 1)
    for line in timing.lines("startup", "a fresh process", seconds, "s", ["import torch"]):
        line.limit = PROMISED_S.get(line.side, 2.0 if "--help" in line.side else 0.0)
        yield line


def checkpoint_sides(cfg: ModelConfig, folder: Path) -> tuple[dict, dict, int]:
    """Return ({side: call that saves}, {side: call that loads}, bytes of a checkpoint) of a model after one step."""
    model = Transformer(cfg)
    parallel = ddp.DDP(model)
    opt = Optimizer(parallel.buckets, "adamw")
    tokens = torch.randint(cfg.vocab_size, (1, 8))
    parallel.expect_step(opt, 1e-3)
    (model(tokens, tokens) / tokens.numel()).backward()
    parallel.step(opt, lr=1e-3, clip=1.0)
    parallel.flush()
    names, world = tokenizer.train(["Three letters, and a few more: abc."], 384), ranks.init()
    run, plain, writer = folder / "run", folder / "plain.pt", Writer(behind=True, timeout_s=60)

    def states() -> tuple[dict, dict]:
        return {"step": 1, "optimizer": opt.state_dict()}, {"rng": rng_state(torch.device("cpu"))}

    def save() -> Path:
        return checkpoint.save(run, 1, model, names, *states(), world, val_loss=None, keep_last=1, keep_best=0)

    def load() -> None:
        path = checkpoint.find_latest(run)
        checkpoint.load_weights(model, path)
        checkpoint.load_train_state(path, 0)

    def torch_save() -> None:
        with open(plain, "wb") as f:
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, f)
        checkpoint.sync(plain)

    def torch_load() -> None:
        model.load_state_dict(torch.load(plain, weights_only=True)["model"])

    def read() -> None:
        buffer = bytearray(2**20)
        for path in files:
            with open(path, "rb", buffering=0) as f:
                while f.readinto(buffer):
                    pass

    files = sorted(path for path in save().iterdir() if path.is_file())
    n_bytes = sum(path.stat().st_size for path in files)
    saves = {"disk": partial(timing.write_bytes, folder / "raw.bin", n_bytes), "torch.save": torch_save, "ours": save}
    saves["ours, training waits"] = lambda: writer.copy(model, *states())
    return saves, {"disk": read, "torch.load": torch_load, "ours": load}, n_bytes
