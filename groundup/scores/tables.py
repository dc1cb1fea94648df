"""Results as tables for people: a task's figures, alone or beside those of other models."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from groundup.errors import UserError, counted
from groundup.files.untrusted import read_json
from groundup.generate.answers import width_of
from groundup.scores import choices, judging, text_metrics

DOMAIN_COLUMNS = {
    "documents": "documents",
    "tokens": "tokens",
    "nats_per_token": "nats/token",
    "perplexity": "perplexity",
    "bits_per_byte": "bits/byte",
    "bits_per_character": "bits/char",
    "nats_per_document": "nats/doc",
}
# Names of figures for people; others are shown as they are.
FIGURES = {
    "exact_match": "exact match",
    "rouge_l": "ROUGE-L",
    "bleu_13a": "BLEU (13a), of 100",
    "bleu_13a_n": "answers in BLEU (13a)",
    "bleu_zh": "BLEU (zh), of 100",
    "bleu_zh_n": "answers in BLEU (zh)",
    "self_stop": "stops on its own",
    "empty": "empty answers",
    "mean_tokens": "tokens per answer",
    "ece": "calibration error",
    "longer_wins": "longer answer wins",
    "length_correlation": "correlation with length",
}
# What "n" counts
COUNTED = {"generation": "answers", "preference": "pairs", "win_rate": "comparisons"}
# Results that differ in one of these cannot be compared.
SAME_SETTINGS = ("limit", "max_new_tokens", "shots", "block_size", "stride", "txt_split")
SAME_SETTINGS += ("text_key", "chat_template_kwargs", "reference")


def describe(
    task: str, found: dict, others: Mapping[str, dict] | None = None, name: str = "this"
) -> str:
    """Return the results of a task as text.

    others: {name: results of all tasks} of other models; name: of this one."""
    if others:
        columns = {other: results[task] for other, results in others.items()}
        # the last one; "this" is out/sft beside an earlier out/sft
        columns[name if name not in columns else "this"] = found
        columns, notes = comparable(task, columns)
        return "\n".join([task, side_by_side(task, columns), *notes])
    if task == "perplexity":
        return f"{task}\n{describe_domains(found)}"
    if task in choices.TASKS:
        return describe_choices(found)
    # Single figures in lines, then dicts; lists are for the JSON file only.
    parts = [task, table(["", ""], list(map(list, figures_of(task, found).items()))).lstrip()]
    for key, of in found.items():
        if isinstance(of, dict) and of:
            items = ", ".join(f"{name} {shown(item)}" for name, item in of.items())
            parts.append(f"{key}: {items}")
    return "\n".join(parts)


def describe_domains(found: dict) -> str:
    figures = domains_of(found)
    lines = [[name, *(of[key] for key in DOMAIN_COLUMNS)] for name, of in figures.items()]
    notes = [f"{name}: {note}" for name, of in found["domains"].items() for note in of["notes"]]
    return "\n".join([table(["domain", *DOMAIN_COLUMNS.values()], lines), *notes])


def domains_of(found: dict) -> dict[str, dict]:
    """Return {domain: its figures}, of several also "(all)"."""
    return found["domains"] | ({"(all)": found["all"]} if len(found["domains"]) > 1 else {})


def describe_choices(found: dict) -> str:
    """Return the accuracies in per cent with their standard errors: of all questions, by group,
    by subject."""
    mean, subjects = found["subject_mean"], found["subjects"] if len(found["subjects"]) > 1 else {}
    lines = [f"{found['task']}, {found['shots']} shots", *(f"  {note}" for note in found["notes"])]
    for key, what in (("fewer_shots", "had fewer examples"), ("cut", "lost the beginning")):
        lines += [f"  {counted(found[key], 'prompt')} {what} to fit"] if found[key] else []
    cells = []
    for name, of in ({"overall": found["overall"]} | found["groups"] | subjects).items():
        cells.append([name, of["n"], f"{100 * of['chance']:.1f}"])
        for measure in mean:
            error = of[f"{measure}_stderr"]
            error = "" if error is None else f" +- {100 * error:.1f}"
            cells[-1].append(f"{100 * of[measure]:.1f}{error}")
    if subjects:
        cells.append(["mean of subjects", "", "", *(f"{100 * of:.1f}" for of in mean.values())])
    return "\n".join([*lines, table(["", "n", "chance", *mean], cells)])


def table(header: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    """Return aligned columns: the first to the left, others to the right. What is wider than the
    terminal gets its columns as lines, if that helps."""
    lines = [list(header), *([shown(cell) for cell in row] for row in cells)]
    wide, width = aligned(lines), terminal_width()
    if width and width_of_lines(wide) > width:
        turned = aligned(list(zip(*lines, strict=True)))
        return turned if width_of_lines(turned) <= width else wide
    return wide


def terminal_width() -> int:
    """Return the columns of the terminal; 0 where there is none, such as in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def width_of_lines(text: str) -> int:
    return max(map(width_of, text.splitlines()))


