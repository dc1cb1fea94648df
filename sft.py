"""Instruction tuning: conversations, of which the model learns the assistant's part.

python sft.py config/debug_sft.py                                                  # CPU, seconds, needs nothing
python sft.py config/sft.py --init_from=out/demo --data=chat.jsonl                 # all weights
torchrun --standalone --nproc_per_node=4 sft.py config/lora.py --init_from=DIR --data='a.jsonl=0.5,b.jsonl=0.5'

It begins with a checkpoint of pretrain.py or any Hugging Face directory of Llama, Mistral, Qwen2 or Qwen3. A row is
block_size tokens of one or more whole conversations, which do not see each other; the loss is that of the assistants'
words and their <|im_end|>, over their number in the whole step.
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C is one line from here on
    from groundup.errors import end_in_one_line

    end_in_one_line()

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from configurator import configure
from groundup.demo import debug_data
from groundup.generate.completion import never_sampled
from groundup.generate.engine import generate
from groundup.generate.sampling import SamplingParams
from groundup.tokens.batches import Batches
from groundup.tokens.conversations import Batch, ChatCorpus
from groundup.tokens.corpus import steps_of
from groundup.train import plan as memory_plan
from groundup.train import ranks, run
from groundup.train.base import adapters_of, frozen_base, load_start, new_model, open_base
from groundup.train.device import autocast, peak_flops, seed_everything
from groundup.train.fsdp import in_step
from groundup.train.log import RunLog
from groundup.train.lora import lora_config_of, set_trainable
from groundup.train.optim import learning_rate_at
from groundup.train.plan import flops_per_token
from groundup.train.settings import *  # noqa: F403
from groundup.train.signals import StopSignal
from model import Transformer, cross_entropy, token_scores
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/sft"  # run directory: config.py, log.jsonl, step_*/
init_from = "out/pretrain"  # run, checkpoint or Hugging Face directory; "" = a tiny new model, to try it
data = "data/chat"  # conversations: files, a directory of prepare.py --kind=chat; mixed 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # likewise, for validation; "" = the directory's own, or val_fraction of the conversations
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
val_fraction = 0.02  # of the conversations, by their content; for data that have no validation of their own
lora_dropout = 0.0  # on the input of the adapters
dropout = 0.0
neftune_alpha = 0.0  # noise on the embeddings in training, 5 is usual (arXiv:2310.05914)
# data
block_size = 1024  # tokens per row; a longer conversation is cut after its last answer that fits
pack = True  # several conversations per row; False = one, padded to the longest of the micro-batch
loss_weights = ""  # what a label of a source counts, 'a.jsonl=0.5,data/b=1'; "" = 1
epochs = 3.0  # passes over the rows of all sources
max_steps = 0  # 0 = as many as epochs takes
max_epochs = ""  # most epochs of each source, or 'data/a=2,data/b=8'; a source used up leaves its share to the others
# batch
batch_size = 8  # rows per rank and micro-step
total_batch_tokens = 0  # batch_size x block_size x micro-steps x ranks; 0 = one micro-step on each rank
# optimizer
learning_rate = 2e-5  # peak; give adapters ten times as much: 2e-4
# evaluation, log, checkpoints
eval_steps = 50  # batches of batch_size rows, over all ranks; 0 = all of the validation conversations
eval_answers = 16  # validation questions that are answered greedily, for the share of answers that end by themselves
eval_new_tokens = 128  # most tokens of such an answer
sample_prompts = ""  # questions whose answers are printed at each evaluation; several separated by |

# These decide which conversations a step sees; a resumed run must not change them.
DATA_KEYS = ("seed", "block_size", "total_batch_tokens", "pack", "val_fraction", "max_epochs")
DEBUG_DATA = "data/debug/chat.jsonl"  # made by the script, to try it without anything prepared


def check_config(config: dict, world_size: int) -> int:
    """Return the tokens per step over all ranks. Raise UserError; nothing exists yet when it does."""
    run.check_config(config, {"neftune_alpha": 0, "eval_answers": 0, "eval_new_tokens": 1})
    return run.count_per_step(config, "total_batch_tokens", block_size=config["block_size"], world_size=world_size)


def label_states(model: Transformer, batch: Batch, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the hidden states at the positions that have a label, (n, C); the others need no logits."""
    with autocast(device, dtype):
        return model(batch.x, documents=batch.documents, index=batch.index)


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Mapping[str, Iterable[Batch]], batch_size: int, shares: list[float],
    token_bytes: torch.Tensor, device: torch.device, dtype: torch.dtype,
) -> dict[str, float]:  # fmt: skip
    """Return over validation conversations, which the ranks divide: loss in nats per label, accuracy of the likeliest
    token, bits per byte of the answers. With several sources: of each, and of a mixture with these shares."""
    model.eval()
    sums = torch.zeros(len(batches), 4, dtype=torch.float64)  # nats, labels, right ones, bytes
    for source, of_source in enumerate(batches.values()):
        for batch in in_step(model, of_source):
            n_labels, n_bytes = len(batch.targets), token_bytes[batch.targets].sum().item()
            batch = batch.to(device).even(batch_size)
            hidden = label_states(model, batch, device, dtype)
            nats, right = token_scores(hidden, model.lm_head.weight, batch.targets)
            counts = [nats.double().sum().item(), n_labels, right.sum().item(), n_bytes]
            sums[source] += torch.tensor(counts, dtype=torch.float64)
    ranks.all_reduce_sum(sums)
    model.train()
    mixed = (torch.tensor(shares, dtype=torch.float64)[:, None] * sums / sums[:, 1:2].clamp(min=1)).sum(0)
    of = {"": mixed} | ({f"/{name}": sums[k] for k, name in enumerate(batches)} if len(batches) > 1 else {})
    scores = {f"val_loss{name}": (nats / labels).item() for name, (nats, labels, _, _) in of.items()}
    scores |= {f"val_bpb{name}": (nats / math.log(2) / n_bytes).item() for name, (nats, _, _, n_bytes) in of.items()}
    return scores | {f"mean_token_accuracy{name}": (right / n).item() for name, (_, n, right, _) in of.items()}


