"""The formats that finished videos are exported to: how ffmpeg writes them, and about how large they become."""

import functools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, sqrt
from typing import Literal

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.facts import Fact, shortened
from runtime.video.mp4 import AAC, FLAC, find_ffmpeg

Kind = Literal["video", "animation", "still"]

# The constant rate factor of H.264 videos whose settings are not known.
USUAL_CRF = 17
# A step of six of the constant rate factor is about a factor of two in bits.
_CRF_OF_HALF = 6
# Bits per pixel of a video that is not H.264, and of one with more details than were measured.
_USUAL_BITS, _MOST_BITS = 0.15, 0.6
# The shortest file, and how long ffmpeg takes to start.
_LEAST_BYTES, START_SECONDS = 200, 0.15
_LEAST_WIDTH = 16
# GIFs count time in hundredths of a second, and browsers slow down those with shorter delays than two of them.
_GIF_TICKS, _GIF_RATE = 100, 50
# Names of formats that differ from the others.
MP4, LAST_FRAME = "mp4", "last-frame"
_ENCODER = re.compile(r"^ V\S{5} (\S+)", re.MULTILINE)
_MPEG_4 = ("-movflags", "+faststart")
_X265 = ("-preset", "medium", "-crf", "20", "-tag:v", "hvc1", "-x265-params", "log-level=error", *_MPEG_4)
_AV1: Mapping[str, Sequence[str]] = {
    "libsvtav1": ("-preset", "6", "-crf", "26", *_MPEG_4),
    "libaom-av1": ("-cpu-used", "6", "-crf", "24", "-row-mt", "1", *_MPEG_4),
}


@dataclass(frozen=True)
class ExportFormat:
    """A format.

    Attributes:
        title, about: for users: its name, and what it is for.
        suffix: of its files; empty for a folder of frames.
        media_type: of its files, or of a ZIP of its frames.
        encoders: ffmpeg's, with their options; the first one that this ffmpeg has is used.
        pixels: ffmpeg's format of the pixels.
        sound: ffmpeg's options for sound; empty if the format has none.
        lossless: those for sound without loss; empty if the format has none.
        plays: whether Chromium plays or shows it.
        width: the usual width of larger videos; `None` for their own.
        rate: the highest number of frames per second.
        bits: bits per pixel of a video that has one bit per pixel in H.264 at `USUAL_CRF`, and the exponent with which
            they grow with the bits of that video; measured by `bench/exports.py`.
        nanoseconds: per pixel on one core, measured there too.
    """

    name: str
    title: str
    about: str
    kind: Kind
    suffix: str
    media_type: str
    encoders: Mapping[str, Sequence[str]]
    pixels: str
    bits: tuple[float, float]
    nanoseconds: float
    sound: Sequence[str] = ()
    lossless: Sequence[str] = ()
    plays: bool = True
    width: int | None = None
    rate: int | None = None

    @property
    def encoder(self) -> str:
        """The encoder that is used.

        Raises:
            MachineError: if this ffmpeg has none.
        """
        available = available_encoders()
        encoder = next((name for name in self.encoders if name in available), None)
        if encoder is None:
            usable = [entry.name for entry in FORMATS.values() if available.intersection(entry.encoders)]
            raise MachineError("export.no_encoder", format=self.name, encoders=list(self.encoders), usable=usable)
        return encoder

    def size(self, width: int, height: int, new_width: int | None = None) -> tuple[int, int]:
        """Return width and height of the frames of a video of this size.

        Args:
            new_width: the width of the frames; `None` for the usual one.

        Raises:
            InvalidRequestError: if the frames cannot have that width.
        """
        low = min(_LEAST_WIDTH, width)
        if new_width is not None and not low <= new_width <= width:
            limits = {"low": low, "high": width, "nearest": min(max(new_width, low), width)}
            raise InvalidRequestError("width", "request.out_of_range", value=new_width, **limits)
        out_width = new_width or min(width, self.width or width)
        out_height = max(round(height * out_width / width), 1)
        if self.pixels.startswith("yuv"):  # pairs of pixels share colors
            return out_width - out_width % 2, max(out_height - out_height % 2, 2)
        return out_width, out_height

    def frames(self, count: int, rate: Fraction) -> int:
        """Return how many frames are written of a video with so many at a rate."""
        if self.name == LAST_FRAME:
            return min(count, 1)
        return count if self.rate is None or rate <= self.rate else max(round(count * self.rate / rate), 1)

    def notes(self, width: int, new_width: int, rate: Fraction, *, sound: bool) -> list[Fact]:
        """Return what differs from a video of `width` whose frames are `new_width` wide in this format."""
        notes = [] if new_width >= width - 1 else [Fact("export.smaller", {"width": new_width, "before": width})]
        notes += [Fact("export.no_sound")] if sound and not self.sound else []
        if self.suffix == ".gif":
            if rate > _GIF_RATE:
                notes.append(Fact("export.gif_rate", {"rate": float(rate), "most": _GIF_RATE}))
            elif _GIF_TICKS % rate:
                tick = floor(_GIF_TICKS / rate)
                delays = {"rate": float(rate), "short": 10 * tick, "long": 10 * tick + 10}
                notes.append(Fact("export.gif_delays", delays))
        return notes

    def check_lossless(self) -> None:
        """Check that the format has sound without loss.

        Raises:
            InvalidRequestError: if it has none.
        """
        if not self.lossless:
            usable = [entry.name for entry in FORMATS.values() if entry.lossless]
            raise InvalidRequestError("lossless_sound", "export.no_lossless", format=self.name, usable=usable)

    def estimate_bytes(self, pixels: int, bits: float | None, crf: int) -> int:
        """Return about how large the file of so many pixels becomes, those of all frames together.

        Args:
            bits: per pixel of the video; `None` if it is not H.264.
            crf: its constant rate factor; a lossless video, with 0, says nothing of a lossy one.
        """
        if self.name == MP4 and bits is not None:
            return round(pixels * bits / 8)
        factor, exponent = self.bits
        source_bits = _USUAL_BITS if bits is None or not crf else bits * 2 ** ((crf - USUAL_CRF) / _CRF_OF_HALF)
        per_pixel: float = factor * min(source_bits, _MOST_BITS) ** exponent
        return max(round(pixels * per_pixel / 8), _LEAST_BYTES)

    def estimate_seconds(self, pixels: int) -> float:
        """Return about how long encoding takes; encoders do not use many cores well."""
        return START_SECONDS + pixels * self.nanoseconds * 1e-9 / sqrt(os.cpu_count() or 1)


