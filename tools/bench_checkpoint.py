"""Saving and loading a training state, beside torch.save and the bare disk; bench.py's row `checkpoint`.

The disk writes as many bytes into the same directory, in large blocks of what cannot be compressed, and waits until it
has them: past the system's cache of files, as checkpoints do, and through it; or it reads the files of the checkpoint.
What is read has been read in the warm-up: it is in memory on all sides. What training waits for is the copy in memory
that write_behind.py then saves from. The state is that of a model on the CPU, also where there is a GPU: from there it
would be copied first.
"""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from groundup.train.device import rng_state

sys.path.insert(0, str(Path(__file__).parent.parent))

import timing

import ddp as dist
from groundup.train import checkpoint, ranks
from groundup.train.optim import Optimizer
from groundup.train.write_behind import Writer
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

CPU = torch.device("cpu")


def trained(cfg: ModelConfig) -> tuple[Transformer, Optimizer]:
    """A model and an optimizer that has its state: a step has been made on a few tokens."""
    model = Transformer(cfg)
    ddp = dist.DDP(model)
    opt = Optimizer(ddp.buckets, "adamw")
    tokens = torch.randint(cfg.vocab_size, (1, 8))
    ddp.expect_step(opt, 1e-3)
    (model(tokens, tokens) / tokens.numel()).backward()
    ddp.step(opt, lr=1e-3, clip=1.0)
    ddp.flush()
    return model, opt


def states(opt: Optimizer) -> tuple[dict, dict]:
    return {"step": 1, "optimizer": opt.state_dict()}, {"rng": rng_state(CPU)}


def our_save(out_dir: Path, model: Transformer, opt: Optimizer, tokenizer: Tokenizer) -> Path:
    world = ranks.init()
    return checkpoint.save(out_dir, 1, model, tokenizer, *states(opt), world, val_loss=None, keep_last=1, keep_best=0)


def our_load(out_dir: Path, model: Transformer) -> None:
    """As a resume does: find the newest that is whole, read weights and state."""
    path = checkpoint.find_latest(out_dir)
    checkpoint.load_weights(model, path)
    checkpoint.load_train_state(path, 0)


def torch_save(path: Path, model: Transformer, opt: Optimizer) -> None:
    with open(path, "wb") as f:
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, f)
    checkpoint.sync(path)


def torch_load(path: Path, model: Transformer) -> None:
    model.load_state_dict(torch.load(path, weights_only=True)["model"])


def measure(name: str, cfg: ModelConfig, tokenizer: Tokenizer, repeats: int, folder: Path) -> list[timing.Line]:
    """MB/s of the same state on all sides; the limit is what the bare disk does in the same turns."""
    model, opt = trained(cfg)
    writer = Writer(behind=True, timeout_s=60)
    out_dir, plain, raw = folder / "run", folder / "plain.pt", folder / "raw.bin"
    files = sorted(path for path in our_save(out_dir, model, opt, tokenizer).iterdir() if path.is_file())
    n_bytes = sum(path.stat().st_size for path in files)
    saves: dict[str, Callable] = {
        "disk": timing.writing(raw, n_bytes, past_cache=True),
        "disk, through the cache": timing.writing(raw, n_bytes),
        "torch.save": partial(torch_save, plain, model, opt),
        "ours": partial(our_save, out_dir, model, opt, tokenizer),
        "ours, what training waits for": lambda: writer.copy(model, *states(opt)),
    }
    loads: dict[str, Callable] = {
        "disk": partial(timing.read_files, files),
        "torch.load": partial(torch_load, plain, model),
        "ours": partial(our_load, out_dir, model),
    }
    found = []
    peers = ("disk", "disk, through the cache", "torch.save"), ("disk", "torch.load")
    for kind, calls, of in (("save", saves, peers[0]), ("load", loads, peers[1])):
        seconds = timing.alternate({side: partial(timing.wall_seconds, call) for side, call in calls.items()}, repeats)
        limit = n_bytes / 1e6 / median(seconds["disk"])
        case = f"{kind} {name}, {n_bytes / 1e6:,.0f} MB, CPU"
        found += timing.lines("checkpoint", case, seconds, "MB/s", of, n_bytes / 1e6, limit)
    writer.close()
    shutil.rmtree(out_dir)
    return found

