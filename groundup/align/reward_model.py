"""The reward model: a Transformer whose head gives one score per position instead of the next token's logits.

    model(idx)          -> scores (B, T) float32, of an answer that would end at this token
    model(idx, index=i) -> scores (n,) at positions i of the flat idx; that of an answer is at its <|im_end|>

    bradley_terry(...)                     -> losses of pairs, (B,)
    score(model, tokenizer, conversations) -> [score of each conversation's last answer]

On disk it is transformers' LlamaForSequenceClassification (Qwen3's with QK-norm) with one label, which computes the
same score for text padded on the right with <|pad|>. The head has no bias: only differences of scores have a meaning.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from groundup.errors import UserError
from groundup.files.untrusted import read_json
from groundup.tokens import foreign
from groundup.train import checkpoint, huggingface, lora, ranks
from groundup.train.base import old_parts
from groundup.train.device import autocast
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

if TYPE_CHECKING:
    from groundup.tokens.pairs import PairBatch

HEAD = "lm_head.weight"  # of a language model; a reward model has none


class RewardModel(Transformer):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(replace(cfg, tie_embeddings=True))  # makes no lm_head of its own
        self.cfg = cfg
        del self.lm_head
        self.score = nn.Linear(cfg.n_embd, 1, bias=False)
        nn.init.zeros_(self.score.weight)  # the first loss is ln 2, whatever the body computes

    def forward(self, idx: Tensor, index: Tensor | None = None) -> Tensor:
        """Return scores float32, (n,) or (B, T). idx (B, T) int64, index (n,) int64. The head computes in float32."""
        x = self.hidden(idx)
        x = x if index is None else x.flatten(0, 1)[index]
        with torch.autocast(x.device.type, enabled=False):
            return self.score(x.float()).squeeze(-1)


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, center: float = 0.0) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2, all (B,) (arXiv:2203.02155,
    equation 1; margin: arXiv:2307.09288, 3.2.2; the second term keeps scores near 0: arXiv:2312.09244)."""
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return center * (chosen + rejected) ** 2 - F.logsigmoid(difference)


def pair_losses(
    model: RewardModel, batch: "PairBatch", config: dict, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, score of the chosen answer, of the rejected one) of each pair, (B,) float32 each. The score is read
    at the last token of a row, <|im_end|>."""
    last = torch.arange(len(batch.x), device=batch.x.device) * batch.x.shape[1] + batch.lengths - 1
    with autocast(device, dtype):
        chosen, rejected = model(batch.x, index=last).chunk(2)
    return bradley_terry(chosen, rejected, config["margin_scale"] * batch.margin, config["center"]), chosen, rejected


LENGTH_BUCKETS = ("chosen_shorter", "alike", "chosen_longer")
ALIKE = 1.25  # the longer of two answers of like length has at most this many times the tokens of the other


def measure(chosen: Tensor, rejected: Tensor, n_chosen: Tensor, n_rejected: Tensor) -> dict[str, float]:
    """Return metrics of the scores (N,) of pairs and the lengths (N,) of their answers.

    accuracy counts ties as wrong, and is also given for each LENGTH_BUCKET; longer_wins is the accuracy of preferring
    the longer answer, a half for equal lengths. ece: expected calibration error over ten bins (arXiv:1706.04599), a tie
    half right. length_correlation: Pearson's, of score and length over all answers; nan if one is constant."""
    chosen, rejected, n_chosen, n_rejected = (t.double() for t in (chosen, rejected, n_chosen, n_rejected))
    difference, scores, ratio = chosen - rejected, torch.cat((chosen, rejected)), n_chosen / n_rejected
    right, longer = (difference > 0).double(), ((n_chosen - n_rejected).sign() + 1) / 2
    found = {"accuracy": right.mean().item(), "longer_wins": longer.mean().item()}
    inside = (ratio * ALIKE < 1, (ratio * ALIKE >= 1) & (ratio <= ALIKE), ratio > ALIKE)
    for name, pairs in zip(LENGTH_BUCKETS, inside, strict=True):
        found |= {f"accuracy/{name}": right[pairs].mean().item(), f"pairs/{name}": int(pairs.sum())}
    sure = difference.abs().sigmoid()
    gaps = sure.new_zeros(10).index_add_(0, ((sure - 0.5) * 20).long().clamp(max=9), sure - (difference.sign() + 1) / 2)
    correlation = torch.corrcoef(torch.stack((scores, torch.cat((n_chosen, n_rejected)))))[0, 1]
    return found | {
        "ece": gaps.abs().sum().item() / len(sure), "margin": difference.mean().item(),
        "reward_mean": scores.mean().item(), "reward_std": scores.std(correction=0).item(),
        "reward_min": scores.min().item(), "reward_max": scores.max().item(),
        "length_correlation": correlation.item(),
    }  # fmt: skip


