"""VACE on block engines: both kinds of blocks run on the same ones, equal diffusers', and fall back to PyTorch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanVACETransformer3DModel

from runtime.core.errors import EngineError
from runtime.core.events import FellBack, Paused, Resumed, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, EngineRef, Speed, Split
from runtime.engines.block_reference import compare_blocks, random_text
from runtime.engines.offers import engine_calls
from runtime.engines.service import OpenEngines
from runtime.execution.residency import Residency
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.vace import in_order
from runtime.machine.probe import probe
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline.checkpoint import CheckpointFolder
from tests.block_engine_files import ANY_SIZE, BUILDER, forecast_of_blocks, in_blocks, stock
from tests.engines.test_block_reference import Part, Tensors, key_of, part_of
from tests.families.hunyuan_video.test_block_programs import Engines, on_engines
from tests.families.ltx2.test_block_programs import Untouched
from tests.families.ltx2.test_several_gpus import PART
from tests.families.test_second_family import frames, mean_difference
from tests.families.wan.test_vace import SCALES, inputs, reference
from tests.pipeline.runs import events_of
from tests.pipeline.test_control import planned
from tests.pipeline.test_resume import at_step
from tests.planner.test_live_bytes import Counted, attend
from tests.plans import with_strategy

Tiny = Callable[[str], ModelSpec]
TIMESTEP = torch.tensor(400.0)


def predicted(module: Any, latents: torch.Tensor, control: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return what diffusers predicts."""
    out: torch.Tensor = module(latents, TIMESTEP[None], text, None, control, torch.tensor(SCALES), return_dict=False)[0]
    return out


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error relative to the deviation of what is wanted."""
    return float((found.float() - wanted).abs().max() / wanted.std())


def blocks(
    spec: ModelSpec, module: Any, engines: Engines | None, reasons: list[Fact], dtype: str = "float32"
) -> PyTorchDenoiser:
    """Return a denoiser on block engines."""
    denoiser = PyTorchDenoiser(module)
    denoiser.compute(Speed(text_kept=True), None, on_engines(spec, engines, reasons, dtype))
    denoiser.steer(SCALES)
    return denoiser


@torch.no_grad()
@pytest.mark.parametrize("fault", ["", "error", "nan", "not opened"])
def test_a_pass_equals_diffusers(fault: str, tiny: Tiny) -> None:
    spec, reasons = tiny("wan2.1-vace"), list[Fact]()
    latents, control, texts = inputs(spec)
    wanted = [predicted(reference(spec), latents, control, text) for text in texts]
    # Call 5 is of the first control block.
    engines = None if fault == "not opened" else Engines(spec, failing=5 if fault else 0, fault=fault)
    denoiser = blocks(spec, reference(spec), engines, reasons)
    joined = torch.cat([latents, control], dim=1)
    for text, one in zip(texts, wanted, strict=True):
        assert error_of(denoiser(joined, TIMESTEP, text), one) < 1e-5
    codes = {"error": ["engine.no_such_gpu"], "nan": ["execution.engine_not_finite"]}
    assert [reason.code for reason in reasons] == codes.get(fault, [])
    if engines is not None and not fault:
        # Four blocks and two control blocks, in two passes.
        assert {name: engines.calls.count(name) for name in spec.block_programs} == dict.fromkeys(
            spec.block_programs, 6 * 2
        )
    denoiser.forget()
    assert not denoiser._module.is_wide
    assert error_of(denoiser(joined, TIMESTEP, texts[0]), wanted[0]) < 1e-5


@torch.no_grad()
def test_weights_in_half_precision_lose_as_little_as_in_pytorch(tiny: Tiny) -> None:
    spec, reasons = tiny("wan2.1-vace"), list[Fact]()
    latents, control, texts = inputs(spec)
    wanted = predicted(reference(spec), latents, control, texts[0])
    joined = torch.cat([latents, control], dim=1)
    half = Engines(spec, dtype="bfloat16")
    part = PART.replace(dtype="bfloat16")
    plain = PyTorchDenoiser(load_module(spec, "transformer", part))
    plain.steer(SCALES)
    in_pytorch = error_of(plain(joined, TIMESTEP, texts[0]), wanted)
    for engines in (half, None):
        denoiser = blocks(spec, load_module(spec, "transformer", part), engines, reasons, "bfloat16")
        assert error_of(denoiser(joined, TIMESTEP, texts[0]), wanted) < min(0.2, 1.2 * in_pytorch)
    assert not reasons


def test_engines_are_verified_with_control_blocks(tiny: Tiny) -> None:
    spec = tiny("wan2.1-vace")
    spec = replace(spec, defaults=replace(spec.defaults, width=96, height=64, frames=5))

    of_control_block = reference(spec).vace_blocks[0].get_parameter("attn1.to_q.weight")

    def off(given: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        wrong = torch.equal(given["q_weight"], of_control_block)
        return {name: tensor * 1.05 if wrong else tensor for name, tensor in outputs.items()}

    def verified(program: str, after: Callable[[Mapping[str, torch.Tensor], Tensors], Tensors]) -> bool:
        session, key = Part(part_of(spec, program, "float32"), after), key_of(spec, program, "float32")
        return compare_blocks(session, spec, "transformer", key, "cpu", random_text(spec)).passed

    assert all(verified(program, lambda _, outputs: outputs) for program in spec.block_programs)
    assert not verified("block_qkv", off)


def test_engines_are_those_of_models_without_control_branch(tmp_path: Path) -> None:
    steered, plain = (look_up(name, tmp_path) for name in ("wan2.1-vace-14b", "wan2.2-t2v-a14b"))
    for program in steered.block_programs:
        keys = {
            BUILDER.key(spec, "transformer", program, (ANY_SIZE,), precision="float16", machine=probe(), device="cpu")
            for spec in (steered, plain)
        }
        assert len({key.digest() for key in keys}) == 1
    assert steered.block_programs == plain.block_programs != ()
    # They are called for each of the 40 blocks and 8 control blocks.
    use = EngineRef(id="x", program="block_qkv", builder="b", precision="float16", profile=((1, 1, 1),) * 3, tokens=768)
    assert engine_calls(use, steered, (2, 32, 48)) == 48 and engine_calls(use, plain, (2, 32, 48)) == 40


@torch.no_grad()
def test_memory_between_engines_is_as_forecast(tiny: Tiny) -> None:
    spec, size = tiny("wan2.1-vace"), (9, 32, 32)
    sizes: dict[str, Any] = {"num_attention_heads": 8, "attention_head_dim": 128, "ffn_dim": 4096}
    module: Any = WanVACETransformer3DModel(**sizes, text_dim=32, num_layers=2, vace_layers=[0, 1]).bfloat16()
    transformer: Any = spec.transformer
    spec = replace(spec, transformer=replace(transformer, **sizes))
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if {*key.split(".")} & {*module._keep_in_fp32_modules}:
            tensor.data = tensor.data.float()
    latents, text = torch.randn(1, 112, *size), torch.randn(1, 7, 32)
    denoiser = PyTorchDenoiser(module)
    denoiser.compute(EAGER, None, on_engines(spec, Untouched(spec, dtype="bfloat16"), [], "bfloat16"))
    module.kernels.choose(in_order(module))
    for block in in_order(module):
        block.attend = block.attend_text = attend
    with Counted([*module.parameters(), *module.buffers(), latents, text]) as counted:
        denoiser(latents, TIMESTEP, text)
    forecast = forecast_of_blocks(spec, (1, 16, *size), 256, Untouched.most_tokens)
    assert 0.85 * forecast <= counted.peak <= 1.01 * forecast


@pytest.mark.slow
def test_a_job_on_engines_makes_the_same_clip(
    tiny: Tiny, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, failing = list[str](), set[int]()
    write = OpenEngines.write

    def watch(self: OpenEngines, program: str, given: Mapping[str, torch.Tensor], outputs: Any) -> None:
        seen.append(program)
        write(self, program, given, outputs)
        if len(seen) in failing:
            raise EngineError("engine.failed", error="on purpose")

    clip = planned(tiny("wan2.1-vace"), tmp_path, "control", "mask", control_scale=[0.5, 2], frames=5, steps=2)
    spec, service = clip.spec, stock(clip.spec, tmp_path, tmp_path_factory)

    def made(plan: Any) -> tuple[bytes, int]:
        """Return the frames and the number of fallbacks."""
        seen.clear()
        with Residency(service, keep_prompts=False) as residency:
            events = events_of(plan, spec, residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        return frames(str(plan.output)), sum(isinstance(event, FellBack) for event in events)

    monkeypatch.setattr(OpenEngines, "write", watch)
    plan = with_strategy(clip.plan, keep_loaded=True)
    pixels, _ = made(plan)
    assert not seen
    on_engines = in_blocks(plan, spec)
    found, fallen = made(on_engines)
    # Each part of six blocks, in two steps of two passes.
    assert (len(seen), fallen) == (3 * 6 * 2 * 2, 0) and mean_difference(found, pixels) < 0.1
    failing.add(5)
    found, fallen = made(on_engines)
    assert fallen == 1 and mean_difference(found, pixels) < 0.1
    failing.clear()
    # Two processes that share the tokens of a pass.
    found, fallen = made(on_engines.replace(split=Split(devices=("cpu",) * 2, guidance=1, sequence=2, decode=False)))
    assert fallen == 0 and mean_difference(found, pixels) < 0.1


@pytest.mark.slow
def test_a_paused_job_resumes_on_engines(tiny: Tiny, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    clip = planned(tiny("wan2.1-vace"), tmp_path, "control", frames=5, guidance_scale=1.0)
    spec, service = clip.spec, stock(clip.spec, tmp_path, tmp_path_factory)
    plan, job = in_blocks(clip.plan, spec), CheckpointFolder(tmp_path / "job")
    with Residency(service, keep_prompts=False) as residency:
        assert isinstance(events_of(plan, spec, residency)[-1], VideoSaved)
        wanted = frames(str(plan.output))
        assert isinstance(events_of(plan, spec, residency, pause_at=at_step(2), checkpoints=job)[-1], Paused)
        events = events_of(plan, spec, residency, checkpoints=job)
    assert Resumed(step=2, of=3) in events
    assert not any(isinstance(event, FellBack) for event in events)
    assert frames(str(plan.output)) == wanted
