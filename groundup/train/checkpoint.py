"""Checkpoints: a Hugging Face model directory plus the training state, written whole or not at all.

    out/demo/
      step_000200/                       written as .step_000200.tmp, fsynced, then renamed
        config.json model.safetensors generation_config.json, the tokenizer's files       what transformers reads
        train_state.pt rank_00000.pt ...                     optimizer, scaler, position; random generators of each rank
        score.json checksums.json                            validation loss; SHA-256 of every other file, written last
      latest -> step_000200   best -> step_000150   best2 -> step_000100

AutoModelForCausalLM.from_pretrained("out/demo/latest") works with no export. The other way round, load_model reads any
Hugging Face directory of the two architectures that model.py builds: Llama, and Qwen3 where there is QK-norm. Opening a
checkpoint never runs code: weights are safetensors, state is plain data (torch.load with weights_only=True).

A model with adapters (lora.py) has adapter_config.json, adapter_model.safetensors and model_config.json in place of
model.safetensors and config.json: what is trained, and the directory of the frozen weights. transformers and peft load
that as it is; opened as a model, it is both, merged.

A kill -9 at any moment of a save costs that save alone: nothing is removed before its successor stands.

Training need not wait for the disk: write_behind.py lets save() work in a thread, from a copy in memory.
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.serialization import config as torch_config

from groundup.errors import UserError
from groundup.train import lora, ranks
from groundup.train.direct_file import DirectFile
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

STEP_NAME = re.compile(r"step_(\d+)")
BEST = ("best", "best2")
KEEP = "keep"  # a step that holds a file of this name is never removed: adapters need it
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Settings of those architectures beside the sizes, with the only value that model.py computes. Absent or null means it.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# safetensors' names of the types that weights may have: float32 holds them exactly
WEIGHT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CONFIG_FILES = ("config.json", "model_config.json")  # beside an adapter transformers takes the first for a whole model
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # parameters with a row for each token
IO_THREADS = 4  # to read, write, sum up and wait for the disk: what they call leaves Python to the others
SAMPLED_BLOCKS = 64  # of 4 KiB from each file of frozen weights: training moves every weight, so a few show it





# ---- save -----------------------------------------------------------------------------------------------------------


def save(
    out_dir: str | Path, step: int, model: Transformer, tokenizer: Tokenizer, state: dict, rank_state: dict,
    world: ranks.World, *, val_loss: float | None, keep_last: int, keep_best: int, base: str | Path = "",
    write: Callable[[Path, Transformer, Tokenizer], dict] | None = None, group: ProcessGroup | None = None,
) -> Path:  # fmt: skip
    """Write out_dir/step_NNNNNN, point the links at it, remove what is not kept; return its path.

    Called by all ranks, on one file system: rank 0 writes model, tokenizer and `state`, every rank its `rank_state`.
    Both hold plain data and tensors only. Kept are the `keep_last` newest (0: all) and the `keep_best` (0 to 2) of the
    lowest `val_loss`; None and NaN do not compete, of equals the earlier is better. If one rank fails (disk full), all
    raise CheckpointError and earlier checkpoints are intact. `base`, where the model has adapters: the directory that
    its frozen weights were loaded from, and from which a resume will take them. `write`: takes the place of write_model
    for a model of another kind. `group`: over which the ranks agree, None for that of training.
    """
    if keep_last < 0 or not 0 <= keep_best <= len(BEST):
        raise UserError(f"checkpoint: {keep_last=} must be 0 (all) or more, {keep_best=} must be 0, 1 or 2")
    final = Path(out_dir) / f"step_{step:06d}"
    temp = final.with_name(f".{final.name}.tmp")
    failure = f"cannot save {final}, earlier checkpoints are intact"
    with agreed(failure, world, temp, group):
        if world.is_main:
            clean(final.parent)
            temp.mkdir()
    with agreed(failure, world, temp, group):
        write_state(temp / rank_file(world.rank), rank_state)
        if world.is_main:
            write = write or partial(write_model, base=base)
            sums, of_state = at_once(
                [lambda: write(temp, model, tokenizer), lambda: write_state(temp / "train_state.pt", state)]
            )
            ranked = val_loss is not None and math.isfinite(val_loss)
            write_json(temp / "score.json", {"step": step, "val_loss": float(val_loss) if ranked else None})
    with agreed(failure, world, temp, group):
        if world.is_main:
            commit(temp, final, sums | {"train_state.pt": of_state})
    with agreed(f"{final} is saved, but the links and the older checkpoints are not in order", world, temp, group):
        if world.is_main:
            tidy(final.parent, step, keep_last, keep_best)
    return final


@contextmanager
def agreed(failure: str, world: ranks.World, temp: Path, group: ProcessGroup | None) -> Iterator[None]:
    """A part of the save that all ranks leave together: if it raises on one rank, `temp` goes and all ranks raise."""
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


def at_once(actions: list[Callable[[], object]]) -> list:
    """Results of the actions, a few at a time, each in a thread. When all have ended, the first error is raised.

    Plain threads: concurrent.futures takes nothing more once the main thread has ended, and a save may outlast it."""
    results: list = [None] * len(actions)
    errors: list[BaseException] = []
    todo = iter(enumerate(actions))

    def work() -> None:
        for i, action in todo:
            try:
                results[i] = action()
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(IO_THREADS, len(actions)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


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
) -> dict[str, str]:
    """The Hugging Face part; {file: checksum} of what is large. Weights are the float32 ones in training, bit for bit;
    a tied head is stored once. Of a model with adapters, what is trained and where the rest is: `base`."""
    plain, sums = lora.lora_config_of(model) is None, {}
    tokenizer.save(directory)
    config = directory / CONFIG_FILES[0 if plain else 1]
    write_json(config, to_hf_config(model.cfg, tokenizer, dtype))
    if plain:
        weights = {lora.hf_name(name): p.detach().to("cpu", dtype) for name, p in model.named_parameters()}
        sums["model.safetensors"] = write_weights(directory / "model.safetensors", weights)
    else:
        write_adapter(directory, model, base)
        shutil.copymode(config, directory / lora.WEIGHTS_FILE)  # safetensors 0.8 lets only the owner read it
    ends = [i for i in (tokenizer.eot_id, tokenizer.im_end_id) if i >= 0]  # of a text, of a turn
    write_json(directory / "generation_config.json", special_ids(tokenizer) | {"eos_token_id": ends})
    return sums


def write_weights(path: Path, weights: dict[str, Tensor]) -> str:
    """The very file that safetensors.torch.save_file writes of tensors of one type on the CPU, past the system's cache;
    its checksum. The format: length of the header as 8 bytes, a JSON header padded to a multiple of 8, the tensors."""
    kinds = {dtype: kind for kind, dtype in WEIGHT_DTYPES.items()}
    header, end, ordered = {"__metadata__": {"format": "pt"}}, 0, dict(sorted(weights.items()))
    for name, t in ordered.items():
        header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with DirectFile(path) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for t in ordered.values():
            f.write(t.contiguous().view(-1).view(torch.uint8).numpy())
    return checksum_text(f.crc)


def write_adapter(directory: Path, model: Transformer, base: str | Path) -> None:
    """Adapters and what else is trained; after a change of the vocabulary all its rows, for the base has others."""
    if not base:
        raise UserError("checkpoint: a model with adapters needs base, the directory of its frozen weights")
    resized = load_config(base).vocab_size != model.cfg.vocab_size
    path, note = str(Path(base).resolve()), {"base_weights": weights_key(Path(base))}
    lora.save_adapter(directory, model, path, VOCABULARY if resized else (), note)


def write_state(path: Path, state: dict) -> str:
    """torch.save, past the system's cache; the checksum. What could be read back only by running code is refused now,
    not at the resume."""
    # The sum of the whole file, in checksums.json, makes those of its parts needless.
    with DirectFile(path) as f, torch_config.patch("save.compute_crc32", False):
        torch.save(state, f)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe:
        raise UserError(f"{path.name} holds {', '.join(unsafe)}; what is not plain data cannot be resumed")
    return checksum_text(f.crc)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def commit(temp: Path, final: Path, known: dict[str, str]) -> None:
    """Contents to the disk, then the name. A step that exists steps aside until the new one has its name. `known`:
    {file: checksum} where it has been summed up already."""
    files = list(temp.iterdir())
    at_once([partial(sync, path) for path in files])
    sums = {path.name: known[path.name] if path.name in known else checksum(path) for path in files}
    sums.pop("score.json", None)  # rank() writes it again
    sums.pop(lora.CONFIG_FILE, None)  # where an adapter's base is may change: it is moved, and that file edited then
    write_json(temp / "checksums.json", dict(sorted(sums.items())))
    sync(temp / "checksums.json")
    sync(temp)
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
        write_json(temp, {"step": step, "val_loss": float(val_loss)})
        sync(temp)
        temp.replace(path / "score.json")
        sync(path)
        tidy(path.parent, step, keep_last, keep_best)
    except OSError as error:
        raise UserError(f"checkpoint: cannot record the validation loss of {path}: {error.strerror}") from error


def point(link: Path, target: Path | None) -> None:
    """Replace a symbolic link at one stroke; None removes it. Relative, so that a run directory can be moved."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    temp = link.with_name(f".{link.name}.tmp")
    temp.unlink(missing_ok=True)
    temp.symlink_to(target.name, target_is_directory=True)
    temp.replace(link)


