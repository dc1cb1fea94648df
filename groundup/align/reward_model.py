"""The reward model: a Transformer that gives a score instead of the next token's logits.

    model(idx)          -> scores (B, T) float32, of an answer that would end at this token
    model(idx, index=i) -> scores (n,) at positions i of the flat idx

The score of an answer is read at its <|im_end|>. Training (reward.py) compares two scores:

    chosen, rejected = score_pairs(model, batch)      # (B,), (B,)
    losses = bradley_terry(chosen, rejected)          # (B,)

On disk it is transformers' LlamaForSequenceClassification (Qwen3's with QK-norm) with one label,
which computes the same score for text padded on the right with <|pad|>. The head has no bias,
because only differences of scores mean something.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from groundup.errors import UserError
from groundup.tokens import engines
from groundup.tokens.pairs import PairBatch
from groundup.tokens.templates import opened_thoughts
from groundup.train import checkpoint, huggingface, lora, ranks
from groundup.train.config_json import to_hf_config, write_json
from groundup.train.device import autocast
from groundup.train.huggingface import hf_name, save_weights
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, split_answer

LENGTH_BUCKETS = ("chosen_shorter", "alike", "chosen_longer")
ALIKE = 1.25  # answers are alike in length if neither has more than this many times the tokens


class RewardModel(Transformer):
    """The blocks of a Transformer below a head with one output."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(replace(cfg, tie_embeddings=True))  # makes no lm_head of its own
        self.cfg = cfg
        del self.lm_head  # which is the embedding
        self.score = nn.Linear(cfg.n_embd, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.score.weight)  # so the first loss is ln 2

    def forward(self, idx: Tensor, index: Tensor | None = None) -> Tensor:
        """Return scores float32: (B, T), or (n,) with index.

        idx (B, T) int64, index (n,) int64."""
        x = self.hidden(idx)  # (B, T, C)
        if index is not None:
            x = x.flatten(0, 1)[index]  # (n, C)
        # In float32: bfloat16 has three digits, and two answers may differ by less.
        with torch.autocast(x.device.type, enabled=False):
            return self.score(x.float()).squeeze(-1)


# ---- pairs ---------------------------------------------------------------------------------------


