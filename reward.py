"""A reward model: of two answers to a prompt, the better one learns to get the higher score.

python reward.py config/debug_reward.py                                    # CPU, seconds, own data
python reward.py config/reward.py --init_from=out/sft --data=pairs.jsonl   # 1 GPU, all weights
torchrun --standalone --nproc_per_node=4 reward.py config/reward.py --init_from=out/sft --data=DIR
python reward.py --init_from=out/reward --score=chat.jsonl --out=scored.jsonl   # adds "reward"

The score of an answer is read at the <|im_end|> that closes it. The loss of a pair is -log sigmoid
of the difference of its two scores, and that of a step is the mean over its pairs. It starts from a
language model, which gets a new head, or from a reward model. Checkpoints have adapters merged.
"""

if __name__ == "__main__":  # before the slow imports: from here on Ctrl-C prints one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import sys
from pathlib import Path

import torch

from configurator import configure
from ddp import DDP, check_options
from groundup.align import reward_model
from groundup.align.reward_model import LENGTH_BUCKETS, RewardModel, bradley_terry, score_pairs
from groundup.errors import counted, refuse
from groundup.scores import rows
from groundup.tokens.batches import Batches
from groundup.tokens.pairs import PairCorpus
from groundup.tokens.rows import steps_of
from groundup.train import checkpoint, fsdp, huggingface, plan, ranks
from groundup.train.checkpoint import Saver
from groundup.train.device import autocast, check_compiler, choose_device, choose_dtype, peak_flops
from groundup.train.log import RunLog, check_finite
from groundup.train.lora import LoRAConfig, set_trainable
from groundup.train.optim import Optimizer, check_schedule, learning_rate_at
from groundup.train.powersgd import make_hook
from groundup.train.start import open_start, weights_to_load
from tokenizer import Tokenizer

# ---- settings: override with a config file or --key=value; see --help ----------------------------
# The comments are checked: a value must be one of `a | b`, `at least n`, or `from a to b`.
out_dir = "out/reward"  # run directory: config.py, log.jsonl, step_*/
init_from = "out/sft"  # a run, a checkpoint or a Hugging Face directory
data = "data/pairs"  # pairs: a file, or a directory of prepare.py; 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # the same for validation; "" = the directory's own, or val_fraction of the rows
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
val_fraction = 0.05  # of rows without validation data of their own (from 0 to 1)
resume = "auto"  # auto = continue if out_dir has a checkpoint | must | never
resume_from = 0  # step of out_dir to continue from; 0 = its newest checkpoint (at least 0)
overwrite = False  # delete: with resume='never' the old run, with resume_from the steps after it
seed = 1337  # of new weights, data order, dropout and samples
# scoring instead of training: init_from is then a reward model
score = ""  # files to score: conversations, or what sample.py --out wrote
out = "scores.jsonl"  # the same rows with "reward": of the last answer, or of each completion
# loss
margin_scale = 1.0  # scores should differ by this times the row's "margin", if any (at least 0)
center = 0.0  # weight of the squared sum of both scores, which keeps them near 0 (at least 0)
# which parameters are trained
trainable = "all"  # all, or some of embed, lm_head, lora, regular expressions of names
lora_rank = 16  # rank of the LoRA matrices (at least 1)
lora_alpha = 32.0  # an adapter's output is multiplied by lora_alpha / lora_rank
dropout = 0.0  # from 0 to 1
# data
block_size = 1024  # most tokens of a prompt and an answer; longer pairs are left out (at least 1)
epochs = 1.0  # passes over the pairs of all sources, if max_steps is 0 (from 0 to 1000)
max_steps = 0  # 0 = as many as epochs takes (at least 0)
max_epochs = ""  # most epochs of each source: '4' or 'data/a=2,data/b=8'
# batch
batch_size = 8  # pairs per rank and micro-step: twice as many rows (at least 1)
total_batch_pairs = 0  # per step, over all ranks; 0 = one micro-step on each (at least 0)
# optimizer
optimizer = "adamw"  # adamw | muon (for the blocks' matrices; AdamW for the rest)
learning_rate = 1e-5  # peak; LoRA needs about ten times as much: 1e-4 (at least 0)
min_lr = 0.0  # learning rate at the end of the schedule (at least 0)
schedule = "cosine"  # constant | cosine | linear | wsd (see groundup/train/optim.py)
warmup_steps = 0.03  # steps of rising learning rate; below 1: a share of max_steps (at least 0)
weight_decay = 0.0  # on matrices only (at least 0)
momentum = 0.95  # Muon: decay of the mean of gradients (from 0 to 1)
grad_clip = 1.0  # global norm; 0.0 = off (at least 0)
# system
device = "auto"  # auto, cpu, cuda or mps; auto takes cuda, then cpu
dtype = "auto"  # auto | float32 | bfloat16 | float16 (with a GradScaler)
compile = True  # torch.compile, block by block
activation_checkpointing = False  # recompute blocks in backward: less memory, a third more work
compress = "none"  # none | fp16 | bf16 | powersgd (gradients on the wire)
overlap_step = "off"  # off | forward | backward (when a block is updated; see docs/ddp.md)
zero1 = False  # each rank keeps and updates its share of the optimizer state (ZeRO-1)
timeout_s = 300.0  # stop if ranks wait for each other longer than this (at least 1)
peak_tflops = 0.0  # of one device, for mfu and the plan; at least 0, 0 = known by its name
plan_only = False  # print the plan and stop; WORLD_SIZE=8 before the command plans for 8 devices
# evaluation, log, checkpoints
eval_every = 100  # steps; also before the first and after the last step (at least 1)
eval_steps = 0  # batches over all ranks; 0 = the whole validation split (at least 0)
log_every = 10  # steps (at least 1)
track = "none"  # none | tensorboard | trackio | wandb (offline; also what log.jsonl has)
save_every = 500  # steps; also after the last step (at least 1)
keep_last = 2  # newest checkpoints to keep besides the two best; 0 = all (at least 0)


