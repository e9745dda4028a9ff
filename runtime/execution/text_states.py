"""A text as the blocks of a transformer attend to it, computed once per clip. Independent of models."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Number of texts to cache: the prompt and the negative prompt. A pair of both counts as one text.
_CACHED_TEXTS = 2


class TextState:
    """A text in one transformer: its projection, and optionally each block's keys and values of it.

    A block's are computed when it first asks: the GPU then still computes the block before it, and launching their
    kernels takes no time.

    Args:
        projected: the text as blocks take it that compute its keys and values themselves.
        keys_values: returns those of a block, in the form in which it takes them, of `projected`.
        blocks: whose keys and values are kept; `None` keeps none. Their weights must be on the device.
        face: what blocks attend to besides, in models that take a face video.
    """

    def __init__(
        self,
        projected: Any,
        keys_values: Callable[[Any, Any], Any],
        blocks: Sequence[Any] | None,
        face: torch.Tensor | None = None,
    ) -> None:
        self.face = face
        self._projected = projected
        self._keys_values_of = keys_values
        self._blocks = blocks
        self._keys_values: dict[int, Any] = {}

    def for_block(self, index: int) -> Any:
        """Return the text as block `index` takes it."""
        if self._blocks is None:
            return self._projected
        if index not in self._keys_values:
            self._keys_values[index] = self._keys_values_of(self._blocks[index], self._projected)
        return self._keys_values[index]


class TextStates:
    """The states of the last texts, by the identity of their tensors."""

    def __init__(self) -> None:
        self._states: list[tuple[tuple[torch.Tensor, ...], TextState]] = []

    def __len__(self) -> int:
        return len(self._states)

    def clear(self) -> None:
        """Free all states."""
        self._states.clear()

    def later(
        self, texts: tuple[torch.Tensor, ...], project: Callable[[torch.Tensor], TextState]
    ) -> Callable[[], TextState]:
        """Return a function that returns the state of texts, a batch; call it when the weights are on the device.

        Args:
            project: returns the state of text embeddings, (batch, text tokens, text width), if there is none yet.
        """

        def state() -> TextState:
            for stored, cached in self._states:
                if len(stored) == len(texts) and all(a is b for a, b in zip(stored, texts, strict=True)):
                    return cached
            projected = project(torch.cat(texts))
            self._states = [*self._states[1 - _CACHED_TEXTS :], (texts, projected)]
            return projected

        return state
