"""Images from files that people have: read upright in 8 bits, or refused with one line and a remedy."""

import io
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from runtime.core.errors import InvalidRequestError
from runtime.video.image_messages import MAX_FILE_BYTES
from runtime.video.images import THUMBNAIL_BYTES, check_image, decode_image, fitted, read_image, thumbnail
from tests.hostile_files import HOSTILE
from tests.image_files import bomb, chunk, compressed_text, encoded, picture, saved, tiff, with_chunk

PICTURE = picture()
PIXELS = np.asarray(PICTURE).astype(int)


def difference(image: Image.Image, wanted: np.ndarray = PIXELS) -> float:
    """Return the mean difference of two images in steps of 255."""
    return float(np.abs(np.asarray(image).astype(int) - wanted).mean())


def rgba() -> Image.Image:
    """Return the picture with a transparent left half."""
    image = PICTURE.convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 32, 48))
    return image


def deep(value: int = 0x8000) -> Image.Image:
    return Image.fromarray(np.full((48, 64), value, np.uint16))


def frames(kind: str) -> bytes:
    more = [PICTURE.rotate(180), PICTURE.rotate(90)]
    return encoded(PICTURE, kind, save_all=True, append_images=more, duration=100)


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [("PNG", {}, 0), ("BMP", {}, 0), ("TIFF", {}, 0), ("WEBP", {"lossless": True}, 0), ("JPEG", {"quality": 95}, 2),
     ("WEBP", {"quality": 95}, 3), ("AVIF", {"quality": 95}, 3), ("JPEG", {"progressive": True}, 4)],
)  # fmt: skip
def test_formats(kind: str, options: dict[str, object], most: float) -> None:
    data = encoded(PICTURE, kind, **options)
    image = decode_image(data, "boat")
    assert (image.mode, image.size) == ("RGB", (64, 48))
    assert difference(image) <= most
    assert check_image(data, "boat") == (64, 48)


def test_transparent_parts_are_white() -> None:
    wanted = PIXELS.copy()
    wanted[:, :32] = 255
    assert difference(decode_image(encoded(rgba()), "boat"), wanted) == 0
    palette = decode_image(encoded(rgba().quantize(64)), "boat")
    assert palette.mode == "RGB" and (np.asarray(palette)[:, :32] == 255).all()
    for opaque in (PICTURE.quantize(64), PICTURE.convert("P")):
        opaque.info["transparency"] = opaque.getpixel((0, 0))
        image = decode_image(encoded(opaque, transparency=opaque.getpixel((0, 0))), "boat")
        assert image.getpixel((0, 0)) == (255, 255, 255) and image.getpixel((60, 40)) != (255, 255, 255)
    gray = decode_image(encoded(rgba().convert("LA")), "boat")
    assert gray.getpixel((0, 0)) == (255, 255, 255) and gray.getpixel((60, 40)) == rgba().convert("LA").convert(
        "RGB"
    ).getpixel((60, 40))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("value", "wanted"), [(0, 0), (0x8000, 128), (0xFFFF, 255), (257 * 40, 40)])
def test_16_bits_become_8(kind: str, value: int, wanted: int) -> None:
    image = decode_image(encoded(deep(value), kind), "boat")
    assert image.mode == "RGB" and abs(np.asarray(image).astype(int) - wanted).max() <= 1


