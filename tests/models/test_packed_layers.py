"""Layers in INT8 that kernels multiply: near the dequantized product, with and without LoRAs, and with a fallback."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from runtime.core.facts import Fact
from runtime.models.packed_layers import PackedLinear, use_int8_kernels
from runtime.models.stored_weights import INT8, W4A8

# By comfy-kitchen's layout: the format here, columns that are rotated together, and arguments of its quantizer.
FORMATS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "one scale": ("TensorWiseINT8Layout", INT8, 0, {}),
    "a scale per row": ("TensorWiseINT8Layout", INT8, 0, {"per_channel": True}),
    "rotated": ("TensorWiseINT8Layout", INT8, 64, {"per_channel": True, "convrot": True, "convrot_groupsize": 64}),
    "table": ("AsymW4A8Int8Layout", W4A8, 256, {"convrot_groupsize": 256}),
    "no table": ("AsymW4A8Int8Layout", W4A8, 256, {"codebook": False, "convrot_groupsize": 256}),
}


@cache
def tensors(name: str) -> list[torch.Tensor]:
    """Return the data and scales of a layer (160, 256)."""
    from comfy_kitchen.tensor import QuantizedTensor

    layout, _, _, how = FORMATS[name]
    weight = torch.randn(160, 256, generator=torch.Generator().manual_seed(1))
    return list(QuantizedTensor.from_float(weight, layout, **how).state_dict("layer.weight").values())


def layer_of(name: str) -> PackedLinear:
    data, *scales = tensors(name)
    layer = PackedLinear(nn.Linear(256, 160), FORMATS[name][1], data, scales, FORMATS[name][2])
    layer.bias = nn.Parameter(torch.ones(160), requires_grad=False)
    return layer


def rows() -> torch.Tensor:
    return torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_products_differ_from_dequantized_ones_by_the_rounding_of_the_input(name: str) -> None:
    layer, x, failures = layer_of(name), rows(), list[Fact]()
    wanted = layer(x)
    use_int8_kernels(nn.Sequential(layer), used=True, on_failed=failures.append)
    got = layer(x)
    assert 1e-3 < (got - wanted).norm() / wanted.norm() < 1.2e-2 and not failures
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), got)
    use_int8_kernels(layer, used=False)
    assert torch.equal(layer(x), wanted)


@torch.no_grad()
def test_layers_that_kernels_do_not_multiply_are_dequantized() -> None:
    layer, x = layer_of("no table"), rows()
    layer.rotated = 64
    wanted = layer(x)
    use_int8_kernels(layer, used=True)
    assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("name", ["rotated", "table"])
@torch.no_grad()
def test_a_product_of_two_matrices_is_added_to_the_result(name: str) -> None:
    layer, x, failures = layer_of(name), rows(), list[Fact]()
    use_int8_kernels(layer, used=True, on_failed=failures.append)
    by_kernels, weight = layer(x), layer.dequantized(torch.float32)
    random = torch.Generator().manual_seed(4)
    change = torch.zeros(160, 256)
    for strength in (0.5, -2.0):
        up, down = (torch.randn(shape, generator=random).bfloat16() for shape in ((160, 4), (4, 256)))
        layer.add_product(strength, up, down)
        change += strength * up.float() @ down.float()
    torch.testing.assert_close(layer.dequantized(torch.float32), weight + change, rtol=1e-5, atol=1e-4)
    # The base is multiplied by the kernels as before.
    torch.testing.assert_close(layer(x) - by_kernels, x @ change.T, rtol=1e-4, atol=1e-3)
    assert not failures
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-4)
    use_int8_kernels(layer, used=False)
    torch.testing.assert_close(layer(x), x @ (weight + change).T + 1, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_layers_to_which_other_changes_are_added_are_dequantized() -> None:
    layer, x = layer_of("rotated"), rows()
    layer.add(0.5, {"up": torch.ones(160, 1)}, lambda weight, factors: factors["up"].expand_as(weight))
    wanted = layer(x)
    use_int8_kernels(layer, used=True)
    assert torch.equal(layer(x), wanted)


@torch.no_grad()
def test_after_a_failure_all_layers_are_dequantized() -> None:
    layers, x, failures = nn.Sequential(layer_of("rotated"), layer_of("rotated")), rows(), list[Fact]()
    wanted = layers[1](x)
    use_int8_kernels(layers, used=True, on_failed=failures.append)
    layers[0].register_parameter("bias", None)
    # The kernels take no numbers of 64 bits.
    assert layers[0](x.double()).dtype == torch.float64
    assert [reason.code for reason in failures] == ["execution.int8_failed"]
    assert torch.equal(layers[1](x), wanted) and len(failures) == 1
