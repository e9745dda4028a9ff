"""Images for tests: photos, and the files that people give by mistake or to do harm."""

import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from runtime.core.images import ImageUse
from runtime.models.images import images_dir
from runtime.models.spec import ImageInput, ModelSpec


def picture(width: int = 64, height: int = 48) -> Image.Image:
    """Return a picture whose corners differ: red grows to the right, green to the bottom."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 128)], axis=-1).round().astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file's content."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def saved(path: Path, width: int = 64, height: int = 48) -> Path:
    """Write a picture as a PNG."""
    path.write_bytes(encoded(picture(width, height)))
    return path


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
