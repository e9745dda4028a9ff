"""Processes: end with the parent, with all children or on signals, be killed first, use less memory and more files."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

# More open files are of no use, and some systems do not allow more.
_MOST_OPEN_FILES = 65_536
# Added to the score by which Linux chooses a process to kill; Chromium gives its tabs 300 as well.
_OOM_SCORE = 300
# Options of glibc's malloc.h: the number of heaps; the size from which a block is mapped by itself; the free memory at
# the end of a heap that is returned.
_MALLOC_OPTIONS = {-8: 1, -3: 128 << 10, -1: 128 << 10}


def kill_descendants(pid: int) -> None:
    """Kill all processes that a process started, and those that they started."""
    with contextlib.suppress(psutil.Error):
        for descendant in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                descendant.kill()


def kill_tree(pid: int) -> None:
    """Kill a process, its process group if it leads one, and its descendants in other groups."""
    kill_descendants(pid)
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).kill()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, in a `with` block of the main thread."""
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_exit(code: int) -> str:
    """Return how a process ended, from its `exitcode`: "exit code 3", or "signal 9, SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"signal {-code}"


def raise_open_files() -> int | None:
    """Let this process and its later children open as many files as the system allows; return how many.

    Returns:
        `None` where there is no such limit.
    """
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    return _MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def lead_own_group() -> None:
    """Make this process the leader of a new process group: Ctrl-C in the terminal does not reach it.

    On Windows Ctrl-C reaches all processes of a console; this one ignores it. Call in the main thread.
    """
    if sys.platform == "win32":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        os.setsid()


def be_killed_first() -> None:
    """Have Linux kill this process and its later children before other processes when memory runs out."""
    adjustment = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        adjustment.write_text(str(max(_OOM_SCORE, int(adjustment.read_text(encoding="ascii")))), encoding="ascii")


def use_no_semaphores() -> None:
    """Give tqdm, which PyTorch and huggingface_hub use, a lock of this process only.

    Its own lock includes a semaphore, which Python reports as leaked, in the parent, if this `multiprocessing` child is
    killed or ends with `os._exit`.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def return_freed_memory() -> None:
    """Have glibc return freed memory to the system, for a process that runs for days.

    By default, it makes up to eight heaps for each core, and memory that a thread has freed stays in its heap; and once
    a large block was freed, later ones of its size are not mapped by themselves any more, but leave gaps in a heap.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            for option, value in _MALLOC_OPTIONS.items():
                ctypes.CDLL(None).mallopt(option, value)


def trim_heaps() -> None:
    """Return freed memory inside of glibc's heaps to the system; it takes some milliseconds."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def end_with_parent() -> None:
    """Kill this `multiprocessing` child, and everything that it started, as soon as its parent ends."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        kill_tree(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
