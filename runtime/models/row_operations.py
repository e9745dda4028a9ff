"""Operations between two matrix products of a transformer. Independent of models.

A compiler fuses them with their neighbours. Where nothing is compiled, PyTorch runs several kernels for each, all of
which read and write all tokens; on GPUs with Triton, one kernel of `row_kernels` computes it.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from runtime.core.errors import first_line, ran_out

_LARGEST = 448.0
_SMALLEST_AMAX = 1e-12
# Smaller tensors take no longer in several kernels, which need no compiler.
_FEWEST_VALUES = 1 << 22
# Why a kernel failed in this process.
_FAILED: list[str] = []

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


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows (tokens, width) to float8_e4m3fn, each scaled so that its largest magnitude is 448.

    Returns:
        The rows, and their scales (tokens, 1), float32: a row is the product of both.
    """
    values = x.float()
    scales = values.abs().amax(1, keepdim=True).clamp(min=_SMALLEST_AMAX) / _LARGEST
    return (values / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a tensor in e4m3, times a factor, a scalar."""
    return (x.float() * scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def from_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the result of `to_fp8` divided by its factor, in another dtype."""
    return (x.float() / scale).to(dtype)


def computed(plain: Callable[..., Any], x: torch.Tensor, *arguments: Any) -> Any:
    """Return the result of the kernel with the name of `plain`, or of `plain` itself.

    `plain` runs on other devices, for few values, while a function is compiled, and in a process in which a kernel has
    failed.
    """
    if not torch.compiler.is_compiling() and x.numel() >= _FEWEST_VALUES and triton_runs_on(x.device) and not _FAILED:
        try:
            kernels = import_module("runtime.models.row_kernels")
            return getattr(kernels, plain.__name__)(x, *arguments)
        except Exception as error:  # Triton raises errors of any type
            if ran_out(error) is not None:
                raise
            logger.warning("A Triton kernel failed; PyTorch computes its operations.", exc_info=error)
            _FAILED.append(first_line(error))
    return plain(x, *arguments)


def compile_kernels(
    heads: int, head_width: int, rounded_widths: Iterable[int], dtype: torch.dtype, device: str
) -> None:
    """Compile the kernels that `computed` will call, on a GPU with Triton; see `row_kernels.compile_kernels`."""
    if triton_runs_on(torch.device(device)) and not _FAILED:
        import_module("runtime.models.row_kernels").compile_kernels(heads, head_width, rounded_widths, dtype, device)


@lru_cache(maxsize=16)
def triton_runs_on(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
