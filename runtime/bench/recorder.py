"""Measures one run of a job: durations, memory by stage, engine builds and fallbacks. Collects its frames."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch

from runtime.bench.configurations import without_builds
from runtime.core.events import Event, Failed, FellBack, StageStarted, StepDone, TerminalEvent, VideoSaved, Warned
from runtime.core.plan import ExecutionPlan
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.history import History, Run

_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurement of one run.

    Attributes:
        end: last event of the job; `None` if it was paused.
        timings: seconds by stage from the job's result, without loading.
        steps: seconds of each denoising step.
        wall_seconds: seconds from start to end, including the time between stages.
        load_seconds, build_seconds: seconds spent on loading weights and on building engines.
        vram: peak bytes that PyTorch allocated on the GPU, by stage. This and the next two exclude the use before the
            run; on the CPU, only `ram` is measured.
        gpu: peak bytes of the GPU that all programs use, sampled at each event. Includes PyTorch's cache and engines.
        ram: peak resident memory of the process.
        fell_back: descriptions of components that fell back to PyTorch, and of other deviations from the plan.
        warnings: texts of the job's warnings.
        frames: batches, (n, height, width, 3) uint8.
    """

    end: TerminalEvent | None
    timings: Mapping[str, float]
    steps: tuple[float, ...]
    wall_seconds: float
    load_seconds: float
    build_seconds: float
    vram: Mapping[str, int]
    gpu: Mapping[str, int]
    ram: Mapping[str, int]
    fell_back: tuple[str, ...]
    warnings: tuple[str, ...]
    frames: tuple[np.ndarray, ...] = field(repr=False)


class Recorder:
    """Records one run of `make_video`.

    Call `make_video` within `measuring`. Pass it `emit`, `add_frames`, and an `UnwrittenHistory` whose `listener` is
    this recorder.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._cuda = device.startswith("cuda")
        self._steps: list[float] = []
        self._fell_back: list[str] = []
        self._warnings: list[str] = []
        self._frames: list[np.ndarray] = []
        self._vram: dict[str, int] = {}
        self._gpu: dict[str, int] = {}
        self._stage = ""
        self._used_before = 0
        # Until `add_plans` is called: `run_job` does not add jobs that ran out of memory to the history.
        self._deviations = ["memory ran out"]
        self._build_seconds = 0.0
        self._building_since: float | None = None
        self._started = self._ended = 0.0
        self._ram = _RamSampler()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the duration and sample the memory of the body."""
        self._used_before = in_use(self._device)
        self._started = time.perf_counter()
        try:
            with self._ram:
                yield
        finally:
            self._ended = time.perf_counter()
            self._end_build()

    def emit(self, event: Event) -> None:
        """Record an event of the job."""
        self._sample_gpu()
        if isinstance(event, StageStarted):
            self._stage = event.stage
            self._ram.enter(event.stage)
            if event.stage == "build":
                self._building_since = self._building_since or time.perf_counter()
            else:
                self._end_build()
            if event.stage == "decode":
                self._frames.clear()  # decoded again after out-of-memory
        elif isinstance(event, StepDone):
            self._steps.append(event.seconds)
        elif isinstance(event, FellBack):
            self._fell_back.append(str(event.fact))
        elif isinstance(event, Warned):
            self._warnings.append(str(event.fact))

    def add_frames(self, frames: np.ndarray) -> None:
        """Record decoded frames."""
        self._frames.append(frames)

    def add_plans(self, planned: ExecutionPlan, final: ExecutionPlan, peaks: Mapping[str, int]) -> None:
        """Record how the job deviated from its plan, and its peak VRAM by stage."""
        self._deviations = changed_fields(planned, final)
        if self._cuda:
            self._vram = dict(peaks)

    def measurement(self, end: TerminalEvent | None) -> Measurement:
        """Return the measurement of a job that ended with `end`."""
        saved = end if isinstance(end, VideoSaved) else None
        fell_back = self._fell_back
        if saved is not None and self._deviations and not fell_back:
            reason = f" {self._warnings[-1]}" if self._warnings else ""
            fell_back = [f"The job deviated from its plan ({', '.join(self._deviations)}).{reason}"]
        return Measurement(
            end=end,
            timings=dict(saved.timings) if saved else {},
            steps=tuple(self._steps),
            wall_seconds=self._ended - self._started,
            load_seconds=saved.load_seconds if saved else 0.0,
            build_seconds=self._build_seconds,
            vram=self._vram,
            gpu=self._gpu,
            ram=self._ram.peaks,
            fell_back=tuple(fell_back),
            warnings=tuple(self._warnings),
            frames=tuple(self._frames),
        )

    def _sample_gpu(self) -> None:
        if self._cuda and self._stage:
            added = in_use(self._device) - self._used_before
            self._gpu[self._stage] = max(added, self._gpu.get(self._stage, 0))

    def _end_build(self) -> None:
        if self._building_since is not None:
            self._build_seconds += time.perf_counter() - self._building_since
            self._building_since = None


