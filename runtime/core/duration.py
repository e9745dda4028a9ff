"""Durations as people say them."""

_MINUTE = 60
_HOUR = 3600


def duration(seconds: float) -> str:
    """Return whole seconds in words: "8 s", "3 min 5 s", "1 h 2 min"."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"


def about(seconds: float) -> str:
    """Return a guessed duration in round words: "about 40 s", "about 4 min", "about 2 h"."""
    if seconds < _MINUTE:
        return f"about {max(round(seconds / 10) * 10, 5)} s"
    if seconds < 1.5 * _HOUR:
        return f"about {round(seconds / _MINUTE)} min"
    return f"about {round(seconds / _HOUR)} h"
