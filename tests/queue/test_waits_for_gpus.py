"""A job on several GPUs waits for them, reports how many are free, and can be cancelled or paused meanwhile."""

import shutil
import threading
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
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.instances import WorkerRegistry
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import VIDEOS
from runtime.queue.store import JobStore, open_store
from runtime.queue.views import Job
from runtime.queue.worker import Worker, WorkerConfig
from runtime.ui import job_view
from runtime.ui.queue_panel import QueuePanel
from tests.planner.test_parallelism import FOUR
from tests.ui.test_job_view import AUDIENCE
from tests.waiting import until

APP = "00000000"


class Waiting(NamedTuple):
    """A job that one worker of four has claimed, where it needs all of them."""

    store: JobStore
    registry: WorkerRegistry
    job: Job

    def lend(self, gpu: int) -> None:
        """Do what the idle worker of a GPU does."""
        assert self.registry.waits_for(f"{APP}.{gpu}") == f"{APP}.0"
        self.registry.lend(f"{APP}.{gpu}", f"{APP}.0")


class OneJob:
    """Stands in for the worker where only its one job is asked for."""

    def __init__(self, job: Job, store: JobStore) -> None:
        self._job = job
        self.store = store

    def job(self, _: str) -> Job:
        return self._job

    def videos_at_once(self) -> int:
        return 1


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
    registry = WorkerRegistry(store.database)
    for gpu in range(4):
        registry.register(f"{APP}.{gpu}", gpu)
    plan = resolve(request, look_up("tiny", weights), PlanningContext(FOUR, cache_dir / "x.mp4"))
    assert plan.gpus == 4
    job = Job(store.add(request, plan), plan, "Tiny", store)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("runtime.queue.worker.probe", lambda: FOUR)
        patched.setattr(Worker, "_held_bytes", lambda _: {})
        worker = Worker(store, WorkerConfig(app=APP, gpu=0, kinds=VIDEOS, weights_dir=weights, engines=engines))
        thread = threading.Thread(target=worker.run)
        thread.start()
        yield Waiting(store, registry, job)
        worker.stop()
        thread.join()


def waits(job: Job) -> list[Event]:
    """Return its events about waiting."""
    job.refresh()
    return [event for event in job.events if isinstance(event, WaitsForGpus)]


def test_a_waiting_job_reports_free_gpus_and_can_be_cancelled(
    waiting: Waiting, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, registry, job = waiting
    monkeypatch.setattr("runtime.queue.recovery.recover", lambda *_: None)  # it would find that this app is dead
    until(lambda: waits(job), meanwhile=lambda: job.open)
    assert waits(job) == [WaitsForGpus(wanted=4, free=1)]
    waiting.lend(1)
    waiting.lend(3)
    until(lambda: waits(job)[-1] == WaitsForGpus(wanted=4, free=3))
    assert job.state == "running"
    # The page: its line, and the queue's.
    worker = cast(JobQueue, OneJob(job, store))
    line = job_view.view(job, worker, AUDIENCE, "<svg></svg>", job.progress.now).status
    assert "<strong>Waiting for 4 GPUs: 3 free</strong>" in line
    queue = QueuePanel(worker, {}, Path())._list()
    assert "Waiting for 4 GPUs: 3 free" in queue
    assert ">Waiting<" in queue and ">Running<" not in queue
    # The command line, and another process.
    (row,) = listing([], "", 0, None)["jobs"]
    assert (row["state"], row["waits"]) == ("running", "Waiting for 4 GPUs: 3 free.")
    assert "Waiting for 4 GPUs: 3 free." in capsys.readouterr().out.replace("\n", " ")
    assert "WaitsForGpus" in str(details(job.id, with_prompt=False)["job"]["events"])
    elsewhere = Job(store.get(job.id), job.plan, "Tiny", store)
    elsewhere.refresh()
    assert elsewhere.progress.title == "Waiting for 4 GPUs: 3 free"

    job.request_cancel()
    until(lambda: waits(job) and job.state == "cancelled")
    assert job.events[-1] == Cancelled()
    assert not any(isinstance(event, Planned) for event in job.events)
    until(lambda: all(registry.gpus(f"{APP}.{gpu}") == [gpu] for gpu in range(4)))
    assert listing([], "", 0, None)["jobs"][0]["waits"] is None


def test_a_paused_waiting_job_is_queued_again(waiting: Waiting) -> None:
    store, _, job = waiting
    until(lambda: waits(job), meanwhile=lambda: job.open)
    store.hold([job.id], True)
    until(lambda: store.get(job.id).state == "queued")
    job.refresh()
    assert job.held and job.progress.waits is None


@pytest.mark.parametrize(
    ("wanted", "free", "words"),
    [
        (2, 1, "Waiting for 2 GPUs: 1 free"),
        (4, 2, "Waiting for 4 GPUs: 2 free"),
        (2, 0, "Waiting for 2 GPUs: 0 free"),
    ],
)
def test_waiting_is_described(
    wanted: int, free: int, words: str, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    progress = Progress().after(WaitsForGpus(wanted=wanted, free=free), 1.0)
    assert (progress.title, progress.fraction, progress.seconds_left) == (words, 0.0, None)
    request = GenerationRequest(prompt="a boat", frames=5, width=32, height=32)
    plan = resolve(request, tiny("wan2.1"), PlanningContext(FOUR, tmp_path / "x.mp4")).replace(steps=4)
    assert progress.after(Planned(plan=plan), 2.0).title == "Preparing"
