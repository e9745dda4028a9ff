"""LTX-2's transformer in single files: names of its tensors, and the architecture that follows from their shapes.

Files have the names of the model's own code or those of diffusers. The publishers' files have the other components but
the text encoder too; see `part_files`. Imports no torch.

Source of the names: diffusers' loaders/single_file_utils.py (`convert_ltx2_transformer_to_diffusers`); those of LTX-2.3
are in loaders/lora_conversion_utils.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from runtime.families.ltx2.lora_names import (
    ATTENTIONS,
    BLOCKS,
    FEED_FORWARDS,
    MODULATIONS,
    OF_MODULATION,
    PROJECTIONS,
    TEXT_PROJECTIONS,
    shape_of,
)
from runtime.models.registry import ABSENT, published_models

Shape = tuple[int, ...]

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
# Begin the names of other components in the publishers' files; the text's connectors are beside the transformer.
_OTHERS = ("vae.", "audio_vae.", "vocoder.", "text_embedding_projection.")
_CONNECTORS = ("video_embeddings_connector.", "audio_embeddings_connector.")
_BLOCK = re.compile(rf"({BLOCKS}\.([0-9]{{1,4}}))\.(.+)")
_OUTSIDE: Mapping[str, str] = {**PROJECTIONS, **MODULATIONS}
_TABLES: Mapping[str, str] = {
    "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
    "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
}
_NORMS: Mapping[str, str] = {"q_norm": "norm_q", "k_norm": "norm_k"}
# Without which a file is no transformer of LTX-2.
_SIGNS = (
    "proj_in.weight",
    "audio_proj_in.weight",
    f"{BLOCKS}.0.attn1.to_q.weight",
    f"{BLOCKS}.0.audio_attn1.to_q.weight",
    f"{BLOCKS}.0.audio_to_video_attn.to_q.weight",
    "proj_out.weight",
)
_MATRIX = 2
_MAX_LAYERS = 512
# Channels of a head of all published models, for the video and for the sound.
_HEAD_DIM, _SOUND_HEAD_DIM = 128, 64
# Layers outside of the blocks, see `ModelSpec.unquantized`.
UNQUANTIZED = (
    *PROJECTIONS.values(), *TEXT_PROJECTIONS, *MODULATIONS.values(), "proj_out", "audio_proj_out",
)  # fmt: skip


class _Sizes(NamedTuple):
    """What `shape_of` reads of a transformer."""

    num_layers: int
    num_attention_heads: int
    sound_heads: int
    width: int
    sound_width: int
    in_channels: int
    sound_channels: int
    text_dim: int
    projects_text: bool
    modulated_text: bool
    gated: bool


def diffusers_names(names: Sequence[str]) -> dict[str, str]:
    """Return diffusers' names of the transformer's tensors in a file, by name; without those of other components."""
    return {name: _diffusers_name(name) for name in names if not _of_another(name)}


def _of_another(name: str) -> bool:
    return name.startswith(_OTHERS) or bare(name).startswith(_CONNECTORS)


def bare(name: str) -> str:
    """Return the name of a tensor without the prefixes that programs add."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _diffusers_name(name: str) -> str:
    name = bare(name)
    block = _BLOCK.fullmatch(name)
    if block is None:
        first, separator, rest = name.partition(".")
        return _OUTSIDE.get(first, first) + separator + rest
    parts = [_NORMS.get(part, part) for part in _TABLES.get(block[3], block[3]).split(".")]
    return f"{block[1]}.{'.'.join(parts)}"


