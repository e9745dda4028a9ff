"""Metadata in PNG, GIF and WebP files, which ffmpeg writes without it: JSON in the comment of an image.

`frontend_assets/metadata.js` reads it.

Formats: https://www.w3.org/TR/png-3/#11iTXt, https://www.w3.org/Graphics/GIF/spec-gif89a.txt (comment extension),
https://developers.google.com/speed/webp/docs/riff_container (XMP), Dublin Core's description in XMP.
"""

import json
import shutil
import zlib
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, Literal

# Where the first chunk after the header of a PNG begins, and the palette of a GIF.
_AFTER_IHDR, _AFTER_SCREEN = 33, 13
_SUB_BLOCK = 255
# Bits of a WebP's features.
_HAS_XMP = 0x04
_XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:description><rdf:Alt>'
    '<rdf:li xml:lang="x-default">{}</rdf:li></rdf:Alt></dc:description></rdf:Description></rdf:RDF></x:xmpmeta>'
)


def add_metadata(file: Path, metadata: Mapping[str, Any]) -> None:
    """Add metadata to a PNG, GIF or WebP.

    Raises:
        OSError: if the file cannot be written.
    """
    # ASCII, because XML lacks some characters of JSON.
    text = json.dumps(metadata, separators=(",", ":")).encode()
    with file.open("rb") as opened:
        start = opened.read(30)
    if start.startswith(b"\x89PNG"):
        chunk = b"iTXtComment\0\0\0\0\0" + text
        _insert(file, _AFTER_IHDR, _uint(len(chunk) - 4, 4, "big") + chunk + _uint(zlib.crc32(chunk), 4, "big"))
    elif start.startswith(b"GIF8"):
        blocks = (text[at : at + _SUB_BLOCK] for at in range(0, len(text), _SUB_BLOCK))
        comment = b"!\xfe" + b"".join(_uint(len(block), 1) + block for block in blocks) + b"\0"
        colors = 3 << ((start[10] & 7) + 1) if start[10] & 0x80 else 0
        _insert(file, _AFTER_SCREEN + colors, comment)
    else:
        _add_xmp(file, start, _XMP.format(escape(text.decode(), quote=False)).encode())


def _add_xmp(file: Path, start: bytes, xmp: bytes) -> None:
    """Append XMP to a WebP that begins with `start`."""
    if start[12:16] != b"VP8X":  # a single frame
        from PIL import Image

        with Image.open(file) as image:
            sides = b"".join(_uint(side - 1, 3) for side in image.size)
        _insert(file, 12, b"VP8X" + _uint(10, 4) + _uint(0, 4) + sides)
    with file.open("r+b") as opened:
        opened.seek(20)
        flags = opened.read(1)[0]
        opened.seek(20)
        opened.write(bytes([flags | _HAS_XMP]))
        opened.seek(0, 2)
        opened.write(b"XMP " + _uint(len(xmp), 4) + xmp + b"\0" * (len(xmp) % 2))
        size = opened.tell() - 8
        opened.seek(4)
        opened.write(_uint(size, 4))


def _insert(file: Path, at: int, data: bytes) -> None:
    """Insert data into a file."""
    copy = file.with_name(f"{file.name}.new")
    with file.open("rb") as source, copy.open("wb") as target:
        target.write(source.read(at))
        target.write(data)
        shutil.copyfileobj(source, target)
    copy.replace(file)


def _uint(value: int, size: int, order: Literal["little", "big"] = "little") -> bytes:
    return value.to_bytes(size, order)
