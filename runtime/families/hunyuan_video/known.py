"""Published HunyuanVideo models, from their configurations at https://huggingface.co/hunyuanvideo-community.

A test counts the parameters with the libraries' own classes.
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
_VAE: Mapping[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "in_channels": 3,
    "latent_channels": 16,
    "layers_per_block": 2,
    "out_channels": 3,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
}

KNOWN = (
    KnownModel(
        name="hunyuan-video",
        title="HunyuanVideo",
        family="hunyuan_video",
        repository="hunyuanvideo-community/HunyuanVideo",
        license="tencent-hunyuan-community",
        about="A large model for videos from text at 544p and 720p; its guidance needs no second pass.",
        aliases=frozenset({"hunyuan-video-t2v", "tencent/hunyuanvideo"}),
        configs={"transformer": _TRANSFORMER, "vae": _VAE},
        parameters={
            "text_encoder": 7_505_186_816,
            "text_encoder_2": 123_060_480,
            "transformer": 12_821_012_544,
            "vae": 246_478_803,
        },
        flow_shift=7.0,
    ),
)
