"""Builds that run while no video waits: real engines (ONNX Runtime, tiny model), interrupted by videos."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.errors import StoreError
from runtime.core.events import StageStarted, VideoSaved
from runtime.core.facts import sentence
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.execution.compilation import discard_compiled_code
from runtime.models.spec import ModelSpec
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.instances import WorkerRegistry
from runtime.queue.job_planning import queue_builds, queue_compilation
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import ASKED_BUILD, IDLE_BUILD, VIDEOS, BuildEngines, JobRecord, PruneEngines
from runtime.queue.run import ControlPoller, PutBack, Run
from runtime.queue.store import JobStore
from runtime.upstream.torch import compiled_graphs
from tests.execution.test_compilation import forget_places
from tests.facts import fact
from tests.plans import machine
from tests.queue.samples import add_job
from tests.thread_queue import RunningQueue
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_children")

BUILD = (sentence("Build"), Path("/nowhere"), {"prompt": "a boat"})


@pytest.fixture
def queue(engines: EngineService, spec: ModelSpec, tmp_path: Path) -> Iterator[JobQueue]:
    made = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines, store=JobStore(tmp_path / "jobs.sqlite"))
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.sqlite")


def small(**values: object) -> GenerationRequest:
    """Return a request for a tiny clip with the text encoder on ONNX Runtime."""
    wanted: dict[str, object] = {"prompt": "a red boat", "model": "tiny", "width": 32, "height": 32, "frames": 5}
    wanted |= {"steps": 2, "fps": 8, "seed": 3, "backends": {"text_encoder": "onnxruntime"}}
    return GenerationRequest.from_mapping(wanted | values)


def builds(store: JobStore) -> list[JobRecord]:
    """Return all builds, oldest first."""
    return list(store.list(kinds=["build"]))[::-1]


def names(store: JobStore, job_id: str) -> list[str]:
    """Return the names of a job's events."""
    return [values["event"] for _, _, values in store.log.events(job_id)]


def ran_on(queue: JobQueue, **values: object) -> str:
    """Make a video; return what ran the text encoder."""
    job = queue.submit(small(**values))
    until(lambda: not job.open)
    assert isinstance(job.events[-1], VideoSaved), job.events[-1]
    return str(job.events[-1].plan["components"]["text_encoder"]["backend"])


@pytest.mark.slow
def test_a_video_starts_in_pytorch_and_the_next_ones_use_the_engine_while_it_is_built_again(
    queue: JobQueue, engines: EngineService
) -> None:
    job = queue.submit(small())
    part = job.plan.components["text_encoder"]
    assert (part.backend, part.badge and part.badge.code) == ("pytorch", "planner.built_later")
    assert len(part.later) == 1 and job.plan.request == small()
    until(lambda: not job.open)
    assert isinstance(job.events[-1], VideoSaved)
    assert "StageStarted" in names(queue.store, job.id)
    assert all(event.stage != "build" for event in job.events if event.event == "StageStarted")
    (fall,) = (fact for fact in job.events[-1].warnings if fact.code == "event.fell_back")
    assert fall.data["reason"].code == "planner.built_later"
    (build,) = builds(queue.store)
    assert build.idle
    until(lambda: queue.store.get(build.id).state == "done")
    ended, video_ended = queue.store.get(build.id).started, queue.store.get(job.id).ended
    assert ended is not None and video_ended is not None and ended >= video_ended
    (first,) = engines.store.index()
    assert first.id == part.later[0].id
    assert ran_on(queue) == "onnxruntime"
    assert len(builds(queue.store)) == 1

    only_text = {"all": "pytorch", "text_encoder": "onnxruntime"}
    assert ran_on(queue, build="always", backends=only_text) == "onnxruntime"
    until(lambda: [build.state for build in builds(queue.store)] == ["done", "done"])
    (second,) = engines.store.index()
    assert second.id == first.id and second.built_at > first.built_at


