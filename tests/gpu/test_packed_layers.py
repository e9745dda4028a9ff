"""Layers in INT8 on a GPU: comfy-kitchen's kernels are near the dequantized product, also recorded and compiled."""

import pytest
import torch

from runtime.core.facts import Fact
from runtime.models.packed_layers import use_int8_kernels
from tests.gpu.errors import relative_error
from tests.models.test_packed_layers import FORMATS, layer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]


@pytest.mark.parametrize("tokens", [1, 2, 300])
@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_products_differ_from_dequantized_ones_by_the_rounding_of_the_input(name: str, tokens: int) -> None:
    pytest.importorskip("comfy_kitchen")
    layer, failures = layer_of(name).to("cuda"), list[Fact]()
    layer.bias.data = layer.bias.data.to(torch.bfloat16)
    x = torch.randn(1, tokens, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(torch.bfloat16)
    wanted = layer(x)
    use_int8_kernels(layer, used=True, on_failed=failures.append)
    got = layer(x)
    assert relative_error(got, wanted) < 2e-2 and not failures
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(recorded, got)
