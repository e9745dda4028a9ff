"""First-block caching through diffusers' hooks, with the same decision in all processes that share a pass.

diffusers' hook compares means over a process's own tokens. If processes that share a pass decided differently, they
would wait for each other forever. So each process sums over its tokens, and all decide by the total. A single process
sums in the same way, because diffusers rounds its means to the model's dtype and would decide differently in bfloat16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from diffusers.hooks import FirstBlockCacheConfig

from runtime.upstream.diffusers import decide_first_block_cache


class Sharing(Protocol):
    """The processes that share the tokens of a pass."""

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's tokens, (batch, tokens, …), without padding."""

    def summed(self, values: torch.Tensor) -> list[float]:
        """Return each value of a vector summed over all processes; every process gets identical numbers."""


@contextmanager
def first_block_cached(module: Any, strength: float, sharing: Sharing | None = None) -> Iterator[None]:
    """Skip the blocks after the first one, while entered, if its residual has hardly changed since the last step.

    Args:
        module: a transformer.
        strength: the largest relative change of the residual with which blocks are skipped.
        sharing: the processes that compute it together; `None` for one process.
    """

    module.enable_cache(FirstBlockCacheConfig(threshold=strength))
    decide_first_block_cache(module, lambda residual, before: changed(residual, before, strength, sharing))
    try:
        yield
    finally:
        module.disable_cache()


def changed(now: torch.Tensor, before: torch.Tensor, strength: float, sharing: Sharing | None) -> bool:
    """Return whether the mean change of residuals, (batch, tokens, width), exceeds `strength` times their mean size."""
    if sharing is not None:
        now, before = sharing.real(now), sharing.real(before)
    sums = torch.stack([(now - before).abs().sum(dtype=torch.float32), before.abs().sum(dtype=torch.float32)])
    change, size = sums.tolist() if sharing is None else sharing.summed(sums)
    return bool(change > strength * size)
