"""Supervised fine-tuning: the model learns the assistant's part of conversations.

python sft.py config/debug_sft.py                                    # CPU, seconds, own data
python sft.py config/sft.py --init_from=out/demo --data=chat.jsonl   # 1 GPU, all weights
torchrun --standalone --nproc_per_node=4 sft.py config/lora.py --init_from=DIR --data=chat.jsonl

It starts from a checkpoint of pretrain.py or from any Hugging Face directory of Llama, Mistral,
Qwen2 or Qwen3. A row holds block_size tokens of one or more whole conversations, and attention
stays within each of them. The loss is the mean over all labels of a step: the assistant's words and
the token that ends its turn.
"""

if __name__ == "__main__":  # before the slow imports: from here on Ctrl-C prints one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import math
import sys

import torch
from torch import Tensor

from configurator import configure, defaults_of
from ddp import DDP, check_options
from groundup.errors import UserError, counted, refuse
from groundup.generate.completion import generate, never_sampled
from groundup.generate.sampling import SamplingParams
from groundup.kernels.cross_entropy import compile_loss, cross_entropy, token_scores
from groundup.kernels.distillation import Distillation, distill
from groundup.tokens.batches import Batches
from groundup.tokens.conversations import Batch, ChatCorpus
from groundup.tokens.rows import paths_of, steps_of
from groundup.train import checkpoint, fsdp, huggingface, plan, ranks
from groundup.train.checkpoint import Saver
from groundup.train.device import autocast, check_compiler, choose_device, choose_dtype, peak_flops
from groundup.train.log import RunLog, check_finite, sums_by_source
from groundup.train.lora import LoRAConfig, lora_config_of, set_trainable
from groundup.train.optim import Optimizer, check_schedule, learning_rate_at
from groundup.train.powersgd import make_hook
from groundup.train.start import open_start, weights_to_load
from model import Transformer
from tokenizer import Tokenizer

# ---- settings: override with a config file or --key=value; see --help ----------------------------
# The comments are checked: a value must be one of `a | b`, `at least n`, or `from a to b`.
out_dir = "out/sft"  # run directory: config.py, log.jsonl, step_*/
init_from = "out/pretrain"  # a run, a checkpoint or a Hugging Face directory
data = "data/chat"  # conversations: a file, or a directory of prepare.py; 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # the same for validation; "" = the directory's own, or val_fraction of the rows
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
val_fraction = 0.02  # of rows without validation data of their own (from 0 to 1)
resume = "auto"  # auto = continue if out_dir has a checkpoint | must | never
resume_from = 0  # step of out_dir to continue from; 0 = its newest checkpoint (at least 0)
overwrite = False  # delete: with resume='never' the old run, with resume_from the steps after it
seed = 1337  # of new weights, data order, dropout and samples
# which parameters are trained
trainable = "all"  # all, or some of embed, lm_head, lora, regular expressions of names
lora_rank = 16  # rank of the LoRA matrices (at least 1)
lora_alpha = 32.0  # an adapter's output is multiplied by lora_alpha / lora_rank
dropout = 0.0  # from 0 to 1
# data
block_size = 1024  # tokens per row; longer conversations are cut after an answer (at least 1)
pack = "auto"  # auto | yes | no (conversations share rows, or are padded; auto: yes unless few)
epochs = 0.0  # passes over all rows, if max_steps is 0; 0 = 3, of few rows more (from 0 to 1000)
max_steps = 0  # 0 = as many as epochs takes (at least 0)
max_epochs = ""  # most epochs of each source: '4' or 'data/a=2,data/b=8'
# distillation: learn from a larger model's distributions too (docs/distillation.md)
teacher = ""  # learn from this model too: a run, a checkpoint or a Hugging Face directory
distill_weight = 0.5  # of the divergence from the teacher; the labels have the rest (from 0 to 1)
distill_beta = 0.0  # 0 = forward KL, 1 = reverse KL, between = Jensen-Shannon (from 0 to 1)
distill_temperature = 1.0  # divides the logits of both (from 0.01 to 100)
# batch
batch_size = 8  # rows per rank and micro-step (at least 1)
total_batch_tokens = 0  # per step, over all ranks; 0 = one micro-step on each (at least 0)
# optimizer
optimizer = "adamw"  # adamw | muon (for the blocks' matrices; AdamW for the rest)
learning_rate = 2e-5  # peak; LoRA needs about ten times as much: 2e-4 (at least 0)
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
eval_answers = 16  # validation questions to answer: do answers stop on their own? (at least 0)
eval_new_tokens = 128  # most tokens of such an answer (at least 1)
sample_prompts = ""  # questions that are answered at each evaluation; several separated by |
log_every = 10  # steps (at least 1)
track = "none"  # none | tensorboard | trackio | wandb (offline; also what log.jsonl has)
save_every = 500  # steps; also after the last step (at least 1)
keep_last = 2  # newest checkpoints to keep besides the two best; 0 = all (at least 0)


