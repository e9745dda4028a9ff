"""Simulate a cluster of 1,000 GPUs that makes 100,000 videos a day, with Tandem's scheduler and with two simpler ones.

    python -m bench.scale --out docs/scale.svg

Discrete events: jobs are queued, workers load models, run, crash and return, and the scheduler is called every two
seconds. The same seed gives the same result. The last line is JSON; a run is described in docs/scale.md. What a head
does besides scheduling is measured by bench.scale_store.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol
from xml.sax.saxutils import escape

from runtime.server import scheduling
from runtime.server.scheduling import IdleWorker, Usage, WaitingJob

DAY = 86_400.0
GB = 1_000_000_000
_TICK = 2.0
_CHECKPOINT_SECONDS = 30.0
# A worker's process fails once a day and restarts in a minute; a host fails once in 30 days for an hour.
_WORKER_MTBF, _WORKER_REPAIR = DAY, 60.0
_NODE_MTBF, _NODE_REPAIR = 30 * DAY, 3600.0
# GPUs on which every job fails after ten seconds, for an hour.
_BROKEN, _BROKEN_AT, _BROKEN_FOR, _BROKEN_AFTER = 3, 6 * 3600.0, 3600.0, 10.0
# Bytes per second from a host's disk, and to it from the cluster's mirror; seconds before the first byte.
_DISK, _NETWORK, _START = 2.0 * GB, 1.0 * GB, 5.0
# The head gives the scheduler this many jobs of each key and type.
_HEADS = 40
_WINDOW, _SAMPLE = 1800.0, 60.0
_FLUID_STEP = 20.0
# Weighted seconds that are none, up to rounding.
_NONE = 1e-9


class Type(NamedTuple):
    """A kind of video.

    Attributes:
        gigabytes: memory on each GPU, 10⁹ bytes.
        seconds: on an H100, or on a group of them.
        share: of all videos.
    """

    name: str
    model: str
    gpus: int
    gigabytes: float
    seconds: float
    share: float


# Seconds and memory are those measured in bench/h100.md and bench/h200.md (forward passes times steps), shares are
# assumed so that the GPUs are half used on average and nearly full at the daily peak.
TYPES = (
    Type("Wan2.1-1.3B, 480p", "wan-1.3b", 1, 22.6, 61.0, 0.15),
    Type("FramePack, 10 s, offloaded", "framepack", 1, 23.5, 164.0, 0.25),
    Type("Wan2.2-TI2V-5B, 720p", "wan-5b", 1, 36.4, 122.0, 0.10),
    Type("Wan2.2-A14B, 480p, 4 steps", "wan-a14b", 1, 52.6, 10.0, 0.10),
    Type("Wan2.2-A14B, 480p, 40 steps", "wan-a14b", 1, 52.6, 151.0, 0.10),
    Type("Wan2.2-A14B, 720p, 40 steps", "wan-a14b", 1, 60.0, 608.0, 0.10),
    Type("Wan2.2-A14B, 720p, 4 GPUs", "wan-a14b", 4, 60.0, 163.0, 0.04),
    Type("Wan2.2-I2V-A14B, 720p", "wan-i2v", 1, 60.0, 608.0, 0.05),
    Type("HunyuanVideo, 544p", "hunyuan", 1, 45.0, 260.0, 0.05),
    Type("HunyuanVideo, 720p", "hunyuan", 1, 52.0, 755.0, 0.05),
    Type("Wan2.2-A14B, 480p, BF16", "wan-a14b", 1, 90.0, 203.0, 0.01),
)
WEIGHTS = {
    "wan-1.3b": 14.5,
    "framepack": 43.0,
    "wan-5b": 24.0,
    "wan-a14b": 69.0,
    "wan-i2v": 69.0,
    "hunyuan": 42.0,
}


class Machine(NamedTuple):
    """Hosts of one kind, with as many workers of `gpus` GPUs as fill them.

    Attributes:
        speed: of a GPU, relative to an H100. That of a GPU with 24 GB is assumed.
    """

    kind: str
    gigabytes: float
    speed: float
    gpus: int
    workers: int
    hosts: int


FLEET = (
    Machine("24 GB", 23.6, 0.25, 1, 8, 75),
    Machine("H100", 83.0, 1.0, 1, 8, 27),
    Machine("H100", 83.0, 1.0, 1, 4, 1),
    Machine("H200", 148.0, 1.03, 1, 8, 8),
    Machine("H200", 148.0, 1.03, 1, 4, 1),
    # Four GPUs for one video.
    Machine("H100", 83.0, 1.0, 4, 2, 10),
    Machine("H200", 148.0, 1.03, 4, 2, 4),
)


class Arrival(NamedTuple):
    """A video that a key asks for; it takes `work` times the forecast."""

    at: float
    owner: str
    kind: int
    work: float


@dataclass
class Job:
    """A video in the simulation; `left` is the part that is not saved in a checkpoint yet."""

    number: int
    owner: str
    kind: int
    at: float
    work: float
    left: float = 1.0
    started: float | None = None
    ended: float | None = None
    avoid: frozenset[str] = frozenset()
    broken: int = 0
    waiting: WaitingJob = field(init=False)

    def __post_init__(self) -> None:
        self.wait()

    def wait(self) -> None:
        """Describe it for the scheduler."""
        one = TYPES[self.kind]
        needs = (one.model, one.gpus, int(one.gigabytes * GB), frozenset[str]())
        seconds = one.seconds * self.left
        self.waiting = WaitingJob(str(self.number), self.owner, *needs, seconds, self.at, self.avoid)


@dataclass
class Worker:
    """A worker in the simulation; `run` counts its jobs and failures, so that events of earlier ones are ignored."""

    number: int
    node: int
    machine: Machine
    loaded: str | None = None
    run: int = 0
    job: Job | None = None
    since: float = 0.0
    computes: float = 0.0
    down: int = 0
    seen: IdleWorker = field(init=False)


def arrivals(seed: int, videos: int, keys: int, burst: int) -> list[Arrival]:
    """Return a day's videos in order.

    Keys ask for numbers as Zipf's law has them, in batches of five of one type on average, most at noon. Four of the
    keys ask for `burst` videos of one type at once instead.
    """
    draw = random.Random(seed)
    shares = [1 / (rank + 1) ** 1.1 for rank in range(keys)]
    bursts = dict(zip(range(5, 9), (3, 9, 13, 20), strict=True))
    kinds = dict(zip(bursts, (1, 4, 2, 0), strict=True))
    found: list[Arrival] = []

    def add(at: float, rank: int, kind: int) -> None:
        found.append(Arrival(at, f"key-{rank:03}", kind, draw.lognormvariate(0.0, 0.1)))

    for rank, hour in bursts.items():
        for _ in range(burst):
            add(hour * 3600.0, rank, kinds[rank])
    ranks = [rank for rank in range(keys) if rank not in bursts]
    weights = [shares[rank] for rank in ranks]
    while len(found) < videos:
        at = draw.random() * DAY
        if draw.random() > (1 - 0.6 * math.cos(2 * math.pi * at / DAY)) / 1.6:
            continue
        (rank,) = draw.choices(ranks, weights)
        (kind,) = draw.choices(range(len(TYPES)), [one.share for one in TYPES])
        for _ in range(min(1 + int(draw.expovariate(1 / 4.5)), videos - len(found))):
            add(at, rank, kind)
    return sorted(found)


class Policy(Protocol):
    """The waiting jobs, and which of them start where."""

    name: str

    def add(self, job: Job, *, first: bool = False) -> None:
        """Queue a job; `first` if it ran before."""

    def choose(self, idle: dict[int, Worker], busy: Iterable[Worker], now: float) -> list[tuple[Job, Worker]]:
        """Return jobs that start, and remove them."""

    def charge(self, job: Job, seconds: float, now: float) -> None:
        """Note weighted seconds that a job's key uses."""


