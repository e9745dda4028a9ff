"""Decodes images in a process of its own, with limits; see `image_process`. Imports nothing but Pillow.

Decoders are large C libraries, and files come from anyone: one may crash a decoder, or keep it busy for hours.
"""

import contextlib
import io
import os
import queue
import signal
import sys
import threading
import warnings
from typing import IO, Any

from PIL import (
    AvifImagePlugin,
    ExifTags,
    Image,
    ImageCms,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401 - else Pillow imports the plugins of all formats
)

from runtime.video.image_messages import MAX_FILE_BYTES, MAX_PIXELS, DecodingError, announced_format, receive, send

if sys.platform != "win32":
    import resource

# Formats that are read, by Pillow's names.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF")
MIN_SIDE = 16
# Refusals of formats that are known by their first bytes and not read.
_NOT_READ = {"GIF": "image.format_gif", "HEIC": "image.format_heic"}
MAX_RATIO = 8
# Threads of dav1d, each of which needs memory.
_AVIF_THREADS = 2
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "I;16", "I;16B", "I;16L"})
# Values of TIFF's tags: of SampleFormat, and of PhotometricInterpretation.
_UNSIGNED, _UNDEFINED = 1, 4
_WHITE_IS_ZERO, _YCBCR = 0, 6
_DEEP_VALUES = 1 << 16
_TO_8_BITS = [round(value / 257) for value in range(_DEEP_VALUES)]
# Factors with which Pillow spreads gray values of few bits, by its names for them.
_SPREAD = {"1": 255, "L;2": 85, "L;4": 17}
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes) -> Image.Image:
    """Return the image in a file's content as RGB, 8 bits, upright, in sRGB; transparent parts are white.

    Raises:
        DecodingError: if it is not an image of a known format and kind, is damaged, animated, too large or too small,
            or has extreme proportions.
        MemoryError: if decoding needs more memory than this process may use.
    """
    kind = _kind_of(data)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_header(image)
            if "transparency" in image.info:
                image.info["transparency"] = _transparency(image)
            image.load()
            orientation = _orientation(image)
            plain = _plain(image)
    except (DecodingError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise _too_large() from error
    except UnidentifiedImageError as error:
        if kind is None:
            raise DecodingError("image.format_unknown", formats=FORMATS) from error
        raise DecodingError("image.kind_unknown", format=kind) from error
    except Exception as error:  # decoders raise anything
        raise DecodingError("image.damaged") from error
    return plain.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else plain


def _kind_of(data: bytes) -> str | None:
    """Return the format that the first bytes announce; `None` if it is none of those that are read."""
    if not data:
        raise DecodingError("image.empty")
    kind = announced_format(data)
    if kind in _NOT_READ:
        raise DecodingError(_NOT_READ[kind])
    return kind


def _check_header(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _too_large()
    if min(width, height) < MIN_SIDE:
        raise DecodingError("image.too_small", width=width, height=height, least=MIN_SIDE)
    if max(width, height) > MAX_RATIO * min(width, height):
        raise DecodingError("image.too_long", width=width, height=height, most=MAX_RATIO)
    # Photos of many phones have further pictures behind the first, such as a depth map.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise DecodingError("image.animated")
    if image.mode not in _MODES or (isinstance(image, TiffImagePlugin.TiffImageFile) and not _is_plain_tiff(image)):
        raise DecodingError("image.kind_unknown", format=image.format)


def _too_large() -> DecodingError:
    return DecodingError("image.too_large", most=MAX_PIXELS // 1_000_000)


def _is_plain_tiff(image: TiffImagePlugin.TiffImageFile) -> bool:
    """Return whether Pillow reads the values of a TIFF as they are meant; of rare kinds, it does not notice."""
    tags = image.tag_v2
    bits = set(tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,)))
    photometric = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 0)
    if not set(tags.get(TiffImagePlugin.SAMPLEFORMAT, (1,))) <= {_UNSIGNED, _UNDEFINED}:
        return False
    if tags.get(TiffImagePlugin.PLANAR_CONFIGURATION, 1) != 1 and (bits != {8} or photometric == _WHITE_IS_ZERO):
        return False
    if photometric == _YCBCR and image.info.get("compression") != "jpeg":
        return False
    return not image.mode.startswith("I;16") or (bits == {16} and photometric != _WHITE_IS_ZERO)


