"""`engines import`: a file that was made elsewhere becomes an engine of the library, if it proves to be one.

The file is copied, never linked. What opens it is a child process, so that a crash there is a message here. It stays
only if it computes what the model's own weights compute: which weights a file holds is written nowhere in it.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.units import byte_size
from runtime.engines import manifest
from runtime.engines.build import BuildRequest, EmitProgress, failure, found_by
from runtime.engines.child import COMMAND, run_child
from runtime.engines.identity import EXPORT_REVISION, device_text, program_key_parts, versions_of
from runtime.engines.imported.contract import Contract
from runtime.engines.imported.matching import ADAPTERS_FILE, Fitting, fittings
from runtime.engines.imported.offering import EXACT, served
from runtime.engines.imported.source import FILE_NAMES, Source, check_library, check_room, look
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine, probe
from runtime.models.spec import ModelSpec
from runtime.planner.constraints import cuda_problem
from runtime.planner.engine_index import IMPORTED, EngineKey, EngineRecord

_BLOCK = 1 << 22
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "onnxruntime": ("onnxruntime-openvino", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime"),
}
_ID_LENGTH = 16


@dataclass(frozen=True)
class Imported:
    """What became of a file.

    Attributes:
        engine: in the library.
        spec: the model that it was compared with.
        contract: what the file said of itself.
        fitting: what it stands for, and through which adapters.
        compared: whether it was compared with PyTorch; if memory did not suffice it waits for `engines verify`.
    """

    engine: EngineRecord
    spec: ModelSpec
    contract: Contract
    fitting: Fitting
    compared: bool

    @property
    def serves(self) -> str:
        """The sizes it serves, in pixels and frames."""
        return served(self.engine.key.program, self.engine.key.profiles, self.spec)

    def lines(self) -> list[str]:
        """Return it in words, a line each."""
        return [
            *self.contract.lines(),
            f"Stands for the {self.fitting.component} of {self.engine.model}: {self.serves}.",
            *_costs(self.fitting),
        ]


def prospects(found: Sequence[Fitting], spec: ModelSpec) -> list[str]:
    """Return in words, a line each, what an engine could stand for and what bridging the rest would cost."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for fitting in found:
        said = (served(fitting.program, fitting.profiles, spec), *_costs(fitting))
        alike.setdefault(said, []).append(fitting.component)
    lines = []
    for (sizes, *costs), components in alike.items():
        lines += [f"Could stand for the {' or the '.join(dict.fromkeys(components))} of {spec.title}: {sizes}.", *costs]
    if len(found) > 1:
        lines.append("Which of these it is shows when it is compared with the model, as it is imported.")
    return lines


def _costs(fitting: Fitting) -> list[str]:
    lossy = "Something is lost, so it is used only where its backend is asked for."
    return [*fitting.lines(), *(() if fitting.exact else (lossy,))]


def device_here(machine: Machine) -> str:
    """Return the device that an imported engine is to run on: the GPU where there is one that can be used."""
    return "cpu" if cuda_problem(machine) else "cuda:0"


def inspect(
    path: Path, device: str, emit_progress: EmitProgress, cancel: Cancel, command: Sequence[str] = COMMAND
) -> Contract:
    """Open a file in a child process and return its contract. This runs what is in it: ask before.

    Args:
        device: "cpu" or "cuda:0".
        emit_progress, cancel, command: as for `build.build_engine`.

    Raises:
        EngineError: if it cannot be an engine, or cannot be opened here.
        CancelledError: if that was asked for.
    """
    source = look(path)
    with tempfile.TemporaryDirectory() as folder:
        check_library(source, probe())
        return _contract(source, Path(folder), Path(folder), device, emit_progress, cancel, command)


def import_engine(
    path: Path,
    spec: ModelSpec,
    component: str | None,
    service: EngineService,
    device: str,
    emit_progress: EmitProgress,
    cancel: Cancel,
    command: Sequence[str] = COMMAND,
) -> Imported:
    """Copy a file into the library and prove it against a model. This runs what is in it: ask before.

    Args:
        component: whose place it is to take; `None` looks for the one whose weights it holds.
        device: where it is to run: "cpu" or "cuda:0".
        emit_progress, cancel, command: as for `build.build_engine`.

    Raises:
        EngineError: if it cannot be an engine, cannot be opened here, fits no component, or computes something else.
        CancelledError: if that was asked for; nothing is left of it.
    """
    source = look(path)
    store = service.store
    check_library(source, service.machine)
    check_room(source, store.folder)
    temporary = sha256(f"{source.path}\0{os.getpid()}\0{time.time_ns()}".encode()).hexdigest()[:_ID_LENGTH]
    with ExitStack() as stack:
        stack.enter_context(store.building(temporary, cancel.check))
        room = stack.enter_context(store.workspace(temporary))
        emit_progress(f"Copying {source.path.name} ({byte_size(source.bytes)})", 0.0)
        digest = _copy(source.path, room.engine / FILE_NAMES[source.backend], cancel)
        copied = replace(source, path=room.engine / FILE_NAMES[source.backend])
        contract = _contract(copied, room.folder, room.scratch, device, emit_progress, cancel, command)
        for name in contract.beside:
            look_beside(source.path.with_name(name))
            _copy(source.path.with_name(name), room.engine / name, cancel)
        refused: list[tuple[float, EngineError]] = []
        for fitting in fittings(contract, spec, component):
            record = _record(fitting, contract, spec, service, device, digest, room.engine)
            there = store.get(record.key)
            if there is not None and there.usable:
                return Imported(there, spec, contract, fitting, compared=True)
            request = BuildRequest(spec=spec, component=fitting.component, key=record.key, device=device)
            emit_progress(f"Comparing with the {fitting.component} of {spec.title}", None)
            outcome = run_child(
                {
                    "task": "verify",
                    "workspace": str(room.folder),
                    "engine": str(room.engine),
                    "model": {"directory": str(spec.directory), "name": spec.name},
                    "component": fitting.component,
                    "key": record.key.to_json(),
                    "device": device,
                },
                room.scratch,
                room.engine / manifest.LOG_NAME,
                emit_progress,
                cancel.check,
                command,
            )
            if outcome.done is None and outcome.kind not in {"memory", "disk"}:
                refused.append((math.inf, failure(request.title, "compared with PyTorch", outcome)))
                continue
            if outcome.done is not None:
                record = replace(record, **found_by(outcome.done))
                if not record.verified:
                    far = math.inf if math.isnan(record.error) else record.error
                    refused.append((far, _other_weights(spec, fitting, record)))
                    continue
            manifest.write(room.engine, record)
            inserted = store.insert(room.engine, record.id)
            return Imported(inserted, spec, contract, fitting, compared=outcome.done is not None)
    raise min(refused, key=lambda pair: pair[0])[1]


