"""Preference pairs made of answers: what sample.py wrote to FILE, line by line, as rows that prepare.py reads.

    python prepare.py --kind=preference --pair_by=dataset ...    # (the data set's answer, a model's answer)
    python prepare.py --kind=preference --pair_by=reward ...     # (the best, the worst of a model's by their reward)

A line has the fields of its prompt and "completions": [{"text", "finish_reason", and with a reward model "reward"}].
The prompt is what the model answered: the messages before a last one of the assistant, which is the data set's own
answer. Only answers that the model ended itself count: one that was cut off says nothing of how it would have ended.
FILE.config.json, which sample.py writes beside FILE, says which model answered, and how.
"""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import readers
import shapes
from pipeline import PrepareError

SETTINGS = ".config.json"  # behind the name of a file of answers


class NoPair(Exception):
    """Why a line gives no pair."""


def is_answers(path: str) -> bool:
    """Whether the first row of a file that can be read is one of answers."""
    rows = (record.value for record in readers.read_records(path) if not record.problem)
    first = next(rows, None)
    return isinstance(first, dict) and "completions" in first


def write_pairs(path: str, out: Path, pair_by: str, margin: float, within: float, strict: bool = False) -> dict:
    """Write the pairs of a file of answers to `out`; what the manifest says of them.

    pair_by: dataset | reward. margin: least difference of two rewards, any if 0. within: the longer answer has at most
    this share more characters than the shorter one; 0 = any. Raises PrepareError: FILE.config.json is missing or
    damaged; by reward, and no answer of the file has one; if `strict`, a line is no answer.
    """
    settings = read_settings(path)
    info = {"path": path, "settings": settings, "lines": 0, "answers": 0, "pairs": 0}
    lines, answers = Counter(), Counter()  # that give nothing, by reason
    n_scored = 0
    with open(out, "w", encoding="utf-8") as f:
        for record in readers.read_records(path):
            info["lines"] += 1
            try:
                row = row_of(record, path if strict else "")
                prompt, own = conversation_of(row, settings)
                info["answers"] += len(row["completions"])
                n_scored += sum(reward_of(answer) is not None for answer in row["completions"])
                finished = usable(row["completions"], pair_by, answers)
                if pair_by == "dataset":
                    pairs = pairs_by_dataset(finished, own, within, answers)
                else:
                    pairs = pairs_by_reward(finished, margin, within, answers)
            except NoPair as problem:
                lines[str(problem)] += 1
                continue
            for pair in pairs:
                whole = numbers_of(row) | {"prompt": prompt} | pair | {"made_by": settings["model"]}
                f.write(json.dumps(whole) + "\n")
            info["pairs"] += len(pairs)
    if pair_by == "reward" and info["answers"] and not n_scored:
        hint = "give sample.py --best_of_by=reward --reward_from=DIR, or score them: reward.py --score=FILE"
        raise PrepareError(f"prepare: no answer in {path} has a reward, which pair_by=reward needs; {hint}")
    return info | {"lines_left_out": dict(lines), "answers_left_out": dict(answers)}


def read_settings(path: str) -> dict:
    """What FILE.config.json says of the answers in FILE. Raises PrepareError."""
    name = path + SETTINGS
    try:
        settings = json.loads(Path(name).read_text(encoding="utf-8"))
        if isinstance(settings, dict) and isinstance(settings.get("model"), str):
            return settings
        problem = "does not name the model"
    except FileNotFoundError:
        problem = "is missing"
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({error})"
    hint = "sample.py writes it beside its answers, keep the two together"
    raise PrepareError(f"prepare: {name} {problem}, so nobody knows what made the answers; {hint}")


def describe(infos: list[dict]) -> list[str]:
    """Lines for people: what became of the lines and answers of each file, of what write_pairs says of it."""
    found = []
    for info in infos:
        found.append(
            f"{info['path']}: {info['lines']:,} lines with {info['answers']:,} answers give {info['pairs']:,} pairs"
        )
        for what in ("lines", "answers"):
            left_out = info[f"{what}_left_out"].items()
            found += [f"{info['path']}: {n:,} {what} left out: {reason}" for reason, n in left_out]
    return found


# ---- one line --------------------------------------------------------------------------------


def row_of(record: readers.Record, strict_path: str) -> dict:
    """A line with a list of answers. Raises NoPair, and PrepareError instead if there is a strict_path."""
    listed = record.value.get("completions") if isinstance(record.value, dict) else None
    problem = record.problem
    if not problem and not isinstance(listed, list):
        problem = "no list of completions"
    if not problem and not all(isinstance(answer, dict) and isinstance(answer.get("text"), str) for answer in listed):
        problem = "a completion without a text"
    if problem and strict_path:
        raise PrepareError(f"prepare: {strict_path}:{record.line}: {problem}; mend it, or leave it out, strict=False")
    if problem:
        raise NoPair(problem)
    return record.value


