"""What PyTorch would run instead of an engine is measured when the engine is built and verified."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.families.wan import transformer
from runtime.machine.probe import Machine, probe
from runtime.models.spec import ModelSpec
from runtime.pipeline.pytorch_timer import PyTorchTimer, PyTorchTimerFactory
from runtime.planner.choice.engine_index import EngineKey, EngineRecord, ShapeProfile
from tests.engines.contract import wheels
from tests.plans import GPU_PACKAGES, gpu, machine

pytestmark = pytest.mark.usefixtures("forked_children")

ADA = replace(
    machine(gpu=gpu(capability=(8, 9)), torch_cuda="13.0", packages=(*GPU_PACKAGES, ("torchao", "0.18.0"))),
    driver_cuda=(13, 0),
)
SIZE = (3, 4, 8)
PROGRAMS = ("text_encoder", "transformer", "vae_first", "vae_next", "vae_clip", "block_qkv", "block_query")
IMAGE_PROGRAMS = ("image_encoder", "vae_encoder_first", "vae_encoder_next")


@pytest.fixture
def service(tmp_path: Path) -> EngineService:
    return EngineService(EngineStore(tmp_path / "engines", 1 << 40), probe(), tmp_path)


def component_of(program: str) -> str:
    """Return the component that a program computes, or parts of."""
    components = ("text_encoder", "image_encoder", "vae_encoder", "vae")
    return next((name for name in components if program.startswith(name)), "transformer")


def key_of(spec: ModelSpec, program: str, service: EngineService) -> EngineKey:
    """Return the key of an engine for the tests' size."""
    sizes = {"transformer": SIZE, "vae_first": (1, 4, 8), "vae_next": (2, 4, 8), "vae_clip": SIZE}
    sizes |= {"vae_encoder_first": (1, 4, 8), "vae_encoder_next": (1, 4, 8)}
    builder = BUILDERS["onnxruntime_blocks" if program.startswith("block_") else "onnxruntime"]
    return builder.key(
        spec,
        component_of(program),
        program,
        (ShapeProfile.fixed(sizes.get(program, (1, 1, 1))),),
        precision="float32",
        machine=service.machine,
        device="cpu",
    )


def baseline_of(spec: ModelSpec, program: str, service: EngineService) -> PyTorchTimer:
    """Return what measures PyTorch instead of an engine."""
    found = PyTorchTimerFactory(service)(spec, component_of(program), key_of(spec, program, service), "cpu")
    assert found is not None
    return found


def fp8_key(spec: ModelSpec, program: str, service: EngineService) -> EngineKey:
    """Return the key of an FP8 block engine."""
    return BUILDERS["tensorrt_rtx_blocks_fp8"].key(
        spec,
        "transformer",
        program,
        (ShapeProfile.fixed((1, 1, 1)),),
        precision="fp8",
        machine=service.machine,
        device="cuda:0",
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", [*PROGRAMS, *IMAGE_PROGRAMS])
def test_every_program_is_measured(tiny: Callable[[str], ModelSpec], service: EngineService, program: str) -> None:
    spec = tiny("wan2.1-flf2v" if program in IMAGE_PROGRAMS else "wan2.2-a14b")
    baseline = baseline_of(spec, program, service)
    part = baseline.plan.components[component_of(program)]
    assert (part.backend, part.engines, part.dtype) == ("pytorch", (), "float32")
    found = baseline(program, key_of(spec, program, service).profiles[0].opt)
    # On a CPU nothing is compiled unless it is asked for.
    assert list(found) == ["eager"]
    assert 0 < found["eager"] < 5


def test_the_plan_is_for_the_engines_size(tiny: Callable[[str], ModelSpec], service: EngineService) -> None:
    plan = baseline_of(tiny("wan2.2-a14b"), "transformer", service).plan
    assert plan.latent_shape[2:] == SIZE
    assert baseline_of(tiny("wan2.2-a14b"), "vae_next", service).plan.latent_shape[3:] == SIZE[1:]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["transformer", "block_query"])