class Fair:
    """Tandem's scheduler."""

    name = "Tandem"

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int], dict[int, Job]] = defaultdict(dict)
        self._usage = Usage()
        self.times: list[float] = []

    def add(self, job: Job, *, first: bool = False) -> None:
        """Queue a job; `first` if it ran before."""
        key = (job.owner, job.kind)
        if first:
            self._queues[key] = {job.number: job, **self._queues[key]}
        else:
            self._queues[key][job.number] = job

    def choose(self, idle: dict[int, Worker], busy: Iterable[Worker], now: float) -> list[tuple[Job, Worker]]:
        """Return jobs that start, and remove them."""
        began = time.process_time()
        heads: list[Job] = []
        for key, jobs in list(self._queues.items()):
            heads += islice(jobs.values(), _HEADS)
            if not jobs:
                del self._queues[key]
        # The order of the queue, in which the types of a key are mixed.
        heads.sort(key=lambda job: job.number)
        waiting = [job.waiting for job in heads]
        used = self._usage.used(now)
        pairs = scheduling.assign(
            waiting, [one.seen for one in idle.values()], used, now, [one.seen for one in busy if not one.down]
        )
        self.times.append(time.process_time() - began)
        by_number = {job.number: job for job in heads}
        started = [(by_number[int(job)], idle[int(worker)]) for job, worker in pairs]
        for job, _ in started:
            del self._queues[job.owner, job.kind][job.number]
        return started

    def charge(self, job: Job, seconds: float, now: float) -> None:
        """Note weighted seconds that a job's key uses."""
        self._usage.charge(job.owner, seconds, now)


