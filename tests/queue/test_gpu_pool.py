"""Runners that lend each other GPUs: nobody waits for ever, and nobody has what another has."""

import threading
import time
from itertools import product

import pytest

from runtime.core.cancel import Cancel, CancelledError
from runtime.queue.gpu_pool import Pool
from tests.waiting import PATIENCE, until


def never() -> None:
    """Nobody asks to stop."""


class Runners:
    """Threads that do what `runner.Runner` does with a pool, and jobs that take no time but their turn."""

    def __init__(self, pool: Pool, gpus: range, jobs: list[int]) -> None:
        self.pool = pool
        self.done: list[tuple[int, list[int]]] = []
        self.clashes: list[str] = []
        self._busy: dict[int, int] = {}
        self._jobs = jobs
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(gpu,), daemon=True) for gpu in gpus]

    def __enter__(self) -> "Runners":
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
        pool = self.pool
        while not self._end.is_set():
            if pool.asked(gpu):
                pool.lend(gpu)
            if not pool.has(gpu):
                time.sleep(0.001)
                continue
            with self._lock:
                wanted = self._jobs.pop(0) if self._jobs else None
            if wanted is None:
                time.sleep(0.001)
                continue
            if wanted == 1:
                pool.release_cached_memory(gpu)
                held = [gpu]
            else:
                held = pool.held(gpu) if len(pool.held(gpu)) >= wanted else pool.gather(gpu, wanted, never)
            self._work(gpu, held[:wanted])
            if wanted % 2:  # an even number keeps its processes, and so what was lent to it
                pool.release_cached_memory(gpu)

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
def test_all_jobs_are_done_and_no_gpu_has_two(seed: int) -> None:
    sizes = [[1, 2, 4, 3, 1, 1, 2], [4, 4, 1, 2, 2, 3], [2, 2, 2, 1, 4, 1]][seed]
    jobs = sizes * 8
    with Runners(Pool(range(4)), range(4), list(jobs)) as runners:
        runners.wait(len(jobs))
    assert runners.clashes == []
    assert sorted(len(held) for _, held in runners.done) == sorted(jobs)


@pytest.mark.parametrize("gpus", [2, 3, 4])
def test_few_jobs_are_done_too(gpus: int) -> None:
    """With many, somebody who comes later sets free who waits."""
    for jobs in product(range(1, gpus + 1), repeat=3):
        with Runners(Pool(range(gpus)), range(gpus), list(jobs)) as runners:
            runners.wait(len(jobs))
        assert runners.clashes == []


def test_who_waits_for_its_own_gpu_asks_for_it() -> None:
    pool = Pool([0, 1])
    got: list[list[int]] = []
    threads = [threading.Thread(target=lambda gpu=gpu: got.append(pool.gather(gpu, 2, never))) for gpu in (0, 1)]
    threads[0].start()
    until(lambda: pool.asked(1))
    threads[1].start()  # it has taken a job of its own, and lends nevertheless
    threads[0].join(PATIENCE)
    assert got == [[0, 1]]
    # The first keeps its processes on both, until it has nothing to do.
    until(lambda: pool.asked(0))
    pool.lend(0)
    assert pool.has(1)
    until(lambda: pool.asked(0))  # the other gathers now
    pool.lend(0)
    threads[1].join(PATIENCE)
    assert got == [[0, 1], [1, 0]]


def test_one_that_gathers_gets_those_that_are_lent() -> None:
    pool = Pool([0, 1, 2])
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(pool.gather(2, 2, never)))
    thread.start()
    until(lambda: pool.asked(0))
    assert pool.asked(1)
    pool.lend(1)
    thread.join(PATIENCE)
    assert got == [[2, 1]]
    # It lacks nothing any more.
    assert not pool.asked(0)
    assert (pool.has(0), pool.has(1), pool.has(2)) == (True, False, True)
    pool.release_cached_memory(2)
    assert pool.has(1)


def test_who_stops_waiting_gives_everything_back() -> None:
    pool, cancel, ended = Pool([0, 1, 2]), Cancel(), threading.Event()

    def gather() -> None:
        with pytest.raises(CancelledError):
            pool.gather(0, 3, cancel.check)
        ended.set()

    threading.Thread(target=gather).start()
    until(lambda: pool.asked(1))
    pool.lend(1)
    assert not pool.has(1)
    cancel.request()
    assert ended.wait(PATIENCE)
    assert all(pool.has(gpu) for gpu in range(3))
    assert not pool.asked(2)
