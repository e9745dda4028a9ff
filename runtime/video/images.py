"""Reads the image that a video starts from, or ends with, whatever file it comes from, and makes a frame of it.

Sizes are checked before pixels are decoded. Pillow decodes formats that people have; metadata is not kept.
"""

import contextlib
import errno
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

from runtime.core.errors import InvalidRequestError
from runtime.core.images import CROP, MIDDLE
from runtime.core.untrusted_files import NotRegularFileError, read_file

# Formats that are read, by Pillow's names.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")
MAX_FILE_BYTES = 64 << 20
THUMBNAIL_BYTES = 8_000
MAX_PIXELS = 50_000_000
MIN_SIDE = 16
MAX_RATIO = 8
# Brands of HEIC in the first box of a file, which Pillow does not read.
_HEIC = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
# Modes with more than 8 bits per value, and the largest value of integer ones.
_DEEP = {"I;16": 65_535, "I;16L": 65_535, "I;16B": 65_535, "I": 65_535}
_WHITE = (255, 255, 255)
# Values of EXIF's orientation with exchanged sides.
_TURNED = frozenset({5, 6, 7, 8})
_THUMBNAIL_SIDE = 192
# Noise takes 2.5 kB in the last one.
_THUMBNAIL_QUALITIES = (70, 40, 10, 0)


def read_image(path: Path, field: str = "image") -> Image.Image:
    """Return an image as RGB, 8 bits, upright, in sRGB; transparent parts are white.

    Args:
        field: the request's field that names the file, for errors.

    Raises:
        InvalidRequestError: if the file cannot be read, is not an image of a known format, is incomplete, animated, too
            large or too small, or has extreme proportions.
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


def decode_image(data: bytes, name: str, field: str = "image") -> Image.Image:
    """Return the image in a file's content; see `read_image`.

    Args:
        name: of the file, for errors.
    """
    with _opened(data, name, field) as image:
        image.load()
        return _plain(ImageOps.exif_transpose(image))


def read_size(data: bytes, name: str, field: str = "image") -> tuple[int, int]:
    """Return width and height of the upright image from a file's header, without decoding pixels.

    Raises:
        InvalidRequestError: as `decode_image`, except for damage beyond the header.
    """
    with _opened(data, name, field) as image:
        width, height = image.size
        # Without `getexif` of the format, which may decode the image to find data behind the pixels. Pillow turns the
        # size of a TIFF itself.
        turned = image.format != "TIFF" and Image.Image.getexif(image).get(ExifTags.Base.Orientation) in _TURNED
        return (height, width) if turned else (width, height)


@contextlib.contextmanager
def _opened(data: bytes, name: str, field: str) -> Iterator[Image.Image]:
    """Open the image in a file's content and check its header; errors of Pillow in the `with` block are refusals."""

    def refused(code: str, **values: Any) -> InvalidRequestError:
        return InvalidRequestError(field, code, file=name, **values)

    if not data:
        raise refused("image.empty")
    if data[4:8] == b"ftyp" and data[8:12] in _HEIC:
        raise refused("image.format_heic")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which have their own limit here
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_header(image, refused)
                yield image
    except UnidentifiedImageError as error:
        raise refused("image.format_unknown", formats=FORMATS) from error
    except (OSError, SyntaxError, ValueError, ArithmeticError, IndexError, KeyError, TypeError) as error:
        raise refused("image.damaged") from error
    except (Image.DecompressionBombError, MemoryError) as error:
        raise refused("image.too_large", most=MAX_PIXELS // 1_000_000) from error


def _check_header(image: Image.Image, refused: Callable[..., InvalidRequestError]) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise refused("image.too_large", most=MAX_PIXELS // 1_000_000)
    if min(width, height) < MIN_SIDE:
        raise refused("image.too_small", width=width, height=height, least=MIN_SIDE)
    if max(width, height) > MAX_RATIO * min(width, height):
        raise refused("image.too_long", width=width, height=height, most=MAX_RATIO)
    # Photos of many phones have further pictures behind the first, such as a depth map.
    # Counting the frames of a GIF would read all of it.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise refused("image.animated")


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
        # What the frame shows of the image, in its own pixels.
        seen = width / scale, height / scale
        left, top = ((whole - part) * position / 100 for whole, part in zip(image.size, seen, strict=True))
        box = (max(left, 0.0), max(top, 0.0), min(left + seen[0], image.width), min(top + seen[1], image.height))
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


def _plain(image: Image.Image) -> Image.Image:
    """Return an image in RGB, 8 bits, in sRGB, on white."""
    profile = image.info.get("icc_profile")
    if image.mode in _DEEP:
        image = image.convert("I").point(lambda value: value * (255 / _DEEP[image.mode])).convert("L")
    elif image.mode == "F":
        image = image.convert("L")
    if image.mode in {"P", "PA", "LA", "La", "RGBa"} or "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode == "RGBA":
        white = Image.new("RGBA", image.size, (*_WHITE, 255))
        image = Image.alpha_composite(white, image).convert("RGB")
    if profile and image.mode in {"RGB", "CMYK", "L"}:
        image = _in_srgb(image, profile)
    return image.convert("RGB")


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError):  # a damaged profile, or one for another mode
        return image
    return image if converted is None else converted
