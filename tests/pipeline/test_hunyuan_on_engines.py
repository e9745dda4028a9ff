"""FramePack and HunyuanVideo on engines of every component: missing ones, and ones that fail in their last call."""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from runtime.core.errors import EngineError
from runtime.core.events import Event, FellBack, SectionDone, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService, OpenEngines
from runtime.engines.store import EngineStore
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.images import with_images
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec, component_of
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.resolve import PlanningContext, resolve
from tests.engine_library import EngineLibrary
from tests.families.framepack_models import pipeline
from tests.image_files import picture
from tests.pipeline.runs import events_of
from tests.plans import machine

pytestmark = pytest.mark.slow

WIDTH, HEIGHT, SECTIONS = 48, 32, 2
FAMILIES = {
    "framepack": ("text_encoder", "text_encoder_2", "image_encoder", "vae_encoder", "transformer", "vae"),
    "hunyuan_video": ("text_encoder", "text_encoder_2", "transformer", "vae"),
}
# Rounding differs; another noise, prompt or image gives less than 20 dB.
SAME_VIDEO_DB = 35


class Bench:
    """A model with an engine library, and jobs on it."""

    def __init__(self, model: Path, library: Path, folder: Path) -> None:
        self.engines = EngineService(EngineStore(library, 10**10), probe(), library.parent)
        self.folder = folder
        spec = read_spec(model, model.name)
        image = folder / "image.png"
        picture(WIDTH, HEIGHT).save(image)
        self.request = GenerationRequest(
            prompt="a red boat", width=WIDTH, height=HEIGHT, steps=2, fps=12, seed=3, backends={"all": "onnxruntime"},
            frames=9 if spec.section is None else 36 * SECTIONS + 1, image=str(image) if spec.image_input else None,
        )  # fmt: skip
        self.spec: ModelSpec = with_images(spec, self.request, folder, folder)
        self.components = FAMILIES[spec.family]

    def plan(self, **values: Any) -> ExecutionPlan:
        """Plan the video, by default on ONNX Runtime."""
        request = self.request.replace(**values)
        return resolve(
            request, self.spec, PlanningContext(machine(), self.folder / "x.mp4", self.engines.offers(self.spec))
        )

    def run(self, plan: ExecutionPlan) -> tuple[list[Event], np.ndarray]:
        """Run a job; return its events and frames."""
        frames: list[np.ndarray] = []
        with Residency(self.engines) as residency:
            events = events_of(plan, self.spec, residency, on_frames=frames.append)
        assert isinstance(events[-1], VideoSaved), events[-1]
        return events, np.concatenate(frames).astype(int)


def backends(events: list[Event]) -> dict[str, str]:
    """Return what ran each component, as the result says."""
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    return {name: part["backend"] for name, part in saved.plan["components"].items()}


@pytest.fixture(scope="module", params=FAMILIES)
def stocked(
    request: pytest.FixtureRequest,
    tiny: Callable[[str], ModelSpec],
    engine_library: EngineLibrary,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, list[EngineRecord]]:
    """Return a model, a folder with the engines that a first job would build, and their records."""
    model = tiny("hunyuan-video").directory
    if request.param == "framepack":
        model = tmp_path_factory.mktemp("models") / "framepack-f1"
        pipeline().save_pretrained(model)

    folder = tmp_path_factory.mktemp("stocked")
    bench = Bench(model, folder / "engines", folder)
    return model, folder / "engines", engine_library.stock(bench.engines, bench.spec, bench.plan())


@pytest.fixture
def bench(stocked: tuple[Path, Path, list[EngineRecord]], tmp_path: Path) -> Bench:
    """Return a copy of that library, to be damaged."""
    model, library, _ = stocked
    shutil.copytree(library, tmp_path / "engines")
    return Bench(model, tmp_path / "engines", tmp_path)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Return the PSNR between frames, in dB."""
    error = float(((one - other) ** 2).mean())
    return 10 * math.log10(255**2 / error) if error else math.inf


@pytest.fixture(scope="module")
def in_pytorch(stocked: tuple[Path, Path, list[EngineRecord]], tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Return the frames that PyTorch makes."""
    bench = Bench(stocked[0], stocked[1], tmp_path_factory.mktemp("in-pytorch"))
    return bench.run(bench.plan(backends={"all": "pytorch"}))[1]


