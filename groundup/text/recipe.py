"""The settings that, with the tokenizer, decide what prepare.py makes of an input."""

from dataclasses import asdict, dataclass

from groundup.errors import UserError


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
    """The settings that decide the output; prepare.py explains each of them."""

    kind: str = "text"
    sources: tuple[Source, ...] = (Source(),)
    punctuation: bool = False
    keep: str = ""
    question_min_chars: int = 0
    question_max_chars: int = 0
    score: str = ""
    exact: bool = True
    near: float = 0.0
    near_bands: int = 0
    near_rows: int = 0
    decontaminate: str = ""
    decontaminate_action: str = "drop"
    val_fraction: float = 0.0
    test_fraction: float = 0.0
    hold_out: float = 0.0
    prompts_from: str = ""
    fold: str = ""
    order: str = "input"
    strict: bool = False
    shard_tokens: int = 2**27
    aids: str = ""  # sha256 of the files that keep, decontaminate and prompts_from name

    def settings(self) -> dict:
        """Return the settings as plain values, without the paths of the inputs: only their content matters."""
        plain = asdict(self)
        plain["sources"] = [{key: v for key, v in source.items() if key != "input"} for source in plain["sources"]]
        return plain

    def for_unit(self, source: int) -> dict:
        """Return the settings that decide what `inspect_unit` makes of a unit of this source."""
        later = {"sources", "exact", "near", "val_fraction", "test_fraction", "fold", "order"}
        plain = {key: value for key, value in self.settings().items() if key not in later | {"shard_tokens"}}
        own = {key: v for key, v in asdict(self.sources[source]).items() if key not in ("name", "input", "weight")}
        return plain | own | {"signed": self.near > 0}


def parse_score(spec: str) -> list[tuple[str, str, str]]:
    """Return [(key, least, most)] of 'bpb=0.3..1.5,ifd=5%..95%'; a bound may be empty. Raise UserError."""
    ranges = []
    for part in filter(None, (part.strip() for part in spec.split(","))):
        key, equals, bounds = part.partition("=")
        least, dots, most = bounds.partition("..")
        try:
            bounds = [float(bound.removesuffix("%")) for bound in (least, most) if bound]
            shares = [float(bound[:-1]) for bound in (least, most) if bound.endswith("%")]
        except ValueError:
            dots = ""
        if not (key and equals and dots):
            raise UserError(f"prepare: score={part!r} is not key=least..most, such as bpb=0.3..1.5 or ifd=5%..95%")
        if any(not 0 <= share <= 100 for share in shares) or (len(bounds) == 2 and not bounds[0] <= bounds[1]):
            raise UserError(f"prepare: score={part!r}: per cent are from 0 to 100, and the least comes first")
        ranges.append((key.strip(), least, most))
    return ranges


def outside_range(scores: tuple[float, ...], ranges: list[tuple[str, str, str]]) -> str:
    """Return why a document is dropped by its scores, "" if it is not. selection.py applies bounds in per cent."""
    for value, (key, least, most) in zip(scores, ranges, strict=True):
        if value != value:
            return f"no {key}"
        low, high = (float(b) if b and not b.endswith("%") else None for b in (least, most))
        if (low is not None and value < low) or (high is not None and value > high):
            return f"{key} {value:.4g} is outside {least}..{most}"
    return ""