class UnwrittenHistory(HistoryFile):
    """The history file without writing to it: a benchmark's runs stay in memory.

    Attributes:
        listener: receives plans and peaks of each job that succeeds.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        super().__init__(folder, machine)
        self._new: list[Run] = []
        self.listener: Recorder | None = None

    def read(self) -> History:
        """Return the runs in the file, then those of this benchmark."""
        return (*super().read(), *self._new)

    def add(self, new: Iterable[Run]) -> None:
        """Add runs without storing them."""
        self._new.extend(new)

    def add_job(
        self,
        planned: ExecutionPlan,
        ran: ExecutionPlan,
        spec: ModelSpec,
        timings: Mapping[str, float],
        peaks: Mapping[str, int],
        *,
        loaded: bool = False,
    ) -> None:
        """Pass plans and peaks of a successful job to the listener."""
        if self.listener is not None:
            self.listener.add_plans(planned, ran, peaks)


def changed_fields(planned: ExecutionPlan, final: ExecutionPlan) -> list[str]:
    """Return the fields and components of a plan that changed during the job, except by building engines."""
    fields = [name for name in type(planned).model_fields if name != "components"]
    before, after = without_builds(planned).components, without_builds(final).components
    changed = [name for name in fields if getattr(planned, name) != getattr(final, name)]
    return changed + [name for name in before if before[name] != after[name]]


def allocated(device: str) -> int:
    """Return the bytes that PyTorch has allocated on a GPU; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else 0


def in_use(device: str) -> int:
    """Return the bytes of a GPU that all programs use; 0 on the CPU."""
    if not device.startswith("cuda"):
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def used_memory(device: str) -> dict[str, int]:
    """Return the bytes in use, for each of `benchmark.MEMORIES`."""
    return {"vram": allocated(device), "gpu": in_use(device), "ram": int(psutil.Process().memory_info().rss)}


def failure_text(end: TerminalEvent | None) -> tuple[str, str]:
    """Return the problem and the remedy of a job without a video."""
    if isinstance(end, Failed):
        return end.what, end.remedy
    return "The job did not end.", "See the log."


class _RamSampler:
    """Samples the resident memory of the process in a `with` block.

    Attributes:
        peaks: peak bytes by stage, in addition to those at the start.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stage = ""
        self._bytes_at_start = 0
        self.peaks: dict[str, int] = {}

    def __enter__(self) -> "_RamSampler":
        self._bytes_at_start = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, name="bench-ram", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._update()

    def enter(self, stage: str) -> None:
        self._update()
        with self._lock:
            self._stage = stage
        self._update()

    def _update(self) -> None:
        used = self._process.memory_info().rss - self._bytes_at_start
        with self._lock:
            if self._stage:
                self.peaks[self._stage] = max(used, self.peaks.get(self._stage, 0))

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._update()
