"""Pretraining: next-token prediction on prepared token files.

python pretrain.py config/debug.py                                      # CPU, seconds, own data
torchrun --standalone --nproc_per_node=4 pretrain.py config/small.py    # 4 GPUs, or 4 CPU processes
python pretrain.py config/llama_1b.py --plan_only=True                  # parameters, memory, time
"""

if __name__ == "__main__":  # before the slow imports: from here on Ctrl-C prints one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import dataclasses
import math
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import configure, defaults_of
from ddp import DDP, InTree, check_options
from groundup.errors import counted, refuse
from groundup.kernels.cross_entropy import compile_loss
from groundup.tokens import IGNORE
from groundup.tokens.batches import Batches, TextCorpus
from groundup.tokens.text_tokenizer import TextTokenizer
from groundup.train import checkpoint, fsdp, huggingface, plan, ranks
from groundup.train.checkpoint import Saver
from groundup.train.device import (
    SkipInit,
    autocast,
    check_compiler,
    choose_device,
    choose_dtype,
    peak_flops,
)
from groundup.train.log import RunLog, check_finite, sums_by_source
from groundup.train.lora import LoRAConfig, frozen_dtype, set_trainable, weights_in
from groundup.train.optim import Optimizer, check_schedule, learning_rate_at
from groundup.train.powersgd import make_hook
from model import ModelConfig, Transformer

# ---- settings: override with a config file or --key=value; see --help ----------------------------
# The comments are checked: a value must be one of `a | b`, `at least n`, or `from a to b`.
out_dir = "out/pretrain"  # run directory: config.py, log.jsonl, step_*/
data_dir = "data/demo"  # of prepare.py; 'data/a=0.7,data/b=0.3'; stages '0: data/a; 8000: data/b'
val_data = ""  # directories to validate on, 'data/zh,data/code'; "" = those of data_dir
init_from = ""  # "" = new weights; else a run, a checkpoint or a Hugging Face directory
resume = "auto"  # auto = continue if out_dir has a checkpoint | must | never
resume_from = 0  # step of out_dir to continue from; 0 = its newest checkpoint (at least 0)
overwrite = False  # delete: with resume='never' the old run, with resume_from the steps after it
seed = 1337  # of new weights, data order, dropout and samples
# model
n_layer = 6  # at least 1
n_head = 6  # at least 1
n_kv_head = 0  # 0 = n_head; fewer = grouped-query attention
n_embd = 384  # at least 1
ffn_dim = 0  # 0 = 8/3 n_embd, rounded up to a multiple of 64
block_size = 256  # tokens per sequence (at least 1)
vocab_size = 0  # 0 = the tokenizer's
rope_theta = 10000.0  # base of the rotary wavelengths
qk_norm = False  # RMSNorm on queries and keys (Qwen3)
tie_embeddings = True  # the head shares the embedding's weights
dropout = 0.0  # from 0 to 1
doc_mask = False  # attention stays within a document
# data
pack = False  # whole documents packed into rows (prepare.py --pack=block_size), not windows
max_epochs = ""  # most epochs of each source: '4' or 'data/a=2,data/b=8'
# which parameters are trained
trainable = "all"  # all, or some of embed, lm_head, lora, regular expressions of names
lora_rank = 16  # rank of the LoRA matrices (at least 1)
# batch
batch_size = 16  # sequences per rank and micro-step (at least 1)
total_batch_tokens = 0  # per step, over all ranks; 0 = one micro-step on each (at least 0)
max_steps = 2000  # at least 1
# optimizer
optimizer = "muon"  # adamw | muon (for the blocks' matrices; AdamW for the rest)
learning_rate = 1e-3  # peak (at least 0)
min_lr = 1e-4  # learning rate at the end of the schedule (at least 0)
schedule = "cosine"  # constant | cosine | linear | wsd (see groundup/train/optim.py)
warmup_steps = 0.05  # steps of rising learning rate; below 1: a share of max_steps (at least 0)
decay_fraction = 0.2  # wsd: share of the schedule that the final decay takes (from 0 to 1)
weight_decay = 0.1  # on matrices only (at least 0)
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
reproducible = False  # the same bits on any number of ranks with the same OMP_NUM_THREADS
zero1 = False  # each rank keeps and updates its share of the optimizer state (ZeRO-1)
timeout_s = 300.0  # stop if ranks wait for each other longer than this (at least 1)
peak_tflops = 0.0  # of one device, for mfu and the plan; at least 0, 0 = known by its name
plan_only = False  # print the plan and stop; WORLD_SIZE=8 before the command plans for 8 devices
# evaluation, log, checkpoints
eval_every = 250  # steps; also before the first and after the last step (at least 1)
eval_steps = 50  # batches over all ranks; 0 = the whole validation split (at least 0)
sample_prompts = ""  # continued at each evaluation; several separated by |
log_every = 10  # steps (at least 1)
track = "none"  # none | tensorboard | trackio | wandb (offline; also what log.jsonl has)
save_every = 500  # steps; also after the last step (at least 1)
keep_last = 2  # newest checkpoints to keep besides the two best; 0 = all (at least 0)

