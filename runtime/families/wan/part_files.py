"""Wan's text encoder and VAE in single files: names of their tensors, and the configurations that follow from shapes.

UMT5 comes with the names of transformers (ComfyUI), of Wan's own code, or of llama.cpp (GGUF); the VAE of Wan2.1 with
those of Wan's own code or of diffusers. Imports no torch.

Sources of the names: diffusers' loaders/single_file_utils.py (`convert_wan_vae_to_diffusers`); transformers' `UMT5`;
Wan's modules/t5.py; llama.cpp's gguf-py (`MODEL_ARCH.T5ENCODER`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Shape = tuple[int, ...]

# UMT5: by the names of llama.cpp and of Wan, those of transformers.
_OUTSIDE = {
    "token_embd": "shared",
    "token_embedding": "shared",
    "enc.output_norm": "encoder.final_layer_norm",
    "norm": "encoder.final_layer_norm",
}
_ATTENTION, _FEED_FORWARD = "layer.0.SelfAttention", "layer.1.DenseReluDense"
_IN_BLOCKS = {
    **{f"attn_{name}": f"{_ATTENTION}.{name}" for name in "qkvo"},
    **{f"attn.{name}": f"{_ATTENTION}.{name}" for name in "qkvo"},
    "attn_rel_b": f"{_ATTENTION}.relative_attention_bias",
    "pos_embedding.embedding": f"{_ATTENTION}.relative_attention_bias",
    "attn_norm": "layer.0.layer_norm",
    "norm1": "layer.0.layer_norm",
    "ffn_gate": f"{_FEED_FORWARD}.wi_0",
    "ffn.gate.0": f"{_FEED_FORWARD}.wi_0",
    "ffn_up": f"{_FEED_FORWARD}.wi_1",
    "ffn.fc1": f"{_FEED_FORWARD}.wi_1",
    "ffn_down": f"{_FEED_FORWARD}.wo",
    "ffn.fc2": f"{_FEED_FORWARD}.wo",
    "ffn_norm": "layer.1.layer_norm",
    "norm2": "layer.1.layer_norm",
}
_BLOCK = re.compile(r"(?:enc\.blk|blocks)\.([0-9]{1,4})\.(.+)")
# Beside the weights: SentencePiece's model, and a second name of the embedding.
_UNUSED = ("spiece_model", "encoder.embed_tokens.weight")
_MATRIX, _KERNEL = 2, 5
_MAX_LAYERS = 512

# VAE.
_VAE_OUTSIDE = {
    "conv1": "quant_conv",
    "conv2": "post_quant_conv",
    **{f"{side}.conv1": f"{side}.conv_in" for side in ("encoder", "decoder")},
    **{f"{side}.head.0": f"{side}.norm_out" for side in ("encoder", "decoder")},
    **{f"{side}.head.2": f"{side}.conv_out" for side in ("encoder", "decoder")},
    **{f"{side}.middle.1": f"{side}.mid_block.attentions.0" for side in ("encoder", "decoder")},
    **{f"{side}.middle.0": f"{side}.mid_block.resnets.0" for side in ("encoder", "decoder")},
    **{f"{side}.middle.2": f"{side}.mid_block.resnets.1" for side in ("encoder", "decoder")},
}
_RESIDUAL = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2"}
_LEVEL = re.compile(r"(encoder\.down|decoder\.up)samples\.([0-9]{1,3})\.(.+)")
# Modules of a level of the decoder in one list: residual blocks, and one that doubles the size.
_RESNETS = 3
_LEVELS = 4
# diffusers normalises latents of so many channels as Wan2.1 does, by default.
_DEFAULT_Z_DIM = 16


def text_encoder_names(names: Sequence[str]) -> dict[str, str]:
    """Return transformers' names of the tensors in a file, by name, without those that are no weights."""
    return {name: _text_encoder_name(name) for name in names if name not in _UNUSED}


