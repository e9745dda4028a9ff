"""Caching across denoising steps, as it is asked for: `none`, or `first-block` with its strength.

First-block caching: the first block of a transformer is always computed; where what it adds differs by less than the
strength from what it added when all blocks were computed last, what the others added then is added again. Source:
https://github.com/chengzeyi/ParaAttention; diffusers' `FirstBlockCacheConfig.threshold` is the strength.
"""

import math

from runtime.core.errors import InvalidRequestError

NONE, FIRST_BLOCK = "none", "first-block"
STEP_CACHES = (NONE, FIRST_BLOCK)
# bench/step_cache.md: what it does to the shipped model.
DEFAULT_STRENGTH = 0.08
MAX_STRENGTH = 1.0
# A cache begins anew with every so many steps, counted from the first: a job can be taken up there, and gives the same
# video as one that was never interrupted, without keeping caches of gigabytes.
STEPS_OF_A_CACHE = 8
_LONGEST_SHOWN = 40


def read_step_cache(value: object) -> str:
    """Return `value` as it is written shortest: "none", "first-block" or "first-block:0.12".

    Raises:
        InvalidRequestError: for anything else, or a strength out of bounds.
    """
    name, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if name not in STEP_CACHES or (colon and name == NONE):
        raise InvalidRequestError(
            "step_cache",
            f"step cache is {_shown(value)}.",
            f"Take one of {', '.join(STEP_CACHES)}; {FIRST_BLOCK}:0.2 sets its strength.",
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
            f"The strength of the step cache is {_shown(number)}.",
            f"Give one above 0 and up to {MAX_STRENGTH:g}; {DEFAULT_STRENGTH:g} is taken where none is given.",
        )
    return f"{name}:{strength:g}"


def as_used(step_cache: str) -> str:
    """Return a step cache with its strength."""
    return f"{step_cache}:{DEFAULT_STRENGTH:g}" if step_cache == FIRST_BLOCK else step_cache


def strength_of(step_cache: str) -> float | None:
    """Return the strength of a step cache as it is used; `None` without one."""
    return None if step_cache == NONE else float(as_used(step_cache).partition(":")[2])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
