"""Reads the image that a video starts from, or ends with, whatever file it comes from, and makes a frame of it.

Files are decoded in a process of their own, see `image_process`; metadata is not kept.
"""

import errno
import io
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError
from runtime.core.images import CROP, MIDDLE
from runtime.core.untrusted_files import NotRegularFileError, read_file
from runtime.video.image_messages import MAX_FILE_BYTES, DecodingError
from runtime.video.image_process import PROCESS, Decoded

THUMBNAIL_BYTES = 8_000
_THUMBNAIL_SIDE = 192
# Noise takes 2.5 kB in the last one.
_THUMBNAIL_QUALITIES = (70, 40, 10, 0)


def read_image(path: Path, field: str = "image") -> Image.Image:
    """Return an image as RGB, 8 bits, upright, in sRGB; transparent parts are white.

    Args:
        field: the request's field that names the file, for errors.

    Raises:
        InvalidRequestError: if the file cannot be read, is not an image of a known format, is incomplete, animated, too
            large or too small, has extreme proportions, or takes too much time or memory.
    """
    return decode_image(read_bytes(path, field), path.name, field)


def read_bytes(path: Path, field: str = "image") -> bytes:
    """Return the content of an image's file, which is not checked.

    Raises:
        InvalidRequestError: if it is not a file, cannot be read or is too large.
    """
    try:
        return read_file(path, MAX_FILE_BYTES)
    except NotRegularFileError as error:
        raise InvalidRequestError(field, "image.not_a_file", file=path) from error
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EFBIG:
            raise InvalidRequestError(field, "image.file_too_large", file=path, most=MAX_FILE_BYTES) from error
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(field, "image.unreadable", file=path, reason=reason) from error


def decode_image(data: bytes, name: str, field: str = "image", check: Callable[[], None] = never) -> Image.Image:
    """Return the image in a file's content; see `read_image`.

    Args:
        name: of the file, for errors.
        check: called many times a second; an exception that it raises ends the decoding.

    Raises:
        MachineError: if no process can be started.
    """
    return _decoded(data, name, field, check, pixels=True).image()


def check_image(data: bytes, name: str, field: str = "image", check: Callable[[], None] = never) -> tuple[int, int]:
    """Decode the image in a file's content; return its width and height. See `decode_image`."""
    decoded = _decoded(data, name, field, check, pixels=False)
    return decoded.width, decoded.height


def _decoded(data: bytes, name: str, field: str, check: Callable[[], None], *, pixels: bool) -> Decoded:
    try:
        return PROCESS.decode(data, pixels=pixels, check=check)
    except DecodingError as error:
        raise InvalidRequestError(field, error.code, file=name, **error.data) from error


def fitted(image: Image.Image, width: int, height: int, fit: str = CROP, position: float = MIDDLE) -> Image.Image:
    """Return an image as a frame of `width` × `height` pixels; the same image if it has that size already.

    Args:
        fit: "crop" scales it to cover the frame and cuts the rest, "fit" shows all of it on black.
        position: for "crop": the part that stays, from 0 (the top or the left) to 100 percent.
    """
    if image.size == (width, height):
        return image
    scales = width / image.width, height / image.height
    if fit == CROP:
        scale = max(scales)
        # The part of the image that the frame shows, in the image's pixels.
        view = width / scale, height / scale
        left, top = ((whole - part) * position / 100 for whole, part in zip(image.size, view, strict=True))
        box = (max(left, 0.0), max(top, 0.0), min(left + view[0], image.width), min(top + view[1], image.height))
        return image.resize((width, height), Image.Resampling.LANCZOS, box=box)
    scale = min(scales)
    inner_width, inner_height = (max(1, round(side * scale)) for side in image.size)
    frame = Image.new("RGB", (width, height))
    whole = image.resize((inner_width, inner_height), Image.Resampling.LANCZOS)
    frame.paste(whole, ((width - inner_width) // 2, (height - inner_height) // 2))
    return frame


def thumbnail(image: Image.Image) -> bytes:
    """Return a small WebP of an RGB image, at most `THUMBNAIL_BYTES`."""
    small = image.copy()
    small.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    for quality in _THUMBNAIL_QUALITIES:
        file = io.BytesIO()
        small.save(file, "WEBP", quality=quality, method=4)
        if file.tell() <= THUMBNAIL_BYTES:
            break
    return file.getvalue()
