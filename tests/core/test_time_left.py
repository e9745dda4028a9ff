"""Time left: forecast before the first step, measured after it, at every speed and after surprises."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.estimates import Seconds
from runtime.core.events import Event, FramesDecoded, OutOfMemory, Planned, Resumed, StageStarted, StepDone
from runtime.core.plan import ExecutionPlan
from runtime.core.progress import Pace
from runtime.models.spec import ModelSpec
from tests.plans import tiny_plan

LOADS = ("text_encoder", "transformer", "transformer_2", "vae")
Timed = list[tuple[float, Event]]


def sure(seconds: float) -> Seconds:
    return Seconds(seconds, seconds, seconds)


@pytest.fixture
def plan(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> ExecutionPlan:
    """Ten steps of 2 s, 1 s each for the prompt and for each of four loads, 10 s of decoding nine frames."""
    made = tiny_plan(tiny("wan2.2-a14b"), tmp_path / "x.mp4", steps=10)
    seconds = {"encode": sure(1), "denoise": sure(20), "decode": sure(10), "total": sure(31), "load": sure(4)}
    parts = {name: part.replace(weights_bytes=100) for name, part in made.components.items()}
    return made.replace(seconds=seconds, components=parts, guidance_scale=4.0, guidance_scale_2=3.0)


def fold(events: Timed) -> Pace:
    pace = Pace()
    for now, event in events:
        pace = pace.after(event, now)
    return pace


def context(plan: ExecutionPlan, speed: float) -> Timed:
    """Return the events of a job that takes `speed` times as long as forecast."""
    now = 0.0
    events: Timed = [(0.0, Planned(plan=plan))]

    def add(seconds: float, event: Event) -> None:
        nonlocal now
        now += seconds * speed
        events.append((now, event))

    add(0, StageStarted(stage="load", part="text_encoder"))
    add(1, StageStarted(stage="encode", part="text_encoder"))
    for first, name in ((0, "transformer"), (3, "transformer_2")):
        add(2 if first else 1, StageStarted(stage="load", part=name))
        add(1, StageStarted(stage="denoise", part=name))
        for step in range(first, 3 if first == 0 else 10):
            events.append((now + 2 * speed, StepDone(step=step + 1, of=10, seconds=2 * speed, part=name)))
            now += 2 * speed
    add(0, StageStarted(stage="load", part="vae"))
    add(1, StageStarted(stage="decode", part="vae"))
    for frame in range(9):
        add(10 / 9, FramesDecoded(frames=frame + 1, of=9))
    events.append((now, StageStarted(stage="save")))
    return events


@pytest.mark.parametrize(
    ("events", "now", "left"),
    [
        ([], 0.0, 35.0),
        ([(0, StageStarted(stage="load", part="text_encoder"))], 0.5, 34.5),
        # Loading that takes longer than forecast does not shorten the other stages.
        ([(0, StageStarted(stage="load", part="text_encoder"))], 3.0, 34.0),
        (
            [
                (0, StageStarted(stage="load", part="text_encoder")),
                (1, StageStarted(stage="encode", part="text_encoder")),
            ],
            1.5,
            33.5,
        ),
        # In memory from an earlier job: what stays there is not loaded again.
        ([(0, StageStarted(stage="encode", part="text_encoder"))], 0.0, 31.0),
        (
            [
                (0, StageStarted(stage="encode", part="text_encoder")),
                (1, StageStarted(stage="denoise", part="transformer")),
            ],
            1.0,
            30.0,
        ),
        # All but decoding was done by an earlier run.
        ([(0, Resumed(step=10, of=10)), (0, StageStarted(stage="load", part="vae"))], 0.0, 11.0),
        ([(0, Resumed(step=6, of=10)), (0, StageStarted(stage="load", part="transformer_2"))], 0.0, 20.0),
        ([(0, StageStarted(stage="save"))], 0.0, 0.0),
    ],
)
def test_before_the_first_step_the_forecast_counts(plan: ExecutionPlan, events: Timed, now: float, left: float) -> None:
    assert fold([(0.0, Planned(plan=plan)), *events]).left(now) == pytest.approx(left)


def test_unknown_while_building_or_before_planning(plan: ExecutionPlan) -> None:
    assert Pace().left(0.0) is None
    assert fold([(0.0, Planned(plan=plan)), (0.0, StageStarted(stage="build", part="vae"))]).left(1.0) is None
    assert fold([(0.0, Planned(plan=plan.replace(seconds={})))]).left(1.0) is None


@pytest.mark.parametrize("speed", [0.1, 0.4, 0.6, 1.0, 1.7, 2.5, 10.0])
def test_the_estimate_converges_without_jumps(plan: ExecutionPlan, speed: float) -> None:
    events = context(plan, speed)
    end = events[-1][0]
    pace = Pace()
    before = None
    for (now, event), (until, _) in zip(events, [*events[1:], events[-1]], strict=True):
        pace = pace.after(event, now)
        seen = [pace.left(now + share * (until - now)) for share in (0.0, 0.5, 0.999)]
        estimates = [left for left in seen if left is not None]
        assert len(estimates) == len(seen)
        assert estimates == sorted(estimates, reverse=True), "between events it counts down"
        assert min(estimates) >= 0.0
        left = estimates[0]
        # Where the forecast is within its bounds. One that is ten times off is corrected at once.
        if before is not None and 0.4 <= speed <= 2.5:
            assert abs(left - before) <= max(0.45 * max(before, left), 2.0)
        if pace.step >= 7 and now < end:
            assert left == pytest.approx(end - now, rel=0.25, abs=1.5 * speed)
        before = estimates[2]


def test_a_slow_first_step_has_little_weight(plan: ExecutionPlan) -> None:
    steps: Timed = [(11.0, StepDone(step=1, of=10, seconds=9.0, part="transformer"))]
    steps += [(11.0 + 2 * n, StepDone(step=n + 1, of=10, seconds=2.0, part="transformer")) for n in (1, 2, 3)]
    pace = fold([(0.0, Planned(plan=plan)), (2.0, StageStarted(stage="denoise", part="transformer")), *steps])
    assert pace.median_step == 2.0
    assert pace.left(17.0) == pytest.approx(6 * 2.0 + 10.0)


def test_a_transformer_without_guidance_takes_half_the_time(plan: ExecutionPlan) -> None:
    events: Timed = [
        (0.0, Planned(plan=plan.replace(guidance_scale_2=1.0))),
        (0.0, StageStarted(stage="denoise", part="transformer")),
    ]
    events += [(4.0 * n, StepDone(step=n, of=10, seconds=4.0, part="transformer")) for n in range(1, 6)]
    pace = fold([*events, (20.0, StageStarted(stage="denoise", part="transformer_2"))])
    assert pace.step_seconds == pytest.approx(2.0, rel=0.05)
    # Decoding is expected to be as much slower as the steps are, twice.
    assert pace.left(20.0) == pytest.approx(5 * 2.0 + 20.0, rel=0.05)


def test_out_of_memory_continues_at_the_new_strategys_speed(plan: ExecutionPlan) -> None:
    events: Timed = [(0.0, Planned(plan=plan)), (0.0, StageStarted(stage="denoise", part="transformer"))]
    events += [(2.0 * n, StepDone(step=n, of=10, seconds=2.0, part="transformer")) for n in range(1, 5)]
    slower = plan.replace(seconds={name: s if name == "load" else s * 3 for name, s in plan.seconds.items()})
    out = OutOfMemory(
        stage="denoise",
        component="transformer",
        memory="VRAM",
        retried=True,
        slowdown=3.0,
        lost_seconds=1.0,
        plan=slower,
    )
    pace = fold([*events, (9.0, out), (9.0, StageStarted(stage="load", part="transformer"))])
    assert pace.left(9.0) == pytest.approx(3.0 + 6 * 6.0 + 30.0)
