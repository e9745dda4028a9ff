"""Schema of the job store, and migrations of older files. SQLite's `user_version` holds the version of a file."""

import json
import shlex
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from runtime.core.events import Failed, FellBack, OutOfMemory, Warned
from runtime.core.facts import Fact

Migration = Callable[[sqlite3.Connection], None]

_VERSION_1 = (
    """
    CREATE TABLE jobs (
        number    INTEGER PRIMARY KEY AUTOINCREMENT,
        id        TEXT NOT NULL UNIQUE,
        kind      TEXT NOT NULL CHECK (kind IN ('video', 'build', 'task')),
        title     TEXT NOT NULL DEFAULT '',
        part      TEXT,
        state     TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'failed', 'cancelled', 'interrupted')),
        position  INTEGER NOT NULL,
        held      INTEGER NOT NULL DEFAULT 0,
        asked     TEXT NOT NULL DEFAULT '' CHECK (asked IN ('', 'cancel', 'pause')),
        prompt    TEXT NOT NULL DEFAULT '',
        request   TEXT NOT NULL,
        plan      TEXT,
        begun     INTEGER NOT NULL DEFAULT 0,
        output    TEXT NOT NULL,
        owner     TEXT,
        batch     TEXT,
        parent    TEXT,
        instance  TEXT,
        created   REAL NOT NULL,
        started   REAL,
        ended     REAL,
        deleted   REAL,
        result    TEXT,
        failure   TEXT
    )
    """,
    "CREATE INDEX jobs_by_state ON jobs (state, position)",
    """
    CREATE TABLE events (
        n      INTEGER PRIMARY KEY AUTOINCREMENT,
        job    TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        at     REAL NOT NULL,
        event  TEXT NOT NULL
    )
    """,
    "CREATE INDEX events_by_job ON events (job, n)",
)


def _create(connection: sqlite3.Connection) -> None:
    for statement in _VERSION_1:
        connection.execute(statement)


def _sentences_to_facts(connection: sqlite3.Connection) -> None:
    """Version 2: events and failures hold facts; version 1 held sentences."""
    changed = connection.execute(
        "SELECT n, event FROM events "
        "WHERE json_extract(event, '$.event') IN ('Warned', 'FellBack', 'Failed', 'OutOfMemory')"
    ).fetchall()
    for row in changed:
        event = json.dumps(_event(json.loads(row["event"])))
        connection.execute("UPDATE events SET event = ? WHERE n = ?", (event, row["n"]))
    for row in connection.execute("SELECT number, failure FROM jobs WHERE failure IS NOT NULL").fetchall():
        failure = json.dumps(_event({"event": "Failed", **json.loads(row["failure"])}))
        connection.execute("UPDATE jobs SET failure = ? WHERE number = ?", (failure, row["number"]))


def _event(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of version 1 as one of version 2."""
    new: Warned | FellBack | Failed | OutOfMemory
    if old["event"] == "Warned":
        new = Warned(fact=_text(old["message"]))
    elif old["event"] == "FellBack":
        new = FellBack(component=old["component"], backend=old["backend"], reason=_text(old["reason"]))
    elif old["event"] == "Failed":
        new = Failed(fact=_text(old["what"], old["remedy"]), internal=old["defect"])
    else:
        flags = shlex.split(old["flags"])
        new = OutOfMemory(
            stage=old["stage"],
            component=old["component"],
            memory=old["memory"],
            retried=old["taken"],
            strategy=_text(old["instead"]) if old["instead"] else None,
            changes={name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)},
            slowdown=old["times_as_long"],
            lossless=old["lossless"],
            lost_seconds=old["lost_seconds"],
        )
    return new.model_dump(mode="json")


def _text(what: str, remedy: str = "") -> Fact:
    return Fact("text", {"what": what, "remedy": remedy})


def _worker_processes(connection: sqlite3.Connection) -> None:
    """Version 3: worker processes, the GPUs that they lend each other, and progress that is not kept as events."""
    connection.execute("ALTER TABLE jobs ADD COLUMN live TEXT")
    connection.execute(
        """
        CREATE TABLE workers (
            instance  TEXT PRIMARY KEY,
            app       TEXT NOT NULL,
            gpu       INTEGER NOT NULL,
            pid       INTEGER NOT NULL,
            held      TEXT NOT NULL DEFAULT '{}',
            wanted    INTEGER NOT NULL DEFAULT 0,
            since     REAL NOT NULL DEFAULT 0,
            lent_to   TEXT
        )
        """
    )


# Migration n upgrades a file from version n to n + 1.
MIGRATIONS: tuple[Migration, ...] = (_create, _sentences_to_facts, _worker_processes)
