"""The VAE's exportable steps equal diffusers' decoder for any number of latent frames per call."""

from collections.abc import Callable

import pytest
import torch
from diffusers import AutoencoderKLWan

from runtime.engines.component_programs import CACHE
from runtime.engines.programs import load_program
from runtime.models.spec import ModelSpec
from tests.engines.conftest import relative

FRAMES = 8


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["wan2.1", "wan2.2-ti2v-5b"])
def test_they_equal_diffusers(tiny: Callable[[str], ModelSpec], architecture: str, subtests: pytest.Subtests) -> None:
    spec = tiny(architecture)
    vae = AutoencoderKLWan.from_pretrained(spec.directory / "vae").eval()
    first, following = (
        load_program(spec, "vae", name, device="cpu", dtype="float32") for name in ("vae_first", "vae_next")
    )
    latents = torch.randn(1, spec.vae.z_dim, FRAMES, 4, 6, generator=torch.Generator().manual_seed(0))
    shape = (1, -1, 1, 1, 1)
    mean, std = torch.tensor(vae.config.latents_mean).view(shape), torch.tensor(vae.config.latents_std).view(shape)
    with torch.inference_mode():
        expected = vae.decode(latents * std + mean, return_dict=False)[0][0].permute(1, 2, 3, 0)
    for chunk in (1, 2, 3, 7):
        with subtests.test(chunk=chunk):
            step = first.run(z=latents[:, :, :1])
            frames = [step.pop("frames")]
            for start in range(1, FRAMES, chunk):
                step = following.run(z=latents[:, :, start : start + chunk], **step)
                frames.append(step.pop("frames"))
            assert [len(part) for part in frames[:2]] == [1, 4 * chunk]
            assert relative(torch.cat(frames), expected) < 1e-5
            assert all(name.startswith(CACHE) and cache.is_contiguous() for name, cache in step.items())


def test_frames_are_clamped(tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.1"), "vae", "vae_first", device="cpu", dtype="float32")
    frames = program.run(z=1e4 * torch.randn(1, 16, 1, 2, 2))["frames"]
    assert frames.abs().max() <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(tiny: Callable[[str], ModelSpec], dtype: str) -> None:
    exact, near = (
        load_program(tiny("wan2.1"), "vae", "vae_next", device="cpu", dtype=kind) for kind in ("float32", dtype)
    )
    inputs = exact.inputs((2, 4, 6))
    expected = exact.run(**inputs)["frames"]
    caches = {name: cache.to(getattr(torch, dtype)) for name, cache in inputs.items() if name.startswith(CACHE)}
    given = near.run(**inputs | caches)
    assert given["frames"].dtype is torch.float32
    assert given["cache_0"].dtype is getattr(torch, dtype)
    assert relative(given["frames"], expected) < 2e-2
