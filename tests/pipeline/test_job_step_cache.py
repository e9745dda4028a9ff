"""Jobs with a step cache on tiny models: resuming gives the same video; history and checkpoints record the cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.events import Paused, Resumed, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import identity
from runtime.pipeline.files import stamps
from runtime.planner.history import Run, runs_of, seconds_per_call
from runtime.video.mp4 import read_metadata
from tests.pipeline.test_out_of_memory import outs
from tests.pipeline.test_resume import at_step, run, steps_of, whole
from tests.pipeline.test_run import frames_of
from tests.pipeline.test_step_cache import with_ratios
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]
CACHE = "first-block:0.9"


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "within"), [(CACHE, {8}), ("magcache:0.12", set()), ("taylorseer:3", set())])
def test_resuming_at_any_step_gives_the_same_video(cache: str, within: set[int], tiny: Tiny, tmp_path: Path) -> None:
    spec = with_ratios(tiny("wan2.2-a14b"))
    out = tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, steps=12, step_cache=cache)
    second = plan.expert_steps["transformer"]
    # MagCache can be resumed before each step that it computes.
    computed = {step for step in range(1, 12) if plan.computed[step]} if cache.startswith("magcache") else set()
    resumable = sorted({second} | within | computed)
    from_here = 0
    for step in sorted({resumable[0] + 1, resumable[-1], min(resumable[-1] + 2, 11)}):
        events = run(plan, spec, tmp_path / "job", stop=at_step(step))
        assert steps_of(events) == list(range(from_here + 1, step + 1))
        from_here = max([done for done in resumable if done <= step], default=0)
        assert events[-1] == Paused(step=from_here, of=12)
    again = run(plan, spec, tmp_path / "job")
    assert steps_of(again) == list(range(from_here + 1, 13))
    assert Resumed(step=from_here, of=12) in again
    wanted, _ = whole(plan, spec)
    assert frames_of(out) == wanted
    assert whole(plan.replace(step_cache="none"), spec)[0] != wanted


def test_out_of_memory_resumes_at_the_start_of_a_cache(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.1")
    out = tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, steps=12, step_cache=CACHE)
    wanted, _ = whole(plan, spec)
    predict, calls = PyTorchDenoiser._predict, 0

    def starving(self: PyTorchDenoiser, *inputs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2 * 10 + 1:  # the eleventh step's first pass
            raise torch.OutOfMemoryError("on purpose")
        return predict(self, *inputs)

    monkeypatch.setattr(PyTorchDenoiser, "_predict", starving)
    events = run(plan, spec, None)
    assert isinstance(events[-1], VideoSaved), events[-1]
    assert len(outs(events)) == 1
    assert steps_of(events) == [*range(1, 11), *range(9, 13)]
    assert frames_of(out) == wanted


def test_video_and_checkpoint_record_the_step_cache(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    out = tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, step_cache="first-block")
    assert plan.step_cache == "first-block:0.08"
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    assert isinstance(run(plan, spec, None)[-1], VideoSaved)
    facts = read_metadata(out)
    assert facts["request"]["step_cache"] == facts["plan"]["step_cache"] == "first-block:0.08"
    plain, other = (plan.replace(step_cache=cache) for cache in ("none", "first-block:0.2"))
    files = stamps(spec)
    assert len({identity(files, one) for one in (plan, plain, other)}) == 3


def test_other_ratios_are_another_clip(tiny: Tiny, tmp_path: Path) -> None:
    spec = with_ratios(tiny("wan2.1"))
    plan = tiny_plan(spec, tmp_path / "x.mp4", step_cache="magcache:0.1")
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    other = plan.replace(mag_ratios={"transformer": (1.0, 0.9)})
    assert len({identity(stamps(spec), one) for one in (plan, other)}) == 2


def test_a_forecast_uses_runs_with_the_same_cache(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    out = tmp_path / "x.mp4"
    plain, cached = (tiny_plan(spec, out, step_cache=cache) for cache in ("none", CACHE))
    timings = {"encode": 0.1, "denoise": 8.0, "decode": 0.1}
    faster = timings | {"denoise": 4.0}
    history = [
        run
        for plan, took in ((plain, timings), (cached, faster))
        for run in runs_of(plan, plan, spec, machine(), took, {})
    ]
    kinds = [run for run in history if run.kind.component == "transformer"]
    assert [run.kind.step_cache for run in kinds] == ["", CACHE]
    assert {run.kind.step_cache for run in history if run.kind.component != "transformer"} == {""}
    for one, expected in zip(kinds, (1.0, 0.5), strict=True):
        found = seconds_per_call(history, one.kind, one.flops)
        assert found is not None and found.likely == pytest.approx(expected)  # four steps of two passes
    # Runs recorded before step caches existed are still used.
    old = kinds[0].model_dump(mode="json")
    del old["kind"]["step_cache"]
    assert Run.model_validate(old) == kinds[0]
