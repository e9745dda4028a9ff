"""Layers in INT8 on a GPU: comfy-kitchen's kernels are near the dequantized product, also recorded and compiled."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.events import Event, VideoSaved
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.packed_layers import use_int8_kernels
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from tests.gpu.errors import relative_error
from tests.models.test_packed_layers import FORMATS, layer_of
from tests.transformer_files import FORMATS as FILES
from tests.transformer_files import wide_transformer

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
    torch.compiler.reset()  # each layer counts as compiled again
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(recorded, got)


def test_a_job_multiplies_the_layers_of_a_file_in_int8(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    pytest.importorskip("comfy_kitchen")
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "weights" / "base")
    FILES["INT8"](tmp_path / "weights" / "model.safetensors", wide_transformer().state_dict())
    asked = {"prompt": "a boat", "model": "model", "frames": 5, "width": 64, "height": 64, "steps": 2, "seed": 1}
    spec = find("model", tmp_path / "weights")
    request = GenerationRequest.from_mapping(asked)
    plan = resolve(request, spec, PlanningContext(probe(), tmp_path / "clip.mp4"))
    assert plan.speed.int8_reason == Fact("planner.int8_kernels")
    events: list[Event] = []
    with Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency)
    end = events[-1]
    assert isinstance(end, VideoSaved) and end.plan["speed"]["int8_kernels"]
    assert "pipeline.degraded" not in {getattr(warning, "code", "") for warning in end.warnings}
