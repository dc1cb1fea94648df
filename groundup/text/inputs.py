"""Find the files that prepare.py reads: sources and their settings, paths and globs, standard input."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG

from groundup.demo.python_talks import docs_rows
from groundup.errors import UserError
from groundup.files import readers, streams
from groundup.text.recipe import Source
from groundup.text.units import Input
from groundup.tokens.token_files import file_sha256

NAMED = re.compile(r"\s*([\w-]+)\s*:\s+(.*)", re.DOTALL)
OWN_KEYS = ("weight", "text_key", "txt_split", "quality", "rules_off", "rules_on", "min_chars", "max_chars")


def parse_sources(config: dict) -> tuple[Source, ...]:
    """Return the sources named in `input` with their settings, or one without a name. Raise UserError."""
    general = {key: config[key] for key in OWN_KEYS if key != "weight"}
    parts = [part for part in config["input"].split(";") if part.strip()]
    if not any(NAMED.fullmatch(part) for part in parts):
        return (Source(input=config["input"], **general),)
    sources = []
    for part in parts:
        named = NAMED.fullmatch(part)
        if not named:
            raise UserError(f"config: input: {part.strip()!r} is not of the form 'name: files, key=value, ...'")
        items = [item.strip() for item in named[2].split(",") if item.strip()]
        own = dict(item.split("=", 1) for item in items if item.partition("=")[0].strip() in OWN_KEYS)
        paths = [item for item in items if item.partition("=")[0].strip() not in OWN_KEYS]
        if "-" in paths and any("-" in source.input.split(",") for source in sources):
            raise UserError("config: input: standard input (-) can be read once only")
        if not paths:
            raise UserError(f"config: input: source {named[1]} names no files")
        sources.append(make_source(named[1], ",".join(paths), general, own))
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise UserError(f"config: input: two sources have the same name: {', '.join(names)}")
    if len({source.weight > 0 for source in sources}) > 1:
        raise UserError("config: input: give a weight to every source, or to none")
    return tuple(sources)


def make_source(name: str, paths: str, general: dict, own: dict[str, str]) -> Source:
    settings: dict = dict(general)
    for key, text in own.items():
        kind = {"weight": float, "min_chars": int, "max_chars": int}.get(key.strip(), str)
        try:
            settings[key.strip()] = kind(text.strip())
        except ValueError:
            raise UserError(f"config: input: {key}={text} of source {name} is not a number") from None
    for key in ("rules_off", "rules_on"):
        settings[key] = settings[key].replace("+", ",")  # a comma would end the setting
    for key in ("weight", "min_chars", "max_chars"):
        if not 0 <= settings.get(key, 0) < math.inf:
            raise UserError(f"config: input: {key}={settings[key]} of source {name} must be 0 or more")
    return Source(name, paths, **settings)


def find_inputs(sources: tuple[Source, ...], out_dir: Path, work: Path, kind: str = "text") -> list[Input]:
    """Return the files of all sources, each once, without those in `out_dir`. Standard input and python-docs become
    files in `work`. Raise UserError if nothing matches."""
    found: dict[str, Input] = {}
    for number, source in enumerate(sources):
        n_before = len(found)
        for name in filter(None, (part.strip() for part in source.input.split(","))):
            if name == "python-docs":
                files = [made_file(write_documents(docs_rows(kind), work / "python-docs.jsonl"), name, number)]
            elif name == "-":
                files = [made_file(spool_stdin(work), name, number)]
            else:
                files = [look(path, path, number) for path in readers.find_files(name) if not is_within(path, out_dir)]
            for file in files:
                if found.setdefault(file.path, file).source != number:
                    print(f"prepare: {file.name} is in an earlier source already, and is left out of {source.name}")
        if len(found) == n_before and source.name:
            print(f"prepare: warning: source {source.name} has no files of its own")
    return list(found.values())


def is_within(path: str, directory: Path) -> bool:
    return bool(directory.name) and directory.resolve() in Path(path).resolve().parents


def look(path: str | Path, name: str, source: int) -> Input:
    try:
        stat = os.stat(path)
        if not S_ISREG(stat.st_mode):
            return Input(str(path), name, 0, "", source, problem="not a regular file")
        open(path, "rb").close()
    except OSError as error:
        return Input(str(path), name, 0, "", source, problem=error.strerror)
    return Input(str(path), name, stat.st_size, str(stat.st_mtime_ns), source)


def made_file(path: Path, name: str, source: int) -> Input:
    """Return `look` of a file that each run writes again, with a stamp made of its content instead of its time."""
    return look(path, name, source)._replace(stamp=file_sha256(path))


def write_documents(texts: Iterable[str | dict], path: Path) -> Path:
    with open(path, "w", encoding="utf-8") as f:
        for text in texts:
            f.write(json.dumps(text, ensure_ascii=False) + "\n")
    return path


def spool_stdin(work: Path) -> Path:
    """Write standard input to a file, which can be read twice and in parts. Return its path, .json or .txt."""
    path = work / "stdin.txt"
    with open(path, "wb") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 2**20)
    with streams.open_stream(str(path)) as stream:
        kind = readers.container("-", stream.peek(), "file")
    return path.rename(work / "stdin.json") if kind in ("array", "values", "jsonl") else path


def check_unchanged(inputs: list[Input]) -> None:
    for file in inputs:
        if look(file.path, file.name, file.source) != file:
            raise UserError(f"prepare: {file.name} changed while it was read; run again")
