"""The contract of a claimed job: whatever happens to it, all executors do the same with it.

The events that a job emitted are in the store in order, and then its end; a job that can run later is queued again; a
worker that was told to stop is free for the next job.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from runtime.core.errors import StoreError
from runtime.core.events import Cancelled, Event, Failed, StepDone, VideoSaved
from runtime.core.facts import Fact
from runtime.models.spec import ModelSpec
from runtime.queue import database
from runtime.queue.event_log import EventLog
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import JobRecord
from runtime.queue.run import ControlPoller, PutBack, Run, TaskEnded, WorkerLost
from runtime.queue.store import JobStore
from runtime.server.cluster import remote_executor
from runtime.server.cluster.remote_executor import ConnectionLostError
from tests.queue.samples import add_job
from tests.queue.shells import INSTANCE, SHELLS, VIDEO_SHELLS, House, Shell, locked
from tests.queue.test_worker import small
from tests.waiting import until

BUILT = {"backends": {"text_encoder": "onnxruntime"}}


@pytest.fixture(scope="module")
def house(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("house"), tiny("wan2.1"))
    yield made
    made.close()


class Case(NamedTuple):
    """A house with a store of its own for one test."""

    house: House
    store: JobStore
    path: Path

    def add(self, shell: Shell, **fields: object) -> JobRecord:
        return self.house.add(self.store, self.path.parent / "out" / "x.mp4", shell, **fields)

    def names(self, job_id: str) -> list[str]:
        return [values["event"] for _, _, values in self.store.log.events(job_id)]

    def check_free(self) -> None:
        """Check that the node's worker runs nothing any more and takes the next job."""
        assert self.house.connection.node._cancels == {}
        following = self.add("node", seed=2)
        self.house.execute(self.store, following, "node")
        assert self.store.get(following.id).state == "done"


@pytest.fixture
def case(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.02)
    monkeypatch.setattr("runtime.queue.run._RETRY_SECONDS", 0.01)
    (tmp_path / "out").mkdir()
    store = JobStore(tmp_path / "jobs.sqlite")
    house.connection.calls.clear()
    yield Case(house, store, tmp_path / "jobs.sqlite")
    house.connection.at, house.connection.silent, house.connection.damages = lambda _: None, False, False
    store.close()


def moments(shell: Shell) -> list[str]:
    """Return events of a job at which something may happen."""
    return ["TaskProgress"] if shell == "build" else ["Planned", "StepDone", "FramesDecoded"]


def call(act: Callable[[], object], _: Run) -> None:
    act()


def end_of(shell: Shell) -> str:
    return "Ended" if shell == "build" else "VideoSaved"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_job_is_done_and_its_events_are_in_order(case: Case, shell: Shell) -> None:
    run = case.house.execute(case.store, case.add(shell), shell)
    assert case.store.get(run.id).state == "done"
    names = case.names(run.id)
    assert names[-1] == end_of(shell) and names.count(names[-1]) == 1
    if shell == "build":
        assert run.outcome == TaskEnded("done", Fact("task.nothing_to_build"))
    else:
        assert names[0] == "Planned" and names.count("StepDone") == 2
        assert isinstance(run.outcome, VideoSaved) and run.outcome.video == run.record.output
        assert [path.name for path in run.record.output.parent.iterdir()] == ["x.mp4"]
        assert case.store.get(run.id).saved == run.outcome


