"""Published FramePack models: transformers from https://huggingface.co/lllyasviel, and components that others publish.

A test counts the parameters with the classes that are loaded.
"""

from collections.abc import Mapping
from typing import Any

from runtime.families.hunyuan_video import known as hunyuan_video
from runtime.models.registry import KnownModel, Part

(_HUNYUAN_VIDEO,) = hunyuan_video.KNOWN
# SigLIP, from FLUX.1 Redux.
_SIGLIP: Mapping[str, Any] = {
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **_HUNYUAN_VIDEO.configs,
    "image_encoder": _SIGLIP,
    "transformer": {
        **_HUNYUAN_VIDEO.configs["transformer"],
        "has_clean_x_embedder": True,
        "has_image_proj": True,
        "image_proj_dim": 1152,
    },
}
_PARAMETERS: Mapping[str, int] = {
    **_HUNYUAN_VIDEO.parameters,
    "image_encoder": 428_225_600,
    "transformer": 12_874_314_816,
    # One module encodes and decodes.
    "vae_encoder": _HUNYUAN_VIDEO.parameters["vae"],
}
_INDEX: Mapping[str, Any] = {
    "_class_name": "HunyuanVideoFramepackPipeline",
    "feature_extractor": ["transformers", "SiglipImageProcessor"],
    "image_encoder": ["transformers", "SiglipVisionModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "LlamaModel"],
    "text_encoder_2": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "LlamaTokenizerFast"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "transformer": ["diffusers", "HunyuanVideoFramepackTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLHunyuanVideo"],
}


def _model(name: str, title: str, repository: str, about: str) -> KnownModel:
    shared = ("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")
    return KnownModel(
        name=name,
        title=title,
        family="framepack",
        repository=repository,
        parts=(
            Part(repository=repository, at_root="transformer"),
            Part(repository="lllyasviel/flux_redux_bfl", folders=("feature_extractor", "image_encoder")),
            Part(repository=_HUNYUAN_VIDEO.repository, folders=shared),
        ),
        index=_INDEX,
        # Its transformer is trained from HunyuanVideo's; the image encoder's repository is that of FLUX.1 Redux [dev].
        license=f"{_HUNYUAN_VIDEO.license}; image encoder: flux-1-dev-non-commercial-license",
        about=about,
        aliases=frozenset(),
        configs=_CONFIGS,
        parameters=_PARAMETERS,
        flow_shift=7.0,
    )


KNOWN = (
    _model(
        "framepack-i2v",
        "FramePack I2V",
        "lllyasviel/FramePackI2V_HY",
        "A large model for long videos from an image, made in sections from the end to the start.",
    ),
    _model(
        "framepack-f1-i2v",
        "FramePack F1",
        "lllyasviel/FramePack_F1_I2V_HY_20250503",
        "A large model for long videos from an image, made in sections from the start to the end.",
    ),
)