def hidden_at_labels(model: Transformer, batch: Batch) -> Tensor:
    """Return the hidden states (n, C) of the positions that have a label.

    The others, which are questions and padding, need no logits."""
    return model(batch.x, documents=batch.documents, index=batch.index)


@torch.no_grad()
def evaluate(model: Transformer, corpus: ChatCorpus, token_bytes: Tensor) -> dict[str, float]:
    """Return the validation loss in nats per label, the bits per byte of the assistant's text, and
    the accuracy: how often the likeliest token is the label.

    With several sources: of each, and their average weighted by the sources' shares. {} if a signal
    to stop came meanwhile."""
    model.eval()
    names = ("nats", "labels", "correct", "bytes")
    sums = {name: torch.zeros(len(corpus.val), dtype=torch.float64) for name in names}
    val_batches = corpus.val_batches(batch_size, eval_steps, ranks.rank(), ranks.world_size())
    for k, batches in enumerate(val_batches.values()):
        for batch in fsdp.same_forwards(model, batches, stop_signal):
            sums["labels"][k] += len(batch.targets)
            sums["bytes"][k] += token_bytes[batch.targets].sum().item()
            batch = batch.to(torch_device)
            batch = batch.even(batch_size)  # pad the last batch: a new shape recompiles
            with autocast(torch_device, torch_dtype):
                hidden = hidden_at_labels(model, batch)
                nats, correct = token_scores(hidden, model.lm_head.weight, batch.targets)
            sums["nats"][k] += nats.cpu().double().sum()
            sums["correct"][k] += correct.sum().item()
    model.train()
    if ranks.any_rank(stop_signal()):
        return {}
    scores = {}
    for end, row in sums_by_source(sums, "labels", corpus).items():
        scores[f"val_loss{end}"] = (row["nats"] / row["labels"]).item()
        scores[f"val_bpb{end}"] = (row["nats"] / math.log(2) / row["bytes"]).item()
        scores[f"mean_token_accuracy{end}"] = (row["correct"] / row["labels"]).item()
    return scores


def answer(
    model: Transformer, tokenizer: Tokenizer, prompts: list[list[int]]
) -> list[tuple[str, bool]]:
    """Return the greedy answer to each prompt (token ids), and whether it stops on its own.

    Without words if a signal to stop comes."""
    if not prompts:
        return []
    params = SamplingParams(
        eval_new_tokens,
        temperature=0.0,
        eos_ids=tokenizer.stop_ids,
        banned_ids=never_sampled(tokenizer, model.cfg.vocab_size),
    )
    # The engine's copy of the matrices is faster, but with LoRA the frozen ones fill the memory.
    copies = lora_config_of(model) is None
    results = generate(
        model, tokenizer, prompts, params, batch_size=16, copies=copies, stop=stop_signal
    )
    if not results:
        return [("", False)] * len(prompts)
    completions = [result.completions[0] for result in results]
    return [(completion.text, completion.finish_reason == "stop") for completion in completions]


def share_that_stops(model: Transformer, tokenizer: Tokenizer, questions: list[list[int]]) -> float:
    """Return the share of answers that stop on their own; nan without questions. All ranks call it.

    Each rank answers a part of the questions (token ids)."""
    mine = [questions[i] for i in ranks.own_part(len(questions))]
    stops = [stop for _, stop in answer(model, tokenizer, mine)]
    counts = torch.tensor([sum(stops), len(stops)], dtype=torch.float64)
    n_stopped, n_answers = ranks.all_reduce_sum(counts)
    return (n_stopped / n_answers).item()


def sample(model: Transformer, tokenizer: Tokenizer, prompts: list[str]) -> list[str]:
    """Return a line for each question: the question and the model's greedy answer."""
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    ids = [tokenizer.render(talk, add_generation_prompt=True)[0] for talk in talks]
    answers = [text for text, _ in answer(model, tokenizer, ids)]
    return [f"{prompt!r} -> {text!r}" for prompt, text in zip(prompts, answers, strict=True)]


