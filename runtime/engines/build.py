"""Builds and verifies engines in a child process and stores the result.

Nothing remains of a build that failed, was cancelled or was killed, and it can be retried at once. The child runs
`run_job`; it writes engine.json last.
"""

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.cancel import Cancel
from runtime.core.environment import collect_garbage_less_often, limit_thread_spinning
from runtime.core.errors import EngineError, ModelError
from runtime.core.facts import Fact
from runtime.core.plan import LatentSize, is_block_program
from runtime.core.request import SOUND_DECODERS
from runtime.engines import child, manifest
from runtime.engines.builders import BUILDERS
from runtime.engines.child import Outcome, Report, run_child
from runtime.engines.key_parts import tokens_of
from runtime.engines.store import EngineStore, child_lock
from runtime.machine.probe import free_disk_bytes, gpu_index, probe
from runtime.models import registry
from runtime.models.loras import read_lora
from runtime.models.quantization import FP8
from runtime.models.spec import FRAME_PROGRAMS, ModelSpec, is_text_encoder, is_transformer
from runtime.planner.choice.engine_index import IMPORTED, SWAPPED, EngineKey, EngineRecord

if TYPE_CHECKING:
    from runtime.engines.component_programs import Program
    from runtime.engines.sessions import Session
    from runtime.engines.verify import Case

logger = logging.getLogger(__name__)

_SIGKILL = 9

# Measures, in the child, what PyTorch would run instead of an engine: takes the program and the latent size of a call,
# and returns seconds by "eager" and "compiled", as far as measured. Must be picklable.
Timer = Callable[[str, LatentSize], Mapping[str, float]]
# Makes the timer for an engine of a model, component, key and device; `None` if PyTorch cannot run instead.
TimerFactory = Callable[[ModelSpec, str, EngineKey, str], Timer | None]


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One engine to build or verify.

    Attributes:
        spec: the model, with the LoRAs that become part of the engine.
        component: whose weights become part of it, or are used to measure it.
        key: of the engine.
        device: a torch device: "cpu" or "cuda:0".
        again: build it even if it exists.
        timer: measures what PyTorch would run instead; see `pipeline.pytorch_timer`.
        pytorch_dtype: in which PyTorch runs the program of a network for finished frames; by default, the engine's
            precision.
        cache_dir: a folder for what verifications of the same model share; see `reference.encoded_prompt`.
    """

    spec: ModelSpec
    component: str
    key: EngineKey
    device: str
    again: bool = False
    timer: Timer | None = None
    pytorch_dtype: str = ""
    cache_dir: Path | None = None

    @property
    def title(self) -> Fact:
        """The engine's program, model, builder and precision, as a phrase."""
        names = {"program": self.key.program, "model": self.spec.title}
        return Fact("engine.title", {**names, "builder": self.key.builder, "precision": self.key.precision})


@dataclass(frozen=True)
class BuildJob:
    """Build an engine and verify it.

    Attributes:
        workspace: the folder of `EngineStore.workspace`.
        engine: the engine's folder in the workspace.
        request: what to build.
        siblings: folders of the engines of a block's other parts, which verification runs too.
        families: the model families of this process, which the child uses too.
    """

    workspace: Path
    engine: Path
    request: BuildRequest
    siblings: tuple[Path, ...] = ()
    families: Mapping[str, registry.Entry] = field(default_factory=lambda: dict(registry.FAMILIES))


@dataclass(frozen=True)
class VerifyJob(BuildJob):
    """Verify an engine that exists; `engine` is its folder, in the store or in the workspace."""


@dataclass(frozen=True)
class InspectJob:
    """Read the contract of an engine file that was made elsewhere.

    Attributes:
        workspace: a folder for temporary files.
        file: the engine file.
        backend: "tensorrt" or "onnxruntime".
        device: a torch device.
    """

    workspace: Path
    file: Path
    backend: str
    device: str


Job = BuildJob | VerifyJob | InspectJob
Entry = child.Entry[Job]


