"""Builds and verifies engines in a child process and stores the result.

Nothing remains of a build that failed, was cancelled or was killed, and it can be retried at once.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError, ModelError
from runtime.core.facts import Fact
from runtime.engines import build_child, manifest
from runtime.engines.build_child import BuildJob, Job, VerifyJob
from runtime.engines.builders import BUILDERS, BuildNeeds
from runtime.engines.child import Entry, Outcome, Report, run_child
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine, free_disk_bytes, gpu_index, probe
from runtime.models.loras import read_lora
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineKey, EngineRecord

logger = logging.getLogger(__name__)

_SIGKILL = 9


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One engine to build.

    Attributes:
        spec: the model.
        component: whose weights become part of it, or are used to measure it.
        key: of the engine.
        device: a torch device: "cpu" or "cuda:0".
        again: build it even if it exists.
    """

    spec: ModelSpec
    component: str
    key: EngineKey
    device: str
    again: bool = False

    @property
    def title(self) -> Fact:
        """The engine's program, model, builder and precision, as a phrase."""
        names = {"program": self.key.program, "model": self.spec.title}
        return Fact("engine.title", {**names, "builder": self.key.builder, "precision": self.key.precision})


def build_engine(
    request: BuildRequest,
    store: EngineStore,
    emit_progress: Report,
    cancel: Cancel,
    entry: Entry[Job] = build_child.run_job,
) -> EngineRecord:
    """Return an engine; build it unless it exists.

    If two callers request the same engine, it is built once: the second waits for the first.

    Args:
        emit_progress: called with progress and the fraction done, where known; on this thread.
        cancel: checked about ten times a second.
        entry: the function that the child process runs.

    Raises:
        EngineError: if it cannot be built on this machine, building failed (`log` has the log's last lines), or the
            engine differs from PyTorch by more than the tolerance. Such an engine stays in the store as unusable, so
            that it is not built again each time; `again` builds it nevertheless.
        CancelledError: if cancelled; nothing of the build remains.
    """
    requested_at = time.time()
    engine_id = request.key.digest()
    waiting = False

    def wait() -> None:
        nonlocal waiting
        cancel.check()
        if not waiting:
            emit_progress(Fact("engine.waiting", {"engine": request.title}), None)
            waiting = True

    cancel.check()
    with store.building(engine_id, wait):
        existing = store.get(request.key)
        if existing is not None and existing.problem is not None:
            emit_progress(Fact("engine.replacing_damaged", {"cause": existing.problem}), None)
        elif existing is not None and (not request.again or existing.built_at >= requested_at):
            return _if_verified(request, existing)
        _check_space(request, store)
        with store.workspace(engine_id) as work:
            emit_progress(Fact("engine.building", {"engine": request.title}), 0.0)
            job = BuildJob(
                workspace=work.folder,
                engine=work.engine,
                spec=request.spec,
                component=request.component,
                key=request.key,
                device=request.device,
            )
            log = work.engine / manifest.LOG_NAME
            outcome = start_child(entry, job, request.title, work.scratch, log, emit_progress, cancel)
            if outcome.result is None:
                raise failure(Fact("engine.not_built", {"engine": request.title}), outcome)
            record = store.insert(work.engine, engine_id)
    emit_progress(Fact("engine.built", {"engine": request.title, "seconds": record.build_seconds}), 1.0)
    return _if_verified(request, record)


def verify_engine(
    spec: ModelSpec,
    component: str,
    record: EngineRecord,
    store: EngineStore,
    device: str,
    emit_progress: Report,
    cancel: Cancel,
    entry: Entry[Job] = build_child.run_job,
) -> EngineRecord:
    """Compare an engine with PyTorch again, and store the result or the problem.

    Args:
        spec, component: whose weights it was built from, or runs with.
        device, emit_progress, cancel, entry: see `build_engine`.

    Raises:
        EngineError: if the engine is gone, the store cannot be written, or verification itself failed.
        CancelledError: if cancelled; the record stays as it was.
    """
    # The engine's own LoRAs, which may differ from those of the model's next job.
    spec = replace(spec, loras=record.loras)
    _check_loras(record)
    request = BuildRequest(spec=spec, component=component, key=record.key, device=device)
    with store.using(record.id) as folder, store.building(record.id, cancel.check):
        problem = store.verify_hash(record)
        if problem is not None:
            return replace(record, problem=problem, verified=False)
        with store.workspace(record.id) as work:
            job = VerifyJob(
                workspace=work.folder, engine=folder, spec=spec, component=component, key=record.key, device=device
            )
            log = work.folder / "verify.log"
            outcome = start_child(entry, job, request.title, work.scratch, log, emit_progress, cancel)
        if outcome.result is not None:
            return store.record_verification(record, **verified_fields(outcome.result), problem=None)
        error = failure(Fact("engine.not_verified", {"engine": request.title}), outcome)
        if outcome.kind in {"memory", "disk"}:  # not a property of the engine
            raise error
        return store.record_verification(record, problem=error.fact, verified=False)


