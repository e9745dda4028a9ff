"""Progress: events folded into what a progress line or bar shows. Knows nothing about who draws it."""

from dataclasses import dataclass, replace
from statistics import median

from runtime.core.events import (
    STAGE_TITLES,
    Cancelled,
    EngineProgress,
    Event,
    Failed,
    FellBack,
    FramesDecoded,
    Planned,
    Stage,
    StageStarted,
    StepDone,
    VideoSaved,
    Warned,
)
from runtime.core.plan import ExecutionPlan

# The first step also warms caches up; with this many or more it is left out of the median.
_STEPS_FOR_MEDIAN = 3


@dataclass(frozen=True)
class Progress:
    """Where a job is.

    Attributes:
        plan: once it is known.
        stage: the running stage.
        part: the component at work.
        building: what an engine's builder said last, and the share done.
        step, steps: denoising steps done, and their number.
        frames, frame_count: frames decoded, and their number.
        step_seconds: duration of each step so far.
        decode_seconds: measured seconds of decoding so far.
        preview: the latest preview, an animated WebP.
        warnings: so far.
        end: the terminal event.
    """

    plan: ExecutionPlan | None = None
    stage: Stage | None = None
    part: str | None = None
    building: EngineProgress | None = None
    step: int = 0
    steps: int = 0
    frames: int = 0
    frame_count: int = 0
    step_seconds: tuple[float, ...] = ()
    stage_started: float = 0.0
    measured: float = 0.0
    now: float = 0.0
    preview: bytes | None = None
    warnings: tuple[str, ...] = ()
    end: VideoSaved | Failed | Cancelled | None = None

    @property
    def seconds_per_step(self) -> float | None:
        """Median seconds of a step, or `None` before the first one."""
        if not self.step_seconds:
            return None
        steady = self.step_seconds[1:] if len(self.step_seconds) >= _STEPS_FOR_MEDIAN else self.step_seconds
        return median(steady)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the video is there, from measured speed; `None` while nothing is measured."""
        if self.end is not None:
            return 0.0
        per_step = self.seconds_per_step
        if self.plan is None or per_step is None:
            return None
        decode = per_step * self.plan.decode_flops / self.plan.step_flops
        if self.stage == "save":
            return 0.0
        # Forecasts hold from the last thing measured, and count down from there.
        since = self.now - self.measured
        # The first chunk is one frame and says little about the others' speed.
        if self.frames > 1:
            decode = (self.measured - self.stage_started) * (self.frame_count - self.frames) / self.frames
        if self.stage == "decode":
            return max(decode - (since if self.frames > 1 else self.now - self.stage_started), 0.0)
        # A step that takes longer than the others does not eat into the time of those to come.
        return max((self.steps - self.step) * per_step - min(since, per_step), 0.0) + decode

    @property
    def fraction(self) -> float:
        """Share of the job's arithmetic that is done, 0 to 1."""
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
        """The stage in words, with the component that is loaded or at work."""
        if self.stage is None:
            return "Preparing"
        title = STAGE_TITLES[self.stage]
        if self.stage in {"build", "load"} and self.part and self.plan:
            part = self.plan.title(self.part)
            part = part if part.startswith("VAE") else part.lower()
            return f"{title} for the {part}" if self.stage == "build" else f"{title} the {part}"
        return title

    def at(self, now: float) -> "Progress":
        """Return the same progress as seen at `now`, so that the time left counts down between events."""
        return replace(self, now=now)

    def after(self, event: Event, now: float) -> "Progress":
        """Return the progress once `event` has happened at `now` (seconds of a monotonic clock)."""
        if isinstance(event, Planned):
            return replace(self, plan=event.plan, steps=event.plan.steps, frame_count=event.plan.frames, now=now)
        if isinstance(event, StageStarted):
            return replace(
                self, stage=event.stage, part=event.part, building=None, stage_started=now, measured=now, now=now
            )
        if isinstance(event, EngineProgress):
            return replace(self, building=event, now=now)
        if isinstance(event, StepDone):
            return replace(
                self,
                step=event.step,
                part=event.part,
                step_seconds=(*self.step_seconds, event.seconds),
                preview=event.preview or self.preview,
                measured=now,
                now=now,
            )
        if isinstance(event, FramesDecoded):
            return replace(self, frames=event.frames, measured=now, now=now)
        if isinstance(event, Warned | FellBack):
            message = event.message if isinstance(event, Warned) else event.reason
            return replace(self, warnings=(*self.warnings, message), now=now)
        return replace(self, end=event, now=now)
