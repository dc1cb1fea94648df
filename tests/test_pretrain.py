"""pretrain.py as users run it: same result on 1 and 2 ranks, exact resume after kill -9, one line for each mistake.

Runs in this process go through runpy, which executes the script as the command line would; what must be killed or needs
ranks is a process of its own.
"""

import dataclasses
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from saved import load_train_state
from tokenizers import Tokenizer as HFTokenizer

import ddp
import pretrain
from groundup.demo import debug_data
from groundup.errors import UserError
from groundup.tokens import IGNORE
from groundup.tokens.batches import Batches, TextCorpus
from groundup.tokens.packing import pack
from groundup.tokens.token_files import TokenData
from groundup.tokens.token_writer import ShardWriter, write_manifest
from groundup.tokens.training import extended as extend_tokenizer
from groundup.train import checkpoint, huggingface
from groundup.train.log import RunLog, read_events
from groundup.train.plan import flops_per_token, parameter_table
from groundup.train.ranks import World
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
TINY = ["--n_layer=2", "--n_head=4", "--n_kv_head=2", "--n_embd=32", "--block_size=32", "--batch_size=2"]
TINY += ["--device=cpu", "--dtype=float32", "--compile=False", "--log_every=1", "--eval_steps=4"]
TINY += ["--warmup_steps=1", "--learning_rate=1e-2", "--peak_tflops=1"]


def flags_with_defaults(flags: tuple[str, ...], defaults: list[str]) -> list[str]:
    given = {flag.partition("=")[0] for flag in flags}
    return [*(flag for flag in defaults if flag.partition("=")[0] not in given), *flags]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "debug"
    debug_data.make_debug_data(path)
    return path


@pytest.fixture
def run(data_dir, tmp_path, monkeypatch):
    """run(*flags) -> exit status of pretrain.py in this process; out_dir is tmp_path/out unless a flag says other."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*flags: str) -> int:
        common = [f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'out'}", *TINY]
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *flags_with_defaults(flags, common)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "pretrain.py"), run_name="__main__")
        return caught.value.code or 0

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def command(*flags: str, ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, str(ROOT / "pretrain.py"), *flags_with_defaults(flags, TINY)]


def start(*flags: str, ranks: int = 1) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return forks.Popen(
        command(*flags, ranks=ranks), cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def val_batches(data: TokenData, block_size: int, *how: int) -> Iterator:
    """The evaluation batches of these data alone. how: batch_size, eval_steps, rank, world_size."""
    corpus = TextCorpus.__new__(TextCorpus)
    corpus.block_size = block_size
    return corpus.batches_of(data, *how)


def events(out: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == kind]


def assert_tokens_are_those_of(out: Path, printed: str) -> None:
    """Of a run of one epoch with log_every=1: the plan, the log and the card count what the data's line says."""
    n = int(re.search(r" rows? for training, ([\d,]+) tokens", printed)[1].replace(",", ""))
    found = events(out, "train")
    assert re.search(rf"^tokens      {n:,} in {len(found)} steps", printed, re.MULTILINE)
    each = [event["tokens_per_s"] * event["step_ms"] / 1000 for event in found]
    assert found[-1]["tokens"] == n == pytest.approx(sum(each)) and len(set(map(round, each))) > 1
    assert f"step {len(found)} of {len(found)}, {n:,} tokens." in (out / "README.md").read_text("utf-8")


def losses(out: Path) -> list[float]:
    return [event["loss"] for event in events(out, "train")]


def assert_gpu_trains_as_cpu(run: Callable, folder: Path, compiled: bool) -> None:
    """In float32; sums have other orders. run: of a script whose out_dir is folder/out by default."""
    flags = ["--max_steps=4", "--learning_rate=1e-3"]
    assert run(*flags) == 0
    assert run(*flags, "--device=cuda", f"--compile={compiled}", f"--out_dir={folder / 'gpu'}") == 0
    want = losses(folder / "out")
    assert len(want) == 4 and losses(folder / "gpu") == pytest.approx(want, rel=1e-3)


def assert_same_run(a: Path, b: Path) -> None:
    """Losses, validation and final state equal to the bit, also the random state of rank 0."""
    assert_same_result(a, b)
    mine, theirs = (load_train_state(out / "latest", 0)[1] for out in (a, b))
    assert torch.equal(mine["rng"]["cpu"], theirs["rng"]["cpu"])


def assert_same_result(a: Path, b: Path) -> None:
    """Losses, validation, weights and optimizer equal to the bit."""
    for key in ("loss", "grad_norm", "lr", "tokens", "skipped"):
        assert [e[key] for e in events(a, "train")] == [e[key] for e in events(b, "train")], key
    for key in ("step", "val_loss", "val_bpb"):
        assert [e[key] for e in events(a, "eval")] == [e[key] for e in events(b, "eval")], key
    weights, others = (huggingface.load_model(out / "latest").state_dict() for out in (a, b))
    assert all(torch.equal(weights[name], others[name]) for name in weights.keys() | others.keys())
    mine, theirs = (load_train_state(out / "latest", 0)[0] for out in (a, b))
    assert mine["scaler"] == theirs["scaler"]
    for name, state in mine["optimizer"].items():
        assert all(torch.equal(state[key], theirs["optimizer"][name][key]) for key in state), name


# ---- it trains ------------------------------------------------------------------------------------------------------


def test_a_sample_text_does_not_depend_on_the_prompts_beside_it(data_dir, monkeypatch):
    """Also beyond the context, and without a prompt."""
    monkeypatch.setattr(pretrain, "block_size", 16)
    monkeypatch.setattr(pretrain, "compile", False)
    monkeypatch.setattr(pretrain, "stop_signal", lambda: False, raising=False)
    torch.manual_seed(0)
    tokenizer = Tokenizer.load(data_dir)
    net = Transformer(ModelConfig(tokenizer.vocab_size, 16, n_layer=1, n_head=2, n_embd=32))
    texts = {prompt: pretrain.sample(net, tokenizer, prompt, 24) for prompt in ("The ", "def ", "")}
    for prompt, text in reversed(texts.items()):
        assert text.startswith(prompt) and len(text) > len(prompt)
        assert text == pretrain.sample(net, tokenizer, prompt, 24) and net.training


@pytest.mark.slow
def test_logged_figures_are_those_of_the_model_and_the_text(run, tmp_path, data_dir):
    """val_loss, val_bpb and the first training loss, computed again with plain cross-entropy."""
    assert run("--max_steps=1", "--eval_steps=0") == 0
    out = tmp_path / "out"
    model = huggingface.load_model(out / "latest").eval()
    data, tokenizer = TokenData(data_dir, "val"), Tokenizer.load(data_dir)
    nats = n_bytes = n = 0
    with torch.no_grad():
        for x, y in val_batches(data, 32, 8):
            nats += torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
            n, n_bytes = n + y.numel(), n_bytes + len(b"".join(tokenizer.token_bytes(i) for i in y.flatten().tolist()))
    last = events(out, "eval")[-1]
    assert last["val_loss"] == pytest.approx(nats / n, rel=1e-5)
    assert last["val_bpb"] == pytest.approx(nats / np.log(2) / n_bytes, rel=1e-5)


