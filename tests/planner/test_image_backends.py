"""Backends of the components that encode images: how a request names them, and when their engines are built."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.builders import BUILDERS
from runtime.engines.key_parts import architecture_digest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.pipeline.build_engines import wanted_engines
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.planner.memory_model import Workload, stages
from runtime.planner.resolve import PlanningContext, resolve
from tests.plans import machine

Tiny = Callable[[str], ModelSpec]
ONNX, NONE = "onnxruntime", "pytorch"


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 2}
    return GenerationRequest.from_mapping(fields | values)


def service(folder: Path) -> EngineService:
    return EngineService(EngineStore(folder / "engines", 10**12), probe(), folder)


def planned(spec: ModelSpec, folder: Path, backends: dict[str, str], build: str = "auto") -> ExecutionPlan:
    """Plan a job with an image if the model needs one."""
    wanted = request(backends=backends, build=build)
    return resolve(wanted, spec, PlanningContext(machine(), folder / "x.mp4", service(folder).offers(spec)))


@pytest.mark.parametrize(
    ("backends", "encoder", "decoder"),
    [
        ({"vae": ONNX}, ONNX, ONNX),
        ({"vae": ONNX, "vae_encoder": NONE}, NONE, ONNX),
        ({"vae_encoder": ONNX}, ONNX, "auto"),
        ({"all": ONNX}, ONNX, ONNX),
        ({"all": ONNX, "vae": NONE}, NONE, NONE),
        ({}, "auto", "auto"),
    ],
)
def test_vae_names_both_parts(backends: dict[str, str], encoder: str, decoder: str) -> None:
    asked = request(backends=backends)
    assert (asked.backend("vae_encoder"), asked.backend("vae")) == (encoder, decoder)
    assert asked.has_backend("vae_encoder") == (encoder != "auto")
    assert asked.has_backend("text_encoder") == ("all" in backends)


def test_programs_of_each_component_are_planned(tiny: Tiny, tmp_path: Path) -> None:
    plan = planned(tiny("wan2.1-i2v"), tmp_path, {"all": ONNX})
    assert {name: [use.program for use in part.engines] for name, part in plan.components.items()} == {
        "text_encoder": ["text_encoder"],
        "image_encoder": ["image_encoder"],
        "vae_encoder": ["vae_encoder_first", "vae_encoder_next"],
        "transformer": ["transformer"],
        "vae": ["vae_first", "vae_next"],
    }
    profiles = {use.program: use.profile[1] for part in plan.components.values() for use in part.engines}
    assert profiles["image_encoder"] == (1, 1, 1)
    assert profiles["vae_encoder_first"] == profiles["vae_encoder_next"] == (1, 4, 8)


def test_a_component_that_a_job_does_not_have_needs_no_backend(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-ti2v-5b")
    for backends in ({"vae_encoder": ONNX}, {"vae": ONNX}, {"all": ONNX}):
        assert "vae_encoder" not in planned(spec, tmp_path, backends).components
    for model, component in (("wan2.2-ti2v-5b", "image_encoder"), ("wan2.1", "vae_encoder")):
        with pytest.raises(InvalidRequestError) as refused:
            planned(tiny(model), tmp_path, {component: ONNX})
        assert refused.value.code == "planner.no_such_component"


def test_engines_of_images_are_built_on_request_only(tiny: Tiny, tmp_path: Path) -> None:
    plan = planned(tiny("wan2.1-i2v"), tmp_path, {}, build="missing")
    assert {name for name, part in plan.components.items() if part.engines} == {"text_encoder", "transformer", "vae"}


@pytest.mark.parametrize("architecture", ["wan2.1-i2v", "wan2.2-ti2v-5b"])
def test_engines_are_built_without_an_image(tiny: Tiny, tmp_path: Path, architecture: str) -> None:
    spec, engines = tiny(architecture), service(tmp_path)
    named = wanted_engines(request(backends={"vae": ONNX}), spec, engines)
    assert [one.use.program for one in named] == [*spec.programs["vae_encoder"], "vae_first", "vae_next"]
    assert all(one.seconds > 0 for one in named)
    alone = wanted_engines(request(backends={"vae_encoder": ONNX}), spec, engines)
    assert [one.component for one in alone] == ["vae_encoder"] * len(spec.programs["vae_encoder"])
    # PyTorch is measured with the same components.
    for one in named:
        key = engines.offers(spec).key(BUILDERS["onnxruntime"], one.component, one.use, one.device)
        assert PyTorchTimerFactory(engines)(spec, one.component, key, one.device) is not None


def test_keys_tell_models_apart_that_start_differently(tiny: Tiny) -> None:
    """A folder's configurations may be equal, and the programs are not."""
    spec = tiny("wan2.2-ti2v-5b")
    assert spec.image_input is not None
    without = replace(spec, image_input=None)
    other = replace(spec, image_input=replace(spec.image_input, kind="channels"))
    for component, program in (("transformer", "transformer"), ("vae_encoder", "vae_encoder_first")):
        digests = {architecture_digest(one, component, program) for one in (spec, without, other)}
        assert len(digests) == 3
    assert architecture_digest(spec, "vae", "vae_next") == architecture_digest(without, "vae", "vae_next")


def test_engines_of_the_encoder_count_their_caches() -> None:
    spec = look_up("wan2.1-i2v-14b-480p", Path("none"))
    assert spec.image_input is not None
    wanted = GenerationRequest.from_mapping({"prompt": "x"})
    plan = resolve(wanted, spec, PlanningContext(machine(ram_free_gib=400), Path("x.mp4")))
    workload = replace(Workload.of(plan, spec), engine_bytes={"vae_encoder": 10**8})
    (working,) = (one.working_bytes for one in stages(workload, plan.strategy) if one.component == "vae_encoder")
    assert working > 2 * spec.image_input.vae.encoder_cache_bytes(480, 832, 4) > 10**9