def _check_loras(record: EngineRecord) -> None:
    """Raise if the weights to compare with are not available."""
    for use in record.loras:
        try:
            digest = read_lora(use.path).digest
        except ModelError as error:
            raise EngineError("engine.lora_unreadable", engine=record.id, cause=error.fact) from error
        if digest != use.digest:
            raise EngineError("engine.lora_changed", engine=record.id, lora=use.name)


def _if_verified(request: BuildRequest, record: EngineRecord) -> EngineRecord:
    if record.verified:
        return record
    raise EngineError("engine.built_wrong", engine=request.title, id=record.id, cause=record.detail)


def start_child(
    entry: Entry[Job], job: Job, title: Fact, scratch: Path, log: Path, emit_progress: Report, cancel: Cancel
) -> Outcome:
    """Run a job in a child process; see `child.run_child`.

    Raises:
        EngineError: if no process can be started.
        CancelledError: if cancelled.
    """
    try:
        return run_child(entry, job, scratch, log, emit_progress, cancel.check)
    except OSError as error:
        raise EngineError("engine.child_not_started", engine=title, error=error.strerror or str(error)) from error


def _check_space(request: BuildRequest, store: EngineStore) -> None:
    """Raise if memory or disk space is too small, instead of failing minutes later."""
    machine, needs = probe(), _needs(request)
    checks = (
        ("engine.needs_memory", needs.ram_bytes, machine.ram_free_bytes),
        ("engine.needs_video_memory", needs.vram_bytes, _free_vram(machine, request.device)),
        ("engine.needs_disk", needs.disk_bytes, free_disk_bytes(store.folder)),
    )
    for code, needed, free in checks:
        if needed > free:
            raise EngineError(code, engine=request.title, needed=needed, free=free, folder=store.folder)


def _needs(request: BuildRequest) -> BuildNeeds:
    largest = max(request.key.profiles, key=lambda profile: profile.max)
    return BUILDERS[request.key.builder].needs(request.spec, request.key.program, largest)


def _free_vram(machine: Machine, device: str) -> int:
    index = gpu_index(device)
    return machine.gpus[index].free_bytes if index < len(machine.gpus) else 0


def failure(action: Fact, outcome: Outcome) -> EngineError:
    """Return the error for a child without a result; the end of its log goes into Tandem's log too.

    Args:
        action: what failed, such as "engine.not_built".
    """
    logger.warning("%s. The end of the log:\n%s", action, outcome.log)
    data: dict[str, Any] = {"action": action}
    if outcome.kind == "disk":
        return EngineError("engine.child_disk_full", log=outcome.log, **data)
    if outcome.kind == "memory":
        return EngineError("engine.child_out_of_memory", log=outcome.log, **data)
    if outcome.failure is not None:
        code = "engine.child_refused" if outcome.kind == "user" else "engine.child_failed"
        return EngineError(code, log=outcome.log, cause=outcome.failure, **data)
    if outcome.signal == _SIGKILL:
        return EngineError("engine.child_killed", log=outcome.log, **data)
    if outcome.signal:
        return EngineError("engine.child_crashed", log=outcome.log, signal=outcome.signal, **data)
    return EngineError("engine.child_ended", log=outcome.log, exit_code=outcome.exit_code, **data)


def verified_fields(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an `EngineRecord` that verification in a child found."""
    detail = Fact(result["detail"]["code"], result["detail"]["data"])
    return {**result, "error": math.nan if result["error"] is None else result["error"], "detail": detail}
