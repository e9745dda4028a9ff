"""Wan's transformer in single files: names of its tensors, and the architecture that follows from their shapes.

Files have the names of Wan's own code or those of diffusers; those of VACE have control blocks too. Imports no torch.

Source of the names: diffusers' loaders/single_file_utils.py (`convert_wan_transformer_to_diffusers`), and
scripts/convert_wan_to_diffusers.py for the embedding of two images.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from runtime.families.wan.lora_names import (
    CONTROL_EMBEDDING,
    IMAGE_EMBEDDER,
    IN_BLOCKS,
    IN_CONTROL_BLOCKS,
    OUTSIDE,
)
from runtime.families.wan.transformer_spec import VACE_CLASS
from runtime.models.spec import ModelSpec

Shape = tuple[int, ...]

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
_BLOCK = re.compile(r"(blocks\.([0-9]{1,4}))\.(.+)")
_CONTROL_BLOCK = re.compile(r"(vace_blocks\.([0-9]{1,4}))\.(.+)")
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
UNQUANTIZED = ModelSpec.unquantized


def diffusers_names(names: Sequence[str]) -> dict[str, str]:
    """Return diffusers' names of the tensors in a file, by name; a name of another kind stays as it is."""
    return {name: _diffusers_name(name) for name in names}


def _diffusers_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for pattern, modules in ((_BLOCK, IN_BLOCKS), (_CONTROL_BLOCK, IN_CONTROL_BLOCKS)):
        block = pattern.fullmatch(name)
        if block is not None:
            return f"{block[1]}.{_renamed(block[3], modules)}"
    return _renamed(name, OUTSIDE)


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
    return config | _heads(config, width, candidates)


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


def _layer(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