class FirstFit:
    """First come, first served: the oldest job that an idle worker fits starts on the smallest such worker."""

    name = "FIFO, first fit"

    def __init__(self) -> None:
        self._queues: dict[int, list[tuple[int, Job]]] = {kind: [] for kind in range(len(TYPES))}

    def add(self, job: Job, *, first: bool = False) -> None:
        """Queue a job; `first` if it ran before."""
        del first
        heappush(self._queues[job.kind], (job.number, job))

    def choose(self, idle: dict[int, Worker], busy: Iterable[Worker], now: float) -> list[tuple[Job, Worker]]:
        """Return jobs that start, and remove them."""
        del busy, now
        started = []
        free = by_machine(idle.values())
        heads = [(queue[0][0], kind) for kind, queue in self._queues.items() if queue]
        heapify(heads)
        while heads:
            _, kind = heappop(heads)
            machine = next((one for one, workers in free.items() if workers and fits(TYPES[kind], one)), None)
            if machine is not None:
                started.append((heappop(self._queues[kind])[1], free[machine].pop(0)))
                if self._queues[kind]:
                    heappush(heads, (self._queues[kind][0][0], kind))
        return started

    def charge(self, job: Job, seconds: float, now: float) -> None:
        """Note nothing."""


class Random:
    """Random jobs on random workers that fit."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._queues: dict[int, list[Job]] = {kind: [] for kind in range(len(TYPES))}

    def add(self, job: Job, *, first: bool = False) -> None:
        """Queue a job; `first` if it ran before."""
        del first
        self._queues[job.kind].append(job)

    def choose(self, idle: dict[int, Worker], busy: Iterable[Worker], now: float) -> list[tuple[Job, Worker]]:
        """Return jobs that start, and remove them."""
        del busy, now
        started = []
        workers = list(idle.values())
        self._draw.shuffle(workers)
        for worker in workers:
            kinds = [kind for kind, jobs in self._queues.items() if jobs and fits(TYPES[kind], worker.machine)]
            if kinds:
                (kind,) = self._draw.choices(kinds, [len(self._queues[kind]) for kind in kinds])
                jobs = self._queues[kind]
                place = self._draw.randrange(len(jobs))
                jobs[place], jobs[-1] = jobs[-1], jobs[place]
                started.append((jobs.pop(), worker))
        return started

    def charge(self, job: Job, seconds: float, now: float) -> None:
        """Note nothing."""


def fits(one: Type, machine: Machine) -> bool:
    """Return whether a worker can make a video of this type."""
    return one.gpus <= machine.gpus and one.gigabytes <= machine.gigabytes


def by_machine(workers: Iterable[Worker]) -> dict[Machine, list[Worker]]:
    """Return workers by machine, the smallest first."""
    found: dict[Machine, list[Worker]] = defaultdict(list)
    for one in sorted(workers, key=lambda one: (one.machine.gpus, one.machine.gigabytes, one.number)):
        found[one.machine].append(one)
    return found


class Simulation:
    """A cluster with one policy.

    Attributes:
        jobs: in the order of their arrival.
        seconds: GPU-seconds of computing, loading, lost work, and all.
    """

    def __init__(self, policy: Policy, videos: Sequence[Arrival], fleet: Sequence[Machine], seed: int) -> None:
        self.policy = policy
        self.workers: list[Worker] = []
        self.jobs = [Job(number, one.owner, one.kind, one.at, one.work) for number, one in enumerate(videos)]
        self.seconds: dict[str, float] = defaultdict(float)
        self.warm = self.starts = 0
        self.interrupted = self.broken = 0
        self.waiting: Counter[str] = Counter()
        self.rate: dict[str, float] = defaultdict(float)
        self.depth: list[tuple[float, int]] = []
        self.jain: list[float] = []
        self._draw = random.Random(seed)
        self._disks: list[set[str]] = []
        self._events: list[tuple[float, int, str, int, int]] = []
        self._sequence = 0
        self._now = 0.0
        for machine in fleet:
            for _ in range(machine.hosts):
                for _ in range(machine.workers):
                    self.workers.append(Worker(len(self.workers), len(self._disks), machine))
                self._disks.append(set())
        self._broken = set(self._draw.sample(range(len(self.workers)), min(_BROKEN, len(self.workers) // 100)))
        for worker in self.workers:
            self._see(worker)
        self._idle = {one.number: one for one in self.workers}

    def run(self) -> None:
        """Run until every job has ended."""
        for node in range(len(self._disks)):
            self._later(self._draw.expovariate(1 / _NODE_MTBF), "node", node)
        for worker in self.workers:
            self._later(self._draw.expovariate(1 / _WORKER_MTBF), "crash", worker.number)
        coming, left = iter(self.jobs), len(self.jobs)
        following = next(coming, None)
        window: dict[str, float] = defaultdict(float)
        backlogged: set[str] | None = None
        while left:
            self._now += _TICK
            while following is not None and following.at <= self._now:
                self._queue(following)
                following = next(coming, None)
            while self._events and self._events[0][0] <= self._now:
                at, _, what, number, run = heappop(self._events)
                left -= self._happen(at, what, number, run)
            if self._idle and self.waiting.total():
                busy = (one for one in self.workers if one.job is not None)
                for job, worker in self.policy.choose(self._idle, busy, self._now):
                    self._start(job, worker)
            if self._now % _SAMPLE < _TICK:
                self.depth.append((self._now, self.waiting.total()))
                for owner, rate in self.rate.items():
                    window[owner] += rate
                waits = {owner for owner, count in self.waiting.items() if count > 0}
                backlogged = waits if backlogged is None else backlogged & waits
            if self._now % _WINDOW < _TICK:
                if backlogged is not None and len(backlogged) > 1:
                    self.jain.append(jain([window[owner] for owner in backlogged]))
                window.clear()
                backlogged = None
        self.seconds["all"] = sum(one.machine.gpus for one in self.workers) * self._now

    def _later(self, seconds: float, what: str, number: int, run: int = 0) -> None:
        self._sequence += 1
        heappush(self._events, (self._now + seconds, self._sequence, what, number, run))

    def _queue(self, job: Job, *, first: bool = False) -> None:
        self.waiting[job.owner] += 1
        self.policy.add(job, first=first)

    def _see(self, worker: Worker) -> None:
        machine, disk = worker.machine, frozenset(self._disks[worker.node])
        place = (str(worker.number), f"node-{worker.node}", machine.kind, machine.gpus, int(machine.gigabytes * GB))
        worker.seen = IdleWorker(*place, worker.loaded, disk, frozenset(), machine.speed)

    def _start(self, job: Job, worker: Worker) -> None:
        assert worker.job is None and not worker.down and job.ended is None
        assert fits(TYPES[job.kind], worker.machine)
        one = TYPES[job.kind]
        self.starts += 1
        self.waiting[job.owner] -= 1
        if job.started is None:
            job.started = self._now
        loading = 0.0
        if worker.loaded == one.model:
            self.warm += 1
        else:
            loading = _START + WEIGHTS[one.model] * GB / _DISK
            if one.model not in self._disks[worker.node]:
                loading += WEIGHTS[one.model] * GB / _NETWORK
                self._disks[worker.node].add(one.model)
                for other in self.workers[max(worker.number - 8, 0) : worker.number + 8]:
                    if other.node == worker.node:
                        self._see(other)
            worker.loaded = one.model
        worker.run += 1
        worker.job, worker.since, worker.computes = job, self._now, self._now + loading
        self._see(worker)
        del self._idle[worker.number]
        self.rate[job.owner] += worker.machine.speed * one.gpus
        self.policy.charge(job, job.waiting.weight, self._now)
        takes = loading + one.seconds * job.work * job.left / worker.machine.speed
        if worker.number in self._broken and 0 <= self._now - _BROKEN_AT < _BROKEN_FOR:
            self._later(min(_BROKEN_AFTER, takes), "broken", worker.number, worker.run)
        else:
            self._later(takes, "done", worker.number, worker.run)

    def _happen(self, at: float, what: str, number: int, run: int) -> int:
        """Handle an event; return how many jobs ended."""
        if what == "node":
            self._later(self._draw.expovariate(1 / _NODE_MTBF) + _NODE_REPAIR, "node", number)
            for worker in self.workers:
                if worker.node == number:
                    self._fail(worker, at, _NODE_REPAIR)
            return 0
        worker = self.workers[number]
        if what == "crash":
            self._later(self._draw.expovariate(1 / _WORKER_MTBF), "crash", number)
            self._fail(worker, at, _WORKER_REPAIR)
        elif what == "up":
            worker.down -= 1
            if not worker.down:
                self._idle[number] = worker
        elif worker.run == run and what == "broken":
            self.broken += 1
            assert worker.job is not None
            worker.job.broken += 1
            self._stop(worker, at, progress=False)
            self._idle[number] = worker
        elif worker.run == run:
            job = worker.job
            assert what == "done" and job is not None and job.ended is None
            one = TYPES[job.kind]
            self._release(worker, job, at)
            self.seconds["computed"] += one.seconds * job.work * job.left / worker.machine.speed * worker.machine.gpus
            self.policy.charge(job, one.seconds * one.gpus * job.left * (job.work - 1.0), at)
            job.left, job.ended = 0.0, at
            self._idle[number] = worker
            return 1
        return 0

    def _fail(self, worker: Worker, at: float, repair: float) -> None:
        """A worker's process ends; its job resumes elsewhere from its last checkpoint."""
        if worker.job is not None:
            self.interrupted += 1
            self._stop(worker, at, progress=True)
        self._idle.pop(worker.number, None)
        worker.loaded = None
        worker.run += 1
        worker.down += 1
        self._see(worker)
        self._later(repair, "up", worker.number)

    def _stop(self, worker: Worker, at: float, *, progress: bool) -> None:
        """Queue the job of a worker again."""
        job = worker.job
        assert job is not None
        one = TYPES[job.kind]
        self._release(worker, job, at)
        ran = max(at - worker.computes, 0.0)
        saved = ran // _CHECKPOINT_SECONDS * _CHECKPOINT_SECONDS if progress else 0.0
        self.seconds["computed"] += saved * worker.machine.gpus
        self.seconds["lost"] += (ran - saved) * worker.machine.gpus
        before = job.waiting.weight
        job.left -= saved * worker.machine.speed / (one.seconds * job.work)
        job.avoid |= {str(worker.number)}
        job.wait()
        # What it did not use is returned.
        self.policy.charge(job, ran * worker.machine.speed * one.gpus - before, at)
        self._queue(job, first=True)

    def _release(self, worker: Worker, job: Job, at: float) -> None:
        self.rate[job.owner] -= worker.machine.speed * TYPES[job.kind].gpus
        self.seconds["loading"] += (min(worker.computes, at) - worker.since) * worker.machine.gpus
        worker.job = None


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fluid(videos: Sequence[Arrival], capacity: float) -> list[float]:
    """Return when each video would end if the fleet could be divided at will, equally among the keys that want it.

    A key's jobs each run at the speed of an H100, or of as many as they need, its oldest first.
    """
    ends = [0.0] * len(videos)
    queues: dict[str, list[int]] = defaultdict(list)
    left = [TYPES[one.kind].seconds * TYPES[one.kind].gpus * one.work for one in videos]
    now, coming = 0.0, 0
    while coming < len(videos) or queues:
        now += _FLUID_STEP
        while coming < len(videos) and videos[coming].at <= now:
            queues[videos[coming].owner].append(coming)
            coming += 1
        wants = {
            owner: sum(min(left[job], TYPES[videos[job].kind].gpus * _FLUID_STEP) for job in islice(jobs, 1000))
            for owner, jobs in queues.items()
        }
        room, remaining = capacity * _FLUID_STEP, len(wants)
        for owner, want in sorted(wants.items(), key=lambda one: one[1]):
            share = given = min(want, room / remaining)
            room, remaining = room - given, remaining - 1
            jobs = queues[owner]
            for job in jobs:
                part = min(left[job], TYPES[videos[job].kind].gpus * _FLUID_STEP, share)
                left[job] -= part
                share -= part
                if left[job] < _NONE:
                    ends[job] = now
                if share < _NONE:
                    break
            queues[owner] = [job for job in jobs if not ends[job]]
            if not queues[owner]:
                del queues[owner]
    return ends


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median, and what 95 and 99 of 100 do not exceed."""
    ordered = sorted(values)
    at = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: round(ordered[min(int(part * len(ordered)), len(ordered) - 1)], 1) for name, part in at.items()}


def classes(videos: Sequence[Arrival], burst: int) -> dict[str, str]:
    """Return whether each key is a bursting, heavy (1 % of all videos or more) or light one."""
    counts = Counter(one.owner for one in videos)
    bursting = {
        owner for (owner, at), count in Counter((one.owner, one.at) for one in videos).items() if count >= burst
    }
    heavy = {owner for owner, count in counts.items() if count >= 0.01 * len(videos)}
    return {one: "bursting" if one in bursting else "heavy" if one in heavy else "light" for one in counts}


def describe(done: Simulation, ideal: Sequence[float], kinds: dict[str, str]) -> dict[str, object]:
    """Return the figures of a simulation that has ended."""
    waits: dict[str, list[float]] = defaultdict(list)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for job, end in zip(done.jobs, ideal, strict=True):
        assert job.started is not None and job.ended is not None
        waits[kinds[job.owner]].append(job.started - job.at)
        waits[f"{TYPES[job.kind].gpus} GPU"].append(job.started - job.at)
        sums[job.owner][0] += job.ended - job.at
        sums[job.owner][1] += end - job.at
    slowdowns = sorted(real / best for real, best in sums.values())
    everything = done.seconds["all"]
    return {
        "wait": {kind: quantiles(values) for kind, values in sorted(waits.items())},
        "longest_wait": round(max(max(values) for values in waits.values())),
        "jain": round(statistics.mean(done.jain), 3) if done.jain else None,
        "slowdown": {"median": round(statistics.median(slowdowns), 2), "worst": round(slowdowns[-1], 2)},
        "warm": round(done.warm / done.starts, 3),
        "computed": round(done.seconds["computed"] / everything, 3),
        "loading": round(done.seconds["loading"] / everything, 3),
        "lost": round(done.seconds["lost"] / everything, 5),
        "interrupted": done.interrupted,
        "failed_on_broken": done.broken,
        "most_on_broken": max(job.broken for job in done.jobs),
        "hours": round(max(job.ended or 0.0 for job in done.jobs) / 3600, 2),
    }


def policies(seed: int) -> Iterator[Fair | FirstFit | Random]:
    """Yield the policies to compare."""
    yield Fair()
    yield FirstFit()
    yield Random(seed)


# Colors by Okabe and Ito: distinguishable with any color vision, on white and on black.
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1b1b1f; }
.small { font-size: 12px; fill: #55555f; }
.title { font-weight: 600; }
.ground { fill: #ffffff; }
.grid { stroke: #e2e2e8; }
polyline { fill: none; stroke-width: 2; }
.c0 { stroke: #0072b2; } .c1 { stroke: #e69f00; } .c2 { stroke: #009e73; }
@media (prefers-color-scheme: dark) {
  text { fill: #ececf1; }
  .small { fill: #a6a6b2; }
  .ground { fill: #17171b; }
  .grid { stroke: #34343c; }
  .c0 { stroke: #3a9bd9; }
}
"""
_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT, _GAP = 1000, 340, 60, 70, 400, 210, 100
_TIMES = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (36_000, "10 h"))


