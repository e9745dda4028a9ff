"""The job store: one row per job, and its events, in SQLite.

All changes are short transactions: any number of processes share the store, and each may be killed at any time.
Increasing numbers order the jobs, never the clock.
"""

import contextlib
import json
import logging
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

from runtime.core.errors import StoreError
from runtime.core.events import Cancelled, Event, Failed, FramesDecoded, Planned, StepDone, TerminalEvent, VideoSaved
from runtime.core.facts import Fact
from runtime.core.images import referenced
from runtime.core.locks import scratch_folder
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.queue.database import Database
from runtime.queue.instances import Instance, app_of
from runtime.queue.records import (
    KINDS,
    LAST_SECOND,
    OPEN,
    RESUMABLE,
    STARTS_OVER,
    VIDEOS,
    Control,
    JobRecord,
    Kind,
    Line,
    State,
    Waiting,
    event_to_json,
    needs_columns,
    read_death,
    read_needs,
    read_row,
    stored_request,
)

NAME = "jobs.sqlite"
_QUEUED: tuple[State, ...] = ("queued",)

# Queries for several jobs leave out rows that were set aside.
_IN_QUEUE = "FROM jobs WHERE state IN ('running', 'queued') AND unreadable IS NULL"
# The same from an index that has what lists show, with the same words; SQLite would choose another one.
_INDEXED = "FROM jobs INDEXED BY jobs_in_queue WHERE state IN ('running', 'queued') AND unreadable IS NULL"
_OF_STATE = f"{_INDEXED} AND state = '{{}}'{{}} ORDER BY idle, position"
# What has a place in the order.
_PLACED = f"{_INDEXED} AND state = 'queued' AND idle = 0"
# What a scheduler may start; the index of these rows has the same words. SQLite would choose another one.
_WAITING = (
    "FROM jobs INDEXED BY jobs_waiting WHERE state = 'queued' AND NOT held AND kind = 'video' AND unreadable IS NULL"
)
# What a worker may claim. Workers are given as `:worker`, their app as `:app`.
_CLAIMABLE = (
    "SELECT * FROM jobs WHERE state = 'queued' AND NOT held AND unreadable IS NULL "
    "AND (instance IS NULL OR instance = :worker)"
)
_NEXT = f"{_CLAIMABLE} AND NOT idle AND kind IN (SELECT value FROM json_each(:kinds)) ORDER BY position LIMIT 1"
# The CPU and the process of a command line count as the first GPU.
_OWN_GPU = "coalesce((SELECT gpu FROM workers WHERE instance = :worker), 0)"
# Of its own GPU; of GPUs without a worker, the worker that takes all builds.
_NEXT_IDLE = (
    f"{_CLAIMABLE} AND idle AND (jobs.gpu = {_OWN_GPU} OR 'build' IN (SELECT value FROM json_each(:kinds)) "
    "AND NOT EXISTS (SELECT 1 FROM workers WHERE workers.app = :app AND workers.gpu = jobs.gpu)) "
    "ORDER BY position LIMIT 1"
)
# Videos of other processes on a worker's GPU.
_VIDEO_ON_GPU = (
    "SELECT 1 FROM jobs LEFT JOIN workers ON workers.instance = jobs.instance "
    "WHERE state = 'running' AND kind = 'video' AND unreadable IS NULL AND jobs.instance != :worker "
    f"AND coalesce(workers.gpu, 0) = {_OWN_GPU} LIMIT 1"
)
# After an idle build failed, was cancelled or found nothing to build, videos do not queue it again for a day. A worker
# finds nothing if the engines are for a GPU that was removed or has another index now.
_NOT_AGAIN_SECONDS = 86_400.0
_NOTHING_BUILT = (
    "EXISTS (SELECT 1 FROM events WHERE events.job = jobs.id AND events.event LIKE '%\"task.nothing_to_build\"%')"
)
_MOST_POSITION = 1 << 53
_HOUR_SECONDS = 3600.0
# Between two attempts to open the store.
_RETRY_SECONDS = 5.0
# One value for any number of ids, see `_listed`: a statement of SQLite has at most 32,766.
_AMONG = "id IN (SELECT value FROM json_each(?))"
_LIKE_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\%_"})

logger = logging.getLogger(__name__)


class Submission(NamedTuple):
    """A request to the HTTP API: its idempotency key, and a digest of what it asks for."""

    key: str
    digest: str


class Controls(NamedTuple):
    """What a job's process must follow.

    Attributes:
        running: whether the job runs.
        request: to cancel or pause it; empty if there is none.
        finish: whether it is to end after the current section.
        lease: see `JobRecord.lease`.
    """

    running: bool
    request: Control
    finish: bool
    lease: int


# State, hold, pending request, and live progress of a job.
Seen = tuple[State, bool, Control, str | None]


class Ended(NamedTuple):
    """An ended video: its id, owner, the time in seconds since 1970, and its MP4 if it was completed."""

    id: str
    owner: str | None
    at: float
    video: Path | None


