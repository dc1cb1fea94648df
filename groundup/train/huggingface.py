"""Model directories in Hugging Face's format: write them, open them, start a run from one.

    config.json model.safetensors generation_config.json tokenizer.json ...     a whole model
    model_config.json adapter_config.json adapter_model.safetensors ...         a model with LoRA

transformers and peft open what is written here, with no export step. Our parameter names are
theirs without "model.". What would load but mean something else is refused in one line, before
anything is copied. Only safetensors are read: a .bin is pickled and could run code.
"""

import functools
import hashlib
import json
import math
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groundup.errors import UserError, listed, naming, refuse, say
from groundup.files.disk import housekeeping, is_utf8
from groundup.files.untrusted import check_regular, crc32_of, is_name, read_json
from groundup.tokens.text_tokenizer import TextTokenizer, has_tokenizer
from groundup.train import lora, ranks
from groundup.train.config_json import (
    from_hf_config,
    is_plain,
    read_config,
    to_hf_config,
    write_json,
)
from groundup.train.device import SkipInit
from groundup.train.lora import LoRAConfig, lora_config_of
from model import ModelConfig, Transformer

DTYPES = ("F32", "F16", "BF16")  # safetensors' names; float32 holds each exactly
PREFIX = "base_model.model."  # peft puts this before Hugging Face's names
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTED_CONFIG = "model_config.json"  # beside adapters: transformers takes config.json for a model
# Keys of adapter_config.json that do not change what is computed, or that are checked elsewhere
NEUTRAL_KEYS = (
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision "
    "inference_mode r lora_alpha lora_dropout target_modules modules_to_save fan_in_fan_out "
    "ensure_weight_tying megatron_core runtime_config qalora_group_size eva_config "
    "init_lora_weights exclude_modules use_rslora"
).split()


def fail(text: str) -> NoReturn:
    """Raise UserError about a checkpoint."""
    raise UserError(f"checkpoint: {text}") from None


# ---- write a directory --------------------------------------------------------------------------


def stored_weights(model: Transformer) -> dict[str, Tensor]:
    """Return the tensors that a save writes, by our names, on their device."""
    # With adapters these are the adapters and the other trained weights, else all weights.
    adapted = lora_config_of(model) is not None
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad or not adapted}
    if adapted and model.cfg.tie_embeddings and "embed_tokens.weight" in weights:
        # peft leaves the head with the base's embedding unless it is stored as well.
        weights["lm_head.weight"] = weights["embed_tokens.weight"].clone()
    return weights


def write_model(
    directory: Path,
    model: Transformer,
    tokenizer: TextTokenizer,
    base: str | Path = "",  # directory of the frozen weights of a model with adapters
    dtype: torch.dtype = torch.float32,
    weights: dict[str, Tensor] | None = None,  # a copy of stored_weights, if training goes on
) -> None:
    """Write weights, settings and tokenizer; float32 weights are written bit for bit."""
    adapted = lora_config_of(model) is not None
    if adapted and not base:
        fail("adapters need base, the directory of the frozen weights")
    write_settings(directory, model.cfg, tokenizer, dtype, base if adapted else "")
    weights = weights or stored_weights(model)
    if adapted:  # the base's weights are not repeated
        save_adapter(directory, model, str(Path(base).resolve()), weights)
        return
    stored = {hf_name(name): t.to("cpu", dtype) for name, t in weights.items()}
    save_weights(directory / "model.safetensors", stored)


def write_settings(
    directory: Path,
    cfg: ModelConfig,
    tokenizer: TextTokenizer,
    dtype: torch.dtype,
    base: str | Path,  # "" for a whole model
) -> None:
    """Write what a model directory holds beside its weights."""
    tokenizer.save(directory)
    config = to_hf_config(cfg, tokenizer, dtype)
    if base:  # a changed base would change the model: load_weights compares
        config["base_weights"] = weights_fingerprint(base)
    write_json(directory / (ADAPTED_CONFIG if base else "config.json"), config)

    # How to sample: the source's settings (temperature and the like), and the tokenizer's ids.
    ids = {k: i for k, i in config.items() if k.endswith("_token_id") and i is not None}
    ids["eos_token_id"] = sorted(tokenizer.stop_ids)
    write_json(directory / "generation_config.json", json.loads(tokenizer.generation_config) | ids)


