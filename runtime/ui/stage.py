"""What the stage of Make shows: a job, or all videos of its group in a grid; how pages follow it."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from runtime.core.events import Cancelled, Failed, VideoSaved
from runtime.core.facts import Fact
from runtime.queue.job_queue import JobQueue
from runtime.queue.views import Job
from runtime.server.watchers import Watch
from runtime.ui import formatting, job_view
from runtime.ui.formatting import page_text
from runtime.ui.job_view import Audience, Cell, Grid, Line, View

# At most this late, a page that has to end is noticed.
_LOOK_SECONDS = 0.5
# The time left counts down at this rate; the page takes a longer silence for a lost connection.
_TICK_SECONDS = 1.0
# Changes of a group within this time are shown together: pausing sixty videos is sixty changes.
_TOGETHER_SECONDS = 0.25
# Width of the frame, in heights.
_ASPECT = 12 / 7
# Browsers open six connections to one server, and each video that plays may take one.
_MOST_PLAYING = 4
_MOST_IN_VIEW = 16
_TEXTS = {"queued": "Waiting", "stopping": "Stopping…", "done": "", "failed": "Failed", "cancelled": "Cancelled"}

# The videos of a group, and whether each is starred; empty for a job without a group.
Members = Sequence[tuple[Job, bool]]


async def follow_views(job: Job, worker: JobQueue, audience: Audience, icon: str, watch: Watch) -> AsyncIterator[View]:
    """Yield views of a job and its group as they change, at least one a second, until all or `watch` have ended."""
    last_view, shown_at = None, 0.0
    last_key: object = None
    # From one round to the next, so that the views of ended videos stay in memory and are not read again.
    group: Members = []
    while True:
        now, count = time.monotonic(), job.changes.count
        group = [] if job.group is None else await asyncio.to_thread(worker.group, job)
        counts = {member: member.changes.count for member, _ in group if member.open} | {job: count}
        key = [(*_state(member), starred) for member, starred in [*group, (job, False)]]
        if key != last_key or now - shown_at >= _TICK_SECONDS:
            current = await asyncio.to_thread(view, job, group, worker, audience, icon, now)
            last_key, shown_at = key, now
            if watch.ended:  # meanwhile the page shows another video, which this view would replace
                return
            if current != last_view:
                last_view = current
                yield current
            if not current.busy:
                return
        await _change([member.changes.after(count, _LOOK_SECONDS) for member, count in counts.items()])
        if group:
            await asyncio.sleep(_TOGETHER_SECONDS)
        if watch.ended:
            return


def _state(job: Job) -> tuple[object, ...]:
    return job.id, job.progress, job.state, job.held, job.cancelling, job.finishing


async def _change(waits: Collection[Coroutine[Any, Any, None]]) -> None:
    """Wait until the first of some waits is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def view(job: Job, group: Members, worker: JobQueue, audience: Audience, icon: str, now: float) -> View:
    """Return what to show of a job at `now`, in seconds of the monotonic clock.

    Args:
        group: its group, as `JobQueue.group` returns it.
    """
    alone = job_view.view(job, worker, audience, icon, now)
    if not group:
        return alone
    cells = [
        _cell(number, *member, job, audience, plays=len(group) <= _MOST_PLAYING, now=now)
        for number, member in enumerate(group, 1)
    ]
    members = [member for member, _ in group]
    unfinished = [member for member in members if _is_unfinished(member)]
    columns = grid_columns(min(len(cells), _MOST_IN_VIEW), job.summary.width / job.summary.height)
    grid = Grid(cells, columns, ceil(min(len(cells), _MOST_IN_VIEW) / columns))
    size = (job.summary.width, job.summary.height)
    if unfinished:
        line = _line(members, unfinished, worker, now)
    else:
        line = job_view.status_line(job, job.progress, worker, audience, now)
        line = replace(line, detail=f"Variation {members.index(job) + 1}. {line.detail}")
    return replace(
        alone,
        picture=job_view.picture_html(None, "done", icon, size=size, grid=grid),
        status=job_view.status_html(line, job.id, panels=audience.panels),
        busy=bool(unfinished),
        stopping=line.state == "stopping",
    )


def grid_columns(videos: int, aspect: float) -> int:
    """Return in how many columns videos of these proportions are largest; of equal ones the fewest."""

    def scale(columns: int) -> float:
        return min(_ASPECT / columns / aspect, 1 / ceil(videos / columns))

    return max(range(1, videos + 1), key=lambda columns: (round(scale(columns), 6), -columns))


def _is_unfinished(job: Job) -> bool:
    """Return whether a job may still change; a view may learn of the end of its job before the job's state."""
    return job.progress.end is None and job.state != "interrupted"


def _cell(number: int, job: Job, starred: bool, shown: Job, audience: Audience, *, plays: bool, now: float) -> Cell:
    progress, end = job.progress, job.progress.end
    state, text, percent = "queued", "Paused" if job.held else "", None
    if isinstance(end, VideoSaved):
        state = "done"
    elif isinstance(end, Failed) or job.state == "interrupted":
        state = "failed"
    elif isinstance(end, Cancelled):
        state = "cancelled"
    elif job.cancelling:
        state = "stopping"
    elif job.state == "running":
        line = job_view.running_line(progress.at(now))
        state, text = "running", ", ".join(filter(None, (line.title, line.detail)))
        percent = round(100 * progress.fraction)
    address = audience.address(job) if state == "done" else ""
    poster = job_view.poster_address(job, audience) if state == "done" else ""
    return Cell(
        id=job.id,
        number=number,
        state=state,
        text=text or ("" if address else _TEXTS[state] or "The video file is missing."),
        still=poster or job_view.preview_address(progress),
        address=address if plays or job is shown else "",
        percent=percent,
        selected=job is shown,
        starred=starred,
        sound=isinstance(end, VideoSaved) and end.sound,
    )


def _line(members: Sequence[Job], unfinished: Sequence[Job], worker: JobQueue, now: float) -> Line:
    """Return the status line of a group in which some videos are not made yet."""
    ends = Counter(type(member.progress.end) for member in members)
    failed = ends[Failed] + sum(member.state == "interrupted" for member in members)
    done = Fact("ui.group_done", {"done": ends[VideoSaved], "videos": len(members)})
    rest = [Fact("ui.group_failed", {"failed": failed})] if failed else []
    rest += [Fact("ui.group_cancelled", {"cancelled": ends[Cancelled]})] if ends[Cancelled] else []
    title, detail = page_text(done).what, ", ".join(page_text(fact).what for fact in rest)
    made = [member.progress.fraction if member in unfinished else 1.0 for member in members]
    line = Line("running", title, detail, fraction=sum(made) / len(members))
    if all(member.cancelling for member in unfinished):
        return replace(line, state="stopping", left="Stopping…")
    if any(member.state == "running" for member in unfinished):
        return replace(line, left=formatting.time_left(_seconds_left(unfinished, worker)))
    waiting = next((member for member in unfinished if not member.held), None)
    paused = "Paused until you resume it."
    return replace(line, state="queued", left=paused if waiting is None else job_view.waiting_text(waiting, worker))


def _seconds_left(unfinished: Sequence[Job], worker: JobQueue) -> float | None:
    """Return about how long videos still take together, without paused ones; `None` if that is unknown for one."""
    rest: list[float] = []
    for job in unfinished:
        if job.held and job.state == "queued":
            continue
        seconds = job.seconds_left
        if seconds is None:
            return None
        rest.append(seconds)
    return max(sum(rest) / max(worker.videos_at_once(), 1), *rest)
