"""Progress as a fold over events."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.estimates import Seconds
from runtime.core.events import (
    STAGE_TITLES,
    Cancelled,
    Event,
    FramesDecoded,
    Paused,
    Planned,
    Resumed,
    StageStarted,
    StepDone,
    Warned,
)
from runtime.core.facts import Fact
from runtime.core.progress import Progress
from runtime.models.spec import ModelSpec
from tests.plans import tiny_plan


def fold(events: list[tuple[float, Event]]) -> Progress:
    """Return the progress after events at their times."""
    progress = Progress()
    for now, event in events:
        progress = progress.after(event, now)
    return progress


@pytest.fixture
def planned(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Planned:
    """The first event of a job of four steps and nine frames."""
    return Planned(plan=tiny_plan(tiny("wan2.2-a14b"), tmp_path / "x.mp4"))


def test_the_forecast_counts_from_the_start_and_the_title_names_the_component(planned: Planned) -> None:
    progress = fold([(0.0, planned), (0.1, StageStarted(stage="load", part="transformer"))])
    assert progress.seconds_left is not None
    assert progress.seconds_left > 0.0
    assert progress.seconds_per_step is None
    assert progress.title == f"{STAGE_TITLES['load']} the {planned.plan.title('transformer').lower()}"
    assert planned.plan.title("transformer") != planned.plan.title("transformer_2")
    image = fold([(0.0, planned), (0.1, StageStarted(stage="encode", part="vae_encoder"))])
    assert image.title not in STAGE_TITLES.values()


def test_seconds_per_step_is_the_median(planned: Planned) -> None:
    steps = [
        (float(i), StepDone(step=i + 1, of=4, seconds=s, part="transformer")) for i, s in enumerate([9.0, 1.0, 1.0])
    ]
    assert fold([(0.0, planned), *steps]).seconds_per_step == 1.0


def test_steps_that_a_cache_serves_count_neither_as_measured_nor_as_left(
    tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    plan = tiny_plan(tiny("wan2.1"), tmp_path / "x.mp4", steps=8, step_cache="taylorseer:4")
    assert plan.computed == (True, True, False, False, False, True, False, False)
    took = [2.0, 2.0, 0.1, 0.1]
    steps = [StepDone(step=i + 1, of=8, seconds=one, part="transformer") for i, one in enumerate(took)]
    after = fold([(0.0, Planned(plan=plan)), (0.0, StageStarted(stage="denoise")), *((4.2, step) for step in steps)])
    assert after.seconds_per_step == 2.0
    # One of the steps 5 to 8 is computed.
    one = after.pace.step_seconds
    assert after.seconds_left == pytest.approx(one + plan.seconds["decode"].likely * one / after.pace.forecast, rel=0.2)


def test_a_resumed_job_starts_with_its_finished_steps(planned: Planned) -> None:
    first = [
        (0.0, planned),
        (1.0, Warned(fact=Fact("pipeline.text_cut", {"field": "prompt"}))),
        (2.0, StepDone(step=1, of=4, seconds=1.0, part="transformer")),
        (2.0, Paused(step=1, of=4)),
    ]
    assert fold(first).title == "Paused"  # type: ignore[arg-type]  # events of all kinds
    again = fold([*first, (9.0, planned), (9.0, Resumed(step=1, of=4))])  # type: ignore[list-item]  # same
    assert (again.step, again.steps, again.warnings, again.paused) == (1, 4, (), False)
    assert again.end is None


def test_the_fraction_moves_by_the_forecast_of_the_parts(planned: Planned, subtests: pytest.Subtests) -> None:
    """Each part moves with time, slower when it exceeds its forecast, and steps and frames count as soon as done."""
    likely = {"encode": 10, "denoise": 40, "decode": 30, "load": 20, "total": 80}
    seconds = {name: Seconds(value, value, value) for name, value in likely.items()}
    weights = {"text_encoder": 10, "transformer": 4, "transformer_2": 4, "vae": 2}
    components = {name: part.replace(weights_bytes=weights[name]) for name, part in planned.plan.components.items()}
    plan = planned.plan.replace(seconds=seconds, components=components, frames=9)
    steps = [StepDone(step=i, of=4, seconds=10.0, part="transformer") for i in range(1, 5)]
    timeline: list[tuple[float, Event | None, float]] = [
        # Seconds, what happens, the share of 100 s that is done by then.
        (0, Planned(plan=plan), 0),
        (0, StageStarted(stage="build", part="vae"), 0),
        (0, StageStarted(stage="load", part="text_encoder"), 0),
        (5, None, 5),
        (10, None, 8.5),
        (20, None, 9.4375),
        (20, StageStarted(stage="encode"), 10),
        (25, None, 15),
        (30, StageStarted(stage="load", part="transformer"), 20),
        (34, StageStarted(stage="denoise", part="transformer"), 24),
        (39, None, 29),
        (44, steps[0], 34),
        (54, steps[1], 44),
        (54, StageStarted(stage="load", part="transformer_2"), 44),
        (58, StageStarted(stage="denoise", part="transformer_2"), 48),
        (68, steps[2], 58),
        (78, steps[3], 68),
        (78, StageStarted(stage="load", part="vae"), 68),
        (80, StageStarted(stage="decode", part="vae"), 70),
        (95, None, 85),
        (100, FramesDecoded(frames=5, of=9), 90),
        (130, FramesDecoded(frames=9, of=9), 100),
        (130, StageStarted(stage="save"), 100),
    ]
    progress, before = Progress(), 0.0
    for now, event, share in timeline:
        progress = progress.at(now) if event is None else progress.after(event, now)
        with subtests.test(msg=f"{now} s {event}"):
            assert progress.fraction == pytest.approx(0.98 * share / 100, abs=0.001)
            assert progress.fraction >= before
        before = progress.fraction
    assert before < progress.at(131).fraction < progress.at(1_000).fraction < 1.0
    stopped = progress.after(Paused(step=4, of=4), 132)
    assert stopped.at(500).fraction == stopped.fraction


def test_a_finished_job_has_no_time_left(planned: Planned) -> None:
    progress = fold([(0.0, planned), (1.0, Cancelled())])
    assert progress.end == Cancelled()
    assert progress.seconds_left == 0.0


def test_sections_are_counted_and_the_time_left_includes_all(planned: Planned) -> None:
    """Each of three sections of four steps takes 4 s to sample and 2 s to decode, as forecast."""
    likely = {"encode": 0, "denoise": 12, "decode": 6, "load": 0, "total": 18}
    seconds = {name: Seconds(one, one, one) for name, one in likely.items()}
    plan = planned.plan.replace(sections=3, frames=9, seconds=seconds)
    events: list[tuple[float, Event]] = [(0.0, Planned(plan=plan))]
    shown, left, shares, now = [], [], [], 0.0
    steps, of_section = [], []
    for section in range(3):
        events.append((now, StageStarted(stage="denoise", part="transformer")))
        for step in range(4):
            now += 1
            events.append((now, StepDone(step=4 * section + step + 1, of=12, seconds=1.0, part="transformer")))
            left.append((now, fold(events).at(now).seconds_left))
            shown.append(fold(events).section)
            steps.append(fold(events).section_step)
            if step < 3:
                of_section.append(fold(events).at(now).section_seconds_left)
        events.append((now, StageStarted(stage="decode", part="vae")))
        of_section.append(fold(events).at(now + 0.5).section_seconds_left)
        shown.append(fold(events).section)
        now += 2
        events.append((now, FramesDecoded(frames=3 * section + 3, of=9)))
        left.append((now, fold(events).at(now).seconds_left))
        shares.append(fold(events).fraction)
    assert shown == [1, 1, 1, 2, 1, 2, 2, 2, 3, 2, 3, 3, 3, 3, 3]
    assert steps == [2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 4]
    assert of_section == pytest.approx(3 * [5, 4, 3, 1.5], abs=0.01)
    assert shares == pytest.approx([0.98 / 3, 0.98 * 2 / 3, 0.98])
    for moment, seconds_left in left:
        assert seconds_left == pytest.approx(18 - moment, abs=0.01)


def test_a_job_resumed_between_sections_has_their_frames(planned: Planned) -> None:
    plan = planned.plan.replace(sections=3, frames=9)
    again = fold([(0.0, Planned(plan=plan)), (0.0, Resumed(step=9, of=12))])
    assert (again.step, again.steps, again.frames) == (9, 12, 6)
    whole = fold([(0.0, planned), (0.0, Resumed(step=3, of=4))])
    assert whole.frames == 0
