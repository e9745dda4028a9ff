"""Builds an engine in a child process and puts it into the store: the parent's side.

Nothing of a build that failed, was cancelled or killed is left, and it can be tried again at once.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError, ModelError
from runtime.core.units import byte_size, duration
from runtime.engines import manifest
from runtime.engines.builders import BUILDERS, BuildNeeds
from runtime.engines.child import COMMAND, Outcome, run_child
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine, free_disk_bytes, gpu_index, probe
from runtime.models.loras import read_lora
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineKey, EngineRecord

EmitProgress = Callable[[str, float | None], None]

logger = logging.getLogger(__name__)

_SIGKILL = 9
_DISK_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One engine to build.

    Attributes:
        spec: the model.
        component: whose weights are built in, or measured with: "text_encoder", "transformer", "transformer_2", "vae".
        key: what to build.
        device: where, in PyTorch's words: "cpu" or "cuda:0".
        again: build also where the engine is there already.
    """

    spec: ModelSpec
    component: str
    key: EngineKey
    device: str
    again: bool = False

    @property
    def title(self) -> str:
        """The engine in words."""
        return f"{self.key.program} of {self.spec.title} ({self.key.builder}, {self.key.precision})"


def build_engine(
    request: BuildRequest,
    store: EngineStore,
    emit_progress: EmitProgress,
    cancel: Cancel,
    command: Sequence[str] = COMMAND,
) -> EngineRecord:
    """Return the engine that is asked for, built now unless it is there.

    Two callers who want the same engine build it once: the second waits for the first.

    Args:
        emit_progress: called with lines for people and the share done, where that is known; on this thread.
        cancel: checked about ten times a second.
        command: starts the child process.

    Raises:
        EngineError: if it cannot be built here, building failed (`log` has the log's last lines), or it was built
            but differs from PyTorch by more than the tolerance. Such an engine stays in the store, not usable, so that
            it is not built in vain each time; `again` builds it nonetheless.
        CancelledError: if that was asked for; nothing of the build is left.
    """
    asked_at = time.time()
    engine_id = request.key.digest()
    told = False

    def wait() -> None:
        nonlocal told
        cancel.check()
        if not told:
            emit_progress(f"Waiting for another build of the {request.title}", None)
            told = True

    cancel.check()
    with store.building(engine_id, wait):
        there = store.get(request.key)
        if there is not None and there.problem is not None:
            emit_progress(f"The engine that is there cannot be used: {there.problem}", None)
        elif there is not None and (not request.again or there.built_at >= asked_at):
            return _proven(request, there)
        _check_room(request, store)
        with store.workspace(engine_id) as room:
            emit_progress(f"Building the {request.title}", 0.0)
            job = _job(request, "build", room.folder, room.engine)
            log = room.engine / manifest.LOG_NAME
            outcome = _run(request, job, room.scratch, log, emit_progress, cancel, command)
            if outcome.done is None:
                raise failure(request.title, "built", outcome)
            record = store.insert(room.engine, engine_id)
    emit_progress(f"Built the {request.title} in {duration(record.build_seconds)}", 1.0)
    return _proven(request, record)


def verify_engine(
    spec: ModelSpec,
    component: str,
    record: EngineRecord,
    store: EngineStore,
    device: str,
    emit_progress: EmitProgress,
    cancel: Cancel,
    command: Sequence[str] = COMMAND,
) -> EngineRecord:
    """Prove an engine against PyTorch once more and write down what was found, a problem too.

    Args:
        spec, component: whose weights it was built from, or is to run with.
        device, emit_progress, cancel, command: as for `build_engine`.

    Raises:
        EngineError: if it is gone, the store cannot be written, or verifying itself failed.
        CancelledError: if that was asked for; what was written of it before stays.
    """
    # Those that it was built with, whatever the model is used with now.
    spec = replace(spec, loras=record.loras)
    _check_loras(record)
    request = BuildRequest(spec=spec, component=component, key=record.key, device=device)
    with store.using(record.id) as folder, store.building(record.id, cancel.check):
        problem = store.verify_hash(record)
        if problem is not None:
            return replace(record, problem=problem, verified=False)
        with store.workspace(record.id) as room:
            job = _job(request, "verify", room.folder, folder)
            log = room.folder / "verify.log"
            outcome = _run(request, job, room.scratch, log, emit_progress, cancel, command)
        if outcome.done is not None:
            return store.record_verification(record, **found_by(outcome.done), problem=None)
        error = failure(request.title, "verified", outcome)
        if outcome.kind in {"memory", "disk"}:  # which says nothing about the engine
            raise error
        return store.record_verification(record, problem=error.what, verified=False)


