"""Run a job from plan to MP4; every step emits an event.

The command line, the worker processes and the tests call `run_job`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np

from runtime.core.cancel import Cancel, CancelledError, PausedError
from runtime.core.events import Cancelled, Failed, FramesDecoded, Paused, Planned, StageStarted, StepDone, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.execution.denoiser import Denoiser
from runtime.execution.prefetch import next_files, reading
from runtime.execution.residency import Residency
from runtime.execution.text_encoder import TextEncoding
from runtime.models.spec import ModelSpec
from runtime.pipeline.attention_speed import measure_attention
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.degenerate_clip import Detector, degenerate_clip
from runtime.pipeline.history import HistoryFile
from runtime.pipeline.metrics import Clock, PeakMemory
from runtime.pipeline.oom_retry import with_oom_retry
from runtime.pipeline.previews import Previews
from runtime.pipeline.result import metadata_of, result_of
from runtime.pipeline.run_context import Emit, RunContext, wants_guidance
from runtime.pipeline.sampling import Conditioning, decode, denoise, get_noise, may_stop
from runtime.pipeline.scheduler_state import restore
from runtime.video.mp4 import VideoWriter, check_target, sweep

logger = logging.getLogger(__name__)

# Finding compiled code in memory takes less.
_COMPILED_SECONDS = 0.5


def run_job(
    plan: ExecutionPlan,
    spec: ModelSpec,
    emit: Emit,
    cancel: Cancel,
    residency: Residency,
    history: HistoryFile | None = None,
    checkpoints: CheckpointFolder | None = None,
    job_id: str | None = None,
    on_frames: Callable[[np.ndarray], None] | None = None,
) -> None:
    """Make the video. The last event is exactly one of `VideoSaved`, `Failed`, `Cancelled` and `Paused`; never raises.

    Args:
        plan: from `planner.resolve.resolve`, for `spec`.
        emit: called with each event, on this thread.
        cancel: checked at each stage, step and chunk, and ten times a second while an engine is built.
        residency: holds loaded components, also between jobs if the plan keeps them.
        history: receives the job's timings and memory, if it ends well.
        checkpoints: where the job's progress is saved and resumed from; kept when the job ends. Without it, the job
            cannot be resumed.
        job_id: written into the video's metadata.
        on_frames: called with frames before they are encoded, (n, height, width, 3) uint8; starts again with the first
            frame if memory runs out while decoding.
    """
    try:
        emit(Planned(plan=plan))
        with PeakMemory(plan.components["transformer"].device, residency.group_manager) as peak:
            clock = Clock(residency, peak)
            with RunContext(plan, spec, emit, cancel, residency, clock, checkpoints, on_frames) as context:
                saved = _generate(context, peak, job_id, history)
            if history is not None and context.representative:
                try:
                    _add_to_history(history, context, plan, saved.timings, peak.by_stage)
                except Exception:  # the video is saved nevertheless
                    logger.exception("The job could not be added to the history")
    except CancelledError:
        emit(Cancelled())
    except PausedError:
        emit(Paused(step=context.step, of=plan.steps))
    except Exception as error:
        failed = Failed.because_of(error)
        if failed.internal:
            logger.exception("The job failed")
        emit(failed)
    else:
        emit(saved)


def _generate(context: RunContext, peak: PeakMemory, job_id: str | None, history: HistoryFile | None) -> VideoSaved:
    check_target(context.plan.output)
    sweep(context.plan.output.parent)
    for warning in context.plan.warnings:
        context.warn(warning)
    context.resume()
    context.build_engines(_remaining_components(context))
    if context.conditioning is None:
        context.record_conditioning(with_oom_retry(context, partial(_encode_prompt, context)))
    if history is not None:
        measure_attention(context.plan, context.spec, history, history.machine)
    previews = Previews(context.spec, context.plan)
    with_oom_retry(context, partial(_denoise, context, previews))
    return with_oom_retry(context, partial(_decode_and_save, context, previews, peak, job_id))


def _encode_prompt(context: RunContext) -> Conditioning:
    plan = context.plan
    texts = [plan.prompt, plan.negative_prompt] if wants_guidance(plan) else [plan.prompt]
    prompts, part = context.residency.prompts, plan.components["text_encoder"]
    # Not with an engine: whether it is damaged is found only when it runs.
    cache = prompts if prompts is not None and not part.engines else None
    found = [None if cache is None else cache.find(context.spec, part, text) for text in texts]
    encoded = [one for one in found if one is not None]
    if len(encoded) < len(texts):
        context.current = ("load", "text_encoder")
        with context.residency.text_encoder(context.spec, context) as encoder, context.clock.stage("encode"):
            context.begin_stage("encode", "text_encoder")
            encoded = [encoder.encode(text) if one is None else one for text, one in zip(texts, found, strict=True)]
        if cache is not None:
            for text, one in zip(texts, encoded, strict=True):
                cache.keep(context.spec, part, text, one)
    else:
        context.begin_stage("encode", "text_encoder")
        context.text_encoded = False
    positive, negative = encoded[0], encoded[1] if len(encoded) > 1 else None
    _warn_of_text(positive, "prompt", context.warn)
    if negative is not None and plan.negative_prompt != context.spec.defaults.negative_prompt:
        _warn_of_text(negative, "negative prompt", context.warn)
    device = context.plan.components["text_encoder"].device
    return Conditioning(positive.embeds.to(device), negative.embeds.to(device) if negative else None)


def _denoise(context: RunContext, previews: Previews) -> None:
    """Run the remaining steps."""
    context.cancel.check_pause()
    context.current = ("denoise", "transformer")
    assert context.conditioning is not None
    scheduler, steps = context.schedule()
    reached = context.reached
    if reached is None or (reached.scheduler is None and reached.steps < len(steps)):
        reached = context.record_step(0, get_noise(context.plan), scheduler)
    if reached.scheduler is not None:
        restore(scheduler, reached.scheduler)

    @contextmanager
    def open_expert(name: str) -> Iterator[Denoiser]:
        context.current = ("load", name)
        with context.residency.denoiser(context.spec, context, name) as denoiser:
            context.begin_stage("denoise", name)
            held = [
                part for part in context.plan.components if context.residency.holds(context.spec, context.plan, part)
            ]
            idle = {*context.plan.components} - {"vae"} - {step.expert for step in steps}
            with reading(next_files(context.spec, context.plan, name, {*held, *idle})):
                yield denoiser

    with context.clock.stage("denoise"):
        remaining = denoise(
            reached.latents, steps, scheduler, context.conditioning, open_expert, context.cancel, start=reached.steps
        )
        for done in remaining:
            number, resumable = done.index + 1, may_stop(steps, done.index + 1)
            if resumable:
                context.record_step(number, done.latents, scheduler)
            preview = previews.of_latents(done.estimate)
            part = done.step.expert
            context.emit(StepDone(step=number, of=len(steps), seconds=done.seconds, part=part, preview=preview))
            context.checkpoint_step(steps, done.seconds, resumable=resumable)


def _decode_and_save(context: RunContext, previews: Previews, peak: PeakMemory, job_id: str | None) -> VideoSaved:
    """Decode the frames and write the MP4."""
    context.cancel.check_pause()
    assert context.reached is not None
    plan, detector = context.plan, Detector()
    context.current = ("load", "vae")
    previews.forget_frames()
    with VideoWriter(plan.output, plan.width, plan.height, plan.fps, plan.crf) as writer:
        with context.residency.video_decoder(context.spec, context) as decoder, context.clock.stage("decode"):
            context.begin_stage("decode", "vae")
            written = 0
            chunks = decode(
                decoder,
                context.reached.latents,
                plan.strategy.decode_chunk,
                context.cancel,
                plan.strategy.decode_tile,
                part=lambda: context.plan.components["vae"],
            )
            for chunk in chunks:
                frames = chunk.numpy()
                writer.write(frames)
                detector.inspect(frames)
                if context.on_frames is not None:
                    context.on_frames(frames)
                written += len(frames)
                context.emit(FramesDecoded(frames=written, of=plan.frames, preview=previews.of_frames(frames)))
        if detector.fault is not None:
            raise degenerate_clip(detector.fault, context.plan)
        with context.clock.stage("mux"):
            context.emit(StageStarted(stage="save"))
            writer.close_stream()
        context.cancel.check()
        saved = result_of(context, peak)
        writer.finish(plan.prompt, metadata_of(saved, job_id))
    return saved


def _remaining_components(context: RunContext) -> set[str]:
    """Return the components that still have work to do."""
    _, steps = context.schedule()
    first = {"text_encoder"} if context.conditioning is None else set()
    return first | {step.expert for step in steps[context.step :]} | {"vae"}


def _warn_of_text(encoding: TextEncoding, field: str, warn: Callable[[Fact], None]) -> None:
    if encoding.unknown_words:
        warn(Fact("pipeline.unknown_words", {"words": encoding.unknown_words, "field": field}))
    if encoding.cut:
        warn(Fact("pipeline.text_cut", {"field": field}))


def _add_to_history(
    history: HistoryFile,
    context: RunContext,
    planned: ExecutionPlan,
    timings: Mapping[str, float],
    peaks: Mapping[str, int],
) -> None:
    """Add the job to the history; without the encode stage if the prompt cache had the texts."""
    if not context.text_encoded:
        timings = {name: seconds for name, seconds in timings.items() if name != "encode"}
        peaks = {name: size for name, size in peaks.items() if name != "encode"}
    history.note(planned, context.plan, context.spec, timings, peaks)
    if context.compiled_seconds > _COMPILED_SECONDS and context.plan.speed.compiled:
        history.note_compiling(context.plan, context.spec, context.compiled_seconds)
