"""tools/self_instruct.py and scores/client.py against an endpoint of our own, with planted failures."""

import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest

from groundup.errors import UserError
from groundup.files import row_formats
from groundup.text import dedup

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import self_instruct as si  # noqa: E402

from groundup.scores import client  # noqa: E402

WORDS = [a + b for a in "ba ko ri tu me sa lo fi de nu".split() for b in "lan gor pex min tas vol".split()]
HAN = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜金生丽水玉出昆冈"


def made_up(prompt: str, n: int = 5) -> str:
    """Tasks that depend on the prompt alone: three new ones, a near copy of the first, one that is broken."""
    rng = random.Random(hashlib.sha256(prompt.encode()).digest())
    zh = "编号从" in prompt
    first = int(re.search(r"编号从(\d+)" if zh else r"numbered (\d+)", prompt)[1])
    marks = ("指令：", "输入：", "输出：") if zh else ("Instruction: ", "Input: ", "Output: ")
    texts = ["".join(rng.sample(HAN, 12)) if zh else " ".join(rng.sample(WORDS, 9)) for _ in range(3)]
    texts += [texts[0] + ("吧" if zh else " please"), texts[1]]
    lines = []
    for k, text in enumerate(texts[:n], first):
        lines += [f"{k}. {marks[0]}{text}", f"{k}. {marks[1]}{'<无>' if zh else '<noinput>'}"]
        lines += [f"{k}. {marks[2]}answer {text}", "###"] if k < first + 4 else []
    return "\n".join(lines)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # of more clients at once than five, some would ask again after a second


class Endpoint:
    """failures: what to do with the k-th request that comes, instead of answering it."""

    def __init__(self):
        self.failures, self.requests, self.keys, self.stopped = {}, [], [], threading.Event()
        self.reply = lambda prompt: (made_up(prompt), "stop")
        self.lock, self.on_request = threading.Lock(), lambda k: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    k = len(outer.requests)
                    outer.requests.append(body)
                    outer.keys.append(self.headers.get("Authorization"))
                outer.on_request(k)
                outer.answer(self, body, outer.failures.get(k, outer.failures.get("all")))

            def log_message(self, *args):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def answer(self, handler, body, failure):
        assert handler.path == "/v1/chat/completions"
        text, finish = self.reply(body["messages"][0]["content"])
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
        data = json.dumps({"choices": [choice], "usage": {"total_tokens": 7}}).encode()
        status, headers = 200, {}
        if failure == "close":
            return handler.connection.close()
        if failure == "hang":
            self.stopped.wait(5)
            return handler.connection.close()
        if isinstance(failure, int):
            status, data, headers = failure, b'{"error": "planted"}', {"Retry-After": "0.01"}
        if failure in ("not json", "no choices"):
            data = b"<html>" if failure == "not json" else b'{"error": {"message": "busy"}}'
        length = len(data) + (100 if failure == "cut" else 0)
        try:
            handler.send_response(status)
            for name, value in {"Content-Length": str(length), **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:
            pass  # the client was killed


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Endpoint()
    yield made
    made.stopped.set()
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def settings(tmp_path, endpoint):
    """The script's defaults, with a few seed tasks."""
    values = {k: v for k, v in vars(si).items() if k == k.lower() and isinstance(v, (bool, int, float, str))}
    values = {k: v for k, v in values.items() if not k.startswith("_")}
    rows = [{"instruction": f"Name {n} {w} things", "instances": [{"input": "", "output": w}]} for n, w in SEEDS]
    (tmp_path / "seeds.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    own = {"seeds": str(tmp_path / "seeds.jsonl"), "out": str(tmp_path / "new.jsonl"), "model": "m", "n_tasks": 40}
    own |= {"base_url": endpoint.url, "retry_wait": 0.01, "timeout": 2.0, "max_retries": 3}
    return SimpleNamespace(**{**values, **own})


SEEDS = [("three", "red"), ("seven", "very old"), ("some", "small"), ("no", "broken"), ("all", "lost and found")]


def changed(c, **values):
    return SimpleNamespace(**{**vars(c), **values})


def rows_of(c):
    data = Path(c.out).read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


# ---- ROUGE-L --------------------------------------------------------------------------------------------------------


def lcs(a, b):
    """The textbook's recursion."""

    @lru_cache(None)
    def length(i, j):
        if i == len(a) or j == len(b):
            return 0
        if a[i] == b[j]:
            return 1 + length(i + 1, j + 1)
        return max(length(i + 1, j), length(i, j + 1))

    return length(0, 0)


def test_common_length_is_the_textbooks():
    rng = random.Random(1)
    for _ in range(500):
        a, b = (tuple(rng.choices(range(rng.randint(1, 9)), k=rng.randint(0, 25))) for _ in range(2))
        assert si.common_length(list(a), list(b)) == lcs(a, b)
    assert si.common_length([1] * 150, [1] * 149) == 149


def tasks_of(n, rng, words):
    return [si.Task(" ".join(rng.choices(words, k=rng.randint(3, 12))), "", "out") for _ in range(n)]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 1.0])
