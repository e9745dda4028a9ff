"""What decoding a file of latents makes and how long it takes, known before anything is loaded. Imports no torch.

A decoder of single frames takes latents [n, c, h, w] or [b, n, c, h, w]; a model that makes videos [c, f, h, w] or
[b, c, f, h, w].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import Seconds
from runtime.core.plan import PYTORCH, default_crf
from runtime.core.request import AUTO, MAX_SIDE
from runtime.core.units import shape_text
from runtime.machine.probe import Machine
from runtime.models.catalogue import add_usable, decoders
from runtime.models.latent_files import RGB, LatentFile
from runtime.models.spec import FRAME_DECODER, ModelSpec
from runtime.planner import forecast
from runtime.planner.history import History, Kind, Run, architecture, device_name, seconds_per_call
from runtime.planner.memory_model import DTYPE_BYTES

COLORS = 3


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """What to decode.

    Attributes:
        latents: the file.
        spec: the model.
        output: the MP4.
        fps: by default, the model's.
        channels: the panels of each frame, from left to right: `RGB`, or the number of a channel, which is shown gray.
        crf: of the MP4, by default as for generated videos.
        backend: of a decoder of single frames; see `make_batched_decode_fn`.
    """

    latents: Path
    spec: ModelSpec
    output: Path
    fps: int | None = None
    channels: tuple[str, ...] = (RGB,)
    crf: int | None = None
    backend: str = AUTO


class LatentLayout(ABC):
    """The axes of a file's latents for one kind of decoder.

    Attributes:
        channel_axis: among the last four axes.
        text: the layout, for errors.
        component: what decodes.
        clips: the number of clips in the file.
        axes: sizes of the last four axes.
    """

    channel_axis: int
    text: str
    component: str

    def __init__(self, shape: Sequence[int], spec: ModelSpec) -> None:
        self.spec, self.shape = spec, tuple(shape)
        self.batched = len(shape) > 4  # noqa: PLR2004 - [b, …]
        self.clips = shape[0] if self.batched else 1
        self.axes = self.shape[-4:]

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of the frames."""

    @property
    @abstractmethod
    def frame_size(self) -> tuple[int, int]:
        """(height, width) of the frames."""

    @property
    @abstractmethod
    def frames_per_clip(self) -> int:
        """Frames of each clip."""

    @property
    def count(self) -> int:
        """Frames of all clips."""
        return self.clips * self.frames_per_clip

    def check_channels(self, weights_dir: Path) -> None:
        """Check that the model takes the latents.

        Args:
            weights_dir: has the models that the error names if they take them.

        Raises:
            InvalidRequestError: if they have other channels.
        """
        channels, model_channels = self.axes[self.channel_axis], self.spec.vae.z_dim
        if channels == model_channels:
            return
        facts = {
            "model": self.spec.title,
            "wanted": model_channels,
            "found": channels,
            "shape": shape_text(self.shape),
        }
        models = _models_for(self.axes, weights_dir)
        if models:
            raise InvalidRequestError("latents", "latents.of_another_model", models=models, **facts)
        raise InvalidRequestError("latents", "latents.channels", layout=self.text, **facts)

    def dtype_on(self, device: str) -> str:
        """Return the dtype that the decoder computes in."""
        return "bfloat16" if device != "cpu" and not self.spec.small else "float32"


class FrameLayout(LatentLayout):
    """Latents [n, c, h, w] or [b, n, c, h, w] of a decoder of single frames."""

    channel_axis = 1
    text = "[n, c, h, w] or [b, n, c, h, w]"
    component = FRAME_DECODER

    @property
    def channels(self) -> int:
        """See `LatentLayout`."""
        architecture: Any = self.spec.vae
        return int(architecture.channels)

    @property
    def frame_size(self) -> tuple[int, int]:
        """See `LatentLayout`."""
        architecture: Any = self.spec.vae
        height, width = architecture.frame_size(*self.axes[2:])
        return int(height), int(width)

    @property
    def frames_per_clip(self) -> int:
        """See `LatentLayout`."""
        return self.axes[0]


class ClipLayout(LatentLayout):
    """Latents [c, f, h, w] or [b, c, f, h, w] of a model that makes videos."""

    channel_axis = 0
    text = "[c, f, h, w] or [b, c, f, h, w]"
    component = "vae"
    channels = COLORS

    @property
    def frame_size(self) -> tuple[int, int]:
        """See `LatentLayout`."""
        scale = self.spec.vae.scale_factor_spatial
        return self.axes[2] * scale, self.axes[3] * scale

    @property
    def frames_per_clip(self) -> int:
        """See `LatentLayout`."""
        return (self.axes[1] - 1) * self.spec.vae.scale_factor_temporal + 1