def read_loss(step_dir: Path) -> float | None:
    """Validation loss of a checkpoint, None if it has none."""
    try:
        return read_json(step_dir / "score.json").get("val_loss")
    except UserError:  # a damaged checkpoint is the concern of find_latest
        return None


def sync(path: Path) -> None:
    """Have the system put a file, or a directory's list of names, on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum(path: Path) -> str:
    """CRC-32 of a file. It tells of accidents, not of forgery, in less than half the time of SHA-256."""
    crc = 0
    with open(path, "rb") as f:
        while block := f.read(2**20):
            crc = zlib.crc32(block, crc)
    return checksum_text(crc)


def checksum_text(crc: int) -> str:
    return f"crc32 {crc:08x}"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def reason_of(error: BaseException) -> str:
    """One line of why: the system's words if it said any, for torch says "unexpected pos 704 vs 598" of a full disk."""
    cause = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- find -----------------------------------------------------------------------------------------------------------


def find_latest(out_dir: str | Path, report: Callable[[str], None] = print) -> Path | None:
    """Newest checkpoint of a run with every byte as it was written; None if the run has none yet.

    A damaged one is reported in a line and the one before it tried. Raises CheckpointError if none is left.
    """
    # While a save replaces a step, for a moment the step has only its .old name.
    paths = [*step_dirs(Path(out_dir)), *Path(out_dir).glob(".step_*.old")]
    for path in sorted(paths, key=step_of, reverse=True):
        try:
            check_bytes(path)
        except UserError as error:
            report(f"{error}; trying the checkpoint before it")
        else:
            return path
    if paths:
        raise UserError(f"checkpoint: all {len(paths)} checkpoints in {out_dir} are damaged; use another out_dir")
    return None


