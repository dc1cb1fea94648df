"""rendering.py: the ids of the tokenizer itself, and templates that loop or fill the memory for some conversation."""

import json
import signal
import threading
import time

import pytest

from groundup.errors import UserError
from groundup.generate.openai_api import template_settings
from groundup.generate.rendering import Renderer
from groundup.tokens import templates
from groundup.tokens.engines import to_json
from groundup.tokens.training import train
from tokenizer import Tokenizer

TEMPLATE = """{%- for message in messages %}
{%- if 'loop' in message.content %}
{%- for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif %}
{%- if 'fill' in message.content %}{{ message.content * 1000000000 }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if thinking is defined and not thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    tokenizer, path = train(["Hello world, 你好世界！\n"] * 20, vocab_size=512), tmp_path_factory.mktemp("foreign")
    config = json.loads(tokenizer.files["tokenizer_config.json"]) | {"chat_template": TEMPLATE}
    Tokenizer(tokenizer.files | {"tokenizer_config.json": to_json(config)}).save(path)
    return path


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_template_that_loops_is_ended_and_others_go_on(directory):
    """In a thread of a server no signal could stop it."""
    tokenizer, renderer = Tokenizer.load(directory), Renderer(directory, seconds=0.5)
    want = tokenizer.render(ask("Hello 你好 <|im_end|>"), add_generation_prompt=True)[0]
    assert renderer.render(ask("Hello 你好 <|im_end|>"), {}) == want
    first, began = renderer.helper.process, time.monotonic()
    for text in ("loop", "fill"):
        with pytest.raises(UserError, match="the chat template"):
            renderer.render(ask(text), {})
        assert renderer.render(ask("Hello 你好 <|im_end|>"), {}) == want
    assert time.monotonic() - began < 10
    settings = template_settings(tokenizer, {"thinking": False, "odd": 1, "message": [1]})
    assert settings == {"thinking": False}
    text = tokenizer.decode(renderer.render(ask("Hello"), settings))
    assert text.endswith("<think>\n\n</think>\n\n")
    assert "<think>" not in tokenizer.decode(renderer.render(ask("Hello"), {"thinking": True}))
    first.kill()
    first.wait()
    assert renderer.render(ask("Hello 你好 <|im_end|>"), {}) == want
    renderer.helper.process.kill()


def test_the_time_of_a_template_is_that_of_its_own_work(directory, monkeypatch):
    """On a busy machine, or in a stopped process, the clock runs on."""
    with templates.time_limit(0.2):
        time.sleep(0.5)
    with pytest.raises(TimeoutError), templates.time_limit(0.1):
        while True:
            pass
    monkeypatch.setattr(templates, "WAIT", 2)
    with pytest.raises(TimeoutError), templates.time_limit(0.1):
        time.sleep(5)
    renderer = Renderer(directory, seconds=0.5)
    renderer.render(ask("Hello"), {})
    pause = renderer.helper.process.send_signal
    pause(signal.SIGSTOP)
    threading.Timer(0.8, pause, [signal.SIGCONT]).start()
    assert renderer.render(ask("Hello"), {})
    renderer.helper.end()
    with pytest.raises(UserError, match="the chat template"):
        renderer.render(ask("Hello"), {})
