"""Recovery after a process died: the state of its jobs, and its partial files."""

import contextlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from runtime.core.errors import StoreError, TandemError
from runtime.core.events import Failed, VideoSaved
from runtime.queue import process_lock
from runtime.queue.records import JobRecord
from runtime.queue.registry import WorkerRegistry, app_of
from runtime.queue.store import JobStore
from runtime.video.mp4 import read_metadata, sweep

# Deleted jobs can be restored for this long.
KEPT_SECONDS = 7 * 24 * 3600.0

logger = logging.getLogger(__name__)


def recover(store: JobStore, own: str) -> Sequence[str]:
    """Find the jobs whose process died, update their state, and return their ids.

    A job whose video is complete is done: its process died just before it could say so. Others are interrupted.

    Args:
        own: the process that asks. Its workers, and those of other apps that run, are their supervisor's business.
    """
    if store.path is None:
        return []
    alive: dict[str, bool] = {own: True}
    found = []
    registry = WorkerRegistry(store)
    for app in registry.apps() - {own}:
        if not process_lock.lives(store.path, app):
            registry.remove_app(app)
    for job in store.queue():
        if job.instance is None:
            continue
        app = app_of(job.instance)
        if app not in alive:
            alive[app] = process_lock.lives(store.path, app)
        if not alive[app]:
            state = store.interrupt(job.id, job.instance, _finished(job))
            if state is not None:
                logger.info("job %s: its process died; %s", job.id, state)
                found.append(job.id)
            for folder in {job.output.parent} if job.kind == "video" else ():
                sweep(folder)
    return found


def settle_worker(store: JobStore, worker: str, how: str, *, out_of_memory: bool = False) -> None:
    """Decide what becomes of what a worker ran when it died.

    A video or a build is queued again in its old place and resumes by itself, once. A second death fails it.

    Args:
        how: the worker ended, in a few words.
        out_of_memory: whether the system killed it for lack of memory.

    Raises:
        StoreError: if the store cannot be written.
    """
    for job in store.running_on(worker):
        saved = _finished(job)
        if job.kind == "video":
            sweep(job.output.parent)
        if saved is not None or job.pending == "cancel":
            store.interrupt(job.id, worker, saved)
            continue
        death = {"event": "WorkerDied", "how": how, "out_of_memory": out_of_memory, **_at_work(store, job.id)}
        if job.kind != "task" and store.restart(job.id, worker, death):
            logger.warning("job %s: its worker died (%s); it is queued again", job.id, how)
            continue
        error = StoreError("queue.worker_died" if job.kind == "task" else "queue.worker_died_again", how=how)
        if job.kind == "video":
            store.record(job.id, Failed.because_of(error))
        else:
            store.finish(job.id, "failed", error.fact)


def _at_work(store: JobStore, job_id: str) -> dict[str, str | None]:
    """Return the stage of a running job, and its component at work."""
    for _, _, values in reversed(store.events(job_id)):
        if values["event"] == "StageStarted":
            return {"stage": values["stage"], "part": values["part"]}
        if values["event"] == "Planned":
            break
    return {"stage": None, "part": None}


def purge(store: JobStore, outputs_dir: Path, older_than: float = KEPT_SECONDS) -> int:
    """Remove jobs permanently that were deleted more than `older_than` seconds ago; return their number.

    Their files are removed too, except for videos outside `outputs_dir`: the user chose that place.
    """
    removed = store.purge(older_than)
    for job in removed:
        remove_files(store, job, outputs_dir)
    return len(removed)


def remove_files(store: JobStore, job: JobRecord, outputs_dir: Path) -> None:
    """Remove a job's folder, and its video if that is in `outputs_dir`."""
    folder = store.folder(job.id)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if job.kind == "video" and job.output.parent == outputs_dir:
        with contextlib.suppress(OSError):
            job.output.unlink()


def tidy(store: JobStore, outputs_dir: Path) -> None:
    """Remove leftovers of killed processes: partial videos, and folders of jobs that are not in the store.

    Raises:
        StoreError: if the store cannot be read; no folder is removed then.
    """
    if outputs_dir.is_dir():
        sweep(outputs_dir)
    # The user may repair the backup of a damaged store, so the folders of its jobs stay.
    if store.path is None or store.notice or any(store.path.parent.glob(f"{store.path.name}.damaged-*")):
        return
    folders = {folder.name: folder for folder in (store.path.parent / "jobs").glob("[0-9a-f]" * 8)}
    for name in set(folders) - store.known(folders):
        shutil.rmtree(folders[name], ignore_errors=True)


def _finished(job: JobRecord) -> VideoSaved | None:
    """Return the result of a job from its video's metadata; `None` if the video is missing or another job's."""
    if job.kind != "video" or not job.output.is_file():
        return None
    try:
        metadata = read_metadata(job.output)
        saved = VideoSaved.model_validate({**metadata, "video": job.output})
    except (TandemError, ValidationError):
        return None
    return saved if metadata.get("job") == job.id else None
