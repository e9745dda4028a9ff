"""A cluster on paper over a real job queue: two machines with GPUs, one that starts and one that was lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from runtime.core.events import Event, Planned, StageStarted, StepDone
from runtime.core.facts import Fact
from runtime.machine.probe import Machine
from runtime.pipeline.history_file import HistoryFile
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore
from runtime.server.cluster.node_worker import Described
from runtime.server.cluster.views import ClusterView, Fallback, RayNode, VideoQueue, Working, cluster_view
from runtime.server.scheduling import IdleWorker, WaitingJob
from tests.planner.test_table import here
from tests.plans import GIB, no_engines
from tests.queue.samples import sample_plan, sample_request

MODEL = "diorama"
H100 = here("NVIDIA H100 80GB HBM3", (9, 0), 80)
RTX = here("NVIDIA GeForce RTX 4090", (8, 9), 24)
NODES = [RayNode(name[0] * 12, name, name != "delta") for name in ("alpha", "beta", "gamma", "delta")]


@contextmanager
def queue_in(folder: Path) -> Iterator[JobQueue]:
    """Yield a queue without workers that make videos, as a head's without a GPU."""
    engines = no_engines(folder)
    queue = JobQueue(
        folder / "weights",
        folder / "outputs",
        engines,
        HistoryFile(folder, engines.machine),
        JobStore(folder / "jobs.sqlite"),
    )
    queue.makes_videos = False
    try:
        yield queue
    finally:
        queue.close()
        queue.store.close()


def described(host: str, machine: Machine) -> Described:
    """Return what a worker says of itself."""
    return Described(host=host, pid=4711, machine=machine, models=frozenset({MODEL}), engines=frozenset())


def working(
    name: str,
    node: RayNode,
    machine: Machine,
    job: JobRecord | None = None,
    *,
    loaded: str | None = None,
    models: frozenset[str] = frozenset({MODEL}),
    fallbacks: tuple[Fallback, ...] = (),
) -> Working:
    """Return a worker with one of a machine's GPUs."""
    own = replace(machine, gpus=machine.gpus[:1])
    kind, size = (own.gpus[0].name, own.gpus[0].total_bytes) if own.gpus else (own.cpu, own.ram_bytes)
    offer = IdleWorker(name, node.id, kind, 1, size, loaded, models, frozenset(), 1.0)
    return Working(offer, described(node.host, own), job, 3, fallbacks)


def waiting(job: JobRecord, *, gpus: int = 1, gib: int = 0, model: str = MODEL, seconds: float = 40.0) -> WaitingJob:
    """Return what the scheduler knows of a job."""
    return WaitingJob(job.id, job.owner, model, gpus, gib * GIB, frozenset(), seconds, job.created)


def run_on(queue: JobQueue, job: JobRecord, worker: str, step: int = 3) -> JobRecord:
    """Let a worker run a job up to a step; return its record."""
    record = queue.store.order.claim_job(job.id, worker)
    assert record is not None
    assert record.plan is not None
    events: list[Event] = [Planned(plan=record.plan), StageStarted(stage="denoise", part="transformer")]
    events += [StepDone(step=one, of=4, seconds=8.0, part="transformer") for one in range(1, step + 1)]
    for event in events:
        queue.store.log.record(job.id, event, record.lease)
    view = queue.job(job.id)
    assert view is not None
    view.refresh()
    return queue.store.get(job.id)


def sample_view(queue: JobQueue, prompt: str = "a red boat at sunset") -> ClusterView:
    """Return a view of a cluster that runs one video, with five more in the queue."""
    alpha, beta, *_ = NODES
    prompts = [f"{prompt}, number {number}" for number in range(1, 7)]
    jobs = [queue.store.add(sample_request(prompt=one), sample_plan().replace(prompt=one)) for one in prompts]
    queue.store.hold([jobs[5].id], True)
    running = run_on(queue, jobs[0], "head.node0")
    reason = Fact("engine.differs_version", {"package": "torch", "found": "2.11.0", "here": "2.13.0"})
    fallback = Fallback(model=MODEL, component="vae", backend="tensorrt", reason=reason, job=running.id)
    workers = [
        working("head.node0", alpha, H100, running, loaded=MODEL, fallbacks=(fallback,)),
        working("head.node1", alpha, H100, loaded=MODEL),
        working("head.node2", beta, RTX, models=frozenset()),
    ]
    may_run = [waiting(jobs[1]), waiting(jobs[2]), waiting(jobs[3], gpus=2), waiting(jobs[4], gib=100)]
    return cluster_view(queue, VideoQueue([running], may_run, [jobs[5].id], 5), NODES, workers)
