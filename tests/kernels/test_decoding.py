"""generate/decode.py, decoding.py and step.c against the same model in torch."""

import dataclasses
import shutil

import pytest
import torch
from test_model import random_ids, random_model, tiny_config

from groundup.generate import decode
from groundup.generate.completion import generate
from groundup.generate.decode import decode_step, for_inference, to_int8
from groundup.generate.engine import Engine
from groundup.generate.kv_cache import KVCache
from groundup.generate.sampling import SamplingParams
from groundup.kernels.decoding import Int8Linear, NativeStep, lay_out, quantize
from model import Transformer

pytestmark = pytest.mark.skipif(not shutil.which("gcc") and not shutil.which("clang"), reason="needs a C compiler")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Of the standard deviation; with 8-bit weights step.c rounds what it multiplies to 16 bits, torch
# the scaled weights to bfloat16.
TOLERANCE = {(torch.float32, False): 2e-5, (torch.float32, True): 1e-3}
TOLERANCE |= {(torch.bfloat16, False): 0.05, (torch.bfloat16, True): 0.1}
INT8 = pytest.mark.parametrize("int8", [False, True])
CPU = torch.device("cpu")


def model_with(dtype: torch.dtype, int8: bool, **changes: object) -> tuple[Transformer, Transformer, NativeStep]:
    """A model for torch, the same for step.c, and its step."""
    net = random_model(tiny_config(**changes)).to(dtype).eval()
    net = to_int8(net) if int8 else net
    fast = for_inference(net, dtype)
    assert for_inference(fast, dtype) is fast  # the blocks are held once
    return net, fast, NativeStep(fast)


def filled(net: Transformer, rows: int, length: int, dtype: torch.dtype) -> KVCache:
    """A cache of random texts."""
    cache = KVCache(net.cfg, rows, length, CPU, dtype)
    with torch.no_grad():
        net.hidden(random_ids(net.cfg, rows, length - 1), cache.chunk(0, length - 1))
    return cache


SHAPES = [
    {},
    {"n_kv_head": 2, "tie_embeddings": True},
    {"n_kv_head": 1, "qk_norm": True, "head_dim": 6, "ffn_dim": 70},
    {"qkv_bias": True, "n_embd": 36, "n_head": 3, "head_dim": 10, "ffn_dim": 34, "norm_eps": 0.1},
    {"qkv_bias": True, "qk_norm": True, "block_size": 300},
]


@BOTH
@INT8
@pytest.mark.parametrize("changes", SHAPES)
@torch.no_grad()
def test_a_step_is_torchs(changes, int8, dtype):
    """Of rows of any length in caches of two sizes, one of which rests; also what it writes to the cache."""
    net, fast, step = model_with(dtype, int8, **changes)
    want, got = ([filled(net, 3, 20, dtype), filled(net, 9, 30, dtype)] for _ in range(2))
    tokens = random_ids(net.cfg, 1, 12, seed=4)[0]
    places = [0, 19, -1], [4, 5, 28, 29, 1, 2, 3, 0, 17]
    parts = [[cache.part(at) for cache, at in zip(caches, places, strict=True)] for caches in (want, got)]
    a, b = decode_step(net, tokens, parts[0]), step(fast, tokens, parts[1])
    assert b.dtype == torch.float32
    awake = torch.arange(12) != 2
    atol = TOLERANCE[dtype, int8] * a.std().item()
    torch.testing.assert_close(a[awake], b[awake], atol=atol, rtol=1e-4)
    for one, other in zip(want, got, strict=True):
        for x, y in zip(one.layers, other.layers, strict=True):  # but for the spare position
            rtol = 1e-4 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(x[:, :, :-1], y[:, :, :-1], atol=atol, rtol=rtol)


@BOTH
@INT8
@torch.no_grad()
def test_a_row_is_to_the_bit_what_it_is_alone(int8, dtype):
    """Among others, with another number of threads."""
    net, fast, step = model_with(dtype, int8, n_kv_head=2, ffn_dim=70)
    tokens, lengths = random_ids(net.cfg, 1, 15, seed=4)[0], [1, 7, 18, 3, 9] * 3
    cache, threads = filled(net, 15, 20, dtype), torch.get_num_threads()
    together = step(fast, tokens, [cache.part(lengths)])
    try:
        for n_threads in (1, 2, 5):
            torch.set_num_threads(n_threads)
            assert torch.equal(step(fast, tokens, [cache.part(lengths)]), together)
        for i in range(15):
            alone = KVCache(net.cfg, 1, 20, CPU, dtype)
            for to, of in zip(alone.layers, cache.layers, strict=True):
                to.copy_(of[i : i + 1])
            assert torch.equal(step(fast, tokens[i : i + 1], [alone.part([lengths[i]])])[0], together[i])
    finally:
        torch.set_num_threads(threads)


