"""HunyuanVideo against `diffusers.HunyuanVideoPipeline`: same seed, same latents, same frames."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline
from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video

from runtime.core.cancel import Cancel
from runtime.core.plan import ExecutionPlan
from runtime.execution.components import Denoiser
from runtime.execution.residency import Residency
from runtime.execution.text_encoder import joined
from runtime.families.hunyuan_video.vae import PyTorchVideoDecoder
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.sampling import Conditioning, Step, decode, denoise, get_noise, get_schedule
from tests.plans import Alone, tiny_plan

Tiny = Callable[[str], ModelSpec]
SLOW = pytest.mark.slow


def sample(spec: ModelSpec, plan: ExecutionPlan, residency: Residency) -> torch.Tensor:
    """Return the final latents of a plan."""
    job = Alone(plan)

    def embeds(text: str) -> torch.Tensor:
        found = []
        for name in spec.text_encoders:
            with residency.text_encoder(spec, job, name) as encoder:
                found.append(encoder.encode(text))
        return joined(found).embeds

    @contextmanager
    def expert(first: Step) -> Iterator[Denoiser]:
        with residency.denoiser(spec, job, first.expert) as denoiser:
            yield denoiser

    scheduler = load_scheduler(spec, plan.shift)
    latents = get_noise(plan)
    steps = get_schedule(plan, scheduler, spec.boundary_ratio, spec.noise.sigmas(plan.steps))
    negative = embeds(plan.negative_prompt) if plan.guidance_scale > 1 else None
    conditioning = Conditioning(embeds(plan.prompt), negative)
    for done in denoise(latents, steps, scheduler, conditioning, expert, Cancel()):
        latents = done.latents
    return latents


def by_pipeline(spec: ModelSpec, plan: ExecutionPlan, output_type: str, shift: float | None = None) -> Any:
    """Return what `HunyuanVideoPipeline` makes of a plan."""
    pipeline = HunyuanVideoPipeline.from_pretrained(spec.directory).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    if shift is not None:
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, shift=shift)
    scales = {"guidance_scale": plan.embedded_guidance}
    if plan.embedded_guidance is None:
        scales = {"true_cfg_scale": plan.guidance_scale}
    return pipeline(
        prompt=plan.prompt,
        negative_prompt=plan.negative_prompt,
        width=plan.width,
        height=plan.height,
        num_frames=plan.frames,
        num_inference_steps=plan.steps,
        generator=torch.Generator("cpu").manual_seed(plan.seed),
        output_type=output_type,
        **scales,
    ).frames


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["hunyuan-video", "hunyuan-video-cfg"])
@pytest.mark.parametrize("guidance", [6.0, 1.0])
def test_latents_equal_the_pipelines(architecture: str, guidance: float, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(architecture)
    plan = tiny_plan(spec, tmp_path / "x.mp4", negative_prompt="blue ball", guidance_scale=guidance)
    assert plan.embedded_guidance == (guidance if architecture == "hunyuan-video" else None)
    with Residency() as residency:
        latents = sample(spec, plan, residency)
    wanted = by_pipeline(spec, plan, "latent")
    assert wanted.std() > 0.1
    assert abs(latents - wanted).max() < 1e-4


def test_every_input_changes_the_latents(tiny: Tiny, tmp_path: Path) -> None:
    """So that the comparisons with the pipeline would notice an input that neither uses."""
    spec = tiny("hunyuan-video")
    values: list[dict[str, object]] = [{}, {"prompt": "blue ball"}, {"guidance_scale": 1.0}, {"shift": 2.0}]
    with Residency() as residency:
        first, *others = [sample(spec, tiny_plan(spec, tmp_path / "x.mp4", **one), residency) for one in values]
    for one, other in zip(values[1:], others, strict=True):
        assert abs(first - other).max() > 1e-3, one


def test_a_requests_shift_is_the_schedulers(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("hunyuan-video")
    plan = tiny_plan(spec, tmp_path / "x.mp4", shift=3.0)
    with Residency() as residency:
        latents = sample(spec, plan, residency)
    assert abs(latents - by_pipeline(spec, plan, "latent", shift=3.0)).max() < 1e-4


@pytest.mark.slow
def test_frames_equal_the_pipelines(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("hunyuan-video")
    plan = tiny_plan(spec, tmp_path / "x.mp4", frames=29)
    with Residency() as residency:
        latents = sample(spec, plan, residency)
        with residency.video_decoder(spec, Alone(plan)) as decoder:
            frames = torch.cat(list(decode(decoder, latents, plan.strategy.decode_chunk, Cancel()))).numpy()
    wanted = by_pipeline(spec, plan, "np")[0]
    assert frames.shape == wanted.shape == (29, 32, 64, 3)
    assert np.abs(frames / 255.0 - wanted).max() < 0.6 / 255


@pytest.mark.slow
@pytest.mark.parametrize(
    ("latent_frames", "tile"), [(1, None), (4, 4), (5, None), (6, 4), (7, None), pytest.param(11, 4, marks=SLOW)]
)
def test_groups_of_frames_equal_autoencoder_decode(
    latent_frames: int, tile: int | None, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = AutoencoderKLHunyuanVideo.from_pretrained(tiny("hunyuan-video").directory, subfolder="vae").eval().double()
    torch.manual_seed(5)
    latents = torch.randn(1, vae.config.latent_channels, latent_frames, 6, 7, dtype=torch.float64)
    if tile is not None:
        vae.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    with torch.inference_mode():
        wanted = vae.decode(latents / vae.config.scaling_factor).sample[0].permute(1, 2, 3, 0).clamp(-1, 1)

    def unused(*arguments: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("a mask of all pairs of positions")

    monkeypatch.setattr(autoencoder_kl_hunyuan_video, "prepare_causal_attention_mask", unused)
    got = torch.cat(list(PyTorchVideoDecoder(vae).frames(latents, 1, tile)))
    assert got.shape == wanted.shape
    assert wanted.std() > 0.01
    # In float64, where rounding is far below the tolerance; frames are rounded to float32.
    assert abs(got - wanted).max() < 1e-6
