"""Encoders of images on engines: constant frames are computed once, and PyTorch takes over when an engine fails."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from diffusers import AutoencoderKLWan

from runtime.core.facts import Fact
from runtime.engines.component_programs import Program
from runtime.engines.programs import load_program
from runtime.engines.service import OpenEngines
from runtime.execution.engine_components import EngineDenoiser, EngineImageModel, EngineVideoEncoder
from runtime.families.wan.vae_encoder import PyTorchVideoEncoder
from runtime.models.spec import ModelSpec
from tests.engines.conftest import relative

Tiny = Callable[[str], ModelSpec]
FIRST, NEXT = "vae_encoder_first", "vae_encoder_next"


class Engines:
    """Programs in PyTorch with the interface of `OpenEngines`; `wrong` may change the outputs of a call."""

    device = "cpu"

    def __init__(
        self, programs: dict[str, Program], wrong: Callable[[int, dict[str, Any]], None] | None = None
    ) -> None:
        self.programs, self.wrong = programs, wrong
        self.calls: list[dict[str, torch.Tensor]] = []
        self.released: list[str] = []

    def infer(self, program: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.append(inputs)
        outputs = self.programs[program].run(**inputs)
        if self.wrong is not None:
            self.wrong(len(self.calls), outputs)
        return outputs

    def release(self, program: str) -> None:
        self.released.append(program)


def opened(engines: Engines) -> OpenEngines:
    return cast("OpenEngines", engines)


def no_fallback(reason: Fact) -> Any:
    raise AssertionError(reason)


@pytest.fixture(scope="module")
def spec(tiny: Tiny) -> ModelSpec:
    return tiny("wan2.2-i2v-a14b")


@pytest.fixture(scope="module")
def programs(spec: ModelSpec) -> dict[str, Program]:
    """Return both steps of the encoder."""
    return {name: load_program(spec, "vae_encoder", name, device="cpu", dtype="float32") for name in (FIRST, NEXT)}


@pytest.fixture(scope="module")
def images(spec: ModelSpec) -> list[torch.Tensor]:
    """Return two images of two by three latents."""
    scale = spec.vae.scale_factor_spatial
    return list(torch.rand(2, 3, 2 * scale, 3 * scale, generator=torch.Generator().manual_seed(1)) * 2 - 1)


def in_pytorch(spec: ModelSpec) -> PyTorchVideoEncoder:
    return PyTorchVideoEncoder(AutoencoderKLWan.from_pretrained(spec.directory / "vae").eval())


def every_step(programs: dict[str, Program], images: list[torch.Tensor], frames: int) -> torch.Tensor:
    """Return the latents with every step computed."""
    clip = torch.zeros(frames, *images[0].shape).permute(0, 2, 3, 1)
    clip[0] = images[0].permute(1, 2, 0)
    if len(images) > 1:
        clip[-1] = images[1].permute(1, 2, 0)
    outputs = programs[FIRST].run(frames=clip[:1])
    found = [outputs.pop("z")]
    for start in range(1, frames, 4):
        outputs = programs[NEXT].run(frames=clip[start : start + 4], **outputs)
        found.append(outputs.pop("z"))
    return torch.cat(found, dim=2)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("frames", [1, 5, 9, 161])
def test_latents_equal_those_of_every_step(
    spec: ModelSpec, programs: dict[str, Program], images: list[torch.Tensor], frames: int, count: int
) -> None:
    if frames == 1 and count == 2:
        return
    engines = Engines(programs)
    encoder = EngineVideoEncoder(opened(engines), no_fallback, scale=4)
    given = images[:count]
    latents = encoder.latents(given, frames)
    assert torch.equal(latents, every_step(programs, given, frames))
    assert relative(latents, in_pytorch(spec).latents(given, frames)) < 1e-5
    assert engines.released == [FIRST]
    steps = (frames - 1) // 4
    if frames < 161:
        assert len(engines.calls) == 1 + steps
    else:
        # Gray frames after many others like them are not encoded again, except before the last image.
        assert len(engines.calls) < steps - 5
        assert bool(engines.calls[-1]["frames"].any()) == (count == 2)


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("fails", [True, False], ids=["error", "not finite"])
def test_pytorch_encodes_if_an_engine_fails(
    spec: ModelSpec, programs: dict[str, Program], images: list[torch.Tensor], call: int, fails: bool
) -> None:
    def wrong(number: int, outputs: dict[str, Any]) -> None:
        if number == call and fails:
            raise RuntimeError("on purpose")
        if number == call:
            outputs["z"] = torch.full_like(outputs["z"], torch.nan)

    reasons: list[Fact] = []

    def fall_back(reason: Fact) -> PyTorchVideoEncoder:
        reasons.append(reason)
        return in_pytorch(spec)

    engines = Engines(programs, wrong)
    encoder = EngineVideoEncoder(opened(engines), fall_back, scale=4)
    for _ in range(2):
        assert torch.equal(encoder.latents(images, 17), in_pytorch(spec).latents(images, 17))
    assert [reason.code for reason in reasons] == [
        "execution.engine_failed" if fails else "execution.engine_not_finite"
    ]
    # It does not run again after that.
    assert len(engines.calls) == (call if fails else 5)


def test_images_are_embedded_one_by_one(tiny: Tiny) -> None:
    program = load_program(tiny("wan2.1-flf2v"), "image_encoder", "image_encoder", device="cpu", dtype="float32")
    engines = Engines({"image_encoder": program})
    pixels = torch.cat([program.inputs((1, 1, 1), seed=seed)["pixels"] for seed in (1, 2)])
    embeds = EngineImageModel(opened(engines), no_fallback)(pixels)
    assert embeds.shape == (2, 5, 24)
    assert not torch.equal(embeds[0], embeds[1])
    for one, alone in zip(embeds, pixels.split(1), strict=True):
        assert torch.equal(one, program.run(pixels=alone)["embeds"][0])


@pytest.mark.parametrize(("architecture", "given"), [("wan2.2-ti2v-5b", [700.0, 700.0]), ("wan2.1", [700.0])])
def test_a_scalar_timestep_becomes_as_many_as_the_engine_takes(
    tiny: Tiny, architecture: str, given: list[float]
) -> None:
    spec = tiny(architecture)
    program = load_program(spec, "transformer", "transformer", device="cpu", dtype="float32")
    engines = Engines({"transformer": program})
    denoiser = EngineDenoiser(opened(engines), no_fallback, timesteps=spec.timesteps)
    inputs = program.inputs((2, 4, 4))
    denoiser(inputs["latents"], torch.tensor(700.0), inputs["text_embeds"])
    assert engines.calls[0]["timestep"].tolist() == given
