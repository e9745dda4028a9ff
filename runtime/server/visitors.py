"""The visitors of a share link: owners of sessions and videos, limits, and open requests.

Each login is a new visitor, even of the same person. The limits for all visitors together do not depend on logins.
"""

import hashlib
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError, StoreError
from runtime.core.events import VideoSaved
from runtime.core.images import ImageUse, parse_reference
from runtime.core.request import FIELDS, GenerationRequest
from runtime.core.request_fields import VideoFile
from runtime.core.settings import ROOT, Settings
from runtime.machine.probe import free_disk_bytes
from runtime.models.catalogue import check_offered
from runtime.models.images import keep_image
from runtime.models.loras import loras_dir
from runtime.models.requested import with_inputs
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import clip_of
from runtime.queue.instances import is_alive
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from runtime.server.job_files import find_output
from runtime.server.visitor_limits import (
    HOUR_SECONDS,
    MOST_IMAGES,
    check_disk,
    check_queue,
    check_request,
    check_uploads,
    filled_in,
    limits_of,
)

# A video, or the clip of so many of its sections or frames.
_VIDEO = re.compile(r"([0-9a-f]{8})(?:-([0-9]{1,9}))?\.mp4")
# A visitor's name, see `Visitors.name_of`; owners of other forms are API keys.
_VISITOR = re.compile(r"([0-9a-f]{8})-.+")
# Per visitor; an open page needs two or three.
_MAX_OPEN_REQUESTS = 24
# Calls of one visitor that wait or run, in addition to the videos that they may follow.
_MAX_CALLS = 64
# The least recently used sessions are forgotten.
_MAX_SESSIONS = 2_000


class Visitors:
    """Enforces the limits, and lets visitors reach only their own sessions and videos. Thread-safe.

    Args:
        models: the models that visitors may use, by name.

    Attributes:
        link: the address of the share link; empty until it is open.
        most_calls: maximum number of calls of one visitor that wait or run.
    """

    def __init__(self, worker: JobQueue, settings: Settings, models: Mapping[str, ModelSpec]) -> None:
        self.link = ""
        self.most_calls = _MAX_CALLS + settings.share_queue
        self._worker = worker
        self._settings = settings
        self._models = dict(models)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._requests: Counter[str] = Counter()
        self._submitted: dict[str, deque[float]] = {}
        # Time, visitor and size of each upload of the last hour, and the digests of each visitor's newest ones.
        self._uploads: deque[tuple[float, str, int]] = deque()
        self._images: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._lock = threading.Lock()
        self._submitting = threading.Lock()

    def name_of(self, token: str) -> str:
        """Return the visitor's name for a login token: the id of this app and a digest of the token."""
        return f"{self._worker.instance}-{hashlib.sha256(token.encode()).hexdigest()[:16]}"

    def submit(self, request: GenerationRequest, visitor: str) -> Job:
        """Queue a visitor's video.

        Raises:
            TandemError: if the request is invalid or exceeds a limit.
        """
        spec = check_offered(request.model, self._models)
        limits = limits_of(self._settings, spec)
        self._check_images(request, visitor)
        weights, cache = self._settings.weights_dir, self._settings.cache_dir
        request = filled_in(request, with_inputs(spec, request, weights, cache), limits)
        check_request(request, limits)
        check_disk(free_disk_bytes(self._settings.outputs_dir))
        # One at a time, so that two simultaneous requests cannot both take the last place in the queue.
        with self._submitting:
            now = time.monotonic()
            waiting = [*visitor_jobs(self._worker).values()]
            times = self._submitted.get(visitor, deque())
            check_queue(limits, waiting.count(visitor), len(waiting), tuple(times), now)
            job = self._worker.submit(request, owner=visitor)
            self._submitted = {name: times for name, times in self._submitted.items() if now - times[-1] < HOUR_SECONDS}
            self._submitted.setdefault(visitor, deque(maxlen=limits.per_hour)).append(now)
        return job

    def keep_image(self, data: bytes, name: str, visitor: str, check: Callable[[], None] = never) -> ImageUse:
        """Check and keep an image that a visitor uploaded; see `models.images.keep_image`.

        Raises:
            TandemError: if it cannot be used, or a limit is reached.
        """
        check_disk(free_disk_bytes(self._settings.cache_dir))
        now = time.monotonic()
        with self._lock:
            while self._uploads and now - self._uploads[0][0] >= HOUR_SECONDS:
                self._uploads.popleft()
            times = [at for at, name, _ in self._uploads if name == visitor]
            check_uploads(times, sum(size for _, _, size in self._uploads), now)
            self._uploads.append((now, visitor, len(data)))
        use = keep_image(data, name, "image", self._settings.cache_dir, check=check)
        with self._lock:
            images = self._images.setdefault(visitor, OrderedDict())
            images[use.digest] = None
            self._images.move_to_end(visitor)
            for entries, most in ((images, MOST_IMAGES), (self._images, _MAX_SESSIONS)):
                while len(entries) > most:
                    entries.popitem(last=False)
        return use

    def _check_images(self, request: GenerationRequest, visitor: str) -> None:
        """Check that a request names only images that the visitor has uploaded, and no video.

        Raises:
            InvalidRequestError: for a path, another image, or a video.
        """
        with self._lock:
            digests = set(self._images.get(visitor, ()))
        for field, file in request.files:
            if isinstance(FIELDS[field], VideoFile):
                raise InvalidRequestError(field, "server.visitor_video")
            reference = parse_reference(file)
            if reference is None or reference.digest not in digests:
                raise InvalidRequestError(field, "server.visitor_image_unknown")

    def job(self, job_id: object, visitor: str) -> Job | None:
        """Return a job by its id if it belongs to this visitor."""
        job = self._worker.job(job_id) if isinstance(job_id, str) else None
        return job if job is not None and job.owner == visitor else None

    def video(self, name: str, visitor: str) -> Path | None:
        """Return the file of a visitor's video by its name; `None` if it is not theirs.

        The name is "<job id>.mp4", or "<job id>-2.mp4" for the clip of two sections or frames while it is made.
        """
        match = _VIDEO.fullmatch(name)
        job = self.job(match[1], visitor) if match is not None else None
        if job is not None and match is not None and match[2] is not None:
            return clip_of(self._worker.store.folder(job.id), int(match[2]))
        saved = job.progress.end if job is not None else None
        return find_output(str(saved.video), self._settings.outputs_dir) if isinstance(saved, VideoSaved) else None

    def owns(self, session: str, visitor: str) -> bool:
        """Return whether a session belongs to this visitor; a new session belongs to the first visitor who uses it."""
        with self._lock:
            owner = self._sessions.setdefault(session, visitor)
            self._sessions.move_to_end(session)
            while len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return owner == visitor

    def enter(self, visitor: str) -> bool:
        """Count a request that starts; return `False`, without counting it, if the visitor has too many open."""
        with self._lock:
            if self._requests[visitor] >= _MAX_OPEN_REQUESTS:
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


