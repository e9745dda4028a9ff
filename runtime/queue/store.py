"""Every job there is or was: one row each, its events beside it, written as it happens.

All changes are short transactions, so that any number of processes may share the store and be killed at any instant.
Order comes from numbers that only rise, never from the clock. Who runs jobs is `worker`'s and the command line's
business, what became of those whose process died is `recovery`'s.
"""

import json
import secrets
import time
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
from runtime.queue.records import KINDS, VIDEOS, JobRecord, Kind, State, Wish, event_to_json


class JobStore:
    """The jobs of one cache folder. Safe between threads and processes.

    Args:
        path: of the file; `None` keeps all in memory, for a folder that cannot be written to.

    Attributes:
        problem: why jobs are lost with this process; `None` if they are stored.

    Raises:
        StoreError: by any method, if the file cannot be read or written; nothing has changed then.
    """

    def __init__(self, path: Path | None, problem: Fact | None = None) -> None:
        self._database = Database(path)
        self.path = path
        self.problem = problem

    @property
    def notice(self) -> Fact | None:
        """What was found wrong with the file when it was opened; `None` if nothing was."""
        return self._database.notice

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def folder(self, job_id: str) -> Path | None:
        """Return where a job's checkpoints and poster are, made when they are written; `None` without a file."""
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
            instance: runs it at once, without a place in the queue.
            job_id: a new one, where something is prepared in the job's folder already.
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
        """Add videos to the end of the queue, all or none; they are one batch if there are several."""
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
        self,
        kind: Kind,
        title: str,
        folder: Path,
        *,
        request: GenerationRequest | None = None,
        part: str | None = None,
        instance: str | None = None,
    ) -> JobRecord:
        """Add work on the engine library in `folder` to the end of the queue.

        Args:
            request: what a build is for; all it takes to do it later, or after a restart.
            part: the one component that a build is for.
            instance: the only process that can do it.
        """
        values = {
            "id": secrets.token_hex(4),
            "kind": kind,
            "title": title,
            "request": json.dumps({} if request is None else request.to_json()),
            "part": part,
            "output": str(folder),
            "instance": instance,
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
        """Return the job whose id begins so; deleted ones are found too.

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
            raise StoreError(f"Several jobs begin with {beginning!r}.", "Give more of the id: `jobs list` shows them.")
        return rows.record(found[0])

    def known(self, ids: Collection[str]) -> set[str]:
        """Return which of these ids are a job's."""
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
        """Return jobs, the newest first.

        Args:
            states: only those in one of them.
            search: only those whose prompt holds every one of these words, or whose id begins with it.
            owner: only whose they are; left out, everybody's.
            deleted: those that were deleted and can still be had back, instead of the others.
            limit: at most so many, after `offset`; below 0 all.
        """
        query, values = rows.listing(states, search, owner, kinds, deleted)
        with self._database.reading() as connection:
            return [rows.record(row) for row in connection.execute(query, (*values, limit, offset))]

    def queue(self) -> Sequence[JobRecord]:
        """Return what runs, then what waits, in order; videos and work on the engine library."""
        with self._database.reading() as connection:
            return [rows.record(row) for row in connection.execute(rows.QUEUE)]

    def events(self, job_id: str, after: int = 0) -> Sequence[tuple[int, float, Mapping[str, Any]]]:
        """Return a job's events after number `after`: each one's number, time, and content."""
        with self._database.reading() as connection:
            told = connection.execute(
                "SELECT n, at, event FROM events WHERE job = ? AND n > ? ORDER BY n", (job_id, after)
            )
            return [(row["n"], row["at"], json.loads(row["event"])) for row in told]

    def record(self, job_id: str, event: Event) -> bool:
        """Note an event of a running job; the plan it begins by and its end move the job as well.

        Returns:
            False, and nothing is noted, if the job does not run: it has ended already.
        """
        # Steps come often and nothing is lost with one: only a power cut could take it.
        with self._database.writing(durable=not isinstance(event, StepDone | FramesDecoded)) as connection:
            if rows.find(connection, job_id)["state"] != "running":
                return False
            rows.note(connection, job_id, event_to_json(event))
            if isinstance(event, Planned):
                rows.change(connection, job_id, plan=event.plan.model_dump_json(), begun=1)
            elif isinstance(event, TerminalEvent):
                rows.end(connection, job_id, event)
            return True

    def finish(self, job_id: str, state: State, fact: Fact) -> None:
        """Note how work on the engine library ended, once."""
        failure = rows.failure_text(Failed(fact=fact)) if state == "failed" else None
        with self._database.writing() as connection:
            if rows.find(connection, job_id)["state"] == "running":
                rows.note(connection, job_id, {"event": "Ended", "state": state, "fact": fact.model_dump()})
                rows.change(connection, job_id, state=state, failure=failure, asked="", ended=time.time())

    def claim(self, instance: str, kinds: Collection[Kind] = KINDS) -> JobRecord | None:
        """Take the next job that waits, and nobody else gets it; `None` if none of these kinds waits."""
        wanted = (instance, *kinds)
        # Whoever finds nothing, several times a second, keeps nobody from writing.
        with self._database.reading() as connection:
            if connection.execute(rows.NEXT.format(rows.places(kinds)), wanted).fetchone() is None:
                return None
        with self._database.writing() as connection:
            row = connection.execute(rows.NEXT.format(rows.places(kinds)), wanted).fetchone()
            return None if row is None else rows.start(connection, row["id"], instance)

    def take(self, job_id: str, instance: str) -> JobRecord:
        """Take up this job again, or out of its turn, past the queue.

        Raises:
            StoreError: if it runs or is done.
        """
        with self._database.writing() as connection:
            rows.check_resumable(rows.record(rows.find(connection, job_id)), "queued")
            return rows.start(connection, job_id, instance)

    def resume(self, job_id: str, changed: tuple[GenerationRequest, ExecutionPlan] | None = None) -> JobRecord:
        """Put a job that ended without a video at the end of the queue.

        Args:
            changed: what it is from then on; by default, what it was.

        Raises:
            StoreError: if it waits, runs or is done.
        """
        with self._database.writing() as connection:
            rows.check_resumable(rows.record(rows.find(connection, job_id)))
            rows.note(connection, job_id, {"event": "QueuedAgain"})
            again = rows.queue_again(connection, job_id)
            return again if changed is None else rows.edit(connection, job_id, *changed)

    def put_back(self, job_id: str) -> None:
        """Let a running job wait again in its old place: held if it was asked to pause, else its process ends."""
        with self._database.writing() as connection:
            row = rows.find(connection, job_id)
            if row["state"] == "running":
                held = row["asked"] == "pause"
                rows.note(connection, job_id, {"event": "PutBack", "held": held})
                rows.change(connection, job_id, state="queued", held=int(held), asked="", instance=None)

    def interrupt(self, job_id: str, instance: str, saved: VideoSaved | None) -> State | None:
        """Note what became of a job whose process `instance` died: it is done if its video is there.

        Returns:
            The state it is in now; `None` if somebody else noted it, or took it up, before.
        """
        with self._database.writing() as connection:
            record = rows.record(rows.find(connection, job_id))
            if record.instance != instance or not record.open:
                return None
            if saved is not None:
                rows.note(connection, job_id, event_to_json(saved))
                rows.end(connection, job_id, saved)
                return "done"
            if record.asked == "cancel" or record.kind == "task":
                rows.note(connection, job_id, event_to_json(Cancelled()))
                rows.end(connection, job_id, Cancelled())
                return "cancelled"
            rows.note(connection, job_id, {"event": "Interrupted"})
            rows.change(connection, job_id, state="interrupted", asked="", ended=time.time())
            return "interrupted"

    def move(self, job_id: str, before: str | None) -> None:
        """Give a waiting job the place before another one, or the last.

        Raises:
            StoreError: if one of them does not wait any more.
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
            # The places stay the same ones, so that jobs which come back to theirs find it.
            for one, position in zip(order, sorted(places.values()), strict=True):
                rows.change(connection, one, position=position)

    def edit(self, job_id: str, request: GenerationRequest, plan: ExecutionPlan) -> JobRecord:
        """Change what a waiting video will be; it keeps its place, and begins anew if it had begun.

        Raises:
            StoreError: if it does not wait any more.
        """
        with self._database.writing() as connection:
            record = rows.record(rows.find(connection, job_id))
            if record.state != "queued" or record.kind != "video":
                raise rows.not_waiting(job_id)
            return rows.edit(connection, job_id, request, plan)

    def hold(self, ids: Iterable[str], held: bool) -> None:
        """Pause jobs, or let them go on: waiting ones are passed over, running ones are asked to stop and wait."""
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
        """Cancel jobs: waiting ones end at once, running ones are asked to; of those that ended nothing is heard."""
        with self._database.writing() as connection:
            for one in ids:
                state = rows.find(connection, one)["state"]
                if state == "queued":
                    rows.note(connection, one, event_to_json(Cancelled()))
                    rows.end(connection, one, Cancelled())
                elif state == "running":
                    rows.change(connection, one, asked="cancel")

    def asked(self, ids: Collection[str]) -> dict[str, Wish]:
        """Return what each of these running jobs was asked for."""
        query = f"SELECT id, asked FROM jobs WHERE state = 'running' AND asked != '' AND id IN ({rows.places(ids)})"
        with self._database.reading() as connection:
            return {row["id"]: row["asked"] for row in connection.execute(query, tuple(ids))}

    def delete(self, job_id: str) -> None:
        """Delete a job, so that it can be had back until it is purged; one that waits is cancelled.

        Raises:
            StoreError: if it runs.
        """
        with self._database.writing() as connection:
            row = rows.find(connection, job_id)
            if row["state"] == "running":
                raise StoreError(f"Job {job_id} runs.", "Cancel it first.")
            if row["state"] == "queued":
                rows.note(connection, job_id, event_to_json(Cancelled()))
                rows.end(connection, job_id, Cancelled())
            if row["deleted"] is None:
                rows.change(connection, job_id, deleted=time.time())

    def undelete(self, job_id: str) -> None:
        """Have a deleted job back."""
        with self._database.writing() as connection:
            rows.find(connection, job_id)
            rows.change(connection, job_id, deleted=None)

    def purge(self, older_than: float, ids: Collection[str] | None = None) -> Sequence[JobRecord]:
        """Remove for good what was deleted more than so many seconds ago; return it, for its files to be removed.

        Args:
            ids: nothing but these, however long ago they were deleted.
        """
        query, values = rows.deleted(older_than, ids)
        with self._database.writing() as connection:
            old = connection.execute(query, values).fetchall()
            connection.executemany("DELETE FROM jobs WHERE id = ?", [(row["id"],) for row in old])
        return [rows.record(row) for row in old]
