"""Turn raw files into token files: read, clean, filter, drop copies, split, tokenize.

    python prepare.py --input='corpus/*.jsonl' --out_dir=data/x --vocab_size=32768
    python prepare.py --input=more/,x.txt.gz --out_dir=data/y --tokenizer_dir=data/x   # that of x
    python prepare.py --input='w: wiki/, weight=2; c: cc/, weight=1, quality=web' --out_dir=data/z
    python prepare.py --input=chat.jsonl --kind=chat --show=5                   # print 5 rows
    python prepare.py --input=chat.jsonl --kind=chat --tokenizer_dir=data/x --out_dir=data/chat
    python prepare.py --input=answers.jsonl --kind=preference --pair_by=dataset --out_dir=data/pairs
    python prepare.py --verify=data/x                                           # every byte

The steps: read -> clean -> quality rules -> decontaminate -> exact copies -> near copies -> split
-> tokenize. Several processes clean and filter the input, one unit (a part of it) at a time
(groundup/text/unit.py). One then finds the copies (groundup/text/select.py), several tokenize the
units, and one writes the splits in the order of the input. The output is the same to the byte for
any number of processes.

All is built in a hidden directory beside out_dir, which is renamed at the end. A run that was
killed leaves it, and the same command continues. If the inputs, the settings and the tokenizer are
those that out_dir was made with, nothing is done; only --overwrite=True replaces others.
"""

if __name__ == "__main__":  # before the slow imports: from here on Ctrl-C prints one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from configurator import configure, defaults_of, write_config
from groundup.errors import UserError
from groundup.files.paths import find_files
from groundup.text import answer_pairs, dedup, inputs, prepared_dir, report
from groundup.text import select as selection
from groundup.text.decontaminate import Evals
from groundup.text.inputs import Input, find_inputs
from groundup.text.recipe import VERSION, Recipe, check_config, say_unused
from groundup.text.show import show_rows
from groundup.text.unit import Counts, Unit, inspect_unit, plan_units, tokenize_unit
from groundup.text.workers import worker_pool
from groundup.tokens.packing import pack as pack_documents
from groundup.tokens.text_tokenizer import TOKENIZERS, find_tokenizer
from groundup.tokens.training import train
from tokenizer import OWNERS, Tokenizer

# ---- config: override with a config file or --key=value; see --help ------------------------------
input = ""  # files, globs, 'name: files, weight=1; ...'; - = stdin; python-docs, demo-en, demo-zh
out_dir = ""  # directory to make, for example data/x
tokenizer_dir = ""  # its folder; if it is missing, train one and save it there; "" = train one
chat_template_kwargs = ""  # of the tokenizer's chat template, such as 'enable_thinking=False'
vocab_size = 32_768  # of a tokenizer that is trained
pattern = "qwen"  # qwen | gpt4 | gpt2 | cl100k | zh (Chinese): how a trained tokenizer splits text
kind = "text"  # text | chat (conversations) | preference (pairs of answers): what a document is
text_key = ""  # 'text', 'a.b', 'title,body'; of chats, pairs: 'question=KEY,answer=KEY'; "" = found
txt_split = "file"  # file | blank (between blank lines) | line: what a document is in plain text
encoding = ""  # of lines that are not UTF-8, such as gb18030; "" = detected for each file
workers = 0  # processes; 0 = one per core
show = 0  # print how this many rows of each source are read, and stop; 0 = prepare them
# which documents are dropped
quality = "curated"  # curated (drop tiny and garbled texts) | web (all rules, see docs/data.md)
rules = ""  # 'length=30..5000, stop_words=off, keep=my.py:good, punctuation=on'; see docs/data.md
score = ""  # keep rows whose numbers are in these ranges, such as 'bpb=0.3..1.5,ifd=5%..95%'
near = 0.8  # drop texts this similar to an earlier one; 0 = exact copies only, -1 = keep all copies
decontaminate = ""  # evaluation files: drop texts with their questions; 'cut: files' cuts these out
# what is written
val_fraction = 0.01  # of the documents; of at most 40, or of long beside short ones: the ends
test_fraction = 0.0  # the same for the test split
fold = ""  # 'i/k': part i of k is val, the rest train (cross-validation); replaces val_fraction
hold_out = 0.0  # chat: share of first questions kept out of sft.py; they go to held_out.jsonl
prompts_from = ""  # preference: keep pairs whose first question is in this file, a held_out.jsonl
pair_by = ""  # pairs of sample.py's answers: 'dataset' or 'reward, margin=0.5, length_within=0.2'
pack = 0  # also write rows of this many tokens, for pretrain.py --pack=True; 0 = no
# errors
strict = False  # stop at the first unreadable record; False = count it and go on
max_bad_fraction = 0.0  # exit with status 1 if a larger share of bytes or records is unreadable
verify = ""  # check every byte of this prepared directory, and stop
overwrite = False  # replace an out_dir that was made with other inputs or settings

