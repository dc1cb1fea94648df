"""Linear layers of one input as one product: the same results, one piece of memory."""

import pytest
import torch
from torch import nn

from groundup.kernels.linear import join
from groundup.train.lora import LoRAConfig, LoRALinear
from model import each_linear


def three(bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(16, n, bias=bias) for n in (24, 8, 8)]


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_gives_what_each_layer_gives_also_with_new_weights(bias):
    layers, x = three(bias), torch.randn(2, 5, 16)
    apart = each_linear(x, *layers)
    join(*layers)
    matrix, _ = layers[0].joined
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers} == {matrix.data_ptr()}
    for got, want in zip(each_linear(x, *layers), apart, strict=True):
        torch.testing.assert_close(got, want)

    for p in [p for layer in layers for p in layer.parameters()]:
        p.data.copy_(torch.randn_like(p))  # as Engine.update does
    for got, layer in zip(each_linear(x, *layers), layers, strict=True):
        torch.testing.assert_close(got, layer(x))


def test_an_adapted_layer_keeps_its_own_product():
    layers, x = three(False), torch.randn(5, 16)
    layers[1] = LoRALinear(layers[1].weight, LoRAConfig(rank=2))
    nn.init.normal_(layers[1].lora_B.weight)
    join(*layers)
    assert not hasattr(layers[0], "joined")
    for got, layer in zip(each_linear(x, *layers), layers, strict=True):
        assert torch.equal(got, layer(x))
