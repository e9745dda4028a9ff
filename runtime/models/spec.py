"""What a model is: its architecture and defaults, read from its folder without loading a weight.

All arithmetic that follows from the architecture alone (strides, tokens, bytes, operations) is here, as methods.
Knows nothing about machines or engines.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """Architecture of a `diffusers.WanTransformer3DModel`, with the names of its config."""

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    ffn_dim: int
    in_channels: int
    text_dim: int
    patch_size: tuple[int, int, int]

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.num_attention_heads * self.attention_head_dim

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """Return the operations (two per multiply-add) of one forward pass, batch 1."""
        self_attention = 8 * tokens * self.width**2 + 4 * tokens**2 * self.width
        cross_attention = 4 * (tokens + text_tokens) * self.width**2 + 4 * tokens * text_tokens * self.width
        feed_forward = 4 * tokens * self.width * self.ffn_dim
        return float(self.num_layers * (self_attention + cross_attention + feed_forward))


@dataclass(frozen=True, kw_only=True)
class VaeSpec:
    """Architecture of a `diffusers.AutoencoderKLWan`, with the names of its config."""

    z_dim: int
    decoder_base_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temperal_downsample: tuple[bool, ...]
    scale_factor_temporal: int
    scale_factor_spatial: int
    patch_size: int
    is_residual: bool

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations of decoding a clip: the decoder's 3×3×3 convolutions, level by level."""
        latent_frames = (frames - 1) // self.scale_factor_temporal + 1
        h, w, t = height // self.scale_factor_spatial, width // self.scale_factor_spatial, latent_frames
        dims = [self.decoder_base_dim * m for m in (self.dim_mult[-1], *reversed(self.dim_mult))]
        upsample_time = tuple(reversed(self.temperal_downsample))
        total = 2.0 * 27 * t * h * w * (self.z_dim * dims[0] + 4 * dims[0] ** 2)
        for level, (before, out) in enumerate(itertools.pairwise(dims)):
            enters = before // 2 if level and not self.is_residual else before
            convolutions = enters * out + out * out * (2 * self.num_res_blocks + 1)
            total += 2.0 * 27 * t * h * w * convolutions
            if level < len(self.dim_mult) - 1:
                t = 2 * t - 1 if upsample_time[level] else t
                h, w = 2 * h, 2 * w
                total += 2.0 * 9 * t * h * w * out * out // 2
        return total

    def decode_bytes(self, latent_frames: int, height: int, width: int, element_bytes: int) -> int:
        """Return an estimate of what decoding `latent_frames` in one call needs beside the weights.

        The last level is the widest in pixels: its block holds about four activations and the convolution's padded
        copy at once, and every convolution keeps two frames for the next call.
        """
        pixels = (height // self.patch_size) * (width // self.patch_size)
        frames = latent_frames * self.scale_factor_temporal + 2
        channels = 2 * self.decoder_base_dim * self.dim_mult[0]
        return 4 * frames * pixels * channels * element_bytes


@dataclass(frozen=True)
class LatentRgb:
    """A linear map from normalised latents to RGB in -1 to 1, for previews: `factors` is channels × 3."""

    factors: tuple[tuple[float, float, float], ...]
    bias: tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a request takes where it says "auto"."""

    width: int
    height: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    negative_prompt: str


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One text-to-video model.

    Attributes:
        name: as the catalogue and `--model` know it.
        title: as people read it.
        license: of the weights, where it is known.
        directory: its folder, in diffusers' format.
        transformer: architecture of the transformer, or of both experts.
        experts: 1 or 2.
        boundary_ratio: the high-noise expert runs while timestep / 1000 is at least this.
        scheduler: name of its diffusers class.
        expand_timesteps: one timestep per token (TI2V-5B).
        max_sequence_length: text tokens that the transformer attends to, zero-padded.
        parameters: number of weights by component.
        latent_rgb: for previews, where it is known.
        defaults: for "auto".
        sizes, frame_counts: what the model was made for, (width, height) and frames.
        here: whether `directory` is there; a known model can be planned with before its weights are.
    """

    name: str
    title: str
    license: str
    directory: Path
    transformer: TransformerSpec
    experts: int
    vae: VaeSpec
    boundary_ratio: float | None
    scheduler: str
    expand_timesteps: bool
    max_sequence_length: int
    parameters: Mapping[str, int]
    latent_rgb: LatentRgb | None
    defaults: Defaults
    sizes: tuple[tuple[int, int], ...]
    frame_counts: tuple[int, ...]
    here: bool = True

    @property
    def component_names(self) -> tuple[str, ...]:
        """The components in the order they run."""
        experts = ("transformer", "transformer_2")[: self.experts]
        return ("text_encoder", *experts, "vae")

    @property
    def total_parameters(self) -> int:
        """The number of weights in all components."""
        return sum(self.parameters.values())

    @property
    def strides(self) -> tuple[int, int]:
        """(width, height) must be multiples of these."""
        _, patch_h, patch_w = self.transformer.patch_size
        return self.vae.scale_factor_spatial * patch_w, self.vae.scale_factor_spatial * patch_h

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int, int]:
        """Return (batch, channels, latent frames, latent height, latent width) of one clip."""
        return (
            1,
            self.vae.z_dim,
            (frames - 1) // self.vae.scale_factor_temporal + 1,
            height // self.vae.scale_factor_spatial,
            width // self.vae.scale_factor_spatial,
        )

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Return the length of the transformer's sequence."""
        _, _, *grid = self.latent_shape(frames, height, width)
        return prod(size // patch for size, patch in zip(grid, self.transformer.patch_size, strict=True))
