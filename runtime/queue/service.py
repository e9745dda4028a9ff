"""The background worker: runs what waits in the job store, one thread per GPU; pages and API calls only watch.

What was asked for outlives the page that asked, and the process too. Knows nothing about pages.
"""

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from runtime.core.errors import StoreError, TandemError
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine, probe, seen_from
from runtime.models.catalogue import look_up
from runtime.models.loras import model_for
from runtime.pipeline.history import HistoryFile
from runtime.pipeline.outputs import make_folder, output_path
from runtime.planner.history import History
from runtime.planner.parallelism import usable_gpus
from runtime.planner.resolve import resolve
from runtime.queue import recovery, tasks
from runtime.queue.execution import ControlPoller, Planner
from runtime.queue.gpu_pool import Pool
from runtime.queue.job import Job
from runtime.queue.process_lock import Instance
from runtime.queue.records import KINDS, VIDEOS, JobRecord
from runtime.queue.runner import Runner, RunnerContext, as_to_a_new_job
from runtime.queue.store import JobStore
from runtime.queue.tasks import Task

__all__ = ["Job", "JobQueue"]

# Finished jobs that are kept at hand, and finished chores.
_REMEMBERED = 50
_CHORES_REMEMBERED = 8
# What other processes do is looked at so often, what dead ones left so often.
_LOOK_SECONDS = 0.5
_ROUND_SECONDS = 10.0
# What was deleted long ago, or left by killed processes, is removed at the start and so often.
_TIDY_SECONDS = 3600.0

logger = logging.getLogger(__name__)


