"""Log-probabilities of given tokens, from which the scores of evaluate.py are computed. The logits of all positions are
never held at once, and the ranks share the work.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from groundup.train import ranks
from groundup.train.device import autocast
from model import Transformer, token_scores


class Scored(NamedTuple):
    nats: float  # negative log-probability of the scored tokens, summed
    n_tokens: int  # scored
    greedy: bool  # whether greedy decoding would give them: each is the likeliest token


@torch.no_grad()
def score_tokens(
    model: Transformer, rows: Sequence[tuple[Sequence[int], int]], batch_size: int, device: torch.device,
    dtype: torch.dtype,
) -> list[Scored]:  # fmt: skip
    """Return the log-probability of ids[first:], each token given all before it in its row, for rows of (ids, first).

    1 <= first <= len(ids) <= block_size + 1. Matrix products are in `dtype`, log-softmax in float32. Rows of similar
    length are batched; rows that differ only in their last id, as the letters of a question do, are computed once. All
    ranks pass the same rows and get all results, in order; the batches do not depend on the number of ranks."""
    training = model.training
    model.eval()
    rows_of: dict[tuple[int, ...], list[int]] = {}  # what is read -> the rows that read it
    for i, (ids, first) in enumerate(rows):
        assert 1 <= first <= len(ids) <= model.cfg.block_size + 1, f"row {i}: {first=} {len(ids)=}"
        rows_of.setdefault(tuple(ids[:-1]), []).append(i)
    inputs = sorted(rows_of, key=len, reverse=True)  # what needs most memory first
    batches = [inputs[k : k + batch_size] for k in range(0, len(inputs), batch_size)]
    own = ranks.own_part(len(batches))
    mine = {}
    for k in tqdm(own, desc="scoring", unit="batch", leave=False, disable=True if own.start else None):
        batch = batches[k]
        members = [[(i, *rows[i]) for i in rows_of[ids]] for ids in batch]
        mine |= score_batch(model, batch, members, device, dtype)
    found = ranks.merged(mine)
    model.train(training)
    return [Scored(*found[i]) for i in range(len(rows))]


def score_batch(
    model: Transformer, inputs: Sequence[tuple[int, ...]], members: Sequence[list[tuple[int, Sequence[int], int]]],
    device: torch.device, dtype: torch.dtype,
) -> dict[int, tuple[float, int, bool]]:  # fmt: skip
    """Return {i: fields of Scored} of the rows (i, ids, first) of each input. Padding follows what counts, where no
    token sees it, and gets no logits."""
    T = max(1, *map(len, inputs))
    x = torch.tensor([[*ids, *[0] * (T - len(ids))] for ids in inputs])
    index, targets, spans = [], [], []
    for k, of_input in enumerate(members):
        for i, ids, first in of_input:
            spans.append((i, len(targets), len(ids) - first))
            index += range(k * T + first - 1, k * T + len(ids) - 1)
            targets += ids[first:]
    with autocast(device, dtype):
        hidden = model(x.to(device), index=torch.tensor(index, dtype=torch.int64, device=device))
    found = {i: (0.0, 0, True) for i, _, _ in spans}
    if targets:
        nats, correct = token_scores(hidden, model.lm_head.weight, torch.tensor(targets, device=device))
        nats, correct = nats.double().cpu(), correct.cpu()
        for i, begin, n in spans:
            part = slice(begin, begin + n)
            found[i] = (nats[part].sum().item(), n, bool(correct[part].all()))
    return found
