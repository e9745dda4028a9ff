"""Workers lend GPUs to each other: no worker waits forever, and no GPU runs two jobs."""

import threading
import time
from itertools import product

import pytest

from runtime.queue.instances import WorkerRegistry
from runtime.queue.store import JobStore
from tests.waiting import until


class Workers:
    """Threads that use the registry as `Worker` does, with empty jobs."""

    def __init__(self, gpus: int, jobs: list[int]) -> None:
        self.registry = WorkerRegistry(JobStore(None).database)
        self.done: list[tuple[int, list[int]]] = []
        self.clashes: list[str] = []
        self._busy: dict[int, int] = {}
        self._jobs = jobs
        self._lock = threading.Lock()
        self._end = threading.Event()
        for gpu in range(gpus):
            self.registry.register(f"app.{gpu}", gpu)
        self._threads = [threading.Thread(target=self._run, args=(gpu,), daemon=True) for gpu in range(gpus)]

    def __enter__(self) -> "Workers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def wait(self, count: int) -> None:
        """Wait until so many jobs are done."""
        until(lambda: len(self.done) >= count)

    def _run(self, gpu: int) -> None:
        registry, me = self.registry, f"app.{gpu}"
        while not self._end.is_set():
            self._lend(me)
            if not registry.gpus(me):
                time.sleep(0.001)
                continue
            with self._lock:
                wanted = self._jobs.pop(0) if self._jobs else None
            if wanted is None:
                time.sleep(0.001)
                continue
            if wanted == 1:
                registry.release(me)
                held = [gpu]
            else:
                if len(registry.gpus(me)) < wanted:
                    registry.want(me, wanted)
                    while len(registry.gpus(me)) < wanted and not self._end.is_set():
                        self._lend(me, waits=True)
                        time.sleep(0.001)
                held = registry.return_spare(me, wanted)
            self._work(gpu, held)
            if wanted % 2:  # after an even number the GPUs stay lent, as while processes stay loaded on them
                registry.release(me)

    def _lend(self, me: str, *, waits: bool = False) -> None:
        waiting = self.registry.waits_for(me)
        if waiting is not None and self.registry.gpus(me):
            self.registry.lend(me, waiting, waits=waits)

    def _work(self, gpu: int, held: list[int]) -> None:
        with self._lock:
            self.clashes += [f"{one} is {self._busy[one]}'s and {gpu}'s" for one in held if one in self._busy]
            self._busy |= dict.fromkeys(held, gpu)
        time.sleep(0.003)
        with self._lock:
            for one in held:
                self._busy.pop(one, None)
            self.done.append((gpu, held))


@pytest.mark.parametrize("seed", range(3))
def test_all_jobs_end_and_no_gpu_runs_two(seed: int) -> None:
    sizes = [[1, 2, 4, 3, 1, 1, 2], [4, 4, 1, 2, 2, 3], [2, 2, 2, 1, 4, 1]][seed]
    jobs = sizes * 4
    with Workers(4, list(jobs)) as workers:
        workers.wait(len(jobs))
    assert workers.clashes == []
    assert sorted(len(held) for _, held in workers.done) == sorted(jobs)


@pytest.mark.slow
def test_a_few_jobs_end() -> None:
    """With many jobs, a later one would free a worker that waits."""
    for jobs in product(range(1, 4), repeat=3):
        with Workers(3, list(jobs)) as workers:
            workers.wait(len(jobs))
        assert workers.clashes == []


def registry(gpus: int) -> WorkerRegistry:
    made = WorkerRegistry(JobStore(None).database)
    for gpu in range(gpus):
        made.register(f"app.{gpu}", gpu)
    made.register("other.0", 0)
    return made


def test_idle_workers_lend_gpus_until_a_job_has_enough() -> None:
    workers = registry(3)
    workers.want("app.2", 2)
    assert [workers.waits_for(f"app.{gpu}") for gpu in range(3)] == ["app.2", "app.2", None]
    assert workers.waits_for("other.0") is None
    workers.lend("app.1", "app.2")
    assert workers.gpus("app.2") == [2, 1] and workers.gpus("app.1") == []
    # It lacks nothing any more.
    assert workers.waits_for("app.0") is None
    workers.release("app.2")
    assert workers.gpus("app.1") == [1]


def test_two_waiting_workers_gather_gpus_one_after_the_other() -> None:
    workers = registry(2)
    workers.want("app.0", 2)
    workers.want("app.1", 2)
    assert workers.waits_for("app.1") == "app.0" and workers.waits_for("app.0") is None
    workers.lend("app.1", "app.0", waits=True)
    assert workers.gpus("app.0") == [0, 1]
    assert workers.waits_for("app.0") == "app.1"
    workers.lend("app.0", "app.1")  # once it is idle
    assert workers.gpus("app.1") == [1, 0] and workers.gpus("app.0") == []


def test_nothing_is_lent_to_a_worker_that_is_no_longer_the_first() -> None:
    workers = registry(3)
    workers.want("app.1", 3)
    assert workers.waits_for("app.2") == "app.1"
    workers.release("app.1")
    workers.want("app.0", 3)
    workers.want("app.1", 2)
    workers.lend("app.1", "app.0", waits=True)
    # Without its own GPU, app.1 could not return this one.
    workers.lend("app.2", "app.1")
    assert workers.gpus("app.2") == [2]
    workers.lend("app.2", "app.0")
    assert workers.gpus("app.0") == [0, 1, 2]


def test_a_worker_whose_job_begins_no_longer_waits() -> None:
    workers = registry(3)
    workers.want("app.0", 3)
    workers.lend("app.1", "app.0")
    workers.lend("app.2", "app.0")
    assert workers.return_spare("app.0", 2) == [0, 1]
    workers.want("app.2", 2)
    assert workers.waits_for("app.0") == "app.2"


def test_the_first_stays_the_first_if_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = registry(2)
    workers.want("app.0", 2)
    monkeypatch.setattr("time.time", lambda: 10.0)
    workers.want("app.1", 2)
    assert workers.waits_for("app.1") == "app.0"


def test_a_worker_that_stops_waiting_returns_its_gpus() -> None:
    workers = registry(3)
    workers.want("app.0", 3)
    workers.lend("app.1", "app.0")
    workers.release("app.0")
    workers.lend("app.2", "app.0")  # it had just been asked
    assert [workers.gpus(f"app.{gpu}") for gpu in range(3)] == [[0], [1], [2]]


def test_a_replaced_worker_keeps_its_gpu_lent() -> None:
    workers = registry(2)
    workers.want("app.0", 2)
    workers.lend("app.1", "app.0")
    workers.register("app.1", 1)
    assert workers.gpus("app.0") == [0, 1] and workers.gpus("app.1") == []
    assert workers.return_spare("app.0", 1) == [0]
    assert workers.gpus("app.1") == [1]
