"""The SQLite file of the job store: transactions, errors, schema and migrations.

The file survives killed processes and concurrent writers: write-ahead logging, one short transaction per change. Reads
have connections of their own, so that they never wait for a writer, of this process or another one.
SQLite's errors become `StoreError`s with a remedy. A damaged file is renamed to a backup and a new one is started.
SQLite's `user_version` holds the schema version of a file.
"""

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.core.errors import StoreError
from runtime.core.facts import Fact
from runtime.core.locks import held

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
            stat = self.path.stat() if self.path is not None else None
        except FileNotFoundError:
            return None
        return None if stat is None else (stat.st_dev, stat.st_ino)

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
    tables = {row["name"] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == 0:
        return "it holds other tables" if tables else None
    return None if version > 0 and {"jobs", "events"} <= tables else "its tables are missing"


def _read_text(data: bytes) -> str | bytes:
    """Return text of a column; the bytes if they are not UTF-8, for which `sqlite3` would fail the whole query."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _migrate(connection: sqlite3.Connection, path: Path | None) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    newest = OLDEST + len(MIGRATIONS) - 1
    if version > newest:
        raise StoreError("queue.store_too_new", file=path, version=version, supported=newest)
    if 0 < version < OLDEST:
        raise StoreError("queue.store_too_old", file=path, version=version, supported=OLDEST)
    done = version - OLDEST + 1 if version else 0
    for number, migrate in enumerate(MIGRATIONS[done:], start=OLDEST + done):
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

_SCHEMA = (
    """
    CREATE TABLE jobs (
        number           INTEGER PRIMARY KEY AUTOINCREMENT,
        id               TEXT NOT NULL UNIQUE,
        kind             TEXT NOT NULL CHECK (kind IN ('video', 'build', 'task')),
        title            TEXT NOT NULL DEFAULT '',
        part             TEXT,
        state            TEXT NOT NULL
                         CHECK (state IN ('queued', 'running', 'done', 'failed', 'cancelled', 'interrupted')),
        position         INTEGER NOT NULL,
        held             INTEGER NOT NULL DEFAULT 0,
        pending_control  TEXT NOT NULL DEFAULT '' CHECK (pending_control IN ('', 'cancel', 'pause')),
        finish           INTEGER NOT NULL DEFAULT 0,  -- whether a video made in sections ends after the current one
        prompt           TEXT NOT NULL DEFAULT '',
        request          TEXT NOT NULL,
        plan             TEXT,
        begun            INTEGER NOT NULL DEFAULT 0,
        output           TEXT NOT NULL,
        owner            TEXT,
        batch            TEXT,
        instance         TEXT,
        lease            INTEGER NOT NULL DEFAULT 0,  -- how many times it was started, see `JobRecord.lease`
        created          REAL NOT NULL,
        started          REAL,
        ended            REAL,
        deleted          REAL,
        result           TEXT,
        failure          TEXT,
        live             TEXT,  -- progress that is not stored as events
        starred          INTEGER NOT NULL DEFAULT 0,
        unreadable       TEXT,  -- columns that cannot be read; queries for several jobs leave the row out
        idle             INTEGER NOT NULL DEFAULT 0,  -- a build that runs only while no video waits
        engines          TEXT NOT NULL DEFAULT '',  -- ids of what an idle build makes
        gpu              INTEGER,  -- the index of the GPU that an idle build is for
        needs            TEXT,  -- what a scheduler reads of a queued video
        lane             TEXT,  -- the same for videos of one owner that need the same model and number of GPUs
        seconds          REAL  -- the forecast
    )
    """,
    """
    CREATE TABLE events (
        n      INTEGER PRIMARY KEY AUTOINCREMENT,
        job    TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        at     REAL NOT NULL,
        event  TEXT NOT NULL
    )
    """,
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
    """,
    # The idempotency keys of requests to the HTTP API, each with its video.
    """
    CREATE TABLE submissions (
        owner   TEXT NOT NULL,
        key     TEXT NOT NULL,
        digest  TEXT NOT NULL,
        job     TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        PRIMARY KEY (owner, key)
    )
    """,
    "CREATE INDEX events_by_job ON events (job, n)",
    "CREATE INDEX submissions_by_job ON submissions (job)",
    "CREATE INDEX jobs_by_state ON jobs (state, position)",
    "CREATE INDEX jobs_by_position ON jobs (position)",
    "CREATE INDEX jobs_by_owner ON jobs (owner)",
    "CREATE INDEX jobs_by_owner_and_state ON jobs (owner, state, kind)",
    "CREATE INDEX jobs_by_owner_and_time ON jobs (owner, created, kind)",
    "CREATE INDEX jobs_by_end ON jobs (ended, owner, kind) WHERE ended IS NOT NULL",
    "CREATE INDEX jobs_unreadable ON jobs (number) WHERE unreadable IS NOT NULL",
    # What a scheduler and lists of thousands of queued videos read, from an index alone.
    "CREATE INDEX jobs_waiting ON jobs (lane, position, state, held, kind, unreadable) "
    "WHERE state = 'queued' AND NOT held AND kind = 'video' AND unreadable IS NULL",
    "CREATE INDEX jobs_in_queue ON jobs (state, idle, position, held, kind, owner, id, seconds, unreadable) "
    "WHERE state IN ('running', 'queued') AND unreadable IS NULL",
)


def _create(connection: sqlite3.Connection) -> None:
    for statement in _SCHEMA:
        connection.execute(statement)


def _rank_builds(connection: sqlite3.Connection) -> None:
    """Order builds that were asked for after all videos, and before idle ones; see `JobRecord.rank`."""
    connection.execute("ALTER TABLE jobs RENAME COLUMN idle TO rank")
    connection.execute("UPDATE jobs SET rank = CASE WHEN rank THEN 2 ELSE 1 END WHERE kind = 'build'")


def _index_batches(connection: sqlite3.Connection) -> None:
    """Index the groups of videos, with what lists select by: other columns are behind the plan, which is long."""
    columns = "batch, prompt, number, kind, state, owner, deleted, starred, unreadable, id"
    connection.execute(f"CREATE INDEX jobs_by_batch ON jobs ({columns}) WHERE batch IS NOT NULL")


# Migration n upgrades a file to version OLDEST + n; the first one makes a new file. Older files are refused.
OLDEST = 14
MIGRATIONS: tuple[Migration, ...] = (_create, _rank_builds, _index_batches)
