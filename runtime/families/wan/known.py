"""Published Wan models, from their configurations at https://huggingface.co/Wan-AI (Apache 2.0).

A test counts the parameters with the libraries' own classes.
"""

from collections.abc import Mapping
from typing import Any

from runtime.families.wan import mag_ratios
from runtime.models.registry import KnownModel

_LICENSE = "Apache-2.0"
# UMT5-XXL's encoder; its embedding has two names and counts once.
_UMT5_XXL = 5_680_910_336

_TEXT_ENCODER: Mapping[str, Any] = {
    "d_ff": 10240,
    "d_model": 4096,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 256384,
}
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
# With four mask channels and the 16 channels of the given frames' latents.
_WIDE_IMAGE: Mapping[str, Any] = {**_WIDE, "in_channels": 36}
_CLIP: Mapping[str, Any] = {
    "hidden_act": "gelu",
    "hidden_size": 1280,
    "image_size": 224,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "patch_size": 14,
}
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
# Of latents, from Wan2.2's wan/modules/vae2_2.py; diffusers' defaults are those of Wan2.1.
# fmt: off
_MEAN_5B = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.052, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
]
_STD_5B = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
]
# fmt: on
_VAE_5B: Mapping[str, Any] = {
    **_VAE,
    "base_dim": 160,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "is_residual": True,
    "latents_mean": _MEAN_5B,
    "latents_std": _STD_5B,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "z_dim": 48,
}
# 1.3B was trained at 480p; its card calls 720p less stable.
_SIZES_480P = ((832, 480), (480, 832))
_SIZES_720P = ((1280, 720), (720, 1280))
_VAE_PARAMETERS, _VAE_ENCODER_PARAMETERS = 126_892_531, 53_596_928
_CLIP_PARAMETERS = 630_766_080


def _model(
    *,
    transformer: Mapping[str, Any],
    transformer_parameters: int,
    vae: Mapping[str, Any] = _VAE,
    vae_parameters: int = _VAE_PARAMETERS,
    vae_encoder_parameters: int = _VAE_ENCODER_PARAMETERS,
    experts: int = 1,
    flow_shift: float = 5.0,
    **fields: Any,
) -> KnownModel:
    names = ("transformer", "transformer_2")[:experts]
    encoder = {"image_encoder": _CLIP} if transformer["image_dim"] is not None else {}
    return KnownModel(
        family="wan",
        license=_LICENSE,
        configs={"text_encoder": _TEXT_ENCODER, "transformer": transformer, "vae": vae, **encoder},
        parameters={
            "text_encoder": _UMT5_XXL,
            **dict.fromkeys(names, transformer_parameters),
            "vae": vae_parameters,
            "vae_encoder": vae_encoder_parameters,
            **dict.fromkeys(encoder, _CLIP_PARAMETERS),
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
        mag_ratios=mag_ratios.T2V_A14B,
    ),
    _model(
        name="wan2.2-ti2v-5b",
        title="Wan2.2 TI2V-5B",
        repository="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        about="720p at 24 frames per second, from text or an image, from a mid-size model whose VAE compresses more.",
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
        vae_encoder_parameters=149_637_088,
        expand_timesteps=True,
        mag_ratios=mag_ratios.TI2V_5B,
    ),
    _model(
        name="wan2.2-i2v-a14b",
        title="Wan2.2 I2V-A14B",
        repository="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        about="The largest Wan model for videos that start from an image, at 480p and 720p; also between two images.",
        aliases=frozenset({"wan2.2-i2v-14b", "i2v-a14b"}),
        transformer=_WIDE_IMAGE,
        transformer_parameters=14_288_901_184,
        experts=2,
        boundary_ratio=0.9,
        mag_ratios=mag_ratios.I2V_A14B,
    ),
    _model(
        name="wan2.1-i2v-14b-480p",
        title="Wan2.1 I2V-14B 480P",
        repository="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        about="A large Wan model with one transformer, for videos that start from an image at 480p.",
        aliases=frozenset({"i2v-14b-480p"}),
        transformer={**_WIDE_IMAGE, "image_dim": 1280, "added_kv_proj_dim": 5120},
        transformer_parameters=16_394_878_784,
        flow_shift=3.0,
        sizes=_SIZES_480P,
        mag_ratios=mag_ratios.I2V_14B_480P,
    ),
    _model(
        name="wan2.1-i2v-14b-720p",
        title="Wan2.1 I2V-14B 720P",
        repository="Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        about="A large Wan model with one transformer, for videos that start from an image at 720p.",
        aliases=frozenset({"i2v-14b-720p"}),
        transformer={**_WIDE_IMAGE, "image_dim": 1280, "added_kv_proj_dim": 5120},
        transformer_parameters=16_394_878_784,
        sizes=_SIZES_720P,
        mag_ratios=mag_ratios.I2V_14B_720P,
    ),
    _model(
        name="wan2.1-flf2v-14b",
        title="Wan2.1 FLF2V-14B",
        repository="Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
        about="A large Wan model for the video between a first and a last image, at 720p.",
        aliases=frozenset({"wan2.1-flf2v-14b-720p", "flf2v-14b"}),
        transformer={**_WIDE_IMAGE, "image_dim": 1280, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 514},
        transformer_parameters=16_395_536_704,
        flow_shift=16.0,
        sizes=_SIZES_720P,
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
        mag_ratios=mag_ratios.T2V_1_3B,
    ),
    _model(
        name="wan2.1-t2v-14b",
        title="Wan2.1 T2V-14B",
        repository="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        about="A large Wan model with one transformer, at 480p and 720p.",
        aliases=frozenset({"wan2.1-14b", "t2v-14b"}),
        transformer=_WIDE,
        transformer_parameters=14_288_491_584,
        mag_ratios=mag_ratios.T2V_14B,
    ),
)
