"""LTX-2's architecture, defaults and limits, read from a folder in diffusers' format. Imports no torch.

Source of defaults: https://github.com/Lightricks/LTX-2 and diffusers' `LTX2Pipeline`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from runtime.core.errors import ModelError
from runtime.core.facts import Fact, shortened
from runtime.families.ltx2 import file_names, lora_names, part_files
from runtime.families.ltx2.prompt_guide import GUIDE
from runtime.models.folder import count_parameters, read_config, read_sidecar, reading, tensor_types, up_to
from runtime.models.registry import Family, KnownModel, PartFiles, SingleFiles
from runtime.models.spec import (
    CONNECTORS,
    LATENT_UPSAMPLER,
    VAE_ENCODER,
    Defaults,
    ImageInput,
    ModelSpec,
    RefinementSpec,
    SoundLatents,
    SoundPart,
    SoundSpec,
    StreamGuidance,
    TextEncoderSpec,
    folder_of,
)
from runtime.models.stored_weights import WeightFiles
from runtime.models.timesteps import NoiseLevels, ShiftBySize, noise_levels
from runtime.models.vae_groups import CLIP_PROGRAM

# `LTX2Pipeline.__call__`'s default.
MAX_SEQUENCE_LENGTH = 1024
# Weights of the text encoder that only images need. The last layer gives the words that follow.
VISION = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.|lm_head\.")
# The VAE runs in diffusers' module as it is, and decodes a clip in one call, on one GPU. The passes of a step differ in
# more than their text, so they are separate calls.
_LACKS = frozenset({"chunks", "paired", "channels_last", "compiled_vae", "strips"})
# Of `block_programs.BLOCK_PARTS`, which imports torch.
BLOCK_PROGRAMS = tuple(
    f"block_{stream}{part}" for stream in ("", "sound_") for part in ("qkv", "query", "cross", "feed_forward")
)
# What the blocks have in all published models, and diffusers' defaults.
_BLOCKS: Mapping[str, Any] = {
    "norm_eps": 1e-6,
    "activation_fn": "gelu-approximate",
    **dict.fromkeys(("attention_bias", "attention_out_bias", "ff_bias", "audio_ff_bias"), True),
}
# The components in the order they run; engines are built of the VAE's parts and of the sound's.
_PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "text_encoder": (),
    CONNECTORS: (),
    VAE_ENCODER: ("vae_encoder_first",),
    "transformer": (),
    "vae": (CLIP_PROGRAM,),
    "audio_vae": ("audio_vae",),
    "vocoder": ("vocoder",),
}
_FLOAT32 = 4
# In the names of the publishers' files and models.
_DISTILLED, _FULL = "distilled", "dev"
# How many times larger the latents of the second stage are.
_UPSAMPLED = 2.0
# Values of a 3×3×3 and of a 3×3 kernel.
_KERNEL, _KERNEL_2D = 27, 9
# Tokens along an axis. Positions are computed, without a table, so this only limits sizes.
_LONGEST_AXIS = 1024
# Latents of the sound's spectrogram, in time and in frequency (`LATENT_DOWNSAMPLE_FACTOR`).
_SPECTRUM_STRIDE = 4
_SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.0}
# `DEFAULT_IMAGE_CRF` of the same module.
_IMAGE_CRF = 33
# Of its configuration; LTX-2.5 has another one.
_TEXT_ENCODER = "gemma3"
# Begins the names of values of a vocoder's bandwidth extension.
_EXTENSION = "bwe_"
# diffusers' defaults where a scheduler's configuration has none.
_SHIFT = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}
# `DISTILLED_SIGMA_VALUES` of diffusers' `pipelines.ltx2.utils`, whose import loads every pipeline of the family.
DISTILLED_LEVELS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)
# `STAGE_2_DISTILLED_SIGMA_VALUES` of the same module.
REFINING_LEVELS = (0.909375, 0.725, 0.421875)
# `DEFAULT_NEGATIVE_PROMPT` of the same module.
NEGATIVE_PROMPT = (
    "blurry, out of focus, overexposed, underexposed, low contrast, washed out colors, excessive noise, "
    "grainy texture, poor lighting, flickering, motion blur, distorted proportions, unnatural skin tones, "
    "deformed facial features, asymmetrical face, missing facial features, extra limbs, disfigured hands, "
    "wrong hand count, artifacts around text, inconsistent perspective, camera shake, incorrect depth of "
    "field, background too sharp, background clutter, distracting reflections, harsh shadows, inconsistent "
    "lighting direction, color banding, cartoonish rendering, 3D CGI look, unrealistic materials, uncanny "
    "valley effect, incorrect ethnicity, wrong gender, exaggerated expressions, wrong gaze direction, "
    "mismatched lip sync, silent or muted audio, distorted voice, robotic voice, echo, background noise, "
    "off-sync audio, incorrect dialogue, added dialogue, repetitive speech, jittery movement, awkward "
    "pauses, incorrect timing, unnatural transitions, inconsistent framing, tilted camera, flat lighting, "
    "inconsistent tone, cinematic oversaturation, stylized filters, or AI artifacts."
)
_Size = Annotated[int, up_to(65_536)]
_Number = Annotated[int, up_to(512)]
_Sizes = Annotated[tuple[_Size, ...], Field(min_length=1, max_length=8)]
_Numbers = Annotated[tuple[_Number, ...], Field(min_length=1, max_length=9)]
_Factors = Annotated[tuple[Annotated[int, up_to(16)], ...], Field(min_length=1, max_length=8)]


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """Architecture of a `diffusers.LTX2VideoTransformer3DModel`.

    Attributes:
        text_dim: channels of a text embedding for the video.
        sound_heads, sound_head_dim, sound_channels, sound_text_dim: of the stream of the sound.
        modulated_text: whether the attention to the text depends on the timestep, as from LTX-2.3 on.
        keeps_text: whether its keys and values nevertheless do not.
        gated: whether results of attention have gates, as from LTX-2.3 on.
        splits_heads: whether rotations pair a channel with that half of a head away, instead of adjacent channels.
        projects_text: whether the transformer projects the text, as LTX-2's does.
    """

    num_layers: _Number
    num_attention_heads: Annotated[int, up_to(1_024)]
    attention_head_dim: Annotated[int, up_to(1_024)]
    in_channels: Annotated[int, up_to(4_096)]
    text_dim: _Size
    sound_heads: Annotated[int, up_to(1_024)]
    sound_head_dim: Annotated[int, up_to(1_024)]
    sound_channels: Annotated[int, up_to(4_096)]
    sound_text_dim: _Size
    modulated_text: bool
    keeps_text: bool
    gated: bool
    splits_heads: bool
    projects_text: bool

    patch_size = (1, 1, 1)
    rope_max_seq_len = _LONGEST_AXIS

    @property
    def width(self) -> int:
        """Channels of a token of the video."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def sound_width(self) -> int:
        """Channels of a token of the sound."""
        return self.sound_heads * self.sound_head_dim

    @property
    def ffn_dim(self) -> int:
        """Channels of the feed-forward's inner layer."""
        return 4 * self.width

    @property
    def rotation_values(self) -> int:
        """Numbers of a token of the video in the tables of the rotations, in its own attention and to the sound."""
        return self.width + self.sound_width

    @property
    def _token_parameters(self) -> int:
        """Weights of a block that each token of the video passes."""
        width, sound = self.width, self.sound_width
        # Attention among the video's tokens and queries and results of those to text and sound, keys and values for the
        # sound, and the feed-forward.
        return 4 * width**2 + 2 * width**2 + 2 * width * sound + 2 * width * sound + 2 * width * self.ffn_dim

    @property
    def largest_block_parameters(self) -> int:
        """Weights in the linear layers of a block."""
        width, sound = self.width, self.sound_width
        of_sound = 4 * sound**2 + 2 * sound**2 + 2 * sound**2 + 2 * sound**2 + 2 * sound * 4 * sound
        # Keys and values of the text have the streams' widths.
        return self._token_parameters + of_sound + 2 * width**2 + 2 * sound**2

    @property
    def block_parameters(self) -> int:
        """Weights in the linear layers of all blocks, which quantization and group offload apply to."""
        return self.num_layers * self.largest_block_parameters

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """Return the operations of one forward pass, batch 1, without the sound's tokens: they are about 1 %."""
        width = self.width
        text = 4 * text_tokens * width**2
        attention = 4 * tokens * (tokens + text_tokens) * width
        return float(self.num_layers * (2 * tokens * self._token_parameters + text + attention))

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """Return the peak memory of one forward pass in bytes, weights excluded; attention stores no matrix.

        There are the stream before the block and now, the norm, and in the feed-forward twice the inner layer, or in
        attention queries, keys and values and in float32 three tensors of the rotation. The tables of the rotations are
        float32. Two timesteps take no more: tables of a block have a row for each.

        Counted from `transformer.block_step`; `tests/families/ltx2/test_transformer.py` counts its tensors.
        """
        del time_per_token
        e, width = element_bytes, self.width
        feed_forward = e * (3 * width + 2 * self.ffn_dim)
        rotation = e * 6 * width + 3 * _FLOAT32 * width
        return tokens * (max(feed_forward, rotation) + _FLOAT32 * self.rotation_values)


