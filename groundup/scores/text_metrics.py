"""Generated answers compared with references: BLEU, ROUGE-L, exact match, and whether answers end.

    evaluate_generation(model, tokenizer, "val.jsonl", params, limit=0, batch_size=16)
        -> figures, and every answer

The data are conversations: the last answer is the reference, what precedes it the prompt.
"""

import importlib.util
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tqdm import tqdm

from configurator import split_names
from groundup.errors import UserError
from groundup.generate.call_forms import THINK, THINK_END, divide_thoughts
from groundup.generate.completion import prompt_ids
from groundup.generate.engine import Engine
from groundup.generate.sampling import SamplingParams
from groundup.scores.likelihood import split_over_ranks
from groundup.text import clean
from groundup.tokens.conversations import ChatReader
from groundup.tokens.rows import read_source, scored_path
from groundup.tokens.templates import opened_thoughts
from model import Transformer
from tokenizer import Tokenizer

# ROUGE counts words of languages that have spaces, and single characters of Chinese.
WORDS = re.compile(f"[{clean.HAN}]|[^\\W_{clean.HAN}]+")
NO_PROMPT = "no prompt before the answer"
TOO_LONG = "prompt longer than the context"


class Question(NamedTuple):
    prompt: list[dict]  # messages up to the answer
    reference: str


class Generated(NamedTuple):
    text: str
    finish_reason: str  # stop | length
    stopped: bool  # the model ended it, and no stop string or limit did
    n_tokens: int  # without the token that ended it


ENDS = Generated._fields[1:]  # in a row of answers, beside its text


def evaluate_generation(
    model: Transformer,
    tokenizer: Tokenizer,
    data: str,
    params: SamplingParams,
    limit: int = 0,
    batch_size: int = 16,
) -> dict:
    """Return the figures of measure_answers and measure_ends for the first `limit` (0 = all)
    conversations of `data`, `left_out` {reason: how many}, `places` of the first of them, and
    `answers`, a row for each.

    data: files, directories, globs, directories of prepare.py --kind=chat, of which the
    validation split counts. The ranks share the prompts; products have the dtype of the autocast
    around the call. Of several samples of a prompt the first one counts."""
    check_libraries()  # now, not after hours of generation
    questions, left_out, places = read_questions(data, limit)
    # All ranks read all questions and share the answering.
    prompts = [one.prompt for one in questions]
    answers = generate_answers(model, tokenizer, prompts, params, batch_size)
    # Without the prompts that do not fit: they have no answer that could be compared.
    pairs = [pair for pair in zip(questions, answers, strict=True) if pair[1]]
    if len(pairs) < len(questions):
        left_out[TOO_LONG] += len(questions) - len(pairs)
    if not pairs:
        raise UserError(f"generated: no prompt of {data} fits in block_size={model.cfg.block_size}")
    rows = []
    for question, answer in pairs:
        text, *others = answer
        answered = {"answer": text} | dict(zip(ENDS, others, strict=True))
        rows.append(question._asdict() | answered)
    found, of_each = measure_rows(rows)
    rows = [row | scores for row, scores in zip(rows, of_each, strict=True)]
    return found | {"left_out": dict(left_out), "places": places, "answers": rows}


def read_questions(data: str, limit: int = 0) -> tuple[list[Question], Counter, list[str]]:
    """Return (questions, {reason: how many are left out}, places of the first of these)."""
    found, left_out, places = [], Counter(), []
    for path in filter(None, split_names(data)):
        source = read_source(scored_path(path, "chat"), ChatReader(), 0.0)
        left_out += source.reader.dropped
        places += source.reader.places
        for *prompt, answer in source.train:
            if prompt:
                found.append(Question(prompt, answer["content"]))
            else:
                left_out[NO_PROMPT] += 1
    if not found:
        raise UserError(f"generated: no conversation of {data!r} has a prompt before its answer")
    return found[: limit or None], left_out, places


def generate_answers(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[list[dict]],
    params: SamplingParams,
    batch_size: int,
) -> list[Generated | None]:
    """Return the answer to each conversation, None if the prompt is longer than the context. All
    ranks pass the same prompts, share the work and get all answers."""
    ids = [prompt_ids(tokenizer, True, "", prompt) for prompt in prompts]
    fitting = [i for i, row in enumerate(ids) if len(row) <= model.cfg.block_size]

    def answer(own: range) -> Iterator[Generated]:
        mine, hidden = [ids[fitting[k]] for k in own], True if own.start else None
        results = Engine(model, tokenizer, batch_size).answer(mine, params)
        # They come as they end: short answers first.
        found = dict(tqdm(results, "answers", len(own), leave=False, disable=hidden))
        for k, result in sorted(found.items()):
            first = result.completions[0]
            text = opened_thoughts(tokenizer.decode(mine[k])) + first.text
            # stop_reason is the id that ended the answer, or the stop string, which is in no token
            # of its own.
            stopped = first.finish_reason == "stop" and first.stop_reason in tokenizer.stop_ids
            ended = first.finish_reason == "stop" and isinstance(first.stop_reason, int)
            yield Generated(text, first.finish_reason, stopped, len(first.ids) - ended)

    found = dict(zip(fitting, split_over_ranks(len(fitting), answer), strict=True))
    return [found.get(i) for i in range(len(prompts))]


