"""How far a download is, and how fast it is of late."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from runtime.core.units import byte_size, duration
from runtime.models.hub.listing import RemoteFile

_TELL_SECONDS = 0.2
_PACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a download is.

    Attributes:
        file: at work, the `number`-th of `count`; `file_done` of its `file_size` bytes are here.
        done, total: bytes of the whole model.
        rate: bytes a second of late, `seconds_left` at that rate; `None` before there is one.
        note: what is done or waited for, where nothing comes.
    """

    file: str = ""
    number: int = 0
    count: int = 0
    file_done: int = 0
    file_size: int = 0
    done: int = 0
    total: int = 0
    rate: float | None = None
    seconds_left: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """How much of the model is here, 0 to 1; `None` before that is known."""
        return self.done / self.total if self.total else None

    @property
    def line(self) -> str:
        """Bytes, rate, time left, and the file at work or what is waited for."""
        parts = [f"{byte_size(self.done)} of {byte_size(self.total)}"] if self.total else []
        if self.rate is not None:
            parts.append(f"{byte_size(int(self.rate))}/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        if self.note:
            parts.append(self.note)
        elif self.file:
            parts.append(f"{self.number}/{self.count} {self.file}")
        return " · ".join(parts)


Tell = Callable[[Progress], None]


class Said:
    """Tells how far a download is, a few times a second, and how fast it is of late."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._progress = Progress()
        self._before = 0
        self._told = 0.0
        self._marks: deque[tuple[float, int]] = deque()

    def begin(self, whole: int, here: int, total: int) -> None:
        """Begin with what is here already: `whole` bytes of files that came whole, `here` with those that began."""
        self._before = whole
        self._progress = Progress(done=here, total=total)
        self._marks.clear()

    def file(self, file: RemoteFile, number: int, count: int) -> None:
        """A file is next."""
        self._now(replace(self._progress, file=file.path, number=number, count=count, file_size=file.size, file_done=0))

    def held(self, size: int) -> None:
        """So much of the file is here."""
        now = time.monotonic()
        if self._told and now - self._told < _TELL_SECONDS and size < self._progress.file_size:
            return
        done = self._before + size
        while self._marks and (done < self._marks[-1][1] or now - self._marks[0][0] > _PACE_SECONDS):
            self._marks.popleft()
        self._marks.append((now, done))
        (then, was), rate = self._marks[0], None
        if now - then > _TELL_SECONDS and done > was:
            rate = (done - was) / (now - then)
        left = (self._progress.total - done) / rate if rate else None
        self._now(replace(self._progress, file_done=size, done=done, rate=rate, seconds_left=left, note=""))

    def whole(self, file: RemoteFile) -> None:
        """A file came."""
        self._before += file.size

    def note(self, note: str) -> None:
        """Nothing comes, and this is why."""
        self._now(replace(self._progress, note=note, rate=None, seconds_left=None))

    def _now(self, progress: Progress) -> None:
        self._progress, self._told = progress, time.monotonic()
        self._tell(progress)
