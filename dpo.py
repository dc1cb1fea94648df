"""Preference tuning: of two answers to a prompt the model learns to prefer the chosen one.

python dpo.py config/debug_dpo.py                                    # CPU, seconds, own data
python dpo.py config/dpo.py --init_from=out/sft --data=pairs.jsonl   # 1 GPU, all weights
torchrun --standalone --nproc_per_node=4 dpo.py config/dpo.py --init_from=out/sft --data=DIR

It compares the log-probability of an answer with that by the reference, which is the model before
the first step. The reference's are computed once, into out_dir/reference.safetensors. The loss is
the mean over the pairs of a step. With loss='kto' a row is a single answer with a label, good or
bad (groundup/tokens/pairs.py): below, a pair is then an answer.
"""

if __name__ == "__main__":  # before the slow imports: from here on Ctrl-C prints one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import sys
from pathlib import Path

import torch
from torch import Tensor

from configurator import configure
from ddp import DDP, check_options
from groundup.align.losses import (
    REFERENCE_FREE,
    check_losses,
    compute_reference,
    describe_reference,
    kl_estimate,
    losses_and_metrics,
    metric_names,
    named,
    pair_logps,
    read_reference,
    reference_logps,
    save_reference,
)
from groundup.errors import counted, refuse
from groundup.tokens.batches import Batches
from groundup.tokens.pairs import LabelCorpus, PairBatch, PairCorpus
from groundup.tokens.rows import steps_of
from groundup.train import checkpoint, fsdp, huggingface, plan, ranks
from groundup.train.checkpoint import Saver
from groundup.train.device import autocast, check_compiler, choose_device, choose_dtype, peak_flops
from groundup.train.log import RunLog, check_finite, sums_by_source
from groundup.train.lora import LoRAConfig, set_trainable
from groundup.train.optim import Optimizer, check_schedule, learning_rate_at
from groundup.train.powersgd import make_hook
from groundup.train.start import open_start, weights_to_load
from model import Transformer

# ---- settings: override with a config file or --key=value; see --help ----------------------------
# The comments are checked: a value must be one of `a | b`, `at least n`, or `from a to b`.
out_dir = "out/dpo"  # run directory: config.py, log.jsonl, reference.safetensors, step_*/
init_from = "out/sft"  # a run, a checkpoint or a Hugging Face directory
data = "data/pairs"  # pairs: a file, or a directory of prepare.py; 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # the same for validation; "" = the directory's own, or val_fraction of the rows
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
val_fraction = 0.02  # of rows without validation data of their own (from 0 to 1)
resume = "auto"  # auto = continue if out_dir has a checkpoint | must | never
resume_from = 0  # step of out_dir to continue from; 0 = its newest checkpoint (at least 0)
overwrite = False  # delete: with resume='never' the old run, with resume_from the steps after it
seed = 1337  # of new weights, data order, dropout and samples
# loss
loss = "sigmoid"  # sigmoid | cdpo | robust | hinge | ipo | sigmoid_norm | simpo | orpo | kto
beta = 0.1  # weight of a log-ratio; sigmoid_norm and simpo take means per token: 2.0
label_smoothing = 0.0  # cdpo, robust: share of pairs the wrong way round (from 0 to 0.5)
gamma = 0.5  # simpo: margin by which the chosen answer should win (at least 0)
desirable_weight = 1.0  # kto: weight of a good answer, against 1 for a bad one (at least 0)
nll_weight = 0.0  # weight of the chosen answer's loss per token, which keeps it likely (at least 0)
reference = "precomputed"  # precomputed | adapter_off (in each step, for trainable='lora')
# which parameters are trained
trainable = "all"  # all, or some of embed, lm_head, lora, regular expressions of names
lora_rank = 16  # rank of the LoRA matrices (at least 1)
lora_alpha = 32.0  # an adapter's output is multiplied by lora_alpha / lora_rank
dropout = 0.0  # above 0 the log-ratios are noise from the first step on (from 0 to 1)
# data
block_size = 1024  # most tokens of a prompt and an answer; longer pairs are left out (at least 1)
epochs = 1.0  # passes over the pairs of all sources, if max_steps is 0 (from 0 to 1000)
max_steps = 0  # 0 = as many as epochs takes (at least 0)
max_epochs = ""  # most epochs of each source: '4' or 'data/a=2,data/b=8'
# batch
batch_size = 4  # pairs per rank and micro-step: twice as many rows (at least 1)
total_batch_pairs = 0  # per step, over all ranks; 0 = one micro-step on each (at least 0)
# optimizer
optimizer = "adamw"  # adamw | muon (for the blocks' matrices; AdamW for the rest)
learning_rate = 1e-6  # peak; LoRA needs about ten times as much: 1e-5 (at least 0)
min_lr = 0.0  # learning rate at the end of the schedule (at least 0)
schedule = "cosine"  # constant | cosine | linear | wsd (see groundup/train/optim.py)
warmup_steps = 0.1  # steps of rising learning rate; below 1: a share of max_steps (at least 0)
weight_decay = 0.0  # on matrices only (at least 0)
momentum = 0.95  # Muon: decay of the mean of gradients (from 0 to 1)
grad_clip = 1.0  # global norm; 0.0 = off (at least 0)
# system
device = "auto"  # auto, cpu, cuda or mps; auto takes cuda, then cpu
dtype = "auto"  # auto | float32 | bfloat16 | float16 (with a GradScaler)
compile = True  # torch.compile, block by block
activation_checkpointing = False  # recompute blocks in backward: less memory, a third more work
parallel = "ddp"  # ddp | fsdp (each rank keeps a part of weights, gradients and optimizer state)
compress = "none"  # none | fp16 | bf16 | powersgd (gradients on the wire)
overlap_step = "off"  # off | forward | backward (when a block is updated; see docs/ddp.md)
zero1 = False  # each rank keeps and updates its share of the optimizer state (ZeRO-1)
timeout_s = 300.0  # stop if ranks wait for each other longer than this (at least 1)
peak_tflops = 0.0  # of one device, for mfu and the plan; at least 0, 0 = known by its name
plan_only = False  # print the plan and stop; WORLD_SIZE=8 before the command plans for 8 devices
# evaluation, log, checkpoints
eval_every = 100  # steps; also before the first and after the last step (at least 1)
eval_steps = 50  # batches over all ranks; 0 = the whole validation split (at least 0)
log_every = 10  # steps (at least 1)
track = "none"  # none | tensorboard | trackio | wandb (offline; also what log.jsonl has)
save_every = 500  # steps; also after the last step (at least 1)
keep_last = 2  # newest checkpoints to keep besides the two best; 0 = all (at least 0)

