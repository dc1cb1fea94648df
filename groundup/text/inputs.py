"""Find the files that prepare.py reads: sources and their settings, paths and globs, standard input."""

import math
import os
import re
import shutil
import sys
from pathlib import Path
from stat import S_ISREG

from groundup.demo.debug_data import write_rows
from groundup.demo.python_talks import docs_rows
from groundup.errors import UserError
from groundup.files import readers, streams
from groundup.text.recipe import Input, Source
from groundup.tokens.token_files import file_sha256

NAMED = re.compile(r"\s*([\w-]+)\s*:\s+(.*)", re.DOTALL)
OWN = {
    "weight": float, "text_key": str, "txt_split": str, "quality": str, "rules_off": str, "rules_on": str,
    "min_chars": int, "max_chars": int,
}  # fmt: skip


def parse_sources(config: dict) -> tuple[Source, ...]:
    """Return the sources named in `input` with their settings, or one without a name. Raise UserError."""
    general = {key: config[key] for key in OWN if key != "weight"}
    parts = [part for part in config["input"].split(";") if part.strip()]
    matches = [NAMED.fullmatch(part) for part in parts]
    if not any(matches):
        return (Source(input=config["input"], **general),)
    if not all(matches):
        part = parts[matches.index(None)].strip()
        raise UserError(f"config: input: {part!r} is not of the form 'name: files, key=value, ...'")
    sources = tuple(make_source(*match.groups(), general) for match in matches)
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise UserError(f"config: input: two sources have the same name: {', '.join(names)}")
    if len({source.weight > 0 for source in sources}) > 1:
        raise UserError("config: input: give a weight to every source, or to none")
    if sum("-" in source.input.split(",") for source in sources) > 1:
        raise UserError("config: input: standard input (-) can be read once only")
    return sources


def make_source(name: str, text: str, general: dict) -> Source:
    """Return a source of 'files, key=value, ...'; its own settings win over the general ones. Raise UserError."""
    files, settings = [], dict(general)
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, _, value = (word.strip() for word in item.partition("="))
        if key not in OWN:
            files.append(item)
            continue
        try:
            settings[key] = OWN[key](value.replace("+", ",") if OWN[key] is str else value)  # , ends a setting
            if OWN[key] is not str and not 0 <= settings[key] < math.inf:
                raise ValueError
        except ValueError:
            raise UserError(f"config: input: {key}={value} of source {name} is not a number, 0 or more") from None
    if not files:
        raise UserError(f"config: input: source {name} names no files")
    return Source(name, ",".join(files), **settings)


def find_inputs(sources: tuple[Source, ...], out_dir: Path, work: Path, kind: str = "text") -> list[Input]:
    """Return the files of all sources, each once, without those in `out_dir`. Standard input and python-docs become
    files in `work`. Raise UserError if nothing matches."""
    found: dict[str, Input] = {}
    for number, source in enumerate(sources):
        for name in filter(None, (part.strip() for part in source.input.split(","))):
            if name in ("python-docs", "-"):
                made = spool_stdin(work) if name == "-" else write_rows(docs_rows(kind), work / "python-docs.jsonl")
                files = [look(made, name, number)._replace(stamp=file_sha256(made))]  # each run writes it again
            else:
                files = [look(path, path, number) for path in readers.find_files(name)]
            for file in files:
                if out_dir.name and out_dir.resolve() in Path(file.path).resolve().parents:
                    continue
                if found.setdefault(file.path, file).source != number:
                    print(f"prepare: {file.name} is in an earlier source already, and is left out of {source.name}")
    return list(found.values())


def look(path: str | Path, name: str, source: int) -> Input:
    try:
        stat = os.stat(path)
        if not S_ISREG(stat.st_mode):
            return Input(str(path), name, 0, "", source, problem="not a regular file")
        open(path, "rb").close()
    except OSError as error:
        return Input(str(path), name, 0, "", source, problem=error.strerror)
    return Input(str(path), name, stat.st_size, str(stat.st_mtime_ns), source)


def spool_stdin(work: Path) -> Path:
    """Write standard input to a file, which can be read twice and in parts. Return its path, .json or .txt."""
    path = work / "stdin.txt"
    with open(path, "wb") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 2**20)
    with streams.open_stream(str(path)) as stream:
        kind = readers.container("-", stream.peek(), "file")
    return path.rename(work / "stdin.json") if kind in ("array", "values", "jsonl") else path