def without_thoughts(answer: str) -> str:
    """Return an answer without the thoughts before it; "" if the thoughts never end."""
    # Where the prompt opened them, the answer may hold their end alone.
    before, end, _ = answer.partition(THINK_END)
    opened = bool(end) and THINK not in before
    return divide_thoughts(answer, opened, last=True)[1]


def measure_rows(rows: Sequence[dict]) -> tuple[dict, list[dict]]:
    """Return (n with the figures of measure_answers and measure_ends, the scores of each row)."""
    ends = [Generated(row["answer"], *(row[key] for key in ENDS)) for row in rows]
    found, of_each = measure_answers([end.text for end in ends], [row["reference"] for row in rows])
    return {"n": len(rows)} | found | measure_ends(ends), of_each


def measure_answers(answers: Sequence[str], references: Sequence[str]) -> tuple[dict, list[dict]]:
    """Return (figures of all answers together, those of each); one reference for each answer.

    bleu_13a, bleu_zh: see `bleu`, 0 to 100; the others are from 0 to 1, with their standard errors.
    rouge_l: mean F-measure. exact_match: equal but for white space around. Thoughts do not count.
    """
    answers, references = (
        list(map(without_thoughts, answers)),
        list(map(without_thoughts, references)),
    )
    n, scorer = len(answers), RougeL()
    of_each = []
    for answer, reference in zip(answers, references, strict=True):
        exact = answer.strip() == reference.strip()
        of_each.append({"rouge_l": scorer.score(answer, reference), "exact_match": exact})
    found = bleu(answers, references)
    found |= {name: sum(one[name] for one in of_each) / n for name in of_each[0]}
    rouge_l = [one["rouge_l"] for one in of_each]
    found["rouge_l_se"] = statistics.stdev(rouge_l) / math.sqrt(n) if n > 1 else math.nan
    return found | {"exact_match_se": standard_error(found["exact_match"], n)}, of_each


def measure_ends(answers: Sequence[Generated]) -> dict[str, float]:
    """Return self_stop, the fraction of answers that the model ended itself; empty, that of
    those that say nothing; mean_tokens, their mean length without the token that ended them."""
    # A model that was not tuned writes on until the limit; one that was tuned too long on short
    # answers may write none.
    columns = {
        "self_stop": [answer.stopped for answer in answers],
        "empty": [not without_thoughts(answer.text).strip() for answer in answers],
        "mean_tokens": [answer.n_tokens for answer in answers],
    }
    return {name: sum(column) / len(answers) for name, column in columns.items()}


def bleu(answers: Sequence[str], references: Sequence[str]) -> dict[str, float | int | str]:
    """Return sacrebleu's corpus BLEU (arXiv:1804.08771), its signature and the number of
    answers: bleu_zh for Chinese references, bleu_13a for the others."""
    from sacrebleu.metrics import BLEU

    # Chinese is counted by characters, the rest by words: the two are never mixed.
    texts: dict[str, list[tuple[str, str]]] = {"13a": [], "zh": []}
    for answer, reference in zip(answers, references, strict=True):
        texts["zh" if clean.language(reference) == "zh" else "13a"].append((answer, reference))
    found = {}
    for name, pairs in texts.items():
        if pairs:
            metric, (said, wanted) = BLEU(tokenize=name), zip(*pairs, strict=True)
            found[f"bleu_{name}"] = metric.corpus_score(said, [wanted]).score
            found[f"bleu_{name}_n"] = len(pairs)
            found[f"bleu_{name}_signature"] = str(metric.get_signature())
    return found


class RougeL:
    """ROUGE-L (Lin, 2004) of the library rouge-score with our own tokens."""

    # With L the length of the longest common subsequence, precision is L / length of the answer,
    # recall L / length of the reference, and the score is their harmonic mean. The library's own
    # tokenizer drops all but the letters a to z and digits, so all of Chinese.

    def __init__(self) -> None:
        from rouge_score.rouge_scorer import RougeScorer

        self.scorer = RougeScorer(["rougeL"], tokenizer=self)

    def tokenize(self, text: str) -> list[str]:
        return WORDS.findall(text.lower())

    def score(self, answer: str, reference: str) -> float:
        """Return the F-measure, from 0 to 1."""
        return self.scorer.score(reference, answer)["rougeL"].fmeasure


def check_libraries() -> None:
    """Raise UserError if a library is missing."""
    missing = [name for name in ("sacrebleu", "rouge_score") if not importlib.util.find_spec(name)]
    if missing:
        what = f"{' and '.join(missing)} missing; run: pip install sacrebleu rouge-score"
        raise UserError(f"generated: {what}")


def standard_error(share: float, n: int) -> float:
    """Return the standard error of a fraction of n: sample deviation / sqrt n; nan for n < 2."""
    return math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else math.nan
