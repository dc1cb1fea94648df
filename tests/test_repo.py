"""What holds for the repository as a whole: who imports whom, importing does nothing, every script explains itself."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest

from configurator import defaults_of, is_key, read_file
from groundup.train import settings

ROOT = Path(__file__).parent.parent
# Floors, bottom to top: a file imports from floors below, or from its own room.
FLOORS = (
    ("configurator", "groundup.errors", "groundup.compile_c"),
    ("groundup.files", "groundup.demo"),
    ("tokenizer", "groundup.tokens.bpe", "groundup.tokens.foreign", "groundup.tokens.templates"),
    ("groundup.tokens", "model", "groundup.train.cpu_attention"),
    ("groundup.text",),
    ("groundup.train", "ddp"),
    ("groundup.generate",),
    ("groundup.align",),
    ("groundup.scores",),
    ("prepare", "pretrain", "sft", "dpo", "reward", "rl", "sample", "serve", "evaluate"),
)
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in [*ROOT.glob("*.py"), *ROOT.glob("groundup/**/*.py")]
    if path.name != "__init__.py"
}
TRAINERS = ("pretrain", "sft", "dpo", "reward", "rl")
SCRIPTS = ("tokenizer", "prepare", *TRAINERS, "tools/merge", "sample", "serve", "evaluate")


def imports(path: Path) -> set[str]:
    """The files of the project that a file imports, also within a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & FILES.keys()


def room(name: str) -> str:
    """The longest entry of FLOORS that `name` is or lies in."""
    return max((r for floor in FLOORS for r in floor if f"{name}.".startswith(f"{r}.")), key=len)


def floor(name: str) -> int:
    return next(k for k, rooms in enumerate(FLOORS) if room(name) in rooms)


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_down_or_stay_in_the_room(name):
    for other in imports(FILES[name]):
        beside = room(other) == room(name) or floor(name) == floor(other) < len(FLOORS) - 1
        assert floor(other) < floor(name) or beside, f"{name} imports {other}"


@pytest.mark.slow
def test_no_file_imports_itself_by_way_of_others():
    graph = {name: imports(path) for name, path in FILES.items()}
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"a cycle among {', '.join(sorted(graph))}"


