"""What this program and the process that decodes images share: limits, refusals, messages, and known formats.

A message is a line of JSON, then bytes.
"""

import json
from typing import IO, Any

# Media types of the formats that are read, and suffixes of those that systems know less well, for file dialogs.
MEDIA_TYPES = ("image/jpeg", "image/png", "image/webp", "image/avif", "image/bmp", "image/tiff")
SUFFIXES = (".avif", ".bmp", ".tif", ".tiff", ".webp")
# Of an image's file.
MAX_FILE_BYTES = 64 << 20
# Of an image.
MAX_PIXELS = 50_000_000
# Of a line of JSON.
MAX_LINE_BYTES = 1 << 16
_MAX_BYTES = max(MAX_FILE_BYTES, 3 * MAX_PIXELS)
# First bytes of images' files.
_SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
}
# Brands of AVIF and HEIC in the first box of a file, which lists all that it conforms to.
_BRANDS = {
    "AVIF": frozenset({b"avif", b"avis"}),
    "HEIC": frozenset({b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}),
}


class DecodingError(Exception):
    """An image that is not decoded: a code of `core.messages.video`, and its data."""

    def __init__(self, code: str, **data: Any) -> None:
        super().__init__(code)
        self.code = code
        self.data = data


def announced_format(data: bytes) -> str | None:
    """Return the format of an image that the first bytes of a file announce, such as "PNG"; `None` if it is none.

    Args:
        data: the first bytes, `MAX_LINE_BYTES` or all.
    """
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        box = data[8 : min(int.from_bytes(data[:4], "big"), MAX_LINE_BYTES)]
        brands = {box[start : start + 4] for start in range(0, len(box), 4)}
        return next((kind for kind, known in _BRANDS.items() if brands & known), None)
    return next((kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)), None)


def send(stream: IO[bytes], values: dict[str, Any], data: bytes = b"") -> None:
    """Write a message."""
    stream.write(json.dumps({**values, "bytes": len(data)}).encode() + b"\n")
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """Read a message.

    Raises:
        EOFError: if the stream ends before.
        ValueError: if it is none.
    """
    line = stream.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError
    values = json.loads(line)
    size = int(values.pop("bytes"))
    if not 0 <= size <= _MAX_BYTES:
        raise ValueError(size)
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return values, data
