"""A job queue with workers as threads of the test process, so that tests need not import PyTorch again."""

import threading
from pathlib import Path

from runtime.engines.service import EngineService
from runtime.pipeline.history_file import HistoryFile
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.worker import Worker


class RunningQueue(JobQueue):
    """A `JobQueue` that runs its jobs.

    Args:
        store: by default, one in memory.
        start: whether to start the workers at once; otherwise call `start`.
    """

    def __init__(
        self,
        weights_dir: Path,
        outputs_dir: Path,
        engines: EngineService,
        history: HistoryFile | None = None,
        store: JobStore | None = None,
        *,
        start: bool = True,
    ) -> None:
        super().__init__(weights_dir, outputs_dir, engines, history, store or JobStore(None))
        self._workers = [Worker(self.store, config) for config in self.worker_configs()]
        self._threads: list[threading.Thread] = []
        if start:
            self.start()

    def start(self) -> None:
        """Start the workers; safe to call twice."""
        if not self._threads:
            self._threads = [threading.Thread(target=worker.run, daemon=True) for worker in self._workers]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """Stop the workers as the supervisor does, and close the queue."""
        if self.store.temporary:
            self.cancel([one.id for one in self.store.order.jobs()])
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            thread.join()
        super().close()