def check_saves(cfg: ModelConfig, tokenizer: TextTokenizer) -> None:
    """Raise UserError now, not at the first save, if these settings would not be read back."""
    # Write them, read them, compare: this also covers what an edited model.py or tokenizer adds.
    with tempfile.TemporaryDirectory() as directory:
        write_settings(Path(directory), cfg, tokenizer, torch.float32, base="")
        path = Path(directory, "config.json")
        read = read_config(read_json(path), path)
        wanted = replace(cfg, dropout=0.0)  # dropout is of a training run, not of the model
        if read != wanted:
            found = vars(wanted).items()
            lost = [f"{key}={value!r}" for key, value in found if value != getattr(read, key)]
            fix = "write and read it in groundup/train/config_json.py"
            fail(f"config.json does not keep {listed(lost)}; {fix}")
        if TextTokenizer.load(directory).fingerprint() != tokenizer.fingerprint():
            fail("the tokenizer's files do not give back its ids")


def save_adapter(
    directory: Path, model: Transformer, base: str, weights: dict[str, Tensor]
) -> None:
    """Write adapter_config.json and adapter_model.safetensors. weights: of stored_weights."""
    cfg = lora_config_of(model)
    # float32, as they are trained: a resume continues from these bits.
    stored = {PREFIX + hf_name(n): t.to("cpu", torch.float32) for n, t in weights.items()}
    save_weights(directory / ADAPTER_WEIGHTS, stored)

    # Modules trained whole, beside the adapters. peft finds a module by the end of its name:
    # "norm" alone would also be another norm.
    whole = [name.removesuffix(".weight") for name in weights if ".lora_" not in name]
    tied = model.cfg.tie_embeddings and "embed_tokens" in whole
    whole = [name if name == "embed_tokens" else hf_name(name) for name in whole]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": cfg.rank,
        # peft's own files have whole numbers here.
        "lora_alpha": int(cfg.alpha) if float(cfg.alpha).is_integer() else cfg.alpha,
        "lora_dropout": cfg.dropout,
        "target_modules": list(cfg.modules),
        "modules_to_save": whole or None,
        "ensure_weight_tying": tied,
        "bias": "none",  # biases are not trained
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    write_json(directory / ADAPTER_CONFIG, config)


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
    with housekeeping("let others read the weights"):
        path.chmod(mode)


# ---- weights in safetensors files ----------------------------------------------------------------


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
        fail(f"cannot read {path}: {why}")