def test_16_bits_in_color() -> None:
    """Pillow writes no such PNG; this one is a gray ramp in three channels."""
    row = b"\0" + b"".join(struct.pack(">HHH", 1000 * x, 0, 65_535) for x in range(64))
    header = struct.pack(">IIBBBBB", 64, 16, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row * 16)) + chunk(b"IEND", b"")
    image = decode_image(data, "boat")
    assert image.getpixel((63, 8)) == (63_000 // 256, 0, 255)


def test_transparent_gray_of_any_depth() -> None:
    """The value of a PNG that is transparent has the depth of the file, not 8 bits."""
    shades = np.arange(0, 65_536, 16, dtype=np.uint16).reshape(64, 64)
    image = np.asarray(decode_image(encoded(Image.fromarray(shades), transparency=160), "boat"))
    wanted = np.where(shades == 160, 255, np.round(shades / 257)).astype(int)
    assert difference(Image.fromarray(image), wanted[..., None]) < 0.01
    for bits in (1, 2, 4):
        most = 2**bits - 1
        row = b"\0" + bytes([int(f"{0:0{bits}b}{most:0{bits}b}" * (4 // bits), 2)] * (64 * bits // 8))
        header = struct.pack(">IIBBBBB", 64, 16, bits, 0, 0, 0, 0)
        data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"tRNS", struct.pack(">H", 0))
        data += chunk(b"IDAT", zlib.compress(row * 16)) + chunk(b"IEND", b"")
        assert (np.asarray(decode_image(data, "boat")) == 255).all(), bits
        opaque = data.replace(chunk(b"tRNS", struct.pack(">H", 0)), b"")
        assert sorted(set(np.asarray(decode_image(opaque, "boat")).ravel().tolist())) == [0, 255], bits


def test_a_transparent_color_of_16_bits() -> None:
    row = b"\0" + b"".join(struct.pack(">HHH", 1000 * x, 300, 65_535) for x in range(64))
    header = struct.pack(">IIBBBBB", 64, 16, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"tRNS", struct.pack(">HHH", 9000, 300, 65_535))
    data += chunk(b"IDAT", zlib.compress(row * 16)) + chunk(b"IEND", b"")
    image = decode_image(data, "boat")
    assert image.getpixel((9, 8)) == (255, 255, 255)
    assert image.getpixel((8, 8)) == (8000 >> 8, 300 >> 8, 255)


def test_large_texts_and_profiles_are_no_damage() -> None:
    """Programs store their workflows in images, and profiles of printers take megabytes."""
    plain = encoded(PICTURE)
    for data in (
        with_chunk(plain, b"zTXt", compressed_text(5 << 20)),
        with_chunk(plain, b"iTXt", b"workflow\0\1\0\0\0" + zlib.compress(bytes(range(32, 127)) * 60_000)),
        with_chunk(plain, b"tEXt", b"workflow\0" + b"a" * (5 << 20)),
        with_chunk(plain, b"iCCP", compressed_text(3 << 20)),
        encoded(PICTURE, exif=b"Exif\0\0MM\0*\0\0\0\x08" + bytes(2 << 20)),
    ):
        assert difference(decode_image(data, "boat")) == 0
    jpeg = encoded(PICTURE, "JPEG", quality=95, comment=b"a" * 60_000, icc_profile=bytes(1 << 20))
    assert difference(decode_image(jpeg, "boat")) < 3


def test_damaged_metadata_does_not_matter() -> None:
    for exif in (b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0" + b"\x01" * 40):
        for kind in ("JPEG", "PNG"):
            assert difference(decode_image(encoded(PICTURE, kind, exif=exif), "boat")) < 3


def with_brands(data: bytes, major: bytes, others: list[bytes]) -> bytes:
    """Return an AVIF whose first box names other brands."""
    box = struct.pack(">I", 16 + 4 * len(others)) + b"ftyp" + major + bytes(4) + b"".join(others)
    # Offsets in the file are absolute, so the box keeps its length.
    size = int.from_bytes(data[:4], "big")
    assert len(box) <= size
    box = struct.pack(">I", size) + box[4:] + b"free" * ((size - len(box)) // 4)
    return box + data[size:]


def test_avif_of_other_brands_is_read() -> None:
    """Cameras and converters name the general brand of images first."""
    data = encoded(PICTURE, "AVIF", quality=95)
    for major, others in ((b"mif1", [b"avif", b"miaf"]), (b"avif", [b"mif1", b"heic"]), (b"mif1", [b"mif1", b"avif"])):
        assert difference(decode_image(with_brands(data, major, others), "boat")) < 3
    for major, others in ((b"mif1", [b"heic"]), (b"heic", [b"mif1"]), (b"msf1", [])):
        with pytest.raises(InvalidRequestError) as refused:
            decode_image(with_brands(data, major, others), "boat")
        assert refused.value.code == "image.format_heic"


RAMP = PIXELS.astype(np.uint8)
GRAY = RAMP[..., :1].copy()
DEEP = RAMP.astype(np.uint16) * 257


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("tile", [0, 16, 32])
def test_plain_tiffs_are_read(planar: bool, tile: int, subtests: pytest.Subtests) -> None:
    white = np.full_like(GRAY, 255)
    kinds: dict[str, tuple[np.ndarray, int, np.ndarray]] = {
        "gray": (GRAY, 1, GRAY),
        "inverted gray": (GRAY, 0, 255 - GRAY),
        "color": (RAMP, 2, RAMP),
        "color and opacity": (np.concatenate([RAMP, white], axis=-1), 2, RAMP),
        "CMYK": (np.concatenate([255 - RAMP, 0 * white], axis=-1), 5, RAMP),
        "deep gray": (DEEP[..., :1].copy(), 1, GRAY),
        "deep color": (DEEP, 2, RAMP),
    }
    for name, (pixels, photometric, wanted) in kinds.items():
        with subtests.test(name):
            data = tiff(pixels, planar=planar, tile=tile, photometric=photometric)
            try:
                image = decode_image(data, "boat")
            except InvalidRequestError as error:
                assert planar and error.code == "image.kind_unknown", error
            else:
                assert difference(image, wanted.astype(int)) <= 1


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "raw"])
def test_compressed_tiffs_are_read(compression: str) -> None:
    data = encoded(PICTURE, "TIFF", compression=compression, **({"quality": 95} if compression == "jpeg" else {}))
    assert difference(decode_image(data, "boat")) < 3


TIFF_KINDS: dict[str, tuple[np.ndarray, int]] = {
    "fractions": (GRAY.astype(np.float32) / 255, 1),
    "fractions in color": (RAMP.astype(np.float32) / 255, 2),
    "half fractions": (GRAY.astype(np.float16) / 255, 1),
    "signed": (GRAY.astype(np.int32) << 16, 1),
    "unsigned": (GRAY.astype(np.uint32) << 24, 1),
    "signed 16 bits": (GRAY.astype(np.int16) << 7, 1),
    "signed 8 bits": (GRAY.astype(np.int8), 1),
    "inverted 16 bits": (DEEP[..., :1].copy(), 0),
    "CIELAB": (RAMP, 8),
    "raw YCbCr": (RAMP, 6),
}


@pytest.mark.parametrize("name", TIFF_KINDS)
def test_rare_kinds_of_tiff_are_refused_by_name(name: str) -> None:
    """Their values mean something else than black to white in 8 or 16 bits."""
    pixels, photometric = TIFF_KINDS[name]
    with pytest.raises(InvalidRequestError) as refused:
        decode_image(tiff(pixels, photometric=photometric), "boat")
    assert (refused.value.code, refused.value.data["format"]) == ("image.kind_unknown", "TIFF")


def test_pillows_own_rare_tiffs_are_refused_by_name() -> None:
    for mode in ("F", "I", "LAB"):
        image = Image.new(mode, (64, 48)) if mode == "LAB" else PICTURE.convert("L").convert(mode)
        with pytest.raises(InvalidRequestError) as refused:
            decode_image(encoded(image, "TIFF"), "boat")
        assert (refused.value.code, refused.value.data["format"]) == ("image.kind_unknown", "TIFF")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "RGBX"])
def test_every_mode_of_every_format_is_what_pillow_shows(mode: str, subtests: pytest.Subtests) -> None:
    image = deep(0x8000) if mode == "I;16" else PICTURE.convert(mode)
    wanted = np.full((48, 64, 3), 128) if mode == "I;16" else np.asarray(image.convert("RGB")).astype(int)
    lossy: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 95},
        "WEBP": {"lossless": True},
        "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    }
    for kind in ("PNG", "TIFF") if mode == "I;16" else ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF"):
        try:
            data = encoded(image, kind, **lossy.get(kind, {}))
        except (OSError, ValueError, KeyError):  # the format has no such images
            continue
        with subtests.test(kind=kind):
            assert difference(decode_image(data, "boat"), wanted) < 6


def test_cmyk_becomes_rgb() -> None:
    data = encoded(PICTURE.convert("CMYK"), "JPEG", quality=95)
    assert difference(decode_image(data, "boat")) < 3
    assert difference(decode_image(encoded(PICTURE.convert("CMYK"), "TIFF"), "boat")) < 1


def test_color_profiles_are_applied() -> None:
    """A profile with another gamma: the numbers change, and a damaged profile is ignored."""
    linear = ImageCms.createProfile("XYZ")
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert linear is not None
    assert difference(decode_image(encoded(PICTURE, icc_profile=srgb), "boat")) <= 1
    for unusable in (lab, b"no profile", srgb[:200]):
        assert difference(decode_image(encoded(PICTURE, icc_profile=unusable), "boat")) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_honoured(kind: str, orientation: int) -> None:
    turned = {
        1: PICTURE,
        2: PICTURE.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: PICTURE.transpose(Image.Transpose.ROTATE_180),
        4: PICTURE.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: PICTURE.transpose(Image.Transpose.TRANSPOSE),
        6: PICTURE.transpose(Image.Transpose.ROTATE_90),
        7: PICTURE.transpose(Image.Transpose.TRANSVERSE),
        8: PICTURE.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind in {"JPEG", "AVIF"} else {}
    data = encoded(turned, kind, exif=exif, **options)
    assert difference(decode_image(data, "boat")) < 3
    assert check_image(data, "boat") == (64, 48)


def test_a_photo_with_further_pictures_is_its_first() -> None:
    """Phones add a depth map or a second lens behind the photo (MPO)."""
    data = encoded(PICTURE, "MPO", save_all=True, append_images=[PICTURE.rotate(180)], quality=95)
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert difference(decode_image(data, "boat.jpg")) < 3
    assert check_image(data, "boat.jpg") == (64, 48)


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "image.empty"),
    "text": (lambda: b"a red boat\n" * 100, "image.format_unknown"),
    "an MP4": (lambda: b"\0\0\0\x18ftypmp42" + bytes(100), "image.format_unknown"),
    "an SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "image.format_unknown"),
    "a PDF": (lambda: b"%PDF-1.7\n" + bytes(100), "image.format_unknown"),
    "EPS, which would run Ghostscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n" + bytes(100), "image.format_unknown"),
    "HEIC": (lambda: HEIC, "image.format_heic"),
    "a cut PNG": (lambda: encoded(picture(640, 480))[:2000], "image.damaged"),
    "a cut JPEG": (lambda: encoded(picture(640, 480), "JPEG")[:2000], "image.damaged"),
    "a cut WebP": (lambda: encoded(picture(640, 480), "WEBP")[:1000], "image.damaged"),
    "a cut AVIF": (lambda: encoded(picture(640, 480), "AVIF")[:-200], "image.damaged"),
    "a cut TIFF": (lambda: encoded(picture(640, 480), "TIFF")[:5000], "image.damaged"),
    "a PNG with wrong bytes": (lambda: encoded(PICTURE)[:60] + b"\xff\xff" + encoded(PICTURE)[62:], "image.damaged"),
    "a bomb": (lambda: bomb(50_000), "image.too_large"),
    "a smaller bomb": (lambda: bomb(8_000), "image.too_large"),
    "a GIF": (lambda: encoded(PICTURE, "GIF"), "image.format_gif"),
    "an animated GIF": (lambda: frames("GIF"), "image.format_gif"),
    "an animated WebP": (lambda: frames("WEBP"), "image.animated"),
    "an animated PNG": (lambda: frames("PNG"), "image.animated"),
    "an animated AVIF": (lambda: frames("AVIF"), "image.animated"),
    "a TIFF of several pages": (lambda: frames("TIFF"), "image.animated"),
    "one pixel": (lambda: encoded(picture(1, 1)), "image.too_small"),
    "a narrow one": (lambda: encoded(picture(15, 100)), "image.too_small"),
    "a strip": (lambda: encoded(picture(2000, 20)), "image.too_long"),
    "a column": (lambda: encoded(picture(20, 2000)), "image.too_long"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_content_is_refused(name: str, tmp_path: Path) -> None:
    make, code = REFUSED[name]
    data = make()
    path = tmp_path / "boat.png"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(InvalidRequestError) as refused:
        read_image(path, "last_image")
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert (refused.value.field, refused.value.code) == ("last_image", code)
    for line in (refused.value.what, refused.value.remedy):
        assert line and "\n" not in line and len(line) < 200
    assert "boat.png" in refused.value.what
    with pytest.raises(InvalidRequestError) as checked:
        check_image(data, "boat.png")
    assert checked.value.code == code


@pytest.mark.parametrize(
    "data", [bytes(range(256)), b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 ", b"\xff\xd8\xff"]
)
def test_a_signature_alone_is_no_image(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_image(data, "boat")


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_not_a_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "boat.png"
    HOSTILE[kind](path)
    with pytest.raises(InvalidRequestError) as refused:
        read_image(path)
    assert (refused.value.field, refused.value.code) == ("image", "image.not_a_file")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    large, missing = tmp_path / "large.png", tmp_path / "missing.png"
    large.touch()
    os.truncate(large, MAX_FILE_BYTES + 1)
    loop = tmp_path / "loop.png"
    loop.symlink_to(loop)
    below_a_file, long = saved(tmp_path / "a.png") / "b", tmp_path / ("x" * 300)
    codes = {large: "image.file_too_large"}
    for path in (large, missing, loop, below_a_file, long, Path("a\0b")):
        with pytest.raises(InvalidRequestError) as refused:
            read_image(path)
        assert refused.value.code == codes.get(path, "image.unreadable"), path


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = saved(tmp_path / "boat.png")
    path.chmod(0)
    with pytest.raises(InvalidRequestError) as refused:
        read_image(path)
    assert refused.value.code == "image.unreadable" and "Permission" in refused.value.what


def test_a_link_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.png"
    link.symlink_to(saved(tmp_path / "boat.png"))
    assert difference(read_image(link)) == 0


def test_a_frame_of_the_images_size_is_the_image() -> None:
    for fit in ("crop", "fit"):
        assert fitted(PICTURE, 64, 48, fit, 0) is PICTURE


@pytest.mark.parametrize(("position", "left"), [(0, 0), (25, 4), (50, 8), (100, 16)])
def test_cropping_keeps_the_part_at_the_position(position: float, left: int) -> None:
    assert difference(fitted(PICTURE, 48, 48, "crop", position), PIXELS[:, left : left + 48]) == 0
    upright = PICTURE.transpose(Image.Transpose.TRANSPOSE)
    assert difference(fitted(upright, 48, 48, "crop", position), np.asarray(upright)[left : left + 48]) == 0


def test_fitting_shows_everything_between_borders() -> None:
    frame = np.asarray(fitted(PICTURE, 96, 48, "fit", 0))
    assert difference(Image.fromarray(frame[:, 16:80].copy())) == 0
    assert not frame[:, :16].any() and not frame[:, 80:].any()
    wide = np.asarray(fitted(PICTURE, 32, 48, "fit"))
    assert not wide[:12].any() and not wide[36:].any() and wide[12:36].any(axis=-1).all()


@pytest.mark.slow
@pytest.mark.parametrize("given", [(64, 48), (16, 128), (300, 200), (1920, 1080)])
def test_frames_have_the_wanted_size(given: tuple[int, int], subtests: pytest.Subtests) -> None:
    image = picture(*given)
    for size in ((16, 16), (64, 16), (833, 481), (100, 800), (7, 8192)):
        for fit, position in product(("crop", "fit"), (0.0, 33.3, 100.0)):
            with subtests.test(size=size, fit=fit, position=position):
                assert fitted(image, *size, fit, position).size == size


def test_scaling_keeps_colors() -> None:
    """Halving a ramp gives the ramp of half as many steps."""
    small = fitted(picture(640, 480), 64, 48)
    assert difference(small) < 1.5


def test_thumbnails_are_small() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8))
    for image, size in ((picture(640, 480), (192, 144)), (noise, (192, 144)), (picture(16, 128), (16, 128))):
        data = thumbnail(image)
        assert len(data) <= THUMBNAIL_BYTES
        shown = Image.open(io.BytesIO(data))
        assert (shown.format, shown.size) == ("WEBP", size)
