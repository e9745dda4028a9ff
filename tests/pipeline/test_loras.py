"""Jobs with LoRAs on tiny models: weights are added and removed, resuming is exact. Engines: see test_on_engines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.events import Event, Resumed, StepDone, VideoSaved, Warned
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder, identity
from runtime.pipeline.files import stamps
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.job_planning import JobReplanner
from runtime.queue.store import JobStore
from runtime.video.mp4 import read_metadata
from tests import lora_files
from tests.lora_files import factors
from tests.pipeline.runs import events_of
from tests.pipeline.test_run import frames_of
from tests.plans import machine, no_engines

SIZE: dict[str, object] = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 5, "steps": 4, "seed": 3}


class Place:
    """A model, a folder with a LoRA called "style", and where jobs are planned and run."""

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self.spec = spec
        self.weights = folder / "weights"
        self.folder = folder
        self.lora = lora_files.save(
            self.weights / "loras" / "style.safetensors", lora_files.wan(factors(spec.transformer))
        )
        self.engines = EngineService(EngineStore(folder / "engines", 10**10), probe(), folder)

    def plan(self, *loras: str, **values: object) -> tuple[ExecutionPlan, ModelSpec]:
        """Plan a tiny clip."""
        request = GenerationRequest.from_mapping(SIZE | {"loras": loras} | values)
        spec = with_loras(self.spec, request.loras, self.weights)
        output = self.folder / "x.mp4"
        return resolve(request, spec, PlanningContext(machine(), output, self.engines.offers(spec))), spec

    def run(
        self,
        plan: ExecutionPlan,
        spec: ModelSpec,
        checkpoints: CheckpointFolder | None = None,
        stop: int = 0,
        residency: Residency | None = None,
    ) -> list[Event]:
        """Run a job, to its end or to a step."""
        with Residency(self.engines) as own:
            return events_of(
                plan,
                spec,
                residency or own,
                pause_at=lambda event: isinstance(event, StepDone) and event.step == stop,
                checkpoints=checkpoints,
            )


@pytest.fixture
def place(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Place:
    return Place(tiny("wan2.2-a14b"), tmp_path)


@pytest.mark.slow
def test_a_lora_is_added_and_removed_in_one_residency(place: Place) -> None:
    video = place.folder / "x.mp4"
    frames, digests = [], []
    with Residency() as residency:
        for loras in ((), ("style:0.8",), ("style:0.4",), ("low=style:0.8",), ()):
            plan, spec = place.plan(*loras)
            events = place.run(plan, spec, residency=residency)
            assert isinstance(events[-1], VideoSaved), events[-1]
            frames.append(frames_of(video))
            facts = read_metadata(video)
            digests.append([(use["name"], use["digest"], use["weight"]) for use in facts["plan"]["loras"]])
            assert GenerationRequest.from_mapping(facts["request"]).loras == tuple(
                use.requested() for use in plan.loras
            )
            assert str(place.lora) not in str(facts["plan"])
    assert frames[0] == frames[4]
    assert len({bytes(one) for one in frames}) == 4
    digest = spec.loras[0].digest if spec.loras else place.plan("style")[1].loras[0].digest
    assert digests == [[], [("style", digest, 0.8)], [("style", digest, 0.4)], [("style", digest, 0.8)], []]


@pytest.mark.slow
def test_resuming_gives_the_same_video_and_another_lora_file_starts_over(place: Place) -> None:
    plan, spec = place.plan("style")
    video = place.folder / "x.mp4"
    place.run(plan, spec)
    wanted = frames_of(video)
    checkpoints = CheckpointFolder(place.folder / "job")
    place.run(plan, spec, checkpoints, stop=2)
    # As the job store returns it.
    again = ExecutionPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    events = place.run(again, spec, CheckpointFolder(place.folder / "job"))
    assert Resumed(step=2, of=4) in events
    assert frames_of(video) == wanted
    place.run(plan, spec, checkpoints, stop=2)
    lora_files.save(place.lora, lora_files.wan(factors(place.spec.transformer, seed=5)))
    plan, spec = place.plan("style")
    events = place.run(plan, spec, CheckpointFolder(place.folder / "job"))
    assert Warned(fact=Fact("pipeline.checkpoint_unusable", {"cause": Fact("checkpoint.other_clip")})) in events
    assert not any(isinstance(event, Resumed) for event in events)
    assert frames_of(video) != wanted


def test_a_clip_without_loras_is_unchanged(place: Place) -> None:
    plan, spec = place.plan()
    files = stamps(spec)
    assert identity(files, plan) == identity(stamps(place.spec), plan)
    with_one, changed = place.plan("high=style")
    assert identity(stamps(changed), with_one) != identity(files, plan)


def test_resuming_with_another_lora_file_replans(place: Place) -> None:
    model = str(place.spec.directory)
    plan, _ = place.plan("style", model=model)
    request = GenerationRequest.from_mapping(SIZE | {"loras": ["style"], "model": model})
    planner = JobReplanner(place.weights, no_engines(place.folder), None)
    store = JobStore(None)
    record = store.add(request, plan, instance="here").replace(begun=True)
    assert record.generation_request() == request
    _, same = planner.plan(record, machine())
    assert same == plan
    lora_files.save(place.lora, lora_files.wan(factors(place.spec.transformer, seed=5)))
    spec, other = planner.plan(record, machine())
    assert other.loras == spec.loras != plan.loras
