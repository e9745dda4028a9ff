"""Enlarges the frames of a video file and writes an MP4 with its sound: memory does not depend on the length."""

import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from runtime import __version__
from runtime.core.cancel import Cancel
from runtime.core.errors import BadResultError, OutputError, ran_out
from runtime.core.events import Event, FramesDecoded, StageStarted, Warned
from runtime.core.facts import Fact
from runtime.core.settings import Settings
from runtime.core.tiles import Span, spans
from runtime.engines.service import EngineService
from runtime.execution.decoded_frames import fetched
from runtime.families.dcae import make_batched_decode_fn
from runtime.families.esrgan.components import load_upscaler
from runtime.machine.load import LoadMeter
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.upscale_plan import UpscalePlan, UpscaleRequest
from runtime.video.mp4 import Sound, VideoWriter, check_output, read_metadata
from runtime.video.reader import COLORS, input_options, read_video

_WHITE = 255.0
_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Upscaled:
    """A finished video.

    Attributes:
        source: the name of the file.
        tile: side of the tiles in pixels of the source; `None` for whole frames.
        seconds: of reading, upscaling and encoding, without loading the upscaler.
        load_seconds: of loading it, and building its engine if that was missing.
        backend, engine, fallbacks: see `families.dcae.batched.BatchedDecoder`.
    """

    video: Path
    source: str
    upscaler: str
    scale: int
    frames: int
    width: int
    height: int
    fps: int | Fraction
    tile: int | None
    seconds: float
    load_seconds: float
    backend: str
    engine: str
    fallbacks: tuple[Fact, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, and the frames upscaled in a second."""
        rate = self.frames / self.seconds if self.seconds else 0.0
        return {
            **vars(self),
            "video": str(self.video),
            "fps": self.fps if isinstance(self.fps, int) else round(float(self.fps), 3),
            "fallbacks": list(map(str, self.fallbacks)),
            "seconds": round(self.seconds, 3),
            "load_seconds": round(self.load_seconds, 3),
            "frames_per_second": round(rate, 2),
        }


def upscale_file(
    plan: UpscalePlan,
    settings: Settings,
    engines: EngineService,
    emit: Callable[[Event], None],
    cancel: Cancel,
) -> Upscaled:
    """Upscale a video and write the MP4.

    Raises:
        InvalidRequestError: if the source has no frames.
        ModelError: if the upscaler cannot be loaded.
        OutputError, MachineError: if the MP4 cannot be written.
        torch.OutOfMemoryError, MemoryError: if memory is too small for the smallest tiles.
        CancelledError: within one batch of the request; nothing is left.
    """
    machine, request = engines.machine, plan.request
    source = request.source
    of = source.frames or 0
    check_output(request.output, plan.width, plan.height, max(of, 1), plan.crf)
    loading = time.monotonic()
    with FrameUpscaler(plan, settings, engines, emit, cancel) as upscaler:
        emit(StageStarted(stage="upscale"))
        started, meter, written = time.monotonic(), LoadMeter(), 0
        with VideoWriter(request.output, plan.width, plan.height, plan.fps, plan.crf) as writer:
            for frames in fetched(_enlarged(request, upscaler, emit), cancel.check):
                writer.write(frames.numpy())
                written += len(frames)
                emit(FramesDecoded(frames=written, of=max(of, written) if of else 0))
            emit(StageStarted(stage="save"))
            writer.close_stream()
            cancel.check()
            done = Upscaled(
                video=request.output,
                source=source.path.name,
                upscaler=request.spec.name,
                scale=upscaler.plan.architecture.output_scale,
                frames=written,
                width=plan.width,
                height=plan.height,
                fps=plan.fps,
                tile=upscaler.plan.tile,
                seconds=time.monotonic() - started,
                load_seconds=started - loading,
                **upscaler.outcome,
            )
            title, metadata = _metadata(done, request)
            writer.finish(title, metadata, Sound(input_options(source.path), source.sound))
    if not done.fallbacks and upscaler.plan == plan:
        run = plan.run(machine, done.seconds, written, loaded=meter.loaded)
        HistoryFile(settings.cache_dir, machine).add([run])
    return done


def _enlarged(
    request: UpscaleRequest, upscaler: "FrameUpscaler", emit: Callable[[Event], None]
) -> Iterator[torch.Tensor]:
    """Yield the frames of the result; report a damaged source at its end."""

    def read() -> Generator[np.ndarray, None, None]:
        line = yield from read_video(request.source, upscaler.frames_per_call)
        if line:
            emit(Warned(fact=Fact("source.damaged", {"file": request.source.path.name, "line": line})))

    for frames in read():
        # Large frames one by one: the writer's queue has a few chunks.
        yield from upscaler(torch.from_numpy(frames)).split(1)


class FrameUpscaler:
    """Upscales frames in batches, in tiles where memory is short; use as a context manager.

    If memory runs out, the batches and then the tiles become smaller.

    Args:
        plan: how.
        settings, engines, emit, cancel: see `families.dcae.batched.make_batched_decode_fn`.

    Attributes:
        plan: the current one.

    Raises:
        ModelError: if the upscaler cannot be loaded.
    """

    def __init__(
        self,
        plan: UpscalePlan,
        settings: Settings,
        engines: EngineService,
        emit: Callable[[Event], None],
        cancel: Cancel,
    ) -> None:
        self.plan = plan
        self._emit = emit
        request = plan.request
        module = load_upscaler(request.spec, device=plan.device, dtype=plan.dtype)
        self._decode = make_batched_decode_fn(
            module,
            plan.batch,
            backend=request.backend,
            settings=settings,
            engines=engines,
            emit=emit,
            cancel=cancel,
        )
        self._reasons: tuple[Fact, ...] = ()
        self._warn_tiled()
        self._decode.prepare(*plan.call_size)

    def __enter__(self) -> "FrameUpscaler":
        """Return the upscaler, which is freed at the end of the `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the engine and the weights."""
        self._decode.close()

    @property
    def frames_per_call(self) -> int:
        """The number of frames to pass at once: a batch, or one frame in tiles."""
        return self.plan.batch if self.plan.tile is None else 1

    @property
    def outcome(self) -> dict[str, Any]:
        """What the last call ran on: backend, engine, and why others did not."""
        decode = self._decode
        return {
            "backend": decode.backend,
            "engine": decode.engine,
            "fallbacks": (*self._reasons, *decode.fallbacks),
        }

    def __call__(self, frames: torch.Tensor) -> torch.Tensor:
        """Return frames (n, height, width, 3), uint8, on the upscaler's device, of smaller ones on any device.

        Raises:
            torch.OutOfMemoryError, MemoryError: if memory is too small for the smallest tiles.
        """
        while True:
            try:
                return self._upscaled(frames)
            except Exception as error:
                smaller = replace(self.plan, batch=1).smaller()
                if ran_out(error) is None or smaller is None:
                    raise
            # Outside of the handler: the exception's frames reference memory that is needed now.
            self.plan = smaller
            if self.plan.device != "cpu":
                torch.cuda.empty_cache()
            self._warn_tiled()

    def _upscaled(self, frames: torch.Tensor) -> torch.Tensor:
        plan, scale = self.plan, self.plan.architecture.output_scale
        colors = frames.to(plan.device, non_blocking=True).permute(0, 3, 1, 2)
        height, width = colors.shape[2:]
        out = colors.new_empty((len(frames), plan.height, plan.width, COLORS))
        places = [(row, column) for row in _places(height, plan.tile) for column in _places(width, plan.tile)]
        per_call = max(plan.batch // len(frames), 1)
        for start in range(0, len(places), per_call):
            tiles = places[start : start + per_call]
            parts = [colors[..., row.read, column.read] for row, column in tiles]
            larger = self._decode((torch.cat(parts).to(_DTYPES[plan.dtype]) / _WHITE)[None])[0]
            if not torch.isfinite(larger).all().item():
                raise BadResultError("execution.upscaler_not_finite", dtype=plan.dtype)
            for (row, column), part in zip(tiles, larger.split(len(frames)), strict=True):
                # In place: a large frame takes hundreds of megabytes.
                rounded = part.mul_(_WHITE).round_().clamp_(0, _WHITE).to(torch.uint8)
                rows, columns = row.shown(scale, plan.height), column.shown(scale, plan.width)
                inner = rounded[..., row.kept(scale, plan.height), column.kept(scale, plan.width)]
                out[:, rows, columns] = inner.permute(0, 2, 3, 1)
        return out

    def _warn_tiled(self) -> None:
        """Report tiles, now and in the result."""
        if self.plan.tile is not None:
            fact = Fact("upscale.tiles", {"side": self.plan.tile})
            self._reasons = (*self._reasons, fact)
            self._emit(Warned(fact=fact))


@dataclass(frozen=True)
class _Place:
    """A tile along one side, in pixels of the source.

    Attributes:
        start, end: what is upscaled.
        first, last: the part that is kept: the tile without half of its overlap with others.
    """

    start: int
    end: int
    first: int
    last: int

    @property
    def read(self) -> slice:
        """The part of the source."""
        return slice(self.start, self.end)

    def shown(self, scale: int, most: int) -> slice:
        """Return the part of the result, of at most `most` pixels."""
        return slice(self.first * scale, min(self.last * scale, most))

    def kept(self, scale: int, most: int) -> slice:
        """Return that part of the upscaled tile."""
        shown = self.shown(scale, most)
        return slice(shown.start - self.start * scale, shown.stop - self.start * scale)


def _places(length: int, tile: int | None) -> list[_Place]:
    """Return the tiles that cover a side."""
    tiles = [Span(0, length)] if tile is None else spans(length, tile)
    cuts = [0, *((after.start + before.end) // 2 for before, after in pairwise(tiles)), length]
    return [_Place(span.start, span.end, *part) for span, part in zip(tiles, pairwise(cuts), strict=True)]


def _metadata(done: Upscaled, request: UpscaleRequest) -> tuple[str, dict[str, Any]]:
    """Return title and metadata of the MP4: those of a video that Tandem made, and how it was upscaled."""
    facts = {key: value for key, value in done.to_json().items() if key != "video"}
    try:
        before = read_metadata(request.source.path)
    except OutputError:
        before = {}
    prompt = before.get("request", {}).get("prompt") if isinstance(before.get("request"), dict) else None
    versions = {"tandem": __version__, "python": platform.python_version(), "torch": torch.__version__}
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    upscaled = {"upscale": {**facts, "versions": versions, "created": created}}
    return str(prompt or done.source), {"tandem": {**before, **upscaled}}