def test_all_executors_make_the_same_video(case: Case) -> None:
    made = []
    for shell in VIDEO_SHELLS:
        run = case.house.execute(case.store, case.add(shell), shell)
        assert isinstance(run.outcome, VideoSaved)
        made.append((case.names(run.id), run.outcome.plan["components"], run.outcome.request["seed"]))
    worker, command_line, node = made
    assert worker == command_line
    assert [name for name in node[0] if name != "CheckpointSaved"] == [
        name for name in worker[0] if name != "CheckpointSaved"
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_lock_at_each_write_delays_events_and_the_end_but_not_the_work(case: Case, shell: Shell) -> None:
    for moment in moments(shell):
        with locked(case.path) as (lock, unlock):
            record = case.add(shell)
            run = case.house.execute(case.store, record, shell, moment, partial(call, lock), unlock)
        if isinstance(run.outcome, PutBack):  # a node's files are written under the lease
            assert shell == "node" and case.store.get(run.id).state == "queued", moment
            case.house.execute(case.store, case.house.claim(case.store, run.id), shell)
        assert case.store.get(run.id).state == "done", (moment, run.outcome)
        assert case.names(run.id)[-1] == end_of(shell) and moment in case.names(run.id)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_full_disk_of_the_store_loses_no_event(case: Case, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.Event()
    writing = case.store.database.writing

    def sometimes(**values: bool) -> object:
        if full.is_set():
            raise StoreError("queue.store_disk_full", file="jobs.sqlite")
        return writing(**values)

    monkeypatch.setattr(case.store.database, "writing", sometimes)
    moment = moments(shell)[-1]
    run = case.house.execute(case.store, case.add(shell), shell, moment, lambda _: full.set(), full.clear)
    if shell != "node":
        assert case.store.get(run.id).state == "done" and moment in case.names(run.id)


def test_a_worker_is_told_once_of_a_store_that_cannot_be_written(case: Case) -> None:
    events: list[str] = []
    record = case.add("worker")
    run = Run(record, ControlPoller(case.store), listener=lambda event: events.append(event.event))
    with locked(case.path) as (lock, unlock):
        lock()
        for _ in range(3):
            run.emit(Cancelled())  # any event
        unlock()
    assert events.count("Warned") == 1 and not run.written
    assert run.flush() is None and run.written and events.count("Warned") == 1


@pytest.mark.parametrize("shell", SHELLS)
def test_a_cancelled_job_stops_at_each_moment(case: Case, shell: Shell) -> None:
    for moment in moments(shell)[:-1] or moments(shell):
        record = case.add(shell, steps=30, **(BUILT if shell == "build" else {}))

        def cancel(run: Run) -> None:
            case.store.request_cancel([run.id])
            until(lambda: run.cancel.requested)

        run = case.house.execute(case.store, record, shell, moment, cancel)
        assert case.store.get(run.id).state == "cancelled", (moment, run.outcome)
        assert list(record.output.parent.glob("*.mp4")) == []
    if shell == "node":
        case.check_free()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("request_", ["pause", "stop"])
def test_a_paused_job_and_one_of_a_stopping_process_are_queued_again(case: Case, shell: Shell, request_: str) -> None:
    stopping = threading.Event()
    record = case.add(shell, steps=30, **(BUILT if shell == "build" else {}))

    def pause(run: Run) -> None:
        if request_ == "stop" or shell == "build":
            stopping.set()
            run.stop()
        else:
            case.store.hold([run.id], True)
            until(lambda: run.cancel.pausing)

    at = moments(shell)[-2:][0]
    run = case.house.execute(case.store, record, shell, at, pause, stopping=stopping)
    after = case.store.get(run.id)
    assert run.outcome == PutBack()
    assert (after.state, after.held) == ("queued", request_ == "pause" and shell != "build")
    if shell != "build":
        case.store.hold([run.id], False)
        case.house.execute(case.store, case.house.claim(case.store, run.id), shell)
        assert case.store.get(run.id).state == "done" and "Resumed" in case.names(run.id)
        steps = [values["step"] for _, _, values in case.store.log.events(run.id) if values["event"] == "StepDone"]
        assert steps == list(range(1, 31))


@pytest.mark.parametrize("shell", SHELLS)
def test_a_lost_lease_stops_the_job_and_nothing_more_is_written(case: Case, shell: Shell) -> None:
    record = case.add(shell, steps=30, **(BUILT if shell == "build" else {}))

    def lose(run: Run) -> None:
        case.store.put_back(run.id)
        assert case.store.order.claim_job(run.id, "elsewhere.0") is not None

    run = case.house.execute(case.store, record, shell, moments(shell)[-2:][0], lose)
    after = case.store.get(run.id)
    assert run.cancel.requested
    assert (after.state, after.instance, after.lease) == ("running", "elsewhere.0", record.lease + 1)
    assert case.names(run.id)[-1] == "PutBack"
    if shell == "node":
        case.check_free()


def test_a_lease_that_is_lost_while_an_event_is_written_stops_the_job(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, write = case.add("worker", steps=30), EventLog.record

    def lost(log: EventLog, job_id: str, event: Event, lease: int | None = None) -> bool:
        current = write(log, job_id, event, lease)
        if isinstance(event, StepDone) and not run.cancel.requested:
            run.follow(case.store.controls([job_id])[job_id]._replace(lease=record.lease + 1))
        return current

    monkeypatch.setattr(EventLog, "record", lost)
    run = Run(record, ControlPoller(case.store))
    with run:
        for step in (1, 2):
            run.emit(StepDone(step=step, of=30, seconds=0.1, part="transformer"))
    assert run.cancel.requested and run.written


@pytest.mark.parametrize("shell", SHELLS)
def test_a_job_whose_row_is_gone_ends(case: Case, shell: Shell) -> None:
    def remove(run: Run) -> None:
        with case.store.database.writing() as connection:
            connection.execute("DELETE FROM jobs WHERE id = ?", (run.id,))

    run = case.house.execute(case.store, case.add(shell), shell, moments(shell)[0], remove)
    assert run.written and case.store.existing_ids([run.id]) == set()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_job_without_its_model_fails_by_name(case: Case, shell: Shell) -> None:
    record = case.add(shell)
    with case.store.database.writing() as connection:
        request = "json_set(request, '$.model', 'lost')"
        connection.execute(f"UPDATE jobs SET request = {request} WHERE id = ?", (record.id,))
    case.house.execute(case.store, case.store.get(record.id), shell)
    failed = case.store.get(record.id)
    assert failed.state == "failed" and failed.failure is not None
    assert (failed.failure.fact.code, failed.failure.internal) == ("model.unknown", False)


@pytest.mark.parametrize("shell", SHELLS)
def test_an_internal_error_is_the_end_of_the_job(case: Case, shell: Shell) -> None:
    record, poller = case.add(shell), ControlPoller(case.store)
    with pytest.raises(ZeroDivisionError), Run(record, poller):
        raise ZeroDivisionError("on purpose")
    failed = case.store.get(record.id)
    assert failed.state == "failed" and failed.failure is not None
    assert failed.failure.fact.code == "event.internal_error"


def test_an_end_that_cannot_be_stored_as_it_is_fails_the_job(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.queue.recovery.settle_worker", Mock(side_effect=ValueError("unexpected")))
    with Run(case.add("node"), ControlPoller(case.store)) as run:
        run.settle(WorkerLost(Fact("queue.exit_unknown")))
    failed = case.store.get(run.id)
    assert failed.failure is not None and failed.failure.fact.code == "event.internal_error"


def test_the_first_outcome_of_a_job_counts(case: Case) -> None:
    with Run(case.add("worker"), ControlPoller(case.store)) as run:
        run.settle(Cancelled())
        run.settle(PutBack())
    assert run.outcome == Cancelled() and case.store.get(run.id).state == "cancelled"


def test_a_build_that_was_finished_while_the_store_was_locked_is_done(case: Case) -> None:
    """Its worker waits for the store; before, it claimed the next job, and the build ran until the app restarted."""
    with locked(case.path) as (lock, unlock):
        run = case.house.execute(case.store, case.add("build"), "build", "TaskProgress", lambda _: lock(), unlock)
    assert run.outcome == TaskEnded("done", Fact("task.nothing_to_build"))
    assert case.store.get(run.id).state == "done" and case.names(run.id) == ["TaskProgress", "Ended"]


def test_a_job_is_queued_again_if_the_store_is_locked_while_it_is_planned(
    queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue.store.database._connection.execute("PRAGMA busy_timeout = 20")
    deaths = EventLog.deaths
    with locked(tmp_path / "jobs.sqlite") as (lock, unlock):
        locks = [lock]

        def plan(log: EventLog, job_id: str) -> object:
            if locks:
                locks.pop()()
            return deaths(log, job_id)

        monkeypatch.setattr(EventLog, "deaths", plan)
        job = queue.submit(small())
        until(lambda: "It is queued again" in caplog.text)
        assert queue.store.get(job.id).state == "running"
        unlock()
        until(lambda: queue.store.get(job.id).state == "done")
    assert "PutBack" in [values["event"] for _, _, values in queue.store.log.events(job.id)]


def test_reads_do_not_wait_for_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(tmp_path / "jobs.sqlite")
    job = add_job(store)
    store.database._connection.execute("PRAGMA busy_timeout = 60000")
    with locked(tmp_path / "jobs.sqlite") as (lock, unlock):
        lock()
        writer = threading.Thread(target=store.hold, args=([job.id], True))
        writer.start()
        until(lambda: not store.database._lock.acquire(blocking=False))
        assert [one.id for one in store.order.jobs()] == [job.id] and not store.get(job.id).held
        assert writer.is_alive()
        unlock()
        writer.join()
    assert store.get(job.id).held


@pytest.mark.slow
def test_a_video_of_a_node_that_cannot_be_stored_here_stops_there(case: Case) -> None:
    record = case.add("node", steps=200)

    def block(_: Run) -> None:  # the MP4 cannot be written
        record.output.parent.rmdir()
        record.output.parent.write_text("")

    run = case.house.execute(case.store, record, "node", "CheckpointSaved", block)
    assert isinstance(run.outcome, Failed) and run.outcome.fact.code == "video.not_writable", run.outcome
    record.output.parent.unlink()
    record.output.parent.mkdir()
    case.check_free()


@pytest.mark.parametrize("moment", ["CheckpointSaved", "StepDone"])
def test_a_damaged_file_of_a_node_stops_the_job_there(case: Case, moment: str) -> None:
    def damage(_: Run) -> None:
        case.house.connection.damages = True

    run = case.house.execute(case.store, case.add("node", steps=30), "node", moment, damage)
    assert isinstance(run.outcome, Failed) and run.outcome.fact.code == "server.cluster_file_damaged"
    assert "control cancel" in case.house.connection.calls
    case.check_free()


def test_a_store_that_is_locked_while_a_file_arrives_queues_the_job_again(case: Case) -> None:
    record = case.add("node", steps=30)
    with locked(case.path) as (lock, unlock):
        run = case.house.execute(case.store, record, "node", "StepDone", lambda _: lock(), unlock)
    assert run.outcome == PutBack() and case.store.get(run.id).state == "queued"
    assert "control cancel" in case.house.connection.calls
    case.house.execute(case.store, case.house.claim(case.store, run.id), "node")
    assert case.store.get(run.id).state == "done"


@pytest.mark.parametrize("request_", ["cancel", "stop", "silence", "death"])
@pytest.mark.parametrize("method_", ["missing", "receive", "complete"])
def test_requests_and_silence_are_noticed_while_a_model_is_sent(
    case: Case, method_: str, request_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_executor, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(remote_executor, "_SAMPLE_SECONDS", 0.0)
    house = case.house
    seen: list[str] = []
    readme = house.settings.weights_dir / "tiny" / "README.md"
    record = case.add("node")
    stopping = threading.Event()

    def at(method: str) -> None:
        if method != method_ or seen:
            return
        seen.append(method)
        if request_ == "death":
            raise ConnectionLostError
        house.connection.silent = True  # no call is answered from now on
        if request_ == "cancel":
            case.store.request_cancel([record.id])
        elif request_ == "stop":
            stopping.set()

    readme.write_text(f"{method_} {request_}")
    shutil.rmtree(house.folder / "node" / "weights" / "tiny", ignore_errors=True)  # it is sent again
    house.connection.at = at
    if request_ in {"cancel", "stop"}:
        monkeypatch.setattr(remote_executor, "SILENT_SECONDS", 60.0)
    run = house.execute(case.store, record, "node", stopping=stopping)
    assert seen
    after = case.store.get(record.id)
    if request_ == "cancel":
        assert after.state == "cancelled" and run.outcome == Cancelled()
    else:
        assert after.state == "queued"
        died = "WorkerDied" in case.names(record.id)
        assert died == (request_ in {"silence", "death"})


def test_a_cancelled_video_does_not_wait_for_another_that_is_sent(case: Case) -> None:
    record = case.add("node")
    with case.house.sharing:
        case.store.request_cancel([record.id])
        run = case.house.execute(case.store, record, "node")
    assert run.outcome == Cancelled() and case.store.get(record.id).state == "cancelled"


@pytest.mark.parametrize("request_", ["silence", "death"])
def test_a_lost_worker_of_a_node_leaves_its_job_to_the_next(
    case: Case, request_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_executor, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(remote_executor, "_SAMPLE_SECONDS", 0.0)
    record, connection = case.add("node", steps=30), case.house.connection

    def lose(_: Run) -> None:
        if request_ == "silence":
            connection.silent = True
        else:

            def die(_: str) -> None:
                raise ConnectionLostError

            connection.at = die

    run = case.house.execute(case.store, record, "node", "StepDone", lose)
    connection.at, connection.silent = lambda _: None, False
    connection.node.control(record.id, "cancel")  # its process is gone
    (death,) = case.store.log.deaths(run.id)
    assert case.store.get(run.id).state == "queued" and death["begun"]
    assert Fact.model_validate(death["how"]).code == (
        "queue.exit_not_responding" if request_ == "silence" else "queue.exit_unknown"
    )


def test_a_worker_that_followed_a_cancellation_is_not_given_up_later(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, poller = case.house.remote(case.store), ControlPoller(case.store)
    with poller.polling(), Run(case.add("node", steps=200), poller) as run:
        run.cancel.request()
        run.settle(remote.execute(run))
    monkeypatch.setattr(remote_executor, "STOPPING_SECONDS", -1.0)
    remote.look()
    assert run.outcome == Cancelled()


def test_a_worker_that_does_not_follow_a_cancellation_is_given_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_executor, "STOPPING_SECONDS", 0.1)
    record, connection = case.add("node", steps=3), case.house.connection
    monkeypatch.setattr(connection.node, "control", lambda *_: None)

    def cancel(run: Run) -> None:
        case.store.request_cancel([run.id])
        until(lambda: run.cancel.requested)
        connection.silent = True

    run = case.house.execute(case.store, record, "node", "Planned", cancel)
    assert case.store.get(run.id).state == "cancelled"
    assert record.instance == INSTANCE
