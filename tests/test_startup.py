"""What a script imports before it does anything: --help and mistakes are answered at once, and a run starts soon.

No clock: a slow library is named together with the line that imports it. In a process of its own a list of such
libraries is watched while all scripts are imported, or one of them runs.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import model
from groundup.kernels import attention

ROOT = Path(__file__).parent.parent
FILES = [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("groundup/**/*.py")]
NAMES = sorted(
    file.stem if file.parent.name == "tools" else ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in FILES
    if file.name != "__init__.py"
)
WITHOUT_TORCH = {"configurator", "tokenizer", "prepare"}
WITHOUT_TORCH |= {"largest", "reading", "self_instruct", "sums", "groundup.tokens.token_files"}
WITHOUT_TORCH |= {name for name in NAMES if name.startswith(("groundup.files", "groundup.text", "groundup.demo"))}
WITHOUT_TORCH -= {"groundup.demo.debug_model"}
# torch._dynamo, with sympy, takes as long as all of torch, scipy (behind datasketch) half a second.
SLOW = {"torch._dynamo", "torch._inductor", "sympy", "scipy", "datasketch", "sklearn", "pandas", "pyarrow"}
SLOW |= {"matplotlib", "tensorboard", "transformers", "tokenizers", "trl", "peft"}
TUNERS = {  # and what makes them short
    "sft": "--eval_steps=1 --eval_answers=1 --eval_new_tokens=4 --total_batch_tokens=0",
    "dpo": "--eval_steps=1 --total_batch_pairs=0", "reward": "--eval_steps=1 --total_batch_pairs=0",
    "rl": "--eval_prompts=2 --prompts_per_step=4 --group_size=2 --max_new_tokens=8",
}  # fmt: skip

WATCH = """if True:
    import sys, traceback

    class Watch:
        def find_spec(self, name, path=None, target=None):
            if name in slow:
                ours = [line for line in traceback.extract_stack() if line.filename.startswith(root + "/")]
                ours = [line for line in ours if "site-packages" not in line.filename] or traceback.extract_stack()
                print(f"SLOW {ours[-1].filename}:{ours[-1].lineno} imports {name}: {ours[-1].line}", flush=True)

    root, slow = sys.argv[1], set(sys.argv[2].split())
    sys.path[:0] = [root, root + "/tools"]
    sys.meta_path.insert(0, Watch())
    del sys.argv[1:3]
"""
IMPORT = "    import importlib\n    for name in sys.argv[1].split():\n        importlib.import_module(name)\n"
ALONE = """
    import sample
    for name in sys.modules:
        if name.startswith(("groundup.text", "prepare")):
            print(f"SLOW sample.py imports {name}")
"""
THREADS = """
    import threading
    if threading.active_count() > 1:
        print(f"SLOW an import begins {threading.enumerate()}")
"""
RUN = """
    import runpy
    for command in sys.argv[2:]:
        sys.argv = [*command.split(), "--max_steps=2", "--warmup_steps=1"]
        try:
            runpy.run_path(root + "/" + sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
"""


def slow_imports(code: str, slow: set[str], *args: str, cwd: Path = ROOT) -> list[str]:
    """Which lines imported one of `slow` while `code` ran, in a process of its own."""
    command = [sys.executable, "-c", WATCH + code, str(ROOT), " ".join(slow), *args]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("SLOW")]


def test_what_needs_no_torch_imports_neither_it_nor_anything_slow():
    assert slow_imports(IMPORT, SLOW | {"torch"}, " ".join(sorted(WITHOUT_TORCH))) == []


def test_an_import_is_found_with_the_line_that_makes_it(tmp_path):
    """Also when a library makes it."""
    (tmp_path / "head.py").write_text("import json\nimport wave\n", encoding="utf-8")
    here = f"    root = {str(tmp_path)!r}\n    sys.path.append(root)\n"
    assert slow_imports(here + IMPORT, {"wave"}, "head") == [f"SLOW {tmp_path / 'head.py'}:2 imports wave: import wave"]
    (tmp_path / "head.py").write_text("\nimport html\n", encoding="utf-8")
    (found,) = slow_imports(here + IMPORT, {"html.entities"}, "head")
    assert found == f"SLOW {tmp_path / 'head.py'}:2 imports html.entities: import html"


@pytest.mark.slow
def test_no_head_and_no_run_that_compiles_nothing_imports_anything_slow(tmp_path):
    """All in one process: what one of them imports would be seen as long as none before it did. sample.py, the first,
    imports nothing that prepares data, and no head begins a thread. The runs are the debug configurations; in bfloat16
    attention.c is called, by an operator of ours."""
    one = "pretrain.py config/debug.py --eval_steps=1 --total_batch_tokens=0"
    runs = [one, f"{one} --dtype=bfloat16 --out_dir=out/debug_bfloat16 --sample_prompts="]
    runs += [f"{script}.py config/debug_{script}.py {flags}" for script, flags in TUNERS.items()]
    shutil.copytree(ROOT / "tests/golden/data", tmp_path / "data/debug")
    for name, rows in (("dpo", "pairs"), ("reward", "pairs")):
        shutil.copy(ROOT / f"tests/golden/data/{rows}.jsonl", tmp_path / f"data/debug/{name}.jsonl")
    shutil.copytree(ROOT / "tests/golden/model", tmp_path / "data/debug/model")
    (tmp_path / "config").symlink_to(ROOT / "config")
    assert slow_imports(ALONE + IMPORT + THREADS + RUN, SLOW, " ".join(NAMES), *runs, cwd=tmp_path) == []
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"debug", "debug_bfloat16", *(f"debug_{script}" for script in TUNERS)}


@pytest.mark.slow
def test_documents_one_by_one_are_in_no_graph(monkeypatch):
    """What keeps them out is torch's own decorator that imports torch._dynamo late. Other numbers of documents: no
    graph is made anew; without the decorator each number has its own."""
    monkeypatch.setattr(attention, "MASKED_LENGTH", 0)
    graphs = []

    def graphs_of(*lengths: int) -> list[int]:
        """How many there are after each length."""
        torch._dynamo.reset()
        graphs.clear()
        cfg = model.ModelConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=16, block_size=32)
        net = model.Transformer(cfg)
        backend = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
        for part in net.layers:
            part.forward = torch.compile(part.forward, backend=backend, dynamic=False)
        found = []
        for length in lengths:
            net(torch.zeros(2, 32, dtype=torch.int64), documents=(torch.arange(32) // length).expand(2, -1))
            found.append(len(graphs))
        return found

    one, two, four = graphs_of(32, 16, 7)
    assert one == two == four > 0
    plain = attention.attention_by_document.__wrapped__
    monkeypatch.setattr(attention, "attention_by_document", plain)
    one, two = graphs_of(32, 16)
    assert one < two
