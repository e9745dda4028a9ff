"""Locks between processes that leave nothing behind: the operating system frees them when a process ends, however.

A lock's file is removed while it is still held; whoever waited on it sees that and takes a new one (filelock's doing).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

_POLL_SECONDS = 0.1


@contextlib.contextmanager
def held(path: Path, *, seconds: float | None = None, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock `path`.

    Args:
        seconds: how long to wait for it; `None` waits for ever.
        wait: called about ten times a second while waiting; what it raises ends the waiting.

    Raises:
        TimeoutError: if somebody else holds it for that long.
        OSError: if the lock's file cannot be made.
    """
    # Not per thread: what one thread takes, another may give back.
    lock = FileLock(path, thread_local=False)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        try:
            lock.acquire(timeout=_POLL_SECONDS if seconds is None else min(_POLL_SECONDS, seconds))
            break
        except Timeout:
            if end is not None and time.monotonic() >= end:
                raise
            if wait is not None:
                wait()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file: there it stays
            path.unlink()
        lock.release()


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock `path`; the file of one that nobody holds is removed."""
    try:
        if path.exists():
            with held(path, seconds=0):
                pass
    except OSError:  # Timeout is one; a lock that cannot be opened is not ours to break
        return True
    return False
