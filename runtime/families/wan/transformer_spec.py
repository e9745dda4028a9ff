"""Architecture of Wan's transformers, with operations and memory of a forward pass. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from runtime.models.folder import up_to

_FLOAT32 = 4
_MAX_LAYERS = 512
VACE_CLASS, ANIMATE_CLASS = "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"
# Tensors of the motion encoder's first level that are in memory at once.
_MOTION_TENSORS = 5
# diffusers' channels of the motion encoder's levels, by the side of the frames.
MOTION_CHANNELS = {4: 512, 8: 512, 16: 512, 32: 512, 64: 256, 128: 128, 256: 64, 512: 32, 1024: 16}


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """Architecture of a `diffusers.WanTransformer3DModel`, with the names of its config."""

    num_layers: Annotated[int, up_to(_MAX_LAYERS)]
    num_attention_heads: Annotated[int, up_to(1_024)]
    attention_head_dim: Annotated[int, up_to(1_024)]
    ffn_dim: Annotated[int, up_to(1_000_000)]
    in_channels: Annotated[int, up_to(4_096)]
    text_dim: Annotated[int, up_to(65_536)]
    patch_size: tuple[Annotated[int, up_to(64)], Annotated[int, up_to(64)], Annotated[int, up_to(64)]]
    # diffusers' default, if the configuration has none.
    rope_max_seq_len: Annotated[int, up_to(65_536)] = 1024
    # Only of models that attend to CLIP's embeddings of images: their width, and their tokens if two images are given.
    image_dim: Annotated[int, up_to(65_536)] | None = None
    pos_embed_seq_len: Annotated[int, up_to(65_536)] | None = None

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def rotation_values(self) -> int:
        """Numbers of a token in the tables of the rotary embedding."""
        return 2 * self.attention_head_dim

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """Return the operations (two per multiply-add) of one forward pass, batch 1."""
        self_attention = 8 * tokens * self.width**2 + 4 * tokens**2 * self.width
        cross_attention = 4 * (tokens + text_tokens) * self.width**2 + 4 * tokens * text_tokens * self.width
        feed_forward = 4 * tokens * self.width * self.ffn_dim
        return float(self.num_layers * (self_attention + cross_attention + feed_forward))

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """Return the peak memory of one forward pass in bytes, weights excluded; attention stores no matrix.

        The peak is in a block, at one of four moments. In units of tokens × width: the feed-forward's activation
        (input, stream, cross-attention's output, norm, and the inner layer twice); the gated sum after it (five of
        these, and product, sum and, unless the model is in float32, the stream once more, all in float32); the
        rotary embedding in float32 within self-attention; and, with a timestep per token (`time_per_token`), the start,
        where the modulation's six vectors are cast and summed in float32. These remain until the end of the block.

        Source: diffusers' `WanTransformerBlock`; within 3 % of the memory measured on an H200.
        """
        e, width = element_bytes, self.width
        lifted = 0 if element_bytes == _FLOAT32 else _FLOAT32
        feed_forward = 4 * e * width + 2 * e * self.ffn_dim
        gated_sum = 5 * e * width + (3 if lifted else 2) * _FLOAT32 * width
        rotary = 7 * e * width + 6 * width
        modulation = 6 * _FLOAT32 * width if time_per_token else 0
        start = e * width + (6 * lifted * width if time_per_token else 0)
        timestep = 7 * e * width if time_per_token else 0
        rotations = _FLOAT32 * self.rotation_values
        return tokens * (max(feed_forward, gated_sum, rotary, start) + modulation + timestep + rotations)

    @property
    def block_parameters(self) -> int:
        """Number of weights in the linear layers of all blocks, which quantization and offload apply to."""
        return self.num_layers * self.largest_block_parameters

    @property
    def largest_block_parameters(self) -> int:
        """Number of weights in the linear layers of a block."""
        return 8 * self.width**2 + 2 * self.width * self.ffn_dim


@dataclass(frozen=True, kw_only=True)
class VaceTransformerSpec(TransformerSpec):
    """Architecture of a `diffusers.WanVACETransformer3DModel`: further blocks read a control video.

    Attributes:
        vace_layers: the blocks that the results of these control blocks are added to, in order.
        vace_in_channels: of what they read: latents of the unchanged and of the changed part, and the mask.
    """

    # diffusers' defaults, if the configuration has none.
    vace_layers: Annotated[tuple[Annotated[int, Field(ge=0, lt=_MAX_LAYERS)], ...], Field(max_length=_MAX_LAYERS)] = (
        0, 5, 10, 15, 20, 25, 30, 35,
    )  # fmt: skip
    vace_in_channels: Annotated[int, up_to(4_096)] = 96

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """See `TransformerSpec`; each control block has a projection after it, and the first one before it."""
        main = super().forward_flops(tokens, text_tokens)
        count = len(self.vace_layers)
        return main * (1 + count / self.num_layers) + 2.0 * tokens * self.width**2 * (count + 1)

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """See `TransformerSpec`.

        While the first control block runs, there are also its tokens, and those of the other branch before and after
        the first block.
        """
        main = super().forward_bytes(tokens, element_bytes, time_per_token=time_per_token)
        return main + 3 * tokens * element_bytes * self.width

    @property
    def block_parameters(self) -> int:
        """See `TransformerSpec`; without the projections after control blocks, which are not quantized."""
        return (self.num_layers + len(self.vace_layers)) * super().largest_block_parameters + self.width**2

    @property
    def largest_block_parameters(self) -> int:
        """See `TransformerSpec`; the first control block has two projections more."""
        return super().largest_block_parameters + 2 * self.width**2


@dataclass(frozen=True, kw_only=True)
class AnimateTransformerSpec(TransformerSpec):
    """Architecture of a `diffusers.WanAnimateTransformer3DModel`: its blocks attend to a face video, and read poses.

    Attributes:
        latent_channels: of the poses.
        inject_face_latents_blocks: the first block and each so many blocks after it attend to the face.
        motion_encoder_size: width and height of the face's frames.
        motion_encoder_batch_size: frames that the motion encoder takes in one call.
        face_encoder_num_heads: tokens of the face for each latent frame, with one more.
    """

    # diffusers' defaults, if the configuration has none.
    latent_channels: Annotated[int, up_to(4_096)] = 16
    inject_face_latents_blocks: Annotated[int, up_to(_MAX_LAYERS)] = 5
    motion_encoder_size: Annotated[int, up_to(1_024)] = 512
    motion_encoder_batch_size: Annotated[int, up_to(1_024)] = 8
    motion_style_dim: Annotated[int, up_to(65_536)] = 512
    motion_dim: Annotated[int, up_to(65_536)] = 20
    motion_encoder_dim: Annotated[int, up_to(65_536)] = 512
    face_encoder_hidden_dim: Annotated[int, up_to(65_536)] = 1024
    face_encoder_num_heads: Annotated[int, up_to(1_024)] = 4
    motion_encoder_channel_sizes: Annotated[dict[str, Annotated[int, up_to(65_536)]], Field(max_length=16)] | None = (
        field(default=None, hash=False)
    )

    @property
    def face_blocks(self) -> int:
        """How many blocks attend to the face."""
        return self.num_layers // self.inject_face_latents_blocks

    def motion_channels(self, side: int) -> int:
        """Return the channels of the motion encoder's level whose frames have this side.

        Raises:
            KeyError: if there is none.
        """
        return (self.motion_encoder_channel_sizes or {}).get(str(side)) or MOTION_CHANNELS[side]

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """See `TransformerSpec`; without the face's own tokens, which are few, and the encoders, which run once."""
        attention = 4 * tokens * self.width**2 + 4 * tokens * (self.face_encoder_num_heads + 1) * self.width
        return super().forward_flops(tokens, text_tokens) + float(self.face_blocks * attention)

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """See `TransformerSpec`; before the first block, the motion encoder runs."""
        side = self.motion_encoder_size
        motion = _MOTION_TENSORS * self.motion_encoder_batch_size * self.motion_channels(side) * side**2 * element_bytes
        stream = tokens * element_bytes * self.width
        return max(super().forward_bytes(tokens, element_bytes, time_per_token=time_per_token), motion + stream)

    @property
    def block_parameters(self) -> int:
        """See `TransformerSpec`; with the attention to the face."""
        return super().block_parameters + self.face_blocks * 4 * self.width**2


