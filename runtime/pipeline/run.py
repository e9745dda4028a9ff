"""Run a job from plan to MP4: build engines, encode, denoise, decode, interpolate, upscale, save. Each emits events.

The command line, the worker processes and the tests call `run_job`.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypedDict

import numpy as np
from typing_extensions import Unpack

from runtime.core.cancel import Cancel, CancelledError, PausedError
from runtime.core.errors import BadResultError
from runtime.core.events import Cancelled, Failed, Paused, Planned, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import FINISHERS
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.history_file import HistoryFile, measure_attention
from runtime.pipeline.metrics import Metrics
from runtime.pipeline.oom_retry import with_oom_retry
from runtime.pipeline.preprocessing import make_control_frames
from runtime.pipeline.previews import Previews
from runtime.pipeline.run_context import Emit, RunContext
from runtime.pipeline.section_stages import encode_section_images, finished_parts, join_sections, make_sections
from runtime.pipeline.segment_stages import finished_segments, make_segments
from runtime.pipeline.stages import decode_and_save, denoise_latents, encode_given, encode_prompt
from runtime.planner import interpolation, preprocessing, upscaling
from runtime.video.interpolation import check_interpolator
from runtime.video.mp4 import check_output, sweep

logger = logging.getLogger(__name__)


class JobOptions(TypedDict, total=False):
    """What a job may have besides its plan.

    Attributes:
        history: receives the job's timings and memory if it succeeds.
        checkpoints: where the job's progress is saved and resumed from; kept when the job ends. Without it, the job
            cannot be resumed.
        job_id: written into the video's metadata.
        on_frames: called with frames before they are encoded, (n, height, width, 3) uint8; starts again with the first
            frame if memory runs out while decoding.
    """

    history: HistoryFile | None
    checkpoints: CheckpointFolder | None
    job_id: str | None
    on_frames: Callable[[np.ndarray], None] | None


def run_job(
    plan: ExecutionPlan,
    spec: ModelSpec,
    emit: Emit,
    cancel: Cancel,
    residency: Residency,
    **options: Unpack[JobOptions],
) -> None:
    """Make the video. The last event is exactly one of `VideoSaved`, `Failed`, `Cancelled` and `Paused`; never raises.

    Args:
        plan: from `planner.resolve.resolve`, for `spec`.
        emit: called with each event, on this thread.
        cancel: checked at each stage, step and chunk, and ten times a second while an engine is built.
        residency: holds loaded components, also between jobs if the plan keeps them.
    """
    history = options.get("history")
    try:
        emit(Planned(plan=plan))
        with (
            Metrics(plan.components["transformer"].device, residency) as metrics,
            RunContext(plan, spec, emit, cancel, residency, metrics, options.get("checkpoints")) as context,
        ):
            saved = _generate(context, options)
        if history is not None and context.counts_for_history:
            try:
                _add_to_history(history, plan, context, saved)
            except Exception:  # the video is saved nevertheless
                logger.exception("The job could not be added to the history")
    except CancelledError:
        emit(Cancelled())
    except PausedError:
        emit(Paused(step=context.step, of=plan.total_steps))
    except Exception as error:
        failed = Failed.because_of(error)
        if failed.internal:
            logger.exception("The job failed")
        emit(failed)
    else:
        emit(saved)


def _generate(context: RunContext, options: JobOptions) -> VideoSaved:
    plan, history = context.plan, options.get("history")
    job_id, on_frames = options.get("job_id"), options.get("on_frames")
    check_output(plan.output, *plan.video_size, plan.video_frames, plan.crf, plan.sound_format)
    if plan.interpolation > 1 and plan.interpolator == "minterpolate":
        check_interpolator()
    sweep(plan.output.parent)
    for warning in context.plan.warnings:
        context.warn(warning)
    context.resume()
    context.build_engines()
    if context.conditioning is None and plan.preprocessor is not None:
        with_oom_retry(context, partial(make_control_frames, context))
    context.load_ahead()
    if context.conditioning is None:
        conditioning, section = with_oom_retry(context, partial(encode_prompt, context)), None
        if context.spec.section is not None:
            conditioning, section = with_oom_retry(context, partial(encode_section_images, context, conditioning))
        else:
            conditioning = with_oom_retry(context, partial(encode_given, context, conditioning))
        context.record_conditioning(conditioning, section)
    if history is not None:
        measure_attention(context.plan, context.spec, history)
    previews, files = Previews(context.spec, context.plan, context.residency.cache_dir), context.section_files
    if files is not None:
        in_sections = context.spec.section is not None
        _denoise(context, partial(make_sections if in_sections else make_segments, context, previews, files))
        parts = finished_parts(context) if in_sections else finished_segments(context)
        saved = with_oom_retry(context, partial(join_sections, context, files, parts, job_id, on_frames))
        # The plan's calls are those of all sections.
        context.counts_for_history = context.counts_for_history and not saved.continues
        return saved
    _denoise(context, partial(denoise_latents, context, previews))
    return with_oom_retry(context, partial(decode_and_save, context, previews, job_id, on_frames))


def _denoise(context: RunContext, work: Callable[[], None]) -> None:
    """Denoise; if float16 overflows in PyTorch too after block engines failed, repeat the step in another precision."""
    while True:
        try:
            with_oom_retry(context, work)
            return
        except BadResultError:
            if not context.leave_float16():
                raise
        # Outside of the handler: the exception's frames reference memory that is needed now.
        context.counts_for_history = False
        context.residency.free()


def _add_to_history(history: HistoryFile, planned: ExecutionPlan, context: RunContext, saved: VideoSaved) -> None:
    """Add the job to the history, with the encode stage, and what runs by itself in others, by component."""
    timings, peaks = dict(saved.timings), dict(context.metrics.stage_peaks)
    for (stage, name), (seconds, peak) in context.metrics.parts.items():
        timings[name], peaks[name] = seconds, peak
        timings[stage] -= seconds
    for name, (seconds, peak) in context.metrics.encoders.items():
        timings[name], peaks[name] = seconds, peak
    if not FINISHERS.isdisjoint(context.plan.components):
        # It has their memory too.
        peaks.pop("decode", None)
    history.add_job(planned, context.plan, context.spec, timings, peaks, loaded=context.metrics.loaded)
    loaded = context.metrics.loaded
    if context.plan.interpolation > 1:
        seconds = timings["interpolate"]
        history.add([interpolation.run_of(context.plan, context.spec, history.machine, seconds, loaded=loaded)])
    if context.plan.upscaling is not None:
        seconds = timings["upscale"]
        history.add([upscaling.run_of(context.plan, context.spec, history.machine, seconds, loaded=loaded)])
    if context.preprocess_seconds:
        history.add([preprocessing.run_of(context.plan, history.machine, context.preprocess_seconds, loaded=loaded)])
    if context.compiled:
        history.add_compilation(context.plan, context.spec, context.compiled_seconds, context.compiled_graphs)
