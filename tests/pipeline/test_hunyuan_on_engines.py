"""FramePack and HunyuanVideo on engines: missing ones, and ones that fail in their last call.

All components of FramePack but the VAE, whose engines take longest to build; its decoder on engines is HunyuanVideo's.
FramePack's text encoders and parts of blocks are HunyuanVideo's, too.
"""

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
    "framepack": ("text_encoder", "text_encoder_2", "image_encoder", "vae_encoder", "transformer"),
    "hunyuan_video": ("vae",),
}
End = Callable[[Any], None]
# Rounding differs; another noise, prompt or image gives less than 20 dB.
SAME_VIDEO_DB = 35


class Bench:
    """A model with an engine library, and jobs on it."""

    def __init__(self, model: Path, library: Path, folder: Path) -> None:
        self.engines = EngineService(EngineStore(library, 10**10), probe(), library.parent)
        self.folder = folder
        spec = read_spec(model, model.name)
        self.components = FAMILIES[spec.family]
        self.on_engines = {"all": "pytorch"} | dict.fromkeys(self.components, "onnxruntime")
        image = folder / "image.png"
        picture(WIDTH, HEIGHT).save(image)
        self.request = GenerationRequest(
            prompt="a red boat", width=WIDTH, height=HEIGHT, steps=2, fps=12, seed=3, backends=self.on_engines,
            frames=9 if spec.section is None else 36 * SECTIONS + 1, image=str(image) if spec.image_input else None,
        )  # fmt: skip
        self.spec: ModelSpec = with_images(spec, self.request, folder, folder)

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


def run_on_engines(events: list[Event]) -> set[str]:
    """Return the components that engines ran, as the result says."""
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    return {name for name, part in saved.plan["components"].items() if part["backend"] == "onnxruntime"}


def fallen(events: list[Event]) -> list[FellBack]:
    """Return the fallbacks."""
    return [event for event in events if isinstance(event, FellBack)]


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
    monkeypatch: pytest.MonkeyPatch, ends: Mapping[str, End] | None = None, last: Counter[str] | None = None
) -> Counter[str]:
    """Count the calls of engines by component.

    Args:
        ends: what happens after the last call of some components, given its outputs.
        last: the numbers of these calls.
    """
    infer, write = OpenEngines.infer, OpenEngines.write
    calls: Counter[str] = Counter()

    def count(program: str, outputs: Any) -> None:
        component = "transformer" if "block" in program else component_of(program)
        calls[component] += 1
        if ends and last and component in ends and calls[component] == last[component]:
            ends[component](outputs)

    def inferring(self: OpenEngines, program: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = infer(self, program, **inputs)
        count(program, outputs)
        return outputs

    def writing(self: OpenEngines, program: str, inputs: Mapping[str, torch.Tensor], outputs: Any) -> None:
        write(self, program, inputs, outputs)
        count(program, outputs)

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
    components = {*FAMILIES[read_spec(stocked[0], "stocked").family]}
    assert {record.component for record in stocked[2]} == components
    assert run_on_engines(on_engines.events) == components
    assert fallen(on_engines.events) == []
    assert psnr(on_engines.frames, in_pytorch) > SAME_VIDEO_DB


@pytest.mark.parametrize(
    "ends",
    [
        dict.fromkeys((*FAMILIES["framepack"], "vae"), broken),
        dict.fromkeys(("text_encoder", "transformer", "vae"), not_numbers),
        {"transformer": starving},
    ],
    ids=["fails", "NaN", "memory"],
)
def test_engines_that_fail_in_their_last_calls_are_replaced_by_pytorch(
    ends: Mapping[str, End],
    bench: Bench,
    on_engines: OnEngines,
    in_pytorch: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last call of FramePack's transformer is in the second section."""
    fails = ends.keys() & {*bench.components}
    if not fails:
        pytest.skip("FramePack shows it")
    calls = watch(monkeypatch, ends, on_engines.calls)
    events, frames = bench.run(bench.plan())
    assert sorted(event.component for event in fallen(events)) == sorted(fails)
    for event in fallen(events):
        # Until then, it ran on its engine, whatever else fell back.
        assert calls[event.component] == on_engines.calls[event.component] > 0
        if event.component == "transformer":
            before = events[: events.index(event)]
            assert [done.section for done in before if isinstance(done, SectionDone)] == [1]
    assert run_on_engines(events) == {*bench.components} - fails
    assert psnr(frames, in_pytorch) > SAME_VIDEO_DB


def test_engines_that_are_gone_are_replaced_by_pytorch(bench: Bench, in_pytorch: np.ndarray) -> None:
    plan = bench.plan(build="never")
    assert {name for name, part in plan.components.items() if part.backend == "onnxruntime"} == {*bench.components}
    for folder in (bench.folder / "engines").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    events, frames = bench.run(plan)
    assert {event.component for event in fallen(events)} == {*bench.components}
    assert run_on_engines(events) == set()
    assert np.array_equal(frames, in_pytorch)
