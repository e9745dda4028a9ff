"""Engines of upscalers: equal to PyTorch, built by a call, verified like others."""

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
from runtime.machine.probe import probe
from tests.families.esrgan.networks import COMPACT_CONFIG, RRDB_CONFIG, picture, save_safetensors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "config", "scale"),
    [
        ("onnxruntime", COMPACT_CONFIG, 3),
        ("onnxruntime", {**RRDB_CONFIG, "scale": 2}, 2),
        pytest.param("inductor", COMPACT_CONFIG, 4, marks=pytest.mark.compiler),
    ],
)
def test_engines_equal_pytorch(backend: str, config: dict[str, Any], scale: int, tmp_path: Path) -> None:
    save_safetensors(tmp_path / "small.safetensors", config)
    spec, settings = find_upscaler(str(tmp_path / "small.safetensors"), scale, tmp_path), Settings(cache_dir=tmp_path)
    service, module = EngineService.from_settings(settings, probe()), load_upscaler(spec)
    frames = torch.stack([torch.from_numpy(picture(9, 12 + index)[..., index:]) for index in range(3)])
    with torch.inference_mode():
        expected = module(frames)
    with make_batched_decode_fn(module, 2, backend=backend, settings=settings, engines=service) as upscale:
        larger = upscale(frames[None])[0]
        assert (upscale.backend, upscale.fallbacks) == (backend, ())
    assert (larger - expected).abs().max() < 1e-5
    (record,) = service.store.index()
    assert (record.component, record.model, record.usable) == (UPSCALER, spec.name, True)
    assert BUILDERS[record.key.builder].needs(spec, UPSCALER, record.key.profiles[0]).ram_bytes > 0
    assert service.why_stale(record, [spec]) == []
    save_safetensors(tmp_path / "small.safetensors", COMPACT_CONFIG | {"depth": 3})
    changed = find_upscaler(str(tmp_path / "small.safetensors"), scale, tmp_path)
    assert service.why_stale(record, [changed])
