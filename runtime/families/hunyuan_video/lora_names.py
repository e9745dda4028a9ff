"""Names of HunyuanVideo's modules in LoRA files, their shapes, and LoRAs from step distillation. Imports no torch.

Files have diffusers' names, those of the model's own code (musubi-tuner, diffusion-pipe) or ComfyUI's. In the latter
two, queries, keys and values are one layer, in single blocks together with the inner layer.

Source of the names: diffusers' loaders/lora_conversion_utils.py and scripts/convert_hunyuan_video_to_diffusers.py;
ComfyUI's comfy/supported_models.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from runtime.models.lora_names import Blocks, DistilledNames, LoraNames, Names
from runtime.models.spec import ModelSpec

_DOUBLE, _SINGLE = "transformer_blocks", "single_transformer_blocks"
_REFINER = "context_embedder.token_refiner.refiner_blocks"


def _stream(of: str, attention: Mapping[str, str | tuple[str, ...]], norm: str, feed_forward: str) -> Names:
    """Return the modules of a double block for the clip's tokens, "img", or the text's, "txt"."""
    return {
        **{f"{of}_attn{name}": modules for name, modules in attention.items()},
        f"{of}_mod.linear": f"{norm}.linear",
        f"{of}_mod.lin": f"{norm}.linear",
        **_feed_forward(f"{of}_mlp", feed_forward),
    }


def _feed_forward(original: str, diffusers: str) -> dict[str, str]:
    return {
        f"{original}.{name}": f"{diffusers}.{module}"
        for name, module in (("fc1", "net.0.proj"), ("fc2", "net.2"), ("0", "net.0.proj"), ("2", "net.2"))
    }


def _embedder(original: str, diffusers: str) -> dict[str, str]:
    """Return the two layers of an embedder, by the spellings in use."""
    return {
        f"{original}.{name}": f"{diffusers}.linear_{number}"
        for number, names in ((1, ("mlp.0", "in_layer", "linear_1")), (2, ("mlp.2", "out_layer", "linear_2")))
        for name in names
    }


BLOCKS = (
    Blocks(
        "double_blocks",
        _DOUBLE,
        {
            **_stream(
                "img",
                {
                    ".qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
                    ".proj": "attn.to_out.0",
                    "_q_norm": "attn.norm_q",
                    "_k_norm": "attn.norm_k",
                    ".norm.query_norm": "attn.norm_q",
                    ".norm.key_norm": "attn.norm_k",
                },
                "norm1",
                "ff",
            ),
            **_stream(
                "txt",
                {
                    ".qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
                    ".proj": "attn.to_add_out",
                    "_q_norm": "attn.norm_added_q",
                    "_k_norm": "attn.norm_added_k",
                    ".norm.query_norm": "attn.norm_added_q",
                    ".norm.key_norm": "attn.norm_added_k",
                },
                "norm1_context",
                "ff_context",
            ),
        },
    ),
    Blocks(
        "single_blocks",
        _SINGLE,
        {
            "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
            "linear2": "proj_out",
            "modulation.linear": "norm.linear",
            "modulation.lin": "norm.linear",
            "q_norm": "attn.norm_q",
            "k_norm": "attn.norm_k",
            "norm.query_norm": "attn.norm_q",
            "norm.key_norm": "attn.norm_k",
        },
    ),
    Blocks(
        "txt_in.individual_token_refiner.blocks",
        _REFINER,
        {
            "self_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "self_attn.proj": "attn.to_out.0",
            "norm1": "norm1",
            "norm2": "norm2",
            "adaLN_modulation.1": "norm_out.linear",
            **_feed_forward("mlp", "ff"),
        },
    ),
)
OUTSIDE: Names = {
    "img_in.proj": "x_embedder.proj",
    "txt_in.input_embedder": "context_embedder.proj_in",
    **_embedder("txt_in.t_embedder", "context_embedder.time_text_embed.timestep_embedder"),
    **_embedder("txt_in.c_embedder", "context_embedder.time_text_embed.text_embedder"),
    **_embedder("time_in", "time_text_embed.timestep_embedder"),
    **_embedder("guidance_in", "time_text_embed.guidance_embedder"),
    **_embedder("vector_in", "time_text_embed.text_embedder"),
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
# Shift and scale in the model's own code, scale and shift in diffusers.
SWAPPED = ("final_layer.adaLN_modulation.1",)
NAMES = LoraNames(BLOCKS, OUTSIDE, SWAPPED)

_BLOCK = re.compile(rf"({'|'.join(map(re.escape, (_DOUBLE, _SINGLE, _REFINER)))})\.([0-9]+)\.(.+)")
# Channels of the timestep's sinusoids.
_SINUSOIDS = 256
# The ratio of the text refiner's inner layers, whatever the transformer's is.
_REFINER_RATIO = 4
# LoRAs from step distillation are identified by their names. The numbers of steps are FastVideo's for FastHunyuan
# (https://github.com/hao-ai-lab/FastVideo, --num_inference_steps) and AccVideo's (https://github.com/aejion/AccVideo).
_FASTVIDEO = re.compile(r"(?<![a-z])fast[\s_-]?(hunyuan|video)", re.IGNORECASE)
# FastVideo's --flow_shift with that model.
FASTVIDEO_SHIFT = 17.0
DISTILLED = DistilledNames(
    {_FASTVIDEO: 6, re.compile(r"(?<![a-z])accvid", re.IGNORECASE): 5}, {_FASTVIDEO: FASTVIDEO_SHIFT}
)


def weight_shape(spec: ModelSpec, module: str) -> tuple[int | None, ...] | None:
    """Return the shape of the weight of a module; `None` for an unknown module. A norm's weight has one axis."""
    transformer: Any = spec.transformer
    width, heads = transformer.width, transformer.attention_head_dim
    block = _BLOCK.fullmatch(module)
    if block is not None:
        kind, number, name = block.groups()
        layers = {
            _DOUBLE: transformer.double_layers,
            _SINGLE: transformer.single_layers,
            _REFINER: transformer.refiner_layers,
        }
        if int(number) >= layers[kind]:
            return None
        if name.startswith("attn.norm_"):
            return (heads,)
        inner = _REFINER_RATIO * width if kind == _REFINER else transformer.ffn_dim
        shapes: dict[str, tuple[int, ...]] = {
            "norm1": (width,),
            "norm2": (width,),
            "norm1.linear": (6 * width, width),
            "norm1_context.linear": (6 * width, width),
            "norm.linear": (3 * width, width),
            "norm_out.linear": (2 * width, width),
            "proj_mlp": (inner, width),
            "proj_out": (width, width + inner),
            **{f"{name}.net.0.proj": (inner, width) for name in ("ff", "ff_context")},
            **{f"{name}.net.2": (width, inner) for name in ("ff", "ff_context")},
        }
        return shapes.get(name, (width, width))
    if "guidance_embedder" in module and not transformer.guidance_embeds:
        return None
    frames, rows, columns = transformer.patch_size
    in_text, in_clip = "context_embedder.time_text_embed", "time_text_embed"
    first_layers = {
        f"{in_text}.timestep_embedder": _SINUSOIDS,
        f"{in_text}.text_embedder": transformer.text_dim,
        f"{in_clip}.timestep_embedder": _SINUSOIDS,
        f"{in_clip}.guidance_embedder": _SINUSOIDS,
        f"{in_clip}.text_embedder": transformer.pooled_dim,
    }
    return {
        "x_embedder.proj": (width, transformer.in_channels, frames, rows, columns),
        "context_embedder.proj_in": (width, transformer.text_dim),
        "norm_out.linear": (2 * width, width),
        "proj_out": (frames * rows * columns * transformer.in_channels, width),
        **{f"{name}.linear_1": (width, channels) for name, channels in first_layers.items()},
        **{f"{name}.linear_2": (width, width) for name in first_layers},
    }.get(module)
