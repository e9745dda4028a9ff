"""The kernel of `causal_conv`, for Triton on Hopper: a convolution as a product, its inputs fetched block by block.

Pixels of a padded clip lie one after the other, channels first: what a place of the convolution's kernel sees of all
output pixels is then the same matrix some rows later, and three places beside each other are one row three pixels long.
Rows that end in the padding are computed with the others and not kept.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# What a program computes: so many pixels, and their 96 outputs in two blocks, for a block is a power of two wide.
_PIXELS, _FIRST, _SECOND = 256, 64, 32
OUTPUTS = _FIRST + _SECOND
# Values that a product sums at a time, warps, and blocks on their way at once: the fastest of those tried on an H200.
_DEPTH, _WARPS, _STAGES = 32, 8, 5


# Sizes change from call to call: compiled once for all.
@triton.jit(do_not_specialize=["frames", "height", "width"])
def _kernel(  # type: ignore[no-untyped-def] # Triton reads annotations as its own
    x,
    first,
    second,
    out,
    frames,
    height,
    width,
    row_values: tl.constexpr,
    taps: tl.constexpr,
    PIXELS: tl.constexpr,  # noqa: N803 - as Triton's own code has it
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


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a convolution, (1, `OUTPUTS`, frames, height, width), without a bias.

    Args:
        x: (1, channels, frames + kernel's - 1, height + 2, width + 2), padded.
        weight: (`OUTPUTS`, channels, kernel's frames, 3, 3).
    """
    channels, taps = x.shape[1], 3 * weight.shape[2]
    frames, height, width = x.shape[2] - weight.shape[2] + 1, x.shape[3] - 2, x.shape[4] - 2
    pixels = x.permute(0, 2, 3, 4, 1).contiguous()
    matrix = weight.permute(2, 3, 4, 1, 0).reshape(-1, OUTPUTS)
    threes = TensorDescriptor(pixels, [pixels.numel() // channels - 2, 3 * channels], [channels, 1], [_PIXELS, _DEPTH])
    first, second = (
        TensorDescriptor(matrix, list(matrix.shape), [OUTPUTS, 1], [_DEPTH, wide]) for wide in (_FIRST, _SECOND)
    )
    out = x.new_empty((1, frames, height, width, OUTPUTS))
    last = ((frames - 1) * x.shape[3] + height - 1) * x.shape[4] + width
    with torch.cuda.device(x.device):
        _kernel[(triton.cdiv(last, _PIXELS),)](
            threes,
            first,
            second,
            out,
            frames,
            height,
            width,
            3 * channels,
            taps,
            _PIXELS,
            _DEPTH,
            _FIRST,
            _SECOND,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return out.permute(0, 4, 1, 2, 3)