CONFIGS = Path(__file__).with_name("config")
NEXT = {  # script, and its configs: for a model of ours on a CPU, on a GPU, for a published model
    "text": ("pretrain.py", "demo", "small", "continue"),
    "chat": ("sft.py", "demo_sft", "sft", "real_sft"),
    "preference": ("dpo.py", "demo_dpo", "dpo", "real_dpo"),
}
LEAST_BLOCK, LARGEST_BLOCK = 64, 2**30  # of an advised command
TOKENIZER_BYTES = 2**27  # of text to train a tokenizer on; more changes little and takes minutes


def existing_tokenizer(
    directory: str, kind: str, template_settings: str = "", dated: Sequence[Path] = ()
) -> Tokenizer | None:
    """Return the tokenizer of a directory, None if one must be trained or none is needed.

    dated: directories that may record the date that its template writes. Raise UserError if it
    lacks a special token that this kind needs."""
    # a model or a tokenizer in another form gets no new tokenizer: `load` says what is missing
    names = (*TOKENIZERS, *OWNERS, "vocab.json", "tekken.json")
    exists = any((find_tokenizer(Path(directory)) / name).exists() for name in names)
    if not directory or kind == "preference" or (kind == "text" and not exists):
        return None
    tokenizer = Tokenizer.load(directory).with_template_settings(template_settings, *dated)
    if kind == "chat":
        tokenizer.check_turn_end()
    elif tokenizer.eot_id < 0:
        lacks = f"the tokenizer in {directory} has no end of text, which separates documents"
        raise UserError(f"prepare: {lacks}")
    return tokenizer


