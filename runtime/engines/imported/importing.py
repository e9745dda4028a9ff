"""Imports a TensorRT plan or an ONNX file as an engine of the library.

The file is copied, never linked. Its first bytes are checked, then a child process opens it, so that a crash there is
an error here. It is stored only if it computes what the model's own weights compute: no file states whose weights it
contains.
"""

import json
import math
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.untrusted_files import open_file
from runtime.engines import manifest
from runtime.engines.build import (
    Entry,
    InspectJob,
    TimerFactory,
    VerifyJob,
    failure,
    run_job,
    start_child,
    verified_fields,
)
from runtime.engines.builders import builders_of, onnxruntime, tensorrt
from runtime.engines.child import Outcome, Report
from runtime.engines.imported.contract import Contract
from runtime.engines.imported.matching import ADAPTERS_FILE, Match, find_matches
from runtime.engines.key_parts import NOT_EXPORTED, device_text, program_key_parts, versions_of
from runtime.engines.offers import EXACT, served_sizes
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.compatibility import cuda_problem
from runtime.machine.probe import Machine, free_disk_bytes, probe
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import IMPORTED, EngineKey, EngineRecord

BACKENDS = {".trt": "tensorrt", ".plan": "tensorrt", ".engine": "tensorrt", ".onnx": "onnxruntime"}
# Shown before anything in the file is executed.
WARNING = Fact("engine.import_executes_code")
# The libraries whose versions are part of an imported engine's key.
_PACKAGES: Mapping[str, tuple[str, ...]] = {"tensorrt": tensorrt.PACKAGES, "onnxruntime": onnxruntime.PACKAGES}
_BLOCK = 1 << 22
_ID_BYTES = 8
_HEAD_BYTES = 4096
# The head of a plan since TensorRT 8.6, as `trtexec --getPlanVersionOnly` reads it: tag, layout, number of parts, file
# size, and the version in four bytes. Earlier versions have another head.
_HEAD = struct.Struct("<4sIQQ4B")
_TAG = b"ftrt"
_MOST_BYTES = 1 << 46
# Major versions that may have this head; any other number is not a version.
_FIRST, _LAST = 8, 30


