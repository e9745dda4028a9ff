"""Why an engine is not what this machine would build now."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runtime.engines.builders import BUILDERS
from runtime.engines.identity import CLIP_PROGRAM, EXPORT_REVISION, device_text, program_key_parts, versions_of
from runtime.engines.imported.offering import imported_engines
from runtime.engines.staleness import why_stale
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import IMPORTED, UNREADABLE_KEY, EngineKey, EngineRecord
from runtime.planner.shapes import ShapeProfile
from tests.ui.records import record

HERE = probe()


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


def test_one_that_would_be_built_now_is_not_stale(fresh: EngineRecord, spec: ModelSpec) -> None:
    assert why_stale(fresh, [spec], HERE) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "0" * 64}, "built from other weights"),
        ({"versions": (("torch", "1.0"),)}, "built with PyTorch 1.0, here "),
        ({"export_revision": 0}, "exported by an older Tandem"),
        ({"system": "Plan9 vax"}, "built on Plan9 vax, here "),
        ({"device": "NVIDIA H200 sm90 CUDA 13.0"}, "built on NVIDIA H200 sm90 CUDA 13.0, here "),
        ({"builder": "forge"}, "there is no builder forge any more"),
    ],
)
def test_what_differs_is_named(fresh: EngineRecord, spec: ModelSpec, changes: dict[str, Any], words: str) -> None:
    stale = why_stale(replace(fresh, key=replace(fresh.key, **changes)), [spec], HERE)
    assert any(words in phrase for phrase in stale), stale


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
        export_revision=EXPORT_REVISION,
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


def test_an_imported_one_is_judged_by_what_it_runs_on(imported: EngineRecord, spec: ModelSpec) -> None:
    assert why_stale(imported, [spec], HERE) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "0" * 64}, "built from other weights"),
        ({"architecture": "0" * 64}, "built from another architecture"),
        ({"versions": (("onnxruntime", "1.2.3"),)}, "built with ONNX Runtime 1.2.3, here "),
        ({"versions": (("tensorrt", "8.6.1"),)}, "built with TensorRT 8.6.1, here "),
        ({"system": "Plan9 vax"}, "built on Plan9 vax, here "),
        ({"device": "NVIDIA H200 sm90 CUDA 13.0"}, "built on NVIDIA H200 sm90 CUDA 13.0, here "),
        ({"device": f"{device_text(HERE, 'cpu')} avx9999"}, "built on a processor with avx9999, unlike this one"),
    ],
)
def test_an_imported_one_is_stale_where_no_job_would_take_it(
    imported: EngineRecord, spec: ModelSpec, changes: dict[str, Any], words: str
) -> None:
    changed = replace(imported, key=replace(imported.key, **changes))
    (phrase,) = why_stale(changed, [spec], HERE)
    assert words in phrase
    for one, wanted in ((imported, [imported]), (changed, [])):
        assert imported_engines([one], spec, imported.component, HERE, "cpu", None) == wanted


def test_a_model_that_is_gone_is_named(fresh: EngineRecord, spec: ModelSpec) -> None:
    assert why_stale(fresh, [], HERE) == [f"the model {spec.name} is not here"]
    assert why_stale(replace(fresh, component="eyes"), [spec], HERE) == [f"the model {spec.name} is not here"]


def test_of_an_unreadable_one_nothing_is_said(fresh: EngineRecord, spec: ModelSpec) -> None:
    assert why_stale(replace(fresh, key=UNREADABLE_KEY, problem="broken"), [spec], HERE) == []