def test_data_work_starts_without_torch():
    code = "import sys, tokenizer, prepare, groundup.tokens.token_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_importing_prints_nothing_and_makes_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(sorted(FILES))}"
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_key_with_a_comment(script):
    """In seconds, if the imports are its own; of a trainer, the shared settings under a heading of their own."""
    begin, alone = time.monotonic(), script in ("prepare", "rl")
    start = subprocess.run if alone else forks.run
    done = start([sys.executable, str(ROOT / f"{script}.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not alone or time.monotonic() - begin < 6 or os.getloadavg()[0] > os.cpu_count()  # 1.8 on an idle core
    own, _, shared = done.stdout.partition("keys (")[2].partition("shared keys, ")
    assert bool(shared) == (script in TRAINERS)
    keys = [line for part in (own, shared) for line in part.strip().splitlines()[1:] if line]
    assert len(keys) > 2
    bare = {"n_layer", "n_head", "n_embd", "rope_theta", "norm_eps", "tie_embeddings", "dropout", "max_steps"}
    for line in keys:
        name, _, rest = line.strip().partition(" ")
        assert name in bare or len(rest.split()) > 2, f"{script}: {name} has no comment"
    if shared:
        listed = {line.split()[0] for line in shared.strip().splitlines()[1:]}
        assert listed == {name for name, value in vars(settings).items() if is_key(name, value)}


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.py")), ids=lambda path: path.name)
def test_configs_set_known_keys_and_say_how_to_run(path):
    """And open with a docstring that gives the command."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    script = next(name for name in TRAINERS if f"{name}.py config/{path.name}" in doc)
    defaults = {k: v for k, v in defaults_of(ROOT / f"{script}.py").items() if is_key(k, v)}
    assert read_file(str(path), defaults)


# ---- the frame of a trainer ----------------------------------------------------------

# What every trainer has, once each and in this order; what stands between is its own.
FRAME = (
    "config = configure(globals())", "check_config(config, world_size)", "run.choose_device_and_dtype(",
    "resumed = run.find_checkpoint(", "stop_signal = StopSignal()", "world = run.join(", "seed_everything(seed)",
    "set_trainable(raw_model", "parts = run.set_up(", "skipped = run.start(", "log = RunLog(",
    "save = partial(run.save,", "def evaluate_now(step: int)", "run.rank(parts, step,",
    "if ranks.any_rank(log.lacks_evaluation(eval_every)):", "stop_signal.begin()",
    "warmup, stopping = run.warmup_of(config), False",
    "learning_rate_at(", "ddp.expect_step(opt, lr)", "ddp.sync = ", "scaler.scale(", ").backward()",
    "# >>> optimizer step", "# <<< optimizer step", "log.advance()", "ranks.any_rank(stop_signal.received > 0)",
    "if step % log_every == 0 or last or stopping:", "log.train(step,", ">= max_skipped:",
    "saving, evaluating = step % save_every == 0 or last or stopping, step % eval_every == 0 or last",
    "if saving or evaluating:", "ddp.flush()  # updates that wait for the next forward", "        if saving:",
    "save(step, skipped", "if evaluating:  # after the save", "mark_time += time.perf_counter() - pause",
    "run.finish(parts, log, config, __file__,", "stop_signal if stopping else None",
)  # fmt: skip
# What stands once, in the frame, and so in no trainer.
FRAMED = (
    "torch.distributed", "import ddp", "make_hook", "DDP(", "Optimizer(", "GradScaler(", "torch.compile(",
    "load_train_state", "find_latest", "write_config", "ranks.close", "ranks.init", "exit_code", "run_card",
    "gc.freeze",
)  # fmt: skip


def missing_of_frame(source: str) -> list[str]:
    """The parts of FRAME that do not come in their order, and the parts of FRAMED that are there."""
    missing, place = [], 0
    for part in FRAME:
        found = source.find(part, place)
        if found < 0:
            missing.append(part)
        else:
            place = found + len(part)
    return missing + [f"not {part}" for part in FRAMED if part in source]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_has_the_whole_frame(name):
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8").partition("check_config(config: dict")[2]
    assert missing_of_frame(source) == []
    for part in FRAME:  # each part is seen to be missing
        assert part in missing_of_frame(source.replace(part, "")), part


def test_the_start_and_the_end_of_a_run_stand_once():
    sources = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
    for part in ("= powersgd.make_hook(", "= ddp.DDP(", "checkpoint.find_latest(", "torch.amp.GradScaler(device"):
        assert [name for name, text in sources.items() if part in text] == ["groundup.train.run"], part


def test_trainers_use_no_name_that_nothing_defines():
    """With a star import ruff reports what may be undefined (F405) and no longer what is (F821)."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F405", "--output-format=json"]
    done = subprocess.run([*command, *(f"{name}.py" for name in TRAINERS)], cwd=ROOT, capture_output=True, text=True)
    names = {re.search("`(.*?)`", found["message"])[1] for found in json.loads(done.stdout)}
    assert "grad_clip" in names and names <= set(vars(settings)), names - set(vars(settings))


def optimizer_step(name: str) -> str:
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    return source.partition("# >>> optimizer step")[2].partition("# <<< optimizer step")[0]


def test_optimizer_step_is_the_same_everywhere():
    first, *rest = [name for name in TRAINERS if (ROOT / f"{name}.py").exists()]
    assert "ddp.step(" in optimizer_step(first)
    for name in rest:
        assert optimizer_step(name) == optimizer_step(first), f"{name}: the step drifted from {first}; change both"


def test_text_is_ascii_in_code():
    for path in FILES.values():
        lines = path.read_text(encoding="utf-8").splitlines()
        bad = [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if not line.isascii()]
        assert not bad or path.stem == "prepare", bad  # prepare.py carries a few Chinese sentences as data
