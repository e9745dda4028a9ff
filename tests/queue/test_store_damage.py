"""The job store with killed processes, a full disk, a read-only folder, a damaged file, and other versions."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import StoreError
from runtime.core.events import StepDone
from runtime.core.facts import Fact
from runtime.queue import database
from runtime.queue.run import ControlPoller, Run
from runtime.queue.store import JobStore
from tests.full_disk import fill
from tests.queue.samples import add_job, sample_result

ROOT = Path(__file__).parents[2]
KILLS = 16

# Forks a writer for each line of standard input, which adds, claims and ends jobs as fast as it can and prints each
# change after it was made. The next line kills it.
NURSERY = """
import os, random, signal, sys, time
from pathlib import Path
from runtime.core.events import Planned, StepDone
from runtime.queue.records import event_from_json
from runtime.queue.store import JobStore
from tests.full_disk import fill
from tests.queue.samples import add_job, sample_plan, sample_result

def report(*words):
    os.write(1, (" ".join(words) + "\\n").encode())

def write():
    store = JobStore(Path(sys.argv[1]))
    report("opened")
    while True:
        job = add_job(store)
        report("added", job.id)
        claimed = store.order.claim("writer")
        report("claimed", claimed.id)
        step = StepDone(step=1, of=4, seconds=0.1, part="transformer")
        for event in (Planned(plan=sample_plan()), step, sample_result()):
            # SQLite's lock is not fair: on a slow disk the other writer could wait without end.
            time.sleep(random.uniform(0, 0.02))
            store.log.record(claimed.id, event)
            report("recorded", claimed.id, type(event).__name__)

sample_plan()
while sys.stdin.readline():
    child = os.fork()
    if child == 0:
        try:
            write()
        finally:
            report("broke")
            os._exit(1)
    sys.stdin.readline()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    report("killed")
