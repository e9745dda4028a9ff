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
        """Return those of this process's tokens, (batch, tokens, …), that are not filled up."""
        ...

    def summed(self, values: torch.Tensor) -> list[float]:
        """Return the sum of each value, a vector, over all: the very same numbers to each of them."""
        ...


@contextmanager
def first_block_cached(module: Any, strength: float, sharing: Sharing | None = None) -> Iterator[None]:
    """Leave out blocks after the first, while entered, where it adds nearly what it added before.

    Args:
        module: a transformer.
        strength: the change, as a share of what was added, up to which it counts as the same.
        sharing: those who compute it together; `None` where one has all tokens.
    """

    module.enable_cache(FirstBlockCacheConfig(threshold=strength))
    decide_first_block_cache(module, lambda residual, before: changed(residual, before, strength, sharing))
    try:
        yield
    finally:
        module.disable_cache()


def changed(now: torch.Tensor, before: torch.Tensor, strength: float, sharing: Sharing | None) -> bool:
    """Return whether the mean change of residuals, (batch, tokens, width), exceeds that share of their mean size."""
    if sharing is not None:
        now, before = sharing.real(now), sharing.real(before)
    sums = torch.stack([(now - before).abs().sum(dtype=torch.float32), before.abs().sum(dtype=torch.float32)])
    change, size = sums.tolist() if sharing is None else sharing.summed(sums)
    return bool(change > strength * size)