def _transparency(image: Image.Image) -> Any:
    """Return the transparent color of an image that is not loaded yet, in the values that its pixels will have.

    A PNG with 16 bits in color keeps the upper 8.
    """
    color = image.info.get("transparency")
    tiles = getattr(image, "tile", ())
    raw = tiles[0].args if tiles else None
    if isinstance(color, int) and isinstance(raw, str):
        return color * _SPREAD.get(raw, 1)
    if isinstance(color, tuple) and isinstance(raw, str) and ";16" in raw:
        return tuple(value >> 8 for value in color)
    return color


def _orientation(image: Image.Image) -> int:
    """Return EXIF's orientation of a decoded image; 1, upright, if its metadata is damaged."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow's parser raises anything
        return 1


def _plain(image: Image.Image) -> Image.Image:
    """Return a decoded image in RGB, 8 bits, in sRGB, on white."""
    profile, transparency = image.info.get("icc_profile"), image.info.pop("transparency", None)
    alpha = None
    if image.mode.startswith("I;16"):
        deep = image.convert("I")
        if isinstance(transparency, int):
            alpha = deep.point([255 * (value != transparency) for value in range(_DEEP_VALUES)], "L")
        image = deep.point(_TO_8_BITS, "L")
    elif image.mode in {"P", "PA", "LA"} or transparency is not None:
        if transparency is not None:
            image.info["transparency"] = transparency
        image = image.convert("RGBA")
    if image.mode == "RGBA":
        alpha = image.getchannel("A")
        image = image.convert("RGB")
    if profile and image.mode in {"RGB", "CMYK", "L"}:
        image = _in_srgb(image, profile)
    image = image.convert("RGB")
    if alpha is not None:
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=alpha)
        return white
    return image


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except MemoryError:
        raise
    except Exception:  # a damaged profile, or one for another mode
        return image
    return image if converted is None else converted


def main() -> None:
    """Answer requests on standard input until it ends, and with it the process that has sent them.

    A request is `{"pixels": …, "seconds": …, "wait": …, "memory": …}` and a file's content; see `image_process`. An
    answer is `{"width": …, "height": …}` and, if asked for, the pixels; or `{"code": …, "data": …, "reason": …}`,
    where the code is empty if memory ran out. The first answer says that the process has started.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library may print
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_up()
    received: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, received), daemon=True).start()
    send(answers, {})
    while True:
        request, data = received.get()
        _limit(request["seconds"], request["wait"], request["memory"])
        answer, pixels = _answer(data, pixels=request["pixels"])
        del data
        _limit(None, 0, None)
        send(answers, answer, pixels)


def _receive(stream: IO[bytes], received: "queue.SimpleQueue[tuple[dict[str, Any], bytes]]") -> None:
    """Receive requests; end this process with the one that sends them, also while an image is decoded."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            received.put(receive(stream))
    os._exit(0)


def _answer(data: bytes, *, pixels: bool) -> tuple[dict[str, Any], bytes]:
    try:
        image = decode(data)
        return {"width": image.width, "height": image.height}, image.tobytes() if pixels else b""
    except DecodingError as error:
        cause = error.__cause__
        reason = "" if cause is None else f"{type(cause).__name__}: {cause}"[:300]
        return {"code": error.code, "data": error.data, "reason": reason}, b""
    except MemoryError:
        return {"code": "", "reason": "MemoryError"}, b""


def _set_up() -> None:
    """Configure Pillow, and forbid what decoding does not need."""
    Image.preinit()
    warnings.simplefilter("ignore")
    AvifImagePlugin.DEFAULT_MAX_THREADS = _AVIF_THREADS
    # Programs store workflows of any size as text in PNGs; this process has a limit of memory.
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = MAX_FILE_BYTES
    if sys.platform != "win32":
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(kind, (0, 0))


def _limit(seconds: float | None, wait: float, memory: int | None) -> None:
    """Have the system kill this process after seconds of processor time or of waiting, or refuse it memory.

    The process that sends requests checks the same limits; these hold without it, and while C code runs.
    """
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, wait)
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = used.ru_utime + used.ru_stime
        limits = (
            (resource.RLIMIT_CPU, None if seconds is None else int(spent + seconds) + 1),
            (resource.RLIMIT_AS, memory),
        )
        for kind, most in limits:
            hard = resource.getrlimit(kind)[1]
            with contextlib.suppress(OSError, ValueError):  # macOS does not limit the address space
                resource.setrlimit(kind, (resource.RLIM_INFINITY if most is None else most, hard))