@torch.no_grad()
def evaluate(model: RewardModel, corpus: PairCorpus) -> dict[str, float]:
    """Return the mean loss and the metrics of `reward_model.measure` of all validation pairs.

    With several sources: their loss weighted by the sources' shares, and of each its loss and
    accuracy. {} if a signal to stop came meanwhile."""
    model.eval()
    found = {}  # of each source (5, N): loss, both scores, both lengths of its N pairs
    val_batches = corpus.val_batches(batch_size, eval_steps, ranks.rank(), ranks.world_size())
    for source, batches in val_batches.items():
        columns = [torch.zeros(5, 0, dtype=torch.float64)]  # a rank may have no batch
        for batch in fsdp.same_forwards(model, batches, stop_signal):
            lengths = torch.bincount(batch.row, minlength=len(batch.x)).view(2, -1)
            batch = batch.to(torch_device)
            with autocast(torch_device, torch_dtype):
                chosen, rejected = score_pairs(model, batch)
            losses = bradley_terry(chosen, rejected, margin_scale * batch.margin, center)
            values = torch.stack((losses, chosen, rejected)).cpu()
            columns.append(torch.cat((values.double(), lengths)))
        mine = torch.cat(columns, dim=1)
        found[source] = torch.cat(ranks.gather_objects(mine), dim=1)
    model.train()
    if ranks.any_rank(stop_signal()):
        return {}

    losses = {source: values[0].mean().item() for source, values in found.items()}
    shares = zip(corpus.val_shares(), losses.values(), strict=True)
    _, chosen, rejected, n_chosen, n_rejected = torch.cat(list(found.values()), dim=1)
    scores = {"val_loss": sum(share * loss for share, loss in shares)}
    scores |= reward_model.measure(chosen, rejected, n_chosen, n_rejected)
    if len(found) > 1:
        for source, (_, chosen, rejected, _, _) in found.items():
            scores[f"val_loss/{source}"] = losses[source]
            scores[f"accuracy/{source}"] = (chosen > rejected).double().mean().item()
    return scores


def report(log: RunLog, step: int, scores: dict[str, float]) -> None:
    """Write an evaluation to the log, with the accuracy by the lengths of the two answers."""
    shown = "val loss {val_loss:.4f} | accuracy {accuracy:.1%} | longer wins {longer_wins:.1%} | "
    shown += (
        "ece {ece:.3f} | margin {margin:.3f} | correlation with length {length_correlation:.2f}"
    )
    by_length = []
    for name in LENGTH_BUCKETS:
        n_pairs, accuracy = scores[f"pairs/{name}"], scores[f"accuracy/{name}"]
        if n_pairs:
            by_length.append(f"{name} {100 * accuracy:.1f}% of {n_pairs}")
    lines = ["accuracy by length: " + ", ".join(by_length)]
    log.report(step, scores, shown.format_map(scores), lines)


