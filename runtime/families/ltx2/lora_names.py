"""Names of LTX-2's modules in LoRA files, and their shapes. Imports no torch.

Files have diffusers' names or those of the model's own code, which ComfyUI and the publishers' trainer write too. Both
differ outside of the blocks and in the norms of queries and keys only.

Source of the names: diffusers' loaders/lora_conversion_utils.py and scripts/convert_ltx2_to_diffusers.py.
"""

import re
from typing import Any

from runtime.models.lora_names import Blocks, LoraNames
from runtime.models.registry import ABSENT
from runtime.models.spec import ModelSpec

BLOCKS = "transformer_blocks"
ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
FEED_FORWARDS = ("ff", "audio_ff")
# In the model's own code and in diffusers: modulations by the timestep, and how many vectors of a stream's width.
MODULATIONS = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}
PROJECTIONS = {"patchify_proj": "proj_in", "audio_patchify_proj": "audio_proj_in"}
TEXT_PROJECTIONS = ("caption_projection", "audio_caption_projection")
OF_MODULATION = ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
# Channels of the timestep's sinusoids.
_SINUSOIDS = 256
NAMES = LoraNames(
    (
        Blocks(
            BLOCKS,
            BLOCKS,
            {
                **{
                    f"{attention}.{theirs}": f"{attention}.{ours}"
                    for attention in ATTENTIONS
                    for theirs, ours in {
                        **{name: name for name in ("to_q", "to_k", "to_v", "to_out.0", "to_gate_logits")},
                        "q_norm": "norm_q",
                        "k_norm": "norm_k",
                    }.items()
                },
                **{name: name for part in FEED_FORWARDS for name in (f"{part}.net.0.proj", f"{part}.net.2")},
            },
        ),
    ),
    {
        **PROJECTIONS,
        **{name: name for name in ("proj_out", "audio_proj_out")},
        **{f"{name}.linear_{n}": f"{name}.linear_{n}" for name in TEXT_PROJECTIONS for n in (1, 2)},
        **{f"{theirs}.{part}": f"{ours}.{part}" for theirs, ours in MODULATIONS.items() for part in OF_MODULATION},
    },
)
_BLOCK = re.compile(rf"{BLOCKS}\.([0-9]+)\.(.+)")


def weight_shape(spec: ModelSpec, module: str) -> tuple[int | None, ...] | None:
    """Return the shape of the weight of a module; see `Family.lora_weight_shape`. A norm's weight has one axis."""
    return shape_of(spec.transformer, module)


def shape_of(transformer: Any, module: str) -> tuple[int | None, ...] | None:
    """Return the shape of the weight of a module of a transformer with the attributes of `spec.TransformerSpec`."""
    block = _BLOCK.fullmatch(module)
    if block is not None:
        return _of_block(transformer, block[2]) if int(block[1]) < transformer.num_layers else None
    width = transformer.sound_width if "audio" in module else transformer.width
    name, _, layer = module.partition(".")
    if name in TEXT_PROJECTIONS:
        text = transformer.text_dim if layer.endswith("1") else width
        return (width, text) if transformer.projects_text else ABSENT
    if name in MODULATIONS.values():
        return _of_modulation(transformer, name, layer, width)
    channels = transformer.sound_channels if "audio" in module else transformer.in_channels
    if module in PROJECTIONS.values():
        return (width, channels)
    return (channels, width) if module in {"proj_out", "audio_proj_out"} else None


def _of_block(transformer: Any, name: str) -> tuple[int, ...] | None:
    """Return the shape of the weight of a module in a block."""
    part, _, layer = name.partition(".")
    width, sound = transformer.width, transformer.sound_width
    if part in FEED_FORWARDS:
        channels = width if part == "ff" else sound
        return {"net.0.proj": (4 * channels, channels), "net.2": (channels, 4 * channels)}.get(layer)
    # Channels of queries and results, of keys and values, and of heads.
    streams = {
        **dict.fromkeys(("attn1", "attn2"), (width, width, width)),
        **dict.fromkeys(("audio_attn1", "audio_attn2"), (sound, sound, sound)),
        "audio_to_video_attn": (width, sound, sound),
        "video_to_audio_attn": (sound, width, sound),
    }
    if part not in streams:
        return None
    queries, context, inner = streams[part]
    heads = transformer.num_attention_heads if part in {"attn1", "attn2"} else transformer.sound_heads
    return {
        "to_q": (inner, queries),
        "to_k": (inner, context),
        "to_v": (inner, context),
        "to_out.0": (queries, inner),
        "to_gate_logits": (heads, queries) if transformer.gated else ABSENT,
        "norm_q": (inner,),
        "norm_k": (inner,),
    }.get(layer)


def _of_modulation(transformer: Any, name: str, layer: str, width: int) -> tuple[int, ...] | None:
    """Return the shape of the weight of a module of a modulation."""
    if "prompt" in name and not transformer.modulated_text:
        return ABSENT
    vectors = 9 if transformer.modulated_text else 6
    if name.startswith("av_cross_attn"):
        vectors = 1 if name.endswith("gate") else 4
    elif "prompt" in name:
        vectors = 2
    shapes = ((width, _SINUSOIDS), (width, width), (vectors * width, width))
    return dict(zip(OF_MODULATION, shapes, strict=True)).get(layer)