SHOWN = "val loss {val_loss:.4f} | {val_bpb:.4f} bits per byte"  # of an evaluation


def choose_architecture(config: dict, init_dir: Path | None, n_ids: int) -> ModelConfig:
    """Return the architecture: of the checkpoint `init_dir` if there is one, else of the settings.

    n_ids: the tokenizer's. Raise UserError where settings, checkpoint and tokenizer disagree."""
    settings = {key: config[key] for key in ModelConfig.__dataclass_fields__ if key in config}
    if init_dir is None:
        cfg = ModelConfig(**settings | {"vocab_size": settings["vocab_size"] or n_ids})
        too_small = f"vocab_size={cfg.vocab_size} is less than the data's {n_ids} ids; leave it out"
        refuse(n_ids > cfg.vocab_size, too_small)
        return cfg

    cfg = huggingface.load_config(init_dir, to_train=True)
    # These two may differ from the checkpoint's. Of the others one that has its default yields to
    # the checkpoint, and any other value must be the checkpoint's.
    sizes = {key: settings.pop(key) for key in ("block_size", "dropout")}
    defaults = defaults_of(__file__)
    for key, value in settings.items():
        differs = value != defaults[key] and value != getattr(cfg, key)
        refuse(differs, f"{key}={value} but {init_dir} has {getattr(cfg, key)}; leave {key} out")
    return dataclasses.replace(cfg, vocab_size=max(cfg.vocab_size, n_ids), **sizes)


