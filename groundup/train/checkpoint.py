"""Checkpoints: a Hugging Face model directory plus the training state, written whole or not at all.

    out/demo/
      step_000200/                       written as .step_000200.tmp, fsynced, then renamed
        config.json model.safetensors generation_config.json, the tokenizer's files       what transformers reads
        train_state.pt rank_00000.pt ...                     optimizer, scaler, position; random generators of each rank
        score.json checksums.json                            validation loss; CRC-32 of the other files, written last
      latest -> step_000200   best -> step_000150   best2 -> step_000100

AutoModelForCausalLM.from_pretrained("out/demo/latest") opens it as it is. Opening a checkpoint never runs code: weights
are safetensors, state is plain data (torch.load with weights_only=True). A model with adapters is saved as peft does,
with model_config.json. A kill -9 during a save loses that save only: nothing is removed before its successor is whole.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed import ProcessGroup

from groundup.errors import UNINTERRUPTED, UserError, reason_of
from groundup.files.untrusted import check_regular, check_zip, is_name, read_json
from groundup.train import fsdp, huggingface, lora, ranks
from groundup.train.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS, write_json
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

STEP_NAME = re.compile(r"step_(\d+)")
BEST = ("best", "best2")
KEEP = "keep"  # a step that holds a file of this name is never removed: adapters need it
ADAPTED_CONFIG = "model_config.json"  # of a model with adapters: a config.json would be a whole model to transformers
SAMPLED_BLOCKS = 64  # of 4 KiB from each file of frozen weights: training moves every weight, so a few show it


# ---- save -----------------------------------------------------------------------------------------------------------


def save(
    out_dir: str | Path, step: int, model: Transformer, tokenizer: Tokenizer, state: dict, rank_state: dict,
    world: ranks.World, *, val_loss: float | None, keep_last: int, keep_best: int, base: str | Path = "",
    write: Callable[[Path, Transformer, Tokenizer], None] | None = None, group: ProcessGroup | None = None,
    write_shards: Callable[[Path], None] | None = None,
) -> Path:  # fmt: skip
    """Write out_dir/step_NNNNNN, point the links at it, remove what is not kept; return its path.

    All ranks call this, on one file system: rank 0 writes model, tokenizer and `state`, every rank its `rank_state`;
    both hold plain data and tensors only. The `keep_last` newest (0 = all) and the `keep_best` (0 to 2) with the lowest
    `val_loss` are kept; None and NaN do not compete, of equals the earlier is better. If one rank fails (disk full),
    all raise UserError and earlier checkpoints are intact. base: directory of the frozen weights of a model with
    adapters. write: replaces write_model for another kind of model. group: process group of the ranks.
    write_shards: writes the parts of weights and state that a rank holds, on all ranks.
    """
    if keep_last < 0 or not 0 <= keep_best <= len(BEST):
        raise UserError(f"checkpoint: {keep_last=} must be 0 (all) or more, {keep_best=} must be 0, 1 or 2")
    final = Path(out_dir) / f"step_{step:06d}"
    temp = final.with_name(f".{final.name}.tmp")
    part = partial(agreed, f"cannot save {final}, earlier checkpoints are intact", world, temp, group)
    with part():
        if world.is_main:
            clean(final.parent)
            temp.mkdir()
    with part():
        write_state(temp / rank_file(world.rank), rank_state)
        if world.is_main:
            (write or partial(write_model, base=base))(temp, model, tokenizer)
            write_state(temp / "train_state.pt", state)
            write_score(temp / "score.json", step, val_loss)
    if write_shards is not None:
        with part():
            write_shards(temp)
    with part():
        if world.is_main:
            with UNINTERRUPTED:
                commit(temp, final)
    with agreed(f"{final} is saved, but the links and the older checkpoints are not in order", world, temp, group):
        if world.is_main:
            tidy(final.parent, step, keep_last, keep_best)
    return final


@contextmanager
def agreed(failure: str, world: ranks.World, temp: Path, group: ProcessGroup | None) -> Iterator[None]:
    """Leave a part of the save on all ranks together: if it raises on one, remove `temp` and raise on all."""
    error = None
    try:
        yield
    except Exception as e:  # whatever it is: the others must hear of it, or they would wait for this rank
        error = e
    reasons = ranks.gather_objects("" if error is None else f"rank {world.rank}: {reason_of(error)}", group)
    if not any(reasons):
        return
    if world.is_main:
        shutil.rmtree(temp, ignore_errors=True)
    # A failed write is an OSError, torch's RuntimeError or safetensors' own error; anything else is a mistake in code.
    if error is not None and not isinstance(error, (OSError, RuntimeError, SafetensorError, UserError)):
        raise error
    raise UserError(f"checkpoint: {failure} ({'; '.join(filter(None, reasons))})") from error


def clean(out_dir: Path) -> None:
    """Make out_dir, or remove what a killed save has left in it."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for old in out_dir.glob(".step_*.old"):
        replaced = old.with_name(old.name[1:].removesuffix(".old"))
        if replaced.exists():
            shutil.rmtree(old)
        else:  # killed between the two renames of commit
            old.rename(replaced)
    for temp in out_dir.glob(".step_*.tmp"):
        shutil.rmtree(temp)


