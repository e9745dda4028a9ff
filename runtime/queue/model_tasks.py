"""Tasks on models in the web app: downloads, one at a time, look-ups of a repository, and verification.

They run on threads of the web process and not in the job queue, where a download would delay all videos although it
needs no GPU.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import DownloadError, TandemError
from runtime.core.events import Failed
from runtime.core.facts import Fact, render
from runtime.core.settings import Settings
from runtime.models.catalogue import known_as
from runtime.models.helpers import published_helper
from runtime.models.hub.client import check_online, hub_of
from runtime.models.hub.download import Download, DownloadPlan, DownloadProgress, Source, source_of
from runtime.models.hub.files import verify
from runtime.queue.views import TaskProgress

# A thread that reads from a disk or host that does not answer ends with the process.
_CLOSE_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass
class ModelTask(TaskProgress):
    """One task on a model.

    Attributes:
        kind: "look" asks the hub for license and size, without fetching a file.
        folder: name of the model's folder.
        title: for people.
        source: where it comes from; `None` to verify.
        plan: what a look-up found.
        cancel: stops it.
    """

    kind: Literal["download", "look", "verify"] = field(kw_only=True)
    folder: str = field(kw_only=True)
    title: str = field(kw_only=True)
    source: Source | None = field(kw_only=True)
    plan: DownloadPlan | None = None
    cancel: Cancel = field(default_factory=Cancel, repr=False)

    @property
    def cancelling(self) -> bool:
        """Whether it runs and a cancel was requested."""
        return self.open and self.cancel.requested


class ModelTasks:
    """The last task of each model, by the name of the model's folder. Safe between threads.

    Args:
        settings: the models folder, the hub, and whether downloads are allowed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tasks: dict[str, ModelTask] = {}
        self._waiting: queue.Queue[ModelTask | None] = queue.Queue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._downloader: threading.Thread | None = None

    def download(self, name: str) -> ModelTask:
        """Download a model after those that were added before. The user has agreed to its license.

        Args:
            name: of a published model, or OWNER/REPOSITORY.

        Raises:
            TandemError: if a task on it is open, the name is invalid, or downloads are not allowed.
        """
        return self._from_hub("download", name)

    def look(self, name: str) -> ModelTask:
        """Ask the hub for a model's license and size now; see `download`."""
        return self._from_hub("look", name)

    def verify(self, folder: str) -> ModelTask:
        """Compare the files of a downloaded model with their hashes.

        Raises:
            DownloadError: if a task on it is open.
        """
        return self._add(ModelTask(kind="verify", folder=folder, title=folder, source=None))

    def of(self, folder: str) -> ModelTask | None:
        """Return the last task on a model."""
        with self._lock:
            return self._tasks.get(folder)

    def all(self) -> list[ModelTask]:
        """Return the last task on each model, oldest first."""
        with self._lock:
            return list(self._tasks.values())

    def forget(self, folder: str) -> None:
        """Forget the last task on a model.

        Raises:
            DownloadError: if it is open.
        """
        with self._lock:
            task = self._tasks.get(folder)
            if task is not None and task.open:
                raise DownloadError("download.busy", model=task.title)
            self._tasks.pop(folder, None)

    def cancel(self, folder: str) -> None:
        """Stop a task: at once if it is queued, within a tenth of a second if it runs. Received data is kept."""
        with self._lock:
            task = self._tasks.get(folder)
            if task is not None and task.open:
                task.cancel.request()
                if task.state == "queued":
                    task.result, task.state = _cancelled(task), "cancelled"

    def close(self) -> None:
        """Stop all tasks and wait for that, at most some seconds.

        Received data is kept, and the next download continues from it.
        """
        with self._lock:
            threads, self._threads = self._threads, []
            for task in self._tasks.values():
                task.cancel.request()
            self._downloader = None
        self._waiting.put(None)
        end = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def _from_hub(self, kind: Literal["download", "look"], name: str) -> ModelTask:
        check_online(self._settings)
        source = source_of(name, None)
        published = source.variant or known_as(name) or published_helper(source.folder)
        title = published.title if published else source.repository
        return self._add(ModelTask(kind=kind, folder=source.folder, title=title, source=source))

    def _add(self, task: ModelTask) -> ModelTask:
        with self._lock:
            before = self._tasks.get(task.folder)
            if before is not None and before.open:
                code = "download.already_queued" if before.kind == task.kind == "download" else "download.busy"
                raise DownloadError(code, model=before.title)
            self._tasks.pop(task.folder, None)
            self._tasks[task.folder] = task
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if task.kind == "download":
                self._waiting.put(task)
                if self._downloader is None:
                    self._downloader = self._start(self._download_all)
            else:
                self._start(lambda: self._run(task))
        return task

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name="models", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _download_all(self) -> None:
        while (task := self._waiting.get()) is not None:
            self._run(task)

    def _run(self, task: ModelTask) -> None:
        with self._lock:
            if not task.open:
                return
            task.state = "running"
        logger.info("%s of %s starts", task.kind, task.folder)
        try:
            task.cancel.check()
            task.result = self._verified(task) if task.source is None else self._fetched(task, task.source)
            task.state = "done"
        except CancelledError:
            task.result, task.state = _cancelled(task), "cancelled"
        except TandemError as error:
            task.result, task.state = error.fact, "failed"
        except Exception as error:  # internal error: one line for the user, the traceback in the log
            logger.exception("A task on a model failed")
            task.result, task.state = Failed.because_of(error).fact, "failed"
        logger.info("%s of %s: %s", task.kind, task.folder, task.state)

    def _fetched(self, task: ModelTask, source: Source) -> Fact:
        def report(progress: DownloadProgress) -> None:
            task.line, task.share = progress.line, progress.share

        settings = self._settings
        with Download(source, settings.weights_dir, hub_of(settings), report, settings.cache_dir) as fetching:
            plan = fetching.plan(task.cancel)
            if task.kind == "look":
                task.plan = plan
                return Fact("download.found", {"files": len(plan.listing.files), "size": plan.fetched_bytes})
            fetching.run(plan, task.cancel)
        return Fact("download.done", {"model": task.title, "size": plan.listing.total_bytes})

    def _verified(self, task: ModelTask) -> Fact:
        def report(path: str, done: int, total: int) -> None:
            task.line, task.share = render(Fact("hub.verifying", {"file": path})).what, done / total if total else None

        verification = verify(self._settings.weights_dir / task.folder, task.cancel, report)
        count = len(verification.manifest.files)
        if not verification.differences:
            return Fact("download.verified", {"files": count, "size": verification.total_bytes})
        cause = next(iter(verification.differences.values()))
        raise DownloadError("download.wrong_files", wrong=len(verification.differences), files=count, cause=cause)


def _cancelled(task: ModelTask) -> Fact:
    return Fact("download.cancelled" if task.kind == "download" else "download.stopped")
