"""Models that are fetched for the web app: one after the other, on a thread of their own.

Beside the queue and not in it: a download takes no GPU, and an hour of it would hold up every video behind it.
"""

import logging
import queue
import threading

from runtime.core.byte_size import byte_size
from runtime.core.cancel import CancelledError
from runtime.core.errors import DownloadError, TandemError
from runtime.core.settings import Settings
from runtime.jobs.chores import Chore, Free
from runtime.models.hub.access import check_online, hub_of
from runtime.models.hub.download import Download, wanted
from runtime.models.hub.progress import Progress
from runtime.models.known import KnownModel

_REMEMBERED = 8

logger = logging.getLogger(__name__)


class Downloads:
    """What is fetched, waits and ended, by model. Safe between threads.

    Args:
        settings: say where models go, where they come from, and whether they may.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._chores: dict[str, Chore] = {}
        self._waiting: queue.Queue[Chore | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, known: KnownModel) -> Chore:
        """Fetch a known model once those before it are done. Its licence is taken to be agreed to.

        Raises:
            DownloadError: if it is waited for already, or nothing may be fetched.
        """
        check_online(self._settings)
        with self._lock:
            before = self._chores.get(known.name)
            if before is not None and before.open:
                raise DownloadError(f"{known.title} is being fetched already.", "Wait for it, or cancel it.")
            chore = self._chores[known.name] = downloading(known, self._settings)
            self._waiting.put(chore)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
                self._thread.start()
        return chore

    def of(self, name: str) -> Chore | None:
        """Return the last download of a known model."""
        with self._lock:
            return self._chores.get(name)

    def cancel(self, name: str) -> None:
        """Stop one: at once if it waits, within a tenth of a second if it runs; what came stays."""
        with self._lock:
            chore = self._chores.get(name)
            if chore is not None and chore.open:
                chore.cancel.request()
                if chore.state == "queued":
                    chore.end("cancelled", "Cancelled before it began.")

    def close(self) -> None:
        """Stop all, and wait for that; what came stays, and goes on when it is asked for again."""
        with self._lock:
            thread, self._thread = self._thread, None
            for chore in self._chores.values():
                chore.cancel.request()
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def _run(self) -> None:
        while (chore := self._waiting.get()) is not None:
            with self._lock:
                if not chore.open:
                    continue
                chore.start()
            logger.info("%s %s begins", chore.kind, chore.id)
            try:
                chore.end("done", chore.work(chore, lambda: None))
            except CancelledError:
                chore.end("cancelled", "Cancelled. What came is kept, and goes on from there.")
            except TandemError as error:
                chore.end("failed", error.what, error.remedy)
            except Exception as error:  # a defect: told in one line, kept in the log
                logger.exception("A download failed")
                chore.end("failed", f"Something broke inside Tandem: {error!r}", "The log has the details.")
            logger.info("%s %s: %s", chore.kind, chore.id, chore.state)


def downloading(known: KnownModel, settings: Settings) -> Chore:
    """Return the chore of fetching a known model."""

    def work(chore: Chore, _free: Free) -> str:
        def tell(progress: Progress) -> None:
            chore.line, chore.share = progress.line, progress.share

        chore.cancel.check()
        hub = hub_of(settings)
        with Download(wanted(known.name, None), settings.weights_dir, hub, tell) as fetching:
            offer = fetching.look(chore.cancel)
            fetching.run(offer, chore.cancel)
        return f"{known.title} is here, whole and right: {byte_size(offer.listing.total_bytes)}."

    return Chore("download", f"Download {known.title}", work)
