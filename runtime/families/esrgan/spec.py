"""Architecture of upscalers, recognised by names and shapes of their weights. Imports no torch.

An upscaler is one file: the safetensors of anyone with the names of BasicSR (`srvgg_arch.py`, `rrdbnet_arch.py`) or of
the first ESRGAN, or a model of ncnn. Its network enlarges frames by a fixed factor, after which they can be reduced:
Real-ESRGAN's networks for factors 2 and 3 are that for 4, followed by bicubic interpolation.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError

from runtime.core.request import UPSCALER
from runtime.families.dcae.spec import finisher_card
from runtime.models.folder import up_to
from runtime.models.registry import Family, KnownModel, PartFiles
from runtime.models.spec import ModelSpec
from runtime.models.stored_weights import WeightFiles

COMPACT, RRDB = "SRVGGNetCompact", "RRDBNet"
COLORS = 3
_KERNEL = 9  # values of a 3×3 kernel
_MAX_SCALE = 4
# An RRDBNet for a smaller factor than 4 first moves blocks of 2×2 or 4×4 pixels into channels.
_LARGEST_SCALE = 4
# Dense blocks of one residual block, and convolutions of one dense block.
DENSE, DENSE_CONVOLUTIONS = 3, 5
_MAX_DEPTH = 128
# Tensors of the features that are in memory at once, and of the enlarged frames.
_LIVE, _LIVE_FRAMES = 3, 3
# Kernels of CPUs have copies in an order of their own.
_CPU_BUFFERS = 2
# Pixels around a tile of an RRDBNet, whose output depends on hundreds; the influence of the others is small.
_CONTEXT = 32
# Besides convolutions, bicubic interpolation needs neighbours.
_INTERPOLATED = 2
# Training programs put these before all names.
_PREFIXES = ("params_ema.", "params.")
# The names of the first ESRGAN's code.
_OLD_BODY = re.compile(r"model\.1\.sub\.(\d{1,3})\.RDB([123])\.conv([1-5])\.0\.(weight|bias)")
_OLD_END = re.compile(r"model\.1\.sub\.\d{1,3}\.(weight|bias)")
_OLD: Mapping[str, str] = {
    "model.0": "conv_first",
    "model.3": "conv_up1",
    "model.6": "conv_up2",
    "model.8": "conv_hr",
    "model.10": "conv_last",
}
_BLOCK = re.compile(r"body\.(\d{1,3})\.rdb1\.conv1\.weight")
_LAYER = re.compile(r"body\.(\d{1,3})\.weight")

_Features = Annotated[int, up_to(1_024)]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UpscalerSpec:
    """Architecture of an upscaler; see `models.spec.VaeSpec`, of which its frames are both latents and frames.

    Attributes:
        kind: `COMPACT` or `RRDB`.
        features: channels of the convolutions.
        depth: convolutions between the first and the last of a compact network, or residual blocks of an RRDBNet.
        growth: channels that each convolution of a dense block adds; 0 for a compact network.
        scale: by which the network enlarges.
        output_scale: by which frames are larger in the end, at most `scale`.
    """

    kind: Literal["SRVGGNetCompact", "RRDBNet"]
    features: _Features
    depth: Annotated[int, up_to(_MAX_DEPTH)]
    growth: Annotated[int, up_to(1_024)] | Literal[0]
    scale: Annotated[int, up_to(_MAX_SCALE)]
    output_scale: Annotated[int, up_to(_MAX_SCALE)]
    z_dim: Literal[3] = 3
    channels: Literal[3] = 3
    scale_factor_temporal: Literal[1] = 1

    @property
    def last_channels(self) -> int:
        """Channels of the last convolutions."""
        return self.features

    @property
    def scale_factor_spatial(self) -> int:
        """Pixels of the result for one of the source, in width and in height."""
        return self.output_scale

    @property
    def context(self) -> int:
        """Pixels around a tile on which its result depends; see `_CONTEXT`."""
        return self.depth + 2 + _INTERPOLATED if self.kind == COMPACT else _CONTEXT

    @property
    def unshuffled(self) -> int:
        """The side of the blocks of pixels that the network takes as one."""
        return 1 if self.kind == COMPACT else _LARGEST_SCALE // self.scale

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the result for a source of that size."""
        return height * self.output_scale, width * self.output_scale

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the source of a result."""
        return max(height // self.output_scale, 1), max(width // self.output_scale, 1)

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations (two per multiply-add) of upscaling; sizes are those of the result."""
        features = self.features
        if self.kind == COMPACT:
            products = COLORS * features + self.depth * features**2 + features * COLORS * self.scale**2
        else:
            dense = self.growth * sum(features + index * self.growth for index in range(DENSE_CONVOLUTIONS - 1))
            dense += features * (features + (DENSE_CONVOLUTIONS - 1) * self.growth)
            products = COLORS * self.unshuffled**2 * features + DENSE * self.depth * dense + features**2
            # The first enlargement has a convolution of 4 pixels for one, the second and the end three of 16.
            products += 4 * features**2 + 16 * features * (2 * features + COLORS)
            products //= self.unshuffled**2
        rows, columns = self.latent_size(height, width)
        return 2.0 * _KERNEL * products * frames * rows * columns

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return the peak memory of upscaling so many frames in one call; counted, not measured."""
        rows, columns = self.latent_size(height, width)
        features = self.features * _LIVE
        if self.kind == RRDB:
            # At full size, where features have 16 pixels for one.
            features = 16 * self.features * _LIVE // self.unshuffled**2
        values = features + COLORS * self.scale**2 * _LIVE_FRAMES
        return latent_frames * rows * columns * values * element_bytes * (_CPU_BUFFERS if cpu else 1)

    def cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return 0: each frame is upscaled for itself."""
        return 0 * height * width * element_bytes