def answer(
    model: Transformer, tokenizer: Tokenizer, prompts: list[list[int]], max_new_tokens: int
) -> list[tuple[str, bool]]:
    """Return the greedy answer to each prompt, and whether it ends by itself."""
    banned = never_sampled(tokenizer, model.cfg.vocab_size)
    params = SamplingParams(max_new_tokens, temperature=0.0, eos_ids=tokenizer.stop_ids, banned_ids=banned)
    copies = lora_config_of(model) is None  # beside adapters a frozen base is most of the memory
    results = generate(model, tokenizer, prompts, params, batch_size=16, copies=copies) if prompts else []
    return [(result.completions[0].text, result.completions[0].finish_reason == "stop") for result in results]


if __name__ == "__main__":
    config = configure(globals())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    tokens_per_step = config["total_batch_tokens"] = check_config(config, world_size)
    rows_per_step = tokens_per_step // block_size
    torch_device, torch_dtype = run.choose_device_and_dtype(config)
    peak = peak_tflops * 1e12 or peak_flops(torch_device, torch_dtype)

    # ---- weights, tokenizer, conversations: mistakes show here, before a process group or out_dir exists
    if data == DEBUG_DATA:
        debug_data.make_debug_rows(Path(data), lambda talks: [{"messages": talk} for talk in talks])
    source, tokenizer, n_known, cfg = open_base(config, DEBUG_DATA)
    flops = flops_per_token(cfg, block_size, trainable=trainable)
    corpus = ChatCorpus(data, tokenizer, block_size, pack, seed, val_data, val_fraction, loss_weights)
    corpus.need_validation(val_fraction)
    given = dict(config)  # out_dir/config.py keeps max_steps=0
    n_rows, lost = corpus.n_rows, corpus.left_out()
    max_steps = config["max_steps"] = steps_of(config, n_rows, rows_per_step, "total_batch_tokens", "rows", lost)
    mixture = corpus.order(seed, rows_per_step, max_steps, max_epochs)
    order = {key: config[key] for key in DATA_KEYS} | corpus.record()
    if rank == 0:
        passes, warnings = corpus.describe(mixture, max_steps * rows_per_step)
        batch = f"{rows_per_step} rows of {block_size} tokens per step, {max_steps:,} steps, {passes}"
        size = cfg, config, batch, tokens_per_step * max_steps, world_size, torch_device, torch_dtype, peak, pack
        print("\n".join([*corpus.report(), memory_plan.describe(*size), *warnings]), flush=True)
    if plan_only:
        sys.exit(0)
    resumed = run.find_checkpoint(config, cfg, order)

    # ---- processes, model, optimizer, state
    stop_signal = StopSignal()
    world = run.join(config, order, resumed.step, torch_device, torch_dtype)
    accum_steps = rows_per_step // (batch_size * world_size)
    seed_everything(seed)
    raw_model = new_model(Transformer, cfg, config, torch_dtype)
    if source and not resumed.path:
        load_start(raw_model, source, n_known, tokenizer)
    set_trainable(raw_model, trainable, adapters_of(config))
    raw_model.neftune_alpha, raw_model.most_documents = neftune_alpha, corpus.most_documents()
    base = frozen_base(resumed.path, source)
    parts = run.set_up(config, raw_model, world, torch_device, torch_dtype, lengths_vary=not pack)
    model, opt, scaler, ddp = raw_model, parts.opt, parts.scaler, parts.ddp  # compiled in place: the same object
    skipped = run.start(parts, resumed, given, __file__)
    batches = Batches(
        corpus.train, mixture, block_size, batch_size, accum_steps, world.rank, world_size, torch_device, resumed.step,
        load=corpus.load, valid=corpus.label_weight,
    )  # fmt: skip
    val = partial(corpus.val_batches, batch_size, eval_steps, world.rank, world_size)
    shares = corpus.val_shares()
    questions = [ids for ids, _ in corpus.prompts(eval_answers)]
    shown = [text for text in sample_prompts.split("|") if text]
    token_bytes = torch.from_numpy(tokenizer.token_byte_lengths())
    log = RunLog(out_dir, max_steps, resumed.step, world.is_main, tensorboard)
    save = partial(run.save, parts, tokenizer=tokenizer, config=config, order=order, base=base, log=log)

    def evaluate_now(step: int) -> None:
        """Log all scores and rank the checkpoint of this step by its validation loss."""
        scores = evaluate(model, val(), batch_size, shares, token_bytes, torch_device, torch_dtype)
        mine = answer(model, tokenizer, questions[world.rank :: world_size], eval_new_tokens)
        ended = ranks.all_reduce_sum(torch.tensor([sum(end for _, end in mine), len(mine)], dtype=torch.float64))
        scores["self_stop"] = (ended[0] / ended[1]).item()  # the fraction that ends by itself; nan without questions
        asked = [tokenizer.render([{"role": "user", "content": text}], add_generation_prompt=True)[0] for text in shown]
        answers = answer(model, tokenizer, asked, eval_new_tokens)
        line = [f"val loss {scores['val_loss']:.4f}", f"{scores['val_bpb']:.4f} bits per byte"]
        line += [f"accuracy {100 * scores['mean_token_accuracy']:.1f}%"]
        line += [f"ends by itself {100 * scores['self_stop']:.0f}%"] if math.isfinite(scores["self_stop"]) else []
        names = [key.partition("/")[2] for key in scores if key.startswith("val_loss/")]
        line += [f"{name} {scores[f'val_loss/{name}']:.4f}" for name in names]
        replies = [f"    {text!r} -> {said!r}" for text, (said, _) in zip(shown, answers, strict=True)]
        log.report(step, scores, line, replies)
        run.rank(parts, step, scores["val_loss"], config, log)

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        evaluate_now(resumed.step)
    stop_signal.begin()
    warmup, stopping = run.warmup_of(config), False
    mark_time, mark_step = time.perf_counter(), resumed.step
    seen = torch.zeros(2, dtype=torch.float64)  # positions and labels of this rank since the last log line
    for step in range(resumed.step + 1, max_steps + 1):
        lr = learning_rate_at(step, schedule, learning_rate, min_lr, warmup, decay_steps or max_steps, decay_fraction)
        n_targets = batches.valid_tokens(step - 1)  # labels by their weights, over all micro-steps and ranks
        loss_sum = torch.zeros((), device=torch_device)
        ddp.expect_step(opt, lr)
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, during the last backward
            batch = batches.next()
            n_labels, batch = len(batch.targets), batch.even()
            hidden = label_states(model, batch, torch_device, torch_dtype)
            with autocast(torch_device, torch_dtype):
                loss, _ = cross_entropy(hidden, model.lm_head.weight, batch.targets, batch.weights)
            loss = loss * (world_size / max(n_targets, 1e-6))  # the loss is a sum; ddp averages over ranks
            scaler.scale(loss).backward()  # full buckets start their all-reduce inside this call
            loss_sum += loss.detach()
            seen += torch.tensor([batch.x.numel(), n_labels])
        # >>> optimizer step: identical in pretrain, sft, dpo, reward, rl (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr=lr, clip=grad_clip, scaler=scaler)
        skipped = torch.stack((skipped[0] + ddp.found_inf, (skipped[1] + 1) * ddp.found_inf))
        # <<< optimizer step
        log.advance()

        last, stopping = step == max_steps, ranks.any_rank(stop_signal.received > 0)
        if step % log_every == 0 or last or stopping:
            mean_loss = ranks.all_reduce_sum(loss_sum.clone()).item() / world_size  # waits for the device, so that
            seconds = time.perf_counter() - mark_time  # this clock is true
            tokens_per_s, labels_per_s = (ranks.all_reduce_sum(seen) / seconds).tolist()
            values = {"loss": mean_loss, "tokens": step * tokens_per_step, "labels_per_s": labels_per_s}
            values |= run.figures(parts, lr, grad_norm, skipped, tokens_per_s, flops, peak)
            values |= {"epoch": float(mixture.epochs(step * rows_per_step).max())}
            log.train(step, values | corpus.tokens_seen(mixture, step * rows_per_step), seconds / (step - mark_step))
            if skipped[1] >= max_skipped:
                run.stop_not_finite(parts, log, step, int(skipped[1]), loss_sum, batches)
            mark_time, mark_step = time.perf_counter(), step
            seen.zero_()
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

    run.finish(parts, log, config, __file__, corpus.report(), stop_signal if stopping else None, batches)