def conversation_of(row: dict, settings: dict) -> tuple[list[dict], str]:
    """(the messages that the model answered, the data set's own answer or ""). Raises NoPair."""
    key = next((key for key in ("messages", "prompt") if key in row), "")
    if not key or (isinstance(row[key], str) and not settings.get("chat", True)):
        raise NoPair("a text that was continued, not a question that was answered")
    if isinstance(row[key], str):
        prompt, own = [{"role": "user", "content": row[key]}], own_answer(row)
    else:
        prompt, problem = shapes.messages_of({"messages": row[key]})
        if problem:
            raise NoPair("messages that are not understood")
        own = prompt.pop()["content"] if prompt[-1]["role"] == "assistant" else ""
    if not prompt:
        raise NoPair("no question before the answer")
    system = settings.get("system")
    if system and prompt[0]["role"] != "system":  # as sample.py asked
        prompt = [{"role": "system", "content": system}, *prompt]
    return prompt, own


def own_answer(row: dict) -> str:
    """Of a row of prompt and response, or of prompt and answer."""
    messages, problem = shapes.messages_of(row)
    return "" if problem else messages[-1]["content"]


def reward_of(answer: dict) -> float | None:
    value = answer.get("reward")
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def usable(completions: list[dict], pair_by: str, left_out: Counter) -> list[dict]:
    """The finished answers, without the name of the end of turn that some have; by reward, those with a reward. The
    others are counted in `left_out`."""
    found = []
    for answer in completions:
        reason = "unfinished" if answer.get("finish_reason") != "stop" else ""
        reason = reason or ("" if answer["text"].strip() else "empty")
        reason = reason or ("no reward" if pair_by == "reward" and reward_of(answer) is None else "")
        if reason:
            left_out[reason] += 1
        else:
            found.append(answer | {"text": shapes.answer_at(answer, "text")})
    return found


def numbers_of(row: dict) -> dict:
    """The row's own numbers, such as difficulty, which prepare.py may filter by."""
    plain = ((key, value) for key, value in row.items() if key not in ("index", "margin"))
    return {key: value for key, value in plain if isinstance(value, int | float) and not isinstance(value, bool)}


# ---- its pairs -------------------------------------------------------------------------------


def alike(first: str, second: str) -> bool:
    """Whether two answers are the same but for white space around them."""
    return first.strip() == second.strip()


def lengths_fit(first: str, second: str, within: float) -> bool:
    """Whether the longer of two texts has at most the share `within` more characters; always if that is 0."""
    least, most = sorted((len(first), len(second)))
    return not within or most <= least * (1 + within) + 1e-9  # 0.2 * 5 is not exactly 1


def pairs_by_dataset(answers: list[dict], own: str, within: float, left_out: Counter) -> list[dict]:
    """The line's own answer with each of the model's that differs. Raises NoPair."""
    if not own.strip():
        raise no_pair("no answer of the data set", answers, left_out)
    pairs, seen = [], set()
    for text in (answer["text"] for answer in answers):
        reason = "equal to the data set's" if alike(own, text) else ""
        reason = reason or ("equal to an earlier one" if text.strip() in seen else "")
        reason = reason or ("" if lengths_fit(own, text, within) else "the lengths differ too much")
        seen.add(text.strip())
        if reason:
            left_out[reason] += 1
        else:
            pairs.append({"chosen": own, "rejected": text})
    if not pairs:
        raise NoPair("no answer to set against the data set's")
    return pairs


def pairs_by_reward(answers: list[dict], margin: float, within: float, left_out: Counter) -> list[dict]:
    """The two answers whose rewards differ most, of those that differ enough and fit in length. Raises NoPair."""
    ranked = sorted(answers, key=reward_of, reverse=True)
    pairs = [
        {"chosen": better["text"], "rejected": worse["text"], "margin": reward_of(better) - reward_of(worse)}
        for better, worse in itertools.combinations(ranked, 2)
        if not alike(better["text"], worse["text"])
    ]
    if not pairs:
        raise no_pair("fewer than two different answers", answers, left_out)
    pairs = [pair for pair in pairs if pair["margin"] > 0 and pair["margin"] >= margin]
    if not pairs:
        raise no_pair("the rewards differ too little", answers, left_out)
    pairs = [pair for pair in pairs if lengths_fit(pair["chosen"], pair["rejected"], within)]
    if not pairs:
        raise no_pair("the lengths differ too much", answers, left_out)
    if len(answers) > 2:
        left_out["neither best nor worst"] += len(answers) - 2
    return [max(pairs, key=lambda pair: pair["margin"])]


def no_pair(reason: str, answers: list[dict], left_out: Counter) -> NoPair:
    """The error for a line whose usable answers give nothing, which are counted."""
    if answers:
        left_out["in a line that gives no pair"] += len(answers)
    return NoPair(reason)
