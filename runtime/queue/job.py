"""A job as this process sees it while it lasts: the record's events folded into progress, with the last preview.

A job that runs here is told here first and goes from here into the store; one that waits, or runs in another process,
is read from the store. Both look alike, so that any page can watch any job.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from runtime.core.cancel import Cancel
from runtime.core.errors import StoreError, TandemError
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
from runtime.core.log import in_the_log
from runtime.core.plan import ExecutionPlan
from runtime.core.progress import Progress
from runtime.pipeline.checkpoint_files import POSTER, checkpoint_step
from runtime.queue.records import JobRecord, State, event_from_json
from runtime.queue.store import JobStore

logger = logging.getLogger(__name__)


class Stop(Cancel):
    """The token of a job that others may look at: asking is told to the store too, where waiting jobs end at once."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def request(self) -> None:
        """Ask the job to stop, wherever it waits or runs."""
        super().request()
        self._tell()


class Job:
    """One video on its way. Read it from any thread; only the worker changes it.

    Args:
        record: from the store.
        plan: the record's, or a newer one.
        model_title: what people call the model.

    Attributes:
        id, owner: as in the record.
        plan: what it runs by, or would if it began as things were when it was asked for.
        state: where it stands; one that is `held` waits for somebody to let it go on.
        progress: how far it is.
        events: what it told since it began, without previews.
        cancel: asks it to stop, wherever it is.
    """

    def __init__(self, record: JobRecord, plan: ExecutionPlan, model_title: str, store: JobStore) -> None:
        self.id = record.id
        self.owner = record.owner
        self.plan = plan
        self.model_title = model_title
        self.state: State = record.state
        self.held = record.held
        self.progress = Progress()
        self.events: list[Event] = []
        self.cancel: Cancel = Stop(self._ask_to_stop)
        self._store = store
        self._here = False
        self._read = 0
        self._lock = threading.RLock()
        self._unwritten: list[Event] = []
        self._stuck = False

    @property
    def open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in {"queued", "running"}

    def begin(self, record: JobRecord) -> None:
        """Note that it runs in this process from now on; what an earlier run told is over."""
        with self._lock:
            self._here = True
            self.state, self.held = record.state, record.held
            self.progress, self.events = Progress(), []
            # Tokens go one way. What this one was asked for, the store knows, and `Wishes` tells the new one.
            self.cancel = Stop(self._ask_to_stop)

    def leave(self) -> None:
        """Note that it does not run in this process any more: from now on the store says how it stands."""
        with self._lock:
            self._here = False
            if not self.open:
                self._read = max((number for number, _, _ in self._store.events(self.id)), default=0)
                return
            preview = self.progress.preview
            self.progress, self.events, self._read = Progress(), [], 0
            self.refresh()
            self.progress = replace(self.progress, preview=preview)

    def record(self, event: Event) -> None:
        """Take an event in, and write it down.

        Whoever sees a terminal one in `events` finds state, progress and store at their end too. Where the store cannot
        be written, the job goes on: that is said, and the events are written as soon as it can be.
        """
        problem, before = None, not self.written
        with self._lock:
            # A builder says the same many times a second: that is for whoever watches now.
            if not isinstance(event, EngineProgress):
                logger.info("job %s: %s", self.id, in_the_log(event))
                self._unwritten.append(event)
                problem = self.write()
            if isinstance(event, VideoSaved):
                self._keep_poster()
            self._take_in(event)
            if problem is not None and not before and not isinstance(event, TerminalEvent):
                self._take_in(Warned(fact=Fact("queue.job_not_stored_yet", {"cause": problem.fact})))
            if isinstance(event, Planned) and self._store.problem:
                self._take_in(Warned(fact=Fact("queue.job_not_stored", {"cause": self._store.problem})))

    def write(self) -> StoreError | None:
        """Write down what could not be written before; return why not, if it still cannot."""
        with self._lock:
            try:
                while self._unwritten:
                    self._store.record(self.id, self._unwritten[0])
                    del self._unwritten[0]
            except StoreError as error:
                # Tried again several times a second: said once, so that a full log is not the next trouble.
                if not self._stuck:
                    logger.warning("job %s: what it tells cannot be written down yet", self.id)
                self._stuck = True
                return error
            self._stuck = False
        return None

    @property
    def kept(self) -> int | None:
        """The step that it goes on after, by its checkpoint; `None` if it begins anew."""
        return checkpoint_step(self._store.folder(self.id))

    @property
    def written(self) -> bool:
        """Whether the store knows all that was told."""
        return not self._unwritten

    def refresh(self) -> None:
        """Read what the store knows of a job that does not run here."""
        with self._lock:
            if self._here or not self.written:
                return
            record = self._store.get(self.id)
            for number, _, values in self._store.events(self.id, self._read):
                self._read = number
                self._follow(values, record)
            self.state, self.held = record.state, record.held
            if record.plan is not None:
                self.plan = record.plan

    def _follow(self, values: Mapping[str, Any], record: JobRecord) -> None:
        event = event_from_json(values, record)
        if isinstance(event, Planned) or values["event"] in {"QueuedAgain", "Edited"}:
            self.progress, self.events = Progress(), []
        elif values["event"] == "PutBack":
            self.progress = replace(self.progress, waits=None)
        if event is not None:
            self._take_in(event)

    def _take_in(self, event: Event) -> None:
        if isinstance(event, Planned):
            self.plan = event.plan
        if isinstance(event, TerminalEvent):
            self.state = _end_state(event)
        self.progress = self.progress.after(event, time.monotonic())
        self.events.append(
            event.model_copy(update={"preview": None}) if isinstance(event, StepDone | FramesDecoded) else event
        )

    def _keep_poster(self) -> None:
        folder = self._store.folder(self.id)
        if folder is not None and self.progress.preview is not None:
            with contextlib.suppress(OSError):  # the gallery has none then
                folder.mkdir(parents=True, exist_ok=True)
                (folder / POSTER).write_bytes(self.progress.preview)

    def _ask_to_stop(self) -> None:
        try:
            self._store.request_cancel([self.id])
            self.refresh()
        except TandemError as error:  # whoever runs it looks at the token as well
            logger.warning("job %s: the wish to cancel cannot be written down: %s", self.id, type(error).__name__)


def _end_state(event: TerminalEvent) -> State:
    if isinstance(event, VideoSaved):
        return "done"
    return "failed" if isinstance(event, Failed) else "cancelled"
