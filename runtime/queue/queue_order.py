"""The order of the queue: what runs and waits, in which places, and which process claims which job."""

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import EllipsisType
from typing import Any

from runtime.core.errors import StoreError
from runtime.queue.database import Database
from runtime.queue.instances import app_of
from runtime.queue.records import (
    ASKED_BUILD,
    IDLE_BUILD,
    KINDS,
    OPEN,
    VIDEOS,
    Ahead,
    Durations,
    JobRecord,
    Kind,
    Line,
    State,
    Waiting,
    read_needs,
)
from runtime.queue.rows import Rows, find_row, mark_unreadable, marks, read_all, read_job, update_row

_QUEUED: tuple[State, ...] = ("queued",)

# Queries for several jobs leave out rows that were set aside.
_IN_QUEUE = "FROM jobs WHERE state IN ('running', 'queued') AND unreadable IS NULL"
# Forces the covering index; its WHERE must equal the index's.
_INDEXED = "FROM jobs INDEXED BY jobs_in_queue WHERE state IN ('running', 'queued') AND unreadable IS NULL"
_OF_STATE = f"{_INDEXED} AND state = '{{}}'{{}} ORDER BY rank, position"
# What has a place in the order.
_PLACED = f"{_INDEXED} AND state = 'queued' AND rank = 0"
# What a scheduler may start; the index of these rows has the same words. SQLite would choose another one.
_WAITING = (
    "FROM jobs INDEXED BY jobs_waiting WHERE state = 'queued' AND NOT held AND kind = 'video' AND unreadable IS NULL"
)
# What a worker may claim. Workers are given as `:worker`, their app as `:app`.
_CLAIMABLE = (
    "SELECT * FROM jobs WHERE state = 'queued' AND NOT held AND unreadable IS NULL "
    "AND (instance IS NULL OR instance = :worker)"
)
_NEXT = f"{_CLAIMABLE} AND rank = 0 AND kind IN (SELECT value FROM json_each(:kinds)) ORDER BY position LIMIT 1"
# The CPU and the process of a command line count as the first GPU.
_OWN_GPU = "coalesce((SELECT gpu FROM workers WHERE instance = :worker), 0)"
# Idle builds of its own GPU; all others, also of GPUs without a worker, are for the worker that takes builds.
_NEXT_BUILD = (
    f"{_CLAIMABLE} AND rank IN (SELECT value FROM json_each(:ranks)) "
    f"AND (jobs.gpu = {_OWN_GPU} OR 'build' IN (SELECT value FROM json_each(:kinds)) "
    "AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.app = :app AND workers.gpu = jobs.gpu)) "
    "ORDER BY rank, position LIMIT 1"
)
# Videos of other processes on a worker's GPU. Those of a cluster's other machines have no row, but a worker's name.
_VIDEO_ON_GPU = (
    "SELECT 1 FROM jobs LEFT JOIN workers ON workers.instance = jobs.instance "
    "WHERE state = 'running' AND kind = 'video' AND unreadable IS NULL AND jobs.instance != :worker "
    f"AND coalesce(workers.gpu, CASE WHEN jobs.instance NOT LIKE '%.%' THEN 0 END) = {_OWN_GPU} LIMIT 1"
)
_VIDEO_DUE = f"SELECT 1 {_WAITING} AND EXISTS (SELECT 1 FROM workers WHERE workers.gpu = {_OWN_GPU}) LIMIT 1"
# Whether what runs does not make room for the queued job `:job`; see `QueueOrder.makes_room`.
_STAYS = "rank <= (SELECT max(rank, kind != 'video') FROM jobs WHERE id = :job)"
# SQLite stores any type in any column.
_SECONDS = "CASE WHEN typeof(seconds) = 'real' THEN seconds END AS seconds"
_MOST_POSITION = 1 << 53


