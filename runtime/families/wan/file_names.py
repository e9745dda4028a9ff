"""Wan's transformer in single files: names of its tensors, and the architecture that follows from their shapes.

Files have the names of Wan's own code or those of diffusers; those of VACE have control blocks too, those of Animate
encoders of a face and attentions to it. Imports no torch.

Source of the names: diffusers' loaders/single_file_utils.py (`convert_wan_transformer_to_diffusers`), and
scripts/convert_wan_to_diffusers.py for the embedding of two images and the encoders of a face.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from runtime.families.wan.lora_names import (
    CONTROL_EMBEDDING,
    FACE_BLOCKS,
    IMAGE_EMBEDDER,
    IN_BLOCKS,
    IN_CONTROL_BLOCKS,
    IN_FACE_BLOCKS,
    OUTSIDE,
    POSE_EMBEDDING,
)
from runtime.families.wan.transformer_spec import (
    ANIMATE_CLASS,
    MOTION_CHANNELS,
    VACE_CLASS,
    AnimateTransformerSpec,
    transformer_spec,
)
from runtime.models.spec import ModelSpec

Shape = tuple[int, ...]

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
_BLOCK = re.compile(r"(blocks\.([0-9]{1,4}))\.(.+)")
_CONTROL_BLOCK = re.compile(r"(vace_blocks\.([0-9]{1,4}))\.(.+)")
_FACE_BLOCK = re.compile(r"(face_adapter\.([0-9]{1,4}))\.(.+)")
_OWN_FACE_BLOCK = re.compile(re.escape(FACE_BLOCKS) + r"\.([0-9]{1,4})\.([^.]+)\.(.+)")
# Of a face's encoders: the layers of the first, in order; their activations have the biases; and other modules.
_MOTION_LAYER = re.compile(
    r"motion_encoder\.enc\.net_app\.convs\.([0-9]{1,2})\.(?:(conv1|conv2|skip)\.)?(?:[0-9]\.)?(weight|bias)"
)
_MOTION_BLOCK = re.compile(r"(motion_encoder\.res_blocks\.([0-9]{1,2}))\.conv1\.weight")
_OF_FACE = {
    "motion_encoder.enc.fc": "motion_encoder.motion_network",
    "motion_encoder.dec.direction.weight": "motion_encoder.motion_synthesis_weight",
    **{f"face_encoder.{name}.conv": f"face_encoder.{name}" for name in ("conv1_local", "conv2", "conv3")},
}
# Filters that diffusers computes.
_BLUR = re.compile(r"motion_encoder\.enc\..+\.kernel")
# Without which a file is no transformer of Wan.
_SIGNS = (
    "patch_embedding.weight",
    "condition_embedder.text_embedder.linear_1.weight",
    "condition_embedder.time_embedder.linear_1.weight",
    "blocks.0.attn1.to_q.weight",
    "blocks.0.ffn.net.0.proj.weight",
    "proj_out.weight",
)
_MATRIX, _KERNEL = 2, 5
# Of all published models.
_HEAD_DIM = 128
_MAX_LAYERS = 512
# diffusers' default.
_ROPE = 1024
# Encoders of a face, which keep their precision; no other model has layers of these names.
FACE_ENCODERS = ("motion_encoder", "face_encoder")
UNQUANTIZED = (*ModelSpec.unquantized, *FACE_ENCODERS)
# Linear layers of the motion encoder, and the levels that it has besides residual blocks.
_MOTION_LINEARS, _OTHER_LEVELS = 5, 2


def diffusers_names(names: Sequence[str]) -> dict[str, str | tuple[str, ...]]:
    """See `registry.SingleFiles`; a name of another kind stays as it is."""
    bare = {name: _bare(name) for name in names}
    last = max((int(match[1]) for name in bare.values() if (match := _MOTION_LAYER.fullmatch(name))), default=0)
    return {name: _diffusers_name(own, last) for name, own in bare.items() if not _BLUR.fullmatch(own)}


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _diffusers_name(name: str, last: int) -> str | tuple[str, ...]:
    """Return the name or names of a tensor in diffusers.

    Args:
        last: the number of the motion encoder's last layer.
    """
    motion = _MOTION_LAYER.fullmatch(name)
    if motion is not None:
        return _motion_name(int(motion[1]), motion[2], motion[3], last)
    face = _OWN_FACE_BLOCK.fullmatch(name)
    if face is not None:
        parts = IN_FACE_BLOCKS.get(face[2], face[2])
        renamed = tuple(
            f"face_adapter.{face[1]}.{part}.{face[3]}" for part in ((parts,) if isinstance(parts, str) else parts)
        )
        return renamed if len(renamed) > 1 else renamed[0]
    for pattern, modules in ((_BLOCK, IN_BLOCKS), (_CONTROL_BLOCK, IN_CONTROL_BLOCKS)):
        block = pattern.fullmatch(name)
        if block is not None:
            return f"{block[1]}.{_renamed(block[3], modules)}"
    return _renamed(name, {**OUTSIDE, **_OF_FACE})


def _motion_name(number: int, layer: str | None, parameter: str, last: int) -> str:
    """Return the name of a parameter of the motion encoder's convolutions: the first, residual blocks, and the last."""
    module = "conv_in" if not number else "conv_out" if number == last else f"res_blocks.{number - 1}"
    module += "" if layer is None else f".{layer.replace('skip', 'conv_skip')}"
    return f"motion_encoder.{module}.{'act_fn.' if parameter == 'bias' else ''}{parameter}"


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    for original, diffusers in modules.items():
        if name == original or name.startswith(f"{original}."):
            return diffusers + name[len(original) :]
    return name