def read_index(directory: Path) -> dict[str, str]:
    """Return {tensor: file} of the index of a directory's shards, {} if it has none."""
    index = directory / "model.safetensors.index.json"
    if not index.exists() or (directory / "model.safetensors").exists():
        return {}
    # A name with a folder could point anywhere on this machine.
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(map(is_name, shards.values())):
        fail(f"{index} is damaged: weight_map must name files of its directory")
    return shards


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a directory's weights: an adapter's, one, or the shards of an index."""
    if is_adapter(directory):
        return [directory / ADAPTER_WEIGHTS]
    if shards := read_index(directory):
        return [directory / shard for shard in sorted(set(shards.values()))]
    paths = [directory / "model.safetensors"]
    if not paths[0].exists():  # a copy without the index
        paths = sorted(directory.glob("model-*-of-*.safetensors")) or paths
    return paths


def open_weights(directory: Path) -> dict[str, Stored]:
    """Return the weights by our names, of an adapter its own. Only headers are read."""
    tensors: dict[str, Stored] = {}
    index = {} if is_adapter(directory) else read_index(directory)
    for path in weight_files(directory):
        with open_safetensors(path) as file:
            for name in file.keys():
                # A shard may hold an old copy of what the index takes from another one. What the
                # index does not name is used: check_fit finds what is missing or too much.
                if index.get(name, path.name) != path.name:
                    continue
                tensor = file.get_slice(name)
                ours = name.removeprefix(PREFIX).removeprefix("model.")
                # Beside a larger vocabulary peft also writes a layer's names in memory.
                ours = ours.replace(".modules_to_save.", ".")
                other = tensors[ours].path if ours in tensors else path
                if other != path:  # shards of two models, and no index that says which to take
                    fail(f"{name} is in both {other} and {path}; remove what is not of this model")
                tensors[ours] = Stored(path, name, tensor.get_shape(), tensor.get_dtype())
    # Conversions of the first Llamas store a constant, which follows from the configuration, peft a
    # layer as it was before it was trained whole.
    others = ("rotary_emb.inv_freq", ".original_module.weight")
    return {name: t for name, t in tensors.items() if not name.endswith(others)}


def drop_tied_head(tensors: dict[str, Stored], directory: Path, trained_tied: bool = True) -> None:
    """Remove the head that files of tied models may hold beside the embedding; it must be equal.

    trained_tied: they were one weight in training too, so an adapter need not store both."""
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("embed_tokens.weight")
    if head is None:
        differ = embedding is not None and not trained_tied
    else:
        differ = embedding is None or not torch.equal(head[:], embedding[:])
    if differ:
        fail(f"{directory} ties its embeddings, but lm_head.weight was trained apart from them")


def check_sizes(cfg: ModelConfig, tensors: dict[str, Stored], directory: Path) -> None:
    """Raise UserError if the stored weights have other sizes than config.json."""
    # Before the model is built: a damaged config.json could ask for any amount of memory.
    if not is_plain(cfg):
        return  # an edited model.py has its own shapes, which only check_fit compares
    # layers.7.mlp.up_proj.weight -> 7
    n_layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    if n_layers != cfg.n_layer:
        what = f"have {n_layers} layers, its config has {cfg.n_layer}"
        # Names as torch.compile or a wrapper leaves them
        what += "" if n_layers else f"; names are like {listed(list(tensors), 1)}"
        fail(f"the weights in {directory} {what}")

    # These matrices have every size of the architecture, (out, in); an adapter lacks some.
    shapes = {
        "embed_tokens.weight": (cfg.vocab_size, cfg.n_embd),
        "layers.0.self_attn.q_proj.weight": (cfg.n_head * cfg.head_dim, cfg.n_embd),
        "layers.0.self_attn.k_proj.weight": (cfg.n_kv_head * cfg.head_dim, cfg.n_embd),
        "layers.0.mlp.gate_proj.weight": (cfg.ffn_dim, cfg.n_embd),
    }
    stored = {name: tensors[name] for name in shapes if name in tensors}
    check_fit({name: shapes[name] for name in stored}, stored, directory)


def check_fit(shapes: dict[str, tuple], tensors: dict[str, Stored], directory: str | Path) -> None:
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
        fail(f"the weights in {directory} do not fit the model: {listed(problems, 4)}")


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


# ---- open a directory ---------------------------------------------------------------------------


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file."""
    if path.name == ADAPTER_CONFIG:  # all but the directory of the base, which the user may move
        config = read_json(path) | {"base_model_name_or_path": ""}
        crc = zlib.crc32(json.dumps(config, sort_keys=True).encode())
    else:
        crc = crc32_of(path)
    return f"crc32 {crc:08x}"


@functools.cache
def checksum_once(path: Path, size: int, mtime_ns: int) -> str:
    """Return checksum(path), computed once per process for a file that has not changed."""
    return checksum(path)


def weights_fingerprint(directory: str | Path) -> str:
    """Return names and checksums of the files of a directory's weights, of an adapter also those
    of its base."""
    parts, directory = [], Path(directory)
    paths = weight_files(directory)
    if is_adapter(directory):
        paths += weight_files(base_of(directory))
    for path in filter(Path.exists, paths):
        # Size and time of the last change tell whether the file is still the same.
        status = path.stat()
        parts.append(f"{path.name} {checksum_once(path, status.st_size, status.st_mtime_ns)}")
    return ", ".join(parts)


# For all ranks, which may share a disk: rank 0 reads the files.
shared_fingerprint = ranks.on_rank_0(weights_fingerprint)


