"""What upscaling a video file makes, how, and how long it takes, known before anything is loaded. Imports no torch."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from runtime.core.estimates import Seconds
from runtime.core.plan import default_crf
from runtime.core.request import AUTO
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.forecast import process_seconds
from runtime.planner.frame_networks import FrameCalls
from runtime.planner.history import History, Kind
from runtime.planner.memory_model import DTYPE_BYTES
from runtime.planner.upscaling import check_size
from runtime.video.reader import VideoInfo


@dataclass(frozen=True, kw_only=True)
class UpscaleRequest:
    """What to upscale.

    Attributes:
        source: the video.
        spec: the upscaler.
        output: the MP4.
        crf: of the MP4, by default as for generated videos.
        backend: see `families.dcae.batched.make_batched_decode_fn`.
    """

    source: VideoInfo
    spec: ModelSpec
    output: Path
    crf: int | None = None
    backend: str = AUTO


@dataclass(frozen=True)
class UpscalePlan:
    """How a video is upscaled.

    Attributes:
        calls: of the upscaler.
    """

    request: UpscaleRequest
    calls: FrameCalls

    @classmethod
    def of(cls, request: UpscaleRequest, machine: Machine, gpu: int = 0) -> "UpscalePlan":
        """Plan a request.

        Args:
            gpu: index of the GPU that upscales, if the machine has GPUs.

        Raises:
            InvalidRequestError: if the result would be too large.
        """
        source, spec = request.source, request.spec
        check_size(source.width, source.height, spec.vae.scale_factor_spatial, "scale")
        device = f"cuda:{gpu}" if machine.gpus and machine.torch_cuda else "cpu"
        return cls(request, FrameCalls.of(spec, source.height, source.width, device, machine))

    @property
    def output(self) -> Path:
        """The MP4."""
        return self.request.output

    @property
    def height(self) -> int:
        """Pixels of the result."""
        return self.calls.height

    @property
    def width(self) -> int:
        """Pixels of the result."""
        return self.calls.width

    @property
    def fps(self) -> int | Fraction:
        """Frames per second, as in the source."""
        rate = self.request.source.rate
        return rate.numerator if rate.denominator == 1 else rate

    @property
    def crf(self) -> int:
        """Of the MP4."""
        return default_crf(self.width, self.height) if self.request.crf is None else self.request.crf

    def kind(self, machine: Machine) -> Kind:
        """Return the kind under which the history has videos like this one; see `decode_plan.DecodePlan.kind`."""
        return self.calls.kind(machine, self.request.backend)

    @property
    def load_seconds(self) -> float:
        """About how long a new process takes to import its libraries and to read the weights."""
        return process_seconds(self.request.spec.total_parameters * DTYPE_BYTES[self.calls.dtype])

    def seconds(self, machine: Machine, history: History) -> Seconds | None:
        """Return how long upscaling takes, without loading; `None` if the length of the source is not known."""
        frames = self.request.source.frames
        return None if frames is None else self.calls.seconds(frames, self.kind(machine), machine, history)
