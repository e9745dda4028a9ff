"""New frames between those of a video, by the network, while frames arrive."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from typing_extensions import Self

from runtime.core.cancel import never
from runtime.families.interpolator.network import MULTIPLE, load_network, smaller_for

# Two frames whose colors differ by more than this share on average, and by that much more than two before, are a cut.
_CUT = 0.1
_HALF = 127.5


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
        check: called before each new frame; may raise.
    """

    def __init__(
        self, width: int, height: int, factor: int, device: str = "cpu", check: Callable[[], None] = never
    ) -> None:
        self._factor, self._device, self._check = factor, device, check
        self._smaller = smaller_for(width, height)
        multiple = MULTIPLE * self._smaller
        self._size = height, width
        self._padding = (0, -width % multiple, 0, -height % multiple)
        self._last: np.ndarray | None = None
        self._difference = 0.0

    def __enter__(self) -> Self:
        """Load the network."""
        self._network = load_network(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        """Keep the network, which is small, for the next video."""

    def add(self, frames: np.ndarray) -> Iterator[np.ndarray]:
        """Take frames, (n, height, width, 3) uint8; yield what is finished, of the same form.

        Raises:
            torch.OutOfMemoryError, MemoryError: if memory is too small.
        """
        for frame in frames:
            before, self._last = self._last, frame.copy()
            if before is not None:
                yield np.stack([before, *self._between(before, self._last)])

    def finish(self) -> Iterator[np.ndarray]:
        """Yield the last frame, repeated."""
        if self._last is not None:
            yield np.repeat(self._last[None], self._factor, axis=0)
            self._last = None

    def _between(self, before: np.ndarray, after: np.ndarray) -> list[np.ndarray]:
        difference = float(np.abs(after.astype(np.int16) - before).mean()) / 255
        sudden, self._difference = difference - self._difference, difference
        if min(difference, sudden) > _CUT:
            nearer = self._factor // 2
            return [before] * nearer + [after] * (self._factor - 1 - nearer)
        with torch.inference_mode():
            made = self._halved(self._tensor(before), self._tensor(after), self._factor)
            return [self._frame(tensor) for tensor in made]

    def _halved(self, before: torch.Tensor, after: torch.Tensor, factor: int) -> list[torch.Tensor]:
        """Return `factor` - 1 frames between two."""
        if factor == 1:
            return []
        self._check()
        middle = self._network(before, after, self._smaller)[-1]
        return [*self._halved(before, middle, factor // 2), middle, *self._halved(middle, after, factor // 2)]

    def _tensor(self, frame: np.ndarray) -> torch.Tensor:
        colors = torch.from_numpy(frame).to(self._device).permute(2, 0, 1)[None].float() / _HALF - 1
        return F.pad(colors, self._padding, mode="replicate") if any(self._padding) else colors

    def _frame(self, colors: torch.Tensor) -> np.ndarray:
        height, width = self._size
        rounded = ((colors[0, :, :height, :width] + 1) * _HALF).round().clamp(0, 255).byte()
        made: np.ndarray = rounded.permute(1, 2, 0).cpu().numpy()
        return made