def model_name(directory: Path) -> str:
    """Return the directory's name and a fingerprint of its weights and settings."""
    # adapter_config.json and model_config.json are of LoRA, config.json of a whole model.
    paths = [path for path in sorted(directory.glob("*config.json")) if path.name[0] != "."]
    settings = b"".join(path.read_bytes() for path in paths)
    digest = hashlib.sha256(weights_fingerprint(directory).encode() + settings)
    return f"{directory.name} {digest.hexdigest()[:16]}"


def is_adapter(directory: str | Path) -> bool:
    return Path(directory, ADAPTER_CONFIG).exists()


def is_reward_model(directory: str | Path) -> bool:
    """Return whether a directory holds a reward model, of ours or of transformers."""
    path = Path(directory) / "config.json"
    names = read_json(path).get("architectures") if path.exists() else None
    if not isinstance(names, list):
        return False
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def config_path(directory: str | Path) -> Path:
    return Path(directory, ADAPTED_CONFIG if is_adapter(directory) else "config.json")


def base_of(directory: str | Path) -> Path:
    """Return the directory of an adapter's frozen weights. Raise UserError if there is none."""
    name = str(read_peft_config(directory).get("base_model_name_or_path") or "")
    path = Path(name)  # "" is the current directory to Path
    if name and is_adapter(path):
        fail(f"{directory} is an adapter on the adapter {path}; merge that with tools/merge.py")
    if not name or not (path / "config.json").exists():
        what = f"base_model_name_or_path={name!r} is no model directory; write there where it is"
        if re.fullmatch(r"[\w-]+/[\w.-]+", name) and not path.parent.exists():
            what += f", after: hf download {name} --local-dir=DIR"
        fail(f"{Path(directory, ADAPTER_CONFIG)}: {what}")
    return path


def tokenizer_dir(directory: str | Path) -> Path:
    """Return where the tokenizer is: in `directory` or, for an adapter without one, in its base."""
    path = Path(directory)
    return base_of(path) if is_adapter(path) and not has_tokenizer(path) else path


def load_config(directory: str | Path, to_train: bool = False) -> ModelConfig:
    """Return the architecture of a model directory; refuse one that model.py does not build.

    to_train: as in `from_hf_config`."""
    directory = base = Path(directory)
    own = {}  # an adapter's tensors, which come before those of its base
    if is_adapter(directory):
        base, own = base_of(directory), open_weights(directory)

    # An adapter of ours has its own config, a whole model too.
    if config_path(directory).exists() or base == directory:
        cfg = from_hf_config(config_path(directory), to_train)
    else:  # peft's adapters come without the model's config, and may have more rows than the base
        cfg = from_hf_config(base / "config.json", to_train)
        embedding = own.get("embed_tokens.weight")
        if embedding is not None and embedding.shape:
            cfg = replace(cfg, vocab_size=embedding.shape[0])
    if any(base.glob("*.safetensors*")):  # --plan_only needs no weights
        check_sizes(cfg, open_weights(base) | own, directory)
    return cfg


def build(kind: type[Transformer], cfg: ModelConfig, dtype: torch.dtype) -> Transformer:
    """Return kind(cfg), whose weights are to be loaded, for products in `dtype`.

    bfloat16 halves the memory of its matrices."""
    # A GPU computes float16 from float32 weights. Vectors (norms, biases) are always float32.
    with lora.weights_in(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32), SkipInit():
        model = kind(cfg)
    for p in model.parameters():
        if p.ndim < 2:
            p.data = p.data.float()
    return model


def load_model(
    directory: str | Path,
    device: torch.device | str = "cpu",
    block_size: int = 0,  # positions; 0 = as saved
    dtype: torch.dtype = torch.float32,  # of the matrix products
    to_train: bool = False,
) -> Transformer:
    """Return the model of a directory, with adapters merged. to_train: as in `from_hf_config`."""
    # The context length only sizes the table of rotary angles, not the weights.
    cfg = load_config(directory, to_train)
    # Adapters are merged in float32: the sum is rounded once, as in what tools/merge.py writes.
    built = torch.float32 if is_adapter(directory) else dtype
    model = build(Transformer, replace(cfg, block_size=block_size or cfg.block_size), built)
    load_weights(model, directory)
    if dtype == torch.bfloat16:
        for p in model.parameters():
            if p.ndim >= 2:
                p.data = p.data.bfloat16()
    return model.to(device)


