"""Child processes: end one with everything that it started, and end with the parent."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading

import psutil


def kill_tree(pid: int) -> None:
    """Kill a process, its process group if it leads one, and its descendants in other groups."""
    with contextlib.suppress(psutil.Error):
        for descendant in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                descendant.kill()
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).kill()


def describe_exit(code: int) -> str:
    """Return how a process ended, from its `exitcode`: "exit code 3", or "signal 9, SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"signal {-code}"


def lead_own_group() -> None:
    """Make this process the leader of a new process group: Ctrl-C in the terminal does not reach it."""
    if sys.platform != "win32":
        os.setsid()


def end_with_parent() -> None:
    """Kill this `multiprocessing` child, and everything that it started, as soon as its parent ends."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        kill_tree(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
