"""Wakes coroutines that wait for a change of a job or of the store, in any event loop."""

import asyncio
import contextlib
import threading


class Changes:
    """The changes of one job, or of the store. Safe between threads.

    Attributes:
        count: of changes so far; read it before the state that may change.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def notify(self) -> None:
        """Wake all who wait."""
        with self._lock:
            self.count += 1
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(event.set)

    async def after(self, count: int, seconds: float) -> None:
        """Wait until there are more than `count` changes, or for some seconds."""
        entry = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if self.count != count:
                return
            self._waiting.append(entry)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(entry[1].wait(), seconds)
        finally:
            with self._lock:
                if entry in self._waiting:
                    self._waiting.remove(entry)
