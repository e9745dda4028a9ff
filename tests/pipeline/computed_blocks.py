"""Count the transformer blocks that are computed."""

from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.models.activations import GELU
from torch.nn.modules.module import register_module_forward_pre_hook


def blocks_computed(work: Any) -> int:
    """Return how many transformer blocks are computed while `work` runs, each of which has one GELU.

    Its projection is counted: families may compute the activation with the layer that follows.
    """
    count = 0
    projections: set[torch.nn.Module] = set()

    def hear(module: torch.nn.Module, _: Any) -> None:
        nonlocal count
        if isinstance(module, ModelMixin):
            projections.update(part.proj for part in module.modules() if isinstance(part, GELU))
        count += module in projections

    handle = register_module_forward_pre_hook(hear)
    try:
        work()
    finally:
        handle.remove()
    return count
