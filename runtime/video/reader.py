"""Reads the frames of any video file with ffmpeg, a few at a time: memory does not depend on the length.

Frames are upright, with square pixels, at a constant rate, 8 bits of RGB. A file is untrusted: ffmpeg opens no other
files and no network, knows only the formats of containers, and its first frame is checked before all are read.
"""

import re
import subprocess
import tempfile
import threading
from collections.abc import Generator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np

from runtime.core.errors import InvalidRequestError
from runtime.core.untrusted_files import NotRegularFileError, open_file
from runtime.video.mp4 import find_ffmpeg

COLORS = 3
# The most pixels of a frame, and the longest side.
_MAX_PIXELS, _MAX_SIDE = 1 << 25, 1 << 13
# The smallest side that an encoder takes.
_LEAST_SIDE = 2
_MAX_RATE = 240
# Of a file that ffmpeg cannot tell.
_COMMON_RATE = Fraction(25)
_PROBE_SECONDS = 60.0
_LOG_BYTES = 1 << 16
# ffmpeg's formats of containers. Playlists, which name other files, images and raw streams are not among them.
_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2;matroska,webm;avi;mpegts;mpeg;mpegvideo;flv;live_flv;asf;ogg;gif;apng;nut;mxf;ivf;"
    "h264;hevc;av1;obu;m4v;mjpeg;rm;dv;wtv;yuv4mpegpipe;webp_anim"
)
_HDR = re.compile(r"\b(smpte2084|arib-std-b67)\b")
_MATRIX = re.compile(r"\b(bt709|bt470bg|smpte170m|smpte240m|fcc|bt2020n?c?|gbr)\b")
# Larger frames whose matrix is not stated have that of HDTV.
_HDTV_HEIGHT = 720
_VIDEO = re.compile(r"^ *Stream #0:\d+.*?: Video: (?P<about>.*)$", re.MULTILINE)
_SOUND = re.compile(r"^ *Stream #0:\d+.*?: Audio: (?P<codec>\w+)", re.MULTILINE)
_DURATION = re.compile(r"^ *Duration: (\d+):(\d\d):(\d\d(?:\.\d+)?)", re.MULTILINE)
_AVERAGE = re.compile(r", ([\d.]+) fps")
_SIZE = re.compile(r"^#dimensions 0: (\d+)x(\d+)$", re.MULTILINE)
_RATE = re.compile(r"^#tb 0: (\d+)/(\d+)$", re.MULTILINE)
_FRAME = re.compile(r"^0,.*0x[0-9a-f]+$", re.MULTILINE)
# What a message begins with: the part of ffmpeg that states it, and its address.
_PART_OF_FFMPEG = re.compile(r"^(\[[^]]*\] )+")
_COVER = "(attached pic)"
# The codec and the format of the pixels, as in "h264 (High) (avc1 / 0x31637661), yuv420p(tv, bt709), 192x112".
_CODING = re.compile(r"(\w+)[^,]*, (\w+)")
# A packet: its time and its duration; and what configures the decoder.
_PACKET = re.compile(r"0, +\S+, +(-?\d+), +(\d+),")
_HEADER = re.compile(r"#extradata 0: +(.+)|#tb 0: (\d+)/(\d+)")


@dataclass(frozen=True)
class VideoInfo:
    """What a video file has.

    Attributes:
        width, height: of the frames as they are read, in pixels.
        rate: frames per second.
        seconds: its duration; `None` if the file does not state it.
        sound: the codec of each stream of sound, as ffmpeg names it.
        matrix: the option of ffmpeg's `scale` for colors whose matrix the file does not state.
        codec, pixels: the video's codec and the format of its pixels, as ffmpeg names them.
    """

    path: Path
    width: int
    height: int
    rate: Fraction
    seconds: float | None
    sound: tuple[str, ...]
    matrix: str
    codec: str = ""
    pixels: str = ""

    @property
    def frames(self) -> int | None:
        """About the number of frames."""
        return None if self.seconds is None else max(round(self.seconds * self.rate), 1)


