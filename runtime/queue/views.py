"""Views of jobs and tasks for front ends: record and events of the store combined into progress.

The process that runs a job writes to the store; every other process, such as the web app, reads a view of it.
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from runtime.core.events import Event, Planned
from runtime.core.facts import Fact, render
from runtime.core.images import InputFile
from runtime.core.plan import ExecutionPlan
from runtime.core.progress import Progress
from runtime.pipeline.files import PREVIEW, checkpoint_step, finished_clip
from runtime.queue.changes import Changes
from runtime.queue.records import RESUMABLE, BuildProgress, JobRecord, State, event_from_json, read_plan, task_progress
from runtime.queue.store import JobStore, Seen

TaskState = Literal["queued", "running", "done", "failed", "cancelled"]

_LOG_LINES = 200


@dataclass(frozen=True)
class PlanSummary:
    """What lists of jobs show of a plan.

    Attributes:
        width, height: of the frames that are decoded, in pixels.
        video_size: the same of the video, which may be upscaled.
        inputs: images and video, by the request's field.
        seconds: the likely time until the video is saved, if it is known.
    """

    model: str
    prompt: str
    seed: int
    width: int
    height: int
    video_size: tuple[int, int]
    frames: int
    sections: int
    fps: int
    inputs: Mapping[str, InputFile]
    seconds: float | None

    @classmethod
    def of(cls, plan: ExecutionPlan) -> "PlanSummary":
        """Return the summary of a plan."""
        return cls(
            model=plan.model,
            prompt=plan.prompt,
            seed=plan.seed,
            width=plan.width,
            height=plan.height,
            video_size=plan.video_size,
            frames=plan.frames,
            sections=plan.sections,
            fps=plan.fps,
            inputs=plan.inputs,
            seconds=plan.seconds["total"].likely if plan.seconds else None,
        )


class Job:
    """A view of one video job. Safe between threads; `refresh` reads what is new.

    Hundreds may be queued, so a view keeps its plan as text.

    Args:
        record: from the store.
        plan: the record's, or a newer one.
        model_title: the model's display name.

    Attributes:
        id, owner: as in the record.
        group: as in the record when it was last read.
        summary: of the plan.
        state: as in the record; a `held` job waits until it is resumed.
        cancelling: whether it runs and a cancel was requested.
        finishing: whether its video ends after the current section.
        progress: how far it is.
        events: its events since it started, without previews.
        changes: wakes those who follow the job.
        seen: what the last `refresh` found, to compare with `JobStore.states`.
    """

    def __init__(self, record: JobRecord, plan: ExecutionPlan, model_title: str, store: JobStore) -> None:
        self.id = record.id
        self.owner = record.owner
        self.group = record.group
        self.summary = PlanSummary.of(plan)
        self.model_title = model_title
        self.state: State = record.state
        self.held = record.held
        self.cancelling = False
        self.finishing = record.finish
        self.progress = Progress()
        self.events: list[Event] = []
        self.changes = Changes()
        self.seen: Seen | None = None
        self._store = store
        self._read = 0
        self._preview_written = 0
        self._plan_json = plan.model_dump_json()
        self._lock = threading.RLock()

    @property
    def plan(self) -> ExecutionPlan:
        """The plan that it runs by, or would run by if it started as it was submitted."""
        return read_plan(self._plan_json)

    @property
    def open(self) -> bool:
        """Whether it is queued or runs."""
        return self.state in {"queued", "running"}

    @property
    def share(self) -> float:
        """The share that is done now, 0 to 1."""
        return self.progress.at(time.monotonic()).fraction

    @property
    def seconds_left(self) -> float | None:
        """About how long it still takes, without the jobs before it; `None` if that is unknown.

        One that was stopped before its first step starts over.
        """
        if self.state == "running" or self.progress.end is not None:
            return self.progress.at(time.monotonic()).seconds_left
        whole, done = self.summary.seconds, self.progress.fraction if self.progress.step else 0.0
        return None if whole is None else whole * (1 - done)

    @property
    def checkpoint_step(self) -> int | None:
        """The step that its checkpoint resumes after; `None` without a checkpoint."""
        return checkpoint_step(self._store.folder(self.id))

    @property
    def clip(self) -> tuple[int, Path] | None:
        """The clip of its finished sections or first frames, and their number before it.

        `None` without one, and once its video is saved. After another end, only finished sections are of use: a worker
        that was killed leaves its first frames behind.
        """
        if self.state == "done" or (not self.open and self.summary.sections == 1):
            return None
        return finished_clip(self._store.folder(self.id))

    def request_cancel(self) -> None:
        """Ask the job to stop: a queued one ends at once, a running one at its next check.

        Raises:
            StoreError: if the store cannot be written.
        """
        self._store.request_cancel([self.id])
        self.refresh()

    def refresh(self) -> None:
        """Read what is new in the store since the last call.

        Raises:
            StoreError: if the store cannot be read, or the job was removed.
        """
        with self._lock:
            record, events = self._store.log.read(self.id, self._read)
            if record.plan_json is not None and record.plan_json != self._plan_json and record.plan is not None:
                self._plan_json, self.summary = record.plan_json, PlanSummary.of(record.plan)
            for number, _, values in events:
                self._read = number
                self._follow(values, record)
            if (
                record.state == "running"
                and record.live is not None
                and (self.seen is None or record.live != self.seen[3])
            ):
                event = event_from_json(record.live_values, record)
                if event is not None:
                    self._apply(event)
            preview = self._new_preview() if record.state in {"running", *RESUMABLE} else None
            if preview is not None:
                self.progress = replace(self.progress, preview=preview)
            self.cancelling = record.state == "running" and record.pending == "cancel"
            self.state, self.held, self.finishing = record.state, record.held, record.finish
            self.group = record.group
            self.seen = (record.state, record.held, record.pending, record.live)
        self.changes.notify()

    def _follow(self, values: Mapping[str, Any], record: JobRecord) -> None:
        event = event_from_json(values, record)
        if isinstance(event, Planned) or values["event"] in {"QueuedAgain", "Edited", "WorkerDied"}:
            self.progress, self.events = Progress(preview=self.progress.preview), []
        elif values["event"] == "PutBack":
            self.progress = replace(self.progress, waits=None)
        if event is not None:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        before = self.progress.preview
        progress = self.progress.after(event, time.monotonic())
        self.progress = progress if progress.preview is not None else replace(progress, preview=before)
        self.events.append(event)

    def _new_preview(self) -> bytes | None:
        """Return the newest preview, unless it was read before."""
        folder = self._store.folder(self.id)
        if folder is not None:
            path = folder / PREVIEW
            with contextlib.suppress(OSError):
                written = path.stat().st_mtime_ns
                if written != self._preview_written:
                    self._preview_written = written
                    return path.read_bytes()
        return None


@dataclass
class TaskProgress:
    """How far a task or download is. Safe to read from any thread.

    Attributes:
        line, share: its last progress line, and the share done, 0 to 1, if known.
        log: progress lines so far, and the end of a failed build's log.
        result: how it ended.
        found: lines about an inspected engine file, or an enhanced prompt.
        builds: the engines that a task builds, in order; the one that runs began at `build_began`, seconds since 1970.
    """

    state: TaskState = "queued"
    line: str = ""
    share: float | None = None
    log: list[str] = field(default_factory=list, repr=False)
    result: Fact | None = None
    found: tuple[str, ...] = ()
    builds: tuple[BuildProgress, ...] = ()
    build_began: float = 0.0

    @property
    def open(self) -> bool:
        """Whether it is queued or runs."""
        return self.state in {"queued", "running"}

    def write(self, text: str) -> None:
        """Append to the log, which keeps the newest lines."""
        self.log = [*self.log, *text.splitlines()][-_LOG_LINES:]


class Task(TaskProgress):
    """A view of one task. Safe between threads; `refresh` reads what is new.

    Attributes:
        kind: of its `Work`.
        titled, title: what it does, and its text.
        idle: whether it is a build that a video left for later.
        seconds: forecast of its duration; `None` if it is unknown.
        cancelling: whether it runs and a cancel was requested.
        seen: see `Job`.
    """

    def __init__(self, record: JobRecord, store: JobStore) -> None:
        super().__init__()
        self.idle = record.idle
        self.seconds = record.seconds
        self.id = record.id
        self.titled = record.titled
        self.title = record.title
        self.kind: str = record.request.get("kind", "build") if record.kind == "task" else "build"
        self.cancelling = False
        self.seen: Seen | None = None
        self._store = store
        self._read = 0
        self._lock = threading.Lock()

    @property
    def seconds_left(self) -> float | None:
        """About how long it still takes once it runs; `None` if that is unknown.

        Videos before it are not included: a build makes room for them.
        """
        if not self.builds:
            return None if self.seconds is None else self.seconds * (1 - (self.share or 0.0))
        # A build that takes longer than expected may end at any moment.
        rest = [max(build.expected - self.seconds_running(build), 0.0) for build in self.builds if build.open]
        return sum(rest)

    def seconds_running(self, build: BuildProgress) -> float:
        """Return for how long one of its builds has been running; 0 if it does not run."""
        return max(time.time() - self.build_began, 0.0) if build.state == "running" else 0.0

    def refresh(self) -> None:
        """Read what is new in the store since the last call.

        Raises:
            StoreError: if the store cannot be read, or the task was removed.
        """
        with self._lock:
            record, events = self._store.log.read(self.id, self._read)
            for number, at, values in events:
                self._read = number
                self._follow(values, at)
            live = task_progress(record)
            if live is not None and record.state != "queued":
                self.line, self.share = str(live.fact), live.share
            self.cancelling = record.state == "running" and record.pending == "cancel"
            # A build whose app was killed is not resumed.
            self.state = "cancelled" if record.state == "interrupted" else record.state
            self.seen = (record.state, record.held, record.pending, record.live)

    def _follow(self, values: Mapping[str, Any], at: float) -> None:
        match values:
            case {"event": "TaskBuilds", "builds": [*builds]}:
                with contextlib.suppress(ValidationError):
                    self.builds = tuple(map(BuildProgress.model_validate, builds))
                    self.build_began = at
            case {"event": "TaskProgress", "fact": {"code": str(code), "data": dict(data)}}:
                self.write(str(Fact(code, data)))
            case {"event": "TaskLog", "text": str(text)}:
                self.write(text)
            case {"event": "TaskProblem", "fact": {"code": str(code), "data": dict(data)}}:
                self.write("\n".join(render(Fact(code, data))))
            case {"event": "TaskFound", "facts": [*facts]}:
                with contextlib.suppress(ValidationError):
                    self.found = tuple(str(Fact.model_validate(fact)) for fact in facts)
            case {"event": "Ended", "fact": {"code": str(code), "data": dict(data)}}:
                self.result = Fact(code, data)
            case {"event": "WorkerDied" | "PutBack"}:
                self.line, self.share, self.log, self.found = "", None, [], ()
                # Engines that are finished are not built again; the one that was running is.
                self.builds = tuple(
                    build.model_copy(update={"state": "waiting"}) if build.open else build for build in self.builds
                )
