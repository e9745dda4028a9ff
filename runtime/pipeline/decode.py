"""Decodes a file of latents to an MP4, a batch at a time: memory does not depend on its length.

For the axes of latents, see `decode_plan`. Clips are shown one after the other. Latents are scaled as a diffusion model
makes them.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import InvalidRequestError, ran_out
from runtime.core.events import Event, FellBack, Warned
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ComponentPlan
from runtime.core.request import AUTO
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.execution import components
from runtime.families.dcae import load_decoder, make_batched_decode_fn
from runtime.machine.load import LoadMeter
from runtime.models.latent_files import LatentFile
from runtime.models.spec import FRAME_BATCH
from runtime.models.weights import load_module
from runtime.pipeline.conversion import Converted, convert
from runtime.pipeline.decode_plan import COLORS, DecodePlan, LatentLayout
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.memory_model import DTYPE_BYTES, tile_sides_of

# Latent frames in one call of a VAE.
_VAE_CHUNK = 1
# Share of free memory that one call of a VAE may take; the weights, the allocator and ffmpeg need the rest.
_VAE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Decoded(Converted):
    """A finished video of latents.

    Attributes:
        latents: the name of the file.
    """

    latents: str
    model: str
    channels: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """See `Converted`."""
        return {**super().to_json(), "channels": list(self.channels)}


def decode_file(
    plan: DecodePlan,
    file: LatentFile,
    settings: Settings,
    engines: EngineService,
    emit: Callable[[Event], None],
    cancel: Cancel,
) -> Decoded:
    """Decode latents and write the MP4.

    Args:
        plan: of the open file.

    Raises:
        InvalidRequestError: if the latents contain NaN or Inf.
        ModelError: if the model cannot be loaded.
        OutputError, MachineError: if the MP4 cannot be written.
        BadResultError: if the model returns NaN or Inf.
        CancelledError: within one batch of the request; nothing is left.
    """
    request, layout, began = plan.request, plan.layout, time.monotonic()
    source = (_Frames if request.spec.only_decodes else _Clips)(file, layout)

    def finish(fields: dict[str, Any]) -> tuple[Decoded, str, dict[str, Any], None]:
        named: dict[str, Any] = {
            "latents": request.latents.name,
            "model": request.spec.name,
            "channels": request.channels,
        }
        done = Decoded(**fields, **named, **source.outcome)
        described = {**done.metadata(), "latents_shape": list(file.shape), "latents_dtype": file.dtype}
        return done, f"{request.latents.name} · {request.spec.title}", {"tandem": {"decode": described}}, None

    with source.opened(request.backend, settings, engines, plan.device, emit, cancel) as batches:
        meter = LoadMeter()
        done = convert(plan, "decode", _shown(batches, plan.panels), layout.count, began, emit, cancel, finish)
    if not done.fallbacks:
        run = plan.run(engines.machine, done.seconds, loaded=meter.loaded)
        HistoryFile(settings.cache_dir, engines.machine).add([run])
    return done


def _shown(batches: Iterable[torch.Tensor], panels: tuple[tuple[int, ...], ...]) -> Iterator[torch.Tensor]:
    """Yield frames (n, height, width, 3) in -1 to 1, or uint8, with the panels next to each other.

    Args:
        batches: (n, height, width, channels) in about -1 to 1, or uint8.
    """
    plain = ((0, 1, 2),)
    for batch in batches:
        frames = batch if panels == plain else torch.cat([batch[..., list(panel)] for panel in panels], dim=2)
        yield frames if frames.dtype == torch.uint8 else frames[..., :COLORS].float().clamp(-1.0, 1.0)


class _Source:
    """Latents of a file for one kind of decoder."""

    def __init__(self, file: LatentFile, layout: LatentLayout) -> None:
        self.file, self.layout, self.spec = file, layout, layout.spec
        self.outcome: dict[str, Any] = {"backend": PYTORCH}

    def clip(self, number: int) -> list[int]:
        """Return the index of a clip in the file."""
        return [number] if self.layout.batched else []

    def tensor(self, values: Any, first: int) -> torch.Tensor:
        """Return what was read from the file as a tensor.

        Args:
            first: the number of the first frame, for the error.

        Raises:
            InvalidRequestError: if it has NaN or Inf.
        """
        frames = torch.from_numpy(values.view("int16") if self.file.values_are_bits else values)
        frames = frames.view(torch.bfloat16) if self.file.values_are_bits else frames
        finite = torch.isfinite(frames).flatten(1).all(dim=1)
        if not finite.all().item():
            frame = first + int((~finite).nonzero()[0].item())
            raise InvalidRequestError("latents", "latents.not_finite", file=self.file.path.name, frame=frame)
        return frames


class _Frames(_Source):
    """Latents [n, c, h, w] or [b, n, c, h, w] of a decoder of single frames."""

    def opened(
        self,
        backend: str,
        settings: Settings,
        engines: EngineService,
        device: str,
        emit: Callable[[Event], None],
        cancel: Cancel,
    ) -> "_Opened":
        """Load the decoder."""
        decoder = load_decoder(str(self.spec.directory), device=device, dtype=self.layout.dtype_on(device))
        decode = make_batched_decode_fn(
            decoder, FRAME_BATCH, backend=backend, settings=settings, engines=engines, emit=emit, cancel=cancel
        )
        decode.prepare(*self.layout.axes[2:])
        return _Opened(self._batches(decode), decode.close)

    def _batches(self, decode: Any) -> Iterator[torch.Tensor]:
        architecture: Any = self.spec.vae
        for clip in range(self.layout.clips):
            for start in range(0, self.layout.axes[0], FRAME_BATCH):
                stop = min(start + FRAME_BATCH, self.layout.axes[0])
                values = self.file.read(self.clip(clip), start, stop)
                latents = self.tensor(values, clip * self.layout.axes[0] + start).float() * architecture.latent_factor
                frames = decode(latents[None])[0]
                self.outcome = {"backend": decode.backend, "engine": decode.engine, "fallbacks": decode.fallbacks}
                yield frames.permute(0, 2, 3, 1)


class _Clips(_Source):
    """Latents [c, f, h, w] or [b, c, f, h, w] of a model that makes videos, decoded by its VAE in PyTorch."""

    def opened(
        self,
        backend: str,
        settings: Settings,
        engines: EngineService,
        device: str,
        emit: Callable[[Event], None],
        cancel: Cancel,
    ) -> "_Opened":
        """Load the VAE."""
        del settings, cancel
        if backend not in {AUTO, PYTORCH}:
            reason = Fact("decode.clips_in_pytorch")
            emit(FellBack(component="vae", backend=backend, reason=reason))
            self.outcome["fallbacks"] = (reason,)
        dtype = self.layout.dtype_on(device)
        part = ComponentPlan(backend=PYTORCH, device=device, dtype=dtype, weights_bytes=0, reasons=())
        decoder = components.components_of(self.spec).video_decoder(load_module(self.spec, "vae", part), device)
        machine = engines.machine
        on_cpu = device == "cpu"
        free = machine.ram_free_bytes if on_cpu else machine.gpus[int(device.partition(":")[2])].free_bytes
        return _Opened(self._batches(decoder, self._tiles(free, dtype, on_cpu=on_cpu), emit), lambda: None)

    def _tiles(self, free_bytes: int, dtype: str, *, on_cpu: bool) -> list[int | None]:
        """Return the sides of tiles to decode in, in latents: the largest that fits, then those to try if it does not.

        `None` decodes frames whole.
        """
        height, width = self.layout.frame_size
        scale, element = self.spec.vae.scale_factor_spatial, DTYPE_BYTES[dtype]
        tiles: list[int | None] = [None, *tile_sides_of(self.spec, height, width)]

        def fits(tile: int | None) -> bool:
            sides = (height, width) if tile is None else (min(height, tile * scale), min(width, tile * scale))
            return self.spec.vae.decode_bytes(_VAE_CHUNK, *sides, element, cpu=on_cpu) <= _VAE_SHARE * free_bytes

        while len(tiles) > 1 and not fits(tiles[0]):
            tiles.pop(0)
        return tiles

    def _batches(self, decoder: Any, tiles: list[int | None], emit: Callable[[Event], None]) -> Iterator[torch.Tensor]:
        """Yield the frames of all clips; if memory runs out, those that are left in the next smaller tiles."""
        self._warn_tiled(tiles[0], emit)
        frames = self.layout.frames_per_clip
        for clip in range(self.layout.clips):
            done = 0
            while done < frames:
                try:
                    for part in _after(done, decoder.frames(_ClipInFile(self, clip), _VAE_CHUNK, tiles[0])):
                        done += len(part)
                        yield part
                except Exception as error:
                    if ran_out(error) is None or len(tiles) == 1:
                        raise
                if done < frames:
                    # Outside of the handler: the exception's frames reference memory that is needed now.
                    tiles.pop(0)
                    torch.cuda.empty_cache()
                    self._warn_tiled(tiles[0], emit)

    def _warn_tiled(self, tile: int | None, emit: Callable[[Event], None]) -> None:
        """Report tiles, now and in the result."""
        if tile is not None:
            fact = Fact("planner.decoded_in_tiles", {"side": tile * self.spec.vae.scale_factor_spatial})
            self.outcome["fallbacks"] = (*self.outcome.get("fallbacks", ()), fact)
            emit(Warned(fact=fact))


def _after(done: int, batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the frames of a clip after the first `done`."""
    at = 0
    for part in batches:
        at += len(part)
        yield part[max(len(part) - max(at - done, 0), 0) :]