def report(log: RunLog, step: int, scores: dict[str, float], samples: list[str]) -> None:
    """Write an evaluation to the log."""
    shown = "val loss {val_loss:.4f} | {val_bpb:.4f} bits per byte | "
    shown += "accuracy {mean_token_accuracy:.1%}"
    if math.isfinite(scores["self_stop"]):
        shown += " | stops on its own {self_stop:.0%}"
    log.report(step, scores, shown.format_map(scores), samples)


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

    # ---- the checkpoint to start from; n_known: token ids that its weights were trained with
    init_dir, tokenizer, n_known, model_config = open_start(config, *paths_of(data))
    if teacher:
        teacher_dir = checkpoint.resolve(teacher, "teacher")
        huggingface.check_teacher(teacher_dir, tokenizer, block_size)
    for key, usual in defaults_of(__file__).items():
        if key.startswith("distill_") and config[key] != usual and not teacher:
            raise UserError(f"config: {key}={config[key]} needs a teacher")

    # ---- data
    share_rows = {"auto": None, "yes": True, "no": False}[pack]
    share = {"pack": share_rows, "context": model_config.block_size}
    corpus = ChatCorpus(data, tokenizer, block_size, seed, val_data, val_fraction, **share)
    corpus.need_validation(val_fraction)
    settings = config | {"total_batch_tokens": tokens_per_step, "world_size": world_size}
    settings["epochs"] = epochs or corpus.usual_epochs(max_epochs)
    lost = corpus.left_out()  # for the error message
    max_steps = steps_of(settings, corpus.n_rows, rows_per_step, "total_batch_tokens", lost=lost)
    check_schedule(config, max_steps)
    order = corpus.order(seed, rows_per_step, max_steps, max_epochs)
    epochs_of_each, warnings = corpus.describe(order, max_steps * rows_per_step)
    warnings += corpus.chosen_for_few(config, max_steps * rows_per_step / corpus.n_rows)
    most = "" if corpus.pack else "at most "
    batch_line = f"{counted(rows_per_step, 'row')} of {most}{block_size} tokens per step, "
    batch_line += f"{counted(max_steps, 'step')}, {epochs_of_each}"

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
        settings = config | {"max_steps": max_steps}
        n_tokens = corpus.tokens_seen(order, max_steps * rows_per_step)["tokens"]
        held = {"teacher": plan.teacher_bytes(teacher_dir, torch_dtype)} if teacher else {}
        text = plan.describe(
            model, settings, batch_line, n_tokens, world_size, torch_device, torch_dtype, peak, held
        )
        warnings += plan.rate_warning(model, learning_rate)
        print(text, *warnings, sep="\n", flush=True)
    if plan_only:
        sys.exit(0)

    # ---- the checkpoint to continue, or the weights to start from
    data_record = {"seed": seed, "block_size": block_size, "total_batch_tokens": tokens_per_step}
    data_record |= {"pack": corpus.pack, "val_fraction": val_fraction, "max_epochs": max_epochs}
    data_record |= corpus.record()
    if teacher:
        data_record |= {"teacher_weights": huggingface.shared_fingerprint(teacher_dir)}
        data_record |= {key: config[key] for key in config if key.startswith("distill_")}
    ranks.check_equal(config | data_record | {"dtype": str(torch_dtype)})
    # None and {"step": 0} for a new run. load_resumed() loads the weights, restore() the rest.
    resume_dir, state = checkpoint.find(config, model_config, data_record, max_steps)
    warmup = checkpoint.warmup_of(config, max_steps, state)  # steps
    # rank 0 reads the weights, DDP sends them to the others; with FSDP each reads its rows
    if resume_dir:
        huggingface.load_resumed(model, resume_dir)
    else:
        huggingface.load_start(model, init_dir, n_known, tokenizer)
    base_dir = huggingface.frozen_base(model, init_dir, resume_dir)  # of adapters

    # ---- the teacher: frozen, on every rank
    if teacher:
        guide = huggingface.load_model(teacher_dir, torch_device, block_size, torch_dtype)
        guide.requires_grad_(False).eval()
        guide.most_documents = corpus.most_documents()
        distillation = Distillation(distill_weight, distill_beta, distill_temperature)

    # ---- device, compile, data parallel, optimizer
    plan.check_arithmetic(torch_device, torch_dtype)  # mps may be wrong: compare with the CPU
    model.to(torch_device)
    model.activation_checkpointing = activation_checkpointing
    model.most_documents = corpus.most_documents()
    if compile:
        check_compiler(torch_device)
        compile_loss(torch_device)
        # Block by block, so that a block's gradients are ready, and sent, when its backward ends.
        for part in (*model.layers, model.norm):
            part.forward = torch.compile(part.forward)
        for part in (*guide.layers, guide.norm) if teacher else ():
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

    # ---- restore, and make the run directory
    checkpoint.restore(resume_dir, state, model, ddp, opt, scaler, seed)
    steps_done = state["step"]  # 0 for a new run
    config = checkpoint.make_run_dir(config, __file__, state, max_steps)
    flops = plan.flops_per_token(model, block_size)
    log = RunLog(out_dir, max_steps, steps_done, world, track, flops, peak, torch_device)
    log.note_changes(state)
    saver = Saver(out_dir, keep_last, tokenizer, log, config, data_record, base_dir)
    batches = Batches(corpus, order, batch_size, accum_steps, world, torch_device, steps_done)
    token_bytes = torch.from_numpy(tokenizer.token_byte_lengths())
    questions = [ids for ids, _ in corpus.prompts(eval_answers)]
    prompts = [prompt for prompt in sample_prompts.split("|") if prompt]
    extra_state = {"warmup_steps": warmup}  # part of each checkpoint

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        scores = evaluate(model, corpus, token_bytes)
        scores["self_stop"] = share_that_stops(model, tokenizer, questions)
        report(log, steps_done, scores, sample(model, tokenizer, prompts))
        saver.tidy()
    stop_signal.begin()  # from here on a signal waits for the end of a step
    log.restart_clock()
    stopping = False
    n_tokens = n_labels = 0  # of all ranks since the last log line, without padding
    for step in range(steps_done + 1, max_steps + 1):
        lr = learning_rate_at(step, schedule, learning_rate, min_lr, warmup, max_steps)

        # forward and backward
        n_targets = batches.count_targets(step - 1)  # of the step, on all ranks
        n_labels += n_targets
        n_tokens += batches.count_tokens(step - 1)
        loss_sum = torch.zeros((), device=torch_device)
        divergence_sum = torch.zeros((), device=torch_device)  # from the teacher
        ddp.expect_step(opt, lr)  # for overlap_step="backward" only
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, in the last backward
            batch = batches.next().even()
            with autocast(torch_device, torch_dtype):
                hidden, head = (
                    hidden_at_labels(model, batch),
                    model.lm_head.weight,
                )  # (n, C), (V, C)
                if teacher:
                    with torch.no_grad():
                        guided = hidden_at_labels(guide, batch)
                    loss, _, kl = distill(
                        hidden, head, batch.targets, guided, guide.lm_head.weight, distillation
                    )
                    divergence_sum += kl.sum()
                else:
                    loss, _ = cross_entropy(hidden, head, batch.targets)
                # the loss is a sum; ddp averages over the ranks
                loss = loss * (world_size / n_targets)
            scaler.scale(loss).backward()  # full buckets are sent from inside this call
            loss_sum += loss.detach()

        # >>> optimizer step: identical in all trainers (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr, grad_clip, scaler, stop_signal())
        # <<< optimizer step
        log.advance()

        # log
        last = step == max_steps
        stopping = ddp.stopping
        if step % log_every == 0 or last or stopping:
            mean_loss = ranks.all_reduce_sum(loss_sum.clone()).item() / world_size
            values = {"loss": mean_loss} | corpus.tokens_seen(order, step * rows_per_step)
            # .item() has waited for the device, so the time is real
            values |= {"labels_per_s": n_labels / log.seconds(), "lr": lr}
            values |= {"grad_norm": grad_norm.item(), "skipped": int(ddp.skipped[0])}
            if teacher:
                kl = ranks.all_reduce_sum(divergence_sum).item() / n_targets
                values |= {"kl_teacher": kl}  # nats per label
            values |= {"epoch": float(order.epochs(step * rows_per_step).max())}
            log.train(step, values, n_tokens)
            n_tokens = n_labels = 0
            check_finite(step, ddp.skipped, loss_sum, batches, saver)

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
                if scores:  # else a signal came, on this rank or another
                    scores["self_stop"] = share_that_stops(model, tokenizer, questions)
                texts = sample(model, tokenizer, prompts)
                stopping = ranks.any_rank(stop_signal())
                if not stopping:  # else it was left early: a resumed run does it again
                    report(log, step, scores, texts)
                    saver.tidy()
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
