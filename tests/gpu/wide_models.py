"""Models of Wan's architectures at full width, with few blocks and random weights, for the GPU checks."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from tests.tiny_models import tokenizer

# Heads of 128 channels, feed-forward width: from the models' configurations, https://huggingface.co/Wan-AI.
WIDTHS = {"wan2.1-1.3b": (12, 8960), "wan2.2-a14b": (40, 13824)}


def build(name: str, directory: Path, blocks: int, seed: int = 0) -> Path:
    """Save a model of one of `WIDTHS` in float16 and return its folder, created on the GPU if there is one."""
    if (directory / "model_index.json").is_file():
        return directory
    torch.manual_seed(seed)
    heads, ffn_dim = WIDTHS[name]
    experts = 2 if name == "wan2.2-a14b" else 1
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        transformers = [
            WanTransformer3DModel(num_attention_heads=heads, attention_head_dim=128, ffn_dim=ffn_dim, num_layers=blocks)
            for _ in range(experts)
        ]
        vae = AutoencoderKLWan()
    # Of UMT5-XXL's width, with one layer and few words.
    text_encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=32, d_model=4096, d_kv=64, d_ff=10240, num_layers=1, num_heads=64)
    )
    WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=text_encoder,
        vae=vae.half(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        transformer=transformers[0].half(),
        transformer_2=transformers[1].half() if experts > 1 else None,
        boundary_ratio=0.875 if experts > 1 else None,
    ).save_pretrained(directory)
    return directory
