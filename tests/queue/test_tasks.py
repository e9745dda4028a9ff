"""Tasks on the engine library in the queue: real builds (ONNX Runtime, tiny model) between real videos."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.core.events import Planned, StageStarted, TerminalEvent, VideoSaved
from runtime.core.facts import Fact, sentence
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import (
    BuildEngines,
    BuildProgress,
    DeleteEngine,
    ImportEngine,
    InspectEngine,
    PruneEngines,
    VerifyEngine,
    Work,
)
from runtime.queue.views import Job, Task
from tests.engines import exported_files
from tests.facts import fact
from tests.thread_queue import RunningQueue
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture
def queue(engines: EngineService, spec: ModelSpec, tmp_path: Path) -> Iterator[JobQueue]:
    made = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines)
    yield made
    made.close()


def small(**values: object) -> GenerationRequest:
    """Return a request for a tiny clip with the text encoder on ONNX Runtime."""
    wanted: dict[str, object] = {"prompt": "a red boat", "model": "tiny", "width": 32, "height": 32, "frames": 5}
    wanted |= {"steps": 2, "fps": 8, "backends": {"text_encoder": "onnxruntime"}}
    return GenerationRequest.from_mapping(wanted | values)


def wait_for(one: Job | Task) -> None:
    """Wait until it has ended."""
    until(lambda: one.state not in {"queued", "running"})


def add(queue: JobQueue, work: Work) -> Task:
    """Queue a task and wait until it has ended."""
    task = queue.add_task(work, sentence("Test"))
    wait_for(task)
    return task


def build(component: str | None = None, **values: object) -> BuildEngines:
    """Build the engines of a tiny clip."""
    return BuildEngines(request=small(**values).to_json(), component=component)


def code(task: Task) -> str:
    """Return the code of how a task ended."""
    assert task.result is not None
    return task.result.code


@pytest.mark.slow
def test_an_engine_is_built_used_verified_and_deleted(
    queue: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    # Of one component, although all may have engines.
    built = add(queue, build("text_encoder", backends={"all": "onnxruntime"}))
    assert built.state == "done"
    # Whether the engine makes clips faster depends on the machine.
    assert built.result is not None and built.result.code in {"task.built", "task.built_faster"}
    assert built.result.data | {"built": 1, "wanted": 1} == built.result.data
    assert built.share == 1.0
    assert any("xporting" in line for line in built.log)
    (record,) = engines.store.index()
    assert record.key.program == "text_encoder"
    again = add(queue, build())
    assert again.state == "done"
    assert [one.built_at for one in engines.store.index()] == [record.built_at]

    # The video keeps its engine open for the next one; deleting it lets go first.
    job = queue.submit(small())
    wait_for(job)
    assert isinstance(job.events[-1], VideoSaved)
    assert job.events[-1].plan["components"]["text_encoder"]["backend"] == "onnxruntime"
    verified = add(queue, VerifyEngine(engine=record.id, models=("tiny",)))
    assert verified.state == "done", verified
    assert verified.result is not None and verified.result.code == "task.verified"
    assert verified.result.data["detail"].code == "engine.compared"
    deleted = add(queue, DeleteEngine(engine=record.id))
    assert deleted.state == "done", deleted
    assert engines.store.index() == []
    gone = add(queue, DeleteEngine(engine=record.id))
    assert gone.state == "failed" and gone.result is not None
    assert gone.result == Fact("engine.not_found", {"engine": record.id})
    lost = add(queue, VerifyEngine(engine=record.id, models=("tiny",)))
    assert lost.state == "failed"


@pytest.mark.slow
def test_a_damaged_engine_fails_verification_and_is_pruned(
    queue: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    add(queue, build())
    (record,) = engines.store.index()
    engine = engines.store.path(record.id) / "engine.onnx"
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)
    found = add(queue, VerifyEngine(engine=record.id, models=("tiny",)))
    assert found.state == "failed"
    assert found.result is not None and found.result.code == "engine.verified_wrong"
    assert found.result.data["cause"].data["file"] == "engine.onnx"
    pruned = add(queue, PruneEngines(max_bytes=0))
    assert pruned.result == Fact("task.pruned", {"count": 1, "left": 0})


def test_tasks_and_jobs_share_one_queue(queue: JobQueue, engines: EngineService, spec: ModelSpec) -> None:
    running = queue.submit(small(steps=1000, backends={}))
    pruned = queue.add_task(PruneEngines(max_bytes=0), sentence("Prune"))
    built = queue.add_task(build(), sentence("Build"))
    waiting = queue.submit(small(backends={}))
    assert list(queue.ahead(waiting)) == [running.id, pruned.id]
    assert list(queue.ahead(built)) == [running.id, pruned.id, waiting.id]
    assert queue.active() is running
    assert queue.latest() is waiting
    assert queue.job(built.id) is None
    # Queued tasks end at once although another job runs.
    queue.cancel([pruned.id, built.id])
    assert (pruned.state, built.state) == ("cancelled", "cancelled")
    assert list(queue.ahead(waiting)) == [running.id]
    running.request_cancel()
    wait_for(waiting)
    assert isinstance([event for event in waiting.events if isinstance(event, TerminalEvent)][-1], VideoSaved)
    assert engines.store.index() == []


def test_the_wait_is_known_if_all_that_is_ahead_has_a_forecast(
    engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    queue = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines, start=False)
    first, second = (queue.submit(small(backends={})) for _ in range(2))
    builds = [queue.add_task(build(), sentence("Build"), seconds) for seconds in (240.0, None, None)]
    video = queue.store.get(first.id).seconds
    assert video is not None and builds[0].seconds_left == 240.0
    assert queue.seconds_until(queue.ahead(second)) == video
    assert queue.seconds_until(queue.ahead(builds[1])) == pytest.approx(2 * video + 240.0)
    assert queue.seconds_until(queue.ahead(builds[2])) is None
    # Videos do not wait for a build that runs. One that made room for them builds only what is not finished yet.
    started = queue.store.order.claim("app.0", ["build"])
    assert started is not None and started.id == builds[0].id
    engine = BuildProgress(program="vae", backend="tensorrt", expected=100.0)
    states = [engine.model_copy(update={"state": state}) for state in ("done", "kept", "running", "waiting")]
    event = {"event": "TaskBuilds", "builds": [each.model_dump(mode="json") for each in states]}
    queue.store.log.append(started.id, event)
    builds[0].refresh()
    assert queue.ahead(second).keys() == {first.id} and builds[0].seconds_left == pytest.approx(200.0, abs=20.0)
    queue.store.log.append(started.id, {"event": "PutBack"})
    builds[0].refresh()
    assert builds[0].seconds_left == 200.0
    # A video that runs counts with the time that it still takes.
    started = queue.store.order.claim("app.0", ["video"])
    assert started is not None and started.id == first.id
    for progress in (Planned(plan=first.plan), StageStarted(stage="denoise", part="transformer")):
        queue.store.log.append(first.id, progress.model_dump(mode="json"))
    first.refresh()
    assert first.seconds_left is not None and first.seconds_left < 0.4 * video
    assert queue.seconds_until(queue.ahead(second)) == pytest.approx(first.seconds_left, abs=0.4 * video)
    queue.close()


@pytest.mark.slow
def test_a_cancelled_build_leaves_no_files_and_the_worker_continues(
    queue: JobQueue, engines: EngineService, spec: ModelSpec
) -> None:
    built = queue.add_task(build(), sentence("Build"))
    until(lambda: any("xporting" in line for line in built.log), meanwhile=lambda: built.open)
    queue.cancel([built.id])
    wait_for(built)
    assert (built.state, code(built)) == ("cancelled", "task.cancelled")
    assert engines.store.index() == []
    assert [path.name for path in engines.store.folder.iterdir() if path.name != ".locks"] == []
    after = queue.submit(small(backends={}))
    wait_for(after)
    assert after.state == "done"


def test_an_unsupported_build_is_refused(queue: JobQueue, engines: EngineService, spec: ModelSpec) -> None:
    built = add(queue, build(backends={"vae": "tensorrt"}))
    assert built.state == "failed"
    assert built.result is not None
    assert (built.result.code, built.result.data["backend"]) == ("pipeline.not_buildable", "tensorrt")
    nothing = add(queue, build(backends={"vae": "pytorch"}))
    assert (nothing.state, code(nothing)) == ("done", "task.nothing_to_build")


def test_an_internal_error_ends_the_task_and_not_the_worker(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr("runtime.engines.store.EngineStore.prune", broken)
        ended = add(queue, PruneEngines(max_bytes=0))
    assert (ended.state, code(ended)) == ("failed", "event.internal_error")
    assert ended.result is not None and "on purpose" in ended.result.data["error"]
    assert add(queue, PruneEngines(max_bytes=0)).state == "done"


@pytest.mark.slow
def test_old_ended_tasks_are_forgotten(queue: JobQueue) -> None:
    for _ in range(30):
        last = add(queue, PruneEngines(max_bytes=0))
    tasks = queue.tasks()
    assert tasks[-1] is last
    assert len(tasks) < 15


def test_closing_a_queue_in_memory_cancels_tasks(engines: EngineService, spec: ModelSpec, tmp_path: Path) -> None:
    queue = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines)
    built = [queue.add_task(build(width=size), sentence("Build")) for size in (32, 48)]
    queue.close()
    assert [task.state for task in built] == ["cancelled", "cancelled"]
    assert engines.store.index() == []


@pytest.mark.slow
def test_an_engine_file_is_inspected_and_imported_after_a_cancelled_import(
    queue: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    path = exported_files.transformer(spec, tmp_path / "foreign.onnx")
    looked = add(queue, InspectEngine(path=path, model="tiny"))
    assert (looked.state, code(looked)) == ("done", "task.inspected")
    assert "Input sample (1, 16, 3, 5, 8) float16" in looked.found
    serves = {"model": "tiny", "sizes": "64x32, 9 frames"}
    assert str(fact("engine.import_could_serve", components=["transformer"], **serves)) in looked.found
    assert any(line.startswith("Text: repeated 2 times") for line in looked.found)
    assert engines.store.index() == []
    refused = add(queue, InspectEngine(path=path, model="tiny", component="vae"))
    assert refused.state == "failed"
    assert refused.result is not None
    assert refused.result.data["cause"] == Fact("engine.mismatch_kind", {"kind": "transformer"})
    # The contract is shown nevertheless.
    assert "Input timestep (1) int64" in refused.found
    cancelled = queue.add_task(ImportEngine(path=path, model="tiny"), sentence("Import"))
    until(lambda: any(line.startswith("Comparing") for line in cancelled.log), meanwhile=lambda: cancelled.open)
    queue.cancel([cancelled.id])
    wait_for(cancelled)
    assert cancelled.state == "cancelled"
    assert engines.store.index() == []
    assert [one.name for one in engines.store.folder.iterdir() if one.name != ".locks"] == []
    imported = add(queue, ImportEngine(path=path, model="tiny"))
    assert imported.state == "done", imported
    (record,) = engines.store.index()
    assert imported.result is not None and imported.result.code == "task.imported"
    assert imported.result.data["engine"] == record.id
    assert imported.result.data["detail"].code == "engine.compared"
    assert str(fact("engine.import_serves", component="transformer", **serves)) in imported.found
    assert str(fact("engine.comparing_with", component="transformer", model="tiny")) in imported.log


@pytest.mark.slow
@pytest.mark.parametrize("work", [InspectEngine, ImportEngine])
def test_a_file_that_is_no_engine_is_refused(
    work: type[InspectEngine | ImportEngine], queue: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    path = tmp_path / "noise.onnx"
    path.write_bytes(bytes(range(256)) * 20)
    refused = add(queue, work(path=path, model="tiny"))
    assert refused.state == "failed"
    assert refused.result is not None
    assert refused.result.code == "engine.onnx_damaged"
    assert refused.found == ()
    # A user error: no traceback.
    assert not any("Traceback" in line for line in refused.log)
