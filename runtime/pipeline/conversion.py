"""What commands that make an MP4 of a file have in common: writing the frames as they come, and the result."""

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from runtime import __version__
from runtime.core.cancel import Cancel
from runtime.core.events import Event, FramesDecoded, Stage, StageStarted, Warned
from runtime.core.facts import Fact
from runtime.execution.decoded_frames import fetched
from runtime.video.mp4 import SourceSound, VideoWriter, find_metadata
from runtime.video.reader import VideoInfo, read_video


class ConversionPlan(Protocol):
    """The MP4 that is made; sizes in pixels."""

    @property
    def output(self) -> Path:
        """The file."""

    @property
    def width(self) -> int:
        """See `VideoWriter`."""

    @property
    def height(self) -> int:
        """See `VideoWriter`."""

    @property
    def fps(self) -> int | Fraction:
        """See `VideoWriter`."""

    @property
    def crf(self) -> int:
        """See `VideoWriter`."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A finished video.

    Attributes:
        seconds: of reading, computing and encoding, without loading.
        load_seconds: of loading the model, and building its engine if that was missing.
        backend, engine, fallbacks: see `families.dcae.batched.BatchedDecoder`.
    """

    video: Path
    frames: int
    width: int
    height: int
    fps: int | Fraction
    seconds: float
    load_seconds: float
    backend: str
    engine: str = ""
    fallbacks: tuple[Fact, ...] = field(default=())

    @property
    def rate(self) -> float:
        """Frames a second."""
        return self.frames / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, and the frames a second."""
        return {
            **vars(self),
            "video": str(self.video),
            "fps": self.fps if isinstance(self.fps, int) else round(float(self.fps), 3),
            "fallbacks": list(map(str, self.fallbacks)),
            "seconds": round(self.seconds, 3),
            "load_seconds": round(self.load_seconds, 3),
            "frames_per_second": round(self.rate, 2),
        }

    def metadata(self) -> dict[str, Any]:
        """Return how the video was made, for its own metadata."""
        facts = {key: value for key, value in self.to_json().items() if key != "video"}
        versions = {"tandem": __version__, "python": platform.python_version(), "torch": torch.__version__}
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {**facts, "versions": versions, "created": created}


Result = TypeVar("Result", bound=Converted)


def read_source(info: VideoInfo, count: int, emit: Callable[[Event], None]) -> Iterator[np.ndarray]:
    """Yield the frames of a video file as `read_video` does; at its end, report whether it is damaged."""
    line = yield from read_video(info, count)
    if line:
        emit(Warned(fact=Fact("source.damaged", {"file": info.path.name, "line": line})))


def described(done: Converted, source: Path, key: str, *, sound: bool) -> tuple[str, dict[str, Any]]:
    """Return title and metadata of a video: those of a source that Tandem made, and under `key` how it was made.

    Args:
        sound: whether the video has sound.
    """
    before = find_metadata(source)
    prompt = before.get("request", {}).get("prompt") if isinstance(before.get("request"), dict) else None
    return str(prompt or source.name), {"tandem": {**before, "sound": sound, key: done.metadata()}}


def convert(
    plan: ConversionPlan,
    stage: Stage,
    batches: Iterable[torch.Tensor],
    of: int,
    began: float,
    emit: Callable[[Event], None],
    cancel: Cancel,
    finish: Callable[[dict[str, Any]], tuple[Result, str, Mapping[str, Any], SourceSound | None]],
) -> Result:
    """Write frames as they come to the MP4 of a plan.

    Args:
        stage: what makes the frames.
        batches: see `execution.decoded_frames.fetched`.
        of: the expected number of frames; 0 if it is not known.
        began: when loading began, of `time.monotonic`.
        finish: returns the result with these fields of `Converted`, and the title, the metadata and the sound of the
            file.

    Raises:
        OutputError, MachineError: if the MP4 cannot be written.
        CancelledError: within one batch of the request; nothing is left.
    """
    emit(StageStarted(stage=stage))
    started, written = time.monotonic(), 0
    with VideoWriter(plan.output, plan.width, plan.height, plan.fps, plan.crf) as writer:
        for frames in fetched(batches, cancel.check):
            writer.write(frames.numpy())
            written += len(frames)
            emit(FramesDecoded(frames=written, of=max(of, written) if of else 0))
        emit(StageStarted(stage="save"))
        writer.close_stream()
        cancel.check()
        fields: dict[str, Any] = {
            "video": plan.output,
            "frames": written,
            "width": plan.width,
            "height": plan.height,
            "fps": plan.fps,
            "seconds": time.monotonic() - started,
            "load_seconds": started - began,
        }
        done, title, metadata, sound = finish(fields)
        writer.finish(title, metadata, sound)
    return done
