"""The video of a job while its frames arrive: written as they are, or finished, with the plain video next to it.

Frames that are finished are interpolated, then enlarged, as far as the plan does that. Both videos have the sound.
"""

import base64
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

import numpy as np
import torch

from runtime import __version__
from runtime.core import settings
from runtime.core.errors import OutputError, TandemError
from runtime.core.events import Event, FellBack, FramesFinished, StageStarted, VideoSaved, Warned
from runtime.core.images import InputFile
from runtime.core.plan import PYTORCH, ExecutionPlan, plain_output
from runtime.core.request import INTERPOLATOR, UPSCALER
from runtime.core.sound import Sound
from runtime.engines.service import EngineService
from runtime.execution.decoded_frames import fetched
from runtime.families.interpolator.frames import NetworkInterpolator
from runtime.models.videos import open_picture
from runtime.pipeline.bad_sound import inspected
from runtime.pipeline.blank_video import Detector, blank_video_error
from runtime.pipeline.continuation import Continuation
from runtime.pipeline.interpolate import AnyInterpolator
from runtime.pipeline.loop import Loop
from runtime.pipeline.run_context import RunContext
from runtime.pipeline.upscale import FrameUpscaler
from runtime.planner.upscaling import calls_of
from runtime.upstream.libraries import diffusers
from runtime.video.images import thumbnail
from runtime.video.interpolation import FrameInterpolator
from runtime.video.mp4 import NewSound, VideoWriter
from runtime.video.sound_samples import looped


