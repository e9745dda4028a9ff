"""Reads model folders in diffusers' format without torch: JSON files, headers of safetensors files, `tandem.json`.

Format of safetensors: https://huggingface.co/docs/safetensors/index (8 bytes of length, JSON, tensors).
"""

import json
from math import prod
from pathlib import Path
from typing import Any

from runtime.core.errors import ModelError
from runtime.models.spec import Defaults, LatentRgb

_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


def read_json(path: Path) -> dict[str, Any]:
    """Read a configuration file of a model folder.

    Raises:
        ModelError: if it is missing, not JSON, or not a JSON object.
    """
    file = f"{path.parent.name}/{path.name}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError("model.file_missing", file=file) from error
    except ValueError as error:
        raise ModelError("model.file_not_json", file=file) from error
    if not isinstance(value, dict):
        raise ModelError("model.file_not_object", file=file)
    return value


def damaged(title: str, error: Exception) -> ModelError:
    """Return the error for an incomplete or invalid configuration.

    Args:
        title: the model's name in the message.
        error: the KeyError, TypeError or ValueError from reading it.
    """
    return ModelError("model.config_invalid", model=title, detail=str(error))


def has_component(index: dict[str, Any], component: str) -> bool:
    """Return whether `model_index.json` names a class for a component."""
    entry = index.get(component)
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None  # noqa: PLR2004 - [library, class]


def refuse_pickles(directory: Path) -> None:
    """Check that a folder holds no pickled weights, which can run code when loaded.

    Raises:
        ModelError: naming the first such file.
    """
    for path in sorted(directory.rglob("*")):
        if path.suffix.lower() in _PICKLE_SUFFIXES:
            raise ModelError("model.pickled", file=path.relative_to(directory))


def weight_files(component: Path) -> list[Path]:
    """Return the safetensors files of a component: those that its index names, if it has one.

    Raises:
        ModelError: if there are none, or the index names a file outside the folder.
    """
    index_files = sorted(component.glob("*.safetensors.index.json"))
    if index_files:
        names = set(read_json(index_files[0])["weight_map"].values())
    else:
        names = {
            name
            for name in ("diffusion_pytorch_model.safetensors", "model.safetensors")
            if (component / name).is_file()
        }
    if not names:
        raise ModelError("model.weights_missing", component=component.name)
    for name in names:
        if Path(name).name != name:
            raise ModelError("model.weights_outside", component=component.name)
    return [component / name for name in sorted(names)]


def count_parameters(component: Path, tied: tuple[str, str] | None = None) -> int:
    """Return the number of weights in a component's files.

    Args:
        tied: two names of one tensor; if files hold both, it counts once.
    """
    sizes: dict[str, int] = {}
    for path in weight_files(component):
        sizes |= tensor_sizes(path)
    if tied is not None and tied[0] in sizes:
        sizes.pop(tied[1], None)
    return sum(sizes.values())


def tensor_sizes(path: Path) -> dict[str, int]:
    """Return the number of weights of each tensor in a safetensors file, by name.

    Raises:
        ModelError: if the file cannot be read, is truncated or is not safetensors.
    """
    header, start = read_header(path)
    size = path.stat().st_size
    try:
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if start + end != size:
            raise _damaged_file(path, size)
        return {name: prod(tensor["shape"]) for name, tensor in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged_file(path, size) from error


def tensor_types(component: Path) -> dict[str, tuple[str, int]]:
    """Return the dtype, as safetensors names it, and the number of weights of each tensor of a component, by name.

    Raises:
        ModelError: see `tensor_sizes` and `weight_files`.
    """
    found: dict[str, tuple[str, int]] = {}
    for path in weight_files(component):
        header, _ = read_header(path)
        found |= {name: (str(header[name].get("dtype")), count) for name, count in tensor_sizes(path).items()}
    return found


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header as parsed JSON, and the byte at which its tensors start.

    Raises:
        ModelError: if the file cannot be read or does not start with a header.
    """
    size = 0
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise _damaged_file(path, size)
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError("model.file_unreadable", file=path.name, path=path, reason=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise _damaged_file(path, size) from error
    if not isinstance(header, dict):
        raise _damaged_file(path, size)
    return header, _LENGTH_BYTES + length


def _damaged_file(path: Path, size: int) -> ModelError:
    return ModelError("model.file_damaged", file=f"{path.parent.name}/{path.name}", size=size)


def read_sidecar(directory: Path, experts: int) -> dict[str, Any] | None:
    """Read `tandem.json`: arguments of `ModelSpec` that diffusers' configurations do not contain.

    Returns:
        `title`, `license`, `latent_rgb`, `defaults`, `sizes` and `frame_counts`, or `None` without such a file.

    Raises:
        KeyError, TypeError, ValueError: if it is incomplete or invalid.
        ModelError: if it is not JSON.
    """
    path = directory / "tandem.json"
    if not path.is_file():
        return None
    config = read_json(path)
    factors, bias = config.get("latent_rgb_factors"), config.get("latent_rgb_bias")
    second = config["defaults"].get("guidance_scale_2")
    return {
        "title": str(config.get("title") or directory.name),
        "license": str(config.get("license") or "unknown"),
        "latent_rgb": LatentRgb(tuple((r, g, b) for r, g, b in factors), tuple(bias)) if factors and bias else None,
        "defaults": Defaults(
            width=int(config["defaults"]["width"]),
            height=int(config["defaults"]["height"]),
            frames=int(config["defaults"]["frames"]),
            fps=int(config["defaults"]["fps"]),
            steps=int(config["defaults"]["steps"]),
            guidance_scale=float(config["defaults"]["guidance_scale"]),
            guidance_scale_2=float(second) if experts > 1 and second is not None else None,
            negative_prompt=str(config["defaults"].get("negative_prompt") or ""),
        ),
        "sizes": tuple((int(w), int(h)) for w, h in config["sizes"]),
        "frame_counts": tuple(int(n) for n in config["frame_counts"]),
    }
