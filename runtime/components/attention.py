"""Attention of queries, keys and values by one of several kernels, alike to call.

    native   PyTorch's own choice
    cudnn    cuDNN's, through PyTorch
    flash    FlashAttention 2, as PyTorch has it
    flash3   FlashAttention 3, package `flash_attn_interface`
    flash4   FlashAttention 4, package `flash-attn-4`
    sage     SageAttention: products in 8 bits
    fp8      cuDNN's in FP8, through `nvidia-cudnn-frontend`: every factor in 8 bits, see `fp8_attention`

Those that PyTorch does not know are operators of their own, so that a compiled block holds them as one call.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.components.fp8_attention import attend_fp8

# Queries, keys and values, each (batch, tokens, heads, head width), to the same.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention(kind: str) -> Attention:
    """Return an attention by its name above."""
    return _KINDS[kind]


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*_heads_first(q, k, v)).transpose(1, 2)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*_heads_first(q, k, v)).transpose(1, 2)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*_heads_first(q, k, v)).transpose(1, 2)


@torch.library.custom_op("tandem::attend", mutates_args=())
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> torch.Tensor:
    # Their packages say so little of themselves that mypy sees Any.
    package: Any
    if kind == "flash3":
        import flash_attn_interface as package

        out = package.flash_attn_func(q, k, v)
    elif kind == "flash4":
        import flash_attn.cute as package

        out = package.flash_attn_func(q, k, v)
    else:
        import sageattention as package

        out = package.sageattn(q, k, v, tensor_layout="NHD")
    attended: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return attended.contiguous()


@_attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> torch.Tensor:
    return q.new_empty(q.shape)


def _by_package(kind: str) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.tandem.attend(q, k, v, kind)
        return out

    return attend


_KINDS: dict[str, Attention] = {
    "native": _native,
    "cudnn": _cudnn,
    "flash": _flash,
    "flash3": _by_package("flash3"),
    "flash4": _by_package("flash4"),
    "sage": _by_package("sage"),
    "fp8": attend_fp8,
}
