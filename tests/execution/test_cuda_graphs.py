"""What follows where a call cannot be recorded as a CUDA graph; that it can, and gives the same, is held on a GPU."""

import torch

from runtime.core.facts import Fact
from runtime.execution.cuda_graphs import CudaGraphRunner


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once() -> None:
    said: list[Fact] = []
    graphed = CudaGraphRunner(lambda latents, timestep, text: latents * timestep + text(), said.append)
    latents, state = torch.ones(1, 2, 3), torch.full((1,), 5.0)
    for factor in (2.0, 3.0):
        assert torch.equal(graphed(latents, torch.tensor(factor), lambda: state), latents * factor + 5)
    (reason,) = said
    assert reason.code == "execution.graph_capture_failed"
    assert "\n" not in reason.data["error"]
