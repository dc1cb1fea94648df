"""Rows of files as training data: read, counted, held out, weighted. For sft, dpo, reward and rl.

On the way from a file to a batch:

    record   what stands at one place of a file, with that place (files/records.py)
    row      its content, such as a JSON object (files/row_formats.py)
    item     what training takes from a row: a tokenized conversation or pair, or a prompt
    sample   what the order of samples counts (mixture.py): an item, or several that are packed

Where files are read a row is a row of a file; where batches are made it is a sample, which becomes
a row of the tensors (a pair becomes two). So `n_rows` of a source is its number of samples.

A `RowReader` makes items of rows and counts those that it cannot use, with the reason. A raw file
has no validation split of its own: a hash of the text decides which items are held out, as in
prepare.py. The files are raw ones, or a directory of prepare.py.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from groundup.errors import UserError, counted, say
from groundup.files import records, row_formats, untrusted
from groundup.files.paths import find_files
from groundup.files.splits import FEW_VAL, assign, more_rows_for_val, split_position
from groundup.files.turns import JOIN, BadRow
from groundup.tokens.batches import Corpus, names_of
from groundup.tokens.coverage import unfamiliar
from groundup.tokens.mixture import Mixture, Sampler, Stage, parse_data_dir, parse_weights
from groundup.tokens.token_files import read_manifest, verify_sha256
from tokenizer import Tokenizer

STRANGE = "not understood"
SHOWN = 3  # lines that are named for each reason
RAISE = "; block_size="  # how the advice begins to raise it
SHORTEN = (
    "give shorter rows, or a model with a longer context, which pretrain.py --block_size decides"
)
TRIED = 200  # texts on which the tokenizer is tried
TRIED_CHARS = 5_000  # of each of them: a million characters take half a second


class ItemList(list):
    """Items of one source, as they are read. Another store has these two methods: append, take."""

    def take(self, chosen: np.ndarray) -> list:
        """Return the items that chosen (n,) bool marks."""
        return [item for item, own in zip(self, chosen.tolist(), strict=True) if own]


class RowReader:
    """Makes items of one kind (conversations, pairs, prompts) and counts the rows left out.

    A subclass defines item(row, place), which returns (the text whose hash decides the split, the
    item) of a row, or raises BadRow."""

    kind, noun = "chat", "conversation"  # kind: of row_formats.FORMATS
    # all kinds that it reads, the first that fits a row; () = only `kind`
    kinds: tuple[str, ...] = ()
    unread_are = "not read"
    split_by_prompt = False  # rows with the same prompt belong to the same split

    context: float = math.inf  # most tokens that the model reads, for advice

    def __init__(self, tokenizer: Tokenizer | None = None, longest: int = 0) -> None:
        """longest: most tokens of an item, for some kinds."""
        self.tokenizer = tokenizer
        self.longest = longest
        self.dropped: Counter[str] = Counter()  # rows by the reason why they cannot be used
        # of those that are too long: the block_size that each needs
        self.needs: dict[str, list[int]] = defaultdict(list)
        self.places: list[str] = []  # "file:line: reason" of the first few for each reason
        self.named: set[str] = set()  # reasons with details that `places` has: they are named once
        self.notes: list[str] = []  # what else people should know
        # Rows by their keys that hold content and are not read
        self.unread: Counter[str] = Counter()
        self.n_read = 0
        self.texts: list[str] = []  # beginnings of the first ones, for `unfamiliar`
        self.trimmed = 0  # conversations that lost turns after the assistant's last one
        self.not_written: Counter[str] = Counter()  # parts of rows, by the chat template

    def new_store(self) -> Any:
        """Return an empty collection for the items of a source: see ItemList."""
        return ItemList()

    def read(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield what `item` returns for each usable row of a file."""
        for record in records.read_records(path):
            self.n_read += 1
            place = f"{path}:{record.line}"
            try:
                if record.problem:
                    raise BadRow(record.problem, record.detail)
                row = untrusted.mended(record.value)
                try:
                    found = self.item(row, place)
                except UserError as error:  # such as turns that a template does not take
                    raise BadRow("not rendered", str(error)) from None
                for key in row_formats.unread_keys(row, *(self.kinds or (self.kind,))):
                    self.unread[key] += 1
                if len(self.texts) < TRIED:
                    self.texts.append(found[0][:TRIED_CHARS])
                yield found
            except BadRow as problem:
                self._leave_out(problem, place)

    def count_not_written(self, messages: Sequence[dict]) -> None:
        """Count what the chat template does not write of a conversation."""
        if lost := self.tokenizer.left_out(messages):
            self.not_written += lost

    def _leave_out(self, problem: BadRow, place: str) -> None:
        """Count a row that cannot be used, and name the first ones."""
        detail = " ".join(problem.detail.split())
        said = f"{problem.reason}{detail and f': {detail}'}"
        # what is wrong with every row is said once
        if self.dropped[problem.reason] < SHOWN and not (detail and said in self.named):
            self.places.append(f"{place}: {said}")
            self.named.add(said)
        self.dropped[problem.reason] += 1

    def check(self, name: str, n_found: int) -> None:
        """Raise UserError if nothing usable was found in `name`."""
        if n_found:
            return
        if not self.n_read:
            raise UserError(f"data: {name} is empty: no row in it")
        first = self.places[0]
        if self.n_read == self.dropped[STRANGE]:
            raise UserError(f"data: {name} holds no {self.noun}s; first: {first}")
        reasons = ", ".join(reasons_of(self.dropped, self.needs, self.context))
        raise UserError(f"data: {name} holds no usable {self.noun} ({reasons}); first: {first}")

    def report(self, name: str) -> list[str]:
        """Return lines for people: how many rows cannot be used, why, and where the first are."""
        left_out = {f"left out: {reason}": n for reason, n in self.dropped.items()}
        needs = {f"left out: {reason}": sizes for reason, sizes in self.needs.items()}
        lines = [f"{name}: {line}" for line in reasons_of(left_out, needs, self.context)]
        lines += self.places + self.notes
        if self.tokenizer and (problem := unfamiliar(self.texts, self.tokenizer)):
            lines.append(f"warning     {name}: {problem}")
        for what, n in self.not_written.items():
            lines.append(f"{name}: not written by the chat template: {what} ({n:,})")
        if self.trimmed:
            trimmed = counted(self.trimmed, "conversation")
            lines.append(f"{name}: {trimmed} lost turns after the last answer")
        if self.unread:
            lines.append(f"{name}: {self.unread_are}: {row_formats.describe_unread(self.unread)}")
        return lines


