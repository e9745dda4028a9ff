"""The weights of a transformer as files store them, quantized or not, read from headers without torch.

    kind        data, and what the file stores with it
    plain       float32, float16 or bfloat16
    fp8         float8, with a scale for the tensor or for each row, or none: ComfyUI's `scale_weight` and
                `weight_scale`, ModelOpt's `weight_scale`, torchao's `_weight_scale`
    nvfp4       two values of 4 bits a byte, the first in the lower half; a float8 scale for each 16 values in
                `weight_scale` and a float32 scale in `weight_scale_2`: ModelOpt's export
    Q4_K, …     GGUF's types

ComfyUI names the format of a layer in a tensor `comfy_quant`, or in the file's metadata; comfy-kitchen 0.2.40 defines:

    comfy_nvfp4 as nvfp4, but the first value is in the upper half, and the scales of blocks are in tiles as the GPU's
                matrix units read them; `pre_quant_scale` multiplies the columns
    mxfp8       float8; a scale for each 32 values, an exponent of 8 bits, in the same tiles
    int8        with a float32 scale for the tensor or for each row; perhaps rotated
    w4a8        two places of a table of 16 values a byte, the first in the lower half; a float8 scale for each group of
                values in `weight_s_rel`, a float32 scale for each row in `weight_s_channel`, the table in
                `weight_codebook`; without it the values are -8 to 7; rotated

Rotated: each group of columns was multiplied by a Hadamard matrix (ConvRot, https://arxiv.org/abs/2512.03673).

Scales of activations are not used: activations are not quantized. Nothing is unpickled.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from runtime.core.errors import ModelError
from runtime.core.untrusted_files import open_file, parse_json
from runtime.models import gguf_files
from runtime.models.gguf_files import read_gguf_header
from runtime.models.tensor_files import read_header, unreadable

PLAIN, FP8_STORED, NVFP4 = "plain", "fp8", "nvfp4"
COMFY_NVFP4, MXFP8, INT8, W4A8 = "comfy_nvfp4", "mxfp8", "int8", "w4a8"
# The columns that comfy-kitchen's kernels for W4A8 rotate together.
_W4A8_ROTATED = 256
# Values that share a scale.
NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
# Tiles of scales: 128 rows of 4.
TILE_ROWS, TILE_COLUMNS = 128, 4
# Places in the table of W4A8.
_CODES = 16
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALES = _PLAIN | {"F8_E4M3"}
# The bits of an exponent, of which all are set in values that are not finite; in float8, which has no infinity, with
# those of the mantissa.
_EXPONENTS: Mapping[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E4M3": ("u1", 0x7F),
    "F8_E8M0": ("u1", 0xFF),
}
# Larger ones, of NVFP4's blocks, take too long to read for a plan.
_MOST_SCALE_BYTES = 1 << 20
# What a tensor is to the weight of its layer, by the end of its name.
_PARTS: Mapping[str, str] = {
    "._weight_qdata": "data",
    ".scale_weight": "scale",
    ".weight_scale": "scale",
    "._weight_scale": "scale",
    ".weight_quantizer._scale": "scale",
    ".weight_scale_2": "scale_2",
    ".weight_quantizer._double_scale": "scale_2",
    ".weight_s_rel": "scale",
    ".weight_s_channel": "scale_2",
    ".weight_codebook": "table",
    ".pre_quant_scale": "columns",
    ".comfy_quant": "unused",
    ".scale_input": "unused",
    ".input_scale": "unused",
    ".weight_quantizer._amax": "unused",
    ".input_quantizer._amax": "unused",
}
# ComfyUI marks files of the kind fp8 with an empty tensor.
_MARKER = "scaled_fp8"
# Where ComfyUI's files name the formats of layers, and what it calls them.
_FORMAT_OF_LAYER, _FORMATS_OF_LAYERS = ".comfy_quant", "_quantization_metadata"
_COMFY_KINDS: Mapping[str, str] = {
    "nvfp4": COMFY_NVFP4, "mxfp8": MXFP8, "int8_tensorwise": INT8, "asym_w4a8_int8": W4A8,
}  # fmt: skip
_COMFY_FP8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
_MOST_FORMAT_BYTES = 1 << 10
_DEFAULT_ROTATION, _MOST_ROTATION = 256, 4096
_TITLES: Mapping[str, str] = {NVFP4: "NVFP4", COMFY_NVFP4: "NVFP4", MXFP8: "MXFP8", INT8: "INT8", W4A8: "W4A8"}
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_NAME_LENGTH = 80


@dataclass(frozen=True, slots=True)
class ComfyFormat:
    """The format of a layer's weight, as ComfyUI's files state it.

    Attributes:
        name: ComfyUI's, such as "int8_tensorwise".
        rotated: the number of columns that were rotated together, 0 for none.
    """

    name: str
    rotated: int = 0


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file.

    Attributes:
        dtype: as safetensors or GGUF names it.
        offset, nbytes: the place of its data in the file.
        format: that of the weight whose data it is, if the file states one.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    format: ComfyFormat | None = None

    def rows(self, number: int, count: int) -> "FileTensor":
        """Return one of `count` equal parts along the first axis, which is stored in order in all formats."""
        nbytes = self.nbytes // count
        shape = (self.shape[0] // count, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + number * nbytes, nbytes=nbytes)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A parameter of a module.

    Attributes:
        kind: see the module.
        shape: of the parameter.
        scales: in the order of the table.
        rotated: the number of columns that were rotated together, 0 for none.
        added: what the file adds to each value, as GGUF's tools do to the weights of some norms.
    """

    kind: str
    shape: tuple[int, ...]
    data: FileTensor
    scales: tuple[FileTensor, ...] = ()
    rotated: int = 0
    added: float = 0.0

    @property
    def elements(self) -> int:
        """The number of values."""
        return prod(self.shape)

    @property
    def parts(self) -> tuple[FileTensor, ...]:
        """Data and scales."""
        return (self.data, *self.scales)

    @property
    def nbytes(self) -> int:
        """The bytes of data and scales."""
        return sum(part.nbytes for part in self.parts)

    def rows(self, number: int, count: int) -> "StoredWeight":
        """Return one of `count` equal parts of the rows, in the same file; their number is a multiple of `count`."""
        scales = tuple(scale if prod(scale.shape) == 1 else scale.rows(number, count) for scale in self.scales)
        shape = (self.shape[0] // count, *self.shape[1:])
        return replace(self, shape=shape, data=self.data.rows(number, count), scales=scales)

    @property
    def as_vector(self) -> "StoredWeight":
        """The same values without the axes of one, if one other axis is left; the weight itself otherwise."""
        if max(self.shape, default=0) != self.elements:
            return self
        shape = (self.elements,)
        return replace(self, shape=shape, data=replace(self.data, shape=shape))


def in_int8(kind: str, rotated: int) -> bool:
    """Return whether comfy-kitchen's kernels multiply weights of a format as whole numbers of 8 bits."""
    return kind == INT8 or (kind == W4A8 and rotated == _W4A8_ROTATED)


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The files of a component that no library loads as they are.

    Attributes:
        paths: the files.
        config: arguments of the class in diffusers.
        weights: by the names of the class.
        title: the format, for people.
        in_int8: whether kernels multiply some weights as whole numbers of 8 bits.
        packed_weights, packed_bytes: number and bytes of the weights that stay quantized in memory, and the bytes of
            LoRAs that are added to them.
    """

    paths: tuple[Path, ...]
    config: Mapping[str, Any] = field(repr=False)
    weights: Mapping[str, StoredWeight] = field(repr=False)
    title: str
    packed_weights: int
    packed_bytes: int
    in_int8: bool = False

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(weight.elements for weight in self.weights.values())

    @classmethod
    def of(
        cls, weights: Mapping[str, StoredWeight], config: Mapping[str, Any], unquantized: Sequence[str] | None
    ) -> "WeightFiles":
        """Return the files of these weights.

        Args:
            unquantized: see `stays_packed`; `None` if all weights are dequantized when they are loaded.
        """
        packed = []
        if unquantized is not None:
            packed = [weight for name, weight in weights.items() if stays_packed(name, weight, unquantized)]
        return cls(
            paths=tuple(sorted({weight.data.path for weight in weights.values()})),
            config=config,
            weights=weights,
            title=_title(weights),
            packed_weights=sum(weight.elements for weight in packed),
            packed_bytes=sum(weight.nbytes for weight in packed),
            in_int8=any(in_int8(weight.kind, weight.rotated) for weight in packed),
        )


def stays_packed(name: str, weight: StoredWeight, unquantized: Sequence[str]) -> bool:
    """Return whether a weight stays quantized in memory: that of a linear layer of a transformer's blocks.

    Args:
        unquantized: see `ModelSpec.unquantized`.
    """
    matrix = weight.kind != PLAIN and name.endswith(".weight") and len(weight.shape) == 2  # noqa: PLR2004
    return matrix and not is_unquantized(name, unquantized)


def is_unquantized(name: str, unquantized: Sequence[str]) -> bool:
    """Return whether a parameter is of a layer that keeps its precision, as diffusers' quantizers compare names.

    Args:
        unquantized: see `ModelSpec.unquantized`.
    """
    return any(f"{part}." in name or part == name for part in unquantized)


def file_tensors(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors or GGUF file, by its first bytes, not by its name.

    Raises:
        ModelError: if it is pickled, of another format, damaged, or cannot be read.
    """
    try:
        with open_file(path) as file:
            start, size = file.read(8), os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if start.startswith(_PICKLES):
        raise ModelError("model.pickled", file=path.name)
    if start.startswith(gguf_files.MAGIC):
        tensors = read_gguf_header(path).items()
        return {
            name: FileTensor(path, tensor.type, tensor.shape, tensor.offset, tensor.nbytes) for name, tensor in tensors
        }
    if size < len(start) or int.from_bytes(start, "little") > size:
        raise ModelError("model.file_no_format", file=path.name)
    header = read_header(path)
    found = {
        name: FileTensor(
            path, tensor.dtype, tensor.shape, header.start + tensor.data_offsets[0], _bytes(tensor.data_offsets)
        )
        for name, tensor in header.tensors.items()
    }
    for layer, stated in _comfy_formats(found, header.metadata).items():
        weight = f"{layer}.weight"
        if weight in found:
            found[weight] = dataclasses.replace(found[weight], format=stated)
    return found


def _bytes(offsets: tuple[int, int]) -> int:
    return offsets[1] - offsets[0]


def _comfy_formats(tensors: Mapping[str, FileTensor], metadata: Mapping[str, str]) -> dict[str, ComfyFormat]:
    """Return the formats that a file states for its layers, by the layers' names.

    Raises:
        ModelError: if one is not stated as ComfyUI states it, or the file cannot be read.
    """
    stated: dict[str, ComfyFormat] = {}
    text = metadata.get(_FORMATS_OF_LAYERS)
    if text is not None:
        path = next(iter(tensors.values())).path if tensors else Path()
        layers = _parsed(text.encode(), path, _FORMATS_OF_LAYERS).get("layers")
        for layer, values in (layers if isinstance(layers, dict) else {}).items():
            stated[layer] = _comfy_format(values, path, layer)
    blobs = {name: tensor for name, tensor in tensors.items() if name.endswith(_FORMAT_OF_LAYER)}
    if not blobs:
        return stated
    path = next(iter(blobs.values())).path
    try:
        with open_file(path) as file:
            for name, tensor in sorted(blobs.items(), key=lambda entry: entry[1].offset):
                file.seek(tensor.offset)
                values = _parsed(file.read(min(tensor.nbytes, _MOST_FORMAT_BYTES)), path, name)
                stated[name.removesuffix(_FORMAT_OF_LAYER)] = _comfy_format(values, path, name)
    except OSError as error:
        raise unreadable(path, error) from error
    return stated


def _parsed(data: bytes, path: Path, name: str) -> dict[str, Any]:
    try:
        values = parse_json(data)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ModelError("model.format_not_stated", file=path.name, tensor=name[:_MAX_NAME_LENGTH])
    return values


def _comfy_format(values: object, path: Path, name: str) -> ComfyFormat:
    """Return the format of a layer: `format`, and of rotated ones `convrot` and `convrot_groupsize`."""
    values = values if isinstance(values, dict) else {}
    more = values.get("params")
    values = (more if isinstance(more, dict) else {}) | values
    stated, columns = values.get("format"), values.get("convrot_groupsize", _DEFAULT_ROTATION)
    rotated = stated == "asym_w4a8_int8" or values.get("convrot") is True
    # Hadamard matrices of this kind have a power of 4 as their size.
    possible = type(columns) is int and 4 <= columns <= _MOST_ROTATION and columns.bit_length() % 2  # noqa: PLR2004
    if not isinstance(stated, str) or (rotated and not (possible and columns & (columns - 1) == 0)):
        raise ModelError("model.format_not_stated", file=path.name, tensor=name[:_MAX_NAME_LENGTH])
    return ComfyFormat(stated[:_MAX_NAME_LENGTH], columns if rotated else 0)


def stored_weights(tensors: Mapping[str, FileTensor]) -> dict[str, StoredWeight]:
    """Return the parameters that the tensors of a transformer's files are, by name.

    Raises:
        ModelError: if one is of a format that cannot be read, or a scale does not fit.
    """
    parts: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] == _MARKER:
            continue
        end = next((end for end in _PARTS if name.endswith(end)), "")
        owner = f"{name.removesuffix(end)}.weight" if end else name
        by_role = parts.setdefault(owner, {})
        role = _PARTS.get(end, "data")
        if role in by_role and role != "unused":
            raise _unreadable(name, tensor)
        by_role[role] = tensor
    weights = {name: _weight(name, by_role) for name, by_role in parts.items()}
    _check_scales(weights)
    return weights


