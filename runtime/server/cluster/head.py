"""The head of a cluster: sends queued videos to the workers of the nodes, and stores what they send back.

One thread watches the nodes and starts their workers, another one assigns jobs, and each worker has a thread in which
its jobs run. All writes carry the lease of their job: what an older run sends is not stored.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from runtime.core.errors import StoreError
from runtime.core.events import Event, FellBack, Planned, TerminalEvent
from runtime.core.facts import Fact, cut
from runtime.core.processes import kill_tree
from runtime.core.settings import Settings
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import VIDEOS, JobRecord
from runtime.queue.recovery import MemoryKills
from runtime.queue.run import ControlPoller, Outcome, PutBack, Run, WorkerLost
from runtime.server.cluster.node_worker import Described, NodeWorker, Order, Sent, memory_kills
from runtime.server.cluster.placement import Placement
from runtime.server.cluster.problems import Problem, Problems, refusal
from runtime.server.cluster.ray_process import NODE, WORKERS, RayProcess, authenticate, free_port, versions
from runtime.server.cluster.remote_executor import ConnectionLostError, RemoteExecutor
from runtime.server.cluster.sending import Remote, Sender
from runtime.server.cluster.views import (
    MOST_PAUSED,
    ClusterView,
    Fallback,
    RayNode,
    VideoQueue,
    Working,
    cluster_view,
    fallbacks_in,
    why_not_started,
)
from runtime.server.scheduling import IdleWorker, WaitingJob, assign

_POLL_SECONDS = 0.1
_NODES_SECONDS = 1.0
_RETRY_SECONDS = 3.0
# After a worker is lost: until it is known whether its node is lost as well.
_NODE_SECONDS = 5.0
# Until a new process of a node has read the count.
_COUNT_SECONDS = 30.0
_CLOSING_SECONDS = 20.0
# Until a worker that was started has to answer.
_START_SECONDS = 120.0
# Machines that were refused, and characters of their names, which they state themselves.
_MOST_REFUSED, _LONGEST_NAME = 20, 64
# Queued videos of each owner, model and number of GPUs that the scheduler is given.
_MOST_WAITING = 40

logger = logging.getLogger(__name__)


class ClusterHead:
    """The head of a cluster, until `close`.

    Args:
        jobs: the queue, whose store and folders only this process writes.
        key: of the cluster.
        library: whose engines are sent to nodes that would build the same.

    Attributes:
        port: of Ray.

    Raises:
        MachineError: if Ray does not start.
    """

    def __init__(self, jobs: JobQueue, settings: Settings, key: str, library: EngineStore) -> None:
        authenticate(key)
        self.key = key
        self.port = free_port()
        self._ray = RayProcess(
            {"head": "", "port": str(self.port), "no-monitor": "", "include-dashboard": "false"}, key, {}, cpus=0
        )
        import ray

        try:
            ray.init(
                f"127.0.0.1:{self.port}",
                namespace="tandem",
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except BaseException:
            self._ray.close()
            raise
        self.jobs = jobs
        self.settings = settings
        self.store = jobs.store
        self.poller = ControlPoller(self.store)
        self.library = library
        self.placement = Placement()
        self._workers: dict[str, _Proxy] = {}
        self._nodes: dict[str, RayNode] = {}
        self._numbers = itertools.count()
        self._starting: list[_Starting] = []
        self._retry_at: dict[str, float] = {}
        self._refused: dict[str, Problem] = {}
        self._problems = Problems(head=jobs.instance)
        self._problems.write(settings.cache_dir)
        self._lock = threading.RLock()
        self._sending: dict[str, threading.Lock] = {}
        self.closing = threading.Event()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.poller.polling())
        self._threads = [
            threading.Thread(target=self._forever, args=(work, seconds), name=f"cluster-{work.__name__}", daemon=True)
            for work, seconds in ((self._watch_nodes, _NODES_SECONDS), (self._assign, _POLL_SECONDS))
        ]
        for thread in self._threads:
            thread.start()

    def view(self) -> ClusterView:
        """Return the machines, what runs where, and where waiting videos will run."""
        counts = self.store.order.counts()
        queued = sum(counts.get(("video", state), 0) for state in ("queued", "paused"))
        running = self.store.order.jobs(states=["running"], kinds=VIDEOS)
        first = self.store.order.jobs(states=["queued"], kinds=VIDEOS, limit=MOST_PAUSED)
        paused = [job.id for job in first if job.held]
        with self._lock:
            proxies = dict(self._workers)
        offers = self._offers(proxies)
        waiting = self.placement.jobs(self.store.order.waiting(_MOST_WAITING), offers)
        with self._lock:
            working = [proxy.working(offer) for proxy, offer in zip(proxies.values(), offers, strict=True)]
            nodes, refused = list(self._nodes.values()), list(self._refused.values())
        videos = VideoQueue(running, waiting, paused, queued, self.placement.used(time.time()))
        return cluster_view(self.jobs, videos, nodes, working, refused)

    def joining(self, request: Request) -> dict[str, Any]:
        """Return what a machine needs to join: the port of Ray, this start of the head, and the versions.

        The query has the machine's name as "host", and its versions. It does not join with others.
        """
        head_versions, theirs = versions(), dict(request.query_params)
        host = cut(theirs.get("host", ""), _LONGEST_NAME)
        problem = refusal(head_versions, theirs)
        if host and problem is not None:
            with self._lock:
                self._refused.pop(host, None)
                self._refused[host] = Problem(host=host, fact=problem)
                if len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
        return {"port": self.port, "session": self.jobs.instance, "versions": head_versions}

    def machine(self) -> Machine | None:
        """Return the machine with the most memory, for which new requests are planned; `None` without nodes."""
        with self._lock:
            machines = [proxy.described.machine for proxy in self._workers.values()]
        return max(machines, key=_capacity, default=None)

    def size(self) -> int:
        """Return the number of workers of all nodes."""
        with self._lock:
            return len(self._workers)

    def close(self) -> None:
        """Pause the running jobs, which resume at the next start, and end Ray on this machine."""
        self.closing.set()
        with self._lock:
            proxies = list(self._workers.values())
        end = time.monotonic() + _CLOSING_SECONDS
        for proxy in proxies:
            proxy.thread.join(max(end - time.monotonic(), 0.0))
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.1))
        Problems(head=self.jobs.instance).write(self.settings.cache_dir)
        self._stack.close()
        import ray

        with contextlib.suppress(Exception):  # Ray ends in any case
            ray.shutdown()
        self._ray.close()

    def sending(self, node: str) -> threading.Lock:
        """Return the lock for files that workers of one node share."""
        with self._lock:
            return self._sending.setdefault(node, threading.Lock())

    def lost(self, proxy: "_Proxy") -> None:
        """Forget a worker that is lost; its node gets another one."""
        with self._lock:
            self._workers.pop(proxy.id, None)
            self._retry_at[proxy.node] = time.monotonic() + _RETRY_SECONDS

    def is_up(self, node: str) -> bool:
        """Return whether Ray counts a node as alive."""
        import ray

        return any(entry["NodeID"] == node and entry["Alive"] for entry in ray.nodes())  # type: ignore[no-untyped-call]

    def memory_kills(self, node: str) -> MemoryKills | None:
        """Return a node's count of processes killed for lack of memory; `None` if it does not answer."""
        import ray

        counting: Any = ray.remote(memory_kills).options(num_cpus=0, max_retries=0, scheduling_strategy=_on(node))
        try:
            kills: MemoryKills = ray.get(counting.remote(), timeout=_COUNT_SECONDS)
        except ray.exceptions.RayError as error:
            logger.warning("Node %s does not count killed processes: %s", node[:8], type(error).__name__)
            return None
        return kills

    def kill(self, node: str, actor: Any, pid: int) -> None:
        """Kill a worker that does not answer, without waiting for it: a stopped process does not end by itself."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)
            killing: Any = ray.remote(kill_tree).options(num_cpus=0, max_retries=0, scheduling_strategy=_on(node))
            killing.remote(pid)

    def _forever(self, work: Any, seconds: float) -> None:
        while not self.closing.wait(seconds):
            try:
                work()
            except StoreError as error:
                logger.warning("The job store cannot be used: %s", type(error.__cause__ or error).__name__)
            except Exception:  # internal error: logged, and tried again
                logger.exception("The cluster failed")

    def _watch_nodes(self) -> None:
        """Start the workers that nodes lack, without waiting for them."""
        import ray

        self._starting = [start for start in self._starting if not self._has_started(start)]
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            resources = node["Resources"]
            self._know(node["NodeID"], node["NodeManagerHostname"], node["Alive"], joined=NODE in resources)
            if not node["Alive"] or NODE not in resources:
                continue
            with self._lock:
                nodes = [proxy.node for proxy in self._workers.values()] + [start.node for start in self._starting]
                running = nodes.count(node["NodeID"])
                wait = self._retry_at.get(node["NodeID"], 0.0) > time.monotonic()
            for _ in range(0 if wait else int(resources[WORKERS]) - running):
                self._start(node["NodeID"], int(resources.get("GPU", 0) // resources[WORKERS]))
        self._publish()

    def _publish(self) -> None:
        """Store the problems of machines for the command `jobs`, if they have changed."""
        with self._lock:
            machines = [
                Problem(host=node.host, fact=node.problem) for node in self._nodes.values() if node.problem is not None
            ]
            machines += self._refused.values()
        problems = Problems(head=self.jobs.instance, machines=tuple(machines))
        if problems != self._problems:
            self._problems = problems
            problems.write(self.settings.cache_dir)

    def _know(self, node: str, host: str, alive: bool, *, joined: bool) -> None:
        """Keep what is shown of a machine; one that was lost or refused is shown until one of that name joins."""
        with self._lock:
            if alive and joined:
                if node not in self._nodes:
                    lost = [
                        machine.id for machine in self._nodes.values() if not machine.alive and machine.host == host
                    ]
                    for lost_node in lost[:1]:
                        del self._nodes[lost_node]
                    self._refused.pop(host, None)
                before = self._nodes.get(node)
                self._nodes[node] = RayNode(node, host, True, before.problem if before else None)
            elif node in self._nodes and not alive:
                self._nodes[node] = RayNode(node, host or self._nodes[node].host, False)

    def _start(self, node: str, gpus: int) -> None:
        import ray

        actor: Any = (
            ray.remote(NodeWorker)
            .options(
                num_cpus=0,
                num_gpus=gpus,
                resources={WORKERS: 1},
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=_on(node),
            )
            .remote()
        )
        self._starting.append(_Starting(node, actor, actor.describe.remote(), time.monotonic()))

    def _has_started(self, start: "_Starting") -> bool:
        """Return whether a worker's start has ended: it has joined, or failed and is tried again."""
        import ray

        seconds = time.monotonic() - start.since
        ready, _ = ray.wait([start.described], timeout=0)
        if not ready and seconds < _START_SECONDS:
            slow = why_not_started(None, seconds)
            if slow is not None:  # until then, the last failure is shown
                self._report(start.node, slow)
            return False
        try:
            described: Described = ray.get(start.described, timeout=0)
        except Exception as error:
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            problem = why_not_started(None if late else error, seconds)
            logger.warning("A worker of node %s does not start: %s", start.node[:8], problem)
            self._report(start.node, problem)
            ray.kill(start.actor)
            with self._lock:
                self._retry_at[start.node] = time.monotonic() + _RETRY_SECONDS
            return True
        proxy = _Proxy(self, f"{self.jobs.instance}.node{next(self._numbers)}", start.node, start.actor, described)
        logger.info("worker %s joins on %s", proxy.id, described.host)
        self._report(start.node, None)
        with self._lock:
            self._workers[proxy.id] = proxy
        proxy.thread.start()
        return True

    def _report(self, node: str, problem: Fact | None) -> None:
        """Keep why a node's worker does not start."""
        with self._lock:
            if node in self._nodes:
                self._nodes[node] = replace(self._nodes[node], problem=problem)

    def _assign(self) -> None:
        with self._lock:
            proxies = dict(self._workers)
        idle = {name: proxy for name, proxy in proxies.items() if proxy.idle}
        if not idle:
            return
        waiting = self.store.order.waiting(_MOST_WAITING)
        if not waiting:
            return
        now = time.time()
        offers = self._offers(proxies)
        jobs = {job.id: job for job in self.placement.jobs(waiting, offers)}
        free = [offer for offer in offers if offer.id in idle]
        busy = [offer for offer in offers if offer.id not in idle]
        for job_id, worker in assign(list(jobs.values()), free, self.placement.used(now), now, busy):
            record = self.store.order.claim_job(job_id, worker)
            if record is not None:
                self.placement.started(jobs[job_id], now)
                if not idle[worker].give(record, jobs[job_id]):  # it was lost meanwhile
                    self.placement.ran(jobs[job_id], idle[worker].kind, 0.0, None, now)
                    with Run(record, self.poller, stopping=self.closing) as run:
                        run.settle(PutBack())

    def _offers(self, proxies: Mapping[str, "_Proxy"]) -> list[IdleWorker]:
        """Return what the scheduler needs to know of the workers."""
        gpus = any(proxy.described.machine.gpus for proxy in proxies.values())
        return [proxy.offer(has_gpus=gpus) for proxy in proxies.values()]

    def has_others(self, node: str) -> bool:
        """Return whether other nodes have workers."""
        with self._lock:
            return any(proxy.node != node for proxy in self._workers.values())