def look_beside(path: Path) -> None:
    """Refuse a file with weights that is not there, or is a link.

    Raises:
        EngineError: if it cannot be copied.
    """
    if path.is_symlink() or not path.is_file():
        raise EngineError(
            f"The weights in {path.name} are not beside the ONNX file.", "Copy both files into one folder."
        )


def _contract(
    source: Source,
    workspace: Path,
    scratch: Path,
    device: str,
    emit_progress: EmitProgress,
    cancel: Cancel,
    command: Sequence[str],
) -> Contract:
    job = {
        "task": "inspect",
        "workspace": str(workspace),
        "file": str(source.path),
        "backend": source.backend,
        "device": device,
    }
    outcome = run_child(job, scratch, scratch / "inspect.log", emit_progress, cancel.check, command)
    if outcome.done is not None:
        return Contract.from_json(outcome.done)
    if outcome.kind == "told":
        # It says what is wrong with the file: what else is in the log is of no use.
        raise EngineError(outcome.failed, outcome.remedy)
    raise failure("imported file", "opened", outcome)


def _record(
    fitting: Fitting,
    contract: Contract,
    spec: ModelSpec,
    service: EngineService,
    device: str,
    digest: str,
    folder: Path,
) -> EngineRecord:
    """Return what is known of an engine before it is compared; what it is used with is written beside it."""
    text = json.dumps({"contract": contract.to_json(), **fitting.to_json()}, indent=1)
    (folder / ADAPTERS_FILE).write_text(text + "\n", encoding="utf-8")
    architecture, weights = program_key_parts(spec, fitting.component, fitting.program, service.notes)
    options = {
        "contract": sha256(text.encode()).hexdigest(),
        EXACT: "yes" if fitting.exact else "no",
        "made_by": contract.made_by,
        "sha256": digest,
        "weights": "unknown to the file; those of the model as far as they were compared",
    }
    if contract.backend == "onnxruntime":
        options["provider"] = "cpu" if device == "cpu" else "cuda"
    else:
        options["cuda_graphs"] = "on"
    key = EngineKey(
        program=fitting.program,
        family=spec.family,
        architecture=architecture,
        weights=weights,
        export_revision=EXPORT_REVISION,
        profiles=fitting.profiles,
        precision=contract.precision,
        backend=contract.backend,
        builder=IMPORTED,
        options=tuple(options.items()),
        versions=versions_of(*_PACKAGES[contract.backend]),
        device=device_text(service.machine, device),
        system=service.machine.system,
    )
    # The log is opened anew for each comparison, and is no file of the engine's.
    files = manifest.hashed_files(folder, FILE_NAMES[contract.backend])
    now = time.time()
    record = EngineRecord(
        id=key.digest(),
        key=key,
        model=spec.name,
        component=fitting.component,
        files=files,
        file_bytes=sum(file.bytes for file in files),
        detail="not compared with PyTorch yet",
        built_at=now,
        last_used=now,
    )
    manifest.write(folder, record)
    return record


def _other_weights(spec: ModelSpec, fitting: Fitting, record: EngineRecord) -> EngineError:
    return EngineError(
        f"The engine does not compute what the {fitting.component} of {spec.title} does: {record.detail}. "
        "It holds other weights, or was exported otherwise.",
        "Give the model that it was made from with --model, or build an engine here with `build`.",
    )


def _copy(source: Path, target: Path, cancel: Cancel) -> str:
    """Copy a file and return the sha256 of what was copied."""
    digest = sha256()
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(source, flags), "rb") as file, target.open("wb") as copy:
            while block := file.read(_BLOCK):
                cancel.check()
                digest.update(block)
                copy.write(block)
    except OSError as error:
        raise EngineError(
            f"{source.name} cannot be copied: {error.strerror or error}.",
            "Check its permissions, and the space in the engine folder (TENSORRT_CACHE_DIR).",
        ) from error
    return digest.hexdigest()
