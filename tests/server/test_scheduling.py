"""The scheduler of a cluster: which waiting job runs on which idle worker."""

import random
from collections.abc import Mapping, Sequence

import pytest

from runtime.server.scheduling import (
    AGEING,
    HALF_LIFE_SECONDS,
    RESERVED_SECONDS,
    WARM_SECONDS,
    IdleWorker,
    Usage,
    WaitingJob,
    assign,
)

GB = 1_000_000_000
NOW = 1000.0


def job(
    name: str,
    *,
    owner: str = "ann",
    model: str = "wan",
    gpus: int = 1,
    size: float = 10.0,
    engines: str = "",
    seconds: float = 60.0,
    created: float = NOW,
    avoid: str = "",
) -> WaitingJob:
    needs = (model, gpus, int(size * GB), frozenset(engines.split()))
    return WaitingJob(name, owner, *needs, seconds, created, frozenset(avoid.split()))


def worker(
    name: str,
    *,
    node: str = "",
    kind: str = "small",
    gpus: int = 1,
    size: float = 24.0,
    loaded: str | None = None,
    models: str = "",
    engines: str = "",
    speed: float = 1.0,
) -> IdleWorker:
    here = (frozenset(models.split()), frozenset(engines.split()))
    return IdleWorker(name, node or f"node-{name}", kind, gpus, int(size * GB), loaded, *here, speed)


def big(name: str, *, gpus: int = 1, loaded: str | None = None) -> IdleWorker:
    return worker(name, kind="big", gpus=gpus, size=80.0, loaded=loaded, speed=4.0)


WAN = worker("w", loaded="wan")
HUNYUAN = worker("h", loaded="hunyuan")

