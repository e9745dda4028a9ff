"""Triton kernels of the VAE decoder: the operations between two convolutions, and the largest convolutions.

The functions have the names and arguments of those in `vae` that they replace. Tensors are in channels-last layout.
Each Triton program computes a few pixels, all channels of them, and reads and writes every value once.

The convolution is a matrix product (implicit GEMM). The input is a matrix with one row per pixel, and each position of
the convolution's kernel reads the same matrix at another row offset. Three horizontal positions are read at once, as
one row of three adjacent pixels. The tensor memory accelerator (Hopper and later GPUs) loads the blocks. Output pixels
in the padding are computed and discarded.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.families.wan.vae import CACHED_FRAMES
from runtime.planner.constraints import OUTPUTS_BY_KERNEL as OUTPUTS

# Values that a program computes: pixels times channels.
_BLOCK_VALUES = 4096
# The convolution: pixels per program, and the output channels of its two products, which must be powers of two.
_PIXELS, _FIRST, _SECOND = 256, 64, OUTPUTS - 64
# Input values per product, warps and pipeline stages: the fastest of those tried on an H200.
_DEPTH, _WARPS, _STAGES = 32, 8, 5


# Kernels are not specialized on sizes, because these change from call to call. They have no annotations, because
# Triton interprets annotations. Names of block sizes are in capitals, as in Triton's documentation.
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
    BLOCK_PIXELS: tl.constexpr,  # noqa: N803
    BLOCK_CHANNELS: tl.constexpr,  # noqa: N803
):
    out_width, out_height = width + 2 * padding, height + 2 * padding
    out_row = tl.program_id(0)
    frame, h = out_row // out_height, out_row % out_height - padding
    out_w = tl.program_id(1) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    w = out_w - padding
    channel = tl.arange(0, BLOCK_CHANNELS)
    in_row = (out_w < out_width)[:, None] & (channel < channels)[None, :]
    in_frame = in_row & ((w >= 0) & (w < width) & (h >= 0) & (h < height))[:, None]
    if frame < cached:
        pixel = (frame.to(tl.int64) * height + h) * width + w
        y = tl.load(before + pixel[:, None] * channels + channel[None, :], mask=in_frame, other=0.0)
    else:
        pixel = ((frame - cached).to(tl.int64) * height + h) * width + w
        value = tl.load(x + pixel[:, None] * channels + channel[None, :], mask=in_frame, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
        norm = tl.sqrt(tl.sum(value * value, axis=1))
        scale = tl.load(gamma + channel, mask=channel < channels, other=0.0).to(tl.float32)
        value = value / tl.maximum(norm, 1e-12)[:, None] * scale[None, :]
        y = tl.where(in_frame, value * tl.sigmoid(value), 0.0).to(out.dtype.element_ty)
    pixel = out_row.to(tl.int64) * out_width + out_w
    tl.store(out + pixel[:, None] * channels + channel[None, :], y, mask=in_row)


@triton.jit(do_not_specialize=["pixels"])
def _add_residual_kernel(  # type: ignore[no-untyped-def]
    x,
    bias,
    shortcut,
    out,
    pixels,
    channels: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,  # noqa: N803
    BLOCK_CHANNELS: tl.constexpr,  # noqa: N803
):
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    in_range = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    offsets = pixel[:, None] * channels + channel[None, :]
    value = tl.load(x + offsets, mask=in_range).to(tl.float32)
    value += tl.load(bias + channel, mask=channel < channels).to(tl.float32)[None, :]
    value += tl.load(shortcut + offsets, mask=in_range).to(tl.float32)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=in_range)


@triton.jit(do_not_specialize=["height", "width"])
def _upsample_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    height,
    width,
    channels: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,  # noqa: N803
    BLOCK_CHANNELS: tl.constexpr,  # noqa: N803
):
    out_row = tl.program_id(0)
    frame, h = out_row // (2 * height), out_row % (2 * height)
    out_w = tl.program_id(1) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    in_row = (out_w < 2 * width)[:, None] & (channel < channels)[None, :]
    pixel = (frame.to(tl.int64) * height + h // 2) * width + out_w // 2
    value = tl.load(x + pixel[:, None] * channels + channel[None, :], mask=in_row)
    pixel = out_row.to(tl.int64) * (2 * width) + out_w
    tl.store(out + pixel[:, None] * channels + channel[None, :], value, mask=in_row)


@triton.jit(do_not_specialize=["frames", "height", "width"])
def _convolve_kernel(  # type: ignore[no-untyped-def]
    x,
    weight1,
    weight2,
    out,
    frames,
    height,
    width,
    tap_values: tl.constexpr,
    taps: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,  # noqa: N803
    BLOCK_DEPTH: tl.constexpr,  # noqa: N803
    BLOCK_FIRST: tl.constexpr,  # noqa: N803
    BLOCK_SECOND: tl.constexpr,  # noqa: N803
):
    steps_per_tap: tl.constexpr = (tap_values + BLOCK_DEPTH - 1) // BLOCK_DEPTH
    start = tl.program_id(0) * BLOCK_PIXELS
    padded_width = width + 2
    padded_frame = padded_width * (height + 2)
    sum1 = tl.zeros((BLOCK_PIXELS, BLOCK_FIRST), dtype=tl.float32)
    sum2 = tl.zeros((BLOCK_PIXELS, BLOCK_SECOND), dtype=tl.float32)
    for k in range(taps * steps_per_tap):
        tap = k // steps_per_tap
        column = (k % steps_per_tap) * BLOCK_DEPTH
        inputs = x.load([start + (tap // 3) * padded_frame + (tap % 3) * padded_width, column])
        sum1 = tl.dot(inputs, weight1.load([tap * tap_values + column, 0]), sum1)
        sum2 = tl.dot(inputs, weight2.load([tap * tap_values + column, BLOCK_FIRST]), sum2)
    pixel = start + tl.arange(0, BLOCK_PIXELS)
    t, rest = pixel // padded_frame, pixel % padded_frame
    h, w = rest // padded_width, rest % padded_width
    in_frame = (t < frames) & (h < height) & (w < width)
    offsets = ((t.to(tl.int64) * height + h) * width + w) * (BLOCK_FIRST + BLOCK_SECOND)
    channel1, channel2 = tl.arange(0, BLOCK_FIRST), BLOCK_FIRST + tl.arange(0, BLOCK_SECOND)
    tl.store(out + offsets[:, None] + channel1[None, :], sum1.to(out.dtype.element_ty), mask=in_frame[:, None])
    tl.store(out + offsets[:, None] + channel2[None, :], sum2.to(out.dtype.element_ty), mask=in_frame[:, None])


def norm_activate(
    x: torch.Tensor, bias: torch.Tensor | None, gamma: torch.Tensor, before: torch.Tensor, padding: int = 0
) -> torch.Tensor:
    """Compute `vae.norm_activate`."""
    _, channels, frames, height, width = x.shape
    pixels, cached = _pixels(x), _pixels(before)
    out_height, out_width = height + 2 * padding, width + 2 * padding
    out = x.new_empty((1, CACHED_FRAMES + frames, out_height, out_width, channels))
    block = _block(channels)
    with torch.cuda.device_of(x):
        _norm_activate_kernel[(CACHED_FRAMES + frames) * out_height, triton.cdiv(out_width, block[0])](
            pixels, bias, gamma.reshape(-1), cached, out, height, width, channels, padding, CACHED_FRAMES, *block
        )
    return out.permute(0, 4, 1, 2, 3)


def add_residual(x: torch.Tensor, bias: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
    """Compute `vae.add_residual`."""
    channels, values = x.shape[1], _pixels(x)
    out = torch.empty_like(values)
    count, block = out.numel() // channels, _block(channels)
    with torch.cuda.device_of(x):
        _add_residual_kernel[(triton.cdiv(count, block[0]),)](
            values, bias, _pixels(shortcut), out, count, channels, *block
        )
    return out.permute(0, 4, 1, 2, 3)


def upsample(frames: torch.Tensor) -> torch.Tensor:
    """Compute `vae.upsample`."""
    count, channels, height, width = frames.shape
    pixels = frames.permute(0, 2, 3, 1).contiguous()
    out = frames.new_empty((count, 2 * height, 2 * width, channels))
    block = _block(channels)
    with torch.cuda.device_of(frames):
        _upsample_kernel[count * 2 * height, triton.cdiv(2 * width, block[0])](
            pixels, out, height, width, channels, *block
        )
    return out.permute(0, 3, 1, 2)


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a convolution, (1, `OUTPUTS`, frames, height, width), without a bias.

    Args:
        x: the padded input, (1, channels, frames + kernel frames - 1, height + 2, width + 2).
        weight: (`OUTPUTS`, channels, kernel frames, 3, 3), output channels contiguous in memory.
    """
    # A tap is one row of the kernel: three horizontal positions.
    channels, taps = x.shape[1], 3 * weight.shape[2]
    frames, height, width = x.shape[2] - weight.shape[2] + 1, x.shape[3] - 2, x.shape[4] - 2
    pixels = _pixels(x)
    matrix = weight.permute(2, 3, 4, 1, 0).reshape(-1, OUTPUTS)
    # Row i holds the pixels i, i + 1 and i + 2: rows overlap in memory.
    rows = TensorDescriptor(pixels, [pixels.numel() // channels - 2, 3 * channels], [channels, 1], [_PIXELS, _DEPTH])
    weight1, weight2 = (
        TensorDescriptor(matrix, list(matrix.shape), [OUTPUTS, 1], [_DEPTH, count]) for count in (_FIRST, _SECOND)
    )
    out = x.new_empty((1, frames, height, width, OUTPUTS))
    end = ((frames - 1) * x.shape[3] + height - 1) * x.shape[4] + width
    sizes = (frames, height, width, 3 * channels, taps, _PIXELS, _DEPTH, _FIRST, _SECOND)
    with torch.cuda.device_of(x):
        _convolve_kernel[(triton.cdiv(end, _PIXELS),)](
            rows, weight1, weight2, out, *sizes, num_warps=_WARPS, num_stages=_STAGES
        )
    return out.permute(0, 4, 1, 2, 3)


def _pixels(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, (1, channels, frames, height, width), as contiguous (1, frames, height, width, channels)."""
    return x.permute(0, 2, 3, 4, 1).contiguous()


def _block(channels: int) -> tuple[int, int]:
    """Return the number of pixels per program, and `channels` rounded up to a power of two."""
    rounded = triton.next_power_of_2(channels)
    return max(_BLOCK_VALUES // rounded, 1), rounded
