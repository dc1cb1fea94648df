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
import platform
import sys
import time
import unicodedata
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint
import choices
import ddp
import domains
import judging
import reward_model
import row_scores
import train_utils
from choices import evaluate_choices
from configurator import ConfigError, configure
from domains import evaluate_domains, parse_domains
from generate import never_sampled
from generated import check_libraries, evaluate_generation
from model import ModelConfig, Transformer
from sampling import SamplingParams
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
seed = 1337  # generation with a temperature; which answer people see first
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16
compile = False  # compile the model's blocks: takes up to a minute, pays off from some thousand rows
timeout_s = 3600.0  # several ranks: wait this long for one that is behind

JUDGED = ("preference", "win_rate")  # by a reward model
TASKS = ("perplexity", *choices.TASKS, "generation", *JUDGED)


# ---- settings -------------------------------------------------------------------------------------------------------


def parse_data(tasks: str, data: str) -> dict[str, str]:
    """{task: its data}. Raises ConfigError."""
    names = [name.strip() for name in tasks.split(",")]
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"config: tasks={tasks!r}: there is no task {name!r}; choose from {', '.join(TASKS)}")
    if len(names) == 1 and not data.strip().startswith(f"{names[0]}:"):
        found = {names[0]: data.strip()}
    else:
        parts = [part.partition(":") for part in data.split(";") if part.strip()]
        found = {name.strip(): text.strip() for name, _, text in parts}
        for name in found:
            if name not in names:
                raise ConfigError(f"config: data names {name!r}, which is not one of tasks={tasks!r}")
        if len(found) < len(parts):
            raise ConfigError(f"config: data={data!r} names a task twice")
    for name in names:
        if not found.get(name):
            example = f"--data='{'; '.join(f'{name}: FILES' for name in names)}'" if names[1:] else "--data=FILES"
            raise ConfigError(f"config: task {name} has no data; give {example}")
    return {name: found[name] for name in names}


def text_settings(config: dict, cfg: ModelConfig) -> domains.Settings:
    """How texts are read. Raises ConfigError."""
    size = config["block_size"] or cfg.block_size
    if not 0 < size <= cfg.block_size:
        raise ConfigError(f"config: block_size={size} must be from 1 to the model's {cfg.block_size}, or 0 for that")
    if not 0 <= config["stride"] <= size:
        raise ConfigError(f"config: stride={config['stride']} must be from 1 to block_size={size}, or 0 for that")
    keys = ("batch_size", "limit", "text_key", "txt_split")
    return domains.Settings(block_size=size, stride=config["stride"] or size, **{key: config[key] for key in keys})


def check_config(config: dict) -> None:
    """Raise ConfigError for what cannot be."""
    for key, least in {"batch_size": 1, "shots": -1, "limit": 0, "max_new_tokens": 1, "temperature": 0}.items():
        if not config[key] >= least:
            raise ConfigError(f"config: {key} must be at least {least}, got {config[key]}")
    if config["score"] and not config["out"]:
        raise ConfigError("config: score needs out, the file for the scored rows")
    if config["score"] and config["data"]:
        raise ConfigError("config: score and data are both given; give one of them")
    if config["score"] and Path(config["out"]).suffix != ".jsonl":
        raise ConfigError(f"config: out={config['out']!r} of score is a file of rows; call it .jsonl")
    if bool(config["judge"]) != bool(config["base_url"]):
        raise ConfigError("config: judge and base_url belong together: a model, and the service that has it")
    if config["judge"] and not config["out"]:
        raise ConfigError("config: judge needs out; beside it is kept what the service has said")
    if config["api_key_env"] and config["api_key_env"] not in os.environ:
        raise ConfigError(f"config: there is no environment variable {config['api_key_env']!r}, as api_key_env says")


def sampling_params(config: dict, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config["max_new_tokens"], temperature=config["temperature"], seed=config["seed"],
        eos_ids=tokenizer.stop_ids, banned_ids=never_sampled(tokenizer, vocab_size),
    )  # fmt: skip


# ---- tasks ----------------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """What is measured. A judge needs no model: it is in `directory`, or elsewhere (then there is none)."""

    directory: Path | None
    device: torch.device
    dtype: torch.dtype
    tokenizer: Tokenizer | None = None
    model: Transformer | None = None
    texts: domains.Settings | None = None


