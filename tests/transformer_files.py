"""Single files of Wan transformers in the formats in use, made of diffusers' modules with the formats' own tools."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from diffusers import WanAnimateTransformer3DModel, WanTransformer3DModel, WanVACETransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]
Renamed = Callable[[Mapping[str, torch.Tensor]], State]
# From diffusers' names to Wan's own, in this order.
_RENAMES = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    ".attn1.": ".self_attn.",
    ".attn2.": ".cross_attn.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    ".to_out.0.": ".o.",
    ".add_k_proj.": ".k_img.",
    ".add_v_proj.": ".v_img.",
    ".norm_added_k.": ".norm_k_img.",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    ".norm2.": ".norm3.",
    "proj_out": "head.head",
}
_MODULATION = "scale_shift_table"


def wan_names(state: Mapping[str, torch.Tensor]) -> State:
    """Return parameters under the names of Wan's own code; diffusers' converter must turn them back."""
    named = {_wan_name(name): tensor for name, tensor in state.items()}
    assert set(convert_wan_transformer_to_diffusers(dict(named))) == set(state)
    return named


def animate_names(state: Mapping[str, torch.Tensor]) -> State:
    """Return Animate's parameters under the names of Wan's own code, with the filters that its files have."""
    named = {}
    for name, tensor in state.items():
        if name.startswith("motion_"):
            # Biases have axes of one.
            named[_motion_name(name)] = tensor.reshape(1, -1, 1, 1) if name.endswith("act_fn.bias") else tensor
        elif name.startswith("face_encoder."):
            named[re.sub(r"(conv\w+)", r"\1.conv", name)] = tensor
        elif name.startswith("face_adapter.") and ".to_k." in name:  # one layer with the values'
            both = torch.cat([tensor, state[name.replace(".to_k.", ".to_v.")]])
            named[name.replace("adapter.", "adapter.fuser_blocks.").replace(".to_k.", ".linear1_kv.")] = both
        elif name.startswith("face_adapter.") and ".to_v." not in name:
            own_name = name.replace("adapter.", "adapter.fuser_blocks.")
            for diffusers, wan in {
                "to_q": "linear1_q",
                "to_out": "linear2",
                "norm_q": "q_norm",
                "norm_k": "k_norm",
            }.items():
                own_name = own_name.replace(f".{diffusers}.", f".{wan}.")
            named[own_name] = tensor
        elif not name.startswith("face_adapter."):
            named[_wan_name(name)] = tensor
    assert set(animate_names_back(dict(named))) == set(state)
    return named | {
        f"{_CONVOLUTIONS}.{number}.{layer}.0.kernel": torch.ones(4, 4)
        for number in (1, 7)
        for layer in ("conv2", "skip")
    }


def animate_names_back(state: Mapping[str, torch.Tensor]) -> State:
    """Return parameters under diffusers' names, by diffusers' converter."""
    parameters = {name: tensor for name, tensor in state.items() if not name.endswith(".kernel")}
    converted: State = convert_wan_transformer_to_diffusers(parameters)
    return converted


_CONVOLUTIONS = "motion_encoder.enc.net_app.convs"


def _motion_name(name: str) -> str:
    block = re.fullmatch(r"motion_encoder\.res_blocks\.([0-9])\.(\w+)\.(.+)", name)
    if block is not None:
        parameter = block[3].removeprefix("act_fn.")
        # A filter comes first, except in the first convolution.
        place = (block[2] != "conv1") + (parameter == "bias")
        return f"{_CONVOLUTIONS}.{int(block[1]) + 1}.{block[2].removeprefix('conv_')}.{place}.{parameter}"
    for diffusers, wan in {
        "motion_encoder.conv_in.weight": f"{_CONVOLUTIONS}.0.0.weight",
        "motion_encoder.conv_in.act_fn.bias": f"{_CONVOLUTIONS}.0.1.bias",
        "motion_encoder.conv_out": f"{_CONVOLUTIONS}.8",
        "motion_encoder.motion_network": "motion_encoder.enc.fc",
        "motion_encoder.motion_synthesis_weight": "motion_encoder.dec.direction.weight",
    }.items():
        name = name.replace(diffusers, wan)
    return name


def _wan_name(name: str) -> str:
    if name.endswith(_MODULATION):
        return name.replace(_MODULATION, "modulation") if "." in name else "head.modulation"
    if name.startswith("vace_blocks"):
        name = name.replace(".proj_in.", ".before_proj.").replace(".proj_out.", ".after_proj.")
    for diffusers, wan in _RENAMES.items():
        name = name.replace(diffusers, wan)
    return name


def wide_transformer(seed: int = 0, **more: Any) -> Any:
    """Return a tiny transformer whose rows are whole blocks of every type of GGUF: 256 values.

    VACE's by its layers, and Animate's by its channels of poses.
    """
    torch.manual_seed(seed)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 256, "num_layers": 2, "freq_dim": 32}
    kind = WanVACETransformer3DModel if "vace_layers" in more else WanTransformer3DModel
    kind = WanAnimateTransformer3DModel if "latent_channels" in more else kind
    return kind(
        **{**sizes, "in_channels": 16, "out_channels": 16, "text_dim": 32, "rope_max_seq_len": 1024, **more}
    ).eval()


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    """Whether the tools quantize a tensor: the matrices of blocks."""
    return "blocks." in name and name.endswith("weight") and tensor.ndim == 2


def save_plain(path: Path, state: State, dtype: torch.dtype, prefix: str = "") -> State:
    """Save in one dtype; return what the file holds."""
    held = {name: tensor.to(dtype) for name, tensor in state.items()}
    save_file({f"{prefix}{name}": tensor.contiguous() for name, tensor in wan_names(held).items()}, path)
    return held


def save_fp8(path: Path, state: State) -> State:
    """Save as torch casts to float8, without scales; other tensors in bfloat16."""
    held = {}
    for name, tensor in state.items():
        held[name] = tensor.to(torch.float8_e4m3fn if is_quantized(name, tensor) else torch.bfloat16)
    save_file(wan_names(held), path)
    return {name: tensor.float() for name, tensor in held.items()}


def save_fp8_scaled(
    path: Path,
    state: State,
    style: str = "scale_weight",
    named: Renamed = wan_names,
    back: Renamed = convert_wan_transformer_to_diffusers,
) -> State:
    """Save as ComfyUI does: a scale for each weight, a scale of inputs for some, and a marker.

    Args:
        named, back: return parameters under the names of the model's own code, and of diffusers.
    """
    held, file = {}, {}
    for name, tensor in named(state).items():
        if not is_quantized(name, tensor):
            file[name] = held[name] = tensor.to(torch.float16)
            continue
        scale = tensor.abs().max().float() / 448
        file[name] = (tensor / scale).to(torch.float8_e4m3fn)
        held[name] = file[name].float() * scale
        layer = name.removesuffix(".weight")
        if style == "scale_weight":
            file[f"{layer}.scale_weight"] = scale.reshape(1)
            if "ffn" in name:
                file[f"{layer}.scale_input"] = torch.ones(1)
        else:
            file[f"{layer}.weight_scale"] = scale
            blob = json.dumps({"format": "float8_e4m3fn"}).encode()
            file[f"{layer}.comfy_quant"] = torch.tensor(list(blob), dtype=torch.uint8)
    if style == "scale_weight":
        file["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    save_file({f"model.diffusion_model.{name}": tensor for name, tensor in file.items()}, path)
    return {name: tensor.float() for name, tensor in back(held).items()}


def save_gguf(
    path: Path,
    state: State,
    kind: str,
    *,
    five_axes: bool = False,
    named: Renamed = wan_names,
    back: Renamed = convert_wan_transformer_to_diffusers,
) -> State:
    """Save with gguf's writer and quantizer; return what gguf's own reader dequantizes.

    gguf-py quantizes to no K types: their blocks are random, with small scales.

    Args:
        five_axes: whether the patch embedding has five axes, as some files have it; otherwise it is stored flattened
            with its shape in the metadata, as ComfyUI's converter does.
        named, back: see `save_fp8_scaled`.
    """
    number = gguf.GGMLQuantizationType[kind]
    writer, random = gguf.GGUFWriter(None, "wan"), np.random.default_rng(0)
    held = {}
    for name, tensor in named(state).items():
        values = tensor.float().numpy()
        if is_quantized(name, tensor):
            data = random_blocks(kind, values.shape, random) if kind.endswith("_K") else gguf.quantize(values, number)
            held[name] = torch.from_numpy(np.array(gguf.dequantize(data, number)))
            writer.add_tensor(name, data, raw_dtype=number)
            continue
        held[name] = tensor.half().float() if tensor.ndim > 1 else tensor.float()
        data = values.astype(np.float16) if tensor.ndim > 1 else values
        if tensor.ndim > 4 and not five_axes:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in data.shape])
            data = data.reshape(data.shape[0], -1)
        writer.add_tensor(name, data)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back(held)


def save_comfy(
    path: Path, state: State, layout: str, format_: str, *, in_metadata: bool = False, rotated: int = 0, **how: Any
) -> State:
    """Save as ComfyUI does, with comfy-kitchen's quantizers; return what comfy-kitchen dequantizes.

    Args:
        layout: comfy-kitchen's, such as "TensorWiseINT8Layout".
        format_: what ComfyUI calls it.
        in_metadata: whether the file's metadata states the format of layers; otherwise, a tensor for each does.
        how: arguments of the layout's quantizer.
    """
    from comfy_kitchen.tensor import QuantizedTensor  # takes seconds, and few tests need it

    held, file = {}, {}
    stated = {"format": format_} | ({"convrot": True, "convrot_groupsize": rotated} if rotated else {})
    for name, tensor in wan_names(state).items():
        if not is_quantized(name, tensor):
            file[name] = held[name] = tensor.to(torch.float16)
            continue
        quantized = QuantizedTensor.from_float(
            tensor.float(), layout, **how, **({"convrot_groupsize": rotated} if rotated else {})
        )
        file |= quantized.state_dict(name)
        held[name] = quantized.dequantize()
        if not in_metadata:
            blob = torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)
            file[f"{name.removesuffix('.weight')}.comfy_quant"] = blob
    layers = {name.removesuffix(".weight"): stated for name, tensor in held.items() if tensor.dtype == torch.float32}
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})} if in_metadata else None
    save_file({name: tensor.contiguous() for name, tensor in file.items()}, path, metadata)
    return {name: tensor.float() for name, tensor in convert_wan_transformer_to_diffusers(held).items()}


def random_blocks(kind: str, shape: tuple[int, ...], random: Any) -> Any:
    """Return blocks of a K type with random values and small scales."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // block, nbytes), dtype=np.uint8)
    scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,)}[kind]
    for number, place in enumerate(scales):
        scale = np.float16(2e-5 if number == 0 else 1e-4)
        blocks[:, place : place + 2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    return blocks.reshape(shape[0], -1)


# By the title that Tandem gives the format.
FORMATS: Mapping[str, Callable[[Path, State], State]] = {
    "BF16": lambda path, state: save_plain(path, state, torch.bfloat16),
    "F16": lambda path, state: save_plain(path, state, torch.float16, "model.diffusion_model."),
    "FP8": save_fp8,
    "FP8 with scales": save_fp8_scaled,
    "GGUF Q8_0": lambda path, state: save_gguf(path, state, "Q8_0", five_axes=True),
    "GGUF Q4_0": lambda path, state: save_gguf(path, state, "Q4_0"),
    "GGUF Q5_1": lambda path, state: save_gguf(path, state, "Q5_1"),
    "GGUF Q4_K": lambda path, state: save_gguf(path, state, "Q4_K"),
    "GGUF Q5_K": lambda path, state: save_gguf(path, state, "Q5_K"),
    "GGUF Q6_K": lambda path, state: save_gguf(path, state, "Q6_K"),
    "NVFP4": lambda path, state: save_comfy(path, state, "TensorCoreNVFP4Layout", "nvfp4", in_metadata=True),
    "MXFP8": lambda path, state: save_comfy(path, state, "TensorCoreMXFP8Layout", "mxfp8"),
    "INT8": lambda path, state: save_comfy(
        path, state, "TensorWiseINT8Layout", "int8_tensorwise", rotated=64, per_channel=True, convrot=True
    ),
    "W4A8": lambda path, state: save_comfy(path, state, "AsymW4A8Int8Layout", "asym_w4a8_int8", rotated=256),
}


def suffix_of(title: str) -> str:
    """Return the suffix of a format's files."""
    return ".gguf" if title.startswith("GGUF") else ".safetensors"


# Layouts of quantized folders.
FOLDERS = ("fp8", "nvfp4", "torchao")
E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantized_folder(folder: Path, kind: str) -> State:
    """Quantize the transformer of a model folder in the layout of ModelOpt's and torchao's exports; return its values.

    Compared with exports of nvidia-modelopt 0.47 and of torchao 0.18 by diffusers.
    """
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file, held = {}, {}
    for name, tensor in load_file(path).items():
        layer = name.removesuffix(".weight")
        if not (is_quantized(name, tensor) and tensor.shape[1] % 16 == 0):
            file[name] = held[name] = tensor.bfloat16()
        elif kind == "torchao":
            scale = tensor.abs().amax(1, keepdim=True) / 448
            file[f"{layer}._weight_qdata"], file[f"{layer}._weight_scale"] = (tensor / scale).to(E4M3), scale
            held[name] = (tensor / scale).to(E4M3).float() * scale
        elif kind == "fp8":
            scale = tensor.abs().max() / 448
            file[name], file[f"{layer}.weight_scale"] = (tensor / scale).to(E4M3), scale
            file[f"{layer}.input_scale"] = torch.tensor(0.1)
            held[name] = file[name].float() * scale
        else:
            whole = tensor.abs().max() / (6 * 448)
            blocks = tensor.reshape(len(tensor), -1, 16)
            scales = (blocks.abs().amax(-1) / 6 / whole).to(E4M3)
            scaled = blocks / (scales.float()[..., None] * whole).clamp_min(1e-12)
            codes = (scaled[..., None].abs() - E2M1).abs().argmin(-1)
            values = E2M1[codes] * torch.where(scaled < 0, -1.0, 1.0)
            held[name] = (values * scales.float()[..., None] * whole).reshape(tensor.shape)
            codes = (codes | (8 * (scaled < 0))).reshape(len(tensor), -1).to(torch.uint8)
            file[name] = codes[:, ::2] | codes[:, 1::2] << 4
            file[f"{layer}.weight_scale"], file[f"{layer}.weight_scale_2"] = scales, whole
    save_file(file, path)
    return {name: tensor.float() for name, tensor in held.items()}
