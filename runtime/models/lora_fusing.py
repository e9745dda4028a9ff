"""Fuse LoRAs into a transformer's weights after loading: W + weight · (alpha / rank) · B A.

Compilers and exporters then see plain weights; to remove a LoRA, the weights are loaded again. If a weight was
quantized at loading, the sum is computed from the weight on disk and quantized the same.
"""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.core.errors import ModelError, first_line
from runtime.core.loras import LoraUse
from runtime.models.folder import weight_files
from runtime.models.loras import read_lora
from runtime.models.quantization import is_quantized, quantized_like
from runtime.models.registry import Family

_Delta = tuple[LoraUse, dict[str, str]]


@torch.no_grad()
def fuse(module: torch.nn.Module, loras: Sequence[LoraUse], folder: Path, dtype: torch.dtype, family: Family) -> None:
    """Add LoRAs to the weights of a loaded transformer, in place.

    Sums are computed in float32 and rounded once to the weight's dtype. A quantized weight equals that of a model whose
    files contain the LoRAs.

    Args:
        folder: of the transformer's weights, in diffusers' format; those that are quantized are read from it again.
        family: of the model.
        dtype: in which they were loaded.

    Raises:
        ModelError: if a file changed since the job was planned, or cannot be applied.
    """
    changes: defaultdict[str, list[_Delta]] = defaultdict(list)
    for use in loras:
        file = read_lora(use.path)
        if file.digest != use.digest:
            raise ModelError("lora.changed", lora=use.name)
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for tensor in file.shapes:
            change = family.lora_change(tensor)
            assert change is not None, "the file was validated"
            found[change.module][change.role] = tensor
        for name, tensors in found.items():
            changes[name].append((use, tensors))
    try:
        with contextlib.ExitStack() as opened:
            files = {use.digest: opened.enter_context(safe_open(use.path, framework="pt")) for use in loras}
            paths = weight_files(folder) if any(map(is_quantized, module.parameters())) else []
            weights = _Weights([opened.enter_context(safe_open(path, framework="pt")) for path in paths])
            for name, deltas in changes.items():
                _change(module, name, deltas, files, weights, dtype)
    except (OSError, SafetensorError, AttributeError) as error:
        raise ModelError("lora.fusing_failed", reason=first_line(error)) from error


class _Weights:
    """The weights on disk, by name, from opened safetensors files."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ModelError("model.tensor_missing", tensor=name)
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _change(
    module: torch.nn.Module,
    name: str,
    deltas: list[_Delta],
    files: dict[str, Any],
    weights: _Weights,
    dtype: torch.dtype,
) -> None:
    """Change one module, or a parameter that belongs to no module."""
    parent, _, last = name.rpartition(".")
    owner: Any = module.get_submodule(parent)
    target = getattr(owner, last)
    weight = target if isinstance(target, torch.nn.Parameter) else target.weight
    bias = None if isinstance(target, torch.nn.Parameter) else getattr(target, "bias", None)
    for parameter, roles in ((weight, ("up", "whole")), (bias, ("bias",))):
        relevant = [(use, tensors) for use, tensors in deltas if any(role in tensors for role in roles)]
        if not relevant:
            continue
        if parameter is None:
            raise ModelError("lora.no_bias", module=name)
        quantized = is_quantized(parameter)
        total = (weights[f"{name}.weight"].to(parameter.device, dtype) if quantized else parameter).float()
        for use, tensors in relevant:
            got = {
                role: files[use.digest].get_tensor(tensor).to(total.device).float() for role, tensor in tensors.items()
            }
            for role in roles:
                if role in got:
                    total = total + use.weight * (_product(got) if role == "up" else got[role])
        if quantized:
            target.weight = quantized_like(target, total.to(dtype))
        else:
            parameter.copy_(total)


def _product(got: dict[str, torch.Tensor]) -> torch.Tensor:
    down, up = got["down"], got["up"]
    scale = float(got["alpha"].item()) / down.shape[0] if "alpha" in got else 1.0
    return scale * (up @ down)
