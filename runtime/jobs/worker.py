"""The background worker: one thread runs jobs and chores one after another; pages and API calls only watch.

What was asked for outlives the page that asked. Knows nothing about pages.
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

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EngineError, TandemError
from runtime.core.events import Cancelled, Event, Failed, TerminalEvent, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.progress import Progress
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.jobs.chores import Chore
from runtime.jobs.history import HistoryFile
from runtime.jobs.outputs import make_folder, output_path
from runtime.manager.history import History
from runtime.manager.machine import Machine, probe
from runtime.manager.planner import resolve
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec

State = Literal["queued", "running", "done", "failed", "cancelled"]

# Finished jobs that can still be looked at, their videos stay on disk; and finished chores.
_REMEMBERED = 50
_CHORES_REMEMBERED = 8
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


@dataclass(frozen=True)
class _Ready:
    """What runs jobs once torch is imported: `run` one, and `free` what stays loaded between them."""

    run: Callable[[Job], None]
    free: Callable[[], None]


class Worker:
    """Runs jobs, and chores on the engine library, in the order they come: one at a time has the machine.

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
        self._line: OrderedDict[str, Job | Chore] = OrderedDict()
        self._queue: queue.Queue[Job | Chore | None] = queue.Queue()
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
        plan = resolve(request, spec, self.machine(), output, self._engines.offers(spec), self.history())
        job = Job(secrets.token_hex(4), plan, spec)
        self._add(job)
        return job

    def add_chore(self, chore: Chore) -> None:
        """Queue work on the engine library behind all that waits already."""
        self._add(chore)

    def job(self, job_id: str) -> Job | None:
        """Return a job by id."""
        found = self._line.get(job_id)
        return found if isinstance(found, Job) else None

    def chores(self) -> list[Chore]:
        """Return the chores that wait and run, and the last that ended, in the order they came."""
        with self._lock:
            return [one for one in self._line.values() if isinstance(one, Chore)]

    def cancel_chore(self, chore_id: str) -> None:
        """Stop a chore: at once if it waits, within a tenth of a second if it runs; of others nothing is heard."""
        with self._lock:
            chore = self._line.get(chore_id)
            if not isinstance(chore, Chore) or not chore.open:
                return
            chore.cancel.request()
            if chore.state == "queued":
                chore.end("cancelled", "Cancelled before it began.")

    def active(self) -> Job | None:
        """Return the job that runs, else the first that waits."""
        with self._lock:
            open_jobs = [one for one in self._line.values() if isinstance(one, Job) and _is_open(one)]
        return next((job for job in open_jobs if job.state == "running"), open_jobs[0] if open_jobs else None)

    def latest(self) -> Job | None:
        """Return the job that was submitted last."""
        with self._lock:
            return next((one for one in reversed(self._line.values()) if isinstance(one, Job)), None)

    def ahead(self, of: Job | Chore) -> list[Job | Chore]:
        """Return what runs or waits before a job or a chore."""
        with self._lock:
            waiting = [one for one in self._line.values() if _is_open(one)]
        ids = [one.id for one in waiting]
        return waiting[: ids.index(of.id)] if of.id in ids else []

    def position(self, job: Job) -> int:
        """Return how many jobs and chores run or wait before this one."""
        return len(self.ahead(job))

    def machine(self) -> Machine:
        """Return the machine as it is to a new job: what earlier ones hold is used again or freed."""
        seen = probe()
        own = psutil.Process().memory_info().rss
        gpus = seen.gpus
        if gpus:
            free = min(gpus[0].free_bytes + self._held_bytes(), gpus[0].total_bytes)
            gpus = (replace(gpus[0], free_bytes=free), *gpus[1:])
        return replace(seen, gpus=gpus, ram_free_bytes=min(seen.ram_free_bytes + own, seen.ram_bytes))

    def history(self) -> History:
        """Return what jobs took here."""
        return () if self._history is None else self._history.read()

    def close(self) -> None:
        """Cancel what runs and waits, and wait for the worker to end."""
        with self._lock:
            for one in self._line.values():
                one.cancel.request()
        self._queue.put(None)
        self._thread.join()

    def _add(self, one: Job | Chore) -> None:
        with self._lock:
            self._line[one.id] = one
            self._forget_old()
        self._queue.put(one)

    def _run(self) -> None:
        with ExitStack() as stack:
            ready: _Ready | None = None
            with suppress(Exception):  # told when there is a job to tell it to
                ready = _get_ready(stack, self._engines, self._history)
            while (one := self._queue.get()) is not None:
                if isinstance(one, Chore):
                    self._do(one, ready.free if ready else _free_nothing)
                elif one.cancel.requested:
                    one.record(Cancelled())
                else:
                    one.state = "running"
                    logger.info("Job %s: %d frames, seed %d", one.id, one.plan.frames, one.plan.seed)
                    try:
                        ready = ready or _get_ready(stack, self._engines, self._history)
                        self._held_bytes = _held_on_gpu
                        ready.run(one)
                    except Exception as error:  # running raises nothing: PyTorch itself does not start
                        logger.exception("Job %s could not start", one.id)
                        one.record(Failed(f"PyTorch or a library beside it does not start: {error}", _REINSTALL))
                    logger.info("Job %s: %s", one.id, one.state)

    def _do(self, chore: Chore, free: Callable[[], None]) -> None:
        with self._lock:
            if not chore.open:
                return
            chore.start()
        logger.info("%s: %s", chore.id, chore.title)
        try:
            chore.cancel.check()
            said = chore.work(chore, free)
        except CancelledError:
            chore.end("cancelled", "Cancelled. What was finished before stays.")
        except TandemError as error:
            if isinstance(error, EngineError) and error.log:
                chore.write(error.log)
            chore.end("failed", error.what, error.remedy)
        except Exception as error:  # a defect: told in one line, kept in the log
            logger.exception("%s failed", chore.title)
            chore.end("failed", f"Something broke inside Tandem: {error!r}", "The log has the details.")
        else:
            chore.end("done", said)
        logger.info("%s: %s", chore.id, chore.state)

    def _forget_old(self) -> None:
        for kind, most in ((Job, _REMEMBERED), (Chore, _CHORES_REMEMBERED)):
            finished = [one for one in self._line.values() if isinstance(one, kind) and not _is_open(one)]
            for one in finished[: max(len(finished) - most, 0)]:
                del self._line[one.id]


def _is_open(one: Job | Chore) -> bool:
    return one.state in {"queued", "running"}


def _free_nothing() -> None:
    """Free nothing: nothing was ever loaded."""


def _get_ready(stack: ExitStack, engines: EngineService, history: HistoryFile | None) -> _Ready:
    """Import what runs jobs, and return it. Takes seconds, for torch: so here, on the worker's own thread."""
    from runtime.components.residency import Residency
    from runtime.jobs.flow import run_job

    residency = stack.enter_context(Residency(engines))
    return _Ready(lambda job: run_job(job.plan, job.spec, job.record, job.cancel, residency, history), residency.free)


def _held_on_gpu() -> int:
    """Return what this process took of the first GPU; only once PyTorch is imported whole."""
    import torch

    return torch.cuda.memory_reserved(0)


def _end_state(event: TerminalEvent) -> State:
    if isinstance(event, VideoSaved):
        return "done"
    return "failed" if isinstance(event, Failed) else "cancelled"
