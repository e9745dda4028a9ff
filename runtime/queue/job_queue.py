"""The web app's side of the queue: plan and submit jobs and tasks, change, cancel and follow them. Imports no torch."""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from runtime.core.batches import combinations
from runtime.core.errors import StoreError, TandemError
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import Auto, GenerationRequest
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine, probe
from runtime.models.catalogue import look_up
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.models.wildcards import with_prompt
from runtime.pipeline.files import make_folder, output_path
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.history import History
from runtime.planner.placement import usable_gpus
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue import recovery, storage
from runtime.queue.changes import Changes
from runtime.queue.instances import Instance, WorkerRegistry
from runtime.queue.records import KINDS, VIDEOS, Ahead, BuildEngines, JobRecord, Work
from runtime.queue.store import Admit, JobStore, Submission
from runtime.queue.supervisor import Supervisor
from runtime.queue.views import Job, Task
from runtime.queue.worker import WorkerConfig, memory_for_new_job

# Ended jobs and tasks that stay in memory.
_ENDED_JOBS = 10
_ENDED_TASKS = 8
# Queued jobs of which the first with a readable plan is shown.
_FIRST = 10
# Intervals at which views are compared with the store, jobs of dead processes are recovered, and old files are removed.
_REFRESH_SECONDS = 0.05
_RECOVERY_SECONDS = 10.0
_CLEANUP_SECONDS = 3600.0
# The watcher may wait for a disk that does not answer; it ends with the process.
_CLOSE_SECONDS = 10.0
# At most this late, ended videos beyond a limit are removed.
_EXPIRY_SECONDS = 10.0

logger = logging.getLogger(__name__)


