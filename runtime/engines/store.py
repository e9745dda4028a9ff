"""The engine folder: one folder per engine, safe for concurrent processes, consistent after a crash.

    <engine's id>/                       engine.json, build.log, the engine file and its data files
    .building-<engine's id>-<random>/    the workspace of a build
        engine/                          the new engine; renamed to <engine's id>/ when it is complete
        scratch/                         temporary files of the build
        elsewhere                        path of the scratch folder, if it is outside the workspace
        child                            a lock that the child process holds while it runs
    .trash-…/                            an engine that is being deleted
    .locks/                              one lock for the store, one per engine that is being built, one per use

Engines are evicted in sets, see `engine_sets`.

An engine is added and removed by one rename each. All changes happen under the store's lock; reading needs no lock and
works in a read-only folder. Folders with other names are never changed.

The remains of killed processes are removed by the next process that lists the engines: a workspace is in use while the
engine's lock or the child's lock is held.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR, S_ISLNK
from typing import Any

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.locks import held, is_held
from runtime.core.plan import is_block_program
from runtime.core.request import SOUND_DECODERS
from runtime.engines import manifest
from runtime.models.spec import ModelSpec, component_of
from runtime.planner.choice.engine_index import (
    SWAPPED,
    UNREADABLE_KEY,
    EngineFile,
    EngineKey,
    EngineRecord,
    serves_any_clip,
)
from runtime.planner.choice.key_differences import differences
from runtime.planner.memory_model import DTYPE_BYTES

_ENGINE = re.compile(r"[0-9a-f]{16}")
_WORKSPACE = re.compile(r"\.building-([0-9a-f]{16})-[0-9a-f]{8}")
_SCRATCH_ELSEWHERE = re.compile(r"tandem-build-[0-9a-f]{16}")
_TRASH = ".trash-"
_LOCK_SECONDS = 30.0
_DISK_FULL_ERRORS = frozenset({"ENOSPC", "EDQUOT", "EFBIG"})


@dataclass(frozen=True)
class Workspace:
    """The folders of one build: `engine` becomes the engine's folder, `scratch` is for temporary files."""

    folder: Path
    scratch: Path

    @property
    def engine(self) -> Path:
        return self.folder / "engine"


@dataclass(frozen=True)
class Pruned:
    """The engines that `prune` deleted, the size of the remaining ones, and the limit."""

    deleted: tuple[EngineRecord, ...]
    total_bytes: int
    max_bytes: int

    @property
    def enough(self) -> bool:
        """Whether the remaining engines are within the limit; pinned and used ones may exceed it."""
        return self.total_bytes <= self.max_bytes


