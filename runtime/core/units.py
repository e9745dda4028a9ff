"""Byte counts, durations and shapes as text."""

from collections.abc import Sequence
from math import floor, log10

_MIB, _GIB = 1 << 20, 1 << 30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# From here on, a number of two digits is not 1,000 of the smaller unit.
_TWO_DIGITS = 0.995
_MINUTE, _HOUR = 60, 3600
# Below these, two digits are milliseconds, or tenths of a second.
_WHOLE_SECONDS, _FINE_SECONDS = 0.995, 9.95


def byte_size(count: int) -> str:
    """Return a number of bytes in decimal units: "14.5 MB", "1.2 GB"."""
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if count >= UNITS[unit]), "B")
    return f"{count / UNITS[unit]:.1f} {unit}" if unit != "B" else f"{count} B"


def estimated_size(count: int) -> str:
    """Return an estimate of a number of bytes with two significant digits: "15 MB", "1.2 GB"."""
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if count >= _TWO_DIGITS * UNITS[unit]), "B")
    return f"{significant(count / UNITS[unit])} {unit}"


def memory_size(count: int) -> str:
    """Return a number of bytes of memory as makers of cards count them, 1 GB = 2³⁰ bytes: "812 MB", "3.4 GB".

    From 1,000 MB on it is in GB, so that no size has four digits and a comma.
    """
    return f"{count / _GIB:,.1f} GB" if count >= 999.5 * _MIB else f"{count / _MIB:.0f} MB"


def duration(seconds: float) -> str:
    """Return a duration: "8 s", "3 min 5 s", "1 h 2 min"."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"


def significant(value: float, digits: int = 2) -> str:
    """Return a number ≥ 0 with so many significant digits and no exponent: "0.13", "1.3", "13", "130"."""
    if not value:
        return "0"
    decimals = digits - 1 - floor(log10(value))
    # Rounding may add a digit: 9.96 is "10", not "10.0".
    value = round(value, decimals)
    return f"{value:.{max(digits - 1 - floor(log10(value)), 0)}f}"


def latency(seconds: float) -> str:
    """Return a duration of a call with two significant digits: "0.25 ms", "130 ms", "1.5 s", "12 s", "3 min 5 s"."""
    if seconds < _WHOLE_SECONDS:
        return f"{significant(1000 * seconds)} ms"
    return f"{significant(seconds)} s" if seconds < _FINE_SECONDS else duration(seconds)


def shape_text(shape: Sequence[int]) -> str:
    """Return a tensor's shape: "49×32×7×12"; "one value" without axes."""
    return "×".join(map(str, shape)) or "one value"


def counted(number: int, noun: str) -> str:
    """Return "1 video", "2 videos"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def about(seconds: float) -> str:
    """Return a rounded duration: "about 40 s", "about 4 min", "about 2 h"."""
    tens = round(seconds / 10) * 10
    if tens < _MINUTE:
        return f"about {max(tens, 5)} s"
    if seconds < 1.5 * _HOUR:
        return f"about {round(seconds / _MINUTE)} min"
    return f"about {round(seconds / _HOUR)} h"
