"""Work on the engine library in the worker's line: real builds (ONNX Runtime, tiny model), real videos beside them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.core.events import TerminalEvent, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.queue import tasks
from runtime.queue.service import Job, JobQueue
from runtime.queue.tasks import Task
from tests.engines import foreign
from tests.waiting import until


@pytest.fixture
def engines(tmp_path: Path) -> EngineService:
    """An empty library."""
    return EngineService(EngineStore(tmp_path / "engines", 10**10), probe(), tmp_path)


@pytest.fixture
def spec(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> ModelSpec:
    """A tiny model in the weights folder."""
    folder = tmp_path / "weights" / "tiny"
    shutil.copytree(tiny("wan2.1").directory, folder)
    return read_spec(folder, "tiny")


@pytest.fixture
def worker(engines: EngineService, spec: ModelSpec, tmp_path: Path) -> Iterator[JobQueue]:
    made = JobQueue(tmp_path / "weights", tmp_path / "outputs", engines)
    yield made
    made.close()


def small(**values: object) -> GenerationRequest:
    """Ask for a tiny clip, its text encoder on ONNX Runtime."""
    wanted: dict[str, object] = {"prompt": "a red boat", "model": "tiny", "width": 32, "height": 32, "frames": 5}
    wanted |= {"steps": 2, "fps": 8, "backends": {"text_encoder": "onnxruntime"}}
    return GenerationRequest.from_mapping(wanted | values)


def wait_for(one: Job | Task) -> None:
    """Wait until it has ended."""
    until(lambda: one.state not in {"queued", "running"})


def add(worker: JobQueue, task: Task) -> Task:
    """Queue a chore and wait until it has ended."""
    worker.add_task(task)
    wait_for(task)
    return task


def test_an_engine_is_built_used_verified_and_deleted(
    worker: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    built = add(worker, tasks.building(small(), spec, engines))
    assert (built.state, built.said) == ("done", "1 of 1 ready.")
    assert built.share == 1.0
    assert "Exporting to ONNX" in built.log
    (record,) = engines.store.index()
    again = add(worker, tasks.building(small(), spec, engines))
    assert again.state == "done"
    assert [one.built_at for one in engines.store.index()] == [record.built_at]

    # The video keeps its engine open for the next one; deleting it lets go first.
    job = worker.submit(small())
    wait_for(job)
    assert isinstance(job.events[-1], VideoSaved)
    assert job.events[-1].plan["components"]["text_encoder"]["backend"] == "onnxruntime"
    verified = add(worker, tasks.verifying(record.id, [spec], engines))
    assert verified.state == "done", verified
    assert verified.said.startswith("Right: relative error")
    deleted = add(worker, tasks.deleting(record.id, engines))
    assert deleted.state == "done", deleted
    assert engines.store.index() == []
    gone = add(worker, tasks.deleting(record.id, engines))
    assert (gone.state, gone.said) == ("failed", f"There is no engine '{record.id}'.")
    lost = add(worker, tasks.verifying(record.id, [spec], engines))
    assert lost.state == "failed"


def test_a_damaged_engine_fails_verification_and_is_pruned(
    worker: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    add(worker, tasks.building(small(), spec, engines))
    (record,) = engines.store.index()
    engine = engines.store.path(record.id) / "engine.onnx"
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)
    found = add(worker, tasks.verifying(record.id, [spec], engines))
    assert found.state == "failed"
    assert "engine.onnx was changed since it was built" in found.said
    small_store = EngineService(EngineStore(engines.store.folder, 0), engines.machine, engines.notes)
    pruned = add(worker, tasks.pruning(small_store))
    assert pruned.said == "Deleted 1 engine; 0 B are left."


def test_tasks_and_jobs_share_one_line(worker: JobQueue, engines: EngineService, spec: ModelSpec) -> None:
    running = worker.submit(small(steps=1000, backends={}))
    build = tasks.building(small(), spec, engines)
    worker.add_task(build)
    waiting = worker.submit(small(backends={}))
    assert [one.id for one in worker.ahead(waiting)] == [running.id, build.id]
    assert len(worker.ahead(waiting)) == 2
    assert worker.active() is running
    assert worker.latest() is waiting
    assert worker.job(build.id) is None
    # One that waits is taken out at once, though the line stands.
    worker.cancel_task(build.id)
    assert (build.state, build.said) == ("cancelled", "Cancelled before it began.")
    assert [one.id for one in worker.ahead(waiting)] == [running.id]
    running.cancel.request()
    wait_for(waiting)
    assert isinstance([event for event in waiting.events if isinstance(event, TerminalEvent)][-1], VideoSaved)
    assert engines.store.index() == []


def test_a_cancelled_build_leaves_nothing_and_the_worker_goes_on(
    worker: JobQueue, engines: EngineService, spec: ModelSpec
) -> None:
    build = tasks.building(small(), spec, engines)
    worker.add_task(build)
    until(lambda: "Exporting to ONNX" in build.log, meanwhile=lambda: build.open)
    worker.cancel_task(build.id)
    wait_for(build)
    assert build.state == "cancelled"
    assert engines.store.index() == []
    assert [path.name for path in engines.store.folder.iterdir() if path.name != ".locks"] == []
    after = worker.submit(small(backends={}))
    wait_for(after)
    assert after.state == "done"


def test_one_part_alone(worker: JobQueue, engines: EngineService, spec: ModelSpec) -> None:
    request = small(backends={"all": "onnxruntime"})
    built = add(worker, tasks.building(request, spec, engines, part="transformer"))
    assert built.said == "1 of 1 ready."
    assert [record.key.program for record in engines.store.index()] == ["transformer"]


def test_what_cannot_be_built_here_says_so(worker: JobQueue, engines: EngineService, spec: ModelSpec) -> None:
    built = add(worker, tasks.building(small(backends={"vae": "tensorrt"}), spec, engines))
    assert built.state == "failed"
    assert "TensorRT engines cannot be built here" in built.said
    assert built.remedy
    nothing = add(worker, tasks.building(small(backends={"vae": "pytorch"}), spec, engines))
    assert (nothing.state, nothing.said) == ("done", "Nothing is to be built: PyTorch was chosen for every part.")


def test_a_defect_ends_the_task_and_not_the_worker(worker: JobQueue) -> None:
    def broken(_task: Task, _free: Callable[[], None]) -> str:
        raise ZeroDivisionError("on purpose")

    ended = add(worker, Task("build", "Broken", broken))
    assert ended.state == "failed"
    assert "on purpose" in ended.said
    assert add(worker, Task("build", "Whole", lambda *_: "Done.")).said == "Done."


def test_old_tasks_are_forgotten_and_open_ones_are_not(worker: JobQueue) -> None:
    for _ in range(30):
        last = add(worker, Task("prune", "Quick", lambda *_: "Done."))
    kept = worker.tasks()
    assert kept[-1] is last
    assert len(kept) < 15


def test_closing_cancels_tasks(engines: EngineService, spec: ModelSpec, tmp_path: Path) -> None:
    worker = JobQueue(tmp_path / "weights", tmp_path / "outputs", engines)
    built = [tasks.building(small(width=size), spec, engines) for size in (32, 48)]
    for task in built:
        worker.add_task(task)
    worker.close()
    assert [task.state for task in built] == ["cancelled", "cancelled"]
    assert engines.store.index() == []


@pytest.mark.slow
def test_a_file_made_elsewhere_is_looked_into_and_imported(
    worker: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    path = foreign.transformer(spec, tmp_path / "foreign.onnx")
    looked = add(worker, tasks.looking(path, spec, None, engines))
    assert (looked.state, looked.said) == ("done", "It can be imported, if it holds the model's own weights.")
    assert "takes sample (1, 16, 3, 5, 8) float16" in looked.found
    assert "Could stand for the transformer of tiny: 64x32, 9 frames." in looked.found
    assert any(line.startswith("Text: repeated 2 times") for line in looked.found)
    assert engines.store.index() == []
    refused = add(worker, tasks.looking(path, spec, "vae", engines))
    assert refused.state == "failed"
    assert "by its inputs and outputs it is a transformer" in refused.said and refused.remedy
    # What it is, is told all the same.
    assert "takes timestep (1) int64" in refused.found
    taken = add(worker, tasks.importing(path, spec, None, engines))
    assert taken.state == "done", taken
    (record,) = engines.store.index()
    assert taken.said.startswith(f"Imported as {record.id}: relative error ")
    assert "Stands for the transformer of tiny: 64x32, 9 frames." in taken.found
    assert any(line.startswith("Comparing with the transformer") for line in taken.log)


@pytest.mark.slow
def test_an_import_that_is_cancelled_or_of_other_weights_leaves_nothing(
    worker: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    path = foreign.transformer(spec, tmp_path / "other.onnx", module=foreign.other_transformer(spec))
    cancelled = tasks.importing(path, spec, None, engines)
    worker.add_task(cancelled)
    until(lambda: any(line.startswith("Comparing") for line in cancelled.log), meanwhile=lambda: cancelled.open)
    worker.cancel_task(cancelled.id)
    wait_for(cancelled)
    assert cancelled.state == "cancelled"
    refused = add(worker, tasks.importing(path, spec, None, engines))
    assert refused.state == "failed"
    assert "does not compute what the transformer of tiny does" in refused.said
    assert engines.store.index() == []
    assert [one.name for one in engines.store.folder.iterdir() if one.name != ".locks"] == []


@pytest.mark.parametrize("make", [tasks.looking, tasks.importing])
def test_a_file_that_is_no_engine_is_refused(
    make: Callable[..., Task], worker: JobQueue, engines: EngineService, spec: ModelSpec, tmp_path: Path
) -> None:
    path = tmp_path / "noise.onnx"
    path.write_bytes(bytes(range(256)) * 20)
    refused = add(worker, make(path, spec, None, engines))
    assert refused.state == "failed"
    assert refused.said.startswith("The ONNX file is damaged or none") and refused.remedy
    assert refused.found == ()
    # The file is at fault, not Tandem: nobody is shown where in its code that was found.
    assert not any("Traceback" in line for line in refused.log)
