"""Work on the engine library and downloads: what a task is, as data, and how far it is. Imports no torch.

A worker process runs tasks (`task_runner`) in the order of the queue; front ends read `Task`.
"""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from runtime.core.cancel import Cancel
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore, Seen

TaskState = Literal["queued", "running", "done", "failed", "cancelled"]

_LOG_LINES = 200
_LIVE_SECONDS = 0.2


class _Work(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BuildEngines(_Work):
    """Build the engines that a request wants.

    Attributes:
        request: by the names of `GenerationRequest`; with `build="always"` existing engines are built again.
        component: the only component to build for; `None` builds for all.
    """

    kind: Literal["build"] = "build"
    request: dict[str, Any]
    component: str | None = None

    def generation_request(self) -> GenerationRequest:
        """Return the request.

        Raises:
            InvalidRequestError: if this version does not understand it.
        """
        return GenerationRequest.from_mapping(self.request)


class InspectEngine(_Work):
    """Open an engine file and find out which component it could replace. This runs code of the file.

    Attributes:
        model: name or folder of the model.
        component: the component to replace; `None` tries all.
    """

    kind: Literal["inspect"] = "inspect"
    path: Path
    model: str
    component: str | None = None


class ImportEngine(_Work):
    """Import an engine file. This runs code of the file. Attributes as in `InspectEngine`."""

    kind: Literal["import"] = "import"
    path: Path
    model: str
    component: str | None = None


class VerifyEngine(_Work):
    """Compare an engine with PyTorch; `models` are the names or folders of the models that it may belong to."""

    kind: Literal["verify"] = "verify"
    engine: str
    models: tuple[str, ...]


class DeleteEngine(_Work):
    """Delete an engine."""

    kind: Literal["delete"] = "delete"
    engine: str


class PruneEngines(_Work):
    """Delete the least recently used engines until the library is within `max_bytes`."""

    kind: Literal["prune"] = "prune"
    max_bytes: int


Work = Annotated[
    BuildEngines | InspectEngine | ImportEngine | VerifyEngine | DeleteEngine | PruneEngines,
    Field(discriminator="kind"),
]
_WORK: TypeAdapter[Work] = TypeAdapter(Work)


def work_of(record: JobRecord) -> Work:
    """Return what a record of kind "build" or "task" is to do.

    Raises:
        ValueError: if another version wrote it.
    """
    if record.kind == "build":
        return BuildEngines(request=dict(record.request), component=record.part)
    return _WORK.validate_python(record.request)


@dataclass
class TaskProgress:
    """How far a task or download is. Safe to read from any thread.

    Attributes:
        state: where it stands.
        line, share: its last progress line, and the share done, 0 to 1, where it is known.
        log: progress lines so far, and the end of a failed build's log.
        result: how it ended.
        found: lines about an inspected engine file.
    """

    state: TaskState = "queued"
    line: str = ""
    share: float | None = None
    log: list[str] = field(default_factory=list, repr=False)
    result: Fact | None = None
    found: tuple[str, ...] = ()

    @property
    def open(self) -> bool:
        """Whether it is queued or runs."""
        return self.state in {"queued", "running"}

    def write(self, text: str) -> None:
        """Append to the log, which keeps the newest lines."""
        self.log = [*self.log, *text.splitlines()][-_LOG_LINES:]


class Task(TaskProgress):
    """A task in the job store, as a front end sees it; `refresh` reads what is new.

    Attributes:
        kind, title: what it is, for programs and for people.
        cancelling: whether it runs and was asked to stop.
        seen: see `Job`.
    """

    def __init__(self, record: JobRecord, store: JobStore) -> None:
        super().__init__()
        self.id = record.id
        self.title = record.title
        self.kind: str = record.request.get("kind", "build") if record.kind == "task" else "build"
        self.cancelling = False
        self.seen: Seen | None = None
        self._store = store
        self._read = 0
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read what the store has since the last time.

        Raises:
            StoreError: if the store cannot be read, or the task is not there any more.
        """
        with self._lock:
            record, events = self._store.read(self.id, self._read)
            for number, values in events:
                self._read = number
                self._follow(values)
            if record.live is not None and record.state != "queued":
                live = json.loads(record.live)
                self.line, self.share = str(_fact(live["fact"])), live["share"]
            self.cancelling = record.state == "running" and record.pending == "cancel"
            # A build whose app was killed is not taken up by itself.
            self.state = "cancelled" if record.state == "interrupted" else record.state
            self.seen = (record.state, record.held, record.pending, record.live)

    def _follow(self, values: Mapping[str, Any]) -> None:
        match values:
            case {"event": "TaskProgress", "fact": fact}:
                self.write(str(_fact(fact)))
            case {"event": "TaskLog", "text": text}:
                self.write(text)
            case {"event": "TaskFound", "lines": lines}:
                self.found = tuple(lines)
            case {"event": "Ended", "fact": fact}:
                self.result = _fact(fact)
            case {"event": "WorkerDied" | "PutBack"}:
                self.line, self.share, self.log, self.found = "", None, [], ()


def _fact(stored: Mapping[str, Any]) -> Fact:
    return Fact(stored["code"], stored["data"])


class TaskRecorder:
    """Writes the progress of a task that this process runs to the store.

    Attributes:
        cancel: what the task checks.
    """

    def __init__(self, task_id: str, store: JobStore) -> None:
        self.id = task_id
        self.cancel = Cancel()
        self._store = store
        self._last: Fact | None = None
        self._shown_at = 0.0

    def report(self, fact: Fact, share: float | None) -> None:
        """Note progress: what is done now, and the share done, 0 to 1, if known."""
        now = time.monotonic()
        if fact != self._last:
            self._last = fact
            self._store.note_task(self.id, {"event": "TaskProgress", "fact": fact.model_dump(mode="json")})
        elif now - self._shown_at < _LIVE_SECONDS:
            return
        self._shown_at = now
        self._store.show(self.id, {"fact": fact.model_dump(mode="json"), "share": share})

    def write(self, text: str) -> None:
        """Append to the log."""
        self._store.note_task(self.id, {"event": "TaskLog", "text": text})

    def found(self, lines: tuple[str, ...]) -> None:
        """Note what was found out about an inspected file."""
        self._store.note_task(self.id, {"event": "TaskFound", "lines": list(lines)})
