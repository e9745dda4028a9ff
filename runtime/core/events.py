"""Events of a job while it runs: frozen pydantic models.

    WaitsForDisk        first, if the disk of the videos is full
    WaitsForGpus        then, if the job needs several GPUs and not all of them are free
    Planned             then, always
    Resumed             the job continues from a checkpoint
    EngineProgress      repeatedly, while an engine is built
    StageStarted        build, load, encode, denoise, decode, interpolate, upscale, save; "build" once per component
                        with an engine to build, "load" once per component that is not in memory
    FellBack            a component runs in PyTorch from now on instead of on its engine
    StepDone            after each denoising step
    CheckpointSaved     from now on the job can be resumed after this step
    OutOfMemory         memory ran out; the job is retried with the next strategy, or fails
    FramesDecoded       after each decoded chunk
    FramesFinished      after frames that are interpolated or enlarged, while others are decoded
    SectionDone         a section of a video that is made in sections is finished, and on disk
    Warned              a fact to show with the result
    Paused              this run ends without a result; the job can be resumed
    VideoSaved | Failed | Cancelled     last, exactly one of them

A resumed job emits all of them again, starting with `Planned`. Events become JSON by `to_json`, and come back by
`from_json`.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from runtime.core.errors import TandemError
from runtime.core.facts import Fact, Warnings, Words, render
from runtime.core.plan import ExecutionPlan, looped, plain_output

Stage = Literal["build", "load", "encode", "denoise", "decode", "interpolate", "upscale", "save"]

# The stages after decoding.
FINISHING: tuple[Stage, ...] = ("interpolate", "upscale")
STAGE_TITLES: Mapping[Stage, str] = {
    "build": "Building an engine",
    "load": "Loading",
    "encode": "Reading the prompt",
    "denoise": "Denoising",
    "decode": "Decoding frames",
    "interpolate": "Interpolating",
    "upscale": "Upscaling",
    "save": "Saving the video",
}


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)


class WaitsForDisk(_Event):
    """The job needs `wanted` bytes of free space on the disk of its video."""

    event: Literal["WaitsForDisk"] = "WaitsForDisk"
    wanted: int

    @property
    def fact(self) -> Fact:
        """The event as a fact."""
        return Fact("event.waits_for_disk", {"wanted": self.wanted})


class WaitsForGpus(_Event):
    """The job needs `wanted` GPUs and holds `free` of them; other jobs use the rest."""

    event: Literal["WaitsForGpus"] = "WaitsForGpus"
    wanted: int
    free: int

    @property
    def fact(self) -> Fact:
        """The event as a fact."""
        return Fact("event.waits_for_gpus", {"wanted": self.wanted, "free": self.free})


class Planned(_Event):
    """The job starts with this plan, which JSON leaves out: the job's record has it."""

    event: Literal["Planned"] = "Planned"
    plan: ExecutionPlan = Field(exclude=True)


class StageStarted(_Event):
    """A stage begins; `part` is the component if the stage concerns one."""

    event: Literal["StageStarted"] = "StageStarted"
    stage: Stage
    part: str | None = None


class Resumed(_Event):
    """The job continues after `step` of `of` steps: 0 if only the prompt was encoded, `of` if only decoding is left."""

    event: Literal["Resumed"] = "Resumed"
    step: int
    of: int


class EngineProgress(_Event):
    """The engine of `component` is being built: what the build does, and the share done (0 to 1) if known."""

    event: Literal["EngineProgress"] = "EngineProgress"
    component: str
    progress: Fact
    share: float | None = None


class FellBack(_Event):
    """`component` was planned on `backend` and runs in PyTorch for the rest of the job."""

    event: Literal["FellBack"] = "FellBack"
    component: str
    backend: str
    reason: Fact

    @property
    def fact(self) -> Fact:
        """The event as a warning."""
        data = {"component": self.component, "backend": self.backend, "reason": self.reason}
        return Fact("event.fell_back", data)


class StepDone(_Event):
    """Denoising step `step` of `of` took `seconds`; `preview` is an animated WebP of the clip so far."""

    event: Literal["StepDone"] = "StepDone"
    step: int
    of: int
    seconds: float
    part: str
    preview: bytes | None = Field(default=None, repr=False, exclude=True)


class CheckpointSaved(_Event):
    """The state after step `step` is on disk."""

    event: Literal["CheckpointSaved"] = "CheckpointSaved"
    step: int


