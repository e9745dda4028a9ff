"""Videos wait while their disk is full, instead of being computed and not saved one after another."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.core.events import StepDone, WaitsForDisk
from runtime.models.spec import ModelSpec
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from runtime.ui.queue_panel import QueuePanel
from tests.facts import fact
from tests.full_disk import fill, small_disk
from tests.plans import no_engines
from tests.queue.test_worker import small
from tests.thread_queue import RunningQueue
from tests.waiting import until

Start = Callable[[Path], RunningQueue]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with space for videos, and for few files."""
    with small_disk(tmp_path / "disk", "size=100m,nr_inodes=100") as folder:
        yield folder


@pytest.fixture
def start(tiny: Callable[[str], ModelSpec], tmp_path: Path, disk: Path) -> Iterator[Start]:
    """Return a function that starts a queue with its store in a folder and its videos on the disk."""
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "weights" / "tiny")
    with contextlib.ExitStack() as stack:

        def started(folder: Path) -> RunningQueue:
            store = JobStore(folder / "jobs.sqlite")
            made = RunningQueue(tmp_path / "weights", disk / "outputs", no_engines(tmp_path), store=store)
            stack.callback(made.close)
            return made

        yield started


def reach(job: Job, event: type) -> None:
    until(lambda: any(isinstance(one, event) for one in job.events), meanwhile=lambda: job.open)


def test_videos_wait_for_space_and_can_be_cancelled_and_paused(start: Start, disk: Path, tmp_path: Path) -> None:
    queue = start(tmp_path)
    filler = fill(disk)
    cancelled, paused, made = (queue.submit(small(seed=seed)) for seed in range(3))
    reach(cancelled, WaitsForDisk)
    assert cancelled.progress.title == str(fact("event.waits_for_disk", wanted=50_000_000)).rstrip(".")
    listed = QueuePanel(queue, {}, Path())._list()
    assert cancelled.progress.title in listed and ">Waiting<" in listed and ">Running<" not in listed
    cancelled.request_cancel()
    reach(paused, WaitsForDisk)
    queue.hold([paused.id], True)
    reach(made, WaitsForDisk)
    filler.unlink()
    until(lambda: not made.open)
    assert [job.state for job in (cancelled, paused, made)] == ["cancelled", "queued", "done"]


@pytest.mark.slow
def test_a_video_whose_disk_fills_up_is_made_when_there_is_space(
    start: Start, disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = start(disk)
    (disk / "other").write_bytes(bytes(45_000_000))  # the rest is filled before the first video is done
    first, second = queue.submit(small(steps=200)), queue.submit(small())
    reach(first, StepDone)
    filler = fill(disk)
    full = f"job {first.id}: the disk is full; it is queued again"
    until(lambda: full in caplog.text, meanwhile=lambda: first.open)
    # The store is on the same disk.
    until(lambda: f"job {first.id}: its events cannot be written yet: OperationalError" in caplog.text)
    filler.unlink()
    until(lambda: not (first.open or second.open))
    assert [job.state for job in (first, second)] == ["done", "done"]


@pytest.mark.slow
def test_a_video_fails_if_its_disk_has_space_but_refuses_it(start: Start, disk: Path, tmp_path: Path) -> None:
    job = (queue := start(tmp_path)).submit(small(steps=200))
    reach(job, StepDone)
    with pytest.raises(OSError, match="No space"):
        for number in range(200):
            (disk / str(number)).touch()
    until(lambda: not job.open)
    failure = queue.store.get(job.id).failure
    assert failure is not None and failure.fact.code == "video.disk_full"
