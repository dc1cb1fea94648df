"""sft.py as users run it: the loss of transformers, on any number of ranks, and exact resume."""

import json
import re
import runpy
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import forks
import pytest
import test_pretrain as tp
import torch
from jobs import run_on_ranks
from no_float64 import on_device
from safetensors.torch import load_file
from saved import load_train_state

import sft
from groundup.demo import debug_data, debug_model
from groundup.errors import UserError
from groundup.generate.completion import generate
from groundup.generate.sampling import SamplingParams
from groundup.kernels.cross_entropy import cross_entropy
from groundup.tokens.conversations import Batch, ChatCorpus
from groundup.tokens.training import train
from groundup.train import checkpoint, huggingface
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
FLAGS = [
    "--device=cpu",
    "--dtype=float32",
    "--compile=False",
    "--log_every=1",
    "--eval_steps=2",
    "--eval_answers=2",
]
FLAGS += [
    "--eval_new_tokens=4",
    "--block_size=128",
    "--batch_size=2",
    "--learning_rate=1e-2",
    "--peak_tflops=1",
]
FLAGS += ["--val_fraction=0.2", "--pack=yes"]


def talk(i: int) -> dict:
    question, answer = f"What is {i} plus {i}?", f"It is {2 * i}."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if i % 3 == 0:
        messages += [
            {"role": "user", "content": "用中文说"},
            {"role": "assistant", "content": f"是{2 * i}。"},
        ]
    return {"messages": ([{"role": "system", "content": "Add."}] if i % 4 == 0 else []) + messages}


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A small model of pretraining's kind: base/model, its tokenizer, and talks.jsonl."""
    folder = tmp_path_factory.mktemp("base")
    debug_data.make_debug_data(folder / "data")
    tokenizer = Tokenizer.load(folder / "data")
    (folder / "model").mkdir()
    torch.manual_seed(0)
    cfg = ModelConfig(
        tokenizer.vocab_size, block_size=128, n_layer=2, n_head=4, n_kv_head=2, n_embd=32
    )
    huggingface.write_model(folder / "model", Transformer(cfg), tokenizer)
    (folder / "teacher").mkdir()
    larger = replace(cfg, n_embd=64, n_layer=1, block_size=64)
    huggingface.write_model(folder / "teacher", Transformer(larger), tokenizer)
    rows = [json.dumps(talk(i), ensure_ascii=False) for i in range(120)]
    (folder / "talks.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def flags_of(base: Path, out: Path, *flags: str) -> list[str]:
    common = [
        f"--init_from={base / 'model'}",
        f"--data={base / 'talks.jsonl'}",
        f"--out_dir={out}",
        *FLAGS,
    ]
    return tp.flags_with_defaults(flags, common)


@pytest.fixture
def run(base, tmp_path, monkeypatch):
    """run(*flags) -> exit status of sft.py in this process. out_dir is tmp_path/out by default."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["sft.py", *flags_of(base, tmp_path / "out", *flags)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "sft.py"), run_name="__main__")
        return caught.value.code or 0

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def corpus_of(base: Path, pack: bool, block_size: int = 128) -> ChatCorpus:
    tokenizer = Tokenizer.load(base / "model")
    return ChatCorpus(str(base / "talks.jsonl"), tokenizer, block_size, seed=1, pack=pack)


def all_batches(corpus: ChatCorpus, batch_size: int) -> list[Batch]:
    """Every training row once."""
    rows = corpus.train[0]
    numbers = torch.arange(rows.n_rows).split(batch_size)
    return [corpus.load([0] * len(part), part.tolist()) for part in numbers]


def gradients(model: Transformer, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss of all labels and its gradients, summed over micro-batches as in the loop."""
    model.zero_grad()
    n, total = sum(len(batch.targets) for batch in batches), 0.0
    for batch in batches:
        hidden = sft.hidden_at_labels(model, batch)
        loss, _ = cross_entropy(hidden, model.lm_head.weight, batch.targets)
        (loss / n).backward()
        total += loss.item() / n
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


# ---- the loss ------------------------------------------------------------------------------------


def test_packed_padded_and_any_split_have_the_loss_and_gradients_of_transformers(base):
    """Rows in one batch or several, packed or padded; LlamaForCausalLM reads one conversation."""
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM.from_pretrained(base / "model")
    model = huggingface.load_model(base / "model")
    corpus = corpus_of(base, pack=False)
    rows, nats, n = corpus.train[0], 0.0, 0
    for i in range(rows.n_rows):
        ((ids, mask),) = rows.row(i)
        ids, mask = torch.tensor(ids.astype(int)), torch.tensor(mask.astype(bool))
        labels = ids.masked_fill(~mask, -100)
        loss = (
            hf(ids[None], labels=labels[None]).loss * mask[1:].sum()
        )  # theirs is the mean of shifted labels
        loss.backward()
        nats, n = nats + loss.item(), n + int(mask[1:].sum())
    oracle = {name.removeprefix("model."): p.grad / n for name, p in hf.named_parameters()}
    for pack, batch_size in ((False, 7), (True, 200), (True, 3)):
        loss, grads = gradients(model, all_batches(corpus_of(base, pack), batch_size))
        assert loss == pytest.approx(nats / n, abs=1e-6)
        assert grads.keys() == oracle.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, oracle[name], atol=1e-6, rtol=1e-4)


