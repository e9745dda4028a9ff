"""The processes that share a job store: one lock file for each app, one row for each of its worker processes.

An app is a process that runs jobs: the web app with its workers, or a command. The lock that it holds while it runs
shows the others that it is alive. A worker is named `<app>.<gpu>` and owns one GPU. The worker of a job on N GPUs waits
until N-1 idle workers of the same app have freed their memory and lent their GPU. It keeps the lent GPUs while its own
processes for several GPUs stay loaded, and returns them when another worker waits or its next job uses fewer.
"""

import contextlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import ConfigDict, Json, ValidationError

from runtime.core.errors import StoreError
from runtime.core.frozen import FrozenModel
from runtime.core.locks import held, is_held
from runtime.queue.database import Database


class Instance:
    """This process among those that run jobs; it counts as alive while the context manager is entered.

    Args:
        store_path: of the job store; `None` for one in memory, which has no other processes.

    Attributes:
        id: of this process, 8 hexadecimal digits.
    """

    def __init__(self, store_path: Path | None) -> None:
        self.id = secrets.token_hex(4)
        self._lock_file = None if store_path is None else lock_file(store_path, self.id)
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> "Instance":
        """Acquire the lock.

        Raises:
            StoreError: if the lock's file cannot be created.
        """
        if self._lock_file is not None:
            try:
                self._lock_file.parent.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(held(self._lock_file, seconds=0))
            except OSError as error:
                folder = self._lock_file.parent
                raise StoreError("queue.locks_not_writable", folder=folder, error=error.strerror or error) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock; the operating system does it for a process that dies."""
        self._lock.close()


def is_alive(store_path: Path, instance: str) -> bool:
    """Return whether a process runs; a worker counts as running while its app does, which restarts it."""
    return is_held(lock_file(store_path, app_of(instance)))


def lock_file(store_path: Path, app: str) -> Path:
    """Return the path of an app's lock."""
    return store_path.parent / "jobs" / "instances" / f"{app}.lock"


def app_of(instance: str) -> str:
    """Return the name of the app that a worker belongs to."""
    return instance.partition(".")[0]


class WorkerEntry(FrozenModel):
    """One worker process: a row of the table `workers`.

    Attributes:
        instance: its name, `<app>.<gpu>`.
        gpu: index of the GPU that it owns; 0 on a machine without GPUs.
        pid: its process id.
        held: bytes that its processes hold, by GPU index.
        wanted: how many GPUs its job uses, 0 if one; the worker waits while it has fewer.
        since: when it began to wait, in seconds since 1970.
        lent_to: the worker that uses its GPU.
    """

    model_config = ConfigDict(extra="ignore")

    instance: str
    gpu: int
    pid: int
    held: Json[dict[int, int]]
    wanted: int
    since: float
    lent_to: str | None


