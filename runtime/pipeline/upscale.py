"""Enlarges the frames of a video file and writes an MP4 with its sound: memory does not depend on the length."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import BadResultError, ran_out
from runtime.core.events import Event, Warned
from runtime.core.facts import Fact
from runtime.core.settings import Settings
from runtime.core.tiles import Span, spans
from runtime.engines.service import EngineService
from runtime.execution.decoded_frames import all_finite
from runtime.families.dcae import make_batched_decode_fn
from runtime.families.esrgan.components import load_upscaler
from runtime.machine.load import LoadMeter
from runtime.pipeline.conversion import Converted, convert, described, read_source
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.upscale_plan import UpscalePlan, UpscaleRequest
from runtime.planner.frame_networks import FrameCalls
from runtime.video.mp4 import SourceSound
from runtime.video.reader import COLORS, input_options

_WHITE = 255.0
# Of the network's inputs. bfloat16 has fewer bits than colors, so the network rounds only what its convolutions take.
_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.float32,
}


@dataclass(frozen=True, kw_only=True)
class Upscaled(Converted):
    """A finished larger video.

    Attributes:
        source: the name of the file.
        tile: side of the tiles in pixels of the source; `None` for whole frames.
    """

    source: str
    upscaler: str
    scale: int
    tile: int | None


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
    request, began = plan.request, time.monotonic()
    source, calls = request.source, plan.calls
    with FrameUpscaler(calls, request.backend, settings, engines, emit, cancel) as upscaler:

        def finish(fields: dict[str, Any]) -> tuple[Upscaled, str, dict[str, Any], SourceSound]:
            scale = calls.architecture.output_scale
            named = {"source": source.path.name, "upscaler": request.spec.name, "scale": scale}
            done = Upscaled(**fields, **named, tile=upscaler.calls.tile, **upscaler.outcome)
            kept = SourceSound(input_options(source.path), source.sound)
            return done, *described(done, source.path, "upscale", sound=bool(source.sound)), kept

        meter = LoadMeter()
        frames = _enlarged(request, upscaler, emit)
        done = convert(plan, "upscale", frames, source.frames or 0, began, emit, cancel, finish)
        if not done.fallbacks and upscaler.calls == calls:
            kind = plan.kind(engines.machine)
            run = calls.run(kind, done.seconds, done.frames, loaded=meter.loaded)
            HistoryFile(settings.cache_dir, engines.machine).add([run])
    return done


def _enlarged(
    request: UpscaleRequest, upscaler: "FrameUpscaler", emit: Callable[[Event], None]
) -> Iterator[torch.Tensor]:
    """Yield the frames of the result; report a damaged source at its end."""
    for frames in read_source(request.source, upscaler.frames_per_call, emit):
        # Large frames one by one: the writer's queue has a few chunks.
        yield from upscaler(torch.from_numpy(frames)).split(1)


class FrameUpscaler:
    """Upscales frames in batches, in tiles where memory is short; use as a context manager.

    If memory runs out, the batches and then the tiles become smaller.

    Args:
        calls: how the upscaler is called at first.
        backend, settings, engines, emit, cancel: see `families.dcae.batched.make_batched_decode_fn`.

    Attributes:
        calls: the current ones.

    Raises:
        ModelError: if the upscaler cannot be loaded.
    """

    def __init__(
        self,
        calls: FrameCalls,
        backend: str,
        settings: Settings,
        engines: EngineService | None,
        emit: Callable[[Event], None],
        cancel: Cancel,
    ) -> None:
        self.calls = calls
        self._emit = emit
        module = load_upscaler(calls.spec, device=calls.device, dtype=calls.dtype)
        self._decode = make_batched_decode_fn(
            module,
            calls.batch,
            backend=backend,
            settings=settings,
            engines=engines,
            emit=emit,
            cancel=cancel,
        )
        self._reasons: tuple[Fact, ...] = ()
        self._warn_tiled()
        self._decode.prepare(*calls.call_size)

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
        return self.calls.batch if self.calls.tile is None else 1

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
                smaller = replace(self.calls, batch=1).smaller()
                if ran_out(error) is None or smaller is None:
                    raise
            # Outside of the handler: the exception's frames reference memory that is needed now.
            self.calls = smaller
            if self.calls.device != "cpu":
                torch.cuda.empty_cache()
            self._warn_tiled()

    def _upscaled(self, frames: torch.Tensor) -> torch.Tensor:
        calls, scale = self.calls, self.calls.architecture.output_scale
        colors = frames.to(calls.device, non_blocking=True).permute(0, 3, 1, 2)
        height, width = colors.shape[2:]
        out = colors.new_empty((len(frames), calls.height, calls.width, COLORS))
        places = [(row, column) for row in _places(height, calls.tile) for column in _places(width, calls.tile)]
        per_call = max(calls.batch // len(frames), 1)
        for start in range(0, len(places), per_call):
            tiles = places[start : start + per_call]
            parts = [colors[..., row.read, column.read] for row, column in tiles]
            larger = self._decode((torch.cat(parts).to(_DTYPES[calls.dtype]) / _WHITE)[None])[0]
            if not all_finite(larger).item():
                raise BadResultError("execution.upscaler_not_finite", dtype=calls.dtype)
            for (row, column), part in zip(tiles, larger.split(len(frames)), strict=True):
                # In place: a large frame takes hundreds of megabytes.
                rounded = part.mul_(_WHITE).round_().clamp_(0, _WHITE).to(torch.uint8)
                rows, columns = row.shown(scale, calls.height), column.shown(scale, calls.width)
                inner = rounded[..., row.kept(scale, calls.height), column.kept(scale, calls.width)]
                out[:, rows, columns] = inner.permute(0, 2, 3, 1)
        return out

    def _warn_tiled(self) -> None:
        """Report tiles, now and in the result."""
        if self.calls.tile is not None:
            fact = Fact("upscale.tiles", {"side": self.calls.tile})
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
