"""Waiting, as patiently as a busy machine needs: what never comes fails a test, what is slow does not."""

import time
from collections.abc import Callable

PATIENCE = 180.0


def until(holds: Callable[[], object], *, meanwhile: Callable[[], object] = lambda: True, pause: float = 0.01) -> None:
    """Wait until something holds.

    Args:
        meanwhile: must hold for as long.
        pause: seconds between two looks.
    """
    end = time.monotonic() + PATIENCE
    while not holds():
        assert meanwhile(), "it ended before"
        assert time.monotonic() < end, f"not within {PATIENCE:g} s"
        time.sleep(pause)