def _text_encoder_name(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    if block is not None:
        return f"encoder.block.{block[1]}.{_renamed(block[2], _IN_BLOCKS)}"
    return _renamed(name, _OUTSIDE)


def text_encoder_config(shapes: Mapping[str, Shape], _candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the configuration of UMT5's encoder with parameters of these shapes; `None` if it is none."""
    block = "encoder.block.0"
    names = (f"{_ATTENTION}.q", f"{_ATTENTION}.relative_attention_bias", f"{_FEED_FORWARD}.wi_0")
    table: Shape = shapes.get("shared.weight", ())
    found: list[Shape] = [shapes.get(f"{block}.{name}.weight", ()) for name in names]
    query, bias, wide = found
    if [len(shape) for shape in (*found, table)] != [_MATRIX] * 4 or not bias[1]:
        return None
    numbers = {name.split(".")[2] for name in shapes if name.startswith("encoder.block.")}
    return {
        "model_type": "umt5",
        "vocab_size": table[0],
        "d_model": table[1],
        "d_kv": query[0] // bias[1],
        "d_ff": wide[0],
        "num_layers": min(len(numbers), _MAX_LAYERS),
        "num_heads": bias[1],
        "relative_attention_num_buckets": bias[0],
        "feed_forward_proj": "gated-gelu",
    }


def text_encoder_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every parameter of UMT5's encoder, by name."""
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    found: dict[str, Shape] = {
        "shared.weight": (config["vocab_size"], width),
        "encoder.final_layer_norm.weight": (width,),
    }
    for number in range(config["num_layers"]):
        block = f"encoder.block.{number}"
        found |= {f"{block}.{_ATTENTION}.{name}.weight": (inner, width) for name in "qkv"}
        found |= {
            f"{block}.{_ATTENTION}.o.weight": (width, inner),
            f"{block}.{_ATTENTION}.relative_attention_bias.weight": (
                config["relative_attention_num_buckets"],
                config["num_heads"],
            ),
            f"{block}.{_FEED_FORWARD}.wi_0.weight": (config["d_ff"], width),
            f"{block}.{_FEED_FORWARD}.wi_1.weight": (config["d_ff"], width),
            f"{block}.{_FEED_FORWARD}.wo.weight": (width, config["d_ff"]),
            f"{block}.layer.0.layer_norm.weight": (width,),
            f"{block}.layer.1.layer_norm.weight": (width,),
        }
    return found


def vae_names(names: Sequence[str]) -> dict[str, str]:
    """Return diffusers' names of the tensors in a file, by name."""
    if "decoder.middle.0.residual.0.gamma" not in names:
        return {name: name for name in names}
    return {name: _vae_name(name) for name in names}


def _vae_name(name: str) -> str:
    level = _LEVEL.fullmatch(name)
    if level is None:
        return _inside(_renamed(name, _VAE_OUTSIDE))
    side, number, rest = level[1], int(level[2]), _inside(level[3])
    if side == "encoder.down":
        return f"encoder.down_blocks.{number}.{rest}"
    block, place = divmod(number, _RESNETS + 1)
    part = f"resnets.{place}" if place < _RESNETS else "upsamplers.0"
    return f"decoder.up_blocks.{block}.{part}.{rest}"


def _inside(name: str) -> str:
    """Return the name of a residual block's part."""
    for original, renamed in _RESIDUAL.items():
        name = name.replace(f"{original}.", f"{renamed}.")
    return name.replace("shortcut.", "conv_shortcut.") if "conv_shortcut." not in name else name


def vae_config(shapes: Mapping[str, Shape], candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the configuration of the VAE with parameters of these shapes; `None` if it is none, or of unknown sizes.

    Args:
        candidates: configurations of known and installed VAEs: what latents are normalised with is in no file.
    """
    for config in candidates:
        base, patch = config.get("base_dim"), config.get("patch_size") or 1
        decoder = config.get("decoder_base_dim") or base
        multiples: Sequence[int] = config.get("dim_mult") or ()
        if not (isinstance(base, int) and isinstance(decoder, int) and len(multiples) == _LEVELS):
            continue
        channels, deep, z_dim = 3 * patch**2, multiples[-1], config.get("z_dim")
        if z_dim != _DEFAULT_Z_DIM and "latents_mean" not in config:
            continue
        signs: dict[str, tuple[Any, ...]] = {
            "encoder.conv_in.weight": (base, channels, 3, 3, 3),
            "encoder.conv_out.weight": (2 * (z_dim or 0), base * deep, 3, 3, 3),
            "decoder.conv_in.weight": (decoder * deep, z_dim, 3, 3, 3),
            "decoder.conv_out.weight": (channels, decoder * multiples[0], 3, 3, 3),
        }
        if all(shapes.get(name) == shape for name, shape in signs.items()):
            return dict(config)
    return None


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    for original, renamed in modules.items():
        if name.startswith(f"{original}."):
            return renamed + name[len(original) :]
    return name
