"""Split data by a keyed hash of each text: train, val, test, or held out."""

import math
from hashlib import blake2b

import numpy as np

SPLITS = ("train", "val", "test")
SPLIT_KEY, HOLD_OUT_KEY = b"split-v1", b"hold-out-v1"
# With so few documents, or fewer, cut each one instead of hashing: val_fraction=0.1 of a dozen by
# their hashes is none or a quarter of them, and a long one is half of the text.
FEW = 40
VERY_FEW = 10  # cut also if their ends are short, which are then made longer
LEAST_END = 100  # bytes that a document gives on average: of lines the ends are no text
LONG = 20  # times as long as the others, on average, are the few that are cut beside these
FEW_VAL = 16  # the loss of fewer validation rows says little
MOST_VAL = 0.2  # share of few rows or tokens that is advised for validation, at most
# A split that should get so many, and gets none, was taken away before: by chance exp(-8) = 0.03 %.
TAKEN_BEFORE = 8


def dialogue_text(messages: list[dict]) -> str:
    """Return the text of users and assistants, by which conversations are compared and split."""
    return "\n".join(
        m["content"] for m in messages if m["role"] in ("user", "assistant") and m["content"]
    )


def context_text(messages: list[dict]) -> str:
    """Return the text that is neither a user's nor an assistant's: the system message, which also
    lists the tools, and results of tools."""
    return "\n".join(m["content"] for m in messages if m["role"] not in ("user", "assistant"))


def first_question(messages: list[dict]) -> str:
    return next((m["content"] for m in messages if m["role"] == "user"), "")


def held_out_position(question: str) -> int:
    """Return the position in [0, 2**64) of a conversation by a hash of its first question.

    The lowest share is held out: tuning learns the answer to each turn. A conversation without a
    question is never held out."""
    if not question.strip():
        return 2**64 - 1
    # another key than that of the splits: what is held out comes from all of them
    digest = blake2b(question.strip().encode(), digest_size=8, key=HOLD_OUT_KEY).digest()
    return int.from_bytes(digest, "little")


def are_held_out(positions: np.ndarray, fraction: float) -> np.ndarray:
    """Return which conversations are held out of training, from their positions (n,) uint64."""
    return positions < np.uint64(math.ceil(fraction * 2**64))


def split_position(raw: bytes) -> int:
    """Return the position in [0, 2**64) of a document by a hash of its text.

    Of a pair it is the hash of its prompt. Other rows do not move it, and copies of a text or
    prompt are in one split."""
    return int.from_bytes(blake2b(raw, digest_size=8, key=SPLIT_KEY).digest(), "little")


def share_for(wanted: float, n: int) -> float:
    """Return the val_fraction, in whole per cent up to MOST_VAL, that takes `wanted` of n."""
    return min(MOST_VAL, math.ceil(100 * wanted / max(1, n)) / 100)


def more_rows_for_val(n_val: int, n_rows: int, val_fraction: float) -> str:
    """Return how validation, which has n_val of n_rows, gets FEW_VAL or more, for a message."""
    share = share_for(1.5 * FEW_VAL, n_rows)  # more than needed: hashes take some more or fewer
    if share <= val_fraction or round(share * n_rows) <= n_val:
        return "give more rows"
    better = "; more rows would do more" if share * n_rows < FEW_VAL else ""
    return f"--val_fraction={share:g} holds out about {round(share * n_rows)}{better}"


def are_few(n_documents: int, n_bytes: int, share: float) -> bool:
    """Return whether documents are so few that each is cut. share: of the text, behind train."""
    if n_documents <= VERY_FEW:
        return True
    return n_documents <= FEW and share * n_bytes >= LEAST_END * n_documents


def least_to_cut(sizes: np.ndarray, n_documents: int, n_bytes: int, share: float) -> float:
    """Return the bytes from which on a document is cut: 0 if all are, inf if none is.

    sizes: bytes of all documents, or of the FEW longest. n_documents, n_bytes: of all. A few books
    are cut whatever short rows stand beside them: hashes would draw rows alone, or a whole book."""
    if not share or not n_documents:
        return math.inf
    if are_few(n_documents, n_bytes, share):
        return 0
    long = sizes[sizes * FEW > n_bytes]  # so there are fewer than FEW
    long_bytes = int(long.sum())
    others, others_bytes = n_documents - len(long), n_bytes - long_bytes
    if long_bytes <= others_bytes or long_bytes * others < LONG * others_bytes * len(long):
        return math.inf
    return int(long.min()) if are_few(len(long), long_bytes, share) else math.inf


