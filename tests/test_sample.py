"""sample.py: the engine against transformers and plain recomputation, the text against one-shot decoding."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_model import as_transformers, random_ids, random_model, tiny_config

import checkpoint
import ddp
import sample
from model import Transformer
from sample import SampleError, SamplingParams, Token, generate, stream
from tokenizer import Tokenizer, train

INF = float("inf")
ROOT = Path(sample.__file__).parent
CORPUS = [
    Path(random.__file__).read_text(encoding="utf-8"),
    "从前有一只猫，坐在垫子上。" * 20,
    "🙂👩‍👩‍👧 and 𠮷野家 " * 3,
]


def prompt(length: int, seed: int = 3) -> list[int]:
    return random_ids(tiny_config(), 1, length, seed)[0].tolist()


def greedy_without_cache(net: Transformer, ids: list[int], n_new: int) -> list[int]:
    """The whole prefix again for every token; beyond the context not even that is possible."""
    ids, length = list(ids), len(ids)
    with torch.no_grad():
        for _ in range(n_new):
            ids.append(net(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[length:]


# ---- choosing a token -----------------------------------------------------------------------------------------------


def test_processors_equal_transformers_bit_for_bit():
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    draw, settings = random.Random(0), Counter()
    for trial in range(300):
        V = draw.choice([5, 97, 1000])
        logits = torch.randn(3, V, generator=torch.Generator().manual_seed(trial)) * draw.choice([0.1, 3.0])
        if trial % 3 == 0:
            logits = (logits * 2).round() / 2  # ties, also at the k-th value and inside the nucleus
        if trial % 5 == 0:
            logits[:, 1::4] = -INF
        temperature = draw.choice([0.1, 0.8, 1.0, 2.5])
        top_k, top_p = draw.choice([-1, 0, 1, 4, 50, 10**6]), draw.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
        chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        chain += [TopKLogitsWarper(top_k)] if top_k > 0 else []
        chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        want = chain(None, logits.clone())
        got = sample.keep_likeliest(logits / temperature, top_k, top_p)
        assert torch.equal(got, want), (trial, V, temperature, top_k, top_p)
        settings["cut"] += bool((want == -INF).sum() > (logits == -INF).sum())
    assert settings["cut"] > 100


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (-1, 1.0, 5), (0, 1.0, 5), (10**6, 1.0, 5), (1, 1.0, 1), (3, 1.0, 3),
        (-1, 0.0, 1), (-1, 0.49, 1), (-1, 0.79, 2), (-1, 0.81, 3), (-1, 0.999, 5),
        (2, 0.61, 1), (2, 0.63, 2),  # after top_k=2 the likeliest has 0.5 / 0.8 = 0.625
    ],
)  # fmt: skip
def test_kept_ids_by_hand(top_k, top_p, kept):
    logits = torch.tensor([[0.06, 0.5, 0.04, 0.3, 0.1]]).log()
    got = sample.keep_likeliest(logits, top_k, top_p)[0]
    likeliest = [1, 3, 4, 0, 2]
    assert sorted(i for i in range(5) if got[i] > -INF) == sorted(likeliest[:kept])


def test_ties_with_the_kth_stay():
    got = sample.keep_likeliest(torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]]), 2, 1.0)
    assert got[0].tolist() == [-INF, 3.0, 2.0, 2.0, 2.0]


def test_sampled_ids_follow_the_distribution():
    """20,000 rows, each with its own seed, so this also tells whether neighbouring seeds are independent."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -INF])
    rows = 20_000
    params = SamplingParams(temperature=0.7, top_k=4)
    generators = [torch.Generator().manual_seed(1337 + row) for row in range(rows)]
    counts = torch.bincount(sample.choose(logits.repeat(rows, 1), params, generators), minlength=6)
    want = torch.zeros(6)
    want[:4] = (logits[:4] / 0.7).softmax(dim=0)
    assert counts[4:].sum() == 0
    chi_square = ((counts[:4] - rows * want[:4]) ** 2 / (rows * want[:4])).sum().item()
    assert chi_square < 16.3  # 3 degrees of freedom: exceeded by chance once in a thousand seeds


