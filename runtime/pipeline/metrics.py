"""Seconds per stage of a job, without loading, and its peak memory."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

from runtime.core.events import FINISHING
from runtime.execution.residency import Residency
from runtime.machine.load import LoadMeter

_SAMPLE_SECONDS = 0.05
_STAGES = ("encode", "denoise", "decode", *FINISHING, "mux")


class Metrics:
    """Measures a job inside the `with` block.

    A stage inside another one is not part of it. A stage that is retried after out-of-memory takes the time of all
    attempts. Memory is what is allocated on a CUDA device, plus that of the fullest GPU of a group; without CUDA, what
    is resident in this process.

    Args:
        device: of the transformer.
        residency: knows the time spent on loading and the processes of several GPUs.

    Attributes:
        stage_peaks: peak of each finished stage in bytes, above the memory in use at the start.
        encoders: seconds and peak of each component of the encode stage in this run, in bytes as `stage_peaks`.
        parts: the same of components that run by themselves in other stages, by stage and component.
    """

    def __init__(self, device: str, residency: Residency) -> None:
        self._residency = residency
        self._cuda = device if device.startswith("cuda") else None
        self._loaded_before = residency.load_seconds
        self._seconds = dict.fromkeys(_STAGES, 0.0)
        # Name of the running stage, its start, and the load seconds then.
        self._running: tuple[str, float, float] | None = None
        self._process = psutil.Process()
        self._load = LoadMeter()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._peak = 0
        self._stage_peak = 0
        self._memory_before = 0
        self.stage_peaks: dict[str, int] = {}
        self.encoders: dict[str, tuple[float, int]] = {}
        self.parts: dict[tuple[str, str], tuple[float, int]] = {}

    def __enter__(self) -> "Metrics":
        """Start measuring memory."""
        self._residency.group_manager.reset_peak_memory()
        if self._cuda:
            torch.cuda.synchronize(self._cuda)  # initializes CUDA: before, there are no statistics to reset
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._memory_before = torch.cuda.memory_allocated(self._cuda)
        else:
            self._memory_before = self._process.memory_info().rss
            self._sampler = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop measuring memory."""
        if not self._cuda:
            self._stop.set()
            self._sampler.join()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the body as stage `name`."""
        with self._measured(name):
            yield

    @contextmanager
    def encoder(self, component: str) -> Iterator[None]:
        """Measure the body as the part of the encode stage in which a component makes all calls of the job."""
        with self._measured_part("encode") as measured:
            yield
        self.encoders[component] = measured()

    @contextmanager
    def part(self, stage: str, component: str) -> Iterator[None]:
        """Measure the body as the part of a stage in which a component runs by itself, such as one that decodes sound.

        Not inside of `stage`.
        """
        with self._measured_part(stage) as measured:
            yield
        self.parts[stage, component] = measured()

    @contextmanager
    def _measured_part(self, stage: str) -> Iterator[Callable[[], tuple[float, int]]]:
        before = self._seconds[stage]
        with self._measured(stage):
            yield lambda: (self._seconds[stage] - before, self._stage_peak - self._memory_before)

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        self._update_peak()
        outer, outer_peak = self._running, self._stage_peak
        self._seconds = self._so_far()
        self._running = (name, time.perf_counter(), self._residency.load_seconds)
        with self._lock:
            self._stage_peak = 0
            if self._cuda:
                torch.cuda.reset_peak_memory_stats(self._cuda)
                self._residency.group_manager.reset_peak_memory()
        try:
            yield
        finally:
            self._update_peak()
            self.stage_peaks[name] = max(self._stage_peak - self._memory_before, self.stage_peaks.get(name, 0))
            self._seconds = self._so_far()
            self._running = None
            if outer is not None:
                self._running = (outer[0], time.perf_counter(), self._residency.load_seconds)
                self._stage_peak = max(self._stage_peak, outer_peak)

    def add_earlier(self, timings: Mapping[str, float], load_seconds: float) -> None:
        """Add the seconds of earlier runs of the job."""
        for name in self._seconds:
            self._seconds[name] += timings.get(name, 0.0)
        self._loaded_before -= load_seconds

    @property
    def loaded(self) -> bool:
        """Whether other programs used much of the processor so far."""
        return self._load.loaded

    @property
    def load_seconds(self) -> float:
        """Seconds spent on loading weights, in this run and earlier ones."""
        return self._residency.load_seconds - self._loaded_before

    def timings(self) -> dict[str, float]:
        """Return seconds by stage so far, and their total."""
        seconds = self._so_far()
        # Most videos are neither interpolated nor upscaled.
        rounded = {name: round(value, 3) for name, value in seconds.items() if value or name not in FINISHING}
        return rounded | {"total": round(sum(seconds.values()), 3)}

    def peak_bytes(self) -> int:
        """Return the peak memory so far."""
        self._update_peak()
        return self._peak

    def _so_far(self) -> dict[str, float]:
        if self._running is None:
            return self._seconds
        name, started, loaded = self._running
        spent = time.perf_counter() - started - (self._residency.load_seconds - loaded)
        return self._seconds | {name: self._seconds[name] + spent}

    def _update_peak(self) -> None:
        with self._lock:
            if self._cuda:
                used = torch.cuda.max_memory_allocated(self._cuda) + self._residency.group_manager.peak_bytes
            else:
                used = self._process.memory_info().rss
            self._peak = max(self._peak, used)
            self._stage_peak = max(self._stage_peak, used)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._update_peak()
