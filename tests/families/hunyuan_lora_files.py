"""LoRA files for tiny HunyuanVideo and FramePack transformers, in the spellings in use, and diffusers' own result."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.loaders import lora_conversion_utils, single_file_utils
from safetensors.torch import load_file
from torch import nn

from runtime.core.loras import Lora
from runtime.core.plan import ComponentPlan
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.engines.contract import wheels
from tests.lora_files import save

RANK = 6
PEFT = "peft==0.21.2"
# Linear layers of the blocks in the model's own code, with rows and columns by the width and the inner width.
Size = Callable[[int, int], tuple[int, int]]
_SQUARE: Size = lambda w, inner: (w, w)  # noqa: E731
_DOUBLE: Mapping[str, Size] = {
    f"{of}_{name}": size
    for of in ("img", "txt")
    for name, size in cast(
        "dict[str, Size]",
        {
            "attn_qkv": lambda w, inner: (3 * w, w),
            "attn_proj": _SQUARE,
            "mod.linear": lambda w, inner: (6 * w, w),
            "mlp.fc1": lambda w, inner: (inner, w),
            "mlp.fc2": lambda w, inner: (w, inner),
        },
    ).items()
}
_SINGLE: Mapping[str, Size] = {
    "linear1": lambda w, inner: (3 * w + inner, w),
    "linear2": lambda w, inner: (w, w + inner),
    "modulation.linear": lambda w, inner: (3 * w, w),
}
Tensors = dict[str, torch.Tensor]
Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def block_factors(transformer: Any, rank: int = RANK, seed: int = 0) -> Factors:
    """Return (down, up) of every linear layer of the blocks, by the name in the model's own code."""
    sizes = {
        f"{kind}.{number}.{name}": size(transformer.width, transformer.ffn_dim)
        for kind, count, layers in (
            ("double_blocks", transformer.double_layers, _DOUBLE),
            ("single_blocks", transformer.single_layers, _SINGLE),
        )
        for number in range(count)
        for name, size in layers.items()
    }
    return _factors(sizes, rank, seed)


def layer_factors(module: nn.Module, rank: int = RANK, seed: int = 0) -> Factors:
    """Return (down, up) of every layer of a diffusers transformer that peft adapts, by its name there."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv3d)}
    return _factors({name: tuple(layer.weight.shape) for name, layer in layers.items()}, rank, seed)


def _factors(sizes: Mapping[str, tuple[int, ...]], rank: int, seed: int) -> Factors:
    random = torch.Generator().manual_seed(seed)
    return {
        name: (
            0.3 * torch.randn(rank, *size[1:], generator=random),
            0.3 * torch.randn(size[0], rank, *[1] * (len(size) - 2), generator=random),
        )
        for name, size in sizes.items()
    }


def peft(factors: Factors, prefix: str = "transformer.") -> Tensors:
    """Name factors as diffusers, peft, FastVideo and diffusion-pipe do."""
    return {
        f"{prefix}{name}.lora_{letter}.weight": tensor
        for name, pair in factors.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }


def comfy(factors: Factors) -> Tensors:
    """Name factors as ComfyUI does."""
    names = {comfy_name(name): pair for name, pair in factors.items()}
    return {
        f"diffusion_model.{name}.lora_{end}.weight": tensor
        for name, pair in names.items()
        for end, tensor in zip(("down", "up"), pair, strict=True)
    }


def comfy_name(name: str) -> str:
    """Return ComfyUI's name of a layer by that in the model's own code."""
    for ours, theirs in (("_attn_qkv", "_attn.qkv"), ("_attn_proj", "_attn.proj"), ("mlp.fc1", "mlp.0")):
        name = name.replace(ours, theirs)
    name = re.sub(r"(_mod|\.modulation)\.linear", r"\1.lin", name.replace("mlp.fc2", "mlp.2"))
    for ours, theirs in (("t_embedder.mlp.0", "t_embedder.in_layer"), ("t_embedder.mlp.2", "t_embedder.out_layer")):
        name = name.replace(ours, theirs)
    name = name.replace("c_embedder.linear_1", "c_embedder.in_layer").replace(
        "c_embedder.linear_2", "c_embedder.out_layer"
    )
    name = name.replace("_in.mlp.0", "_in.in_layer").replace("_in.mlp.2", "_in.out_layer")
    name = re.sub(r"_attn_([qk])_norm", r"_attn.norm.\1_norm", name)
    name = re.sub(r"(single_blocks\.\d+)\.([qk])_norm", r"\1.norm.\2_norm", name)
    return name.replace("norm.q_norm", "norm.query_norm").replace("norm.k_norm", "norm.key_norm")


def underscored(factors: Factors, prefix: str = "lora_unet_", alpha: Any = RANK) -> Tensors:
    """Name factors as musubi-tuner and, with another prefix, OneTrainer do.

    Args:
        alpha: a number or a tensor.
    """
    found: Tensors = {}
    for name, (down, up) in factors.items():
        whole = prefix + name.replace(".", "_")
        found |= {f"{whole}.lora_down.weight": down, f"{whole}.lora_up.weight": up}
        found[f"{whole}.alpha"] = torch.as_tensor(alpha).clone()
    return found


def converted(tensors: Tensors, width: int) -> Tensors:
    """Return factors with diffusers' names, as diffusers converts them for a model of this width."""
    return cast(
        "Tensors", _for_width(lora_conversion_utils._convert_hunyuan_video_lora_to_diffusers, width)(dict(tensors))
    )