@torch.no_grad()
def load_weights(model: Transformer, directory: str | Path) -> None:
    """Copy the weights of a directory into `model`, in place; half precision is widened.

    From a directory with adapters, a model with adapters gets the base and the adapters to the bit
    (a resume), and a plain model their sum. From another one, adapters that the model has stay as
    they are. Raise UserError for names or shapes that do not fit."""
    directory = base = Path(directory)
    if ranks.is_sharded(model):  # the parameters may still be copies, gathered for a forward
        model.reshard()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if ".lora_" not in n}
    cfg, own = None, {}  # of an adapter
    if is_adapter(directory):
        base = base_of(directory)
        check_base(base, directory)
        cfg, own = open_adapter(model, directory)
        shapes |= lora.adapter_shapes(model, cfg)
    tensors = open_weights(base)
    if model.cfg.tie_embeddings:  # one parameter, though files may hold two tensors
        drop_tied_head(tensors, base)
    tensors |= own  # what was trained beside adapters is in both places

    # Everything is checked before the first change, so an error leaves the model as it was.
    check_fit(shapes, tensors, f"{base} with {directory}" if own else base)
    merges = cfg is not None and lora_config_of(model) is None
    if merges:
        lora.add_lora(model, cfg)
    params = dict(model.named_parameters())
    for name in shapes:
        put(params[name], tensors[name])
    if merges:
        lora.merge_(model)


def check_base(base: Path, directory: Path) -> None:
    """Raise UserError unless an adapter's frozen weights are those that it was trained on."""
    if config_path(directory).exists():  # peft does not write it
        trained_on = read_json(config_path(directory)).get("base_weights")
        if trained_on and trained_on != weights_fingerprint(base):
            fail(f"the weights in {base} are not those that {directory} was trained on")


def read_peft_config(directory: str | Path) -> dict:
    """Return adapter_config.json. Raise UserError for an adapter that is not supported."""
    path = Path(directory, ADAPTER_CONFIG)
    config = read_json(path)
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise UserError(f"lora: {path}: there is no {key!r}")
    # A key that is not known to be neutral may change the result, unless it is off.
    off = (None, False, "none", [], {})
    other = [key for key, value in config.items() if key not in NEUTRAL_KEYS and value not in off]
    if config.get("peft_type") != "LORA":
        other.append("peft_type")
    # PiSSA, OLoRA, LoftQ ... also change the frozen weights, which are stored elsewhere.
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | None) and start not in ("gaussian", "eva", "orthogonal"):
        other.append("init_lora_weights")
    if other:
        what = f"{other[0]}={config.get(other[0])!r:.80} is not supported"
        raise UserError(f"lora: {path}: {what}; merge the adapter with peft")
    return config


def open_adapter(model: Transformer, directory: Path) -> tuple[LoRAConfig, dict[str, Stored]]:
    """Return an adapter's settings, for this model, and its weights."""
    config, tensors = read_peft_config(directory), open_weights(directory)
    # The weights tell which modules have one: peft's target_modules may be an expression.
    modules = {name.split(".")[-3] for name in tensors if ".lora_A." in name}  # q_proj, ...
    if not modules:
        raise UserError(f"lora: {directory / ADAPTER_WEIGHTS} holds no adapters")
    try:
        dropout = config.get("lora_dropout", 0.0)
        cfg = LoRAConfig(config["r"], config["lora_alpha"], dropout, tuple(modules))
        if config.get("use_rslora"):  # scales by alpha / sqrt(r), arXiv:2312.03732
            cfg = replace(cfg, alpha=cfg.alpha * math.sqrt(cfg.rank))
        cfg = lora.find_modules(model, cfg)
    except UserError as error:
        raise UserError(f"lora: {directory / ADAPTER_CONFIG}: {error}") from None

    # The model may have such adapters already. A resume may set another dropout.
    present = lora_config_of(model)
    if present is not None and replace(present, dropout=cfg.dropout) != cfg:
        raise UserError(f"lora: {directory} has {cfg}; the model has {present}")
    if model.cfg.tie_embeddings:
        trained_tied = bool(config.get("ensure_weight_tying"))
        drop_tied_head(tensors, directory, trained_tied)
    return cfg, tensors


