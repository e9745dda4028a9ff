"""Runs a claimed video job in this process: plans it, stores its events, and polls for cancel and pause requests.

Worker processes and the command line use the same functions.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.cancel import Cancel, never
from runtime.core.errors import CheckpointError, StoreError
from runtime.core.events import (
    EngineProgress,
    Event,
    Failed,
    FramesDecoded,
    Planned,
    StepDone,
    TerminalEvent,
    VideoSaved,
    Warned,
)
from runtime.core.facts import Fact
from runtime.core.files import replace_file
from runtime.core.log import log_line
from runtime.core.plan import ExecutionPlan
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import POSTER, PREVIEW, Stamps
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.placement import usable_gpus
from runtime.planner.resolve import resolve
from runtime.queue.records import JobRecord
from runtime.queue.recovery import avoid_causes
from runtime.queue.store import JobStore

if TYPE_CHECKING:  # these import torch
    from runtime.execution.residency import Residency
    from runtime.pipeline.run_context import Emit

_POLL_SECONDS = 0.1
_POLLS_TO_YIELD = 3
_CLOSE_SECONDS = 10.0
# Least time between two stored progress reports of an engine build; builders report more often.
_PROGRESS_SECONDS = 0.2

logger = logging.getLogger(__name__)


class Planner:
    """Plans claimed jobs for the machine as it is when they start.

    Args:
        weights_dir: the user's models.
        engines: the engine library.
        history: measured times of earlier jobs.
        builds_later: see `planner.resolve.resolve`.
    """

    def __init__(
        self, weights_dir: Path, engines: EngineService, history: HistoryFile | None, *, builds_later: bool = False
    ) -> None:
        self._builds_later = builds_later
        self._weights_dir = weights_dir
        self._engines = engines
        self._history = history

    def plan(
        self,
        record: JobRecord,
        machine: Machine,
        gpu: int = 0,
        others: Sequence[int] | None = None,
        deaths: Sequence[Mapping[str, object]] = (),
        check: Callable[[], None] = never,
    ) -> tuple[ModelSpec, ExecutionPlan]:
        """Return the model and the plan of a claimed job; a job that started before keeps its plan if it can.

        Args:
            gpu, others: see `planner.resolve.resolve`.
            deaths: see `recovery.avoid_causes`.
            check: see `models.images.with_images`.

        Raises:
            TandemError: if the job cannot run on this machine now.
        """
        spec = model_for(record.generation_request(), self._weights_dir, self._engines.cache_dir, check=check)
        if record.begun and record.plan is not None and _has_same_inputs(record.plan, spec):
            planned = record.plan.replace(
                model_directory=spec.directory,
                output=record.output,
                image=spec.image,
                last_image=spec.last_image,
                loras=spec.loras,
            )
            moved = move_to_gpu(planned, gpu, machine, others)
            if moved is not None:
                return spec, avoid_causes(moved, spec, deaths)
            logger.info("job %s: this machine lacks devices of its plan; it is planned again", record.id)
        history = () if self._history is None else self._history.read()
        offers = self._engines.offers(spec)
        plan = resolve(
            record.generation_request(),
            spec,
            machine,
            record.output,
            offers,
            history,
            gpu,
            others,
            builds_later=self._builds_later,
        )
        return spec, avoid_causes(plan, spec, deaths)


def _has_same_inputs(plan: ExecutionPlan, spec: ModelSpec) -> bool:
    """Whether a plan is for a model's LoRAs and images; the files may be in another folder now."""
    images = [None if one is None else one.digest for one in (plan.image, plan.last_image)]
    loras = [[(use.digest, use.weight, use.expert) for use in uses] for uses in (plan.loras, spec.loras)]
    return loras[0] == loras[1] and images == [
        None if one is None else one.digest for one in (spec.image, spec.last_image)
    ]


def move_to_gpu(
    plan: ExecutionPlan, gpu: int, machine: Machine, others: Sequence[int] | None = None
) -> ExecutionPlan | None:
    """Return a plan with its CUDA components on other GPUs; `None` if it needs more GPUs than there are.

    Args:
        gpu: index of the only GPU, or of the first of several.
        others: indices of further GPUs that the plan may use; by default, all usable ones.
    """
    on_cuda = [name for name, part in plan.components.items() if part.device.startswith("cuda")]
    if on_cuda and gpu >= len(machine.gpus):
        return None
    moved = {name: plan.components[name].replace(device=f"cuda:{gpu}") for name in on_cuda}
    split = plan.split
    if split is not None and on_cuda:
        further = [other for other in (usable_gpus(machine) if others is None else others) if other != gpu]
        if 1 + len(further) < plan.gpus:
            return None
        split = split.replace(devices=tuple(f"cuda:{index}" for index in [gpu, *further][: plan.gpus]))
    return plan.replace(components={**plan.components, **moved}, split=split)


