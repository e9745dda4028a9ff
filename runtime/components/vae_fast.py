"""The VAE's decoder by Triton's kernels (`vae_kernels`) until one fails, then by PyTorch.

Between two convolutions they take one pass over memory. On Hopper the convolutions of the last and largest block are
theirs too: its 96 channels fill cuDNN's tiles badly. On an H200 cuDNN's own choice runs there at 280 TFLOP/s, ours at
550 (bench/h200.md). With 192 and 384 channels cuDNN is as fast, and keeps them. All sum in float32.
"""

import importlib.util
import logging
from importlib import import_module
from typing import Any

import torch
from torch import nn

from runtime.components import vae_steps
from runtime.components.compiling import Stumbled
from runtime.components.memory import ran_out
from runtime.core.errors import first_line

_HOPPER = (9, 0)
# Of a convolution that the kernel is faster at: outputs; channels, whose bytes the GPU copies by 16; its size in space.
_OUTPUTS, _CHANNELS, _SPACE = 96, 8, (3, 3)

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
        super().__init__()
        self._stumbled = stumbled
        self._kernels = kernels
        self._convolves = dtype in {torch.float16, torch.bfloat16} and (
            kernels is not None or torch.cuda.get_device_capability(device) == _HOPPER
        )
        self._gave_up = False

    def takes(self, conv: nn.Conv3d) -> bool:
        """See `vae_steps.Between`."""
        fits = conv.out_channels == _OUTPUTS and conv.in_channels % _CHANNELS == 0 and conv.kernel_size[1:] == _SPACE
        return self._convolves and fits

    def enter(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        gamma: torch.Tensor,
        before: torch.Tensor,
        padding: int = 0,
    ) -> torch.Tensor:
        """See `vae_steps.enter`."""
        return self._by("enter", x, bias, gamma, before, padding)

    def leave(self, x: torch.Tensor, bias: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """See `vae_steps.leave`."""
        return self._by("leave", x, bias, shortcut)

    def double(self, frames: torch.Tensor) -> torch.Tensor:
        """See `vae_steps.double`."""
        return self._by("double", frames)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `vae_steps.convolve`."""
        return self._by("convolve", x, weight)

    def _by(self, name: str, *given: Any) -> torch.Tensor:
        if not self._gave_up:
            try:
                self._kernels = self._kernels or import_module("runtime.components.vae_kernels")
                out: torch.Tensor = getattr(self._kernels, name)(*given)
            except Exception as error:
                if ran_out(error) is not None:
                    raise
                logger.warning("Triton's %s failed", name, exc_info=error)
                self._gave_up = True
                if self._stumbled is not None:
                    self._stumbled(f"Triton could not compute it ({type(error).__name__}: {first_line(error)}).")
            else:
                return out
        plain: torch.Tensor = getattr(vae_steps, name)(*given)
        return plain