def _models_for(axes: Sequence[int], weights_dir: Path) -> list[str]:
    """Return the names of the usable models whose latents have these last four axes."""
    names = [spec.name for spec in decoders(weights_dir) if spec.vae.z_dim == axes[FrameLayout.channel_axis]]
    videos = add_usable({}, weights_dir).items()
    return names + [name for name, spec in videos if spec.vae.z_dim == axes[ClipLayout.channel_axis]]


@dataclass(frozen=True)
class DecodePlan:
    """What decoding a file makes.

    Attributes:
        request: what to decode.
        layout: of the file's latents.
        device: a torch device.
        panels: the three channels of each panel.
    """

    request: DecodeRequest
    layout: LatentLayout
    device: str
    panels: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, request: DecodeRequest, file: LatentFile, weights_dir: Path, machine: Machine, gpu: int = 0
    ) -> "DecodePlan":
        """Plan a request.

        Args:
            file: its latents.
            weights_dir: see `LatentLayout.check_channels`.
            gpu: index of the GPU that decodes, if the machine has GPUs.

        Raises:
            InvalidRequestError: if the latents do not fit the model, or frames cannot be saved.
        """
        layout = (FrameLayout if request.spec.only_decodes else ClipLayout)(file.shape, request.spec)
        layout.check_channels(weights_dir)
        device = f"cuda:{gpu}" if machine.gpus and machine.torch_cuda else "cpu"
        plan = cls(request, layout, device, _panels(request, layout.channels))
        if plan.height % 2 or plan.width % 2 or max(plan.height, plan.width) > MAX_SIDE:
            raise InvalidRequestError(
                "latents", "latents.frame_size", width=plan.width, height=plan.height, most=MAX_SIDE
            )
        return plan

    @property
    def output(self) -> Path:
        """The MP4."""
        return self.request.output

    @property
    def height(self) -> int:
        """Pixels of the video."""
        return self.layout.frame_size[0]

    @property
    def width(self) -> int:
        """Pixels of the video, all panels."""
        return self.layout.frame_size[1] * len(self.panels)

    @property
    def fps(self) -> int:
        """Frames per second of the video."""
        return self.request.fps or self.request.spec.defaults.fps

    @property
    def crf(self) -> int:
        """Of the MP4."""
        return default_crf(self.width, self.height) if self.request.crf is None else self.request.crf

    @property
    def flops(self) -> float:
        """Operations of decoding one clip."""
        return self.request.spec.vae.decode_flops(self.layout.frames_per_clip, *self.layout.frame_size)

    def kind(self, machine: Machine) -> Kind:
        """Return the kind under which the history has decodes like this one.

        The backend is the requested one: what "auto" runs a frame decoder on is known only after its weights were
        hashed.
        """
        return Kind(
            device=device_name(machine, self.device),
            model=architecture(self.request.spec),
            component=self.layout.component,
            backend=self.request.backend if self.request.spec.only_decodes else PYTORCH,
            dtype=self.layout.dtype_on(self.device),
            quantization="none",
            offload="none",
        )

    @property
    def load_seconds(self) -> float:
        """About how long a new process takes to import its libraries and to read the decoder's weights."""
        size = self.request.spec.parameters[self.layout.component] * DTYPE_BYTES[self.layout.dtype_on(self.device)]
        return forecast.process_seconds(size)

    def run(self, machine: Machine, seconds: float, *, loaded: bool) -> Run:
        """Return the run that records, for later forecasts, how long decoding took; `loaded` as in `history.Run`."""
        return Run(
            kind=self.kind(machine),
            flops=self.flops,
            seconds=seconds / self.layout.clips,
            working_bytes=1,
            excess_bytes=None,
            loaded=loaded and self.device == "cpu",
        )

    def seconds(self, machine: Machine, history: History) -> Seconds:
        """Return how long decoding takes, without loading the model."""
        last = seconds_per_call(history, self.kind(machine), self.flops)
        dtype = self.layout.dtype_on(self.device)
        clip = last or forecast.decode_seconds(self.request.spec, self.flops, dtype, self.device, machine)
        return clip * self.layout.clips


def _panels(request: DecodeRequest, channels: int) -> tuple[tuple[int, ...], ...]:
    """Return the three channels of each panel."""
    panels: list[tuple[int, ...]] = []
    for name in request.channels:
        if name == RGB:
            # Frames of one or two channels are shown gray.
            panels.append((0, 1, 2) if channels >= COLORS else (0,) * COLORS)
        elif int(name) < channels:
            panels.append((int(name),) * COLORS)
        else:
            raise InvalidRequestError(
                "channels", "latents.no_such_channel", channel=name, model=request.spec.title, last=channels - 1
            )
    return tuple(panels)
