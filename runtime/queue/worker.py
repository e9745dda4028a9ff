"""A worker process: claims jobs and tasks from the store and runs them one at a time, on one GPU or the CPU.

`supervisor` starts the processes at `main`. Tests run `Worker` on a thread.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from runtime.core import log
from runtime.core.cancel import CancelledError, PausedError
from runtime.core.environment import collect_garbage_as_usual, collect_garbage_less_often
from runtime.core.errors import DEVICE_LOST, DISK_FULL, EngineError, StoreError, TandemError
from runtime.core.events import Cancelled, Event, Failed, WaitsForDisk, WaitsForGpus
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.processes import be_killed_first, use_no_semaphores
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine, free_disk_bytes, probe
from runtime.models.spec import ModelSpec
from runtime.pipeline.history_file import HistoryFile
from runtime.queue import job_runner
from runtime.queue.instances import WorkerEntry, WorkerRegistry, app_of
from runtime.queue.job_runner import ControlPoller, JobRecorder, Planner
from runtime.queue.records import KINDS, JobRecord, Kind, State, work_of
from runtime.queue.recovery import EXIT_DEVICE_LOST
from runtime.queue.store import JobStore, open_when_usable
from runtime.upstream.torch import cuda_failure

if TYPE_CHECKING:  # these import torch
    from runtime.execution.residency import Residency
    from runtime.queue.task_runner import TaskRecorder

# Interval at which the store is polled for work: other processes add jobs without a signal.
_POLL_SECONDS = 0.1
# The same after an error of the store, so that the log does not fill up.
_RETRY_SECONDS = 5.0
# Videos wait while less than this is free on their disk: one after another would be computed and then not saved.
_LEAST_FREE_BYTES = 50_000_000
# Interval at which a worker shows its supervisor that it runs.
_HEARTBEAT_SECONDS = 0.5
# Exit code of a worker whose supervisor is gone.
_EXIT_ORPHANED = 76

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Configuration of a worker, sent to its process by pickle.

    Attributes:
        app: id of the app that supervises it.
        gpu: index of its GPU; 0 on a machine without GPUs.
        kinds: the kinds of jobs that it claims.
        store_path: the job store.
        store_problem: see `JobStore.problem`.
        weights_dir: the user's models.
        engines: the engine library.
        history: measured times of earlier jobs.
        log_file: of the application.
        preload: whether PyTorch is imported before the first job. Otherwise a crash of the import counts as the job's.
    """

    app: str
    weights_dir: Path
    engines: EngineService
    gpu: int = 0
    kinds: Collection[Kind] = KINDS
    store_path: Path | None = None
    store_problem: Fact | None = None
    history: HistoryFile | None = None
    log_file: Path | None = None
    preload: bool = True

    @property
    def instance(self) -> str:
        """The worker's id in the store."""
        return f"{self.app}.{self.gpu}"


def main(config: WorkerConfig, supervisor: Connection) -> None:
    """Run a worker in this process until the supervisor sends a message or dies.

    Args:
        supervisor: empty messages are sent there at short intervals; a stopped process sends none.
    """
    # Ctrl-C reaches all processes of a terminal; the supervisor decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # This process is restarted and its job resumes; the web app cannot be.
    be_killed_first()
    use_no_semaphores()
    collect_garbage_less_often()
    if config.log_file is not None:
        log.start(config.log_file)
    worker: Worker | None = None

    def obey() -> None:
        try:
            supervisor.recv_bytes()
        except (EOFError, OSError):
            os._exit(_EXIT_ORPHANED)
        if worker is None or not worker.stop():
            os._exit(0)  # it may import PyTorch, which takes seconds

    def beat() -> None:
        with contextlib.suppress(OSError):  # `obey` ends this process
            while True:
                supervisor.send_bytes(b"")
                time.sleep(_HEARTBEAT_SECONDS)

    threading.Thread(target=obey, name="supervisor", daemon=True).start()
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    worker = Worker(open_when_usable(config.store_path, config.store_problem), config)
    worker.run()
    logging.shutdown()
    # Skips the interpreter's cleanup, which takes seconds with PyTorch imported.
    os._exit(0)


