"""Estimate the remaining time of a job from its plan's forecast and its measured steps.

Before the first step only the forecast counts. Each step halves the weight of the forecast in favour of the measured
median. Decoding, which comes last, is expected to deviate from its forecast as much as the steps do.
"""

from dataclasses import dataclass, replace
from statistics import median

from runtime.core.events import Event, FramesDecoded, OutOfMemory, Planned, Resumed, Stage, StageStarted, StepDone
from runtime.core.plan import ExecutionPlan

# The first step includes warm-up; it is left out of the median from this many steps on.
_STEPS_FOR_MEDIAN = 3
_COMPONENT: dict[str, str] = {"encode": "text_encoder", "decode": "vae"}


@dataclass(frozen=True)
class Pace:
    """Measured and expected times of a job.

    Attributes:
        plan: with its forecast.
        stage, part: running since `began`; `last` is the time of the last measurement.
        read: whether the prompt is encoded.
        loaded: components that are in memory.
        loading: seconds that loading took, and its forecast.
        step: steps done.
        expert: the running transformer.
        forecast, expected: seconds of one of its steps, from the plan and corrected by the previous transformer.
        measured: seconds of each of its steps.
        frames: decoded.
    """

    plan: ExecutionPlan | None = None
    stage: Stage | None = None
    part: str | None = None
    began: float = 0.0
    last: float = 0.0
    read: bool = False
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
        """Median seconds per step of this transformer; `None` before its first step."""
        if not self.measured:
            return None
        return median(self.measured[1:] if len(self.measured) >= _STEPS_FOR_MEDIAN else self.measured)

    @property
    def step_seconds(self) -> float:
        """Expected seconds of the next step."""
        middle = self.median_step
        if middle is None:
            return self.expected
        trust = 0.5 ** len(self.measured)
        return trust * self.expected + (1 - trust) * middle

    def left(self, now: float) -> float | None:
        """Return the seconds until the video is saved; `None` if nothing is known of the running stage."""
        if self.plan is None or not self.plan.seconds or self.stage == "build":
            return None
        if self.stage == "save":
            return 0.0
        return self._encode(now) + self._loads(now) + self._steps(now) + self._decode(now)

    def after(self, event: Event, now: float) -> "Pace":
        """Return the pace after `event`, which happened at `now`."""
        if isinstance(event, Planned):
            denoise = event.plan.seconds["denoise"].likely if event.plan.seconds else 0.0
            per_step = denoise / event.plan.steps
            return Pace(plan=event.plan, last=now, began=now, forecast=per_step, expected=per_step)
        if isinstance(event, Resumed):
            return replace(self, read=True, step=event.step)
        if isinstance(event, StageStarted):
            return self._entering(event, now)
        if isinstance(event, StepDone):
            return replace(self, step=event.step, measured=(*self.measured, event.seconds), last=now)
        if isinstance(event, FramesDecoded):
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
                frames=0,
                last=now,
                began=now,
            )
        return self

    def _entering(self, event: StageStarted, now: float) -> "Pace":
        if self.plan is None:
            return self
        pace = self
        if self.stage == "load" and self.part is not None:
            took, forecast = self.loading
            loading = (took + now - self.began, forecast + self._load_forecast(self.part))
            pace = replace(pace, loaded=pace.loaded | {self.part}, loading=loading)
        part = event.part or _COMPONENT.get(event.stage)
        if event.stage in {"encode", "denoise", "decode"} and part is not None and part not in pace.loaded:
            # It was in memory already, so the other components that stay there are too.
            stay = {name for name in self.plan.components if self.plan.strategy.keeps(name)}
            pace = replace(pace, loaded=pace.loaded | stay | {part})
        if event.stage == "denoise" and part != pace.expert:
            pace = pace._with_expert(part)
        read = pace.read or event.stage in {"denoise", "decode", "save"} or (event.stage, part) == ("load", "vae")
        return replace(pace, stage=event.stage, part=part, read=read, began=now, last=now)

    def _with_expert(self, expert: str | None) -> "Pace":
        """Return the pace of another transformer, whose guidance may need another number of calls per step."""
        ratio = _passes(self.plan, expert) / _passes(self.plan, self.expert) if self.expert else 1.0
        return replace(
            self, expert=expert, forecast=self.forecast * ratio, expected=self.step_seconds * ratio, measured=()
        )

    def _encode(self, now: float) -> float:
        if self.read or self.plan is None:
            return 0.0
        seconds = self.plan.seconds["encode"].likely
        return max(seconds - (now - self.began), 0.0) if self.stage == "encode" else seconds

    def _loads(self, now: float) -> float:
        if self.plan is None:
            return 0.0
        names = list(self.plan.components)
        at = names.index(self.part) if self.part in names else int(self.read)
        took, forecast = self.loading
        whole = self.plan.seconds["load"].likely
        trust = forecast / whole if whole else 0.0
        slower = 1.0 + trust * (took / forecast - 1.0) if forecast else 1.0
        left = 0.0
        for name in names[at:]:
            seconds = 0.0 if name in self.loaded else slower * self._load_forecast(name)
            running = self.stage == "load" and name == self.part
            left += max(seconds - (now - self.began), 0.0) if running else seconds
        return left

    def _load_forecast(self, name: str) -> float:
        assert self.plan is not None
        parts = self.plan.components
        total = sum(part.weights_bytes for part in parts.values())
        return self.plan.seconds["load"].likely * parts[name].weights_bytes / total if total else 0.0

    def _steps(self, now: float) -> float:
        if self.plan is None:
            return 0.0
        # A step that takes longer than expected does not shorten the estimate of the following steps.
        elapsed = min(now - self.last, self.step_seconds) if self.stage == "denoise" else 0.0
        return max((self.plan.steps - self.step) * self.step_seconds - elapsed, 0.0)

    def _decode(self, now: float) -> float:
        if self.plan is None:
            return 0.0
        seconds = self.plan.seconds["decode"].likely
        if self.forecast:
            seconds *= self.step_seconds / self.forecast
        if self.stage != "decode":
            return seconds
        # The first chunk is a single frame and a poor measure of the others.
        if self.frames <= 1:
            return max(seconds - (now - self.began), 0.0)
        share = self.frames / self.plan.frames
        trust = min(2 * share, 1.0)
        measured = (self.last - self.began) * (1 - share) / share
        return max(trust * measured + (1 - trust) * seconds * (1 - share) - (now - self.last), 0.0)


def _passes(plan: ExecutionPlan | None, expert: str | None) -> int:
    """Return how often a transformer is called per step."""
    if plan is None:
        return 1
    scale = plan.guidance_scale_2 if expert == "transformer_2" else plan.guidance_scale
    return 2 if (scale or 0.0) > 1 else 1