def run_job(job: Job, report: Report) -> dict[str, Any]:
    """Run a job; the entry of the child process. Return its result as JSON values."""
    limit_thread_spinning()
    collect_garbage_less_often()
    with child_lock(job.workspace):
        if isinstance(job, InspectJob):
            from runtime.engines.imported.contract import read_contract

            report(Fact("engine.opening_file"), None)
            return read_contract(job.file, job.backend, job.device).to_json()
        import runtime.engines.programs  # noqa: F401 (imports PyTorch and diffusers)

        # Collections of garbage then skip half a million objects of modules, which take a third of a second each time.
        gc.freeze()
        registry.FAMILIES.update(job.families)
        if not isinstance(job, VerifyJob):
            _build(job, report)
            return {}
        # The folder of an engine that is being imported does not have its name yet.
        fields = _compare(job, manifest.read(job.engine, job.request.key.digest()), report)
        # JSON has no NaN.
        return {**fields, "error": fields["error"] if math.isfinite(fields["error"]) else None}


def _build(job: BuildJob, report: Report) -> None:
    request, key = job.request, job.request.key
    builder = BUILDERS[key.builder]
    report(Fact("engine.loading_weights", {"component": request.component}), None)
    program = _program(request, key)
    builder.build(program, key, job.engine, report)
    del program
    _free(request.device)
    files = manifest.hashed_files(job.engine, builder.file_name)
    record = EngineRecord(
        id=key.digest(),
        key=key,
        model=request.spec.name,
        component=request.component,
        files=files,
        file_bytes=sum(file.bytes for file in files),
        built_at=time.time(),
        last_used=time.time(),
        loras=() if key.weights == SWAPPED else request.spec.loras_of(request.component),
    )
    manifest.write(job.engine, replace(record, **_compare(job, record, report)))


def _compare(job: BuildJob, record: EngineRecord, report: Report) -> dict[str, Any]:
    """Compare an engine with PyTorch and measure both; return the fields of its `EngineRecord`.

    The reference, the engine and PyTorch's own component are on the device one after the other, as far as their
    outputs are small enough to be kept.
    """
    from runtime.engines.block_reference import compare_blocks, random_text
    from runtime.engines.reference import encoded_prompt, load_reference
    from runtime.engines.sessions import open_session
    from runtime.engines.sessions.imported import compare_imported
    from runtime.engines.verify import cases_of, compare

    request, key = job.request, record.key
    spec, component, device = request.spec, request.component, request.device

    def weights() -> Mapping[str, Any]:
        state: Mapping[str, Any] = _program(request, key).module.state_dict()
        return state

    report(Fact("engine.comparing"), None)
    blocks = is_block_program(key.program)
    text = encoded_prompt(spec, device, request.cache_dir) if blocks or key.program == "transformer" else None
    cases: Iterable[Case] = ()
    reference = _program(request, key) if blocks else load_reference(spec, component, key.program, device)
    inputs, target = reference.inputs(key.profiles[0].opt), reference.device
    if not blocks:
        cases = (case for profile in key.profiles for case in cases_of(reference, profile, text))
    if is_text_encoder(key.program) or key.program == "transformer":
        cases = [case.on_cpu() for case in cases]
        del reference
        _free(device)
    with open_session(job.engine, record, device=device, weights=weights) as session:
        if blocks:
            prompt = random_text(spec) if text is None else text
            with _opened(job.siblings, device) as sessions:
                verification = compare_blocks(session, spec, component, key, device, prompt, sessions)
        elif key.builder == IMPORTED:
            verification = compare_imported(session, list(cases), key.program, key.precision)
        else:
            verification = compare(session, cases, key.program, key.precision)
        del cases
        _free(device)
        context_bytes = session.context_bytes
        seconds = _seconds(session, inputs, target) if verification.passed else 0.0
    detail = verification.detail
    if text is None and is_transformer(component):
        detail = Fact("engine.compared_random_text", {"compared": detail})
    return {
        "error": verification.error,
        "largest_error": verification.largest_error,
        "tolerance": verification.tolerance,
        "verified": verification.passed,
        "detail": detail,
        "seconds_per_call": seconds,
        "context_bytes": context_bytes,
        **(_measure(request, key, report) if verification.passed else {}),
    }


