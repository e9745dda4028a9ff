"""What interpolating a video file makes, and how long it takes, known before anything is computed. Imports no torch."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from runtime.core.estimates import Seconds
from runtime.core.plan import Interpolator, default_crf
from runtime.machine.probe import Machine
from runtime.planner.forecast import process_seconds
from runtime.planner.history import History
from runtime.planner.interpolation import Interpolation, check_rate
from runtime.video.reader import VideoInfo


@dataclass(frozen=True, kw_only=True)
class InterpolationPlan:
    """What to interpolate; the MP4 as `conversion.ConversionPlan` describes it.

    Attributes:
        source: the video.
        factor: frames of the result for each of the source.
        slow: whether the rate stays, so that the video gets longer, and its sound is left out.
        requested_crf: of the MP4, by default as for generated videos.
        by, device: see `Interpolation`.
    """

    source: VideoInfo
    factor: int
    output: Path
    slow: bool = False
    requested_crf: int | None = None
    by: Interpolator = "minterpolate"
    device: str = "cpu"

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
    def work(self) -> Interpolation:
        """What the history compares."""
        sides = self.source.width, self.source.height
        return Interpolation(*sides, self.factor, stage=False, by=self.by, device=self.device)

    @property
    def load_seconds(self) -> float:
        """About how long a new process takes to import its libraries."""
        return process_seconds(0)

    def seconds(self, machine: Machine, history: History) -> Seconds | None:
        """Return how long interpolating takes, without loading; `None` if the length of the source is not known."""
        frames = self.source.frames
        return None if frames is None else self.work.seconds(frames, machine, history)
