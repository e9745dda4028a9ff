"""Caching across denoising steps, as requested: `none`, or a kind with its strength.

All kinds reuse what a transformer's blocks add to the hidden states, their residual:

- `first-block` always computes the first block. Where its residual differs by less than the strength from that of the
  last full pass, the other blocks' residual of that pass is reused. Source: https://github.com/chengzeyi/ParaAttention;
  the strength is diffusers' `FirstBlockCacheConfig.threshold`.
- `magcache` reuses the residual of the last computed step until the error that a model's magnitude ratios predict
  exceeds the strength. Source: https://arxiv.org/abs/2506.09045; the rule is that of diffusers' `MagCacheConfig`.
- `taylorseer` computes one step of as many as the strength says, and extrapolates the residual linearly from the last
  two computed steps to the others. Source: https://arxiv.org/abs/2503.06923.

The last two decide by the number of the step alone. So plans know which steps are computed, and all processes of a job
agree without exchanging anything.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened

NONE, FIRST_BLOCK, MAGCACHE, TAYLORSEER = "none", "first-block", "magcache", "taylorseer"
# First-block caches are reset after this number of steps. A job that resumes there gives the same video as one that was
# never interrupted, without storing gigabytes of cache.
STEPS_OF_A_CACHE = 8
# Those of TaylorSeer, which computes two steps after each reset; fewer of its steps are computed.
_STEPS_OF_A_SERIES = 16
# MagCache: the share of each transformer's first steps that are always computed.
_RETENTION = 0.2
# MagCache: published pairs of a strength and of the most steps that reuse a residual are 0.06 and 2, 0.12 and 4, 0.24
# and 6 (https://github.com/Zehong-Ma/MagCache).
_REUSED_STRENGTH, _REUSED_STEPS = 0.06, 2


@dataclass(frozen=True)
class Strengths:
    """The strengths of a kind: above `above` and up to `most`; `whole` numbers only, or any."""

    default: float
    above: float
    most: float
    whole: bool = False

    def read(self, text: str) -> float | None:
        """Return the strength that a text states, `None` for anything else."""
        try:
            strength = float(text)
        except ValueError:
            return None
        valid = self.above < strength <= self.most and (not self.whole or strength.is_integer())
        return strength if valid else None


# See bench/step_cache.md for their effect on the shipped model.
STRENGTHS: Mapping[str, Strengths] = {
    FIRST_BLOCK: Strengths(0.08, 0, 1),
    MAGCACHE: Strengths(0.03, 0, 1),
    TAYLORSEER: Strengths(2, 1, 8, whole=True),
}
_KINDS = (NONE, *STRENGTHS)


def read_step_cache(value: object) -> str:
    """Return `value` in its shortest notation: "none", "first-block" or "first-block:0.12".

    Raises:
        InvalidRequestError: for anything else, or a strength out of range.
    """
    name, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if name not in _KINDS or (colon and name == NONE):
        raise InvalidRequestError(
            "step_cache", "step_cache.unknown", value=shortened(value), choices=_KINDS, example=f"{FIRST_BLOCK}:0.2"
        )
    if not colon:
        return name
    strengths = STRENGTHS[name]
    strength = strengths.read(number)
    if strength is None:
        code = "step_cache.interval_out_of_range" if strengths.whole else "step_cache.strength_out_of_range"
        raise InvalidRequestError(
            "step_cache", code, strength=shortened(number), most=strengths.most, default=strengths.default
        )
    return f"{name}:{strength:g}"


def with_strength(step_cache: str) -> str:
    """Return a step cache with its strength."""
    return f"{step_cache}:{STRENGTHS[step_cache].default:g}" if step_cache in STRENGTHS else step_cache


def kind_of(step_cache: str) -> str:
    """Return the kind of a step cache, without its strength."""
    return step_cache.partition(":")[0]


def strength_of(step_cache: str) -> float | None:
    """Return the strength of a step cache; `None` without one."""
    return None if step_cache == NONE else float(with_strength(step_cache).partition(":")[2])


def is_scheduled(step_cache: str) -> bool:
    """Whether the numbers of the steps alone decide which are computed."""
    return kind_of(step_cache) in {MAGCACHE, TAYLORSEER}


class StepUse(NamedTuple):
    """What one step does with a step cache.

    Attributes:
        computed: whether all blocks are computed; with first-block, whether they may be.
        fresh: whether the step starts with an empty cache, so that sampling can be resumed before it.
    """

    computed: bool
    fresh: bool


def uses(step_cache: str, experts: Sequence[str], ratios: Mapping[str, Sequence[float]]) -> list[StepUse]:
    """Return what each step does with a step cache; each transformer starts with an empty one.

    Args:
        step_cache: as in a plan.
        experts: the transformer of each step.
        ratios: magnitude ratios by transformer, for MagCache; see `ModelSpec.mag_ratios`.
    """
    kind, strength = kind_of(step_cache), strength_of(step_cache)
    step_uses: list[StepUse] = []
    for expert, steps in groupby(experts):
        first, count = len(step_uses), sum(1 for _ in steps)
        if strength is None:
            step_uses += [StepUse(computed=True, fresh=True)] * count
        elif kind == FIRST_BLOCK:
            resets = (step == 0 or (first + step) % STEPS_OF_A_CACHE == 0 for step in range(count))
            step_uses += [StepUse(computed=True, fresh=fresh) for fresh in resets]
        elif kind == TAYLORSEER:
            places = [step % _STEPS_OF_A_SERIES for step in range(count)]
            step_uses += [StepUse(in_series(place, int(strength)), place == 0) for place in places]
        else:
            step_uses += [StepUse(computed, computed) for computed in _by_magnitude(ratios[expert], count, strength)]
    return step_uses


def each_step(expert_steps: Mapping[str, int]) -> list[str]:
    """Return the transformer of each step.

    Args:
        expert_steps: steps of each transformer in the order they run.
    """
    return [expert for expert, count in expert_steps.items() for _ in range(count)]


def computed_steps(
    step_cache: str, expert_steps: Mapping[str, int], ratios: Mapping[str, Sequence[float]]
) -> dict[str, int]:
    """Return how many steps of each transformer are computed; first-block counts all.

    Args:
        expert_steps: see `each_step`.
        ratios: see `uses`.
    """
    experts = each_step(expert_steps)
    counts = dict.fromkeys(expert_steps, 0)
    for expert, use in zip(experts, uses(step_cache, experts, ratios), strict=True):
        counts[expert] += use.computed
    return counts


def in_series(place: int, interval: int) -> bool:
    """Return whether TaylorSeer computes a step.

    Args:
        place: the number of the step since the cache was empty, from 0.
        interval: one step of so many is computed, after the first two.
    """
    return place == 0 or (place - 1) % interval == 0


def most_reused(strength: float) -> int:
    """Return how many steps in a row may reuse a residual with MagCache at a strength."""
    return max(1, round(_REUSED_STEPS * (1 + math.log2(strength / _REUSED_STRENGTH))))


def interpolated(ratios: Sequence[float], steps: int) -> list[float]:
    """Return the nearest magnitude ratio for each of another number of steps, as MagCache and diffusers do."""
    if steps == 1:
        return [ratios[-1]]
    return [ratios[round(step * (len(ratios) - 1) / (steps - 1))] for step in range(steps)]


def _by_magnitude(ratios: Sequence[float], steps: int, strength: float) -> list[bool]:
    """Return which steps of a transformer MagCache computes.

    The residual of a step is expected to be as large as the cached one times the product of the ratios since then. The
    errors, its distances from 1, are added until they exceed the strength.
    """
    warmup, most = max(int(_RETENTION * steps + 0.5), 1), most_reused(strength)
    decisions: list[bool] = []
    ratio, error, reused = 1.0, 0.0, 0
    for step, factor in enumerate(interpolated(ratios, steps)):
        if step >= warmup:
            ratio, reused = ratio * factor, reused + 1
            error += abs(1 - ratio)
        computed = step < warmup or error > strength or reused > most
        if computed:
            ratio, error, reused = 1.0, 0.0, 0
        decisions.append(computed)
    return decisions
