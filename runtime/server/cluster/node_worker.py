"""The worker of a node: a Ray actor that runs the jobs that the head sends, one at a time.

Its files are in a folder of the node's cache until they have been sent. Nothing here knows the head's job store.
"""

import contextlib
import hashlib
import logging
import os
import queue
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core import log, settings
from runtime.core.cancel import Cancel
from runtime.core.environment import collect_garbage_as_usual, collect_garbage_less_often
from runtime.core.errors import EngineError, ModelError, TandemError
from runtime.core.events import (
    CheckpointSaved,
    EngineProgress,
    Event,
    FramesDecoded,
    SectionDone,
    VideoSaved,
)
from runtime.core.plan import ExecutionPlan
from runtime.core.settings import Settings
from runtime.engines import manifest
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine, probe
from runtime.models.catalogue import EMBEDDED, find, folders
from runtime.models.images import images_dir
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import Stamps
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.choice.engine_index import EngineRecord
from runtime.queue.executors import VideoExecutor
from runtime.queue.job_planning import JobReplanner
from runtime.queue.records import JobRecord
from runtime.queue.recovery import MemoryKills
from runtime.queue.run import Outcome, Work, outcome_of
from runtime.server.cluster import transfer
from runtime.server.cluster.transfer import FileEntry

if TYPE_CHECKING:
    from runtime.execution.residency import Residency