def test_one_and_many_micro_steps_give_the_same_losses(run, tmp_path):
    for name, flags in {"8x1": ["--batch_size=8"], "2x4": ["--batch_size=2"]}.items():
        assert run("--max_steps=4", "--total_batch_tokens=256", f"--out_dir={tmp_path / name}", *flags) == 0
    assert losses(tmp_path / "8x1") == pytest.approx(losses(tmp_path / "2x4"), rel=1e-5)


def test_speed_is_that_of_all_micro_steps(run, tmp_path):
    """Tokens per second and MFU by the log's own clock, of 4 micro-steps of 2 rows on a device of 1 GFLOP/s."""
    assert run("--max_steps=2", "--total_batch_tokens=256", "--peak_tflops=0.001") == 0
    flops = flops_per_token(huggingface.load_model(tmp_path / "out" / "latest"), 32)
    for event in events(tmp_path / "out", "train"):
        seconds = event["step_ms"] / 1000
        assert event["tokens_per_s"] * seconds == pytest.approx(256)
        assert event["mfu"] * 1e9 * seconds == pytest.approx(256 * flops)


def test_bfloat16_computes_in_bfloat16(run, monkeypatch):
    seen = set()
    original = torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x: (seen.add(x.dtype), original(x))[1])
    assert run("--max_steps=1", "--dtype=bfloat16") == 0
    assert seen == {torch.bfloat16}


@pytest.mark.slow
def test_evaluation_and_sampling_leave_training_unchanged(run, tmp_path):
    assert run("--max_steps=3", "--dropout=0.2", "--eval_every=100", f"--out_dir={tmp_path / 'a'}") == 0
    flags = ["--eval_every=1", "--save_every=2", "--sample_prompts=def |中"]
    assert run("--max_steps=3", "--dropout=0.2", *flags, f"--out_dir={tmp_path / 'b'}") == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.slow
def test_config_of_a_run_runs_again(run, tmp_path):
    assert run("--max_steps=4") == 0
    shutil.copy(tmp_path / "out" / "config.py", tmp_path / "again.py")
    process = forks.run(
        [sys.executable, str(ROOT / "pretrain.py"), str(tmp_path / "again.py"), f"--out_dir={tmp_path / 'again'}"],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert losses(tmp_path / "again") == losses(tmp_path / "out")


@pytest.mark.slow
def test_a_save_comes_before_its_evaluation_and_best_goes_by_it(run, tmp_path, monkeypatch):
    """Memory that ends in an evaluation costs no step: the checkpoint is there. The resumed run evaluates at once."""
    flags = ["--max_steps=8", "--save_every=4", "--eval_every=4", "--keep_last=0"]
    assert run(*flags, f"--out_dir={tmp_path / 'whole'}") == 0
    seen = []

    def out_of_memory(log, event, step, values):
        if event == "eval" and step == 4 and not seen:
            seen.append(step)
            raise MemoryError
        write(log, event, step, values)

    write = RunLog.write
    monkeypatch.setattr(RunLog, "write", out_of_memory)
    with pytest.raises(MemoryError):
        run(*flags)
    until((tmp_path / "out" / "latest").exists)  # the thread that saves goes on
    assert checkpoint.find_latest(tmp_path / "out").name == "step_000004"
    assert run(*flags, "--resume=must") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "out")
    for out in (tmp_path / "whole", tmp_path / "out"):
        loss_of = {event["step"]: event["val_loss"] for event in events(out, "eval") if event["step"]}
        best = min(loss_of, key=loss_of.get)
        assert (out / "best").resolve().name == f"step_{best:06d}"


# ---- several sources ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def mixed(tmp_path_factory, data_dir) -> Path:
    """Sources "even" and "odd", of documents with ids of that kind only, in shards of 4,096 tokens."""
    path = tmp_path_factory.mktemp("mixed")
    write_documents(path, data_dir, shortest=1, longest=200)
    return path


