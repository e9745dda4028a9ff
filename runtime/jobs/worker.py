"""The background worker: one thread runs jobs one after another; pages and API calls only watch.

A job outlives the page that asked for it. Knows nothing about pages.
"""

import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil

from runtime.core.cancel import Cancel
from runtime.core.events import Cancelled, Event, Failed, TerminalEvent, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.progress import Progress
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.jobs.history import HistoryFile
from runtime.jobs.outputs import make_folder, output_path
from runtime.manager.machine import Machine, probe
from runtime.manager.planner import resolve
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec

State = Literal["queued", "running", "done", "failed", "cancelled"]

# Finished jobs that can still be looked at; their videos stay on disk.
_REMEMBERED = 50
_REINSTALL = "Run the installer again, then `doctor`; the log has the details."

logger = logging.getLogger(__name__)


@dataclass
class Job:
    """One request on its way. Read it from any thread; only the worker changes it."""

    id: str
    plan: ExecutionPlan
    spec: ModelSpec = field(repr=False)
    cancel: Cancel = field(default_factory=Cancel, repr=False)
    state: State = "queued"
    progress: Progress = field(default_factory=Progress, repr=False)
    events: list[Event] = field(default_factory=list, repr=False)

    def record(self, event: Event) -> None:
        """Take an event in; whoever sees a terminal one in `events` finds state and progress at their end too."""
        if isinstance(event, TerminalEvent):
            self.state = _end_state(event)
        self.progress = self.progress.after(event, time.monotonic())
        self.events.append(event)


class Worker:
    """Runs jobs in the order they come.

    Args:
        weights_dir: where models are looked for, beside the shipped ones.
        outputs_dir: where videos go; made when a job is submitted.
        engines: what the plans may use.
        history: what jobs took here, read for each plan and added to.
    """

    def __init__(
        self, weights_dir: Path, outputs_dir: Path, engines: EngineService, history: HistoryFile | None = None
    ) -> None:
        self._weights_dir = weights_dir
        self._outputs_dir = outputs_dir
        self._engines = engines
        self._history = history
        self._held_bytes: Callable[[], int] = lambda: 0
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._queue: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Job:
        """Plan a request and queue it.

        Raises:
            TandemError: if it cannot be made; nothing is queued then.
        """
        spec = find(request.model, self._weights_dir)
        make_folder(self._outputs_dir)
        output = output_path(self._outputs_dir, request.prompt)
        history = self._history.read() if self._history is not None else ()
        plan = resolve(request, spec, self._machine(), output, self._engines.offers(spec), history)
        job = Job(secrets.token_hex(4), plan, spec)
        with self._lock:
            self._jobs[job.id] = job
            self._forget_old()
        self._queue.put(job)
        return job

    def job(self, job_id: str) -> Job | None:
        """Return a job by id."""
        return self._jobs.get(job_id)

    def active(self) -> Job | None:
        """Return the job that runs, else the first that waits."""
        with self._lock:
            open_jobs = [job for job in self._jobs.values() if job.state in {"queued", "running"}]
        return next((job for job in open_jobs if job.state == "running"), open_jobs[0] if open_jobs else None)

    def latest(self) -> Job | None:
        """Return the job that was submitted last."""
        with self._lock:
            return next(reversed(self._jobs.values()), None)

    def position(self, job: Job) -> int:
        """Return how many jobs run or wait before this one."""
        with self._lock:
            ids = [other.id for other in self._jobs.values() if other.state in {"queued", "running"}]
        return ids.index(job.id) if job.id in ids else 0

    def close(self) -> None:
        """Cancel what runs and waits, and wait for the worker to end."""
        with self._lock:
            for job in self._jobs.values():
                job.cancel.request()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as stack:
            run: Callable[[Job], None] | None = None
            with suppress(Exception):  # told when there is a job to tell it to
                run = _ready(stack, self._engines, self._history)
            while (job := self._queue.get()) is not None:
                if job.cancel.requested:
                    job.record(Cancelled())
                    continue
                job.state = "running"
                logger.info("Job %s: %d frames, seed %d", job.id, job.plan.frames, job.plan.seed)
                try:
                    run = run or _ready(stack, self._engines, self._history)
                    self._held_bytes = _held_on_gpu
                    run(job)
                except Exception as error:  # running raises nothing: PyTorch itself does not start
                    logger.exception("Job %s could not start", job.id)
                    job.record(Failed(f"PyTorch or a library beside it does not start: {error}", _REINSTALL))
                logger.info("Job %s: %s", job.id, job.state)

    def _machine(self) -> Machine:
        """Return the machine as it is to a new job: what earlier ones hold is used again or freed."""
        seen = probe()
        own = psutil.Process().memory_info().rss
        gpus = seen.gpus
        if gpus:
            free = min(gpus[0].free_bytes + self._held_bytes(), gpus[0].total_bytes)
            gpus = (replace(gpus[0], free_bytes=free), *gpus[1:])
        return replace(seen, gpus=gpus, ram_free_bytes=min(seen.ram_free_bytes + own, seen.ram_bytes))

    def _forget_old(self) -> None:
        finished = [job for job in self._jobs.values() if job.state not in {"queued", "running"}]
        for job in finished[: max(len(finished) - _REMEMBERED, 0)]:
            del self._jobs[job.id]


def _ready(stack: ExitStack, engines: EngineService, history: HistoryFile | None) -> Callable[[Job], None]:
    """Import what runs jobs, and return it. Takes seconds, for torch: so here, on the worker's own thread."""
    from runtime.components.residency import Residency
    from runtime.jobs.flow import run_job

    residency = stack.enter_context(Residency(engines))
    return lambda job: run_job(job.plan, job.spec, job.record, job.cancel, residency, history)


def _held_on_gpu() -> int:
    """Return what this process took of the first GPU; only once PyTorch is imported whole."""
    import torch

    return torch.cuda.memory_reserved(0)


def _end_state(event: TerminalEvent) -> State:
    if isinstance(event, VideoSaved):
        return "done"
    return "failed" if isinstance(event, Failed) else "cancelled"
