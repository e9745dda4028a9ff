"""Files in a job's folder, and the step of its checkpoint, read without torch."""

import contextlib
import json
from pathlib import Path

from runtime.core.errors import ModelError
from runtime.models.folder import read_header

# The newest preview of a running job; once its video is saved, the poster.
PREVIEW, POSTER = "preview.webp", "poster.webp"
LATEST, BOUNDARY = "checkpoint.safetensors", "boundary.safetensors"
CHECKPOINTS = "*.safetensors"
# The key of a checkpoint's metadata that holds its JSON header.
HEADER_KEY = "tandem"
# Request fields that may differ between runs of one clip: how it is computed and encoded.
HOW = (
    "backends",
    "build",
    "offload",
    "quantization",
    "on_out_of_memory",
    "attention",
    "compile",
    "vae_precision",
    "fps",
    "crf",
    "gpus",
)
# The field of the second transformer, which the first half of a clip does not depend on.
SECOND_HALF = "guidance_scale_2"


def checkpoint_step(folder: Path | None, name: str | None = None) -> int | None:
    """Return the step that a job resumes after; `None` without a readable checkpoint.

    Args:
        name: of the checkpoint's file; by default, the newest.
    """
    if folder is None:
        return None
    return _newest(folder)[1] if name is None else _step(folder / name)


def newest(folder: Path) -> Path:
    """Return the checkpoint that a job resumes from; it may not exist.

    It is the latest, or the one between the two transformers if the process was killed after writing that and before
    linking it as the latest.
    """
    return _newest(folder)[0]


def _newest(folder: Path) -> tuple[Path, int | None]:
    latest, boundary = folder / LATEST, folder / BOUNDARY
    latest_step, boundary_step = _step(latest), _step(boundary)
    if boundary_step is None:
        return latest, latest_step
    ahead = not latest.exists() if latest_step is None else latest_step < boundary_step
    return (boundary, boundary_step) if ahead else (latest, latest_step)


def _step(path: Path) -> int | None:
    if path.is_file():
        with contextlib.suppress(ModelError, ValueError, KeyError, TypeError):
            header, _ = read_header(path)
            return int(json.loads(header["__metadata__"][HEADER_KEY])["step"])
    return None
