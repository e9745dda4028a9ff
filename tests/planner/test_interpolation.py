"""Plans of videos that are interpolated: frames, rates, seconds, and what is too fast."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import ExecutionPlan
from runtime.core.request import INTERPOLATOR, GenerationRequest
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import read_spec
from runtime.models.requested import with_finishers
from runtime.models.spec import ModelSpec
from runtime.planner.interpolation import Interpolation, run_of
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]


@pytest.mark.parametrize(("factor", "frames", "fps"), [(2, 18, 32), ("4", 36, 64)])
def test_the_video_has_more_frames_and_lasts_as_long(factor: int | str, frames: int, fps: int, tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    plain, made = (tiny_plan(spec, Path("x.mp4"), fps=16, interpolate=value) for value in ("off", factor))
    assert (plain.video_frames, plain.video_fps, plain.keeps_plain) == (9, 16, False)
    assert (made.video_frames, made.video_fps, made.keeps_plain) == (frames, fps, True)
    assert (made.frames, made.fps, made.seconds_of_video) == (9, 16, made.video_frames / made.video_fps)
    seconds = made.seconds["interpolate"].likely
    assert seconds > 0
    assert made.seconds["total"].likely == pytest.approx(plain.seconds["total"].likely + seconds)
    assert made.forecast.seconds == made.seconds["total"]
    restored = GenerationRequest.from_mapping(made.request_json())
    assert (restored.interpolate, restored.fps, restored.frames) == (str(factor), 16, 9)
    assert ExecutionPlan.model_validate_json(made.model_dump_json()) == made


def test_the_network_interpolates_only_what_it_was_trained_on(tiny: Tiny, tmp_path: Path) -> None:
    of_other, request = tiny("wan2.1"), GenerationRequest.from_mapping({"prompt": "a", "interpolate": 2})
    shipped = read_spec(EMBEDDED / "diorama", "diorama")
    found = {}
    for of_model in (of_other, replace(of_other, interpolates=shipped.interpolates)):
        spec = with_finishers(of_model, request, tmp_path)
        plan = tiny_plan(spec, Path("x.mp4"), interpolate=2)
        found[plan.to_json()["interpolation"]["by"]] = plan.seconds["interpolate"].likely
        kinds = run_of(plan, spec, machine(), 1.0, loaded=False).kind
        assert kinds.backend == {"network": "pytorch", "minterpolate": "ffmpeg"}[plan.interpolator]
        assert (INTERPOLATOR in plan.components) == (plan.interpolator == "network")
    assert found["network"] > found["minterpolate"]


def test_a_finished_job_corrects_the_forecast_of_its_kind(tiny: Tiny) -> None:
    work = Interpolation.of(tiny_plan(tiny("wan2.1"), Path("x.mp4"), interpolate=2))
    history = [work.run(9, 5.0, machine(), loaded=False)]
    assert work.seconds(9, machine(), history).likely == pytest.approx(5.0)
    assert work.seconds(9, machine(), history).measured
    assert work.seconds(18, machine(), history).likely == pytest.approx(10.0)
    of_file = Interpolation(work.width, work.height, work.factor, stage=False)
    assert not of_file.seconds(9, machine(), history).known


@pytest.mark.parametrize(("fps", "factor", "nearest"), [(61, 4, "2"), (120, 4, "2"), (60, 4, ""), (120, 2, "")])
def test_the_frame_rate_is_limited(fps: int, factor: int, nearest: str, tiny: Tiny) -> None:
    if not nearest:
        assert tiny_plan(tiny("wan2.1"), Path("x.mp4"), fps=fps, interpolate=factor).video_fps == 240
        return
    with pytest.raises(InvalidRequestError) as caught:
        tiny_plan(tiny("wan2.1"), Path("x.mp4"), fps=fps, interpolate=factor)
    assert (caught.value.field, caught.value.fact.code) == ("interpolate", "interpolate.too_fast")
    assert caught.value.fact.data["nearest"] == ["interpolate", nearest]
