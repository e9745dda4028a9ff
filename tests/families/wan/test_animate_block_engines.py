"""Animate on block engines: they are those of Wan's models for images; the attention to the face runs in PyTorch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanAnimateTransformer3DModel

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, EngineRef, Speed
from runtime.engines.block_reference import compare_blocks, random_text
from runtime.engines.offers import engine_calls
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.machine.probe import probe
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.block_engine_files import ANY_SIZE, BUILDER, forecast_of_blocks
from tests.engines.test_block_reference import Part, Tensors, key_of, part_of
from tests.families.hunyuan_video.test_block_programs import Engines, on_engines
from tests.families.ltx2.test_block_programs import Untouched
from tests.families.ltx2.test_several_gpus import PART
from tests.families.wan.test_animate import Inputs, reference
from tests.families.wan.test_vace_block_engines import TIMESTEP, error_of
from tests.planner.test_live_bytes import Counted, attend
from tests.tiny_models import ANIMATE

Tiny = Callable[[str], ModelSpec]


def predictions(
    spec: ModelSpec, module: Any, engines: Engines | None, reasons: list[Fact], dtype: str = "float32"
) -> tuple[list[torch.Tensor], PyTorchDenoiser]:
    """Return the passes with the prompt and without it on block engines, and the denoiser."""
    given, denoiser = Inputs(spec), PyTorchDenoiser(module)
    denoiser.compute(Speed(text_kept=True), None, on_engines(spec, engines, reasons, dtype))
    denoiser.steer((), given.face)
    texts = map(given.with_image, given.texts)
    kinds = (PROMPTED, UNPROMPTED)
    return [denoiser(given.joined, TIMESTEP, *each) for each in zip(texts, kinds, strict=True)], denoiser


def by_diffusers(spec: ModelSpec) -> list[torch.Tensor]:
    """Return both passes as diffusers computes them."""
    module, given = reference(spec), Inputs(spec)
    return [
        given.by_diffusers(module, text, black=black) for text, black in zip(given.texts, (False, True), strict=True)
    ]


@torch.no_grad()
@pytest.mark.parametrize("fault", ["", "error", "nan", "not opened"])
def test_a_pass_equals_diffusers(fault: str, tiny: Tiny) -> None:
    spec, reasons = tiny(ANIMATE), list[Fact]()
    wanted = by_diffusers(spec)
    engines = None if fault == "not opened" else Engines(spec, failing=5 if fault else 0, fault=fault)
    found, denoiser = predictions(spec, reference(spec), engines, reasons)
    assert all(error_of(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))
    codes = {"error": ["engine.no_such_gpu"], "nan": ["execution.engine_not_finite"]}
    assert [reason.code for reason in reasons] == codes.get(fault, [])
    if engines is not None and not fault:
        assert {name: engines.calls.count(name) for name in spec.block_programs} == dict.fromkeys(
            spec.block_programs, 4 * 2
        )
    denoiser.forget()
    assert not denoiser._module.is_wide


@torch.no_grad()
def test_weights_in_half_precision_lose_as_little_as_in_pytorch(tiny: Tiny) -> None:
    spec, reasons, given = tiny(ANIMATE), list[Fact](), Inputs(tiny(ANIMATE))
    wanted, part = by_diffusers(spec)[0], PART.replace(dtype="bfloat16")
    plain = PyTorchDenoiser(load_module(spec, "transformer", part))
    plain.steer((), given.face)
    in_pytorch = error_of(plain(given.joined, TIMESTEP, given.with_image(given.texts[0])), wanted)
    for engines in (Engines(spec, dtype="bfloat16"), None):
        found, _ = predictions(spec, load_module(spec, "transformer", part), engines, reasons, "bfloat16")
        assert error_of(found[0], wanted) < min(0.2, 1.2 * in_pytorch)
    assert not reasons


def test_engines_are_verified(tiny: Tiny) -> None:
    spec = tiny(ANIMATE)
    spec = replace(spec, defaults=replace(spec.defaults, width=96, height=64, frames=5))

    def scaled(factor: float, _: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        return {name: tensor * factor for name, tensor in outputs.items()}

    for program in spec.block_programs:
        for error in (1.0, 1.05):
            session = Part(part_of(spec, program, "float32"), partial(scaled, error))
            key = key_of(spec, program, "float32")
            found = compare_blocks(session, spec, "transformer", key, "cpu", random_text(spec))
            assert found.passed == (error == 1.0), (program, error, found.detail)


def test_engines_are_those_of_models_for_images(tmp_path: Path) -> None:
    animated, plain = (look_up(name, tmp_path) for name in ("wan2.2-animate-14b", "wan2.1-i2v-14b-480p"))
    assert animated.block_programs == plain.block_programs != ()
    for program in animated.block_programs:
        keys = {
            BUILDER.key(spec, "transformer", program, (ANY_SIZE,), precision="float16", machine=probe(), device="cpu")
            for spec in (animated, plain)
        }
        assert len({key.digest() for key in keys}) == 1
    use = EngineRef(id="x", program="block_qkv", builder="b", precision="float16", profile=((1, 1, 1),) * 3, tokens=768)
    assert engine_calls(use, animated, (2, 32, 48)) == engine_calls(use, plain, (2, 32, 48)) == 40


@torch.no_grad()
def test_memory_between_engines_is_as_forecast(tiny: Tiny) -> None:
    spec, size = tiny(ANIMATE), (9, 32, 32)
    sizes: dict[str, Any] = {"num_attention_heads": 8, "attention_head_dim": 128, "ffn_dim": 4096}
    config = {**reference(spec).config, **sizes, "num_layers": 2, "added_kv_proj_dim": 1024}
    module: Any = WanAnimateTransformer3DModel.from_config(config).bfloat16()
    transformer: Any = spec.transformer
    spec = replace(spec, transformer=replace(transformer, **sizes))
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if {*key.split(".")} & {*module._keep_in_fp32_modules}:
            tensor.data = tensor.data.float()
    latents, text = torch.randn(1, 52, *size), torch.randn(1, 5 + 512, 32)
    face = torch.zeros(4 * size[0] - 7, 16, 16, 3, dtype=torch.uint8)
    denoiser = PyTorchDenoiser(module)
    denoiser.compute(EAGER, None, on_engines(spec, Untouched(spec, dtype="bfloat16"), [], "bfloat16"))
    denoiser.steer((), face)
    module.kernels.choose(module.blocks)
    for block in (*module.blocks, *module.face_adapter):
        block.attend = block.attend_text = attend
    with Counted([*module.parameters(), *module.buffers(), latents, text]) as counted:
        denoiser(latents, TIMESTEP, text)
    forecast = forecast_of_blocks(spec, (1, 16, *size), 256, Untouched.most_tokens)
    assert 0.85 * forecast <= counted.peak <= 1.01 * forecast
