"""The job store: the effect of each method on a job, and refusals."""

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import StoreError
from runtime.core.events import (
    Cancelled,
    Event,
    Failed,
    FellBack,
    FramesDecoded,
    Paused,
    Planned,
    StageStarted,
    StepDone,
    VideoSaved,
    Warned,
)
from runtime.core.facts import Fact, sentence
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import EMBEDDED, look_up
from runtime.models.registry import read_spec
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue import records
from runtime.queue import store as store_module
from runtime.queue.records import Ahead, BuildEngines, DeleteEngine, JobRecord, Needs, State, work_of
from runtime.queue.store import JobStore, RecentEnd
from runtime.queue.views import Job
from tests.plans import GIB, gpu, machine, tiny_plan
from tests.queue.samples import add_job, requests, sample_plan, sample_request, sample_result


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.sqlite")


def ids(jobs: object) -> list[str]:
    return [job.id for job in jobs]  # type: ignore[attr-defined]


def test_a_job_is_read_as_it_was_added(store: JobStore, tmp_path: Path) -> None:
    request, plan = sample_request(prompt="Ein “rotes” Boot\nbei 100 % Wind", steps=3), sample_plan(seed=11)
    made = store.add(request, plan, owner="guest", batch="b")
    again = JobStore(tmp_path / "jobs.sqlite").get(made.id)
    assert again == made
    assert again.generation_request() == request.replace(seed=11)
    assert again.plan == plan
    assert (again.state, again.held, again.owner, again.batch) == ("queued", False, "guest", "b")
    assert (again.output, again.result, again.failure, again.begun) == (plan.output, None, None, False)


def test_what_a_stopped_video_still_takes(store: JobStore, subtests: pytest.Subtests) -> None:
    """Steps that were done are not repeated; what came before the first one is."""
    plan = sample_plan()
    whole = plan.seconds["total"].likely
    loading: list[Event] = [Planned(plan=plan), StageStarted(stage="load", part="transformer")]
    steps: list[Event] = [StepDone(step=n, of=4, seconds=1.0, part="transformer") for n in (1, 2)]
    cases: list[tuple[str, list[Event], State, Callable[[Job], float | None]]] = [
        ("never started", [], "queued", lambda _: whole),
        ("stopped while loading", [*loading, Paused(step=0, of=4)], "queued", lambda _: whole),
        (
            "stopped after two steps",
            [*loading, *steps, Paused(step=2, of=4)],
            "queued",
            lambda job: whole * (1 - job.share),
        ),
        ("interrupted after two steps", [*loading, *steps], "interrupted", lambda job: whole * (1 - job.share)),
        ("running", [*loading, *steps], "running", lambda job: job.progress.at(time.monotonic()).seconds_left),
        ("failed", [*loading, *steps, Failed(fact=sentence("x"))], "failed", lambda _: 0.0),
    ]
    for name, events, state, expected in cases:
        with subtests.test(name):
            job = Job(add_job(store), plan, "", store)
            job.state = state
            for event in events:
                job.progress = job.progress.after(event, time.monotonic())
            assert job.seconds_left == pytest.approx(expected(job), rel=0.05)
    assert 0 < job.share < 1


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_plan_is_read_as_it_was_stored(on_gpu: bool, tmp_path: Path) -> None:
    from runtime.planner.resolve import resolve

    spec = read_spec(EMBEDDED / "diorama", "diorama")
    on = machine(gpu=gpu(free_gib=1), torch_cuda="13.0") if on_gpu else machine()
    plan = resolve(sample_request(), spec, PlanningContext(on, tmp_path / "a.mp4"))
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"prompt": 1}', "null", "{"])
def test_a_plan_of_another_version_is_none(text: str, store: JobStore) -> None:
    record = store.add(sample_request(), sample_plan())
    assert record.plan == sample_plan()
    assert record.replace(plan_json=text).plan is None


EVENTS: list[Event] = [
    Planned(plan=sample_plan()),
    StageStarted(stage="load", part="vae"),
    FellBack(component="vae", backend="inductor", reason=Fact("execution.engine_not_finite")),
    StepDone(step=1, of=4, seconds=0.5, part="transformer", preview=b"webp"),
    FramesDecoded(frames=1, of=9),
    Warned(fact=Fact("pipeline.text_cut", {"field": "prompt"})),
]


