"""Seconds per stage, without loading, and peak memory."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

import psutil
import torch

from runtime.execution.parallel.shared import GroupManager
from runtime.execution.residency import Residency

_SAMPLE_SECONDS = 0.05
_STAGES = ("encode", "denoise", "decode", "mux")


class Clock:
    """Times stages without loading, and marks them in `peak`.

    A stage that is retried after out-of-memory takes the time of all attempts.
    """

    def __init__(self, residency: Residency, peak: "PeakMemory") -> None:
        self._residency = residency
        self._peak = peak
        self._loaded_before = residency.load_seconds
        self._seconds = dict.fromkeys(_STAGES, 0.0)
        self._running: tuple[str, float, float] | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as stage `name`."""
        self._running = (name, time.perf_counter(), self._residency.load_seconds)
        self._peak.enter_stage(name)
        try:
            yield
        finally:
            self._peak.leave_stage()
            self._seconds = self._so_far()
            self._running = None

    def add_earlier(self, timings: Mapping[str, float], load_seconds: float) -> None:
        """Add the seconds of earlier runs of the job."""
        for name in self._seconds:
            self._seconds[name] += timings.get(name, 0.0)
        self._loaded_before -= load_seconds

    @property
    def load_seconds(self) -> float:
        """Seconds spent loading weights since this clock was made, and in earlier runs."""
        return self._residency.load_seconds - self._loaded_before

    def timings(self) -> dict[str, float]:
        """Return seconds by stage so far, and their total."""
        seconds = self._so_far()
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        return rounded | {"total": round(sum(seconds.values()), 3)}

    def _so_far(self) -> dict[str, float]:
        if self._running is None:
            return self._seconds
        name, started, loaded = self._running
        spent = time.perf_counter() - started - (self._residency.load_seconds - loaded)
        return self._seconds | {name: self._seconds[name] + spent}


class PeakMemory:
    """Peak memory inside the `with` block: allocated on a CUDA device, otherwise resident in this process.

    `by_stage` has the peak of each finished stage above the memory in use at the start.

    Args:
        group_manager: of several GPUs' processes; on CUDA the peak of the fullest GPU is added.
    """

    def __init__(self, device: str, group_manager: GroupManager | None = None) -> None:
        self._group_manager = group_manager or GroupManager()
        self._cuda = device if device.startswith("cuda") else None
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._peak = 0
        self._before = 0
        self._in_stage = 0
        self._stage = ""
        self.by_stage: dict[str, int] = {}

    def __enter__(self) -> "PeakMemory":
        """Start measuring."""
        self._group_manager.reset_peak_memory()
        if self._cuda:
            torch.cuda.synchronize(self._cuda)  # initializes CUDA: before, there are no statistics to reset
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
        else:
            self._before = self._process.memory_info().rss
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
        self._note()
        return self._peak

    def enter_stage(self, name: str) -> None:
        """Start measuring stage `name`."""
        self._note()
        with self._lock:
            self._stage, self._in_stage = name, 0
            if self._cuda:
                torch.cuda.reset_peak_memory_stats(self._cuda)
                self._group_manager.reset_peak_memory()

    def leave_stage(self) -> None:
        """End the stage."""
        self._note()
        self.by_stage[self._stage] = max(self._in_stage - self._before, self.by_stage.get(self._stage, 0))

    def _note(self) -> None:
        with self._lock:
            if self._cuda:
                held = torch.cuda.max_memory_allocated(self._cuda) + self._group_manager.peak_bytes
            else:
                held = self._process.memory_info().rss
            self._peak = max(self._peak, held)
            self._in_stage = max(self._in_stage, held)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._note()
