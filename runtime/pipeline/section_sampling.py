"""Sampling of FramePack's videos: section by section, each from the image and the latents of those made before.

Equal to diffusers' `HunyuanVideoFramepackPipeline` for the same generator (tests/pipeline/test_section_sampling.py).
What is kept between sections does not grow with their number. It knows nothing of devices, files or events.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import BadResultError
from runtime.core.plan import ExecutionPlan
from runtime.core.sparse_attention import exact_steps
from runtime.execution.components import UNPROMPTED, SectionDenoiser, SectionInputs
from runtime.models.sections import HISTORY, HISTORY_1X, HISTORY_2X, HISTORY_4X, Section, Sections
from runtime.models.spec import ModelSpec
from runtime.models.timed_prompts import section_prompts
from runtime.pipeline.sampling import Conditioning, advanced, noise_seed

# The largest shift of the noise schedule that FramePack uses.
_MOST_SHIFT = 7.0
# Latents along each side of a token of the transformer.
_PATCH_SIZE = 2

OpenDenoiser = Callable[[], AbstractContextManager[SectionDenoiser]]
# Decodes latents, (1, channels, latent frames, height, width) as the transformer sees them, to frames, (frames, height,
# width, 3) in about -1 to 1. Values outside are not cut off, because sections blend first.
Decode = Callable[[torch.Tensor], torch.Tensor]
OpenDecoder = Callable[[], AbstractContextManager[Decode]]


@dataclass(frozen=True)
class Prompts:
    """The texts of a section, (1, text tokens, text width); see `Denoiser`.

    Attributes:
        negative: `None` without classifier-free guidance, which the published models do not need.
    """

    positive: torch.Tensor
    negative: torch.Tensor | None = None


@dataclass(frozen=True)
class SectionConditioning:
    """What a video is made from.

    Attributes:
        prompts: returns the texts of a section; sections may have their own.
        image: latents of the image that the video starts with, (1, channels, 1, height, width), float32.
        last_image: of the image that it ends with; only in inverted order.
        image_embeds: SigLIP's embeddings of the first image, (1, tokens, width).
        guidance_scale: see `SectionInputs`.
        true_guidance_scale: the scale of classifier-free guidance with a negative prompt.
    """

    prompts: Callable[[Section], Prompts]
    image: torch.Tensor
    image_embeds: torch.Tensor
    last_image: torch.Tensor | None = None
    guidance_scale: float = 6.0
    true_guidance_scale: float = 1.0


@dataclass(frozen=True)
class SectionedVideo:
    """A video to be made.

    Attributes:
        scheduler: a `diffusers.FlowMatchEulerDiscreteScheduler`, whose timesteps are set for each section.
        steps: denoising steps of each section.
        seed: of the noise that the scheduler adds, if it adds any.
    """

    sections: Sections
    conditioning: SectionConditioning
    scheduler: Any
    steps: int
    seed: int


@dataclass(frozen=True)
class SectionProgress:
    """Everything that the remaining sections need, except the conditioning; its size does not depend on their number.

    Attributes:
        sections: the number of finished sections.
        history: the latents next to the coming section, in the order of time, zeros where there are none yet,
            (1, channels, `Sections.history`, height, width), float32.
        generator: state of the noise's generator before its next noise, from `torch.Generator.get_state`.
        steps: steps done in the coming section.
        latents: its latents after these steps, (1, channels, frames, height, width), float32; `None` before its noise.
    """

    sections: int
    history: torch.Tensor
    generator: torch.Tensor
    steps: int = 0
    latents: torch.Tensor | None = None

    @classmethod
    def start(cls, sections: Sections, image: torch.Tensor, generator: torch.Generator) -> "SectionProgress":
        """Return the progress before the first section.

        Args:
            image: see `SectionConditioning`.
            generator: a CPU generator that has drawn the latents of the images.
        """
        before = sections.history if sections.inverted else sections.history - 1
        zeros = image.new_zeros((1, image.shape[1], before, *image.shape[3:]))
        history = zeros if sections.inverted else torch.cat([zeros, image], dim=2)
        return cls(0, history, generator.get_state())

    def with_noise(self, frames: int) -> "SectionProgress":
        """Return the progress with the noise of the coming section, if it has no latents yet.

        Args:
            frames: latent frames of a section.
        """
        if self.latents is not None:
            return self
        _, channels, _, height, width = self.history.shape
        generator = torch.Generator("cpu")
        generator.set_state(self.generator)
        noise = torch.randn((1, channels, frames, height, width), generator=generator, dtype=torch.float32)
        return replace(self, latents=noise.to(self.history), generator=generator.get_state())


@dataclass(frozen=True)
class StepResult:
    """The result of a denoising step.

    Attributes:
        index: the number of the step in its section, from 0.
        progress: from which sampling can be resumed after it.
        estimate: the section's clean latents as predicted at this step, (1, channels, frames, height, width), float32.
        seconds: the duration of the step.
    """

    section: Section
    index: int
    progress: SectionProgress
    estimate: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class FinishedSection:
    """A section, sampled, decoded and joined with those made before.

    The video can end with any section: `frames` of all sections and `pending` of the last one are what
    `HunyuanVideoFramepackPipeline` has by then.

    Attributes:
        progress: from which sampling can be resumed after it.
        frames: those of `Section.frames`, which no later section changes, (frames, height, width, 3) in about -1 to 1.
            In inverted order, they come before the frames of all earlier sections in time.
        pending: those of `Section.pending`, likewise.
    """

    section: Section
    progress: SectionProgress
    frames: torch.Tensor
    pending: torch.Tensor


def sections_of(plan: ExecutionPlan, spec: ModelSpec) -> Sections:
    """Return the sections of a plan's video."""
    return spec.sections_of(plan.frames)