def _check_scales(weights: Mapping[str, StoredWeight]) -> None:
    """Check that scales are finite, and that none is missing where other matrices have one.

    Raises:
        ModelError: if not, or if a file cannot be read.
    """
    matrices = {
        name: weight
        for name, weight in weights.items()
        if weight.kind == FP8_STORED and len(weight.shape) == 2  # noqa: PLR2004
    }
    if any(weight.scales for weight in matrices.values()):
        for name, weight in matrices.items():
            if not weight.scales and name.endswith(".weight"):
                raise ModelError("model.scale_missing", file=weight.data.path.name, tensor=name[:_MAX_NAME_LENGTH])
    by_path: dict[Path, list[tuple[str, FileTensor]]] = {}
    for name, weight in weights.items():
        for scale in weight.scales:
            if scale.nbytes <= _MOST_SCALE_BYTES:
                by_path.setdefault(scale.path, []).append((name, scale))
    for path, scales in by_path.items():
        try:
            with open_file(path) as file:
                for name, scale in sorted(scales, key=lambda entry: entry[1].offset):
                    file.seek(scale.offset)
                    if not _is_finite(file.read(scale.nbytes), scale.dtype):
                        raise ModelError("model.scale_not_finite", file=path.name, tensor=name[:_MAX_NAME_LENGTH])
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error


