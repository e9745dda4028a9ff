"""Specs and configurations of the published models at full size, without weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec

# By the names that the measurements use.
_PUBLISHED = {
    "wan2.1-1.3b": "wan2.1-t2v-1.3b",
    "wan2.2-a14b": "wan2.2-t2v-a14b",
    "wan2.2-ti2v-5b": "wan2.2-ti2v-5b",
    "wan2.1-vace-14b": "wan2.1-vace-14b",
}

# Arguments of `WanTransformer3DModel`, `AutoencoderKLWan` and `UMT5Config`: from https://huggingface.co/Wan-AI.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "wan2.1-1.3b": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "wan2.2-a14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    "wan2.2-i2v-a14b": {
        "num_attention_heads": 40,
        "ffn_dim": 13824,
        "num_layers": 40,
        "in_channels": 36,
        "out_channels": 16,
    },
    "wan2.2-ti2v-5b": {
        "num_attention_heads": 24,
        "ffn_dim": 14336,
        "num_layers": 30,
        "in_channels": 48,
        "out_channels": 48,
    },
    "wan2.1-vace-14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
VAES: dict[str, dict[str, Any]] = {
    "wan2.1": {},
    "wan2.2-ti2v-5b": {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
}
UMT5: dict[str, Any] = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


def spec(model: str) -> ModelSpec:
    """Return the spec of one of `_PUBLISHED` for videos without images, marked as downloaded."""
    return replace(look_up(_PUBLISHED[model], Path("none")), is_downloaded=True).for_text()
