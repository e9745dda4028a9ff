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
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import Unpack

from runtime.core.errors import StoreError
from runtime.core.events import Cancelled, Failed, VideoSaved, Warned
from runtime.core.facts import Fact
from runtime.core.images import referenced
from runtime.core.locks import scratch_folder
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.queue.database import Database
from runtime.queue.event_log import EventLog, add_event, end_job, is_leased
from runtime.queue.instances import Instance
from runtime.queue.queue_order import QueueOrder, next_position, start_job
from runtime.queue.records import (
    ASKED_BUILD,
    IDLE_BUILD,
    RESUMABLE,
    Control,
    Group,
    JobRecord,
    Kind,
    State,
    event_to_json,
    needs_columns,
    read_row,
    stored_request,
)
from runtime.queue.rows import (
    AMONG,
    JobFilter,
    Rows,
    conditions,
    find_row,
    listed,
    marks,
    read_all,
    read_job,
    starts_with,
    update_row,
)

NAME = "jobs.sqlite"

# After an idle build failed, was cancelled or found nothing to build, videos do not queue it again for a day. A worker
# finds nothing if the engines are for a GPU that was removed or has another index now.
_NOT_AGAIN_SECONDS = 86_400.0
_NOTHING_BUILT = (
    "EXISTS (SELECT 1 FROM events WHERE events.job = jobs.id AND events.event LIKE '%\"task.nothing_to_build\"%')"
)
_HOUR_SECONDS = 3600.0
# Between two attempts to open the store.
_RETRY_SECONDS = 5.0

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


# Raises an error if an owner may not add another video, see `JobStore.add_once`.
Admit = Callable[[int, Sequence[float]], None]


class Ended(NamedTuple):
    """An ended video: its id, owner, the time in seconds since 1970, and its MP4 if it was completed."""

    id: str
    owner: str | None
    at: float
    video: Path | None


class RecentEnd(NamedTuple):
    """How a video ended, and whether no other video of its batch runs or waits; paused ones do not count."""

    state: State
    ends_batch: bool