@pytest.mark.slow
def test_by_default_a_small_model_runs_on_engines_from_the_second_video_on(
    spec: ModelSpec, engines: EngineService, tmp_path: Path
) -> None:
    folders, store = (tmp_path / "weights", tmp_path / "outputs"), JobStore(tmp_path / "jobs.sqlite")
    queue = RunningQueue(*folders, replace(engines, idle_builds=True), store=store)
    values = small(backends={}).to_json()
    with contextlib.closing(queue):
        first = queue.submit(GenerationRequest.from_mapping(values))
        until(lambda: not first.open)
        assert isinstance(first.events[-1], VideoSaved), first.events[-1]
        parts = first.events[-1].plan["components"]
        assert {part["backend"] for part in parts.values()} == {"pytorch"}
        assert {part.reasons[0].code for part in first.plan.components.values()} == {"planner.built_later"}
        # No engines were requested, so the video does not warn about them.
        assert "event.fell_back" not in {fact.code for fact in first.events[-1].warnings}
        (build,) = builds(store)
        assert build.idle and build.title.startswith("Build engines for all components")
        # A video that is submitted meanwhile stops the build, which continues with the engines that are missing.
        until(engines.store.index)
        before = {record.id: record.built_at for record in engines.store.index()}
        other = queue.submit(GenerationRequest.from_mapping(values | {"seed": 4, "backends": {"all": "pytorch"}}))
        until(lambda: not other.open)
        assert isinstance(other.events[-1], VideoSaved), other.events[-1]
        seen = names(store, build.id)
        assert seen.count("PutBack") == 1 and "Ended" not in seen[: seen.index("PutBack")]
        until(lambda: not store.get(build.id).open)
        assert store.get(build.id).state == "done"
        assert {record.component for record in engines.store.index()} == {*parts}
        # Engines that were finished are kept.
        assert before.items() <= {record.id: record.built_at for record in engines.store.index()}.items()
        second = queue.submit(GenerationRequest.from_mapping(values | {"seed": 5}))
        until(lambda: not second.open)
        assert isinstance(second.events[-1], VideoSaved), second.events[-1]
        # The engines are loaded already.
        assert "load" not in {event.stage for event in second.events if isinstance(event, StageStarted)}
        # Each component runs on its engine, unless PyTorch was measured to be as fast.
        for name, part in second.plan.components.items():
            slower = part.reasons[-1].code == "planner.none_faster"
            assert (second.events[-1].plan["components"][name]["backend"] == "pytorch") is slower
        assert len(builds(store)) == 1


@pytest.mark.slow
def test_a_video_interrupts_a_build_that_was_asked_for(queue: JobQueue, engines: EngineService) -> None:
    # Two engines, so that one is left to build when the video arrives.
    wanted = {"backends": {"text_encoder": "onnxruntime", "transformer": "onnxruntime"}}
    task = queue.add_task(BuildEngines(request=small(**wanted).to_json()), sentence("Build"))
    until(engines.store.index, meanwhile=lambda: task.open)
    before = {record.id: record.built_at for record in engines.store.index()}
    job = queue.submit(small(backends={"all": "pytorch"}))
    assert queue.ahead(job) == {}
    until(lambda: not job.open)
    assert isinstance(job.events[-1], VideoSaved)
    seen = names(queue.store, task.id)
    assert seen.count("PutBack") == 1 and "Ended" not in seen[: seen.index("PutBack")]
    video, build = queue.store.get(job.id), queue.store.get(task.id)
    assert video.ended is not None and build.ended is None
    until(lambda: not task.open)
    assert task.state == "done"
    began, ended = queue.store.get(task.id).started, queue.store.get(task.id).ended
    assert began is not None and ended is not None and video.ended <= began < ended
    # Engines that were finished are kept.
    after = {record.id: record.built_at for record in engines.store.index()}
    assert before.items() <= after.items() and len(after) == 2


