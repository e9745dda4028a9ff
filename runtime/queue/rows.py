"""SQL of the job store: reads and changes rows inside a transaction of `store`."""

import json
import sqlite3
import time
from collections.abc import Collection, Mapping
from types import EllipsisType
from typing import Any

from runtime.core.errors import StoreError
from runtime.core.events import Failed, TerminalEvent, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.queue.records import RESUMABLE, JobRecord, Kind, State, stored_request

# Running jobs first.
QUEUE = "SELECT * FROM jobs WHERE state IN ('running', 'queued') ORDER BY state = 'queued', position"
NEXT = (
    "SELECT id FROM jobs WHERE state = 'queued' AND NOT held AND (instance IS NULL OR instance = ?) AND kind IN ({}) "
    "ORDER BY position LIMIT 1"
)

_LIKE_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\%_"})


def listing(
    states: Collection[State] | None,
    search: str,
    owner: str | EllipsisType | None,
    kinds: Collection[Kind],
    deleted: bool,
) -> tuple[str, list[Any]]:
    """Return the query for `JobStore.list` and its values, without limit and offset."""
    where = [f"kind IN ({places(kinds)})", f"deleted IS {'NOT ' if deleted else ''}NULL"]
    values: list[Any] = [*kinds]
    if states is not None:
        where.append(f"state IN ({places(states)})")
        values += states
    if not isinstance(owner, EllipsisType):
        where.append("owner IS ?")
        values.append(owner)
    words = search.split()
    if words:
        prompt = " AND ".join(["prompt LIKE ? ESCAPE '\\'"] * len(words))
        where.append(f"(({prompt}) OR id LIKE ? ESCAPE '\\')")
        values += [f"%{word.translate(_LIKE_SPECIAL)}%" for word in words]
        values.append(begins(search.strip()))
    return f"SELECT * FROM jobs WHERE {' AND '.join(where)} ORDER BY number DESC LIMIT ? OFFSET ?", values


def begins(text: str) -> str:
    """Return the LIKE pattern for values that start with `text`."""
    return f"{text.lower().translate(_LIKE_SPECIAL)}%"


def find(connection: sqlite3.Connection, job_id: str) -> sqlite3.Row:
    """Return a job's row.

    Raises:
        StoreError: if there is none.
    """
    row: sqlite3.Row | None = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise unknown(job_id)
    return row


def record(row: sqlite3.Row) -> JobRecord:
    """Return a row as a record."""
    return JobRecord.model_validate(dict(row))


def start(connection: sqlite3.Connection, job_id: str, instance: str) -> JobRecord:
    """Mark a job as running in the process `instance`."""
    change(
        connection,
        job_id,
        state="running",
        held=0,
        asked="",
        instance=instance,
        started=time.time(),
        ended=None,
        failure=None,
        live=None,
    )
    return record(find(connection, job_id))


def deaths(connection: sqlite3.Connection, job_id: str) -> list[dict[str, Any]]:
    """Return the events "WorkerDied" of a job since it was asked for, or asked for again."""
    found = connection.execute("SELECT event FROM events WHERE job = ? ORDER BY n DESC", (job_id,))
    died = []
    for row in found:
        event = json.loads(row["event"])
        if event["event"] in {"QueuedAgain", "Edited"}:
            break
        if event["event"] == "WorkerDied":
            died.append(event)
    return died[::-1]


def video(request: GenerationRequest, plan: ExecutionPlan) -> dict[str, str]:
    """Return the columns that define a video."""
    return {
        "prompt": request.prompt,
        "request": json.dumps(stored_request(request, plan)),
        "plan": plan.model_dump_json(),
        "output": str(plan.output),
    }


def insert(connection: sqlite3.Connection, values: dict[str, Any], *, runs: bool = False) -> JobRecord:
    """Add a job to the end of the queue, or one that its instance is already running."""
    now = time.time()
    values |= {"state": "running" if runs else "queued", "created": now, "started": now if runs else None}
    values["position"] = next_position(connection)
    connection.execute(f"INSERT INTO jobs ({', '.join(values)}) VALUES ({places(values)})", tuple(values.values()))
    return record(find(connection, values["id"]))


def edit(connection: sqlite3.Connection, job_id: str, request: GenerationRequest, plan: ExecutionPlan) -> JobRecord:
    """Change a queued video; it starts over."""
    note(connection, job_id, {"event": "Edited"})
    change(connection, job_id, **video(request, plan), begun=0)
    return record(find(connection, job_id))


def queue_again(connection: sqlite3.Connection, job_id: str) -> JobRecord:
    """Put an ended job at the end of the queue."""
    change(
        connection,
        job_id,
        state="queued",
        held=0,
        asked="",
        instance=None,
        ended=None,
        failure=None,
        position=next_position(connection),
    )
    return record(find(connection, job_id))


def deleted(older_than: float, ids: Collection[str] | None) -> tuple[str, tuple[Any, ...]]:
    """Return the query for `JobStore.purge`, and its values."""
    if ids is None:
        return "SELECT * FROM jobs WHERE deleted <= ?", (time.time() - older_than,)
    return f"SELECT * FROM jobs WHERE deleted IS NOT NULL AND id IN ({places(ids)})", (*ids,)


def end(connection: sqlite3.Connection, job_id: str, event: TerminalEvent) -> None:
    """End a job with its terminal event."""
    state: State = "cancelled"
    result = failure = None
    if isinstance(event, VideoSaved):
        state, result = "done", event.model_dump_json()
    elif isinstance(event, Failed):
        state, failure = "failed", failure_text(event)
    change(connection, job_id, state=state, result=result, failure=failure, held=0, asked="", ended=time.time())


def note(connection: sqlite3.Connection, job_id: str, event: Mapping[str, Any]) -> None:
    """Add an event."""
    connection.execute("INSERT INTO events (job, at, event) VALUES (?, ?, ?)", (job_id, time.time(), json.dumps(event)))


def change(connection: sqlite3.Connection, job_id: str, **values: Any) -> None:
    """Set columns of a job. Names are not escaped: they come from this package only."""
    columns = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), job_id))


def next_position(connection: sqlite3.Connection) -> int:
    """Return the position after all others."""
    (last,) = connection.execute("SELECT coalesce(max(position), 0) FROM jobs").fetchone()
    return int(last) + 1


def places(values: Collection[Any]) -> str:
    """Return a placeholder for each value."""
    return ", ".join("?" * len(values))


def failure_text(failed: Failed) -> str:
    """Return a failure as JSON."""
    return failed.model_dump_json()


def check_resumable(job: JobRecord, *others: State) -> None:
    """Check that a job can be resumed.

    Args:
        others: further states in which it may be.

    Raises:
        StoreError: if it cannot.
    """
    if job.deleted is not None:
        raise StoreError("queue.job_deleted", job=job.id)
    if job.kind == "video" and job.state in (*RESUMABLE, *others):
        return
    if job.state == "queued":
        raise StoreError("queue.job_queued", job=job.id)
    if job.state == "running":
        raise StoreError("queue.job_running", job=job.id)
    raise StoreError("queue.job_done", job=job.id, video=job.output)


def unknown(job_id: str) -> StoreError:
    """Return the error for an unknown job id."""
    return StoreError("queue.no_such_job", job=job_id[:40])


def not_waiting(job_id: str) -> StoreError:
    """Return the error for a job that is no longer queued."""
    return StoreError("queue.job_not_queued", job=job_id)
