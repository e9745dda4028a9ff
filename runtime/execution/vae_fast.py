"""The VAE's decoder by Triton's kernels (`vae_kernels`) until one fails, then by PyTorch.

Between two convolutions they take one pass over memory. On Hopper the convolutions of the last and largest block are
theirs too: its 96 channels fill cuDNN's tiles badly. On an H200 cuDNN's own choice runs there at 280 TFLOP/s, ours at
550 (bench/h200.md). With 192 and 384 channels cuDNN is as fast, and keeps them. All sum in float32.
"""

import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from runtime.execution import vae_steps
from runtime.execution.compilation import Stumbled, WithFallback
from runtime.planner import constraints

# Of a convolution that the kernel is faster at: channels, whose bytes the GPU copies by 16; its size in space.
_CHANNELS, _SPACE = 8, (3, 3)


def can_run(device: torch.device) -> bool:
    """Whether Triton computes on a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class Fast(vae_steps.DecoderOps):
    """What `vae_steps.Between` does, by Triton.

    Args:
        device, dtype: of the decoder.
        stumbled: hears once that a kernel failed; PyTorch runs from then on.
        kernels: by default `vae_kernels`.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, on_degraded: Stumbled | None = None, kernels: Any = None
    ) -> None:
        self._faster = WithFallback("Triton could not compute it", on_degraded)
        self._kernels = kernels
        super().__init__(self._by_kernel)
        self._convolves = dtype in {torch.float16, torch.bfloat16} and (
            kernels is not None or torch.cuda.get_device_capability(device) == constraints.HOPPER
        )

    @property
    def compile_seconds(self) -> float:
        """See `vae_steps.Between`."""
        return self._faster.seconds

    def takes(self, conv: nn.Conv3d) -> bool:
        """See `vae_steps.Between`."""
        outputs, channels, space = conv.out_channels, conv.in_channels, conv.kernel_size[1:]
        fits = outputs == constraints.OUTPUTS_BY_KERNEL and channels % _CHANNELS == 0 and space == _SPACE
        return self._convolves and fits

    def _by_kernel(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return what calls the kernel of a function's name."""

        def kernel(*given: Any) -> torch.Tensor:
            self._kernels = self._kernels or import_module("runtime.execution.vae_kernels")
            out: torch.Tensor = getattr(self._kernels, plain.__name__)(*given)
            return out

        return lambda *given: self._faster.run(kernel, plain, given)
