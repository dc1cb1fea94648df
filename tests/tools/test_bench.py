"""tools/bench.py and its rows: statistics by hand, turns, every cheap row, missing libraries, errors."""

import dataclasses
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch

import configurator
import tokenizer
from groundup.errors import UserError
from groundup.train.plan import flops_per_token
from model import Transformer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import bench  # noqa: E402
import bench_ddp  # noqa: E402
import bench_model  # noqa: E402
import bench_text  # noqa: E402
import bench_tune  # noqa: E402
import timing  # noqa: E402

CPU = torch.device("cpu")
DEFAULTS = dict(vars(bench))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A few milliseconds of each step are enough: no figure is looked at."""
    monkeypatch.setattr(timing, "repeated", partial(timing.repeated, least_s=0.002))


def run(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/bench.py", *flags]
    return forks.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


def options(folder: Path = Path(), dtype: torch.dtype = torch.float32, **changes: object) -> timing.Options:
    keys = {key: value for key, value in DEFAULTS.items() if configurator.is_key(key, value)}
    keys |= {"repeats": 1, "shapes": "tiny", "optimizer": "adamw", "compile": "none", "apart": False}
    keys |= {"quick": True, "tokens": 128}
    return timing.Options(**keys | {"device": CPU, "dtype": dtype, "folder": folder} | changes)


def measured(row: str, how: timing.Options) -> list[timing.Line]:
    return [line for case in bench.ROWS[row](how) for line in timing.measure(row, case, how.repeats)]


def settings(**changes: object) -> dict:
    keys = {key: value for key, value in vars(options(**changes)).items() if key != "folder"}
    return keys | {"device": "cpu", "dtype": "float32"}


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_lines_by_hand():
    """Ours 2, 4 and 1 seconds for 100 tokens, the peer 3, 4 and 4: rates 50, 25, 100; ratios 1.5, 1, 4."""
    seconds = {"peer": [3.0, 4.0, 4.0], "ours": [2.0, 4.0, 1.0]}
    case = timing.Case("x", {}, "tok/s", ["peer"], work=100, unlimited="peer", notes={"ours": "n"})
    peer, ours = timing.lines("train", case, seconds, limit=200)
    assert (ours.samples, ours.median) == ([50.0, 25.0, 100.0], 50.0)
    assert ours.ratios == {"peer": [1.5, 1.0, 4.0]} and peer.ratios == {}
    assert (peer.samples, peer.limit, ours.limit) == ([100 / 3, 25.0, 25.0], 0.0, 200)
    shown = timing.text(ours)
    assert "50 tok/s" in shown and "150%" in shown and " 25%" in shown and "1.50 (1.00 to 4.00) peer; n" in shown


def test_seconds_stay_seconds():
    (line,) = timing.lines("startup", timing.Case("x", {}, "s", ["absent"]), {"ours": [2.0, 1.0]})
    assert (line.samples, line.median, line.ratios) == ([2.0, 1.0], 1.5, {})


def test_sides_take_turns():
    """Two repeats after a warm-up, each round from another side on; what the warm-up returned is not kept."""
    order: list[str] = []

    def side(name: str):
        return lambda: order.append(name) or len(order)

    found = timing.alternate({"a": side("a"), "b": side("b"), "c": side("c")}, repeats=2)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_a_step_is_repeated_until_it_can_be_timed(monkeypatch):
    monkeypatch.setattr(timing, "device_seconds", lambda call, device: (call(), 0.05)[1])
    calls = []
    side = timing.repeated(lambda: calls.append(1), CPU, least_s=0.2)
    assert len(calls) == 3  # two to get ready, one timed: 0.05 s, so four make 0.2 s
    assert side() == 0.05 / 4 and len(calls) == 3 + 4


# ---- train ----------------------------------------------------------------------------------------------------------


def test_train_counts_parameters_as_transformers_does(monkeypatch):
    """A rate of 1e9 FLOP/s allows 1e9 / (FLOPs of a token) tokens/s."""
    monkeypatch.setattr(timing, "matmul", lambda device, dtype: lambda: 1e9)
    lines = measured("train", options(optimizer="adamw,muon"))
    assert [line.side for line in lines] == ["transformers", "ours, adamw", "ours, muon"]
    assert len({line.note for line in lines}) == 1  # "0.1M parameters"
    assert all(len(line.samples) == 1 and line.median > 0 for line in lines)
    flops = flops_per_token(bench_model.shapes_only(bench_model.SHAPES["tiny"]), 64)
    assert {line.limit for line in lines} == {1e9 / flops}
    assert [list(line.ratios) for line in lines] == [[], ["transformers"], ["transformers"]]


def test_without_transformers_ours_is_still_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (ours,) = measured("train", options())
    assert (ours.side, ours.ratios) == ("ours, adamw", {}) and ours.samples
    assert capsys.readouterr().out.startswith("transformers is left out: import of transformers halted")


def test_each_way_of_ours_has_its_peer(monkeypatch):
    """Compiled beside compiled, plain beside plain; ratios to both."""
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: f)
    lines = measured("train", options(compile="none,blocks"))
    assert [line.side for line in lines] == [
        "transformers", "transformers, compiled", "ours, adamw", "ours, adamw, blocks",
    ]  # fmt: skip
    assert all(list(line.ratios) == ["transformers", "transformers, compiled"] for line in lines[2:])
    assert len({line.note for line in lines}) == 1


def a_side(library: str) -> tuple[Callable[[], int], str]:
    importlib.import_module(library)
    turns = iter((os.getpid, lambda: int("x"), lambda: os._exit(3)))
    return lambda: next(turns)(), f"has {library}"


@pytest.mark.slow
def test_a_side_in_a_process_of_its_own(capfd):
    with timing.apart({name: partial(a_side, name) for name in ("json", "no_such_library")}) as made:
        assert capfd.readouterr().out == "no_such_library is left out: No module named 'no_such_library'\n"
        ((call, about),) = made.values()
        assert about == "has json" and call() != os.getpid()
        for message in ("json: ValueError: invalid literal", "json: BrokenProcessPool: "):
            with pytest.raises(UserError, match=message):
                call()


NANOGPT = """import torch
class GPTConfig:
    def __init__(self, vocab_size, n_embd, **kwargs):
        self.vocab_size, self.n_embd = vocab_size, n_embd
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters: 0.00M")
        self.table = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.head = torch.nn.Linear(config.n_embd, config.vocab_size)
    def forward(self, idx, targets):
        logits = self.head(self.table(idx))
        assert logits.dtype == torch.float32
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nanogpt_has_a_dtype_of_its_own(dtype, tmp_path, monkeypatch):
    """On a CPU float32, whatever ours has: the limit of another dtype is not its limit."""
    monkeypatch.setattr(timing, "matmul", lambda device, dtype: lambda: 1e9)  # bfloat16 takes a CPU seconds
    (tmp_path / "model.py").write_text(NANOGPT, encoding="utf-8")
    found = measured("train", options(nanogpt=str(tmp_path), dtype=dtype))
    lines = {line.side: line for line in found}
    theirs, ours = lines["nanoGPT"], lines["ours, adamw"]
    assert theirs.note == "0.1M parameters, float32" and ours.limit > 0 and "nanoGPT" in ours.ratios
    assert (theirs.limit > 0) is (dtype == torch.float32)


