"""How good a model is: scores of any checkpoint of ours or any Hugging Face directory.

python evaluate.py --init_from=out/demo --tasks=perplexity --data='zh=zh/*.txt,code=code.jsonl'
python evaluate.py --init_from=out/sft --tasks=mmlu,perplexity --data='mmlu: DIR; perplexity: a.txt'
python evaluate.py --init_from=out/demo --score=rows.jsonl --out=scored.jsonl  # for prepare.py
torchrun --standalone --nproc_per_node=8 evaluate.py ...                       # ranks share it

    task              data                                                  file in groundup/scores
    perplexity        texts that the model was not trained on:              domains.py
                      'name=files,name=files', or files
    mmlu cmmlu ceval  directory of .csv files; mmlu_text etc. score the     choices.py
                      texts of the answers instead of their letters
    generation        conversations; the last answer is the reference       text_metrics.py
    preference        pairs of answers; init_from is a reward model, or a   judging.py
                      language model, such as dpo.py's, with `reference`
    win_rate          two files of answers of sample.py, 'a.jsonl,b.jsonl'; judging.py
                      init_from is the reward model that judges them

Prints a table. `out` is a JSON file with settings, model, versions and all results, also those
of single questions and pairs: `beside` compares what all models were measured on, and says what it
leaves out.
"""

if __name__ == "__main__":  # before the slow imports: Ctrl-C is then one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import contextlib
import dataclasses
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from configurator import configure
from groundup.align import reward_model
from groundup.errors import UserError, counted, refuse
from groundup.files.paths import check_replaceable, find_files
from groundup.generate.completion import never_sampled
from groundup.generate.decode import to_int8
from groundup.generate.sampling import SamplingParams
from groundup.scores import choices, domains, judging, rows, tables, text_metrics, trained_on
from groundup.scores.choices import evaluate_choices
from groundup.scores.client import Endpoint, read_key
from groundup.scores.domains import evaluate_domains, parse_domains
from groundup.scores.text_metrics import evaluate_generation
from groundup.tokens.token_writer import write_json
from groundup.train import checkpoint, huggingface, ranks
from groundup.train.device import autocast, choose_device, choose_dtype, hardware, versions
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help ------------------------------
init_from = ""  # run, checkpoint or Hugging Face directory; empty = the newest run under out/
tasks = "perplexity"  # comma-separated, see above
data = ""  # what the task is measured on; of several tasks 'task: data; task: data'
out = ""  # JSON file for all results; with score the file of scored rows
beside = ""  # files that other runs wrote to `out`, comma-separated: their figures in columns
score = ""  # files whose rows get loss, bpb and ifd, written to `out`; no tasks then
batch_size = 16  # rows per forward pass; at least 1
block_size = 0  # tokens that the model reads at a time; 0 = its context
stride = 0  # perplexity, score: step between windows of a long document; 0 = block_size
shots = 5  # solved examples before each multiple-choice question; at least 0
limit = 0  # documents per domain, questions per subject, pairs, rows; at least 0, 0 = all
text_key = ""  # perplexity, score: the field with the text, as in prepare.py; empty = found
txt_split = "file"  # file | blank (between blank lines) | line: a document of perplexity, score
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
reference = ""  # preference of a language model: what it was tuned from; empty = log-probabilities
max_new_tokens = 256  # generation: per answer, decoded greedily; at least 1
judge = ""  # win_rate: model at base_url that judges; empty = the reward model in init_from
base_url = ""  # of an OpenAI-compatible service
api_key_env = ""  # name of the environment variable with its key; empty = none is sent
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16
weights = "full"  # full | int8 (matrices rounded to 8 bits); of perplexity, choices, generation

JUDGED = ("preference", "win_rate")  # by a reward model
TASKS = ("perplexity", *choices.TASKS, "generation", *JUDGED)
USED_BY = {  # settings that mean nothing to other tasks, with their defaults
    ("perplexity",): {"stride": 0, "text_key": "", "txt_split": "file"},
    choices.TASKS: {"shots": 5},
    ("perplexity", *choices.TASKS): {"block_size": 0},
    ("generation",): {"max_new_tokens": 256},
    ("perplexity", *choices.TASKS, "generation"): {"weights": "full"},
    ("preference",): {"reference": ""},
    ("win_rate",): {"judge": "", "base_url": "", "api_key_env": ""},
}
ROWS_HINT = (
    ". Other tasks read what prepare.py writes: prepare.py --kind=chat (or preference) "
    "--text_key=... --out_dir=DIR, then --data=DIR/val.jsonl"
)


