"""Architecture of decoders of single frames, read from their folder. Imports no torch.

A folder has `config.json` and safetensors files, without `model_index.json`. The configuration is that of a diffusers
`AutoencoderDC`, or the `model:` section of an OWL configuration (`owl_vaes/configs.py` of Wayfarer-Labs/owl-vaes), as
JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from runtime.models.folder import read_config, read_sidecar, reading, tensor_types, up_to
from runtime.models.registry import Family, KnownModel
from runtime.models.spec import FRAME_DECODER, Defaults, ModelSpec

AUTOENCODER_DC, OWL = "AutoencoderDC", "dcae"
PREFIX = "decoder."
# A side of the frames of a folder without `tandem.json`, in pixels; OWL's square frames.
_SIDE = 512
_FPS = 16
_LANDSCAPE, _RATIO_TOLERANCE = 16 / 9, 0.01
_BLOCKS, _LEVELS = 64, 12
# Values of a 3×3 kernel.
_KERNEL = 9
# OWL's residual blocks are twice as wide inside, in groups of 16 channels.
_INNER, _GROUP = 2, 16
# Tensors of the last level that are in memory at once: a residual, its convolution's input and output, and a copy.
_LIVE = 5
_CPU_BUFFERS = 2


_Channels = Annotated[int, up_to(8_192)]
_Side = Annotated[int, up_to(16_384)]


@dataclass(frozen=True, kw_only=True)
class NoTransformer:
    """The transformer of a model that has none; see `models.spec.TransformerSpec`."""

    num_layers: int = 0
    num_attention_heads: int = 0
    attention_head_dim: int = 0
    width: int = 0
    ffn_dim: int = 0
    in_channels: int = 0
    text_dim: int = 0
    patch_size: tuple[int, int, int] = (1, 1, 1)
    rope_max_seq_len: int = 0
    block_parameters: int = 0

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """Return 0."""
        return 0.0 * tokens * text_tokens

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """Return 0."""
        del time_per_token
        return 0 * tokens * element_bytes


@dataclass(frozen=True, kw_only=True)
class FrameDecoderSpec:
    """Architecture of a decoder of single frames; see `models.spec.VaeSpec`.

    Attributes:
        kind: `AUTOENCODER_DC` or `OWL`.
        z_dim: channels of the latents.
        channels: of the frames: RGB, and of OWL's decoders more, such as depth.
        widths: channels of the levels, from the frames' size to the latents'.
        blocks: residual blocks of each level; OWL's last level has none of its own.
        scale_factor_spatial: pixels of one latent, in width and in height, before frames are resized.
        resized: (height, width) that frames of any size are resized to, of a decoder that works on squares.
        latent_factor: what a world model's latents are multiplied with before they are decoded.
    """

    kind: Literal["AutoencoderDC", "dcae"]
    z_dim: Annotated[int, up_to(4_096)]
    channels: Annotated[int, up_to(64)]
    widths: Annotated[tuple[_Channels, ...], Field(min_length=1, max_length=_LEVELS)]
    blocks: Annotated[tuple[Annotated[int, Field(strict=True, ge=0, le=_BLOCKS)], ...], Field(min_length=1)]
    scale_factor_spatial: Annotated[int, up_to(1 << _LEVELS)]
    resized: tuple[_Side, _Side] | None
    latent_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    scale_factor_temporal: int = 1

    @property
    def last_channels(self) -> int:
        """Channels of the decoder's last and largest level."""
        return self.widths[0]

    def frame_size(self, latent_height: int, latent_width: int) -> tuple[int, int]:
        """Return (height, width) of the frame of a latent frame, in pixels."""
        scale = self.scale_factor_spatial
        return self.resized or (latent_height * scale, latent_width * scale)

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the latents of a frame."""
        if self.resized is not None:
            height = width = _SIDE
        return max(height // self.scale_factor_spatial, 1), max(width // self.scale_factor_spatial, 1)

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations (two per multiply-add) of decoding frames, of convolutions of 3×3 kernels only."""
        total = 0.0
        for level, (channels, blocks) in enumerate(zip(self.widths, self.blocks, strict=False)):
            if self.kind == OWL:
                products = _INNER * channels * (2 * channels + _KERNEL * _GROUP)
            else:
                products = 2 * _KERNEL * channels**2
            below = self.widths[min(level + 1, len(self.widths) - 1)]
            total += 2.0 * (blocks * products + _KERNEL * channels * below) * height * width / 4**level
        return frames * total

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return the peak memory of decoding `latent_frames` frames in one call; counted, not measured."""
        inner = _INNER if self.kind == OWL else 1
        last = latent_frames * self.last_channels * inner * height * width * element_bytes
        return last * _LIVE * (_CPU_BUFFERS if cpu else 1)

    def cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return 0: each frame is decoded for itself."""
        return 0 * height * width * element_bytes


_SPEC = TypeAdapter(FrameDecoderSpec)


