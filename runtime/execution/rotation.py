"""The rotary position embedding: tables computed once per size, and a rotation of two products and a sum."""

import torch

from runtime.models.row_operations import RowCall, computed, rotate_pairs

# Cosines and signed sines, each (1, tokens, 1, head width); see `rotation_tables`.
Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation_tables(cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    """Return diffusers' cosines and its sines, negated in even channels; each (1, tokens, 1, head width)."""
    signed = sin.clone()
    signed[..., 0::2].neg_()
    return cos, signed


def rotation_call(heads: int, head_width: int, dtype: torch.dtype, device: str) -> RowCall:
    """Return the operation of `rotate`."""
    angles = torch.ones(1, 1, 1, head_width, dtype=torch.float32, device=device)
    return rotate_pairs, (torch.ones(1, 1, heads, head_width, dtype=dtype, device=device), angles, angles)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate each pair of adjacent channels of `x`, (batch, tokens, heads, head width), by its token's angles."""
    rotated: torch.Tensor = computed(rotate_pairs, x, *rotation)
    return rotated
