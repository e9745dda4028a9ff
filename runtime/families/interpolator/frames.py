"""New frames between those of a video, by the network, while frames arrive."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.core.errors import BadResultError
from runtime.core.events import Event
from runtime.core.plan import PYTORCH
from runtime.engines.service import EngineService
from runtime.execution.decoded_frames import all_finite
from runtime.families.dcae import BatchedDecoder, make_batched_decode_fn
from runtime.families.interpolator.components import load_interpolator

# Two frames whose colors differ by more than this share on average, and by that much more than two before, are a cut.
_CUT = 0.1
_WHITE = 255.0


class NetworkInterpolator:
    """Adds new frames after each frame that arrives; memory does not depend on their number.

    A video gets `factor` times as many frames. At `factor` times the rate it lasts as long as before, because its last
    frame is repeated: it is shown as long as before. The frames that arrive come out unchanged. At a cut, the nearer
    frame is repeated.

    Use as a context manager, like `video.interpolation.FrameInterpolator`.

    Args:
        width, height: of the frames, in pixels.
        factor: frames of the result for each that arrives, a power of two.
        device: a torch device.
        dtype: of the convolutions in PyTorch; see `components.load_interpolator`.
        backend, engines, emit, cancel: see `families.dcae.batched.make_batched_decode_fn`; `cancel` is also checked
            before each new frame.
    """

    def __init__(
        self,
        width: int,
        height: int,
        factor: int,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        backend: str = PYTORCH,
        engines: EngineService | None = None,
        emit: Callable[[Event], None] | None = None,
        cancel: Cancel | None = None,
    ) -> None:
        self._size, self._factor, self._device, self._dtype = (height, width), factor, device, dtype
        self._backend, self._engines, self._emit = backend, engines, emit
        self._cancel = cancel or Cancel()
        self._compute: BatchedDecoder | None = None
        self._last: tuple[np.ndarray, torch.Tensor] | None = None
        self._difference = 0.0

    def __enter__(self) -> Self:
        """Load the network, and open its engine if it runs on one; a missing engine of a named backend is built.

        Raises:
            CancelledError: if it was cancelled.
        """
        self._compute = make_batched_decode_fn(
            load_interpolator(self._device, self._dtype),
            1,
            backend=self._backend,
            settings=settings.load(),
            engines=self._engines,
            emit=self._emit,
            cancel=self._cancel,
        )
        self._compute.prepare(*self._size)
        return self

    def __exit__(self, *_: object) -> None:
        """Free the engine. The network, which is small, is kept for the next video."""
        if self._compute is not None:
            self._compute.close()

    @property
    def outcome(self) -> dict[str, Any]:
        """What the last frame was computed on: backend, engine, and why others did not."""
        compute = self._compute
        assert compute is not None
        return {"backend": compute.backend, "engine": compute.engine, "fallbacks": compute.fallbacks}

    def add(self, frames: np.ndarray) -> Iterator[np.ndarray]:
        """Take frames, (n, height, width, 3) uint8; yield what is finished, of the same form.

        Raises:
            torch.OutOfMemoryError, MemoryError: if memory is too small.
        """
        for frame in frames:
            before, self._last = self._last, (frame.copy(), self._colors(frame))
            if before is not None:
                yield np.stack([before[0], *self._between(before, self._last)])

    def finish(self) -> Iterator[np.ndarray]:
        """Yield the last frame, repeated."""
        if self._last is not None:
            yield np.repeat(self._last[0][None], self._factor, axis=0)
            self._last = None

    def _between(
        self, before: tuple[np.ndarray, torch.Tensor], after: tuple[np.ndarray, torch.Tensor]
    ) -> list[np.ndarray]:
        difference = (after[1] - before[1]).abs().mean().item()
        sudden, self._difference = difference - self._difference, difference
        if min(difference, sudden) > _CUT:
            nearer = self._factor // 2
            return [before[0]] * nearer + [after[0]] * (self._factor - 1 - nearer)
        with torch.no_grad():
            return [self._rounded(colors) for colors in self._halved(before[1], after[1], self._factor)]

    def _halved(self, before: torch.Tensor, after: torch.Tensor, factor: int) -> list[torch.Tensor]:
        """Return `factor` - 1 frames between two, all (1, 3, height, width) in about 0 to 1.

        Raises:
            BadResultError: if one is not finite.
        """
        if factor == 1:
            return []
        self._cancel.check()
        assert self._compute is not None
        # A copy: the next calls may overwrite a result.
        middle = self._compute(torch.cat([before, after], 1)[None])[0].clone()
        if not all_finite(middle).item():
            raise BadResultError("execution.interpolator_not_finite", dtype=self._dtype)
        return [*self._halved(before, middle, factor // 2), middle, *self._halved(middle, after, factor // 2)]

    def _colors(self, frame: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(frame).to(self._device).permute(2, 0, 1)[None].float() / _WHITE

    @staticmethod
    def _rounded(colors: torch.Tensor) -> np.ndarray:
        rounded = (colors[0] * _WHITE).round().clamp(0, _WHITE).byte().permute(1, 2, 0)
        made: np.ndarray = rounded.contiguous().cpu().numpy()
        return made
