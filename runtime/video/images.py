"""Reads the image that a video starts from, or ends with, whatever file it comes from.

Sizes are checked before pixels are decoded. Pillow decodes formats that people have; metadata is not kept.
"""

import io
import warnings
from pathlib import Path
from typing import Any

from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from runtime.core.errors import InvalidRequestError
from runtime.core.untrusted_files import NotRegularFileError, read_file

# Formats that are read, by Pillow's names.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")
MAX_FILE_BYTES = 64 << 20
MAX_PIXELS = 50_000_000
MIN_SIDE = 16
MAX_RATIO = 8
# Brands of HEIC in the first box of a file, which Pillow does not read.
_HEIC = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
# Modes with more than 8 bits per value, and the largest value of integer ones.
_DEEP = {"I;16": 65_535, "I;16L": 65_535, "I;16B": 65_535, "I": 65_535}
_WHITE = (255, 255, 255)


def read_image(path: Path, field: str = "image") -> Image.Image:
    """Return an image as RGB, 8 bits, upright, in sRGB; transparent parts are white.

    Args:
        field: the request's field that names the file, for errors.

    Raises:
        InvalidRequestError: if the file cannot be read, is not an image of a known format, is incomplete, animated, too
            large or too small, or has extreme proportions.
    """
    return decode_image(_read(path, field), path.name, field)


def decode_image(data: bytes, name: str, field: str = "image") -> Image.Image:
    """Return the image in a file's content; see `read_image`.

    Args:
        name: of the file, for errors.
    """

    def refused(code: str, **values: Any) -> InvalidRequestError:
        return InvalidRequestError(field, code, file=name, **values)

    if not data:
        raise refused("image.empty")
    if data[4:8] == b"ftyp" and data[8:12] in _HEIC:
        raise refused("image.format_heic")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which have their own limit here
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise refused("image.too_large", most=MAX_PIXELS // 1_000_000)
            if min(width, height) < MIN_SIDE:
                raise refused("image.too_small", width=width, height=height, least=MIN_SIDE)
            if max(width, height) > MAX_RATIO * min(width, height):
                raise refused("image.too_long", width=width, height=height, most=MAX_RATIO)
            frames = getattr(image, "n_frames", 1)
            if frames > 1:
                raise refused("image.animated", frames=frames)
            image.load()
            return _plain(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise refused("image.format_unknown", formats=FORMATS) from error
    except (OSError, SyntaxError, ValueError, ArithmeticError, IndexError, KeyError, TypeError) as error:
        raise refused("image.damaged") from error
    except (Image.DecompressionBombError, MemoryError) as error:
        raise refused("image.too_large", most=MAX_PIXELS // 1_000_000) from error


def _read(path: Path, field: str) -> bytes:
    try:
        return read_file(path, MAX_FILE_BYTES)
    except NotRegularFileError as error:
        raise InvalidRequestError(field, "image.not_a_file", file=path) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(field, "image.unreadable", file=path, reason=reason) from error


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
