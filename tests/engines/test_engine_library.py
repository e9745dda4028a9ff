"""Engines of `engine_library` are those that a plan would build, and ready to be used."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests.engine_library import EngineLibrary


@pytest.mark.slow
def test_a_plan_uses_the_engines_that_it_would_have_built(
    tiny: Callable[[str], ModelSpec], engine_library: EngineLibrary, tmp_path: Path
) -> None:
    spec, service = tiny("wan2.1"), EngineService(EngineStore(tmp_path / "engines", 10**10), probe(), tmp_path)

    def plan() -> ExecutionPlan:
        request = GenerationRequest(prompt="x", width=64, height=32, frames=5, backends={"text_encoder": "onnxruntime"})
        return resolve(request, spec, PlanningContext(service.machine, tmp_path / "x.mp4", service.offers(spec)))

    before = plan()
    (record,) = engine_library.stock(service, spec, before)
    assert service.store.index() == [record] and record.usable
    assert service.problem(record.id) is None
    (wanted,), (use,) = (one.components["text_encoder"].engines for one in (before, plan()))
    assert (wanted.build, use.build) == (True, False)
    assert wanted.id == use.id == record.id
    assert engine_library.stock(service, spec, plan()) == []
