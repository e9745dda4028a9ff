"""Texts in the metadata of videos and PNG files, whichever program made them.

PNG: https://www.w3.org/TR/png-3/#11textinfo; compressed texts are not read.
"""

import re
from pathlib import Path
from typing import BinaryIO

from runtime.core.errors import OutputError
from runtime.core.untrusted_files import MAX_JSON_BYTES, open_file
from runtime.video.mp4 import OTHER_FORMATS, metadata_text

_PNG = b"\x89PNG\r\n\x1a\n"
# A PNG has few chunks before its pixels.
_MOST_CHUNKS = 1_000
# A line of ffmpeg's metadata: a name and a value in which newlines and others are escaped.
_LINE = re.compile(r"^([^=\\\n;#\[]+)=((?:[^\\\n]|\\.)*)$", re.MULTILINE | re.DOTALL)
# After the name of an iTXt chunk: not compressed, a language, the translated name.
_UNCOMPRESSED = re.compile(rb"\0.[^\0]*\0[^\0]*\0", re.DOTALL)


def read_tags(path: Path) -> dict[str, str]:
    """Return the texts of a file's metadata by names in lower case; what exceeds limits is left out.

    Raises:
        OutputError: if the file cannot be read.
    """
    try:
        with open_file(path) as file:
            start = file.read(len(_PNG))
            if start == _PNG:
                return _png_tags(file)
        # A section of a chapter or a stream begins with a name in brackets.
        text = metadata_text(path, OTHER_FORMATS.get(start[:4], "mov")).partition("\n[")[0]
    except (OSError, ValueError) as error:
        raise OutputError(
            "video.unreadable_file", file=path, error=getattr(error, "strerror", None) or error
        ) from error
    unescaped = ((name.lower(), re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)) for name, value in _LINE.findall(text))
    return dict(unescaped)


def _png_tags(file: BinaryIO) -> dict[str, str]:
    tags: dict[str, str] = {}
    for _ in range(_MOST_CHUNKS):
        size, kind = int.from_bytes(file.read(4), "big"), file.read(4)
        if kind in {b"tEXt", b"iTXt"} and size <= MAX_JSON_BYTES:
            name, _, content = file.read(size).partition(b"\0")
            if kind == b"tEXt":
                tags[name.decode("latin-1").lower()] = content.decode("latin-1")
            elif before := _UNCOMPRESSED.match(content):
                tags[name.decode("latin-1").lower()] = content[before.end() :].decode("utf-8", "replace")
            file.seek(4, 1)  # a checksum
        elif kind == b"IDAT" or not kind:
            break
        else:
            file.seek(size + 4, 1)
    return tags
