"""reward_model.py, rows.py and reward.py: golden numbers, loops by hand, transformers' classifier, trl's loss;
whole runs."""

import json
import math
import os
import random
import runpy
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_pretrain as tp
import torch
from jobs import run_on_ranks
from safetensors.torch import load_file
from saved import load_train_state, score_talks

import reward
from groundup.align import reward_model
from groundup.align.reward_model import RewardModel, bradley_terry, measure, score_pairs
from groundup.demo import debug_data
from groundup.errors import UserError
from groundup.files.answer_files import read_settings, settings_path, write_settings
from groundup.scores import rows as scored_rows
from groundup.tokens.pairs import PairBatch, PairCorpus
from groundup.train import checkpoint, huggingface
from groundup.train.device import autocast
from groundup.train.log import RunLog
from groundup.train.lora import LoRAConfig, set_trainable
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
FLAGS = ["--device=cpu", "--dtype=float32", "--compile=False", "--log_every=1", "--block_size=128", "--batch_size=4"]
FLAGS += ["--learning_rate=3e-3", "--peak_tflops=1", "--val_fraction=0.2", "--warmup_steps=0"]
CPU = torch.device("cpu"), torch.float32


def pair(i: int) -> dict:
    """A polite answer is preferred, whatever it says; the better one is now the longer, now the shorter."""
    rng = random.Random(i)
    answers = [f"It is {2 * i}" + " indeed" * rng.randrange(4), f"It is {2 * i + 1}" + " 真的" * rng.randrange(4)]
    rng.shuffle(answers)
    messages = [{"role": "user", "content": f"What is {i} plus {i}?"}]
    return {"prompt": messages, "chosen": answers[0] + ", please.", "rejected": answers[1] + ", fool.", "margin": i % 3}


def write(path: Path, rows: list) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A small language model: base/model, its tokenizer, and pairs.jsonl."""
    folder = tmp_path_factory.mktemp("reward")
    debug_data.make_debug_data(folder / "data")
    tokenizer = Tokenizer.load(folder / "data")
    for name, qk_norm in (("model", False), ("qwen", True)):
        (folder / name).mkdir()
        torch.manual_seed(0)
        cfg = ModelConfig(
            tokenizer.vocab_size, block_size=128, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, qk_norm=qk_norm
        )
        huggingface.write_model(folder / name, Transformer(cfg), tokenizer)
    write(folder / "pairs.jsonl", [pair(i) for i in range(100)])
    return folder


def flags_of(base: Path, out: Path, *flags: str) -> list[str]:
    common = [f"--init_from={base / 'model'}", f"--data={base / 'pairs.jsonl'}", f"--out_dir={out}", *FLAGS]
    return tp.flags_with_defaults(flags, common)


@pytest.fixture
def run(base, tmp_path, monkeypatch):
    """run(*flags) -> exit status of reward.py in this process; out_dir is tmp_path/out unless a flag says other."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["reward.py", *flags_of(base, tmp_path / "out", *flags)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "reward.py"), run_name="__main__")
        return caught.value.code or 0

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def random_model(base: Path, name: str = "model") -> RewardModel:
    """Scores that differ well: weights far from the initial ones, and a head that is not zero."""
    torch.manual_seed(1)
    model = RewardModel(huggingface.load_config(base / name))
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def some_batch(base: Path, n: int = 12) -> PairBatch:
    corpus = PairCorpus(str(base / "pairs.jsonl"), Tokenizer.load(base / "model"), 128, seed=1)
    return corpus.load(np.zeros(n, np.int64), np.arange(n))


