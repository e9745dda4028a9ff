"""The timesteps of a diffusers scheduler, computed from its configuration without torch.

The arithmetic reproduces diffusers' schedulers bit by bit, because the last digit of a timestep can decide which expert
runs a step. tests/models/test_timesteps.py compares both.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runtime.core.facts import Fact

# Schedulers whose configuration has a shift, with the spacing of their sigmas before the shift.
Spread = Literal["unipc", "dpm", "euler", "linear"]
_FLOW: Mapping[str, Spread] = {
    "UniPCMultistepScheduler": "unipc",
    "DPMSolverMultistepScheduler": "dpm",
    "DPMSolverSinglestepScheduler": "dpm",
    "DEISMultistepScheduler": "dpm",
    "SASolverScheduler": "dpm",
}
_FLOW_MATCH: Mapping[str, Spread | None] = {
    "FlowMatchEulerDiscreteScheduler": "euler",
    "FlowMatchHeunDiscreteScheduler": None,
    "FlowMatchLCMScheduler": None,
}
# Adds new noise with its option `stochastic_sampling`.
RENEWING_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
WITH_SHIFT = frozenset({*_FLOW, *_FLOW_MATCH})
# With these options, the spacing follows other rules.
_OTHER_RULES = ("use_karras_sigmas", "use_lu_lambdas", "use_exponential_sigmas", "use_beta_sigmas")
_UNSUPPORTED = ("shift_terminal", "invert_sigmas")
# UniPC subtracts this from a first sigma of 1.
_EPSILON = 1e-6
_MAX_SHIFT = 1e6
# diffusers makes tables of this length.
_MAX_TRAINING_STEPS = 100_000
NO_SHIFT = Fact("scheduler.no_shift")
NO_FLOW_MATCHING = Fact("scheduler.no_flow_matching")


@dataclass(frozen=True, kw_only=True)
class ShiftBySize:
    """A shift that follows from the number of a clip's tokens, as in diffusers' `calculate_shift`.

    Attributes:
        fewest, most: numbers of tokens.
        least, largest: logarithms of the shift with these.
    """

    fewest: int
    most: int
    least: float
    largest: float

    def logarithm(self, tokens: int) -> float:
        """Return the logarithm of the shift, which diffusers' schedulers call `mu`."""
        slope = (self.largest - self.least) / (self.most - self.fewest)
        return tokens * slope + (self.least - slope * self.fewest)