def reasons_of(
    counts: Mapping[str, int], needs: Mapping[str, list[int]], context: float = math.inf
) -> list[str]:
    """Return how many rows were left out or cut for each reason, and what the user can do about it.

    needs: for some reasons, the block_size that each of the rows needs. context: the largest one
    that the model reads."""
    lines = []
    for reason, n in counts.items():
        remedy = f"; {JOIN}" if reason.endswith("turns in a row") else ""
        if reason in needs:
            remedy = longer_rows(sorted(needs[reason]), context)
        lines.append(f"{n:,} {reason}{remedy}")
    return lines


def longer_rows(needs: Sequence[int], context: float) -> str:
    """Return which block_size takes rows that are too long, as the end of a sentence.

    needs: the tokens of each, ascending. context: as in `reasons_of`."""
    fitting = [size for size in needs if size <= context]
    longer = needs[len(fitting) :]
    remedy = ""
    if fitting:
        most, longest = (min(size, context) for size in sizes_for(fitting))
        which = "them all" if len(needs) > 1 else "it"
        remedy = f"{RAISE}{longest} takes {f'{len(fitting):,} of them' if longer else which}"
        if most < longest and not longer:
            remedy = f"{RAISE}{most} takes 90 % of them, {longest} all"
    if longer:
        most, longest = sizes_for(longer)
        enough = f"{longest} would do"
        if most < longest:
            enough = f"{most} would do for 90 % of them, {longest} for all"
        which = f"for {len(longer):,} of them " if fitting else ""
        remedy += f"; {which}even {context} tokens are too few ({enough}): {SHORTEN}"
    return remedy


def sizes_for(needs: Sequence[int]) -> tuple[int, int]:
    """Return (block_size for nine in ten, block_size for all) of rows that need so many tokens.

    needs: ascending."""
    # Powers of two, which a batch of so many tokens can be divided by. A single long row may
    # cost much memory, so nine in ten have a number of their own.
    nine_in_ten = needs[math.ceil(0.9 * len(needs)) - 1]
    return 1 << (nine_in_ten - 1).bit_length(), 1 << (needs[-1] - 1).bit_length()