_SPEC = TypeAdapter(UpscalerSpec)


def read_architecture(config: Mapping[str, Any]) -> UpscalerSpec:
    """Return the architecture of a configuration, which has its fields.

    Raises:
        ValueError: if it is invalid.
    """
    spec: UpscalerSpec = _SPEC.validate_python({"output_scale": config["scale"], **config})
    return spec


def names_of(names: Sequence[str]) -> dict[str, str]:
    """Return BasicSR's names of the tensors in a file, by name."""
    prefix = next((prefix for prefix in _PREFIXES if any(name.startswith(prefix) for name in names)), "")
    return {name: _renamed(name.removeprefix(prefix)) for name in names if name.startswith(prefix)}


def _renamed(name: str) -> str:
    block, end = _OLD_BODY.fullmatch(name), _OLD_END.fullmatch(name)
    if block is not None:
        return f"body.{block[1]}.rdb{block[2]}.conv{block[3]}.{block[4]}"
    if end is not None:
        return f"conv_body.{end[1]}"
    owner, _, last = name.rpartition(".")
    return f"{_OLD[owner]}.{last}" if owner in _OLD else name


def config_of(shapes: Mapping[str, Shape], _candidates: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
    """Return the configuration of the upscaler with weights of these shapes; `None` if it is none."""
    config = _rrdb(shapes) if "conv_first.weight" in shapes else _compact(shapes)
    if config is None:
        return None
    try:
        read_architecture(config)
    except ValidationError:
        return None
    return config


def _compact(shapes: Mapping[str, Shape]) -> dict[str, Any] | None:
    """Convolutions with a `PReLU` after each but the last: `body.0`, `body.1`, …"""
    numbers = [int(match[1]) for match in map(_LAYER.fullmatch, shapes) if match is not None]
    last = max(numbers, default=0)
    first, end, slope = (shapes.get(f"body.{number}.weight", ()) for number in (0, last, 1))
    if last < 2 or last % 2 or not (_is_convolution(first) and _is_convolution(end) and len(slope) == 1):  # noqa: PLR2004
        return None
    scale = _whole_root(end[0] / COLORS)
    return {"kind": COMPACT, "features": first[0], "depth": last // 2 - 1, "growth": 0, "scale": scale}


def _rrdb(shapes: Mapping[str, Shape]) -> dict[str, Any] | None:
    numbers = [int(match[1]) for match in map(_BLOCK.fullmatch, shapes) if match is not None]
    first, growing = shapes["conv_first.weight"], shapes.get("body.0.rdb1.conv1.weight", ())
    if not (_is_convolution(first) and _is_convolution(growing)):
        return None
    side = _whole_root(first[1] / COLORS)
    scale = _LARGEST_SCALE // side if side and _LARGEST_SCALE % side == 0 else 0
    return {"kind": RRDB, "features": first[0], "depth": max(numbers) + 1, "growth": growing[0], "scale": scale}


def _is_convolution(shape: Shape) -> bool:
    return len(shape) == 4 and shape[2:] == (3, 3)  # noqa: PLR2004


def _whole_root(value: float) -> int:
    """Return the root of a square number; 0 for another one."""
    root = round(value**0.5)
    return root if root**2 == value else 0


def parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every parameter by BasicSR's name."""
    spec = read_architecture(config)
    features, growth = spec.features, spec.growth
    shapes: dict[str, Shape] = {}

    def add(name: str, channels: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (channels, inputs, 3, 3), (channels,)

    if spec.kind == COMPACT:
        for index in range(spec.depth + 1):
            add(f"body.{2 * index}", features, features if index else COLORS)
            shapes[f"body.{2 * index + 1}.weight"] = (features,)
        add(f"body.{2 * spec.depth + 2}", COLORS * spec.scale**2, features)
        return shapes
    add("conv_first", features, COLORS * spec.unshuffled**2)
    for block in range(spec.depth):
        for dense in range(1, DENSE + 1):
            for index in range(DENSE_CONVOLUTIONS):
                last = index == DENSE_CONVOLUTIONS - 1
                name = f"body.{block}.rdb{dense}.conv{index + 1}"
                add(name, features if last else growth, features + index * growth)
    for name in ("conv_body", "conv_up1", "conv_up2", "conv_hr"):
        add(name, features, features)
    add("conv_last", COLORS, features)
    return shapes


def upscaler_spec(name: str, title: str, license_name: str, files: WeightFiles, output_scale: int) -> ModelSpec:
    """Return the model of an upscaler.

    Args:
        files: with the configuration of `config_of`.
        output_scale: by which frames are larger in the end.
    """
    config = {**files.config, "output_scale": output_scale}
    spec = read_architecture(config)
    return ModelSpec(
        family="esrgan",
        name=name,
        title=title,
        license=license_name,
        directory=files.paths[0].parent,
        vae=spec,
        parameters={UPSCALER: files.parameters},
        files={UPSCALER: WeightFiles(**{**vars(files), "config": config})},
        **finisher_card(UPSCALER, 64, 64),
    )


class EsrganFamily(Family):
    """The family's torch-free part; see `registry.Family`. Its models are files, not folders."""

    negative_prompt = ""

    @property
    def part_files(self) -> Mapping[str, PartFiles]:
        """See `registry.Family`."""
        return {UPSCALER: PartFiles(names_of, config_of, parameters)}

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Raise `LookupError`: no folder is an upscaler."""
        raise LookupError(name, directory)

    def check(self, directory: Path, title: str) -> None:
        """Raise `LookupError`: no folder is an upscaler."""
        raise LookupError(title, directory)

    def known_spec(self, model: KnownModel, weights_dir: Path) -> ModelSpec:
        """Raise `LookupError`: no upscaler is among the published models."""
        raise LookupError(model.name, weights_dir)


FAMILY: Family = EsrganFamily()
