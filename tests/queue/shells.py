"""The executors of claimed jobs, each in its shell: a worker's video and build, the command line, and a node's worker.

The node's worker runs in this process; its calls run on threads, as in a Ray actor.
"""

import shutil
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from runtime.core.cancel import Cancel
from runtime.core.errors import StoreError
from runtime.core.events import Event
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.pipeline.ahead import compile_ahead, load_ahead
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.executors import TaskExecutor, VideoExecutor
from runtime.queue.job_planning import JobReplanner
from runtime.queue.records import JobRecord
from runtime.queue.run import ControlPoller, Outcome, Run, WorkerLost
from runtime.queue.store import JobStore
from runtime.server.cluster.node_worker import NodeWorker, Order, Sent
from runtime.server.cluster.remote_executor import ConnectionLostError, RemoteExecutor
from runtime.server.cluster.sending import Sender

Shell = Literal["worker", "build", "command line", "node"]
SHELLS: tuple[Shell, ...] = ("worker", "build", "command line", "node")
VIDEO_SHELLS: tuple[Shell, ...] = ("worker", "command line", "node")
INSTANCE = "0badcafe.0"


class _Stream:
    """What a running job sends, taken from a thread."""

    def __init__(self, sent: Iterator[Sent]) -> None:
        self.items: deque[Sent | None] = deque()
        self.changed = threading.Condition()
        threading.Thread(target=self._take, args=(sent,), daemon=True).start()

    def _take(self, sent: Iterator[Sent]) -> None:
        for item in sent:
            with self.changed:
                self.items.append(item)
                self.changed.notify()
        with self.changed:
            self.items.append(None)
            self.changed.notify()


class ThreadConnection:
    """Calls of a node's worker in this process.

    Attributes:
        calls: names of the methods that were called, with the requests of `control`.
        at: called with the name of each method and item that arrives; may raise `ConnectionLostError`.
        silent: whether nothing arrives any more.
        damages: whether the first part of the next file arrives damaged.
    """

    def __init__(self, node: NodeWorker) -> None:
        self.node = node
        self.calls: list[str] = []
        self.at: Callable[[str], None] = lambda _: None
        self.silent = self.damages = False
        self._threads = ThreadPoolExecutor(4)

    def begin(self, method: str, *values: Any) -> "Future[Any]":
        self.calls.append(f"control {values[1]}" if method == "control" else method)
        self.at(method)
        return self._threads.submit(getattr(self.node, method), *values)

    def stream(self, order: Order) -> _Stream:
        return _Stream(self.node.run(order))

    def is_ready(self, begun: Any, seconds: float) -> bool:
        if self.silent:
            threading.Event().wait(seconds)
            return False
        if isinstance(begun, Future):
            return bool(wait([begun], seconds).done)
        with begun.changed:
            return bool(begun.changed.wait_for(lambda: begun.items, seconds))

    def result(self, begun: "Future[Any]") -> Any:
        return begun.result()

    def next_item(self, stream: _Stream) -> Sent | None:
        item = stream.items.popleft()
        if item is not None:
            self.at(item[0])
            if item[0] == "part" and self.damages:
                self.damages, (name, offset, data) = False, item[1]
                return "part", (name, offset, bytes([data[0] ^ 1]) + data[1:])
        return item


class PlantedRun(Run):
    """A run in which something happens just before an event is stored, or once its end could not be written."""

    at: str = ""
    act: Callable[[Run], object]
    unlock: Callable[[], object] | None = None

    def emit(self, event: Event) -> None:
        self._happen(event.event)
        super().emit(event)

    def report(self, values: Any) -> None:
        self._happen(values["event"])
        super().report(values)

    def flush(self) -> StoreError | None:
        error = super().flush()
        unlock = self.unlock
        if error is not None and self.outcome is not None and unlock is not None:
            self.unlock = None
            unlock()
        return error

    def _happen(self, name: str) -> None:
        if name == self.at:
            self.at = ""
            self.act(self)


