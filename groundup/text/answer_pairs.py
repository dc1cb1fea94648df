"""Make preference pairs for prepare.py from a file of answers that sample.py has written (see
answer_files.py).

    python prepare.py --kind=preference --pair_by=dataset ...   # data set's answer, model's answer
    python prepare.py --kind=preference --pair_by=reward,margin=0.5,length_within=0.2 ...
                                                                # best, worst of a model's answers

A line has the fields of its prompt and "completions": [{"text", "finish_reason", and with a reward
model "reward"}]. The prompt is the messages that the model answered; a last message of the
assistant is the data set's own answer. Only completions with finish_reason "stop" are used: nobody
knows how the others would have ended.
"""

import itertools
import json
from collections import Counter
from pathlib import Path

from groundup.errors import UserError, counted
from groundup.files import answer_files, records
from groundup.files.answer_files import NoPair, conversation_of, reward_of, row_of, text_of
from groundup.files.turns import BadRow
from groundup.text.inputs import Input
from groundup.text.recipe import PairBy, parse_pair_by, parse_score
from groundup.text.unit import ANSWER_PLACE, PAIR_NUMBERS, Counts, Problems, numbers_of
from groundup.tokens.token_files import file_sha256


def replace_answers(
    inputs: list[Input], pair_by: str, score: str, strict: bool, work: Path
) -> tuple[list[Input], list[dict], Counts]:
    """Return (the inputs with files of answers replaced by files of pairs in `work`, their entries
    for the manifest, counts of what could not be read). Raise UserError if there are no answers, or
    no pairs."""
    found, infos, lost = [], [], Counts()
    for file in inputs:
        # FILE.config.json describes FILE, and holds no rows itself
        if answer_files.is_settings_file(file.path):
            continue
        # files of finished pairs may stand beside files of answers
        if file.problem or not answer_files.is_answers(file.path):
            found.append(file)
            continue
        # beside standard input there is no FILE.config.json
        if file.name == "-":
            hint = f"write them to a file, its {answer_files.SUFFIX} beside it"
            raise UserError(f"prepare: answers cannot come from standard input (-); {hint}")
        path = work / f"pairs_{len(infos)}.jsonl"
        # the pairs are read later as any other input, so all rules and counts apply to them
        info, counts = write_pairs(file.path, path, pair_by, score, strict)
        infos.append(info | {"sha256": file_sha256(Path(file.path))})
        lost.add(counts)
        # each run writes the file anew, so its content is the stamp and not its time
        size, stamp = path.stat().st_size, file_sha256(path)
        found.append(file._replace(path=str(path), size=size, stamp=stamp, parts=((0, None),)))
    if not infos:
        what = f"pair_by={pair_by} needs answers of sample.py, rows with completions"
        hint = "no input has them; leave pair_by out if the rows are pairs"
        raise UserError(f"prepare: {what}; {hint}")
    if len(infos) == len(found) and not any(info["pairs"] for info in infos):
        raise UserError(f"prepare: no pair: {'; '.join(describe(infos))}")
    return found, infos, lost


def write_pairs(
    path: str, out: Path, pair_by: str, score: str = "", strict: bool = False
) -> tuple[dict, Counts]:
    """Write the pairs of a file of answers to `out`, and lines that are no answers to
    `out`.problems in the format of unit.py; return (entry for the manifest, counts of such lines).

    score: also keep the numbers of these keys. Raise UserError if pair_by is reward and no answer
    has one, if `strict` and a line is no answer, or if FILE.config.json is missing or damaged."""
    by, counts = parse_pair_by(pair_by), Counts()
    # the margin is that of two rewards, not of the row
    keys = [key for key in PAIR_NUMBERS if key != "margin"]
    keys += [one.key for one in parse_score(score)]
    info = {"path": path, "settings": answer_files.need_settings(path), "scored": False}
    info |= {"lines": 0, "answers": 0, "pairs": 0}
    info |= {"lines_bad": 0, "lines_left_out": Counter(), "answers_left_out": Counter()}
    with open(out, "w", encoding="utf-8") as f, open(f"{out}.problems", "w", encoding="utf-8") as p:
        problems = Problems(path, p, counts.shown, strict)
        for record in records.read_records(path, report=problems):
            problems.lost_bytes += record.lost
            info["lines"] += 1
            try:
                pairs = pairs_of_line(record, by, keys, info)
            except BadRow as problem:
                info["lines_left_out"][str(problem)] += 1
                if not isinstance(problem, NoPair):
                    reason, detail = record.problem or "bad_field", record.detail or str(problem)
                    problems.add(path, record.line, record.offset, reason, detail)
                continue
            info["pairs"] += len(pairs)
            f.writelines(json.dumps(pair) + "\n" for pair in pairs)
    if not info.pop("scored") and by.how == "reward" and info["answers"]:
        hint = "give sample.py --best_of_by=reward --reward_from=DIR, or score them"
        what = f"no answer in {path} has a reward, which pair_by=reward needs"
        raise UserError(f"prepare: {what}; {hint}: reward.py --score=FILE")
    info["lines_bad"] = problems.problems.total()
    info["answers_left_out"] = dict(+info["answers_left_out"])
    # The pairs are read next, as an input. Together they count as the bytes of the answers.
    problems.n_bytes -= out.stat().st_size
    counts.add_report(problems, path, info["lines"] - info["lines_bad"])
    return info, counts


