"""The exportable forms of the VAE equal diffusers', and PyTorch decodes from where an engine fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo

from runtime.core.facts import Fact
from runtime.engines.component_programs import Program
from runtime.engines.programs import load_program
from runtime.execution.engine_components import EngineGroupDecoder, EngineImageSampler
from runtime.families.framepack.vae import PyTorchImageLatents
from runtime.families.hunyuan_video.vae import PyTorchVideoDecoder
from runtime.models.registry import read_spec
from runtime.models.spec import VAE_ENCODER, ModelSpec
from runtime.models.vae_groups import GROUP_PROGRAMS, IMAGE_PROGRAM, groups_of
from tests.execution.test_image_components import Engines, no_fallback, opened
from tests.families.framepack_models import pipeline as framepack

Tiny = Callable[[str], ModelSpec]
# In float32, either is up to 1.5e-5 from diffusers in float64, depending on the CPU; values reach 4.
ROUNDING = 4e-5


@pytest.fixture(scope="module")
def vae(tiny: Tiny) -> AutoencoderKLHunyuanVideo:
    """Return diffusers' VAE with its groups."""
    module = AutoencoderKLHunyuanVideo.from_pretrained(tiny("hunyuan-video").directory / "vae").eval()
    module.use_framewise_decoding = True
    return module


@pytest.fixture(scope="module")
def programs(tiny: Tiny) -> dict[str, Program]:
    spec = tiny("hunyuan-video")
    return {name: load_program(spec, "vae", name, device="cpu", dtype="float32") for name in GROUP_PROGRAMS}


def noise(count: int) -> torch.Tensor:
    return torch.randn(1, 16, count, 4, 6, generator=torch.Generator().manual_seed(count))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("count", [1, 4, 5, 7, 8, 9])
def test_a_decoder_on_engines_equals_diffusers(
    vae: AutoencoderKLHunyuanVideo, programs: dict[str, Program], count: int
) -> None:
    latents, engines = noise(count), Engines(programs)
    decoded = vae.decode(latents / vae.config.scaling_factor).sample[0].permute(1, 2, 3, 0)
    decoder = EngineGroupDecoder(opened(engines), no_fallback)
    torch.testing.assert_close(decoder.window(latents), decoded, rtol=1e-5, atol=ROUNDING)
    assert len(engines.calls) == len(groups_of(count))
    found = torch.cat(list(decoder.frames(latents, 1)))
    torch.testing.assert_close(found, decoded.clamp(-1, 1), rtol=1e-5, atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_pytorch_decodes_from_the_group_that_fails(tiny: Tiny, programs: dict[str, Program], failing: int) -> None:
    latents, reasons = noise(8), list[Fact]()
    directory = tiny("hunyuan-video").directory / "vae"
    reference = PyTorchVideoDecoder(AutoencoderKLHunyuanVideo.from_pretrained(directory).eval())

    def wrong(call: int, outputs: dict[str, Any]) -> None:
        if call == failing:
            outputs["frames"] = torch.full_like(outputs["frames"], torch.nan)

    def fall_back(reason: Fact) -> PyTorchVideoDecoder:
        reasons.append(reason)
        return reference

    engines = Engines(programs, wrong)
    found = torch.cat(list(EngineGroupDecoder(opened(engines), fall_back).frames(latents, 1)))
    torch.testing.assert_close(found, torch.cat(list(reference.frames(latents, 1))), rtol=1e-5, atol=1e-5)
    assert [reason.code for reason in reasons] == ["execution.engine_not_finite"]
    assert len(engines.calls) == failing


@pytest.fixture(scope="module")
def framepack_spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Return a tiny model that makes sections from the start to the end."""
    folder = tmp_path_factory.mktemp("models") / "framepack-f1"
    framepack().save_pretrained(folder)
    return read_spec(folder, "framepack")


@pytest.mark.parametrize("fails", [False, True])
def test_an_encoder_on_an_engine_draws_the_same_latents(framepack_spec: ModelSpec, fails: bool) -> None:
    program = load_program(framepack_spec, VAE_ENCODER, IMAGE_PROGRAM, device="cpu", dtype="float32")
    vae = AutoencoderKLHunyuanVideo.from_pretrained(framepack_spec.directory / "vae").eval()
    reference, reasons = PyTorchImageLatents(vae), list[Fact]()
    pixels = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = reference.sample(pixels, torch.Generator().manual_seed(5))

    def wrong(_: int, outputs: dict[str, Any]) -> None:
        if fails:
            outputs["moments"] = torch.full_like(outputs["moments"], torch.inf)

    def fall_back(reason: Fact) -> PyTorchImageLatents:
        reasons.append(reason)
        return reference

    encoder = EngineImageSampler(opened(Engines({IMAGE_PROGRAM: program}, wrong)), fall_back)
    found = encoder.sample(pixels, torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert [reason.code for reason in reasons] == ["execution.engine_not_finite"] * fails
