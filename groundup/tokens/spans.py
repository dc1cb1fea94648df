"""Where each token begins and ends in its text: what decides which tokens of an answer are learned.

A conversation is encoded piece by piece, and a template may put words that are learned and words
that are not into one piece. So tokenizer.py needs the places of tokens, which pretraining does not.
They count bytes or characters, as the engine does (`position`).
"""

import itertools
import unicodedata
from collections.abc import Sequence
from typing import Any

from groundup.files.untrusted import scrub
from groundup.tokens.engines import INSIDE, ByteLevelBPE, Engine, LibraryTokenizer

Spans = tuple[list[int], list[int], list[int]]  # ids, where each begins and ends in the text


def encode_parts(engine: Engine, text: str, cuts: Sequence[int], place: str) -> Spans:
    """Return the Spans of a text that is encoded in parts, so that no token crosses a cut.

    place: where the text stands (engines.START and so on)."""
    ids, begins, ends, start = [], [], [], 0
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
        part = text[begin:end]
        new, part_begins, part_ends = encode_spans(engine, part, INSIDE if begin else place)
        ids += new
        begins += [start + one for one in part_begins]
        ends += [start + one for one in part_ends]
        start += position(engine, part, len(part))  # where the next part begins
    return ids, begins, ends


def encode_spans(engine: Engine, text: str, place: str) -> Spans:
    """Return the ids of a text, and where each begins and ends."""
    if isinstance(engine, ByteLevelBPE):
        # The tokens are the bytes of the text, one behind the other, so their sizes are enough.
        ids = engine.encode(text)
        borders = [0, *itertools.accumulate([len(engine.token_bytes[i]) for i in ids])]
        return ids, borders[:-1], borders[1:]

    ids, begins, ends = [], [], []
    text = scrub(text)
    if isinstance(engine, LibraryTokenizer):
        for start, found in engine.parts(text, place):  # in characters
            ids += found.ids
            begins += [start + begin for begin, _ in found.offsets]
            ends += [start + end for _, end in found.offsets]
        return ids, begins, ends

    start = 0
    for part, processor, own_ids in engine.parts(text, place):  # in bytes
        size = len(part.encode())
        found = [(i, 0, size) for i in own_ids] or sentencepiece_spans(processor, part)
        ids += [i for i, _, _ in found]
        begins += [start + begin for _, begin, _ in found]
        ends += [start + end for _, _, end in found]
        start += size
    return ids, begins, ends


def sentencepiece_spans(processor: Any, text: str) -> list[tuple[int, int, int]]:
    """Return (id, first byte, end) of each token of a text."""
    pieces = processor.encode(text, out_type="proto").pieces  # with their places in the text
    found = [[piece.id, piece.begin, piece.end] for piece in pieces]
    # of a character in several tokens only the last one has its place
    for one, following in reversed(list(itertools.pairwise(found))):
        if one[1] == one[2]:
            one[2] = following[2]
    return found


def position(engine: Engine, text: str, end: int) -> int:
    """Return where text[:end] ends, as encode_spans counts."""
    if isinstance(engine, LibraryTokenizer):
        return end  # the library counts characters
    seen = scrub(text[:end])  # as it was encoded
    if isinstance(engine, ByteLevelBPE):
        seen = unicodedata.normalize("NFC", seen) if engine.nfc else seen
        return len(seen.encode().translate(None, engine.missing))  # these have no token
    return len(seen.encode())
