"""CUDA graphs: record a call once and replay it, for calls whose kernels take longer to launch than to run."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from runtime.core.errors import first_line, ran_out
from runtime.core.facts import Fact
from runtime.execution.compilation import OnDegraded
from runtime.upstream.torch import RECORDING, recording_stream

# Calls before recording, in which libraries select kernels and allocate workspaces.
_WARM_UP_CALLS = 2
# Graphs that are kept: of a prompt and a negative prompt.
_KEPT = 2

logger = logging.getLogger(__name__)


class CudaGraphRunner:
    """A function of latents, a timestep and a text, as a CUDA graph per text and size.

    The next call with the same text overwrites the returned tensor.

    Args:
        function: takes latents, a timestep, and a function that returns a text's state, the same object for the same
            text; must only launch kernels.
        on_degraded: called once if it cannot be recorded; the function is then called directly.
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor, torch.Tensor, Callable[[], Any]], torch.Tensor],
        on_degraded: OnDegraded | None = None,
    ) -> None:
        self._function = function
        self._on_degraded = on_degraded
        self._recorded: list[tuple[Any, _Recorded]] = []
        self._failed = False

    def __call__(self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], Any]) -> torch.Tensor:
        """Return the result of the function."""
        if self._failed:
            return self._function(latents, timestep, text)
        state = text()
        key = (state, (tuple(latents.shape), tuple(timestep.shape)))
        for (stored, size), recorded in self._recorded:
            if stored is state and size == key[1]:
                return recorded.replay(latents, timestep)
        try:
            with RECORDING:
                recorded = _Recorded(self._function, latents, timestep, lambda: state)
        except Exception as error:
            if ran_out(error) is not None:
                raise
            logger.warning("A call could not be recorded", exc_info=error)
            self._failed = True
            if self._on_degraded is not None:
                self._on_degraded(Fact("execution.graph_capture_failed", {"error": first_line(error)}))
            return self._function(latents, timestep, text)
        self._recorded = [*self._recorded[1 - _KEPT :], (key, recorded)]
        return recorded.replay(latents, timestep)

    def forget(self) -> None:
        """Free all graphs and their memory."""
        self._recorded.clear()


# Always the same for a GPU: libraries keep a workspace per stream.
_recording_stream = cache(recording_stream)


class _Recorded:
    """One graph with its input and output tensors."""

    def __init__(
        self,
        function: Callable[[torch.Tensor, torch.Tensor, Callable[[], Any]], torch.Tensor],
        latents: torch.Tensor,
        timestep: torch.Tensor,
        text: Callable[[], Any],
    ) -> None:
        self._latents, self._timestep = latents.clone(), timestep.to(latents.device).clone()
        self._text = text
        with torch.cuda.device(latents.device):
            stream = _recording_stream(latents.device)
            stream.wait_stream(torch.cuda.current_stream(latents.device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_CALLS):
                    function(self._latents, self._timestep, text)
            torch.cuda.current_stream(latents.device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # On a stream of this GPU: PyTorch's default is one of the GPU that recorded first in this process, and on
            # any other would record nothing. Other threads may use other GPUs meanwhile.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._output = function(self._latents, self._timestep, text)

    def replay(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        self._latents.copy_(latents)
        self._timestep.copy_(timestep)
        with torch.cuda.device(self._latents.device):
            self._graph.replay()
        return self._output
