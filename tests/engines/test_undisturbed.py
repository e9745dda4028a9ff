"""Measurements are repeated while other programs use the processor."""

from collections.abc import Sequence

import pytest

from runtime.engines.verify import Round, undisturbed


@pytest.mark.parametrize(
    ("rounds", "seconds", "measured"),
    [
        ([Round(1.0, 3.0, False)], 1.0, 1),
        ([Round(9.0, 3.0, True), Round(1.0, 3.0, False)], 1.0, 2),
        # Nothing but load: the least disturbed.
        ([Round(9.0, 3.0, True), Round(4.0, 3.0, True), Round(6.0, 3.0, True)], 4.0, 3),
        # What takes long is not repeated.
        ([Round(31.0, 31.0, True)], 31.0, 1),
    ],
)
def test_calls_are_repeated_until_nothing_disturbs_them(rounds: Sequence[Round], seconds: float, measured: int) -> None:
    left = iter(rounds)
    count = 0

    def measure() -> Round:
        nonlocal count
        count += 1
        return next(left)

    assert (undisturbed(measure), count) == (seconds, measured)
