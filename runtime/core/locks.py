"""Locks between processes, and folders for temporary files with a lock.

The operating system releases locks when a process ends, even after a crash. A lock's file is removed while it is still
held; filelock notices that in waiting processes and locks a new file.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL_SECONDS = 0.1
_SCRATCH, _SCRATCH_LOCK = "tandem-scratch-", "lock"
# A scratch folder without a lock this old has no living owner: locking takes milliseconds.
_UNLOCKED_SECONDS = 60.0
# Of this process.
_OPEN: set[Path] = set()


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


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None, prefix: str = _SCRATCH) -> Iterator[Path]:
    """Make a folder for temporary files, and remove it on exit; the lock in it shows that this process is alive.

    Args:
        parent: the folder that it is made in; `None` for the system's folder for temporary files.
        prefix: of its name.

    Raises:
        OSError: if it cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    _OPEN.add(folder)
    try:
        with held(folder / _SCRATCH_LOCK):
            try:
                yield folder
            finally:
                _remove_all_but_lock(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _OPEN.discard(folder)


def _remove_all_but_lock(folder: Path) -> None:
    """Empty a scratch folder while its lock is held: a process that is killed meanwhile leaves a lock that is free."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _SCRATCH_LOCK:
                path.unlink(missing_ok=True)


def remove_own_scratch_folders() -> None:
    """Remove the scratch folders of this process, which is about to end without leaving their `with` blocks."""
    for folder in tuple(_OPEN):
        shutil.rmtree(folder, ignore_errors=True)


def remove_scratch_folders(parent: Path | None = None, prefix: str = _SCRATCH) -> None:
    """Remove the scratch folders of killed processes; those of running processes and of other users stay.

    Those in a folder that cannot be listed, such as on a disk that does not answer, stay too.
    """
    try:
        folders = list((parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"))
    except OSError:
        return
    for folder in folders:
        with contextlib.suppress(OSError):
            facts = folder.lstat()
            # Another user's lock may be a link to any file.
            if sys.platform != "win32" and facts.st_uid != os.getuid():
                continue
            lock = folder / _SCRATCH_LOCK
            if not is_held(lock) if lock.exists() else time.time() - facts.st_mtime > _UNLOCKED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
