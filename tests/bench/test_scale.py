"""The simulation of a cluster in bench/scale.py, with a small fleet."""

from collections import Counter
from xml.etree import ElementTree

import pytest

from bench import scale
from bench.scale import FLEET, Arrival, Fair, FirstFit, Random, Simulation, arrivals, classes, describe, figure, fluid

# 32 GPUs of 24 GB, 24 H100 and 8 H200, two groups of four among them.
SMALL = tuple(
    one._replace(hosts=hosts) for one, hosts in zip((FLEET[0], FLEET[1], FLEET[3], FLEET[5]), (4, 2, 1, 1), strict=True)
)


def simulate(policy: Fair | FirstFit | Random, videos: list[Arrival], monkeypatch: pytest.MonkeyPatch) -> Simulation:
    # Failures happen within the hours that are simulated.
    monkeypatch.setattr(scale, "_WORKER_MTBF", 20_000.0)
    monkeypatch.setattr(scale, "_NODE_MTBF", 100_000.0)
    starts: Counter[int] = Counter()
    done = Simulation(policy, videos, SMALL, seed=2)
    start = done._start

    def checked(job: scale.Job, worker: scale.Worker) -> None:
        starts[job.number] += 1
        start(job, worker)

    monkeypatch.setattr(done, "_start", checked)
    done.run()
    # Interrupted jobs started again, and nothing runs or waits.
    assert starts.total() == len(videos) + done.interrupted + done.broken
    assert all(job.ended is not None and job.left == 0.0 and job.number in starts for job in done.jobs)
    assert not done.waiting.total()
    assert all(one.job is None for one in done.workers)
    return done


@pytest.fixture(scope="module")
def videos() -> list[Arrival]:
    return arrivals(3, videos=2000, keys=30, burst=200)


@pytest.mark.slow
def test_every_job_ends_once_and_light_keys_wait_less(videos: list[Arrival], monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = classes(videos, 200)
    assert set(kinds.values()) == {"bursting", "heavy", "light"}
    done = [simulate(policy, videos, monkeypatch) for policy in (Fair(), FirstFit(), Random(1))]
    again = simulate(Fair(), videos, monkeypatch)
    assert [job.ended for job in again.jobs] == [job.ended for job in done[0].jobs]
    assert min(one.interrupted for one in done) > 20
    ideal = fluid(videos, sum(one.gpus * one.workers * one.hosts * one.speed for one in SMALL))
    assert all(end > one.at for one, end in zip(videos, ideal, strict=True))
    fair, first, _ = ([describe(one, ideal, kinds)[name] for name in ("wait", "slowdown", "warm")] for one in done)
    assert fair[0]["light"]["p95"] < first[0]["light"]["p95"] / 3  # type: ignore[index]
    assert fair[1]["median"] < first[1]["median"]  # type: ignore[index]
    assert fair[2] > first[2]  # type: ignore[operator]
    picture = figure(done, kinds)
    assert len(picture) < 60_000
    assert len([one for one in ElementTree.fromstring(picture).iter() if one.tag.endswith("polyline")]) == 9
