"""Runs one task on the engine library in a worker process: build, inspect, import, verify, delete or prune engines."""

import time
from collections.abc import Callable
from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.engines.imported.importing import describe_matches, device_here, import_engine, inspect_engine
from runtime.engines.imported.matching import find_matches
from runtime.engines.service import EngineService
from runtime.models.catalogue import look_up
from runtime.models.loras import model_for
from runtime.pipeline.build_engines import build_all, wanted_engines
from runtime.queue.records import (
    BuildEngines,
    DeleteEngine,
    ImportEngine,
    InspectEngine,
    PruneEngines,
    VerifyEngine,
    Work,
)
from runtime.queue.store import JobStore


class TaskRecorder:
    """Writes the progress of a task that this process runs to the store.

    Attributes:
        cancel: what the task checks.
    """

    def __init__(self, task_id: str, store: JobStore) -> None:
        self.id = task_id
        self.cancel = Cancel()
        self._store = store
        self._last: Fact | None = None
        self._reported_at = 0.0

    def report(self, fact: Fact, share: float | None) -> None:
        """Store progress: the current activity, and the share done, 0 to 1, if known."""
        now = time.monotonic()
        if fact != self._last:
            self._last = fact
            self._store.record_task_event(self.id, {"event": "TaskProgress", "fact": fact.model_dump(mode="json")})
        elif now - self._reported_at < _LIVE_SECONDS:
            return
        self._reported_at = now
        self._store.show(self.id, {"fact": fact.model_dump(mode="json"), "share": share})

    def write(self, text: str) -> None:
        """Append to the log."""
        self._store.record_task_event(self.id, {"event": "TaskLog", "text": text})

    def found(self, lines: tuple[str, ...]) -> None:
        """Store what is known about an inspected file."""
        self._store.record_task_event(self.id, {"event": "TaskFound", "lines": list(lines)})


_LIVE_SECONDS = 0.2

# Frees the loaded models: builders measure, and engines that are compared need memory.
Free = Callable[[], None]


def run_task(work: Work, recorder: TaskRecorder, engines: EngineService, weights_dir: Path, free: Free) -> Fact:
    """Run one task and return its result.

    Raises:
        CancelledError: if it was cancelled; what was finished before stays.
        TandemError: if it failed.
    """
    match work:
        case BuildEngines():
            return _build(work, recorder, engines, weights_dir, free)
        case InspectEngine():
            return _inspect(work, recorder, engines, weights_dir, free)
        case ImportEngine():
            return _import(work, recorder, engines, weights_dir, free)
        case VerifyEngine():
            return _verify(work, recorder, engines, weights_dir, free)
        case DeleteEngine():
            return _delete(work, engines, free)
        case PruneEngines():
            # Engines that stay loaded for the next video may be deleted too.
            free()
            pruned = engines.store.prune(work.max_bytes)
            code = "task.pruned" if pruned.enough else "task.pruned_in_part"
            return Fact(code, {"count": len(pruned.deleted), "left": pruned.total_bytes})


def _build(work: BuildEngines, recorder: TaskRecorder, engines: EngineService, weights_dir: Path, free: Free) -> Fact:
    recorder.report(Fact("task.looking"), None)
    request = GenerationRequest.from_mapping(work.request)
    spec = model_for(request, weights_dir)
    wanted = wanted_engines(_narrowed(request, work.component), spec, engines)
    if not wanted:
        return Fact("task.nothing_to_build")
    free()
    failed: list[EngineError] = []
    built = 0

    def report(fact: Fact, share: float | None) -> None:
        recorder.report(fact, (built + len(failed) + (share or 0.0)) / len(wanted))

    for one in build_all(wanted, spec, engines, report, recorder.cancel, again=request.build == "always"):
        if one.error is None:
            built += 1
        else:
            failed.append(one.error)
            recorder.write("\n".join(filter(None, (one.error.what, one.error.remedy, one.error.log))))
    if failed and not built:
        raise failed[0]
    recorder.report(Fact("task.finished"), 1.0)
    counts = {"built": built, "wanted": len(wanted)}
    return Fact("task.built_in_part", {**counts, "cause": failed[0].fact}) if failed else Fact("task.built", counts)


def _narrowed(request: GenerationRequest, component: str | None) -> GenerationRequest:
    """Return the request with a backend for one component alone: the others then want no engine."""
    if component is None:
        return request
    return GenerationRequest.from_mapping(request.to_json() | {"backends": {component: request.backend(component)}})


def _inspect(
    work: InspectEngine, recorder: TaskRecorder, engines: EngineService, weights_dir: Path, free: Free
) -> Fact:
    recorder.report(Fact("task.opening", {"file": work.path.name}), None)
    spec = look_up(work.model, weights_dir)
    free()
    contract = inspect_engine(work.path, device_here(engines.machine), recorder.report, recorder.cancel)
    found = tuple(map(str, contract.describe()))
    recorder.found(found)
    matches = find_matches(contract, spec, work.component)
    recorder.found((*found, *map(str, describe_matches(matches, spec))))
    return Fact("task.inspected")


def _import(work: ImportEngine, recorder: TaskRecorder, engines: EngineService, weights_dir: Path, free: Free) -> Fact:
    spec = look_up(work.model, weights_dir)
    free()
    device = device_here(engines.machine)
    done = import_engine(work.path, spec, work.component, engines, device, recorder.report, recorder.cancel)
    recorder.found(tuple(map(str, done.describe())))
    code = "task.imported" if done.compared else "task.imported_unverified"
    return Fact(code, {"engine": done.engine.id, "detail": done.engine.detail})


def _verify(work: VerifyEngine, recorder: TaskRecorder, engines: EngineService, weights_dir: Path, free: Free) -> Fact:
    chosen = engines.store.choose([work.engine])
    models = [look_up(name, weights_dir) for name in work.models]
    free()
    (found,) = engines.verify(chosen, models, recorder.report, recorder.cancel)
    if found.skipped is not None:
        raise EngineError(found.skipped.code, **found.skipped.data)
    if not found.engine.usable:
        raise EngineError("engine.verified_wrong", cause=found.engine.problem or found.engine.detail)
    return Fact("task.verified", {"detail": found.engine.detail})


def _delete(work: DeleteEngine, engines: EngineService, free: Free) -> Fact:
    (chosen,) = engines.store.choose([work.engine])
    try:
        freed = engines.store.delete(chosen.id)
    except EngineError:  # it may be loaded for the next video
        free()
        freed = engines.store.delete(chosen.id)
    return Fact("task.deleted", {"freed": freed})
