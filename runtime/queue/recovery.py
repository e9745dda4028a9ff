"""After a process died: what became of its jobs, and what it left lying about."""

import contextlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runtime.core.errors import TandemError
from runtime.core.events import VideoSaved
from runtime.queue import process_lock
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore
from runtime.video.encode import sweep
from runtime.video.metadata import read_metadata

# How long what was deleted can be had back.
KEPT_SECONDS = 7 * 24 * 3600.0

logger = logging.getLogger(__name__)


def recover(store: JobStore, own: str) -> Sequence[str]:
    """Find the jobs whose process died, note what became of them, and return their ids.

    A job whose video is whole and names it is done: its process died between the two. Others are interrupted.

    Args:
        own: the process that asks.
    """
    if store.path is None:
        return []
    alive: dict[str, bool] = {own: True}
    found = []
    for job in store.queue():
        if job.instance is None:
            continue
        if job.instance not in alive:
            alive[job.instance] = process_lock.lives(store.path, job.instance)
        if not alive[job.instance]:
            state = store.interrupt(job.id, job.instance, _finished(job))
            if state is not None:
                logger.info("job %s: its process died; %s", job.id, state)
                found.append(job.id)
            for folder in {job.output.parent} if job.kind == "video" else ():
                sweep(folder)
    return found


def purge(store: JobStore, outputs_dir: Path, older_than: float = KEPT_SECONDS) -> int:
    """Remove for good what was deleted more than so many seconds ago, and its files; return how many jobs that were.

    A video that lies elsewhere than in `outputs_dir` was put there by somebody for a purpose, and stays.
    """
    gone = store.purge(older_than)
    for job in gone:
        remove_files(store, job, outputs_dir)
    return len(gone)


def remove_files(store: JobStore, job: JobRecord, outputs_dir: Path) -> None:
    """Remove a job's folder, and its video if it lies in `outputs_dir`."""
    folder = store.folder(job.id)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if job.kind == "video" and job.output.parent == outputs_dir:
        with contextlib.suppress(OSError):
            job.output.unlink()


def tidy(store: JobStore, outputs_dir: Path) -> None:
    """Remove what killed processes left behind: half videos, and folders of jobs that are in no store.

    Raises:
        StoreError: if the store cannot be read; no folder is removed then.
    """
    if outputs_dir.is_dir():
        sweep(outputs_dir)
    # What could not be read of a damaged store may be mended by hand: its jobs' folders stay.
    if store.path is None or store.notice or any(store.path.parent.glob(f"{store.path.name}.damaged-*")):
        return
    folders = {folder.name: folder for folder in (store.path.parent / "jobs").glob("[0-9a-f]" * 8)}
    for name in set(folders) - store.known(folders):
        shutil.rmtree(folders[name], ignore_errors=True)


def _finished(job: JobRecord) -> VideoSaved | None:
    """Return what the video of a job says of itself, if it is whole and that job's."""
    if job.kind != "video" or not job.output.is_file():
        return None
    try:
        facts = read_metadata(job.output)
    except TandemError:
        return None
    return _saved(facts, job) if facts.get("job") == job.id else None


def _saved(facts: Mapping[str, Any], job: JobRecord) -> VideoSaved | None:
    try:
        return VideoSaved.model_validate({**facts, "video": job.output})
    except ValidationError:
        return None
