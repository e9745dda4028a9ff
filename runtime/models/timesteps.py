"""Where a scheduler puts a clip's denoising steps, as far as its configuration tells. Imports no torch.

The arithmetic is that of diffusers' schedulers, number by number: which expert a step belongs to hangs on the
last digit. tests/models/test_timesteps.py compares.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# What the shift is called in the configuration of each of diffusers' schedulers that has one, and how the steps lie
# before it moves them.
Spread = Literal["unipc", "dpm", "euler"]
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
# With these, other rules say where the steps lie.
_OTHER_RULES = ("use_karras_sigmas", "use_lu_lambdas", "use_exponential_sigmas", "use_beta_sigmas")
_BENT = ("shift_terminal", "invert_sigmas")
_FIRST = 1e-6
# A shift beyond this stands in no configuration that works.
_MOST = 1e6


@dataclass(frozen=True, kw_only=True)
class NoiseLevels:
    """How a scheduler spreads its steps.

    Attributes:
        setting: what the shift is called in its configuration; `None` where a shift cannot be set.
        fixed: why it cannot, a clause.
        shift: of the configuration, or what diffusers takes where that has none.
        spread: how the steps lie before they are shifted; `None` where that is not known.
        training_steps: the number of timesteps of the training.
    """

    setting: str | None = None
    fixed: str = "it has none"
    shift: float = 1.0
    spread: Spread | None = None
    training_steps: int = 1000

    def timesteps(self, steps: int, shift: float | None = None) -> list[float] | None:
        """Return the timesteps of a clip, from noise to none; `None` where they are not known.

        Args:
            shift: instead of the configuration's.
        """
        by = self.shift if shift is None else shift
        if self.spread is None or not 0 < by < _MOST:
            return None
        if self.spread == "euler":
            return self._euler(steps, by)
        end = 1 / self.training_steps
        even = [1 + i * ((end - 1) / steps) for i in range(steps + 1)]
        if self.spread == "dpm":
            sigmas = [_shifted(1.0 - alpha, by) for alpha in reversed(even)][:-1]
        else:
            sigmas = [_shifted(sigma, by) for sigma in even[:-1]]
            sigmas[0] -= _FIRST if abs(sigmas[0] - 1) < _FIRST else 0
        return [float(int(sigma * self.training_steps)) for sigma in sigmas]

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


UNTOLD = NoiseLevels()


def noise_levels(config: Mapping[str, Any]) -> NoiseLevels:
    """Read a scheduler's configuration.

    Raises:
        TypeError, ValueError: if its numbers are none.
    """
    name = str(config.get("_class_name"))
    spread: Spread | None
    if name in _FLOW:
        setting, spread = "flow_shift", _FLOW[name]
    elif name in _FLOW_MATCH:
        setting, spread = "shift", _FLOW_MATCH[name]
    else:
        return NoiseLevels(fixed=f"{name} has none")
    given = config.get(setting)
    fixed = _fixed(config, flow=name in _FLOW)
    return NoiseLevels(
        setting=None if fixed else setting,
        fixed=fixed,
        shift=1.0 if given is None else float(given),
        spread=None if fixed or any(config.get(bent) for bent in _BENT) else spread,
        training_steps=int(config.get("num_train_timesteps") or 1000),
    )


def _fixed(config: Mapping[str, Any], *, flow: bool) -> str:
    """Return why a shift would move nothing, or not all; empty where it moves what it should."""
    other = next((rule for rule in _OTHER_RULES if config.get(rule)), None)
    if other is not None:
        return f"{other} says where its steps lie"
    return "it is not set up for flow matching (use_flow_sigmas)" if flow and not config.get("use_flow_sigmas") else ""


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def _shifted_single(sigma: float, shift: float) -> float:
    """Do the same with every intermediate result in float32."""
    above = _single(_single(shift) * sigma)
    below = _single(1 + _single(_single(shift - 1) * sigma))
    return _single(above / below)


def _single(value: float) -> float:
    """Return the nearest number that float32 has."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