"""


@pytest.fixture
def fast_store() -> None:
    """Write to the disk as the app does."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_acknowledged_changes_survive_kill_9(path: Path) -> None:
    """Two writers are killed at random moments; the store opens each time and has every change that they reported."""
    chosen = random.Random(5)
    command = [sys.executable, "-c", NURSERY, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    reported: list[list[str]] = []
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as two:
        for number in range(KILLS // 2):
            for nursery in (one, two):
                print(file=nursery.stdin, flush=True)
            for nursery in (one, two):
                assert nursery.stdout is not None
                # Some are killed while they open the store.
                lines = chosen.randrange(12) if number % 4 else 0
                for _ in range(lines):
                    reported.append(nursery.stdout.readline().split())
                    assert reported[-1] != ["broke"]
            time.sleep(chosen.uniform(0, 0.02))
            for nursery in (one, two):
                assert nursery.stdout is not None
                print(file=nursery.stdin, flush=True)
                reported += [line.split() for line in iter(nursery.stdout.readline, "killed\n")]
            JobStore(path).close()
        for nursery in (one, two):
            assert nursery.stdin is not None
            nursery.stdin.close()
    reported = [words for words in reported if words != ["opened"]]
    store = JobStore(path)
    assert store.notice is None
    jobs = {job.id: job for job in store.list()}
    events_of = {job_id: [values["event"] for _, _, values in store.log.events(job_id)] for job_id in jobs}
    assert len(reported) > KILLS
    for what, job_id, *name in reported:
        assert job_id in jobs, what
        assert what != "claimed" or jobs[job_id].state != "queued"
        assert set(name) <= set(events_of[job_id])
        assert name != ["VideoSaved"] or jobs[job_id].state == "done"
    for job_id, events in events_of.items():
        assert events == ["Planned", "StepDone", "VideoSaved"][: len(events)]
        assert (jobs[job_id].state == "done") == (len(events) == 3)


def test_a_full_disk_is_reported_and_loses_nothing(small_disk: Path) -> None:
    store = JobStore(small_disk / "jobs.sqlite")
    job = add_job(store, instance="a")
    store.database.check_writable()
    filler = fill(small_disk)
    with pytest.raises(StoreError) as checked:
        store.database.check_writable()
    assert checked.value.code == "queue.store_disk_full"
    kept = [job.id]
    with pytest.raises(StoreError) as error:
        for _ in range(1000):
            kept.append(add_job(store).id)
    assert error.value.code == "queue.store_disk_full"
    assert [one.id for one in store.list()] == kept[::-1]
    with pytest.raises(StoreError) as refused:
        while True:
            store.log.record(job.id, sample_result())
            store.log.record(add_job(store, instance="a").id, sample_result())
    assert refused.value.code == "queue.store_disk_full"
    filler.unlink()
    states = {one.id: one.state for one in store.list()}
    if states[job.id] == "running":
        assert store.log.record(job.id, sample_result())
    assert store.get(job.id).state == "done"
    store.close()
    again = JobStore(small_disk / "jobs.sqlite")
    assert again.notice is None
    assert {one.id for one in again.list()} >= set(kept)


def test_a_preview_on_a_full_disk_leaves_no_part(path: Path, small_disk: Path) -> None:
    store = JobStore(path)
    (path.parent / "jobs").symlink_to(small_disk)
    job = add_job(store, instance="a")
    folder = small_disk / job.id
    folder.mkdir()
    fill(small_disk)
    Run(job, ControlPoller(store)).emit(StepDone(step=1, of=4, seconds=0.1, part="transformer", preview=bytes(9000)))
    assert list(folder.iterdir()) == []
    assert len(store.log.events(job.id)) == 1


def test_a_disk_that_is_full_before_the_store_is_opened_is_reported(small_disk: Path) -> None:
    path = small_disk / "jobs.sqlite"
    store = JobStore(path)
    kept = add_job(store).id
    store.close()
    filler = fill(small_disk)
    with pytest.raises(StoreError) as refused:
        JobStore(path)
    assert refused.value.code == "queue.store_disk_full"
    filler.unlink()
    assert [one.id for one in JobStore(path).list()] == [kept]


def test_a_read_only_folder_is_reported(small_disk: Path) -> None:
    store = JobStore(small_disk / "jobs.sqlite")
    add_job(store)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StoreError) as error:
        JobStore(small_disk / "jobs.sqlite")
    assert error.value.fact == Fact("queue.store_read_only", {"file": small_disk / "jobs.sqlite"})
    assert "TANDEM_CACHE_DIR" in error.value.remedy


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as refused:
        JobStore(tmp_path / "file" / "jobs.sqlite")
    assert refused.value.code == "queue.store_unusable"


def test_a_locked_store_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.1)
    store = JobStore(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError) as error:
        add_job(store)
    assert error.value.code == "queue.store_locked"
    assert store.list() == []  # reading still works
    other.execute("COMMIT")
    other.close()
    assert add_job(store).id


@pytest.mark.parametrize(
    ("version", "code"), [(database.OLDEST + 99, "queue.store_too_new"), (database.OLDEST - 1, "queue.store_too_old")]
)
def test_a_store_of_another_version_is_refused_and_unchanged(version: int, code: str, path: Path) -> None:
    JobStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(StoreError) as error:
        JobStore(path)
    assert (error.value.code, error.value.data["version"]) == (code, version)
    assert [entry.name for entry in path.parent.iterdir()] == ["jobs.sqlite"]


