"""Published HunyuanVideo models, from their configurations at https://huggingface.co/hunyuanvideo-community.

A test counts the parameters with the classes that are loaded: LLaMA without its last two layers.
"""

from collections.abc import Mapping
from typing import Any

from runtime.models.registry import KnownModel

_TRANSFORMER: Mapping[str, Any] = {
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 16,
    "mlp_ratio": 4.0,
    "num_attention_heads": 24,
    "num_layers": 20,
    "num_refiner_layers": 2,
    "num_single_layers": 40,
    "out_channels": 16,
    "patch_size": 2,
    "patch_size_t": 1,
    "pooled_projection_dim": 768,
    "qk_norm": "rms_norm",
    "rope_axes_dim": [16, 56, 56],
    "rope_theta": 256.0,
    "text_embed_dim": 4096,
}
_LLAMA: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128320,
}
_CLIP: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "projection_dim": 768,
    "vocab_size": 49408,
}
_VAE: Mapping[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "in_channels": 3,
    "latent_channels": 16,
    "layers_per_block": 2,
    "out_channels": 3,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
}

# At 960x544 with 50 steps, from `magcache_sample_video.py` of https://github.com/Zehong-Ma/MagCache (Apache 2.0).
# fmt: off
_MAG_RATIOS = (
    1.0, 1.06971, 1.29073, 1.11245, 1.09596, 1.05233, 1.01415, 1.05672, 1.00848, 1.03632, 1.02974, 1.00984, 1.03028,
    1.00681, 1.06614, 1.05022, 1.02592, 1.01776, 1.02985, 1.00726, 1.03727, 1.01502, 1.00992, 1.03371, 0.9976,
    1.02742, 1.0093, 1.01869, 1.00815, 1.01461, 1.01152, 1.03082, 1.0061, 1.02162, 1.01999, 0.99063, 1.01186, 1.0217,
    0.99947, 1.01711, 0.9904, 1.00258, 1.00878, 0.97039, 0.97686, 0.94315, 0.97728, 0.91154, 0.86139, 0.76592,
)
# fmt: on

KNOWN = (
    KnownModel(
        name="hunyuan-video",
        title="HunyuanVideo",
        family="hunyuan_video",
        repository="hunyuanvideo-community/HunyuanVideo",
        license="tencent-hunyuan-community",
        about="A large model for videos from text at 544p and 720p; its guidance needs no second pass.",
        aliases=frozenset({"hunyuan-video-t2v", "tencent/hunyuanvideo"}),
        configs={"text_encoder": _LLAMA, "text_encoder_2": _CLIP, "transformer": _TRANSFORMER, "vae": _VAE},
        parameters={
            "text_encoder": 7_068_958_720,
            "text_encoder_2": 123_060_480,
            "transformer": 12_821_012_544,
            "vae": 246_478_803,
        },
        flow_shift=7.0,
        mag_ratios={"transformer": _MAG_RATIOS},
    ),
)
