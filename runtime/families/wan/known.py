"""Published Wan models, from their configurations at https://huggingface.co/Wan-AI (Apache 2.0).

A test counts the parameters with the libraries' own classes.
"""

from collections.abc import Mapping
from typing import Any

from runtime.models.registry import KnownModel

_LICENSE = "Apache-2.0"
# UMT5-XXL's encoder; its embedding has two names and counts once.
_UMT5_XXL = 5_680_910_336

_TRANSFORMER: Mapping[str, Any] = {
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "text_dim": 4096,
}
_WIDE: Mapping[str, Any] = {**_TRANSFORMER, "num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
_VAE: Mapping[str, Any] = {
    "base_dim": 96,
    "decoder_base_dim": None,
    "dim_mult": [1, 2, 4, 4],
    "in_channels": 3,
    "is_residual": False,
    "num_res_blocks": 2,
    "out_channels": 3,
    "patch_size": None,
    "scale_factor_spatial": 8,
    "scale_factor_temporal": 4,
    "temperal_downsample": [False, True, True],
    "z_dim": 16,
}
_VAE_5B: Mapping[str, Any] = {
    **_VAE,
    "base_dim": 160,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "is_residual": True,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "z_dim": 48,
}
# 1.3B was trained at 480p; its card calls 720p less stable.
_SIZES_480P = ((832, 480), (480, 832))
_VAE_PARAMETERS = 126_892_531


def _model(
    *,
    transformer: Mapping[str, Any],
    transformer_parameters: int,
    vae: Mapping[str, Any] = _VAE,
    vae_parameters: int = _VAE_PARAMETERS,
    experts: int = 1,
    flow_shift: float = 5.0,
    **fields: Any,
) -> KnownModel:
    names = ("transformer", "transformer_2")[:experts]
    return KnownModel(
        family="wan",
        license=_LICENSE,
        configs={"transformer": transformer, "vae": vae},
        parameters={
            "text_encoder": _UMT5_XXL,
            **dict.fromkeys(names, transformer_parameters),
            "vae": vae_parameters,
        },
        experts=experts,
        flow_shift=flow_shift,
        **fields,
    )


KNOWN = (
    _model(
        name="wan2.2-t2v-a14b",
        title="Wan2.2 T2V-A14B",
        repository="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        about="The largest Wan model: one expert for layout and motion, one for detail, at 480p and 720p.",
        aliases=frozenset({"wan2.2-a14b", "wan2.2-t2v-14b", "wan2.2-14b", "a14b"}),
        transformer=_WIDE,
        transformer_parameters=14_288_491_584,
        experts=2,
        boundary_ratio=0.875,
        flow_shift=12.0,
    ),
    _model(
        name="wan2.2-ti2v-5b",
        title="Wan2.2 TI2V-5B",
        repository="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        about="720p at 24 frames per second from a mid-size model, whose VAE compresses more.",
        aliases=frozenset({"wan2.2-5b", "ti2v-5b"}),
        transformer={
            **_TRANSFORMER,
            "num_attention_heads": 24,
            "num_layers": 30,
            "ffn_dim": 14336,
            "in_channels": 48,
            "out_channels": 48,
        },
        transformer_parameters=4_999_787_712,
        vae=_VAE_5B,
        vae_parameters=704_688_668,
        expand_timesteps=True,
    ),
    _model(
        name="wan2.1-t2v-1.3b",
        title="Wan2.1 T2V-1.3B",
        repository="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        about="The smallest Wan model: 480p on consumer GPUs.",
        aliases=frozenset({"wan2.1-1.3b", "t2v-1.3b"}),
        transformer={**_TRANSFORMER, "num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        transformer_parameters=1_418_996_800,
        sizes=_SIZES_480P,
    ),
    _model(
        name="wan2.1-t2v-14b",
        title="Wan2.1 T2V-14B",
        repository="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        about="A large Wan model with one transformer, at 480p and 720p.",
        aliases=frozenset({"wan2.1-14b", "t2v-14b"}),
        transformer=_WIDE,
        transformer_parameters=14_288_491_584,
    ),
)
