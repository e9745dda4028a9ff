"""Names of Wan's modules in LoRA files, their shapes, and LoRAs from step distillation. Imports no torch.

Source of the names: diffusers' scripts/convert_wan_to_diffusers.py and loaders/lora_conversion_utils.py.
"""

import re
from math import prod
from typing import Any

from runtime.models.lora_names import Blocks, DistilledNames, LoraNames, Names
from runtime.models.registry import ABSENT
from runtime.models.spec import ModelSpec

# diffusers' names of modules by those of Wan's own code: in a block, and outside of the blocks.
IMAGE_EMBEDDER = "condition_embedder.image_embedder"
IN_BLOCKS = {
    **{
        f"{original}.{source}": f"{diffusers}.{target}"
        for original, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for source, target in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "norm3": "norm2",
    "modulation": "scale_shift_table",
}
OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": f"{IMAGE_EMBEDDER}.norm1",
    "img_emb.proj.1": f"{IMAGE_EMBEDDER}.ff.net.0.proj",
    "img_emb.proj.3": f"{IMAGE_EMBEDDER}.ff.net.2",
    "img_emb.proj.4": f"{IMAGE_EMBEDDER}.norm2",
    "img_emb.emb_pos": f"{IMAGE_EMBEDDER}.pos_embed",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
# VACE's control blocks have projections more, and read latents through a layer of their own.
IN_CONTROL_BLOCKS = {**IN_BLOCKS, "before_proj": "proj_in", "after_proj": "proj_out"}
CONTROL_EMBEDDING = "vace_patch_embedding"
# Animate's attentions to a face, and its layer for poses.
FACE_BLOCKS = "face_adapter.fuser_blocks"
IN_FACE_BLOCKS: Names = {
    "linear1_q": "to_q",
    "linear1_kv": ("to_k", "to_v"),
    "linear2": "to_out",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
POSE_EMBEDDING = "pose_patch_embedding"
NAMES = LoraNames(
    blocks=[
        Blocks("blocks", "blocks", IN_BLOCKS),
        Blocks("vace_blocks", "vace_blocks", IN_CONTROL_BLOCKS),
        Blocks(FACE_BLOCKS, "face_adapter", IN_FACE_BLOCKS),
    ],
    outside={**OUTSIDE, CONTROL_EMBEDDING: CONTROL_EMBEDDING, POSE_EMBEDDING: POSE_EMBEDDING},
)
# Layers of the attention to the image, of Wan2.1's models for images.
_IMAGE_ATTENTION = frozenset({"attn2.add_k_proj", "attn2.add_v_proj", "attn2.norm_added_k"})
_BLOCK = re.compile(r"(vace_)?blocks\.([0-9]+)\.(.+)")
_FACE_BLOCK = re.compile(r"face_adapter\.([0-9]+)\.(.+)")
# LoRAs from step distillation are identified by their names.
_LIGHTX2V = re.compile(r"lightning|lightx2v", re.IGNORECASE)
# lightx2v's for its four-step LoRAs, of both generations of the model ("sample_shift" in
# https://github.com/ModelTC/LightX2V, configs/wan22/wan_moe_t2v_distill_lora.json and
# configs/distill/wan_t2v_distill_lora_4step_cfg.json). With it UniPC's four timesteps are 999, 937, 833 and 625; those
# of the training were 1000, 937.5, 833.3 and 625: https://github.com/ModelTC/LightX2V-Wan2.2-Lightning/issues/3.
LIGHTX2V_SHIFT = 5.0
# Distribution matching distillation with three timesteps: FastVideo's (`dmd_denoising_steps` in
# https://github.com/hao-ai-lab/FastVideo, fastvideo/configs/pipelines/wan.py) and CausVid (`denoising_step_list` in
# https://github.com/tianweiy/CausVid, configs/wan_causal_dmd.yaml).
_DMD = re.compile(r"fastwan|causvid", re.IGNORECASE)
_DMD_LEVELS = (1.0, 0.757, 0.522)
# 1000, 750, 500 and 250, moved by shift 5 (`denoising_step_list`, `warp_denoising_step` and `timestep_shift` in
# https://github.com/guandeh17/Self-Forcing, configs/self_forcing_dmd.yaml).
_SELF_FORCING = re.compile(r"self[\s_-]?forcing", re.IGNORECASE)
_SELF_FORCING_LEVELS = (1.0, 15 / 16, 5 / 6, 5 / 8)
_STEPS = {_DMD: len(_DMD_LEVELS), _SELF_FORCING: len(_SELF_FORCING_LEVELS)}
_LEVELS = {_DMD: _DMD_LEVELS, _SELF_FORCING: _SELF_FORCING_LEVELS}
DISTILLED = DistilledNames(
    {**_STEPS, re.compile(r"lightning|lightx2v|distill|accvid|turbo", re.IGNORECASE): 4},
    {_LIGHTX2V: LIGHTX2V_SHIFT},
    _LEVELS,
)
# Whole models. Guidance alone may be distilled, and lightx2v repackages others' models, too.
DISTILLED_MODELS = DistilledNames(
    {**_STEPS, re.compile(r"lightning|step[\s_-]?distill|accvid|turbo", re.IGNORECASE): 4}, {}
)


def weight_shape(spec: ModelSpec, module: str) -> tuple[int | None, ...] | None:
    """Return the shape of the weight of a module; see `registry.Family.lora_weight_shape`.

    A norm's weight has one axis; modulation and positions are bare parameters.
    """
    transformer: Any = spec.transformer
    width, patch = transformer.width, prod(transformer.patch_size)
    image = transformer.image_dim
    controls = len(getattr(transformer, "vace_layers", ()))
    face_blocks = getattr(transformer, "face_blocks", 0)
    face = _FACE_BLOCK.match(module)
    if face is not None:
        if not face_blocks:
            return ABSENT
        head = (transformer.attention_head_dim,)
        shape = head if face[2].startswith("norm_") else (width, width)
        return shape if int(face[1]) < face_blocks else None
    block = _BLOCK.match(module)
    if block is None:
        if module.startswith(IMAGE_EMBEDDER) and (
            image is None or (module.endswith("pos_embed") and transformer.pos_embed_seq_len is None)
        ):
            return ABSENT
        return {
            "patch_embedding": (width, transformer.in_channels, *transformer.patch_size),
            "condition_embedder.text_embedder.linear_1": (width, transformer.text_dim),
            "condition_embedder.text_embedder.linear_2": (width, width),
            "condition_embedder.time_embedder.linear_1": (width, None),
            "condition_embedder.time_embedder.linear_2": (width, width),
            "condition_embedder.time_proj": (6 * width, width),
            f"{IMAGE_EMBEDDER}.norm1": (image,),
            f"{IMAGE_EMBEDDER}.ff.net.0.proj": (image, image),
            f"{IMAGE_EMBEDDER}.ff.net.2": (width, image),
            f"{IMAGE_EMBEDDER}.norm2": (width,),
            f"{IMAGE_EMBEDDER}.pos_embed": (1, transformer.pos_embed_seq_len, image),
            "proj_out": (spec.vae.z_dim * patch, width),
            "scale_shift_table": (1, 2, width),
            POSE_EMBEDDING: (width, spec.vae.z_dim, *transformer.patch_size) if face_blocks else ABSENT,
            CONTROL_EMBEDDING: (width, transformer.vace_in_channels, *transformer.patch_size) if controls else ABSENT,
        }.get(module)
    if block[1] and not controls:
        return ABSENT
    number, name = int(block[2]), block[3]
    if number >= (controls if block[1] else transformer.num_layers) or (name == "proj_in" and number > 0):
        return None
    return _shape_in_block(transformer, name)


def _shape_in_block(transformer: Any, name: str) -> tuple[int | None, ...] | None:
    """Return the shape of the weight of a module in a block."""
    width, ffn_width = transformer.width, transformer.ffn_dim
    if name in _IMAGE_ATTENTION and transformer.image_dim is None:
        return ABSENT
    if name.endswith(("norm_q", "norm_k", "norm_added_k", "norm2")):
        return (width,)
    if name == "scale_shift_table":
        return (1, 6, width)
    return {"ffn.net.0.proj": (ffn_width, width), "ffn.net.2": (width, ffn_width)}.get(name, (width, width))