# name: (queue, idle workers, use of owners, busy workers, expected pairs)
CASES: Mapping[
    str,
    tuple[Sequence[WaitingJob], Sequence[IdleWorker], Mapping[str | None, float], Sequence[IdleWorker], str],
] = {
    "nothing waits": ([], [WAN], {}, [], ""),
    "no worker is idle": ([job("a")], [], {}, [WAN], ""),
    "one owner's jobs start in order": ([job("a"), job("b")], [WAN], {}, [], "a:w"),
    "the order of an owner's jobs is that of the queue, not their age": (
        [job("a"), job("b", created=NOW - 1e6)],
        [WAN],
        {},
        [],
        "a:w",
    ),
    "a loaded model": ([job("a")], [worker("x"), HUNYUAN, WAN], {}, [], "a:w"),
    "a loaded model on a slower GPU": ([job("a")], [big("b"), WAN], {}, [], "a:w"),
    "engines among workers with the model": (
        [job("a", engines="e")],
        [WAN, worker("e", loaded="wan", engines="e f")],
        {},
        [],
        "a:e",
    ),
    "the model on the disk": ([job("a")], [worker("x"), worker("y", models="wan")], {}, [], "a:y"),
    "an empty worker before one with another model": ([job("a")], [HUNYUAN, worker("x")], {}, [], "a:x"),
    "a model that no job waits for is removed first": (
        [job("a"), job("b", model="hunyuan", gpus=2)],
        [HUNYUAN, worker("o", loaded="other"), worker("g", gpus=2, kind="pair")],
        {},
        [],
        "a:o b:g",
    ),
    "the fastest of those that fit": ([job("a")], [worker("x"), big("b")], {}, [], "a:b"),
    "a group of GPUs is not taken for one": ([job("a")], [big("g", gpus=4), worker("x")], {}, [], "a:x"),
    "a group of GPUs if nothing else is idle": ([job("a")], [big("g", gpus=4)], {}, [], "a:g"),
    "memory": ([job("a", size=30), job("b")], [worker("x")], {}, [], "b:x"),
    "memory to the byte": ([job("a", size=24)], [worker("x", size=23.9), worker("y", size=24)], {}, [], "a:y"),
    "number of GPUs": ([job("a", gpus=2)], [worker("x"), worker("g", gpus=4)], {}, [], "a:g"),
    "two hosts are no group": ([job("a", gpus=2)], [worker("x", node="n"), worker("y", node="n")], {}, [], ""),
    "who has used less": ([job("a"), job("b", owner="bob")], [WAN], {"ann": 100.0}, [], "b:w"),
    "waiting jobs of a burst count": (
        [job("a"), job("b"), job("c"), job("d", owner="bob")],
        [WAN, worker("w2", loaded="wan")],
        {},
        [],
        "a:w d:w2",
    ),
    "jobs of several GPUs count for all": (
        [job("a", gpus=4), job("b", seconds=100), job("c", owner="bob"), job("d", owner="bob")],
        [big("g", gpus=4), worker("x"), worker("y")],
        {"bob": 50.0},
        [],
        "a:g c:x d:y",
    ),
    "a loaded model before a smaller tag": (
        [job("a"), job("b", owner="bob", model="hunyuan")],
        [HUNYUAN],
        {"bob": WARM_SECONDS - 1},
        [],
        "b:h",
    ),
    "not before a much smaller one": (
        [job("a"), job("b", owner="bob", model="hunyuan")],
        [HUNYUAN],
        {"bob": WARM_SECONDS + 1},
        [],
        "a:h",
    ),
    "time in the queue counts": (
        [job("a", created=NOW - 1000), job("b", owner="bob")],
        [WAN],
        {"ann": 1000 * AGEING - 1},
        [],
        "a:w",
    ),
    "and not more than that": (
        [job("a", created=NOW - 1000), job("b", owner="bob")],
        [WAN],
        {"ann": 1000 * AGEING + 1},
        [],
        "b:w",
    ),
    "a large job waits for the large GPU": (
        [job("a", owner="bob"), job("b", size=60)],
        [big("b1")],
        {"ann": RESERVED_SECONDS - 1},
        [WAN],
        "b:b1",
    ),
    "for a bounded time": (
        [job("a", owner="bob"), job("b", size=60)],
        [big("b1")],
        {"ann": RESERVED_SECONDS + 1},
        [WAN],
        "a:b1",
    ),
    "a large job waits, and small ones have their workers": (
        [job("a"), job("b", size=60)],
        [big("b1", loaded="wan"), worker("x")],
        {},
        [],
        "a:x b:b1",
    ),
    "fewer large jobs than large GPUs": (
        [job("a"), job("b", size=60)],
        [big("b1"), big("b2")],
        {},
        [WAN],
        "a:b1 b:b2",
    ),
    "a job of several GPUs waits for the group": (
        [job("a", owner="bob"), job("b", gpus=4)],
        [worker("g", gpus=4)],
        {"ann": 100.0},
        [WAN],
        "b:g",
    ),
    "equal workers are for all sizes": (
        [job("a", owner="bob"), job("b", size=60)],
        [big("b1")],
        {"ann": 1.0},
        [big("b2")],
        "a:b1",
    ),
    "another worker than that where it failed": (
        [job("a", avoid="w")],
        [WAN, HUNYUAN],
        {},
        [],
        "a:h",
    ),
    "another node": (
        [job("a", avoid="n")],
        [worker("w", node="n", loaded="wan"), worker("x", node="m")],
        {},
        [],
        "a:x",
    ),
    "it waits for another one": ([job("a", avoid="w"), job("b")], [WAN], {}, [HUNYUAN], "b:w"),
    "not for one that it does not fit": ([job("a", avoid="b1", size=60)], [big("b1")], {}, [WAN], "a:b1"),
    "not if there is no other one": ([job("a", avoid="w h")], [WAN], {}, [HUNYUAN], "a:w"),
}


@pytest.mark.parametrize("case", CASES)
def test_assignment(case: str) -> None:
    waiting, idle, used, busy, expected = CASES[case]
    pairs = assign(waiting, idle, used, NOW, busy)
    assert sorted(f"{one}:{where}" for one, where in pairs) == expected.split()