# ---- start a run from a directory ---------------------------------------------------------------


def count_known_ids(init_dir: Path, tokenizer: TextTokenizer, whose: str) -> int:
    """Return how many of the tokenizer's ids the weights in `init_dir` were trained with.

    All, or the first ones if it extends their tokenizer. whose: its owner, for the message."""
    n_rows = load_config(init_dir, to_train=True).vocab_size
    directory = tokenizer_dir(init_dir)
    if not has_tokenizer(directory):  # weights alone: all that can be compared is the number
        text = f"{whose} has {tokenizer.vocab_size} token ids, {init_dir} only {n_rows}"
        refuse(tokenizer.vocab_size > n_rows, text)
        return n_rows
    # The same tokenizer: rows that only pad the vocabulary count as known.
    known = TextTokenizer.load(directory)
    if known.fingerprint() == tokenizer.fingerprint():
        return n_rows

    # prepare.py can append tokens to a tokenizer: the old ids keep their meaning.
    same_pieces = known.pieces.items() <= tokenizer.pieces.items()
    extends = same_pieces and known.special_ids <= tokenizer.special_ids
    is_larger = tokenizer.vocab_size > known.vocab_size
    text = f"{whose} was not tokenized with the tokenizer of {init_dir} or one that extends it"
    refuse(not (extends and is_larger), f"{text}; rerun prepare.py with --tokenizer_dir={init_dir}")
    return known.vocab_size


def check_teacher(teacher: Path, tokenizer: TextTokenizer, block_size: int) -> None:
    """Raise UserError if the token ids of the model to learn from mean other text."""
    other = TextTokenizer.load(tokenizer_dir(teacher))
    sizes = f"{other.vocab_size:,} and {tokenizer.vocab_size:,} token ids"
    text = f"teacher: {teacher} and the student have different tokenizers ({sizes})"
    differ = other.fingerprint() != tokenizer.fingerprint()
    refuse(differ, f"{text}; a teacher needs the student's")
    longest = load_config(teacher).block_size
    if block_size > longest:
        say(f"warning     block_size={block_size} exceeds the {longest} tokens of the teacher")


def check_trainable(trainable: str, init_dir: Path | None, n_new: int) -> None:
    """Raise UserError if `trainable` does not suit weights for which n_new token ids are new."""
    parts = lora.split_parts(trainable)
    if parts == ["all"]:  # suits any start, also from random weights
        return
    refuse(init_dir is None, f"{trainable=} leaves the rest as it was: give init_from")
    if "lora" not in parts:
        return
    text = f"{init_dir} has adapters, and a checkpoint holds those of one training"
    fix = f"to train new ones, first: python tools/merge.py --init_from={init_dir} --out_dir=DIR"
    refuse(is_adapter(init_dir), f"{text}; {fix}")
    # A frozen embedding or head would leave a new token without a meaning. Tied, they are one.
    n_trained = len({"embed", "lm_head"} & set(parts))
    n_needed = 1 if load_config(init_dir, to_train=True).tie_embeddings else 2
    text = f"{n_new} token ids are new to {init_dir}: use trainable='embed,lm_head,lora'"
    refuse(n_new > 0 and n_trained < n_needed, text)


def tuned_config(init_dir: Path, n_ids: int, config: Mapping, dropout: float) -> ModelConfig:
    """Return init_dir's architecture for n_ids token ids and at least block_size positions.

    config: settings of a trainer."""
    cfg, block_size = load_config(init_dir, to_train=True), config["block_size"]
    if block_size > cfg.block_size:
        what = f"block_size={block_size} exceeds the {cfg.block_size} tokens of {init_dir}"
        fix = f"{flags_for_rows(config, cfg.block_size)} keeps to what it was trained with"
        fix += f"; for longer texts pretrain and fine-tune with --block_size={block_size}"
        say(f"warning     {what}; {fix}")
    longest, vocab_size = max(cfg.block_size, block_size), max(cfg.vocab_size, n_ids)
    return replace(cfg, vocab_size=vocab_size, block_size=longest, dropout=dropout)


