"""Interpolates the frames of a video file and writes an MP4 with its sound: memory does not depend on the length."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.core.cancel import Cancel
from runtime.core.events import Event, Warned
from runtime.core.facts import Fact
from runtime.core.request import AUTO
from runtime.families.interpolator.frames import NetworkInterpolator
from runtime.machine.load import LoadMeter
from runtime.pipeline.conversion import Converted, convert, described, read_source
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.interpolate_plan import InterpolationPlan
from runtime.planner.interpolation import FFMPEG
from runtime.video.interpolation import FrameInterpolator, check_interpolator
from runtime.video.mp4 import SourceSound
from runtime.video.reader import input_options

_FRAMES_PER_CALL = 1

AnyInterpolator = FrameInterpolator | NetworkInterpolator


@dataclass(frozen=True, kw_only=True)
class Interpolated(Converted):
    """A finished video with more frames.

    Attributes:
        source: the name of the file.
        slow: whether it lasts longer than the source.
    """

    source: str
    factor: int
    slow: bool


def interpolate_file(
    plan: InterpolationPlan, history: HistoryFile, emit: Callable[[Event], None], cancel: Cancel
) -> Interpolated:
    """Interpolate a video and write the MP4.

    Raises:
        InvalidRequestError: if the source has no frames.
        ModelError: if the network cannot be loaded.
        OutputError, MachineError: if ffmpeg fails or cannot interpolate, or the MP4 cannot be written.
        CancelledError: within one frame of the request; nothing is left.
    """
    source, began, meter = plan.source, time.monotonic(), LoadMeter()
    sound = source.sound
    if plan.by == "minterpolate":
        check_interpolator()
    if plan.slow and sound:
        emit(Warned(fact=Fact("interpolate.silent", {"file": source.path.name})))
        sound = ()

    def finish(fields: dict[str, Any]) -> tuple[Interpolated, str, dict[str, Any], SourceSound]:
        name = source.path.name
        outcome = interpolator.outcome if isinstance(interpolator, NetworkInterpolator) else {"backend": FFMPEG}
        done = Interpolated(**fields, source=name, factor=plan.factor, slow=plan.slow, **outcome)
        kept = SourceSound(input_options(source.path), sound, chapters=not plan.slow)
        return done, *described(done, source.path, "interpolate", sound=bool(sound)), kept

    of = (source.frames or 0) * plan.factor
    with _interpolator(plan, emit, cancel) as interpolator:
        done = convert(plan, "interpolate", _frames(plan, interpolator, emit), of, began, emit, cancel, finish)
    if not done.fallbacks:
        run = plan.run(done.frames // plan.factor, done.seconds, history.machine, loaded=meter.loaded)
        history.add([run])
    return done


def _interpolator(plan: InterpolationPlan, emit: Callable[[Event], None], cancel: Cancel) -> AnyInterpolator:
    """Return what computes new frames, to use as a context manager; the network runs on the fastest engine."""
    source, calls = plan.source, plan.calls
    if calls is None:
        return FrameInterpolator(source.width, source.height, plan.factor, cancel.check)
    return NetworkInterpolator(
        source.width,
        source.height,
        plan.factor,
        device=calls.device,
        dtype=calls.dtype,
        backend=AUTO,
        emit=emit,
        cancel=cancel,
    )


def _frames(
    plan: InterpolationPlan, interpolator: AnyInterpolator, emit: Callable[[Event], None]
) -> Iterator[torch.Tensor]:
    """Yield the frames of the result; report a damaged source at its end."""

    def finished() -> Iterator[np.ndarray]:
        for frames in read_source(plan.source, _FRAMES_PER_CALL, emit):
            yield from interpolator.add(frames)
        yield from interpolator.finish()

    for frames in finished():
        yield torch.from_numpy(frames[:, : plan.height, : plan.width])
