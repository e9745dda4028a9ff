"""Errors between tensors."""

import torch


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ‖out - reference‖ / ‖reference‖."""
    out, reference = out.detach().double().cpu(), reference.detach().double().cpu()
    return float((out - reference).norm() / reference.norm())
