"""What is shown of a cluster: machines, what they run, and where waiting videos will run.

`GET /v1/cluster` and the web app's panel both show a `ClusterView`.
"""

import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from runtime.core.facts import Fact, cut
from runtime.core.frozen import FrozenModel
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.machine.probe import Machine
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import JobRecord
from runtime.server.cluster.forecast import Expected, Why, forecast
from runtime.server.cluster.node_worker import Described
from runtime.server.cluster.problems import Problem
from runtime.server.scheduling import IdleWorker, WaitingJob

# Of the queue: videos among which paused ones are searched, and those that are shown.
MOST_PAUSED = 100
_MOST_SHOWN = 20
# A start that takes longer is shown.
_SLOW_SECONDS = 10.0
# Characters of an error of Ray.
_LONGEST_REASON = 200
# Why a video will run on a machine.
_PLACES: Mapping[Why, str] = {
    "loaded": "server.cluster_place_loaded",
    "stored": "server.cluster_place_stored",
    "sent": "server.cluster_place_sent",
}
# The head, among the ids of Ray's nodes.
HEAD = "head"


class Fallback(FrozenModel):
    """A component that a worker runs in PyTorch although it was planned, or asked for, on `backend`.

    Attributes:
        model: of the video.
        reason: why.
        job: the last video for which it was so.
    """

    model: str
    component: str
    backend: str
    reason: Fact
    job: str


class JobProgress(FrozenModel):
    """How far a running video is.

    Attributes:
        percent: of its operations.
        stage: what it does, as a title.
        step, steps: denoising steps done, and their number.
        seconds_left: estimated time until it is saved, if it is known.
    """

    percent: int
    stage: str
    step: int
    steps: int
    seconds_left: float | None


class WorkerView(FrozenModel):
    """A worker: it runs one video at a time.

    Attributes:
        pid: its process id on its machine; `None` while it starts.
        gpus: their names.
        job: the video that it runs; `progress` is that of the video.
        jobs_done: since it started; `None` for workers of the head, which are not counted.
        model: that is loaded, if it is known.
        fallbacks: of the last video of each model.
    """

    id: str
    pid: int | None
    gpus: tuple[str, ...]
    job: str | None
    progress: JobProgress | None
    jobs_done: int | None
    model: str | None
    fallbacks: tuple[Fallback, ...]


class GpuView(FrozenModel):
    """A GPU and its memory."""

    name: str
    total_bytes: int


NodeState = Literal["ready", "starting", "lost", "refused"]


class NodeView(FrozenModel):
    """A machine of the cluster.

    Attributes:
        id: of Ray; `HEAD` for the head.
        name: its host name, with a part of the id if several have the same.
        state: "starting" until its workers can be used, "lost" if Ray does not reach it any more, "refused" if its
            versions are not those of the head.
        cpu, ram_bytes: processor and memory; empty and 0 until they are known.
        workers: none on a head without GPUs, which makes no videos.
        problem: why a worker does not start, or why the machine was refused.
    """

    id: str
    name: str
    head: bool
    state: NodeState
    cpu: str
    ram_bytes: int
    gpus: tuple[GpuView, ...]
    workers: tuple[WorkerView, ...]
    problem: Fact | None = None


class QueuedView(FrozenModel):
    """Where a waiting video will run.

    Attributes:
        worker, node: ids; `None` if it cannot be said yet.
        name: of the machine.
        seconds: estimated time until it starts.
        reason: why there, or why it waits.
    """

    job: str
    worker: str | None
    node: str | None
    name: str | None
    seconds: float | None
    reason: Fact


class ClusterView(FrozenModel):
    """A cluster.

    Attributes:
        nodes: the head first.
        queued: the number of waiting videos.
        queue: the first of them, in the order in which they will start.
    """

    nodes: tuple[NodeView, ...]
    queued: int
    queue: tuple[QueuedView, ...]


@dataclass(frozen=True)
class RayNode:
    """A machine that Ray knows.

    Attributes:
        problem: why a worker does not start.
    """

    id: str
    host: str
    alive: bool
    problem: Fact | None = None


@dataclass(frozen=True)
class Working:
    """A worker of a node, as the head knows it.

    Attributes:
        job: the video that it runs.
        done: videos that it ran.
    """

    offer: IdleWorker
    described: Described
    job: JobRecord | None
    done: int
    fallbacks: tuple[Fallback, ...]