# the line of an evaluation
SHOWN = "val loss {val_loss:.4f} | accuracy {rewards/accuracies:.1%} | margin {rewards/margins:.4f}"
SHOWN += " | chosen {logps/chosen:.2f} nats | rejected {logps/rejected:.2f} nats"


def reference_of(model: Transformer, batch: PairBatch, table: Tensor | None) -> Tensor:
    """Return the reference's log-probabilities of the answers, (2, B).

    They are 0 for a loss without a reference. Else they are looked up in table (n_pairs, 2), which
    `compute_reference` made; with reference='adapter_off' there is none, and the model without its
    adapters computes them, (1, B) for a batch of kto.
    """
    if loss in REFERENCE_FREE:
        return torch.zeros(2, len(batch.number), device=torch_device)
    if table is not None:
        return table[batch.number].T
    # Autocast keeps its copies of the weights in half precision until its context ends. Copies made
    # without gradient must not serve the training forward: hence a context of its own.
    with autocast(torch_device, torch_dtype):
        return reference_logps(model, batch)


@torch.no_grad()
def estimate_kl(model: Transformer, other_answers: Batches, table: Tensor | None) -> Tensor:
    """Return KTO's estimate for a step: how far the model has moved away from the reference.

    other_answers: the micro-batches of all steps, with answers to other prompts."""
    measured = []
    for _ in range(other_answers.accum_steps):
        batch = other_answers.next()
        with autocast(torch_device, torch_dtype):
            logps, _ = pair_logps(model, batch)
        ref_logps = reference_of(model, batch, table)
        # Of other answers alone: logps is (1, B). A table has the rows of both kinds, these last.
        measured.append((logps[0], ref_logps[-1]))
    return kl_estimate(measured, torch_device)