class JobQueue:
    """Runs videos, and chores on the engine library, in the order of the store: one at a time has a GPU.

    Args:
        weights_dir: where models are looked for, beside the shipped ones.
        outputs_dir: where videos go; made when a job is submitted.
        engines: what the plans may use.
        history: what jobs took here, read for each plan and added to.
        store: the jobs; one in memory if it is left out.
    """

    def __init__(
        self,
        weights_dir: Path,
        outputs_dir: Path,
        engines: EngineService,
        history: HistoryFile | None = None,
        store: JobStore | None = None,
    ) -> None:
        self.store = store or JobStore(None)
        self._weights_dir = weights_dir
        self._outputs_dir = outputs_dir
        self._engines = engines
        self._history = history
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._titles: dict[str, str] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._exit = ExitStack()
        self._instance = self._exit.enter_context(Instance(self.store.path))
        wishes = ControlPoller(self.store)
        gpus = usable_gpus(engines.machine) or [0]
        desk = RunnerContext(
            self.store,
            self._instance.id,
            Planner(weights_dir, engines, history),
            wishes,
            engines,
            history,
            self._job_of,
            self._task_of,
            self.machine,
            Pool(gpus),
        )
        # Chores are for the first one: they measure, and build for it.
        self._runners = {gpu: Runner(desk, gpu, KINDS if gpu == gpus[0] else VIDEOS) for gpu in gpus}
        recovery.recover(self.store, self._instance.id)
        self._look_around()
        self._exit.enter_context(wishes.listening())
        self._watcher = threading.Thread(target=self._watch, name="job-watcher", daemon=True)
        self._watcher.start()
        for runner in self._runners.values():
            runner.start()

    @property
    def instance(self) -> str:
        """This process's name among those that run jobs of the same store."""
        return self._instance.id

    def submit(self, request: GenerationRequest, owner: str | None = None) -> Job:
        """Plan a request and queue it.

        Raises:
            TandemError: if it cannot be made; nothing is queued then.
        """
        (job,) = self.submit_all([request], owner)
        return job

    def submit_all(self, requests: Sequence[GenerationRequest], owner: str | None = None) -> list[Job]:
        """Plan requests and queue them one after the other, as one batch if there are several.

        Raises:
            TandemError: if one of them cannot be made; nothing is queued then.
        """
        make_folder(self._outputs_dir)
        planned = [(request, self._plan(request)) for request in requests]
        jobs = [self._job_of(record) for record in self.store.add_all(planned, owner=owner)]
        self._wake()
        return jobs

    def redo_second_half(self, job_id: str, changes: Mapping[str, Any], owner: str | None = None) -> Job:
        """Queue a job that runs the second expert of another one anew, with other settings.

        Args:
            changes: see `second_half.redo_second_half`.

        Raises:
            TandemError: if that cannot be; nothing is queued then.
        """
        # They bring torch.
        from runtime.pipeline.checkpoint import CheckpointFolder
        from runtime.pipeline.rerun_low_noise import redo_second_half

        made, new_id = self.store.get(job_id).plan, secrets.token_hex(4)
        source, target = self.store.folder(job_id), self.store.folder(new_id)
        if made is None or source is None or target is None:
            raise StoreError(f"Nothing is kept of job {job_id}.", "Generate the video anew.")
        spec = model_for(GenerationRequest.from_mapping(made.request_json()), self._weights_dir)
        output = output_path(self._outputs_dir, made.prompt)
        offers, gpu = self._engines.offers(spec), min(self._runners)
        folders = CheckpointFolder(source), CheckpointFolder(target)
        machine = seen_from(self.machine(), gpu)
        plan = redo_second_half(made, changes, spec, *folders, machine, output, offers, self.history())
        request = GenerationRequest.from_mapping(plan.request_json())
        job = self._job_of(self.store.add(request, plan, owner=owner, parent=job_id, job_id=new_id))
        self._wake()
        return job

    def edit(self, job_id: str, request: GenerationRequest) -> Job:
        """Change what a waiting job will be; it keeps its place.

        Raises:
            TandemError: if that cannot be made, or the job does not wait any more.
        """
        plan = self._plan(request)
        job = self._job_of(self.store.edit(job_id, request, plan))
        job.refresh()
        job.model_title = self._title(plan.model)
        return job

    def resume(self, job_id: str, changes: Mapping[str, Any] | None = None) -> Job:
        """Put a job that ended without a video at the end of the queue: it goes on from its last checkpoint.

        Args:
            changes: to its request, by name, to go on in another way.

        Raises:
            TandemError: if it waits, runs or is done, or cannot be made with the changes; nothing has changed then.
        """
        if changes:
            request = GenerationRequest.from_mapping({**self.store.get(job_id).request, **changes})
            plan = self._plan(request)
            self.store.resume(job_id, (request, plan))
        else:
            self.store.resume(job_id)
        job = self._job_of(self.store.get(job_id))
        job.refresh()
        self._wake()
        return job

    def hold(self, ids: Iterable[str], held: bool) -> None:
        """Pause jobs after their step, or let them go on."""
        self.store.hold(ids, held)
        self._wake()

    def cancel(self, ids: Iterable[str]) -> None:
        """Stop jobs and builds: at once those that wait, soon those that run."""
        for one in ids:
            with self._lock:
                known = self._jobs.get(one) or self._tasks.get(one)
            if isinstance(known, Job):
                known.cancel.request()
            elif known is not None:
                self.cancel_task(one)
            else:
                self.store.request_cancel([one])

    def add_task(self, task: Task) -> None:
        """Queue work on the engine library behind all that waits already.

        Builds are done after a restart too; other work is for this process alone, and waits no longer than it lives.
        """
        build = task.request is not None
        # A runner that takes it at once waits for the lock, and finds it.
        with self._lock:
            record = self.store.add_work(
                "build" if build else "task",
                task.title,
                self._engines.store.folder,
                request=task.request,
                part=task.part,
                instance=None if build else self._instance.id,
            )
            task.id = record.id
            self._tasks[task.id] = task
            self._forget_old()
        self._wake()

    def job(self, job_id: str) -> Job | None:
        """Return a job by id, whichever process runs or ran it."""
        with self._lock:
            if job_id in self._jobs:
                return self._jobs[job_id]
        try:
            record = self.store.get(job_id)
        except StoreError:
            return None
        return None if record.kind != "video" or record.plan is None else self._job_of(record)

    def jobs(self, owner: str | None) -> list[Job]:
        """Return the last jobs of one owner that are not deleted, in the order they came."""
        found = [self._job_of(record) for record in self.store.list(owner=owner, limit=_REMEMBERED) if record.plan]
        return found[::-1]

    def open_jobs(self) -> list[Job]:
        """Return the jobs that run and wait, of every owner, in order."""
        return [self._job_of(record) for record in self.store.queue() if record.kind == "video" and record.plan]

    def tasks(self) -> list[Task]:
        """Return the chores that wait and run, and the last that ended, in the order they came."""
        with self._lock:
            return list(self._tasks.values())

    def cancel_task(self, task_id: str) -> None:
        """Stop a chore: at once if it waits, within a tenth of a second if it runs; of others nothing is heard."""
        with self._lock:
            task = self._tasks.get(task_id)
        if task is None or not task.open:
            return
        task.cancel.request()
        self.store.request_cancel([task_id])
        if self.store.get(task_id).state == "cancelled":
            task.end("cancelled", "Cancelled before it began.")

    def active(self, owner: str | None = None) -> Job | None:
        """Return the owner's job that runs, else the first that waits and is not paused."""
        return next((job for job in self.open_jobs() if job.owner == owner and not job.held), None)

    def latest(self, owner: str | None = None) -> Job | None:
        """Return the owner's job that was submitted last."""
        return next((self._job_of(record) for record in self.store.list(owner=owner, limit=1) if record.plan), None)

    def ahead(self, of: Job | Task) -> list[JobRecord]:
        """Return what runs or waits before a job or a chore; what is paused lets others pass."""
        try:
            line = [one for one in self.store.queue() if not one.held or one.id == of.id]
        except StoreError:  # a page shows the rest all the same
            return []
        ids = [one.id for one in line]
        return line[: ids.index(of.id)] if of.id in ids else []

    def machine(self) -> Machine:
        """Return the machine as it is to a new job: what earlier ones hold is used again or freed."""
        return as_to_a_new_job(probe(), self._runners.values())

    def history(self) -> History:
        """Return what jobs took here."""
        return () if self._history is None else self._history.read()

    def close(self) -> None:
        """Stop what runs, so that it goes on when Tandem starts again, and wait for the runners to end.

        Without a file to remember them by, all jobs are cancelled.
        """
        if self.store.path is None:
            self.cancel([one.id for one in self.store.queue()])
        for runner in self._runners.values():
            runner.stop()
        for runner in self._runners.values():
            runner.join()
        self._ended.set()
        self._watcher.join()
        self._exit.close()
        for task in self.tasks():
            if task.open:
                task.end("cancelled", "Tandem was stopped before.")
        try:
            recovery.recover(self.store, "")
        except StoreError as error:  # whoever starts next does it
            logger.warning("What was left could not be written down: %s", error)

    def _plan(self, request: GenerationRequest) -> ExecutionPlan:
        spec = model_for(request, self._weights_dir)
        output = output_path(self._outputs_dir, request.prompt)
        offers, first = self._engines.offers(spec), min(self._runners)
        return resolve(request, spec, self.machine(), output, offers, self.history(), first)

    def _job_of(self, record: JobRecord) -> Job:
        """Return the one live view of a job."""
        with self._lock:
            job = self._jobs.get(record.id)
            if job is None:
                # An older Tandem's plan may be none to this one.
                plan = record.plan or self._plan(record.asked_for())
                job = self._jobs[record.id] = Job(record, plan, self._title(plan.model), self.store)
                job.refresh()
                self._forget_old()
            return job

    def _title(self, model: str) -> str:
        if model not in self._titles:
            try:
                self._titles[model] = look_up(model, self._weights_dir).title
            except TandemError:  # it was here when the job was
                return model
        return self._titles[model]

    def _task_of(self, record: JobRecord) -> Task:
        """Return the chore of a record: a build that another process, or an earlier one, was asked for is made anew."""
        with self._lock:
            task = self._tasks.get(record.id)
            if task is None:

                def work(task: Task, free: tasks.Free) -> str:
                    request = record.asked_for()
                    spec = model_for(request, self._weights_dir)
                    return tasks.building(request, spec, self._engines, record.part).work(task, free)

                task = Task("build", record.title, work, id=record.id, request=record.asked_for(), part=record.part)
                self._tasks[record.id] = task
            return task

    def _wake(self) -> None:
        for runner in self._runners.values():
            runner.wake()

    def _watch(self) -> None:
        """Look after what other processes do, and do not do any more."""
        rounds, tidied = time.monotonic(), -_TIDY_SECONDS
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            try:
                self._look_around()
                if now - rounds > _ROUND_SECONDS:
                    rounds = now
                    recovery.recover(self.store, self._instance.id)
                if now - tidied > _TIDY_SECONDS:
                    tidied = now
                    recovery.purge(self.store, self._outputs_dir)
                    recovery.tidy(self.store, self._outputs_dir)
            except StoreError as error:
                logger.warning("The jobs cannot be looked at: %s", type(error.__cause__ or error).__name__)
            except Exception:  # a defect: kept in the log, and no reason to stop watching
                logger.exception("Looking after the jobs failed")

    def _look_around(self) -> None:
        with self._lock:
            open_jobs = [job for job in self._jobs.values() if job.open]
        for job in open_jobs:
            with suppress(StoreError):  # it is not there any more
                job.refresh()
        for record in self.store.queue():
            if record.kind == "build" and record.state == "queued":
                self._task_of(record)

    def _forget_old(self) -> None:
        for kept, most in ((self._jobs, _REMEMBERED), (self._tasks, _CHORES_REMEMBERED)):
            finished = [one for one in kept.values() if not one.open]
            for one in finished[: max(len(finished) - most, 0)]:
                del kept[one.id]
