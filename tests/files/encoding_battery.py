"""Read real pages in many encodings, whole and damaged, and count what the readers make of them.

By hand: the pages are not on the test machines.

    python tests/files/encoding_battery.py --poems='poems/*.json' --texts='rows/*.jsonl'

Pages are manual pages in many languages (apt install manpages-fr manpages-ja ...), poems
(chinese-poetry's JSON) and values of JSON lines. Each is written in every encoding of its language:
whole, cut, with one byte missing, and in front of a page in UTF-8. Of every cell the table has

    files     written, and refused as a whole
    right     lines that come out as they were
    wrong     lines that were never written: must be 0. A lost ASCII character or line end, and the
              half of a line before a cut, cannot be told from text and count as right
    lost      lines that do not come out, of files that report a loss
    silent    lines that do not come out, of files that report none: must be 0
"""

import argparse
import glob
import gzip
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, os.getcwd())

from groundup.files import readers, records

UNICODE = ["utf-8", "utf-16", "utf-16-le", "utf-32"]
WESTERN, EASTERN, CYRILLIC = ["latin-1", "cp1252"], ["iso8859-2", "cp1250"], ["koi8-r", "cp1251"]
ENCODINGS = {  # by language
    "fr": WESTERN, "de": WESTERN, "es": WESTERN, "it": WESTERN, "pt_BR": WESTERN, "sv": WESTERN,
    "pl": EASTERN, "cs": EASTERN, "hu": EASTERN, "ru": CYRILLIC, "uk": ["cp1251"],
    "ja": ["euc_jp", "shift_jis"], "ko": ["euc_kr"], "zh_CN": ["gb18030"], "zh_TW": ["big5"],
    "poem": ["big5", "gb18030"], "text": ["gb18030"],
}  # fmt: skip
WINDOWS = {"shift_jis": "cp932"}  # its reading of an encoding, which browsers share
FAULTS = ("whole", "cut", "byte lost", "two encodings")
MOST_CHARS = 6000  # of a page
JOINED = 20  # short poems make a page


def pages_of(man: str, poems: str, texts: str) -> list[tuple[str, str]]:
    """Return (language, text) of all pages that are not ASCII."""
    found = []
    for language in ENCODINGS:
        for path in sorted(glob.glob(f"{man}/{language}/man*/*.gz")):
            try:
                found.append((language, gzip.open(path).read().decode()))
            except (OSError, UnicodeDecodeError):
                continue
    for path in sorted(glob.glob(poems)):
        lines = ["".join(poem["paragraphs"]) for poem in json.loads(Path(path).read_bytes())]
        for k in range(0, len(lines), JOINED):
            found.append(("poem", "\n".join(lines[k : k + JOINED])))
    for path in sorted(glob.glob(texts)):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            turns = json.loads(line).get("conversations", [])
            found.append(("text", "\n".join(turn["value"] for turn in turns)))
    pages = []
    for language, text in found:
        lines = (line.strip() for line in text[:MOST_CHARS].split("\n")[:-1])
        text = "\n".join(line for line in lines if line and line.isprintable())
        if not text.isascii():
            pages.append((language, text))
    return pages