class House:
    """Folders with one model, a node with its own, and what is loaded; stores are the tests'."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder
        self.settings = Settings(cache_dir=folder / "head")
        shutil.copytree(spec.directory, self.settings.weights_dir / "tiny")
        self.engines = EngineService(EngineStore(folder / "engines", 10**9), probe(), folder)
        self._stack = ExitStack()
        self.residency = self._stack.enter_context(Residency(self.engines))
        node = NodeWorker(Settings(cache_dir=folder / "node"))
        self._stack.callback(node.close)
        self.connection = ThreadConnection(node)
        self.sharing = threading.Lock()

    def close(self) -> None:
        self._stack.close()

    def add(self, store: JobStore, output: Path, shell: Shell, **fields: object) -> JobRecord:
        """Queue a tiny video, or a build, and claim it."""
        tiny = {"prompt": "a red boat", "model": "tiny", "width": 32, "height": 32, "frames": 5, "steps": 2, "seed": 1}
        request = GenerationRequest.from_mapping(tiny | fields)
        if shell == "build":
            if not request.backends:
                request = request.replace(backends={"vae": "pytorch"})  # has no engines
            title, folder = Fact("text", {"what": "Build"}), self.engines.store.folder
            added = store.add_work("build", title, folder, request.to_json())
        else:
            plan = resolve(request, look_up("tiny", self.settings.weights_dir), PlanningContext(probe(), output))
            added = store.add(request, plan)
        return self.claim(store, added.id)

    def claim(self, store: JobStore, job_id: str) -> JobRecord:
        claimed = store.order.claim_job(job_id, INSTANCE)
        assert claimed is not None
        return claimed

    def execute(
        self,
        store: JobStore,
        record: JobRecord,
        shell: Shell,
        at: str = "",
        act: Callable[[Run], object] = lambda _: None,
        unlock: Callable[[], object] | None = None,
        stopping: threading.Event | None = None,
    ) -> Run:
        """Run a claimed job to its end.

        Args:
            at, act: an event, and what happens when it is emitted.
            unlock: called after the first attempt to write the end that fails.
        """
        poller = ControlPoller(store)
        closing = None if shell == "command line" else stopping or threading.Event()
        run = PlantedRun(record, poller, stopping=closing)
        run.at, run.act, run.unlock = at, act, unlock
        with poller.polling(), run:
            run.settle(self.executor(store, shell)(run))
        assert run.written
        return run

    def executor(self, store: JobStore, shell: Shell) -> Callable[[Run], Outcome]:
        replanner = JobReplanner(self.settings.weights_dir, self.engines, None)

        def compile_code(request: GenerationRequest, cancel: Cancel) -> Fact:
            spec, plan = replanner.plan_request(request, probe(), 0, cancel.check)
            return compile_ahead(plan, spec, cancel, self.residency, None)

        def load(request: GenerationRequest, cancel: Cancel) -> None:
            spec, plan = replanner.plan_request(request, probe(), 0, cancel.check)
            load_ahead(plan, spec, cancel, self.residency)

        if shell == "build":
            free = self.residency.free
            return TaskExecutor(self.engines, self.settings.weights_dir, 0, free, compile_code, load).execute
        if shell == "node":
            return self.remote(store).execute
        return VideoExecutor(
            lambda work: replanner.plan(work.record, probe(), deaths=store.log.deaths(work.record.id)),
            lambda: self.residency,
            None,
            waits_for_disk=shell == "worker",
        ).execute

    def remote(self, store: JobStore) -> RemoteExecutor:
        empty: frozenset[str] = frozenset()

        def lost(_: JobRecord, error: ConnectionLostError) -> WorkerLost:
            return WorkerLost(error.hangs or Fact("queue.exit_unknown"))

        return RemoteExecutor(
            self.connection,
            store,
            lambda remote: Sender(remote, self.settings, self.engines.store, empty, empty),
            self.sharing,
            lost,
            lambda _: False,
        )


@contextmanager
def locked(path: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Yield functions by which another process locks a store against writers, and unlocks it."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        yield lambda: other.execute("BEGIN IMMEDIATE"), lambda: other.execute("ROLLBACK")
    finally:
        other.close()
