"""Wait for a condition, with a timeout that suits a busy machine."""

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

TIMEOUT = 180.0


def until(
    holds: Callable[[], object],
    *,
    meanwhile: Callable[[], object] = lambda: True,
    pause: float = 0.01,
    seconds: float = TIMEOUT,
) -> None:
    """Wait until a condition holds, or fail.

    Args:
        meanwhile: a condition that must hold during the wait.
        pause: seconds between two checks.
        seconds: after which it fails.
    """
    end = time.monotonic() + seconds
    while not holds():
        assert meanwhile(), "the condition `meanwhile` ended first"
        assert time.monotonic() < end, f"no result within {seconds:g} s"
        time.sleep(pause)


def stop_process(pid: int, database: Path) -> None:
    """Stop a process while it does not write to a database, whose lock it would keep from all others."""

    def stopped_without_lock() -> bool:
        os.kill(pid, signal.SIGSTOP)
        with closing(sqlite3.connect(database, timeout=1.0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
                return False
            connection.execute("ROLLBACK")
            return True

    until(stopped_without_lock, pause=0.05)
