"""Every part of the shipped model is built, verified and used on every backend that runs on this GPU."""

from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import MachineError
from runtime.core.facts import BACKEND_TITLES
from runtime.core.plan import PYTORCH
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.pipeline.build_engines import build_all, wanted_engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compiler,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]


@pytest.mark.parametrize("backend", [name for name in BACKEND_TITLES if name != PYTORCH])
def test_each_part_is_built(backend: str, tmp_path: Path) -> None:
    spec = find("diorama", tmp_path)
    service = EngineService(EngineStore(tmp_path / "engines", 1 << 40), probe(), tmp_path)
    request = GenerationRequest.from_mapping({"prompt": "a boat", "frames": 9, "backends": {"all": backend}})
    try:
        wanted = wanted_engines(request, spec, service)
    except MachineError as error:
        pytest.skip(f"{backend} does not build here: {error.fact.code}")
    assert {one.component for one in wanted} >= {"text_encoder", "transformer", "vae", "vae_encoder"}
    assert {one.device for one in wanted} == {"cuda:0"}
    results = list(build_all(wanted, spec, service, lambda fact, share: None, Cancel(), again=lambda use: False))
    assert [result.error for result in results] == [None] * len(wanted)
    assert all(result.record is not None and result.record.usable for result in results)
