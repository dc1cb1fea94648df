"""Log-probabilities of given tokens, from which the scores of evaluate.py are computed. The
logits of all positions are never held at once, and the ranks share the work.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from tqdm import tqdm

from groundup.kernels.cross_entropy import token_scores
from groundup.train import ranks
from groundup.train.device import autocast
from model import Transformer


class Scored(NamedTuple):
    nats: float  # negative log-probability of the scored tokens, summed
    n_tokens: int  # scored
    greedy: bool  # whether greedy decoding would give them: each is the likeliest token


def split_over_ranks(n: int, work: Callable[[range], Iterable]) -> list:
    """Return the results for n items, all of them on all ranks. `work` gets a rank's own items
    and gives theirs."""
    own = ranks.own_part(n)
    found = dict(zip(own, work(own), strict=True))  # by number, so the order is that of the items
    of_all = {i: one for theirs in ranks.gather_objects(found) for i, one in theirs.items()}
    return [of_all[i] for i in range(n)]


@torch.no_grad()
def score_tokens(
    model: Transformer,
    rows: Sequence[tuple[Sequence[int], int]],
    batch_size: int,
    dtype: torch.dtype,
) -> list[Scored]:
    """Return the log-probability of ids[first:], each token given all before it in its row, for
    rows of (ids, first).

    1 <= first <= len(ids) <= block_size + 1. Matrix products are in `dtype`, log-softmax in
    float32. All ranks pass the same rows and get all results, in order."""
    training = model.training
    model.eval()
    # {ids that the model reads: rows}: rows that differ only in their last id, as the letters of a
    # question do, share one forward pass.
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for i, (ids, first) in enumerate(rows):
        assert 1 <= first <= len(ids) <= model.cfg.block_size + 1, f"row {i}: {first=} {len(ids)=}"
        rows_of.setdefault(tuple(ids[:-1]), []).append(i)
    # Rows of similar length share a batch. The longest come first, so too little memory shows at
    # once. The batches do not depend on the number of ranks, and so neither do the roundings.
    inputs = sorted(rows_of, key=len, reverse=True)
    batches = [inputs[k : k + batch_size] for k in range(0, len(inputs), batch_size)]

    def score(own: range) -> Iterable[list[Scored]]:
        hidden = True if own.start else None  # the first rank shows the bar; None = on a terminal
        for k in tqdm(own, desc="scoring", unit="batch", leave=False, disable=hidden):
            batch = [(ids, [rows[i] for i in rows_of[ids]]) for ids in batches[k]]
            yield score_batch(model, batch, dtype)

    found = chain.from_iterable(split_over_ranks(len(batches), score))
    by_row = dict(zip(chain.from_iterable(rows_of[ids] for ids in inputs), found, strict=True))
    model.train(training)
    return [by_row[i] for i in range(len(rows))]


def score_batch(
    model: Transformer, batch: Sequence[tuple[tuple[int, ...], list]], dtype: torch.dtype
) -> list[Scored]:
    """Return what score_tokens does for the rows [(ids, first), ...] of each input in the batch."""
    device = model.embed_tokens.weight.device
    T = max(1, *(len(ids) for ids, _ in batch))
    # Padding on the right: attention is causal, so no token that counts sees it.
    x = torch.tensor([[*ids, *[0] * (T - len(ids))] for ids, _ in batch])  # (B, T)
    # Positions of the flat x that predict a scored token, those tokens, their number in each row
    index, targets, counts = [], [], []
    for k, (_, rows) in enumerate(batch):
        for ids, first in rows:
            # ids[first] is predicted one position before it
            index += range(k * T + first - 1, k * T + len(ids) - 1)
            targets += ids[first:]
            counts.append(len(ids) - first)
    with autocast(device, dtype):  # (n, C): hidden states of the scored positions alone
        hidden = model(x.to(device), index=torch.tensor(index, dtype=torch.int64, device=device))
    if not targets:
        return [Scored(0.0, 0, True)] * len(counts)
    nats, correct = token_scores(hidden, model.lm_head.weight, torch.tensor(targets, device=device))
    # Sums in float64: a long text adds up thousands of terms.
    parts = zip(nats.cpu().double().split(counts), correct.cpu().split(counts), strict=True)
    return [Scored(of_row.sum().item(), len(of_row), bool(right.all())) for of_row, right in parts]
