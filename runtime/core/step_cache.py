"""Caching across denoising steps, as requested: `none`, or `first-block` with its strength.

First-block caching always computes a transformer's first block. Where its residual differs by less than the strength
from that of the last full pass, the other blocks' residual of that pass is reused. Source:
https://github.com/chengzeyi/ParaAttention; the strength is diffusers' `FirstBlockCacheConfig.threshold`.
"""

import math

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened

NONE, FIRST_BLOCK = "none", "first-block"
_KINDS = (NONE, FIRST_BLOCK)
# See bench/step_cache.md for its effect on the shipped model.
DEFAULT_STRENGTH = 0.08
MAX_STRENGTH = 1.0
# The cache is reset after this number of steps. A job that resumes there gives the same video as
# one that was never interrupted, without storing gigabytes of cache.
STEPS_OF_A_CACHE = 8


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
    try:
        strength = float(number)
    except ValueError:
        strength = math.nan
    if not 0 < strength <= MAX_STRENGTH:
        raise InvalidRequestError(
            "step_cache",
            "step_cache.strength_out_of_range",
            strength=shortened(number),
            most=MAX_STRENGTH,
            default=DEFAULT_STRENGTH,
        )
    return f"{name}:{strength:g}"


def with_strength(step_cache: str) -> str:
    """Return a step cache with its strength."""
    return f"{step_cache}:{DEFAULT_STRENGTH:g}" if step_cache == FIRST_BLOCK else step_cache


def strength_of(step_cache: str) -> float | None:
    """Return the strength of a step cache; `None` without one."""
    return None if step_cache == NONE else float(with_strength(step_cache).partition(":")[2])
