"""engine.py, completion.py: against transformers, plain recomputation, one sample at a time, text decoded at once."""

import dataclasses
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_model import as_transformers, compile_blocks, random_ids, random_model, tiny_config

from groundup.errors import UserError
from groundup.generate import decode, engine, kv_cache
from groundup.generate.beam import BeamParams, BeamSearch
from groundup.generate.completion import begin_prompt, generate, never_sampled
from groundup.generate.decode import to_int8
from groundup.generate.engine import Engine, Request, Sample
from groundup.generate.kv_cache import CacheStep, KVCache
from groundup.generate.sampling import SamplingParams
from groundup.tokens.training import train
from model import Transformer
from tokenizer import Tokenizer

CORPUS = [
    Path(random.__file__).read_text(encoding="utf-8"),
    "从前有一只猫，坐在垫子上。" * 20,
    "🙂👩‍👩‍👧 and 𠮷野家 " * 3,
]


def prompt(length: int, seed: int = 3) -> list[int]:
    return random_ids(tiny_config(), 1, length, seed)[0].tolist()


def ids_of(results: list) -> list:
    """The ids of every sample of every prompt."""
    return [[completion.ids for completion in result.completions] for result in results]


def only(results: list) -> list[list[int]]:
    return [ids for (ids,) in ids_of(results)]


