"""Where a scheduler puts the steps, against diffusers' own schedulers: equal to the last digit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from runtime.core.facts import Fact
from runtime.core.request import MAX_SHIFT, MAX_STEPS, MIN_SHIFT
from runtime.models.registry import published_models
from runtime.models.timesteps import noise_levels

KNOWN = published_models("wan")
FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SHIFTS = (MIN_SHIFT, 1.0, 3.0, 5.0, 7.0, 12.0, MAX_SHIFT)
STEPS = (1, 2, 3, 4, 7, 20, 40, 50, MAX_STEPS)
CLASSES = (
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler",
    "SASolverScheduler",
    "FlowMatchEulerDiscreteScheduler",
)


def made(name: str, **config: Any) -> Any:
    """Return one of diffusers' schedulers, set up for flow matching."""
    return getattr(diffusers, name)(**({} if name.startswith("FlowMatch") else FLOW) | config)


# Of diffusers' own, with NumPy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", CLASSES)
def test_timesteps_equal_those_of_the_scheduler(name: str) -> None:
    levels = noise_levels({"_class_name": name, **made(name).config})
    assert levels.setting is not None and levels.shift == 1.0
    for shift in SHIFTS:
        # From the configuration, and from the request.
        scheduler = made(name, **{levels.setting: shift})
        own = noise_levels({"_class_name": name, **scheduler.config})
        assert own.shift == shift
        for steps in STEPS:
            scheduler.set_timesteps(steps)
            assert own.timesteps(steps) == levels.timesteps(steps, shift) == scheduler.timesteps.tolist()


# Of diffusers' own: NaN comes from 0 / 0.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:__array__ implementation:DeprecationWarning")
def test_the_fewest_steps_are_those_that_the_scheduler_can_place() -> None:
    for terminal, least in ((0.1, 2), (None, 1)):
        scheduler = made("FlowMatchEulerDiscreteScheduler", shift_terminal=terminal)
        own = noise_levels({"_class_name": "FlowMatchEulerDiscreteScheduler", **scheduler.config})
        assert own.least_steps == least
        for steps in (1, 2):
            scheduler.set_timesteps(sigmas=replace(own, spread="linear").sigmas(steps))
            assert scheduler.sigmas.isfinite().all() == (steps >= least)


# Of diffusers' own, with NumPy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_timesteps_of_given_sigmas_equal_those_of_the_scheduler() -> None:
    for shift in SHIFTS:
        scheduler = made("FlowMatchEulerDiscreteScheduler", shift=shift)
        own = noise_levels({"_class_name": "FlowMatchEulerDiscreteScheduler", **scheduler.config})
        given = replace(own, spread="linear")
        assert own.sigmas(4) is None
        for steps in STEPS:
            # As `HunyuanVideoPipeline` does.
            sigmas = np.linspace(1.0, 0.0, steps + 1)[:-1]
            assert given.sigmas(steps) == sigmas.tolist()
            scheduler.set_timesteps(sigmas=sigmas)
            assert given.timesteps(steps) == scheduler.timesteps.tolist()


@pytest.mark.parametrize(
    ("config", "setting", "fixed", "shift", "known"),
    [
        ({"_class_name": "UniPCMultistepScheduler", **FLOW, "flow_shift": 3.0}, "flow_shift", None, 3.0, True),
        ({"_class_name": "UniPCMultistepScheduler", **FLOW}, "flow_shift", None, 1.0, True),
        ({"_class_name": "UniPCMultistepScheduler", **FLOW, "shift_terminal": 0.1}, "flow_shift", None, 1.0, False),
        ({"_class_name": "UniPCMultistepScheduler"}, None, Fact("scheduler.no_flow_matching"), 1.0, False),
        (
            {"_class_name": "UniPCMultistepScheduler", **FLOW, "use_karras_sigmas": True},
            None,
            Fact("scheduler.other_spacing", {"option": "use_karras_sigmas"}),
            1.0,
            False,
        ),
        (
            {"_class_name": "DPMSolverMultistepScheduler", **FLOW, "use_lu_lambdas": True},
            None,
            Fact("scheduler.other_spacing", {"option": "use_lu_lambdas"}),
            1.0,
            False,
        ),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5}, "shift", None, 5.0, True),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "invert_sigmas": True}, "shift", None, 1.0, False),
        ({"_class_name": "FlowMatchHeunDiscreteScheduler", "shift": 3}, "shift", None, 3.0, False),
        ({"_class_name": "DDIMScheduler"}, None, Fact("scheduler.no_shift"), 1.0, False),
        ({}, None, Fact("scheduler.no_shift"), 1.0, False),
    ],
)
def test_a_configurations_shift_is_read(
    config: dict[str, Any], setting: str | None, fixed: Fact | None, shift: float, known: bool
) -> None:
    levels = noise_levels(config)
    assert (levels.setting, levels.shift, levels.fixed) == (setting, shift, fixed)
    assert (levels.timesteps(4) is not None) == known


@pytest.mark.parametrize("shift", [0.0, -1.0, math.nan, math.inf, 1e30])
def test_an_impossible_shift_gives_no_timesteps(shift: float) -> None:
    levels = noise_levels({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": shift})
    assert levels.timesteps(4) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"])
@pytest.mark.parametrize("shift", [MIN_SHIFT, MAX_SHIFT])
@pytest.mark.parametrize("steps", [1, 4, MAX_STEPS])
def test_the_extreme_shifts_equal_those_of_the_scheduler(name: str, shift: float, steps: int) -> None:
    levels = noise_levels({"_class_name": name, **made(name).config})
    scheduler = made(name, **{str(levels.setting): shift})
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 1, 4, 1, 2, 2, generator=generator)
    latents = noise.clone()
    for timestep in scheduler.timesteps:
        latents = scheduler.step(noise - clean, timestep, latents, return_dict=False)[0]
    assert torch.allclose(latents, clean, atol=1e-3)


def test_published_models_have_timesteps_once_a_shift_is_requested() -> None:
    levels = KNOWN[0].spec(Path("weights")).noise
    scheduler = made("UniPCMultistepScheduler", flow_shift=5.0)
    scheduler.set_timesteps(4)
    assert levels.timesteps(4) is None
    # Those that lightx2v's LoRAs were distilled for, but for the last digits.
    assert levels.timesteps(4, 5.0) == scheduler.timesteps.tolist() == [999, 937, 833, 625]
