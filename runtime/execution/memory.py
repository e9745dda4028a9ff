"""Which memory ran out, and giving back what libraries keep for later."""

import ctypes
import gc
import sys
from functools import cache
from typing import Any, Literal

import torch

from runtime.core.errors import ram_ran_out
from runtime.upstream.torch import empty_host_cache

# What CUDA and its libraries say in plain RuntimeErrors.
_VRAM_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out(error: BaseException) -> Literal["VRAM", "RAM"] | None:
    """Return which memory an error says is full: the GPU's, this machine's, or none."""
    if isinstance(error, torch.OutOfMemoryError):
        return "VRAM"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _VRAM_WORDS):
        return "VRAM"
    return "RAM" if ram_ran_out(error) else None


def release_cached_memory(*, unreachable: bool = False) -> None:
    """Return what PyTorch's allocators keep for later to the driver and the system.

    Args:
        unreachable: also what only cycles of references hold, as diffusers' hooks do.
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
    """Return glibc's function that gives the system what was freed, which it otherwise keeps; `None` elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except OSError:
        return None
