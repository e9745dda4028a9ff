"""The child process: building, verifying and inspecting engines. engine.json is written last."""

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.core.environment import limit_thread_spinning
from runtime.core.facts import Fact
from runtime.engines.child import Report
from runtime.engines.workspace import working_in
from runtime.machine.probe import probe
from runtime.models.registry import FAMILIES, Entry
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import IMPORTED, SWAPPED, EngineKey, EngineRecord
from runtime.planner.memory_model import DTYPE_BYTES

# The float32 reference may use at most this fraction of the free memory.
_REFERENCE_SHARE = 0.5


@dataclass(frozen=True)
class BuildJob:
    """Build an engine and verify it.

    Attributes:
        workspace: see `workspace.workspace`.
        engine: the engine's folder in the workspace.
        spec: the model, with the LoRAs that become part of the engine.
        component: whose weights.
        key: of the engine.
        device: a torch device.
        families: the model families of this process, which the child uses too.
    """

    workspace: Path
    engine: Path
    spec: ModelSpec
    component: str
    key: EngineKey
    device: str
    families: Mapping[str, Entry] = field(default_factory=lambda: dict(FAMILIES))


@dataclass(frozen=True)
class VerifyJob(BuildJob):
    """Verify an engine that exists; `engine` is its folder, in the store or in the workspace."""


@dataclass(frozen=True)
class InspectJob:
    """Read the contract of an engine file that was made elsewhere.

    Attributes:
        workspace: see `workspace.workspace`.
        file: the engine file.
        backend: "tensorrt" or "onnxruntime".
        device: a torch device.
    """

    workspace: Path
    file: Path
    backend: str
    device: str


Job = BuildJob | VerifyJob | InspectJob


def run_job(job: Job, report: Report) -> dict[str, Any]:
    """Run a job; the entry of the child process."""
    limit_thread_spinning()
    with working_in(job.workspace):
        if isinstance(job, InspectJob):
            return _inspect(job, report)
        FAMILIES.update(job.families)
        return _verify(job, report) if isinstance(job, VerifyJob) else _build(job, report)


def _build(job: BuildJob, report: Report) -> dict[str, Any]:
    from runtime.engines import manifest
    from runtime.engines.builders import BUILDERS
    from runtime.engines.programs import load_program

    spec, key = job.spec, job.key
    builder = BUILDERS[key.builder]
    report(Fact("engine.loading_weights", {"component": job.component}), None)
    program = load_program(spec, job.component, key.program, device=job.device, dtype=key.precision)
    started = time.monotonic()
    builder.build(program, key, job.engine, report)
    seconds = time.monotonic() - started
    del program
    _free_memory(job.device)
    files = manifest.hashed_files(job.engine, builder.file_name)
    record = EngineRecord(
        id=key.digest(),
        key=key,
        model=spec.name,
        component=job.component,
        files=files,
        file_bytes=sum(file.bytes for file in files),
        build_seconds=round(seconds, 3),
        built_at=time.time(),
        last_used=time.time(),
        loras=() if key.weights == SWAPPED else spec.loras_of(job.component),
    )
    manifest.write(job.engine, replace(record, **_compare(job, record, report)))
    return {}


def _verify(job: VerifyJob, report: Report) -> dict[str, Any]:
    """Return the verified fields of the engine's record as JSON values."""
    from runtime.engines import manifest

    # The folder of an engine that is being imported does not have its name yet.
    record = manifest.read(job.engine, job.key.digest())
    found = _compare(job, record, report)
    # JSON has no NaN.
    return {**found, "error": found["error"] if math.isfinite(found["error"]) else None}


def _inspect(job: InspectJob, report: Report) -> dict[str, Any]:
    """Return the contract of an engine file as JSON values."""
    from runtime.engines.imported.contract import read_contract

    report(Fact("engine.opening_file"), None)
    return read_contract(job.file, job.backend, job.device).to_json()


def _compare(job: BuildJob, record: EngineRecord, report: Report) -> dict[str, Any]:
    """Compare an engine with PyTorch and return the fields of its `EngineRecord`."""
    from runtime.engines.imported.session import verify_imported
    from runtime.engines.programs import load_program
    from runtime.engines.sessions import open_session
    from runtime.engines.verify import verify

    key = record.key

    def load(dtype: str) -> Any:
        return load_program(job.spec, job.component, key.program, device=job.device, dtype=dtype)

    def weights() -> Mapping[str, Any]:
        state: Mapping[str, Any] = load(key.precision).module.state_dict()
        return state

    compare = verify_imported if key.builder == IMPORTED else verify
    report(Fact("engine.comparing"), None)
    with open_session(job.engine, record, device=job.device, weights=weights) as session:
        reference = load("float32" if _float32_fits(job) else key.precision)
        results = [compare(session, reference, profile, key.precision) for profile in key.profiles]
    worst = max(results, key=lambda result: math.inf if math.isnan(result.error) else result.error)
    return {
        "error": worst.error,
        "tolerance": worst.tolerance,
        "verified": all(result.passed for result in results),
        "detail": worst.detail,
        "seconds_per_call": results[0].seconds_per_call,
        "pytorch_seconds_per_call": results[0].pytorch_seconds_per_call,
    }


def _float32_fits(job: BuildJob) -> bool:
    import torch

    on_gpu = job.device.startswith("cuda")
    free = torch.cuda.mem_get_info(job.device)[0] if on_gpu else probe().ram_free_bytes
    return DTYPE_BYTES["float32"] * job.spec.parameters[job.component] < _REFERENCE_SHARE * free


def _free_memory(device: str) -> None:
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
