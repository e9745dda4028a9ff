"""One claimed job, from claim to settle: its events, the requests that it follows, and how it ends.

Workers, the command line and the head of a cluster do the same with each job that they claim:

    with Run(record, poller) as run:
        run.settle(executor.execute(run))
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from runtime.core.cancel import Cancel, CancelledError, PausedError
from runtime.core.errors import STORE_UNAVAILABLE, StoreError
from runtime.core.events import (
    Cancelled,
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
from runtime.pipeline.files import POSTER, PREVIEW
from runtime.queue import recovery
from runtime.queue.records import JobRecord
from runtime.queue.store import Controls, JobStore

_POLL_SECONDS = 0.1
# A build makes room once other work has wanted its place at so many polls in a row.
_POLLS_TO_YIELD = 3
_CLOSE_SECONDS = 10.0
# Between two attempts to write the end of a job.
_RETRY_SECONDS = 0.5
# Least time between two stored progress reports; builders report more often.
_PROGRESS_SECONDS = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskEnded:
    """How a build or task ended."""

    state: Literal["done", "failed", "cancelled"]
    fact: Fact


@dataclass(frozen=True)
class PutBack:
    """The job goes back to its place in the queue, and runs again later.

    It was paused, a disk is full, the job store cannot be used, or the process stops.
    """


@dataclass(frozen=True)
class WorkerLost:
    """The worker that ran the job elsewhere is lost; see `recovery.settle_worker`."""

    how: Fact
    out_of_memory: bool = False
    counted: bool = True


Outcome = TerminalEvent | TaskEnded | PutBack | WorkerLost


class Work(Protocol):
    """What an executor needs of a job that it executes.

    Attributes:
        record: the job.
        cancel: the token that it checks.
        folder: of its checkpoints; `None` saves none.
    """

    record: JobRecord
    cancel: Cancel

    @property
    def folder(self) -> Path | None: ...

    def emit(self, event: Event) -> None:
        """Take an event of a video, all but the terminal one, which is its outcome. Never raises."""


def outcome_of(error: Exception, work: Work) -> Outcome:
    """Return how a job ends that raised an error, which must be the one being handled if it is internal."""
    kind, cancel = work.record.kind, work.cancel
    if isinstance(error, PausedError):
        return PutBack()
    if isinstance(error, CancelledError):
        if kind == "video":
            return Cancelled()
        # A build that makes room, or whose worker stops, continues later with the engines that are missing.
        return PutBack() if kind == "build" and cancel.pausing else TaskEnded("cancelled", Fact("task.cancelled"))
    if isinstance(error, StoreError) and error.code in STORE_UNAVAILABLE:
        logger.warning("job %s: %s It is queued again.", work.record.id, error)
        return PutBack()
    failed = Failed.because_of(error)
    if failed.internal:
        logger.exception("job %s failed", work.record.id, exc_info=error)
    return failed if kind == "video" else TaskEnded("failed", failed.fact)


class Run:
    """A claimed job in a `with` block, from claim to settle.

    Its events go through an outbox: if the store cannot be written, the job continues, and the events are written
    before its end as soon as possible, even after the block. Nothing is written once the lease is lost: the job was
    started again or settled elsewhere. It is cancelled here then.

    Args:
        record: as it was claimed.
        poller: follows requests for the job.
        cancel: set on a request; by default a new token.
        stopping: when this process stops: the job is paused, a build or task cancelled. Without it, `settle` does not
            wait for a store that cannot be written.
        is_wanted: for a build: whether other work wants its place.
        listener: called with each event, the terminal one too, and with warnings about the store.

    Attributes:
        outcome: see `settle`; `None` until then.
    """

    def __init__(
        self,
        record: JobRecord,
        poller: "ControlPoller",
        *,
        cancel: Cancel | None = None,
        stopping: threading.Event | None = None,
        is_wanted: Callable[[], bool] | None = None,
        listener: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self.record = record
        self.id = record.id
        self.cancel = cancel or Cancel()
        self.outcome: Outcome | None = None
        self._poller, self._store = poller, poller.store
        self._stopping = stopping
        self._is_wanted, self._polls_wanted = is_wanted, 0
        self._listener = listener
        self._outbox: deque[Event | Mapping[str, Any] | Outcome] = deque()
        self._failing = False
        self._progress_at = 0.0
        self._writing = threading.RLock()

    @property
    def folder(self) -> Path | None:
        """The folder of its checkpoints, previews and poster; `None` without one."""
        return self._store.folder(self.id)

    @property
    def written(self) -> bool:
        """Whether the store has all events and, once it is settled, the end."""
        return not self._outbox

    def __enter__(self) -> "Run":
        """Follow requests for the job."""
        self._poller.add(self)
        if self._stopping is not None and self._stopping.is_set():
            self.stop()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Settle a job that was not; follow requests no more."""
        if self.outcome is None:
            self.settle(outcome_of(error, self) if isinstance(error, Exception) else PutBack())
        self._poller.remove_written(self)

    def emit(self, event: Event) -> None:
        """Store an event of a video, at once or later. Never raises."""
        if isinstance(event, EngineProgress):
            self.show(event.model_dump(mode="json"))
        else:
            logger.info("job %s: %s", self.id, log_line(event))
            stored: Event = event
            if isinstance(event, StepDone | FramesDecoded) and event.preview is not None:
                self._save_preview(event.preview)
                stored = event.model_copy(update={"preview": None})
            self._append(stored)
        self._listener(event)
        if isinstance(event, Planned) and self._store.problem:
            warning = Warned(fact=Fact("queue.job_not_stored", {"cause": self._store.problem}))
            self._append(warning)
            self._listener(warning)

    def report(self, values: Mapping[str, Any]) -> None:
        """Store an event of a build or task, JSON with an "event", at once or later. Never raises."""
        self._append(values)

    def show(self, live: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Store live progress, unless it was stored just before or `at_once`. Never raises."""
        now = time.monotonic()
        if (at_once or now - self._progress_at >= _PROGRESS_SECONDS) and not self._failing:
            self._progress_at = now
            with contextlib.suppress(StoreError):  # the next report may succeed
                self._store.log.set_live_progress(self.id, live, self.record.lease)

    def settle(self, outcome: Outcome) -> None:
        """Store how the job ends, after all its events; the first outcome counts.

        Returns when the store has it, or this process stops; the poller tries again until its end.
        """
        if self.outcome is not None:
            return
        if isinstance(outcome, VideoSaved):
            self._save_poster()
        self.outcome = outcome
        self._outbox.append(outcome)
        if isinstance(outcome, TerminalEvent):
            logger.info("job %s: %s", self.id, log_line(outcome))
            self._listener(outcome)
        else:
            logger.info("job %s: %s", self.id, outcome)
        while self.flush() is not None and self._stopping is not None and not self._stopping.wait(_RETRY_SECONDS):
            pass

    def stop(self) -> None:
        """Pause the job because this process stops; builds and tasks are cancelled."""
        self.cancel.pause()
        if self.record.kind != "video":
            self.cancel.request()

    def flush(self) -> StoreError | None:
        """Write what is not written yet; return the error if that fails."""
        with self._writing:
            while self._outbox:
                entry = self._outbox[0]
                try:
                    current = self._write(entry)
                except StoreError as error:
                    if error.code == "queue.no_such_job":
                        logger.warning("job %s: its row is gone; nothing of it is stored any more", self.id)
                        self._outbox.clear()
                        break
                    self._fail(error)
                    return error
                except Exception as error:  # internal error: one entry is lost, and the job ends nevertheless
                    logger.exception("job %s: an event cannot be stored", self.id)
                    current, failed = True, outcome_of(error, self)
                    if entry is self.outcome and type(entry) is not type(failed):
                        self._outbox.append(failed)
                if not current:
                    self._lose()
                elif self._outbox:  # else the lease was lost meanwhile
                    self._outbox.popleft()
            self._failing = False
        return None

    def follow(self, controls: Controls | None) -> None:
        """Follow the requests for the job.

        Args:
            controls: from the store; `None` if the row is gone, or cannot be read now.
        """
        if self._stopping is not None and self._stopping.is_set():
            self.stop()
        if self._is_wanted is not None:
            with contextlib.suppress(StoreError):  # polled again soon
                # Several times in a row, because another worker may take the work.
                self._polls_wanted = self._polls_wanted + 1 if self._is_wanted() else 0
                if self._polls_wanted >= _POLLS_TO_YIELD or self.cancel.pausing:
                    self.cancel.pause()
                    self.cancel.request()
        if controls is None or self.outcome is not None:
            return
        if not controls.running or controls.lease != self.record.lease:
            self._lose()
        if controls.finish:
            self.cancel.finish_early()
        if controls.request == "cancel":
            self.cancel.request()
        elif controls.request == "pause":
            self.cancel.pause()

    def _append(self, entry: Event | Mapping[str, Any]) -> None:
        if self.outcome is None:
            self._outbox.append(entry)
            if not self._failing:  # otherwise the poller tries, and the job does not wait for a lock
                self.flush()

    def _write(self, entry: Event | Mapping[str, Any] | Outcome) -> bool:
        """Write one entry; return whether the lease holds."""
        store, lease = self._store, self.record.lease
        if isinstance(entry, Mapping):
            return store.log.append(self.id, entry, lease)
        if isinstance(entry, TaskEnded):
            return store.finish(self.id, entry.state, entry.fact, lease)
        if isinstance(entry, PutBack):
            return store.put_back(self.id, lease)
        if isinstance(entry, WorkerLost):
            assert self.record.instance is not None
            most = recovery.CLUSTER_DEATHS
            recovery.settle_worker(
                store,
                self.record.instance,
                entry.how,
                out_of_memory=entry.out_of_memory,
                counted=entry.counted,
                most=most,
            )
            return True
        return store.log.record(self.id, entry, lease)

    def _fail(self, error: StoreError) -> None:
        """Note that the store cannot be written; it is tried again several times a second, but reported once."""
        if not self._failing:
            self._failing = True
            logger.warning(
                "job %s: its events cannot be written yet: %s", self.id, type(error.__cause__ or error).__name__
            )
            if self.outcome is None:
                self._listener(Warned(fact=Fact("queue.job_not_stored_yet", {"cause": error.fact})))

    def _lose(self) -> None:
        if not self.cancel.requested and self.outcome is None:
            logger.warning("job %s: it was started again or settled elsewhere; it stops here", self.id)
        self.cancel.request()
        with self._writing:  # the poller may find out while the job writes
            self._outbox.clear()

    def _save_preview(self, preview: bytes) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):  # the page has no preview then
                self.folder.mkdir(parents=True, exist_ok=True)
                replace_file(self.folder / PREVIEW, preview)

    def _save_poster(self) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):  # the gallery has no poster then
                (self.folder / PREVIEW).replace(self.folder / POSTER)


class ControlPoller:
    """Follows requests for this process's runs in the store, and writes what could not be written.

    Attributes:
        store: the jobs.
    """

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self._runs: list[Run] = []
        self._lock = threading.Lock()  # not held during a poll, which reads and writes the store

    def add(self, run: Run) -> None:
        with self._lock:
            self._runs.append(run)

    def remove_written(self, run: Run) -> None:
        """Stop polling for a run, or once it is written."""
        with self._lock:
            if run.written and run in self._runs:
                self._runs.remove(run)

    def stop(self) -> None:
        """Stop all runs; see `Run.stop`."""
        for run in self._current():
            run.stop()

    def poll(self) -> None:
        runs = self._current()
        controls: Mapping[str, Controls] = {}
        with contextlib.suppress(StoreError):  # polled again soon
            controls = self.store.controls([run.id for run in runs]) if runs else {}
        for run in runs:
            run.follow(controls.get(run.id))
        for run in runs:
            if not run.written:
                run.flush()
            if run.outcome is not None:
                self.remove_written(run)

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

    def _current(self) -> list[Run]:
        with self._lock:
            return list(self._runs)