def _is_finite(data: bytes, dtype: str) -> bool:
    """Return whether all values of a scale are finite: not all bits of the exponent are set, in float8 of all."""
    import numpy as np  # takes longer to import than most plans

    kind, exponent = _EXPONENTS[dtype]
    values = np.frombuffer(data, kind)
    return not bool(((values & exponent) == exponent).any())


def _weight(name: str, parts: Mapping[str, FileTensor]) -> StoredWeight:
    data = parts.get("data")
    if data is None:
        raise _unreadable(name, next(iter(parts.values())))
    scales = tuple(parts[role] for role in ("scale", "scale_2", "table", "columns") if role in parts)
    if data.format is not None and data.format.name not in _COMFY_FP8:
        return _comfy_weight(name, data, data.format, scales)
    if data.dtype in _PLAIN and not scales:
        return StoredWeight(PLAIN, data.shape, data)
    if data.dtype in _FP8 and len(scales) <= 1 and _scales_rows(data, scales):
        return StoredWeight(FP8_STORED, data.shape, data, scales)
    if data.dtype == "U8" and len(data.shape) == 2:  # noqa: PLR2004
        rows, columns = data.shape[0], 2 * data.shape[1]
        expected = [("F8_E4M3", rows * columns // NVFP4_BLOCK), ("F32", 1)]
        if columns % NVFP4_BLOCK == 0 and [(scale.dtype, prod(scale.shape)) for scale in scales] == expected:
            return StoredWeight(NVFP4, (rows, columns), data, scales)
    if data.dtype in {kind.name for kind in gguf_files.TYPES.values()} and not scales:
        return StoredWeight(data.dtype, data.shape, data)
    raise _unreadable(name, data)


def _comfy_weight(name: str, data: FileTensor, stated: ComfyFormat, scales: Sequence[FileTensor]) -> StoredWeight:
    """Return a weight in a format of comfy-kitchen; see the module.

    Raises:
        ModelError: if it is of another format, or its tensors do not fit each other.
    """
    kind = _COMFY_KINDS.get(stated.name)
    if kind is None or len(data.shape) != 2 or not prod(data.shape) or not scales:  # noqa: PLR2004
        raise ModelError(
            "model.format_unknown", file=data.path.name, tensor=name[:_MAX_NAME_LENGTH], dtype=stated.name[:20]
        )
    rows, columns = data.shape
    if kind in {COMFY_NVFP4, W4A8}:
        columns *= 2
    # The dtype of the data, and of each scale the dtypes and numbers of values that it may have.
    if kind == COMFY_NVFP4:
        dtype, step = "U8", NVFP4_BLOCK
        fits = [("F8_E4M3", {_tiled(rows, columns // step)}), ("F32", {1}), ("", {columns})]
    elif kind == MXFP8:
        dtype, step = "F8_E4M3", MXFP8_BLOCK
        fits = [("F8_E8M0", {_tiled(rows, columns // step)})]
    elif kind == INT8:
        dtype, step, fits = "I8", 1, [("F32", {1, rows})]
    else:
        groups = prod(scales[0].shape) // rows
        dtype, step = "I8", max(groups, 1)
        fits = [("F8_E4M3", {rows * groups}), ("F32", {rows}), ("F32", {_CODES})]
    # ComfyUI writes narrow floats as bytes, too.
    scales = [
        dataclasses.replace(scale, dtype=narrow) if scale.dtype == "U8" and narrow.startswith("F8") else scale
        for scale, (narrow, _) in zip(scales, fits, strict=False)
    ]
    least = 2 if kind in {COMFY_NVFP4, W4A8} else 1
    matching = least <= len(scales) <= len(fits) and all(
        (scale.dtype == needed or (not needed and scale.dtype in _PLAIN)) and prod(scale.shape) in sizes
        for scale, (needed, sizes) in zip(scales, fits, strict=False)
    )
    if not matching or data.dtype != dtype or columns % step or (stated.rotated and columns % stated.rotated):
        raise _unreadable(name, data)
    return StoredWeight(kind, (rows, columns), data, tuple(scales), stated.rotated)


def _tiled(rows: int, columns: int) -> int:
    """Return the number of scales in whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def _scales_rows(data: FileTensor, scales: Sequence[FileTensor]) -> bool:
    """Return whether there is no scale, one, or one for each row: along the first axis, not along another one."""
    return all(
        scale.dtype in _SCALES
        and (prod(scale.shape) == 1 or (scale.shape[:1] == data.shape[:1] and prod(scale.shape[1:]) == 1))
        for scale in scales
    )


def _unreadable(name: str, tensor: FileTensor) -> ModelError:
    return ModelError(
        "model.format_unknown", file=tensor.path.name, tensor=name[:_MAX_NAME_LENGTH], dtype=tensor.dtype[:20]
    )


def _title(weights: Mapping[str, StoredWeight]) -> str:
    """Return the format of most weights."""
    sizes: dict[str, int] = {}
    for weight in weights.values():
        name = weight.data.dtype if weight.kind == PLAIN else _title_of(weight)
        sizes[name] = sizes.get(name, 0) + weight.elements
    return max(sizes, key=lambda name: sizes[name])


def _title_of(weight: StoredWeight) -> str:
    if weight.kind == FP8_STORED:
        return "FP8 with scales" if weight.scales else "FP8"
    return _TITLES.get(weight.kind) or f"GGUF {weight.kind}"
