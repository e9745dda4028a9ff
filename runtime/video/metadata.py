"""The JSON that an MP4 carries in its comment tag: how it was made."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.core.errors import OutputError
from runtime.video.ffmpeg import find_ffmpeg

_SPECIAL = str.maketrans({c: f"\\{c}" for c in "=;#\\\n"})


def to_ffmetadata(title: str, facts: Mapping[str, Any]) -> str:
    """Return an ffmetadata file's text with `facts` as JSON in the comment tag.

    Format: https://ffmpeg.org/ffmpeg-formats.html#Metadata-2
    """
    comment = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
    return f";FFMETADATA1\ntitle={title.translate(_SPECIAL)}\ncomment={comment.translate(_SPECIAL)}\n"


def read_facts(video: Path) -> dict[str, Any]:
    """Return what an MP4 of ours says about itself.

    Raises:
        OutputError: if the file is not a video of ours.
    """
    command = [find_ffmpeg(), "-v", "error", "-i", str(video), "-f", "ffmetadata", "-"]
    run = subprocess.run(command, capture_output=True, check=False)
    text = run.stdout.decode("utf-8", "replace")
    tags: dict[str, str] = {}
    for line in _joined(text):
        key, separator, value = line.partition("=")
        if separator:
            tags[key] = _unescaped(value)
    try:
        facts = json.loads(tags["comment"])
        return dict(facts["tandem"])
    except (KeyError, ValueError, TypeError) as error:
        raise OutputError(f"{video.name} does not say how it was made.", "Take an MP4 that Tandem made.") from error


def _joined(text: str) -> list[str]:
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