class DcaeFamily(Family):
    """The family's torch-free part; see `registry.Family`."""

    negative_prompt = ""

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Read a decoder's folder; see `registry.read_spec`."""
        with reading(name):
            vae = read_architecture(read_config(directory / "config.json"))
            stored = {name: count for name, (_, count) in tensor_types(directory).items()}
            weights = {name: count for name, count in stored.items() if name.startswith(PREFIX)} or stored
            return ModelSpec(
                family="dcae",
                name=name,
                directory=directory,
                vae=vae,
                parameters={FRAME_DECODER: sum(weights.values())},
                **frame_card(FRAME_DECODER),
                **(_described(vae, name) | (read_sidecar(directory, experts=0) or {})),
            )

    def check(self, directory: Path, title: str) -> None:
        """Check a decoder's configuration.

        Raises:
            ModelError: if it is missing, damaged or invalid.
        """
        with reading(title):
            read_architecture(read_config(directory / "config.json"))

    def known_spec(self, model: KnownModel, weights_dir: Path) -> ModelSpec:
        """Raise `LookupError`: no decoder is among the published models."""
        raise LookupError(model.name, weights_dir)


FAMILY: Family = DcaeFamily()


def frame_card(component: str) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that all models of single frames share.

    Args:
        component: the only one, which has the name of its program.
    """
    return {
        "transformer": NoTransformer(),
        "experts": 0,
        "boundary_ratio": None,
        "scheduler": "",
        "expand_timesteps": False,
        "max_sequence_length": 0,
        "encoders": {},
        "programs": {component: (component,)},
    }


def finisher_card(component: str, width: int, height: int) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that upscalers and interpolators share, which take frames of any size and rate.

    Args:
        width, height: the default size of a frame, in pixels.
    """
    return {
        **frame_card(component),
        "latent_rgb": None,
        "defaults": Defaults(
            width=width,
            height=height,
            frames=1,
            fps=16,
            steps=1,
            guidance_scale=1.0,
            guidance_scale_2=None,
            negative_prompt="",
        ),
        "sizes": (),
        "frame_counts": (),
    }


def read_architecture(config: Mapping[str, Any]) -> FrameDecoderSpec:
    """Return the architecture that a configuration describes.

    Raises:
        KeyError, TypeError, ValueError: if it is incomplete or invalid.
    """
    fields = _autoencoder_dc(config) if config.get("_class_name") == AUTOENCODER_DC else _owl(config)
    spec: FrameDecoderSpec = _SPEC.validate_python(fields)
    if len(spec.blocks) != len(spec.widths):
        raise ValueError("layers_per_block" if spec.kind == AUTOENCODER_DC else "decoder_blocks_per_stage")
    return spec


def _autoencoder_dc(config: Mapping[str, Any]) -> dict[str, Any]:
    widths = tuple(config["decoder_block_out_channels"])
    return {
        "kind": AUTOENCODER_DC,
        "z_dim": config["latent_channels"],
        "channels": config.get("in_channels", 3),
        "widths": widths,
        "blocks": tuple(config["decoder_layers_per_block"]),
        "scale_factor_spatial": 2 ** min(len(widths) - 1, _LEVELS),
        "resized": None,
        "latent_factor": 1 / config.get("scaling_factor", 1.0),
    }


def _owl(config: Mapping[str, Any]) -> dict[str, Any]:
    model = owl_model(config)
    stages = tuple(model["decoder_blocks_per_stage"])
    smallest, largest = (TypeAdapter(_Channels).validate_python(model[name]) for name in ("ch_0", "ch_max"))
    if len(stages) >= _LEVELS or min(smallest * 2 ** len(stages), largest) != largest:
        raise ValueError("decoder_blocks_per_stage")
    size = model["sample_size"]
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    landscape = len(sides) == 2 and abs(sides[1] / sides[0] - _LANDSCAPE) < _RATIO_TOLERANCE  # noqa: PLR2004
    return {
        "kind": OWL,
        "z_dim": model["latent_channels"],
        "channels": model.get("channels", 3),
        "widths": tuple(min(smallest * 2**level, largest) for level in range(len(stages) + 1)),
        "blocks": (*reversed(stages), 0),
        "scale_factor_spatial": 2 ** len(stages),
        "resized": sides if landscape else None,
        "latent_factor": config.get("vae_scale", model.get("vae_scale", 1.0)),
    }


def owl_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `model:` section of an OWL configuration, which may be given alone."""
    model = config.get("model", config)
    if not isinstance(model, dict):
        raise TypeError("model")
    return model


def _described(vae: FrameDecoderSpec, name: str) -> dict[str, Any]:
    """Return what a folder without `tandem.json` does not say."""
    height, width = vae.resized or (_SIDE, _SIDE)
    return {
        "title": name,
        "license": "unknown",
        "latent_rgb": None,
        "defaults": Defaults(
            width=width,
            height=height,
            frames=1,
            fps=_FPS,
            steps=1,
            guidance_scale=1.0,
            guidance_scale_2=None,
            negative_prompt="",
        ),
        "sizes": ((width, height),),
        "frame_counts": (1,),
    }
