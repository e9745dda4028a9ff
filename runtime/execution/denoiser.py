"""Noisy latents to predicted velocity: one expert. Knows nothing about schedules or guidance."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch

from runtime.core.plan import EAGER, Speed
from runtime.core.step_cache import strength_of
from runtime.engines.service import OpenEngines
from runtime.execution.compilation import CompiledStep, Stumbled
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.engine_fallback import Guarded
from runtime.execution.fast_transformer import FastTransformer, TextState, block_step, fuse, install
from runtime.execution.first_block_cache import Sharing, first_block_cached
from runtime.execution.memory import release_cached_memory

# The passes of a step with guidance.
PROMPTED, UNPROMPTED = "cond", "uncond"
# Texts whose keys and values are held: a prompt, a negative prompt, and both together.
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
            which: of the passes of a step: each has a cache of its own.

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
        """Forget what was cached of earlier steps."""
        ...


class PyTorchDenoiser:
    """A `diffusers.WanTransformer3DModel`, computed by `fast_transformer`.

    What follows from a text alone is computed when it first comes, and kept for as long as the same tensor comes
    again, or until `forget`.

    Attributes:
        dtype: of its arithmetic.
        pairs: see `Denoiser`.

    Args:
        module: its weights may lie elsewhere until it is called.
        speed: how it is computed, until `compute` says otherwise.
    """

    def __init__(self, module: torch.nn.Module, speed: Speed = EAGER) -> None:
        # Norms stay in float32 whatever the model's dtype; the patch embedding does not.
        self.dtype: torch.dtype = cast("Any", module).patch_embedding.weight.dtype
        self._module: FastTransformer = install(module)
        self._texts: list[tuple[tuple[torch.Tensor, ...], TextState]] = []
        self._graphed: CudaGraphRunner | None = None
        self._caches = False
        self.compute(speed)

    def compute(self, speed: Speed, on_degraded: Callable[[str, str], None] | None = None) -> None:
        """Compute so from now on.

        Args:
            stumbled: hears which field of `Speed` could not be had, and why, in a sentence; what is left out then costs
                time only.
        """

        def told(field: str) -> Stumbled:
            return lambda reason: None if on_degraded is None else on_degraded(field, reason)

        self.forget()
        self._step = CompiledStep(block_step, told("compiled")) if speed.compiled else None
        install(self._module, speed.attention, self._step or block_step)
        if speed.fused and fuse(self._module):
            release_cached_memory()
        self._keep = speed.text_kept
        self.pairs = speed.paired
        self._graphed = CudaGraphRunner(self._predict, told("graphed")) if speed.graphed else None

    @contextmanager
    def caching(self, step_cache: str, sharing: Sharing | None = None) -> Iterator[None]:
        """Reuse across steps, while entered, what `step_cache` says; nothing of it stays.

        Args:
            sharing: those who share the tokens of a pass, where there are others.
        """
        strength = strength_of(step_cache)
        if strength is None:
            yield
            return
        assert not self.pairs, "each pass has a cache of its own"
        assert self._graphed is None, "what is computed is decided anew at each call"
        with first_block_cached(self._module, strength, sharing):
            self._caches = True
            try:
                yield
            finally:
                self._caches = False

    def reset_cache(self) -> None:
        """See `Denoiser`."""
        if self._caches:
            cast("Any", self._module)._reset_stateful_cache()

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`."""
        if not self._caches:
            return self._run(latents, timestep, text_embeds)
        with cast("Any", self._module).cache_context(which):
            return self._run(latents, timestep, text_embeds)

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Denoiser`."""
        one, other = self._run(torch.cat([latents, latents]), timestep, first, second).split(1)
        return one, other

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return 0.0 if self._step is None else self._step.seconds

    def forget(self) -> None:
        """Let go of all that is kept for a text or a size."""
        self._texts.clear()
        self._module.forget()
        if self._graphed is not None:
            self._graphed.forget()

    # Not in inference mode: what brings weights to the device changes them while the module runs.
    @torch.no_grad()
    def _run(self, latents: torch.Tensor, timestep: torch.Tensor, *texts: torch.Tensor) -> torch.Tensor:
        text = self._read(texts)
        if self._graphed is None:
            return self._predict(latents, timestep, text)
        return self._graphed(latents, timestep, text)

    def _predict(self, latents: torch.Tensor, timestep: torch.Tensor, text: Callable[[], TextState]) -> torch.Tensor:
        output: torch.Tensor = self._module(latents.to(self.dtype), timestep.reshape(1), text)[0]
        return output

    def _read(self, texts: tuple[torch.Tensor, ...]) -> Callable[[], TextState]:
        """Return what gives the texts' state; it is called where the weights are at hand."""

        def state() -> TextState:
            for known, kept in self._texts:
                if len(known) == len(texts) and all(a is b for a, b in zip(known, texts, strict=True)):
                    return kept
            made = self._module.read(torch.cat(texts).to(self.dtype), keep=self._keep)
            self._texts = [*self._texts[1 - _TEXTS :], (texts, made)]
            return made

        return state


class EngineDenoiser:
    """An engine, and PyTorch from the call on in which it fails."""

    pairs = False

    def __init__(self, engines: OpenEngines, fall_back: Callable[[str], Denoiser]) -> None:
        self._guarded = Guarded(engines, fall_back)

    def reset_cache(self) -> None:
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

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Denoiser`."""
        return self(latents, timestep, first), self(latents, timestep, second)
