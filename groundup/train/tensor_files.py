"""Weights in safetensors files: names, headers, and whether they fit the model.

Our parameter names are Hugging Face's without "model.". Whatever does not fit is refused in one
line, before anything is copied. Only safetensors are read: a .bin is pickled and could run code.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groundup.errors import UserError, listed, naming
from groundup.files.untrusted import check_regular, is_name, read_json
from groundup.train.config_json import is_plain
from model import ModelConfig

DTYPES = ("F32", "F16", "BF16")  # safetensors' names; float32 holds each exactly
PREFIX = "base_model.model."  # peft puts this before Hugging Face's names


def hf_name(name: str) -> str:
    """Return Hugging Face's name of one of our parameters or modules."""
    # The head of a language model and that of a reward model are outside of their "model".
    return name if name.split(".")[0] in ("lm_head", "score") else f"model.{name}"


def save_weights(
    path: Path, tensors: dict[str, Tensor], key: str = "format", value: str = "pt"
) -> None:
    # One key of metadata: of several the order is chance. transformers needs format=pt.
    # safetensors 0.8 makes files that only their owner reads: set the permissions of the umask.
    path.touch()
    mode = path.stat().st_mode
    with naming(path):
        save_file(tensors, path, metadata={key: value})
    path.chmod(mode)


class Stored:
    """A tensor in a safetensors file, read by `stored[:]` or `stored[first:end]`."""

    def __init__(self, path: Path, name: str, shape: list[int], dtype: str) -> None:
        self.path, self.name = path, name
        self.shape, self.dtype = tuple(shape), dtype

    def __getitem__(self, rows: slice) -> Tensor:
        # Map the file only while the result is alive: mapped pages count as memory of the process.
        with open_safetensors(self.path) as file:
            return file.get_slice(self.name)[rows]


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file; the caller closes it. Raise UserError if that fails."""
    try:
        check_regular(path)  # opening a pipe would wait for ever
        return safe_open(path, "pt")  # checks the header against the size of the file
    except (OSError, SafetensorError) as error:
        # The system's reason, or the first line of safetensors' own.
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        if not path.exists() and any(path.parent.glob("*.bin")):
            why = "a .bin can run code, only safetensors are read"
        raise UserError(f"checkpoint: cannot read {path}: {why}") from None


def tensors_of(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by our names. Only its header is read."""
    tensors = {}
    with open_safetensors(path) as file:
        for name in file.keys():
            tensor, ours = file.get_slice(name), name.removeprefix(PREFIX).removeprefix("model.")
            tensors[ours] = Stored(path, name, tensor.get_shape(), tensor.get_dtype())
    return tensors


def open_weights(directory: Path) -> dict[str, Stored]:
    """Return the weights by our names, from one file or from the shards that an index names."""
    paths = [directory / "model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if index.exists() and not paths[0].exists():
        # weight_map is {tensor: file}. A name with a folder could point anywhere on this machine.
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(map(is_name, shards.values())):
            what = "weight_map must name files of its directory"
            raise UserError(f"checkpoint: {index} is damaged: {what}")
        paths = [directory / shard for shard in sorted(set(shards.values()))]
    tensors = {}
    for path in paths:  # the index is not asked further: check_fit finds what is missing
        tensors |= tensors_of(path)
    # Conversions of the first Llamas store this constant, which follows from the configuration.
    return {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def drop_tied_head(tensors: dict[str, Stored], directory: Path, as_one: bool = True) -> None:
    """Remove the head that files of tied models may hold beside the embedding; it must be equal."""
    # as_one: embedding and head were trained together, so an adapter need not store both.
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("embed_tokens.weight")
    if head is None:  # the embedding alone is enough, unless only it was trained
        differ = embedding is not None and not as_one
    else:
        differ = embedding is None or not torch.equal(head[:], embedding[:])
    if differ:
        what = "ties its embeddings, but lm_head.weight was trained apart from them"
        raise UserError(f"checkpoint: {directory} {what}")


def check_sizes(cfg: ModelConfig, tensors: dict[str, Stored], directory: Path) -> None:
    """Raise UserError if the stored weights have other sizes than config.json."""
    # Before the model is built: a damaged config.json could ask for any amount of memory.
    if not is_plain(cfg.model_type):
        return  # an edited model.py has its own shapes, which only check_fit compares
    # layers.7.mlp.up_proj.weight -> 7
    n_layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    if n_layers != cfg.n_layer:
        what = f"have {n_layers} layers, its config has {cfg.n_layer}"
        raise UserError(f"checkpoint: the weights in {directory} {what}")

    # These matrices have every size of the architecture, (out, in); an adapter lacks some.
    shapes = {
        "embed_tokens.weight": (cfg.vocab_size, cfg.n_embd),
        "layers.0.self_attn.q_proj.weight": (cfg.n_head * cfg.head_dim, cfg.n_embd),
        "layers.0.self_attn.k_proj.weight": (cfg.n_kv_head * cfg.head_dim, cfg.n_embd),
        "layers.0.mlp.gate_proj.weight": (cfg.ffn_dim, cfg.n_embd),
    }
    stored = {name: tensors[name] for name in shapes if name in tensors}
    check_fit({name: shapes[name] for name in stored}, stored, directory)


def check_fit(shapes: dict[str, tuple], tensors: dict[str, Stored], directory: Path) -> None:
    """Raise UserError unless `tensors` has one tensor for each name, of that shape."""
    problems = [f"{name} is missing" for name in shapes if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in shapes]
    # Compare what is on both sides. Integers would be quantized weights.
    for name in [name for name in shapes if name in tensors]:
        stored = tensors[name]
        if stored.shape != shapes[name]:
            problems.append(f"{name} has shape {stored.shape} and not {shapes[name]}")
        elif stored.dtype not in DTYPES:
            problems.append(f"{name} is {stored.dtype} and not one of {', '.join(DTYPES)}")
    if problems:
        what = listed(problems, 4)
        raise UserError(f"checkpoint: the weights in {directory} do not fit the model: {what}")


def own_rows(p: Tensor) -> tuple[int, int]:
    """Return (first, one past the last) row that this rank keeps of a parameter sharded by FSDP."""
    # FSDP cuts into equal shares of rows, rounded up: the last ranks may have fewer, or none.
    rows = math.ceil(p.shape[0] / p.device_mesh.size())
    first = min(p.device_mesh.get_local_rank() * rows, p.shape[0])
    return first, min(first + rows, p.shape[0])


@torch.no_grad()
def put(p: Tensor, whole: Stored | Tensor) -> None:
    """Copy `whole` into a parameter; of one sharded by FSDP, the rows of this rank."""
    if not hasattr(p, "device_mesh"):
        p.copy_(whole[:])
        return
    first, end = own_rows(p)
    if first < end:  # else this rank has no row
        p.detach().to_local().copy_(whole[first:end])
