"""Loop, encoder and decoder against `diffusers.WanPipeline`: same seed, same latents, same frames."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig

from runtime.core.cancel import Cancel
from runtime.core.plan import ExecutionPlan
from runtime.execution.components import Denoiser
from runtime.execution.residency import Residency
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.sampling import Conditioning, Guidance, Step, decode, denoise, get_noise, get_schedule
from tests.plans import Alone, tiny_plan
from tests.tiny_models import ARCHITECTURES
from tests.wan_pipeline import load_pipeline, run_pipeline


def sample(spec: ModelSpec, plan: ExecutionPlan, residency: Residency) -> torch.Tensor:
    """Return the final latents of a plan."""
    job = Alone(plan)
    with residency.text_encoder(spec, job) as encoder:
        positive = encoder.encode(plan.prompt).embeds
        negative = encoder.encode(plan.negative_prompt).embeds if plan.guidance_scale > 1 else None

    @contextmanager
    def expert(first: Step) -> Iterator[Denoiser]:
        with residency.denoiser(spec, job, first.expert) as denoiser:
            yield denoiser

    scheduler = load_scheduler(spec)
    latents = get_noise(plan)
    steps = get_schedule(plan, scheduler, spec.boundary_ratio)
    for done in denoise(
        latents, steps, scheduler, Conditioning(positive, negative), expert, Cancel(), guidance=Guidance.of(plan)
    ):
        latents = done.latents
    return latents


def by_wan_pipeline(
    spec: ModelSpec, plan: ExecutionPlan, output_type: str, cache: FirstBlockCacheConfig | MagCacheConfig | None = None
) -> Any:
    """Return what `WanPipeline` makes of a plan; of one with one transformer also with a step cache."""
    pipeline = load_pipeline(spec)
    if cache is not None:
        pipeline.transformer.enable_cache(cache)
    return run_pipeline(pipeline, plan, output_type)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "guidance"),
    [
        *((architecture, (scale, scale)) for architecture in ARCHITECTURES for scale in (4.0, 1.0)),
        ("wan2.2-a14b", (4.0, 2.5)),
        ("wan2.2-a14b", (4.0, 1.0)),
    ],
)
def test_latents_equal_wan_pipelines(
    architecture: str, guidance: tuple[float, float], tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    spec = tiny(architecture)
    scales = {"guidance_scale": guidance[0]}
    if spec.experts > 1:
        scales["guidance_scale_2"] = guidance[1]
    plan = tiny_plan(spec, tmp_path / "x.mp4", negative_prompt="blue ball", **scales)
    with Residency() as residency:
        latents = sample(spec, plan, residency)
    wanted = by_wan_pipeline(spec, plan, "latent")
    assert wanted.std() > 0.1
    assert abs(latents - wanted).max() < 1e-4


@pytest.mark.slow
def test_the_shipped_models_latents_and_frames_equal_wan_pipelines(tmp_path: Path) -> None:
    spec = find("diorama", tmp_path)
    prompt = "a red boat sails left on a calm sea at sunset"
    plan = tiny_plan(spec, tmp_path / "x.mp4", prompt=prompt, negative_prompt="rain", width=128, height=96, steps=5)
    with Residency() as residency:
        latents = sample(spec, plan, residency)
        with residency.video_decoder(spec, Alone(plan)) as decoder:
            frames = torch.cat(list(decode(decoder, latents, plan.strategy.decode_chunk, Cancel()))).numpy()
    assert abs(latents - by_wan_pipeline(spec, plan, "latent")).max() < 1e-4
    wanted = by_wan_pipeline(spec, plan, "np")[0]
    assert frames.shape == wanted.shape == (9, 96, 128, 3)
    assert np.abs(frames / 255.0 - wanted).max() < 0.6 / 255


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decoding_in_chunks_equals_autoencoder_decode(
    architecture: str, tiny: Callable[[str], ModelSpec], subtests: pytest.Subtests
) -> None:
    vae = AutoencoderKLWan.from_pretrained(tiny(architecture).directory, subfolder="vae").eval()
    torch.manual_seed(5)
    latents = torch.randn(1, vae.config.z_dim, 6, 4, 5)
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    with torch.inference_mode():
        wanted = vae.decode(latents * std + mean).sample[0].permute(1, 2, 3, 0)
    for chunk in (1, 2, 3, 8):
        with subtests.test(chunk=chunk):
            pieces = list(PyTorchVideoDecoder(vae).frames(latents, chunk))
            assert [len(piece) for piece in pieces][:1] == [1]
            got = torch.cat(pieces)
            assert got.shape == wanted.shape
            assert np.abs(got.numpy() - wanted.numpy()).max() < 1e-5
