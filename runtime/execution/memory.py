"""Out-of-memory errors, and memory that libraries keep for reuse."""

import ctypes
import gc
import sys
from functools import cache
from typing import Any, Literal

import torch

from runtime.core.errors import ram_ran_out
from runtime.upstream.torch import empty_host_cache

# Texts of plain RuntimeErrors of CUDA and its libraries, which have no type of their own.
_VRAM_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out(error: BaseException) -> Literal["VRAM", "RAM"] | None:
    """Return the memory whose exhaustion caused an error: the GPU's, this machine's, or none."""
    if isinstance(error, torch.OutOfMemoryError):
        return "VRAM"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _VRAM_WORDS):
        return "VRAM"
    return "RAM" if ram_ran_out(error) else None


def release_cached_memory(*, unreachable: bool = False) -> None:
    """Return memory that PyTorch's allocators keep for reuse to the driver and the system.

    Args:
        unreachable: also free reference cycles, such as those of diffusers' hooks.
    """
    if unreachable:
        gc.collect()
        trim = _malloc_trim()
        if trim is not None:
            trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if unreachable:
            empty_host_cache()


@cache
def _malloc_trim() -> Any:
    """Return glibc's function that returns freed memory to the system; `None` with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except OSError:
        return None
