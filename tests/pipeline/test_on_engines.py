"""Jobs on real engines (ONNX Runtime, tiny model): built, reused, damaged, failing while running."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import DEVICE_LOST, EngineError, MachineError
from runtime.core.events import (
    Cancelled,
    EngineProgress,
    Event,
    Failed,
    FellBack,
    StageStarted,
    TerminalEvent,
    VideoSaved,
)
from runtime.core.loras import Lora
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.build import BuildRequest, verify_engine
from runtime.engines.service import EngineService, OpenEngines
from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
from runtime.engines.store import EngineStore
from runtime.execution import engine_failures
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.pipeline.build_engines import wanted_engines
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import read_metadata
from tests import lora_files
from tests.conftest import build_once
from tests.facts import fact, states
from tests.lora_files import factors
from tests.pipeline.runs import Choice, events_of, never
from tests.pipeline.test_parity import sample
from tests.pipeline.test_run import frames_of
from tests.plans import Alone, machine, why

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

ON_ENGINES = {"backends": {"all": "onnxruntime"}}
SIZE = {"width": 64, "height": 32, "frames": 9}
# Random weights make noise of every frame, in which bfloat16 and H.264 differ more than in a picture; wrong caches or
# another step's latents give less than 20 dB.
SAME_NOISE_DB = 30
COMPONENTS = ["text_encoder", "transformer", "transformer_2", "vae"]
Infer = Callable[..., dict[str, torch.Tensor]]
End = Callable[[], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Bench:
    """A model and its engine library."""

    spec: ModelSpec
    engines: EngineService
    folder: Path

    def plan(self, **values: object) -> ExecutionPlan:
        """Plan a tiny clip, by default on ONNX Runtime."""
        wanted = {"prompt": "a red boat", **SIZE, "steps": 4, "seed": 3, "fps": 8}
        request = GenerationRequest.from_mapping(wanted | ON_ENGINES | values)
        return resolve(
            request, self.spec, PlanningContext(machine(), self.folder / "x.mp4", self.engines.offers(self.spec))
        )

    def run(
        self,
        plan: ExecutionPlan,
        stop: Choice = never,
        checkpoints: CheckpointFolder | None = None,
    ) -> list[Event]:
        """Run a job in a fresh residency; `stop` says at which event to cancel."""
        with Residency(self.engines) as residency:
            events = events_of(plan, self.spec, residency, cancel_at=stop, checkpoints=checkpoints)
        assert [event for event in events if isinstance(event, TerminalEvent)] == events[-1:]
        return events

    def visible(self) -> list[str]:
        """Return what lies in the library's folder."""
        return sorted(path.name for path in (self.folder / "engines").iterdir() if not path.name.startswith(".locks"))


def saved(events: list[Event]) -> VideoSaved:
    """Return the result, which must be a video."""
    assert isinstance(events[-1], VideoSaved), events[-1]
    return events[-1]


def backends(events: list[Event]) -> dict[str, str]:
    """Return what ran each component, as the result says."""
    return {name: part["backend"] for name, part in saved(events).plan["components"].items()}


def fallen(events: list[Event]) -> list[FellBack]:
    """Return the fallbacks."""
    return [event for event in events if isinstance(event, FellBack)]


def built(events: list[Event]) -> list[str]:
    """Return the components whose engines were built."""
    return [event.part or "" for event in events if isinstance(event, StageStarted) and event.stage == "build"]


def psnr(one: Path, other: Path) -> float:
    """Return the PSNR between two videos' frames, in dB."""
    a, b = (torch.frombuffer(bytearray(frames_of(path)), dtype=torch.uint8).double() for path in (one, other))
    error = (a - b).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf


@pytest.fixture(scope="module")
def stocked(
    tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelSpec, Path, list[Event]]:
    """Return a library that a first job has filled, and that job's events."""
    spec = tiny("wan2.2-a14b")

    def fill(folder: Path) -> list[Event]:
        bench = Bench(spec, EngineService(EngineStore(folder / "engines", 10**10), probe(), folder), folder)
        return bench.run(bench.plan())

    return spec, *build_once(tmp_path_factory, "job-engines", fill)


