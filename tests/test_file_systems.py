"""Every stage where the file system refuses what it may refuse: locks (Lustre, NFS) or the module for them (Windows),
links (exFAT, SMB), fsync of a directory (FUSE), removal of a directory with a file in use (NFS), a new name for a mount
point (docker -v). What is made is the same, and each refusal is told once."""

import errno
import fcntl
import os
import re
import runpy
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import pytest
import saved
import test_checkpoint as tc

from groundup.demo.debug_data import debug_chats, write_rows
from groundup.demo.python_docs import debug_texts
from groundup.errors import UserError, say
from groundup.files import directories, disk
from groundup.train import checkpoint, huggingface
from tools import merge

ROOT = Path(__file__).parent.parent
TRAIN = ["--max_steps=4", "--save_every=2", "--keep_last=1", "--eval_every=2", "--eval_steps=1", "--warmup_steps=2"]
TRAIN += ["--device=cpu", "--dtype=float32", "--compile=False", "--peak_tflops=1", "--batch_size=2"]
TASKS = {
    "lock files, so run no command twice at the same time",
    "fsync a directory",
    "update the links latest, best and best2",
    "remove old checkpoints",
}


def failing(code: int) -> Callable:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def refuse(monkeypatch: pytest.MonkeyPatch, locks: str) -> None:
    """Have the system refuse everything above."""
    fsync, rmdir = os.fsync, os.rmdir

    def fsync_files(fd: int) -> None:
        (failing(errno.EINVAL) if stat.S_ISDIR(os.fstat(fd).st_mode) else fsync)(fd)

    def rmdir_others(path: str | Path, **kwargs: object) -> None:
        in_use = os.path.basename(path).startswith((".step_", "removed", ".removed"))
        (failing(errno.EBUSY) if in_use else rmdir)(path, **kwargs)

    if locks == "absent":
        monkeypatch.setattr(disk, "fcntl", None)
        monkeypatch.setattr(directories, "HAS_LOCKS", False)
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    monkeypatch.setattr(os, "symlink", failing(errno.EPERM))
    monkeypatch.setattr(os, "fsync", fsync_files)
    monkeypatch.setattr(os, "rmdir", rmdir_others)


