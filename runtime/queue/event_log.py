"""The event log of the job store: what happened in each job, numbered across all jobs, and live progress."""

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from runtime.core.events import (
    Event,
    Failed,
    FramesDecoded,
    FramesFinished,
    Planned,
    StepDone,
    TerminalEvent,
    VideoSaved,
)
from runtime.queue.database import Database
from runtime.queue.records import LAST_SECOND, STARTS_OVER, JobRecord, State, event_to_json, needs_columns, read_death
from runtime.queue.rows import find_row, marks, read_job, update_row

logger = logging.getLogger(__name__)


class EventLog:
    """The events of all jobs. Safe between threads and processes; methods raise `StoreError`.

    Attributes:
        on_end: called in this process with each video whose end it has stored, if that is done or failed.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.on_end: Callable[[str, VideoSaved | Failed], None] = lambda *_: None
        # Numbers of the events that were reported in the log.
        self._reported: set[int] = set()

    def events(self, job_id: str, after: int = 0) -> Sequence[tuple[int, float, Mapping[str, Any]]]:
        """Return a job's events after number `after`: number, seconds since 1970, and JSON with an "event".

        Those that cannot be read are left out.
        """
        with self.database.reading() as connection:
            return self.read_events(connection, job_id, after)

    def read(self, job_id: str, after: int = 0) -> tuple[JobRecord, Sequence[tuple[int, float, Mapping[str, Any]]]]:
        """Return a job and its `events` after number `after`, from one transaction.

        Raises:
            StoreError: if there is no such job.
        """
        with self.database.reading() as connection:
            return read_job(connection, job_id), self.read_events(connection, job_id, after)

    def deaths(self, job_id: str) -> Sequence[Mapping[str, Any]]:
        """Return the deaths of a job's workers since it was submitted, edited or resumed, see `records.Death`."""
        events = [event for _, _, event in self.events(job_id)]
        starts = [index for index, event in enumerate(events) if event["event"] in STARTS_OVER]
        return [read_death(event) for event in events[max(starts, default=0) :] if event["event"] == "WorkerDied"]

    def record(self, job_id: str, event: Event, lease: int | None = None) -> bool:
        """Store an event of a running job; `Planned` and terminal events also update the job.

        Args:
            lease: of the caller, see `JobRecord.lease`; `None` for a caller that needs none.

        Returns:
            False, and nothing is stored, if the job is not running, or was started again since the lease.
        """
        # Steps are frequent and cheap to lose, so they are not synced: only a power failure could lose one.
        frequent = isinstance(event, StepDone | FramesDecoded | FramesFinished)
        with self.database.writing(durable=not frequent) as connection:
            if not is_leased(connection, job_id, lease):
                return False
            if isinstance(event, TerminalEvent):
                end_job(connection, job_id, event)
            else:
                add_event(connection, job_id, event_to_json(event))
            if isinstance(event, Planned):
                owner = find_row(connection, job_id)["owner"]
                update_row(
                    connection,
                    job_id,
                    plan=event.plan.model_dump_json(),
                    begun=1,
                    **needs_columns(owner, event.plan),
                )
        if isinstance(event, VideoSaved | Failed):
            self.on_end(job_id, event)
        return True

    def append(self, task_id: str, event: Mapping[str, Any], lease: int | None = None) -> bool:
        """Add an event to a task.

        Args:
            lease, and returns: see `record`; without a lease, the task need not run.
        """
        with self.database.writing(durable=False) as connection:
            if lease is not None and not is_leased(connection, task_id, lease):
                return False
            add_event(connection, task_id, event)
            return True

    def set_live_progress(self, job_id: str, live: Mapping[str, Any], lease: int | None = None) -> None:
        """Replace the live progress of a running job, which is too frequent to store as events.

        Args:
            lease: see `record`.
        """
        with self.database.writing(durable=False) as connection:
            if lease is None or is_leased(connection, job_id, lease):
                update_row(connection, job_id, live=json.dumps(live))

    def jobs_changed_since(self, after: int) -> tuple[int, set[str]]:
        """Return the number of the newest event, and the jobs that have events newer than number `after`."""
        with self.database.reading() as connection:
            (last,) = connection.execute("SELECT coalesce(max(n), 0) FROM events").fetchone()
            rows = connection.execute("SELECT DISTINCT job FROM events WHERE n > ?", (after,))
            return int(last), {row["job"] for row in rows}

    def events_since(self, after: int, names: Collection[str]) -> tuple[int, Sequence[tuple[str, Mapping[str, Any]]]]:
        """Return the number of the newest event, and the events newer than number `after` with one of these names.

        Each is the id of its job, and JSON with an "event". Those that cannot be read are left out.
        """
        query = (
            "SELECT n, job, at, event FROM events WHERE n > ? "
            "AND CASE WHEN json_valid(event) THEN json_extract(event, '$.event') END "
            f"IN ({marks(names)}) ORDER BY n"
        )
        with self.database.reading() as connection:
            (last,) = connection.execute("SELECT coalesce(max(n), 0) FROM events").fetchone()
            rows = connection.execute(query, (after, *names)).fetchall()
        events = [(row["job"], _read_event(row)) for row in rows]
        return int(last), [(job, values) for job, values in events if values is not None]

    def read_events(
        self, connection: sqlite3.Connection, job_id: str, after: int
    ) -> Sequence[tuple[int, float, Mapping[str, Any]]]:
        query, events = "SELECT n, at, event FROM events WHERE job = ? AND n > ? ORDER BY n", []
        for row in connection.execute(query, (job_id, after)):
            values = _read_event(row)
            if values is not None:
                events.append((row["n"], row["at"], values))
            elif row["n"] not in self._reported:
                self._reported.add(row["n"])
                logger.warning("job %s: event %s cannot be read and is left out", job_id, row["n"])
        return events


def is_leased(connection: sqlite3.Connection, job_id: str, lease: int | None) -> bool:
    """Return whether a job runs, and was not started again since a lease."""
    row = find_row(connection, job_id)
    return bool(row["state"] == "running" and lease in {None, row["lease"]})


def add_event(connection: sqlite3.Connection, job_id: str, event: Mapping[str, Any]) -> None:
    connection.execute("INSERT INTO events (job, at, event) VALUES (?, ?, ?)", (job_id, time.time(), json.dumps(event)))


def end_job(connection: sqlite3.Connection, job_id: str, event: TerminalEvent) -> None:
    """Add the event that a job ends with, and set its columns."""
    add_event(connection, job_id, event_to_json(event))
    state: State = "cancelled"
    failure = None
    # A video that ended early stays the job's result until its continuation has replaced the file.
    result = find_row(connection, job_id)["result"]
    if isinstance(event, VideoSaved):
        state, result = "done", event.model_dump_json()
    elif isinstance(event, Failed):
        state, failure = "failed", event.model_dump_json()
    update_row(
        connection,
        job_id,
        state=state,
        result=result,
        failure=failure,
        held=0,
        pending_control="",
        finish=0,
        ended=time.time(),
    )


def _read_event(row: sqlite3.Row) -> Mapping[str, Any] | None:
    try:
        values = json.loads(row["event"])
    except (ValueError, TypeError, RecursionError):
        return None
    is_event = isinstance(values, dict) and isinstance(values.get("event"), str)
    dated = isinstance(row["at"], int | float) and 0 <= row["at"] <= LAST_SECOND
    return values if is_event and dated else None
