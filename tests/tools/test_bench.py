"""tools/bench.py and tools/timing.py: statistics by hand, turns, every cheap row, missing libraries, errors."""

import importlib
import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

import tokenizer
from groundup.errors import UserError
from groundup.generate import engine
from groundup.train.plan import flops_per_token
from model import Transformer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
TOOLS = ("bench", "bench_checkpoint", "bench_data", "bench_generate", "bench_tokenizer", "bench_train", "timing")
bench, bench_checkpoint, bench_data, bench_generate, bench_tokenizer, bench_train, timing = map(
    importlib.import_module, TOOLS
)
CPU = torch.device("cpu")


def run(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/bench.py", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


def options(**changes: object) -> "bench_train.Options":
    plain = bench_train.Options(CPU, torch.float32, 1, 128, ["adamw"], [("none", "")], "")
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


@pytest.mark.parametrize("past_cache, size", [(False, 100_001), (True, 24 * 4096)])
def test_a_written_file_is_whole_and_cannot_be_compressed(tmp_path, past_cache, size):
    timing.writing(tmp_path / "f", 100_001, past_cache)()
    content = (tmp_path / "f").read_bytes()
    assert len(content) == size and len(zlib.compress(content)) >= size


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
    monkeypatch.setattr(bench_train.memory_plan, "usable_bytes", lambda device: 1e9)
    (line,) = bench_train.compare("124M", options())
    assert line.samples == [] and "2 models at once need 6 GB" in line.note


def test_each_way_of_ours_has_its_peer(monkeypatch):
    """Compiled beside compiled, as it is beside as it is; ratios to both."""
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: f)
    for value, peers in [("none", ["transformers"]), ("blocks,whole", ["transformers, compiled"]),
                         ("none,blocks", ["transformers", "transformers, compiled"])]:  # fmt: skip
        lines = bench_train.compare("tiny", options(compiles=bench_train.parse_compile(value)))
        assert [line.side for line in lines if not line.side.startswith("ours")] == peers
        assert all(list(line.ratios) == peers for line in lines if line.side.startswith("ours"))
        assert len({line.note for line in lines}) == 1


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nanogpt_has_a_dtype_of_its_own(dtype, tmp_path):
    """On a CPU float32, whatever ours has: the limit of another dtype is not its limit."""
    (tmp_path / "model.py").write_text(NANOGPT, encoding="utf-8")
    lines = {line.side: line for line in bench_train.compare("tiny", options(nanogpt=str(tmp_path), dtype=dtype))}
    theirs, ours = lines["nanoGPT"], lines["ours, adamw"]
    assert theirs.note == "0.1M parameters, float32" and ours.limit > 0 and "nanoGPT" in ours.ratios
    assert (theirs.limit > 0) is (dtype == torch.float32)


def test_memory_is_of_a_run_that_saves_nothing(tmp_path, monkeypatch):
    """The estimate beside the peak has no copy to save from: the process is stopped before it would be made."""
    printed, until_line = [], timing.until_line
    monkeypatch.setattr(timing, "until_line", lambda *args: printed.append(until_line(*args)) or printed[0])
    line = bench_train.memory("tiny", options(), "adamw", False, tmp_path, "ours")
    (plan,) = [text for text in printed[0][1].splitlines() if text.startswith("memory ")]
    assert "optimizer" in plan and "copy" not in plan
    assert f"{line.limit:.2f} GiB" in plan and 0.5 < line.median / line.limit < 1.5


def test_a_failed_memory_does_not_end_the_row(tmp_path, monkeypatch):
    def ended(command: list[str], start: str) -> tuple[float, str]:
        if "--optimizer=muon" in command:
            raise timing.BenchError("bench: it ended")
        return 1.0, "no estimate"

    monkeypatch.setattr(timing, "until_line", ended)
    lines = list(bench_train.measure(["tiny"], options(optimizers=["adamw", "muon"]), True, tmp_path))
    assert [line.failed for line in lines] == [False] * 3 + [True] * 2
    assert "no estimate of memory" in lines[3].note and lines[4].note == "failed: bench: it ended"