# ---- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 2}, {"qk_norm": True, "head_dim": 24}])
@pytest.mark.parametrize("length", [1, 7])
def test_greedy_equals_transformers_generate(changes, length):
    net = random_model(tiny_config(**changes))
    ids = prompt(length)
    hf = as_transformers(net)
    want = hf.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40, use_cache=True)[0, length:].tolist()
    assert len(set(want)) > 5
    # Greedy ignores everything that shapes the distribution.
    params = SamplingParams(max_new_tokens=40, temperature=0, top_k=3, top_p=0.1, seed=5)
    assert generate(net, [ids], params) == [want]


def test_greedy_stops_where_transformers_stops():
    net = random_model(tiny_config())
    ids = prompt(4)
    free = generate(net, [ids], SamplingParams(max_new_tokens=30, temperature=0))[0]
    stop = free[11]
    hf = as_transformers(net)
    want = hf.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=30, eos_token_id=stop)[0, 4:].tolist()
    got = generate(net, [ids], SamplingParams(max_new_tokens=30, temperature=0, stop_ids=frozenset({stop, 96})))[0]
    assert got == want == free[: free.index(stop) + 1]


def test_ragged_rows_with_different_ends_equal_single_rows():
    net = random_model(tiny_config(n_kv_head=2))
    prompts = [prompt(n, seed=n) for n in (9, 1, 30, 5, 9)]
    params = SamplingParams(max_new_tokens=25, temperature=1.0, top_k=40, top_p=0.9, seed=7)
    free = generate(net, prompts, params)
    stops = frozenset({free[0][3], free[2][10]})
    params = SamplingParams(max_new_tokens=25, temperature=1.0, top_k=40, top_p=0.9, seed=7, stop_ids=stops)
    together = generate(net, prompts, params)
    assert len({len(row) for row in together}) >= 3  # they do end at different times
    for i, ids in enumerate(prompts):
        alone = SamplingParams(max_new_tokens=25, temperature=1.0, top_k=40, top_p=0.9, seed=7 + i, stop_ids=stops)
        assert generate(net, [ids], alone) == [together[i]], i
        end = next((k for k, token in enumerate(free[i]) if token in stops), 24)
        assert together[i] == free[i][: end + 1], i


def test_seed_decides_and_samples_of_one_prompt_differ():
    net = random_model(tiny_config())
    ids = prompt(3)
    params = SamplingParams(max_new_tokens=12, seed=1)
    first = generate(net, [ids] * 8, params)
    assert first == generate(net, [ids] * 8, params)
    assert len({tuple(row) for row in first}) == 8
    assert len({row[0] for row in first}) > 1  # the very first token is drawn for each row too
    assert generate(net, [ids] * 8, SamplingParams(max_new_tokens=12, seed=2))[:7] == first[1:]


def test_generation_ends_with_the_context():
    net = random_model(tiny_config(block_size=16))
    prompts = [prompt(n, seed=n) for n in (16, 3, 15)]
    tokens = list(stream(net, prompts, SamplingParams(max_new_tokens=100, temperature=0)))
    rows = [[token.id for token in tokens if token.row == row] for row in range(3)]
    # The model has seen targets one beyond its context, so a full prompt still has a next token.
    assert [len(row) for row in rows] == [1, 14, 2]
    for ids, row in zip(prompts, rows, strict=True):
        assert row == greedy_without_cache(net, ids, len(row))
    assert [(token.row, token.finish) for token in tokens if token.finish] == [(row, "length") for row in (0, 2, 1)]


def test_finish_reasons_and_stop_wins_over_length():
    net = random_model(tiny_config())
    ids = prompt(5)
    free = generate(net, [ids], SamplingParams(max_new_tokens=6, temperature=0))[0]
    stop = frozenset({free[-1]})
    want_end = free.index(free[-1])
    tokens = list(stream(net, [ids], SamplingParams(max_new_tokens=want_end + 1, temperature=0, stop_ids=stop)))
    assert [token.finish for token in tokens] == [""] * want_end + ["stop"]
    tokens = list(stream(net, [ids], SamplingParams(max_new_tokens=6, temperature=0)))
    assert [token.finish for token in tokens] == [""] * 5 + ["length"]
    assert [token.id for token in tokens] == free


