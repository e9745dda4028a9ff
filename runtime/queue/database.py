"""The file behind the job store: SQLite, opened so that neither a killed process nor a second one can harm it.

Write-ahead logging, one short transaction per change. What SQLite raises becomes a `StoreError` that says what to do. A
damaged file is set aside, and what can still be read of it is carried over. Knows nothing about what jobs are.
"""

import contextlib
import json
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.core.errors import StoreError
from runtime.core.locks import held

# Each brings the file from the version of its place to the next; the file says in user_version where it is.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE jobs (
        number    INTEGER PRIMARY KEY AUTOINCREMENT,
        id        TEXT NOT NULL UNIQUE,
        kind      TEXT NOT NULL CHECK (kind IN ('video', 'build', 'task')),
        title     TEXT NOT NULL DEFAULT '',
        part      TEXT,
        state     TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'failed', 'cancelled', 'interrupted')),
        position  INTEGER NOT NULL,
        held      INTEGER NOT NULL DEFAULT 0,
        asked     TEXT NOT NULL DEFAULT '' CHECK (asked IN ('', 'cancel', 'pause')),
        prompt    TEXT NOT NULL DEFAULT '',
        request   TEXT NOT NULL,
        plan      TEXT,
        begun     INTEGER NOT NULL DEFAULT 0,
        output    TEXT NOT NULL,
        owner     TEXT,
        batch     TEXT,
        parent    TEXT,
        instance  TEXT,
        created   REAL NOT NULL,
        started   REAL,
        ended     REAL,
        deleted   REAL,
        result    TEXT,
        failure   TEXT
    );
    CREATE INDEX jobs_by_state ON jobs (state, position);
    CREATE TABLE events (
        n      INTEGER PRIMARY KEY AUTOINCREMENT,
        job    TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        at     REAL NOT NULL,
        event  TEXT NOT NULL
    );
    CREATE INDEX events_by_job ON events (job, n);
    """,
)

_BUSY_SECONDS = 10.0
_OPENING_SECONDS = 20.0
# A header that says more than this is missing is itself damaged.
_MOST_CUT_OFF = 1 << 30
_SMALL_FILES = 1 << 16

logger = logging.getLogger(__name__)


class Database:
    """One file of jobs, or none: then all is kept in memory and gone with the process. Safe between threads.

    Args:
        path: of the file; it is made if it is not there.

    Attributes:
        notice: what was found wrong with the file and mended, as a sentence to be told once.

    Raises:
        StoreError: if it cannot be opened or written, or a newer Tandem made it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.notice = ""
        self._lock = threading.RLock()
        self._durable = False
        self._identity: tuple[int, int] | None = None
        self._open()

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection for reading; what is read in one `with` is of one moment.

        Raises:
            StoreError: if the file cannot be read.
        """
        with self._transaction("BEGIN", durable=None) as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Lend the connection for one change, which happens as a whole or not at all.

        Args:
            durable: whether it outlasts a power cut too; without, it outlasts whatever happens to this process.

        Raises:
            StoreError: if the file cannot be written; nothing has changed then.
        """
        with self._transaction("BEGIN IMMEDIATE", durable=durable) as connection:
            yield connection

    @contextlib.contextmanager
    def _transaction(self, begin: str, *, durable: bool | None) -> Iterator[sqlite3.Connection]:
        with self._lock, _told(self.path):
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
                # Where the disk is full, SQLite has taken all back already.
                if connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                raise

    def _open(self) -> None:
        if self.path is None:
            self._connection = _connect(":memory:")
            _migrate(self._connection, None)
            return
        with _told(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One after the other: whoever finds damage must be alone while mending it.
            with held(self.path.with_suffix(".opening"), seconds=_OPENING_SECONDS):
                connection = self._sound()
                try:
                    _migrate(connection, self.path)
                    connection.execute("PRAGMA synchronous = FULL")
                    # A file that can be read only is of no use: found out now, not in the middle of a job.
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute("ROLLBACK")
                except BaseException:
                    connection.close()
                    raise
        self._connection, self._durable, self._identity = connection, True, self._on_disk()

    def _sound(self) -> sqlite3.Connection:
        """Return a connection to the file, mended first if it is damaged."""
        assert self.path is not None
        connection: sqlite3.Connection | None = None
        try:
            connection = _connect(str(self.path))
            connection.execute("PRAGMA journal_mode = WAL")
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            damage = None if said == "ok" else str(said)
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
        self.notice = _mend(self.path)
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
        """Whether another file took the place of the one that is open: it was mended, or deleted."""
        return self.path is not None and self._on_disk() != self._identity


def _connect(name: str) -> sqlite3.Connection:
    # The lock of `Database` sees to it that one thread at a time uses it.
    connection = sqlite3.connect(name, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _migrate(connection: sqlite3.Connection, path: Path | None) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{path} was written by a newer Tandem (its version {version}; this one knows {len(MIGRATIONS)}).",
            "Update Tandem, or set TANDEM_CACHE_DIR to another folder.",
        )
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in filter(None, map(str.strip, script.split(";"))):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _mend(path: Path) -> str:
    """Set a damaged file aside, put a sound one in its place with what can be read of it, and say so."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    mended = path.with_name(f"{path.name}.mended")
    beside = ("", "-wal", "-shm")
    for ending in beside:
        mended.with_name(mended.name + ending).unlink(missing_ok=True)
        # Copied: whatever happens from here on, all that there was is kept.
        if path.with_name(path.name + ending).exists():
            shutil.copyfile(path.with_name(path.name + ending), aside.with_name(aside.name + ending))
    with contextlib.closing(_connect(str(mended))) as target:
        _migrate(target, mended)
        _lengthen(path)
        carried = _carry_over(path, target)
    # The old file's journals would be taken for the new one's.
    for ending in beside[1:]:
        path.with_name(path.name + ending).unlink(missing_ok=True)
    mended.replace(path)
    jobs = f"{carried} job{'' if carried == 1 else 's'}"
    return f"The list of jobs was damaged: {jobs} could be read and are kept, the damaged file is {aside}."


def _carry_over(source: Path, target: sqlite3.Connection) -> int:
    """Copy what can be read, from both ends of each table; return how many jobs that were."""
    target.execute("PRAGMA foreign_keys = OFF")
    target.execute("BEGIN")
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(source)) as old:
        for table in ("jobs", "events"):
            known = [row[1] for row in target.execute(f"PRAGMA table_info({table})")]
            with contextlib.suppress(sqlite3.DatabaseError):
                names = [row[1] for row in old.execute(f"PRAGMA table_info({table})") if row[1] in known]
                for way in ("ASC", "DESC"):
                    _copy_rows(old, target, table, names, way)
    target.execute("DELETE FROM events WHERE job NOT IN (SELECT id FROM jobs)")
    target.execute("COMMIT")
    (count,) = target.execute("SELECT count(*) FROM jobs").fetchone()
    return int(count)


def _lengthen(path: Path) -> None:
    """Fill up a file that was cut short, which SQLite would not read at all; see sqlite.org/fileformat.html#1.3."""
    with path.open("r+b") as file:
        header = file.read(100)
        size = int.from_bytes(header[16:18], "big") * int.from_bytes(header[28:32], "big")
        if header.startswith(b"SQLite format 3\0") and 0 < size - path.stat().st_size < _MOST_CUT_OFF:
            file.truncate(size)


def _copy_rows(old: sqlite3.Connection, target: sqlite3.Connection, table: str, names: list[str], way: str) -> None:
    columns, places = ", ".join(names), ", ".join("?" * len(names))
    with contextlib.suppress(sqlite3.DatabaseError):  # here the damage begins
        for row in old.execute(f"SELECT {columns} FROM {table} ORDER BY rowid {way}"):
            if _is_whole(dict(zip(names, row, strict=True))):
                # What the target's rules refuse is not whole.
                target.execute(f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({places})", row)


def _is_whole(row: dict[str, Any]) -> bool:
    try:
        for name in ("request", "result", "failure", "event"):
            if row.get(name) is not None and not isinstance(json.loads(row[name]), dict):
                return False
    except (ValueError, TypeError):
        return False
    return True


def _is_damage(message: str) -> bool:
    return "malformed" in message or "not a database" in message or "encrypted" in message


def _is_full(folder: Path) -> bool:
    """Whether SQLite's own files beside the database have no room: it calls that an I/O error."""
    try:
        return shutil.disk_usage(folder).free < _SMALL_FILES
    except OSError:
        return False


@contextlib.contextmanager
def _told(path: Path | None) -> Iterator[None]:
    """Turn what SQLite and the system raise into what a person can mend."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explained(path, str(error)) from error
    except TimeoutError as error:
        raise _explained(path, "locked") from error
    except OSError as error:
        raise _explained(path, error.strerror or str(error)) from error


def _explained(path: Path | None, said: str) -> StoreError:
    where, lowered = path or "The list of jobs", said.lower()
    if "full" in lowered or "no space" in lowered or ("i/o error" in lowered and path and _is_full(path.parent)):
        return StoreError(f"The disk is full: {where} cannot be written.", "Free some space.")
    if "readonly" in lowered or "read-only" in lowered or "permission" in lowered:
        return StoreError(
            f"{where} cannot be written: it or its folder is read-only.",
            "Make the folder writable, or set TANDEM_CACHE_DIR to one that is.",
        )
    if "locked" in lowered:
        return StoreError(f"{where} is kept locked by another program.", "End that program, and try again.")
    if _is_damage(lowered):
        return StoreError(f"{where} is damaged.", "Start Tandem again: it sets the file aside and keeps what it can.")
    return StoreError(
        f"{where} cannot be used: {said}.", "Check the folder and its disk, or set TANDEM_CACHE_DIR to another folder."
    )