class Source(NamedTuple):
    """The items of one source."""

    train: Sequence
    val: Sequence  # those held out
    reader: RowReader  # what was left out


def read_source(path: str, reader: RowReader, val_fraction: float, setting: str = "data") -> Source:
    """Return the items of a raw file, a glob, a directory of raw files, or one of prepare.py.

    The last has its own splits; of the others val_fraction is held out. setting: that names the
    path, for an error message."""
    store = reader.new_store()
    # An array of small numbers says where each item goes; the items are held once.
    if Path(path, "manifest.json").exists():
        splits = read_manifest(path, reader.kind)["splits"]
        marks = array("b")
        for split in ("train", "val"):
            if split in splits:
                file = Path(path, splits[split]["file"])
                verify_sha256(file, splits[split]["sha256"])
                for _, item in reader.read(str(file)):
                    store.append(item)
                    marks.append(split == "val")
        held_out = np.array(marks, bool)
    else:
        positions = array("Q")
        for file in find_files(path, setting):
            for text, item in reader.read(file):
                store.append(item)
                positions.append(split_position(text.encode()))
        by_prompt = reader.split_by_prompt
        # held out are the lowest hashes: rows that are added or removed move few of the others
        split_of, moved = assign(np.array(positions, np.uint64), val_fraction, by_prompt=by_prompt)
        if moved:
            none = f"{val_fraction=:g} of {counted(len(positions), 'row')} picked none"
            reader.notes.append(f"{path}: {none}, so one is held out for validation")
        held_out = split_of != 0
    reader.check(path, len(held_out))
    return Source(store.take(~held_out), store.take(held_out), reader)


def scored_path(path: str, kind: str) -> str:
    """Return the file of the validation split of a directory of prepare.py, other paths as they
    are. Raise UserError if its rows are of another kind."""
    if not Path(path, "manifest.json").exists():
        return path
    splits = read_manifest(path, kind)["splits"]
    return str(Path(path, splits["val"]["file"])) if "val" in splits else path


# ---- the sources of a run --------------------------------------------------------------------

FEW_STEPS = 5  # the learning rate has to rise and fall within them


