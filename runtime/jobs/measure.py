"""Seconds per stage, without loading, and peak memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import psutil
import torch

from runtime.components.residency import Residency

_SAMPLE_SECONDS = 0.05


class Clock:
    """Times stages; what `residency` spends on loading inside a stage is counted apart."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._loaded_before = residency.load_seconds
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as stage `name`."""
        started, loaded = time.perf_counter(), self._residency.load_seconds
        yield
        loading = self._residency.load_seconds - loaded
        self._seconds[name] = time.perf_counter() - started - loading

    @property
    def load_seconds(self) -> float:
        """Seconds spent loading weights since this clock was made."""
        return self._residency.load_seconds - self._loaded_before

    def timings(self) -> dict[str, float]:
        """Return seconds by stage, and their total."""
        rounded = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return rounded | {"total": round(sum(self._seconds.values()), 3)}


class PeakMemory:
    """The most memory held while it is entered: allocated on a CUDA device, else resident in this process."""

    def __init__(self, device: str) -> None:
        self._cuda = device if device.startswith("cuda") else None
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._peak = 0

    def __enter__(self) -> "PeakMemory":
        """Start measuring."""
        if self._cuda:
            torch.cuda.synchronize(self._cuda)  # starts CUDA: before that there are no statistics to reset
            torch.cuda.reset_peak_memory_stats(self._cuda)
        else:
            self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop measuring."""
        if not self._cuda:
            self._stop.set()
            self._thread.join()

    def bytes(self) -> int:
        """Return the peak so far, in bytes."""
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self._cuda))
        return max(self._peak, int(self._process.memory_info().rss))

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self._process.memory_info().rss)