def shares_of_ends(
    n_documents: int, n_bytes: int, val_fraction: float, test_fraction: float
) -> tuple[float, float]:
    """Return the shares that val and test get of each of a few documents.

    Of short ones they are larger than the settings, LEAST_END bytes of each on average if that is
    no more than MOST_VAL: their ends would be a full stop. A single one is cut as nanoGPT does."""
    if n_documents == 1:
        return val_fraction, test_fraction
    room = (1 - val_fraction - test_fraction) / 3  # so that train keeps a third of it
    least = min(LEAST_END * n_documents / n_bytes, MOST_VAL, room)
    val, test = (max(share, least) if share else 0.0 for share in (val_fraction, test_fraction))
    return val, test


def cut_places(length: int, val_fraction: float, test_fraction: float) -> tuple[int, int]:
    """Return where val and test begin in a text of `length` characters, behind train."""
    # with val_fraction=0.1 as nanoGPT cuts: text[: int(n * 0.9)], text[int(n * 0.9) :]
    return int(length * (1 - test_fraction - val_fraction)), int(length * (1 - test_fraction))


def split_of(
    positions: np.ndarray, val_fraction: float, test_fraction: float = 0.0, fold: str = ""
) -> np.ndarray:
    """Return the index in SPLITS (n,) uint8 of each document, from its position (n,) uint64 alone.

    The lowest positions are test, the next val, or val is the fold 'i/k'; the rest is train."""
    test_end = int(test_fraction * 2**64)
    ends = test_end, test_end, int((test_fraction + val_fraction) * 2**64)
    if fold:
        i, k = map(int, fold.split("/"))
        ends = 0, 2**64 * (i - 1) // k, 2**64 * i // k
    # <= the last position before an end: the end itself may be 2**64, which no uint64 holds
    in_test, before_val, before_train = (
        (positions <= np.uint64(max(end, 1) - 1)) & (end > 0) for end in ends
    )
    return np.where(in_test, 2, before_train & ~before_val).astype(np.uint8)


def split_together(
    positions: np.ndarray, val_fraction: float, test_fraction: float = 0.0, fold: str = ""
) -> np.ndarray:
    """Return the index in SPLITS (n,) uint8 of each document, from the positions (n,) of all.

    It is `split_of`, but for what was split before: data/x/train.jsonl lacks the lowest hashes,
    those of its val, and would get no val again. Then the order of the positions decides."""
    splits = split_of(positions, val_fraction, test_fraction, fold)
    shares = [(splits == 1, val_fraction), (splits == 2, test_fraction)]
    if fold:  # all folds are asked, so that they stay apart
        k = int(fold.split("/")[1])
        folds = (split_of(positions, 0, fold=f"{i}/{k}") for i in range(1, k + 1))
        shares = [(of_fold == 1, 1 / k) for of_fold in folds]
    largest = max((share for in_split, share in shares if not in_split.any()), default=0)
    if largest * len(positions) < TAKEN_BEFORE:
        return splits

    # Equal positions, of copies or of a prompt, count once and stay together.
    distinct, ranks = np.unique(positions, return_inverse=True)
    if largest * len(distinct) < TAKEN_BEFORE:
        return splits
    even = (ranks + 0.5) / len(distinct) * 2.0**64
    return split_of(even.astype(np.uint64), val_fraction, test_fraction, fold)


def assign(
    positions: np.ndarray,
    val_fraction: float,
    test_fraction: float = 0.0,
    fold: str = "",
    by_prompt: bool = False,
) -> tuple[np.ndarray, bool]:
    """Return `split_together` of the documents, and whether val was empty and got one.

    A single document, or with by_prompt a single prompt, is for training."""
    if len(positions) == 1 or (by_prompt and len(np.unique(positions)) == 1):
        return np.zeros(len(positions), np.uint8), False
    splits = split_together(positions, val_fraction, test_fraction, fold)
    moved = bool(val_fraction or fold) and len(positions) > 0 and not (splits == 1).any()
    if moved:
        others = positions[splits == 0] if (splits == 0).any() else positions
        splits[positions == others.min()] = 1  # with its copies: no text is in two splits
    return splits, moved