def parse_data(tasks: str, data: str) -> dict[str, str]:
    """Return {task: its data}."""
    names = [name.strip() for name in tasks.split(",")]
    for name in names:
        what = f"there is no task {name!r}; choose from {', '.join(TASKS)}"
        refuse(name not in TASKS, f"tasks={tasks!r}: {what}")
    parts = [part.partition(":") for part in data.split(";") if part.strip()]
    if len(names) == 1 and not data.strip().startswith(f"{names[0]}:"):
        parts = [(names[0], ":", data)]
    found = {name.strip(): text.strip() for name, _, text in parts}
    twice = len(set(names)) < len(names) or len(found) < len(parts)
    what = "names a task twice; texts are domains of one task"
    refuse(twice, f"tasks={tasks!r} or data={data!r} {what}")
    wrong = found.keys() != set(names) or not all(found.values())
    example = "; ".join(f"{name}: FILES" for name in names) if names[1:] else "FILES"
    got = f", got {data=}" if data else ""
    refuse(wrong, f"data must be given for tasks={tasks!r}{got}; write --data='{example}'")
    return {name: found[name] for name in names}


def text_settings(config: dict, cfg: ModelConfig) -> domains.Settings:
    """Return how texts are read."""
    size = config["block_size"] or cfg.block_size
    most, stride = cfg.block_size, config["stride"]
    what = f"must be from 1 to the model's {most}, or 0 for that"
    refuse(not 0 < size <= most, f"block_size={size} {what}")
    what = f"must be from 1 to block_size={size}, or 0 for that"
    refuse(not 0 <= stride <= size, f"stride={stride} {what}")
    others = {key: config[key] for key in ("batch_size", "limit", "text_key", "txt_split")}
    return domains.Settings(block_size=size, stride=stride or size, **others)


def check_config(config: dict, wanted: dict[str, str]) -> None:
    """Raise UserError for settings that do not go together. wanted: {task: its data}."""
    lacks_out = config["score"] and Path(config["out"]).suffix != ".jsonl"
    what = "score needs out, the file for the scored rows, called .jsonl"
    refuse(lacks_out, f"{what}; got {config['out']!r}")
    for key, usual in {"data": "", "tasks": "perplexity", "beside": "", "weights": "full"}.items():
        both = config["score"] and config[key] != usual
        refuse(both, f"score and {key} are both given; give one of them")
    for users, defaults in USED_BY.items():
        is_used = wanted.keys() & set(users) or config["score"] and "perplexity" in users
        for key, usual in defaults.items():
            how = f"leave it out{ROWS_HINT if key == 'text_key' else ''}"
            what = f"is only for {', '.join(users)}; {how}"
            refuse(config[key] != usual and not is_used, f"{key}={config[key]!r} {what}")
    judge, url, out = (config[key] for key in ("judge", "base_url", "out"))
    what = "belong together: a model, its service, a file for its replies"
    refuse(bool(judge) != bool(url) or judge and not out, f"judge, base_url and out {what}")
    read_key(config["api_key_env"])


