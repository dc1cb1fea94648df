"""dpo.py as users run it: the losses of trl, log-probabilities by hand, the same on any ranks, exact resume."""

import io
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forks
import numpy as np
import pytest
import test_pretrain as tp
import torch
import torch.nn.functional as F
from jobs import run_on_ranks
from no_float64 import on_device
from safetensors.torch import load_file
from saved import load_train_state

from configurator import choices, comments_of
from groundup import errors
from groundup.align import losses as align_losses
from groundup.align.losses import (
    METRICS,
    REFERENCE_FREE,
    kl_estimate,
    kto_losses_and_metrics,
    losses_and_metrics,
    named,
    pair_logps,
    pair_losses,
    reference_logps,
)
from groundup.demo import debug_data
from groundup.errors import UserError
from groundup.tokens.pairs import LabelCorpus, PairBatch, PairCorpus, load_pairs
from groundup.train import huggingface
from groundup.train.lora import LoRAConfig, set_trainable
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
FLAGS = ["--device=cpu", "--dtype=float32", "--compile=False", "--log_every=1", "--eval_steps=2", "--block_size=128"]
FLAGS += ["--batch_size=4", "--learning_rate=1e-2", "--peak_tflops=1", "--val_fraction=0.2"]
CPU = torch.device("cpu")
SETTINGS = {"beta": 0.1, "label_smoothing": 0.0, "gamma": 0.5, "desirable_weight": 1.0, "nll_weight": 0.0}
LOSSES = choices(comments_of(ROOT / "dpo.py")["loss"])
OF_SUMS = ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm")  # that trl computes from logits


def settings(loss: str, **others: float) -> dict:
    return SETTINGS | {"loss": loss} | others


def test_kto_with_the_nll_weight_of_a_config_says_what_to_give():
    """As config/demo_dpo.py sets it."""
    with pytest.raises(UserError, match="; give --nll_weight=0$"):
        align_losses.check_losses(settings("kto", nll_weight=0.5) | {"reference": "init", "trainable": "all"})


def pair(i: int) -> dict:
    """The right answer of several lengths, and a wrong one of another length."""
    right, wrong = f"It is {2 * i}." + " Yes." * (i % 3), f"No idea about {i}" + ", sorry" * (i % 5)
    return {"prompt": [{"role": "user", "content": f"What is {i} plus {i}?"}], "chosen": right, "rejected": wrong}


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A small model of random weights: base/model, its tokenizer, and pairs.jsonl."""
    folder = tmp_path_factory.mktemp("base")
    debug_data.make_debug_data(folder / "data")
    tokenizer = Tokenizer.load(folder / "data")
    (folder / "model").mkdir()
    torch.manual_seed(0)
    cfg = ModelConfig(tokenizer.vocab_size, block_size=128, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    model = Transformer(cfg)
    for p in model.parameters():
        p.data.mul_(4)  # logits that differ
    huggingface.write_model(folder / "model", model, tokenizer)
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(pair(i)) for i in range(60)), encoding="utf-8")
    return folder


def flags_of(base: Path, out: Path, *flags: str) -> list[str]:
    common = [f"--init_from={base / 'model'}", f"--data={base / 'pairs.jsonl'}", f"--out_dir={out}", *FLAGS]
    return tp.flags_with_defaults(flags, common)


@pytest.fixture
def run(base, tmp_path, monkeypatch):
    """run(*flags) -> exit status of dpo.py in this process; out_dir is tmp_path/out unless a flag says other."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dpo.py", *flags_of(base, tmp_path / "out", *flags)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "dpo.py"), run_name="__main__")
        return caught.value.code or 0

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def corpus_of(base: Path, rows: list[dict], tmp_path: Path) -> PairCorpus:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return PairCorpus(str(path), Tokenizer.load(base / "model"), 128, seed=1, val_fraction=0.0)


def batch_of(base: Path, rows: list[dict], tmp_path: Path) -> PairBatch:
    """All the rows, in their order, in one batch."""
    corpus = corpus_of(base, rows, tmp_path)
    assert corpus.train[0].n_rows == len(rows)
    return load_pairs(corpus.train * len(rows), np.arange(len(rows)))


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_evaluation_needs_no_float64_on_the_device(run, monkeypatch):
    monkeypatch.setattr(align_losses, "losses_and_metrics", on_device(align_losses.losses_and_metrics))
    assert run("--max_steps=1") == 0