def test_kept_instructions_are_those_that_brute_force_keeps(settings, threshold):
    """And the bound that spares most of the comparisons never changes a decision."""
    rng = random.Random(2)
    growth = si.Growth(changed(settings, rouge=threshold, n_tasks=10**6), [])
    kept, n_similar = [], 0
    for task in tasks_of(130, rng, "abcdefgh"):
        words = tuple(task.instruction.split())
        close = any(2 * lcs(words, other) / (len(words) + len(other)) >= threshold for other in kept)
        same = any(words == other for other in kept)
        problem = growth.problem(task)
        assert (problem in ("similar", "duplicate")) == close
        assert problem != "duplicate" or same
        n_similar += close
        if not close:
            kept.append(words)
            growth.known.append(si.units_of(task))
    assert len(kept) > 20 and (n_similar > 5 or threshold == 1.0)


def test_chinese_is_compared_by_characters(settings):
    growth = si.Growth(settings, [si.Task("请写一首关于春天的诗", "", "好")])
    assert growth.problem(si.Task("请写一首关于秋天的诗", "", "好")) == "similar"  # 9 of 10 are common: 0.9
    assert growth.problem(si.Task("请写一首关于春天的诗。", "", "好")) == "duplicate"  # stops are no units
    assert growth.problem(si.Task("把下面的句子翻译成英文", "", "好")) == ""


@pytest.mark.parametrize(
    "task, reason",
    [
        (si.Task("Go home", "", "x"), "too_short"),
        (si.Task("word " * 151, "", "x"), "too_long"),
        (si.Task("Describe this image in words", "", "x"), "blocked_word"),
        (si.Task("Imagine an imagery of old poems", "", "x"), ""),
        (si.Task("描述这张图片的内容", "", "好"), "blocked_word"),
        (si.Task("Say who you are", "", "I'm sorry, but I cannot"), "no_answer"),
        (si.Task("Repeat the given line", "a line", "a line"), "no_answer"),
    ],
)
def test_reasons_to_leave_a_task_out(settings, task, reason):
    assert si.Growth(settings, []).problem(task) == reason


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_is_shown_is_read_back(language):
    tasks = [si.Task("Do it", "", "done\n\n  1. a\n2. b"), si.Task("做吧", "第一行\n第二行", "好的")]
    tasks.append(si.Task("Sum", "1 2", "3"))
    prompt = si.prompt_text(tasks, language, 10)
    assert si.parse_tasks(prompt, False) == (tasks, Counter())
    assert ("numbered 4 to 13" if language == "en" else "编号从4到13") in prompt


