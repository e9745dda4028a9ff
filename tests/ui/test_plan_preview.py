"""Plans from memory: the library is read when it changes, and only then."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.history import runs_of
from runtime.ui.plan_preview import PlanPreview, Preview
from tests.engines.engine_files import key, put

REQUEST = GenerationRequest(prompt="x", width=64, height=32, frames=9)


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "engines", 10**9)


@pytest.fixture
def plan_preview(store: EngineStore, tmp_path: Path) -> PlanPreview:
    return PlanPreview(EngineService(store, probe(), tmp_path), probe, lambda: ())


@pytest.fixture
def spec(tiny: Callable[[str], ModelSpec]) -> ModelSpec:
    return tiny("wan2.2-a14b")


def insert(store: EngineStore, number: int) -> str:
    wanted = key(weights=f"{number:064x}")
    with store.building(wanted.digest(), lambda: None), store.workspace(wanted.digest()) as room:
        put(room.engine, wanted)
        return store.insert(room.engine, wanted.digest()).id


def settled(plan_preview: PlanPreview, spec: ModelSpec, request: GenerationRequest = REQUEST) -> Preview:
    """Preview until the model is read."""
    end = time.monotonic() + 60
    while not (seen := plan_preview.preview(request, spec)).complete:
        assert time.monotonic() < end
    return seen


def test_a_plan_has_its_offers(plan_preview: PlanPreview, spec: ModelSpec) -> None:
    seen = settled(plan_preview, spec)
    assert seen.plan is not None and seen.error is None
    assert set(seen.plan.components) == set(spec.component_names)
    offered = seen.offers("vae", seen.plan.latent_size, "cpu")
    assert "onnxruntime" in {offer.backend for offer in offered}
    # Asked again, it is the very same answer.
    assert settled(plan_preview, spec).offers("vae", seen.plan.latent_size, "cpu") is offered


def test_an_invalid_request_returns_its_error(plan_preview: PlanPreview, spec: ModelSpec) -> None:
    seen = plan_preview.preview(GenerationRequest(prompt="x", width=65), spec)
    assert seen.plan is None
    assert isinstance(seen.error, InvalidRequestError)


def test_the_library_is_read_again_only_when_it_changes(
    plan_preview: PlanPreview, store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = insert(store, 1)
    read = 0
    index = store.index

    def counted() -> object:
        nonlocal read
        read += 1
        return index()

    monkeypatch.setattr(store, "index", counted)
    records = plan_preview.library()
    assert [record.id for record in records] == [first]
    for _ in range(5):
        assert plan_preview.library() is records
    assert read == 1
    second = insert(store, 2)
    assert {record.id for record in plan_preview.library()} == {first, second}
    store.pin(first, pinned=True)
    assert [record.pinned for record in plan_preview.library() if record.id == first] == [True]
    store.delete(second)
    assert [record.id for record in plan_preview.library()] == [first]
    assert read == 4


def test_offers_follow_the_library(plan_preview: PlanPreview, store: EngineStore, spec: ModelSpec) -> None:
    before = settled(plan_preview, spec)
    assert before.plan is not None
    offered = before.offers("vae", before.plan.latent_size, "cpu")
    insert(store, 1)
    assert settled(plan_preview, spec).offers("vae", before.plan.latent_size, "cpu") is not offered


def test_measured_durations_replace_estimates(store: EngineStore, tmp_path: Path, spec: ModelSpec) -> None:
    engines = EngineService(store, probe(), tmp_path)
    estimated = settled(PlanPreview(engines, probe, lambda: ()), spec).plan
    assert estimated is not None and not estimated.seconds["decode"].measured
    timings = {"text_encoder": 1.0, "denoise": 8.0, "decode": 5.0}
    runs = runs_of(estimated, estimated, spec, probe(), timings, {})
    measured = settled(PlanPreview(engines, probe, lambda: runs), spec).plan
    assert measured is not None
    assert measured.seconds["decode"].likely == pytest.approx(5.0)
    assert measured.seconds["total"].measured
