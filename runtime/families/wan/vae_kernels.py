"""Triton kernels of the VAE decoder: the operations between two convolutions, and the largest convolutions.

Tensors are in channels-last layout. A program computes a few pixels of one row of one frame: it computes addresses
once, and reads and writes every value once.

A convolution is a matrix product (implicit GEMM): the input of each kernel position is the same matrix at a row offset,
and three neighbouring kernel positions are one row of three pixels. The tensor memory accelerator, which GPUs have from
Hopper on, loads the blocks. Rows that end in the padding are computed and discarded.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.families.wan.vae import CACHED_FRAMES
from runtime.planner.constraints import OUTPUTS_BY_KERNEL as OUTPUTS

# Values that a program computes, which determine its number of pixels.
_VALUES = 4096
# Pixels of a program of the convolution, and the widths of its two blocks of output channels, which are powers of two.
# Then the depth of one product, warps and pipeline stages: the fastest of those tried on an H200.
_PIXELS, _FIRST, _SECOND = 256, 64, OUTPUTS - 64
_DEPTH, _WARPS, _STAGES = 32, 8, 5


# Not specialized on sizes, which change from call to call. Triton interprets annotations, so there are none.
@triton.jit(do_not_specialize=["height", "width"])
def _norm_activate_kernel(  # type: ignore[no-untyped-def]
    x,
    bias,
    gamma,
    before,
    out,
    height,
    width,
    channels: tl.constexpr,
    padding: tl.constexpr,
    cached: tl.constexpr,
    LINE: tl.constexpr,  # noqa: N803 - as Triton's own code has it
    WIDE: tl.constexpr,  # noqa: N803
):
    row, rows = width + 2 * padding, height + 2 * padding
    line = tl.program_id(0)
    frame, h = line // rows, line % rows - padding
    to = tl.program_id(1) * LINE + tl.arange(0, LINE)
    w = to - padding
    c = tl.arange(0, WIDE)
    there = (to < row)[:, None] & (c < channels)[None, :]
    inside = there & ((w >= 0) & (w < width) & (h >= 0) & (h < height))[:, None]
    if frame < cached:
        place = (frame.to(tl.int64) * height + h) * width + w
        y = tl.load(before + place[:, None] * channels + c[None, :], mask=inside, other=0.0)
    else:
        place = ((frame - cached).to(tl.int64) * height + h) * width + w
        value = tl.load(x + place[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
        length = tl.sqrt(tl.sum(value * value, axis=1))
        scale = tl.load(gamma + c, mask=c < channels, other=0.0).to(tl.float32)
        value = value / tl.maximum(length, 1e-12)[:, None] * scale[None, :]
        y = tl.where(inside, value * tl.sigmoid(value), 0.0).to(out.dtype.element_ty)
    place = line.to(tl.int64) * row + to
    tl.store(out + place[:, None] * channels + c[None, :], y, mask=there)


@triton.jit(do_not_specialize=["pixels"])
def _add_residual_kernel(  # type: ignore[no-untyped-def]
    x,
    bias,
    shortcut,
    out,
    pixels,
    channels: tl.constexpr,
    LINE: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(0).to(tl.int64) * LINE + tl.arange(0, LINE)
    c = tl.arange(0, WIDE)
    there = (place < pixels)[:, None] & (c < channels)[None, :]
    at = place[:, None] * channels + c[None, :]
    value = tl.load(x + at, mask=there).to(tl.float32)
    value += tl.load(bias + c, mask=c < channels).to(tl.float32)[None, :]
    value += tl.load(shortcut + at, mask=there).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["height", "width"])
def _upsample_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    height,
    width,
    channels: tl.constexpr,
    LINE: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):
    line = tl.program_id(0)
    frame, h = line // (2 * height), line % (2 * height)
    to = tl.program_id(1) * LINE + tl.arange(0, LINE)
    c = tl.arange(0, WIDE)
    there = (to < 2 * width)[:, None] & (c < channels)[None, :]
    place = (frame.to(tl.int64) * height + h // 2) * width + to // 2
    value = tl.load(x + place[:, None] * channels + c[None, :], mask=there)
    place = line.to(tl.int64) * (2 * width) + to
    tl.store(out + place[:, None] * channels + c[None, :], value, mask=there)


@triton.jit(do_not_specialize=["frames", "height", "width"])
def _convolve_kernel(  # type: ignore[no-untyped-def]
    x,
    first,
    second,
    out,
    frames,
    height,
    width,
    row_values: tl.constexpr,
    taps: tl.constexpr,
    PIXELS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    SECOND: tl.constexpr,  # noqa: N803
):
    steps: tl.constexpr = (row_values + DEPTH - 1) // DEPTH
    start = tl.program_id(0) * PIXELS
    row = width + 2
    frame = row * (height + 2)
    sum1 = tl.zeros((PIXELS, FIRST), dtype=tl.float32)
    sum2 = tl.zeros((PIXELS, SECOND), dtype=tl.float32)
    for k in range(taps * steps):
        tap = k // steps
        value = (k % steps) * DEPTH
        seen = x.load([start + (tap // 3) * frame + (tap % 3) * row, value])
        sum1 = tl.dot(seen, first.load([tap * row_values + value, 0]), sum1)
        sum2 = tl.dot(seen, second.load([tap * row_values + value, FIRST]), sum2)
    pixel = start + tl.arange(0, PIXELS)
    t, rest = pixel // frame, pixel % frame
    h, w = rest // row, rest % row
    inside = (t < frames) & (h < height) & (w < width)
    at = ((t.to(tl.int64) * height + h) * width + w) * (FIRST + SECOND)
    place1, place2 = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND)
    tl.store(out + at[:, None] + place1[None, :], sum1.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(out + at[:, None] + place2[None, :], sum2.to(out.dtype.element_ty), mask=inside[:, None])


def norm_activate(
    x: torch.Tensor, bias: torch.Tensor | None, gamma: torch.Tensor, before: torch.Tensor, padding: int = 0
) -> torch.Tensor:
    """See `vae.norm_activate`."""
    _, channels, frames, height, width = x.shape
    given, cached = _pixels(x), _pixels(before)
    rows, row = height + 2 * padding, width + 2 * padding
    out = x.new_empty((1, CACHED_FRAMES + frames, rows, row, channels))
    line, wide = _line(channels)
    with torch.cuda.device_of(x):
        _norm_activate_kernel[(CACHED_FRAMES + frames) * rows, triton.cdiv(row, line)](
            given, bias, gamma.reshape(-1), cached, out, height, width, channels, padding, CACHED_FRAMES, line, wide
        )
    return out.permute(0, 4, 1, 2, 3)


def add_residual(x: torch.Tensor, bias: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
    """See `vae.add_residual`."""
    given, added = _pixels(x), _pixels(shortcut)
    out = torch.empty_like(given)
    pixels, (line, wide) = out.numel() // x.shape[1], _line(x.shape[1])
    with torch.cuda.device_of(x):
        _add_residual_kernel[(triton.cdiv(pixels, line),)](given, bias, added, out, pixels, x.shape[1], line, wide)
    return out.permute(0, 4, 1, 2, 3)


def upsample(frames: torch.Tensor) -> torch.Tensor:
    """See `vae.upsample`."""
    count, channels, height, width = frames.shape
    given = frames.permute(0, 2, 3, 1).contiguous()
    out = frames.new_empty((count, 2 * height, 2 * width, channels))
    line, wide = _line(channels)
    with torch.cuda.device_of(frames):
        _upsample_kernel[count * 2 * height, triton.cdiv(2 * width, line)](
            given, out, height, width, channels, line, wide
        )
    return out.permute(0, 3, 1, 2)


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a convolution, (1, `OUTPUTS`, frames, height, width), without a bias.

    Args:
        x: (1, channels, frames + kernel's - 1, height + 2, width + 2), padded.
        weight: (`OUTPUTS`, channels, kernel's frames, 3, 3), output channels contiguous in memory.
    """
    channels, taps = x.shape[1], 3 * weight.shape[2]
    frames, height, width = x.shape[2] - weight.shape[2] + 1, x.shape[3] - 2, x.shape[4] - 2
    given = _pixels(x)
    matrix = weight.permute(2, 3, 4, 1, 0).reshape(-1, OUTPUTS)
    threes = TensorDescriptor(given, [given.numel() // channels - 2, 3 * channels], [channels, 1], [_PIXELS, _DEPTH])
    first, second = (
        TensorDescriptor(matrix, list(matrix.shape), [OUTPUTS, 1], [_DEPTH, wide]) for wide in (_FIRST, _SECOND)
    )
    out = x.new_empty((1, frames, height, width, OUTPUTS))
    last = ((frames - 1) * x.shape[3] + height - 1) * x.shape[4] + width
    sizes = (frames, height, width, 3 * channels, taps, _PIXELS, _DEPTH, _FIRST, _SECOND)
    with torch.cuda.device_of(x):
        _convolve_kernel[(triton.cdiv(last, _PIXELS),)](
            threes, first, second, out, *sizes, num_warps=_WARPS, num_stages=_STAGES
        )
    return out.permute(0, 4, 1, 2, 3)


def _pixels(x: torch.Tensor) -> torch.Tensor:
    """Return (1, channels, frames, height, width) as a contiguous (1, frames, height, width, channels)."""
    return x.permute(0, 2, 3, 4, 1).contiguous()


def _line(channels: int) -> tuple[int, int]:
    """Return the number of pixels of a program, and the number of channels rounded up to a power of two."""
    wide = triton.next_power_of_2(channels)
    return max(_VALUES // wide, 1), wide
