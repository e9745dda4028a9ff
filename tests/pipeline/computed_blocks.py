"""Count the transformer blocks that are computed."""

from typing import Any

import torch
from diffusers.models.activations import GELU
from torch.nn.modules.module import register_module_forward_pre_hook


def blocks_computed(work: Any) -> int:
    """Return how many transformer blocks are computed while `work` runs, each of which has one GELU."""
    count = 0

    def hear(module: torch.nn.Module, _: Any) -> None:
        nonlocal count
        count += isinstance(module, GELU)

    handle = register_module_forward_pre_hook(hear)
    try:
        work()
    finally:
        handle.remove()
    return count
