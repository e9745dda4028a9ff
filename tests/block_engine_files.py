"""Real block engines of the tiny models, for ONNX Runtime on a CPU, and plans that use them."""

import shutil
from pathlib import Path

import pytest

from runtime.core.plan import EngineUse, ExecutionPlan
from runtime.engines import manifest
from runtime.engines.builders.onnxruntime import OnnxRuntimeBlocks
from runtime.engines.programs import load_program
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner.engine_index import EngineKey, EngineRecord, ShapeProfile
from tests.conftest import build_once

# So few that the clips of tests are several chunks.
TOKENS = 64
BUILDER = OnnxRuntimeBlocks(tokens=TOKENS)
ANY_SIZE = ShapeProfile.fixed((1, 1, 1))


def stock(spec: ModelSpec, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineService:
    """Return a library in `folder` that has the block engines of a tiny model."""

    def build(built: Path) -> None:
        for program in spec.block_programs:
            (built / program).mkdir(parents=True)
            loaded = load_program(spec, "transformer", program, device="cpu", dtype="float32", tokens=TOKENS)
            BUILDER.build(loaded, _key(spec, program), built / program, lambda *_: None)

    # All tiny models of a family have blocks of one size.
    files, _ = build_once(tmp_path_factory, f"block-engines-{spec.family}", build)
    service = EngineService(EngineStore(folder / "engines", 10**10), probe(), folder)
    for program in spec.block_programs:
        key = _key(spec, program)
        engine = service.store.path(key.digest())
        engine.mkdir(parents=True)
        shutil.copy(files / program / BUILDER.file_name, engine)
        hashed = manifest.hashed_files(engine, BUILDER.file_name)
        record = EngineRecord(
            id=key.digest(),
            key=key,
            model=spec.name,
            component="transformer",
            files=hashed,
            file_bytes=sum(file.bytes for file in hashed),
            build_seconds=1.0,
            verified=True,
        )
        manifest.write(engine, record)
    return service


def in_blocks(plan: ExecutionPlan, spec: ModelSpec) -> ExecutionPlan:
    """Return a plan with the transformers on the block engines of `stock`."""
    uses = tuple(
        EngineUse(
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
