"""The web app's worker processes: starts one per GPU, replaces those that die or hang, and has their jobs resumed."""

import contextlib
import logging
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from runtime.core.errors import StoreError
from runtime.core.facts import Fact
from runtime.core.processes import kill_tree
from runtime.queue import recovery
from runtime.queue.instances import WorkerRegistry
from runtime.queue.store import JobStore
from runtime.queue.worker import WorkerConfig, main

# The delay before a restart doubles each time that a worker ends sooner after its start than this.
_SHORT_LIFE_SECONDS = 10.0
_MOST_DELAY_SECONDS = 30.0
_START_METHOD = "spawn"
# A death is due to lack of memory if the kernel has killed a process since the sample before the last one.
_SAMPLE_SECONDS = 5.0
# Interval at which workers are looked at, and failed work is tried again.
_LOOK_SECONDS = 1.0
# Seconds without a heartbeat after which a worker is killed: while it starts, later, and once it should stop.
_START_SECONDS, SILENT_SECONDS, _SILENT_STOPPING_SECONDS = 300.0, 60.0, 5.0
# Seconds that a worker has for a request to stop or to cancel its job. Steps of large videos may take longer.
STOPPING_SECONDS = 20.0
# A killed process whose system call does not return is left to the system.
_KILLED_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass
class _Slot:
    """One GPU's worker, and when it is to be started again.

    Attributes:
        heard: whether it has sent a heartbeat.
        silent: seconds since the last one, while this process ran itself.
        stopping: seconds since it should stop, or cancel its job.
        died: how it ended, and whether for lack of memory, until its job is settled.
    """

    config: WorkerConfig
    process: BaseProcess | None = None
    connection: Connection | None = None
    started: float = 0.0
    delay: float = 0.0
    start_at: float = 0.0
    heard: bool = False
    silent: float = 0.0
    stopping: float = 0.0
    died: tuple[Fact, bool] | None = None

    def hangs(self) -> Fact | None:
        """Return why the worker is to be killed; `None` if it responds."""
        silent, stops = self.silent, self.stopping > 0
        limit = _SILENT_STOPPING_SECONDS if stops else SILENT_SECONDS if self.heard else _START_SECONDS
        if silent > limit:
            return Fact("queue.exit_not_responding", {"seconds": limit})
        if self.stopping > STOPPING_SECONDS:
            return Fact("queue.exit_not_stopping", {"seconds": STOPPING_SECONDS})
        return None


