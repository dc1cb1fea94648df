"""Instruction data from a few seed tasks and a model behind an OpenAI-compatible endpoint
(Self-Instruct, Alpaca).

    python tools/self_instruct.py --seeds=seed_tasks.jsonl --out=data/grown.jsonl --model=Qwen3-8B
    python tools/self_instruct.py ... --base_url=https://api.example.com/v1 --api_key_env=NAME

Replies are kept in <out>.journal, and `out`, lines of {"messages": [user, assistant], "request":
i}, is made from them: after a kill at any moment the same command goes on. A request shows tasks of
replies at least LAG requests older, and replies count in the order of requests: where equal prompts
get equal replies, `out` has the same bytes for any number of threads, kills and retries. Wang et
al., Self-Instruct (arXiv:2212.10560); Taori et al., Alpaca (2023).
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.errors import UserError, refuse
from groundup.files import readers, records, row_formats
from groundup.files.paths import find_files
from groundup.scores.client import Endpoint, Journal, Reply, read_key
from groundup.text import dedup

# ---- config: override with a config file or --key=value; see --help --------------------------
seeds = ""  # files, directories, globs of chats; the first turn of each is a task
out = ""  # the jsonl file to make or to go on with; <out>.journal beside it keeps the answers
n_tasks = 1000  # to make, at least 1; raise it to go on
base_url = "http://localhost:8000/v1"  # of vLLM, llama.cpp, Ollama; /chat/completions is added
model = ""  # as the endpoint calls it
api_key_env = ""  # name of the environment variable with the key; "" = none is sent
fields = '{"temperature": 1.0, "max_tokens": 4096}'  # what else a request holds, a JSON object
language = "en"  # en | zh | both (requests take turns): of the new tasks
tasks_per_request = 10  # asked for, at least 1
demos = 4  # tasks shown in a request, at least 1
rouge = 0.7  # ROUGE-L (from 0.01 to 1) at which an instruction is too similar to an earlier one
parallel = 8  # requests at once, from 1 to 32
timeout = 300.0  # seconds without a byte of an answer, at least 0.1
max_retries = 8  # at least 0; after HTTP 429, 5xx, a timeout, a broken connection
retry_wait = 1.0  # seconds before the first retry, at least 0, then doubled; Retry-After if longer
patience = 20  # stop after this many requests in a row without a new task, at least 1
seed = 1337  # decides which tasks are shown

LAG = 32  # requests: the most that may be on their way, see Growth.prompts
# Words or single Chinese characters of an instruction; Alpaca takes 4 to 150 words.
MIN_UNITS, MAX_UNITS = 3, 150
DEMO_CHARS = 1500  # longer tasks are not shown
# What an instruction must not ask for: the model can only read and write text.
BLOCKED = re.compile(
    r"(?<![A-Za-z0-9])(image|pictures?|photo|video|audio|draw|attached)(?![A-Za-z0-9])"
    "|图片|图像|照片|视频|音频|附件",
    re.IGNORECASE,
)
# How an output begins that is no answer
REFUSALS = ("as an ai", "i'm sorry", "i am sorry", "i cannot")
REFUSALS += ("作为一个ai", "作为人工智能", "抱歉", "我无法")
FORM = {  # the three marks, and what stands for no input
    "en": ("Instruction: ", "Input: ", "Output: ", "<noinput>"),
    "zh": ("指令：", "输入：", "输出：", "<无>"),
}
# A line may go on after a backslash: the model sees the line breaks that are left.
PROMPT = {
    "en": """You write tasks to train a language model with. It reads and writes text and can do \
nothing else.
Below are {shown} tasks. Write {asked} new ones, numbered {first} to {last}, in exactly this \
form, in English.
- Vary verb, subject, length and kind: questions, rewriting, classes, extraction, summaries, \
plans, letters, arithmetic,
  explanations, code, role play. No task says another, or one below, in other words.
