"""Medians with their spread, and whether two of them differ by more than that. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["faster", "slower", "within the spread", "too few runs"]
# Of fewer runs nothing is known of how far they scatter.
_FEWEST = 2


@dataclass(frozen=True)
class Spread:
    """The median, the least and the most of `count` measurements."""

    median: float
    low: float
    high: float
    count: int

    def to_json(self) -> dict[str, float]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Spread":
        """Read `to_json` back.

        Raises:
            TypeError, ValueError, KeyError: if it is anything else.
        """
        found = cls(float(values["median"]), float(values["low"]), float(values["high"]), int(values["count"]))
        if not (0 <= found.low <= found.median <= found.high and found.count > 0):
            raise ValueError("a spread that cannot be")
        return found


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of measurements; `None` if there are none."""
    return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None


@dataclass(frozen=True)
class Ratio:
    """How many times as long something takes as before: of the medians, and the least and most that the runs allow."""

    median: float
    low: float
    high: float
    verdict: Verdict


def ratio(before: Spread, after: Spread) -> Ratio | None:
    """Return `after` over `before`; `None` where `before` holds a zero, which tells nothing."""
    if not before.low or not after.low:
        return None
    low, high = after.low / before.high, after.high / before.low
    verdict: Verdict = "within the spread"
    if min(before.count, after.count) < _FEWEST:
        verdict = "too few runs"
    elif low > 1:
        verdict = "slower"
    elif high < 1:
        verdict = "faster"
    return Ratio(after.median / before.median, low, high, verdict)