@torch.no_grad()
def evaluate(model: Transformer, corpus: TextCorpus, token_bytes: Tensor) -> dict[str, float]:
    """Return the validation loss in nats per token and in bits per byte of text.

    With several sources: of each, and their average weighted by the sources' shares. {} if a signal
    to stop came meanwhile."""
    model.eval()
    # With eval_steps batch_size decides what is seen. Else 4,096 tokens at a time are a fifth
    # faster than 1,024 (measured on a CPU).
    n_rows = batch_size if eval_steps else max(batch_size, 4096 // block_size)
    names = ("nats", "tokens", "bytes")
    sums = {name: torch.zeros(len(corpus.val), dtype=torch.float64) for name in names}
    val_batches = corpus.val_batches(n_rows, eval_steps, ranks.rank(), ranks.world_size())
    for k, batches in enumerate(val_batches.values()):
        # same_forwards: when one rank gets a signal, all leave after the same batch
        for x, y in fsdp.same_forwards(model, batches, stop_signal):
            sums["tokens"][k] += y.numel()  # no IGNORE: validation data are never packed
            sums["bytes"][k] += token_bytes[y].sum().item()
            missing = (0, 0, 0, n_rows - len(x))  # pad the last batch: a new shape recompiles
            x, y = F.pad(x, missing), F.pad(y, missing, value=IGNORE)
            with autocast(torch_device, torch_dtype):
                sums["nats"][k] += model(x.to(torch_device), y.to(torch_device)).item()
    model.train()
    if ranks.any_rank(stop_signal()):
        return {}
    scores = {}
    for end, row in sums_by_source(sums, "tokens", corpus).items():
        scores[f"val_loss{end}"] = (row["nats"] / row["tokens"]).item()
        scores[f"val_bpb{end}"] = (row["nats"] / math.log(2) / row["bytes"]).item()
    return scores


@torch.no_grad()
def sample(model: Transformer, tokenizer: TextTokenizer, prompt: str, n_tokens: int = 64) -> str:
    """Return the prompt with a continuation, drawn with the same random numbers each time."""
    model.eval()
    ids = tokenizer.encode(prompt)
    if tokenizer.begins or not ids:
        ids = [tokenizer.bos_id, *ids]
    generator = torch.Generator().manual_seed(seed)
    # Every token makes the row longer; compiling for each length would take minutes.
    with torch.compiler.set_stance("force_eager") if compile else nullcontext():
        for _ in range(n_tokens):
            row = torch.tensor([ids[-block_size:]], device=model.lm_head.weight.device)
            last = torch.tensor([row.shape[1] - 1], device=row.device)
            logits = model.lm_head(model(row, index=last))[0, : tokenizer.vocab_size]
            probabilities = torch.softmax(logits.float().cpu() / 0.8, dim=-1)  # temperature 0.8
            ids.append(torch.multinomial(probabilities, 1, generator=generator).item())
            if ids[-1] in tokenizer.stop_ids or stop_signal():
                break
    model.train()
    return tokenizer.decode(ids)


if __name__ == "__main__":
    config = configure(globals())

    # ---- ranks and device
    world = ranks.init(device, timeout_s)
    stop_signal = ranks.StopSignal()  # Ctrl-C, SIGTERM and the like: save, then stop
    torch_device = choose_device(device, world.local_rank, plan_only)
    torch_dtype = choose_dtype(dtype, torch_device, scaled=True)
    # a plan may be for other ranks than the one that prints it
    world_size = ranks.planned_world_size() if plan_only else world.world_size
    peak = peak_tflops * 1e12 or peak_flops(torch_device)

    # ---- batch: a step is accum_steps micro-steps on each rank
    tokens_per_micro_step = batch_size * block_size * world_size
    tokens_per_step = total_batch_tokens or tokens_per_micro_step
    accum_steps, rest = divmod(tokens_per_step, tokens_per_micro_step)
    text = f"{total_batch_tokens=} must be a multiple of batch_size*block_size*world_size"
    text += f" = {batch_size}*{block_size}*{world_size} = {tokens_per_micro_step}"
    ways = plan.ways_to_fit(config, "total_batch_tokens", tokens_per_micro_step)
    refuse(rest, f"{text}; {ways}")
    rows_per_step = tokens_per_step // block_size
    batch_line = f"{tokens_per_step:,} tokens per step = {counted(batch_size, 'sequence')} x "
    batch_line += f"{block_size} tokens x {counted(accum_steps, 'micro-step')} x "
    batch_line += counted(world_size, "rank")
    check_schedule(config, max_steps)
    n_micro_batches = accum_steps * world_size
    if reproducible:
        refuse(compress != "none", f"reproducible=True needs compress='none', got {compress!r}")
        # they are added as a binary tree
        text = "reproducible=True needs a power of two of micro-batches in total_batch_tokens, got"
        text += f" {n_micro_batches} of batch_size*block_size = {batch_size * block_size} tokens"
        refuse(n_micro_batches.bit_count() > 1, text)

    # ---- data
    init_dir = checkpoint.resolve(init_from) if init_from else None
    if plan_only and vocab_size:  # a plan needs no data
        n_ids = vocab_size
        warnings = []
    else:
        corpus = TextCorpus(data_dir, block_size, pack, val_data)
        tokenizer = TextTokenizer.load(corpus.dir)
        corpus.train[0].check_tokenizer(tokenizer.fingerprint())
        order = corpus.order(seed, rows_per_step, max_steps, max_epochs)
        epochs, warnings = corpus.describe(order, max_steps * rows_per_step)
        n_ids = tokenizer.vocab_size
        batch_line += f", {epochs}"
    model_config = choose_architecture(config, init_dir, n_ids)
    n_known = n_ids  # ids below it are not new to the weights: all, unless init_from lacks some
    if init_dir and not plan_only:
        n_known = huggingface.count_known_ids(init_dir, tokenizer, data_dir)
    huggingface.check_trainable(trainable, init_dir, n_ids - n_known)

    # ---- model
    torch.manual_seed(seed)  # of new weights
    if parallel == "fsdp" and not plan_only:
        fsdp.check_settings(config, torch_dtype)
        model = fsdp.build(Transformer, model_config, torch_device, torch_dtype, new=not init_dir)
    else:
        init_device = torch.device("meta" if plan_only else "cpu")  # meta: shapes without memory
        # rank 0 draws new weights, DDP sends them to the others
        initial = nullcontext() if world.is_main and not init_dir else SkipInit()
        with init_device, initial, weights_in(frozen_dtype(trainable, torch_dtype)):
            model = Transformer(model_config)
        set_trainable(model, trainable, LoRAConfig(lora_rank, alpha=2.0 * lora_rank))
    if world.is_main:
        n_tokens = tokens_per_step * max_steps
        text = plan.describe(
            model, config, batch_line, n_tokens, world_size, torch_device, torch_dtype, peak
        )
        print(text, *warnings, sep="\n", flush=True)
    if plan_only:
        sys.exit(0)

    # ---- the checkpoint to continue, or the weights to start from
    data_record = {"seed": seed, "block_size": block_size, "total_batch_tokens": tokens_per_step}
    data_record |= {"max_epochs": max_epochs} | corpus.record()
    if reproducible and torch_device.type == "cpu":  # a product's last bits depend on it
        data_record["OMP_NUM_THREADS"] = torch.get_num_threads()
    ranks.check_equal(config | data_record | {"dtype": str(torch_dtype)})
    huggingface.check_saves(model_config, tokenizer)
    # None and {"step": 0} for a new run. load_resumed() loads the weights, restore() the rest.
    resume_dir, state = checkpoint.find(config, model_config, data_record, max_steps)
    warmup = checkpoint.warmup_of(config, max_steps, state)  # steps
    # rank 0 reads the weights, DDP sends them to the others; with FSDP each reads its rows
    if resume_dir:
        huggingface.load_resumed(model, resume_dir)
    elif init_dir:
        huggingface.load_start(model, init_dir, n_known, tokenizer)
    base_dir = huggingface.frozen_base(model, init_dir, resume_dir)  # of adapters

    # ---- device, compile, data parallel, optimizer
    plan.check_arithmetic(torch_device, torch_dtype)  # mps may be wrong: compare with the CPU
    model.to(torch_device)
    model.activation_checkpointing = activation_checkpointing
    if doc_mask:
        model.delimiter_id = tokenizer.eot_id
        model.most_documents = corpus.most_documents()
    if compile:
        check_compiler(torch_device)
        compile_loss(torch_device)
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
        if reproducible:
            hook = InTree()
        ddp = DDP(model, hook, overlap_step, zero1, whole_matrices=optimizer == "muon")
        muon_dtype = torch.bfloat16 if torch_dtype == torch.bfloat16 else torch.float32
        opt = Optimizer(
            ddp.buckets, optimizer, betas, weight_decay, momentum, muon_dtype, reproducible
        )

    # ---- restore, and make the run directory
    checkpoint.restore(resume_dir, state, model, ddp, opt, scaler, seed)
    steps_done = state["step"]  # 0 for a new run
    # As recorded: a resumed run keeps its init_from.
    config = checkpoint.make_run_dir(config, __file__, state, max_steps)
    flops = plan.flops_per_token(model, block_size)
    log = RunLog(out_dir, max_steps, steps_done, world, track, flops, peak, torch_device)
    log.note_changes(state)
    saver = Saver(out_dir, keep_last, tokenizer, log, config, data_record, base_dir)
    batches = Batches(corpus, order, batch_size, accum_steps, world, torch_device, steps_done)
    token_bytes = torch.from_numpy(tokenizer.token_byte_lengths())
    prompts = [prompt for prompt in sample_prompts.split("|") if prompt]
    # {step: share of each source from it on}
    new_shares = order.changes(rows_per_step) if len(corpus.names) > 1 else {}
    extra_state = {"warmup_steps": warmup}  # in steps: the setting may be a share
    # DDP divides the sum over the ranks by it. InTree adds up without dividing.
    ddp_divisor = 1 if reproducible else world_size

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        scores = evaluate(model, corpus, token_bytes)
        texts = [sample(model, tokenizer, prompt) for prompt in prompts]
        log.report(steps_done, scores, SHOWN.format_map(scores), map(repr, texts))
        saver.tidy()
    stop_signal.begin()  # from here on a signal waits for the end of a step
    log.restart_clock()
    stopping = False
    for step in range(steps_done + 1, max_steps + 1):
        lr = learning_rate_at(
            step, schedule, learning_rate, min_lr, warmup, max_steps, decay_fraction
        )
        if step in new_shares:
            log.write("stage", step, {"weights": new_shares[step]})
            shares = [f"{100 * share:.1f} % {name}" for name, share in new_shares[step].items()]
            log.print_line(step, [f"training data from here on: {', '.join(shares)}"])

        # forward and backward
        n_targets = batches.count_targets(step - 1)  # of all ranks; Batches counts steps from 0
        # This rank's sum of losses. With reproducible=True an entry for every micro-batch of all
        # ranks, 0 for those of the others: so the log adds them in one order.
        losses = torch.zeros(n_micro_batches if reproducible else 1, device=torch_device)
        ddp.expect_step(opt, lr)  # for overlap_step="backward" only
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, in the last backward
            x, y = batches.next()  # (B, T), (B, T)
            number = world.rank * accum_steps + micro_step  # of this micro-batch in the step
            if reproducible:
                torch.manual_seed(seed + 1_000_003 * step + number)  # dropout depends on no rank
            with autocast(torch_device, torch_dtype):
                # the model returns a sum over tokens; the step's loss is the mean over n_targets
                loss = model(x, y) * (ddp_divisor / n_targets)
            scaler.scale(loss).backward()  # full buckets are sent from inside this call
            losses[number if reproducible else 0] += loss.detach()

        # >>> optimizer step: identical in all trainers (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr, grad_clip, scaler, stop_signal())
        # <<< optimizer step
        log.advance()

        # log
        last = step == max_steps
        stopping = ddp.stopping
        if step % log_every == 0 or last or stopping:
            mean_loss = ranks.all_reduce_sum(losses.clone()).sum().item() / ddp_divisor
            values = {"loss": mean_loss, "tokens": step * tokens_per_step, "lr": lr}
            values |= {"grad_norm": grad_norm.item(), "skipped": int(ddp.skipped[0])}
            values |= corpus.tokens_seen(order, step * rows_per_step)
            log.train(step, values, log.steps_since_line() * tokens_per_step)
            check_finite(step, ddp.skipped, losses.sum(), batches, saver)

        # save, then evaluate: an evaluation may run out of memory
        with log.paused():
            saving = step % save_every == 0 or last
            evaluating = (step % eval_every == 0 or last) and not stopping
            if saving or evaluating:
                ddp.flush()  # apply the updates that wait for the next forward
            if saving:
                saver.save(step, model, ddp, opt, scaler, extra_state)
            if evaluating:
                scores = evaluate(model, corpus, token_bytes)
                texts = [sample(model, tokenizer, prompt) for prompt in prompts]
                stopping = ranks.any_rank(stop_signal())
                if not stopping:  # else it was left early: a resumed run does it again
                    log.report(step, scores, SHOWN.format_map(scores), map(repr, texts))
                    saver.tidy()  # point best and best2, remove old steps
        if stopping:
            break

    # ---- the end
    batches.close()
    if stopping and not saving:
        ddp.flush()
        saver.save(step, model, ddp, opt, scaler, extra_state)
    saver.close()
    log.finish(__file__, config, corpus, stopping, saver.saved)
    ranks.close()
    sys.exit(stop_signal.exit_code if stopping else int(not saver.saved))
