"""What dpo.py learns from: log-probabilities of answers, the losses, and the reference.

    logps, n_tokens = pair_logps(model, batch)                       # (2, B): chosen, rejected
    losses, metrics = losses_and_metrics(logps, ref_logps, n_tokens, config)   # (B,), (M, B)

The reference is the model before the first step. Its log-probabilities do not change, so they are
computed once for all pairs and kept in a file.

In formulas: w is the chosen answer, l the rejected one, r(y) = log p(y) - log ref(y) the log-ratio
of an answer, |y| its number of tokens, s the sigmoid, beta the setting.
"""

import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from groundup.errors import UserError, counted, refuse
from groundup.files.untrusted import loads
from groundup.kernels.cross_entropy import token_logps
from groundup.tokens import IGNORE
from groundup.tokens.pairs import PairBatch, PairCorpus
from groundup.train import huggingface, ranks
from groundup.train.device import autocast
from groundup.train.fsdp import same_forwards
from groundup.train.huggingface import open_safetensors, save_weights
from groundup.train.lora import adapters_off
from model import Transformer

REFERENCE_FREE = ("simpo", "orpo")
# rewards/* and logps/* have trl's names and values. A reward is beta times the log-ratio of a whole
# answer, also where the loss compares means per token (ipo, sigmoid_norm); of simpo and orpo beta
# times the mean log-probability. lengths/* are in tokens. kl/* is the mean log-ratio per token of
# the data's answers: how far the policy has moved on them (below 0: it finds them less likely).
METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "lengths/chosen",
    "lengths/rejected",
    "kl/chosen",
    "kl/rejected",
)
# Of kto chosen and rejected are good and bad answers, kl is `kl_estimate`, per answer.
KTO_METRICS = (*METRICS, "kl", "share/chosen")


def check_losses(config: Mapping) -> None:
    """Raise UserError for settings that do not fit the loss."""
    loss, smoothing = config["loss"], config["label_smoothing"]
    refuse(not config["beta"] > 0, f"beta must be above 0, got {config['beta']}")
    refuse(not smoothing < 0.5, f"label_smoothing must be below 0.5, got {smoothing}")
    unused = smoothing and loss not in ("cdpo", "robust")
    refuse(unused, f"label_smoothing is for loss='cdpo' or 'robust', not {loss!r}")
    what = "nll_weight is for pairs, not for loss='kto'; give --nll_weight=0"
    refuse(loss == "kto" and config["nll_weight"], what)
    unused = loss != "kto" and config["desirable_weight"] != 1
    refuse(unused, "desirable_weight is for loss='kto'")
    other = config["reference"] == "adapter_off" and config["trainable"].strip() != "lora"
    refuse(other, f"reference='adapter_off' needs trainable='lora', got {config['trainable']!r}")


# ---- log-probabilities ---------------------------------------------------------------------------


