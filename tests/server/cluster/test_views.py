"""What is shown of a cluster: where waiting videos will run, by a real queue; and which components fell back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH
from runtime.queue.job_queue import JobQueue
from runtime.server.cluster.forecast import Expected, forecast
from runtime.server.cluster.problems import Problem, refusal
from runtime.server.cluster.ray_process import versions
from runtime.server.cluster.views import HEAD, RayNode, VideoQueue, cluster_view, fallbacks_in, why_not_started
from tests.cluster_views import H100, NODES, queue_in, run_on, sample_view, waiting, working
from tests.queue.samples import add_job, sample_plan
from tests.server.test_scheduling import NOW, job, worker


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    with queue_in(tmp_path) as made:
        yield made


def test_the_scheduler_decides_ahead_of_time() -> None:
    """The worker that is free first takes a video, unless another one has its model in memory by then."""
    waiting = [job("a"), job("b", model="hunyuan"), job("c"), job("d", model="hunyuan", owner="bob")]
    workers = [worker("busy", loaded="wan"), worker("idle", models="hunyuan")]
    found = forecast(waiting, workers, {"busy": 30.0}, {}, NOW, 10)
    assert found[0] == Expected("d", "idle", 0.0, "stored")  # Bob has used nothing
    assert [one.job for one in found] == ["d", "a", "b", "c"]
    assert [(one.worker, one.seconds, one.why) for one in found[1:]] == [
        ("busy", 30.0, "loaded"),
        ("idle", 60.0, "loaded"),
        ("busy", 90.0, "loaded"),
    ]
    assert forecast(waiting, workers, {"busy": 30.0}, {}, NOW, 2) == found[:2]
    assert forecast(waiting, [], {}, {}, NOW, 10) == []


def test_owners_take_turns_also_ahead_of_time() -> None:
    waiting = [job("a"), job("b"), job("c", owner="bob"), job("d", owner="bob")]
    assert [one.job for one in forecast(waiting, [worker("w", loaded="wan")], {}, {}, NOW, 10)] == ["a", "c", "b", "d"]


def test_workers_of_the_head_take_the_first_video() -> None:
    waiting = [job("a", model="other"), job("b")]
    assert forecast(waiting, [worker("own", loaded="wan")], {}, {}, NOW, 1, ["own"]) == [
        Expected("a", "own", 0.0, "sent")
    ]
    assert forecast(waiting, [worker("own", loaded="wan")], {}, {}, NOW, 1)[0].job == "b"


def test_a_video_that_fits_no_worker_has_no_place() -> None:
    assert [one.job for one in forecast([job("big", gpus=8), job("a")], [worker("w")], {}, {}, NOW, 9)] == ["a"]


def test_machines_videos_and_reasons_are_shown(queue: JobQueue) -> None:
    view = sample_view(queue)
    assert [(node.head, node.state, len(node.workers)) for node in view.nodes] == [
        (True, "ready", 0),
        (False, "ready", 2),
        (False, "ready", 1),
        (False, "starting", 0),
        (False, "lost", 0),
    ]
    alpha = view.nodes[1]
    assert [gpu.name for gpu in alpha.gpus] == [H100.gpus[0].name] * 2
    running = alpha.workers[0]
    assert running.progress is not None and (running.progress.step, running.progress.steps) == (3, 4)
    assert 0 < running.progress.percent < 100 and running.fallbacks[0].component == "vae"
    assert view.queued == 5
    reasons = [one.reason.code.removeprefix("server.cluster_place_") for one in view.queue]
    assert reasons == ["loaded", "sent", "gpus", "memory", "held"]
    assert [one.worker for one in view.queue[:2]] == ["head.node1", "head.node2"]
    assert all(one.seconds is None and one.node is None for one in view.queue[2:])


def test_the_heads_own_workers_are_shown_if_they_make_videos(queue: JobQueue) -> None:
    queue.makes_videos = True
    (name,) = queue.video_workers().values()
    running = run_on(queue, add_job(queue.store), name)
    waits = add_job(queue.store)
    view = cluster_view(queue, VideoQueue([running], [waiting(waits)], queued=1))
    (head,) = view.nodes
    assert (head.id, head.workers[0].job, head.workers[0].model) == (HEAD, running.id, "diorama")
    assert (view.queue[0].node, view.queue[0].reason.code) == (HEAD, "server.cluster_place_loaded")
    assert view.queue[0].seconds


@pytest.mark.parametrize(("nodes", "code"), [(0, "none"), (1, "loaded")])
def test_the_first_of_many_videos_are_shown(queue: JobQueue, nodes: int, code: str) -> None:
    jobs = [add_job(queue.store, f"number {number}") for number in range(30)]
    workers = [working("head.node0", NODES[0], H100, loaded="diorama")] * nodes
    view = cluster_view(queue, VideoQueue((), [waiting(one) for one in jobs], queued=30), NODES[:nodes], workers)
    assert (len(view.queue), view.queued) == (20, 30)
    assert {one.reason.code for one in view.queue} == {f"server.cluster_place_{code}"}


class RuntimeEnvSetupError(Exception): ...


class ActorUnschedulableError(Exception): ...


class OutOfMemoryError(Exception): ...


class ActorDiedError(Exception):
    actor_init_failed = False


class RaisedAtStartError(ActorDiedError):
    actor_init_failed = True


@pytest.mark.parametrize(
    ("error", "seconds", "fact"),
    [
        (None, 3.0, None),
        (None, 12.0, Fact("server.cluster_start_slow", {"seconds": 12.0})),
        (
            RuntimeEnvSetupError("Failed\n no disk \n"),
            1.0,
            Fact("server.cluster_start_environment", {"reason": "no disk"}),
        ),
        (ActorUnschedulableError("x"), 1.0, Fact("server.cluster_start_resources")),
        (OutOfMemoryError("long text"), 1.0, Fact("server.cluster_start_memory")),
        (ActorDiedError("long text"), 1.0, Fact("server.cluster_start_died")),
        (
            RaisedAtStartError("Traceback:\n  File\nModuleNotFoundError: No module named 'torch'"),
            1.0,
            Fact("server.cluster_start_failed", {"reason": "ModuleNotFoundError: No module named 'torch'"}),
        ),
    ],
)
def test_why_a_worker_does_not_start(error: Exception | None, seconds: float, fact: Fact | None) -> None:
    assert why_not_started(error, seconds) == fact


def test_a_machine_whose_worker_does_not_start_says_why(queue: JobQueue) -> None:
    problem = Fact("server.cluster_start_died")
    nodes = [RayNode("a" * 12, "alpha", True, problem), RayNode("b" * 12, "beta", False, problem)]
    refused = refusal(versions(), {"Tandem": "0.0.1", "Python": "2.7", "host": "gamma"})
    assert refused is not None and refused.data["found"] == "Tandem 0.0.1, Python 2.7"
    assert refusal(versions(), {**versions(), "host": "gamma"}) is refusal(versions(), {}) is None
    view = cluster_view(queue, VideoQueue(), nodes, refused=[Problem(host="gamma", fact=refused)])
    assert [node.problem for node in view.nodes] == [None, problem, None, refused]
    assert [node.state for node in view.nodes] == ["ready", "starting", "lost", "refused"]


def test_components_that_a_machine_runs_in_pytorch_are_fallbacks() -> None:
    """What was planned on an engine, or asked for, and what was neither."""
    plan = sample_plan()
    missing = Fact("engine.none_yet")
    vae = plan.components["vae"]
    planned = plan.replace(components={**plan.components, "vae": vae.replace(backend="onnxruntime")})
    here = plan.replace(components={**plan.components, "vae": vae.replace(backend=PYTORCH, reasons=(missing,))})
    (found,) = fallbacks_in(here, planned, "12345678")
    assert (found.component, found.backend, found.reason) == ("vae", "onnxruntime", missing)
    asked = here.replace(request=here.request.replace(backends={"transformer": "inductor"}))
    assert [one.component for one in fallbacks_in(asked, planned, "12345678")] == ["transformer", "vae"]
    assert fallbacks_in(here, None, "12345678") == []