def test_an_older_store_is_migrated_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(path)
    job = add_job(store)
    store.close()

    def add_notes(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE notes (job TEXT)")
        connection.execute("INSERT INTO notes SELECT id FROM jobs")

    newer = (*database.MIGRATIONS, add_notes)
    monkeypatch.setattr(database, "MIGRATIONS", newer)
    for _ in range(2):
        again = JobStore(path)
        assert again.get(job.id) == job
        again.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT job FROM notes").fetchall() == [(job.id,)]
        assert connection.execute("PRAGMA user_version").fetchone() == (database.OLDEST + len(newer) - 1,)
    connection.close()


def test_builds_of_an_older_store_get_their_ranks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = database.MIGRATIONS
    monkeypatch.setattr(database, "MIGRATIONS", newest[:1])
    database.Database(path).close()
    with sqlite3.connect(path) as connection:
        for number, (kind, idle) in enumerate([("build", 1), ("build", 0), ("task", 0)], start=1):
            columns = "id, kind, state, position, request, output, created, idle"
            values = (f"{number:08}", kind, "queued", number, "{}", "/engines", 1.0, idle)
            connection.execute(f"INSERT INTO jobs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    connection.close()
    monkeypatch.setattr(database, "MIGRATIONS", newest)
    jobs = JobStore(path).order.jobs()
    assert [(job.number, job.rank, job.idle) for job in jobs] == [(3, 0, False), (2, 1, False), (1, 2, True)]


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(path)
    job = add_job(store)
    store.close()
    good = database.MIGRATIONS

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE notes (job TEXT)")
        connection.execute("INSERT INTO nowhere VALUES (1)")

    monkeypatch.setattr(database, "MIGRATIONS", (*good, fail))
    with pytest.raises(StoreError):
        JobStore(path)
    monkeypatch.setattr(database, "MIGRATIONS", good)
    assert JobStore(path).get(job.id) == job


def overwritten_start(path: Path) -> None:
    path.write_bytes(b"not a database at all" + path.read_bytes()[21:])


def overwritten_middle(path: Path) -> None:
    """Ruin every page but the first one and some at either end."""
    data = bytearray(path.read_bytes())
    page, middle = 4096, len(data) // 2 // 4096 * 4096
    data[middle : middle + page] = os.urandom(page)
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def emptied(path: Path) -> None:
    path.write_bytes(b"\xff" * 5000)


@pytest.mark.parametrize("harm", [overwritten_start, overwritten_middle, cut_short, emptied])
def test_a_damaged_store_is_kept_as_a_backup_and_a_new_one_is_started(harm: Callable[[Path], None], path: Path) -> None:
    store = JobStore(path)
    jobs = [add_job(store, instance="a") for _ in range(40)]
    for job in jobs:
        store.log.record(job.id, sample_result())
    store.close()
    harm(path)
    damaged = path.read_bytes()
    started = JobStore(path)
    backup = path.with_name("jobs.sqlite.damaged-1")
    assert started.notice == Fact("queue.store_damaged", {"backup": backup})
    assert backup.read_bytes() == damaged
    assert started.list() == []
    new = add_job(started)
    started.close()
    again = JobStore(path)
    assert again.notice is None
    assert [job.id for job in again.list()] == [new.id]
    again.close()
    harm(path)
    assert JobStore(path).notice == Fact("queue.store_damaged", {"backup": path.with_name("jobs.sqlite.damaged-2")})
    assert backup.read_bytes() == damaged


def test_a_removed_store_file_is_reported_and_not_made_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = JobStore(path)
    job = add_job(store, instance="a")
    kept = path.read_bytes()
    for file in path.parent.glob("jobs.sqlite*"):
        file.unlink()
    for use in (lambda: store.log.record(job.id, sample_result()), store.list, lambda: add_job(store)):
        with pytest.raises(StoreError) as error:
            use()
        assert (error.value.code, error.value.data) == ("queue.store_deleted", {"file": str(path)})
    assert not path.exists() and kept
    assert len([record for record in caplog.records if "was deleted" in record.message]) == 1
    # At the next start, or once the user has restored the file.
    assert JobStore(path).get(add_job(store).id)


def test_a_file_that_another_process_replaced_is_opened(path: Path) -> None:
    store = JobStore(path)
    jobs = [add_job(store) for _ in range(3)]
    store.close()
    shutil.copyfile(path, path.with_name("copy"))
    store = JobStore(path)
    path.with_name("copy").replace(path)
    assert [job.id for job in store.list()] == [job.id for job in reversed(jobs)]


def test_a_file_that_cannot_be_opened_for_a_while(path: Path) -> None:
    """It is the same file afterwards."""
    store = JobStore(path)
    job = add_job(store)
    away = path.with_name("away")
    path.rename(away)
    path.mkdir()
    for _ in range(2):
        with pytest.raises(StoreError):
            store.list()
    path.rmdir()
    away.rename(path)
    assert [one.id for one in store.list()] == [job.id]
    store.request_cancel([job.id])
    assert store.get(job.id).state == "cancelled"
