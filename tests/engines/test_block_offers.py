"""Offers of block engines: for transformers only, for every size, model and LoRA of an architecture."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.engines.builders import BUILDERS
from runtime.engines.offers import engine_calls, served_sizes
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.pipeline.build_engines import wanted_engines
from runtime.planner.choice.engine_index import SWAPPED, EngineKey
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.planner.resolve import PlanningContext, resolve
from tests.engines.engine_files import add, refusal
from tests.plans import GIB, GPU_PACKAGES, gpu, machine
from tests.published_specs import spec as published

PROGRAMS = ("block_qkv", "block_query", "block_feed_forward")
GPU = replace(machine(gpu=gpu(), torch_cuda="13.0", packages=GPU_PACKAGES), driver_cuda=(13, 0), ram_bytes=900 * GIB)
LATENT, OTHER_LATENT = (9, 60, 104), (21, 90, 160)


def service(tmp_path: Path) -> EngineService:
    """Return a service of a machine with a GPU."""
    return EngineService(EngineStore(tmp_path / "engines", 10**12), GPU, tmp_path)


def offered(spec: ModelSpec, tmp_path: Path, component: str = "transformer") -> list[tuple[str, bool]]:
    """Return builder and kind of the offers on a GPU, in their order."""
    found = service(tmp_path).offers(spec)(component, LATENT, "cuda:0")
    return [(offer.builder, offer.in_blocks) for offer in found if offer.backend == "tensorrt"]


def test_only_transformers_with_block_programs_have_block_engines(tmp_path: Path) -> None:
    without = replace(published("wan2.2-a14b"), is_downloaded=False, block_programs=())
    whole = [("onnx_tensorrt", False), ("torch_tensorrt", False)]
    assert offered(without, tmp_path) == whole
    spec = replace(without, block_programs=PROGRAMS)
    for component in ("text_encoder", "vae"):
        assert offered(spec, tmp_path, component) == whole
    on_cpu = service(tmp_path).offers(spec)
    assert not any(offer.in_blocks for offer in on_cpu("vae", LATENT, "cpu"))


def test_large_transformers_are_offered_in_blocks_first(tmp_path: Path) -> None:
    for name in ("wan2.2-a14b", "wan2.1-1.3b"):
        spec = replace(published(name), is_downloaded=False, block_programs=PROGRAMS)
        assert offered(spec, tmp_path)[0] == ("tensorrt_blocks", True)
    little = replace(spec, parameters={**spec.parameters, "transformer": 900_000_000})
    assert offered(little, tmp_path)[0] == ("onnx_tensorrt", False)
    assert offered(little, tmp_path)[-1] == ("tensorrt_blocks", True)


def test_one_set_serves_every_size_expert_and_lora(tmp_path: Path) -> None:
    engines = service(tmp_path)
    spec = replace(published("wan2.2-a14b"), is_downloaded=False, block_programs=PROGRAMS)

    def ids(component: str, latent: tuple[int, int, int]) -> list[str]:
        offer = next(one for one in engines.offers(spec)(component, latent, "cuda:0") if one.in_blocks)
        assert [use.program for use in offer.engines] == list(PROGRAMS)
        assert {use.profile for use in offer.engines} == {((1, 1, 1),) * 3}
        return [use.id for use in offer.engines]

    assert ids("transformer", LATENT) == ids("transformer_2", OTHER_LATENT)
    (first, *_) = next(one for one in engines.offers(spec)("transformer", LATENT, "cuda:0") if one.in_blocks).engines
    key = engines.offers(spec).key(BUILDERS["tensorrt_blocks"], "transformer", first, "cuda:0")
    assert key.weights == SWAPPED
    add(engines.store, key)
    found = next(one for one in engines.offers(spec)("transformer_2", OTHER_LATENT, "cuda:0") if one.in_blocks)
    assert [use.build for use in found.engines] == [False, True, True]
    assert served_sizes("block_qkv", key.profiles, spec).code == "engine.any_clip"


def test_the_speed_is_known_once_every_engine_was_measured(tmp_path: Path) -> None:
    engines = service(tmp_path)
    spec = replace(published("wan2.2-a14b"), is_downloaded=False)
    offers = engines.offers(spec)

    def of_blocks() -> EngineOffer:
        return next(one for one in engines.offers(spec)("transformer", LATENT, "cuda:0") if one.in_blocks)

    for use, seconds in zip(of_blocks().engines, (0.25, 0.25, 0.0), strict=True):
        key = offers.key(BUILDERS["tensorrt_blocks"], "transformer", use, "cuda:0")
        add(engines.store, key, seconds_per_call=seconds)
    made = of_blocks()
    assert (made.ready, made.seconds) == (True, 0.0)


def block_key(engines: EngineService, spec: ModelSpec) -> EngineKey:
    """Return the key of the first block engine that would be built now."""
    offers = engines.offers(spec)
    offer = next(one for one in offers("transformer", LATENT, "cuda:0") if one.builder == "tensorrt_blocks")
    return offers.key(BUILDERS["tensorrt_blocks"], "transformer", offer.engines[0], "cuda:0")


def test_block_engines_belong_to_an_architecture(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    engines, built_from = service(tmp_path), tiny("wan2.2-a14b")
    record = add(engines.store, block_key(engines, built_from), model=built_from.name)
    assert engines.why_stale(record, [built_from]) == []
    # The model was deleted, another one has its architecture.
    another = replace(built_from, name="another")
    assert engines.why_stale(record, [tiny("wan2.2-ti2v-5b"), another]) == []
    assert engines.owner(record, [another]) == (another, "transformer")
    with refusal("engine.no_model_with_weights"):
        engines.owner(replace(record, key=replace(record.key, family="another")), [another])
    assert engines.why_stale(record, []) == [Fact("engine.stale_without_model", {"model": built_from.name})]
    offer = next(one for one in engines.offers(another)("transformer_2", LATENT, "cuda:0") if one.in_blocks)
    assert offer.engines[0].id == record.id


def test_engines_to_build_follow_the_settings(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    engines, spec = service(tmp_path), tiny("wan2.2-a14b")

    def programs(**settings: Any) -> set[str]:
        request = GenerationRequest(prompt="x", width=64, height=32, frames=9, **settings)
        return {one.use.program for one in wanted_engines(request, spec, engines) if one.component == "transformer"}

    tensorrt = {"backends": {"transformer": "tensorrt"}}
    assert programs(**tensorrt) == {"transformer"}
    assert programs(**tensorrt, offload="group") == set(PROGRAMS)
    assert programs(**tensorrt, step_cache="first-block") == set(PROGRAMS)
    with pytest.raises(InvalidRequestError):
        programs(**tensorrt, offload="sequential")
    # One kind for each backend.
    assert programs() == {"transformer"}


def test_engines_are_built_on_the_gpu_of_the_worker_that_builds(tmp_path: Path) -> None:
    two = replace(GPU, gpus=(gpu(), gpu()))
    engines = EngineService(EngineStore(tmp_path / "engines", 10**12), two, tmp_path)
    spec = replace(published("wan2.1-1.3b"), is_downloaded=False, block_programs=())
    for index in range(2):
        request = GenerationRequest(prompt="x", backends={"vae": "tensorrt"})
        assert {one.device for one in wanted_engines(request, spec, engines, gpu=index)} == {f"cuda:{index}"}


def test_engines_for_one_gpu_are_built_on_a_machine_with_several(tmp_path: Path) -> None:
    two = replace(GPU, gpus=(gpu(), gpu()))
    engines = EngineService(EngineStore(tmp_path / "engines", 10**12), two, tmp_path)
    spec = replace(published("wan2.1-1.3b"), is_downloaded=False, block_programs=())
    request = GenerationRequest(prompt="x", gpus="auto", build="missing", backends={"transformer": "tensorrt"})
    video = resolve(request, spec, PlanningContext(two, tmp_path / "clip.mp4", engines.offers(spec)))
    wanted = [one.use.id for one in wanted_engines(request, spec, engines)]
    assert video.gpus == 1 and wanted == [use.id for use in video.components["transformer"].engines]
    assert resolve(request.replace(backends={}), spec, PlanningContext(two, tmp_path / "clip.mp4")).gpus == 2
    with pytest.raises(InvalidRequestError):
        wanted_engines(request.replace(gpus=2), spec, engines)


@pytest.mark.parametrize(
    ("quantization", "builder", "precision"),
    [("none", "tensorrt_rtx_blocks", "float16"), ("fp8", "tensorrt_rtx_blocks_fp8", "fp8")],
)
def test_quantization_decides_between_the_block_engines_of_tensorrt_for_rtx(
    quantization: str, builder: str, precision: str, tmp_path: Path
) -> None:
    rtx = replace(GPU, gpus=(gpu(capability=(12, 0), free_gib=96),), packages=(*GPU_PACKAGES, ("torchao", "0.18.0")))
    spec = replace(published("wan2.2-a14b"), is_downloaded=False)
    engines = EngineService(EngineStore(tmp_path / "engines", 10**12), rtx, tmp_path)
    backends = ["transformer=tensorrt_rtx", "transformer_2=tensorrt_rtx"]
    asked = {"prompt": "a red boat", "backends": backends, "quantization": quantization, "build": "auto"}
    plan = resolve(
        GenerationRequest.from_mapping(asked),
        spec,
        PlanningContext(rtx, tmp_path / "clip.mp4", offers=engines.offers(spec)),
    )
    for part in (plan.components["transformer"], plan.components["transformer_2"]):
        assert [(use.program, use.builder, use.precision) for use in part.engines] == [
            (program, builder, precision) for program in PROGRAMS
        ]
        assert (part.quantization, part.in_blocks) == (quantization, True)


def test_both_streams_of_a_model_with_sound_are_offered(tmp_path: Path) -> None:
    spec = replace(look_up("ltx-2.3", tmp_path), is_downloaded=False)
    assert offered(spec, tmp_path) == [("tensorrt_blocks", True)]
    latent = (16, 16, 24)
    offers = service(tmp_path).offers(spec)("transformer", latent, "cuda:0")
    (offer,) = (one for one in offers if one.builder == "tensorrt_blocks")
    assert tuple(use.program for use in offer.engines) == spec.block_programs
    calls = {use.program: engine_calls(use, spec, latent) for use in offer.engines}
    # The video has 6,144 of the 8,192 tokens of a call; an engine of the sound's stream was measured with its few.
    layers = spec.transformer.num_layers
    assert calls == {name: layers * (1 if "sound" in name else 0.75) for name in spec.block_programs}
