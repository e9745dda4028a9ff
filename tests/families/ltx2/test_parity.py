"""LTX-2 against diffusers' pipelines: same seed, same latents of video and sound, same frames and samples."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.utils import DEFAULT_IMAGE_CRF, DISTILLED_SIGMA_VALUES

from runtime.core.cancel import Cancel
from runtime.core.plan import ExecutionPlan
from runtime.core.request import SOUND_DECODERS
from runtime.execution.components import Denoiser, StreamDenoiser
from runtime.execution.residency import Residency
from runtime.families.ltx2.spec import DISTILLED_LEVELS
from runtime.models.given_frames import images_of
from runtime.models.images import find_image
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec, StreamGuidance
from runtime.models.weights import load_scheduler
from runtime.pipeline.sampling import (
    Conditioning,
    GivenFrames,
    Guidance,
    Step,
    decode,
    denoise,
    get_noise,
    get_schedule,
)
from runtime.pipeline.stages import image_latents
from runtime.pipeline.stream_guidance import StreamSampling
from tests.image_files import saved, with_saved
from tests.plans import Alone, tiny_plan
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
# Of each kind alone and all together; each stream has its own scales.
KINDS = {
    "none": (1.0, StreamGuidance(sound_scale=1.0)),
    "classifier-free": (4.0, StreamGuidance(sound_scale=6.0)),
    "skipping": (1.5, StreamGuidance(sound_scale=1.5, skipped=(1.0, 0.5), skipping_blocks=(1,))),
    "isolating": (1.5, StreamGuidance(sound_scale=1.5, isolated=(3.0, 2.0))),
    "rescaled": (4.0, StreamGuidance(sound_scale=6.0, rescaled=(0.7, 0.4))),
    "all": (
        3.0,
        StreamGuidance(
            sound_scale=7.0, skipped=(1.0, 0.5), skipping_blocks=(0, 1), isolated=(3.0, 2.0), rescaled=(0.7, 0.4)
        ),
    ),
}


# What the versions share of sampling is compared with one of them.
OF_VERSIONS = [*(("ltx-2.3", kind) for kind in KINDS), ("ltx-2", "none"), ("ltx-2", "all")]


class Made(NamedTuple):
    """Latents of both streams, normalised; frames in 8 bits; samples of the sound."""

    video: torch.Tensor
    sound: torch.Tensor
    frames: np.ndarray
    samples: torch.Tensor


def make(spec: ModelSpec, plan: ExecutionPlan) -> Made:
    """Return what a plan makes."""
    job = Alone(plan)
    with Residency() as residency:
        video, values = sound = _denoised(spec, plan, residency)
        with residency.video_decoder(spec, job) as decoder:
            frames = torch.cat(list(decode(decoder, video, plan.strategy.decode_chunk, Cancel()))).numpy()
        for name in SOUND_DECODERS:
            with residency.sound_decoder(spec, job, name) as decode_sound:
                values = decode_sound(values)
        return Made(*sound, frames, values)


def latents_of(spec: ModelSpec, plan: ExecutionPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents of both streams of a plan."""
    with Residency() as residency:
        return _denoised(spec, plan, residency)


def _denoised(spec: ModelSpec, plan: ExecutionPlan, residency: Residency) -> tuple[torch.Tensor, torch.Tensor]:
    job, sampling = Alone(plan), StreamSampling.of(plan, spec)
    assert sampling is not None

    def embeds(text: str) -> torch.Tensor:
        with residency.text_encoder(spec, job) as encoder:
            states = encoder.encode(text).embeds
        with residency.text_connector(spec, job) as connect:
            return connect(states)

    @contextmanager
    def expert(first: Step) -> Iterator[Denoiser]:
        with residency.denoiser(spec, job, first.expert) as denoiser:
            cast("StreamDenoiser", denoiser).see(sampling.streams, sampling.guidance.skipping_blocks)
            yield denoiser

    given = None
    if plan.images:
        with residency.video_encoder(spec, job) as vae:
            given = GivenFrames.of(spec, image_latents(vae, spec, plan, images_of(plan)), plan.images)
    scheduler = load_scheduler(spec, plan.shift)
    latents = get_noise(plan)
    steps = get_schedule(plan, scheduler, None, spec.noise.sigmas(plan.steps), spec.noise.by_size)
    negative = embeds(plan.negative_prompt) if plan.guidance_scale > 1 else None
    conditioning = Conditioning(embeds(plan.prompt), negative, given)
    guidance = Guidance.of(plan)
    for done in denoise(
        latents, steps, scheduler, conditioning, expert, Cancel(), guidance=guidance, sampling=sampling
    ):
        latents = done.latents
    return sampling.streams.split(latents)