def check_bytes(step_dir: Path) -> None:
    """Raise CheckpointError unless every file of a checkpoint is as it was written."""
    sums = {step_dir / name: str(digest) for name, digest in read_json(step_dir / "checksums.json").items()}
    # Earlier versions wrote SHA-256.
    at_once([partial(check_sum, path, s, checksum if s.startswith("crc32") else sha256) for path, s in sums.items()])


def check_sum(path: Path, digest: str, sum_of: Callable[[Path], str]) -> None:
    try:
        found = sum_of(path)
    except OSError as error:
        raise UserError(f"checkpoint: cannot read {path}: {error.strerror}") from None
    if found != digest:
        raise UserError(f"checkpoint: {path} is damaged, its checksum is not the one in checksums.json")


def step_dirs(out_dir: Path) -> list[Path]:
    """The finished steps of a run, oldest first."""
    return sorted((path for path in out_dir.glob("step_*") if STEP_NAME.fullmatch(path.name)), key=step_of)


def step_of(step_dir: Path) -> int:
    return int(STEP_NAME.search(step_dir.name)[1])


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def resolve(init_from: str | Path) -> Path:
    """The model directory that is meant: a run's newest good checkpoint, a checkpoint, or any Hugging Face one.

    The bytes of a checkpoint are checked. Raises CheckpointError.
    """
    path = Path(init_from)
    if not path.is_dir():
        reason = "is a file, give its directory" if path.exists() else "no such directory (hub models: download first)"
        raise UserError(f"checkpoint: init_from={str(init_from)!r}: {reason}")
    if (path / "checksums.json").exists():
        check_bytes(path)
    if is_adapter(path):
        resolve(base_of(path))  # the mistake of an adapter without its base should show now
    if is_model(path):
        return path
    latest = find_latest(path)
    if latest is None:
        raise UserError(f"checkpoint: {path} holds no checkpoint: no config.json, no step_* directory")
    return resolve(latest)


