"""The whole job on one page: plan in, MP4 out, every step told by an event.

The command line, the web app's worker and the tests all call `run_job`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np

from runtime.core.cancel import Cancel, CancelledError, PausedError
from runtime.core.errors import TandemError
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
from runtime.pipeline.diagnosis import degenerate_clip
from runtime.pipeline.history import HistoryFile
from runtime.pipeline.metrics import Clock, PeakMemory
from runtime.pipeline.oom_retry import with_oom_retry
from runtime.pipeline.previews import Previews
from runtime.pipeline.result import facts, outcome
from runtime.pipeline.run_context import Emit, RunContext, wants_guidance
from runtime.pipeline.sampling import Conditioning, decode, denoise, get_noise, may_stop
from runtime.pipeline.scheduler_state import restore
from runtime.video.degenerate_clip import Detector
from runtime.video.encode import VideoWriter, check_target, sweep

logger = logging.getLogger(__name__)

# Less is what finding compiled code in memory takes.
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
    look: Callable[[np.ndarray], None] | None = None,
) -> None:
    """Make the video. Ends in exactly one of `VideoSaved`, `Failed`, `Cancelled`, or in `Paused`; raises nothing.

    Args:
        plan: from `planner.resolve.resolve`, for `spec`.
        emit: called with each event, on this thread.
        cancel: checked at each stage, step and chunk, and ten times a second while an engine is built.
        residency: holds loaded components, between jobs too where the plan says so.
        history: remembers what the job took, if it ends well.
        checkpoints: where the job is kept as it goes, and taken up from if an earlier run of it left something; they
            stay when it ends. Without, an interrupted job is lost.
        job_id: what the job is called; the video names it.
        look: sees the frames before they are encoded, (n, height, width, 3) uint8 each time; again from the first if
            memory ran out while they were decoded.
    """
    try:
        emit(Planned(plan=plan))
        with PeakMemory(plan.components["transformer"].device, residency.group_manager) as peak:
            clock = Clock(residency, peak)
            with RunContext(plan, spec, emit, cancel, residency, clock, checkpoints) as context:
                context.look = look
                saved = _generate(context, peak, job_id, history)
            if history is not None and context.straight:
                try:
                    _note(history, context, plan, saved.timings, peak.by_stage)
                except Exception:  # the video is saved all the same
                    logger.exception("What the job took could not be noted")
    except CancelledError:
        emit(Cancelled())
    except PausedError:
        emit(Paused(step=context.step, of=plan.steps))
    except TandemError as error:
        emit(Failed.because_of(error))
    except Exception as error:
        logger.exception("The job failed")
        emit(Failed.because_of(error))
    else:
        emit(saved)


def _note(
    history: HistoryFile,
    context: RunContext,
    planned: ExecutionPlan,
    timings: Mapping[str, float],
    peaks: Mapping[str, int],
) -> None:
    """Remember what the job took; a prompt that was known already says nothing of the text encoder."""
    if not context.read_anew:
        timings = {name: seconds for name, seconds in timings.items() if name != "encode"}
        peaks = {name: size for name, size in peaks.items() if name != "encode"}
    history.note(planned, context.plan, context.spec, timings, peaks)
    if context.compiled_seconds > _COMPILED_SECONDS and context.plan.speed.compiled:
        history.note_compiling(context.plan, context.spec, context.compiled_seconds)


def _generate(context: RunContext, peak: PeakMemory, job_id: str | None, history: HistoryFile | None) -> VideoSaved:
    check_target(context.plan.output)
    sweep(context.plan.output.parent)
    for message in context.plan.warnings:
        context.warn(Fact("text", {"what": message, "remedy": ""}))
    context.resume_from_checkpoint()
    context.get_engines(_parts_ahead(context))
    if context.conditioning is None:
        context.read(with_oom_retry(context, partial(_read_prompt, context)))
    if history is not None:
        measure_attention(context.plan, context.spec, history, history.machine)
    previews = Previews(context.spec, context.plan)
    with_oom_retry(context, partial(_denoise, context, previews))
    return with_oom_retry(context, partial(_save, context, previews, peak, job_id))


def _read_prompt(context: RunContext) -> Conditioning:
    plan = context.plan
    texts = [plan.prompt, plan.negative_prompt] if wants_guidance(plan) else [plan.prompt]
    read = _read_before(context, texts)
    if None in read:
        context.doing = ("load", "text_encoder")
        with context.residency.text_encoder(context.spec, context) as encoder, context.clock.stage("encode"):
            context.begin("encode", "text_encoder")
            read = [encoder.encode(text) if known is None else known for text, known in zip(texts, read, strict=True)]
        _remember(context, texts, read)
    else:
        context.begin("encode", "text_encoder")
        context.read_anew = False
    positive, negative = read[0], read[1] if len(read) > 1 else None
    assert positive is not None
    _warn_of_text(positive, "prompt", context.warn)
    if negative is not None and plan.negative_prompt != context.spec.defaults.negative_prompt:
        _warn_of_text(negative, "negative prompt", context.warn)
    device = context.plan.components["text_encoder"].device
    return Conditioning(positive.embeds.to(device), negative.embeds.to(device) if negative else None)


def _read_before(context: RunContext, texts: list[str]) -> list[TextEncoding | None]:
    """Return what is known of texts that were read in earlier jobs."""
    prompts, part = context.residency.prompts, context.plan.components["text_encoder"]
    # An engine that is damaged or slow is found out only where it runs.
    if prompts is None or part.engines:
        return [None for _ in texts]
    return [prompts.find(context.spec, part, text) for text in texts]


def _remember(context: RunContext, texts: list[str], read: list[TextEncoding | None]) -> None:
    prompts, part = context.residency.prompts, context.plan.components["text_encoder"]
    if prompts is None or part.engines:
        return
    for text, encoding in zip(texts, read, strict=True):
        if encoding is not None:
            prompts.keep(context.spec, part, text, encoding)


def _denoise(context: RunContext, previews: Previews) -> None:
    """Take the steps that are not done yet."""
    context.cancel.check_pause()
    context.doing = ("denoise", "transformer")
    assert context.conditioning is not None
    scheduler, steps = context.schedule()
    reached = context.reached
    if reached is None or (reached.scheduler is None and reached.steps < len(steps)):
        reached = context.reach(0, get_noise(context.plan), scheduler)
    if reached.scheduler is not None:
        restore(scheduler, reached.scheduler)

    @contextmanager
    def expert(name: str) -> Iterator[Denoiser]:
        context.doing = ("load", name)
        with context.residency.denoiser(context.spec, context, name) as denoiser:
            context.begin("denoise", name)
            held = [
                part for part in context.plan.components if context.residency.holds(context.spec, context.plan, part)
            ]
            idle = {*context.plan.components} - {"vae"} - {step.expert for step in steps}
            with reading(next_files(context.spec, context.plan, name, {*held, *idle})):
                yield denoiser

    with context.clock.stage("denoise"):
        rest = denoise(
            reached.latents, steps, scheduler, context.conditioning, expert, context.cancel, start=reached.steps
        )
        for done in rest:
            stopping = may_stop(steps, done.index + 1)
            if stopping:
                context.reach(done.index + 1, done.latents, scheduler)
            preview = previews.of_latents(done.estimate)
            context.emit(
                StepDone(
                    step=done.index + 1, of=len(steps), seconds=done.seconds, part=done.step.expert, preview=preview
                )
            )
            context.keep(steps, done.seconds, reached=stopping)


def _save(context: RunContext, previews: Previews, peak: PeakMemory, job_id: str | None) -> VideoSaved:
    """Decode the frames and write the MP4."""
    context.cancel.check_pause()
    assert context.reached is not None
    plan, detector = context.plan, Detector()
    context.doing = ("load", "vae")
    previews.begin_again()
    with VideoWriter(plan.output, plan.width, plan.height, plan.fps) as writer:
        with context.residency.video_decoder(context.spec, context) as decoder, context.clock.stage("decode"):
            context.begin("decode", "vae")
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
                if context.look is not None:
                    context.look(frames)
                written += len(frames)
                context.emit(FramesDecoded(frames=written, of=plan.frames, preview=previews.of_frames(frames)))
        if detector.fault is not None:
            raise degenerate_clip(detector.fault, context.plan)
        with context.clock.stage("mux"):
            context.emit(StageStarted(stage="save"))
            writer.close_stream()
        context.cancel.check()
        saved = outcome(context, peak)
        writer.finish(plan.prompt, facts(saved, job_id))
    return saved


def _parts_ahead(context: RunContext) -> set[str]:
    """Return the components that have work to do yet."""
    _, steps = context.schedule()
    first = {"text_encoder"} if context.conditioning is None else set()
    return first | {step.expert for step in steps[context.step :]} | {"vae"}


def _warn_of_text(encoding: TextEncoding, name: str, warn: Callable[[Fact], None]) -> None:
    if encoding.unknown_words:
        warn(Fact("pipeline.unknown_words", {"words": encoding.unknown_words, "field": name}))
    if encoding.cut:
        warn(Fact("pipeline.text_cut", {"field": name}))