def greedy_without_cache(net: Transformer, ids: list[int], n_new: int) -> list[int]:
    """The whole prefix again for every token."""
    ids, length = list(ids), len(ids)
    with torch.no_grad():
        for _ in range(n_new):
            ids.append(net(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[length:]


@pytest.fixture(scope="module")
def net() -> Transformer:
    return random_model(tiny_config(n_kv_head=2))


# ---- cache ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_head": 2}, {"qkv_bias": True}, {"n_kv_head": 1, "qk_norm": True, "head_dim": 24}]
)
def test_rows_of_any_length_in_the_cache_equal_recomputation(changes):
    """Prompts in two pieces with padding on the right, then steps in which one row rests and another is replaced."""
    net = random_model(tiny_config(**changes)).eval()
    texts = [random_ids(net.cfg, 1, n, seed=n)[0] for n in (30, 21, 40)]
    read = [12, 5, 9]
    cache = KVCache(net.cfg, 3, 40, "cpu", torch.float32)
    idx = torch.full((3, 12), 96)
    for row, (text, n) in enumerate(zip(texts, read, strict=True)):
        idx[row, :n] = text[:n]
    with torch.no_grad():
        want = [net(text.unsqueeze(0))[0] for text in texts]
        first = net(idx[:, :7], cache=cache.chunk(0, 7))
        rows = torch.tensor([2, 0])
        second = net(idx[rows, 7:], cache=cache.chunk(7, 5, rows))
        close(first[1, :5], want[1][:5])
        close(torch.cat([first[0], second[1]]), want[0][:12])
        close(torch.cat([first[2], second[0, :2]]), want[2][:9])
        for step in range(16):
            rests = step % 3 == 1
            part = cache.part([-1 if rests else read[0], read[1], read[2]])
            token = torch.stack([text[min(n, len(text) - 1)] for text, n in zip(texts, read, strict=True)])
            logits = net(token.unsqueeze(1), cache=CacheStep([part]))[:, 0]
            for row in range(rests, 3):
                close(logits[row], want[row][read[row]])
                read[row] += 1
            if step == 8:  # row 1 is given to another text
                texts[1], read[1] = random_ids(net.cfg, 1, 20, seed=50)[0], 6
                want[1] = net(texts[1].unsqueeze(0))[0]
                net(texts[1][None, :6], cache=cache.chunk(0, 6, torch.tensor([1])))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_logits_equal_those_of_transformers_with_padding_on_the_left(net):
    hf = as_transformers(net)
    texts = [prompt(n, seed=n) for n in (9, 1, 5)]
    padded = torch.tensor([[0] * (9 - len(ids)) + ids for ids in texts])
    there = torch.tensor([[0] * (9 - len(ids)) + [1] * len(ids) for ids in texts])
    out = hf.generate(
        padded, attention_mask=there, do_sample=False, max_new_tokens=12, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=12, temperature=0, logprobs=97)
    results = generate(net, None, texts, params)
    assert only(results) == out.sequences[:, 9:].tolist()
    for row, result in enumerate(results):
        for step, found in enumerate(result.completions[0].logprobs):
            got = torch.tensor([found[i] for i in range(97)])
            close(got, out.logits[step][row].log_softmax(dim=-1))


def test_cache_bytes_are_those_of_its_tensors():
    cfg = tiny_config(n_kv_head=2)
    cache = KVCache(cfg, 5, 33, "cpu", torch.bfloat16)
    n_bytes = sum(x.numel() * x.element_size() for x in cache.keys + cache.values)
    assert kv_cache.cache_bytes(cfg, 5, 33, torch.bfloat16) == n_bytes


def test_samples_wait_for_memory_and_one_that_never_fits_is_refused_with_the_numbers(net, monkeypatch):
    texts, params = [prompt(n, seed=n) for n in range(4, 24)], SamplingParams(max_new_tokens=30)
    want = generate(net, None, texts, params)
    busy, size = [], kv_cache.cache_bytes(net.cfg, 1, net.cfg.block_size, torch.float32)
    monkeypatch.setattr(engine, "free_bytes", lambda device: 3.5 * size)
    feed = Engine.decode
    monkeypatch.setattr(Engine, "decode", lambda self: busy.append(self.cache.n_bytes() // size) or feed(self))
    # What the caches hold is taken from the free memory: the engine never has more than it found.
    monkeypatch.setattr(Engine, "spare_bytes", lambda self: 3.5 * size - size * len(self.running + self.prefilling))
    assert ids_of(generate(net, None, texts, params)) == ids_of(want)
    assert 2 <= max(busy) <= 4
    monkeypatch.setattr(engine, "free_bytes", lambda device: 2**12)
    for draw in (
        lambda: generate(net, None, texts, params),
        lambda: next(BeamSearch(net, None, 2).answer(texts, BeamParams(max_new_tokens=30, temperature=0))),
    ):
        with pytest.raises(UserError) as caught:
            draw()
        assert "tokens takes" in str(caught.value) and "free" in str(caught.value) and "\n" not in str(caught.value)


# ---- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": True, "n_kv_head": 2, "n_embd": 96}, {"qk_norm": True, "head_dim": 24}]
)
@pytest.mark.parametrize("length", [1, 7])
def test_greedy_equals_transformers_generate(changes, length):
    net = random_model(tiny_config(**changes))
    ids = prompt(length)
    hf = as_transformers(net)
    want = hf.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40, use_cache=True)[0, length:].tolist()
    assert len(set(want)) > 5
    # Greedy ignores everything that shapes the distribution.
    params = SamplingParams(max_new_tokens=40, temperature=0, top_k=3, top_p=0.1, seed=5)
    assert only(generate(net, None, [ids], params)) == [want]


def test_prompts_longer_than_a_piece_and_than_a_width():
    net = random_model(tiny_config(block_size=1200))
    texts = [prompt(n, seed=n) for n in (1100, 513, 512, 40)]
    got = only(generate(net, None, texts, SamplingParams(max_new_tokens=4, temperature=0)))
    assert got == [greedy_without_cache(net, ids, 4) for ids in texts]


def test_more_prompts_than_are_read_at_once(net):
    texts = [prompt(1 + n % 11, seed=n) for n in range(2 * engine.CHUNK_ROWS + 3)]
    got = only(generate(net, None, texts, SamplingParams(max_new_tokens=3, temperature=0)))
    assert got == [greedy_without_cache(net, ids, 3) for ids in texts]


def test_generation_ends_with_the_context():
    net = random_model(tiny_config(block_size=16))
    texts = [prompt(n, seed=n) for n in (16, 3, 15)]
    results = generate(net, None, texts, SamplingParams(max_new_tokens=100, temperature=0))
    # The model has seen targets one beyond its context, so a full prompt still has a next token.
    assert [len(ids) for ids in only(results)] == [1, 14, 2]
    for ids, new in zip(texts, only(results), strict=True):
        assert new == greedy_without_cache(net, ids, len(new))
    assert {result.completions[0].finish_reason for result in results} == {"length"}


# ---- the same text in every company ---------------------------------------------------------------------------------


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    texts = [prompt(n, seed=n) for n in (9, 1, 30, 5, 9, 17, 2)]
    stops = frozenset(range(0, 97, 9))
    base = SamplingParams(max_new_tokens=20, temperature=1.0, top_k=40, seed=7, stop_token_ids=stops)
    changes = [
        {"n": 3}, {"top_p": 0.8}, {"temperature": 0.0}, {"repetition_penalty": 1.3, "n": 2}, {"best_of": 4, "n": 2},
        {"min_new_tokens": 12, "frequency_penalty": 0.5}, {"max_new_tokens": 1, "banned_ids": tuple(range(50))},
    ]  # fmt: skip
    return texts, [dataclasses.replace(base, **change) for change in changes]


@pytest.mark.parametrize("batch_size", [0, 2, 5])
def test_batches_and_continuous_batches_equal_one_by_one(net, batch_size):
    texts, params = mixed_requests()
    want = [generate(net, None, [ids], p)[0] for ids, p in zip(texts, params, strict=True)]
    assert len({len(c.ids) for result in want for c in result.completions}) >= 5  # they end at different times
    assert ids_of(generate(net, None, texts, params, batch_size)) == ids_of(want)
    order = random.Random(batch_size).sample(range(7), 7)
    shuffled = generate(net, None, [texts[i] for i in order], [params[i] for i in order], batch_size)
    assert ids_of(shuffled) == ids_of([want[i] for i in order])


def test_a_file_of_prompts_equals_a_list_and_is_read_as_rows_become_free(net):
    texts, params = mixed_requests()[0], SamplingParams(max_new_tokens=20, top_k=40, n=2, seed=7)
    want = generate(net, None, texts, params)
    taken = []

    def lines():
        for ids in texts:
            taken.append(ids)
            yield ids

    found = Engine(net, None, 2).answer(lines(), params)
    first = next(found)
    assert len(taken) < 4
    found = [first, *found]
    results = dict(found)
    assert len(found) == 7  # also if all samples of a prompt end at once
    assert ids_of([results[i] for i in range(7)]) == ids_of(want)


def test_samples_and_seeds_share_no_text(net):
    ids = prompt(3)
    of_seeds = [ids_of(generate(net, None, [ids], SamplingParams(max_new_tokens=12, seed=s, n=8)))[0] for s in (1, 2)]
    assert len({tuple(sample) for samples in of_seeds for sample in samples}) == 16
    assert len({sample[0] for sample in of_seeds[0]}) > 1  # the very first token is drawn for each sample too
    params = SamplingParams(max_new_tokens=12, seed=1)
    assert [token.id for token in Engine(net, None, 1).stream(ids, params)] == of_seeds[0][0]


def test_different_prompts_draw_independently():
    """A model that gives every token the same probability, whatever the prompt: agreement, and the variance of the
    mean over prompts, are those of independent draws. With one stream for all prompts they would all agree."""
    net = random_model(tiny_config(vocab_size=96))
    with torch.no_grad():
        net.lm_head.weight.zero_()
    texts = [[i // 96, i % 96] for i in range(200)]
    first = torch.tensor([
        [ids for (ids,) in only(generate(net, None, texts, SamplingParams(max_new_tokens=1, seed=seed), batch_size=64))]
        for seed in range(12)
    ])  # fmt: skip
    pairs = [(row[:, None] == row).float().sum().item() - 200 for row in first]  # of 200 * 199 ordered ones
    assert sum(pairs) / (12 * 200 * 199) == pytest.approx(1 / 96, rel=0.05)
    means = (first < 48).double().mean(dim=1)
    assert 0.3 < means.var().item() / (0.25 / 200) < 2  # of 12 runs: 1 +- 0.4
    between = (first[:, None] == first).float().mean().item() - 1 / 12  # runs with other seeds
    assert between == pytest.approx(11 / 12 / 96, rel=0.15)


def test_a_prompt_is_read_once_for_all_its_samples(net, monkeypatch):
    read = []
    whole = engine.Engine.prefill_piece

    def watched(self: engine.Engine, cache: KVCache, slots: list, requests: list, begin: int, end: int) -> None:
        read.extend(request.index for request in requests)
        whole(self, cache, slots, requests, begin, end)

    monkeypatch.setattr(engine.Engine, "prefill_piece", watched)
    generate(net, None, [prompt(4), prompt(6)], SamplingParams(max_new_tokens=5, n=4), batch_size=3)
    assert sorted(read) == [0, 1]


@pytest.mark.parametrize("where", ["fit", "append"])
def test_interrupted_while_a_row_is_placed(net, monkeypatch, where):
    engine, params = Engine(net, None, rows=2), SamplingParams(temperature=0.0, max_new_tokens=4)
    want = [token.id for token in engine.stream(prompt(9), params)]
    fit = engine.cache.fit

    def interrupt(row, *args) -> None:
        if where == "append":  # the row has its place, its cache does not know it yet
            fit(row, *args)
            row.cache.texts.remove(row)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.cache, "fit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(engine.stream(prompt(9, seed=4), params))
    monkeypatch.undo()
    assert not (engine.waiting or engine.prefilling or engine.running)
    assert [token.id for token in engine.stream(prompt(9), params)] == want


def test_untouched_by_dropout_documents_and_training_and_leaves_all_alone():
    net = random_model(tiny_config(dropout=0.5)).train()
    net.delimiter_id = 7
    without = random_model(tiny_config()).eval()
    params = SamplingParams(max_new_tokens=20)
    texts = [[*prompt(4), 7, *prompt(3)], prompt(9)]
    torch.manual_seed(99)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    names = {name: p.data_ptr() for name, p in net.named_parameters()}
    tokens = Engine(net, None, rows=1).stream(texts[0], params)
    next(tokens)
    assert torch.is_grad_enabled() and all(module.training for module in net.modules())
    assert ids_of(generate(net, None, texts, params, 1)) == ids_of(generate(without, None, texts, params))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.array_equal(np.random.get_state()[1], before[2])
    assert all(module.training for module in net.modules())
    assert not any(module.training for module in without.modules())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert names == {name: p.data_ptr() for name, p in net.named_parameters()} and net.delimiter_id == 7


def test_blocks_compiled_for_training_run_as_written():
    net, plain = random_model(tiny_config()), random_model(tiny_config())
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compile_blocks(net, backend=backend)
    x = random_ids(net.cfg, 2, 8)
    net(x, x).backward()
    trained = len(graphs)
    params = SamplingParams(max_new_tokens=20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = generate(net, None, [prompt(4), prompt(2)], params)
        assert ids_of(got) == ids_of(generate(plain, None, [prompt(4), prompt(2)], params))
    net(x, x).backward()
    assert len(graphs) == trained


def test_matrices_and_cache_have_the_dtype_of_the_products():
    net = random_model(tiny_config(tie_embeddings=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        e = engine.Engine(net, None, 2)
        next(e.stream(prompt(9), SamplingParams()))
        results = generate(net, None, [prompt(9)], SamplingParams(max_new_tokens=8, temperature=0, logprobs=97))
        text = prompt(9) + results[0].completions[0].ids
        want = net(torch.tensor([text[:-1]]))[0, 8:].float().log_softmax(dim=-1)
    assert next(iter(e.prefix_cache.ids)).cache.keys[0].dtype == torch.bfloat16
    assert e.model.lm_head.dtype == e.model.layers[1].mlp.down_proj.dtype == torch.bfloat16
    assert e.model.embed_tokens.weight is net.embed_tokens.weight and net.lm_head.weight.dtype == torch.float32
    assert e.model.norm.weight is net.norm.weight
    got = torch.tensor([[found[i] for i in range(97)] for found in results[0].completions[0].logprobs])
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.02)
    half = random_model(tiny_config()).to(torch.bfloat16)
    assert engine.Engine(half, None, 2).dtype == torch.bfloat16
    assert len(only(generate(half, None, [prompt(4)], SamplingParams(max_new_tokens=5)))[0]) == 5


def test_rows_for_a_recorded_step_equal_others(monkeypatch):
    """Also across widths, rows that rest, and a cache that grows. (Nothing is recorded here.)"""
    net = random_model(tiny_config(n_kv_head=2, block_size=300, n_layer=1, qkv_bias=True))
    texts = [prompt(n, seed=n) for n in (3, 50, 20, 230)]
    params = SamplingParams(max_new_tokens=60, temperature=0, stop_token_ids=frozenset({11}))
    monkeypatch.setattr(decode, "step_c", lambda *_: None)
    want = dict(Engine(net, None, 2, compile=True).answer(texts, params))  # not on a CPU
    widths = set()
    monkeypatch.setattr(engine, "can_record", lambda device: True)
    monkeypatch.setattr(decode, "RecordedStep", lambda view: lambda model, tokens, parts: (
        widths.add((len(parts), len(tokens), len(parts[0].span))) or decode.decode_step(model, tokens, parts)
    ))  # fmt: skip
    got = dict(Engine(net, None, 2, compile=True).answer(texts, params))
    for i in want:
        a, b = want[i].completions[0], got[i].completions[0]
        assert a.ids == b.ids and a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
    assert widths == {(1, 2, 64), (1, 2, 128), (1, 2, 256), (1, 2, 300)}


# ---- stopping -------------------------------------------------------------------------------------------------------


def test_greedy_stops_where_transformers_stops(net):
    ids = prompt(4)
    free = greedy_without_cache(net, ids, 30)
    stop = free[11]
    hf = as_transformers(net)
    want = hf.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=30, eos_token_id=stop)[0, 4:].tolist()
    for eos in ({"eos_ids": frozenset({stop, 96})}, {"stop_token_ids": frozenset({stop}), "ignore_eos": True}):
        done = generate(net, None, [ids], SamplingParams(max_new_tokens=30, temperature=0, **eos))[0].completions[0]
        assert done.ids == want == free[: free.index(stop) + 1]
        assert (done.finish_reason, done.stop_reason, done.text) == ("stop", stop, "")
    params = SamplingParams(max_new_tokens=30, temperature=0, eos_ids=frozenset({stop}), ignore_eos=True)
    assert only(generate(net, None, [ids], params)) == [free]


def test_stop_wins_over_length_and_waits_for_min_new_tokens(net):
    ids = prompt(5)
    free = greedy_without_cache(net, ids, 12)
    stop = frozenset({free[-1]})
    end = free.index(free[-1]) + 1
    params = SamplingParams(max_new_tokens=end, temperature=0, eos_ids=stop)
    tokens = list(Engine(net, None, rows=1).stream(ids, params))
    assert [token.finish for token in tokens] == [""] * (end - 1) + ["stop"]
    tokens = list(Engine(net, None, rows=1).stream(ids, dataclasses.replace(params, ignore_eos=True)))
    assert [token.finish for token in tokens] == [""] * (end - 1) + ["length"]
    later = generate(net, None, [ids], dataclasses.replace(params, max_new_tokens=40, min_new_tokens=end + 3))
    assert len(only(later)[0]) > end + 3 and stop.isdisjoint(only(later)[0][: end + 3])


@pytest.fixture(scope="module", params=["bpe", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return train(CORPUS, 512, backend=request.param)


def spell(tokenizer: Tokenizer, ids: list[int], **changes: object) -> tuple[list[str], str, str | None]:
    """(pieces shown, whole text, stop string) for ids that come one by one."""
    params = SamplingParams(**changes)
    sample, pieces, stop = Sample(Request(0, [], params, 10**6), 0, tokenizer), [], None
    for sample.ids in (ids[:n] for n in range(1, len(ids) + 1)):
        piece, stop = sample.grow(sample.ids[-1])
        pieces.append(piece)
        if stop:
            break
    pieces.append("" if stop else sample.flush())
    return pieces, sample.text, stop


TEXTS = ["The cat sat.", "从前有一只猫", "𠮷野家🙂👩‍👩‍👧!", "a\r\n\tb  c", "abab abac"]


@pytest.mark.parametrize("text", TEXTS)
def test_whole_characters_whatever_the_cut(tokenizer, text):
    ids = tokenizer.encode(text)
    for cut in range(len(ids)):
        pieces, shown, _ = spell(tokenizer, ids[cut:])
        assert "".join(pieces) == shown == tokenizer.decode(ids[cut:])
        whole = [piece for piece in pieces[:-1] if "\ufffd" in piece]
        assert not whole or cut > 0  # only a text that begins inside a character has a broken one
    assert spell(tokenizer, ids)[1] == text


def test_random_ids_read_as_python_decodes_their_bytes(tokenizer):
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(30)]  # special ids and broken characters among them
        assert spell(tokenizer, ids)[1] == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_is_given_out_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("\U0002b740")[-4:]  # a rare ideograph: four tokens of one byte each, in either backend
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([byte]) for byte in "\U0002b740".encode()]
    assert spell(tokenizer, ids)[0] == ["", "", "", "\U0002b740", ""]
    assert spell(tokenizer, ids[:3])[0] == ["", "", "", "\ufffd"]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends with a stop string; the longest of them."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_strings_in_all_texts_and_tokens(tokenizer):
    """Random stop strings, made of parts of the text so that many begin and some are complete."""
    draw, hits = random.Random(1), 0
    for _ in range(400):
        text = draw.choice(TEXTS) + draw.choice(TEXTS)
        stops = []
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(text))
            stops.append(text[at : at + draw.randint(1, 5)] + draw.choice(["", "", "b", "猫"]))
        ids = tokenizer.encode(text)
        if draw.random() < 0.5:  # byte by byte: no token is longer than a character
            ids = [i for char in text for i in tokenizer.encode(char)]
        decoded = tokenizer.decode(ids)
        pieces, shown, stopped = spell(tokenizer, ids, stop=tuple(stops))
        assert (shown, stopped) == first_stop(decoded, tuple(stops)), (text, stops)
        assert "".join(pieces) == shown
        hits += stopped is not None
    assert 100 < hits < 400


def test_nothing_is_held_back_without_need(tokenizer):
    ids = [tokenizer.encode(char)[-1] for char in "xHello\n"]
    pieces = spell(tokenizer, ids[1:], stop=("\nUser:", "lox"))[0]
    assert pieces == ["H", "e", "", "l", "", "lo", "\n"]


def test_stop_strings_wait_for_min_new_tokens(tokenizer):
    ids = [tokenizer.encode("x" + char)[-1] for char in "abcabc"]
    assert spell(tokenizer, ids, stop=("b",))[1:] == ("a", "b")
    assert spell(tokenizer, ids, stop=("b",), min_new_tokens=3)[1:] == ("abca", "b")


def test_special_tokens_are_shown_when_asked_for(tokenizer):
    ids = [*tokenizer.encode("猫"), tokenizer.im_start_id, *tokenizer.encode("猫")]
    assert spell(tokenizer, ids, skip_special_tokens=False)[1] == tokenizer.decode(ids)
    assert spell(tokenizer, ids)[1] == tokenizer.decode(ids, skip_special_tokens=True)


def test_texts_of_a_model_with_stop_strings(tokenizer):
    """Stream and result agree with the ids, also when the text ends before the last token does."""
    net = random_model(tiny_config(vocab_size=tokenizer.vocab_size + 5))
    texts = [tokenizer.encode(text) for text in TEXTS]
    params = SamplingParams(max_new_tokens=40, stop=("e", " t"), n=3, eos_ids=tokenizer.stop_ids)
    results = generate(net, tokenizer, texts, params, batch_size=4)
    shown = {}
    writer = Engine(net, tokenizer, rows=4)
    for sample, token in writer.run([writer.request(i, ids, params) for i, ids in enumerate(texts)]):
        key = sample.request.index, sample.index
        shown[key] = shown.get(key, "") + token.text
    reasons = set()
    for (i, result), s in itertools.product(enumerate(results), range(3)):
        done = result.completions[s]
        ids = [token for token in done.ids if token < tokenizer.vocab_size]
        text, stop = first_stop(tokenizer.decode(ids, skip_special_tokens=True), params.stop)
        assert done.text == shown[i, s] == text
        assert done.stop_reason == (done.ids[-1] if done.ids[-1] in tokenizer.stop_ids else stop)
        assert done.finish_reason == ("length" if done.stop_reason is None else "stop")
        reasons.add(type(done.stop_reason))
    assert str in reasons
    with pytest.raises(UserError, match="no tokenizer"):
        generate(net, None, texts, params)


# ---- log-probabilities, the best of several -------------------------------------------------------------------------


def test_logprobs_and_prompt_logprobs_are_those_of_a_full_forward(net):
    texts = [prompt(6), prompt(20, seed=4)]
    params = SamplingParams(max_new_tokens=9, temperature=0.7, top_k=5, presence_penalty=1.0, logprobs=3, n=2)
    params = dataclasses.replace(params, prompt_logprobs=2)
    for ids, result in zip(texts, generate(net, None, texts, params), strict=True):
        for done in result.completions:
            with torch.no_grad():
                logps = net(torch.tensor([ids + done.ids]))[0].log_softmax(dim=-1)
            after_prompt = logps[len(ids) - 1 :]
            check_logprobs(done.logprobs, after_prompt, done.ids, 3)
            chosen = after_prompt[:-1].gather(1, torch.tensor(done.ids).unsqueeze(1))
            assert done.cumulative_logprob == pytest.approx(chosen.sum().item(), abs=1e-4)
        assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(ids)
        check_logprobs(result.prompt_logprobs[1:], logps, ids[1:], 2)


def check_logprobs(found: list[dict[int, float]], logps: torch.Tensor, ids: list[int], k: int) -> None:
    assert len(found) == len(ids)
    for entry, row, token in zip(found, logps, ids, strict=False):
        best = row.topk(k).indices.tolist()
        assert next(iter(entry)) == token and set(entry) == {token, *best}
        close(torch.tensor(list(entry.values())), row[list(entry)])


def test_prompt_logprobs_over_pieces_and_blocks(monkeypatch):
    monkeypatch.setattr(engine, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(engine, "CHUNK_ELEMENTS", 3 * 97)
    net = random_model(tiny_config())
    texts = [prompt(n, seed=n) for n in (21, 8, 16, 17, 1)]
    for ids, result in zip(texts, generate(net, None, texts, SamplingParams(prompt_logprobs=0)), strict=True):
        with torch.no_grad():
            logps = net(torch.tensor([ids]))[0].log_softmax(dim=-1)
        check_logprobs(result.prompt_logprobs[1:], logps, ids[1:], 0)


@pytest.mark.parametrize("by", ["sum", "mean"])
def test_best_of_returns_the_likeliest(net, by):
    params = SamplingParams(max_new_tokens=15, stop_token_ids=frozenset(range(12)), n=8, seed=3)
    samples = generate(net, None, [prompt(4)], params)[0].completions
    length = {"sum": lambda ids: 1, "mean": len}[by]
    ranked = sorted(samples, key=lambda c: -c.cumulative_logprob / length(c.ids))
    best = generate(net, None, [prompt(4)], dataclasses.replace(params, n=3, best_of=8, best_of_by=by), batch_size=3)
    assert [c.ids for c in best[0].completions] == [c.ids for c in ranked[:3]] != [c.ids for c in samples[:3]]


# ---- beam search ----------------------------------------------------------------------------------------------------


def test_beams_equal_transformers(net):
    hf = as_transformers(net)
    texts = [prompt(n, seed=n) for n in (9, 1, 20)]
    params = BeamParams(max_new_tokens=12, temperature=0, num_beams=3, n=2, eos_ids=frozenset({4, 9, 33}))
    for ids, (_, result) in zip(texts, BeamSearch(net, None, params.num_beams).answer(texts, params), strict=True):
        want = hf.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=12, num_beams=3, num_return_sequences=2,
            eos_token_id=[4, 9, 33], pad_token_id=0, return_dict_in_generate=True, output_scores=True,
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        )  # fmt: skip
        for done, row, score in zip(result.completions, want.sequences, want.sequences_scores, strict=True):
            assert done.ids == row[len(ids) : len(ids) + len(done.ids)].tolist()
            assert done.cumulative_logprob / len(done.ids) == pytest.approx(score.item(), abs=1e-4)
            assert done.finish_reason == ("stop" if done.ids[-1] in (4, 9, 33) else "length")


# ---- one text after another ------------------------------------------------------------------------------------------


def test_a_stream_reads_only_what_is_new(monkeypatch):
    net = random_model(tiny_config())
    read = []
    whole = engine.Engine.prefill_piece

    def watched(self: engine.Engine, cache: KVCache, slots: list, requests: list, begin: int, end: int) -> None:
        read.append((begin, end))
        whole(self, cache, slots, requests, begin, end)

    monkeypatch.setattr(engine.Engine, "prefill_piece", watched)
    params = SamplingParams(max_new_tokens=6, temperature=0)
    session, text = Engine(net, None, rows=1), prompt(9)
    answer = [token.id for token in session.stream(text, params)]
    assert answer == greedy_without_cache(net, text, 6)
    longer = text + answer + prompt(5, seed=8)
    answer = [token.id for token in session.stream(longer, params)]
    assert answer == greedy_without_cache(net, longer, 6)
    tokens = session.stream(longer + answer, params)  # broken off: what was read stays good
    begun = [next(tokens).id for _ in range(3)]
    tokens.close()
    assert begun == greedy_without_cache(net, longer + answer, 3)
    edited = longer[:12] + [90] + longer[13:30]
    assert [token.id for token in session.stream(edited, params)] == greedy_without_cache(net, edited, 6)
    again = [token.id for token in session.stream(edited, params)]
    assert again == greedy_without_cache(net, edited, 6)
    # The last token of an answer has not been fed; of an equal prompt the last token is read for its logits.
    assert read == [(0, 9), (14, 20), (25, 26), (12, 20), (19, 20)]


# ---- requests that come and go ---------------------------------------------------------------------------------------


def traffic(net: Transformer, n: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of many lengths and parameters, several of which begin alike."""
    draw, system = random.Random(4), prompt(30, seed=99)
    found = []
    for i in range(n):
        ids = draw.choice([[], system, system[:20]]) + prompt(draw.randint(1, 60), seed=i)
        changes = draw.choice([{}, {"temperature": 0.0}, {"top_p": 0.7}, {"n": 2}, {"presence_penalty": 1.0}])
        length = draw.choice([1, 5, 30, 90])
        found.append((ids, SamplingParams(length, top_k=40, stop_token_ids=frozenset({3, 50}), seed=i, **changes)))
    return found


def lengths_kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, seqused_k, enable_gqa=False):
    """torch's varlen_attn as decoding calls it, row by row. Shapes (rows, H, D), (positions of all rows, K, D)."""
    assert len(cu_seq_q) == len(cu_seq_k) == len(q) + 1 == len(seqused_k) + 1 and max_q == 1
    assert cu_seq_q.tolist() == list(range(len(q) + 1)) and cu_seq_k[-1] == len(k) == len(v)
    assert {x.dtype for x in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32} and seqused_k.max() <= max_k
    assert k.is_contiguous() and v.is_contiguous() and enable_gqa == (q.shape[1] != k.shape[1])
    rows = []
    for i, (begin, n) in enumerate(zip(cu_seq_k.tolist(), seqused_k.tolist(), strict=False)):
        keys, values = (x[begin : begin + n].repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("hd,lhd->hl", q[i], keys) * q.shape[-1] ** -0.5
        rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


@pytest.mark.parametrize("n_kv_head", [2, 4])
def test_attention_by_length_equals_that_by_mask(n_kv_head, monkeypatch):
    """For texts that come and go in caches of several lengths, which is a GPU's way."""
    import torch.nn.attention.varlen

    monkeypatch.setattr(decode, "step_c", lambda *_: None)
    monkeypatch.setattr(kv_cache, "MIN_LENGTH", 64)
    net = random_model(tiny_config(n_kv_head=n_kv_head, block_size=400))
    prompts = [ids for ids, _ in traffic(net, 8)]
    params, calls = SamplingParams(40, temperature=0.0, logprobs=0), []
    want = generate(net, None, prompts, params, batch_size=5)
    monkeypatch.setattr(kv_cache, "has_varlen_lengths", lambda *args: True)
    kernel = lambda *args, **how: calls.append(len(args[0])) or lengths_kernel(*args, **how)  # noqa: E731
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    got = generate(net, None, prompts, params, batch_size=5)
    assert only(got) == only(want) and max(calls) > 1
    for a, b in zip(got, want, strict=True):
        assert a.completions[0].cumulative_logprob == pytest.approx(b.completions[0].cumulative_logprob, abs=1e-4)


def test_compiled_blocks_serve_all_layers_and_widths():
    """As on a GPU, where a step of compiled blocks is recorded for each width: a block has two graphs."""
    sizes, graphs = {"n_kv_head": 2, "n_layer": 4, "block_size": 400}, []
    compiled, eager = random_model(tiny_config(**sizes)).eval(), random_model(tiny_config(**sizes)).eval()
    caches = [KVCache(compiled.cfg, 3, 300, torch.device("cpu"), torch.float32) for _ in range(2)]

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in compiled.layers:
        block.forward = torch.compile(block.forward, backend=backend)
    tokens = torch.tensor([1, 2, 3])
    with torch.no_grad():
        for lengths in ([3, -1, 17], [4, 5, 18], [70, -1, 100], [150, 3, 130], [250, 1, 1]):
            steps = zip((compiled, eager), caches, strict=True)
            got, want = (decode.decode_step(net, tokens, [cache.part(lengths)]) for net, cache in steps)
            torch.testing.assert_close(got, want)
    assert len(graphs) == 2  # of the first width, and of any other


def test_a_block_that_attends_by_length_is_one_graph(monkeypatch):
    """With torch's own varlen_attn, traced and not run. Idle rows are in it."""
    import torch.nn.attention.varlen  # noqa: F401

    monkeypatch.setattr(kv_cache, "has_varlen_lengths", lambda *args: True)
    net, graphs = random_model(tiny_config(n_kv_head=2)), []
    cache = KVCache(net.cfg, 3, 64, torch.device("cpu"), torch.float32)

    def backend(graph, _inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return lambda *args: (torch.zeros(3, 1, net.cfg.n_embd),)

    torch._dynamo.reset()
    for block in net.layers:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    with torch.no_grad():
        for lengths in ([3, -1, 17], [5, 6, 7]):
            decode.decode_step(net, torch.tensor([1, 2, 3]), [cache.part(lengths)])
    assert len(graphs) == 1 and any("varlen_attn" in name for name in graphs[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(torch.__version__ < (2, 12), reason="varlen_attn takes no lengths")
def test_a_gpu_attends_by_length_as_by_mask(monkeypatch):
    """In bfloat16, where the logits of one step after another agree within its rounding."""
    net = random_model(tiny_config(n_kv_head=2, block_size=400)).cuda()
    device, found = torch.device("cuda"), []
    assert kv_cache.has_varlen_lengths(device, torch.bfloat16, net.cfg.head_dim)
    for by_length in (True, False):
        if not by_length:
            monkeypatch.setattr(kv_cache, "has_varlen_lengths", lambda *args: False)
        cache, logits = KVCache(net.cfg, 3, 300, device, torch.bfloat16), []
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            net.hidden(torch.arange(250, device=device).remainder(90).expand(3, -1), cache.chunk(0, 250))
            for i in range(5):
                tokens = torch.tensor([1, 2, 3], device=device)
                logits.append(decode.decode_step(net, tokens, [cache.part([9 + i, 100 + i, 250 + i])]))
        found.append(torch.stack(logits))
    assert (found[0] - found[1]).abs().max() < 0.05 * found[1].abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_a_gpu_generates_what_a_cpu_does(int8, compiled):
    """Greedily, in float32."""
    net = random_model(tiny_config(n_kv_head=2, block_size=400))
    net = to_int8(net) if int8 else net
    prompts = [ids for ids, _ in traffic(net, 20)]
    params = SamplingParams(20, temperature=0.0)
    want = only(generate(net, None, prompts, params, copies=not int8))
    assert only(generate(net.cuda(), None, prompts, params, compile=compiled)) == want


def test_ids_are_the_same_alone_and_among_others_that_come_and_go(monkeypatch):
    """Requests in a shuffled order, at random moments, of which some are cancelled at random moments."""
    monkeypatch.setattr(engine, "CHUNK_TOKENS", 24)  # prompts are read in several pieces, between which others go on
    monkeypatch.setattr(kv_cache, "MIN_LENGTH", 64)  # texts move to a cache of longer rows as they grow
    net = random_model(tiny_config(n_kv_head=2, block_size=400))
    n = 36
    asked = traffic(net, n)
    alone = [generate(net, None, [ids], params)[0] for ids, params in asked]
    draw, rows = random.Random(5), 16
    order = draw.sample(range(n), n)
    busy, requests, moves = Engine(net, None, rows), {}, 0
    finished, cancelled = {}, set()
    while order or busy.busy:
        for i in [order.pop() for _ in range(min(len(order), draw.choice([0, 0, 1, 5])))]:
            requests[i] = busy.request(i, *asked[i])
            busy.add(requests[i])
        if draw.random() < 0.05 and requests:
            i = draw.choice(sorted(requests))
            busy.cancel(requests.pop(i))
            cancelled.add(i)
        for sample, _ in busy.step():
            request = sample.request
            assert request.index in requests  # nothing of a cancelled one
            if sample.last:
                finished[request.index] = requests.pop(request.index).result()
        assert len(busy.running) + len(busy.prefilling) <= rows
        texts = [row for cache in busy.cache.caches.values() for row in cache.texts]
        assert {id(row) for row in texts} == {id(s.row) for s in busy.running + busy.prefilling if s.row}  # no idle row
        moves = max(moves, len(busy.cache.caches))
    assert moves >= 2 and 1 < len(cancelled) < n / 3 and len(finished) + len(cancelled) == n
    assert ids_of([finished[i] for i in sorted(finished)]) == ids_of([alone[i] for i in sorted(finished)])
    assert busy.cache.n_bytes() == 0  # of what has ended only copies are kept, which give way to requests
    assert len(busy.prefix_cache.ids) <= rows and not busy.prompts.ids and busy.promised_bytes == 0


def test_prefix_index_finds_what_comparing_all_texts_finds():
    draw, index, texts = random.Random(5), kv_cache.PrefixIndex(), {}
    for _ in range(400):
        ids = [draw.randrange(3) for _ in range(draw.randrange(7))]
        found = max((kv_cache.n_shared(text, ids) for text, _ in index.beside(ids)), default=0)
        assert found == max((kv_cache.n_shared(text, ids) for text in texts.values()), default=0)
        row = kv_cache.Row()
        index.add(row, ids)
        texts[row] = ids
        if draw.random() < 0.4:
            row = draw.choice(list(texts))
            index.remove(row)
            del texts[row]
    assert index.ids == texts and [row for _, row in index.sorted] != list(texts)


def test_work_grows_with_the_number_of_rows_not_with_its_square(net, monkeypatch):
    """Prompts that begin alike, all at once: each was compared with all others, three times."""
    compared = []
    n_shared = kv_cache.n_shared
    for module in (kv_cache, engine):
        monkeypatch.setattr(module, "n_shared", lambda *texts: compared.append(1) or n_shared(*texts))
    prompts = [prompt(12) + [i % 10, i // 10] for i in range(100)]
    generate(net, None, prompts, SamplingParams(1, temperature=0))
    assert len(compared) < 20 * len(prompts)


def test_a_long_prompt_lets_the_others_go_on(net, monkeypatch):
    monkeypatch.setattr(engine, "CHUNK_TOKENS", 8)
    busy = Engine(net, None, rows=2)
    short, long = (busy.request(i, prompt(n), SamplingParams(20, temperature=0)) for i, n in enumerate((3, 44)))
    busy.add(short)
    assert len(busy.step()) == 1
    busy.add(long)
    drawn = [[sample.request.index for sample, _ in busy.step()] for _ in range(7)]
    assert drawn == [[0]] * 5 + [[0, 1]] * 2  # 44 tokens are six pieces; the last one gives a token at once
    busy.cancel(long)
    assert [sample.request.index for sample, _ in busy.step()] == [0] and busy.n_rows > len(busy.running)


def test_what_requests_share_is_read_once(net, monkeypatch):
    read, whole = [], engine.Engine.prefill_piece

    def watched(self: engine.Engine, cache: KVCache, slots: list, requests: list, begin: int, end: int) -> None:
        read.extend((request.index, begin, min(end, len(request.ids))) for request in requests)
        whole(self, cache, slots, requests, begin, end)

    monkeypatch.setattr(engine.Engine, "prefill_piece", watched)
    params, system = SamplingParams(6, temperature=0), prompt(20, seed=99)
    texts = [system + prompt(n, seed=n) for n in (5, 9, 2)] + [prompt(12, seed=1)]
    busy = Engine(net, None, rows=4)
    requests = [busy.request(i, ids, params) for i, ids in enumerate(texts)]
    for request in requests:  # all at once: the others wait for the first to read the system prompt
        busy.add(request)
    while busy.busy:
        busy.step()
    first = min((place for place in read if place[2] > 20), key=lambda place: place[1])
    assert [place[1] for place in read if place[0] < 3] == [0, 20, 20] and first[1] == 0, read
    assert [only([request.result()])[0] for request in requests] == [greedy_without_cache(net, ids, 6) for ids in texts]
    read.clear()
    answer = requests[1].completions[0].ids
    later = busy.request(7, texts[1] + answer + prompt(4), params)  # the next turn of a chat
    busy.add(later)
    while busy.busy:
        busy.step()
    assert read == [(7, 20 + 9 + 5, 20 + 9 + 6 + 4)]  # the last token of an answer has not been fed
    assert later.completions[0].ids == greedy_without_cache(net, later.ids, 6)


def test_the_cache_is_as_large_as_what_is_used():
    """One long text does not make the others' caches long, and max_new_tokens is no memory."""
    net = random_model(tiny_config(block_size=2048))
    busy = Engine(net, None, rows=8)
    for i, n in enumerate((1500, 4, 5, 6)):
        busy.add(busy.request(i, prompt(n, seed=n), SamplingParams(500, temperature=0)))
    while len(busy.running) < 4:
        busy.step()
    one = kv_cache.cache_bytes(net.cfg, 1, 2048, torch.float32)
    assert one < busy.cache.n_bytes() < 1.6 * one
    busy.cancel(busy.running[0].request)
    busy.cancel(next(s.request for s in busy.running if s.request.index == 1))
    assert busy.cache.n_bytes() < 0.6 * one


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], ["0 prompts"]),
        ([[1], []], ["prompt 1", "no tokens", "<|endoftext|>"]),
        ([[1] * 65], ["prompt 0", "65 tokens", "64"]),
        ([[1], [2, 97]], ["prompt 1", "token id 97", "vocab_size=97"]),
        ([[-1, 5]], ["prompt 0", "token id -1"]),
    ],
)
def test_impossible_prompts_are_one_line(net, prompts, words):
    with pytest.raises(UserError) as caught:
        generate(net, None, prompts, SamplingParams())
    text = str(caught.value)
    assert text.startswith("sample: ") and "\n" not in text
    assert all(word in text for word in words), text
    if prompts:
        with pytest.raises(UserError):
            list(Engine(net, None, 2).answer(iter(prompts), SamplingParams(max_new_tokens=2)))


def test_impossible_calls_are_one_line(net, monkeypatch):
    with pytest.raises(UserError, match="2 prompts, 1 sets"):
        generate(net, None, [[1], [2]], [SamplingParams()])
    broken = random_model(tiny_config())
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        generate(broken, None, [[1]], SamplingParams())
    with pytest.raises(UserError, match="not finite"):
        next(BeamSearch(broken, None, 2).answer([[1]], BeamParams(temperature=0)))
    for prompt in ("ab", 7, torch.tensor([1, 2]), [1, "a"]):
        with pytest.raises(UserError, match="must be a list of token ids"):
            generate(net, None, [prompt], SamplingParams())
    with pytest.raises(UserError, match="batch_size=-1"):
        generate(net, None, [[1]], SamplingParams(), batch_size=-1)


def test_what_may_be_sampled(tokenizer):
    banned = set(never_sampled(tokenizer, tokenizer.vocab_size + 3))
    assert tokenizer.pad_id in banned and tokenizer.im_start_id in banned
    assert set(range(tokenizer.vocab_size, tokenizer.vocab_size + 3)) <= banned
    assert {i for name, i in tokenizer.special_tokens.items() if "reserved" in name} <= banned
    assert not banned & tokenizer.stop_ids
    assert not banned & set(tokenizer.encode("".join(CORPUS)))
    assert len(banned) + len(tokenizer.stop_ids) + sum(tokenizer.token_byte_lengths() > 0) == tokenizer.vocab_size + 3


def test_where_a_prompt_begins(tokenizer):
    assert begin_prompt(tokenizer, "") == [tokenizer.eot_id]
    assert begin_prompt(tokenizer, "猫") == tokenizer.encode("猫")
    text = "<|endoftext|><|im_end|>"
    assert not tokenizer.stop_ids & set(begin_prompt(tokenizer, text))
    llama = SimpleNamespace(encode=lambda text: [7] * len(text), bos_id=1, eot_id=2, begins=True)
    assert begin_prompt(llama, "") == [1] and begin_prompt(llama, "ab") == [1, 7, 7]
    smol = SimpleNamespace(encode=lambda text: [7] * len(text), bos_id=1, eot_id=2, begins=False)
    assert begin_prompt(smol, "ab") == [7, 7]  # its begin token opens the turns of a chat, not a text
    neither = SimpleNamespace(encode=lambda text: [7] * len(text), bos_id=-1, eot_id=-1, begins=False)
    assert begin_prompt(neither, "ab") == [7, 7]
    with pytest.raises(UserError, match="--prompt=TEXT"):
        begin_prompt(neither, "")
