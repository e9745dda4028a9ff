"""Linear layers whose weights stay in memory as files store them, and are dequantized at each call.

Formats: see `models.stored_weights`. LoRAs are kept as their factors and added to the dequantized weight, so that
it is not quantized again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from runtime.models.stored_weights import FP8_STORED, NVFP4, NVFP4_BLOCK, PLAIN, StoredWeight
from runtime.models.tensor_stream import DTYPES, MappedFiles, read_tensors

# The values of four bits: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class PackedLinear(nn.Linear):
    """A linear layer with a quantized weight.

    Attributes:
        weight: the data as stored: float8 (out, in), two values a byte (out, in / 2), or bytes of GGUF's blocks (out,
            bytes).
        kind: see `models.stored_weights`.
    """

    weight: nn.Parameter

    def __init__(self, like: nn.Linear, kind: str, data: torch.Tensor, scales: list[torch.Tensor]) -> None:
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, bias=like.bias is not None)
        self.kind = kind
        self.weight = nn.Parameter(data, requires_grad=False)
        for number, scale in enumerate(scales):
            self.register_buffer(f"scale_{number}", scale)
        self._scales = len(scales)
        self._added: list[tuple[float, tuple[str, ...], Callable[..., torch.Tensor]]] = []

    def add(
        self,
        strength: float,
        tensors: Mapping[str, torch.Tensor],
        change: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor],
    ) -> None:
        """Add `strength` times `change(weight, tensors)`, in float32 (out, in), to the weight."""
        number = len(self._added)
        for name, tensor in tensors.items():
            self.register_buffer(f"added_{number}_{name}", tensor.to(self.weight.device))
        self._added.append((strength, tuple(tensors), change))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight (out, in)."""
        scales = [getattr(self, f"scale_{number}") for number in range(self._scales)]
        weight = dequantize(self.kind, self.weight, scales, dtype)
        if not self._added:
            return weight.to(dtype)
        before = total = weight.float()
        for number, (strength, names, change) in enumerate(self._added):
            tensors = {name: getattr(self, f"added_{number}_{name}") for name in names}
            total = torch.add(total, change(before, tensors), alpha=strength)
        return total.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.dequantized(x.dtype), self.bias)


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
    return dequantize(stored.kind, data, scales, dtype).reshape(stored.shape).to(dtype)


def dequantize(kind: str, data: torch.Tensor, scales: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the values of quantized data, in float32, or in float16 for GGUF where `dtype` has 16 bits.

    Args:
        data: see `read_weights`.
        scales: one for the tensor or for each row; for NVFP4, those of blocks and that of the tensor.
    """
    if kind == FP8_STORED:
        weight: torch.Tensor = data.float()
        if not scales:
            return weight
        scale = scales[0].float()
        return weight * (scale if scale.numel() == 1 else scale.reshape(-1, *[1] * (weight.ndim - 1)))
    if kind == NVFP4:
        table = torch.tensor(_E2M1, dtype=torch.float32, device=data.device)
        codes = torch.stack((data & 0xF, data >> 4), dim=-1).reshape(data.shape[0], -1, NVFP4_BLOCK)
        blocks, whole = scales
        scale = blocks.float().reshape(data.shape[0], -1, 1) * whole.float().reshape(())
        return (table[codes.int()] * scale).reshape(data.shape[0], -1)
    from runtime.upstream.diffusers import dequantize_gguf

    inner = torch.float32 if dtype == torch.float32 else torch.float16
    values: torch.Tensor = dequantize_gguf(kind, data, inner)
    return values