def load(directory: Path, config: dict, device: torch.device, dtype: torch.dtype) -> Subject:
    """With a language model. Raises ConfigError, CheckpointError, TokenizerError."""
    if reward_model.is_reward_model(directory):
        raise ConfigError(f"config: {directory} holds a reward model, which is for the tasks {' and '.join(JUDGED)}")
    tokenizer, cfg = Tokenizer.load(checkpoint.tokenizer_dir(directory)), checkpoint.load_config(directory)
    if tokenizer.vocab_size > cfg.vocab_size:
        sizes = f"its tokenizer has {tokenizer.vocab_size} ids, the model {cfg.vocab_size}"
        raise ConfigError(f"config: {directory}: {sizes}; the tokenizer is another model's")
    texts = text_settings(config, cfg)
    model = checkpoint.load_model(directory, device).eval()
    if config["compile"]:
        model.compile_blocks(partial(torch.compile, dynamic=True))
    return Subject(directory, device, dtype, tokenizer, model, texts)


def measure(task: str, source: str, subject: Subject, config: dict) -> dict:
    """What the file of the task says of the subject. All ranks call it and get the same."""
    model, tokenizer, device, dtype = subject.model, subject.tokenizer, subject.device, subject.dtype
    if task == "perplexity":
        return evaluate_domains(model, tokenizer, parse_domains(source), subject.texts, device, dtype)
    if task in choices.TASKS:
        usual = 0 if task in choices.FILES else 5
        shots = usual if config["shots"] < 0 else config["shots"]
        size, limit = subject.texts.block_size, config["limit"]
        return evaluate_choices(
            model, tokenizer, task, source, shots, config["batch_size"], device, dtype, limit, size
        )  # fmt: skip
    if task == "generation":
        params = sampling_params(config, tokenizer, model.cfg.vocab_size)
        with train_utils.autocast(device, dtype):
            return evaluate_generation(
                model, tokenizer, source, params, config["limit"], config["batch_size"], config["system"]
            )
    if task == "preference":
        return judging.evaluate_preference(
            str(subject.directory), source, config["batch_size"], config["limit"], device, dtype
        )
    return compare(source, subject, config)


def compare(source: str, subject: Subject, config: dict) -> dict:
    """judging.win_rate of two files of answers. Raises ConfigError, JudgeError."""
    paths = [path.strip() for path in source.split(",") if path.strip()]
    if len(paths) != 2:
        raise ConfigError(f"config: win_rate needs two files of answers, got {source!r}; give --data=A.jsonl,B.jsonl")
    of_a, of_b = (judging.read_answers(path)[: config["limit"] or None] for path in paths)
    if config["people"]:
        if not Path(config["people"] + ".jsonl").exists():
            n = judging.write_side_by_side(of_a, of_b, config["people"], config["seed"])
            return {"to_choose": n, "read": config["people"] + ".html", "choose_in": config["people"] + ".jsonl"}
        ask = partial(judging.people_judge, out=config["people"])
    elif config["judge"]:
        key = os.environ[config["api_key_env"]].strip() if config["api_key_env"] else ""
        endpoint = judging.Endpoint(config["base_url"], config["judge"], key)
        ask = partial(judging.endpoint_judge, endpoint=endpoint, journal=config["out"] + ".judge")
    else:
        ask = partial(
            judging.reward_judge, model=reward_model.load(subject.directory, subject.device),
            tokenizer=Tokenizer.load(subject.directory), batch_size=config["batch_size"], dtype=subject.dtype,
        )  # fmt: skip
    return judging.win_rate(of_a, of_b, ask)


def describe_result(task: str, found: dict) -> str:
    if task in choices.TASKS:
        return choices.table(found)
    return f"{task}\n{describe_domains(found) if task == 'perplexity' else describe(found)}"


# ---- what is written ------------------------------------------------------------------------------------------------


def describe_model(directory: Path) -> dict:
    """What tells this model from any other."""
    found = {"directory": str(directory.resolve()), "weights": checkpoint.weights_key(directory)}
    if checkpoint.is_adapter(directory):
        found["base_weights"] = checkpoint.weights_key(checkpoint.base_of(directory))
    found["tokenizer"] = Tokenizer.load(checkpoint.tokenizer_dir(directory)).fingerprint()
    return found | {"architecture": dataclasses.asdict(checkpoint.load_config(directory))}


