"""What computes new frames between those of a video, how long it takes, and interpolation in a video's plan. Pure."""

from dataclasses import dataclass
from fractions import Fraction

from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import Seconds
from runtime.core.plan import ExecutionPlan, Interpolator
from runtime.core.request import INTERPOLATIONS, INTERPOLATOR, MAX_VIDEO_FPS, OFF
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_offers import Offers
from runtime.planner.frame_networks import FrameCalls, decoding_memory, speed_of, with_frame_network, with_stage
from runtime.planner.history import History, Kind, Run, device_name, seconds_per_call

FACTORS = tuple(int(value) for value in INTERPOLATIONS if value != OFF)
# The backend of ffmpeg's runs.
FFMPEG = "ffmpeg"
# `Kind.speed` of a stage of a job: without reading and encoding, which files take.
_STAGE = "stage"
# Pixels of new frames a second on the one core that ffmpeg uses, and the range of the estimate.
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
    """New frames between those of one video, by ffmpeg; the network's are `FrameCalls`.

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


def interpolator_of(spec: ModelSpec) -> Interpolator:
    """Return what computes new frames of a model's videos: the network only where it was trained on what they show."""
    return "network" if spec.interpolates else "minterpolate"


def network_calls(
    spec: ModelSpec, width: int, height: int, device: str, machine: Machine, used_bytes: int = 0
) -> FrameCalls:
    """Return how the network is called: for one frame, because others depend on it if there are several.

    Args:
        spec: the network.
        width, height, device, used_bytes: see `FrameCalls.of`.
    """
    return FrameCalls.of(spec, height, width, device, machine, used_bytes, batch=1)


def _calls_of(plan: ExecutionPlan, spec: ModelSpec) -> FrameCalls:
    """Return how the network of a plan is called; `spec` is its model's."""
    assert spec.interpolator is not None
    part = plan.components[INTERPOLATOR]
    return FrameCalls(spec.interpolator, plan.height, plan.width, part.device, part.dtype, None, 1)


def run_of(plan: ExecutionPlan, spec: ModelSpec, machine: Machine, seconds: float, *, loaded: bool) -> Run:
    """Return the run that records how long the new frames of a finished job took."""
    if plan.interpolator != "network":
        return Interpolation.of(plan).run(plan.plain_frames, seconds, machine, loaded=loaded)
    calls, part = _calls_of(plan, spec), plan.components[INTERPOLATOR]
    kind = calls.kind(machine, part.backend, speed_of(part))
    return calls.run(kind, seconds, _new_frames(plan), loaded=loaded)


def _new_frames(plan: ExecutionPlan) -> int:
    """The frames that are computed; after the last one there are copies."""
    return max(plan.plain_frames - 1, 1) * (plan.interpolation - 1)


def with_interpolation(
    plan: ExecutionPlan, spec: ModelSpec, machine: Machine, offers: Offers, history: History
) -> ExecutionPlan:
    """Return a plan with the requested interpolation and its seconds; without one, the plan unchanged.

    The network is a component of the plan, ffmpeg is not.

    Raises:
        InvalidRequestError: if the video would have too many frames a second.
    """
    if plan.request.interpolate == OFF:
        return plan
    plan = plan.replace(interpolate=plan.request.interpolate, interpolator=interpolator_of(spec))
    check_rate(plan.fps, plan.interpolation, "interpolate", ["interpolate", OFF])
    if spec.interpolator is None:
        return with_stage(plan, "interpolate", Interpolation.of(plan).seconds(plan.plain_frames, machine, history))
    device, decoding = plan.components["vae"].device, decoding_memory(plan)
    used = decoding.working_bytes if device == "cpu" else decoding.peak_bytes
    calls = network_calls(spec.interpolator, plan.width, plan.height, device, machine, used)
    return with_frame_network(plan, calls, _new_frames(plan), "interpolate", machine, offers, history)
