"""Latents to frames, a few latent frames per call, on engines; the parts that all decoders share."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from runtime.core.errors import BadResultError
from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan
from runtime.engines.identity import CLIP_PROGRAM
from runtime.engines.service import OpenEngines
from runtime.execution.engine_fallback import EngineWithFallback
from runtime.planner.placement import may_overflow


class VideoDecoder(Protocol):
    """A causal video decoder."""

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """Yield decoded frames in order.

        Args:
            latents: (1, channels, latent frames, height, width), normalised as the transformer sees them.
            chunk: latent frames to decode in one call, after the first, which is always alone.
            tile: side of the tiles that frames are decoded in, in latents; `None` decodes them whole. An engine has
                its size, and decodes them whole.

        Yields:
            (frames, height, width, 3), float32 in -1 to 1: on the decoder's device, or on the CPU if tiled; or uint8,
            rounded from that. Tiled frames are complete at the end only: until then, each call yields 0 frames.
        """
        ...


class ResumableDecoder(VideoDecoder, Protocol):
    """A decoder in PyTorch that continues where an engine failed."""

    def decode_from(
        self, latents: torch.Tensor, chunk: int, start: int, caches: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Decode from latent frame `start`, with the caches that an engine returned for the frames before it."""
        ...


def longer_side(latents: torch.Tensor) -> int:
    """Return the axis of latents, (…, height, width), along which several GPUs divide frames."""
    return 4 if latents.shape[4] >= latents.shape[3] else 3


def as_bytes(frames: torch.Tensor, part: ComponentPlan | None) -> torch.Tensor:
    """Return decoded frames in 8 bits, uint8.

    Args:
        frames: float32 in -1 to 1.
        part: the plan of the VAE.

    Raises:
        BadResultError: if they contain NaN or Inf.
    """
    if not torch.isfinite(frames).all().item():
        raise not_finite(part)
    return _rounded(frames)


def fetch(frames: torch.Tensor, part: ComponentPlan | None) -> Callable[[], torch.Tensor]:
    """Start copying decoded frames to the CPU, in 8 bits; return a function that waits for them.

    A GPU copies into page-locked memory while it runs the next kernels.

    Args:
        frames, part: see `as_bytes`; uint8 frames are only copied.
    """
    if frames.dtype == torch.uint8:
        return frames.cpu
    if frames.device.type != "cuda":
        return lambda: as_bytes(frames, part)
    with torch.cuda.device(frames.device):
        there = _page_locked(_rounded(frames))
        finite = _page_locked(torch.isfinite(frames).all())
        copied = torch.cuda.Event()
        copied.record()

    def arrived() -> torch.Tensor:
        copied.synchronize()
        if not finite.item():
            raise not_finite(part)
        return there

    return arrived


def _page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Start an asynchronous copy of a GPU tensor into page-locked memory; return the copy."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _rounded(frames: torch.Tensor) -> torch.Tensor:
    return ((frames + 1.0) * 127.5).round().to(torch.uint8)


def not_finite(part: ComponentPlan | None) -> BadResultError:
    """Return the error for frames with NaN or Inf; latents are checked before, so the VAE or its weights are at fault.

    Args:
        part: the plan of the VAE.
    """
    if part is not None and may_overflow(part):
        return BadResultError("execution.vae_overflow", dtype=part.dtype)
    return BadResultError("execution.vae_not_finite")


class EngineVideoDecoder:
    """Two engines, for the first step and the others, that fall back to PyTorch in the step in which one fails.

    One that was made elsewhere may take whole clips; where it fails, PyTorch decodes all.
    """

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], ResumableDecoder]) -> None:
        self._engines = EngineWithFallback(engines, fall_back)

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        if self._engines.runs(CLIP_PROGRAM):
            yield from self._clip(latents, chunk)
            return
        caches: dict[str, torch.Tensor] = {}
        start = 0
        while start < latents.shape[2]:
            end = min(start + chunk, latents.shape[2]) if start else 1
            program, given = ("vae_next", caches) if start else ("vae_first", {})
            z = latents[:, :, start:end]
            outputs = self._engines.call(
                lambda engines: engines.infer(program, z=z, **given),  # noqa: B023 - called at once
                lambda _: None,
            )
            if outputs is None and not start:
                yield from self._engines.fallback().frames(latents, chunk, tile)
                return
            if outputs is None:
                yield from self._engines.fallback().decode_from(latents, chunk, start, list(caches.values()))
                return
            yield outputs.pop("frames")
            caches = outputs
            start = end

    def _clip(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        outputs = self._engines.call(lambda engines: engines.infer(CLIP_PROGRAM, z=latents), lambda _: None)
        if outputs is None:
            yield from self._engines.fallback().frames(latents, chunk)
        else:
            yield outputs["frames"]