def newest_run(root: str | Path = "out") -> Path:
    """The run below `root` that saved last. Raises CheckpointError if there is none."""
    written = list(Path(root).glob("*/step_*/checksums.json"))
    if not written:
        raise UserError(f"checkpoint: no run in {str(root)!r} has a checkpoint; train, or give --init_from=DIR")
    return max(written, key=lambda path: path.stat().st_mtime).parent.parent


# ---- load -----------------------------------------------------------------------------------------------------------


def load_train_state(step_dir: str | Path, rank: int, map_location: str = "cpu") -> tuple[dict, dict]:
    """(state, rank_state) as they were saved; rank_state is {} for a rank that did not exist then. Runs no code."""
    path = Path(step_dir) / rank_file(rank)
    state = read_state(Path(step_dir) / "train_state.pt", map_location)
    return state, read_state(path, map_location) if path.exists() else {}


def load_rank_states(step_dir: str | Path, rank: int, world_size: int) -> list[dict]:
    """[rank_state] of this rank, if the saved run had as many ranks as this one; otherwise those of all its ranks."""
    paths = sorted(Path(step_dir).glob("rank_*.pt"))
    return [read_state(path, "cpu") for path in ([paths[rank]] if len(paths) == world_size else paths)]


def read_state(path: Path, map_location: str) -> dict:
    try:
        state = torch.load(path, map_location=map_location, weights_only=True)
    except OSError as error:
        raise UserError(f"checkpoint: cannot read {path}: {error.strerror}") from None
    except Exception:  # of many kinds; and torch's text recommends weights_only=False, which would run the code
        raise UserError(f"checkpoint: refused to load {path}: damaged, or more than plain data") from None
    if not isinstance(state, dict):
        raise UserError(f"checkpoint: refused to load {path}: it holds a {type(state).__name__}, not a dict")
    return state


def load_model(directory: str | Path, device: str = "cpu", dropout: float = 0.0, block_size: int = 0) -> Transformer:
    """Model of a checkpoint or Hugging Face directory in float32; block_size 0 is the one it was saved with."""
    cfg = load_config(directory)
    model = Transformer(replace(cfg, dropout=dropout, block_size=block_size or cfg.block_size))
    load_weights(model, directory)
    return model.to(device)


def load_weights(model: Transformer, directory: str | Path) -> None:
    """Copy the weights of a directory into `model`, in place; half precision is widened.

    Names and shapes must be the model's, neither more nor fewer: CheckpointError says what is not, with nothing copied.
    A directory with an adapter: a model with adapters gets its base's weights and the adapter's, to the bit as they
    were saved (for a resume); a plain model gets their sum. A directory without: adapters stay as they are.
    """
    if is_adapter(directory):
        load_adapted(model, Path(directory))
    else:
        copy_weights(model, directory)


@torch.no_grad()
def copy_weights(model: Transformer, directory: str | Path, leave: tuple[str, ...] = ()) -> None:
    """Copy model.safetensors into `model`, but for adapters and the parameters in `leave`. Raises CheckpointError."""
    params = {name: p for name, p in model.named_parameters() if ".lora_" not in name and name not in leave}
    with ExitStack() as files:
        tensors = open_weights(Path(directory), files)
        if model.cfg.tie_embeddings:
            drop_tied_head(tensors, directory)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in leave}
        problems = list(misfits(params, tensors))
        if problems:
            raise UserError(f"checkpoint: the weights in {directory} do not fit the model: {listed(problems)}")
        for name, p in params.items():
            p.copy_(tensors[name][:])


# ---- adapters -------------------------------------------------------------------------------------------------------


def is_adapter(directory: str | Path) -> bool:
    return (Path(directory) / lora.CONFIG_FILE).exists()


def is_model(directory: str | Path) -> bool:
    return is_adapter(directory) or (Path(directory) / "config.json").exists()


def base_of(directory: str | Path) -> Path:
    """The directory of the weights that an adapter goes with; it may hold an adapter itself. Raises CheckpointError."""
    name = lora.read_peft_config(directory).get("base_model_name_or_path") or ""
    path = Path(name)
    if not name or not path.is_dir():
        raise UserError(
            f"checkpoint: {Path(directory) / lora.CONFIG_FILE} names base_model_name_or_path={name!r}, "
            "which is no directory; if the base was moved, write there where it is now"
        )
    return path if is_model(path) else resolve(path)


def tokenizer_dir(directory: str | Path) -> Path:
    """Where the tokenizer of a model directory is: there, or, of an adapter that has none, at its base."""
    path = Path(directory)
    while is_adapter(path) and not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        path = base_of(path)
    return path


