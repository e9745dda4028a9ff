"""Interface of a family's `components` module, which implements its components in PyTorch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from runtime.core.facts import Fact
from runtime.core.plan import Speed
from runtime.execution.denoiser import Denoiser
from runtime.execution.first_block_cache import Sharing
from runtime.execution.text_encoder import TextEncoder, TextModel
from runtime.execution.video_decoder import ResumableDecoder
from runtime.models import registry
from runtime.models.spec import ModelSpec

# Receives a field of `Speed` that could not be applied, and the reason.
OnDegraded = Callable[[str, Fact], None]


class PyTorchDenoiser(Denoiser, Protocol):
    """A transformer in PyTorch."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        ...

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        ...

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None) -> None:
        """Apply a plan's `Speed` from the next call on; what fails costs time only."""
        ...

    def caching(self, step_cache: str, sharing: Sharing | None = None) -> AbstractContextManager[None]:
        """Reuse values across steps while entered.

        Args:
            step_cache: as in the plan.
            sharing: the processes that share the tokens of a pass, if several do.
        """
        ...

    def forget(self) -> None:
        """Free values cached for a text or a size."""
        ...


class PyTorchVideoDecoder(ResumableDecoder, Protocol):
    """A VAE decoder in PyTorch."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        ...

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None) -> None:
        """Apply a plan's `Speed` from the next call on; what fails costs time only."""
        ...


class StripDecoder(Protocol):
    """A VAE decoder for one strip of each frame."""

    def frames(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """Yield decoded frames as `VideoDecoder.frames` does, of one strip."""
        ...


class Components(Protocol):
    """What a family's `components` module provides to this package."""

    def text_encoder(self, spec: ModelSpec, tokenizer: Any, model: TextModel) -> TextEncoder:
        """Make the text encoder of a tokenizer and a model that embeds tokens."""
        ...

    def denoiser(self, module: torch.nn.Module, speed: Speed = ...) -> PyTorchDenoiser:
        """Make the denoiser of a loaded transformer; its weights may be elsewhere until it is called."""
        ...

    def video_decoder(self, module: torch.nn.Module, device: str | torch.device) -> PyTorchVideoDecoder:
        """Make the decoder of a loaded VAE that computes on `device`; its weights may be elsewhere until then."""
        ...

    def strip_decoder(
        self, module: torch.nn.Module, device: str | torch.device, number: int, count: int, speed: Speed
    ) -> StripDecoder:
        """Make the decoder of strip `number` of `count`. Called only if the planner may divide frames (`VaeSpec`)."""
        ...

    def share_tokens(self, module: torch.nn.Module, tokens: Any) -> None:
        """Let several processes compute a transformer together; see `parallel.ulysses.Tokens`."""
        ...


def components_of(spec: ModelSpec) -> Components:
    """Return the components of a model's family."""
    return cast("Components", registry.components_of(spec.family))
