"""One forward pass of a configuration, tensor by tensor: shapes, parameters, FLOPs.

    python tools/tour.py config/demo.py --vocab_size=4096          # the keys of pretrain.py
    python tools/tour.py --init_from=out/demo                      # a run or checkpoint

The tensors are torch's fake ones, which have a shape but no memory, so any size works. docs/tour.md
explains all.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure, defaults_of
from groundup.errors import refuse
from groundup.train import checkpoint
from groundup.train.config_json import is_plain
from groundup.train.huggingface import load_config
from model import ModelConfig, Transformer
from pretrain import choose_architecture

ROOT = Path(__file__).parent.parent
SAYS = {
    "embed_tokens": "one row of the table for each token",
    "input_layernorm": "x / rms(x), times a weight per feature",
    "q_proj": "queries, n_head x head_dim",
    "k_proj": "keys, n_kv_head x head_dim",
    "v_proj": "values, n_kv_head x head_dim",
    "q_norm": "RMSNorm of each head",
    "k_norm": "RMSNorm of each head",
    "scores": "each position with itself and all before it",
    "o_proj": "the heads put together; added to x",
    "post_attention_layernorm": "again, on the new x",
    "gate_proj": "SwiGLU: silu of this ...",
    "up_proj": "... times this",
    "down_proj": "back to n_embd; added to x",
    "norm": "after the last block",
    "lm_head": "a logit for each token of the vocabulary",
}


# Name, shape of the result, parameters, forward FLOPs per token, what it is
Row = tuple[str, tuple[int, ...], int, float, str]


def rows_of(cfg: ModelConfig, B: int, T: int) -> list[Row]:
    """Return the rows in the order of the forward pass; of the blocks, which are all alike, the
    first one.
    """
    rows, counted = [], set()

    def seen(name: str, module: nn.Module, inputs: tuple, result: Tensor) -> None:
        # a tied head has the embedding's table, which counts once
        own = sum(p.numel() for p in module.parameters() if p not in counted)
        counted.update(module.parameters())
        flops = 2 * module.weight.numel() if isinstance(module, nn.Linear) else 0
        last = name.rpartition(".")[2]
        # Scores and their sums of values, over T positions: the causal half is not subtracted.
        if last == "o_proj":
            D, H = cfg.head_dim, cfg.n_head
            rows.append(("layers.0.scores", (B, H, T, T), 0, 4 * H * D * T, SAYS["scores"]))
        rows.append((name, tuple(result.shape), own, flops, SAYS.get(last, "")))

    # Hooks on the modules give the rows: the model's own forward decides what comes when.
    with FakeTensorMode(), torch.no_grad():
        model = Transformer(cfg)
        for name, module in model.named_modules():
            later_block = name.startswith("layers.") and not name.startswith("layers.0.")
            if any(True for _ in module.parameters(recurse=False)) and not later_block:
                module.register_forward_hook(partial(seen, name))
        model(torch.zeros(B, T, dtype=torch.int64))
    return [("idx", (B, T), 0, 0, "token ids"), *rows]


def table(rows: list[Row], n_layer: int) -> str:
    lines = [f"{'part':<34}{'shape':<22}{'parameters':>14}{'MFLOPs/token':>14}  what it is"]
    for name, shape, parameters, flops, says in rows:
        size = f"{parameters:,}" if parameters else ""
        work = f"{flops / 1e6:,.3f}" if flops else ""
        short = name.replace("layers.0.", f"{n_layer} x ")
        short = short.replace("self_attn.", "").replace("mlp.", "")
        lines.append(f"{short:<34}{str(shape):<22}{size:>14}{work:>14}  {says}")
    return "\n".join(lines)


if __name__ == "__main__":
    script = ROOT / "pretrain.py"
    settings = {key: value for key, value in defaults_of(script).items() if key == key.lower()}
    config = configure(settings | {"__doc__": __doc__, "__file__": str(script)})
    source = checkpoint.resolve(config["init_from"]) if config["init_from"] else None
    what = "vocab_size is that of a tokenizer; give it, for example --vocab_size=4096"
    refuse(source is None and not config["vocab_size"], what)
    if source:  # no longer than the model reads
        config["block_size"] = min(config["block_size"], load_config(source).block_size)
    cfg = choose_architecture(config, source, 0)
    print(table(rows_of(cfg, config["batch_size"], cfg.block_size), cfg.n_layer))
    if not is_plain(cfg):
        print("model.py is edited: what is said of a part may no longer be true of it")
