"""What a job tells while it runs.

    WaitsForGpus(wanted, free)  before all else, where the job takes several GPUs and not all of them are free
    Planned                     then, always
    Resumed(step, of)           what an earlier run left is taken up
    EngineProgress              while an engine is built
    StageStarted(stage)         build, load, encode, denoise, decode, save; build comes for each component that has an
                                engine to build, load before each that is not in memory
    FellBack(component)         PyTorch runs it from here on, and why
    StepDone                    after each denoising step
    CheckpointSaved(step)       from here the job can be resumed, whatever happens
    OutOfMemory                 where, of which memory, and what is done about it
    FramesDecoded               after each decoded chunk
    Warned                      something the user should read beside the result
    Paused                      the run ends, the job does not: it can be resumed
    VideoSaved | Failed | Cancelled     last, exactly one

A job that is resumed tells all of it again, from `Planned` on. Events are plain data: they cross threads as they are
and become JSON through `to_json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime.core.plan import ExecutionPlan

Stage = Literal["build", "load", "encode", "denoise", "decode", "save"]

STAGE_TITLES: Mapping[Stage, str] = {
    "build": "Building an engine",
    "load": "Loading",
    "encode": "Reading the prompt",
    "denoise": "Denoising",
    "decode": "Decoding frames",
    "save": "Saving the video",
}


@dataclass(frozen=True)
class WaitsForGpus:
    """The job takes `wanted` GPUs, of which `free` are its own already: others have to end what they do."""

    wanted: int
    free: int

    @property
    def words(self) -> str:
        """For people, without a full stop."""
        free = "1 is" if self.free == 1 else f"{self.free or 'none'} {'are' if self.free else 'is'}"
        return f"Waits for {self.wanted} GPUs: {free} free"


@dataclass(frozen=True)
class Planned:
    """The job starts; `plan` holds every decision."""

    plan: ExecutionPlan


@dataclass(frozen=True)
class StageStarted:
    """A stage begins; `part` names the component where only one is concerned."""

    stage: Stage
    part: str | None = None


@dataclass(frozen=True)
class Resumed:
    """An earlier run had done `step` of `of` steps: with 0 it had read the prompt, with `of` all but decoded."""

    step: int
    of: int


@dataclass(frozen=True)
class EngineProgress:
    """The builder of `component`'s engine says `line`; `share` of the build is done, where that is known."""

    component: str
    line: str
    share: float | None = None


@dataclass(frozen=True)
class FellBack:
    """`component` was to run on `backend` and runs in PyTorch for the rest of the job; `reason` is for people."""

    component: str
    backend: str
    reason: str


@dataclass(frozen=True)
class StepDone:
    """Denoising step `step` of `of` took `seconds`; `preview` is an animated WebP of the clip so far."""

    step: int
    of: int
    seconds: float
    part: str
    preview: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class CheckpointSaved:
    """What is done up to step `step` is on disk."""

    step: int


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """Memory ran out; everything that was loaded is freed.

    Attributes:
        stage, component: where.
        memory: "VRAM" of the GPU, or "RAM" of the machine.
        instead: title of the next more frugal way; empty where there is none.
        flags: what asks for it on the command line.
        times_as_long: how much longer the clip takes that way.
        lossless: whether the video is the same that way.
        lost_seconds: of work that has to be done again.
        taken: whether the job goes on that way by itself; else it fails.
        message: all of this for people.
        plan: from here on, where it goes on.
    """

    stage: Stage
    component: str
    memory: Literal["VRAM", "RAM"]
    instead: str
    flags: str
    slowdown: float
    lossless: bool
    lost_seconds: float
    taken: bool
    message: str
    plan: ExecutionPlan | None = field(default=None, repr=False)


@dataclass(frozen=True)
class FramesDecoded:
    """`frames` of `of` frames are decoded; `preview` is an animated WebP of those so far."""

    frames: int
    of: int
    preview: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Warned:
    """A sentence to show beside the result."""

    message: str


@dataclass(frozen=True, kw_only=True)
class VideoSaved:
    """The job is done and the MP4 is whole.

    Attributes:
        video: its path.
        request: every value as used.
        plan: what ran where, and why.
        timings: seconds of encode, denoise, decode, mux and total, without loading, of all runs of the job.
        load_seconds: seconds spent loading weights, in all runs.
        peak_memory_bytes: of the device on CUDA, of the process elsewhere, in the last run.
        warnings: sentences to show beside the result.
        earlier: of a job that was resumed: the "step" from which, and "timings" and "load_seconds" of the runs before,
            which are part of those above; else empty.
    """

    video: Path
    request: Mapping[str, Any]
    plan: Mapping[str, Any]
    timings: Mapping[str, float]
    load_seconds: float
    peak_memory_bytes: int
    warnings: tuple[str, ...]
    earlier: Mapping[str, Any] = field(default_factory=dict)

    def result_json(self) -> dict[str, Any]:
        """Return the result as the command line's `--json` and the API print it."""
        return {
            "video": str(self.video),
            "request": dict(self.request),
            "seed": self.request["seed"],
            "plan": dict(self.plan),
            "timings": dict(self.timings),
            "load_seconds": self.load_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "warnings": list(self.warnings),
            "earlier": dict(self.earlier),
        }


@dataclass(frozen=True)
class Failed:
    """The job ended without a video. `defect` says that the fault is ours; the traceback is in the log."""

    what: str
    remedy: str
    defect: bool = False


@dataclass(frozen=True)
class Cancelled:
    """Somebody stopped the job; nothing half-written is left."""


@dataclass(frozen=True)
class Paused:
    """Somebody paused the job after `step` of `of` steps: this run of it is over, the next one goes on from there."""

    step: int
    of: int


Event = (
    WaitsForGpus
    | Planned
    | Resumed
    | EngineProgress
    | StageStarted
    | FellBack
    | StepDone
    | CheckpointSaved
    | OutOfMemory
    | FramesDecoded
    | Warned
    | Paused
    | VideoSaved
    | Failed
    | Cancelled
)
TerminalEvent = VideoSaved | Failed | Cancelled

_LARGE = frozenset({"preview", "plan"})


def to_json(event: Event) -> dict[str, Any]:
    """Return the event as JSON types, its name under "event"; previews and `OutOfMemory`'s plan are left out."""
    name = type(event).__name__
    if isinstance(event, Planned):
        return {"event": name, "request": event.plan.request_json(), "plan": event.plan.to_json()}
    if isinstance(event, VideoSaved):
        return {"event": name, **event.result_json()}
    return {"event": name, **{key: value for key, value in vars(event).items() if key not in _LARGE}}
