"""What of a job lies in its folder, told without reading its tensors."""

import contextlib
import json
from pathlib import Path

from runtime.core.errors import ModelError
from runtime.models.safetensors_header import read_header

POSTER = "poster.webp"
LATEST, BOUNDARY = "checkpoint.safetensors", "boundary.safetensors"
CHECKPOINTS = "*.safetensors"
# The key of a checkpoint's metadata that holds its facts, as JSON.
FACTS = "tandem"


def step_kept(folder: Path | None) -> int | None:
    """Return the step that a job goes on after; `None` if there is no checkpoint that can be read."""
    return None if folder is None else _newest(folder)[1]


def newest(folder: Path) -> Path:
    """Return the checkpoint that a job goes on from; it may not exist.

    That is the latest, unless a process ended after it had written the one between both experts and before it had
    named that the latest too.
    """
    return _newest(folder)[0]


def _newest(folder: Path) -> tuple[Path, int | None]:
    latest, between = folder / LATEST, folder / BOUNDARY
    at, ahead = _step(latest), _step(between)
    unnamed = ahead is not None and (not latest.exists() if at is None else at < ahead)
    return (between, ahead) if unnamed else (latest, at)


def _step(path: Path) -> int | None:
    if path.is_file():
        with contextlib.suppress(ModelError, ValueError, KeyError, TypeError):
            header, _ = read_header(path)
            return int(json.loads(header["__metadata__"][FACTS])["step"])
    return None