class Worker:
    """Claims and runs queued jobs and tasks, from `run` to `stop`."""

    def __init__(self, store: JobStore, config: WorkerConfig) -> None:
        self._store = store
        self._config = config
        self._registry = WorkerRegistry(store.database)
        self._planner = Planner(config.weights_dir, config.engines, config.history, builds_later=True)
        self._poller = ControlPoller(store)
        self._residency: Residency | None = None
        self._stopping = threading.Event()
        self._running: JobRecorder | TaskRecorder | None = None
        self._busy = False
        self._lock = threading.Lock()

    def stop(self) -> bool:
        """Stop claiming; pause a running job, which resumes later, or cancel a running task.

        Returns:
            Whether a job or task runs; `run` returns when it has ended.
        """
        with self._lock:
            self._stopping.set()
            running, busy = self._running, self._busy
        if isinstance(running, JobRecorder):
            running.cancel.pause()
        elif running is not None:
            running.cancel.request()
        return busy

    def run(self) -> None:
        """Claim and run jobs until `stop`."""
        config = self._config
        self._registry.register(config.instance, config.gpu)
        with ExitStack() as stack:
            stack.enter_context(self._poller.polling())
            if config.preload:
                with contextlib.suppress(Exception):  # reported with the first job
                    self._load_libraries(stack)
            collect_garbage_as_usual()
            while not self._stopping.is_set():
                try:
                    record = None if self._lend_gpu() else self._claim()
                except StoreError as error:
                    logger.warning("No job can be claimed: %s", type(error.__cause__ or error).__name__)
                    self._stopping.wait(_RETRY_SECONDS)
                    continue
                if record is None:
                    self._stopping.wait(_POLL_SECONDS)
                    continue
                try:
                    self._run_video(record, stack) if record.kind == "video" else self._run_task(record)
                except Exception as error:
                    self._give_up(record, error)
                self._settle()
                with self._lock:
                    self._busy, self._running = False, None

    def _claim(self) -> JobRecord | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            record = self._store.claim(self._config.instance, self._config.kinds)
            self._busy = record is not None
            return record

    def _lend_gpu(self) -> bool:
        """Lend this GPU if a worker waits for several; return whether it is lent."""
        instance = self._config.instance
        waiting = self._registry.waits_for(instance)
        if waiting is not None and self._registry.gpus(instance):
            self._free()
            self._registry.lend(instance, waiting)
        gpus = self._registry.gpus(instance)
        if not gpus and not self._registry.has(instance):  # another store has taken the place of the first
            self._registry.register(instance, self._config.gpu)
            gpus = self._registry.gpus(instance)
        return not gpus

    def _settle(self) -> None:
        """Store the memory that stays in use; return lent GPUs unless processes stay loaded on them."""
        residency, instance = self._residency, self._config.instance
        with contextlib.suppress(StoreError):
            self._registry.report(instance, self._held_bytes())
            if residency is None or residency.group_manager.group is None:
                self._registry.release(instance)

    def _held_bytes(self) -> dict[int, int]:
        if self._residency is None or not self._config.engines.machine.gpus:
            return {}
        import torch

        held = self._residency.group_manager.reserved_bytes()
        own = self._config.gpu
        return held | {own: torch.cuda.memory_reserved(own) + held.get(own, 0)}

    def _machine(self) -> Machine:
        instance = self._config.instance
        self._registry.report(instance, self._held_bytes())
        workers = self._registry.workers(app_of(instance))
        return memory_for_new_job(probe(), workers, self._config.gpu)

    def _run_video(self, record: JobRecord, stack: ExitStack) -> None:
        recorder = JobRecorder(record.id, self._store, lease=record.lease)
        with self._poller.following(recorder):
            self._begin(recorder)
            try:
                self._load_libraries(stack)
            except Exception as error:
                logger.exception("job %s could not start", record.id)
                recorder.record(Failed(fact=Fact("queue.pytorch_broken", {"error": str(error)})))
            else:
                self._run_job(recorder, record)
            if recorder.end is None:
                self._put_back(recorder)

    def _put_back(self, recorder: JobRecorder) -> None:
        """Put a job that has not ended back into the queue; if the store cannot be written, as soon as it can."""
        while True:
            error = recorder.write()
            try:
                if error is None:
                    self._store.put_back(recorder.id)
                    return
            except StoreError as failed:
                error = failed
            logger.warning("job %s: %s", recorder.id, type(error.__cause__ or error).__name__)
            if error.fact.code == "queue.no_such_job" or self._stopping.wait(_RETRY_SECONDS):
                return

    def _run_job(self, recorder: JobRecorder, record: JobRecord) -> None:
        assert self._residency is not None
        folder = record.output.parent

        def emit(event: Event) -> None:
            if isinstance(event, Failed) and self._device_is_lost(event):
                logger.error("job %s: the CUDA context is broken; this worker ends", record.id)
                logging.shutdown()
                os._exit(EXIT_DEVICE_LOST)
            if isinstance(event, Failed) and event.fact.code in DISK_FULL and _is_full(folder):
                logger.warning("job %s: the disk is full; it is queued again", record.id)
            else:
                recorder.record(event)

        try:
            self._await_space(recorder, folder)
            spec, plan = self._plan(recorder, record)
        except CancelledError:
            recorder.record(Cancelled())
        except PausedError:
            logger.info("job %s waits again", record.id)
        except TandemError as error:
            recorder.record(Failed.because_of(error))
        except Exception as error:  # internal error: one line for the user, the traceback in the log
            logger.exception("job %s could not be planned", record.id)
            recorder.record(Failed.because_of(error))
        else:
            if not record.begun:
                self._queue_builds(record, plan, spec)
            checkpoints, history = self._store.folder(record.id), self._config.history
            job_runner.run(record, plan, spec, emit, recorder.cancel, self._residency, history, checkpoints)

    def _await_space(self, recorder: JobRecorder, folder: Path) -> None:
        """Wait until the disk of a folder has space for a video.

        Raises:
            CancelledError, PausedError: if that was requested meanwhile.
        """
        if _is_full(folder):
            recorder.record(WaitsForDisk(wanted=_LEAST_FREE_BYTES))
        while _is_full(folder):
            recorder.cancel.check_pause()
            self._stopping.wait(_POLL_SECONDS)

    def _queue_builds(self, record: JobRecord, plan: ExecutionPlan, spec: ModelSpec) -> None:
        folder = self._config.engines.store.folder
        with contextlib.suppress(StoreError):  # a later video tries again
            if job_runner.queue_builds(record, plan, spec, self._store, folder):
                logger.info("job %s: its engines are built when no video waits", record.id)

    def _is_wanted(self) -> bool:
        """Return whether a build that runs while no video waits has to make room."""
        instance = self._config.instance
        return self._store.idle_is_over(instance, self._config.kinds) or self._registry.waits_for(instance) is not None

    def _device_is_lost(self, failed: Failed) -> bool:
        """Return whether a job failed because the CUDA context of its process, or of one of its GPUs', is broken."""
        on_gpu = bool(self._config.engines.machine.gpus)
        return failed.fact.code == DEVICE_LOST or (on_gpu and cuda_failure(self._config.gpu) is not None)

    def _plan(self, recorder: JobRecorder, record: JobRecord) -> tuple[ModelSpec, ExecutionPlan]:
        """Plan a job, and wait for the GPUs that it uses.

        Raises:
            CancelledError, PausedError: if that was requested meanwhile.
            TandemError: if the job cannot run on this machine now.
        """
        gpu, instance, registry = self._config.gpu, self._config.instance, self._registry
        deaths = self._store.deaths(record.id)
        spec, plan = self._planner.plan(record, self._machine(), gpu, deaths=deaths, check=recorder.cancel.check)
        held = registry.gpus(instance)
        if plan.gpus == 1:
            if len(held) > 1:
                self._free()
                registry.release(instance)
            return spec, plan
        if len(held) < plan.gpus:
            self._gather(recorder, plan.gpus)
        others = registry.return_spare(instance, plan.gpus)[1:]
        return self._planner.plan(record, self._machine(), gpu, others, deaths, recorder.cancel.check)

    def _gather(self, recorder: JobRecorder, count: int) -> None:
        """Wait until this worker has `count` GPUs; report how many it has so far."""
        registry, instance, reported = self._registry, self._config.instance, -1
        recorder.cancel.check_pause()
        # While another worker gathers, it may need this GPU.
        self._free()
        registry.want(instance, count)
        try:
            while True:
                first = registry.waits_for(instance)
                if first is not None and registry.gpus(instance):
                    registry.lend(instance, first, waits=True)
                free = len(registry.gpus(instance))
                if free >= count:
                    return
                if free != reported:
                    reported = free
                    recorder.record(WaitsForGpus(wanted=count, free=free))
                self._stopping.wait(_POLL_SECONDS)
                recorder.cancel.check_pause()
        except BaseException:
            registry.release(instance)
            raise

    def _run_task(self, record: JobRecord) -> None:
        from runtime.queue.task_runner import TaskRecorder, TaskRunner

        config = self._config
        if len(self._registry.gpus(config.instance)) > 1:
            self._free()
            self._settle()
        recorder = TaskRecorder(record.id, self._store)
        logger.info("task %s: %s starts", record.id, record.title)
        with ExitStack() as stack:
            stack.enter_context(self._poller.cancelling(record.id, recorder.cancel))
            if record.idle:
                stack.enter_context(self._poller.yielding(record.id, recorder.cancel, self._is_wanted))
            self._begin(recorder)
            runner = TaskRunner(recorder, config.engines, config.weights_dir, config.gpu, self._free, record.created)
            try:
                recorder.cancel.check()
                result = runner.run(work_of(record))
                state: State = "done"
            except CancelledError:
                state, result = "cancelled", Fact("task.cancelled")
            except TandemError as error:
                if isinstance(error, EngineError) and error.log:
                    recorder.write(error.log)
                state, result = "failed", error.fact
            except Exception as error:  # internal error: one line for the user, the traceback in the log
                logger.exception("Task %s failed", record.id)
                state, result = "failed", Failed.because_of(error).fact
        logger.info("task %s: %s", record.id, state)
        interrupted = self._stopping.is_set() or recorder.cancel.pausing
        if interrupted and state == "cancelled" and record.kind == "build":
            self._store.put_back(record.id)
        else:
            self._store.finish(record.id, state, result)

    def _give_up(self, record: JobRecord, error: Exception) -> None:
        """Fail a job that cannot be started, such as one of another version: otherwise it would be claimed again."""
        failed = Failed.because_of(error)
        if failed.internal:
            logger.error("job %s could not start", record.id, exc_info=error)
        with contextlib.suppress(StoreError):
            if record.kind == "video":
                self._store.record(record.id, failed)
            else:
                self._store.finish(record.id, "failed", failed.fact)

    def _begin(self, running: "JobRecorder | TaskRecorder") -> None:
        with self._lock:
            self._running = running
            stopping = self._stopping.is_set()
        if stopping and isinstance(running, JobRecorder):
            running.cancel.pause()
        elif stopping:
            running.cancel.request()

    def _free(self) -> None:
        if self._residency is not None:
            self._residency.free()

    def _load_libraries(self, stack: ExitStack) -> None:
        """Import PyTorch and the pipeline, which takes seconds, and make the residency."""
        if self._residency is not None:
            return
        import torch

        import runtime.pipeline.run  # noqa: F401 - import errors are raised here
        from runtime.execution.residency import Residency

        if self._config.gpu:
            torch.cuda.set_device(self._config.gpu)
        self._residency = stack.enter_context(Residency(self._config.engines))


def memory_for_new_job(seen: Machine, workers: Iterable[WorkerEntry], gpu: int) -> Machine:
    """Return the machine with the memory that a new job on a GPU gets: memory of its worker is reused or freed.

    Args:
        workers: all workers of this app.
    """
    gpus, ram = list(seen.gpus), 0
    for worker in workers:
        if worker.gpu == gpu:
            with contextlib.suppress(psutil.Error):  # it ended
                ram = psutil.Process(worker.pid).memory_info().rss
        for index, held in worker.held.items() if gpus else ():
            free = min(gpus[index].free_bytes + held, gpus[index].total_bytes)
            gpus[index] = replace(gpus[index], free_bytes=free)
    return replace(seen, gpus=tuple(gpus), ram_free_bytes=min(seen.ram_free_bytes + ram, seen.ram_bytes))


def _is_full(folder: Path) -> bool:
    """Return whether the disk of a folder has no space for a video."""
    with contextlib.suppress(OSError):  # saving the video reports it
        return free_disk_bytes(folder) < _LEAST_FREE_BYTES
    return False
