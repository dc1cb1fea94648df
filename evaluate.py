"""How good a model is: scores of any checkpoint of ours or any Hugging Face Llama/Qwen3 directory.

python evaluate.py --init_from=out/demo --tasks=perplexity --data='zh=zh/*.txt,code=code.jsonl'
python evaluate.py --init_from=out/sft --tasks=mmlu,perplexity --data='mmlu: DIR; perplexity: a.txt' --out=scores.json
python evaluate.py --init_from=out/demo --score=rows.jsonl --out=scored.jsonl      # for prepare.py's --score
torchrun --standalone --nproc_per_node=8 evaluate.py ...                           # the ranks share the work

    task                    data                                                      read more in
    perplexity              texts: 'name=files,name=files', or files                  domains.py
    mmlu cmmlu ceval        the set's directory of .csv files; mmlu_text etc. score   choices.py
                            the answers' texts in place of their letters
    hellaswag arc           .jsonl file or directory                                  choices.py
    generation              conversations; the last answer of each is the reference   generated.py
    preference              pairs of answers; init_from is a reward model             judging.py
    win_rate                two files of answers, by sample.py: 'a.jsonl,b.jsonl';    judging.py
                            init_from is the reward model that judges them

A table goes to standard output; with `out` settings, model, versions and all results, also those of single questions,
go to a JSON file.
"""

import dataclasses
import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from configurator import configure
from groundup.align import reward_model
from groundup.errors import UserError
from groundup.files import readers
from groundup.generate.engine import never_sampled
from groundup.generate.sampling import SamplingParams
from groundup.scores import choices, domains, judging, rows, score_tables, text_metrics
from groundup.scores.choices import evaluate_choices
from groundup.scores.domains import evaluate_domains, parse_domains
from groundup.scores.text_metrics import evaluate_generation
from groundup.train import checkpoint, ranks
from groundup.train.device import autocast, choose_device, choose_dtype, hardware, versions
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
init_from = ""  # run, checkpoint or Hugging Face Llama/Qwen3 directory; empty = the newest run under out/
tasks = "perplexity"  # comma-separated, see above
data = ""  # what the task is measured on; of several tasks 'task: data; task: data'
out = ""  # JSON file for all results; with score the file of scored rows
score = ""  # files whose rows get loss, bpb and ifd, written to `out`; no tasks then
batch_size = 16  # rows that go through the model together
block_size = 0  # tokens that the model reads at a time; 0 = as many as it was trained for
stride = 0  # perplexity, score: step between the windows of a long document; 0 = block_size, no overlap
shots = -1  # solved questions before each one of multiple choice; -1 = 5 for exams, 0 for hellaswag and arc
limit = 0  # documents per domain, questions per subject, conversations, pairs, rows; 0 = all
text_key = ""  # perplexity, score: where the text is in a row, as in prepare.py; empty = found
txt_split = "file"  # perplexity, score: what a document is in plain text: file | blank (between blank lines) | line
system = ""  # generation: system message of conversations that have none
temperature = 0.0  # generation: 0 = greedy
max_new_tokens = 256  # generation: per answer
judge = ""  # win_rate: a model behind base_url as judge, both orders; empty = the reward model in init_from
base_url = ""  # of an OpenAI-compatible service
api_key_env = ""  # name of the environment variable with its key; empty = none is sent
people = ""  # win_rate: people judge; NAME.html and NAME.jsonl are made for them, and read once they have chosen
unfinished = "lose"  # win_rate, answers cut by max_new_tokens: lose (two: a tie) | judge = judged like finished ones
seed = 1337  # generation with a temperature; which answer people see first
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16
compile = False  # compile the model's blocks: takes up to a minute, pays off from some thousand rows
timeout_s = 3600.0  # several ranks: wait this long for one that is behind

JUDGED = ("preference", "win_rate")  # by a reward model
TASKS = ("perplexity", *choices.TASKS, "generation", *JUDGED)
USED_BY = {  # settings that mean nothing to other tasks
    **dict.fromkeys(("stride", "text_key"), ("perplexity",)), "shots": choices.TASKS,
    **dict.fromkeys(("system", "temperature"), ("generation",)),
    **dict.fromkeys(("judge", "base_url", "api_key_env", "people", "unfinished"), ("win_rate",)),
}  # fmt: skip


# ---- settings -------------------------------------------------------------------------------------------------------