@pytest.fixture(scope="module")
def in_pytorch(stocked: tuple[ModelSpec, Path, list[Event]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the video of the tiny clip that PyTorch makes."""
    spec, library, _ = stocked
    folder = tmp_path_factory.mktemp("in-pytorch")
    bench = Bench(spec, EngineService(EngineStore(library / "engines", 10**10), probe(), library), folder)
    return saved(bench.run(bench.plan(backends={"all": "pytorch"}))).video


@pytest.fixture
def bench(stocked: tuple[ModelSpec, Path, list[Event]], tmp_path: Path) -> Bench:
    """Return a copy of that library, to be damaged."""
    spec, folder, _ = stocked
    shutil.copytree(folder / "engines", tmp_path / "engines")
    return Bench(spec, EngineService(EngineStore(tmp_path / "engines", 10**10), probe(), folder), tmp_path)


def break_after(monkeypatch: pytest.MonkeyPatch, ends: Mapping[tuple[str, int], End]) -> None:
    """Run real sessions, and end the call of each program that follows a number of its calls."""
    infer: Infer = OnnxRuntimeSession.infer
    marks = {"text_encoder": "input_ids", "transformer": "timestep", "vae_next": "cache_0"}
    calls: Counter[str] = Counter()

    def failing(self: OnnxRuntimeSession, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        for program, mark in marks.items():
            if mark in inputs:
                calls[program] += 1
                end = ends.get((program, calls[program] - 1))
                if end is not None:
                    return end()
        return infer(self, **inputs)

    monkeypatch.setattr(OnnxRuntimeSession, "infer", failing)


def failing() -> dict[str, torch.Tensor]:
    """Fail as an engine does."""
    raise EngineError("text", what="The engine failed: on purpose.", remedy="Nothing to do.")


def starving() -> dict[str, torch.Tensor]:
    """Run out of memory."""
    raise MemoryError


def breaking() -> dict[str, torch.Tensor]:
    """Fail as CUDA does."""
    raise torch.AcceleratorError("CUDA error: invalid argument")


def wrapping() -> dict[str, torch.Tensor]:
    """Run out of memory as torch-tensorrt does."""
    raise ValueError("the engine failed") from torch.OutOfMemoryError("CUDA out of memory")


def not_numbers() -> dict[str, torch.Tensor]:
    """Give NaN."""
    values = torch.full((1,), math.nan)
    return {"embeds": values[None], "velocity": values, "frames": values}


REASONS = {
    failing: "text",
    starving: "execution.engine_out_of_memory",
    breaking: "execution.engine_failed",
    wrapping: "execution.engine_out_of_memory",
    not_numbers: "execution.engine_not_finite",
}


def test_the_first_job_builds_what_is_missing(stocked: tuple[ModelSpec, Path, list[Event]]) -> None:
    _, folder, events = stocked
    assert set(backends(events).values()) == {"onnxruntime"}
    assert fallen(events) == []
    assert built(events) == [*COMPONENTS, "vae"]
    assert {event.component for event in events if isinstance(event, EngineProgress)} == set(COMPONENTS)
    ids = [name for part in saved(events).plan["components"].values() for name in part["engines"]]
    assert len(ids) == 5
    assert {path.name for path in (folder / "engines").iterdir() if path.name != ".locks"} == set(ids)
    assert all(part["engine"] in ids for part in saved(events).plan["components"].values())
    facts = read_metadata(saved(events).video)
    assert facts is not None
    assert json.loads(json.dumps(facts["plan"])) == json.loads(json.dumps(saved(events).plan))


def test_the_second_job_builds_nothing_and_matches_pytorch(bench: Bench, in_pytorch: Path) -> None:
    plan = bench.plan()
    assert all(not use.build for part in plan.components.values() for use in part.engines)
    events = bench.run(plan)
    assert built(events) == []
    assert fallen(events) == []
    assert set(backends(events).values()) == {"onnxruntime"}
    with Residency(bench.engines) as residency:
        on_engines = sample(bench.spec, plan, residency)
        wanted = sample(bench.spec, bench.plan(backends={"all": "pytorch"}), residency)
    assert (on_engines - wanted).norm() / wanted.norm() < 1e-3
    assert psnr(in_pytorch, saved(events).video) >= SAME_NOISE_DB


def test_auto_chooses_the_faster_measurement(bench: Bench) -> None:
    index = {record.id: record for record in bench.engines.store.index()}
    for name, part in bench.plan(backends={}).components.items():
        offer = next(o for o in bench.engines.offers(bench.spec)(name, (3, 4, 8), "cpu") if o.backend == "onnxruntime")
        assert offer.ready
        assert offer.speedup > 0
        assert part.backend == ("onnxruntime" if offer.speedup >= 1.03 else "pytorch"), why(part)
        assert {use.id for use in part.engines} <= set(index)


def test_build_never_falls_back_to_pytorch_with_a_reason(bench: Bench) -> None:
    events = bench.run(bench.plan(width=48, build="never"))
    assert set(backends(events).values()) == {"onnxruntime", "pytorch"}  # the text encoder knows no sizes
    assert [event.component for event in fallen(events)] == ["transformer", "transformer_2", "vae"]
    assert {event.reason.code for event in fallen(events)} == {"planner.asked_not_built"}
    assert states(fallen(events)[0].reason, fact("engine.differs_sizes", wanted=[fact("engine.size", frames=3)]))
    assert saved(events).warnings[-1] == fallen(events)[-1].fact
    assert built(events) == []


def flip(engine: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)


def empty(engine: Path) -> None:
    engine.write_bytes(b"")


def cut(engine: Path) -> None:
    engine.write_bytes(engine.read_bytes()[:-100])


def forge(engine: Path) -> None:
    """Change the manifest's versions: the key is no longer the folder's name."""
    manifest = engine.with_name("engine.json")
    manifest.write_text(manifest.read_text().replace('"torch"', '"torch", "0.0"], ["older"'))


def remove(engine: Path) -> None:
    shutil.rmtree(engine.parent)


def swap(engine: Path) -> None:
    """Put another engine's file in its place."""
    others = [path for path in engine.parents[1].glob("*/engine.onnx") if path != engine]
    shutil.copy(others[0], engine)


@pytest.mark.parametrize(
    "damages",
    [
        {"text_encoder": flip, "transformer": empty, "transformer_2": cut},
        {"transformer_2": forge},
        {"transformer_2": remove},
        {"transformer_2": swap},
    ],
)
def test_damage_between_plan_and_job_falls_back_to_pytorch(
    damages: Mapping[str, Callable[[Path], None]], bench: Bench
) -> None:
    plan = bench.plan(build="never")
    for component, damage in damages.items():
        damage(bench.folder / "engines" / plan.components[component].engines[0].id / "engine.onnx")
    events = bench.run(plan)
    assert [(fall.component, fall.backend) for fall in fallen(events)] == [(name, "onnxruntime") for name in damages]
    assert saved(events).warnings[-1] == fallen(events)[-1].fact
    after = bench.plan(build="never").components
    for fall in fallen(events):
        assert backends(events)[fall.component] == "pytorch"
        assert saved(events).plan["components"][fall.component]["reason"] == str(fall.reason)
        assert fall.fact in saved(events).warnings
        # Its damage is recorded: the next plan does not use it.
        assert after[fall.component].backend == "pytorch"


def test_a_damaged_engine_is_rebuilt_if_building_is_allowed(bench: Bench) -> None:
    plan = bench.plan()
    engine_id = plan.components["transformer"].engines[0].id
    flip(bench.folder / "engines" / engine_id / "engine.onnx")
    events = bench.run(plan)
    assert fallen(events) == []
    assert built(events) == ["transformer"]
    rebuilt = [fact for fact in saved(events).warnings if fact.code == "pipeline.engine_rebuilt"]
    assert [fact.data["engine"] for fact in rebuilt] == [engine_id]
    assert backends(events)["transformer"] == "onnxruntime"
    assert built(bench.run(bench.plan())) == []


# Each component by an error; NaN, which each kind of component finds elsewhere; the other errors in some components.
# Of eight calls of transformers, the first four are those of the first expert: each expert fails in its last call.
@pytest.mark.parametrize(
    "ends",
    [
        {
            ("text_encoder", 1): failing,
            ("transformer", 3): failing,
            ("transformer", 7): failing,
            ("vae_next", 1): failing,
        },
        {("text_encoder", 1): not_numbers, ("transformer", 3): not_numbers, ("vae_next", 1): not_numbers},
        {
            ("text_encoder", 1): wrapping,
            ("transformer", 3): starving,
            ("transformer", 7): breaking,
            ("vae_next", 1): starving,
        },
    ],
    ids=["fails", "NaN", "memory and others"],
)
def test_engines_that_fail_while_running(
    ends: Mapping[tuple[str, int], End], bench: Bench, in_pytorch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_after(monkeypatch, ends)
    components = {
        {("transformer", 7): "transformer_2", ("vae_next", 1): "vae"}.get(place, place[0]): end
        for place, end in ends.items()
    }
    events = bench.run(bench.plan())
    assert [(fall.component, fall.reason.code) for fall in fallen(events)] == [
        (name, REASONS[end]) for name, end in components.items()
    ]
    assert backends(events) == dict.fromkeys(COMPONENTS, "onnxruntime") | dict.fromkeys(components, "pytorch")
    assert psnr(in_pytorch, bench.folder / "x.mp4") >= SAME_NOISE_DB


def test_an_engine_that_breaks_the_device_ends_the_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.plan()
    break_after(monkeypatch, {("transformer", 3): breaking})
    # What a real one is like, tests/gpu shows.
    monkeypatch.setattr(engine_failures, "cuda_failure", lambda _: torch.AcceleratorError("CUDA error"))
    open_engines = EngineService.open

    def open_as_on_gpu(*args: Any) -> OpenEngines:
        engines = open_engines(*args)
        engines.device = "cuda:0"
        return engines

    monkeypatch.setattr(EngineService, "open", open_as_on_gpu)
    with Residency(bench.engines) as residency:
        events = events_of(plan, bench.spec, residency)
    assert isinstance(events[-1], Failed)
    assert (events[-1].fact.code, events[-1].internal) == (DEVICE_LOST, False)
    assert fallen(events) == []  # nothing can take its place in this process


@pytest.mark.parametrize("method", ["__init__", "release", "close"])
def test_any_error_while_an_engine_is_opened_released_or_closed(
    method: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(OnnxRuntimeSession, method)

    def failing_once_done(self: OnnxRuntimeSession, *args: object, **keywords: object) -> None:
        original(self, *args, **keywords)
        raise torch.AcceleratorError("CUDA error: invalid argument")

    plan = bench.plan(backends={"all": "pytorch", "vae": "onnxruntime"})
    monkeypatch.setattr(OnnxRuntimeSession, method, failing_once_done)
    events = bench.run(plan)
    opened = method != "__init__"
    assert [event.reason.code for event in fallen(events)] == ([] if opened else ["execution.engine_failed"])
    assert backends(events)["vae"] == ("onnxruntime" if opened else "pytorch")


def test_the_first_vae_engine_frees_its_buffers_after_use(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    infer, release = OnnxRuntimeSession.infer, OnnxRuntimeSession.release

    def inferring(self: OnnxRuntimeSession, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        called.append("vae_next" if "cache_0" in inputs else "vae_first")
        return infer(self, **inputs)

    def releasing(self: OnnxRuntimeSession) -> None:
        release(self)
        called.append("release")

    plan = bench.plan(backends={"all": "pytorch", "vae": "onnxruntime"})
    monkeypatch.setattr(OnnxRuntimeSession, "infer", inferring)
    monkeypatch.setattr(OnnxRuntimeSession, "release", releasing)
    events = bench.run(plan)
    assert backends(events)["vae"] == "onnxruntime"
    assert called[:2] == ["vae_first", "release"] and set(called[2:]) == {"vae_next"}


def test_a_cancelled_build_leaves_nothing(bench: Bench) -> None:
    before = bench.visible()
    events = bench.run(bench.plan(width=48), stop=lambda event: isinstance(event, EngineProgress))
    assert isinstance(events[-1], Cancelled)
    bench.engines.store.index()
    assert bench.visible() == before
    assert not (bench.folder / "x.mp4").exists()


def test_engines_of_one_job_do_not_evict_each_other(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    store = EngineStore(tmp_path / "engines", 4 * spec.parameters["transformer"])
    bench = Bench(spec, EngineService(store, probe(), tmp_path), tmp_path)
    events = bench.run(bench.plan(backends={"transformer": "onnxruntime"}))
    # The files are a little larger than the weights that they were estimated from.
    assert store.total_bytes() > store.max_bytes
    assert fallen(events) == []
    assert backends(events)["transformer"] == "onnxruntime"
    # The text encoder's engine would not fit with it, and is not built.
    wanted = {"text_encoder": "onnxruntime", "transformer": "onnxruntime"}
    plan = bench.plan(backends=wanted)
    assert {name: part.backend for name, part in plan.components.items()} == {
        "text_encoder": "pytorch",
        "transformer": "onnxruntime",
        "vae": "pytorch",
    }
    refused = plan.components["text_encoder"].reasons[-1].data["cause"]
    assert (refused.code, refused.data["limit"]) == ("engine.limit_below_set", store.max_bytes)
    assert fallen(bench.run(plan))[0].component == "text_encoder"
    with pytest.raises(MachineError) as error:
        wanted_engines(GenerationRequest.from_mapping({"prompt": "x", **SIZE, "backends": wanted}), spec, bench.engines)
    assert error.value.data["cause"].code == "engine.limit_below_set"


def test_a_plan_for_other_weights_falls_back_with_a_reason(bench: Bench) -> None:
    plan = bench.plan(width=48, backends={"all": "pytorch", "vae": "onnxruntime"})
    part = plan.components["vae"]
    other = part.replace(engines=tuple(use.replace(id="0" * 16) for use in part.engines))
    events = bench.run(plan.with_component("vae", other))
    (fall,) = fallen(events)
    assert (fall.component, fall.reason.code) == ("vae", "engine.planned_for_others")


def test_an_engine_of_other_weights_is_not_used(bench: Bench, stocked: tuple[ModelSpec, Path, list[Event]]) -> None:
    bare = bench.plan()
    path = lora_files.save(bench.folder / "style.safetensors", lora_files.wan(factors(bench.spec.transformer)))
    asked = {"loras": [f"high={path}:0.8"]}
    with_lora = with_lora_of(bench, path, 0.8)
    never = with_lora.plan(**asked, build="never").components
    assert never["transformer"].backend == "pytorch" and states(never["transformer"], "engine.differs_no_lora")
    assert never["transformer_2"].engines == bare.components["transformer_2"].engines
    plan = with_lora.plan(**asked)
    (use,) = plan.components["transformer"].engines
    assert use.build and use.id != bare.components["transformer"].engines[0].id
    assert states(plan.components["transformer"], "engine.differs_no_lora")
    events = with_lora.run(plan)
    assert built(events) == ["transformer"] and backends(events) == dict.fromkeys(COMPONENTS, "onnxruntime")
    in_pytorch = with_lora.run(with_lora.plan(**asked, backends={"all": "pytorch"}))
    assert psnr(saved(events).video, saved(in_pytorch).video) > SAME_NOISE_DB
    # One step of the expert, by its engine with the LoRA, in PyTorch with it, and by the engine without.
    random = torch.Generator().manual_seed(0)
    latents = torch.randn(plan.latent_shape, generator=random)
    text = torch.randn(1, bench.spec.max_sequence_length, bench.spec.transformer.text_dim, generator=random)
    engine, pytorch, without = (
        velocity(one, latents, text)
        for one in (
            (with_lora, with_lora.plan(**asked)),
            (with_lora, with_lora.plan(**asked, backends={"all": "pytorch"})),
            (bench, bare),
        )
    )
    length = torch.linalg.vector_norm(pytorch)
    assert torch.linalg.vector_norm(engine - pytorch) < 1e-4 * length
    assert torch.linalg.vector_norm(without - pytorch) > 1e-2 * length
    # Taken away, the old engine is there as before; with another weight there is none.
    assert bench.plan() == bare
    (other,) = with_lora_of(bench, path, 0.5).plan(loras=[f"high={path}:0.5"]).components["transformer"].engines
    assert other.build
    # The library knows what is inside: neither is stale, and neither is proven against other weights.
    records = {record.id: record for record in bench.engines.store.index()}
    assert records[use.id].loras == with_lora.spec.loras
    assert all(bench.engines.why_stale(record, [bench.spec]) == [] for record in records.values())
    path.unlink()
    request = BuildRequest(spec=bench.spec, component="transformer", key=records[use.id].key, device="cpu")
    with pytest.raises(EngineError) as refused:
        verify_engine(records[use.id], request, bench.engines.store, lambda *_: None, Cancel())
    assert refused.value.code == "engine.lora_unreadable"


def with_lora_of(bench: Bench, path: Path, weight: float) -> Bench:
    """Return the same place for the model with a LoRA on its high-noise expert."""
    lora = Lora(str(path), weight, "high")
    return Bench(with_loras(bench.spec, [lora], Path("none")), bench.engines, bench.folder)


def velocity(of: tuple[Bench, ExecutionPlan], latents: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return what the high-noise expert of a plan predicts."""
    bench, plan = of
    with Residency(bench.engines) as residency, residency.denoiser(bench.spec, Alone(plan), "transformer") as denoiser:
        return denoiser(latents, torch.tensor(900.0), text).clone()
