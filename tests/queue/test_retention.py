"""Ended videos beyond a limit are removed for good, with their files; others stay."""

import time
from pathlib import Path

import pytest

from runtime.queue import job_queue, storage
from runtime.queue.storage import Retention
from runtime.queue.store import JobStore
from tests.plans import no_engines
from tests.queue.samples import sample_plan, sample_request, sample_result
from tests.thread_queue import RunningQueue
from tests.waiting import until

DAY = 86_400.0


def made(store: JobStore, folder: Path, owner: str | None, *, done: bool = True) -> str:
    """Add a video of 100 bytes, or one that is queued."""
    job = store.add(sample_request(), sample_plan(), owner=owner, instance="app.0" if done else None)
    output = folder / f"{job.id}.mp4"
    with store.database.writing() as connection:
        connection.execute("UPDATE jobs SET output = ? WHERE id = ?", (str(output), job.id))
    if done:
        output.write_bytes(bytes(100))
        store.log.record(job.id, sample_result())
    return job.id


def left(store: JobStore, folder: Path) -> set[str]:
    """Return the videos that are left, after checking that files and rows agree."""
    jobs = store.list()
    assert {path.stem for path in folder.glob("*.mp4")} == {job.id for job in jobs if job.state == "done"}
    assert store.list(deleted=True) == []
    return {job.id for job in jobs}


def test_videos_beyond_a_limit_of_their_owner_are_removed(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    store = JobStore(tmp_path / "jobs.sqlite")
    first = [made(store, outputs, "key:a") for _ in range(4)]
    other = made(store, outputs, "key:b")
    queued = made(store, outputs, "key:a", done=False)
    everything = {*first, other, queued}
    assert storage.expire(store, Retention(), outputs) == 0
    assert storage.expire(store, Retention(videos=2), outputs, in_use={(outputs / f"{first[0]}.mp4").resolve()}) == 1
    assert left(store, outputs) == everything - {first[1]}
    assert storage.expire(store, Retention(bytes=250), outputs) == 1
    assert left(store, outputs) == {first[2], first[3], other, queued}
    store.star([first[2]], True)
    ended = store.get(other).ended
    assert ended is not None
    assert storage.expire(store, Retention(days=1), outputs, now=ended + DAY / 2) == 0
    assert storage.expire(store, Retention(days=1), outputs, now=ended + 2 * DAY) == 2
    assert left(store, outputs) == {first[2], queued}


def test_a_video_that_is_queued_again_meanwhile_stays(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.sqlite")
    job = store.add(sample_request(), sample_plan())
    store.request_cancel([job.id])
    (found,) = store.ended()
    store.resume(job.id)
    assert found.id == job.id and store.ended() == []
    assert storage.expire(store, Retention(videos=1, days=0.001), tmp_path, now=job.created + DAY) == 0
    assert store.get(job.id).state == "queued"


def test_nothing_is_removed_while_the_clock_may_be_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is set forward by years, back, and forward again: for good."""
    shift, real = 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    monkeypatch.setattr(job_queue, "_EXPIRY_SECONDS", 0.0)
    monkeypatch.setattr(job_queue, "_CLEANUP_SECONDS", 0.0)
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    store = JobStore(tmp_path / "jobs.sqlite")
    queue = RunningQueue(tmp_path, outputs, no_engines(tmp_path), store=store, start=False)
    looks: list[float | None] = []
    before = storage.ClockWatch.now

    def now(self: storage.ClockWatch) -> float | None:
        looks.append(before(self))
        return looks[-1]

    monkeypatch.setattr(storage.ClockWatch, "now", now)
    try:
        queue.retention = Retention(days=1)
        kept, deleted = made(store, outputs, None), made(store, outputs, None)
        store.delete(deleted)
        until(lambda: any(looks))
        for shift in (3000 * DAY, 0.0, -3000 * DAY, 3000 * DAY):  # noqa: B007 - read by the clock
            looks.clear()
            until(lambda: len(looks) > 2)
            assert not any(looks[1:])
            assert store.get(kept).state == "done" and [job.id for job in store.list(deleted=True)] == [deleted]
            assert (outputs / f"{kept}.mp4").exists()
        monkeypatch.setattr(storage, "_SETTLED_SECONDS", 0.0)
        until(lambda: not any(outputs.glob("*.mp4")))
        assert store.list() == store.list(deleted=True) == []
    finally:
        queue.close()
        store.close()


def test_leases_grow_whatever_the_clock_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, shift, real = JobStore(tmp_path / "jobs.sqlite"), 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    job, leases = store.add(sample_request(), sample_plan()), []
    for shift in (0.0, -3000 * DAY, 3000 * DAY, -DAY):  # noqa: B007 - read by the clock
        record = store.order.claim_job(job.id, "app.0")
        assert record is not None
        leases.append(record.lease)
        store.put_back(job.id, record.lease)
        assert not store.log.record(job.id, sample_result(), record.lease)
    assert leases == sorted(set(leases))


def test_thousands_of_folders_are_compared_with_the_store(tmp_path: Path) -> None:
    """SQLite allows 32,766 values in a statement."""
    store = JobStore(tmp_path / "jobs.sqlite")
    job = store.add(sample_request(), sample_plan())
    many = [job.id, *(f"{number:08x}" for number in range(40_000))]
    assert store.existing_ids(many) == {job.id}
    assert set(store.states(many)) == {job.id}
    assert set(store.controls(many)) == {job.id}
    assert store.purge(0.0, many) == []
