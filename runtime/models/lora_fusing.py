"""Adds LoRAs to a transformer's weights as it is loaded: W + weight · (alpha / rank) · B A, once, and nothing stays.

What comes after, compilers and exporters among it, sees plain weights. Without the LoRA the weights are loaded anew.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.core.errors import ModelError
from runtime.core.loras import LoraUse
from runtime.models.lora_files import read_lora
from runtime.models.lora_names import change_of

_Delta = tuple[LoraUse, dict[str, str]]


@torch.no_grad()
def fuse(module: torch.nn.Module, loras: Sequence[LoraUse]) -> None:
    """Add LoRAs to the weights of a `diffusers.WanTransformer3DModel`, where these are.

    Sums are taken in float32 and rounded once, to the weight's own type.

    Raises:
        ModelError: if a file is not what it was when the job was planned, or does not fit after all.
    """
    changes: defaultdict[str, list[_Delta]] = defaultdict(list)
    for use in loras:
        file = read_lora(use.path)
        if file.digest != use.digest:
            raise ModelError(f"The LoRA {use.name} has changed since the job was planned.", "Start the job again.")
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for tensor in file.shapes:
            change = change_of(tensor)
            assert change is not None, "a file that was checked"
            found[change.module][change.role] = tensor
        for name, tensors in found.items():
            changes[name].append((use, tensors))
    files: dict[str, Any] = {}
    try:
        for use in loras:
            files[use.digest] = safe_open(use.path, framework="pt")
        for name, deltas in changes.items():
            _change(module, name, deltas, files)
    except (OSError, SafetensorError, AttributeError) as error:
        raise ModelError(
            f"A LoRA cannot be added: {str(error).splitlines()[0] if str(error) else error!r}.",
            "Copy or download it again.",
        ) from error


def _change(module: torch.nn.Module, name: str, deltas: list[_Delta], files: dict[str, Any]) -> None:
    """Change one module, or a parameter that is none's."""
    parent, _, last = name.rpartition(".")
    owner: Any = module.get_submodule(parent)
    target = getattr(owner, last)
    weight = target if isinstance(target, torch.nn.Parameter) else target.weight
    bias = None if isinstance(target, torch.nn.Parameter) else getattr(target, "bias", None)
    for parameter, roles in ((weight, ("up", "whole")), (bias, ("bias",))):
        changing = [(use, tensors) for use, tensors in deltas if any(role in tensors for role in roles)]
        if not changing:
            continue
        if parameter is None:
            raise ModelError(f"A LoRA changes the bias of {name}, which has none.", "Take another LoRA.")
        total = parameter.float()
        for use, tensors in changing:
            got = {
                role: files[use.digest].get_tensor(tensor).to(total.device).float() for role, tensor in tensors.items()
            }
            for role in roles:
                if role in got:
                    total = total + use.weight * (_product(got) if role == "up" else got[role])
        parameter.copy_(total)


def _product(got: dict[str, torch.Tensor]) -> torch.Tensor:
    down, up = got["down"], got["up"]
    scale = float(got["alpha"].item()) / down.shape[0] if "alpha" in got else 1.0
    return scale * (up @ down)
