"""Model downloads of the web app: one at a time, on a thread of the web process.

They are not in the job queue, where a download would delay all videos although it needs no GPU.
"""

import logging
import queue
import threading
from dataclasses import dataclass, field

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import DownloadError, TandemError
from runtime.core.events import Failed
from runtime.core.facts import Fact
from runtime.core.settings import Settings
from runtime.models.hub.client import check_online, hub_of
from runtime.models.hub.download import Download, DownloadProgress, source_of
from runtime.models.registry import KnownModel
from runtime.queue.views import TaskProgress

logger = logging.getLogger(__name__)


@dataclass
class ModelDownload(TaskProgress):
    """One download.

    Attributes:
        model: the model that is downloaded.
        cancel: stops it.
    """

    model: KnownModel = field(kw_only=True)
    cancel: Cancel = field(default_factory=Cancel, repr=False)

    @property
    def cancelling(self) -> bool:
        """Whether it runs and a cancel was requested."""
        return self.open and self.cancel.requested


class Downloads:
    """Queued, running and ended downloads, by model. Safe between threads.

    Args:
        settings: the models folder, the hub, and whether downloads are allowed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._downloads: dict[str, ModelDownload] = {}
        self._waiting: queue.Queue[ModelDownload | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, model: KnownModel) -> ModelDownload:
        """Download a known model after those that were added before. The user has agreed to its licence.

        Raises:
            DownloadError: if it is queued or runs already, or downloads are not allowed.
        """
        check_online(self._settings)
        with self._lock:
            before = self._downloads.get(model.name)
            if before is not None and before.open:
                raise DownloadError("download.already_queued", model=model.title)
            download = self._downloads[model.name] = ModelDownload(model=model)
            self._waiting.put(download)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
                self._thread.start()
        return download

    def of(self, name: str) -> ModelDownload | None:
        """Return the last download of a known model."""
        with self._lock:
            return self._downloads.get(name)

    def cancel(self, name: str) -> None:
        """Stop a download: at once if it is queued, within a tenth of a second if it runs. Received data is kept."""
        with self._lock:
            download = self._downloads.get(name)
            if download is not None and download.open:
                download.cancel.request()
                if download.state == "queued":
                    download.result, download.state = Fact("download.cancelled"), "cancelled"

    def close(self) -> None:
        """Stop all downloads and wait for that. Received data is kept, and the next download continues from it."""
        with self._lock:
            thread, self._thread = self._thread, None
            for download in self._downloads.values():
                download.cancel.request()
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def _run(self) -> None:
        while (download := self._waiting.get()) is not None:
            with self._lock:
                if not download.open:
                    continue
                download.state = "running"
            name = download.model.name
            logger.info("download of %s starts", name)
            try:
                download.result = self._fetch(download)
                download.state = "done"
            except CancelledError:
                download.result, download.state = Fact("download.cancelled"), "cancelled"
            except TandemError as error:
                download.result, download.state = error.fact, "failed"
            except Exception as error:  # internal error: one line for the user, the traceback in the log
                logger.exception("A download failed")
                download.result, download.state = Failed.because_of(error).fact, "failed"
            logger.info("download of %s: %s", name, download.state)

    def _fetch(self, download: ModelDownload) -> Fact:
        def report(progress: DownloadProgress) -> None:
            download.line, download.share = progress.line, progress.share

        download.cancel.check()
        source, hub = source_of(download.model.name, None), hub_of(self._settings)
        with Download(source, self._settings.weights_dir, hub, report) as fetching:
            plan = fetching.plan(download.cancel)
            fetching.run(plan, download.cancel)
        return Fact("download.done", {"model": download.model.title, "size": plan.listing.total_bytes})
