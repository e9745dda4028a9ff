"""Build a tiny FramePack pipeline with random weights, in a fraction of a second."""

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoFramepackTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.tiny_models import tokenizer

LATENT_CHANNELS = 4


def pipeline(seed: int = 0, *, dynamic_shift: bool = False) -> HunyuanVideoFramepackPipeline:
    """Return diffusers' pipeline of a tiny random model in float32.

    Args:
        dynamic_shift: whether the schedule's shift depends on the number of tokens.
    """
    torch.manual_seed(seed)
    made = HunyuanVideoFramepackPipeline(
        text_encoder=_llama(),
        tokenizer=tokenizer(),
        transformer=_transformer(),
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0, use_dynamic_shifting=dynamic_shift),
        text_encoder_2=_clip(),
        tokenizer_2=tokenizer(),
        image_encoder=_siglip(),
        feature_extractor=SiglipImageProcessorPil(size={"height": 30, "width": 30}),
    )
    made.set_progress_bar_config(disable=True)
    return made


def _transformer() -> HunyuanVideoFramepackTransformer3DModel:
    return HunyuanVideoFramepackTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
        has_image_proj=True,
        image_proj_dim=32,
        has_clean_x_embedder=True,
    ).eval()


def _vae() -> AutoencoderKLHunyuanVideo:
    return AutoencoderKLHunyuanVideo(
        latent_channels=LATENT_CHANNELS, block_out_channels=(2, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    ).eval()


def _llama() -> LlamaModel:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaModel(config).eval()


def _clip() -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return CLIPTextModel(config).eval()


def _siglip() -> SiglipVisionModel:
    config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, image_size=30, patch_size=15
    )
    return SiglipVisionModel(config).eval()
