"""A task whose answers can be verified, for a small model to learn: which of three numbers is the
largest? In English and in Chinese. It makes the questions, and holds the reward.

    python tools/largest.py --out_dir=data/demo_largest
    --reward=tools/largest.py:correct                            # for rl.py

examples.jsonl are a few questions with their answers, from which sft.py teaches what an answer
looks like; questions.jsonl and held_out.jsonl are for rl.py: it sees no answer, only the reward of
its own. No three numbers are in two of the files, in whatever order.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.errors import UserError

# ---- config: override with a config file or --key=value; see --help ------------------------------
out_dir = "data/demo_largest"  # where the three files go
n_examples = 200  # questions with an answer
n_questions = 3000  # to draw answers to
n_held_out = 400  # to draw answers to in evaluations
most = 29  # the largest number of all
seed = 1337  # which numbers are asked for

QUESTIONS = {"en": "Which is the largest of {}, {}, {}?", "zh": "{}、{}、{}哪个最大?"}
ANSWERS = {"en": "The largest is {}.", "zh": "{}最大。"}


def correct(prompt: list[dict], answer: str, row: dict) -> float:
    """1 if the answer is the right one to the letter, else 0. row: of `question`."""
    return float(answer == row["right"])


def question(numbers: list[int], language: str, answered: bool) -> dict:
    """The conversation, and the answer that `correct` looks for."""
    right = ANSWERS[language].format(max(numbers))
    messages = [{"role": "user", "content": QUESTIONS[language].format(*numbers)}]
    return {
        "messages": messages + [{"role": "assistant", "content": right}] * answered,
        "right": right,
    }


def draw_numbers(n: int, most: int, seed: int) -> list[list[int]]:
    """n times three different numbers from 0 to `most`; no two times the same three. Always the
    same ones.
    """
    rng, found = random.Random(seed), {}
    while len(found) < n:
        numbers = rng.sample(range(most + 1), 3)
        found.setdefault(frozenset(numbers), numbers)
    return list(found.values())


if __name__ == "__main__":
    config = configure(globals())
    sizes = {"examples": n_examples, "questions": n_questions, "held_out": n_held_out}
    n_rows, n_sets = sum(sizes.values()), (most + 1) * most * (most - 1) // 6
    if n_rows > n_sets:
        raise UserError(
            f"config: {n_rows} questions in all, but most={most} gives three numbers in {n_sets} ways"
        )
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    numbers = iter(draw_numbers(n_rows, most, seed))
    for name, n in sizes.items():
        rows = [question(next(numbers), ("en", "zh")[i % 2], name == "examples") for i in range(n)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        Path(out_dir, f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{out_dir}/{name}.jsonl: {n:,} questions")
