"""Real block engines of the tiny models, for ONNX Runtime on a CPU, and plans that use them."""

from pathlib import Path
from typing import Any

import pytest

from runtime.core.plan import EngineRef, ExecutionPlan
from runtime.engines.builders.onnxruntime import OnnxRuntimeBlocks
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner import memory_model
from runtime.planner.choice.engine_index import EngineKey, ShapeProfile
from tests.conftest import shared_folder
from tests.engine_library import EngineLibrary

# So few that the clips of tests are several chunks.
TOKENS = 64
BUILDER = OnnxRuntimeBlocks(tokens=TOKENS)
ANY_SIZE = ShapeProfile.fixed((1, 1, 1))


def stock(spec: ModelSpec, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineService:
    """Return a library in `folder` that has the block engines of a tiny model, whose speed is unknown."""
    library = EngineLibrary(shared_folder(tmp_path_factory, "engines"))
    service = EngineService(EngineStore(folder / "engines", 10**10), probe(), folder)
    unknown: dict[str, Any] = {"seconds_per_call": 0.0, "pytorch_seconds_per_call": 0.0, "baselines": {}}
    for program in spec.block_programs:
        library.add(service, spec, "transformer", _key(spec, program), BUILDER, **unknown)
    return service


def in_blocks(plan: ExecutionPlan, spec: ModelSpec) -> ExecutionPlan:
    """Return a plan with the transformers on the block engines of `stock`."""
    uses = tuple(
        EngineRef(
            id=_key(spec, program).digest(),
            program=program,
            builder=BUILDER.name,
            precision="float32",
            profile=(ANY_SIZE.min, ANY_SIZE.opt, ANY_SIZE.max),
        )
        for program in spec.block_programs
    )
    for name, part in plan.components.items():
        if is_transformer(name):
            plan = plan.with_component(name, part.replace(backend=BUILDER.backend, engines=uses))
    return plan


def _key(spec: ModelSpec, program: str) -> EngineKey:
    return BUILDER.key(spec, "transformer", program, (ANY_SIZE,), precision="float32", machine=probe(), device="cpu")


def forecast_of_blocks(spec: ModelSpec, latents: tuple[int, int, int, int, int], side: int, chunk: int) -> int:
    """Return the bytes that are forecast for a pass on block engines in bfloat16 of 9 latent frames of 16×16 tokens.

    Args:
        latents: the shape of the video's latents.
        side: width and height of the frames.
        chunk: the most tokens of one call of an engine.
    """
    use = EngineRef(
        id="x",
        program="block_qkv",
        builder="b",
        precision="bfloat16",
        profile=((1, 1, 1),) * 3,
        tokens=chunk,
        context_bytes=1,
    )
    workload = memory_model.Workload(
        spec=spec,
        device="cuda:0",
        dtypes={"transformer": "bfloat16"},
        engine_bytes={},
        engine_seconds={},
        tokens=9 * 16 * 16,
        latent_shape=latents,
        height=side,
        width=side,
        engines={"transformer": (use,)},
    )
    return memory_model._blocks_bytes(workload, "transformer", workload.tokens)
