"""Wait for a condition, with a timeout that suits a busy machine."""

import time
from collections.abc import Callable

TIMEOUT = 180.0


def until(
    holds: Callable[[], object],
    *,
    meanwhile: Callable[[], object] = lambda: True,
    pause: float = 0.01,
    seconds: float = TIMEOUT,
) -> None:
    """Wait until a condition holds, or fail.

    Args:
        meanwhile: a condition that must hold during the wait.
        pause: seconds between two checks.
        seconds: after which it fails.
    """
    end = time.monotonic() + seconds
    while not holds():
        assert meanwhile(), "the condition `meanwhile` ended first"
        assert time.monotonic() < end, f"no result within {seconds:g} s"
        time.sleep(pause)