def why_not_started(error: Exception | None, seconds: float) -> Fact | None:
    """Return why a worker does not start; `None` while that is normal.

    Args:
        error: of Ray; `None` if the worker has not answered yet.
        seconds: since it was started.
    """
    if error is None:
        return Fact("server.cluster_start_slow", {"seconds": seconds}) if seconds >= _SLOW_SECONDS else None
    kind = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = cut(lines[-1], _LONGEST_REASON) if lines else kind
    if kind == "RuntimeEnvSetupError":
        return Fact("server.cluster_start_environment", {"reason": reason})
    if kind in {"ActorUnschedulableError", "TaskUnschedulableError"}:
        return Fact("server.cluster_start_resources")
    if kind == "OutOfMemoryError":
        return Fact("server.cluster_start_memory")
    # Ray's own text on a process that it lost is long and names nothing that happened.
    raised = getattr(error, "actor_init_failed", False) or hasattr(error, "cause")
    return Fact("server.cluster_start_failed", {"reason": reason}) if raised else Fact("server.cluster_start_died")


def fallbacks_in(plan: ExecutionPlan, planned: ExecutionPlan | None, job: str) -> list[Fallback]:
    """Return the components that a machine's plan runs in PyTorch, although another backend was planned or asked for.

    Args:
        plan: made where the video runs.
        planned: made by the head.
    """
    fallbacks = []
    for name, part in plan.components.items():
        before = PYTORCH if planned is None or name not in planned.components else planned.components[name].backend
        backend = str(plan.request.backend(name)) if plan.fell_back(name) else before
        if part.backend == PYTORCH and backend != PYTORCH and part.reasons:
            fallbacks.append(
                Fallback(model=plan.model, component=name, backend=backend, reason=part.reasons[0], job=job)
            )
    return fallbacks


@dataclass(frozen=True)
class VideoQueue:
    """The videos of a cluster.

    Attributes:
        waiting: the first that may run, in order.
        paused: ids of the first paused ones.
        queued: the number of queued ones.
        used: see `scheduling.assign`.
    """

    running: Sequence[JobRecord] = ()
    waiting: Sequence[WaitingJob] = ()
    paused: Sequence[str] = ()
    queued: int = 0
    used: Mapping[str | None, float] = field(default_factory=dict)


def cluster_view(
    jobs: JobQueue,
    videos: VideoQueue,
    nodes: Sequence[RayNode] = (),
    working: Sequence[Working] = (),
    refused: Sequence[Problem] = (),
) -> ClusterView:
    """Return what is shown of a cluster.

    Args:
        nodes: machines that joined.
        working: their workers.
        refused: machines that may not join.
    """
    host, machine = socket.gethostname(), jobs.own_machine
    names = _names([RayNode(HEAD, host, True), *nodes])
    progress = {record.id: _progress(jobs, record.id) for record in videos.running}
    own_workers = _own_workers(jobs, videos.running, progress)
    views = [_node(HEAD, names[HEAD], "ready", [machine], own_workers, head=True)]
    for node in nodes:
        here = [node_worker for node_worker in working if node_worker.offer.node == node.id]
        state: NodeState = "lost" if not node.alive else "ready" if here else "starting"
        workers = [_worker(node_worker, progress) for node_worker in here] if node.alive else []
        view = _node(node.id, names[node.id], state, [node_worker.described.machine for node_worker in here], workers)
        views.append(view.model_copy(update={"problem": node.problem if node.alive else None}))
    for problem in refused:
        view = _node(f"refused-{problem.host}", problem.host, "refused", (), ())
        views.append(view.model_copy(update={"problem": problem.fact}))
    offers = [node_worker.offer for node_worker in working] + [_own_offer(worker, machine) for worker in own_workers]
    busy = [worker for view in views for worker in view.workers if worker.job is not None]
    ends = {worker.id: _seconds_left(worker.progress) for worker in busy}
    in_order = [worker.id for worker in own_workers]
    expected = forecast(videos.waiting, offers, ends, videos.used, time.time(), _MOST_SHOWN, in_order)
    places = {offer.id: (offer.node, names[offer.node]) for offer in offers}
    queue = [*_expected(videos.waiting, expected, places), *_unplaced(videos.waiting, expected, offers)]
    queue += [_unknown(job, Fact("server.cluster_place_held")) for job in videos.paused]
    return ClusterView(nodes=tuple(views), queued=videos.queued, queue=tuple(queue[:_MOST_SHOWN]))


def _names(nodes: Sequence[RayNode]) -> dict[str, str]:
    """Return the names of machines by id; there may be several on one host."""
    counts = Counter(node.host for node in nodes)
    return {
        node.id: node.host if node.id == HEAD or counts[node.host] == 1 else f"{node.host} ({node.id[:6]})"
        for node in nodes
    }