def pair_logps(model: Transformer, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Return (logps, n_tokens), each (2, B) float32: of the chosen and the rejected answers the sum
    of log-probabilities, with gradient, and the number of tokens, with the one that ends the turn.

    (1, B) for a batch of one side."""
    B, T = len(batch.number), batch.x.shape[1]
    # Pad to a multiple of a sixteenth of the batch: tensors of ever new sizes fragment memory.
    n_missing = -len(batch.index) % max(1, batch.x.numel() // 16)
    index = F.pad(batch.index, (0, n_missing))
    targets = F.pad(batch.targets, (0, n_missing), value=IGNORE)

    hidden = model(batch.x, index=index)  # (n, C): only where an answer's token follows
    logps = token_logps(hidden, model.lm_head.weight, targets)  # (n,), 0 for padding
    is_token = (targets != IGNORE).float()

    # Put each token back in its place, then add up the rows: a sum in a fixed order. The padding
    # adds 0 to place 0.
    zeros = logps.new_zeros(batch.x.numel())
    sums = zeros.scatter_add(0, index, logps).view(-1, B, T).sum(2)
    n_tokens = zeros.scatter_add(0, index, is_token).view(-1, B, T).sum(2)
    return sums, n_tokens


@torch.no_grad()
def reference_logps(model: Transformer, batch: PairBatch) -> Tensor:
    """Return the log-probabilities of `pair_logps` without dropout and without adapters."""
    training = model.training
    model.eval()
    with adapters_off(model):
        logps, _ = pair_logps(model, batch)
    model.train(training)
    return logps


# ---- losses of pairs -----------------------------------------------------------------------------


def pair_losses(logps: Tensor, ref_logps: Tensor, n_tokens: Tensor, config: Mapping) -> Tensor:
    """Return the loss of each pair, (B,) float32.

    logps, ref_logps, n_tokens (2, B): of chosen and rejected answers, by the model and by the
    reference. ref_logps are 0 for losses without a reference."""
    loss, beta, smoothing = config["loss"], config["beta"], config["label_smoothing"]
    ratios = logps - ref_logps
    means = ratios / n_tokens.clamp(min=1)
    by_sum = ratios[0] - ratios[1]  # r(w) - r(l)
    by_mean = means[0] - means[1]  # r(w) / |w| - r(l) / |l|
    # DPO (arXiv:2305.18290, equation 7): -log s(beta (r(w) - r(l)))
    if loss == "sigmoid":
        return -F.logsigmoid(beta * by_sum)
    as_labelled, swapped = F.logsigmoid(beta * by_sum), F.logsigmoid(-beta * by_sum)
    # conservative DPO: a label is wrong with probability label_smoothing
    if loss == "cdpo":
        return -(1 - smoothing) * as_labelled - smoothing * swapped
    # unbiased under such labels (arXiv:2403.00409)
    if loss == "robust":
        return (-(1 - smoothing) * as_labelled + smoothing * swapped) / (1 - 2 * smoothing)
    # SLiC (arXiv:2305.10425)
    if loss == "hinge":
        return F.relu(1 - beta * by_sum)
    # arXiv:2310.12036, with means per token, as its authors do
    if loss == "ipo":
        return (by_mean - 1 / (2 * beta)) ** 2
    # DPO with means per token (arXiv:2411.15124)
    if loss == "sigmoid_norm":
        return -F.logsigmoid(beta * by_mean)
    # arXiv:2405.14734, equation 6: without a reference, with a target margin gamma
    if loss == "simpo":
        return -F.logsigmoid(beta * by_mean - config["gamma"])
    assert loss == "orpo", loss
    return -beta * F.logsigmoid(by_mean - (log1mexp(means[0]) - log1mexp(means[1])))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0. x is clamped to -1e-6: a probability of 1 has no odds."""
    return torch.log(-torch.expm1(x.clamp(max=-1e-6)))


def losses_and_metrics(
    logps: Tensor,
    ref_logps: Tensor,
    n_tokens: Tensor,
    config: Mapping,
    labels: Tensor | None = None,
    kl: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair (B,), and its METRICS (M, B) float32 without gradient.

    The first three are as in `pair_losses`. labels, kl: of `kto_losses_and_metrics`."""
    if config["loss"] == "kto":
        return kto_losses_and_metrics(logps[0], ref_logps[0], n_tokens[0], labels, kl, config)
    losses = pair_losses(logps, ref_logps, n_tokens, config)
    nll_share = config["nll_weight"] + (config["loss"] == "orpo")
    if nll_share:
        losses = losses + nll_share * (-logps[0] / n_tokens[0].clamp(min=1))

    logps = logps.detach()
    ratios = logps - ref_logps
    means = ratios / n_tokens.clamp(min=1)
    rewards, kls = config["beta"] * ratios, means
    if config["loss"] in REFERENCE_FREE:
        rewards, kls = config["beta"] * means, torch.zeros_like(means)
    margins = rewards[0] - rewards[1]
    right = (rewards[0] > rewards[1]).float()
    # in the order of METRICS
    metrics = [losses.detach(), *rewards, margins, right, *logps, *n_tokens, *kls]
    return losses, torch.stack(metrics)


# ---- KTO: single answers, good or bad ------------------------------------------------------------


def kto_losses_and_metrics(
    logps: Tensor,
    ref_logps: Tensor,
    n_tokens: Tensor,
    labels: Tensor,
    kl: Tensor,
    config: Mapping,
) -> tuple[Tensor, Tensor]:
    """Return KTO's loss (arXiv:2402.01306) of each answer (B,), and its KTO_METRICS (M, B) float32
    without gradient.

    logps, ref_logps, n_tokens, labels (B,): 1 = good, -1 = bad. kl: of `kl_estimate`.
    A metric of good answers is 0 for a bad one, and the reverse; `named` divides their means."""
    # Loss of a good answer: desirable_weight (1 - s(beta (r(y) - kl))); of a bad one the same with
    # the sign turned and weight 1.
    good = (labels > 0).float()
    bad = 1 - good
    ratios = logps - ref_logps
    gains = torch.sigmoid(config["beta"] * labels * (ratios - kl))
    losses = (1 - gains) * (good * config["desirable_weight"] + bad)

    logps, ratios = logps.detach(), ratios.detach()
    right = (labels * (ratios - kl) > 0).float()
    rewards = config["beta"] * ratios
    means = ratios / n_tokens.clamp(min=1)
    metrics = [losses.detach(), rewards * good, rewards * bad]
    metrics += [torch.zeros_like(good), right]  # `named` computes the margin of the means
    for values in (logps, n_tokens, means):
        metrics += [values * good, values * bad]
    metrics += [kl.expand_as(good), good]
    return losses, torch.stack(metrics)


@torch.no_grad()
def kl_estimate(measured: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Return KTO's estimate of the divergence from the reference in nats, 0-d, at least 0.

    All ranks call it. measured: of each batch the log-probabilities (B,) by the model and by the
    reference, of answers to other prompts."""
    # The mean of r(y), the reference point of the loss (arXiv:2402.01306, section 4)
    sums = torch.zeros(2, device=device)  # of log-ratios and answers
    for logps, ref_logps in measured:
        sums += torch.stack(((logps - ref_logps).sum(), torch.ones_like(logps).sum()))
    total, n = ranks.all_reduce_sum(sums)
    return (total / n.clamp(min=1)).clamp(min=0)


# ---- means of metrics ----------------------------------------------------------------------------


def metric_names(config: Mapping) -> tuple[str, ...]:
    """Return the names of the rows of `losses_and_metrics`."""
    return KTO_METRICS if config["loss"] == "kto" else METRICS


def named(means: Iterable[float], config: Mapping) -> dict[str, float]:
    """Return {name: mean} of metrics. Of KTO, `chosen` are means over the good answers alone, and
    `rejected` over the bad ones."""
    found = dict(zip(metric_names(config), means, strict=True))
    if config["loss"] != "kto":
        return found
    # The means are over all answers, with 0 for those of the other kind.
    good = found["share/chosen"]
    for name in METRICS:
        if name.endswith("chosen"):
            found[name] /= max(good, 1e-9)
        elif name.endswith("rejected"):
            found[name] /= max(1 - good, 1e-9)
    found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


# ---- the reference -------------------------------------------------------------------------------


def describe_reference(init_dir: Path, corpus: PairCorpus, dtype: torch.dtype) -> dict[str, str]:
    """Return {what the reference's log-probabilities depend on: its fingerprint}."""
    return {
        "checkpoint": huggingface.shared_fingerprint(init_dir),
        "pairs": corpus.fingerprint,
        "tokenizer": corpus.tokenizer.fingerprint(),
        "dtype": str(dtype),
    }


@ranks.on_rank_0
def read_reference(path: Path, made_of: Mapping[str, str]) -> Tensor | None:
    """Return the log-probabilities of chosen and rejected answers, (n_pairs, 2) float32, or None if
    there is no file. Rank 0 reads them for all.

    made_of: from describe_reference. Raise UserError if the file is damaged, or was made of
    something else."""
    if not path.exists():
        return None
    again = "delete it to have it computed again"
    try:
        with open_safetensors(path) as file:
            saved = loads(file.metadata()["made_of"])
            table = file.get_tensor("logps")
        damaged = saved.pop("logps") != table_sum(table)
    except UserError as error:
        raise UserError(f"{error}; {again}") from None
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError):
        damaged = True
    if damaged:
        raise UserError(f"config: the log-probabilities in {path} are damaged; {again}")
    differ = [key for key, value in made_of.items() if saved.get(key) != value]
    if differ:
        what = f"{path} belong to another {' and '.join(differ)}"
        raise UserError(f"config: the log-probabilities in {what}; {again}, or use another out_dir")
    return table


def table_sum(table: Tensor) -> str:
    """Return type, shape and CRC-32 of the log-probabilities, which lie on the CPU."""
    # A disk that loses a block must not change a training run in silence.
    return f"{table.dtype} {list(table.shape)} {zlib.crc32(table.numpy()):08x}"


def compute_reference(
    model: Transformer,
    corpus: PairCorpus,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Return what `read_reference` reads, (n_pairs, 2) float32 on the CPU, each rank a part."""
    began = time.perf_counter()
    table = torch.zeros(corpus.n_pairs, 2)  # each rank fills in its pairs; the sum has them all
    batches = corpus.all_batches(batch_size, ranks.rank(), ranks.world_size())
    for batch in same_forwards(model, batches):
        with autocast(device, dtype):
            logps = reference_logps(model, batch.to(device))
        table[batch.number] = logps.T.cpu()
    ranks.all_reduce_sum(table)
    if ranks.rank() == 0:
        seconds = time.perf_counter() - began
        print(f"reference   of {counted(corpus.n_pairs, 'pair')} in {seconds:.1f} s", flush=True)
    return table


def save_reference(path: Path, table: Tensor, made_of: Mapping[str, str]) -> None:
    """Write the file of `read_reference`, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        record = json.dumps({**made_of, "logps": table_sum(table)})
        save_weights(temporary, {"logps": table}, "made_of", record)
        os.replace(temporary, path)
    finally:  # a full disk, Ctrl-C
        temporary.unlink(missing_ok=True)