@contextlib.contextmanager
def _opened(folders: Iterable[Path], device: str) -> Iterator[dict[str, "Session"]]:
    """Open the engines of other parts of a block, by program; one that cannot be opened is left out."""
    from runtime.engines.sessions import open_session

    with contextlib.ExitStack() as stack:
        sessions = {}
        for folder in folders:
            record = manifest.read(folder)
            with contextlib.suppress(EngineError):
                session = open_session(folder, record, device=device, weights=dict)
                sessions[record.key.program] = stack.enter_context(session)
        yield sessions


def _seconds(session: "Session", inputs: Mapping[str, Any], device: Any) -> float:
    """Return the seconds of one call of an engine."""
    from runtime.engines.sessions import BlockSession
    from runtime.engines.verify import seconds_of

    if isinstance(session, BlockSession):
        outputs = session.infer(**inputs)
        return seconds_of(lambda: session.write(inputs, outputs), device)
    return seconds_of(lambda: session.infer(**inputs), device)


def _measure(request: BuildRequest, key: EngineKey, report: Report) -> dict[str, Any]:
    """Return the speeds of the program in PyTorch, and of what a plan without engines would run."""
    report(Fact("engine.measuring_pytorch"), None)
    timer = request.timer
    # What fails replaces an earlier measurement too.
    fields: dict[str, Any] = {"pytorch_seconds_per_call": 0.0, "baselines": {}}
    for name, measure in (
        ("pytorch_seconds_per_call", lambda: _program_seconds(request, key)),
        ("baselines", lambda: dict(timer(key.program, key.profiles[0].opt)) if timer else {}),
    ):
        # PyTorch may need more memory than the engine, or fail: the engine is verified, and its build is not lost.
        try:
            fields[name] = measure()
        except Exception:
            logger.warning("PyTorch could not be measured", exc_info=True)
        _free(request.device)
    if key.program in {*FRAME_PROGRAMS, *SOUND_DECODERS} and fields["pytorch_seconds_per_call"]:
        # PyTorch runs its program as it is.
        fields["baselines"] = {"eager": fields["pytorch_seconds_per_call"]}
    return fields


def _program_seconds(request: BuildRequest, key: EngineKey) -> float:
    from runtime.engines.verify import seconds_of

    # CPUs have no instructions for float16: PyTorch takes minutes there.
    slow = request.device == "cpu" and key.precision == "float16"
    # The form in FP8 emulates it; what PyTorch would run is measured as a baseline.
    precision = "bfloat16" if key.precision == FP8 else key.precision
    program = _program(request, key, request.pytorch_dtype or ("float32" if slow else precision))
    inputs = program.inputs(key.profiles[0].opt)
    return seconds_of(lambda: program.run(**inputs), program.device)


def _program(request: BuildRequest, key: EngineKey, dtype: str = "") -> "Program":
    """Load the program that an engine replaces, by default in the engine's precision."""
    from runtime.engines.programs import load_program

    dtype, tokens = dtype or key.precision, tokens_of(key)
    return load_program(request.spec, request.component, key.program, device=request.device, dtype=dtype, tokens=tokens)


def _free(device: str) -> None:
    """Return memory that is no longer used to the device."""
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


@contextlib.contextmanager
def siblings(store: EngineStore, key: EngineKey) -> Iterator[tuple[Path, ...]]:
    """Yield the folders of the usable engines of a block's other parts; they are not deleted meanwhile."""
    with contextlib.ExitStack() as stack:
        folders = []
        for record in store.index() if is_block_program(key.program) else ():
            is_sibling = is_block_program(record.key.program) and record.key.program != key.program
            if is_sibling and record.usable and replace(record.key, program=key.program) == key:
                with contextlib.suppress(EngineError):  # it was deleted
                    folders.append(stack.enter_context(store.using(record.id)))
        yield tuple(folders)


