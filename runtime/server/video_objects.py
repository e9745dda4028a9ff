"""Videos as the HTTP API shows them: OpenAI's fields, and some of Tandem's."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from runtime.core.facts import Fact
from runtime.queue.records import JobRecord, State
from runtime.queue.storage import Retention
from runtime.queue.views import Job
from runtime.server.api_errors import ErrorBody, body_of

Status = Literal["queued", "in_progress", "completed", "failed"]

_STATUSES: Mapping[State, Status] = {
    "queued": "queued",
    "running": "in_progress",
    "done": "completed",
    "failed": "failed",
    "cancelled": "failed",
    "interrupted": "failed",
}
_MOST_RUNNING = 99
_UNLIMITED = Retention()


class Video(BaseModel):
    """One video.

    Attributes:
        created_at, completed_at: seconds since 1970.
        expires_at: seconds since 1970 at which an ended video is deleted because of its age; null without that limit.
        progress: percent.
        seconds: length of the video, as text.
        size: width and height, as in "832x480".
        remixed_from_video_id: always null.
        error: why it failed; its code is "server.api_cancelled" if it was cancelled.
        seed, frames, fps, steps: as used.
        paused: whether the owner of the server has paused it.
    """

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: int
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    size: str
    seconds: str
    prompt: str
    remixed_from_video_id: str | None = None
    error: ErrorBody | None = None
    seed: int | None = None
    frames: int | None = None
    fps: int | None = None
    steps: int | None = None
    paused: bool = False


class VideoList(BaseModel):
    """A page of videos; `last_id` is the `after` of the next one."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool
    retention: Retention


class DeletedVideo(BaseModel):
    """The answer to the deletion of a video."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class Model(BaseModel):
    """A model that requests may name.

    Attributes:
        created: always 0: models have no date.
        title: for people.
        sizes: recommended, as in "832x480".
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str
    title: str
    sizes: list[str]


class ModelList(BaseModel):
    """All models that requests may name."""

    object: Literal["list"] = "list"
    data: list[Model]


def video_of(
    record: JobRecord,
    job: Job | None,
    names: Callable[[str], str],
    redact: Callable[[str], str] = str,
    retention: Retention = _UNLIMITED,
) -> Video:
    """Return a video.

    Args:
        job: the view of a running job.
        names: returns a model's name in this API for that in requests.
        redact: removes from a message what users of the API should not read.
        retention: starred videos stay.
    """
    plan = record.plan
    expires = None
    if not record.open and not record.starred:
        expires = retention.expires_at(record.ended or record.created)
    percent = 100 if record.state == "done" else 0
    if record.state == "running" and job is not None:
        percent = min(round(100 * job.share), _MOST_RUNNING)
    values: dict[str, Any] = {}
    if plan is not None:
        values = {"seed": plan.seed, "frames": plan.frames, "fps": plan.fps, "steps": plan.steps}
    saved = record.saved if record.state == "done" else None
    if saved is not None:  # a video that ended early is shorter
        values["frames"] = saved.frames
    return Video(
        id=record.id,
        model=names(str(record.request.get("model", ""))),
        status=_STATUSES[record.state],
        progress=percent,
        created_at=int(record.created),
        completed_at=int(record.ended) if record.state == "done" and record.ended is not None else None,
        expires_at=None if expires is None else int(expires),
        size="" if plan is None else f"{plan.width}x{plan.height}",
        seconds="" if plan is None else f"{round(values['frames'] / plan.fps, 3):g}",
        prompt=record.prompt,
        error=_error(record, redact),
        paused=record.state == "queued" and record.held,
        **values,
    )


def _error(record: JobRecord, redact: Callable[[str], str]) -> ErrorBody | None:
    if record.state == "cancelled":
        return body_of(Fact("server.api_cancelled"), 400, None, redact)
    if record.state == "interrupted":
        return body_of(Fact("server.interrupted"), 500, None, redact)
    if record.state != "failed":
        return None
    if record.failure is None or record.failure.internal:
        return body_of(Fact("server.api_internal"), 500, None, redact)
    return body_of(record.failure.fact, 400, None, redact)
