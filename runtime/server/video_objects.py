"""Videos as the HTTP API shows them: OpenAI's fields, and some of Tandem's."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runtime.core.facts import Fact, as_text
from runtime.core.plan import ExecutionPlan
from runtime.core.request import MAX_PROMPT_CHARACTERS
from runtime.queue.records import JobRecord, State
from runtime.queue.storage import Retention
from runtime.queue.views import Job
from runtime.server.api_errors import ErrorBody, body_of
from runtime.server.api_words import ApiWords

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
    """One video."""

    id: str = Field(description="The ID of the video.")
    object: Literal["video"] = "video"
    model: str = Field(description="The ID of its model.")
    status: Status = Field(description="A cancelled or interrupted video is failed.")
    progress: int = Field(description="Percent.")
    created_at: int = Field(description="Unix time in seconds.")
    completed_at: int | None = Field(default=None, description="Unix time in seconds.")
    expires_at: int | None = Field(
        default=None,
        description="Unix time in seconds at which the video is deleted; null without an age limit.",
    )
    size: str = Field(description='Width and height in pixels, as in "832x480".')
    seconds: str = Field(description="Length of the video, as text.")
    prompt: str
    original_prompt: str | None = Field(default=None, description="The prompt before it was enhanced, if it was.")
    remixed_from_video_id: str | None = Field(default=None, description="Always null.")
    error: ErrorBody | None = Field(
        default=None, description='Why the video failed. The code is "server.api_cancelled" if it was cancelled.'
    )
    seed: int | None = Field(default=None, description="The seed that was used.")
    frames: int | None = Field(default=None, description="Number of frames.")
    fps: int | None = Field(default=None, description="Frames per second.")
    steps: int | None = Field(default=None, description="Number of denoising steps.")
    sound: bool | None = Field(default=None, description="Whether the completed video has sound.")
    batch: str | None = Field(default=None, description="The ID of its batch, if it was created with others.")
    paused: bool = Field(default=False, description="Whether the owner of the server has paused the video.")


class VideoTags(BaseModel):
    """The metadata of a file of ComfyUI, Wan2GP or FramePack-Studio: texts by names of tags, as ffprobe prints them.

    FramePack-Studio's images have one tag for each setting.
    """

    model_config = ConfigDict(extra="allow")
    comment: str | None = Field(default=None, description="Wan2GP's settings.")
    prompt: str | None = Field(default=None, description="ComfyUI's graph.")
    workflow: str | None = Field(default=None, description="ComfyUI's graph as its editor shows it.")
    json_file: str | None = Field(default=None, alias="json", description="The text of a JSON file of one of them.")


class LeftOut(BaseModel):
    """A setting without a counterpart."""

    name: str
    value: str


class VideoSettings(BaseModel):
    """What another program's settings are here."""

    object: Literal["video.settings"] = "video.settings"
    program: str = Field(description="The program that wrote them.")
    request: dict[str, Any] = Field(description="Fields of a video, to send with a model. Each is valid by itself.")
    their_model: str = Field(description="What the program calls its model; empty if it does not say.")
    nearest_model: str | None = Field(description="The published model that is nearest to it; null if none is known.")
    left_out: list[LeftOut] = Field(description="Settings that are invalid here or have no counterpart.")


class VideoPlan(BaseModel):
    """What a video would take."""

    object: Literal["video.plan"] = "video.plan"
    model: str = Field(description="The ID of its model.")
    size: str = Field(description='Width and height in pixels, as in "832x480".')
    seconds: str = Field(description="Length of the video, as text.")
    frames: int = Field(description="Number of frames.")
    fps: int = Field(description="Frames per second.")
    steps: int = Field(description="Number of denoising steps.")
    duration: float = Field(description="Estimated seconds until it is completed, once its model is loaded.")
    shortest: float = Field(description="The lower bound of that estimate.")
    longest: float = Field(description="The upper bound of that estimate.")
    loading: float = Field(description="Estimated seconds to load its model.")
    memory_bytes: int = Field(description="Estimated peak memory.")
    free_bytes: int = Field(description="Free memory of the device.")
    warnings: list[str]