class WorkerRegistry:
    """The `workers` table of a job store. Safe between threads and processes; methods raise `StoreError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(self, instance: str, gpu: int) -> None:
        """Add this process as a worker; the GPU that a dead predecessor lent stays lent."""
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO workers (instance, app, gpu, pid) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (instance) DO UPDATE SET pid = excluded.pid, held = '{}'",
                (instance, app_of(instance), gpu, os.getpid()),
            )

    def has(self, instance: str) -> bool:
        """Return whether a worker was added."""
        with self._database.reading() as connection:
            return connection.execute("SELECT 1 FROM workers WHERE instance = ?", (instance,)).fetchone() is not None

    def remove_app(self, app: str) -> None:
        """Remove the workers of an app that ended."""
        with self._database.writing() as connection:
            connection.execute("DELETE FROM workers WHERE app = ?", (app,))

    def apps(self) -> set[str]:
        """Return the apps that have workers, dead ones included."""
        with self._database.reading() as connection:
            return {row["app"] for row in connection.execute("SELECT DISTINCT app FROM workers")}

    def report(self, instance: str, reserved_bytes: Mapping[int, int]) -> None:
        """Store how many bytes a worker holds on each GPU."""
        with self._database.writing(durable=False) as connection:
            connection.execute("UPDATE workers SET held = ? WHERE instance = ?", (json.dumps(reserved_bytes), instance))

    def workers(self, app: str) -> list[WorkerEntry]:
        """Return the workers of an app, by GPU; rows that cannot be read are left out."""
        with self._database.reading() as connection:
            return _workers(connection, app)

    def gpus(self, instance: str) -> list[int]:
        """Return the GPUs that a worker may use, its own first; none while its own is lent."""
        return _gpus(self.workers(app_of(instance)), instance)

    def waits_for(self, instance: str) -> str | None:
        """Return the worker that waits for the GPUs of this one, which is idle or waits for GPUs itself.

        It is the one that has waited longest: only one at a time gathers GPUs, so no two workers block each other.
        """
        first = _first_waiting(self.workers(app_of(instance)))
        return None if first == instance else first

    def lend(self, instance: str, to: str, *, waits: bool = False) -> None:
        """Lend a worker's GPU, and return the GPUs that were lent to it. It must have freed its memory on all of them.

        Nothing happens if the other worker no longer is the first that waits: a GPU lent to a later one could not be
        returned while that one has lent its own.

        Args:
            waits: whether it waits for GPUs itself and continues to wait.
        """
        with self._database.writing() as connection:
            if _first_waiting(_workers(connection, app_of(instance))) != to:
                return
            _release(connection, instance, keep_waiting=waits)
            connection.execute("UPDATE workers SET lent_to = ? WHERE instance = ? AND lent_to IS NULL", (to, instance))

    def want(self, instance: str, count: int) -> None:
        """Ask for GPUs: idle workers lend theirs until this one has `count`, after those that wait already.

        This holds also if the clock was set back.
        """
        with self._database.writing() as connection:
            last = max((worker.since for worker in _workers(connection, app_of(instance))), default=0.0)
            since = max(time.time(), last + 0.001)
            connection.execute("UPDATE workers SET wanted = ?, since = ? WHERE instance = ?", (count, since, instance))

    def release(self, instance: str, *, keep_waiting: bool = False) -> None:
        """Return all GPUs that were lent to a worker.

        Args:
            keep_waiting: whether it waits for GPUs itself and continues to wait.
        """
        with self._database.writing() as connection:
            _release(connection, instance, keep_waiting=keep_waiting)

    def return_spare(self, instance: str, count: int) -> list[int]:
        """End the wait of a worker whose job begins, and return all but `count` GPUs to their owners.

        Returns:
            The GPUs that it still has, its own first.
        """
        with self._database.writing() as connection:
            gpus = _gpus(_workers(connection, app_of(instance)), instance)
            for gpu in gpus[count:]:
                connection.execute("UPDATE workers SET lent_to = NULL WHERE lent_to = ? AND gpu = ?", (instance, gpu))
            _end_wait(connection, instance)
        return gpus[:count]


def _workers(connection: sqlite3.Connection, app: str) -> list[WorkerEntry]:
    workers = []
    for row in connection.execute("SELECT * FROM workers WHERE app = ? ORDER BY gpu", (app,)).fetchall():
        with contextlib.suppress(ValidationError):
            workers.append(WorkerEntry.model_validate(dict(row)))
    return workers


def _first_waiting(workers: list[WorkerEntry]) -> str | None:
    waiting = [worker for worker in workers if worker.wanted > len(_gpus(workers, worker.instance))]
    first = min(waiting, key=lambda worker: (worker.since, worker.gpu), default=None)
    return None if first is None else first.instance


def _release(connection: sqlite3.Connection, instance: str, *, keep_waiting: bool) -> None:
    connection.execute("UPDATE workers SET lent_to = NULL WHERE lent_to = ?", (instance,))
    if not keep_waiting:
        _end_wait(connection, instance)


def _end_wait(connection: sqlite3.Connection, instance: str) -> None:
    connection.execute("UPDATE workers SET wanted = 0, since = 0 WHERE instance = ?", (instance,))


def _gpus(workers: list[WorkerEntry], instance: str) -> list[int]:
    own_gpus = [worker.gpu for worker in workers if worker.instance == instance and worker.lent_to is None]
    return own_gpus + [worker.gpu for worker in workers if worker.lent_to == instance] if own_gpus else []
