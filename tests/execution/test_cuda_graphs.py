"""Fallback if a call cannot be recorded as a CUDA graph; tests/gpu checks recording itself."""

import torch

from runtime.core.facts import Fact
from runtime.execution.cuda_graphs import CudaGraphRunner


def test_a_call_that_cannot_be_recorded_runs_directly_and_is_reported_once() -> None:
    reasons: list[Fact] = []
    graphed = CudaGraphRunner(lambda latents, timestep, text, more: latents * timestep + text() + more, reasons.append)
    latents, state = torch.ones(1, 2, 3), torch.full((1,), 5.0)
    for factor in (2.0, 3.0):
        assert torch.equal(graphed(latents, torch.tensor(factor), lambda: state, 2), latents * factor + 7)
    (reason,) = reasons
    assert reason.code == "execution.graph_capture_failed"
    assert "\n" not in reason.data["error"]