@dataclass(frozen=True)
class Source:
    """A file that may be an engine.

    Attributes:
        path: absolute.
        backend: what would run it.
        bytes: its size.
        version: the TensorRT that made it; empty if the file does not state it.
    """

    path: Path
    backend: str
    bytes: int
    version: str = ""

    @property
    def title(self) -> Fact:
        """The file, as a phrase."""
        return Fact("engine.imported_file", {"file": self.path.name})


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        engine: in the library.
        spec: the model that it was compared with.
        contract: of the file.
        match: the component that it replaces, and the adapters.
        compared: whether it was compared with PyTorch; if memory ran out, `engines verify` can do so later.
    """

    engine: EngineRecord
    spec: ModelSpec
    contract: Contract
    match: Match
    compared: bool

    @property
    def serves(self) -> Fact:
        """The sizes that it serves, in pixels and frames."""
        return served_sizes(self.engine.key.program, self.engine.key.profiles, self.spec)

    def describe(self) -> list[Fact]:
        """Return the result as facts, one per line."""
        data = {"component": self.match.component, "model": self.engine.model, "sizes": self.serves}
        return [*self.contract.describe(), Fact("engine.import_serves", data), *_adapter_facts(self.match)]


def describe_matches(matches: Sequence[Match], spec: ModelSpec) -> list[Fact]:
    """Return as facts what an engine could replace, and what its adapters cost."""
    components_of: dict[tuple[Fact, ...], list[str]] = {}
    for match in matches:
        facts = (served_sizes(match.program, match.profiles, spec), *_adapter_facts(match))
        components_of.setdefault(facts, []).append(match.component)
    lines: list[Fact] = []
    for (sizes, *adapters), components in components_of.items():
        data = {"components": list(dict.fromkeys(components)), "model": spec.title, "sizes": sizes}
        lines += [Fact("engine.import_could_serve", data), *adapters]
    if len(matches) > 1:
        lines.append(Fact("engine.import_compared_later"))
    return lines


def _adapter_facts(match: Match) -> list[Fact]:
    return [*match.describe(), *(() if match.exact else (Fact("engine.import_lossy"),))]


def read_source(path: Path) -> Source:
    """Return what the first bytes of a file show.

    Raises:
        EngineError: if it cannot be an engine.
    """
    name = path.name
    try:
        mode = path.lstat().st_mode
        if S_ISLNK(mode):
            raise EngineError("engine.import_link", file=name, target=path.resolve())
        if S_ISDIR(mode):
            raise EngineError("engine.import_folder", file=name)
        if not S_ISREG(mode):
            raise EngineError("engine.import_not_a_file", file=name)
        backend = BACKENDS.get(path.suffix.lower())
        if backend is None:
            raise EngineError("engine.import_unknown_suffix", file=name)
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EngineError("engine.import_unreadable", file=name or path, error=reason) from error
    if not head:
        raise EngineError("engine.import_empty", file=name)
    if _is_text(head):
        raise EngineError("engine.import_text", file=name)
    version = _plan_version(name, head, size) if backend == "tensorrt" else ""
    return Source(path.absolute(), backend, size, version)


def check_library(source: Source, machine: Machine) -> None:
    """Refuse a file that no library on this machine can run.

    Raises:
        EngineError: if the library that runs it is missing, or of another version.
    """
    missing = builders_of(source.backend)[0].unavailable(machine)
    if missing is not None:
        raise EngineError("engine.import_no_library", file=source.path.name, cause=missing)
    installed = tensorrt.installed_version() or ""
    if source.version and source.version.split(".")[:2] != installed.split(".")[:2]:
        raise EngineError(
            "engine.import_other_tensorrt", file=source.path.name, version=source.version, installed=installed
        )


def check_disk_space(source: Source, store: Path) -> None:
    """Refuse a file that does not fit into the engine folder.

    Raises:
        EngineError: if too little disk space is free.
    """
    free = free_disk_bytes(store)
    if source.bytes > free:
        raise EngineError("engine.import_disk_full", file=source.path.name, size=source.bytes, free=free, folder=store)


def _plan_version(name: str, head: bytes, size: int) -> str:
    if not head.startswith(_TAG):
        raise EngineError("engine.import_not_a_plan", file=name)
    if len(head) < _HEAD.size:
        raise EngineError("engine.import_truncated", file=name, size=size)
    _, layout, _, stated, *version = _HEAD.unpack_from(head)
    if layout != 0:
        return ""
    if size < stated < _MOST_BYTES:
        raise EngineError("engine.import_incomplete", file=name, size=size, whole=stated)
    return ".".join(map(str, version[:3])) if _FIRST <= version[0] <= _LAST else ""


def _is_text(head: bytes) -> bool:
    """Whether the first bytes are UTF-8 without control characters; the last character may be incomplete."""
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3 or error.end != len(head):
            return False
        text = head[: error.start].decode("utf-8")
    return all(character.isprintable() or character in "\n\r\t\f" for character in text)


def device_here(machine: Machine) -> str:
    """Return the device that an imported engine runs on: the GPU if there is a usable one."""
    return "cpu" if cuda_problem(machine) else "cuda:0"


def inspect_engine(path: Path, device: str, emit_progress: Report, cancel: Cancel, entry: Entry = run_job) -> Contract:
    """Open a file in a child process and return its contract. This executes the file: ask before.

    Args:
        device: "cpu" or "cuda:0".
        emit_progress, cancel, entry: see `build.build_engine`.

    Raises:
        EngineError: if it cannot be an engine, or cannot be opened on this machine.
        CancelledError: if cancelled.
    """
    source = read_source(path)
    with tempfile.TemporaryDirectory() as folder:
        check_library(source, probe())
        return _read_in_child(source, Path(folder), Path(folder), device, emit_progress, cancel, entry)


def import_engine(
    path: Path,
    spec: ModelSpec,
    component: str | None,
    service: EngineService,
    emit_progress: Report,
    cancel: Cancel,
    entry: Entry = run_job,
    *,
    timers: TimerFactory | None = None,
) -> Imported:
    """Copy a file into the library and verify it against a model. This executes the file: ask before.

    Args:
        component: the component to replace; None finds the one whose weights the file contains.
        emit_progress, cancel, entry: see `build.build_engine`.
        timers: see `EngineService.build`.

    Raises:
        EngineError: if it cannot be an engine, cannot be opened on this machine, matches no component, or computes
            something else.
        CancelledError: if cancelled; nothing of it remains.
    """
    source = read_source(path)
    store, device = service.store, device_here(service.machine)
    check_library(source, service.machine)
    check_disk_space(source, store.folder)
    # The id is unknown until the file is matched.
    temporary = secrets.token_hex(_ID_BYTES)
    with ExitStack() as stack:
        stack.enter_context(store.building(temporary, cancel.check))
        work = stack.enter_context(store.workspace(temporary))
        emit_progress(Fact("engine.copying", {"file": source.path.name, "size": source.bytes}), 0.0)
        copied = replace(source, path=work.engine / builders_of(source.backend)[0].file_name)
        digest = _copy(source.path, copied.path, cancel)
        contract = _read_in_child(copied, work.folder, work.scratch, device, emit_progress, cancel, entry)
        for weights in _weight_files(source, contract, {copied.path.name, ADAPTERS_FILE, *manifest.NOT_HASHED}, store):
            _copy(weights, work.engine / weights.name, cancel)
        refused: list[tuple[float, EngineError]] = []
        for match in find_matches(contract, spec, component):
            record = _record(match, contract, spec, service, device, digest, work.engine)
            existing = store.get(record.key)
            if existing is not None and existing.usable:
                return Imported(existing, spec, contract, match, compared=True)
            emit_progress(Fact("engine.comparing_with", {"component": match.component, "model": spec.title}), None)
            request = service.request(spec, match.component, record.key, device, timers)
            job, log = VerifyJob(work.folder, work.engine, request), work.engine / manifest.LOG_NAME
            outcome = start_child(entry, job, source.title, work.scratch, log, emit_progress, cancel)
            compared = outcome.result is not None
            if outcome.result is not None:
                record = replace(record, **verified_fields(outcome.result))
            refusal = _refusal(record, outcome, source.title, spec)
            if refusal is None:
                manifest.write(work.engine, record)
                inserted = store.insert(work.engine, record.id)
                return Imported(inserted, spec, contract, match, compared=compared)
            refused.append((math.inf if not compared or math.isnan(record.error) else record.error, refusal))
    raise min(refused, key=lambda pair: pair[0])[1]


def _refusal(record: EngineRecord, outcome: Outcome, title: Fact, spec: ModelSpec) -> EngineError | None:
    """Return why an engine cannot replace a component; `None` if it can, or memory ran out before that was known."""
    if outcome.result is None:
        unknown = outcome.kind in {"memory", "disk"}
        return None if unknown else failure(Fact("engine.not_compared", {"engine": title}), outcome)
    if record.verified:
        return None
    names = {"component": record.component, "model": spec.title}
    return EngineError("engine.import_other_weights", cause=record.detail, **names)


def _weight_files(source: Source, contract: Contract, engine_files: Collection[str], store: EngineStore) -> list[Path]:
    """Return the files with a file's external weights.

    Args:
        engine_files: names of files in an engine's folder.

    Raises:
        EngineError: if one is missing or named like one of `engine_files`, or too little disk space is free for all.
    """
    paths, size = [], 0
    for name in contract.weight_files:
        if name.lower() in engine_files:
            raise EngineError("engine.onnx_weights_name", file=name)
        weights = source.path.with_name(name)
        if weights.is_symlink() or not weights.is_file():
            raise EngineError("engine.import_weights_missing", file=name)
        paths.append(weights)
        size += weights.stat().st_size
    free = free_disk_bytes(store.folder)
    if size > free:
        raise EngineError(
            "engine.import_weights_disk_full", file=source.path.name, size=size, free=free, folder=store.folder
        )
    return paths


def _read_in_child(
    source: Source,
    workspace: Path,
    scratch: Path,
    device: str,
    emit_progress: Report,
    cancel: Cancel,
    entry: Entry,
) -> Contract:
    job = InspectJob(workspace=workspace, file=source.path, backend=source.backend, device=device)
    outcome = start_child(entry, job, source.title, scratch, scratch / "inspect.log", emit_progress, cancel)
    if outcome.result is not None:
        return Contract.from_json(outcome.result)
    if outcome.kind == "user" and outcome.failure is not None:
        # The last line states the problem with the file; the rest of the log does not help.
        raise EngineError(outcome.failure.code, **outcome.failure.data)
    raise failure(Fact("engine.not_opened", {"engine": source.title}), outcome)


def _record(
    match: Match,
    contract: Contract,
    spec: ModelSpec,
    service: EngineService,
    device: str,
    digest: str,
    folder: Path,
) -> EngineRecord:
    """Write contract, adapters and engine.json of an engine before it is compared, and return its record."""
    text = json.dumps({"contract": contract.to_json(), **match.to_json()}, indent=1)
    (folder / ADAPTERS_FILE).write_text(text + "\n", encoding="utf-8")
    architecture, weights = program_key_parts(spec, match.component, match.program, service.cache_dir)
    options = {
        "contract": sha256(text.encode()).hexdigest(),
        EXACT: "yes" if match.exact else "no",
        "made_by": contract.made_by,
        "sha256": digest,
        "weights": "unknown to the file; those of the model as far as they were compared",
    }
    if contract.backend == "onnxruntime":
        options["provider"] = "cpu" if device == "cpu" else "cuda"
    else:
        options["cuda_graphs"] = "on"
    key = EngineKey(
        program=match.program,
        family=spec.family,
        architecture=architecture,
        weights=weights,
        export_revision=NOT_EXPORTED,
        profiles=match.profiles,
        precision=contract.precision,
        backend=contract.backend,
        builder=IMPORTED,
        options=tuple(options.items()),
        versions=versions_of(*_PACKAGES[contract.backend]),
        device=device_text(service.machine, device),
        system=service.machine.system,
    )
    # The log is written again for each comparison and does not belong to the engine.
    files = manifest.hashed_files(folder, builders_of(contract.backend)[0].file_name)
    now = time.time()
    record = EngineRecord(
        id=key.digest(),
        key=key,
        model=spec.name,
        component=match.component,
        files=files,
        file_bytes=sum(file.bytes for file in files),
        detail=Fact("engine.not_compared_yet"),
        built_at=now,
        last_used=now,
        loras=spec.loras_of(match.component),
    )
    manifest.write(folder, record)
    return record


def _copy(source: Path, target: Path, cancel: Cancel) -> str:
    """Copy a file and return the SHA-256 of its content."""
    digest = sha256()
    try:
        with open_file(source, follow_links=False) as file, target.open("xb") as copy:
            while block := file.read(_BLOCK):
                cancel.check()
                digest.update(block)
                copy.write(block)
    except OSError as error:
        reason = error.strerror or str(error)
        raise EngineError("engine.import_not_copied", file=source.name, error=reason) from error
    return digest.hexdigest()
