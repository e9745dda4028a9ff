"""The whole job on one page: plan in, MP4 out, every step told by an event.

The command line, the web app's worker and the tests all call `run_job`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np

from runtime.components.denoiser import Denoiser
from runtime.components.prefetch import next_files, reading
from runtime.components.residency import Residency
from runtime.components.text_encoder import TextEncoding
from runtime.core.cancel import Cancel, CancelledError, PausedError
from runtime.core.errors import BadResultError, TandemError
from runtime.core.events import (
    Cancelled,
    Failed,
    FramesDecoded,
    Paused,
    Planned,
    StageStarted,
    StepDone,
    VideoSaved,
)
from runtime.core.plan import ExecutionPlan
from runtime.jobs import causes
from runtime.jobs.attention_speed import measure_attention
from runtime.jobs.checkpoint import CheckpointFolder
from runtime.jobs.course import Course, Emit, wants_guidance
from runtime.jobs.enduring import enduring
from runtime.jobs.history import HistoryFile
from runtime.jobs.measure import Clock, PeakMemory
from runtime.jobs.outcome import facts, outcome
from runtime.jobs.previews import Previews
from runtime.models.spec import ModelSpec
from runtime.pipeline.sampling import Conditioning, decode, denoise, get_noise, may_stop
from runtime.pipeline.scheduler_state import restore
from runtime.video.encode import VideoWriter, check_target, sweep
from runtime.video.nothing import Detector

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
        plan: from `manager.planner.resolve`, for `spec`.
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
        emit(Planned(plan))
        with PeakMemory(plan.components["transformer"].device, residency.crew) as peak:
            clock = Clock(residency, peak)
            with Course(plan, spec, emit, cancel, residency, clock, checkpoints) as course:
                course.look = look
                saved = _generate(course, peak, job_id, history)
            if history is not None and course.straight:
                try:
                    _note(history, course, plan, saved.timings, peak.by_stage)
                except Exception:  # the video is saved all the same
                    logger.exception("What the job took could not be noted")
    except CancelledError:
        emit(Cancelled())
    except PausedError:
        emit(Paused(course.step, plan.steps))
    except TandemError as error:
        emit(Failed(error.what, error.remedy))
    except Exception as error:  # a defect: told in one line, kept in the log
        logger.exception("The job failed")
        emit(Failed(f"Something broke inside Tandem: {error!r}", "The log has the details.", defect=True))
    else:
        emit(saved)


def _note(
    history: HistoryFile,
    course: Course,
    planned: ExecutionPlan,
    timings: Mapping[str, float],
    peaks: Mapping[str, int],
) -> None:
    """Remember what the job took; a prompt that was known already says nothing of the text encoder."""
    if not course.read_anew:
        timings = {name: seconds for name, seconds in timings.items() if name != "encode"}
        peaks = {name: size for name, size in peaks.items() if name != "encode"}
    history.note(planned, course.plan, course.spec, timings, peaks)
    if course.compiled_seconds > _COMPILED_SECONDS and course.plan.speed.compiled:
        history.note_compiling(course.plan, course.spec, course.compiled_seconds)


def _generate(course: Course, peak: PeakMemory, job_id: str | None, history: HistoryFile | None) -> VideoSaved:
    check_target(course.plan.output)
    sweep(course.plan.output.parent)
    for message in course.plan.warnings:
        course.warn(message)
    course.take_up()
    course.get_engines(_parts_ahead(course))
    if course.conditioning is None:
        course.read(enduring(course, partial(_read_prompt, course)))
    if history is not None:
        measure_attention(course.plan, course.spec, history, history.machine)
    previews = Previews(course.spec, course.plan)
    enduring(course, partial(_denoise, course, previews))
    return enduring(course, partial(_save, course, previews, peak, job_id))


def _read_prompt(course: Course) -> Conditioning:
    plan = course.plan
    texts = [plan.prompt, plan.negative_prompt] if wants_guidance(plan) else [plan.prompt]
    read = _read_before(course, texts)
    if None in read:
        course.doing = ("load", "text_encoder")
        with course.residency.text_encoder(course.spec, course) as encoder, course.clock.stage("encode"):
            course.begin("encode", "text_encoder")
            read = [encoder.encode(text) if known is None else known for text, known in zip(texts, read, strict=True)]
        _remember(course, texts, read)
    else:
        course.begin("encode", "text_encoder")
        course.read_anew = False
    positive, negative = read[0], read[1] if len(read) > 1 else None
    assert positive is not None
    _warn_of_text(positive, "prompt", course.warn)
    if negative is not None and plan.negative_prompt != course.spec.defaults.negative_prompt:
        _warn_of_text(negative, "negative prompt", course.warn)
    device = course.plan.components["text_encoder"].device
    return Conditioning(positive.embeds.to(device), negative.embeds.to(device) if negative else None)


def _read_before(course: Course, texts: list[str]) -> list[TextEncoding | None]:
    """Return what is known of texts that were read in earlier jobs."""
    prompts, part = course.residency.prompts, course.plan.components["text_encoder"]
    # An engine that is damaged or slow is found out only where it runs.
    if prompts is None or part.engines:
        return [None for _ in texts]
    return [prompts.find(course.spec, part, text) for text in texts]


def _remember(course: Course, texts: list[str], read: list[TextEncoding | None]) -> None:
    prompts, part = course.residency.prompts, course.plan.components["text_encoder"]
    if prompts is None or part.engines:
        return
    for text, encoding in zip(texts, read, strict=True):
        if encoding is not None:
            prompts.keep(course.spec, part, text, encoding)


def _denoise(course: Course, previews: Previews) -> None:
    """Take the steps that are not done yet."""
    course.cancel.check_pause()
    course.doing = ("denoise", "transformer")
    assert course.conditioning is not None
    scheduler, steps = course.schedule()
    reached = course.reached
    if reached is None or (reached.scheduler is None and reached.steps < len(steps)):
        reached = course.reach(0, get_noise(course.plan), scheduler)
    if reached.scheduler is not None:
        restore(scheduler, reached.scheduler)

    @contextmanager
    def expert(name: str) -> Iterator[Denoiser]:
        course.doing = ("load", name)
        with course.residency.denoiser(course.spec, course, name) as denoiser:
            course.begin("denoise", name)
            held = [part for part in course.plan.components if course.residency.holds(course.spec, course.plan, part)]
            idle = {*course.plan.components} - {"vae"} - {step.expert for step in steps}
            with reading(next_files(course.spec, course.plan, name, {*held, *idle})):
                yield denoiser

    with course.clock.stage("denoise"):
        rest = denoise(
            reached.latents, steps, scheduler, course.conditioning, expert, course.cancel, start=reached.steps
        )
        for done in rest:
            stopping = may_stop(steps, done.index + 1)
            if stopping:
                course.reach(done.index + 1, done.latents, scheduler)
            preview = previews.of_latents(done.estimate)
            course.emit(StepDone(done.index + 1, len(steps), done.seconds, done.step.expert, preview))
            course.keep(steps, done.seconds, reached=stopping)


def _save(course: Course, previews: Previews, peak: PeakMemory, job_id: str | None) -> VideoSaved:
    """Decode the frames and write the MP4."""
    course.cancel.check_pause()
    assert course.reached is not None
    plan, detector = course.plan, Detector()
    course.doing = ("load", "vae")
    previews.begin_again()
    with VideoWriter(plan.output, plan.width, plan.height, plan.fps) as writer:
        with course.residency.video_decoder(course.spec, course) as decoder, course.clock.stage("decode"):
            course.begin("decode", "vae")
            written = 0
            chunks = decode(
                decoder,
                course.reached.latents,
                plan.decode_chunk,
                course.cancel,
                plan.decode_tile,
                part=lambda: course.plan.components["vae"],
            )
            for chunk in chunks:
                frames = chunk.numpy()
                writer.write(frames)
                detector.look(frames)
                if course.look is not None:
                    course.look(frames)
                written += len(frames)
                course.emit(FramesDecoded(written, plan.frames, previews.of_frames(frames)))
        if detector.fault is not None:
            raise BadResultError(causes.shown(detector.fault), causes.remedy(detector.fault, course.plan))
        with course.clock.stage("mux"):
            course.emit(StageStarted("save"))
            writer.close_stream()
        course.cancel.check()
        saved = outcome(course, peak)
        writer.finish(plan.prompt, facts(saved, job_id))
    return saved


def _parts_ahead(course: Course) -> set[str]:
    """Return the components that have work to do yet."""
    _, steps = course.schedule()
    first = {"text_encoder"} if course.conditioning is None else set()
    return first | {step.expert for step in steps[course.step :]} | {"vae"}


def _warn_of_text(encoding: TextEncoding, name: str, warn: Callable[[str], None]) -> None:
    if encoding.unknown_words:
        words = ", ".join(f"“{word}”" for word in encoding.unknown_words)
        warn(f"The model does not know {words}: the {name} was read without.")
    if encoding.cut:
        warn(f"The {name} is longer than the model reads: its end was cut off.")