class QueueOrder:
    """The running and queued jobs. Safe between threads and processes; methods raise `StoreError`."""

    def __init__(self, database: Database, rows: Rows) -> None:
        self.database = database
        self._rows = rows

    def jobs(
        self,
        *,
        states: Collection[State] = OPEN,
        kinds: Collection[Kind] = KINDS,
        owner: str | EllipsisType | None = ...,
        paused: bool = True,
        limit: int = -1,
    ) -> Sequence[JobRecord]:
        """Return running and then queued jobs in order: videos, builds and tasks.

        Args:
            states, kinds: only jobs in one of these states, and of these kinds.
            owner: only jobs of this owner; `...` for all owners.
            paused: whether queued jobs may be paused.
            limit: maximum number in each state; negative for all.
        """
        queries = _in_order("*", kinds, owner, states, "" if paused else " AND NOT held")
        statements = [(f"{query} LIMIT ?", (*values, limit)) for query, values in queries]
        return self._rows.records(*statements)

    def ids(
        self, *, kinds: Collection[Kind] = KINDS, owner: str | EllipsisType | None = ..., limit: int = -1
    ) -> dict[str, State]:
        """Return the states of the jobs of `jobs` by id, without reading the jobs."""
        with self.database.reading() as connection:
            return {
                row["id"]: row["state"]
                for query, values in _in_order("id, state", kinds, owner)
                for row in connection.execute(f"{query} LIMIT ?", (*values, limit))
            }

    def owners(self, beginning: str = "", states: Collection[State] = OPEN) -> dict[str, str]:
        """Return the owners of running and queued videos by id: those whose name starts with `beginning`."""
        query = (
            "SELECT id, owner FROM jobs INDEXED BY jobs_by_owner_and_state WHERE owner >= ? AND owner < ? "
            f"AND kind = 'video' AND state IN ({marks(states)}) AND unreadable IS NULL"
        )
        with self.database.reading() as connection:
            rows = connection.execute(query, (beginning, f"{beginning}\U0010ffff", *states))
            return {row["id"]: row["owner"] for row in rows}

    def line(self, owner: str | EllipsisType | None = ...) -> Line:
        """Return how much is in the queue, without reading the jobs."""
        query = (
            "SELECT count(*), total(kind = 'video'), total(state = 'queued' AND rank = 0), "
            f"total(state = 'queued' AND kind = 'video' AND NOT held) {_INDEXED}"
        )
        where, values = _owned(owner)
        with self.database.reading() as connection:
            return Line(*map(int, connection.execute(f"{query}{where}", values).fetchone()))

    def seconds(self, after: int, owner: str | EllipsisType | None = ...) -> Durations:
        """Return how long the queued videos and builds take that follow the first `after` queued jobs.

        Paused ones do not count.
        """
        ((query, values),) = _in_order("seconds, kind, held", KINDS, owner, _QUEUED)
        query = f"SELECT * FROM ({query} LIMIT -1 OFFSET ?) WHERE kind != 'task' AND NOT held"
        columns = "count(*), count(seconds), total(seconds * (kind = 'video')), total(seconds * (kind = 'build'))"
        with self.database.reading() as connection:
            return Durations(*connection.execute(f"SELECT {columns} FROM ({query})", (*values, after)).fetchone())

    def counts(self) -> dict[tuple[Kind, str], int]:
        """Return how many jobs of each kind are "running", "queued" and "paused", without reading them."""
        state = "CASE WHEN held AND state = 'queued' THEN 'paused' ELSE state END"
        query = f"SELECT kind, {state} AS shown, count(*) AS jobs {_IN_QUEUE} GROUP BY kind, shown"
        with self.database.reading() as connection:
            return {(row["kind"], row["shown"]): row["jobs"] for row in connection.execute(query)}

    def count_with_model(self, model: str) -> int:
        """Return how many running and queued jobs have requests for a model."""
        named = "CASE WHEN json_valid(request) THEN json_extract(request, '$.model') END = ?"
        with self.database.reading() as connection:
            (count,) = connection.execute(f"SELECT count(*) {_IN_QUEUE} AND {named}", (model,)).fetchone()
            return int(count)

    def waiting(self, most: int) -> Sequence[Waiting]:
        """Return the first queued videos of each lane that are not paused, in order.

        A lane has the videos of one owner that need the same model and number of GPUs.

        Args:
            most: of each lane.
        """
        jobs: list[tuple[int, str, Waiting]] = []
        lane = ""
        with self.database.reading() as connection:
            following = f"SELECT lane {_WAITING} AND lane > ? ORDER BY lane LIMIT 1"
            while row := connection.execute(following, (lane,)).fetchone():
                lane = row["lane"]
                query = f"SELECT id, owner, created, position, needs {_WAITING} AND lane = ? ORDER BY position LIMIT ?"
                for entry in connection.execute(query, (lane, most)):
                    with suppress(ValueError, TypeError):  # SQLite stores any type in any column
                        job = Waiting(entry["id"], entry["owner"], float(entry["created"]), read_needs(entry["needs"]))
                        jobs.append((int(entry["position"]), job.id, job))
        return [job for _, _, job in sorted(jobs)]

    def ahead(self, job_id: str) -> Mapping[str, Ahead]:
        """Return what runs before a queued job, by id in order, without paused jobs and builds that make room."""
        jobs: dict[str, Ahead] = {}
        with self.database.reading() as connection:
            for state in ("running", "queued"):  # in each, an index has the order, and later rows are not read
                query = (
                    f"SELECT id, kind, state, {_SECONDS} {_IN_QUEUE} AND state = '{state}' AND (NOT held OR id = :job) "
                    f"AND (state = 'queued' OR {_STAYS}) ORDER BY rank, position"
                )
                for row in connection.execute(query, {"job": job_id}):
                    if row["id"] == job_id:
                        return jobs
                    jobs[row["id"]] = Ahead(row["kind"], row["state"] == "running", row["seconds"])
        return {}

    def count_ahead(self, job_id: str) -> int:
        """Return the number of jobs in `ahead`, without reading them."""
        before = "(rank, position) < (SELECT rank, position FROM jobs WHERE id = :job)"
        running = f"SELECT count(*) {_IN_QUEUE} AND state = 'running' AND {_STAYS}"
        queued = f"SELECT count(*) {_IN_QUEUE} AND state = 'queued' AND NOT held AND {before}"
        with self.database.reading() as connection:
            (count,) = connection.execute(f"SELECT ({running}) + ({queued})", {"job": job_id}).fetchone()
        return int(count)

    def claim(self, instance: str, kinds: Collection[Kind] = KINDS) -> JobRecord | None:
        """Claim the next queued job for exactly one process; `None` if no job of these kinds is queued.

        Builds come last, and only while no video runs on the worker's GPU. Workers of every kind claim the idle builds
        that are for their GPU.
        """
        # Polled several times a second: a read does not block writers.
        with self.database.reading() as connection:
            if _next(connection, instance, kinds) is None:
                return None
        with self.database.writing() as connection:
            while (row := _next(connection, instance, kinds)) is not None:
                jobs, problems = read_all([row])
                if jobs:
                    return start_job(connection, row["id"], instance)
                self._rows.report(problems)
                mark_unreadable(connection, problems)
            return None

    def claim_job(self, job_id: str, instance: str) -> JobRecord | None:
        """Claim this job if it is queued and not paused, for exactly one process; `None` if it is not."""
        with self.database.writing() as connection:
            row = connection.execute(f"{_CLAIMABLE} AND id = :job", {"worker": instance, "job": job_id}).fetchone()
            jobs, problems = read_all([] if row is None else [row])
            self._rows.report(problems)
            mark_unreadable(connection, problems)
            return start_job(connection, job_id, instance) if jobs else None

    def makes_room(self, rank: int, instance: str, kinds: Collection[Kind] = KINDS) -> bool:
        """Return whether a worker's running build has to make room.

        It does for a video that the worker could claim, or that runs on its GPU elsewhere; an idle build also for a
        task, and for a build that was asked for.

        Args:
            rank: of the build.
        """
        idle = rank == IDLE_BUILD
        claimant = _claimant(instance, kinds if idle else [kind for kind in kinds if kind in VIDEOS], [ASKED_BUILD])
        queries = (_NEXT, _VIDEO_ON_GPU, *((_NEXT_BUILD,) if idle else ()))
        with self.database.reading() as connection:
            return any(connection.execute(query, claimant).fetchone() is not None for query in queries)

    def has_video(self) -> bool:
        """Return whether a video runs on the first GPU or waits for a worker there; other builds make room for it."""
        with self.database.reading() as connection:
            queries = (_VIDEO_ON_GPU, _VIDEO_DUE)
            return any(connection.execute(query, {"worker": ""}).fetchone() is not None for query in queries)

    def move(self, job_id: str, before: str | None) -> None:
        """Move a queued job before another one, or to the end.

        Raises:
            StoreError: if one of them is no longer queued.
        """
        with self.database.writing() as connection:
            _move(connection, job_id, before)

    def rearrange(self, job_id: str, place: Callable[[int], int]) -> tuple[int, int]:
        """Move a queued job to another place among the waiting ones; return the new place, and their number.

        Args:
            place: returns the new place for the old one; places count from 0, and end at the last one.

        Raises:
            StoreError: if it is no longer queued, or is a build.
        """
        with self.database.writing() as connection:
            position, rank = _position(connection, job_id)
            if rank:
                raise StoreError("queue.job_not_queued", job=job_id)
            (old,) = connection.execute(f"SELECT count(*) {_PLACED} AND position < ?", (position,)).fetchone()
            (count,) = connection.execute(f"SELECT count(*) {_PLACED}").fetchone()
            new = min(max(place(old), 0), count - 1)
            if new != old:
                query = f"SELECT id {_PLACED} ORDER BY position LIMIT 1 OFFSET ?"
                next_row = connection.execute(query, (new if new < old else new + 1,)).fetchone()
                _move(connection, job_id, None if next_row is None else next_row["id"])
            return new, count


