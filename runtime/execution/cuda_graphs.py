"""CUDA graphs: record a call once and replay it, for calls whose kernels take longer to launch than to run."""

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch

from runtime.core.errors import first_line, ran_out
from runtime.core.facts import Fact
from runtime.execution.compilation import OnDegraded
from runtime.upstream.torch import RECORDING, recording_stream

# Calls before the first recording, in which libraries select kernels and allocate workspaces, and before later ones.
# With one call, cuBLAS failed to record its first products in FP8.
_WARM_UP_CALLS, _LATER_WARM_UP_CALLS = 2, 1
# Graphs that are kept: of a prompt and a negative prompt.
_KEPT = 2

# Takes latents, a timestep, a function that returns a text's state, and options; returns a tensor.
_Recordable = Callable[..., torch.Tensor]

logger = logging.getLogger(__name__)


class CudaGraphRunner:
    """A function of latents, a timestep and a text, as a CUDA graph per text, size and options.

    The next call with the same text and options overwrites the returned tensor, unless graphs share memory.

    Args:
        function: takes latents, a timestep, a function that returns a text's state, the same object for the same text,
            and the options of a call; must only launch kernels.
        on_degraded: called once if it cannot be recorded; the function is then called directly.
        kept: the number of graphs that are kept.
        shares_memory: whether all graphs have one working set, and results are copies. Calls must follow each other on
            one stream.
        recorded: sizes and options that were recorded before with the same kernels, by this runner or another one; it
            adds to them.
    """

    def __init__(
        self,
        function: _Recordable,
        on_degraded: OnDegraded | None = None,
        kept: int = _KEPT,
        *,
        shares_memory: bool = False,
        recorded: set[Hashable] | None = None,
    ) -> None:
        self._function = function
        self._on_degraded = on_degraded
        self._kept = kept
        self._shares_memory = shares_memory
        self._recorded: list[tuple[Any, _Recorded]] = []
        self._kinds = set() if recorded is None else recorded
        self._failed = False

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], Any], *options: Hashable
    ) -> torch.Tensor:
        """Return the result of the function."""
        if self._failed:
            return self._function(latents, timestep, text, *options)
        state = text()
        key = (state, (tuple(latents.shape), tuple(timestep.shape), *options))
        for (stored, kind), recorded in self._recorded:
            if stored is state and kind == key[1]:
                return recorded.replay(latents, timestep)
        try:
            with RECORDING:
                recorded = self._record(latents, timestep, state, options, key[1])
        except Exception as error:
            if ran_out(error) is not None:
                raise
            logger.warning("A call could not be recorded", exc_info=error)
            self._failed = True
            if self._on_degraded is not None:
                self._on_degraded(Fact("execution.graph_capture_failed", {"error": first_line(error)}))
            return self._function(latents, timestep, text, *options)
        self._recorded = [*self._recorded[1 - self._kept :], (key, recorded)]
        self._kinds.add(key[1])
        return recorded.replay(latents, timestep)

    def _record(
        self, latents: torch.Tensor, timestep: torch.Tensor, state: Any, options: tuple[Hashable, ...], kind: Hashable
    ) -> "_Recorded":
        before = [recorded for _, recorded in self._recorded]
        return _Recorded(
            self._function,
            latents,
            timestep,
            lambda: state,
            options,
            _LATER_WARM_UP_CALLS if before or kind in self._kinds else _WARM_UP_CALLS,
            before[0].pool if before and self._shares_memory else None,
            copies=self._shares_memory,
        )

    def forget(self) -> None:
        """Free all graphs and their memory."""
        self._recorded.clear()


# Always the same for a GPU: libraries keep a workspace per stream.
_recording_stream = cache(recording_stream)


class _Recorded:
    """One graph with its input and output tensors.

    Args:
        function, text, options: see `CudaGraphRunner`.
        latents, timestep: of the first replay.
        warm_up_calls: before recording, at least one.
        pool: memory of another graph, which this one overwrites; `None` for memory of its own.
        copies: whether results are copied.
    """

    def __init__(
        self,
        function: _Recordable,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        text: Callable[[], Any],
        options: tuple[Hashable, ...],
        warm_up_calls: int,
        pool: Any,
        *,
        copies: bool,
    ) -> None:
        self._latents, self._timestep = latents.clone(), timestep.to(latents.device).clone()
        self._copies = copies
        with torch.cuda.device(latents.device):
            stream, current = _recording_stream(latents.device), torch.cuda.current_stream(latents.device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(warm_up_calls):
                    first = function(self._latents, self._timestep, text, *options)
            current.wait_stream(stream)
            first.record_stream(current)
            self._first: torch.Tensor | None = first
            self._graph = torch.cuda.CUDAGraph()
            # On a stream of this GPU: PyTorch's default is one of the GPU that recorded first in this process, and on
            # any other would record nothing. Other threads may use other GPUs meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._output = function(self._latents, self._timestep, text, *options)

    @property
    def pool(self) -> Any:
        """The memory of the graph, for another one."""
        return self._graph.pool()

    def replay(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Return the result; the first time, the one that was computed before recording."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._latents.copy_(latents)
        self._timestep.copy_(timestep)
        with torch.cuda.device(self._latents.device):
            self._graph.replay()
        return self._output.clone() if self._copies else self._output
