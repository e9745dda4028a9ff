"""The VAE's decoder by Triton's kernels (`vae_kernels`) until one fails, then by PyTorch.

Between two convolutions they take one pass over memory. On Hopper the convolutions of the last and largest block are
theirs too: its 96 channels fill cuDNN's tiles badly. On an H200 cuDNN's own choice runs there at 280 TFLOP/s, ours at
550 (bench/h200.md). With 192 and 384 channels cuDNN is as fast, and keeps them. All sum in float32.
"""

import importlib.util
import logging
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from runtime.components import vae_steps
from runtime.components.compiling import Stumbled, kind_of
from runtime.components.memory import ran_out
from runtime.core.errors import first_line
from runtime.manager import compat

# Of a convolution that the kernel is faster at: channels, whose bytes the GPU copies by 16; its size in space.
_CHANNELS, _SPACE = 8, (3, 3)

logger = logging.getLogger(__name__)


def can_run(device: torch.device) -> bool:
    """Whether Triton computes on a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class Fast(vae_steps.Between):
    """What `vae_steps.Between` does, by Triton.

    Args:
        device, dtype: of the decoder.
        stumbled: hears once that a kernel failed; PyTorch runs from then on.
        kernels: by default `vae_kernels`.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, stumbled: Stumbled | None = None, kernels: Any = None
    ) -> None:
        self._by_kernel = by_kernel = _ByKernel(stumbled, kernels)
        self.enter, self.leave = by_kernel(vae_steps.enter), by_kernel(vae_steps.leave)
        self.double, self.convolve = by_kernel(vae_steps.double), by_kernel(vae_steps.convolve)
        self._convolves = dtype in {torch.float16, torch.bfloat16} and (
            kernels is not None or torch.cuda.get_device_capability(device) == compat.HOPPER
        )

    @property
    def compile_seconds(self) -> float:
        """See `vae_steps.Between`."""
        return self._by_kernel.seconds

    def takes(self, conv: nn.Conv3d) -> bool:
        """See `vae_steps.Between`."""
        outputs, channels, space = conv.out_channels, conv.in_channels, conv.kernel_size[1:]
        fits = outputs == compat.OUTPUTS_BY_KERNEL and channels % _CHANNELS == 0 and space == _SPACE
        return self._convolves and fits


class _ByKernel:
    """Makes of functions what calls the kernels of their names, and the functions once one has failed.

    Attributes:
        seconds: that the first call of each kind took: starting a kernel that is compiled takes none.
    """

    def __init__(self, stumbled: Stumbled | None, kernels: Any) -> None:
        self.seconds = 0.0
        self._kinds: set[Any] = set()
        self._stumbled = stumbled
        self._kernels = kernels
        self._gave_up = False

    def __call__(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def compute(*given: Any) -> torch.Tensor:
            if self._gave_up:
                return plain(*given)
            started = time.perf_counter()
            try:
                self._kernels = self._kernels or import_module("runtime.components.vae_kernels")
                out: torch.Tensor = getattr(self._kernels, plain.__name__)(*given)
            except Exception as error:
                if ran_out(error) is not None:
                    raise
                self._give_up(plain.__name__, error)
                return plain(*given)
            kind = plain.__name__, kind_of(given)
            if kind not in self._kinds:
                self._kinds.add(kind)
                self.seconds += time.perf_counter() - started
            return out

        return compute

    def _give_up(self, name: str, error: Exception) -> None:
        logger.warning("Triton's %s failed", name, exc_info=error)
        self._gave_up = True
        if self._stumbled is not None:
            self._stumbled(f"Triton could not compute it ({type(error).__name__}: {first_line(error)}).")
