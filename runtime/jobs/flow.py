"""The whole job on one page: plan in, MP4 out, every step told by an event.

The command line, the web app's worker and the tests all call `run_job`.
"""

import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import diffusers
import torch

from runtime import __version__
from runtime.components.denoiser import Denoiser
from runtime.components.memory import ran_out
from runtime.components.residency import Residency
from runtime.components.text_encoder import TextEncoding
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import TandemError
from runtime.core.events import (
    Cancelled,
    Failed,
    FramesDecoded,
    Planned,
    StageStarted,
    StepDone,
    VideoSaved,
)
from runtime.core.plan import ExecutionPlan
from runtime.jobs.course import Course, Emit
from runtime.jobs.history import HistoryFile
from runtime.jobs.measure import Clock, PeakMemory
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.sampling import Conditioning, decode, denoise, get_noise, get_schedule
from runtime.video.encode import VideoWriter, check_target
from runtime.video.preview import encode_preview

logger = logging.getLogger(__name__)

# Previews are drawn at most so often: one takes 10 ms, as long as several steps of a small model on a GPU.
_PREVIEW_SECONDS = 0.25


def run_job(
    plan: ExecutionPlan,
    spec: ModelSpec,
    emit: Emit,
    cancel: Cancel,
    residency: Residency,
    history: HistoryFile | None = None,
) -> None:
    """Make the video. Ends in exactly one of `VideoSaved`, `Failed`, `Cancelled`; raises nothing.

    Args:
        plan: from `manager.planner.resolve`, for `spec`.
        emit: called with each event, on this thread.
        cancel: checked at each stage, step and chunk, and ten times a second while an engine is built.
        residency: holds loaded components, between jobs too where the plan says so.
        history: remembers what the job took, if it ends well.
    """
    emit(Planned(plan))
    try:
        with PeakMemory(plan.components["transformer"].device) as peak, Course(plan, spec, emit, cancel) as course:
            saved = _generate(course, spec, emit, cancel, residency, peak)
            if history is not None:
                history.note(plan, course.plan, spec, saved.timings, peak.by_stage)
    except CancelledError:
        emit(Cancelled())
    except TandemError as error:
        emit(Failed(error.what, error.remedy))
    except Exception as error:
        full = ran_out(error)
        if full is None:  # a defect: told in one line, kept in the log
            logger.exception("The job failed")
            emit(Failed(f"Something broke inside Tandem: {error!r}", "The log has the details.", defect=True))
        else:
            logger.exception("Out of memory")
            residency.free()
            emit(_out_of_memory(full, plan))
    else:
        emit(saved)


def _generate(
    course: Course, spec: ModelSpec, emit: Emit, cancel: Cancel, residency: Residency, peak: PeakMemory
) -> VideoSaved:
    plan, clock = course.plan, Clock(residency, peak)
    check_target(plan.output)
    for message in plan.warnings:
        course.warn(message)
    course.get_engines(residency)

    with residency.text_encoder(spec, course) as encoder, clock.stage("encode"):
        emit(StageStarted("encode"))
        guided = any(scale > 1 for scale in (plan.guidance_scale, plan.guidance_scale_2 or 0))
        positive = encoder.encode(plan.prompt)
        negative = encoder.encode(plan.negative_prompt) if guided else None
    _warn_of_text(positive, "prompt", course.warn)
    if negative is not None and plan.negative_prompt != spec.defaults.negative_prompt:
        _warn_of_text(negative, "negative prompt", course.warn)
    conditioning = Conditioning(positive.embeds, negative.embeds if negative else None)
    cancel.check()

    @contextmanager
    def expert(name: str) -> Iterator[Denoiser]:
        with residency.denoiser(spec, course, name) as denoiser:
            emit(StageStarted("denoise", name))
            yield denoiser

    with clock.stage("denoise"):
        scheduler = load_scheduler(spec)
        steps = get_schedule(plan, scheduler, spec.boundary_ratio)
        latents = get_noise(plan)
        shown = -_PREVIEW_SECONDS
        for done in denoise(latents, steps, scheduler, conditioning, expert, cancel):
            latents = done.latents
            preview = None
            if time.monotonic() - shown >= _PREVIEW_SECONDS:
                preview, shown = _preview(done.estimate, spec, plan), time.monotonic()
            emit(StepDone(done.index + 1, len(steps), done.seconds, done.step.expert, preview))

    with VideoWriter(plan.output, plan.width, plan.height, plan.fps) as writer:
        with residency.video_decoder(spec, course) as decoder, clock.stage("decode"):
            emit(StageStarted("decode", "vae"))
            written = 0
            for frames in decode(decoder, latents, plan.decode_chunk, cancel, plan.decode_tile):
                writer.write(frames.numpy())
                written += len(frames)
                emit(FramesDecoded(written, plan.frames))
        with clock.stage("mux"):
            emit(StageStarted("save"))
            writer.close_stream()
        cancel.check()
        saved = VideoSaved(
            video=plan.output,
            request=plan.request_json(),
            plan=course.plan.to_json(),
            timings=clock.timings(),
            load_seconds=round(clock.load_seconds, 3),
            peak_memory_bytes=peak.bytes(),
            warnings=tuple(course.warnings),
        )
        writer.finish(plan.prompt, _facts(saved))
    return saved


def _warn_of_text(encoding: TextEncoding, name: str, warn: Callable[[str], None]) -> None:
    if encoding.unknown_words:
        words = ", ".join(f"“{word}”" for word in encoding.unknown_words)
        warn(f"The model does not know {words}: the {name} was read without.")
    if encoding.cut:
        warn(f"The {name} is longer than the model reads: its end was cut off.")


def _preview(estimate: torch.Tensor, spec: ModelSpec, plan: ExecutionPlan) -> bytes | None:
    if spec.latent_rgb is None:
        return None
    factors = torch.tensor(spec.latent_rgb.factors, device=estimate.device)
    rgb = torch.einsum("cfhw,cr->fhwr", estimate[0], factors) + torch.tensor(
        spec.latent_rgb.bias, device=estimate.device
    )
    return encode_preview(rgb.cpu().numpy(), round(1000 * plan.seconds_of_video / plan.latent_shape[2]))


def _facts(saved: VideoSaved) -> dict[str, Any]:
    """Return what the MP4 says about itself."""
    facts = {key: value for key, value in saved.result_json().items() if key != "video"}
    versions = {
        "tandem": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"tandem": {**facts, "versions": versions, "created": created}}


def _out_of_memory(full: str, plan: ExecutionPlan) -> Failed:
    in_vram = full == "VRAM" and plan.components["transformer"].device.startswith("cuda")
    where = "video memory (VRAM)" if in_vram else "memory (RAM)"
    return Failed(
        f"This machine ran out of {where}.", "Ask for a smaller size or fewer frames, or close other programs."
    )