def flags_for_rows(config: Mapping, block_size: int) -> str:
    """Return the flag of another block_size, and those of settings that it would contradict."""
    flags = [f"--block_size={block_size}"]
    per_micro_step = config["batch_size"] * block_size * ranks.planned_world_size()
    n_micro_steps = -(-config.get("total_batch_tokens", 0) // per_micro_step)
    total = n_micro_steps * per_micro_step
    if total != config.get("total_batch_tokens", 0):
        flags.append(f"--total_batch_tokens={total}")
    if config.get("max_new_tokens", 0) >= block_size:
        flags.append(f"--max_new_tokens={block_size // 2}")
    return " ".join(flags)


def load_resumed(model: Transformer, path: Path) -> None:
    """Load the weights of a checkpoint to continue it."""
    load_on_rank_0_or_all(load_weights, model, path)


def load_start(model: Transformer, init_dir: Path, n_known: int, tokenizer: TextTokenizer) -> None:
    """Load the weights that a new run starts from. Rows of ids from n_known on are new."""
    # The common case needs no second model.
    n_rows = load_config(init_dir, to_train=True).vocab_size
    same_rows = n_rows == model.cfg.vocab_size == n_known
    if same_rows and not is_adapter(init_dir):
        load_on_rank_0_or_all(load_weights, model, init_dir)
    else:
        load_on_rank_0_or_all(load_with_new_rows, model, init_dir, n_known, tokenizer)


def load_on_rank_0_or_all(load: Callable[..., None], model: Transformer, *args: Any) -> None:
    """Call load(model, *args) on rank 0: DDP(model) will send the weights to the others.

    With FSDP it is called on all ranks, because each reads its own rows."""
    runs_here = ranks.rank() == 0 or ranks.is_sharded(model)
    ranks.run_on(runs_here, load, model, *args)


@torch.no_grad()
def load_with_new_rows(
    model: Transformer, init_dir: Path, n_known: int, tok: TextTokenizer
) -> None:
    """Load the weights of `init_dir`, with adapters merged, and make rows for new tokens."""
    # {id: known ids of its text} of new ordinary tokens. Special tokens have no text.
    pieces = {i: token for i, token in tok.engine.token_bytes.items() if i >= n_known}
    if pieces:
        split = TextTokenizer.load(tokenizer_dir(init_dir)).encode_token
        pieces = {i: split(token) for i, token in pieces.items()}
    start = load_model(init_dir, block_size=model.cfg.block_size, to_train=True)
    n_known = min(n_known, start.cfg.vocab_size)

    # What `start` lacks keeps its own start: adapters, and the score of a reward model.
    weights = dict(start.named_parameters())
    for name, p in model.named_parameters():
        whole = weights.get(name)
        if name in ("embed_tokens.weight", "lm_head.weight"):
            whole = lora.with_new_rows(whole, model.cfg.vocab_size, n_known, pieces)
        if whole is not None:
            put(p, whole)


def frozen_base(model: Transformer, init_dir: Path | None, resume_dir: Path | None) -> str:
    """Return the directory of the frozen weights below a model's adapters, "" without adapters."""
    if lora_config_of(model) is None or init_dir is None:
        return ""
    # A resumed run keeps its base, even if init_from has meanwhile moved on to another step.
    if resume_dir is not None and is_adapter(resume_dir):
        init_dir = base_of(resume_dir)
    return absolute_base(init_dir)


def absolute_base(init_dir: Path) -> str:
    """Return the path by which adapters find their frozen weights. Raise UserError if safetensors
    could not open it."""
    base = init_dir.resolve()
    if not is_utf8(base):
        why = "but safetensors opens no other names; rename the folder, or use a locale of UTF-8"
        fail(f"the frozen weights are in {base}, which is not UTF-8, {why}")
    return str(base)
