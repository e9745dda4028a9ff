"""LTX-Video's architecture, defaults and limits. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.models.folder import count_parameters, read_config, read_sidecar, reading
from runtime.models.registry import Family, KnownModel
from runtime.models.spec import Defaults, ModelSpec, TextEncoderSpec
from runtime.models.timesteps import noise_levels

MAX_SEQUENCE_LENGTH = 32
_LARGEST_SIDE = 64
_KERNEL = 27


@dataclass(frozen=True, kw_only=True)
class LtxTransformer:
    """Architecture of a `diffusers.LTXVideoTransformer3DModel`."""

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    in_channels: int
    text_dim: int
    patch_size: tuple[int, int, int] = (1, 1, 1)
    rope_max_seq_len: int = _LARGEST_SIDE

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def ffn_dim(self) -> int:
        """Channels of the feed-forward's inner layer."""
        return 4 * self.width

    @property
    def block_parameters(self) -> int:
        """Weights in the linear layers of all blocks."""
        return self.num_layers * self.largest_block_parameters

    @property
    def largest_block_parameters(self) -> int:
        """Weights in the linear layers of a block."""
        return 8 * self.width**2 + 2 * self.width * self.ffn_dim

    @property
    def rotation_values(self) -> int:
        """Numbers of a token in the tables of the rotary embedding."""
        return 2 * self.width

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """Return the operations of one forward pass."""
        linear = 2 * tokens * self.block_parameters
        return float(linear + self.num_layers * 4 * tokens * (tokens + text_tokens) * self.width)

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """Return the peak memory of one forward pass."""
        del time_per_token
        return tokens * element_bytes * (4 * self.width + 2 * self.ffn_dim)


@dataclass(frozen=True, kw_only=True)
class LtxVae:
    """Architecture of a `diffusers.AutoencoderKLLTXVideo`."""

    z_dim: int
    channels: tuple[int, ...]
    scale_factor_temporal: int
    scale_factor_spatial: int

    @property
    def last_channels(self) -> int:
        """Channels of the decoder's last level."""
        return self.channels[0]

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations of decoding a clip."""
        return 2.0 * _KERNEL * frames * height * width * len(self.channels) * self.last_channels**2

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return the peak memory of decoding: convolutions on a CPU unfold their input."""
        copies = _KERNEL if cpu else 4
        return copies * element_bytes * latent_frames * self.scale_factor_temporal * height * width * self.last_channels

    def cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return the bytes that one call passes to the next: all frames are decoded in one call."""
        return 0


class LtxFamily(Family):
    """See `models.registry.Family`."""

    negative_prompt = "worst quality, inconsistent motion, blurry, jittery, distorted"

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Read a model folder, as `LTXPipeline.save_pretrained` writes it."""
        with reading(directory.name):
            transformer, vae = _architecture(directory)
            scheduler = read_config(directory / "scheduler" / "scheduler_config.json")
            sidecar = read_sidecar(directory, 1) or {
                "title": directory.name,
                "license": "unknown",
                "latent_rgb": None,
                "defaults": Defaults(
                    width=64,
                    height=48,
                    frames=9,
                    fps=8,
                    steps=6,
                    guidance_scale=3.0,
                    guidance_scale_2=None,
                    negative_prompt=self.negative_prompt,
                ),
                "sizes": ((64, 48),),
                "frame_counts": (9,),
            }
            return ModelSpec(
                family="ltx",
                name=name,
                directory=directory,
                transformer=transformer,
                experts=1,
                vae=vae,
                boundary_ratio=None,
                scheduler=str(scheduler["_class_name"]),
                expand_timesteps=False,
                max_sequence_length=MAX_SEQUENCE_LENGTH,
                parameters={
                    part: count_parameters(directory / part) for part in ("text_encoder", "transformer", "vae")
                },
                encoders={"text_encoder": _text_encoder(directory)},
                programs={
                    "text_encoder": ("text_encoder",),
                    "transformer": ("transformer",),
                    "vae": ("vae_clip",),
                },
                noise=noise_levels(scheduler),
                unsupported=frozenset({"gpus", "step_cache", "nag"}),
                **sidecar,
            )

    def check(self, directory: Path, title: str) -> None:
        """Check a folder's configurations."""
        with reading(title):
            _architecture(directory)

    def known_spec(self, known: KnownModel, weights_dir: Path) -> ModelSpec:
        """No model of this family is published."""
        raise AssertionError(known, weights_dir)


FAMILY: Family = LtxFamily()


def _text_encoder(directory: Path) -> TextEncoderSpec:
    config = read_config(directory / "text_encoder" / "config.json")
    return TextEncoderSpec(
        width=config["d_model"],
        ffn_dim=config["d_ff"],
        num_heads=config["num_heads"],
        vocab_size=config["vocab_size"],
        max_tokens=MAX_SEQUENCE_LENGTH,
        stores_scores=True,
    )


def _architecture(directory: Path) -> tuple[LtxTransformer, LtxVae]:
    transformer: dict[str, Any] = read_config(directory / "transformer" / "config.json")
    vae: dict[str, Any] = read_config(directory / "vae" / "config.json")
    doubled = sum(bool(scaled) for scaled in vae["spatio_temporal_scaling"])
    return (
        LtxTransformer(
            num_layers=int(transformer["num_layers"]),
            num_attention_heads=int(transformer["num_attention_heads"]),
            attention_head_dim=int(transformer["attention_head_dim"]),
            in_channels=int(transformer["in_channels"]),
            text_dim=int(transformer["caption_channels"]),
        ),
        LtxVae(
            z_dim=int(vae["latent_channels"]),
            channels=tuple(int(channels) for channels in vae["decoder_block_out_channels"]),
            scale_factor_temporal=int(vae["patch_size_t"]) * 2**doubled,
            scale_factor_spatial=int(vae["patch_size"]) * 2**doubled,
        ),
    )
