"""Memory that libraries keep for reuse."""

import ctypes
import gc
import sys
from functools import cache
from typing import Any

import torch

from runtime.upstream.torch import empty_host_cache


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