@pytest.mark.parametrize("temperature", [0, 5.0])
def test_banned_ids_never_appear(temperature):
    net = random_model(tiny_config())
    banned = tuple(range(0, 97, 2))
    params = SamplingParams(max_new_tokens=50, temperature=temperature, banned_ids=banned)
    rows = generate(net, [prompt(4)] * 4, params)
    assert {i % 2 for row in rows for i in row} == {1}
    with torch.no_grad():
        logits = net(torch.tensor([prompt(4)]))[0, -1]
    if temperature == 0:
        assert rows[0][0] == 1 + 2 * logits[1::2].argmax().item()


def test_untouched_by_dropout_and_leaves_mode_and_generators_alone():
    net = random_model(tiny_config(dropout=0.5)).train()
    without = random_model(tiny_config()).eval()
    params = SamplingParams(max_new_tokens=20)
    torch.manual_seed(99)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert generate(net, [prompt(4), prompt(9)], params) == generate(without, [prompt(4), prompt(9)], params)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.array_equal(np.random.get_state()[1], before[2])
    assert all(module.training for module in net.modules())
    assert not any(module.training for module in without.modules())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


def test_a_stream_dropped_half_way_restores_the_mode():
    net = random_model(tiny_config()).train()
    tokens = stream(net, [prompt(4)], SamplingParams(max_new_tokens=20))
    next(tokens)
    assert not net.training and torch.is_grad_enabled()  # gradients are off inside the generator only
    tokens.close()
    assert net.training


def test_cache_has_the_dtype_of_the_products(monkeypatch):
    seen = []

    class WatchedCache(sample.KVCache):
        def extend(self, T: int) -> torch.Tensor:
            seen.append(self.keys.dtype)
            return super().extend(T)

    monkeypatch.setattr(sample, "KVCache", WatchedCache)
    net = random_model(tiny_config())
    params = SamplingParams(max_new_tokens=5)
    generate(net, [prompt(4)], params)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = generate(net, [prompt(4), prompt(2)], params)
    generate(random_model(tiny_config()).to(torch.bfloat16), [prompt(4)], params)
    assert [len(row) for row in rows] == [5, 5]
    assert seen == [torch.float32] * 5 + [torch.bfloat16] * 10


def test_compiled_blocks_are_not_compiled_again_for_every_length():
    net, plain = random_model(tiny_config()), random_model(tiny_config())
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    net.compile_blocks(lambda f: torch.compile(f, backend=backend, dynamic=False))
    x = random_ids(net.cfg, 2, 8)
    net(x, x).backward()
    trained = len(graphs)
    params = SamplingParams(max_new_tokens=20)
    assert generate(net, [prompt(4), prompt(2)], params) == generate(plain, [prompt(4), prompt(2)], params)
    net(x, x).backward()
    assert len(graphs) == trained


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], ["no prompt"]),
        ([[1], []], ["prompt 1", "no tokens", "<|endoftext|>"]),
        ([[1] * 65], ["prompt 0", "65 tokens", "64"]),
        ([[1], [2, 97]], ["prompt 1", "token id 97", "vocab_size=97"]),
        ([[-1, 5]], ["prompt 0", "token id -1"]),
    ],
)
def test_impossible_prompts_are_one_line(prompts, words):
    net = random_model(tiny_config()).train()
    with pytest.raises(SampleError) as caught:
        generate(net, prompts, SamplingParams())
    text = str(caught.value)
    assert text.startswith("sample: ") and "\n" not in text and SampleError.one_line
    assert all(word in text for word in words), text
    assert net.training


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("max_new_tokens", value) for value in (0, -5)],
        *[("temperature", value) for value in (-0.1, 1e-9, INF, float("nan"))],
        ("top_k", -2),
        *[("top_p", value) for value in (-0.1, 1.1, float("nan"))],
        *[("seed", value) for value in (-1, 2**63)],
    ],
)
def test_impossible_parameters_are_one_line(key, value):
    with pytest.raises(SampleError) as caught:
        SamplingParams(**{key: value})
    text = str(caught.value)
    assert text.startswith(f"sample: {key} must be ") and text.endswith(f"got {value}") and "\n" not in text


