"""LoRA files: find them by name or path, validate them, and add them to a model's spec. Imports no torch.

Loading and engine keys read LoRAs from the spec. A file with a tensor that Tandem cannot apply is refused.
"""

import contextlib
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runtime.core.errors import InvalidRequestError, ModelError, TandemError
from runtime.core.loras import BOTH, SUFFIX, Expert, Lora, LoraUse
from runtime.core.untrusted_files import open_file, parse_json
from runtime.models.registry import LoraLayer, family_of
from runtime.models.single_file import LORAS
from runtime.models.spec import ModelSpec
from runtime.models.tensor_files import Header, read_header

# How files of two-expert LoRAs are named.
_EXPERT_NAMES: Mapping[str, Expert] = {
    "high_noise": "high",
    "high-noise": "high",
    "low_noise": "low",
    "low-noise": "low",
}
# Bytes per element, and bits: a number with all of them set is NaN or Inf.
_FLOATS = {
    "F32": (4, 0x7F800000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E4M3": (1, 0x7F),
    "F8_E5M2": (1, 0x7C),
}
# Of alpha, which some programs write as a number of Python's.
_INTEGERS = frozenset({"I32", "I64"})
_ALPHA = ".alpha"
_READ_BYTES = 1 << 22
# Where diffusers stores peft's configuration of the adapter, as JSON, and the prefix of its keys.
_ADAPTER = "lora_adapter_metadata"
_COMPONENT = "transformer."
# Axes of the weights that have two factors: of linear layers and of convolutions in time and space.
_FACTORED = frozenset({2, 5})
_MAX_NAME_LENGTH = 80


class _Adapter(BaseModel):
    """The values of peft's configuration that scale an adapter."""

    model_config = ConfigDict(frozen=True)

    lora_alpha: Annotated[float, Field(allow_inf_nan=False)]
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    use_rslora: bool = False
    use_dora: Literal[False] = False


@dataclass(frozen=True)
class LoraFile:
    """A validated file.

    Attributes:
        digest: sha256 in hexadecimal.
        shapes: of its tensors, by name.
        adapter: peft's configuration, if diffusers saved the file with one.
    """

    digest: str
    shapes: Mapping[str, tuple[int, ...]]
    adapter: _Adapter | None = None

    def alpha(self, layer: LoraLayer, rank: int) -> float:
        """Return the alpha of a layer without a tensor for it, by which, divided by the rank, its product is scaled.

        Patterns are module names or their ends, as regular expressions in peft; here they are compared as text.
        """
        if self.adapter is None:
            return rank
        given = self.adapter.alpha_pattern
        module = layer.modules[0]
        found = (given[one] for one in given if module == one or module.endswith(f".{one}"))
        alpha = next(found, self.adapter.lora_alpha)
        return alpha * math.sqrt(rank) if self.adapter.use_rslora else alpha


def loras_dir(weights_dir: Path) -> Path:
    """Return the folder whose LoRAs can be named without a path."""
    return weights_dir / LORAS


def with_loras(spec: ModelSpec, loras: Sequence[Lora], weights_dir: Path) -> ModelSpec:
    """Return a model with LoRAs, validated and checked against its architecture.

    A LoRA from step distillation sets the model's defaults: its number of steps, and no guidance. A guidance scale that
    is an input of the transformer stays.

    Raises:
        ModelError: if a LoRA is missing, damaged or for another model.
        InvalidRequestError: if a LoRA is for an expert that the model does not have.
    """
    uses = tuple(_use(spec, lora, weights_dir) for lora in loras)
    spec = _with_factors(spec, uses)
    steps = [use.steps for use in uses if use.steps is not None]
    if not steps:
        return replace(spec, loras=uses)
    defaults = spec.defaults
    first = defaults.guidance_scale if spec.embedded_guidance else 1.0
    second = None if defaults.guidance_scale_2 is None else 1.0
    distilled = replace(
        defaults,
        steps=max(steps),
        guidance_scale=first,
        guidance_scale_2=second,
        image_guidance_scale=None,
        image_guidance_scale_2=None,
    )
    return replace(spec, loras=uses, defaults=distilled)


def _with_factors(spec: ModelSpec, uses: Sequence[LoraUse]) -> ModelSpec:
    """Return a spec that counts the factors that are kept beside weights that are quantized in files."""
    files = {
        name: replace(own, packed_bytes=own.packed_bytes + sum(_bytes(use) for use in uses if use.changes(name)))
        if own.packed_weights
        else own
        for name, own in spec.files.items()
    }
    return replace(spec, files=files) if files else spec


def _bytes(use: LoraUse) -> int:
    try:
        return use.path.stat().st_size
    except OSError as error:
        raise _unreadable(use.path, error) from error


@dataclass(frozen=True)
class ListedLora:
    """A file in the folder of LoRAs.

    Attributes:
        name: as a request names it.
        expert: the only one that it changes, by its name.
        steps: see `LoraUse`.
        problem: why it cannot be used with a model, by the file's header.
    """

    name: str
    path: Path
    file_bytes: int
    modified: int
    expert: Expert = BOTH
    steps: int | None = None
    problem: TandemError | None = None


def listed(weights_dir: Path) -> list[ListedLora]:
    """Return the files in the folder of LoRAs by name, without opening them."""
    folder, found = loras_dir(weights_dir), []
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        name = path.relative_to(folder).as_posix().removesuffix(SUFFIX)
        with contextlib.suppress(OSError):
            stat = path.stat()
            if S_ISREG(stat.st_mode) and Lora(name).is_name and name.isprintable() and _inside(path, folder):
                found.append(ListedLora(name, path, stat.st_size, stat.st_mtime_ns))
    return found


def checked(lora: ListedLora, spec: ModelSpec) -> ListedLora:
    """Return a file's properties for a model. Only the header is read: the content is checked when it is used."""
    steps, expert = family_of(spec.family).distilled_steps(lora.path), _expert_of(lora.path)
    try:
        if spec.experts == 1 and expert != BOTH:
            raise _no_such_expert(lora.path, expert, spec)
        header = read_lora_header(lora.path)
        _check_fits(lora.path.stem, {name: tensor.shape for name, tensor in header.tensors.items()}, spec)
    except TandemError as error:
        return replace(lora, expert=expert, steps=steps, problem=error)
    return replace(lora, expert=expert, steps=steps)


def read_lora_header(path: Path) -> Header:
    """Read a LoRA's header.

    Raises:
        ModelError: if it is not a safetensors file of 8-, 16- or 32-bit floats; alpha can be an integer.
    """
    try:
        header = read_header(path)
    except ModelError as error:
        raise ModelError("lora.damaged", lora=path.name, cause=error.fact) from error
    for name, tensor in header.tensors.items():
        if tensor.dtype not in _FLOATS and not (tensor.dtype in _INTEGERS and name.endswith(_ALPHA)):
            raise ModelError("lora.dtype_unsupported", lora=path.name, dtype=tensor.dtype)
    return header


def _expert_of(path: Path) -> Expert:
    return next((name for text, name in _EXPERT_NAMES.items() if text in path.stem.lower()), BOTH)


def _no_such_expert(path: Path, expert: Expert, spec: ModelSpec) -> InvalidRequestError:
    return InvalidRequestError("loras", "lora.no_such_expert", lora=path.stem, expert=expert, model=spec.title)


def read_lora(path: Path) -> LoraFile:
    """Read and validate a LoRA's file; the result is cached until the file changes.

    Raises:
        ModelError: if it is not a complete safetensors file of 8-, 16- or 32-bit floats, or holds NaN or Inf.
    """
    if path.suffix.lower() != SUFFIX:
        raise ModelError("lora.not_safetensors", lora=path.name)
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _read(path, found.st_size, found.st_mtime_ns)


def _use(spec: ModelSpec, lora: Lora, weights_dir: Path) -> LoraUse:
    path = _path(lora, loras_dir(weights_dir))
    expert = lora.expert
    if expert == BOTH:
        expert = _expert_of(path)
    if spec.experts == 1 and expert != BOTH:
        raise _no_such_expert(path, expert, spec)
    file = read_lora(path)
    _check_fits(path.stem, file.shapes, spec)
    return LoraUse(
        file=lora.file,
        path=path,
        digest=file.digest,
        weight=lora.weight,
        expert=expert,
        steps=family_of(spec.family).distilled_steps(path),
    )


def _path(lora: Lora, folder: Path) -> Path:
    for candidate in (folder / lora.file, folder / f"{lora.file}{SUFFIX}"):
        if candidate.suffix == SUFFIX and _is_file(candidate) and _inside(candidate, folder):
            return candidate.resolve()
    if lora.is_name:
        raise ModelError("lora.unknown", lora=lora.file, folder=folder)
    path = Path(lora.file)
    with contextlib.suppress(RuntimeError):  # the home folder of an unknown user
        path = path.expanduser()
    if not _is_file(path):
        raise ModelError("lora.file_missing", file=lora.file, folder=folder)
    return path.resolve()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long or has a null byte
        return False


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a dangling or circular link
        return False


def _check_fits(name: str, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> None:
    """Check that every tensor of a LoRA applies to the model."""
    family = family_of(spec.family)
    layers: dict[LoraLayer, dict[str, tuple[int, ...]]] = {}
    for tensor, shape in shapes.items():
        change = family.lora_change(tensor)
        if change is None:
            raise ModelError("lora.unknown_tensor", lora=name, tensor=tensor[:_MAX_NAME_LENGTH], model=spec.title)
        found = layers.setdefault(change.layer, {})
        if change.role in found:
            raise ModelError("lora.duplicate_module", lora=name, module=change.layer.title)
        found[change.role] = shape
    if not any(set(found) - {"alpha"} for found in layers.values()):
        raise ModelError("lora.empty", lora=name)
    times = Counter(module for layer in layers for module in layer.modules)
    for layer, found in layers.items():
        _check_layer(name, spec, layer, found)
        for module in layer.modules:
            if times[module] > 1:  # as a layer of its own, and as a part of another
                raise ModelError("lora.duplicate_module", lora=name, module=module)


def _check_layer(name: str, spec: ModelSpec, layer: LoraLayer, found: Mapping[str, tuple[int, ...]]) -> None:
    module, wanted = layer.title, _shape(name, spec, layer)
    if ("down" in found) != ("up" in found):
        raise ModelError("lora.one_factor", lora=name, module=module)
    if "down" in found and "diff" in found:
        raise ModelError("lora.duplicate_module", lora=name, module=module)
    if "down" in found:
        down, up = found["down"], found["up"]
        # A convolution's kernel is in the first factor.
        if not len(down) == len(up) == len(wanted) or len(wanted) not in _FACTORED or set(up[2:]) - {1}:
            raise ModelError("lora.not_matrices", lora=name, module=module)
        if down[0] != up[1] or not down[0]:
            raise ModelError("lora.ranks_differ", lora=name, module=module, ranks=[down[0], up[1]])
        _check_shape(name, spec, module, (up[0], *down[1:]), wanted)
    if "diff" in found:
        _check_shape(name, spec, module, found["diff"], wanted)
    if "bias" in found:
        _check_shape(name, spec, f"{module}.bias", found["bias"], wanted[:1])
    if "alpha" in found and prod(found["alpha"]) != 1:
        raise ModelError("lora.alpha_invalid", lora=name, module=module)


def _shape(name: str, spec: ModelSpec, layer: LoraLayer) -> tuple[int | None, ...]:
    """Return the shape of a layer's weight."""
    family, shapes = family_of(spec.family), []
    for module in layer.modules:
        shape = family.lora_weight_shape(spec, module)
        if shape is None:
            raise ModelError("lora.larger_model", lora=name, module=module, model=spec.title)
        shapes.append(shape)
    if len(shapes) == 1:
        return shapes[0]
    return (sum(shape[0] or 0 for shape in shapes), *shapes[0][1:])


def _check_shape(
    name: str, spec: ModelSpec, module: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]
) -> None:
    if len(shape) != len(wanted) or any(want not in {None, have} for have, want in zip(shape, wanted, strict=True)):
        found, expected = ("×".join("?" if n is None else str(n) for n in sizes) for sizes in (shape, wanted))
        raise ModelError("lora.other_size", lora=name, module=module, shape=found, expected=expected, model=spec.title)


@functools.lru_cache(maxsize=64)
def _read(path: Path, _size: int, _changed: int) -> LoraFile:
    header = read_lora_header(path)
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
            for name, tensor in header.tensors.items():
                if tensor.dtype in _INTEGERS:
                    continue
                first, last = tensor.data_offsets
                file.seek(header.start + first)
                _check_finite(path, name, tensor.dtype, file, last - first)
    except OSError as error:
        raise _unreadable(path, error) from error
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    return LoraFile(digest.hexdigest(), shapes, _adapter(path, header))


def _adapter(path: Path, header: Header) -> _Adapter | None:
    """Return the configuration of the adapter in a file's metadata, if there is one."""
    text = header.metadata.get(_ADAPTER)
    if text is None:
        return None
    try:
        values = {key.removeprefix(_COMPONENT): value for key, value in parse_json(text.encode()).items()}
        return None if "lora_alpha" not in values else _Adapter.model_validate(values)
    except (ValueError, AttributeError) as error:  # no JSON, or no object
        raise ModelError("lora.metadata_invalid", lora=path.name) from error


def _check_finite(path: Path, name: str, dtype: str, file: Any, left: int) -> None:
    import numpy as np

    width, exponent = _FLOATS[dtype]
    while left:
        block = file.read(min(left, _READ_BYTES))
        if not block:  # the file became shorter
            raise ModelError("lora.changed", lora=path.name)
        left -= len(block)
        bits = np.frombuffer(block, dtype=np.dtype(f"<u{width}"))
        if ((bits & exponent) == exponent).any():
            raise ModelError("lora.not_finite", lora=path.name, tensor=name[:_MAX_NAME_LENGTH])


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError("lora.unreadable", lora=path.name, reason=error.strerror or str(error))
