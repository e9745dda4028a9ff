"""What a model is: its architecture and defaults, read from its folder without loading a weight.

All arithmetic that follows from the architecture alone (strides, tokens, bytes, operations) is here, as methods.
Knows nothing about machines or engines.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from runtime.core.loras import LoraUse
from runtime.models.timesteps import UNTOLD, NoiseLevels

_FLOAT32 = 4
_RGB = 3
# Inputs of a 3×3×3 convolution that one output depends on, in each channel.
_KERNEL = 27
# Convolutions on a CPU are oneDNN's where the input has more channels × frames × rows (`use_mkldnn` in PyTorch's
# Convolution.cpp).
_UNFOLDED = 20480


def is_transformer(component: str) -> bool:
    """Whether a component is one of the experts."""
    return component.startswith("transformer")


def attention_flops(spec: "ModelSpec", tokens: int) -> float:
    """Return the operations of the attention among a clip's tokens in one block."""
    return 4.0 * tokens**2 * spec.transformer.width


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
    rope_max_seq_len: int

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

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """Return what one forward pass takes at its peak, beside the weights; attention has no matrix.

        The peak is in a block, at one of four moments. In units of tokens × width: the feed-forward's activation
        (input, stream, cross-attention's output, norm, and the inner layer twice), the gated sum after it (five of
        these, beside product, sum and, where the model is not in float32, the stream once more, all in float32), the
        rotary embedding in float32 within self-attention, and with a timestep per token (`time_per_token`) the start,
        where the modulation's six vectors are cast and summed in float32. They stay to the block's end.

        Source: diffusers' `WanTransformerBlock`; within 3 % of what an H200 took.
        """
        e, width = element_bytes, self.width
        lifted = 0 if element_bytes == _FLOAT32 else _FLOAT32
        feed_forward = 4 * e * width + 2 * e * self.ffn_dim
        gated_sum = 5 * e * width + (3 if lifted else 2) * _FLOAT32 * width
        rotary = 7 * e * width + 6 * width
        modulation = 6 * _FLOAT32 * width if time_per_token else 0
        start = e * width + (6 * lifted * width if time_per_token else 0)
        timestep = 7 * e * width if time_per_token else 0
        rotations = 2 * _FLOAT32 * self.attention_head_dim
        return tokens * (max(feed_forward, gated_sum, rotary, start) + modulation + timestep + rotations)

    @property
    def block_parameters(self) -> int:
        """The number of weights in the linear layers of all blocks: what is quantized, and what offload streams."""
        return self.num_layers * (8 * self.width**2 + 2 * self.width * self.ffn_dim)


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

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return what decoding `latent_frames` in one call takes at its peak, beside the weights.

        The peak is a convolution of a residual block, mostly of the last level. At that moment there are the block's
        and the level's inputs, the shortcut, the convolution's input as it is and padded (by two frames of cache), its
        output, both once more in cuDNN's own layout, and the caches of all convolutions: two frames each. A residual
        decoder (TI2V-5B) keeps a copy of each level's input for its shortcut. In 16 bits with several latent frames it
        is the norm between two convolutions, which is computed in float32.

        On a CPU it is the same, in oneDNN's layout, but for convolutions with a small input, which PyTorch computes by
        itself: it lays each output's 27 inputs out beside each other. The clip's first latent frame, which is decoded
        alone, may then take more than the calls after it.

        Source: diffusers' `autoencoder_kl_wan`, within 1 % of what that took on an H200 in float32
        (tests/planner/measured_h200.jsonl), and `execution.vae_steps`, within 3 % in bfloat16; compiled it takes less.
        """
        most = self._call_bytes(latent_frames, height, width, element_bytes, cpu=cpu, first=False)
        if cpu:
            most = max(most, self._call_bytes(1, height, width, element_bytes, cpu=True, first=True))
        return most

    def _call_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool, first: bool
    ) -> int:
        dims = [self.decoder_base_dim * m for m in (self.dim_mult[-1], *reversed(self.dim_mult))]
        upsample_time = tuple(reversed(self.temperal_downsample))
        rows = height // self.scale_factor_spatial
        positions = rows * (width // self.scale_factor_spatial)
        frames = latent_frames
        caches = 2 * positions * (self.z_dim + 4 * dims[0])
        most = 0
        for level, (before, out) in enumerate(itertools.pairwise(dims)):
            enters = before // 2 if level and not self.is_residual else before
            level_input = (2 if self.is_residual else 1) * frames * enters
            for block in range(self.num_res_blocks + 1):
                channels = out if block else enters
                held = level_input + (frames * out if block or channels != out else 0)
                for c in (channels, out):
                    convolution = frames * c + 2 * (frames + 2) * c + 2 * frames * out + 2 * c
                    if cpu and c * (frames + 2) * rows <= _UNFOLDED:
                        convolution += (_KERNEL - 1) * frames * c - 2 * c - frames * out
                    most = max(most, positions * (held + convolution))
                # In 16 bits, the norm before the second convolution: what is normed without and with its bias, in
                # float32, and the result of that.
                lifted = 2 * frames * out * _FLOAT32 // element_bytes
                most = max(most, positions * (held + 2 * frames * out + lifted))
                caches += 2 * positions * (channels + out)
            if level < len(self.dim_mult) - 1:
                caches += 2 * positions * out if upsample_time[level] else 0
                frames = 2 * frames if upsample_time[level] and not first else frames
                rows *= 2
                positions *= 4
        caches += 2 * positions * dims[-1]
        pixels = _RGB * self.patch_size**2 * positions * frames
        return element_bytes * (most + caches + 2 * pixels)


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
        flow_shift: how far the scheduler's noise levels are moved towards noise, where it says so.
        loras: what is added to its transformers' weights when they are loaded, see `models.loras.with_loras`.
        noise: where the scheduler puts the steps.
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
    flow_shift: float | None = None
    loras: tuple[LoraUse, ...] = ()
    noise: NoiseLevels = UNTOLD

    def loras_of(self, component: str) -> tuple[LoraUse, ...]:
        """Return the LoRAs that change a component's weights."""
        return tuple(use for use in self.loras if use.changes(component))

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