@torch.no_grad()
def evaluate(
    model: RewardModel, batches: Mapping[str, Iterable["PairBatch"]], shares: list[float], config: dict,
    device: torch.device, dtype: torch.dtype,
) -> dict[str, object]:  # fmt: skip
    """Return the loss per pair, weighted over sources by `shares`, the metrics of `measure` over all pairs and, for
    several sources, loss and accuracy of each. batches: this rank's; all ranks return the same."""
    model.eval()
    found = {}
    for name, of_source in batches.items():
        columns = []
        for batch in of_source:
            n_tokens = torch.bincount(batch.row, minlength=len(batch.x))
            values = torch.stack(pair_losses(model, batch.to(device), config, device, dtype)).cpu()
            columns.append(torch.cat((values.double(), n_tokens.view(2, -1))))  # (5, B)
        mine = torch.cat(columns, dim=1) if columns else torch.zeros(5, 0, dtype=torch.float64)
        found[name] = torch.cat(ranks.gather_objects(mine), dim=1)
    model.train()
    losses = {name: values[0].mean().item() for name, values in found.items()}
    _, *columns = torch.cat(list(found.values()), dim=1)
    mixed = sum(share * loss for share, loss in zip(shares, losses.values(), strict=True))
    scores = {"val_loss": mixed} | measure(*columns)
    if len(found) > 1:
        scores |= {f"val_loss/{name}": loss for name, loss in losses.items()}
        scores |= {f"accuracy/{name}": (v[1] > v[2]).double().mean().item() for name, v in found.items()}
    return scores


def padded(tokenizer: Tokenizer) -> Tokenizer:
    """Return `tokenizer` with a padding token that ends no turn: transformers reads the score at the last token that is
    not padding. Raise UserError if it has no other special token to take."""
    ends = (-1, tokenizer.turn_end_id)
    if tokenizer.pad_id not in ends:
        return tokenizer
    free = {name: i for name, i in tokenizer.special_tokens.items() if i not in ends}
    if not free:
        raise UserError("reward: the tokenizer has no special token to pad with, beside the one that ends a turn")
    pad = min(free, key=lambda name: ("pad" not in name, "text" not in name, free[name]))
    config = json.loads(tokenizer.files.get("tokenizer_config.json", b"{}")) | {"pad_token": pad}
    return Tokenizer(tokenizer.files | {"tokenizer_config.json": foreign.to_json(config)}, tokenizer.generation_config)


def write_model(directory: Path, model: RewardModel, tokenizer: Tokenizer) -> None:
    """Write the Hugging Face directory, with adapters merged into the weights."""
    tokenizer = padded(tokenizer)
    weights = {name: p for name, p in model.named_parameters() if ".lora_" not in name}
    weights |= {f"{name}.weight": layer.merged_weight(torch.float32) for name, layer in lora.adapters(model)}
    stored = {stored_name(name): p.detach().to("cpu", torch.float32) for name, p in weights.items()}
    tokenizer.save(directory)
    config = huggingface.to_hf_config(model.cfg, tokenizer)
    config["architectures"] = [config["architectures"][0].replace("CausalLM", "SequenceClassification")]
    config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    huggingface.write_json(directory / "config.json", config)
    huggingface.save_weights(directory / "model.safetensors", stored)


def stored_name(name: str) -> str:
    return name if name == "score.weight" else huggingface.hf_name(name)


def is_reward_model(directory: str | Path) -> bool:
    path = Path(directory) / "config.json"
    names = read_json(path).get("architectures") if path.exists() else None
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def find_model(name: str, tokenizer: Tokenizer, key: str) -> Path:
    """Return the directory of the reward model that the setting `key` names, or the newest checkpoint of that run.
    Raise UserError if there is none, or if it has another tokenizer."""
    if not Path(name).is_dir():
        raise UserError(f"reward: {key}={name!r} is no directory; give that of a reward model")
    directory = checkpoint.resolve(name)
    if not is_reward_model(directory):
        raise UserError(f"reward: {key}={name!r} holds no reward model; reward.py trains one")
    if Tokenizer.load(directory).fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"reward: {key}={name!r} has another tokenizer than the model that answers; "
            f"train the reward model from one with the same"
        )
    return directory


