"""Make a prepared directory in a locked, hidden directory beside it, rename it when it is complete,
check it later."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configurator import script_of
from groundup.errors import UserError, naming
from groundup.files.directories import lock_directory
from groundup.files.disk import make_room_beside
from groundup.files.sources import Source
from groundup.text import inputs
from groundup.text.inputs import UNIT_BYTES
from groundup.text.recipe import VERSION
from groundup.text.unit import read_json
from groundup.text.workers import WorkerLost, wait_for_workers
from groundup.tokens.text_tokenizer import FILES
from groundup.tokens.token_files import (
    FORMAT,
    ROWS_FORMAT,
    PackedData,
    TokenData,
    read_manifest,
    token_dtype,
)
from groundup.tokens.token_writer import map_tokens, verify, verify_sha256
from tokenizer import Tokenizer

# What a damaged directory may raise; UserError is a ValueError.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
# Shards may be in the directory of a named source, but nothing else: a directory there with a
# manifest of its own is another corpus.
OUR_FILES = re.compile(
    r"([^/]+/)?((train|val|test)(_pack\d+)?_\d{5}(\.\w+)?|train_pack\d+\.len)\.npy"
    r"|train_pack\d+\.json|(train|val|test|held_out)\.jsonl|manifest\.json|config\.py|report\.md"
    r"|(errors|dropped|inputs)\.tsv|" + "|".join(FILES)
)
# What a desktop puts into every folder that it shows, and makes anew.
OF_A_DESKTOP = re.compile(r"\.DS_Store$|\._|Thumbs\.db$|desktop\.ini$")


@contextmanager
def work_dir(out_dir: Path) -> Iterator[Path]:
    """Lock and yield the hidden directory beside `out_dir`. It is removed at the end, and after an
    error of the user if little was done. It stays after a kill or the loss of a worker, so that the
    next run can continue."""
    work = work_path(out_dir)
    # held until this process ends, however it ends
    handle = lock(work, out_dir)
    try:
        if (work / "old").exists() and not out_dir.exists():
            (work / "old").rename(out_dir)  # killed between the two renames of `publish`
        try:
            # an OSError without a file name, such as a full disk, gets the name of this directory
            with naming(work):
                yield work
        except UserError as error:
            # finished units of a large input are worth keeping for the next try
            done = sum(path.stat().st_size for path in (work / "units").glob("*.docs"))
            if not isinstance(error, WorkerLost) and done < UNIT_BYTES:  # little is lost
                remove(work)
            raise
        remove(work)
    finally:
        os.close(handle)


def work_path(out_dir: Path) -> Path:
    return out_dir.absolute().parent / f".{out_dir.absolute().name}.work.tmp"


def remove(work: Path) -> None:
    """Remove `work`. First rename as a whole what a later run would reuse, so that a kill in the
    middle leaves nothing that looks complete and is not."""
    aside = make_room_beside(work / "removed", "tmp")
    aside.mkdir()
    # one rename is whole or not done; removing many files may stop in the middle
    for name in ("units", "old"):
        if (work / name).exists():
            (work / name).rename(aside / name)
    shutil.rmtree(work, ignore_errors=True)


def lock(work: Path, out_dir: Path) -> int:
    """Make `work` if needed, lock it and return the handle. Raise UserError if another process has
    locked it."""
    try:
        handle = lock_directory(work)
    except BlockingIOError:
        hint = "wait for it, or stop it"
        raise UserError(f"prepare: another run is making {out_dir}; {hint}") from None
    # the lock of a killed run is free at once, but its workers may still write
    wait_for_workers(work)
    return handle


def read_prepared(directory: Path, every_byte: bool = False) -> dict:
    """Return the manifest of a prepared directory after a check of its tokenizer and of the sizes
    of its files, or with every_byte of their content. Raise one of DAMAGED."""
    manifest = read_manifest(directory, "")
    if manifest.get("format") == ROWS_FORMAT:
        check_rows(directory, manifest, every_byte)
    else:
        manifest = verify(directory) if every_byte else manifest
        # opening compares the sizes and types of all files with the manifest
        for split in manifest["splits"]:
            TokenData(directory, split)
        # rows of --pack were made of these tokens
        pack = manifest["info"].get("recipe", {}).get("pack")
        if pack and "train" in manifest["splits"]:
            for name in manifest.get("sources", {"": {}}):
                PackedData(directory, pack, name)
    if every_byte and "inputs" in manifest["info"]:
        verify_sha256(directory / "inputs.tsv", manifest["info"]["inputs"]["sha256"])
    # rows that were prepared without tokenizer_dir have none
    fingerprint = manifest.get("tokenizer_fingerprint")
    if fingerprint:
        tokenizer = Tokenizer.load(directory)
        # texts and our own chat form need the first, foreign chat templates the second
        if fingerprint not in (tokenizer.fingerprint(), tokenizer.chat_fingerprint()):
            what = f"the tokenizer in {directory} did not make its tokens"
            raise UserError(f"prepare: {what}; rerun prepare.py")
    return manifest


def read_earlier(out_dir: Path) -> tuple[dict, list[dict]]:
    """Return the manifest of a complete directory and, if this version made it, the lines of its
    inputs.tsv; ({}, []) if there is none."""
    try:
        manifest = read_prepared(out_dir)
        # another version may mean something else by the same lines
        is_ours = manifest.get("info", {}).get("prepare") == VERSION
        return manifest, inputs.read(out_dir) if is_ours else []
    except DAMAGED:
        return {}, []


def check_rows(directory: Path, manifest: dict, every_byte: bool) -> None:
    for entry in manifest["splits"].values():
        tokens, path = entry.get("tokens", {}), directory / entry["file"]
        # the size shows a copy that broke off, without reading gigabytes
        if path.stat().st_size != entry["bytes"]:
            what = f"{path} does not have {entry['bytes']} bytes"
            raise UserError(f"prepare: {what}; rerun prepare.py")
        if tokens:
            map_tokens(directory, tokens, token_dtype(manifest.get("vocab_size", 0)).name)
        if every_byte:
            sums = {path.name: entry["sha256"]} | tokens.get("sha256", {})
            for name, sha256 in sums.items():
                verify_sha256(directory / name, sha256)


def what_changed(info: dict, old: dict, old_files: list[dict]) -> str:
    """Return what differs between this run and a finished directory, "" if nothing does.

    info, old: of their manifests, but info["inputs"] are the lines of inputs.tsv, as old_files."""
    if not old:
        return "nothing complete is there yet"
    if old.get("prepare") != info["prepare"]:
        return "the version of prepare.py"
    now, was = described(info, info["inputs"]), described(old, old_files)
    changed = [name for name in was | now if was.get(name) != now.get(name)]
    both = was["tokenizer"], now["tokenizer"]
    if "tokenizer" in changed and all(one.startswith("trained") for one in both):
        changed[changed.index("tokenizer")] = f"tokenizer ({' -> '.join(both)})"
    # a dict compares equal in any order, but the output follows that of the inputs
    if not changed and list(was) != list(now):
        return "the order of the inputs"
    return ", ".join(changed[:5])


def described(info: dict, files: list[dict]) -> dict:
    """Return all that decides the output, by names for people."""
    found = {"tokenizer": info["tokenizer"], "answers": info.get("answers")}
    found |= {key: value for key, value in info["recipe"].items() if key != "sources"}
    for source in info["recipe"]["sources"]:
        # only what differs from the defaults, so that a message names no setting nobody gave
        for key, value in source.items():
            if key != "name" and value != getattr(Source, key):
                found[f"{key} of {source['name']}".removesuffix(" of ")] = value
    return found | {f"input {one['path']}": [one["source"], one["sha256"]] for one in files}


def check_replaceable(out_dir: Path, overwrite: bool, differs: str, work: Path) -> None:
    """Raise UserError if `out_dir` must not be replaced.

    It holds something that prepare.py did not write; or it is complete and differs (in `differs`)
    and overwrite is not given, because a run may need it; or `publish` could not rename it."""
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise UserError(f"prepare: out_dir={out_dir} is a file; choose another")
    # what a user has put there must not be lost, whatever the settings say
    files = [path for path in out_dir.rglob("*") if not path.is_dir()]
    paths = sorted(path.relative_to(out_dir) for path in files if not OF_A_DESKTOP.match(path.name))
    others = [path for path in paths if not OUR_FILES.fullmatch(path.as_posix())]
    others += [path for path in out_dir.iterdir() if path.is_dir() and not any(path.iterdir())]
    # the first line of a config.py says which script wrote it
    script = script_of(out_dir / "config.py")
    if script not in ("", "prepare.py"):
        raise UserError(f"prepare: {out_dir} is a run of {script}; use another out_dir")
    complete = read_json(out_dir / "manifest.json").get("format") in (FORMAT, ROWS_FORMAT)
    if not complete and not script:
        others += paths  # raw data may be called train.jsonl, too
    if others:
        what = f"{out_dir} holds {others[0]}, which is not ours"
        raise UserError(f"prepare: {what}; move it, or use another out_dir")
    if differs and not overwrite:
        what = f"{out_dir} holds a complete corpus that differs in {differs}"
        hint = "use another --out_dir, or --overwrite=True to replace it"
        raise UserError(f"prepare: {what}; {hint}")
    if paths and not overwrite and not complete:
        what = f"{out_dir} holds {paths[0]}, but no manifest.json of ours"
        raise UserError(f"prepare: {what}; overwrite=True replaces it")
    try:
        # try the rename now: a mount point would refuse it after hours of work
        set_aside(out_dir, work).rename(out_dir)
    except OSError as error:
        hint = f"if it is a mount point, use --out_dir={out_dir / 'data'}"
        what = f"{out_dir} cannot be replaced ({error.strerror})"
        raise UserError(f"prepare: {what}; {hint}") from None


def publish(work: Path, out_dir: Path) -> None:
    """Rename work/out to `out_dir`, and an old `out_dir` to work/old. After a kill between the two
    renames `out_dir` is missing; `work_dir` puts the old one back."""
    if out_dir.exists():
        set_aside(out_dir, work)
    (work / "out").rename(out_dir)


def set_aside(out_dir: Path, work: Path) -> Path:
    """Rename `out_dir` to work/old, and return that."""
    shutil.rmtree(work / "old", ignore_errors=True)
    return out_dir.rename(work / "old")