class OutOfMemory(_Event):
    """Memory ran out. All loaded weights are freed.

    Attributes:
        stage, component: where.
        memory: "VRAM" of the GPU, or "RAM" of the machine.
        retried: whether the job continues by itself with the next strategy; otherwise it fails.
        strategy: the next strategy that needs less memory; `None` if there is none.
        changes: request fields that select this strategy, by name.
        slowdown: how much longer the clip takes with it: 1.2 is 20 % longer.
        lossless: whether the video stays the same with it.
        lost_seconds: of work that is repeated.
        plan: the new plan if the job is retried.
    """

    event: Literal["OutOfMemory"] = "OutOfMemory"
    stage: Stage
    component: str
    memory: Literal["VRAM", "RAM"]
    retried: bool
    strategy: Fact | None = None
    changes: Mapping[str, str] = Field(default_factory=dict)
    slowdown: float = 1.0
    lossless: bool = True
    lost_seconds: float = 0.0
    plan: ExecutionPlan | None = Field(default=None, repr=False, exclude=True)

    @property
    def effects(self) -> list[Fact]:
        """The strategy and what it costs; empty if there is none."""
        if self.strategy is None:
            return []
        slower = [Fact("event.slower", {"times": self.slowdown})] if self.slowdown >= _NOTICEABLE_SLOWDOWN else []
        return [self.strategy, *slower, *([] if self.lossless else [Fact("event.less_exact")])]

    @property
    def fact(self) -> Fact:
        """The event as a warning."""
        data: dict[str, Any] = {"stage": self.stage, "component": self.component, "memory": self.memory}
        if self.strategy is None:
            return Fact("event.out_of_memory", data)
        data["effects"] = self.effects
        if not self.retried:
            return Fact("event.out_of_memory_strategy", data)
        if self.lost_seconds < _NOTICEABLE_SECONDS:
            return Fact("event.out_of_memory_retried", data)
        return Fact("event.out_of_memory_repeated", {**data, "lost_seconds": self.lost_seconds})


class FramesDecoded(_Event):
    """`frames` of `of` frames are decoded, or made of a file; `preview` is an animated WebP of those so far.

    The job's folder has a clip of the first `playable` frames, unless that is 0.
    """

    event: Literal["FramesDecoded"] = "FramesDecoded"
    frames: int
    of: int
    playable: int = 0
    preview: bytes | None = Field(default=None, repr=False, exclude=True)


class FramesFinished(_Event):
    """`frames` of `of` frames of the video are interpolated and enlarged, as far as the plan does that."""

    event: Literal["FramesFinished"] = "FramesFinished"
    frames: int
    of: int


class SectionDone(_Event):
    """Section `section` of `of` is finished; `frames` frames of the video, from `start` on, do not change any more."""

    event: Literal["SectionDone"] = "SectionDone"
    section: int
    of: int
    start: int
    frames: int


class Warned(_Event):
    """A fact to show with the result."""

    event: Literal["Warned"] = "Warned"
    fact: Fact