def conditioning_of(plan: ExecutionPlan, spec: ModelSpec, encoded: Conditioning) -> SectionConditioning:
    """Return what a plan's video is made from, of what was encoded."""
    assert encoded.given is not None
    assert encoded.image_embeds is not None
    texts = section_prompts(plan.prompt, sections_of(plan, spec), plan.fps)
    embeds = dict(zip(dict.fromkeys(texts), (encoded.positive, *encoded.others), strict=True))
    image, *last = encoded.given.latents.split(1, dim=2)
    return SectionConditioning(
        prompts=lambda section: Prompts(embeds[texts[section.index]], encoded.negative),
        image=image,
        image_embeds=encoded.image_embeds,
        last_image=last[0] if last else None,
        guidance_scale=1.0 if plan.embedded_guidance is None else plan.embedded_guidance,
        true_guidance_scale=plan.guidance_scale,
    )


def finished_sections(
    video: SectionedVideo,
    progress: SectionProgress,
    open_denoiser: OpenDenoiser,
    open_decoder: OpenDecoder,
    cancel: Cancel,
    on_step: Callable[[StepResult], None] = lambda _: None,
) -> Iterator[FinishedSection]:
    """Make the remaining sections and yield each when it is decoded.

    Drop a section's frames before asking for the next one, whose sampling needs the memory.

    Args:
        progress: from `SectionProgress.start`, or from where an earlier run stopped.
        open_denoiser, open_decoder: opened for each section in turn, so that only one is in memory.
        on_step: called after each step.

    Raises:
        BadResultError: if the latents become NaN or Inf.
        CancelledError: within one step of the request.
        PausedError: before the next step.
    """
    sections, pending = video.sections, None
    if 0 < progress.sections < sections.count:
        cancel.check_pause()
        with open_decoder() as decode:
            pending = pending_frames(sections, progress, decode)
    while progress.sections < sections.count:
        section = sections[progress.sections]
        if progress.steps < video.steps:
            with open_denoiser() as denoiser:
                for step in denoise_section(video, progress, denoiser, cancel):
                    progress = step.progress
                    on_step(step)
        progress = finish_section(video, progress)
        cancel.check()
        with open_decoder() as decode:
            decoded = decode(window_latents(section, sections, progress.history))
        frames, pending = join(section, sections, decoded, pending)
        yield FinishedSection(section, progress, frames, pending)
        # Free them before the next section is sampled.
        del decoded, frames


def denoise_section(
    video: SectionedVideo, progress: SectionProgress, denoiser: SectionDenoiser, cancel: Cancel
) -> Iterator[StepResult]:
    """Run the remaining steps of the coming section and yield each one's result.

    Raises: see `finished_sections`.
    """
    section, scheduler = video.sections[progress.sections], video.scheduler
    progress = progress.with_noise(video.sections.window)
    denoiser.see(section_inputs(section, video.sections, progress.history, video.conditioning))
    prompts = video.conditioning.prompts(section)
    latents = progress.latents
    assert latents is not None
    set_timesteps(scheduler, video.steps, latents, begin=progress.steps)
    for index in range(progress.steps, video.steps):
        cancel.check_pause()
        started, timestep = time.perf_counter(), scheduler.timesteps[index]
        denoiser.begin_step(fresh=True, exact=index < exact_steps(video.steps))
        velocity = _guided(denoiser, latents, timestep, prompts, video.conditioning.true_guidance_scale, cancel)
        estimate = latents - scheduler.sigmas[index] * velocity
        latents = advanced(scheduler, velocity, timestep, latents, noise_seed(video.seed, section.index, index))
        # Reading one value waits for the device, so the measured time is the step's own.
        if not torch.isfinite(latents).all().item():
            raise BadResultError("pipeline.not_finite", step=index + 1, of=video.steps)
        progress = replace(progress, steps=index + 1, latents=latents)
        yield StepResult(section, index, progress, estimate, time.perf_counter() - started)


