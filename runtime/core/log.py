"""The log file: rotating, one line per event of a job, tracebacks of internal errors; no prompts or video paths."""

import contextlib
import io
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from logging.handlers import RotatingFileHandler
from pathlib import Path

from runtime.core.events import Event, FellBack, Planned
from runtime.core.untrusted_files import NotRegularFileError

# Loggers of the web server, whose errors a stranger may cause.
_SERVER = ("uvicorn.error", "asyncio")
_REPEAT_SECONDS = 60.0
_MOST_REPEATED = 500
# The logger of Python's warnings.
_WARNINGS = "py.warnings"
_MAX_BYTES = 1_000_000
_BACKUPS = 3
_ROTATING_SECONDS = 60.0
# Fields of events that hold one of a few words; other text may hold prompts and paths.
_WORDS = frozenset({"stage", "part", "component", "backend", "memory"})


class RepeatFilter(logging.Filter):
    """Leaves out warnings and errors that repeat: of those of a minute, the 1st, 10th, 100th, … pass, with the number.

    Two records repeat each other if they have the same logger, the same first line and, with an exception, the same
    type and place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeats: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        if record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        kind = (record.name, record.levelno, text.partition("\n")[0], _raised(record))
        with self._lock:
            since, count = self._repeats.pop(kind, (record.created, 0))
            if record.created - since > _REPEAT_SECONDS:
                since, count = record.created, 0
            count += 1
            self._repeats[kind] = (since, count)
            while len(self._repeats) > _MOST_REPEATED:
                self._repeats.popitem(last=False)
        if count == 1:
            return True
        passes = str(count).strip("0") == "1"
        if passes:
            record.msg, record.args = f"{text} ({count} times in {record.created - since:.0f} s)", ()
        return passes


def _raised(record: logging.LogRecord) -> Hashable:
    """Return type and place of a record's exception."""
    if not record.exc_info or record.exc_info[0] is None:
        return None
    trace = record.exc_info[2]
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return record.exc_info[0], place


_REPEATS = RepeatFilter()


class SharedRotatingHandler(RotatingFileHandler):
    """A rotating file that several processes write: one rotates at a time, the others reopen the file.

    If the disk is full, lines are dropped. Windows does not rename open files: there the file grows until no other
    process has it open.
    """

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - logging's own name
        """Whether this record would make the file too large; reopens the current file first."""
        self._follow()
        return bool(super().shouldRollover(record))

    def doRollover(self) -> None:  # noqa: N802 - logging's own name
        """Start a new file, unless another process is rotating."""
        lock_file = Path(f"{self.baseFilename}.rotating")
        try:
            lock_file.touch(exist_ok=False)
        except FileExistsError:
            with contextlib.suppress(OSError):  # a process that rotates is killed or finishes within a second
                if time.time() - lock_file.stat().st_mtime > _ROTATING_SECONDS:
                    lock_file.unlink()
            return
        try:
            if not self._follow():
                super().doRollover()
        except OSError:
            self.stream = self.stream or self._open()
        finally:
            lock_file.unlink(missing_ok=True)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Drop the line: an error of the log cannot be reported anywhere."""

    def _open(self) -> io.TextIOWrapper:
        """Open the file.

        Raises:
            OSError: if it cannot be opened, or is a FIFO or a device, which may wait or have no end.
        """
        path = Path(self.baseFilename)
        if path.exists() and not path.is_file():
            raise NotRegularFileError(path)
        return super()._open()

    def _follow(self) -> bool:
        """Reopen the file if it was replaced or removed; return whether it was."""
        with contextlib.suppress(OSError):
            if self.stream is not None:
                current, opened = Path(self.baseFilename).stat(), os.fstat(self.stream.fileno())
                if (current.st_dev, current.st_ino) == (opened.st_dev, opened.st_ino):
                    return False
        before = self.stream
        self.stream = self._open()
        if before is not None:
            with contextlib.suppress(OSError):  # the disk is full
                before.close()
        return True


def log_line(event: Event) -> str:
    """Return an event as a line of the log: its name, numbers and component."""
    if isinstance(event, Planned):
        plan = event.plan
        return f"Planned {plan.width}x{plan.height} frames={plan.frames} steps={plan.steps} seed={plan.seed}"
    fact = event.reason if isinstance(event, FellBack) else getattr(event, "fact", None)
    words = [event.event, *([] if fact is None else [f"code={fact.code}"])]
    for name, value in vars(event).items():
        if isinstance(value, float):
            words.append(f"{name}={value:.3f}")
        elif isinstance(value, int) or (name in _WORDS and value is not None):
            words.append(f"{name}={value}")
    return " ".join(words)


def start(path: Path) -> None:
    """Send the log of `runtime` and Python's warnings to `path`; without a writable file nothing is logged.

    Repeated warnings and errors are left out there, and in what the web server prints; see `RepeatFilter`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = SharedRotatingHandler(
            path, maxBytes=_MAX_BYTES, backupCount=_BACKUPS, encoding="utf-8", delay=False
        )
    except OSError:
        handler = logging.NullHandler()  # without a handler, Python would print warnings to stderr
    handler.addFilter(_REPEATS)
    for name in _SERVER:
        logging.getLogger(name).addFilter(_REPEATS)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("runtime", _WARNINGS):
        root = logging.getLogger(name)
        for old in root.handlers[:]:
            root.removeHandler(old)
            old.close()
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    logging.captureWarnings(capture=True)


def is_written() -> bool:
    """Return whether the log of this process goes to a file."""
    return any(isinstance(handler, SharedRotatingHandler) for handler in logging.getLogger("runtime").handlers)
