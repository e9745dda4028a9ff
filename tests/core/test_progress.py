"""Progress as a fold over events: what a progress line would show."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.events import Cancelled, Event, FramesDecoded, Planned, StageStarted, StepDone
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
    return Planned(tiny_plan(tiny("wan2.2-a14b"), tmp_path / "x.mp4"))


def test_nothing_is_promised_before_it_is_measured(planned: Planned) -> None:
    progress = fold([(0.0, planned), (0.1, StageStarted("load", "transformer"))])
    assert progress.seconds_left is None
    assert progress.fraction == 0.0
    assert progress.title == "Loading the high-noise transformer"


def test_time_left_counts_the_remaining_steps_and_the_decode(planned: Planned) -> None:
    steps = [(float(i), StepDone(i, 4, 1.0, "transformer")) for i in (1, 2, 3)]
    progress = fold([(0.0, planned), (0.0, StageStarted("denoise", "transformer")), *steps])
    decode = planned.plan.decode_flops / planned.plan.step_flops
    assert progress.seconds_left == pytest.approx(1.0 + decode)
    assert progress.seconds_per_step == 1.0


def test_a_slow_first_step_does_not_spoil_the_forecast(planned: Planned) -> None:
    seconds = [9.0, 1.0, 1.0]
    steps = [(float(i), StepDone(i + 1, 4, s, "transformer")) for i, s in enumerate(seconds)]
    assert fold([(0.0, planned), *steps]).seconds_per_step == 1.0


def test_decoding_is_forecast_from_its_own_speed(planned: Planned) -> None:
    progress = fold([(0.0, planned), (10.0, StageStarted("decode")), (12.0, FramesDecoded(3, 9))])
    assert progress.seconds_left is None  # no step was measured, as after a reload of old events
    steps = (5.0, StepDone(4, 4, 1.0, "transformer"))
    progress = fold([(0.0, planned), steps, (10.0, StageStarted("decode")), (12.0, FramesDecoded(3, 9))])
    assert progress.seconds_left == pytest.approx(4.0)


def test_the_share_done_only_grows(planned: Planned) -> None:
    events: list[tuple[float, Event]] = [(0.0, planned)]
    events += [(float(i), StepDone(i, 4, 1.0, "transformer")) for i in (1, 2, 3, 4)]
    events += [(6.0, FramesDecoded(1, 9)), (7.0, FramesDecoded(9, 9))]
    shares = [fold(events[: n + 1]).fraction for n in range(len(events))]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == pytest.approx(1.0)


def test_the_end_is_the_end(planned: Planned) -> None:
    progress = fold([(0.0, planned), (1.0, Cancelled())])
    assert progress.end == Cancelled()
    assert progress.seconds_left == 0.0