def versions() -> dict[str, str]:
    """Of Python and of what figures may depend on, as far as it is installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "tiktoken", "sentencepiece", "sacrebleu", "rouge-score"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_results(path: Path, results: dict) -> None:
    """As JSON, whole or not at all. JSON has no NaN and no infinity: they become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(path.name + ".tmp")
    temp.write_text(json.dumps(finite(results), indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    os.replace(temp, path)


def finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns: the first to the left, others to the right. Chinese characters take two places."""
    lines = [list(header), *([shown(cell) for cell in row] for row in rows)]
    widths = [max(map(display_width, column)) for column in zip(*lines, strict=True)]
    padded = []
    for line in lines:
        gaps = [" " * (width - display_width(cell)) for cell, width in zip(line, widths, strict=True)]
        cells = [line[0] + gaps[0], *(gap + cell for gap, cell in zip(gaps[1:], line[1:], strict=True))]
        padded.append("  ".join(cells).rstrip())
    return "\n".join(padded)


def shown(cell: object) -> str:
    if cell is None or cell != cell:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4f}" if abs(cell) < 1e6 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def display_width(text: str) -> int:
    """Places that a text takes in a terminal."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


DOMAIN_COLUMNS = {
    "documents": "documents", "tokens": "tokens", "nats_per_token": "nats/token", "perplexity": "perplexity",
    "bits_per_byte": "bits/byte", "bits_per_character": "bits/char", "nats_per_document": "nats/doc",
}  # fmt: skip


def describe_domains(found: dict) -> str:
    """The table of domains, then what was noticed when they were read."""
    figures = found["domains"] | ({"(all)": found["all"]} if len(found["domains"]) > 1 else {})
    rows = [[name, *(of[key] for key in DOMAIN_COLUMNS)] for name, of in figures.items()]
    notes = [f"{name}: {note}" for name, of in found["domains"].items() for note in of["notes"]]
    return "\n".join([table(["domain", *DOMAIN_COLUMNS.values()], rows), *notes])


def describe(found: dict) -> str:
    """Figures one below the other, tables of figures side by side; texts and lists are for the JSON file."""
    parts = []
    plain = [[key, value] for key, value in found.items() if isinstance(value, int | float | str)]
    if plain:
        parts.append(table(["", ""], plain).lstrip())
    for key, value in found.items():
        if isinstance(value, dict) and value and all(isinstance(item, dict) for item in value.values()):
            columns = [name for name, item in next(iter(value.values())).items() if isinstance(item, int | float)]
            parts.append(table([key, *columns], [[name, *map(item.get, columns)] for name, item in value.items()]))
        elif isinstance(value, dict) and value:
            parts.append(f"{key}: " + ", ".join(f"{name} {shown(item)}" for name, item in value.items()))
    return "\n".join(parts)


# ---- command line ---------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    config = configure(globals())
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    check_config(config)
    wanted = {} if score else parse_data(tasks, data)
    if "perplexity" in wanted:
        parse_domains(wanted["perplexity"])  # a mistake should show now
    if "generation" in wanted:
        check_libraries()
    torch_device = train_utils.choose_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    torch_dtype = train_utils.choose_dtype(dtype, torch_device)
    elsewhere = set(wanted) == {"win_rate"} and bool(judge or people)
    directory = None if elsewhere else checkpoint.resolve(init_from or checkpoint.newest_run())
    subject = Subject(directory, torch_device, torch_dtype)
    if score or set(wanted) - set(JUDGED):
        subject = load(directory, config, torch_device, torch_dtype)
    world = ddp.init(torch_device.type, timeout_s)
    if world.is_main:
        where = f"{world.world_size} x {train_utils.hardware(torch_device)}, {torch_dtype}"
        print(f"{directory or judge or people}: {where}", flush=True)
    begin, results = time.perf_counter(), {}
    if score:
        key = row_scores.scoring_key(directory, subject.tokenizer, score, subject.texts, torch_dtype)
        what = (score, Path(out), key, subject.texts, torch_device, torch_dtype, world.is_main)
        problems, notes = row_scores.score_file(subject.model, subject.tokenizer, *what)
        if world.is_main:
            print("\n".join([f"{out}: {row_scores.summary(problems)}", *notes]))
    for task, source in wanted.items():
        results[task] = measure(task, source, subject, config)
        if world.is_main:
            print(f"\n{describe_result(task, results[task])}", flush=True)
        if world.is_main and out:  # after each task: an error in a later one does not cost this one
            run = {"hardware": train_utils.hardware(torch_device), "ranks": world.world_size, "versions": versions()}
            run |= {"dtype": str(torch_dtype).removeprefix("torch."), "seconds": round(time.perf_counter() - begin, 1)}
            described = describe_model(directory) if directory else {}
            write_results(Path(out), {"settings": config, "model": described, "run": run, "results": results})
    ddp.close()
