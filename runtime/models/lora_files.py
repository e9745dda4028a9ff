"""Reads a LoRA's file without loading it: whole, its numbers numbers, its shapes those of a model. Imports no torch.

Nothing is changed in silence: a tensor that would be left out is a reason to refuse the file.
"""

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from runtime.core.errors import ModelError
from runtime.core.loras import SUFFIX
from runtime.models.registry import family_of
from runtime.models.safetensors_header import read_header
from runtime.models.spec import ModelSpec

# Bytes of an element, and the exponent's bits: all of them set, a number is NaN or Inf.
_FLOATS = {"F32": (4, 0x7F800000), "F16": (2, 0x7C00), "BF16": (2, 0x7F80)}
_READ_BYTES = 1 << 22
_ANOTHER = "Take one that was made for this model."
_DAMAGED = "Copy or download the LoRA again."
# Step distillation: the video in a few steps, without guidance. Such files are known by their makers' names.
_DISTILLED = re.compile(
    r"lightning|lightx2v|distill|causvid|accvid|turbo|fastwan|(?<!\d)\d{1,2}[\s_-]?steps?(?![a-z])", re.IGNORECASE
)
_STEPS = re.compile(r"(?<!\d)(\d{1,2})[\s_-]?steps?(?![a-z])", re.IGNORECASE)
_LIGHTX2V = re.compile(r"lightning|lightx2v", re.IGNORECASE)
# lightx2v's for its LoRAs of four steps, of Wan2.1 and Wan2.2 alike ("sample_shift" in https://github.com/ModelTC/LightX2V,
# configs/wan22/wan_moe_t2v_distill_lora.json and configs/distill/wan_t2v_distill_lora_4step_cfg.json).
# With it UniPC's four timesteps are 999, 937, 833 and 625; those of the training were 1000, 937.5, 833.3 and 625:
# https://github.com/ModelTC/LightX2V-Wan2.2-Lightning/issues/3.
LIGHTX2V_SHIFT = 5.0
_FEW_STEPS = 4
_MOST_DISTILLED = 16
_MATRIX = 2


@dataclass(frozen=True)
class LoraFile:
    """A file that was read through.

    Attributes:
        digest: its sha256 in hexadecimal.
        shapes: of its tensors, by name.
    """

    digest: str
    shapes: Mapping[str, tuple[int, ...]]


def read_lora(path: Path) -> LoraFile:
    """Read a LoRA's file through; one that has not changed since is read once.

    Raises:
        ModelError: if it is no whole safetensors file of 16- or 32-bit numbers, or holds NaN or Inf.
    """
    if path.suffix.lower() != SUFFIX:
        raise ModelError(
            f"The LoRA {path.name} is no safetensors file; others can run code when loaded.",
            "Take it in safetensors, or convert it.",
        )
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _read(path, found.st_size, found.st_mtime_ns)


def check_fits(name: str, file: LoraFile, spec: ModelSpec) -> None:
    """Check that every tensor of a LoRA changes one of the model's.

    Raises:
        ModelError: naming the first that does not.
    """
    family = family_of(spec.family)
    roles: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, shape in file.shapes.items():
        change = family.lora_change(tensor)
        if change is None:
            raise ModelError(f"The LoRA {name} changes {tensor[:80]!r}, which {spec.title} has not.", _ANOTHER)
        if change.role in roles.setdefault(change.module, {}):
            raise ModelError(f"The LoRA {name} changes {change.module} twice.", _DAMAGED)
        roles[change.module][change.role] = shape
    if not any(set(found) - {"alpha"} for found in roles.values()):
        raise ModelError(f"The LoRA {name} is empty: it changes nothing.", "Take another.")
    for module, found in roles.items():
        _check_module(name, spec, module, found)


def distilled_steps(path: Path) -> int | None:
    """Return how many steps a LoRA was distilled for, as its name or its folder's says; `None` if they do not say."""
    for text in (path.stem, path.parent.name):
        if _DISTILLED.search(text):
            steps = _STEPS.search(text)
            number = int(steps[1]) if steps else _FEW_STEPS
            return number if 0 < number <= _MOST_DISTILLED else None
    return None


def distilled_shift(path: Path) -> float | None:
    """Return the shift that a LoRA was distilled with, where its name or its folder's says whose it is."""
    return LIGHTX2V_SHIFT if any(_LIGHTX2V.search(text) for text in (path.stem, path.parent.name)) else None


