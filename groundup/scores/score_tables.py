"""The scores of evaluate.py as text for people: aligned tables, and notes on how the files were read.

    describe_domains(domains.evaluate_domains(...))   describe_choices(choices.evaluate_choices(...))
    describe_figures(...)  -> any other dict of figures: those of generated.py and judging.py

What they were computed from, every question and answer, is in the JSON file, not here.
"""

import unicodedata
from collections.abc import Sequence

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


def describe_choices(found: dict) -> str:
    """The accuracies in per cent with their standard errors: of all questions, by group, by subject."""
    measures, subjects = list(found["subject_mean"]), found["subjects"]
    lines = [f"{found['task']}, {found['shots']} shots", *(f"  {note}" for note in found["notes"])]
    for key, what in (("fewer_shots", "had fewer examples"), ("cut", "lost their beginning")):
        if found[key]:
            lines.append(f"  {found[key]} prompts {what} to fit")
    scores = {"overall": found["overall"]} | found["groups"] | (subjects if len(subjects) > 1 else {})
    rows = []
    for name, of in scores.items():
        shares = (percent(of[measure], of[f"{measure}_stderr"]) for measure in measures)
        rows.append([name, of["n"], f"{100 * of['chance']:.1f}", *shares])
    if len(subjects) > 1:
        rows.append(["mean of subjects", "", "", *(percent(share, None) for share in found["subject_mean"].values())])
    return "\n".join([*lines, table(["", "n", "chance", *measures], rows)])


def percent(share: float, error: float | None) -> str:
    return f"{100 * share:.1f}" + ("" if error is None else f" +- {100 * error:.1f}")


def describe_figures(found: dict) -> str:
    """Figures one below the other, then tables of figures side by side; lists are for the JSON file."""
    parts = []
    plain = [[key, value] for key, value in found.items() if not isinstance(value, dict | list)]
    if plain:
        parts.append(table(["", ""], plain).lstrip())
    for key, value in found.items():
        if isinstance(value, dict) and value and all(isinstance(item, dict) for item in value.values()):
            columns = [name for name, item in next(iter(value.values())).items() if isinstance(item, int | float)]
            parts.append(table([key, *columns], [[name, *map(item.get, columns)] for name, item in value.items()]))
        elif isinstance(value, dict) and value:
            parts.append(f"{key}: " + ", ".join(f"{name} {shown(item)}" for name, item in value.items()))
    return "\n".join(parts)


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
    """A figure as a table has it; (low, high) as an interval, "-" for None and NaN."""
    if cell is None or cell != cell:
        return "-"
    if isinstance(cell, tuple):
        return " to ".join(map(shown, cell))
    if isinstance(cell, float):
        return f"{cell:.4f}" if abs(cell) < 1e6 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def display_width(text: str) -> int:
    """Places that a text takes in a terminal."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