- Instruction: an order or a question, one or two sentences, that can be carried out with text \
alone.
- Input: the very material that it is about, at most 100 words, no placeholder; <noinput> if \
none is needed.
- Output: the right and complete answer, at most 150 words.
- Each of the three marks carries the number of its task; after each task comes a line ###. \
Write nothing else.\n\n""",
    "zh": """你为训练语言模型编写任务。这个模型只能读写文字，别的都不能做。
下面有{shown}个任务。请另写{asked}个新任务，编号从{first}到{last}，格式完全照此，全部用中文。
- 动词、题材、长短和类型要多样：问答、改写、分类、信息抽取、摘要、计划、书信、讲解、计算、代码、角色扮演等。
  不得换个说法重复别的任务或下面的任务。
- 指令：一两句话的要求或问题，只用文字就能完成。
- 输入：指令所针对的具体材料，不超过150字，不得用占位符；不需要时写<无>。
- 输出：正确完整的回答，不超过250字。
- 三个标记都带任务的编号；每个任务之后单独一行###。不要写其他内容。\n\n""",
}
MARK = r"^[ \t#>*]*{}[ \t]*[.)、．][ \t]*(?:{})\**[ \t]*[:：]\**[ \t]*"
BEGIN = MARK.format(r"\d+", "instruction|指令")
PARTS = ((r"(?P<n>\d+)", "instruction|指令"), ("(?P=n)", "input|输入"), ("(?P=n)", "output|输出"))
TASK = re.compile(
    "(.*?)".join(MARK.format(*part) for part in PARTS)
    + rf"(.*?)(?P<end>^[ \t]*###[ \t]*$|(?={BEGIN})|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
BEGIN = re.compile(BEGIN, re.IGNORECASE | re.MULTILINE)
NO_INPUT = {"", "noinput", "no input", "none", "n/a", "无", "无输入"}
HAN = re.compile("[\u3400-\u9fff]")


class Task(NamedTuple):
    instruction: str
    input: str  # "" = none
    output: str


def read_seeds(paths: str) -> list[Task]:
    """Return the first question and answer of every conversation; print what is left out."""
    report, tasks = records.Report(), []
    for file in find_files(paths):
        tasks += [row.value for row in readers.read_rows(file, seed_of, "line", report=report)]
    for path, line, _, detail in report.places[:3]:
        print(f"left out: {path}:{line}: {detail}")
    print(f"{len(tasks):,} seed tasks, {report.problems.total():,} left out")
    if not tasks:
        raise UserError(f"self_instruct: no seed task in {paths!r}; give files of any chat shape")
    return tasks


def seed_of(row: object) -> tuple[Task | None, str]:
    """Return (Task, "") or (None, what is wrong). If a row has an instruction, the rest of the
    question is input.
    """
    turns, problem = row_formats.messages_of(row)
    turns = [turn for turn in turns if turn["role"] != "system"][:2]
    if problem or [turn["role"] for turn in turns] != ["user", "assistant"]:
        return None, problem or "it does not begin with a question and its answer"
    question, output = (turn["content"].strip() for turn in turns)
    if not question or not output:
        return None, "empty question or answer"
    fields = row if isinstance(row, dict) else {}  # a row may be the list of turns itself
    head = str(fields.get("instruction") or "").strip()
    head = head if head and question.startswith(head) else question
    return Task(head, question[len(head) :].strip(), output), ""


def prompt_text(tasks: list[Task], language: str, asked: int) -> str:
    """Return the request: what to write, then the tasks to show, numbered from 1; new ones go on
    from there.
    """
    *marks, none = FORM[language]
    n = len(tasks)
    text = PROMPT[language].format(shown=n, asked=asked, first=n + 1, last=n + asked)
    for number, task in enumerate(tasks, 1):
        parts = (task.instruction, task.input or none, task.output)
        for mark, part in zip(marks, parts, strict=True):
            text += f"{number}. {mark}{part}\n"
        text += "###\n"
    return text


def parse_tasks(text: str, is_cut: bool) -> tuple[list[Task], Counter[str]]:
    """Return the tasks of a reply, and how many cannot be used, by reason; no_task = there is none
    in it.

    is_cut: the reply was cut, so its last task is whole only if the line ### follows.
    """
    text = re.sub(r"\A\s*<think>.*?</think>", "", text, flags=re.DOTALL)
    begins = [begin.start() for begin in BEGIN.finditer(text)]
    found = {match.start(): match for match in TASK.finditer(text)}
    tasks, dropped = [], Counter({} if begins else {"no_task": 1})
    for begin in begins:
        match = found.get(begin)
        parts = match.group(2, 3, 4) if match else [""] * 3
        parts = [re.sub(r"\A(\s*\n)+", "", part).rstrip() for part in parts]
        task = Task(*parts)
        if is_cut and begin == begins[-1] and not (match and match["end"]):
            dropped["truncated"] += 1
        elif not task.instruction or not task.output or any(map(BEGIN.search, parts[:2])):
            dropped["malformed"] += 1
        else:
            has_input = task.input.strip("<>()[]（）.。 ").lower() not in NO_INPUT
            tasks.append(task if has_input else task._replace(input=""))
    return tasks, dropped


def common_length(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common subsequence (Hyyro, Bit-parallel LCS-length
    computation, 2004).
    """
    places: dict[int, int] = {}
    for i, unit in enumerate(a):
        places[unit] = places.get(unit, 0) | 1 << i
    every = row = (1 << len(a)) - 1
    for unit in b:
        same = row & places.get(unit, 0)
        row = ((row + same) | (row - same)) & every
    return len(a) - row.bit_count()


class Growth:
    """The tasks so far: a function of the seeds, the settings and the replies in the order of their
    requests.
    """

    def __init__(self, c: SimpleNamespace, given: list[Task]) -> None:
        self.c, self.given = c, given
        self.known = [units_of(task) for task in given]
        self.tasks: list[Task] = []
        self.requests: list[int] = []  # that each task came from
        self.dropped: Counter[str] = Counter()
        self.n_requests = self.n_tokens = self.n_barren = 0

    def is_done(self) -> bool:
        return len(self.tasks) >= self.c.n_tasks or self.n_barren >= self.c.patience

    def prompts(self) -> Iterator[str]:
        """Yield what to ask, until the growth is done: the same text whatever of the LAG requests
        before has been answered.
        """
        c = self.c
        for request in itertools.count(self.n_requests):
            if self.is_done():
                return
            rng = random.Random(f"{c.seed}:{request}")
            language = ("en", "zh")[request % 2] if c.language == "both" else c.language
            own = choose(rng, self.tasks[: bisect_right(self.requests, request - LAG)], language, 1)
            shown = own + choose(rng, self.given, language, c.demos - len(own))
            rng.shuffle(shown)
            yield prompt_text(shown, language, c.tasks_per_request)

    def take(self, reply: Reply) -> bytes:
        """Return new lines for `out` from the next request's reply. Tasks past n_tasks are not
        looked at.
        """
        is_refused, rows = reply.finish == "refused", []
        tasks, dropped = [], Counter({"refused_request": 1})
        if not is_refused:
            tasks, dropped = parse_tasks(reply.text, reply.finish not in ("stop", ""))
        self.dropped += dropped
        for task in tasks:
            if len(self.tasks) == self.c.n_tasks:
                break
            if problem := self.problem(task):
                self.dropped[problem] += 1
                continue
            self.known.append(units_of(task))
            self.tasks.append(task)
            self.requests.append(self.n_requests)
            rows.append({"messages": turns_of(task), "request": self.n_requests})
        self.n_requests += 1
        self.n_tokens += reply.tokens
        self.n_barren = 0 if rows else self.n_barren + 1
        return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)

    def problem(self, task: Task) -> str:
        """Return why a task is left out, or ""."""
        units, in_it = units_of(task)
        if not MIN_UNITS <= len(units) <= MAX_UNITS:
            return "too_short" if len(units) < MIN_UNITS else "too_long"
        if BLOCKED.search(task.instruction):
            return "blocked_word"
        is_copy = task.output in (task.instruction, task.input)
        if task.output.lower().startswith(REFUSALS) or is_copy:
            return "no_answer"
        for other, in_other in self.known:
            # ROUGE-L is twice the common length over the sum of both. The common length is at most
            # the number of units that the other has, too: most comparisons end with that bound.
            length = len(units) + len(other)
            bound = len(units) - len(in_it - in_other)
            if 2 * bound / length < self.c.rouge:
                continue
            if 2 * common_length(units, other) / length >= self.c.rouge:
                return "duplicate" if units == other else "similar"
        return ""


def turns_of(task: Task) -> list[dict]:
    """Return a task as a question and its answer, whatever form the two may have as texts."""
    asked = "\n".join(filter(None, [task.instruction, task.input]))
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": task.output}]


def units_of(task: Task) -> tuple[list[int], set[int]]:
    """Return hashes of the words and single Chinese characters of the instruction, in order and as
    a set.
    """
    units = dedup.units([task.instruction]).hashes.tolist()
    return units, set(units)


def choose(rng: random.Random, tasks: list[Task], language: str, wanted: int) -> list[Task]:
    """Draw tasks that are short enough to be shown, of the language if it has enough."""
    short = [task for task in tasks if sum(map(len, task)) <= DEMO_CHARS]
    same = [task for task in short if bool(HAN.search(task.instruction)) == (language == "zh")]
    pool = same if len(same) >= wanted else short
    return rng.sample(pool, min(wanted, len(pool)))


def check(c: SimpleNamespace) -> None:
    """Raise UserError for settings that make no sense."""
    is_url = re.match("https?://", c.base_url)
    what = "give seeds, out, model, and a base_url that begins with http:// or https://"
    refuse(not (c.seeds and c.out and c.model and is_url), what)
    is_object = isinstance(row_formats.unpacked(c.fields), dict)
    refuse(not is_object, f"fields must be a JSON object, got {c.fields!r}")


def run(c: SimpleNamespace) -> None:
    """Ask until there are n_tasks."""
    check(c)
    key, given, path = read_key(c.api_key_env), read_seeds(c.seeds), c.out + ".journal"
    names = ("model", "fields", "language", "tasks_per_request", "demos", "rouge", "seed")
    settings = {name: getattr(c, name) for name in names}
    settings["seeds"] = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
    if os.path.exists(c.out) and not os.path.exists(path):
        raise UserError(f"self_instruct: {c.out} exists, but not {path}; use another out")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    journal, growth = Journal(path, settings), Growth(c, given)
    lines = [growth.take(reply) for reply in journal.replies if not growth.is_done()]
    Path(c.out + ".tmp").write_bytes(b"".join(lines))
    os.replace(c.out + ".tmp", c.out)
    how = (c.parallel, c.timeout, c.max_retries, c.retry_wait)
    endpoint = Endpoint(c.base_url, c.model, key, json.loads(c.fields), *how)
    bar = tqdm(total=c.n_tasks, initial=len(growth.tasks), unit="task", disable=None)
    replies = journal.ask(endpoint, growth.prompts(), min(2 * c.parallel, LAG))
    with open(c.out, "ab") as file, bar, contextlib.closing(replies):
        for reply in replies:
            file.write(growth.take(reply))
            file.flush()
            bar.update(len(growth.tasks) - bar.n)
            if growth.is_done():
                break
    dropped = [f"{reason} {n:,}" for reason, n in sorted(growth.dropped.items())]
    what = f"{len(growth.tasks):,} tasks, {growth.n_requests:,} requests"
    print(f"{what}, {growth.n_tokens:,} tokens; left out: {', '.join(dropped) or 'nothing'}")
    if len(growth.tasks) < c.n_tasks:
        what = f"{c.patience} requests in a row gave no new task; see {path}"
        raise UserError(f"self_instruct: {what}")


if __name__ == "__main__":
    config = configure(globals())
    run(SimpleNamespace(**config))
