"""Components that are loaded on a thread while others run.

They are loaded one after the other, so that memory (RAM) is that of one load: the disk or PCIe is the limit, which one
load of several threads reaches (`models.tensor_stream`).
"""

import logging
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.1


class LoadingAhead:
    """Loads on a thread. Used from one thread only."""

    def __init__(self) -> None:
        self._loads: dict[Hashable, Future[Any]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __contains__(self, key: Hashable) -> bool:
        """Whether a part is being loaded, or was and has not been taken."""
        return key in self._loads

    def start(self, key: Hashable, load: Callable[[], Any]) -> None:
        """Load a part after those before it.

        Args:
            load: returns an object with `close`.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="load-ahead")
        if key not in self._loads:
            self._loads[key] = self._pool.submit(load)

    def wait(self, key: Hashable, check: Callable[[], None]) -> None:
        """Wait until a part that is being loaded is there, or failed; return at once if it has not begun.

        Args:
            check: called several times a second; if it raises, the part is loaded on, for the next job.
        """
        future = self._loads.get(key)
        while future is not None and future.running():
            check()
            wait([future], _CHECK_SECONDS)

    def take(self, key: Hashable) -> Any:
        """Return a part, after waiting for it; `None` if it was not started, or failed and must be loaded again.

        If it has not begun, it is not waited for.
        """
        future = self._loads.pop(key, None)
        if future is None or future.cancel():
            return None
        try:
            return future.result()
        except Exception as error:  # if it lasts, it is raised where the part is loaded again
            logger.info("A part could not be loaded ahead", exc_info=error)
            return None

    def keep_only(self, keys: Collection[Hashable]) -> None:
        """Discard all other parts; wait for one that is being loaded."""
        for key in [key for key in self._loads if key not in keys]:
            part = self.take(key)
            if part is not None:
                part.close()

    def close(self) -> None:
        """Discard all parts and end the thread."""
        self.keep_only(())
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class Preparation:
    """What the first step needs besides weights, such as imports, on a thread while weights are loaded."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, work: Sequence[Callable[[], object]]) -> None:
        """Begin, unless it has begun before. What fails is done again, and reported, where it is needed."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(work,), name="preparation", daemon=True)
            self._thread.start()

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until it is done: of modules that import each other, two threads may find some half made.

        Args:
            check: called several times a second; if it raises, the work continues, for the next job.
        """
        while self._thread is not None and self._thread.is_alive():
            check()
            self._thread.join(_CHECK_SECONDS)


def _run(work: Sequence[Callable[[], object]]) -> None:
    for function in work:
        try:
            function()
        except Exception as error:
            logger.info("The first step could not be prepared", exc_info=error)