@pytest.mark.parametrize(
    "text, tasks, dropped",
    [
        ("**4. Instruction:** Do\n**4. Input:** <noinput>\n**4. Output:** **Yes**", [("Do", "", "**Yes**")], {}),
        ("### 4) instruction: Do\n4) input: None\n4) output:\n  x = 1\n###\nBye!", [("Do", "", "  x = 1")], {}),
        ("4．指令: 做\n4．输入：（无）\n4．输出:好", [("做", "", "好")], {}),
        ("<think>1. Instruction: a\n1. Output: b</think>\n2. Instruction: c\n2. Input:\n2. Output: d", [("c", "", "d")],
         {}),
        ("Sure!\n1. Instruction: a\n1. Output: b\n###\n2. Instruction: c\n2. Input: d\n2. Output: e", [("c", "d", "e")],
         {"malformed": 1}),
        ("1. Instruction: a\n1. Input: x\n1. Output:\n###\n", [], {"malformed": 1}),
        ("7. Instruction: a\n7. Input: 5. Output: z\n3. Input: y\n7. Output: b",
         [("a", "5. Output: z\n3. Input: y", "b")], {}),
        ("I would rather not.", [], {"no_task": 1}),
        ("", [], {"no_task": 1}),
    ],
)  # fmt: skip
def test_parsing(text, tasks, dropped):
    assert si.parse_tasks(text, False) == ([si.Task(*task) for task in tasks], Counter(dropped))


def test_the_task_that_an_answer_breaks_off_in_is_left_out():
    """Cut at every character: whole tasks are those of which the line ### has come."""
    text = si.prompt_text([si.Task("Do this", "x", "done"), si.Task("Do that", "", "also")], "en", 1)
    text = text[text.index("1. Instruction") :]
    for end in range(len(text) + 1):
        tasks, dropped = si.parse_tasks(text[:end], True)
        assert len(tasks) == len(re.findall("(?m)^###$", text[:end]))
        assert all(task in (si.Task("Do this", "x", "done"), si.Task("Do that", "", "also")) for task in tasks)
        begun = len(re.findall("Instruction:", text[:end]))
        assert sum(dropped.values()) == (begun - len(tasks) if begun else 1)


def test_seeds_of_any_shape(tmp_path, capsys):
    rows = [
        {"instruction": "Add", "instances": [{"input": "1 2", "output": "3"}]},
        {"instruction": "Greet", "input": "", "output": "Hi"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Q"}]
         + [{"role": "assistant", "content": "A"}, {"role": "user", "content": "Q2"}]},
        {"conversations": [{"from": "human", "value": "问"}, {"from": "gpt", "value": "答"}]},
        {"instruction": "Empty", "output": " "},
        [{"role": "user", "content": "Alone"}, {"role": "assistant", "content": "A list"}],
        {"foo": 1},
    ]  # fmt: skip
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\nplain\n", encoding="utf-8")
    expected = [("Add", "1 2", "3"), ("Greet", "", "Hi"), ("Q", "", "A"), ("问", "", "答"), ("Alone", "", "A list")]
    assert si.read_seeds(str(path)) == [si.Task(*task) for task in expected]
    assert "s.jsonl:5: bad_field: empty" in (said := capsys.readouterr().out) and "3 left out" in said
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="no seed task"):
        si.read_seeds(str(path))


# ---- runs -----------------------------------------------------------------------------------------------------------


SAYS_TURNS = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])


@pytest.mark.parametrize(
    ("instruction", "given", "output"),
    [
        ("Write a chat as JSON.", "", SAYS_TURNS),
        ("Human: which colour has grass?\nAssistant:", "", "green"),
        ("<|im_start|>user tell me what this mark means", "", "a mark"),
        ("[INST] Name the parts. [/INST] What is left?", "a b", "nothing"),
    ],
)
def test_a_task_is_two_turns_whatever_it_says(settings, instruction, given, output):
    """A reader of rows would take these for conversations, or for what a template has written."""
    growth = si.Growth(settings, si.read_seeds(settings.seeds))
    marks = f"1. Instruction: {instruction}\n1. Input: {given or '<noinput>'}\n1. Output: {output}\n###"
    (row,) = map(json.loads, growth.take(client.Reply(marks, "stop", 0)).splitlines())
    asked = "\n".join(filter(None, [instruction, given]))
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    assert row["messages"] == turns


