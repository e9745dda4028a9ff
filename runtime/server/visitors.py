"""The visitors of a share link: their sessions, videos, open requests and limits.

A visitor is a log-in: a person who logs in again is a new visitor. The limits for all visitors together still hold.
"""

import hashlib
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path

from runtime.core.errors import LimitError, StoreError
from runtime.core.events import VideoSaved
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.machine.probe import free_disk_bytes
from runtime.models.spec import ModelSpec
from runtime.queue.process_lock import lives
from runtime.queue.service import Job, JobQueue
from runtime.queue.store import JobStore
from runtime.server import visitor_limits
from runtime.server.job_files import find_output
from runtime.server.model_choices import check_offered

_VIDEO = re.compile(r"([0-9a-f]{8})\.mp4")
# A page keeps two or three requests open while it is shown.
_OPEN_REQUESTS = 24
_SESSIONS = 2_000


class Visitors:
    """Keeps visitors apart and within their limits. Thread-safe.

    Args:
        models: those that visitors may use, by name.

    Attributes:
        closed: whether the link was closed.
    """

    def __init__(self, worker: JobQueue, settings: Settings, models: Mapping[str, ModelSpec]) -> None:
        self.closed = False
        self._worker = worker
        self._settings = settings
        self._models = dict(models)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._requests: Counter[str] = Counter()
        self._submitted: dict[str, deque[float]] = {}
        self._lock = threading.Lock()
        self._submitting = threading.Lock()

    def name_of(self, token: str) -> str:
        """Return the visitor of a log-in token: this process's name and a digest of the token."""
        return f"{self._worker.instance}-{hashlib.sha256(token.encode()).hexdigest()[:16]}"

    def submit(self, request: GenerationRequest, visitor: str) -> Job:
        """Queue a visitor's video.

        Raises:
            TandemError: if the request is invalid or exceeds a limit.
        """
        spec = check_offered(request.model, self._models)
        limits = visitor_limits.limits_of(self._settings, spec)
        request = visitor_limits.filled_in(request, spec, limits)
        visitor_limits.check_request(request, limits)
        visitor_limits.check_disk(free_disk_bytes(self._settings.outputs_dir))
        # One at a time: two simultaneous requests must not both take the last place.
        with self._submitting:
            if self.closed:
                raise LimitError("server.sharing_ended")
            now = time.monotonic()
            waiting = [job.owner for job in self._jobs()]
            times = self._submitted.get(visitor, deque())
            visitor_limits.check_queue(limits, waiting.count(visitor), len(waiting), tuple(times), now)
            job = self._worker.submit(request, owner=visitor)
            self._submitted = {
                name: times for name, times in self._submitted.items() if now - times[-1] < visitor_limits.HOUR
            }
            self._submitted.setdefault(visitor, deque(maxlen=limits.per_hour)).append(now)
        return job

    def job(self, job_id: object, visitor: str) -> Job | None:
        """Return a job by its id if it belongs to this visitor."""
        job = self._worker.job(job_id) if isinstance(job_id, str) else None
        return job if job is not None and job.owner == visitor else None

    def video(self, name: str, visitor: str) -> Path | None:
        """Return the file of a visitor's video, by its name on the page."""
        match = _VIDEO.fullmatch(name)
        job = self.job(match[1], visitor) if match is not None else None
        saved = job.progress.end if job is not None else None
        return find_output(str(saved.video), self._settings.outputs_dir) if isinstance(saved, VideoSaved) else None

    def owns(self, session: str, visitor: str) -> bool:
        """Return whether a session belongs to this visitor; a new session belongs to the first who names it."""
        with self._lock:
            owner = self._sessions.setdefault(session, visitor)
            self._sessions.move_to_end(session)
            while len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        return owner == visitor

    def enter(self, visitor: str) -> bool:
        """Count a request that begins; return whether the visitor may have that many open."""
        with self._lock:
            if self._requests[visitor] >= _OPEN_REQUESTS:
                return False
            self._requests[visitor] += 1
        return True

    def leave(self, visitor: str) -> None:
        """Count a request that ends."""
        with self._lock:
            self._requests[visitor] -= 1
            if not self._requests[visitor]:
                del self._requests[visitor]

    def present(self) -> int:
        """Return the number of visitors who have a page open."""
        with self._lock:
            return len(self._requests)

    def open_jobs(self) -> int:
        """Return the number of visitors' videos that are queued or running."""
        return len(self._jobs())

    def stop_videos(self) -> int:
        """Cancel all queued and running videos of visitors; return their number."""
        jobs = self._jobs()
        self._worker.cancel([job.id for job in jobs])
        return len(jobs)

    def close(self) -> None:
        """Refuse all further requests, and cancel visitors' videos."""
        self.closed = True
        # After a submission that is under way.
        with self._submitting:
            self.stop_videos()

    def _jobs(self) -> list[Job]:
        """Return the queued and running videos of this process's visitors; another process may share too."""
        try:
            jobs = self._worker.open_jobs()
        except StoreError:  # submitting a video reports it
            return []
        return [job for job in jobs if (job.owner or "").startswith(f"{self._worker.instance}-")]


def cancel_orphaned(store: JobStore) -> None:
    """Cancel queued videos of visitors whose share link ended with a killed process."""
    waiting = [one for one in store.queue() if one.owner is not None and one.state == "queued"]
    if store.path is not None:
        path = store.path
        store.request_cancel([one.id for one in waiting if not lives(path, str(one.owner).partition("-")[0])])