class VideoBatch(BaseModel):
    """Videos that were created together."""

    id: str | None = Field(description="The ID of the batch; null if it has one video.")
    object: Literal["video.batch"] = "video.batch"
    data: list[Video]


class VideoList(BaseModel):
    """A page of videos."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None = Field(description="Send it as after to get the next page.")
    has_more: bool = Field(description="Whether there is a next page.")
    retention: Retention = Field(description="How long ended videos are kept.")


class DeletedVideo(BaseModel):
    """The answer to the deletion of a video."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class ModelVariant(BaseModel):
    """What a model of the catalogue's variants is: smaller transformers, perhaps with LoRAs that are always used."""

    model: str = Field(description="The published model.")
    name: str = Field(description='The variant, such as "fp8".')
    format: str = Field(description="The format of the transformers.")
    loras: list[str] = Field(description="The LoRAs that are always used.")


class Model(BaseModel):
    """A model that requests may name."""

    id: str = Field(description="The name to send as model.")
    object: Literal["model"] = "model"
    created: int = Field(default=0, description="Always 0: models have no date.")
    owned_by: str
    title: str = Field(description="The name to show to people.")
    sizes: list[str] = Field(description='Recommended sizes, such as "832x480". The first one is the default.')
    steps: int = Field(description="The default number of steps.")
    variant: ModelVariant | None = Field(default=None, description="Of a variant of a published model: which one.")


class ModelList(BaseModel):
    """All models that requests may name."""

    object: Literal["list"] = "list"
    data: list[Model]


class PromptToEnhance(BaseModel):
    """The body of `POST /v1/prompts/enhance`."""

    prompt: str = Field(description="What the video shows.", max_length=MAX_PROMPT_CHARACTERS)
    model: str | None = Field(default=None, description="The model that the prompt is for.")
    from_image: bool = Field(default=False, description="Whether the video begins with an image.")


class EnhancedPrompt(BaseModel):
    """A prompt in more detail."""

    object: Literal["prompt"] = "prompt"
    prompt: str = Field(description="For `prompt` of `POST /v1/videos`.")
    original_prompt: str = Field(description="As it was sent; for `original_prompt`, which is stored with the video.")


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
        values = {"seed": plan.seed, "frames": plan.video_frames, "fps": plan.video_fps, "steps": plan.steps}
    saved = record.saved if record.state == "done" else None
    if saved is not None:  # a video that ended early is shorter
        values |= {"frames": saved.frames, "sound": saved.sound}
    return Video(
        id=record.id,
        model=names(str(record.request.get("model", ""))),
        status=_STATUSES[record.state],
        progress=percent,
        created_at=int(record.created),
        completed_at=int(record.ended) if record.state == "done" and record.ended is not None else None,
        expires_at=None if expires is None else int(expires),
        size="" if plan is None else "{}x{}".format(*plan.video_size),
        seconds="" if plan is None else f"{round(values['frames'] / plan.video_fps, 3):g}",
        prompt=record.prompt,
        original_prompt=record.request.get("original_prompt"),
        batch=record.batch,
        error=_error(record, redact),
        paused=record.state == "queued" and record.held,
        **values,
    )


def plan_of(plan: ExecutionPlan, names: Callable[[str], str], redact: Callable[[str], str] = str) -> VideoPlan:
    """Return what a video would take; see `video_of`."""
    total = plan.seconds["total"]
    return VideoPlan(
        model=names(plan.request.model),
        size="{}x{}".format(*plan.video_size),
        seconds=f"{round(plan.video_frames / plan.video_fps, 3):g}",
        frames=plan.video_frames,
        fps=plan.video_fps,
        steps=plan.steps,
        duration=round(total.likely, 1),
        shortest=round(total.low, 1),
        longest=round(total.high, 1),
        loading=round(plan.seconds["load"].likely, 1),
        memory_bytes=plan.memory_bytes,
        free_bytes=plan.free_bytes,
        warnings=[redact(as_text(fact, ApiWords())) for fact in plan.warnings],
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