# ---- sft, dpo -------------------------------------------------------------------------------------------------------


def test_tuning_is_timed_on_conversations_and_on_pairs(tmp_path, monkeypatch):
    """trl's log-probabilities of the reference are ours; packed rows waste fewer places."""
    rows = {"chat": talk, "preference": lambda k: {"prompt": f"{k}?", "chosen": f"{k} {k}.", "rejected": "no"}}
    monkeypatch.setattr(bench_tune, "docs_rows", lambda kind: map(rows[kind], range(60)))
    monkeypatch.setattr(bench_tune, "STEPS", 2)
    padded, packed = measured("sft", options(tmp_path, batch_size=4, block_size=128))
    assert (padded.side, packed.side, list(packed.ratios)) == ("padded", "packed", ["padded"])
    waste = [float(line.note.split()[1]) for line in (padded, packed)]
    assert waste[0] > waste[1] and min(padded.median, packed.median) > 0
    (tmp_path / "pairs").mkdir()
    *theirs, ours = measured("dpo", options(tmp_path / "pairs", batch_size=4, block_size=128))
    assert [line.side for line in theirs] == ["trl, precomputed", "trl"] == list(ours.ratios)
    assert float(ours.note.split("within ")[1].split()[0]) < 1e-3


def talk(k: int) -> dict:
    answer = "A few words, and a number. " * (k % 8 + 1)
    return {"messages": [{"role": "user", "content": f"{k}?"}, {"role": "assistant", "content": answer}]}