def test_packed_rows_without_isolation_would_be_seen(base):
    """The comparison above can fail: without document numbers the losses differ."""
    model = huggingface.load_model(base / "model")
    batches = all_batches(corpus_of(base, pack=True), 4)
    assert batches[0].documents.max() >= 1
    apart = gradients(model, batches)[0]
    joined = gradients(model, [batch._replace(documents=None) for batch in batches])[0]
    assert abs(apart - joined) > 1e-4


def test_each_turn_has_the_loss_it_has_when_the_conversation_ends_there(base):
    model, tokenizer = huggingface.load_model(base / "model"), Tokenizer.load(base / "model")
    messages = talk(12)["messages"]

    def nats(upto: int) -> torch.Tensor:
        ids, mask = (torch.tensor(part) for part in tokenizer.render(messages[:upto]))
        hidden = model.hidden(ids[None, :-1])[0]
        return cross_entropy(
            hidden, model.lm_head.weight, ids[1:].masked_fill(mask[1:] == 0, -100)
        )[1]

    first, both = nats(3), nats(5)
    torch.testing.assert_close(both[: len(first)], first, atol=1e-6, rtol=0)


def test_a_micro_batch_without_labels_gives_zero_and_finite_gradients(base):
    model = huggingface.load_model(base / "model")
    batch = all_batches(corpus_of(base, pack=True), 2)[0]
    empty = batch._replace(**{name: getattr(batch, name)[:0] for name in ("index", "targets")})
    hidden = sft.hidden_at_labels(model, empty)
    loss, nats = cross_entropy(hidden, model.lm_head.weight, empty.targets)
    loss.backward()
    assert loss.item() == 0 and nats.shape == (0,)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def set_globals(monkeypatch) -> None:
    """What evaluate reads of the script's own names."""
    monkeypatch.setattr(sft, "stop_signal", lambda: False, raising=False)
    monkeypatch.setattr(sft, "torch_device", torch.device("cpu"), raising=False)
    monkeypatch.setattr(sft, "torch_dtype", torch.float32, raising=False)


def test_evaluation_needs_no_float64_on_the_device(base, monkeypatch):
    set_globals(monkeypatch)
    model, corpus = huggingface.load_model(base / "model").eval(), corpus_of(base, pack=True)
    token_bytes = torch.from_numpy(corpus.tokenizer.token_byte_lengths())
    scores = []
    for wrap in (lambda function: function, on_device):
        monkeypatch.setattr(sft, "token_scores", wrap(sft.token_scores))
        scores.append(sft.evaluate(model, corpus, token_bytes))
    assert scores[0] == scores[1]


