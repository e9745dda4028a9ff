"""Offers of block engines: for transformers only, for every size, model and LoRA of an architecture."""

from dataclasses import replace
from pathlib import Path

from runtime.engines.builders import BUILDERS
from runtime.engines.offers import served_sizes
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import SWAPPED
from tests.engines.engine_files import add
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
        assert [use.program for use in offer.uses] == list(PROGRAMS)
        assert {use.profile for use in offer.uses} == {((1, 1, 1),) * 3}
        return [use.id for use in offer.uses]

    assert ids("transformer", LATENT) == ids("transformer_2", OTHER_LATENT)
    (first, *_) = next(one for one in engines.offers(spec)("transformer", LATENT, "cuda:0") if one.in_blocks).uses
    key = engines.offers(spec).key(BUILDERS["tensorrt_blocks"], "transformer", first, "cuda:0")
    assert key.weights == SWAPPED
    add(engines.store, key)
    found = next(one for one in engines.offers(spec)("transformer_2", OTHER_LATENT, "cuda:0") if one.in_blocks)
    assert [use.build for use in found.uses] == [False, True, True]
    assert served_sizes("block_qkv", key.profiles, spec).code == "engine.any_clip"
