"""Text from a model: a continuation, a chat in the terminal, or the answers to a file of prompts.

python sample.py                                    # the newest run: a chat if it is tuned for one
python sample.py --init_from=out/demo --prompt="def main" --n=3 --temperature=0.7 --top_p=0.9
python sample.py --prompts=questions.jsonl --out=answers.jsonl  # again: goes on where it ended
python sample.py --prompt="What is a list?" --best_of=8 --best_of_by=reward --reward_from=out/reward

In a chat a prompt is a user's message; without one the conversation is in the terminal
(groundup/generate/chat.py). Files of prompts and answers are described in
groundup/generate/answers.py. An answer depends on the prompt, the parameters and the seed, not on
other prompts or the batch size (but for near ties in bfloat16 and float16, see
groundup/generate/engine.py).
"""

if __name__ == "__main__":  # before the slow imports: Ctrl-C is then one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import dataclasses
import os
import re
import stat
import sys
from functools import partial
from pathlib import Path

import torch

from configurator import configure
from groundup.align import reward_model
from groundup.align.best_of import Ranker
from groundup.errors import UserError, counted, say
from groundup.generate.answers import Answers, Rank, context_ended, context_ended_words
from groundup.generate.beam import BeamParams, BeamSearch
from groundup.generate.chat import Chat, converse, show
from groundup.generate.completion import is_tuned, never_sampled, prompt_ids, untuned
from groundup.generate.decode import for_inference, to_int8
from groundup.generate.engine import Engine
from groundup.generate.kv_cache import cache_bytes
from groundup.generate.sampling import SamplingParams
from groundup.generate.tools import ToolAnswers, Tools, check_template
from groundup.tokens.templates import opened_thoughts
from groundup.train import checkpoint, huggingface
from groundup.train.device import autocast, choose_device, choose_dtype
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help ------------------------------
init_from = ""  # run, checkpoint or Hugging Face directory; empty = the newest run under out/
prompt = ""  # text to continue or question to answer; empty = a new document or a chat
prompts = ""  # file of prompts: .txt has one per line; else "text", {"prompt": ...} or any row
out = ""  # file of the answers as JSON lines; "" = print them beside the expected ones
chat = "auto"  # auto (yes if tuned for it) | yes (prompts are user messages) | no (continue them)
system = ""  # system message of every chat that has none
tools = ""  # Python file of functions that the answers of a chat may call; see docs/tools.md
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
n = 1  # samples of each prompt
best_of = 0  # samples generated, of which the n best are kept; 0 = n
best_of_by = "sum"  # sum | mean | reward: rank by log-probabilities, or by reward_from
reward_from = ""  # run, checkpoint or directory of a reward model, for best_of_by=reward
presence_penalty = 0.0  # subtracted from the logits of tokens in the output
frequency_penalty = 0.0  # subtracted for each time that a token is in the output
repetition_penalty = 1.0  # divide logits of tokens in prompt or output (multiply if < 0); 1 = off
temperature = 0.8  # 0 = greedy, 1 = the model's own distribution
top_k = -1  # only the k likeliest tokens; -1 or 0 = off
top_p = 0.95  # only the likeliest tokens that together have this probability; 1 = off
min_p = 0.0  # only tokens at least this times as likely as the likeliest; 0 = off
max_new_tokens = 256  # per sample; the end of the context ends it earlier
min_new_tokens = 0  # no end before this many
stop = ""  # texts that end a sample, separated by |; \n, \t, \| and \\ are one character each
stop_token_ids = ""  # further ids that end a sample, comma-separated
ignore_eos = False  # go on after the end of a text or a turn
num_beams = 1  # > 1: beam search, with temperature 0; gives its n best
length_penalty = 1.0  # beam search: divide scores by length to this power; > 0 favours long ones
early_stopping = "false"  # false (better unlikely) | true (num_beams results) | never: beam search
logprobs = -1  # k >= 0: log-probabilities of each token and of the k likeliest, as JSON; -1 = off
prompt_logprobs = -1  # the same for the tokens of the prompt
skip_special_tokens = True  # leave the names of special tokens out of the text
seed = 1337  # sample i of a prompt draws from a hash of seed, prompt and i
batch_size = 16  # samples generated together; at least 1
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16
weights = "full"  # full | int8 (matrices rounded to 8 bits: faster on a CPU)
compile = False  # compile decoding on a GPU: 20 seconds, worth it from some thousand tokens on

# Keys that do not decide the answers, or that deciding_settings records in another form.
FREE_KEYS = set(
    "init_from prompt prompts out chat reward_from batch_size device dtype compile".split()
)


