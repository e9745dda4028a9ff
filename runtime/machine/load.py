"""How much of the processor other programs use while something is measured."""

from typing import NamedTuple

import psutil

# Above this share of all cores, what is measured on the CPU takes noticeably longer.
_LOADED = 0.15


class ProcessorTimes(NamedTuple):
    """Seconds of all cores since the start: all, of programs, and of this process with its children."""

    total: float
    busy: float
    own: float


class LoadMeter:
    """Measures other programs' share of the processor since it was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = self._times()

    @property
    def loaded(self) -> bool:
        """Whether other programs used so much that measurements on the CPU are not trusted."""
        return share_of_others(self._start, self._times()) > _LOADED

    def _times(self) -> ProcessorTimes:
        every, own = psutil.cpu_times(), self._process.cpu_times()
        # Linux counts the time of guests as that of programs too.
        fields = {name: seconds for name, seconds in every._asdict().items() if not name.startswith("guest")}
        total = sum(fields.values())
        children = getattr(own, "children_user", 0.0) + getattr(own, "children_system", 0.0)
        idle = fields["idle"] + fields.get("iowait", 0.0)
        return ProcessorTimes(total, total - idle, own.user + own.system + children)


def share_of_others(before: ProcessorTimes, after: ProcessorTimes) -> float:
    """Return which share of all cores' time between two readings other programs used."""
    total, busy, own = (later - earlier for earlier, later in zip(before, after, strict=True))
    return max(busy - own, 0.0) / total if total > 0 else 0.0
