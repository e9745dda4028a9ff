"""LTX-2's other components in single files: names of their tensors, and the configurations that fit their shapes.

The publishers' files have all components but the text encoder beside the transformer, ComfyUI's have one or two each:
the video's VAE, the sound's VAE with the vocoder, the connectors, Gemma, and the upsampler. Names are those of the
model's own code or of the libraries, Gemma's also those of llama.cpp (GGUF). Imports no torch.

Sources of the names: diffusers' scripts/convert_ltx2_to_diffusers.py at commit 7564fb016dab, whose maps for the VAEs of
LTX-2.0 are in loaders/single_file_utils.py of release 0.42.1 too; llama.cpp's gguf-py (`MODEL_ARCH.GEMMA3`) and
convert_hf_to_gguf.py (`Gemma3Model`, which adds 1 to the weights of norms); transformers' `Gemma3`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from runtime.families.ltx2.file_names import bare
from runtime.models.registry import published_models

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Configs = Sequence[Mapping[str, Any]]

# Prefixes of components in the publishers' files.
_VAE, _SOUND_VAE, _VOCODER = "vae.", "audio_vae.", "vocoder."
_MEAN, _DEVIATION = "per_channel_statistics.mean-of-means", "per_channel_statistics.std-of-means"
_STATISTICS: Mapping[str, str] = {_MEAN: "latents_mean", _DEVIATION: "latents_std"}
# Others of the kind are unused.
_UNUSED_STATISTICS = ("per_channel_statistics.channel", "per_channel_statistics.mean-of-stds")
# A module of the VAE's encoder or decoder in the model's own code: blocks and changes of size are one list.
_LEVEL = re.compile(r"(encoder\.down|decoder\.up)_blocks\.([0-9]{1,3})\.(.+)")
_RESNETS = "res_blocks"
_VOCODER_PARTS: Mapping[str, str] = {
    "ups": "upsamplers",
    "resblocks": "resnets",
    "conv_pre": "conv_in",
    "conv_post": "conv_out",
    "act_post": "act_out",
}
_CONNECTOR_MODULES: Mapping[str, str] = {
    "video_embeddings_connector.": "video_connector.",
    "audio_embeddings_connector.": "audio_connector.",
    "text_embedding_projection.aggregate_embed.": "text_proj_in.",
    "text_embedding_projection.video_aggregate_embed.": "video_text_proj_in.",
    "text_embedding_projection.audio_aggregate_embed.": "audio_text_proj_in.",
}
_CONNECTOR_PARTS: Mapping[str, str] = {
    "transformer_1d_blocks": "transformer_blocks",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
# Gemma's language model: after these prefixes, of several releases of transformers and of ComfyUI.
_GEMMA = "model.language_model."
_GEMMA_NAME = re.compile(r"(?:(?:model\.)?language_model\.(?:model\.)?|model\.)?((?:embed_tokens|layers|norm)\..+)")
_LLAMA_BLOCK = re.compile(r"blk\.([0-9]{1,4})\.([a-z_]+)\.(.+)")
_LLAMA_OUTSIDE: Mapping[str, str] = {"token_embd.": "embed_tokens.", "output_norm.": "norm."}
_LLAMA_LAYERS: Mapping[str, str] = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_EMBEDDING = f"{_GEMMA}embed_tokens.weight"
_MATRIX = 2
# How many latents of a level become one.
_FACTORS: Mapping[str, int] = {"spatial": 4, "temporal": 2, "spatiotemporal": 8}


def vae_names(names: Sequence[str]) -> dict[str, str]:
    """Return diffusers' names of the video VAE's tensors in a file, by name, without those of others."""
    chosen = _chosen(names, _VAE, "encoder.conv_out.conv.weight")
    if not any(_RESNETS in name for name in chosen.values()):
        return chosen
    levels = [match for name in chosen.values() if (match := _LEVEL.fullmatch(name))]
    last = max((int(match[2]) for match in levels if match[1] == "encoder.down"), default=0)
    return {
        original: _STATISTICS.get(name, _vae_name(name, last))
        for original, name in chosen.items()
        if not name.startswith(_UNUSED_STATISTICS)
    }


def _vae_name(name: str, last: int) -> str:
    """Return diffusers' name: even numbers are levels with blocks, odd ones change the size.

    Args:
        last: number of the encoder's last level, which is its middle one; the decoder's first one is.
    """
    match = _LEVEL.fullmatch(name)
    if match is None:
        return name
    side, number, rest = match[1], int(match[2]), match[3].replace(f"{_RESNETS}.", "resnets.")
    level, changes_size = divmod(number, 2)
    is_encoder = side == "encoder.down"
    if number == (last if is_encoder else 0):
        return f"{side.partition('.')[0]}.mid_block.{rest}"
    if changes_size:
        return f"{side}_blocks.{level}.{'down' if is_encoder else 'up'}samplers.0.{rest}"
    return f"{side}_blocks.{level if is_encoder else level - 1}.{rest}"


def sound_vae_names(names: Sequence[str]) -> dict[str, str]:
    """Return diffusers' names of the sound VAE's tensors in a file, by name, without those of others."""
    chosen = _chosen(names, _SOUND_VAE, "decoder.mid.block_1.conv1.conv.weight")
    return {original: _STATISTICS.get(name, name) for original, name in chosen.items()}


def vocoder_names(names: Sequence[str]) -> dict[str, str]:
    """Return diffusers' names of the vocoder's tensors in a file, by name, without those of others."""
    if {*names} & {"conv_in.weight", "vocoder.conv_in.weight"}:  # diffusers'
        return {name: name for name in names}
    chosen = _chosen(names, _VOCODER, "conv_pre.weight")
    renamed = {original: _parts(name, _VOCODER_PARTS) for original, name in chosen.items()}
    return {original: name.replace("downsample.lowpass.", "downsample.") for original, name in renamed.items()}


def connector_names(names: Sequence[str]) -> dict[str, str]:
    """Return diffusers' names of the connectors' tensors in a file, by name, without those of others."""
    chosen = {}
    for original in names:
        name = bare(original).removeprefix("connectors.")
        for own, renamed in _CONNECTOR_MODULES.items():
            if name.startswith((own, renamed)):
                chosen[original] = _parts(renamed + name.removeprefix(own).removeprefix(renamed), _CONNECTOR_PARTS)
    return chosen


def upsampler_names(names: Sequence[str]) -> dict[str, str]:
    """Return the names of the upsampler's tensors in a file, which all programs share; none of other files."""
    return {name: name for name in names} if "post_upsample_res_blocks.0.conv1.weight" in names else {}


