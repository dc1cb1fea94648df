"""What of the data to be scored a model was trained on, by what its runs have left.

That is config.py of each run behind a checkpoint, and for texts the inputs.tsv that prepare.py
wrote. Texts are compared as files, questions one by one. Data that have moved are not compared.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from configurator import defaults_of, script_of, split_names
from groundup.errors import UserError, counted, listed
from groundup.files import row_formats, turns
from groundup.files.splits import dialogue_text
from groundup.scores.domains import Domain, parse_domains
from groundup.text import inputs
from groundup.tokens.mixture import parse_data_dir
from groundup.tokens.pairs import usable_pair
from groundup.tokens.prompts import prompt_of
from groundup.tokens.rows import RowReader, paths_of, read_source, scored_path
from groundup.tokens.token_files import file_sha256
from groundup.train import checkpoint

# kind of the rows of a task, and of the data of a script
KIND_OF_TASK = {"generation": "chat", "preference": "preference"}
KIND_OF_SCRIPT = {"sft.py": "chat", "dpo.py": "preference", "reward.py": "preference"}
KIND_OF_SCRIPT["rl.py"] = "chat"
MOST_RUNS = 9  # behind each other, such as sft.py after pretrain.py; one may name itself


class Run(NamedTuple):
    directory: Path
    script: str  # such as sft.py
    settings: dict
    is_last: bool  # of those behind a checkpoint: it wrote the checkpoint


def warnings_of(wanted: Mapping[str, str], directory: Path) -> list[str]:
    """Return a line for each run behind a checkpoint that was trained on data of an evaluation.

    wanted: {task: data}."""
    lines = []
    for task, data in wanted.items():
        if task == "perplexity":
            lines += warnings_of_texts(parse_domains(data), directory)
        elif task in KIND_OF_TASK:
            lines += warnings_of_questions(data, KIND_OF_TASK[task], directory)
    return lines


def runs_behind(directory: Path) -> Iterator[Run]:
    """Yield the runs that led to a checkpoint, the last one first."""
    for number in range(MOST_RUNS):
        # tools/merge.py takes the run's config.py along
        own = directory / "config.py"
        path = directory if own.exists() else directory.resolve().parent
        script = script_of(path / "config.py")
        if not script:
            return
        try:
            settings = defaults_of(path / "config.py")
            yield Run(path, script, settings, number == 0)
            source = settings.get("init_from", "")
            if not source:
                return
            directory = checkpoint.resolve(source, rewards=True)
        except (SyntaxError, ValueError):  # somebody edited the file, or the directory is gone
            return


# ---- texts ---------------------------------------------------------------------------------------


def warnings_of_texts(domains: Sequence[Domain], directory: Path) -> list[str]:
    """Return a line for each run of pretrain.py whose data were made of files of the domains."""
    lines = []
    for run in runs_behind(directory):
        known = training_files(run)
        sizes = {size for size, _ in known}
        found = {}
        for path in (path for domain in domains for path in domain.files):
            # few have the size of a training file: only these are read
            size = os.path.getsize(path) if os.path.isfile(path) else -1
            key = (size, file_sha256(Path(path)) if size in sizes else "")
            if key in known:
                found[path] = known[key]
        if found:
            who = "was" if run.is_last else f"began with {run.directory.name}, which was"
            made = listed(list(dict.fromkeys(found.values())))
            what = f"this model {who} trained on most of {listed(list(found), 3)}"
            card = os.path.relpath(run.directory / "README.md")
            why = f"({made} was made of it), so the loss is too low"
            lines.append(f"warning: {what} {why}; that of the val split is in {card}")
    return lines


def training_files(run: Run) -> dict[tuple[int, str], str]:
    """Return {(size, sha256) of a file: directory that prepare.py made of it} of a run."""
    if run.script != "pretrain.py":
        return {}
    stages = parse_data_dir(run.settings["data_dir"])
    paths = [path for stage in stages for path in stage.weights]
    return {(one["size"], one["sha256"]): path for path in paths for one in inputs.read(Path(path))}


# ---- questions -----------------------------------------------------------------------------------


class PromptReader(RowReader):
    """Reads the text before the last answer of a conversation, or before both answers of a pair."""

    def __init__(self, kind: str, split_by_prompt: bool) -> None:
        """split_by_prompt: as the script splits them that trains on the rows."""
        super().__init__()
        self.kind, self.split_by_prompt = kind, split_by_prompt

    def item(self, row: object, place: str) -> tuple[str, str]:
        asked = usable_pair(row).prompt if self.kind == "preference" else prompt_of(row)
        prompt = whole = dialogue_text(asked)
        if not self.split_by_prompt:
            whole = dialogue_text(turns.trim_chat(row_formats.messages_of(row)[0]))
        return whole, prompt


def warnings_of_questions(data: str, kind: str, directory: Path) -> list[str]:
    """Return a line for each run that was tuned on questions of `data`, whose rows are of `kind`."""
    asked = []
    for path in filter(None, split_names(data)):
        with suppress(UserError):  # the evaluation says it
            asked += read_source(scored_path(path, kind), PromptReader(kind, True), 0.0).train
    lines = []
    for run in runs_behind(directory):
        seen = training_prompts(run)
        if n := sum(prompt in seen for prompt in asked):
            what = f"{run.directory.name} was trained on {n:,} of these "
            what += f"{counted(len(asked), 'question')} (data={run.settings['data']!r})"
            begun = "" if run.is_last else ", and the model began with it"
            hint = "questions kept by prepare.py --hold_out would be new"
            lines.append(f"warning: {what}{begun}: scores may be too good; {hint}")
    return lines


def training_prompts(run: Run) -> set[str]:
    """Return the prompts that a run was tuned on, without those that it held out itself."""
    if run.script not in KIND_OF_SCRIPT:
        return set()
    settings, found = run.settings, set()
    val_fraction = 0.0 if settings["val_data"] else settings["val_fraction"]
    for path in paths_of(settings["data"]):
        with suppress(UserError):  # it has moved
            reader = PromptReader(KIND_OF_SCRIPT[run.script], run.script != "sft.py")
            found.update(read_source(path, reader, val_fraction).train)
    return found