def test_compiled_code_is_measured_apart(
    tiny: Callable[[str], ModelSpec], service: EngineService, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.2-a14b")
    baseline = replace(baseline_of(spec, program, service), compiles=True)
    size = key_of(spec, program, service).profiles[0].opt
    compiling, graphs = torch.compile, []

    def trace(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    # Without Inductor, which takes 20 seconds; tests/execution/test_compilation.py has it.
    monkeypatch.setattr(torch, "compile", lambda of, *, options, **more: compiling(of, backend=trace, **more))
    assert set(baseline(program, size)) == {"eager", "compiled"}
    assert graphs

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    assert set(baseline(program, size)) == {"eager"}


def test_what_runs_out_of_memory_is_not_measured(
    tiny: Callable[[str], ModelSpec], service: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.2-a14b")

    def exhaust(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(transformer, "block_step", exhaust)
    assert baseline_of(spec, "transformer", service)("transformer", SIZE) == {}


def test_a_size_that_pytorch_cannot_make_has_no_baseline(
    tiny: Callable[[str], ModelSpec], service: EngineService
) -> None:
    spec = tiny("wan2.2-a14b")
    key = replace(key_of(spec, "transformer", service), profiles=(ShapeProfile.fixed((3, 4000, 8)),))
    assert PyTorchTimerFactory(service)(spec, "transformer", key, "cpu") is None


@pytest.mark.parametrize(
    "lacking",
    [replace(ADA, gpus=(gpu(capability=(8, 6)),)), replace(ADA, packages=GPU_PACKAGES)],
    ids=["a GPU with FP8", "torchao"],
)
def test_fp8_engines_have_a_baseline_only_where_pytorch_runs_fp8(
    tiny: Callable[[str], ModelSpec], service: EngineService, lacking: Machine
) -> None:
    spec, service = tiny("wan2.2-a14b"), replace(service, machine=ADA)
    key = fp8_key(spec, "block_qkv", service)
    baseline = PyTorchTimerFactory(service)(spec, "transformer", key, "cuda:0")
    assert baseline is not None
    assert baseline.plan.components["transformer"].quantization == "fp8"
    assert PyTorchTimerFactory(replace(service, machine=lacking))(spec, "transformer", key, "cuda:0") is None


@pytest.mark.slow
def test_fp8_engines_are_measured_against_torchaos_fp8(tmp_path: Path) -> None:
    # In a process of its own: importing torchao changes torch.
    torchao = wheels.unpacked(f"torchao=={wheels.pinned('torchao')}")
    lines = wheels.run("tests.pipeline.fp8_baseline_on_cpu", tmp_path, packages=[torchao], libraries=tmp_path)
    measured = [json.loads(line) for line in lines]
    assert [found["products"] for found in measured] == [["_scaled_mm"]] * 3
    assert all(found["seconds"]["eager"] > 0 for found in measured)


def fail(_: str, __: object) -> dict[str, float]:
    """Fail as a library would."""
    raise RuntimeError("broken")


def build(service: EngineService, spec: ModelSpec, timers: Any) -> EngineRecord:
    """Build and verify the engine of the text encoder, which takes the least time."""
    [offer] = [one for one in service.offers(spec)("text_encoder", SIZE, "cpu") if one.builder == "onnxruntime"]
    return service.build(spec, "text_encoder", offer.engines[0], "cpu", lambda *_: None, Cancel(), timers=timers)


@pytest.mark.slow
def test_an_engine_is_not_lost_where_pytorch_cannot_be_measured(
    tiny: Callable[[str], ModelSpec], service: EngineService
) -> None:
    record = build(service, tiny("wan2.2-a14b"), lambda *_: fail)
    assert record.verified
    assert record.baselines == {}
    assert record.pytorch_seconds_per_call > 0


@pytest.mark.slow
def test_baselines_are_stored_with_engines_built_and_verified(
    tiny: Callable[[str], ModelSpec], service: EngineService
) -> None:
    spec = tiny("wan2.2-a14b")
    record = build(service, spec, PyTorchTimerFactory(service))
    assert set(record.baselines) == {"eager"}
    assert record.largest_error > 0
    [verified] = service.verify([record], [spec], lambda *_: None, Cancel(), timers=PyTorchTimerFactory(service))
    assert set(verified.engine.baselines) == {"eager"}
    assert verified.engine.baselines != record.baselines
    assert service.store.get(record.key) == verified.engine
