"""The panel Queue: what runs and waits, adding several videos at once, and jobs that can be resumed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import InvalidRequestError
from runtime.core.events import OutOfMemory
from runtime.core.request import AUTO, Auto
from runtime.queue.job_queue import combined
from runtime.queue.records import JobRecord, State
from runtime.ui import form, formatting
from runtime.ui.formatting import paragraph, render
from runtime.ui.job_view import ResumeStatus
from runtime.ui.jobs_panel import JobsPanel, failure, title
from runtime.ui.panels import Call, Reply, drawn

MAX_VARIATIONS = 100
_MAX_RESUMABLE = 10
_RESUMABLE: tuple[State, ...] = ("interrupted", "failed")


@dataclass(frozen=True)
class Row:
    """One job or task in the queue.

    Attributes:
        title: the prompt, or the title of a task.
        state: running, pausing, stopping, waiting or paused.
        video: whether it generates a video; only those can be edited and paused.
        line: progress as text.
        percent: progress of a running one, if it is known.
        visitor: whether a visitor submitted it.
        needs_gpus: whether it was started and waits for other GPUs.
        idle: whether it runs only while nothing else waits; it has no place in the order.
    """

    id: str
    title: str
    state: str
    video: bool
    line: str = ""
    percent: int | None = None
    visitor: bool = False
    needs_gpus: bool = False
    idle: bool = False

    @property
    def runs(self) -> bool:
        """Whether it has started."""
        return self.state in {"running", "pausing", "stopping"}


class QueuePanel(JobsPanel):
    """The panel; see `panels.Panel`."""

    def draw(self, _call: Call, _reply: Reply) -> dict[str, str]:
        """Return the queue and the resumable jobs."""
        return drawn({"list": self._list, "resumable": self._resumable})

    def _actions(self) -> Mapping[str, Callable[[Call], Reply]]:
        return {
            **super()._actions(),
            "add": self._add,
            "pause-all": lambda _: self._hold_all(True),
            "unpause-all": lambda _: self._hold_all(False),
            "cancel-all": self._cancel_all,
        }

    def _job_actions(self) -> Mapping[str, Callable[[JobRecord, Call], Reply]]:
        return {
            **super()._job_actions(),
            "up": self._move,
            "down": self._move,
            "pause": self._hold,
            "unpause": self._hold,
            "cancel": self._cancel,
            "edit": self._edit,
            "save": self._save,
        }

    def jobs(self) -> list[JobRecord]:
        """Return what runs and waits, in order."""
        return [job for job in self._store.queue() if self._owner is None or job.owner == self._owner]

    def _add(self, call: Call) -> Reply:
        lines = call.values.get("prompts", "")
        prompts = [line.strip() for line in lines.splitlines() if line.strip()] if isinstance(lines, str) else []
        count = _variations(call.values.get("variations", 1))
        values = form.with_prompt(call.form, prompts[0]) if prompts else call.form
        request = form.read(values, self._models)
        seeds: list[int | Auto] = [AUTO if request.seed == AUTO else int(request.seed) + n for n in range(count)]
        jobs = self._worker.submit_all(combined(request, prompts, seeds), self._owner)
        return {
            "message": f"Added to the queue: {formatting.count(len(jobs), 'video')}.",
            "added": [job.id for job in jobs],
        }

    def _hold_all(self, held: bool) -> Reply:
        self._worker.hold([job.id for job in self.jobs() if job.kind == "video"], held)
        return {"message": "Paused." if held else "Resumed."}

    def _cancel_all(self, _call: Call) -> Reply:
        ids = [job.id for job in self.jobs()]
        self._worker.cancel(ids)
        return {"message": f"Cancelled: {len(ids)}."}

    def _move(self, job: JobRecord, call: Call) -> Reply:
        """Move a waiting job past its neighbour."""
        waiting = [one.id for one in self._store.queue() if one.state == "queued"]
        place = waiting.index(job.id) if job.id in waiting else 0
        if call.action == "down":
            self._store.move(job.id, next(iter(waiting[place + 2 :]), None))
        elif place > 0:
            self._store.move(job.id, waiting[place - 1])
        return {}

    def _hold(self, job: JobRecord, call: Call) -> Reply:
        self._worker.hold([job.id], call.action == "pause")
        return {}

    def _cancel(self, job: JobRecord, _call: Call) -> Reply:
        self._worker.cancel([job.id])
        return {"message": f"{'Cancelled' if job.state == 'queued' else 'Stopping'}: {title(job)}."}

    def _edit(self, job: JobRecord, _call: Call) -> Reply:
        return {"edit": {"id": job.id, "title": title(job), "request": dict(job.request)}}

    def _save(self, job: JobRecord, call: Call) -> Reply:
        request = form.read(call.form, self._models)
        # An empty field keeps the seed.
        seed = job.request.get("seed", AUTO) if request.seed == AUTO else request.seed
        self._worker.edit(job.id, request.replace(seed=seed))
        return {"message": "Saved. The job keeps its place in the queue.", "saved": job.id}

    def _list(self) -> str:
        rows = [self._row(job) for job in self.jobs()]
        problems = (self._store.problem, self._store.unreadable if self._owner is None else None)
        return queue_html(rows, " ".join(paragraph(problem) for problem in problems if problem is not None))

    def _row(self, record: JobRecord) -> Row:
        state = {"cancel": "stopping", "pause": "pausing"}.get(record.pending, "running")
        line, percent, needs_gpus = "", None, False
        if record.state == "queued":
            state = "paused" if record.held else "waiting"
        job = self._worker.job(record.id) if record.kind == "video" else None
        if job is not None and record.state == "running":
            progress = job.progress.at(time.monotonic())
            percent = round(100 * progress.fraction)
            needs_gpus = progress.waits is not None and state == "running"
            step = f"step {progress.step} of {progress.steps}" if progress.steps else ""
            line = ", ".join(filter(None, (progress.title, step, formatting.time_left(progress.seconds_left))))
            memory = [event.fact for event in job.events if isinstance(event, OutOfMemory)]
            line = f"{line}. {paragraph(memory[-1])}" if memory else line
        elif job is not None:
            progress = job.progress
            line = f"stopped after step {progress.step} of {progress.steps}" if record.begun and progress.step else ""
        else:
            task = next((one for one in self._worker.tasks() if one.id == record.id), None)
            waits = "Starts when nothing else is queued." if record.idle and state == "waiting" else ""
            line = (task.line if task is not None else "") or waits
            percent = None if task is None or task.share is None else round(100 * task.share)
        return Row(
            id=record.id,
            title=record.prompt or record.title,
            state=state,
            video=record.kind == "video",
            line=line,
            percent=percent,
            visitor=record.owner is not None and self._owner is None,
            needs_gpus=needs_gpus,
            idle=record.idle,
        )

    def _resumable(self) -> str:
        found = self._store.list(states=_RESUMABLE, owner=self._owner, limit=_MAX_RESUMABLE)
        return resumable_html([(job, self._resume_status(job)) for job in found])


def queue_html(rows: Sequence[Row], problem: str = "") -> str:
    """Return the queue in order; `problem` is why jobs cannot be stored or read."""
    videos = [row for row in rows if row.video]
    paused = bool(videos) and all(row.state in {"paused", "pausing"} for row in videos)
    waiting = [row.id for row in rows if not row.runs and not row.idle]
    return render("queue_list.html", rows=rows, waiting=waiting, problem=problem, videos=bool(videos), paused=paused)


def resumable_html(jobs: Sequence[tuple[JobRecord, ResumeStatus]]) -> str:
    """Return the jobs that ended without a video and can be resumed."""
    return render("queue_resumable.html", jobs=[(job, status, status.memory or failure(job)) for job, status in jobs])


def _variations(given: Any) -> int:
    text_given = str(given).strip() if isinstance(given, str | int | float) else ""
    if not text_given.isascii() or not text_given.isdigit() or not 1 <= int(text_given[:9]) <= MAX_VARIATIONS:
        raise InvalidRequestError("variations", "ui.variations", given=text_given[:20], maximum=MAX_VARIATIONS)
    return int(text_given)
