"""Single files of LTX-2's components, in the names that they have in the publishers' files and in other programs.

Names are turned round from diffusers' scripts/convert_ltx2_to_diffusers.py, commit 7564fb016dab; diffusers' own
converters of release 0.42.1 and gguf's table of names check them, where they have such components.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from diffusers.loaders.single_file_utils import (
    convert_ltx2_audio_vae_to_diffusers,
    convert_ltx2_transformer_to_diffusers,
    convert_ltx2_vae_to_diffusers,
)
from safetensors.torch import load_file, save_file

from runtime.models.spec import ModelSpec
from tests.families.ltx2.test_loras import own
from tests.transformer_files import State

PREFIX = "model.diffusion_model."
PARTS = ("vae", "audio_vae", "vocoder", "connectors")
_STATISTICS = {
    "latents_mean": "per_channel_statistics.mean-of-means",
    "latents_std": "per_channel_statistics.std-of-means",
}
_VOCODER = {
    "upsamplers": "ups",
    "resnets": "resblocks",
    "conv_in": "conv_pre",
    "conv_out": "conv_post",
    "act_out": "act_post",
}


def own_names(state: Mapping[str, torch.Tensor]) -> State:
    """Return the transformer's parameters under the names of LTX-2's own code."""
    renames = {
        "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
        "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
        "norm_q": "q_norm",
        "norm_k": "k_norm",
    }
    named = {}
    for name, tensor in state.items():
        renamed = own(name)
        for diffusers, original in renames.items():
            renamed = renamed.replace(diffusers, original)
        named[renamed] = tensor
    back = convert_ltx2_transformer_to_diffusers({f"{PREFIX}{name}": tensor for name, tensor in named.items()})
    # This converter has the names of LTX-2, and no modulation of the text.
    assert {name.replace("prompt_adaln_single", "prompt_adaln") for name in back} == set(state)
    return named


def folder_state(spec: ModelSpec, component: str) -> State:
    """Return what a component's folder has."""
    (path,) = (spec.directory / component).glob("*.safetensors")
    return load_file(path)


def part_names(component: str, state: Mapping[str, torch.Tensor]) -> State:
    """Return one of `PARTS`, or the upsampler, under the names of the publishers' files with all components."""
    if component == "latent_upsampler":
        return dict(state)
    renamed = {name: _NAMES[component](name) for name in state}
    file = {renamed[name]: tensor for name, tensor in state.items()}
    assert len(file) == len(state)
    if component == "audio_vae":
        assert set(convert_ltx2_audio_vae_to_diffusers(dict(file))) == set(state)
    if component != "vae":
        return file
    back = {name.removeprefix("vae."): tensor for name, tensor in file.items()}
    # This converter has the levels of LTX-2.0's decoder.
    levels = {"up_blocks.7": "up_blocks.3.upsamplers.0", "up_blocks.8": "up_blocks.3"}
    names = set(convert_ltx2_vae_to_diffusers(back))
    for original, diffusers in levels.items():
        names = {name.replace(original, diffusers) for name in names}
    assert names == set(state)
    unused = ("channel", "mean-of-stds", "mean-of-stds_over_std-of-means")
    return file | {f"vae.per_channel_statistics.{name}": torch.ones(16) for name in unused}


def _vae_name(name: str) -> str:
    name = _STATISTICS.get(name, name).replace("resnets", "res_blocks")
    for middle, original in {
        "encoder.mid_block": "encoder.down_blocks.8",
        "decoder.mid_block": "decoder.up_blocks.0",
    }.items():
        if name.startswith(middle):
            return f"vae.{original}{name.removeprefix(middle)}"
    level = re.fullmatch(r"(encoder\.down|decoder\.up)_blocks\.([0-3])\.(downsamplers\.0\.|upsamplers\.0\.|)(.+)", name)
    if level is None:
        return f"vae.{name}"
    number = 2 * int(level[2]) + (1 if level[3] else 0 if level[1] == "encoder.down" else 2)
    return f"vae.{level[1]}_blocks.{number}.{level[4]}"


def _vocoder_name(name: str) -> str:
    renamed = ".".join(_VOCODER.get(part, part) for part in name.split("."))
    return f"vocoder.{renamed}".replace(".downsample.", ".downsample.lowpass.")