def write_model(
    directory: Path, model: Transformer, tokenizer: Tokenizer, base: str | Path = "", dtype: torch.dtype = torch.float32
) -> None:
    """Write the Hugging Face part. Weights are the float32 ones of training, bit for bit; a tied head is stored once.
    For a model with adapters write what is trained, and where the rest is: `base`."""
    plain = lora.lora_config_of(model) is None
    write_settings(directory, model.cfg, tokenizer, dtype, "config.json" if plain else ADAPTED_CONFIG)
    if plain:
        weights = {huggingface.hf_name(name): p.detach().to("cpu", dtype) for name, p in model.named_parameters()}
        huggingface.save_weights(directory / "model.safetensors", weights)
    elif base:
        huggingface.save_adapter(directory, model, str(Path(base).resolve()), base_weights=weights_key(Path(base)))
    else:
        raise UserError("checkpoint: a model with adapters needs base, the directory of its frozen weights")


def write_settings(
    directory: Path, cfg: ModelConfig, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32,
    name: str = "config.json",
) -> None:  # fmt: skip
    """Write what a checkpoint holds beside weights and state."""
    tokenizer.save(directory)
    write_json(directory / name, huggingface.to_hf_config(cfg, tokenizer, dtype))
    ends = sorted(tokenizer.stop_ids)
    own = {key: i for key, i in huggingface.special_ids(tokenizer).items() if i is not None}
    of_source = json.loads(tokenizer.generation_config)  # its temperature and the like
    write_json(directory / "generation_config.json", of_source | own | {"eos_token_id": ends})