def gemma_names(names: Sequence[str]) -> dict[str, str]:
    """Return transformers' names of the tensors of Gemma's language model in a file, by name.

    Left out are those of images, of the words that follow, and tokenizers.
    """
    if "token_embd.weight" in names:
        return {name: f"{_GEMMA}{_llama_name(name)}" for name in names}
    matches = {name: _GEMMA_NAME.fullmatch(name) for name in names}
    return {name: f"{_GEMMA}{match[1]}" for name, match in matches.items() if match is not None}


def _llama_name(name: str) -> str:
    block = _LLAMA_BLOCK.fullmatch(name)
    if block is not None:
        return f"layers.{block[1]}.{_LLAMA_LAYERS.get(block[2], block[2])}.{block[3]}"
    outside = next((own for own in _LLAMA_OUTSIDE if name.startswith(own)), "")
    return _LLAMA_OUTSIDE.get(outside, "") + name.removeprefix(outside)


def added_to_gemma(name: str) -> float:
    """Return what a file adds to the values of a tensor: llama.cpp's to those of norms, which start from 1."""
    is_llama = name.startswith(("blk.", "output_norm."))
    return 1.0 if is_llama and name.endswith("norm.weight") else 0.0


def _chosen(names: Sequence[str], prefix: str, sign: str) -> dict[str, str]:
    """Return the names of a component's tensors in a file without their prefix, by name.

    Args:
        prefix: in files with several components.
        sign: the name of a tensor of files with this component only.
    """
    chosen = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return chosen or ({name: name for name in names} if sign in names else {})


def _parts(name: str, renamed: Mapping[str, str]) -> str:
    return ".".join(renamed.get(part, part) for part in name.split("."))