def pair_losses(
    model: RewardModel, batch: PairBatch, center: float = 0.0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses and both scores, (B,) each, as the loop of reward.py computes them."""
    with autocast(batch.x.device, dtype):
        chosen, rejected = score_pairs(model, batch)
    return bradley_terry(chosen, rejected, batch.margin, center), chosen, rejected


def rows_of(batch: PairBatch) -> list[list[int]]:
    return [row[:n] for row, n in zip(batch.x.tolist(), batch.lengths.tolist(), strict=True)]


def classifier(directory: Path):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(directory).eval()


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_golden_numbers_of_bradley_terry():
    chosen, rejected = torch.tensor([1.2, -0.5, 0.4]), torch.tensor([0.3, -0.1, 0.4])
    assert bradley_terry(chosen, rejected).mean().item() == pytest.approx(0.6491054359, abs=1e-7)
    assert bradley_terry(chosen, rejected, center=0.01).mean().item() == pytest.approx(0.6599387692, abs=1e-7)
    margin = torch.tensor([0.5, 0.0, 2.0])
    by_hand = [math.log1p(math.exp(-d)) for d in (0.4, -0.4, -2.0)]
    assert bradley_terry(chosen, rejected, margin).tolist() == pytest.approx(by_hand, abs=1e-6)
    n = torch.tensor([3, 4, 5])
    assert measure(chosen, rejected, n, n)["accuracy"] == pytest.approx(1 / 3)  # a tie is no win


def test_gradient_of_bradley_terry_is_the_closed_form():
    chosen, rejected = torch.tensor([1.5], requires_grad=True), torch.tensor([0.25], requires_grad=True)
    bradley_terry(chosen, rejected, torch.tensor([1.0]), 0.01).sum().backward()
    push = 1 / (1 + math.exp(1.5 - 0.25 - 1.0))
    assert chosen.grad.item() == pytest.approx(-push + 0.02 * 1.75, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(push + 0.02 * 1.75, abs=1e-6)


def test_the_score_is_read_at_the_end_token_whatever_is_beside_and_behind_it(base):
    model, batch, tokenizer = random_model(base), some_batch(base), Tokenizer.load(base / "model")
    with torch.no_grad():
        _, chosen, rejected = pair_losses(model, batch)
        alone = [model.hidden(torch.tensor([ids]))[0, -1] @ model.score.weight[0] for ids in rows_of(batch)]
        junk = batch.x.clone()
        for row, n in zip(junk, batch.lengths, strict=True):
            row[n:] = 7  # not even padding
        _, others, _ = pair_losses(model, batch._replace(x=junk))
    assert all(ids[-1] == tokenizer.im_end_id and ids.count(tokenizer.im_end_id) == 2 for ids in rows_of(batch))
    torch.testing.assert_close(torch.cat((chosen, rejected)), torch.stack(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(others, chosen, atol=1e-5, rtol=1e-5)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    again = score_talks(model, tokenizer, [messages] * 2)
    ids = tokenizer.render(messages)[0]
    assert ids[-2] == tokenizer.im_end_id
    with torch.no_grad():
        assert again == pytest.approx([model(torch.tensor([ids]))[0, -2].item()] * 2, abs=1e-5)


@pytest.mark.parametrize("name", ["model", "qwen"])
def test_scores_and_loss_equal_transformers_and_trl(base, tmp_path, name):
    from trl import RewardTrainer

    model, batch, tokenizer = random_model(base, name), some_batch(base), Tokenizer.load(base / "model")
    reward_model.write_model(tmp_path, model, tokenizer)
    hf = classifier(tmp_path)
    assert hf.config.num_labels == 1 and hf.config.pad_token_id == tokenizer.pad_id
    keep = (torch.arange(batch.x.shape[1]) < batch.lengths[:, None]).long()
    stub = SimpleNamespace(
        model=hf, args=SimpleNamespace(center_rewards_coefficient=0.01), _total_train_tokens=0,
        accelerator=SimpleNamespace(gather_for_metrics=lambda t: t, gather=lambda t: t),
        _metrics={"eval": {key: [] for key in ("num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy",
                                               "margin")}},
    )  # fmt: skip
    inputs = {"input_ids": batch.x, "attention_mask": keep, "margin": batch.margin}
    theirs, outputs = RewardTrainer.compute_loss(stub, hf, inputs, return_outputs=True)
    losses, chosen, rejected = pair_losses(model, batch, center=0.01)
    torch.testing.assert_close(torch.cat((chosen, rejected)), outputs.logits[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(losses.mean(), theirs, atol=1e-6, rtol=1e-6)
    n = torch.bincount(batch.row).chunk(2)
    assert measure(chosen, rejected, *n)["accuracy"] == pytest.approx(stub._metrics["eval"]["accuracy"][0])
    losses.mean().backward()
    theirs.backward()
    grads = {key.removeprefix("model."): p.grad for key, p in hf.named_parameters()}
    assert grads.keys() == {key for key, _ in model.named_parameters()}
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[key], atol=1e-5, rtol=1e-4)
    back = reward_model.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))


def test_a_padding_token_that_ends_turns_is_replaced_before_the_first_step(run, base, tmp_path):
    """SmolLM2 pads with <|im_end|>, of which transformers would read none."""
    own = Tokenizer.load(base / "model")
    files = {name: content.replace(b"<|pad|>", b"<|other|>") for name, content in own.files.items()}
    config = json.loads(files["tokenizer_config.json"]) | {"pad_token": "<|im_end|>"}
    tokenizer = Tokenizer(files | {"tokenizer_config.json": json.dumps(config).encode()})
    assert tokenizer.pad_id == tokenizer.im_end_id
    huggingface.write_model(tmp_path / "base", huggingface.load_model(base / "model"), tokenizer)
    assert run(f"--init_from={tmp_path / 'base'}", "--max_steps=2") == 0
    path = tmp_path / "out/latest"
    model, saved = reward_model.load(path), Tokenizer.load(path)
    assert saved.pad_id not in (-1, saved.im_end_id) and saved.fingerprint() == tokenizer.fingerprint()
    with torch.no_grad():
        model.score.weight.normal_()
    reward_model.write_model(tmp_path / "again", model, tokenizer)
    rows, hf = rows_of(some_batch(base, 4)), classifier(tmp_path / "again")
    x = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), True, hf.config.pad_token_id)
    with torch.no_grad():
        theirs = hf(x).logits[:, 0].tolist()
    assert reward_model.score_ids(model, rows) == pytest.approx(theirs, abs=1e-5)
    alone = SimpleNamespace(pad_id=2, turn_end_id=2, special_tokens={"</s>": 2})
    with pytest.raises(UserError, match="no special token to pad with"):
        reward_model.padded(alone)


def test_scores_stay_float32_under_autocast(base):
    model, batch = random_model(base), some_batch(base)
    losses, chosen, _ = pair_losses(model, batch, dtype=torch.bfloat16)
    assert losses.dtype == chosen.dtype == torch.float32
    assert (chosen != chosen.bfloat16().float()).any()


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_equal_counts_by_hand():
    rng = random.Random(3)
    chosen, rejected = ([rng.gauss(m, 1) for _ in range(300)] for m in (0.3, 0))
    chosen[7] = rejected[7]
    n_chosen, n_rejected = ([rng.randrange(5, 20) for _ in range(300)] for _ in range(2))
    found = measure(*map(torch.tensor, (chosen, rejected, n_chosen, n_rejected)))
    rows = list(zip(chosen, rejected, n_chosen, n_rejected, strict=True))

    def share(rows: list, wins) -> float:
        return sum(map(wins, rows)) / len(rows)

    def right(row: tuple) -> bool:
        return row[0] > row[1]

    def longer(row: tuple) -> float:
        return 1 if row[2] > row[3] else 0.5 if row[2] == row[3] else 0

    assert found["accuracy"] == pytest.approx(share(rows, right))
    assert found["longer_wins"] == pytest.approx(share(rows, longer))
    buckets = {
        "chosen_shorter": [row for row in rows if row[2] * 5 < row[3] * 4],
        "alike": [row for row in rows if row[2] * 5 >= row[3] * 4 and row[2] * 4 <= row[3] * 5],
        "chosen_longer": [row for row in rows if row[2] * 4 > row[3] * 5],
    }
    for name, some in buckets.items():
        assert found[f"pairs/{name}"] == len(some) > 20
        assert found[f"accuracy/{name}"] == pytest.approx(share(some, right))
    scores, lengths = chosen + rejected, n_chosen + n_rejected
    assert found["length_correlation"] == pytest.approx(np.corrcoef(scores, lengths)[0, 1])
    assert found["reward_mean"] == pytest.approx(np.mean(scores))
    assert found["reward_std"] == pytest.approx(np.std(scores))
    bins: dict[int, list] = {}
    for a, b, *_ in rows:
        p = 1 / (1 + math.exp(-abs(a - b)))
        bins.setdefault(int((p - 0.5) * 20), []).append((p, 1.0 if a > b else 0.5 if a == b else 0.0))
    ece = sum(abs(sum(p for p, _ in some) - sum(r for _, r in some)) for some in bins.values()) / len(rows)
    assert found["ece"] == pytest.approx(ece, abs=1e-6)


def test_evaluation_equals_scores_of_one_answer_at_a_time(base, monkeypatch):
    model, tokenizer = random_model(base), Tokenizer.load(base / "model")
    corpus = PairCorpus(str(base / "pairs.jsonl"), tokenizer, 128, seed=1, val_fraction=0.3)
    monkeypatch.setattr(reward, "batch_size", 4)
    monkeypatch.setattr(reward, "stop_signal", lambda: False, raising=False)
    monkeypatch.setattr(reward, "torch_device", torch.device("cpu"), raising=False)
    monkeypatch.setattr(reward, "torch_dtype", torch.float32, raising=False)
    found = reward.evaluate(model, corpus)
    (val,) = corpus.val.values()
    sides = [[[*prompt, *answer] for answer in answers] for prompt, *answers in map(val.ids, range(val.n_rows))]
    scores = [reward_model.score_ids(model, [[int(i) for i in ids] for ids in rows]) for rows in sides]
    assert found["accuracy"] == pytest.approx(sum(a > b for a, b in scores) / len(scores))
    losses = [math.log1p(math.exp(b - a + m)) for (a, b), m in zip(scores, val.margin.tolist(), strict=True)]
    assert found["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert len(scores) == val.n_rows > 10


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_begins_at_ln_2_learns_the_rule_and_opens_in_transformers(run, base, tmp_path):
    """Held-out pairs too; the longer answer would have won half of them. Then the same rows through --score."""
    flags = ["--max_steps=50", "--learning_rate=3e-3", "--margin_scale=0", "--keep_last=1"]
    assert run(*flags, "--eval_every=50", "--save_every=50") == 0
    out = tmp_path / "out"
    assert tp.events(out, "train")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    first, *_, last = tp.events(out, "eval")
    assert first["val_loss"] == pytest.approx(math.log(2), abs=1e-6) and first["accuracy"] == first["ece"] == 0
    assert last["accuracy"] == 1 and last["val_loss"] < 0.1 and 0.2 < last["longer_wins"] < 0.8
    talks = [pair(i)["prompt"] + [{"role": "assistant", "content": pair(i)["chosen"]}] for i in range(100, 109)]
    path = write(tmp_path / "talks.jsonl", [{"messages": talk, "id": i} for i, talk in enumerate(talks)])
    assert run(f"--init_from={out}", f"--score={path}", f"--out={tmp_path / 'scored.jsonl'}") == 0
    rows = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == list(range(9)) and [row["messages"] for row in rows] == talks
    tokenizer, hf = Tokenizer.load(out / "latest"), classifier(out / "latest")
    ids = [reward_model.answered_ids(talk, tokenizer) for talk in talks]
    x = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), batch_first=True, padding_value=tokenizer.pad_id)
    with torch.no_grad():
        theirs = hf(x, attention_mask=(x != tokenizer.pad_id).long()).logits[:, 0].tolist()
    assert [row["reward"] for row in rows] == pytest.approx(theirs, abs=1e-4)
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("flags", [[], ["--total_batch_pairs=8"]])
def test_plan_log_and_card_count_no_padding(run, tmp_path, capsys, flags):
    """Rows differ in length, so a batch of them is padded; the setting of a total still counts it."""
    assert run("--max_steps=0", "--epochs=1", *flags) == 0
    tp.assert_tokens_are_those_of(tmp_path / "out", capsys.readouterr().out)


def test_steps_do_not_depend_on_how_they_are_cut(run, tmp_path):
    """One micro-batch, or four: the loss is over the pairs of the step."""
    for size in "82":
        flags = [f"--batch_size={size}", "--total_batch_pairs=8", "--max_steps=3", "--center=0.01"]
        assert run(*flags, f"--out_dir={tmp_path / size}") == 0
    one, four = ([(e["loss"], e["grad_norm"]) for e in tp.events(tmp_path / size, "train")] for size in "82")
    assert np.array(four) == pytest.approx(np.array(one), rel=1e-3)


def assert_same_run(a: Path, b: Path) -> None:
    for key in ("loss", "grad_norm", "lr", "accuracy", "margin"):
        assert [e[key] for e in tp.events(a, "train")] == [e[key] for e in tp.events(b, "train")], key
    for key in ("val_loss", "accuracy", "ece"):
        assert [e[key] for e in tp.events(a, "eval")] == [e[key] for e in tp.events(b, "eval")], key
    weights, others = (load_file(out / "latest" / "model.safetensors") for out in (a, b))
    assert all(torch.equal(weights[name], others[name]) for name in weights.keys() | others.keys())
    mine, theirs = (load_train_state(out / "latest", 0)[0] for out in (a, b))
    for name, state in mine["optimizer"].items():
        assert all(torch.equal(state[key], theirs["optimizer"][name][key]) for key in state), name
    for name, weight in mine["trained"].get("weights", {}).items():
        assert torch.equal(weight, theirs["trained"]["weights"][name]), name


def test_a_stopped_run_continues_to_the_bit(run, tmp_path, monkeypatch):
    """tests/test_kills.py has a run with adapters."""
    common = ["--dropout=0.1", "--max_steps=6", "--save_every=2", "--eval_every=4"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert run(*common, f"--out_dir={straight}") == 0
    advance, n_steps = RunLog.advance, []

    def stop(log: RunLog) -> None:
        n_steps.append(1)
        if len(n_steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        advance(log)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "advance", stop)
        assert run(*common, f"--out_dir={stopped}") == 128 + signal.SIGTERM
    assert run(*common, f"--out_dir={stopped}") == 0
    assert_same_run(straight, stopped)
    assert run(*common, f"--out_dir={stopped}") == 0  # once more: nothing is left to do
    assert_same_run(straight, stopped)


def test_the_plan_names_what_a_run_holds(base, tmp_path, monkeypatch, capsys):
    """No logits; the error of a compression that loses some."""
    flags = ["--plan_only=True", "--compress=powersgd"]
    monkeypatch.setattr(sys, "argv", ["reward.py", *flags_of(base, tmp_path / "out", *flags)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "reward.py"), run_name="__main__")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
    matrices = sum(p.numel() for name, p in random_model(base).layers.named_parameters() if p.ndim == 2)
    assert f"compression error {4 * matrices / 2**20:,.0f} MiB" in line and "logits 0 MiB" in line
    assert not (tmp_path / "out").exists()


def test_adapters_are_added_to_what_is_saved_and_the_base_stays(run, base, tmp_path):
    assert run("--trainable=lora", "--max_steps=4", "--learning_rate=3e-2", "--lora_rank=4") == 0
    path = tmp_path / "out" / "latest"
    trained = load_train_state(path, 0)[0]["trained"]
    assert all("lora" in name or name == "score.weight" for name in trained["weights"])
    model = RewardModel(huggingface.load_config(base / "model"))
    set_trainable(model, "lora", LoRAConfig(4, 32.0))
    reward_model.load_weights(model, path, trained)
    plain, tokenizer = reward_model.load(path), Tokenizer.load(path)
    assert "model.layers.0.self_attn.q_proj.weight" in load_file(path / "model.safetensors")
    talks = [[*pair(i)["prompt"], {"role": "assistant", "content": pair(i)["chosen"]}] for i in range(3)]
    scores = score_talks(model, tokenizer, talks)
    assert score_talks(plain, tokenizer, talks) == pytest.approx(scores, rel=1e-4) and len(set(scores)) == 3
    embedding = load_file(base / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(plain.embed_tokens.weight, embedding)


def test_a_reward_model_goes_on_as_a_start_and_a_language_model_scores_nothing(run, base, tmp_path):
    assert run("--max_steps=3") == 0
    saved = load_file(tmp_path / "out" / "latest" / "model.safetensors")
    assert saved["score.weight"].abs().max() > 0
    flags = [f"--init_from={tmp_path / 'out'}", f"--out_dir={tmp_path / 'more'}", "--learning_rate=0"]
    assert run(*flags, "--max_steps=1") == 0
    again = load_file(tmp_path / "more" / "latest" / "model.safetensors")
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    with pytest.raises(UserError, match="no reward model"):
        reward_model.load(base / "model")


# ---- scoring files --------------------------------------------------------------------------------------------------


WRITERS = {  # flags besides init_from; of evaluate.py see test_evaluate.py
    "sft.py": [], "dpo.py": [], "rl.py": ["--reward=x.py:f"], "pretrain.py": ["--data_dir={base}/data"],
    "sample.py": [], "serve.py": ["--port=0"], "tools/merge.py": ["--out_dir={out}/m"], "tools/tour.py": [],
    "tools/to_gguf.py": ["--out={out}/m.gguf"],
}  # fmt: skip


@pytest.mark.parametrize("script", WRITERS)
def test_what_writes_text_refuses_a_reward_model_in_one_line(script, run, base, tmp_path, monkeypatch):
    """With what it started from, if it is a run of ours."""
    rm = tmp_path / "rm"
    assert run(f"--out_dir={rm}", "--max_steps=1") == 0
    folders = {"base": base, "out": tmp_path}
    flags = [f"--init_from={rm}", *(flag.format_map(folders) for flag in WRITERS[script])]
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(UserError) as caught:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    said = str(caught.value)
    assert "a reward model, which" in said and "score.weight" not in said
    assert f"--init_from={base / 'model'} is what it started from" in said
    assert not (tmp_path / "m").exists()


def test_a_reward_model_of_others_is_refused_too_and_where_one_is_wanted_it_is_taken(base, tmp_path):
    reward_model.write_model(tmp_path / "rm", random_model(base), Tokenizer.load(base / "model"))
    with pytest.raises(UserError, match="rm is a reward model, which writes no text; give another teacher$"):
        checkpoint.resolve(tmp_path / "rm", "teacher")
    assert checkpoint.resolve(tmp_path / "rm", rewards=True) == tmp_path / "rm"
    (tmp_path / "run").mkdir()
    (tmp_path / "rm").rename(tmp_path / "run" / "step_000001")
    (tmp_path / "run" / "config.py").write_text("init_from = = 3")  # a person was here
    with pytest.raises(UserError, match="give another init_from$"):
        checkpoint.resolve(tmp_path / "run" / "step_000001")


def talk(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def score_rows(model: RewardModel, tokenizer: Tokenizer, source: Path, out: Path) -> list[dict]:
    scored_rows.write_rewards(model, tokenizer, str(source), out, "k" * 16, 2, torch.float32)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_a_scored_file_has_all_rows_in_order_and_is_whole_or_not_there(base, tmp_path, monkeypatch):
    model, tokenizer = random_model(base), Tokenizer.load(base / "model")
    good = [talk(f"Hi {i}", "是" * (1 + i % 7)) for i in range(300)]
    bad = [{"no": "shape"}, {"messages": good[0]["messages"][:1]}, talk("Hi", "x " * 200)]
    rows = [*good[:150], *bad, *good[150:]]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "deep" / "out.jsonl"
    scored, done = scored_rows.with_rewards, []

    def fail(*args) -> object:
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt
        return scored(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scored_rows, "with_rewards", fail)
        score_rows(model, tokenizer, source, out)
    assert not out.exists()
    (part,) = out.parent.glob(".*.part")
    text = part.read_text(encoding="utf-8")
    assert text.count("\n") == 128
    part.write_text(text + '{"q": 9', encoding="utf-8")  # a kill in the midst of a line
    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(scored_rows, "with_rewards", lambda *args: asked.append(len(args[2])) or scored(*args))
        found = score_rows(model, tokenizer, source, out)
    assert sum(asked) == len(rows) - 128 and not part.exists()
    assert [{k: v for k, v in row.items() if not k.startswith("reward")} for row in found] == rows
    assert [row["reward"] is None for row in found] == [150 <= i < 153 for i in range(303)]
    problems = [row["reward_problem"].partition(":")[0] for row in found[150:153]]
    assert problems == ["not understood", "answer missing", "too long"]
    alone = [score_talks(model, tokenizer, [row["messages"]])[0] for row in good[::29]]
    rewards = [row["reward"] for row in found if row["reward"] is not None]
    assert rewards[::29] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("rows, says", [
    ([], "there is none"),
    ([{"no": "shape"}] * 2 + [talk("Hi", "x " * 200)], "not understood 2, too long 1"),
])  # fmt: skip
def test_nothing_to_score_is_an_error_and_no_file(base, tmp_path, rows, says):
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(UserError, match=f"no row of .*in.jsonl has a score: {says}$"):
        score_rows(random_model(base), Tokenizer.load(base / "model"), source, out)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def ended(text: str, how: str = "stop") -> dict:
    return {"text": text, "finish_reason": how, "stop_reason": None}


def test_answers_are_scored_after_their_prompts(base, tmp_path):
    """A question, messages, a conversation with an answer of its own; beside them a plain conversation and what is not
    understood. A second time it is the same."""
    model, tokenizer = random_model(base), Tokenizer.load(base / "model")
    asked = [{"role": "user", "content": "你好?"}]
    earlier = [{"role": "system", "content": "Be kind."}, *talk("Hi", "Yes?")["messages"], *asked]
    rows = [
        {"index": 0, "prompt": "你好?", "completions": [ended("好。"), ended("好,好", "length"), ended("")]},
        {"index": 1, "prompt": earlier, "completions": [ended("It is.<|im_end|>"), ended("x " * 200)]},
        {"index": 2, "messages": [*asked, {"role": "assistant", "content": "own"}], "completions": [ended("再见")]},
        talk("Hi", "Yes."),
        {"text": "Once", "completions": [ended("upon")]},
        {"prompt": "Hi", "completions": "none"},
        {"prompt": "Hi", "completions": []},
    ]
    source = write(tmp_path / "in.jsonl", rows)
    write_settings(source, {"model": "m"})
    found = score_rows(model, tokenizer, source, tmp_path / "out.jsonl")
    by_hand = [(asked, "好。"), (asked, ""), (earlier, "It is."), (asked, "再见")]
    talks = [[*messages, {"role": "assistant", "content": text}] for messages, text in by_hand]
    talks.append(talk("Hi", "Yes.")["messages"])
    scores = [score_talks(model, tokenizer, [one])[0] for one in talks]
    rewards = [[one["reward"] for one in row["completions"]] for row in found[:3]]
    expected = [[scores[0], None, scores[1]], [scores[2], None], [scores[3]]]
    for mine, theirs in zip([*rewards, [found[3]["reward"]]], [*expected, [scores[4]]], strict=True):
        assert [one is None for one in mine] == [one is None for one in theirs]
        assert [one for one in mine if one] == pytest.approx([one for one in theirs if one], abs=1e-5)
    assert found[0]["completions"][1]["reward_problem"] == "unfinished answer"
    assert found[1]["completions"][1]["reward_problem"].startswith("too long: ")
    assert all(row["reward_problem"].startswith("not understood") for row in found[4:6])
    assert found[6] == rows[6] and all("reward" not in row for row in found[:3])
    other, settings = tmp_path / "other.jsonl", {"model": "m", "reward_model": "r"}
    counts = scored_rows.write_rewards(model, tokenizer, str(source), other, "k", 2, torch.float32, settings)
    assert counts == {"": 5, "unfinished answer": 1, "too long": 1, "not understood": 2}
    assert read_settings(other) == settings
    assert score_rows(model, tokenizer, other, tmp_path / "again.jsonl") == found


@pytest.fixture
def judge(base, tmp_path) -> Path:
    """The directory of a reward model."""
    (tmp_path / "judge").mkdir()
    reward_model.write_model(tmp_path / "judge", random_model(base), Tokenizer.load(base / "model"))
    return tmp_path / "judge"


def write_answers(path: Path, question: str, answer: str, settings: dict) -> Path:
    write_settings(path, settings)
    return write(path, [{"index": 0, "prompt": question, "completions": [ended(answer)]}])


ANSWERED = {"system": "Be kind.", "seed": 1, "model": "step_000008 0123"}


def test_scored_answers_say_how_they_were_made_and_by_which_reward_model(run, base, judge, tmp_path, capsys):
    """The system message that sample.py was given is before every question that has none."""
    source = write_answers(tmp_path / "a.jsonl", "你好?", "好。", ANSWERED)
    write_answers(tmp_path / "b.jsonl", "你好?", "好。", ANSWERED | {"seed": 2})
    flags = [f"--init_from={judge}", f"--out={tmp_path / 'out.jsonl'}"]
    assert run(*flags, f"--score={source}") == 0
    assert "1 answer with a reward" in capsys.readouterr().out
    said = [{"role": "system", "content": "Be kind."}, *talk("你好?", "好。")["messages"]]
    model, tokenizer = random_model(base), Tokenizer.load(base / "model")
    (completion,) = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["completions"]
    assert completion["reward"] == pytest.approx(score_talks(model, tokenizer, [said])[0], abs=1e-5)
    beside = read_settings(tmp_path / "out.jsonl")
    assert beside == ANSWERED | {"reward_model": huggingface.model_name(judge)}
    with pytest.raises(UserError, match="answered with another seed"):
        run(*flags, f"--score={tmp_path / '[ab].jsonl'}")


def test_a_directory_of_answers_is_scored_without_their_settings(run, judge, tmp_path):
    """Answers of one model, one file scored before; a conversation beside them."""
    (tmp_path / "in").mkdir()
    write_answers(tmp_path / "in" / "a.jsonl", "Hi", "一", ANSWERED)
    write_answers(tmp_path / "in" / "b.jsonl", "Hi", "二", ANSWERED | {"reward_model": "older"})
    write(tmp_path / "in" / "c.jsonl", [talk("Hi", "三")])
    assert run(f"--init_from={judge}", f"--score={tmp_path / 'in'}", f"--out={tmp_path / 'out.jsonl'}") == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["completions"][0]["text"] for row in rows[:2]] == ["一", "二"] and len(rows) == 3
    assert rows[2]["messages"][-1]["content"] == "三" and isinstance(rows[2]["reward"], float)
    assert read_settings(tmp_path / "out.jsonl") == ANSWERED | {"reward_model": huggingface.model_name(judge)}
    for source, says in ((tmp_path / "in" / "*.config.json", "settings of answers only"), ("-", "standard input")):
        with pytest.raises(UserError, match=says):
            run(f"--init_from={judge}", f"--score={source}", f"--out={tmp_path / 'x'}")


def test_answers_without_their_settings_are_refused(run, judge, tmp_path):
    """Behind others too, and behind a conversation in their own file; not what another file says in their stead."""
    write_answers(tmp_path / "a.jsonl", "Hi", "Yes", ANSWERED)
    settings_path(write_answers(tmp_path / "b.jsonl", "Hi", "No", ANSWERED)).unlink()
    mixed = [talk("Hi", "Yes"), {"prompt": "Hi", "completions": [ended("No")]}]
    write(tmp_path / "c.jsonl", mixed)
    before = sorted(path.name for path in tmp_path.iterdir())
    for name, missing in (("b.jsonl", "b"), ("[ab].jsonl", "b"), ("c.jsonl", "c")):
        with pytest.raises(UserError, match=f"{missing}.jsonl.config.json is missing"):
            run(f"--init_from={judge}", f"--score={tmp_path / name}", f"--out={tmp_path / 'out.jsonl'}")
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    with pytest.raises(UserError, match="b.jsonl.config.json is missing"):  # before anything is scored
        scored_rows.common_settings(str(tmp_path / "[ab].jsonl"))


def test_older_settings_do_not_vouch_for_other_answers(run, judge, tmp_path):
    """Rows without settings onto a file that has some: they go. Answers onto their own file: they stay."""
    out = write_answers(tmp_path / "out.jsonl", "Hi", "Yes", ANSWERED)
    assert run(f"--init_from={judge}", f"--score={out}", f"--out={out}") == 0
    assert read_settings(out) == ANSWERED | {"reward_model": huggingface.model_name(judge)}
    talks = write(tmp_path / "talks.jsonl", [talk("Hi", "Yes")])
    assert run(f"--init_from={judge}", f"--score={talks}", f"--out={out}") == 0
    assert out.read_text(encoding="utf-8").count("\n") == 1 and read_settings(out) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["judge", "out.jsonl", "talks.jsonl"]


@pytest.mark.parametrize("when, name", [("before", "old.jsonl"), ("after", "old.jsonl"), ("before", "new.jsonl")])
def test_a_kill_leaves_no_settings_of_other_answers(base, tmp_path, monkeypatch, when, name):
    """Before or after the new rows get their name; those of answers that are scored in their own place stay."""
    source = write_answers(tmp_path / "new.jsonl", "Hi", "Yes", ANSWERED)
    write_answers(tmp_path / "old.jsonl", "Hi", "No", ANSWERED | {"seed": 9})
    model, tokenizer, replace = random_model(base), Tokenizer.load(base / "model"), os.replace

    def killed(old: Path, new: Path) -> None:
        if when == "after":
            replace(old, new)
        raise KeyboardInterrupt

    monkeypatch.setattr(scored_rows.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        scored_rows.write_rewards(
            model, tokenizer, str(source), tmp_path / name, "k", 2, torch.float32, ANSWERED | {"reward_model": "r"}
        )
    assert ("Yes" in (tmp_path / "old.jsonl").read_text(encoding="utf-8")) == (when == "after")
    assert read_settings(tmp_path / name) == (ANSWERED if name == "new.jsonl" else None)


# ---- ranks ----------------------------------------------------------------------------------------------------------

ONE_STEP = ["--total_batch_pairs=8", "--batch_size=2", "--max_steps=2", "--save_every=2", "--eval_every=2"]
RANK_CASES = {
    "all": ["--center=0.01"],
    "lora zero1": ["--trainable=lora", "--zero1=True"],
    "forward": ["--overlap_step=forward"],
}


@pytest.fixture(scope="session")
def two_ranks(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    jobs = [
        (flags_of(base, folder / name, *tp.flags_with_defaults(tuple(flags), ONE_STEP)), False)
        for name, flags in RANK_CASES.items()
    ]
    run_on_ranks(2, "reward.py", jobs, folder)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("name", RANK_CASES)
def test_two_ranks_equal_one(two_ranks, run, tmp_path, name):
    flags = [flag for flag in RANK_CASES[name] if not flag.startswith(("--zero1", "--overlap"))]
    assert run(*tp.flags_with_defaults(tuple(flags), ONE_STEP)) == 0
    mine, theirs = tp.events(tmp_path / "out", "train"), tp.events(two_ranks / name, "train")
    for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3), ("accuracy", 1e-6), ("margin", 1e-3)):
        assert [e[key] for e in theirs] == pytest.approx([e[key] for e in mine], rel=tolerance, abs=1e-6), key
    mine, theirs = tp.events(tmp_path / "out", "eval")[-1], tp.events(two_ranks / name, "eval")[-1]
    for key in ("val_loss", "accuracy", "longer_wins", "ece", "length_correlation", "pairs/alike"):
        assert theirs[key] == pytest.approx(mine[key], rel=1e-3), key


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--init_from="], "init_from: give the run"),
        (["--init_from=nowhere"], "nowhere"),
        (["--data=nowhere.jsonl"], "nowhere.jsonl"),
        (["--epochs=0"], "too few to learn from"),
        (["--center=-1"], "center must be at least 0"),
        (["--margin_scale=-1"], "margin_scale must be at least 0"),
        (["--schedule=cosin"], "schedule must be"),
        (["--total_batch_pairs=3"], "multiple of"),
        (["--trainable=nonsense"], "nonsense"),
        (["--block_size=8"], "too long for block_size=8; block_size="),
        (["--val_fraction=0"], "held out"),
        (["--score=talks.jsonl"], "no reward model"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(run, tmp_path, monkeypatch, flags, says, base):
    monkeypatch.setattr(sys, "argv", ["reward.py", *flags_of(base, tmp_path / "out", *flags)])
    with pytest.raises(Exception, match=says) as caught:
        runpy.run_path(str(ROOT / "reward.py"), run_name="__main__")
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_resume_with_another_base_is_refused(run, base, tmp_path):
    shutil.copytree(base / "model", tmp_path / "base")
    common = ["--trainable=lora", f"--init_from={tmp_path / 'base'}"]
    assert run(*common, "--max_steps=2") == 0
    shutil.copy(base / "qwen" / "model.safetensors", tmp_path / "base" / "model.safetensors")
    with pytest.raises(UserError, match="not those that"):
        run(*common, "--max_steps=3")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_trains_as_a_cpu_does(run, tmp_path, compiled):
    tp.assert_gpu_trains_as_cpu(run, tmp_path, compiled)


def test_every_shipped_config_trains(run, tmp_path):
    for path in sorted(ROOT.glob("config/*.py")):
        if " reward.py config" in path.read_text(encoding="utf-8"):
            small = ["--max_steps=2", "--total_batch_pairs=0", "--warmup_steps=1"]
            assert run(str(path), f"--out_dir={tmp_path / path.stem}", *small) == 0, path
            assert tp.events(tmp_path / path.stem, "eval")[-1]["step"] == 2
