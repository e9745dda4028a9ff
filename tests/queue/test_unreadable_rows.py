"""Rows of the job store that cannot be read: they are set aside and named, and everything else works."""

import json
import sqlite3
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.core.errors import StoreError
from runtime.core.events import Planned
from runtime.core.facts import Fact, as_text, sentence
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import read_spec
from runtime.queue import database, recovery, storage
from runtime.queue.instances import WorkerRegistry
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import KINDS
from runtime.queue.store import JobStore
from runtime.queue.views import Task
from runtime.ui.panels import Call
from runtime.ui.queue_panel import QueuePanel
from tests.facts import fact
from tests.plans import no_engines
from tests.queue.samples import add_job, sample_plan, sample_result

HARMS: dict[str, tuple[str, Any]] = {
    "broken JSON": ("request", '{"prompt": "a red'),
    "JSON of another type": ("request", "[1, 2]"),
    "nested too deeply": ("request", "[" * 100_000),
    "NULL": ("request", None),
    "a blob": ("output", b"\x00\xff"),
    "not UTF-8": ("title", b"\xff\xfe"),
    "NUL": ("output", "/videos/a\x00b.mp4"),
    "an unknown kind": ("kind", "film"),
    "an unknown request": ("pending_control", "faster"),
    "text for a number": ("created", "yesterday"),
    "a time that does not exist": ("created", 1e300),
    "text for a place": ("position", "first"),
    "an id that is a path": ("id", "../../.."),
    "an instance that is a path": ("instance", "../x"),
    "a failure without a code": ("failure", '{"what": "it broke"}'),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite"


def damage(path: Path, job_id: str, column: str, value: Any) -> None:
    """Write any value into a column of a job, as a damaged disk or another program may."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE name = 'jobs'")
        connection.commit()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        text = isinstance(value, bytes) and value.startswith(b"\xff")
        value_sql = "CAST(? AS TEXT)" if text else "?"
        connection.execute(f"UPDATE jobs SET {column} = {value_sql} WHERE id = ?", (value, job_id))
        connection.commit()


def rows(path: Path) -> list[tuple[Any, ...]]:
    """Return all columns except `unreadable`."""
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = bytes
        found = connection.execute("SELECT * FROM jobs ORDER BY number")
        mark = [column[0] for column in found.description].index("unreadable")
        return [row[:mark] + row[mark + 1 :] for row in found]


@pytest.mark.parametrize("harm", HARMS)
def test_a_row_that_cannot_be_read_is_set_aside(harm: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    column, value = HARMS[harm]
    store = JobStore(path)
    bad, good, ended = add_job(store), add_job(store), add_job(store, instance="a")
    store.log.record(ended.id, sample_result())
    kept = path.parent / "jobs" / bad.id
    kept.mkdir(parents=True)
    damage(path, bad.id, column, value)
    before = rows(path)

    assert [job.id for job in store.order.jobs()] == [good.id]
    assert [job.id for job in store.list(kinds=KINDS, limit=2)] == [ended.id, good.id]
    new = add_job(store)
    assert [job.id for job in store.order.jobs()] == [good.id, new.id]
    claimed = [store.order.claim("a"), store.order.claim("a"), store.order.claim("a")]
    assert [job and job.id for job in claimed] == [good.id, new.id, None]
    assert store.purge(0) == []
    storage.tidy(store, path.parent / "outputs")
    assert kept.is_dir()

    unreadable = store.unreadable
    assert unreadable is not None
    assert unreadable.code == "queue.jobs_unreadable" and unreadable.data["count"] == 1
    assert column in unreadable.data["jobs"][0]
    lines = [line for line in caplog.messages if "is left out" in line]
    assert len(lines) == 1 and column in lines[0]
    # Nothing else of the row has changed.
    number = before[0][0]
    assert [row for row in rows(path) if row[0] == number] == before[:1]


def test_a_queued_row_is_set_aside_when_it_is_claimed_first(path: Path) -> None:
    store = JobStore(path)
    bad, good = add_job(store), add_job(store)
    damage(path, bad.id, *HARMS["broken JSON"])
    job = store.order.claim("a")
    assert job is not None and job.id == good.id
    with pytest.raises(StoreError) as error:
        store.find(bad.id)
    assert error.value.fact == Fact("queue.job_unreadable", {"job": bad.id, "columns": ["request"]})


def test_a_row_that_was_repaired_is_taken_back(path: Path) -> None:
    store = JobStore(path)
    bad = add_job(store)
    damage(path, bad.id, "created", "yesterday")
    assert store.order.jobs() == []
    damage(path, bad.id, "created", bad.created)
    store.check()
    assert store.unreadable is None
    assert store.order.jobs() == [bad]


def test_all_rows_are_checked_one_at_a_time(path: Path) -> None:
    store = JobStore(path)
    jobs = [add_job(store) for _ in range(60)]
    damage(path, jobs[10].id, *HARMS["broken JSON"])
    damage(path, jobs[50].id, *HARMS["an unknown kind"])
    tracemalloc.start()
    try:
        store.check()
        assert tracemalloc.get_traced_memory()[1] < 20 * len(sample_plan().model_dump_json())
    finally:
        tracemalloc.stop()
    assert store.unreadable is not None
    assert store.unreadable.data["jobs"] == [f"{jobs[10].id} (request)", f"{jobs[50].id} (kind)"]


def test_the_app_and_the_command_line_start_and_name_the_row(
    cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cache_dir / "jobs.sqlite"
    store = JobStore(path)
    bad, running, good = add_job(store), add_job(store, instance="dead"), add_job(store)
    damage(path, bad.id, *HARMS["broken JSON"])
    damage(path, running.id, "created", "yesterday")
    spec = read_spec(EMBEDDED / "diorama", "diorama")
    worker = JobQueue(cache_dir / "weights", cache_dir / "outputs", no_engines(cache_dir), None, JobStore(path))
    try:
        assert [job.id for job in worker.store.order.jobs()] == [good.id]
        panel = QueuePanel(worker, {"diorama": spec}, cache_dir / "outputs")
        html = panel.draw(Call("refresh", "", {}, {}, [], {}), {})["list"]
        assert bad.id in html and running.id in html and f'data-key="{good.id}"' in html
        assert f'data-key="{bad.id}"' not in html
    finally:
        worker.close()
    assert run(["jobs", "list", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out.splitlines()[-1])
    assert [job["id"] for job in answer["jobs"]] == [good.id]
    assert answer["unreadable"] == [f"{bad.id} (request)", f"{running.id} (created)"]
    unreadable = fact("queue.jobs_unreadable", count=2, jobs=answer["unreadable"])
    assert f"Note: {as_text(unreadable)}\n" in err and "Traceback" not in err
    # A damaged row has any state: also a list of others names it.
    assert run(["jobs", "list", "--state", "done", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["unreadable"] == answer["unreadable"]
    assert run(["jobs", "show", bad.id]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "event",
    ["{", "[]", '{"event": 5}', '{"no": "event"}', "[" * 100_000, b"\xff", None],
    ids=["broken", "list", "number", "nameless", "deep", "binary", "NULL"],
)
def test_an_event_that_cannot_be_read_is_left_out(
    event: str | bytes | None, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobStore(path)
    job = add_job(store, instance="a")
    store.log.append(job.id, {"event": "TaskLog", "text": "before"})
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE name = 'events'")
        connection.commit()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO events (job, at, event) VALUES (?, 1, ?)", (job.id, event))
        connection.execute('INSERT INTO events (job, at, event) VALUES (?, 1e300, \'{"event": "x"}\')', (job.id,))
        connection.commit()
    store.log.append(job.id, {"event": "TaskLog", "text": "after"})
    for _ in range(2):
        assert [values["text"] for _, _, values in store.log.events(job.id)] == ["before", "after"]
    logged = [record for record in caplog.records if record.name == "runtime.queue.event_log"]
    assert [record.args[0] for record in logged if isinstance(record.args, tuple)] == [job.id] * 2
    recovery.settle_worker(store, "a", Fact("queue.exited", {"how": "exit code 3"}))
    assert store.get(job.id).state == "queued"


def test_a_death_without_details_still_counts(path: Path) -> None:
    store = JobStore(path)
    job = add_job(store, instance="a")
    store.log.append(job.id, {"event": "WorkerDied", "how": "?", "out_of_memory": [], "part": {}})
    (death,) = store.log.deaths(job.id)
    spec = read_spec(EMBEDDED / "diorama", "diorama")
    plan = recovery.avoid_causes(sample_plan(), spec, [death])
    assert [one.code for one in plan.warnings][-1] == "queue.worker_replaced"
    store.log.record(job.id, Planned(plan=plan))
    recovery.settle_worker(store, "a", Fact("queue.exited", {"how": "exit code 3"}))
    assert store.get(job.id).state == "failed"


@pytest.mark.parametrize("live", ["{", "[]", "{}", '{"fact": {"code": 5}, "share": "x"}'])
def test_live_progress_that_cannot_be_read_is_left_out(live: str, path: Path, cache_dir: Path) -> None:
    store = JobStore(cache_dir / "jobs.sqlite")
    build = store.add_work("build", sentence("Build engines"), path.parent, {"kind": "build"})
    assert store.order.claim("a") is not None
    damage(cache_dir / "jobs.sqlite", build.id, "live", live)
    store.log.append(build.id, {"event": "TaskProgress", "fact": "?"})
    store.log.append(build.id, {"event": "TaskFound", "facts": 5})
    task = Task(store.get(build.id), store)
    task.refresh()
    assert (task.state, task.line, task.share) == ("running", "", None)
    assert run(["jobs", "list"]) == 0


def test_a_result_that_cannot_be_read_is_left_out(path: Path) -> None:
    store = JobStore(path)
    job = add_job(store, instance="a")
    store.log.record(job.id, sample_result())
    damage(path, job.id, "result", '{"video": 5}')
    assert store.get(job.id).saved is None
    queue = JobQueue(path.parent, path.parent / "outputs", no_engines(path.parent), None, store)
    try:
        found = queue.job(job.id)
        assert found is not None and found.id == job.id
    finally:
        queue.close()


def test_a_worker_row_that_cannot_be_read_is_left_out(path: Path) -> None:
    store = JobStore(path)
    registry = WorkerRegistry(store.database)
    for gpu in (0, 1):
        registry.register(f"app.{gpu}", gpu)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE workers SET held = '{' WHERE gpu = 0")
        connection.commit()
    assert [one.instance for one in registry.workers("app")] == ["app.1"]


def test_a_row_is_left_out_while_the_store_cannot_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.02)
    store = JobStore(path)
    bad, good = add_job(store), add_job(store)
    damage(path, bad.id, *HARMS["broken JSON"])
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            assert [job.id for job in store.order.jobs()] == [good.id]
    (logged,) = [record for record in caplog.records if record.name == "runtime.queue.rows"]
    assert bad.id in logged.getMessage()
    assert store.unreadable is None
    store.order.jobs()
    assert store.unreadable is not None


def other_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE jobs (name TEXT)")


def no_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 4")


def negative_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = -1")


@pytest.mark.parametrize("make", [other_tables, no_tables, negative_version])
def test_a_database_without_the_tables_of_a_job_store_is_set_aside(make: Callable[[Path], None], path: Path) -> None:
    make(path)
    store = JobStore(path)
    assert store.notice == Fact("queue.store_damaged", {"backup": path.with_name("jobs.sqlite.damaged-1")})
    assert add_job(store).id in {job.id for job in store.list()}
    assert path.with_name("jobs.sqlite.damaged-1").is_file()
