"""Preference losses, the log-probabilities that they are made of, and those of the reference model.

    hidden = model(x, index=index)                                  # hidden states at positions of the flat x, (N, C)
    logps = token_logps(hidden, model.lm_head.weight, targets)      # (N,), never holding all the logits
    logps, n_tokens = pair_logps(model, batch, device, dtype)       # sums over the answers of pairs, (2, B)
    losses = pair_losses(logps, reference, n_tokens, config)        # (B,)
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from groundup.errors import UserError, refuse
from groundup.tokens.pairs import PairBatch, PairCorpus
from groundup.train import checkpoint, huggingface, ranks
from groundup.train.device import autocast
from groundup.train.fsdp import in_step
from groundup.train.lora import adapters_off
from model import (
    IGNORE,
    ModelConfig,
    Transformer,
    add_product,
    chunk_rows,
    compute_dtype,
    cross_entropy_gradient,
    softmax_cross_entropy,
)

LOSSES = ("sigmoid", "cdpo", "robust", "hinge", "ipo", "sigmoid_norm", "simpo", "orpo", "kto")
REFERENCE_FREE = ("simpo", "orpo")
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen")
METRICS += ("logps/rejected", "lengths/chosen", "lengths/rejected", "kl/chosen", "kl/rejected")
KTO_METRICS = (*METRICS, "kl", "share/chosen")  # chosen and rejected are good and bad answers


def check_losses(config: Mapping) -> None:
    """Raise UserError for settings that do not fit the loss."""
    wrong = config["label_smoothing"]
    refuse(not config["beta"] > 0, f"beta must be above 0, got {config['beta']}")
    refuse(not 0 <= wrong < 0.5, f"label_smoothing must be from 0 to below 0.5, got {wrong}")
    other = wrong and config["loss"] not in ("cdpo", "robust")
    refuse(other, f"label_smoothing is for loss='cdpo' or 'robust', not {config['loss']!r}")
    kto = config["loss"] == "kto"
    refuse(kto and config["nll_weight"], "nll_weight is for pairs, not for loss='kto'")
    refuse(not kto and config["desirable_weight"] != 1, "desirable_weight is for loss='kto'")


def token_logps(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(hidden @ weight.T / temperature)[target], (N,) float32, 0 where the target is IGNORE, with
    gradients.

    hidden (N, C), weight (V, C), targets (N,) int64. Products in the dtype of autocast, softmax in float32. Unlike
    model.cross_entropy, which forms its gradients in forward, a token's gradient here depends on a loss that is known
    only after all tokens: backward computes the logits of a block once more."""
    return ChunkedLogps.apply(hidden, weight, targets, compute_dtype(hidden), temperature)