def load_adapted(model: Transformer, directory: Path) -> None:
    """Base and adapter into `model`; added up, if it is plain. Raises CheckpointError, LoRAError."""
    base, shapes = base_of(directory), lora.stored_shapes(directory)
    check_base(directory, base)
    leave, rows = (), load_config(base).vocab_size
    if rows != model.cfg.vocab_size:
        leave = VOCABULARY
        missing = [name for name, _ in model.named_parameters() if name in VOCABULARY and name not in shapes]
        if missing:
            raise UserError(
                f"checkpoint: {directory} is of {model.cfg.vocab_size} tokens, its base {base} of {rows}, "
                f"and {missing[0]} is not in {lora.WEIGHTS_FILE}"
            )
    plain = lora.lora_config_of(model) is None
    if is_adapter(base):
        copy_parameters(load_model(base), model, leave)
    else:
        copy_weights(model, base, leave)
    lora.load_adapter(model, directory)
    if plain:
        lora.merge_(model)


@torch.no_grad()
def copy_parameters(source: Transformer, model: Transformer, leave: tuple[str, ...]) -> None:
    params = dict(model.named_parameters())
    for name, p in source.named_parameters():
        if name not in leave:
            params[name].copy_(p)


def check_base(directory: Path, base: Path) -> None:
    """Raise CheckpointError if the base is not what it was when the adapter was saved (where that is known)."""
    with lora.open_adapter(directory) as file:
        saved = (file.metadata() or {}).get("base_weights")
    if saved and saved != weights_key(base):
        raise UserError(f"checkpoint: the weights in {base} are not those that {directory} was trained on")


def weights_key(directory: Path) -> str:
    """A fingerprint of a directory's weights from the sizes of their files and blocks spread over each."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as f:
            for i in range(SAMPLED_BLOCKS):
                f.seek(max(0, size - 4096) * i // (SAMPLED_BLOCKS - 1))
                digest.update(f.read(4096))
    return digest.hexdigest()


def model_name(directory: Path) -> str:
    """A model by the name of its directory and a fingerprint of its weights and settings: where it is does not count.
    Of a checkpoint that of its checksums; of others, which have none, of their files' sizes and configurations."""
    sums = directory / "checksums.json"
    sizes = [(path.name, path.stat().st_size) for path in sorted(directory.glob("*.safetensors"))]
    content = sums.read_bytes() if sums.exists() else repr(sizes).encode()
    content += b"".join(path.read_bytes() for path in sorted(directory.glob("*config.json")))
    return f"{directory.name} {hashlib.sha256(content).hexdigest()[:16]}"


# ---- weights --------------------------------------------------------------------------------------------------------


def open_weights(directory: Path, files: ExitStack) -> dict[str, Any]:
    """{our name: slice of an open safetensors file}, from the one file or from the shards that an index names."""
    paths, index = [directory / "model.safetensors"], directory / "model.safetensors.index.json"
    if index.exists() and not paths[0].exists():
        paths = [directory / shard for shard in sorted(set(read_json(index).get("weight_map", {}).values()))]
    tensors = {}
    for path in paths:
        try:
            shard = files.enter_context(safe_open(path, "pt"))
        except (OSError, SafetensorError) as error:
            why = "a .bin can run code, only safetensors are read" if any(directory.glob("*.bin")) else reason_of(error)
            raise UserError(f"checkpoint: cannot read {path}: {why}") from None
        tensors |= {name.removeprefix("model."): shard.get_slice(name) for name in shard.keys()}
    # Conversions of the first Llamas carry this constant, which follows from the configuration.
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def drop_tied_head(tensors: dict[str, Any], directory: str | Path) -> None:
    """Some tied models store the embedding a second time as their head: take it away if it is the same."""
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head[:], embedding[:]):
        raise UserError(f"checkpoint: {directory} ties its embeddings, but lm_head.weight differs from them")


def misfits(params: dict[str, Tensor], tensors: dict[str, Any]) -> Iterator[str]:
    """What hinders copying `tensors` into `params`, one text for each."""
    yield from (f"{name} is missing" for name in params if name not in tensors)
    yield from (f"{name} is unknown" for name in tensors if name not in params)
    for name in (name for name in params if name in tensors):
        shape, want, dtype = tuple(tensors[name].get_shape()), tuple(params[name].shape), tensors[name].get_dtype()
        if shape != want:
            yield f"{name} has shape {shape} and not {want}"
        elif dtype not in WEIGHT_DTYPES:
            yield f"{name} is {dtype} and not one of {', '.join(WEIGHT_DTYPES)}"