@pytest.mark.slow
@pytest.mark.compiler
def test_code_is_compiled_when_no_video_waits(
    spec: ModelSpec, engines: EngineService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_places(monkeypatch)
    discard_compiled_code()
    history = HistoryFile(tmp_path, engines.machine)
    store = JobStore(tmp_path / "jobs.sqlite")
    queue = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines, history, store)
    with contextlib.closing(queue):
        first = queue.submit(small(backends={}))
        until(lambda: not first.open)
        assert isinstance(first.events[-1], VideoSaved), first.events[-1]
        assert not first.plan.speed.compiled
        # As it is planned on a GPU.
        later = first.plan.replace(speed=first.plan.speed.replace(compiled_later=True))
        record = store.get(first.id)
        assert queue_compilation(record, later, spec, store, engines.machine, engines.store)
        assert not queue_compilation(record, later, spec, store, engines.machine, engines.store)
        (build,) = builds(store)
        assert build.idle and build.title == str(fact("task.compile", model="tiny", width=32, height=32, frames=5))
        # A video makes it put back, and it continues after the video.
        until(lambda: store.get(build.id).live is not None)
        other = queue.submit(small(backends={}, seed=4))
        until(lambda: not other.open)
        assert isinstance(other.events[-1], VideoSaved), other.events[-1]
        until(lambda: not store.get(build.id).open)
        record = store.get(build.id)
        assert (record.state, names(store, build.id).count("PutBack")) == ("done", 1)
        ended = [values["fact"]["code"] for _, _, values in store.log.events(build.id) if values["event"] == "Ended"]
        assert ended == ["task.compiled"]
        graphs = compiled_graphs()
        second = queue.submit(small(backends={}, seed=5, compile="always"))
        # From the cache; until that was measured, it is a guess.
        assert second.plan.seconds["compile"].likely == 2.0
        until(lambda: not second.open)
        assert isinstance(second.events[-1], VideoSaved), second.events[-1]
        assert second.events[-1].plan["speed"]["compiled"]
        assert not compiled_graphs().since(graphs).compiled
    discard_compiled_code()


@pytest.mark.slow
def test_a_cancelled_or_paused_idle_build(queue: JobQueue) -> None:
    assert ran_on(queue) == "pytorch"
    (build,) = builds(queue.store)
    until(lambda: queue.store.get(build.id).live is not None)
    queue.hold([build.id], True)
    until(lambda: queue.store.get(build.id).state == "queued")
    assert queue.store.get(build.id).held
    queue.hold([build.id], False)
    until(lambda: queue.store.get(build.id).state == "running")
    queue.cancel([build.id])
    until(lambda: not queue.store.get(build.id).open)
    assert queue.store.get(build.id).state == "cancelled"
    # The user does not want it: the next video does not queue it again.
    assert ran_on(queue) == "pytorch"
    assert len(builds(queue.store)) == 1


@pytest.mark.parametrize(
    ("build", "backends", "wanted"),
    [
        ("auto", {"vae": "onnxruntime"}, {"vae"}),
        ("auto", {}, set()),
        ("missing", {}, {"text_encoder", "transformer", "vae"}),
        ("idle", {"vae": "pytorch"}, {"text_encoder", "transformer"}),
        ("never", {"vae": "onnxruntime"}, set()),
    ],
)
def test_what_is_built_later(
    build: str, backends: dict[str, str], wanted: Collection[str], spec: ModelSpec, engines: EngineService
) -> None:
    request = small(build=build, backends=backends)
    plan = resolve(request, spec, PlanningContext(machine(), Path("x.mp4"), engines.offers(spec)), builds_later=True)
    assert {name for name, part in plan.components.items() if part.later} == set(wanted)
    assert not any(part.engines for part in plan.components.values())
    assert plan.request == request and plan.builds_later
    # In one process, only "idle" builds later.
    alone = resolve(request, spec, PlanningContext(machine(), Path("x.mp4"), engines.offers(spec)))
    assert alone.builds_later == (build == "idle")
    assert bool(plan.model_validate_json(plan.model_dump_json()) == plan)


def test_a_build_of_some_components_is_titled_with_their_names(
    store: JobStore, spec: ModelSpec, engines: EngineService
) -> None:
    request = small(build="idle", backends={"vae": "pytorch"})
    plan = resolve(request, spec, PlanningContext(machine(), Path("x.mp4"), engines.offers(spec)))
    assert queue_builds(store.add(request, plan), plan, spec, store, engines.store)
    (build,) = builds(store)
    components = {"names": ["text_encoder", "transformer"], "among": list(plan.components)}
    size = {"width": plan.width, "height": plan.height, "frames": plan.frames}
    assert build.title == str(fact("task.build", components=components, model=plan.model, **size))


