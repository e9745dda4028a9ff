"""The queue and its store: restarts, changes by other processes, and many jobs at once."""

import asyncio
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.errors import InvalidRequestError, StoreError
from runtime.core.events import StepDone, TerminalEvent, VideoSaved, Warned
from runtime.core.facts import Fact, sentence
from runtime.core.request import AUTO
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import POSTER
from runtime.queue.changes import Changes
from runtime.queue.instances import Instance
from runtime.queue.job_queue import JobQueue, combined
from runtime.queue.records import BuildEngines, JobRecord, PruneEngines
from runtime.queue.run import ControlPoller, Run
from runtime.queue.views import Job
from runtime.video.mp4 import read_metadata
from tests.cli.test_jobs import stream
from tests.plans import no_engines
from tests.queue.test_worker import small, stored
from tests.thread_queue import RunningQueue
from tests.waiting import until

Make = Callable[[], JobQueue]


@pytest.fixture
def start(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[Make]:
    """Return a function that starts a queue on the store in `tmp_path`."""
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "tiny")
    made: list[JobQueue] = []

    def begin() -> JobQueue:
        made.append(
            RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path), store=stored(tmp_path))
        )
        return made[-1]

    yield begin
    for queue in made:
        queue.close()


def steps(job: Job) -> int:
    return sum(isinstance(event, StepDone) for event in job.events)


@pytest.mark.slow
def test_a_running_job_resumes_after_a_restart_of_the_app(start: Make, tmp_path: Path) -> None:
    """The video that was under way is the one that it would have been."""
    first = start()
    running, waiting = first.submit(small(steps=150, seed=5)), first.submit(small(seed=6))
    until(lambda: steps(running) > 5)
    first.close()
    store = stored(tmp_path)
    assert [(job.id, job.state, job.held) for job in store.order.jobs()] == [
        (running.id, "queued", False),
        (waiting.id, "queued", False),
    ]
    assert list((tmp_path / "outputs").iterdir()) == []
    second = start()
    again = second.job(running.id)
    assert again is not None
    until(lambda: not again.open and not store.order.jobs())
    assert [job.state for job in store.list()] == ["done", "done"]
    assert "Resumed" in {values["event"] for _, _, values in store.log.events(running.id)}
    assert read_metadata(again.plan.output)["job"] == running.id
    whole = second.submit(small(steps=150, seed=5))
    until(lambda: not whole.open)
    assert stream(again.plan.output) == stream(whole.plan.output)


@pytest.mark.slow
def test_a_paused_job_continues(start: Make, tmp_path: Path) -> None:
    queue, other = start(), stored(tmp_path)
    paused, passing = queue.submit(small(steps=200)), queue.submit(small())
    until(lambda: steps(paused) > 2)
    other.hold([paused.id], True)  # by another process
    until(lambda: not passing.open)
    assert passing.state == "done"
    assert (paused.state, paused.held, paused.progress.end) == ("queued", True, None)
    assert queue.active() is None
    assert queue.ahead(queue.submit(small())) == {}
    queue.hold([paused.id], False)
    until(lambda: not paused.open)
    assert paused.state == "done"
    assert len([event for event in paused.events if isinstance(event, TerminalEvent)]) == 1


@pytest.mark.slow
def test_two_apps_share_a_queue(start: Make, tmp_path: Path) -> None:
    one, two = start(), start()
    jobs = [one.submit(small(seed=n)) for n in range(8)]
    until(lambda: not any(job.open for job in jobs))
    records = one.store.list()
    assert {record.state for record in records} == {"done"}
    assert len({record.instance for record in records}) == 2
    assert len(list((tmp_path / "outputs").iterdir())) == 8
    seen = [two.job(job.id) for job in jobs]
    until(lambda: all(job is not None and not job.open for job in seen))
    for job, other in zip(jobs, seen, strict=True):
        assert other is not None
        assert [type(event).__name__ for event in other.events] == [type(event).__name__ for event in job.events]


