"""Prompts for a model to answer, with the rows that they come from: the data of rl.py.

    --data='questions.jsonl,chats.json.gz'   # raw files, weighted by their prompts
    --data='data/x=0.7,maths/*.jsonl=0.3'    # a directory of prepare.py --kind=chat, and a glob

A prompt is a conversation without the assistant's last answer, or the prompt of a preference pair,
or a question alone. It is rendered up to the opened turn of the assistant. It keeps the whole row,
where a reward function may look for the right answer. A prompt that leaves no room for
max_new_tokens in block_size is left out: no answer is cut by the block.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from groundup.files.answer_files import conversation_of
from groundup.files.splits import dialogue_text
from groundup.files.turns import BadRow, with_system
from groundup.tokens.mixture import Mixture
from groundup.tokens.rows import RowCorpus, RowReader
from groundup.tokens.templates import take_tools

REDRAW = 1_000_003  # between the seeds of two orders


class Prompt(NamedTuple):
    messages: list[dict]  # up to the question
    ids: list[int]  # with the opened turn of the assistant
    row: dict  # of the data
    place: str  # of the row, "file:line"


def prompt_of(row: object) -> list[dict]:
    """Return the messages to answer in a row of any format that sample.py reads, too.

    Raise BadRow."""
    try:
        return conversation_of(row if isinstance(row, dict) else {"row": row}, {})[0]
    except BadRow as problem:
        raise BadRow("no prompt", problem.detail or problem.reason) from None


class PromptReader(RowReader):
    """Reads prompts of at most `longest` tokens."""

    noun, split_by_prompt = "prompt", True
    kinds = ("chat", "preference", "question")
    unread_are = "not in the prompts"  # but a reward function has the whole row
    tools: Sequence[dict] = ()  # schemas of what each prompt offers

    def item(self, row: object, place: str) -> tuple[str, Prompt]:
        messages = prompt_of(row)
        if self.tools:  # of the run: the same for all prompts
            if take_tools(messages)[1] is not None:
                raise BadRow("tools of its own", "--tools offers others")
            messages = with_system(messages, {"tools": list(self.tools)})
        # as chat and serving open the turn of the assistant
        ids, _ = self.tokenizer.render(messages, add_generation_prompt=True)
        if len(ids) > self.longest:
            how = "lower max_new_tokens"
            if self.longest < self.context:
                how = f"raise block_size or {how}"
            reason = f"longer than {self.longest} tokens: no room for an answer; {how}"
            raise BadRow(reason, f"{len(ids)} tokens")
        self.count_not_written(messages)
        kept = row if isinstance(row, dict) else {"row": row}
        return dialogue_text(messages), Prompt(messages, ids, kept, place)


class Prompts:
    """The prompts of one split of one source. A row is a prompt, see `RowCorpus`."""

    counts: dict[str, int] = {}  # PromptReader counts what is left out
    needs: dict[str, list[int]] = {}

    def __init__(self, name: str, prompts: list[Prompt]) -> None:
        self.name = name
        self.prompts = prompts
        self.n_rows = len(prompts)
        self.n_labels = np.ones(len(prompts), np.int64)
        self.n_used = np.array([len(prompt.ids) for prompt in prompts], np.int64)
        digest = hashlib.sha256()
        # with the row, because a reward may depend on any key of it
        for prompt in prompts:
            digest.update(json.dumps([prompt.ids, prompt.row], default=str).encode())
        self.fingerprint = digest.hexdigest()


@dataclass(eq=False)
class PromptCorpus(RowCorpus):
    """The prompts that `data` names. train, val: Prompts. Raise UserError.

    held_out: the prompts of all of val.
    """

    tools: Sequence[dict] = ()  # schemas of what each prompt offers

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held_out = [prompt for source in self.val.values() for prompt in source.prompts]

    def reader(self) -> PromptReader:
        reader = PromptReader(self.tokenizer, self.block_size)
        reader.tools = self.tools
        return reader

    def lay_out(self, name: str, items: list[Prompt]) -> Prompts:
        return Prompts(name, items)

    def redrawn_order(self, per_step: int, attempt: int = 0) -> Mixture:
        """Return the order of prompts, `per_step` a step; another one for each attempt."""
        # max_steps=0: prompts come again, epoch after epoch, as long as the run asks
        return self.order(self.seed + REDRAW * attempt, per_step, max_steps=0)

    def take(self, order: Mixture, samples: np.ndarray) -> list[Prompt]:
        """Return the prompts of these samples (n,)."""
        sources, rows = order.starts_of(samples)
        places = zip(sources.tolist(), rows.tolist(), strict=True)
        return [self.train[source].prompts[row] for source, row in places]
