"""Names of the tensors in LoRA files for Wan, in all spellings in use.

    blocks.3.attn1.to_q.lora_A.weight                      diffusers and peft, also below "transformer."
    diffusion_model.blocks.3.self_attn.q.lora_down.weight  Wan's own names, as most files have them; with ".alpha"
    lora_unet_blocks_3_self_attn_q.lora_up.weight          musubi-tuner
    diffusion_model.blocks.3.norm3.diff                    a change of the whole tensor; "diff_b" of its bias

Source of the names: diffusers' scripts/convert_wan_to_diffusers.py and loaders/lora_conversion_utils.py.
Imports no torch.
"""

import re
from math import prod
from pathlib import Path

from runtime.models.registry import LoraChange
from runtime.models.spec import ModelSpec

_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "lora_unet_",
)
# Roles in a module, by the suffix of the tensor's name; see `LoraChange`.
_ROLES = {
    "lora_A.weight": "down",
    "lora_A.default.weight": "down",
    "lora_down.weight": "down",
    "lora_B.weight": "up",
    "lora_B.default.weight": "up",
    "lora_up.weight": "up",
    "lora_B.bias": "bias",
    "diff_b": "bias",
    "diff": "diff",
    "alpha": "alpha",
}
_ROLE = re.compile(rf"(.+)\.({'|'.join(map(re.escape, _ROLES))})")
_BLOCK = re.compile(r"blocks[._](\d+)[._](.+)")
# diffusers' names of modules by Wan's own names: within a block, and outside of the blocks.
_IN_BLOCK = {
    **{
        f"{original}.{one}": f"{diffusers}.{other}"
        for original, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for one, other in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "norm3": "norm2",
    "modulation": "scale_shift_table",
}
_OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_DIFFUSERS = frozenset({*_IN_BLOCK.values()}), frozenset({*_OUTSIDE.values()})
# musubi-tuner writes underscores for dots.
_UNDERSCORED = {name.replace(".", "_"): name for name in (*_IN_BLOCK, *_OUTSIDE)}
# LoRAs from step distillation, which need few steps and no guidance, are identified by their names.
_DISTILLED = re.compile(
    r"lightning|lightx2v|distill|causvid|accvid|turbo|fastwan|(?<!\d)\d{1,2}[\s_-]?steps?(?![a-z])", re.IGNORECASE
)
_STEPS = re.compile(r"(?<!\d)(\d{1,2})[\s_-]?steps?(?![a-z])", re.IGNORECASE)
_LIGHTX2V = re.compile(r"lightning|lightx2v", re.IGNORECASE)
# lightx2v's for its four-step LoRAs, of both generations of the model ("sample_shift" in
# https://github.com/ModelTC/LightX2V, configs/wan22/wan_moe_t2v_distill_lora.json and
# configs/distill/wan_t2v_distill_lora_4step_cfg.json). With it UniPC's four timesteps are 999, 937, 833 and 625; those
# of the training were 1000, 937.5, 833.3 and 625: https://github.com/ModelTC/LightX2V-Wan2.2-Lightning/issues/3.
LIGHTX2V_SHIFT = 5.0
_DEFAULT_DISTILLED_STEPS = 4
_MAX_DISTILLED_STEPS = 16


def change_of(tensor: str) -> LoraChange | None:
    """Return the module and factor of a tensor in a LoRA file; `None` if Wan's transformer has no such module."""
    name = tensor
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    found = _ROLE.fullmatch(name)
    if found is None:
        return None
    module = _module(found[1])
    return None if module is None else LoraChange(module, _ROLES[found[2]])


def weight_shape(spec: ModelSpec, module: str) -> tuple[int | None, ...] | None:
    """Return the shape of the weight of a module, with `None` for an unknown axis; `None` for an unknown module.

    A norm's weight has one axis; modulation is a bare parameter.
    """
    transformer = spec.transformer
    width, ffn_width, patch = transformer.width, transformer.ffn_dim, prod(transformer.patch_size)
    block = _BLOCK.match(module)
    if block is None:
        return {
            "patch_embedding": (width, transformer.in_channels, *transformer.patch_size),
            "condition_embedder.text_embedder.linear_1": (width, transformer.text_dim),
            "condition_embedder.text_embedder.linear_2": (width, width),
            "condition_embedder.time_embedder.linear_1": (width, None),
            "condition_embedder.time_embedder.linear_2": (width, width),
            "condition_embedder.time_proj": (6 * width, width),
            "proj_out": (transformer.in_channels * patch, width),
            "scale_shift_table": (1, 2, width),
        }.get(module)
    if int(block[1]) >= transformer.num_layers:
        return None
    name = block[2]
    if name.endswith(("norm_q", "norm_k", "norm2")):
        return (width,)
    if name == "scale_shift_table":
        return (1, 6, width)
    return {"ffn.net.0.proj": (ffn_width, width), "ffn.net.2": (width, ffn_width)}.get(name, (width, width))


def _module(name: str) -> str | None:
    block = _BLOCK.fullmatch(name)
    rest = block[2] if block else name
    rest = _UNDERSCORED.get(rest, rest)
    names, known = (_IN_BLOCK, _DIFFUSERS[0]) if block else (_OUTSIDE, _DIFFUSERS[1])
    found = names.get(rest, rest if rest in known else None)
    return f"blocks.{block[1]}.{found}" if block and found else found


def distilled_steps(lora: Path) -> int | None:
    """Return for how many steps a LoRA was distilled, from its own or its folder's name; `None` if unknown."""
    for text in (lora.stem, lora.parent.name):
        if _DISTILLED.search(text):
            steps = _STEPS.search(text)
            number = int(steps[1]) if steps else _DEFAULT_DISTILLED_STEPS
            return number if 0 < number <= _MAX_DISTILLED_STEPS else None
    return None


def distilled_shift(lora: Path) -> float | None:
    """Return the shift with which a LoRA was distilled, if its own or its folder's name identifies its author."""
    return LIGHTX2V_SHIFT if any(_LIGHTX2V.search(text) for text in (lora.stem, lora.parent.name)) else None
