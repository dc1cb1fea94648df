"""What prepare.py is asked to do: its settings."""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from groundup.errors import UserError, refuse
from groundup.files.paths import find_files
from groundup.files.sources import Source, check_reading, parse_sources
from groundup.files.text_keys import parse_names, parse_text_key
from groundup.text import dedup
from groundup.text.quality import Bounds, named_values, parse_bounds, parse_rules
from groundup.tokens.training import SMALLEST

VERSION = 19  # of what the settings give; a directory of another version differs
CUT = "cut:"  # decontaminate='cut: files'
LEAST = {"vocab_size": SMALLEST, "near": -1}  # of other numbers 0
# Settings of some kinds only, with the value that means "not used".
KINDS_OF = {
    "quality": (("text",), "curated"),
    "pack": (("text",), 0),
    "hold_out": (("chat",), 0),
    "prompts_from": (("preference",), ""),
    "pair_by": (("preference",), ""),
    "vocab_size": (("text",), 32_768),
    "pattern": (("text",), "qwen"),
}


@dataclass(frozen=True)
class Recipe:
    """The settings that decide what the output holds."""

    kind: str
    sources: tuple[Source, ...]
    score: str
    near: float
    near_bands: int
    near_rows: int
    decontaminate: str
    val_fraction: float
    test_fraction: float
    hold_out: float
    prompts_from: str
    fold: str
    strict: bool
    template: str  # kind=chat: fingerprint of a foreign tokenizer, whose template may refuse a row
    files_digest: str  # sha256 of the files that rules, decontaminate and prompts_from name

    def settings(self) -> dict:
        """Return the settings as plain values, without the paths of the inputs: only their content
        matters."""
        plain = asdict(self)
        for source in plain["sources"]:
            del source["input"]
        return plain

    def for_unit(self, source: int) -> dict:
        """Return the settings that decide what `inspect_unit` makes of a unit of this source."""
        after_inspection = (
            "sources", "near", "near_bands", "near_rows", "val_fraction", "test_fraction", "fold",
            "hold_out",
        )  # fmt: skip
        general = {k: v for k, v in self.settings().items() if k not in after_inspection}
        own = asdict(self.sources[source])
        return general | {k: v for k, v in own.items() if k not in ("name", "input", "weight")}

    @property
    def cuts(self) -> bool:
        """Whether evaluation text is cut out of a document instead of dropping it."""
        return self.decontaminate.startswith(CUT)

    @property
    def evaluation_files(self) -> str:
        return self.decontaminate.removeprefix(CUT)


# ---- numbers of a row ----------------------------------------------------------------------------


class Score(NamedTuple):
    """Documents stay if the number under this key of their row is within the bounds."""

    key: str
    bounds: Bounds
    in_percent: bool  # the bounds are per cent of the documents; select.py applies them


def parse_score(setting: str) -> list[Score]:
    """Return the ranges of 'bpb=0.3..1.5,ifd=5%..95%'; a bound may be empty. Raise UserError."""
    scores = []
    for part, key, value in named_values(setting):
        # per cent of what passed the other rules, so all documents must be known first
        bounds, in_percent = parse_bounds(value), "%" in part
        ends = [end for end in bounds or () if in_percent and math.isfinite(end)]
        if not key or not bounds or any(not 0 <= end <= 100 for end in ends):
            hint = "give bpb=0.3..1.5 or ifd=5%..95%, the least first, per cent from 0 to 100"
            raise UserError(f"prepare: score={part!r} is not key=least..most; {hint}")
        scores.append(Score(key, bounds, in_percent))
    later = any(score.in_percent for score in scores[1:])
    refuse(later, "score: only the first key may have bounds in per cent")
    return scores


def outside_range(values: tuple[float, ...], scores: list[Score]) -> str:
    """Return why a document is dropped by its numbers, "" if it is not."""
    for value, (key, (least, most), in_percent) in zip(values, scores, strict=True):
        # a row without the number was not scored, which is no reason to keep it
        if math.isnan(value):
            return f"no {key}"
        # between a number and an infinite one lies no percentile: nan, and nothing would be dropped
        if in_percent and math.isinf(value):
            return f"{key} is {value}"
        if not in_percent and not least <= value <= most:
            return f"{key} {value:.4g} is outside {least:g}..{most:g}"
    return ""


