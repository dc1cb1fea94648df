"""What the page of serve.py needs of the server: headers, CORS, the file of preferences. The page: test_browser.py."""

import json
import urllib.error
import urllib.request

import pytest
from test_sample import save_run
from test_serve import serving

from groundup.generate.openai_api import Refused
from groundup.generate.page import append, examples, preference
from groundup.tokens.pairs import usable_pair

WAIT = 30  # seconds, on a busy machine


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    return [save_run(root / name, seed=seed, stage="sft", block_size=512) for seed, name in ((3, "a"), (4, "b"))]


@pytest.fixture(scope="module")
def server(directories, tmp_path_factory):
    file = tmp_path_factory.mktemp("clicks") / "new" / "preferences.jsonl"
    with serving(*directories, preferences=str(file), max_new_tokens=20) as (url, app):
        yield url, app, file


def ask(url, method="GET", body=None, **headers):
    """-> (status, headers, text)"""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers | {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_the_page_may_load_nothing(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, headers, page = ask(server[0] + "/")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect-src 'self'" in policy
    assert "unsafe" not in policy and "*" not in policy
    links = [word for word in page.split() if word.startswith(("src=", "href=")) and "://" in word]
    assert links == [] and page.count("innerHTML") == 1  # in fragment(), through the policy that the headers name
    assert policy.endswith("trusted-types groundup")


def test_markdown_is_rendered(server):
    status, _, text = ask(server[0] + "/v1/render", "POST", {"text": "*a*\n\n<b>", "whole": False})
    assert status == 200 and json.loads(text) == {"html": "<p><em>a</em></p>\n", "rest": "<b>"}
    assert ask(server[0] + "/v1/render", "POST", {"text": 5})[0] == 400


def test_questions_to_begin_with_come_from_the_data(tmp_path):
    checkpoint = tmp_path / "out/run/step_000001"
    checkpoint.mkdir(parents=True)
    assert examples(checkpoint) == []
    data = tmp_path / "data"
    data.mkdir()
    (checkpoint.parent / "config.py").write_text(f"data = '{data}'\n", encoding="utf-8")
    assert examples(checkpoint) == []
    rows = [{"question": f"What is {i}?" + "x" * 60 * (i % 2), "answer": "a"} for i in range(12)]
    lines = "".join(json.dumps(row) + "\n" for row in rows) + "damaged\n"
    (data / "held_out.jsonl").write_text(lines, encoding="utf-8")
    found = examples(checkpoint)
    assert len(found) == 3 and all(len(question) < 60 for question in found)


def test_other_sites_are_answered_only_if_they_are_named(directories, server):
    foreign = {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}
    foreign["Access_Control_Request_Headers"] = "authorization,content-type,x-stainless-lang"
    allowed = "Access-Control-Allow-Origin"
    for method in ("GET", "OPTIONS"):
        assert allowed not in ask(server[0] + "/v1/models", method, **foreign)[1]
    with serving(directories[0], cors_origins="https://a.example, https://b.example", api_key="sesame") as (url, _):
        status, headers, _ = ask(url + "/v1/chat/completions", "OPTIONS", **foreign)
        assert (status, headers[allowed]) == (200, "https://a.example")
        assert "x-stainless-lang" in headers["Access-Control-Allow-Headers"]
        local = foreign | {"Access_Control_Request_Private_Network": "true"}
        status, headers, _ = ask(url + "/v1/chat/completions", "OPTIONS", **local)
        assert (status, headers["Access-Control-Allow-Private-Network"]) == (200, "true")
        status, headers, _ = ask(url + "/v1/models", Origin="https://a.example", Authorization="Bearer sesame")
        assert (status, headers[allowed]) == (200, "https://a.example")
        status, headers, _ = ask(url + "/v1/models", Origin="https://a.example")
        assert (status, headers[allowed]) == (401, "https://a.example")  # the site can read what is wrong
        assert allowed not in ask(url + "/v1/models", Origin="https://c.example", Authorization="Bearer sesame")[1]
        assert ask(url + "/")[0] == 200  # the page asks for the key


ANSWERS = [{"model": name, "content": text, "finish_reason": "stop"} for name, text in (("a", "one"), ("b", "two"))]
CLICK = {"messages": [{"role": "user", "content": "?"}], "answers": ANSWERS, "better": 1}


def test_a_click_is_a_row_that_dpo_reads():
    row, unused = preference(json.dumps(CLICK).encode(), system="Be brief.")
    assert not unused and (row["chosen_model"], row["rejected_model"], row["chosen_was_shown"]) == ("b", "a", "second")
    prompt, chosen, rejected = usable_pair(row)
    assert (prompt[0]["content"], chosen, rejected) == ("Be brief.", "two", "one")
    assert usable_pair(preference(json.dumps(CLICK | {"better": 0}).encode(), "")[0]).chosen == "one"
    assert preference(json.dumps(CLICK | {"better": "tie"}).encode(), "")[1] == "tie"
    cut = CLICK | {"answers": [ANSWERS[0], ANSWERS[1] | {"finish_reason": "length"}]}
    assert preference(json.dumps(cut).encode(), "")[1] == "unfinished answer"  # the row is kept, for people


@pytest.mark.parametrize(
    "change",
    [
        {"better": 2}, {"better": True}, {"better": [0]}, {"answers": ANSWERS[:1]}, {"answers": ["one", "two"]},
        {"answers": [ANSWERS[0], ANSWERS[0]]}, {"answers": [ANSWERS[0], {"content": "\u200b"}]},
        {"answers": [ANSWERS[0], {"content": 5}]}, {"messages": []}, {"messages": 5},
    ],
)  # fmt: skip
def test_a_click_that_dpo_could_not_read_is_refused(change):
    with pytest.raises(Refused) as error:
        preference(json.dumps(CLICK | change).encode(), "")
    assert error.value.status == 400


def test_any_text_is_a_row(tmp_path):
    """Half a surrogate pair is JSON, but no UTF-8."""
    odd = [ANSWERS[0] | {"content": "\ud800 one\u2028\n", "model": "\udfff"}, ANSWERS[1]]
    append(tmp_path / "rows.jsonl", preference(json.dumps(CLICK | {"answers": odd}).encode(), "")[0])
    (line,) = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert usable_pair(json.loads(line)).rejected == "\ufffd one\u2028\n"


def test_a_full_disk_leaves_no_half_row(server, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    append(file, {"a": "世"})
    monkeypatch.setattr("groundup.generate.page.json.dumps", lambda *_, **__: "x" * 10)
    monkeypatch.setattr("builtins.open", lambda *a, real=open, **k: Full(real(*a, **k)))
    with pytest.raises(OSError, match="No space left"):
        append(file, {})
    monkeypatch.undo()
    assert file.read_text(encoding="utf-8") == '{"a": "世"}\n'
    server[2].parent.mkdir(exist_ok=True)
    blocked = server[2].with_suffix(".ties.jsonl")
    blocked.mkdir()  # nothing can be written there
    status, _, text = ask(server[0] + "/v1/preferences", "POST", CLICK | {"better": "tie"})
    blocked.rmdir()
    assert status == 500 and f"cannot write {blocked}: Is a directory" in text


class Full:
    """A file on a disk with room for three bytes."""

    def __init__(self, file):
        self.file, self.seek, self.truncate = file, file.seek, file.truncate

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        return self.file.write(data[:3])
