"""The sources that `input` names, with settings of their own, for prepare.py and tokenizer.py.

--input='corpus/*.jsonl,more/'
--input='wiki: wiki/, weight=2; c: c.jsonl, text_key=a.b, weight=1'
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from configurator import parse_number, split_names
from groundup.demo.bilingual import demo_rows
from groundup.demo.debug_data import write_rows
from groundup.demo.python_talks import docs_rows
from groundup.errors import refuse
from groundup.files import records, streams
from groundup.files.encodings import check_codec

NAMED = re.compile(r"\s*([\w-]+)\s*:\s+(.*)", re.DOTALL)
BUILT_IN = {  # names in `input` that need no files
    "python-docs": docs_rows,
    "demo-en": partial(demo_rows, "en"),
    "demo-zh": partial(demo_rows, "zh"),
}


LOOKS_LIKE = {  # what begins so, and what to do if its markup is not meant
    rb'\s*\{\s*"[^"\n]*"\s*:': (
        "JSON lines",
        "if its rows are meant, let its name end in .jsonl",
    ),
    rb"\s*<(!doctype|html|\?xml|mediawiki)": (
        "HTML or XML",
        "if its text is meant, take that out first, as with pandoc or trafilatura",
    ),
}


@dataclass(frozen=True)
class Source:
    """A named part of the input with settings of its own."""

    name: str = ""  # "" if the input is one source
    input: str = ""
    weight: float = 0.0  # in a mixture; 0 = not given
    text_key: str = ""
    txt_split: str = "file"
    encoding: str = ""  # of lines that are not UTF-8; "" = found
    quality: str = "curated"
    rules: str = ""


CHOICES = {"txt_split": ("file", "blank", "line"), "quality": ("curated", "web")}
# Settings that each source may have of its own.
SOURCE_KEYS = [item.name for item in fields(Source) if item.name not in ("name", "input")]


def parse_sources(config: dict) -> tuple[Source, ...]:
    """Return the sources named in `input` with their settings, or one without a name. Raise
    UserError."""
    general = {key: config[key] for key in SOURCE_KEYS if key in config}
    parts = [part for part in config["input"].split(";") if part.strip()]
    matches = [NAMED.fullmatch(part) for part in parts]
    if not any(matches):
        return (Source(input=config["input"], **general),)
    for part, match in zip(parts, matches, strict=True):
        form = "'name: files, key=value, ...'"
        refuse(not match, f"input: {part.strip()!r} is not of the form {form}")
    sources = tuple(make_source(*match.groups(), general) for match in matches)
    names = [source.name for source in sources]
    same = len(set(names)) < len(names)
    refuse(same, f"input: two sources have the same name: {', '.join(names)}")
    weighed = {source.weight > 0 for source in sources}
    refuse(len(weighed) > 1, "input: give a weight to every source, or to none")
    n_stdin = sum("-" in source.input.split(",") for source in sources)
    refuse(n_stdin > 1, "input: standard input (-) can be read once only")
    return sources


def make_source(name: str, text: str, general: dict) -> Source:
    """Return a source of 'files, key=value, ...'; its own settings win over the general ones. A
    comma ends a setting, so + stands for the commas within one. Raise UserError."""
    files, settings = [], dict(general)
    for item in filter(None, split_names(text)):
        key, _, value = map(str.strip, item.partition("="))
        if key == "weight":
            settings[key] = parse_number(value)
            what = f"{key}={value} of source {name} is not a number above 0"
            refuse(settings[key] is None, f"input: {what}")
        elif key in SOURCE_KEYS:
            settings[key] = value.replace("+", ",")
        elif re.fullmatch(r"[a-z_]+", key) and value and not is_path(item):
            known = ", ".join(SOURCE_KEYS)
            refuse(True, f"input: source {name} has a setting {key!r}; a source has {known}")
        else:
            files.append(item)
    refuse(not files, f"input: source {name} names no files")
    return Source(name, ",".join(files), **settings)


def check_reading(source: Source) -> None:
    """Raise UserError if a setting that has a few values only, or the encoding, is invalid."""
    for key, allowed in CHOICES.items():
        value = getattr(source, key)
        refuse(value not in allowed, f"{key} must be one of {', '.join(allowed)}, got {value!r}")
    check_codec(source.encoding)


def is_path(text: str) -> bool:
    return bool(re.search(r"[/*?\[]", text)) or Path(text).exists()


def look_of(path: str, first: bytes) -> tuple[str, str] | tuple[()]:
    """Return of LOOKS_LIKE what a file is, if it is plain text by its name. first: its bytes."""
    head = streams.unpacked_head(first, path)
    if records.container(path, head, "file") != "file":
        return ()
    return next((odd for how, odd in LOOKS_LIKE.items() if re.match(how, head, re.I)), ())


def say_looks(script: str, looks: Iterable[tuple[str, tuple]]) -> None:
    """Print the first file that looks like each kind. looks: (name, its `look_of`)."""
    first_of_kind: dict[tuple, str] = {}
    for name, look in looks:
        if look:
            first_of_kind.setdefault(look, name)
    for (what, hint), name in first_of_kind.items():
        print(f"{script}: {name} looks like {what} but is read as plain text; {hint}")


def write_built_in(name: str, kind: str, folder: Path) -> Path:
    """Write the rows of a built-in source as a file in `folder`; return its path."""
    path = folder / f"{name}.jsonl"
    write_rows(BUILT_IN[name](kind), path)
    return path
