"""Differences between an engine and the one that this machine would build now."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.facts import Fact
from runtime.engines.builders import BUILDERS
from runtime.engines.key_parts import NOT_EXPORTED, device_text, program_key_parts, versions_of
from runtime.engines.offers import imported_engines
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.models.vae_groups import CLIP_PROGRAM
from runtime.planner.choice.engine_index import IMPORTED, UNREADABLE_KEY, EngineKey, EngineRecord, ShapeProfile
from tests.engines.engine_files import record

HERE = probe()
ENGINES = EngineService(EngineStore(Path("none"), 0), HERE, None)

GPU = "NVIDIA H200 sm90 CUDA 13.0"


@pytest.fixture
def spec(tiny: Callable[[str], ModelSpec]) -> ModelSpec:
    return tiny("wan2.2-a14b")


@pytest.fixture
def fresh(spec: ModelSpec) -> EngineRecord:
    """An engine as this machine would build it."""
    profiles = (ShapeProfile.fixed((3, 4, 8)),)
    key = BUILDERS["onnxruntime"].key(
        spec, "transformer_2", "transformer", profiles, precision="float32", machine=HERE, device="cpu"
    )
    return record(key, model=spec.name, component="transformer_2")


def test_current_engine_is_not_stale(fresh: EngineRecord, spec: ModelSpec) -> None:
    assert ENGINES.why_stale(fresh, [spec]) == []


@pytest.mark.parametrize(
    ("changes", "code", "data"),
    [
        ({"weights": "0" * 64}, "engine.differs_weights", {}),
        ({"versions": (("torch", "1.0"),)}, "engine.differs_version", {"package": "PyTorch", "found": "1.0"}),
        ({"export_revision": 1}, "engine.differs_export", {}),
        ({"system": "Plan9 vax"}, "engine.differs_device", {"found": "Plan9 vax"}),
        ({"device": GPU}, "engine.differs_device", {"found": GPU}),
        ({"builder": "forge"}, "engine.stale_without_builder", {"builder": "forge"}),
    ],
)
def test_differences_are_named(
    fresh: EngineRecord, spec: ModelSpec, changes: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    stale = ENGINES.why_stale(replace(fresh, key=replace(fresh.key, **changes)), [spec])
    assert any(fact.code == code and fact.data.items() >= data.items() for fact in stale), stale


@pytest.fixture(params=[("transformer_2", "transformer"), ("vae", CLIP_PROGRAM)], ids=["transformer", "clip"])
def imported(spec: ModelSpec, request: pytest.FixtureRequest) -> EngineRecord:
    """An engine made elsewhere, as it is known right after it was imported here."""
    component, program = request.param
    architecture, weights = program_key_parts(spec, component, program)
    key = EngineKey(
        program=program,
        family="wan",
        architecture=architecture,
        weights=weights,
        export_revision=NOT_EXPORTED,
        profiles=(ShapeProfile.fixed((3, 4, 8)),),
        precision="float16",
        backend="onnxruntime",
        builder=IMPORTED,
        options=(("exact", "yes"), ("made_by", "somebody"), ("sha256", "0" * 64)),
        versions=versions_of("onnxruntime-openvino", "onnxruntime-gpu", "onnxruntime"),
        device=device_text(HERE, "cpu"),
        system=HERE.system,
    )
    return record(key, model=spec.name, component=component)


def test_current_imported_engine_is_not_stale(imported: EngineRecord, spec: ModelSpec) -> None:
    assert ENGINES.why_stale(imported, [spec]) == []


@pytest.mark.parametrize(
    ("changes", "code", "data"),
    [
        ({"weights": "0" * 64}, "engine.differs_weights", {}),
        ({"architecture": "0" * 64}, "engine.differs_architecture", {}),
        ({"versions": (("onnxruntime", "1.2.3"),)}, "engine.differs_missing_package", {"found": "1.2.3"}),
        ({"versions": (("tensorrt", "8.6.1"),)}, "engine.differs_missing_package", {"package": "TensorRT"}),
        ({"system": "Plan9 vax"}, "engine.differs_device", {"found": "Plan9 vax"}),
        ({"device": GPU}, "engine.differs_device", {"found": GPU}),
        (
            {"device": f"{device_text(HERE, 'cpu')} avx9999"},
            "engine.differs_more_instructions",
            {"more": Fact("engine.names", {"names": ["avx9999"]})},
        ),
    ],
)
def test_imported_engine_is_stale_if_it_is_not_offered(
    imported: EngineRecord, spec: ModelSpec, changes: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    changed = replace(imported, key=replace(imported.key, **changes))
    (fact,) = ENGINES.why_stale(changed, [spec])
    assert fact.code == code
    assert fact.data.items() >= data.items()
    for one, wanted in ((imported, [imported]), (changed, [])):
        assert imported_engines([one], spec, imported.component, HERE, "cpu", None) == wanted


def test_missing_model_is_named(fresh: EngineRecord, spec: ModelSpec) -> None:
    assert ENGINES.why_stale(fresh, []) == [Fact("engine.stale_without_model", {"model": spec.name})]
    assert ENGINES.why_stale(replace(fresh, component="eyes"), [spec]) == [
        Fact("engine.stale_without_model", {"model": spec.name})
    ]


def test_unreadable_engine_has_no_differences(fresh: EngineRecord, spec: ModelSpec) -> None:
    assert ENGINES.why_stale(replace(fresh, key=UNREADABLE_KEY, problem=Fact("engine.manifest_damaged")), [spec]) == []
