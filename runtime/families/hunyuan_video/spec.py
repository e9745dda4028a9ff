"""HunyuanVideo's architecture, defaults and limits, read from a folder in diffusers' format. Imports no torch.

Source of defaults and trained sizes: https://github.com/Tencent-Hunyuan/HunyuanVideo and diffusers' pipeline.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from runtime.core.errors import ModelError
from runtime.families.hunyuan_video import lora_names
from runtime.families.hunyuan_video.prompt_guide import GUIDE
from runtime.models.folder import count_parameters, read_config, read_sidecar, reading, tensor_types, up_to
from runtime.models.registry import Family, FileSigns, KnownModel
from runtime.models.spec import ROW_KERNELS, Defaults, ModelSpec, TextEncoderSpec, folder_of
from runtime.models.timesteps import NoiseLevels, noise_levels
from runtime.models.vae_groups import GROUP, GROUP_PROGRAMS

# `HunyuanVideoPipeline.__call__`'s default.
MAX_SEQUENCE_LENGTH = 256
# Tokens of LLaMA's template before the prompt's, whose embeddings the transformer does not get.
TEMPLATE_TOKENS = 95
# The transformer gets the embeddings before LLaMA's last two layers (`num_hidden_layers_to_skip`).
SKIPPED_LAYERS = 2
# CLIP's positions.
CLIP_TOKENS = 77
# Of `Speed`, the transformer refines the text at every step and takes one text at a time, and the VAE has nothing. One
# GPU decodes.
LACKS = frozenset({"text_kept", "paired", "channels_last", "compiled_vae", "strips", ROW_KERNELS})
# Text and video attend to each other in one attention, of which a negative prompt would need a copy.
UNSUPPORTED = frozenset({"nag"})
# Single blocks have a `proj_out` too, so the last projection is named by its parameter, which bitsandbytes does not
# compare: it quantizes that layer as well.
UNQUANTIZED = ("context_embedder", "time_text_embed", "norm_out", "proj_out.weight")
# Of `block_programs.BLOCK_PARTS`, which imports torch.
BLOCK_PROGRAMS = ("block_qkv", "block_feed_forward", "block_single")
_FLOAT32 = 4
# Of a published model until its folder is here, whose configuration has the shift.
_NOISE = NoiseLevels(setting="shift", fixed=None, shift=math.nan, spread="linear")
# Bytes that decoding 832×480 took on an H100, at once and in tiles of 256×256, by those that were counted.
_MEASURED_DECODING = 1.32
# Values of a 3×3×3 kernel.
_KERNEL = 27
# The temporal compression that diffusers implements.
_TEMPORAL = 4
# Tokens along an axis. Positions are computed, without a table, so this only limits sizes.
_LONGEST_AXIS = 1024


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """Architecture of a `diffusers.HunyuanVideoTransformer3DModel`.

    Attributes:
        double_layers: blocks with weights of their own for the clip's tokens and for the text's.
        single_layers: blocks with one set of weights for both.
        refiner_layers: blocks that see only the text.
        pooled_dim: channels of CLIP's embedding.
        guidance_embeds: whether the guidance scale is an input.
    """

    double_layers: Annotated[int, up_to(512)]
    single_layers: Annotated[int, up_to(512)]
    refiner_layers: Annotated[int, up_to(512)]
    num_attention_heads: Annotated[int, up_to(1_024)]
    attention_head_dim: Annotated[int, up_to(1_024)]
    mlp_ratio: Annotated[float, Field(gt=0, le=64)]
    in_channels: Annotated[int, up_to(4_096)]
    text_dim: Annotated[int, up_to(65_536)]
    pooled_dim: Annotated[int, up_to(65_536)]
    spatial_patch: Annotated[int, up_to(64)]
    temporal_patch: Annotated[int, up_to(64)]
    guidance_embeds: bool

    @property
    def num_layers(self) -> int:
        """Blocks of both kinds."""
        return self.double_layers + self.single_layers

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def ffn_dim(self) -> int:
        """Channels of the feed-forward's inner layer."""
        return int(self.width * self.mlp_ratio)

    @property
    def patch_size(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns of one token."""
        return self.temporal_patch, self.spatial_patch, self.spatial_patch

    @property
    def rotation_values(self) -> int:
        """Numbers of a token in the tables of the rotary embedding."""
        return 2 * self.attention_head_dim

    @property
    def rope_max_seq_len(self) -> int:
        """The most tokens along one axis."""
        return _LONGEST_AXIS

    @property
    def _token_parameters(self) -> int:
        """Weights of a block that each token passes; a double block has them twice."""
        return 4 * self.width**2 + 2 * self.width * self.ffn_dim

    @property
    def block_parameters(self) -> int:
        """Weights in the linear layers of all blocks, which quantization and group offload apply to."""
        single = self._token_parameters + 3 * self.width**2
        return self.double_layers * self.largest_block_parameters + self.single_layers * single

    @property
    def largest_block_parameters(self) -> int:
        """Weights in the linear layers of a double block."""
        return 2 * (self._token_parameters + 6 * self.width**2)

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """Return the operations (two per multiply-add) of one forward pass, batch 1."""
        both = tokens + text_tokens
        return float(self.num_layers * (2 * both * self._token_parameters + 4 * both**2 * self.width))

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """Return the peak memory of one forward pass in bytes, weights excluded; attention stores no matrix.

        The peak is in a single block. Before its last layer there are the clip's and the block's tokens, the residual,
        the norm, the attention's output, the result and twice the inner layer. In the rotary embedding there are the
        residual, the norm, queries, keys, values and the inner layer, and three tensors in float32.

        Counted from diffusers' `HunyuanVideoSingleTransformerBlock`, not measured.
        """
        del time_per_token
        e, width = element_bytes, self.width
        last_layer = e * (6 * width + 2 * self.ffn_dim)
        rotary = e * (5 * width + self.ffn_dim) + 3 * _FLOAT32 * width
        return tokens * (max(last_layer, rotary) + 2 * _FLOAT32 * self.attention_head_dim)


@dataclass(frozen=True, kw_only=True)
class VaeSpec:
    """Architecture of a `diffusers.AutoencoderKLHunyuanVideo`."""

    z_dim: Annotated[int, up_to(4_096)]
    block_out_channels: Annotated[tuple[Annotated[int, up_to(8_192)], ...], Field(min_length=1, max_length=8)]
    layers_per_block: Annotated[int, up_to(64)]
    scale_factor_temporal: Annotated[int, Field(strict=True, ge=_TEMPORAL, le=_TEMPORAL)]
    scale_factor_spatial: Annotated[int, up_to(256)]

    @property
    def last_channels(self) -> int:
        """Channels of the decoder's last and largest level."""
        return self.block_out_channels[0]

    def _levels(self, latent_frames: int, height: int, width: int) -> list[tuple[int, int, int]]:
        """Return (values per channel, channels before, channels) of each level of the decoder."""
        dims = self.block_out_channels
        time_from = len(dims) - 1 - _TEMPORAL.bit_length() + 1
        in_space = self.scale_factor_spatial.bit_length() - 1
        t, h, w = latent_frames, height // self.scale_factor_spatial, width // self.scale_factor_spatial
        levels = []
        for level, (before, out) in enumerate(itertools.pairwise((dims[-1], *reversed(dims)))):
            levels.append((t * h * w, before, out))
            if level < in_space:
                h, w = 2 * h, 2 * w
            if time_from <= level < len(dims) - 1:
                t = 2 * t - 1
        return levels

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations of decoding a clip: the 3×3×3 convolutions, level by level."""
        latent_frames = (frames - 1) // self.scale_factor_temporal + 1
        widest = self.block_out_channels[-1]
        values = latent_frames * (height // self.scale_factor_spatial) * (width // self.scale_factor_spatial)
        total = 2.0 * _KERNEL * values * (self.z_dim * widest + 4 * widest**2)
        levels = self._levels(latent_frames, height, width)
        for positions, before, out in levels:
            convolutions = before * out + out * out * (2 * self.layers_per_block + 1)
            total += 2.0 * _KERNEL * positions * convolutions
        # After the enlargement at the end of a level, one more.
        for (_, _, out), (positions, _, _) in itertools.pairwise(levels):
            total += 2.0 * _KERNEL * positions * out * out
        total += 2.0 * _KERNEL * levels[-1][0] * self.last_channels * 3
        # Groups of five latent frames overlap by one or two.
        return total * (1.0 if latent_frames < GROUP else GROUP / (GROUP - 2))

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return the peak memory of decoding in bytes, weights excluded: of a group, whatever `latent_frames` is.

        The peak is a convolution of a residual block (the block's input, the norm's result, the convolution's input
        padded, its output, and both in the layout of the kernel's library).

        Counted from diffusers' modules, times what decoding took on an H100 (bench/h100.md).
        """
        del cpu, latent_frames
        convolution = _MEASURED_DECODING * max(
            values * (4 * max(before, out) + 2 * out) for values, before, out in self._levels(GROUP, height, width)
        )
        return round(element_bytes * convolution) + self.cache_bytes(height, width, element_bytes)

    def encode_flops(self, frames: int, height: int, width: int, *, video: bool = False) -> float:
        """Return the operations of encoding one image: images are encoded alone, whatever `frames` is."""
        del frames, video
        dims, in_space = self.block_out_channels, self.scale_factor_spatial.bit_length() - 1
        positions = height * width
        total = 2.0 * _KERNEL * positions * 3 * dims[0]
        for level, (before, out) in enumerate(itertools.pairwise((dims[0], *dims))):
            total += 2.0 * _KERNEL * positions * (before * out + out * out * (2 * self.layers_per_block - 1))
            positions //= 4 if level < in_space else 1
            if level < len(dims) - 1:
                total += 2.0 * _KERNEL * positions * out * out
        return total + 2.0 * _KERNEL * positions * dims[-1] * (4 * dims[-1] + 2 * self.z_dim)

    def encode_bytes(self, frames: int, height: int, width: int, element_bytes: int) -> int:
        """Return the peak memory of encoding one image in bytes, weights excluded: of a residual block at full size.

        There are the block's input, the convolution's input padded to three frames, its output, and both also in the
        layout of the kernel's library. Counted from diffusers' modules, not measured.
        """
        del frames
        return 9 * height * width * self.last_channels * element_bytes

    def encoder_cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return 0: an image is encoded in one call."""
        del height, width, element_bytes
        return 0

    def cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return the bytes of the frames that one call passes to the next, which is blended with them."""
        return 2 * 3 * ((GROUP - 1) * self.scale_factor_temporal + 1) * height * width * element_bytes


@dataclass(frozen=True, kw_only=True)
class _TextEncoder:
    """Sizes of a `LlamaModel` or a `CLIPTextModel`."""

    hidden_size: Annotated[int, up_to(65_536)]
    intermediate_size: Annotated[int, up_to(1_000_000)]
    num_attention_heads: Annotated[int, up_to(1_024)]
    num_hidden_layers: Annotated[int, up_to(512)]
    vocab_size: Annotated[int, up_to(10_000_000)]

    def spec(self, max_tokens: int) -> TextEncoderSpec:
        """Return what the planner needs."""
        return TextEncoderSpec(
            width=self.hidden_size,
            ffn_dim=self.intermediate_size,
            num_heads=self.num_attention_heads,
            vocab_size=self.vocab_size,
            max_tokens=max_tokens,
            stores_scores=False,
        )


_TRANSFORMER = TypeAdapter(TransformerSpec)
_VAE = TypeAdapter(VaeSpec)
_TEXT_ENCODER = TypeAdapter(_TextEncoder)
_SHIFT = TypeAdapter(Annotated[float, Field(strict=True, gt=0)] | None)
# Weights of LLaMA's layers, and of the norm after them.
_LLAMA_LAYER = re.compile(r"(?:model\.)?(?:layers\.(\d+)|norm)\.")
# Names of the fields above in diffusers' configurations.
_TRANSFORMER_NAMES: Mapping[str, str] = {
    "double_layers": "num_layers",
    "single_layers": "num_single_layers",
    "refiner_layers": "num_refiner_layers",
    "num_attention_heads": "num_attention_heads",
    "attention_head_dim": "attention_head_dim",
    "mlp_ratio": "mlp_ratio",
    "in_channels": "in_channels",
    "text_dim": "text_embed_dim",
    "pooled_dim": "pooled_projection_dim",
    "spatial_patch": "patch_size",
    "temporal_patch": "patch_size_t",
    "guidance_embeds": "guidance_embeds",
}
_VAE_NAMES: Mapping[str, str] = {
    "z_dim": "latent_channels",
    "block_out_channels": "block_out_channels",
    "layers_per_block": "layers_per_block",
    "scale_factor_temporal": "temporal_compression_ratio",
    "scale_factor_spatial": "spatial_compression_ratio",
}


_OTHER_LLAMAS = (
    "layers.0.self_attn.q_proj.bias",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.pre_feedforward_layernorm.weight",
    "blk.0.attn_q.bias",
    "blk.0.attn_q_norm.weight",
    "blk.0.post_ffw_norm.weight",
)
# Names of the authors' code (also in GGUF), ComfyUI and diffusers; of transformers and llama.cpp for text encoders.
FOLDER_FILES: Mapping[str, Sequence[FileSigns]] = {
    "transformer": (
        FileSigns(("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight",)),
        FileSigns(("txt_in.individual_token_refiner.blocks.0.self_attn.qkv.weight",)),
        FileSigns(("context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight",)),
    ),
    "text_encoder": (
        FileSigns(("layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight"), _OTHER_LLAMAS),
        FileSigns(("blk.0.attn_q.weight", "blk.0.ffn_gate.weight", "token_embd.weight"), _OTHER_LLAMAS),
    ),
    # CLIP-L has 12 layers; larger ones are of other models.
    "text_encoder_2": (
        FileSigns(
            ("encoder.layers.11.self_attn.q_proj.weight", "embeddings.token_embedding.weight"),
            ("encoder.layers.12.self_attn.q_proj.weight", "post_layernorm.weight"),
        ),
    ),
    # LTX's has the same first layer, but no attention.
    "vae": (
        FileSigns(("decoder.conv_in.conv.weight", "decoder.mid.attn_1.k.weight")),
        FileSigns(("decoder.conv_in.conv.weight", "decoder.mid_block.attentions.0.to_q.weight")),
    ),
}


class HunyuanVideoFamily(Family):
    """See `models.registry.Family`."""

    negative_prompt = ""
    prompt_guide = GUIDE
    folder_files: Mapping[str, Sequence[FileSigns]] = FOLDER_FILES
    lora_change = staticmethod(lora_names.NAMES.change_of)
    lora_weight_shape = staticmethod(lora_names.weight_shape)
    distilled_steps = staticmethod(lora_names.DISTILLED.steps)
    distilled_shift = staticmethod(lora_names.DISTILLED.shift)

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Read a model folder, as `HunyuanVideoPipeline.save_pretrained` writes it.

        Raises:
            ModelError: if it is incomplete, damaged or invalid.
        """
        with reading(directory.name):
            configs = read_configurations(directory, directory.name)
            sidecar = read_sidecar(directory, 1) or {"title": directory.name, "license": "unknown", **_CARD}
            return ModelSpec(
                family="hunyuan_video",
                name=name,
                transformer=configs.transformer,
                **folder_fields(directory, configs, _PROGRAMS),
                **common_fields(configs.transformer),
                **{"latent_rgb": None, **sidecar},
            )

    def check(self, directory: Path, title: str) -> None:
        """Check a folder's configurations.

        Raises:
            ModelError: if one is missing, damaged or invalid.
        """
        with reading(title):
            read_configurations(directory, title)

    def known_spec(self, model: KnownModel, weights_dir: Path) -> ModelSpec:
        """Return the spec of a published model, as if its folder were in `weights_dir`."""
        fields = known_fields(model)
        return ModelSpec(**fields, **_CARD, **common_fields(fields["transformer"]), **model.description(weights_dir))


FAMILY: Family = HunyuanVideoFamily()

# The components in the order they run.
_PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "text_encoder": ("text_encoder",),
    "text_encoder_2": ("text_encoder_2",),
    "transformer": (),
    "vae": tuple(GROUP_PROGRAMS),
}
# Of the authors' code and diffusers' pipeline.
_CARD: Mapping[str, Any] = {
    "defaults": Defaults(
        width=960,
        height=544,
        frames=129,
        fps=24,
        steps=50,
        guidance_scale=6.0,
        guidance_scale_2=None,
        negative_prompt="",
    ),
    "sizes": ((960, 544), (544, 960), (1280, 720), (720, 1280)),
    "frame_counts": (129,),
}


class Configurations(NamedTuple):
    """The configurations of a folder."""

    transformer: TransformerSpec
    vae: VaeSpec
    encoders: Mapping[str, TextEncoderSpec]
    scheduler: dict[str, Any]
    shift: float | None


def read_configurations(directory: Path, title: str) -> Configurations:
    """Read and check all configurations of a folder, before a library reads one.

    Raises:
        KeyError, TypeError, ValueError: if one is incomplete or wrong.
        ModelError: if one is missing or not JSON, or they do not fit each other.
    """
    read_config(directory / "model_index.json")
    config = read_config(directory / "transformer" / "config.json")
    transformer = _renamed(_TRANSFORMER, _TRANSFORMER_NAMES, config)
    if config.get("image_condition_type") is not None:
        raise ValueError("image_condition_type")
    if sum(config["rope_axes_dim"]) != transformer.attention_head_dim:
        raise ValueError("rope_axes_dim")
    vae = _renamed(_VAE, _VAE_NAMES, read_config(directory / "vae" / "config.json"))
    if vae.z_dim != transformer.in_channels:
        raise ModelError("model.channels_differ", model=title, transformer=transformer.in_channels, vae=vae.z_dim)
    configs = {part: read_config(directory / part / "config.json") for part in ("text_encoder", "text_encoder_2")}
    encoders = _encoders(configs)
    if configs["text_encoder"]["num_hidden_layers"] <= SKIPPED_LAYERS:
        raise ValueError("num_hidden_layers")
    # CLIP's embedding is passed on with LLaMA's, see `execution.text_encoder.joined`.
    if encoders["text_encoder"].width != transformer.text_dim or transformer.pooled_dim > transformer.text_dim:
        raise ValueError("text_embed_dim")
    if encoders["text_encoder_2"].width != transformer.pooled_dim:
        raise ValueError("pooled_projection_dim")
    scheduler = read_config(directory / "scheduler" / "scheduler_config.json")
    if scheduler.get("use_dynamic_shifting"):
        raise ModelError("model.dynamic_shifting", model=title)
    noise_levels(scheduler)
    return Configurations(transformer, vae, encoders, scheduler, _SHIFT.validate_python(scheduler.get("shift")))


def folder_fields(directory: Path, configs: Configurations, components: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a spec that a folder decides, but the transformer."""
    noise = noise_levels(configs.scheduler)
    return {
        "directory": directory,
        "vae": configs.vae,
        "scheduler": str(configs.scheduler["_class_name"]),
        "parameters": {part: parameters(directory, part) for part in components},
        "encoders": configs.encoders,
        "flow_shift": configs.shift,
        # The pipeline gives the sigmas to the scheduler.
        "noise": replace(noise, spread="linear") if noise.spread == "euler" else noise,
    }


def known_fields(model: KnownModel) -> dict[str, Any]:
    """Return the fields of a spec that a published model's configurations decide."""
    return {
        "transformer": _renamed(_TRANSFORMER, _TRANSFORMER_NAMES, model.configs["transformer"]),
        "vae": _renamed(_VAE, _VAE_NAMES, model.configs["vae"]),
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "noise": _NOISE,
        "encoders": _encoders(model.configs),
    }


def parameters(directory: Path, component: str) -> int:
    """Return the number of weights of a component that are loaded, see `conditioning.ShortLlama`."""
    folder = directory / folder_of(component)
    if component != "text_encoder":
        return count_parameters(folder)
    loaded = read_config(folder / "config.json")["num_hidden_layers"] - SKIPPED_LAYERS
    counts = ((_LLAMA_LAYER.match(name), count) for name, (_, count) in tensor_types(folder).items())
    return sum(count for match, count in counts if not match or (match[1] and int(match[1]) < loaded))


def _encoders(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, TextEncoderSpec]:
    """Return the sizes of LLaMA and CLIP."""
    tokens = {"text_encoder": TEMPLATE_TOKENS + MAX_SEQUENCE_LENGTH, "text_encoder_2": CLIP_TOKENS}
    return {part: _TEXT_ENCODER.validate_python(configs[part]).spec(most) for part, most in tokens.items()}


def _renamed(adapter: TypeAdapter[Any], names: Mapping[str, str], config: Mapping[str, Any]) -> Any:
    return adapter.validate_python({ours: config[theirs] for ours, theirs in names.items()})


def common_fields(transformer: TransformerSpec) -> dict[str, Any]:
    """Return what all models of the family share."""
    return {
        "experts": 1,
        "boundary_ratio": None,
        "expand_timesteps": False,
        "embedded_guidance": transformer.guidance_embeds,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "programs": _PROGRAMS,
        "block_programs": BLOCK_PROGRAMS,
        "lacks": LACKS,
        "unsupported": UNSUPPORTED,
        "unquantized": UNQUANTIZED,
    }
