"""Block engines in the processes of a job on several GPUs, here on a CPU: equal results, and one that fails alone."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from runtime.core.errors import EngineError
from runtime.core.events import FellBack, VideoSaved
from runtime.core.plan import ExecutionPlan, Split
from runtime.engines.service import OpenEngines
from runtime.execution.parallel import rank_process
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec
from tests.block_engine_files import in_blocks, stock
from tests.engines.engine_files import refusal
from tests.pipeline import test_parity
from tests.pipeline.runs import events_of
from tests.pipeline.test_parity import sample
from tests.plans import Alone, tiny_plan, with_strategy

Action = Literal["fails", "is not opened", "returns NaN"]
EXPERTS = ["transformer", "transformer_2"]
TOKENS_SHARED = Split(devices=("cpu", "cpu"), guidance=1, sequence=2, decode=False)
PASSES_SHARED = Split(devices=("cpu", "cpu"), guidance=2, sequence=1, decode=False)


@pytest.fixture
def spec(tiny: Callable[[str], ModelSpec]) -> ModelSpec:
    """A model with two experts."""
    return tiny("wan2.2-a14b")


@pytest.fixture
def residency(spec: ModelSpec, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Residency]:
    """A residency with block engines of that model."""
    with Residency(stock(spec, tmp_path, tmp_path_factory), keep_prompts=False) as residency:
        yield residency


def planned(spec: ModelSpec, tmp_path: Path, **values: object) -> ExecutionPlan:
    """Plan a clip of 180 tokens, of which a process takes 90 in two chunks."""
    asked = {"negative_prompt": "blue ball", "width": 160, "height": 96, "guidance_scale": 3.0} | values
    plan = with_strategy(tiny_plan(spec, tmp_path / "x.mp4", **asked), keep_loaded=True)
    assert plan.tokens == 180
    return in_blocks(plan, spec)


def serve(action: Action, number: int, *given: Any) -> None:
    """Do the tasks of a process, with engines that go wrong in the second one."""
    write, seen = OpenEngines.write, 0

    def failing(self: OpenEngines, program: str, inputs: Mapping[str, torch.Tensor], outputs: Any) -> None:
        nonlocal seen
        seen += 1
        write(self, program, inputs, outputs)
        # In the second pass, between its collectives.
        if seen == 15:
            for output in outputs.values():
                output.fill_(math.nan)
            if action == "fails":
                raise EngineError("engine.failed", error="on purpose")

    def closed(*_: Any) -> OpenEngines:
        raise EngineError("engine.failed", error="on purpose")

    if number == 1 and action == "is not opened":
        rank_process.open_engines = closed  # type: ignore[attr-defined,assignment]
    elif number == 1:
        OpenEngines.write = failing  # type: ignore[method-assign]
    rank_process.serve(number, *given)


@pytest.mark.slow
@pytest.mark.parametrize(("split", "step_cache"), [(TOKENS_SHARED, "first-block:0.075"), (PASSES_SHARED, "none")])
def test_two_processes_equal_one(
    split: Split, step_cache: str, spec: ModelSpec, residency: Residency, tmp_path: Path
) -> None:
    plan = planned(spec, tmp_path, step_cache=step_cache, steps=8)
    alone, shared = Alone(plan), Alone(plan.replace(split=split))
    with Residency(residency.engines) as one:
        wanted = sample(spec, alone.plan, one)
    made = sample(spec, shared.plan, residency)
    assert (made - wanted).norm() <= 1e-5 * wanted.norm()
    assert all(residency.is_loaded(spec, shared.plan, name) for name in EXPERTS)
    with refusal("engine.in_use"):
        residency.engines.store.delete(plan.components["transformer"].engines[0].id)
    residency.free()
    residency.engines.store.delete(plan.components["transformer"].engines[0].id)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "code", "split"),
    [
        ("fails", "engine.failed", PASSES_SHARED),
        ("is not opened", "engine.failed", TOKENS_SHARED),
        ("returns NaN", "execution.engine_not_finite", TOKENS_SHARED),
    ],
)
def test_a_process_falls_back_alone(
    action: Action,
    code: str,
    split: Split,
    spec: ModelSpec,
    residency: Residency,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(spec, tmp_path).replace(split=split)
    with Residency(residency.engines) as alone:
        wanted = sample(spec, plan.replace(split=None), alone)
    job = Alone(plan)
    monkeypatch.setattr(rank_process, "serve", partial(serve, action))
    monkeypatch.setattr(test_parity, "Alone", lambda _: job)
    made = sample(spec, plan, residency)
    assert [(name, reason.code) for name, reason in job.fallen] == [(name, code) for name in EXPERTS]
    assert (made - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.slow
def test_a_job_reports_what_a_process_reports(
    spec: ModelSpec, residency: Residency, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(spec, tmp_path).replace(split=TOKENS_SHARED)
    monkeypatch.setattr(rank_process, "serve", partial(serve, "fails"))
    events = events_of(plan, spec, residency)
    saved = events[-1]
    assert isinstance(saved, VideoSaved), saved
    assert [event.component for event in events if isinstance(event, FellBack)] == EXPERTS
    assert [saved.plan["components"][name]["backend"] for name in EXPERTS] == ["pytorch", "pytorch"]
    # Its processes load the component again for a job on engines.
    assert not residency.is_loaded(spec, plan, "transformer")
    monkeypatch.undo()
    residency.group_manager.stop_processes()
    assert not any(isinstance(event, FellBack) for event in events_of(plan, spec, residency))
