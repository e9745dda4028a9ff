"""Translations to ONNX of operators that TensorRT computes slowly, for decoders of single frames.

TensorRT moves the values of pixel shuffles and repeated channels, and interpolates, without tensor cores and in another
memory layout than convolutions. As transposed convolutions, 1×1 convolutions and matrix products the results are the
same: their factors are 0 and 1, or those of the interpolation. Measured in `bench/h200.md`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import core, nn

_op: Any = opset18
_IMAGE_AXES = 4
# Tensor cores take channels in eights.
_EIGHT = 8
# Input channels of a pixel shuffle. With more, which small images have, TensorRT takes minutes to select kernels.
_MOST_SHUFFLED = 1024


def _pixel_shuffle(x: Any, upscale_factor: int) -> Any:
    """Translate `torch.pixel_shuffle`: a transposed convolution moves each channel to its pixel."""
    channels = _channels(x)
    if not 0 < channels <= _MOST_SHUFFLED or channels % (upscale_factor**2 * _EIGHT):
        return core.aten_pixel_shuffle(x, upscale_factor)
    weight = np.eye(channels).reshape(channels, -1, upscale_factor, upscale_factor)
    return _op.ConvTranspose(x, _constant(x, weight), strides=[upscale_factor, upscale_factor])


def _repeat_interleave(x: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:
    """Translate `torch.repeat_interleave`: a 1×1 convolution copies channels."""
    channels = _channels(x)
    if dim != 1 or not channels or not isinstance(repeats, int):
        return core.aten_repeat_interleave_self_int(x, repeats, dim, output_size)
    weight = np.eye(channels).repeat(repeats, axis=0)[:, :, None, None]
    return _op.Conv(x, _constant(x, weight))


def _bicubic(x: Any, output_size: Any, align_corners: bool, scale_factors: Any) -> Any:
    """Translate bicubic `torch.nn.functional.interpolate`: matrix products, if the dtype has their factors exactly."""
    sizes = x.shape[2:]
    if all(isinstance(size, int) for size in (*sizes, *(output_size or ()))):
        axes = zip(sizes, output_size or (None, None), scale_factors or (None, None), strict=True)
        rows, columns = (_bicubic_matrix(size, new_size, scale, align_corners) for size, new_size, scale in axes)
        if all((factors.astype(x.dtype.numpy()) == factors).all() for factors in (rows, columns)):
            return _op.MatMul(_constant(x, rows), _op.MatMul(x, _constant(x, columns.T)))
    return nn.aten_upsample_bicubic2d_vec(x, output_size, align_corners, scale_factors)


def _bicubic_matrix(size: int, new_size: int | None, scale: float | None, align_corners: bool) -> np.ndarray:
    """Return the factors of bicubic interpolation along an axis, (new size, size): the results of unit vectors."""
    units = torch.eye(size)[:, None, :, None]
    to = None if new_size is None else (new_size, 1)
    by = None if scale is None else (scale, 1.0)
    matrix = F.interpolate(units, size=to, scale_factor=by, mode="bicubic", align_corners=align_corners)
    return matrix[:, 0, :, 0].T.numpy()


def _channels(x: Any) -> int:
    """Return the channels of images (batch, channels, height, width); 0 for other tensors, or if they are dynamic."""
    return x.shape[1] if len(x.shape) == _IMAGE_AXES and isinstance(x.shape[1], int) else 0


def _constant(x: Any, values: np.ndarray) -> Any:
    """Return a constant of the dtype of `x`."""
    return _op.Constant(value=ir.tensor(values.astype(x.dtype.numpy())))


FRAME_DECODER_OPERATORS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.pixel_shuffle.default: _pixel_shuffle,
    torch.ops.aten.repeat_interleave.self_int: _repeat_interleave,
    torch.ops.aten.upsample_bicubic2d.vec: _bicubic,
}