def score_files(torch_device: torch.device, torch_dtype: torch.dtype) -> None:
    """Write the rows of the files in `score` to `out`, with the rewards of their answers."""
    init_dir = checkpoint.resolve(init_from, rewards=True)
    model = reward_model.load(init_dir, torch_device, torch_dtype)
    tokenizer = Tokenizer.load(init_dir)
    settings = rows.common_settings(score)  # of sample.py; None if there are conversations only
    if settings:
        settings["reward_model"] = huggingface.model_name(init_dir)
    key = rows.reward_key(init_dir, score, torch_dtype)  # to go on where a killed call stopped
    counts = rows.write_rewards(
        model, tokenizer, score, Path(out), key, batch_size, torch_dtype, settings
    )
    print(f"{out}: {counted(counts.pop(''), 'answer')} with a reward")
    for reason, n in counts.items():
        print(f"{out}: {n:,} without: {reason}")


if __name__ == "__main__":
    config = configure(globals())

    # ---- ranks and device
    world = ranks.init(device, timeout_s)
    torch_device = choose_device(device, world.local_rank, plan_only)
    torch_dtype = choose_dtype(dtype, torch_device, scaled=not score)
    if score:
        refuse(world.world_size > 1, f"{score=} is the work of one process: start it with python")
        score_files(torch_device, torch_dtype)
        sys.exit(0)
    stop_signal = ranks.StopSignal()  # Ctrl-C, SIGTERM and the like: save, then stop
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
    # padded: transformers looks for the padding
    init_dir, tokenizer, n_known, model_config = open_start(
        config, adapt=reward_model.padded, rewards=True
    )

    # ---- data
    context = model_config.block_size
    corpus = PairCorpus(data, tokenizer, block_size, seed, val_data, val_fraction, context=context)
    corpus.need_validation(val_fraction)
    settings = config | {"total_batch_pairs": pairs_per_step, "world_size": world_size}
    max_steps = steps_of(
        settings, corpus.n_rows, pairs_per_step, "total_batch_pairs", "pairs", corpus.left_out()
    )
    check_schedule(config, max_steps)
    order = corpus.order(seed, pairs_per_step, max_steps, max_epochs)
    epochs_of_each, warnings = corpus.describe(order, max_steps * pairs_per_step)
    batch_line = f"{counted(pairs_per_step, 'pair')} per step, {counted(max_steps, 'step')}, "
    batch_line += epochs_of_each

    # ---- model
    torch.manual_seed(seed)  # of new weights
    with weights_to_load(trainable, torch_dtype, plan_only):
        model = RewardModel(model_config)
    set_trainable(model, trainable, LoRAConfig(lora_rank, lora_alpha, dropout))
    model.score.requires_grad_(True)  # the new head, whatever else is trained
    if world.is_main:
        print(*corpus.report(), sep="\n")
        settings = config | {"max_steps": max_steps, "batch_size": 2 * batch_size}  # rows
        n_tokens = corpus.tokens_seen(order, max_steps * pairs_per_step)["tokens"]
        text = plan.describe(
            model, settings, batch_line, n_tokens, world_size, torch_device, torch_dtype, peak
        )
        print(text, *warnings, sep="\n", flush=True)
    if plan_only:
        sys.exit(0)

    # ---- the checkpoint to continue, or the weights to start from
    data_record = {"seed": seed, "block_size": block_size, "total_batch_pairs": pairs_per_step}
    data_record |= {"val_fraction": val_fraction, "max_epochs": max_epochs} | corpus.record()
    ranks.check_equal(config | data_record | {"dtype": str(torch_dtype)})
    # None and {"step": 0} for a new run. load_resumed() loads the weights, restore() the rest.
    resume_dir, state = checkpoint.find(config, model_config, data_record, max_steps)
    warmup = checkpoint.warmup_of(config, max_steps, state)  # steps
    # rank 0 reads the weights, DDP sends them to the others
    if resume_dir:
        reward_model.load_resumed(model, resume_dir, state["trained"])
    else:
        reward_model.load_start(model, init_dir, n_known, tokenizer)
    base_dir = reward_model.frozen_base(model, init_dir, state)  # of adapters

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
    check_options(compress, overlap_step, zero1, grad_clip, scaler.is_enabled())
    hook = make_hook(compress, start_step=warmup, seed=seed, scaler=scaler)
    ddp = DDP(model, hook, overlap_step, zero1, whole_matrices=optimizer == "muon")
    muon_dtype = torch.bfloat16 if torch_dtype == torch.bfloat16 else torch.float32
    opt = Optimizer(ddp.buckets, optimizer, betas, weight_decay, momentum, muon_dtype)

    # ---- restore, and make the run directory
    checkpoint.restore(resume_dir, state, model, ddp, opt, scaler, seed)
    steps_done = state["step"]  # 0 for a new run
    config = checkpoint.make_run_dir(config, __file__, state, max_steps)
    flops = plan.flops_per_token(model, block_size)
    log = RunLog(out_dir, max_steps, steps_done, world, track, flops, peak, torch_device)
    log.note_changes(state)
    saver = Saver(
        out_dir, keep_last, tokenizer, log, config, data_record, model_format=reward_model
    )
    batches = Batches(corpus, order, batch_size, accum_steps, world, torch_device, steps_done)
    # part of each checkpoint, with the adapters to the bit
    extra_state = {"warmup_steps": warmup, "trained": reward_model.trained_weights(model, base_dir)}

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        report(log, steps_done, evaluate(model, corpus))
        saver.tidy()
    stop_signal.begin()  # from here on a signal waits for the end of a step
    log.restart_clock()
    stopping = False
    n_tokens_seen = 0  # of all ranks since the last log line, without padding
    for step in range(steps_done + 1, max_steps + 1):
        lr = learning_rate_at(step, schedule, learning_rate, min_lr, warmup, max_steps)

        # forward and backward
        # of the step's losses, right pairs, margins and scores
        sums = torch.zeros(4, device=torch_device)
        n_tokens_seen += batches.count_tokens(step - 1)
        ddp.expect_step(opt, lr)  # for overlap_step="backward" only
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, in the last backward
            batch = batches.next()
            with autocast(torch_device, torch_dtype):
                chosen, rejected = score_pairs(model, batch)  # (B,), (B,)
            losses = bradley_terry(chosen, rejected, margin_scale * batch.margin, center)  # (B,)
            # ddp averages over the ranks
            loss = losses.sum() * (world_size / pairs_per_step)
            scaler.scale(loss).backward()  # full buckets are sent from inside this call
            with torch.no_grad():
                margins = chosen - rejected
                metrics = (losses, margins > 0, margins, (chosen + rejected) / 2)
                sums += torch.stack(metrics).sum(1)

        # >>> optimizer step: identical in all trainers (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr, grad_clip, scaler, stop_signal())
        # <<< optimizer step
        log.advance()

        # log
        last = step == max_steps
        stopping = ddp.stopping
        if step % log_every == 0 or last or stopping:
            # .tolist() waits for the device, so the time below is real
            means = (ranks.all_reduce_sum(sums.clone()) / pairs_per_step).tolist()
            mean_loss, accuracy, margin, reward = means
            pairs_per_s = log.steps_since_line() * pairs_per_step / log.seconds()
            values = {"loss": mean_loss, "lr": lr, "grad_norm": grad_norm.item()}
            values |= corpus.tokens_seen(order, step * pairs_per_step)
            values |= {"skipped": int(ddp.skipped[0]), "pairs_per_s": pairs_per_s}
            values |= {"epoch": float(order.epochs(step * pairs_per_step).max())}
            values |= {"accuracy": accuracy, "margin": margin, "reward": reward}
            log.train(step, values, n_tokens_seen)
            n_tokens_seen = 0
            check_finite(step, ddp.skipped, sums[0], batches, saver)

        # save, then evaluate: an evaluation may run out of memory
        with log.paused():
            saving = step % save_every == 0 or last
            evaluating = (step % eval_every == 0 or last) and not stopping
            if saving or evaluating:
                ddp.flush()  # apply the updates that wait for the next forward
            if saving:
                saver.save(step, model, ddp, opt, scaler, extra_state)
            if evaluating:
                scores = evaluate(model, corpus)
                stopping = ranks.any_rank(stop_signal())
                if not stopping:  # else it was left early: a resumed run does it again
                    report(log, step, scores)
                    saver.tidy()
        if stopping:
            break

    # ---- the end
    batches.close()
    if stopping and not saving:
        ddp.flush()
        saver.save(step, model, ddp, opt, scaler, extra_state)
    saver.close()
    next_command = "python reward.py --score=chat.jsonl --out=scored.jsonl"
    log.finish(__file__, config, corpus, stopping, saver.saved, next_command)
    ranks.close()
    sys.exit(stop_signal.exit_code if stopping else int(not saver.saved))
