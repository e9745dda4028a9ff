"""Models that are fetched for the web app: one after the other, on a thread of their own.

Beside the queue and not in it: a download takes no GPU, and an hour of it would hold up every video behind it.
"""

import logging
import queue
import threading

from runtime.core.cancel import CancelledError
from runtime.core.errors import DownloadError, TandemError
from runtime.core.settings import Settings
from runtime.core.units import byte_size
from runtime.models.hub.client import check_online, hub_of
from runtime.models.hub.download import Download, source_of
from runtime.models.hub.progress import Progress
from runtime.models.registry import KnownModel
from runtime.queue.tasks import Free, Task

_REMEMBERED = 8

logger = logging.getLogger(__name__)


class Downloads:
    """What is fetched, waits and ended, by model. Safe between threads.

    Args:
        settings: say where models go, where they come from, and whether they may.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tasks: dict[str, Task] = {}
        self._waiting: queue.Queue[Task | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, known: KnownModel) -> Task:
        """Fetch a known model once those before it are done. Its licence is taken to be agreed to.

        Raises:
            DownloadError: if it is waited for already, or nothing may be fetched.
        """
        check_online(self._settings)
        with self._lock:
            before = self._tasks.get(known.name)
            if before is not None and before.open:
                raise DownloadError(f"{known.title} is being fetched already.", "Wait for it, or cancel it.")
            task = self._tasks[known.name] = downloading(known, self._settings)
            self._waiting.put(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
                self._thread.start()
        return task

    def of(self, name: str) -> Task | None:
        """Return the last download of a known model."""
        with self._lock:
            return self._tasks.get(name)

    def cancel(self, name: str) -> None:
        """Stop one: at once if it waits, within a tenth of a second if it runs; what came stays."""
        with self._lock:
            task = self._tasks.get(name)
            if task is not None and task.open:
                task.cancel.request()
                if task.state == "queued":
                    task.end("cancelled", "Cancelled before it began.")

    def close(self) -> None:
        """Stop all, and wait for that; what came stays, and goes on when it is asked for again."""
        with self._lock:
            thread, self._thread = self._thread, None
            for task in self._tasks.values():
                task.cancel.request()
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            with self._lock:
                if not task.open:
                    continue
                task.start()
            logger.info("%s %s begins", task.kind, task.id)
            try:
                task.end("done", task.work(task, lambda: None))
            except CancelledError:
                task.end("cancelled", "Cancelled. What came is kept, and goes on from there.")
            except TandemError as error:
                task.end("failed", error.what, error.remedy)
            except Exception as error:  # a defect: told in one line, kept in the log
                logger.exception("A download failed")
                task.end("failed", f"Something broke inside Tandem: {error!r}", "The log has the details.")
            logger.info("%s %s: %s", task.kind, task.id, task.state)


def downloading(known: KnownModel, settings: Settings) -> Task:
    """Return the chore of fetching a known model."""

    def work(task: Task, _free: Free) -> str:
        def tell(progress: Progress) -> None:
            task.line, task.share = progress.line, progress.share

        task.cancel.check()
        hub = hub_of(settings)
        with Download(source_of(known.name, None), settings.weights_dir, hub, tell) as download:
            plan = download.plan(task.cancel)
            download.run(plan, task.cancel)
        return f"{known.title} is downloaded and verified: {byte_size(plan.listing.total_bytes)}."

    return Task("download", f"Download {known.title}", work)
