"""Opening the job store of a cache folder; where that cannot be, jobs go on without being remembered."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.core.errors import StoreError
from runtime.queue.process_lock import Instance
from runtime.queue.store import JobStore

NAME = "jobs.sqlite"

logger = logging.getLogger(__name__)


def open_store(cache_dir: Path) -> JobStore:
    """Return the jobs of a cache folder, or a store in memory whose `problem` says why it is none."""
    path = cache_dir / NAME
    try:
        store = JobStore(path)
        try:
            # Whoever cannot hold a lock cannot be told from a process that died.
            with Instance(path):
                return store
        except StoreError:
            store.close()
            raise
    except StoreError as error:
        logger.error("%s cannot be used: %s", NAME, type(error.__cause__ or error).__name__)
        problem = error.fact
        try:
            folder = TemporaryDirectory(prefix="tandem-jobs-", ignore_cleanup_errors=True)
            return JobStore(Path(folder.name) / NAME, problem, folder)
        except (OSError, StoreError):
            return JobStore(None, problem)
