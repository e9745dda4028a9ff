"""Attention kernels with one signature.

    native   the kernel that PyTorch selects
    cudnn    cuDNN, through PyTorch
    flash    FlashAttention 2, included in PyTorch
    flash3   FlashAttention 3, package `flash_attn_interface`
    flash4   FlashAttention 4, package `flash-attn-4`
    sage     SageAttention: products in 8 bits
    fp8      cuDNN in FP8, through `nvidia-cudnn-frontend`: every factor in 8 bits, see `fp8_attention`

Kernels of other packages are custom operators, so that a compiled block calls them without a graph break.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from runtime.core.errors import first_line, ran_out
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.execution.fp8_attention import attend_fp8
from runtime.upstream.torch import cudnn_attention, flash_attention

_MODULES = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute", "sage": "sageattention"}
OF_PACKAGES = frozenset(_MODULES)
_TEST_TOKENS, _TEST_TOLERANCE = 2048, 0.1
_TIMED_CALLS = 2
FP8 = "fp8"

# Queries, keys and values, each (batch, tokens, heads, head width), to the same.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention(kind: str) -> Attention:
    """Return an attention kernel by its name above."""
    return _KINDS[kind]


def name_of(attend: Attention) -> str:
    """Return the name of an attention kernel: the inverse of `attention`."""
    return next(kind for kind, kernel in _KINDS.items() if kernel is attend)


@lru_cache(maxsize=32)
def problem(kind: str, device: str, dtype: torch.dtype, width: int) -> Fact | None:
    """Run a kernel on a small input; return why it cannot be used on a device, or `None` if it can.

    Args:
        width: of a head.
    """
    try:
        q = torch.ones((1, _TEST_TOKENS, 1, width), device=device, dtype=dtype)
        attended = attention(kind)(q, q, q)
    except Exception as error:  # packages raise errors of any type
        if ran_out(error) is not None:
            raise
        return Fact("execution.attention_unavailable", {"attention": kind, "reason": first_line(error)})
    # Attention over ones is ones.
    if torch.allclose(attended.float(), q.float(), atol=_TEST_TOLERANCE):
        return None
    return Fact("execution.attention_inexact", {"attention": kind})


def with_usable_attention(speed: Speed, device: str, dtype: torch.dtype, width: int) -> tuple[Speed, Fact | None]:
    """Replace a plan's attention kernel by PyTorch's own if it cannot be used on a device; also return why."""
    reason = None if speed.attention == EAGER.attention else problem(speed.attention, device, dtype, width)
    return (speed, None) if reason is None else (speed.replace(attention=EAGER.attention), reason)


def seconds_of(kind: str, tokens: int, heads: int, width: int, dtype: str, device: str) -> float:
    """Return the seconds of one attention on a CUDA device: the fastest of a few calls after a warm-up."""
    q, k, v = torch.randn((3, 1, tokens, heads, width), device=device, dtype=getattr(torch, dtype))
    attend = attention(kind)
    best = float("inf")
    with torch.no_grad(), torch.cuda.device(device):
        attend(q, k, v)
        for _ in range(_TIMED_CALLS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            attend(q, k, v)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1000)
    return best


def _heads_first(attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Call a kernel that takes heads before tokens; no kernel needs a copy for that."""
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _heads_first(F.scaled_dot_product_attention, q, k, v)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _heads_first(cudnn_attention, q, k, v)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _heads_first(flash_attention, q, k, v)


@torch.library.custom_op("tandem::attend", mutates_args=())
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> torch.Tensor:
    package: Any = import_module(_MODULES[kind])
    out = package.sageattn(q, k, v, tensor_layout="NHD") if kind == "sage" else package.flash_attn_func(q, k, v)
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
    FP8: attend_fp8,
}