# ---- ddp ------------------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_measure_the_cases_in_turns(tmp_path, monkeypatch):
    """Two ranks send a ring's share of 3M float32 gradients, PowerSGD a twentieth of it."""
    monkeypatch.setattr(bench_ddp, "MODEL", dataclasses.replace(bench_ddp.MODEL, n_layer=2))
    code = f"import json, sys\nsys.path[:0] = {sys.path}\nimport bench_ddp\nfrom model import ModelConfig\n"
    code += f"bench_ddp.STEPS, bench_ddp.SEQUENCES, bench_ddp.MODEL = 1, 1, {bench_ddp.MODEL}\n"
    code += "bench_ddp.LENGTH = 8\nbench_ddp.run_rank(*json.loads(sys.argv[1]))\n"
    (tmp_path / "small.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(bench_ddp, "__file__", str(tmp_path / "small.py"))
    # Forks have no -W of their own, and torch is imported.
    monkeypatch.setattr(subprocess, "Popen", lambda line, **how: forks.Popen([line[0], *line[3:]], **how))
    lines = {line.side: line for line in bench_ddp.ddp_row(options(tmp_path, cases="torch,powersgd"))}
    assert list(lines) == ["compute", "torch", "powersgd"]
    sent = {side: float(line.note.split()[0]) for side, line in lines.items()}
    n_bytes = 4 * sum(p.numel() for p in Transformer(bench_ddp.MODEL).parameters())
    assert n_bytes / 2**20 <= sent["torch"] < 1.1 * n_bytes / 2**20
    assert sent["powersgd"] < sent["torch"] / 20
    assert list(lines["powersgd"].ratios) == ["torch"]


def test_what_overlap_could_win_by_hand(monkeypatch):
    """Buckets of 1000 B ready after 10 and 30 ms, link of 100 B/ms: sent until 20 and 40 ms."""
    monkeypatch.setattr(bench_ddp, "STEPS", 1)
    buckets = [SimpleNamespace(grad=torch.zeros(250)) for _ in range(2)]
    times = [t + k for k in range(3) for t in (0, 0.010, 0.030)]
    ready = bench_ddp.ready_ms(SimpleNamespace(times=times, buckets=buckets))
    assert ready == pytest.approx([10, 30])
    assert bench_ddp.ideal_ms([ready, [5, 5]], [1000, 1000], 20.0) == pytest.approx(40.0)
    samples = {"compute": 35.0, "comm": 20.0, "sequential": 60.0, "ours": 45.0}
    found = {"samples": [{key: [(ms, 0.0)] for key, ms in samples.items()}], "ready": [ready], "sizes": [1000, 1000]}
    monkeypatch.setattr(bench_ddp, "launch", lambda *_: found)
    lines = {line.side: line for line in bench_ddp.ddp_row(options(cases="comm,sequential,ours"))}
    assert lines["ours"].note == f"0.00 MiB sent, eta {(60 - 45) / (60 - 40):.2f}"
    assert lines["ours"].samples == pytest.approx([1000 / 45]) and lines["ours"].limit == pytest.approx(1000 / 35)


# ---- checkpoint, generate, text -------------------------------------------------------------------------------------


def test_checkpoint_rates_are_of_the_bytes_on_the_disk(tmp_path):
    lines = measured("checkpoint", options(tmp_path, checkpoint_dir=str(tmp_path)))
    assert [line.side for line in lines] == ["disk", "torch.save", "ours", "ours, training waits"]
    n = sum(p.numel() for p in Transformer(bench_model.SHAPES["tiny"]).parameters())
    shown = float(lines[0].case.split(", ")[1].removesuffix(" MB"))
    assert shown == pytest.approx(3 * 4 * n / 1e6, abs=1)  # weights and two moments
    assert not list(tmp_path.iterdir())


def test_transformers_generates_the_same_texts():
    *_, theirs, ours = measured("generate", options(batch_size=2, new_tokens=4))
    assert (theirs.ratios, list(ours.ratios)) == ({}, ["transformers"])
    assert ours.note.endswith("2/2 texts equal")


def test_half_a_surrogate_pair_is_written_as_a_question_mark(monkeypatch):
    monkeypatch.setattr(bench_text, "python_docs", lambda: iter(["a\ud83d", "猫", "a?"]))
    assert list(bench_text.corpora(options())) == [("docs", ["a?", "猫"], 5e-6)]


def test_the_peers_survivors_are_those_of_single_updates():
    """All shingles at once give datasketch the signature that they give one by one."""
    from datasketch import MinHash

    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(50)}" for _ in range(200)) for _ in range(20)]
    texts[5], texts[9] = texts[2] + " end", texts[3]
    sets = bench_text.elements(texts)
    one, all_at_once = (MinHash(num_perm=128, seed=1, hashfunc=int) for _ in range(2))
    for number in sets[0]:
        one.update(number)
    all_at_once.update_batch(sets[0])
    assert (one.hashvalues == all_at_once.hashvalues).all()
    assert bench_text.plain_survivors(sets) == bench_text.our_survivors(texts) == [5, 9]


