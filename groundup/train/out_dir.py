"""The directory of a run: which files it may hold, whose run is in it, and that only one process trains in it."""

import fcntl
import os
import re
import shutil
import socket
from pathlib import Path
from typing import IO

from configurator import write_config
from groundup.errors import UserError, refuse

# What a run leaves in its directory: a new one begins, and overwrite=True deletes, where there is nothing else.
OWN_FILES = re.compile(
    r"(\.lock|config\.py|log\.jsonl|reference\.safetensors|README\.md|events\.out\.tfevents.*"
    r"|\.?latest|\.?best2?|\.?step_\d+)(\.tmp|\.old)?"
)

LOCKS: dict[Path, tuple[IO, int]] = {}  # run directories that are this process's: open .lock, open directory


def check_stage(out: Path, script: str) -> None:
    """Raise UserError if another script's run is in `out`: the first line of its config.py says which."""
    config = out / "config.py"
    lines = config.read_text(encoding="utf-8", errors="replace").splitlines() if config.is_file() else []
    other = re.search(r"re-run with: python (\w+\.py) ", lines[0]) if lines else None
    refuse(other and other[1] != script, f"{out} is a run of {other and other[1]}; use another out_dir for {script}")


def check_overwrite(config: dict, out: Path) -> None:
    """Raise UserError unless overwrite is on and `out` holds nothing but a run, so that all of it may be deleted."""
    refuse(not config["overwrite"], f"resume='never' but {out} is not empty; use another out_dir or overwrite=True")
    check_own(out)
    within = config["init_from"] and Path(config["init_from"]).resolve().is_relative_to(out.resolve())
    refuse(within, f"init_from={config['init_from']!r} lies in the out_dir that overwrite=True deletes")


def check_own(out: Path) -> None:
    """Raise UserError if `out` holds files that no run made. Every run has a log beside its config.py and README.md."""
    shared = () if (out / "log.jsonl").exists() else ("README.md", "config.py")
    foreign = sorted(path.name for path in out.iterdir() if not OWN_FILES.fullmatch(path.name) or path.name in shared)
    if foreign == ["config.py"] and (out / "config.py").read_bytes().startswith(b"'Resolved configuration"):
        return  # of a run that was killed before its first line
    refuse(foreign, f"{out} holds {''.join(foreign[:1])!r}, which no run made; use another out_dir")


def lock(out: Path) -> None:
    """Keep a directory for this process as long as it lives. Raise UserError, with the owner's number, if another's."""
    if is_ours(out):
        return
    file = open(out / ".lock", "a+", encoding="utf-8")  # stays open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        other = file.read() or "?"
        raise UserError(f"config: process {other} is training in {out}; use another out_dir") from None
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}")
    file.flush()
    LOCKS[out.resolve()] = file, os.open(out, os.O_RDONLY)


def is_ours(out: Path) -> bool:
    """Return whether `out` is the directory that this process has locked, not one made since in its place."""
    _, directory = LOCKS.get(out.resolve(), (None, -1))
    return directory >= 0 and out.exists() and os.path.samestat(os.fstat(directory), os.stat(out))


def prepare(config: dict, script: str, keeps_config: bool = False) -> None:
    """Make out_dir, emptied for overwrite=True, and write config.py, with which `script` runs again. keeps_config: not
    over the one that is there, for nothing is trained by these settings."""
    out = Path(config["out_dir"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        begun = not is_ours(out) and (out / "log.jsonl").exists()  # since find_resume saw none
        lock(out)
        refuse(begun, f"another run has begun in {out}; run the same command again")
        for path in out.iterdir() if config["resume"] == "never" else ():  # check_overwrite has looked at them
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()
    except OSError as error:
        raise UserError(f"config: out_dir={config['out_dir']!r}: {error.strerror}") from None
    again = config | {"resume": "auto", "overwrite": False}  # to run it again must not delete it
    if not (keeps_config and (out / "config.py").exists()):
        write_config(again, f"{out}/config.py", command=f"python {script} {out}/config.py")
