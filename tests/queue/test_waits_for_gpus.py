"""A job that takes several GPUs says that it waits for them, and how many are free; it can be cancelled meanwhile."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from runtime.cli.jobs import details, listing
from runtime.core.events import Cancelled, Event, Planned, WaitsForGpus
from runtime.core.progress import Progress
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import resolve
from runtime.queue.execution import ControlPoller, Planner
from runtime.queue.gpu_pool import Pool
from runtime.queue.job import Job
from runtime.queue.opening import open_store
from runtime.queue.records import VIDEOS, JobRecord
from runtime.queue.runner import Runner, RunnerContext
from runtime.queue.service import JobQueue
from runtime.queue.store import JobStore
from runtime.ui import job_stream
from runtime.ui.jobs_presenter import Shown
from tests.planner.test_parallelism import FOUR
from tests.ui.test_job_stream import AUDIENCE
from tests.waiting import until


class Waiting(NamedTuple):
    """A job that one runner of four has taken, where it needs all of them."""

    store: JobStore
    pool: Pool
    job: Job


class OneJob:
    """Stands in for the worker where only its one job is asked for."""

    def __init__(self, job: Job, store: JobStore) -> None:
        self._job = job
        self.store = store

    def job(self, _: str) -> Job:
        return self._job


@pytest.fixture
def waiting(tiny: Callable[[str], ModelSpec], cache_dir: Path) -> Iterator[Waiting]:
    """Nothing runs on the GPUs: they are numbers."""
    weights = cache_dir / "weights"
    shutil.copytree(tiny("wan2.2-a14b").directory, weights / "tiny")
    request = GenerationRequest.from_mapping(
        {"prompt": "a red boat", "model": "tiny", "gpus": 4, "seed": 1, "width": 32, "height": 32, "frames": 5}
    )
    engines = EngineService(EngineStore(cache_dir / "engines", 10**9), FOUR, cache_dir)
    store = open_store(cache_dir)
    plan = resolve(request, look_up("tiny", weights), FOUR, cache_dir / "x.mp4")
    assert plan.gpus == 4
    job = Job(store.add(request, plan), plan, "Tiny", store)
    pool, wishes = Pool(range(4)), ControlPoller(store)

    def no_task(record: JobRecord) -> None:
        raise AssertionError(record)

    desk = RunnerContext(
        store,
        "00000000",
        Planner(weights, engines, None),
        wishes,
        engines,
        None,
        lambda _: job,
        no_task,  # type: ignore[arg-type]  # there is none
        lambda: FOUR,
        pool,
    )
    runner = Runner(desk, 0, VIDEOS)
    with wishes.listening():
        runner.start()
        yield Waiting(store, pool, job)
        runner.stop()
        runner.join()


def waits(job: Job) -> list[Event]:
    """Return what it told, once it waits for the others."""
    return [event for event in job.events if isinstance(event, WaitsForGpus)]


def test_it_says_how_many_are_free_and_can_be_cancelled(
    waiting: Waiting, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pool, job = waiting
    monkeypatch.setattr("runtime.queue.recovery.recover", lambda *_: None)  # it would call this test a dead process
    until(lambda: pool.asked(1), meanwhile=lambda: job.open)
    assert waits(job) == [WaitsForGpus(wanted=4, free=1)]
    pool.lend(1)
    pool.lend(3)
    until(lambda: waits(job)[-1] == WaitsForGpus(wanted=4, free=3))
    assert job.state == "running"
    # The page: its line, and the queue's.
    worker = cast(JobQueue, OneJob(job, store))
    line = job_stream.view(job, worker, AUDIENCE, "<svg></svg>", job.progress.now).status
    assert "<strong>Waiting for 4 GPUs: 3 free</strong>" in line
    queue = Shown(worker, Path())._line()
    assert "Waiting for 4 GPUs: 3 free" in queue
    assert ">Waiting<" in queue and ">Running<" not in queue
    # The command line, and another process.
    (row,) = listing([], "")["jobs"]
    assert (row["state"], row["waits"]) == ("running", "Waiting for 4 GPUs: 3 free.")
    assert "Waiting for 4 GPUs: 3 free." in capsys.readouterr().err.replace("\n", " ")
    assert "WaitsForGpus" in str(details(job.id, with_prompt=False)["job"]["events"])
    elsewhere = Job(store.get(job.id), job.plan, "Tiny", store)
    elsewhere.refresh()
    assert elsewhere.progress.title == "Waiting for 4 GPUs: 3 free"

    job.cancel.request()
    until(lambda: job.state == "cancelled")
    assert job.events[-1] == Cancelled()
    assert not any(isinstance(event, Planned) for event in job.events)
    until(lambda: all(pool.has(gpu) for gpu in range(4)))
    assert listing([], "")["jobs"][0]["waits"] is None


def test_paused_it_waits_in_the_queue_again(waiting: Waiting) -> None:
    store, _, job = waiting
    until(lambda: waits(job), meanwhile=lambda: job.open)
    store.hold([job.id], True)
    until(lambda: store.get(job.id).state == "queued")
    until(lambda: job.held and job.progress.waits is None)


@pytest.mark.parametrize(
    ("wanted", "free", "words"),
    [
        (2, 1, "Waiting for 2 GPUs: 1 free"),
        (4, 2, "Waiting for 4 GPUs: 2 free"),
        (2, 0, "Waiting for 2 GPUs: 0 free"),
    ],
)
def test_in_words(wanted: int, free: int, words: str, tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    progress = Progress().after(WaitsForGpus(wanted=wanted, free=free), 1.0)
    assert (progress.title, progress.fraction, progress.seconds_left) == (words, 0.0, None)
    request = GenerationRequest(prompt="a boat", frames=5, width=32, height=32)
    plan = resolve(request, tiny("wan2.1"), FOUR, tmp_path / "x.mp4").replace(steps=4)
    assert progress.after(Planned(plan=plan), 2.0).title == "Preparing"