def _next(connection: sqlite3.Connection, instance: str, kinds: Collection[Kind]) -> sqlite3.Row | None:
    claimant = _claimant(instance, kinds, [ASKED_BUILD, IDLE_BUILD])
    row: sqlite3.Row | None = connection.execute(_NEXT, claimant).fetchone()
    if row is None and connection.execute(_VIDEO_ON_GPU, claimant).fetchone() is None:
        row = connection.execute(_NEXT_BUILD, claimant).fetchone()
    return row


def _claimant(instance: str, kinds: Collection[Kind], ranks: Collection[int]) -> dict[str, str]:
    """Return the parameters of the queries for what a worker may claim.

    Args:
        ranks: of builds.
    """
    parameters = {"worker": instance, "app": app_of(instance)}
    return parameters | {"kinds": json.dumps(list(kinds)), "ranks": json.dumps(list(ranks))}


def _owned(owner: str | EllipsisType | None) -> tuple[str, Sequence[Any]]:
    """Return a condition for the jobs of an owner, and its values; `...` stands for all owners."""
    return ("", ()) if isinstance(owner, EllipsisType) else (" AND owner IS ?", (owner,))


def _in_order(
    columns: str,
    kinds: Collection[Kind],
    owner: str | EllipsisType | None,
    states: Collection[State] = OPEN,
    also: str = "",
) -> Sequence[tuple[str, Sequence[Any]]]:
    """Return a query, with its values, for running and one for queued jobs, each in order.

    Args:
        also: a further condition.
    """
    where, values = _owned(owner)
    where = f"{where} AND kind IN ({marks(kinds)}){also}"
    return [
        (f"SELECT {columns} {_OF_STATE.format(state, where)}", (*values, *kinds)) for state in OPEN if state in states
    ]


