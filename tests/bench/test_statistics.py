"""Medians, their range, and ratios."""

import pytest

from runtime.bench.statistics import Spread, ratio, spread


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([2.0], Spread(2.0, 2.0, 2.0, 1)),
        ([3.0, 1.0, 2.0], Spread(2.0, 1.0, 3.0, 3)),
        ([4.0, 1.0, 2.0, 3.0], Spread(2.5, 1.0, 4.0, 4)),
    ],
)
def test_spread(values: list[float], expected: Spread | None) -> None:
    assert spread(values) == expected
    assert expected is None or Spread.from_json(expected.to_json()) == expected


@pytest.mark.parametrize(
    ("before", "after", "median", "verdict"),
    [
        (Spread(2, 1.9, 2.1, 3), Spread(1, 0.9, 1.1, 3), 0.5, "faster"),
        (Spread(1, 0.9, 1.1, 3), Spread(2, 1.9, 2.1, 3), 2.0, "slower"),
        (Spread(1, 0.9, 1.1, 3), Spread(1.05, 1.0, 1.2, 3), 1.05, "within the spread"),
        (Spread(1, 1, 1, 1), Spread(2, 2, 2, 3), 2.0, "too few runs"),
        (Spread(1, 1, 1, 3), Spread(2, 2, 2, 1), 2.0, "too few runs"),
    ],
)
def test_ratio(before: Spread, after: Spread, median: float, verdict: str) -> None:
    found = ratio(before, after)
    assert found is not None
    assert found.median == median
    assert found.verdict == verdict
    assert found.low <= found.median <= found.high


@pytest.mark.parametrize("zero", [Spread(0, 0, 0, 3), Spread(0.1, 0, 0.2, 3)])
def test_zero_has_no_ratio(zero: Spread) -> None:
    assert ratio(zero, Spread(1, 1, 1, 3)) is None
    assert ratio(Spread(1, 1, 1, 3), zero) is None


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"median": 1, "low": 2, "high": 3, "count": 1},
        {"median": 1, "low": -1, "high": 3, "count": 1},
        {"median": 1, "low": 1, "high": 1, "count": 0},
        {"median": "fast", "low": 1, "high": 1, "count": 1},
        {"median": float("nan"), "low": 1, "high": 1, "count": 1},
    ],
)
def test_damaged_spreads_are_refused(values: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Spread.from_json(values)
