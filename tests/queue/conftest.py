"""Shared fixtures of the queue's tests."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from tests.plans import no_engines
from tests.thread_queue import RunningQueue


@pytest.fixture
def queue(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[JobQueue]:
    """A running queue with one tiny model in its weights folder."""
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "tiny")
    store = JobStore(tmp_path / "jobs.sqlite")
    made = RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path), store=store)
    yield made
    made.close()
