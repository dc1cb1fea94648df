"""JSON mode against json.loads: what is accepted, and what an untrained model writes under it."""

import json
import random

import pytest
import torch
from test_model import random_model, tiny_config

from groundup.generate.completion import generate, never_sampled
from groundup.generate.json_mode import State, advance
from groundup.generate.sampling import SamplingParams
from groundup.tokens.training import train


def state_after(text: str) -> State | None:
    state = State()
    for char in text.encode().decode("latin-1"):
        state = state and advance(state, char)
    return state


def value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(7 if depth else 5)
    text = "".join(rng.choices('ab"\\/\n\té猫 ', k=rng.randrange(4)))
    if kind == 5:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {f"{text}{i}": value(rng, depth - 1) for i in range(rng.randrange(3))}
    return [text, rng.randint(-99, 99), rng.uniform(-1, 1) * 10 ** rng.randint(-20, 20), None, rng.random() < 0.5][kind]


def test_what_is_accepted_is_what_json_loads_takes():
    """Objects, and objects with a character changed, removed or put in; their beginnings always fit."""
    rng = random.Random(0)
    accepted = 0
    for _ in range(1000):
        made = {"k": value(rng, 3)}
        text = json.dumps(made, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        if rng.random() < 0.7:
            i, new = rng.randrange(len(text)), rng.choice([*'"{}],:0e.-\\\tu', ""])
            text = text[:i] + new + text[i + rng.randrange(2) :]
        try:
            fits = isinstance(json.loads(text, parse_constant=lambda name: 1 / 0), dict)
            fits &= text[0] == "{"  # no space before it
        except (ValueError, ZeroDivisionError):
            fits = False
        state = state_after(text)
        assert (state is not None and not state.lacks) == fits, text
        accepted += fits
        if fits:
            assert all(state_after(text[:i]) is not None for i in range(len(text)))
    assert 200 < accepted < 800


@pytest.mark.parametrize("text", ["[1]", "1", '"a"', "{}{}", "{} ", "a{}", "{" + " " * 40 + "}", '{"a":' + "[" * 101])
def test_what_is_no_object_of_bounded_size_does_not_fit(text):
    assert state_after(text) is None


@pytest.mark.parametrize("text", [" {", "\n{", "\t", '{"a":\n\n\n1}', '{\n  \n"a":1}', '{"a\n":1}'])
def test_spaces_that_mean_nothing_do_not_fit(text):
    """Before the object, and empty lines: a model may write them until its limit."""
    assert state_after(text) is None


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_usual_layouts_fit(indent, line_end):
    text = json.dumps({"a": [{"b": {"c": [1, {}]}}], "d": "e\n"}, indent=indent).replace("\n", line_end)
    state = state_after(text)
    assert state is not None and not state.lacks


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.5, "top_p": 0.9}, {"top_k": 5}])
def test_an_untrained_model_writes_json(how):
    """Every text that ends is an object; one that is cut is the beginning of one; others are not touched."""
    tokenizer = train(["Hello world, 你好世界！{}[]:\",0123456789 truefalsenull\n"] * 20, vocab_size=512)
    net = random_model(tiny_config(vocab_size=tokenizer.vocab_size, block_size=128), 1)
    own = {"eos_ids": tokenizer.stop_ids, "banned_ids": never_sampled(tokenizer, net.cfg.vocab_size)}
    prompts = [tokenizer.encode(f"Hello {i}") for i in range(12)]
    free = SamplingParams(max_new_tokens=60, **how, **own)
    each = [SamplingParams(max_new_tokens=60, json_object=i % 2 == 0, **how, **own) for i in range(12)]
    found = [result.completions[0] for result in generate(net, tokenizer, prompts, each)]
    alone = [result.completions[0] for result in generate(net, tokenizer, prompts, free)]
    for i, one in enumerate(found):
        if i % 2:
            assert one.text == alone[i].text
        elif one.finish_reason == "stop":
            assert isinstance(json.loads(one.text), dict)
        else:
            raw = tokenizer.decode_bytes(one.ids).decode("latin-1")
            state = State()
            for char in raw:
                state = advance(state, char)
            assert state is not None and state.lacks


def test_the_second_draw_has_the_probabilities_of_those_that_fit():
    """Behind {, a quote is half as likely as a space, letters take most: of those that fit, one third."""
    tokenizer = train(['ab {"'] * 9, vocab_size=384)
    net = random_model(tiny_config(vocab_size=tokenizer.vocab_size, block_size=32), 1)
    brace, quote, space, a = (tokenizer.encode_token(char)[0] for char in (b"{", b'"', b" ", b"a"))
    logits = torch.full((tokenizer.vocab_size,), -30.0)
    logits[[brace, quote]], logits[space], logits[a] = 0.0, 0.693147, 3.0
    net.lm_head.weight.data.zero_()
    hidden = torch.ones(net.cfg.n_embd)
    net.lm_head.weight.data[:] = logits[:, None] * hidden / net.cfg.n_embd
    net.norm.weight.data.fill_(1.0)
    net.embed_tokens.weight.data.fill_(1.0)
    for layer in net.layers:  # the residual stream alone, a vector of ones
        for p in layer.parameters():
            p.data.zero_()
    params = SamplingParams(max_new_tokens=2, n=200, json_object=True)
    found = generate(net, tokenizer, [[a]], params)[0].completions
    share = sum(one.ids[1] == quote for one in found) / 200
    assert {one.ids[0] for one in found} == {brace}
    assert {one.ids[1] for one in found} == {quote, space} and abs(share - 1 / 3) < 0.12
