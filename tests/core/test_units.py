"""Byte counts and durations as text."""

import pytest

from runtime.core.units import latency, memory_size, significant


def test_memory_has_binary_units() -> None:
    assert memory_size(812 << 20) == "812 MB"
    assert memory_size(1001 << 20) == "1.0 GB"
    assert memory_size(7 << 29) == "3.5 GB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000249, "0.25 ms"),
        (0.00996, "10 ms"),
        (0.1294, "130 ms"),
        (0.9949, "990 ms"),
        (0.9996, "1.0 s"),
        (1.4963, "1.5 s"),
        (9.96, "10 s"),
        (12.4, "12 s"),
        (185.0, "3 min 5 s"),
        (0.0, "0 ms"),
    ],
)
def test_latencies_have_two_digits(seconds: float, text: str) -> None:
    assert latency(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1.00"), (1.034, "1.03"), (9.996, "10.0"), (12.34, "12.3"), (1234.0, "1230"), (0.0, "0")]
)
def test_numbers_have_no_more_digits_than_asked(value: float, text: str) -> None:
    assert significant(value, 3) == text
