"""What holds for the repository as a whole: who imports whom, importing does nothing, every script explains itself."""

import ast
import functools
import re
import sys
from pathlib import Path

import forks
import pytest

from configurator import comments_of, defaults_of, is_key, read_file
from groundup.demo import debug_data, debug_model
from model import ModelConfig

ROOT = Path(__file__).parent.parent
# Floors, bottom to top: a file imports from floors below, or from its own room.
FLOORS = (
    ("configurator", "groundup.errors"),
    ("groundup.files", "groundup.demo"),
    ("groundup.compile_c",),
    ("tokenizer", "groundup.tokens.bpe", "groundup.tokens.engines", "groundup.tokens.sandbox",
     "groundup.tokens.spans", "groundup.tokens.templates", "groundup.tokens.text_tokenizer",
     "groundup.tokens.training"),
    ("groundup.tokens",),
    ("groundup.kernels",),
    ("model",),
    ("groundup.text",),
    ("groundup.train", "ddp"),
    ("groundup.generate",),
    ("groundup.align",),
    ("groundup.scores",),
    ("groundup.demo.debug_model",),
    ("prepare", "pretrain", "sft", "dpo", "reward", "rl", "sample", "serve", "evaluate"),
)
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in [*ROOT.glob("*.py"), *ROOT.glob("groundup/**/*.py")]
    if path.name != "__init__.py"
}
TRAINERS = ("pretrain", "sft", "dpo", "reward", "rl")
SCRIPTS = ("tokenizer", "prepare", *TRAINERS, "tools/merge", "sample", "serve", "evaluate")


@functools.cache
def imports(path: Path) -> tuple[set[str], set[str]]:
    """The files of the project that a file imports, also within a function: those of its `if __name__ == "__main__":`
    block and those for type checkers, and all others."""
    later, others = set(), set()
    for part in ast.parse(path.read_text(encoding="utf-8")).body:
        test = ast.unparse(part.test) if isinstance(part, ast.If) else ""
        names = later if "__main__" in test or test == "TYPE_CHECKING" else others
        for node in ast.walk(part):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return later & FILES.keys(), others & FILES.keys()


def room(name: str) -> str:
    """The longest entry of FLOORS that `name` is or lies in."""
    return max((r for floor in FLOORS for r in floor if f"{name}.".startswith(f"{r}.")), key=len)


def floor(name: str) -> int:
    return next(k for k, rooms in enumerate(FLOORS) if room(name) in rooms)


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_down_or_stay_in_the_room(name):
    for other in set.union(*imports(FILES[name])):
        beside = room(other) == room(name) or floor(name) == floor(other) < len(FLOORS) - 1
        assert floor(other) < floor(name) or beside, f"{name} imports {other}"


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: imports(path)[1] for name, path in FILES.items()}
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"a cycle among {', '.join(sorted(graph))}"