@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole_learns_the_same():
    """Losses of three steps, to the rounding of float32."""
    cfg, losses = bench_train.SHAPES["tiny"], {}
    tokens = torch.randint(cfg.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    for part in ("none", "whole"):
        torch.manual_seed(0)
        step = bench_train.our_step(cfg, tokens, "adamw", part, "", torch.float32)
        losses[part] = [step().item() for _ in range(3)]
    assert losses["whole"] == pytest.approx(losses["none"], rel=1e-5) and losses["none"][2] < losses["none"][0]


def test_needed_memory_by_hand():
    """Without tokens: 16 bytes for each parameter of each model."""
    with torch.device("meta"):
        n = sum(p.numel() for p in Transformer(bench_train.SHAPES["124M"]).parameters())
    assert bench_train.needed_bytes(bench_train.SHAPES["124M"], 0, 3) == 3 * 16 * n


@pytest.mark.parametrize("value", ["all", "blocks,", "none:max-autotune", "whole:fast"])
def test_compile_is_checked(value):
    with pytest.raises(UserError, match="compile="):
        bench_train.parse_compile(value)
    assert bench_train.parse_compile("none,whole:max-autotune") == [("none", ""), ("whole", "max-autotune")]


def test_checkpoint_rates_are_of_the_bytes_on_the_disk(tmp_path):
    learnt = tokenizer.train(["Three letters, and a few more: abc."], 384)
    lines = bench_checkpoint.measure("tiny", bench_train.SHAPES["tiny"], learnt, 1, tmp_path)
    assert [line.side for line in lines] == [
        "disk", "disk, through the cache", "torch.save", "ours", "ours, what training waits for",
        "disk", "torch.load", "ours",
    ]  # fmt: skip
    n_bytes = (tmp_path / "plain.pt").stat().st_size
    shown = float(lines[0].case.split(", ")[1].removesuffix(" MB"))
    assert shown == pytest.approx(n_bytes / 1e6, abs=1)
    assert (tmp_path / "raw.bin").stat().st_size == pytest.approx(n_bytes, rel=0.1)


def test_transformers_compiles_itself_only_where_that_is_meant(monkeypatch):
    """What its generate() is told: on a CPU it never compiles, so that `compiled` is our own call of torch.compile."""
    from transformers import LlamaForCausalLM

    compiled, told = [], []
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: compiled.append(f) or f)
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda self, idx, **kwargs: told.append(kwargs) or idx)
    model = Transformer(bench_generate.SHAPES["tiny"])
    for kind in ("dynamic", "static", "compiled"):
        bench_generate.their_call(model, [[1, 2]], torch.float32, kind, 4)()
    assert len(compiled) == 1
    assert [kwargs.get("disable_compile") for kwargs in told] == [None, True, True]


def test_ratios_are_to_all_peers(monkeypatch):
    lines = bench_generate.compare("tiny", 1, torch.float32, CPU, 1, 4, 4, kinds=["static", "dynamic"], compiled=False)
    assert [list(line.ratios) for line in lines] == [[], [], ["transformers, static", "transformers, dynamic"]]


def test_many_shapes_of_a_compiled_step(monkeypatch):
    """On a GPU each model, number of rows and width has a graph of its own: more than the eight of torch's default."""
    from torch._dynamo import config

    compile = torch.compile
    monkeypatch.setattr(engine, "decode_step", lambda x: x + 1)
    monkeypatch.setattr(torch, "compile", lambda f, mode, **kwargs: compile(f, backend="eager", **kwargs))
    with config.patch(recompile_limit=8):
        step = engine.compiled_step.__wrapped__("cuda")
        for n in range(2, 22):
            assert step(torch.zeros(n)).shape == (n,)


def test_half_a_surrogate_pair_is_written_as_a_question_mark(tmp_path):
    megabytes = bench_tokenizer.write_corpus(iter(["a\ud83d", "猫", "a?"]), tmp_path / "c.json", 1.0)
    assert json.loads((tmp_path / "c.json").read_text(encoding="utf-8")) == ["a?", "猫"] and megabytes == 5e-6


