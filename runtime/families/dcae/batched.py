"""Decoding of any number of latent frames in batches, on an engine or in PyTorch.

    decode = make_batched_decode_fn(decoder, batch_size=8, use_tensorrt=True)
    frames = decode(latents)                 # [b, n, c, h, w] -> [b, n, C, H, W]

The engine is built in a child process at the first call with a size, so a program that calls it needs
`if __name__ == "__main__":`. Whatever fails, PyTorch takes over; `BatchedDecoder.fallbacks` has the reasons.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from runtime.core import settings as settings_module
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import BadResultError, EngineError, InvalidRequestError, MachineError, first_line, ran_out
from runtime.core.events import EngineProgress, Event, FellBack
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH
from runtime.core.request import AUTO
from runtime.core.settings import PRECISIONS, Settings
from runtime.engines.frame_decoders import (
    FrameEngine,
    build_frame_engine,
    builder_of,
    frame_component,
    frame_engine,
    usable_engines,
)
from runtime.engines.service import EngineService, OpenEngines
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.decoded_frames import all_finite
from runtime.execution.engine_failures import failure_of_engine
from runtime.families.dcae.sources import decoder_in, latent_channels, spec_of
from runtime.machine.probe import probe
from runtime.models.spec import FRAME_BATCH, FRAME_DECODER, ModelSpec

TENSORRT = "tensorrt"
_AXES = 5
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

logger = logging.getLogger(__name__)


def make_batched_decode_fn(
    decoder: nn.Module,
    batch_size: int = FRAME_BATCH,
    use_tensorrt: bool = True,
    *,
    backend: str = AUTO,
    settings: Settings | None = None,
    engines: EngineService | None = None,
    emit: Callable[[Event], None] | None = None,
    cancel: Cancel | None = None,
) -> "BatchedDecoder":
    """Return a function that decodes latents of any number of frames.

    Args:
        decoder: a decoder from `load_decoder`, an upscaler from `load_upscaler`, a diffusers `AutoencoderDC` or its
            decoder, or OWL's decoder, in evaluation mode. Another module from (frames, c, h, w) to (frames, C, H, W)
            runs in PyTorch.
        batch_size: frames of a batch; the last batch is padded.
        use_tensorrt: whether a TensorRT engine is built and used for a decoder on a GPU; `TENSORRT_ENABLED=false`
            disables it too.
        backend: "auto": TensorRT as above, else the fastest engine in the library that was faster than PyTorch, else
            PyTorch; or the name of a backend, whose engine is built if it is missing.
        settings: by default those of this installation, with `TENSORRT_ENABLED`, `TENSORRT_PRECISION` and
            `TENSORRT_CACHE_DIR`.
        engines: the engine library, by default that of the settings.
        emit: receives `EngineProgress` while an engine is built, and `FellBack`.
        cancel: stops the build of an engine.
    """
    return BatchedDecoder(
        decoder,
        batch_size=batch_size,
        backend=backend,
        use_tensorrt=use_tensorrt,
        settings=settings or settings_module.load(),
        engines=engines,
        emit=emit or (lambda _: None),
        cancel=cancel or Cancel(),
    )


class BatchedDecoder:
    """Decodes latents of any number of frames. Thread-safe: calls run one after the other.

    Args:
        decoder, batch_size, use_tensorrt, backend, settings, engines, emit, cancel: see `make_batched_decode_fn`.

    Attributes:
        backend: what the last call ran on: "pytorch", or the backend of the engine.
        engine: the ID of that engine; empty in PyTorch.
        fallbacks: why PyTorch took over, in the order in which it happened.
    """

    def __init__(
        self,
        decoder: nn.Module,
        *,
        batch_size: int,
        backend: str,
        use_tensorrt: bool,
        settings: Settings,
        engines: EngineService | None,
        emit: Callable[[Event], None],
        cancel: Cancel,
    ) -> None:
        if batch_size < 1:
            raise InvalidRequestError("batch_size", "decode.batch_size", value=batch_size)
        self._decoder = decoder
        self._module = decoder_in(decoder)
        self._channels = latent_channels(decoder)
        described: ModelSpec | None = getattr(decoder, "tandem_spec", None)
        self._component = FRAME_DECODER if described is None else frame_component(described)
        weight = next(self._module.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        if self._device == torch.device("cuda"):
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._batch = batch_size
        enabled = use_tensorrt and settings.decoder_tensorrt
        self._tensorrt = self._on_gpu and enabled
        self._target_backend = TENSORRT if backend == AUTO and self._tensorrt else backend
        self._settings, self._service = settings, engines
        self._emit, self._cancel = emit, cancel
        self._lock = threading.RLock()
        self._spec: ModelSpec | None = None
        self._open: OpenEngines | None = None
        self._current: FrameEngine | None = None
        self._sized: tuple[int, int] | None = None
        self._tried = ""
        self._done: Any = None
        # Whether the call has fewer frames than a batch: they need no padding where any number is taken.
        self._alone = False
        self.backend, self.engine = PYTORCH, ""
        self.fallbacks: tuple[Fact, ...] = ()
        self._graphs: CudaGraphRunner | None = None
        if self._on_gpu:
            self._module.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # the stub lacks it
            self._graphs = CudaGraphRunner(lambda latents, *_: self._module(latents), self._say)
            self._no_timestep = torch.zeros(1, device=self._device)
        if backend == TENSORRT and not enabled:
            self._fall_back(Fact("decode.tensorrt_disabled"))
            self._target_backend = PYTORCH

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the frames of latents.

        Args:
            latents: [b, n, c, h, w] in float16, bfloat16, float32 or float64, on any device, as the decoder takes
                them. A frame whose latents are not finite is not finite either; the others are not changed by it.

        Returns:
            [b, n, C, H, W] in the dtype of the latents, on the decoder's device; not clamped.

        Raises:
            InvalidRequestError: if the latents have another shape or dtype, other channels, or no values.
            torch.OutOfMemoryError, MemoryError: if memory is too small for a single frame.
            DeviceLostError: if the GPU cannot be used any more.
        """
        self._check(latents)
        with self._lock, torch.no_grad():
            rows = latents.flatten(0, 1)
            self._alone = len(rows) < self._batch
            self.prepare(latents.shape[3], latents.shape[4])
            self._wait_for_last_call()
            frames = self._frames(rows)
            self._mark_end()
            return frames.unflatten(0, latents.shape[:2])

    def _check(self, latents: torch.Tensor) -> None:
        shape, dtype = "×".join(map(str, latents.shape)), latents.dtype
        if latents.dim() != _AXES or dtype not in _DTYPES or latents.numel() == 0 or latents.is_meta:
            facts = {"shape": shape, "dtype": str(dtype), "device": str(latents.device)}
            raise InvalidRequestError("latents", "decode.latents_shape", **facts)
        if self._channels not in {None, latents.shape[2]}:
            raise InvalidRequestError("latents", "decode.latents_channels", shape=shape, channels=self._channels)

    def prepare(self, height: int, width: int) -> None:
        """Open the engine for latents of a size, and build it if it is missing; a call does so if this was not called.

        Raises:
            CancelledError: if it was cancelled.
        """
        with self._lock:
            if self._sized == (height, width) or self._target_backend == PYTORCH:
                return
            self._close_engine()
            self._sized = height, width
            try:
                self._open_engine((height, width))
            except CancelledError:
                self._sized = None
                raise
            except MachineError as error:
                self._fall_back(error.fact)
            except Exception as error:
                self._fall_back(failure_of_engine(error, self._device, "execution.engine_load_out_of_memory"))

    def close(self) -> None:
        """Free the engine and CUDA graphs; later calls run in PyTorch."""
        with self._lock:
            self._target_backend = PYTORCH
            self._close_engine()
            if self._graphs is not None:
                self._graphs.forget()

    def __enter__(self) -> "BatchedDecoder":
        """Return the decoder, which is closed at the end of the `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    @property
    def service(self) -> EngineService:
        """The engine library."""
        self._service = self._service or EngineService.from_settings(self._settings, probe())
        return self._service

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _open_engine(self, size: tuple[int, int]) -> None:
        service = self.service
        self._spec = self._spec or spec_of(self._decoder, self._settings.weights_dir)
        if self._spec is None:
            if self._target_backend != AUTO:
                self._fall_back(Fact("decode.decoder_unknown", {"module": type(self._module).__name__}))
            return
        spec, device = self._spec, str(self._device)
        if self._target_backend == AUTO:
            built = usable_engines(service, spec, size, device, batch=self._batch)
            candidates = [candidate for candidate in built if self._tensorrt or candidate.key.backend != TENSORRT]
            if not candidates:
                return
            engine = candidates[0]
        else:
            precision = self._settings.decoder_precision
            builder = builder_of(service, self._target_backend, device, self._component)
            engine = frame_engine(
                service,
                spec,
                builder,
                size,
                device,
                batch=self._batch,
                precision=PRECISIONS[precision] if precision and self._target_backend == TENSORRT else "",
            )
            engine = build_frame_engine(service, spec, engine, self._report, self._cancel)
        self._tried = engine.key.backend
        self._open = service.open(spec, self._component, [engine.use], device)
        self._current = engine
        self.backend, self.engine = engine.key.backend, engine.use.id

    def _frames(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the frames of latents (frames, c, h, w)."""
        frames, done = None, 0
        if self._open is not None:
            frames, done = self._on_engine(rows)
            if done == len(rows):
                assert frames is not None
                return frames
        return self._in_pytorch(rows, frames, done)

    def _on_engine(self, rows: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        """Return the frames of latents as far as the engine decoded them, and how many they are."""
        frames, done = None, 0
        try:
            for start in range(0, len(rows), self._batch):
                part = rows[start : start + self._batch]
                out = self._infer(part)
                if frames is None:
                    frames = torch.empty((len(rows), *out.shape[1:]), dtype=rows.dtype, device=out.device)
                frames[start : start + len(part)].copy_(out[: len(part)])
                done = start + len(part)
            assert frames is not None
            # Once for all batches: it waits for the GPU.
            _check_finite(rows, frames)
        except Exception as error:
            if isinstance(error, BadResultError):
                reason, done = error.fact, 0
            else:
                reason = failure_of_engine(error, self._device, "execution.engine_out_of_memory")
        else:
            return frames, done
        # Outside of the handler: the exception's frames reference memory that is needed now.
        self._close_engine()
        self._fall_back(reason)
        if frames is not None and not all_finite(frames[:done]).item():
            done = 0
        return frames, done

    def _infer(self, part: torch.Tensor) -> torch.Tensor:
        """Run the engine on at most one batch; returns the frames of a batch, valid until the call after the next."""
        assert self._open is not None
        assert self._current is not None
        if len(part) < self._batch and not (self._current.takes_any and self._alone):
            part = _padded(part, self._batch)
        frames = self._open.infer(self._component, latent_frames=part)["decoded_frames"]
        assert self._spec is not None
        decoder: Any = self._spec.vae
        shape = (len(part), decoder.channels, *decoder.frame_size(*part.shape[2:]))
        if frames.shape != shape:
            raise EngineError("engine.other_frames", expected=list(shape), given=list(frames.shape))
        return frames

    def _in_pytorch(self, rows: torch.Tensor, frames: torch.Tensor | None, done: int) -> torch.Tensor:
        """Decode what an engine did not, into `frames` if there are some."""
        start = done
        while start < len(rows):
            part = rows[start : start + self._batch]
            try:
                out = self._module_on(part)
            except Exception as error:
                if ran_out(error) is None or len(part) == 1:
                    raise
                cause = first_line(error)
                out = None
            if out is None:
                self._use_smaller_batches(cause)
                continue
            if frames is None and len(part) == len(rows) and self._graphs is None:
                return out.to(rows.dtype)
            if frames is None:
                frames = torch.empty((len(rows), *out.shape[1:]), dtype=rows.dtype, device=out.device)
            frames[start : start + len(part)].copy_(out[: len(part)])
            start += len(part)
        assert frames is not None
        return frames

    def _module_on(self, part: torch.Tensor) -> torch.Tensor:
        """Run the decoder on at most one batch; with CUDA graphs, the next call overwrites the result."""
        moved = part.to(self._device, self._dtype, non_blocking=True)
        if self._graphs is None:
            frames: torch.Tensor = self._module(moved)
            return frames
        moved = moved if self._alone or len(moved) == self._batch else _padded(moved, self._batch)
        return self._graphs(moved, self._no_timestep, lambda: self)

    def _use_smaller_batches(self, cause: str) -> None:
        """Halve the batches, after memory ran out."""
        if self._graphs is not None:
            self._graphs.forget()
            torch.cuda.empty_cache()
        self._batch = max(self._batch // 2, 1)
        self._say(Fact("decode.smaller_batches", {"frames": self._batch, "error": cause}))

    def _fall_back(self, reason: Fact) -> None:
        """Report that PyTorch takes over."""
        backend = self._tried or self._target_backend
        self._say(Fact("decode.fell_back", {"backend": backend, "reason": reason}))
        self._emit(FellBack(component=self._component, backend=backend, reason=reason))

    def _say(self, fact: Fact) -> None:
        self.fallbacks = (*self.fallbacks, fact)
        logger.warning("%s", fact)

    def _report(self, progress: Fact, share: float | None) -> None:
        self._emit(EngineProgress(component=self._component, progress=progress, share=share))

    def _close_engine(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = self._current = None
        self.backend, self.engine = PYTORCH, ""

    def _wait_for_last_call(self) -> None:
        """Let this thread's stream wait for the last call, which may use the same buffers on another stream."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def _mark_end(self) -> None:
        if self._on_gpu:
            if self._done is None:
                make: Callable[..., Any] = torch.cuda.Event
                self._done = make()
            self._done.record(torch.cuda.current_stream(self._device))


def _check_finite(rows: torch.Tensor, frames: torch.Tensor) -> None:
    """Set frames of latents that are not finite to NaN: ONNX Runtime's operators return numbers for some.

    Raises:
        BadResultError: if a frame of finite latents is not finite.
    """
    alright = [all_finite(values).to(frames.device) for values in (rows, frames)]
    if torch.stack(alright).all().item():
        return
    rows_finite, frames_finite = (
        torch.isfinite(values).flatten(1).all(1).to(frames.device) for values in (rows, frames)
    )
    if (rows_finite & ~frames_finite).any().item():
        raise BadResultError("execution.engine_not_finite")
    frames[~rows_finite] = torch.nan


def _padded(part: torch.Tensor, count: int) -> torch.Tensor:
    """Return latents with copies of the last frame, `count` in all."""
    return torch.cat([part, part[-1:].expand(count - len(part), *part.shape[1:])])
