"""How scripts end: one line on standard error and the right exit status for whatever the user or the machine did."""

import errno
import importlib
import os
import pty
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import forks
import numpy as np
import pytest
from torch.torch_version import TorchVersion

from groundup import errors

ROOT = Path(__file__).parent.parent
STAGES = sorted(
    path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
)
BEGIN = "import sys; sys.path.insert(0, sys.argv.pop()); from groundup import errors; errors.end_in_one_line()\n"


def ended(code: str, **options) -> subprocess.CompletedProcess:
    """What a script of these lines does, in a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, "-c", BEGIN + code, str(ROOT)], **options)


@pytest.mark.parametrize(
    "error, line",
    [
        (errors.UserError("config: a\nb\x1b[31m"), r"config: a b\x1b[31m"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (
            PermissionError(errno.EACCES, "Permission denied", "out\x1b]0;x"),
            r"out\x1b]0;x: Permission denied",
        ),
        (MemoryError(), "out of memory"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "source .venv/bin/activate"),
    ],
)
def test_what_the_user_or_the_machine_did_is_one_line(error, line, capsys):
    assert errors.report(error, sys.stderr) == 1
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1


def test_a_mark_of_chinese_typing_is_named(monkeypatch, tmp_path):
    """Or a curly quote that a text program made: a path with it looks right."""

    def said(flag: str, text: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pretrain.py", flag])
        return errors.line_of(errors.UserError(text))

    said_of = said("--data_dir=\u201cdata/x\u201d", "data: no directory \u201cdata/x\u201d")
    assert said_of == 'data: no directory “data/x” (is “ for ", ” for " intended?)'
    assert said("--a=x，y", "no file x，y").endswith("no file x，y (is ， for , intended?)")
    assert said("--a=x", "no text x，y") == "no text x，y"  # which the command does not have
    assert said("", "data: no file matches 'x，y'").endswith("(is ， for , intended?)")  # of a config
    wrong = "config: max_steps must be a whole number, got '４０９６' on the command line"
    number = said("--max_steps=４０９６", wrong)
    assert number.endswith("on the command line (is ４０９６ for 4096 intended?)")
    assert said("--dropout=０.8", "got '０.8'") == "got '０.8' (is ０.8 for 0.8 intended?)"
    assert said("--lr=－３e．5", "got '－３e．5'").endswith("(is －３ for -3, ． for . intended?)")
    assert said("--a=x、y", "no file x、y").endswith("no file x、y (is 、 for , intended?)")
    assert said("--a=x。py", "no x。py").endswith("(is 。 for . intended?)")
    assert said("--a=x．py", "no x．py").endswith("(is ． for . intended?)")
    (tmp_path / "x，y").touch()
    there = f"--input={tmp_path}/x，y"
    assert said(there, f"{there}: line 3 is damaged") == f"{there}: line 3 is damaged"


@pytest.mark.parametrize(
    "error",
    [
        np.exceptions.AxisError("not ours"),
        KeyError("a mistake in the code"),
        ModuleNotFoundError("No module named 'groundup.x'", name="groundup.x"),
    ],
)
def test_a_mistake_in_the_code_keeps_its_traceback(error, capsys):
    assert errors.report(error, sys.stderr) == 1
    assert type(error).__name__ in capsys.readouterr().err and errors.line_of(error) == ""


def test_an_older_python_is_named():
    code = "sys.version_info = (3, 10, 2); errors.end_in_one_line(); print('goes on')"
    lines = BEGIN.replace("errors.end_in_one_line()", "")
    command = [sys.executable, "-c", lines + code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"{sys.executable} is Python 3.10; 3.11 or newer is needed\n"


def test_an_older_torch_is_named(monkeypatch):
    """What it lacks would be a traceback."""
    error = AttributeError("module 'torch.compiler' has no attribute 'set_stance'")
    for version, too_old in (("2.3.1+cpu", True), ("2.10.0", True), ("2.11.0", False), ("2.13.0+cpu", False)):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=TorchVersion(version)))
        said = errors.line_of(error)
        assert bool(said) == too_old
        if too_old:
            assert f"torch {version} is too old, 2.11 or newer is needed; run: source" in said and "set_stance" in said
    monkeypatch.delitem(sys.modules, "torch")
    assert errors.line_of(error) == ""


def test_the_packages_are_those_of_requirements():
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    names = {line.partition("=")[0].replace("-", "_") for line in text.splitlines() if "==" in line}
    assert names == errors.REQUIREMENTS


@pytest.mark.parametrize("reason", [
    "CppCompileError: C++ compile error\n\nCommand:\ng++", "RuntimeError: Failed to find C compiler. Please specify",
    "CalledProcessError: Command '['gcc', 'main.c']' returned", "ImportError: x.so: failed to map segment from shared",
    "OSError: [Errno 30] Read-only file system: '/cache/x'", "PermissionError: [Errno 13] Permission denied: '/cache'",
])  # fmt: skip
def test_a_kernel_that_no_compiler_builds_is_one_line(reason, capsys):
    class InductorError(RuntimeError):
        """Of torch's name."""

    assert errors.report(InductorError(reason), sys.stderr) == 1
    said = capsys.readouterr().err
    assert "use compile=False, install gcc, g++ and python3-dev" in said and said.count("\n") == 1
    assert errors.line_of(InductorError("LoweringException: ours")) == ""


