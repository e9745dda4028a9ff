"""Visitors' jobs, sessions and limits on a running queue."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.core.errors import LimitError, ModelError, TandemError
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.queue.instances import Instance
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from runtime.server.visitors import Visitors, cancel_orphaned, stop_videos, visitor_jobs
from tests.plans import no_engines, tiny_plan
from tests.thread_queue import RunningQueue
from tests.waiting import until


@pytest.fixture
def worker(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[JobQueue]:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "tiny")
    made = RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path))
    yield made
    made.close()


@pytest.fixture
def visitors(worker: JobQueue, tmp_path: Path) -> Visitors:
    settings = Settings(
        cache_dir=tmp_path, share_frames=9, share_steps=1000, share_queue=1, share_queue_all=2, share_rate=2
    )
    return Visitors(worker, settings, {"tiny": find("tiny", tmp_path / "weights")})


def long(**values: object) -> GenerationRequest:
    wanted: dict[str, object] = {"prompt": "a red boat", "model": "tiny", "width": 32, "height": 32, "frames": 5}
    return GenerationRequest.from_mapping(wanted | {"steps": 1000, "fps": 8} | values)


def end_of(job: Job) -> str:
    """Wait until a job has ended, and return how."""

    def ended() -> bool:
        job.refresh()
        return not job.open

    until(ended)
    return job.state


def test_a_visitor_waits_for_their_own_video(visitors: Visitors, worker: JobQueue) -> None:
    first = visitors.submit(long(), visitors.name_of("anna"))
    with pytest.raises(LimitError, match="You already have 1 video queued"):
        visitors.submit(long(), visitors.name_of("anna"))
    second = visitors.submit(long(), visitors.name_of("ben"))
    with pytest.raises(LimitError, match=r"The queue is full\."):
        visitors.submit(long(), visitors.name_of("cleo"))
    # The limits do not apply to the owner.
    own = worker.submit(long(steps=1))
    assert {job.id for job in visitor_jobs(worker)} == {first.id, second.id}
    assert (
        visitors.job(first.id, visitors.name_of("anna")),
        visitors.job(first.id, visitors.name_of("ben")),
        visitors.job(own.id, visitors.name_of("ben")),
    ) == (first, None, None)
    assert stop_videos(worker) == 2
    assert [end_of(job) for job in (first, second, own)] == ["cancelled", "cancelled", "done"]


def test_concurrent_submissions_do_not_exceed_the_limit(visitors: Visitors, worker: JobQueue) -> None:
    start = threading.Barrier(6)
    refused: list[TandemError] = []

    def wish() -> None:
        start.wait()
        try:
            visitors.submit(long(), visitors.name_of("anna"))
        except TandemError as error:
            refused.append(error)

    threads = [threading.Thread(target=wish) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 5
    assert len(worker.store.list(owner=visitors.name_of("anna"))) == 1


def test_visitors_jobs_are_not_the_owners(visitors: Visitors, worker: JobQueue) -> None:
    visitors.submit(long(), visitors.name_of("anna"))
    assert worker.active() is None and worker.latest() is None
    assert worker.active(visitors.name_of("anna")) is not None


def test_visitors_cannot_use_other_models(visitors: Visitors, tmp_path: Path) -> None:
    for name in (str(tmp_path / "weights" / "tiny"), "../tiny", "diorama"):
        with pytest.raises(ModelError, match="no model of that name"):
            visitors.submit(long(model=name), visitors.name_of("anna"))


def test_sessions_and_requests_are_counted(visitors: Visitors) -> None:
    assert (
        visitors.owns("one", visitors.name_of("anna"))
        and visitors.owns("one", visitors.name_of("anna"))
        and not visitors.owns("one", visitors.name_of("ben"))
    )
    allowed = [visitors.enter(visitors.name_of("anna")) for _ in range(40)]
    assert allowed.count(True) == 24 and visitors.enter(visitors.name_of("ben"))
    assert visitors.present() == 2
    for _ in range(24):
        visitors.leave(visitors.name_of("anna"))
    assert visitors.present() == 1


def test_queued_jobs_of_visitors_of_a_killed_app_are_cancelled(
    tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    store = JobStore(tmp_path / "jobs.sqlite")
    plan = tiny_plan(tiny("wan2.2-a14b"), tmp_path / "a.mp4")
    with Instance(store.path) as alive:
        owners = (f"{alive.id}-anna", "0badc0de-ben", None)
        jobs = [store.add(long(seed=1, model=plan.model), plan, owner=owner).id for owner in owners]
        cancel_orphaned(store)
        assert [store.get(job).state for job in jobs] == ["queued", "cancelled", "queued"]
    store.close()


def test_on_a_full_disk_nothing_is_queued(
    visitors: Visitors, worker: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.server.visitors.free_disk_bytes", lambda folder: 4096)
    with pytest.raises(LimitError, match="disk of this server is nearly full"):
        visitors.submit(long(), "a visitor")
    assert worker.open_videos() == []