def _connector_name(name: str) -> str:
    name = (
        name.replace("transformer_blocks", "transformer_1d_blocks")
        .replace("norm_q", "q_norm")
        .replace("norm_k", "k_norm")
    )
    projection = re.fullmatch(r"(video_|audio_|)text_proj_in\.(.+)", name)
    if projection is not None:
        return f"text_embedding_projection.{projection[1]}aggregate_embed.{projection[2]}"
    return PREFIX + re.sub(r"^(video|audio)_connector", r"\1_embeddings_connector", name)


_NAMES: Mapping[str, Callable[[str], str]] = {
    "vae": _vae_name,
    "audio_vae": lambda name: f"audio_vae.{_STATISTICS.get(name, name)}",
    "vocoder": _vocoder_name,
    "connectors": _connector_name,
}


def save_combined(path: Path, spec: ModelSpec, transformer: State) -> None:
    """Save a folder's model as the publishers do: everything but the text encoder in one file."""
    file = {f"{PREFIX}{name}": tensor for name, tensor in own_names(transformer).items()}
    for part in PARTS:
        file |= part_names(part, folder_state(spec, part))
    save_file({name: tensor.contiguous() for name, tensor in file.items()}, path)


def gemma_state(spec: ModelSpec) -> State:
    """Return the parameters of Gemma's language model in a folder, under the names without a prefix."""
    name_of = re.compile(r".*language_model\.(?:model\.)?(.+)")
    matches = {name: name_of.fullmatch(name) for name in folder_state(spec, "text_encoder")}
    state = folder_state(spec, "text_encoder")
    return {match[1]: state[name] for name, match in matches.items() if match is not None}


def save_gemma(path: Path, state: State, style: str) -> State:
    """Save Gemma in a style; return what the file holds.

    Args:
        style: "comfyui" (FP8 with scales), "fp4_mixed" (NVFP4 and FP8, as comfy-kitchen quantizes), "transformers" or
            "gguf" (Q8_0).
    """
    held: State = {}
    file: State = {}
    if style == "transformers":
        # As Google publishes it, with the parts for images.
        file = {f"language_model.model.{name}": tensor for name, tensor in state.items()}
        beside = ("vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_soft_emb_norm.weight")
        save_file(file | {name: torch.ones(3) for name in beside}, path)
        return state
    if style == "comfyui":
        file = {
            "spiece_model": torch.zeros(7, dtype=torch.uint8),
            "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn),
            "vision_model.post_layernorm.weight": torch.ones(3),
        }
        for name, tensor in state.items():
            if tensor.ndim == 1:
                file[f"model.{name}"] = held[name] = tensor
                continue
            scale = tensor.abs().max() / 448
            data = (tensor / scale).to(torch.float8_e4m3fn)
            file |= {f"model.{name}": data, f"model.{name.replace('.weight', '.scale_weight')}": scale}
            held[name] = data.float() * scale
        save_file(file, path)
        return held
    if style == "fp4_mixed":
        from comfy_kitchen.tensor import QuantizedTensor  # takes seconds

        for number, (name, tensor) in enumerate(state.items()):
            if tensor.ndim == 1 or name.startswith("embed_tokens") or tensor.shape[1] % 16:
                file[f"model.{name}"] = held[name] = tensor.to(torch.bfloat16)
                continue
            layout, stated = (
                ("TensorCoreNVFP4Layout", "nvfp4") if number % 2 else ("TensorCoreFP8Layout", "float8_e4m3fn")
            )
            quantized = QuantizedTensor.from_float(tensor.float(), layout)
            file |= quantized.state_dict(f"model.{name}")
            blob = torch.tensor(list(json.dumps({"format": stated}).encode()), dtype=torch.uint8)
            file[f"model.{name.removesuffix('.weight')}.comfy_quant"] = blob
            held[name] = quantized.dequantize()
        save_file({name: tensor.contiguous() for name, tensor in file.items()}, path)
        return held
    writer, kind = gguf.GGUFWriter(None, "gemma3"), gguf.GGMLQuantizationType.Q8_0
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 48)
    for name, tensor in state.items():
        llama = names.get_name(f"model.{name}", (".weight",))
        assert llama is not None
        if tensor.ndim == 1:
            # llama.cpp's convert_hf_to_gguf.py adds 1 to the weights of norms.
            writer.add_tensor(llama, tensor.numpy() + 1)
            held[name] = tensor + 1 - 1
            continue
        if tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(llama, tensor.numpy())
            held[name] = tensor
            continue
        blocks = gguf.quantize(tensor.numpy(), kind)
        held[name] = torch.from_numpy(np.array(gguf.dequantize(blocks, kind)))
        writer.add_tensor(llama, blocks, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