def test_sums_are_over_the_answer_and_its_end_alone(base, tmp_path):
    """By hand from all the logits of each text alone: the prompt is not counted, the one <|im_end|> is, the newline
    behind it is not, and neither is padding or another row."""
    model, tokenizer = huggingface.load_model(base / "model"), Tokenizer.load(base / "model")
    rows = [pair(i) for i in (0, 4, 7, 14)] + [pair(3) | {"chosen": "a", "rejected": "b"}]
    batch = batch_of(base, rows, tmp_path)
    with torch.no_grad():
        logps, n_tokens = pair_logps(model, batch)
        for side, key in enumerate(("chosen", "rejected")):
            for i, row in enumerate(rows):
                prompt, _ = tokenizer.render(row["prompt"], add_generation_prompt=True)
                answer = [*tokenizer.encode(row[key]), tokenizer.im_end_id]
                ids = torch.tensor([prompt + answer])
                each = model(ids[:, :-1])[0].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                assert logps[side, i].item() == pytest.approx(each[-len(answer) :].sum().item(), rel=1e-5)
                assert n_tokens[side, i] == len(answer)
                assert (batch.targets[batch.row == side * len(rows) + i] == tokenizer.im_end_id).sum() == 1
            assert n_tokens[side, -1] == 2  # an answer of one token, and its end
            alone = [pair_logps(model, batch_of(base, [row], tmp_path))[0][side, 0] for row in rows]
            torch.testing.assert_close(torch.stack(alone), logps[side])


def test_equal_answers_have_equal_sums_whatever_is_beside_them(base, tmp_path):
    """Both sides of the pair made equal after it was read: D = 0 to the bit, in every loss."""
    model = huggingface.load_model(base / "model")
    batch = batch_of(base, [pair(2), pair(9)], tmp_path)
    B, half = 2, batch.row < 2
    twice = [torch.cat((t[half], t[half])) for t in (batch.targets, batch.index)]
    index = torch.cat((twice[1][: half.sum()], twice[1][: half.sum()] + B * batch.x.shape[1]))
    row = torch.cat((batch.row[half], batch.row[half] + B))
    x = torch.cat((batch.x[:B], batch.x[:B]))
    logps, n_tokens = pair_logps(model, batch._replace(x=x, targets=twice[0], index=index, row=row))
    assert torch.equal(logps[0], logps[1]) and torch.equal(n_tokens[0], n_tokens[1])
    _, metrics = losses_and_metrics(logps, torch.zeros(2, 2), n_tokens, settings("sigmoid"))
    found = dict(zip(METRICS, metrics, strict=True))
    assert not found["rewards/margins"].any() and not found["rewards/accuracies"].any()  # a tie