# Events and parts of files that wait to be sent; the job waits while there are more.
_MOST_WAITING = 8
_FOLDER = "cluster"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a node's worker is.

    Attributes:
        host: the machine's name.
        pid: of the worker process.
        machine: with the GPUs of this worker only.
        models: names of the models on this machine.
        engines: ids of its engines.
    """

    host: str
    pid: int
    machine: Machine
    models: frozenset[str]
    engines: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Order:
    """A job to run.

    Attributes:
        record: its row. Paths are those of the head.
        deaths: see `recovery.avoid_causes`.
        model: the model's name on the node: of a folder or file in its weights folder.
        loras: of each LoRA, its name on the node and its expert.
        files: what identifies the model's files in checkpoints, as on the head.
    """

    record: JobRecord
    deaths: Sequence[Mapping[str, object]]
    model: str
    loras: Sequence[tuple[str, str]]
    files: Stamps


# What a running job sends: an event, a part of a file (name, offset, data), the digest of a file whose parts were all
# sent, the names of all files that its folder has, or its outcome.
Sent = tuple[str, Any]


def memory_kills() -> MemoryKills:
    """Return how many processes the kernel of this machine has killed because memory ran out."""
    return MemoryKills.read()


class NodeWorker:
    """Runs jobs of a head on the GPUs that Ray gives this process, or on the CPU."""

    def __init__(self, loaded: Settings | None = None) -> None:
        """Start in a process of its own, with the settings of its machine; or as a part of one with `loaded`."""
        if loaded is None:
            collect_garbage_less_often()
            loaded = settings.load({}, with_keys=True)
            log.start(loaded.log_file)
        self._cache = loaded.cache_dir
        self._weights = loaded.weights_dir
        # Builds that no request asks for are those of the web app and `serve`.
        self._engines = replace(EngineService.from_settings(loaded, probe()), idle_builds=False)
        self._history = HistoryFile(self._cache, self._engines.machine)
        self._replanner = JobReplanner(self._weights, self._engines, self._history, builds_later=True)
        self._residency: Residency | None = None
        self._stack = ExitStack()
        self._cancels: dict[str, Cancel] = {}
        self._lock, self._loading, self._turn = (threading.Lock() for _ in range(3))
        self._home = self._cache / _FOLDER / f"worker-{os.getpid()}"
        for folder in (self._cache / _FOLDER).glob("worker-*"):
            if not Path(f"/proc/{folder.name.partition('-')[2]}").exists():
                shutil.rmtree(folder, ignore_errors=True)
        threading.Thread(target=self._load_libraries, name="preload", daemon=True).start()

    def describe(self) -> Described:
        """Return what this worker is."""
        models: frozenset[str] = frozenset()
        engines: frozenset[str] = frozenset()
        with contextlib.suppress(TandemError):  # without what cannot be read
            engine_ids = frozenset(record.id for record in self._engines.store.index())
            bundles = (path.name for path in (self._weights / transfer.BUNDLES).glob("*"))
            models, engines = frozenset((*folders(self._weights), *bundles)), engine_ids
        return Described(
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=probe(self._engines.store.folder),
            models=models,
            engines=engines,
        )

    def missing(self, kind: str, name: str, entries: Sequence[FileEntry]) -> dict[str, int]:
        """Return the files that are not here with the same content, and how many bytes of each were received before.

        Args:
            kind: "model", "bundle", "image", "lora", "engine" or "job".
            name: of the model; the id of the engine or job.

        Raises:
            ModelError: if another model with this name is here.
        """
        offsets = {}
        folder = self._folder(kind, name)
        shipped = EMBEDDED / name if kind == "model" else None
        there = next((root for root in (shipped, self._weights / name) if root is not None and root.is_dir()), None)
        for entry in entries:
            self._check(kind, entry.name)
        base = there if kind == "model" and there is not None else folder
        paths = {entry: base / entry.name for entry in entries}
        same: Mapping[FileEntry, Path] = {}
        with contextlib.suppress(OSError):
            # Files of another size need not be read.
            here = {
                file.name: path for file, path in paths.items() if path.is_file() and path.stat().st_size == file.size
            }
            same = transfer.entries(here, None if kind in {"image", "job"} else self._cache)
        for entry, path in paths.items():
            if entry in same:
                continue
            if kind == "model" and there is not None:
                raise ModelError("server.cluster_other_model", model=name, file=entry.name, host=socket.gethostname())
            offsets[entry.name] = transfer.received(path)
        return offsets

    def receive(self, kind: str, name: str, file: str, offset: int, data: bytes) -> None:
        """Write one part of a file."""
        self._check(kind, file)
        transfer.append(self._folder(kind, name) / file, offset, data)

    def complete(self, kind: str, name: str, file: str, digest: str) -> None:
        """Check a file that was received, and rename it into its place."""
        self._check(kind, file)
        transfer.complete(self._folder(kind, name) / file, digest)

    def install(self, name: str) -> None:
        """Make a model whose files were all received available."""
        folder = self._folder("model", name)
        if folder.is_dir() and not (self._weights / name).exists():
            folder.replace(self._weights / name)

    def wanted_engines(self, model: str, records: Sequence[EngineRecord]) -> list[str]:
        """Return the engines that this machine lacks and would build in the same way: GPU, versions, weights, code.

        Args:
            model: see `Order.model`.
            records: of the head's library.
        """
        there = {record.id for record in self._engines.store.index()}
        spec = find(self._name(model), self._weights)
        engine_ids = []
        for record in records:
            with contextlib.suppress(TandemError, OSError, ValueError):  # without what cannot be compared
                self._engines.device_of(record)
                # What a file on the head is named does not matter.
                same = replace(record, model=spec.name)
                if record.id not in there and not self._engines.why_stale(same, [spec]):
                    engine_ids.append(record.id)
        return engine_ids

    def install_engine(self, engine_id: str) -> None:
        """Add an engine whose files were all received to the library.

        Raises:
            EngineError: if a file is not that of the manifest.
        """
        folder = self._folder("engine", engine_id)
        record = manifest.read(folder, engine_id)
        problem = record.problem or manifest.check_hashes(folder, record)
        if problem is not None:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError("engine.unusable", engine=engine_id, cause=problem)
        self._engines.store.insert(folder, engine_id)

    def control(self, job_id: str, request: str) -> None:
        """Pass on a request for the running job: "cancel", "pause" or "finish"."""
        with self._lock:
            cancel = self._cancels.get(job_id)
        if cancel is not None:
            {"cancel": cancel.request, "pause": cancel.pause, "finish": cancel.finish_early}[request]()

    def memory_kills(self) -> MemoryKills:
        """See `memory_kills`."""
        return memory_kills()

    def run(self, order: Order) -> Iterator[Sent]:
        """Run a job; yields what it sends. The last item is its outcome."""
        folder = self._folder("job", order.record.id)
        record = order.record.model_copy(update={"output": folder / transfer.VIDEO, "request": self._request(order)})
        work = _SentWork(record, folder)
        with self._lock:
            self._cancels[record.id] = work.cancel
        thread = threading.Thread(target=self._execute, args=(order, work), name="job", daemon=True)
        thread.start()
        try:
            while (sent := work.waiting.get()) is not None:
                yield sent
        finally:
            if thread.is_alive():  # the head does not listen any more
                work.cancel.request()
                while thread.is_alive():
                    with contextlib.suppress(queue.Empty):
                        work.waiting.get(timeout=0.1)
            with self._lock:
                del self._cancels[record.id]
            shutil.rmtree(folder, ignore_errors=True)

    def _execute(self, order: Order, work: "_SentWork") -> None:
        def plan(_: Work) -> tuple[ModelSpec, ExecutionPlan]:
            machine = self._engines.machine if self._engines.machine.gpus else probe()
            return self._replanner.plan(work.record, machine, 0, None, order.deaths, work.cancel.check)

        try:
            with self._turn:  # another job would use the same loaded models
                work.folder.mkdir(parents=True, exist_ok=True)
                work.settle(VideoExecutor(plan, self._load_libraries, self._history, order.files).execute(work))
        except Exception as error:
            work.waiting.put(("outcome", outcome_of(error, work)))
        finally:
            work.waiting.put(None)

    def _request(self, order: Order) -> dict[str, Any]:
        """Return the request of a job with the names that model and LoRAs have here."""
        request = {**order.record.request, "model": self._name(order.model)}
        if order.loras:
            folder, requested = self._folder("lora", "loras"), request["loras"]
            request["loras"] = [
                {**lora, "file": str(folder / name), "expert": expert}
                for lora, (name, expert) in zip(requested, order.loras, strict=True)
            ]
        return request

    def _name(self, model: str) -> str:
        return str(self._weights / model) if model.startswith(f"{transfer.BUNDLES}/") else model

    def close(self) -> None:
        """Free what is loaded; a process of its own is ended without it."""
        self._stack.close()

    def _load_libraries(self) -> "Residency":
        """Import PyTorch and the pipeline, which takes seconds, and make the residency."""
        with self._loading:
            if self._residency is None:
                import runtime.pipeline.run  # noqa: F401 - import errors are raised here
                from runtime.execution.residency import Residency

                self._residency = self._stack.enter_context(Residency(self._engines))
                collect_garbage_as_usual()
            return self._residency

    def _folder(self, kind: str, name: str) -> Path:
        if not name or "/" in name or "\\" in name or name.startswith("."):
            raise ModelError("server.cluster_file_refused", name=name)
        if kind == "model":
            return self._weights / f".{name}.cluster"
        if kind == "bundle":
            return self._weights / transfer.BUNDLES / name
        if kind == "engine":
            return self._engines.store.folder / f".cluster-{name}"
        if kind == "image":
            return images_dir(self._cache)
        return self._cache / _FOLDER / "loras" if kind == "lora" else self._home / name

    @staticmethod
    def _check(kind: str, name: str) -> None:
        if kind == "job":
            transfer.check_job_name(name)
        elif kind == "image":
            transfer.check_image_name(name)
        elif kind == "engine":
            transfer.check_engine_name(name)
        else:
            transfer.check_model_name(name)


class _SentWork:
    """A job of the head: sends its events, the files of its folder that have changed, and its outcome.

    Attributes:
        waiting: what is to be sent; the job waits while it is full. `None` is the end.
    """

    def __init__(self, record: JobRecord, folder: Path) -> None:
        self.record, self.folder = record, folder
        self.cancel = Cancel()
        self.waiting: queue.Queue[Sent | None] = queue.Queue(_MOST_WAITING)
        self._stamps, self._playable = transfer.changed({}, folder)[1], 0

    def emit(self, event: Event) -> None:
        """Send an event, after the files that it is about."""
        if not isinstance(event, EngineProgress):
            logger.info("job %s: %s", self.record.id, log.log_line(event))
        longer = isinstance(event, FramesDecoded) and event.playable != self._playable
        if longer or isinstance(event, CheckpointSaved | SectionDone):
            self._send_files()
        if isinstance(event, FramesDecoded):
            self._playable = event.playable
        self.waiting.put(("event", event))

    def settle(self, outcome: Outcome) -> None:
        """Send how the job ended, after its video and files."""
        self._send_files()
        if isinstance(outcome, VideoSaved):
            if outcome.plain is not None:
                self._send(transfer.PLAIN, outcome.plain)
            self._send(transfer.VIDEO, outcome.video)
        self.waiting.put(("outcome", outcome))

    def _send_files(self) -> None:
        """Send the files that have changed since the last call, and the names of all."""
        before = self._stamps
        files, self._stamps = transfer.changed(before, self.folder)
        for name, path in files.items():
            with contextlib.suppress(FileNotFoundError):  # an older clip
                self._send(name, path)
        if before.keys() != self._stamps.keys() or files:
            self.waiting.put(("files", sorted(self._stamps)))

    def _send(self, name: str, path: Path) -> None:
        total, offset = hashlib.sha256(), 0
        for data in transfer.parts(path):
            total.update(data)
            self.waiting.put(("part", (name, offset, data)))
            offset += len(data)
        self.waiting.put(("complete", (name, total.hexdigest())))