def check_files(config: dict, wanted: dict[str, str]) -> None:
    """Look at all files that will be read and at where the results go, before anything is
    loaded: a mistake in the last task should not show after hours of the others."""
    read = find_files(config["score"], "score")
    for task, source in wanted.items():
        if task == "perplexity":
            read += [file for domain in parse_domains(source) for file in domain.files]
        elif task in ("preference", "generation"):
            read += judging.files_of_rows(source)
        else:
            read += find_files(source, "data")
        if task in choices.TASKS:
            choices.read_task(task, source, config["shots"])
        elif task == "win_rate":
            answers = find_files(source)
            what = f"win_rate needs two files of answers, got {source!r}"
            refuse(len(answers) != 2, f"{what}; give --data=A.jsonl,B.jsonl")
            judging.matches_of(*judging.read_both(*answers))
        elif task == "generation":
            text_metrics.check_libraries()
            if "-" not in read:  # standard input can be read once
                text_metrics.read_questions(source, config["limit"])
    if not config["out"]:
        return
    read += filter(None, map(str.strip, config["beside"].split(",")))
    out, given = Path(config["out"]), f"out={config['out']!r}"
    what = f"is a directory; name a file, such as {out / 'scores.json'}"
    refuse(out.is_dir(), f"{given} {what}")
    check_replaceable(out)
    is_read = os.path.realpath(out) in map(os.path.realpath, read)
    refuse(is_read, f"{given} would be written over what is read; name another file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{given}: no directory {out.parent}: {error.strerror}"
        raise UserError(f"config: {what}") from None


def kind_of_model(config: dict, wanted: dict[str, str]) -> str:
    """Return what init_from must be: "language model", "reward model" or "" (a service judges)."""
    judged = wanted.keys() & ({"preference"} if config["judge"] else set(JUDGED))
    others = wanted.keys() - set(JUDGED)
    if "preference" in wanted and config["init_from"]:  # which may be either
        path = checkpoint.resolve(config["init_from"], rewards=True)
        if not huggingface.is_reward_model(path):
            judged, others = judged - {"preference"}, others | {"preference"}
    if judged and others:
        what = f"{min(judged)} measures a reward model, {min(others)} a language model"
        what = f"tasks={config['tasks']!r}: {what}; start them one after the other"
        raise UserError(f"config: {what}")
    return "reward model" if judged else "language model" if others or config["score"] else ""


class Loaded(NamedTuple):
    """The model that is measured or judges; without one where a service judges."""

    device: torch.device
    dtype: torch.dtype
    directory: Path | None = None
    tokenizer: Tokenizer | None = None
    model: Transformer | None = None
    texts: domains.Settings | None = None
    reference: Transformer | None = None  # that a language model is compared with on pairs


def load(kind: str, config: dict, device: torch.device, dtype: torch.dtype) -> Loaded:
    """Return the model in init_from, which must be what `kind` says."""
    if not kind:
        return Loaded(device, dtype)
    wants_rewards = kind == "reward model"
    directory = config["init_from"] or checkpoint.newest_run(rewards=wants_rewards)
    directory = checkpoint.resolve(directory, rewards=True)
    if wants_rewards:
        refuse(config["reference"], f"reference is of a language model, {directory} gives rewards")
        model = reward_model.load(directory, device, dtype)
        tokenizer = Tokenizer.load(huggingface.tokenizer_dir(directory))
        return Loaded(device, dtype, directory, tokenizer, model)
    what = f"holds a reward model, which is for the tasks {' and '.join(JUDGED)}"
    refuse(huggingface.is_reward_model(directory), f"{directory} {what}")
    cfg = huggingface.load_config(directory)
    tokenizer = Tokenizer.load(huggingface.tokenizer_dir(directory))
    tokenizer = tokenizer.with_template_settings(config["chat_template_kwargs"])
    sizes = f"its tokenizer has {tokenizer.vocab_size} ids, the model {cfg.vocab_size}"
    is_foreign = tokenizer.vocab_size > cfg.vocab_size
    refuse(is_foreign, f"{directory}: {sizes}; the tokenizer is another model's")
    texts = text_settings(config, cfg)
    model = huggingface.load_model(directory, device, dtype=dtype).eval()
    model = to_int8(model) if config["weights"] == "int8" else model
    reference = None
    if config["reference"]:
        path = checkpoint.resolve(config["reference"], "reference")
        other = Tokenizer.load(huggingface.tokenizer_dir(path)).fingerprint()
        what = f"{path} and {directory} have different tokenizers"
        refuse(other != tokenizer.fingerprint(), f"reference: {what}")
        reference = huggingface.load_model(path, device, dtype=dtype).eval()
    return Loaded(device, dtype, directory, tokenizer, model, texts, reference)


def measure(task: str, source: str, loaded: Loaded, config: dict) -> dict:
    """Return the results of a task. All ranks call it and get the same."""
    device, dtype, _, tokenizer, model, texts, _ = loaded
    size, limit = config["batch_size"], config["limit"]
    if task == "perplexity":
        return evaluate_domains(model, tokenizer, parse_domains(source), texts, dtype)
    if task in choices.TASKS:
        how = config["shots"], size, dtype, limit, texts.block_size
        return evaluate_choices(model, tokenizer, task, source, *how)
    if task == "generation":
        params = SamplingParams(
            max_new_tokens=config["max_new_tokens"],
            temperature=0,
            eos_ids=tokenizer.stop_ids,
            banned_ids=never_sampled(tokenizer, model.cfg.vocab_size),
        )
        with autocast(device, dtype):
            return evaluate_generation(model, tokenizer, source, params, limit, size)
    if task == "preference":
        how = size, limit, dtype, loaded.reference
        return judging.evaluate_preference(model, tokenizer, source, *how)
    paths = find_files(source)
    if config["judge"]:
        endpoint = Endpoint(config["base_url"], config["judge"], read_key(config["api_key_env"]))
        ask = partial(judging.endpoint_judge, endpoint=endpoint, journal=config["out"] + ".judge")
    else:
        how = {"model": model, "tokenizer": tokenizer, "batch_size": size, "dtype": dtype}
        ask = partial(judging.reward_judge, **how)
    found = judging.win_rate(*judging.read_both(*paths), ask, limit)
    differ = {"settings that differ": judging.differing_settings(*paths)}
    return dict(zip("AB", paths, strict=True)) | found | differ


def score_rows(loaded: Loaded, config: dict, is_main: bool) -> None:
    """Write the rows with their losses, and print what became of them."""
    _, dtype, directory, tokenizer, model, texts, _ = loaded
    source, out = config["score"], Path(config["out"])
    key = rows.loss_key(directory, tokenizer, source, texts, dtype)
    how = texts, dtype, is_main
    problems, notes = rows.write_losses(model, tokenizer, source, out, key, *how)
    n, scored = problems.total(), problems[""]
    left = f", {n - scored:,} not: {rows.reasons(problems)}" if n > scored else ""
    if is_main:
        print("\n".join([f"{out}: {scored:,} of {counted(n, 'row')} scored{left}", *notes]))


def describe_model(directory: Path) -> dict:
    """Return what identifies a model."""
    weights = huggingface.weights_fingerprint(directory)
    found = {"directory": str(directory.resolve()), "weights": weights}
    found["tokenizer"] = Tokenizer.load(huggingface.tokenizer_dir(directory)).fingerprint()
    return found | {"architecture": dataclasses.asdict(huggingface.load_config(directory))}


def write_results(path: Path, results: dict) -> None:
    """Write JSON, whole or not at all. JSON has no NaN and no infinity: they become null."""
    try:
        write_json(path, json.loads(json.dumps(results), parse_constant=lambda name: None))
    except OSError as error:
        what = f"cannot write out={str(path)!r}: {error.strerror}; name another file"
        raise UserError(f"config: {what}") from None


def tell(text: str, out: str) -> None:
    """Print. That the reader has gone (| head) or that the disk of `> file` is full does not end a
    call whose results also go to `out`."""
    with contextlib.suppress(*[OSError] if out else []):
        print(text, flush=True)


# ---- command line --------------------------------------------------------------------------------

if __name__ == "__main__":
    config = configure(globals())
    wanted = {} if score else parse_data(tasks, data)
    check_config(config, wanted)
    others = tables.read_others(beside, wanted, config)
    kind = kind_of_model(config, wanted)
    check_files(config, wanted)
    torch_device = choose_device(device, ranks.described_world().local_rank)
    loaded = load(kind, config, torch_device, choose_dtype(dtype, torch_device))
    # A rank may wait for another one's long answers
    world = ranks.init(torch_device.type, timeout_s=3600)
    where = f"{world.world_size} x {hardware(torch_device)}, {loaded.dtype}"
    if world.is_main:
        tell(f"{loaded.directory or judge}: {where}", out)
        for line in trained_on.warnings_of(wanted, loaded.directory) if loaded.directory else ():
            tell(line, out)
    begin, results = time.perf_counter(), {}
    if score:
        score_rows(loaded, config, world.is_main)
    for task, source in wanted.items():
        results[task] = measure(task, source, loaded, config)
        shown = tables.describe(task, results[task], others, tables.name_of(init_from or judge))
        if world.is_main and out:  # after each task: an error in a later one does not cost this one
            described = describe_model(loaded.directory) if loaded.directory else {}
            run = {
                "hardware": hardware(torch_device),
                "ranks": world.world_size,
                "versions": versions(),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "seconds": time.perf_counter() - begin,
            }
            saved = {"settings": config, "data": wanted, "model": described, "run": run}
            saved["results"] = results
            try:
                write_results(Path(out), saved)
            finally:  # on a full disk the figures are at least seen
                tell(f"\n{shown}", out)
        elif world.is_main:
            tell(f"\n{shown}", out)
    ranks.close()