class EngineStore:
    """The engines in one folder.

    Args:
        folder: created with the first engine.
        max_bytes: limit for all engines together. When a new engine exceeds it, the least recently used sets are
            deleted, but not the set of the new engine.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        # Records by id, with the signature of the file that they were read from.
        self._read: dict[str, tuple[tuple[int, int, int], EngineRecord]] = {}
        # Problems by id and build time: kept in memory, because a read-only folder cannot store them.
        self._problems: dict[tuple[str, float], Fact] = {}
        # Of engines whose hashes this process has compared: their files then.
        self._hashed: dict[tuple[str, float], manifest.FileStates] = {}

    def path(self, engine_id: str) -> Path:
        """Return the folder of an engine."""
        return self.folder / engine_id

    def index(self) -> list[EngineRecord]:
        """Return all engines, oldest first, including unusable ones. Checks the sizes of files, not their content."""
        self._sweep()
        return sorted(self._records(), key=lambda record: (record.built_at, record.id))

    def total_bytes(self) -> int:
        """Return the size of all engines on disk."""
        return sum(manifest.folder_bytes(self.path(record.id)) for record in self.index())

    def choose(self, ids: Sequence[str]) -> list[EngineRecord]:
        """Return the engines with the given ids or prefixes of ids; all engines if none is given.

        Raises:
            EngineError: if a prefix matches no engine, or several.
        """
        engines = self.index()
        chosen: dict[str, EngineRecord] = {}
        for text in ids:
            matches = [record for record in engines if text and record.id.startswith(text.lower())]
            if not matches:
                raise _not_found(text[:40])
            if len(matches) > 1:
                raise EngineError("engine.id_ambiguous", engine=text[:40], matches=[record.id for record in matches])
            chosen[matches[0].id] = matches[0]
        return list(chosen.values()) if ids else engines

    def get(self, key: EngineKey) -> EngineRecord | None:
        """Return the engine with this key, which may have a problem: see `usable`."""
        record = self._record(self.path(key.digest()))
        return record if record is not None and record.key == key else None

    def similar(self, key: EngineKey, scale: int = 1) -> list[tuple[EngineRecord, list[Fact]]]:
        """Return the other engines of the same program with their differences, the most similar first.

        Args:
            scale: see `key_differences.differences`.
        """
        pairs = [
            (record, differences(key, record.key, scale))
            for record in self._records()
            if record.key.program == key.program and record.key != key
        ]
        return sorted(pairs, key=lambda pair: (len(pair[1]), -pair[0].last_used, pair[0].id))

    def verify_hash(self, record: EngineRecord) -> Fact | None:
        """Compare an engine's files with their hashes; mark a damaged engine as unusable and return the problem."""
        unreadable, folder = record.problem if record.key == UNREADABLE_KEY else None, self.path(record.id)
        states = manifest.file_states(folder, record)
        problem = unreadable or manifest.check_hashes(folder, record)
        if problem is not None:
            self.report_problem(record, problem)
        elif manifest.are_settled(states):
            self._hashed[record.id, record.built_at] = states
        return problem

    def hashed(self, record: EngineRecord) -> manifest.FileStates | None:
        """Return the files of an engine as they were when `verify_hash` found no problem; `None` if it was not called.

        Files of the same state have the same content.
        """
        return self._hashed.get((record.id, record.built_at))

    def report_problem(self, record: EngineRecord, problem: Fact) -> None:
        """Mark an engine as unusable; in a read-only folder, only for this process."""
        self._problems[record.id, record.built_at] = problem
        with contextlib.suppress(EngineError):
            self._rewrite(record.id, problem=problem)

    def record_verification(self, record: EngineRecord, **fields: Any) -> EngineRecord:
        """Store the results of verification: `verified`, `error`, `tolerance`, `detail`, `problem`, seconds per call.

        Raises:
            EngineError: if the engine is gone or cannot be written.
        """
        self._problems.pop((record.id, record.built_at), None)
        return self._rewrite(record.id, **fields)

    def pin(self, engine_id: str, *, pinned: bool) -> EngineRecord:
        """Exclude an engine from eviction, or include it again.

        Raises:
            EngineError: if the engine is gone or cannot be written.
        """
        return self._rewrite(engine_id, pinned=pinned)

    def touch(self, engine_id: str) -> None:
        """Store the current time as an engine's last use; does nothing in a read-only folder."""
        if not S_ISDIR(_mode(self.path(engine_id))):
            return
        with contextlib.suppress(EngineError), self._changing():
            self._write(engine_id, last_used=self._now())

    @contextlib.contextmanager
    def using(self, engine_id: str) -> Iterator[Path]:
        """Protect an engine from deletion and eviction in a `with` block; yields its folder.

        A read-only folder needs no lock, because nothing can be deleted from it.

        Raises:
            EngineError: if the engine is gone.
        """
        with contextlib.ExitStack() as stack:
            if not S_ISDIR(_mode(self.path(engine_id))):
                raise _not_found(engine_id)
            with contextlib.suppress(EngineError), self._changing():
                lock = self._locks / f"{engine_id}.use-{os.getpid()}-{secrets.token_hex(4)}"
                stack.enter_context(held(lock, seconds=_LOCK_SECONDS))
            if not S_ISDIR(_mode(self.path(engine_id))):
                raise _not_found(engine_id)
            self.touch(engine_id)
            yield self.path(engine_id)

    @contextlib.contextmanager
    def building(self, engine_id: str, wait: Callable[[], None]) -> Iterator[None]:
        """Hold an engine's build lock in a `with` block; call `wait` repeatedly while another process holds it.

        Raises:
            EngineError: if the folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                self._locks.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(self._locks / engine_id, wait=wait))
            except OSError as error:
                raise self._cannot_write(error) from error
            yield

    @contextlib.contextmanager
    def workspace(self, engine_id: str) -> Iterator[Workspace]:
        """Create a folder to build an engine in, and remove it after the `with` block; only within `building`.

        Raises:
            EngineError: if the folder cannot be written.
        """
        folder = self.folder / f".building-{engine_id}-{secrets.token_hex(4)}"
        try:
            try:
                work = _create_workspace(folder)
            except OSError as error:
                raise self._cannot_write(error) from error
            yield work
        finally:
            _remove_workspace(folder)

    def insert(self, folder: Path, engine_id: str, *, build_seconds: float | None = None) -> EngineRecord:
        """Move a finished engine from its workspace into the store; it replaces an existing one and keeps its pin.

        Args:
            build_seconds: how long it was built; by default as in its manifest.

        Raises:
            EngineError: if it is not finished, or the folder cannot be written.
        """
        record = manifest.read(folder, engine_id)
        problem = record.problem or manifest.check_sizes(folder, record)
        if problem is not None:
            raise EngineError("engine.not_finished", engine=engine_id, cause=problem)
        with self._changing():
            before = self._record(self.path(engine_id))
            pinned = before is not None and before.pinned
            self._discard(self.path(engine_id))
            folder.rename(self.path(engine_id))
            self._problems = {key: problem for key, problem in self._problems.items() if key[0] != engine_id}
            seconds = record.build_seconds if build_seconds is None else build_seconds
            with contextlib.suppress(OSError):  # for example a full disk; the engine itself is complete
                record = self._write(engine_id, last_used=self._now(), pinned=pinned, build_seconds=seconds)
            self._evict(self.max_bytes, keep=engine_id)
        self._empty_trash()
        return record

    def delete(self, engine_id: str) -> int:
        """Delete an engine, even a pinned one, and return the freed bytes.

        Raises:
            EngineError: if it is gone, in use, or the folder cannot be written.
        """
        if self._record(self.path(engine_id)) is None:
            raise _not_found(engine_id)
        freed = manifest.folder_bytes(self.path(engine_id))
        with self._changing():
            if self._in_use(engine_id):
                raise EngineError("engine.in_use", engine=engine_id)
            self._discard(self.path(engine_id))
        self._empty_trash()
        return freed

    def prune(self, max_bytes: int | None = None) -> Pruned:
        """Delete engines until the remaining ones take at most `max_bytes`: damaged ones, then the least recently used.

        Sets with a pinned engine or one in use are kept. Nothing is deleted if the store is within the limit.

        Args:
            max_bytes: the store's own limit by default; 0 deletes all sets.

        Raises:
            EngineError: if not even the most recently used set fits, or the folder cannot be written.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        intact = [each for each in self._sets() if each[0].problem is None]
        newest = max(intact, key=_last_used, default=())
        size = sum(manifest.folder_bytes(self.path(record.id)) for record in newest)
        if 0 < limit < size and not any(record.pinned or self._in_use(record.id) for record in newest):
            raise EngineError("engine.limit_deletes_all", model=newest[0].model, needed=size, limit=limit)
        evicted: list[EngineRecord] = []
        if _entries(self.folder):
            with self._changing():
                evicted = self._evict(limit, keep=None)
            self._empty_trash()
        return Pruned(tuple(evicted), self.total_bytes(), limit)

    def limit_conflict(self, spec: ModelSpec, component: str, key: EngineKey) -> Fact | None:
        """Return why an engine that is not built yet is too large for the limit, together with its set; None if not.

        Both experts of a model count, built or not; an engine without weights counts nothing.
        """

        def size(name: str) -> int:
            return 0 if key.weights == SWAPPED else spec.parameters[name] * DTYPE_BYTES[key.precision]

        file = EngineFile(manifest.NAME, size(component), "")
        new = EngineRecord(
            id=key.digest(),
            key=key,
            model=spec.name,
            component=component,
            files=(file,),
            file_bytes=file.bytes,
            last_used=self._now(),
            loras=spec.loras_of(component),
        )
        sets = engine_sets([new, *(record for record in self._records() if record.id != new.id)])
        members = next(each for each in sets if new in each)
        present = {record.component for record in members}
        absent = [name for name, programs in spec.programs.items() if key.program in programs and name not in present]
        needed = sum(record.file_bytes for record in members) + sum(map(size, absent))
        if needed <= self.max_bytes:
            return None
        return Fact("engine.limit_below_set", {"model": spec.title, "needed": needed, "limit": self.max_bytes})

    @property
    def _locks(self) -> Path:
        return self.folder / ".locks"

    def _records(self) -> list[EngineRecord]:
        records = (self._record(path) for path in _entries(self.folder) if _ENGINE.fullmatch(path.name))
        return [record for record in records if record is not None]

    def _record(self, folder: Path) -> EngineRecord | None:
        """Return the record of the engine in a folder; None if the folder does not exist."""
        mode = _mode(folder)
        if S_ISLNK(mode):
            return manifest.unreadable(folder, Fact("engine.folder_is_link"))
        if not S_ISDIR(mode):
            return None
        try:
            status = (folder / manifest.NAME).stat()
        except OSError:
            self._read.pop(folder.name, None)
            record = manifest.read(folder)
        else:
            signature = (status.st_mtime_ns, status.st_size, status.st_ino)
            entry = self._read.get(folder.name)
            if entry is None or entry[0] != signature:
                entry = self._read[folder.name] = signature, manifest.read(folder)
            record = entry[1]
        problem = record.problem or manifest.check_sizes(folder, record)
        problem = problem or self._problems.get((record.id, record.built_at))
        return replace(record, problem=problem)

    def _rewrite(self, engine_id: str, **changes: Any) -> EngineRecord:
        if not S_ISDIR(_mode(self.path(engine_id))):
            raise _not_found(engine_id)
        with self._changing():
            return self._write(engine_id, **changes)

    def _write(self, engine_id: str, **changes: Any) -> EngineRecord:
        """Change the stored record of an engine; only under the store's lock."""
        folder = self.path(engine_id)
        record = self._record(folder)
        if record is None:
            raise _not_found(engine_id)
        if record.key == UNREADABLE_KEY:
            raise EngineError("engine.damaged", engine=engine_id, cause=record.problem)
        # Read again: the problems that `_record` detects are not stored.
        record = replace(manifest.read(folder), **changes)
        manifest.write(folder, record)
        self._read.pop(engine_id, None)
        return record

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the store's lock; an `OSError` within becomes an `EngineError`."""
        with contextlib.ExitStack() as stack:
            try:
                self._locks.mkdir(exist_ok=True)
                stack.enter_context(held(self._locks / "store", seconds=_LOCK_SECONDS))
                yield
            except OSError as error:
                raise self._cannot_write(error) from error

    def _now(self) -> float:
        """Return the time, or a later one than any last use: keeps the order even if the clock is set back."""
        newest = max((record.last_used for record in self._records()), default=0.0)
        return max(time.time(), newest + 1e-3)

    def _in_use(self, engine_id: str) -> bool:
        return any(is_held(path) for path in _entries(self._locks) if path.name.startswith(f"{engine_id}.use-"))

    def _sets(self) -> list[tuple[EngineRecord, ...]]:
        # A folder without engine.json may not be an engine: TENSORRT_CACHE_DIR may point to a folder with other data.
        return engine_sets([record for record in self._records() if _has_manifest(self.path(record.id))])

    def _evict(self, max_bytes: int, keep: str | None) -> list[EngineRecord]:
        sets = self._sets()
        sizes = {record.id: manifest.folder_bytes(self.path(record.id)) for each in sets for record in each}
        total = sum(sizes.values())
        evicted: list[EngineRecord] = []
        for each in sets:
            if total <= max_bytes:
                break
            if any(record.id == keep or record.pinned or self._in_use(record.id) for record in each):
                continue
            for record in each:
                self._discard(self.path(record.id))
                total -= sizes[record.id]
                evicted.append(record)
        return evicted

    def _discard(self, folder: Path) -> None:
        """Rename an engine to a trash folder, so that it disappears at once. A link is renamed, not its target."""
        with contextlib.suppress(FileNotFoundError):
            folder.rename(self.folder / f"{_TRASH}{folder.name}-{secrets.token_hex(4)}")
        self._read.pop(folder.name, None)

    def _empty_trash(self) -> None:
        for path in _entries(self.folder):
            if not path.name.startswith(_TRASH):
                continue
            if path.is_symlink() or path.is_file():
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove the remains of killed processes."""
        self._empty_trash()
        for folder in _entries(self.folder):
            match = _WORKSPACE.fullmatch(folder.name)
            if match is not None:
                # The child process may still run for a moment after its parent was killed.
                with contextlib.suppress(OSError), held(self._locks / match[1], seconds=0):
                    if not is_held(folder / "child"):
                        _remove_workspace(folder)
        for path in _entries(self._locks):
            is_held(path)  # deletes the lock file if no process holds it

    def _cannot_write(self, error: OSError) -> EngineError:
        if isinstance(error, TimeoutError):
            return EngineError("engine.store_locked", folder=self.folder, seconds=_LOCK_SECONDS)
        if errno.errorcode.get(error.errno or 0) in _DISK_FULL_ERRORS:
            return EngineError("engine.store_disk_full", folder=self.folder)
        return EngineError("engine.store_read_only", folder=self.folder, error=error.strerror or str(error))


def engine_sets(records: Iterable[EngineRecord]) -> list[tuple[EngineRecord, ...]]:
    """Divide engines into sets that are kept or evicted together; return them in the order of eviction.

    A set is what one plan uses of one builder: the transformers of a model for one size and precision, the VAE's
    engines for that size, and the text encoder. Of engines for the same purpose, such as with other LoRAs, the most
    recently used ones belong together. The engines of blocks are a set.

    The order is damaged engines, each alone, then the least recently used sets, then those of blocks, which are small.
    """
    groups: dict[Hashable, list[EngineRecord]] = {}
    damaged = []
    for record in sorted(records, key=lambda record: (-record.last_used, record.id)):
        if record.problem is not None:
            damaged.append((record,))
        else:
            key = record.key
            groups.setdefault((_maker(record), _role(record), key.precision, key.profiles), []).append(record)
    parts = [part for group in groups.values() for part in _newest_per_component_and_program(group)]
    parts.sort(key=_last_used, reverse=True)
    sets = [[part] for part in parts if _role(part[0]) == "transformer"]
    for part in parts:
        role = _role(part[0])
        if role == "transformer":
            continue
        for members in sets:
            if _belongs(part[0], members[0][0]) and all(_role(member[0]) != role for member in members):
                members.append(part)
                break
        else:
            sets.append([part])
    joined = [tuple(record for part in members for record in part) for members in sets]
    joined.sort(key=lambda each: (_role(each[0]) == "blocks", _last_used(each), each[0].id))
    return [*sorted(damaged, key=_last_used), *joined]


def _role(record: EngineRecord) -> str:
    """Return the kind of component that an engine runs: both experts are transformers."""
    program = record.key.program
    return "blocks" if is_block_program(program) else component_of(program)


def _maker(record: EngineRecord) -> Hashable:
    """Return what engines of one set have in common."""
    key = record.key
    return record.model, key.family, key.builder, key.options, key.versions, key.device, key.system


def _newest_per_component_and_program(group: list[EngineRecord]) -> Iterator[tuple[EngineRecord, ...]]:
    """Divide engines into tuples with one for each component and program; the most recently used ones come first."""
    while group:
        newest: dict[tuple[str, str], EngineRecord] = {}
        for record in group:
            newest.setdefault((record.component, record.key.program), record)
        yield tuple(newest.values())
        group = [record for record in group if record not in newest.values()]


def _belongs(record: EngineRecord, transformer: EngineRecord) -> bool:
    """Return whether a plan that uses a transformer's engine may use another component's engine too."""
    if _role(transformer) != "transformer" or _maker(record) != _maker(transformer):
        return False
    if serves_any_clip(record.key.program) or record.key.program in SOUND_DECODERS:
        return _role(record) != "blocks"
    return any(
        profile.serves((profile.opt[0], *part.opt[1:]))
        for part in record.key.profiles
        for profile in transformer.key.profiles
    )


def _last_used(records: Sequence[EngineRecord]) -> float:
    return max(record.last_used for record in records)


@contextlib.contextmanager
def child_lock(workspace: Path) -> Iterator[None]:
    """Hold the child's lock of a workspace, so that other processes do not remove it even if the parent is killed.

    Raises:
        OSError: if the workspace does not exist.
    """
    with held(workspace / "child", seconds=_LOCK_SECONDS):
        yield


def _create_workspace(folder: Path) -> Workspace:
    folder.mkdir()
    scratch = folder / "scratch"
    # Compilers fail on temporary files whose paths contain spaces.
    if re.search(r"\s", str(scratch)):
        scratch = Path(tempfile.gettempdir()) / f"tandem-build-{secrets.token_hex(8)}"
        (folder / "elsewhere").write_text(str(scratch), encoding="utf-8")
    scratch.mkdir(mode=0o700)
    (folder / "engine").mkdir()
    return Workspace(folder, scratch)


def _remove_workspace(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        elsewhere = Path((folder / "elsewhere").read_text(encoding="utf-8"))
        # The file's content is not trusted: only a build's scratch folder is removed.
        if elsewhere.parent == Path(tempfile.gettempdir()) and _SCRATCH_ELSEWHERE.fullmatch(elsewhere.name):
            shutil.rmtree(elsewhere, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    """Return a folder's entries, sorted by name; none if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _has_manifest(folder: Path) -> bool:
    return S_ISDIR(_mode(folder)) and _mode(folder / manifest.NAME) != 0


def _mode(path: Path) -> int:
    """Return the file mode of a path without following links; 0 if it does not exist or cannot be read."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _not_found(engine_id: str) -> EngineError:
    return EngineError("engine.not_found", engine=engine_id)
