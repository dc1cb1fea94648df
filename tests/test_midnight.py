"""Runs that go on after midnight, with a chat template that writes the date: equal to undisturbed ones.

prepare.py has its own test, in tokens/test_tokenizer_files.py.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tokenizer as tokenizer_module
from groundup.tokens.engines import to_json
from groundup.tokens.training import train
from groundup.train import huggingface
from groundup.train.checkpoint import Saver
from model import ModelConfig, Transformer
from tokenizer import CHAT_TEMPLATE, Tokenizer

ROOT = Path(__file__).parent.parent
DATED = "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n" + CHAT_TEMPLATE
ROWS = [{"prompt": f"{word}?", "chosen": f"{word} is so", "rejected": f"no {word}"} for word in "abcdefghijkl"]
CHATS = [{"prompt": row["prompt"], "response": row["chosen"]} for row in ROWS]
FLAGS = "--block_size=96 --max_steps=4 --save_every=2 --eval_every=99 --log_every=1 --val_fraction=0.2 --dtype=float32"
FLAGS += " --batch_size=2 --compile=False --learning_rate=0.01 --warmup_steps=0"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A small model whose template writes the date, and the rows beside it."""
    torch.set_num_threads(1)  # a forked process lacks the threads of this one, and would wait for them
    folder = tmp_path_factory.mktemp("base")
    made = train([json.dumps(row) for row in ROWS] * 3 + ["0123456789 Mar 2026 system"] * 3, 512)
    config = made.config | {"chat_template": DATED}
    dated = Tokenizer(made.files | {"tokenizer_config.json": to_json(config)})
    torch.manual_seed(0)
    cfg = ModelConfig(dated.vocab_size, block_size=96, n_layer=1, n_head=2, n_kv_head=2, n_embd=32)
    huggingface.write_model(folder, Transformer(cfg), dated)
    for name, rows in (("chats", CHATS), ("pairs", ROWS)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def run(script: str, day: str, out: Path, base: Path, *more: str, killed_at: int = 0) -> None:
    """Run a trainer in a copy of this process, on that day. It ends without a word after a save at `killed_at`."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    try:
        save = Saver.save

        def save_and_end(saver: Saver, step: int, *args: object) -> None:
            save(saver, step, *args)
            if step == killed_at:
                saver.wait()
                os._exit(0)

        Saver.save = save_and_end
        tokenizer_module.today = lambda: day
        data = base / ("chats.jsonl" if script == "sft.py" else "pairs.jsonl")
        sys.argv = [script, f"--init_from={base}", f"--data={data}", f"--out_dir={out}", *FLAGS.split()]
        sys.argv += [*more, *(["--eval_answers=0"] if script == "sft.py" else [])]
        runpy.run_path(str(ROOT / script), run_name="__main__")
        os._exit(0)
    except SystemExit as end:
        os._exit(end.code or 0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def losses(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("script", ["sft.py", "dpo.py", "reward.py"])
def test_a_run_over_midnight_is_as_if_undisturbed(script, base, tmp_path):
    run(script, "2026-03-01", tmp_path / "undisturbed", base)
    run(script, "2026-03-01", tmp_path / "killed", base, killed_at=2)
    assert len(losses(tmp_path / "killed")) < 4
    run(script, "2026-03-02", tmp_path / "killed", base)
    run(script, "2026-03-02", tmp_path / "later", base)
    weights = [
        load_file(tmp_path / name / "step_000004" / "model.safetensors") for name in ("undisturbed", "killed", "later")
    ]
    assert len(losses(tmp_path / "undisturbed")) == 4
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    # the date is a part of what is learned from
    assert losses(tmp_path / "later") != losses(tmp_path / "undisturbed")
    saved = Tokenizer.load(tmp_path / "killed")
    assert "01 Mar 2026" in saved.decode(saved.render([{"role": "user", "content": "a"}])[0])
    # one that replaces it is a new run
    run(script, "2026-03-02", tmp_path / "killed", base, "--resume=never", "--overwrite=True")
    assert losses(tmp_path / "killed") == losses(tmp_path / "later")
