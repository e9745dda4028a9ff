"""One thread that takes jobs and chores from the store and does them, one after the other, on one GPU or the CPU."""

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

from runtime.core.cancel import CancelledError, PausedError
from runtime.core.errors import EngineError, StoreError, TandemError
from runtime.core.events import Cancelled, Failed, WaitsForGpus
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.pipeline.history import HistoryFile
from runtime.queue import execution
from runtime.queue.execution import ControlPoller, Planner
from runtime.queue.gpu_pool import Pool
from runtime.queue.job import Job
from runtime.queue.records import JobRecord, Kind
from runtime.queue.store import JobStore
from runtime.queue.tasks import Task

if TYPE_CHECKING:  # it brings torch
    from runtime.execution.residency import Residency

# Other processes add jobs too, and say nothing.
_LOOK_SECONDS = 0.5
# After the store could not be read, so that a full log is not the next trouble.
_REST_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerContext:
    """What runners share.

    Attributes:
        store, instance: where jobs are taken from, and in whose name.
        job_of, chore_of: the live view of a record; no chore where it cannot be done any more.
        machine: what this machine has, as a new job would find it.
        pool: who has which GPU.
    """

    store: JobStore
    instance: str
    planner: Planner
    wishes: ControlPoller
    engines: EngineService
    history: HistoryFile | None
    job_of: Callable[[JobRecord], Job]
    task_of: Callable[[JobRecord], Task]
    machine: Callable[[], Machine]
    pool: Pool


