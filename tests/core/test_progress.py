"""Progress as a fold over events."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.events import (
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
    assert progress.fraction == 0.0
    assert progress.title == "Loading the high-noise transformer"


def test_seconds_per_step_is_the_median(planned: Planned) -> None:
    steps = [
        (float(i), StepDone(step=i + 1, of=4, seconds=s, part="transformer")) for i, s in enumerate([9.0, 1.0, 1.0])
    ]
    assert fold([(0.0, planned), *steps]).seconds_per_step == 1.0


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


def test_the_fraction_never_decreases(planned: Planned) -> None:
    events: list[tuple[float, Event]] = [(0.0, planned)]
    events += [(float(i), StepDone(step=i, of=4, seconds=1.0, part="transformer")) for i in (1, 2, 3, 4)]
    events += [(6.0, FramesDecoded(frames=1, of=9)), (7.0, FramesDecoded(frames=9, of=9))]
    shares = [fold(events[: n + 1]).fraction for n in range(len(events))]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == pytest.approx(1.0)


def test_a_finished_job_has_no_time_left(planned: Planned) -> None:
    progress = fold([(0.0, planned), (1.0, Cancelled())])
    assert progress.end == Cancelled()
    assert progress.seconds_left == 0.0
