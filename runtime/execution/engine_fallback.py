"""A component on engines that falls back to PyTorch when one fails."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines.service import OpenEngines

Part = TypeVar("Part")
Result = TypeVar("Result", bound=torch.Tensor | Mapping[str, torch.Tensor] | None)

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


class EngineWithFallback(Generic[Part]):
    """Engines, replaced by `fall_back`'s component if one fails, runs out of memory or returns NaN or Inf.

    Args:
        engines: loaded; the caller closes them.
        fall_back: called once, with the reason; closes the engines and returns the same component in PyTorch.
    """

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], Part]) -> None:
        self._engines = engines
        self._fall_back = fall_back
        self._instead: Part | None = None

    def call(self, on_engines: Callable[[OpenEngines], Result], in_pytorch: Callable[[Part], Result]) -> Result:
        """Return the result of the engines, or of PyTorch after a failure."""
        if self._instead is None:
            try:
                result = on_engines(self._engines)
                if _finite(result):
                    return result
                reason = Fact("execution.engine_not_finite")
            except EngineError as error:
                reason = error.fact
            except OUT_OF_MEMORY:
                reason = Fact("execution.engine_out_of_memory")
            # Outside of the handler: the exception's frames reference memory that is needed now.
            self._instead = self._fall_back(reason)
        return in_pytorch(self._instead)

    def runs(self, program: str) -> bool:
        """Return whether there is an engine for a program and no engine has failed."""
        return self._instead is None and self._engines.runs(program)

    def fallback(self) -> Part:
        """Return the component in PyTorch, after an engine has failed."""
        assert self._instead is not None
        return self._instead


def _finite(result: torch.Tensor | Mapping[str, torch.Tensor] | None) -> bool:
    # Only the first output is checked; errors in the others, the caches, appear in the next call.
    first = next(iter(result.values())) if isinstance(result, Mapping) else result
    return first is None or bool(torch.isfinite(first).all().item())