def parse_data(tasks: str, data: str) -> dict[str, str]:
    """{task: its data}. Raises ConfigError."""
    names = [name.strip() for name in tasks.split(",")]
    for name in names:
        if name not in TASKS:
            raise UserError(f"config: tasks={tasks!r}: there is no task {name!r}; choose from {', '.join(TASKS)}")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"config: tasks={tasks!r} names {name!r} twice; several sets of texts are domains of one")
    if len(names) == 1 and not data.strip().startswith(f"{names[0]}:"):
        found = {names[0]: data.strip()}
    else:
        parts = [part.partition(":") for part in data.split(";") if part.strip()]
        found = {name.strip(): text.strip() for name, _, text in parts}
        for name in found:
            if name not in names:
                raise UserError(f"config: data names {name!r}, which is not one of tasks={tasks!r}")
        if len(found) < len(parts):
            raise UserError(f"config: data={data!r} names a task twice")
    for name in names:
        if not found.get(name):
            example = f"--data='{'; '.join(f'{name}: FILES' for name in names)}'" if names[1:] else "--data=FILES"
            raise UserError(f"config: task {name} has no data; give {example}")
    return {name: found[name] for name in names}


def text_settings(config: dict, cfg: ModelConfig) -> domains.Settings:
    """How texts are read. Raises ConfigError."""
    size = config["block_size"] or cfg.block_size
    if not 0 < size <= cfg.block_size:
        raise UserError(f"config: block_size={size} must be from 1 to the model's {cfg.block_size}, or 0 for that")
    if not 0 <= config["stride"] <= size:
        raise UserError(f"config: stride={config['stride']} must be from 1 to block_size={size}, or 0 for that")
    keys = ("batch_size", "limit", "text_key", "txt_split")
    return domains.Settings(block_size=size, stride=config["stride"] or size, **{key: config[key] for key in keys})


def check_config(config: dict, wanted: dict[str, str]) -> None:
    """Raise ConfigError for what cannot be. wanted: {task: its data}."""
    for key, least in {"batch_size": 1, "shots": -1, "limit": 0, "max_new_tokens": 1, "temperature": 0}.items():
        if not config[key] >= least:
            raise UserError(f"config: {key} must be at least {least}, got {config[key]}")
    if config["score"] and not config["out"]:
        raise UserError("config: score needs out, the file for the scored rows")
    for key, usual in {"data": "", "tasks": "perplexity"}.items():
        if config["score"] and config[key] != usual:
            raise UserError(f"config: score and {key} are both given; give one of them")
    if config["score"] and Path(config["out"]).suffix != ".jsonl":
        raise UserError(f"config: out={config['out']!r} of score is a file of rows; call it .jsonl")
    for key, users in USED_BY.items():
        given, used = config[key] not in ("", 0, -1, "lose"), wanted.keys() & set(users)
        if given and not used and not (config["score"] and "perplexity" in users):
            raise UserError(f"config: {key}={config[key]!r} is only for {', '.join(users)}; leave it out")
    if config["unfinished"] not in judging.UNFINISHED:
        allowed = " or ".join(judging.UNFINISHED)
        raise UserError(f"config: unfinished must be {allowed}, got {config['unfinished']!r}")
    if bool(config["judge"]) != bool(config["base_url"]):
        raise UserError("config: judge and base_url belong together: a model, and the service that has it")
    if config["judge"] and not config["out"]:
        raise UserError("config: judge needs out; beside it is kept what the service has said")
    if config["api_key_env"] and config["api_key_env"] not in os.environ:
        raise UserError(f"config: there is no environment variable {config['api_key_env']!r}, as api_key_env says")


