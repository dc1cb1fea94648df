"""Preference tuning: of two answers to a prompt the model learns to prefer the chosen one.

python dpo.py config/debug_dpo.py                                                  # CPU, seconds, needs nothing
python dpo.py config/dpo.py --init_from=out/sft --data=pairs.jsonl                 # all weights
torchrun --standalone --nproc_per_node=4 dpo.py config/dpo.py --init_from=out/sft --data='a.jsonl=0.5,b=0.5'

It compares the log-probability of an answer, its <|im_end|> included, with what it was at the beginning: the reference,
computed once, into out_dir/reference.safetensors. The loss is the mean over the pairs of a whole step. loss='kto'
learns from single answers with a label, good or bad (tokens/labelled.py): there, a pair below is an answer.
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C is one line from here on
    from groundup.errors import end_in_one_line

    end_in_one_line()

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from configurator import configure
from groundup.align import losses as preference
from groundup.align.losses import REFERENCE_FREE, kl_estimate, losses_and_metrics, named, pair_logps
from groundup.demo import debug_data
from groundup.tokens.batches import Batches
from groundup.tokens.corpus import steps_of
from groundup.tokens.labelled import LabelCorpus
from groundup.tokens.pairs import PairBatch, PairCorpus
from groundup.train import checkpoint, ranks, run
from groundup.train import plan as memory_plan
from groundup.train.base import adapters_of, frozen_base, load_start, new_model, open_base
from groundup.train.device import peak_flops, seed_everything
from groundup.train.fsdp import in_step
from groundup.train.log import RunLog
from groundup.train.lora import set_trainable
from groundup.train.optim import learning_rate_at
from groundup.train.plan import flops_per_token
from groundup.train.settings import *  # noqa: F403
from groundup.train.signals import StopSignal
from model import Transformer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/dpo"  # run directory: config.py, log.jsonl, reference.safetensors, step_*/
init_from = "out/sft"  # run, checkpoint or Hugging Face directory; "" = a tiny new model, to try it
data = "data/pairs"  # pairs: files, a directory of prepare.py --kind=preference; mixed 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # likewise, for validation; "" = the directory's own, or val_fraction of the pairs
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
val_fraction = 0.02  # of the pairs, by their prompts; for data that have no validation of their own
# loss
loss = "sigmoid"  # sigmoid | cdpo | robust | hinge | ipo | sigmoid_norm | simpo | orpo (see pair_losses) | kto
beta = 0.1  # how much a log-ratio counts; sigmoid_norm and simpo, whose are means per token, want 2
label_smoothing = 0.0  # cdpo, robust: the share of pairs that are thought to be the wrong way round, below 0.5
gamma = 0.5  # simpo: the margin by which the chosen answer should win
desirable_weight = 1.0  # kto: how much a good answer counts, against 1 for a bad one
nll_weight = 0.0  # adds this times the chosen answer's loss per token, which keeps it likely; 0.1 to 1 is usual
reference = "precomputed"  # precomputed | adapter_off (trainable='lora': computed in each step)
lora_dropout = 0.0  # on the input of the adapters
dropout = 0.0  # above 0 the log-ratios are noise from the first step on
# data
block_size = 1024  # most tokens of a prompt and an answer; a pair that is longer is left out
epochs = 1.0  # passes over the pairs of all sources
max_steps = 0  # 0 = as many as epochs takes
max_epochs = ""  # most epochs of each source, or 'data/a=2,data/b=8'; a source used up leaves its share to the others
# batch
batch_size = 4  # pairs, so twice as many rows, per rank and micro-step
total_batch_pairs = 0  # batch_size x micro-steps x ranks; 0 = one micro-step on each rank
# optimizer
learning_rate = 1e-6  # peak; adapters take ten times as much
warmup_fraction = 0.1
# evaluation, log, checkpoints
eval_steps = 50  # batches of batch_size pairs, over all ranks; 0 = all of the validation pairs

# These decide which pairs a step sees; a resumed run must not change them.
DATA_KEYS = ("seed", "block_size", "total_batch_pairs", "val_fraction", "max_epochs")
DEBUG_DATA = "data/debug/dpo.jsonl"  # made by the script, to try it without anything prepared


def check_config(config: dict, world_size: int) -> int:
    """Return the pairs per step over all ranks. Raise UserError; nothing exists yet when it does."""
    choices = {"loss": preference.LOSSES, "reference": ("precomputed", "adapter_off")}
    run.check_config(config, {"gamma": 0, "desirable_weight": 0, "nll_weight": 0}, choices=choices)
    preference.check_losses(config)
    other = config["reference"] == "adapter_off" and config["trainable"].strip() != "lora"
    run.refuse(other, f"reference='adapter_off' needs trainable='lora', got {config['trainable']!r}")
    return run.count_per_step(config, "total_batch_pairs", world_size=world_size)


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Mapping[str, Iterable[PairBatch]], shares: list[float], config: Mapping,
    reference_of: Callable[[PairBatch], Tensor], device: torch.device, dtype: torch.dtype,
) -> dict[str, float]:  # fmt: skip
    """Return the mean loss and metrics over validation pairs, which the ranks divide. With several sources: loss and
    accuracy of each, and all of them for a mixture with these shares."""
    model.eval()
    found = []
    for source, of_source in enumerate(batches.values()):
        for batch in in_step(model, of_source):
            batch = batch.to(device)
            logps, n_tokens = pair_logps(model, batch, device, dtype)
            found.append((source, batch.margin, logps, reference_of(batch), n_tokens))
    of_others = ((logps[1], past[1]) for _, _, logps, past, _ in found)
    kl = kl_estimate(of_others, device) if config["loss"] == "kto" else None
    names = preference.metric_names(config)
    sums = torch.zeros(len(batches), 2 + len(names), dtype=torch.float64)  # pairs, loss, metrics
    for source, labels, *measured in found:
        losses, metrics = loss_of(measured, labels, kl, config)
        sums[source] += torch.cat((torch.ones_like(losses)[None], losses[None], metrics)).sum(1).double().cpu()
    ranks.all_reduce_sum(sums)
    model.train()
    means = sums[:, 1:] / sums[:, :1].clamp(min=1)
    mixed = (torch.tensor(shares, dtype=torch.float64)[:, None] * means).sum(0).tolist()
    scores = {"val_loss": mixed[0]} | named(mixed[1:], config)
    if len(batches) > 1:
        for name, of_source in zip(batches, means.tolist(), strict=True):
            scores |= {f"val_loss/{name}": of_source[0], f"accuracy/{name}": of_source[4]}
    return scores


def loss_of(measured: Sequence[Tensor], labels: Tensor, kl: Tensor | None, config: Mapping) -> tuple[Tensor, Tensor]:
    """Return the loss and the metrics of each pair. measured: log-probabilities, those of the reference, lengths, all
    (2, B), or (1, B) of labelled answers. kl: kto only."""
    if config["loss"] != "kto":
        return losses_and_metrics(*measured, config)
    return preference.kto_losses_and_metrics(*(of_sides[0] for of_sides in measured), labels, kl, config)


if __name__ == "__main__":
    config = configure(globals())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pairs_per_step = config["total_batch_pairs"] = check_config(config, world_size)
    torch_device, torch_dtype = run.choose_device_and_dtype(config)
    peak = peak_tflops * 1e12 or peak_flops(torch_device, torch_dtype)

    # ---- weights, tokenizer, pairs: mistakes show here, before a process group or out_dir exists
    if data == DEBUG_DATA:
        debug_data.make_debug_rows(Path(data), debug_data.debug_pairs)
    source, tokenizer, n_known, cfg = open_base(config, DEBUG_DATA)
    flops = flops_per_token(cfg, block_size, trainable=trainable)
    is_kto = loss == "kto"
    corpus = (LabelCorpus if is_kto else PairCorpus)(data, tokenizer, block_size, seed, val_data, val_fraction)
    corpus.need_validation(val_fraction)
    given = dict(config)  # out_dir/config.py keeps max_steps=0
    n_rows, lost = corpus.n_rows, corpus.left_out()
    max_steps = config["max_steps"] = steps_of(config, n_rows, pairs_per_step, "total_batch_pairs", "pairs", lost)
    mixture = corpus.order(seed, pairs_per_step, max_steps, max_epochs)
    order = {key: config[key] for key in DATA_KEYS} | corpus.record()
    kind = "none" if loss in REFERENCE_FREE else reference
    if source and kind == "precomputed":  # a resumed run must be compared with the same weights
        order["reference_weights"] = checkpoint.weights_key(source)
    if rank == 0:
        passes, warnings = corpus.describe(mixture, max_steps * pairs_per_step)
        warnings += corpus.balance(desirable_weight) if is_kto else []
        batch, rows = f"{pairs_per_step} pairs per step, {max_steps:,} steps, {passes}", 2 * pairs_per_step * max_steps
        size = cfg, config | {"batch_size": (2 - is_kto) * batch_size}, batch, rows * block_size, world_size
        text = memory_plan.describe(*size, torch_device, torch_dtype, peak, note="below ")
        print("\n".join([*corpus.report(), text, *warnings]), flush=True)
    if plan_only:
        sys.exit(0)
    resumed = run.find_checkpoint(config, cfg, order)
    reference_path, table, about = Path(out_dir, "reference.safetensors"), None, {}
    if kind == "precomputed":
        about = preference.about_reference(source, config, cfg, corpus, str(torch_dtype))
        if resume != "never":  # else what is there is about to be deleted
            table = preference.open_reference(reference_path, about, corpus.n_pairs)

    # ---- processes, model, optimizer, reference, state
    stop_signal = StopSignal()
    world = run.join(config, order | about, resumed.step, torch_device, torch_dtype)
    accum_steps = pairs_per_step // (batch_size * world_size)
    must_compute = ranks.any_rank(kind == "precomputed" and table is None)
    seed_everything(seed)
    raw_model = new_model(Transformer, cfg, config, torch_dtype)
    if source and (must_compute or not resumed.path):
        load_start(raw_model, source, n_known, tokenizer)
    set_trainable(raw_model, trainable, adapters_of(config))
    base = frozen_base(resumed.path, source)
    parts = run.set_up(config, raw_model, world, torch_device, torch_dtype)
    model, opt, scaler, ddp = raw_model, parts.opt, parts.scaler, parts.ddp  # compiled in place: the same object
    if must_compute:
        table = preference.compute_reference(model, corpus, batch_size, world, torch_device, torch_dtype)
    skipped = run.start(parts, resumed, given, __file__)
    if must_compute and world.is_main:
        preference.save_reference(reference_path, table, about)
    table = None if table is None else table.to(torch_device)
    place = block_size, batch_size, accum_steps, world.rank, world_size, torch_device, resumed.step
    batches = Batches(corpus.train, mixture, *place, load=corpus.load, valid=corpus.valid)
    others = Batches(corpus.train, mixture, *place, load=corpus.load_others, valid=corpus.valid) if is_kto else None
    val = partial(corpus.val_batches, batch_size, eval_steps, world.rank, world_size)
    shares = corpus.val_shares()
    log = RunLog(out_dir, max_steps, resumed.step, world.is_main, tensorboard)
    save = partial(run.save, parts, tokenizer=tokenizer, config=config, order=order, base=base, log=log)

    def reference_of(batch: PairBatch) -> Tensor:
        """Log-probabilities of its answers by the reference, (2, B); 0 where the loss has none."""
        if kind == "none":
            return torch.zeros(2, len(batch.number), device=torch_device)
        if kind == "precomputed":
            return table[batch.number].T
        return preference.reference_logps(model, batch, torch_device, torch_dtype)

    def kl_now() -> Tensor:
        """KTO's estimate for this step, from the answers to other prompts in all its micro-batches."""
        with torch.no_grad():
            found = []
            for batch in (others.next() for _ in range(accum_steps)):
                logps, _ = pair_logps(model, batch, torch_device, torch_dtype)
                found.append((logps[0], reference_of(batch)[-1]))  # of both answers, or of the one in the batch
        return kl_estimate(found, torch_device)

    def evaluate_now(step: int) -> None:
        """Log all scores and rank the checkpoint of this step by its validation loss."""
        scores = evaluate(model, val(), shares, config, reference_of, torch_device, torch_dtype)
        line = [f"val loss {scores['val_loss']:.4f}", f"accuracy {100 * scores['rewards/accuracies']:.1f}%"]
        line += [f"margin {scores['rewards/margins']:.4f}", f"chosen {scores['logps/chosen']:.2f} nats"]
        line += [f"rejected {scores['logps/rejected']:.2f} nats"]
        log.report(step, scores, line)
        run.rank(parts, step, scores["val_loss"], config, log)

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        evaluate_now(resumed.step)
    stop_signal.begin()
    warmup, stopping = run.warmup_of(config), False
    mark_time, mark_step = time.perf_counter(), resumed.step
    n_tokens_seen = torch.zeros((), dtype=torch.float64)  # of this rank since the last log line, padding too
    for step in range(resumed.step + 1, max_steps + 1):
        lr = learning_rate_at(step, schedule, learning_rate, min_lr, warmup, decay_steps or max_steps, decay_fraction)
        n_pairs = batches.valid_tokens(step - 1)  # over all micro-steps and ranks
        n_metrics = len(preference.metric_names(config))
        sums = torch.zeros(1 + n_metrics, device=torch_device)  # of the loss and the metrics of this step's pairs
        kl = kl_now() if is_kto else None
        ddp.expect_step(opt, lr)
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, during the last backward
            batch = batches.next()
            logps, n_tokens = pair_logps(model, batch, torch_device, torch_dtype)
            losses, metrics = loss_of((logps, reference_of(batch), n_tokens), batch.margin, kl, config)
            loss_of_micro = losses.sum() * (world_size / n_pairs)  # ddp averages over ranks
            scaler.scale(loss_of_micro).backward()  # full buckets start their all-reduce inside this call
            sums += torch.cat((losses.detach()[None], metrics)).sum(1) / n_pairs
            n_tokens_seen += batch.x.numel()
        # >>> optimizer step: identical in pretrain, sft, dpo, reward, rl (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr=lr, clip=grad_clip, scaler=scaler)
        skipped = torch.stack((skipped[0] + ddp.found_inf, (skipped[1] + 1) * ddp.found_inf))
        # <<< optimizer step
        log.advance()

        last, stopping = step == max_steps, ranks.any_rank(stop_signal.received > 0)
        if step % log_every == 0 or last or stopping:
            mean_loss, *means = ranks.all_reduce_sum(sums.clone()).tolist()  # waits for the device, so that
            seconds = time.perf_counter() - mark_time  # this clock is true
            tokens_per_s = ranks.all_reduce_sum(n_tokens_seen).item() / seconds
            metrics = named(means, config)
            shown = {"accuracy": metrics["rewards/accuracies"], "margin": metrics["rewards/margins"]}
            values = {"loss": mean_loss, "epoch": float(mixture.epochs(step * pairs_per_step).max())} | shown | metrics
            values |= run.figures(parts, lr, grad_norm, skipped, tokens_per_s, flops, peak)
            values["pairs_per_s"] = (step - mark_step) * pairs_per_step / seconds
            log.train(step, values, seconds / (step - mark_step))
            if skipped[1] >= max_skipped:
                run.stop_not_finite(parts, log, step, int(skipped[1]), sums[0], batches)
            mark_time, mark_step = time.perf_counter(), step
            n_tokens_seen.zero_()
        pause = time.perf_counter()
        saving, evaluating = step % save_every == 0 or last or stopping, step % eval_every == 0 or last
        if saving or evaluating:
            ddp.flush()  # updates that wait for the next forward
        if saving:
            save(step, skipped)
        if evaluating:  # after the save: it may run out of memory
            evaluate_now(step)
        mark_time += time.perf_counter() - pause  # evaluations and saves are not training
        if stopping:
            break

    if others:
        others.close()
    run.finish(parts, log, config, __file__, corpus.report(), stop_signal if stopping else None, batches)