@dataclass(eq=False)
class RowCorpus(Corpus):
    """A Corpus of files and directories of rows, as the settings `data` and `val_data` name them.

    A subclass has `reader`, a new RowReader, and `lay_out(name, items)`, which returns data with
        name, n_rows, fingerprint
        n_used      (n_rows,) number of ids of each row, without padding
        n_labels    (n_rows,) number of those that are learned
        counts      {what happened to conversations: how many}
        needs       of those that are too long, {the same: the block_size that each needs}
    """

    data: str
    tokenizer: Tokenizer
    block_size: int  # most tokens of a row
    seed: int
    val_data: str = ""
    val_fraction: float = 0.02
    # the largest block_size that the model reads: no larger one is advised
    context: float = field(default=math.inf, kw_only=True)

    def __post_init__(self) -> None:
        """Read and lay out all sources. Raise UserError."""
        self._open_train()
        self._open_val()
        # laid out, the items are there a second time: free them
        self.sources = [source._replace(train=(), val=()) for source in self.sources]
        self.val_sources = [source._replace(train=(), val=()) for source in self.val_sources]

    def read(self, path: str, val_fraction: float, setting: str) -> Source:
        reader = self.reader()
        reader.context = self.context
        return read_source(path, reader, val_fraction, setting)

    def with_validation(self, sources: list[Source]) -> list[Source]:
        """Return the sources with a row for validation. `read_source` has seen to it, but not for
        conversations: which of them are too long shows later, so their corpus overrides this."""
        return sources

    def _open_train(self) -> None:
        self.paths = paths_of(self.data)
        self.names = names_of(self.paths)
        # with validation data of their own, nothing is held out of the training data
        val_fraction = 0.0 if self.val_data else self.val_fraction
        self.sources = [self.read(path, val_fraction, "data") for path in self.paths]
        if val_fraction:
            self.sources = self.with_validation(self.sources)
        pairs = zip(self.names, self.sources, strict=True)
        self.train = [self.lay_out(name, source.train) for name, source in pairs]
        for data, source in zip(self.train, self.sources, strict=True):
            if not data.n_rows:
                reasons = ", ".join(reasons_of(data.counts, data.needs, self.context))
                why = f"{data.name}: {reasons or 'no row for training'}"
                how = "give more rows"
                if data.needs:
                    how = "give shorter rows" + ", or raise block_size" * (RAISE in reasons)
                if not reasons and len(source.val):
                    why = f"{data.name}: all {counted(len(source.val), 'row')} are for validation"
                    how = "lower val_fraction"
                raise UserError(f"data: nothing to train on in {why}; {how}")
        self.n_rows = sum(data.n_rows for data in self.train)
        stages = parse_data_dir(self.data, "data")
        self.stages = [(stage.first_step, self.weights_of(stage)) for stage in stages]

    def _open_val(self) -> None:
        weights = parse_weights(self.val_data, self.val_data, "val_data") if self.val_data else {}
        self.val_names = names_of(list(weights))
        self.val_sources = [self.read(path, 0.0, "val_data") for path in weights]
        held_out = dict(zip(self.names, (source.val for source in self.sources), strict=True))
        if self.val_data:
            # of a directory of prepare.py its validation split, of a raw file all items
            items = (one.val if len(one.val) else one.train for one in self.val_sources)
            held_out = dict(zip(self.val_names, items, strict=True))
        self.all_val = [self.lay_out(name, items) for name, items in held_out.items()]
        self.val = {data.name: data for data in self.all_val if data.n_rows}
        # a weight that is not given is the number of labels
        self.val_weights = {
            name: weight or float(self.val[name].n_labels.sum())
            for name, weight in zip(self.val_names, weights.values(), strict=True)
            if name in self.val
        }

    def n_items(self, data: Any) -> int:
        """Return how many items the rows of `data` hold."""
        return data.n_rows

    def need_validation(self, val_fraction: float) -> None:
        """Raise UserError if no row is held out, with what was left out and why. Warn of few."""
        readers = [source.reader for source in self.val_sources or self.sources]
        if self.val:
            n = sum(map(self.n_items, self.val.values()))
            few = f"{counted(n, readers[0].noun)} held out for validation"
            n_rows = n + sum(map(self.n_items, self.train))
            more = more_rows_for_val(n, n_rows, val_fraction)
            # a directory of prepare.py has its own split, which the trainer's setting does not move
            prepared = any(Path(path, "manifest.json").exists() for path in self.paths)
            more = f"prepare.py {more}" if prepared and more.startswith("--") else more
            how = "give more in val_data" if self.val_data else more
            self.few_val = n < FEW_VAL
            if self.few_val:
                say(f"warning     {few}: too few to trust the val loss; {how}")
            return
        # what was lost on the way says what to change
        lost = left_out(readers, self.all_val, self.context)
        if not self.val_sources and (self.n_rows > 1 or not val_fraction):
            how = f"raise val_fraction above {val_fraction:g}"
        else:
            how = "give more rows"
        if RAISE in lost:
            how += ", raise block_size"
        nothing = f"no {readers[0].noun} is held out for validation{lost}"
        raise UserError(f"data: {nothing}; {how} or name others in val_data")

    def left_out(self) -> str:
        """Return what was left out of the training data, see the function."""
        return left_out([source.reader for source in self.sources], self.train, self.context)

    def weights_of(self, stage: Stage) -> list[float]:
        """Return the weight of each source in a stage: by default its number of rows.

        A source that the stage does not name has the weight 0."""
        weights = dict.fromkeys(self.paths, 0.0)
        for path, weight in stage.weights.items():
            n_rows = self.train[self.paths.index(path)].n_rows
            weights[path] = float(n_rows) if weight is None else weight
        return list(weights.values())

    def sampler(self, source: int, seed: int, samples_per_step: int) -> Sampler:
        return Sampler(self.train[source].n_rows, seed, source)

    def count_tokens(self, sources: np.ndarray, numbers: np.ndarray) -> int:
        """Return the tokens of these rows (n,) for training, without padding."""
        places = zip(sources.tolist(), numbers.tolist(), strict=True)
        return sum(int(self.train[source].n_used[number]) for source, number in places)

    def tokens_seen(self, order: Mixture, n_samples: int) -> dict[str, int]:
        """Return {"tokens": how many the first n_samples rows hold, without padding}, of several
        sources with "tokens/name" of each.

        Exact at the end of an epoch: in between, a row counts as the source's mean row."""
        pairs = zip(self.train, order.epochs(n_samples).tolist(), strict=True)
        found = {f"tokens/{data.name}": round(n * data.n_used.sum()) for data, n in pairs}
        total = {"tokens": sum(found.values())}
        return total | found if len(self.train) > 1 else total

    def numbers_of(self, path: str) -> list[int]:
        known = self.names if path in self.names else self.paths
        if path not in known:
            paths = ", ".join(self.paths)
            raise UserError(f"data: max_epochs has {path!r}; write path=number, of: {paths}")
        return [known.index(path)]

    def report(self) -> list[str]:
        """Return lines for people: the content of each source, and what was left out."""
        lines = []
        for split, every in (("training", self.train), ("validation", self.all_val)):
            for data in every:
                rows, n = f"{counted(data.n_rows, 'row')} for {split}", self.n_items(data)
                if n > data.n_rows:
                    rows = f"{n:,} conversations in {rows}"
                lines.append(f"{data.name}: {rows}, {data.n_used.sum():,} tokens")
                reasons = reasons_of(data.counts, data.needs, self.context)
                lines += [f"{data.name}: {line}" for line in reasons]
        every = zip([*self.names, *self.val_names], [*self.sources, *self.val_sources], strict=True)
        for name, source in every:
            lines += source.reader.report(name)
        return lines


