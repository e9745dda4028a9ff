"""Rows of the job store: reading and changing them, and setting aside those that cannot be read."""

import json
import logging
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import EllipsisType
from typing import Any, TypedDict

from runtime.core.errors import StoreError
from runtime.queue.database import Database
from runtime.queue.records import VIDEOS, JobRecord, Kind, State, read_row

# One value for any number of ids, see `listed`: a statement of SQLite has at most 32,766.
AMONG = "id IN (SELECT value FROM json_each(?))"
_LIKE_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\%_"})

logger = logging.getLogger(__name__)


class JobFilter(TypedDict, total=False):
    """Which jobs are listed.

    Attributes:
        states: those in one of these states; `None` for any.
        search: those whose prompt contains all of these words, or whose id starts with the text.
        owner: those of this owner; `...` for all owners.
        kinds: by default, videos.
        deleted: deleted jobs that can be restored, instead of the others.
        starred: only starred jobs.
        batches: those of these batches.
    """

    states: Collection[State] | None
    search: str
    owner: str | EllipsisType | None
    kinds: Collection[Kind]
    deleted: bool
    starred: bool
    batches: Collection[str]


def conditions(wanted: JobFilter) -> tuple[str, list[Any]]:
    """Return the condition by which rows match a filter, and its values."""
    kinds, deleted = wanted.get("kinds", VIDEOS), wanted.get("deleted", False)
    where: dict[str, Iterable[Any]] = {
        f"kind IN ({marks(kinds)})": kinds,
        f"deleted IS {'NOT ' if deleted else ''}NULL AND unreadable IS NULL": (),
    }
    if wanted.get("starred", False):
        where["starred"] = ()
    states, owner = wanted.get("states"), wanted.get("owner", ...)
    if states is not None:
        where[f"state IN ({marks(states)})"] = states
    if not isinstance(owner, EllipsisType):
        where["owner IS ?"] = (owner,)
    search = wanted.get("search", "")
    words = search.split()
    if words:
        prompt = " AND ".join(["prompt LIKE ? ESCAPE '\\'"] * len(words))
        patterns = [f"%{word.translate(_LIKE_SPECIAL)}%" for word in words]
        where[f"(({prompt}) OR id LIKE ? ESCAPE '\\')"] = (*patterns, starts_with(search.strip()))
    if "batches" in wanted:
        where[f"batch IN ({marks(wanted['batches'])})"] = wanted["batches"]
    return " AND ".join(where), [*chain.from_iterable(where.values())]


def starts_with(text: str) -> str:
    """Return the pattern of LIKE for ids that start with a text."""
    return f"{text.lower().translate(_LIKE_SPECIAL)}%"


class Rows:
    """The table of jobs in a database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        # Numbers of the rows that were reported in the log.
        self._reported: set[int] = set()

    def records(self, *queries: tuple[str, Sequence[Any]]) -> Sequence[JobRecord]:
        """Return the jobs that queries with their values find; rows that cannot be read are set aside."""
        while True:
            with self.database.reading() as connection:
                rows = [row for query in queries for row in connection.execute(*query)]
            jobs, problems = read_all(rows)
            # Again if rows were set aside: the query may have a limit.
            if not self.set_aside(problems):
                return list(jobs.values())

    def set_aside(self, problems: Mapping[int, StoreError]) -> bool:
        """Mark rows that cannot be read, by number, so that other queries leave them out; return whether any was new.

        In a store that cannot be written they are left out by each query.
        """
        if not problems:
            return False
        self.report(problems)
        with suppress(StoreError), self.database.writing() as connection:
            return mark_unreadable(connection, problems)
        return False

    def report(self, problems: Mapping[int, StoreError]) -> None:
        for number, problem in problems.items():
            if number not in self._reported:
                self._reported.add(number)
                logger.warning("%s It is left out.", problem)


def find_row(connection: sqlite3.Connection, job_id: str) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise StoreError("queue.no_such_job", job=job_id[:40])
    return row


def read_job(connection: sqlite3.Connection, job_id: str) -> JobRecord:
    return read_row(dict(find_row(connection, job_id)))


def read_all(rows: Iterable[sqlite3.Row]) -> tuple[dict[int, JobRecord], dict[int, StoreError]]:
    """Return the jobs in rows, and why the other rows cannot be read, both by number."""
    jobs, problems = {}, {}
    for row in rows:
        try:
            jobs[row["number"]] = read_row(dict(row))
        except StoreError as error:
            problems[row["number"]] = error
    return jobs, problems


def mark_unreadable(connection: sqlite3.Connection, problems: Mapping[int, StoreError]) -> bool:
    """Mark rows that cannot be read, by number; return whether one was not marked before."""
    query = "UPDATE jobs SET unreadable = ? WHERE number = ? AND unreadable IS NULL"
    marks = [(", ".join(problem.data["columns"]), number) for number, problem in problems.items()]
    return connection.executemany(query, marks).rowcount > 0


def update_row(connection: sqlite3.Connection, job_id: str, **values: Any) -> None:
    """Set columns of a job. Names are not escaped: they come from the modules of the store only."""
    columns = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), job_id))


def listed(ids: Collection[str]) -> str:
    """Return ids as the value of `AMONG`."""
    return json.dumps(list(ids))


def marks(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values))