@dataclass(frozen=True, kw_only=True)
class NoiseLevels:
    """How a scheduler places its steps.

    Attributes:
        setting: name of the shift in the scheduler's configuration; `None` if it cannot be set.
        fixed: why it cannot be set; `None` if it can.
        shift: of the configuration, or diffusers' default.
        spread: spacing of the sigmas before the shift; `None` if unknown. "linear" is given to the scheduler by the
            pipeline; the others are the scheduler's own.
        training_steps: number of training timesteps.
        by_size: how the shift follows from the size of the clip; `None` if it does not.
        levels: sigmas of a model that was distilled for these, without the 0 at the end; empty for others.
        renewed: whether a step adds new noise to its estimate of the clean latents, instead of going on with the noise
            that was there, as in consistency models (https://arxiv.org/abs/2303.01469, algorithm 1).
        least_steps: 2 if the first and the last sigma are fixed (`shift_terminal`): diffusers returns NaN for one step.
    """

    setting: str | None = None
    fixed: Fact | None = NO_SHIFT
    shift: float = 1.0
    spread: Spread | None = None
    training_steps: int = 1000
    by_size: ShiftBySize | None = None
    levels: tuple[float, ...] = ()
    renewed: bool = False
    least_steps: int = 1

    def timesteps(self, steps: int, shift: float | None = None) -> list[float] | None:
        """Return the timesteps of a clip, highest first; `None` if they are unknown.

        Args:
            shift: replaces the configuration's.
        """
        by = self.shift if shift is None else shift
        if self.spread is None or self.by_size is not None or not 0 < by < _MAX_SHIFT:
            return None
        if self.spread == "euler":
            return self._euler(steps, by)
        if self.spread == "linear":
            return [
                _single(_shifted_single(_single(sigma), by) * self.training_steps) for sigma in self.sigmas(steps) or ()
            ]
        end = 1 / self.training_steps
        even = [1 + i * ((end - 1) / steps) for i in range(steps + 1)]
        if self.spread == "dpm":
            sigmas = [_shifted(1.0 - alpha, by) for alpha in reversed(even)][:-1]
        else:
            sigmas = [_shifted(sigma, by) for sigma in even[:-1]]
            sigmas[0] -= _EPSILON if abs(sigmas[0] - 1) < _EPSILON else 0
        return [float(int(sigma * self.training_steps)) for sigma in sigmas]

    def sigmas(self, steps: int) -> list[float] | None:
        """Return the sigmas before the shift that the pipeline gives to the scheduler; `None` if it gives none.

        Another number of steps than a model was distilled for takes levels between those.
        """
        if self.levels:
            return [_between(self.levels, index * len(self.levels) / steps) for index in range(steps)]
        return [i * (-1.0 / steps) + 1.0 for i in range(steps)] if self.spread == "linear" else None

    def _euler(self, steps: int, shift: float) -> list[float]:
        most, least = (
            self.training_steps * _shifted_single(_single(level), shift) for level in (1.0, 1 / self.training_steps)
        )
        between = (least - most) / max(steps - 1, 1)
        even = [most + i * between for i in range(steps)]
        if steps > 1:
            even[-1] = least
        sigmas = [_shifted(timestep / self.training_steps, shift) for timestep in even]
        return [_single(_single(sigma) * self.training_steps) for sigma in sigmas]


UNKNOWN_LEVELS = NoiseLevels()


def noise_levels(config: Mapping[str, Any]) -> NoiseLevels:
    """Return how the scheduler of a configuration places its steps.

    Raises:
        TypeError, ValueError: if the configuration is malformed.
    """
    name = str(config.get("_class_name"))
    spread: Spread | None
    if name in _FLOW:
        setting, spread = "flow_shift", _FLOW[name]
    elif name in _FLOW_MATCH:
        setting, spread = "shift", _FLOW_MATCH[name]
    else:
        return NoiseLevels(fixed=NO_SHIFT)
    shift = config.get(setting)
    if shift is None and setting in config:
        raise ValueError(f"{setting} is null; remove it, or give a number such as 3.0")
    steps = config.get("num_train_timesteps") or NoiseLevels.training_steps
    if type(steps) is not int or not 1 <= steps <= _MAX_TRAINING_STEPS:
        raise ValueError("num_train_timesteps")
    fixed = _fixed(config, flow=name in _FLOW)
    return NoiseLevels(
        setting=None if fixed else setting,
        fixed=fixed,
        shift=1.0 if shift is None else float(shift),
        spread=None if fixed or any(config.get(option) for option in _UNSUPPORTED) else spread,
        training_steps=steps,
        least_steps=2 if config.get("shift_terminal") else 1,
    )


def _fixed(config: Mapping[str, Any], *, flow: bool) -> Fact | None:
    """Return why the scheduler would ignore a shift, or `None` if it applies it to every step."""
    if flow and not (config.get("use_flow_sigmas") and config.get("prediction_type") == "flow_prediction"):
        return NO_FLOW_MATCHING
    option = next((rule for rule in _OTHER_RULES if config.get(rule)), None)
    return None if option is None else Fact("scheduler.other_spacing", {"option": option})


def _between(levels: tuple[float, ...], position: float) -> float:
    """Return the level at a position from 0; the level after the last one is 0."""
    number = int(position)
    following = (*levels, 0.0)[number + 1]
    return levels[number] + (position - number) * (following - levels[number])


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def _shifted_single(sigma: float, shift: float) -> float:
    """Apply the shift with every intermediate result in float32."""
    above = _single(_single(shift) * sigma)
    below = _single(1 + _single(_single(shift - 1) * sigma))
    return _single(above / below)


def _single(value: float) -> float:
    """Round to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
