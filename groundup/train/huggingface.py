"""Model directories in Hugging Face's format: write them, open them, start a run from one.

    config.json model.safetensors generation_config.json tokenizer.json ...     a whole model
    model_config.json adapter_config.json adapter_model.safetensors ...         a model with LoRA

transformers and peft open what is written here, with no export step. Our parameter names are
theirs without "model.". What would load but mean something else is refused in one line. Opening a
directory never runs code.
"""

import functools
import hashlib
import json
import tempfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from groundup.errors import UserError
from groundup.files.untrusted import check_regular, read_json
from groundup.train import lora
from groundup.train.config_json import (
    check_number,
    from_hf_config,
    is_as_saved,
    say,
    special_ids,
    to_hf_config,
    write_json,
)
from groundup.train.lora import LoRAConfig, lora_config_of
from groundup.train.tensor_files import (
    PREFIX,
    Stored,
    check_fit,
    check_sizes,
    drop_tied_head,
    hf_name,
    open_weights,
    put,
    save_weights,
    tensors_of,
)
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTED_CONFIG = "model_config.json"  # beside adapters: transformers takes config.json for a model
# Keys of adapter_config.json that do not change what is computed, or that the weights tell
NEUTRAL_KEYS = (
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision "
    "inference_mode r lora_alpha lora_dropout target_modules modules_to_save fan_in_fan_out "
    "ensure_weight_tying megatron_core runtime_config qalora_group_size eva_config "
    "init_lora_weights"
).split()


# ---- write a directory --------------------------------------------------------------------------


def stored_weights(model: Transformer) -> dict[str, Tensor]:
    """Return the tensors that a save writes, by our names, on their device.

    With adapters these are the adapters and the other trained weights, else all weights."""
    if lora_config_of(model) is None:
        return {name: p.detach() for name, p in model.named_parameters()}
    tensors = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if model.cfg.tie_embeddings and "embed_tokens.weight" in tensors:
        # peft leaves the head with the base's embedding unless it is stored as well.
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    return tensors