def test_importing_prints_nothing_and_makes_nothing(tmp_path):
    """In a fork, which has imported torch; the project's own files are imported anew, but for one that torch lets
    register its operators once."""
    names = sorted(FILES.keys() - {"groundup.kernels.attention"})
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); names = {names}\n"
    code += "for name in names: sys.modules.pop(name, None)\n"
    code += "for name in names: __import__(name)"
    done = forks.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_key_with_a_comment(script):
    done = forks.run([sys.executable, str(ROOT / f"{script}.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.partition("keys (")[2].splitlines()[1:] if line]
    assert len(lines) > 2
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        assert name in ("input", "max_steps") or len(rest.split()) > 2, f"{script}: {name} has no comment"


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.py")), ids=lambda path: path.name)
def test_configs_set_known_keys_and_say_how_to_run(path, monkeypatch):
    """And open with a docstring that gives the command."""
    for name in ("make_debug_data", "make_debug_rows"):  # test_startup.py lets them
        monkeypatch.setattr(debug_data, name, lambda *args: None)
    monkeypatch.setattr(debug_model, "make_debug_model", lambda *args: None)
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    script = next(name for name in TRAINERS if f"{name}.py config/{path.name}" in doc)
    defaults = {k: v for k, v in defaults_of(ROOT / f"{script}.py").items() if is_key(k, v)}
    assert read_file(str(path), defaults)


# ---- the trainers ----------------------------------------------------------------------

# What people come to read stands in every trainer, in this order.
IN_ORDER = (
    "config = configure(globals())", "ranks.init(", "model = ", "set_trainable(model", "checkpoint.find(",
    "model.to(torch_device)", "torch.compile(", "torch.amp.GradScaler(", "DDP(model", "Optimizer(",
    "checkpoint.restore(", "log = RunLog(", "saver = Saver(", "log.lacks_evaluation(eval_every)",
    "stop_signal.begin()", "for step in range(", "learning_rate_at(", "ddp.sync = ", "scaler.scale(",
    ").backward()", "# >>> optimizer step", "ddp.step(opt", "# <<< optimizer step", "log.train(step,",
    "ddp.flush()", "saver.save(step, model", "saver.tidy()", "saver.close()", "log.finish(",
    "ranks.close()", "sys.exit(",
)  # fmt: skip
# Settings whose default depends on the stage; all others are equal wherever they are.
OF_THE_STAGE = {
    "out_dir", "data", "init_from", "val_fraction", "block_size", "batch_size", "max_steps", "epochs", "optimizer",
    "learning_rate", "min_lr", "warmup_steps", "weight_decay", "eval_every", "eval_steps", "log_every", "save_every",
    "dropout", "pack", "loss", "seed",
}  # fmt: skip
# And those that mean another thing there.
OF_ITS_OWN = {
    "loss", "init_from", "val_data", "val_fraction", "data", "batch_size", "block_size", "eval_steps", "pack", "seed",
    "max_steps", "epochs", "dropout", "learning_rate", "sample_prompts", "eval_every", "warmup_steps", "out_dir",
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_shows_what_it_builds_in_order(name):
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8").partition('if __name__ == "__main__":\n    config')[2]
    source, place = "    config" + source, 0
    for part in IN_ORDER:
        found = source.find(part, place)
        assert found >= 0, f"{name}: {part} is missing, or comes too early"
        place = found


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_defines_every_setting_that_it_reads(name):
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    assert "import *" not in source
    settings = [key for key, value in defaults_of(ROOT / f"{name}.py").items() if is_key(key, value)]
    assert len(settings) <= 55
    rooms = (*ROOT.glob("groundup/train/*.py"), *ROOT.glob("groundup/align/*.py"))
    helpers = "".join(path.read_text(encoding="utf-8") for path in rooms)
    for key in settings:
        used = len(re.findall(rf"\b{key}\b", source)) > 1 or f'config["{key}"]' in helpers
        used = used or key in ModelConfig.__dataclass_fields__  # choose_architecture reads these
        assert used, f"{name}: nothing reads {key}"


def test_settings_of_the_same_name_mean_the_same():
    first: dict[str, tuple[str, object, str]] = {}
    for name in TRAINERS:
        comments = comments_of(ROOT / f"{name}.py")
        for key, value in defaults_of(ROOT / f"{name}.py").items():
            if not is_key(key, value):
                continue
            where, default, comment = first.setdefault(key, (name, value, comments[key]))
            assert type(value) is type(default) or key == "pack", (key, where, name)
            assert key in OF_THE_STAGE or value == default, f"{key} differs in {where} and {name}"
            assert key in OF_ITS_OWN or comments[key] == comment, f"the comment of {key}: {where}, {name}"


def optimizer_step(name: str) -> str:
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    step = source.partition("# >>> optimizer step")[2].partition("# <<< optimizer step")[0]
    return "\n".join(map(str.strip, step.splitlines()))


def test_optimizer_step_is_the_same_everywhere():
    first, *rest = [name for name in TRAINERS if (ROOT / f"{name}.py").exists()]
    assert "ddp.step(" in optimizer_step(first)
    for name in rest:
        assert optimizer_step(name) == optimizer_step(first), f"{name}: the step drifted from {first}; change both"


@pytest.mark.parametrize("name", TRAINERS)
def test_a_step_asks_the_other_ranks_once(name):
    """In ddp.step: what else waits for all ranks stands in an evaluation, a save or a log line."""
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    after = source.partition("# <<< optimizer step")[2].partition("# save, then evaluate")[0]
    always = after.partition("if step % log_every == 0")[0]
    assert "stopping = ddp.stopping" in always and "ranks." not in always


def test_text_is_ascii_in_code():
    for path in FILES.values():
        lines = path.read_text(encoding="utf-8").splitlines()
        bad = [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if not line.isascii()]
        assert not bad or path.stem == "prepare", bad  # prepare.py carries a few Chinese sentences as data