class _ClipInFile:
    """The latents of one clip, (1, channels, frames, height, width), of which slices of frames are read from the file.

    It has what `execution.components.VideoDecoder` uses of a tensor.
    """

    def __init__(self, source: _Clips, number: int, rows: slice = slice(None), columns: slice = slice(None)) -> None:
        self._source, self._number = source, number
        self._rows, self._columns = rows, columns
        height, width = (
            len(range(*cut.indices(side))) for cut, side in zip((rows, columns), source.layout.axes[2:], strict=True)
        )
        self.shape = torch.Size((1, *source.layout.axes[:2], height, width))

    def __getitem__(self, index: Any) -> Any:
        """Return `tensor[:, :, start:stop]`, or, unread, the part `tensor[..., rows, columns]` of the whole frames."""
        if index[0] is Ellipsis:
            return _ClipInFile(self._source, self._number, *index[1:])
        _, _, frames = index
        start, stop, _ = frames.indices(self.shape[2])
        source = self._source
        parts = []
        for channel in range(self.shape[1]):
            values = source.file.read([*source.clip(self._number), channel], start, stop)
            values = source.tensor(values, self._number * self.shape[2] + start)
            parts.append(values[:, self._rows, self._columns])
        return torch.stack(parts)[None].float()


class _Opened:
    """The batches of frames of a loaded decoder, which is freed at the end of the `with` block."""

    def __init__(self, batches: Iterator[torch.Tensor], close: Callable[[], None]) -> None:
        self._batches, self._close = batches, close

    def __enter__(self) -> Iterator[torch.Tensor]:
        """Return the batches: (n, height, width, channels)."""
        return self._batches

    def __exit__(self, *_: object) -> None:
        """Free the decoder."""
        self._close()