def a_cluster(seed: int, jobs: int, workers: int) -> tuple[list[WaitingJob], list[IdleWorker], dict[str | None, float]]:
    draw = random.Random(seed)
    models = [f"model-{number}" for number in range(5)]
    kinds = [("small", 1, 24), ("big", 1, 80), ("pair", 2, 80), ("group", 8, 141)]
    idle = []
    for number in range(workers):
        kind, gpus, size = draw.choice(kinds)
        disk = " ".join(draw.sample(models, 3))
        free, loaded = size - draw.random(), draw.choice([None, *models])
        one = worker(f"w{number}", node=f"n{number % 7}", kind=kind, gpus=gpus, size=free, loaded=loaded, models=disk)
        idle.append(one)
    waiting = [
        job(
            f"j{number}",
            owner=f"owner-{int(draw.paretovariate(1)) % 20}",
            model=draw.choice(models),
            gpus=draw.choice([1, 1, 1, 2, 4]),
            size=draw.choice([8, 20, 60, 130]) + draw.random(),
            seconds=draw.uniform(5, 300),
            created=NOW - draw.uniform(0, 900),
            avoid=draw.choice(["", "", "", "n1 w5"]),
        )
        for number in range(jobs)
    ]
    return waiting, idle, {f"owner-{number}": draw.uniform(0, 1000) for number in range(15)}


@pytest.mark.parametrize("seed", range(12))
def test_invariants(seed: int) -> None:
    waiting, idle, used = a_cluster(seed, jobs=20 + 30 * (seed % 4), workers=10 + 25 * (seed % 3))
    pairs = assign(waiting, idle, used, NOW)
    assert pairs == assign(waiting, idle, used, NOW)
    jobs, workers = {one.id: one for one in waiting}, {one.id: one for one in idle}
    left, free = dict(jobs), dict(workers)
    for name, where in pairs:
        # No job and no worker occurs twice.
        one, place = left.pop(name), free.pop(where)
        assert one.gpus <= place.gpus
        assert one.bytes_per_gpu <= place.free_bytes
    for one in left.values():
        # No worker is idle while a job that fits it waits.
        fitting = [w for w in free.values() if one.gpus <= w.gpus and one.bytes_per_gpu <= w.free_bytes]
        assert all({w.id, w.node} & one.avoid for w in fitting)


@pytest.mark.parametrize("seed", range(4))
def test_preferences_delay_a_job_by_a_bounded_amount(seed: int) -> None:
    waiting, _, used = a_cluster(seed, jobs=200, workers=0)
    idle = [worker(f"w{number}", size=200.0, gpus=8, loaded=f"model-{number % 5}") for number in range(40)]
    started = {name for name, _ in assign(waiting, idle, used, NOW)}
    charged, tags = dict(used), dict[tuple[str | None, str], float]()
    for one in waiting:
        previous = max((tag for name, tag in tags.items() if name[0] == one.owner), default=-1e9)
        tags[one.owner, one.id] = max(charged.get(one.owner, 0.0) - AGEING * (NOW - one.created), previous)
        charged[one.owner] = charged.get(one.owner, 0.0) + one.weight
    latest = max(tag for (_, name), tag in tags.items() if name in started)
    first = min(tag for (_, name), tag in tags.items() if name not in started)
    assert latest <= first + WARM_SECONDS


def test_use_decays() -> None:
    usage = Usage()
    usage.charge("ann", 800.0, 0.0)
    usage.charge("ann", 400.0, HALF_LIFE_SECONDS)
    usage.charge("bob", 100.0, HALF_LIFE_SECONDS)
    usage.charge("bob", -500.0, HALF_LIFE_SECONDS)
    usage.charge(None, 3.0, HALF_LIFE_SECONDS)
    assert usage.used(2 * HALF_LIFE_SECONDS) == {"ann": pytest.approx(400.0), None: pytest.approx(1.5)}


def test_a_job_is_found_for_each_of_many_workers() -> None:
    waiting, idle, used = a_cluster(0, jobs=2000, workers=200)
    for workers, busy in ((idle, idle[:0]), (idle[:3], idle[3:])):
        pairs = assign(waiting, workers, used, NOW, busy)
        assert len({one for one, _ in pairs}) == len({where for _, where in pairs}) == len(workers)