def describe(infos: list[dict]) -> list[str]:
    """Return lines for people on each file: its pairs, and lines and answers left out. infos: of
    write_pairs."""
    found = []
    for info in infos:
        path, n_pairs = info["path"], info["pairs"]
        lines = f"{counted(info['lines'], 'line')} with {counted(info['answers'], 'answer')}"
        found.append(f"{path}: {lines}: {counted(n_pairs, 'pair')}")
        for noun in ("line", "answer"):
            for reason, n in info[f"{noun}s_left_out"].items():
                found.append(f"{path}: {counted(n, noun)} left out: {reason}")
    return found


# ---- the pairs of one line -----------------------------------------------------------------------


def pairs_of_line(record: records.Record, by: PairBy, keys: list[str], info: dict) -> list[dict]:
    """Return the rows of the pairs of a line, with its numbers under `keys`, and count its answers
    in `info`, see write_pairs. Raise BadRow."""
    row, settings = row_of(record), info["settings"]
    # own: the data set's answer to this prompt, "" if there is none
    prompt, own = conversation_of(row, settings)
    info["answers"] += len(row["completions"])
    info["scored"] |= any(reward_of(answer) is not None for answer in row["completions"])
    pairs = pairs_of(row["completions"], own, by, info["answers_left_out"])
    # errors.tsv and dropped.tsv name the line of the answers, not that of the pair
    place = {ANSWER_PLACE: [record.line, record.offset]}
    of_line = numbers_of(row, keys) | {"prompt": prompt} | place
    return [of_line | pair | {"made_by": settings["model"]} for pair in pairs]


def pairs_of(answers: list[dict], own: str, by: PairBy, left_out: Counter) -> list[dict]:
    """Return the pairs of a line, and count the other answers in `left_out`, by reason. own: the
    data set's answer. Raise NoPair."""
    usable = []
    for answer in answers:
        text, reward = text_of(answer), reward_of(answer)
        # the first reason counts: an answer is left out once
        if answer.get("finish_reason") != "stop":
            left_out["unfinished"] += 1
        elif not text.strip():
            left_out["empty"] += 1
        elif by.how == "reward" and reward is None:
            left_out["no reward"] += 1
        else:
            usable.append((text, reward))
    try:
        if by.how == "reward":
            return pairs_by_reward(usable, by, left_out)
        pairs = pairs_by_dataset([text for text, _ in usable], own, by, left_out)
    except NoPair:
        # every answer is in a pair or in these counts, so that they add up
        left_out["in a line that gives no pair"] += len(usable)
        raise
    if not pairs:
        raise NoPair("no answer to set against the data set's")
    return pairs


def lengths_fit(first: str, second: str, within: float) -> bool:
    """Return whether the longer text has at most (1 + within) times the characters of the other;
    within=0: any."""
    least, most = sorted((len(first), len(second)))
    return not within or most <= least * (1 + within) + 1e-9  # 0.2 * 5 is not exactly 1


def pairs_by_dataset(texts: list[str], own: str, by: PairBy, left_out: Counter) -> list[dict]:
    """Return pairs of the data set's own answer with each different one of the model. Raise
    NoPair."""
    if not own.strip():
        raise NoPair("no answer of the data set")
    pairs, seen = [], set()
    for text in texts:
        if text.strip() == own.strip():
            left_out["equal to the data set's"] += 1
        elif text.strip() in seen:
            left_out["equal to an earlier one"] += 1
        elif not lengths_fit(own, text, by.length_within):
            left_out["the lengths differ too much"] += 1
        else:
            pairs.append({"chosen": own, "rejected": text})
        seen.add(text.strip())
    return pairs


def pairs_by_reward(answers: list[tuple[str, float]], by: PairBy, left_out: Counter) -> list[dict]:
    """Return the pair whose rewards differ most, of those that differ enough and fit in length.
    answers: with their rewards. Raise NoPair."""
    # from the best to the worst: of any two the first is the chosen one
    ranked = sorted(answers, key=lambda answer: answer[1], reverse=True)
    pairs = [
        {"chosen": chosen, "rejected": rejected, "margin": high - low}
        for (chosen, high), (rejected, low) in itertools.combinations(ranked, 2)
        if chosen.strip() != rejected.strip()
    ]
    if not pairs:
        raise NoPair("fewer than two different answers")
    pairs = [pair for pair in pairs if pair["margin"] > 0 and pair["margin"] >= by.margin]
    if not pairs:
        raise NoPair("the rewards differ too little")
    pairs = [
        pair for pair in pairs if lengths_fit(pair["chosen"], pair["rejected"], by.length_within)
    ]
    if not pairs:
        raise NoPair("the lengths differ too much")
    # one pair a line: more would count the same prompt several times
    left_out["neither best nor worst"] += len(answers) - 2
    return [max(pairs, key=lambda pair: pair["margin"])]