def sampling_params(config: dict, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    """Return the parameters among the settings, with the tokenizer's end tokens. If a reward
    model is to rank the samples, ask for all that are drawn."""
    by_reward = config["best_of_by"] == "reward"
    kind = BeamParams if config["num_beams"] != 1 else SamplingParams
    keys = [field.name for field in dataclasses.fields(kind) if field.name in config]
    values = {key: config[key] for key in keys} | {
        "best_of_by": "sum" if by_reward else config["best_of_by"],
        "stop": stop_texts(config["stop"]),
        "stop_token_ids": frozenset(map(int, re.findall(r"[0-9]{1,18}", config["stop_token_ids"]))),
        "eos_ids": tokenizer.stop_ids,
        "banned_ids": never_sampled(tokenizer, vocab_size),
    }
    params = kind(**values)
    return dataclasses.replace(params, n=params.n_samples, best_of=0) if by_reward else params


def stop_texts(value: str) -> tuple[str, ...]:
    r"""r'\nUser:|a\|b' -> (newline + 'User:', 'a|b')."""
    characters = {r"\n": "\n", r"\t": "\t", r"\|": "|", r"\\": "\\"}
    parts = re.findall(r"(?:\\.|[^|])+", value, re.DOTALL)
    return tuple(re.sub(r"\\[nt|\\]", lambda match: characters[match[0]], part) for part in parts)


def choose_chat(value: str, directory: Path, tokenizer: Tokenizer) -> bool:
    """Return whether prompts are user messages."""
    able = tokenizer.turn_end_id >= 0
    if value == "yes" and not able:
        what = f"the tokenizer of {directory} has no chat template and no <|im_end|>"
        raise UserError(f"sample: chat=yes, but {what}")
    return able and (value == "yes" or value == "auto" and is_tuned(directory, tokenizer))


def check_settings(config: dict, talk: bool, as_json: bool) -> None:
    """Raise UserError if the settings contradict each other."""
    by, source = config["best_of_by"], config["reward_from"]
    K, ids, has_file = config["num_beams"], config["stop_token_ids"], config["prompts"]
    several = config["best_of"] or config["n"] > 1 or K > 1 or source
    in_terminal = talk and not config["prompt"] and not has_file
    for_beams = (config["length_penalty"], config["early_stopping"]) != (1, "false")
    in_chat = "give --chat=yes"
    one_answer = (
        "tools need one answer to a prompt; leave out n, best_of, num_beams and reward_from"
    )
    not_ids = f"stop_token_ids must be ids separated by commas, got {ids!r:.80}"
    as_file = "a chat in the terminal has no out, logprobs or prompt_logprobs; give --prompt=TEXT"
    one_alone = f"best_of_by=reward and reward_from=DIR go together, got {by}, {source!r}"
    no_stream = "best_of_by=reward cannot stream a chat in the terminal; give --prompt=TEXT"
    no_question = f"best_of_by=reward needs a chat, and prompts are continued here; {in_chat}"
    for wrong, words in (
        (config["tools"] and not talk, f"tools are for a chat; {in_chat}"),
        (config["tools"] and several, one_answer),
        (re.search(r"[^0-9, ]|[0-9]{19}", ids), not_ids),
        (config["prompt"] and has_file, "both prompt and prompts are given; give one of them"),
        (config["system"] and not talk and not has_file, f"system needs a chat; {in_chat}"),
        (in_terminal and as_json, as_file),
        ((by == "reward") != bool(source), one_alone),
        (in_terminal and K > 1, "a chat has one answer at a time; leave out num_beams"),
        (for_beams and K == 1, "length_penalty and early_stopping need num_beams above 1"),
        (source and K > 1, f"best_of_by=reward ranks samples, not beams; got num_beams={K}"),
        (source and in_terminal, no_stream),
        (source and not talk, no_question),
    ):
        if wrong:
            raise UserError(f"sample: {words}")


def has_piped_input() -> bool:
    """Return whether a command or a file gives standard input."""
    try:
        kind = os.fstat(0).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind)


def print_samples(
    engine: Engine,
    ids: list[int],
    params: SamplingParams,
    rank: Rank | None,
    asked: str,
    begin: str,
) -> None:
    """Print the samples of one prompt, a single one in pieces as it is generated. `asked` is what
    they answer, `begin` stands before each of them."""
    if params.n_samples == 1 and not rank and not isinstance(engine, BeamSearch):
        tokens = engine.stream(ids, params)  # checks them
        print(begin, end="", flush=True)
        for token in tokens:
            print(token.text, end="", flush=True)
        print(flush=True)
        reasons = [token.finish]
    else:
        _, result = next(engine.answer([ids], params))
        result = rank(result, asked) if rank else result
        texts = [begin + completion.text + "\n" for completion in result.completions]
        print(("-" * 80 + "\n").join(texts), end="", flush=True)
        reasons = [completion.finish_reason for completion in result.completions]
    context = engine.model.cfg.block_size
    if context_ended(len(ids), reasons, params, context):
        print(f"sample: {context_ended_words(context, 'the text')}", file=sys.stderr)