class JobStore:
    """The jobs of one cache folder. Safe between threads and processes.

    Args:
        path: of the file; `None` keeps all in memory, for this process alone.
        scratch: closed with the store, to remove its folder.

    Attributes:
        problem: why jobs are lost with this process; `None` if they are stored.
        database: the SQLite file.

    Raises:
        StoreError: by any method, if the file cannot be read or written; nothing has changed then.
    """

    def __init__(
        self,
        path: Path | None,
        problem: Fact | None = None,
        scratch: ExitStack | None = None,
    ) -> None:
        self.database = Database(path)
        self.path = path
        self.problem = problem
        # Rows and events that were reported in the log.
        self._reported: set[tuple[str, int]] = set()
        self._remove_folder = None if scratch is None else weakref.finalize(self, scratch.close)

    @property
    def temporary(self) -> bool:
        """Whether the jobs are lost when this app ends."""
        return self.path is None or self.problem is not None

    @property
    def notice(self) -> Fact | None:
        """Damage that was found when the file was opened; `None` if there was none."""
        return self.database.notice

    def close(self) -> None:
        """Close the file."""
        self.database.close()
        if self._remove_folder is not None:
            self._remove_folder()

    @property
    def unreadable(self) -> Fact | None:
        """The jobs that were set aside because their rows cannot be read; `None` if there are none."""
        with self.database.reading() as connection:
            rows = connection.execute("SELECT * FROM jobs WHERE unreadable IS NOT NULL ORDER BY number").fetchall()
        problems = _read_all(rows)[1].values()
        names = [f"{one.data['job']} ({', '.join(one.data['columns'])})" for one in problems]
        return Fact("queue.jobs_unreadable", {"count": len(names), "jobs": names}) if names else None

    def check(self, most: int = -1) -> None:
        """Set aside the jobs whose rows cannot be read, and take back those that can be read again.

        Args:
            most: number of the newest jobs that are checked; negative for all.
        """
        problems: dict[int, StoreError] = {}
        repaired: list[int] = []
        with self.database.reading() as connection:
            # One row at a time: garbage collection of thousands of jobs would take most of the time.
            for row in connection.execute("SELECT * FROM jobs ORDER BY number DESC LIMIT ?", (most,)):
                jobs, unreadable = _read_all([row])
                problems |= unreadable
                repaired += jobs if row["unreadable"] is not None else ()
        self._set_aside(problems)
        if repaired:
            with self.database.writing() as connection:
                query = "UPDATE jobs SET unreadable = NULL WHERE number = ?"
                connection.executemany(query, [(number,) for number in repaired])

    def _records(self, *queries: tuple[str, Sequence[Any]]) -> Sequence[JobRecord]:
        """Return the jobs that queries with their values find; rows that cannot be read are set aside."""
        while True:
            with self.database.reading() as connection:
                rows = [row for query in queries for row in connection.execute(*query)]
            jobs, problems = _read_all(rows)
            # Again if rows were set aside: the query may have a limit.
            if not self._set_aside(problems):
                return list(jobs.values())

    def _set_aside(self, problems: Mapping[int, StoreError]) -> bool:
        """Mark rows that cannot be read, by number, so that other queries leave them out; return whether any was new.

        In a store that cannot be written they are left out by each query.
        """
        if not problems:
            return False
        self._report(problems)
        with suppress(StoreError), self.database.writing() as connection:
            return _mark(connection, problems)
        return False

    def _report(self, problems: Mapping[int, StoreError]) -> None:
        for number, problem in problems.items():
            if ("jobs", number) not in self._reported:
                self._reported.add(("jobs", number))
                logger.warning("%s It is left out.", problem)

    def folder(self, job_id: str) -> Path | None:
        """Return the folder of a job's checkpoints and poster, made when they are written; `None` without a file."""
        return None if self.path is None else self.path.parent / "jobs" / job_id

    def add(
        self,
        request: GenerationRequest,
        plan: ExecutionPlan,
        *,
        owner: str | None = None,
        batch: str | None = None,
        parent: str | None = None,
        instance: str | None = None,
        job_id: str | None = None,
    ) -> JobRecord:
        """Add a video to the end of the queue.

        Args:
            instance: the process that runs it at once, without a place in the queue.
            job_id: if the job's folder already exists.
        """
        values = {"owner": owner, "batch": batch, "parent": parent, "instance": instance}
        with self.database.writing() as connection:
            return _insert(
                connection,
                "video",
                {**_video(request, plan, owner), **values},
                job_id=job_id,
                state="queued" if instance is None else "running",
            )

    def add_all(
        self, planned: Sequence[tuple[GenerationRequest, ExecutionPlan]], *, owner: str | None = None
    ) -> list[JobRecord]:
        """Add videos to the end of the queue, all or none; several are one batch."""
        batch = secrets.token_hex(4) if len(planned) > 1 else None
        with self.database.writing() as connection:
            return [
                _insert(connection, "video", {**_video(*one, owner), "owner": owner, "batch": batch}) for one in planned
            ]

    def add_once(
        self,
        request: GenerationRequest,
        plan: ExecutionPlan,
        *,
        owner: str | None,
        admit: Callable[[int, Sequence[float]], None],
        submission: Submission | None = None,
    ) -> JobRecord:
        """Add a video to the end of the queue, unless it was added before.

        Args:
            admit: raises an error if the owner may not add another video now. It is given the number of the owner's
                queued and running videos, and the times of those that were added in the last hour, ascending.
            submission: identifies the request.

        Raises:
            StoreError: if the submission's key belongs to another request, or its video was deleted.
        """
        with self.database.writing() as connection:
            known = None if submission is None else _submitted(connection, owner, submission)
            if known is not None:
                return known
            own = "FROM jobs WHERE kind = 'video' AND owner IS ?"
            query = f"SELECT count(*) {own} AND state IN ('queued', 'running')"
            (count,) = connection.execute(query, (owner,)).fetchone()
            # Those of the future were added before the clock was set back.
            now = time.time()
            query = f"SELECT created {own} AND created > ? AND created <= ? ORDER BY created"
            times = connection.execute(query, (owner, now - _HOUR_SECONDS, now))
            admit(int(count), [row["created"] for row in times])
            job = _insert(connection, "video", {**_video(request, plan, owner), "owner": owner})
            if submission is not None:
                connection.execute(
                    "INSERT INTO submissions (owner, key, digest, job) VALUES (?, ?, ?, ?)",
                    (owner or "", submission.key, submission.digest, job.id),
                )
            return job

    def submitted(self, owner: str | None, submission: Submission) -> JobRecord | None:
        """Return the video that a submission has added before; `None` if there is none.

        Raises:
            StoreError: see `add_once`.
        """
        with self.database.reading() as connection:
            return _submitted(connection, owner, submission)

    def add_work(
        self, kind: Kind, title: Fact, folder: Path, request: Mapping[str, Any], *, part: str | None = None
    ) -> JobRecord:
        """Add work on the engine library in `folder` to the end of the queue.

        Args:
            title: what to do, for people.
            request: what to do, see `records.work_of`.
            part: the only component that a build is for.
        """
        values = {"title": title.model_dump_json(), "request": json.dumps(request), "part": part, "output": str(folder)}
        with self.database.writing() as connection:
            return _insert(connection, kind, values)

    def add_idle_build(
        self, title: Fact, folder: Path, request: Mapping[str, Any], engines: Collection[str], gpu: int = 0
    ) -> bool:
        """Add a build that runs while no other work waits, unless one of the same engines is queued or failed lately.

        Args:
            title: see `add_work`.
            engines: ids of the engines.
            gpu: index of the GPU that they are for, whose worker builds them; 0 for the CPU.
        """
        ids = " ".join(sorted(engines))
        values: dict[str, Any] = {
            "title": title.model_dump_json(),
            "request": json.dumps(request),
            "output": str(folder),
        }
        values |= {"idle": 1, "engines": ids, "gpu": gpu}
        with self.database.writing() as connection:
            known = connection.execute(
                "SELECT 1 FROM jobs WHERE kind = 'build' AND idle AND engines = ? AND (state IN ('queued', 'running') "
                f"OR (ended > ? AND (state != 'done' OR {_NOTHING_BUILT}))) LIMIT 1",
                (ids, time.time() - _NOT_AGAIN_SECONDS),
            ).fetchone()
            if known is None:
                _insert(connection, "build", values)
            return known is None

    def get(self, job_id: str) -> JobRecord:
        """Return one job.

        Raises:
            StoreError: if there is none.
        """
        with self.database.reading() as connection:
            return _record(connection, job_id)

    def find(self, beginning: str) -> JobRecord:
        """Return the job whose id starts with `beginning`, deleted jobs included.

        Raises:
            StoreError: if there is none, or more than one.
        """
        with self.database.reading() as connection:
            found = connection.execute(
                "SELECT * FROM jobs WHERE kind = 'video' AND id LIKE ? ESCAPE '\\' LIMIT 3",
                (_starts_with(beginning),),
            ).fetchall()
        if not found or not beginning:
            raise StoreError("queue.no_such_job", job=beginning[:40])
        if len(found) > 1:
            raise StoreError("queue.ambiguous_job", beginning=beginning)
        return read_row(dict(found[0]))

    def known(self, ids: Collection[str]) -> set[str]:
        """Return the ids that belong to a job, those that were set aside included."""
        with self.database.reading() as connection:
            query = f"SELECT id FROM jobs WHERE {_AMONG}"
            return {row["id"] for row in connection.execute(query, (_listed(ids),))}

    def images(self) -> set[str]:
        """Return the digests of the images of videos, also deleted and unreadable ones, and of builds in the queue."""
        query = (
            "SELECT request FROM jobs WHERE request LIKE '%sha256:%' "
            "AND (kind = 'video' OR state IN ('queued', 'running'))"
        )
        with self.database.reading() as connection:
            # SQLite stores any type in any column.
            return {digest for (request,) in connection.execute(query) for digest in referenced(str(request))}

    def list(
        self,
        *,
        states: Collection[State] | None = None,
        search: str = "",
        owner: str | EllipsisType | None = ...,
        kinds: Collection[Kind] = VIDEOS,
        deleted: bool = False,
        starred: bool = False,
        limit: int = -1,
        offset: int = 0,
        after: int | None = None,
        oldest_first: bool = False,
    ) -> Sequence[JobRecord]:
        """Return jobs, newest first unless `oldest_first`.

        Args:
            states: only jobs in one of these states.
            search: only jobs whose prompt contains all of these words, or whose id starts with the text.
            owner: only jobs of this owner; `...` for all owners.
            deleted: deleted jobs that can be restored, instead of the others.
            starred: only starred jobs.
            limit: maximum number, after `offset`; negative for all.
            after: only jobs that follow the one of this number.
        """
        where: dict[str, Iterable[Any]] = {
            f"kind IN ({_marks(kinds)})": kinds,
            f"deleted IS {'NOT ' if deleted else ''}NULL AND unreadable IS NULL": (),
        }
        if starred:
            where["starred"] = ()
        if after is not None:
            where[f"number {'>' if oldest_first else '<'} ?"] = (after,)
        if states is not None:
            where[f"state IN ({_marks(states)})"] = states
        if not isinstance(owner, EllipsisType):
            where["owner IS ?"] = (owner,)
        words = search.split()
        if words:
            prompt = " AND ".join(["prompt LIKE ? ESCAPE '\\'"] * len(words))
            patterns = [f"%{word.translate(_LIKE_SPECIAL)}%" for word in words]
            where[f"(({prompt}) OR id LIKE ? ESCAPE '\\')"] = (*patterns, _starts_with(search.strip()))
        values = [*chain.from_iterable(where.values()), limit, offset]
        order = "ASC" if oldest_first else "DESC"
        query = f"SELECT * FROM jobs WHERE {' AND '.join(where)} ORDER BY number {order} LIMIT ? OFFSET ?"
        return self._records((query, values))

    def queue(
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
        found = [(f"{query} LIMIT ?", (*values, limit)) for query, values in queries]
        return self._records(*found)

    def queue_ids(
        self, *, kinds: Collection[Kind] = KINDS, owner: str | EllipsisType | None = ..., limit: int = -1
    ) -> dict[str, State]:
        """Return the states of the jobs of `queue` by id, without reading the jobs."""
        with self.database.reading() as connection:
            return {
                row["id"]: row["state"]
                for query, values in _in_order("id, state", kinds, owner)
                for row in connection.execute(f"{query} LIMIT ?", (*values, limit))
            }

    def queue_owners(self, beginning: str = "", states: Collection[State] = OPEN) -> dict[str, str]:
        """Return the owners of running and queued videos by id: those whose name starts with `beginning`."""
        query = (
            "SELECT id, owner FROM jobs INDEXED BY jobs_by_owner_and_state WHERE owner >= ? AND owner < ? "
            f"AND kind = 'video' AND state IN ({_marks(states)}) AND unreadable IS NULL"
        )
        with self.database.reading() as connection:
            found = connection.execute(query, (beginning, f"{beginning}\U0010ffff", *states))
            return {row["id"]: row["owner"] for row in found}

    def queue_line(self, owner: str | EllipsisType | None = ...) -> Line:
        """Return how much is in the queue, without reading the jobs."""
        query = (
            "SELECT count(*), total(kind = 'video'), total(state = 'queued' AND NOT idle), "
            f"total(state = 'queued' AND kind = 'video' AND NOT held) {_INDEXED}"
        )
        where, values = _owned(owner)
        with self.database.reading() as connection:
            return Line(*map(int, connection.execute(f"{query}{where}", values).fetchone()))

    def queue_seconds(self, after: int, owner: str | EllipsisType | None = ...) -> tuple[int, int, float]:
        """Return how many queued videos that are not paused follow the first `after` queued jobs, and their seconds.

        In between is the number of those whose duration is known.
        """
        ((query, values),) = _in_order("seconds, kind, held", KINDS, owner, _QUEUED)
        query = f"SELECT * FROM ({query} LIMIT -1 OFFSET ?) WHERE kind = 'video' AND NOT held"
        with self.database.reading() as connection:
            row = connection.execute(
                f"SELECT count(*), count(seconds), total(seconds) FROM ({query})", (*values, after)
            ).fetchone()
            return int(row[0]), int(row[1]), float(row[2])

    def ended_since(self, seconds: float, owner: str | None, limit: int) -> dict[str, State]:
        """Return the states of an owner's videos that ended in the last `seconds`, by id, the newest first."""
        query = (
            "SELECT id, state FROM jobs INDEXED BY jobs_by_end WHERE ended > ? AND owner IS ? AND kind = 'video' "
            "AND state NOT IN ('running', 'queued') AND deleted IS NULL AND unreadable IS NULL "
            "ORDER BY ended DESC LIMIT ?"
        )
        with self.database.reading() as connection:
            found = connection.execute(query, (time.time() - seconds, owner, limit))
            return {row["id"]: row["state"] for row in found}

    def ended(self) -> Sequence[Ended]:
        """Return the ended videos of all owners, newest first, without deleted and starred ones."""
        query = (
            "SELECT id, owner, coalesce(ended, created) AS at, state, output FROM jobs WHERE kind = 'video' "
            "AND state NOT IN ('running', 'queued') AND deleted IS NULL AND unreadable IS NULL AND NOT starred "
            "ORDER BY number DESC"
        )
        with self.database.reading() as connection:
            return [
                Ended(row["id"], row["owner"], row["at"], Path(row["output"]) if row["state"] == "done" else None)
                for row in connection.execute(query)
            ]

    def count_with_model(self, model: str) -> int:
        """Return how many running and queued jobs have requests for a model."""
        named = "CASE WHEN json_valid(request) THEN json_extract(request, '$.model') END = ?"
        with self.database.reading() as connection:
            (count,) = connection.execute(f"SELECT count(*) {_IN_QUEUE} AND {named}", (model,)).fetchone()
            return int(count)

    def queue_counts(self) -> dict[tuple[Kind, str], int]:
        """Return how many jobs of each kind are "running", "queued" and "paused", without reading them."""
        state = "CASE WHEN held AND state = 'queued' THEN 'paused' ELSE state END"
        query = f"SELECT kind, {state} AS shown, count(*) AS jobs {_IN_QUEUE} GROUP BY kind, shown"
        with self.database.reading() as connection:
            return {(row["kind"], row["shown"]): row["jobs"] for row in connection.execute(query)}

    def waiting(self, most: int) -> Sequence[Waiting]:
        """Return the first queued videos of each lane that are not paused, in order.

        A lane has the videos of one owner that need the same model and number of GPUs.

        Args:
            most: of each lane.
        """
        found: list[tuple[int, str, Waiting]] = []
        lane = ""
        with self.database.reading() as connection:
            following = f"SELECT lane {_WAITING} AND lane > ? ORDER BY lane LIMIT 1"
            while row := connection.execute(following, (lane,)).fetchone():
                lane = row["lane"]
                query = f"SELECT id, owner, created, position, needs {_WAITING} AND lane = ? ORDER BY position LIMIT ?"
                for one in connection.execute(query, (lane, most)):
                    with suppress(ValueError, TypeError):  # SQLite stores any type in any column
                        job = Waiting(one["id"], one["owner"], float(one["created"]), read_needs(one["needs"]))
                        found.append((int(one["position"]), job.id, job))
        return [job for _, _, job in sorted(found)]

    def ahead(self, job_id: str) -> Mapping[str, Kind]:
        """Return the kinds of what runs before a queued job, by id in order, without paused ones."""
        found: dict[str, Kind] = {}
        with self.database.reading() as connection:
            for state in ("running", "queued"):  # in each, an index has the order, and later rows are not read
                query = f"SELECT id, kind {_IN_QUEUE} AND state = '{state}' AND (NOT held OR id = ?)"
                for one, kind in connection.execute(f"{query} ORDER BY idle, position", (job_id,)):
                    if one == job_id:
                        return found
                    found[one] = kind
        return {}

    def count_ahead(self, job_id: str) -> int:
        """Return the number of jobs in `ahead`, without reading them."""
        before = "(idle, position) < (SELECT idle, position FROM jobs WHERE id = ?)"
        running = f"SELECT count(*) {_IN_QUEUE} AND state = 'running'"
        queued = f"SELECT count(*) {_IN_QUEUE} AND state = 'queued' AND NOT held AND {before}"
        with self.database.reading() as connection:
            (count,) = connection.execute(f"SELECT ({running}) + ({queued})", (job_id,)).fetchone()
        return int(count)

    def events(self, job_id: str, after: int = 0) -> Sequence[tuple[int, float, Mapping[str, Any]]]:
        """Return a job's events after number `after`: number, seconds since 1970, and JSON with an "event".

        Those that cannot be read are left out.
        """
        with self.database.reading() as connection:
            return self._events(connection, job_id, after)

    def record(self, job_id: str, event: Event, lease: int | None = None) -> bool:
        """Store an event of a running job; `Planned` and terminal events also update the job.

        Args:
            lease: of the caller, see `JobRecord.lease`; `None` for a caller that needs none.

        Returns:
            False, and nothing is stored, if the job is not running, or was started again since the lease.
        """
        # Steps are frequent and cheap to lose, so they are not synced: only a power failure could lose one.
        with self.database.writing(durable=not isinstance(event, StepDone | FramesDecoded)) as connection:
            if not _is_held(connection, job_id, lease):
                return False
            _add_event(connection, job_id, event_to_json(event))
            if isinstance(event, Planned):
                owner = _find(connection, job_id)["owner"]
                _update(
                    connection,
                    job_id,
                    plan=event.plan.model_dump_json(),
                    begun=1,
                    **needs_columns(owner, event.plan),
                )
            elif isinstance(event, TerminalEvent):
                _end(connection, job_id, event)
            return True

    def deaths(self, job_id: str) -> Sequence[Mapping[str, Any]]:
        """Return the deaths of a job's workers since it was submitted, edited or resumed, see `records.Death`."""
        events = [event for _, _, event in self.events(job_id)]
        starts = [index for index, event in enumerate(events) if event["event"] in STARTS_OVER]
        return [read_death(event) for event in events[max(starts, default=0) :] if event["event"] == "WorkerDied"]

    def finish(self, job_id: str, state: State, fact: Fact, lease: int | None = None) -> bool:
        """Note how a running task ended.

        Args:
            lease, and returns: see `record`.
        """
        failure = Failed(fact=fact).model_dump_json() if state == "failed" else None
        with self.database.writing() as connection:
            if not _is_held(connection, job_id, lease):
                return False
            _add_event(connection, job_id, {"event": "Ended", "state": state, "fact": fact.model_dump()})
            _update(connection, job_id, state=state, failure=failure, asked="", ended=time.time())
            return True

    def claim(self, instance: str, kinds: Collection[Kind] = KINDS) -> JobRecord | None:
        """Claim the next queued job for exactly one process; `None` if no job of these kinds is queued.

        Idle builds come last, and only while no video runs on the worker's GPU. Workers of every kind claim those that
        are for their GPU.
        """
        # Polled several times a second: a read does not block writers.
        with self.database.reading() as connection:
            if _next(connection, instance, kinds) is None:
                return None
        with self.database.writing() as connection:
            while (row := _next(connection, instance, kinds)) is not None:
                jobs, problems = _read_all([row])
                if jobs:
                    return _start(connection, row["id"], instance)
                self._report(problems)
                _mark(connection, problems)
            return None

    def claim_job(self, job_id: str, instance: str) -> JobRecord | None:
        """Claim this job if it is queued and not paused, for exactly one process; `None` if it is not."""
        with self.database.writing() as connection:
            row = connection.execute(f"{_CLAIMABLE} AND id = :job", {"worker": instance, "job": job_id}).fetchone()
            jobs, problems = _read_all([] if row is None else [row])
            self._report(problems)
            _mark(connection, problems)
            return _start(connection, job_id, instance) if jobs else None

    @contextlib.contextmanager
    def holding(self, job_id: str, lease: int) -> Iterator[None]:
        """Keep others from starting or changing jobs in a short `with` block, which may replace files of a running job.

        Raises:
            StoreError: "queue.lease_lost" if the job is not running, or was started again since the lease.
        """
        with self.database.writing(durable=False) as connection:
            if not _is_held(connection, job_id, lease):
                raise StoreError("queue.lease_lost", job=job_id)
            yield

    def idle_is_over(self, instance: str, kinds: Collection[Kind] = KINDS) -> bool:
        """Return whether a worker with an idle build could claim other work, or a video runs on its GPU elsewhere."""
        with self.database.reading() as connection:
            return _is_busy(connection, instance, kinds)

    def start(self, job_id: str, instance: str, output: Path | None = None) -> JobRecord:
        """Mark this job, which is queued or resumable, as running in the process `instance`.

        Args:
            output: another MP4 to write.

        Raises:
            StoreError: if it is running or done.
        """
        with self.database.writing() as connection:
            _check_resumable(_record(connection, job_id), "queued")
            if output is not None:
                _update(connection, job_id, output=str(output))
            return _start(connection, job_id, instance)

    def resume(self, job_id: str, changed: tuple[GenerationRequest, ExecutionPlan] | None = None) -> JobRecord:
        """Put a job that ended without a video at the end of the queue.

        Args:
            changed: its new request and plan; unchanged by default.

        Raises:
            StoreError: if it is queued, running or done.
        """
        with self.database.writing() as connection:
            record = _record(connection, job_id)
            _check_resumable(record)
            _add_event(connection, job_id, {"event": "QueuedAgain"})
            position = _next_position(connection)
            if record.plan is not None:  # a version before may have stored it
                _update(connection, job_id, **needs_columns(record.owner, record.plan))
            again = {"state": "queued", "held": 0, "asked": "", "instance": None, "ended": None, "failure": None}
            again |= {"finish": 0}
            _update(connection, job_id, position=position, **again)
            if changed is not None:
                _edit(connection, job_id, *changed)
            return _record(connection, job_id)

    def put_back(self, job_id: str, lease: int | None = None) -> bool:
        """Put a running job back in its place in the queue; held if a pause, ended if a cancel was requested.

        Args:
            lease, and returns: see `record`.
        """
        with self.database.writing() as connection:
            row = _find(connection, job_id)
            if not _is_held(connection, job_id, lease):
                return False
            if row["asked"] == "cancel":
                _add_event(connection, job_id, event_to_json(Cancelled()))
                _end(connection, job_id, Cancelled())
            else:
                held = row["asked"] == "pause"
                _add_event(connection, job_id, {"event": "PutBack", "held": held})
                _update(connection, job_id, state="queued", held=int(held), asked="", instance=None)
            return True

    def read(self, job_id: str, after: int = 0) -> tuple[JobRecord, Sequence[tuple[int, float, Mapping[str, Any]]]]:
        """Return a job and its `events` after number `after`, from one transaction.

        Raises:
            StoreError: if there is no such job.
        """
        with self.database.reading() as connection:
            return _record(connection, job_id), self._events(connection, job_id, after)

    def show(self, job_id: str, live: Mapping[str, Any], lease: int | None = None) -> None:
        """Replace the live progress of a running job, which is too frequent to store as events.

        Args:
            lease: see `record`.
        """
        with self.database.writing(durable=False) as connection:
            if lease is None or _is_held(connection, job_id, lease):
                _update(connection, job_id, live=json.dumps(live))

    def record_task_event(self, task_id: str, event: Mapping[str, Any], lease: int | None = None) -> bool:
        """Add an event to a task.

        Args:
            lease, and returns: see `record`; without a lease, the task need not run.
        """
        with self.database.writing(durable=False) as connection:
            if lease is not None and not _is_held(connection, task_id, lease):
                return False
            _add_event(connection, task_id, event)
            return True

    def changes(self, after: int) -> tuple[int, set[str]]:
        """Return the number of the newest event, and the jobs that have events newer than number `after`."""
        with self.database.reading() as connection:
            (last,) = connection.execute("SELECT coalesce(max(n), 0) FROM events").fetchone()
            found = connection.execute("SELECT DISTINCT job FROM events WHERE n > ?", (after,))
            return int(last), {row["job"] for row in found}

    def news(self, after: int, names: Collection[str]) -> tuple[int, Sequence[tuple[str, Mapping[str, Any]]]]:
        """Return the number of the newest event, and the events newer than number `after` with one of these names.

        Each is the id of its job, and JSON with an "event". Those that cannot be read are left out.
        """
        query = (
            "SELECT n, job, at, event FROM events WHERE n > ? "
            "AND CASE WHEN json_valid(event) THEN json_extract(event, '$.event') END "
            f"IN ({_marks(names)}) ORDER BY n"
        )
        with self.database.reading() as connection:
            (last,) = connection.execute("SELECT coalesce(max(n), 0) FROM events").fetchone()
            rows = connection.execute(query, (after, *names)).fetchall()
        found = [(row["job"], _read_event(row)) for row in rows]
        return int(last), [(job, values) for job, values in found if values is not None]

    def states(self, ids: Collection[str]) -> dict[str, Seen]:
        """Return state, hold, request and live progress of each of these jobs that exists."""
        query = f"SELECT id, state, held, asked, live FROM jobs WHERE {_AMONG}"
        with self.database.reading() as connection:
            return {
                row["id"]: (row["state"], bool(row["held"]), row["asked"], row["live"])
                for row in connection.execute(query, (_listed(ids),))
            }

    def running_on(self, instance: str) -> Sequence[JobRecord]:
        """Return the jobs that a worker runs."""
        query = "SELECT * FROM jobs WHERE state = 'running' AND instance = ? AND unreadable IS NULL"
        return self._records((query, (instance,)))

    def restart(self, job_id: str, instance: str, death: Mapping[str, Any]) -> bool:
        """Put a job whose worker died back in its place in the queue; held if a pause was requested.

        Args:
            death: the event "WorkerDied".

        Returns:
            False, and nothing has changed, if the worker does not run it any more.
        """
        with self.database.writing() as connection:
            row = _find(connection, job_id)
            if row["state"] != "running" or row["instance"] != instance:
                return False
            _add_event(connection, job_id, death)
            held = int(row["asked"] == "pause")
            _update(connection, job_id, state="queued", held=held, asked="", instance=None, live=None)
            return True

    def interrupt(self, job_id: str, instance: str, saved: VideoSaved | None) -> State | None:
        """Update a job whose process `instance` died: done if its video is complete, otherwise interrupted.

        An idle build is queued again, once.

        Returns:
            Its new state; `None` if another process was faster.
        """
        with self.database.writing() as connection:
            record = _record(connection, job_id)
            if record.instance != instance or not record.open:
                return None
            if saved is not None:
                _add_event(connection, job_id, event_to_json(saved))
                _end(connection, job_id, saved)
                return "done"
            if record.pending == "cancel" or record.kind == "task":
                _add_event(connection, job_id, event_to_json(Cancelled()))
                _end(connection, job_id, Cancelled())
                return "cancelled"
            before = any(event["event"] == "Interrupted" for _, _, event in self._events(connection, job_id, 0))
            _add_event(connection, job_id, {"event": "Interrupted"})
            if record.idle and not before:
                _update(connection, job_id, state="queued", asked="", instance=None, live=None)
                return "queued"
            _update(connection, job_id, state="interrupted", asked="", ended=time.time())
            return "interrupted"

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
            StoreError: if it is no longer queued, or is an idle build.
        """
        with self.database.writing() as connection:
            position, idle = _position(connection, job_id)
            if idle:
                raise StoreError("queue.job_not_queued", job=job_id)
            (old,) = connection.execute(f"SELECT count(*) {_PLACED} AND position < ?", (position,)).fetchone()
            (count,) = connection.execute(f"SELECT count(*) {_PLACED}").fetchone()
            new = min(max(place(old), 0), count - 1)
            if new != old:
                query = f"SELECT id {_PLACED} ORDER BY position LIMIT 1 OFFSET ?"
                other = connection.execute(query, (new if new < old else new + 1,)).fetchone()
                _move(connection, job_id, None if other is None else other["id"])
            return new, count

    def edit(self, job_id: str, request: GenerationRequest, plan: ExecutionPlan) -> JobRecord:
        """Change a queued video; it keeps its place, and starts over if it had started.

        Raises:
            StoreError: if it is no longer queued.
        """
        with self.database.writing() as connection:
            record = _record(connection, job_id)
            if record.state != "queued" or record.kind != "video":
                raise StoreError("queue.job_not_queued", job=job_id)
            _edit(connection, job_id, request, plan)
            return _record(connection, job_id)

    def hold(self, ids: Iterable[str], held: bool) -> None:
        """Pause or continue jobs: queued ones are skipped while held, running ones stop after their step."""
        with self.database.writing() as connection:
            for one in ids:
                state = _find(connection, one)["state"]
                if state == "queued":
                    _update(connection, one, held=int(held))
                elif state == "running":
                    connection.execute(
                        "UPDATE jobs SET asked = ? WHERE id = ? AND asked != 'cancel'", ("pause" if held else "", one)
                    )

    def request_cancel(self, ids: Iterable[str]) -> None:
        """Cancel jobs: queued ones end at once, running ones soon; ended ones are ignored."""
        with self.database.writing() as connection:
            for one in ids:
                state = _find(connection, one)["state"]
                if state == "queued":
                    _add_event(connection, one, event_to_json(Cancelled()))
                    _end(connection, one, Cancelled())
                elif state == "running":
                    _update(connection, one, asked="cancel")

    def finish_early(self, job_id: str) -> None:
        """End a video that is made in sections after the current section, or a paused one with those that it has.

        Raises:
            StoreError: if it is not queued or running, or is made whole.
        """
        with self.database.writing() as connection:
            record = _record(connection, job_id)
            if not record.open:
                raise StoreError("queue.job_ended", job=job_id)
            if record.plan is None or record.plan.sections == 1:
                raise StoreError("queue.job_has_no_sections", job=job_id)
            _update(connection, job_id, finish=1, **({"held": 0} if record.begun else {}))

    def controls(self, ids: Collection[str]) -> dict[str, Controls]:
        """Return what is requested of each of these jobs that exists."""
        query = f"SELECT id, state, asked, finish, lease FROM jobs WHERE {_AMONG}"
        with self.database.reading() as connection:
            return {
                row["id"]: Controls(row["state"] == "running", row["asked"], bool(row["finish"]), row["lease"])
                for row in connection.execute(query, (_listed(ids),))
            }

    def cancelling(self, instances: Collection[str]) -> set[str]:
        """Return which of these workers run a job that is to be cancelled."""
        where = f"state = 'running' AND asked = 'cancel' AND instance IN ({_marks(instances)})"
        query = f"SELECT instance FROM jobs WHERE {where}"
        with self.database.reading() as connection:
            return {row["instance"] for row in connection.execute(query, tuple(instances))}

    def delete(self, job_id: str, *, ended: bool = False) -> None:
        """Delete a job; it can be restored until it is purged. A queued job is cancelled.

        Args:
            ended: whether a queued job is not deleted.

        Raises:
            StoreError: if it is running.
        """
        with self.database.writing() as connection:
            row = _find(connection, job_id)
            if ended and row["state"] == "queued":
                raise StoreError("queue.job_queued", job=job_id)
            if row["state"] == "running":
                raise StoreError("queue.job_running_delete", job=job_id)
            if row["state"] == "queued":
                _add_event(connection, job_id, event_to_json(Cancelled()))
                _end(connection, job_id, Cancelled())
            if row["deleted"] is None:
                _update(connection, job_id, deleted=time.time())

    def undelete(self, job_id: str) -> None:
        """Restore a deleted job."""
        with self.database.writing() as connection:
            _find(connection, job_id)
            _update(connection, job_id, deleted=None)

    def star(self, ids: Iterable[str], starred: bool) -> None:
        """Star jobs, or remove their stars."""
        with self.database.writing() as connection:
            for one in ids:
                _find(connection, one)
                _update(connection, one, starred=int(starred))

    def purge(self, older_than: float, ids: Collection[str] | None = None) -> Sequence[JobRecord]:
        """Remove deleted jobs permanently; return them, so that their files can be removed.

        Args:
            older_than: seconds since their deletion.
            ids: only these jobs, whenever they were deleted.
        """
        where = "deleted <= ?"
        values: Sequence[str | float] = (time.time() - older_than,)
        if ids is not None:
            where, values = f"deleted IS NOT NULL AND {_AMONG}", (_listed(ids),)
        with self.database.writing() as connection:
            found = connection.execute(f"SELECT * FROM jobs WHERE {where} AND unreadable IS NULL", values).fetchall()
            jobs, problems = _read_all(found)
            connection.executemany("DELETE FROM jobs WHERE number = ?", [(number,) for number in jobs])
        self._set_aside(problems)
        return list(jobs.values())

    def _events(
        self, connection: sqlite3.Connection, job_id: str, after: int
    ) -> Sequence[tuple[int, float, Mapping[str, Any]]]:
        query, found = "SELECT n, at, event FROM events WHERE job = ? AND n > ? ORDER BY n", []
        for row in connection.execute(query, (job_id, after)):
            values = _read_event(row)
            if values is not None:
                found.append((row["n"], row["at"], values))
            elif ("events", row["n"]) not in self._reported:
                self._reported.add(("events", row["n"]))
                logger.warning("job %s: event %s cannot be read and is left out", job_id, row["n"])
        return found


def open_store(cache_dir: Path) -> JobStore:
    """Return the job store of a cache folder; a temporary one with its `problem` if that cannot be used."""
    path = cache_dir / NAME
    try:
        store = JobStore(path)
        try:
            # Without its lock, this process would be taken for a dead one.
            with Instance(path):
                return store
        except StoreError:
            store.close()
            raise
    except StoreError as error:
        logger.error("%s cannot be used: %s", NAME, type(error.__cause__ or error).__name__)
        problem = error.fact
        scratch = ExitStack()
        try:
            folder = scratch.enter_context(scratch_folder())
            return JobStore(folder / NAME, problem, scratch)
        except (OSError, StoreError):
            scratch.close()
            return JobStore(None, problem)


def open_when_usable(path: Path | None, problem: Fact | None) -> JobStore:
    """Return the job store of the app that this process belongs to; wait while it cannot be opened.

    Such as on a disk that became read-only: the process would only be started again.
    """
    while True:
        try:
            return JobStore(path, problem)
        except StoreError as error:
            logger.warning("The job store cannot be opened: %s", type(error.__cause__ or error).__name__)
            time.sleep(_RETRY_SECONDS)


def _next(connection: sqlite3.Connection, instance: str, kinds: Collection[Kind]) -> sqlite3.Row | None:
    """Return the row that a worker claims next."""
    wanted = _claimant(instance, kinds)
    row: sqlite3.Row | None = connection.execute(_NEXT, wanted).fetchone()
    if row is None and not _is_busy(connection, instance, kinds):
        row = connection.execute(_NEXT_IDLE, wanted).fetchone()
    return row


def _claimant(instance: str, kinds: Collection[Kind]) -> dict[str, str]:
    """Return the parameters of the queries for what a worker may claim."""
    return {"worker": instance, "app": app_of(instance), "kinds": json.dumps(list(kinds))}


def _is_busy(connection: sqlite3.Connection, instance: str, kinds: Collection[Kind]) -> bool:
    """Return whether other work than idle builds waits for a worker, or a video runs on its GPU elsewhere."""
    wanted = _claimant(instance, kinds)
    return any(connection.execute(query, wanted).fetchone() is not None for query in (_NEXT, _VIDEO_ON_GPU))


def _find(connection: sqlite3.Connection, job_id: str) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise StoreError("queue.no_such_job", job=job_id[:40])
    return row


def _is_held(connection: sqlite3.Connection, job_id: str, lease: int | None) -> bool:
    """Return whether a job runs, and was not started again since a lease."""
    row = _find(connection, job_id)
    return bool(row["state"] == "running" and lease in {None, row["lease"]})


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
    where = f"{where} AND kind IN ({_marks(kinds)}){also}"
    return [
        (f"SELECT {columns} {_OF_STATE.format(state, where)}", (*values, *kinds)) for state in OPEN if state in states
    ]


def _position(connection: sqlite3.Connection, job_id: str) -> tuple[Any, bool]:
    """Return the position of a queued job, and whether it is an idle build.

    Raises:
        StoreError: if it is not queued.
    """
    row = _find(connection, job_id)
    if row["state"] != "queued" or row["unreadable"] is not None:
        raise StoreError("queue.job_not_queued", job=job_id)
    return row["position"], bool(row["idle"])


def _move(connection: sqlite3.Connection, job_id: str, before: str | None) -> None:
    """Move a queued job before another one, or to the end; see `JobStore.move`."""
    ends = [_position(connection, one)[0] for one in (job_id, before) if one is not None]
    if job_id == before:
        return
    query = "SELECT id, position FROM jobs WHERE state = 'queued' AND unreadable IS NULL AND position >= ?"
    query, values = (f"{query} AND position <= ?", (min(ends), max(ends))) if before is not None else (query, ends)
    rows = connection.execute(f"{query} ORDER BY position", values).fetchall()
    order = [row["id"] for row in rows if row["id"] != job_id]
    order.insert(len(order) if before is None else order.index(before), job_id)
    # The set of positions stays the same: a running job that is put back has its old place.
    places = zip(order, rows, strict=True)
    changed = [(row["position"], one) for one, row in places if one != row["id"]]
    connection.executemany("UPDATE jobs SET position = ? WHERE id = ?", changed)


def _record(connection: sqlite3.Connection, job_id: str) -> JobRecord:
    return read_row(dict(_find(connection, job_id)))


def _submitted(connection: sqlite3.Connection, owner: str | None, submission: Submission) -> JobRecord | None:
    row = connection.execute(
        "SELECT digest, job FROM submissions WHERE owner = ? AND key = ?", (owner or "", submission.key)
    ).fetchone()
    if row is None:
        return None
    if row["digest"] != submission.digest:
        raise StoreError("queue.submission_differs")
    job = _record(connection, row["job"])
    if job.deleted is not None:
        raise StoreError("queue.submission_deleted")
    return job


def _read_all(rows: Iterable[sqlite3.Row]) -> tuple[dict[int, JobRecord], dict[int, StoreError]]:
    """Return the jobs in rows, and why the other rows cannot be read, both by number."""
    jobs, problems = {}, {}
    for row in rows:
        try:
            jobs[row["number"]] = read_row(dict(row))
        except StoreError as error:
            problems[row["number"]] = error
    return jobs, problems


def _mark(connection: sqlite3.Connection, problems: Mapping[int, StoreError]) -> bool:
    """Mark rows that cannot be read, by number; return whether one was not marked before."""
    query = "UPDATE jobs SET unreadable = ? WHERE number = ? AND unreadable IS NULL"
    marks = [(", ".join(problem.data["columns"]), number) for number, problem in problems.items()]
    return connection.executemany(query, marks).rowcount > 0


def _read_event(row: sqlite3.Row) -> Mapping[str, Any] | None:
    try:
        values = json.loads(row["event"])
    except (ValueError, TypeError, RecursionError):
        return None
    known = isinstance(values, dict) and isinstance(values.get("event"), str)
    dated = isinstance(row["at"], int | float) and 0 <= row["at"] <= LAST_SECOND
    return values if known and dated else None


def _video(request: GenerationRequest, plan: ExecutionPlan, owner: str | None) -> dict[str, str | float]:
    """Return the columns that define a video."""
    return {
        **needs_columns(owner, plan),
        "prompt": request.prompt,
        "request": json.dumps(stored_request(request, plan)),
        "plan": plan.model_dump_json(),
        "output": str(plan.output),
    }


def _insert(
    connection: sqlite3.Connection,
    kind: Kind,
    values: Mapping[str, Any],
    *,
    job_id: str | None = None,
    state: State = "queued",
) -> JobRecord:
    """Add a job to the end of the queue, or one that its instance runs already."""
    now, job_id = time.time(), job_id or secrets.token_hex(4)
    columns = {
        "id": job_id,
        "kind": kind,
        **values,
        "state": state,
        "created": now,
        "started": now if state == "running" else None,
        "position": _next_position(connection),
    }
    connection.execute(f"INSERT INTO jobs ({', '.join(columns)}) VALUES ({_marks(columns)})", tuple(columns.values()))
    return _record(connection, job_id)


def _start(connection: sqlite3.Connection, job_id: str, instance: str) -> JobRecord:
    values = {"held": 0, "asked": "", "ended": None, "failure": None, "live": None}
    _update(connection, job_id, state="running", instance=instance, started=time.time(), **values)
    connection.execute("UPDATE jobs SET lease = lease + 1 WHERE id = ?", (job_id,))
    return _record(connection, job_id)


def _edit(connection: sqlite3.Connection, job_id: str, request: GenerationRequest, plan: ExecutionPlan) -> None:
    """Change a queued video; it starts over."""
    _add_event(connection, job_id, {"event": "Edited"})
    owner = _find(connection, job_id)["owner"]
    _update(connection, job_id, **_video(request, plan, owner), begun=0, result=None)


def _end(connection: sqlite3.Connection, job_id: str, event: TerminalEvent) -> None:
    """Set the columns of a job that ended with `event`."""
    state: State = "cancelled"
    failure = None
    # A video that ended early stays the job's result until its continuation has replaced the file.
    result = _find(connection, job_id)["result"]
    if isinstance(event, VideoSaved):
        state, result = "done", event.model_dump_json()
    elif isinstance(event, Failed):
        state, failure = "failed", event.model_dump_json()
    _update(
        connection, job_id, state=state, result=result, failure=failure, held=0, asked="", finish=0, ended=time.time()
    )


def _add_event(connection: sqlite3.Connection, job_id: str, event: Mapping[str, Any]) -> None:
    connection.execute("INSERT INTO events (job, at, event) VALUES (?, ?, ?)", (job_id, time.time(), json.dumps(event)))


def _update(connection: sqlite3.Connection, job_id: str, **values: Any) -> None:
    """Set columns of a job. Names are not escaped: they come from this module only."""
    columns = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), job_id))


def _next_position(connection: sqlite3.Connection) -> int:
    # SQLite stores any type in any column.
    query = "SELECT coalesce(max(position), 0) FROM jobs WHERE typeof(position) = 'integer' AND position < ?"
    (last,) = connection.execute(query, (_MOST_POSITION,)).fetchone()
    return int(last) + 1


def _check_resumable(job: JobRecord, *others: State) -> None:
    """Raise `StoreError` unless a job can be resumed, or is in one of the `others` states."""
    if job.deleted is not None:
        raise StoreError("queue.job_deleted", job=job.id)
    if job.kind == "video" and (job.state in (*RESUMABLE, *others) or job.continues):
        return
    if job.state == "queued":
        raise StoreError("queue.job_queued", job=job.id)
    if job.state == "running":
        raise StoreError("queue.job_running", job=job.id)
    raise StoreError("queue.job_done", job=job.id, video=job.output)


def _listed(ids: Collection[str]) -> str:
    """Return ids as the value of `_AMONG`."""
    return json.dumps(list(ids))


def _marks(values: Collection[Any]) -> str:
    """Return an SQL placeholder for each value."""
    return ", ".join("?" * len(values))


def _starts_with(text: str) -> str:
    """Return the LIKE pattern for values that start with `text`."""
    return f"{text.lower().translate(_LIKE_SPECIAL)}%"