def queue_builds(record: JobRecord, plan: ExecutionPlan, spec: ModelSpec, store: JobStore, folder: Path) -> bool:
    """Queue the builds that a plan leaves for when no video waits; return whether something was queued.

    Nothing is queued if the same engines are queued already, or could not be built or were cancelled recently.

    Args:
        folder: of the engine library.
    """
    later = {name: part.later for name, part in plan.components.items() if part.later}
    if not later:
        return False
    request = record.generation_request()
    work = request.replace(
        backends={name: BUILDERS[uses[0].builder].backend for name, uses in later.items()},
        build="always" if request.build == "always" else "missing",
        seed=0,
    )
    ids = {use.id for uses in later.values() for use in uses}
    devices = {plan.components[name].device for name in later} - {"cpu"}
    # Components that are not on the CPU are on one GPU.
    gpu = int(min(devices, default="cuda:0").removeprefix("cuda:"))
    return store.add_idle_build(build_title(plan, spec, list(later)), folder, work.to_json(), ids, gpu)


def build_title(plan: ExecutionPlan, spec: ModelSpec, components: Sequence[str], backend: str = "") -> Fact:
    """Return the title of a task that builds engines for components, with one backend or those that fit."""
    among = list(plan.components)
    data: dict[str, object] = {"model": spec.title, "width": plan.width, "height": plan.height, "frames": plan.frames}
    complete = set(components) >= set(among)
    if not complete:
        data["components"] = {"names": list(components), "among": among}
    if backend:
        return Fact("task.build_all_with" if complete else "task.build_with", {**data, "backend": backend})
    return Fact("task.build_all" if complete else "task.build", data)


class JobRecorder:
    """Writes a job's events to the store, and its preview and poster to the job's folder.

    If the store cannot be written, the job continues, and the events are written as soon as possible.

    Args:
        lease: nothing is written once the job was started again; see `JobRecord.lease`.

    Attributes:
        cancel: the token that the job checks; `ControlPoller` sets it on a request.
        end: the terminal event, once the job has ended.
    """

    def __init__(self, job_id: str, store: JobStore, cancel: Cancel | None = None, lease: int | None = None) -> None:
        self.id = job_id
        self.cancel = cancel or Cancel()
        self.end: TerminalEvent | None = None
        self._store = store
        self._lease = lease
        self._unwritten: list[Event] = []
        self._failing = False
        self._progress_at = 0.0
        self._lock = threading.RLock()

    @property
    def written(self) -> bool:
        """Whether the store has all events."""
        return not self._unwritten

    def record(self, event: Event) -> list[Warned]:
        """Store an event. Return warnings about the store, which this process has to show itself."""
        if isinstance(event, EngineProgress):
            self._store_progress(event)
            return []
        logger.info("job %s: %s", self.id, log_line(event))
        warnings = []
        with self._lock:
            was_failing = self._failing
            if isinstance(event, StepDone | FramesDecoded) and event.preview is not None:
                self._save_preview(event.preview)
                event = event.model_copy(update={"preview": None})
            if isinstance(event, VideoSaved):
                self._save_poster()
            if isinstance(event, TerminalEvent):
                self.end = event
            self._unwritten.append(event)
            if isinstance(event, Planned) and self._store.problem:
                warnings.append(Warned(fact=Fact("queue.job_not_stored", {"cause": self._store.problem})))
                self._unwritten += warnings
            problem = self.write()
        if problem is not None and not was_failing and not isinstance(event, TerminalEvent):
            warnings.append(Warned(fact=Fact("queue.job_not_stored_yet", {"cause": problem.fact})))
        return warnings

    def write(self) -> StoreError | None:
        """Write all events that are not written yet; return the error if that fails.

        Those of a job that is not in the store any more are dropped.
        """
        with self._lock:
            try:
                while self._unwritten:
                    self._store.record(self.id, self._unwritten[0], self._lease)
                    del self._unwritten[0]
            except StoreError as error:
                if error.code == "queue.no_such_job":
                    logger.warning("job %s: its row is gone; its events are not stored any more", self.id)
                    self._unwritten.clear()
                    return None
                # Retried several times a second, but logged once.
                if not self._failing:
                    logger.warning("job %s: its events cannot be written yet", self.id)
                self._failing = True
                return error
            self._failing = False
        return None

    def _store_progress(self, event: EngineProgress) -> None:
        now = time.monotonic()
        if now - self._progress_at >= _PROGRESS_SECONDS:
            self._progress_at = now
            with contextlib.suppress(StoreError):  # the next report may succeed
                self._store.show(self.id, event.model_dump(mode="json"), self._lease)

    def _save_preview(self, preview: bytes) -> None:
        folder = self._store.folder(self.id)
        if folder is not None:
            with contextlib.suppress(OSError):  # the page has no preview then
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(folder / PREVIEW, preview)

    def _save_poster(self) -> None:
        folder = self._store.folder(self.id)
        if folder is not None:
            with contextlib.suppress(OSError):  # the gallery has no poster then
                (folder / PREVIEW).replace(folder / POSTER)


