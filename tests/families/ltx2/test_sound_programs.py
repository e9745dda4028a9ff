"""LTX-2's decoders of sound on engines: equal to PyTorch, in a whole job, and replaced by PyTorch if one fails."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.core.events import FellBack, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, EngineRef
from runtime.core.request import SOUND_DECODERS, GenerationRequest
from runtime.core.settings import Settings
from runtime.engines.builders import BUILDERS
from runtime.engines.onnx_export import export_component
from runtime.engines.programs import load_program
from runtime.engines.service import EngineService, OpenEngines
from runtime.execution.residency import Residency
from runtime.families.ltx2.components import sound_decoder
from runtime.machine.probe import probe
from runtime.models.requested import with_inputs
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.planner.choice.engine_index import ShapeProfile
from runtime.planner.choice.key_differences import differences
from runtime.planner.memory_model import Workload, stages
from runtime.planner.resolve import PlanningContext, resolve
from tests.pipeline.failing import Failing
from tests.pipeline.runs import events_of
from tests.plans import GPU_PACKAGES, gpu, machine
from tests.sounds import sound_in
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
IN_PYTORCH = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
LATENTS = 7
CLIP: dict[str, Any] = {"prompt": "x", "width": 64, "height": 64, "frames": 9, "steps": 2, "seed": 3, "fps": 8}


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_programs_equal_the_decoders_in_pytorch(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    made: dict[str, torch.Tensor] = {}
    for name in SOUND_DECODERS:
        program = load_program(spec, name, name, device="cpu", dtype="float32")
        inputs = program.inputs((LATENTS, 1, 1))
        (made[name],) = program.run(**inputs).values()
        expected = sound_decoder(name, load_module(spec, name, IN_PYTORCH), "cpu")(*inputs.values())
        torch.testing.assert_close(made[name], expected, rtol=0, atol=1e-6)
    # One decoder takes what the other one returns.
    assert inputs["spectrum"].shape == made["audio_vae"].shape
    assert spec.sound is not None and spec.sound.latents is not None
    seconds = made["vocoder"].shape[2] / spec.sound.rate
    assert seconds == pytest.approx(spec.sound.latents.seconds(LATENTS), abs=0.05)


@pytest.mark.slow
def test_an_exported_file_equals_pytorch(tiny: Tiny, tmp_path: Path) -> None:
    # A job decodes on both of LTX-2 below; LTX-2.3 has another vocoder.
    (exported,) = export_component(tiny("ltx-2.3"), "vocoder", (LATENTS, 1, 1), tmp_path)
    assert exported.path == tmp_path / "vocoder.onnx"
    assert exported.error < 1e-5


def broken(_: Any) -> Any:
    """Raise what an engine raises that fails."""
    raise RuntimeError("broken")


def not_finite(outputs: Any) -> Any:
    """Return an engine's outputs as NaN."""
    return {name: torch.full_like(output, torch.nan) for name, output in outputs.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_a_job_decodes_its_sound_on_engines(tiny: Tiny, tmp_path: Path) -> None:
    service = EngineService.from_settings(Settings(cache_dir=tmp_path), probe())

    def run(**values: Any) -> tuple[VideoSaved, np.ndarray, list[str]]:
        request = GenerationRequest.from_mapping(CLIP | {"sound": "lossless"} | values)
        spec = with_inputs(tiny("ltx-2"), request, tmp_path, tmp_path)
        plan = resolve(request, spec, PlanningContext(service.machine, tmp_path / "x.mp4", service.offers(spec)))
        with Residency(service) as residency:
            events = events_of(plan, spec, residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        _, sound = sound_in(plan.output) or ("", None)
        assert sound is not None
        return events[-1], sound.samples, [event.component for event in events if isinstance(event, FellBack)]

    plain, expected, _ = run()
    assert {plain.plan["components"][name]["backend"] for name in SOUND_DECODERS} == {"pytorch"}
    asked: dict[str, Any] = {"backends": dict.fromkeys(SOUND_DECODERS, "onnxruntime")}
    made, heard, fell_back = run(**asked)
    assert {made.plan["components"][name]["backend"] for name in SOUND_DECODERS} == {"onnxruntime"}
    assert not fell_back
    records = service.store.index()
    assert [record.key.program for record in sorted(records, key=lambda record: record.component)] == [*SOUND_DECODERS]
    for record in records:
        assert record.usable and record.key.precision == "float32"
        assert record.error < 1e-5
        assert record.seconds_per_call > 0 and set(record.baselines) == {"eager"}
        assert service.why_stale(record, [tiny("ltx-2")]) == []
    # Samples have 16 bits and more in the file.
    np.testing.assert_allclose(heard, expected, rtol=0, atol=1e-4)
    # The engines serve a clip of another size that is as long.
    wider, _, _ = run(width=96, build="never", **asked)
    assert {wider.plan["components"][name]["backend"] for name in SOUND_DECODERS} == {"onnxruntime"}
    # Each fails in turn in its call, and PyTorch computes it.
    for call, component in enumerate(SOUND_DECODERS, 1):
        for fail in (broken, not_finite):
            with pytest.MonkeyPatch.context() as patched:
                Failing(patched, OpenEngines, "infer", call, fail)
                _, repaired, fell_back = run(**asked)
            assert fell_back == [component]
            np.testing.assert_allclose(repaired, expected, rtol=0, atol=1e-4)
    for record in records:
        service.store.path(record.id).joinpath(record.files[0].name).write_bytes(b"damaged")
    _, repaired, fell_back = run(build="never", **asked)
    assert fell_back == [*SOUND_DECODERS]
    np.testing.assert_array_equal(repaired, expected)


def test_engines_are_for_the_length_of_the_sound(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("ltx-2")
    service = EngineService.from_settings(Settings(cache_dir=tmp_path), probe())

    def planned(**values: Any) -> Any:
        request = GenerationRequest.from_mapping(CLIP | {"backends": {"vocoder": "onnxruntime"}} | values)
        context = PlanningContext(service.machine, tmp_path / "x.mp4", service.offers(spec))
        return resolve(request, spec.for_text(), context)

    plan = planned()
    part = plan.components["vocoder"]
    assert plan.sound_shape is not None
    size = plan.sound_shape[2], 1, 1
    assert plan.engine_size("vocoder") == plan.engine_size("audio_vae") == size
    (use,) = part.engines
    assert (use.program, use.precision, use.profile, use.build) == ("vocoder", "float32", (size, size, size), True)
    assert part.seconds is not None
    same, slower, silent = planned(width=128), planned(fps=4), planned(sound="off", backends={})
    assert [each.id for each in same.components["vocoder"].engines] == [use.id]
    assert slower.components["vocoder"].engines[0].profile[0] == (2 * size[0], 1, 1)
    # They are hardly faster than PyTorch, so they are built only for those who ask.
    assert planned(backends={}, build="missing").components["vocoder"].backend == "pytorch"
    assert {silent.components[name].backend for name in SOUND_DECODERS} == {"pytorch"}


def test_plans_and_engines_on_a_gpu(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("ltx-2.3").for_text()
    here = machine(gpu=gpu(), torch_cuda="13.0", packages=GPU_PACKAGES)
    offers = EngineService.from_settings(Settings(cache_dir=tmp_path), here).offers(spec)
    for name in SOUND_DECODERS:
        offered = offers(name, (LATENTS, 1, 1), "cuda:0")
        assert {offer.backend for offer in offered} == {"tensorrt", "tensorrt_rtx", "inductor", "onnxruntime"}
        for offer in offered:
            (use,) = offer.engines
            # As their authors run them. They are built only for those who ask.
            assert (use.precision, offer.on_request, use.build) == ("float32", True, True)
            needs = BUILDERS[offer.builder].needs(spec, name, ShapeProfile.fixed((LATENTS, 1, 1)))
            assert needs.ram_bytes > 4 * spec.parameters[name]
    # Memory of a call is known for an engine whose context is, and otherwise about that of PyTorch.
    plan = resolve(GenerationRequest.from_mapping(CLIP), spec, PlanningContext(here, tmp_path / "x.mp4"))
    workload = Workload.of(plan, spec)
    assert spec.sound is not None
    for known in (0, 1 << 20):
        use = EngineRef(
            id="x",
            program="vocoder",
            builder="onnx_tensorrt",
            precision="float32",
            profile=((1, 1, 1),) * 3,
            context_bytes=known,
        )
        on_engine = replace(workload, engines={"vocoder": (use,)}, engine_bytes={"vocoder": 1000})
        (stage,) = [stage for stage in stages(on_engine, plan.strategy) if stage.component == "vocoder"]
        (before,) = [stage for stage in stages(workload, plan.strategy) if stage.component == "vocoder"]
        # Two buffers of float32 samples.
        samples = 2 * 4 * spec.sound.channels * spec.sound.rate * 9 / 8
        assert stage.working_bytes == (pytest.approx(samples, rel=0.05) if known else before.working_bytes)


def test_differences_in_length_are_named(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("ltx-2")
    offers = EngineService.from_settings(Settings(cache_dir=tmp_path), probe()).offers(spec)
    keys = []
    for latents in (LATENTS, 2 * LATENTS):
        offer = next(offer for offer in offers("vocoder", (latents, 1, 1), "cpu") if offer.builder == "onnxruntime")
        keys.append(offers.key(BUILDERS["onnxruntime"], "vocoder", offer.engines[0], "cpu"))
    wanted, existing = keys
    (difference,) = differences(wanted, existing, 32)
    found = Fact("engine.sound_size", {"latents": 2 * LATENTS})
    assert difference == Fact(
        "engine.differs_sizes", {"found": [found], "wanted": [Fact("engine.sound_size", {"latents": LATENTS})]}
    )
    assert wanted.architecture == existing.architecture
