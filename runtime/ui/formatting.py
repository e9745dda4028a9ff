"""How the page writes numbers: durations, sizes, lengths, counts."""

from datetime import datetime

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
    """Return an estimate, coarser for longer times: "about 40 s left", "about 3 min left"."""
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


def count(number: int, noun: str) -> str:
    """Return "1 video", "2 videos"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def clock_time(seconds: float | None) -> str:
    """Return a time in seconds since the epoch as local time, "2026-11-20 18:05"; empty for none."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M") if seconds else ""


def size(width: int, height: int) -> str:
    """Return "192 × 112"."""
    return f"{width} × {height}"


def length(frames: int, fps: int) -> str:
    """Return "33 frames · 2.1 s at 16 fps"."""
    return f"{count(frames, 'frame')} · {frames / fps:.1f} s at {fps} fps"
