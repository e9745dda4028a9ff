"""How much room videos and checkpoints take, and what may go."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.pipeline.checkpoint_files import CHECKPOINTS
from runtime.queue.records import JobRecord, State
from runtime.queue.store import JobStore

_DAY = 24 * 3600.0
_FINISHED: tuple[State, ...] = ("done",)


@dataclass(frozen=True)
class Room:
    """What the jobs of somebody take on disk, in bytes.

    Attributes:
        videos, video_bytes: those that are there.
        checkpoint_bytes: of all jobs.
        spare_bytes: of those, of finished videos: only redoing second halves needs them.
        deleted, deleted_bytes: jobs that were deleted and can be had back, with all their files.
    """

    videos: int
    video_bytes: int
    checkpoint_bytes: int
    allocator_slack_bytes: int
    deleted: int
    deleted_bytes: int


def measure(store: JobStore, owner: str | None) -> Room:
    """Look at every file of somebody's jobs."""
    there = store.list(owner=owner)
    videos = [size for size in (video_bytes(job) for job in there) if size]
    kept = {job.id: checkpoint_bytes(store, job.id) for job in there}
    gone = store.list(owner=owner, deleted=True)
    return Room(
        videos=len(videos),
        video_bytes=sum(videos),
        checkpoint_bytes=sum(kept.values()),
        allocator_slack_bytes=sum(kept[job.id] for job in there if job.state == "done"),
        deleted=len(gone),
        deleted_bytes=sum(video_bytes(job) + checkpoint_bytes(store, job.id) for job in gone),
    )


def video_bytes(job: JobRecord) -> int:
    """Return the size of a job's video; 0 if it is not there."""
    return _size(job.output) if job.state == "done" else 0


def checkpoint_bytes(store: JobStore, job_id: str) -> int:
    """Return what a job's checkpoints take; one file under two names counts once."""
    sizes = {}
    for path in _checkpoints(store, job_id):
        with contextlib.suppress(OSError):
            found = path.stat()
            sizes[found.st_ino or path] = found.st_size
    return sum(sizes.values())


def remove_spare_checkpoints(store: JobStore, owner: str | None) -> int:
    """Remove the checkpoints of finished videos; return how many bytes that freed."""
    freed = 0
    for job in store.list(owner=owner, states=_FINISHED):
        freed += checkpoint_bytes(store, job.id)
        for path in _checkpoints(store, job.id):
            with contextlib.suppress(OSError):
                path.unlink()
    return freed


def older_than(store: JobStore, owner: str | None, days: float, now: float | None = None) -> Sequence[JobRecord]:
    """Return the jobs that ended at least so many days ago, by the clock as it was then."""
    then = (time.time() if now is None else now) - days * _DAY
    return [job for job in store.list(owner=owner) if not job.open and (job.ended or job.created) < then]


def _checkpoints(store: JobStore, job_id: str) -> Sequence[Path]:
    folder = store.folder(job_id)
    return [] if folder is None else list(folder.glob(CHECKPOINTS))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