def vae_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every stored tensor of an `AutoencoderKLLTX2Video`, by name."""
    latents, pixels = config["latent_channels"], 3 * config["patch_size"] ** 2
    shapes: dict[str, Shape] = {"latents_mean": (latents,), "latents_std": (latents,)}
    shapes |= _conv("encoder.conv_in", latents, pixels)
    now = latents
    levels = zip(
        config["block_out_channels"], config["layers_per_block"], config["downsample_type"],
        config["spatio_temporal_scaling"], strict=False,
    )  # fmt: skip
    for level, (out, count, kind, scales) in enumerate(levels):
        name = f"encoder.down_blocks.{level}"
        shapes |= _resnets(name, now, count)
        if scales:
            shapes |= _conv(f"{name}.downsamplers.0.conv", out // _FACTORS[kind], now)
        now = out
    shapes |= _resnets("encoder.mid_block", now, config["layers_per_block"][-1])
    shapes |= _conv("encoder.conv_out", latents + 1, now)
    channels, factors = config["decoder_block_out_channels"][::-1], config["upsample_factor"][::-1]
    counts, kinds = config["decoder_layers_per_block"][::-1], enlargements(config)
    now = channels[0]
    shapes |= _conv("decoder.conv_in", now, latents) | _resnets("decoder.mid_block", now, counts[0])
    scaled = config["decoder_spatio_temporal_scaling"][::-1]
    for level, (out, factor, count) in enumerate(zip(channels, factors, counts[1:], strict=True)):
        name, inner = f"decoder.up_blocks.{level}", out // factor
        if now // factor != inner:
            shapes |= _resnet(f"{name}.conv_in", inner, now // factor)
            shapes |= _layer(f"{name}.conv_in.norm3", (now // factor,))
            shapes |= _layer(f"{name}.conv_in.conv_shortcut", (inner, now // factor, 1, 1, 1))
        if scaled[level]:
            wide = inner * factor
            shapes |= _conv(f"{name}.upsamplers.0.conv", wide * _FACTORS[kinds[level]] // factor, wide)
        shapes |= _resnets(name, inner, count)
        now = inner
    return shapes | _conv("decoder.conv_out", pixels, now)


def enlargements(config: Mapping[str, Any]) -> Sequence[str]:
    """Return how each level of a VAE's decoder enlarges: LTX-2's first configurations do not state it."""
    return config.get("upsample_type") or ["spatiotemporal"] * len(config["decoder_block_out_channels"])


def _resnets(name: str, channels: int, count: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for number in range(count):
        shapes |= _resnet(f"{name}.resnets.{number}", channels, channels)
    return shapes


def _resnet(name: str, channels: int, before: int) -> dict[str, Shape]:
    return _conv(f"{name}.conv1", channels, before) | _conv(f"{name}.conv2", channels, channels)


def _conv(name: str, channels: int, before: int, *, kernel: Shape = (3, 3, 3)) -> dict[str, Shape]:
    """Return a convolution in a module that pads its input."""
    return _layer(f"{name}.conv", (channels, before, *kernel))


def _layer(name: str, shape: Shape) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def sound_vae_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every stored tensor of an `AutoencoderKLLTX2Audio` without attention, by name."""
    base, latents, count = config["base_channels"], config["latent_channels"], config["num_res_blocks"]
    widths = [base * factor for factor in config["ch_mult"]]
    shapes: dict[str, Shape] = {"latents_mean": (base,), "latents_std": (base,)}
    shapes |= _conv("encoder.conv_in", base, config["in_channels"], kernel=(3, 3))
    for level, (before, width) in enumerate(pairwise((base, *widths))):
        name = f"encoder.down.{level}"
        for block in range(count):
            shapes |= _sound_block(f"{name}.block.{block}", width, width if block else before)
        if level < len(widths) - 1:
            shapes |= _layer(f"{name}.downsample.conv", (width, width, 3, 3))
    out = (2 if config.get("double_z", True) else 1) * latents
    for side, last, first in (("encoder", out, widths[-1]), ("decoder", config["output_channels"], widths[0])):
        for part in ("block_1", "block_2"):
            shapes |= _sound_block(f"{side}.mid.{part}", widths[-1], widths[-1])
        shapes |= _conv(f"{side}.conv_out", last, first, kernel=(3, 3))
    shapes |= _conv("decoder.conv_in", widths[-1], latents, kernel=(3, 3))
    for level, width in enumerate(widths):
        name, before = f"decoder.up.{level}", widths[min(level + 1, len(widths) - 1)]
        for block in range(count + 1):
            shapes |= _sound_block(f"{name}.block.{block}", width, width if block else before)
        if level:
            shapes |= _conv(f"{name}.upsample.conv", width, width, kernel=(3, 3))
    return shapes


