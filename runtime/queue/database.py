"""The SQLite file of the job store: transactions, errors, schema and migrations.

The file survives killed processes and concurrent writers: write-ahead logging, one short transaction per change. Reads
have connections of their own, so that they never wait for a writer, of this process or another one.
SQLite's errors become `StoreError`s with a remedy. A damaged file is renamed to a backup and a new one is started.
SQLite's `user_version` holds the schema version of a file.
"""

import contextlib
import json
import logging
import os
import shlex
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runtime.core.errors import StoreError
from runtime.core.events import Failed, FellBack, OutOfMemory, Warned
from runtime.core.facts import Fact
from runtime.core.locks import held
from runtime.core.plan import ExecutionPlan
from runtime.queue.records import needs_columns

_BUSY_SECONDS = 10.0
_OPENING_SECONDS = 20.0
# What a connection keeps in memory: prepared statements, and kibibytes of the file, which the system keeps as well.
_STATEMENTS = 32
_CACHE_KIB = 512
_SMALL_FILES = 1 << 16
# Connections for reading that are kept open; threads that read at once may use more.
_MOST_READERS = 4
# No file has this device and number.
_CLOSED = (-1, -1)

logger = logging.getLogger(__name__)


class Database:
    """An SQLite file, or an in-memory database that is lost with the process. Safe between threads.

    Args:
        path: of the file, which is made if it is missing; `None` for a database in memory.

    Attributes:
        notice: damage that was found when the file was opened; `None` if there was none.

    Raises:
        StoreError: if it cannot be opened or written, or a newer Tandem wrote it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.notice: Fact | None = None
        self._lock = threading.RLock()
        self._durable = False
        self._identity: tuple[int, int] | None = None
        self._missing = False
        self._closed = False
        self._readers: list[sqlite3.Connection] = []
        self._watching: sqlite3.Connection | None = None
        # Grows when another file takes the place of the first, and its connections are of no use any more.
        self._generation = 0
        self._open()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()
            self._close_readers()
            self._closed = True

    def version(self) -> object:
        """Return a value that changes with each write, of any process; for one thread. It takes microseconds.

        Raises:
            StoreError: if the file cannot be read.
        """
        if self.path is None:
            return self._connection.total_changes
        with _sqlite_errors(self.path):
            self._check_file()
            generation, connection = self._generation, self._watching
            if connection is None:
                connection = self._watching = _connect(str(self.path))
            return generation, *connection.execute("PRAGMA data_version").fetchone()

    def check_writable(self) -> None:
        """Check that the file exists, can be read, and can be written, without writing to it or waiting for a writer.

        Raises:
            StoreError: if it does not or cannot.
        """
        with self.reading():
            pass
        if self.path is None:
            return
        if _is_full(self.path.parent):
            raise StoreError("queue.store_disk_full", file=self.path)
        if not _is_writable(self.path):
            raise StoreError("queue.store_read_only", file=self.path)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading; all reads inside see the same state.

        Raises:
            StoreError: if the file cannot be read.
        """
        if self.path is None:
            with self._transaction("BEGIN", durable=None) as connection:
                yield connection
            return
        with _sqlite_errors(self.path):
            self._check_file()
            generation = self._generation
            try:
                connection = self._readers.pop()
            except IndexError:
                connection = _connect(str(self.path))
                connection.execute("PRAGMA query_only = ON")
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if generation == self._generation and len(self._readers) < _MOST_READERS:
                    self._readers.append(connection)
                else:
                    connection.close()

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
        with self._lock, _sqlite_errors(self.path):
            self._follow_file()
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
        with _sqlite_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One process at a time, because it may set a damaged file aside.
            with held(self.path.with_suffix(".opening"), seconds=_OPENING_SECONDS):
                connection = self._connect_checked()
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

    def _connect_checked(self) -> sqlite3.Connection:
        """Return a connection to the file, after setting a damaged one aside."""
        assert self.path is not None
        connection: sqlite3.Connection | None = None
        try:
            connection = _connect(str(self.path))
            connection.execute("PRAGMA journal_mode = WAL")
            (check,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            damage = _missing_tables(connection) if check == "ok" else str(check)
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

    def _check_file(self) -> None:
        """Follow the file before a read, without waiting for a writer if it is still the same."""
        if self._closed:
            raise sqlite3.ProgrammingError("closed")
        if self._on_disk() != self._identity:
            with self._lock:
                self._follow_file()

    def _close_readers(self) -> None:
        self._generation += 1
        readers, self._readers = self._readers, []
        for connection in (*readers, *filter(None, [self._watching])):
            connection.close()
        self._watching = None

    def _follow_file(self) -> None:
        """Open the file again if another one has taken its place.

        A deleted file is not made again: its jobs, which other processes may run, would be lost in silence.

        Raises:
            StoreError: if it was deleted, or the other one cannot be opened.
        """
        identity = self._on_disk()
        if self.path is None or identity == self._identity:
            self._missing = False
        elif identity is None:
            if not self._missing:
                logger.error("%s was deleted while Tandem runs", self.path.name)
            self._missing = True
            raise StoreError("queue.store_deleted", file=self.path)
        else:
            logger.warning("%s was replaced while Tandem runs", self.path.name)
            self._connection.close()
            self._close_readers()
            self._identity = _CLOSED  # if it cannot be opened now, the next transaction tries again
            self._open()
            self._missing = False


def _connect(name: str) -> sqlite3.Connection:
    # `Database` has a lock, so one thread at a time uses it.
    connection = sqlite3.connect(
        name, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=_STATEMENTS
    )
    connection.row_factory = sqlite3.Row
    connection.text_factory = _read_text
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    return connection


def _missing_tables(connection: sqlite3.Connection) -> str | None:
    """Return why a file of SQLite is no job store; `None` for a new one, and for any version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    found = {row["name"] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == 0:
        return "it holds other tables" if found else None
    return None if version > 0 and {"jobs", "events"} <= found else "its tables are missing"


def _read_text(data: bytes) -> str | bytes:
    """Return text of a column; the bytes if they are not UTF-8, for which `sqlite3` would fail the whole query."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


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
    """Rename a damaged file and its journals, so that a new one takes its place; return a notice for the user."""
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
    """Return whether the disk is full: SQLite reports a full disk for its journals as an I/O error."""
    try:
        return shutil.disk_usage(folder).free < _SMALL_FILES
    except OSError:
        return False


def _is_writable(path: Path) -> bool:
    """Return whether this user can change a file and create others beside it.

    A file is created: the permissions do not show that a file system became read-only after an error of its disk.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path.parent):
        return not path.exists() or os.access(path, os.R_OK | os.W_OK)
    return False


@contextlib.contextmanager
def _sqlite_errors(path: Path | None) -> Iterator[None]:
    """Raise errors of SQLite and the operating system as `StoreError`."""
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
    # SQLite does not say why it cannot open or write a file.
    unwritable = ("i/o error" in lowered or "unable to open" in lowered) and path and not _is_writable(path)
    if unwritable or any(word in lowered for word in ("readonly", "read-only", "permission")):
        return StoreError("queue.store_read_only", file=file)
    if "locked" in lowered:
        return StoreError("queue.store_locked", file=file)
    if _is_damage(lowered):
        return StoreError("queue.store_file_damaged", file=file)
    return StoreError("queue.store_unusable", file=file, reason=reason)


Migration = Callable[[sqlite3.Connection], None]

_VERSION_1 = (
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
    )
    """,
    "CREATE INDEX jobs_by_state ON jobs (state, position)",
    """
    CREATE TABLE events (
        n      INTEGER PRIMARY KEY AUTOINCREMENT,
        job    TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        at     REAL NOT NULL,
        event  TEXT NOT NULL
    )
    """,
    "CREATE INDEX events_by_job ON events (job, n)",
)


