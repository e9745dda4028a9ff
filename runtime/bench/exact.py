"""A transformer or a VAE in float32, which rounding is measured against, in little more memory than it has."""

import copy
from typing import Any

import torch

from runtime.engines.programs import full_float32


class _InFloat32(torch.nn.Module):
    """A block that is lifted to float32 for as long as it runs."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self._block = block

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return copy.deepcopy(self._block).float()(*arguments, **named)


@torch.no_grad()
def exact_velocity(
    module: Any, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor
) -> torch.Tensor:
    """Return what a diffusers transformer gives in float32, one block lifted at a time.

    Args:
        module: in any precision, not quantized; it stays as it is.
        latents: (1, channels, frames, height, width), float32.
        timestep: (1,), or (1, tokens).
        text_embeds: (1, text tokens, text width).
    """
    blocks = module.blocks
    module.blocks = torch.nn.ModuleList()
    try:
        lifted = copy.deepcopy(module).float()
    finally:
        module.blocks = blocks
    lifted.blocks = torch.nn.ModuleList([_InFloat32(block) for block in blocks])
    with full_float32(latents.device):
        output: torch.Tensor = lifted(
            hidden_states=latents.float(),
            timestep=timestep,
            encoder_hidden_states=text_embeds.float(),
            return_dict=False,
        )[0]
    return output


@torch.no_grad()
def exact_frames(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return what the VAE of diffusers gives in float32: (frames, height, width, 3), in memory (RAM).

    Args:
        module: in float32.
        latents: (1, channels, latent frames, height, width), normalised.
    """
    with full_float32(latents.device):
        return as_frames(module.decode(unnormalised(module, latents.float()), return_dict=False)[0])


def unnormalised(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return latents as the VAE's decoder takes them, in their dtype."""
    shape = (1, module.config.z_dim, 1, 1, 1)
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(shape)
        for values in (module.config.latents_mean, module.config.latents_std)
    )
    return latents * std + mean


def as_frames(video: torch.Tensor) -> torch.Tensor:
    """Return (1, 3, frames, height, width) as (frames, height, width, 3), float32 in memory (RAM)."""
    return video[0].permute(1, 2, 3, 0).float().cpu()
