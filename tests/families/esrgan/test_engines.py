"""Engines of upscalers: equal to PyTorch, built by a call, verified like others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.request import UPSCALER
from runtime.core.settings import Settings
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService
from runtime.families.dcae import make_batched_decode_fn
from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.upscalers import find_upscaler
from runtime.machine.probe import cpu_instructions, probe
from tests.families.esrgan.networks import COMPACT_CONFIG, RRDB_CONFIG, picture, save_safetensors


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize(
    ("backend", "config", "scale", "instructions"),
    [
        ("onnxruntime", COMPACT_CONFIG, 3, cpu_instructions()),
        ("onnxruntime", {**RRDB_CONFIG, "scale": 2}, 2, ()),
        pytest.param("inductor", COMPACT_CONFIG, 4, (), marks=pytest.mark.compiler),
    ],
)
def test_engines_equal_pytorch(
    backend: str, config: dict[str, Any], scale: int, instructions: tuple[str, ...], tmp_path: Path
) -> None:
    save_safetensors(tmp_path / "small.safetensors", config)
    spec, settings = find_upscaler(str(tmp_path / "small.safetensors"), scale, tmp_path), Settings(cache_dir=tmp_path)
    machine = replace(probe(), cpu_instructions=instructions)
    service, module = EngineService.from_settings(settings, machine), load_upscaler(spec)
    frames = torch.stack([torch.from_numpy(picture(9, 12 + index)[..., index:]) for index in range(3)])
    with torch.inference_mode():
        expected = module(frames)
    with make_batched_decode_fn(module, 2, backend=backend, settings=settings, engines=service) as upscale:
        larger = upscale(frames[None])[0]
        assert (upscale.backend, upscale.fallbacks) == (backend, ())
    (record,) = service.store.index()
    assert record.key.precision == ("bfloat16" if machine.cpu_has_bfloat16 else "float32")
    # In bfloat16, an eighth of a step of 8-bit colors on average.
    errors, exact = (larger - expected).abs(), record.key.precision == "float32"
    assert (errors.max(), errors.mean()) < ((1e-5, 1e-5) if exact else (1e-2, 5e-4))
    assert (record.component, record.model, record.usable) == (UPSCALER, spec.name, True)
    assert BUILDERS[record.key.builder].needs(spec, UPSCALER, record.key.profiles[0]).ram_bytes > 0
    assert service.why_stale(record, [spec]) == []
    save_safetensors(tmp_path / "small.safetensors", COMPACT_CONFIG | {"depth": 3})
    changed = find_upscaler(str(tmp_path / "small.safetensors"), scale, tmp_path)
    assert service.why_stale(record, [changed])
