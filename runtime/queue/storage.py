"""Files of jobs on disk: sizes of videos and checkpoints, and removal of those that are no longer needed."""

import contextlib
import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from runtime.core.disk_caches import LATENT_COLORS
from runtime.core.errors import StoreError
from runtime.core.files import remove_partial_files
from runtime.core.frozen import FrozenModel
from runtime.core.images import referenced
from runtime.core.locks import remove_scratch_folders
from runtime.models.images import copy_bytes, remove_unused
from runtime.pipeline.files import CHECKPOINTS, CLIP, SECTIONS
from runtime.queue.records import JobRecord, State
from runtime.queue.store import JobStore
from runtime.video.mp4 import sweep

_DAY = 24 * 3600.0
# Deleted jobs can be restored for this long.
KEPT_SECONDS = 7 * _DAY

# Folders of the cache whose files are replaced as a whole.
CACHES = ("prompts", "verification", LATENT_COLORS.name)

# How long a new folder waits until folders without a job are removed.
_LOCK_SECONDS = 30.0

# How far the clock is set at least, so that ages are taken for wrong, and for how long.
_JUMP_SECONDS, _SETTLED_SECONDS = 600.0, 3600.0

_FINISHED: tuple[State, ...] = ("done",)

logger = logging.getLogger(__name__)


class Retention(FrozenModel):
    """Which ended videos are kept: for so many days, and the newest of each key; null for all."""

    days: float | None = Field(default=None, description="Days after the end of a video; null without a limit.")
    videos: int | None = Field(default=None, description="Number of the newest ended videos; null without a limit.")
    bytes: int | None = Field(default=None, description="Bytes of the newest ended videos; null without a limit.")

    def expires_at(self, ended: float) -> float | None:
        """Return when a video that ended then has reached its age; both in seconds since 1970."""
        return None if self.days is None else ended + self.days * _DAY


@dataclass(frozen=True)
class DiskUsage:
    """Disk usage of an owner's jobs, in bytes.

    Attributes:
        videos, video_bytes: existing videos.
        checkpoint_bytes: checkpoints of all jobs.
        finished_bytes: of these, those of finished videos that can be continued.
        deleted, deleted_bytes: deleted jobs that can be restored, with all their files.
        old: the number of jobs that ended at least so many days ago and the bytes of their videos, by days.
        image_bytes: copies of images that the jobs start from, also of deleted ones.
    """

    videos: int = 0
    video_bytes: int = 0
    checkpoint_bytes: int = 0
    finished_bytes: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    old: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    image_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.video_bytes + self.checkpoint_bytes + self.deleted_bytes + self.image_bytes


def measure(store: JobStore, owner: str | None, ages: Sequence[int] = (), now: float | None = None) -> DiskUsage:
    """Measure every file of an owner's jobs.

    Args:
        ages: in days, of the jobs in `old`; those that no job has are left out.
        now: seconds since 1970; by default, the clock's.
    """
    there = store.list(owner=owner)
    videos = {job.id: video_bytes(job) for job in there}
    checkpoints = {job.id: checkpoint_bytes(store, job.id) for job in there}
    gone = store.list(owner=owner, deleted=True)
    old = {days: [videos[job.id] for job in there if _is_older(job, days, now)] for days in ages}
    return DiskUsage(
        videos=sum(size > 0 for size in videos.values()),
        video_bytes=sum(videos.values()),
        checkpoint_bytes=sum(checkpoints.values()),
        finished_bytes=sum(checkpoints[job.id] for job in there if job.state == "done"),
        deleted=len(gone),
        deleted_bytes=sum(video_bytes(job) + checkpoint_bytes(store, job.id) for job in gone),
        image_bytes=_image_bytes(store, [*there, *gone]),
        old={days: (len(sizes), sum(sizes)) for days, sizes in old.items() if sizes},
    )


def _image_bytes(store: JobStore, jobs: Iterable[JobRecord]) -> int:
    """Return the size of the images of jobs; those of several jobs count once."""
    if store.path is None:
        return 0
    digests = {digest for job in jobs for digest in referenced(str(job.request))}
    return copy_bytes(digests, store.path.parent)


def video_bytes(job: JobRecord) -> int:
    """Return the size of a job's videos; 0 if there are none."""
    return sum(map(_size, job.videos)) if job.state == "done" else 0


def checkpoint_bytes(store: JobStore, job_id: str) -> int:
    """Return the size of a job's checkpoints and finished sections."""
    return sum(map(_size, _checkpoints(store, job_id)))


def remove_finished_checkpoints(store: JobStore, owner: str | None) -> int:
    """Remove the checkpoints and sections of finished videos; return the freed bytes.

    Raises:
        StoreError: if one cannot be removed; the others are.
    """
    freed, failed = 0, None
    for job in store.list(owner=owner, states=_FINISHED):
        freed += checkpoint_bytes(store, job.id)
        for path in _checkpoints(store, job.id):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failed = StoreError("queue.checkpoint_not_removed", file=path, error=error.strerror or str(error))
    if failed is not None:
        raise failed
    return freed


