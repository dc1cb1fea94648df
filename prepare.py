"""Turn raw files into token files for the trainers: read, clean, filter, drop copies, split, tokenize.

    python prepare.py --input='corpus/*.jsonl' --out_dir=data/x --vocab_size=32768     # trains a tokenizer of its own
    python prepare.py --input=more/,x.txt.gz --out_dir=data/y --tokenizer_dir=data/x   # uses the tokenizer of data/x
    python prepare.py --input='wiki: wiki/*.json, weight=0.6; web: web/, weight=0.4, quality=web' --out_dir=data/mix
    python prepare.py --input=chat.jsonl --kind=chat --show=5                          # prints how 5 rows are read
    python prepare.py --input=chat.jsonl --kind=chat --tokenizer_dir=data/x --out_dir=data/chat    # for sft.py
    python prepare.py --input=answers.jsonl --kind=preference --pair_by=dataset --out_dir=data/pairs     # for dpo.py
    python prepare.py --verify=data/x                                                  # checks every byte

The steps: read -> clean -> quality rules -> decontaminate -> exact copies -> near copies -> split -> tokenize. Several
processes clean and filter the input, one unit (a part of it) at a time (pipeline.py). One process then finds the copies
(selection.py), several tokenize the units, and one copies the tokens into the splits in the order of the input. The
output is the same to the byte for any number of processes.

Everything is built in a hidden directory beside out_dir, which is renamed at the end, so out_dir is never incomplete. A
run that was killed leaves the hidden directory, and the same command continues it. If the inputs, the settings and the
tokenizer are those that out_dir was made with, nothing is done; if they are others, only --overwrite=True replaces it.
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C is one line from here on
    from groundup.errors import end_in_one_line

    end_in_one_line()

import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from tqdm import tqdm

from configurator import configure, write_config
from groundup.errors import UserError
from groundup.files import readers
from groundup.files.encodings import check_codec
from groundup.files.text_keys import parse_names, parse_text_key
from groundup.text import answer_pairs, dedup, report
from groundup.text.decontaminate import Evals
from groundup.text.pipeline import inspect_unit, plan_units, run, tokenize_unit
from groundup.text.prepared_dir import DAMAGED, check_replaceable, publish, read_prepared, work_dir, work_path
from groundup.text.recipe import Counts, Input, Recipe, Source, find_inputs, look, parse_score, parse_sources, read_json
from groundup.text.selection import select, split_sources, training_texts, write_rows, write_splits
from groundup.text.show import show_rows
from groundup.tokens.foreign import TOKENIZERS, files_of
from groundup.tokens.packing import pack as pack_documents
from groundup.tokens.token_files import ROWS_FORMAT, file_sha256, token_dtype
from groundup.tokens.token_writer import write_json, write_manifest, write_record
from groundup.tokens.training import SMALLEST, train
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # files, globs, 'name: files, weight=1; ...'; - is stdin; python-docs, demo-en, demo-zh
out_dir = ""  # directory to make, for example data/x
tokenizer_dir = ""  # tokenizer to use; if missing, train it and save it there; "" = train one
chat_template_kwargs = ""  # settings of the chat template in tokenizer_dir: 'enable_thinking=False'
vocab_size = 32_768  # of the tokenizer, if one is trained
backend = "bpe"  # bpe | sentencepiece: of the tokenizer, if one is trained
pattern = "qwen"  # qwen | gpt4 | gpt2 | cl100k | zh (Chinese): how a trained bpe splits text
kind = "text"  # text | chat (conversations) | preference (pairs of answers): what a document is
text_key = ""  # fields: 'text', 'a.b', 'title,body'; rows: 'question=KEY,answer=KEY'; "" = found
txt_split = "file"  # file | blank (between blank lines) | line: what a document is in plain text
encoding = ""  # of lines that are not UTF-8, such as gb18030 or latin-1; "" = found for each file
workers = 0  # processes; 0 = one per core
show = 0  # print how the first so many rows are read, and stop
punctuation = False  # Chinese text: make punctuation full-width and remove repeated marks
# which documents are dropped
quality = "curated"  # curated (drop empty, tiny, garbled texts) | web (all rules of text/quality.py)
rules_off = ""  # rules to switch off, comma-separated
rules_on = ""  # rules to switch on, such as those of quality=web one by one
min_chars = 0  # shortest document to keep, characters; 0 = the rule's own
max_chars = 0  # longest document to keep, characters; 0 = the rule's own
keep = ""  # 'file.py:function' of your own: takes a text, returns whether to keep it
question_min_chars = 0  # chat, preference: shortest first question
question_max_chars = 0  # chat, preference: longest first question; 0 = any
score = ""  # keep rows whose own numbers are in these ranges, such as 'bpb=0.3..1.5,ifd=5%..95%'
exact = True  # drop texts equal to an earlier one apart from case and white space
near = 0.8  # drop texts with this estimated Jaccard similarity to an earlier one, or more; 0 = off
near_bands = 0  # bands of MinHash signatures; 0 = chosen from `near`
near_rows = 0  # hashes per band; 0 = chosen from `near`
decontaminate = ""  # evaluation files to keep out of training: .csv of MMLU, CMMLU, C-Eval; .jsonl
decontaminate_action = "drop"  # drop (the document) | cut (the matching text out of it)
# what is written
val_fraction = 0.01  # of the documents; of a text source with at most 10, of the characters of each
test_fraction = 0.0  # the same for the test split
hold_out = 0.0  # chat: share of first questions that sft skips; they go to held_out.jsonl
prompts_from = ""  # preference: keep pairs whose first question is in this file: held_out.jsonl
pair_by = ""  # "" (rows are pairs) | dataset | reward: make pairs of answers (answer_pairs.py)
pair_margin = 0.0  # pair_by=reward: minimum difference of the two rewards; 0 = any
length_within = 0.0  # pair_by: the longer answer may have 0.2 = 20 % more characters; 0 = any length
fold = ""  # 'i/k': part i of k is val, the rest train (cross-validation); replaces val_fraction
order = "input"  # input | hash (shuffled) | length | score (smallest first): of documents
pack = 0  # also write rows of this many tokens, for pretrain.py --pack=True; 0 = no
shard_tokens = 134_217_728  # tokens per file
# errors
strict = False  # stop at the first unreadable record; otherwise count it and go on
max_bad_fraction = 0.0  # exit status 1 if a larger share of bytes or records is lost
verify = ""  # check this prepared directory, and stop
overwrite = False  # replace out_dir, whatever it holds

VERSION = 10  # of the output; a directory of another version differs
TOKENIZER_BYTES = 2**27  # of text to train a tokenizer on; more changes little and takes minutes
PAIR_KEYS = ("pair_by", "pair_margin", "length_within")
CHOICES = {"txt_split": ("file", "blank", "line"), "quality": ("curated", "web")}  # of one source
LEAST = {"shard_tokens": 1, "vocab_size": SMALLEST}  # of other numbers 0
# Settings of one kind only, with the values that mean that they are not used.
OF_TEXT = {"quality": "curated", "order": "input", "pack": 0, "decontaminate_action": "drop"}
OF_ROWS = {"question_min_chars": 0, "question_max_chars": 0}
OF_PAIRS = {"pair_by": "", "pair_margin": 0, "length_within": 0, "prompts_from": ""}


def existing_tokenizer(
    directory: str, kind: str, template_settings: str = "", dated: Sequence[Path] = ()
) -> Tokenizer | None:
    """Return the tokenizer of a directory, None if one must be trained or none is needed. Raise UserError if it
    lacks a special token that this kind needs. dated: where the date that its template writes may be recorded."""
    exists = any((files_of(Path(directory)) / name).exists() for name in TOKENIZERS)
    if not directory or kind == "preference" or (kind == "text" and not exists):
        return None
    tokenizer = Tokenizer.load(directory).with_template_settings(template_settings, *dated)
    if kind == "chat" and tokenizer.turn_end_id < 0:
        raise UserError(f"prepare: the tokenizer in {directory} has no chat template and no <|im_end|> to mark turns")
    if kind == "chat":
        tokenizer.check_turn_end()
    if tokenizer.eot_id < 0 and kind == "text":
        raise UserError(f"prepare: the tokenizer in {directory} has no end of text, which separates documents")
    return tokenizer


def build(inputs: list[Input], recipe: Recipe, tokenizer: Tokenizer | None, work: Path, config: dict, info: dict,
          lost: Counts) -> dict:  # fmt: skip
    """Make work/out, all that out_dir will hold, and return its manifest. info: more entries for the manifest.
    lost: counts of lines that were unreadable when pairs were made."""
    out, workers = work / "out", config["workers"] or os.cpu_count() or 1
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    info |= save_evals(recipe, work)
    if tokenizer:
        tokenizer.save(out)  # where the workers load it
    units = plan_units(inputs, recipe)
    inspect = partial(inspect_unit, recipe=recipe, version=VERSION, work=work)
    counts = sum(run(inspect, units, workers, "read", work), lost)
    of_pairs = [work / f"pairs_{k}.jsonl.problems" for k in range(len(info.get("answers", [])))]
    report.write_problems(inputs, of_pairs, counts, units, work)
    chosen = select(units, recipe, work) if units else None
    report.check_kept(counts, chosen)
    parts = split_sources(chosen, units, recipe)
    report.summarize(info, inputs, counts, chosen, parts, recipe)
    if recipe.kind == "text" and tokenizer is None:
        texts = training_texts(parts, chosen, TOKENIZER_BYTES, recipe, work)
        tokenizer = train(texts, config["vocab_size"], config["backend"], config["pattern"])
        if config["tokenizer_dir"]:
            tokenizer.save(config["tokenizer_dir"])
            info["tokenizer"] = tokenizer.fingerprint()
        tokenizer.save(out)
    if tokenizer:
        dtype, chat = token_dtype(tokenizer.vocab_size).str, recipe.kind == "chat"
        threads = max(1, workers // max(1, len(units)))  # one text is one unit
        settings = {"fingerprint": tokenizer.chat_fingerprint(), "work": work, "chat": chat, "threads": threads}
        tokenize = partial(tokenize_unit, dtype=dtype, **settings)
        run(tokenize, units, workers, "tokenize", work)
    if recipe.kind == "text":
        written = write_splits(parts, chosen, recipe, tokenizer, work)
    else:
        written = write_rows(parts, chosen, tokenizer, work)
    for file in inputs:
        made = Path(file.path).is_relative_to(work)
        if not file.problem and not made and look(file.path, file.name, file.source) != file:
            raise UserError(f"prepare: {file.name} changed while it was read; run again")
    report.write_dropped(chosen, units, out)
    report.write_report(info, chosen, units, work)
    if recipe.kind == "text":
        weights = {source.name: source.weight for source in recipe.sources if source.weight}
        ids = tokenizer.vocab_size, tokenizer.eot_id, tokenizer.fingerprint()
        manifest = write_manifest(out, *ids, written, info, weights)
        if config["pack"]:
            pack_documents(out, config["pack"])
        return manifest
    manifest = {"format": ROWS_FORMAT, "kind": recipe.kind, "splits": written, "info": info}
    if tokenizer:
        manifest |= {"tokenizer_fingerprint": tokenizer.chat_fingerprint(), "vocab_size": tokenizer.vocab_size}
    write_record(out / "manifest.json", manifest)
    return manifest


def save_evals(recipe: Recipe, work: Path) -> dict:
    """Save the evaluation text to look for in `work`, where the workers load it; return its entry for the manifest."""
    if not recipe.decontaminate:
        return {}
    evals = Evals.from_files(readers.find_files(recipe.decontaminate))
    evals.save(work / "evals.npz")
    return {"decontaminate": {"items": evals.n_items, "unprotected": len(evals.unprotected)}}


# ---- the command -----------------------------------------------------------------------------


def check_config(config: dict) -> Recipe:
    """Return the recipe of a configuration. Raise UserError if a setting is invalid or has no effect."""
    kind, hold_out, near, fold = (config[key] for key in ("kind", "hold_out", "near", "fold"))
    for key in ("input", "out_dir"):
        if not config[key] and not (key == "out_dir" and config["show"]):
            raise UserError(f"config: {key} is empty; give --{key}=... (--help lists the keys)")
    sources = parse_sources(config)
    for source in sources:
        for key, allowed in CHOICES.items():
            value = getattr(source, key)
            if value not in allowed:
                raise UserError(f"config: {key} must be one of {', '.join(allowed)}, got {value!r}")
    for key, value in config.items():
        if isinstance(value, int | float) and value < LEAST.get(key, 0):
            raise UserError(f"config: {key} must be at least {LEAST.get(key, 0)}, got {value}")
    val, test = config["val_fraction"], config["test_fraction"]
    if val + test >= 1:
        raise UserError(f"config: val_fraction={val} and test_fraction={test} must leave something for train")
    if hold_out >= 1 or near > 1:
        what = f"hold_out must be from 0 to below 1, got {hold_out}; near from 0 (off) to 1, got {near}"
        raise UserError(f"config: {what}")
    part = re.fullmatch(r"(\d+)/(\d+)", fold)
    if fold and not (part and 1 <= int(part[1]) <= int(part[2]) and int(part[2]) > 1):
        raise UserError(f"config: fold={fold!r} is not i/k with 1 <= i <= k, such as 2/5")
    idle = (OF_ROWS if kind == "text" else OF_TEXT) | ({} if kind == "chat" else {"hold_out": 0})
    for key, unused in (idle | ({} if kind == "preference" else OF_PAIRS)).items():
        for settings in (config, *map(vars, sources)):
            if settings.get(key, unused) != unused:
                raise UserError(f"config: {key}={settings[key]} has no effect with kind={kind}; leave it out")
    for key, by in (("pair_margin", ("reward",)), ("length_within", ("dataset", "reward"))):
        if config[key] and config["pair_by"] not in by:
            raise UserError(f"config: {key}={config[key]} has no effect without pair_by={' or '.join(by)}")
    if kind != "text" and any(source.weight for source in sources):
        raise UserError(f"config: input: weight has no effect with kind={kind}; weigh when you train")
    for text_key in filter(None, (source.text_key for source in sources)):
        (parse_text_key if kind == "text" else parse_names)(text_key)
    for source in sources:
        check_codec(source.encoding)
    parse_score(config["score"])
    if config["order"] == "score" and not config["score"]:
        raise UserError("config: order='score' needs score, which names the number, such as score='bpb=..'")
    bands, rows = dedup.bands_for(near) if near else (0, 0)
    own = {item.name: config[item.name] for item in fields(Recipe) if item.name in config}
    own |= {"near_bands": config["near_bands"] or bands, "near_rows": config["near_rows"] or rows}
    return Recipe(**(own | {"sources": sources, "template": "", "aids": aids(config)}))


def aids(config: dict) -> str:
    """Return one sha256 of the files that settings name, as their content decides the result. Raise UserError."""
    files = [config["keep"].rpartition(":")[0]]
    for key in ("decontaminate", "prompts_from"):
        files += readers.find_files(config[key])
    try:
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files if file)).hexdigest()
    except OSError as error:
        raise UserError(f"config: cannot read {error.filename}: {error.strerror}") from None


def describe(inputs: list[Input], known: list[dict], work: Path) -> list[dict]:
    """Return the manifest's entries of the inputs. known: entries of an earlier run; the digest of a file is taken from
    there, or from a run that was killed, if its size and time are the same."""
    held = work / "digests.json"
    before = {f"{entry['path']} {entry['size']} {entry['stamp']}": entry["sha256"] for entry in known}
    before |= read_json(held)

    def entry(file: Input) -> dict:
        sha256 = file.problem or before.get(f"{file.name} {file.size} {file.stamp}") or file_sha256(Path(file.path))
        return {"path": file.name, "source": file.source, "size": file.size, "stamp": file.stamp, "sha256": sha256}

    entries = []
    bar = {"total": sum(file.size for file in inputs), "unit": "B", "unit_scale": True, "desc": "compare"}
    with ThreadPool() as threads, tqdm(**bar, disable=None) as progress:  # hashing releases the GIL
        for found in threads.imap(entry, inputs):
            entries.append(found)
            progress.update(found["size"])
    write_json(held, {f"{one['path']} {one['size']} {one['stamp']}": one["sha256"] for one in entries})
    return entries


def difference(info: dict, old: dict) -> str:
    """Return what differs between this run and a directory whose manifest has the info `old`, "" if nothing does."""
    if not old:
        return "nothing complete is there yet"
    if old.get("prepare") != VERSION:
        return "the version of prepare.py"
    now, was = (
        {key: one.get(key) for key in ("tokenizer", "answers")}
        | {key: value for key, value in one["recipe"].items() if key != "sources"}
        | {f"{key} of {source['name']}".removesuffix(" of "): value for source in one["recipe"]["sources"]
           for key, value in source.items() if key != "name" and value != getattr(Source, key)}
        | {f"input {entry['path']}": [entry["source"], entry["sha256"]] for entry in one["inputs"]}
        for one in (info, old)
    )  # fmt: skip
    changed = [name for name in was | now if was.get(name) != now.get(name)]
    both = was["tokenizer"], now["tokenizer"]
    if "tokenizer" in changed and all(of.startswith("trained") for of in both):
        changed[changed.index("tokenizer")] = f"tokenizer ({' -> '.join(both)})"
    return ", ".join(changed[:5]) or ("the order of the inputs" if list(was) != list(now) else "")


def read_inputs(recipe: Recipe, config: dict, work: Path) -> tuple[list[Input], list[dict], Counts]:
    """Return the inputs, with pairs instead of answers, and what `answer_pairs.replace_answers` tells about these."""
    inputs = find_inputs(recipe.sources, Path(config["out_dir"]), work, recipe.kind)
    unreadable = [f"prepare: cannot read {file.name}: {file.problem}" for file in inputs if file.problem]
    if unreadable and (recipe.strict or len(unreadable) == len(inputs)):
        raise UserError(unreadable[0])
    return answer_pairs.replace_answers(inputs, config, work) if config["pair_by"] else (inputs, [], Counts())


def main(config: dict) -> int:
    """Prepare out_dir, or verify, or show. Return the exit status: 1 if a file could not be read to its end."""
    if config["verify"]:
        report.print_splits(read_prepared(Path(config["verify"]), every_byte=True))
        print(f"prepare: {config['verify']} is as it was written")
        return 0
    start, recipe, out_dir = time.perf_counter(), check_config(config), Path(config["out_dir"])
    out_dir = out_dir.resolve() if out_dir.is_symlink() else out_dir  # the directory that a link leads to is replaced
    dated = (work_path(out_dir) / "out", out_dir)  # an unfinished run, or a finished one
    tokenizer = existing_tokenizer(config["tokenizer_dir"], recipe.kind, config["chat_template_kwargs"], dated)
    if recipe.kind == "chat" and tokenizer and tokenizer.foreign_template:
        recipe = replace(recipe, template=tokenizer.chat_fingerprint())
    if config["show"]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "units").mkdir()
            save_evals(recipe, Path(folder))
            inputs, _, _ = read_inputs(recipe, config, Path(folder))
            if tokenizer:
                tokenizer.save(Path(folder, "out"))  # where the rules load it
            elif config["tokenizer_dir"]:
                tokenizer = Tokenizer.load(config["tokenizer_dir"])
            return show_rows(inputs, recipe, config["show"], tokenizer, Path(folder))
    with work_dir(out_dir) as work:
        inputs, answers, lost = read_inputs(recipe, config, work)
        try:
            manifest = read_prepared(out_dir)
        except DAMAGED:
            manifest = {}
        to_train = f"trained, {config['backend']} {config['vocab_size']} {config['pattern']}"
        before = manifest.get("info", {})
        info = {
            "prepare": VERSION,
            "recipe": recipe.settings() | {key: config[key] for key in ("pack", *PAIR_KEYS)},
            "tokenizer": tokenizer.chat_fingerprint() if tokenizer else to_train if recipe.kind == "text" else "none",
            "inputs": describe(inputs, before.get("inputs", []) if before.get("prepare") == VERSION else [], work),
        } | ({"answers": answers} if answers else {})
        why = difference(info, before)
        if why:
            check_replaceable(out_dir, config["overwrite"], why if before else "", work)
            if out_dir.exists():
                print(f"prepare: {out_dir} is made anew: {why}")
            manifest = build(inputs, recipe, tokenizer, work, config, info, lost)
            again = config | {"overwrite": False}  # to run it again must not delete anything
            write_config(again, str(work / "out" / "config.py"), command=f"python prepare.py {out_dir}/config.py")
            publish(work, out_dir)
            report.print_report(manifest, time.perf_counter() - start)
    print(f"prepare: {out_dir} is {'done' if why else 'up to date'}")
    return report.exit_status(manifest["info"], len(inputs), config["max_bad_fraction"])


if __name__ == "__main__":
    sys.exit(main(configure(globals())))
