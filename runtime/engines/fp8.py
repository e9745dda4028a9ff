"""FP8 block engines: a part of a block whose matrices are float8_e4m3fn with a scale for each output channel.

The arithmetic is that of torchao's `Float8DynamicActivationFloat8WeightConfig(PerRow())`, whose weights the engines
take: activations are scaled for each token by the largest magnitude, rounded to FP8, multiplied, and the products are
scaled for token and channel. Builders find such products as quantization with a constant scale, so both factors have
the scale 2⁻⁸, which is exact, and the true scales are multiplied afterwards. That keeps products below 65,504, the
limit of float16, for up to 21,000 channels.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn

from runtime.models.quantization import FP8_DATA, FP8_SCALE
from runtime.models.row_operations import quantize_rows

# The dtype of activations that go in and out: torchao's.
ACTIVATIONS = "bfloat16"
PRODUCT_SCALE = 2.0**-8
_MATRIX_DTYPE = "float8_e4m3fn"
_LARGEST = 448.0
_SMALLEST_AMAX = 1e-12
_MATRIX_AXES = 2
# Of an input's name.
_SCALE_SUFFIX = "_scale"
# Standard deviation of random weights.
_DEVIATION = _LARGEST / 4


class Fp8Weight(NamedTuple):
    """A matrix (out, in), float8_e4m3fn, and the scales of its rows (out, 1), float32."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return torch.bfloat16

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Fp8Weight":
        """Round a matrix as torchao does."""
        return cls(*quantize_rows(weight))


Weight: TypeAlias = torch.Tensor | Fp8Weight


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor) -> torch.Tensor:
    """Return `F.linear` in the dtype of `x`, or in float32 with an `Fp8Weight`; `x` is (tokens, in)."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_AMAX)
    normed = (x * (_LARGEST * PRODUCT_SCALE / amax)).half()
    product: torch.Tensor = torch.ops.tandem.fp8_product(normed, weight.qdata)
    scaled = product.float() * (amax / (_LARGEST * PRODUCT_SCALE**2)) * weight.scale.t()
    return scaled + bias.float()


@torch.library.custom_op("tandem::fp8_product", mutates_args=())
def fp8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product of x / 2⁻⁸, rounded to FP8, with a matrix, times 2⁻¹⁶.

    Args:
        x: (tokens, in), float16, at most 448 · 2⁻⁸ in magnitude.
        weight: (out, in), float8_e4m3fn.

    Returns:
        (tokens, out), float16.
    """
    rounded = (x.float() / PRODUCT_SCALE).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return (rounded.float() @ weight.float().t() * PRODUCT_SCALE**2).to(x.dtype)


@fp8_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def matrices_of(part: Any) -> list[str]:
    """Return the names of the weights of a part of a block (`programs.BlockPart`) that are quantized to FP8."""
    return [name for name in part.weights if len(part.tensors[name].sizes) == _MATRIX_AXES]


class Fp8Part(nn.Module):
    """A part of a block (`programs.BlockPart`) with FP8 matrices; the scales are further inputs.

    Args:
        part: calls `linear` for its products.
    """

    variadic = True

    def __init__(self, part: Any) -> None:
        super().__init__()
        self._part = part
        self._matrices = matrices_of(part)
        self.inputs: tuple[str, ...] = part.inputs
        self.outputs: tuple[str, ...] = part.outputs
        self.weights: Mapping[str, str] = {
            key: path
            for name, weight_name in part.weights.items()
            for key, path in (
                {name: weight_name + FP8_DATA, name + _SCALE_SUFFIX: weight_name + FP8_SCALE}
                if name in self._matrices
                else {name: weight_name}
            ).items()
        }
        tensors = dict(part.tensors)
        for name in self._matrices:
            matrix = part.tensors[name]
            tensors[name] = matrix._replace(dtype=_MATRIX_DTYPE)
            tensors[name + _SCALE_SUFFIX] = matrix._replace(sizes=(matrix.sizes[0], 1), dtype="float32")
        self.tensors = tensors

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Take `inputs` and `weights`, and return `outputs`, in these orders."""
        values = dict(zip((*self.inputs, *self.weights), tensors, strict=True))
        weights: list[Weight] = [
            Fp8Weight(values[name], values[name + _SCALE_SUFFIX]) if name in self._matrices else values[name]
            for name in self._part.weights
        ]
        outputs: torch.Tensor | tuple[torch.Tensor, ...] = self._part(*(values[name] for name in self.inputs), *weights)
        return outputs

    def quantized(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this form's inputs for those of the part itself."""
        tensors = dict(inputs)
        for name in self._matrices:
            tensors[name], tensors[name + _SCALE_SUFFIX] = Fp8Weight.of(inputs[name])
        return tensors

    def drawn(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return standard normal values as an input: products with the weights keep the magnitude of activations."""
        if name in self._matrices:
            return (values * _DEVIATION).clamp(-_LARGEST, _LARGEST)
        matrix = name.removesuffix(_SCALE_SUFFIX)
        if name in self.weights and matrix in self._matrices:
            channels = cast("int", self.tensors[matrix].sizes[1])
            return (1 + values / 10).abs() / (_DEVIATION * math.sqrt(channels))
        return values
