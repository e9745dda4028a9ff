"""Which machine of a cluster will run each waiting video, when and why: the scheduler's decisions, ahead of time. Pure.

Each worker is free after the forecast of its running video. Then the scheduler itself chooses among the waiting videos,
and so on. Videos that are added later, or take another time than forecast, change what really happens.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from runtime.server.scheduling import IdleWorker, WaitingJob, assign

# Whether the model is in the worker's memory, on its machine's disk, or must be sent.
Why = Literal["loaded", "stored", "sent"]


class Expected(NamedTuple):
    """Where a waiting job will run.

    Attributes:
        job: its id.
        worker: the worker's id.
        seconds: until it starts.
        why: what the worker has of the model then.
    """

    job: str
    worker: str
    seconds: float
    why: Why


def forecast(
    waiting: Sequence[WaitingJob],
    workers: Iterable[IdleWorker],
    ends: Mapping[str, float],
    used: Mapping[str | None, float],
    now: float,
    most: int,
    in_order: Collection[str] = (),
) -> list[Expected]:
    """Return where waiting jobs will run, in the order of their starts; jobs that fit no worker are left out.

    Args:
        waiting, used, now: see `scheduling.assign`.
        workers: idle and busy ones, with the model that is loaded once they are idle.
        ends: seconds until a busy worker is idle, by its id.
        most: number of jobs after which to stop.
        in_order: ids of workers that take the first job of the queue, as those of the head do.
    """
    fleet = {worker.id: worker for worker in workers}
    jobs = {job.id: job for job in waiting}
    charged = dict(used)
    free = [(max(ends.get(name, 0.0), 0.0), name) for name in fleet]
    heapify(free)
    expected: list[Expected] = []
    while free and jobs and len(expected) < most:
        at = free[0][0]
        idle = []
        while free and free[0][0] <= at:
            idle.append(heappop(free)[1])
        pairs = list(zip(jobs, [name for name in idle if name in in_order], strict=False))
        paired_ids = {job_id for job_id, _ in pairs}
        remaining = [job for job in jobs.values() if job.id not in paired_ids]
        choosing = [fleet[name] for name in idle if name not in in_order]
        busy = [fleet[name] for _, name in free if name not in in_order]
        pairs += assign(remaining, choosing, charged, now + at, busy)
        for job_id, name in pairs:
            job, worker = jobs.pop(job_id), fleet[name]
            why: Why = "loaded" if worker.loaded == job.model else "stored" if job.model in worker.models else "sent"
            expected.append(Expected(job_id, name, at, why))
            charged[job.owner] = charged.get(job.owner, 0.0) + job.weight
            fleet[name] = worker._replace(loaded=job.model, models=worker.models | {job.model})
            heappush(free, (at + job.seconds / worker.speed, name))
    return expected[:most]