def test_evaluation_equals_a_count_by_hand(base, monkeypatch):
    monkeypatch.setattr(sft, "batch_size", 3)
    monkeypatch.setattr(sft, "eval_steps", 0)
    set_globals(monkeypatch)
    model, corpus = huggingface.load_model(base / "model").eval(), corpus_of(base, pack=True)
    tokenizer = corpus.tokenizer
    token_bytes = torch.from_numpy(tokenizer.token_byte_lengths())
    scores = sft.evaluate(model, corpus, token_bytes)
    nats = labels = right = n_bytes = 0
    with torch.no_grad():
        (rows,) = corpus.val.values()
        for number in range(rows.n_rows):
            for ids, mask in rows.row(number):
                logp = model(torch.tensor(ids[None, :-1].astype(int)))[0].log_softmax(-1)
                for t in range(1, len(ids)):
                    if mask[t]:
                        labels, nats = labels + 1, nats - logp[t - 1, int(ids[t])].item()
                        right += int(logp[t - 1].argmax() == int(ids[t]))
                        n_bytes += len(tokenizer.token_bytes(int(ids[t])))
    assert scores["val_loss"] == pytest.approx(nats / labels, rel=1e-5)
    assert scores["mean_token_accuracy"] == pytest.approx(right / labels)
    assert scores["val_bpb"] == pytest.approx(nats / 0.6931471805599453 / n_bytes, rel=1e-5)


# ---- runs ----------------------------------------------------------------------------------------


def answers(
    directory: Path, conversations: list[dict], new_tokens: int = 24
) -> list[tuple[str, str]]:
    model, tokenizer = huggingface.load_model(directory), Tokenizer.load(directory)
    prompts = [
        tokenizer.render(talk["messages"][:-1], add_generation_prompt=True)[0]
        for talk in conversations
    ]
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, eos_ids=tokenizer.stop_ids)
    results = [result.completions[0] for result in generate(model, tokenizer, prompts, params)]
    return [(completion.text, completion.finish_reason) for completion in results]


@pytest.mark.slow
def test_conversations_are_memorized_and_answers_stop_on_their_own(run, tmp_path):
    talks = [talk(i) for i in range(4)]
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(json.dumps(t, ensure_ascii=False) for t in talks), encoding="utf-8")
    common = [f"--data={path}", f"--val_data={path}", "--max_steps=100", "--eval_every=100"]
    common += ["--schedule=linear", "--log_every=50", "--eval_answers=4", "--eval_new_tokens=24"]
    assert run(*common, "--trainable=embed,lm_head,lora", "--lora_rank=8") == 0
    said = answers(tmp_path / "out" / "latest", talks)
    assert said == [(t["messages"][-1]["content"], "stop") for t in talks]
    last = tp.events(tmp_path / "out", "eval")[-1]
    assert (
        last["self_stop"] == 1.0 and last["mean_token_accuracy"] > 0.95 and last["val_loss"] < 0.1
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_trains_as_a_cpu_does(run, tmp_path, compiled):
    tp.assert_gpu_trains_as_cpu(run, tmp_path, compiled)


def test_a_run_is_complete_and_opens_in_transformers(run, tmp_path, base):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert run("--max_steps=6", "--eval_every=3", "--save_every=3", "--sample_prompts=你好|Hi") == 0
    out = tmp_path / "out"
    evals = tp.events(out, "eval")
    assert [e["step"] for e in evals] == [0, 3, 6] and evals[-1]["val_loss"] < evals[0]["val_loss"]
    # the same command again has nothing to do
    assert run("--max_steps=6", "--eval_every=3", "--save_every=3") == 0
    assert [e["step"] for e in tp.events(out, "train")] == [1, 2, 3, 4, 5, 6]
    tokenizer = AutoTokenizer.from_pretrained(out / "latest")
    messages = talk(3)["messages"]
    ids = Tokenizer.load(out / "latest").render(messages)[0]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == ids
    ids = torch.tensor([ids])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out / "latest")(ids).logits
        torch.testing.assert_close(
            huggingface.load_model(out / "latest").eval()(ids), theirs, atol=1e-5, rtol=1e-5
        )