def some_lines(options: timing.Options):
    yield timing.Line("dedup", "x", "ours", "s", [1.0])
    raise KeyError("what nobody expected")


def test_what_was_measured_before_an_error_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.ROWS, "dedup", some_lines)
    first, last = bench.attempted("dedup", options(tmp_path / "dedup"))
    assert first.samples == [1.0] and not first.failed
    assert last.failed and last.note == "failed: KeyError: 'what nobody expected'"
    assert "Traceback" in capsys.readouterr().err and "failed: KeyError" in timing.text(last)


def test_a_failed_row_is_status_1_and_in_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.ROWS, "dedup", some_lines)
    assert bench.main(settings(rows="dedup", out=str(tmp_path / "b.json"))) == 1
    assert "failed: KeyError" in capsys.readouterr().out
    lines = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))["lines"]
    assert [line["failed"] for line in lines] == [False, True]


def test_encoders_that_differ_are_not_timed(tmp_path, monkeypatch):
    texts = ["The spring garden has a cat. " * 20, "春天的花园里有一只猫。" * 20]
    monkeypatch.setattr(bench_text, "python_docs", lambda: iter(texts))
    lines = measured("tokenize", options(tmp_path, vocab_size=384))
    assert [line.side for line in lines] == ["tiktoken", "tokenizers", "ours", "ours, arrays"]
    monkeypatch.setattr(tokenizer.Tokenizer, "encode_array", lambda self, text: [1, 2])
    with pytest.raises(UserError, match="ids of ours, arrays"):
        measured("tokenize", options(tmp_path, vocab_size=384))


def test_readers_give_the_texts_of_the_bare_modules(tmp_path, monkeypatch):
    texts = ['The spring garden\nhas a "cat", and more. ' * 20, "春天的花园里有一只猫。" * 20]
    monkeypatch.setattr(bench_text, "python_docs", lambda: iter(texts))
    lines = measured("data", options(tmp_path))
    assert [line.side for line in lines[1::2]] == ["ours"] * 5 and {line.unit for line in lines} == {"MB/s"}
    monkeypatch.setattr(bench_text, "our_texts", lambda path: texts[:1])
    with pytest.raises(UserError, match="data: the texts differ, jsonl"):
        measured("data", options(tmp_path))


@pytest.mark.slow
def test_the_program(tmp_path):
    """A cheap row whose peer is there, as a process: table and file say the same; every sample is in the file."""
    done = run("--rows=dedup", "--quick=True", "--repeats=2", "--input=docs/*.md", f"--out={tmp_path / 'bench.json'}")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert {"date", "command", "hardware", "versions", "load_average", "lines"} == set(report)
    assert "--rows=dedup" in report["command"] and report["versions"]["torch"] == torch.__version__
    for line in report["lines"]:
        assert len(line["samples"]) == 2 and line["median"] == pytest.approx(sum(line["samples"]) / 2)
        assert f"{line['case']:32} {line['side']}" in done.stdout
    assert any(line["ratios"].get("datasketch") for line in report["lines"])


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("rows", "trian", "rows='trian' is none of all, train, head"),
        ("optimizer", "adam", "optimizer='adam' is none of adamw, muon"),
        ("shapes", "10M,11M", "shapes='11M' is none of tiny, 10M"),
        ("device", "tpu", "device.*tpu"),
    ],
)
def test_mistakes_are_one_line(key, value, words):
    with pytest.raises(UserError, match=words):
        bench.main(settings(rows="dedup") | {key: value})


def test_all_rows_are_named_in_help():
    text = next(line for line in (ROOT / "tools/bench.py").read_text("utf-8").splitlines() if line.startswith("rows ="))
    assert text.endswith(",".join(bench.ROWS))
