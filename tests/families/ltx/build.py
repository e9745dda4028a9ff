"""Builds a tiny random LTX-Video model in diffusers' format: real modules, a second's work."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel
from transformers import T5Config, T5EncoderModel

from tests.tiny_models import tokenizer


def build(directory: Path, seed: int = 0) -> Path:
    """Save a tiny random model into `directory` and return it."""
    torch.manual_seed(seed)
    pipeline = LTXPipeline(
        tokenizer=tokenizer(),
        text_encoder=T5EncoderModel(
            T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ).eval(),
        transformer=LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=12,
            cross_attention_dim=24,
            num_layers=2,
            caption_channels=32,
        ).eval(),
        vae=AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            patch_size=1,
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    pipeline.save_pretrained(directory)
    return directory
