"""Shared fixtures of the queue's tests."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from tests.plans import no_engines
from tests.thread_queue import RunningQueue


class _WithoutSync(sqlite3.Connection):
    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Run a statement, without one that has changes wait for the disk."""
        if sql.startswith("PRAGMA synchronous"):
            sql = "PRAGMA synchronous = OFF"
        return super().execute(sql, parameters)


@pytest.fixture(autouse=True)
def fast_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write stores without waiting for the disk, which matters only after a power failure."""
    monkeypatch.setattr("sqlite3.connect", partial(sqlite3.connect, factory=_WithoutSync))


@pytest.fixture
def engines(tmp_path: Path) -> EngineService:
    """An empty library."""
    return EngineService(EngineStore(tmp_path / "engines", 10**10), probe(), tmp_path)


@pytest.fixture
def spec(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> ModelSpec:
    """A tiny model in the weights folder."""
    folder = tmp_path / "weights" / "tiny"
    shutil.copytree(tiny("wan2.1").directory, folder)
    return read_spec(folder, "tiny")


@pytest.fixture
def queue(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[JobQueue]:
    """A running queue with one tiny model in its weights folder."""
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "tiny")
    store = JobStore(tmp_path / "jobs.sqlite")
    made = RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path), store=store)
    yield made
    made.close()