class JobStore:
    """The jobs of one cache folder. Safe between threads and processes.

    Args:
        path: of the file; `None` keeps all in memory, for this process alone.
        scratch: closed with the store, to remove its folder.

    Attributes:
        problem: why jobs are lost with this process; `None` if they are stored.
        database: the SQLite file.
        log: the events of the jobs.
        order: the running and queued jobs.

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
        self.log = EventLog(self.database)
        self._rows = Rows(self.database)
        self.order = QueueOrder(self.database, self._rows)
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
        self.database.close()
        if self._remove_folder is not None:
            self._remove_folder()

    @property
    def unreadable(self) -> Fact | None:
        """The jobs that were set aside because their rows cannot be read; `None` if there are none."""
        with self.database.reading() as connection:
            rows = connection.execute("SELECT * FROM jobs WHERE unreadable IS NOT NULL ORDER BY number").fetchall()
        problems = read_all(rows)[1].values()
        names = [f"{problem.data['job']} ({', '.join(problem.data['columns'])})" for problem in problems]
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
                jobs, unreadable = read_all([row])
                problems |= unreadable
                repaired += jobs if row["unreadable"] is not None else ()
        self._rows.set_aside(problems)
        if repaired:
            with self.database.writing() as connection:
                query = "UPDATE jobs SET unreadable = NULL WHERE number = ?"
                connection.executemany(query, [(number,) for number in repaired])

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
        instance: str | None = None,
    ) -> JobRecord:
        """Add a video to the end of the queue.

        Args:
            instance: the process that runs it at once, without a place in the queue.
        """
        values = {"owner": owner, "batch": batch, "instance": instance}
        with self.database.writing() as connection:
            return _insert(
                connection,
                "video",
                {**_video(request, plan, owner), **values},
                state="queued" if instance is None else "running",
            )

    def add_all(
        self,
        planned: Sequence[tuple[GenerationRequest, ExecutionPlan]],
        *,
        owner: str | None = None,
        held: bool = False,
        admit: Admit | None = None,
    ) -> list[JobRecord]:
        """Add videos to the end of the queue, all or none; several are one batch.

        Args:
            held: whether they are paused.
            admit: see `add_once`; it is asked about the last video as if the others were queued.
        """
        batch = secrets.token_hex(4) if len(planned) > 1 else None
        with self.database.writing() as connection:
            if admit is not None:
                _check_admitted(connection, owner, admit, len(planned))
            return [
                _insert(
                    connection, "video", {**_video(*video, owner), "owner": owner, "batch": batch, "held": int(held)}
                )
                for video in planned
            ]

    def add_once(
        self,
        request: GenerationRequest,
        plan: ExecutionPlan,
        *,
        owner: str | None,
        admit: Admit,
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
            record = None if submission is None else _submitted(connection, owner, submission)
            if record is not None:
                return record
            _check_admitted(connection, owner, admit)
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
        self,
        kind: Kind,
        title: Fact,
        folder: Path,
        request: Mapping[str, Any],
        *,
        part: str | None = None,
        seconds: float | None = None,
    ) -> JobRecord:
        """Add work on the engine library in `folder` to the end of the queue: a build after all videos and tasks.

        Args:
            title: what to do, for people.
            request: what to do, see `records.work_of`.
            part: the only component that a build is for.
            seconds: forecast of its duration.
        """
        values: dict[str, Any] = {"title": title.model_dump_json(), "request": json.dumps(request)}
        values |= {"part": part, "output": str(folder), "seconds": seconds}
        values["rank"] = ASKED_BUILD if kind == "build" else 0
        with self.database.writing() as connection:
            return _insert(connection, kind, values)

    def add_idle_build(
        self,
        title: Fact,
        folder: Path,
        request: Mapping[str, Any],
        engines: Collection[str],
        gpu: int = 0,
        *,
        seconds: float | None = None,
    ) -> bool:
        """Add a build that runs while no other work waits, unless one of the same engines is queued or failed lately.

        Args:
            title: see `add_work`.
            engines: ids of the engines.
            gpu: index of the GPU that they are for, whose worker builds them; 0 for the CPU.
            seconds: forecast of its duration.
        """
        ids = " ".join(sorted(engines))
        values: dict[str, Any] = {
            "title": title.model_dump_json(),
            "request": json.dumps(request),
            "output": str(folder),
        }
        values |= {"rank": IDLE_BUILD, "engines": ids, "gpu": gpu, "seconds": seconds}
        with self.database.writing() as connection:
            row = connection.execute(
                "SELECT 1 FROM jobs WHERE kind = 'build' AND rank = ? AND engines = ? "
                "AND (state IN ('queued', 'running') "
                f"OR (ended > ? AND (state != 'done' OR {_NOTHING_BUILT}))) LIMIT 1",
                (IDLE_BUILD, ids, time.time() - _NOT_AGAIN_SECONDS),
            ).fetchone()
            if row is None:
                _insert(connection, "build", values)
            return row is None

    def get(self, job_id: str) -> JobRecord:
        """Return one job.

        Raises:
            StoreError: if there is none.
        """
        with self.database.reading() as connection:
            return read_job(connection, job_id)

    def find(self, beginning: str) -> JobRecord:
        """Return the job whose id starts with `beginning`, deleted jobs included.

        Raises:
            StoreError: if there is none, or more than one.
        """
        with self.database.reading() as connection:
            rows = connection.execute(
                "SELECT * FROM jobs WHERE kind = 'video' AND id LIKE ? ESCAPE '\\' LIMIT 3",
                (starts_with(beginning),),
            ).fetchall()
        if not rows or not beginning:
            raise StoreError("queue.no_such_job", job=beginning[:40])
        if len(rows) > 1:
            raise StoreError("queue.ambiguous_job", beginning=beginning)
        return read_row(dict(rows[0]))

    def existing_ids(self, ids: Collection[str]) -> set[str]:
        """Return the ids that belong to a job, those that were set aside included."""
        with self.database.reading() as connection:
            query = f"SELECT id FROM jobs WHERE {AMONG}"
            return {row["id"] for row in connection.execute(query, (listed(ids),))}

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
        limit: int = -1,
        offset: int = 0,
        after: int | None = None,
        oldest_first: bool = False,
        stacked: bool = False,
        **wanted: Unpack[JobFilter],
    ) -> Sequence[JobRecord]:
        """Return jobs, newest first unless `oldest_first`.

        Args:
            limit: maximum number, after `offset`; negative for all.
            after: only jobs that follow the one of this number.
            stacked: of the matching videos of a group only the newest one.
            wanted: which jobs match.
        """
        where, values = conditions(wanted)
        if after is not None:
            where, values = f"{where} AND number {'>' if oldest_first else '<'} ?", [*values, after]
        if stacked:
            # The names of columns in `where` are those of `newer` there.
            newer = (
                "SELECT 1 FROM jobs AS newer INDEXED BY jobs_by_batch WHERE newer.batch = jobs.batch "
                f"AND newer.number > jobs.number AND newer.prompt = jobs.prompt AND {where}"
            )
            where, values = f"{where} AND NOT EXISTS ({newer})", [*values, *values]
        order = "ASC" if oldest_first else "DESC"
        query = f"SELECT * FROM jobs WHERE {where} ORDER BY number {order} LIMIT ? OFFSET ?"
        return self._rows.records((query, [*values, limit, offset]))

    def groups(self, groups: Collection[Group]) -> Mapping[Group, Mapping[str, bool]]:
        """Return the ids of each group's videos in the order in which they were queued, and whether each is starred.

        Deleted videos do not belong to it any more.
        """
        members: dict[Group, dict[str, bool]] = {group: {} for group in groups}
        # SQLite knows no empty list of values. The join is CROSS, so that the index is searched for each group.
        query = (
            f"WITH wanted (batch, prompt) AS (VALUES {', '.join(['(?, ?)'] * len(members))}) "
            "SELECT id, jobs.batch, jobs.prompt, starred FROM wanted CROSS JOIN jobs INDEXED BY jobs_by_batch "
            "ON jobs.batch = wanted.batch AND jobs.prompt = wanted.prompt "
            "WHERE kind = 'video' AND deleted IS NULL AND unreadable IS NULL ORDER BY number"
        )
        with self.database.reading() as connection:
            for row in connection.execute(query, [*chain.from_iterable(members)]) if members else ():
                members[Group(row["batch"], row["prompt"])][row["id"]] = bool(row["starred"])
        return members

    def ended_since(self, seconds: float, owner: str | None, limit: int) -> dict[str, RecentEnd]:
        """Return an owner's videos that ended in the last `seconds`, by id, the newest first."""
        goes_on = (
            "SELECT 1 FROM jobs AS member INDEXED BY jobs_by_batch WHERE member.batch = jobs.batch "
            "AND (member.state = 'running' OR member.state = 'queued' AND NOT member.held)"
        )
        query = (
            f"SELECT id, state, NOT EXISTS ({goes_on}) AS ends_batch FROM jobs INDEXED BY jobs_by_end "
            "WHERE ended > ? AND owner IS ? AND kind = 'video' "
            "AND state NOT IN ('running', 'queued') AND deleted IS NULL AND unreadable IS NULL "
            "ORDER BY ended DESC LIMIT ?"
        )
        with self.database.reading() as connection:
            rows = connection.execute(query, (time.time() - seconds, owner, limit))
            return {row["id"]: RecentEnd(row["state"], bool(row["ends_batch"])) for row in rows}

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

    def finish(self, job_id: str, state: State, fact: Fact, lease: int | None = None) -> bool:
        """Note how a running task ended.

        Args:
            lease, and returns: see `record`.
        """
        failure = Failed(fact=fact).model_dump_json() if state == "failed" else None
        with self.database.writing() as connection:
            if not is_leased(connection, job_id, lease):
                return False
            add_event(connection, job_id, {"event": "Ended", "state": state, "fact": fact.model_dump()})
            update_row(connection, job_id, state=state, failure=failure, pending_control="", ended=time.time())
            return True

    @contextlib.contextmanager
    def holding(self, job_id: str, lease: int) -> Iterator[None]:
        """Keep others from starting or changing jobs in a short `with` block, which may replace files of a running job.

        Raises:
            StoreError: "queue.lease_lost" if the job is not running, or was started again since the lease.
        """
        with self.database.writing(durable=False) as connection:
            if not is_leased(connection, job_id, lease):
                raise StoreError("queue.lease_lost", job=job_id)
            yield

    def start(self, job_id: str, instance: str, output: Path | None = None) -> JobRecord:
        """Mark this job, which is queued or resumable, as running in the process `instance`.

        Args:
            output: another MP4 to write.

        Raises:
            StoreError: if it is running or done.
        """
        with self.database.writing() as connection:
            _check_resumable(read_job(connection, job_id), "queued")
            if output is not None:
                update_row(connection, job_id, output=str(output))
            return start_job(connection, job_id, instance)

    def resume(self, job_id: str, changed: tuple[GenerationRequest, ExecutionPlan] | None = None) -> JobRecord:
        """Put a job that ended without a video at the end of the queue.

        Args:
            changed: its new request and plan; unchanged by default.

        Raises:
            StoreError: if it is queued, running or done.
        """
        with self.database.writing() as connection:
            record = read_job(connection, job_id)
            _check_resumable(record)
            add_event(connection, job_id, {"event": "QueuedAgain"})
            position = next_position(connection)
            if record.plan is not None:  # a version before may have stored it
                update_row(connection, job_id, **needs_columns(record.owner, record.plan))
            again = {"state": "queued", "held": 0, "pending_control": "", "instance": None, "finish": 0}
            again |= {"ended": None, "failure": None}
            update_row(connection, job_id, position=position, **again)
            if changed is not None:
                _edit(connection, job_id, *changed)
            return read_job(connection, job_id)

    def put_back(self, job_id: str, lease: int | None = None) -> bool:
        """Put a running job back in its place in the queue; held if a pause, ended if a cancel was requested.

        Args:
            lease, and returns: see `record`.
        """
        with self.database.writing() as connection:
            row = find_row(connection, job_id)
            if not is_leased(connection, job_id, lease):
                return False
            if row["pending_control"] == "cancel":
                end_job(connection, job_id, Cancelled())
            else:
                paused = row["pending_control"] == "pause"
                add_event(connection, job_id, {"event": "PutBack", "held": paused})
                update_row(connection, job_id, state="queued", held=int(paused), pending_control="", instance=None)
            return True

    def states(self, ids: Collection[str]) -> dict[str, Seen]:
        """Return state, hold, request and live progress of each of these jobs that exists."""
        query = f"SELECT id, state, held, pending_control, live FROM jobs WHERE {AMONG}"
        with self.database.reading() as connection:
            return {
                row["id"]: (row["state"], bool(row["held"]), row["pending_control"], row["live"])
                for row in connection.execute(query, (listed(ids),))
            }

    def running_on(self, instance: str) -> Sequence[JobRecord]:
        query = "SELECT * FROM jobs WHERE state = 'running' AND instance = ? AND unreadable IS NULL"
        return self._rows.records((query, (instance,)))

    def restart(self, job_id: str, instance: str, death: Mapping[str, Any]) -> bool:
        """Put a job whose worker died back in its place in the queue; held if a pause was requested.

        Args:
            death: the event "WorkerDied".

        Returns:
            False, and nothing has changed, if the worker does not run it any more.
        """
        with self.database.writing() as connection:
            row = find_row(connection, job_id)
            if row["state"] != "running" or row["instance"] != instance:
                return False
            add_event(connection, job_id, death)
            paused = int(row["pending_control"] == "pause")
            update_row(connection, job_id, state="queued", held=paused, pending_control="", instance=None, live=None)
            return True

    def interrupt(self, job_id: str, instance: str, saved: VideoSaved | None) -> State | None:
        """Update a job whose process `instance` died: done if its video is complete, otherwise interrupted.

        An idle build is queued again, once.

        Returns:
            Its new state; `None` if another process was faster.
        """
        with self.database.writing() as connection:
            record = read_job(connection, job_id)
            if record.instance != instance or not record.open:
                return None
            if saved is not None:
                end_job(connection, job_id, saved)
            elif record.pending == "cancel" or record.kind == "task":
                end_job(connection, job_id, Cancelled())
                return "cancelled"
            if saved is None:
                return self._interrupt(connection, record)
        self.log.on_end(job_id, saved)
        return "done"

    def _interrupt(self, connection: sqlite3.Connection, record: JobRecord) -> State:
        events = self.log.read_events(connection, record.id, 0)
        before = any(event["event"] == "Interrupted" for _, _, event in events)
        add_event(connection, record.id, {"event": "Interrupted"})
        if record.idle and not before:
            update_row(connection, record.id, state="queued", pending_control="", instance=None, live=None)
            return "queued"
        update_row(connection, record.id, state="interrupted", pending_control="", ended=time.time())
        return "interrupted"

    def add_warning(self, job_id: str, fact: Fact, lease: int) -> None:
        """Add a warning to an ended video, unless it was started again since the lease."""
        with self.database.writing() as connection:
            record = read_job(connection, job_id)
            if record.open or record.lease != lease:
                return
            if record.saved is not None:
                update_row(connection, job_id, result=record.saved.with_warning(fact).model_dump_json())
            add_event(connection, job_id, event_to_json(Warned(fact=fact)))

    def edit(self, job_id: str, request: GenerationRequest, plan: ExecutionPlan) -> JobRecord:
        """Change a queued video; it keeps its place, and starts over if it had started.

        Raises:
            StoreError: if it is no longer queued.
        """
        with self.database.writing() as connection:
            record = read_job(connection, job_id)
            if record.state != "queued" or record.kind != "video":
                raise StoreError("queue.job_not_queued", job=job_id)
            _edit(connection, job_id, request, plan)
            return read_job(connection, job_id)

    def hold(self, ids: Iterable[str], paused: bool) -> None:
        """Pause or continue jobs: queued ones are skipped while held, running ones stop after their step."""
        with self.database.writing() as connection:
            for job_id in ids:
                state = find_row(connection, job_id)["state"]
                if state == "queued":
                    update_row(connection, job_id, held=int(paused))
                elif state == "running":
                    connection.execute(
                        "UPDATE jobs SET pending_control = ? WHERE id = ? AND pending_control != 'cancel'",
                        ("pause" if paused else "", job_id),
                    )

    def request_cancel(self, ids: Iterable[str]) -> None:
        """Cancel jobs: queued ones end at once, running ones soon; ended ones are ignored."""
        with self.database.writing() as connection:
            for job_id in ids:
                state = find_row(connection, job_id)["state"]
                if state == "queued":
                    end_job(connection, job_id, Cancelled())
                elif state == "running":
                    update_row(connection, job_id, pending_control="cancel")

    def finish_early(self, job_id: str) -> None:
        """End a video that is made in sections after the current section, or a paused one with those that it has.

        Raises:
            StoreError: if it is not queued or running, or is made whole.
        """
        with self.database.writing() as connection:
            record = read_job(connection, job_id)
            if not record.open:
                raise StoreError("queue.job_ended", job=job_id)
            if record.plan is None or record.plan.sections == 1:
                raise StoreError("queue.job_has_no_sections", job=job_id)
            update_row(connection, job_id, finish=1, **({"held": 0} if record.begun else {}))

    def controls(self, ids: Collection[str]) -> dict[str, Controls]:
        """Return what is requested of each of these jobs that exists."""
        query = f"SELECT id, state, pending_control, finish, lease FROM jobs WHERE {AMONG}"
        with self.database.reading() as connection:
            return {
                row["id"]: Controls(
                    row["state"] == "running", row["pending_control"], bool(row["finish"]), row["lease"]
                )
                for row in connection.execute(query, (listed(ids),))
            }

    def cancelling(self, instances: Collection[str]) -> set[str]:
        """Return which of these workers run a job that is to be cancelled."""
        where = f"state = 'running' AND pending_control = 'cancel' AND instance IN ({marks(instances)})"
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
            row = find_row(connection, job_id)
            if ended and row["state"] == "queued":
                raise StoreError("queue.job_queued", job=job_id)
            if row["state"] == "running":
                raise StoreError("queue.job_running_delete", job=job_id)
            if row["state"] == "queued":
                end_job(connection, job_id, Cancelled())
            if row["deleted"] is None:
                update_row(connection, job_id, deleted=time.time())

    def undelete(self, job_id: str) -> None:
        with self.database.writing() as connection:
            find_row(connection, job_id)
            update_row(connection, job_id, deleted=None)

    def star(self, ids: Iterable[str], starred: bool) -> None:
        with self.database.writing() as connection:
            for job_id in ids:
                find_row(connection, job_id)
                update_row(connection, job_id, starred=int(starred))

    def purge(self, older_than: float, ids: Collection[str] | None = None) -> Sequence[JobRecord]:
        """Remove deleted jobs permanently; return them, so that their files can be removed.

        Args:
            older_than: seconds since their deletion.
            ids: only these jobs, whenever they were deleted.
        """
        where = "deleted <= ?"
        values: Sequence[str | float] = (time.time() - older_than,)
        if ids is not None:
            where, values = f"deleted IS NOT NULL AND {AMONG}", (listed(ids),)
        with self.database.writing() as connection:
            rows = connection.execute(f"SELECT * FROM jobs WHERE {where} AND unreadable IS NULL", values).fetchall()
            jobs, problems = read_all(rows)
            connection.executemany("DELETE FROM jobs WHERE number = ?", [(number,) for number in jobs])
        self._rows.set_aside(problems)
        return list(jobs.values())


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