def older_than(store: JobStore, owner: str | None, days: float, now: float | None = None) -> Sequence[JobRecord]:
    """Return the jobs that ended at least `days` days ago."""
    return [job for job in store.list(owner=owner) if _is_older(job, days, now)]


def _is_older(job: JobRecord, days: float, now: float | None) -> bool:
    then = (time.time() if now is None else now) - days * _DAY
    return not job.open and (job.ended or job.created) < then


def purge(store: JobStore, outputs_dir: Path, older_than: float = KEPT_SECONDS) -> int:
    """Remove jobs permanently that were deleted more than `older_than` seconds ago; return their number.

    Their files are removed too, except for videos outside `outputs_dir`: the user chose that place. So are copies of
    images that no job needs any more.
    """
    removed = store.purge(older_than)
    for job in removed:
        remove_files(store, job, outputs_dir)
    if store.path is not None and not _is_damaged(store):
        remove_unused(store.path.parent, store.images())
    return len(removed)


def expire(
    store: JobStore, retention: Retention, outputs_dir: Path, in_use: Container[Path] = (), now: float | None = None
) -> int:
    """Remove ended videos for good that are beyond a limit, with their files; return their number.

    Queued, running and starred videos stay.

    Args:
        in_use: files of videos that are being sent, which stay until later.
        now: seconds since 1970; by default, the clock's.
    """
    now = time.time() if now is None else now
    counts: Counter[str | None] = Counter()
    sizes: Counter[str | None] = Counter()
    expired = []
    for job in store.ended():
        counts[job.owner] += 1
        if retention.bytes is not None and job.video is not None:
            sizes[job.owner] += _size(job.video)
        end = retention.expires_at(job.at)
        beyond = (
            (end is not None and now > end)
            or (retention.videos is not None and counts[job.owner] > retention.videos)
            or (retention.bytes is not None and sizes[job.owner] > retention.bytes)
        )
        if beyond and (job.video is None or job.video.resolve() not in in_use):
            expired.append(job.id)
    removed = []
    for job_id in expired:
        with contextlib.suppress(StoreError):  # it was resumed or deleted meanwhile
            store.delete(job_id, ended=True)
            removed.append(job_id)
    for record in store.purge(0.0, removed) if removed else ():
        remove_files(store, record, outputs_dir)
    return len(removed)


class ClockWatch:
    """Detects that the clock was set: ages of files and videos are wrong until it is right again.

    Machines without a battery start with another date until they reach a time server, and a wrong one may be set by it.
    """

    def __init__(self) -> None:
        self._offset = time.time() - _uptime()
        self._changed: float | None = None

    def now(self) -> float | None:
        """Return seconds since 1970; `None` if the clock was set in the last hour. Call this more often than that."""
        now, uptime = time.time(), _uptime()
        set_by = now - uptime - self._offset
        self._offset += set_by
        if abs(set_by) > _JUMP_SECONDS:
            self._changed = uptime
            logger.warning("The clock was set by %.0f s: nothing is removed for %.0f s", set_by, _SETTLED_SECONDS)
        return None if self._changed is not None and uptime - self._changed <= _SETTLED_SECONDS else now


def _uptime() -> float:
    """Return seconds of a clock that cannot be set; on Linux it also counts while the machine sleeps."""
    if sys.platform == "linux":
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
    else:
        seconds = time.monotonic()
    return seconds


def _is_damaged(store: JobStore) -> bool:
    """Whether the store was replaced because it was damaged: the user may repair its backup, which has other jobs."""
    return bool(store.notice) or any(store.path.parent.glob(f"{store.path.name}.damaged-*")) if store.path else False


def remove_files(store: JobStore, job: JobRecord, outputs_dir: Path) -> None:
    """Remove a job's folder, and its videos if they are in `outputs_dir`."""
    folder = store.folder(job.id)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if job.kind == "video" and job.output.parent == outputs_dir:
        for path in job.videos or (job.output,):
            with contextlib.suppress(OSError):
                path.unlink()


def tidy(store: JobStore, outputs_dir: Path) -> None:
    """Remove leftovers of killed processes: partial files, and folders of jobs that are not in the store.

    Raises:
        StoreError: if the store cannot be read; no folder is removed then.
    """
    remove_scratch_folders()
    if outputs_dir.is_dir():
        sweep(outputs_dir)
    store.check()
    if store.path is not None:
        for folder in (store.path.parent, *(store.path.parent / name for name in CACHES)):
            remove_partial_files(folder)
    # The user may repair damaged rows, so the folders of their jobs stay.
    if store.path is None or _is_damaged(store) or store.unreadable is not None:
        return
    # A job is stored before it has a folder.
    folders = {folder.name: folder for folder in (store.path.parent / "jobs").glob("[0-9a-f]" * 8)}
    for name in set(folders) - store.existing_ids(folders):
        shutil.rmtree(folders[name], ignore_errors=True)


def _checkpoints(store: JobStore, job_id: str) -> Sequence[Path]:
    folder = store.folder(job_id)
    return [] if folder is None else _files(folder)


def _files(folder: Path) -> list[Path]:
    frames = [path for name in (SECTIONS, CLIP) for path in (folder / name).rglob("*") if path.is_file()]
    return [*folder.glob(CHECKPOINTS), *frames]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
