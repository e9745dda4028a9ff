"""What the stage shows of a group: the grid, one status line for all, and until when a page follows it."""

import asyncio
import re
from typing import Any

import pytest

from runtime.core.events import Planned, StageStarted, StepDone
from runtime.queue.job_queue import JobQueue, combined
from runtime.queue.run import ControlPoller, Run
from runtime.queue.views import Job
from runtime.server.watchers import Watch
from runtime.ui import stage
from runtime.ui.job_view import Audience, View, clip_address
from tests.queue.test_worker import small
from tests.ui.page_texts import line
from tests.ui.test_job_panels import finish, worker

__all__ = ["worker"]


AUDIENCE = Audience("", lambda job: f"video/{job.id}.mp4", clip_address)


@pytest.fixture
def jobs(worker: JobQueue) -> list[Job]:
    """Return the views of a group of four."""
    records = worker.submit_all(combined(small(prompt="a red boat"), [], [1, 2, 3, 4]))
    views = [worker.job(record.id) for record in records]
    return [view for view in views if view is not None]


def show(worker: JobQueue, job: Job) -> View:
    group = worker.group(job)
    for member, _ in group:
        member.refresh()
    return stage.view(job, group, worker, AUDIENCE, "", job.progress.now)


def states(view: View) -> list[str]:
    return re.findall(r'<li data-state="(\w+)"', view.picture)


@pytest.mark.parametrize(
    ("videos", "aspect", "columns"),
    [(4, 16 / 9, 2), (4, 1, 2), (4, 9 / 16, 4), (2, 9 / 16, 2), (3, 9 / 16, 3), (9, 16 / 9, 3), (16, 12 / 7, 4)],
)
def test_the_grid_has_the_columns_in_which_videos_are_largest(videos: int, aspect: float, columns: int) -> None:
    assert stage.grid_columns(videos, aspect) == columns


def test_a_group_is_a_grid_with_one_status_line(worker: JobQueue, jobs: list[Job]) -> None:
    view = show(worker, jobs[2])
    assert states(view) == ["queued"] * 4 and view.busy
    assert re.findall(r'data-pick="(\w+)"[^>]* aria-pressed="true"', view.picture) == [jobs[2].id] == [view.job_id]
    finish(worker, jobs[0].id)
    record = worker.store.order.claim("here")
    assert record is not None and record.plan is not None
    run = Run(record, ControlPoller(worker.store))
    run.emit(Planned(plan=record.plan))
    run.emit(StageStarted(stage="denoise", part="transformer"))
    run.emit(StepDone(step=1, of=2, seconds=30.0, part="transformer", preview=b"webp"))
    worker.store.star([jobs[3].id], True)
    view = show(worker, jobs[2])
    assert states(view) == ["done", "running", "queued", "queued"]
    assert view.picture.count("<video") == 1 and "data:image/webp;base64,d2VicA==" in view.picture
    assert re.findall(r'data-action="unstar" data-target="(\w+)"', view.picture) == [jobs[3].id]
    assert line("ui.group_done", done=1, videos=4) in view.status and re.search(r"\d (s|min|h) left", view.status)
    # A discarded video leaves; the last one is shown alone.
    for job in (jobs[0], jobs[2]):
        worker.store.delete(job.id)
    assert states(show(worker, jobs[3])) == ["running", "queued"]
    worker.store.delete(jobs[3].id)
    assert states(show(worker, jobs[1])) == []


def test_a_page_follows_a_group_until_all_have_ended(worker: JobQueue, jobs: list[Job]) -> None:
    finish(worker, jobs[0].id)
    jobs[0].refresh()

    async def follow() -> list[View]:
        views = []
        async for view in stage.follow_views(jobs[0], worker, AUDIENCE, "", Watch()):
            views.append(view)
            unfinished = [job for job in jobs if job.open]
            if unfinished:
                worker.store.request_cancel([unfinished[0].id])
                unfinished[0].refresh()
        return views

    views = asyncio.run(follow())
    assert [view.busy for view in views] == [True] * 3 + [False]
    assert states(views[-1]) == ["done"] + ["cancelled"] * 3
    assert line("ui.group_cancelled", cancelled=2) in views[2].status


def test_a_view_is_not_sent_once_the_page_shows_another_video(
    worker: JobQueue, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, view_of = Watch(), stage.view

    def view(*arguments: Any) -> View:
        watch.ended = True  # the page's next watch begins while this view is made
        return view_of(*arguments)

    async def follow() -> list[View]:
        return [shown async for shown in stage.follow_views(jobs[0], worker, AUDIENCE, "", watch)]

    monkeypatch.setattr(stage, "view", view)
    assert asyncio.run(follow()) == []