def _node(
    node: str,
    name: str,
    state: NodeState,
    machines: Sequence[Machine],
    workers: Sequence[WorkerView],
    *,
    head: bool = False,
) -> NodeView:
    gpus = [GpuView(name=gpu.name, total_bytes=gpu.total_bytes) for machine in machines for gpu in machine.gpus]
    return NodeView(
        id=node,
        name=name,
        head=head,
        state=state,
        cpu=machines[0].cpu if machines else "",
        ram_bytes=machines[0].ram_bytes if machines else 0,
        gpus=tuple(gpus),
        workers=tuple(workers),
    )


def _worker(worker: Working, progress: Mapping[str, JobProgress | None]) -> WorkerView:
    job = None if worker.job is None else worker.job.id
    return WorkerView(
        id=worker.offer.id,
        pid=worker.described.pid,
        gpus=tuple(gpu.name for gpu in worker.described.machine.gpus),
        job=job,
        progress=None if job is None else progress.get(job),
        jobs_done=worker.done,
        model=worker.offer.loaded,
        fallbacks=worker.fallbacks,
    )


def _own_workers(
    jobs: JobQueue, running: Sequence[JobRecord], progress: Mapping[str, JobProgress | None]
) -> list[WorkerView]:
    """Return the head's own workers, which take the first video of the queue without being asked."""
    records = {record.instance: record for record in running}
    pids, machine = jobs.worker_pids(), jobs.own_machine
    views = []
    for gpu, name in jobs.video_workers().items():
        record = records.get(name)
        plan = None if record is None else record.plan
        views.append(
            WorkerView(
                id=name,
                pid=pids.get(gpu),
                gpus=tuple(device.name for device in machine.gpus[gpu : gpu + 1]),
                job=None if record is None else record.id,
                progress=None if record is None else progress.get(record.id),
                jobs_done=None,
                model=None if plan is None else plan.model,
                fallbacks=tuple(() if record is None or plan is None else fallbacks_in(plan, None, record.id)),
            )
        )
    return views


def _own_offer(worker: WorkerView, machine: Machine) -> IdleWorker:
    sizes = [gpu.total_bytes for gpu in machine.gpus]
    models = frozenset() if worker.model is None else frozenset({worker.model})
    kind = worker.gpus[0] if worker.gpus else machine.cpu
    # The workers of one machine lend each other their GPUs.
    gpus, free = max(len(sizes), 1), min(sizes, default=machine.ram_bytes)
    return IdleWorker(worker.id, HEAD, kind, gpus, free, worker.model, models, frozenset(), 1.0)


def _progress(jobs: JobQueue, job_id: str) -> JobProgress | None:
    job = jobs.job(job_id)
    if job is None:
        return None
    progress = job.progress.at(time.monotonic())
    seconds = progress.seconds_left
    return JobProgress(
        percent=round(100 * progress.fraction),
        stage=progress.title,
        step=progress.step,
        steps=progress.steps,
        seconds_left=None if seconds is None else round(seconds, 1),
    )


def _seconds_left(progress: JobProgress | None) -> float:
    return 0.0 if progress is None or progress.seconds_left is None else progress.seconds_left


def _expected(
    waiting: Sequence[WaitingJob], expected: Sequence[Expected], places: Mapping[str, tuple[str, str]]
) -> Iterator[QueuedView]:
    """Yield the videos that the scheduler is expected to send to a worker."""
    models = {job.id: job.model for job in waiting}
    for entry in expected:
        node, name = places[entry.worker]
        # The head has the models: others get them from there.
        why: Why = "stored" if node == HEAD and entry.why == "sent" else entry.why
        reason = Fact(_PLACES[why], {"model": models[entry.job], "host": name})
        seconds = round(entry.seconds, 1)
        yield QueuedView(job=entry.job, worker=entry.worker, node=node, name=name, seconds=seconds, reason=reason)


def _unplaced(
    waiting: Sequence[WaitingJob], expected: Sequence[Expected], offers: Sequence[IdleWorker]
) -> Iterator[QueuedView]:
    """Yield the other videos: those that fit no worker, and those that run later."""
    placed = {entry.job for entry in expected}
    most = max((offer.gpus for offer in offers), default=0)
    for job in waiting:
        if job.id in placed:
            continue
        largest = max((offer.free_bytes for offer in offers if offer.gpus >= job.gpus), default=0)
        reason = Fact("server.cluster_place_later")
        if not offers:
            reason = Fact("server.cluster_place_none")
        elif job.gpus > most:
            reason = Fact("server.cluster_place_gpus", {"gpus": job.gpus, "most": most})
        elif job.bytes_per_gpu > largest:
            reason = Fact("server.cluster_place_memory", {"needed": job.bytes_per_gpu, "most": largest})
        yield _unknown(job.id, reason)


def _unknown(job: str, reason: Fact) -> QueuedView:
    return QueuedView(job=job, worker=None, node=None, name=None, seconds=None, reason=reason)