def score_pairs(model: RewardModel, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Return the scores of the chosen and of the rejected answers, (B,) float32 each."""
    n_rows, T = batch.x.shape  # the chosen answers, then the rejected ones
    rows = torch.arange(n_rows, device=batch.x.device)
    last = rows * T + batch.lengths - 1  # of each row, in the flat x: its <|im_end|>
    chosen, rejected = model(batch.x, index=last).chunk(2)
    return chosen, rejected


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, center: float = 0.0
) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2: (B,)."""
    # arXiv:2203.02155, equation 1: the chosen answer is the better one with the probability
    # sigmoid(difference). A margin asks for a clear win (arXiv:2307.09288, section 3.2.2).
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    # Only differences are learned, so scores could drift: this term keeps them near 0
    # (arXiv:2312.09244).
    return center * (chosen + rejected) ** 2 - F.logsigmoid(difference)


def measure(
    chosen: Tensor, rejected: Tensor, n_chosen: Tensor, n_rejected: Tensor
) -> dict[str, float]:
    """Return metrics of the scores (N,) of pairs and the lengths (N,) of their answers.

    accuracy: also for each of LENGTH_BUCKETS, with its number of pairs. longer_wins: accuracy of
    preferring the longer answer. length_correlation: Pearson's; nan if one of them is constant."""
    chosen, rejected = chosen.double(), rejected.double()
    n_chosen, n_rejected = n_chosen.double(), n_rejected.double()
    difference = chosen - rejected
    right = (difference > 0).double()  # a tie is wrong
    longer = ((n_chosen - n_rejected).sign() + 1) / 2  # equal lengths count a half
    found = {"accuracy": right.mean().item(), "longer_wins": longer.mean().item()}

    # Is it right only where the better answer is the longer one?
    ratio = n_chosen / n_rejected
    shorter, much_longer = ratio * ALIKE < 1, ratio > ALIKE
    inside = (shorter, ~shorter & ~much_longer, much_longer)
    for name, pairs in zip(LENGTH_BUCKETS, inside, strict=True):
        found[f"accuracy/{name}"] = right[pairs].mean().item()
        found[f"pairs/{name}"] = int(pairs.sum())

    # Expected calibration error over ten bins (arXiv:1706.04599, equation 3): the model's
    # probability that the higher score is right, from 0.5 to 1, against how often it is.
    sure = difference.abs().sigmoid()
    was_right = (difference.sign() + 1) / 2  # a tie is half right
    bins = ((sure - 0.5) * 20).long().clamp(max=9)
    gaps = sure.new_zeros(10).index_add_(0, bins, sure - was_right)

    scores = torch.cat((chosen, rejected))
    lengths = torch.cat((n_chosen, n_rejected))
    return found | {
        "ece": gaps.abs().sum().item() / len(sure),
        "margin": difference.mean().item(),
        "reward_mean": scores.mean().item(),
        "reward_std": scores.std(correction=0).item(),
        "reward_min": scores.min().item(),
        "reward_max": scores.max().item(),
        "length_correlation": torch.corrcoef(torch.stack((scores, lengths)))[0, 1].item(),
    }


# ---- scores of conversations ---------------------------------------------------------------------


def answered_ids(messages: list[dict], tokenizer: Tokenizer) -> list[int]:
    """Return the ids up to what ends the last answer.

    Raise UserError if the last message is not an answer."""
    if not messages or messages[-1].get("role") != "assistant":
        what = "a conversation must end with the assistant's answer, which is what gets a score"
        raise UserError(f"reward: {what}")
    prompt, answer = split_answer(*tokenizer.render(messages, only_last=True))
    return prompt + answer


def drawn_ids(
    messages: list[dict] | None,
    prompt: list[int],
    drawn: list[int],
    text: str,
    tokenizer: Tokenizer,
    longest: int,
) -> list[int]:
    """Return the ids at whose end a model's own answer is scored: those of training.

    messages, prompt: before the answer, and their ids. drawn: without the id that ended the answer;
    text: of them. longest: most ids that the reward model reads."""
    # Our template writes an answer as it was drawn, with what ends a turn. Another may write it
    # otherwise, without its thoughts for example: then that is what the reward model learned from.
    ids = [*prompt, *drawn, *tokenizer.closing_ids]
    if not messages or not tokenizer.foreign_template:
        return ids
    if not tokenizer.special_ids.isdisjoint(drawn):  # they are not in `text`
        return ids
    begin = opened_thoughts(tokenizer.decode(prompt))
    answer = {"role": "assistant", "content": begin + text}
    # What the template cannot write, or makes too long, is scored as it was drawn.
    with suppress(UserError):
        written = answered_ids([*messages, answer], tokenizer)
        if len(written) <= longest and tokenizer.decode(written) != tokenizer.decode(ids):
            return written
    return ids


@torch.no_grad()
def score_ids(
    model: RewardModel,
    rows: Sequence[list[int]],
    batch_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Return the score at the last id of each row, which is the <|im_end|> of an answer.

    Raise UserError for a row that the model cannot read."""
    longest = max(map(len, rows), default=0)
    if longest > model.cfg.block_size:
        most = f"block_size={model.cfg.block_size}"
        raise UserError(f"reward: {longest} tokens, but the model reads {most} at most")
    device, training = model.score.weight.device, model.training
    model.eval()
    scores = [0.0] * len(rows)
    # Rows of similar length share a batch. The longest come first, so too little memory shows at
    # once.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    for begin in range(0, len(order), batch_size):
        numbers = order[begin : begin + batch_size]
        T = len(rows[numbers[0]])  # the longest of the batch
        x = torch.zeros(len(numbers), T, dtype=torch.int64)  # what follows a row, no row sees
        last = []  # positions in the flat x
        for b, i in enumerate(numbers):
            n = len(rows[i])
            x[b, :n] = torch.tensor(rows[i])
            last.append(b * T + n - 1)
        with autocast(device, dtype):
            found = model(x.to(device), index=torch.tensor(last, device=device))
        for i, value in zip(numbers, found.tolist(), strict=True):
            scores[i] = value
    model.train(training)
    return scores


# ---- model directories ---------------------------------------------------------------------------


def padded(tokenizer: Tokenizer) -> Tokenizer:
    """Return `tokenizer` with a padding token that ends no turn. Raise UserError if there is no
    special token for that."""
    # transformers reads the score at the last token that is not padding, so what ends a turn must
    # not pad.
    ends = (-1, tokenizer.turn_end_id)
    if tokenizer.pad_id not in ends:
        return tokenizer
    free = {name: i for name, i in tokenizer.special_tokens.items() if i not in ends}
    if not free:
        what = "no special token to pad with, beside the one that ends a turn"
        raise UserError(f"reward: the tokenizer has {what}")
    # a name with "pad", else with "text" as in <|endoftext|>, else the first id
    pad = min(free, key=lambda name: ("pad" not in name, "text" not in name, free[name]))
    config = json.loads(tokenizer.files.get("tokenizer_config.json", b"{}"))
    config["pad_token"] = pad
    files = tokenizer.files | {"tokenizer_config.json": engines.to_json(config)}
    return Tokenizer(files, tokenizer.generation_config)


def stored_weights(model: RewardModel) -> dict[str, Tensor]:
    """Return the tensors that a save writes, by our names. Adapters are merged, on the CPU."""
    weights = {name: p.detach() for name, p in model.named_parameters() if ".lora_" not in name}
    for name, layer in lora.adapters(model):
        weights[f"{name}.weight"] = layer.merged_weight(torch.float32).cpu()
    return weights


def write_model(
    directory: Path,
    model: RewardModel,
    tokenizer: Tokenizer,
    base: str | Path = "",
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a directory that transformers opens, as huggingface.write_model does.

    base is not used: adapters are merged. weights: a copy of `stored_weights(model)`."""
    # LlamaForCausalLM's configuration, with one label; a Qwen2 or Qwen3 has a class of its own.
    tokenizer = padded(tokenizer)
    tokenizer.save(directory)
    config = to_hf_config(model.cfg, tokenizer, dtype)
    kind = config["architectures"][0].replace("CausalLM", "SequenceClassification")
    config["architectures"] = [kind]
    config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_json(directory / "config.json", config)
    weights = stored_weights(model) if weights is None else weights
    stored = {hf_name(name): t.to("cpu", dtype) for name, t in weights.items()}
    save_weights(directory / "model.safetensors", stored)


def find_model(name: str, tokenizer: Tokenizer, key: str) -> Path:
    """Return the directory of the reward model that the setting `key` names. Raise UserError if
    there is none, or if its tokenizer is not `tokenizer`."""
    directory = checkpoint.resolve(name, key, rewards=True)  # of a run the newest checkpoint
    if not huggingface.is_reward_model(directory):
        raise UserError(f"reward: {key}={name!r} holds no reward model; reward.py trains one")
    # It reads the ids that the policy has drawn.
    if Tokenizer.load(directory).fingerprint() != tokenizer.fingerprint():
        what = f"{key}={name!r} has another tokenizer than the model that answers"
        raise UserError(f"reward: {what}; train the reward model from one with the same")
    return directory


def load(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> RewardModel:
    """Return the reward model of a directory, in eval mode. All ranks call it.

    dtype: of its matrix products."""
    if not huggingface.is_reward_model(directory):
        raise UserError(f"reward: {directory} holds no reward model; reward.py trains one")
    model = huggingface.build(RewardModel, huggingface.load_config(directory), dtype)
    huggingface.load_on_rank_0_or_all(huggingface.load_weights, model, directory)
    ranks.broadcast_weights(model)
    return model.to(device).eval()


# ---- start and resume a run ----------------------------------------------------------------------


def load_start(model: RewardModel, source: Path, n_known: int, tokenizer: Tokenizer) -> None:
    """Load the weights that a new run starts from, as huggingface.load_start does."""
    huggingface.load_on_rank_0_or_all(read_start, model, source, n_known, tokenizer)


def load_resumed(model: RewardModel, path: Path, trained: dict) -> None:
    """Load the weights of a checkpoint to continue it. trained: of its training state."""
    huggingface.load_on_rank_0_or_all(load_weights, model, path, trained)


def read_start(model: RewardModel, source: Path, n_known: int, tokenizer: Tokenizer) -> None:
    """Copy the weights of a reward model, or of a language model, whose head is not used."""
    if huggingface.is_reward_model(source):
        huggingface.load_weights(model, source)
    else:
        huggingface.load_with_new_rows(model, source, n_known, tokenizer)


def frozen_base(model: RewardModel, init_dir: Path, state: Mapping) -> str:
    """Return the directory of the frozen weights below a model's adapters, "" without adapters.

    state: of `checkpoint.find`."""
    # A resumed run keeps its own base, even if init_from has moved on to another step.
    if lora.lora_config_of(model) is None:
        return ""
    if "trained" in state:
        return state["trained"]["base"]
    return huggingface.absolute_base(init_dir)


def trained_weights(model: RewardModel, base: str) -> dict:
    """Return what a resume needs besides the merged weights: the adapters and what is trained
    beside them, and which base they belong to. It is {} for a model without adapters."""
    if not base:
        return {}
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {"base": base, "base_key": huggingface.shared_fingerprint(base), "weights": weights}


@torch.no_grad()
def load_weights(model: RewardModel, path: Path, trained: dict) -> None:
    """Load the weights of a checkpoint to continue it, adapters to the bit.

    Raise UserError if the weights below the adapters have changed."""
    if not trained:  # no adapters: the saved weights are all there is
        huggingface.load_weights(model, path)
        return
    # The saved weights are merged, which rounds. Load the base again, then the adapters.
    base = Path(trained["base"])
    if huggingface.weights_fingerprint(base) != trained["base_key"]:
        text = f"the weights in {base} are not those that {path} was trained on"
        raise UserError(f"reward: {text}")
    tokenizer = Tokenizer.load(path)
    n_known = huggingface.count_known_ids(base, tokenizer, str(path))
    read_start(model, base, n_known, tokenizer)
    params = dict(model.named_parameters())
    for name, weight in trained["weights"].items():
        params[name].copy_(weight)
