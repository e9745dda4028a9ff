"""What one run of a job tells: seconds, memory by stage, what was loaded, built and given up, and its frames."""

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
class Told:
    """One run.

    Attributes:
        end: how it ended; `None` if it was paused.
        timings: seconds by stage as the job tells them, without loading.
        steps: seconds of each denoising step.
        wall_seconds: from beginning to end, with all that the stages leave out.
        load_seconds: spent on loading.
        build_seconds: spent on building engines.
        vram, gpu, ram: peak bytes by stage beyond what was held before the run. VRAM is what PyTorch allocated on the
            GPU; of the GPU in all, what is in use there by anybody when something is told, PyTorch's own reserve and
            engines included; RAM the process's resident memory. On the CPU there is RAM only.
        fell_back: sentences: for each part that PyTorch took over, and where the job was done in another way than
            planned, for whatever reason.
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
    """Hears of one run: hand `emit`, an `UnwrittenHistory` with it as listener, and `look` to `run_job`.

    All that within `watching`.
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
        # A job that had to go on in another way is not told to `note`.
        self._unlike = ["memory ran out"]
        self._build_seconds = 0.0
        self._building_since: float | None = None
        self._started = self._ended = 0.0
        self._ram = _RamWatch()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the body and sample its memory."""
        self._before = in_use(self._device)
        self._started = time.perf_counter()
        try:
            with self._ram:
                yield
        finally:
            self._ended = time.perf_counter()
            self._built()

    def emit(self, event: Event) -> None:
        """Take an event in."""
        self._look_at_gpu()
        if isinstance(event, StageStarted):
            self._stage = event.stage
            self._ram.enter(event.stage)
            if event.stage == "build":
                self._building_since = self._building_since or time.perf_counter()
            else:
                self._built()
            if event.stage == "decode":
                self._frames.clear()  # a second attempt begins anew
        elif isinstance(event, StepDone):
            self._steps.append(event.seconds)
        elif isinstance(event, FellBack):
            self._fell_back.append(str(event.fact))
        elif isinstance(event, Warned):
            self._warnings.append(str(event.fact))
        elif isinstance(event, TerminalEvent):
            self._end = event

    def look(self, frames: np.ndarray) -> None:
        """Keep frames."""
        self._frames.append(frames)

    def note(self, planned: ExecutionPlan, ran: ExecutionPlan, peaks: Mapping[str, int]) -> None:
        """Take the GPU's peaks by stage, and whether the job ran as planned."""
        self._unlike = unlike(planned, ran)
        if self._cuda:
            self._vram = dict(peaks)

    def run(self) -> Told:
        """Return what the run told."""
        end = self._end
        saved = end if isinstance(end, VideoSaved) else None
        fell_back = self._fell_back
        if saved is not None and self._unlike and not fell_back:
            said = f" {self._warnings[-1]}" if self._warnings else ""
            fell_back = [f"The clip was made in another way than planned ({', '.join(self._unlike)}).{said}"]
        return Told(
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

    def _look_at_gpu(self) -> None:
        if self._cuda and self._stage:
            beyond = in_use(self._device) - self._before
            self._gpu[self._stage] = max(beyond, self._gpu.get(self._stage, 0))

    def _built(self) -> None:
        if self._building_since is not None:
            self._build_seconds += time.perf_counter() - self._building_since
            self._building_since = None


class UnwrittenHistory(HistoryFile):
    """What earlier jobs took here, read from the file; nothing of a benchmark is written there.

    So no forecast learns from it. `listener` hears instead, while a job runs.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        super().__init__(folder, machine)
        self._new: list[Run] = []
        self.listener: Recorder | None = None

    def read(self) -> History:
        """Return all runs, those of this benchmark that others are to know of too."""
        return (*super().read(), *self._new)

    def add(self, new: Iterable[Run]) -> None:
        """Keep runs in memory."""
        self._new.extend(new)

    def add_job(
        self,
        planned: ExecutionPlan,
        ran: ExecutionPlan,
        spec: ModelSpec,
        timings: Mapping[str, float],
        peaks: Mapping[str, int],
    ) -> None:
        """Tell the listener of a job that ended well."""
        if self.listener is not None:
            self.listener.note(planned, ran, peaks)


def unlike(planned: ExecutionPlan, ran: ExecutionPlan) -> list[str]:
    """Return what of a plan became otherwise while it was carried out; that engines are built by then is none."""
    names = [name for name in type(planned).model_fields if name != "components"]
    found = [name for name in names if getattr(planned, name) != getattr(ran, name)]
    built = without_builds(ran).components
    return found + [name for name, part in without_builds(planned).components.items() if built[name] != part]


def allocated(device: str) -> int:
    """Return the bytes that PyTorch has allocated on a GPU now; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else 0


def in_use(device: str) -> int:
    """Return the bytes of a GPU's memory that are in use, by anybody; 0 elsewhere."""
    if not device.startswith("cuda"):
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def held_now(device: str) -> dict[str, int]:
    """Return the bytes that are held now, of each of `entry.MEMORIES`."""
    return {"vram": allocated(device), "gpu": in_use(device), "ram": int(psutil.Process().memory_info().rss)}


def why_failed(end: TerminalEvent | None) -> tuple[str, str]:
    """Return what went wrong and what to do about it."""
    if isinstance(end, Failed):
        return end.what, end.remedy
    return "The job did not end.", "See the log."


class _RamWatch:
    """Samples the process's resident memory, by stage, while it is entered."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stage = ""
        self._before = 0
        self.peaks: dict[str, int] = {}

    def __enter__(self) -> "_RamWatch":
        self._before = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, name="bench-ram", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def enter(self, stage: str) -> None:
        self._look()
        with self._lock:
            self._stage = stage
        self._look()

    def _look(self) -> None:
        held = self._process.memory_info().rss - self._before
        with self._lock:
            if self._stage:
                self.peaks[self._stage] = max(held, self.peaks.get(self._stage, 0))

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._look()
