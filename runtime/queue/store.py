"""The job store: one row per job, and its events, in SQLite.

All changes are short transactions, so that any number of processes may share the store and be killed at any time. The
order of jobs comes from increasing numbers, never from the clock. Workers and the command line run jobs; `recovery`
handles jobs whose process died.
"""

import json
import logging
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

from runtime.core.errors import StoreError
from runtime.core.events import Cancelled, Event, Failed, FramesDecoded, Planned, StepDone, TerminalEvent, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.queue import rows
from runtime.queue.database import Database
from runtime.queue.process_lock import Instance
from runtime.queue.records import KINDS, VIDEOS, Control, JobRecord, Kind, State, event_to_json

NAME = "jobs.sqlite"

logger = logging.getLogger(__name__)

# State, hold, pending request, and live progress of a job.
Seen = tuple[State, bool, Control, str | None]


class JobStore:
    """The jobs of one cache folder. Safe between threads and processes.

    Args:
        path: of the file; `None` keeps all in memory, for this process alone.
        temporary_folder: removed when the store is closed, for jobs that are not remembered.

    Attributes:
        problem: why jobs are lost with this process; `None` if they are stored.

    Raises:
        StoreError: by any method, if the file cannot be read or written; nothing has changed then.
    """

    def __init__(
        self,
        path: Path | None,
        problem: Fact | None = None,
        temporary_folder: Path | None = None,
    ) -> None:
        self.database = self._database = Database(path)
        self.path = path
        self.problem = problem
        self._remove_folder = (
            None
            if temporary_folder is None
            else weakref.finalize(self, shutil.rmtree, temporary_folder, ignore_errors=True)
        )

    @property
    def temporary(self) -> bool:
        """Whether the jobs are not remembered after this app."""
        return self.path is None or self.problem is not None

    @property
    def notice(self) -> Fact | None:
        """What was found wrong with the file when it was opened; `None` if nothing was."""
        return self._database.notice

    def close(self) -> None:
        """Close the file."""
        self._database.close()
        if self._remove_folder is not None:
            self._remove_folder()

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
        values = {
            "id": job_id or secrets.token_hex(4),
            "kind": "video",
            **rows.video(request, plan),
            "owner": owner,
            "batch": batch,
            "parent": parent,
            "instance": instance,
        }
        with self._database.writing() as connection:
            return rows.insert(connection, values, runs=instance is not None)

    def add_all(
        self, planned: Sequence[tuple[GenerationRequest, ExecutionPlan]], *, owner: str | None = None
    ) -> list[JobRecord]:
        """Add videos to the end of the queue, all or none; several are one batch."""
        batch = secrets.token_hex(4) if len(planned) > 1 else None
        with self._database.writing() as connection:
            return [
                rows.insert(
                    connection,
                    {"id": secrets.token_hex(4), "kind": "video", **rows.video(*one), "owner": owner, "batch": batch},
                )
                for one in planned
            ]

    def add_work(
        self, kind: Kind, title: str, folder: Path, request: Mapping[str, Any], *, part: str | None = None
    ) -> JobRecord:
        """Add work on the engine library in `folder` to the end of the queue.

        Args:
            request: what to do, see `tasks.work_of`.
            part: the only component that a build is for.
        """
        values = {
            "id": secrets.token_hex(4),
            "kind": kind,
            "title": title,
            "request": json.dumps(request),
            "part": part,
            "output": str(folder),
        }
        with self._database.writing() as connection:
            return rows.insert(connection, values)

    def get(self, job_id: str) -> JobRecord:
        """Return one job.

        Raises:
            StoreError: if there is none.
        """
        with self._database.reading() as connection:
            return rows.record(rows.find(connection, job_id))

    def find(self, beginning: str) -> JobRecord:
        """Return the job whose id starts with `beginning`, deleted jobs included.

        Raises:
            StoreError: if there is none, or more than one.
        """
        with self._database.reading() as connection:
            found = connection.execute(
                "SELECT * FROM jobs WHERE kind = 'video' AND id LIKE ? ESCAPE '\\' LIMIT 3",
                (rows.begins(beginning),),
            ).fetchall()
        if not found or not beginning:
            raise rows.unknown(beginning)
        if len(found) > 1:
            raise StoreError("queue.ambiguous_job", beginning=beginning)
        return rows.record(found[0])

    def known(self, ids: Collection[str]) -> set[str]:
        """Return the ids that belong to a job."""
        with self._database.reading() as connection:
            query = f"SELECT id FROM jobs WHERE id IN ({rows.places(ids)})"
            return {row["id"] for row in connection.execute(query, tuple(ids))}

    def list(
        self,
        *,
        states: Collection[State] | None = None,
        search: str = "",
        owner: str | EllipsisType | None = ...,
        kinds: Collection[Kind] = VIDEOS,
        deleted: bool = False,
        limit: int = -1,
        offset: int = 0,
    ) -> Sequence[JobRecord]:
        """Return jobs, newest first.

        Args:
            states: only jobs in one of these states.
            search: only jobs whose prompt contains all of these words, or whose id starts with the text.
            owner: only jobs of this owner; `...` for all owners.
            deleted: deleted jobs that can be restored, instead of the others.
            limit: maximum number, after `offset`; negative for all.
        """
        query, values = rows.listing(states, search, owner, kinds, deleted)
        with self._database.reading() as connection:
            return [rows.record(row) for row in connection.execute(query, (*values, limit, offset))]

    def queue(self) -> Sequence[JobRecord]:
        """Return running and then queued jobs in order: videos, builds and tasks."""
        with self._database.reading() as connection:
            return [rows.record(row) for row in connection.execute(rows.QUEUE)]

    def events(self, job_id: str, after: int = 0) -> Sequence[tuple[int, float, Mapping[str, Any]]]:
        """Return a job's events after number `after`: number, time and JSON."""
        with self._database.reading() as connection:
            found = connection.execute(
                "SELECT n, at, event FROM events WHERE job = ? AND n > ? ORDER BY n", (job_id, after)
            )
            return [(row["n"], row["at"], json.loads(row["event"])) for row in found]

    def record(self, job_id: str, event: Event) -> bool:
        """Store an event of a running job; `Planned` and terminal events also update the job.

        Returns:
            False, and nothing is stored, if the job is not running.
        """
        # Steps are frequent and cheap to lose, so they are not synced: only a power failure could lose one.
        with self._database.writing(durable=not isinstance(event, StepDone | FramesDecoded)) as connection:
            if rows.find(connection, job_id)["state"] != "running":
                return False
            rows.note(connection, job_id, event_to_json(event))
            if isinstance(event, Planned):
                rows.change(connection, job_id, plan=event.plan.model_dump_json(), begun=1)
            elif isinstance(event, TerminalEvent):
                rows.end(connection, job_id, event)
            return True

    def deaths(self, job_id: str) -> Sequence[Mapping[str, Any]]:
        """Return the events "WorkerDied" of a job since it was last asked for."""
        with self._database.reading() as connection:
            return rows.deaths(connection, job_id)

    def finish(self, job_id: str, state: State, fact: Fact) -> None:
        """Note how a running task ended."""
        failure = rows.failure_text(Failed(fact=fact)) if state == "failed" else None
        with self._database.writing() as connection:
            if rows.find(connection, job_id)["state"] == "running":
                rows.note(connection, job_id, {"event": "Ended", "state": state, "fact": fact.model_dump()})
                rows.change(connection, job_id, state=state, failure=failure, asked="", ended=time.time())

    def claim(self, instance: str, kinds: Collection[Kind] = KINDS) -> JobRecord | None:
        """Claim the next queued job for exactly one process; `None` if no job of these kinds is queued."""
        wanted = (instance, *kinds)
        # Polled several times a second: a read does not block writers.
        with self._database.reading() as connection:
            if connection.execute(rows.NEXT.format(rows.places(kinds)), wanted).fetchone() is None:
                return None
        with self._database.writing() as connection:
            row = connection.execute(rows.NEXT.format(rows.places(kinds)), wanted).fetchone()
            return None if row is None else rows.start(connection, row["id"], instance)

    def take(self, job_id: str, instance: str) -> JobRecord:
        """Start this job now, whether it is queued or resumable.

        Raises:
            StoreError: if it is running or done.
        """
        with self._database.writing() as connection:
            rows.check_resumable(rows.record(rows.find(connection, job_id)), "queued")
            return rows.start(connection, job_id, instance)

    def resume(self, job_id: str, changed: tuple[GenerationRequest, ExecutionPlan] | None = None) -> JobRecord:
        """Put a job that ended without a video at the end of the queue.

        Args:
            changed: its new request and plan; unchanged by default.

        Raises:
            StoreError: if it is queued, running or done.
        """
        with self._database.writing() as connection:
            rows.check_resumable(rows.record(rows.find(connection, job_id)))
            rows.note(connection, job_id, {"event": "QueuedAgain"})
            again = rows.queue_again(connection, job_id)
            return again if changed is None else rows.edit(connection, job_id, *changed)

    def put_back(self, job_id: str) -> None:
        """Put a running job back in its place in the queue; held if a pause was requested."""
        with self._database.writing() as connection:
            row = rows.find(connection, job_id)
            if row["state"] == "running":
                held = row["asked"] == "pause"
                rows.note(connection, job_id, {"event": "PutBack", "held": held})
                rows.change(connection, job_id, state="queued", held=int(held), asked="", instance=None)

    def read(self, job_id: str, after: int = 0) -> tuple[JobRecord, Sequence[tuple[int, Mapping[str, Any]]]]:
        """Return a job and its events after number `after`, both of one moment.

        Raises:
            StoreError: if there is no such job.
        """
        with self._database.reading() as connection:
            record = rows.record(rows.find(connection, job_id))
            found = connection.execute(
                "SELECT n, event FROM events WHERE job = ? AND n > ? ORDER BY n", (job_id, after)
            )
            return record, [(row["n"], json.loads(row["event"])) for row in found]

    def show(self, job_id: str, live: Mapping[str, Any]) -> None:
        """Replace what a running job shows of this moment: progress that is too frequent to keep as events."""
        with self._database.writing(durable=False) as connection:
            rows.change(connection, job_id, live=json.dumps(live))

    def note_task(self, task_id: str, event: Mapping[str, Any]) -> None:
        """Add an event to a running task."""
        with self._database.writing(durable=False) as connection:
            rows.note(connection, task_id, event)

    def changes(self, after: int) -> tuple[int, set[str]]:
        """Return the number of the newest event, and the jobs that have events newer than number `after`."""
        with self._database.reading() as connection:
            (last,) = connection.execute("SELECT coalesce(max(n), 0) FROM events").fetchone()
            found = connection.execute("SELECT DISTINCT job FROM events WHERE n > ?", (after,))
            return int(last), {row["job"] for row in found}

    def states(self, ids: Collection[str]) -> dict[str, Seen]:
        """Return state, hold, request and live progress of each of these jobs that exists."""
        query = f"SELECT id, state, held, asked, live FROM jobs WHERE id IN ({rows.places(ids)})"
        with self._database.reading() as connection:
            return {
                row["id"]: (row["state"], bool(row["held"]), row["asked"], row["live"])
                for row in connection.execute(query, tuple(ids))
            }

    def running_on(self, instance: str) -> Sequence[JobRecord]:
        """Return what a worker runs."""
        with self._database.reading() as connection:
            query = "SELECT * FROM jobs WHERE state = 'running' AND instance = ?"
            return [rows.record(row) for row in connection.execute(query, (instance,))]

    def restart(self, job_id: str, instance: str, death: Mapping[str, Any]) -> bool:
        """Put a job whose worker died back in its old place, once: held if it was asked to pause.

        Args:
            death: the event "WorkerDied".

        Returns:
            False, and nothing has changed, if a worker died with it before, or the worker does not run it any more.
        """
        with self._database.writing() as connection:
            row = rows.find(connection, job_id)
            if row["state"] != "running" or row["instance"] != instance or rows.deaths(connection, job_id):
                return False
            rows.note(connection, job_id, death)
            held = int(row["asked"] == "pause")
            rows.change(connection, job_id, state="queued", held=held, asked="", instance=None, live=None)
            return True

    def interrupt(self, job_id: str, instance: str, saved: VideoSaved | None) -> State | None:
        """Update a job whose process `instance` died: done if its video is complete, otherwise interrupted.

        Returns:
            Its new state; `None` if another process was faster.
        """
        with self._database.writing() as connection:
            record = rows.record(rows.find(connection, job_id))
            if record.instance != instance or not record.open:
                return None
            if saved is not None:
                rows.note(connection, job_id, event_to_json(saved))
                rows.end(connection, job_id, saved)
                return "done"
            if record.pending == "cancel" or record.kind == "task":
                rows.note(connection, job_id, event_to_json(Cancelled()))
                rows.end(connection, job_id, Cancelled())
                return "cancelled"
            rows.note(connection, job_id, {"event": "Interrupted"})
            rows.change(connection, job_id, state="interrupted", asked="", ended=time.time())
            return "interrupted"

    def move(self, job_id: str, before: str | None) -> None:
        """Move a queued job before another one, or to the end.

        Raises:
            StoreError: if one of them is no longer queued.
        """
        with self._database.writing() as connection:
            waiting = connection.execute("SELECT id, position FROM jobs WHERE state = 'queued' ORDER BY position")
            places = {row["id"]: row["position"] for row in waiting}
            for one in (job_id, before):
                if one is not None and one not in places:
                    rows.find(connection, one)
                    raise rows.not_waiting(one)
            if job_id == before:
                return
            order = [one for one in places if one != job_id]
            order.insert(len(order) if before is None else order.index(before), job_id)
            # The set of positions stays the same, so that jobs that are put back find theirs.
            for one, position in zip(order, sorted(places.values()), strict=True):
                rows.change(connection, one, position=position)

    def edit(self, job_id: str, request: GenerationRequest, plan: ExecutionPlan) -> JobRecord:
        """Change a queued video; it keeps its place, and starts over if it had started.

        Raises:
            StoreError: if it is no longer queued.
        """
        with self._database.writing() as connection:
            record = rows.record(rows.find(connection, job_id))
            if record.state != "queued" or record.kind != "video":
                raise rows.not_waiting(job_id)
            return rows.edit(connection, job_id, request, plan)

    def hold(self, ids: Iterable[str], held: bool) -> None:
        """Pause or continue jobs: queued ones are skipped while held, running ones stop after their step."""
        with self._database.writing() as connection:
            for one in ids:
                state = rows.find(connection, one)["state"]
                if state == "queued":
                    rows.change(connection, one, held=int(held))
                elif state == "running":
                    connection.execute(
                        "UPDATE jobs SET asked = ? WHERE id = ? AND asked != 'cancel'", ("pause" if held else "", one)
                    )

    def request_cancel(self, ids: Iterable[str]) -> None:
        """Cancel jobs: queued ones end at once, running ones soon; ended ones are ignored."""
        with self._database.writing() as connection:
            for one in ids:
                state = rows.find(connection, one)["state"]
                if state == "queued":
                    rows.note(connection, one, event_to_json(Cancelled()))
                    rows.end(connection, one, Cancelled())
                elif state == "running":
                    rows.change(connection, one, asked="cancel")

    def pending(self, ids: Collection[str]) -> dict[str, Control]:
        """Return the pending pause and cancel requests of these running jobs."""
        query = f"SELECT id, asked FROM jobs WHERE state = 'running' AND asked != '' AND id IN ({rows.places(ids)})"
        with self._database.reading() as connection:
            return {row["id"]: row["asked"] for row in connection.execute(query, tuple(ids))}

    def delete(self, job_id: str) -> None:
        """Delete a job; it can be restored until it is purged. A queued job is cancelled.

        Raises:
            StoreError: if it is running.
        """
        with self._database.writing() as connection:
            row = rows.find(connection, job_id)
            if row["state"] == "running":
                raise StoreError("queue.job_running_delete", job=job_id)
            if row["state"] == "queued":
                rows.note(connection, job_id, event_to_json(Cancelled()))
                rows.end(connection, job_id, Cancelled())
            if row["deleted"] is None:
                rows.change(connection, job_id, deleted=time.time())

    def undelete(self, job_id: str) -> None:
        """Restore a deleted job."""
        with self._database.writing() as connection:
            rows.find(connection, job_id)
            rows.change(connection, job_id, deleted=None)

    def purge(self, older_than: float, ids: Collection[str] | None = None) -> Sequence[JobRecord]:
        """Remove deleted jobs permanently; return them, so that their files can be removed.

        Args:
            older_than: seconds since their deletion.
            ids: only these jobs, whenever they were deleted.
        """
        query, values = rows.deleted(older_than, ids)
        with self._database.writing() as connection:
            old = connection.execute(query, values).fetchall()
            connection.executemany("DELETE FROM jobs WHERE id = ?", [(row["id"],) for row in old])
        return [rows.record(row) for row in old]


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
        try:
            folder = Path(tempfile.mkdtemp(prefix="tandem-jobs-"))
            return JobStore(folder / NAME, problem, folder)
        except (OSError, StoreError):
            return JobStore(None, problem)
