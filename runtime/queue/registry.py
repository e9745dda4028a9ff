"""The worker processes of a job store: the GPU memory each holds, and which GPUs are lent to a job that uses several.

A worker is named `<app>.<gpu>`, where the app is the web process that supervises it. Each worker owns one GPU. A worker
whose job uses N GPUs waits until N-1 idle workers of the same app have freed their memory and lent their GPU. It keeps
the lent GPUs while its own processes for several GPUs stay loaded, and returns them when another worker waits or when
its next job uses fewer.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.queue.store import JobStore


@dataclass(frozen=True)
class WorkerEntry:
    """One worker process.

    Attributes:
        instance: its name, `<app>.<gpu>`.
        gpu: index of the GPU that it owns; 0 on a machine without GPUs.
        pid: its process id.
        held: bytes that its processes hold, by GPU index.
        wanted: GPUs that its job uses, if more than one; it still waits for some where it has fewer.
        since: when it began to wait, in seconds since 1970.
        lent_to: the worker that uses its GPU.
    """

    instance: str
    gpu: int
    pid: int
    held: Mapping[int, int]
    wanted: int
    since: float
    lent_to: str | None


def app_of(instance: str) -> str:
    """Return the name of the app that a worker belongs to."""
    return instance.partition(".")[0]


class WorkerRegistry:
    """The `workers` table of a job store. Safe between threads and processes; methods raise `StoreError`."""

    def __init__(self, store: JobStore) -> None:
        self._database = store.database

    def register(self, instance: str, gpu: int) -> None:
        """Add this process; one that takes the place of a dead one keeps its GPU lent."""
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO workers (instance, app, gpu, pid) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (instance) DO UPDATE SET pid = excluded.pid, held = '{}'",
                (instance, app_of(instance), gpu, os.getpid()),
            )

    def remove_app(self, app: str) -> None:
        """Remove the workers of an app that ended."""
        with self._database.writing() as connection:
            connection.execute("DELETE FROM workers WHERE app = ?", (app,))

    def apps(self) -> set[str]:
        """Return the apps that have workers, dead ones included."""
        with self._database.reading() as connection:
            return {row["app"] for row in connection.execute("SELECT DISTINCT app FROM workers")}

    def report(self, instance: str, held: Mapping[int, int]) -> None:
        """Note how many bytes a worker holds of each GPU."""
        with self._database.writing(durable=False) as connection:
            connection.execute("UPDATE workers SET held = ? WHERE instance = ?", (json.dumps(held), instance))

    def workers(self, app: str) -> list[WorkerEntry]:
        """Return the workers of an app, by GPU."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT * FROM workers WHERE app = ? ORDER BY gpu", (app,)).fetchall()
        return [
            WorkerEntry(
                instance=row["instance"],
                gpu=row["gpu"],
                pid=row["pid"],
                held={int(gpu): size for gpu, size in json.loads(row["held"]).items()},
                wanted=row["wanted"],
                since=row["since"],
                lent_to=row["lent_to"],
            )
            for row in rows
        ]

    def gpus(self, instance: str) -> list[int]:
        """Return the GPUs that a worker may use, its own first; none while its own is lent."""
        return _gpus(self.workers(app_of(instance)), instance)

    def waits_for(self, instance: str) -> str | None:
        """Return the worker that waits for the GPUs of this one, which is idle or waits for GPUs itself."""
        waiting = _first_waiting(self.workers(app_of(instance)))
        return None if waiting is None or waiting.instance == instance else waiting.instance

    def lend(self, instance: str, to: str, *, waits: bool = False) -> None:
        """Lend a worker's GPU, and return what was lent to it. It must hold no memory on any of them any more.

        Args:
            waits: whether it waits for GPUs itself, and goes on waiting.
        """
        self.release(instance, keep_waiting=waits)
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE workers SET lent_to = ? WHERE instance = ? AND lent_to IS NULL "
                "AND EXISTS (SELECT 1 FROM workers WHERE instance = ? AND wanted > 0)",
                (to, instance, to),
            )

    def want(self, instance: str, count: int) -> None:
        """Ask for GPUs: idle workers lend theirs until this one has `count`."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE workers SET wanted = ?, since = ? WHERE instance = ?", (count, time.time(), instance)
            )

    def release(self, instance: str, *, keep_waiting: bool = False) -> None:
        """Return all GPUs that were lent to a worker.

        Args:
            keep_waiting: it waits for GPUs itself and goes on waiting.
        """
        with self._database.writing() as connection:
            connection.execute("UPDATE workers SET lent_to = NULL WHERE lent_to = ?", (instance,))
            if not keep_waiting:
                connection.execute("UPDATE workers SET wanted = 0, since = 0 WHERE instance = ?", (instance,))

    def return_spare(self, instance: str, count: int) -> list[int]:
        """Return all but `count` GPUs of a worker to their owners, and which it still has."""
        gpus = self.gpus(instance)
        with self._database.writing() as connection:
            for gpu in gpus[count:]:
                connection.execute("UPDATE workers SET lent_to = NULL WHERE lent_to = ? AND gpu = ?", (instance, gpu))
        return gpus[:count]


def _gpus(workers: list[WorkerEntry], instance: str) -> list[int]:
    own = [one.gpu for one in workers if one.instance == instance and one.lent_to is None]
    return own + [one.gpu for one in workers if one.lent_to == instance] if own else []


def _first_waiting(workers: list[WorkerEntry]) -> WorkerEntry | None:
    """Return the worker that has waited longest for GPUs: one at a time gathers them, so that two never wait mutually.

    Workers that lent theirs to it while they wait too come after it.
    """
    waiting = [one for one in workers if one.wanted > len(_gpus(workers, one.instance))]
    return min(waiting, key=lambda one: (one.since, one.gpu), default=None)
