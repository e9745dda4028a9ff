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
    ),
)