def _create(connection: sqlite3.Connection) -> None:
    for statement in _VERSION_1:
        connection.execute(statement)


def _sentences_to_facts(connection: sqlite3.Connection) -> None:
    """Version 2: events and failures hold facts; version 1 held sentences."""
    changed = connection.execute(
        "SELECT n, event FROM events "
        "WHERE CASE WHEN json_valid(event) THEN json_extract(event, '$.event') END "
        "IN ('Warned', 'FellBack', 'Failed', 'OutOfMemory')"
    ).fetchall()
    # What cannot be read stays as it is: the store sets it aside.
    for row in changed:
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            event = json.dumps(_migrate_event(json.loads(row["event"])))
            connection.execute("UPDATE events SET event = ? WHERE n = ?", (event, row["n"]))
    for row in connection.execute("SELECT number, failure FROM jobs WHERE failure IS NOT NULL").fetchall():
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            failure = json.dumps(_migrate_event({"event": "Failed", **json.loads(row["failure"])}))
            connection.execute("UPDATE jobs SET failure = ? WHERE number = ?", (failure, row["number"]))


def _migrate_event(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of version 1 as one of version 2."""

    def text(what: str, remedy: str = "") -> Fact:
        return Fact("text", {"what": what, "remedy": remedy})

    new: Warned | FellBack | Failed | OutOfMemory
    if old["event"] == "Warned":
        new = Warned(fact=text(old["message"]))
    elif old["event"] == "FellBack":
        new = FellBack(component=old["component"], backend=old["backend"], reason=text(old["reason"]))
    elif old["event"] == "Failed":
        new = Failed(fact=text(old["what"], old["remedy"]), internal=old["defect"])
    else:
        flags = shlex.split(old["flags"])
        new = OutOfMemory(
            stage=old["stage"],
            component=old["component"],
            memory=old["memory"],
            retried=old["taken"],
            strategy=text(old["instead"]) if old["instead"] else None,
            changes={name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)},
            slowdown=old["times_as_long"],
            lossless=old["lossless"],
            lost_seconds=old["lost_seconds"],
        )
    return new.model_dump(mode="json")


def _worker_processes(connection: sqlite3.Connection) -> None:
    """Version 3: worker processes, their lent GPUs, and progress that is not stored as events."""
    connection.execute("ALTER TABLE jobs ADD COLUMN live TEXT")
    connection.execute(
        """
        CREATE TABLE workers (
            instance  TEXT PRIMARY KEY,
            app       TEXT NOT NULL,
            gpu       INTEGER NOT NULL,
            pid       INTEGER NOT NULL,
            held      TEXT NOT NULL DEFAULT '{}',
            wanted    INTEGER NOT NULL DEFAULT 0,
            since     REAL NOT NULL DEFAULT 0,
            lent_to   TEXT
        )
        """
    )


def _idle_builds(connection: sqlite3.Connection) -> None:
    """Version 4: builds that run only while no video waits, with the ids of their engines."""
    connection.execute("ALTER TABLE jobs ADD COLUMN idle INTEGER NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE jobs ADD COLUMN engines TEXT NOT NULL DEFAULT ''")


def _unreadable_rows(connection: sqlite3.Connection) -> None:
    """Version 5: the columns of a row that cannot be read, which queries for several jobs leave out."""
    connection.execute("ALTER TABLE jobs ADD COLUMN unreadable TEXT")


def _stars(connection: sqlite3.Connection) -> None:
    """Version 6: starred jobs, and an index of the few rows that cannot be read."""
    connection.execute("ALTER TABLE jobs ADD COLUMN starred INTEGER NOT NULL DEFAULT 0")
    connection.execute("CREATE INDEX jobs_unreadable ON jobs (number) WHERE unreadable IS NOT NULL")


def _gpus_of_builds(connection: sqlite3.Connection) -> None:
    """Version 7: the index of the GPU that an idle build is for."""
    connection.execute("ALTER TABLE jobs ADD COLUMN gpu INTEGER")


def _early_ends(connection: sqlite3.Connection) -> None:
    """Version 8: videos made in sections that end after the current one."""
    connection.execute("ALTER TABLE jobs ADD COLUMN finish INTEGER NOT NULL DEFAULT 0")


def _idempotency_keys(connection: sqlite3.Connection) -> None:
    """Version 9: the idempotency keys of requests to the HTTP API, each with its video."""
    connection.execute(
        """
        CREATE TABLE submissions (
            owner   TEXT NOT NULL,
            key     TEXT NOT NULL,
            digest  TEXT NOT NULL,
            job     TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            PRIMARY KEY (owner, key)
        )
        """
    )
    connection.execute("CREATE INDEX submissions_by_job ON submissions (job)")


def _many_jobs(connection: sqlite3.Connection) -> None:
    """Version 10: what the API asks about a key's videos, and the last place in the queue, without reading all jobs."""
    connection.execute("CREATE INDEX jobs_by_owner ON jobs (owner)")
    connection.execute("CREATE INDEX jobs_by_owner_and_state ON jobs (owner, state, kind)")
    connection.execute("CREATE INDEX jobs_by_owner_and_time ON jobs (owner, created, kind)")
    connection.execute("CREATE INDEX jobs_by_position ON jobs (position)")


def _leases(connection: sqlite3.Connection) -> None:
    """Version 11: the number of times that a job was started, see `JobRecord.lease`."""
    connection.execute("ALTER TABLE jobs ADD COLUMN lease INTEGER NOT NULL DEFAULT 0")


def _needs_of_videos(connection: sqlite3.Connection) -> None:
    """Version 12: what a scheduler reads of queued videos, by lane, and the order of the queue, from indexes alone.

    A lane has the videos of one owner that need the same model and number of GPUs.
    """
    connection.execute("ALTER TABLE jobs ADD COLUMN needs TEXT")
    connection.execute("ALTER TABLE jobs ADD COLUMN lane TEXT")
    connection.execute(
        "CREATE INDEX jobs_waiting ON jobs (lane, position, state, held, kind, unreadable) "
        "WHERE state = 'queued' AND NOT held AND kind = 'video' AND unreadable IS NULL"
    )
    connection.execute(
        "CREATE INDEX jobs_in_queue ON jobs (state, idle, position, held, kind, id, unreadable) "
        "WHERE state IN ('running', 'queued') AND unreadable IS NULL"
    )
    rows = connection.execute("SELECT number, owner, plan FROM jobs WHERE kind = 'video' AND state = 'queued'")
    for row in rows.fetchall():
        with contextlib.suppress(ValueError, TypeError):  # what cannot be read is not started
            values = needs_columns(row["owner"], ExecutionPlan.model_validate_json(row["plan"]))
            query = "UPDATE jobs SET needs = :needs, lane = :lane WHERE number = :number"
            connection.execute(query, {**values, "number": row["number"]})


def _long_queues(connection: sqlite3.Connection) -> None:
    """Version 13: what lists show of thousands of queued videos, from an index alone, and ended videos by time."""
    connection.execute("ALTER TABLE jobs ADD COLUMN seconds REAL")
    connection.execute(
        "UPDATE jobs SET seconds = json_extract(needs, '$.seconds') "
        "WHERE kind = 'video' AND state IN ('running', 'queued') AND json_valid(needs)"
    )
    connection.execute("DROP INDEX jobs_in_queue")
    connection.execute(
        "CREATE INDEX jobs_in_queue ON jobs (state, idle, position, held, kind, owner, id, seconds, unreadable) "
        "WHERE state IN ('running', 'queued') AND unreadable IS NULL"
    )
    connection.execute("CREATE INDEX jobs_by_end ON jobs (ended, owner, kind) WHERE ended IS NOT NULL")


# Migration n upgrades a file from version n to n + 1.
MIGRATIONS: tuple[Migration, ...] = (
    _create,
    _sentences_to_facts,
    _worker_processes,
    _idle_builds,
    _unreadable_rows,
    _stars,
    _gpus_of_builds,
    _early_ends,
    _idempotency_keys,
    _many_jobs,
    _leases,
    _needs_of_videos,
    _long_queues,
)
