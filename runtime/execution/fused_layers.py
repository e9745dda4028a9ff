"""One matrix for linear layers with the same input, such as the projections of queries, keys and values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def fuse(owner: nn.Module, name: str, layers: Sequence[nn.Module]) -> bool:
    """Add a linear layer to a module that computes several at once; their weights become views of its weights.

    Layers that are quantized or have an adapter are skipped.

    Args:
        owner: gets the layer.
        name: of its new attribute.
        layers: with the same input, all or none with a bias; the outputs of the new layer are in this order.

    Returns:
        Whether the layers were fused. The memory of the original weights then remains in the allocator's cache.
    """
    plain = [layer for layer in layers if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter]
    if len(plain) < len(layers) or hasattr(owner, name):
        return False
    names = ("weight", "bias") if plain[0].bias is not None else ("weight",)
    outputs = sum(layer.out_features for layer in plain)
    fused = nn.Linear(plain[0].in_features, outputs, bias=len(names) > 1, device="meta")
    for parameter in names:
        parts = [getattr(layer, parameter) for layer in plain]
        joined = torch.cat([part.data for part in parts])
        setattr(fused, parameter, nn.Parameter(joined, requires_grad=False))
        for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = view
    setattr(owner, name, fused)
    return True


def unfuse_if_stale(owner: nn.Module, name: str, layers: Sequence[nn.Module]) -> None:
    """Remove a fused layer if a weight of `layers` was replaced, or got an adapter, after `fuse`."""
    fused: Any = getattr(owner, name, None)
    if fused is None:
        return
    views = fused.weight.data.split(fused.out_features // len(layers))
    for layer, view in zip(layers, views, strict=True):
        if type(layer) is not nn.Linear or layer.weight.data_ptr() != view.data_ptr():
            delattr(owner, name)
            return
