"""The visitors of a share link: the limits of their videos, their sessions, videos and open requests.

A visitor is a log-in: a person who logs in again is a new visitor. The limits for all visitors together still hold.
"""

import hashlib
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.core.errors import InvalidRequestError, LimitError, StoreError
from runtime.core.events import VideoSaved
from runtime.core.request import AUTO, FIELDS, GenerationRequest
from runtime.core.settings import Settings
from runtime.machine.probe import free_disk_bytes
from runtime.models.catalogue import check_offered
from runtime.models.spec import ModelSpec
from runtime.queue.instances import is_alive
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from runtime.server.job_files import find_output

_HOUR_SECONDS = 3600.0
_MINUTE = 60
# Disk space that is kept free for the owner's videos.
_SPARE_BYTES = 1 << 29


@dataclass(frozen=True)
class Limits:
    """Limits of one visitor's video, and of their number.

    Attributes:
        frames, steps: maximum per video.
        sizes: largest sizes as (width, height); other sizes must fit into one of them in either orientation.
        waiting: maximum of queued and running videos of one visitor.
        waiting_all: the same for all visitors together.
        per_hour: maximum of videos that one visitor may submit in an hour.
    """

    frames: int
    steps: int
    sizes: tuple[tuple[int, int], ...]
    waiting: int
    waiting_all: int
    per_hour: int


def limits_of(settings: Settings, spec: ModelSpec) -> Limits:
    """Return the limits for one model: from the settings, else the model's defaults."""
    own = (spec.defaults.width, spec.defaults.height)
    return Limits(
        frames=settings.share_frames or spec.defaults.frames,
        steps=settings.share_steps or spec.defaults.steps,
        sizes=(settings.share_size,) if settings.share_size else tuple(dict.fromkeys((*spec.sizes, own))),
        waiting=settings.share_queue,
        waiting_all=settings.share_queue_all,
        per_hour=settings.share_rate,
    )


def defaults_within(spec: ModelSpec, limits: Limits) -> dict[str, int]:
    """Return the defaults for a visitor's video: the model's width, height, frames and steps, reduced to the limits."""
    default = (spec.defaults.width, spec.defaults.height)
    sizes = [size for size in (default, *spec.sizes) if allows_size(size, limits)]
    width, height = sizes[0] if sizes else _rounded_down(limits.sizes[0], spec.strides)
    return {
        "width": width,
        "height": height,
        "frames": min(spec.defaults.frames, most_frames(spec, limits)),
        "steps": min(spec.defaults.steps, limits.steps),
    }


def most_frames(spec: ModelSpec, limits: Limits) -> int:
    """Return the most frames that the limits allow and the model can make."""
    stride = spec.vae.scale_factor_temporal
    return (limits.frames - 1) // stride * stride + 1


def allows_size(size: tuple[int, int], limits: Limits) -> bool:
    """Return whether a visitor's video may be of this size."""
    return any(_fits(size, largest) for largest in limits.sizes)


def filled_in(request: GenerationRequest, spec: ModelSpec, limits: Limits) -> GenerationRequest:
    """Return the request with size, length and steps filled in, and defaults for what visitors may not choose."""
    own = defaults_within(spec, limits)
    filled = {name: value for name, value in own.items() if getattr(request, name) == AUTO}
    others = {
        name: info.get_default(call_default_factory=True)
        for name, info in GenerationRequest.model_fields.items()
        if FIELDS[name].group in {"acceleration", "loras"}
    }
    return request.replace(**{**filled, **others, "build": "never"})


def check_request(request: GenerationRequest, limits: Limits) -> None:
    """Check that a video is within the limits.

    Args:
        request: as `filled_in` returns it.

    Raises:
        InvalidRequestError: naming the field.
    """
    for name, most in (("frames", limits.frames), ("steps", limits.steps)):
        asked = getattr(request, name)
        if asked > most:
            raise InvalidRequestError(name, "server.visitor_maximum", value=asked, maximum=most)
    width, height = int(request.width), int(request.height)
    if not allows_size((width, height), limits):
        raise InvalidRequestError("width", "server.visitor_size", width=width, height=height, maximum=_largest(limits))


