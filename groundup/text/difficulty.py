"""How difficult a text is, by n-grams: for a curriculum that goes from easy to hard, before any model is there."""

import numpy as np

from groundup.errors import UserError
from groundup.text.quality import window_hashes


class NgramModel:
    """How difficult a text is: by how often its tokens followed each other in other texts.

    Bits per token by interpolation (Jelinek and Mercer 1980): p(w | u v) = 0.7 c(u v w) / c(u v) + 0.3 p(w | v), and so
    on down to p(w) = (c(w) + 1) / (N + number of different tokens + 1). Where the context was never seen, the lower
    order alone. Counts are kept by hash in tables of fixed size: beyond some millions of different n-grams rare ones
    share a slot and look more common, so count on a sample. order: 1, 2 or 3; bits: log2 of the slots of a table.
    """

    WEIGHT = 0.7  # of the higher order where its context is known (own)

    def __init__(self, order: int = 3, bits: int = 22) -> None:
        if order not in (1, 2, 3):
            raise UserError(f"difficulty: order must be 1, 2 or 3, got {order!r}")
        self.order, self.bits = order, bits
        self.counts = np.zeros((order, 2**bits), np.int64)
        self.n_tokens, self.n_different = 0, 0

    def add(self, ids: np.ndarray) -> None:
        """Count the n-grams of a text. ids: integers (n,), none negative."""
        for n in range(1, self.order + 1):
            slots, times = np.unique(self._slots(ids, n), return_counts=True)
            if n == 1:
                self.n_different += int((self.counts[0, slots] == 0).sum())
            self.counts[n - 1, slots] += times
        self.n_tokens += len(ids)

    def merge(self, other: "NgramModel") -> None:
        """Add what another process counted."""
        if (self.order, self.bits) != (other.order, other.bits):
            raise UserError("difficulty: n-gram models of different orders or sizes cannot be added")
        self.counts += other.counts
        self.n_tokens += other.n_tokens
        self.n_different = int(np.count_nonzero(self.counts[0]))

    def difficulty(self, ids: np.ndarray, added: bool = False) -> float:
        """Mean of -log2 p over the tokens, in bits; 0.0 of no tokens. added: the text is one of those that were added,
        and is judged by the others: by its own counts the strangest text of all would be the easiest."""
        if len(ids) == 0:
            return 0.0
        counts = [self._counts(ids, n, added) for n in range(1, self.order + 1)]
        p = (counts[0] + 1) / (self.n_tokens - added * len(ids) + self.n_different + 1)
        for n in range(2, self.order + 1):
            together, context = counts[n - 1], counts[n - 2][: len(counts[n - 1])]
            higher = np.minimum(together / np.maximum(context, 1), 1.0)  # a shared slot can count more than its context
            lower = p[n - 1 :]
            p[n - 1 :] = np.where(context > 0, self.WEIGHT * higher + (1 - self.WEIGHT) * lower, lower)
        return float(-np.log2(p).mean())

    def _counts(self, ids: np.ndarray, n: int, added: bool) -> np.ndarray:
        """int64 (len(ids) - n + 1,): how often each n-gram was seen, in other texts if `added`."""
        slots = self._slots(ids, n)
        if not added:
            return self.counts[n - 1, slots]
        different, which, own = np.unique(slots, return_inverse=True, return_counts=True)
        return (self.counts[n - 1, different] - own)[which]

    def _slots(self, ids: np.ndarray, n: int) -> np.ndarray:
        """int64 (len(ids) - n + 1,): where the count of each n-gram is."""
        hashes = window_hashes(np.asarray(ids, np.uint64), n)
        return (hashes >> np.uint64(64 - self.bits)).astype(np.int64)
