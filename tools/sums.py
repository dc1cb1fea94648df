"""A task that needs a tool, for a small model to learn: sums of numbers of three digits, in English
and in Chinese, with groundup/demo/calculator.py. It makes the questions, and holds the reward.

    python tools/sums.py --out_dir=data/demo_sums
    --reward=tools/sums.py:correct                               # for rl.py

examples.jsonl are conversations with calls, from which sft.py teaches what a call looks like;
questions.jsonl and held_out.jsonl are for rl.py: it sees no call, only the reward of its own. A
pair of numbers is in one of the files only.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.errors import refuse
from groundup.files.turns import call_text

# ---- config: override with a config file or --key=value; see --help ------------------------------
out_dir = "data/demo_sums"  # where the three files go
n_examples = 2100  # questions with a call and an answer
n_questions = 4000  # to draw answers to
n_held_out = 400  # to draw answers to in evaluations
seed = 1337  # of the numbers

NUMBERS = range(100, 1000)
QUESTIONS = {
    "en": ("What is {} + {}?", "How much is {} + {}?"),
    "zh": ("{} + {} 等于多少？", "请问 {} + {} 是多少？"),
}
ANSWERS = {"en": "The sum is {}.", "zh": "等于 {}。"}


def correct(prompt: list[dict], answer: str, row: dict) -> float:
    """Return 1 if the answer is the right one to the letter, else 0. row: of `question`."""
    return float(answer == row["right"])


def question(a: int, b: int, language: str, form: int, answered: bool) -> dict:
    """Return the conversation, and the answer that `correct` looks for."""
    right = ANSWERS[language].format(a + b)
    call = call_text({"name": "calculate", "arguments": {"expression": f"{a} + {b}"}})
    turns = [("user", QUESTIONS[language][form].format(a, b))]
    if answered:
        turns += [("assistant", call), ("tool", str(a + b)), ("assistant", right)]
    return {"messages": [{"role": role, "content": text} for role, text in turns], "right": right}


def draw_pairs(n: int, seed: int) -> list[tuple[int, int]]:
    """Return n pairs of numbers, no pair twice in either order; the same for the same seed."""
    # by the set of both numbers: 3 + 4 and 4 + 3 are one question
    rng, found = random.Random(seed), {}
    while len(found) < n:
        pair = rng.choice(NUMBERS), rng.choice(NUMBERS)
        found.setdefault(frozenset(pair), pair)
    return list(found.values())


def write_task(directory: str, sizes: tuple[int, int, int], row: Callable) -> None:
    """Write examples.jsonl, questions.jsonl and held_out.jsonl of these numbers of rows.

    row(number in the file, whether it has the answer) returns a row."""
    refuse(not directory, "out_dir is empty; give --out_dir=DIR")
    Path(directory).mkdir(parents=True, exist_ok=True)
    for name, n in zip(("examples", "questions", "held_out"), sizes, strict=True):
        rows = [row(i, name == "examples") for i in range(n)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        Path(directory, f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{directory}/{name}.jsonl: {n:,} questions")


if __name__ == "__main__":
    config = configure(globals())
    n_rows, n_pairs = n_examples + n_questions + n_held_out, len(NUMBERS) * (len(NUMBERS) + 1) // 2
    refuse(n_rows > n_pairs, f"{n_rows:,} questions in all, but there are {n_pairs:,} sums")
    pairs = iter(draw_pairs(n_rows, seed))

    def row(i: int, answered: bool) -> dict:
        return question(*next(pairs), ("en", "zh")[i % 2], i // 2 % 2, answered)

    write_task(out_dir, (n_examples, n_questions, n_held_out), row)