def test_the_same_engines_are_queued_once(store: JobStore, spec: ModelSpec, engines: EngineService) -> None:
    request = small(build="idle")
    plan = resolve(request, spec, PlanningContext(machine(), Path("x.mp4"), engines.offers(spec)))
    record = store.add(request, plan)
    assert queue_builds(record, plan, spec, store, engines.store)
    assert not queue_builds(record, plan, spec, store, engines.store)
    (build,) = builds(store)
    assert set(build.request["backends"]) == {name for name, part in plan.components.items() if part.later}
    assert build.request["build"] == "missing"


def test_a_build_for_a_gpu_of_another_kind_is_queued_once(queue: JobQueue) -> None:
    store, request = queue.store, small(build="missing").to_json()
    assert store.add_idle_build(sentence("Build"), Path("/nowhere"), request, {"not-of-this-machine"})
    (build,) = builds(store)
    until(lambda: not store.get(build.id).open)
    (ended,) = (values for _, _, values in store.log.events(build.id) if values["event"] == "Ended")
    assert (store.get(build.id).state, ended["fact"]["code"]) == ("done", "task.nothing_to_build")
    assert not store.add_idle_build(sentence("Build"), Path("/nowhere"), request, {"not-of-this-machine"})
    assert store.add_idle_build(sentence("Build"), Path("/nowhere"), request, {"not-of-this-machine", "new"})


def test_a_build_makes_room_after_three_polls_in_a_row(store: JobStore) -> None:
    assert store.add_idle_build(*BUILD, {"e1"})
    record, poller, wanted = store.order.claim("aa.0"), ControlPoller(store), [True, True, False, True, True]
    assert record is not None
    with Run(record, poller, is_wanted=lambda: wanted.pop(0) if wanted else True) as run:
        for _ in range(5):
            poller.poll()
            assert not run.cancel.requested
        poller.poll()
        assert run.cancel.requested and run.cancel.pausing
        run.settle(PutBack())
    assert store.get(record.id).state == "queued"


def test_idle_builds_come_last_and_not_beside_a_video(store: JobStore) -> None:
    registry = WorkerRegistry(store.database)
    for app, gpu in (("aa", 0), ("bb", 0), ("cc", 1)):
        registry.register(f"{app}.{gpu}", gpu)
    assert store.add_idle_build(*BUILD, {"e1"})
    assert not store.add_idle_build(*BUILD, {"e1"})
    assert store.add_idle_build(*BUILD, {"e2"})
    video = add_job(store)
    assert store.order.jobs()[0].id == video.id
    assert store.order.claim("bb.0") == store.get(video.id)
    # Its GPU is in use, by another app's worker.
    assert store.order.makes_room(IDLE_BUILD, "aa.0") and store.order.claim("aa.0") is None
    build = store.order.claim("cc.1")
    assert build is not None and build.idle and not store.order.makes_room(IDLE_BUILD, "cc.1")
    store.put_back(video.id)
    assert store.order.makes_room(IDLE_BUILD, "cc.1")
    store.hold([video.id], True)
    assert not store.order.makes_room(IDLE_BUILD, "cc.1")
    # A video of the command line, whose process is no worker.
    alone = add_job(store, instance="dd")
    assert store.order.claim("aa.0") is None
    store.request_cancel([alone.id])
    store.put_back(alone.id)
    assert store.get(alone.id).state == "cancelled"
    second = store.order.claim("aa.0")
    assert second is not None and second.idle and second.id != build.id


