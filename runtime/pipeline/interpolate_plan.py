"""What interpolating a video file makes, and how long it takes, known before anything is computed. Imports no torch."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from runtime.core.estimates import Seconds
from runtime.core.plan import Interpolator, default_crf
from runtime.core.request import AUTO
from runtime.machine.probe import Machine
from runtime.planner.forecast import process_seconds
from runtime.planner.frame_networks import FrameCalls
from runtime.planner.history import History, Run
from runtime.planner.interpolation import Interpolation, check_rate
from runtime.planner.memory_model import DTYPE_BYTES
from runtime.video.reader import VideoInfo


@dataclass(frozen=True, kw_only=True)
class InterpolationPlan:
    """What to interpolate; the MP4 as `conversion.ConversionPlan` describes it.

    Attributes:
        source: the video.
        factor: frames of the result for each of the source.
        slow: whether the rate stays, so that the video gets longer, and its sound is left out.
        requested_crf: of the MP4, by default as for generated videos.
        calls: of the network that computes new frames; `None` for ffmpeg.
    """

    source: VideoInfo
    factor: int
    output: Path
    slow: bool = False
    requested_crf: int | None = None
    calls: FrameCalls | None = None

    def __post_init__(self) -> None:
        """Check the frame rate.

        Raises:
            InvalidRequestError: if it would be too high.
        """
        if not self.slow:
            check_rate(self.source.rate, self.factor, "factor", "slow")

    @property
    def height(self) -> int:
        """Pixels of the result; H.264 needs an even number, so an odd one loses a row."""
        return self.source.height // 2 * 2

    @property
    def width(self) -> int:
        """Pixels of the result, an even number."""
        return self.source.width // 2 * 2

    @property
    def fps(self) -> int | Fraction:
        """Frames per second of the result."""
        rate = self.source.rate if self.slow else self.source.rate * self.factor
        return rate.numerator if rate.denominator == 1 else rate

    @property
    def crf(self) -> int:
        """Of the MP4."""
        return default_crf(self.width, self.height) if self.requested_crf is None else self.requested_crf

    @property
    def by(self) -> Interpolator:
        """What computes new frames."""
        return "minterpolate" if self.calls is None else "network"

    @property
    def _by_ffmpeg(self) -> Interpolation:
        return Interpolation(self.source.width, self.source.height, self.factor, stage=False)

    @property
    def load_seconds(self) -> float:
        """About how long a new process takes to import its libraries and to read the weights."""
        calls = self.calls
        return process_seconds(0 if calls is None else calls.spec.total_parameters * DTYPE_BYTES[calls.dtype])

    def seconds(self, machine: Machine, history: History) -> Seconds | None:
        """Return how long interpolating takes, without loading; `None` if the length of the source is not known."""
        frames, calls = self.source.frames, self.calls
        if frames is None:
            return None
        if calls is None:
            return self._by_ffmpeg.seconds(frames, machine, history)
        return calls.seconds(frames * (self.factor - 1), calls.kind(machine, AUTO), machine, history)

    def run(self, frames: int, seconds: float, machine: Machine, *, loaded: bool) -> Run:
        """Return the run that records how long so many frames of the source took."""
        calls = self.calls
        if calls is None:
            return self._by_ffmpeg.run(frames, seconds, machine, loaded=loaded)
        return calls.run(calls.kind(machine, AUTO), seconds, frames * (self.factor - 1), loaded=loaded)