def test_events_are_read_in_order_from_a_number_on(store: JobStore) -> None:
    job = add_job(store, instance="cli")
    assert all(store.log.record(job.id, event) for event in EVENTS)
    kept = store.log.events(job.id)
    assert [values["event"] for _, _, values in kept] == [type(event).__name__ for event in EVENTS]
    assert store.log.events(job.id, kept[3][0]) == kept[4:]
    job = store.get(job.id)
    assert job.begun
    again = [records.event_from_json(values, job) for _, _, values in kept]
    assert again == [
        event.model_copy(update={"preview": None}) if isinstance(event, StepDone) else event for event in EVENTS
    ]
    assert records.event_from_json({"event": "Interrupted"}, job) is None
    assert records.event_from_json({"event": "Warned", "new": 1}, job) is None


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (sample_result(), "done"),
        (Failed(fact=Fact("pipeline.out_of_memory", {"memory": "RAM"}), internal=True), "failed"),
        (Cancelled(), "cancelled"),
    ],
)
def test_a_job_ends_once(event: Event, state: str, store: JobStore) -> None:
    job = add_job(store, instance="cli")
    assert store.log.record(job.id, event)
    ended = store.get(job.id)
    assert ended.state == state
    assert ended.saved == (event if isinstance(event, VideoSaved) else None)
    assert ended.failure == (event if isinstance(event, Failed) else None)
    assert ended.ended is not None
    assert ended.resumable == (state != "done")
    for second in (
        sample_result(),
        Failed(fact=Fact("queue.store_locked")),
        Cancelled(),
        Warned(fact=Fact("pipeline.text_cut", {"field": "prompt"})),
    ):
        assert not store.log.record(job.id, second)
    assert store.get(job.id) == ended
    assert len(store.log.events(job.id)) == 1


def test_a_started_job_keeps_its_plan(store: JobStore) -> None:
    job = add_job(store, instance="cli")
    store.log.record(job.id, Planned(plan=sample_plan(steps=9)))
    assert store.get(job.id).plan == sample_plan(steps=9)


def test_jobs_are_claimed_in_order_and_once(store: JobStore, tmp_path: Path) -> None:
    first, second, third = (add_job(store) for _ in range(3))
    other = JobStore(tmp_path / "jobs.sqlite")
    store.hold([first.id], True)
    one, two = store.order.claim("a"), other.order.claim("b")
    assert one is not None and two is not None
    assert (one.id, one.state, one.instance, two.id, two.instance) == (second.id, "running", "a", third.id, "b")
    assert store.order.claim("a") is None
    other.hold([first.id], False)
    last = store.order.claim("a")
    assert last is not None and last.id == first.id
    assert ids(store.order.jobs()) == [first.id, second.id, third.id]


def test_simultaneous_claims_return_each_job_once(store: JobStore, tmp_path: Path) -> None:
    made = [add_job(store) for _ in range(60)]
    taken: list[list[str]] = [[], [], []]

    def claim(into: list[str]) -> None:
        own = JobStore(tmp_path / "jobs.sqlite")
        while (job := own.order.claim("one of them")) is not None:
            into.append(job.id)

    with ThreadPoolExecutor() as threads:
        list(threads.map(claim, taken))  # raises errors of the threads
    assert sorted(one for each in taken for one in each) == sorted(ids(made))
    assert all(each == [one for one in ids(made) if one in each] for each in taken)