class ChunkedLogps(torch.autograd.Function):
    """Head and log-softmax over blocks of tokens, so that memory holds (chunk, V) logits, never (N, V)."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, temperature: float
    ) -> Tensor:  # fmt: skip
        N = hidden.shape[0]
        logps, lse = (hidden.new_empty(N, dtype=torch.float32) for _ in range(2))
        w = weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(N, weight):
                logits = (hidden[part].to(dtype) @ w.T).float().div_(temperature)
                nats, of_part = softmax_cross_entropy(logits, targets[part])
                logps[part], lse[part] = -nats, of_part.squeeze(1)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.dtype, ctx.temperature = dtype, temperature
        return logps

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        hidden, weight, targets, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        w, scale = weight.to(ctx.dtype), -grad.float() * (targets != IGNORE) / ctx.temperature
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(hidden.shape[0], weight):
                h = hidden[part].to(ctx.dtype)
                logits = (h @ w.T).float().div_(ctx.temperature)
                grad_logits = cross_entropy_gradient(logits, targets[part], lse[part].unsqueeze(1), scale[part])
                grad_logits = grad_logits.to(ctx.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits @ w
                if grad_weight is not None:
                    add_product(grad_weight, grad_logits.T, h)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def chunks(n_tokens: int, weight: Tensor) -> list[slice]:
    """Return the blocks of tokens whose logits by weight (V, C) are held at once."""
    chunk = chunk_rows(weight.shape[0], weight.device.type)
    return [slice(start, start + chunk) for start in range(0, n_tokens, chunk)]


def pair_logps(model: Transformer, batch: PairBatch, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sums of log-probabilities of the chosen and the rejected answers, (2, B) float32 with gradient, and
    their numbers of tokens; (1, B) of a batch of one side. An answer's <|im_end|> counts."""
    B, T = len(batch.number), batch.x.shape[1]
    place = batch.row * T + batch.index % T  # all different, so that scatter_add sums in a fixed order
    n = -len(batch.index) % max(1, batch.x.numel() // 16)  # tensors of ever new sizes fragment the memory
    index, place, targets = F.pad(batch.index, (0, n)), F.pad(place, (0, n)), F.pad(batch.targets, (0, n), value=IGNORE)
    with autocast(device, dtype):
        hidden = model(batch.x, index=index)
        logps = token_logps(hidden, model.lm_head.weight, targets)
    zeros, valid = logps.new_zeros(batch.x.numel()), (targets != IGNORE).float()
    return tuple(zeros.scatter_add(0, place, part).view(-1, B, T).sum(2) for part in (logps, valid))


def reference_logps(model: Transformer, batch: PairBatch, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the log-probabilities of `pair_logps`, (2, B), without gradient, dropout and adapters."""
    training = model.training
    model.eval()
    with torch.no_grad(), adapters_off(model):
        logps, _ = pair_logps(model, batch, device, dtype)
    model.train(training)
    return logps


def pair_losses(logps: Tensor, reference: Tensor, n_tokens: Tensor, config: Mapping) -> Tensor:
    """Return the loss of each pair, (B,) float32. logps, reference, n_tokens (2, B): of chosen and rejected answers;
    reference = 0 for losses that have none.

    sigmoid: DPO (arXiv:2305.18290). cdpo: labels are wrong with probability label_smoothing. robust: unbiased under
    such labels (arXiv:2403.00409). hinge: SLiC (arXiv:2305.10425). ipo: arXiv:2310.12036, with means per token as its
    authors do. sigmoid_norm: DPO with means per token (arXiv:2411.15124). simpo: arXiv:2405.14734. orpo: the odds-ratio
    term (arXiv:2403.07691), lambda = beta; losses_and_metrics adds the chosen answer's loss."""
    loss, beta, wrong = config["loss"], config["beta"], config["label_smoothing"]
    ratios = logps - reference
    means = ratios / n_tokens.clamp(min=1)
    by_sum, by_mean = ratios[0] - ratios[1], means[0] - means[1]
    if loss == "sigmoid":
        return -F.logsigmoid(beta * by_sum)
    if loss == "cdpo":
        return -(1 - wrong) * F.logsigmoid(beta * by_sum) - wrong * F.logsigmoid(-beta * by_sum)
    if loss == "robust":
        right = -(1 - wrong) * F.logsigmoid(beta * by_sum) + wrong * F.logsigmoid(-beta * by_sum)
        return right / (1 - 2 * wrong)
    if loss == "hinge":
        return F.relu(1 - beta * by_sum)
    if loss == "ipo":
        return (by_mean - 1 / (2 * beta)) ** 2
    if loss == "sigmoid_norm":
        return -F.logsigmoid(beta * by_mean)
    if loss == "simpo":
        return -F.logsigmoid(beta * by_mean - config["gamma"])
    assert loss == "orpo", loss
    return -beta * F.logsigmoid(by_mean - (log1mexp(means[0]) - log1mexp(means[1])))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0, clamped to -1e-6: an answer of probability 1 has no finite odds."""
    return torch.log(-torch.expm1(x.clamp(max=-1e-6)))


def losses_and_metrics(logps: Tensor, reference: Tensor, n_tokens: Tensor, config: Mapping) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair (B,) and its METRICS (10, B) float32, detached. logps, n_tokens: of `pair_logps`."""
    losses = pair_losses(logps, reference, n_tokens, config)
    nll_share = config["nll_weight"] + (config["loss"] == "orpo")
    if nll_share:
        losses = losses + nll_share * (-logps[0] / n_tokens[0].clamp(min=1))
    logps = logps.detach()
    ratios = logps - reference
    means = ratios / n_tokens.clamp(min=1)
    chosen, rejected = config["beta"] * (means if config["loss"] in REFERENCE_FREE else ratios)
    parts = [chosen, rejected, chosen - rejected, (chosen > rejected).float(), *logps, *n_tokens]
    return losses, torch.stack([*parts, *(torch.zeros_like(means) if config["loss"] in REFERENCE_FREE else means)])


def kto_losses_and_metrics(
    logps: Tensor, reference: Tensor, n_tokens: Tensor, labels: Tensor, kl: Tensor, config: Mapping
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return KTO's loss (arXiv:2402.01306) of each answer (B,) and its KTO_METRICS (12, B) float32, detached, 0 in
    those of the other label; `named` divides their means. labels (B,): 1 = good, -1 = bad. kl: of `kl_estimate`. The
    others (B,): of the answers alone."""
    ratios, good = logps - reference, (labels > 0).float()
    gains = torch.sigmoid(config["beta"] * labels * (ratios - kl))
    losses = (1 - gains) * (good * config["desirable_weight"] + 1 - good)
    logps, ratios = logps.detach(), ratios.detach()
    right = (labels * (ratios - kl) > 0).float()
    values = config["beta"] * ratios, logps, n_tokens, ratios / n_tokens.clamp(min=1)
    (reward, logps, lengths, means) = (torch.stack((one * good, one * (1 - good))) for one in values)
    parts = [*reward, torch.zeros_like(good), right, *logps, *lengths, *means, kl.expand_as(good), good]
    return losses, torch.stack(parts)


@torch.no_grad()
def kl_estimate(found: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Return KTO's estimate of the divergence from the reference in nats, at least 0: the mean log-ratio of answers to
    other prompts over the batches of all ranks. found: log-probabilities (B,) by the model and by the reference."""
    sums = torch.zeros(2, device=device)
    for logps, reference in found:
        sums += torch.stack(((logps - reference).sum(), torch.ones_like(logps).sum()))
    total, n = ranks.all_reduce_sum(sums)
    return (total / n.clamp(min=1)).clamp(min=0)


def metric_names(config: Mapping) -> tuple[str, ...]:
    return KTO_METRICS if config["loss"] == "kto" else METRICS


def named(means: Iterable[float], config: Mapping) -> dict[str, float]:
    """Return the means of metrics by name; KTO's of good and bad answers are means over these."""
    found = dict(zip(metric_names(config), means, strict=True))
    if config["loss"] == "kto":
        for side, share in (("chosen", found["share/chosen"]), ("rejected", 1 - found["share/chosen"])):
            for name in METRICS:
                found[name] /= max(share, 1e-9) if name.endswith(side) else 1
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


def about_reference(source: Path | None, config: Mapping, cfg: ModelConfig, corpus: PairCorpus, dtype: str) -> dict:
    """Return {what the reference log-probabilities depend on: its fingerprint}."""
    parts = [source, checkpoint.base_of(source)] if source and checkpoint.is_adapter(source) else [source]
    weights = [checkpoint.weights_key(part) for part in parts] if source else [config["seed"], asdict(cfg)]
    found = {"checkpoint": json.dumps(weights), "pairs": corpus.fingerprint, "dtype": dtype}
    return found | {"tokenizer": corpus.tokenizer.fingerprint()}


def open_reference(path: Path, about: Mapping[str, str], n_pairs: int) -> Tensor | None:
    """Return the log-probabilities of chosen and rejected answers, (n_pairs, 2) float32, mapped; None if there is no
    file. Raise UserError if they belong to other weights, pairs, tokenizer or dtype."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            saved, table = file.metadata() or {}, file.get_tensor("logps")
    except (OSError, SafetensorError) as error:
        raise UserError(f"config: {path} cannot be read ({error}); delete it, and it is computed again") from None
    differ = [key for key, value in about.items() if saved.get(key) != value]
    if differ or table.shape != (n_pairs, 2):
        raise UserError(
            f"config: the reference log-probabilities in {path} belong to another {' and '.join(differ) or 'run'}; "
            "delete the file to have them computed again, or give another out_dir"
        )
    return table


def compute_reference(
    model: Transformer, corpus: PairCorpus, batch_size: int, world: ranks.World, device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Return the table of `open_reference`, on the CPU, for all pairs; each rank computes a part of them."""
    table, began = torch.zeros(corpus.n_pairs, 2), time.perf_counter()
    for batch in in_step(model, corpus.all_batches(batch_size, world.rank, world.world_size)):
        table[batch.number] = reference_logps(model, batch.to(device), device, dtype).T.cpu()
    ranks.all_reduce_sum(table)
    if world.is_main:
        print(f"reference   of {corpus.n_pairs:,} pairs in {time.perf_counter() - began:.1f} s", flush=True)
    return table


def save_reference(path: Path, table: Tensor, about: Mapping[str, str]) -> None:
    """Write the table, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        huggingface.save_weights(temporary, {"logps": table}, **about)
        os.replace(temporary, path)
    finally:  # a full disk, Ctrl-C
        temporary.unlink(missing_ok=True)
