"""Prompts for a model to answer, with the rows that they come from: what rl.py draws answers to.

    --data='questions.jsonl,chats.json.gz'   # raw files, in proportion to their prompts
    --data='data/x=0.7,maths/*.jsonl=0.3'    # a directory of prepare.py --kind=chat, and a glob

A prompt is a conversation up to the assistant's last answer, which is not shown; of a preference pair, what both sides
answer; or a row's "prompt" alone, a text or messages. The whole row goes with it: a reward function may look there for
the right answer. A prompt is rendered up to the opened turn of the assistant. One that leaves no room for
max_new_tokens in block_size is left out, and counted: no answer is cut by the block.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, row_formats
from groundup.text.pipeline import Recipe, said, split_position
from groundup.text.selection import assign
from groundup.tokens.answer_pairs import NoPair, conversation_of
from groundup.tokens.batches import stage_quotas
from groundup.tokens.chat_files import Reader, read_manifest
from groundup.tokens.conversations import names_of
from groundup.tokens.mixture import Mixture, Sampler, parse_data_dir, parse_weights
from tokenizer import Tokenizer

REDRAW = 1_000_003  # between the seeds of two orders


class Prompt(NamedTuple):
    messages: list[dict]  # up to the question
    ids: list[int]  # with the opened turn of the assistant
    row: dict  # of the data
    place: str  # of the row, "file:line"


class Source(NamedTuple):
    """What one path holds."""

    train: list[Prompt]
    val: list[Prompt]
    dropped: Counter  # rows that cannot be used, by reason
    places: list[str]  # "file:line: reason" of the first few of each reason


# ---- files ----------------------------------------------------------------------------------------------------------


def prompt_of(row: object) -> tuple[list[dict], str]:
    """(messages, "") or ([], what is wrong) of a row of any shape."""
    messages, detail = row_formats.messages_of(row)
    if detail:
        pair, _ = row_formats.pair_of(row)
        try:
            messages = pair.prompt if pair else conversation_of(row, {})[0] if isinstance(row, dict) else []
        except NoPair:
            return [], detail
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        return [], detail or "no question before the answer"
    problem = row_formats.chat_problem([*messages, {"role": "assistant", "content": "answer"}])
    return ([], problem) if problem else (messages, "")


class PromptReader(Reader):
    """Reads prompts out of files, counting what is left out."""

    def prompts(self, path: str, tokenizer: Tokenizer, longest: int) -> Iterator[Prompt]:
        for record in readers.read_records(path):
            self.n_read += 1
            messages, reason, detail, place = [], record.problem, record.detail, f"{path}:{record.line}"
            row = None if reason else readers.mend(record.value)[0]
            if not reason:
                messages, detail = prompt_of(row)
                reason = "no prompt" if detail else ""
            ids = [] if reason else tokenizer.render(messages, add_generation_prompt=True)[0]
            if len(ids) > longest:
                reason, detail = f"longer than {longest} tokens: no room for an answer", f"{len(ids)} tokens"
            if reason:
                self._drop(place, reason, detail)
                continue
            yield Prompt(messages, ids, row if isinstance(row, dict) else {"row": row}, place)

    def check(self, name: str, n_found: int) -> None:
        """Raise DataError if there is nothing to answer."""
        if n_found:
            return
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items()) or "no row in it"
        first = f"; first: {self.places[0]}" if self.places else ""
        raise UserError(f"data: {name} holds no usable prompt ({reasons}){first}")


def read_source(path: str, tokenizer: Tokenizer, longest: int, val_fraction: float) -> Source:
    """The prompts of a raw file, a glob, a directory of raw files or one of prepare.py --kind=chat, which has its own
    validation split; of others val_fraction, by a hash of the prompt. Raises DataError."""
    reader, found = PromptReader(), []
    if (Path(path) / "manifest.json").exists():
        entries = read_manifest(Path(path))["splits"]
        files = [str(Path(path) / entries[split]["file"]) if split in entries else "" for split in ("train", "val")]
        train, val = (list(reader.prompts(file, tokenizer, longest)) if file else [] for file in files)
        reader.check(path, len(train) + len(val))
        return Source(train, val, reader.dropped, reader.places)
    for file in readers.find_files(path):
        found += reader.prompts(file, tokenizer, longest)
    reader.check(path, len(found))
    positions = [split_position(said(prompt.messages).encode()) for prompt in found]
    splits, _ = assign(np.array(positions, np.uint64), Recipe(kind="preference", val_fraction=val_fraction))
    train, val = (list(itertools.compress(found, splits == k)) for k in (0, 1))
    return Source(train, val, reader.dropped, reader.places)


# ---- several sources ------------------------------------------------------------------------------------------------


class Prompts:
    """The sources that a `data` string names (mixture.py has its syntax).

    names: what the log calls them. train: the prompts of each. val: those that are held out, of all: of val_data if it
    is given, else of the sources. longest: most tokens of a prompt. Raises DataError."""

    def __init__(
        self, spec: str, tokenizer: Tokenizer, longest: int, seed: int, val_data: str = "", val_fraction: float = 0.02
    ) -> None:
        stages = parse_data_dir(spec, "data")
        paths = list(dict.fromkeys(path for stage in stages for path in stage.weights))
        self.names, self.seed = names_of(paths), seed
        self.found = [read_source(path, tokenizer, longest, 0.0 if val_data else val_fraction) for path in paths]
        self.train = [source.train for source in self.found]
        for name, prompts in zip(self.names, self.train, strict=True):
            if not prompts:
                raise UserError(f"data: nothing to train on in {name}: its training split is empty")
        others = parse_weights(val_data, val_data, "val_data") if val_data else {}
        held_out = [read_source(path, tokenizer, longest, 0.0) for path in others]
        self.val = [prompt for source in held_out or self.found for prompt in (source.val or held_out and source.train)]
        counts = dict(zip(paths, map(len, self.train), strict=True))
        self.stages = []
        for stage in stages:
            weights = {path: counts[path] if weight is None else weight for path, weight in stage.weights.items()}
            self.stages.append((stage.first_step, [float(weights.get(path, 0.0)) for path in paths]))

    @property
    def n_train(self) -> int:
        return sum(map(len, self.train))

    def order(self, per_step: int, attempt: int = 0) -> Mixture:
        """Which prompt every sample is, `per_step` samples a step; for each further attempt another order."""
        seed = self.seed + REDRAW * attempt
        samplers = [
            Sampler(2 * len(prompts), 1, seed, k, packed=True, name=self.names[k])
            for k, prompts in enumerate(self.train)
        ]  # a prompt is a row of two tokens to it
        stages = [(step * per_step, weights) for step, weights in self.stages]
        return Mixture(samplers, seed, stages, self.names)

    def take(self, order: Mixture, samples: np.ndarray) -> list[Prompt]:
        """The prompts of these samples (n,)."""
        sources, starts = order.start(np.asarray(samples, dtype=np.int64))
        return [self.train[k][start // 2] for k, start in zip(sources.tolist(), starts.tolist(), strict=True)]

    def record(self) -> dict[str, list]:
        """What, besides options and seed, decides the order, see data.same_order."""
        digests = []
        for prompts in self.train:
            digest = hashlib.sha256()
            for prompt in prompts:
                digest.update(json.dumps([prompt.ids, prompt.row], default=str).encode())
            digests.append(digest.hexdigest())
        return {"data": digests, "stages": stage_quotas(self.stages)}

    def report(self) -> list[str]:
        """Lines for people: what there is of each source, and what became of the rest."""
        lines = []
        for name, prompts, found in zip(self.names, self.train, self.found, strict=True):
            mean = sum(len(prompt.ids) for prompt in prompts) / len(prompts)
            lines.append(f"{name}: {len(prompts):,} prompts for training, on average {mean:.1f} tokens")
            lines += [f"{name}: {count:,} left out: {reason}" for reason, count in found.dropped.items()]
            lines += found.places
        trained = {tuple(prompt.ids) for prompts in self.train for prompt in prompts}
        n_twice = sum(tuple(prompt.ids) in trained for prompt in self.val)
        lines.append(f"held out: {len(self.val):,} prompts")
        return lines + ([f"warning     {n_twice:,} of these are trained on, too"] if n_twice else [])