class Supervisor:
    """The worker processes of this app, one for each of `configs`."""

    def __init__(self, store: JobStore, configs: Sequence[WorkerConfig]) -> None:
        self._store = store
        self._registry = WorkerRegistry(store.database)
        self._slots = [_Slot(config) for config in configs]
        self._closing = threading.Event()
        self._memory_kills = deque([recovery.MemoryKills.read()], maxlen=2)
        self._sampled = self._looked = time.monotonic()
        # Wakes the thread, which waits for processes to end.
        self._wake, self._woken = multiprocessing.Pipe()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start the workers; returns at once."""
        self._thread.start()

    def pids(self) -> dict[int, int]:
        """Return the process id of each running worker, by GPU."""
        alive = [(slot.config.gpu, slot.process) for slot in self._slots]
        return {gpu: process.pid for gpu, process in alive if process is not None and process.pid is not None}

    def close(self) -> None:
        """Stop the workers and wait for them: running jobs are paused after their step and resume at the next start.

        A worker that does not stop in time is killed; its job resumes from the last checkpoint.
        """
        self._closing.set()
        self._wake.send_bytes(b"")
        self._thread.join(STOPPING_SECONDS + 2 * _KILLED_SECONDS)
        if self._thread.is_alive():
            logger.error("The supervisor does not end")
            for pid in self.pids().values():
                kill_tree(pid)

    def _supervise(self) -> None:
        while not self._closing.is_set():
            try:
                self._look()
            except Exception:  # internal error: logged, and tried again
                logger.exception("The supervisor failed")
                self._closing.wait(_LOOK_SECONDS)
        self._stop_all()

    def _look(self) -> None:
        """Start, replace and kill workers, then wait until one ends or a short time has passed."""
        now = time.monotonic()
        if now - self._sampled >= _SAMPLE_SECONDS:
            self._sampled = now
            self._memory_kills.append(recovery.MemoryKills.read())
        for slot in self._slots:
            if slot.process is not None and slot.process.exitcode is not None:
                how = recovery.exit_reason(slot.process.exitcode, self._memory_kills[0], recovery.MemoryKills.read())
                self._ended(slot, *how)
            if slot.died is not None:
                self._settle(slot, *slot.died)
            if slot.process is None and slot.died is None and now >= slot.start_at:
                self._start(slot)
        self._kill_hanging()
        sentinels = [slot.process.sentinel for slot in self._slots if slot.process is not None]
        due = [slot.start_at - now for slot in self._slots if slot.process is None and slot.died is None]
        wait([self._woken, *sentinels], timeout=max(min([*due, _LOOK_SECONDS]), 0.0))

    def _kill_hanging(self) -> None:
        """Kill the workers that send no heartbeats, or do not follow a request to cancel their job."""
        cancelling: set[str] = set()
        with contextlib.suppress(StoreError):  # read again soon
            cancelling = self._store.cancelling([slot.config.instance for slot in self._slots])
        for slot, passed in self._running():
            slot.stopping = slot.stopping + passed if slot.config.instance in cancelling else 0.0
            how = slot.hangs()
            if how is not None:
                self._kill(slot)
                self._ended(slot, how, out_of_memory=False)

    def _running(self) -> Sequence[tuple[_Slot, float]]:
        """Return the running workers, with their silence measured, and the seconds since the last call.

        Seconds in which this process was stopped do not count: the workers may have been stopped with it.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 4 * _LOOK_SECONDS), now
        running = [slot for slot in self._slots if slot.process is not None]
        for slot in running:
            slot.silent += passed
            with contextlib.suppress(EOFError, OSError):  # it has ended
                while slot.connection is not None and slot.connection.poll():
                    slot.connection.recv_bytes()
                    slot.heard, slot.silent = True, 0.0
        return [(slot, passed) for slot in running]

    def _kill(self, slot: _Slot) -> None:
        assert slot.process is not None and slot.process.pid is not None
        kill_tree(slot.process.pid)
        slot.process.join(_KILLED_SECONDS)

    def _start(self, slot: _Slot) -> None:
        context: Any = multiprocessing.get_context(_START_METHOD)
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(
            target=main, args=(slot.config, theirs), name=f"worker-{slot.config.gpu}", daemon=False
        )
        slot.started = time.monotonic()
        try:
            process.start()
        except OSError as error:
            logger.error("A worker process cannot be started: %s", error.strerror or error)
            ours.close()
            self._delay(slot)
            return
        finally:
            theirs.close()
        slot.process, slot.connection = process, ours
        slot.heard, slot.silent, slot.stopping = False, 0.0, 0.0

    def _ended(self, slot: _Slot, how: Fact, out_of_memory: bool) -> None:
        """Note that a worker has ended; its job is settled, and then it is started again."""
        assert slot.connection is not None
        logger.error("worker %s ended: %s", slot.config.instance, how)
        slot.connection.close()
        slot.process = slot.connection = None
        slot.died = how, out_of_memory
        if time.monotonic() - slot.started < _SHORT_LIFE_SECONDS:
            # The import may crash: without preload it does so within a job, which then fails with a message.
            slot.config = replace(slot.config, preload=False)
        self._delay(slot)

    def _delay(self, slot: _Slot) -> None:
        short = time.monotonic() - slot.started < _SHORT_LIFE_SECONDS
        slot.delay = min(max(2 * slot.delay, 0.5), _MOST_DELAY_SECONDS) if short else 0.0
        slot.start_at = time.monotonic() + slot.delay

    def _settle(self, slot: _Slot, how: Fact, out_of_memory: bool) -> None:
        """Queue the job of a dead worker again, or fail it; if the store cannot be used, the next look tries again."""
        instance = slot.config.instance
        try:
            self._registry.release(instance)
            recovery.settle_worker(self._store, instance, how, out_of_memory=out_of_memory)
        except StoreError as error:
            logger.warning("The job of a dead worker cannot be updated: %s", type(error.__cause__ or error).__name__)
            return
        except Exception:  # internal error: its job can be resumed, and the next jobs run
            logger.exception("The job of a dead worker cannot be settled")
            with contextlib.suppress(StoreError):  # recovered at the next start
                for job in self._store.running_on(instance):
                    self._store.interrupt(job.id, instance, None)
        slot.died = None

    def _stop_all(self) -> None:
        for slot in self._slots:
            if slot.connection is not None:
                with contextlib.suppress(OSError):
                    slot.connection.send_bytes(b"stop")
        self._looked = time.monotonic()
        while running := self._running():
            wait([slot.process.sentinel for slot, _ in running if slot.process is not None], timeout=_LOOK_SECONDS)
            for slot, passed in running:
                assert slot.process is not None and slot.connection is not None
                slot.stopping += passed
                how = None if slot.process.exitcode is not None else slot.hangs()
                if how is not None:
                    logger.error("worker %s is killed: %s", slot.config.instance, how)
                    self._kill(slot)
                    with contextlib.suppress(StoreError):  # recovered at the next start
                        recovery.put_back(self._store, slot.config.instance)
                if how is not None or slot.process.exitcode is not None:
                    slot.connection.close()
                    slot.process = slot.connection = None
