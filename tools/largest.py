"""A task whose answers can be verified, for a small model to learn: which of three numbers is the
largest? In English and in Chinese. It makes the questions, and holds the reward.

    python tools/largest.py --out_dir=data/demo_largest
    --reward=tools/largest.py:correct                            # for rl.py

examples.jsonl are a few questions with their answers, from which sft.py teaches what an answer
looks like; questions.jsonl and held_out.jsonl are for rl.py: it sees no answer, only the reward of
its own. No three numbers are in two of the files, in whatever order.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.errors import refuse

# ---- config: override with a config file or --key=value; see --help ------------------------------
out_dir = "data/demo_largest"  # where the three files go
n_examples = 200  # questions with an answer
n_questions = 3000  # to draw answers to
n_held_out = 400  # to draw answers to in evaluations
most = 29  # the largest number of all
seed = 1337  # of the numbers

QUESTIONS = {"en": "Which is the largest of {}, {}, {}?", "zh": "{}、{}、{}哪个最大?"}
ANSWERS = {"en": "The largest is {}.", "zh": "{}最大。"}


def correct(prompt: list[dict], answer: str, row: dict) -> float:
    """Return 1 if the answer is the right one to the letter, else 0. row: of `question`."""
    return float(answer == row["right"])


def question(numbers: list[int], language: str, answered: bool) -> dict:
    """Return the conversation, and the answer that `correct` looks for."""
    right = ANSWERS[language].format(max(numbers))
    messages = [{"role": "user", "content": QUESTIONS[language].format(*numbers)}]
    if answered:
        messages.append({"role": "assistant", "content": right})
    return {"messages": messages, "right": right}


def draw_numbers(n: int, most: int, seed: int) -> list[list[int]]:
    """Return n times three different numbers from 0 to `most`, never the same three twice; the
    same for the same seed.
    """
    rng, found = random.Random(seed), {}
    while len(found) < n:
        numbers = rng.sample(range(most + 1), 3)
        found.setdefault(frozenset(numbers), numbers)
    return list(found.values())


if __name__ == "__main__":
    from sums import write_task  # here, because rl.py loads this file from elsewhere

    config = configure(globals())
    n_rows, n_sets = n_examples + n_questions + n_held_out, (most + 1) * most * (most - 1) // 6
    ways = f"most={most} gives three numbers in {n_sets} ways"
    refuse(n_rows > n_sets, f"{n_rows} questions in all, but {ways}")
    numbers = iter(draw_numbers(n_rows, most, seed))

    def row(i: int, answered: bool) -> dict:
        return question(next(numbers), ("en", "zh")[i % 2], answered)

    write_task(out_dir, (n_examples, n_questions, n_held_out), row)