def load(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> RewardModel:  # fmt: skip
    """Return the reward model in a directory of ours or of transformers, in eval mode. dtype: of its products."""
    if not is_reward_model(directory):
        raise UserError(f"reward: {directory} holds no reward model; reward.py trains one")
    model = checkpoint.build(RewardModel, checkpoint.load_config(directory), dtype, {"score.weight"})
    checkpoint.copy_weights(model, directory)
    return model.to(device).eval()


def load_start(model: RewardModel, source: Path, n_known: int, tokenizer: Tokenizer) -> None:
    """Copy the weights in `source` into `model`: those of a reward model with its head, of a language model without.
    Tokens from n_known on get new embeddings, see lora.resize_vocab."""
    if is_reward_model(source):
        checkpoint.copy_weights(model, source)
        return
    body = checkpoint.load_model(source, block_size=model.cfg.block_size, dtype=checkpoint.held_dtype(model))
    lora.resize_vocab(body, model.cfg.vocab_size, n_known, old_parts(source, n_known, tokenizer))
    model.load_state_dict({name: t for name, t in body.state_dict().items() if name != HEAD}, strict=False)


def trained_weights(model: RewardModel, base: str) -> dict:
    """Return what a resume needs besides model.safetensors, which has adapters merged: adapters and their base; else
    {}."""
    if lora.lora_config_of(model) is None:
        return {}
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {"base": base, "base_key": checkpoint.weights_key(Path(base)), "weights": weights}


@torch.no_grad()
def load_trained(model: RewardModel, resume_from: Path, trained: dict, n_known: int) -> None:
    """Restore the exact weights saved in `resume_from`. Raise UserError if the base has changed."""
    if not trained:
        checkpoint.copy_weights(model, resume_from)
        return
    if checkpoint.weights_key(Path(trained["base"])) != trained["base_key"]:
        raise UserError(f"reward: the weights in {trained['base']} are not those that {resume_from} was trained on")
    load_start(model, Path(trained["base"]), n_known, Tokenizer.load(resume_from))  # all but the adapters
    params = dict(model.named_parameters())
    for name, weight in trained["weights"].items():
        params[name].copy_(weight)


def score(
    model: RewardModel, tokenizer: Tokenizer, conversations: Sequence[list[dict]], batch_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[float]:  # fmt: skip
    """Return the score of the answer that each conversation ends with."""
    rows = [answered_ids(messages, tokenizer) for messages in conversations]
    return score_ids(model, rows, tokenizer.pad_id, batch_size, dtype)


def answered_ids(messages: list[dict], tokenizer: Tokenizer) -> list[int]:
    """Return the ids up to the <|im_end|> that closes the last answer. Raise UserError if there is no last answer."""
    if not messages or messages[-1].get("role") != "assistant":
        raise UserError("reward: a conversation must end with the assistant's answer, which is what gets a score")
    ids, learnt = tokenizer.render(messages)
    return ids[: len(learnt) - learnt[::-1].index(1)]


@torch.no_grad()
def score_ids(
    model: RewardModel, rows: Sequence[list[int]], pad_id: int, batch_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[float]:  # fmt: skip
    """Return the score at the last id of each row: of a whole answer with its <|im_end|>. Rows are sorted into batches
    by length. Raise UserError for a row longer than the model reads."""
    longest = max(map(len, rows), default=0)
    if longest > model.cfg.block_size:
        raise UserError(f"reward: {longest} tokens, but the model reads block_size={model.cfg.block_size} at most")
    device, training = model.score.weight.device, model.training
    model.eval()
    scores = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    for part in (order[i : i + batch_size] for i in range(0, len(order), batch_size)):
        T = len(rows[part[0]])
        x = torch.tensor([rows[i] + [pad_id] * (T - len(rows[i])) for i in part])
        last = torch.tensor([k * T + len(rows[i]) - 1 for k, i in enumerate(part)])
        with autocast(device, dtype):
            found = model(x.to(device), index=last.to(device))
        for i, value in zip(part, found.tolist(), strict=True):
            scores[i] = value
    model.train(training)
    return scores