def check_files(config: dict, wanted: dict[str, str]) -> None:
    """Look at all that will be read, and at where the results go, before anything is loaded: a mistake in the last task
    should not show after hours of the others. Raises ConfigError, and what reading the files raises."""
    read = readers.find_files(config["score"])
    for task, source in wanted.items():
        read += task_files(task, source, config)
    if not config["out"]:
        return
    out = Path(config["out"])
    if out.is_dir():
        raise UserError(f"config: out={config['out']!r} is a directory; name a file, such as {out / 'scores.json'}")
    if os.path.realpath(out) in map(os.path.realpath, read):
        raise UserError(f"config: out={config['out']!r} would be written over what is read; name another file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"config: out={config['out']!r}: no directory {out.parent}: {error.strerror}") from None


def task_files(task: str, source: str, config: dict) -> list[str]:
    """The files of a task's data, read as far as that needs no tokenizer. Raises what is wrong with them."""
    if task == "perplexity":
        return [file for domain in parse_domains(source) for file in domain.files]
    if task in choices.TASKS:
        choices.read_task(task, source, shots_of(task, config))
        return readers.list_directory(source) if os.path.isdir(source) else [source]
    if task == "generation":
        text_metrics.check_libraries()
        files = text_metrics.files_of(source)
        if "-" not in files:  # standard input can be read once
            text_metrics.read_questions(source, config["limit"])
        return files
    if task == "preference":
        return readers.find_files(source)
    people = [config["people"] + end for end in (".jsonl", ".key.jsonl", ".html")] if config["people"] else []
    judging.matches_of(*map(judging.read_answers, two_paths(source)))
    return [*two_paths(source), *people]


def two_paths(source: str) -> list[str]:
    paths = [path.strip() for path in source.split(",") if path.strip()]
    if len(paths) != 2:
        raise UserError(f"config: win_rate needs two files of answers, got {source!r}; give --data=A.jsonl,B.jsonl")
    return paths


def shots_of(task: str, config: dict) -> int:
    usual = 0 if task in choices.FILES else 5
    return usual if config["shots"] < 0 else config["shots"]


def kind_of_model(config: dict, wanted: dict[str, str]) -> str:
    """What init_from must be: language model | reward model | "" (people judge, or a service). Raises ConfigError."""
    elsewhere = {"win_rate"} if config["judge"] or config["people"] else set()
    judged = sorted(wanted.keys() & set(JUDGED) - elsewhere)
    others = sorted(wanted.keys() - set(JUDGED))
    if judged and others:
        what = f"{judged[0]} measures a reward model, {others[0]} a language model"
        raise UserError(f"config: tasks={config['tasks']!r}: {what}; start them one after the other")
    return "reward model" if judged else "language model" if others or config["score"] else ""


def sampling_params(config: dict, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config["max_new_tokens"], temperature=config["temperature"], seed=config["seed"],
        eos_ids=tokenizer.stop_ids, banned_ids=never_sampled(tokenizer, vocab_size),
    )  # fmt: skip


# ---- tasks ----------------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """What is measured, or judges. Without a model where people judge, or a service."""

    directory: Path | None
    device: torch.device
    dtype: torch.dtype
    tokenizer: Tokenizer | None = None
    model: Transformer | None = None
    texts: domains.Settings | None = None


def load(kind: str, config: dict, device: torch.device, dtype: torch.dtype) -> Subject:
    """With the model in init_from, of the kind that kind_of_model says. Raises ConfigError, CheckpointError,
    TokenizerError, RewardError."""
    if not kind:
        return Subject(None, device, dtype)
    directory = checkpoint.resolve(config["init_from"] or checkpoint.newest_run())
    if kind == "reward model":
        model = reward_model.load(directory, device)
        return Subject(directory, device, dtype, Tokenizer.load(checkpoint.tokenizer_dir(directory)), model)
    if reward_model.is_reward_model(directory):
        raise UserError(f"config: {directory} holds a reward model, which is for the tasks {' and '.join(JUDGED)}")
    tokenizer, cfg = Tokenizer.load(checkpoint.tokenizer_dir(directory)), checkpoint.load_config(directory)
    if tokenizer.vocab_size > cfg.vocab_size:
        sizes = f"its tokenizer has {tokenizer.vocab_size} ids, the model {cfg.vocab_size}"
        raise UserError(f"config: {directory}: {sizes}; the tokenizer is another model's")
    texts = text_settings(config, cfg)
    model = checkpoint.load_model(directory, device).eval()
    if config["compile"]:
        model.compile_blocks(partial(torch.compile, dynamic=True))
    return Subject(directory, device, dtype, tokenizer, model, texts)


def measure(task: str, source: str, subject: Subject, config: dict) -> dict:
    """What the file of the task says of the subject. All ranks call it and get the same."""
    model, tokenizer, device, dtype = subject.model, subject.tokenizer, subject.device, subject.dtype
    size, limit = config["batch_size"], config["limit"]
    if task == "perplexity":
        return evaluate_domains(model, tokenizer, parse_domains(source), subject.texts, device, dtype)
    if task in choices.TASKS:
        shots, block_size = shots_of(task, config), subject.texts.block_size
        return evaluate_choices(model, tokenizer, task, source, shots, size, device, dtype, limit, block_size)
    if task == "generation":
        params = sampling_params(config, tokenizer, model.cfg.vocab_size)
        with autocast(device, dtype):
            return evaluate_generation(model, tokenizer, source, params, limit, size, config["system"])
    if task == "preference":
        return judging.evaluate_preference(model, tokenizer, source, size, limit, dtype)
    return compare(source, subject, config)


def compare(source: str, subject: Subject, config: dict) -> dict:
    """judging.win_rate of two files of answers. Raises ConfigError, JudgeError."""
    paths = two_paths(source)
    of_a, of_b = (judging.read_answers(path)[: config["limit"] or None] for path in paths)
    if config["people"]:
        if not Path(config["people"] + ".jsonl").exists():
            n = judging.write_side_by_side(of_a, of_b, config["people"], config["seed"], config["unfinished"])
            return {"to_choose": n, "read": config["people"] + ".html", "choose_in": config["people"] + ".jsonl"}
        ask = partial(judging.people_judge, out=config["people"])
    elif config["judge"]:
        key = os.environ[config["api_key_env"]].strip() if config["api_key_env"] else ""
        endpoint = judging.Endpoint(config["base_url"], config["judge"], key)
        ask = partial(judging.endpoint_judge, endpoint=endpoint, journal=config["out"] + ".judge")
    else:
        how = {"batch_size": config["batch_size"], "dtype": subject.dtype}
        ask = partial(judging.reward_judge, model=subject.model, tokenizer=subject.tokenizer, **how)
    return dict(zip("AB", paths, strict=True)) | judging.win_rate(of_a, of_b, ask, config["unfinished"])


def score_rows(subject: Subject, config: dict, is_main: bool) -> None:
    """row_scores.score_file, with what it says printed."""
    source, out = config["score"], Path(config["out"])
    key = rows.scoring_key(subject.directory, subject.tokenizer, source, subject.texts, subject.dtype)
    what = (source, out, key, subject.texts, subject.device, subject.dtype, is_main)
    problems, notes = rows.score_file(subject.model, subject.tokenizer, *what)
    if is_main:
        print("\n".join([f"{out}: {rows.summary(problems)}", *notes]))


# ---- what is shown and written --------------------------------------------------------------------------------------


def describe_result(task: str, found: dict) -> str:
    if task in choices.TASKS:
        return score_tables.describe_choices(found)
    describe = score_tables.describe_domains if task == "perplexity" else score_tables.describe_figures
    text = f"{task}\n{describe(found)}"
    cut = found["unfinished"]["both"] if task == "win_rate" and "unfinished" in found else 0
    if 2 * cut > found.get("n", 0):
        text += f"\nwarning: in {cut} of {found['n']} matches both answers are unfinished, which says little; "
        text += "let sample.py write more with --max_new_tokens"
    return text


def describe_model(directory: Path) -> dict:
    """What tells this model from any other."""
    found = {"directory": str(directory.resolve()), "weights": checkpoint.weights_key(directory)}
    if checkpoint.is_adapter(directory):
        found["base_weights"] = checkpoint.weights_key(checkpoint.base_of(directory))
    found["tokenizer"] = Tokenizer.load(checkpoint.tokenizer_dir(directory)).fingerprint()
    return found | {"architecture": dataclasses.asdict(checkpoint.load_config(directory))}


def describe_run(subject: Subject, n_ranks: int, begin: float) -> dict:
    """Where and with what it ran. begin: time.perf_counter() at its start."""
    return {
        "hardware": hardware(subject.device), "ranks": n_ranks, "versions": versions(),
        "dtype": str(subject.dtype).removeprefix("torch."), "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def write_results(path: Path, results: dict) -> None:
    """As JSON, whole or not at all. JSON has no NaN and no infinity: they become null. Raises ConfigError."""
    temp = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps(finite(results), indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        os.replace(temp, path)
    except OSError as error:
        raise UserError(f"config: cannot write out={str(path)!r}: {error.strerror}; name another file") from None


def finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- command line ---------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    config = configure(globals())
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    wanted = {} if score else parse_data(tasks, data)
    check_config(config, wanted)
    kind = kind_of_model(config, wanted)
    check_files(config, wanted)
    torch_device = choose_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    subject = load(kind, config, torch_device, choose_dtype(dtype, torch_device))
    world = ranks.init(torch_device.type, timeout_s)
    if world.is_main:
        where = f"{world.world_size} x {hardware(torch_device)}, {subject.dtype}"
        print(f"{subject.directory or judge or people}: {where}", flush=True)
    begin, results = time.perf_counter(), {}
    if score:
        score_rows(subject, config, world.is_main)
    for task, source in wanted.items():
        results[task] = measure(task, source, subject, config)
        if world.is_main:
            print(f"\n{describe_result(task, results[task])}", flush=True)
        if world.is_main and out:  # after each task: an error in a later one does not cost this one
            described = describe_model(subject.directory) if subject.directory else {}
            run = describe_run(subject, world.world_size, begin)
            write_results(Path(out), {"settings": config, "model": described, "run": run, "results": results})
    ranks.close()
