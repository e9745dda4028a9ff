"""Text encoders and VAEs in single files, in the names that they have in other programs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

State = dict[str, torch.Tensor]


def text_encoder(width: int = 32) -> UMT5EncoderModel:
    """Return a tiny text encoder whose rows are whole blocks of Q8_0."""
    torch.manual_seed(3)
    config = UMT5Config(vocab_size=64, d_model=width, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return UMT5EncoderModel(config).eval()


def vae() -> AutoencoderKLWan:
    """Return a tiny VAE with as many modules as the published ones."""
    torch.manual_seed(4)
    return AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2).eval()


def weights(module: torch.nn.Module) -> State:
    """Return a module's parameters, none of them zero or one."""
    random = torch.Generator().manual_seed(5)
    return {
        name: (own + 0.1 * torch.randn(own.shape, generator=random)).detach() for name, own in module.named_parameters()
    }


def original_vae_names(state: Mapping[str, torch.Tensor]) -> State:
    """Return a VAE's parameters under the names of Wan's own code; diffusers' converter must turn them back."""
    named = {_vae_name(name): tensor for name, tensor in state.items()}
    assert set(convert_wan_vae_to_diffusers(dict(named))) == set(state)
    return named


def original_vae_22_names(state: Mapping[str, torch.Tensor]) -> State:
    """Return a residual VAE's parameters under the names of Wan2.2's own code, vae2_2.py.

    There, a level is a list of residual blocks and the module that changes the size.
    """
    found = {}
    for name, tensor in state.items():
        parts, renamed = name.split("."), name
        if "_blocks" in parts[1]:
            samples = parts[1].replace("_blocks", "samples")
            if parts[3] == "resnets":
                rest = parts[4:]
            else:
                blocks = {one.split(".")[4] for one in state if one.startswith(".".join((*parts[:3], "resnets.")))}
                rest = [str(len(blocks)), *parts[4:]]
            renamed = ".".join((parts[0], samples, parts[2], samples, *rest))
        found[_vae_name(renamed)] = tensor
    return found


def _vae_name(name: str) -> str:
    parts = name.split(".")
    for new, old in (
        ("norm1", "residual.0"),
        ("conv1", "residual.2"),
        ("norm2", "residual.3"),
        ("conv2", "residual.6"),
    ):
        name = name.replace(f".{new}.", f".{old}.")
    name = name.replace("conv_shortcut", "shortcut").replace("mid_block.attentions.0", "middle.1")
    for number, place in ((0, 0), (1, 2)):
        name = name.replace(f"mid_block.resnets.{number}", f"middle.{place}")
    name = name.replace("norm_out", "head.0").replace("conv_out", "head.2").replace("conv_in", "conv1")
    if name.startswith("post_quant_conv"):
        return name.replace("post_quant_conv", "conv2")
    if name.startswith("quant_conv"):
        return name.replace("quant_conv", "conv1")
    if "down_blocks" in name:
        return name.replace("down_blocks", "downsamples")
    if "up_blocks" in name:
        block, kind, place = int(parts[2]), parts[3], int(parts[4])
        number = 4 * block + (place if kind == "resnets" else 3)
        return name.replace(f"up_blocks.{block}.{kind}.{place}", f"upsamples.{number}")
    return name


_LLAMA = {
    "shared.": "token_embd.",
    "encoder.final_layer_norm.": "enc.output_norm.",
    "encoder.block.": "enc.blk.",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.0.SelfAttention.": "attn_",
    "layer.0.layer_norm": "attn_norm",
    "layer.1.layer_norm": "ffn_norm",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
}
_WAN = {
    "shared.": "token_embedding.",
    "encoder.final_layer_norm.": "norm.",
    "encoder.block.": "blocks.",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.0.SelfAttention.": "attn.",
    "layer.0.layer_norm": "norm1",
    "layer.1.layer_norm": "norm2",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
}


def _renamed(state: State, names: Mapping[str, str]) -> State:
    found = {}
    for name, tensor in state.items():
        renamed = name
        for new, old in names.items():
            renamed = renamed.replace(new, old)
        found[renamed] = tensor
    return found


def save_text_encoder(path: Path, state: State, style: str) -> State:
    """Save a text encoder as "comfyui" (FP8 with scales), "wan" (BF16) or "gguf" (Q8_0); return what the file holds."""
    held: dict[str, Any] = {}
    if style == "wan":
        held = {name: tensor.bfloat16() for name, tensor in state.items()}
        save_file(_renamed(held, _WAN), path)
        return held
    if style == "comfyui":
        file = {
            "spiece_model": torch.zeros(7, dtype=torch.uint8),
            "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn),
        }
        for name, tensor in state.items():
            if tensor.ndim == 1 or "relative" in name:
                file[name] = held[name] = tensor.half()
                continue
            scale = tensor.abs().max() / 448
            file[name] = (tensor / scale).to(torch.float8_e4m3fn)
            file[name.replace(".weight", ".scale_weight")] = scale
            held[name] = file[name].float() * scale
        save_file(file, path)
        return held
    writer, kind = gguf.GGUFWriter(None, "t5encoder"), gguf.GGMLQuantizationType.Q8_0
    for name, tensor in _renamed(state, _LLAMA).items():
        if tensor.ndim == 1 or "rel_b" in name:
            held[name] = tensor
            writer.add_tensor(name, tensor.numpy())
            continue
        data = gguf.quantize(tensor.numpy(), kind)
        held[name] = torch.from_numpy(np.array(gguf.dequantize(data, kind)))
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    back = dict(zip(_renamed(state, _LLAMA), state, strict=True))
    return {back[name]: tensor for name, tensor in held.items()}
