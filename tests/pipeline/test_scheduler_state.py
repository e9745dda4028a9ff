"""Scheduler state, saved and restored between two steps, gives the remaining steps bit for bit."""

import copy
from typing import Any

import diffusers
import pytest
import torch

from runtime.core.errors import CheckpointError
from runtime.pipeline.checkpoint import restore_scheduler, scheduler_state

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("UniPCMultistepScheduler", FLOW),
    ("UniPCMultistepScheduler", FLOW | {"solver_order": 3}),
    ("DPMSolverMultistepScheduler", FLOW),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
]
STEPS = 6


def fresh(name: str, config: dict[str, Any]) -> Any:
    scheduler = getattr(diffusers, name)(**config)
    scheduler.set_timesteps(STEPS)
    scheduler.set_begin_index(0)
    return scheduler


def step(scheduler: Any, index: int, latents: torch.Tensor) -> torch.Tensor:
    """Take a step with a stand-in for a transformer that depends on latents and time."""
    timestep = scheduler.timesteps[index]
    velocity = torch.tanh(latents * 1.3 + timestep / 500)
    stepped: torch.Tensor = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
    return stepped


# diffusers' own, in DPMSolverMultistepScheduler.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(("name", "config"), SCHEDULERS)
def test_a_restored_scheduler_gives_the_same_steps(name: str, config: dict[str, Any]) -> None:
    noise = torch.randn(1, 4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    scheduler = fresh(name, config)
    count = len(scheduler.timesteps)
    latents_after, states, copies = [noise], [scheduler_state(scheduler)], [copy.deepcopy(scheduler_state(scheduler))]
    for index in range(count):
        latents_after.append(step(scheduler, index, latents_after[-1]))
        states.append(scheduler_state(scheduler))
        copies.append(copy.deepcopy(states[-1]))
    for index in range(count):
        other = fresh(name, config)
        restore_scheduler(other, states[index])
        latents = latents_after[index]
        for later in range(index, count):
            latents = step(other, later, latents)
        assert torch.equal(latents, latents_after[-1])
        # Taken as they are, and no later step wrote into them.
        assert str(states[index]) == str(copies[index])


def test_an_unsupported_attribute_is_refused() -> None:
    scheduler = fresh(*SCHEDULERS[0])
    scheduler.solver_p = fresh(*SCHEDULERS[3])
    with pytest.raises(CheckpointError) as refused:
        scheduler_state(scheduler)
    assert refused.value.code == "checkpoint.scheduler_value"
    assert refused.value.data["attribute"] == "UniPCMultistepScheduler.solver_p"


def test_the_state_of_another_scheduler_is_refused() -> None:
    with pytest.raises(CheckpointError) as refused:
        restore_scheduler(fresh(*SCHEDULERS[3]), {"timesteps": torch.zeros(3)})
    assert refused.value.code == "checkpoint.other_scheduler"
