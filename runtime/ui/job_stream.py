"""From a job to what the page shows of it. Watching changes nothing: a page that goes away leaves its job alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from runtime.core.events import Cancelled, Event, Failed, TerminalEvent, VideoSaved
from runtime.core.facts import Fact, render
from runtime.core.progress import Progress
from runtime.queue.service import Job, JobQueue
from runtime.ui import acceleration, player, result_view
from runtime.ui.resume_status import standing

# A page looks at its job this often, at rest in between: no thread waits, however many pages watch.
_LOOK_SECONDS = 0.2
# The time left counts down at this pace, and the page takes silence for longer as a lost connection.
_TICK_SECONDS = 1.0
_API_LOOK_SECONDS = 0.05

_INTERRUPTED = "Tandem ended while this video was made."


@dataclass(frozen=True)
class Audience:
    """To whom jobs are shown.

    Attributes:
        details: where the details of a defect are, in a sentence.
        address: returns where the video of a job that is done is served.
        may_hear: returns what of a message may be told.
        desk: whether their page has a desk, which can take up jobs again.
    """

    details: str
    address: Callable[[Job], str]
    redact: Callable[[str], str] = str
    desk: bool = True


@dataclass(frozen=True)
class View:
    """Everything a page shows of a job, ready to compare with what it shows already."""

    picture: str
    status: str
    facts: str
    busy: bool
    stopping: bool
    job_id: str


def view(job: Job, worker: JobQueue, audience: Audience, icon: str, now: float) -> View:
    """Return what to show of `job` at `now` (seconds of the monotonic clock)."""
    progress = job.progress
    line = _line(job, progress, worker, audience, now)
    address = audience.address(job) if line.state == "done" else ""
    return View(
        picture=player.picture(progress, line.state, icon, address),
        status=player.status(line, job.id, desk=audience.desk),
        facts=_facts(job, progress, address, audience),
        busy=progress.end is None and job.state != "interrupted",
        stopping=line.state == "stopping",
        job_id=job.id,
    )


async def follow_views(job: Job, worker: JobQueue, audience: Audience, icon: str) -> AsyncIterator[View]:
    """Yield views of a job as it changes, about once a second at least while denoising, up to the last one."""
    shown, shown_at = None, 0.0
    seen: object = None
    while True:
        now = time.monotonic()
        key = (job.progress, job.state, job.held, job.cancelling)
        if key != seen or now - shown_at >= _TICK_SECONDS:
            current = await asyncio.to_thread(view, job, worker, audience, icon, now)
            seen, shown_at = key, now
            if current != shown:
                shown = current
                yield current
            if not current.busy:
                return
        await asyncio.sleep(_LOOK_SECONDS)


async def follow_events(job: Job) -> AsyncIterator[Event]:
    """Yield every event of a job, up to and with the terminal one."""
    seen = 0
    while True:
        interrupted, events = job.state == "interrupted", job.events
        seen = min(seen, len(events))  # a job that was paused tells anew
        for event in events[seen:]:
            seen += 1
            yield event
            if isinstance(event, TerminalEvent):
                return
        if interrupted:
            yield Failed(fact=_interrupted(job))
            return
        await asyncio.sleep(_API_LOOK_SECONDS)


def _interrupted(job: Job) -> Fact:
    # A visitor has no command line here.
    return Fact("ui.interrupted" if job.owner is None else "ui.visitor_interrupted", {"job": job.id})


def _facts(job: Job, progress: Progress, address: str, audience: Audience) -> str:
    if isinstance(progress.end, VideoSaved):
        return audience.redact(result_view.facts(progress.end, job.plan, job.model_title, address))
    # A warning is worth most while the job can still be stopped.
    return (
        audience.redact(result_view.notes([render(fact).what for fact in progress.warnings]))
        if job.open and progress.warnings
        else ""
    )


def _line(job: Job, progress: Progress, worker: JobQueue, audience: Audience, now: float) -> player.Line:
    end = progress.end
    if isinstance(end, VideoSaved):
        return player.Line("done", "Done", f"The video is ready. Seed {end.request['seed']}.", fraction=1.0)
    if isinstance(end, Cancelled):
        return _resumable(player.Line("cancelled", "Cancelled.", "Nothing was saved."), job)
    if isinstance(end, Failed):
        remedy = audience.details if end.internal else end.remedy
        what, remedy = (acceleration.in_form_words(audience.redact(said)) for said in (end.what, remedy))
        return _resumable(player.Line("failed", what=what, remedy=remedy), job)
    if job.state == "interrupted":
        return _resumable(player.Line("failed", what=_INTERRUPTED), job)
    if job.cancelling:
        return player.Line("stopping", "Stopping…", fraction=progress.fraction)
    if job.held:
        return player.Line("queued", "Paused", "It goes on when it is let.", fraction=progress.fraction)
    if job.state == "queued":
        ahead = worker.ahead(job)
        what = "video" if all(one.kind == "video" for one in ahead) else "task"
        others = f"1 {what} is" if len(ahead) == 1 else f"{len(ahead)} {what}s are"
        return player.Line("queued", "Waiting", f"{others} ahead." if ahead else "Starting.")
    return player.running(progress.at(now))


def _resumable(line: player.Line, job: Job) -> player.Line:
    """Return the line of a job that ended without a video, with what of it is kept and how it can go on."""
    stands = standing(job.events, job.kept)
    return replace(line, kept=stands.kept, resumable=True, way=stands.way)