def aligned(lines: Sequence[Sequence[str]]) -> str:
    widest = [max(map(width_of, column)) for column in zip(*lines, strict=True)]
    padded = []
    for row in lines:
        gaps = [" " * (most - width_of(cell)) for cell, most in zip(row, widest, strict=True)]
        padded.append("  ".join([row[0] + gaps[0], *map(str.__add__, gaps[1:], row[1:])]).rstrip())
    return "\n".join(padded)


def shown(cell: object) -> str:
    """Return a figure as text: (low, high) as an interval, "-" for None and NaN."""
    if cell is None or cell != cell:  # NaN is not equal to itself
        return "-"
    if isinstance(cell, tuple):
        return " to ".join(map(shown, cell))
    if isinstance(cell, float):
        return f"{cell:.4f}" if abs(cell) < 1e6 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


# ---- several models ------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows in the results of a task, each with what was measured on it."""

    field: str  # that holds them
    identity: tuple[str, ...]  # keys that say which row it is, whatever model was measured
    figures: Callable[[dict, list[dict]], dict]  # (results, some of their rows) -> figures of these


ROWS = {
    "generation": Rows(
        "answers", ("prompt", "reference"), lambda _, rows: text_metrics.measure_rows(rows)[0]
    ),
    "preference": Rows(
        "pairs", ("row",), lambda found, rows: judging.measure_pairs(rows, "ece" in found)
    ),
    "win_rate": Rows("matches", ("prompt", "a", "b"), lambda _, rows: judging.tally_rows(rows)),
}
of_exam = Rows(
    "records",
    ("question", "right"),
    lambda found, rows: choices.results_of(rows, found["task"], found["shots"]),
)
ROWS |= dict.fromkeys(choices.TASKS, of_exam)


def comparable(task: str, columns: Mapping[str, dict]) -> tuple[dict[str, dict], list[str]]:
    """Return ({model: figures on what all models were measured on}, a line if that is not all).

    columns: {model: results of the task}. A model with a short context is measured on fewer rows
    than the others, and data may have changed between two runs."""
    if task == "perplexity":
        return of_same_texts(columns)
    if task not in ROWS:
        return dict(columns), []
    field, identity, figures = ROWS[task]
    keys = {}
    for name, found in columns.items():
        keys[name] = [json.dumps([row[key] for key in identity]) for row in found[field]]
    common = set.intersection(*map(set, keys.values()))
    noun = "questions" if task in choices.TASKS else field
    left_out = [sum(key not in common for key in own) for own in keys.values()]
    counts = ", ".join(f"{name} {n:,}" for name, n in zip(keys, left_out, strict=True))
    if not common:
        *_, (name, own) = columns.items()
        return {name: own}, [f"nothing to compare: no {noun} in common ({counts})"]
    if not any(left_out):
        return dict(columns), []
    kept = {}
    for name, found in columns.items():
        pairs = zip(found[field], keys[name], strict=True)
        kept[name] = figures(found, [row for row, key in pairs if key in common])
    return kept, [f"{noun} left out, which not all models have: {counts}"]


def of_same_texts(columns: Mapping[str, dict]) -> tuple[dict[str, dict], list[str]]:
    """Return the results on the same texts as the last one, and a line for each of the others."""
    # Bytes and documents say which text it was, whatever the tokenizer.
    sizes = {}
    for name, found in columns.items():
        sizes[name] = {
            domain: f"{counted(of['documents'], 'document')}, {of['bytes']:,} bytes"
            for domain, of in found["domains"].items()
        }
    *_, own = sizes.values()
    kept = {name: found for name, found in columns.items() if sizes[name] == own}
    notes = []
    for name in [name for name in columns if name not in kept]:
        domain = next(key for key in own | sizes[name] if own.get(key) != sizes[name].get(key))
        theirs, ours = sizes[name].get(domain, "none"), own.get(domain, "none")
        notes.append(f"{name} left out: it read other texts of {domain} ({theirs}; now {ours})")
    return kept, notes


