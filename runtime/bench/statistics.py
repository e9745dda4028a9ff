"""Medians with their range, and comparisons of two medians that take the ranges into account. Pure functions."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["faster", "slower", "within the spread", "too few runs"]
# With fewer runs the range is unknown.
_MIN_RUNS = 2


@dataclass(frozen=True)
class Spread:
    """Median, minimum (`low`) and maximum (`high`) of `count` measurements."""

    median: float
    low: float
    high: float
    count: int

    def to_json(self) -> dict[str, float]:
        """Return the fields as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Spread":
        """Return the spread that `to_json` wrote.

        Raises:
            TypeError, ValueError, KeyError: if the values are not a valid spread.
        """
        result = cls(float(values["median"]), float(values["low"]), float(values["high"]), int(values["count"]))
        if not (0 <= result.low <= result.median <= result.high and result.count > 0):
            raise ValueError("the median is not between the minimum and the maximum")
        return result


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of measurements; `None` if there are none."""
    return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None


@dataclass(frozen=True)
class Ratio:
    """Ratio of two durations, after to before: of the medians, with the smallest and the largest ratio of two runs."""

    median: float
    low: float
    high: float
    verdict: Verdict


def ratio(before: Spread, after: Spread) -> Ratio | None:
    """Return `after` divided by `before`; `None` if one of them contains a zero."""
    if not before.low or not after.low:
        return None
    low, high = after.low / before.high, after.high / before.low
    verdict: Verdict = "within the spread"
    if min(before.count, after.count) < _MIN_RUNS:
        verdict = "too few runs"
    elif low > 1:
        verdict = "slower"
    elif high < 1:
        verdict = "faster"
    return Ratio(after.median / before.median, low, high, verdict)
