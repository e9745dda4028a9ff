"""Operations between two matrix products of a transformer. Independent of models.

A compiler fuses them with their neighbours. Where nothing is compiled, PyTorch runs several kernels for each, all of
which read and write all tokens; on GPUs with Triton, one kernel of `row_kernels` computes it.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from runtime.core.errors import first_line, ran_out

_LARGEST = 448.0
SMALLEST_AMAX = 1e-12
# Smaller tensors take no longer in several kernels, which need no compiler.
_FEWEST_VALUES = 1 << 22
# Why a kernel failed in this process.
_FAILED: list[str] = []

# An operation of this module and its arguments, for few tokens. A kernel is compiled for dtypes, widths and strides of
# tensors, and for which there are, so these are as in a transformer.
RowCall = tuple[Callable[..., Any], tuple[Any, ...]]
# Of all published transformers' norms.
EPSILON = 1e-6
# A scale and a shift, each (timesteps, width).
Modulation = tuple[torch.Tensor, torch.Tensor]

logger = logging.getLogger(__name__)


def layer_norm(
    x: torch.Tensor, factor: torch.Tensor, offset: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the layer norm of each token times a factor plus an offset, computed in float32.

    Args:
        x: (batch, tokens, width).
        factor, offset: (1, 1 or tokens, width).
        dtype: of the result, which is shaped like `x`.
    """
    return F.layer_norm(x.float(), x.shape[-1:], eps=epsilon).mul_(factor).add_(offset).to(dtype)


def add_gated(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return `x` + `y` · `gate`, computed in float32, in the dtype of `x`.

    Args:
        x, y: (batch, tokens, width).
        gate: (1, 1 or tokens, width), float32.
    """
    return (y * gate).add_(x).to(x.dtype)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of adjacent channels of `x`, (batch, tokens, heads, head width), by its token's angles.

    Args:
        cos, sin: see `execution.rotation.Rotation`.
    """
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)


def add_norms(
    x: torch.Tensor,
    y: torch.Tensor | None,
    gate: torch.Tensor | None,
    modulations: Sequence[Modulation | None],
    first_count: int,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """Return `x` + `y` · `gate` and RMS norms of it, without weights, computed in float32.

    Args:
        x, y: (1, tokens, width); `y` is `None` if nothing is added.
        gate: (timesteps, width), float32; `None` for ones.
        modulations: a scale and a shift for each norm, each (timesteps, width), float32; the norm is multiplied by one
            plus the scale. `None` for the norm alone.
        first_count: see `by_token`.

    Returns:
        The sum, `x` itself if nothing is added, and the norms, all in the dtype of `x`.
    """
    tokens, wide = x.shape[1], x.float()
    if y is not None:
        wide = wide + (y if gate is None else y * _row(gate, tokens, first_count))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) if modulations else wide
    rows = [pair and [_row(row, tokens, first_count) for row in pair] for pair in modulations]
    norms = [normed if pair is None else normed * (1 + pair[0]) + pair[1] for pair in rows]
    return (x if y is None else wide.to(x.dtype), *(norm.to(x.dtype) for norm in norms))


def norm_rotate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    distance: int = 1,
) -> torch.Tensor:
    """Return the RMS norm of each token, with each pair of its channels rotated, computed in float32.

    Args:
        x: (batch, tokens, width).
        weight: of the norm, (width); `None` if `x` is normed.
        cos, sin: of each pair, (1, tokens, width / 2), float32; `None` for no rotation.
        distance: between the channels of a pair: 1 if they are adjacent, or half of a head's width. Pairs are numbered
            by their first channels.

    Returns:
        A tensor shaped like `x`, in its dtype.
    """
    normed = wide = x.float()
    if weight is not None:
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight
    if cos is None or sin is None:
        return normed.to(x.dtype)
    # In this form a compiler can compute it in the kernel of the norm.
    pairs = normed.unflatten(-1, (-1, 2, distance))
    cos, sin = (table.unflatten(-1, (-1, 1, distance)) for table in (cos, sin))
    signs = torch.arange(-1, 2, 2, device=x.device)[:, None]
    return (pairs * cos + pairs.flip(-2) * (sin * signs)).flatten(-3).to(x.dtype)


def by_token(table: torch.Tensor, tokens: int, first_count: int) -> list[torch.Tensor]:
    """Return the rows of `table`, (timesteps, rows, width), each (1, 1 or tokens, width).

    Args:
        first_count: the number of first tokens that have the first of two timesteps.
    """
    if len(table) > 1 and not 0 < first_count < tokens:
        table = table[:1] if first_count else table[1:]
    rows = list(table.chunk(table.shape[1], dim=1))
    if len(table) == 1:
        return rows
    first = (torch.arange(tokens, device=table.device) < first_count)[None, :, None]
    return [torch.where(first, row[:1], row[1:]) for row in rows]


def _row(row: torch.Tensor, tokens: int, first_count: int) -> torch.Tensor:
    """Return one row of a table, (timesteps, width), as (1, 1 or tokens, width)."""
    return by_token(row[:, None], tokens, first_count)[0]


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows (tokens, width) to float8_e4m3fn, each scaled so that its largest magnitude is 448.

    Returns:
        The rows, and their scales (tokens, 1), float32: a row is the product of both.
    """
    values = x.float()
    scales = values.abs().amax(1, keepdim=True).clamp(min=SMALLEST_AMAX) / _LARGEST
    return (values / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def quantize_gelu_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantize_rows` of the GELU of rows (tokens, width), approximated with tanh, in the dtype of `x`."""
    return quantize_rows(F.gelu(x, approximate="tanh"))


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a tensor in e4m3, times a factor, a scalar."""
    return (x.float() * scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def from_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the result of `to_fp8` divided by its factor, in another dtype."""
    return (x.float() / scale).to(dtype)


def computed(plain: Callable[..., Any], x: torch.Tensor, *arguments: Any, fewest: int | None = None) -> Any:
    """Return the result of the kernel with the name of `plain`, or of `plain` itself.

    `plain` runs on other devices, for few values, while a function is compiled, and in a process in which a kernel has
    failed.

    Args:
        fewest: values of `x` that a kernel is used for; by default as many as make it faster in one call.
    """
    enough = x.numel() >= (_FEWEST_VALUES if fewest is None else fewest)
    if not torch.compiler.is_compiling() and enough and triton_runs_on(x.device) and not _FAILED:
        try:
            kernels = import_module("runtime.models.row_kernels")
            return getattr(kernels, plain.__name__)(x, *arguments)
        except Exception as error:  # Triton raises errors of any type
            if ran_out(error) is not None:
                raise
            logger.warning("A Triton kernel failed; PyTorch computes its operations.", exc_info=error)
            _FAILED.append(first_line(error))
    return plain(x, *arguments)


def compile_kernels(calls: Iterable[RowCall], device: str) -> None:
    """Compile the kernels of operations on a GPU with Triton, or load them from Triton's cache: compute each once."""
    if triton_runs_on(torch.device(device)) and not _FAILED:
        kernels = import_module("runtime.models.row_kernels")
        for plain, arguments in calls:
            getattr(kernels, plain.__name__)(*arguments)


def rounding_calls(
    widths: Iterable[int], dtype: torch.dtype, device: str, quantize: Callable[[torch.Tensor], Any] = quantize_rows
) -> Iterator[RowCall]:
    """Yield the operations that round rows of these widths to FP8."""
    for width in widths:
        yield quantize, (torch.ones(1, width, dtype=dtype, device=device),)


@lru_cache(maxsize=16)
def triton_runs_on(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
