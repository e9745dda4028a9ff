"""The guidance cache on tiny models: which passes run, equal videos after a resume, refusals, records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.events import Resumed, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import identity
from runtime.pipeline.files import stamps
from runtime.pipeline.sampling import Guidance
from runtime.planner.history import runs_of
from runtime.video.mp4 import read_metadata
from tests.pipeline.test_out_of_memory import outs
from tests.pipeline.test_resume import at_step, run, steps_of, whole
from tests.pipeline.test_run import frames_of
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]


def passes_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each pass of a transformer will be appended."""
    passes: list[str] = []
    predict = PyTorchDenoiser._predict

    def counted(self: PyTorchDenoiser, *inputs: Any) -> torch.Tensor:
        passes.append("pass")
        return predict(self, *inputs)

    monkeypatch.setattr(PyTorchDenoiser, "_predict", counted)
    return passes


def left_out(plan: ExecutionPlan) -> int:
    """Return how many passes are left out if both always agree: one in every other step of each transformer."""
    return sum(steps // 2 for steps in plan.expert_steps.values())


@pytest.mark.parametrize(
    ("strength", "unconditional", "agrees"),
    [(None, 1.0, False), (0.1, 1.0, True), (0.1, 0.91, True), (0.1, 0.89, False), (0.1, float("nan"), False)],
)
def test_passes_agree_if_they_differ_little(strength: float | None, unconditional: float, agrees: bool) -> None:
    ones = torch.ones(1, 2, 3, 4, 5)
    after = Guidance(strength, left_out=3).after({PROMPTED: ones, UNPROMPTED: unconditional * ones})
    assert (list(after.differences), after.left_out) == ([UNPROMPTED] if agrees else [], 3)
    if agrees:
        assert torch.allclose(after.differences[UNPROMPTED], (1 - unconditional) * ones)


@pytest.mark.parametrize("model", ["wan2.1", "wan2.1-vace", "wan2.2-a14b", "wan2.2-ti2v-5b"])
def test_passes_are_left_out(model: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, passes = tiny(model), passes_of(monkeypatch)
    plan = tiny_plan(spec, tmp_path / "x.mp4", steps=8, guidance_scale=3.0, guidance_cache="0.2")
    saved = run(plan, spec, None)[-1]
    assert isinstance(saved, VideoSaved)
    # Passes of a random model agree at once: each transformer computes both in every other step.
    assert saved.passes_left_out == left_out(plan)
    assert len(passes) == 2 * 8 - saved.passes_left_out
    passes.clear()
    exact = run(plan.replace(guidance_cache="off"), spec, None)[-1]
    assert isinstance(exact, VideoSaved)
    assert (len(passes), exact.passes_left_out) == (16, 0)


def test_nothing_changes_if_both_passes_are_equal(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    values: dict[str, Any] = {"steps": 6, "guidance_scale": 4.0, "prompt": "a boat", "negative_prompt": "a boat"}
    plan = tiny_plan(spec, tmp_path / "x.mp4", guidance_cache="0.05", **values)
    cached, _ = whole(plan, spec)
    exact, _ = whole(plan.replace(guidance_cache="off"), spec)
    assert cached == exact


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "first-block:0.9", "taylorseer:2"])
def test_resuming_at_any_step_gives_the_same_video(cache: str, tiny: Tiny, tmp_path: Path) -> None:
    spec, out = tiny("wan2.2-a14b"), tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, steps=8, guidance_scale=3.0, guidance_cache="0.2", step_cache=cache)
    second = plan.expert_steps["transformer"]
    assert 1 < second < 7
    for step in (1, second - 1, second, second + 1, 7):
        run(plan, spec, tmp_path / "job", stop=at_step(step))
    again = run(plan, spec, tmp_path / "job")
    assert any(isinstance(event, Resumed) for event in again)
    saved = again[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.passes_left_out == left_out(plan)
    wanted, _ = whole(plan, spec)
    assert frames_of(out) == wanted
    assert whole(plan.replace(guidance_cache="off"), spec)[0] != wanted


def test_out_of_memory_continues_with_the_same_passes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, out = tiny("wan2.1"), tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, steps=6, guidance_scale=3.0, guidance_cache="0.2")
    wanted, _ = whole(plan, spec)
    predict, calls = PyTorchDenoiser._predict, 0

    def starving(self: PyTorchDenoiser, *inputs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2 + 1 + 2 + 1:  # the fourth step, which takes over the difference of the third
            raise torch.OutOfMemoryError("on purpose")
        return predict(self, *inputs)

    monkeypatch.setattr(PyTorchDenoiser, "_predict", starving)
    events = run(plan, spec, None)
    saved = events[-1]
    assert isinstance(saved, VideoSaved), saved
    assert len(outs(events)) == 1
    assert (steps_of(events), saved.passes_left_out) == ([1, 2, 3, 4, 5, 6], 3)
    assert frames_of(out) == wanted


def test_video_and_checkpoint_record_the_guidance_cache(tiny: Tiny, tmp_path: Path) -> None:
    spec, out = tiny("wan2.1"), tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, guidance_scale=3.0, guidance_cache="0.1")
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    assert "planner.guidance_cached" in {reason.code for reason in plan.components["transformer"].reasons}
    assert isinstance(run(plan, spec, None)[-1], VideoSaved)
    facts = read_metadata(out)
    assert facts["request"]["guidance_cache"] == facts["plan"]["guidance_cache"] == "0.1"
    plain, other = (plan.replace(guidance_cache=cache) for cache in ("off", "0.2"))
    files = stamps(spec)
    assert len({identity(files, one) for one in (plan, plain, other)}) == 3


def test_a_forecast_counts_a_share_until_jobs_have_measured_it(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    plain, cached = (tiny_plan(spec, tmp_path / "x.mp4", guidance_cache=cache) for cache in ("off", "0.1"))
    before, after = (plan.seconds["denoise"] for plan in (plain, cached))
    assert 0.75 * before.likely < after.likely < before.likely
    assert (after.low, after.high) == pytest.approx((0.75 * before.low, before.high))
    (ran,) = (
        one
        for one in runs_of(cached, cached, spec, machine(), {"denoise": 8.0}, {})
        if one.kind.component == "transformer"
    )
    assert ran.kind.step_cache == "guidance:0.1"
    both = tiny_plan(spec, tmp_path / "x.mp4", guidance_cache="0.1", step_cache="first-block:0.2")
    kinds = {one.kind.step_cache for one in runs_of(both, both, spec, machine(), {}, {})}
    assert kinds == {"", "first-block:0.2 guidance:0.1"}
