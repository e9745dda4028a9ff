"""The log file: rotating, one line per event of note, tracebacks of defects. Prompts are not written to it."""

import contextlib
import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

_MAX_BYTES = 1_000_000
_BACKUPS = 3


def start(path: Path) -> None:
    """Send the log of `runtime` to `path`; without a writable file there is no log, and that is all."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=_BACKUPS, encoding="utf-8", delay=False)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger("runtime")
        for old in root.handlers[:]:
            root.removeHandler(old)
            old.close()
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
