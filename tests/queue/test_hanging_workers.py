"""Workers that are stopped or hang are killed after a bounded time; their jobs are cancelled or continue."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from runtime.core.errors import StoreError
from runtime.core.events import VideoSaved
from runtime.core.facts import Fact
from runtime.engines import child
from runtime.models.spec import ModelSpec
from runtime.queue import recovery, supervisor
from runtime.queue.store import NAME
from tests.queue.planted import Planted
from tests.queue.test_worker import small
from tests.queue.test_worker_process import App
from tests.waiting import stop_process, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="signals")]


@pytest.fixture
def app(
    forked_children: None, tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[App]:
    """An app whose workers may be silent for two seconds, or for one if they should stop."""
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "weights" / "tiny")
    for name, value in {
        "_START_METHOD": child._START_METHOD,
        "_MOST_DELAY_SECONDS": 0.05,
        "_LOOK_SECONDS": 0.1,
    }.items():
        monkeypatch.setattr(supervisor, name, value)
    monkeypatch.setattr(supervisor, "_SILENT_STOPPING_SECONDS", 1.0)
    made = App(tmp_path, Planted(tmp_path / "planted", monkeypatch))
    yield made
    made.queue.close()


def stop(app: App) -> int:
    """Stop the worker, but not its threads' data: it keeps its job and answers nothing."""
    pid = app.queue.worker_pids()[0]
    stop_process(pid, app.outputs.parent / NAME)
    return pid


def test_a_cancelled_job_of_a_stopped_worker_ends_and_the_next_one_runs(app: App) -> None:
    stopped, following = app.queue.submit(small(steps=1000)), app.queue.submit(small(steps=2))
    app.wait_for_step(stopped)
    pid = stop(app)
    stopped.request_cancel()
    until(lambda: not stopped.open)
    assert stopped.state == "cancelled"
    until(lambda: not following.open)
    assert isinstance(following.progress.end, VideoSaved)
    assert app.queue.worker_pids()[0] != pid


def test_the_job_of_a_stopped_worker_continues_in_another_one(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SILENT_SECONDS", 2.0)
    job = app.queue.submit(small(steps=40))
    app.wait_for_step(job)
    stop(app)
    until(lambda: not job.open)
    assert isinstance(job.progress.end, VideoSaved)
    assert app.died_in(job) == [("denoise", Fact("queue.exit_not_responding", {"seconds": 2.0}))]


def test_a_build_or_video_of_a_worker_that_does_not_stop_is_queued_again_at_the_end(app: App) -> None:
    job = app.queue.submit(small(steps=1000))
    app.wait_for_step(job)
    pid = stop(app)
    app.queue.close()
    record = app.store.get(job.id)
    assert (record.state, record.begun, app.store.log.deaths(job.id)) == ("queued", True, [])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_job_that_runs_on_after_its_cancellation_is_killed(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOPPING_SECONDS", 1.0)
    app.planted.add("hang", event="StepDone", step=2)
    job = app.queue.submit(small(steps=5))
    until(lambda: app.planted.pending() == 0)
    job.request_cancel()
    until(lambda: not job.open)
    assert job.state == "cancelled"


def test_a_worker_that_was_stopped_together_with_the_app_is_not_killed(app: App) -> None:
    until(app.queue.worker_pids)
    job = app.queue.submit(small(steps=1))
    until(lambda: not job.open)
    slots = app.queue._supervisor._slots  # type: ignore[union-attr]
    # The supervisor's own look is late by hours, such as after SIGSTOP for both.
    app.queue._supervisor._looked -= 7200  # type: ignore[union-attr]
    time.sleep(0.5)
    assert slots[0].silent < supervisor.SILENT_SECONDS
    assert app.queue.worker_pids()


@pytest.mark.parametrize(
    ("error", "state"),
    [(OSError(107, "Transport endpoint is not connected"), "running"), (ValueError("unexpected"), "interrupted")],
)
def test_workers_are_restarted_after_an_unexpected_exception(
    app: App, monkeypatch: pytest.MonkeyPatch, error: Exception, state: str
) -> None:
    job = app.queue.submit(small(steps=1000))
    app.wait_for_step(job)
    with monkeypatch.context() as broken:
        broken.setattr(recovery, "sweep", Mock(side_effect=error))
        app.kill()
        until(lambda: app.store.get(job.id).state == state, seconds=30)
    following = app.queue.submit(small(steps=1))
    app.queue.cancel([job.id])
    until(lambda: not following.open, seconds=60)
    assert isinstance(following.progress.end, VideoSaved)


def test_a_store_that_cannot_be_used_for_a_while_delays_the_restart(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    job = app.queue.submit(small(steps=1000))
    app.wait_for_step(job)
    settle, calls = recovery.settle_worker, []

    def fail(*values: object, **more: object) -> None:
        calls.append(values)
        if len(calls) < 3:
            raise StoreError("queue.store_locked", file="jobs.sqlite")
        settle(*values, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "settle_worker", fail)
    app.kill()
    assert len(calls) == 3
    job.request_cancel()
    until(lambda: not job.open)
