"""Linear layers whose weights stay in memory as files store them, and are dequantized at each call.

Formats: see `models.stored_weights`. LoRAs are kept as their factors, so that the weight is not quantized again. A
product of two matrices multiplies the layer's input; others are added to the dequantized weight.

Layers in INT8 and W4A8 may be multiplied by the kernels of the package `comfy-kitchen` instead, see `use_int8_kernels`.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from runtime.core.errors import first_line, ran_out
from runtime.core.facts import Fact
from runtime.models.stored_weights import (
    COMFY_NVFP4,
    FP8_STORED,
    INT8,
    MXFP8,
    MXFP8_BLOCK,
    NVFP4,
    NVFP4_BLOCK,
    PLAIN,
    TILE_COLUMNS,
    TILE_ROWS,
    W4A8,
    StoredWeight,
    in_int8,
)
from runtime.models.tensor_stream import DTYPES, MappedFiles, read_tensors

logger = logging.getLogger(__name__)

# The values of four bits: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class PackedLinear(nn.Linear):
    """A linear layer with a quantized weight.

    Attributes:
        weight: the data as stored: float8 or int8 (out, in), two values a byte (out, in / 2), or bytes of GGUF's blocks
            (out, bytes).
        kind, rotated: see `StoredWeight`.
    """

    weight: nn.Parameter

    def __init__(
        self, like: nn.Linear, kind: str, data: torch.Tensor, scales: list[torch.Tensor], rotated: int = 0
    ) -> None:
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, bias=like.bias is not None)
        self.kind, self.rotated = kind, rotated
        self.weight = nn.Parameter(data, requires_grad=False)
        for number, scale in enumerate(scales):
            self.register_buffer(f"scale_{number}", scale)
        self._scales = len(scales)
        self._kernels: _Int8Kernels | None = None
        self._added: list[tuple[float, Mapping[str, str], Callable[..., torch.Tensor]]] = []
        self._products: list[tuple[float, Mapping[str, str]]] = []

    def add(
        self,
        strength: float,
        tensors: Mapping[str, torch.Tensor],
        change: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor],
    ) -> None:
        """Add `strength` times `change(weight, tensors)`, in float32 (out, in), to the weight."""
        self._added.append((strength, self._keep(f"added_{len(self._added)}", tensors), change))

    def add_product(self, strength: float, up: torch.Tensor, down: torch.Tensor) -> None:
        """Add `strength` times `up` (out, rank) times `down` (rank, in) to the weight."""
        names = self._keep(f"product_{len(self._products)}", {"up": up, "down": down})
        self._products.append((strength, names))

    def _keep(self, prefix: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
        """Register tensors as buffers, which move with the weight; return the names of these."""
        for name, tensor in tensors.items():
            self.register_buffer(f"{prefix}_{name}", tensor.to(self.weight.device))
        return {name: f"{prefix}_{name}" for name in tensors}

    def _kept(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        return {name: getattr(self, buffer) for name, buffer in names.items()}

    @property
    def scales(self) -> list[torch.Tensor]:
        """What the file stores with the data; see `models.stored_weights`."""
        return [getattr(self, f"scale_{number}") for number in range(self._scales)]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight (out, in) with all that was added to it."""
        if not self._products:
            return self._changed(dtype)
        total = self._changed(torch.float32)
        for strength, names in self._products:
            factors = self._kept(names)
            total = total.addmm(factors["up"].float(), factors["down"].float(), alpha=strength)
        return total.to(dtype)

    def _changed(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight (out, in) without products of two matrices."""
        weight = dequantize(self.kind, self.weight, self.scales, dtype, self.rotated)
        if not self._added:
            return weight.to(dtype)
        before = total = weight.float()
        for strength, names, change in self._added:
            total = torch.add(total, change(before, self._kept(names)), alpha=strength)
        return total.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = None
        if self._kernels is not None and not self._added:
            result = self._kernels.product(self, x)
        if result is None:
            result = nn.functional.linear(x, self._changed(x.dtype), self.bias)
        for strength, names in self._products:
            factors = self._kept(names)
            inner = nn.functional.linear(x, factors["down"].to(x.dtype)).flatten(0, -2)
            # In place, because a copy of the widest layer's result needs a gigabyte.
            result.view(-1, self.out_features).addmm_(inner, factors["up"].to(x.dtype).T, alpha=strength)
        return result


class _Int8Kernels:
    """The kernels of a module's layers until they fail once.

    Args:
        on_failed: called with the reason.
    """

    def __init__(self, on_failed: Callable[[Fact], None] | None) -> None:
        self._on_failed = on_failed
        self._failed = False

    def product(self, layer: PackedLinear, x: torch.Tensor) -> torch.Tensor | None:
        """Return the layer's result; `None` if the kernels fail.

        Raises:
            Exception: if memory runs out.
        """
        if self._failed:
            return None
        try:
            product: torch.Tensor = int8_linear(layer.kind, x, layer.weight, layer.scales, layer.bias, layer.rotated)
        except Exception as error:
            if ran_out(error) is not None:
                raise
            logger.warning("A layer in INT8 failed", exc_info=error)
            self._failed = True
            if self._on_failed is not None:
                self._on_failed(
                    Fact("execution.int8_failed", {"error": f"{type(error).__name__}: {first_line(error)}"})
                )
            return None
        return product


def use_int8_kernels(module: nn.Module, *, used: bool, on_failed: Callable[[Fact], None] | None = None) -> None:
    """Let layers in INT8 and W4A8 be multiplied by comfy-kitchen's kernels, or dequantized at each call again.

    The kernels round the rows of a layer's input to 8 bits, as ComfyUI does with such files. Layers are dequantized if
    something was added to their weights that is no product of two matrices.

    Args:
        on_failed: called once if they fail; all layers are dequantized from then on.
    """
    kernels = _Int8Kernels(on_failed) if used else None
    for layer in module.modules():
        if isinstance(layer, PackedLinear) and in_int8(layer.kind, layer.rotated):
            layer._kernels = kernels


# A custom operator, so that a compiled block calls it without a graph break.
@torch.library.custom_op("tandem::int8_linear", mutates_args=())
def int8_linear(
    kind: str,
    x: torch.Tensor,
    data: torch.Tensor,
    scales: list[torch.Tensor],
    bias: torch.Tensor | None,
    rotated: int,
) -> torch.Tensor:
    """Return the result of a layer in INT8 or W4A8, (…, out), in the dtype of `x`, by comfy-kitchen.

    Args:
        x: (…, in), 16 or 32 bits; its rows are rounded to 8 bits.
        data, scales: see `read_weights`.
        rotated: see `StoredWeight`.
    """
    package: Any = import_module("comfy_kitchen")
    if kind == INT8:
        (scale,) = scales
        how = {"convrot": True, "convrot_groupsize": rotated} if rotated else {}
        product: torch.Tensor = package.int8_linear(x, data, scale, bias, out_dtype=x.dtype, **how)
        return product
    groups, per_row, *table = scales
    rows, columns = data.shape[0], data.shape[1] * 2
    groups = groups.reshape(rows, -1)
    product = package.w4a8_int8_linear(
        x,
        data,
        groups,
        per_row.reshape(rows),
        table[0].reshape(-1) if table else None,
        bias=bias,
        group_size=columns // groups.shape[1],
        convrot_groupsize=rotated,
        out_dtype=x.dtype,
    )
    return product


@int8_linear.register_fake
def _(
    kind: str,
    x: torch.Tensor,
    data: torch.Tensor,
    scales: list[torch.Tensor],
    bias: torch.Tensor | None,
    rotated: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], data.shape[0]))


def read_weights(
    weights: Mapping[str, StoredWeight], device: str | torch.device
) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor]]]:
    """Yield each weight's name, its data as `PackedLinear.weight`, and its scales, in the order of the files."""
    places = {(name, number): part for name, weight in weights.items() for number, part in enumerate(weight.parts)}
    in_order = dict(sorted(places.items(), key=lambda place: (place[1].path, place[1].offset)))
    tensors: dict[str, dict[int, torch.Tensor]] = {}
    for (name, number), tensor in read_tensors(in_order, device):
        parts = tensors.setdefault(name, {})
        parts[number] = tensor
        if len(parts) == len(weights[name].parts):
            yield name, _in_rows(weights[name], parts[0]), [parts[index] for index in range(1, len(parts))]
            del tensors[name]


def read_plain(stored: StoredWeight, files: MappedFiles, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in its shape, dequantized."""
    data, *scales = map(files.tensor, stored.parts)
    return plain(stored, _in_rows(stored, data), scales, dtype)


def _in_rows(stored: StoredWeight, data: torch.Tensor) -> torch.Tensor:
    """Return GGUF's blocks of a matrix as rows of bytes, and other data as it is."""
    blocks = stored.data.dtype not in DTYPES and len(stored.shape) == 2  # noqa: PLR2004
    return data.reshape(stored.shape[0], -1) if blocks else data


def plain(stored: StoredWeight, data: torch.Tensor, scales: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in its shape, dequantized; see `read_weights`."""
    if stored.added:
        return plain(replace(stored, added=0.0), data, scales, torch.float32).sub(stored.added).to(dtype)
    if stored.kind == PLAIN:
        # GGUF's original shape may have another number of axes.
        return data.reshape(stored.shape).to(dtype)
    return dequantize(stored.kind, data, scales, dtype, stored.rotated).reshape(stored.shape).to(dtype)


def dequantize(
    kind: str, data: torch.Tensor, scales: list[torch.Tensor], dtype: torch.dtype, rotated: int = 0
) -> torch.Tensor:
    """Return the values of quantized data, in float32, or in float16 for GGUF where `dtype` has 16 bits.

    Args:
        data: see `read_weights`.
        scales: see `models.stored_weights`.
        rotated: see `StoredWeight`.
    """
    if kind in {COMFY_NVFP4, MXFP8, INT8, W4A8}:
        return _turned_back(_dequantize_comfy(kind, data, scales), rotated)
    if kind == FP8_STORED:
        weight: torch.Tensor = data.float()
        if not scales:
            return weight
        scale = scales[0].float()
        return weight * (scale if scale.numel() == 1 else scale.reshape(-1, *[1] * (weight.ndim - 1)))
    if kind == NVFP4:
        blocks, whole = scales
        scale = blocks.float().reshape(data.shape[0], -1, 1) * whole.float().reshape(())
        return _scaled(_in_pairs(data, _float_pairs(data.device)), scale)
    from runtime.upstream.diffusers import dequantize_gguf

    inner = torch.float32 if dtype == torch.float32 else torch.float16
    values: torch.Tensor = dequantize_gguf(kind, data, inner)
    return values


def _dequantize_comfy(kind: str, data: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
    """Return the values of data in a format of comfy-kitchen, in float32, rotated as stored."""
    rows = data.shape[0]
    if kind == INT8:
        return data.float() * scales[0].float().reshape(-1, 1)
    if kind == MXFP8:
        return _scaled(data.float(), _untiled(scales[0], rows, data.shape[1] // MXFP8_BLOCK))
    if kind == COMFY_NVFP4:
        blocks, whole, *columns = scales
        scale = _untiled(blocks, rows, data.shape[1] * 2 // NVFP4_BLOCK) * whole.float().reshape(())
        weight = _scaled(_in_pairs(data, _float_pairs(data.device).flip(1)), scale)
        return weight.mul_(columns[0].float().reshape(1, -1)) if columns else weight
    groups, per_row, *table = scales
    values = table[0].float().reshape(-1) if table else torch.arange(-8.0, 8.0, device=data.device)
    # Rounded, because the kernels multiply whole numbers.
    whole_numbers = _scaled(_in_pairs(data, _pairs(values)), groups.float().reshape(rows, -1, 1))
    return whole_numbers.round_().clamp_(-127, 127).mul_(per_row.float().reshape(-1, 1))


@cache
def _float_pairs(device: torch.device) -> torch.Tensor:
    """Return `_pairs` of floats of four bits, float32."""
    return _pairs(torch.tensor(_E2M1, dtype=torch.float32, device=device))


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Return the values of both codes of each byte, (256, 2), that in the lower half first.

    Args:
        values: of the codes of four bits, (16,).
    """
    codes = torch.arange(256, device=values.device)
    return values[torch.stack((codes & 0xF, codes >> 4), dim=-1)]


def _in_pairs(data: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the values of bytes (out, in / 2) as (out, in), a new tensor."""
    return pairs[data.view(torch.uint8).int()].reshape(data.shape[0], -1)


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply groups of columns of (out, in), which are written over, by scales (out, groups, 1)."""
    rows, groups = scales.shape[:2]
    return values.reshape(rows, groups, -1).mul_(scales).reshape(rows, -1)


def _untiled(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales (rows, columns, 1) in float32 from tiles.

    A tile has 128 rows of 4 scales: its rows r, r + 32, r + 64 and r + 96 follow one another
    (https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout).
    """
    across = -(-columns // TILE_COLUMNS)
    tiles = scales.reshape(-1, across, TILE_ROWS // 4, 4, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, across * TILE_COLUMNS)[:rows, :columns].unsqueeze(-1).float()


def _turned_back(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a weight (out, in) whose groups of columns were rotated; unchanged if there are 0 columns in a group."""
    if not columns:
        return weight
    grouped = weight.reshape(weight.shape[0], -1, columns)
    return (grouped @ _hadamard(columns, weight.device)).reshape(weight.shape)


@cache
def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Return the Hadamard matrix of ConvRot, symmetric and orthogonal: (size, size), float32.

    Args:
        size: a power of 4.
    """
    smallest = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
    matrix = smallest
    while len(matrix) < size:
        matrix = torch.kron(matrix, smallest)
    return (matrix / math.sqrt(size)).to(device)
