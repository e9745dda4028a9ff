"""The queue and its worker: order of jobs, watchers, cancelling, and plans of other versions or GPUs."""

import shutil
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.events import Cancelled, Event, Failed, StepDone, TerminalEvent, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.models.spec import ModelSpec
from runtime.queue.job_planning import move_to_gpu
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from tests.plans import GIB, machine, no_engines
from tests.plans import gpu as a_gpu
from tests.queue.samples import sample_plan
from tests.thread_queue import RunningQueue
from tests.waiting import until


def stored(folder: Path) -> JobStore:
    """Open the store in a folder again, as another process does."""
    return JobStore(folder / "jobs.sqlite")


def watch(job: Job) -> Iterator[Event]:
    """Yield all events of a job, up to and including the terminal one."""
    seen = 0
    while True:
        for event in job.events[seen:]:
            yield event
            if isinstance(event, TerminalEvent):
                return
            seen += 1
        time.sleep(0.002)


def small(**values: object) -> GenerationRequest:
    """Return a request for a tiny clip."""
    wanted: dict[str, object] = {"prompt": "a red boat", "model": "tiny", "width": 32, "height": 32, "frames": 5}
    return GenerationRequest.from_mapping(wanted | {"steps": 2, "fps": 8} | values)


def test_jobs_run_in_order_and_every_watcher_sees_all_events(queue: JobQueue) -> None:
    jobs = [queue.submit(small(seed=n)) for n in range(3)]
    seen: list[list[object]] = [[], []]
    watchers = [threading.Thread(target=lambda to=to: to.extend(watch(jobs[1]))) for to in seen]
    for watcher in watchers:
        watcher.start()
    ends = [list(watch(job))[-1] for job in jobs]
    for watcher in watchers:
        watcher.join()
    assert all(isinstance(end, VideoSaved) for end in ends)
    assert [job.state for job in jobs] == ["done"] * 3
    assert seen[0] == seen[1] == jobs[1].events
    videos = [job.plan.output for job in jobs]
    assert len(set(videos)) == 3
    assert all(video.is_file() for video in videos)
    assert queue.active() is None
    assert queue.latest() is jobs[2]


@pytest.mark.slow
def test_only_the_newest_ended_jobs_stay_in_memory(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.queue.job_queue._ENDED_JOBS", 2)
    jobs = [queue.submit(small(seed=n)) for n in range(5)]
    until(lambda: not any(job.open for job in jobs))
    until(lambda: list(queue._jobs) == [job.id for job in jobs[-2:]])
    # A job that is followed has one view.
    assert queue.job(jobs[0].id) is jobs[0]
    first = weakref.ref(jobs.pop(1))
    until(lambda: first() is None)


def test_an_invalid_request_is_refused_at_submission(queue: JobQueue) -> None:
    with pytest.raises(InvalidRequestError):
        queue.submit(small(width=33))
    with pytest.raises(ModelError):
        queue.submit(small(model="none"))
    assert queue.latest() is None


def test_running_and_queued_jobs_are_cancelled(queue: JobQueue) -> None:
    running, waiting, last = (queue.submit(small(steps=steps)) for steps in (1000, 1000, 2))
    assert list(queue.ahead(last)) == [running.id, waiting.id]
    waiting.request_cancel()
    assert list(watch(waiting)) == [Cancelled()]
    next(event for event in watch(running) if isinstance(event, StepDone))
    assert queue.active() is running
    assert len(queue.ahead(last)) == 1
    running.request_cancel()
    assert isinstance(list(watch(last))[-1], VideoSaved)
    assert (running.state, waiting.state, last.state) == ("cancelled", "cancelled", "done")
    ends = [event for job in (running, waiting, last) for event in job.events if isinstance(event, TerminalEvent)]
    assert len(ends) == 3


def test_closing_a_queue_in_memory_cancels_jobs(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "weights" / "tiny")
    queue = RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path))
    jobs = [queue.submit(small(steps=1000)) for _ in range(2)]
    queue.close()
    assert [job.state for job in jobs] == ["cancelled", "cancelled"]
    assert list((tmp_path / "outputs").iterdir()) == []


def test_a_broken_torch_fails_the_job_and_the_worker_continues(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "weights" / "tiny")
    monkeypatch.setitem(sys.modules, "runtime.pipeline.run", None)
    queue = RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path))
    end = list(watch(queue.submit(small())))[-1]
    assert isinstance(end, Failed)
    assert end.fact.code == "queue.pytorch_broken"
    monkeypatch.undo()
    assert isinstance(list(watch(queue.submit(small())))[-1], VideoSaved)
    queue.close()


def test_memory_of_the_worker_counts_as_free(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(gib: float) -> int:
        monkeypatch.setattr("runtime.queue.job_queue.probe", lambda: machine(ram_free_gib=gib))
        return queue.submit(small(steps=1)).plan.free_bytes

    list(watch(queue.submit(small(steps=1))))  # a worker that runs jobs has registered
    assert 10 * GIB + (50 << 20) < free(10) < 20 * GIB
    assert free(24) == 24 * GIB


def test_a_job_with_a_plan_of_another_version_is_replanned(queue: JobQueue, tmp_path: Path) -> None:
    busy, old, broken, last = (queue.submit(small(steps=steps)) for steps in (1000, 2, 2, 2))
    queue.close()
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        connection.execute("UPDATE jobs SET plan = '{}' WHERE id IN (?, ?)", (old.id, broken.id))
        connection.execute("UPDATE jobs SET request = '{\"a\": 1}' WHERE id = ?", (broken.id,))
        connection.execute("UPDATE jobs SET state = 'cancelled' WHERE id = ?", (busy.id,))
    connection.close()
    again = RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path), store=stored(tmp_path))
    following = again.job(last.id)
    assert following is not None
    assert isinstance(list(watch(following))[-1], VideoSaved)
    again.close()
    assert [stored(tmp_path).get(job.id).state for job in (old, broken)] == ["done", "failed"]
    failed = stored(tmp_path).get(broken.id).failure
    assert failed is not None and failed.fact.code == "request.unknown_field"
    assert failed.fact.data["field"] == "'a'"


@pytest.mark.parametrize(
    ("device", "gpu", "gpus", "moved"),
    [
        ("cuda:0", 0, 1, "cuda:0"),
        ("cuda:0", 1, 2, "cuda:1"),
        ("cuda:1", 0, 1, "cuda:0"),
        ("cuda:0", 0, 0, None),
        ("cpu", 0, 0, "cpu"),
        ("cpu", 1, 2, "cpu"),
    ],
)
def test_a_plan_is_moved_to_a_free_gpu(device: str, gpu: int, gpus: int, moved: str | None) -> None:
    plan = sample_plan()
    for name in plan.components:
        plan = plan.with_component(name, plan.components[name].replace(device=device))
    found = move_to_gpu(plan, gpu, replace(machine(), gpus=(a_gpu(),) * gpus))
    assert (found and {part.device for part in found.components.values()}) == (moved and {moved})


def test_a_job_whose_row_is_gone_is_followed_no_more(queue: JobQueue) -> None:
    job = queue.submit(small())
    queue.hold([job.id], True)
    with queue.store.database.writing() as connection:
        connection.execute("DELETE FROM jobs WHERE id = ?", (job.id,))
    until(lambda: not job.open)
    assert queue.job(job.id) is None
