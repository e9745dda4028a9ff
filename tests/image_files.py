"""Images for tests: photos, and the files that people give by mistake or to do harm."""

import io
import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from runtime.core.images import ImageUse, by_field, field_of
from runtime.models.images import find_image, images_dir
from runtime.models.spec import ImageInput, ModelSpec

_TURNS = {
    "image": Image.Transpose.ROTATE_180,
    "keyframes[0]": Image.Transpose.FLIP_LEFT_RIGHT,
    "keyframes[1]": Image.Transpose.FLIP_TOP_BOTTOM,
}


def picture(width: int = 64, height: int = 48) -> Image.Image:
    """Return a picture whose corners differ: red grows to the right, green to the bottom."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 128)], axis=-1).round().astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file's content."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def saved(path: Path, width: int = 64, height: int = 48, *, turned: bool = False) -> Path:
    """Write a picture as a PNG, or the same one upside down."""
    image = picture(width, height)
    path.write_bytes(encoded(image.transpose(Image.Transpose.ROTATE_180) if turned else image))
    return path


def with_saved(
    spec: ModelSpec, fields: Iterable[str], folder: Path, width: int = 64, height: int = 48
) -> tuple[ModelSpec, dict[str, str | list[str]]]:
    """Return a model with an image for each of these keys of a plan's images, and the fields; no two are the same."""
    files = {}
    for key in fields:
        image = picture(width, height)
        file = folder / f"{key}.png"
        file.write_bytes(encoded(image.transpose(_TURNS[key]) if key in _TURNS else image))
        files[key] = str(file)
    uses = {key: find_image(file, field_of(key), None, keep=False) for key, file in files.items()}
    keyframes = tuple(use for key, use in uses.items() if field_of(key) == "keyframes")
    others: Any = {field: use for field, use in uses.items() if field_of(field) == field}
    return replace(spec, keyframes=keyframes, **others), by_field(files)


def kept(use: ImageUse, cache_dir: Path) -> bool:
    """Whether an image's copy is in a cache folder."""
    return use.path == images_dir(cache_dir) / use.digest and use.path.is_file()


def taking_images(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a model as if it started from images; `changes` are fields of `ImageInput`."""
    vae: Any = spec.vae
    return replace(spec, image_input=ImageInput(**{"kind": "first_frame", "vae": vae, "required": False, **changes}))


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side: int = 50_000) -> bytes:
    """Return a small PNG of side × side black pixels."""
    size = side * (1 + (side + 7) // 8)
    block = bytes(1 << 20)
    compressor = zlib.compressobj(9, wbits=-15)
    # After a full flush, what a block is compressed to does not depend on the blocks before.
    repeated = compressor.compress(block) + compressor.flush(zlib.Z_FULL_FLUSH)
    rest = compressor.compress(bytes(size % len(block))) + compressor.flush()
    checksum = size % 65_521 << 16 | 1
    data = b"\x78\xda" + repeated * (size // len(block)) + rest + checksum.to_bytes(4, "big")
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def many_scans(side: int = 6000, scans: int = 4000) -> bytes:
    """Return a small progressive JPEG that a decoder reads for minutes: its last scan, of all pixels, is repeated."""
    data = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True, quality=50)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:last] + data[last:end] * scans + data[end:]


def with_chunk(png: bytes, kind: bytes, data: bytes) -> bytes:
    """Return a PNG with one more chunk before its pixels."""
    start = png.index(b"IDAT") - 4
    return png[:start] + chunk(kind, data) + png[start:]


def compressed_text(size: int) -> bytes:
    """Return the data of a PNG's zTXt chunk, whose text has so many characters."""
    return b"workflow\0\0" + zlib.compress(b"a" * size)


def tiff(pixels: np.ndarray, *, planar: bool = False, tile: int = 0, **tags: Any) -> bytes:
    """Return a plain TIFF of an array (height, width, samples), as Pillow cannot write it.

    Args:
        planar: whether the samples are stored apart.
        tile: side of square tiles; by default, there are none.
        tags: `photometric`, 2 for RGB by default.
    """
    height, width, samples = pixels.shape
    bits, kind = 8 * pixels.dtype.itemsize, {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    planes = [pixels[..., one : one + 1] for one in range(samples)] if planar else [pixels]
    parts = [
        np.pad(plane, ((0, -height % tile), (0, -width % tile), (0, 0)))[y : y + tile, x : x + tile].tobytes()
        for plane in planes
        for y in range(0, height, tile)
        for x in range(0, width, tile)
    ] if tile else [plane.tobytes() for plane in planes]  # fmt: skip
    offsets = [8 + sum(map(len, parts[:index])) for index in range(len(parts))]
    places, sizes = (324, 325) if tile else (273, 279)
    entries: dict[int, list[int]] = {
        256: [width], 257: [height], 258: [bits] * samples, 259: [1], 262: [tags.get("photometric", 2)],
        277: [samples], 284: [2 if planar else 1], 339: [kind] * samples,
        **({322: [tile], 323: [tile]} if tile else {278: [height]}),
        places: offsets, sizes: list(map(len, parts)),
    }  # fmt: skip
    body = b"".join(parts)
    table, extra = b"", b""
    extra_at = 8 + len(body) + 2 + 12 * len(entries) + 4
    for tag, values in sorted(entries.items()):
        data = struct.pack(f"<{len(values)}I", *values)
        field = data if len(data) == 4 else struct.pack("<I", extra_at + len(extra))
        table += struct.pack("<HHI", tag, 4, len(values)) + field
        extra += b"" if len(data) == 4 else data
    head = b"II*\0" + struct.pack("<I", 8 + len(body))
    return head + body + struct.pack("<H", len(entries)) + table + bytes(4) + extra
