"""tools/bench.py and tools/timing.py: statistics by hand, turns, every cheap row, libraries that are missing."""

import importlib
import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

import tokenizer
from configurator import ConfigError
from model import Transformer, flops_per_token

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
TOOLS = ("bench", "bench_checkpoint", "bench_tokenizer", "bench_train", "timing")
bench, bench_checkpoint, bench_tokenizer, bench_train, timing = map(importlib.import_module, TOOLS)
CPU = torch.device("cpu")


def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "tools/bench.py", *flags], cwd=ROOT, capture_output=True, text=True)


def options(**changes: object) -> "bench_train.Options":
    plain = bench_train.Options(CPU, torch.float32, 1, 128, ["adamw"], [("none", "")], False, "")
    return plain._replace(**changes)


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_lines_by_hand():
    """Ours 2, 4 and 1 seconds for 100 tokens, the peer 3, 4 and 4: rates 50, 25, 100; ratios 1.5, 1, 4."""
    seconds = {"peer": [3.0, 4.0, 4.0], "ours": [2.0, 4.0, 1.0]}
    peer, ours = timing.lines("train", "x", seconds, "tok/s", ["peer"], work=100, limit=200, notes={"ours": "n"})
    assert (ours.samples, ours.median, ours.spread) == ([50.0, 25.0, 100.0], 50.0, 75 / 50)
    assert ours.ratios == {"peer": [1.5, 1.0, 4.0]} and peer.ratios == {}
    assert peer.samples == [100 / 3, 25.0, 25.0]
    shown = timing.text(ours)
    assert "50 tok/s" in shown and "150%" in shown and " 25%" in shown and "1.50 (1.00 to 4.00) peer; n" in shown


def test_seconds_stay_seconds():
    (line,) = timing.lines("startup", "x", {"ours": [2.0, 1.0]}, "s", ["absent"])
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


def test_a_written_file_is_whole_and_cannot_be_compressed(tmp_path):
    timing.write_file(tmp_path / "f", 100_001)
    content = (tmp_path / "f").read_bytes()
    assert len(content) == 100_001 and len(zlib.compress(content)) > 100_000


def test_until_line_stops_the_process():
    code = "import time\nprint('one', flush=True)\nprint('two 2', flush=True)\ntime.sleep(600)"
    seconds, printed = timing.until_line([sys.executable, "-c", code], "two")
    assert printed == "one\ntwo 2\n" and seconds < 300
    with pytest.raises(timing.BenchError, match="without a line 'two'.*boom"):
        timing.until_line([sys.executable, "-c", "raise SystemExit('boom')"], "two")


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_train_counts_parameters_as_transformers_does():
    lines = bench_train.compare("tiny", options(optimizers=["adamw", "muon"]))
    assert [line.side for line in lines] == ["transformers", "ours, adamw", "ours, muon"]
    assert len({line.note for line in lines}) == 1  # "0.1M parameters"
    assert all(len(line.samples) == 1 and line.median > 0 and line.limit > 0 for line in lines)
    assert [list(line.ratios) for line in lines] == [[], ["transformers"], ["transformers"]]


def test_the_limit_is_that_of_the_matrix_products(monkeypatch):
    """A ceiling of 1e9 FLOP/s allows 1e9 / (FLOPs of a token) tokens/s."""
    monkeypatch.setattr(timing, "matmul", lambda device, dtype: lambda: 1e9)
    line = bench_train.compare("tiny", options())[-1]
    assert line.limit == pytest.approx(1e9 / flops_per_token(bench_train.SHAPES["tiny"], 64))


def test_without_transformers_ours_is_still_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    ours, missing = bench_train.compare("tiny", options())
    assert (ours.side, ours.ratios) == ("ours, adamw", {}) and ours.samples
    assert (missing.side, missing.samples) == ("transformers", [])
    assert timing.text(missing).endswith("needs pip install transformers")


def test_what_does_not_fit_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(timing, "free_bytes", lambda device: 1e9)
    (line,) = bench_train.compare("124M", options())
    assert line.samples == [] and "2 models at once need 6 GB, 1 are free" in line.note


