"""Jobs resumed with other settings, and disk usage of jobs."""

import time
from pathlib import Path

import pytest

from runtime.core.errors import InvalidRequestError, StoreError
from runtime.core.events import Cancelled, Resumed, VideoSaved
from runtime.queue import storage
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from tests.queue.samples import add_job, sample_result
from tests.queue.test_worker import small, stored, watch
from tests.waiting import until


def end(job: Job) -> object:
    return list(watch(job))[-1]


@pytest.mark.slow
def test_a_cancelled_job_resumes_with_other_settings(queue: JobQueue) -> None:
    job = queue.submit(small(seed=3, steps=60, width=64, height=64))
    until(lambda: job.progress.step >= 2, pause=0.005)
    job.request_cancel()
    assert isinstance(end(job), Cancelled)
    with pytest.raises(InvalidRequestError):
        queue.resume(job.id, {"offload": "somehow"})
    assert queue.store.get(job.id).state == "cancelled"
    again = queue.resume(job.id, {"on_out_of_memory": "any"})
    events = list(watch(again))
    assert isinstance(events[-1], VideoSaved)
    assert next(event for event in events if isinstance(event, Resumed)).step >= 2
    assert queue.store.get(job.id).request["on_out_of_memory"] == "any"
    with pytest.raises(StoreError) as refused:
        queue.resume(job.id, {"on_out_of_memory": "retry"})
    assert refused.value.code == "queue.job_done"


def finished(store: JobStore, size: int) -> str:
    """Add a finished job that has a checkpoint."""
    made = add_job(store)
    store.order.claim("here")
    store.log.record(made.id, sample_result())
    folder = store.folder(made.id)
    assert folder is not None
    folder.mkdir(parents=True)
    (folder / "checkpoint.safetensors").write_bytes(b"x" * size)
    return made.id


def test_disk_usage_is_measured_and_freed(tmp_path: Path) -> None:
    store = stored(tmp_path)
    ids = [finished(store, size) for size in (1000, 2000)]
    waits = add_job(store)
    spared = store.folder(waits.id)
    assert spared is not None
    spared.mkdir()
    (spared / "checkpoint.safetensors").write_bytes(b"x" * 500)
    found = storage.measure(store, None)
    assert (found.checkpoint_bytes, found.finished_bytes, found.deleted) == (3500, 3000, 0)
    assert storage.measure(store, "visitor") == storage.DiskUsage()
    store.delete(ids[1])
    found = storage.measure(store, None)
    assert (found.finished_bytes, found.deleted, found.deleted_bytes) == (1000, 1, 2000)
    assert storage.remove_finished_checkpoints(store, None) == 1000
    assert storage.measure(store, None).checkpoint_bytes == 500
    store.undelete(ids[1])
    assert storage.checkpoint_bytes(store, ids[1]) == 2000


def test_age_counts_from_the_end_and_open_jobs_have_none(tmp_path: Path) -> None:
    store = stored(tmp_path)
    old = finished(store, 1)
    add_job(store)
    assert storage.older_than(store, None, 1) == []
    later = time.time() + 2 * 86_400
    assert [job.id for job in storage.older_than(store, None, 1, later)] == [old]
    assert storage.older_than(store, "visitor", 1, later) == []
    assert storage.measure(store, None, (1, 7), later).old == {1: (1, 0)}