def side_by_side(task: str, columns: Mapping[str, dict]) -> str:
    """Return a table with a line for each figure and a column for each model."""
    figures = {name: figures_of(task, found) for name, found in columns.items()}
    # One model may lack a figure of another: BLEU (zh), say, if it answered no Chinese question.
    # A dict keeps the order of the figures.
    names = list(dict.fromkeys(key for of in figures.values() for key in of))
    what = "bits/byte" if task == "perplexity" else ""
    lines = [[key, *(of.get(key) for of in figures.values())] for key in names]
    return table([what, *figures], lines)


def figures_of(task: str, found: dict) -> dict[str, object]:
    """Return {name for people: figure} of a task's results; one with a standard error has it."""
    if task == "perplexity":
        return {name: of["bits_per_byte"] for name, of in domains_of(found).items()}
    figures: dict[str, object] = {}
    if task in choices.TASKS:
        for name, of in ({"overall": found["overall"]} | found["groups"]).items():
            for measure in found["subject_mean"]:
                figures[f"{name}, {measure}, %"] = 100 * of[measure]
        return figures
    for key, of in found.items():
        if key == "left_out" and of:  # {reason: how many}
            figures["left out"] = sum(of.values())
        if key == "interval" and of:
            of = tuple(of)  # in a JSON file it is a list
        # Questions, answers and notes are no figures; an error stands beside its figure.
        if isinstance(of, dict | list) or key.endswith(("_signature", "_se")):
            continue
        error = found.get(f"{key}_se")
        with_error = error is not None and error == error
        name = COUNTED.get(task, key) if key == "n" else FIGURES.get(key, key)
        figures[name] = f"{shown(of)} +- {error:.4f}" if with_error else of
    return figures


def read_others(beside: str, wanted: Mapping[str, str], config: Mapping) -> dict[str, dict]:
    """Return {name of the model: its results} of the files in `beside`.

    Raise UserError for one that lacks a task or was measured in another way."""
    others = {}
    for path in filter(None, map(str.strip, beside.split(","))):
        run = read_json(path, "config: beside", "give files that evaluate.py wrote to out")
        results, settings = run.get("results") or {}, run.get("settings") or {}
        # any JSON may come: look at the types before the contents
        data = run.get("data") or {}
        parts = [results, settings, data]
        parts += results.values() if isinstance(results, dict) else []
        if not all(isinstance(part, dict) for part in parts):
            raise UserError(f"config: beside: {path} is no file that evaluate.py wrote to out")
        if missing := [task for task in wanted if task not in results]:
            raise UserError(f"config: beside: {path} has no results of {', '.join(missing)}")
        for task, source in wanted.items():
            check_columns(task, results[task], path)
            if task not in data:
                what = "does not say on which data; write it again with this version"
                raise UserError(f"config: beside: {path} {what}")
            if data[task] != source:
                what = f"was measured with data={data[task]!r}, not {source!r}"
                raise UserError(f"config: beside: {path} {what}")
        for key in SAME_SETTINGS:
            if settings.get(key) != config[key]:
                what = f"was measured with {key}={settings.get(key)!r}, not {config[key]!r}"
                raise UserError(f"config: beside: {path} {what}")
        name = name_of(settings.get("init_from") or settings.get("judge") or path)
        others[name if name not in others else path] = results
    return others


def check_columns(task: str, found: dict, path: str) -> None:
    """Raise UserError if the results of a file lack what a comparison needs."""
    if task == "generation":
        text_metrics.check_libraries()
    try:
        columns, _ = comparable(task, {path: found})
        side_by_side(task, columns)
        if task in ROWS:
            ROWS[task].figures(found, found[ROWS[task].field])
    except (LookupError, TypeError, AttributeError, ValueError):
        what = f"has no results of {task} that can be compared; write it again"
        raise UserError(f"config: beside: {path} {what}") from None


def name_of(directory: str) -> str:
    """Return a short name of a model: out/sft/step_000100 is "sft"."""
    path = Path(directory)
    is_step = path.name.startswith("step_") or path.name in ("latest", "best", "best2")
    return path.parent.name if is_step and path.parent.name else path.name or "this"
