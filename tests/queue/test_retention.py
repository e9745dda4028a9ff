"""Ended videos beyond a limit are removed for good, with their files; others stay."""

from pathlib import Path

from runtime.queue import storage
from runtime.queue.storage import Retention
from runtime.queue.store import JobStore
from tests.queue.samples import sample_plan, sample_request, sample_result

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
    assert storage.expire(store, Retention(videos=2), outputs, in_use={first[0]}) == 1
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


def test_thousands_of_folders_are_compared_with_the_store(tmp_path: Path) -> None:
    """SQLite allows 32,766 values in a statement."""
    store = JobStore(tmp_path / "jobs.sqlite")
    job = store.add(sample_request(), sample_plan())
    many = [job.id, *(f"{number:08x}" for number in range(40_000))]
    assert store.existing_ids(many) == {job.id}
    assert set(store.states(many)) == {job.id}
    assert set(store.controls(many)) == {job.id}
    assert store.purge(0.0, many) == []
