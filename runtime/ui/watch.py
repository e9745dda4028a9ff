"""From a job to what the page shows of it. Watching changes nothing: a page that goes away leaves its job alone."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from runtime.core.events import Cancelled, Event, Failed, TerminalEvent, VideoSaved
from runtime.core.progress import Progress
from runtime.jobs.worker import Job, Worker
from runtime.ui import facts, stage

# A page looks at its job this often, at rest in between: no thread waits, however many pages watch.
_LOOK_SECONDS = 0.2
# The time left counts down at this pace, and the page takes silence for longer as a lost connection.
_TICK_SECONDS = 1.0
_API_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class View:
    """Everything a page shows of a job, ready to compare with what it shows already."""

    picture: str
    status: str
    facts: str
    busy: bool
    stopping: bool
    job_id: str


def view(job: Job, worker: Worker, log_file: Path, icon: str, now: float) -> View:
    """Return what to show of `job` at `now` (seconds of the monotonic clock)."""
    progress = job.progress
    line = _line(job, progress, worker, log_file, now)
    return View(
        picture=stage.picture(progress, line.state, icon),
        status=stage.status(line, job.id),
        facts=_facts(job, progress),
        busy=progress.end is None,
        stopping=line.state == "stopping",
        job_id=job.id,
    )


async def follow_views(job: Job, worker: Worker, log_file: Path, icon: str) -> AsyncIterator[View]:
    """Yield views of a job as it changes, about once a second at least while denoising, up to the last one."""
    shown, shown_at = None, 0.0
    seen: object = None
    while True:
        now = time.monotonic()
        key = (job.progress, job.state, job.cancel.requested)
        if key != seen or now - shown_at >= _TICK_SECONDS:
            current = view(job, worker, log_file, icon, now)
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
        for event in job.events[seen:]:
            seen += 1
            yield event
            if isinstance(event, TerminalEvent):
                return
        await asyncio.sleep(_API_LOOK_SECONDS)


def _facts(job: Job, progress: Progress) -> str:
    if isinstance(progress.end, VideoSaved):
        return facts.facts(progress.end, job.plan, job.spec.title)
    # A warning is worth most while the job can still be stopped.
    return facts.notes(progress.warnings) if progress.end is None and progress.warnings else ""


def _line(job: Job, progress: Progress, worker: Worker, log_file: Path, now: float) -> stage.Line:
    end = progress.end
    if isinstance(end, VideoSaved):
        return stage.Line("done", "Done", f"The video is ready. Seed {end.request['seed']}.", fraction=1.0)
    if isinstance(end, Cancelled):
        return stage.Line("cancelled", "Cancelled.", "Nothing was saved.")
    if isinstance(end, Failed):
        remedy = f"The log has the details: {log_file}" if end.defect else end.remedy
        return stage.Line("failed", what=end.what, remedy=remedy)
    if job.cancel.requested:
        return stage.Line("stopping", "Stopping…", fraction=progress.fraction)
    if job.state == "queued":
        ahead = worker.ahead(job)
        what = "video" if all(isinstance(one, Job) for one in ahead) else "task"
        others = f"1 {what} is" if len(ahead) == 1 else f"{len(ahead)} {what}s are"
        return stage.Line("queued", "Waiting", f"{others} ahead." if ahead else "Starting.")
    return stage.running(progress.at(now))
