"""The settings that, with the tokenizer, decide what prepare.py makes of an input; prepare.py explains each of them."""

import re
from dataclasses import asdict, dataclass
from typing import NamedTuple

from groundup.errors import UserError

BOUND = r"(?:(-?\d*\.?\d+(?:e-?\d+)?)%?)?"


@dataclass(frozen=True)
class Source:
    """A named part of the input with settings of its own."""

    name: str = ""  # "" if the input is one source
    input: str = ""
    weight: float = 0.0  # in a mixture; 0 = not given
    text_key: str = ""
    txt_split: str = "file"
    quality: str = "curated"
    rules_off: str = ""
    rules_on: str = ""
    min_chars: int = 0
    max_chars: int = 0


@dataclass(frozen=True)
class Recipe:
    kind: str
    sources: tuple[Source, ...]
    punctuation: bool
    keep: str
    question_min_chars: int
    question_max_chars: int
    score: str
    exact: bool
    near: float
    near_bands: int
    near_rows: int
    decontaminate: str
    decontaminate_action: str
    val_fraction: float
    test_fraction: float
    hold_out: float
    prompts_from: str
    fold: str
    order: str
    strict: bool
    shard_tokens: int
    aids: str  # sha256 of the files that keep, decontaminate and prompts_from name

    def settings(self) -> dict:
        """Return the settings as plain values, without the paths of the inputs: only their content matters."""
        plain = asdict(self)
        plain["sources"] = [{key: v for key, v in source.items() if key != "input"} for source in plain["sources"]]
        return plain

    def for_unit(self, source: int) -> dict:
        """Return the settings that decide what `inspect_unit` makes of a unit of this source."""
        later = ("sources", "exact", "near", "val_fraction", "test_fraction", "fold", "order", "shard_tokens")
        plain = {key: value for key, value in self.settings().items() if key not in later}
        own = {key: v for key, v in asdict(self.sources[source]).items() if key not in ("name", "input", "weight")}
        return plain | own | {"signed": self.near > 0}


class Range(NamedTuple):
    """Documents stay if this number of their row is in the range."""

    key: str
    least: float
    most: float
    shares: bool  # the bounds are per cent of the documents; selection.py applies them


def parse_score(spec: str) -> list[Range]:
    """Return the ranges of 'bpb=0.3..1.5,ifd=5%..95%'; a bound may be empty. Raise UserError."""
    ranges = []
    for part in filter(None, (part.strip() for part in spec.split(","))):
        found, shares = re.fullmatch(rf"([^=]+?)\s*=\s*{BOUND}\.\.{BOUND}", part), "%" in part
        ends = ("0", "100") if shares else ("-inf", "inf")
        least, most = (float(found[k + 2] or end) for k, end in enumerate(ends)) if found else (1.0, 0.0)
        if least > most or (shares and not 0 <= least <= most <= 100):
            hint = "give bpb=0.3..1.5 or ifd=5%..95%, the least first, per cent from 0 to 100"
            raise UserError(f"prepare: score={part!r} is not key=least..most; {hint}")
        ranges.append(Range(found[1], least, most, shares))
    if any(one.shares for one in ranges[1:]):
        raise UserError("config: score: only the first key may have bounds in per cent")
    return ranges


def outside_range(scores: tuple[float, ...], ranges: list[Range]) -> str:
    """Return why a document is dropped by its scores, "" if it is not."""
    for value, (key, least, most, shares) in zip(scores, ranges, strict=True):
        if value != value:
            return f"no {key}"
        if not shares and not least <= value <= most:
            return f"{key} {value:.4g} is outside {least:g}..{most:g}"
    return ""
