"""Print how prepare.py reads the first rows of its input: fields, tokens, trained parts, kept or dropped and why.

python prepare.py --input=chat.jsonl --kind=chat --tokenizer_dir=data/tok --show=5
"""

import json
from itertools import islice
from pathlib import Path

import numpy as np

from groundup.demo.python_talks import docs_rows
from groundup.errors import UserError
from groundup.files import readers, row_formats, streams
from groundup.text import dedup
from groundup.text.documents import Item, Judge
from groundup.text.pipeline import signatures_of
from groundup.text.recipe import Recipe, Source
from groundup.tokens.token_files import TokenData
from tokenizer import Tokenizer

MAX_TOKENS = 120  # shown of one text
MAX_CHARS = 600  # likewise, without a tokenizer
TRAINED = "[[", "]]"  # around the tokens that the model is trained on


def show_rows(recipe: Recipe, n: int, tokenizer_dir: str, work: Path, names: dict[str, str]) -> int:
    """Print how n rows of each source are read; return the exit status, 1 if a row cannot be read. names: {path: name
    given by the user} of files that prepare.py made."""
    tokenizer = Tokenizer.load(tokenizer_dir) if tokenizer_dir else None
    shown = Shown(recipe, tokenizer, work, names)
    for source in recipe.sources:
        parts = [name.strip() for name in source.input.split(",") if name.strip()]
        for name in filter(is_prepared, parts):
            show_tokens(Path(name), n)
        parts = [name for name in parts if not is_prepared(name)]
        files = [file for name in parts for file in ([name] if name == "python-docs" else readers.find_files(name))]
        each = -(-n // max(1, len(files)))
        for file in files[:n]:
            shown.file(file, source, each)
    if tokenizer is None:
        print("\nno tokenizer: --tokenizer_dir=DIR shows where its tokens begin and end")
    print(f"\n{shown.n_rows} rows: {shown.n_kept} would be kept, {shown.n_rows - shown.n_kept} not")
    return int(shown.n_strange > 0)


class Shown:
    """Prints rows and remembers them, to find copies among the rows shown."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer | None, work: Path, names: dict[str, str]) -> None:
        self.recipe, self.tokenizer, self.work, self.names = recipe, tokenizer, work, names
        self.n_rows, self.n_kept, self.n_strange = 0, 0, 0
        self.keys: dict[bytes, str] = {}
        self.kept: list[str] = []  # where the rows that are kept are from
        self.signatures: list[np.ndarray] = []

    def file(self, path: str, source: Source, n: int) -> None:
        if path == "python-docs":
            print("\n==== python-docs: the documentation and sources of the running Python")
            for k, row in enumerate(islice(docs_rows(self.recipe.kind), n), 1):
                judge, shape = Judge(source, self.recipe, self.work), row_formats.format_name(row, self.recipe.kind)
                self.understood(judge.understand(row)[0], judge, f"python-docs, document {k}", shape)
            return
        with streams.open_stream(path) as stream:
            container = readers.container(path, stream.peek(), source.txt_split)
        name = self.names.get(path, path)
        print(f"\n==== {name}: {CONTAINERS.get(container, container)}")
        for record in islice(readers.read_records(path, source.txt_split), n):
            where = f"{name}:{record.line}"
            if record.problem:
                self.not_understood(where, f"{record.problem}: {record.detail}")
                continue
            row = streams.mended(record.value)
            judge = Judge(source, self.recipe, self.work)
            item, problem = judge.understand(row)
            if problem:
                self.not_understood(where, problem)
            else:
                where = f"{name}:{item.place[0]}" if item.place else where
                shape = f"text_key={source.text_key}" if source.text_key and isinstance(row, dict) else ""
                self.understood(item, judge, where, shape or row_formats.format_name(row, self.recipe.kind))

    def not_understood(self, where: str, why: str) -> None:
        self.n_rows, self.n_strange = self.n_rows + 1, self.n_strange + 1
        print(f"\n-- {where}\n   NOT UNDERSTOOD: {why}")

    def understood(self, item: Item, judge: Judge, where: str, shape: str) -> None:
        verdict = self.verdict(item, judge, where)
        self.n_rows, self.n_kept = self.n_rows + 1, self.n_kept + (not verdict)
        removed = item.n_read - len(item.text.encode())
        cleaned = f", {removed} bytes cleaned away" if removed else ""
        print(f"\n-- {where}: {shape}, {len(item.text):,} characters{cleaned}")
        print(f"   {f'DROPPED: {verdict}' if verdict else 'kept'}")
        for line in self.lines(item):
            print(f"   {line}")

    def verdict(self, item: Item, judge: Judge, where: str) -> str:
        """Return why the row is dropped, "" if it is kept."""
        if not item.text.strip():
            return "empty"
        key = dedup.exact_key(item.row or item.text)
        if self.recipe.exact and key in self.keys:
            return f"exact_duplicate: as {self.keys[key]}"
        self.keys[key] = where
        reason, detail = judge.judge(item)
        if reason != "kept":
            return f"{reason}: {detail}"
        units = dedup.units([item.compared])
        if found := judge.contaminated([item], units):
            hint = "; the place would be cut out" if self.recipe.decontaminate_action == "cut" else ""
            return f"contaminated: {found[0]!r} is in an evaluation file{hint}"
        if self.recipe.near and len(units.hashes):
            signature = signatures_of([item], units, self.recipe.near_bands * self.recipe.near_rows)[0]
            alike = [float((signature == other).mean()) for other in self.signatures]
            if alike and max(alike) >= self.recipe.near:
                return f"near_duplicate: {max(alike):.2f} like {self.kept[alike.index(max(alike))]}"
            self.signatures.append(signature)
            self.kept.append(where)
        return ""

    def lines(self, item: Item) -> list[str]:
        if self.recipe.kind == "text":
            return [self.pieces(item.text)]
        row = json.loads(item.row)
        if self.recipe.kind == "chat":
            return self.turns(row["messages"])
        answers = [[{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")]
        shown = [self.turns(answer)[0] for answer in answers]
        return [*self.turns(row["prompt"]), f"chosen   : {shown[0]}", f"rejected : {shown[1]}"]

    def turns(self, messages: list[dict]) -> list[str]:
        """Return the conversation as the model sees it, a line per message, the trained tokens between TRAINED."""
        if self.tokenizer is None:
            return [plain_turn(message) for message in messages]
        lines = []
        for message in messages:
            try:
                ids, mask = self.tokenizer.render([message])
            except UserError as error:
                return [f"NOT UNDERSTOOD: {error}"]
            first = mask.index(1) if 1 in mask else len(mask)
            last = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)
            learnt = bars(self.tokenizer, ids[first:last])
            marked = TRAINED[0] + learnt + TRAINED[1] if learnt else ""
            around = bars(self.tokenizer, ids[:first]), bars(self.tokenizer, ids[last:])
            lines.append(f"{around[0]}{marked}{around[1]}   ({sum(mask)} of {len(ids)} tokens are learnt)")
        return [*lines, f"the model learns to say what stands between {' and '.join(TRAINED)}"]

    def pieces(self, text: str) -> str:
        if self.tokenizer is None:
            return shorten(text)
        ids = self.tokenizer.encode(text[: 20 * MAX_TOKENS])
        return bars(self.tokenizer, ids) + f"   ({len(self.tokenizer.encode(text)):,} tokens)"


CONTAINERS = {
    "jsonl": "JSON objects, one per line", "array": "a JSON array", "values": "JSON objects, one after the other",
    "file": "plain text, one document", "line": "plain text, a document per line",
    "blank": "plain text, documents between blank lines",
}  # fmt: skip


def plain_turn(message: dict) -> str:
    text = shorten(message["content"] or "")
    return f"{message['role']}: {TRAINED[0] + text + TRAINED[1] if message['role'] == 'assistant' else text}"


def shorten(text: str) -> str:
    return repr(text[:MAX_CHARS])[1:-1] + (" ..." if len(text) > MAX_CHARS else "")


def is_prepared(path: str) -> bool:
    return Path(path, "manifest.json").exists()


def show_tokens(directory: Path, n: int) -> None:
    """Print the first documents of the train split of a prepared directory."""
    train, tokenizer = TokenData(directory, "train"), Tokenizer.load(directory)
    print(f"\n==== {directory}: prepared, {train.n_documents:,} documents, {train.n_tokens:,} tokens in train")
    starts = train.offsets[0][: n + 1].tolist()
    for k, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        ids = train.window(begin, min(end - begin, MAX_TOKENS)).tolist()
        print(f"\n-- document {k}, {end - begin:,} tokens\n   {bars(tokenizer, ids)}")


def bars(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the tokens with | between them. Tokens that form one character are joined, with their number: ~3."""
    shown, held = [], []
    for i in ids[:MAX_TOKENS]:
        held.append(i)
        raw = tokenizer.decode_bytes(held)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            if len(raw) < 8:
                continue
            text = repr(raw)[2:-1]  # not UTF-8
        shown.append(repr(text)[1:-1] + (f"~{len(held)}" if len(held) > 1 else ""))
        held = []
    shown += [repr(tokenizer.decode_bytes(held))[2:-1]] if held else []
    return "|".join(shown) + (f" ... {len(ids) - MAX_TOKENS} more" if len(ids) > MAX_TOKENS else "")
