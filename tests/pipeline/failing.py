"""Lets calls of components fail, or changes their results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


class Failing:
    """Lets a call of a component fail, or change its result, once."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, at: int, fail: Callable[[Any], Any]
    ) -> None:
        self.calls = 0
        call, outer = getattr(kind, name), self

        def failing(self: Any, *given: Any, **named: Any) -> Any:
            outer.calls += 1
            result = call(self, *given, **named)
            return fail(result) if outer.calls == at else result

        monkeypatch.setattr(kind, name, failing)


def full(*_: Any) -> Any:
    """Raise what PyTorch raises if memory runs out."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