def stage(script: str, *flags: str) -> None:
    """Run a script in this process, to its end."""
    before = sys.argv, sys.excepthook, [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    sys.argv = [f"{script}.py", *flags]
    try:
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
    finally:
        sys.argv, sys.excepthook = before[:2]
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before[2], strict=True):
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents and conversations, with a corpus and a model made of them."""
    folder = tmp_path_factory.mktemp("files")
    write_rows(debug_texts(), folder / "texts.jsonl")
    talks = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(40)]
    write_rows(debug_chats(talks), folder / "chat.jsonl")
    stage(*command("prepare", folder, folder / "corpus"))
    stage(*command("pretrain", folder, folder / "model"))
    return folder


def command(script: str, files: Path, out: Path) -> list[str]:
    small = ["--n_layer=1", "--n_head=2", "--n_kv_head=1", "--n_embd=16", "--block_size=32"]
    flags = {
        "tokenizer": [f"--input={files}/texts.jsonl", "--vocab_size=384"],
        "prepare": [f"--input={files}/texts.jsonl", "--vocab_size=384", "--val_fraction=0.1", "--workers=1"],
        "pretrain": [f"--data_dir={files}/corpus", *small, *TRAIN],
        "sft": [
            f"--data={files}/chat.jsonl",
            f"--init_from={files}/model",
            "--val_fraction=0.2",
            "--block_size=32",
            *TRAIN,
        ],
        "sample": [f"--init_from={files}/model", "--prompt=A", "--max_new_tokens=4", "--device=cpu", f"--out={out}"],
    }
    return [script, *flags[script], *([] if script == "sample" else [f"--out_dir={out}"])]


def content(out: Path) -> dict[str, bytes]:
    """What a stage has made that does not tell its place or the time, by name."""
    newest = checkpoint.find_latest(out, pytest.fail) if out.is_dir() else None
    paths = [out] if out.is_file() else (newest or out).iterdir()
    told = ("config.py", "manifest.json", "report.md", "train_state.pt", "checksums.json")
    return {path.name if out.is_dir() else "": path.read_bytes() for path in paths if path.name not in told}


@pytest.mark.parametrize(
    ("script", "locks"),
    [
        *((script, "refused") for script in ("tokenizer", "prepare", "pretrain", "sft", "sample")),
        ("prepare", "absent"),
        ("pretrain", "absent"),
    ],
)
def test_the_same_is_made_and_each_refusal_is_told_once(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, script: str, locks: str
) -> None:
    stage(*command(script, files, tmp_path / "usual"))
    say.cache_clear()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        refuse(patch, locks)
        stage(*command(script, files, tmp_path / "out"))
    tasks = re.findall("warning: cannot (.*): .*\n", capsys.readouterr().err)
    assert len(tasks) == len(set(tasks)) and set(tasks) <= TASKS
    assert bool(tasks) == (script != "tokenizer")
    made = content(tmp_path / "out")
    assert made == content(tmp_path / "usual") and made


@pytest.mark.parametrize("script", ["pretrain", "sft"])
def test_a_run_continues_there(files: Path, tmp_path: Path, monkeypatch, capsys, script: str) -> None:
    """From the checkpoint before the newest, which is damaged."""
    stage(*command(script, files, tmp_path / "usual"))
    refuse(monkeypatch, "refused")
    out, flags = tmp_path / "out", ["--keep_last=9"]
    stage(*command(script, files, out), *flags)
    tc.flip_byte(out / "step_000004" / "model.safetensors")
    for _ in range(2):  # it replaces a step, and leaves the old one under a hidden name
        stage(*command(script, files, out), *flags)
    assert f"continuing {out}/step_000002 after step 2" in capsys.readouterr().out
    assert content(out) == content(tmp_path / "usual")
    assert checkpoint.find_latest(out, pytest.fail).name == "step_000004"


def test_a_corpus_is_replaced_there(files: Path, tmp_path: Path, monkeypatch) -> None:
    """What an earlier command left in the hidden directory cannot be removed."""
    refuse(monkeypatch, "refused")
    flags = command("prepare", files, tmp_path / "out")
    for val_fraction in (0.2, 0.3, 0.1):
        stage(*flags, f"--val_fraction={val_fraction}", "--overwrite=True")
    monkeypatch.undo()
    stage(*command("prepare", files, tmp_path / "usual"))
    assert content(tmp_path / "out") == content(tmp_path / "usual")


def test_files_beside_a_run_stay(files: Path, tmp_path: Path) -> None:
    """.DS_Store, Slurm's or one's own log in a new out_dir, and when the run is deleted."""
    own = [".DS_Store", "slurm-1.out", "train.log"]
    for name in own:
        (tmp_path / name).write_text("mine", encoding="utf-8")
    for flags in ([], ["--resume=never", "--overwrite=True"]):
        stage(*command("pretrain", files, tmp_path), *flags)
    assert all((tmp_path / name).read_text("utf-8") == "mine" for name in own)
    assert checkpoint.find_latest(tmp_path).name == "step_000004"


# ---- two machines ---------------------------------------------------------------------------------------------------

ON_MACHINE = """
import ctypes, os, runpy, signal, sys
from groundup.train.log import RunLog

network, dies, *sys.argv = sys.argv[1:]
if network:
    handle = os.open(f"/var/run/netns/{network}", os.O_RDONLY)
    assert ctypes.CDLL(None).setns(handle, 0x40000000) == 0  # CLONE_NEWNET
advance = RunLog.advance

def die(log):
    advance(log)
    if log.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