def listed(texts: list[str]) -> str:
    """The first few of what may be thousands."""
    return "; ".join(texts[:4]) + (f"; ... ({len(texts)} in all)" if len(texts) > 4 else "")


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"checkpoint: cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise UserError(f"checkpoint: {path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"checkpoint: {path} is damaged: it holds a {type(value).__name__}, not an object")
    return value


# ---- Hugging Face's config.json -------------------------------------------------------------------------------------


def to_hf_config(cfg: ModelConfig, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32) -> dict:
    """config.json, with the rotary settings and the dtype under both names: transformers 5's and transformers 4's."""
    kind = "qwen3" if cfg.qk_norm else "llama"
    return special_ids(tokenizer) | {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.block_size,
        "num_hidden_layers": cfg.n_layer,
        "num_attention_heads": cfg.n_head,
        "num_key_value_heads": cfg.n_kv_head,
        "hidden_size": cfg.n_embd,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn_dim,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": {"rope_type": "default"} | (cfg.rope_scaling or {}) | {"rope_theta": cfg.rope_theta},
        "rope_theta": cfg.rope_theta,
        "rope_scaling": cfg.rope_scaling,
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The tokens that begin, end and pad a text; null for one that the tokenizer does not have."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eot_id, "pad_token_id": tokenizer.pad_id}
    return {key: i if i >= 0 else None for key, i in ids.items()}


def load_config(directory: str | Path) -> ModelConfig:
    """Architecture in a config.json of transformers 4 or 5. Raises CheckpointError if model.py does not build it.

    An adapter of peft's has none: its base's, with as many tokens as the embedding has that it may have stored."""
    names = reversed(CONFIG_FILES) if is_adapter(directory) else CONFIG_FILES[:1]
    paths = [Path(directory) / name for name in names]
    path = next((path for path in paths if path.exists()), paths[-1])
    if not path.exists() and is_adapter(directory):
        cfg, shapes = load_config(base_of(directory)), lora.stored_shapes(directory)
        return replace(cfg, vocab_size=shapes.get(VOCABULARY[0], (cfg.vocab_size,))[0])
    hf = read_json(path)
    check_supported(hf, path)
    rope_theta, rope_scaling = read_rope(hf, path)
    try:
        return ModelConfig(
            vocab_size=hf["vocab_size"],
            block_size=hf["max_position_embeddings"],
            n_layer=hf["num_hidden_layers"],
            n_head=hf["num_attention_heads"],
            n_kv_head=hf.get("num_key_value_heads") or 0,
            n_embd=hf["hidden_size"],
            head_dim=hf.get("head_dim") or 0,
            ffn_dim=hf["intermediate_size"],
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=hf["rms_norm_eps"],
            qk_norm=hf["model_type"] == "qwen3",
            tie_embeddings=bool(hf.get("tie_word_embeddings")),
        )
    except KeyError as error:
        raise UserError(f"checkpoint: {path} has no {error}") from None


def check_supported(hf: dict, path: Path) -> None:
    """Raise CheckpointError for a model whose weights would load but mean something else."""
    kind = hf.get("model_type")
    if kind not in ARCHITECTURES:
        why = " (Qwen2's queries, keys and values have biases)" if kind == "qwen2" else ""
        raise UserError(f"checkpoint: {path}: model_type={kind!r}{why}; supported are {', '.join(ARCHITECTURES)}")
    settings = hf | (hf.get("rope_parameters") or {})
    for key, only in FIXED.items():
        if settings.get(key) not in (None, only):
            raise UserError(f"checkpoint: {path}: {key}={settings[key]!r}; supported is {only!r}")


def read_rope(hf: dict, path: Path) -> tuple[float, dict | None]:
    """(rope_theta, Llama 3.1's scaling or None). transformers 5 keeps both in rope_parameters."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {"rope_type": "default"}
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type"))  # "type" before transformers 4.43
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"checkpoint: {path}: rope_type={kind!r}; supported are default, llama3")
    missing = [key for key in LLAMA3_ROPE if key not in rope]
    if missing:
        raise UserError(f"checkpoint: {path}: rope_type='llama3' without {listed(missing)}")
    return theta, {"rope_type": kind} | {key: rope[key] for key in LLAMA3_ROPE}
