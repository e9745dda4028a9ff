"""How numbers read on the page: durations, sizes, lengths. Plain functions."""

from runtime.core.units import duration as whole_seconds

_MINUTE = 60
_HOUR = 3600
# Below this a duration shows tenths.
_FINE_SECONDS = 10


def duration(seconds: float) -> str:
    """Return a measured duration: "0.4 s", "12 s", "3 min 20 s", "1 h 5 min"."""
    if seconds < _FINE_SECONDS:
        return f"{seconds:.1f} s"
    return whole_seconds(seconds)


def time_left(seconds: float | None) -> str:
    """Return a forecast, no finer than it deserves: "about 40 s left", "about 3 min left"."""
    if seconds is None:
        return ""
    if seconds < 1:
        return "almost done"
    if seconds < _FINE_SECONDS:
        return f"about {round(seconds)} s left"
    if seconds < 2 * _MINUTE:
        return f"about {5 * round(seconds / 5)} s left"
    if seconds < 2 * _HOUR:
        return f"about {round(seconds / _MINUTE)} min left"
    return f"about {seconds / _HOUR:.1f} h left"


def size(width: int, height: int) -> str:
    """Return "192 × 112"."""
    return f"{width} × {height}"


def length(frames: int, fps: int) -> str:
    """Return "33 frames · 2.1 s at 16 fps"."""
    return f"{frames} frame{'' if frames == 1 else 's'} · {frames / fps:.1f} s at {fps} fps"