def by_pipeline(spec: ModelSpec, plan: ExecutionPlan, guidance: StreamGuidance, **more: Any) -> Made:
    """Return what diffusers makes of a plan."""
    kind: Any = LTX2Pipeline if plan.image is None else LTX2ImageToVideoPipeline
    pipeline = kind.from_pretrained(spec.directory, dtype=torch.float32)
    if guided := bool({*plan.images} - {"image"}):
        # As Gemma's tokenizer has it; this pipeline reads it before it sets it.
        pipeline.tokenizer.padding_side = "left"
        pipeline = LTX2ConditionPipeline(**pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    for block in pipeline.transformer.transformer_blocks:
        block.perturbed_attn = True
        block.attn1.set_processor(LTX2PerturbedAttnProcessor())
        block.audio_attn1.set_processor(LTX2PerturbedAttnProcessor())
    options: dict[str, Any] = {
        "prompt": plan.prompt,
        "negative_prompt": plan.negative_prompt,
        "width": plan.width,
        "height": plan.height,
        "num_frames": plan.frames,
        "frame_rate": float(plan.fps),
        "num_inference_steps": plan.steps,
        "guidance_scale": plan.guidance_scale,
        "audio_guidance_scale": guidance.sound_scale,
        "spatio_temporal_guidance_blocks": list(guidance.skipping_blocks),
        "use_cross_timestep": spec.transformer.modulated_text,  # type: ignore[attr-defined]
        "return_dict": False,
        **more,
    }
    for name, pair in (("stg_scale", "skipped"), ("modality_scale", "isolated"), ("guidance_rescale", "rescaled")):
        options[name], options[f"audio_{name}"] = getattr(guidance, pair)
    if guided:
        options["conditions"] = conditions(plan)
    elif plan.image is not None:
        options |= {"image": images_of(plan)[0], "image_crf": 0}

    vae, audio_vae = pipeline.vae, pipeline.audio_vae
    decoded: list[torch.Tensor] = []
    for decoder in (vae, audio_vae):
        decoder.decode = partial(_recorded, decoded, decoder.decode)
    frames, samples = pipeline(**options, generator=torch.Generator("cpu").manual_seed(plan.seed), output_type="np")
    video, sound = decoded
    shape = (1, -1, 1, 1, 1)
    video = (video - vae.latents_mean.view(shape)) / vae.latents_std.view(shape)
    flat = sound.transpose(1, 2).flatten(2)
    flat = (flat - audio_vae.latents_mean) / audio_vae.latents_std
    sound = flat.unflatten(2, (sound.shape[1], -1)).transpose(1, 2)
    return Made(video, sound, frames[0], samples)


def _recorded(
    given: list[torch.Tensor], decode: Callable[..., Any], latents: torch.Tensor, *more: Any, **options: Any
) -> Any:
    given.append(latents)
    return decode(latents, *more, **options)


# Of two keyframes in clips of 17 frames, 8 a second: nearest to frames 1 and 9, the first of the latent frames 1 and 2.
KEYFRAME_SECONDS = (0.2, 1.0)


def timed(images: Sequence[str]) -> dict[str, Sequence[float]]:
    """Return the times of keyframes among these images."""
    count = sum(key.startswith("keyframes") for key in images)
    return {"keyframe_seconds": KEYFRAME_SECONDS[:count]} if count else {}


def conditions(plan: ExecutionPlan) -> list[LTX2VideoCondition]:
    """Return a plan's images as diffusers takes them."""
    # Of latent frames; see `KEYFRAME_SECONDS`.
    indices = {"image": 0, "keyframes[0]": 1, "keyframes[1]": 2, "last_image": -1}
    places = [indices[key] for key in plan.images]
    return [LTX2VideoCondition(image, place, crf=0) for image, place in zip(images_of(plan), places, strict=True)]


def assert_equal(made: Made, wanted: Made) -> None:
    """Compare all that was made."""
    for name in ("video", "sound", "samples"):
        ours, theirs = getattr(made, name), getattr(wanted, name)
        assert ours.shape == theirs.shape
        assert theirs.std() > 1e-3
        assert abs(ours - theirs).max() < 1e-4, name
    assert made.frames.shape == wanted.frames.shape
    assert np.abs(made.frames / 255.0 - wanted.frames).max() < 0.6 / 255


def with_guidance(spec: ModelSpec, guidance: StreamGuidance) -> ModelSpec:
    """Return a model with other guidance."""
    assert spec.sound is not None
    assert spec.sound.latents is not None
    return replace(spec, sound=replace(spec.sound, latents=replace(spec.sound.latents, guidance=guidance)))


def planned(spec: ModelSpec, scale: float, folder: Path, **more: object) -> ExecutionPlan:
    """Return the plan of a short clip of 3 × 2 × 3 latents."""
    fields = {"negative_prompt": "blue ball", "guidance_scale": scale, "width": 96, "height": 64, "frames": 17}
    return tiny_plan(spec, folder / "x.mp4", **fields, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind"), OF_VERSIONS)
def test_video_and_sound_equal_the_pipelines(architecture: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    scale, guidance = KINDS[kind]
    spec = with_guidance(tiny(architecture), guidance)
    plan = planned(spec, scale, tmp_path)
    assert_equal(make(spec, plan), by_pipeline(spec, plan, guidance))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind"), [("ltx-2", "all"), ("ltx-2.3", "none")])
def test_a_video_from_an_image_equals_the_pipelines(architecture: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    scale, guidance = KINDS[kind]
    use = find_image(str(saved(tmp_path / "image.png", 96, 64)), "image", None, keep=False)
    spec = replace(with_guidance(tiny(architecture), guidance), image=use)
    assert spec.image_input is not None
    assert spec.image_input.crf == DEFAULT_IMAGE_CRF
    # diffusers compresses with a package that is not installed.
    spec = replace(spec, image_input=replace(spec.image_input, crf=None))
    plan = planned(spec, scale, tmp_path, image=str(use.path))
    assert_equal(make(spec, plan), by_pipeline(spec, plan, guidance))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kind", "fields"),
    [
        ("ltx-2", "none", ("image", "last_image")),
        ("ltx-2", "all", ("keyframes[0]", "keyframes[1]")),
        ("ltx-2.3", "none", ("last_image",)),
        ("ltx-2.3", "all", ("image", "keyframes[0]", "last_image")),
    ],
)
def test_a_video_through_keyframes_equals_the_pipelines(
    architecture: str, kind: str, fields: tuple[str, ...], tiny: Tiny, tmp_path: Path
) -> None:
    scale, guidance = KINDS[kind]
    spec, files = with_saved(with_guidance(tiny(architecture), guidance), fields, tmp_path, 96, 64)
    assert spec.image_input is not None
    # diffusers compresses with a package that is not installed.
    spec = replace(spec, image_input=replace(spec.image_input, crf=None))
    plan = planned(spec, scale, tmp_path, **files, **timed(fields))
    made = make(spec, plan)
    assert_equal(made, by_pipeline(spec, plan, guidance))
    # So that it would be noticed if neither used a keyframe.
    file = saved(tmp_path / "other.png", 96, 64, turned=True)
    use: Any = find_image(str(file), "last_image", None, keep=False)
    changes = {"keyframes": (use, *spec.keyframes[1:])} if spec.keyframes else {"last_image": use}
    other = make(replace(spec, **changes), plan.replace(**changes))
    assert abs(made.video - other.video).max() > 1e-3
    assert abs(made.sound - other.sound).max() > 1e-4


@pytest.mark.slow
def test_a_distilled_models_noise_levels_are_the_pipelines(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("ltx-2.3").directory, folder)
    file = folder / "scheduler" / "scheduler_config.json"
    config = {"use_dynamic_shifting": False, "shift_terminal": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    spec = read_spec(folder, "distilled")
    assert (spec.defaults.steps, spec.defaults.guidance_scale) == (8, 1.0)
    plan = planned(spec, 1.0, tmp_path, steps=8)
    _, guidance = KINDS["none"]
    assert (*DISTILLED_SIGMA_VALUES,) == DISTILLED_LEVELS
    assert_equal(make(spec, plan), by_pipeline(spec, plan, guidance, sigmas=DISTILLED_SIGMA_VALUES))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_every_input_changes_both_streams(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    """So that the comparisons with the pipelines would notice an input that neither uses."""
    spec = tiny(architecture)
    first = latents_of(spec, planned(spec, 3.0, tmp_path))
    values: list[dict[str, object]] = [{"prompt": "blue ball"}, {"fps": 16}, {"seed": 4}]
    for one in values:
        video, sound = latents_of(spec, planned(spec, 3.0, tmp_path, **one))
        assert abs(first[0] - video).max() > 1e-3, one
        assert first[1].shape != sound.shape or abs(first[1] - sound).max() > 1e-3, one
    for kind in [guidance for version, guidance in OF_VERSIONS if version == architecture]:
        video, sound = latents_of(with_guidance(spec, KINDS[kind][1]), planned(spec, 3.0, tmp_path))
        assert abs(first[0] - video).max() > 1e-3, kind
        assert abs(first[1] - sound).max() > 1e-3, kind