def non_negative(text: str) -> float | None:
    """Return the finite number, 0 or more, that a text holds; None if it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None


# ---- answers -------------------------------------------------------------------------------------


class PairBy(NamedTuple):
    """The setting pair_by."""

    how: str  # dataset | reward
    margin: float = 0.0  # reward: least difference of the two rewards; 0 = any
    length_within: float = 0.0  # the longer answer may have 0.2 = 20 % more characters; 0 = any


def parse_pair_by(setting: str) -> PairBy:
    """Return the setting 'dataset' or 'reward', with options behind commas. Raise UserError."""
    how, _, options = setting.partition(",")
    values = {name: non_negative(value) for _, name, value in named_values(options)}
    known = {"dataset": {"length_within"}, "reward": {"margin", "length_within"}}
    how = how.strip()
    wrong = how not in known or not values.keys() <= known[how] or None in values.values()
    # each way has options of its own, and a wrong one is refused, not ignored
    hint = "give dataset or reward, or 'reward, margin=0.5, length_within=0.2'"
    refuse(wrong, f"pair_by={setting!r} is not understood; {hint}")
    return PairBy(how, **values)


# ---- the whole configuration ---------------------------------------------------------------------


def check_config(config: dict) -> Recipe:
    """Return the recipe of a configuration. Raise UserError if a setting is invalid or has no
    effect."""
    kind, near, cut = config["kind"], config["near"], config["decontaminate"].startswith(CUT)
    for key in ("input", "out_dir"):
        missing = not config[key] and not (key == "out_dir" and config["show"])
        refuse(missing, f"{key} is empty; give --{key}=... (--help lists the keys)")
    sources = parse_sources(config)
    check_numbers(config)
    # a setting that does nothing is refused: the user thinks that it does something
    for key, (kinds, unused) in KINDS_OF.items():
        for settings in (config, *map(vars, sources)):
            wrong = kind not in kinds and settings.get(key, unused) != unused
            refuse(wrong, f"{key}={settings.get(key)} has no effect with kind={kind}; leave it out")
    for source in sources:
        check_source(source, kind)
    what = f"decontaminate='{CUT} ...' has no effect with kind={kind}"
    refuse(cut and kind != "text", f"{what}; without {CUT!r} it drops what matches")
    files = config["decontaminate"].removeprefix(CUT).strip()
    refuse(cut and not files, f"decontaminate={config['decontaminate']!r} names no files")
    if config["pair_by"]:
        parse_pair_by(config["pair_by"])
    parse_score(config["score"])
    # in the record, because another choice of bands finds other near copies
    bands, rows = dedup.bands_for(near) if near > 0 else (0, 0)
    derived = {
        "sources": sources, "near_bands": bands, "near_rows": rows, "template": "",
        "files_digest": files_digest(config, sources),
    }  # fmt: skip
    own = {item.name: config[item.name] for item in fields(Recipe) if item.name in config}
    return Recipe(**own | derived)


def say_unused(config: dict, n_ids: int) -> None:
    """Print which settings of a tokenizer to train do nothing beside one that has n_ids ids."""
    for key in ("vocab_size", "pattern"):
        value = config[key]
        fits = key == "vocab_size" and value <= n_ids < value + 128  # it is rounded up
        if value != KINDS_OF[key][1] and not fits:
            has = f"tokenizer_dir={config['tokenizer_dir']} has a tokenizer of {n_ids}"
            print(f"prepare: {key}={value} has no effect: {has}")


def check_numbers(config: dict) -> None:
    """Raise UserError if a number is out of its range."""
    for key, value in config.items():
        least = LEAST.get(key, 0)
        wrong = isinstance(value, int | float) and value < least
        refuse(wrong, f"{key} must be at least {least}, got {value}")
    val, test, hold_out = (config[k] for k in ("val_fraction", "test_fraction", "hold_out"))
    sizes = f"val_fraction={val} and test_fraction={test}"
    refuse(val + test >= 1, f"{sizes} must leave something for train (0.1 is a tenth)")
    refuse(hold_out >= 1, f"hold_out must be from 0 to below 1, got {hold_out}")
    near, fold = config["near"], re.fullmatch(r"(\d+)/(\d+)", config["fold"])
    refuse(near > 1 or -1 < near < 0, f"near must be from 0 (off) to 1, or -1, got {near}")
    possible = fold and 1 <= int(fold[1]) <= int(fold[2]) and int(fold[2]) > 1
    what = f"fold={config['fold']!r} is not i/k with 1 <= i <= k, such as 2/5"
    refuse(config["fold"] and not possible, what)


def check_source(source: Source, kind: str) -> None:
    """Raise UserError if a setting of a source is invalid."""
    check_reading(source)
    unused = kind == "text" and parse_rules(source.rules).question_length
    refuse(unused, "rules: question_length has no effect with kind=text; leave it out")
    unused = kind != "text" and source.weight
    refuse(unused, f"input: weight has no effect with kind={kind}; weigh when you train")
    # texts name the keys to join, chats and pairs other names of known keys
    if source.text_key:
        (parse_text_key if kind == "text" else parse_names)(source.text_key)


def files_digest(config: dict, sources: Sequence[Source]) -> str:
    """Return one sha256 of the files that settings name: their content decides the result. Raise
    UserError."""
    files = [parse_rules(source.rules).keep.rpartition(":")[0] for source in sources]
    for key in ("decontaminate", "prompts_from"):
        files += find_files(config[key].removeprefix(CUT), key)
    try:
        content = b"".join(Path(file).read_bytes() for file in files if file)
    except OSError as error:
        raise UserError(f"config: cannot read {error.filename}: {error.strerror}") from None
    return hashlib.sha256(content).hexdigest()