def _check_module(name: str, spec: ModelSpec, module: str, found: Mapping[str, tuple[int, ...]]) -> None:
    wanted = family_of(spec.family).lora_weight_shape(spec, module)
    if wanted is None:
        raise ModelError(
            f"The LoRA {name} is for a larger model: it changes {module}, and {spec.title} has "
            f"{spec.transformer.num_layers} blocks.",
            _ANOTHER,
        )
    if ("down" in found) != ("up" in found):
        raise ModelError(f"The LoRA {name} is not whole: of {module} it has one factor of two.", _DAMAGED)
    if "down" in found and "whole" in found:
        raise ModelError(f"The LoRA {name} changes {module} twice.", _DAMAGED)
    if "down" in found:
        down, up = found["down"], found["up"]
        if len(down) != _MATRIX or len(up) != _MATRIX or len(wanted) != _MATRIX:
            raise ModelError(f"The LoRA {name} changes {module} by what is no pair of matrices.", _ANOTHER)
        if down[0] != up[1] or not down[0]:
            raise ModelError(
                f"The LoRA {name} is damaged: the factors of {module} have ranks {down[0]} and {up[1]}.", _DAMAGED
            )
        _check_shape(name, spec, module, (up[0], down[1]), wanted)
    if "whole" in found:
        _check_shape(name, spec, module, found["whole"], wanted)
    if "bias" in found:
        _check_shape(name, spec, f"{module}.bias", found["bias"], wanted[:1])
    if "alpha" in found and prod(found["alpha"]) != 1:
        raise ModelError(f"The LoRA {name} is damaged: the alpha of {module} is not one number.", _DAMAGED)


def _check_shape(
    name: str, spec: ModelSpec, module: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]
) -> None:
    if len(shape) != len(wanted) or any(want not in {None, have} for have, want in zip(shape, wanted, strict=True)):
        there, here = ("×".join("?" if n is None else str(n) for n in sizes) for sizes in (shape, wanted))
        raise ModelError(
            f"The LoRA {name} is for another size of model: {module} is {there} there and {here} in {spec.title}.",
            _ANOTHER,
        )


@functools.lru_cache(maxsize=64)
def _read(path: Path, size: int, _changed: int) -> LoraFile:
    try:
        header, start = read_header(path)
    except ModelError as error:
        raise ModelError(f"The LoRA {path.name} is damaged, cut short or no safetensors file.", _DAMAGED) from error
    tensors = {name: _tensor(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    end = max((offsets[1] for _, _, offsets in tensors.values()), default=0)
    if start + end != size:
        raise ModelError(f"The LoRA {path.name} is damaged or cut short ({size:,} bytes).", _DAMAGED)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
            for name, (dtype, _, (first, last)) in tensors.items():
                file.seek(start + first)
                _check_finite(path, name, dtype, file, last - first)
    except OSError as error:
        raise _unreadable(path, error) from error
    return LoraFile(digest.hexdigest(), {name: shape for name, (_, shape, _) in tensors.items()})


def _tensor(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and place of a tensor, as the header has them."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]} if all(
            type(n) is int and n >= 0 for n in shape
        ):
            if dtype not in _FLOATS:
                raise ModelError(
                    f"The LoRA {path.name} is in {dtype[:10]}, not in numbers of 16 or 32 bits.",
                    "Take it in float32, float16 or bfloat16.",
                )
            if 0 <= first <= last and last - first == prod(shape) * _FLOATS[dtype][0]:
                return dtype, tuple(shape), (first, last)
    raise ModelError(f"The LoRA {path.name} is damaged: its header is wrong about {name[:80]!r}.", _DAMAGED)


def _check_finite(path: Path, name: str, dtype: str, file: Any, left: int) -> None:
    import numpy as np

    width, exponent = _FLOATS[dtype]
    while left:
        block = file.read(min(left, _READ_BYTES))
        if not block:
            raise ModelError(f"The LoRA {path.name} is damaged or cut short.", _DAMAGED)
        left -= len(block)
        bits = np.frombuffer(block, dtype=np.dtype(f"<u{width}"))
        if ((bits & exponent) == exponent).any():
            raise ModelError(f"The LoRA {path.name} holds NaN or Inf, in {name[:80]!r}.", _DAMAGED)


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(
        f"The LoRA {path.name} cannot be read: {error.strerror or error}.", "Check the file and its permissions."
    )
