"""Noisy latents to predicted velocity: one expert. Knows nothing about schedules or guidance."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from diffusers.hooks import FirstBlockCacheConfig

from runtime.components.guarded import Guarded
from runtime.core.step_cache import strength_of
from runtime.engines.service import OpenEngines

# The passes of a step with guidance.
PROMPTED, UNPROMPTED = "cond", "uncond"


class Denoiser(Protocol):
    """One transformer."""

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """Predict the velocity.

        Args:
            latents: (1, channels, frames, height, width), float32.
            timestep: scalar tensor, 0 to 1000.
            text_embeds: (1, text tokens, text width).
            which: of the passes of a step: each has a cache of its own.

        Returns:
            The prediction in the transformer's dtype, shaped like `latents`.
        """
        ...

    def begin_anew(self) -> None:
        """Forget what was cached of earlier steps."""
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
        self._caches = False

    @contextmanager
    def caching(self, step_cache: str) -> Iterator[None]:
        """Reuse across steps, while entered, what `step_cache` says; nothing of it stays."""
        strength = strength_of(step_cache)
        if strength is None:
            yield
            return
        module = cast("Any", self._module)
        module.enable_cache(FirstBlockCacheConfig(threshold=strength))
        self._caches = True
        try:
            yield
        finally:
            self._caches = False
            module.disable_cache()

    def begin_anew(self) -> None:
        """See `Denoiser`."""
        if self._caches:
            cast("Any", self._module)._reset_stateful_cache()

    # Not in inference mode: what brings weights to the device changes them while the module runs.
    @torch.no_grad()
    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`."""
        if not self._caches:
            return self._predict(latents, timestep, text_embeds)
        with cast("Any", self._module).cache_context(which):
            return self._predict(latents, timestep, text_embeds)

    def _predict(self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor) -> torch.Tensor:
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

    def begin_anew(self) -> None:
        """See `Denoiser`; an engine caches nothing, nor does what takes over from it."""

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`; the result stays as it is until the call after the next."""
        inputs = {"latents": latents, "timestep": timestep.expand(1).float(), "text_embeds": text_embeds.float()}
        return self._guarded.call(
            lambda engines: engines.infer("transformer", **inputs)["velocity"],
            lambda denoiser: denoiser(latents, timestep, text_embeds),
        )