def _sound_block(name: str, width: int, before: int) -> dict[str, Shape]:
    shapes = _conv(f"{name}.conv1", width, before, kernel=(3, 3)) | _conv(f"{name}.conv2", width, width, kernel=(3, 3))
    if width != before:
        shapes |= _conv(f"{name}.nin_shortcut", width, before, kernel=(1, 1))
    return shapes


def vocoder_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every stored tensor of an `LTX2Vocoder` or an `LTX2VocoderWithBWE`, by name."""
    if config["_class_name"] == "LTX2Vocoder":
        return _vocoder("", config)
    extension = {name.removeprefix("bwe_"): value for name, value in config.items() if name.startswith("bwe_")}
    bins, length = config["filter_length"] // 2 + 1, config["filter_length"]
    return {
        **_vocoder("vocoder.", config),
        **_vocoder("bwe_generator.", extension),
        "mel_stft.mel_basis": (config["num_mel_channels"], bins),
        "mel_stft.stft_fn.forward_basis": (2 * bins, 1, length),
        "mel_stft.stft_fn.inverse_basis": (2 * bins, 1, length),
    }


def _vocoder(prefix: str, config: Mapping[str, Any]) -> dict[str, Shape]:
    now, snake = config["hidden_channels"], config["act_fn"] == "snakebeta"
    filters = config["antialias_kernel_size"] if config["antialias"] else 0
    shapes = _layer(f"{prefix}conv_in", (now, config["in_channels"], 7))
    kernels = list(zip(config["resnet_kernel_sizes"], config["resnet_dilations"], strict=True))
    for level, kernel_size in enumerate(config["upsample_kernel_sizes"]):
        now //= 2
        # Weights of transposed convolutions begin with the channels before.
        shapes[f"{prefix}upsamplers.{level}.weight"] = (2 * now, now, kernel_size)
        shapes[f"{prefix}upsamplers.{level}.bias"] = (now,)
        for block, (kernel, dilations) in enumerate(kernels):
            name = f"{prefix}resnets.{level * len(kernels) + block}"
            for number in range(len(dilations)):
                for part in "12":
                    shapes |= _layer(f"{name}.convs{part}.{number}", (now, now, kernel))
                    shapes |= _activation(f"{name}.acts{part}.{number}", now, filters) if snake else {}
    # The last activation always has filters.
    shapes |= _activation(f"{prefix}act_out", now, config["antialias_kernel_size"]) if snake else {}
    shapes[f"{prefix}conv_out.weight"] = (config["out_channels"], now, 7)
    return shapes | ({f"{prefix}conv_out.bias": (config["out_channels"],)} if config["final_bias"] else {})


def _activation(name: str, channels: int, filters: int) -> dict[str, Shape]:
    """Return the parameters of a `SnakeBeta`, with filters of a size around it or without."""
    if not filters:
        return {f"{name}.{part}": (channels,) for part in ("alpha", "beta")}
    sizes = {f"{name}.{side}sample.filter": (1, 1, filters) for side in ("up", "down")}
    return sizes | {f"{name}.act.{part}": (channels,) for part in ("alpha", "beta")}


def connector_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every parameter of an `LTX2TextConnectors`, by name."""
    states = config["caption_channels"] * config["text_proj_in_factor"]
    projections = {"text_proj_in": config["caption_channels"]}
    if config["per_modality_projections"]:
        projections = {f"{stream}_text_proj_in": config[f"{stream}_hidden_dim"] for stream in ("video", "audio")}
    shapes: dict[str, Shape] = {}
    for name, width in projections.items():
        shapes |= _layer(name, (width, states))
        if not config["proj_bias"]:
            del shapes[f"{name}.bias"]
    for stream in ("video", "audio"):
        connector = f"{stream}_connector"
        heads = config[f"{connector}_num_attention_heads"]
        width = heads * config[f"{connector}_attention_head_dim"]
        shapes[f"{connector}.learnable_registers"] = (config[f"{connector}_num_learnable_registers"], width)
        for number in range(config[f"{connector}_num_layers"]):
            block = f"{connector}.transformer_blocks.{number}"
            for layer in ("to_q", "to_k", "to_v", "to_out.0"):
                shapes |= _layer(f"{block}.attn1.{layer}", (width, width))
            shapes |= {f"{block}.attn1.norm_{name}.weight": (width,) for name in "qk"}
            shapes |= _layer(f"{block}.ff.net.0.proj", (4 * width, width))
            shapes |= _layer(f"{block}.ff.net.2", (width, 4 * width))
            if config[f"{stream}_gated_attn"]:
                shapes |= _layer(f"{block}.attn1.to_gate_logits", (heads, width))
    return shapes


