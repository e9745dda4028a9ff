"""A step cache with sequence parallelism: all processes decide alike and resume alike."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.events import Paused, Resumed, StepDone, VideoSaved
from runtime.core.plan import ExecutionPlan, Split
from runtime.execution import step_caches
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec
from tests.pipeline.test_parallel import apart, run
from tests.pipeline.test_parity import sample
from tests.pipeline.test_run import frames_of
from tests.pipeline.test_step_cache import with_ratios
from tests.plans import tiny_plan, with_strategy

Tiny = Callable[[str], ModelSpec]
# At this strength one half of the tokens and the other, each by itself, would decide differently in some steps.
STRENGTH = 0.075
STEPS = 12


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 2), id="2: tokens"),
        pytest.param((2, 2), id="4: guidance x tokens", marks=pytest.mark.slow),
    ],
)
def split(request: pytest.FixtureRequest) -> Split:
    """How processes share a job."""
    guidance, sequence = request.param
    devices = ("cpu",) * (guidance * sequence)
    return Split(devices=devices, guidance=guidance, sequence=sequence, decode=True)


@pytest.fixture(scope="module")
def residency(split: Split) -> Iterator[Residency]:
    """What keeps the processes of a split."""
    with Residency() as residency:
        yield residency


def planned(spec: ModelSpec, output: Path, step_cache: str = f"first-block:{STRENGTH}") -> ExecutionPlan:
    """Plan a clip of 15 tokens: of two shares one is filled up."""
    size = {"width": 80, "height": 16, "frames": 9, "steps": STEPS}
    plan = tiny_plan(spec, output, step_cache=step_cache, guidance_scale=3.0, guidance_scale_2=3.0, **size)
    assert plan.tokens == 15
    return with_strategy(plan, keep_loaded=True)


def decisions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, bool]]:
    """Return a list that fills with what one process decides, and what its halves alone would have."""
    found: list[tuple[bool, bool, bool]] = []
    changed = step_caches.changed

    def heard(now: torch.Tensor, before: torch.Tensor, strength: float, sharing: Any) -> bool:
        half = -(-now.shape[1] // 2)
        first = changed(now[:, :half], before[:, :half], strength, None)
        second = changed(now[:, half:], before[:, half:], strength, None)
        found.append((changed(now, before, strength, sharing), first, second))
        return found[-1][0]

    monkeypatch.setattr(step_caches, "changed", heard)
    return found


@pytest.mark.slow
def test_all_processes_skip_the_same_blocks(
    split: Split, residency: Residency, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.2-a14b")
    cached, plain = planned(spec, tmp_path / "x.mp4"), planned(spec, tmp_path / "x.mp4", "none")
    seen = decisions(monkeypatch)
    with Residency() as alone:
        wanted, without = sample(spec, cached, alone), sample(spec, plain, alone)
    # Of two passes of 12 steps, those that start a new cache compute everything and decide nothing.
    assert len(seen) == 2 * (STEPS - 3)
    assert 0 < sum(whole for whole, _, _ in seen) < len(seen)
    assert sum(first != second for _, first, second in seen) >= 2
    made = sample(spec, cached.replace(split=split), residency)
    assert (made - wanted).norm() <= 1e-6 * wanted.norm()
    assert (wanted - without).norm() > 1e-3 * wanted.norm()
    # The modules, which are used again, keep nothing of the cache.
    again = sample(spec, plain.replace(split=split), residency)
    assert (again - without).norm() <= 1e-6 * without.norm()


@pytest.mark.slow
@pytest.mark.parametrize("step_cache", ["magcache:0.12", "taylorseer:3"])
def test_scheduled_caches_equal_those_of_one_process(
    step_cache: str, split: Split, residency: Residency, tiny: Tiny, tmp_path: Path
) -> None:
    spec = with_ratios(tiny("wan2.2-a14b"))
    cached = planned(spec, tmp_path / "x.mp4", step_cache)
    assert not all(cached.computed)
    with Residency() as alone:
        wanted, without = sample(spec, cached, alone), sample(spec, planned(spec, tmp_path / "x", "none"), alone)
    made = sample(spec, cached.replace(split=split), residency)
    assert (made - wanted).norm() <= 1e-6 * wanted.norm()
    assert (wanted - without).norm() > 1e-3 * wanted.norm()


@pytest.mark.slow
def test_passes_are_left_out_as_in_one_process(split: Split, residency: Residency, tiny: Tiny, tmp_path: Path) -> None:
    # The planner lets GPUs share the tokens of each pass if passes are left out.
    split = split.replace(devices=split.devices[: split.sequence], guidance=1)
    spec = tiny("wan2.2-a14b")
    plain = planned(spec, tmp_path / "x.mp4", "none")
    cached = plain.replace(guidance_cache="0.2")
    with Residency() as alone:
        wanted, without = sample(spec, cached, alone), sample(spec, plain, alone)
    made = sample(spec, cached.replace(split=split), residency)
    assert (made - wanted).norm() <= 1e-6 * wanted.norm()
    assert (wanted - without).norm() > 1e-6 * wanted.norm()


@pytest.mark.slow
def test_an_interrupted_job_gives_the_same_video(
    split: Split, residency: Residency, tiny: Tiny, tmp_path: Path
) -> None:
    spec = tiny("wan2.2-a14b")
    out, folder = tmp_path / "x.mp4", tmp_path / "job"
    plan = planned(spec, out).replace(split=split)
    assert isinstance(run(plan, spec, residency)[-1], VideoSaved)
    whole = out.rename(tmp_path / "whole.mp4")

    def pause(event: Any, cancel: Any) -> None:
        if isinstance(event, StepDone) and event.step == 10:
            cancel.pause()

    # New caches start at the ninth step.
    assert run(plan, spec, residency, folder, pause)[-1] == Paused(step=8, of=STEPS)
    events = run(plan, spec, residency, folder)
    assert Resumed(step=8, of=STEPS) in events
    assert [event.step for event in events if isinstance(event, StepDone)] == [9, 10, 11, 12]
    assert frames_of(out) == frames_of(whole)
    out.unlink()
    assert run(plan, spec, residency, tmp_path / "other", pause)[-1] == Paused(step=8, of=STEPS)
    with Residency() as alone:
        events = run(plan.replace(split=None), spec, alone, tmp_path / "other")
    assert Resumed(step=8, of=STEPS) in events
    assert apart(out, frames_of(whole)) < 0.5
