"""How long new frames between those of a video take, and interpolation as a stage of a video's plan. Pure."""

from dataclasses import dataclass
from fractions import Fraction

from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import Seconds
from runtime.core.plan import ExecutionPlan
from runtime.core.request import INTERPOLATIONS, MAX_VIDEO_FPS, OFF
from runtime.machine.probe import Machine
from runtime.planner.history import History, Kind, Run, device_name, seconds_per_call

FACTORS = tuple(int(value) for value in INTERPOLATIONS if value != OFF)
# `Kind.component`, and the backend of its runs.
INTERPOLATOR, FFMPEG = "interpolator", "ffmpeg"
# `Kind.speed` of a stage of a job: without reading and encoding, which files take.
_STAGE = "stage"
# Pixels of new frames a second, on the one core that ffmpeg uses, and the range of the estimate.
_RATE = 3e6
_RANGE = (0.5, 2.5)


def check_rate(fps: int | Fraction, factor: int, field: str, otherwise: str | list[str]) -> None:
    """Check that a video can have so many times as many frames a second.

    Args:
        otherwise: the setting to use if no factor fits.

    Raises:
        InvalidRequestError: if it would have too many; names `field`.
    """
    if fps * factor > MAX_VIDEO_FPS:
        fitting = [[field, str(smaller)] for smaller in FACTORS if fps * smaller <= MAX_VIDEO_FPS]
        data = {"factor": factor, "fps": float(fps), "most": MAX_VIDEO_FPS, "nearest": [otherwise, *fitting][-1]}
        raise InvalidRequestError(field, "interpolate.too_fast", **data)


@dataclass(frozen=True)
class Interpolation:
    """New frames between those of one video.

    Attributes:
        width, height: of the frames, in pixels.
        factor: frames of the result for each one.
        stage: whether it is a stage of a job; else of a file.
    """

    width: int
    height: int
    factor: int
    stage: bool

    @classmethod
    def of(cls, plan: ExecutionPlan) -> "Interpolation":
        """Return that of a plan."""
        return cls(plan.width, plan.height, plan.interpolation, stage=True)

    def _kind(self, machine: Machine) -> Kind:
        return Kind(
            device=device_name(machine, "cpu"),
            model="",
            component=INTERPOLATOR,
            backend=FFMPEG,
            dtype="uint8",
            quantization="none",
            offload="none",
            speed=" ".join([f"{self.factor} times", *([_STAGE] if self.stage else [])]),
        )

    def _pixels(self, frames: int) -> float:
        return float(max(frames, 1) * self.width * self.height)

    def seconds(self, frames: int, machine: Machine, history: History) -> Seconds:
        """Return how long so many frames take: as measured, else estimated."""
        pixels = self._pixels(frames)
        measured = seconds_per_call(history, self._kind(machine), pixels)
        likely = pixels * (self.factor - 1) / _RATE
        return measured or Seconds(likely, _RANGE[0] * likely, _RANGE[1] * likely)

    def run(self, frames: int, seconds: float, machine: Machine, *, loaded: bool) -> Run:
        """Return the run that records, for later forecasts, how long so many frames took."""
        kind, pixels = self._kind(machine), self._pixels(frames)
        return Run(kind=kind, flops=pixels, seconds=seconds, working_bytes=1, excess_bytes=None, loaded=loaded)


def with_interpolation(plan: ExecutionPlan, machine: Machine, history: History) -> ExecutionPlan:
    """Return a plan with the seconds of the requested interpolation; without one, the plan unchanged.

    Raises:
        InvalidRequestError: if the video would have too many frames a second.
    """
    if plan.request.interpolate == OFF:
        return plan
    plan = plan.replace(interpolate=plan.request.interpolate)
    check_rate(plan.fps, plan.interpolation, "interpolate", ["interpolate", OFF])
    seconds = Interpolation.of(plan).seconds(plan.plain_frames, machine, history)
    return plan.replace(
        seconds={
            **plan.seconds,
            **{name: total + seconds for name, total in plan.seconds.items() if name in {"total", "later"}},
            "interpolate": seconds,
        },
        strategies=tuple(entry.replace(seconds=entry.seconds + seconds) for entry in plan.strategies),
    )
