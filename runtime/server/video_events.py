"""Server-sent events of a video: its progress, previews and warnings, until it has ended.

event: video.progress    a Video with "stage", "step", "steps", "frame", "clip", "seconds_left" and "ahead"
event: video.preview     {"id", "media_type": "image/webp", "b64_json"}
event: video.warning     {"id", "code", "message"}
event: video.completed, video.failed     the Video; the last event
event: error             {"error": …}: the stream ends before the video
"""

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from runtime.core.errors import StoreError, TandemError
from runtime.core.facts import Fact, as_text
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import JobRecord
from runtime.queue.views import Job
from runtime.server.api_errors import ApiError, ErrorAnswer, body_of, status_of
from runtime.server.api_words import ApiWords
from runtime.server.video_objects import Video
from runtime.server.watchers import Watch

# The time left counts down at this rate, and the place in the queue is read.
_TICK_SECONDS = 2.0
# Proxies close streams that are silent for longer.
_PING_SECONDS = 15.0
# A follower that has to end is noticed after this time.
_LOOK_SECONDS = 0.5

logger = logging.getLogger(__name__)


class VideoProgress(Video):
    """A video and its progress."""

    stage: str = Field(description="The current stage, to show to people.")
    step: int = Field(description="Denoising steps done.")
    frame: int = Field(description="Frames decoded, or of the video while it is interpolated or upscaled.")
    clip: str | None = Field(
        default=None,
        description="Path of an MP4 of the finished part: the start of the video or, with some models, its end. "
        "A longer part has another path.",
    )
    seconds_left: float | None = Field(default=None, description="Estimated seconds until the video is completed.")
    ahead: int | None = Field(default=None, description="While queued: number of jobs that run before this one.")


@dataclass(eq=False)
class _Feed:
    """What is newest of one video, as events; who reads slowly misses states in between.

    Attributes:
        warnings: since the job started.
        last: the last event of the stream, once there is one.
        changed: set, and replaced, when anything changes.
        followers: number of streams that read it.
        reader: keeps it up to date.
    """

    progress: str = ""
    preview: str = ""
    warnings: list[str] = field(default_factory=list)
    last: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    followers: int = 0
    reader: "asyncio.Task[None] | None" = None

    def publish(self) -> None:
        """Wake the followers."""
        self.changed.set()
        self.changed = asyncio.Event()


class VideoFeeds:
    """The events of videos. Each video is read and rendered once for all who follow it. For one event loop.

    Args:
        shown: returns the video of a record and its view.
        redact: removes from a message what users of the API should not read.
    """

    def __init__(
        self, worker: JobQueue, describe: Callable[[JobRecord, Job], Video], redact: Callable[[str], str]
    ) -> None:
        self._worker = worker
        self._describe = describe
        self._redact = redact
        self._feeds: dict[str, _Feed] = {}

    async def stream(self, job: Job, watch: Watch, check: Callable[[], None]) -> AsyncIterator[str]:
        """Yield the events of a job until it or `watch` ends.

        Args:
            check: raises an `ApiError` or `TandemError` once the follower may not follow the video any more.
        """
        progress = preview = ""
        warnings = 0
        sent = time.monotonic()
        with self._following(job) as feed:
            while not watch.ended:
                try:
                    check()  # before each event, and as often as a follower that has to end is noticed
                except (ApiError, TandemError) as error:
                    status = error.status_code if isinstance(error, ApiError) else status_of(error)
                    yield _event("error", ErrorAnswer(error=body_of(error.fact, status, None, self._redact)))
                    return
                changed = feed.changed
                events = []
                if feed.preview != preview:
                    preview = feed.preview
                    events.append(preview)
                warnings = min(warnings, len(feed.warnings))
                events += feed.warnings[warnings:]
                warnings = len(feed.warnings)
                if feed.progress != progress and not feed.last:
                    progress = feed.progress
                    events.append(progress)
                if feed.last:
                    events.append(feed.last)
                now = time.monotonic()
                if not events and now - sent > _PING_SECONDS:
                    events.append(": ping\n\n")
                if events:
                    sent = now
                    yield "".join(events)
                if feed.last:
                    return
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), _LOOK_SECONDS)
        if watch.reason is not None:
            yield _event("error", ErrorAnswer(error=body_of(watch.reason, 429, None, self._redact)))

    @contextmanager
    def _following(self, job: Job) -> Iterator[_Feed]:
        feed = self._feeds.get(job.id)
        if feed is None:
            feed = self._feeds[job.id] = _Feed()
            feed.reader = asyncio.create_task(self._read(job, feed))
        feed.followers += 1
        try:
            yield feed
        finally:
            feed.followers -= 1

    async def _read(self, job: Job, feed: _Feed) -> None:
        """Update a feed until its video ends or no stream follows it."""
        last_key: object = None
        preview: bytes | None = None
        try:
            while not feed.last and feed.followers:
                count = job.changes.count
                now, progress = time.monotonic(), job.progress
                key = (progress, job.state, job.held, int(now / _TICK_SECONDS))
                if key != last_key:
                    last_key = key
                    if progress.preview is not None and progress.preview != preview:
                        preview = progress.preview
                        data = {
                            "id": job.id,
                            "media_type": "image/webp",
                            "b64_json": base64.b64encode(preview).decode(),
                        }
                        feed.preview = _event("video.preview", data)
                    del feed.warnings[len(progress.warnings) :]  # a resumed job starts a new list
                    for fact in progress.warnings[len(feed.warnings) :]:
                        message = self._redact(as_text(fact, ApiWords()))
                        feed.warnings.append(
                            _event("video.warning", {"id": job.id, "code": fact.code, "message": message})
                        )
                    feed.progress, feed.last = await asyncio.to_thread(self._render, job, now)
                    feed.publish()
                await job.changes.after(count, _LOOK_SECONDS)
        except Exception:  # internal error: logged, and reported to those who follow the video
            logger.exception("The events of job %s ended", job.id)
            feed.last = _event("error", ErrorAnswer(error=body_of(Fact("server.api_internal"), 500, None, str)))
            feed.publish()
        finally:
            if self._feeds.get(job.id) is feed:
                del self._feeds[job.id]

    def _render(self, job: Job, now: float) -> tuple[str, str]:
        """Read a video; return its progress, or as the second the last event of its stream; the other is empty."""
        try:
            record = self._worker.store.get(job.id)
        except StoreError as error:
            return "", _event("error", ErrorAnswer(error=body_of(error.fact, 503, None, self._redact)))
        if record.deleted is not None:
            return "", _event("error", ErrorAnswer(error=_no_video(job.id)))
        video = self._describe(record, job)
        if video.status in {"completed", "failed"}:
            return "", _event(f"video.{video.status}", video)
        return _event("video.progress", _progress(video, job, self._worker, now)), ""


def _progress(video: Video, job: Job, worker: JobQueue, now: float) -> VideoProgress:
    progress = job.progress.at(now)
    queued = video.status == "queued"
    seconds = None if queued else progress.seconds_left
    clip = job.clip
    return VideoProgress(
        **dict(video),
        stage="Waiting" if queued else progress.title,
        step=progress.step,
        frame=progress.frames,
        clip=None if clip is None else f"/v1/videos/{job.id}/content?variant=clip&count={clip[0]}",
        seconds_left=None if seconds is None else round(seconds, 1),
        ahead=worker.count_ahead(job) if queued else None,
    )


def _event(name: str, data: BaseModel | dict[str, Any]) -> str:
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n"


def _no_video(job_id: str) -> Any:
    return body_of(Fact("server.api_no_video", {"video": job_id}), 404, None, str)
