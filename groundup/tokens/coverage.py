"""Whether a tokenizer knows the characters of the data, which is worth a line before training."""

from collections.abc import Iterable

from groundup.tokens.text_tokenizer import TextTokenizer

FEW_OTHERS = 0.1  # share of characters beyond ASCII below which a text counts as ASCII
MOST_UNKNOWN = 0.01  # share of characters
# Bytes per token. Chinese has three bytes a character, each a token where the tokenizer has never
# seen it (1.0). One of 512 ids that was trained on medical questions has 1.96 bytes in a token of
# these, and 1.42 in one of Tang poems, whose characters it hardly knows.
LEAST_BYTES = 1.5


def unfamiliar(texts: Iterable[str], tokenizer: TextTokenizer) -> str:
    """Return a warning with figures if the tokenizer was trained on other characters, else ""."""
    text = "".join(texts)
    # ASCII is in every tokenizer, and would hide what is not.
    others = "".join(char for char in text if not char.isascii())
    if len(others) < max(1, FEW_OTHERS * len(text)):
        return ""
    unknown = {char for char in set(others) if is_unknown(tokenizer.encode(char), tokenizer)}
    share = sum(char in unknown for char in others) / len(text)
    if share > MOST_UNKNOWN:
        what = f"the tokenizer does not know {100 * share:.1f} % of the characters"
        return f"{what}, such as {min(unknown)!r}; they are lost: use one that does"
    n_tokens, n_bytes = len(tokenizer.encode(others)), len(others.encode())
    if n_bytes < LEAST_BYTES * n_tokens:
        rate = f"{n_tokens / len(others):.1f} tokens a character, {n_bytes / n_tokens:.2f} bytes"
        what = f"the tokenizer was not trained on such text: beyond ASCII {rate} a token"
        return f"{what}; expect slow learning and long rows, or use another model"
    return ""


def is_unknown(ids: list[int], tokenizer: TextTokenizer) -> bool:
    """Return whether these ids of a character do not say which one it is."""
    return not ids or any(i in tokenizer.special_ids for i in ids)
