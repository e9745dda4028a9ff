"""Specification of a model: architecture, defaults and limits, read from its folder without loading weights.

Families implement `TransformerSpec` and `VaeSpec`, whose methods give the operations and bytes that follow from the
architecture. Knows nothing about machines or engines.
"""

from collections.abc import Collection, Mapping
from dataclasses import Field as DataclassField
from dataclasses import dataclass, field, replace
from math import gcd, prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from runtime.core.facts import Fact
from runtime.core.images import NO_BORDERS, BoxMask, ImageUse, InputFile, VideoUse
from runtime.core.loras import BOTH, LoraUse
from runtime.core.preprocessors import PreprocessorUse
from runtime.core.request import (
    CONTROL_VIDEOS,
    FINISHERS,
    MAX_FPS,
    MAX_FRAMES,
    MAX_GUIDANCE,
    MAX_PROMPT_CHARACTERS,
    MAX_SIDE,
    MAX_STEPS,
    UPSCALER,
)
from runtime.models.sections import SamplingType, Sections, Segments
from runtime.models.stored_weights import WeightFiles
from runtime.models.timesteps import RENEWING_SCHEDULER, UNKNOWN_LEVELS, NoiseLevels
from runtime.models.variants import InstalledVariant

_FLOAT32 = 4
# Of a small model's weights in float32.
_SMALL_BYTES = 1 << 30
# The components that run only if there is an image.
IMAGE_ENCODER, VAE_ENCODER = "image_encoder", "vae_encoder"
# Makes what the transformer attends to of the text encoder's states, in models that have it.
CONNECTORS = "connectors"
# Doubles the width and height of latents between two stages, in models that have it.
LATENT_UPSAMPLER = "latent_upsampler"
# An entry of `ModelSpec.lacks`.
ROW_KERNELS = "row_kernels"
# The only component, and its only program, of a model that decodes single frames and makes no videos.
FRAME_DECODER = "frame_decoder"
# Programs of single frames, whose batch size is the number of frames.
FRAME_PROGRAMS = frozenset({FRAME_DECODER, *FINISHERS})
# Frames of a full batch on a GPU.
FRAME_BATCH = 8
_Weight = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def is_transformer(component: str) -> bool:
    """Whether a component is one of the experts."""
    return component.startswith("transformer")


def is_text_encoder(component: str) -> bool:
    """Whether a component embeds prompts."""
    return component.startswith("text_encoder")


def folder_of(component: str) -> str:
    """Return the folder of a component in a model's folder: both parts of the VAE have one, a frame decoder none."""
    return "." if component in FRAME_PROGRAMS else {VAE_ENCODER: "vae"}.get(component, component)


def component_of(program: str) -> str:
    """Return the component of a program that computes all or a step of one; both experts have "transformer"."""
    return next((part for part in (VAE_ENCODER, "vae") if program.startswith(part)), program)


def attention_flops(spec: "ModelSpec", tokens: int) -> float:
    """Return the operations of the attention among a clip's tokens in one block."""
    return 4.0 * tokens**2 * spec.transformer.width


