"""Engines of the network that interpolates: equal to PyTorch, in any size, named in the plan, replaced if they fail."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runtime.core.events import FellBack, VideoSaved
from runtime.core.plan import PYTORCH
from runtime.core.request import INTERPOLATOR, GenerationRequest
from runtime.core.settings import Settings
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService, OpenEngines
from runtime.execution.residency import Residency
from runtime.families.dcae import make_batched_decode_fn
from runtime.families.interpolator import programs
from runtime.families.interpolator.components import load_interpolator
from runtime.machine.probe import cpu_instructions, probe
from runtime.models.registry import find_interpolator
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.reader import read_info
from tests.families.interpolator.test_frames import psnr, rendered
from tests.pipeline.failing import Failing
from tests.pipeline.runs import events_of
from tests.pipeline.test_run import frames_of


def pair(width: int, height: int) -> torch.Tensor:
    """Return two frames of a scene, (1, 6, height, width) in 0 to 1."""
    frames = torch.from_numpy(rendered((width, height), 3, 5)[::2]).permute(0, 3, 1, 2)
    return frames.float().div(255).flatten(0, 1)[None]


def service_in(folder: Path, instructions: tuple[str, ...] = ()) -> EngineService:
    """Return an empty engine library for a CPU with these instructions."""
    return EngineService.from_settings(Settings(cache_dir=folder), replace(probe(), cpu_instructions=instructions))


@pytest.mark.parametrize("by", [2, 4, 8])
def test_frames_are_reduced_as_by_interpolation_with_antialias(by: int) -> None:
    frames = torch.rand(2, 3, 3 * by, 5 * by, generator=torch.Generator().manual_seed(by))
    expected = F.interpolate(frames, scale_factor=1 / by, mode="bilinear", antialias=True)
    torch.testing.assert_close(programs.reduced(frames, by), expected, rtol=0, atol=1e-6)
    assert programs.reduced(frames, 1) is frames


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_only_convolutions_are_rounded(dtype: str) -> None:
    colors = pair(208, 120)
    with torch.no_grad():
        exact, rounded = load_interpolator()(colors), load_interpolator("cpu", dtype)(colors)
    assert rounded.dtype == torch.float32
    # 8-bit colors alone have 59 dB.
    assert psnr(255 * rounded.numpy(), 255 * exact.numpy()) > 70


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize(
    ("backend", "size"),
    [
        # Motion is estimated in frames half as large.
        ("onnxruntime", (488, 50)),
        pytest.param("inductor", (40, 24), marks=pytest.mark.compiler),
    ],
)
def test_engines_equal_pytorch(backend: str, size: tuple[int, int], tmp_path: Path) -> None:
    service, spec, colors = service_in(tmp_path, cpu_instructions()), find_interpolator(), pair(*size)
    with torch.no_grad():
        expected = load_interpolator()(colors)
    with make_batched_decode_fn(load_interpolator(), 1, backend=backend, engines=service) as compute:
        made = compute(colors[None])[0]
        assert (compute.backend, compute.fallbacks) == (backend, ())
    (record,) = service.store.index()
    rounds = backend == "inductor" and service.machine.cpu_has_bfloat16
    assert record.key.precision == ("bfloat16" if rounds else "float32")
    assert psnr(255 * made.numpy(), 255 * expected.numpy()) > (70 if rounds else 100)
    assert record.pytorch_seconds > 0
    assert (record.component, record.model, record.usable) == (INTERPOLATOR, spec.name, True)
    assert BUILDERS[record.key.builder].needs(spec, INTERPOLATOR, record.key.profiles[0]).ram_bytes > 0
    assert service.why_stale(record, [spec]) == []
    assert service.why_stale(record, [replace(spec, files={INTERPOLATOR: changed(spec)})])


def changed(spec: ModelSpec) -> Any:
    """Return the network's files with another architecture."""
    files = spec.files[INTERPOLATOR]
    return replace(files, config={**files.config, "body": 7})


@pytest.fixture
def planned(tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what plans a tiny clip that the network interpolates, and its model."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    service = service_in(tmp_path)

    def plan(**values: Any) -> Any:
        spec = replace(tiny("wan2.1"), interpolates=True, interpolator=find_interpolator())
        clip = {"prompt": "x", "width": 64, "height": 48, "frames": 5, "steps": 1, "seed": 1, "interpolate": 2}
        request = GenerationRequest.from_mapping(clip | values)
        context = PlanningContext(service.machine, tmp_path / "x.mp4", service.offers(spec))
        return resolve(request, spec, context), spec, service

    return plan


def test_the_network_is_a_component_of_the_plan(planned: Any) -> None:
    plan, _, _ = planned()
    part = plan.components[INTERPOLATOR]
    assert (part.backend, part.device, part.engines) == (PYTORCH, "cpu", ())
    assert part.seconds == plan.seconds["interpolate"]
    assert plan.engine_size(INTERPOLATOR) == (1, 48, 64)
    assert INTERPOLATOR not in plan.model_components
    # On CPUs its engines are hardly faster than PyTorch, so they are built only for those who ask.
    assert planned(build="missing")[0].components[INTERPOLATOR].backend == PYTORCH
    asked = planned(backends={INTERPOLATOR: "onnxruntime"})[0].components[INTERPOLATOR]
    assert [(use.builder, use.build) for use in asked.engines] == [("onnxruntime", True)]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_a_job_runs_the_network_on_its_engine_and_in_pytorch_if_that_fails(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, spec, service = planned(backends={INTERPOLATOR: "onnxruntime"}, crf=0)
    with Residency(service) as residency:
        saved = events_of(plan, spec, residency)[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.plan["components"][INTERPOLATOR]["backend"] == "onnxruntime"
    assert not [fact for fact in saved.warnings if fact.code == "event.fell_back"]
    (record,) = service.store.index()
    assert (record.component, record.key.precision, record.usable) == (INTERPOLATOR, "float32", True)
    assert read_info(saved.video).frames == 10
    whole = frames_of(saved.video)
    again, _, _ = planned(backends={INTERPOLATOR: "onnxruntime"}, build="never", crf=0)
    assert [use.id for use in again.components[INTERPOLATOR].engines] == [record.id]
    Failing(monkeypatch, OpenEngines, "infer", 2, broken)
    with Residency(service) as residency:
        events = events_of(again, spec, residency)
    assert [event.component for event in events if isinstance(event, FellBack)] == [INTERPOLATOR]
    repaired = events[-1]
    assert isinstance(repaired, VideoSaved)
    # PyTorch computed the new frames from the second one on.
    assert frames_of(repaired.video) == whole


def broken(_: Any) -> Any:
    """Raise what an engine raises that fails."""
    raise RuntimeError("broken")