def test_a_task_is_claimed_by_a_worker_for_tasks(store: JobStore, tmp_path: Path) -> None:
    work = DeleteEngine(engine="0" * 16)
    task = store.add_work("task", sentence("Delete it"), tmp_path, work.model_dump(mode="json"))
    build = store.add_work("build", sentence("Build it"), tmp_path, sample_request().to_json(), part="vae")
    video = add_job(store)
    assert ids(store.order.jobs()) == [task.id, video.id, build.id]
    other = store.order.claim("a.1", records.VIDEOS)
    assert other is not None and other.id == video.id
    assert store.order.claim("a.1", records.VIDEOS) is None
    claimed = [store.order.claim("a.0"), store.order.claim("a.0")]
    assert [one and one.id for one in claimed] == [task.id, build.id]
    assert store.order.claim("a.0") is None
    assert work_of(task) == work
    found = work_of(build)
    assert isinstance(found, BuildEngines)
    assert (found.request, found.component) == (build.request, "vae")
    assert (build.part, build.generation_request(), build.title) == ("vae", sample_request(), "Build it")
    missing = Fact("engine.no_compiler")
    store.finish(build.id, "failed", missing)
    store.finish(build.id, "done", Fact("engine.built"))
    assert store.get(build.id).failure == Failed(fact=missing)
    assert ids(store.list()) == [video.id]
    assert ids(store.list(kinds=["build"])) == [build.id]


def test_a_running_job_is_not_queued(store: JobStore) -> None:
    """What the command line runs itself is never claimed by an app."""
    job = add_job(store, instance="cli")
    assert job.state == "running"
    assert store.order.claim("app") is None


@pytest.mark.parametrize(
    ("moved", "before", "order"),
    [
        (0, None, "1230"),
        (3, 0, "3012"),
        (3, 1, "0312"),
        (1, 3, "0213"),
        (2, 2, "0123"),
        (0, 1, "0123"),
        (3, None, "0123"),
    ],
)
def test_a_queued_job_is_moved(moved: int, before: int | None, order: str, store: JobStore) -> None:
    jobs = [add_job(store) for _ in range(4)]
    store.order.move(jobs[moved].id, None if before is None else jobs[before].id)
    assert ids(store.order.jobs()) == [jobs[int(place)].id for place in order]


def test_a_paused_job_keeps_its_place(store: JobStore) -> None:
    jobs = [add_job(store) for _ in range(3)]
    claimed = store.order.claim("a")
    assert claimed is not None
    store.hold([claimed.id], True)
    assert requests(store, claimed.id) == {claimed.id: "pause"}
    store.order.move(jobs[2].id, jobs[1].id)
    store.put_back(claimed.id)
    assert ids(store.order.jobs()) == [jobs[0].id, jobs[2].id, jobs[1].id]
    assert (store.get(claimed.id).held, requests(store, claimed.id)) == (True, {})
    following = store.order.claim("a")
    assert following is not None and following.id == jobs[2].id


def test_a_pause_is_withdrawn_and_does_not_replace_a_cancel(store: JobStore) -> None:
    job = add_job(store, instance="a")
    store.hold([job.id], True)
    store.hold([job.id], False)
    assert requests(store, job.id) == {}
    store.request_cancel([job.id])
    store.hold([job.id], True)
    assert requests(store, job.id) == {job.id: "cancel"}


def test_queued_and_running_jobs_are_cancelled(store: JobStore) -> None:
    waiting, running, done = add_job(store), add_job(store, instance="a"), add_job(store, instance="a")
    store.log.record(done.id, sample_result())
    store.request_cancel([waiting.id, running.id, done.id])
    store.request_cancel([waiting.id])
    assert [store.get(one.id).state for one in (waiting, running, done)] == ["cancelled", "running", "done"]
    assert requests(store, running.id, done.id) == {running.id: "cancel"}
    assert [values["event"] for _, _, values in store.log.events(waiting.id)] == ["Cancelled"]


def test_an_edited_job_keeps_its_place(store: JobStore) -> None:
    first, second = add_job(store), add_job(store)
    edited = store.edit(first.id, sample_request(prompt="a blue kite"), sample_plan(seed=5))
    assert (edited.prompt, edited.request["seed"], edited.plan) == ("a blue kite", 5, sample_plan(seed=5))
    assert ids(store.order.jobs()) == [first.id, second.id]
    assert ids(store.list(search="kite")) == [first.id]


def test_ended_jobs_are_resumed(store: JobStore) -> None:
    job, waiting = add_job(store, instance="dead"), add_job(store)
    store.log.record(job.id, Planned(plan=sample_plan(seed=3)))
    assert store.interrupt(job.id, "dead", None) == "interrupted"
    assert store.interrupt(job.id, "dead", None) is None
    assert store.get(job.id).resumable
    again = store.resume(job.id)
    assert (again.state, again.begun, again.ended) == ("queued", True, None)
    assert ids(store.order.jobs()) == [waiting.id, job.id]
    taken = store.start(job.id, "cli")
    assert (taken.state, taken.instance, taken.plan) == ("running", "cli", sample_plan(seed=3))