def test_the_base_of_adapters_may_move(run, tmp_path, base):
    """It is then found where adapter_config.json says."""
    first, adapted = tmp_path / "first", tmp_path / "adapted"
    assert run(f"--out_dir={first}", "--max_steps=1") == 0
    lora = [f"--out_dir={adapted}", f"--init_from={first}", "--trainable=lora"]
    assert run(*lora, "--max_steps=1") == 0
    want = huggingface.load_model(adapted / "latest").state_dict()
    first.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="is no model directory; write there where it is"):
        huggingface.load_model(adapted / "latest")
    path = adapted / "step_000001" / "adapter_config.json"
    path.write_text(
        path.read_text("utf-8").replace(str(first), str(tmp_path / "moved")), encoding="utf-8"
    )
    found = huggingface.load_model(checkpoint.resolve(adapted)).state_dict()
    assert all(torch.equal(found[name], want[name]) for name in want)
    path.write_text(
        path.read_text("utf-8").replace('"lora_alpha": 32', '"lora_alpha": 33'), encoding="utf-8"
    )
    with pytest.raises(
        ValueError, match="adapter_config.json is damaged"
    ):  # other weights, and nothing else would say
        checkpoint.resolve(path.parent)


def test_conversations_that_cannot_be_asked_do_not_end_the_evaluation(run, tmp_path):
    """One too long for the block, one in which the assistant begins; the rest is answered."""
    rows = [talk(i) for i in range(8)]
    rows.insert(
        0,
        {
            "messages": [
                {"role": "user", "content": "long " * 200},
                {"role": "assistant", "content": "x"},
            ]
        },
    )
    rows.insert(1, {"messages": [{"role": "assistant", "content": "Hello."}]})
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert run(f"--data={path}", f"--val_data={path}", "--max_steps=1", "--eval_answers=10") == 0
    assert tp.events(tmp_path / "out", "eval")[0]["self_stop"] is not None


def test_sources_are_evaluated_apart(run, tmp_path, base):
    lines = (base / "talks.jsonl").read_text(encoding="utf-8").splitlines()
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, part in zip(paths, (lines[:60], lines[60:]), strict=True):
        path.write_text("\n".join(part), encoding="utf-8")
    spec = f"--data={paths[0]}=0.5,{paths[1]}=0.5"
    assert run(spec, "--max_steps=2") == 0
    evals = tp.events(tmp_path / "out", "eval")[0]
    names = [key.partition("/")[2] for key in evals if key.startswith("val_loss/")]
    assert len(names) == 2
    assert evals["val_loss"] == pytest.approx(
        sum(evals[f"val_loss/{name}"] for name in names) / 2, rel=1e-6
    )


def assert_same_run(a: Path, b: Path) -> None:
    for key in ("loss", "grad_norm", "lr"):
        assert [e[key] for e in tp.events(a, "train")] == [e[key] for e in tp.events(b, "train")], (
            key
        )
    for key in ("val_loss", "self_stop", "mean_token_accuracy"):
        assert [e[key] for e in tp.events(a, "eval")] == [e[key] for e in tp.events(b, "eval")], key
    name = (
        "adapter_model.safetensors"
        if (a / "latest" / "adapter_model.safetensors").exists()
        else "model.safetensors"
    )
    weights, others = (load_file(out / "latest" / name) for out in (a, b))
    assert all(torch.equal(weights[name], others[name]) for name in weights.keys() | others.keys())
    mine, theirs = (load_train_state(out / "latest", 0) for out in (a, b))
    for name, state in mine[0]["optimizer"].items():
        assert all(torch.equal(state[key], theirs[0]["optimizer"][name][key]) for key in state), (
            name
        )
    assert torch.equal(mine[1]["rng"]["cpu"], theirs[1]["rng"]["cpu"])


@pytest.mark.parametrize(
    "flags", [["--dropout=0.1"], ["--pack=no", "--trainable=lora"]], ids=["dropout", "padded"]
)
def test_a_stopped_run_continues_to_the_bit(run, tmp_path, flags):
    """From the checkpoint of step 2, which is all that is left of a run."""
    straight, left = tmp_path / "straight", tmp_path / "left"
    common = [*flags, "--max_steps=5", "--save_every=2", "--eval_every=4", "--keep_last=0"]
    assert run(*common, f"--out_dir={straight}") == 0
    shutil.copytree(
        straight,
        left,
        symlinks=True,
        ignore=shutil.ignore_patterns("step_000004", "step_000005", "*est*"),
    )
    assert run(*common, f"--out_dir={left}", "--resume=must") == 0
    assert_same_run(straight, left)


