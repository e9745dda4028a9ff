"""Decoded frames: blending of overlapping tiles, division among GPUs, conversion to 8 bits and copy to the CPU."""

from collections.abc import Callable, Iterable, Iterator

import torch

from runtime.core.errors import BadResultError
from runtime.core.plan import ComponentPlan
from runtime.core.tiles import OVERLAP, Span
from runtime.planner.placement import may_overflow


def blend_weights(tiles: list[Span], scale: int) -> list[torch.Tensor]:
    """Return each tile's share of every pixel that it covers along one side; at any pixel they sum to 1.

    A tile fades in and out over its overlap, but not at the frame's own edges.

    Args:
        tiles: from `core.tiles.spans`.
        scale: pixels of a latent.

    Returns:
        One vector a tile, float32.
    """
    first, last = tiles[0].start, tiles[-1].end
    ramp = max((tiles[0].end - tiles[0].start) // OVERLAP, 1) * scale
    weights = []
    for span in tiles:
        size = (span.end - span.start) * scale
        rising = (torch.arange(size, dtype=torch.float32) + 0.5) / ramp
        weight = torch.ones(size, dtype=torch.float32)
        if span.start > first:
            weight = torch.minimum(weight, rising)
        if span.end < last:
            weight = torch.minimum(weight, rising.flip(0))
        weights.append(weight)
    total = torch.zeros((last - first) * scale, dtype=torch.float32)
    for span, weight in zip(tiles, weights, strict=True):
        total[span.start * scale : span.end * scale] += weight
    return [weight / total[span.start * scale : span.end * scale] for span, weight in zip(tiles, weights, strict=True)]


def longer_side(latents: torch.Tensor) -> int:
    """Return the axis of latents, (…, height, width), along which several GPUs divide frames."""
    return 4 if latents.shape[4] >= latents.shape[3] else 3


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Return whether all values are finite: a scalar, bool, on their device.

    The values are read once, and nothing of their size is written, unlike by `torch.isfinite(values).all()`.
    """
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.isfinite(torch.stack(torch.aminmax(values))).all()


def as_bytes(frames: torch.Tensor, part: ComponentPlan | None) -> torch.Tensor:
    """Return decoded frames in 8 bits, uint8.

    Args:
        frames: float32 in -1 to 1.
        part: the plan of the VAE.

    Raises:
        BadResultError: if they contain NaN or Inf.
    """
    if not all_finite(frames).item():
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
        finite = _page_locked(all_finite(frames))
        copied = torch.cuda.Event()
        copied.record()

    def arrived() -> torch.Tensor:
        copied.synchronize()
        if not finite.item():
            raise not_finite(part)
        return there

    return arrived


def fetched(
    batches: Iterable[torch.Tensor], check: Callable[[], None], part: Callable[[], ComponentPlan] | None = None
) -> Iterator[torch.Tensor]:
    """Yield batches of decoded frames on the CPU, in 8 bits, as they are decoded; empty ones are left out.

    Args:
        batches: see `as_bytes`; uint8 frames are only copied.
        check: called after each batch is started, and before the last of a GPU is waited for; may raise.
        part: returns the VAE's current plan, for error messages; a failed engine may have fallen back to PyTorch.

    Raises:
        BadResultError: if the frames contain NaN or Inf.
    """
    pending: Callable[[], torch.Tensor] | None = None
    for frames in batches:
        check()
        if not len(frames):
            continue
        get_frames = fetch(frames, part and part())
        if frames.device.type != "cuda":
            yield get_frames()
            continue
        # The GPU decodes the next batch while the caller processes this one.
        if pending is not None:
            yield pending()
        pending = get_frames
    if pending is not None:
        check()
        yield pending()


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
