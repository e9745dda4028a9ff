"""LoRA files in the naming conventions in use, with random factors for a tiny transformer."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.models.spec import TransformerSpec

RANK = 4
# Linear layers of a block, as named by Wan, diffusers and musubi-tuner.
LINEAR = [
    *(
        (f"{wan}.{a}", f"{diffusers}.{b}", f"{wan}_{a}")
        for wan, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for a, b in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    ),
    ("ffn.0", "ffn.net.0.proj", "ffn_0"),
    ("ffn.2", "ffn.net.2", "ffn_2"),
]
Tensors = dict[str, torch.Tensor]
Factors = Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


def factors(spec: TransformerSpec, rank: int = RANK, seed: int = 0) -> Factors:
    """Return the down and up matrices of every linear layer, by block and Wan's name of the layer."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"ffn.0": (spec.width, spec.ffn_dim), "ffn.2": (spec.ffn_dim, spec.width)}
    factors = {}
    for block in range(spec.num_layers):
        for name, *_ in LINEAR:
            inputs, outputs = sizes.get(name, (spec.width, spec.width))
            down, up = torch.randn(rank, inputs, generator=random), torch.randn(outputs, rank, generator=random)
            factors[block, name] = 0.3 * down, 0.3 * up
    return factors


def peft(factors: Factors) -> Tensors:
    """Name factors as diffusers and peft do."""
    names = {wan: diffusers for wan, diffusers, _ in LINEAR}
    return {
        f"transformer.blocks.{block}.{names[name]}.lora_{letter}.weight": tensor
        for (block, name), pair in factors.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }


def wan(factors: Factors, alpha: float | None = None) -> Tensors:
    """Name factors as Wan's community does, with an alpha for each pair if one is given."""
    named = {
        f"diffusion_model.blocks.{block}.{name}.lora_{end}.weight": tensor
        for (block, name), pair in factors.items()
        for end, tensor in zip(("down", "up"), pair, strict=True)
    }
    alphas = {} if alpha is None else {f"diffusion_model.blocks.{b}.{n}.alpha": torch.tensor(alpha) for b, n in factors}
    return named | alphas


def musubi(factors: Factors, alpha: float = RANK) -> Tensors:
    """Name factors as musubi-tuner does."""
    names = {name: musubi for name, _, musubi in LINEAR}
    named = {
        f"lora_unet_blocks_{block}_{names[name]}.lora_{end}.weight": tensor
        for (block, name), pair in factors.items()
        for end, tensor in zip(("down", "up"), pair, strict=True)
    }
    return named | {f"lora_unet_blocks_{b}_{names[n]}.alpha": torch.tensor(alpha) for b, n in factors}


def save(path: Path, tensors: Tensors, change: Callable[[Tensors], Tensors] = dict) -> Path:
    """Write tensors, after `change`, to a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)
    return path