class OnEngines(NamedTuple):
    """A job that ran on the library's engines, and the calls of each component's."""

    events: list[Event]
    frames: np.ndarray
    calls: Counter[str]


@pytest.fixture(scope="module")
def on_engines(stocked: tuple[Path, Path, list[EngineRecord]], tmp_path_factory: pytest.TempPathFactory) -> OnEngines:
    """Return the job that runs on engines of all components."""
    bench = Bench(stocked[0], stocked[1], tmp_path_factory.mktemp("on-engines"))
    with pytest.MonkeyPatch.context() as patched:
        calls = watch(patched)
        return OnEngines(*bench.run(bench.plan()), calls)


def watch(
    monkeypatch: pytest.MonkeyPatch, component: str = "", at: int = 0, end: Callable[[Any], Any] = lambda _: None
) -> Counter[str]:
    """Count the calls of engines by component; call number `at` of one ends as `end` does, given its outputs."""
    infer, write = OpenEngines.infer, OpenEngines.write
    calls: Counter[str] = Counter()

    def hit(program: str) -> bool:
        own = "transformer" if "block" in program else component_of(program)
        calls[own] += 1
        return own == component and calls[own] == at

    def inferring(self: OpenEngines, program: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = infer(self, program, **inputs)
        if hit(program):
            end(outputs)
        return outputs

    def writing(self: OpenEngines, program: str, inputs: Mapping[str, torch.Tensor], outputs: Any) -> None:
        write(self, program, inputs, outputs)
        if hit(program):
            end(outputs)

    monkeypatch.setattr(OpenEngines, "infer", inferring)
    monkeypatch.setattr(OpenEngines, "write", writing)
    return calls


def broken(_: Mapping[str, torch.Tensor]) -> None:
    """Fail as an engine does."""
    raise EngineError("engine.failed", error="on purpose")


def starving(_: Mapping[str, torch.Tensor]) -> None:
    """Run out of memory."""
    raise MemoryError


def not_numbers(outputs: Mapping[str, torch.Tensor]) -> None:
    """Return NaN."""
    for output in outputs.values():
        output.fill_(math.nan)


def test_every_component_runs_on_an_engine(
    stocked: tuple[Path, Path, list[EngineRecord]], on_engines: OnEngines, in_pytorch: np.ndarray
) -> None:
    components = FAMILIES[read_spec(stocked[0], "stocked").family]
    assert {record.component for record in stocked[2]} == {*components}
    assert backends(on_engines.events) == dict.fromkeys(components, "onnxruntime")
    assert not [event for event in on_engines.events if isinstance(event, FellBack)]
    assert psnr(on_engines.frames, in_pytorch) > SAME_VIDEO_DB


@pytest.mark.parametrize(
    ("component", "end"),
    [(component, broken) for component in FAMILIES["framepack"]]
    + [(component, not_numbers) for component in ("text_encoder", "transformer", "vae")]
    + [("transformer", starving)],
)
def test_an_engine_that_fails_in_its_last_call_is_replaced_by_pytorch(
    component: str,
    end: Callable[[Any], None],
    bench: Bench,
    on_engines: OnEngines,
    in_pytorch: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last call of FramePack's transformer and VAE is in the second section."""
    if bench.spec.section is None and (component not in bench.components or end is not broken):
        pytest.skip("FramePack shows it")
    last = on_engines.calls[component]
    assert last > 0
    watch(monkeypatch, component, last, end)
    events, frames = bench.run(bench.plan())
    (fall,) = [event for event in events if isinstance(event, FellBack)]
    assert fall.component == component
    if component in {"transformer", "vae"} and bench.spec.section is not None:
        done = [event.section for event in events[: events.index(fall)] if isinstance(event, SectionDone)]
        assert done == [1]
    assert backends(events) == dict.fromkeys(bench.components, "onnxruntime") | {component: "pytorch"}
    assert psnr(frames, in_pytorch) > SAME_VIDEO_DB


def test_engines_that_are_gone_are_replaced_by_pytorch(bench: Bench, in_pytorch: np.ndarray) -> None:
    plan = bench.plan(build="never")
    assert {part.backend for part in plan.components.values()} == {"onnxruntime"}
    for folder in (bench.folder / "engines").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    events, frames = bench.run(plan)
    assert {event.component for event in events if isinstance(event, FellBack)} == {*bench.components}
    assert backends(events) == dict.fromkeys(bench.components, "pytorch")
    assert np.array_equal(frames, in_pytorch)