if dies:
    RunLog.advance = die
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them, 10.77.0.1 and 10.77.0.2; none where that is not permitted."""
    names = [f"groundup{os.getpid()}{end}" for end in "ab"]

    def ip(*words: str) -> int:
        return subprocess.run(["ip", *words], stderr=subprocess.DEVNULL).returncode

    if not shutil.which("ip") or ip("netns", "add", names[0]):
        yield []
        return
    try:
        ip("netns", "add", names[1])
        cable = ["name", "cable", "netns", names[1]]
        assert not ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", *cable)
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.dist
@pytest.mark.slow
def test_two_machines_without_a_shared_disk(files: Path, tmp_path: Path, networks: list[str]) -> None:
    """Two ranks, each with a directory of its own under the name of out_dir. One machine dies, and both start again."""
    where = networks or ["", ""]
    folders = [tmp_path / rank for rank in "01"]
    flags = [*command("pretrain", files, Path("out"))[1:], "--keep_last=9", "--timeout_s=8"]

    def start(out: str = "out", dies: str = "") -> list[tuple[int, str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        address = "10.77.0.1" if networks else "127.0.0.1"
        env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}
        env |= {"PYTHONPATH": str(ROOT)}
        processes = []
        for rank, folder in enumerate(folders):
            folder.mkdir(exist_ok=True)
            line = [sys.executable, "-c", ON_MACHINE, where[rank], dies if rank else "", str(ROOT / "pretrain.py")]
            how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            own = {"RANK": str(rank), "LOCAL_RANK": "0"}
            line += [*flags, f"--out_dir={out}"]
            processes.append(forks.Popen(line, cwd=folder, env=env | own, **how))
        return [(process.wait(100), process.communicate()[1]) for process in processes]

    assert start("usual") == [(0, ""), (0, "")]
    mine, theirs = (folder / "out" for folder in folders)
    straight = content(folders[0] / "usual")
    assert "rank_00001.pt" in straight and not (folders[1] / "usual").exists()
    (status, errors), (died, _) = start(dies="yes")
    assert died == -signal.SIGKILL and status == 1 and "another rank has died" in errors.splitlines()[-1]
    need = "config: rank 1 cannot read out/step_000002; copy that of rank 0 there"
    for status, errors in start():
        assert status == 1 and errors.startswith(need) and errors.count("\n") == 1
    shutil.copytree(mine / "step_000002", theirs / "step_000002")
    assert start() == [(0, ""), (0, "")]
    assert content(mine) == straight and os.listdir(theirs) == ["step_000002"]


def test_a_files_keys_do_not_command_a_terminal_behind_a_pipe(tmp_path: Path, capsys) -> None:
    (tmp_path / "x.jsonl").write_text('{"\\u001b[31mkey": 1}\n{"text": "\\u001b[31mred"}\n', encoding="utf-8")
    with pytest.raises(AssertionError, match="1"):  # a row was not understood
        stage("prepare", f"--input={tmp_path}/x.jsonl", "--kind=text", "--show=2")
    said = capsys.readouterr().out
    assert "\\x1b[31mkey" in said and "\x1b" not in said


# ---- mount points ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that can be neither renamed nor replaced nor removed."""
    point = tmp_path / "mount"
    point.mkdir()
    for name in ("rename", "replace", "rmdir"):
        original = getattr(os, name)

        def busy(*paths: str | Path, original: Callable = original, **kwargs: object) -> None:
            (failing(errno.EBUSY) if point in map(Path, paths) else original)(*paths, **kwargs)

        monkeypatch.setattr(os, name, busy)
    return point


def test_prepare_refuses_a_mount_point_at_the_start(files: Path, mount: Path, capsys) -> None:
    with pytest.raises(UserError, match=f"{mount} cannot be replaced .*; if .* use --out_dir={mount}/data"):
        stage(*command("prepare", files, mount))
    assert "documents" not in capsys.readouterr().out
    assert os.listdir(mount.parent) == ["mount"]
    stage(*command("prepare", files, mount / "data"))
    stage(*command("prepare", files, mount / "data"), "--val_fraction=0.2", "--overwrite=True")
    assert os.listdir(mount) == ["data"]


def test_a_trainer_takes_a_mount_point(files: Path, mount: Path) -> None:
    stage(*command("pretrain", files, mount))
    assert (mount / "latest").exists()


def test_merge_refuses_a_mount_point_at_the_start(mount: Path, tmp_path: Path, monkeypatch) -> None:
    saved.save(tmp_path / "run", 1, tc.tiny(), tc.TOKENIZER)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="mount' is not empty or cannot be replaced"):
        patch.setattr(huggingface, "load_model", pytest.fail)
        merge.write(str(tmp_path / "run"), str(mount), "float32")
    merge.write(str(tmp_path / "run"), str(mount / "merged"), "float32")
    assert os.listdir(mount) == ["merged"]


# ---- Windows --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_file_knows_of_locks_and_can_be_imported_without_them(monkeypatch) -> None:
    sources = [*ROOT.glob("*.py"), *ROOT.glob("groundup/**/*.py"), *ROOT.glob("tools/*.py")]
    users = [path for path in sources if "fcntl" in path.read_text("utf-8")]
    assert users == [Path(disk.__file__)]
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert callable(runpy.run_path(disk.__file__)["lock"])
    assert callable(runpy.run_path(directories.__file__)["lock_directory"])
