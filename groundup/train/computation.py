"""What model.py computes, as a few numbers: logits of a small model whose weights are fixed by a formula.

The files of a checkpoint say that the weights belong to a Llama, Qwen2 or Qwen3 model. Whoever edits model.py (another
activation, another place of the norms) makes that untrue, though names and sizes stay. So a checkpoint of such a model
is saved with another model_type, which transformers refuses, and with these numbers; a run does not resume with a
model.py that computes something else, and other loads say so.
"""

import functools
import os
import random
import sys
from pathlib import Path

import torch

from groundup.errors import UserError
from groundup.files.untrusted import read_json
from model import ModelConfig, Transformer

CHANGED = "changed_"  # before the model_type of a model that is not as transformers has it
TOLERANCE = 0.01  # float32 differs by 1e-6 between machines; GELU in the place of SiLU by 0.4
PLAIN = {  # as transformers' models compute them
    "llama": (-0.9264, 1.0839, 0.9261, 0.9494, 0.5355, 1.012, -0.296, -0.3565),
    "qwen2": (0.5756, 0.9285, 1.5679, -0.4558, -1.1608, -1.748, 0.2694, -0.1584),
    "qwen3": (-0.7444, 1.2757, 0.8959, 0.6177, 0.95, 1.4743, -1.0055, -0.2844),
}


@functools.cache
def logits_of(kind: str) -> tuple[float, ...]:
    """Return eight logits of a small model of this kind. The state of random generators stays as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
        cfg = ModelConfig(
            vocab_size=32, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, head_dim=16, ffn_dim=64,
            rope_theta=10000.0, norm_eps=0.1, qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2", tie_embeddings=False,
        )  # fmt: skip
        model = Transformer(cfg).eval()
        for name, p in model.named_parameters():
            p.copy_(fixed_values(name, p.shape))
        return tuple(round(x, 4) for x in model(torch.arange(12).view(1, 12))[0, -1, ::4].tolist())


def fixed_values(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the values of a parameter: matrices keep the size of what they multiply."""
    draw = random.Random(name).random  # the same in every version of Python
    values = torch.tensor([draw() for _ in range(shape.numel())]).view(shape) - 0.5
    return values * (12 / shape[1]) ** 0.5 if len(shape) == 2 else values + (not name.endswith(".bias"))


def same(one: tuple, other: tuple) -> bool:
    return len(one) == len(other) and all(abs(a - b) < TOLERANCE for a, b in zip(one, other, strict=True))


def plain_kind(kind: str) -> str:
    return "llama" if kind == "mistral" else kind


def is_plain(kind: str) -> bool:
    """Return whether model.py computes what transformers does for models of this kind."""
    return same(logits_of(plain_kind(kind)), PLAIN[plain_kind(kind)])


def record(kind: str) -> dict:
    """Return what config.json says of a model of this kind, beside its sizes."""
    if is_plain(kind):
        return {"model_type": kind}
    say(f"checkpoint: this model.py computes something else than transformers' {kind}; only it opens what is saved")
    return {"model_type": CHANGED + kind, "logits_of_fixed_weights": list(logits_of(plain_kind(kind)))}


def is_as_saved(hf: dict) -> bool:
    """Return whether model.py computes what it did for a checkpoint, by its config.json."""
    kind = plain_kind(str(hf.get("model_type")).removeprefix(CHANGED))
    if kind not in PLAIN:  # which is refused elsewhere
        return True
    saved = hf.get("logits_of_fixed_weights", PLAIN[kind])
    numbers = isinstance(saved, list | tuple) and all(isinstance(x, int | float) for x in saved)
    return numbers and same(tuple(saved), logits_of(kind))


def check_resume(directory: Path, name: str) -> None:
    """Raise UserError unless model.py computes what it did for a checkpoint of a run, by its file `name`."""
    if not is_as_saved(read_json(directory / name)):
        fix = "put that model.py back, use another out_dir, or begin anew with --resume=never --overwrite=True"
        raise UserError(f"checkpoint: {directory} is of a model.py that computed something else; {fix}")


@functools.cache
def say(line: str) -> None:
    """Print a line, once and on one rank. Standard output may be data."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
