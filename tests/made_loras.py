"""LoRA files as they are found in the wild, made for a tiny transformer."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.models.spec import TransformerSpec

RANK = 4
# Linear layers of a block: Wan's own name, diffusers', musubi-tuner's.
LINEAR = [
    *(
        (f"{theirs}.{a}", f"{ours}.{b}", f"{theirs}_{a}")
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for a, b in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    ),
    ("ffn.0", "ffn.net.0.proj", "ffn_0"),
    ("ffn.2", "ffn.net.2", "ffn_2"),
]
Tensors = dict[str, torch.Tensor]
Factors = Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


def factors(spec: TransformerSpec, rank: int = RANK, seed: int = 0) -> Factors:
    """Return down and up of every linear layer of all blocks, by block and Wan's own name."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"ffn.0": (spec.width, spec.ffn_dim), "ffn.2": (spec.ffn_dim, spec.width)}
    made = {}
    for block in range(spec.num_layers):
        for name, *_ in LINEAR:
            into, out = sizes.get(name, (spec.width, spec.width))
            down, up = torch.randn(rank, into, generator=random), torch.randn(out, rank, generator=random)
            made[block, name] = 0.3 * down, 0.3 * up
    return made


def peft(found: Factors) -> Tensors:
    """Return them as diffusers and peft name them."""
    ours = {theirs: ours for theirs, ours, _ in LINEAR}
    return {
        f"transformer.blocks.{block}.{ours[name]}.lora_{letter}.weight": tensor
        for (block, name), pair in found.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }


def wan(found: Factors, alpha: float | None = None) -> Tensors:
    """Return them as Wan's community names them, alpha beside each pair if it is given."""
    named = {
        f"diffusion_model.blocks.{block}.{name}.lora_{end}.weight": tensor
        for (block, name), pair in found.items()
        for end, tensor in zip(("down", "up"), pair, strict=True)
    }
    alphas = {} if alpha is None else {f"diffusion_model.blocks.{b}.{n}.alpha": torch.tensor(alpha) for b, n in found}
    return named | alphas


def musubi(found: Factors, alpha: float = RANK) -> Tensors:
    """Return them as musubi-tuner names them."""
    theirs = {name: musubi for name, _, musubi in LINEAR}
    named = {
        f"lora_unet_blocks_{block}_{theirs[name]}.lora_{end}.weight": tensor
        for (block, name), pair in found.items()
        for end, tensor in zip(("down", "up"), pair, strict=True)
    }
    return named | {f"lora_unet_blocks_{b}_{theirs[n]}.alpha": torch.tensor(alpha) for b, n in found}


def save(path: Path, tensors: Tensors, change: Callable[[Tensors], Tensors] = dict) -> Path:
    """Write tensors to a file and return it; `change` may spoil them first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)
    return path