def config_of(shapes: Mapping[str, Shape], candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the configuration of the transformer with parameters of these names and shapes; `None` if it is none.

    Args:
        candidates: configurations of other models: shapes do not tell the number of heads, nor the kind of positions.
    """
    signs = [shapes.get(name, ()) for name in _SIGNS]
    if any(len(shape) != _MATRIX or not all(shape) for shape in signs):
        return None
    video, sound, *_ = signs
    width, sound_width = video[0], sound[0]
    numbers = {int(match[2]) for name in shapes if (match := _BLOCK.fullmatch(name))}
    text = shapes.get(f"{TEXT_PROJECTIONS[0]}.linear_1.weight")
    gates, sound_gates = (shapes.get(f"{BLOCKS}.0.{name}.to_gate_logits.weight") for name in ("attn1", "audio_attn1"))
    modulated = "prompt_adaln.linear.weight" in shapes
    config: dict[str, Any] = {
        "num_layers": min(len(numbers), _MAX_LAYERS),
        "in_channels": video[1],
        "out_channels": video[1],
        "audio_in_channels": sound[1],
        "audio_out_channels": sound[1],
        "cross_attention_dim": width,
        "audio_cross_attention_dim": sound_width,
        "use_prompt_embeddings": text is not None,
        "gated_attn": gates is not None,
        "audio_gated_attn": gates is not None,
        "cross_attn_mod": modulated,
        "audio_cross_attn_mod": modulated,
    }
    config |= {"caption_channels": text[1]} if text is not None and len(text) == _MATRIX else {}
    heads = {"": (width, gates, _HEAD_DIM), "audio_": (sound_width, sound_gates, _SOUND_HEAD_DIM)}
    if gates is not None and sound_gates is not None and gates[0] and sound_gates[0]:
        for stream, (channels, gate, _) in heads.items():
            assert gate is not None
            config[f"{stream}num_attention_heads"] = gate[0]
            config[f"{stream}attention_head_dim"] = channels // gate[0]
    published = (model.configs["transformer"] for model in published_models("ltx2"))
    of_same = [base for base in candidates if all(base.get(name) == value for name, value in config.items())]
    of_version = [base for base in published if base["cross_attn_mod"] == modulated]
    base = dict([*of_same, *of_version][0])
    for stream, (channels, _, head_dim) in heads.items():
        names = f"{stream}num_attention_heads", f"{stream}attention_head_dim"
        # Those of the configuration, if they fit the width.
        count, size = (base.get(name) for name in names)
        if not (isinstance(count, int) and isinstance(size, int) and count * size == channels):
            usual = head_dim if channels % head_dim == 0 else channels
            base |= dict(zip(names, (channels // usual, usual), strict=True))
    return base | config


def experts(config: Mapping[str, Any], *, named: bool) -> int:
    """Return 1: no model of the family has two."""
    del config, named
    return 1


def parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every parameter of a transformer that `config_of` describes."""
    sizes = _Sizes(
        num_layers=config["num_layers"],
        num_attention_heads=config["num_attention_heads"],
        sound_heads=config["audio_num_attention_heads"],
        width=config["num_attention_heads"] * config["attention_head_dim"],
        sound_width=config["audio_num_attention_heads"] * config["audio_attention_head_dim"],
        in_channels=config["in_channels"],
        sound_channels=config["audio_in_channels"],
        text_dim=config["caption_channels"],
        projects_text=config["use_prompt_embeddings"],
        modulated_text=config["cross_attn_mod"],
        gated=config["gated_attn"],
    )
    for stream, channels in (("", sizes.width), ("audio_", sizes.sound_width)):
        yield f"{stream}scale_shift_table", (2, channels)
    modules = [*PROJECTIONS.values(), "proj_out", "audio_proj_out"]
    modules += [f"{name}.linear_{number}" for name in TEXT_PROJECTIONS for number in (1, 2)]
    modules += [f"{name}.{part}" for name in MODULATIONS.values() for part in OF_MODULATION]
    layers = ("to_q", "to_k", "to_v", "to_out.0", "to_gate_logits", "norm_q", "norm_k")
    for number in range(sizes.num_layers):
        block = f"{BLOCKS}.{number}"
        for stream, channels in (("", sizes.width), ("audio_", sizes.sound_width)):
            yield f"{block}.{stream}scale_shift_table", (9 if sizes.modulated_text else 6, channels)
            yield f"{block}.{stream or 'video_'}a2v_cross_attn_scale_shift_table", (5, channels)
            if sizes.modulated_text:
                yield f"{block}.{stream}prompt_scale_shift_table", (2, channels)
        modules += [f"{block}.{attention}.{layer}" for attention in ATTENTIONS for layer in layers]
        modules += [f"{block}.{part}.{layer}" for part in FEED_FORWARDS for layer in ("net.0.proj", "net.2")]
    for module in modules:
        shape = shape_of(sizes, module)
        assert shape is not None
        if shape == ABSENT:
            continue
        whole = tuple(size or 0 for size in shape)
        yield f"{module}.weight", whole
        if len(whole) == _MATRIX:
            yield f"{module}.bias", whole[:1]