@pytest.mark.parametrize(
    ("event", "asked_to", "state"),
    [
        (None, "", "interrupted"),
        (None, "pause", "interrupted"),
        (None, "cancel", "cancelled"),
        (sample_result(), "cancel", "done"),
    ],
)
def test_state_of_a_job_whose_process_died(
    event: VideoSaved | None, asked_to: str, state: str, store: JobStore
) -> None:
    job = add_job(store, instance="dead")
    if asked_to == "cancel":
        store.request_cancel([job.id])
    store.hold([job.id], asked_to == "pause")
    assert store.interrupt(job.id, "alive", event) is None
    assert store.interrupt(job.id, "dead", event) == state
    assert store.get(job.id).saved == event


def queued(store: JobStore) -> JobRecord:
    return add_job(store)


def running(store: JobStore) -> JobRecord:
    return add_job(store, instance="a")


def done(store: JobStore) -> JobRecord:
    job = running(store)
    store.log.record(job.id, sample_result())
    return job


def deleted(store: JobStore) -> JobRecord:
    job = queued(store)
    store.delete(job.id)
    return job


def unknown(store: JobStore) -> JobRecord:
    return queued(store).replace(id="ffffffff")


@pytest.mark.parametrize(
    ("state", "call", "code"),
    [
        (unknown, JobStore.get, "queue.no_such_job"),
        (unknown, JobStore.delete, "queue.no_such_job"),
        (unknown, JobStore.resume, "queue.no_such_job"),
        (unknown, lambda store, one: store.request_cancel([one]), "queue.no_such_job"),
        (unknown, lambda store, one: store.order.move(one, None), "queue.no_such_job"),
        (queued, lambda store, one: store.order.move(one, "ffffffff"), "queue.no_such_job"),
        (running, JobStore.delete, "queue.job_running_delete"),
        (running, lambda store, one: store.order.move(one, None), "queue.job_not_queued"),
        (running, lambda store, one: store.edit(one, sample_request(), sample_plan()), "queue.job_not_queued"),
        (running, JobStore.resume, "queue.job_running"),
        (queued, JobStore.resume, "queue.job_queued"),
        (done, JobStore.resume, "queue.job_done"),
        (done, lambda store, one: store.start(one, "a"), "queue.job_done"),
        (deleted, JobStore.resume, "queue.job_deleted"),
        (deleted, lambda store, one: store.start(one, "a"), "queue.job_deleted"),
        (queued, lambda store, one: store.find(""), "queue.no_such_job"),
        (queued, lambda store, one: store.find("%"), "queue.no_such_job"),
    ],
)
def test_refusals_change_nothing(
    state: Callable[[JobStore], JobRecord], call: Callable[[JobStore, str], object], code: str, store: JobStore
) -> None:
    job = state(store)
    before = store.list(), store.list(deleted=True)
    with pytest.raises(StoreError) as error:
        call(store, job.id)
    assert error.value.code == code
    assert error.value.remedy
    assert (store.list(), store.list(deleted=True)) == before


def test_jobs_are_found_by_the_start_of_their_id(store: JobStore) -> None:
    made = [add_job(store) for _ in range(40)]
    assert store.find(made[0].id) == made[0]
    beginnings = [job.id[0] for job in made]
    shared = next(letter for letter in beginnings if beginnings.count(letter) > 1)
    with pytest.raises(StoreError) as error:
        store.find(shared)
    assert error.value.code == "queue.ambiguous_job"
    assert store.find(made[7].id.upper()) == made[7]


