"""Triton kernels of the operations between two matrix products of a transformer, for blocks that are not compiled.

The functions have the names and arguments of those in `row_operations`, whose results they compute. A program computes
one token; it reads and writes every value once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from runtime.models.row_operations import Modulation

_LARGEST = tl.constexpr(448.0)
_SMALLEST_AMAX = tl.constexpr(1e-12)
# Of GELU approximated with tanh: the root of 2/π, and the factor of the cube.
_GELU_FACTOR, _GELU_CUBIC = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)
# Values for one warp of a program, and values of a program where tokens do not matter.
_PER_WARP, _FLAT = 1024, 4096


# Kernels have no annotations, because Triton interprets annotations. Names of block sizes are in capitals, as in
# Triton's documentation. Tables have one row, of all tokens, or a row for each token: then `by_token` is 1.
@triton.jit(do_not_specialize=["tokens"])
def _norm_kernel(  # type: ignore[no-untyped-def]
    x,
    factor,
    offset,
    out,
    tokens,
    by_token: tl.constexpr,
    epsilon: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, value - tl.sum(value) / width, 0.0)
    normed = centered * tl.rsqrt(tl.sum(centered * centered) / width + epsilon)
    place = (row % tokens) * (by_token * width) + column
    scale = tl.load(factor + place, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(offset + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (normed * scale + shift).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _add_kernel(  # type: ignore[no-untyped-def]
    x,
    y,
    gate,
    out,
    tokens,
    by_token: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    scale = tl.load(gate + (row % tokens) * (by_token * width) + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + place, mask=inside, other=0.0).to(tl.float32) * scale
    value += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    tokens,
    head_width: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    angle = (row % tokens) * head_width + column % head_width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + row * width + (column ^ 1), mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(cos + angle, mask=inside, other=0.0) + other * tl.load(sin + angle, mask=inside, other=0.0)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


# A token has the first row of each table, or from number `first` on the second, which follows after `stride` values.
@triton.jit(do_not_specialize=["tokens", "first"])
def _add_norms_kernel(  # type: ignore[no-untyped-def]
    x,
    y,
    gate,
    scale,
    shift,
    scale_2,
    shift_2,
    out,
    norm,
    norm_2,
    tokens,
    first,
    stride: tl.constexpr,
    adds: tl.constexpr,
    gates: tl.constexpr,
    norms: tl.constexpr,
    modulates: tl.constexpr,
    epsilon: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    table = ((row % tokens) >= first).to(tl.int64) * stride + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if adds:
        added = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        if gates:
            added *= tl.load(gate + table, mask=inside, other=0.0)
        value += added
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    if norms > 0:
        normed = value * tl.rsqrt(tl.sum(value * value) / width + epsilon)
        result = normed
        if modulates:
            factor = 1 + tl.load(scale + table, mask=inside, other=0.0)
            result = normed * factor + tl.load(shift + table, mask=inside, other=0.0)
        tl.store(norm + place, result.to(norm.dtype.element_ty), mask=inside)
        if norms > 1:
            factor = 1 + tl.load(scale_2 + table, mask=inside, other=0.0)
            result = normed * factor + tl.load(shift_2 + table, mask=inside, other=0.0)
            tl.store(norm_2 + place, result.to(norm_2.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _norm_rotate_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    cos,
    sin,
    out,
    tokens,
    stride: tl.constexpr,
    norms: tl.constexpr,
    rotates: tl.constexpr,
    distance: tl.constexpr,
    epsilon: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0
    if norms:
        inverse = tl.rsqrt(tl.sum(value * value) / width + epsilon)
        value = value * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if rotates:
        is_second = column % (2 * distance) >= distance
        partner = tl.where(is_second, column - distance, column + distance)
        other = tl.load(x + row * stride + partner, mask=inside, other=0.0).to(tl.float32)
        if norms:
            other = other * inverse * tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
        angle = (row % tokens) * (width // 2) + column // (2 * distance) * distance + column % distance
        sine = tl.load(sin + angle, mask=inside, other=0.0)
        value = value * tl.load(cos + angle, mask=inside, other=0.0) + other * tl.where(is_second, sine, -sine)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x,
    rounded,
    scales,
    activates: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if activates:
        # 1 + tanh(z) is twice the sigmoid of 2z.
        inner = _GELU_FACTOR * (value + _GELU_CUBIC * value * value * value)
        value = (value * tl.sigmoid(2 * inner)).to(x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value)), _SMALLEST_AMAX) / _LARGEST
    value = tl.minimum(tl.maximum(value / scale, -_LARGEST), _LARGEST)
    tl.store(rounded + row * width + column, value.to(rounded.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["count"])
def _scale_kernel(  # type: ignore[no-untyped-def]
    x,
    scale,
    out,
    count,
    divides: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale)
    limited = tl.minimum(tl.maximum(value * factor, -_LARGEST), _LARGEST)
    tl.store(out + place, (value / factor if divides else limited).to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: torch.Tensor, factor: torch.Tensor, offset: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `row_operations.layer_norm`."""
    x, (factor, offset) = x.contiguous(), torch.broadcast_tensors(factor, offset)
    out = torch.empty_like(x, dtype=dtype)
    tokens, width = x.shape[-2:]
    tables = factor.contiguous(), offset.contiguous()
    with torch.cuda.device_of(x):
        _norm_kernel[(x.numel() // width,)](
            x, *tables, out, tokens, int(tables[0].shape[-2] > 1), epsilon, width, **_block(width)
        )
    return out


def add_gated(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute `row_operations.add_gated`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    tokens, width = x.shape[-2:]
    with torch.cuda.device_of(x):
        _add_kernel[(x.numel() // width,)](
            x, y.contiguous(), gate.contiguous(), out, tokens, int(gate.shape[-2] > 1), width, **_block(width)
        )
    return out


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute `row_operations.rotate_pairs`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _, tokens, heads, head_width = x.shape
    width = heads * head_width
    tables = cos.float().contiguous(), sin.float().contiguous()
    with torch.cuda.device_of(x):
        _rotate_kernel[(x.numel() // width,)](x, *tables, out, tokens, head_width, width, **_block(width))
    return out


def add_norms(
    x: torch.Tensor,
    y: torch.Tensor | None,
    gate: torch.Tensor | None,
    modulations: Sequence[Modulation | None],
    first_count: int,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """Compute `row_operations.add_norms`, of at most two norms, the second with a modulation."""
    x = x.contiguous()
    out = x if y is None else torch.empty_like(x)
    norms = [torch.empty_like(x) for _ in modulations]
    given = [gate, *(row for pair in modulations for row in pair or (None, None))]
    tables = [row for row in given if row is not None]
    if len({row.stride() for row in tables}) > 1 or any(row.stride(-1) != 1 for row in tables):
        given = [None if row is None else row.contiguous() for row in given]
        tables = [row for row in given if row is not None]
    stride = tables[0].stride(0) if tables and len(tables[0]) > 1 else 0
    # What a kernel does not read is any tensor.
    rows = [x if row is None else row for row in (*given, *(None,) * (5 - len(given)))]
    results = [*norms, *(x,) * (2 - len(norms))]
    tokens, width = x.shape[-2:]
    with torch.cuda.device_of(x):
        _add_norms_kernel[(x.numel() // width,)](
            x,
            x if y is None else y.contiguous(),
            *rows,
            out,
            *results,
            tokens,
            first_count,
            stride,
            y is not None,
            gate is not None,
            len(norms),
            bool(modulations) and modulations[0] is not None,
            epsilon,
            width,
            **_block(width),
        )
    return out, *norms


def norm_rotate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    distance: int = 1,
) -> torch.Tensor:
    """Compute `row_operations.norm_rotate`; `x` may be some columns of a wider tensor."""
    batch, tokens, width = x.shape
    if x.stride(2) != 1 or (batch > 1 and x.stride(0) != tokens * x.stride(1)):
        x = x.contiguous()
    out = torch.empty((batch, tokens, width), dtype=x.dtype, device=x.device)
    tables = (x, x) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    with torch.cuda.device_of(x):
        _norm_rotate_kernel[(batch * tokens,)](
            x,
            x if weight is None else weight,
            *tables,
            out,
            tokens,
            x.stride(1),
            weight is not None,
            cos is not None,
            distance,
            epsilon,
            width,
            **_block(width),
        )
    return out


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `row_operations.quantize_rows`."""
    return _quantized(x, activates=False)


def quantize_gelu_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `row_operations.quantize_gelu_rows`."""
    return _quantized(x, activates=True)


def _quantized(x: torch.Tensor, *, activates: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    rows, width = x.shape
    rounded = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _quantize_kernel[(rows,)](x, rounded, scales, activates, width, **_block(width))
    return rounded, scales


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Compute `row_operations.to_fp8`."""
    return _scaled(x, scale, torch.float8_e4m3fn, divides=False)


def from_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `row_operations.from_fp8`."""
    return _scaled(x, scale, dtype, divides=True)


def _scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, divides: bool) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    with torch.cuda.device_of(x):
        _scale_kernel[(triton.cdiv(x.numel(), _FLAT),)](x, scale, out, x.numel(), divides, BLOCK=_FLAT)
    return out


def _block(width: int) -> dict[str, int]:
    """Return the block size of a row, a power of two, and the warps that compute it."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // _PER_WARP, 1), 16)}
