"""Benchmarks on a GPU: memory, CUDA events, random weights in FP8. Skipped without a GPU."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.bench.benchmark import Bench, Setup
from runtime.bench.configurations import Configuration
from runtime.bench.recorder import UnwrittenHistory, allocated
from runtime.core.cancel import Cancel
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from tools.forward.measure import Forward, ForwardSetup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]
IN_PYTORCH = {"prompt": "a red boat sails left", "seed": 7, "frames": 9, "backends": {"all": "pytorch"}}


def configuration(name: str, **values: Any) -> Configuration:
    """Return a configuration in PyTorch."""
    return Configuration(name=name, flags="", request=GenerationRequest.from_mapping(IN_PYTORCH | values))


def passes(configurations: Sequence[Configuration], **changes: Any) -> dict[str, Any]:
    """Measure passes of random weights, by name."""
    setup = ForwardSetup(machine=probe(), engines=None, weights_dir=Path("none"), random=True, runs=2, **changes)
    forward = Forward(setup, configurations, lambda _: None)
    forward.measure(Cancel())
    return {one["name"]: one for one in forward.to_json()["configurations"]}


def held() -> int:
    """Return the bytes that PyTorch holds on the GPU, without its libraries' workspaces."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return allocated("cuda:0")


def test_a_clip_reports_gpu_memory_and_frees_it(tmp_path: Path) -> None:
    machine, before = probe(), held()
    engines = EngineService(EngineStore(tmp_path / "engines", 10**10), machine, tmp_path)
    setup = Setup(
        machine=machine,
        engines=engines,
        history=UnwrittenHistory(tmp_path, machine),
        weights_dir=tmp_path,
        folder=tmp_path / "out",
        runs=2,
    )
    both = [configuration("resident", offload="none"), configuration("parts wait", offload="model")]
    bench = Bench.of(setup, both, lambda _: None)
    bench.measure(Cancel())
    resident, waits = (entry.to_json() for entry in bench.entries)
    assert resident["state"] == waits["state"] == "measured"
    assert bench.together
    spec = find("diorama", Path("none"))
    for one in (resident, waits):
        memory = one["memory"]
        assert {"encode", "denoise", "decode"} <= set(memory["vram"]) and {"denoise", "decode"} <= set(memory["gpu"])
        assert memory["vram"]["denoise"] > 4 * spec.parameters["transformer"]
        assert max(memory["gpu"].values()) >= max(memory["vram"].values()) - (64 << 20)
    # What stays loaded is counted for this configuration only.
    assert resident["memory"]["vram"]["denoise"] > 4 * spec.total_parameters
    assert waits["memory"]["vram"]["denoise"] < resident["memory"]["vram"]["denoise"]
    assert waits["quality"]["same"] or waits["quality"]["psnr"] > 40
    assert held() - before < 1 << 20


def test_passes_are_timed_with_cuda_events() -> None:
    small = {"model": "wan2.1-t2v-1.3b", "width": 256, "height": 256, "frames": 5}
    # The bound below is float32's; by itself the VAE decodes in bfloat16 there.
    found = passes([configuration("a", vae_precision="float32", **small)], tera_operations=100.0)
    assert set(found) == {
        "diffusers 256x256, 5 frames, transformer",
        "a, transformer",
        "diffusers 256x256, 5 frames, vae",
        "a, vae",
    }
    for name, one in found.items():
        assert one["state"] == "measured", one["why"]
        assert 0 < one["stages"]["pass"]["median"] < 60
        assert one["working_bytes"] > 1 << 20
        assert one["error"] < (1e-2 if name == "a, vae" else 0.1)
    assert found["a, transformer"]["weights_bytes"] > 2 * 1_400_000_000
    assert found["a, transformer"]["runs_on"] == "PyTorch, bfloat16"


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_random_weights_can_be_quantized_to_fp8() -> None:
    small = {"model": "wan2.1-t2v-1.3b", "width": 256, "height": 256, "frames": 5, "offload": "none"}
    both = [configuration("bf16", quantization="none", **small), configuration("fp8", quantization="fp8", **small)]
    found = passes(both, parts=("transformer",), baseline=False)
    full, eight = found["bf16, transformer"], found["fp8, transformer"]
    assert full["state"] == eight["state"] == "measured", eight["why"]
    assert eight["weights_bytes"] < 0.65 * full["weights_bytes"]
    assert full["error"] < eight["error"] < 0.2
