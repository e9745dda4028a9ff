"""The web app's worker processes: starts one per GPU, restarts those that die, and has their jobs resumed."""

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
from runtime.queue import recovery
from runtime.queue.instances import WorkerRegistry
from runtime.queue.store import JobStore
from runtime.queue.worker import WorkerConfig, main

# The delay before a restart doubles each time that a worker ends sooner after its start than this.
_SHORT_LIFE_SECONDS = 10.0
_MOST_DELAY_SECONDS = 30.0
_STORE_RETRY_SECONDS = 1.0
_START_METHOD = "spawn"
# A death is due to lack of memory if the kernel has killed a process since the sample before the last one.
_SAMPLE_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass
class _Slot:
    """One GPU's worker, and when it is to be started again."""

    config: WorkerConfig
    process: BaseProcess | None = None
    connection: Connection | None = None
    started: float = 0.0
    delay: float = 0.0
    start_at: float = 0.0


class Supervisor:
    """The worker processes of this app, one for each of `configs`."""

    def __init__(self, store: JobStore, configs: Sequence[WorkerConfig]) -> None:
        self._store = store
        self._registry = WorkerRegistry(store.database)
        self._slots = [_Slot(config) for config in configs]
        self._closing = threading.Event()
        self._memory_kills = deque([recovery.MemoryKills.read()], maxlen=2)
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
        """Stop the workers and wait for them: running jobs are paused after their step and resume at the next start."""
        self._closing.set()
        self._wake.send_bytes(b"")
        self._thread.join()

    def _supervise(self) -> None:
        sampled = time.monotonic()
        while not self._closing.is_set():
            now = time.monotonic()
            if now - sampled >= _SAMPLE_SECONDS:
                sampled = now
                self._memory_kills.append(recovery.MemoryKills.read())
            for slot in self._slots:
                if slot.process is None and now >= slot.start_at:
                    self._start(slot)
            sentinels = [slot.process.sentinel for slot in self._slots if slot.process is not None]
            due = [slot.start_at - now for slot in self._slots if slot.process is None]
            wait([self._woken, *sentinels], timeout=max(min([*due, _SAMPLE_SECONDS]), 0.0))
            for slot in self._slots:
                if slot.process is not None and slot.process.exitcode is not None and not self._closing.is_set():
                    self._replace(slot, slot.process.exitcode)
        self._stop_all()

    def _start(self, slot: _Slot) -> None:
        ours, theirs = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context(_START_METHOD)
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

    def _replace(self, slot: _Slot, code: int) -> None:
        assert slot.process is not None and slot.connection is not None
        how, out_of_memory = recovery.exit_reason(code, self._memory_kills[0], recovery.MemoryKills.read())
        logger.error("worker %s ended: %s", slot.config.instance, how)
        slot.process.join()
        slot.process = None
        slot.connection.close()
        self._settle(slot.config.instance, how, out_of_memory)
        if time.monotonic() - slot.started < _SHORT_LIFE_SECONDS:
            # The import may crash: without preload it does so within a job, which then fails with a message.
            slot.config = replace(slot.config, preload=False)
        self._delay(slot)

    def _delay(self, slot: _Slot) -> None:
        short = time.monotonic() - slot.started < _SHORT_LIFE_SECONDS
        slot.delay = min(max(2 * slot.delay, 0.5), _MOST_DELAY_SECONDS) if short else 0.0
        slot.start_at = time.monotonic() + slot.delay

    def _settle(self, instance: str, how: Fact, out_of_memory: bool) -> None:
        while True:
            try:
                self._registry.release(instance)
                recovery.settle_worker(self._store, instance, how, out_of_memory=out_of_memory)
            except StoreError as error:
                logger.warning(
                    "The job of a dead worker cannot be updated: %s", type(error.__cause__ or error).__name__
                )
                if self._closing.wait(_STORE_RETRY_SECONDS):
                    return
            else:
                return

    def _stop_all(self) -> None:
        for slot in self._slots:
            if slot.connection is not None and slot.process is not None:
                with contextlib.suppress(OSError):
                    slot.connection.send_bytes(b"stop")
        for slot in self._slots:
            if slot.process is not None:
                slot.process.join()
            if slot.connection is not None:
                slot.connection.close()
