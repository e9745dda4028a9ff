"""The state of TaylorSeer's residuals in diffusers' MagCache hooks; imported where a step cache needs it."""

from collections.abc import Callable

import torch
from diffusers.hooks.mag_cache import MagCacheState


class Series(MagCacheState):
    """The state of one guidance pass in diffusers' MagCache hooks, with residuals that are extrapolated linearly.

    The hooks reuse `previous_residual` unless it is `None`, and set it after each computed step.

    Args:
        computes: whether a step is computed, by its number since the last reset.
    """

    def __init__(self, computes: Callable[[int], bool]) -> None:
        self._computes = computes
        self._step = self.step_index = 0
        self._residual: torch.Tensor | None = None
        self._difference: torch.Tensor | None = None
        super().__init__()

    @property
    def previous_residual(self) -> torch.Tensor | None:
        """The residual of this step, (batch, tokens, width); `None` if the step is computed."""
        if self._residual is None or self._computes(self.step_index):
            return None
        if self._difference is None:
            return self._residual
        return torch.add(self._residual, self._difference, alpha=self.step_index - self._step)

    @previous_residual.setter
    def previous_residual(self, residual: torch.Tensor | None) -> None:
        before, self._difference = self._residual, None
        if residual is not None and before is not None:
            change = torch.sub(residual, before, out=before)
            self._difference = change.div_(self.step_index - self._step)
        self._residual, self._step = residual, self.step_index
