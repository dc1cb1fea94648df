"""A corpus with known faults: exact copies, near copies, cut lines, bad bytes, evaluation questions. By hand:

python tests/planted.py 20000 'python-docs,poems/*.json' out      # corpus.jsonl, questions.jsonl, truth.json
"""

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SHARES = {"exact": 0.05, "near": 0.05, "truncated": 0.02, "encoding": 0.01, "contaminated": 0.01}
UNIT = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af]|[^\\W_\u3040-\u9fff]+")


class Planted(NamedTuple):
    lines: list[bytes]  # of a jsonl file
    labels: list[str]  # of each: original, or a key of SHARES
    similarity: dict[int, float]  # line of a near copy -> Jaccard similarity of its shingles to the original's
    questions: list[dict]


def shingles(text: str) -> set[tuple[str, ...]]:
    units = UNIT.findall(text.lower())
    return {tuple(units[i : i + 5]) for i in range(max(1, len(units) - 4))}


def jaccard(a: str, b: str) -> float:
    a, b = shingles(a), shingles(b)
    return len(a & b) / len(a | b)


def edited(text: str, share: float, rng: random.Random) -> str:
    """`text` with this share of its words or Chinese characters replaced, dropped or doubled."""
    spans = [match.span() for match in UNIT.finditer(text)]
    for begin, end in sorted(rng.sample(spans, max(1, round(share * len(spans)))), reverse=True):
        word = text[begin:end]
        text = text[:begin] + rng.choice(["", word + word, "changed" if word.isascii() else "\u6539"]) + text[end:]
    return text


def plant(documents: list[str], seed: int = 0) -> Planted:
    """The documents in a row, faults among them, always behind their originals."""
    rng = random.Random(seed)
    n = len(documents)
    questions = [{"question": f"{text[:60]}", "choices": [text[60:90], text[90:120]]} for text in documents
                 if len(text) > 200 and UNIT.findall(text)][: max(1, n // 100)]  # fmt: skip
    rest = documents[:]
    asked = {q["question"] for q in questions}
    rest = [text for text in rest if text[:60] not in asked]
    items = [("original", text, 0.0) for text in rest]
    for label, share in SHARES.items():
        for _ in range(round(share * n)):
            at = rng.randrange(len(items))
            source = next((i for i in range(at, len(items)) if items[i][0] == "original"), None)
            if source is None:
                continue
            text = items[source][1]
            place = rng.randint(source + 1, len(items))
            if label == "near":
                copy = edited(text, rng.uniform(0.01, 0.1), rng)
                items.insert(place, (label, copy, jaccard(text, copy)))
            elif label == "exact":
                items.insert(place, (label, rng.choice([text, "  " + text + "\n", text.upper().lower()]), 1.0))
            elif label == "contaminated":
                question = rng.choice(questions)
                body = question["question"] + "\n" + "\n".join(question["choices"])
                items.insert(place, (label, f"{rng.random()} {text[:40][::-1]} {body} {text[40:90][::-1]}", 0.0))
            else:
                items.insert(place, (label, f"{rng.random()} {text[::-1]}", 0.0))
    lines = [line_of(label, text) for label, text, _ in items]
    labels = [label for label, _, _ in items]
    return Planted(lines, labels, {i: s for i, (label, _, s) in enumerate(items) if label == "near"}, questions)


def line_of(label: str, text: str) -> bytes:
    line = json.dumps({"text": text}, ensure_ascii=False).encode()
    if label == "truncated":
        return line.decode()[: len(text) * 2 // 3].rstrip("\\").encode()
    return line[:-2] + b"\xff\xfe\x80 \xc3(" + line[-2:] if label == "encoding" else line


def score(planted: Planted, out_dir: Path) -> dict[str, dict[str, int]]:
    """{label: {what became of such lines: how many}}, from the offsets that prepare.py reports."""
    offsets, at = {}, 0
    for i, line in enumerate(planted.lines):
        offsets[at] = i
        at += len(line) + 1
    fate = {}
    for row in (out_dir / "errors.tsv").read_text("utf-8").splitlines()[1:]:
        _, _, offset, reason, _ = row.split("\t")
        fate[offsets[int(offset)]] = reason
    for row in (out_dir / "dropped.tsv").read_text("utf-8").splitlines()[1:]:
        _, offset, reason, *_ = row.split("\t")
        fate[offsets[int(offset)]] = reason
    table: dict[str, Counter] = {}
    for i, label in enumerate(planted.labels):
        if label == "near":
            label = "near J>=0.9" if planted.similarity[i] >= 0.9 else (
                "near J 0.8-0.9" if planted.similarity[i] >= 0.8 else "near J<0.8")
        table.setdefault(label, Counter())[fate.get(i, "kept")] += 1
    return {label: dict(counts) for label, counts in table.items()}


def gather(spec: str, n: int) -> list[str]:
    """n different documents of some hundred characters, from files that readers.py understands."""
    from groundup.demo.python_docs import python_docs
    from groundup.files import readers
    from groundup.files.paths import find_files

    found: dict[str, str] = {}
    for name in spec.split(","):
        texts = python_docs() if name == "python-docs" else (
            d.value for path in find_files(name) for d in readers.read_documents(path))
        for text in texts:
            for begin in range(0, len(text), 900):
                piece = text[begin : begin + 900]
                if len(UNIT.findall(piece)) > 20:
                    found.setdefault("".join(piece.lower().split()), piece)
    texts = list(found.values())
    random.Random(0).shuffle(texts)
    return texts[:n]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    out = Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    corpus = plant(gather(sys.argv[2], int(sys.argv[1])))
    (out / "corpus.jsonl").write_bytes(b"\n".join(corpus.lines) + b"\n")
    with open(out / "questions.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(question, ensure_ascii=False) + "\n" for question in corpus.questions)
    if len(sys.argv) > 4:  # a directory that prepare.py made of it
        print(json.dumps(score(corpus, Path(sys.argv[4])), indent=1))
    print(len(corpus.lines), "lines,", len(corpus.questions), "questions")
