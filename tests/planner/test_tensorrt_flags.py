"""The launch flags of TensorRT for FramePack and HunyuanVideo: which components they put on engines, and refusals."""

from pathlib import Path
from typing import Any

import pytest

from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests.planner.test_table import FOUR, H200

FRAMEPACK, F1, HUNYUAN = "framepack-i2v", "framepack-f1-i2v", "hunyuan-video"
ENCODERS = {"text_encoder", "text_encoder_2", "image_encoder"}
ALL = ENCODERS | {"vae_encoder", "transformer", "vae"}


def planned(model: str, folder: Path, on: Any = H200, **values: Any) -> tuple[ModelSpec, ExecutionPlan]:
    """Return a model as published, and the plan of its default clip with an empty engine library."""
    spec = look_up(model, folder / "weights")
    engines = EngineService(EngineStore(folder / "engines", 10**12), on, folder)
    request = GenerationRequest.from_mapping({"prompt": "a red boat", "model": model} | values)
    return spec, resolve(request, spec, PlanningContext(on, folder / "x.mp4", engines.offers(spec)))


def backends_of(folder: Path, *parts: str) -> dict[str, str]:
    """Return the backends that the page selects when it is started with --enable-tensorrt and the flags of parts."""
    flags = {"text_encoders": "text-encoders" in parts, "transformer": "transformer" in parts}
    value = settings.tensorrt_from_flags(enable=True, **flags)
    return settings.load({"tensorrt": value}, {"TANDEM_CACHE_DIR": str(folder)}).backends


@pytest.mark.parametrize("model", [FRAMEPACK, F1, HUNYUAN])
@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ((), ALL),
        (("text-encoders",), ENCODERS),
        (("transformer",), {"transformer"}),
        (("text-encoders", "transformer"), ENCODERS | {"transformer"}),
    ],
)
def test_flags_name_the_components_of_the_family(
    model: str, parts: tuple[str, ...], wanted: set[str], tmp_path: Path
) -> None:
    chosen = backends_of(tmp_path, *parts)
    known = look_up(model, tmp_path).component_names
    backends = {name: backend for name, backend in chosen.items() if name in known}  # as the form does
    spec, plan = planned(model, tmp_path, backends=backends)
    on_engines = {name for name, part in plan.components.items() if part.backend == "tensorrt"}
    assert on_engines == wanted & {*spec.component_names}
    for name in on_engines:
        programs = {use.program for use in plan.components[name].engines}
        assert programs, name
        if name == "transformer":
            assert programs == {*spec.block_programs}
        else:  # of the VAE, the groups of frames that occur
            assert programs <= {*spec.programs[name]}


@pytest.mark.parametrize("model", [FRAMEPACK, HUNYUAN])
@pytest.mark.parametrize("quantization", ["bnb-8bit", "bnb-4bit"])
def test_block_engines_refuse_bitsandbytes(model: str, quantization: str, tmp_path: Path) -> None:
    """What the original excludes works with block engines, except for this: they take no such weights."""
    backends = {"transformer": "tensorrt"}
    with pytest.raises(InvalidRequestError) as caught:
        planned(model, tmp_path, backends=backends, quantization=quantization)
    assert (caught.value.field, caught.value.fact.code) == ("quantization", "planner.quantized_in_blocks")
    for offload in ("model", "group"):
        _, plan = planned(model, tmp_path, backends=backends, offload=offload)
        assert plan.components["transformer"].backend == "tensorrt"
        assert plan.strategy.offload == offload


@pytest.mark.parametrize("model", [FRAMEPACK, HUNYUAN])
def test_block_engines_work_on_several_gpus_if_the_family_does(model: str, tmp_path: Path) -> None:
    spec = look_up(model, tmp_path)
    if "gpus" in spec.unsupported:
        pytest.skip("the family runs on one GPU")
    _, plan = planned(model, tmp_path, FOUR, backends={"transformer": "tensorrt"}, gpus=4)
    assert (plan.gpus, plan.components["transformer"].backend) == (4, "tensorrt")


def test_the_originals_variable_names_the_folder_of_engines(tmp_path: Path) -> None:
    environ = {
        "TANDEM_CACHE_DIR": str(tmp_path),
        "FRAMEPACK_TENSORRT_CACHE_DIR": str(tmp_path / "engines-of-framepack"),
    }
    assert settings.load({}, environ).engines_dir == tmp_path / "engines-of-framepack"
    environ["TENSORRT_CACHE_DIR"] = str(tmp_path / "own")
    assert settings.load({}, environ).engines_dir == tmp_path / "own"
