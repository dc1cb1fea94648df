"""client.py with a service that does not take all fields; the rest is in tests/tools/test_self_instruct.py."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from groundup.errors import UserError
from groundup.scores.client import Endpoint, ask, read_key

NEEDS = {
    "max_tokens": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'.",
    "temperature": "Unsupported value: 'temperature' does not support 0.0 with this model. Only the default (1) is.",
}


class Reasoner(BaseHTTPRequestHandler):
    """As OpenAI's models that think: they name the first field that they do not take."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        wrong = next((name for name in NEEDS if name in body), None)
        answer = {"choices": [{"message": {"content": "[[A]]"}, "finish_reason": "stop"}]}
        if wrong:
            answer = {"error": {"message": NEEDS[wrong], "param": wrong, "code": "unsupported_parameter"}}
        data = json.dumps(answer).encode()
        self.send_response(400 if wrong else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_judge_that_takes_no_temperature_and_calls_the_limit_otherwise(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Reasoner)
    server.bodies = []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    fields = {"temperature": 0.0, "max_tokens": 2048}
    judge = Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "o9", fields=fields, max_retries=0)
    reply = ask(judge, "Which?", "request 0")
    n_asked = len(server.bodies)
    ask(judge, "And now?", "request 1")  # what it refuses is known
    server.shutdown()
    assert (reply.text, reply.finish) == ("[[A]]", "stop")
    assert server.bodies.pop().keys() == {"model", "messages", "max_completion_tokens"}
    assert len(server.bodies) == n_asked
    assert [body.keys() & {*fields, "max_completion_tokens"} for body in server.bodies] == [
        {"temperature", "max_tokens"}, {"temperature", "max_completion_tokens"}, {"max_completion_tokens"},
    ]  # fmt: skip
    assert server.bodies[-1]["max_completion_tokens"] == 2048 and fields == {"temperature": 0.0, "max_tokens": 2048}


def test_a_field_that_cannot_be_left_out_is_a_refusal(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setitem(NEEDS, "messages", "Unsupported value: 'messages'.")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Reasoner)
    server.bodies = []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    reply = ask(Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "o9", max_retries=0), "Which?", "request 0")
    server.shutdown()
    assert reply.finish == "refused" and "'messages'" in reply.text and len(server.bodies) == 1


@pytest.mark.parametrize("url", ["127.0.0.1:9/v1", "ftp://a/v1", "http://a b/v1", "http://a/\u6a21", "http://"])
def test_an_address_that_is_none_is_said_at_once(url):
    """It was asked for nine times, within eight minutes."""
    with pytest.raises(UserError, match="base_url=.* must be like http://"):
        ask(Endpoint(url, "m"), "Which?", "request 0")


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch):
    for key in ("a\nb", "\u5bc6"):
        monkeypatch.setenv("SOME_KEY", key)
        with pytest.raises(UserError, match="the key in SOME_KEY") as caught:
            read_key("SOME_KEY")
        assert key not in str(caught.value)
