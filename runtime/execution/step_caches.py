"""Caching across denoising steps through diffusers' hooks, with the same decisions in all processes that share a pass.

First-block caching: diffusers' hook compares means over a process's own tokens. If processes that share a pass decided
differently, they would wait for each other forever. So each process sums over its tokens, and all decide by the total.
A single process sums in the same way, because diffusers rounds its means to the model's dtype and would decide
differently in bfloat16.

MagCache and TaylorSeer: the hooks are diffusers' for MagCache, which reuse the residual of all blocks. Which steps are
computed is known beforehand (`core.step_cache.uses`), so the hooks reuse a residual whenever there is one: the cache is
reset before a step that MagCache computes. diffusers' own decision counts the steps of one transformer and cannot be
resumed. For TaylorSeer the residual is extrapolated. diffusers' TaylorSeer extrapolates the outputs of layers, which
takes more than a hundred gigabytes for Wan2.2-A14B, or (lite) predictions, which change more than the residual.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch

from runtime.core.step_cache import FIRST_BLOCK, NONE, TAYLORSEER, in_series, kind_of, strength_of
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.upstream.diffusers import decide_first_block_cache, keep_mag_cache_in, reset_step_cache

# More passes than any cache serves between two resets; diffusers resets its state after them.
_MANY = 1000


class Sharing(Protocol):
    """The processes that share the tokens of a pass."""

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's tokens, (batch, tokens, …), without padding."""

    def summed(self, values: torch.Tensor) -> list[float]:
        """Return each value of a vector summed over all processes; every process gets identical numbers."""


class StepCaching:
    """The part of a PyTorch denoiser that differs from step to step; see `execution.components.PyTorchDenoiser`."""

    pairs: bool = False
    _module: Any
    _graphed: CudaGraphRunner | None
    _caches = False

    @contextmanager
    def caching(self, step_cache: str, sharing: Sharing | None = None) -> Iterator[None]:
        """See `execution.components.PyTorchDenoiser`."""
        if step_cache == NONE:
            yield
            return
        assert not self.pairs, "each pass has its own cache"
        assert self._graphed is None, "each call may skip blocks"
        with step_cached(self._module, step_cache, sharing, partial(self._parts, sharing=sharing)):
            self._caches = True
            try:
                yield
            finally:
                self._caches = False

    def _parts(self, residual: torch.Tensor, sharing: Sharing | None) -> tuple[torch.Tensor, ...]:
        """Return the parts of a residual that are compared apart, without padding.

        All blocks are computed if one of them changes. What each of several processes has as a whole may be a part.
        """
        return (residual if sharing is None else sharing.real(residual),)

    def together(
        self, latents: torch.Tensor, timestep: torch.Tensor, texts: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """See `execution.components.Denoiser`."""
        call = cast("Callable[..., torch.Tensor]", self)
        return [call(latents, timestep, text, which) for which, text in texts.items()]

    def begin_step(self, *, fresh: bool, exact: bool) -> None:
        """See `execution.components.Denoiser`."""
        self._module.kernels.exact = exact
        if fresh:
            self.reset_cache()

    def reset_cache(self) -> None:
        """Discard values cached in earlier steps."""
        if self._caches:
            reset_step_cache(self._module)


@contextmanager
def step_cached(
    module: Any, step_cache: str, sharing: Sharing | None, parts: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> Iterator[None]:
    """Reuse residuals across steps while entered.

    Args:
        module: a transformer.
        step_cache: as in a plan; not "none".
        sharing: the processes that compute it together; `None` for one process.
        parts: returns the parts of a residual that first-block caching compares apart.
    """
    from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig  # most jobs need no hooks, which take a second

    strength = strength_of(step_cache)
    assert strength is not None
    if kind_of(step_cache) == FIRST_BLOCK:
        module.enable_cache(FirstBlockCacheConfig(threshold=strength))

        def decide(residual: torch.Tensor, before: torch.Tensor) -> bool:
            pairs = zip(parts(residual), parts(before), strict=True)
            # Every part, whatever the first one says: processes that share a pass sum each of them.
            return any([changed(*pair, strength, sharing) for pair in pairs])

        decide_first_block_cache(module, decide)
    else:
        module.enable_cache(
            MagCacheConfig(
                threshold=math.inf,
                max_skip_steps=_MANY,
                retention_ratio=0.0,
                num_inference_steps=_MANY,
                mag_ratios=[1.0] * _MANY,
            )
        )
        if kind_of(step_cache) == TAYLORSEER:
            from runtime.execution.residual_series import Series

            keep_mag_cache_in(module, lambda: Series(partial(in_series, interval=int(strength))))
    try:
        yield
    finally:
        module.disable_cache()


def changed(now: torch.Tensor, before: torch.Tensor, strength: float, sharing: Sharing | None) -> bool:
    """Return whether the mean change of residuals exceeds `strength` times their mean size.

    Args:
        now, before: without padding; of `sharing`'s processes each has its share, or all the same.
    """
    sums = torch.stack([(now - before).abs().sum(dtype=torch.float32), before.abs().sum(dtype=torch.float32)])
    change, size = sums.tolist() if sharing is None else sharing.summed(sums)
    return bool(change > strength * size)
