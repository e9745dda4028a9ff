"""A job that was claimed: the plan as things are now, the run, and what somebody wishes meanwhile.

The worker and the command line run jobs through this.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.errors import StoreError
from runtime.core.plan import ExecutionPlan
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine
from runtime.models.loras import model_for
from runtime.models.spec import ModelSpec
from runtime.pipeline.history import HistoryFile
from runtime.planner.parallelism import usable_gpus
from runtime.planner.resolve import resolve
from runtime.queue.job import Job
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore

if TYPE_CHECKING:  # these bring torch
    from runtime.execution.residency import Residency
    from runtime.pipeline.run_context import Emit

_LOOK_SECONDS = 0.25

logger = logging.getLogger(__name__)


class Planner:
    """Plans jobs as things are when they begin.

    Args:
        weights_dir: where models are looked for, beside the shipped ones.
        engines: what plans may use.
        history: what jobs took here.
    """

    def __init__(self, weights_dir: Path, engines: EngineService, history: HistoryFile | None) -> None:
        self._weights_dir = weights_dir
        self._engines = engines
        self._history = history

    def plan(
        self, record: JobRecord, machine: Machine, gpu: int = 0, beside: Sequence[int] | None = None
    ) -> tuple[ModelSpec, ExecutionPlan]:
        """Return the model and the plan of a claimed job: one that had begun goes on by its own plan.

        Args:
            gpu, beside: see `planner.resolve.resolve`.

        Raises:
            TandemError: if it cannot be made as things are now.
        """
        spec = model_for(record.asked_for(), self._weights_dir)
        if record.begun and record.plan is not None and record.plan.loras == spec.loras:
            moved = on_gpu(record.plan, gpu, machine, beside)
            if moved is not None:
                return spec, moved
            logger.info("job %s: what it began on is not here, so it is planned anew", record.id)
        history = () if self._history is None else self._history.read()
        offers = self._engines.offers(spec)
        plan = resolve(record.asked_for(), spec, machine, record.output, offers, history, gpu, beside)
        return spec, plan


def on_gpu(
    plan: ExecutionPlan, gpu: int, machine: Machine, beside: Sequence[int] | None = None
) -> ExecutionPlan | None:
    """Return a plan with its parts on other GPUs of the machine; `None` if it needs more than there are.

    Parts on the CPU stay there.

    Args:
        gpu: the one, or the first of several.
        beside: what others it may have; if it is left out, all that are usable.
    """
    on_cuda = [name for name, part in plan.components.items() if part.device.startswith("cuda")]
    if on_cuda and gpu >= len(machine.gpus):
        return None
    moved = {name: plan.components[name].replace(device=f"cuda:{gpu}") for name in on_cuda}
    split = plan.split
    if split is not None and on_cuda:
        others = [other for other in (usable_gpus(machine) if beside is None else beside) if other != gpu]
        if 1 + len(others) < plan.gpus:
            return None
        split = split.replace(devices=tuple(f"cuda:{index}" for index in [gpu, *others][: plan.gpus]))
    return plan.replace(components={**plan.components, **moved}, split=split)


def run(
    job: Job,
    plan: ExecutionPlan,
    spec: ModelSpec,
    emit: "Emit",
    residency: "Residency",
    history: HistoryFile | None,
    store: JobStore,
) -> None:
    """Make the video, on this thread; the job has ended then, or was paused.

    Args:
        emit: called with each event; it is to hand it to `job.record`.
    """
    from runtime.pipeline.checkpoint import CheckpointFolder
    from runtime.pipeline.run import run_job

    folder = store.folder(job.id)
    checkpoints = None if folder is None else CheckpointFolder(folder)
    run_job(plan, spec, emit, job.cancel, residency, history, checkpoints, job.id)
    if checkpoints is not None and job.state == "done":
        checkpoints.remove_latest()


class ControlPoller:
    """Listens to what the store says that running jobs were asked for, by whichever process, and passes it on.

    Also writes down what could not be written before.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()

    @contextmanager
    def heard(self, job: Job) -> Iterator[None]:
        """Listen for one job while entered."""
        with self._lock:
            self._jobs[job.id] = job
        try:
            yield
        finally:
            with self._lock:
                if job.written:
                    self._jobs.pop(job.id, None)  # `look` may have been first

    def look(self) -> None:
        """Look once."""
        with self._lock:
            jobs = dict(self._jobs)
        for job in jobs.values():
            if not job.written and job.write() is None and not job.open:
                with self._lock:
                    self._jobs.pop(job.id, None)
        try:
            asked = self._store.asked(jobs) if jobs else {}
        except StoreError:  # heard at the next look
            return
        for job_id, wish in asked.items():
            cancel = jobs[job_id].cancel
            if wish == "cancel" and not cancel.requested:
                cancel.request()
            elif wish == "pause":
                cancel.pause()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Look a few times a second while entered."""
        end = threading.Event()

        def listen() -> None:
            while not end.wait(_LOOK_SECONDS):
                self.look()

        thread = threading.Thread(target=listen, name="wishes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            self.look()