def build_engine(
    request: BuildRequest, store: EngineStore, emit_progress: Report, cancel: Cancel, entry: Entry = run_job
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
            emit_progress(Fact("engine.existing_unusable", {"cause": existing.problem}), None)
        elif existing is not None and (not request.again or existing.built_at >= requested_at):
            return _if_verified(request, existing)
        _check_space(request, store)
        started = time.monotonic()
        with store.workspace(engine_id) as work:
            emit_progress(Fact("engine.building", {"engine": request.title}), 0.0)
            log = work.engine / manifest.LOG_NAME
            with siblings(store, request.key) as folders:
                job = BuildJob(work.folder, work.engine, request, folders)
                outcome = start_child(entry, job, request.title, work.scratch, log, emit_progress, cancel)
            if outcome.result is None:
                raise failure(Fact("engine.not_built", {"engine": request.title}), outcome)
            # A user waits for the child's start, loading, comparison and measurements as well.
            record = store.insert(work.engine, engine_id, build_seconds=round(time.monotonic() - started, 3))
    emit_progress(Fact("engine.built", {"engine": request.title, "seconds": record.build_seconds}), 1.0)
    return _if_verified(request, record)


def verify_engine(
    record: EngineRecord,
    request: BuildRequest,
    store: EngineStore,
    emit_progress: Report,
    cancel: Cancel,
    entry: Entry = run_job,
) -> EngineRecord:
    """Compare an engine with PyTorch again, and store the result or the problem.

    Args:
        request: how the engine was built, with the model and the component that it runs with now.
        emit_progress, cancel, entry: see `build_engine`.

    Raises:
        EngineError: if the engine is gone, the store cannot be written, or verification itself failed.
        CancelledError: if cancelled; the record stays as it was.
    """
    _check_loras(record)
    # The engine's own LoRAs, which may differ from those of the model's next job.
    request = replace(request, spec=replace(request.spec, loras=record.loras))
    with store.using(record.id) as folder, store.building(record.id, cancel.check):
        problem = store.verify_hash(record)
        if problem is not None:
            return replace(record, problem=problem, verified=False)
        with store.workspace(record.id) as work, siblings(store, record.key) as folders:
            job, log = VerifyJob(work.folder, folder, request, folders), work.folder / "verify.log"
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


def _check_space(request: BuildRequest, store: EngineStore) -> None:
    """Raise if memory, disk space or the library's limit is too small, instead of failing minutes later."""
    conflict = store.limit_conflict(request.spec, request.component, request.key)
    if conflict is not None:
        raise EngineError(conflict.code, **conflict.data)
    machine, index = probe(), gpu_index(request.device)
    largest = max(request.key.profiles, key=lambda profile: profile.max)
    needs = BUILDERS[request.key.builder].needs(request.spec, request.key.program, largest)
    free_vram = machine.gpus[index].free_bytes if index < len(machine.gpus) else 0
    checks = (
        ("engine.needs_memory", needs.ram_bytes, machine.ram_free_bytes),
        ("engine.needs_video_memory", needs.vram_bytes, free_vram),
        ("engine.needs_disk", needs.disk_bytes, free_disk_bytes(store.folder)),
    )
    for code, needed, free in checks:
        if needed > free:
            raise EngineError(code, engine=request.title, needed=needed, free=free, folder=store.folder)


def start_child(
    entry: Entry, job: Job, title: Fact, scratch: Path, log: Path, emit_progress: Report, cancel: Cancel
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


def failure(action: Fact, outcome: Outcome) -> EngineError:
    """Return the error for a child without a result; the end of its log goes into Tandem's log too.

    Args:
        action: what failed, such as "engine.not_built".
    """
    logger.warning("%s. The end of the log:\n%s", action, outcome.log)
    code = "engine.child_ended"
    data: dict[str, Any] = {"exit_code": outcome.exit_code}
    if outcome.kind == "disk":
        code, data = "engine.child_disk_full", {}
    elif outcome.kind == "memory":
        code, data = "engine.child_out_of_memory", {}
    elif outcome.failure is not None:
        code = "engine.child_refused" if outcome.kind == "user" else "engine.child_failed"
        data = {"cause": outcome.failure}
    elif outcome.signal == _SIGKILL:
        code, data = "engine.child_killed", {}
    elif outcome.signal:
        code, data = "engine.child_crashed", {"signal": outcome.signal}
    return EngineError(code, log=outcome.log, action=action, **data)


def verified_fields(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an `EngineRecord` that verification in a child found."""
    detail = Fact(result["detail"]["code"], result["detail"]["data"])
    return {**result, "error": math.nan if result["error"] is None else result["error"], "detail": detail}
