"""The panel Queue: what runs and waits, adding several videos at once, and jobs that can be resumed."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

from runtime.core.batches import MOST_AXES, Changes, grid_of, read_axis
from runtime.core.errors import MODEL_UNUSABLE, InvalidRequestError, StoreError
from runtime.core.events import OutOfMemory
from runtime.core.facts import Fact
from runtime.core.request import AUTO, FIELDS, Auto, random_seed
from runtime.core.request_fields import Choice, Number, Prompt
from runtime.core.units import about, counted
from runtime.queue.job_queue import combined
from runtime.queue.records import VIDEOS, Durations, JobRecord, Line, State
from runtime.ui import form, formatting
from runtime.ui.formatting import paragraph, render
from runtime.ui.image_places import used_images
from runtime.ui.job_view import ResumeStatus, running_line, waiting_text
from runtime.ui.jobs_panel import JobsPanel, failure, proportions, title
from runtime.ui.panels import Call, Reply, drawn, unknown_action

MAX_VARIATIONS = 100
# The fields that the page's grid can vary, with their labels.
GRID_FIELDS: Mapping[str, str] = {
    name: declared.label
    for name, declared in FIELDS.items()
    if isinstance(declared, Number | Choice | Prompt) and name not in {form.TEMPLATE, "gpus"}
}
_MAX_RESUMABLE = 10
# Rows that are shown at first and with each "Show more".
_PAGE, _MAX_PAGES = 50, 1000
_NONE = Durations()
_RESUMABLE: tuple[State, ...] = ("interrupted", "failed")


@dataclass(frozen=True)
class Row:
    """One job or task in the queue.

    Attributes:
        title: the prompt, or the title of a task.
        state: running, pausing, stopping, waiting or paused.
        video: whether it generates a video; only those can be edited, paused and duplicated.
        line: progress as text.
        percent: progress of a running one, if it is known.
        visitor: whether a visitor submitted it.
        waits: whether it was started and waits for GPUs or disk space.
        build: whether it builds engines: it makes room for videos and has no place in the order.
        idle: whether it is a build that a video left for later.
        picture: address of its last preview, or before that of its image; empty without one.
        width, height: of the video, in pixels.
        facts: seed, size and length of the video, and the names of its images.
        sections: whether it is made in sections and can end after the current one.
        seconds: estimated time that it takes, or still takes if it runs, if that is known.
        variation: "Variation 2 of 4"; empty for a video without a group.
        follows: whether the row before it is of the same group, and has the title of both.
    """

    id: str
    title: str
    state: str
    video: bool
    line: str = ""
    percent: int | None = None
    visitor: bool = False
    waits: bool = False
    build: bool = False
    idle: bool = False
    picture: str = ""
    width: int = 16
    height: int = 9
    facts: str = ""
    sections: bool = False
    seconds: float | None = None
    variation: str = ""
    follows: bool = False

    @property
    def runs(self) -> bool:
        """Whether it has started."""
        return self.state in {"running", "pausing", "stopping"}


class QueuePanel(JobsPanel):
    """The panel; see `panels.Panel`."""

    def draw(self, call: Call, _reply: Reply) -> dict[str, str]:
        """Return the queue and the resumable jobs."""
        return drawn({"list": lambda: self._list(_shown_rows(call.view)), "resumable": self._resumable})

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
            "front": self._move,
            "move": self._move,
            "duplicate": self._duplicate,
            "pause": self._hold,
            "unpause": self._hold,
            "cancel": self._cancel,
            "finish": self._finish,
            "edit": self._edit,
            "save": self._save,
        }

    @property
    def _shown_owner(self) -> str | EllipsisType:
        """Whose jobs are in the queue that the panel shows."""
        return ... if self._owner is None else self._owner

    def _add(self, call: Call) -> Reply:
        lines = call.values.get("prompts", "")
        prompts = [line.strip() for line in lines.splitlines() if line.strip()] if isinstance(lines, str) else []
        count = _variations(call.values.get("variations", 1))
        values = form.with_prompt(call.form, prompts[0]) if prompts else call.form
        request = form.read(values, self._models)
        seeds: list[int | Auto] = [AUTO if request.seed == AUTO else int(request.seed) + n for n in range(count)]
        axes = _axes(call.values)
        if axes:
            lists: list[list[Changes]] = [[{"prompt": prompt} for prompt in prompts]] if prompts else []
            if count > 1:
                lists.append([{"seed": random_seed() if seed == AUTO else seed} for seed in seeds])
            requests = grid_of(request, axes, lists)
        else:
            requests = combined(request, prompts, seeds)
        jobs = self._worker.submit_all(requests, self._owner)
        return {
            "message": f"Added to the queue: {counted(len(jobs), 'video')}.",
            "added": [job.id for job in jobs],
        }

    def _hold_all(self, hold: bool) -> Reply:
        self._worker.hold(self._store.order.ids(kinds=VIDEOS, owner=self._shown_owner), hold)
        return {"message": "Paused." if hold else "Resumed."}

    def _cancel_all(self, _call: Call) -> Reply:
        ids = self._store.order.ids(owner=self._shown_owner)
        self._worker.cancel(ids)
        return {"message": f"Cancelled: {len(ids)}."}

    def _move(self, job: JobRecord, call: Call) -> Reply:
        """Move a waiting job: by one place, to the front, or to a place that counts from 1."""
        places: dict[str, Callable[[int], int]] = {
            "up": lambda old: old - 1,
            "down": lambda old: old + 1,
            "front": lambda _: 0,
        }
        number = 0 if call.action in places else _place(call.values.get("place"))
        place, count = self._store.order.rearrange(job.id, places.get(call.action, lambda _: number - 1))
        return {"announce": f"{title(job)} is number {place + 1} of {count}."}

    def _duplicate(self, job: JobRecord, _call: Call) -> Reply:
        """Queue the same video with a new seed, behind the job."""
        reply = self._add_again(job, 1)
        with suppress(StoreError):  # it has started
            following, _ = self._store.order.rearrange(job.id, lambda old: old)
            self._store.order.rearrange(reply["watch"], lambda _: following + 1)
        return reply

    def _hold(self, job: JobRecord, call: Call) -> Reply:
        self._worker.hold([job.id], call.action == "pause")
        return {}

    def _cancel(self, job: JobRecord, _call: Call) -> Reply:
        self._worker.cancel([job.id])
        return {"message": f"{'Cancelled' if job.state == 'queued' else 'Stopping'}: {title(job)}."}

    def _finish(self, job: JobRecord, _call: Call) -> Reply:
        self._worker.finish_early(job.id)
        return {"message": f"Ends after the current section: {title(job)}."}

    def _edit(self, job: JobRecord, _call: Call) -> Reply:
        return {"edit": {"id": job.id, "title": title(job), "request": dict(job.request)}}

    def _save(self, job: JobRecord, call: Call) -> Reply:
        request = form.read(call.form, self._models)
        # An empty field keeps the seed.
        seed = job.request.get("seed", AUTO) if request.seed == AUTO else request.seed
        self._worker.edit(job.id, request.replace(seed=seed))
        return {"message": "Saved. The job keeps its place in the queue.", "saved": job.id}

    def _list(self, most: int = _PAGE) -> str:
        owner = self._shown_owner
        jobs = self._store.order.jobs(owner=owner, limit=most)
        line = self._store.order.line(owner)
        rows = [replace(self._row(job), **place) for job, place in zip(jobs, self._variations(jobs), strict=True)]
        rest = self._store.order.seconds(sum(not row.runs for row in rows), owner)
        problems = (self._store.problem, self._store.unreadable if self._owner is None else None)
        workers = max(self._worker.videos_at_once(), 1)
        problem = " ".join(paragraph(problem) for problem in problems if problem is not None)
        return queue_html(rows, line, rest, workers, problem)

    def _variations(self, jobs: Sequence[JobRecord]) -> Iterator[Mapping[str, Any]]:
        """Yield of each job what its row shows of its group: see `Row.variation` and `Row.follows`."""
        members = self._store.groups({job.group for job in jobs if job.group is not None})
        for before, job in zip((None, *jobs), jobs, strict=False):
            ids = [] if job.group is None else list(members[job.group])
            if len(ids) < 2 or job.id not in ids:  # noqa: PLR2004 - it is alone
                yield {}
                continue
            variation = f"Variation {ids.index(job.id) + 1} of {len(ids)}"
            yield {"variation": variation, "follows": before is not None and before.group == job.group}

    def _row(self, record: JobRecord) -> Row:
        state = {"cancel": "stopping", "pause": "pausing"}.get(record.pending, "running")
        line, facts, percent, waits, seconds = "", "", None, False, None
        if record.state == "queued":
            state = "paused" if record.held else "waiting"
        job = self._worker.job(record.id) if record.kind == "video" else None
        if job is not None and record.state == "running":
            progress = job.progress.at(time.monotonic())
            percent = round(100 * progress.fraction)
            waits = progress.waits is not None and state == "running"
            seconds = job.seconds_left
            status = running_line(progress)
            line = ", ".join(filter(None, (status.title, status.detail, status.left)))
            memory = [event.fact for event in job.events if isinstance(event, OutOfMemory)]
            line = f"{line}. {paragraph(memory[-1])}" if memory else line
        elif job is not None:
            progress = job.progress
            seconds = job.seconds_left
            stopped = f"stopped after step {progress.step} of {progress.steps}" if progress.step else ""
            takes = "" if seconds is None else f"{'needs' if stopped else 'takes'} {about(seconds)}"
            line = ", ".join(filter(None, (stopped, takes)))
        else:
            task = next((candidate for candidate in self._worker.tasks() if candidate.id == record.id), None)
            if task is not None:
                line = waiting_text(task, self._worker) if state == "waiting" else task.line
                percent = None if task.share is None else round(100 * task.share)
                seconds = task.seconds_left
        if job is not None:
            plan = job.summary
            size = formatting.size(*plan.video_size)
            facts = f"Seed {plan.seed} · {size} · {plan.frames / plan.fps:.1f} s"
        images = [] if job is None else used_images(job.summary.inputs, pictures=record.owner is None)
        facts = " · ".join(filter(None, (facts, *(image.name for image in images))))
        width, height = proportions(record) if job is None else (job.summary.width, job.summary.height)
        return Row(
            id=record.id,
            title=record.prompt or record.title,
            state=state,
            video=record.kind == "video",
            line=line,
            percent=percent,
            visitor=record.owner is not None and self._owner is None,
            waits=waits,
            build=record.kind == "build",
            idle=record.idle,
            picture=self._picture(record) or next((image.picture for image in images), ""),
            width=width,
            height=height,
            facts=facts,
            sections=job is not None and job.summary.sections > 1 and not record.finish,
            seconds=seconds,
        )

    def _resumable(self) -> str:
        records = self._store.list(states=_RESUMABLE, owner=self._owner, limit=_MAX_RESUMABLE)
        able = [job for job in records if job.failure is None or job.failure.fact.code not in MODEL_UNUSABLE]
        return resumable_html([(job, self._resume_status(job)) for job in able])


def queue_html(
    rows: Sequence[Row],
    line: Line,
    rest: Durations = _NONE,
    workers: int = 1,
    problem: str = "",
) -> str:
    """Return the queue, what runs first.

    Args:
        rows: what is shown: what runs, and what runs next.
        line: how much is in the queue.
        rest: of the videos and builds that are not shown.
        workers: how many videos run at once.
        problem: why jobs cannot be stored or read.
    """
    going = line.going or any(row.video and row.state in {"running", "stopping"} for row in rows)
    places = {row.id: place for place, row in enumerate((row for row in rows if not (row.runs or row.build)), 1)}
    return render(
        "queue_list.html",
        rows=rows,
        line=line,
        places=places,
        more=line.jobs - len(rows),
        problem=problem,
        paused=bool(line.videos) and not going,
        total=_total(rows, line, rest, workers),
    )


def _total(rows: Sequence[Row], line: Line, rest: Durations, workers: int) -> str:
    """Return how much is in the queue and how long it takes, builds included, without what is paused."""
    if not line.jobs:
        return ""
    count = counted(line.jobs, "video" if line.videos == line.jobs else "job")
    going = [row for row in rows if (row.video or row.build) and row.state in {"running", "waiting"}]
    timed = [(row.build, row.seconds) for row in going if row.seconds is not None]
    if not timed and not rest.timed:
        return count
    videos = sum(seconds for build, seconds in timed if not build) + rest.videos
    # Builds run one after the other, after the videos.
    builds = sum(seconds for build, seconds in timed if build) + rest.builds
    complete = len(timed) == len(going) and rest.timed == rest.jobs
    code = "ui.queue_total" if complete else "ui.queue_total_at_least"
    return paragraph(Fact(code, {"count": count, "seconds": videos / workers + builds}))


def resumable_html(jobs: Sequence[tuple[JobRecord, ResumeStatus]]) -> str:
    """Return the jobs that ended without a video and can be resumed."""
    return render("queue_resumable.html", jobs=[(job, status, status.memory or failure(job)) for job, status in jobs])


def _axes(values: Mapping[str, Any]) -> list[list[Changes]]:
    """Return what the fields of the grid vary; a page cannot open files of its choice.

    Raises:
        InvalidRequestError: see `core.batches.read_axis`.
    """
    axes = []
    for number in range(MOST_AXES):
        name, text = values.get(f"grid_{number}", ""), values.get(f"values_{number}", "")
        if not name or not isinstance(name, str) or not isinstance(text, str):
            continue
        if name not in GRID_FIELDS:
            raise unknown_action()
        axes.append(read_axis(f"{name}={text}"))
    return axes


def _variations(value: Any) -> int:
    text_given = str(value).strip() if isinstance(value, str | int | float) else ""
    if not text_given.isascii() or not text_given.isdigit() or not 1 <= int(text_given[:9]) <= MAX_VARIATIONS:
        raise InvalidRequestError("variations", "ui.variations", given=text_given[:20], maximum=MAX_VARIATIONS)
    return int(text_given)


def _shown_rows(view: Mapping[str, Any]) -> int:
    """Return how many rows of each state a page shows; it may send anything."""
    pages = view.get("rows")
    if isinstance(pages, bool) or not isinstance(pages, int) or not 1 <= pages <= _MAX_PAGES:
        return _PAGE
    return _PAGE * pages


def _place(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise unknown_action()
    return value
