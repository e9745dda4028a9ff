"""The published models' specs at their true size, without a weight: architectures from tests/gpu/proof_memory.py."""

import functools
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from runtime.models.spec import ModelSpec, TransformerSpec, VaeSpec
from runtime.models.wan import card_defaults
from tests.gpu.proof_memory import TRANSFORMERS, VAES

# Of UMT5-XXL's encoder, the embedding counted once.
TEXT_PARAMETERS = 5_680_910_336


@functools.cache
def spec(model: str) -> ModelSpec:
    """Return the spec of "wan2.1-1.3b", "wan2.2-a14b" or "wan2.2-ti2v-5b"."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel(**TRANSFORMERS[model])
        vae = AutoencoderKLWan(**VAES.get(model, {}))
    made, built = transformer.config, vae.config
    experts = 2 if model == "wan2.2-a14b" else 1
    vae_spec = VaeSpec(
        z_dim=built.z_dim,
        decoder_base_dim=built.decoder_base_dim or built.base_dim,
        dim_mult=tuple(built.dim_mult),
        num_res_blocks=built.num_res_blocks,
        temperal_downsample=tuple(built.temperal_downsample),
        scale_factor_temporal=built.scale_factor_temporal,
        scale_factor_spatial=built.scale_factor_spatial,
        patch_size=built.patch_size or 1,
        is_residual=built.is_residual,
    )
    weights = sum(parameter.numel() for parameter in transformer.parameters())
    return ModelSpec(
        name=model,
        title=model,
        license="Apache-2.0",
        directory=Path(model),
        transformer=TransformerSpec(
            num_layers=made.num_layers,
            num_attention_heads=made.num_attention_heads,
            attention_head_dim=made.attention_head_dim,
            ffn_dim=made.ffn_dim,
            in_channels=made.in_channels,
            text_dim=made.text_dim,
            patch_size=tuple(made.patch_size),
        ),
        experts=experts,
        vae=vae_spec,
        boundary_ratio=0.875 if experts > 1 else None,
        scheduler="UniPCMultistepScheduler",
        expand_timesteps=model == "wan2.2-ti2v-5b",
        max_sequence_length=512,
        parameters={
            "text_encoder": TEXT_PARAMETERS,
            **dict.fromkeys(("transformer", "transformer_2")[:experts], weights),
            "vae": sum(parameter.numel() for parameter in vae.parameters()),
        },
        latent_rgb=None,
        **card_defaults(vae_spec, experts),
    )