def visitor_jobs(worker: JobQueue) -> Mapping[str, str]:
    """Return the owners of queued and running videos by id: this app's visitors; other apps may have visitors too."""
    try:
        return worker.store.order.owners(f"{worker.instance}-")
    except StoreError:  # submitting a video reports it
        return {}


def stop_videos(worker: JobQueue) -> int:
    """Cancel all queued and running videos of visitors; return their number."""
    jobs = visitor_jobs(worker)
    worker.cancel(jobs)
    return len(jobs)


def cancel_orphaned(store: JobStore) -> None:
    """Cancel queued videos of visitors whose share link ended with a killed process."""
    path = store.path
    if path is None:
        return
    owners = store.order.owners(states=["queued"])
    apps = {owner: match[1] for owner in {*owners.values()} if (match := _VISITOR.fullmatch(owner)) is not None}
    ended = {app for app in {*apps.values()} if not is_alive(path, app)}
    store.request_cancel([job for job, owner in owners.items() if apps.get(owner) in ended])


def visitors_models(models: Mapping[str, ModelSpec], folders: Mapping[str, Path]) -> dict[str, ModelSpec]:
    """Return the models that visitors may use: those in `folders`, by name, but none that is given by a path.

    Args:
        models: the models of the owner's page, by name or path.
        folders: folders or files of the catalogue's models, by name.
    """
    return {
        spec.name: spec
        for spec in tuple(models.values())
        if folders.get(spec.name) in (*spec.single_files.values(), spec.directory)
    }


def private_folders(settings: Settings) -> dict[str, Path]:
    """Return the folders whose paths others must not see, by a name for messages; see `without_paths`."""
    folders = {"the folder of videos": settings.outputs_dir, "the cache folder": settings.cache_dir}
    folders |= {"the folder of models": settings.weights_dir, "the folder of engines": settings.engines_dir}
    folders["the folder of LoRAs"] = loras_dir(settings.weights_dir)
    return folders | {"Tandem's folder": ROOT, "the home folder": Path.home()}


def without_paths(message: str, folders: Mapping[str, Path]) -> str:
    """Return a message with each folder's path replaced by its name in `folders`."""
    for name, folder in sorted(folders.items(), key=lambda item: -len(str(item[1]))):
        message = message.replace(str(folder), name)
    return message
