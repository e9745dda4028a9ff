"""Wan's encoders and VAE in single files: names of their tensors, and the configurations that follow from shapes.

UMT5 comes with the names of transformers (ComfyUI), of Wan's own code, or of llama.cpp (GGUF); CLIP's vision model with
those of transformers (ComfyUI); the VAEs of Wan2.1 and Wan2.2 with those of Wan's own code or of diffusers. Imports no
torch.

Sources of the names: diffusers' loaders/single_file_utils.py (`convert_wan_vae_to_diffusers`) and
scripts/convert_wan_to_diffusers.py (`convert_vae_22`); transformers' `UMT5`; Wan's modules/t5.py, vae.py and vae2_2.py;
llama.cpp's gguf-py (`MODEL_ARCH.T5ENCODER`).
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from runtime.families.wan import file_names
from runtime.models.spec import folder_of, is_transformer

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

_TEXT_ENCODER_DEFAULTS = {
    "d_kv": 64,
    "num_heads": 6,
    "relative_attention_num_buckets": 32,
    "feed_forward_proj": "gated-gelu",
}

# CLIP's vision model: defaults of transformers' configuration.
_IMAGE_ENCODER_DEFAULTS = {
    "hidden_size": 768,
    "image_size": 224,
    "intermediate_size": 3072,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 32,
}
# Tensors of files that are not part of the vision model, and the prefix that transformers before release 5 wrote.
_BESIDE_IMAGE_ENCODER = ("visual_projection.weight", "logit_scale")
_VISION = "vision_model."
_CLASS_EMBEDDING = "embeddings.class_embedding"

# Transformer.
_TRANSFORMER_DEFAULTS = {
    "out_channels": 16,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}

# VAE.
_VAE_DEFAULTS = {"num_res_blocks": 2, "temperal_downsample": (False, True, True)}
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
# Of Wan2.2: each level has a list of its own, of residual blocks and one module that changes the size.
_IN_LEVEL = re.compile(r"(down|up)samples\.([0-9]{1,3})\.(.+)")
_RESIZING = ("resample.", "time_conv.")
# Of Wan2.1: modules of a level of the decoder in one list: residual blocks, and one that doubles the size.
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
    block_shapes: list[Shape] = [shapes.get(f"{block}.{name}.weight", ()) for name in names]
    query, bias, wide = block_shapes
    if [len(shape) for shape in (*block_shapes, table)] != [_MATRIX] * 4 or not bias[1]:
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
    shapes: dict[str, Shape] = {
        "shared.weight": (config["vocab_size"], width),
        "encoder.final_layer_norm.weight": (width,),
    }
    for number in range(config["num_layers"]):
        block = f"encoder.block.{number}"
        shapes |= {f"{block}.{_ATTENTION}.{name}.weight": (inner, width) for name in "qkv"}
        shapes |= {
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
    return shapes


def image_encoder_names(names: Sequence[str]) -> dict[str, str]:
    """Return transformers' names of the tensors in a file, by name, without those that are no part of the model.

    Of files that are no such model, none.
    """
    renamed = {name: name.removeprefix(_VISION) for name in names if name not in _BESIDE_IMAGE_ENCODER}
    return renamed if _CLASS_EMBEDDING in renamed.values() else {}


def image_encoder_config(shapes: Mapping[str, Shape], candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the configuration of CLIP's vision model with parameters of these shapes; `None` if it is none.

    Args:
        candidates: configurations of known and installed encoders: the number of heads is in no file.
    """
    signs = (_CLASS_EMBEDDING, "embeddings.patch_embedding.weight", "embeddings.position_embedding.weight")
    for config in candidates:
        expected = image_encoder_parameters(config)
        if all(shapes.get(name) == expected[name] for name in signs):
            return dict(config)
    return None


