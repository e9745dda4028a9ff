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