class Runner:
    """Takes and does what waits, from `start` to `stop`.

    Args:
        gpu: which one, where there are any.
        kinds: what it takes.
    """

    def __init__(self, context: RunnerContext, gpu: int, kinds: Collection[Kind]) -> None:
        self._desk = context
        self._gpu = gpu
        self._kinds = kinds
        self._residency: Residency | None = None
        self._news = threading.Event()
        self._stopping = False
        self._doing: Job | Task | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"worker-{gpu}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Look for work at once."""
        self._news.set()

    def stop(self) -> None:
        """Ask what runs to stop where it can go on from later; take nothing more. `join` waits for it."""
        with self._lock:
            self._stopping = True
            doing = self._doing
        if isinstance(doing, Job):
            doing.cancel.pause()
        elif doing is not None:
            doing.cancel.request()
        self.wake()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def held_bytes(self) -> dict[int, int]:
        """Return what this runner took of each GPU; known only once PyTorch is imported whole."""
        if self._residency is None:
            return {}
        import torch

        held = self._residency.group_manager.taken_bytes()
        return held | {self._gpu: torch.cuda.memory_reserved(self._gpu) + held.get(self._gpu, 0)}

    def _run(self) -> None:
        with ExitStack() as stack:
            with suppress(Exception):  # told when there is a job to tell it to
                self._get_ready(stack)
            while not self._stopping:
                if self._lends():
                    self._news.wait(_LOOK_SECONDS)
                    self._news.clear()
                    continue
                try:
                    record = self._desk.store.claim(self._desk.instance, self._kinds)
                except StoreError as error:
                    logger.warning("No job can be taken: %s", type(error.__cause__ or error).__name__)
                    # What was to wake this one before is no reason to ask again at once.
                    self._news.clear()
                    if not self._stopping:
                        self._news.wait(_REST_SECONDS)
                    continue
                if record is None:
                    self._news.wait(_LOOK_SECONDS)
                    self._news.clear()
                else:
                    try:
                        self._make(record, stack) if record.kind == "video" else self._do(record)
                    except Exception as error:
                        self._give_up(record, error)
                    self._settle()

    def _lends(self) -> bool:
        """Give what it has to a runner that needs several GPUs; return whether it is without its own."""
        pool = self._desk.pool
        if pool.asked(self._gpu):
            self._free()
            pool.lend(self._gpu)
        return not pool.has(self._gpu)

    def _settle(self) -> None:
        """Give others' GPUs back where no process is left on them."""
        if self._residency is None or self._residency.group_manager.group is None:
            self._desk.pool.release_cached_memory(self._gpu)

    def _make(self, record: JobRecord, stack: ExitStack) -> None:
        job = self._desk.job_of(record)
        job.begin(record)
        with self._desk.wishes.heard(job):
            self._begin(job)
            try:
                self._get_ready(stack)
            except Exception as error:  # PyTorch itself does not start
                logger.exception("job %s could not start", job.id)
                job.record(Failed(fact=Fact("queue.pytorch_broken", {"error": str(error)})))
            else:
                self._run_job(job, record)
            self._begin(None)
        self._leave(job)

    def _run_job(self, job: Job, record: JobRecord) -> None:
        residency = self._residency
        assert residency is not None
        try:
            spec, plan = self._planned(job, record)
        except CancelledError:
            job.record(Cancelled())
        except PausedError:
            logger.info("job %s waits again", job.id)
        except TandemError as error:
            job.record(Failed.because_of(error))
        except Exception as error:
            logger.exception("job %s could not be planned", job.id)
            job.record(Failed.because_of(error))
        else:
            execution.run(job, plan, spec, job.record, residency, self._desk.history, self._desk.store)

    def _planned(self, job: Job, record: JobRecord) -> tuple[ModelSpec, ExecutionPlan]:
        """Plan a job, and wait for the GPUs that it takes.

        Raises:
            CancelledError, PausedError: if somebody asked for that meanwhile.
            TandemError: if it cannot be made as things are now.
        """
        context, gpu = self._desk, self._gpu
        assert self._residency is not None
        spec, plan = context.planner.plan(record, context.machine(), gpu)
        held = context.pool.held(gpu)
        if plan.gpus == 1:
            if len(held) > 1:
                self._free()
                context.pool.release_cached_memory(gpu)
            return spec, plan
        if len(held) < plan.gpus:
            held = self._gather(job, plan.gpus)
        return context.planner.plan(record, context.machine(), gpu, [other for other in held if other != gpu])

    def _gather(self, job: Job, count: int) -> list[int]:
        """Wait for so many GPUs, and tell how many there are meanwhile."""
        pool, told = self._desk.pool, -1

        def check() -> None:
            nonlocal told
            job.cancel.check_pause()
            free = len(pool.held(self._gpu))
            if free != told:
                told = free
                job.record(WaitsForGpus(wanted=count, free=free))

        check()
        self._free()
        return pool.gather(self._gpu, count, check)

    def _leave(self, job: Job) -> None:
        """Let the store say how the job stands from here on: one that was paused waits again."""
        try:
            if job.open and job.written:
                self._desk.store.put_back(job.id)
            job.leave()
        except StoreError as error:
            logger.warning("job %s: %s", job.id, type(error.__cause__ or error).__name__)

    def _do(self, record: JobRecord) -> None:
        task = self._desk.task_of(record)
        if len(self._desk.pool.held(self._gpu)) > 1:
            self._free()
            self._settle()
        self._begin(task)
        task.start()
        logger.info("job %s: %s begins", task.id, task.kind)
        try:
            task.cancel.check()
            said = task.work(task, self._free)
        except CancelledError:
            task.end("cancelled", "Cancelled. What was finished before stays.")
        except TandemError as error:
            if isinstance(error, EngineError) and error.log:
                task.write(error.log)
            task.end("failed", error.what, error.remedy)
        except Exception as error:  # a defect: told in one line, kept in the log
            logger.exception("%s failed", task.kind)
            task.end("failed", f"Something broke inside Tandem: {error!r}", "The log has the details.")
        else:
            task.end("done", said)
        self._begin(None)
        logger.info("job %s: %s", task.id, task.state)
        try:
            if self._stopping and task.state == "cancelled" and record.kind == "build":
                self._desk.store.put_back(record.id)
            else:
                ended = Fact("text", {"what": task.said, "remedy": task.remedy})
                self._desk.store.finish(record.id, task.state, ended)
        except StoreError as error:
            logger.warning("job %s: %s", record.id, type(error.__cause__ or error).__name__)

    def _give_up(self, record: JobRecord, error: Exception) -> None:
        """End what could not even begin, such as a job of another version's: it is not to come again and again."""
        failed = Failed.because_of(error)
        if failed.internal:
            logger.error("job %s could not begin", record.id, exc_info=error)
        with suppress(StoreError):
            if record.kind == "video":
                self._desk.store.record(record.id, failed)
            else:
                self._desk.store.finish(record.id, "failed", failed.fact)

    def _begin(self, one: Job | Task | None) -> None:
        with self._lock:
            self._doing = one
            stopping = self._stopping
        if stopping and isinstance(one, Job):
            one.cancel.pause()
        elif stopping and one is not None:
            one.cancel.request()

    def _free(self) -> None:
        if self._residency is not None:
            self._residency.free()

    def _get_ready(self, stack: ExitStack) -> None:
        """Import what runs jobs. Takes seconds, for torch: so here, on the runner's own thread."""
        if self._residency is not None:
            return
        import torch

        import runtime.pipeline.run  # noqa: F401 - so that what does not start is known before a job has begun
        from runtime.execution.residency import Residency

        if self._gpu:
            # What takes no device of its own takes this thread's.
            torch.cuda.set_device(self._gpu)
        self._residency = stack.enter_context(Residency(self._desk.engines))


def as_to_a_new_job(seen: Machine, runners: Collection[Runner]) -> Machine:
    """Return the machine as it is to a new job: what earlier ones of these runners hold is used again or freed."""
    own = psutil.Process().memory_info().rss
    gpus = list(seen.gpus)
    for runner in runners if gpus else ():
        for index, held in runner.held_bytes().items():
            free = min(gpus[index].free_bytes + held, gpus[index].total_bytes)
            gpus[index] = replace(gpus[index], free_bytes=free)
    return replace(seen, gpus=tuple(gpus), ram_free_bytes=min(seen.ram_free_bytes + own, seen.ram_bytes))