def write_model(
    directory: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    base: str | Path = "",
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights, settings and tokenizer; float32 weights are written bit for bit.

    base: directory of the frozen weights of a model with adapters.
    weights: a copy of `stored_weights(model)`, for a thread that writes while training goes on."""
    weights = stored_weights(model) if weights is None else weights
    if lora_config_of(model) is None:
        write_settings(directory, model.cfg, tokenizer, dtype)
        stored = {hf_name(name): t.to("cpu", dtype) for name, t in weights.items()}
        save_weights(directory / "model.safetensors", stored)
        return
    if not base:
        raise UserError("checkpoint: adapters need base, the directory of the frozen weights")
    write_settings(directory, model.cfg, tokenizer, dtype, base)
    save_adapter(directory, model, str(Path(base).resolve()), weights)


def write_settings(
    directory: Path,
    cfg: ModelConfig,
    tokenizer: Tokenizer,
    dtype: torch.dtype = torch.float32,
    base: str | Path = "",
) -> None:
    """Write what a model directory holds beside its weights."""
    tokenizer.save(directory)
    config = to_hf_config(cfg, tokenizer, dtype)
    if base:
        config["base_weights"] = weights_fingerprint(base)
    write_json(directory / (ADAPTED_CONFIG if base else "config.json"), config)
    own = {key: i for key, i in special_ids(tokenizer).items() if i is not None}
    own["eos_token_id"] = sorted(tokenizer.stop_ids)
    of_source = json.loads(tokenizer.generation_config)  # its temperature and the like
    write_json(directory / "generation_config.json", of_source | own)


def check_saves(cfg: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError now, not at the first save, if these settings would not be read back."""
    with tempfile.TemporaryDirectory() as directory:
        write_settings(Path(directory), cfg, tokenizer)
        read = from_hf_config(Path(directory, "config.json"))
        if read != replace(cfg, dropout=0.0):
            raise UserError(f"checkpoint: {cfg} would be saved as {read}")
        if Tokenizer.load(directory).fingerprint() != tokenizer.fingerprint():
            raise UserError("checkpoint: the tokenizer's files do not give back its ids")


def save_adapter(
    directory: str | Path,
    model: Transformer,
    base: str,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as in write_model."""
    cfg = lora_config_of(model)
    if cfg is None:
        raise UserError("lora: the model has no adapters to save")
    weights = stored_weights(model) if weights is None else weights
    stored = {
        PREFIX + hf_name(name): t.to("cpu", torch.float32).contiguous()
        for name, t in weights.items()
    }
    save_weights(Path(directory, ADAPTER_WEIGHTS), stored)
    whole = [name.removesuffix(".weight") for name in weights if ".lora_" not in name]
    tied = model.cfg.tie_embeddings and "embed_tokens" in whole
    # peft finds a module by the end of its name: "norm" alone would also be another norm.
    whole = [name if name == "embed_tokens" else hf_name(name) for name in whole]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": cfg.rank,
        "lora_alpha": int(cfg.alpha) if float(cfg.alpha).is_integer() else cfg.alpha,
        "lora_dropout": cfg.dropout,
        "target_modules": list(cfg.modules),
        "modules_to_save": whole or None,
        "ensure_weight_tying": tied,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    write_json(Path(directory, ADAPTER_CONFIG), config)


# ---- open a directory ---------------------------------------------------------------------------


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file. It shows accidents, not forgery, twice as fast as SHA-256."""
    if path.name == ADAPTER_CONFIG:  # all but the directory of the base, which the user may move
        config = read_json(path) | {"base_model_name_or_path": ""}
        return f"crc32 {zlib.crc32(json.dumps(config, sort_keys=True).encode()):08x}"
    crc = 0
    check_regular(path)
    with open(path, "rb") as file:
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
    return f"crc32 {crc:08x}"


@functools.cache
def checksum_once(path: Path, size: int, mtime_ns: int) -> str:
    """Return checksum(path), computed once per process for a file that has not changed."""
    return checksum(path)


def weights_fingerprint(directory: str | Path) -> str:
    """Return names and checksums of a directory's safetensors files.

    A checkpoint of ours has them in checksums.json; other files are read once."""
    recorded = {}
    if Path(directory, "checksums.json").exists():
        recorded = read_json(Path(directory, "checksums.json"))
    parts = []
    for path in sorted(Path(directory).glob("*.safetensors")):
        status = path.stat()
        crc = recorded.get(path.name) or checksum_once(path, status.st_size, status.st_mtime_ns)
        parts.append(f"{path.name} {crc}")
    return ", ".join(parts)


def model_name(directory: Path) -> str:
    """Return the directory's name and a fingerprint of its weights and settings."""
    settings = b"".join(path.read_bytes() for path in sorted(directory.glob("*config.json")))
    digest = hashlib.sha256(weights_fingerprint(directory).encode() + settings)
    return f"{directory.name} {digest.hexdigest()[:16]}"


def is_adapter(directory: str | Path) -> bool:
    return Path(directory, ADAPTER_CONFIG).exists()


def config_path(directory: str | Path) -> Path:
    return Path(directory, ADAPTED_CONFIG if is_adapter(directory) else "config.json")


def open_adapter(directory: str | Path) -> dict[str, Stored]:
    return tensors_of(Path(directory, ADAPTER_WEIGHTS))


def base_of(directory: str | Path) -> Path:
    """Return the directory of an adapter's frozen weights. Raise UserError if there is none."""
    name = read_peft_config(directory).get("base_model_name_or_path") or ""
    path = Path(name)
    if name and is_adapter(path):
        raise UserError(
            f"checkpoint: {directory} is an adapter on the adapter {path}; "
            "merge that with tools/merge.py"
        )
    if not name or not (path / "config.json").exists():
        raise UserError(
            f"checkpoint: {Path(directory, ADAPTER_CONFIG)} names base_model_name_or_path={name!r},"
            " which is no model directory; if the base was moved, write there where it is now"
        )
    return path


def tokenizer_dir(directory: str | Path) -> Path:
    """Return where the tokenizer is: in `directory` or, for an adapter without one, in its base."""
    path = Path(directory)
    return base_of(path) if is_adapter(path) and not has_tokenizer(path) else path


def has_tokenizer(directory: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model")
    return any((directory / name).exists() for name in names)


def load_config(directory: str | Path) -> ModelConfig:
    """Return the architecture of a model directory.

    Raise UserError if model.py does not build it, or if the weights have other sizes."""
    directory, base, own = Path(directory), Path(directory), {}
    if is_adapter(directory):
        base, own = base_of(directory), open_adapter(directory)
    if config_path(directory).exists() or base == directory:
        cfg = from_hf_config(config_path(directory))
    else:  # peft's adapters come without the model's config, and may have more rows than the base
        cfg = from_hf_config(base / "config.json")
        embedding = own.get("embed_tokens.weight")
        if embedding is not None and embedding.shape:
            cfg = replace(cfg, vocab_size=embedding.shape[0])
    if any(base.glob("*.safetensors*")):  # --plan_only needs no weights
        check_sizes(cfg, open_weights(base) | own, directory)
    return cfg


def check_same_computation(directory: str | Path) -> None:
    """Raise UserError unless model.py computes what it did when a run saved `directory`."""
    if not is_as_saved(read_json(config_path(directory))):
        raise UserError(
            f"checkpoint: {directory} is of a model.py that computed something else; put that "
            "model.py back, use another out_dir, or start over with --resume=never --overwrite=True"
        )


def build(kind: type[Transformer], cfg: ModelConfig, dtype: torch.dtype) -> Transformer:
    """Return kind(cfg) for products in `dtype`: bfloat16 halves the memory of its matrices.

    Vectors are float32, and so are all weights for other dtypes."""
    with lora.weights_in(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32):
        model = kind(cfg)
    for p in model.parameters():
        if p.ndim < 2:
            p.data = p.data.float()
    return model


def load_model(
    directory: str | Path,
    device: torch.device | str = "cpu",
    block_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Return the model of a directory, with adapters merged; block_size 0 = as saved."""
    cfg = load_config(directory)
    model = build(Transformer, replace(cfg, block_size=block_size or cfg.block_size), dtype)
    load_weights(model, directory)
    return model.to(device)


@torch.no_grad()
def load_weights(model: Transformer, directory: str | Path) -> None:
    """Copy the weights of a directory into `model`, in place; half precision is widened.

    From a directory with adapters, a model with adapters gets the base and the adapters to the bit
    (a resume), and a plain model their sum. From a directory without, the model's adapters stay as
    they are. Raise UserError, with nothing copied, for names or shapes that are not the model's."""
    directory = Path(directory)
    if not is_adapter(directory):
        copy_weights(model, directory)
        return
    base = base_of(directory)
    if config_path(directory).exists():  # peft does not write it
        trained_on = read_json(config_path(directory)).get("base_weights")
        if trained_on and trained_on != weights_fingerprint(base):
            raise UserError(
                f"checkpoint: the weights in {base} are not those that {directory} was trained on"
            )
    keeps_adapters = lora_config_of(model) is not None
    copy_weights(model, base, leave=open_adapter(directory))
    load_adapter(model, directory)
    if not keeps_adapters:
        lora.merge_(model)


@torch.no_grad()
def copy_weights(model: Transformer, directory: str | Path, leave: Collection[str] = ()) -> None:
    """Copy stored weights into `model`, except adapters and the parameters named in `leave`."""
    if hasattr(model, "reshard"):  # FSDP: otherwise these could be gathered copies
        model.reshard()
    params = dict(model.named_parameters())
    params = {n: p for n, p in params.items() if ".lora_" not in n and n not in leave}
    tensors = open_weights(Path(directory))
    if model.cfg.tie_embeddings:
        drop_tied_head(tensors, directory)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in leave}
    check_fit({name: tuple(p.shape) for name, p in params.items()}, tensors, directory)
    for name, p in params.items():
        put(p, tensors[name])


def read_peft_config(directory: str | Path) -> dict:
    """Return adapter_config.json. Raise UserError for an adapter that is not supported."""
    path = Path(directory, ADAPTER_CONFIG)
    config = read_json(path)
    check_number(config, "r", path, whole=True)
    check_number(config, "lora_alpha", path)
    if not isinstance(config.get("base_model_name_or_path"), str | None):
        raise UserError(f"lora: {path}: base_model_name_or_path must be a text")
    if config.get("peft_type") != "LORA":
        raise UserError(f"lora: {path}: peft_type={config.get('peft_type')!r}; supported is 'LORA'")
    begin = config.get("init_lora_weights")
    if not isinstance(begin, bool | None) and begin not in ("gaussian", "eva", "orthogonal"):
        # PiSSA, OLoRA, LoftQ ... change the frozen weights, which are stored elsewhere.
        raise UserError(
            f"lora: {path}: init_lora_weights={begin!r} changes the frozen weights too; "
            "not supported"
        )
    for key, value in config.items():
        if key not in NEUTRAL_KEYS and value not in (None, False, "none", [], {}):
            raise UserError(
                f"lora: {path}: {key}={value!r} is not supported; merge the adapter with peft"
            )
    return config


@torch.no_grad()
def load_adapter(model: Transformer, directory: str | Path) -> None:
    """Load adapters, and weights trained beside them, into a model that holds the base's weights.

    Adapters are added if the model has none; otherwise they must be of the same kind. Raise
    UserError, with nothing copied, for what is not supported or does not fit."""
    config, tensors = read_peft_config(directory), open_adapter(directory)
    # The weights tell which modules have one: peft's target_modules may be an expression.
    modules = {name.split(".")[-3] for name in tensors if ".lora_A." in name}
    if not modules:
        raise UserError(f"lora: {Path(directory, ADAPTER_WEIGHTS)} holds no adapters")
    try:
        dropout = config.get("lora_dropout", 0.0)
        cfg = LoRAConfig(config["r"], config["lora_alpha"], dropout, tuple(modules))
        cfg = lora.find_modules(model, cfg)
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"lora: {Path(directory, ADAPTER_CONFIG)}: {error}") from None
    present = lora_config_of(model)
    if present is not None and replace(present, dropout=cfg.dropout) != cfg:
        raise UserError(f"lora: {directory} has {cfg}; the model has {present}")
    if model.cfg.tie_embeddings:
        drop_tied_head(tensors, directory, bool(config.get("ensure_weight_tying")))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n in tensors}
    check_fit(shapes | lora.adapter_shapes(model, cfg), tensors, directory)
    if present is None:
        lora.add_lora(model, cfg)
    params = dict(model.named_parameters())
    for name, tensor in tensors.items():
        params[name].copy_(tensor[:])


# ---- start a run from a directory ---------------------------------------------------------------


def count_known_ids(source: Path, tokenizer: Tokenizer, whose: str) -> int:
    """Return how many of the tokenizer's ids the weights in `source` were trained with.

    All, or the first ones if it extends their tokenizer. Raise UserError for any other tokenizer.
    whose: its owner, for the message."""
    n_rows, directory = load_config(source).vocab_size, tokenizer_dir(source)
    if not has_tokenizer(directory):
        if tokenizer.vocab_size > n_rows:
            raise UserError(
                f"config: {whose} has {tokenizer.vocab_size} token ids, {source} only {n_rows}"
            )
        return n_rows
    known = Tokenizer.load(directory)
    if known.fingerprint() == tokenizer.fingerprint():
        return n_rows
    same_pieces = known.pieces.items() <= tokenizer.pieces.items()
    extends = same_pieces and known.special_ids <= tokenizer.special_ids
    if extends and tokenizer.vocab_size > known.vocab_size:
        return known.vocab_size
    raise UserError(
        f"config: {whose} was not tokenized with the tokenizer of {source}, nor with one that "
        f"extends it; rerun prepare.py with --tokenizer_dir={source}"
    )


def check_trainable(trainable: str, source: Path | None, n_new: int) -> None:
    """Raise UserError if `trainable` does not suit the weights in `source`.

    n_new: how many token ids the weights have not been trained with."""
    parts = [part.strip() for part in trainable.split(",")]
    if parts == ["all"]:
        return
    if source is None:
        raise UserError(
            f"config: trainable={trainable!r} leaves the rest as it was: give init_from"
        )
    if "lora" in parts and is_adapter(source):
        fix = f"python tools/merge.py --init_from={source} --out_dir=DIR"
        raise UserError(f"config: {source} is an adapter; first: {fix}")
    if "lora" in parts and n_new > 0 and not {"embed", "lm_head"} <= set(parts):
        raise UserError(
            f"config: {n_new} token ids are new to {source}: use trainable='embed,lm_head,lora'"
        )


def tuned_config(source: Path, n_ids: int, block_size: int, dropout: float) -> ModelConfig:
    """Return the architecture of `source` for n_ids token ids and at least block_size positions.

    Warn if block_size makes the context longer."""
    cfg = load_config(source)
    if block_size > cfg.block_size:
        say(
            f"warning     block_size={block_size} exceeds the {cfg.block_size} tokens of {source}; "
            f"--block_size={cfg.block_size} keeps to what it was trained with"
        )
    longest = max(cfg.block_size, block_size)
    vocab_size = max(cfg.vocab_size, n_ids)
    return replace(cfg, vocab_size=vocab_size, block_size=longest, dropout=dropout)


def load_start(model: Transformer, source: Path, n_known: int, tokenizer: Tokenizer) -> None:
    """Load the weights that a new run starts from. Rows of ids from n_known on are new."""
    same_rows = load_config(source).vocab_size == model.cfg.vocab_size == n_known
    if same_rows and not is_adapter(source):
        load_weights(model, source)
    else:
        load_with_new_rows(model, source, n_known, tokenizer)


def load_with_new_rows(
    model: Transformer, source: Path, n_known: int, tokenizer: Tokenizer
) -> None:
    """Load `source` through a second model, in which new rows are made (lora.resize_vocab)."""
    start = load_model(source, block_size=model.cfg.block_size)
    pieces = old_pieces(source, n_known, tokenizer)
    lora.resize_vocab(start, model.cfg.vocab_size, n_known, pieces)
    weights = dict(start.named_parameters())
    for name, p in model.named_parameters():
        if name in weights:  # not adapters, nor the score of a reward model
            put(p, weights[name])


def old_pieces(source: Path, n_known: int, tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Return {id: ids by which the tokenizer of `source` writes its text} of new ordinary tokens."""
    new = {i: token for i, token in tokenizer.engine.token_bytes.items() if i >= n_known}
    if not new:
        return {}
    split = Tokenizer.load(tokenizer_dir(source)).encode_token
    return {i: split(token) for i, token in new.items()}


def frozen_base(model: Transformer, source: Path | None, resumed: Path | None) -> str:
    """Return the directory of the frozen weights below a model's adapters, "" without adapters.

    A resumed run keeps its own, even if init_from has meanwhile moved on to another step."""
    if lora_config_of(model) is None or source is None:
        return ""
    if resumed is not None and is_adapter(resumed):
        source = base_of(resumed)
    return str(source.resolve())
