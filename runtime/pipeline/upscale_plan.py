"""What upscaling a video makes, how, and how long it takes, known before anything is loaded. Imports no torch."""

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import Seconds
from runtime.core.plan import default_crf
from runtime.core.request import AUTO, MAX_SIDE
from runtime.core.tiles import spans
from runtime.engines.frame_decoders import BATCH
from runtime.machine.probe import Machine
from runtime.models.spec import UPSCALER, ModelSpec
from runtime.planner import forecast
from runtime.planner.history import History, Kind, Run, architecture, device_name, seconds_per_call
from runtime.planner.memory_model import DTYPE_BYTES
from runtime.video.reader import VideoInfo

# PyTorch, diffusers and transformers, from the page cache, on 2 cores.
_IMPORT_SECONDS = 3.5
# Share of free memory that a call may take; the weights, the allocator and ffmpeg need the rest.
_SHARE = 0.5
# Sides of tiles in pixels of the source, the largest first.
_TILES = (512, 384, 256, 192)
# Tiles overlap by a quarter, and are cut in the middle of it.
_MARGIN = 8
# The capability from which GPUs are fast in float16.
_FLOAT16_CAPABILITY = (7, 0)


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
        device: a torch device.
        dtype: that PyTorch computes in.
        tile: side of square tiles in pixels of the source; `None` for whole frames.
        batch: frames, or tiles, of one call.
    """

    request: UpscaleRequest
    device: str
    dtype: str
    tile: int | None
    batch: int

    @classmethod
    def of(cls, request: UpscaleRequest, machine: Machine, gpu: int = 0) -> "UpscalePlan":
        """Plan a request.

        Args:
            gpu: index of the GPU that upscales, if the machine has GPUs.

        Raises:
            InvalidRequestError: if the result would be too large.
        """
        source, scale = request.source, request.spec.vae.scale_factor_spatial
        if scale * max(source.width, source.height) > MAX_SIDE:
            raise InvalidRequestError(
                "scale", "upscale.too_large", width=source.width, height=source.height, scale=scale, most=MAX_SIDE
            )
        on_gpu = bool(machine.gpus and machine.torch_cuda)
        device = f"cuda:{gpu}" if on_gpu else "cpu"
        fast = on_gpu and machine.gpus[gpu].capability >= _FLOAT16_CAPABILITY
        free = machine.gpus[gpu].free_bytes if on_gpu else machine.ram_free_bytes
        plan = cls(request, device, "float16" if fast else "float32", None, BATCH if on_gpu else 1)
        smaller = plan.smaller()
        while smaller is not None and not plan._fits(free):
            plan, smaller = smaller, smaller.smaller()
        return plan

    def smaller(self) -> "UpscalePlan | None":
        """Return the plan that needs the next less memory; `None` if there is none."""
        if self.batch > 1:
            return replace(self, batch=self.batch // 2)
        source, architecture = self.request.source, self.architecture
        longest = max(source.height, source.width) if self.tile is None else self.tile
        tiles = [side for side in _TILES if side < longest and side >= _MARGIN * architecture.context]
        return replace(self, tile=tiles[0]) if tiles else None

    def _fits(self, free_bytes: int) -> bool:
        element = DTYPE_BYTES[self.dtype]
        size = self.architecture.frame_size(*self.call_size)
        needed = self.architecture.decode_bytes(self.batch, *size, element, cpu=self.device == "cpu")
        return bool(needed <= _SHARE * free_bytes)

    @property
    def architecture(self) -> Any:
        """The architecture of the upscaler."""
        return self.request.spec.vae

    @property
    def call_size(self) -> tuple[int, int]:
        """(height, width) of the frames or tiles of a call."""
        source = self.request.source
        if self.tile is None:
            return source.height, source.width
        return min(source.height, self.tile), min(source.width, self.tile)

    @property
    def height(self) -> int:
        """Pixels of the result; H.264 needs an even number, so an odd one loses a row."""
        return int(self.request.source.height * self.architecture.output_scale) // 2 * 2

    @property
    def width(self) -> int:
        """Pixels of the result, an even number."""
        return int(self.request.source.width * self.architecture.output_scale) // 2 * 2

    @property
    def fps(self) -> int | Fraction:
        """Frames per second, as in the source."""
        rate = self.request.source.rate
        return rate.numerator if rate.denominator == 1 else rate

    @property
    def crf(self) -> int:
        """Of the MP4."""
        return default_crf(self.width, self.height) if self.request.crf is None else self.request.crf

    def flops(self, frames: int) -> float:
        """Return the operations of so many frames."""
        source = self.request.source
        height, width = self.call_size
        calls = 1
        if self.tile is not None:
            calls = len(spans(source.height, self.tile)) * len(spans(source.width, self.tile))
        return float(self.architecture.decode_flops(frames * calls, *self.architecture.frame_size(height, width)))

    def kind(self, machine: Machine) -> Kind:
        """Return the kind under which the history has videos like this one; see `decode_plan.DecodePlan.kind`."""
        return Kind(
            device=device_name(machine, self.device),
            model=architecture(self.request.spec),
            component=UPSCALER,
            backend=self.request.backend,
            dtype=self.dtype,
            quantization="none",
            offload="none",
        )

    @property
    def load_seconds(self) -> float:
        """About how long a new process takes to import its libraries and to read the weights."""
        size = self.request.spec.total_parameters * DTYPE_BYTES[self.dtype]
        return _IMPORT_SECONDS + forecast.read_seconds(size).likely

    def run(self, machine: Machine, seconds: float, frames: int, *, loaded: bool) -> Run:
        """Return the run that records, for later forecasts, how long so many frames took."""
        return Run(
            kind=self.kind(machine),
            flops=self.flops(frames),
            seconds=seconds,
            working_bytes=1,
            excess_bytes=None,
            loaded=loaded and self.device == "cpu",
        )

    def seconds(self, machine: Machine, history: History) -> Seconds | None:
        """Return how long upscaling takes, without loading; `None` if the length of the source is not known."""
        frames = self.request.source.frames
        if frames is None:
            return None
        flops = self.flops(frames)
        last = seconds_per_call(history, self.kind(machine), flops)
        return last or forecast.decode_seconds(self.request.spec, flops, self.dtype, self.device, machine)
