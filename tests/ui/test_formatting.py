"""How numbers read on the page."""

import pytest

from runtime.ui import formatting


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0.0 s"), (0.42, "0.4 s"), (9.94, "9.9 s"), (12.4, "12 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"),
     (3900, "1 h 5 min")],
)  # fmt: skip
def test_duration(seconds: float, expected: str) -> None:
    assert formatting.duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, ""), (0.2, "almost done"), (7.6, "about 8 s left"), (43, "about 45 s left"), (119, "about 120 s left"),
     (170, "about 3 min left"), (9000, "about 2.5 h left")],
)  # fmt: skip
def test_time_left_is_rounded(seconds: float | None, expected: str) -> None:
    assert formatting.time_left(seconds) == expected


def test_sizes_and_lengths() -> None:
    assert formatting.size(192, 112) == "192 × 112"
    assert formatting.length(33, 16) == "33 frames · 2.1 s at 16 fps"
    assert formatting.length(1, 16) == "1 frame · 0.1 s at 16 fps"