def test_a_file_of_rows_and_prepared_tokens_give_the_same_run(base, tmp_path, run):
    """prepare.py --kind=chat, with token files and without."""
    common = [
        sys.executable,
        str(ROOT / "prepare.py"),
        f"--input={base / 'talks.jsonl'}",
        "--kind=chat",
        "--near=0",
    ]
    for name, more in (("rows", []), ("tokens", [f"--tokenizer_dir={base / 'model'}"])):
        forks.run(
            [*common, f"--out_dir={tmp_path / name}", "--val_fraction=0.2", *more],
            check=True,
            cwd=ROOT,
        )
        assert (
            run(f"--data={tmp_path / name}", f"--out_dir={tmp_path / 'out'}{name}", "--max_steps=5")
            == 0
        )
    assert list((tmp_path / "tokens").glob("train_*.mask.npy")) and not list(
        (tmp_path / "rows").glob("*.npy")
    )
    a, b = (tp.events(tmp_path / f"out{name}", "train") for name in ("rows", "tokens"))
    assert [e["loss"] for e in a] == [e["loss"] for e in b]


@pytest.mark.parametrize("flags", [[], ["--pack=no"]], ids=["packed", "padded"])
def test_the_loss_and_the_step_are_means_over_labels_however_the_batch_is_cut(
    run, base, tmp_path, flags
):
    """A mean of the micro-batches' means would give more weight to labels in small ones."""
    uneven = [talk(i) for i in range(60)]
    for i, row in enumerate(uneven):
        row["messages"][-1]["content"] += " Yes." * (i * 7 % 23)
    path = tmp_path / "uneven.jsonl"
    path.write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in uneven), encoding="utf-8"
    )
    common = [
        *flags,
        f"--data={path}",
        "--total_batch_tokens=1024",
        "--max_steps=2",
        "--eval_every=2",
    ]
    for size in (1, 8):
        assert run(*common, f"--batch_size={size}", f"--out_dir={tmp_path / str(size)}") == 0
    one, eight = (tp.events(tmp_path / str(size), "train") for size in (1, 8))
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in one] == pytest.approx([e[key] for e in eight], rel=2e-5), key


# ---- ranks ---------------------------------------------------------------------------------------

ONE_STEP = [
    "--total_batch_tokens=512",
    "--batch_size=1",
    "--max_steps=2",
    "--save_every=2",
    "--eval_every=2",
]
RANK_CASES = {
    "all": [],
    "lora zero1": ["--trainable=embed,lm_head,lora", "--zero1=True"],
    "lora powersgd": ["--trainable=lora", "--compress=powersgd", "--warmup_steps=1"],
    "padded": ["--pack=no", "--total_batch_tokens=1024"],
    "few labels": ["--data=FEW", "--val_data=FEW"],
    "taught": ["--teacher=TEACHER", "--distill_beta=0.5"],
}
POWERSGD = ["--trainable=lora", "--compress=powersgd", "--warmup_steps=1"]


@pytest.fixture(scope="session")
def two_ranks(base, tmp_path_factory) -> Path:
    """All cases on 2 ranks in one start; the run that was stopped goes on at the end."""
    folder = tmp_path_factory.mktemp("ranks")
    few = "\n".join(json.dumps(talk(i), ensure_ascii=False) for i in (1, 2))
    (folder / "few.jsonl").write_text(few, encoding="utf-8")

    def job(name: str, flags: list[str], stops: bool) -> tuple[list[str], bool]:
        flags = [flag.replace("FEW", str(folder / "few.jsonl")) for flag in flags]
        flags = [flag.replace("TEACHER", str(base / "teacher")) for flag in flags]
        return flags_of(base, folder / name, *tp.flags_with_defaults(tuple(flags), ONE_STEP)), stops

    jobs = [job(name, flags, False) for name, flags in RANK_CASES.items()]
    forward = ["--trainable=lora", "--overlap_step=forward", "--zero1=True"]
    jobs += [job("no labels", forward, False)]
    jobs += [job("powersgd", POWERSGD + ["--max_steps=4"], False)]
    jobs += [job("stopped", POWERSGD + ["--max_steps=4"], True)]
    jobs += [job("stopped", POWERSGD + ["--max_steps=4"], False)]
    run_on_ranks(2, "sft.py", jobs, folder)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("name", RANK_CASES)
