"""Finds the LoRAs that a request names and puts them into a model's spec: what loads or identifies weights reads them
there. Imports no torch.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.loras import BOTH, SUFFIX, Lora, LoraUse
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import find, look_up
from runtime.models.lora_files import check_fits, distilled_steps, read_lora
from runtime.models.spec import ModelSpec

_FOLDER = "loras"
# As the files of two-expert LoRAs are called.
_EXPERT_NAMES = {"high_noise": "high", "high-noise": "high", "low_noise": "low", "low-noise": "low"}


def loras_dir(weights_dir: Path) -> Path:
    """Return the folder in which LoRAs are known by name."""
    return weights_dir / _FOLDER


def named_loras(weights_dir: Path) -> list[str]:
    """Return the names of the LoRAs in the cache: paths below its folder, without suffix, as in "lightning/high_noise".

    One that leads out of the folder, by a link, is none of them.
    """
    folder = loras_dir(weights_dir)
    paths = (path for path in sorted(folder.rglob(f"*{SUFFIX}")) if _inside(path, folder))
    return [path.relative_to(folder).with_suffix("").as_posix() for path in paths]


def model_for(request: GenerationRequest, weights_dir: Path, *, here: bool = True) -> ModelSpec:
    """Return the model that a request names, with its LoRAs.

    Args:
        here: whether its weights must be here.

    Raises:
        ModelError: if there is none, or it or a LoRA cannot be used.
        InvalidRequestError: if a LoRA is for an expert that the model has not.
    """
    spec = (find if here else look_up)(request.model, weights_dir)
    return with_loras(spec, request.loras, weights_dir)


def with_loras(spec: ModelSpec, asked: Sequence[Lora], weights_dir: Path) -> ModelSpec:
    """Return a model with LoRAs, each found, read through and checked against its architecture.

    One that was distilled for few steps sets the model's defaults: so many steps, no guidance.

    Raises:
        ModelError: if one is not there, damaged or of another model.
        InvalidRequestError: if one is for an expert that the model has not.
    """
    uses = tuple(_use(spec, lora, weights_dir) for lora in asked)
    steps = [use.steps for use in uses if use.steps is not None]
    if not steps:
        return replace(spec, loras=uses)
    defaults = spec.defaults
    second = None if defaults.guidance_scale_2 is None else 1.0
    quick = replace(defaults, steps=max(steps), guidance_scale=1.0, guidance_scale_2=second)
    return replace(spec, loras=uses, defaults=quick)


def _use(spec: ModelSpec, lora: Lora, weights_dir: Path) -> LoraUse:
    path = _path(lora, loras_dir(weights_dir))
    expert = lora.expert
    if expert == BOTH:
        expert = next((name for text, name in _EXPERT_NAMES.items() if text in path.stem.lower()), BOTH)
    if spec.experts == 1 and expert != BOTH:
        raise InvalidRequestError(
            "loras",
            f"The LoRA {path.stem} is for the {expert}-noise expert, and {spec.title} has one transformer.",
            "Give a LoRA for this model, without high= or low=.",
        )
    file = read_lora(path)
    check_fits(path.stem, file, spec)
    return LoraUse(
        file=lora.file, path=path, digest=file.digest, weight=lora.weight, expert=expert, steps=distilled_steps(path)
    )


def _path(lora: Lora, folder: Path) -> Path:
    for candidate in (folder / lora.file, folder / f"{lora.file}{SUFFIX}"):
        if candidate.suffix == SUFFIX and _is_file(candidate) and _inside(candidate, folder):
            return candidate.resolve()
    if lora.is_name:
        raise ModelError(
            f"There is no LoRA called {lora.file}.",
            f"Put its .safetensors file into {folder}, or give the file's path.",
        )
    path = Path(lora.file)
    with contextlib.suppress(RuntimeError):  # ~somebody
        path = path.expanduser()
    if not _is_file(path):
        raise ModelError(
            f"There is no LoRA file {lora.file}.",
            f"Give the path of a .safetensors file, or put one into {folder} and give its name.",
        )
    return path.resolve()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a link that leads nowhere or in a circle
        return False
