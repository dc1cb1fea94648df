"""Popen(command) and run(command), as in subprocess, for Python programs of this project: each starts within 20 ms.

Most of the time of a small run is imports, and torch's alone take 1.4 s of CPU. So a server, which has made them, forks
for each program. What is torchrun's stays so: its own agent runs in such a fork, and what it starts are forks, too. In
all else the processes are what subprocess would start: children of the caller with an environment, a directory, pipes
and signals of their own. A command that a fork cannot stand for is started as usual: another program, other
settings of the interpreter. Use subprocess where imports, memory or the start itself are tested. What
multiprocessing spawns, here and in the forks, are forks as well once spawn_forks() was called.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import json
import multiprocessing.util
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from pathlib import Path

ROOT = Path(__file__).parent.parent
STAGES = ("tokenizer", "prepare", "pretrain", "sft", "reward", "dpo", "rl", "sample", "serve", "evaluate")
LATE = ("torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint", "safetensors.torch")
LATE += ("torch._dynamo",)  # a GradScaler imports it, which takes as long as torch
TORCHRUN = "torch.distributed.run"
STARTER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
ADDRESS = "TESTS_FORKS"  # in the environment of what is forked: where the server listens
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
INTERPRETER = ("PYTHON", "LC_", "LANG", "OMP_", "LD_")  # names of variables that are read when Python starts


# ---- the caller -----------------------------------------------------------------------------------------------------


def adopt(yes: bool) -> None:
    """Whether this process becomes the parent of what its descendants leave behind when they end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


@functools.cache
def server() -> str:
    """Start the server, once in this process and those it starts; it ends with the process that started it."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    address = tempfile.mkdtemp() + "/forks"
    process = subprocess.Popen(
        [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
    )  # fmt: skip
    assert process.stdout.readline() == b"ready\n"
    atexit.register(process.stdin.close)
    return address


def stands_for(command: list[str], env: dict[str, str] | None) -> list[str]:
    """The arguments of a fork that is what the command would be, or none."""
    words = [os.fspath(word) for word in command]
    theirs, own = ({k: v for k, v in e.items() if k.startswith(INTERPRETER)} for e in (env or os.environ, os.environ))
    same = theirs.keys() - {"PYTHONPATH"} == own.keys() - {"PYTHONPATH"}
    same = same and all(theirs[key] == own[key] for key in theirs if key != "PYTHONPATH")
    if words[0] != sys.executable or not same or os.environ.get("OMP_NUM_THREADS") != "1" or sys.platform != "linux":
        return []
    words = words[1:]
    while words[0] in ("-u", "-B"):
        words = words[1:]
    return words if words[0].endswith(".py") or words[0] == "-c" or words[:2] == ["-m", TORCHRUN] else []


def fork(
    words: list[str], files: dict[int, int], cwd: str | Path = ".", env: dict | None = None, session: bool = False
) -> int:
    """Process id of a fork that plays these words. files: {number there: open file here}."""
    env = {key: value for key, value in (env or os.environ).items()} | {ADDRESS: server()}
    order = {"words": words, "cwd": os.path.abspath(cwd or "."), "env": env, "session": session, "files": [*files]}
    adopt(True)
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(env[ADDRESS])
            text = json.dumps(order).encode()
            socket.send_fds(line, [len(text).to_bytes(8, "big")], [*files.values()])
            line.sendall(text)
            return int(line.recv(20))
    finally:
        adopt(False)


def spawn_forks() -> None:
    """Let multiprocessing's "spawn" start forks. Its tracker of resources, which imports nothing, is none."""
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_fork(path: str, args: list, files: list[int]) -> int:
        words = stands_for([os.fsdecode(word) for word in args], None) if "spawn_main" in str(args) else []
        return fork(words, {file: file for file in (0, 1, 2, *files)}) if words else spawn(path, args, files)

    multiprocessing.util.spawnv_passfds = spawn_fork