@dataclass(frozen=True, kw_only=True)
class VaeSpec:
    """Architecture of a `diffusers.AutoencoderKLLTX2Video`.

    Attributes:
        channels, layers, strides: of the encoder, from its first level; a stride is (frames, rows, columns).
        decoder_channels, decoder_layers, decoder_factors: of the decoder, in the configuration's order: from its last
            level. Each enlargement divides the channels by a factor.
        decoder_strides: of the decoder, from its first level, as in the configuration.
        reflects: whether convolutions pad a frame with its reflection, which one latent does not have.
    """

    z_dim: Annotated[int, up_to(4_096)]
    channels: _Sizes
    layers: _Numbers
    strides: tuple[tuple[int, int, int], ...]
    decoder_channels: _Sizes
    decoder_layers: _Numbers
    decoder_strides: tuple[tuple[int, int, int], ...]
    decoder_factors: _Factors
    patch: Annotated[int, up_to(16)]
    scale_factor_temporal: Annotated[int, up_to(64)]
    scale_factor_spatial: Annotated[int, up_to(256)]
    reflects: bool

    @property
    def last_channels(self) -> int:
        """Channels of the decoder's last and largest level."""
        return self.decoder_channels[0] // self.decoder_factors[0]

    def _decoder(self, latent_frames: int, height: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Yield (positions, channels before, channels) of each convolution of the decoder."""
        size = (latent_frames, height // self.scale_factor_spatial, width // self.scale_factor_spatial)
        layers, now = self.decoder_layers[::-1], self.decoder_channels[-1]
        yield prod(size), self.z_dim, now
        yield from [(prod(size), now, now)] * (2 * layers[0])
        channels_by_level, factors = self.decoder_channels[::-1], self.decoder_factors[::-1]
        levels = zip(channels_by_level, factors, self.decoder_strides, layers[1:], strict=True)
        for channels, factor, stride, count in levels:
            out = channels // factor
            if now // factor != out:
                yield prod(size), now, channels
                yield prod(size), channels, channels
            yield prod(size), channels, channels * prod(stride) // factor
            frames, rows, columns = (n * by for n, by in zip(size, stride, strict=True))
            size, now = (frames - stride[0] + 1, rows, columns), out
            yield from [(prod(size), out, out)] * (2 * count)
        yield prod(size), now, 3 * self.patch**2

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations of decoding a clip: the 3×3×3 convolutions."""
        latent_frames = (frames - 1) // self.scale_factor_temporal + 1
        return 2.0 * _KERNEL * sum(n * a * b for n, a, b in self._decoder(latent_frames, height, width))

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return the peak memory of decoding in bytes, weights excluded: of a whole clip.

        The peak is a convolution: its block's input, the norm's result, the input padded, and twice the output; or its
        output before and after an enlargement, with the residual. Counted from diffusers' modules, not measured.
        """
        del cpu
        peak = max(n * (3 * a + 2 * b) for n, a, b in self._decoder(latent_frames, height, width))
        frames = (latent_frames - 1) * self.scale_factor_temporal + 1
        return element_bytes * peak + 2 * 3 * _FLOAT32 * frames * height * width

    def cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return 0: a clip is decoded in one call."""
        del height, width, element_bytes
        return 0

    def _encoder(self, height: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Yield (positions, channels before, channels) of each convolution of the encoder for one image."""
        rows, columns = height // self.patch, width // self.patch
        now = self.z_dim
        yield rows * columns, 3 * self.patch**2, now
        for channels, stride, count in zip(self.channels, self.strides, self.layers[:-1], strict=True):
            yield from [(rows * columns, now, now)] * (2 * count)
            # The first frame is repeated before frames are joined.
            yield rows * columns * stride[0], now, channels // prod(stride)
            rows, columns, now = rows // stride[1], columns // stride[2], channels
        yield from [(rows * columns, now, now)] * (2 * self.layers[-1])
        yield rows * columns, now, self.z_dim + 1

    def encode_flops(self, frames: int, height: int, width: int, *, video: bool = False) -> float:
        """Return the operations of encoding one image: images are encoded alone, whatever `frames` is."""
        del frames, video
        return 2.0 * _KERNEL * sum(n * a * b for n, a, b in self._encoder(height, width))

    def encode_bytes(self, frames: int, height: int, width: int, element_bytes: int) -> int:
        """Return the peak memory of encoding one image in bytes, weights excluded.

        A convolution in time sees two more frames before the image. Counted from diffusers' modules, not measured.
        """
        del frames
        return element_bytes * max(n * (5 * a + b) for n, a, b in self._encoder(height, width))

    def encoder_cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return 0: an image is encoded in one call."""
        del height, width, element_bytes
        return 0


@dataclass(frozen=True, kw_only=True)
class _Gemma:
    """Sizes of a `Gemma3TextModel`."""

    hidden_size: _Size
    intermediate_size: Annotated[int, up_to(1_000_000)]
    num_attention_heads: Annotated[int, up_to(1_024)]
    num_hidden_layers: _Number
    vocab_size: Annotated[int, up_to(10_000_000)]
    num_key_value_heads: Annotated[int, up_to(1_024)] = 4
    head_dim: Annotated[int, up_to(1_024)] = 256


@dataclass(frozen=True, kw_only=True)
class _Connectors:
    """Sizes of a `LTX2TextConnectors`."""

    caption_channels: _Size
    text_proj_in_factor: _Number
    video_connector_num_attention_heads: Annotated[int, up_to(1_024)]
    video_connector_attention_head_dim: Annotated[int, up_to(1_024)]
    # Without learned registers, padding would have to be masked.
    video_connector_num_learnable_registers: Annotated[int, up_to(MAX_SEQUENCE_LENGTH)]
    video_connector_num_layers: _Number = 2
    audio_connector_num_attention_heads: Annotated[int, up_to(1_024)]
    audio_connector_attention_head_dim: Annotated[int, up_to(1_024)]
    audio_connector_num_learnable_registers: Annotated[int, up_to(MAX_SEQUENCE_LENGTH)]
    audio_connector_num_layers: _Number = 2

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of an embedding for the video, and of one for the sound."""
        return (
            self.video_connector_num_attention_heads * self.video_connector_attention_head_dim,
            self.audio_connector_num_attention_heads * self.audio_connector_attention_head_dim,
        )


@dataclass(frozen=True, kw_only=True)
class _SoundVae:
    """Sizes of an `AutoencoderKLLTX2Audio`."""

    base_channels: _Size
    ch_mult: _Factors
    num_res_blocks: _Number
    latent_channels: Annotated[int, up_to(4_096)]
    output_channels: Annotated[int, up_to(64)]
    mel_bins: Annotated[int, up_to(4_096)]
    mel_hop_length: Annotated[int, up_to(65_536)]
    sample_rate: Annotated[int, up_to(1_000_000)]

    def part(self) -> SoundPart:
        """Return what decoding a latent computes."""
        positions, flops = self.mel_bins // _SPECTRUM_STRIDE, 0.0
        now = self.base_channels * self.ch_mult[-1]
        convolutions = self.latent_channels * now + 4 * now**2
        for level, factor in reversed(list(enumerate(self.ch_mult))):
            out = self.base_channels * factor
            convolutions += now * out + out**2 * (2 * self.num_res_blocks + 1)
            now = out
            if level:
                flops += 2.0 * _KERNEL_2D * positions * convolutions
                positions, convolutions = 4 * positions, now**2
        flops += 2.0 * _KERNEL_2D * positions * (convolutions + now * self.output_channels)
        return SoundPart(flops=flops, values=6.0 * positions * now)


@dataclass(frozen=True, kw_only=True)
class _Vocoder:
    """Sizes of an `LTX2Vocoder`."""

    in_channels: _Size
    hidden_channels: _Size
    out_channels: Annotated[int, up_to(64)]
    upsample_kernel_sizes: _Numbers
    upsample_factors: _Factors
    resnet_kernel_sizes: _Numbers
    resnet_dilations: Annotated[tuple[_Numbers, ...], Field(max_length=9)]
    output_sampling_rate: Annotated[int, up_to(1_000_000)]
    # Of the filters around each activation; LTX-2 has none.
    antialias: bool = False
    antialias_kernel_size: _Number = 12

    def part(self, frames: float) -> SoundPart:
        """Return what decoding so many frames of a spectrogram computes."""
        positions, now, values = frames, self.hidden_channels, 0.0
        flops = 2.0 * 7 * positions * self.in_channels * now
        kernels = list(zip(self.resnet_kernel_sizes, self.resnet_dilations, strict=True))
        blocks = sum(2 * kernel * len(dilations) for kernel, dilations in kernels)
        activations = sum(2 * len(dilations) for _, dilations in kernels)
        filters = 2 * self.antialias_kernel_size * activations if self.antialias else 0
        for kernel, factor in zip(self.upsample_kernel_sizes, self.upsample_factors, strict=True):
            flops += 2.0 * kernel * positions * now * (now // 2)
            positions, now = positions * factor, now // 2
            flops += 2.0 * positions * (blocks * now**2 + filters * now)
            values = max(values, (len(self.resnet_kernel_sizes) + 5) * positions * now)
        return SoundPart(flops=flops + 2.0 * 7 * positions * now * self.out_channels, values=values)


@dataclass(frozen=True, kw_only=True)
class _Upsampler:
    """Sizes of an `LTX2LatentUpsamplerModel`, of which those that double width and height are supported."""

    in_channels: _Size = 128
    mid_channels: _Size = 1024
    num_blocks_per_stage: _Number = 4
    dims: Annotated[int, Field(ge=2, le=3)] = 3
    spatial_upsample: bool = True
    temporal_upsample: bool = False
    rational_spatial_scale: float = 2.0
    use_rational_resampler: bool = True

    def refinement(self, parameters: int, *, distilled: bool) -> RefinementSpec:
        """Return how a model with it, and so many weights in it, makes videos in two stages.

        Operations are those of the convolutions; most of the memory is in a block at full size: its input, the result
        of a convolution, the norm's, and the activation's. Counted from diffusers' modules, not measured.
        """
        kernel = _KERNEL if self.dims == 3 else _KERNEL_2D  # noqa: PLR2004 - dimensions
        width = self.mid_channels
        blocks = 2 * kernel * self.num_blocks_per_stage * width**2
        before = kernel * self.in_channels * width + blocks + _KERNEL_2D * width * 4 * width
        # There are 4 latents of the result for each one before.
        flops = 2.0 * (before / 4 + blocks + kernel * width * self.in_channels)
        return RefinementSpec(
            levels=REFINING_LEVELS, distilled=distilled, parameters=parameters, flops=flops, values=4.0 * width
        )


_TRANSFORMER = TypeAdapter(TransformerSpec)
_VAE = TypeAdapter(VaeSpec)
_GEMMA = TypeAdapter(_Gemma)
_CONNECTORS = TypeAdapter(_Connectors)
_SOUND_VAE = TypeAdapter(_SoundVae)
_VOCODER = TypeAdapter(_Vocoder)
_UPSAMPLER = TypeAdapter(_Upsampler)
_SHIFT_BY_SIZE = TypeAdapter(ShiftBySize)
# Names of the fields above in diffusers' configurations.
_TRANSFORMER_NAMES: Mapping[str, str] = {
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "attention_head_dim": "attention_head_dim",
    "in_channels": "in_channels",
    "sound_heads": "audio_num_attention_heads",
    "sound_head_dim": "audio_attention_head_dim",
    "sound_channels": "audio_in_channels",
}
# diffusers' defaults where a VAE's configuration has none.
_PADDING = {"encoder_spatial_padding_mode": "zeros", "decoder_spatial_padding_mode": "reflect"}
_STRIDES: Mapping[str, tuple[int, int, int]] = {
    "spatial": (1, 2, 2),
    "temporal": (2, 1, 1),
    "spatiotemporal": (2, 2, 2),
}


def _upsampler(config: Mapping[str, Any]) -> _Upsampler:
    """Return an upsampler that doubles width and height.

    Raises:
        ValueError: for other ones.
    """
    upsampler = _UPSAMPLER.validate_python(_known(config, _Upsampler))
    if not upsampler.spatial_upsample or upsampler.temporal_upsample:
        raise ValueError("spatial_upsample")
    if upsampler.use_rational_resampler and upsampler.rational_spatial_scale != _UPSAMPLED:
        raise ValueError("rational_spatial_scale")
    return upsampler


def _vocoders(config: Mapping[str, Any]) -> tuple[_Vocoder, _Vocoder | None]:
    """Return a vocoder and its bandwidth extension, if it has one."""
    vocoder = _VOCODER.validate_python(_known(config, _Vocoder))
    if config["_class_name"] == "LTX2Vocoder":
        return vocoder, None
    if config["_class_name"] != "LTX2VocoderWithBWE":
        raise ValueError("_class_name")
    of_extension = {
        name.removeprefix(_EXTENSION): value for name, value in config.items() if name.startswith(_EXTENSION)
    }
    return vocoder, _VOCODER.validate_python(_known({**config, **of_extension}, _Vocoder))


class _Part(NamedTuple):
    """How a component in a single file is recognised, see `PartFiles`.

    Attributes:
        read: validates a configuration.
        has_size: whether its sizes, of its configuration, are those of a transformer's.
    """

    names: Callable[[Sequence[str]], dict[str, str]]
    parameters: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]]
    read: Callable[[Mapping[str, Any]], object]
    has_size: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] = lambda _config, _transformer: True

    def files(self, component: str) -> PartFiles:
        """Return what the registry knows of the component."""
        added = part_files.added_to_gemma if component == "text_encoder" else lambda _name: 0.0
        return PartFiles(self.names, self.config_of, self.parameters, partial(self.fits, component), added)

    def config_of(
        self, shapes: Mapping[str, tuple[int, ...]], candidates: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """See `registry.PartFiles`; invalid configurations of installed models are passed over."""
        valid = []
        for config in candidates if shapes else ():
            with suppress(LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
                self.read(config)
                sized = part_files.with_words(shapes, config) if "text_config" in config else config
                valid.append((sized, self.parameters(sized)))
        return part_files.best_fit(shapes, valid)

    def fits(self, component: str, config: Mapping[str, Any], transformer: Mapping[str, Any]) -> bool:
        """See `registry.PartFiles`."""
        return self.has_size(config, transformer) and part_files.of_same_version(component, config, transformer)


_PARTS: Mapping[str, _Part] = {
    "text_encoder": _Part(
        part_files.gemma_names,
        part_files.gemma_parameters,
        lambda config: _GEMMA.validate_python(_known(config["text_config"], _Gemma)),
        lambda config, transformer: bool(config["text_config"]["hidden_size"] == transformer["caption_channels"]),
    ),
    CONNECTORS: _Part(
        part_files.connector_names,
        part_files.connector_parameters,
        lambda config: _CONNECTORS.validate_python(_known(config, _Connectors)),
    ),
    "vae": _Part(
        part_files.vae_names,
        part_files.vae_parameters,
        lambda config: _VAE.validate_python(_vae_values(config)),
        lambda config, transformer: bool(config["latent_channels"] == transformer["in_channels"]),
    ),
    "audio_vae": _Part(
        part_files.sound_vae_names,
        part_files.sound_vae_parameters,
        lambda config: _SOUND_VAE.validate_python(_known(config, _SoundVae)),
        lambda config, transformer: bool(config["base_channels"] == transformer["audio_in_channels"]),
    ),
    "vocoder": _Part(part_files.vocoder_names, part_files.vocoder_parameters, _vocoders),
    LATENT_UPSAMPLER: _Part(
        part_files.upsampler_names,
        part_files.upsampler_parameters,
        _upsampler,
        lambda config, transformer: bool(config["in_channels"] == transformer["in_channels"]),
    ),
}


class Ltx2Family(Family):
    """See `models.registry.Family`."""

    negative_prompt = NEGATIVE_PROMPT
    prompt_guide = GUIDE
    single_files: SingleFiles | None = file_names
    part_files: Mapping[str, PartFiles] = {component: part.files(component) for component, part in _PARTS.items()}
    lora_change = staticmethod(lora_names.NAMES.change_of)
    lora_weight_shape = staticmethod(lora_names.weight_shape)

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Read a model folder, as `LTX2Pipeline.save_pretrained` writes it.

        Raises:
            ModelError: if it is incomplete, damaged or invalid.
        """
        with reading(directory.name):
            configs = _read_configurations(directory, directory.name)
            sidecar = read_sidecar(directory, 1) or {
                "title": directory.name,
                "license": "unknown",
                **_card(configs),
            }
            return ModelSpec(
                family="ltx2",
                name=name,
                directory=directory,
                parameters={part: _parameters(directory, part) for part in _PROGRAMS},
                **_fields(configs),
                refinement=_refinement(configs, lambda: _parameters(directory, LATENT_UPSAMPLER)),
                **{"latent_rgb": None, **sidecar},
            )

    def assemble(
        self, directory: Path, name: str, files: Mapping[str, WeightFiles], model: KnownModel | None
    ) -> ModelSpec:
        """See `registry.Family`. The file's name states whether its transformer is distilled, else the folder does."""
        with reading(directory.name):
            files = {**files, VAE_ENCODER: files["vae"]} if "vae" in files else files
            configs = _read_configurations(directory, directory.name, files, name)
            about: dict[str, Any] = {"title": name, "license": "unknown", "latent_rgb": None}
            if model is not None:
                about |= {"title": model.title, "license": model.license, "about": model.about}
            parameters = {part: _parameters(directory, part) for part in _PROGRAMS if part not in files}
            upsampler = files.get(LATENT_UPSAMPLER)
            return ModelSpec(
                family="ltx2",
                name=name,
                directory=directory,
                parameters={**parameters, **{part: of_part.parameters for part, of_part in files.items()}},
                files=files,
                refinement=_refinement(
                    configs, lambda: upsampler.parameters if upsampler else _parameters(directory, LATENT_UPSAMPLER)
                ),
                **_fields(configs),
                **_card(configs),
                **about,
            )

    def check(self, directory: Path, title: str) -> None:
        """Check a folder's configurations.

        Raises:
            ModelError: if one is missing, damaged or invalid.
        """
        with reading(title):
            _read_configurations(directory, title)

    def known_spec(self, model: KnownModel, weights_dir: Path) -> ModelSpec:
        """Return the spec of a published model, as if its folder were in `weights_dir`."""
        shifted = {"use_dynamic_shifting": True, "shift_terminal": 0.1}
        scheduler = _SCHEDULER if _DISTILLED in model.name else {**_SCHEDULER, **shifted}
        configs = _configurations({**model.configs, "scheduler": scheduler}, model.title)
        refinement = _refinement(configs, lambda: model.parameters[LATENT_UPSAMPLER])
        return ModelSpec(**_fields(configs), **_card(configs), **model.description(weights_dir), refinement=refinement)


FAMILY: Family = Ltx2Family()


class _Configurations(NamedTuple):
    """The configurations of a folder."""

    transformer: TransformerSpec
    vae: VaeSpec
    encoder: TextEncoderSpec
    sound: SoundSpec
    noise: NoiseLevels
    scheduler: str
    upsampler: _Upsampler | None
    block_programs: tuple[str, ...]


def _read_configurations(
    directory: Path, title: str, files: Mapping[str, WeightFiles] | None = None, name: str = ""
) -> _Configurations:
    """Read and check all configurations of a folder, before a library reads one.

    Args:
        files: instead of the folder's components, which may be missing, as may the pipeline's configuration.
        name: of the transformer's file.

    Raises:
        KeyError, TypeError, ValueError: if one is incomplete or wrong.
        ModelError: if one is missing or not JSON, or they do not fit each other.
    """
    of_files = {part: of_part.config for part, of_part in (files or {}).items()}
    if not of_files:
        read_config(directory / "model_index.json")
    configs: dict[str, Mapping[str, Any]] = {
        part: of_files[part] if part in of_files else read_config(directory / folder_of(part) / "config.json")
        for part in _PROGRAMS
    }
    scheduler = read_config(directory / "scheduler" / "scheduler_config.json")
    if _DISTILLED in name.lower():
        scheduler["use_dynamic_shifting"] = False
    elif _FULL in name.lower() and not scheduler.get("use_dynamic_shifting"):
        raise ValueError("use_dynamic_shifting")
    configs["scheduler"] = scheduler
    # A folder may have it or not: pipelines do not name it.
    upsampler = directory / LATENT_UPSAMPLER / "config.json"
    if LATENT_UPSAMPLER in of_files:
        configs[LATENT_UPSAMPLER] = of_files[LATENT_UPSAMPLER]
    elif upsampler.is_file():
        configs[LATENT_UPSAMPLER] = read_config(upsampler)
    return _configurations(configs, title)


def _configurations(configs: Mapping[str, Mapping[str, Any]], title: str) -> _Configurations:
    """Check the configurations by component, and return what a spec needs of them; see `_read_configurations`."""
    config = configs["transformer"]
    connectors = _CONNECTORS.validate_python(_known(configs[CONNECTORS], _Connectors))
    text_dim, sound_text_dim = connectors.widths
    transformer = _TRANSFORMER.validate_python(
        {
            **{ours: config[theirs] for ours, theirs in _TRANSFORMER_NAMES.items()},
            "text_dim": text_dim,
            "sound_text_dim": sound_text_dim,
            "modulated_text": config.get("cross_attn_mod", False),
            "keeps_text": not (config.get("cross_attn_mod", False) and config.get("use_prompt_adaln_single", True)),
            "gated": config.get("gated_attn", False),
            "splits_heads": config.get("rope_type", "interleaved") == "split",
            "projects_text": config.get("use_prompt_embeddings", True),
        }
    )
    _check_transformer(config, transformer, connectors)
    vae_config = configs["vae"]
    vae = _VAE.validate_python(_vae_values(vae_config))
    if vae.z_dim != transformer.in_channels:
        raise ModelError("model.channels_differ", model=title, transformer=transformer.in_channels, vae=vae.z_dim)
    kind = configs["text_encoder"].get("model_type", _TEXT_ENCODER)
    if kind != _TEXT_ENCODER:
        raise ModelError("model.text_encoder_unknown", model=title, kind=shortened(kind), known=_TEXT_ENCODER)
    gemma = _GEMMA.validate_python(_known(configs["text_encoder"]["text_config"], _Gemma))
    if (gemma.hidden_size, gemma.num_hidden_layers + 1) != (
        connectors.caption_channels,
        connectors.text_proj_in_factor,
    ):
        raise ValueError("caption_channels")
    encoder = TextEncoderSpec(
        width=gemma.hidden_size,
        ffn_dim=gemma.intermediate_size,
        num_heads=gemma.num_attention_heads,
        vocab_size=gemma.vocab_size,
        max_tokens=MAX_SEQUENCE_LENGTH,
        stores_scores=False,
        states=connectors.text_proj_in_factor,
    )
    scheduler = configs["scheduler"]
    if scheduler["_class_name"] != "FlowMatchEulerDiscreteScheduler":
        raise ValueError("_class_name")
    sound = _sound(configs, transformer)
    upsampler = None
    if LATENT_UPSAMPLER in configs:
        upsampler = _upsampler(configs[LATENT_UPSAMPLER])
        if upsampler.in_channels != vae.z_dim:
            raise ValueError("in_channels")
    noise = _noise(scheduler)
    blocks = BLOCK_PROGRAMS if all(config.get(name, value) == value for name, value in _BLOCKS.items()) else ()
    return _Configurations(transformer, vae, encoder, sound, noise, str(scheduler["_class_name"]), upsampler, blocks)


def _refinement(configs: _Configurations, parameters: Callable[[], int]) -> RefinementSpec | None:
    """Return how a model with an upsampler makes videos in two stages; `None` for others.

    Args:
        parameters: returns the number of weights of the upsampler.
    """
    if configs.upsampler is None:
        return None
    return configs.upsampler.refinement(parameters(), distilled=bool(configs.noise.levels))


def _check_transformer(config: Mapping[str, Any], transformer: TransformerSpec, connectors: _Connectors) -> None:
    """Refuse what diffusers' modules have and `transformer` does not pass to them."""
    for name in ("patch_size", "patch_size_t", "audio_patch_size", "audio_patch_size_t"):
        if config.get(name, 1) != 1:
            raise ValueError(name)
    if config.get("norm_elementwise_affine", False):
        raise ValueError("norm_elementwise_affine")
    for name in ("cross_attn_mod", "gated_attn"):
        if config.get(name, False) != config.get(f"audio_{name}", False):
            raise ValueError(name)
    widths = {"cross_attention_dim": transformer.width, "audio_cross_attention_dim": transformer.sound_width}
    for name, width in widths.items():
        if config[name] != width:
            raise ValueError(name)
    if transformer.projects_text:
        if {*connectors.widths} != {config["caption_channels"]}:
            raise ValueError("caption_channels")
    elif connectors.widths != (transformer.width, transformer.sound_width):
        raise ValueError("video_connector_num_attention_heads")
    registers = (
        connectors.video_connector_num_learnable_registers,
        connectors.audio_connector_num_learnable_registers,
    )
    if any(MAX_SEQUENCE_LENGTH % count for count in registers):
        raise ValueError("video_connector_num_learnable_registers")


def _vae_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `VaeSpec`."""
    if config.get("timestep_conditioning") or any(config["decoder_inject_noise"]):
        raise ValueError("timestep_conditioning")
    if config.get("patch_size_t", 1) != 1:
        raise ValueError("patch_size_t")

    def strides(kinds: Sequence[str], scaling: Sequence[bool]) -> list[tuple[int, int, int]]:
        return [_STRIDES[kind] if scaled else (1, 1, 1) for kind, scaled in zip(kinds, scaling, strict=True)]

    return {
        "z_dim": config["latent_channels"],
        "channels": config["block_out_channels"],
        "layers": config["layers_per_block"],
        "strides": strides(config["downsample_type"], config["spatio_temporal_scaling"]),
        "decoder_channels": config["decoder_block_out_channels"],
        "decoder_layers": config["decoder_layers_per_block"],
        "decoder_strides": strides(part_files.enlargements(config), config["decoder_spatio_temporal_scaling"][::-1]),
        "decoder_factors": config["upsample_factor"],
        "patch": config["patch_size"],
        "scale_factor_temporal": config["temporal_compression_ratio"],
        "scale_factor_spatial": config["spatial_compression_ratio"],
        "reflects": "reflect" in {config.get(name, default) for name, default in _PADDING.items()},
    }


def _sound(configs: Mapping[str, Mapping[str, Any]], transformer: TransformerSpec) -> SoundSpec:
    """Return what is known of the sound."""
    vae = _SOUND_VAE.validate_python(_known(configs["audio_vae"], _SoundVae))
    config = configs["vocoder"]
    vocoder, extension = _vocoders(config)
    bins = vae.mel_bins // _SPECTRUM_STRIDE
    if vae.latent_channels * bins != transformer.sound_channels or vae.base_channels != transformer.sound_channels:
        raise ValueError("audio_in_channels")
    if vocoder.in_channels != vae.output_channels * vae.mel_bins:
        raise ValueError("in_channels")
    part = vocoder.part(_SPECTRUM_STRIDE)
    if extension is not None:
        samples = _SPECTRUM_STRIDE * prod(vocoder.upsample_factors)
        added = extension.part(samples / config["hop_length"])
        part = SoundPart(flops=part.flops + added.flops, values=max(part.values, added.values))
    latents = SoundLatents(
        channels=vae.latent_channels,
        bins=bins,
        per_second=vae.sample_rate / vae.mel_hop_length / _SPECTRUM_STRIDE,
        width=transformer.sound_width,
        heads=transformer.sound_heads,
        text_dim=transformer.sound_text_dim,
        parts={"audio_vae": vae.part(), "vocoder": part},
        guidance=_guidance(transformer),
    )
    return SoundSpec(rate=vocoder.output_sampling_rate, channels=vocoder.out_channels, latents=latents)


def _guidance(transformer: TransformerSpec) -> StreamGuidance:
    """Return the publishers' guidance, whose block differs between versions; a scale of 1 turns all of it off."""
    block = 28 if transformer.modulated_text else 29
    return StreamGuidance(
        sound_scale=7.0,
        skipped=(1.0, 1.0),
        skipping_blocks=(min(block, transformer.num_layers - 1),),
        isolated=(3.0, 3.0),
        rescaled=(0.7, 0.7),
    )


def _noise(scheduler: Mapping[str, Any]) -> NoiseLevels:
    """Return where a folder's scheduler puts the steps: a distilled model's has no shift by size."""
    noise = noise_levels(scheduler)
    if not scheduler.get("use_dynamic_shifting"):
        fixed = Fact("scheduler.fixed_levels")
        return replace(noise, setting=None, fixed=fixed, spread="linear", levels=DISTILLED_LEVELS)
    fewest, most, least, largest = (scheduler.get(name, value) for name, value in _SHIFT.items())
    by_size = _SHIFT_BY_SIZE.validate_python({"fewest": fewest, "most": most, "least": least, "largest": largest})
    if by_size.fewest >= by_size.most:
        raise ValueError("max_image_seq_len")
    return replace(noise, setting=None, fixed=Fact("scheduler.shift_by_size"), spread="linear", by_size=by_size)


def _card(configs: _Configurations) -> dict[str, Any]:
    """Return the publishers' defaults: of a distilled model, 8 steps without guidance."""
    distilled = bool(configs.noise.levels)
    steps = len(configs.noise.levels) if distilled else 30 if configs.transformer.modulated_text else 40
    return {
        "defaults": Defaults(
            width=768,
            height=512,
            frames=121,
            fps=24,
            steps=steps,
            guidance_scale=1.0 if distilled else 3.0,
            guidance_scale_2=None,
            negative_prompt=NEGATIVE_PROMPT,
        ),
        "sizes": ((768, 512), (512, 768), (1216, 704), (704, 1216), (1536, 1024), (1024, 1536)),
        "frame_counts": (25, 49, 97, 121, 241, 481),
    }


def _fields(configs: _Configurations) -> dict[str, Any]:
    """Return the fields of a spec that configurations decide, and that all models of the family share."""
    return {
        "transformer": configs.transformer,
        "experts": 1,
        "vae": configs.vae,
        "least_latents": 2 if configs.vae.reflects else 1,
        "boundary_ratio": None,
        "scheduler": configs.scheduler,
        "expand_timesteps": False,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "encoders": {"text_encoder": configs.encoder},
        "programs": _PROGRAMS,
        "block_programs": configs.block_programs,
        "noise": configs.noise,
        "image_input": ImageInput(kind="first_frame", vae=configs.vae, required=False, last="keyframe", crf=_IMAGE_CRF),
        "sound": configs.sound,
        "lacks": _LACKS if configs.transformer.keeps_text else _LACKS | {"text_kept"},
        "unquantized": file_names.UNQUANTIZED,
    }


def _parameters(directory: Path, component: str) -> int:
    """Return the number of weights of a component that are loaded, see `conditioning.GemmaStates`."""
    folder = directory / folder_of(component)
    if component != "text_encoder":
        return count_parameters(folder)
    return sum(count for name, (_, count) in tensor_types(folder).items() if not VISION.match(name))


def _known(config: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the values of a configuration that a class has as fields."""
    return {
        name: config[name]
        for name, field in kind.__dataclass_fields__.items()
        if name in config or field.default is MISSING
    }
