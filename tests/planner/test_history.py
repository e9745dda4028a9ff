"""Forecasts from measurements of earlier jobs."""

import pytest
from pydantic import ValidationError

from runtime.core.estimates import StageMemory
from runtime.planner.history import Kind, Run, corrected_by_history, newer, seconds_per_call

KIND = Kind(
    device="Test CPU, 2 cores",
    model="abc",
    component="vae",
    backend="pytorch",
    dtype="float32",
    quantization="none",
    offload="none",
)
RUN = Run(kind=KIND, flops=1e12, seconds=4.0, working_bytes=1000, excess_bytes=100)
STAGE = StageMemory(stage="decode", component="vae", weights_bytes=500, working_bytes=2000, overhead_bytes=300)


@pytest.mark.parametrize(
    ("flops", "seconds", "low", "high"),
    [(1e12, 4.0, 3.0, 5.6), (2e12, 8.0, 4.8, 13.6), (0.25e12, 1.0, 0.6, 1.7)],
)
def test_seconds_grow_with_the_operations(flops: float, seconds: float, low: float, high: float) -> None:
    found = seconds_per_call([RUN], KIND, flops)
    assert found is not None
    assert (found.likely, found.low, found.high) == pytest.approx((seconds, low, high))
    # Called measured only at the size that was measured.
    assert (found.measured, found.known) == (flops == RUN.flops, True)


@pytest.mark.parametrize(
    ("before", "after", "seconds", "loaded"),
    [
        # Seconds of two runs of one kind and size, and whether other programs used the processor: which counts.
        ((4.0, False), (1.5, False), 1.5, False),
        ((4.0, False), (5.0, False), 5.0, False),
        ((4.0, False), (40.0, True), 4.0, False),
        ((4.0, False), (3.0, True), 3.0, True),
        ((40.0, True), (30.0, True), 30.0, True),
        ((30.0, True), (40.0, True), 30.0, True),
        ((40.0, True), (4.0, False), 4.0, False),
        ((0.0, False), (40.0, True), 40.0, True),
    ],
)
def test_a_loaded_run_does_not_replace_another(
    before: tuple[float, bool], after: tuple[float, bool], seconds: float, loaded: bool
) -> None:
    first, second = (RUN.replace(seconds=time, loaded=busy) for time, busy in (before, after))
    kept = newer(first, second)
    assert (kept.seconds, kept.loaded) == (seconds, loaded)
    assert newer(None, second) == second


def test_a_loaded_run_counts_only_alone_and_is_not_called_measured() -> None:
    loaded = RUN.replace(seconds=40.0, loaded=True)
    alone = seconds_per_call([loaded], KIND, RUN.flops)
    assert alone is not None and alone.likely == 40.0 and not alone.measured and alone.known
    nearby = RUN.replace(flops=2 * RUN.flops, seconds=8.0)
    beside = seconds_per_call([loaded, nearby], KIND, RUN.flops)
    assert beside is not None and beside.likely == pytest.approx(4.0)


@pytest.mark.parametrize("changed", list(vars(KIND)))
def test_runs_of_another_kind_do_not_count(changed: str) -> None:
    other = KIND.replace(**{changed: "other"})
    assert seconds_per_call([RUN], other, 1e12) is None
    assert corrected_by_history([RUN], other, 1e12, STAGE) == STAGE


def test_runs_of_a_very_different_size_do_not_count() -> None:
    assert seconds_per_call([RUN], KIND, 1e14) is None


def test_the_nearest_run_counts() -> None:
    found = seconds_per_call([RUN, RUN.replace(flops=4e12, seconds=10.0)], KIND, 3e12)
    assert found is not None
    assert found.likely == pytest.approx(7.5)


@pytest.mark.parametrize(
    ("excess", "working", "overhead"),
    [(100, 2200, 300), (0, 2000, 300), (-100, 2000, 200), (-400, 2000, 0)],
)
def test_memory_beyond_the_forecast_grows_with_the_working_set(excess: int, working: int, overhead: int) -> None:
    found = corrected_by_history([RUN.replace(excess_bytes=excess)], KIND, 1e12, STAGE)
    assert (found.working_bytes, found.overhead_bytes, found.weights_bytes) == (working, overhead, 500)
    assert found.measured


def test_a_run_without_peak_or_seconds_counts_for_the_other() -> None:
    assert corrected_by_history([RUN.replace(excess_bytes=None)], KIND, 1e12, STAGE) == STAGE
    assert seconds_per_call([RUN.replace(seconds=0.0)], KIND, 1e12) is None


def test_a_run_survives_json() -> None:
    for run in (RUN, RUN.replace(excess_bytes=None)):
        assert Run.model_validate_json(run.model_dump_json()) == run


@pytest.mark.parametrize("field", ["flops", "seconds", "working_bytes", "excess_bytes", "kind"])
@pytest.mark.parametrize("value", ["x", {}, float("nan"), float("inf"), -1e300])
def test_damaged_runs_are_refused_or_harmless(field: str, value: object) -> None:
    try:
        run = Run.model_validate(RUN.model_dump(mode="json") | {field: value})
    except ValidationError:
        return
    assert field == "excess_bytes"
    assert isinstance(run.excess_bytes, int)
