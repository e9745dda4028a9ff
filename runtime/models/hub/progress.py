"""Progress of a download: bytes, current rate and time left."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from runtime.core.facts import Fact, render
from runtime.core.units import byte_size, duration
from runtime.models.hub.listing import RemoteFile

_REPORT_SECONDS = 0.2
_RATE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a download.

    Attributes:
        file: the current file, the `number`-th of `count`; `file_done` of its `file_size` bytes have arrived.
        done, total: bytes of the whole model.
        rate: current bytes per second, `seconds_left` at that rate; `None` until both are known.
        note: what happens while no bytes arrive.
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
    note: Fact | None = None

    @property
    def share(self) -> float | None:
        """The share of the model that has arrived, 0 to 1; `None` until the size is known."""
        return self.done / self.total if self.total else None

    @property
    def note_text(self) -> str:
        """The note as a clause, without its full stop."""
        return render(self.note).what.rstrip(".") if self.note else ""

    @property
    def line(self) -> str:
        """Bytes, rate, time left, and the current file or note."""
        parts = [f"{byte_size(self.done)} of {byte_size(self.total)}"] if self.total else []
        if self.rate is not None:
            parts.append(f"{byte_size(int(self.rate))}/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        if self.note:
            parts.append(self.note_text)
        elif self.file:
            parts.append(f"{self.number}/{self.count} {self.file}")
        return " · ".join(parts)


ReportProgress = Callable[[Progress], None]


class ProgressReporter:
    """Reports a download's progress, at most a few times a second, with the rate of the last seconds."""

    def __init__(self, report: ReportProgress) -> None:
        self._report = report
        self._progress = Progress()
        self._complete_bytes = 0
        self._reported = 0.0
        self._marks: deque[tuple[float, int]] = deque()

    def begin(self, complete: int, here: int, total: int) -> None:
        """Start: `complete` bytes of complete files are here, `here` bytes including partial files."""
        self._complete_bytes = complete
        self._progress = Progress(done=here, total=total)
        self._marks.clear()

    def start_file(self, file: RemoteFile, number: int, count: int) -> None:
        """Start the next file."""
        progress = replace(self._progress, file=file.path, number=number, count=count)
        self._update(replace(progress, file_size=file.size, file_done=0))

    def file_size(self, size: int) -> None:
        """Set the bytes of the current file that have arrived."""
        now = time.monotonic()
        if self._reported and now - self._reported < _REPORT_SECONDS and size < self._progress.file_size:
            return
        done = self._complete_bytes + size
        while self._marks and (done < self._marks[-1][1] or now - self._marks[0][0] > _RATE_SECONDS):
            self._marks.popleft()
        self._marks.append((now, done))
        (then, was), rate = self._marks[0], None
        if now - then > _REPORT_SECONDS and done > was:
            rate = (done - was) / (now - then)
        left = (self._progress.total - done) / rate if rate else None
        self._update(replace(self._progress, file_done=size, done=done, rate=rate, seconds_left=left, note=None))

    def end_file(self, file: RemoteFile) -> None:
        """Count a file as complete."""
        self._complete_bytes += file.size

    def note(self, note: Fact) -> None:
        """Report what happens while no bytes arrive."""
        self._update(replace(self._progress, note=note, rate=None, seconds_left=None))

    def _update(self, progress: Progress) -> None:
        self._progress, self._reported = progress, time.monotonic()
        self._report(progress)