def deciding_settings(
    config: dict,
    talk: bool,
    directory: Path,
    reward_dir: Path | None,
    device: torch.device,
    dtype: torch.dtype,
) -> dict:
    """Return the settings that decide the answers, for the file beside them."""
    settings = {key: value for key, value in config.items() if key not in FREE_KEYS} | {
        "chat": talk,
        "model": huggingface.model_name(directory),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if reward_dir:
        settings["reward_model"] = huggingface.model_name(reward_dir)
    return settings


if __name__ == "__main__":
    config = configure(globals())
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(dtype, torch_device)
    directory = checkpoint.resolve(init_from or checkpoint.newest_run())
    tokenizer = Tokenizer.load(huggingface.tokenizer_dir(directory)).with_template_settings(
        chat_template_kwargs
    )
    cfg = huggingface.load_config(directory)
    params = sampling_params(config, tokenizer, cfg.vocab_size)
    talk = choose_chat(chat, directory, tokenizer)
    as_json = bool(prompts or out) or logprobs >= 0 or prompt_logprobs >= 0
    check_settings(config, talk, as_json)
    reward_dir = None
    if reward_from:
        reward_dir = reward_model.find_model(reward_from, tokenizer, "reward_from")
    if as_json:
        settings = deciding_settings(config, talk, directory, reward_dir, torch_device, torch_dtype)
        answers = Answers(prompts, prompt, out, settings)
    if prompts:
        rows = num_beams if num_beams > 1 else batch_size
        gib = cache_bytes(cfg, rows, cfg.block_size, torch_dtype) / 2**30
        cache = f"cache up to {counted(rows, 'row')} of {cfg.block_size} tokens, {gib:.2f} GiB"
        counts = f"{counted(len(answers.lines), 'prompt')}, {len(answers.done)} answered already"
        print(f"{counts}; {cache}", file=sys.stderr)
    if not init_from:
        print(f"from {directory}, the newest run", file=sys.stderr)
    if talk and not is_tuned(directory, tokenizer):
        say(f"sample: warning: {untuned(directory)}")
    model = huggingface.load_model(directory, torch_device, dtype=torch_dtype)
    if weights == "int8":  # laid out here, so that the rounded matrices are not held beside
        model = for_inference(to_int8(model), torch_dtype)
    ranker = None
    if reward_dir:
        judge = reward_model.load(reward_dir, torch_device, torch_dtype)
        ranker = Ranker(judge, tokenizer, torch_dtype, system)
    rank = partial(ranker.rank, n=n) if ranker else None  # of (result, question)
    encode = partial(prompt_ids, tokenizer, talk, system, rewarded=bool(ranker))
    toolbox = Tools(tools) if tools else None
    if toolbox:
        check_template(tokenizer, toolbox)
    with autocast(torch_device, torch_dtype):
        if num_beams > 1:
            engine = BeamSearch(model, tokenizer, num_beams, compile)
        else:
            rows = batch_size if as_json or params.n_samples > 1 else 1
            engine = Engine(model, tokenizer, rows, compile)
        if as_json and toolbox:
            tool_answers = ToolAnswers(toolbox, engine, system)
            answers.write(engine, params, tool_answers.encode, draw=tool_answers.draw)
        elif as_json:
            answers.write(engine, params, encode, rank)
        elif talk and not prompt:
            converse(Chat(engine, params, system, toolbox))
        elif toolbox:
            talk_with_tools = Chat(engine, params, system, toolbox)
            show(talk_with_tools, talk_with_tools.ask(prompt))
        else:
            if not prompt and has_piped_input():
                hint = "standard input is read in a chat only; give --prompt=TEXT or --prompts=FILE"
                say(f"sample: this model continues texts, and {hint}")
            ids = encode(prompt)
            begin = opened_thoughts(tokenizer.decode(ids)) if talk else prompt
            print_samples(engine, ids, params, rank, prompt, begin)
    if ranker and ranker.without_reward:
        print(ranker.report(), file=sys.stderr)
    # Some that cannot be answered are named, no failure
    if as_json and answers.problems == len(answers.lines):
        raise SystemExit(1)