class VideoSaved(_Event):
    """The job is done and the MP4 is complete.

    Attributes:
        video: path of the MP4.
        request: every field as resolved.
        plan: what ran where, and why, as `ExecutionPlan.to_json` returns it.
        timings: seconds of encode, denoise, decode, mux and total over all runs of the job, without loading; also
            interpolate and upscale if frames were interpolated and enlarged.
        load_seconds: seconds spent on loading weights, in all runs.
        peak_memory_bytes: of the device on CUDA, otherwise of the process, in the last run.
        warnings: facts to show with the result; text where an earlier version or an MP4 file holds it.
        sections: of a video made in sections: how many it has, of how many, and its frames; `None` for another one.
        passes_left_out: the guidance passes that a guidance cache left out, in all runs.
        sound: whether the video has sound.
        earlier: for a resumed job: the "step" that it was resumed after, and "timings" and "load_seconds" of the
            earlier runs, which are included above; otherwise empty.
    """

    event: Literal["VideoSaved"] = "VideoSaved"
    video: Path
    request: Mapping[str, Any]
    plan: Mapping[str, Any]
    timings: Mapping[str, float]
    load_seconds: float
    peak_memory_bytes: int
    warnings: Warnings
    earlier: Mapping[str, Any] = Field(default_factory=dict)
    sections: tuple[int, int, int] | None = None
    passes_left_out: int = 0
    sound: bool = False

    def with_warning(self, fact: Fact) -> "VideoSaved":
        """Return the same result with a further warning, unless it has that."""
        return self if fact in self.warnings else self.model_copy(update={"warnings": (*self.warnings, fact)})

    @property
    def frames(self) -> int:
        """The number of frames in the video."""
        decoded = int(self.request["frames"]) if self.sections is None else self.sections[2]
        # The last of several parts is without the frame that it starts from.
        *earlier, _ = self.plan.get("parts") or [None]
        decoded += sum(int(part["frames"]) for part in earlier) - bool(earlier)
        decoded = looped(decoded, self.plan.get("looping"))
        return decoded * int((self.plan.get("interpolation") or {}).get("factor", 1))

    @property
    def fps(self) -> int:
        """Frames per second of the video."""
        return int((self.plan.get("interpolation") or self.request)["fps"])

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the video in pixels, upscaled if it was."""
        sides = self.plan.get("upscaling") or self.request
        return int(sides["width"]), int(sides["height"])

    @property
    def plain(self) -> Path | None:
        """The video as it was decoded; `None` if it was not interpolated or upscaled, or the file is gone."""
        path = plain_output(self.video)
        return path if self.keeps_plain and path.is_file() else None

    @property
    def keeps_plain(self) -> bool:
        """Whether the video was interpolated or upscaled, and the decoded frames are saved too."""
        return any(self.plan.get(name) is not None for name in ("interpolation", "upscaling"))

    @property
    def continues(self) -> bool:
        """Whether the video ended early, and the job can be continued."""
        return self.sections is not None and self.sections[0] < self.sections[1]

    def result_json(self) -> dict[str, Any]:
        """Return the result as `--json` and the HTTP API return it; warnings are sentences."""
        return {
            "video": str(self.video),
            "request": dict(self.request),
            "seed": self.request["seed"],
            "plan": dict(self.plan),
            "timings": dict(self.timings),
            "load_seconds": self.load_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "warnings": [render(fact, Words(self.plan.get("components", ()))).what for fact in self.warnings],
            "earlier": dict(self.earlier),
            "sections": self.sections,
            "sound": self.sound,
        }


class Failed(_Event):
    """The job ended without a video. `internal` marks an internal error, whose traceback is in the log."""

    event: Literal["Failed"] = "Failed"
    fact: Fact
    internal: bool = False

    @classmethod
    def because_of(cls, error: Exception) -> "Failed":
        """Return the event for an error: a `TandemError`, or any other one, which is internal."""
        if isinstance(error, TandemError):
            return cls(fact=error.fact)
        return cls(fact=Fact("event.internal_error", {"error": repr(error)}), internal=True)

    def error_json(self) -> dict[str, Any]:
        """Return the failure as `--json` has it: fact, and text in the words of the command line."""
        return {**self.fact.model_dump(), "what": self.what, "remedy": self.remedy, "internal": self.internal}

    @property
    def what(self) -> str:
        """The error, in the words of the command line."""
        return render(self.fact).what

    @property
    def remedy(self) -> str:
        """The remedy, in the words of the command line."""
        return render(self.fact).remedy


class Cancelled(_Event):
    """The job was cancelled; no partial file is left."""

    event: Literal["Cancelled"] = "Cancelled"


class Paused(_Event):
    """The job was paused after `step` of `of` steps: this run ends, the next one resumes there."""

    event: Literal["Paused"] = "Paused"
    step: int
    of: int


Event = (
    WaitsForDisk
    | WaitsForGpus
    | Planned
    | Resumed
    | EngineProgress
    | StageStarted
    | FellBack
    | StepDone
    | CheckpointSaved
    | OutOfMemory
    | FramesDecoded
    | FramesFinished
    | SectionDone
    | Warned
    | Paused
    | VideoSaved
    | Failed
    | Cancelled
)
TerminalEvent = VideoSaved | Failed | Cancelled

_NOTICEABLE_SLOWDOWN = 1.05
_NOTICEABLE_SECONDS = 0.5


def to_json(event: Event) -> dict[str, Any]:
    """Return the event as JSON types for programs, with its name as "event"; previews are left out.

    `Planned` has the resolved request and the plan, `VideoSaved` the result.
    """
    if isinstance(event, Planned):
        return {"event": event.event, "request": event.plan.request_json(), "plan": event.plan.to_json()}
    if isinstance(event, VideoSaved):
        return {"event": event.event, **event.result_json()}
    return event.model_dump(mode="json")


def from_json(values: Mapping[str, Any]) -> Event | None:
    """Return an event from what `model_dump` made of it; `None` if this version does not know it."""
    try:
        return _adapter().validate_python(values)
    except ValidationError:
        return None


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Event]:
    return TypeAdapter(Annotated[Event, Field(discriminator="event")])
