"""What is loaded or compiled while no video waits is what later videos use; the history has the seconds."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import MachineError
from runtime.core.events import StageStarted, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.execution.compilation import discard_compiled_code
from runtime.execution.residency import Residency
from runtime.models.images import with_images
from runtime.models.spec import ModelSpec
from runtime.pipeline.ahead import compile_ahead, load_ahead
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.history import CompileSeconds, compile_seconds, compiled_code
from runtime.planner.memory_model import Workload
from runtime.planner.resolve import PlanningContext, resolve
from runtime.upstream.torch import CompiledGraphs, compiled_graphs
from tests.execution.test_compilation import forget_places
from tests.families.test_second_family import mean_difference
from tests.image_files import saved
from tests.pipeline.runs import events_of
from tests.pipeline.test_run import frames_of
from tests.plans import machine, no_engines, tiny_plan, with_strategy

Tiny = Callable[[str], ModelSpec]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end with nothing compiled; the cache is that of the test."""
    forget_places(monkeypatch)
    discard_compiled_code()
    yield
    discard_compiled_code()


@pytest.mark.slow
@pytest.mark.compiler
def test_later_videos_of_both_experts_find_the_code(tiny: Tiny, tmp_path: Path) -> None:
    spec, history = tiny("wan2.2-a14b"), HistoryFile(tmp_path, machine())
    first = tiny_plan(spec, tmp_path / "x.mp4", frames=5, compile="never")
    plan = tiny_plan(spec, tmp_path / "x.mp4", frames=5, compile="always")
    code = compiled_code(
        Workload.of(first, spec),
        machine(),
        {name: part.backend for name, part in first.components.items()},
        "none",
        first.speed,
    )
    with Residency(no_engines(tmp_path)) as residency:
        plain = events_of(first, spec, residency, history=history)[-1]
        assert isinstance(plain, VideoSaved)
        pixels = frames_of(plain.video)
        assert not compile_seconds(history.read(), code).on_disk
        before = {name: residency.is_loaded(spec, plan, name) for name in plan.components}
        assert before["transformer"]
        made = compile_ahead(plan, spec, Cancel(), residency, history)
        assert made.code == "task.compiled"
        # The plan of the next video knows how long it took, and that the code is there.
        known = compile_seconds(history.read(), code)
        assert known.on_disk and known.fresh == made.data["seconds"] > 0
        assert before == {name: residency.is_loaded(spec, plan, name) for name in plan.components}
        graphs = compiled_graphs()
        compiled = events_of(plan, spec, residency, history=history)[-1]
        assert isinstance(compiled, VideoSaved)
        assert mean_difference(frames_of(compiled.video), pixels) < 0.1
        assert compiled_graphs().since(graphs) == CompiledGraphs()
    # Another process finds it in the cache on the disk.
    discard_compiled_code()
    graphs = compiled_graphs()
    with Residency(no_engines(tmp_path)) as residency:
        assert isinstance(events_of(plan, spec, residency)[-1], VideoSaved)
    found = compiled_graphs().since(graphs)
    assert found.cached and not found.compiled


@pytest.mark.slow
@pytest.mark.compiler
def test_compiling_is_measured_without_the_cache_and_from_it(tiny: Tiny, tmp_path: Path) -> None:
    """It follows a test that compiles the same blocks, so that this process has the code of their kernels."""
    spec, history = tiny("wan2.1"), HistoryFile(tmp_path, machine())
    plan = tiny_plan(spec, tmp_path / "x.mp4", compile="always", frames=5, steps=2)
    backends = {name: part.backend for name, part in plan.components.items()}
    code = compiled_code(Workload.of(plan, spec), machine(), backends, "none", plan.speed)
    measured = []
    for _ in range(2):
        discard_compiled_code()
        with Residency(no_engines(tmp_path)) as residency:
            saved = events_of(plan, spec, residency, history=history)[-1]
            spent = residency.compile_seconds
        assert isinstance(saved, VideoSaved) and saved.plan["speed"]["compiled"]
        measured.append((compile_seconds(history.read(), code), spent))
    (first, fresh), (second, cached) = measured
    assert first == CompileSeconds(fresh, None, on_disk=True)
    assert second == CompileSeconds(fresh, cached, on_disk=True)
    # How much less loading takes than compiling depends on the load of the machine.
    assert min(cached, fresh) > 0
    request = GenerationRequest.from_mapping(plan.request_json() | {"compile": "always"})
    context = PlanningContext(machine(), tmp_path / "x.mp4", history=history.read())
    assert resolve(request, spec, context).seconds["compile"].likely == cached
    # Another size needs other code.
    other = resolve(request.replace(frames=9), spec, context)
    assert other.seconds["compile"].likely == fresh
    shutil.rmtree(tmp_path / "compiled")
    assert compile_seconds(history.read(), code) == CompileSeconds(fresh, None, on_disk=False)


def test_a_later_video_loads_nothing(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4", frames=5)
    with Residency(no_engines(tmp_path)) as residency:
        load_ahead(plan, spec, Cancel(), residency)
        assert all(residency.is_loaded(spec, plan, name) for name in plan.components)
        events = events_of(plan, spec, residency)
        assert isinstance(events[-1], VideoSaved)
        assert not [event for event in events if isinstance(event, StageStarted) and event.stage == "load"]
        # Components that take turns are not loaded.
        residency.free()
        load_ahead(with_strategy(plan, keep_loaded=False), spec, Cancel(), residency)
        cancel = Cancel()
        cancel.request()
        with pytest.raises(CancelledError):
            load_ahead(plan, spec, cancel, residency)
        assert not any(residency.is_loaded(spec, plan, name) for name in plan.components)


def test_it_ends_before_the_next_pass_if_it_is_cancelled(tiny: Tiny, tmp_path: Path) -> None:
    spec, cancel = tiny("wan2.1"), Cancel()
    plan = tiny_plan(spec, tmp_path / "x.mp4", frames=5, compile="always")
    cancel.pause()
    cancel.request()
    with Residency(no_engines(tmp_path)) as residency, pytest.raises(CancelledError):
        compile_ahead(plan, spec, cancel, residency, None)
    assert not plan.output.exists()


@pytest.mark.slow
def test_code_that_cannot_be_compiled_is_reported(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("ptxas is not here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    # From an image, whose latents are a part of the input.
    history, image = HistoryFile(tmp_path, machine()), str(saved(tmp_path / "boat.png", 32, 32))
    spec = with_images(tiny("wan2.2-i2v-a14b"), GenerationRequest(prompt="a boat", image=image), tmp_path, tmp_path)
    plan = tiny_plan(spec, tmp_path / "x.mp4", frames=5, compile="always", image=image)
    with Residency(no_engines(tmp_path)) as residency, pytest.raises(MachineError) as caught:
        compile_ahead(plan, spec, Cancel(), residency, history)
    assert caught.value.code == "task.not_compiled"
    assert caught.value.data["cause"].code == "execution.compilation_failed"
    assert history.read() == ()
