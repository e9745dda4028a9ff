"""Executes videos on a node's worker: sends what they need, and receives what they send, until the stream has ended.

A request to cancel is always forwarded, also if this machine cannot receive the video: the worker is free for the next
job only after it has stopped. Each wait for the worker follows requests and notices a worker that does not answer.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from runtime.core.errors import OutputError
from runtime.core.events import Event, Failed, FramesDecoded, Planned, StepDone, TerminalEvent, VideoSaved
from runtime.core.facts import Fact
from runtime.core.files import move_over
from runtime.core.plan import plain_output
from runtime.core.request import CONTROL_VIDEOS
from runtime.queue.executors import after_full_disk, await_disk
from runtime.queue.records import JobRecord
from runtime.queue.recovery import MemoryKills
from runtime.queue.run import Outcome, PutBack, Run, WorkerLost, outcome_of
from runtime.queue.store import JobStore
from runtime.queue.supervisor import SILENT_SECONDS, STOPPING_SECONDS
from runtime.server.cluster import transfer
from runtime.server.cluster.node_worker import Order, Sent
from runtime.server.cluster.sending import Sender
from runtime.video.mp4 import cannot_write

_POLL_SECONDS = 0.1
# A death is due to lack of memory if the node's kernel has killed a process since the last sample of its worker.
_SAMPLE_SECONDS = 2.0
# Of one event of a job, which may have a plan or a preview, and of all without their previews.
_LARGEST_EVENT_BYTES, _MOST_EVENT_BYTES = 16 << 20, 256 << 20
# Between two calls that forward the same request: the worker ignores one for a job that it has not started yet.
_AGAIN_SECONDS = 1.0

_SomeEvent = TypeVar("_SomeEvent", bound=Event)

logger = logging.getLogger(__name__)


class ConnectionLostError(Exception):
    """The worker has died, or does not answer.

    Attributes:
        hangs: why it was given up, if it may still run.
    """

    def __init__(self, hangs: Fact | None = None) -> None:
        super().__init__(hangs)
        self.hangs = hangs


class Connection(Protocol):
    """Calls of the methods of one `NodeWorker`, several at a time."""

    def begin(self, method: str, *values: Any) -> Any:
        """Begin a call."""

    def stream(self, order: Order) -> Any:
        """Begin `NodeWorker.run`."""

    def is_ready(self, begun: Any, seconds: float) -> bool:
        """Wait for a call, or the next item of a stream; return whether it has ended."""

    def result(self, begun: Any) -> Any:
        """Return the result of a call that has ended, or raise its error.

        Raises:
            ConnectionLostError: if the worker has died.
        """

    def next_item(self, stream: Any) -> Sent | None:
        """Return the next item of a stream that is ready; `None` at its end. Raises as `result`."""


class RemoteExecutor:
    """Executes the videos that one worker of a node is given, one at a time.

    Args:
        make_sender: returns what makes the orders, and calls the worker through this executor.
        sharing: held while files are sent that workers of one node share.
        lost: returns how a job ends whose worker is lost; may take seconds.
        avoids: returns whether a job that the node refused can run on another one.

    Attributes:
        sender: see `make_sender`.
        memory_kills: the newest sample of the node's count; `None` without one.
    """

    def __init__(
        self,
        connection: Connection,
        store: JobStore,
        make_sender: "Callable[[RemoteExecutor], Sender]",
        sharing: threading.Lock,
        lost: Callable[[JobRecord, ConnectionLostError], WorkerLost],
        avoids: Callable[[JobRecord], bool],
    ) -> None:
        self.sender = make_sender(self)
        self.memory_kills: MemoryKills | None = None
        self._connection, self._store = connection, store
        self._sharing, self._lost, self._avoids = sharing, lost, avoids
        self._run: Run | None = None
        # Calls for a job that were not waited for: it was cancelled meanwhile.
        self._unanswered: list[Any] = []
        self._sample: Any = None
        self._sampled = -_SAMPLE_SECONDS
        self._forwarded: dict[str, float] = {}
        self._cancelled_at: float | None = None

    def execute(self, run: Run) -> Outcome:
        """Execute a video and return how it ended. Never raises."""
        self._run, self._forwarded = run, {}
        try:
            await_disk(run)
            while self._unanswered:  # they may write the files that are sent now
                self._wait(self._unanswered[0])
            outcome = self._receive(run, self.sender.prepare(run.record, self._store, self._held(self._sharing)))
        except ConnectionLostError as error:
            outcome = self._lost(run.record, error)
        except Exception as error:
            outcome = outcome_of(error, run)
        finally:
            self._run = self._cancelled_at = None
        return after_full_disk(outcome, run)

    def look(self) -> None:
        """Notice a worker that does not answer; called every tenth of a second, also while no job runs.

        Raises:
            ConnectionLostError: if it has died, or is given up.
        """
        now = time.monotonic()
        if self._sample is None:
            if now - self._sampled >= _SAMPLE_SECONDS:
                self._sample, self._sampled = self._connection.begin("memory_kills"), now
        elif self._connection.is_ready(self._sample, 0.0):
            self.memory_kills, self._sample = self._connection.result(self._sample), None
        elif now - self._sampled > SILENT_SECONDS:
            raise ConnectionLostError(Fact("queue.exit_not_responding", {"seconds": SILENT_SECONDS}))
        if self._cancelled_at is not None and now - self._cancelled_at > STOPPING_SECONDS:
            raise ConnectionLostError(Fact("queue.exit_not_stopping", {"seconds": STOPPING_SECONDS}))

    def begin(self, method: str, *values: Any) -> Any:
        """See `sending.Remote`."""
        begun = self._connection.begin(method, *values)
        self._unanswered.append(begun)
        return begun

    def end(self, begun: Any) -> Any:
        """See `sending.Remote`."""
        self._wait(begun)
        return self._connection.result(begun)

    def check(self) -> None:
        """See `sending.Remote`."""
        if self._run is not None:
            self._run.cancel.check_pause()

    def _wait(self, begun: Any) -> None:
        while not self._connection.is_ready(begun, _POLL_SECONDS):
            self.look()
            self.check()
        self._unanswered.remove(begun)

    @contextlib.contextmanager
    def _held(self, lock: threading.Lock) -> Iterator[None]:
        while not lock.acquire(timeout=_POLL_SECONDS):
            self.look()
            self.check()
        try:
            yield
        finally:
            lock.release()

    def _receive(self, run: Run, order: Order) -> Outcome:
        """Run a job there; take what it sends until its end, or drop it after an error here."""
        outcome: Outcome = PutBack()
        problem: Exception | None = None
        planned = False
        with contextlib.closing(_Receiver(run.record, self._store)) as receiver:
            stream = self._connection.stream(order)
            while True:
                while not self._connection.is_ready(stream, _POLL_SECONDS):
                    self._forward(run, failed=problem is not None)
                    self.look()
                self._forward(run, failed=problem is not None)
                sent = self._connection.next_item(stream)
                if sent is None:
                    break
                if problem is not None:
                    continue
                kind, value = sent
                try:
                    if kind == "event":
                        event = receiver.event(value)
                        planned = planned or isinstance(event, Planned)
                        run.emit(_on_head(event, run.record))
                    elif kind == "outcome":
                        outcome = receiver.outcome(value)
                    else:
                        receiver.take(kind, value)
                except Exception as error:
                    logger.warning("job %s cannot be received: %s", run.id, error)
                    problem = error
            if problem is not None:
                return outcome_of(problem, run)
            if isinstance(outcome, VideoSaved):
                outcome = outcome.model_copy(update={"video": run.record.output})
                receiver.finish(outcome)
        refused = isinstance(outcome, Failed) and not outcome.internal and not planned
        return PutBack() if refused and self._avoids(run.record) else outcome

    def _forward(self, run: Run, *, failed: bool) -> None:
        """Forward the requests for a job that runs there.

        Args:
            failed: whether it is to stop because this machine cannot receive it.
        """
        now = time.monotonic()
        for request, requested in (
            ("cancel", run.cancel.requested or failed),
            ("pause", run.cancel.pausing),
            ("finish", run.cancel.finishing),
        ):
            if requested and now - self._forwarded.get(request, -_AGAIN_SECONDS) >= _AGAIN_SECONDS:
                self._forwarded[request] = now
                self._connection.begin("control", run.id, request)
                if request == "cancel" and self._cancelled_at is None:
                    self._cancelled_at = now


class _Receiver:
    """Checks what a running job sends, and writes its files as long as its lease holds."""

    def __init__(self, record: JobRecord, store: JobStore) -> None:
        self._record, self._store = record, store
        self._folder = store.folder(record.id)
        self._begun: set[Path] = set()
        self._has_video = False
        self._bytes_left = _MOST_EVENT_BYTES

    def event(self, event: Any) -> Event:
        """Return an event to store.

        Raises:
            OutputError: if it is none or an end, or it or all together are larger than those of any job.
        """
        if not isinstance(event, Event) or isinstance(event, TerminalEvent):
            raise self._refused()
        return self._bounded(event)

    def outcome(self, outcome: Any) -> Outcome:
        """Return how the job ended.

        Raises:
            OutputError: as `event`, and if it says that the video is made, which was not received.
        """
        if isinstance(outcome, PutBack):
            return outcome
        if not isinstance(outcome, TerminalEvent):
            raise self._refused()
        if isinstance(outcome, VideoSaved) and not self._has_video:
            raise OutputError("server.cluster_file_damaged", name=transfer.VIDEO)
        return self._bounded(outcome)

    def _bounded(self, event: _SomeEvent) -> _SomeEvent:
        size = len(event.model_dump_json())  # without a preview, which replaces the one before
        preview = event.preview if isinstance(event, StepDone | FramesDecoded) else None
        self._bytes_left -= size
        if size + len(preview or b"") > _LARGEST_EVENT_BYTES or self._bytes_left < 0:
            raise self._refused()
        return event

    def _refused(self) -> OutputError:
        return OutputError("server.cluster_events_refused", job=self._record.id)

    def take(self, kind: str, value: Any) -> None:
        """Take a part of a file, the digest of a file, or the names of all.

        Raises:
            OutputError: if a name is not that of a file of a job, a file is damaged, or it cannot be written.
            StoreError: if the job was started again meanwhile.
        """
        if kind == "files":
            with self._holding():
                for name, path in transfer.job_files(self._folder).items():
                    if name not in value:
                        path.unlink(missing_ok=True)
            return
        name = str(value[0])
        transfer.check_job_name(name)
        if name not in transfer.VIDEOS and self._folder is None:
            return
        # The parts of an older run are other files.
        target = self._target(name)
        part_file = target.with_name(f".{target.name}.{self._record.lease}")
        self._begun.add(part_file)
        try:
            if kind == "part":
                transfer.append(part_file, value[1], value[2])
                return
            transfer.complete(part_file, value[1])
            with self._holding():
                move_over(part_file, target)
            self._has_video = self._has_video or name == transfer.VIDEO
        except OSError as error:
            raise cannot_write(target, error) from error

    def close(self) -> None:
        """Remove the files that were not received completely."""
        for path in self._begun:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                transfer.partial(path).unlink(missing_ok=True)

    def finish(self, saved: VideoSaved) -> None:
        """Remove what a finished job does not need any more."""
        if not saved.continues:
            for path in transfer.job_files(self._folder).values():
                path.unlink(missing_ok=True)

    def _target(self, name: str) -> Path:
        if name == transfer.VIDEO:
            return self._record.output
        if name == transfer.PLAIN:
            return plain_output(self._record.output)
        assert self._folder is not None
        return self._folder / name

    def _holding(self) -> Any:
        return self._store.holding(self._record.id, self._record.lease)


def _on_head(event: Event, record: JobRecord) -> Event:
    """Return an event of a node with the paths of the head."""
    if not isinstance(event, Planned):
        return event
    planned = record.plan
    if planned is None:
        return Planned(plan=event.plan.replace(output=record.output))
    plan = event.plan.replace(
        output=record.output,
        request=planned.request,
        model=planned.model,
        model_directory=planned.model_directory,
        image=planned.image,
        last_image=planned.last_image,
        keyframes=planned.keyframes,
        extend=planned.extend,
        join=planned.join,
        video=planned.video,
        **{field: getattr(planned, field) for field in CONTROL_VIDEOS},
        references=planned.references,
        loras=planned.loras,
    )
    return Planned(plan=plan)