def finish_section(video: SectionedVideo, progress: SectionProgress) -> SectionProgress:
    """Return the progress after a section whose steps are done; the latents farthest from the next one are dropped."""
    section, sections = video.sections[progress.sections], video.sections
    assert progress.latents is not None
    if sections.inverted:
        parts = [video.conditioning.image, progress.latents] if section.last else [progress.latents]
        history = torch.cat([*parts, progress.history], dim=2)[:, :, : sections.history]
    else:
        history = torch.cat([progress.history, progress.latents], dim=2)[:, :, -sections.history :]
    return SectionProgress(section.index + 1, history.contiguous(), progress.generator)


def _guided(
    denoiser: SectionDenoiser,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    prompts: Prompts,
    scale: float,
    cancel: Cancel,
) -> torch.Tensor:
    """Return the predicted velocity, float32, with classifier-free guidance if there is a negative prompt."""
    positive = denoiser(latents, timestep, prompts.positive)
    if prompts.negative is None or scale <= 1:
        return positive.float()
    cancel.check()
    negative = denoiser(latents, timestep, prompts.negative, which=UNPROMPTED)
    return (negative + scale * (positive - negative)).float()


def section_inputs(
    section: Section, sections: Sections, history: torch.Tensor, conditioning: SectionConditioning
) -> SectionInputs:
    """Return what a section is sampled from: the nearest latents of `history` and the image.

    A last image takes the place of the nearest latents of the first section, which has none before it.
    """
    if sections.inverted:
        nearest, middle, far = history[:, :, :HISTORY].split([HISTORY_1X, HISTORY_2X, HISTORY_4X], dim=2)
    else:
        far, middle, nearest = history[:, :, -HISTORY:].split([HISTORY_4X, HISTORY_2X, HISTORY_1X], dim=2)
    if conditioning.last_image is not None and section.index == 0:
        nearest = conditioning.last_image
    return SectionInputs(
        section=section,
        clean=torch.cat([conditioning.image, nearest], dim=2),
        history_2x=middle,
        history_4x=far,
        image_embeds=conditioning.image_embeds,
        guidance_scale=conditioning.guidance_scale,
    )


def set_timesteps(scheduler: Any, steps: int, latents: torch.Tensor, begin: int = 0) -> None:
    """Set a scheduler's timesteps for a section; all sections have the same.

    Args:
        scheduler: a `diffusers.FlowMatchEulerDiscreteScheduler`.
        latents: of the section, (1, channels, frames, height, width).
        begin: steps done already.
    """
    config, tokens = scheduler.config, math.prod(latents.shape[2:]) / _PATCH_SIZE**2
    few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (most - least) / (many - few)
    shift = min(tokens * slope + (least - few * slope), math.log(_MOST_SHIFT))
    # Used by schedulers whose shift depends on the number of tokens.
    scheduler.set_timesteps(steps, device=latents.device, sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1], mu=shift)
    scheduler.set_begin_index(begin)


def window_latents(section: Section, sections: Sections, history: torch.Tensor) -> torch.Tensor:
    """Return the latents that are decoded to the frames of `Section.window`.

    Args:
        history: after the section.
    """
    window = history[:, :, : section.decoded] if sections.inverted else history[:, :, -section.decoded :]
    return window.contiguous()


def join(
    section: Section, sections: Sections, decoded: torch.Tensor, pending: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend a section's frames with the pending ones; return those of `Section.frames` and of `Section.pending`.

    Args:
        decoded: the frames of `Section.window`, (frames, height, width, 3); written over.
        pending: those that the section before left; `None` for the first.

    Returns:
        A part of `decoded`, and a copy, which can be kept without the other frames.

    Source: `HunyuanVideoFramepackPipeline._soft_append`.
    """
    if pending is not None:
        overlap = _part(section, decoded, section.blended)
        earlier, later = (overlap, pending) if sections.inverted else (pending, overlap)
        weights = torch.linspace(1, 0, sections.overlap, dtype=overlap.dtype, device=overlap.device).view(-1, 1, 1, 1)
        overlap.copy_(weights * earlier + (1 - weights) * later)
    return _part(section, decoded, section.frames), _part(section, decoded, section.pending).clone()


def pending_frames(sections: Sections, progress: SectionProgress, decode: Decode) -> torch.Tensor:
    """Return the frames that the last finished section left to blend, decoded again.

    They are not kept with the progress because they are twenty times as large. No blending is needed: the section
    before blended with the other end of the window.
    """
    section = sections[progress.sections - 1]
    decoded = decode(window_latents(section, sections, progress.history))
    return _part(section, decoded, section.pending).clone()


def _part(section: Section, decoded: torch.Tensor, frames: range) -> torch.Tensor:
    """Return some of a window's frames."""
    return decoded.narrow(0, frames.start - section.window.start if frames else 0, len(frames))