def test_a_job_of_another_process_is_visible(start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.queue.job_queue._RECOVERY_SECONDS", 0.1)
    queue = start()
    busy = queue.submit(small(steps=1000))
    until(lambda: steps(busy) > 2)
    store = stored(tmp_path)
    with Instance(store.path) as other:
        plan = busy.plan.replace(output=tmp_path / "outputs" / "other.mp4")
        record = store.add(small(), plan, instance=other.id)
        seen = queue.job(record.id)
        assert seen is not None and seen.state == "running"
        note = Fact("pipeline.text_cut", {"field": "prompt"})
        store.log.record(record.id, Warned(fact=note))
        until(lambda: seen.progress.warnings == (note,))
        assert {job.id for job in queue.store.order.jobs()} == {busy.id, record.id}
    until(lambda: seen.state == "interrupted")
    assert queue.resume(record.id) is seen
    busy.request_cancel()
    until(lambda: seen.state == "done")


def test_a_queued_job_is_replanned_at_start(start: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = start()
    busy, waiting = queue.submit(small(steps=1000)), queue.submit(small(seed=8))
    planned = waiting.plan
    until(lambda: steps(busy) > 2)
    seen = replace(probe(), ram_free_bytes=3 << 30, ram_bytes=4 << 30)
    monkeypatch.setattr("runtime.queue.worker.probe", lambda: seen)
    busy.request_cancel()
    until(lambda: not waiting.open)
    assert waiting.state == "done"
    assert waiting.plan.free_bytes != planned.free_bytes
    assert (waiting.plan.seed, waiting.plan.output) == (8, planned.output)
    assert queue.store.get(waiting.id).plan == waiting.plan


def test_a_job_whose_model_was_removed_fails_and_the_next_runs(start: Make, tmp_path: Path) -> None:
    queue = start()
    busy, gone = queue.submit(small(steps=1000)), queue.submit(small())
    until(lambda: steps(busy) > 2)
    queue.store.edit(gone.id, small(model="lost"), gone.plan.replace(model="lost"))
    after = queue.submit(small())
    busy.request_cancel()
    until(lambda: not after.open)
    assert (gone.state, after.state) == ("failed", "done")
    failure = queue.store.get(gone.id).failure
    assert failure is not None and (failure.fact.code, failure.fact.data["name"]) == ("model.unknown", "lost")


def test_queued_jobs_are_edited_and_moved(start: Make) -> None:
    queue = start()
    busy, first, second = (queue.submit(small(steps=n)) for n in (1000, 3, 4))
    until(lambda: busy.state == "running")
    queue.store.order.move(second.id, first.id)
    edited = queue.edit(first.id, small(prompt="a kite", steps=5))
    assert list(queue.ahead(edited)) == [busy.id, second.id]
    assert edited.plan.steps == 5
    with pytest.raises(InvalidRequestError):
        queue.edit(first.id, small(width=33))
    with pytest.raises(StoreError):
        queue.edit(busy.id, small())
    busy.request_cancel()
    until(lambda: not edited.open)
    saved = edited.progress.end
    assert isinstance(saved, VideoSaved) and saved.request["prompt"] == "a kite"


def test_a_template_is_kept_beside_the_prompt_that_the_seed_made_of_it(start: Make) -> None:
    queue, template = start(), "a {red|blue|green} boat"
    jobs = queue.submit_all(combined(small(prompt=template), [], range(20)), held=True)
    assert {job.prompt for job in jobs} == {f"a {color} boat" for color in ("red", "blue", "green")}
    assert {job.request["template"] for job in jobs} == {template}
    plan = jobs[0].plan
    assert plan is not None and (plan.prompt, plan.request_json()["template"]) == (jobs[0].prompt, template)
    # The same seed makes the same prompt, and variations make prompts of their own.
    again = combined(jobs[7].generation_request(), [], [7, AUTO])
    assert [request.prompt for request in again] == [template] * 2
    assert queue.submit(again[0]).plan.prompt == jobs[7].prompt
    assert queue.submit(jobs[7].generation_request()).plan.prompt == jobs[7].prompt
    edited = queue.edit(jobs[0].id, small(prompt="a {kite|kite}"))
    assert edited.plan.prompt == "a kite"


def test_an_invalid_batch_queues_nothing(start: Make) -> None:
    queue = start()
    jobs = queue.submit_all(combined(small(), ["a boat", "a kite"], [1, 2, 3]), owner="guest")
    assert [(job.prompt, job.request["seed"]) for job in jobs] == [
        (prompt, seed) for prompt in ("a boat", "a kite") for seed in (1, 2, 3)
    ]
    records = queue.store.list()
    assert len({record.batch for record in records}) == 1 and records[0].batch
    assert [job.id for job in jobs] == [record.id for record in queue.store.list(owner="guest")][::-1]
    assert not queue.store.list(owner=None)
    assert queue.active() is None and queue.active("guest") is not None
    assert queue.latest("guest") is queue.job(jobs[-1].id)
    assert queue.latest("guest", lambda job: job.id != jobs[-1].id) is queue.job(jobs[-2].id)
    with pytest.raises(InvalidRequestError):
        queue.submit_all([small(), small(width=33)])
    assert len(queue.store.list()) == 6
    queue.cancel([job.id for job in jobs])
    until(lambda: not queue.store.order.jobs())


@pytest.mark.slow
def test_a_build_continues_after_a_restart_of_the_app(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "tiny"
    shutil.copytree(tiny("wan2.1").directory, folder)
    engines = EngineService(EngineStore(tmp_path / "engines", 10**10), probe(), tmp_path)
    request = small(backends={"text_encoder": "onnxruntime"})
    queue = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines, store=stored(tmp_path))
    busy = queue.submit(small(steps=1000))
    build = queue.add_task(BuildEngines(request=request.to_json()), sentence("Build it"))
    task = queue.add_task(PruneEngines(max_bytes=10**10), sentence("Prune"))
    assert [(one.kind, one.title) for one in queue.store.order.jobs()][1:] == [("task", "Prune"), ("build", "Build it")]
    queue.close()
    assert (build.state, task.state) == ("queued", "queued")
    queue = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines, store=stored(tmp_path))
    (again,) = queue.tasks()
    queue.cancel([busy.id])
    until(lambda: not again.open and not queue.store.order.jobs())
    queue.close()
    assert (again.title, again.state) == ("Build it", "done")
    # Whether the engine makes clips faster depends on the machine.
    assert again.result is not None and again.result.code in {"task.built", "task.built_faster"}
    assert again.result.data | {"built": 1, "wanted": 1} == again.result.data
    assert queue.store.get(task.id).state == "done"
    assert len(engines.store.index()) == 1


def test_previews_reach_other_processes_and_the_last_becomes_the_poster(tmp_path: Path) -> None:
    from tests.queue.samples import add_job, sample_plan, sample_result

    store = stored(tmp_path)
    record = add_job(store, instance="a")
    job = Job(record, sample_plan(), "Diorama", store)
    run = Run(record, ControlPoller(store))
    run.emit(StepDone(step=1, of=4, seconds=0.1, part="transformer", preview=b"webp"))
    job.refresh()
    assert job.progress.preview == b"webp"
    run.settle(sample_result())
    folder = store.folder(job.id)
    assert folder is not None
    assert (folder / POSTER).read_bytes() == b"webp"
    job.refresh()
    assert job.state == "done" and job.progress.preview == b"webp"
    assert all(event.preview is None for event in job.events if isinstance(event, StepDone))


MANY = 40
# Another tab's process: moves, holds, cancels and deletes at random until standard input ends.
MEDDLER = """
import random, sys, threading
from pathlib import Path
from runtime.core.errors import StoreError
from runtime.queue.store import JobStore

chosen, store = random.Random(int(sys.argv[2])), JobStore(Path(sys.argv[1]))
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
count = 0
while not ended.is_set():
    waiting = [job.id for job in store.order.jobs() if job.state == "queued"]
    if not waiting:
        continue
    one, two = chosen.choice(waiting), chosen.choice(waiting)
    act = chosen.choice(["move", "move", "hold", "continue", "cancel"])
    try:
        if act == "move":
            store.order.move(one, chosen.choice([two, None]))
        elif act == "cancel":
            store.request_cancel([one])
        else:
            store.hold([one], act == "hold")
        count += 1
    except StoreError:
        pass
print(count)
"""


@pytest.mark.slow
def test_jobs_that_two_processes_move_pause_and_cancel_end_once_each(start: Make, tmp_path: Path) -> None:
    queue, chosen = start(), random.Random(3)
    command = [sys.executable, "-c", MEDDLER, str(tmp_path / "jobs.sqlite"), "7"]
    jobs = [queue.submit(small(steps=1, seed=n)) for n in range(MANY)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        while any(job.state == "queued" and not job.held for job in jobs):
            queue.cancel([chosen.choice(jobs).id])
            time.sleep(chosen.uniform(0, 0.2))
        meddled = int(other.communicate()[0])
    assert meddled > MANY
    queue.hold([one.id for one in queue.store.order.jobs()], False)
    until(lambda: not queue.store.order.jobs())
    until(lambda: not any(job.open for job in jobs))
    records: dict[str, JobRecord] = {one.id: one for one in queue.store.list()}
    assert set(records) == {job.id for job in jobs}
    assert {one.state for one in records.values()} <= {"done", "cancelled"}
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        ends = Counter(job for job, event in connection.execute("SELECT job, event FROM events") if _is_end(event))
    connection.close()
    assert ends == dict.fromkeys(records, 1)
    assert [job.state for job in jobs] == [records[job.id].state for job in jobs]
    made = {path.name for path in (tmp_path / "outputs").iterdir()}
    assert made == {job.plan.output.name for job in jobs if job.state == "done"}
    assert 0 < len(made) < MANY


def _is_end(event: str) -> bool:
    return any(f'"{name}"' in event for name in ("VideoSaved", "Failed", "Cancelled", "Interrupted"))


def test_followers_of_a_job_are_woken_by_writes_of_another_process(start: Make, tmp_path: Path) -> None:
    queue, other = start(), stored(tmp_path)
    busy, job = queue.submit(small(steps=1000)), queue.submit(small())
    until(lambda: steps(busy) > 2)

    async def follow() -> bool:
        count = job.changes.count
        await asyncio.to_thread(other.hold, [job.id], True)
        await job.changes.after(count, 600)
        return job.held

    assert asyncio.run(asyncio.wait_for(follow(), 60))
    before = queue.store.database.version()
    assert other.database.version() is not None and queue.store.get(job.id).held
    other.hold([job.id], False)
    assert queue.store.database.version() != before
    queue.cancel([busy.id])


def test_a_change_before_the_wait_is_not_missed() -> None:
    async def follow(changes: Changes) -> None:
        count = changes.count
        changes.notify()
        await changes.after(count, 600)
        await changes.after(changes.count, 0.001)

    asyncio.run(asyncio.wait_for(follow(Changes()), 60))