def check_queue(limits: Limits, own_waiting: int, all_waiting: int, submitted: Sequence[float], now: float) -> None:
    """Check that a visitor may queue another video now.

    Args:
        submitted: times of this visitor's earlier submissions in seconds, ascending, on the clock of `now`.

    Raises:
        LimitError: if they may not.
    """
    if own_waiting >= limits.waiting:
        raise LimitError("server.visitor_queue_full", maximum=limits.waiting)
    if all_waiting >= limits.waiting_all:
        raise LimitError("server.queue_full")
    recent = [at for at in submitted if now - at < _HOUR_SECONDS]
    if len(recent) >= limits.per_hour:
        minutes = max(1, round((recent[-limits.per_hour] + _HOUR_SECONDS - now) / _MINUTE))
        raise LimitError("server.visitor_rate", maximum=limits.per_hour, minutes=minutes)


def check_disk(free_bytes: int) -> None:
    """Check that the disk of the outputs is not nearly full.

    Raises:
        LimitError: if it is.
    """
    if free_bytes < _SPARE_BYTES:
        raise LimitError("server.disk_full")


def describe_limits(limits: Limits) -> str:
    """Return the limits as a sentence."""
    each = "one video" if limits.waiting == 1 else f"{limits.waiting} videos"
    return (
        f"At most {limits.frames} frames, {_largest(limits)} and {limits.steps} steps; "
        f"{each} at a time, {limits.per_hour} an hour."
    )


def visitors_models(models: Mapping[str, ModelSpec], folders: Mapping[str, Path]) -> dict[str, ModelSpec]:
    """Return the models that visitors may use: those of the catalogue by name, never a folder by its path."""
    return {spec.name: spec for spec in tuple(models.values()) if folders.get(spec.name) == spec.directory}


def without_paths(message: str, folders: Mapping[str, Path]) -> str:
    """Return a message with each folder's path replaced by its name in `folders`."""
    for name, folder in sorted(folders.items(), key=lambda item: -len(str(item[1]))):
        message = message.replace(str(folder), name)
    return message


def _rounded_down(size: tuple[int, int], strides: tuple[int, int]) -> tuple[int, int]:
    """Return the nearest smaller size that the model supports."""
    width, height = (max(side // stride, 1) * stride for side, stride in zip(size, strides, strict=True))
    return width, height


def _fits(size: tuple[int, int], largest: tuple[int, int]) -> bool:
    return max(size) <= max(largest) and min(size) <= min(largest)


def _largest(limits: Limits) -> str:
    """Return the sizes that do not fit into another one, as text."""
    sizes = [
        size
        for place, size in enumerate(limits.sizes)
        if not any(
            _fits(size, other) and (not _fits(other, size) or before < place)
            for before, other in enumerate(limits.sizes)
            if other != size
        )
    ]
    return " or ".join(f"{width}×{height}" for width, height in sizes)


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
        limits = limits_of(self._settings, spec)
        request = filled_in(request, spec, limits)
        check_request(request, limits)
        check_disk(free_disk_bytes(self._settings.outputs_dir))
        # One at a time: two simultaneous requests must not both take the last place.
        with self._submitting:
            if self.closed:
                raise LimitError("server.sharing_ended")
            now = time.monotonic()
            waiting = [job.owner for job in self._jobs()]
            times = self._submitted.get(visitor, deque())
            check_queue(limits, waiting.count(visitor), len(waiting), tuple(times), now)
            job = self._worker.submit(request, owner=visitor)
            self._submitted = {
                name: times for name, times in self._submitted.items() if now - times[-1] < _HOUR_SECONDS
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
        store.request_cancel([one.id for one in waiting if not is_alive(path, str(one.owner).partition("-")[0])])
