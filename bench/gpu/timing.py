"""The time of one call."""

import time
from collections.abc import Callable

import torch


def call_seconds(run: Callable[[], object], *, cuda: bool) -> float:
    """Return the seconds of a call, by CUDA events on a GPU."""
    if not cuda:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
