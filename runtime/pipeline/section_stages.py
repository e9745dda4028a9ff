"""The stages of a video that is made in sections: encode the images, make section after section, join them in an MP4.

Each finished section is stored without loss before the checkpoint that counts it. What is in memory does not grow with
the number of sections.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import cast

import numpy as np
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import BadResultError, OutputError
from runtime.core.events import FramesDecoded, SectionDone, StepDone, VideoSaved
from runtime.execution.components import ImageSampler, SectionDecoder, SectionDenoiser
from runtime.execution.decoded_frames import as_bytes
from runtime.models.given_frames import images_of
from runtime.models.sections import Sections
from runtime.models.spec import IMAGE_ENCODER, VAE_ENCODER
from runtime.pipeline.latent_colors import DecodedColors
from runtime.pipeline.previews import Previews
from runtime.pipeline.run_context import RunContext
from runtime.pipeline.sampling import Conditioning, GivenFrames
from runtime.pipeline.section_files import PENDING, SectionFiles
from runtime.pipeline.section_sampling import (
    Decode,
    SectionedVideo,
    SectionProgress,
    StepResult,
    conditioning_of,
    finished_sections,
    pending_frames,
    sections_of,
)
from runtime.pipeline.stages import pixels_of
from runtime.pipeline.video_output import VideoOutput


def encode_section_images(context: RunContext, conditioning: Conditioning) -> tuple[Conditioning, SectionProgress]:
    """Return the conditioning with the plan's images, and the progress before the first section.

    The images' latents are drawn by the generator that then draws the noise of the sections.
    """
    plan, spec = context.plan, context.spec
    images = images_of(plan, context.cancel.check)
    context.current = ("load", IMAGE_ENCODER)
    with context.residency.image_encoder(spec, context) as encoder, context.metrics.encoder(IMAGE_ENCODER):
        context.begin_stage("encode", IMAGE_ENCODER)
        # The last image's embeddings are not used.
        embeds = encoder.encode(images[:1])
    generator = torch.Generator("cpu").manual_seed(plan.seed)
    context.current = ("load", VAE_ENCODER)
    with context.residency.video_encoder(spec, context) as vae, context.metrics.encoder(VAE_ENCODER):
        context.begin_stage("encode", VAE_ENCODER)
        sampler = cast("ImageSampler", vae)
        tile = plan.strategy.decode_tile
        latents = [sampler.sample(pixels_of(image)[None], generator, tile) for image in images]
    device = plan.components["transformer"].device
    given_frames = GivenFrames("sections", torch.cat(latents, dim=2).to(device))
    result = replace(conditioning, given=given_frames, image_embeds=embeds.to(device))
    return result, SectionProgress.start(sections_of(plan, spec), given_frames.latents[:, :, :1], generator)


def make_sections(context: RunContext, previews: Previews, files: SectionFiles) -> None:
    """Make and store the remaining sections, until the last one or a request to finish early."""
    context.cancel.check_pause()
    plan, spec, cancel = context.plan, context.spec, context.cancel
    assert context.conditioning is not None
    assert context.section is not None
    sections = sections_of(plan, spec)
    conditioning = conditioning_of(plan, spec, context.conditioning)
    video = SectionedVideo(sections, conditioning, context.schedule()[0], plan.steps, plan.seed)
    files.check_disk(sum(len(sections[number].frames) for number in range(context.section.sections, sections.count)))
    pending: torch.Tensor | None = None
    if not _stops(cancel, context.section):
        results = finished_sections(
            video,
            context.section,
            partial(_denoiser, context),
            partial(_decoder, context, previews),
            cancel,
            partial(_record_step, context, previews),
        )
        for result in results:
            previews.forget_frames()
            with context.metrics.stage("mux"):
                frames = _bytes(context, result.frames)
                files.write(result.section.index, [frames])
            context.record_section(result.progress)
            pending = result.pending
            if not result.section.last:
                with context.metrics.stage("mux"):
                    files.grow(_parts(sections, result.section.index + 1), _bytes(context, pending))
            # The first of several that are made from the end has none that are final.
            preview_frames = frames if len(frames) else _bytes(context, result.pending)
            _report(context, sections, previews.of_frames(preview_frames, last=result.section.last))
            if cancel.finishing:
                break
            del result, frames, preview_frames
    if context.section.sections < sections.count:
        if pending is None:
            with _decoder(context, previews) as decode:
                pending = pending_frames(sections, context.section, decode)
        files.write(PENDING, [_bytes(context, pending)])


def _stops(cancel: Cancel, progress: SectionProgress) -> bool:
    """Whether a request to finish early came between two sections."""
    return cancel.finishing and progress.sections > 0 and progress.steps == 0


def _bytes(context: RunContext, frames: torch.Tensor) -> np.ndarray:
    """Return blended frames as (frames, height, width, 3) uint8."""
    array: np.ndarray = as_bytes(frames.clamp(-1.0, 1.0), context.plan.components["vae"]).numpy()
    return array


def _report(context: RunContext, sections: Sections, preview: bytes | None) -> None:
    """Emit that a section is finished."""
    assert context.section is not None
    done = context.section.sections
    span = sections[done - 1].frames
    count = sum(len(sections[number].frames) for number in range(done))
    context.emit(FramesDecoded(frames=count, of=context.plan.frames, preview=preview))
    context.emit(SectionDone(section=done, of=sections.count, start=span.start, frames=len(span)))


def _record_step(context: RunContext, previews: Previews, done: StepResult) -> None:
    context.section = done.progress
    preview = previews.of_latents(done.estimate)
    step, of = context.step, context.plan.total_steps
    context.emit(StepDone(step=step, of=of, seconds=done.seconds, part="transformer", preview=preview))
    context.checkpoint_section_step(done.seconds)


@contextmanager
def _denoiser(context: RunContext) -> Iterator[SectionDenoiser]:
    context.current = ("load", "transformer")
    with (
        context.residency.denoiser(context.spec, context, "transformer") as denoiser,
        context.metrics.stage("denoise"),
    ):
        context.begin_stage("denoise", "transformer")
        yield cast("SectionDenoiser", denoiser)


@contextmanager
def _decoder(context: RunContext, previews: Previews) -> Iterator[Decode]:
    context.current = ("load", "vae")
    each, tile = context.spec.vae.scale_factor_temporal, context.plan.strategy.decode_tile
    with context.residency.video_decoder(context.spec, context) as decoder, context.metrics.stage("decode"):
        context.begin_stage("decode", "vae")

        def decode(latents: torch.Tensor) -> torch.Tensor:
            frames, decoded = cast("SectionDecoder", decoder).window(latents, tile=tile), DecodedColors(latents, each)
            decoded.add(_bytes(context, frames))
            previews.colors.learn(decoded)
            return frames

        yield decode


def finished_parts(context: RunContext) -> list[tuple[int, int]]:
    """Return the (number, frames) of each part of what is finished, in the order of time."""
    assert context.section is not None
    return _parts(sections_of(context.plan, context.spec), context.section.sections)


def _parts(sections: Sections, done: int) -> list[tuple[int, int]]:
    """Return the (number, frames) of each part of a video that has `done` of its sections, in the order of time."""
    parts = [(number, len(sections[number].frames)) for number in range(done)]
    if done < sections.count:
        parts.append((PENDING, len(sections[done - 1].pending)))
    return parts[::-1] if sections.inverted else parts


def join_sections(
    context: RunContext,
    files: SectionFiles,
    parts: Sequence[tuple[int, int]],
    job_id: str | None,
    on_frames: Callable[[np.ndarray], None] | None,
) -> VideoSaved:
    """Encode the stored sections in the order of time, and write the MP4.

    Args:
        parts: (number, frames) of each section, in the order of time.
        job_id, on_frames: see `run.run_job`.

    Raises:
        BadResultError: if the clip is degenerate; nothing is written, and the job's progress is removed.
        OutputError: if a stored section is damaged; likewise.
    """
    with VideoOutput(context, job_id, on_frames) as output:
        try:
            frames = files.joined(parts)
            upscaling = context.plan.upscaling
            while batch := list(islice(frames, 1 if upscaling is None else upscaling.batch)):
                context.cancel.check_pause()
                output.write(np.stack(batch))
            return output.finish()
        except (BadResultError, OutputError) as error:
            # The stored frames are of no use.
            if isinstance(error, BadResultError) or error.fact.code == "video.part_damaged":
                context.start_over()
            raise