# ---- text -----------------------------------------------------------------------------------------------------------


def test_rows_come_out_in_order_and_as_early_as_possible():
    events = [
        Token(0, 10, ""), Token(1, 20, ""), Token(2, 30, "stop"),
        Token(0, 11, "length"), Token(1, 21, ""),
        Token(1, 22, "stop"),
    ]  # fmt: skip
    taken = []

    def source():
        for event in events:
            taken.append(event)
            yield event

    out = [(token.id, len(taken)) for token in sample.in_row_order(source(), 3)]
    #      token, how many had been generated by then
    assert out == [(10, 1), (11, 4), (20, 4), (21, 5), (22, 6), (30, 6)]


@pytest.fixture(scope="module", params=["bpe", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return train(CORPUS, 512, backend=request.param)


def events(ids: list[int], row: int = 0) -> list[Token]:
    return [Token(row, token, "length" if i == len(ids) - 1 else "") for i, token in enumerate(ids)]


@pytest.mark.parametrize("text", ["The cat sat.", "从前有一只猫", "𠮷野家🙂👩‍👩‍👧!", "a\r\n\tb  c"])
def test_streamed_text_equals_text_decoded_at_once(tokenizer, text):
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        pieces = list(sample.text_of(tokenizer, ids[:cut], events(ids[cut:]), 1))
        assert "".join(pieces) == text + "\n"
        assert not any("\ufffd" in piece for piece in pieces)


def test_random_ids_stream_as_python_decodes_their_bytes(tokenizer):
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(30)]  # special ids and broken characters among them
        want = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(sample.text_of(tokenizer, [], events(ids), 1)) == want + "\n"


def test_a_character_is_given_out_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("\U0002b740")  # a rare ideograph: four tokens of one byte each, in either backend
    ids = ids[-4:]
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([byte]) for byte in "\U0002b740".encode()]
    pieces = list(sample.text_of(tokenizer, [], events(ids), 1))
    assert pieces[2:] == ["", "", "", "\U0002b740", "\n"]
    pieces = list(sample.text_of(tokenizer, [], events(ids[:3]), 1))
    assert "".join(pieces) == "\ufffd\n"


def test_several_samples_are_separated_and_each_repeats_the_prompt(tokenizer):
    ids, end = tokenizer.encode("猫"), tokenizer.eot_id
    a, b = tokenizer.encode("坐在"), tokenizer.encode("垫子")
    width = max(len(a), len(b)) + 1
    rows = [events([*a, end]), events([*b, end], row=1)]
    tokens = [tokens[k] for k in range(width) for tokens in rows if k < len(tokens)]
    text = "".join(sample.text_of(tokenizer, ids, tokens, 2))
    assert text == "猫坐在\n" + "-" * 80 + "\n猫垫子\n"


def test_what_may_be_sampled(tokenizer):
    banned = set(sample.never_sampled(tokenizer, tokenizer.vocab_size + 3))
    assert tokenizer.pad_id in banned and tokenizer.im_start_id in banned
    assert set(range(tokenizer.vocab_size, tokenizer.vocab_size + 3)) <= banned
    assert {i for name, i in tokenizer.special_tokens.items() if "reserved" in name} <= banned
    assert not banned & tokenizer.stop_ids
    assert not banned & set(tokenizer.encode("".join(CORPUS)))
    assert len(banned) + len(tokenizer.stop_ids) + sum(tokenizer.token_byte_lengths() > 0) == tokenizer.vocab_size + 3


def test_where_a_prompt_begins(tokenizer):
    assert sample.begin_prompt(tokenizer, "") == [tokenizer.eot_id]
    assert sample.begin_prompt(tokenizer, "猫") == tokenizer.encode("猫")
    text = "<|endoftext|><|im_end|>"
    assert not tokenizer.stop_ids & set(sample.begin_prompt(tokenizer, text))
    llama = SimpleNamespace(encode=lambda text: [7] * len(text), bos_id=1, eot_id=2)
    assert sample.begin_prompt(llama, "") == [1] and sample.begin_prompt(llama, "ab") == [1, 7, 7]
    neither = SimpleNamespace(encode=lambda text: [7] * len(text), bos_id=-1, eot_id=-1)
    assert sample.begin_prompt(neither, "ab") == [7, 7]
    with pytest.raises(SampleError, match="--prompt=TEXT"):
        sample.begin_prompt(neither, "")


