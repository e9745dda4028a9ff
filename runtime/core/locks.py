"""Locks between processes. The operating system releases them when a process ends, even after a crash.

A lock's file is removed while it is still held; filelock notices that in waiting processes and locks a new file.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL_SECONDS = 0.1


@contextlib.contextmanager
def held(path: Path, *, seconds: float | None = None, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock `path`.

    Args:
        seconds: how long to wait for it; `None` waits without limit.
        wait: called about ten times a second while waiting; an exception that it raises ends the wait.

    Raises:
        TimeoutError: if another process holds it for that long.
        OSError: if the lock's file cannot be created.
    """
    from filelock import FileLock, Timeout  # imports asyncio, which takes 20 ms

    # Not per thread: one thread may acquire it and another one release it.
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
        with contextlib.suppress(OSError):  # Windows does not remove open files
            path.unlink()
        lock.release()


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock `path`; the file of a free lock is removed."""
    try:
        if path.exists():
            with held(path, seconds=0):
                pass
    except OSError:  # Timeout is one; a lock that cannot be opened counts as held
        return True
    return False