def converted_weights(tensors: Tensors, width: int) -> Tensors:
    """Return the weights of the model's own code with diffusers' names, as diffusers converts them."""
    convert = _for_width(single_file_utils.convert_hunyuan_video_transformer_to_diffusers, width)
    return cast("Tensors", convert(dict(tensors)))


def _for_width(function: Any, width: int) -> Any:
    """Return a converter of diffusers for a model of another width than the one that is a constant in it."""
    source = inspect.getsource(function)
    assert source.count("hidden_size = 3072") == 1
    namespace = {"torch": torch}
    exec(source.replace("hidden_size = 3072", f"hidden_size = {width}"), namespace)
    return namespace[function.__name__]


def transformer(spec: ModelSpec) -> nn.Module:
    """Return a model's transformer in float32, with its LoRAs."""
    part = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
    return load_module(spec, "transformer", part)


def fused(spec: ModelSpec, file: Path, weight: float = 1.0) -> Tensors:
    """Return the transformer's weights with a LoRA."""
    return transformer(with_loras(spec, [Lora(str(file), weight)], file.parent)).state_dict()


def sums(plain: Tensors, tensors: Tensors, weight: float = 1.0) -> Tensors:
    """Return weights with the products of factors that have diffusers' names."""
    found = dict(plain)
    for name, down in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("transformer.").removesuffix(".lora_A.weight")
            product = tensors[name.replace(".lora_A.", ".lora_B.")].flatten(1) @ down.flatten(1)
            before = plain[f"{module}.weight"]
            found[f"{module}.weight"] = before + weight * product.reshape(before.shape)
    return found


def fused_by_peft(spec: ModelSpec, loras: Sequence[Tensors], folder: Path, weight: float) -> list[Tensors]:
    """Return the transformer's weights with each LoRA, which has diffusers' names, as diffusers' loader fuses it.

    The test is skipped where peft, which the loader needs, cannot be fetched.
    """
    package = wheels.unpacked(PEFT)
    files = []
    for number, tensors in enumerate(loras):
        # Some factors are the same tensor, which a file cannot have.
        apart = {name: tensor.clone() for name, tensor in tensors.items()}
        files.append(save(folder / f"for_peft_{number}.safetensors", apart))
    arguments = (spec.directory, spec.family, weight, *files)
    wheels.run("tests.families.fuse_with_peft", *arguments, packages=[package], libraries=folder)
    return [load_file(file.with_suffix(".fused")) for file in files]


def check_equal(got: Tensors, wanted: Tensors) -> None:
    """Compare all tensors bit for bit."""
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