@dataclass(frozen=True)
class _Starting:
    """A worker of a node that has not answered yet.

    Attributes:
        described: will be the result of `NodeWorker.describe`.
        since: when it was started, by the monotonic clock.
    """

    node: str
    actor: Any
    described: Any
    since: float


class _RayConnection:
    """Calls of a worker that is a Ray actor; see `remote_executor.Connection`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self, method: str, *values: Any) -> Any:
        return getattr(self._actor, method).remote(*values)

    def stream(self, order: Order) -> Any:
        return self._actor.run.options(num_returns="streaming").remote(order)

    def is_ready(self, begun: Any, seconds: float) -> bool:
        import ray

        return bool(ray.wait([begun], timeout=seconds)[0])

    def result(self, begun: Any) -> Any:
        import ray

        try:
            return ray.get(begun)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except ray.exceptions.RayError as error:
            raise ConnectionLostError from error

    def next_item(self, stream: Any) -> Sent | None:
        try:
            sent: Sent = self.result(next(stream))
        except StopIteration:
            return None
        return sent


class _Proxy:
    """A worker of a node, as the head sees it: the thread in which its jobs run."""

    def __init__(self, head: ClusterHead, name: str, node: str, actor: Any, described: Described) -> None:
        self.id, self.node, self.described = name, node, described
        self._head, self._actor = head, actor
        self._record: JobRecord | None = None
        self._job: WaitingJob | None = None

        def make_sender(remote: Remote) -> Sender:
            return Sender(remote, head.settings, head.library, described.models, described.engines)

        sharing = head.sending(node)
        self._executor = RemoteExecutor(
            _RayConnection(actor), head.store, make_sender, sharing, self._why_lost, self._avoids
        )
        self._loaded: str | None = None
        self._done = 0
        self._fallbacks: dict[tuple[str, str], Fallback] = {}
        self._wake = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)

    @property
    def idle(self) -> bool:
        """Whether it may be given a job."""
        return self._record is None and self.thread.is_alive()

    @property
    def kind(self) -> str:
        """The name of its GPU or CPU."""
        machine = self.described.machine
        return machine.gpus[0].name if machine.gpus else machine.cpu

    def give(self, record: JobRecord, job: WaitingJob) -> bool:
        """Run a claimed job; return whether this worker takes it."""
        with self._lock:
            if not self._closed:
                self._record, self._job = record, job
                self._wake.set()
            return not self._closed

    def offer(self, *, has_gpus: bool) -> IdleWorker:
        """Return what the scheduler needs to know.

        Args:
            has_gpus: whether a machine of the cluster has GPUs: then no job is for a CPU.
        """
        machine = self.described.machine
        return IdleWorker(
            id=self.id,
            node=self.node,
            kind=self.kind,
            gpus=max(len(machine.gpus), 1),
            free_bytes=min((gpu.total_bytes for gpu in machine.gpus), default=0 if has_gpus else machine.ram_bytes),
            loaded=self._loaded,
            models=self._executor.sender.models,
            engines=self._executor.sender.engines,
            speed=self._head.placement.speed(self.kind),
        )

    def working(self, offer: IdleWorker) -> Working:
        """Return what is shown of it."""
        return Working(offer, self.described, self._record, self._done, tuple(self._fallbacks.values()))

    def _run_jobs(self) -> None:
        while not self._head.closing.is_set():
            if not self._wake.wait(_POLL_SECONDS):
                try:
                    self._executor.look()
                except ConnectionLostError:
                    if self._close():
                        self._head.kill(self.node, self._actor, self.described.pid)
                        self._head.lost(self)
                        return
                continue
            self._wake.clear()
            record, job = self._record, self._job
            assert record is not None and job is not None
            if isinstance(self._run(record, job), WorkerLost):
                return
            self._done += 1
            self._record = None

    def _run(self, record: JobRecord, job: WaitingJob) -> Outcome:
        started = time.monotonic()
        stopping = self._head.closing
        with Run(
            record, self._head.poller, stopping=stopping, listener=lambda event: self._notice(event, record, job)
        ) as run:
            outcome = self._executor.execute(run)
            end = outcome if isinstance(outcome, TerminalEvent) else None
            self._head.placement.ran(job, self.kind, time.monotonic() - started, end, time.time())
            run.settle(outcome)
        return outcome

    def _close(self) -> bool:
        """Stop accepting jobs if idle. Return whether it stopped."""
        with self._lock:
            self._closed = self._record is None
            return self._closed

    def _avoids(self, record: JobRecord) -> bool:
        return self._head.placement.avoid(record.id, self.node) and self._head.has_others(self.node)

    def _why_lost(self, record: JobRecord, error: ConnectionLostError) -> WorkerLost:
        """Forget the lost worker; return why it was lost. The loss of a whole node is not the job's fault."""
        logger.warning("worker %s is lost: %s", self.id, error.hangs or type(error.__cause__).__name__)
        if error.hangs is not None:
            self._head.kill(self.node, self._actor, self.described.pid)
        self._head.lost(self)
        # What does not answer was not lost with its node.
        killed = None if error.hangs else self._killed_for_memory(error)
        end = time.monotonic() + (0.0 if error.hangs else _NODE_SECONDS)
        while (up := self._head.is_up(self.node)) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if not up:
            return WorkerLost(Fact("queue.node_lost", {"host": self.described.host}), counted=False)
        self._head.placement.avoid(record.id, self.node)
        return WorkerLost(killed or error.hangs or Fact("queue.exit_unknown"), out_of_memory=killed is not None)

    def _killed_for_memory(self, error: ConnectionLostError) -> Fact | None:
        """Return how Ray or the node's kernel ended the lost worker because memory ran out; `None` if they did not."""
        import ray

        if isinstance(error.__cause__, ray.exceptions.OutOfMemoryError):
            return Fact("queue.exit_out_of_memory")
        before = self._executor.memory_kills
        now = None if before is None else self._head.memory_kills(self.node)
        return None if before is None or now is None else now.since(before)

    def _notice(self, event: Event, record: JobRecord, job: WaitingJob) -> None:
        """Keep which model is loaded, and which components run in PyTorch instead of on engines."""
        if isinstance(event, Planned):
            self._loaded = job.model
            # Replaced, not changed: another thread reads it.
            remaining = {key: entry for key, entry in self._fallbacks.items() if entry.model != self._loaded}
            new_fallbacks = fallbacks_in(event.plan, record.plan, record.id)
            self._fallbacks = remaining | {(entry.model, entry.component): entry for entry in new_fallbacks}
        elif isinstance(event, FellBack):
            fallback = Fallback(
                model=self._loaded or "",
                component=event.component,
                backend=event.backend,
                reason=event.reason,
                job=record.id,
            )
            self._fallbacks = self._fallbacks | {(fallback.model, fallback.component): fallback}


def _on(node: str) -> Any:
    """Return Ray's scheduling strategy for a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _capacity(machine: Machine) -> tuple[int, int]:
    return sum(gpu.total_bytes for gpu in machine.gpus), machine.ram_bytes