def image_encoder_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every parameter of CLIP's vision model, by name."""
    values = {**_IMAGE_ENCODER_DEFAULTS, **config}
    width, inner, patch = values["hidden_size"], values["intermediate_size"], values["patch_size"]
    shapes: dict[str, Shape] = {
        _CLASS_EMBEDDING: (width,),
        "embeddings.patch_embedding.weight": (width, values["num_channels"], patch, patch),
        "embeddings.position_embedding.weight": ((values["image_size"] // patch) ** 2 + 1, width),
        **_layer("pre_layrnorm", (width,)),
        **_layer("post_layernorm", (width,)),
    }
    for number in range(values["num_hidden_layers"]):
        block = f"encoder.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _layer(f"{block}.self_attn.{name}", (width, width))
        shapes |= _layer(f"{block}.mlp.fc1", (inner, width)) | _layer(f"{block}.mlp.fc2", (width, inner))
        shapes |= _layer(f"{block}.layer_norm1", (width,)) | _layer(f"{block}.layer_norm2", (width,))
    return shapes


def weights(component: str, config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """See `registry.Family.weights`; `None` for options that no published model has."""
    # Configurations leave out the defaults of their classes.
    if is_transformer(component):
        values = {**_TRANSFORMER_DEFAULTS, **config}
        values["out_channels"] = values["out_channels"] or values["in_channels"]
        by_image = values["image_dim"] is not None
        usual = values["qk_norm"] == _TRANSFORMER_DEFAULTS["qk_norm"] and values["added_kv_proj_dim"] in (
            {values["num_attention_heads"] * values["attention_head_dim"]} if by_image else {None}
        )
        return dict(file_names.parameters(values)) if usual else None
    if component == "text_encoder":
        values = {**_TEXT_ENCODER_DEFAULTS, **config}
        return text_encoder_parameters(values) if str(values["feed_forward_proj"]).startswith("gated-") else None
    if folder_of(component) == "vae" and not config.get("attn_scales"):
        return vae_parameters({**_VAE_DEFAULTS, **config})
    return None


def vae_names(names: Sequence[str]) -> dict[str, str]:
    """Return diffusers' names of the tensors in a file, by name; of files that are no VAE, none."""
    if "decoder.middle.0.residual.0.gamma" not in names:
        return {name: name for name in names} if "decoder.conv_in.weight" in names else {}
    return {name: _vae_name(name) for name in names}


def _vae_name(name: str) -> str:
    level = _LEVEL.fullmatch(name)
    if level is None:
        return _inside(_renamed(name, _VAE_OUTSIDE))
    side, number, rest = level[1], int(level[2]), _inside(level[3])
    match = _IN_LEVEL.fullmatch(rest)
    if match is not None:
        part = f"{match[1]}sampler" if match[3].startswith(_RESIZING) else f"resnets.{match[2]}"
        return f"{side}_blocks.{number}.{part}.{match[3]}"
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
        candidates: valid configurations of known and installed VAEs: what latents are normalised with is in no file.
    """
    matches: list[dict[str, Any]] = []
    for config in candidates:
        base, patch = config["base_dim"], config.get("patch_size") or 1
        decoder = config.get("decoder_base_dim") or base
        multiples: Sequence[int] = config["dim_mult"]
        if len(multiples) != _LEVELS or config.get("attn_scales"):
            continue
        channels, deep, z_dim = 3 * patch**2, multiples[-1], config["z_dim"]
        if z_dim != _DEFAULT_Z_DIM and "latents_mean" not in config:
            continue
        signs: dict[str, Shape] = {
            "encoder.conv_in.weight": (base, channels, 3, 3, 3),
            "encoder.conv_out.weight": (2 * z_dim, base * deep, 3, 3, 3),
            "decoder.conv_in.weight": (decoder * deep, z_dim, 3, 3, 3),
            "decoder.conv_out.weight": (channels, decoder * multiples[0], 3, 3, 3),
        }
        if all(shapes.get(name) == shape for name, shape in signs.items()):
            matches.append(dict(config))
    # Several may have the same sizes at both ends.
    return next((config for config in matches if vae_parameters(config) == shapes), matches[0] if matches else None)


def vae_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every parameter of a VAE, by name."""
    z_dim, multiples, residual = config["z_dim"], config["dim_mult"], bool(config.get("is_residual"))
    blocks, channels = config["num_res_blocks"], 3 * (config.get("patch_size") or 1) ** 2
    base = config["base_dim"]
    dims = [base * multiple for multiple in (1, *multiples)]
    shapes = _layer("encoder.conv_in", (base, channels, 3, 3, 3))
    number = 0
    for level, (before, out) in enumerate(pairwise(dims)):
        for block in range(blocks):
            name = f"encoder.down_blocks.{level}.resnets.{block}" if residual else f"encoder.down_blocks.{number}"
            shapes |= _residual_block(name, out if block else before, out)
            number += 1
        if level < len(multiples) - 1:
            name = f"encoder.down_blocks.{level}.downsampler" if residual else f"encoder.down_blocks.{number}"
            shapes |= _layer(f"{name}.resample.1", (out, out, 3, 3))
            if config["temperal_downsample"][level]:
                shapes |= _layer(f"{name}.time_conv", (out, out, 3, 1, 1))
            number += 1
    shapes |= _middle_and_last("encoder", dims[-1], dims[-1], 2 * z_dim)
    shapes |= _layer("quant_conv", (2 * z_dim, 2 * z_dim, 1, 1, 1)) | _layer("post_quant_conv", (z_dim, z_dim, 1, 1, 1))
    dims = [(config.get("decoder_base_dim") or base) * multiple for multiple in (multiples[-1], *reversed(multiples))]
    shapes |= _layer("decoder.conv_in", (dims[0], z_dim, 3, 3, 3))
    for level, (before, out) in enumerate(pairwise(dims)):
        name, enters = f"decoder.up_blocks.{level}", before if residual or not level else before // 2
        for block in range(blocks + 1):
            shapes |= _residual_block(f"{name}.resnets.{block}", out if block else enters, out)
        if level < len(multiples) - 1:
            name = f"{name}.upsampler" if residual else f"{name}.upsamplers.0"
            shapes |= _layer(f"{name}.resample.1", (out if residual else out // 2, out, 3, 3))
            if config["temperal_downsample"][-1 - level]:
                shapes |= _layer(f"{name}.time_conv", (2 * out, out, 3, 1, 1))
    return shapes | _middle_and_last("decoder", dims[0], dims[-1], channels)


def _middle_and_last(side: str, middle: int, last: int, channels: int) -> dict[str, Shape]:
    """Return the parameters in the middle of an encoder or a decoder, and of its last norm and convolution."""
    attention = f"{side}.mid_block.attentions.0"
    return {
        **_residual_block(f"{side}.mid_block.resnets.0", middle, middle),
        **_residual_block(f"{side}.mid_block.resnets.1", middle, middle),
        f"{attention}.norm.gamma": (middle, 1, 1),
        **_layer(f"{attention}.to_qkv", (3 * middle, middle, 1, 1)),
        **_layer(f"{attention}.proj", (middle, middle, 1, 1)),
        f"{side}.norm_out.gamma": (last, 1, 1, 1),
        **_layer(f"{side}.conv_out", (channels, last, 3, 3, 3)),
    }


def _residual_block(name: str, before: int, out: int) -> dict[str, Shape]:
    return {
        f"{name}.norm1.gamma": (before, 1, 1, 1),
        **_layer(f"{name}.conv1", (out, before, 3, 3, 3)),
        f"{name}.norm2.gamma": (out, 1, 1, 1),
        **_layer(f"{name}.conv2", (out, out, 3, 3, 3)),
        **(_layer(f"{name}.conv_shortcut", (out, before, 1, 1, 1)) if before != out else {}),
    }


def _layer(name: str, shape: Shape) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    for original, renamed in modules.items():
        if name.startswith(f"{original}."):
            return renamed + name[len(original) :]
    return name