class VideoOutput:
    """Takes the frames of a job, and writes its MP4. Memory does not depend on their number.

    Use as a context manager: `write` chunks of frames, then `finish`. Leaving without that leaves no file.

    Args:
        job_id, on_frames: see `run.JobOptions`.
    """

    def __init__(self, context: RunContext, job_id: str | None, on_frames: Callable[[np.ndarray], None] | None) -> None:
        self._context, self._job_id, self._on_frames = context, job_id, on_frames
        self._detector = Detector()
        self._exit = ExitStack()
        self._interpolating = False
        self._finished = 0
        # Frames of all parts, without those of a loop.
        self._joined = 0
        plan, check = context.plan, context.cancel.check
        self._continuation = None if plan.extend is None else Continuation(plan, check)
        self._loop: Loop | None = None
        # Frames that are too few for a call of the upscaler.
        self._rest: list[np.ndarray] = []

    def __enter__(self) -> "VideoOutput":
        """Start ffmpeg, and load what the plan has for finished frames: an interpolator and an upscaler.

        Raises:
            OutputError, MachineError: see `VideoWriter`.
            ModelError: if a network cannot be loaded.
        """
        plan = self._context.plan
        sides = (plan.width, plan.height)
        with ExitStack() as stack:
            writer = VideoWriter(plan.output, *plan.video_size, plan.video_fps, plan.crf)
            self._writer = stack.enter_context(writer)
            self._plain: VideoWriter | None = None
            self._interpolator: AnyInterpolator | None = None
            self._upscaler: FrameUpscaler | None = None
            if plan.looping is not None:
                self._loop = stack.enter_context(Loop(plan.output, plays_back=plan.looping == "backwards"))
            if plan.keeps_plain:
                plain = VideoWriter(plain_output(plan.output), *sides, plan.fps, plan.plain_crf)
                self._plain = stack.enter_context(plain)
            if plan.interpolation > 1:
                self._interpolator = self._open_interpolator()
                stack.enter_context(self._interpolator)
            if plan.upscaling is not None:
                self._upscaler = stack.enter_context(self._load_upscaler())
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the upscaler, stop ffmpeg, and remove what is not finished."""
        self._exit.close()

    def _open_interpolator(self) -> AnyInterpolator:
        plan, cancel = self._context.plan, self._context.cancel
        sides = plan.width, plan.height, plan.interpolation
        if plan.interpolator != "network":
            return FrameInterpolator(*sides, cancel.check)
        part = plan.components[INTERPOLATOR]
        return NetworkInterpolator(
            *sides,
            device=part.device,
            dtype=part.dtype,
            backend=part.backend,
            engines=self._engines_for(INTERPOLATOR),
            emit=self._follow,
            cancel=cancel,
        )

    def _load_upscaler(self) -> FrameUpscaler:
        context, residency = self._context, self._context.residency
        context.current = ("load", UPSCALER)
        context.loading(UPSCALER)
        started = time.perf_counter()
        upscaler = FrameUpscaler(
            calls_of(context.plan, context.spec),
            context.plan.components[UPSCALER].backend,
            settings.load(),
            self._engines_for(UPSCALER),
            self._follow,
            context.cancel,
        )
        residency.load_seconds += time.perf_counter() - started
        return upscaler

    def _engines_for(self, component: str) -> EngineService | None:
        return None if self._context.plan.components[component].backend == PYTORCH else self._context.residency.engines

    def _follow(self, event: Event) -> None:
        """Apply an event of a network to the plan, and emit it."""
        if isinstance(event, FellBack):
            self._context.fell_back(event.component, event.reason)
            self._context.counts_for_history = False
        elif isinstance(event, Warned):
            self._context.warn(event.fact)
        else:
            self._context.emit(event)

    def write(self, frames: np.ndarray) -> None:
        """Take decoded frames, (n, height, width, 3) uint8, which follow those of the video that they continue.

        Raises:
            InvalidRequestError: if that video cannot be read any more.
            OutputError: if ffmpeg failed on earlier frames.
            CancelledError: within one frame, and one call of the upscaler, of the request.
        """
        self._detector.inspect(frames)
        for part in [frames] if self._continuation is None else self._continuation.join(frames):
            self._joined += len(part)
            shown = part if self._loop is None else self._loop.add(part)
            if len(shown):
                self._process(shown)

    def _process(self, frames: np.ndarray) -> None:
        """Save frames, interpolated and enlarged as far as the plan does that."""
        if self._on_frames is not None:
            self._on_frames(frames)
        if self._plain is None:
            self._writer.write(frames)
            return
        self._plain.write(frames)
        if self._upscaler is not None and self._upscaler.calls.device != "cpu":
            # What the VAE still computes is not the upscaler's time.
            torch.cuda.synchronize(self._upscaler.calls.device)
        if self._interpolator is None:
            self._pass_on(frames)
        else:
            self._interpolate(self._interpolator.add(frames))

    def _interpolate(self, finished: Iterator[np.ndarray]) -> None:
        """Pass on frames of the interpolator; the stage begins with the first, which need later ones."""
        context = self._context
        with context.metrics.stage("interpolate"):
            for frames in finished:
                if not self._interpolating:
                    self._interpolating = True
                    context.emit(StageStarted(stage="interpolate"))
                self._pass_on(frames)
                context.cancel.check()

    def _pass_on(self, frames: np.ndarray) -> None:
        """Enlarge frames if the plan does that, in full batches, and write them."""
        if self._upscaler is None:
            self._save(frames)
            return
        self._rest.append(frames)
        if sum(map(len, self._rest)) >= self._upscaler.frames_per_call:
            self._upscale_rest(self._upscaler)

    def _upscale_rest(self, upscaler: FrameUpscaler) -> None:
        context = self._context
        before = context.current
        context.current = ("upscale", UPSCALER)
        if not self._finished:
            context.begin_stage("upscale", UPSCALER)
        # A copy, because frames that were read from a file cannot be written to.
        frames = np.concatenate(self._rest)
        self._rest.clear()
        with context.metrics.stage("upscale"):
            start = 0
            while start < len(frames):
                part = torch.from_numpy(frames[start : start + upscaler.frames_per_call])
                start += len(part)
                # Large frames one by one: the writer's queue has a few chunks.
                for larger in fetched(upscaler(part).split(1), context.cancel.check):
                    self._save(larger.numpy())
        context.current = before

    def _save(self, frames: np.ndarray) -> None:
        self._writer.write(frames)
        self._finished += len(frames)
        self._context.emit(FramesFinished(frames=self._finished, of=self._context.plan.video_frames))

    def finish(self, sound: Sound | None = None) -> VideoSaved:
        """Complete the MP4, and return the job's result.

        Args:
            sound: of the frames that were written, from the first one on; `None` if there is none.

        Raises:
            InvalidRequestError: if the video that they continue cannot be read any more.
            BadResultError: if the clip is degenerate; nothing is written.
            OutputError: if the disk is full or a file cannot be replaced; nothing is left.
        """
        context, detector = self._context, self._detector
        if detector.fault is not None:
            raise blank_video_error(detector.fault, context.plan)
        for frames in () if self._loop is None else self._loop.back():
            self._process(frames)
        if self._interpolator is not None:
            self._interpolate(self._interpolator.finish())
        if self._upscaler is not None and self._rest:
            self._upscale_rest(self._upscaler)
        writers = [self._writer] if self._plain is None else [self._plain, self._writer]
        with context.metrics.stage("mux"):
            context.emit(StageStarted(stage="save"))
            for writer in writers:
                writer.close_stream()
        context.cancel.check()
        self._record_smaller_calls()
        track = self._track(sound)
        saved = context.result(sound=track is not None)
        metadata = _metadata(saved, context.plan, self._job_id)
        try:
            for writer in writers:
                writer.finish(context.plan.prompt, metadata, track)
        except (OutputError, OSError):
            if self._plain is not None:
                # The plain video alone belongs to no job.
                plain_output(context.plan.output).unlink(missing_ok=True)
            raise
        return saved

    def _track(self, sound: Sound | None) -> NewSound | None:
        """Return the sound of the whole video, with warnings if it is not as it should be."""
        plan = self._context.plan
        if sound is not None:
            sound, warnings = inspected(sound)
            for warning in warnings:
                self._context.warn(warning)
        if self._continuation is not None and plan.sound_format is not None:
            sound = self._continuation.join_sound(sound)
        if sound is None or plan.sound_format is None:
            return None
        return NewSound(looped(sound, plan.looping, self._joined, plan.fps), plan.sound_format)

    def _record_smaller_calls(self) -> None:
        """Put the tiles and batches that memory allowed into the plan, whose forecast they do not measure."""
        context, plan = self._context, self._context.plan
        if self._upscaler is not None and plan.upscaling is not None:
            calls = self._upscaler.calls
            upscaling = plan.upscaling.replace(tile=calls.tile, batch=calls.batch)
            if upscaling != plan.upscaling:
                context.plan = plan.replace(upscaling=upscaling)
                context.counts_for_history = False


def _metadata(saved: VideoSaved, plan: ExecutionPlan, job_id: str | None) -> dict[str, Any]:
    """Return the metadata of the MP4: the result without its path, the inputs, the job and the versions."""
    result = {key: value for key, value in saved.result_json().items() if key != "video"}
    versions = {
        "tandem": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    job = {} if job_id is None else {"job": job_id}
    inputs = {field: use.summary() | _thumbnail(use) for field, use in plan.inputs.items()}
    return {
        "tandem": {**result, **job, **({"images": inputs} if inputs else {}), "versions": versions, "created": created}
    }


def _thumbnail(use: InputFile) -> dict[str, str]:
    """Return a small picture of an image or a video as a data address; empty if it cannot be read by now."""
    try:
        picture = thumbnail(open_picture(use))
    except TandemError:
        return {}
    return {"thumbnail": f"data:image/webp;base64,{base64.b64encode(picture).decode()}"}
