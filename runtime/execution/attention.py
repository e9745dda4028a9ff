"""Attention kernels with one signature.

    native   the kernel that PyTorch selects
    cudnn    cuDNN, through PyTorch
    flash    FlashAttention 2, included in PyTorch
    flash3   FlashAttention 3, package `flash_attn_interface`
    flash4   FlashAttention 4, package `flash-attn-4`
    sage     SageAttention: products in 8 bits
    fp8      cuDNN in FP8, through `nvidia-cudnn-frontend`: every factor in 8 bits, see `fp8_attention`
    sol:…    Sol-Attn, through `comfy-kitchen`, see `sparse_kernel`

Kernels of other packages are custom operators, so that a compiled block calls them without a graph break.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from runtime.core.errors import first_line, ran_out
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.core.sparse_attention import EXACT_BLOCKS, SOL, is_sparse, kernel_of
from runtime.execution.fp8_attention import attend_fp8
from runtime.execution.sparse_attention import attend_sparse
from runtime.upstream.torch import cudnn_attention, flash_attention

_MODULES = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute", "sage": "sageattention"}
_TEST_TOKENS, _TEST_TOLERANCE = 2048, 0.1
_TIMED_CALLS = 2
FP8 = "fp8"
# Those that round nothing to fewer bits, and leave out no keys.
_EXACT = frozenset({"native", "cudnn", "flash", "flash3", "flash4"})

# Queries, keys and values, each (batch, tokens, heads, head width), to the same.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention(kind: str) -> Attention:
    """Return an attention kernel by its name above."""
    return _sparse(kind) if is_sparse(kind) else _KINDS[kind]


def exact_attention(kind: str) -> Attention:
    """Return an attention kernel by its name if it is exact, else PyTorch's own."""
    return attention(kind if kind in _EXACT else "native")


def sparse_kernel(tau: float, last: int = 0) -> str:
    """Return the name of sparse attention; see `attend_sparse` for the arguments."""
    return f"{SOL}:{tau:g}:{last}"


class BlockKernels:
    """The attention kernels of a transformer's blocks, which read theirs from `attend`.

    Args:
        speed: has the exact kernel and the threshold of sparse attention.
        kernel: returns a kernel by its name; that of processes which share a pass exchanges tokens around it.

    Attributes:
        exact: whether attention is exact in all blocks from the next pass on.
    """

    def __init__(self, speed: Speed, kernel: Callable[[str], Attention] = attention) -> None:
        self.exact = False
        self._speed = speed
        self._kernel = kernel
        self._chosen: tuple[bool, int] | None = None

    def shared(self, kernel: Callable[[str], Attention]) -> "BlockKernels":
        """Return the same with another `kernel`."""
        return BlockKernels(self._speed, kernel)

    def choose(self, blocks: Iterable[Any], last: int = 0) -> None:
        """Set the kernel of each block for the next pass.

        Args:
            blocks: all of the transformer, in the order in which they run.
            last: see `attend_sparse`.
        """
        tau = None if self.exact else self._speed.sparse_tau
        chosen = (False, 0) if tau is None else (True, last)
        if chosen == self._chosen:
            return
        exact = self._kernel(self._speed.attention)
        sparse = exact if tau is None else self._kernel(sparse_kernel(tau, last))
        for number, block in enumerate(blocks):
            block.attend = exact if number < EXACT_BLOCKS else sparse
        self._chosen = chosen


@lru_cache(maxsize=32)
def problem(kind: str, device: str, dtype: torch.dtype, width: int) -> Fact | None:
    """Run a kernel on a small input; return why it cannot be used on a device, or `None` if it can.

    Args:
        width: of a head.
    """
    try:
        generator = torch.Generator(device).manual_seed(0)
        q, k = torch.randn((2, 1, _TEST_TOKENS, 1, width), device=device, dtype=dtype, generator=generator)
        ones = torch.ones_like(q)
        attended = attention(kind)(q, k, ones)
    except Exception as error:  # packages raise errors of any type
        if ran_out(error) is not None:
            raise
        return Fact("execution.attention_unavailable", {"attention": kernel_of(kind), "reason": first_line(error)})
    # Attention over ones is ones, whatever the scores are.
    if torch.allclose(attended.float(), ones.float(), atol=_TEST_TOLERANCE):
        return None
    return Fact("execution.attention_inexact", {"attention": kernel_of(kind)})


def with_usable_attention(speed: Speed, device: str, dtype: torch.dtype, width: int) -> tuple[Speed, dict[str, Fact]]:
    """Replace a plan's attention kernels that cannot be used on a device: by PyTorch's own, and sparse ones by none.

    Returns:
        The changed options, and by field of `Speed` why a kernel cannot be used.
    """
    reasons = {field: problem(kind, device, dtype, width) for field, kind in kernels_of(speed).items()}
    problems = {field: reason for field, reason in reasons.items() if reason is not None}
    return speed.replace(**{field: getattr(EAGER, field) for field in problems}), problems


def kernels_of(speed: Speed) -> dict[str, str]:
    """Return the kernels in use, except PyTorch's own, by field of `Speed`."""
    kernels = {} if speed.attention == EAGER.attention else {"attention": speed.attention}
    return kernels if speed.sparse_tau is None else kernels | {"sparse_tau": sparse_kernel(speed.sparse_tau)}


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


@lru_cache(maxsize=64)
def _sparse(kind: str) -> Attention:
    _, tau, last = kind.split(":")
    threshold, tokens = float(tau), int(last)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_sparse(q, k, v, threshold, tokens)

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
