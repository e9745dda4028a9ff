"""Files of a job, without torch: the default path of its video, its preview and poster, and its checkpoints."""

import contextlib
import re
import secrets
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from runtime.core.errors import ModelError, OutputError
from runtime.core.untrusted_files import parse_json
from runtime.models.spec import ModelSpec
from runtime.models.tensor_files import read_header

# The newest preview of a running job; once its video is saved, the poster.
PREVIEW, POSTER = "preview.webp", "poster.webp"
LATEST = "checkpoint.safetensors"
CHECKPOINTS = "*.safetensors"
# The folder of a video's finished sections, in that of the job's checkpoints.
SECTIONS = "sections"
# The folder of the clip that can be watched while a video is made: H.264 streams, and MP4 files that are named by their
# number of sections, or of frames if the video is made whole.
CLIP = "clip"
# The key of a checkpoint's metadata that holds its JSON header.
HEADER_KEY = "tandem"
# Request fields that may differ between runs of one clip: how it is computed and encoded.
COMPUTE_FIELDS = (
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
    "sound",
)
# And those of what is done with the decoded frames.
FINISHING_FIELDS = ("loop", "interpolate", "upscale", "upscaler")
# What identifies the files of each component of a model: name, size and time of each.
Stamps = Mapping[str, list[list[Any]]]
_SLUG_CHARACTERS = 40
_CLIP = re.compile(r"[0-9]{4,9}\.mp4")
# A page may still play the clip before the newest one.
_CLIPS_KEPT = 2


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
        OutputError: if it cannot be made, or nothing can be written to it.
    """
    try:
        outputs_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=outputs_dir):
            pass
    except OSError as error:
        raise OutputError("pipeline.outputs_folder", folder=outputs_dir, reason=error.strerror) from error


def finished_clip(folder: Path | None) -> tuple[int, Path] | None:
    """Return the newest clip of what is finished of a video, and its number; `None` if there is none.

    Args:
        folder: of the job's checkpoints.
    """
    if folder is None:
        return None
    with contextlib.suppress(OSError, ValueError):  # there is no folder, or none in it
        return max((int(path.stem), path) for path in (folder / CLIP).iterdir() if _CLIP.fullmatch(path.name))
    return None


def clip_of(folder: Path | None, count: int) -> Path | None:
    """Return the clip of so many finished sections or frames of a video; `None` if there is none.

    Args:
        folder: of the job's checkpoints.
    """
    path = None if folder is None else folder / CLIP / clip_name(count)
    return path if path is not None and path.is_file() else None


def clip_name(count: int) -> str:
    """Return the name of the clip of so many sections or frames."""
    return f"{count:04d}.mp4"


def remove_older_clips(folder: Path) -> None:
    """Remove the clips in a folder that no page plays any more."""
    numbers = sorted(int(path.stem) for path in folder.iterdir() if _CLIP.fullmatch(path.name))
    for number in numbers[:-_CLIPS_KEPT]:
        (folder / clip_name(number)).unlink()


def checkpoint_step(folder: Path | None) -> int | None:
    """Return the step that a job resumes after; `None` without a readable checkpoint."""
    return None if folder is None else _step(folder / LATEST)


def _step(path: Path) -> int | None:
    if path.is_file():
        with contextlib.suppress(ModelError, ValueError, KeyError, TypeError, OverflowError):
            header = parse_json(read_header(path).metadata[HEADER_KEY].encode(), infinite=True)
            return int(header["step"])
    return None


def stamps(spec: ModelSpec) -> Stamps:
    """Return name, size and time of each file that latents depend on, by component.

    Without the VAE's decoder: a damaged one can be replaced. Images and videos depend on the VAE's encoder.
    """
    used = spec if spec.inputs else spec.for_text()
    parts = [name for name in used.component_names if name != "vae"]
    files = {part: spec.component_files(part) for part in (*parts, "tokenizer", "scheduler")}
    files["pipeline"] = [spec.directory / "model_index.json"]
    entries: dict[str, list[list[Any]]] = {
        part: [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.is_file()]
        for part, paths in files.items()
    }
    if spec.section is not None:
        entries["sections"] = [[spec.section.sampling_type]]
    for part in parts:
        entries[part] += [
            ["LoRA", use.digest, use.weight, *((use.start, use.end) if use.has_range else ())]
            for use in spec.loras_of(part)
        ]
    if spec.stages > 1:
        entries["second stage"] = [["LoRA", use.digest, use.weight] for use in spec.of_stage(1).loras]
    return entries