def test_a_run(settings, endpoint, capsys, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sesame")
    si.run(changed(settings, api_key_env="THE_KEY"))
    rows, said = rows_of(settings), capsys.readouterr().out
    assert len(rows) == 40
    assert set(endpoint.keys) == {"Bearer sesame"}
    assert "sesame" not in Path(settings.out + ".journal").read_text("utf-8")
    for row in rows:
        messages, problem = row_formats.messages_of(row)
        assert not problem and [m["role"] for m in messages] == ["user", "assistant"]
        assert messages[1]["content"] == "answer " + messages[0]["content"]
    # Of five tasks three are new, then comes a near copy, then one without output; the last answer is not used up.
    assert "40 tasks, 14 requests, 98 tokens; left out: malformed 14, similar 13" in said
    body = endpoint.requests[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 1.0, 4096)


def test_earlier_tasks_are_shown_after_a_while_and_never_more_than_asked(settings, endpoint):
    si.run(changed(settings, n_tasks=200))
    own = {row["messages"][0]["content"] for row in rows_of(settings)}
    prompts = sorted(endpoint.requests, key=lambda body: body["messages"][0]["content"])
    shown = [[task.instruction for task in si.parse_tasks(b["messages"][0]["content"], False)[0]] for b in prompts]
    assert {len(tasks) for tasks in shown} == {4}
    assert Counter(sum(text in own for text in tasks) for tasks in shown).keys() == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("language", ["zh", "both"])
def test_chinese(settings, language):
    si.run(changed(settings, language=language, n_tasks=20))
    rows = rows_of(settings)
    chinese = [bool(si.HAN.search(row["messages"][0]["content"])) for row in rows]
    assert len(rows) == 20 and (all(chinese) if language == "zh" else 5 < sum(chinese) < 15)


def straight(c, tmp_path):
    c = changed(c, out=str(tmp_path / "straight.jsonl"), parallel=1)
    si.run(c)
    return Path(c.out).read_bytes()


@pytest.mark.slow
def test_threads_failures_and_growth_by_parts_change_nothing(settings, endpoint, tmp_path):
    expected = straight(changed(settings, n_tasks=150), tmp_path)
    n = len(endpoint.requests)
    planted = [429, 500, 503, "close", "cut", "not json", "no choices", "hang"]
    endpoint.failures = {n + 3 * k: failure for k, failure in enumerate(planted)}
    for n_tasks in (1, 60, 61, 150):
        si.run(changed(settings, n_tasks=n_tasks, parallel=7, timeout=0.5))
        assert rows_of(settings) == [json.loads(line) for line in expected.split(b"\n")[:n_tasks]]
    assert Path(settings.out).read_bytes() == expected


def test_every_place_where_a_kill_may_cut_the_files(settings, endpoint, tmp_path):
    c = changed(settings, n_tasks=12, parallel=2)
    expected = straight(c, tmp_path)
    journal = (tmp_path / "straight.jsonl.journal").read_bytes()
    rng = random.Random(3)
    ends = [i for i, byte in enumerate(journal) if byte == 10]
    cuts = {0, 1, len(journal)} | {e + d for e in ends for d in (0, 1)} | set(rng.sample(range(len(journal)), 20))
    for cut in sorted(cuts):
        Path(c.out + ".journal").write_bytes(journal[:cut])
        Path(c.out).write_bytes(expected[: rng.randint(0, len(expected))])
        before = len(endpoint.requests)
        si.run(c)
        assert Path(c.out).read_bytes() == expected
        assert Path(c.out + ".journal").read_bytes() == journal
        answered = max(journal[:cut].count(b"\n") - 1, 0)
        assert len(endpoint.requests) - before <= (4 - answered + 2 * c.parallel if answered < 4 else 0)


def start(c):
    keys = ("seeds", "out", "model", "base_url", "n_tasks", "parallel", "retry_wait")
    flags = [f"--{k}={getattr(c, k)}" for k in keys]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return forks.Popen([sys.executable, ROOT / "tools" / "self_instruct.py", *flags], **pipes)


def run_as_command(c, timeout):
    child = start(c)
    try:
        out, errors = child.communicate(timeout=timeout)
    finally:
        child.kill()
    return subprocess.CompletedProcess(child.args, child.returncode, out, errors)


@pytest.mark.slow
def test_kill_and_go_on(settings, endpoint, tmp_path):
    c = changed(settings, n_tasks=90, parallel=3)
    expected = straight(c, tmp_path)
    for kills_after in (2, 9, 7):
        last, children, started = len(endpoint.requests) + kills_after, [], threading.Event()

        def kill(k, last=last, children=children, started=started):
            if k == last:
                started.wait(10)
                os.kill(children[0].pid, signal.SIGKILL)

        endpoint.on_request = kill
        children.append(start(c))
        started.set()
        children[0].communicate(timeout=30)
        assert children[0].returncode == -signal.SIGKILL
    endpoint.on_request = lambda k: None
    child = start(c)
    said, errors = child.communicate(timeout=30)
    assert child.returncode == 0, errors
    assert "90 tasks" in said and Path(c.out).read_bytes() == expected
    n_needed = expected.count(b"\n") // 3
    assert len(endpoint.requests) <= 2 * n_needed + 4 * 2 * c.parallel + 2 * c.parallel  # what was on the way, no more


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_a_retry_cannot_mend_ends_at_once(settings, endpoint, status):
    endpoint.failures["all"] = status
    with pytest.raises(UserError, match=f"HTTP {status}.*planted"):
        si.run(changed(settings, parallel=1))
    assert len(endpoint.requests) <= 2


@pytest.mark.slow
def test_a_service_that_nobody_started_is_not_waited_for(settings, endpoint):
    """With retries that would take minutes; one connection is tried, and one line says what to do."""
    with socket.socket() as free:  # bound, so that it is nobody else's, but it does not listen
        free.bind(("127.0.0.1", 0))
        c = changed(settings, base_url=f"http://127.0.0.1:{free.getsockname()[1]}/v1", retry_wait=60.0)
        done = run_as_command(c, timeout=30)
    assert done.returncode == 1 and "start the service, or mend base_url" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    si.run(settings)  # and the same command goes on
    assert len(rows_of(settings)) == 40


def test_a_service_that_has_answered_is_waited_for(settings, endpoint, monkeypatch):
    """It goes away in the midst of a run, and comes back; what it answered in an earlier run does not count."""
    refused, post = [], client.post

    def away(*args):
        if 3 <= len(endpoint.requests) and len(refused) < 5:
            refused.append(args)
            raise client.Unreachable("planted", 0.0)
        return post(*args)

    monkeypatch.setattr(client, "post", away)
    si.run(changed(settings, max_retries=8))
    assert len(rows_of(settings)) == 40 and len(refused) == 5
    refused.clear()
    with pytest.raises(UserError, match="start the service, or mend base_url"):
        si.run(changed(settings, n_tasks=80))
    assert len(refused) == 1


def test_retries_end(settings, endpoint):
    endpoint.failures["all"] = 503
    with pytest.raises(UserError, match="HTTP 503.*4 times"):
        si.run(changed(settings, parallel=1))
    endpoint.failures.clear()
    si.run(settings)  # and the same command goes on
    assert len(rows_of(settings)) == 40


def test_waits_grow_and_heed_the_endpoint(monkeypatch):
    waits, troubles = [], iter([0.0, 0.0, 7.0, 0.0, 1e9, None])
    monkeypatch.setattr(time, "sleep", waits.append)

    def post(*args):
        asked = next(troubles)
        if asked is None:
            return client.Reply("ok", "stop", 0)
        raise client.Trouble("planted", asked)

    monkeypatch.setattr(client, "post", post)
    assert client.ask(client.Endpoint("http://u", "m", max_retries=5), "Hi", "request 1").text == "ok"
    assert 0.5 <= waits[0] <= 1 and 1 <= waits[1] <= 2 and waits[2] == 7 and 4 <= waits[3] <= 8 and waits[4] == 600


def test_a_prompt_that_is_refused_is_counted_and_passed_over(settings, endpoint, capsys):
    endpoint.failures = {2: 400, 5: 422}
    si.run(changed(settings, parallel=1))
    assert "refused_request 2" in capsys.readouterr().out and len(rows_of(settings)) == 40


@pytest.mark.slow
def test_an_endpoint_that_gives_nothing_new_is_left(settings, endpoint):
    endpoint.reply = lambda prompt: ("1. Instruction: Always the same thing\n1. Input:\n1. Output: x", "stop")
    with pytest.raises(UserError, match="5 requests in a row"):
        si.run(changed(settings, patience=5))
    assert len(rows_of(settings)) == 1
    endpoint.reply = lambda prompt: (made_up(prompt), "stop")
    with pytest.raises(UserError):
        si.run(changed(settings, patience=5))
    si.run(changed(settings, patience=6))  # what was found does not keep it from going on
    assert len(rows_of(settings)) == 40


def test_cut_and_odd_answers(settings, endpoint, capsys):
    n = iter(range(10**6))
    odd = {1: (None, "stop"), 2: ("half an emoji \ud83d", "stop"), 3: ("", None)}
    endpoint.reply = lambda prompt: odd.get(i := next(n), (made_up(prompt, 3)[: -1 if i == 4 else None], "length"))
    si.run(changed(settings, parallel=1))
    said = capsys.readouterr().out
    assert "no_task 3" in said and "truncated 1" in said


def test_other_settings_other_file(settings, tmp_path):
    si.run(changed(settings, n_tasks=3))
    with pytest.raises(UserError, match=r"was made with model='m', rouge=0.7; use another out"):
        si.run(changed(settings, model="other", rouge=0.6))
    (tmp_path / "seeds.jsonl").write_text('{"question": "a b c", "answer": "d"}', encoding="utf-8")
    with pytest.raises(UserError, match="was made with seeds="):
        si.run(settings)
    Path(settings.out + ".journal").unlink()
    with pytest.raises(UserError, match="exists, but not"):
        si.run(settings)


def test_damage_and_a_second_process(settings):
    si.run(changed(settings, n_tasks=3))
    path = Path(settings.out + ".journal")
    other = si.Journal(str(path), {})
    with pytest.raises(UserError, match="another process"):
        si.run(settings)
    other.file.close()
    path.write_bytes(path.read_bytes().replace(b'"finish"', b"finish", 1))
    with pytest.raises(UserError, match="is damaged"):
        si.run(settings)


@pytest.mark.parametrize(
    "flag",
    ["--parallel=33", "--rouge=0", "--base_url=file:///etc/x", "--language=de", "--demos=0", "--fields=[]"]
    + ["--model=", "--api_key_env=NO_SUCH_KEY", "--api_key_env=EMPTY_KEY", "--seeds=/no/such/file", "--nonsense=1"],
)
def test_mistakes_are_one_line(settings, flag, monkeypatch):
    monkeypatch.setenv("EMPTY_KEY", "")
    flags = [f"--{k}={getattr(settings, k)}" for k in ("seeds", "out", "model", "base_url") if f"--{k}=" not in flag]
    flags.append(flag)
    done = forks.run([sys.executable, ROOT / "tools/self_instruct.py", *flags], capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert not Path(settings.out).exists()


def test_units_are_words_and_characters():
    """What the thresholds count."""
    assert len(si.units_of(si.Task("Write two lines, 写诗!", "", ""))[0]) == 5
    assert len(dedup.units(["写诗"]).hashes) == 2