def input_options(path: Path) -> list[str]:
    """Return ffmpeg's options that open an untrusted video."""
    limits = ["-protocol_whitelist", "file", "-format_whitelist", _FORMATS.replace(";", ",")]
    # A path that begins with a protocol's name, or with a minus, is a file nevertheless.
    return [*limits, "-i", f"file:{path.absolute()}"]


def read_info(path: Path, field: str = "file") -> VideoInfo:
    """Decode the first frame of a video; return what it has.

    Args:
        field: the argument that names the file, for errors.

    Raises:
        InvalidRequestError: if the file cannot be read, is no video, has no frames, is HDR, or has too large frames.
        MachineError: if there is no ffmpeg.
    """
    try:
        with open_file(path) as file:
            empty = not file.read(1)
    except NotRegularFileError as error:
        raise InvalidRequestError(field, "source.not_a_file", file=path) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(field, "source.unreadable", file=path, reason=reason) from error
    if empty:
        raise InvalidRequestError(field, "source.empty", file=path.name)
    command = [find_ffmpeg(), "-hide_banner", "-nostdin", "-max_pixels", str(_MAX_PIXELS), *input_options(path)]
    command += ["-map", "0:V:0", "-vf", square_filters(""), "-frames:v", "1", "-fps_mode", "cfr"]
    command += ["-c:v", "rawvideo", "-pix_fmt", "rgb24", "-f", "framecrc", "-"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise InvalidRequestError(field, "source.slow", file=path.name, seconds=_PROBE_SECONDS) from error
    log, out = done.stderr[:_LOG_BYTES].decode("utf-8", "replace"), done.stdout.decode("utf-8", "replace")
    return _info(path, field, log, out)


def _info(path: Path, field: str, log: str, out: str) -> VideoInfo:
    """Return what ffmpeg printed of a video: a description of the file, and of its first frame."""
    description = log.partition("\nOutput #0")[0]
    streams = [match["about"] for match in _VIDEO.finditer(description) if _COVER not in match[0]]
    sound = tuple(match["codec"] for match in _SOUND.finditer(description))
    size, rate = _SIZE.search(out), _RATE.search(out)
    if not streams and sound:
        raise InvalidRequestError(field, "source.only_sound", file=path.name)
    if not streams:
        raise InvalidRequestError(field, "source.no_video", file=path.name)
    if _HDR.search(streams[0]):
        raise InvalidRequestError(field, "source.hdr", file=path.name)
    if "max_pixels" in log or "Picture size" in log:
        raise InvalidRequestError(field, "source.too_large", file=path.name, most=_MAX_SIDE)
    if size is None or rate is None or not _FRAME.search(out):
        raise InvalidRequestError(field, "source.no_frames", file=path.name)
    width, height = int(size[1]), int(size[2])
    if max(width, height) > _MAX_SIDE or width * height > _MAX_PIXELS:
        raise InvalidRequestError(field, "source.too_large", file=path.name, most=_MAX_SIDE)
    if min(width, height) < _LEAST_SIDE:
        raise InvalidRequestError(field, "source.too_small", file=path.name, least=_LEAST_SIDE)
    duration = _DURATION.search(description)
    seconds = None
    if duration is not None:
        hours, minutes, rest = duration.groups()
        seconds = 3600 * int(hours) + 60 * int(minutes) + float(rest)
    coding = _CODING.match(streams[0])
    stated = _MATRIX.search(streams[0]) is not None or height < _HDTV_HEIGHT
    return VideoInfo(
        path=path,
        width=width,
        height=height,
        rate=_usual_rate(rate, streams[0]),
        seconds=seconds,
        sound=sound,
        matrix="" if stated else ":in_color_matrix=bt709",
        codec=coding[1] if coding else "",
        pixels=coding[2] if coding else "",
    )


def read_packets(info: VideoInfo) -> tuple[int, str]:
    """Return the number of frames of a video at its rate, and what configures its decoder; decodes nothing.

    Raises:
        InvalidRequestError: if the file has no frames, or reading it takes too long.
        MachineError: if there is no ffmpeg.
    """
    command = [find_ffmpeg(), "-v", "error", "-nostdin", *input_options(info.path), "-map", "0:V:0", "-c", "copy"]
    unit, configuration, packets, times = Fraction(1), "", 0, (0, 0)
    with subprocess.Popen(
        [*command, "-f", "framecrc", "-"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        timer = threading.Timer(_PROBE_SECONDS, process.kill)
        timer.start()
        try:
            for line in cast("Any", process.stdout):
                if packet := _PACKET.match(line):
                    start, end = int(packet[1]), int(packet[1]) + int(packet[2])
                    times = (min(times[0], start), max(times[1], end)) if packets else (start, end)
                    packets += 1
                elif header := _HEADER.match(line):
                    configuration = header[1] or configuration
                    unit = Fraction(int(header[2]), int(header[3])) if header[2] else unit
            process.wait()
            is_late = not timer.is_alive()
        finally:
            timer.cancel()
            process.kill()
    if is_late:
        raise InvalidRequestError("file", "source.slow", file=info.path.name, seconds=_PROBE_SECONDS)
    if not packets:
        raise InvalidRequestError("file", "source.no_frames", file=info.path.name)
    # A stream without times has packets alone.
    return round((times[1] - times[0]) * unit * info.rate) or packets, configuration


def _usual_rate(rate: re.Match[str], stream: str) -> Fraction:
    """Return the frames per second: of a variable rate whose ticks are too short, the average."""
    ticks, per_second = int(rate[1]), int(rate[2])
    exact = Fraction(per_second, ticks) if ticks and per_second else _COMMON_RATE
    if exact <= _MAX_RATE:
        return exact
    average = _AVERAGE.search(stream)
    value = Fraction(average[1]).limit_denominator(1001) if average else _COMMON_RATE
    return value if 0 < value <= _MAX_RATE else _COMMON_RATE


def square_filters(matrix: str) -> str:
    """Return the filters that make square pixels."""
    # A side that is too large is noticed in the first frame.
    width = f"min(round(iw*sar)\\,{_MAX_SIDE + 1})"
    return f"scale=w={width}:h=ih:flags=accurate_rnd+full_chroma_int+bicubic{matrix},setsar=1"


def read_video(info: VideoInfo, count: int) -> Generator[np.ndarray, None, str]:
    """Yield the frames of a video, at most `count` at a time: (n, height, width, 3) uint8.

    Returns:
        What ffmpeg reported; empty unless a part of the file is damaged.

    Raises:
        InvalidRequestError: if no frame can be read.
        MachineError: if there is no ffmpeg.
    """
    command = [find_ffmpeg(), "-v", "error", "-nostdin", "-max_pixels", str(_MAX_PIXELS), *input_options(info.path)]
    command += ["-map", "0:V:0", "-vf", square_filters(info.matrix), "-fps_mode", "cfr", "-r", str(info.rate)]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    size = info.width * info.height * COLORS
    any_frames = False
    # In its own process group, so that Ctrl-C reaches only this process.
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        ) as process,
    ):
        pipe = cast("Any", process.stdout)
        try:
            while True:
                data = bytearray(size * count)
                whole = pipe.readinto(data) // size
                if not whole:
                    break
                any_frames = True
                frames = np.frombuffer(data, np.uint8, whole * size)
                yield frames.reshape(whole, info.height, info.width, COLORS)
        except BaseException:
            process.kill()
            raise
        process.wait()
        log.seek(0)
        lines = log.read(_LOG_BYTES).decode("utf-8", "replace").strip().splitlines()
    if not any_frames:
        raise InvalidRequestError("file", "source.no_frames", file=info.path.name)
    if lines:
        return _PART_OF_FFMPEG.sub("", lines[-1])
    return "" if process.returncode == 0 else f"ffmpeg ended with {process.returncode}"