def test_builds_come_after_videos_and_those_that_were_asked_for_before_idle_ones(store: JobStore) -> None:
    WorkerRegistry(store.database).register("aa.0", 0)
    assert store.add_idle_build(*BUILD, {"e1"})
    idle, order = builds(store)[0], store.order
    assert order.claim("aa.0") == store.get(idle.id)
    asked = store.add_work("build", *BUILD)
    assert order.makes_room(IDLE_BUILD, "aa.0")
    assert list(order.ahead(asked.id)) == [] and order.count_ahead(asked.id) == 0
    store.put_back(idle.id)
    task = store.add_work("task", sentence("Prune"), Path("/nowhere"), PruneEngines(max_bytes=0).model_dump())
    assert [job.id for job in order.jobs()] == [task.id, asked.id, idle.id]
    assert order.claim("aa.0", ["build"]) == store.get(asked.id)
    # Only videos interrupt it.
    assert not order.makes_room(ASKED_BUILD, "aa.0")
    assert list(order.ahead(task.id)) == [asked.id] and order.count_ahead(task.id) == 1
    video = add_job(store)
    assert order.makes_room(ASKED_BUILD, "aa.0")
    assert list(order.ahead(video.id)) == [task.id] and order.count_ahead(video.id) == 1
    store.put_back(asked.id)
    claimed = [order.claim("aa.0") for _ in range(2)]
    assert [job and job.id for job in claimed] == [task.id, video.id]
    # A second process on the same GPU.
    assert order.claim("bb.0") is None
    store.request_cancel([video.id])
    store.put_back(video.id)
    claimed = [order.claim("bb.0") for _ in range(2)]
    assert [job and job.id for job in claimed] == [asked.id, idle.id]
    with pytest.raises(StoreError):
        order.rearrange(store.add_work("build", *BUILD).id, lambda place: place - 1)


def test_a_build_does_not_wait_for_videos_of_a_clusters_other_machines(store: JobStore) -> None:
    WorkerRegistry(store.database).register("aa.0", 0)
    video, build = add_job(store), store.add_work("build", *BUILD)
    assert store.order.claim_job(video.id, "aa.node1") is not None
    assert store.order.claim("aa.0", ["build", "task"]) == store.get(build.id)
    assert not store.order.makes_room(ASKED_BUILD, "aa.0", ["build", "task"])


def test_an_idle_build_of_a_dead_app_is_queued_again_once(store: JobStore) -> None:
    assert store.add_idle_build(*BUILD, {"e1"})
    states = []
    for _ in range(2):
        claimed = store.order.claim("dead.0")
        assert claimed is not None
        states.append(store.interrupt(claimed.id, "dead.0", None))
    assert states == ["queued", "interrupted"]


def test_an_idle_build_runs_on_the_gpu_that_its_engines_are_for(store: JobStore) -> None:
    registry = WorkerRegistry(store.database)
    for gpu in (0, 1):
        registry.register(f"aa.{gpu}", gpu)
    assert store.add_idle_build(*BUILD, {"e1"}, gpu=1)
    # The worker of the first GPU takes all other builds.
    assert store.order.claim("aa.0") is None
    build = store.order.claim("aa.1", VIDEOS)
    assert build is not None and build.engines == "e1"
    assert store.add_idle_build(*BUILD, {"e2"}, gpu=0)
    assert store.order.claim("aa.1", VIDEOS) is None
    first = store.order.claim("aa.0")
    assert first is not None and first.engines == "e2"
    # The GPU was removed.
    assert store.add_idle_build(*BUILD, {"e3"}, gpu=2)
    assert store.order.claim("aa.1", VIDEOS) is None
    last = store.order.claim("aa.0")
    assert last is not None and last.engines == "e3"


def test_a_video_queues_the_builds_for_its_gpu(
    store: JobStore, spec: ModelSpec, engines: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = []
    monkeypatch.setattr(store, "add_idle_build", lambda *values, **_: queued.append(values[-1]))
    request = small(build="idle")
    on_cpu = resolve(request, spec, PlanningContext(machine(), Path("x.mp4"), engines.offers(spec)))
    parts = {
        name: part.replace(device="cpu" if name == "text_encoder" else "cuda:1")
        for name, part in on_cpu.components.items()
    }
    for plan in (on_cpu, on_cpu.replace(components=parts)):
        queue_builds(store.add(request, plan), plan, spec, store, engines.store)
    assert queued == [0, 1]