def paths_of(spec: str) -> list[str]:
    """Return the files and directories that a `data` string names, each once. Raise UserError."""
    paths = [path for stage in parse_data_dir(spec, "data") for path in stage.weights]
    return list(dict.fromkeys(paths))


def left_out(readers: Sequence[RowReader], laid_out: Sequence[Any], context: float) -> str:
    """Return which rows were left out and where the first is, as the end of an error message.

    It is "" if none was. laid_out: what `RowCorpus.lay_out` returned. context: see `reasons_of`."""
    dropped, needs = Counter(), defaultdict(list)
    for reader in readers:
        dropped += reader.dropped
    for data in laid_out:
        dropped += {what.removeprefix("left out: "): n for what, n in data.counts.items()}
    for part in (*readers, *laid_out):
        for what, sizes in part.needs.items():
            needs[what.removeprefix("left out: ")] += sizes
    if not dropped:
        return ""
    text = ": left out: " + ", ".join(reasons_of(dropped, needs, context))
    places = [place for reader in readers for place in reader.places]
    return text + (f"; first: {places[0]}" if places else "")


def steps_of(
    config: dict, n_rows: int, per_step: int, key: str, noun: str = "rows", lost: str = ""
) -> int:
    """Return max_steps, or, if that is 0, the steps of `per_step` rows that the epochs take.

    Raise UserError if those are too few to learn from, and warn if they are few. config: settings,
    and world_size, the number of ranks. key: the setting that decides per_step. lost: what
    `left_out` returned."""
    if config["max_steps"]:  # the user's number wins over epochs
        return config["max_steps"]
    steps = math.ceil(config["epochs"] * n_rows / per_step)
    if steps >= 4 * FEW_STEPS:
        return steps

    # propose settings that make at least four times FEW_STEPS steps
    world_size = config["world_size"]
    rows = max(1, min(config["batch_size"], n_rows // (8 * world_size)))  # of each rank
    per_smaller_step = rows * world_size  # eight steps an epoch, if the batch can be so small
    flags = {} if key == "prompts_per_step" else {"batch_size": rows}
    flags[key] = config[key] * per_smaller_step // per_step
    epochs = math.ceil(4 * FEW_STEPS * per_smaller_step / max(1, n_rows))
    flags["epochs"] = max(config["epochs"], epochs)
    new = {name: value for name, value in flags.items() if value != config[name]}
    more = " ".join(f"--{name}={value:g}" for name, value in new.items())
    few = f"{n_rows:,} {noun} make {counted(steps, 'step')} of {key}={config[key]}"
    ways = ["smaller steps"] * bool(new.keys() - {"epochs"}) + ["more epochs"] * ("epochs" in new)
    how = f"{' and '.join(ways)}: {more}" if ways else "give more"
    if config.get("pack") == "yes":  # measured on a hundred conversations: smaller steps did not do
        how += "; or --pack=auto, which gives each of few conversations a row"
    if steps < FEW_STEPS and not config["plan_only"]:
        also = lost.replace(": ", "; ", 1)
        raise UserError(f"data: {few}, too few to learn from; {how}{also}")
    say(f"warning     {few}, few to learn from; {how}")
    return steps