def test_the_peers_survivors_are_those_of_single_updates():
    """All shingles at once give datasketch the signature that they give one by one."""
    from datasketch import MinHash

    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(50)}" for _ in range(200)) for _ in range(20)]
    texts[5], texts[9] = texts[2] + " end", texts[3]
    sets = bench_data.elements(texts)
    one, all_at_once = (MinHash(num_perm=128, seed=1, hashfunc=int) for _ in range(2))
    for number in sets[0]:
        one.update(number)
    all_at_once.update_batch(sets[0])
    assert (one.hashvalues == all_at_once.hashvalues).all()
    assert bench_data.plain_survivors(sets) == bench_data.our_survivors(texts) == [5, 9]


def test_a_library_that_is_broken_is_not_a_missing_one():
    def broken() -> None:
        raise ImportError("cannot import name 'x' from 'y'", name="y")

    made, missing = timing.build({"ours": lambda: 1, "theirs": broken})
    said = "cannot be imported: ImportError: cannot import name 'x' from 'y'"
    assert (made, missing) == ({"ours": 1}, {"theirs": said})


def some_lines(n: int, folder: Path):
    yield timing.Line("dedup", "x", "ours", "s", [1.0])
    raise KeyError("what nobody expected")


def test_what_was_measured_before_an_error_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.ROWS, "dedup", some_lines)
    first, last = bench.attempted("dedup", 1, tmp_path / "dedup")
    assert first.samples == [1.0] and not first.failed
    assert last.failed and last.note == "failed: KeyError: 'what nobody expected'"
    assert "Traceback" in capsys.readouterr().err and "failed: KeyError" in timing.text(last)

    def mistaken(n: int, folder: Path):
        raise UserError("config: mistaken")
        yield

    monkeypatch.setitem(bench.ROWS, "bpe", mistaken)
    with pytest.raises(UserError, match="mistaken"):
        list(bench.attempted("bpe", 1, tmp_path / "bpe"))


def test_the_program_ends_with_status_1_and_its_file(tmp_path):
    """datasketch is there and fails: a line says so, the file is written."""
    (tmp_path / "datasketch.py").write_text("raise RuntimeError('planted')\n", encoding="utf-8")
    path = {"PYTHONPATH": f"{tmp_path}"}
    done = run("--rows=dedup", "--quick=True", "--repeats=1", f"--out={tmp_path / 'b.json'}", env=os.environ | path)
    assert done.returncode == 1 and "failed: RuntimeError: planted" in done.stdout
    (line,) = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))["lines"]
    assert line["failed"] and not line["samples"]


def test_repeats_that_are_asked_for_are_made(monkeypatch):
    assert (bench.few(7), bench.few(2)) == (3, 2)
    monkeypatch.setattr(bench, "repeats", 7)
    assert bench.few(7) == 7


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
        ("--shapes=10M,11M", "shapes='11M' is none of tiny, 10M"),
        ("--compile=whole:fast", "compile='whole:fast' must list"),
        ("--device=tpu", "device.*tpu"),
        ("--input=books", "give every part a name"),
        ("--input=en:/nowhere/*.txt", "/nowhere"),
    ],
)
def test_mistakes_are_one_line(flag, words, monkeypatch):
    key, _, value = flag[2:].partition("=")
    monkeypatch.setattr(bench, key, int(value) if key == "repeats" else value)
    with pytest.raises(ValueError, match=words) as caught:
        bench.check()
    assert isinstance(caught.value, UserError)


def test_all_rows_are_named_in_help():
    text = next(line for line in (ROOT / "tools/bench.py").read_text("utf-8").splitlines() if line.startswith("rows ="))
    assert text.endswith(",".join(bench.ROWS))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_and_whole_model_compile():
    """With a peer for what is compiled, and one for what is not."""
    compiles = bench_train.parse_compile("none,blocks,whole,whole:reduce-overhead")
    lines = bench_train.compare("tiny", options(device=torch.device("cuda"), dtype=torch.bfloat16, compiles=compiles))
    assert all(line.samples for line in lines) and len(lines) == 6
