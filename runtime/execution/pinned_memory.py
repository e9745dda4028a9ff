"""Weights in page-locked memory, which a GPU copies from while it computes."""

import logging
from collections.abc import Callable, Sequence

import psutil
import torch

logger = logging.getLogger(__name__)

# PyTorch rounds a page-locked allocation up to a power of two: tensor by tensor, 14 billion weights in 28.6 GB take 41.
_SLAB_BYTES = 1 << 30
_ALIGNMENT = 256
# Page-locked memory cannot be swapped out, so at most half of the free memory is locked.
_SHARE = 0.5


def pin(module: torch.nn.Module) -> bool:
    """Move a module's weights into page-locked memory; return whether that was done, else they stay as they are."""
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
    needed = sum(tensor.nbytes for tensor in tensors)
    if needed > _SHARE * psutil.virtual_memory().available:
        return False
    try:
        move_into_slabs(tensors, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
    except RuntimeError as error:  # the system allows a process only so much of it
        logger.warning("Weights could not be page-locked, so they are copied more slowly: %s", error)
        return False
    return True


def slabs(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the offsets of tensors of these byte sizes, by slab: as many in one as fit in `limit` bytes, in order."""
    offsets: list[list[int]] = []
    end = limit
    for size in sizes:
        if not offsets or end + size > limit:
            offsets.append([])
            end = 0
        offsets[-1].append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets


def move_into_slabs(
    tensors: Sequence[torch.Tensor], allocate: Callable[[int], torch.Tensor], limit: int = _SLAB_BYTES
) -> None:
    """Give tensors storage inside a few large allocations; their values stay.

    Args:
        tensors: dense, on the CPU.
        allocate: returns a one-dimensional uint8 tensor of that many bytes.
        limit: bytes of an allocation; a larger tensor has one to itself.
    """
    left = list(tensors)
    for offsets in slabs([tensor.nbytes for tensor in left], limit):
        here, left = left[: len(offsets)], left[len(offsets) :]
        slab = allocate(offsets[-1] + here[-1].nbytes)
        for tensor, offset in zip(here, offsets, strict=True):
            place = slab[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.data)
            tensor.data = place