@torch.no_grad()
def evaluate(
    model: Transformer, corpus: PairCorpus, table: Tensor | None, config: dict
) -> dict[str, float]:
    """Return the mean loss and metrics of validation pairs.

    With several sources: their average weighted by the sources' shares, and of each its loss and
    accuracy. {} if a signal to stop came meanwhile."""
    model.eval()
    measured = []  # of all batches: KTO's loss needs an estimate over all of them
    val_batches = corpus.val_batches(batch_size, eval_steps, ranks.rank(), ranks.world_size())
    for source, batches in enumerate(val_batches.values()):
        for batch in fsdp.same_forwards(model, batches, stop_signal):
            batch = batch.to(torch_device)
            with autocast(torch_device, torch_dtype):
                logps, n_tokens = pair_logps(model, batch)
            ref_logps = reference_of(model, batch, table)
            measured.append((source, logps, ref_logps, n_tokens, batch.margin))
    model.train()
    if ranks.any_rank(stop_signal()):
        return {}
    kl = None
    if loss == "kto":
        # Validation batches have both sides: row 1 is the answer to another prompt.
        of_other_answers = [(logps[1], ref_logps[1]) for _, logps, ref_logps, _, _ in measured]
        kl = kl_estimate(of_other_answers, torch_device)
    return mean_scores(measured, kl, corpus, config)


def mean_scores(
    measured: list[tuple], kl: Tensor | None, corpus: PairCorpus, config: dict
) -> dict[str, float]:
    """Return the means of `evaluate`, over all ranks.

    measured: of each batch its source, logps, ref_logps and n_tokens (2, B), and margin (B,), which
    for kto is the label."""
    names = ("pairs", *metric_names(config))
    sums = torch.zeros(len(names), len(corpus.val), dtype=torch.float64)
    for source, logps, ref_logps, n_tokens, labels in measured:
        losses, metrics = losses_and_metrics(logps, ref_logps, n_tokens, config, labels, kl)
        sums[0, source] += len(losses)
        sums[1:, source] += metrics.sum(1).cpu().double()
    scores = {}
    for end, row in sums_by_source(dict(zip(names, sums, strict=True)), "pairs", corpus).items():
        means = named([(row[name] / row["pairs"]).item() for name in names[1:]], config)
        scores[f"val_loss{end}"] = means.pop("loss")
        scores |= {f"accuracy{end}": means["rewards/accuracies"]} if end else means
    return scores


