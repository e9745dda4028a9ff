"""The engine folder: one folder per engine, safe between processes, whole after any crash.

    <engine's id>/     engine.json, build.log, the engine file and what lies beside it
    .building-…/       an engine being built (`workspace`)
    .trash-…/          an engine being deleted
    .locks/            the store's, one per engine being built, one per use

An engine comes by one rename and goes by one rename. Everything that changes the store happens under its lock;
reading needs none, and works in a folder that cannot be written. Folders of other names are left alone.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR, S_ISLNK
from typing import Any

from runtime.core.errors import EngineError
from runtime.core.locks import held, is_held
from runtime.engines import manifest
from runtime.engines.workspace import Workspace, entries, sweep, workspace
from runtime.planner.engine_index import UNREADABLE_KEY, EngineKey, EngineRecord, differences

_ENGINE = re.compile(r"[0-9a-f]{16}")
_TRASH = ".trash-"
_LOCK_SECONDS = 30.0
_FULL = frozenset({"ENOSPC", "EDQUOT", "EFBIG"})


class EngineStore:
    """The engines in one folder.

    Args:
        folder: need not exist; it is made when the first engine comes.
        max_bytes: what all engines may take together; beyond, the least recently used go when a new one comes.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._read: dict[str, tuple[tuple[int, int, int], EngineRecord]] = {}
        # Problems that could not be written down, by engine and when it was built.
        self._problems: dict[tuple[str, float], str] = {}

    def path(self, engine_id: str) -> Path:
        """Return the folder of an engine."""
        return self.folder / engine_id

    def index(self) -> list[EngineRecord]:
        """Return all engines, the oldest first, those with a problem too. Reads no engine file, only their sizes."""
        self._sweep()
        return sorted(self._records(), key=lambda record: (record.built_at, record.id))

    def get(self, key: EngineKey) -> EngineRecord | None:
        """Return the engine of exactly this key. Look at `usable`: it may have a problem."""
        record = self._record(self.path(key.digest()))
        return record if record is not None and record.key == key else None

    def near(self, key: EngineKey, scale: int = 1) -> list[tuple[EngineRecord, list[str]]]:
        """Return the engines of the same program that differ, with what differs, the most alike first.

        Args:
            scale: see `engine_index.differences`.
        """
        found = [
            (record, differences(key, record.key, scale))
            for record in self._records()
            if record.key.program == key.program and record.key != key
        ]
        return sorted(found, key=lambda pair: (len(pair[1]), -pair[0].last_used, pair[0].id))

    def verify_hash(self, record: EngineRecord) -> str | None:
        """Read all files of an engine and say what is wrong with them; it is kept out from then on."""
        unreadable = record.problem if record.key == UNREADABLE_KEY else None
        problem = unreadable or manifest.check_hashes(self.path(record.id), record)
        if problem is not None:
            self.report_problem(record, problem)
        return problem

    def report_problem(self, record: EngineRecord, problem: str) -> None:
        """Keep an engine out from now on, and remember why; works in a folder that cannot be written too."""
        self._problems[record.id, record.built_at] = problem
        with contextlib.suppress(EngineError):
            self._rewrite(record.id, problem=problem)

    def record_verification(self, record: EngineRecord, **found: Any) -> EngineRecord:
        """Write down what verifying found: `verified`, `error`, `tolerance`, `detail`, `problem`, the seconds.

        Raises:
            EngineError: if the engine is gone or cannot be written.
        """
        self._problems.pop((record.id, record.built_at), None)
        return self._rewrite(record.id, **found)

    def pin(self, engine_id: str) -> EngineRecord:
        """Keep an engine from being evicted.

        Raises:
            EngineError: if the engine is gone or cannot be written.
        """
        return self._rewrite(engine_id, pinned=True)

    def unpin(self, engine_id: str) -> EngineRecord:
        """Let an engine be evicted again.

        Raises:
            EngineError: if the engine is gone or cannot be written.
        """
        return self._rewrite(engine_id, pinned=False)

    def touch(self, engine_id: str) -> None:
        """Note that an engine is used now; where that cannot be written, nothing happens."""
        if not S_ISDIR(_kind(self.path(engine_id))):
            return
        with contextlib.suppress(EngineError), self._changing():
            self._write(engine_id, last_used=self._now())

    @contextlib.contextmanager
    def using(self, engine_id: str) -> Iterator[Path]:
        """Use an engine for as long as the context lasts: it is neither deleted nor evicted.

        Gives its folder. Where the store cannot be written, nobody can delete from it either, and there is no lock.

        Raises:
            EngineError: if the engine is gone.
        """
        with contextlib.ExitStack() as stack:
            if not S_ISDIR(_kind(self.path(engine_id))):
                raise _gone(engine_id)
            with contextlib.suppress(EngineError), self._changing():
                lock = self._locks / f"{engine_id}.use-{os.getpid()}-{secrets.token_hex(4)}"
                stack.enter_context(held(lock, seconds=_LOCK_SECONDS))
            if not S_ISDIR(_kind(self.path(engine_id))):
                raise _gone(engine_id)
            self.touch(engine_id)
            yield self.path(engine_id)

    @contextlib.contextmanager
    def building(self, engine_id: str, wait: Callable[[], None]) -> Iterator[None]:
        """Be the only one who builds this engine; waits for another, calling `wait` while it does.

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
        """Make room to build an engine in; only within `building`.

        Raises:
            EngineError: if the folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                made = stack.enter_context(workspace(self.folder, engine_id))
            except OSError as error:
                raise self._cannot_write(error) from error
            yield made

    def insert(self, folder: Path, engine_id: str) -> EngineRecord:
        """Move a finished engine from its workspace into the store, in place of one that may be there (a pin stays).

        Raises:
            EngineError: if it is not finished, or the folder cannot be written.
        """
        record = manifest.read(folder, engine_id)
        problem = record.problem or manifest.check_sizes(folder, record)
        if problem is not None:
            raise EngineError(f"The engine {engine_id} was not finished: {problem}.", "Build it again.")
        with self._changing():
            before = self._record(self.path(engine_id))
            pinned = before is not None and before.pinned
            self._discard(self.path(engine_id))
            folder.rename(self.path(engine_id))
            self._problems = {known: said for known, said in self._problems.items() if known[0] != engine_id}
            with contextlib.suppress(OSError):  # a full disk: the engine is there, and that counts
                record = self._write(engine_id, last_used=self._now(), pinned=pinned)
            self._evict(self.max_bytes, keep=engine_id)
        self._empty_trash()
        return record

    def delete(self, engine_id: str) -> None:
        """Delete an engine.

        Raises:
            EngineError: if it is gone, in use, or the folder cannot be written.
        """
        if self._record(self.path(engine_id)) is None:
            raise _gone(engine_id)
        with self._changing():
            if self._in_use(engine_id):
                raise EngineError(
                    f"The engine {engine_id} is in use.", "Let the job that uses it end, or stop it; then try again."
                )
            self._discard(self.path(engine_id))
        self._empty_trash()

    def prune(self, max_bytes: int) -> list[EngineRecord]:
        """Delete broken engines, then the least recently used, until the rest take at most `max_bytes`.

        Pinned ones and those in use stay. Nothing is deleted from a store that is small enough.

        Returns:
            What was deleted.

        Raises:
            EngineError: if the folder cannot be written.
        """
        if not entries(self.folder):
            return []
        with self._changing():
            evicted = self._evict(max_bytes, keep=None)
        self._empty_trash()
        return evicted

    @property
    def _locks(self) -> Path:
        return self.folder / ".locks"

    def _records(self) -> list[EngineRecord]:
        found = (self._record(path) for path in entries(self.folder) if _ENGINE.fullmatch(path.name))
        return [record for record in found if record is not None]

    def _record(self, folder: Path) -> EngineRecord | None:
        """Return what is known of the engine in a folder; None if there is no such folder."""
        kind = _kind(folder)
        if S_ISLNK(kind):
            return manifest.unreadable(folder, "its folder is a link out of the store")
        if not S_ISDIR(kind):
            return None
        try:
            status = (folder / manifest.NAME).stat()
        except OSError:
            self._read.pop(folder.name, None)
            record = manifest.read(folder)
        else:
            signature = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._read.get(folder.name)
            if known is None or known[0] != signature:
                known = self._read[folder.name] = signature, manifest.read(folder)
            record = known[1]
        problem = record.problem or manifest.check_sizes(folder, record)
        problem = problem or self._problems.get((record.id, record.built_at))
        return replace(record, problem=problem)

    def _rewrite(self, engine_id: str, **changes: Any) -> EngineRecord:
        if not S_ISDIR(_kind(self.path(engine_id))):
            raise _gone(engine_id)
        with self._changing():
            return self._write(engine_id, **changes)

    def _write(self, engine_id: str, **changes: Any) -> EngineRecord:
        """Change what is written of an engine; under the store's lock, so that no change is lost."""
        folder = self.path(engine_id)
        record = self._record(folder)
        if record is None:
            raise _gone(engine_id)
        if record.key == UNREADABLE_KEY:
            raise EngineError(f"The engine {engine_id} is damaged: {record.problem}.", "Delete it, or build it again.")
        # Problems that are seen anew each time are not written down.
        record = replace(manifest.read(folder), **changes)
        manifest.write(folder, record)
        self._read.pop(engine_id, None)
        return record

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the store's lock; what cannot be written is told."""
        with contextlib.ExitStack() as stack:
            try:
                self._locks.mkdir(exist_ok=True)
                stack.enter_context(held(self._locks / "store", seconds=_LOCK_SECONDS))
                yield
            except OSError as error:
                raise self._cannot_write(error) from error

    def _now(self) -> float:
        """Return the time, or later than any use so far: the order holds though the clock was moved back."""
        newest = max((record.last_used for record in self._records()), default=0.0)
        return max(time.time(), newest + 1e-3)

    def _in_use(self, engine_id: str) -> bool:
        return any(is_held(path) for path in entries(self._locks) if path.name.startswith(f"{engine_id}.use-"))

    def _evict(self, max_bytes: int, keep: str | None) -> list[EngineRecord]:
        # Without an engine.json it may be anything: somebody points TENSORRT_CACHE_DIR at a folder of theirs.
        records = [record for record in self._records() if _is_ours(self.path(record.id))]
        records.sort(key=lambda record: (record.problem is None, record.last_used, record.id))
        sizes = {record.id: manifest.folder_bytes(self.path(record.id)) for record in records}
        total = sum(sizes.values())
        evicted = []
        for record in records:
            if total <= max_bytes:
                break
            if record.id != keep and not record.pinned and not self._in_use(record.id):
                self._discard(self.path(record.id))
                total -= sizes[record.id]
                evicted.append(record)
        return evicted

    def _discard(self, folder: Path) -> None:
        """Take an engine out of sight at once: nobody ever sees half of one. A link goes, not what it leads to."""
        with contextlib.suppress(FileNotFoundError):
            folder.rename(self.folder / f"{_TRASH}{folder.name}-{secrets.token_hex(4)}")
        self._read.pop(folder.name, None)

    def _empty_trash(self) -> None:
        for path in entries(self.folder):
            if not path.name.startswith(_TRASH):
                continue
            if path.is_symlink() or path.is_file():
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what processes that were killed left behind."""
        self._empty_trash()
        sweep(self.folder, self._locks)
        for path in entries(self._locks):
            is_held(path)

    def _cannot_write(self, error: OSError) -> EngineError:
        if isinstance(error, TimeoutError):
            return EngineError(
                f"Another program has kept the engine folder {self.folder} to itself for {_LOCK_SECONDS:.0f} s.",
                "Wait for it, or end it.",
            )
        if errno.errorcode.get(error.errno or 0) in _FULL:
            return EngineError(
                f"The disk is full: nothing can be written to {self.folder}.",
                "Free some space, or set TENSORRT_CACHE_DIR to a folder on a larger disk.",
            )
        return EngineError(
            f"The engine folder {self.folder} cannot be written: {error.strerror or error}.",
            "Set TENSORRT_CACHE_DIR to a folder that you can write to.",
        )


def _is_ours(folder: Path) -> bool:
    return S_ISDIR(_kind(folder)) and _kind(folder / manifest.NAME) != 0


def _kind(path: Path) -> int:
    """Return the mode of what is at a path, links not followed; 0 if nothing can be seen there."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _gone(engine_id: str) -> EngineError:
    return EngineError(f"There is no engine {engine_id}.", "See which there are: engines list.")
