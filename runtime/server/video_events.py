"""Server-sent events of a video: its progress, previews and warnings, until it has ended.

event: video.progress    a Video with "stage", "step", "steps", "frame", "seconds_left" and "ahead"
event: video.preview     {"id", "media_type": "image/webp", "b64_json"}
event: video.warning     {"id", "code", "message"}
event: video.completed, video.failed     the Video; the last event
event: error             {"error": …}: the stream ends before the video
"""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic import BaseModel

from runtime.core.errors import StoreError
from runtime.core.facts import Fact, render
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import JobRecord
from runtime.queue.views import Job
from runtime.server.api_errors import ErrorAnswer, body_of
from runtime.server.api_words import ApiWords
from runtime.server.video_objects import Video
from runtime.server.watchers import Watch

_POLL_SECONDS = 0.1
# The time left counts down at this rate, and the place in the queue is read.
_TICK_SECONDS = 2.0
# Proxies close streams that are silent for longer.
_PING_SECONDS = 15.0


class VideoProgress(Video):
    """A video and how far it is.

    Attributes:
        stage: what it does, as a title.
        step: denoising steps done.
        frame: decoded frames.
        seconds_left: estimated time until it is completed.
        ahead: number of jobs that run before it, while it is queued.
    """

    stage: str
    step: int
    frame: int
    seconds_left: float | None = None
    ahead: int | None = None


async def stream(
    job: Job,
    worker: JobQueue,
    shown: Callable[[JobRecord, Job], Video],
    redact: Callable[[str], str],
    watch: Watch,
) -> AsyncIterator[str]:
    """Yield the events of a job until it or `watch` ends.

    Args:
        shown: returns the video of a record and its view.
        redact: removes from a message what users of the API should not read.
    """
    seen: object = None
    preview: bytes | None = None
    warnings = 0
    sent = time.monotonic()
    while not watch.ended:
        now = time.monotonic()
        progress = job.progress
        key = (progress, job.state, job.held, int(now / _TICK_SECONDS))
        if key != seen:
            seen = key
            try:
                record = await asyncio.to_thread(worker.store.get, job.id)
            except StoreError as error:
                yield _event("error", ErrorAnswer(error=body_of(error.fact, 503, None, redact)))
                return
            if record.deleted is not None:
                yield _event("error", ErrorAnswer(error=_no_video(job.id)))
                return
            video = shown(record, job)
            if progress.preview is not None and progress.preview != preview:
                preview = progress.preview
                encoded = base64.b64encode(preview).decode()
                yield _event("video.preview", {"id": job.id, "media_type": "image/webp", "b64_json": encoded})
            warnings = min(warnings, len(progress.warnings))  # a resumed job starts a new list
            for fact in progress.warnings[warnings:]:
                warnings += 1
                yield _event("video.warning", {"id": job.id, "code": fact.code, "message": redact(_text(fact))})
            if video.status in {"completed", "failed"}:
                yield _event(f"video.{video.status}", video)
                return
            yield _event("video.progress", await asyncio.to_thread(_progress, video, job, worker, now))
            sent = now
        elif now - sent > _PING_SECONDS:
            sent = now
            yield ": ping\n\n"
        await asyncio.sleep(_POLL_SECONDS)
    if watch.reason is not None:
        yield _event("error", ErrorAnswer(error=body_of(watch.reason, 429, None, redact)))


def _progress(video: Video, job: Job, worker: JobQueue, now: float) -> VideoProgress:
    progress = job.progress.at(now)
    queued = video.status == "queued"
    left = None if queued else progress.seconds_left
    return VideoProgress(
        **dict(video),
        stage="Waiting" if queued else progress.title,
        step=progress.step,
        frame=progress.frames,
        seconds_left=None if left is None else round(left, 1),
        ahead=len(worker.ahead(job)) if queued else None,
    )


def _event(name: str, data: BaseModel | dict[str, Any]) -> str:
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n"


def _text(fact: Fact) -> str:
    return " ".join(render(fact, ApiWords())).strip()


def _no_video(job_id: str) -> Any:
    return body_of(Fact("server.api_no_video", {"video": job_id}), 404, None, str)