@BOTH
@INT8
def test_layers_multiply_as_torchs_do(int8, dtype):
    """Also with inputs that fill no group, and several."""
    generator = torch.Generator().manual_seed(0)
    for N, K, bias in ((70, 34, True), (32, 64, False), (5, 2, True), (3, 150, False)):
        linear = torch.nn.Linear(K, N, bias=bias).to(dtype).requires_grad_(False)
        linear.weight[0] = 1
        plain = Int8Linear(linear) if int8 else linear
        holder = torch.nn.Sequential(plain)
        lay_out([(holder, "0")], dtype)
        layer = holder[0]
        for shape in ((1, K), (1, 1, K), (5, 1, K), (3, 40, K)):
            x = torch.rand(*shape, generator=generator).to(dtype)
            want = plain(x)
            atol = TOLERANCE[dtype, int8] * want.std().item()
            torch.testing.assert_close(layer(x), want, atol=atol, rtol=1e-2)
        several = torch.randn(4, 2 * K, generator=generator).to(dtype)
        torch.testing.assert_close(layer(several[:, ::2]), layer(several[:, ::2].contiguous()))
        assert layer(torch.full((1, K), torch.nan)).isnan().all()


def test_what_8_bits_round():
    """By at most half a step of the group's own scale; rows of zeros stay zeros."""
    weight = torch.randn(40, 100) * torch.logspace(-6, 6, 40)[:, None]
    weight[3] = 0
    rounded, scales = quantize(weight)
    scales = torch.cat([scales[:, :1].expand(40, 64), scales[:, 1:].expand(40, 36)], dim=1)
    assert rounded.dtype == torch.int8 and (rounded.abs().amax(1) == 127).sum() == 39
    assert ((rounded * scales - weight).abs() <= 0.501 * scales).all() and not rounded[3].any()
    linear = torch.nn.Linear(100, 40)
    linear.weight.data = weight
    assert torch.equal(Int8Linear(linear).weight, rounded * scales)


@INT8
def test_bfloat16_ids_are_the_same_alone_and_among_others(int8):
    """And prompts of one piece."""
    net = random_model(tiny_config(n_kv_head=2)).to(torch.bfloat16)
    net = to_int8(net) if int8 else net
    params = SamplingParams(max_new_tokens=40, logprobs=0)
    prompts = [random_ids(net.cfg, 1, 9, seed=i)[0].tolist() for i in range(7)]
    alone = [generate(net, None, [ids], params)[0].completions[0] for ids in prompts]
    e, found = Engine(net, None, 7), {}
    for i, ids in enumerate(prompts):
        e.add(e.request(i, ids, params))
        e.step()
    while e.busy:
        found |= {sample.request.index: sample for sample, _ in e.step()}
    for i, one in enumerate(alone):
        assert found[i].ids == one.ids and found[i].logprobs == one.logprobs


def test_torch_does_it_without_a_compiler_or_for_another_model(monkeypatch):
    net, ids = random_model(tiny_config()), random_ids(tiny_config(), 1, 8)[0].tolist()
    params = SamplingParams(max_new_tokens=20, temperature=0.0)
    want = generate(net, None, [ids], params)[0].completions[0].ids
    assert isinstance(Engine(net, None, 1).decode_step, NativeStep)
    changes = {"compile_c.shutil.which": lambda name: None, "generate.decode.is_plain": lambda _: False}
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"groundup.{name}", value)
            decode.step_c.cache_clear()
            assert Engine(net, None, 2).decode_step is decode_step
            assert generate(net, None, [ids], params)[0].completions[0].ids == want
        decode.step_c.cache_clear()
    assert Engine(net, None, 1, copies=False).decode_step is decode_step
    odd = random_model(dataclasses.replace(net.cfg, ffn_dim=33))
    assert Engine(odd, None, 1).decode_step is decode_step and decode.is_native(net.cfg, CPU, torch.float32)
    assert not decode.is_native(net.cfg, CPU, torch.float16)
