"""Default paths of videos."""

import re
import secrets
from datetime import datetime, timezone
from pathlib import Path

from runtime.core.errors import OutputError

_SLUG_CHARACTERS = 40


def output_path(outputs_dir: Path, prompt: str) -> Path:
    """Return a new path that sorts by time and names the prompt: 20261120-091500-a-red-boat-1a2b3c.mp4."""
    now = datetime.now(timezone.utc).astimezone()
    return outputs_dir / f"{now:%Y%m%d-%H%M%S}-{slug(prompt) or 'video'}-{secrets.token_hex(3)}.mp4"


def slug(prompt: str) -> str:
    """Return a prompt as part of a file name; empty if it has no Latin letters."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:_SLUG_CHARACTERS].strip("-")


def make_folder(outputs_dir: Path) -> None:
    """Make the folder for videos if it is missing.

    Raises:
        OutputError: if it cannot be made.
    """
    try:
        outputs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("pipeline.outputs_folder", folder=outputs_dir, reason=error.strerror) from error