def _position(connection: sqlite3.Connection, job_id: str) -> tuple[Any, Any]:
    """Return the position and the rank of a queued job.

    Raises:
        StoreError: if it is not queued.
    """
    row = find_row(connection, job_id)
    if row["state"] != "queued" or row["unreadable"] is not None:
        raise StoreError("queue.job_not_queued", job=job_id)
    return row["position"], row["rank"]


def _move(connection: sqlite3.Connection, job_id: str, before: str | None) -> None:
    """Move a queued job before another one, or to the end; see `QueueOrder.move`."""
    ends = [_position(connection, end_id)[0] for end_id in (job_id, before) if end_id is not None]
    if job_id == before:
        return
    query = "SELECT id, position FROM jobs WHERE state = 'queued' AND unreadable IS NULL AND position >= ?"
    query, values = (f"{query} AND position <= ?", (min(ends), max(ends))) if before is not None else (query, ends)
    rows = connection.execute(f"{query} ORDER BY position", values).fetchall()
    order = [row["id"] for row in rows if row["id"] != job_id]
    order.insert(len(order) if before is None else order.index(before), job_id)
    # The set of positions stays the same: a running job that is put back has its old place.
    places = zip(order, rows, strict=True)
    changed = [(row["position"], new_id) for new_id, row in places if new_id != row["id"]]
    connection.executemany("UPDATE jobs SET position = ? WHERE id = ?", changed)


def start_job(connection: sqlite3.Connection, job_id: str, instance: str) -> JobRecord:
    values = {"held": 0, "pending_control": "", "ended": None, "failure": None, "live": None}
    update_row(connection, job_id, state="running", instance=instance, started=time.time(), **values)
    connection.execute("UPDATE jobs SET lease = lease + 1 WHERE id = ?", (job_id,))
    return read_job(connection, job_id)


def next_position(connection: sqlite3.Connection) -> int:
    # SQLite stores any type in any column.
    query = "SELECT coalesce(max(position), 0) FROM jobs WHERE typeof(position) = 'integer' AND position < ?"
    (last,) = connection.execute(query, (_MOST_POSITION,)).fetchone()
    return int(last) + 1
