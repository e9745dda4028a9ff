"""Where the visitors of a share link are: who is there, whose session and whose video something is, who asked when.

A visitor is a log-in: whoever logs in anew is a new one, and what all may do together holds all the same.
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
from runtime.ui import visitor_limits
from runtime.ui.files import find_output
from runtime.ui.model_choices import check_offered

_VIDEO = re.compile(r"([0-9a-f]{8})\.mp4")
# A page has two or three requests open, for as long as it is shown.
_OPEN_REQUESTS = 24
_SESSIONS = 2_000


class Lobby:
    """Keeps visitors apart, and to their limits. Any thread may ask.

    Args:
        models: what visitors may use, by name.
    """

    def __init__(self, worker: JobQueue, settings: Settings, models: Mapping[str, ModelSpec]) -> None:
        self.closed = False
        self._worker = worker
        self._settings = settings
        self._models = dict(models)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._inside: Counter[str] = Counter()
        self._asked: dict[str, deque[float]] = {}
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def name_of(self, token: str) -> str:
        """Return the visitor who comes with a log-in's token: the process that let them in, and a digest."""
        return f"{self._worker.instance}-{hashlib.sha256(token.encode()).hexdigest()[:16]}"

    def submit(self, request: GenerationRequest, visitor: str) -> Job:
        """Queue a visitor's video.

        Raises:
            TandemError: if it cannot be made, is larger than visitors' may be, or comes too soon.
        """
        spec = check_offered(request.model, self._models)
        limits = visitor_limits.limits_of(self._settings, spec)
        request = visitor_limits.filled_in(request, spec, limits)
        visitor_limits.check_request(request, limits)
        visitor_limits.check_room(free_disk_bytes(self._settings.outputs_dir))
        # One after the other: two that come at once must not both take the last place.
        with self._turn:
            if self.closed:
                raise LimitError("This is no longer shared.", "Ask who shared it.")
            now = time.monotonic()
            waiting = [job.owner for job in self._jobs()]
            asked = self._asked.get(visitor, deque())
            visitor_limits.check_turn(limits, waiting.count(visitor), len(waiting), tuple(asked), now)
            job = self._worker.submit(request, owner=visitor)
            self._asked = {who: when for who, when in self._asked.items() if now - when[-1] < visitor_limits.HOUR}
            self._asked.setdefault(visitor, deque(maxlen=limits.an_hour)).append(now)
        return job

    def job(self, job_id: object, visitor: str) -> Job | None:
        """Return a job by its id if it is this visitor's."""
        job = self._worker.job(job_id) if isinstance(job_id, str) else None
        return job if job is not None and job.owner == visitor else None

    def video(self, name: str, visitor: str | None) -> Path | None:
        """Return the file of a visitor's own video, as the page calls it."""
        match = _VIDEO.fullmatch(name)
        job = self.job(match[1], visitor) if match is not None and visitor is not None else None
        saved = job.progress.end if job is not None else None
        return find_output(str(saved.video), self._settings.outputs_dir) if isinstance(saved, VideoSaved) else None

    def owns(self, session: str, visitor: str | None) -> bool:
        """Return whether a session is this visitor's; it is whose who began it."""
        if visitor is None:
            return False
        with self._lock:
            owner = self._sessions.setdefault(session, visitor)
            self._sessions.move_to_end(session)
            while len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        return owner == visitor

    def enter(self, visitor: str) -> bool:
        """Count one more open request of a visitor; return whether there may be so many."""
        with self._lock:
            if self._inside[visitor] >= _OPEN_REQUESTS:
                return False
            self._inside[visitor] += 1
        return True

    def leave(self, visitor: str) -> None:
        """Count one less."""
        with self._lock:
            self._inside[visitor] -= 1
            if not self._inside[visitor]:
                del self._inside[visitor]

    def here(self) -> int:
        """Return how many visitors have a page open."""
        with self._lock:
            return len(self._inside)

    def waiting(self) -> int:
        """Return how many videos of visitors wait and run."""
        return len(self._jobs())

    def stop_videos(self) -> int:
        """Cancel every video of a visitor; return how many."""
        jobs = self._jobs()
        for job in jobs:
            job.cancel.request()
        return len(jobs)

    def close(self) -> None:
        """Let nobody in any more, and cancel what visitors asked for."""
        self.closed = True
        # After who is at submitting just now.
        with self._turn:
            self.stop_videos()

    def _jobs(self) -> list[Job]:
        """Return the videos of this link's visitors that wait and run; another process may share too."""
        try:
            jobs = self._worker.open_jobs()
        except StoreError:  # whoever asks for a video is told
            return []
        return [job for job in jobs if (job.owner or "").startswith(f"{self._worker.instance}-")]


def cancel_for_nobody(store: JobStore) -> None:
    """Cancel what waits for visitors of a link that is gone: of a process that was killed."""
    waiting = [one for one in store.queue() if one.owner is not None and one.state == "queued"]
    if store.path is not None:
        path = store.path
        store.request_cancel([one.id for one in waiting if not lives(path, str(one.owner).partition("-")[0])])
