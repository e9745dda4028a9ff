"""Measures one run of a job: seconds, memory by stage, loading, engine builds, fallbacks, and frames."""

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
from runtime.pipeline.history import HistoryFile
from runtime.planner.history import History, Run

_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurement of one run.

    Attributes:
        end: last event of the job; `None` if it was paused.
        timings: seconds by stage from the job's result, without loading.
        steps: seconds of each denoising step.
        wall_seconds: seconds from start to end, including what no stage counts.
        load_seconds, build_seconds: seconds spent on loading and on building engines.
        vram, gpu, ram: peak bytes by stage in addition to the use before the run. VRAM: allocated by PyTorch. GPU: used
            by all programs, sampled at each event, with PyTorch's reserve and engines. RAM: resident memory of the
            process. On the CPU, only RAM.
        fell_back: sentences: components that fell back to PyTorch, and other deviations from the plan.
        warnings: sentences.
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
    """Records one run: pass `emit`, `add_frames` and an `UnwrittenHistory` with this listener to `run_job`.

    Call `run_job` within `measuring`.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._cuda = device.startswith("cuda")
        self._end: TerminalEvent | None = None
        self._steps: list[float] = []
        self._fell_back: list[str] = []
        self._warnings: list[str] = []
        self._frames: list[np.ndarray] = []
        self._vram: dict[str, int] = {}
        self._gpu: dict[str, int] = {}
        self._stage = ""
        self._before = 0
        # `note` is not called for a job that ran with another strategy after out-of-memory.
        self._changed = ["memory ran out"]
        self._build_seconds = 0.0
        self._building_since: float | None = None
        self._started = self._ended = 0.0
        self._ram = _RamSampler()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the duration and sample the memory of the body."""
        self._before = in_use(self._device)
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
        elif isinstance(event, TerminalEvent):
            self._end = event

    def add_frames(self, frames: np.ndarray) -> None:
        """Record decoded frames."""
        self._frames.append(frames)

    def note(self, planned: ExecutionPlan, ran: ExecutionPlan, peaks: Mapping[str, int]) -> None:
        """Record the peak VRAM by stage, and how the job deviated from its plan."""
        self._changed = changed_fields(planned, ran)
        if self._cuda:
            self._vram = dict(peaks)

    def measurement(self) -> Measurement:
        """Return the measurement."""
        end = self._end
        saved = end if isinstance(end, VideoSaved) else None
        fell_back = self._fell_back
        if saved is not None and self._changed and not fell_back:
            last = f" {self._warnings[-1]}" if self._warnings else ""
            fell_back = [f"The job deviated from its plan ({', '.join(self._changed)}).{last}"]
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
            beyond = in_use(self._device) - self._before
            self._gpu[self._stage] = max(beyond, self._gpu.get(self._stage, 0))

    def _end_build(self) -> None:
        if self._building_since is not None:
            self._build_seconds += time.perf_counter() - self._building_since
            self._building_since = None


class UnwrittenHistory(HistoryFile):
    """Timings of earlier jobs; those of a benchmark stay in memory, so that later forecasts do not use them.

    `listener` receives the peaks of each finished job.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        super().__init__(folder, machine)
        self._new: list[Run] = []
        self.listener: Recorder | None = None

    def read(self) -> History:
        """Return the stored runs and those of this benchmark."""
        return (*super().read(), *self._new)

    def add(self, new: Iterable[Run]) -> None:
        """Add runs in memory."""
        self._new.extend(new)

    def add_job(
        self,
        planned: ExecutionPlan,
        ran: ExecutionPlan,
        spec: ModelSpec,
        timings: Mapping[str, float],
        peaks: Mapping[str, int],
    ) -> None:
        """Pass plans and peaks of a successful job to the listener."""
        if self.listener is not None:
            self.listener.note(planned, ran, peaks)


def changed_fields(planned: ExecutionPlan, ran: ExecutionPlan) -> list[str]:
    """Return the fields and components of a plan that changed while it ran; built engines are not a change."""
    names = [name for name in type(planned).model_fields if name != "components"]
    found = [name for name in names if getattr(planned, name) != getattr(ran, name)]
    built = without_builds(ran).components
    return found + [name for name, part in without_builds(planned).components.items() if built[name] != part]


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
    """Samples the peak resident memory of the process by stage in a `with` block."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stage = ""
        self._before = 0
        self.peaks: dict[str, int] = {}

    def __enter__(self) -> "_RamSampler":
        self._before = self._process.memory_info().rss
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
        held = self._process.memory_info().rss - self._before
        with self._lock:
            if self._stage:
                self.peaks[self._stage] = max(held, self.peaks.get(self._stage, 0))

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._update()