def _submitted(connection: sqlite3.Connection, owner: str | None, submission: Submission) -> JobRecord | None:
    row = connection.execute(
        "SELECT digest, job FROM submissions WHERE owner = ? AND key = ?", (owner or "", submission.key)
    ).fetchone()
    if row is None:
        return None
    if row["digest"] != submission.digest:
        raise StoreError("queue.submission_differs")
    job = read_job(connection, row["job"])
    if job.deleted is not None:
        raise StoreError("queue.submission_deleted")
    return job


def _check_admitted(connection: sqlite3.Connection, owner: str | None, admit: Admit, videos: int = 1) -> None:
    """Ask whether an owner may add another video after `videos` - 1 others; see `JobStore.add_once`."""
    source = "FROM jobs WHERE kind = 'video' AND owner IS ?"
    query = f"SELECT count(*) {source} AND state IN ('queued', 'running')"
    (count,) = connection.execute(query, (owner,)).fetchone()
    # Those of the future were added before the clock was set back.
    now = time.time()
    query = f"SELECT created {source} AND created > ? AND created <= ? ORDER BY created"
    times = [row["created"] for row in connection.execute(query, (owner, now - _HOUR_SECONDS, now))]
    others = videos - 1
    admit(int(count) + others, [*times, *[now] * others])


