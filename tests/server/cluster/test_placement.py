"""What a head learns from runs: use of keys, speeds of GPUs, nodes to avoid, and memory."""

import pytest

from runtime.core.events import Failed, TerminalEvent
from runtime.core.facts import Fact
from runtime.queue.records import Needs, Waiting
from runtime.server.cluster.placement import Placement
from runtime.server.scheduling import IdleWorker, WaitingJob, assign
from tests.queue.samples import sample_result

NOW = 1000.0
SLOW, FAST = "small GPU", "large GPU"
FAILED = Failed(fact=Fact("queue.store_locked"))


def job(size: int = 10, gpus: int = 1, seconds: float = 100.0) -> Waiting:
    return Waiting("a", "ann", NOW, Needs(model="wan", gpus=gpus, bytes_per_gpu=size, engines=("e",), seconds=seconds))


def worker(name: str, size: int, gpus: int = 1) -> IdleWorker:
    return IdleWorker(name, f"node-{name}", FAST, gpus, size, None, frozenset(), frozenset(), 1.0)


def known(placement: Placement, waiting: Waiting, *workers: IdleWorker) -> WaitingJob:
    (found,) = placement.jobs([waiting], workers)
    return found


@pytest.mark.parametrize(
    ("needs", "gpus", "sizes", "expected"),
    [
        (10, 1, [(24, 1), (80, 1)], ["x", "y"]),
        (40, 1, [(24, 1), (80, 1)], ["y"]),
        (99, 1, [(24, 1), (80, 1)], ["y"]),  # nowhere: where most is
        (99, 2, [(80, 1), (24, 2)], ["y"]),
        (10, 2, [(24, 1), (80, 1)], []),  # waits for such a machine
        (10, 1, [(0, 1), (24, 1)], ["y"]),  # a machine without GPUs beside one with
    ],
)
def test_a_video_fits_by_memory(needs: int, gpus: int, sizes: list[tuple[int, int]], expected: list[str]) -> None:
    workers = [worker(name, *size) for name, size in zip("xy", sizes, strict=True)]
    found = known(Placement(), job(needs, gpus), *workers)
    able = [one.id for one in workers if assign([found], [one], {}, NOW, [other for other in workers if other != one])]
    assert able == expected


@pytest.mark.parametrize(
    ("seconds", "end", "used"),
    [
        (100.0, sample_result(), 100.0),
        (300.0, sample_result(), 300.0),  # it took longer than forecast
        (30.0, FAILED, 30.0),
        (30.0, None, 30.0),  # paused, or its worker died
        (0.0, None, 0.0),
    ],
)
def test_an_owner_is_charged_what_a_job_took(seconds: float, end: TerminalEvent | None, used: float) -> None:
    placement = Placement()
    one = known(placement, job(), worker("x", 24))
    placement.started(one, NOW)
    assert placement.used(NOW) == {"ann": 100.0}
    placement.ran(one, FAST, seconds, end, NOW)
    assert placement.used(NOW).get("ann", 0.0) == pytest.approx(used)


def test_speeds_are_measured_by_videos_that_ran_whole() -> None:
    """The sample took 4.2 s: 0.2 to encode, 3 to denoise, 1 to decode."""
    placement, result = Placement(), sample_result()
    for forecast, kind in ((4.2, FAST), (1.0, SLOW)):
        one = known(placement, job(seconds=forecast), worker("x", 24))
        assert placement.speed(kind) == 1.0
        placement.ran(one, kind, 9.0, result.model_copy(update={"earlier": {"step": 2}}), NOW)
        placement.ran(one, kind, 9.0, FAILED, NOW)
        assert placement.speed(kind) == 1.0
        placement.ran(one, kind, 9.0, result, NOW)
        assert placement.speed(kind) == pytest.approx(forecast / 4.2, abs=0.01)
    # The latest video counts in part.
    before = placement.speed(SLOW)
    placement.ran(known(placement, job(seconds=2.0), worker("x", 24)), SLOW, 9.0, result, NOW)
    assert before < placement.speed(SLOW) < 2.0 / 4.2


def test_a_job_avoids_a_node_until_it_has_ended() -> None:
    placement, workers = Placement(), [worker("x", 24), worker("y", 24)]
    assert placement.avoid("a", "node-x") and not placement.avoid("a", "node-x")
    one = known(placement, job(), *workers)
    assert assign([one], workers[:1], {}, NOW, workers[1:]) == []
    assert assign([one], workers, {}, NOW) == [("a", "y")]
    assert assign([one], workers[:1], {}, NOW) == [("a", "x")]  # there is no other
    placement.ran(one, FAST, 1.0, None, NOW)
    assert known(placement, job(), *workers).avoid == {"node-x"}
    placement.ran(one, FAST, 1.0, sample_result(), NOW)
    assert known(placement, job(), *workers).avoid == frozenset()