def test_jobs_are_listed_by_state_text_and_owner(store: JobStore) -> None:
    boat, kite, rain = (add_job(store, prompt=words) for words in ("a red boat", "a kite at 100%", "rain_drops"))
    store.add(sample_request(prompt="a guest's boat"), sample_plan(), owner="guest")
    store.request_cancel([kite.id])
    assert ids(store.list(owner=None)) == [rain.id, kite.id, boat.id]
    assert len(store.list()) == 4
    assert ids(store.list(owner=None, limit=1, offset=1)) == [kite.id]
    assert ids(store.list(states=["cancelled"])) == [kite.id]
    assert store.list(states=[]) == []
    for search, found in (
        ("BOAT red", [boat]),
        ("100%", [kite]),
        ("n_d", [rain]),
        ("_", [rain]),
        ("\\", []),
        (kite.id[:7], [kite]),
        ("   ", [rain, kite, boat]),
        ("boat' OR 1=1 --", []),
    ):
        assert ids(store.list(owner=None, search=search)) == [job.id for job in found], search


def test_a_deleted_job_is_restored_until_it_is_purged(store: JobStore) -> None:
    gone, kept = add_job(store), add_job(store)
    store.delete(gone.id)
    assert store.get(gone.id).state == "cancelled"
    assert ids(store.list()) == [kept.id]
    assert ids(store.list(deleted=True)) == [gone.id]
    assert store.order.claim("a") is not None and store.order.claim("a") is None
    store.undelete(gone.id)
    assert ids(store.list()) == [kept.id, gone.id]
    store.delete(gone.id)
    assert store.purge(older_than=60) == []
    assert ids(store.purge(older_than=-1)) == [gone.id]
    assert store.log.events(gone.id) == []
    with pytest.raises(StoreError):
        store.get(gone.id)