def test_two_ranks_equal_one(two_ranks, base, run, tmp_path, name):
    """Rows of unequal numbers of labels, even none, on one rank and two."""
    flags = [flag.replace("FEW", str(two_ranks / "few.jsonl")) for flag in RANK_CASES[name]]
    flags = [flag.replace("TEACHER", str(base / "teacher")) for flag in flags]
    flags = [flag for flag in flags if not flag.startswith(("--zero1", "--overlap"))]
    assert run(*tp.flags_with_defaults(tuple(flags), ONE_STEP)) == 0
    mine, theirs = tp.events(tmp_path / "out", "train"), tp.events(two_ranks / name, "train")
    for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3)):
        assert [e[key] for e in theirs] == pytest.approx([e[key] for e in mine], rel=tolerance), key
    mine, theirs = tp.events(tmp_path / "out", "eval")[0], tp.events(two_ranks / name, "eval")[0]
    assert theirs["val_loss"] == pytest.approx(mine["val_loss"], rel=1e-5)
    assert theirs["self_stop"] == pytest.approx(mine["self_stop"])


@pytest.mark.dist
def test_adapters_with_powersgd_on_two_ranks_resume_to_the_bit(two_ranks):
    states = [
        load_train_state(two_ranks / name / "latest", 1)[1] for name in ("powersgd", "stopped")
    ]
    assert states[0]["powersgd"].keys() == states[1]["powersgd"].keys()
    assert_same_run(two_ranks / "powersgd", two_ranks / "stopped")


@pytest.mark.dist
def test_a_rank_without_labels_neither_waits_nor_spoils_the_others(two_ranks):
    losses = [e["loss"] for e in tp.events(two_ranks / "no labels", "train")]
    assert len(losses) == 2 and all(0 < loss < 7 for loss in losses)