class JobQueue:
    """The video jobs and tasks of a store. Safe between threads.

    Args:
        weights_dir: the user's models.
        outputs_dir: the folder for videos, which is created when a job is submitted.
        engines: the engine library.
        history: measured times of earlier jobs.
        store: the jobs.
        app: the id of the app whose workers run the jobs, in a further process of that app; by default this process is
            an app of its own.

    Attributes:
        instance: the id of the app among the processes that share the store.
        makes_videos: whether this app's workers make videos, and not only tasks and builds.
        changes: wakes those who follow the whole store.
        retention: which ended videos are kept.
        on_done: the command that workers run when a video is done or fails, see `DoneCommand`; empty runs none.
        sending: files of videos that are being sent, symlinks resolved; these videos do not expire meanwhile.
        plans_for: returns the machine of a cluster that requests are planned for; `None` for this machine.
        workers_elsewhere: returns the number of workers of a cluster's other machines.
    """

    def __init__(
        self,
        weights_dir: Path,
        outputs_dir: Path,
        engines: EngineService,
        history: HistoryFile | None,
        store: JobStore,
        app: str | None = None,
    ) -> None:
        self.store = store
        self._weights_dir = weights_dir
        self._outputs_dir = outputs_dir
        self._engines = engines
        self._history = history
        self._gpus = usable_gpus(engines.machine) or [0]
        self._registry = WorkerRegistry(store.database)
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        # Also ended jobs that a page follows.
        self._views: WeakValueDictionary[str, Job] = WeakValueDictionary()
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._specs: dict[str, ModelSpec] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._exit = ExitStack()
        self._is_app = app is None
        self.instance = self._exit.enter_context(Instance(self.store.path)).id if app is None else app
        self._supervisor: Supervisor | None = None
        self._read = 0
        self.makes_videos = True
        self.changes = Changes()
        self.retention = storage.Retention()
        self.on_done: Sequence[str] = ()
        self.sending: Counter[Path] = Counter()
        self.plans_for: Callable[[], Machine | None] = lambda: None
        self.workers_elsewhere: Callable[[], int] = lambda: 0
        if self._is_app:
            recovery.recover(self.store, self.instance)
        self._refresh()
        self._watcher = threading.Thread(target=self._watch, name="job-watcher", daemon=True)
        self._watcher.start()

    def start_workers(self, log_file: Path | None = None, *, videos: bool = True) -> None:
        """Start the worker processes, one for each GPU or one for the CPU, and keep them running until `close`.

        Args:
            videos: whether they make videos, and not only tasks and builds.
        """
        configs = self.worker_configs(log_file)
        self.makes_videos = videos
        if not videos:
            configs = [
                replace(config, kinds=[kind for kind in config.kinds if kind not in VIDEOS]) for config in configs
            ]
        self._supervisor = Supervisor(self.store, configs)
        self._supervisor.start()

    @property
    def own_machine(self) -> Machine:
        """This machine as it was at the start."""
        return self._engines.machine

    def video_workers(self) -> dict[int, str]:
        """Return the names of this app's workers that make videos, by GPU."""
        return {gpu: f"{self.instance}.{gpu}" for gpu in self._gpus} if self.makes_videos else {}

    def videos_at_once(self) -> int:
        """Return how many videos can run at once, on all machines."""
        return len(self.video_workers()) + self.workers_elsewhere()

    def worker_pids(self) -> dict[int, int]:
        """Return the process ids of the workers that run, by GPU."""
        return {} if self._supervisor is None else self._supervisor.pids()

    def worker_configs(self, log_file: Path | None = None) -> list[WorkerConfig]:
        """Return one configuration for each worker process."""
        return [
            WorkerConfig(
                app=self.instance,
                gpu=gpu,
                # Tasks measure and build engines for the first GPU; idle builds name theirs.
                kinds=KINDS if gpu == self._gpus[0] else VIDEOS,
                store_path=self.store.path,
                store_problem=self.store.problem,
                weights_dir=self._weights_dir,
                engines=self._engines,
                history=self._history,
                log_file=log_file,
                on_done=self.on_done,
            )
            for gpu in self._gpus
        ]

    def submit(self, request: GenerationRequest, owner: str | None = None) -> Job:
        """Plan a request and queue it.

        Raises:
            TandemError: if it cannot be planned; nothing is queued then.
        """
        make_folder(self._outputs_dir)
        return self._job_of(self.store.add(*self._planned(request), owner=owner))

    def submit_once(
        self,
        request: GenerationRequest,
        owner: str | None,
        check: Callable[[ExecutionPlan], None],
        admit: Admit,
        submission: Submission | None = None,
    ) -> JobRecord:
        """Plan a request and queue it, unless its submission was queued before; return its job.

        Args:
            check: raises an error if the plan is beyond a limit.
            admit, submission: see `JobStore.add_once`.

        Raises:
            TandemError: if it cannot be planned, is not admitted, or its submission had another request.
        """
        record = None if submission is None else self.store.submitted(owner, submission)
        if record is not None:
            return record
        make_folder(self._outputs_dir)
        request, plan = self._planned(request)
        check(plan)
        return self.store.add_once(request, plan, owner=owner, admit=admit, submission=submission)

    def submit_all(
        self,
        requests: Sequence[GenerationRequest],
        owner: str | None = None,
        *,
        held: bool = False,
        check: Callable[[ExecutionPlan], None] | None = None,
        admit: Admit | None = None,
    ) -> list[JobRecord]:
        """Plan requests and queue them in order; several are one batch.

        Args:
            held: whether they are paused.
            check: see `submit_once`, of each plan.
            admit: see `JobStore.add_all`.

        Raises:
            TandemError: if one of them cannot be planned; nothing is queued then.
        """
        make_folder(self._outputs_dir)
        planned = []
        for request in requests:
            planned.append(self._planned(request))
            if check is not None:
                check(planned[-1][1])
        return self.store.add_all(planned, owner=owner, held=held, admit=admit)

    def edit(self, job_id: str, request: GenerationRequest) -> Job:
        """Change the request of a queued job; it keeps its place.

        Raises:
            TandemError: if it cannot be planned, or the job is not queued any more.
        """
        request, plan = self._planned(request)
        job = self._job_of(self.store.edit(job_id, request, plan))
        job.refresh()
        job.model_title = self.title(plan.model)
        return job

    def resume(self, job_id: str, changes: Mapping[str, Any] | None = None) -> Job:
        """Queue a job again that ended without a video; it resumes from its last checkpoint.

        Args:
            changes: new values of request fields.

        Raises:
            TandemError: if it is queued, runs or is done, or cannot be planned; nothing has changed then.
        """
        if changes:
            request = GenerationRequest.from_mapping({**self.store.get(job_id).request, **changes})
            self.store.resume(job_id, self._planned(request))
        else:
            self.store.resume(job_id)
        job = self._job_of(self.store.get(job_id))
        job.refresh()
        return job

    def hold(self, ids: Iterable[str], paused: bool) -> None:
        """Pause jobs, running ones after their current step, or continue them."""
        ids = list(ids)
        self.store.hold(ids, paused)
        self._refresh(ids)

    def cancel(self, ids: Iterable[str]) -> None:
        """Cancel jobs and tasks: queued ones at once, running ones at their next check."""
        ids = list(ids)
        self.store.request_cancel(ids)
        self._refresh(ids)

    def finish_early(self, job_id: str) -> None:
        """End a video that is made in sections after the current section.

        Raises:
            StoreError: if it has ended, or is made whole.
        """
        self.store.finish_early(job_id)
        self._refresh([job_id])

    def add_task(self, work: Work, title: Fact, seconds: float | None = None, *, first: bool = False) -> Task:
        """Add work on the engine library to the end of the queue: a build after all videos and tasks.

        Args:
            seconds: forecast of its duration.
            first: whether it goes before the videos and tasks that wait.
        """
        build = isinstance(work, BuildEngines)
        record = self.store.add_work(
            "build" if build else "task",
            title,
            self._engines.store.folder,
            work.request if isinstance(work, BuildEngines) else work.model_dump(mode="json"),
            part=work.component if isinstance(work, BuildEngines) else None,
            seconds=seconds,
        )
        if first:
            with suppress(StoreError):  # it has started
                self.store.order.rearrange(record.id, lambda _: 0)
        return self._task_of(record)

    def job(self, job_id: str) -> Job | None:
        """Return a job by id, whichever process submitted or ran it."""
        with self._lock:
            view = self._views.get(job_id)
        if view is not None:
            return view
        try:
            record = self.store.get(job_id)
        except StoreError:
            return None
        return None if record.kind != "video" or record.plan is None else self._job_of(record)

    def group(self, job: Job) -> list[tuple[Job, bool]]:
        """Return the videos of a job's group in order, and whether each is starred; none if it is the only one."""
        try:
            ids = {} if job.group is None else self.store.groups([job.group])[job.group]
        except StoreError:  # the page shows the job
            return []
        if len(ids) == 1 or job.id not in ids:
            return []
        views = [(job if job_id == job.id else self.job(job_id), starred) for job_id, starred in ids.items()]
        return [(member, starred) for member, starred in views if member is not None]

    def tasks(self) -> list[Task]:
        """Return queued, running and recently ended tasks in the order of submission."""
        with self._lock:
            return list(self._tasks.values())

    def active(self, owner: str | None = None) -> Job | None:
        """Return the owner's running job, or else the first that is queued and not paused."""
        records = self.store.order.jobs(kinds=VIDEOS, owner=owner, paused=False, limit=_FIRST)
        return next((self._job_of(record) for record in records if record.plan), None)

    def latest(self, owner: str | None = None, shows: Callable[[Job], bool] = lambda _job: True) -> Job | None:
        """Return the job that the owner submitted last, among recent ones for which `shows` is true."""
        records = self.store.list(owner=owner, limit=_FIRST)
        return next((job for job in (self._job_of(record) for record in records if record.plan) if shows(job)), None)

    def ahead(self, of: Job | Task) -> Mapping[str, Ahead]:
        """Return the jobs and tasks that run before another one, by id in order; see `QueueOrder.ahead`."""
        try:
            return self.store.order.ahead(of.id)
        except StoreError:  # the page shows everything else
            return {}

    def seconds_until(self, ahead: Mapping[str, Ahead]) -> float | None:
        """Return about how long the jobs and tasks of `ahead` still take; `None` if that is unknown for one of them."""
        total = 0.0
        for job_id, job in ahead.items():
            # Views of videos that wait may not be in memory.
            seconds = self._seconds_left(job_id) if job.running or job.kind == "build" else job.seconds
            if seconds is None:
                return None
            total += seconds
        return total / max(self.videos_at_once(), 1)

    def _seconds_left(self, job_id: str) -> float | None:
        """Return about how long a running job or task still takes; `None` if that is unknown."""
        with self._lock:
            task = self._tasks.get(job_id)
        view = task or self.job(job_id)
        return None if view is None else view.seconds_left

    def count_ahead(self, of: Job) -> int:
        """Return how many jobs and tasks run before a queued one."""
        try:
            return self.store.order.count_ahead(of.id)
        except StoreError:
            return 0

    def machine(self) -> Machine:
        """Return the machine with the memory that a new job gets."""
        try:
            workers = self._registry.workers(self.instance)
        except StoreError:
            workers = []
        return memory_for_new_job(probe(), workers, self._gpus[0])

    def planned_machine(self) -> Machine:
        """Return the machine that new videos are planned for: of a cluster, or else this one."""
        return self.plans_for() or self.machine()

    def history(self) -> History:
        """Return measured times of earlier jobs."""
        return () if self._history is None else self._history.read()

    def close(self) -> None:
        """Stop the workers and wait for them. Running jobs resume at the next start; those of a temporary store end.

        A further process of the app has no workers and only stops following the jobs.
        """
        if not self._is_app:
            self._closing.set()
            self._watcher.join(_CLOSE_SECONDS)
            return
        if self.store.temporary:
            with suppress(StoreError):  # its file was deleted
                self.cancel(self.store.order.ids())
        if self._supervisor is not None:
            self._supervisor.close()
        self._closing.set()
        self._watcher.join(_CLOSE_SECONDS)
        with suppress(StoreError):  # done at the next start
            self._refresh()
            self._registry.remove_app(self.instance)
        self._exit.close()
        try:
            recovery.recover(self.store, "")
        except StoreError as error:
            logger.warning("Jobs that were running cannot be updated: %s", error)

    def model(self, request: GenerationRequest) -> ModelSpec:
        """Return a request's model; see `models.requested.model_for`."""
        return model_for(request, self._weights_dir, self._engines.cache_dir)

    def plan(self, request: GenerationRequest) -> ExecutionPlan:
        """Return the plan of a request as it would be queued now.

        Raises:
            TandemError: if it cannot be planned.
        """
        return self._planned(request)[1]

    def _planned(self, request: GenerationRequest) -> tuple[GenerationRequest, ExecutionPlan]:
        """Return a request as it is stored, see `models.wildcards.with_prompt`, and its plan."""
        request = with_prompt(request, self._engines.cache_dir)
        spec = self.model(request)
        output = output_path(self._outputs_dir, request.prompt)
        machine = self.plans_for()
        if machine is not None:
            offers = replace(self._engines, machine=machine).offers(spec)
            context = PlanningContext(machine, output, offers, self.history())
            return request, resolve(request, spec, context, builds_later=True)
        context = PlanningContext(
            self.machine(),
            output,
            self._engines.offers(spec),
            self.history(),
            self._gpus[0],
            idle_builds=self._engines.idle_builds,
        )
        return request, resolve(request, spec, context, builds_later=True)

    def _job_of(self, record: JobRecord) -> Job:
        with self._lock:
            job = self._views.get(record.id)
            if job is None:
                # This version may be unable to read the plan of an older version.
                plan = record.plan or self.plan(record.generation_request())
                job = Job(record, plan, self.title(plan.model), self.store)
                job.refresh()
            self._jobs[record.id] = self._views[record.id] = job
            self._forget_old()
            return job

    def words(self, model: str) -> Mapping[str, Sequence[str]]:
        """Return words that a model with a small vocabulary knows, by group; empty for others and unknown models."""
        spec = self._spec(model)
        return {} if spec is None else spec.words

    def title(self, model: str) -> str:
        """Return a model's display name; its name if it is unknown."""
        spec = self._spec(model)
        return model if spec is None else spec.title

    def _spec(self, model: str) -> ModelSpec | None:
        if model not in self._specs:
            try:
                self._specs[model] = look_up(model, self._weights_dir)
            except TandemError:  # the model was removed
                return None
        return self._specs[model]

    def _task_of(self, record: JobRecord) -> Task:
        with self._lock:
            task = self._tasks.get(record.id)
            if task is None:
                task = self._tasks[record.id] = Task(record, self.store)
                task.refresh()
                self._forget_old()
            return task

    def _watch(self) -> None:
        """Refresh views, recover the jobs of dead processes and remove old files, until `close`.

        This is the only place that polls for what other processes write; pages and streams wait for `changes` of the
        queue or a job.
        """
        version: object = None
        recovered, cleaned = time.monotonic(), -_CLEANUP_SECONDS
        expired, problem = -_EXPIRY_SECONDS, ""
        clock = storage.ClockWatch()
        while not self._closing.wait(_REFRESH_SECONDS):
            now = time.monotonic()
            try:
                latest = self.store.database.version()
                if latest != version or problem:
                    self._refresh()
                    version, problem = latest, ""
                    self.changes.notify()
                if not self._is_app:
                    continue
                if now - recovered > _RECOVERY_SECONDS:
                    recovered = now
                    recovery.recover(self.store, self.instance)
                time_now = clock.now()
                if time_now is not None and now - cleaned > _CLEANUP_SECONDS:
                    cleaned = now
                    storage.purge(self.store, self._outputs_dir)
                    storage.tidy(self.store, self._outputs_dir)
                if time_now is not None and self.retention != storage.Retention() and now - expired > _EXPIRY_SECONDS:
                    expired = now
                    storage.expire(self.store, self.retention, self._outputs_dir, set(self.sending), time_now)
            except StoreError as error:
                if error.code != problem:
                    problem = error.code
                    self.changes.notify()
                    logger.warning("The job store cannot be read: %s (%s)", problem, type(error.__cause__).__name__)
            except Exception:  # internal error: logged, and tried again
                logger.exception("The job watcher failed")

    def _refresh(self, ids: Iterable[str] = ()) -> None:
        """Refresh the views of jobs and tasks that have changed, and of `ids` in any case."""
        with self._lock:
            self._read, changed = self.store.log.jobs_changed_since(self._read)
            views: dict[str, Job | Task] = {**dict(self._views.items()), **self._tasks}
        states = self.store.states([view.id for view in views.values() if view.open])
        changed |= {*ids, *(view.id for view in views.values() if view.open and view.seen != states.get(view.id))}
        for job_id in changed & views.keys():
            try:
                views[job_id].refresh()
            except StoreError as error:
                if error.code == "queue.no_such_job":  # it was purged; those that follow it stop
                    view = views[job_id]
                    view.state = "cancelled"
                    if isinstance(view, Job):
                        view.changes.notify()
                    with self._lock:
                        self._jobs.pop(job_id, None)
                        self._views.pop(job_id, None)
                        self._tasks.pop(job_id, None)
        self._forget_old()
        for record in self.store.order.jobs(kinds=["build"]):
            self._task_of(record)

    def _forget_old(self) -> None:
        views: OrderedDict[str, Job] | OrderedDict[str, Task]
        with self._lock:
            for views, most in ((self._jobs, _ENDED_JOBS), (self._tasks, _ENDED_TASKS)):
                ended = [view.id for view in views.values() if not view.open]
                for job_id in ended[: max(len(ended) - most, 0)]:
                    del views[job_id]


def combined(
    request: GenerationRequest, prompts: Sequence[str], seeds: Sequence[int | Auto]
) -> list[GenerationRequest]:
    """Return the request with each prompt and each seed, the seeds of one prompt in a row.

    Args:
        prompts: empty ones are skipped; by default, the request's own, or its template. An enhanced prompt stays one.
        seeds: by default, the request's own.

    Raises:
        InvalidRequestError: for an invalid prompt or seed, or more than a thousand videos.
    """
    texts = [prompt for prompt in prompts if prompt.strip()]
    if not texts and request.original_prompt is None:
        texts = [request.template or request.prompt]
    axes = [[{"prompt": text} for text in texts]] if texts else []
    chosen = list(seeds) or [request.seed]
    return combinations(request, [*axes, [{"seed": seed} for seed in chosen]])
