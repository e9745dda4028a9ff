"""Noisy latents to predicted velocity: one expert. Knows nothing about schedules or guidance."""

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch

from runtime.components.guarded import Guarded
from runtime.engines.service import OpenEngines


class Denoiser(Protocol):
    """One transformer."""

    def __call__(self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor) -> torch.Tensor:
        """Predict the velocity.

        Args:
            latents: (1, channels, frames, height, width), float32.
            timestep: scalar tensor, 0 to 1000.
            text_embeds: (1, text tokens, text width).

        Returns:
            The prediction in the transformer's dtype, shaped like `latents`.
        """
        ...


@runtime_checkable
class PairDenoiser(Denoiser, Protocol):
    """A transformer that takes both passes of guidance at once."""

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the velocity with each of two texts; arguments and results are those of two calls."""
        ...


class PyTorchDenoiser:
    """A `diffusers.WanTransformer3DModel`."""

    def __init__(self, module: torch.nn.Module, *, expand_timesteps: bool, patch_size: tuple[int, int, int]) -> None:
        self._module = module
        self._expand = expand_timesteps
        self._patch = patch_size
        # Norms stay in float32 whatever the model's dtype; the patch embedding does not.
        self._dtype: torch.dtype = cast("Any", module).patch_embedding.weight.dtype

    # Not in inference mode: what brings weights to the device changes them while the module runs.
    @torch.no_grad()
    def __call__(self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor) -> torch.Tensor:
        """See `Denoiser`."""
        batch, _, frames, height, width = latents.shape
        tokens = frames * (height // self._patch[1]) * (width // self._patch[2])
        shape: tuple[int, ...] = (batch, tokens) if self._expand else (batch,)
        output: torch.Tensor = self._module(
            hidden_states=latents.to(self._dtype),
            timestep=timestep.expand(shape),
            encoder_hidden_states=text_embeds.to(self._dtype),
            return_dict=False,
        )[0]
        return output


class EngineDenoiser:
    """An engine, and PyTorch from the call on in which it fails."""

    def __init__(self, engines: OpenEngines, fall_back: Callable[[str], Denoiser]) -> None:
        self._guarded = Guarded(engines, fall_back)

    def __call__(self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor) -> torch.Tensor:
        """See `Denoiser`; the result stays as it is until the call after the next."""
        inputs = {"latents": latents, "timestep": timestep.expand(1).float(), "text_embeds": text_embeds.float()}
        return self._guarded.call(
            lambda engines: engines.infer("transformer", **inputs)["velocity"],
            lambda denoiser: denoiser(latents, timestep, text_embeds),
        )