class TransformerSpec(Protocol):
    """Architecture of a transformer: a frozen dataclass of the family, equal for equal architectures."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def num_layers(self) -> int:
        """Blocks."""

    @property
    def num_attention_heads(self) -> int:
        """Heads of the attention among a clip's tokens."""

    @property
    def attention_head_dim(self) -> int:
        """Channels of a head."""

    @property
    def width(self) -> int:
        """Channels of a token."""

    @property
    def ffn_dim(self) -> int:
        """Channels of the feed-forward's inner layer."""

    @property
    def rotation_values(self) -> int:
        """Numbers of a token in the tables of the rotary embedding."""

    @property
    def in_channels(self) -> int:
        """Channels of the latents."""

    @property
    def text_dim(self) -> int:
        """Channels of a text embedding."""

    @property
    def patch_size(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns of one token."""

    @property
    def rope_max_seq_len(self) -> int:
        """The most tokens along one axis."""

    @property
    def block_parameters(self) -> int:
        """Weights in the linear layers of all blocks, which quantization and group offload apply to."""

    @property
    def largest_block_parameters(self) -> int:
        """Those of the largest block; a block of this size may follow another one."""

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """Return the operations (two per multiply-add) of one forward pass, batch 1."""

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """Return the peak memory of one forward pass in bytes, weights excluded.

        Args:
            element_bytes: of the dtype it computes in.
            time_per_token: whether every token has its own timestep.
        """


class VaeSpec(Protocol):
    """Architecture of a VAE decoder: a frozen dataclass of the family, equal for equal architectures."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def z_dim(self) -> int:
        """Channels of the latents."""

    @property
    def scale_factor_temporal(self) -> int:
        """Frames of one latent frame; the first latent frame is one frame."""

    @property
    def scale_factor_spatial(self) -> int:
        """Pixels of one latent, in width and in height."""

    @property
    def last_channels(self) -> int:
        """Channels of the decoder's last and largest level."""

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations (two per multiply-add) of decoding a clip of that many frames and pixels."""

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return the peak memory of decoding `latent_frames` in one call in bytes, weights excluded.

        Args:
            height, width: in pixels.
            element_bytes: of the dtype it computes in.
            cpu: whether a CPU decodes, whose kernels need other buffers.
        """

    def cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return the bytes that one call passes to the next when a clip is decoded in several calls."""


class VaeEncoderSpec(Protocol):
    """Architecture of a VAE encoder: a frozen dataclass of the family."""

    def encode_flops(self, frames: int, height: int, width: int, *, video: bool = False) -> float:
        """Return the operations of encoding a clip of so many frames and pixels.

        Args:
            video: whether all frames differ; by default, it is an image and gray frames.
        """

    def encode_bytes(self, frames: int, height: int, width: int, element_bytes: int) -> int:
        """Return the peak memory of encoding an image and gray frames in bytes, weights excluded."""

    def encoder_cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return the bytes that one call passes to the next when a clip is encoded in several calls."""


@dataclass(frozen=True, kw_only=True)
class TextEncoderSpec:
    """Sizes of a text encoder.

    Attributes:
        width: channels of a token.
        ffn_dim: channels of the feed-forward's inner layer.
        num_heads: heads of the attention.
        vocab_size: rows of the embedding table.
        max_tokens: the most tokens of one text, with those that the family adds to a prompt.
        stores_scores: whether the attention stores its matrices, as that of T5 does; PyTorch's own stores none.
        takes_weights: whether the result has the state of each token of the prompt, so that words can have weights.
        states: hidden states of a token that are the result; more than one if a model uses those between layers too.
    """

    width: Annotated[int, Field(strict=True, ge=1, le=65_536)]
    ffn_dim: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    num_heads: Annotated[int, Field(strict=True, ge=1, le=1_024)]
    vocab_size: Annotated[int, Field(strict=True, ge=1, le=10_000_000)]
    max_tokens: int
    stores_scores: bool
    takes_weights: bool = False
    states: int = 1

    def forward_bytes(self, element_bytes: int) -> int:
        """Return the peak memory of one call in bytes, weights excluded.

        With stored scores, there are scores, bias and bias with mask in the encoder's dtype, and scores and their
        softmax in float32: within 15 % of UMT5's memory on an H200. Without, the peak is in the feed-forward: stream,
        norm, residual and result, and the inner layer three times. That is counted from transformers' modules, not
        measured. States between layers are kept, and then joined.
        """
        tokens = self.max_tokens
        stream = (4 + 2 * (self.states - 1)) * tokens * self.width * element_bytes
        if self.stores_scores:
            return self.num_heads * tokens**2 * (3 * element_bytes + 2 * _FLOAT32) + stream
        return 3 * tokens * self.ffn_dim * element_bytes + stream


@dataclass(frozen=True)
class LatentRgb:
    """A linear map from normalised latents to RGB in -1 to 1, for previews: `factors` is channels × 3."""

    factors: tuple[tuple[_Weight, _Weight, _Weight], ...]
    bias: tuple[_Weight, _Weight, _Weight]


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values that replace "auto" in a request, with its limits, which are checked when they are read from a file.

    Attributes:
        image_guidance_scale, image_guidance_scale_2: guidance scales of videos that start from an image, for models
            that do better with others; `None` for the same.
        upscale: how many times finished frames are enlarged; "off" for not at all.
    """

    width: Annotated[int, Field(strict=True, ge=1, le=MAX_SIDE)]
    height: Annotated[int, Field(strict=True, ge=1, le=MAX_SIDE)]
    frames: Annotated[int, Field(strict=True, ge=1, le=MAX_FRAMES)]
    fps: Annotated[int, Field(strict=True, ge=1, le=MAX_FPS)]
    steps: Annotated[int, Field(strict=True, ge=1, le=MAX_STEPS)]
    guidance_scale: Annotated[float, Field(strict=True, ge=0, le=MAX_GUIDANCE)]
    guidance_scale_2: Annotated[float, Field(strict=True, ge=0, le=MAX_GUIDANCE)] | None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
    image_guidance_scale: Annotated[float, Field(strict=True, ge=0, le=MAX_GUIDANCE)] | None = None
    image_guidance_scale_2: Annotated[float, Field(strict=True, ge=0, le=MAX_GUIDANCE)] | None = None
    upscale: Literal["off", "2", "3", "4"] = "off"

    def guidance(self, *, from_image: bool) -> tuple[float, float | None]:
        """Return the guidance scales of the transformers, the second `None` if the first applies to both."""
        if from_image and self.image_guidance_scale is not None:
            return self.image_guidance_scale, self.image_guidance_scale_2
        return self.guidance_scale, self.guidance_scale_2


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """How a model starts from an image.

    Attributes:
        kind: "channels" appends a mask and the latents of the given frames to the latents; "first_frame" puts the
            latents of the image in place of the first latent frame, whose timestep is 0; "sections" gives every section
            the images' latents as further frames, see `ModelSpec.section`; "character" puts a latent frame before the
            clip's, for an image of who the clip is of, and does not start the clip with it; "control" puts the images
            in place of frames of the control video, which do not change, see `ControlInput`.
        vae: the encoder of the images' latents.
        required: whether the model makes no video without an image.
        last: whether a last image can be given. As a "keyframe" it is optional, also without a first one: the
            transformer is given its latents as a further latent frame, whose timestep is 0, at the place of the clip's
            last latent frame. The video comes close to it and does not end on exactly it. Such a model takes keyframes
            at other latent frames too. "alone" is optional, also without a first one, and the video ends on it.
        tokens, width: of the images' CLIP embeddings that the transformer attends to; 0 without an image encoder.
        crf: constant rate factor of H.264 with which images are compressed before they are encoded, as in the training;
            `None` for not at all.
    """

    kind: Literal["channels", "first_frame", "sections", "character", "control"]
    vae: VaeEncoderSpec
    required: bool
    last: Literal["none", "optional", "required", "keyframe", "alone"] = "none"
    tokens: int = 0
    width: int = 0
    crf: int | None = None


@dataclass(frozen=True, kw_only=True)
class ControlInput:
    """How a model is steered by videos and images.

    Attributes:
        vae: the encoder of their latents, which every video needs.
        blocks: how many blocks read them; each has a scale. 0 without scales.
        channels: of what they read, which follow the channels of the latents, see `Denoiser`.
        fields: the request's fields that it takes.
        required: those without which it makes no video.
        masked: the field of the video that a mask changes.
        face_side: width and height in pixels of the frames of a face video; 0 without.
        segment_frames: of a clip, which the model was trained with; longer ones are made in segments. `None` if all are
            made whole.
        overlap: frames that a segment shares with the one before.
    """

    vae: VaeEncoderSpec
    blocks: int
    channels: int
    fields: tuple[str, ...] = (
        *("control", "mask", "references"),
        *("control_scale", "preprocess", "control_start", "outpaint"),
    )
    required: tuple[str, ...] = ()
    masked: str = "control"
    face_side: int = 0
    segment_frames: int | None = None
    overlap: int = 1

    def scales(self, requested: tuple[float, ...]) -> tuple[float, ...]:
        """Return the scale of each block, of a scale for each or one for all."""
        return requested * self.blocks if len(requested) == 1 else requested


@dataclass(frozen=True, kw_only=True)
class StreamGuidance:
    """Guidance of a model that denoises video and sound together, in addition to a request's guidance scale.

    Each pair is for the video and for the sound. Source: diffusers' `LTX2Pipeline`.

    Attributes:
        sound_scale: classifier-free guidance scale of the sound; that of the video is the request's.
        skipped: scales of the difference to a pass in which some blocks skip their self-attention; 0 for none.
        skipping_blocks: these blocks.
        isolated: scales of guidance by a pass in which the streams do not attend to each other; 1 for none.
        rescaled: how far the result is scaled to the deviation of the prediction with the prompt, 0 to 1.
    """

    sound_scale: float
    skipped: tuple[float, float] = (0.0, 0.0)
    skipping_blocks: tuple[int, ...] = ()
    isolated: tuple[float, float] = (1.0, 1.0)
    rescaled: tuple[float, float] = (0.0, 0.0)

    @property
    def skips(self) -> bool:
        """Whether there is a pass in which blocks skip their self-attention."""
        return max(self.skipped) > 0

    @property
    def isolates(self) -> bool:
        """Whether there is a pass in which the streams do not attend to each other."""
        return max(self.isolated) > 1

    @property
    def passes(self) -> int:
        """Forward passes of a step."""
        return 2 + self.skips + self.isolates


@dataclass(frozen=True, kw_only=True)
class SoundPart:
    """What a decoder of sound computes for each latent of the sound.

    Attributes:
        flops: operations (two per multiply-add).
        values: numbers in memory at the peak.
    """

    flops: float
    values: float


@dataclass(frozen=True, kw_only=True)
class SoundLatents:
    """The latents of sound that is denoised together with the frames.

    Attributes:
        channels, bins: of each latent.
        per_second: latents of a second.
        width: channels of a latent in the transformer.
        text_dim: channels of an embedding of the text that it attends to.
        heads: of its attention to the video.
        parts: what `SOUND_DECODERS` compute, by name.
        guidance: of both streams.
    """

    channels: int
    bins: int
    per_second: float
    width: int
    heads: int
    text_dim: int
    parts: Mapping[str, SoundPart]
    guidance: StreamGuidance

    def shape(self, frames: int, fps: float) -> tuple[int, int, int, int]:
        """Return (batch, channels, latents, bins) of the sound of a clip."""
        return 1, self.channels, max(round(frames / fps * self.per_second), 1), self.bins

    def seconds(self, latents: int) -> float:
        """Return how long the sound of so many latents is."""
        return latents / self.per_second


@dataclass(frozen=True, kw_only=True)
class SoundSpec:
    """The sound that a model makes with the frames.

    Attributes:
        rate: samples per second.
        channels: 1 or 2.
        latents: of models that denoise it together with the frames.
    """

    rate: int
    channels: int
    latents: SoundLatents | None = None


@dataclass(frozen=True, kw_only=True)
class SectionSpec:
    """How a model makes a video in sections, each from the images and from what was made before it.

    Attributes:
        latent_frames: of each section.
        sampling_type: the order of sections, by diffusers' names: from the start to the end, or the other way.
    """

    latent_frames: int
    sampling_type: Literal["vanilla", "inverted_anti_drifting"]

    @property
    def windows(self) -> tuple[int, ...]:
        """How many latent frames are decoded for a section, in videos of any length."""
        size = self.latent_frames
        return (size + 1, 2 * size) if self.sampling_type == "vanilla" else (size, size + 1, 2 * size, 2 * size + 1)

    def decoded(self, sections: int) -> int:
        """Return the most latent frames that are decoded for one of `sections` sections.

        They are its own and the image's, and those of the section made before, with which it blends.
        """
        return (1 if sections == 1 else 2) * self.latent_frames + 1


@dataclass(frozen=True, kw_only=True)
class RefinementSpec:
    """How a model makes a video at half its width and height, and then refines it at its own size.

    Attributes:
        levels: noise levels before each step of the second stage, without guidance.
        parameters: number of weights of `LATENT_UPSAMPLER`.
        flops: operations (two per multiply-add) of the upsampler for each latent of the result.
        values: numbers in memory for each latent of the result, at the peak.
        distilled: whether the model itself was distilled for such steps; another one needs a LoRA that makes it so.
    """

    levels: tuple[float, ...]
    distilled: bool
    parameters: int
    flops: float
    values: float


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model that makes videos from text, from an image, or from both.

    Attributes:
        family: a key of `models.registry.FAMILIES`.
        name: as the catalogue and `--model` know it.
        title: as people read it.
        license: of the weights, where it is known.
        about: a sentence on what it makes, where it is known.
        directory: its folder, in diffusers' format.
        transformer: architecture of the transformer, or of both experts.
        experts: 1 or 2.
        boundary_ratio: the high-noise expert runs while timestep / 1000 is at least this.
        scheduler: name of its diffusers class.
        expand_timesteps: one timestep per token (TI2V-5B).
        embedded_guidance: whether the guidance scale is an input of the transformer, instead of a second pass.
        max_sequence_length: text tokens that the transformer attends to, zero-padded.
        parameters: number of weights by component that are loaded.
        encoders: sizes of the text encoders by component.
        programs: the components in the order they run, and the programs to build engines of; see `engines.programs`.
        block_programs: the programs of a transformer's block engines; empty if the family has none.
        latent_rgb: for previews, where it is known.
        defaults: for "auto".
        sizes, frame_counts: what the model was made for, (width, height) and frames.
        is_downloaded: whether `directory` exists; a published model can be planned with before that.
        flow_shift: how far the scheduler moves noise levels towards noise, if its configuration has a shift.
        unsupported: request fields that the family does not support: "gpus", "step_cache", "guidance_cache",
            "nag".
        lacks: what its components in PyTorch do not implement, so that the planner never chooses it: fields of
            `plan.Speed`; "compiled_vae", compilation of the VAE; "strips", decoding on several GPUs; "chunks",
            decoding in several calls; and `ROW_KERNELS`, those of `row_kernels` for norms and gates.
        unquantized: layers outside the transformers' blocks that keep their precision when the blocks are quantized;
            each a part of a layer's path or a whole parameter, as diffusers' quantizers compare them.
        loras: LoRAs to add to its transformers' weights when they are loaded, see `models.loras.with_loras`.
        variant: what a variant's folder states of it; `None` for other models.
        distilled_steps: for how many steps it was distilled, if the name of its folder or file says so.
        image_input: how it starts from an image; `None` if it cannot.
        section: how it makes a video in sections; `None` if it makes videos whole.
        sound: what it makes with the frames; `None` if its videos are silent.
        image, last_image, keyframes: the images of one request, see `models.images.with_images`.
        video_input: the encoder of a video that it starts from; `None` if it cannot.
        video: the video of one request, see `models.videos.with_video`.
        control_input: how it is steered by a control video; `None` if it cannot.
        control, face, background, mask, references: what steers the video of one request, see
            `models.control.with_control`.
        preprocessor: the model that makes control frames of one request, see `models.preprocessors`.
        outpaint: what is added around the control video of one request, see `core.images.Borders`.
        extend: the video that one request continues, see `models.videos.with_extended`; `image` is its last frame.
        extend_frames: how many of its last frames the new part begins with.
        join: the video that follows the new part, which ends with as many of its first frames.
        interpolator: the network that computes frames between those of one request, see `interpolates`.
        upscaler: what enlarges the frames of one request, see `models.requested.with_finishers`.
        noise: where the scheduler puts the steps.
        least_latents: the fewest latents of a side that its VAE takes.
        mag_ratios: for MagCache, by transformer: the size of its blocks' residual in each of its steps, divided by that
            in the step before, averaged over tokens; the first is 1. Empty where they were not measured.
        words: examples of what a model with a small vocabulary knows, by group, in the order of a sentence.
        interpolates: whether the network of `families.interpolator` was trained on what it shows.
        version: of its weights; the settings of a video by another version may not suit them.
        files: of the components whose weights are not in `directory` or are quantized there.
        refinement: how it makes videos in two stages; `None` if it cannot.
        stages: 1, or 2 in one request, see `in_stages`.
    """

    family: str
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
    encoders: Mapping[str, TextEncoderSpec]
    programs: Mapping[str, tuple[str, ...]]
    latent_rgb: LatentRgb | None
    defaults: Defaults
    sizes: tuple[tuple[int, int], ...]
    frame_counts: tuple[int, ...]
    is_downloaded: bool = True
    flow_shift: float | None = None
    unsupported: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    unquantized: tuple[str, ...] = ("patch_embedding", "condition_embedder", "proj_out")
    about: str = ""
    block_programs: tuple[str, ...] = ()
    loras: tuple[LoraUse, ...] = ()
    image_input: ImageInput | None = None
    section: SectionSpec | None = None
    sound: SoundSpec | None = None
    image: ImageUse | None = None
    last_image: ImageUse | None = None
    keyframes: tuple[ImageUse, ...] = ()
    video_input: VaeEncoderSpec | None = None
    video: VideoUse | None = None
    control_input: ControlInput | None = None
    control: VideoUse | None = None
    face: VideoUse | None = None
    background: VideoUse | None = None
    mask: VideoUse | ImageUse | BoxMask | None = None
    references: tuple[ImageUse, ...] = ()
    preprocessor: PreprocessorUse | None = None
    outpaint: tuple[float, ...] = NO_BORDERS
    extend: VideoUse | None = None
    extend_frames: int = 1
    join: VideoUse | None = None
    interpolator: "ModelSpec | None" = None
    upscaler: "ModelSpec | None" = None
    noise: NoiseLevels = UNKNOWN_LEVELS
    least_latents: int = 1
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    embedded_guidance: bool = False
    mag_ratios: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    files: Mapping[str, WeightFiles] = field(default_factory=dict)
    interpolates: bool = False
    version: int = 1
    refinement: RefinementSpec | None = None
    stages: int = 1
    variant: InstalledVariant | None = None
    distilled_steps: int | None = None

    def weight_paths(self, component: str) -> list[Path]:
        """Return the files with a component's weights."""
        files = self.files.get(component)
        return (
            sorted((self.directory / folder_of(component)).glob("*.safetensors"))
            if files is None
            else list(files.paths)
        )

    def component_files(self, component: str) -> list[Path]:
        """Return everything that a component is loaded from: the files of its folder, or its own."""
        files = self.files.get(component)
        return sorted((self.directory / folder_of(component)).rglob("*")) if files is None else list(files.paths)

    @property
    def is_packed(self) -> bool:
        """Whether a transformer's weights stay quantized as in its files."""
        return any(files.packed_weights for files in self.files.values())

    @property
    def transformer_files(self) -> dict[str, WeightFiles]:
        """The part of `files` that is of transformers."""
        return {name: files for name, files in self.files.items() if is_transformer(name)}

    @property
    def single_files(self) -> dict[str, Path]:
        """The files of components that are not in a folder of their own."""
        first = {name: files.paths[0] for name, files in self.files.items()}
        return {name: path for name, path in first.items() if path.parent != self.directory / folder_of(name)}

    @property
    def location(self) -> Path:
        """The model's folder, or the file of its only or first transformer."""
        return self.single_files.get("transformer", self.directory)

    @property
    def exists(self) -> bool:
        """Whether its folder and files exist."""
        return self.directory.is_dir() and all(path.is_file() for path in self.single_files.values())

    def loras_of(self, component: str) -> tuple[LoraUse, ...]:
        """Return the LoRAs that change a component's weights."""
        return tuple(use for use in self.loras if use.changes(component))

    def changed_by(self, use: LoraUse) -> tuple[str, ...]:
        """Return the components that a LoRA changes."""
        return tuple(name for name in self.component_names if use.changes(name))

    def with_ranges(self, active: Collection[int]) -> "ModelSpec":
        """Return the model with the LoRAs of one step: those without a range, and some of the others, by number."""
        if not any(use.has_range for use in self.loras):
            return self
        used = (use for number, use in enumerate(self.loras) if number in active or not use.has_range)
        return replace(self, loras=tuple(use.in_all_steps() for use in used))

    def distilled_for(self, steps: int, levels: tuple[float, ...] = ()) -> "ModelSpec":
        """Return the model with so many steps without guidance as its defaults.

        A guidance scale that is an input of the transformer stays.

        Args:
            levels: of the noise before each step, which adds new noise; empty if the model's scheduler is used.
        """
        defaults = replace(
            self.defaults,
            steps=steps,
            guidance_scale=self.defaults.guidance_scale if self.embedded_guidance else 1.0,
            guidance_scale_2=None if self.defaults.guidance_scale_2 is None else 1.0,
            image_guidance_scale=None,
            image_guidance_scale_2=None,
        )
        if not levels:
            return replace(self, defaults=defaults)
        noise = NoiseLevels(
            fixed=Fact("scheduler.levels_of_lora"),
            spread="linear",
            training_steps=self.noise.training_steps,
            levels=levels,
            renewed=True,
        )
        return replace(self, defaults=defaults, noise=noise, scheduler=RENEWING_SCHEDULER)

    def for_text(self) -> "ModelSpec":
        """Return the model as a video from text alone needs it; one with a control branch encodes a gray video."""
        unused = {IMAGE_ENCODER, VAE_ENCODER} if self.control_input is None else {IMAGE_ENCODER}
        text = {name: program for name, program in self.programs.items() if name not in unused}
        return replace(self, programs=text, image=None, last_image=None, keyframes=(), video=None)

    def from_video(self, video: VideoUse) -> "ModelSpec":
        """Return the model as a video from another one needs it: with the VAE's encoder, and without engines for it."""
        text = self.for_text().programs
        encoders = {name: programs for name, programs in text.items() if name in self.encoders}
        files = {VAE_ENCODER: self.files["vae"], **self.files} if "vae" in self.files else self.files
        return replace(self, programs={**encoders, VAE_ENCODER: (), **text}, files=files, video=video)

    def in_stages(self, stages: int) -> "ModelSpec":
        """Return the model as a video in one stage or in two needs it; unchanged if it cannot make two."""
        if stages == self.stages or self.refinement is None:
            return self
        parts = {name: programs for name, programs in self.programs.items() if name != LATENT_UPSAMPLER}
        if stages == 1:
            return replace(self, programs=parts, stages=1)
        programs: dict[str, tuple[str, ...]] = {}
        for name, entry in parts.items():
            programs |= {LATENT_UPSAMPLER: (), name: entry} if name == "vae" else {name: entry}
        parameters = {**self.parameters, LATENT_UPSAMPLER: self.refinement.parameters}
        return replace(self, programs=programs, parameters=parameters, stages=stages)

    def of_stage(self, stage: int) -> "ModelSpec":
        """Return the model with the LoRAs of one of two stages, from 0; unchanged if there is one stage.

        LoRAs for high noise are those of the first stage, and LoRAs for low noise those of the second.
        """
        if self.stages == 1:
            return self
        other = "high" if stage else "low"
        return replace(self, loras=tuple(use.replace(expert=BOTH) for use in self.loras if use.expert != other))

    def for_images(self) -> "ModelSpec":
        """Return the model with the components of images in every plan: for planning its engines."""
        images = self.image_input
        return self if images is None else replace(self, image_input=replace(images, required=True))

    def owner_of(self, component: str) -> "ModelSpec":
        """Return the model that a component of a plan belongs to: interpolator and upscaler are models of their own."""
        if component not in FINISHERS or self.only_decodes:
            return self
        owner = self.upscaler if component == UPSCALER else self.interpolator
        assert owner is not None
        return owner

    @property
    def only_decodes(self) -> bool:
        """Whether it only computes single frames, as decoders, upscalers and the interpolator do, and no videos."""
        return not FRAME_PROGRAMS.isdisjoint(self.programs)

    @property
    def component_names(self) -> tuple[str, ...]:
        """The components in the order they run."""
        return tuple(self.programs)

    @property
    def takes_weights(self) -> bool:
        """Whether words of prompts can have weights, see `core.prompt_weights`."""
        return all(encoder.takes_weights for encoder in self.encoders.values())

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The components that embed prompts, in the order they run."""
        return tuple(self.encoders)

    def max_text_tokens(self, component: str) -> int:
        """Return the most tokens of a text that a text encoder, or the connectors, take."""
        return self.encoders[component].max_tokens if component in self.encoders else self.max_sequence_length

    @property
    def images(self) -> tuple[ImageUse, ...]:
        """The request's images: the first, keyframes, and the last, as far as there are any."""
        return tuple(image for image in (self.image, *self.keyframes, self.last_image) if image is not None)

    @property
    def inputs(self) -> tuple[InputFile, ...]:
        """The request's images and videos."""
        videos = (getattr(self, field) for field in ("extend", "join", "video", *CONTROL_VIDEOS))
        return (*self.images, *(use for use in videos if isinstance(use, InputFile)), *self.references)

    @property
    def followed_videos(self) -> tuple[VideoUse, ...]:
        """The request's videos whose frames are those of the clip, each as it is read at the clip's rate."""
        fields = ("video", *(field for field in CONTROL_VIDEOS if field != "mask" or not self.mask_holds))
        return tuple(use for field in fields if isinstance(use := getattr(self, field), VideoUse))

    @property
    def mask_holds(self) -> bool:
        """Whether the request's mask is the same in all frames: an image, boxes, or a video with one frame."""
        return isinstance(self.mask, ImageUse | BoxMask) or (self.mask is not None and self.mask.frames == 1)

    @property
    def takes_given_frames(self) -> bool:
        """Whether a clip can begin and end with several given frames, which take the place of the control video's."""
        return self.image_input is not None and self.image_input.kind == "control"

    @property
    def given_frames(self) -> tuple[int, int]:
        """How many frames of a control video are given at the start and at the end of a clip."""
        if not self.takes_given_frames:
            return 0, 0
        first = 0 if self.image is None else 1
        last = 0 if self.last_image is None else 1
        return first if self.extend is None else self.extend_frames, last if self.join is None else self.extend_frames

    @property
    def has_mask(self) -> bool:
        """Whether parts of what steers a clip do not change: by a mask, or because of borders or given frames."""
        return self.mask is not None or any(self.outpaint) or any(self.given_frames)

    @property
    def input_encoder(self) -> VaeEncoderSpec:
        """The encoder of the request's videos, or of images; only of a model with the component."""
        if self.control_input is not None:
            return self.control_input.vae
        if self.video is not None and self.video_input is not None:
            return self.video_input
        assert self.image_input is not None, "only models that start from images or videos have these components"
        return self.image_input.vae

    @property
    def leading_latents(self) -> int:
        """The latent frames before those of the clip: of reference images, or of a character."""
        character = self.image_input is not None and self.image_input.kind == "character"
        return len(self.references) + character

    @property
    def starts_from_images(self) -> bool:
        """Whether it makes a video whose first frame is an image."""
        return self.image_input is not None and self.image_input.kind != "character"

    @property
    def context_tokens(self) -> int:
        """The tokens that the transformer attends to besides the clip's: of the text, and of the images."""
        return self.max_sequence_length + (0 if self.image_input is None else self.image_input.tokens)

    @property
    def blocks(self) -> int:
        """The transformer's blocks, with those that read a control video."""
        return self.transformer.num_layers + (0 if self.control_input is None else self.control_input.blocks)

    @property
    def timesteps(self) -> int:
        """The timesteps of a forward pass: one, or two.

        Two are those of the first latent frame and of the others, or the timestep and 1000 times the guidance scale.
        """
        if self.embedded_guidance:
            return 2
        return 2 if self.image_input is not None and self.image_input.kind == "first_frame" else 1

    @property
    def takes_loras_apart(self) -> bool:
        """Whether a LoRA can be for high noise or for low noise only: there are two experts, or two stages."""
        return self.experts > 1 or self.stages > 1

    @property
    def guidance_passes(self) -> int:
        """The forward passes of a step with guidance."""
        latents = self.sound_latents
        return 2 if latents is None else latents.guidance.passes

    @property
    def shared_heads(self) -> int:
        """What GPUs that share the tokens of a pass divide evenly: the heads, and with sound as many of its heads."""
        latents, heads = self.sound_latents, self.transformer.num_attention_heads
        return heads if latents is None else gcd(heads, latents.heads)

    @property
    def sound_latents(self) -> SoundLatents | None:
        """The latents of sound that is denoised together with the frames; `None` without."""
        return None if self.sound is None else self.sound.latents

    @property
    def total_parameters(self) -> int:
        """The number of weights in all components; those of the VAE's encoder are among the VAE's."""
        return sum(count for name, count in self.parameters.items() if name != VAE_ENCODER)

    @property
    def small(self) -> bool:
        """Whether a pass takes milliseconds on a GPU: it gains nothing from less than float32, or from two GPUs."""
        return 4 * self.total_parameters <= _SMALL_BYTES

    @property
    def strides(self) -> tuple[int, int]:
        """(width, height) must be multiples of these; of two stages, the first has half of both."""
        _, patch_h, patch_w = self.transformer.patch_size
        scale = self.stages * self.vae.scale_factor_spatial
        return scale * patch_w, scale * patch_h

    @property
    def least_size(self) -> tuple[int, int]:
        """(width, height) must not be smaller than these, which are multiples of the strides."""
        least = self.stages * self.least_latents * self.vae.scale_factor_spatial
        width, height = (max(stride, least) for stride in self.strides)
        return width, height

    @property
    def frame_stride(self) -> int:
        """The number of frames of a clip is a multiple of this, plus 1: of a latent frame, or of a section."""
        latent_frames = 1 if self.section is None else self.section.latent_frames
        return latent_frames * self.vae.scale_factor_temporal

    @property
    def least_frames(self) -> int:
        """The frames of the shortest clip: one, or those of one section."""
        return 1 if self.section is None else self.frame_stride + 1

    def sections(self, frames: int) -> int:
        """Return how many sections, or segments, a clip is made in; 1 if it is made whole."""
        if self.segment_frames is not None:
            return self.segments_of(frames).count
        return 1 if self.section is None else (frames - 1) // self.frame_stride

    @property
    def segment_frames(self) -> int | None:
        """The most frames of a clip that is not made in segments; `None` if all are made whole, or in sections."""
        return None if self.control_input is None else self.control_input.segment_frames

    def segments_of(self, frames: int) -> Segments:
        """Return the segments of a clip of a model that makes long ones so."""
        assert self.control_input is not None
        assert self.control_input.segment_frames is not None
        return Segments(frames, self.control_input.segment_frames, self.control_input.overlap)

    def sections_of(self, frames: int) -> Sections:
        """Return the sections of a clip of a model that makes videos in sections."""
        assert self.section is not None
        order = SamplingType(self.section.sampling_type)
        return Sections(self.sections(frames), order, self.section.latent_frames, self.vae.scale_factor_temporal)

    @property
    def takes_keyframes(self) -> bool:
        """Whether a last image is a keyframe, and others can be given, see `ImageInput.last`."""
        return self.image_input is not None and self.image_input.last == "keyframe"

    @property
    def keyframe_count(self) -> int:
        """How many keyframes the request has, with its last image."""
        return len(self.keyframes) + (self.last_image is not None) if self.takes_keyframes else 0

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int, int]:
        """Return (batch, channels, latent frames, latent height, latent width) of what is denoised at once.

        It is the clip or a segment of it, after its `leading_latents`, or a section, however many there are.
        """
        frames = min(frames, self.segment_frames or frames)
        whole = (frames - 1) // self.vae.scale_factor_temporal + 1 + self.leading_latents
        return (
            1,
            self.vae.z_dim,
            whole if self.section is None else self.section.latent_frames,
            height // self.vae.scale_factor_spatial,
            width // self.vae.scale_factor_spatial,
        )

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Return the length of the transformer's sequence."""
        return self.tokens_of(self.latent_shape(frames, height, width)[2:])

    def tokens_of(self, latent: tuple[int, int, int]) -> int:
        """Return the length of the transformer's sequence for a clip of (frames, height, width) in latents."""
        frames, *sides = latent
        grid = (frames + self.keyframe_count, *sides)
        return prod(size // patch for size, patch in zip(grid, self.transformer.patch_size, strict=True))
