"""Make a prepared directory in a locked, hidden directory beside it, rename it when complete, check it later."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from groundup.errors import UserError, naming
from groundup.files.disk import free_name, lock_directory
from groundup.text.pipeline import UNIT_BYTES, WorkerLost, wait_for_workers
from groundup.text.recipe import read_json
from groundup.tokens.text_tokenizer import FILES
from groundup.tokens.token_files import (
    FORMAT,
    ROWS_FORMAT,
    PackedData,
    TokenData,
    map_tokens,
    read_manifest,
    token_dtype,
)  # fmt: skip
from groundup.tokens.token_writer import verify, verify_sha256
from tokenizer import Tokenizer

DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # UserError is a ValueError
OWN = re.compile(
    r"(train|val|test)(_pack\d+)?_\d{5}(\.\w+)?\.npy|train_pack\d+(\.len\.npy|\.json)|(train|val|test|held_out)\.jsonl"
    r"|manifest\.json|config\.py|errors\.tsv|dropped\.tsv|report\.md|" + "|".join(FILES)
)


@contextmanager
def work_dir(out_dir: Path) -> Iterator[Path]:
    """Lock and yield the hidden directory beside `out_dir`. It is removed at the end, and after an error of the user if
    little was done. It stays after a kill or the loss of a worker, so that the next run can continue."""
    work = work_path(out_dir)
    handle = lock(work, out_dir)
    try:
        if (work / "old").exists() and not out_dir.exists():
            (work / "old").rename(out_dir)  # killed between the two renames of `publish`
        try:
            with naming(work):
                yield work
        except UserError as error:
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
    """Remove `work`. What a later run would reuse is first renamed as a whole: a kill in the middle of the removal then
    leaves nothing that looks complete and is not."""
    aside = free_name(work / "removed", "tmp")
    aside.mkdir()
    for name in ("units", "old"):
        if (work / name).exists():
            (work / name).rename(aside / name)
    shutil.rmtree(work, ignore_errors=True)


def lock(work: Path, out_dir: Path) -> int:
    """Make `work` if needed, lock it and return the handle. Raise UserError if another process has locked it."""
    try:
        handle = lock_directory(work)
    except BlockingIOError:
        raise UserError(f"prepare: another run is making {out_dir}; wait for it, or stop it") from None
    wait_for_workers(work)
    return handle


def read_prepared(directory: Path, every_byte: bool = False) -> dict:
    """Return the manifest of a prepared directory after a check of its tokenizer and of the sizes of its files, or with
    every_byte of their content. Raise one of DAMAGED."""
    manifest = read_manifest(directory, "")
    if manifest.get("format") == ROWS_FORMAT:
        for entry in manifest["splits"].values():
            tokens, path = entry.get("tokens", {}), directory / entry["file"]
            if path.stat().st_size != entry["bytes"]:
                raise UserError(f"prepare: {path} does not have {entry['bytes']} bytes; rerun prepare.py")
            if tokens:
                map_tokens(directory, tokens, token_dtype(manifest.get("vocab_size", 0)).name)
            if every_byte:
                for name, sha256 in ({path.name: entry["sha256"]} | tokens.get("sha256", {})).items():
                    verify_sha256(directory / name, sha256)
    else:
        manifest = verify(directory) if every_byte else manifest
        for split in manifest["splits"]:
            TokenData(directory, split)
        if (pack := manifest["info"].get("recipe", {}).get("pack")) and "train" in manifest["splits"]:
            for name in manifest.get("sources", {"": {}}):
                PackedData(directory, pack, name)
    fingerprint = manifest.get("tokenizer_fingerprint")
    tokenizer = Tokenizer.load(directory) if fingerprint else None
    if fingerprint and fingerprint not in (tokenizer.fingerprint(), tokenizer.chat_fingerprint()):
        raise UserError(f"prepare: the tokenizer in {directory} did not make its tokens; rerun prepare.py")
    return manifest


def check_replaceable(out_dir: Path, overwrite: bool, differs: str, work: Path) -> None:
    """Raise UserError if `out_dir` holds anything that prepare.py did not write: that is never removed. So it does
    without `overwrite` if what is there is complete, for a run may need it; differs: in what, "" if not complete.
    Raise it too for a directory that `publish` could not rename."""
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise UserError(f"prepare: out_dir={out_dir} is a file; choose another")
    paths = sorted(path.relative_to(out_dir) for path in out_dir.rglob("*") if not path.is_dir())
    others = [path for path in paths if not OWN.fullmatch(path.name) or len(path.parts) > 2]
    others += [path for path in out_dir.iterdir() if path.is_dir() and not any(path.iterdir())]
    if others:
        raise UserError(f"prepare: {out_dir} holds {others[0]}, which is not ours; move it, or use another out_dir")
    if differs and not overwrite:
        ways = "use another --out_dir, or --overwrite=True to replace it"
        raise UserError(f"prepare: {out_dir} holds a complete corpus that differs in {differs}; {ways}")
    if paths and not overwrite and read_json(out_dir / "manifest.json").get("format") not in (FORMAT, ROWS_FORMAT):
        hint = "overwrite=True replaces it"
        raise UserError(f"prepare: {out_dir} holds {paths[0]}, but no manifest.json of ours; {hint}")
    try:
        set_aside(out_dir, work).rename(out_dir)
    except OSError as error:
        fix = f"if it is a mount point, use --out_dir={out_dir / 'data'}"
        raise UserError(f"prepare: {out_dir} cannot be replaced ({error.strerror}); {fix}") from None


def publish(work: Path, out_dir: Path) -> None:
    """Rename work/out to `out_dir`, and an old `out_dir` to work/old. After a kill between the two renames `out_dir` is
    missing; `work_dir` puts the old one back."""
    if out_dir.exists():
        set_aside(out_dir, work)
    (work / "out").rename(out_dir)


def set_aside(out_dir: Path, work: Path) -> Path:
    """Rename `out_dir` to work/old, and return that."""
    shutil.rmtree(work / "old", ignore_errors=True)
    return out_dir.rename(work / "old")
