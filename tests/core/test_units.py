"""Byte counts as text."""

from runtime.core.units import memory_size


def test_memory_has_binary_units() -> None:
    assert memory_size(812 << 20) == "812 MiB"
    assert memory_size(7 << 29) == "3.5 GiB"