def test_a_hundred_rows_and_no_other_flag_are_a_run_that_says_what_it_chose(run, capsys):
    """Packed, in three epochs, they made a handful of steps."""
    assert run("--plan_only=True", "--pack=auto", "--batch_size=8") == 0
    plan = capsys.readouterr().out
    chosen = r"few data +(\d+) conversations: each is shown 2[5-9] times.*; one conversation per row"
    n = int(re.search(chosen, plan)[1])
    assert "is for larger models" not in plan and 90 <= n <= 110
    assert re.search(r"batch .* 31[34] steps, 2[5-9]\.\d\d epochs of", plan)
    assert run("--plan_only=True", "--pack=auto", "--batch_size=8", "--epochs=3", "--learning_rate=2e-5") == 0
    plan = capsys.readouterr().out
    assert "warning     learning_rate=2e-05 is for larger models" in plan
    assert "--epochs" not in plan.partition("few data")[2] and re.search(r"batch .* 3\.\d\d epochs of", plan)


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--init_from="], "init_from: give the run"),
        (["--init_from=nowhere"], "nowhere"),
        (["--data=nowhere.jsonl"], "nowhere.jsonl"),
        (["--epochs=0.1"], "too few to learn from"),
        (["--epochs=-1"], "epochs must be from 0 to 1000, got -1.0"),
        (["--epochs=1e999"], "epochs must be from 0 to 1000, got inf"),
        (["--eval_new_tokens=0"], "eval_new_tokens must be at least 1, got 0"),
        (["--optimizer=sgd"], "optimizer must be one of adamw, muon, got 'sgd'"),
        (["--val_fraction=1.5"], "val_fraction must be from 0 to 1"),
        (["--trainable=lora,nonsense"], "nonsense"),
        (["--block_size=4"], "block_size"),
        (["--total_batch_tokens=100"], "multiple of"),
        (["--distill_beta=1"], "distill_beta=1.0 needs a teacher"),
        (["--loss_weights=a.jsonl=2"], "unknown key 'loss_weights'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(run, tmp_path, capsys, flags, says):
    assert says in tp.refused(run, capsys, *flags)
    assert not (tmp_path / "out").exists()


def test_a_resume_with_other_adapters_is_refused(run, tmp_path, capsys):
    assert run("--trainable=lora", "--max_steps=2") == 0
    for flag in (
        "--lora_alpha=8",
        "--lora_rank=4",
        "--trainable=all",
        "--pack=no",
        "--val_fraction=0.3",
    ):
        with pytest.raises(Exception, match=flag.partition("=")[0].lstrip("-")) as caught:
            run("--max_steps=3", *tp.flags_with_defaults((flag,), ["--trainable=lora"]))
        assert isinstance(caught.value, UserError)


@pytest.mark.slow
def test_every_shipped_config_trains(run, tmp_path, monkeypatch):
    monkeypatch.setattr(debug_data, "make_debug_rows", lambda path, rows_of: None)  # of config/debug_sft.py
    monkeypatch.setattr(debug_model, "make_debug_model", lambda path: None)
    for path in sorted(ROOT.glob("config/*.py")):
        if f" sft.py config/{path.name}" in path.read_text(encoding="utf-8"):
            small = [
                "--max_steps=2",
                "--total_batch_tokens=0",
                "--warmup_steps=1",
                "--sample_prompts=Hi",
            ]
            assert run(str(path), f"--out_dir={tmp_path / path.stem}", *small) == 0, path
            assert tp.events(tmp_path / path.stem, "eval")[-1]["step"] == 2


# ---- a teacher -----------------------------------------------------------------------------------


def test_without_weight_a_teacher_changes_no_bit(base, run, tmp_path):
    steps = ["--max_steps=4"]
    assert run(*steps) == 0
    shutil.move(tmp_path / "out", tmp_path / "alone")
    assert run(*steps, f"--teacher={base / 'teacher'}", "--distill_weight=0") == 0
    assert tp.losses(tmp_path / "out") == tp.losses(tmp_path / "alone")
    mine, other = (load_file(tmp_path / n / "latest/model.safetensors") for n in ("out", "alone"))
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_a_student_comes_close_to_its_teacher(base, run, tmp_path):
    """And a run that was stopped and continued ends with the same weights."""
    flags = [f"--teacher={base / 'teacher'}", "--distill_weight=1", "--distill_beta=0.5"]
    flags += ["--max_steps=20", "--schedule=constant"]
    assert run(*flags, "--save_every=15") == 0
    far, *_, near = [event["kl_teacher"] for event in tp.events(tmp_path / "out", "train")]
    assert 0 < near < 0.6 * far
    # with all the weight on the teacher the loss is the divergence
    assert tp.losses(tmp_path / "out")[-1] == pytest.approx(near, rel=1e-5)
    want = load_file(tmp_path / "out/latest/model.safetensors")
    shutil.rmtree(tmp_path / "out/step_000020")
    assert run(*flags, "--save_every=15") == 0
    found = load_file(tmp_path / "out/latest/model.safetensors")
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_teacher_with_other_tokens_or_changed_weights_is_refused(base, run, tmp_path):
    other = train(["the student reads other words"], 384)
    cfg = ModelConfig(other.vocab_size, block_size=64, n_layer=1, n_head=2, n_kv_head=2, n_embd=16)
    (tmp_path / "other").mkdir()
    huggingface.write_model(tmp_path / "other", Transformer(cfg), other)
    with pytest.raises(UserError, match="teacher: .*other and the student have different tokenizers"):
        run(f"--teacher={tmp_path / 'other'}")

    taught = [f"--teacher={tmp_path / 'copy'}", "--max_steps=2"]
    shutil.copytree(base / "teacher", tmp_path / "copy")
    assert run(*taught) == 0
    shutil.copy(base / "model/model.safetensors", tmp_path / "copy")
    shutil.copy(base / "model/config.json", tmp_path / "copy")
    with pytest.raises(UserError, match="teacher_weights"):
        run(*taught[:1], "--max_steps=4")


@pytest.mark.parametrize("flags", [["--pack=no", "--batch_size=3"], ["--pack=yes", "--batch_size=1"]])
def test_plan_log_and_card_count_no_padding(run, tmp_path, capsys, flags):
    """Rows differ in length, so a batch of them is padded; the setting of a total still counts it."""
    assert run("--max_steps=0", "--epochs=1", *flags) == 0
    tp.assert_tokens_are_those_of(tmp_path / "out", capsys.readouterr().out)