def test_exhausted_memory_is_one_line(capsys):
    class OutOfMemoryError(RuntimeError):
        """Of torch's name."""

    error = OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 9 GiB in all"
    )
    errors.report(error, sys.stderr)
    said = capsys.readouterr().err
    assert "out of memory: cannot allocate 2.00 GiB" in said and said.count("\n") == 1


def test_more_memory_than_the_machine_has_is_one_line(capsys):
    import torch

    for ask in (lambda: torch.empty(2**50), lambda: np.ones(2**50)):
        with pytest.raises((RuntimeError, MemoryError)) as found:
            ask()
        errors.report(found.value, sys.stderr)
        said = capsys.readouterr().err
        assert "out of memory: cannot allocate" in said and said.count("\n") == 1


@pytest.mark.parametrize("script", ["tokenizer", "prepare", "sft", "evaluate", "sample", "serve"])
def test_the_advice_to_need_less_memory_names_settings_of_the_script(script, monkeypatch):
    module = importlib.import_module(script)
    monkeypatch.setitem(sys.modules, "__main__", module)
    line = errors.line_of(MemoryError()).partition("out of memory")[2]
    advice = line.removeprefix("; ").split(" or ") if line else []
    assert all(text.split()[-1] in vars(module) for text in advice)
    assert bool(advice) == (script != "tokenizer")


INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"


@pytest.mark.parametrize("script", STAGES)
def test_ctrl_c_during_the_imports_is_one_line(script, tmp_path):
    """The first slow import is interrupted."""
    for name in ("torch", "numpy", "tiktoken"):
        (tmp_path / f"{name}.py").write_text(INTERRUPTED, encoding="utf-8")
    env = dict(os.environ, PYTHONPATH=str(tmp_path))
    done = subprocess.run([sys.executable, ROOT / script], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"{script[:-3]}: interrupted; run the same command again\n"


def test_an_interrupted_rank_says_which_it_is(monkeypatch):
    """torchrun ends all ranks if one fails."""
    monkeypatch.setenv("RANK", "3")
    assert errors.line_of(KeyboardInterrupt()).endswith(": rank 3: interrupted; run the same command again")


def test_a_reader_that_has_gone_is_no_traceback():
    for code in (
        "print(1)",
        "print(1); sys.exit(0)",
        "print('x' * 2**20)",
    ):  # at the exit, or within a print
        read, write = os.pipe()
        os.close(read)
        done = ended(code, stdout=write)
        os.close(write)
        assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("rank", ["", "RANK=0"])
def test_closed_streams_are_no_error(tmp_path, closed, rank):
    """What is printed goes nowhere, and no file gets the number of standard output."""
    code = "print('out'); print('err', file=sys.stderr); sys.stdout.isatty(), sys.stdin.isatty(), sys.stdin.read()\n"
    code += "file = open('log', 'w'); file.write(str(file.fileno())); file.flush()\n"
    code += "raise errors.UserError('the end')"
    command = [sys.executable, "-c", BEGIN + code, str(ROOT)]
    line = ["bash", "-c", f'{rank} exec "$@" {closed}', "bash", *command]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and int((tmp_path / "log").read_text("utf-8")) > 2
    assert done.stdout == ("" if " >" in f" {closed}" else "out\n")
    assert done.stderr == ("" if "2>" in closed else "err\nthe end\n")


@pytest.mark.parametrize(
    "code",
    [
        "print(1)",  # at the exit
        "print(1, flush=True)",
        "print('x' * 2**20)",
        "from groundup.errors import naming\nwith naming('data/mine'): print(1, flush=True)",
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(code):
    with open("/dev/full", "wb") as full:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        done = ended(code, stdout=full, env=env)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"standard output: No space left on device" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_leaves_the_old_tokenizer(tmp_path):
    """The limit on the size of a file stands for the disk."""
    import resource

    def train(vocab_size: int, limit: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess:
        flags = [
            f"--input={ROOT / 'README.zh.md'}",
            f"--out_dir={tmp_path / 'tok'}",
            f"--vocab_size={vocab_size}",
            "--overwrite=True",
        ]
        code = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        code += "sys.argv[0] = 'tokenizer.py'; runpy.run_path('tokenizer.py', run_name='__main__')"
        return forks.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True)

    assert train(512).returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "tok").iterdir()}
    done = train(640, 8192)
    assert (done.returncode, done.stderr) == (
        1,
        f"tokenizer: {tmp_path}/tok/tokenizer.json: File too large\n",
    )
    assert {name: (tmp_path / "tok" / name).read_bytes() for name in before} == before
    assert train(640).returncode == 0


def test_no_character_is_too_strange_for_the_terminal():
    text = "print('\\u7532 \\U0001f600 \\ud800')"
    done = ended(text, env=dict(os.environ, PYTHONIOENCODING="gbk"))
    assert (done.returncode, done.stdout.decode("gbk").split()) == (0, ["\u7532", "?", "?"])
    done = ended(
        text,
        env={k: v for k, v in os.environ.items() if k != "PYTHONIOENCODING"} | {"LC_ALL": "POSIX"},
    )
    assert done.stdout.decode().split() == ["\u7532", "\U0001f600", "?"]  # a pipe or a file


def test_no_text_drives_the_terminal():
    """Colours, window titles, a carriage return and reversed text reach a terminal as escapes, behind a pipe too."""
    for name, kept in (
        ("stdout", rb"\r"),
        ("stderr", b"\r"),
    ):  # a progress bar, on standard error, needs its \r
        parent, child = pty.openpty()
        text = r"'a\x1b[31m\x1b]0;t\x07\rb\x9b2J\u202e\tc'"
        done = ended(f"print({text}, file=sys.{name})", **{name: child})
        said = os.read(parent, 1000)
        os.close(child), os.close(parent)
        assert (done.returncode, said) == (
            0,
            rb"a\x1b[31m\x1b]0;t\x07" + kept + rb"b\x9b2J\u202e" + b"\tc\r\n",
        )
        done = ended(f"print({text}, file=sys.{name})")
        assert rb"a\x1b[31m\x1b]0;t\x07" + kept + rb"b\x9b2J\u202e" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("error", "env", "status"),
    [
        ("errors.UserError('data: no rows')", {"RANK": "0"}, 1),
        ("errors.LostRank('data: no rows')", {"RANK": "1"}, 1),
        ("KeyError('data: no rows')", {"RANK": "1"}, 1),
        ("errors.Stopped(15)", {}, 128 + 15),
    ],
)
def test_a_rank_and_a_stopped_process_end_without_their_threads(error, env, status):
    """A thread that waits for another rank would keep the process alive."""
    code = f"""if True:
        import threading, time
        threading.Thread(target=lambda: time.sleep(60)).start()
        print("said before")
        raise {error}
    """
    done = ended(code, env=os.environ | env, timeout=30)
    assert (done.returncode, done.stdout) == (status, b"said before\n")
    assert done.stderr.count(b"\n") == 1 or error.startswith("KeyError")