def config_of(shapes: Mapping[str, Shape], candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the configuration of the transformer with parameters of these names and shapes; `None` if it is none.

    Args:
        candidates: configurations of other models: shapes do not tell the number of heads.
    """
    signs = [shapes.get(name, ()) for name in _SIGNS]
    if [len(shape) for shape in signs] != [_KERNEL, *[_MATRIX] * 5]:
        return None
    patch, text, time, query, feed_forward, last = signs
    width, patch_size = patch[0], list(patch[2:])
    if not (prod(patch) and prod(query) and prod(last)):
        return None
    layers = _count(shapes, _BLOCK)
    config: dict[str, Any] = {
        "patch_size": patch_size,
        "in_channels": patch[1],
        "out_channels": last[0] // prod(patch_size),
        "text_dim": text[1],
        "freq_dim": time[1],
        "ffn_dim": feed_forward[0],
        "num_layers": layers,
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "qk_norm": "rms_norm_across_heads",
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
    }
    norm = shapes.get(f"{IMAGE_EMBEDDER}.norm1.weight")
    if norm:
        positions = shapes.get(f"{IMAGE_EMBEDDER}.pos_embed")
        config |= {"image_dim": norm[0], "added_kv_proj_dim": width}
        config["pos_embed_seq_len"] = positions[1] if positions is not None and len(positions) > 1 else None
    control, count = shapes.get(f"{CONTROL_EMBEDDING}.weight", ()), _count(shapes, _CONTROL_BLOCK)
    if len(control) == _KERNEL and count:
        config |= {"_class_name": VACE_CLASS, "vace_in_channels": control[1]}
        config["vace_layers"] = _control_layers(layers, count, candidates)
    config |= _face_config(shapes, layers) | _heads(config, width, candidates)
    if config.get("_class_name") == ANIMATE_CLASS:
        try:
            transformer_spec(config)
        except ValueError:
            return None
    return config


def _face_config(shapes: Mapping[str, Shape], layers: int) -> dict[str, Any]:
    """Return the configuration of what Animate has besides; empty if it is another model.

    How many frames its encoder takes at once is in no file.
    """
    pose, first = shapes.get(f"{POSE_EMBEDDING}.weight", ()), shapes.get("motion_encoder.conv_in.weight", ())
    synthesis, style = (
        shapes.get(f"motion_encoder.{name}", ()) for name in ("motion_synthesis_weight", "conv_out.weight")
    )
    local, hidden = (shapes.get(f"face_encoder.{name}.weight", ()) for name in ("conv1_local", "conv2"))
    count, blocks = _count(shapes, _FACE_BLOCK), _count(shapes, _MOTION_BLOCK)
    axes = [len(shape) for shape in (pose, first, style, synthesis, local, hidden)]
    if axes != [_KERNEL, 4, 4, _MATRIX, 3, 3] or not (count and hidden[0]):
        return {}
    side = 2 ** (blocks + _OTHER_LEVELS)
    levels = [
        first,
        *(shapes.get(f"motion_encoder.res_blocks.{number}.conv2.weight", ()) for number in range(blocks)),
    ]
    channels = {str(side >> number): shape[0] if shape else 0 for number, shape in enumerate(levels)}
    usual = all(MOTION_CHANNELS.get(int(level)) == size for level, size in channels.items())
    return {
        "_class_name": ANIMATE_CLASS,
        "latent_channels": pose[1],
        "inject_face_latents_blocks": max(layers // count, 1),
        "motion_encoder_size": side,
        "motion_encoder_channel_sizes": None if usual else channels,
        "motion_style_dim": style[0],
        "motion_dim": synthesis[1],
        "motion_encoder_dim": synthesis[0],
        "face_encoder_hidden_dim": hidden[0],
        "face_encoder_num_heads": local[0] // hidden[0],
    }


def _count(shapes: Mapping[str, Shape], block: re.Pattern[str]) -> int:
    """Return the number of blocks of a kind."""
    return min(len({match[2] for name in shapes if (match := block.fullmatch(name))}), _MAX_LAYERS)


def _control_layers(layers: int, count: int, candidates: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the blocks that the results of so many control blocks are added to.

    Shapes do not tell. Without another model that has as many blocks of each kind, they are at equal distances from the
    first block on, as in all published models.
    """
    for candidate in candidates:
        positions = candidate.get("vace_layers")
        if candidate.get("num_layers") == layers and isinstance(positions, list | tuple) and len(positions) == count:
            return list(positions)
    return list(range(0, layers, max(layers // count, 1)))[:count]


def experts(config: Mapping[str, Any], *, named: bool) -> int:
    """Return how many experts a model has that such a transformer is one of.

    Wan2.2-A14B has two, of the same shapes as Wan2.1's transformer; those that start from an image without CLIP's
    embeddings exist in Wan2.2 only.
    """
    from_image = config["in_channels"] > config["out_channels"] and config["image_dim"] is None
    return 2 if named or from_image else 1


def _heads(config: Mapping[str, Any], width: int, candidates: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of heads and their width."""
    for candidate in candidates:
        heads, head_dim = candidate.get("num_attention_heads"), candidate.get("attention_head_dim")
        if isinstance(heads, int) and isinstance(head_dim, int) and heads * head_dim == width:
            same = ("num_layers", "ffn_dim", "text_dim")
            if all(candidate.get(name) == config[name] for name in same):
                return {
                    "num_attention_heads": heads,
                    "attention_head_dim": head_dim,
                    "rope_max_seq_len": candidate.get("rope_max_seq_len", _ROPE),
                }
    head_dim = _HEAD_DIM if width % _HEAD_DIM == 0 else width
    return {"num_attention_heads": width // head_dim, "attention_head_dim": head_dim, "rope_max_seq_len": _ROPE}


def parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every parameter of a transformer that `config_of` describes."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    patch, ffn = tuple(config["patch_size"]), config["ffn_dim"]
    yield "scale_shift_table", (1, 2, width)
    yield from _layer("patch_embedding", (width, config["in_channels"], *patch))
    yield from _layer("condition_embedder.time_embedder.linear_1", (width, config["freq_dim"]))
    yield from _layer("condition_embedder.time_embedder.linear_2", (width, width))
    yield from _layer("condition_embedder.time_proj", (6 * width, width))
    yield from _layer("condition_embedder.text_embedder.linear_1", (width, config["text_dim"]))
    yield from _layer("condition_embedder.text_embedder.linear_2", (width, width))
    yield from _layer("proj_out", (config["out_channels"] * prod(patch), width))
    image = config["image_dim"]
    if image is not None:
        if config["pos_embed_seq_len"] is not None:
            yield f"{IMAGE_EMBEDDER}.pos_embed", (1, config["pos_embed_seq_len"], image)
        yield from _layer(f"{IMAGE_EMBEDDER}.norm1", (image,))
        yield from _layer(f"{IMAGE_EMBEDDER}.ff.net.0.proj", (image, image))
        yield from _layer(f"{IMAGE_EMBEDDER}.ff.net.2", (width, image))
        yield from _layer(f"{IMAGE_EMBEDDER}.norm2", (width,))
    blocks = [f"blocks.{number}" for number in range(config["num_layers"])]
    if "vace_layers" in config:
        yield from _layer(CONTROL_EMBEDDING, (width, config["vace_in_channels"], *patch))
        controls = [f"vace_blocks.{number}" for number in range(len(config["vace_layers"]))]
        for name in (*(f"{block}.proj_in" for block in controls[:1]), *(f"{block}.proj_out" for block in controls)):
            yield from _layer(name, (width, width))
        blocks += controls
    for block in blocks:
        yield f"{block}.scale_shift_table", (1, 6, width)
        for attention in ("attn1", "attn2"):
            for layer in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from _layer(f"{block}.{attention}.{layer}", (width, width))
            yield f"{block}.{attention}.norm_q.weight", (width,)
            yield f"{block}.{attention}.norm_k.weight", (width,)
        if image is not None:
            yield from _layer(f"{block}.attn2.add_k_proj", (width, width))
            yield from _layer(f"{block}.attn2.add_v_proj", (width, width))
            yield f"{block}.attn2.norm_added_k.weight", (width,)
        if config["cross_attn_norm"]:
            yield from _layer(f"{block}.norm2", (width,))
        yield from _layer(f"{block}.ffn.net.0.proj", (ffn, width))
        yield from _layer(f"{block}.ffn.net.2", (width, ffn))
    if config.get("_class_name") == ANIMATE_CLASS:
        yield from _face_parameters(config)


def _face_parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every parameter that only Animate has."""
    spec = transformer_spec(config)
    assert isinstance(spec, AnimateTransformerSpec)
    width, style, hidden, side = (
        spec.width,
        spec.motion_style_dim,
        spec.face_encoder_hidden_dim,
        spec.motion_encoder_size,
    )
    yield from _layer(POSE_EMBEDDING, (width, spec.latent_channels, *spec.patch_size))
    levels = [spec.motion_channels(side >> number) for number in range(side.bit_length() - _OTHER_LEVELS)]
    yield from _activated("motion_encoder.conv_in", (levels[0], 3, 1, 1))
    for number, (before, out) in enumerate(pairwise(levels)):
        block = f"motion_encoder.res_blocks.{number}"
        yield from _activated(f"{block}.conv1", (before, before, 3, 3))
        yield from _activated(f"{block}.conv2", (out, before, 3, 3))
        yield f"{block}.conv_skip.weight", (out, before, 1, 1)
    yield "motion_encoder.conv_out.weight", (style, levels[-1], 4, 4)
    for number in range(_MOTION_LINEARS):
        last = number == _MOTION_LINEARS - 1
        yield from _layer(f"motion_encoder.motion_network.{number}", (spec.motion_dim if last else style, style))
    yield "motion_encoder.motion_synthesis_weight", (spec.motion_encoder_dim, spec.motion_dim)
    yield from _layer("face_encoder.conv1_local", (hidden * spec.face_encoder_num_heads, spec.motion_encoder_dim, 3))
    for name in ("conv2", "conv3"):
        yield from _layer(f"face_encoder.{name}", (hidden, hidden, 3))
    yield from _layer("face_encoder.out_proj", (width, hidden))
    yield "face_encoder.padding_tokens", (1, 1, 1, width)
    for number in range(spec.face_blocks):
        block = f"face_adapter.{number}"
        for layer in ("to_q", "to_k", "to_v", "to_out"):
            yield from _layer(f"{block}.{layer}", (width, width))
        for norm in ("norm_q", "norm_k"):
            yield f"{block}.{norm}.weight", (spec.attention_head_dim,)


def _activated(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """Yield the parameters of a convolution whose activation has the bias."""
    yield f"{name}.weight", shape
    yield f"{name}.act_fn.bias", shape[:1]


def _layer(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