if __name__ == "__main__":
    config = configure(globals())
    check_losses(config)

    # ---- ranks and device
    world = ranks.init(device, timeout_s)
    stop_signal = ranks.StopSignal()  # Ctrl-C, SIGTERM and the like: save, then stop
    torch_device = choose_device(device, world.local_rank, plan_only)
    torch_dtype = choose_dtype(dtype, torch_device, scaled=True)
    # a plan may be for other ranks than the one that prints it
    world_size = ranks.planned_world_size() if plan_only else world.world_size
    peak = peak_tflops * 1e12 or peak_flops(torch_device)

    # ---- batch: a step is accum_steps micro-steps on each rank
    pairs_per_micro_step = batch_size * world_size
    pairs_per_step = total_batch_pairs or pairs_per_micro_step
    accum_steps, rest = divmod(pairs_per_step, pairs_per_micro_step)
    text = f"{total_batch_pairs=} must be a multiple of batch_size*world_size"
    text += f" = {batch_size}*{world_size} = {pairs_per_micro_step}"
    ways = plan.ways_to_fit(config, "total_batch_pairs", pairs_per_micro_step)
    refuse(rest, f"{text}; {ways}")

    # ---- the checkpoint to start from; n_known: token ids that its weights were trained with
    init_dir, tokenizer, n_known, model_config = open_start(config)

    # ---- data
    kind = LabelCorpus if loss == "kto" else PairCorpus
    context = model_config.block_size
    corpus = kind(data, tokenizer, block_size, seed, val_data, val_fraction, context=context)
    corpus.need_validation(val_fraction)
    settings = config | {"total_batch_pairs": pairs_per_step, "world_size": world_size}
    max_steps = steps_of(
        settings, corpus.n_rows, pairs_per_step, "total_batch_pairs", "pairs", corpus.left_out()
    )
    check_schedule(config, max_steps)
    order = corpus.order(seed, pairs_per_step, max_steps, max_epochs)
    epochs_of_each, warnings = corpus.describe(order, max_steps * pairs_per_step)
    if loss == "kto":
        warnings += corpus.balance(desirable_weight)
    batch_line = f"{counted(pairs_per_step, 'pair')} per step, {counted(max_steps, 'step')}, "
    batch_line += epochs_of_each

    # ---- model
    torch.manual_seed(seed)  # of new weights
    if parallel == "fsdp" and not plan_only:
        fsdp.check_settings(config, torch_dtype)
        model = fsdp.build(Transformer, model_config, torch_device, torch_dtype, new=False)
    else:
        with weights_to_load(trainable, torch_dtype, plan_only):
            model = Transformer(model_config)
        set_trainable(model, trainable, LoRAConfig(lora_rank, lora_alpha, dropout))
    if world.is_main:
        print(*corpus.report(), sep="\n")
        rows_per_pair = 1 if loss == "kto" else 2
        plan_settings = config | {"max_steps": max_steps, "batch_size": rows_per_pair * batch_size}
        n_tokens = corpus.tokens_seen(order, max_steps * pairs_per_step)["tokens"]
        forwards = int(loss == "kto")  # of estimate_kl
        text = plan.describe(
            model, plan_settings, batch_line, n_tokens, world_size, torch_device, torch_dtype, peak,
            forwards=forwards,
        )  # fmt: skip
        print(text, *warnings, sep="\n", flush=True)
    if plan_only:
        sys.exit(0)

    # ---- the checkpoint to continue, or the weights to start from
    data_record = {"seed": seed, "block_size": block_size, "total_batch_pairs": pairs_per_step}
    data_record |= {"val_fraction": val_fraction, "max_epochs": max_epochs} | corpus.record()
    made_of = {}  # what the reference depends on: {name: fingerprint}
    if reference == "precomputed" and loss not in REFERENCE_FREE:
        made_of = describe_reference(init_dir, corpus, torch_dtype)
        # a resumed run must be compared with the same weights
        data_record["reference_weights"] = made_of["checkpoint"]
    ranks.check_equal(config | data_record | {"dtype": str(torch_dtype)})
    # None and {"step": 0} for a new run. load_resumed() loads the weights, restore() the rest.
    resume_dir, state = checkpoint.find(config, model_config, data_record, max_steps)
    warmup = checkpoint.warmup_of(config, max_steps, state)  # steps
    reference_path = Path(out_dir, "reference.safetensors")
    table = None  # (n_pairs, 2) float32: the reference's log-probabilities of both answers
    if made_of and checkpoint.resume_mode(config) != "never":  # else the file will be deleted
        table = read_reference(reference_path, made_of)
    # The reference is of the start's weights. A resumed run, too, loads these first, and its own
    # below, once the reference is computed.
    must_compute = bool(made_of) and table is None
    # rank 0 reads the weights, DDP sends them to the others; with FSDP each reads its rows
    if must_compute or not resume_dir:
        huggingface.load_start(model, init_dir, n_known, tokenizer)
    else:
        huggingface.load_resumed(model, resume_dir)
    base_dir = huggingface.frozen_base(model, init_dir, resume_dir)  # of adapters

    # ---- device, compile, data parallel, optimizer
    plan.check_arithmetic(torch_device, torch_dtype)  # mps may be wrong: compare with the CPU
    model.to(torch_device)
    model.activation_checkpointing = activation_checkpointing
    if compile:
        check_compiler(torch_device)
        # Block by block, so that a block's gradients are ready, and sent, when its backward ends.
        for part in (*model.layers, model.norm):
            part.forward = torch.compile(part.forward)
    betas = (0.9, 0.95)  # of AdamW
    scaler = torch.amp.GradScaler(torch_device.type, enabled=torch_dtype == torch.float16)
    if parallel == "fsdp":
        ddp = fsdp.FSDP(model)
        opt = fsdp.AdamW(ddp.params, betas, weight_decay)
    else:
        check_options(compress, overlap_step, zero1, grad_clip, scaler.is_enabled())
        hook = make_hook(compress, start_step=warmup, seed=seed, scaler=scaler)
        ddp = DDP(model, hook, overlap_step, zero1, whole_matrices=optimizer == "muon")
        muon_dtype = torch.bfloat16 if torch_dtype == torch.bfloat16 else torch.float32
        opt = Optimizer(ddp.buckets, optimizer, betas, weight_decay, momentum, muon_dtype)

    # ---- the reference, then restore
    if must_compute:
        table = compute_reference(model, corpus, batch_size, torch_device, torch_dtype)
        if resume_dir:
            huggingface.load_resumed(model, resume_dir)
            ranks.broadcast_weights(model)
    checkpoint.restore(resume_dir, state, model, ddp, opt, scaler, seed)
    steps_done = state["step"]  # 0 for a new run
    config = checkpoint.make_run_dir(config, __file__, state, max_steps)
    if must_compute and world.is_main:
        save_reference(reference_path, table, made_of)
    if table is not None:
        table = table.to(torch_device)
    flops = plan.flops_per_token(model, block_size)
    log = RunLog(out_dir, max_steps, steps_done, world, track, flops, peak, torch_device)
    log.note_changes(state)
    saver = Saver(out_dir, keep_last, tokenizer, log, config, data_record, base_dir)
    batches = Batches(corpus, order, batch_size, accum_steps, world, torch_device, steps_done)
    if loss == "kto":
        other_answers = Batches(
            corpus.others(), order, batch_size, accum_steps, world, torch_device, steps_done
        )
    extra_state = {"warmup_steps": warmup}  # part of each checkpoint

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        scores = evaluate(model, corpus, table, config)
        log.report(steps_done, scores, SHOWN.format_map(scores))
        saver.tidy()
    stop_signal.begin()  # from here on a signal waits for the end of a step
    stopping = False
    log.restart_clock()
    n_tokens_seen = 0  # of all ranks since the last log line, without padding
    for step in range(steps_done + 1, max_steps + 1):
        lr = learning_rate_at(step, schedule, learning_rate, min_lr, warmup, max_steps)

        # forward and backward
        # (M,) this rank's share of the means over the step's pairs, in the order of `metric_names`
        shares = torch.zeros(len(metric_names(config)), device=torch_device)
        n_tokens_seen += batches.count_tokens(step - 1)
        kl = None
        if loss == "kto":
            kl = estimate_kl(model, other_answers, table)
        ddp.expect_step(opt, lr)  # for overlap_step="backward" only
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, in the last backward
            batch = batches.next()
            with autocast(torch_device, torch_dtype):
                logps, n_tokens = pair_logps(model, batch)  # (2, B) each; (1, B) for kto
            ref_logps = reference_of(model, batch, table)
            # for kto, margin holds the labels; the other losses ignore it
            losses, metrics = losses_and_metrics(
                logps, ref_logps, n_tokens, config, batch.margin, kl
            )
            # ddp averages over the ranks
            micro_loss = losses.sum() * (world_size / pairs_per_step)
            scaler.scale(micro_loss).backward()  # full buckets are sent from inside this call
            shares += metrics.sum(1) / pairs_per_step

        # >>> optimizer step: identical in all trainers (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr, grad_clip, scaler, stop_signal())
        # <<< optimizer step
        log.advance()

        # log
        last = step == max_steps
        stopping = ddp.stopping
        if step % log_every == 0 or last or stopping:
            # .tolist() waits for the device, so the time below is real
            means = named(ranks.all_reduce_sum(shares.clone()).tolist(), config)
            pairs_per_s = log.steps_since_line() * pairs_per_step / log.seconds()
            values = {"loss": means.pop("loss"), "lr": lr, "grad_norm": grad_norm.item()}
            values |= corpus.tokens_seen(order, step * pairs_per_step)
            values |= {"skipped": int(ddp.skipped[0]), "pairs_per_s": pairs_per_s}
            values |= {"epoch": float(order.epochs(step * pairs_per_step).max())}
            values |= {"accuracy": means["rewards/accuracies"], "margin": means["rewards/margins"]}
            log.train(step, values | means, n_tokens_seen)
            n_tokens_seen = 0
            check_finite(step, ddp.skipped, shares[0], batches, saver)

        # save, then evaluate: an evaluation may run out of memory
        with log.paused():
            saving = step % save_every == 0 or last
            evaluating = (step % eval_every == 0 or last) and not stopping
            if saving or evaluating:
                ddp.flush()  # apply the updates that wait for the next forward
            if saving:
                saver.save(step, model, ddp, opt, scaler, extra_state)
            if evaluating:
                scores = evaluate(model, corpus, table, config)
                stopping = ranks.any_rank(stop_signal())
                if not stopping:  # else it was left early: a resumed run does it again
                    log.report(step, scores, SHOWN.format_map(scores))
                    saver.tidy()
        if stopping:
            break

    # ---- the end
    batches.close()
    if loss == "kto":
        other_answers.close()
    if stopping and not saving:
        ddp.flush()
        saver.save(step, model, ddp, opt, scaler, extra_state)
    saver.close()
    log.finish(__file__, config, corpus, stopping, saver.saved)
    ranks.close()
    sys.exit(stop_signal.exit_code if stopping else int(not saver.saved))
