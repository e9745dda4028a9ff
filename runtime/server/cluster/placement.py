"""What the scheduler knows of jobs and workers of a cluster, beyond their plans: use, speeds, and nodes to avoid."""

import threading
from collections.abc import Iterable, Sequence

from runtime.core.events import TerminalEvent, VideoSaved
from runtime.queue.records import Waiting
from runtime.server.scheduling import IdleWorker, Usage, WaitingJob

# How much the latest video counts in the speed of a kind of GPU, which is kept within a factor.
_LATEST, _MOST_SPEED = 0.3, 100.0
# Stages whose seconds a plan forecasts.
_STAGES = ("encode", "denoise", "decode")


class Placement:
    """Corrects the scheduler's forecasts by what happened. Safe between threads."""

    def __init__(self) -> None:
        self._usage = Usage()
        # By the name of GPU or CPU: the forecast of a video over the time that it took.
        self._speeds: dict[str, float] = {}
        # By job: the nodes on which its worker died, or that cannot run it.
        self._avoid: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()

    def jobs(self, waiting: Iterable[Waiting], workers: Sequence[IdleWorker]) -> list[WaitingJob]:
        """Return what the scheduler needs to know of jobs.

        One that has too little memory everywhere is for the workers with the most: their node may know a way.
        """
        with self._lock:
            avoid = dict(self._avoid)
        jobs = []
        for job in waiting:
            needs = job.needs
            most = max((worker.free_bytes for worker in workers if worker.gpus >= needs.gpus), default=0)
            jobs.append(
                WaitingJob(
                    id=job.id,
                    owner=job.owner,
                    model=needs.model,
                    gpus=needs.gpus,
                    bytes_per_gpu=min(needs.bytes_per_gpu, most),
                    engines=frozenset(needs.engines),
                    seconds=needs.seconds,
                    created=job.created,
                    avoid=avoid.get(job.id, frozenset()),
                )
            )
        return jobs

    def used(self, now: float) -> dict[str | None, float]:
        """See `Usage.used`."""
        with self._lock:
            return self._usage.used(now)

    def speed(self, kind: str) -> float:
        """Return how fast a kind of GPU is; 1 until a video was made on one."""
        with self._lock:
            return self._speeds.get(kind, 1.0)

    def started(self, job: WaitingJob, now: float) -> None:
        """Charge a job's owner with its forecast."""
        with self._lock:
            self._usage.charge(job.owner, job.weight, now)

    def ran(self, job: WaitingJob, kind: str, seconds: float, end: TerminalEvent | None, now: float) -> None:
        """Correct the charge of a job's owner, and the speed of a kind of GPU.

        Args:
            seconds: that the job was on a worker; 0 if it did not start.
            end: of the job; `None` if it will run again.
        """
        with self._lock:
            self._usage.charge(job.owner, seconds * self._speeds.get(kind, 1.0) * job.gpus - job.weight, now)
            if end is not None:
                self._avoid.pop(job.id, None)
            # An earlier run may have been on another kind.
            if isinstance(end, VideoSaved) and not end.earlier:
                took = sum(end.timings.get(stage, 0.0) for stage in _STAGES)
                latest = min(max(job.seconds / max(took, 0.01), 1 / _MOST_SPEED), _MOST_SPEED)
                before = self._speeds.get(kind, latest)
                self._speeds[kind] = round(before + _LATEST * (latest - before), 2)

    def avoid(self, job_id: str, node: str) -> bool:
        """Have a job avoid a node; return whether it did not before: it is sent there again only if no other fits."""
        with self._lock:
            before = self._avoid.get(job_id, frozenset())
            self._avoid[job_id] = before | {node}
            return node not in before
