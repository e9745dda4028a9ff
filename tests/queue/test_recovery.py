"""After processes died: their jobs are found, what is done is known to be, what was left lying about goes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.cancel import Cancel
from runtime.core.errors import StoreError
from runtime.core.events import Event, Planned, StageStarted, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import EngineUse
from runtime.execution.residency import Residency
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.planner.resolve import resolve
from runtime.queue import process_lock, recovery
from runtime.queue.execution import after_deaths
from runtime.queue.process_lock import Instance
from runtime.queue.records import JobRecord
from runtime.queue.registry import WorkerRegistry
from runtime.queue.store import JobStore
from runtime.queue.supervisor import memory_kills
from runtime.queue.tasks import PruneEngines
from tests.plans import machine, tiny_plan
from tests.queue.made import add, asked, planned, saved

ROOT = Path(__file__).parents[2]
# A process that has a job and says so, then waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from runtime.queue.process_lock import Instance
from runtime.queue.store import JobStore
from tests.queue.made import add

store = JobStore(Path(sys.argv[1]))
with Instance(store.path) as own:
    print(add(store, instance=own.id).id, own.id, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.sqlite")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_living_process_keeps_its_job_and_a_killed_one_loses_it(store: JobStore) -> None:
    assert store.path is not None
    command = [sys.executable, "-c", HOLDER, str(store.path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        job, other = holder.stdout.readline().split()
        with Instance(store.path) as own:
            waiting = add(store)
            assert process_lock.lives(store.path, other)
            assert recovery.recover(store, own.id) == []
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert not process_lock.lives(store.path, other)
            assert recovery.recover(store, own.id) == [job]
            assert recovery.recover(store, own.id) == []
            assert [store.get(one).state for one in (job, waiting.id)] == ["interrupted", "queued"]


def test_a_task_that_ran_in_an_app_that_died_is_cancelled(store: JobStore, tmp_path: Path) -> None:
    prune = PruneEngines(max_bytes=0).model_dump(mode="json")
    task, mine, waiting = (store.add_work("task", title, tmp_path, prune) for title in ("Prune", "Prune", "Prune"))
    WorkerRegistry(store).register("deadbeef.0", 0)
    assert store.claim("deadbeef.0")
    with Instance(store.path) as own:
        WorkerRegistry(store).register(f"{own.id}.0", 0)
        assert store.claim(f"{own.id}.0")
        assert recovery.recover(store, own.id) == [task.id]
        assert WorkerRegistry(store).apps() == {own.id}
    assert [store.get(one.id).state for one in (task, mine, waiting)] == ["cancelled", "running", "queued"]


def at_work(store: JobStore, tmp_path: Path, instance: str = "app.0", **changes: str) -> JobRecord:
    """Return a job that a worker runs and denoises."""
    plan = planned().replace(output=tmp_path / "x.mp4")
    job = add(store, instance=instance)
    store.record(job.id, Planned(plan=plan))
    store.record(job.id, StageStarted(stage="denoise", part="transformer"))
    return store.get(job.id)


def diorama() -> ModelSpec:
    """Return the shipped model."""
    return read_spec(EMBEDDED / "diorama", "diorama")


def test_a_job_whose_worker_died_is_queued_again_once(store: JobStore, tmp_path: Path) -> None:
    job, other = at_work(store, tmp_path), at_work(store, tmp_path, "app.1")
    recovery.settle_worker(store, "app.0", "signal 9, SIGKILL")
    again = store.get(job.id)
    assert (again.state, again.held, again.instance, again.begun) == ("queued", False, None, True)
    assert store.get(other.id).state == "running"
    death = {
        "event": "WorkerDied",
        "how": "signal 9, SIGKILL",
        "out_of_memory": False,
        "stage": "denoise",
        "part": "transformer",
    }
    assert list(store.deaths(job.id)) == [death]
    assert store.claim("app.0") is not None
    recovery.settle_worker(store, "app.0", "CUDA error")
    failed = store.get(job.id)
    assert failed.state == "failed" and failed.failure is not None
    assert failed.failure.fact == Fact("queue.worker_died_again", {"how": "CUDA error"})
    # Whoever resumes it gives it another chance.
    store.resume(job.id)
    assert store.deaths(job.id) == []


def test_what_was_requested_holds_after_a_death(store: JobStore, tmp_path: Path) -> None:
    cancelled, paused = at_work(store, tmp_path), at_work(store, tmp_path)
    store.request_cancel([cancelled.id])
    store.hold([paused.id], True)
    recovery.settle_worker(store, "app.0", "exit code 1")
    assert store.get(cancelled.id).state == "cancelled"
    assert (store.get(paused.id).state, store.get(paused.id).held) == ("queued", True)


def test_a_build_is_started_again_and_another_task_fails(store: JobStore, tmp_path: Path) -> None:
    build = store.add_work("build", "Build", tmp_path, {"prompt": "a boat"})
    task = store.add_work("task", "Prune", tmp_path, PruneEngines(max_bytes=0).model_dump(mode="json"))
    assert store.claim("app.0") and store.claim("app.0")
    recovery.settle_worker(store, "app.0", "exit code 1")
    assert store.get(build.id).state == "queued"
    failed = store.get(task.id)
    assert failed.state == "failed" and failed.failure is not None
    assert failed.failure.fact.code == "queue.worker_died"


@pytest.mark.parametrize(("stage", "disabled"), [("denoise", True), ("load", True), ("build", False)])
def test_an_engine_that_ran_when_a_worker_died_is_not_used_again(stage: str, disabled: bool) -> None:
    use = EngineUse(
        id="0" * 16, program="transformer", builder="inductor", precision="float32", profile=((1, 1, 1),) * 3
    )
    part = planned().components["transformer"].replace(backend="inductor", engines=(use,))
    plan = planned().with_component("transformer", part)
    death = {"event": "WorkerDied", "how": "signal 9, SIGKILL", "stage": stage, "part": "transformer"}
    found = after_deaths(plan, diorama(), [death])
    assert found.components["transformer"].engines == (() if disabled else (use,))
    assert found.components["vae"] == plan.components["vae"]
    assert len(found.warnings) == len(plan.warnings) + (2 if disabled else 1)
    assert after_deaths(found, diorama(), [death]) == found


@pytest.mark.parametrize(("permitted", "applied"), [("any", True), ("retry", True), ("ask", False)])
def test_a_job_whose_worker_was_killed_for_lack_of_memory_resumes_with_less(permitted: str, applied: bool) -> None:
    request = asked(seed=7, steps=4, on_out_of_memory=permitted)
    plan = resolve(request, diorama(), machine(), Path("/nowhere/boat.mp4"))
    death = {
        "event": "WorkerDied",
        "how": "signal 9, SIGKILL",
        "out_of_memory": True,
        "stage": "decode",
        "part": "vae",
    }
    found = after_deaths(plan, diorama(), [death])
    less = found.forecast.peak_bytes < plan.forecast.peak_bytes
    assert (found.strategy != plan.strategy) == less == applied
    codes = [warning.code for warning in found.warnings[len(plan.warnings) :]]
    assert codes == [*(["event.out_of_memory_retried"] if applied else []), "queue.worker_replaced"]
    # Claimed again after a pause, it keeps that strategy.
    assert after_deaths(found, diorama(), [death]) == found
    assert after_deaths(plan, diorama(), [{**death, "out_of_memory": False}]).strategy == plan.strategy
    assert after_deaths(plan, diorama(), [{**death, "stage": "save", "part": None}]).strategy == plan.strategy


def test_kills_for_lack_of_memory_are_counted_by_the_kernel(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 12\noom_kill 3\n")
    assert (memory_kills(counters), memory_kills(tmp_path / "none")) == (3, 0)


def test_a_video_that_is_whole_and_names_its_job_is_done(
    store: JobStore, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    """The process died between the video's renaming and the store's note of it."""
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "boat.mp4").replace(model="diorama")
    ours, another, torn = (store.add(asked(), plan, instance="dead") for _ in range(3))
    events: list[Event] = []
    with Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency, job_id=ours.id)
    assert recovery.recover(store, "alive") == [ours.id, another.id, torn.id]
    assert [store.get(one.id).state for one in (ours, another, torn)] == ["done", "interrupted", "interrupted"]
    (end,) = [event for event in events if isinstance(event, VideoSaved)]
    found = store.get(ours.id).saved
    assert found is not None
    assert found.result_json() == json.loads(json.dumps(end.result_json()))
    torn = store.take(torn.id, "dead")
    plan.output.write_bytes(plan.output.read_bytes()[:-2000])
    assert recovery.recover(store, "alive") == [torn.id]
    assert store.get(torn.id).state == "interrupted"


def test_what_a_killed_job_left_goes(store: JobStore, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    left = outputs / ".tandem-abc"
    left.mkdir(parents=True)
    (left / "lock").write_text("")
    (left / "stream.mp4").write_bytes(bytes(1000))
    kept = add(store)
    for name in (kept.id, "0123abcd", "instances", "something"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    recovery.tidy(store, outputs)
    assert list(outputs.iterdir()) == []
    assert {entry.name for entry in (tmp_path / "jobs").iterdir()} == {kept.id, "instances", "something"}


def test_folders_of_jobs_that_a_damaged_store_lost_stay(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    path.write_bytes(b"\xff" * 5000)
    folder = tmp_path / "jobs" / "0123abcd"
    folder.mkdir(parents=True)
    for store in (JobStore(path), JobStore(path)):
        recovery.tidy(store, tmp_path / "outputs")
        assert folder.is_dir()


def test_purging_removes_files_of_ours_only(store: JobStore, tmp_path: Path) -> None:
    outputs, elsewhere = tmp_path / "outputs", tmp_path / "elsewhere"
    videos = [folder / "boat.mp4" for folder in (outputs, elsewhere)]
    jobs = []
    for video in videos:
        video.parent.mkdir()
        video.write_bytes(b"video")
        job = store.add(asked(), planned().replace(output=video), instance="a")
        store.record(job.id, saved().model_copy(update={"video": video}))
        folder = store.folder(job.id)
        assert folder is not None
        folder.mkdir(parents=True)
        jobs.append((job, folder))
        store.delete(job.id)
    assert recovery.purge(store, outputs) == 0
    assert all(video.exists() for video in videos)
    assert recovery.purge(store, outputs, older_than=-1) == 2
    assert [video.exists() for video in videos] == [False, True]
    assert not any(folder.exists() for _, folder in jobs)


def test_a_place_for_locks_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("")
    with pytest.raises(StoreError, match="cannot be written"), Instance(tmp_path / "jobs.sqlite"):
        pass