class Popen(subprocess.Popen):
    """subprocess.Popen, whose process is a fork of the server where it can be."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, session, group,
    ) -> None:  # fmt: skip
        """What Popen calls when it has opened the pipes; it waits for self.pid and closes its own ends later."""
        words = [] if preexec_fn or pass_fds or shell or isinstance(args, str) else stands_for(args, env)
        if not words:
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                session, group,
            )  # fmt: skip
            return
        files = {own: ends if ends != -1 else own for own, ends in enumerate((p2cread, c2pwrite, errwrite))}
        self.pid = fork(words, files, cwd, env, session)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(
    command: list, input: str | bytes | None = None, capture_output: bool = False, timeout: float | None = None,
    check: bool = False, **options: object,
) -> subprocess.CompletedProcess:  # fmt: skip
    """subprocess.run"""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# ---- the server -----------------------------------------------------------------------------------------------------


def serve(address: str) -> list[str]:
    """Fork for each order that comes, and return its words in the fork. The end of standard input ends the server."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            shutil.rmtree(Path(address).parent)
            os._exit(0)
        line = listener.accept()[0]
        size, files, _, _ = socket.recv_fds(line, 8, 64)
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)  # now the caller adopts the process
            listener.close()
            return become(line, int.from_bytes(size, "big"), files, middle)
        os.waitpid(middle, 0)
        line.close()
        for file in files:
            os.close(file)


def become(line: socket.socket, size: int, files: list[int], middle: int) -> list[str]:
    """Make this process what the order asks for; return its words."""
    text = b""
    while len(text) < size:
        text += line.recv(size - len(text))
    order = json.loads(text)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"python")
    if order["session"]:
        os.setsid()
    above = max(order["files"]) + 1  # first all out of the way of the places where they belong
    came = [*files, line.detach()]
    *files, moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in came]
    for file in came:
        os.close(file)
    line = socket.socket(fileno=moved)
    for own, file in zip(order["files"], files, strict=True):
        os.dup2(file, own)
        os.close(file)
    sys.stdin, sys.stdout = open(0, encoding="utf-8", closefd=False), open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    mine = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(order["env"])
    theirs = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = ["", *filter(None, theirs), *(path for path in sys.path[1:] if path not in mine)]
    while os.getppid() == middle:
        time.sleep(0.0002)
    line.sendall(str(os.getpid()).encode())
    line.close()
    return order["words"]


def serve_for_me() -> list[str]:
    """Start a server below this process, which can adopt only what descends from it; in its forks return the words."""
    address = tempfile.mkdtemp() + "/forks"
    end, lifeline = os.pipe()
    started, ready = os.pipe()
    if os.fork():
        os.close(end), os.close(ready), os.read(started, 1)
        os.environ[ADDRESS] = address
        return []
    os.close(lifeline)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"server")
    os.dup2(end, 0)
    os.dup2(ready, 1)
    return serve(address)


def play(words: list[str]) -> None:
    """What the interpreter does with these words."""
    sys.orig_argv = [sys.executable, *words]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if words[0] == "-c":
        sys.argv, sys.modules["__main__"] = ["-c", *words[2:]], types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102
    elif words[0] == "-m":
        agent = importlib.import_module(TORCHRUN)
        importlib.import_module(STARTER).Popen = Popen
        sys.path[0], sys.argv = os.getcwd(), [agent.__file__, *words[2:]]
        agent.main()
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(words[0])), words
        runpy.run_path(words[0], run_name="__main__")


def status_of(error: BaseException) -> int:
    """The exit status of a program that ends with this error, of which it is told."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return status_of(end)
    return 1


def play_to_the_end(words: list[str]) -> None:
    """Play and end as an interpreter does, but leave to the system what was imported: taking that apart would write
    to 170 MB of shared memory, which costs 0.35 s."""
    status, interrupted = 0, False
    try:
        play(words)
    except BaseException as error:
        status, interrupted = status_of(error), isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            if not stream.closed:
                status = 120
                print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr)
    if interrupted and status == 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path.insert(1, str(ROOT))
    os.fsync = lambda fd: os.fstat(fd) and None  # as in conftest.py
    os.setpriority = lambda *_: None
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    for name in (*STAGES, *LATE):
        importlib.import_module(name)
    importlib.import_module("groundup.train.device").versions()
    del sys.path[1]
    weakref.finalize._registry.clear()  # what the imports would tidy up in the end, each time
    gc.collect()
    gc.freeze()
    words = serve(sys.argv[1])
    if words[0] == "-m" or "prepare" in str(words):  # these start processes
        if theirs := serve_for_me():
            words = theirs  # a rank or a worker: what it starts would be adopted by the process that asked for it
        else:
            spawn_forks()
    play_to_the_end(words)
