"""Which questions of an evaluation a model was tuned on, by what its runs say in their config.py."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from configurator import defaults_of, script_of, split_names
from groundup.errors import UserError, counted
from groundup.files import row_formats, turns
from groundup.files.splits import dialogue_text
from groundup.files.turns import BadRow
from groundup.tokens.pairs import usable_pair
from groundup.tokens.rows import RowReader, paths_of, read_source, scored_path
from groundup.train import checkpoint

KINDS = {"sft.py": "chat", "dpo.py": "preference", "reward.py": "preference"}  # of their data
MOST_RUNS = 9  # of a chain, such as sft.py after pretrain.py; a run may have started from itself


class PromptReader(RowReader):
    """Reads the text before the last answer of a conversation, or before both answers of a pair."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.split_by_prompt = kind == "preference"

    def item(self, row: object, place: str) -> tuple[str, str]:
        if self.kind == "preference":
            prompt = dialogue_text(usable_pair(row).prompt)
            return prompt, prompt
        messages, problem = row_formats.messages_of(row)
        if problem:
            raise BadRow(problem)
        talk = turns.trim_chat(messages)
        return dialogue_text(talk), dialogue_text(talk[:-1])


def warnings_of(data: str, kind: str, directory: Path) -> list[str]:
    """Return a line for each run behind a checkpoint that was trained on questions of `data`.

    kind: of the data to evaluate, chat or preference. Data that have moved are not compared."""
    asked = []
    for path in filter(None, split_names(data)):
        with suppress(UserError):  # the evaluation says it
            asked += read_source(scored_path(path, kind), PromptReader(kind), 0.0).train
    lines = []
    for run, script, settings in runs_behind(directory):
        seen: set[str] = set()
        val_fraction = 0.0 if settings["val_data"] else settings["val_fraction"]
        for path in paths_of(settings["data"]):
            with suppress(UserError):
                seen.update(read_source(path, PromptReader(KINDS[script]), val_fraction).train)
        if n := sum(prompt in seen for prompt in asked):
            what = f"{run.name} was trained on {n:,} of these {counted(len(asked), 'question')}"
            begun = "" if run == directory.resolve().parent else ", and the model began with it"
            text = f"{what} (data={settings['data']!r}){begun}: scores may be too good"
            lines.append(f"warning: {text}; questions kept by prepare.py --hold_out would be new")
    return lines


def runs_behind(directory: Path) -> Iterator[tuple[Path, str, dict]]:
    """Yield (directory, script, settings) of the runs of KINDS that led to a checkpoint, the last
    one first."""
    for _ in range(MOST_RUNS):
        run = directory.resolve().parent
        script = script_of(run / "config.py")
        if not script:
            return
        settings = defaults_of(run / "config.py")
        if script in KINDS:
            yield run, script, settings
        if not settings["init_from"]:
            return
        try:
            directory = checkpoint.resolve(settings["init_from"], rewards=True)
        except UserError:  # it is gone, or the run began with new weights
            return