# ---- command line ---------------------------------------------------------------------------------------------------


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "sample.py"), *arguments]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONIOENCODING="utf-8")
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8", timeout=120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A directory with out/older and out/newer, two random models, one checkpoint each."""
    root, tokenizer = tmp_path_factory.mktemp("cwd"), train(CORPUS, 512)
    alone = ddp.World(rank=0, local_rank=0, world_size=1)
    for age, name in ((100, "older"), (0, "newer")):
        net = random_model(tiny_config(vocab_size=tokenizer.vocab_size), seed=age)
        with torch.no_grad():
            net.lm_head.weight[[tokenizer.pad_id, tokenizer.im_start_id]] *= 5  # likely, so that a ban is needed
        path = checkpoint.save(
            root / "out" / name, 20, net, tokenizer, {"step": 20}, {}, alone, val_loss=None, keep_last=2, keep_best=0
        )
        for file in path.iterdir():
            os.utime(file, (file.stat().st_mtime - age,) * 2)
    return root


def expected(root: Path, directory: str, text: str, n: int, params: dict) -> str:
    """What the command prints, from the engine's ids decoded at once."""
    tokenizer, net = Tokenizer.load(root / directory), checkpoint.load_model(root / directory)
    banned = sample.never_sampled(tokenizer, net.cfg.vocab_size)
    params = SamplingParams(stop_ids=tokenizer.stop_ids, banned_ids=banned, **params)
    rows = generate(net, [tokenizer.encode(text) or [tokenizer.eot_id]] * n, params)
    return ("-" * 80 + "\n").join(text + tokenizer.decode(row, skip_special_tokens=True) + "\n" for row in rows)


def test_without_arguments_samples_from_the_newest_run(runs):
    done = run(runs, "--dtype=float32", "--max_new_tokens=20")
    assert (done.returncode, done.stderr) == (0, "")
    params = {"max_new_tokens": 20, "temperature": sample.temperature, "top_p": sample.top_p, "seed": sample.seed}
    assert done.stdout == expected(runs, "out/newer/step_000020", "", 1, params)
    assert done.stdout != expected(runs, "out/older/step_000020", "", 1, params)


@pytest.mark.parametrize("init_from", ["out/older", "out/older/step_000020"])
def test_prompt_and_parameters_of_the_command_line(runs, init_from):
    flags = ["--n=2", "--max_new_tokens=12", "--temperature=1.5", "--top_k=50", "--top_p=1", "--seed=5", "--device=cpu"]
    done = run(runs, f"--init_from={init_from}", "--prompt=从前 a=b", "--dtype=float32", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    params = {"max_new_tokens": 12, "temperature": 1.5, "top_k": 50, "seed": 5}
    assert done.stdout == expected(runs, "out/older/step_000020", "从前 a=b", 2, params)


def test_hugging_face_directory_without_a_run(runs, tmp_path):
    """As transformers itself writes it, with our tokenizer beside the weights."""
    source = runs / "out/older/step_000020"
    tokenizer, net = Tokenizer.load(source), checkpoint.load_model(source)
    as_transformers(net).save_pretrained(tmp_path / "hf")
    tokenizer.save(tmp_path / "hf")
    done = run(tmp_path, "--init_from=hf", "--prompt=The", "--temperature=0", "--max_new_tokens=8", "--dtype=float32")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected(runs, "out/older/step_000020", "The", 1, {"max_new_tokens": 8, "temperature": 0})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature=-1"], ["sample: temperature", "-1.0"]),
        (["--n=0"], ["sample: n must be", "0"]),
        (["--prompt=" + "猫 " * 100], ["sample: prompt 0", "64"]),
        (["--init_from=out/nothing"], ["out/nothing"]),
        (["--temprature=1"], ["'temprature'", "'temperature'"]),
    ],
)
def test_mistakes_are_one_line(runs, arguments, words):
    done = run(runs, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), done.stderr


def test_no_run_yet_is_one_line(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "--init_from" in done.stderr
    assert not any(tmp_path.iterdir())
