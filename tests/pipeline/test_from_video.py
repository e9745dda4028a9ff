"""Videos made from videos: latents equal `WanVideoToVideoPipeline`'s, and jobs resume, retry and are killed."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanVideoToVideoPipeline
from PIL import Image

from runtime.core.cancel import Cancel
from runtime.core.events import Cancelled, Failed, Paused, Resumed, StageStarted, StepDone, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.families.wan.vae_encoder import PyTorchVideoEncoder
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.models.videos import with_video
from runtime.models.weights import load_scheduler
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.run import run_job
from runtime.pipeline.stages import video_frames
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import read_metadata
from tests.pipeline.killing import killed
from tests.pipeline.test_out_of_memory import outs
from tests.pipeline.test_resume import run, steps_of
from tests.pipeline.test_run import frames_of
from tests.plans import Alone, machine, with_strategy
from tests.video.test_reader import H264, make

Tiny = Callable[[str], ModelSpec]


class Clip(NamedTuple):
    """A plan with its model."""

    plan: ExecutionPlan
    spec: ModelSpec


def planned(spec: ModelSpec, folder: Path, **values: Any) -> Clip:
    """Plan a tiny clip that is made from a video of its size, of which a copy is in the folder."""
    source = folder / "source.mp4"
    if not source.exists():
        make(source, *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=12:duration=2"))
    fields: dict[str, Any] = {"prompt": "a red boat", "negative_prompt": "blue ball", "width": 64, "height": 32}
    fields |= {"frames": 9, "steps": 6, "seed": 3, "fps": 8, "guidance_scale": 4.0, "strength": 0.7}
    request = GenerationRequest.from_mapping(fields | {"video": str(source)} | values)
    spec = with_video(spec, request, folder, folder)
    return Clip(resolve(request, spec, PlanningContext(machine(), folder / "x.mp4")), spec)


def final_latents(clip: Clip, folder: Path) -> torch.Tensor:
    """Run a job; return the latents of its last checkpoint."""
    events = run(clip.plan, clip.spec, folder)
    assert isinstance(events[-1], VideoSaved), events[-1]
    saved = CheckpointFolder(folder).load(clip.spec, clip.plan)
    assert saved is not None and saved.sampling is not None and saved.step == clip.plan.total_steps
    return saved.sampling.latents


def pictures(plan: ExecutionPlan) -> list[Image.Image]:
    """Return the frames that a job reads."""
    return [Image.fromarray(frame.numpy()) for frame in video_frames(plan)]


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "guidance"), [(0.7, 4.0), (0.17, 1.0), (1.0, 4.0)])
def test_latents_equal_wan_video_to_video_pipelines(
    strength: float, guidance: float, tiny: Tiny, tmp_path: Path
) -> None:
    clip = planned(tiny("wan2.1"), tmp_path, strength=strength, guidance_scale=guidance)
    parts = WanPipeline.from_pretrained(clip.spec.directory).components
    names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    pipeline = WanVideoToVideoPipeline(**{name: parts[name] for name in names}).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    plan = clip.plan
    wanted = pipeline(
        video=pictures(plan),
        prompt=plan.prompt,
        negative_prompt=plan.negative_prompt,
        height=plan.height,
        width=plan.width,
        num_inference_steps=plan.steps,
        guidance_scale=plan.guidance_scale,
        strength=strength,
        generator=torch.Generator("cpu").manual_seed(plan.seed),
        output_type="latent",
    ).frames
    made = final_latents(clip, tmp_path / "job")
    assert wanted.std() > 0.1 and made.shape == wanted.shape
    assert abs(made - wanted).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "steps"), [(0.9, {"transformer": 2, "transformer_2": 3}), (0.5, None)])
def test_two_experts_denoise_a_video_as_diffusers_modules_do(
    strength: float, steps: dict[str, int] | None, tiny: Tiny, tmp_path: Path
) -> None:
    """diffusers has no pipeline for this: the loop is that of `WanPipeline`, from the noise of the strength."""
    clip = planned(tiny("wan2.2-a14b"), tmp_path, strength=strength, shift=5.0)
    plan, spec = clip.plan, clip.spec
    assert sum(plan.expert_steps.values()) == plan.denoising_steps
    assert plan.expert_steps == steps or (steps is None and plan.expert_steps["transformer"] == 0)
    pipeline = WanPipeline.from_pretrained(spec.directory).to(torch.float32)
    scheduler = load_scheduler(spec, plan.shift)
    scheduler.set_timesteps(plan.steps)
    timesteps = scheduler.timesteps[plan.skipped_steps :]
    pixels = torch.stack([torch.from_numpy(np.array(one)) for one in pictures(plan)]).permute(3, 0, 1, 2)[None]
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std)
    )
    with torch.no_grad():
        clean = (pipeline.vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode() - mean) / std
        noise = torch.randn(clean.shape, generator=torch.Generator("cpu").manual_seed(plan.seed))
        latents = scheduler.add_noise(clean, noise, timesteps[:1])
        texts = pipeline.encode_prompt(plan.prompt, plan.negative_prompt, max_sequence_length=512)
        for timestep in timesteps:
            high = timestep >= pipeline.config.boundary_ratio * 1000
            expert = pipeline.transformer if high else pipeline.transformer_2
            both = [expert(latents, timestep[None], text, return_dict=False)[0] for text in texts]
            scale = plan.guidance_scale if high else plan.guidance_scale_2
            assert scale is not None
            velocity = both[1] + scale * (both[0] - both[1])
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
    assert abs(final_latents(clip, tmp_path / "job") - latents).max() < 1e-4


@pytest.mark.slow
def test_a_video_in_patches_is_encoded_as_autoencoder_encode_does(tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(tiny("wan2.2-ti2v-5b"), tmp_path)
    vae = WanPipeline.from_pretrained(clip.spec.directory).vae.float()
    pixels = torch.stack([torch.from_numpy(np.array(one)) for one in pictures(clip.plan)]).permute(3, 0, 1, 2)[None]
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        wanted = (vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode() - mean) / std
    with Residency() as residency, residency.video_encoder(clip.spec, Alone(clip.plan)) as encoder:
        made = encoder.video_latents(video_frames(clip.plan), None, Cancel().check)
    assert abs(made - wanted).max() < 1e-5
    assert isinstance(run(clip.plan, clip.spec, None)[-1], VideoSaved)


@pytest.mark.slow
def test_full_strength_is_text_to_video(tmp_path: Path) -> None:
    spec = find("diorama", tmp_path)
    clip = planned(spec, tmp_path, strength=1.0, guidance_scale=1.0, prompt="a blue boat on the sea")
    text = resolve(clip.plan.request.replace(video=None), spec, PlanningContext(machine(), tmp_path / "text.mp4"))
    # The schedule begins at a noise level of 0.999999.
    made = final_latents(clip, tmp_path / "job")
    assert abs(made - final_latents(Clip(text, spec), tmp_path / "text")).max() < 1e-3


@pytest.mark.slow
def test_a_job_resumes_and_survives_kills_after_the_file_is_gone(tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(tiny("wan2.2-a14b"), tmp_path)
    (tmp_path / "source.mp4").unlink()
    plan, spec = with_strategy(clip.plan, keep_loaded=False), clip.spec
    assert isinstance(run(plan, spec, tmp_path / "whole")[-1], VideoSaved)
    wanted, steps = frames_of(plan.output), plan.total_steps
    assert steps == 4
    metadata = read_metadata(plan.output)
    assert metadata["images"]["video"]["thumbnail"].startswith("data:image/webp;base64,")
    assert metadata["request"]["video"] == f"sha256:{plan.video.digest}/source.mp4" if plan.video else False
    plan.output.unlink()
    for stop, name in (
        (lambda event: isinstance(event, StageStarted) and event.part == "vae_encoder", "encode"),
        (lambda event: isinstance(event, StepDone) and event.step == 2, "denoise"),
    ):
        assert isinstance(run(plan, spec, tmp_path / "paused", stop=stop)[-1], Paused), name
    events = run(plan, spec, tmp_path / "paused")
    assert isinstance(events[-1], VideoSaved) and frames_of(plan.output) == wanted
    assert Resumed(step=2, of=steps) in events and steps_of(events) == [3, 4]
    assert "vae_encoder" not in {event.part for event in events if isinstance(event, StageStarted)}
    # The text encoder, the VAE's encoder, and a transformer: each begins with loading.
    for event, count in (("StageStarted", 4), ("StepDone", 2)):
        plan.output.unlink()
        assert killed(spec, plan, tmp_path / "killed", event=event, count=count) == -9
        events = run(plan, spec, tmp_path / "killed")
        assert isinstance(events[-1], VideoSaved) and frames_of(plan.output) == wanted
        CheckpointFolder(tmp_path / "killed").clear()


def starve_encoding(patch: pytest.MonkeyPatch, numbers: Collection[int] = (1,)) -> None:
    """Let memory run out some of the times that a video is encoded, counted from 1."""
    encode, calls = PyTorchVideoEncoder.video_latents, 0

    def starving(*inputs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in numbers:
            raise torch.OutOfMemoryError("on purpose")
        return encode(*inputs)

    patch.setattr(PyTorchVideoEncoder, "video_latents", starving)


@pytest.mark.slow
def test_memory_cancelling_and_files_that_are_gone(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = planned(tiny("wan2.1"), tmp_path)
    assert isinstance(run(clip.plan, clip.spec, None)[-1], VideoSaved)
    wanted, encode = frames_of(clip.plan.output), PyTorchVideoEncoder.video_latents
    starve_encoding(monkeypatch)
    events = run(clip.plan, clip.spec, None)
    assert [(out.stage, out.component, out.retried) for out in outs(events)] == [("encode", "vae_encoder", True)]
    assert isinstance(events[-1], VideoSaved) and frames_of(clip.plan.output) == wanted

    cancel, seen = Cancel(), list[Any]()

    def cancelling(*inputs: Any) -> torch.Tensor:
        cancel.request()
        return encode(*inputs)

    monkeypatch.setattr(PyTorchVideoEncoder, "video_latents", cancelling)
    with Residency() as residency:
        run_job(clip.plan, clip.spec, seen.append, cancel, residency)
    assert isinstance(seen[-1], Cancelled)
    assert not any(isinstance(event, StepDone) for event in seen)

    assert clip.plan.video is not None
    longer = clip.plan.replace(frames=25, latent_shape=(1, 16, 7, 4, 8))
    for plan, code in ((longer, "source.shorter"), (clip.plan, "source.gone")):
        if code == "source.gone":
            clip.plan.video.path.unlink()
        failed = run(plan, clip.spec, None)[-1]
        assert isinstance(failed, Failed) and not failed.internal and failed.fact.code == code


@pytest.mark.slow
@pytest.mark.parametrize("step_cache", ["first-block:0.9", "magcache:0.2", "taylorseer:2"])
def test_step_caches_count_the_steps_that_run(step_cache: str, tiny: Tiny, tmp_path: Path) -> None:
    clip = planned(find("diorama", tmp_path), tmp_path, steps=20, step_cache=step_cache, guidance_scale=1.0)
    plan = clip.plan
    assert (plan.denoising_steps, len(plan.computed)) == (14, 14)
    if not step_cache.startswith("first-block"):
        assert sum(plan.computed) < 14
    events = run(plan, clip.spec, tmp_path / "job")
    assert isinstance(events[-1], VideoSaved) and steps_of(events) == list(range(1, 15))