def run(
    record: JobRecord,
    plan: ExecutionPlan,
    spec: ModelSpec,
    emit: "Emit",
    cancel: Cancel,
    residency: "Residency",
    history: HistoryFile | None,
    folder: Path | None,
    files: Stamps | None = None,
) -> None:
    """Run a claimed job in this thread until it ends or is paused.

    Args:
        emit: called with each event.
        folder: of the job's checkpoints; `None` saves none.
        files: what identifies the model's files in checkpoints; by default they are read.
    """
    from runtime.pipeline.checkpoint import CheckpointFolder
    from runtime.pipeline.rerun_low_noise import prepare_rerun
    from runtime.pipeline.run import run_job

    ended: list[TerminalEvent] = []

    def follow(event: Event) -> None:
        if isinstance(event, TerminalEvent):
            ended.append(event)
        emit(event)

    checkpoints = None if folder is None else CheckpointFolder(folder, files)
    if record.parent is not None and checkpoints is not None:
        try:
            prepare_rerun(checkpoints, plan, spec)
        except CheckpointError as error:
            emit(Failed.because_of(error))
            return
    if record.finish:
        cancel.finish_early()
    run_job(plan, spec, follow, cancel, residency, history, checkpoints, record.id)
    saved = ended[-1] if ended and isinstance(ended[-1], VideoSaved) else None
    if checkpoints is not None and saved is not None and not saved.continues:
        checkpoints.remove_latest()


@dataclass
class _Yielding:
    """A task that makes room for other work; `count` is for how many polls in a row such work was `wanted`."""

    cancel: Cancel
    wanted: Callable[[], bool]
    count: int = 0


class ControlPoller:
    """Polls the store for requests to cancel or pause this process's jobs and tasks, and retries failed writes.

    The lock protects the three dictionaries. It is not held during a poll, which reads and writes the store.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._jobs: dict[str, JobRecorder] = {}
        self._cancels: dict[str, Cancel] = {}
        self._yielding: dict[str, _Yielding] = {}
        self._lock = threading.Lock()

    @contextmanager
    def following(self, job: JobRecorder) -> Iterator[None]:
        """Poll for a job in a `with` block. Until its events are written, retry to write them, even after the block."""
        with self._lock:
            self._jobs[job.id] = job
        try:
            yield
        finally:
            with self._lock:
                if job.written:
                    self._jobs.pop(job.id, None)  # or `poll` has removed it

    @contextmanager
    def cancelling(self, task_id: str, cancel: Cancel) -> Iterator[None]:
        """Poll for a task in a `with` block."""
        with self._lock:
            self._cancels[task_id] = cancel
        try:
            yield
        finally:
            with self._lock:
                del self._cancels[task_id]

    @contextmanager
    def yielding(self, task_id: str, cancel: Cancel, wanted: Callable[[], bool]) -> Iterator[None]:
        """Stop a task in a `with` block when other work wants its place, or on a pause: `cancel.pausing` is set then.

        Args:
            wanted: whether other work wants its place. It must say so several times: another worker may take the work.
        """
        with self._lock:
            self._yielding[task_id] = _Yielding(cancel, wanted)
        try:
            yield
        finally:
            with self._lock:
                del self._yielding[task_id]

    def _poll_yielding(self) -> None:
        with self._lock:
            yielding = list(self._yielding.values())
        for task in yielding:
            with contextlib.suppress(StoreError):  # polled again soon
                task.count = task.count + 1 if task.wanted() else 0
                if task.count >= _POLLS_TO_YIELD or (task.cancel.pausing and not task.cancel.requested):
                    task.cancel.pause()
                    task.cancel.request()

    def poll(self) -> None:
        """Poll once."""
        self._poll_yielding()
        with self._lock:
            jobs = dict(self._jobs)
            cancels = self._cancels | {job.id: job.cancel for job in jobs.values()}
        for job in jobs.values():
            if not job.written and job.write() is None and job.end is not None:
                with self._lock:
                    self._jobs.pop(job.id, None)
        try:
            requests = self._store.pending(cancels) if cancels else {}
            finishing = self._store.finishing(jobs) if jobs else set()
        except StoreError:  # polled again soon
            return
        for job_id in finishing:
            cancels[job_id].finish_early()
        for job_id, request in requests.items():
            if request == "cancel":
                cancels[job_id].request()
            elif request == "pause":
                cancels[job_id].pause()

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Poll ten times a second in a `with` block, in another thread."""
        end = threading.Event()

        def poll() -> None:
            while not end.wait(_POLL_SECONDS):
                self.poll()

        thread = threading.Thread(target=poll, name="control-poller", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join(_CLOSE_SECONDS)  # longer only while the store's disk does not answer
            self.poll()
