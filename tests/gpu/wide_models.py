"""Wan, HunyuanVideo and FramePack at full width, with few blocks and random weights, for tests and benchmarks."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from runtime.families.hunyuan_video.spec import SKIPPED_LAYERS
from runtime.models.registry import published_models
from tests.published_specs import VAES
from tests.tiny_models import tokenizer

# Heads of 128 channels, feed-forward width, and what else differs: from the models' configurations,
# https://huggingface.co/Wan-AI.
WIDTHS: dict[str, dict[str, Any]] = {
    "wan2.1-1.3b": {"num_attention_heads": 12, "ffn_dim": 8960},
    "wan2.2-a14b": {"num_attention_heads": 40, "ffn_dim": 13824},
    "wan2.1-i2v-14b": {
        "num_attention_heads": 40,
        "ffn_dim": 13824,
        "in_channels": 36,
        "out_channels": 16,
        "image_dim": 1280,
        "added_kv_proj_dim": 5120,
    },
    "wan2.2-ti2v-5b": {"num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
}
# The models that `build` makes.
NAMES = (*WIDTHS, "hunyuan-video", "framepack")
# CLIP's ViT-H/14.
_IMAGE_ENCODER: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}


def build(name: str, directory: Path, blocks: int, seed: int = 0) -> Path:
    """Save one of `NAMES` in float16 and return its folder, created on the GPU if there is one."""
    if (directory / "model_index.json").is_file():
        return directory
    torch.manual_seed(seed)
    if name not in WIDTHS:
        return _hunyuan_video(name, directory, blocks)
    experts = 2 if name == "wan2.2-a14b" else 1
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        transformers = [
            WanTransformer3DModel(attention_head_dim=128, num_layers=blocks, **WIDTHS[name]) for _ in range(experts)
        ]
        vae = AutoencoderKLWan(**VAES.get(name, {}))
        image_encoder = CLIPVisionModel(CLIPVisionConfig(**_IMAGE_ENCODER)) if "image_dim" in WIDTHS[name] else None
    # Of UMT5-XXL's width, with one layer and few words.
    text_encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=32, d_model=4096, d_kv=64, d_ff=10240, num_layers=1, num_heads=64)
    )
    parts: dict[str, Any] = dict(
        tokenizer=tokenizer(),
        text_encoder=text_encoder,
        vae=vae.half(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        transformer=transformers[0].half(),
        transformer_2=transformers[1].half() if experts > 1 else None,
        boundary_ratio=0.875 if experts > 1 else None,
    )
    if image_encoder is not None:
        processor = CLIPImageProcessor(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
        parts |= {"image_encoder": image_encoder.half(), "image_processor": processor}
        WanImageToVideoPipeline(**parts).save_pretrained(directory)
    else:
        WanPipeline(**parts, expand_timesteps=name == "wan2.2-ti2v-5b").save_pretrained(directory)
    return directory


def _hunyuan_video(name: str, directory: Path, blocks: int) -> Path:
    """Save a HunyuanVideo, or a FramePack, with the published widths, VAE and image encoder.

    Args:
        blocks: of each kind in the transformer, and layers of LLaMA that are computed.
    """
    sections = name == "framepack"
    (model, *_) = published_models("framepack" if sections else "hunyuan_video")
    configs, counts = model.configs, {"num_layers": blocks, "num_single_layers": blocks}
    llama = {**configs["text_encoder"], "num_hidden_layers": blocks + SKIPPED_LAYERS, "vocab_size": 32}
    transformer = HunyuanVideoFramepackTransformer3DModel if sections else HunyuanVideoTransformer3DModel
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        parts: dict[str, Any] = {
            "text_encoder": LlamaModel(LlamaConfig(**llama, pad_token_id=0, bos_token_id=None, eos_token_id=1)),
            "text_encoder_2": CLIPTextModel(CLIPTextConfig(**configs["text_encoder_2"])),
            "vae": AutoencoderKLHunyuanVideo(),
            "transformer": transformer(**{**configs["transformer"], **counts}),
        }
        if sections:
            parts["image_encoder"] = SiglipVisionModel(SiglipVisionConfig(**configs["image_encoder"]))
    parts = {part: module.half() for part, module in parts.items()}
    parts |= {"tokenizer": tokenizer(), "tokenizer_2": tokenizer()}
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=7.0)
    if sections:
        side = configs["image_encoder"]["image_size"]
        parts["feature_extractor"] = SiglipImageProcessor(size={"height": side, "width": side})
        HunyuanVideoFramepackPipeline(**parts).save_pretrained(directory)
    else:
        HunyuanVideoPipeline(**parts).save_pretrained(directory)
    return directory
