"""A worker process: claims jobs and tasks from the store and runs them one at a time, on one GPU or the CPU.

`supervisor` starts the processes at `main`. Tests run `Worker` on a thread.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from runtime.core import log
from runtime.core.cancel import Cancel
from runtime.core.environment import collect_garbage_as_usual, collect_garbage_less_often
from runtime.core.errors import DEVICE_LOST, StoreError
from runtime.core.events import Failed, WaitsForGpus
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.processes import be_killed_first, use_no_semaphores
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine, probe
from runtime.models.spec import ModelSpec
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.placement import usable_gpus
from runtime.queue.done_command import DoneCommand
from runtime.queue.executors import TaskExecutor, VideoExecutor
from runtime.queue.instances import WorkerEntry, WorkerRegistry, app_of
from runtime.queue.job_planning import JobReplanner, queue_builds, queue_compilation
from runtime.queue.records import KINDS, JobRecord, Kind
from runtime.queue.recovery import EXIT_DEVICE_LOST
from runtime.queue.run import ControlPoller, Outcome, Run, Work
from runtime.queue.store import JobStore, open_when_usable
from runtime.upstream.torch import cuda_failure

if TYPE_CHECKING:  # these import torch
    from runtime.execution.residency import Residency

# Interval at which the store is polled for work: other processes add jobs without a signal.
_POLL_SECONDS = 0.1
# Interval after an error of the store, so that the log does not fill up.
_RETRY_SECONDS = 5.0
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
        on_done: see `DoneCommand`; empty runs none.
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
    on_done: Sequence[str] = ()
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
        self._replanner = JobReplanner(config.weights_dir, config.engines, config.history, builds_later=True)
        self._poller = ControlPoller(store)
        DoneCommand(store, config.on_done)
        self._residency: Residency | None = None
        self._exit = ExitStack()
        self._stopping = threading.Event()
        self._busy = False
        self._lock = threading.Lock()

    def stop(self) -> bool:
        """Stop claiming; pause a running job, which resumes later, or cancel a running task.

        Returns:
            Whether a job or task runs; `run` returns when it has ended.
        """
        with self._lock:
            self._stopping.set()
            busy = self._busy
        self._poller.stop()
        return busy

    def run(self) -> None:
        """Claim and run jobs until `stop`."""
        config = self._config
        self._registry.register(config.instance, config.gpu)
        videos = VideoExecutor(self._plan, self._load_libraries, config.history, waits_for_disk=True)
        tasks = TaskExecutor(
            config.engines, config.weights_dir, config.gpu, self._free, self._compile, self._load_ahead
        )
        with self._exit, self._poller.polling():
            if config.preload:
                with contextlib.suppress(Exception):  # reported with the first job
                    self._load_libraries()
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
                is_wanted = partial(self._is_wanted, record.rank) if record.kind == "build" else None
                with Run(record, self._poller, stopping=self._stopping, is_wanted=is_wanted) as run:
                    if record.kind == "video":
                        outcome = videos.execute(run)
                        self._exit_if_device_is_lost(run, outcome)
                    else:
                        self._release_lent_gpus()
                        outcome = tasks.execute(run)
                    run.settle(outcome)
                self._report_memory()
                with self._lock:
                    self._busy = False

    def _claim(self) -> JobRecord | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            record = self._store.order.claim(self._config.instance, self._config.kinds)
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

    def _release_lent_gpus(self) -> None:
        """Return the GPUs of other workers before a task, which uses one."""
        with contextlib.suppress(StoreError):  # returned after the task
            if len(self._registry.gpus(self._config.instance)) > 1:
                self._free()
                self._report_memory()

    def _report_memory(self) -> None:
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

        reserved_bytes = self._residency.group_manager.reserved_bytes()
        gpu = self._config.gpu
        return reserved_bytes | {gpu: torch.cuda.memory_reserved(gpu) + reserved_bytes.get(gpu, 0)}

    def _machine(self) -> Machine:
        instance = self._config.instance
        self._registry.report(instance, self._held_bytes())
        workers = self._registry.workers(app_of(instance))
        return memory_for_new_job(probe(), workers, self._config.gpu)

    def _is_wanted(self, rank: int) -> bool:
        """Return whether a build of a rank has to make room."""
        instance = self._config.instance
        return (
            self._store.order.makes_room(rank, instance, self._config.kinds)
            or self._registry.waits_for(instance) is not None
        )

    def _exit_if_device_is_lost(self, run: Run, outcome: Outcome) -> None:
        """End this process if a job failed because the CUDA context of it, or of one of its GPUs', is broken."""
        if not isinstance(outcome, Failed):
            return
        on_gpu = bool(self._config.engines.machine.gpus)
        if outcome.fact.code == DEVICE_LOST or (on_gpu and cuda_failure(self._config.gpu) is not None):
            logger.error("job %s: the CUDA context is broken; this worker ends", run.id)
            logging.shutdown()
            os._exit(EXIT_DEVICE_LOST)

    def _plan(self, work: Work) -> tuple[ModelSpec, ExecutionPlan]:
        """Plan a job, wait for the GPUs that it uses, and queue the builds that it leaves for later.

        Raises:
            CancelledError, PausedError: if that was requested meanwhile.
            TandemError: if the job cannot run on this machine now.
        """
        gpu, instance, registry = self._config.gpu, self._config.instance, self._registry
        record, check = work.record, work.cancel.check
        deaths = self._store.log.deaths(record.id)
        spec, plan = self._replanner.plan(record, self._machine(), gpu, deaths=deaths, check=check)
        gpus = registry.gpus(instance)
        if plan.gpus > 1:
            if len(gpus) < plan.gpus:
                self._gather(work, plan.gpus)
            more_gpus = registry.return_spare(instance, plan.gpus)[1:]
            spec, plan = self._replanner.plan(record, self._machine(), gpu, more_gpus, deaths, check)
        elif len(gpus) > 1:
            self._free()
            registry.release(instance)
        if not record.begun:
            with contextlib.suppress(StoreError):  # a later video tries again
                engines = self._config.engines
                # First, while the models are loaded: a build of engines frees them.
                if queue_compilation(record, plan, spec, self._store, engines.machine, engines.store):
                    logger.info("job %s: its code is compiled for later clips when no video waits", record.id)
                if queue_builds(record, plan, spec, self._store, engines.store):
                    logger.info("job %s: its engines are built when no video waits", record.id)
        return spec, plan

    def _compile(self, request: GenerationRequest, cancel: Cancel) -> Fact:
        """Compile what a request runs in PyTorch, with the loaded models."""
        config, residency = self._config, self._load_libraries()
        from runtime.pipeline.ahead import compile_ahead

        spec, plan = self._replanner.plan_request(request, self._machine(), config.gpu, cancel.check)
        return compile_ahead(plan, spec, cancel, residency, config.history)

    def _load_ahead(self, request: GenerationRequest, cancel: Cancel) -> None:
        """Load what runs a request on the CPU, where engines take seconds to open."""
        if usable_gpus(self._config.engines.machine):
            return
        residency = self._load_libraries()
        from runtime.pipeline.ahead import load_ahead

        spec, plan = self._replanner.plan_request(request, self._machine(), self._config.gpu, cancel.check)
        load_ahead(plan, spec, cancel, residency)

    def _gather(self, work: Work, count: int) -> None:
        """Wait until this worker has `count` GPUs; report how many it has so far."""
        registry, instance, reported = self._registry, self._config.instance, -1
        work.cancel.check_pause()
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
                    work.emit(WaitsForGpus(wanted=count, free=free))
                self._stopping.wait(_POLL_SECONDS)
                work.cancel.check_pause()
        except BaseException:
            registry.release(instance)
            raise

    def _free(self) -> None:
        if self._residency is not None:
            self._residency.free()

    def _load_libraries(self) -> "Residency":
        """Import PyTorch and the pipeline, which takes seconds, and make the residency."""
        if self._residency is None:
            import torch

            import runtime.pipeline.run  # noqa: F401 - import errors are raised here
            from runtime.execution.residency import Residency

            if self._config.gpu:
                torch.cuda.set_device(self._config.gpu)
            self._residency = self._exit.enter_context(Residency(self._config.engines))
        return self._residency


def memory_for_new_job(machine: Machine, workers: Iterable[WorkerEntry], gpu: int) -> Machine:
    """Return the machine with the memory that a new job on a GPU gets.

    Memory of its worker is reused or freed, and so is that of the worker's child processes: a build makes room.

    Args:
        workers: all workers of this app.
    """
    gpus, ram = list(machine.gpus), 0
    for worker in workers:
        if worker.gpu == gpu:
            with contextlib.suppress(psutil.Error):  # it ended
                process = psutil.Process(worker.pid)
                for each in (process, *process.children(recursive=True)):
                    ram += each.memory_info().rss
        for index, reserved_bytes in worker.held.items() if gpus else ():
            free = min(gpus[index].free_bytes + reserved_bytes, gpus[index].total_bytes)
            gpus[index] = replace(gpus[index], free_bytes=free)
    return replace(machine, gpus=tuple(gpus), ram_free_bytes=min(machine.ram_free_bytes + ram, machine.ram_bytes))
