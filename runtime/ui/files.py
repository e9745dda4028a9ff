"""Which files leave this machine: the videos in the folder of outputs, and nothing else.

gradio's own route for files would also serve its cache folder, and says a request's headers, cookies included, back in
its answers to ranges; so the gate never lets a request reach it.
"""

import re
from pathlib import Path

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

# By the end of the name; what is not here is not served.
_TYPES = {".mp4": "video/mp4"}
_RANGE = re.compile(rb"bytes=(?:[0-9]{1,18}-[0-9]{0,18}|-[0-9]{1,18})")


def find_output(asked: str, outputs_dir: Path) -> Path | None:
    """Return the file of that absolute path if it lies in the folder of outputs, wherever links lead, else `None`."""
    if "\0" in asked or ".." in re.split(r"[/\\]", asked):
        return None
    try:
        path = Path(asked)
        if not path.is_absolute() or path.suffix.lower() not in _TYPES:
            return None
        real = path.resolve(strict=True)
        inside = real.is_relative_to(outputs_dir.resolve(strict=True)) and real.suffix.lower() in _TYPES
        return real if inside and real.is_file() else None
    except (OSError, RuntimeError, ValueError):  # not there, a loop of links, a name that cannot be
        return None


async def send_file(path: Path, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with a file that `find_output` found, in whole or in the part asked for."""
    response = FileResponse(
        path, media_type=_TYPES[path.suffix.lower()], filename=path.name, content_disposition_type="inline"
    )
    # Only to whom it was sent: a share link's server in between may keep nothing.
    response.headers["Cache-Control"] = "private, no-store" if "tandem.visitor" in scope else "private"
    await response(scope, receive, send)


def readable_range(value: bytes) -> bool:
    """Return whether a Range header asks for one range in plain numbers; others are answered with the whole file."""
    return _RANGE.fullmatch(value.strip()) is not None