def figure(done: Sequence[Simulation], kinds: dict[str, str]) -> str:
    """Return a picture as SVG: waiting times of light keys and the length of the queue, for light and dark."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img">',
        "<title>Waiting times and queue of a simulated day</title>",
        f'<style>{_STYLE}</style><rect class="ground" width="{_WIDTH}" height="{_HEIGHT}"/>',
    ]
    for number, one in enumerate(done):
        x = _LEFT + number * 170
        parts.append(f'<polyline class="c{number}" points="{x},20 {x + 26},20"/>')
        parts.append(_text(x + 34, 25, one.policy.name))
    most = max(count for one in done for _, count in one.depth)
    end = max(at for one in done for at, _ in one.depth)
    left, right = _LEFT, _LEFT + _PLOT_WIDTH + _GAP
    longest = math.log10(_TIMES[-1][0])
    parts.append(_text(left, _TOP - 18, "Light keys: part of their videos (%) that waits longer", "title"))
    parts.append(_text(right, _TOP - 18, "Videos in the queue by hour of the day", "title"))
    for seconds, label in _TIMES:
        parts += _line(left + _PLOT_WIDTH * math.log10(seconds) / longest, label)
    for hour in range(0, 25, 4):
        parts += _line(right + _PLOT_WIDTH * hour * 3600 / end, f"{hour}")
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + _PLOT_HEIGHT * (1 - part)
        parts.append(_text(left - 8, y + 4, f"{100 * part:.0f}", "small", "end"))
        parts.append(_text(right - 8, y + 4, f"{part * most:,.0f}", "small", "end"))
    for number, one in enumerate(done):
        waits = sorted(max((job.started or 0) - job.at, 1.0) for job in one.jobs if kinds[job.owner] == "light")
        # As many points as the plot has columns, and fewer where many videos wait equally long.
        steps = [waits[min(int(len(waits) * part / 200), len(waits) - 1)] for part in range(201)]
        points = [
            (left + _PLOT_WIDTH * min(math.log10(wait) / longest, 1), _TOP + _PLOT_HEIGHT * part / 200)
            for part, wait in enumerate(steps)
        ]
        parts.append(_polyline(number, points))
        points = [
            (right + _PLOT_WIDTH * at / end, _TOP + _PLOT_HEIGHT * (1 - count / most)) for at, count in one.depth[::5]
        ]
        parts.append(_polyline(number, points))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x: float, label: str) -> Iterator[str]:
    floor = _TOP + _PLOT_HEIGHT
    yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{floor}"/>'
    yield _text(x, floor + 18, label, "small", "middle")


def _polyline(number: int, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="c{number}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def main() -> None:
    """Simulate a day with each policy."""
    parser = argparse.ArgumentParser(description="Simulate a cluster of 1,000 GPUs.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--videos", type=int, default=100_000)
    parser.add_argument("--out", type=Path, help="an SVG file to write")
    arguments = parser.parse_args()
    burst = arguments.videos // 20
    videos = arrivals(arguments.seed, arguments.videos, 200, burst)
    kinds = classes(videos, burst)
    ideal = fluid(videos, sum(one.gpus * one.workers * one.hosts * one.speed for one in FLEET))
    done, result = [], {}
    for policy in policies(arguments.seed):
        began = time.process_time()
        done.append(Simulation(policy, videos, FLEET, arguments.seed))
        done[-1].run()
        result[policy.name] = describe(done[-1], ideal, kinds) | {"cpu_seconds": round(time.process_time() - began, 1)}
        if isinstance(policy, Fair):
            calls = sorted(policy.times)
            spent = {"calls": len(calls), "cpu_seconds": sum(calls), "p99_ms": 1000 * calls[len(calls) * 99 // 100]}
            result[policy.name]["scheduler"] = {name: round(value, 1) for name, value in spent.items()}
        sys.stdout.write(f"{policy.name}: {json.dumps(result[policy.name])}\n")
        sys.stdout.flush()
    if arguments.out is not None:
        arguments.out.write_text(figure(done, kinds), encoding="utf-8")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
