"""The panels Queue and History while the cache is read-only: every action is refused, and nothing is lost."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.queue.store import JobStore
from tests.full_disk import fail, failing, repair
from tests.plans import no_engines
from tests.thread_queue import RunningQueue
from tests.ui.test_job_panels import Panels, act, add, finish


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cache"
    folder.mkdir()
    with failing(folder, tmp_path / "image") as done:
        if not done:
            pytest.skip("needs root, ext4 and loop devices")
        yield folder


def columns(store: JobStore) -> dict[str, Any]:
    """Return all that the panels change."""
    jobs = [*store.list(), *store.list(deleted=True)]
    return {job.id: (job.state, job.held, job.pending, job.starred, job.deleted, job.request) for job in jobs}


def test_a_disk_that_becomes_read_only_loses_nothing(
    tiny: Callable[[str], ModelSpec], cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "tiny")
    models = {"tiny": find("tiny", tmp_path / "weights")}
    store = JobStore(cache / "jobs.sqlite")
    worker = RunningQueue(tmp_path / "weights", cache / "outputs", no_engines(tmp_path), store=store)
    worker.close()
    desk = Panels.over(worker, models, cache / "outputs")
    done = add(worker, "done")
    finish(worker, done)
    checkpoints = store.folder(done)
    assert checkpoints is not None
    checkpoints.mkdir(parents=True)
    (checkpoints / "checkpoint.safetensors").write_bytes(b"x" * 1000)
    deleted, running, waiting, paused = (add(worker, name) for name in ("deleted", "running", "waiting", "paused"))
    store.delete(deleted)
    store.hold([paused], True)
    assert (claimed := store.order.claim("here")) is not None and claimed.id == running
    before = columns(store)
    fail(cache)
    for action, target in (
        ("cancel", running), ("cancel", waiting), ("cancel-all", ""), ("pause", running), ("pause", waiting),
        ("unpause", paused), ("pause-all", ""), ("front", paused), ("save", waiting), ("duplicate", waiting),
        ("add", ""),
    ):  # fmt: skip
        parts, reply = act(desk, action, target)
        assert reply["error"] and "read-only" in reply["message"].lower(), (action, reply["message"])
        assert "waiting" in parts["list"] and "running" in parts["list"]
    for action, target in (
        ("star", done), ("delete", done), ("restore", deleted), ("purge", ""), ("again", done),
        ("remove-checkpoints", ""),
    ):  # fmt: skip
        _, reply = act(desk, action, target, tab="history")
        assert reply["error"] and "read-only" in reply["message"].lower(), (action, reply["message"])
    assert "done" in act(desk, "refresh", tab="history")[0]["gallery"]
    store.close()
    repair(cache, tmp_path / "image")
    again = JobStore(cache / "jobs.sqlite")
    assert columns(again) == before
    again.star([done], True)
    assert again.get(done).starred
    again.close()