def write_documents(path: Path, tokenizer_dir: Path, shortest: int, longest: int) -> None:
    tokenizer = Tokenizer.load(tokenizer_dir)
    tokenizer.save(path)
    shards, rng = [], np.random.default_rng(0)
    for split, n in (("train", 90), ("val", 20)):
        for parity, source in enumerate(("even", "odd")):
            writer = ShardWriter(path, split, tokenizer.vocab_size, tokenizer.eot_id, 4096, source=source)
            for _ in range(n if source == "even" else n // 3):
                ids = parity + 2 * rng.integers(0, 128, rng.integers(shortest, longest))
                writer.add(np.sort(ids), len(ids))
            shards += writer.close()
    info = {"recipe": {"order": "length"}}
    write_manifest(path, tokenizer.vocab_size, tokenizer.eot_id, tokenizer.fingerprint(), shards, info)


STAGED = "0: {0}/even=1; 4: {0}/even=3,{0}/odd=1; 9: {0}/even=0.2,{0}/odd=0.8"


def odd_rows(x: torch.Tensor, eot_id: int) -> torch.Tensor:
    """Which rows hold ids of the source "odd"; the others must hold none. An empty row has nothing but delimiters."""
    odd = ((x % 2 == 1) & (x != eot_id)).any(dim=1)
    assert not (odd & ((x % 2 == 0) & (x != eot_id)).any(dim=1)).any()
    return odd


@pytest.fixture
def taken(monkeypatch, data_dir) -> list[list[int]]:
    """[even, odd] rows of each micro-batch that a run in this process takes."""
    original, eot_id, counts = Batches.next, Tokenizer.load(data_dir).eot_id, []

    def recorded(batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = original(batches)
        odd = int(odd_rows(x, eot_id).sum())
        counts.append([len(x) - odd, odd])
        return x, y

    monkeypatch.setattr(Batches, "next", recorded)
    return counts


@pytest.mark.slow
def test_a_staged_mixture_takes_and_logs_exact_shares(run, tmp_path, mixed, taken, capsys):
    """Counted from the batches, through two resumptions; the annealing stage shows in the log."""
    flags = [f"--data_dir={STAGED.format(mixed)}", "--total_batch_tokens=1024", "--batch_size=8", "--eval_every=5"]
    for steps in (3, 10, 14):
        assert run(*flags, f"--max_steps={steps}", "--schedule=constant") == 0
    counts = np.cumsum(np.array(taken).reshape(14, 4, 2).sum(axis=1), axis=0)
    out = tmp_path / "out"
    train = events(out, "train")
    assert [[e["tokens/even"], e["tokens/odd"]] for e in train] == (32 * counts).tolist()
    assert [e["tokens"] for e in train] == (32 * counts.sum(axis=1)).tolist()
    assert counts[3].tolist() == [128, 0] and counts[8, 1] in range(25, 56) and counts[13, 1] - counts[8, 1] > 100
    assert [(e["step"], e["weights"]) for e in events(out, "stage")] == [
        (1, {"even": 1.0, "odd": 0.0}), (5, {"even": 0.75, "odd": 0.25}), (10, {"even": 205 / 1024, "odd": 819 / 1024}),
    ]  # fmt: skip
    last = events(out, "eval")[-1]  # by the shares of the last stage, 1 to 4
    assert last["val_loss"] == pytest.approx((last["val_loss/even"] + 4 * last["val_loss/odd"]) / 5)
    assert last["val_loss/even"] < last["val_loss/odd"]
    text = capsys.readouterr().out
    assert "step     10/10 | training data from here on: 20.0 % even, 80.0 % odd" in text
    assert re.search(r"batch .* epochs of [\d,]+ \(even\), [\d.]+ epochs of [\d,]+ \(odd\)", text)
    assert re.search(r"step +14/14 \| val loss .* \| even [\d.]+, [\d.]+ \| odd [\d.]+, [\d.]+\n", text)


def test_validation_of_a_source_is_that_of_its_windows(run, tmp_path, mixed):
    assert run(f"--data_dir={mixed}", "--max_steps=1", "--eval_steps=0") == 0
    model = huggingface.load_model(tmp_path / "out" / "latest").eval()
    tokenizer, last = Tokenizer.load(mixed), events(tmp_path / "out", "eval")[-1]
    sums = []
    for source in ("even", "odd"):
        nats = n_bytes = n = 0
        with torch.no_grad():
            for x, y in val_batches(TokenData(mixed / source, "val"), 32, 8):
                nats += torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
                n, n_bytes = n + y.numel(), n_bytes + sum(len(tokenizer.token_bytes(i)) for i in y.flatten().tolist())
        assert last[f"val_loss/{source}"] == pytest.approx(nats / n, rel=1e-5)
        assert last[f"val_bpb/{source}"] == pytest.approx(nats / np.log(2) / n_bytes, rel=1e-5)
        sums.append((nats, n))
    entries = [json.loads((mixed / "manifest.json").read_text("utf-8"))["sources"][name] for name in ("even", "odd")]
    weights = np.array([entry.get("weight", entry["tokens"]) for entry in entries])
    means = np.array([nats / n for nats, n in sums])
    assert last["val_loss"] == pytest.approx((weights * means).sum() / weights.sum(), rel=1e-5)


@pytest.mark.slow
def test_a_limit_of_epochs_begins_a_new_stage(run, tmp_path, mixed, taken, capsys):
    """The source is taken that many times and no more; the log says when its share went to the other."""
    n_windows = TextCorpus(str(mixed), 32).order(0, 1, 1).samplers[1].per_epoch
    flags = [f"--data_dir={mixed}/even=0.5,{mixed}/odd=0.5", "--batch_size=16", "--eval_every=99"]
    assert run(*flags, f"--max_epochs={mixed}/odd=0.4", "--max_steps=12") == 0
    assert np.sum(taken, axis=0)[1] == int(0.4 * n_windows)
    assert [e["weights"]["odd"] for e in events(tmp_path / "out", "stage")] == [0.5, 0.0]
    assert run(*flags, f"--max_epochs={mixed}/odd=0.4", "--max_steps=13") == 0
    assert "max_epochs=" in refused(run, capsys, *flags, "--max_steps=14")
    end = refused(run, capsys, *flags, "--max_steps=9999", "--max_epochs=2", f"--out_dir={tmp_path / 'b'}")
    assert "max_epochs='2' the data end after step" in end and not (tmp_path / "b").exists()


@pytest.mark.slow
def test_sources_that_changed_are_refused(run, tmp_path, mixed, capsys):
    assert run(f"--data_dir={mixed}/even=3,{mixed}/odd=1", "--max_steps=2") == 0
    assert "stages=[[0, [768, 256]]] (asked [[0, [614, 410]]])" in refused(
        run, capsys, f"--data_dir={mixed}/even=3,{mixed}/odd=2", "--max_steps=3"
    )
    assert "another corpus" in refused(run, capsys, f"--data_dir={mixed}/odd=1,{mixed}/even=3", "--max_steps=3")
    assert "another corpus" in refused(run, capsys, f"--data_dir={mixed}/even", "--max_steps=3")
    assert run(f"--data_dir={mixed}/even=6,{mixed}/odd=2", "--max_steps=3") == 0  # the same shares


@pytest.mark.slow
def test_a_stage_can_be_added_before_it_begins(run, tmp_path, mixed, capsys):
    one, two = f"0: {mixed}/even", f"0: {mixed}/even; 3: {mixed}/even=1,{mixed}/odd=1"
    flags = ["--eval_every=5", "--schedule=constant"]
    assert run(f"--data_dir={two}", "--max_steps=5", f"--out_dir={tmp_path / 'straight'}", *flags) == 0
    assert run(f"--data_dir={one}", "--max_steps=3", f"--out_dir={tmp_path / 'added'}", *flags) == 0
    assert run(f"--data_dir={two}", "--max_steps=5", f"--out_dir={tmp_path / 'added'}", *flags) == 0
    losses = [[e["loss"] for e in events(tmp_path / out, "train")] for out in ("straight", "added")]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    late = f"0: {mixed}/even; 4: {mixed}/even=1,{mixed}/odd=1"
    message = refused(run, capsys, f"--data_dir={late}", "--max_steps=6", f"--out_dir={tmp_path / 'added'}", *flags)
    assert "stages=" in message


# ---- documents ------------------------------------------------------------------------------------------------------


def document_losses(model: Transformer, x: torch.Tensor, y: torch.Tensor, eot_id: int) -> torch.Tensor:
    """Cross-entropy of each target (IGNORE: 0), every document of the rows by itself."""
    found = []
    for ids, targets in zip(x, y, strict=True):
        borders = [0, *(t for t in range(1, len(ids)) if ids[t] == eot_id), len(ids)]
        logits = torch.cat([model(ids[None, a:b])[0] for a, b in zip(borders, borders[1:], strict=False)])
        found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.stack(found)


@pytest.mark.slow
def test_doc_mask_confines_training_and_validation(run, tmp_path, mixed):
    for flag in ("True", "False"):
        flags = [f"--data_dir={mixed}/odd", "--max_steps=6", "--eval_steps=3", f"--doc_mask={flag}"]
        assert run(*flags, f"--out_dir={tmp_path / flag}") == 0
    model, eot_id = huggingface.load_model(tmp_path / "True" / "latest").eval(), Tokenizer.load(mixed).eot_id
    batches = list(val_batches(TokenData(mixed / "odd", "val"), 32, 2, 3))
    with torch.no_grad():
        alone = torch.cat([document_losses(model, x, y, eot_id) for x, y in batches]).mean().item()
    masked, plain = (events(tmp_path / flag, "eval") for flag in ("True", "False"))
    assert masked[-1]["val_loss"] == pytest.approx(alone, rel=1e-5)
    assert masked[0]["val_loss"] != plain[0]["val_loss"]
    assert losses(tmp_path / "True") != losses(tmp_path / "False")


@pytest.mark.slow
def test_packed_rows_train_with_a_mean_over_their_valid_targets(run, tmp_path, mixed):
    """The first losses against hand arithmetic; the same in one and in four micro-steps."""
    write_documents(tmp_path / "packed", mixed, shortest=18, longest=40)
    pack(tmp_path / "packed", 32, seed=1)
    flags = [f"--data_dir={tmp_path / 'packed'}", "--pack=True", "--doc_mask=True"]
    flags += ["--total_batch_tokens=256", "--max_steps=4"]
    for size in ("8", "2"):
        assert run(*flags, f"--batch_size={size}", f"--out_dir={tmp_path / size}") == 0
    assert losses(tmp_path / "8") == pytest.approx(losses(tmp_path / "2"), rel=1e-5)
    torch.manual_seed(1337)
    model = Transformer(huggingface.load_config(tmp_path / "8" / "latest")).eval()
    corpus = TextCorpus(str(tmp_path / "packed"), 32, pack=True)
    batches = Batches(corpus, corpus.order(1337, 8, 4), 8, 1, World(0, 0, 1))
    x, y = batches.next()
    batches.close()
    with torch.no_grad():
        nats = document_losses(model, x, y, Tokenizer.load(mixed).eot_id)
    assert (y == IGNORE).sum() > 0
    assert losses(tmp_path / "8")[0] == pytest.approx((nats.sum() / (y != IGNORE).sum()).item(), rel=1e-5)


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_equal_one(run, tmp_path, data_dir):
    flags = ["--max_steps=8", "--total_batch_tokens=256", "--eval_every=4", "--eval_steps=3"]
    finish(start(*flags, f"--data_dir={data_dir}", f"--out_dir={tmp_path / '2'}", ranks=2))
    assert run(*flags, f"--out_dir={tmp_path / '1'}") == 0
    one, two = tmp_path / "1", tmp_path / "2"
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for a, b in zip(events(one, "eval"), events(two, "eval"), strict=True):
        assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-5)
    assert events(two, "eval")[0]["val_bpb"] == pytest.approx(events(one, "eval")[0]["val_bpb"], rel=1e-12)


# ---- resume ---------------------------------------------------------------------------------------------------------


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the launcher and all ranks at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def logged_steps(out: Path) -> int:
    path = out / "log.jsonl"
    return path.read_text(encoding="utf-8").count('"train"') if path.exists() else 0


@pytest.mark.slow
@pytest.mark.dist
def test_killed_runs_end_like_a_straight_one(tmp_path, data_dir):
    """kill -9 of all ranks during a save, then to the end; with dropout, accumulation and clipping."""
    steps, ranks = 9, 2
    flags = [f"--data_dir={data_dir}", f"--max_steps={steps}", "--dtype=bfloat16", "--dropout=0.1", "--grad_clip=0.5"]
    flags += ["--batch_size=1", "--total_batch_tokens=192", "--save_every=3", "--eval_every=4"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    finish(start(*flags, f"--out_dir={straight}", ranks=ranks))
    flags.append(f"--out_dir={broken}")

    process = start(*flags, ranks=ranks)
    wait_for(lambda: (broken / "step_000003").exists() and any(broken.glob(".step_*.tmp")), process)
    kill(process)
    finish(start(*flags, "--resume=must", ranks=ranks))
    assert_same_run(straight, broken)
    states = [load_train_state(broken / "latest", rank)[1]["rng"]["cpu"] for rank in range(ranks)]
    assert not torch.equal(*states)  # dropout masks are each rank's own


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_saves_and_leaves(tmp_path, data_dir, number, ranks):
    flags = [f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'out'}", "--max_steps=100000", "--save_every=100000"]
    process = start(*flags, ranks=ranks)
    wait_for(lambda: logged_steps(tmp_path / "out") >= 3, process)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0 and "stopped by a signal" in output, output
    if ranks == 1:  # torchrun has an exit status, and a traceback, of its own
        assert process.returncode == 128 + number
        assert "Traceback" not in output
    path = checkpoint.find_latest(tmp_path / "out")
    assert load_train_state(path, 0)[0]["step"] == logged_steps(tmp_path / "out") > 3


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(run, tmp_path, capsys):
    assert run("--max_steps=9", "--save_every=3", "--keep_last=9") == 0
    straight = losses(tmp_path / "out")
    with open(tmp_path / "out" / "step_000009" / "model.safetensors", "r+b") as f:
        f.seek(-5, os.SEEK_END)
        f.write(b"\x7f")
    assert run("--max_steps=9", "--save_every=3", "--keep_last=9") == 0
    assert "step_000009" in capsys.readouterr().out
    assert losses(tmp_path / "out") == straight


# ---- mistakes: one line, and nothing begun --------------------------------------------------------------------------


def refused(run, capsys, *flags: str) -> str:
    """The one line with which the script refuses."""
    capsys.readouterr()
    try:
        message = run(*flags)
    except Exception as error:
        assert isinstance(error, UserError), error
        message = str(error)
    assert isinstance(message, str) and "\n" not in message, message
    return message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--learing_rate=1", "did you mean 'learning_rate'"),
        ("--n_layer=2.5", "n_layer must be a whole number, got 2.5"),
        ("--total_batch_tokens=100", "must be a multiple of batch_size*block_size*world_size = 2*32*1 = 64; give"),
        ("--total_batch_tokens=100", "= 2*32*1 = 64; give total_batch_tokens=128"),
        ("--total_batch_tokens=96", "= 2*32*1 = 64; give batch_size=1"),
        ("--schedule=cosin", "schedule must be one of"),
        ("--n_head=3", "n_head=3 must be a multiple of n_kv_head=2"),
        ("--device=tpu", "device must be"),
        ("--dtype=int8", "dtype must be"),
        ("--data_dir=nowhere/at_all", "nowhere/at_all"),
        ("--init_from=nowhere/at_all", "no such directory"),
        ("--resume=must", "has no checkpoint; for a new run leave resume out"),
        ("--block_size=9999999", "block_size=9999999"),
        ("--vocab_size=100", "vocab_size=100 is less than the data's 512 ids; leave it out"),
        ("--max_steps=0", "max_steps must be at least 1"),
        ("--batch_size=0", "batch_size must be at least 1, got 0"),
        ("--total_batch_tokens=-512", "total_batch_tokens must be at least 0"),
        ("--eval_steps=-1", "eval_steps must be at least 0"),
        ("--decay_fraction=1.5", "decay_fraction must be from 0 to 1"),
        ("--overwrite=True", "needs resume='never' or resume_from"),
        ("--resume_from=-1", "resume_from must be at least 0"),
        ("--resume_from=2", "resume_from=2: "),
        ("--data_dir=a=1,b", "'b' in data_dir='a=1,b' has no weight"),
        ("--data_dir=0: a; 5: b=0", "'b=0' in data_dir="),
        ("--max_epochs=many", "max_epochs has 'many'; write '4'"),
        ("--max_epochs=0.001", "with max_epochs='0.001' the data end after step"),
        ("--pack=True", "is not packed for block_size=32; run: python prepare.py "),
        ("--out_dir=", "out_dir='' is not a directory; name a new one"),
        ("--out_dir=pretrain.py", "is not a directory"),
        ("--out_dir=a\udcb9b", "is not UTF-8, but torch and safetensors open no other names"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(run, tmp_path, capsys, flag, says):
    assert says in refused(run, capsys, flag)
    assert not (tmp_path / "out").exists()


def test_compile_without_a_compiler_is_one_line(run, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in refused(run, capsys, "--compile=True")


@pytest.mark.slow
def test_what_cannot_be_reproduced_is_refused(run, capsys):
    """On other numbers of ranks; and with other numbers of threads, on which a product's last bits depend."""
    flags = ["--reproducible=True", "--max_steps=1"]
    assert "got 3 of batch_size*block_size = 64 tokens" in refused(run, capsys, *flags, "--total_batch_tokens=192")
    assert "needs compress='none', got 'bf16'" in refused(run, capsys, *flags, "--compress=bf16")
    assert "needs reproducible=False" in refused(run, capsys, *flags, "--parallel=fsdp", "--optimizer=adamw")
    n_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert run(*flags) == 0
        torch.set_num_threads(2)
        message = refused(run, capsys, *flags, "--max_steps=2")
    finally:
        torch.set_num_threads(n_threads)
    assert "was trained with OMP_NUM_THREADS=1 (asked 2); continue with the same" in message


def test_out_dir_of_another_architecture_is_refused(run, tmp_path, capsys):
    assert run("--max_steps=2") == 0
    before = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert "n_layer=2 (asked 3)" in refused(run, capsys, "--max_steps=2", "--n_layer=3")
    assert "holds a run; use another out_dir" in refused(run, capsys, "--max_steps=2", "--resume=never")
    assert "seed=1337 (asked 1)" in refused(run, capsys, "--max_steps=3", "--seed=1")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == before
    assert run("--max_steps=2", "--resume=never", "--overwrite=True", "--n_layer=3") == 0


@pytest.mark.slow
def test_a_run_goes_on_from_an_earlier_step_as_if_the_later_ones_had_not_been(run, tmp_path, capsys):
    """Neither their checkpoints, nor their log, nor the best of them are mixed up with what follows."""
    out, short = tmp_path / "out", tmp_path / "short"
    flags = ["--save_every=2", "--eval_every=2", "--keep_last=0", "--learning_rate=3e-2"]
    assert run(*flags, "--max_steps=6") == 0
    assert "deletes step_000004, step_000006" in refused(run, capsys, *flags, "--max_steps=6", "--resume_from=2")
    tamer = [*flags[:3], "--max_steps=4", "--learning_rate=1e-4"]
    assert run(*tamer, "--resume_from=2", "--overwrite=True") == 0
    assert "step_000004, a step after resume_from" in capsys.readouterr().out
    assert sorted(path.name for path in out.glob("step_*")) == [f"step_{step:06d}" for step in (2, 4)]
    assert [event["step"] for event in events(out, "train")] == [1, 2, 3, 4]
    assert [event["step"] for event in events(out, "eval")] == [0, 2, 4]
    assert (out / "best").exists() and "step 4 of 4" in (out / "README.md").read_text(encoding="utf-8")
    config = (out / "config.py").read_text(encoding="utf-8")
    assert "resume_from = 0" in config and "overwrite = False" in config
    # What it trained is what a run trains that ended at step 2.
    assert run(*flags, "--max_steps=6", f"--out_dir={short}") == 0
    for step in (4, 6):
        shutil.rmtree(short / f"step_{step:06d}")
    assert run(*tamer, f"--out_dir={short}") == 0
    assert_same_run(short, out)


@pytest.mark.slow
def test_overwrite_deletes_a_run_and_nothing_else(run, tmp_path, capsys):
    assert run("--max_steps=2") == 0
    flags = ["--max_steps=2", "--resume=never", "--overwrite=True"]
    assert "that overwrite=True deletes" in refused(run, capsys, *flags, f"--init_from={tmp_path / 'out'}")
    for name in ("thesis.txt", "thesis.tmp"):
        (tmp_path / "out" / name).write_text("years of work", encoding="utf-8")
    (tmp_path / "out" / "step_000099").mkdir()
    assert run(*flags) == 0
    assert all((tmp_path / "out" / name).exists() for name in ("thesis.txt", "thesis.tmp"))
    assert not (tmp_path / "out" / "step_000099").exists()
    assert [event["step"] for event in events(tmp_path / "out", "save")] == [2]
    config = (tmp_path / "out" / "config.py").read_text(encoding="utf-8")
    assert "resume = 'auto'" in config and "overwrite = False" in config


@pytest.mark.parametrize("files", [["README.md", "config.py"], ["config.json"], ["README.md"], ["latest"]])
def test_a_file_of_ones_own_that_a_run_would_replace_is_left_alone(run, tmp_path, capsys, files):
    (tmp_path / "out").mkdir()
    for name in files:
        (tmp_path / "out" / name).write_text("x = 'mine'", encoding="utf-8")
    assert f"holds {sorted(files)[0]!r}, which no run made" in refused(run, capsys, "--max_steps=2")
    assert all((tmp_path / "out" / name).read_text(encoding="utf-8") == "x = 'mine'" for name in files)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(files)


def test_a_second_run_on_one_directory_is_refused(run, tmp_path, capsys):
    """Both would save, and each prunes the other's checkpoints."""
    code = (
        "import sys, time; from pathlib import Path; from groundup.train import checkpoint; "
        "checkpoint.lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with forks.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout.readline() == b"locked\n"
        assert f"process {other.pid} " in refused(run, capsys, "--max_steps=2")
        for flag in ("--resume=auto", "--overwrite=True --resume=never"):
            assert "is training in" in refused(run, capsys, "--max_steps=2", *flag.split())
        other.kill()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    assert run("--max_steps=2") == 0


@pytest.mark.parametrize("moved", [False, True])
def test_an_out_dir_that_is_removed_ends_the_run_and_is_not_made_anew(run, tmp_path, capsys, monkeypatch, moved):
    def advance(log: RunLog) -> None:
        log.step += 1
        if log.step == 3:
            until((tmp_path / "out" / "latest").exists)  # step 2 is not under way any more
            (tmp_path / "out").rename(tmp_path / "elsewhere") if moved else shutil.rmtree(tmp_path / "out")

    monkeypatch.setattr(RunLog, "advance", advance)
    flags = ["--max_steps=6", "--save_every=2"]
    assert "was removed or moved while the run was in it" in refused(run, capsys, *flags)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "elsewhere" / "step_000002" / "checksums.json").exists() == moved


def test_what_began_in_out_dir_since_it_was_looked_at_is_left_alone(run, tmp_path, capsys, monkeypatch):
    """Another run made the directory, and ended, between the two looks of this one."""
    restore = checkpoint.restore

    def begin_and_restore(*args: object) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "log.jsonl").write_text("another's", encoding="utf-8")
        restore(*args)

    monkeypatch.setattr(checkpoint, "restore", begin_and_restore)
    assert "another run has begun in" in refused(run, capsys, "--max_steps=2")
    assert (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8") == "another's"


def test_a_kill_before_latest_is_moved_is_made_good(run, tmp_path):
    """The step was whole already, so nothing is trained again, and everybody else would go on with the one before."""
    assert run("--max_steps=4", "--save_every=2") == 0
    latest = tmp_path / "out" / "latest"
    latest.unlink()
    latest.symlink_to("step_000002")
    assert run("--max_steps=4", "--save_every=2") == 0
    assert os.readlink(latest) == "step_000004"


def test_a_damaged_log_is_left_as_it_is_but_for_a_line_that_a_kill_cut(run, tmp_path, capsys):
    assert run("--max_steps=3", "--save_every=1") == 0
    path = tmp_path / "out" / "log.jsonl"
    lines = path.read_bytes().splitlines()
    lines[2] = lines[2].replace(b'"event"', b'"e\xf6ent"')
    path.write_bytes(b"\n".join(lines) + b'\n{"event": "tr')
    assert run("--max_steps=5", "--save_every=1") == 0
    after = path.read_bytes().splitlines()
    assert after[: len(lines)] == lines and after[len(lines)].startswith(b'{"event": "')
    said = capsys.readouterr().out
    assert "log.jsonl:3: 1 line cannot be read; nothing is removed" in said
    assert f"log.jsonl:{len(lines) + 1}: an incomplete last line is removed (was the run killed?)" in said
    assert max(event["step"] for event in read_events(path)) == 5


def test_the_settings_are_not_written_through_a_link(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    (tmp_path / "out" / "config.py.tmp").symlink_to(tmp_path / "mine")
    assert run("--max_steps=2") == 0
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"


def test_resume_says_what_it_continues_and_what_changed(run, tmp_path, capsys):
    assert run("--max_steps=2") == 0
    assert run("--max_steps=4", "--learning_rate=0.5") == 0
    text = capsys.readouterr().out
    assert "step_000002 after step 2; changed: learning_rate 0.01 -> 0.5, max_steps 2 -> 4" in text
    assert run("--max_steps=4", "--learning_rate=0.25") == 0
    text = capsys.readouterr().out
    said = "step_000004: the run is finished, max_steps=4 is reached; without effect: learning_rate 0.5 -> 0.25; to"
    assert f"{said} train these weights on raise it; else give another out_dir, or start over with --resume=" in text
    assert "continuing" not in text and "saved in" not in text
    assert text.splitlines()[-1].startswith(f"nothing was left to train in {tmp_path / 'out'} (summary: ")
    assert len(losses(tmp_path / "out")) == 4


def test_a_card_says_that_settings_changed_on_the_way(run, tmp_path):
    """Its command has the last settings, so it would not repeat the run."""
    card, kept = tmp_path / "out" / "README.md", "so the command below does not repeat this run:"
    assert run("--max_steps=2") == 0 and run("--max_steps=2", "--resume=must") == 0
    assert "To repeat it:" in card.read_text(encoding="utf-8")
    assert not events(tmp_path / "out", "continue")
    assert run("--max_steps=3", "--resume=must") == 0
    assert run("--max_steps=4", "--learning_rate=0.5") == 0
    changes = [{"max_steps": [2, 3]}, {"learning_rate": [0.01, 0.5], "max_steps": [3, 4]}]
    found = events(tmp_path / "out", "continue")
    assert [(event["step"], event["changes"]) for event in found] == [(2, changes[0]), (3, changes[1])]
    text = "Settings changed at step 2: max_steps 2 -> 3; at step 3:"
    assert f"{text} learning_rate 0.01 -> 0.5, max_steps 3 -> 4; {kept}" in card.read_text(encoding="utf-8")
    # from step 3 again, with other settings: those that were changed there have no step any more
    assert run("--max_steps=4", "--resume_from=3", "--overwrite=True") == 0
    assert f"{text} max_steps 3 -> 4; {kept}" in card.read_text(encoding="utf-8")


def test_a_run_that_trains_nothing_keeps_its_records(run, tmp_path, capsys):
    """Its settings and its card, which would name settings that no step had."""
    out = tmp_path / "out"
    assert run("--max_steps=3") == 0
    before = [(out / name).read_text(encoding="utf-8") for name in ("config.py", "README.md")]
    assert run("--max_steps=2", "--learning_rate=0.5") == 0
    assert "max_steps=2 is reached" in capsys.readouterr().out
    assert [(out / name).read_text(encoding="utf-8") for name in ("config.py", "README.md")] == before
    assert run("--max_steps=4") == 0
    assert "max_steps = 4\n" in (out / "config.py").read_text(encoding="utf-8")


def test_a_run_that_continues_says_what_it_began_with(run, tmp_path, capsys):
    assert run("--max_steps=1", f"--out_dir={tmp_path / 'base'}") == 0
    assert run("--max_steps=1", f"--init_from={tmp_path / 'base'}", "--seed=5") == 0
    capsys.readouterr()
    assert run("--max_steps=2", f"--init_from={tmp_path / 'base' / 'latest'}", "--seed=5") == 0
    assert "latest' has no effect: a run that continues has its own weights" in capsys.readouterr().out
    assert f"init_from = {str(tmp_path / 'base')!r}\n" in (tmp_path / "out/config.py").read_text(encoding="utf-8")


def test_a_run_of_another_script_is_called_so(run, tmp_path, capsys):
    assert run("--max_steps=1") == 0
    config = tmp_path / "out/config.py"
    config.write_text(config.read_text(encoding="utf-8").replace("pretrain.py", "sft.py", 1), encoding="utf-8")
    assert f"{tmp_path / 'out'} is a run of sft.py; use another out_dir for pretrain.py" in refused(run, capsys)


def test_a_run_killed_before_its_first_checkpoint_starts_over(run, tmp_path):
    assert run("--max_steps=3") == 0
    for path in (tmp_path / "out").glob("step_*"):
        shutil.rmtree(path)
    assert run("--max_steps=3") == 0
    assert [e["step"] for e in events(tmp_path / "out", "eval")] == [0, 3]
    assert [e["step"] for e in events(tmp_path / "out", "train")] == [1, 2, 3]


def test_tokenizer_and_data_that_do_not_belong_together_are_refused(run, tmp_path, capsys, data_dir):
    other = tmp_path / "other"
    shutil.copytree(data_dir, other)
    from groundup.tokens.training import train

    train(["entirely different text, repeated. " * 50], 512).save(other)
    assert "another tokenizer" in refused(run, capsys, f"--data_dir={other}", "--max_steps=1")
    assert run("--max_steps=1", f"--out_dir={tmp_path / 'source'}") == 0
    for path in (tmp_path / "source" / "latest").glob("tokenizer*"):
        shutil.copy(other / path.name, path)
    no_checksums = shutil.ignore_patterns("checksums.json")
    shutil.copytree(tmp_path / "source" / "latest", tmp_path / "foreign", ignore=no_checksums)
    message = refused(run, capsys, f"--init_from={tmp_path / 'foreign'}", "--max_steps=1")
    assert "was not tokenized with the tokenizer of" in message


def test_a_truncated_token_file_is_refused(run, tmp_path, capsys, data_dir):
    other = tmp_path / "other"
    shutil.copytree(data_dir, other)
    shard = other / "train_00000.npy"
    os.truncate(shard, shard.stat().st_size - 100)
    assert "train_00000.npy" in refused(run, capsys, f"--data_dir={other}", "--max_steps=1")


def test_a_token_that_changed_is_named_with_its_place(run, tmp_path, capsys, data_dir):
    other = tmp_path / "other"
    shutil.copytree(data_dir, other)
    for name in ("train_00000.npy", "val_00000.npy"):
        np.lib.format.open_memmap(other / name, mode="r+")[7] ^= 1
    message = refused(run, capsys, f"--data_dir={other}", "--max_steps=20000", "--eval_steps=0")
    assert "_00000.npy changed since it was written (tokens from 0 on)" in message


def test_no_finite_gradient_for_too_long_stops_with_step_rank_and_samples(run, tmp_path, capsys):
    assert run("--max_steps=2") == 0
    path = tmp_path / "out" / "latest"
    weights = load_file(path / "model.safetensors")
    bad = tmp_path / "bad"
    shutil.copytree(path, bad)
    (bad / "checksums.json").unlink()
    from safetensors.torch import save_file

    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    flags = [f"--init_from={bad}", f"--out_dir={tmp_path / 'nan'}", "--max_steps=50", "--eval_every=99"]
    message = refused(run, capsys, *flags)
    assert "step 20: 20 steps in a row" in message and "rank 0" in message and "samples 38 to 39" in message
    assert losses(tmp_path / "nan") == [None] * 20


# ---- start from other weights, plan ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Path:
    """A disk of a megabyte, with room for 60 files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=60", "none", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # the runs of this process keep their locks


@pytest.mark.slow
@pytest.mark.parametrize("room", ["0 bytes", "16384 bytes", "0 files", "read-only", "one checkpoint"])
def test_what_a_full_disk_stops_goes_on_when_there_is_room(run, tmp_path, small_disk, capsys, room):
    """At the start, at a save, after one; in bytes and in files."""
    flags = ["--max_steps=4", "--save_every=2", "--eval_steps=1"]
    assert run(*flags, f"--out_dir={tmp_path / 'straight'}") == 0
    n = sum(-(-path.stat().st_size // 4096) * 4096 for path in (tmp_path / "straight" / "latest").iterdir())
    disk, kind = os.statvfs(small_disk), room.partition(" ")[2]
    left = int(1.4 * n) if room == "one checkpoint" else int(room.split()[0]) if kind in ("bytes", "files") else 0
    if kind == "files":
        for i in range(disk.f_favail - left):
            (small_disk / f"filler{i}").touch()
    elif room == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    else:
        (small_disk / "filler").write_bytes(bytes(disk.f_bavail * disk.f_bsize - left))
    out = f"--out_dir={small_disk / 'out'}"
    capsys.readouterr()
    try:
        said = str(run(*flags, out)) + capsys.readouterr().out
        assert said.startswith("1") and "No space left on device" in said, said
    except (UserError, OSError) as error:
        assert re.search("No space left|Read-only|cannot be written", str(error))
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    for path in small_disk.glob("filler*"):
        path.unlink()
    assert (room == "one checkpoint") == (small_disk / "out" / "step_000002").exists()
    assert run(*flags, out) == 0
    assert_same_run(tmp_path / "straight", small_disk / "out")


def test_init_from_takes_architecture_and_weights(run, tmp_path, capsys):
    assert run("--max_steps=3") == 0
    flags = [f"--init_from={tmp_path / 'out'}", "--max_steps=1"]
    defaults = ["--n_layer=6", "--n_head=6", "--n_kv_head=0", "--n_embd=384"]
    assert run(*flags, *defaults, f"--out_dir={tmp_path / 'b'}") == 0
    assert events(tmp_path / "b", "eval")[0]["val_loss"] == events(tmp_path / "out", "eval")[-1]["val_loss"]
    message = refused(run, capsys, *flags, *defaults[1:], "--n_layer=5", f"--out_dir={tmp_path / 'c'}")
    assert "has 2; leave n_layer out" in message


def test_plan_only_needs_no_memory_and_no_data(run, tmp_path, capsys):
    flags = ["--n_layer=8", "--n_head=64", "--n_kv_head=8", "--n_embd=8192", "--ffn_dim=28672", "--vocab_size=128256"]
    before = peak_bytes()
    assert run(*flags, "--plan_only=True", "--data_dir=nowhere", "--tie_embeddings=False") == 0
    text = capsys.readouterr().out
    cfg = ModelConfig(128256, 32, 8, 64, 8, 8192, ffn_dim=28672, tie_embeddings=False)
    with torch.device("meta"):
        assert f"{parameter_table(Transformer(cfg))['total']:,}" in text
    assert peak_bytes() - before < 2**30
    assert not (tmp_path / "out").exists()


def test_plan_counts_what_the_ranks_share_and_what_compression_keeps(run, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = ["--n_layer=8", "--n_embd=1024", "--vocab_size=32768", "--plan_only=True", "--data_dir=nowhere"]
    with torch.device("meta"):
        table = parameter_table(Transformer(ModelConfig(32768, 32, 8, 4, 2, 1024)))
    for flag, text in (
        ("--zero1=False", f"optimizer {8 * table['total'] / 2**20:,.0f} MiB"),
        ("--zero1=True", f"optimizer {8 * table['total'] / 4 / 2**20:,.0f} MiB"),
        ("--compress=powersgd", f"compression error {4 * (table['attention'] + table['mlp']) / 2**20:,.0f} MiB"),
    ):
        assert run(*flags, "--optimizer=adamw", flag) == 0
        assert text in capsys.readouterr().out


def peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CONFIGS = [str(path) for path in sorted(ROOT.glob("config/*.py")) if " pretrain.py " in path.read_text("utf-8")]
SHRUNK = ["--n_layer=1", "--n_head=4", "--n_kv_head=2", "--n_embd=32", "--ffn_dim=0", "--vocab_size=0"]
SHRUNK += ["--block_size=32", "--batch_size=2", "--total_batch_tokens=0", "--max_steps=3", "--eval_steps=2"]
SHRUNK += ["--device=cpu", "--dtype=float32", "--compile=False", "--warmup_steps=1"]
SHRUNK += ["--trainable=all"]  # config/continue.py begins with a model


@pytest.mark.parametrize("config", ["", *CONFIGS], ids=os.path.basename)
def test_shipped_configs_train(tmp_path, monkeypatch, data_dir, config):
    argv = ["pretrain.py", *filter(None, [config]), *SHRUNK, f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(debug_data, "make_debug_data", lambda path: None)  # of config/debug.py
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "pretrain.py"), run_name="__main__")
    assert not caught.value.code
    assert events(tmp_path / "out", "eval")[-1]["step"] == 3


# ---- continued pretraining ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def extended(tmp_path_factory, data_dir) -> Path:
    """base: a model of the debug tokenizer; data: Chinese and English with 128 tokens more."""
    folder = tmp_path_factory.mktemp("extended")
    tokenizer = Tokenizer.load(data_dir)
    (folder / "base").mkdir()
    torch.manual_seed(3)
    base = Transformer(ModelConfig(tokenizer.vocab_size, 32, 2, 4, 2, 32, tie_embeddings=False))
    huggingface.write_model(folder / "base", base, tokenizer)
    more = extend_tokenizer(tokenizer, ["春天的花园里有一只猫。" * 20, "夏天的雨下得很大。" * 20], 100)
    more.save(folder / "data")
    shards = []
    for split in ("train", "val"):
        for source, text in (("field", "春天的雨。" * 300), ("general", "It is an example of text. " * 200)):
            writer = ShardWriter(folder / "data", split, more.vocab_size, more.eot_id, source=source)
            for _ in range(4):
                writer.add(np.array(more.encode(text)), len(text.encode()))
            shards += writer.close()
    weights = {"field": 0.5, "general": 0.5}
    write_manifest(folder / "data", more.vocab_size, more.eot_id, more.fingerprint(), shards, {}, weights)
    return folder


PARTS = ["--trainable=embed,lm_head,lora", "--lora_rank=4", "--optimizer=adamw"]


def test_new_tokens_begin_as_the_mean_of_their_parts_and_only_the_named_parts_learn(run, tmp_path, extended, capsys):
    flags = [f"--init_from={extended / 'base'}", f"--data_dir={extended / 'data'}", *PARTS]
    assert run(*flags, "--max_steps=12", "--eval_every=12", "--weight_decay=0") == 0
    old, new = huggingface.load_model(extended / "base"), huggingface.load_model(tmp_path / "out" / "latest")
    n_old, n_new = old.cfg.vocab_size, new.cfg.vocab_size
    more, small = Tokenizer.load(extended / "data"), HFTokenizer.from_file(str(extended / "base" / "tokenizer.json"))
    assert n_new == n_old + 128
    evals = events(tmp_path / "out", "eval")
    assert evals[-1]["val_loss/field"] < evals[0]["val_loss/field"]
    assert run(*flags, "--max_steps=1", "--learning_rate=0", "--min_lr=0", f"--out_dir={tmp_path / 'still'}") == 0
    still = huggingface.load_model(tmp_path / "still" / "latest")
    for weights in ("embed_tokens.weight", "lm_head.weight"):
        before, rows = dict(old.named_parameters())[weights], dict(still.named_parameters())[weights]
        assert torch.equal(rows[:n_old], before)
        for i in range(n_old, n_new):
            text = more.token_bytes(i).decode(errors="ignore")
            if i in more.special_ids or text.encode() == more.token_bytes(i):  # whole characters, split by tokenizers
                parts = slice(None) if i in more.special_ids else small.encode(text).ids
                torch.testing.assert_close(rows[i], before[parts].mean(0))
    frozen = load_file(tmp_path / "out" / "latest" / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in frozen} == {"embed_tokens", "lm_head", "lora_A", "lora_B"}
    assert torch.equal(new.norm.weight, old.norm.weight)
    assert not torch.equal(new.layers[0].mlp.up_proj.weight, old.layers[0].mlp.up_proj.weight)


def test_a_stopped_run_with_adapters_continues_to_the_bit(run, tmp_path, extended):
    flags = [f"--init_from={extended / 'base'}", f"--data_dir={extended / 'data'}", *PARTS, "--dropout=0.1"]
    flags += ["--save_every=3", "--max_steps=6"]
    assert run(*flags, f"--out_dir={tmp_path / 'a'}") == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    shutil.rmtree(tmp_path / "b" / "step_000006")
    assert run(*flags, f"--out_dir={tmp_path / 'b'}") == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    mine, theirs = (load_file(tmp_path / out / "latest" / "adapter_model.safetensors") for out in "ab")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine.keys() | theirs.keys())


def test_what_cannot_be_continued_is_refused(run, tmp_path, extended, data_dir):
    new = [f"--init_from={extended / 'base'}", f"--data_dir={extended / 'data'}"]
    for flags, says in (
        (["--trainable=lora"], "init_from"),
        ([*new, "--trainable=lora"], "use trainable='embed,lm_head,lora'"),
        ([*new, "--trainable=embed,nothing"], "'nothing'"),
        ([f"--init_from={extended / 'base'}", f"--data_dir={data_dir}", "--trainable=lora", "--lora_rank=0"], "rank"),
    ):
        with pytest.raises(Exception, match=re.escape(says)) as caught:
            run(*flags)
        assert isinstance(caught.value, UserError) and not (tmp_path / "out").exists()


# ---- gradients against torch ----------------------------------------------------------------------------------------


def test_step_gradient_equals_the_mean_loss_of_the_whole_batch():
    """Sums over micro-steps divided by the token count of the step, as the loop has it, against one plain mean."""
    torch.manual_seed(0)
    cfg = ModelConfig(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=16)
    model, oracle = Transformer(cfg), Transformer(cfg)
    oracle.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 64, (6, 17))
    parallel = ddp.DDP(model)
    for micro_step, rows in enumerate(tokens.split(2)):
        parallel.sync = micro_step == 2
        (model(rows[:, :-1], rows[:, 1:]) * (1 / (6 * 16))).backward()
    logits = oracle(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6), name


def test_architecture_keys_cover_the_model_config():
    of_checkpoints = ("rope_scaling", "qkv_bias", "model_type", "init_std", "norm_eps", "head_dim")
    source = (ROOT / "pretrain.py").read_text(encoding="utf-8")
    for field in dataclasses.fields(ModelConfig):
        if field.name not in of_checkpoints:
            assert f"\n{field.name} = " in source, field.name
