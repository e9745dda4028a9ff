"""The convolutions of a VAE's last and largest block on Hopper, where cuDNN leaves half of the matrix units idle.

That block has 96 channels, which fill cuDNN's tiles badly: on an H200 its own choice runs at 280 TFLOP/s, `conv_kernel`
at 550 (bench/h200.md). Both sum in float32. With 192 and 384 channels cuDNN is as fast, and keeps them.
"""

import importlib.util
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from runtime.components.compiling import Stumbled
from runtime.components.memory import ran_out
from runtime.core.errors import first_line

_HOPPER = (9, 0)
# Outputs; channels, whose bytes the GPU copies by 16; and the kernel's size in space.
_OUTPUTS, _CHANNELS, _SPACE = 96, 8, (3, 3)

logger = logging.getLogger(__name__)

# Of what is padded, and a weight.
Convolve = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device has what the kernel is written for."""
    return (
        device.type == "cuda"
        and dtype in {torch.float16, torch.bfloat16}
        and torch.cuda.get_device_capability(device) == _HOPPER
        and importlib.util.find_spec("triton") is not None
    )


class CausalConv:
    """Convolves what is padded already, in time and space.

    Args:
        stumbled: hears once that the kernel failed; PyTorch's convolutions run from then on.
        convolve: the kernel, by default `conv_kernel.convolve`.
    """

    def __init__(self, stumbled: Stumbled | None = None, convolve: Convolve | None = None) -> None:
        self._stumbled = stumbled
        self._convolve = convolve
        self._gave_up = False

    @staticmethod
    def takes(conv: torch.nn.Conv3d) -> bool:
        """Whether a convolution is one that the kernel is faster at."""
        return conv.out_channels == _OUTPUTS and conv.in_channels % _CHANNELS == 0 and conv.kernel_size[1:] == _SPACE

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return (1, outputs, frames, height, width), without a bias.

        Args:
            x: (1, channels, frames, height, width), each more than the result's by one less than the kernel's.
            weight: (outputs, channels, frames, height, width), of what it takes.
        """
        if not self._gave_up:
            try:
                return self._kernel()(x, weight)
            except Exception as error:
                if ran_out(error) is not None:
                    raise
                logger.warning("Triton's convolution failed", exc_info=error)
                self._gave_up = True
                if self._stumbled is not None:
                    self._stumbled(f"Triton could not convolve ({type(error).__name__}: {first_line(error)}).")
        return F.conv3d(x, weight)

    def _kernel(self) -> Convolve:
        if self._convolve is None:
            module: Any = import_module("runtime.components.conv_kernel")
            self._convolve = module.convolve
        assert self._convolve is not None
        return self._convolve


def lay(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, (outputs, channels, frames, height, width), as the kernel reads it: outputs side by side."""
    return weight.permute(2, 3, 4, 1, 0).contiguous().permute(4, 3, 0, 1, 2)
