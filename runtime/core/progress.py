"""Progress of a job for display: its events folded into the state of a progress line or bar, with the time left.

`Pace` estimates the remaining time from the plan's forecast and the measured steps. Before the first step only the
forecast counts. Each step halves the weight of the forecast in favor of the measured median. Decoding, which comes
last, is expected to deviate from its forecast as much as the steps do. Frames are interpolated and enlarged while
others are decoded, so all count as one part, which is done as far as frames are finished.

The share that is done weighs the parts of a job by their forecast seconds. Within a part whose work is not counted,
such as loading, it moves with time, the slower the more the part exceeds its forecast.
"""

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from runtime.core.events import (
    FINISHING,
    STAGE_TITLES,
    Cancelled,
    EngineProgress,
    Event,
    Failed,
    FellBack,
    FramesDecoded,
    FramesFinished,
    OutOfMemory,
    Paused,
    Planned,
    Resumed,
    Stage,
    StageStarted,
    StepDone,
    TerminalEvent,
    VideoSaved,
    WaitsForDisk,
    WaitsForGpus,
    Warned,
)
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.preprocessors import PREPROCESSOR

# The first step includes warm-up; it is left out of the median from this many steps on.
_STEPS_FOR_MEDIAN = 3
# Share of a job that saving the video counts as.
_SAVING = 0.02
_PARTS = ("load", "encode", "denoise", "decode")
# Share of a part that is expected to progress evenly; what remains takes longer and longer.
_STEADY = 0.7
_IMAGE_PARTS = ("image_encoder", "vae_encoder")
# The stages of commands that make a video of a file, without a plan.
_OF_FILES = ("decode", *FINISHING)
# The last stages, in which frames are made.
OF_FRAMES = frozenset({"decode", *FINISHING})
_COMPONENT: dict[str, str] = {"encode": "text_encoder", "decode": "vae"}


