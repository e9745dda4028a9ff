"""Which waiting job runs on which idle worker of a cluster: fair between API keys, warm models first. Pure.

Each waiting job has a tag, as in start-time fair queueing (Goyal et al., 1996): the weighted seconds that its owner has
used lately, plus those of the owner's jobs before it in the queue, minus a credit for its time in the queue. The job
with the smallest tag is next. Two preferences may change the order, both by a fixed number of weighted seconds, so that
they delay a job for a bounded time only, also while thousands wait:

- A job whose model is loaded on an idle worker precedes others whose tags are up to `WARM_SECONDS` smaller (compare
  delay scheduling, Zaharia et al., 2010).
- A job does not take a worker that a more demanding job waits for, if other workers of the cluster could run it but not
  the demanding one, unless its tag is more than `RESERVED_SECONDS` smaller. Memory and numbers of GPUs count alike.

A weighted second is a second of one GPU of speed 1. No idle worker stays idle while a waiting job fits it.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

WARM_SECONDS = 600.0
RESERVED_SECONDS = 100_000.0
# Weighted seconds by which a job's tag shrinks for each second in the queue: later jobs of other owners do not precede
# it for ever.
AGEING = 0.1
# In which the use of an owner counts half as much.
HALF_LIFE_SECONDS = 900.0


class WaitingJob(NamedTuple):
    """A job in the queue.

    Attributes:
        id: of the job.
        owner: of its API key; `None` for the owner of the app.
        model: the model that must be loaded.
        gpus: how many GPUs of one host it needs.
        bytes_per_gpu: memory that it needs on each.
        engines: ids of the engines that it would use.
        seconds: forecast of its duration on a worker of speed 1.
        created: when it was queued, in the seconds of `now`.
        avoid: ids of workers and nodes on which it failed.
    """

    id: str
    owner: str | None
    model: str
    gpus: int
    bytes_per_gpu: int
    engines: frozenset[str]
    seconds: float
    created: float
    avoid: frozenset[str] = frozenset()

    @property
    def weight(self) -> float:
        """The weighted seconds that its owner is charged."""
        return self.seconds * self.gpus


class IdleWorker(NamedTuple):
    """A GPU, or a group of GPUs of one host, that runs one job at a time.

    Attributes:
        id: of the worker.
        node: the id of its host.
        kind: of its GPUs, such as "NVIDIA H100".
        gpus: how many it has.
        free_bytes: memory of each that a job can use, after the loaded model was removed.
        loaded: the model in its memory.
        models: models on the host's disk.
        engines: ids of the engines on the host's disk.
        speed: how fast it is, relative to that of the forecasts.
    """

    id: str
    node: str
    kind: str
    gpus: int
    free_bytes: int
    loaded: str | None
    models: frozenset[str]
    engines: frozenset[str]
    speed: float


class Usage:
    """The weighted seconds that each owner has used lately; older ones count less.

    Charge a job when it is assigned, and the difference from its forecast when it ends.
    """

    def __init__(self, half_life: float = HALF_LIFE_SECONDS) -> None:
        self._half_life = half_life
        self._used: dict[str | None, tuple[float, float]] = {}

    def charge(self, owner: str | None, seconds: float, at: float) -> None:
        """Add weighted seconds to the use of an owner; negative ones return part of a charge."""
        before = self._decayed(owner, at)
        self._used[owner] = (max(before + seconds, 0.0), at)

    def used(self, now: float) -> dict[str | None, float]:
        """Return the use of each owner; those who have used next to nothing are forgotten."""
        usage = {owner: self._decayed(owner, now) for owner in self._used}
        for owner in [owner for owner, seconds in usage.items() if seconds < 1.0]:
            del self._used[owner], usage[owner]
        return usage

    def _decayed(self, owner: str | None, now: float) -> float:
        seconds, at = self._used.get(owner, (0.0, now))
        return float(seconds * 0.5 ** (max(now - at, 0.0) / self._half_life))


def assign(
    waiting: Sequence[WaitingJob],
    workers: Sequence[IdleWorker],
    used: Mapping[str | None, float],
    now: float,
    busy: Sequence[IdleWorker] = (),
) -> list[tuple[str, str]]:
    """Return ids of jobs to start, each with the worker that runs it, in the order of their tags.

    Takes O((jobs + workers) log) for the few models and kinds of GPUs that a cluster has.

    Args:
        waiting: the queue in order; paused jobs are left out. The order of an owner's jobs is kept, but for the two
            preferences and for jobs that no idle worker can run.
        workers: the idle ones.
        used: weighted seconds of each owner, see `Usage`; those who are missing have used none.
        now: seconds, of the clock of `WaitingJob.created`.
        busy: the workers that run a job. Without them, a job is sent back to a worker that it should avoid if no other
            is idle, and idle workers are not kept for demanding jobs if the smaller workers are all busy.
    """
    if not waiting or not workers:
        return []
    fleet = _Fleet(workers, busy, Counter(job.model for job in waiting))
    groups = _group(waiting, used, now, fleet)
    # How many jobs wait, by the kinds of workers that fit.
    remaining: Counter[int] = Counter()
    for group in groups:
        remaining[group.fits] += len(group.jobs)
        group.inside = ()
    for group in groups:
        group.inside = tuple(fits for fits in remaining if fits != group.fits and fits & group.fits == fits)
    # The smallest key that each group's first job can have; it is computed when it is its turn.
    heap = [(group.jobs[0][0] - WARM_SECONDS, number) for number, group in enumerate(groups)]
    heapify(heap)
    assigned: list[tuple[str, str]] = []
    while heap and fleet.idle:
        _, number = heappop(heap)
        group = groups[number]
        if not fleet.idle & group.fits:
            continue
        tag, index = group.jobs[0]
        choice = fleet.find(waiting[index], group, remaining)
        if choice is not None:
            if heap and tag + choice.delay > heap[0][0]:
                heappush(heap, (tag + choice.delay, number))
                continue
            assigned.append((waiting[index].id, fleet.take(choice)))
        heappop(group.jobs)
        remaining[group.fits] -= 1
        if group.jobs:
            heappush(heap, (group.jobs[0][0] - WARM_SECONDS, number))
    return assigned


class _Group:
    """Waiting jobs with equal needs.

    Attributes:
        fits: the kinds of workers in the cluster that can run them, one bit each.
        jobs: a heap of tags and indices in the queue.
        inside: the `fits` of more demanding jobs, which only some of the workers can run that can run these.
        route: the pools of idle workers that can run them, best first; made when it is needed.
    """

    __slots__ = ("engines", "fits", "gpus", "inside", "jobs", "model", "route")

    def __init__(self, model: str, gpus: int, engines: frozenset[str], fits: int) -> None:
        self.model = model
        self.gpus = gpus
        self.engines = engines
        self.fits = fits
        self.jobs: list[tuple[float, int]] = []
        self.inside: tuple[int, ...] = ()
        self.route: list[_Pool] | None = None


def _group(
    waiting: Sequence[WaitingJob], used: Mapping[str | None, float], now: float, fleet: "_Fleet"
) -> list[_Group]:
    groups: dict[tuple[str, int, frozenset[str], int], _Group] = {}
    # The use of each owner with the jobs so far, and the tag of its last one: an owner's jobs keep their order.
    charged = dict(used)
    last: dict[str | None, float] = {}
    for index, job in enumerate(waiting):
        fits = fleet.fits(job.gpus, job.bytes_per_gpu)
        if not fits:
            continue
        before = charged.get(job.owner, 0.0)
        tag = before - AGEING * (now - job.created)
        previous = last.get(job.owner)
        if previous is not None and previous > tag:
            tag = previous
        last[job.owner] = tag
        charged[job.owner] = before + job.weight
        key = (job.model, job.gpus, job.engines, fits)
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group(*key)
        group.jobs.append((tag, index))
    for group in groups.values():
        heapify(group.jobs)
    return list(groups.values())


class _Pool(NamedTuple):
    """Idle workers that differ in free memory only, ascending."""

    kind: int
    first: IdleWorker
    workers: list[tuple[int, str, IdleWorker]]


class _Found(NamedTuple):
    """An idle worker for a job, and the weighted seconds by which smaller tags precede the job there."""

    pool: _Pool
    place: int
    delay: float


class _Fleet:
    """The workers of a cluster by kind, and the idle ones by what is loaded.

    A kind is a number of GPUs, their name and speed. Sets of kinds are integers with a bit for each.

    Attributes:
        idle: the kinds that have an idle worker.
    """

    def __init__(
        self, workers: Sequence[IdleWorker], busy: Sequence[IdleWorker], job_counts: Mapping[str, int]
    ) -> None:
        self._workers = (workers, busy)
        self._kinds: dict[tuple[int, str, float], int] = {}
        self._total: Counter[int] = Counter()
        self._idle: Counter[int] = Counter()
        most: dict[int, int] = {}
        for worker in (*workers, *busy):
            kind = self._kind(worker)
            self._total[kind] += 1
            most[kind] = max(most.get(kind, 0), worker.free_bytes)
        self._levels = {
            gpus: _levels({kind: most[kind] for (has, _, _), kind in self._kinds.items() if has >= gpus})
            for gpus in {gpus for gpus, _, _ in self._kinds}
        }
        pools: dict[tuple[int, str | None, frozenset[str], frozenset[str]], _Pool] = {}
        loaded: Counter[str | None] = Counter()
        for worker in workers:
            kind = self._kind(worker)
            self._idle[kind] += 1
            loaded[worker.loaded] += 1
            pool = pools.setdefault((kind, worker.loaded, worker.models, worker.engines), _Pool(kind, worker, []))
            pool.workers.append((worker.free_bytes, worker.id, worker))
        for pool in pools.values():
            pool.workers.sort()
        self._pools = list(pools.values())
        self.idle = sum(1 << kind for kind in self._idle)
        # How much each loaded model is wanted: jobs for each idle worker that has it.
        self._demand = {model: job_counts.get(model, 0) / count for model, count in loaded.items() if model is not None}
        self._places: dict[str, list[int]] | None = None

    def _kind(self, worker: IdleWorker) -> int:
        return self._kinds.setdefault((worker.gpus, worker.kind, worker.speed), len(self._kinds))

    def fits(self, gpus: int, size: int) -> int:
        """Return the kinds of workers that have this many GPUs, and this memory on each."""
        levels = self._levels.get(gpus)
        if levels is None:
            # No kind has exactly this number.
            more = [has for has in self._levels if has > gpus]
            levels = self._levels[gpus] = self._levels[min(more)] if more else ([], [0])
        sizes, sets = levels
        return sets[bisect_left(sizes, size)]

    def find(self, job: WaitingJob, group: _Group, remaining: Mapping[int, int]) -> _Found | None:
        """Return the best idle worker for a job of a group; `None` if there is none.

        Args:
            remaining: the number of waiting jobs by the kinds of workers that fit.
        """
        if group.route is None:
            group.route = self._route(group)
        elif not all(pool.workers for pool in group.route):
            group.route = [pool for pool in group.route if pool.workers]
        reserved = self._kept(group, remaining)
        choice = self._first(job, [pool for pool in group.route if not reserved >> pool.kind & 1], job.avoid)
        if choice is not None:
            return choice._replace(delay=-WARM_SECONDS if choice.pool.first.loaded == job.model else 0.0)
        choice = self._first(job, group.route, job.avoid)
        if choice is None and job.avoid and not self._others(job, group.fits):
            choice = self._first(job, group.route, frozenset())
        return choice

    def take(self, choice: _Found) -> str:
        """Remove a worker from the idle ones and return its id."""
        _, name, _ = choice.pool.workers.pop(choice.place)
        self._idle[choice.pool.kind] -= 1
        if not self._idle[choice.pool.kind]:
            self.idle &= ~(1 << choice.pool.kind)
        return name

    def _kept(self, group: _Group, remaining: Mapping[int, int]) -> int:
        """Return the kinds whose idle workers more demanding jobs wait for."""
        reserved = 0
        for fits in group.inside:
            for kind in _bits(fits & self.idle & ~reserved) if remaining[fits] else ():
                waiting = sum(remaining[more_fits] for more_fits in group.inside if more_fits >> kind & 1)
                reserved |= (waiting >= self._idle[kind]) << kind
        return reserved

    def _route(self, group: _Group) -> list[_Pool]:
        """Return the pools that can run a group, best first."""

        def order(pool: _Pool) -> tuple[bool, bool, bool, int, float, float]:
            worker = pool.first
            return (
                worker.loaded != group.model,
                group.model not in worker.models and worker.loaded != group.model,
                not group.engines <= worker.engines,
                worker.gpus,
                -worker.speed,
                # Models that fewer jobs wait for are removed first.
                -1.0 if worker.loaded is None else self._demand[worker.loaded],
            )

        return sorted((pool for pool in self._pools if pool.workers and group.fits >> pool.kind & 1), key=order)

    def _first(self, job: WaitingJob, pools: Iterable[_Pool], avoid: Collection[str]) -> _Found | None:
        """Return the worker with the least memory that is enough, in the first pool that has one."""
        for pool in pools:
            for place in range(bisect_left(pool.workers, (job.bytes_per_gpu,)), len(pool.workers)):
                worker = pool.workers[place][2]
                if worker.id not in avoid and worker.node not in avoid:
                    return _Found(pool, place, RESERVED_SECONDS)
        return None

    def _others(self, job: WaitingJob, fits: int) -> bool:
        """Return whether a worker that a job need not avoid can run it, now or later."""
        if self._places is None:
            self._places = defaultdict(list)
            for number, candidate in enumerate(worker for workers in self._workers for worker in workers):
                self._places[candidate.id].append(number)
                self._places[candidate.node].append(number)
        idle, busy = self._workers
        avoided = {number for name in job.avoid for number in self._places.get(name, ())}
        kinds = [self._kind(idle[number] if number < len(idle) else busy[number - len(idle)]) for number in avoided]
        return sum(self._total[kind] for kind in _bits(fits)) > sum(fits >> kind & 1 for kind in kinds)


def _levels(most: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Return the sizes of kinds, ascending, and for each the set of kinds with at least as much; then an empty set."""
    sizes = sorted(set(most.values()))
    return sizes, [sum(1 << kind for kind, size in most.items() if size >= least) for least in sizes] + [0]


def _bits(kinds: int) -> Iterable[int]:
    """Yield the kinds of a set."""
    while kinds:
        least = kinds & -kinds
        yield least.bit_length() - 1
        kinds ^= least