def upsampler_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every stored tensor of an `LTX2LatentUpsamplerModel` that doubles the size, by name."""
    width, dims = config["mid_channels"], config["dims"]
    kernel = (3,) * dims
    shapes = _layer("initial_conv", (width, config["in_channels"], *kernel)) | _layer("initial_norm", (width,))
    for blocks in ("res_blocks", "post_upsample_res_blocks"):
        for number in range(config["num_blocks_per_stage"]):
            for part in "12":
                shapes |= _layer(f"{blocks}.{number}.conv{part}", (width, width, *kernel))
                shapes |= _layer(f"{blocks}.{number}.norm{part}", (width,))
    if config["use_rational_resampler"]:
        shapes |= _layer("upsampler.conv", (4 * width, width, 3, 3)) | {"upsampler.blur_down.kernel": (1, 1, 5, 5)}
    else:
        shapes |= _layer("upsampler.0", (4 * width, width, 3, 3))
    return shapes | _layer("final_conv", (config["in_channels"], width, *kernel))


def gemma_parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every parameter of Gemma's language model, by name."""
    return dict(_gemma_parameters(config["text_config"]))


def _gemma_parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, values = (config[name] * head for name in ("num_attention_heads", "num_key_value_heads"))
    yield _EMBEDDING, (config["vocab_size"], width)
    yield f"{_GEMMA}norm.weight", (width,)
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for number in range(config["num_hidden_layers"]):
        layer = f"{_GEMMA}layers.{number}"
        yield from ((f"{layer}.{name}_layernorm.weight", (width,)) for name in norms)
        yield f"{layer}.self_attn.q_proj.weight", (queries, width)
        yield f"{layer}.self_attn.o_proj.weight", (width, queries)
        for name in "kv":
            yield f"{layer}.self_attn.{name}_proj.weight", (values, width)
        for name in "qk":
            yield f"{layer}.self_attn.{name}_norm.weight", (head,)
        for name in ("gate", "up"):
            yield f"{layer}.mlp.{name}_proj.weight", (inner, width)
        yield f"{layer}.mlp.down_proj.weight", (width, inner)


def with_words(shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Gemma's configuration with as many words as a file has, if it has fewer.

    Files of llama.cpp end before the embeddings of words that the tokenizer does not have.
    """
    embedding, text = shapes.get(_EMBEDDING, ()), config["text_config"]
    words = embedding[0] if len(embedding) == _MATRIX else text["vocab_size"]
    return {**config, "text_config": {**text, "vocab_size": min(words, text["vocab_size"])}}


def best_fit(shapes: Shapes, candidates: Sequence[tuple[Mapping[str, Any], Shapes]]) -> dict[str, Any] | None:
    """Return the configuration that most shapes belong to; `None` if that is at most half of them.

    A damaged file is so compared with its own architecture. Files do not state everything: rotations, strides and
    sampling rates are those of the configuration.

    Args:
        candidates: configurations with the shapes of their tensors.
    """
    best: dict[str, Any] | None = None
    most, fewest_missing = len(shapes) // 2, 0
    for config, expected in candidates:
        same = sum(expected.get(name) == shape for name, shape in shapes.items())
        missing = len(expected) - same
        if same > most or (same == most and best is not None and missing < fewest_missing):
            best, most, fewest_missing = dict(config), same, missing
    return best


def of_same_version(component: str, config: Mapping[str, Any], transformer: Mapping[str, Any]) -> bool:
    """Return whether a component is not one of another version of LTX-2 than a transformer's.

    Args:
        config, transformer: their configurations. Versions have equal sizes of latents, but other latents.
    """
    versions = {
        model.configs["transformer"]["cross_attn_mod"]
        for model in published_models("ltx2")
        if all(config.get(name) == value for name, value in model.configs.get(component, {"": ""}).items())
    }
    return not versions or transformer["cross_attn_mod"] in versions