@dataclass(frozen=True)
class Pace:
    """Measured and expected times of a job.

    Attributes:
        plan: with its forecast.
        stage, part: running since `began`; `last` is the time of the last measurement.
        encoded: whether the prompt is encoded.
        loaded: components that are in memory.
        loading: seconds that loading took, and its forecast.
        step: steps done.
        expert: the running transformer.
        forecast, expected: seconds of one of its steps, from the plan and corrected by the previous transformer.
        measured: seconds of each of its steps; all three by the step's cost, see `ExecutionPlan.step_costs`.
        frames: of the video: decoded, or finished if the plan interpolates or enlarges them.
    """

    plan: ExecutionPlan | None = None
    stage: Stage | None = None
    part: str | None = None
    began: float = 0.0
    last: float = 0.0
    encoded: bool = False
    loaded: frozenset[str] = frozenset()
    loading: tuple[float, float] = (0.0, 0.0)
    step: int = 0
    expert: str | None = None
    forecast: float = 0.0
    expected: float = 0.0
    measured: tuple[float, ...] = ()
    frames: int = 0

    @property
    def median_step(self) -> float | None:
        """Median seconds per computed step of this transformer; `None` before its first step."""
        if not self.measured:
            return None
        return median(self.measured[1:] if len(self.measured) >= _STEPS_FOR_MEDIAN else self.measured)

    @property
    def step_seconds(self) -> float:
        """Expected seconds of the next step that is computed."""
        middle = self.median_step
        if middle is None:
            return self.expected
        trust = 0.5 ** len(self.measured)
        return trust * self.expected + (1 - trust) * middle

    def left(self, now: float) -> float | None:
        """Return the seconds until the video is saved; `None` if nothing is known of the running stage."""
        plan = self.plan
        if plan is None or not plan.seconds or self.stage == "build":
            return None
        if self.stage == "save":
            return 0.0
        return self._encode(plan, now) + self._loads(plan, now) + self._steps(plan, now) + self._decode(plan, now)

    def fraction(self, now: float) -> float:
        """Return the share of the job that is done, 0 to 1."""
        plan = self.plan
        if plan is None:
            return 0.0
        if self.stage == "save":
            saving = _SAVING * sum(_weight(plan, part) for part in _PARTS)
            return 1 - _SAVING * (1 - _share_of_time(now - self.began, saving))
        total = sum(_weight(plan, part) for part in _PARTS)
        done = (
            self._loaded_share(plan, now) * _weight(plan, "load")
            + self._encoded_share(plan, now) * _weight(plan, "encode")
            + self._denoised_share(plan, now) * _weight(plan, "denoise")
            + self._decoded_share(plan, now) * _weight(plan, "decode")
        )
        return (1 - _SAVING) * done / total if total else 0.0

    def _loaded_share(self, plan: ExecutionPlan, now: float) -> float:
        forecasts = {name: _load_forecast(plan, name) for name in plan.components}
        total = sum(forecasts.values())
        if not total:
            return 0.0
        done = sum(seconds for name, seconds in forecasts.items() if name in self.loaded or self._passed(plan, name))
        if self.stage == "load" and self.part in forecasts and self.part not in self.loaded:
            done += forecasts[self.part] * _share_of_time(now - self.began, forecasts[self.part])
        return done / total

    def _passed(self, plan: ExecutionPlan, name: str) -> bool:
        """Return whether a component is not loaded any more in this job; engines are built before all loading."""
        names = list(plan.components)
        return self.stage != "build" and self.part in names and names.index(name) < names.index(self.part)

    def _encoded_share(self, plan: ExecutionPlan, now: float) -> float:
        if self.encoded:
            return 1.0
        return _share_of_time(now - self.began, _weight(plan, "encode")) if self.stage == "encode" else 0.0

    def _denoised_share(self, plan: ExecutionPlan, now: float) -> float:
        done, total = sum(plan.step_costs[: self.step]), sum(plan.step_costs)
        running = self.next_cost(plan) * _share_of_time(now - self.last, self._next_seconds(plan))
        return (done + (running if self.stage == "denoise" and done < total else 0.0)) / total

    def _decoded_share(self, plan: ExecutionPlan, now: float) -> float:
        share = self.frames / plan.video_frames
        if self.stage not in OF_FRAMES:
            return share
        # Up to the end of the section, and of a video that is made whole to its end.
        goal = 1.0 if plan.sections == 1 else min((self.step // plan.steps) / plan.sections, 1.0)
        rest = max(goal - share, 0.0)
        return share + rest * _share_of_time(now - self.last, rest * self._scaled(_weight(plan, "decode")))

    def section_left(self, now: float) -> float | None:
        """Return the seconds until the section that is made is finished; `None` if none is made or it is unknown."""
        plan = self.plan
        if plan is None or not plan.seconds or plan.sections == 1 or self.stage not in {"denoise", "decode"}:
            return None
        elapsed = now - self.last
        decode = self._scaled(plan.seconds["decode"].likely) / plan.sections
        if self.stage == "decode":
            return max(decode - elapsed, 0.0)
        steps = plan.steps - self.step % plan.steps
        return max(steps * self.step_seconds - min(elapsed, self.step_seconds), 0.0) + decode

    def after(self, event: Event, now: float) -> "Pace":
        """Return the pace after `event`, which happened at `now`."""
        if isinstance(event, Planned):
            denoise = event.plan.seconds["denoise"].likely if event.plan.seconds else 0.0
            per_step = denoise / sum(event.plan.step_costs)
            return Pace(plan=event.plan, last=now, began=now, forecast=per_step, expected=per_step)
        if isinstance(event, Resumed):
            return replace(self, encoded=True, step=event.step, frames=_frames_after(self.plan, event.step))
        if isinstance(event, StageStarted):
            return self._entering(event, now)
        if isinstance(event, StepDone):
            # A step that a step cache serves says nothing of the others.
            cost = 1.0 if self.plan is None else self.plan.step_costs[event.step - 1]
            measured = (*self.measured, event.seconds / cost) if cost else self.measured
            return replace(self, step=event.step, measured=measured, last=now)
        if isinstance(event, FramesFinished) or (isinstance(event, FramesDecoded) and not self._finishes):
            return replace(self, frames=event.frames, last=now)
        if isinstance(event, OutOfMemory) and event.plan is not None:
            # Everything is freed; the job continues at another speed.
            slower = event.slowdown
            return replace(
                self,
                plan=event.plan,
                loaded=frozenset(),
                expected=self.step_seconds * slower,
                forecast=self.forecast * slower,
                measured=(),
                frames=_frames_after(event.plan, self.step),
                last=now,
                began=now,
            )
        return self

    @property
    def _finishes(self) -> bool:
        """Whether decoded frames are interpolated or enlarged, without which a frame is not finished."""
        return self.plan is not None and self.plan.keeps_plain

    def _entering(self, event: StageStarted, now: float) -> "Pace":
        if self.plan is None:
            return self
        if self.stage in OF_FRAMES and event.stage in FINISHING:
            # Frames are decoded meanwhile.
            return replace(self, stage=event.stage, part=event.part)
        pace = self
        if self.stage == "load" and self.part is not None:
            took, forecast = self.loading
            loading = (took + now - self.began, forecast + _load_forecast(self.plan, self.part))
            pace = replace(pace, loaded=pace.loaded | {self.part}, loading=loading)
        part = event.part or _COMPONENT.get(event.stage)
        runs = event.stage in {"encode", "denoise", "decode"}
        if runs and part is not None and part in self.plan.components and part not in pace.loaded:
            # It was in memory already, so the other components that stay loaded are too.
            stay = {name for name in self.plan.components if self.plan.strategy.keeps(name)}
            pace = replace(pace, loaded=pace.loaded | stay | {part})
        if event.stage == "denoise" and part != pace.expert:
            pace = pace._with_expert(self.plan, part)
        # The prompt and images are encoded before a transformer or the VAE's decoder is loaded.
        after_encoding = (
            event.stage == "load" and part is not None and (part == "vae" or part.startswith("transformer"))
        )
        encoded = pace.encoded or after_encoding or event.stage in {"denoise", "decode", "save"}
        return replace(pace, stage=event.stage, part=part, encoded=encoded, began=now, last=now)

    def _with_expert(self, plan: ExecutionPlan, expert: str | None) -> "Pace":
        """Return the pace of another transformer, whose guidance may need another number of calls per step."""
        ratio = _passes(plan, expert) / _passes(plan, self.expert) if self.expert else 1.0
        return replace(
            self, expert=expert, forecast=self.forecast * ratio, expected=self.step_seconds * ratio, measured=()
        )

    def _encode(self, plan: ExecutionPlan, now: float) -> float:
        if self.encoded:
            return 0.0
        seconds = plan.seconds["encode"].likely
        return max(seconds - (now - self.began), 0.0) if self.stage == "encode" else seconds

    def _loads(self, plan: ExecutionPlan, now: float) -> float:
        names = list(plan.components)
        # What runs before the transformers.
        encoders = names.index("transformer")
        current = names.index(self.part) if self.part in names else self.encoded * encoders
        took, forecast = self.loading
        total = plan.seconds["load"].likely
        trust = forecast / total if total else 0.0
        slower = 1.0 + trust * (took / forecast - 1.0) if forecast else 1.0
        time_left = 0.0
        for name in names[current:]:
            seconds = 0.0 if name in self.loaded else slower * _load_forecast(plan, name)
            running = self.stage == "load" and name == self.part
            time_left += max(seconds - (now - self.began), 0.0) if running else seconds
        return time_left

    def _steps(self, plan: ExecutionPlan, now: float) -> float:
        # A step that takes longer than expected does not shorten the estimate of the following steps.
        elapsed = min(now - self.last, self._next_seconds(plan)) if self.stage == "denoise" else 0.0
        return max(sum(plan.step_costs[self.step :]) * self.step_seconds - elapsed, 0.0)

    def next_cost(self, plan: ExecutionPlan) -> float:
        """Return the cost of the next step that is computed, see `ExecutionPlan.step_costs`; 1 after the last."""
        return next((cost for cost in plan.step_costs[self.step :] if cost), 1.0)

    def _next_seconds(self, plan: ExecutionPlan) -> float:
        return self.next_cost(plan) * self.step_seconds

    def _scaled(self, seconds: float) -> float:
        """Return a forecast of decoding that deviates as much as the steps do."""
        return seconds * self.step_seconds / self.forecast if self.forecast else seconds

    def _decode(self, plan: ExecutionPlan, now: float) -> float:
        seconds = self._scaled(_weight(plan, "decode"))
        if plan.sections > 1:
            # Between the steps of sections: what is measured of one includes none of the others.
            elapsed = now - self.last if self.stage == "decode" else 0.0
            return max(seconds * (1 - self.frames / plan.video_frames) - elapsed, 0.0)
        if self.stage not in OF_FRAMES:
            return seconds
        # The first chunk is a single frame and a poor measure of the others.
        if self.frames <= 1:
            return max(seconds - (now - self.began), 0.0)
        share = self.frames / plan.video_frames
        trust = min(2 * share, 1.0)
        measured = (self.last - self.began) * (1 - share) / share
        return max(trust * measured + (1 - trust) * seconds * (1 - share) - (now - self.last), 0.0)


def _weight(plan: ExecutionPlan, part: str) -> float:
    """Return the forecast seconds of a part of a job; of a plan without a forecast, its operations.

    Decoding includes that frames are interpolated and enlarged.
    """
    if plan.seconds:
        parts = (part, *FINISHING) if part == "decode" else (part,)
        return sum(plan.seconds[name].likely for name in parts if name in plan.seconds)
    return {"denoise": plan.total_steps * plan.step_flops, "decode": plan.decode_flops}.get(part, 0.0)


def _share_of_time(elapsed: float, forecast: float) -> float:
    """Return about how much of a part is done after a time: 85% at its forecast, 94% at twice that, never all."""
    if forecast <= 0:
        return 0.0
    ratio = max(elapsed, 0.0) / forecast
    # A hyperbola that continues the straight line at the same slope.
    return ratio if ratio <= _STEADY else 1 - (1 - _STEADY) ** 2 / (ratio + 1 - 2 * _STEADY)


def _frames_after(plan: ExecutionPlan | None, step: int) -> int:
    """Return about how many frames of finished sections there are after a step; none of a video that is made whole."""
    return 0 if plan is None or plan.sections == 1 else step // plan.steps * (plan.frames // plan.sections)


def _load_forecast(plan: ExecutionPlan, name: str) -> float:
    total = sum(part.weights_bytes for part in plan.components.values())
    return plan.seconds["load"].likely * plan.components[name].weights_bytes / total if total else 0.0


def _passes(plan: ExecutionPlan, expert: str | None) -> int:
    """Return how often a transformer is called per step."""
    scale = plan.guidance_scale_2 if expert == "transformer_2" else plan.guidance_scale
    return plan.guidance_passes if (scale or 0.0) > 1 else 1


@dataclass(frozen=True)
class Progress:
    """The progress of a job at one moment.

    Attributes:
        plan: once it is known.
        stage: the running stage.
        part: its component.
        building: the latest progress of an engine build.
        step, steps: denoising steps done, and their number.
        frames, frame_count: frames decoded, or finished while they are interpolated or enlarged, and their number.
        pace: measured and estimated times.
        now: the moment, in seconds of a monotonic clock.
        reached: the share that was done at the last event.
        preview: the latest preview, an animated WebP.
        warnings: so far.
        paused: whether this run of the job ended in a pause.
        end: the terminal event.
        waits: the GPUs or the disk space that the job waits for, before it starts.
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
    reached: float = 0.0
    preview: bytes | None = None
    warnings: tuple[Fact, ...] = ()
    paused: bool = False
    end: VideoSaved | Failed | Cancelled | None = None
    waits: WaitsForDisk | WaitsForGpus | None = None

    @property
    def seconds_per_step(self) -> float | None:
        """Median seconds per step of the running transformer; `None` before its first step."""
        middle = self.pace.median_step
        return None if middle is None or self.plan is None else middle * self.pace.next_cost(self.plan)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the video is saved; `None` if unknown, for instance while an engine is built."""
        if self.plan is None and self.stage in _OF_FILES and 0 < self.frames <= self.frame_count:
            elapsed = self.pace.last - self.pace.began
            ahead = elapsed * (self.frame_count - self.frames) / self.frames
            return max(ahead - (self.now - self.pace.last), 0.0)
        return 0.0 if self.end is not None else self.pace.left(self.now)

    @property
    def fraction(self) -> float:
        """Share of the job that is done, 0 to 1; it decreases only if memory ran out or the job starts again."""
        if isinstance(self.end, VideoSaved):
            return 1.0
        if self.plan is None and self.frame_count:
            return min(self.frames / self.frame_count, 1.0)
        is_stopped = self.paused or self.end is not None
        return self.reached if is_stopped else max(self.reached, self.pace.fraction(self.now))

    @property
    def section(self) -> int:
        """The section that is made, from 1, of `ExecutionPlan.sections`; 0 for a video that is made whole."""
        if self.plan is None or self.plan.sections == 1 or self.stage not in {"denoise", "decode"}:
            return 0
        # While a section is decoded, its steps are done.
        return min((self.step - (self.stage == "decode")) // self.plan.steps + 1, self.plan.sections)

    @property
    def section_step(self) -> int:
        """The step that runs in the section that is made, from 1; for a video that is made whole, in the video."""
        if self.plan is None or self.plan.sections == 1:
            return min(self.step + 1, self.steps)
        return min(self.step, self.steps - 1) % self.plan.steps + 1

    @property
    def section_seconds_left(self) -> float | None:
        """Seconds until the section that is made is finished; `None` if none is made or it is unknown."""
        return None if self.end is not None else self.pace.section_left(self.now)

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
        if self.stage == "encode" and self.part == PREPROCESSOR:
            return "Making control frames"
        if self.stage == "encode" and self.part in _IMAGE_PARTS:
            return "Reading the image" if self.plan is None or self.plan.video is None else "Reading the video"
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
            return Progress(plan=plan, steps=plan.total_steps, frame_count=plan.frames, pace=pace, now=now)
        at_event = replace(self, pace=pace, now=now, reached=self.at(now).fraction, **self._changes(event))
        return replace(at_event, reached=0.0) if isinstance(event, OutOfMemory) and event.plan is not None else at_event

    def _changes(self, event: Event) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if isinstance(event, StageStarted):
            changes = {"stage": event.stage, "part": event.part, "building": None}
        elif isinstance(event, EngineProgress):
            changes = {"building": event}
        elif isinstance(event, Resumed):
            changes = {"step": event.step, "frames": _frames_after(self.plan, event.step)}
        elif isinstance(event, StepDone):
            changes = {"step": event.step, "part": event.part, "preview": event.preview or self.preview}
        elif isinstance(event, FramesFinished):
            changes = {"frames": event.frames, "frame_count": event.of}
        elif isinstance(event, FramesDecoded):
            changes = {"preview": event.preview or self.preview}
            if self.stage not in FINISHING or self.plan is None:
                changes["frames"] = event.frames
            changes["frame_count"] = self.frame_count or event.of
        elif isinstance(event, OutOfMemory):
            changes = {"plan": event.plan or self.plan, "warnings": (*self.warnings, event.fact)}
            changes["frames"] = _frames_after(self.plan, self.step)
            changes["frame_count"] = self.frame_count if self.plan is None else self.plan.frames
        elif isinstance(event, Warned | FellBack):
            # A command of the owner may fail after the end.
            end = self.end.with_warning(event.fact) if isinstance(self.end, VideoSaved) else self.end
            changes = {"warnings": (*self.warnings, event.fact), "end": end}
        elif isinstance(event, Paused):
            changes = {"paused": True}
        elif isinstance(event, WaitsForDisk | WaitsForGpus):
            changes = {"waits": event}
        elif isinstance(event, TerminalEvent):
            changes = {"end": event}
        return changes
