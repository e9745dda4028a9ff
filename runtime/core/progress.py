"""Progress of a job for display: its events folded into the state of a progress line or bar."""

from dataclasses import dataclass, field, replace
from typing import Any

from runtime.core.events import (
    STAGE_TITLES,
    Cancelled,
    EngineProgress,
    Event,
    Failed,
    FellBack,
    FramesDecoded,
    OutOfMemory,
    Paused,
    Planned,
    Resumed,
    Stage,
    StageStarted,
    StepDone,
    TerminalEvent,
    VideoSaved,
    WaitsForGpus,
    Warned,
)
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.time_left import Pace


@dataclass(frozen=True)
class Progress:
    """The progress of a job at one moment.

    Attributes:
        plan: once it is known.
        stage: the running stage.
        part: its component.
        building: the latest progress of an engine build.
        step, steps: denoising steps done, and their number.
        frames, frame_count: frames decoded, and their number.
        pace: measured and estimated times.
        now: the moment, in seconds of a monotonic clock.
        preview: the latest preview, an animated WebP.
        warnings: so far.
        paused: whether this run of the job ended in a pause.
        end: the terminal event.
        waits: the GPUs that the job waits for, before it starts.
    """

    plan: ExecutionPlan | None = None
    stage: Stage | None = None
    part: str | None = None
    building: EngineProgress | None = None
    step: int = 0
    steps: int = 0
    frames: int = 0
    frame_count: int = 0
    pace: Pace = field(default_factory=Pace, repr=False)
    now: float = 0.0
    preview: bytes | None = None
    warnings: tuple[Fact, ...] = ()
    paused: bool = False
    end: VideoSaved | Failed | Cancelled | None = None
    waits: WaitsForGpus | None = None

    @property
    def seconds_per_step(self) -> float | None:
        """Median seconds per step of the running transformer; `None` before its first step."""
        return self.pace.median_step

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the video is saved; `None` if unknown, for instance while an engine is built."""
        return 0.0 if self.end is not None else self.pace.left(self.now)

    @property
    def fraction(self) -> float:
        """Share of the job's operations that are done, 0 to 1."""
        if isinstance(self.end, VideoSaved):
            return 1.0
        if self.plan is None or not self.steps:
            return 0.0
        denoise = self.plan.steps * self.plan.step_flops
        decoded = self.frames / self.frame_count if self.frame_count else 0.0
        done = self.step / self.steps * denoise + decoded * self.plan.decode_flops
        return min(done / (denoise + self.plan.decode_flops), 1.0)

    @property
    def title(self) -> str:
        """The stage in words, with the component if it is built or loaded."""
        if self.paused:
            return "Paused"
        if self.waits is not None:
            return str(self.waits.fact).rstrip(".")
        if self.stage is None:
            return "Preparing"
        title = STAGE_TITLES[self.stage]
        if self.stage in {"build", "load"} and self.part and self.plan:
            part = self.plan.title(self.part)
            part = part if part.startswith("VAE") else part.lower()
            return f"{title} for the {part}" if self.stage == "build" else f"{title} the {part}"
        return title

    def at(self, now: float) -> "Progress":
        """Return the same progress at `now`, so that the time left counts down between events."""
        return replace(self, now=now)

    def after(self, event: Event, now: float) -> "Progress":
        """Return the progress after `event`, which happened at `now`."""
        pace = self.pace.after(event, now)
        if isinstance(event, Planned):
            # A resumed job starts again with this event.
            plan = event.plan
            return Progress(plan=plan, steps=plan.steps, frame_count=plan.frames, pace=pace, now=now)
        return replace(self, pace=pace, now=now, **self._changes(event))

    def _changes(self, event: Event) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if isinstance(event, StageStarted):
            changes = {"stage": event.stage, "part": event.part, "building": None}
        elif isinstance(event, EngineProgress):
            changes = {"building": event}
        elif isinstance(event, Resumed):
            changes = {"step": event.step}
        elif isinstance(event, StepDone):
            changes = {"step": event.step, "part": event.part, "preview": event.preview or self.preview}
        elif isinstance(event, FramesDecoded):
            changes = {"frames": event.frames, "preview": event.preview or self.preview}
        elif isinstance(event, OutOfMemory):
            changes = {"plan": event.plan or self.plan, "frames": 0, "warnings": (*self.warnings, event.fact)}
        elif isinstance(event, Warned | FellBack):
            changes = {"warnings": (*self.warnings, event.fact)}
        elif isinstance(event, Paused):
            changes = {"paused": True}
        elif isinstance(event, WaitsForGpus):
            changes = {"waits": event}
        elif isinstance(event, TerminalEvent):
            changes = {"end": event}
        return changes