def check_saves(cfg: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError now, not at the first save, if these settings could not be written, or read back as they are."""
    with tempfile.TemporaryDirectory() as directory:
        write_settings(Path(directory), cfg, tokenizer)
        if (read := huggingface.from_hf_config(Path(directory, "config.json"))) != replace(cfg, dropout=0.0):
            raise UserError(f"checkpoint: {cfg} would be saved as {read}")
        if Tokenizer.load(directory).fingerprint() != tokenizer.fingerprint():
            raise UserError("checkpoint: the tokenizer's files do not give back its ids once they are saved")


def write_state(path: Path, state: dict) -> None:
    """Call torch.save; refuse now, not at the resume, what could be read back only by running code."""
    with open(path, "wb") as f:  # given a path, torch hides the system's reason for a failed write
        torch.save(state, f)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        raise UserError(f"{path.name} holds {', '.join(unsafe)}; what is not plain data cannot be resumed")


def write_score(path: Path, step: int, val_loss: float | None) -> None:
    """Write the validation loss of a step; one that is not finite as null."""
    ranked = val_loss is not None and math.isfinite(val_loss)
    write_json(path, {"step": step, "val_loss": float(val_loss) if ranked else None})


def commit(temp: Path, final: Path) -> None:
    """Put the contents on the disk, then give them their name. A step that exists is renamed until then."""
    files = sorted(temp.rglob("*"))
    summed = [path for path in files if path.is_file() and path.name != "score.json"]
    write_json(temp / "checksums.json", {path.relative_to(temp).as_posix(): checksum(path) for path in summed})
    for path in (*files, temp / "checksums.json", temp):
        sync(path)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    temp.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def tidy(out_dir: Path, step: int, keep_last: int, keep_best: int) -> None:
    """Point latest, best and best2 at their steps and remove the steps that are not kept.

    Steps beyond `step` do not count and stay: a resume has passed them over as damaged.
    """
    steps = [path for path in step_dirs(out_dir) if step_of(path) <= step]
    scored = [(loss, path) for path in steps if (loss := read_loss(path)) is not None]
    best = [path for _, path in sorted(scored, key=lambda pair: pair[0])][:keep_best]  # stable: of equals the earlier
    point(out_dir / "latest", steps[-1])
    for name, path in zip_longest(BEST, best):
        point(out_dir / name, path)
    for path in steps[:-keep_last] if keep_last else []:
        if path not in best and not (path / KEEP).exists():
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.tmp")))  # half removed, it must not look finished


def rank(out_dir: str | Path, step: int, val_loss: float, keep_last: int, keep_best: int) -> None:
    """Record the validation loss of a checkpoint that save() wrote, if it exists, and choose best and best2 anew.
    Call on rank 0 alone. Raise UserError if the disk refuses."""
    path = Path(out_dir) / f"step_{step:06d}"
    if not path.exists() or not math.isfinite(val_loss):
        return
    try:
        temp = path / ".score.json.tmp"
        write_score(temp, step, val_loss)
        sync(temp)
        temp.replace(path / "score.json")
        sync(path)
        tidy(path.parent, step, keep_last, keep_best)
    except OSError as error:
        raise UserError(f"checkpoint: cannot record the validation loss of {path}: {error.strerror}") from error


def point(link: Path, target: Path | None) -> None:
    """Replace a symbolic link at one stroke; None removes it. Relative, so that a run directory can be moved."""
    if target is None:
        return link.unlink(missing_ok=True)
    temp = link.with_name(f".{link.name}.tmp")
    temp.unlink(missing_ok=True)
    temp.symlink_to(target.name, target_is_directory=True)
    temp.replace(link)


def read_loss(step_dir: Path) -> float | None:
    """Return the validation loss of a checkpoint, None if it has none."""
    loss = None
    with suppress(UserError):  # find_latest reports a damaged checkpoint
        loss = read_json(step_dir / "score.json").get("val_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def sync(path: Path) -> None:
    """Put a file, or a directory's list of names, on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file: it shows accidents, not forgery, in less than half the time of SHA-256."""
    if path.name == ADAPTER_CONFIG:  # all but the place of its base, which the user may move
        text = json.dumps(read_json(path) | {"base_model_name_or_path": ""}, sort_keys=True)
        return f"crc32 {zlib.crc32(text.encode()):08x}"
    crc = 0
    check_regular(path)
    with open(path, "rb") as f:
        while block := f.read(2**20):
            crc = zlib.crc32(block, crc)
    return f"crc32 {crc:08x}"


# ---- find -----------------------------------------------------------------------------------------------------------


def find_latest(out_dir: str | Path, report: Callable[[str], None] = print) -> Path | None:
    """Return the newest checkpoint of a run with every byte as it was written; None if the run has none yet.

    A damaged one is reported in a line, and the one before it is tried. Raise UserError if none is left.
    """
    # While a save replaces a step, for a moment the step has only its .old name.
    paths = [*step_dirs(Path(out_dir)), *Path(out_dir).glob(".step_*.old")]
    for path in sorted(paths, key=step_of, reverse=True):
        try:
            check_bytes(path)
            return path
        except UserError as error:
            report(f"{error}; trying the checkpoint before it")
    if paths:
        raise UserError(f"checkpoint: all {len(paths)} checkpoints in {out_dir} are damaged; use another out_dir")
    return None


def check_bytes(step_dir: Path) -> None:
    """Raise UserError unless every file of a checkpoint is as it was written."""
    for name, want in read_json(step_dir / "checksums.json").items():
        if not all(map(is_name, name.split("/"))):
            raise UserError(f"checkpoint: {step_dir / 'checksums.json'} is damaged: it names {name!r:.80}")
        path = step_dir / name
        try:
            found = checksum(path)
        except OSError as error:
            raise UserError(f"checkpoint: cannot read {path}: {error.strerror}") from None
        if found != want:
            raise UserError(f"checkpoint: {path} is damaged, its checksum is not the one in checksums.json")


def step_dirs(out_dir: Path) -> list[Path]:
    """Return the finished steps of a run, oldest first."""
    return sorted((path for path in out_dir.glob("step_*") if STEP_NAME.fullmatch(path.name)), key=step_of)


def step_of(step_dir: Path) -> int:
    return int(STEP_NAME.search(step_dir.name)[1])


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def resolve(init_from: str | Path) -> Path:
    """Return the model directory that is meant: a run's newest good checkpoint, a checkpoint, or a Hugging Face one.

    Raise UserError if there is none, or if a checkpoint's bytes have changed.
    """
    path = Path(init_from)
    if not path.is_dir():
        if path.suffix == ".gguf":
            raise UserError(f"checkpoint: init_from={str(init_from)!r}: first: python tools/from_gguf.py {path} DIR")
        reason = "is a file, give its directory" if path.exists() else "no such directory (hub models: download first)"
        if path.name in BEST and find_latest(path.parent):
            reason = f"no checkpoint of this run has been evaluated yet; --init_from={path.parent} is its newest"
        raise UserError(f"checkpoint: init_from={str(init_from)!r}: {reason}")
    if (path / "checksums.json").exists():
        check_bytes(path)
    if is_adapter(path):
        resolve(base_of(path))  # an adapter without its base should show now
    if is_adapter(path) or (path / "config.json").exists():
        return path
    if latest := find_latest(path):
        return resolve(latest)
    raise UserError(f"checkpoint: {path} holds no checkpoint: no config.json, no step_* directory")


def newest_run(root: str | Path = "out", rewards: bool = False) -> Path:
    """Return the run below `root` that saved last, of models that write text or of reward models. Raise UserError."""
    configs = [path for path in Path(root).glob("*/step_*/config.json") if path.with_name("checksums.json").exists()]
    written = [path for path in configs if (b"ForSequenceClassification" in path.read_bytes()) == rewards]
    if not written:
        raise UserError(f"checkpoint: no run in {str(root)!r} has a checkpoint; train, or give --init_from=DIR")
    return max(written, key=lambda path: path.with_name("checksums.json").stat().st_mtime).parent.parent


def is_adapter(directory: str | Path) -> bool:
    return (Path(directory) / ADAPTER_CONFIG).exists()


def base_of(directory: str | Path) -> Path:
    """Return the directory of an adapter's frozen weights. Raise UserError."""
    name = huggingface.read_peft_config(directory).get("base_model_name_or_path") or ""
    path = Path(name)
    if not name or not path.is_dir():
        raise UserError(
            f"checkpoint: {Path(directory) / ADAPTER_CONFIG} names base_model_name_or_path={name!r}, "
            "which is no directory; if the base was moved, write there where it is now"
        )
    if is_adapter(path):
        raise UserError(f"checkpoint: {directory} is an adapter on the adapter {path}; merge that with tools/merge.py")
    return path if (path / "config.json").exists() else resolve(path)


def tokenizer_dir(directory: str | Path) -> Path:
    """Return where the tokenizer of a model is: in its directory or, for an adapter without one, in its base's."""
    path = Path(directory)
    has_one = any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    return path if has_one or not is_adapter(path) else base_of(path)


def model_name(directory: Path) -> str:
    """Return the directory's name and a fingerprint of its weights and settings, wherever it lies."""
    settings = b"".join(path.read_bytes() for path in sorted(directory.glob("*config.json")))
    return f"{directory.name} {hashlib.sha256(weights_key(directory).encode() + settings).hexdigest()[:16]}"


# ---- load -----------------------------------------------------------------------------------------------------------


def load_train_state(step_dir: str | Path, rank: int, whole: bool = True) -> tuple[dict, dict]:
    """Return (state, rank_state) as saved; rank_state is {} for a rank that did not exist then. Runs no code.
    whole: also read an optimizer's state that fsdp.py has written in shards."""
    path = Path(step_dir) / rank_file(rank)
    state = read_state(Path(step_dir) / "train_state.pt")
    if whole and "" in state.get("optimizer", ()):
        state["optimizer"] = fsdp.read_optimizer(Path(step_dir), state["optimizer"][""]["step"])
    return state, read_state(path) if path.exists() else {}


def load_rank_states(step_dir: str | Path, rank: int, world_size: int) -> list[dict]:
    """Return [rank_state] of this rank if the saved run had as many ranks; otherwise those of all its ranks."""
    paths = sorted(Path(step_dir).glob("rank_*.pt"))
    return [read_state(path) for path in ([paths[rank]] if len(paths) == world_size else paths)]


def read_state(path: Path) -> dict:
    try:
        check_zip(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # in memory once for all ranks
    except OSError as error:
        raise UserError(f"checkpoint: cannot read {path}: {error.strerror}") from None
    except Exception:  # of many kinds; and torch's text recommends weights_only=False, which would run the code
        raise UserError(f"checkpoint: refused to load {path}: damaged, or more than plain data") from None
    if not isinstance(state, dict):
        raise UserError(f"checkpoint: refused to load {path}: it holds a {type(state).__name__}, not a dict")
    return state


def load_config(directory: str | Path) -> ModelConfig:
    """Return the architecture of a model directory. Raise UserError if model.py does not build it, or if the weights
    have other sizes. peft's adapters have none: take the base's, with as many tokens as a stored embedding has."""
    path = Path(directory) / (ADAPTED_CONFIG if is_adapter(directory) else "config.json")
    if not path.exists() and is_adapter(directory):
        cfg, shapes = load_config(base_of(directory)), huggingface.stored_shapes(directory)
        return replace(cfg, vocab_size=shapes.get("embed_tokens.weight", (cfg.vocab_size,))[0])
    cfg, base = huggingface.from_hf_config(path), base_of(directory) if is_adapter(directory) else Path(directory)
    if any(base.glob("*.safetensors*")):  # a plan needs no weights
        own = huggingface.open_adapter(directory) if is_adapter(directory) else {}
        huggingface.check_sizes(cfg, huggingface.open_weights(base) | own, directory)
    return cfg


def load_model(
    directory: str | Path, device: str = "cpu", dropout: float = 0.0, block_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Transformer:  # fmt: skip
    """Return the model of a checkpoint or Hugging Face directory; block_size 0 = as saved. dtype: see build."""
    cfg = load_config(directory)
    model = build(Transformer, replace(cfg, dropout=dropout, block_size=block_size or cfg.block_size), dtype)
    load_weights(model, directory)
    return model.to(device)


def build(kind: type[Transformer], cfg: ModelConfig, dtype: torch.dtype, whole: Collection[str] = ()) -> Transformer:
    """Return kind(cfg), a new model for products in `dtype`: where that is bfloat16, its matrices are held in it, in
    half the memory. Vectors and the parameters in `whole`, which are trained, stay float32."""
    if dtype != torch.bfloat16:
        return kind(cfg)
    torch.set_default_dtype(dtype)
    try:
        model = kind(cfg)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, p in model.named_parameters():
        if p.ndim < 2 or name in whole:
            p.data = p.data.float()
    return model


def held_dtype(model: Transformer) -> torch.dtype:
    """Return bfloat16 if `build` made the model so, with its embedding; else float32."""
    weights = model.embed_tokens.weight, next(p for p in model.layers.parameters() if p.ndim == 2)
    return torch.bfloat16 if all(p.dtype == torch.bfloat16 for p in weights) else torch.float32


@torch.no_grad()
def load_weights(model: Transformer, directory: str | Path) -> None:
    """Copy the weights of a directory into `model`, in place; half precision is widened.

    Names and shapes must be the model's: UserError tells what is not, with nothing copied. From a directory with an
    adapter, a model with adapters gets the base's weights and the adapter's to the bit (for a resume), a plain model
    their sum. From a directory without one, the model's adapters stay as they are.
    """
    directory = Path(directory)
    if not is_adapter(directory):
        return copy_weights(model, directory)
    base, plain = base_of(directory), lora.lora_config_of(model) is None
    with huggingface.open_safetensors(directory / ADAPTER_WEIGHTS) as file:
        key = (file.metadata() or {}).get("base_weights")  # peft does not write it
    if key and key != weights_key(base):
        raise UserError(f"checkpoint: the weights in {base} are not those that {directory} was trained on")
    copy_weights(model, base, leave=huggingface.stored_shapes(directory))
    huggingface.load_adapter(model, directory)
    if plain:
        lora.merge_(model)


@torch.no_grad()
def copy_weights(model: Transformer, directory: str | Path, leave: Collection[str] = ()) -> None:
    """Copy stored weights into `model`, except for adapters and the parameters in `leave`. Raise UserError."""
    if hasattr(model, "reshard"):  # of fsdp.py: else these could be copies that were gathered
        model.reshard()
    params = {name: p for name, p in model.named_parameters() if ".lora_" not in name and name not in leave}
    tensors = huggingface.open_weights(Path(directory))
    if model.cfg.tie_embeddings:
        huggingface.drop_tied_head(tensors, directory)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in leave}
    huggingface.check_fit({name: tuple(p.shape) for name, p in params.items()}, tensors, directory)
    for name, p in params.items():
        fsdp.put(p, tensors[name])


def weights_key(directory: Path) -> str:
    """Return a fingerprint of a directory's weights: the sizes of their files and blocks spread over each."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = check_regular(path)
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as f:
            for i in range(SAMPLED_BLOCKS):
                f.seek(max(0, size - 4096) * i // (SAMPLED_BLOCKS - 1))
                digest.update(f.read(4096))
    return digest.hexdigest()