def _check_loras(record: EngineRecord) -> None:
    """Refuse to compare with weights that cannot be had, which says nothing about the engine."""
    for use in record.loras:
        try:
            there = read_lora(use.path).digest
        except ModelError as error:
            raise EngineError(f"The engine {record.id} has a LoRA inside: {error.what}", error.remedy) from error
        if there != use.digest:
            raise EngineError(
                f"The engine {record.id} has the LoRA {use.name} inside, and its file is another now.",
                "Put the file back, or delete the engine.",
            )


def _proven(request: BuildRequest, record: EngineRecord) -> EngineRecord:
    if record.verified:
        return record
    raise EngineError(
        f"The engine for the {request.title} was built, but is not what PyTorch computes: {record.detail}.",
        f"PyTorch runs it instead. To build it anew, delete the engine {record.id} first.",
    )


def _job(request: BuildRequest, task: str, workspace: Path, engine: Path) -> dict[str, Any]:
    return {
        "task": task,
        "workspace": str(workspace),
        "engine": str(engine),
        "model": {
            "directory": str(request.spec.directory),
            "name": request.spec.name,
            "loras": [use.to_json() for use in request.spec.loras],
        },
        "component": request.component,
        "key": request.key.to_json(),
        "device": request.device,
    }


def _run(
    request: BuildRequest,
    job: Mapping[str, Any],
    scratch: Path,
    log: Path,
    emit_progress: EmitProgress,
    cancel: Cancel,
    command: Sequence[str],
) -> Outcome:
    try:
        return run_child(job, scratch, log, emit_progress, cancel.check, command)
    except OSError as error:
        raise EngineError(
            f"The process for the {request.title} could not be started: {error.strerror or error}.",
            "Close other programs and try again.",
        ) from error


def _check_room(request: BuildRequest, store: EngineStore) -> None:
    """Refuse what would end in a full disk or a killed process minutes later."""
    machine, needs = probe(), _needs(request)
    for what, needed, free, remedy in (
        ("memory", needs.ram_bytes, machine.ram_free_bytes, "Close other programs, or take a smaller model or size."),
        ("video memory", needs.vram_bytes, _free_vram(machine, request.device), "Close other programs on the GPU."),
        (
            "disk",
            needs.disk_bytes,
            free_disk_bytes(store.folder),
            f"Free some space in {store.folder}, or set TENSORRT_CACHE_DIR to a folder on a larger disk.",
        ),
    ):
        if needed > free:
            raise EngineError(
                f"Building the {request.title} needs about {byte_size(needed)} of {what}; {byte_size(free)} are free.",
                remedy,
            )


def _needs(request: BuildRequest) -> BuildNeeds:
    largest = max(request.key.profiles, key=lambda profile: profile.max)
    return BUILDERS[request.key.builder].needs(request.spec, request.key.program, largest)


def _free_vram(machine: Machine, device: str) -> int:
    index = gpu_index(device)
    return machine.gpus[index].free_bytes if index < len(machine.gpus) else 0


def failure(title: str, verb: str, outcome: Outcome) -> EngineError:
    """Say in two lines why the child has nothing to show; the log's end goes along, and into Tandem's own log."""
    logger.warning("The %s was not %s. The end of the log:\n%s", title, verb, outcome.log)
    what = f"The engine for the {title} could not be {verb}"
    again = "PyTorch runs it instead; the log's last lines say more."
    if outcome.kind == "disk" or any(words in outcome.log for words in _DISK_WORDS):
        return EngineError(
            f"{what}: the disk is full.",
            "Free some space, or set TENSORRT_CACHE_DIR to a folder on a larger disk.",
            log=outcome.log,
        )
    if outcome.kind == "memory":
        return EngineError(
            f"{what}: memory ran out.", "Close other programs, or take a smaller model or size.", log=outcome.log
        )
    if outcome.failed:
        return EngineError(f"{what}: {outcome.failed.rstrip('.')}.", outcome.remedy or again, log=outcome.log)
    if outcome.signal == _SIGKILL:
        return EngineError(
            f"{what}: its process was killed.",
            "Most often the system does that when memory runs out: close other programs, or take a smaller size.",
            log=outcome.log,
        )
    died = f"crashed (signal {outcome.signal})" if outcome.signal else f"ended with exit code {outcome.exit_code}"
    return EngineError(f"{what}: its process {died}.", again, log=outcome.log)


def found_by(done: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an `EngineRecord` that the child found."""
    names = ("verified", "tolerance", "detail", "seconds_per_call", "pytorch_seconds_per_call")
    return {"error": math.nan if done["error"] is None else done["error"], **{name: done[name] for name in names}}