def build(
    files: list[Input], recipe: Recipe, tokenizer: Tokenizer | None, work: Path, config: dict,
    info: dict, lost: Counts,
) -> dict:  # fmt: skip
    """Make work/out, all that out_dir will hold, and return its manifest.

    info: entries of the manifest, completed here; info["inputs"] are the lines of inputs.tsv. lost:
    what could not be read when pairs were made."""
    out, n_workers = work / "out", config["workers"] or os.cpu_count() or 1
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    info |= save_evals(recipe, work)
    if tokenizer:
        tokenizer.save(out)  # where the workers load it
    units = plan_units(files)
    with worker_pool(min(n_workers, len(units)), work) as map_units:
        counts = inspect_units(units, recipe, map_units, work)
        inputs.check_unchanged(files, work)
        counts.add(lost)
        chosen, parts = choose_documents(files, units, counts, recipe, work, info)
        if recipe.kind == "text" and tokenizer is None:
            texts = selection.training_texts(parts, TOKENIZER_BYTES)
            tokenizer = train(texts, config["vocab_size"], "bpe", config["pattern"])
            tokenizer.save(out)
            if config["tokenizer_dir"]:
                tokenizer.save(config["tokenizer_dir"])
                info["tokenizer"] = tokenizer.fingerprint()
        if tokenizer:
            threads = max(1, n_workers // max(1, len(units)))  # one text is one unit
            settings = {"fingerprint": tokenizer.chat_fingerprint(), "threads": threads}
            tokenize = partial(tokenize_unit, kind=recipe.kind, work=work, **settings)
            chosen.tokenized = map_units(tokenize, units, "tokenize")
        # What is written first is encoded first, so both go on at a time.
        write = selection.write_splits if recipe.kind == "text" else selection.write_rows
        manifest = write(parts, chosen, tokenizer, info)
        for _ in chosen.tokenized:  # all are: this ends the bar that shows them
            pass
    report.write_report(manifest, chosen)
    if config["pack"]:
        pack_documents(out, config["pack"])
    return manifest


def inspect_units(units: list[Unit], recipe: Recipe, map_units: Callable, work: Path) -> Counts:
    """Read, clean and filter all units, and return their counts, added up in their order."""
    total, inspect = Counts(), partial(inspect_unit, recipe=recipe, work=work)
    for counts in map_units(inspect, units, "read"):
        total.add(counts)
        if recipe.near > 0:
            dedup.check_number(total.passed.total())
    return total


def choose_documents(
    files: list[Input], units: list[Unit], counts: Counts, recipe: Recipe, work: Path, info: dict
) -> tuple[selection.Selection, list[selection.SourceDocs]]:
    """Drop copies, and decide the splits. Write all tables and reports, and what became of the
    input into `info`."""
    of_pairs = [work / f"pairs_{k}.jsonl.problems" for k in range(len(info.get("answers", [])))]
    report.write_problems(files, of_pairs, counts, units, work)
    inputs.add_digests(info["inputs"], files, counts.digests)
    info["inputs"] = inputs.write(info["inputs"], work / "out")
    chosen = selection.select(units, recipe, work)
    report.check_kept(counts, chosen)
    parts = selection.split_sources(chosen)
    info |= report.summarize(files, counts, chosen, parts, recipe)
    report.write_dropped(chosen)
    return chosen, parts


def save_evals(recipe: Recipe, work: Path) -> dict:
    """Save the evaluation text to look for in `work`, where the workers load it; return its entry
    for the manifest."""
    if not recipe.decontaminate:
        return {}
    evals = Evals.from_files(find_files(recipe.evaluation_files))
    evals.save(work / "evals.npz")
    return {"decontaminate": {"items": evals.n_items, "unprotected": evals.n_unprotected}}


def read_inputs(recipe: Recipe, config: dict, work: Path) -> tuple[list[Input], list[dict], Counts]:
    """Return the files to read, with pairs instead of answers, and what
    `answer_pairs.replace_answers` tells about these. Raise UserError if none can be read."""
    files = find_inputs(recipe.sources, Path(config["out_dir"]), work, recipe.kind)
    unreadable = [file for file in files if file.problem]
    if unreadable and (recipe.strict or len(unreadable) == len(files)):
        first = unreadable[0]
        raise UserError(f"prepare: cannot read {first.name}: {first.problem}")
    if not config["pair_by"]:
        return files, [], Counts()
    return answer_pairs.replace_answers(
        files, config["pair_by"], config["score"], config["strict"], work
    )


def show_first(config: dict, recipe: Recipe, tokenizer: Tokenizer | None) -> int:
    """Print how the first rows are read; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "units").mkdir()
        save_evals(recipe, work)
        files, _, _ = read_inputs(recipe, config, work)
        if tokenizer:
            tokenizer.save(work / "out")  # where the rules load it
        elif config["tokenizer_dir"]:
            tokenizer = Tokenizer.load(config["tokenizer_dir"])
        return show_rows(files, recipe, config["show"], tokenizer, work)


def main(config: dict) -> int:
    """Prepare out_dir, or verify, or show. Return the exit status: 1 if something is lost."""
    if config["verify"]:
        report.print_splits(prepared_dir.read_prepared(Path(config["verify"]), every_byte=True))
        print(f"prepare: {config['verify']} is as it was written")
        return 0
    recipe, out_dir = check_config(config), Path(config["out_dir"])
    out_dir = out_dir.resolve() if out_dir.is_symlink() else out_dir  # replace what a link leads to
    # The date that a template writes may be recorded by an unfinished run, or by a finished one.
    dated = (prepared_dir.work_path(out_dir) / "out", out_dir)
    tokenizer = existing_tokenizer(
        config["tokenizer_dir"], recipe.kind, config["chat_template_kwargs"], dated
    )
    if tokenizer:
        say_unused(config, tokenizer.vocab_size)
    if recipe.kind == "chat" and tokenizer and tokenizer.foreign_template:
        recipe = replace(recipe, template=tokenizer.chat_fingerprint())
    if config["show"]:
        return show_first(config, recipe, tokenizer)
    with prepared_dir.work_dir(out_dir) as work:
        return make_out_dir(config, recipe, tokenizer, out_dir, work)


def next_command(kind: str, out_dir: Path, tokenizer_dir: str, longest: int = LARGEST_BLOCK) -> str:
    """Return the command that trains on out_dir: that in the docstring of a config which names
    out_dir as its data, or a general one, whose own out_dir is that of no config.

    longest: block_size that the data has a window of."""
    if longest < LEAST_BLOCK:
        what = f"this has windows of {longest} tokens, and a run needs at least {LEAST_BLOCK}"
        return f"more text, or a larger --val_fraction with --overwrite=True: {what}"
    script, small, large, published = NEXT[kind]
    key = "data_dir" if kind == "text" else "data"
    directory = Path(tokenizer_dir or os.devnull)
    is_run = any((place / "log.jsonl").exists() for place in (directory, directory.parent))
    has_model = (directory / "config.json").exists() and not is_run  # a published one
    owned = set()
    for path in sorted(CONFIGS.glob("*.py")):
        settings, text = defaults_of(path), path.read_text(encoding="utf-8")
        owned.add(settings.get("out_dir"))
        command = re.search(rf"python {script} config/{path.name}[^#\n]*", text)
        if command and re.search(r"path/|plan_only|\\", command[0]):  # needs more, or only plans
            command = None
        is_its_data = os.path.abspath(settings.get(key) or os.devnull) == os.path.abspath(out_dir)
        other_model = has_model and settings.get("init_from") != tokenizer_dir.rstrip("/")
        if command and is_its_data and not other_model:
            return command[0].rstrip() + shorter_block(path.stem, longest)

    flags = {"init_from": tokenizer_dir if has_model or is_run else "MODEL"}
    if kind == "text" and not has_model:
        flags = {}
    name = f"out/{out_dir.name}"
    flags |= {key: str(out_dir), "out_dir": f"out/my_{out_dir.name}" if name in owned else name}
    written = " ".join(f"--{key}={shlex.quote(value)}" for key, value in flags.items())
    first = published if has_model else small
    command = f"python {script} config/{first}.py {written}{shorter_block(first, longest)}"
    # on a line of its own, so that the command can be copied
    on_gpu = f"\n(on a GPU with config/{large}.py{shorter_block(large, longest)})"
    return command + ("" if has_model else on_gpu)


def shorter_block(name: str, longest: int) -> str:
    """Return the flag that a config needs for data with no longer windows, "" if it needs none."""
    usual = defaults_of(CONFIGS.with_name("pretrain.py")) | defaults_of(CONFIGS / f"{name}.py")
    if usual["block_size"] <= longest:
        return ""
    return f" --block_size={1 << longest.bit_length() - 1}"  # a power of two


def make_out_dir(
    config: dict, recipe: Recipe, tokenizer: Tokenizer | None, out_dir: Path, work: Path
) -> int:
    """Make out_dir in `work`, unless it is up to date. Return the exit status."""
    start = time.perf_counter()
    files, answers, lost = read_inputs(recipe, config, work)
    manifest, before_files = prepared_dir.read_earlier(out_dir)
    before, by = manifest.get("info", {}), "none"
    if recipe.kind == "text":
        by = f"trained, bpe {config['vocab_size']} {config['pattern']}"
    info = {
        "prepare": VERSION,
        "recipe": recipe.settings() | {key: config[key] for key in ("pack", "pair_by")},
        "tokenizer": tokenizer.chat_fingerprint() if tokenizer else by,
        "inputs": inputs.describe(files, before_files),
    }
    if answers:
        info["answers"] = answers
    why = prepared_dir.what_changed(info, before, before_files)
    if why:
        prepared_dir.check_replaceable(out_dir, config["overwrite"], why if before else "", work)
        if out_dir.exists():
            print(f"prepare: {out_dir} is made anew: {why}")
        manifest = build(files, recipe, tokenizer, work, config, info, lost)
        command = f"python prepare.py {out_dir}/config.py"  # which must not delete anything
        write_config(config | {"overwrite": False}, str(work / "out/config.py"), command=command)
        prepared_dir.publish(work, out_dir)
        report.print_report(manifest, time.perf_counter() - start)
    state = "done" if why else "up to date"
    longest = report.longest_block(manifest) if recipe.kind == "text" else LARGEST_BLOCK
    following = next_command(recipe.kind, out_dir, config["tokenizer_dir"], longest)
    # What is missing comes before the next command, which ends what most people read.
    status = report.exit_status(manifest["info"], len(files), config["max_bad_fraction"])
    lacking = " without what could not be read" if status else ""
    print(f"prepare: {out_dir} is {state}{lacking}, with report.md; next: {following}")
    return status


if __name__ == "__main__":
    sys.exit(main(configure(globals())))
