"""Memory that libraries keep for reuse."""

import gc

import torch

from runtime.core.processes import trim_heaps
from runtime.upstream.torch import empty_host_cache


def release_cached_memory(*, unreachable: bool = False) -> None:
    """Return memory that PyTorch's allocators keep for reuse to the driver and the system.

    Args:
        unreachable: also free reference cycles, such as those of diffusers' hooks.
    """
    if unreachable:
        gc.collect()
        trim_heaps()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if unreachable:
            empty_host_cache()
