"""A task for a model with a calculator: sums of two numbers of three digits, in English and in Chinese. It makes the
questions, and holds the rewards.

    python tools/sums.py --out_dir=data/demo_tools
    --reward=tools/sums.py:correct                               # for rl.py

examples.jsonl are a few conversations in which the calculator is called, from which sft.py teaches what a call is;
questions.jsonl and held_out.jsonl are for rl.py: it sees no call and no answer, only the reward of its own. No two
numbers are in two of the files.
"""

import json
import random
import re
import sys
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "data/demo_tools"  # where the three files go
n_examples = 3000  # conversations with a call
n_questions = 4000  # to draw answers to
n_held_out = 400  # to draw answers to in evaluations
seed = 1337  # which numbers are asked for

QUESTIONS = {"en": "What is {} plus {}?", "zh": "{}加{}等于多少?"}
ANSWERS = {"en": "The sum is {}.", "zh": "和是{}。"}


def correct(prompt: list[dict], answer: str, row: dict) -> float:
    """1 if the last number of the answer is the sum, else 0. row: of `conversation`."""
    return float(re.findall(r"\d+", answer)[-1:] == [row["sum"]])


def copied(prompt: list[dict], answer: str, row: dict) -> float:
    """The share of digits that are copied right: from the question to the call, and from the result to the answer."""
    if prompt[-1]["role"] != "tool":
        return 0.0
    texts = [message["content"] for message in prompt[-3:]] + [answer]  # question, call, result, answer
    question, call, result, said = (re.findall(r"\d", text) for text in texts)
    pairs = [*zip_longest(question, call), *zip_longest(result, said)]
    return sum(one == other for one, other in pairs) / len(pairs)


def conversation(a: int, b: int, language: str, answered: bool) -> dict:
    """A question, if `answered` with the call and the answer; and the sum that `correct` looks for."""
    row = {"messages": [{"role": "user", "content": QUESTIONS[language].format(a, b)}], "sum": str(a + b)}
    if answered:
        call = {"function": {"name": "add", "arguments": {"a": a, "b": b}}}
        row["messages"] += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": ANSWERS[language].format(a + b)},
        ]
    return row


if __name__ == "__main__":
    config = configure(globals())
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    sizes = {"examples": n_examples, "questions": n_questions, "held_out": n_held_out}
    pairs = iter(random.Random(seed).sample(range(900 * 900), sum(sizes.values())))  # of 100 to 999 each
    for name, n in sizes.items():
        rows = []
        for i in range(n):
            a, b = divmod(next(pairs), 900)
            rows.append(conversation(100 + a, 100 + b, ("en", "zh")[i % 2], name == "examples"))
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        Path(out_dir, f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{out_dir}/{name}.jsonl: {n:,} conversations")