_FORMATS = (
    ExportFormat(
        MP4, "MP4, H.264", "Plays everywhere.", "video", ".mp4", "video/mp4",
        {"libx264": ("-preset", "medium", *_MPEG_4)}, "yuv420p", (1.0, 1.0), 70, AAC, FLAC,
    ),
    ExportFormat(
        "h264-10bit", "MP4, H.264 with 10 bits", "Finer gradients after editing; few players.", "video", ".mp4",
        "video/mp4", {"libx264": ("-preset", "medium", "-crf", "17", *_MPEG_4)}, "yuv420p10le", (1.05, 1.04), 100, AAC,
        FLAC,
    ),
    ExportFormat(
        "h265", "MP4, H.265", "Smaller than H.264; Apple devices and TVs.", "video", ".mp4", "video/mp4",
        {"libx265": _X265}, "yuv420p", (1.16, 1.4), 200, AAC, FLAC, plays=False,
    ),
    ExportFormat(
        "h265-10bit", "MP4, H.265 with 10 bits", "As H.265, with smoother gradients.", "video", ".mp4", "video/mp4",
        {"libx265": _X265}, "yuv420p10le", (1.13, 1.4), 250, AAC, FLAC, plays=False,
    ),
    ExportFormat(
        "av1", "MP4, AV1", "The smallest video; browsers and new devices.", "video", ".mp4", "video/mp4",
        _AV1, "yuv420p", (0.79, 1.4), 50, AAC, FLAC,
    ),
    ExportFormat(
        "av1-10bit", "MP4, AV1 with 10 bits", "As AV1, with smoother gradients.", "video", ".mp4", "video/mp4",
        _AV1, "yuv420p10le", (0.74, 1.4), 65, AAC, FLAC,
    ),
    ExportFormat(
        "webm", "WebM, VP9", "For web pages.", "video", ".webm", "video/webm",
        {"libvpx-vp9": ("-crf", "24", "-b:v", "0", "-row-mt", "1", "-deadline", "good", "-cpu-used", "3")}, "yuv420p",
        (1.16, 1.4), 200, ("-c:a", "libopus", "-b:a", "128k"),
    ),
    ExportFormat(
        "prores", "MOV, ProRes 422 HQ", "For editing programs; large.", "video", ".mov", "video/quicktime",
        # Without the flag, the comment is limited to 64 KB.
        {"prores_ks": ("-profile:v", "3", "-vendor", "apl0", "-movflags", "+faststart+use_metadata_tags")},
        "yuv422p10le", (6.6, 0.2), 80, ("-c:a", "pcm_s16le"), ("-c:a", "pcm_s24le"), plays=False,
    ),
    ExportFormat(
        "gif", "GIF", "Moves in any chat or document; 256 colors.", "animation", ".gif", "image/gif",
        {"gif": ("-loop", "0")}, "rgb24", (3.8, 0.15), 350, width=480, rate=_GIF_RATE,
    ),
    ExportFormat(
        "webp", "WebP", "A smaller moving image for web pages.", "animation", ".webp", "image/webp",
        {"libwebp_anim": ("-loop", "0", "-quality", "80", "-compression_level", "4")}, "bgra", (2.3, 1.1), 120,
        width=720,
    ),
    ExportFormat(
        "png", "PNG frames", "Every frame without loss.", "still", "", "application/zip",
        {"png": ("-f", "image2")}, "rgb24", (13.0, 0.4), 400,
    ),
    ExportFormat(
        LAST_FRAME, "Last frame, PNG", "To start the next video from.", "still", ".png", "image/png",
        {"png": ("-frames:v", "1", "-update", "1")}, "rgb24", (13.0, 0.4), 400,
    ),
)  # fmt: skip
FORMATS: Mapping[str, ExportFormat] = {entry.name: entry for entry in _FORMATS}


def find_format(name: str) -> ExportFormat:
    """Return a format by its name.

    Raises:
        InvalidRequestError: if there is none.
    """
    if name not in FORMATS:
        raise InvalidRequestError("format", "request.not_a_choice", value=shortened(name), choices=list(FORMATS))
    return FORMATS[name]


def available_encoders() -> frozenset[str]:
    """Return the video encoders of ffmpeg, by its names; it is asked once for each program.

    Raises:
        MachineError: if there is no ffmpeg.
    """
    return _encoders_of(find_ffmpeg())


@functools.cache
def _encoders_of(program: str) -> frozenset[str]:
    done = subprocess.run([program, "-hide_banner", "-encoders"], capture_output=True, check=False, text=True)
    return frozenset(_ENCODER.findall(done.stdout))
