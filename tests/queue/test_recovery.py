"""Recovery after a process died: job states, restarts of jobs, and removal of leftover files."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.core.cancel import Cancel
from runtime.core.errors import StoreError
from runtime.core.events import (
    Event,
    FramesDecoded,
    Planned,
    SectionDone,
    Stage,
    StageStarted,
    StepDone,
    VideoSaved,
    WaitsForDisk,
)
from runtime.core.facts import Fact, sentence
from runtime.core.plan import EngineRef, ExecutionPlan, plain_output
from runtime.execution.residency import Residency
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue import instances, recovery, storage
from runtime.queue.instances import Instance, WorkerRegistry
from runtime.queue.records import JobRecord, PruneEngines
from runtime.queue.recovery import EXIT_DEVICE_LOST, MemoryKills, avoid_causes, exit_reason
from runtime.queue.store import JobStore
from tests.block_engine_files import in_blocks
from tests.plans import machine, tiny_plan
from tests.queue.samples import add_job, result_of, sample_plan, sample_request

KILLED = Fact("queue.exited", {"how": "signal 9, SIGKILL"})
CRASHED = Fact("queue.exited", {"how": "exit code 1"})

ROOT = Path(__file__).parents[2]
# A process that runs a job, prints its id, and waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from runtime.queue.instances import Instance
from runtime.queue.store import JobStore
from tests.queue.samples import add_job

store = JobStore(Path(sys.argv[1]))
with Instance(store.path) as own:
    print(add_job(store, instance=own.id).id, own.id, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.sqlite")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_jobs_of_a_killed_process_are_interrupted(store: JobStore) -> None:
    assert store.path is not None
    command = [sys.executable, "-c", HOLDER, str(store.path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        job, other = holder.stdout.readline().split()
        with Instance(store.path) as own:
            waiting = add_job(store)
            assert instances.is_alive(store.path, other)
            assert recovery.recover(store, own.id) == []
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert not instances.is_alive(store.path, other)
            assert recovery.recover(store, own.id) == [job]
            assert recovery.recover(store, own.id) == []
            assert [store.get(one).state for one in (job, waiting.id)] == ["interrupted", "queued"]


def test_a_task_of_a_dead_app_is_cancelled(store: JobStore, tmp_path: Path) -> None:
    prune = PruneEngines(max_bytes=0).model_dump(mode="json")
    task, mine, waiting = (
        store.add_work("task", sentence(title), tmp_path, prune) for title in ("Prune", "Prune", "Prune")
    )
    WorkerRegistry(store.database).register("deadbeef.0", 0)
    assert store.order.claim("deadbeef.0")
    with Instance(store.path) as own:
        WorkerRegistry(store.database).register(f"{own.id}.0", 0)
        assert store.order.claim(f"{own.id}.0")
        assert recovery.recover(store, own.id) == [task.id]
        assert WorkerRegistry(store.database).apps() == {own.id}
    assert [store.get(one.id).state for one in (task, mine, waiting)] == ["cancelled", "running", "queued"]


def running(store: JobStore, tmp_path: Path, instance: str = "app.0", stage: Stage = "denoise") -> JobRecord:
    """Return a job that a worker runs, in a stage of the transformer."""
    plan = sample_plan().replace(output=tmp_path / "x.mp4")
    job = add_job(store, instance=instance)
    store.log.record(job.id, Planned(plan=plan))
    store.log.record(job.id, StageStarted(stage=stage, part="transformer"))
    return store.get(job.id)


def death(stage: Stage | None = "denoise", part: str | None = "transformer", **changes: Any) -> dict[str, Any]:
    """Return the event of a killed worker."""
    values = {"event": "WorkerDied", "how": KILLED.model_dump(), "out_of_memory": False, "stage": stage, "part": part}
    return values | {"begun": True} | changes


def diorama() -> ModelSpec:
    """Return the shipped model."""
    return read_spec(EMBEDDED / "diorama", "diorama")


def test_a_job_whose_worker_died_is_queued_again_once(store: JobStore, tmp_path: Path) -> None:
    job, other = running(store, tmp_path), running(store, tmp_path, "app.1")
    recovery.settle_worker(store, "app.0", KILLED)
    again = store.get(job.id)
    assert (again.state, again.held, again.instance, again.begun) == ("queued", False, None, True)
    assert store.get(other.id).state == "running"
    assert list(store.log.deaths(job.id)) == [death()]
    assert store.order.claim("app.0") is not None
    store.log.record(job.id, Planned(plan=sample_plan()))
    lost = Fact("queue.exit_device_lost")
    recovery.settle_worker(store, "app.0", lost)
    failed = store.get(job.id)
    assert failed.state == "failed" and failed.failure is not None
    assert failed.failure.fact == Fact("queue.worker_died_again", {"how": lost})
    # Resumed by the user, it may be queued again once more.
    store.resume(job.id)
    assert store.log.deaths(job.id) == []


def steps(*done: int) -> list[Event]:
    """Return the events of a run that resumes and does these steps."""
    return [Planned(plan=sample_plan()), *[StepDone(step=step, of=9, seconds=1.0, part="x") for step in done]]


def section(number: int, *events: Event) -> list[Event]:
    """Return the events of a run in which a section is finished."""
    return [*steps(1, 2), SectionDone(section=number, of=9, start=0, frames=9), *events]


DECODING = [*steps(1, 2), FramesDecoded(frames=5, of=9)]


@pytest.mark.parametrize("most", [recovery.LOCAL_DEATHS, recovery.CLUSTER_DEATHS])
@pytest.mark.parametrize(
    ("runs", "stuck"),
    [
        # Runs of which each came further than those before; and a run that does not.
        ([steps(1, 2)], steps(1, 2)),
        ([steps(1, 2)], steps(1)),
        ([steps()], steps()),
        ([DECODING], DECODING),
        ([DECODING], steps(1, 2)),
        ([section(1)], [Planned(plan=sample_plan())]),
        ([steps(1), steps(1, 2), steps(1, 2, 3), steps(4, 5), steps(6), steps(7)], steps(6, 7)),
        ([steps(1, 2), DECODING], steps(1, 2)),
        ([DECODING, section(1), section(2), steps(1)], steps(1)),
        ([section(1), section(2, *steps(1)), steps(1, 2)], steps(2)),
    ],
)
def test_a_job_fails_after_some_deaths_without_progress(
    store: JobStore, runs: list[list[Event]], stuck: list[Event], most: int
) -> None:
    job = add_job(store)
    for run in runs:
        die(store, job, run, most)
        assert store.get(job.id).state == "queued"
    for count in range(2, most + 1):
        die(store, job, stuck, most)
        assert store.get(job.id).state == ("failed" if count == most else "queued")


def die(store: JobStore, job: JobRecord, events: list[Event], most: int, counted: bool = True) -> None:
    """Run a job whose worker dies after some events."""
    assert store.order.claim_job(job.id, "app.0") is not None
    for event in events:
        store.log.record(job.id, event)
    recovery.settle_worker(store, "app.0", KILLED, most=most, counted=counted)


def test_lost_machines_do_not_count_unless_a_job_loses_many(store: JobStore) -> None:
    job = add_job(store)
    for run in range(9):  # it makes progress
        die(store, job, steps(run + 1), recovery.CLUSTER_DEATHS, counted=False)
        assert store.get(job.id).state == "queued"
    for left in (3, 2, 1, 0):
        die(store, job, steps(1), recovery.CLUSTER_DEATHS, counted=False)
        assert store.get(job.id).state == ("queued" if left else "failed")


def test_a_death_before_the_job_was_planned_does_not_count(store: JobStore) -> None:
    job = add_job(store)
    for _ in range(3):
        assert store.order.claim("app.0") is not None
        store.log.record(job.id, WaitsForDisk(wanted=1))
        recovery.settle_worker(store, "app.0", KILLED)
        assert store.get(job.id).state == "queued"
    assert list(store.log.deaths(job.id)) == [death(None, None, begun=False)] * 3
    plan = recovery.avoid_causes(sample_plan(), diorama(), store.log.deaths(job.id))
    assert plan == sample_plan()
    # The first death after planning is the first that counts.
    for state in ("queued", "failed"):
        assert store.order.claim("app.0") is not None
        store.log.record(job.id, Planned(plan=sample_plan()))
        recovery.settle_worker(store, "app.0", KILLED)
        assert store.get(job.id).state == state


def test_a_death_before_planning_does_not_blame_the_engine_of_the_earlier_run(store: JobStore, tmp_path: Path) -> None:
    job = running(store, tmp_path)
    recovery.settle_worker(store, "app.0", KILLED)
    assert store.order.claim("app.0") is not None
    recovery.settle_worker(store, "app.0", KILLED)
    assert list(store.log.deaths(job.id)) == [death(), death(None, None, begun=False)]
    assert store.get(job.id).state == "queued"


def test_a_job_whose_claim_kills_the_worker_fails_after_some_deaths(store: JobStore) -> None:
    job = add_job(store)
    deaths = 0
    while store.order.claim("app.0") is not None:
        recovery.settle_worker(store, "app.0", KILLED)
        deaths += 1
    assert deaths == 5 and store.get(job.id).state == "failed"


def test_a_pending_cancel_or_pause_is_followed_after_a_death(store: JobStore, tmp_path: Path) -> None:
    cancelled, paused = running(store, tmp_path), running(store, tmp_path)
    store.request_cancel([cancelled.id])
    store.hold([paused.id], True)
    recovery.settle_worker(store, "app.0", CRASHED)
    assert store.get(cancelled.id).state == "cancelled"
    assert (store.get(paused.id).state, store.get(paused.id).held) == ("queued", True)


def test_a_build_is_queued_again_and_another_task_fails(store: JobStore, tmp_path: Path) -> None:
    build = store.add_work("build", sentence("Build"), tmp_path, {"prompt": "a boat"})
    task = store.add_work("task", sentence("Prune"), tmp_path, PruneEngines(max_bytes=0).model_dump(mode="json"))
    assert store.order.claim("app.0") and store.order.claim("app.0")
    recovery.settle_worker(store, "app.0", CRASHED)
    assert store.get(build.id).state == "queued"
    failed = store.get(task.id)
    assert failed.state == "failed" and failed.failure is not None
    assert failed.failure.fact.code == "queue.worker_died"


@pytest.mark.parametrize("program", ["transformer", "block_qkv"])
@pytest.mark.parametrize("stage", ["denoise", "load", "build"])
def test_an_engine_that_ran_when_a_worker_died_is_disabled(stage: Stage, program: str) -> None:
    plan = with_engine(program)
    found = avoid_causes(plan, diorama(), [death(stage)])
    assert found.components["transformer"].engines == ()
    assert found.components["vae"] == plan.components["vae"]
    codes = [warning.code for warning in found.warnings[len(plan.warnings) :]]
    assert codes == ["event.fell_back", "queue.worker_replaced"]
    assert avoid_causes(found, diorama(), [death(stage)]) == found
    assert found.components["transformer"].reasons[0].data["backend"] == "inductor"


def test_block_engines_are_disabled_for_all_transformers(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = in_blocks(tiny_plan(spec, tmp_path / "x.mp4"), spec)
    first = avoid_causes(plan, spec, [death("denoise")])
    assert [first.components[name].backend for name in ("transformer", "transformer_2")] == ["pytorch", "pytorch"]
    # An expert that was done ran on them.
    late = avoid_causes(plan, spec, [death(part="transformer_2")])
    assert [late.components[name].in_blocks for name in ("transformer", "transformer_2")] == [True, False]


def with_engine(program: str) -> ExecutionPlan:
    """Return a plan whose transformer runs on an engine."""
    profile = ((1, 1, 1),) * 3
    use = EngineRef(id="0" * 16, program=program, builder="inductor", precision="float32", profile=profile)
    part = sample_plan().components["transformer"].replace(backend="inductor", engines=(use,))
    return sample_plan().with_component("transformer", part)


@pytest.mark.parametrize(("permitted", "applied"), [("any", True), ("retry", True), ("ask", False)])
def test_a_job_whose_worker_ran_out_of_memory_resumes_with_a_lower_memory_strategy(
    permitted: str, applied: bool
) -> None:
    request = sample_request(seed=7, steps=4, on_out_of_memory=permitted)
    plan = resolve(request, diorama(), PlanningContext(machine(), Path("/nowhere/boat.mp4")))
    killed = death("decode", "vae", out_of_memory=True)
    found = avoid_causes(plan, diorama(), [killed])
    less = found.forecast.peak_bytes < plan.forecast.peak_bytes
    assert (found.strategy != plan.strategy) == less == applied
    codes = [warning.code for warning in found.warnings[len(plan.warnings) :]]
    assert codes == [*(["event.out_of_memory_retried"] if applied else []), "queue.worker_replaced"]
    # Claimed again after a pause, it keeps that strategy.
    assert avoid_causes(found, diorama(), [killed]) == found
    assert avoid_causes(plan, diorama(), [killed | {"out_of_memory": False}]).strategy == plan.strategy
    assert avoid_causes(plan, diorama(), [killed | {"stage": "save", "part": None}]).strategy == plan.strategy


@pytest.mark.parametrize(
    ("code", "before", "now", "reason"),
    [
        (-9, MemoryKills(2, certain=True), MemoryKills(3, certain=True), ("queue.exit_out_of_memory", {}, True)),
        (-9, MemoryKills(5), MemoryKills(6), ("queue.exit_probably_out_of_memory", {}, True)),
        (-9, MemoryKills(5), MemoryKills(5), ("queue.exited", {"how": "signal 9, SIGKILL"}, False)),
        (-11, MemoryKills(5), MemoryKills(6), ("queue.exited", {"how": "signal 11, SIGSEGV"}, False)),
        (1, MemoryKills(), MemoryKills(), ("queue.exited", {"how": "exit code 1"}, False)),
        (EXIT_DEVICE_LOST, MemoryKills(), MemoryKills(), ("queue.exit_device_lost", {}, False)),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="names of signals")
def test_the_exit_code_and_the_counter_of_the_kernel_explain_a_death(
    code: int, before: MemoryKills, now: MemoryKills, reason: tuple[str, dict[str, Any], bool]
) -> None:
    fact, out_of_memory = exit_reason(code, before, now)
    assert (fact.code, fact.data, out_of_memory) == reason


def test_ends_of_workers_are_described_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(signal, "SIGKILL")
    fact, out_of_memory = exit_reason(1, MemoryKills(0), MemoryKills(0))
    assert (fact.code, out_of_memory) == ("queue.exited", False)


@pytest.mark.parametrize(
    ("group", "file", "kills"),
    [
        ("8:pids:/\n4:memory:/app\n0::/\n", "memory/app/memory.oom_control", MemoryKills(4, certain=True)),
        ("4:cpu,memory:/app\n", "memory/memory.oom_control", MemoryKills(4, certain=True)),
        ("0::/app/one\n", "app/one/memory.events", MemoryKills(4, certain=True)),
        ("0::/app/one\n", "memory.events", MemoryKills(4, certain=True)),
        ("0::/app/one\n", "other/memory.events", MemoryKills(7)),
    ],
)
def test_the_counter_of_the_control_group_or_the_machine_is_read(
    group: str, file: str, kills: MemoryKills, tmp_path: Path
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(group)
    (proc / "vmstat").write_text("nr_free_pages 12\noom_kill 7\n")
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text("oom 9\nunder_oom 0\noom_kill 4\n")
    assert MemoryKills.read(proc, groups) == kills
    assert MemoryKills.read(tmp_path / "none", groups) == MemoryKills()


def test_a_complete_video_that_names_its_job_is_done(
    store: JobStore, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    """The process died after it renamed the video and before it stored the event."""
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "boat.mp4").replace(model="diorama")
    ours, another, torn = (store.add(sample_request(), plan, instance="dead") for _ in range(3))
    events: list[Event] = []
    with Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency, job_id=ours.id)
    assert recovery.recover(store, "alive") == [ours.id, another.id, torn.id]
    assert [store.get(one.id).state for one in (ours, another, torn)] == ["done", "interrupted", "interrupted"]
    (end,) = [event for event in events if isinstance(event, VideoSaved)]
    found = store.get(ours.id).saved
    assert found is not None
    assert found.result_json() == json.loads(json.dumps(end.result_json()))
    torn = store.start(torn.id, "dead")
    plan.output.write_bytes(plan.output.read_bytes()[:-2000])
    assert recovery.recover(store, "alive") == [torn.id]
    assert store.get(torn.id).state == "interrupted"


def test_files_of_killed_jobs_are_removed(store: JobStore, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    left = outputs / ".tandem-abc"
    left.mkdir(parents=True)
    (left / "lock").write_text("")
    (left / "stream.mp4").write_bytes(bytes(1000))
    kept = add_job(store)
    for name in (kept.id, "0123abcd", "instances", "something"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    # What cannot be removed, here a link, stays, and the queue starts all the same.
    (tmp_path / "jobs" / "4567cdef").symlink_to(tmp_path / "jobs" / "something")
    storage.tidy(store, outputs)
    assert list(outputs.iterdir()) == []
    assert {entry.name for entry in (tmp_path / "jobs").iterdir()} == {kept.id, "instances", "something", "4567cdef"}


def test_folders_of_jobs_in_a_damaged_store_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    path.write_bytes(b"\xff" * 5000)
    folder = tmp_path / "jobs" / "0123abcd"
    folder.mkdir(parents=True)
    for store in (JobStore(path), JobStore(path)):
        storage.tidy(store, tmp_path / "outputs")
        assert folder.is_dir()


def test_purging_removes_only_a_jobs_own_files_in_the_outputs_folder(store: JobStore, tmp_path: Path) -> None:
    outputs, elsewhere = tmp_path / "outputs", tmp_path / "elsewhere"
    finished = {outputs / "boat.mp4": "2", elsewhere / "boat.mp4": "2", outputs / "plain.mp4": "off"}
    jobs = []
    for video, interpolate in finished.items():
        video.parent.mkdir(exist_ok=True)
        for path in (video, plain_output(video)):
            path.write_bytes(b"video")
        plan = sample_plan().replace(output=video, interpolate=interpolate)
        job = store.add(sample_request(), plan, instance="a")
        store.log.record(job.id, result_of(plan))
        folder = store.folder(job.id)
        assert folder is not None
        folder.mkdir(parents=True)
        jobs.append((job, folder))
        store.delete(job.id)
    assert storage.purge(store, outputs) == 0
    assert all(video.exists() for video in finished)
    assert storage.purge(store, outputs, older_than=-1) == 3
    assert [video.exists() for video in finished] == [False, True, False]
    # The last one has no plain video: that file belongs to another program.
    assert [plain_output(video).exists() for video in finished] == [False, True, True]
    assert not any(folder.exists() for _, folder in jobs)


def test_a_folder_for_locks_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("")
    with pytest.raises(StoreError) as error, Instance(tmp_path / "jobs.sqlite"):
        pass
    assert error.value.code == "queue.locks_not_writable"
    assert error.value.data["folder"] == str(tmp_path / "jobs" / "instances")