def test_needed_memory_by_hand():
    """Without tokens: 16 bytes for each parameter of each model."""
    with torch.device("meta"):
        n = sum(p.numel() for p in Transformer(bench_train.SHAPES["124M"]).parameters())
    assert bench_train.needed_bytes(bench_train.SHAPES["124M"], 0, 3) == 3 * 16 * n


@pytest.mark.parametrize("value", ["all", "blocks,", "none:max-autotune", "whole:fast"])
def test_compile_is_checked(value):
    with pytest.raises(ConfigError, match="compile="):
        bench_train.parse_compile(value)
    assert bench_train.parse_compile("none,whole:max-autotune") == [("none", ""), ("whole", "max-autotune")]


def test_checkpoint_rates_are_of_the_bytes_on_the_disk(tmp_path):
    learnt = tokenizer.train(["Three letters, and a few more: abc."], 384)
    lines = bench_checkpoint.measure("tiny", bench_train.SHAPES["tiny"], learnt, 1, tmp_path)
    assert [line.side for line in lines] == [
        "disk", "torch.save", "ours", "ours, what training waits for", "disk", "torch.load", "ours"
    ]  # fmt: skip
    n_bytes = (tmp_path / "plain.pt").stat().st_size
    shown = float(lines[0].case.split(", ")[1].removesuffix(" MB"))
    assert shown == pytest.approx(n_bytes / 1e6, abs=1)
    assert (tmp_path / "raw.bin").stat().st_size == pytest.approx(n_bytes, rel=0.1)


def test_encoders_that_differ_are_not_timed(tmp_path, monkeypatch):
    texts = ["The spring garden has a cat. " * 20, "春天的花园里有一只猫。" * 20]
    tokenizer.train(texts, 384).save(tmp_path)
    lines = bench_tokenizer.compare_encoding("x", texts, tmp_path, 1)
    assert [line.side for line in lines] == ["tiktoken", "tokenizers", "ours", "ours, arrays"]
    monkeypatch.setattr(tokenizer.Tokenizer, "encode_array", lambda self, text: [1, 2])
    with pytest.raises(timing.BenchError, match="ids of ours, arrays"):
        bench_tokenizer.compare_encoding("x", texts, tmp_path, 1)


def test_the_program(tmp_path):
    """A cheap row whose peer is there, as a process: table and file say the same; every sample is in the file."""
    done = run("--rows=dedup", "--quick=True", "--repeats=2", f"--out={tmp_path / 'bench.json'}")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert {"date", "command", "hardware", "versions", "load_average", "lines"} == set(report)
    assert "--rows=dedup" in report["command"] and report["versions"]["torch"] == torch.__version__
    for line in report["lines"]:
        assert len(line["samples"]) == 2 and line["median"] == pytest.approx(sum(line["samples"]) / 2)
        assert f"{line['case']:32} {line['side']}" in done.stdout
    assert any(line["ratios"].get("datasketch") for line in report["lines"])


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--rows=trian", "rows='trian' is none of train, ddp"),
        ("--nanogpt=/nowhere", "holds no model.py; give a checkout"),
        ("--optimizer=adam", "optimizer='adam' is none of adamw, muon"),
        ("--repeats=-1", "must not be negative"),
    ],
)
def test_mistakes_are_one_line(flag, words, monkeypatch):
    key, _, value = flag[2:].partition("=")
    monkeypatch.setattr(bench, key, int(value) if key == "repeats" else value)
    with pytest.raises(ConfigError, match=words):
        bench.check()


def test_all_rows_are_named_in_help():
    text = next(line for line in (ROOT / "tools/bench.py").read_text("utf-8").splitlines() if line.startswith("rows ="))
    assert text.endswith(",".join(bench.ROWS))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_and_whole_model_compile():
    """Has not run yet: no GPU here."""
    compiles = bench_train.parse_compile("none,blocks,whole,whole:reduce-overhead")
    lines = bench_train.compare("tiny", options(device=torch.device("cuda"), dtype=torch.bfloat16, compiles=compiles))
    assert all(line.samples for line in lines) and len(lines) == 5