def test_a_clock_moved_back_changes_no_order(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for hours in (0, -1, -48, 3):
        monkeypatch.setattr(time, "time", lambda at=1e9 + 3600 * hours: at)
        made.append(add_job(store))
    assert ids(store.order.jobs()) == ids(made)
    assert ids(store.list()) == ids(reversed(made))
    claimed = store.order.claim("a")
    assert claimed is not None and claimed.id == made[0].id
    store.log.record(claimed.id, sample_result())
    store.delete(claimed.id)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert store.purge(older_than=60) == []
    assert ids(store.list(deleted=True)) == [claimed.id]


def test_a_store_in_memory_has_no_folders(tmp_path: Path) -> None:
    store = JobStore(None)
    job = add_job(store)
    assert store.order.claim("a") == store.get(job.id)
    assert store.log.record(job.id, sample_result())
    assert store.get(job.id).state == "done"
    assert store.folder(job.id) is None
    assert list(tmp_path.iterdir()) == []


def test_the_videos_of_a_batch_with_one_prompt_are_a_group(store: JobStore) -> None:
    prompts = ("a red boat", "a red boat", "a kite", "a red boat")
    batch = store.add_all([(sample_request(prompt=prompt), sample_plan(seed=n)) for n, prompt in enumerate(prompts)])
    alone = store.add(sample_request(prompt="a red boat"), sample_plan())
    first, second, kite, third = batch
    assert first.group is not None and first.group == third.group and kite.group != first.group
    assert alone.group is None
    store.star([second.id], True)
    groups = {first.group: {first.id: False, second.id: True, third.id: False}, kite.group: {kite.id: False}}
    assert store.groups([group for group in groups if group]) == groups and store.groups([]) == {}
    assert ids(store.list(batches=[first.batch or ""])) == ids(reversed(batch))
    # Of a group, lists show the newest that matches; deleted ones are in no group.
    assert ids(store.list(stacked=True)) == ids([alone, third, kite])
    assert ids(store.list(stacked=True, limit=1, offset=1)) == ids([third])
    assert ids(store.list(stacked=True, starred=True)) == ids([second])
    assert ids(store.list(stacked=True, search=first.id)) == ids([first])
    assert ids(store.list(stacked=True, states=["done"])) == []
    store.delete(third.id)
    assert ids(store.list(stacked=True)) == ids([alone, kite, second])
    assert list(store.groups([first.group])[first.group]) == ids([first, second])
    assert ids(store.list(stacked=True, deleted=True)) == ids([third])


def test_the_plan_must_be_for_the_request(store: JobStore, tmp_path: Path) -> None:
    spec = read_spec(EMBEDDED / "diorama", "diorama")
    assert tiny_plan(spec, tmp_path / "a.mp4").model == sample_request().model
    with pytest.raises(AssertionError):
        store.add(sample_request(), sample_plan().replace(model="another"))
    assert store.list() == []


def test_adding_a_batch_and_resuming_with_changes_are_atomic(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(sample_request(prompt=f"boat {number}"), sample_plan(seed=number)) for number in range(3)]
    batch = store.add_all(made)
    assert [one.prompt for one in store.order.jobs()] == ["boat 0", "boat 1", "boat 2"]
    assert len({one.batch for one in batch}) == 1 and batch[0].batch
    assert store.add_all(made[:1])[0].batch is None
    store.request_cancel([batch[0].id])
    before = store.get(batch[0].id)
    there = ids(store.list())

    def full(*_: object) -> dict[str, str | float]:
        raise sqlite3.OperationalError("database or disk is full")

    def third(request: GenerationRequest, plan: ExecutionPlan, owner: str | None) -> dict[str, str | float]:
        return full() if request.prompt == "boat 2" else columns(request, plan, owner)

    columns = store_module._video
    monkeypatch.setattr(store_module, "_video", third)
    with pytest.raises(StoreError) as refused:
        store.add_all(made)
    assert refused.value.code == "queue.store_disk_full"
    assert ids(store.list()) == there
    monkeypatch.setattr(store_module, "_video", full)
    with pytest.raises(StoreError) as refused:
        store.resume(before.id, made[1])
    assert refused.value.code == "queue.store_disk_full"
    assert store.get(before.id) == before
    monkeypatch.undo()
    again = store.resume(before.id, made[1])
    assert (again.state, again.prompt, again.held) == ("queued", "boat 1", False)
    assert store.order.jobs()[-1].id == before.id


def test_a_clock_that_was_set_back_does_not_use_up_an_hour(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    seen: list[int] = []

    def admit(_count: int, times: Sequence[float]) -> None:
        seen.append(len(times))

    for at in (now, now + 1, now - 86_400, now - 86_399, now + 2):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        store.add_once(sample_request(), sample_plan(), owner="ann", admit=admit)
    assert seen == [0, 1, 0, 1, 2]


def trace(store: JobStore, callback: Callable[[str], object] | None) -> None:
    """Have a function called with each statement of the connections for reading and writing."""
    for transaction in (store.database.reading, store.database.writing):
        with transaction() as connection:
            connection.set_trace_callback(callback)


def test_queries_of_each_request_and_claim_do_not_read_all_jobs(store: JobStore) -> None:
    def admit(_count: int, _times: object) -> None:
        pass

    queries: list[str] = []
    trace(store, queries.append)
    for owner in ("ann", None):
        store.add_once(sample_request(), sample_plan(), owner=owner, admit=admit)
        job = store.order.claim("app.0")
        assert job is not None
        store.log.record(job.id, StepDone(step=1, of=4, seconds=1.0, part="transformer"))
        store.log.read(job.id)
        requests(store, job.id)
        store.running_on("app.0")
        store.list(owner=owner, limit=20, after=9)
    trace(store, None)
    with store.database.reading() as connection:
        reads = [query for query in queries if query.startswith(("SELECT", "UPDATE")) and " jobs" in query]
        steps = [row["detail"] for query in reads for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert len(reads) > 20
    assert not [step for step in steps if step.startswith("SCAN jobs")]


def test_what_pages_ask_of_a_long_queue_is_read_from_indexes(store: JobStore) -> None:
    """Else each poll of a page would read the plans of thousands of jobs."""
    jobs = [add_job(store) for _ in range(4)]
    queries: list[str] = []
    trace(store, queries.append)
    for owner in (None, "ann", ...):
        store.order.jobs(owner=owner, kinds=["video"], paused=False, limit=2)
        store.order.ids(owner=owner, limit=2)
        store.order.line(owner)
        store.order.seconds(2, owner)
    store.order.jobs(states=["running"])
    store.order.owners("app-")
    store.ended_since(60.0, None, 5)
    store.list(states=["done"], owner=None, limit=12)
    store.order.rearrange(jobs[0].id, lambda place: place + 2)
    trace(store, None)
    with store.database.reading() as connection:
        reads = [query for query in queries if query.startswith("SELECT") and " jobs" in query]
        plans = [(query, row["detail"]) for query in reads for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert len(reads) > 20
    steps = [(query, step) for query, step in plans if " jobs " in step]
    assert not [step for step in steps if step[1].startswith("SCAN jobs") and " INDEX " not in step[1]]
    assert not [step for step in plans if "TEMP B-TREE" in step[1]]
    # These read nothing but the index.
    for columns in ("count(*), total(", "id, state FROM jobs INDEXED BY jobs_in_queue", "seconds, kind, held"):
        found = [step for query, step in steps if columns in query]
        assert found and all("USING COVERING INDEX" in step for step in found), found


def test_the_queue_is_filtered_in_order(store: JobStore) -> None:
    def add(prompt: str, owner: str | None) -> str:
        return store.add(sample_request(prompt=prompt), sample_plan(), owner=owner).id

    first, second, third = add("a", None), add("b", "ann"), add("c", None)
    task = store.add_work("task", sentence("Prune"), Path("/engines"), {})
    store.add_idle_build(sentence("Build"), Path("/engines"), {"model": "m"}, ["one"])
    store.order.claim_job(third, "app.0")
    store.hold([first], True)
    assert ids(store.order.jobs())[:4] == [third, first, second, task.id]
    assert ids(store.order.jobs(owner=None, kinds=["video"])) == [third, first]
    assert ids(store.order.jobs(kinds=["video"], paused=False)) == [third, second]
    assert ids(store.order.jobs(states=["queued"], limit=1)) == [first]
    assert ids(store.order.jobs(limit=1)) == [third, first]
    assert [*store.order.ids(owner="ann").items()] == [(second, "queued")]
    assert [*store.order.ids()][:4] == [third, first, second, task.id]
    assert store.order.owners() == store.order.owners("an") == {second: "ann"}
    assert store.order.owners("b") == store.order.owners(states=["running"]) == {}
    assert store.order.line() == (5, 3, 3, 1)
    assert store.order.line("ann") == (1, 1, 1, 1)
    seconds: Any = pytest.approx(max(sample_plan().seconds["total"].likely, 1.0))
    assert store.order.seconds(0) == (2, 1, seconds, 0.0)  # the build has no forecast
    assert store.order.seconds(2) == (1, 0, 0.0, 0.0) and store.order.seconds(0, "ann") == (1, 1, seconds, 0.0)
    store.add_work("build", sentence("Build"), Path("/engines"), {}, seconds=40.0)
    assert store.order.seconds(2) == (2, 1, 0.0, 40.0)
    assert store.order.ahead(second) == {third: Ahead("video", True, seconds)}
    assert store.order.count_with_model("m") == 1
    assert store.order.count_with_model(sample_plan().model) == 3


def test_jobs_are_moved_to_places(store: JobStore) -> None:
    jobs = [add_job(store).id for _ in range(5)]
    store.add_idle_build(sentence("Build"), Path("/engines"), {}, ["one"])

    def order() -> list[int]:
        return [jobs.index(one.id) for one in store.order.jobs(states=["queued"]) if not one.idle]

    assert store.order.rearrange(jobs[3], lambda place: place - 1) == (2, 5)
    assert order() == [0, 1, 3, 2, 4]
    assert store.order.rearrange(jobs[0], lambda place: place + 1) == (1, 5)
    assert order() == [1, 0, 3, 2, 4]
    assert store.order.rearrange(jobs[4], lambda _: -7) == (0, 5)
    assert store.order.rearrange(jobs[1], lambda _: 99) == (4, 5)
    assert order() == [4, 0, 3, 2, 1]
    assert store.order.rearrange(jobs[3], lambda place: place) == (2, 5)
    store.order.claim_job(jobs[4], "app.0")
    with pytest.raises(StoreError):
        store.order.rearrange(jobs[4], lambda _: 1)
    assert store.order.rearrange(jobs[0], lambda _: 3) == (3, 4)
    assert order() == [3, 2, 1, 0]


def test_videos_that_ended_lately_are_found(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, theirs = add_job(store), add_job(store), store.add(sample_request(), sample_plan(), owner="ann")
    now = time.time()
    monkeypatch.setattr("runtime.queue.store.time.time", lambda: now - 100)
    store.request_cancel([old.id])
    monkeypatch.setattr("runtime.queue.store.time.time", lambda: now)
    store.request_cancel([new.id, theirs.id])
    end = RecentEnd("cancelled", True)
    assert store.ended_since(60, None, 9) == {new.id: end}
    assert store.ended_since(600, None, 9) == {new.id: end, old.id: end}
    assert [*store.ended_since(600, None, 1)] == [new.id]
    store.resume(new.id)
    assert [*store.ended_since(600, None, 9)] == [old.id]
    # A batch ends with its last video; paused ones do not count.
    first, second, third = store.add_all([(sample_request(), sample_plan()) for _ in range(3)])
    store.request_cancel([first.id])
    assert store.ended_since(60, None, 1) == {first.id: RecentEnd("cancelled", False)}
    store.hold([second.id, third.id], True)
    assert store.ended_since(60, None, 1) == {first.id: end}
    store.hold([second.id], False)
    store.order.claim_job(second.id, "app.0")
    assert store.ended_since(60, None, 1) == {first.id: RecentEnd("cancelled", False)}


def test_a_scheduler_reads_the_first_videos_of_each_lane(store: JobStore) -> None:
    """A lane has one owner's videos for one model and number of GPUs."""
    plan = sample_plan()
    other = plan.replace(model_directory=Path("/elsewhere/other"))
    lanes = [("a", plan), ("b", plan), ("a", other), (None, plan)]
    added = [store.add(sample_request(), use, owner=owner).id for _ in range(3) for owner, use in lanes]
    assert [one.id for one in store.order.waiting(3)] == added
    found = store.order.waiting(2)
    assert [one.id for one in found] == added[:8]
    models = [(owner, use.model_directory.name) for owner, use in lanes]
    assert [(one.owner, one.needs.model) for one in found[:4]] == models
    store.hold([added[0]], True)
    assert store.order.claim_job(added[1], "head.0") is not None
    assert [one.id for one in store.order.waiting(1)] == [added[2], added[3], added[4], added[5]]
    # Its node plans it again, for another number of GPUs.
    store.log.record(added[1], Planned(plan=other))
    store.put_back(added[1])
    assert [one.needs.model for one in store.order.waiting(2) if one.id == added[1]] == ["other"]


def test_needs_are_those_of_the_permitted_strategy_with_the_least_memory() -> None:
    spec = look_up("wan2.2-a14b", Path("/nowhere"))
    on = machine(gpu=gpu(free_gib=141), ram_free_gib=200, torch_cuda="13.0")

    def needed(offload: str) -> float:
        request = sample_request(offload=offload, width=832, height=480)
        return Needs.of(resolve(request, spec, PlanningContext(on, Path("/nowhere/x.mp4")))).bytes_per_gpu / GIB

    found = [round(needed(offload)) for offload in ("auto", "group", "none")]
    assert found == [12, 12, 31]  # blocks in RAM; one component at a time


def test_a_row_whose_needs_cannot_be_read_is_left_out(store: JobStore) -> None:
    bad, good = add_job(store), add_job(store)
    with store.database.writing() as connection:
        connection.execute("UPDATE jobs SET needs = '{' WHERE id = ?", (bad.id,))
    assert [one.id for one in store.order.waiting(5)] == [good.id]


def test_titles_are_stored_as_facts(store: JobStore, tmp_path: Path) -> None:
    title = Fact("task.delete", {"program": "transformer", "engine": "0123456789abcdef"})
    work = DeleteEngine(engine="0123456789abcdef").model_dump(mode="json")
    job = store.add_work("task", title, tmp_path, work)
    with store.database.reading() as connection:
        (column,) = connection.execute("SELECT title FROM jobs WHERE id = ?", (job.id,)).fetchone()
    assert json.loads(column) == title.model_dump(mode="json")
    assert (job.titled, job.title) == (title, "Delete transformer 0123456789abcdef")
    video = add_job(store)
    assert (video.titled, video.title) == (None, "")
