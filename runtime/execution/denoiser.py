"""Noisy latents to predicted velocity: one expert. Knows nothing about schedules or guidance."""

from collections.abc import Callable
from typing import Protocol

import torch

from runtime.core.facts import Fact
from runtime.engines.service import OpenEngines
from runtime.execution.engine_fallback import EngineWithFallback

# The passes of a step with guidance.
PROMPTED, UNPROMPTED = "cond", "uncond"
# Texts whose keys and values are cached: a prompt, a negative prompt, and both together.
_TEXTS = 2


class Denoiser(Protocol):
    """One transformer."""

    @property
    def pairs(self) -> bool:
        """Whether `pair` is faster than two calls."""
        ...

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """Predict the velocity.

        Args:
            latents: (1, channels, frames, height, width), float32.
            timestep: scalar tensor, 0 to 1000.
            text_embeds: (1, text tokens, text width).
            which: the pass of the step; each pass has its own cache.

        Returns:
            The prediction in the transformer's dtype, shaped like `latents`. It may be written over by the call after
            the next.
        """
        ...

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the velocity with each of two texts; arguments and results are those of two calls."""
        ...

    def reset_cache(self) -> None:
        """Discard values cached in earlier steps."""
        ...


class EngineDenoiser:
    """An engine that falls back to PyTorch in the call in which it fails."""

    pairs = False

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], Denoiser]) -> None:
        self._engines = EngineWithFallback(engines, fall_back)

    def reset_cache(self) -> None:
        """See `Denoiser`; neither an engine nor its fallback caches anything."""

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`; the result is valid until the second call after this one."""
        inputs = {"latents": latents, "timestep": timestep.expand(1).float(), "text_embeds": text_embeds.float()}
        return self._engines.call(
            lambda engines: engines.infer("transformer", **inputs)["velocity"],
            lambda denoiser: denoiser(latents, timestep, text_embeds),
        )

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Denoiser`."""
        return self(latents, timestep, first), self(latents, timestep, second)