NUMPY = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except KeyboardInterrupt:  # as numpy's and torch's C code does
    raise ImportError("numpy.core.multiarray failed to import")
"""


@pytest.mark.parametrize("script", STAGES)
def test_ctrl_c_while_packages_are_imported_is_one_line(script, tmp_path):
    (tmp_path / "numpy.py").write_text(NUMPY, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, ROOT / script, "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    line = f"{script.removesuffix('.py')}: interrupted; run the same command again\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", line)


def test_ctrl_c_after_the_imports_runs_what_finally_has_to_do():
    code = """if True:
        import os, signal
        from configurator import configure
        configure({}, [])
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            print("tidied up")
    """
    done = ended(code)
    assert (done.returncode, done.stdout) == (130, b"tidied up\n")
    assert done.stderr.count(b"\n") == 1 and b"interrupted" in done.stderr


def test_a_background_job_of_a_shell_still_ignores_ctrl_c():
    code = """if True:
        import os, signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        errors.end_in_one_line()
        os.kill(os.getpid(), signal.SIGINT)
        print("goes on")
    """
    ignoring = BEGIN.replace("errors.end_in_one_line()", "")
    command = [sys.executable, "-c", ignoring + code, str(ROOT)]
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"goes on\n", b"")


TWO_RANKS = """
from groundup.errors import UserError, end_in_one_line
end_in_one_line()
import sys, threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(1))
threading.Thread(target=lambda: time.sleep(60)).start()
raise UserError("data: no rows; give others") if sys.argv[1] == "user" else KeyError("a bug")
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["user", "bug"])
def test_an_error_on_every_rank_ends_each_with_status_1(kind, tmp_path):
    """One line of each rank if it is the user's; no SIGABRT, though a thread of each still waits."""
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}  # as torchrun does
    ranks = []
    for rank in "01":
        command, own = [sys.executable, script, kind], env | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(forks.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
    for rank in ranks:
        said = rank.communicate(timeout=50)[1]
        assert rank.returncode == 1
        last = "data: no rows; give others" if kind == "user" else "KeyError: 'a bug'"
        assert said.endswith(f"{last}\n") and (kind == "bug") == said.startswith("Traceback"), said
        assert kind == "bug" or said.count("\n") == 1, said


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_ranks_end_when_torchrun_is_killed(tmp_path):
    """The ranks hold the pipe: it is at its end when they are."""
    script = tmp_path / "late.py"
    script.write_text(
        "from groundup.errors import end_in_one_line\nend_in_one_line()\n"
        "import os, pathlib, time\npathlib.Path(os.environ['RANK']).touch()\ntime.sleep(100)\n",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    agent = forks.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert agent.poll() is None
        time.sleep(0.05)
    agent.kill()
    agent.communicate(timeout=10)


def test_a_models_text_on_one_line_shows_its_newlines():
    assert errors.one_line("\n a\r\n\n b\x1b") == r"\n a\r\n\n b\x1b"
