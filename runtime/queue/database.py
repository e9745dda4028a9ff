"""The SQLite file of the job store, safe against killed processes and concurrent writers.

Write-ahead logging, one short transaction per change. SQLite's errors become `StoreError`s with a remedy. A damaged
file is renamed to a backup and a new one is started. This module knows nothing about jobs.
"""

import contextlib
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from runtime.core.errors import StoreError
from runtime.core.facts import Fact
from runtime.core.locks import held
from runtime.queue.migrations import MIGRATIONS

_BUSY_SECONDS = 10.0
_OPENING_SECONDS = 20.0
_SMALL_FILES = 1 << 16

logger = logging.getLogger(__name__)


class Database:
    """An SQLite file, or an in-memory database that is lost with the process. Safe between threads.

    Args:
        path: of the file, which is made if it is missing; `None` for a database in memory.

    Attributes:
        notice: what was found wrong with the file, to be reported once.

    Raises:
        StoreError: if it cannot be opened or written, or a newer Tandem wrote it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.notice: Fact | None = None
        self._lock = threading.RLock()
        self._durable = False
        self._identity: tuple[int, int] | None = None
        self._open()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading; all reads inside see the same state.

        Raises:
            StoreError: if the file cannot be read.
        """
        with self._transaction("BEGIN", durable=None) as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Yield the connection for one atomic change.

        Args:
            durable: whether it also survives a power failure; it survives a killed process in any case.

        Raises:
            StoreError: if the file cannot be written; nothing has changed then.
        """
        with self._transaction("BEGIN IMMEDIATE", durable=durable) as connection:
            yield connection

    @contextlib.contextmanager
    def _transaction(self, begin: str, *, durable: bool | None) -> Iterator[sqlite3.Connection]:
        with self._lock, _explained(self.path):
            if self._replaced():
                self._connection.close()
                self._open()
            connection = self._connection
            if durable is not None and durable != self._durable:
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # If the disk is full, SQLite has rolled back already.
                if connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                raise

    def _open(self) -> None:
        if self.path is None:
            self._connection = _connect(":memory:")
            _migrate(self._connection, None)
            return
        with _explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One process at a time, because it may set a damaged file aside.
            with held(self.path.with_suffix(".opening"), seconds=_OPENING_SECONDS):
                connection = self._sound()
                try:
                    _migrate(connection, self.path)
                    connection.execute("PRAGMA synchronous = FULL")
                    # Detect a read-only file now and not while a job runs.
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute("ROLLBACK")
                except BaseException:
                    connection.close()
                    raise
        self._connection, self._durable, self._identity = connection, True, self._on_disk()

    def _sound(self) -> sqlite3.Connection:
        """Return a connection to the file, after setting a damaged one aside."""
        assert self.path is not None
        connection: sqlite3.Connection | None = None
        try:
            connection = _connect(str(self.path))
            connection.execute("PRAGMA journal_mode = WAL")
            (check,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            damage = None if check == "ok" else str(check)
        except sqlite3.DatabaseError as error:
            damage = str(error)
            if not _is_damage(damage):
                if connection is not None:
                    connection.close()
                raise
        if damage is None:
            assert connection is not None
            return connection
        if connection is not None:
            connection.close()
        logger.error("%s is damaged: %s", self.path.name, damage)
        self.notice = _set_aside(self.path)
        connection = _connect(str(self.path))
        connection.execute("PRAGMA journal_mode = WAL")
        return connection

    def _on_disk(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat() if self.path is not None else None
        except FileNotFoundError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)

    def _replaced(self) -> bool:
        """Whether the open file was replaced by another one, or deleted."""
        return self.path is not None and self._on_disk() != self._identity


def _connect(name: str) -> sqlite3.Connection:
    # `Database` has a lock, so one thread at a time uses it.
    connection = sqlite3.connect(name, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _migrate(connection: sqlite3.Connection, path: Path | None) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError("queue.store_too_new", file=path, version=version, supported=len(MIGRATIONS))
    for number, migrate in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            migrate(connection)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _set_aside(path: Path) -> Fact:
    """Rename a damaged file and its journals, so that a new one takes its place; return what to tell the user."""
    number = 1
    while (backup := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    # The journals first: SQLite would apply them to the new file.
    for suffix in ("-shm", "-wal", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).replace(backup.with_name(backup.name + suffix))
    return Fact("queue.store_damaged", {"backup": backup})


def _is_damage(message: str) -> bool:
    return "malformed" in message or "not a database" in message or "encrypted" in message


def _is_full(folder: Path) -> bool:
    """Whether the disk is full: SQLite reports a full disk for its journals as an I/O error."""
    try:
        return shutil.disk_usage(folder).free < _SMALL_FILES
    except OSError:
        return False


@contextlib.contextmanager
def _explained(path: Path | None) -> Iterator[None]:
    """Raise `StoreError` for what SQLite and the operating system raise."""
    try:
        yield
    except sqlite3.Error as error:
        raise _store_error(path, str(error)) from error
    except TimeoutError as error:
        raise _store_error(path, "locked") from error
    except OSError as error:
        raise _store_error(path, error.strerror or str(error)) from error


def _store_error(path: Path | None, reason: str) -> StoreError:
    file, lowered = path or "jobs.sqlite", reason.lower()
    if "full" in lowered or "no space" in lowered or ("i/o error" in lowered and path and _is_full(path.parent)):
        return StoreError("queue.store_disk_full", file=file)
    if "readonly" in lowered or "read-only" in lowered or "permission" in lowered:
        return StoreError("queue.store_read_only", file=file)
    if "locked" in lowered:
        return StoreError("queue.store_locked", file=file)
    if _is_damage(lowered):
        return StoreError("queue.store_file_damaged", file=file)
    return StoreError("queue.store_unusable", file=file, reason=reason)