def damaged(raw: bytes, fault: str, other: str, rng: random.Random) -> bytes:
    place = rng.randrange(len(raw) // 4, len(raw) - 1)
    if fault == "cut":
        return raw[:place]
    if fault == "byte lost":
        return raw[:place] + raw[place + 1 :]
    return raw + b"\n" + other.encode() if fault == "two encodings" else raw


def is_explained(line: str, expected: list[str], fault: str) -> bool:
    """Return whether no reader could know that a line is not what was written."""
    if fault == "cut":
        return any(one.startswith(line) for one in expected)
    if fault != "byte lost":
        return False
    pairs = ("".join(two) for two in zip(expected, expected[1:], strict=False))
    ascii_lost = any(
        line == (one[:k] + one[k + 1 :]).strip()
        for one in expected
        if 0 < len(one) - len(line) < 4
        for k in range(len(one))
        if one[k].isascii()
    )
    return ascii_lost or line in pairs


def read(path: Path, raw: bytes, expected: list[str], fault: str, cell: Counter) -> None:
    path.write_bytes(raw)
    report = records.Report()
    rows = readers.read_documents(str(path), txt_split="line", report=report)
    found = [row.value.strip() for row in rows]
    left = Counter(expected)
    for line in filter(None, found):
        if left[line] > 0:
            left[line] -= 1
            cell["right"] += 1
        elif is_explained(line, expected, fault):
            cell["right"] += 1
        else:
            cell["wrong"] += 1
            if os.environ.get("SHOW"):
                print(path.name, fault, ascii(line[:60]), file=sys.stderr)
    missing = sum(left.values())
    cell["files"] += 1
    cell["refused"] += not found
    n_told = 2 if fault in ("cut", "byte lost") else 0  # the line cut, or two that became one
    if report.problems or missing <= n_told:
        cell["lost"] += missing
    else:
        cell["silent"] += missing
        if os.environ.get("SHOW"):
            print(path.name, fault, "silent", ascii(list(+left)[:3]), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--man", default="/usr/share/man")
    parser.add_argument("--poems", default="")
    parser.add_argument("--texts", default="")
    parser.add_argument("--pages", type=int, default=0, help="a sample of so many; 0 = all")
    parser.add_argument("--part", default="1/1", help="i/k: the i-th of k parts of the pages")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    pages = pages_of(options.man, options.poems, options.texts)
    rng.shuffle(pages)
    part, n_parts = map(int, options.part.split("/"))
    mine = pages[: options.pages or None][part - 1 :: n_parts]
    rng = random.Random(f"{options.seed} {part}")
    cells: dict[tuple[str, str], Counter] = defaultdict(Counter)
    languages: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for language, text in mine:
            languages[language] += 1
            _, other = rng.choice(pages)
            # Of the encodings of Unicode one by chance: they are alike for every language.
            for encoding in [*ENCODINGS[language], rng.choice(UNICODE)]:
                lines = [line for line in text.split("\n") if fits(line, encoding)]
                raw = "\n".join(lines).encode(encoding)
                if len(raw) < 20 or raw.isascii():
                    continue
                faults = ["whole", rng.choice(FAULTS[1:])]
                if encoding in UNICODE[1:]:
                    faults = ["whole", rng.choice(FAULTS[1:3])]
                for fault in faults:
                    bad = damaged(raw, fault, other, rng)
                    if len(bad) < 20:
                        continue
                    expected = lines
                    if fault == "cut":
                        expected = lines[: 1 + bad.decode(encoding, "ignore").count("\n")]
                    if fault == "two encodings":
                        expected = lines + other.split("\n")
                    path = Path(folder) / f"{encoding}.txt"
                    read(path, bad, expected, fault, cells[encoding, fault])
    print(
        f"{languages.total():,} pages:", ", ".join(f"{n} {k}" for k, n in sorted(languages.items()))
    )
    names = ("files", "refused", "right", "wrong", "lost", "silent")
    print(f"| encoding | fault | {' | '.join(names)} |\n|---|---|{'---:|' * len(names)}")
    total: Counter[str] = Counter()
    for (encoding, fault), cell in sorted(cells.items()):
        total += cell
        print(f"| {encoding} | {fault} | {' | '.join(f'{cell[name]:,}' for name in names)} |")
    print(f"| all | | {' | '.join(f'{total[name]:,}' for name in names)} |")


def fits(line: str, encoding: str) -> bool:
    """Return whether an encoding has all characters of a line, and gives them back, also as Windows
    reads it: 81 60 of Shift-JIS is a wave dash, there a wide tilde. Some manual pages are UTF-8
    that was encoded once more: such lines are none."""
    try:
        raw = line.encode(encoding)
        if raw.decode(WINDOWS.get(encoding, encoding)) != line:
            return False
    except UnicodeError:
        return False
    try:
        return line.isascii() or encoding not in WESTERN or not raw.decode()
    except UnicodeDecodeError:
        return True


if __name__ == "__main__":
    main()
