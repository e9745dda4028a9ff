"""How long new frames between those of a video take, and interpolation as a stage of a video's plan. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import Seconds
from runtime.core.plan import PYTORCH, ExecutionPlan, Interpolator
from runtime.core.request import INTERPOLATIONS, MAX_VIDEO_FPS, OFF
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.history import History, Kind, Run, device_name, seconds_per_call

FACTORS = tuple(int(value) for value in INTERPOLATIONS if value != OFF)
# `Kind.component`, and the backends of its runs.
INTERPOLATOR = "interpolator"
BACKENDS: Mapping[Interpolator, str] = {"network": PYTORCH, "minterpolate": "ffmpeg"}
# `Kind.speed` of a stage of a job: without reading and encoding, which files take.
_STAGE = "stage"
# Pixels of new frames a second: on the one core that ffmpeg uses; by the network on 2 cores, and on a GPU, which is a
# guess. And the range of the estimate.
_RATE, _NETWORK_RATE, _NETWORK_RATE_ON_GPU = 3e6, 0.5e6, 40e6
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
        by: what computes them.
        device: a torch device, where the network does.
    """

    width: int
    height: int
    factor: int
    stage: bool
    by: Interpolator = "minterpolate"
    device: str = "cpu"

    @classmethod
    def of(cls, plan: ExecutionPlan) -> "Interpolation":
        """Return that of a plan."""
        device = plan.components["vae"].device if plan.interpolator == "network" else "cpu"
        return cls(plan.width, plan.height, plan.interpolation, stage=True, by=plan.interpolator, device=device)

    def _kind(self, machine: Machine) -> Kind:
        return Kind(
            device=device_name(machine, self.device),
            model="",
            component=INTERPOLATOR,
            backend=BACKENDS[self.by],
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
        rate = _RATE
        if self.by == "network":
            rate = _NETWORK_RATE if self.device == "cpu" else _NETWORK_RATE_ON_GPU
        likely = pixels * (self.factor - 1) / rate
        return measured or Seconds(likely, _RANGE[0] * likely, _RANGE[1] * likely)

    def run(self, frames: int, seconds: float, machine: Machine, *, loaded: bool) -> Run:
        """Return the run that records, for later forecasts, how long so many frames took."""
        kind, pixels = self._kind(machine), self._pixels(frames)
        return Run(kind=kind, flops=pixels, seconds=seconds, working_bytes=1, excess_bytes=None, loaded=loaded)


def interpolator_of(spec: ModelSpec) -> Interpolator:
    """Return what computes new frames of a model's videos: the network only where it was trained on what they show."""
    return "network" if spec.interpolates else "minterpolate"


def with_interpolation(plan: ExecutionPlan, spec: ModelSpec, machine: Machine, history: History) -> ExecutionPlan:
    """Return a plan with the requested interpolation and its seconds; without one, the plan unchanged.

    Raises:
        InvalidRequestError: if the video would have too many frames a second.
    """
    if plan.request.interpolate == OFF:
        return plan
    plan = plan.replace(interpolate=plan.request.interpolate, interpolator=interpolator_of(spec))
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
