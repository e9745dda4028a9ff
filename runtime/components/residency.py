"""Which components are in memory: loaded when first used, kept or freed as the plan says. One lifetime, one `with`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runtime.components.denoiser import Denoiser, PyTorchDenoiser
from runtime.components.text_encoder import PyTorchTextEncoder, TextEncoder
from runtime.components.video_decoder import PyTorchVideoDecoder, VideoDecoder
from runtime.core.plan import ExecutionPlan
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module, load_tokenizer

_Key = tuple[Path, str, str, str, int]


class Residency:
    """Loaded components, shared by the jobs of one worker. Not safe between threads.

    Use as a context manager: leaving it frees everything.
    """

    def __init__(self) -> None:
        self._held: dict[_Key, Any] = {}
        self.load_seconds = 0.0

    def __enter__(self) -> "Residency":
        """Start with nothing loaded."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free everything."""
        self.free()

    def free(self) -> None:
        """Free everything."""
        self._held.clear()
        _return_memory()

    @contextmanager
    def text_encoder(
        self, spec: ModelSpec, plan: ExecutionPlan, loading: Callable[[str], None]
    ) -> Iterator[TextEncoder]:
        """Lend the text encoder; `loading` is called with the component's name if it must be loaded."""

        def build() -> TextEncoder:
            module = load_module(spec, "text_encoder", plan.components["text_encoder"])
            return PyTorchTextEncoder(load_tokenizer(spec), module, spec.max_sequence_length)

        with self._lend(spec, plan, "text_encoder", build, loading) as part:
            yield part

    @contextmanager
    def denoiser(
        self, spec: ModelSpec, plan: ExecutionPlan, name: str, loading: Callable[[str], None]
    ) -> Iterator[Denoiser]:
        """Lend the transformer called `name`."""

        def build() -> Denoiser:
            module = load_module(spec, name, plan.components[name])
            return PyTorchDenoiser(
                module, expand_timesteps=spec.expand_timesteps, patch_size=spec.transformer.patch_size
            )

        with self._lend(spec, plan, name, build, loading) as part:
            yield part

    @contextmanager
    def video_decoder(
        self, spec: ModelSpec, plan: ExecutionPlan, loading: Callable[[str], None]
    ) -> Iterator[VideoDecoder]:
        """Lend the VAE's decoder."""

        def build() -> VideoDecoder:
            vae: Any = load_module(spec, "vae", plan.components["vae"])
            # Only image-to-video encodes.
            vae.encoder = None
            return PyTorchVideoDecoder(vae)

        with self._lend(spec, plan, "vae", build, loading) as part:
            yield part

    @contextmanager
    def _lend(
        self, spec: ModelSpec, plan: ExecutionPlan, name: str, build: Callable[[], Any], loading: Callable[[str], None]
    ) -> Iterator[Any]:
        part = plan.components[name]
        key = (spec.directory, name, part.device, part.dtype, _stamp(spec.directory / name))
        if key not in self._held:
            if any(held[0] != spec.directory for held in self._held):
                self.free()
            loading(name)
            started = time.perf_counter()
            self._held[key] = build()
            self.load_seconds += time.perf_counter() - started
        try:
            yield self._held[key]
        finally:
            if not plan.keep_loaded:
                self._held.pop(key, None)
                _return_memory()


def _stamp(folder: Path) -> int:
    """Return the newest change of a component's files: weights replaced on disk are loaded again."""
    return max(path.stat().st_mtime_ns for path in folder.iterdir())


def _return_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