_TRANSFORMER = TypeAdapter(TransformerSpec)
_ANIMATE_TRANSFORMER = TypeAdapter(AnimateTransformerSpec)
_VACE_TRANSFORMER = TypeAdapter(VaceTransformerSpec)


def transformer_spec(config: Mapping[str, Any]) -> TransformerSpec:
    """Read a transformer's `config.json`.

    Raises:
        ValueError: if it is incomplete or wrong.
    """
    if config.get("_class_name") == ANIMATE_CLASS:
        return _animate_spec(config)
    if config.get("_class_name") != VACE_CLASS:
        return _TRANSFORMER.validate_python(config)
    spec = _VACE_TRANSFORMER.validate_python(config)
    layers = spec.vace_layers
    ordered = all(first < second for first, second in pairwise(layers))
    if not layers or layers[0] != 0 or layers[-1] >= spec.num_layers or not ordered:
        raise ValueError("vace_layers")
    if spec.image_dim is not None:
        raise ValueError("image_dim")
    return spec


def _animate_spec(config: Mapping[str, Any]) -> AnimateTransformerSpec:
    spec = _ANIMATE_TRANSFORMER.validate_python({name: value for name, value in config.items() if value is not None})
    channels = spec.motion_encoder_channel_sizes or {str(side): count for side, count in MOTION_CHANNELS.items()}
    needed = {str(side) for side in MOTION_CHANNELS if side <= spec.motion_encoder_size}
    if spec.motion_encoder_size not in MOTION_CHANNELS or not needed <= channels.keys():
        raise ValueError("motion_encoder_size")
    # diffusers has no face block for the last blocks otherwise, and fails.
    if spec.num_layers % spec.inject_face_latents_blocks:
        raise ValueError("inject_face_latents_blocks")
    if spec.image_dim is None or spec.pos_embed_seq_len is not None or spec.patch_size[0] != 1:
        raise ValueError("image_dim")
    return spec