def _video(request: GenerationRequest, plan: ExecutionPlan, owner: str | None) -> dict[str, str | float]:
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
    state: State = "queued",
) -> JobRecord:
    """Add a job to the end of the queue, or one that its instance runs already."""
    now, job_id = time.time(), secrets.token_hex(4)
    columns = {
        "id": job_id,
        "kind": kind,
        **values,
        "state": state,
        "created": now,
        "started": now if state == "running" else None,
        "position": next_position(connection),
    }
    connection.execute(f"INSERT INTO jobs ({', '.join(columns)}) VALUES ({marks(columns)})", tuple(columns.values()))
    return read_job(connection, job_id)


def _edit(connection: sqlite3.Connection, job_id: str, request: GenerationRequest, plan: ExecutionPlan) -> None:
    """Change a queued video; it starts over."""
    add_event(connection, job_id, {"event": "Edited"})
    owner = find_row(connection, job_id)["owner"]
    update_row(connection, job_id, **_video(request, plan, owner), begun=0, result=None)


def _check_resumable(job: JobRecord, *states: State) -> None:
    """Raise `StoreError` unless a job can be resumed, or is in one of `states`."""
    if job.deleted is not None:
        raise StoreError("queue.job_deleted", job=job.id)
    if job.kind == "video" and (job.state in (*RESUMABLE, *states) or job.continues):
        return
    if job.state == "queued":
        raise StoreError("queue.job_queued", job=job.id)
    if job.state == "running":
        raise StoreError("queue.job_running", job=job.id)
    raise StoreError("queue.job_done", job=job.id, video=job.output)
