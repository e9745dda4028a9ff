"""Metadata of an MP4: JSON in the comment tag that describes how the video was generated."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.core.errors import OutputError
from runtime.video.ffmpeg import find_ffmpeg

_SPECIAL = str.maketrans({c: f"\\{c}" for c in "=;#\\\n"})


def to_ffmetadata(title: str, metadata: Mapping[str, Any]) -> str:
    """Return an ffmetadata file's text with `metadata` as JSON in the comment tag.

    Format: https://ffmpeg.org/ffmpeg-formats.html#Metadata-2
    """
    comment = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
    return f";FFMETADATA1\ntitle={title.translate(_SPECIAL)}\ncomment={comment.translate(_SPECIAL)}\n"


def read_metadata(video: Path) -> dict[str, Any]:
    """Return the metadata of an MP4 that Tandem made.

    Raises:
        OutputError: if the file has none.
    """
    command = [find_ffmpeg(), "-v", "error", "-i", str(video), "-f", "ffmetadata", "-"]
    run = subprocess.run(command, capture_output=True, check=False)
    text = run.stdout.decode("utf-8", "replace")
    tags: dict[str, str] = {}
    for line in _logical_lines(text):
        key, separator, value = line.partition("=")
        if separator:
            tags[key] = _unescaped(value)
    try:
        return dict(json.loads(tags["comment"])["tandem"])
    except (KeyError, ValueError, TypeError) as error:
        raise OutputError("video.no_metadata", file=video.name) from error


def _logical_lines(text: str) -> list[str]:
    """Split into lines; an escaped line end does not end one."""
    lines = [""]
    for line in text.split("\n"):
        lines[-1] += line
        trailing = len(line) - len(line.rstrip("\\"))
        if trailing % 2:
            lines[-1] += "\n"
        else:
            lines.append("")
    return lines


def _unescaped(value: str) -> str:
    out, escaped = [], False
    for character in value:
        if character == "\\" and not escaped:
            escaped = True
            continue
        out.append(character)
        escaped = False
    return "".join(out)
