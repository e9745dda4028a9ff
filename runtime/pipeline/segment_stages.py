"""The stages of a clip that is made in segments: each starts with the last frames of the segment before.

Equal to diffusers' `WanAnimatePipeline` for the same generator. A segment is denoised as a whole clip is, and counts
as a stage of `SamplingState`. Its frames are stored without loss before the checkpoint that begins the next one, as
those of sections are (`section_stages`). What is in memory does not grow with the number of segments.
"""

from collections.abc import Iterator

import numpy as np
import torch

from runtime.core.events import FramesDecoded, SectionDone
from runtime.execution.decoded_frames import as_bytes
from runtime.models.sections import Segment
from runtime.pipeline.previews import Previews
from runtime.pipeline.run_context import RunContext
from runtime.pipeline.section_files import PENDING, SectionFiles
from runtime.pipeline.stages import begin_segment, clip_latents, denoise_stage, encode_segment


def make_segments(context: RunContext, previews: Previews, files: SectionFiles) -> None:
    """Make and store the remaining segments, until the last one or a request to finish early."""
    cancel, segments = context.cancel, context.spec.segments_of(context.plan.frames)
    cancel.check_pause()
    # The encoder's calls are those of all segments.
    context.counts_for_history = False
    first = 0 if context.sampling is None else context.sampling.stage
    context.segments_done = first
    if cancel.finishing and first and context.step == context.steps_before(first):
        return
    files.check_disk(sum(len(segments[number].frames) for number in range(first, segments.count)))
    for number in range(first, segments.count):
        segment = segments[number]
        denoise_stage(context, previews, number)
        previews.forget_frames()
        before = _store(context, previews, files, segment)
        context.segments_done = number + 1
        made = segment.frames
        context.emit(SectionDone(section=number + 1, of=segments.count, start=made.start, frames=len(made)))
        if segment.last:
            return
        with context.metrics.stage("mux"):
            files.grow([*finished_segments(context), (PENDING, 0)], np.empty((0, 0, 0, 3), np.uint8))
        assert context.conditioning is not None
        begin_segment(context, encode_segment(context, context.conditioning, number + 1, before), number + 1)
        if cancel.finishing:
            return


def finished_segments(context: RunContext) -> list[tuple[int, int]]:
    """Return the (number, frames) of each finished segment, in the order of time."""
    segments = context.spec.segments_of(context.plan.frames)
    return [(number, len(segments[number].frames)) for number in range(context.segments_done)]


def _store(context: RunContext, previews: Previews, files: SectionFiles, segment: Segment) -> torch.Tensor:
    """Decode and store a segment; return the frames that the next one starts with.

    Returns:
        (frames, height, width, 3), float32 in -1 to 1, on the CPU.
    """
    assert context.spec.control_input is not None
    kept, last = context.spec.control_input.overlap, torch.empty(0)

    def decoded() -> Iterator[np.ndarray]:
        nonlocal last
        start = segment.frames.start - segment.given
        for frames in _decoded(context):
            last = torch.cat([last, frames])[-kept:] if len(last) else frames[-kept:].clone()
            # Not the frames of the segment before, and none after the end.
            skipped = max(segment.frames.start - start, 0)
            array = as_bytes(frames, context.plan.components["vae"]).numpy()
            array, start = array[skipped : max(segment.frames.stop - start, 0)], start + len(frames)
            if len(array):
                count = min(start, segment.frames.stop)
                preview = previews.of_frames(array, last=count == context.plan.frames)
                context.emit(FramesDecoded(frames=count, of=context.plan.frames, preview=preview))
                yield array

    files.write(segment.index, decoded())
    return last


def _decoded(context: RunContext) -> Iterator[torch.Tensor]:
    """Yield the frames of the segment that is denoised, (n, height, width, 3), float32 in -1 to 1, on the CPU."""
    assert context.sampling is not None
    plan, strategy = context.plan, context.plan.strategy
    context.current = ("load", "vae")
    with context.residency.video_decoder(context.spec, context) as decoder, context.metrics.stage("decode"):
        context.begin_stage("decode", "vae")
        latents = clip_latents(plan, context.sampling.latents)
        for frames in decoder.frames(latents, strategy.decode_chunk, strategy.decode_tile):
            context.cancel.check_pause()
            yield frames.cpu() if frames.dtype != torch.uint8 else frames.cpu().float() / 127.5 - 1