def test_forwards_in_training_are_equal_to_the_bit_and_to_the_reference(base, tmp_path):
    model, batch = huggingface.load_model(base / "model").train(), batch_of(base, [pair(i) for i in range(5)], tmp_path)
    first, second = (pair_logps(model, batch)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(first, reference_logps(model, batch)) and model.training
    noisy = Transformer(replace(model.cfg, dropout=0.1)).train()
    huggingface.load_weights(noisy, base / "model")
    assert not torch.equal(pair_logps(noisy, batch)[0], first)  # so the comparison can fail
    assert torch.equal(reference_logps(noisy, batch), first)


# ---- losses ---------------------------------------------------------------------------------------------------------

LOGPS, REFERENCE, N_TOKENS = (torch.tensor(t)[:, None] for t in ([-10.0, -12.0], [-11.0, -11.5], [4.0, 2.0]))
GOLDEN = [  # D = 1.5; means per token of the log-ratios 0.25 and -0.25, of the log-probabilities -2.5 and -6
    ("sigmoid", {}, 0.6209570478),
    ("cdpo", {"label_smoothing": 0.1}, 0.6359570478),
    ("robust", {"label_smoothing": 0.1}, 0.6022070478),
    ("hinge", {}, 0.85),
    ("ipo", {}, 20.25),
    ("sigmoid_norm", {"beta": 2.0}, 0.3132616875),
    ("simpo", {"beta": 2.0}, 0.0015023102),
    ("orpo", {}, 0.0027408443),
]


@pytest.mark.parametrize("loss, others, value", GOLDEN, ids=LOSSES[:-1])
def test_losses_have_their_golden_values(loss, others, value):
    reference = torch.zeros_like(REFERENCE) if loss in REFERENCE_FREE else REFERENCE
    found = pair_losses(LOGPS.double(), reference, N_TOKENS, settings(loss, **others))
    assert found.item() == pytest.approx(value, abs=1e-9)
    nll = 2.5  # 10 nats over 4 tokens: orpo adds them, the others where they are asked for
    for weight in (0.0, 0.2):
        total, _ = losses_and_metrics(LOGPS, reference, N_TOKENS, settings(loss, nll_weight=weight, **others))
        assert total.item() == pytest.approx(value + (weight + (loss == "orpo")) * nll, rel=1e-6)


def test_gradients_of_dpo_are_the_closed_form():
    """d/d logp_w = -beta sigmoid(-beta D), and its negative for the rejected answer."""
    logps = LOGPS.double().requires_grad_()
    pair_losses(logps, REFERENCE, N_TOKENS, settings("sigmoid")).sum().backward()
    assert logps.grad[:, 0].tolist() == pytest.approx([-0.0462570155, 0.0462570155], abs=1e-9)


def test_losses_are_finite_for_certain_and_for_empty_answers():
    logps = torch.tensor([[0.0, -1.0], [-2.0, 0.0]], requires_grad=True)
    for loss in LOSSES[:-1]:
        losses, metrics = losses_and_metrics(logps, torch.zeros(2, 2), torch.tensor([[3.0, 2], [0, 1]]), settings(loss))
        logps.grad = None
        losses.sum().backward()
        assert losses.isfinite().all() and logps.grad.isfinite().all() and metrics.isfinite().all(), loss


def trl_inputs(batch: PairBatch) -> dict[str, torch.Tensor]:
    mask = torch.zeros(batch.x.shape, dtype=torch.long).flatten()
    mask[batch.index + 1] = 1
    attention = (torch.arange(batch.x.shape[1]) < batch.lengths[:, None]).long()
    return {"input_ids": batch.x, "attention_mask": attention, "completion_mask": mask.view(batch.x.shape)}


@pytest.mark.parametrize("loss", OF_SUMS)
def test_loss_gradients_and_metrics_are_those_of_trl(base, tmp_path, loss):
    """From the logits of transformers' model: both halves of the batch in their places, answers of unequal lengths."""
    from transformers import LlamaForCausalLM
    from trl import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    batch, config = batch_of(base, [pair(i) for i in (1, 4, 8)], tmp_path), settings(loss, beta=0.3)
    config["label_smoothing"] = 0.1 if loss == "robust" else 0.0
    model, hf = huggingface.load_model(base / "model"), LlamaForCausalLM.from_pretrained(base / "model")
    torch.manual_seed(1)
    reference = pair_logps(model, batch)[0].detach() + torch.randn(2, 3) + 1  # no mean is close to 0
    accelerator = SimpleNamespace(device=CPU, gather_for_metrics=lambda x: x, gather=lambda x: x)
    stub = SimpleNamespace(
        model=hf, accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", beta=0.3, loss_types=[loss], loss_weights=[1.0], use_weighting=False,
        label_smoothing=config["label_smoothing"], _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    add_fused_lm_head(hf, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    inputs = trl_inputs(batch) | {"ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
    theirs = DPOTrainer._compute_loss(stub, hf, inputs, return_outputs=False)
    theirs.backward()
    losses, metrics = losses_and_metrics(*swapped(pair_logps(model, batch), reference), config)
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(theirs.item(), rel=1e-5)
    for name, p in hf.named_parameters():
        mine = dict(model.named_parameters())[name.removeprefix("model.")].grad
        torch.testing.assert_close(mine, p.grad, atol=2e-5, rtol=1e-3)
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    logged = stub._metrics["train" if hf.training else "eval"]
    assert [metrics.mean(1)[METRICS.index(name)].item() for name in names] == pytest.approx(
        [logged[name][0] for name in names], rel=1e-4
    )


def rows_file(path: Path, rows: list[dict]) -> str:
    return str(debug_data.write_rows(rows, path))


def labelled(i: int) -> dict:
    """A row of KTO: a good answer, or every third time a bad one."""
    right, good = pair(i), i % 3 > 0
    answer = {"role": "assistant", "content": right["chosen" if good else "rejected"]}
    return {"prompt": right["prompt"], "completion": [answer], "label": good}


def test_kto_is_trls(base, tmp_path):
    """Loss, gradients and metrics of a batch whose estimate of the divergence is above 0."""
    from transformers import LlamaForCausalLM
    from trl import KTOTrainer
    from trl.trainer.utils import add_fused_lm_head

    path = rows_file(tmp_path / "rows.jsonl", [labelled(i) for i in (1, 3, 4, 6, 8)])
    corpus = LabelCorpus(path, Tokenizer.load(base / "model"), 128, seed=1, val_fraction=0.0)
    numbers = np.zeros(5, int), np.arange(5)
    own, other = corpus.load(*numbers), corpus.others().load(*numbers)
    assert own.margin.tolist() == [1, -1, 1, -1, 1] and len(own.x) == len(other.x) == 5
    model, hf = huggingface.load_model(base / "model"), LlamaForCausalLM.from_pretrained(base / "model")
    torch.manual_seed(3)
    found = [pair_logps(model, batch) for batch in (own, other)]
    reference = [logps[0].detach() + torch.randn(5) - 1 for logps, _ in found]
    theirs_in = {"label": own.margin > 0, "ref_logps": reference[0], "ref_KL_logps": reference[1]}
    for prefix, batch in (("", own), ("KL_", other)):
        rows = torch.arange(batch.x.shape[1])
        mask = torch.zeros_like(batch.x).view(-1).scatter(0, batch.index + 1, 1).view_as(batch.x)
        theirs_in |= {f"{prefix}input_ids": batch.x, f"{prefix}completion_mask": mask}
        theirs_in[f"{prefix}attention_mask"] = (rows < batch.lengths[:, None]).long()
    accelerator = SimpleNamespace(device=CPU, gather_for_metrics=lambda x: x, gather=lambda x: x)
    stub = SimpleNamespace(
        model=hf, accelerator=accelerator, aux_loss_enabled=False, precompute_ref_logps=True, calculate_KL=True,
        loss_type="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=1.0, use_liger_kernel=False,
        _total_train_tokens=0, _metrics=defaultdict(lambda: defaultdict(list)), args=SimpleNamespace(),
    )  # fmt: skip
    add_fused_lm_head(hf, outputs=("log_probs", "entropy", "mean_logits"))
    stub._compute_kl_logps = lambda *given: KTOTrainer._compute_kl_logps(stub, *given)
    theirs = KTOTrainer._compute_loss(stub, hf, theirs_in, return_outputs=False)
    theirs.backward()
    config = settings("kto", beta=0.3, desirable_weight=1.5)
    kl = kl_estimate([(found[1][0][0].detach(), reference[1])], CPU)
    assert kl > 0
    (logps,), (n_tokens,) = found[0]
    losses, metrics = kto_losses_and_metrics(logps, reference[0], n_tokens, own.margin, kl, config)
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(theirs.item(), rel=1e-6)
    for name, p in hf.named_parameters():
        mine = dict(model.named_parameters())[name.removeprefix("model.")].grad
        torch.testing.assert_close(mine, p.grad, atol=2e-5, rtol=1e-3)
    logged = {name: np.mean(values) for name, values in stub._metrics["train" if hf.training else "eval"].items()}
    mine = named(metrics.mean(1).tolist(), config)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl"):
        assert mine[name] == pytest.approx(logged[name], rel=1e-5), name


def test_labels_are_read_in_every_form_and_a_pair_is_two_answers(base, tmp_path, capsys):
    said = [{"role": "user", "content": "水是什么？"}, {"role": "assistant", "content": "H2O"}]
    rows = [
        labelled(3), {"messages": said, "label": "False"}, {"conversations": said, "kto_tag": True}, pair(5),
        {"instruction": "a", "output": "b", "label": True}, {"messages": said[:1], "label": True}, {"messages": said},
    ]  # fmt: skip
    corpus = LabelCorpus(rows_file(tmp_path / "rows.jsonl", rows), Tokenizer.load(base / "model"), 128, 1, "", 0.0)
    assert corpus.train[0].margin.tolist() == [-1, -1, 1, 1, -1, 1]
    report = "\n".join(corpus.report())
    assert "1 left out: answer missing" in report and "1 left out: not understood" in report
    for i in range(6):
        prompt, answer, other = corpus.train[0].ids(i)
        assert len(answer) and len(other) and all(
            not np.array_equal(prompt, corpus.train[0].ids(j)[0])
            for j in range(6) if np.array_equal(corpus.train[0].ids(j)[1], other)
        )
    assert corpus.balance(1.0)[0].endswith("3 good answers, 3 bad ones, for training") and not corpus.balance(1.0)[1:]
    assert "from 1.00 to 1.33" in corpus.balance(2.0)[1]
    with pytest.raises(UserError, match="--loss=kto"):
        PairCorpus(rows_file(tmp_path / "labels.jsonl", [labelled(1)]), corpus.tokenizer, 128, 1)
    with pytest.raises(UserError, match="two prompts"):
        LabelCorpus(rows_file(tmp_path / "one.jsonl", [pair(1)]), corpus.tokenizer, 128, 1, "", 0.0)


@pytest.mark.parametrize("reference", ["precomputed", "adapter_off"])
def test_any_micro_batches_of_kto_give_the_same_steps(run, tmp_path, reference):
    data = rows_file(tmp_path / "kto.jsonl", [labelled(i) for i in range(40)])
    common = [f"--data={data}", "--loss=kto", "--total_batch_pairs=8", "--max_steps=2", f"--reference={reference}"]
    common += ["--trainable=lora"] * (reference == "adapter_off")
    for batch_size in (8, 2):
        assert run(*common, f"--batch_size={batch_size}", f"--out_dir={tmp_path / str(batch_size)}") == 0
    for key in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "lengths/rejected", "kl"):
        one, other = (means_of(tmp_path / str(size), "train", key) for size in (8, 2))
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5), key
    assert max(means_of(tmp_path / "8", "train", "kl")) > 0


def swapped(found: tuple[torch.Tensor, torch.Tensor], reference: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Arguments of losses_and_metrics from what pair_logps gives."""
    return found[0], reference, found[1]


def test_reference_free_losses_are_those_of_trl():
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    torch.manual_seed(0)
    logps, n_tokens = -torch.rand(2, 9) * 40 - 0.1, torch.randint(1, 20, (2, 9)).float()
    means, zeros = logps / n_tokens, torch.zeros(2, 9)
    stub = SimpleNamespace(
        alpha=0.0, beta=2.0, simpo_gamma=0.5, loss_type="simpo", label_smoothing=0.0,
        accelerator=SimpleNamespace(device=CPU),
    )  # fmt: skip
    theirs, chosen, rejected = CPOTrainer.cpo_loss(stub, *means)
    mine, metrics = losses_and_metrics(logps, zeros, n_tokens, settings("simpo", beta=2.0))
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(metrics[1:3], torch.stack((chosen, rejected)))
    stub.beta = 0.1
    theirs, chosen, rejected, *_ = ORPOTrainer.odds_ratio_loss(stub, *means)
    torch.testing.assert_close(pair_losses(logps, zeros, n_tokens, settings("orpo")), -theirs)
    _, metrics = losses_and_metrics(logps, zeros, n_tokens, settings("orpo"))
    torch.testing.assert_close(metrics[1:3], torch.stack((chosen, rejected)))


# ---- runs -----------------------------------------------------------------------------------------------------------


def means_of(out: Path, event: str, key: str) -> list[float]:
    return [e[key] for e in tp.events(out, event)]


@pytest.mark.slow
def test_margins_grow_from_nothing_and_the_reference_stays(run, tmp_path, base):
    """Loss ln 2 and margins 0 before and in the first step; after the run the reference is still that of init_from."""
    flags = ["--max_steps=12", "--learning_rate=4e-3", "--eval_every=12", "--eval_steps=0"]
    assert run(*flags, "--total_batch_pairs=12") == 0
    out = tmp_path / "out"
    train, evals = tp.events(out, "train"), tp.events(out, "eval")
    for first, key in ((train[0], "loss"), (evals[0], "val_loss")):
        assert first[key] == pytest.approx(0.6931471805599453, abs=1e-6)
        assert abs(first["rewards/margins"]) < 1e-4 and abs(first["rewards/chosen"]) < 1e-4
    assert evals[-1]["rewards/margins"] > 0.5 and evals[-1]["rewards/accuracies"] > 0.9
    assert evals[-1]["val_loss"] < 0.5 and evals[-1]["logps/rejected"] < evals[0]["logps/rejected"] - 5
    table = load_file(out / "reference.safetensors")["logps"]
    corpus = PairCorpus(str(base / "pairs.jsonl"), Tokenizer.load(base / "model"), 128, 1337, val_fraction=0.2)
    model = huggingface.load_model(base / "model")
    for batch in corpus.all_batches(5):
        torch.testing.assert_close(table[batch.number].T, reference_logps(model, batch), atol=1e-4, rtol=1e-5)
    assert table.shape == (corpus.n_pairs, 2) and (table < 0).all()


def test_evaluation_equals_a_count_by_hand(run, tmp_path, base):
    """Of the weights after the run, over each validation pair alone."""
    assert run("--max_steps=4", "--eval_steps=0", "--beta=0.5") == 0
    scores = tp.events(tmp_path / "out", "eval")[-1]
    corpus = PairCorpus(str(base / "pairs.jsonl"), Tokenizer.load(base / "model"), 128, 1337, val_fraction=0.2)
    before, after = (huggingface.load_model(at) for at in (base / "model", tmp_path / "out" / "latest"))
    ((_, held_out),) = corpus.val.items()
    losses, margins, logps = [], [], []
    for i in range(held_out.n_rows):
        batch = load_pairs([held_out], np.array([i]))
        now, then = (reference_logps(model, batch)[:, 0] for model in (after, before))
        margins.append(0.5 * ((now[0] - then[0]) - (now[1] - then[1])).item())
        losses.append(-F.logsigmoid(torch.tensor(margins[-1])).item())
        logps.append(now[0].item())
    n = held_out.n_rows
    assert n > 4 and scores["val_loss"] == pytest.approx(sum(losses) / n, rel=1e-4)
    assert scores["rewards/margins"] == pytest.approx(sum(margins) / n, rel=1e-3, abs=1e-4)
    assert scores["rewards/accuracies"] == pytest.approx(sum(margin > 0 for margin in margins) / n)
    assert scores["logps/chosen"] == pytest.approx(sum(logps) / n, rel=1e-5)


def test_any_micro_batches_give_the_same_steps(run, tmp_path):
    """The loss is the mean over the pairs of the whole step, not over micro-batches."""
    for batch_size in (8, 1):
        flags = [f"--batch_size={batch_size}", f"--out_dir={tmp_path / str(batch_size)}", "--loss=ipo", "--beta=2"]
        assert run("--total_batch_pairs=8", "--max_steps=2", "--nll_weight=0.1", *flags) == 0
    for key in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "lengths/rejected", "kl/chosen"):
        one = means_of(tmp_path / "8", "train", key)
        rounding = 1e-5 * max(1, *map(abs, one))  # margins swing from hundreds of nats to near 0
        other = means_of(tmp_path / "1", "train", key)
        assert other == pytest.approx(one, rel=1e-3, abs=rounding), key


def test_both_kinds_of_reference_give_the_same_run(run, tmp_path):
    """Precomputed, and of the same model without its adapters."""
    kinds = ("precomputed", "adapter_off")
    for kind in kinds:
        flags = ["--trainable=lora", f"--reference={kind}", f"--out_dir={tmp_path / kind}"]
        assert run("--max_steps=3", "--warmup_steps=0", "--dropout=0.1", *flags) == 0
    assert not (tmp_path / "adapter_off" / "reference.safetensors").exists()
    for key in ("loss", "rewards/chosen", "rewards/rejected"):
        one, other = (means_of(tmp_path / kind, "train", key) for kind in kinds)
        assert one[-1] != pytest.approx(one[0], abs=1e-3)  # it learns
        assert other == pytest.approx(one, abs=1e-5), key


def test_sources_are_evaluated_apart(run, tmp_path, base):
    lines = (base / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, part in zip(paths, (lines[:40], lines[40:]), strict=True):
        path.write_text("\n".join(part), encoding="utf-8")
    assert run(f"--data={paths[0]}=0.75,{paths[1]}=0.25", "--max_steps=3", "--eval_steps=0") == 0
    scores = tp.events(tmp_path / "out", "eval")[-1]
    for whole, of_one in (("val_loss", "val_loss"), ("rewards/accuracies", "accuracy")):
        parts = [scores[f"{of_one}/{path.name}"] for path in paths]
        assert scores[whole] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1])


def test_the_plan_adds_up(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dpo.py", *flags_of(base, tmp_path, "--plan_only=True")])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "dpo.py"), run_name="__main__")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
    parts = [float(part) for part in re.findall(r"([\d,.]+) MiB", line.replace(",", ""))]
    assert float(re.search(r"([\d.]+) GiB", line)[1]) == pytest.approx(sum(parts) / 1024, abs=0.01)


@pytest.mark.parametrize("loss", ["ipo", "simpo", "orpo", "kto"])  # trl's gradients above are for all
def test_every_kind_of_loss_trains_and_is_right_in_the_end(run, tmp_path, loss):
    beta = {"simpo": 2.0, "ipo": 0.5}.get(loss, 0.1)
    flags = [f"--loss={loss}", f"--beta={beta}", "--learning_rate=3e-3"]
    assert run(*flags, "--max_steps=12", "--batch_size=8", "--eval_steps=0") == 0
    first, last = (tp.events(tmp_path / "out", "eval")[i] for i in (0, -1))
    assert last["val_loss"] < first["val_loss"] and last["rewards/margins"] > first["rewards/margins"]
    assert (tmp_path / "out" / "reference.safetensors").exists() == (loss not in REFERENCE_FREE)


def assert_same_run(a: Path, b: Path) -> None:
    for key in ("loss", "grad_norm", "lr", "rewards/margins"):
        assert means_of(a, "train", key) == means_of(b, "train", key), key
    for key in ("val_loss", "rewards/accuracies"):
        assert means_of(a, "eval", key) == means_of(b, "eval", key), key
    name = "adapter_model.safetensors" if (a / "latest" / "adapter_model.safetensors").exists() else "model.safetensors"
    weights, others = (load_file(out / "latest" / name) for out in (a, b))
    assert all(torch.equal(weights[name], others[name]) for name in weights.keys() | others.keys())
    mine, theirs = (load_train_state(out / "latest", 0) for out in (a, b))
    for name, state in mine[0]["optimizer"].items():
        assert all(torch.equal(state[key], theirs[0]["optimizer"][name][key]) for key in state), name
    assert torch.equal(mine[1]["rng"]["cpu"], theirs[1]["rng"]["cpu"])


@pytest.mark.slow
def test_a_killed_run_continues_to_the_bit(base, tmp_path):
    """kill -9 at a random moment after the first save; the reference file is lost, too, and computed again."""
    common = ["--dropout=0.1", "--max_steps=6", "--save_every=2", "--eval_every=4", "--trainable=embed,lm_head"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(out: Path) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "dpo.py"), *flags_of(base, out, *common)]
        return forks.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    whole, process = start(straight), start(killed)
    while process.poll() is None and not (killed / "latest").exists():
        time.sleep(0.01)
    time.sleep(random.Random(0).random() * 0.05)
    process.kill()
    process.communicate()
    (killed / "reference.safetensors").unlink(missing_ok=True)
    assert "continuing" in tp.finish(start(killed))
    tp.finish(whole)
    assert_same_run(straight, killed)


def test_a_reference_of_something_else_is_refused(run, tmp_path, base):
    """Of other weights, pairs or dtype; a file that was made of the same is taken."""
    assert run("--max_steps=2", f"--out_dir={tmp_path / 'first'}") == 0
    made = tmp_path / "out" / "reference.safetensors"
    made.parent.mkdir()
    shutil.copy(tmp_path / "first" / "reference.safetensors", made)
    before = made.stat().st_mtime_ns
    assert run("--max_steps=2") == 0 and made.stat().st_mtime_ns == before
    assert means_of(tmp_path / "out", "train", "loss") == means_of(tmp_path / "first", "train", "loss")
    for path in (tmp_path / "out").iterdir():
        if path != made:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join((base / "pairs.jsonl").read_text().splitlines()[:-1]), encoding="utf-8")
    cases = [
        (f"--init_from={tmp_path / 'first' / 'latest'}", "checkpoint"), (f"--data={fewer}", "pairs"),
        ("--dtype=bfloat16", "dtype"),
    ]  # fmt: skip
    for flag, says in cases:
        with pytest.raises(Exception, match=f"another {says}; delete") as caught:
            run("--max_steps=2", flag)
        assert isinstance(caught.value, UserError) and list(made.parent.iterdir()) == [made]
    made.write_bytes(b"junk")
    with pytest.raises(Exception, match="cannot read .*delete it") as caught:
        run("--max_steps=2")
    assert isinstance(caught.value, UserError) and made.read_bytes() == b"junk"


def test_half_precision_starts_at_ln_2(run, tmp_path):
    """The reference has the same rounding as the policy."""
    assert run("--max_steps=1", "--dtype=bfloat16") == 0
    assert tp.events(tmp_path / "out", "train")[0]["loss"] == pytest.approx(0.6931, abs=2e-2)


# ---- ranks ----------------------------------------------------------------------------------------------------------

ONE_STEP = ["--total_batch_pairs=8", "--batch_size=2", "--max_steps=2", "--save_every=2", "--eval_every=2"]
RANK_CASES = {
    "all": [],
    "lora zero1": ["--trainable=embed,lm_head,lora", "--zero1=True"],
    "lora off forward": ["--trainable=lora", "--reference=adapter_off", "--overlap_step=forward"],
    "orpo backward": ["--loss=orpo", "--overlap_step=backward", "--grad_clip=0"],
    "kto": ["--loss=kto"],
}


@pytest.fixture(scope="session")
def two_ranks(base, tmp_path_factory) -> Path:
    """All cases on 2 ranks in one start."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = [
        (flags_of(base, folder / name, *tp.flags_with_defaults(tuple(flags), ONE_STEP)), False)
        for name, flags in RANK_CASES.items()
    ]
    run_on_ranks(2, "dpo.py", jobs, folder)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("name", RANK_CASES)
def test_two_ranks_equal_one(two_ranks, run, tmp_path, name):
    flags = [flag for flag in RANK_CASES[name] if not flag.startswith(("--zero1", "--overlap"))]
    assert run(*tp.flags_with_defaults(tuple(flags), ONE_STEP)) == 0
    for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3), ("logps/chosen", 1e-4)):
        mine, theirs = (means_of(out, "train", key) for out in (tmp_path / "out", two_ranks / name))
        assert theirs == pytest.approx(mine, rel=tolerance), key
    mine, theirs = (means_of(out, "eval", "val_loss") for out in (tmp_path / "out", two_ranks / name))
    assert theirs == pytest.approx(mine, rel=1e-4)
    if "reference" not in str(flags) and "orpo" not in name:
        tables = [load_file(out / "reference.safetensors")["logps"] for out in (tmp_path / "out", two_ranks / name)]
        torch.testing.assert_close(*tables)


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--init_from="], "init_from"),
        (["--data=nowhere.jsonl"], "nowhere.jsonl"),
        (["--loss=dpo"], "loss must be one of"),
        (["--beta=0"], "beta must be above 0"),
        (["--label_smoothing=0.1"], "label_smoothing is for"),
        (["--loss=robust", "--label_smoothing=0.5"], "below 0.5"),
        (["--reference=adapter_off"], "trainable='lora'"),
        (["--reference=adapter_off", "--trainable=embed,lora"], "trainable='lora'"),
        (["--reference=copy"], "reference must be one of"),
        (["--epochs=0"], "epochs"),
        (["--total_batch_pairs=6"], "multiple of"),
        (["--total_batch_pairs=-4"], "at least 0"),
        (["--block_size=8"], "block_size"),
        (["--trainable=lora,nonsense"], "nonsense"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(run, tmp_path, flags, says):
    with pytest.raises(Exception) as caught:
        run(*flags)
    assert isinstance(caught.value, UserError) and says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_resume_with_other_pairs_or_parts_is_refused(run, tmp_path):
    assert run("--trainable=lora", "--max_steps=2") == 0
    for flag in ("--lora_rank=4", "--trainable=all", "--total_batch_pairs=8", "--val_fraction=0.3"):
        with pytest.raises(Exception, match=flag.partition("=")[0].lstrip("-")) as caught:
            run("--max_steps=3", *tp.flags_with_defaults((flag,), ["--trainable=lora"]))
        assert isinstance(caught.value, UserError)


def test_no_room_for_the_reference_names_its_file(tmp_path):
    """safetensors raises an error of its own, without a name. Here no file may be as large."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        with pytest.raises(OSError, match="reference") as caught:
            align_losses.save_reference(tmp_path / "reference.safetensors", torch.zeros(1000, 2), {"pairs": "a"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert caught.value.strerror == "File too large" and not list(tmp_path.iterdir())
    align_losses.save_reference(tmp_path / "reference.safetensors", torch.ones(1000, 2), {"pairs": "a"})
    assert align_losses.read_reference(tmp_path / "reference.safetensors", {"pairs": "a"}).min() == 1


def test_a_damaged_reference_is_refused_and_its_file_is_reproducible(tmp_path):
    path, table = tmp_path / "reference.safetensors", torch.randn(50, 2)
    made_of = {"pairs": "a", "checkpoint": "b", "dtype": "c"}
    contents = set()
    for _ in range(5):
        align_losses.save_reference(path, table, made_of)
        contents.add(path.read_bytes())
    (raw,) = contents
    assert torch.equal(align_losses.read_reference(path, made_of), table)
    for place in range(0, len(raw), 7):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        with pytest.raises(UserError, match="delete it to have it computed again"):
            align_losses.read_reference(path, made_of)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_trains_as_a_cpu_does(run, tmp_path, compiled):
    tp.assert_gpu_trains_as_cpu(run, tmp_path, compiled)


def test_a_run_does_not_go_on_with_another_reference(run, tmp_path, base):
    """init_from has come to hold other weights, and the file of log-probabilities is gone."""
    start = shutil.copytree(base / "model", tmp_path / "start")
    flags = [f"--init_from={start}"]
    assert run(*flags, "--max_steps=1") == 0
    model = huggingface.load_model(start)
    torch.nn.init.normal_(model.norm.weight)
    huggingface.write_model(start, model, Tokenizer.load(start))
    (tmp_path / "out" / "reference.safetensors").unlink(missing_ok=True)
    with pytest.raises(Exception, match="reference_weights=") as caught:
        run(*flags, "--max_steps=2")
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    "during, number",
    [("reference_logps", signal.SIGTERM), ("save_weights", signal.SIGTERM), ("named", signal.SIGINT)],
)
def test_a_signal_before_the_first_step_ends_the_run_at_once(run, tmp_path, monkeypatch, during, number):
    """In the reference, its save or the first evaluation: one line, nothing half-written; the same command trains."""
    original, called = getattr(align_losses, during), []

    def interrupted(*args, **options):
        found = original(*args, **options)
        called.append(during)
        os.kill(os.getpid(), number)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(align_losses, during, interrupted)
        patch.setattr(os, "_exit", sys.exit)  # not this process
        with pytest.raises(KeyboardInterrupt) as caught:
            run("--max_steps=1")
        said = io.StringIO()
        patch.setattr(sys, "__stderr__", said)
        with pytest.raises(SystemExit) as left:
            errors.one_line_excepthook(caught.type, caught.value, None)
    assert left.value.code == 128 + number and called == [during]
    assert said.getvalue() == "dpo: interrupted; run the same command again\n"
    assert not list(tmp_path.glob("out/*.tmp")) and not list(tmp_path.glob("out/step_*"))
    assert run("--max_steps=1") == 0


def test_every_shipped_config_trains(run, tmp_path):
    for path in sorted(ROOT.glob("config/*.py")):
        if " dpo.py " in path.read_text(encoding="utf-8"):
            small = ["--max_steps=2", "--total_batch_pairs=0", "--warmup_steps=1"]
            assert run(str(path), f"--out_dir={tmp_path / path.stem}", *small) == 0, path
            assert tp.events(tmp_path / path.stem, "eval")[-1]["step"] == 2


def test_the_reference_without_adapters_is_the_model_that_had_none(base, tmp_path):
    """Adapters that do something are off for the reference and on again after it."""
    batch = batch_of(base, [pair(i) for i in range(4)], tmp_path)
    plain, adapted = (huggingface.load_model(base / "model") for _ in range(2))
    set_trainable(adapted, "lora", LoRAConfig(4))
    for name, p in adapted.named_parameters():
        p.data.add_(0.1 if "lora_B" in name else 0.0)
    before = pair_logps(adapted, batch)[0]
    torch.testing.assert_close(reference_logps(adapted, batch), reference_logps(plain, batch))
    assert torch.equal(pair_logps(adapted, batch)[0], before)
    assert not torch.allclose(before, reference_logps(plain, batch), atol=0.1)


@pytest.mark.parametrize("flags", [["--batch_size=5"], ["--batch_size=5", "--loss=kto"]])
def test_plan_log_and_card_count_no_padding(run, tmp_path, capsys, flags):
    """Rows differ in length, so a batch of them is padded; the setting of a total still counts it."""
    assert run("--max_steps=0", "--epochs=1", *flags) == 0
    tp.assert_tokens_are_those_of(tmp_path / "out", capsys.readouterr().out)
