"""Reads the frames of any video file with ffmpeg, a few at a time: memory does not depend on the length; and its sound.

Frames are upright, with square pixels, at a constant rate, 8 bits of RGB. A file is untrusted: ffmpeg opens no other
files and no network, knows only the formats of containers, and its first frame is checked before all are read. ffmpeg
is killed when it takes too much memory, or too long for a part, and within a tenth of a second when it is cancelled.
"""

import re
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import psutil

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError
from runtime.core.untrusted_files import NotRegularFileError, open_file
from runtime.video.mp4 import find_ffmpeg

if TYPE_CHECKING:  # planning reads no frames, and importing it takes a tenth of a second
    import numpy as np

    from runtime.core.sound import Sound

Result = TypeVar("Result")

COLORS = 3
# The most pixels of a frame, and the longest side.
_MAX_PIXELS, _MAX_SIDE = 1 << 25, 1 << 13
# The smallest side that an encoder takes.
_LEAST_SIDE = 2
_MAX_RATE = 240
# Of a file that ffmpeg cannot tell.
_COMMON_RATE = Fraction(25)
# Without a frame for so long, a video cannot be read. A busy machine needs more than ffmpeg alone.
_WAIT_SECONDS = 60.0
# The longest that counting frames may take.
_COUNT_SECONDS = 600.0
# Of ffmpeg: a decoder keeps up to 17 frames, and one for each of its threads; the largest has 50 MB in 8 bits.
_MEMORY_BYTES = 4 << 30
_POLL_SECONDS = 0.05
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


# The header of an AU file: magic number, offset of the samples, their size, encoding, rate and channels.
_AU = struct.Struct(">4s5I")
# Sound that is read has these layouts, by the number of channels less one, and one of these rates.
_LAYOUTS = ("mono", "stereo")
_SOUND_RATES = (16_000, 22_050, 24_000, 32_000, 44_100, 48_000)


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


class _Decoder:
    """ffmpeg in a process of its own; use as a context manager, which ends it.

    Args:
        path, field: the video, and the argument that names it, for errors.
        options: of ffmpeg, after those of the input.
        check: called many times a second on a thread of its own; an exception that it raises ends ffmpeg, and `wait`
            raises it again.
        level: which messages of ffmpeg are logged.
        seconds: the most that all takes; `None` without a limit.
        stream: which stream of the file is decoded, as ffmpeg's `-map` names it.

    Raises:
        MachineError: if there is no ffmpeg.
    """

    def __init__(
        self,
        path: Path,
        field: str,
        options: Sequence[str],
        check: Callable[[], None],
        *,
        level: str = "error",
        seconds: float | None = None,
        stream: str = "0:V:0",
    ) -> None:
        limits = ["-v", level, "-hide_banner", "-nostdin", "-max_pixels", str(_MAX_PIXELS)]
        self._command = [find_ffmpeg(), *limits, *input_options(path), "-map", stream, *options]
        self._path, self._field, self._check = path, field, check
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `__exit__`
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._reads_since: float | None = None
        self._end_at = None if seconds is None else time.monotonic() + seconds
        self._most_seconds = seconds

    def __enter__(self) -> "_Decoder":
        """Start ffmpeg."""
        # In its own process group, so that Ctrl-C reaches only this process.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._output = cast("IO[bytes]", self._process.stdout)
        self._guard = threading.Thread(target=self._watch, name="video-reader", daemon=True)
        self._guard.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End ffmpeg."""
        self._process.kill()
        self._end()
        self._output.close()
        self._log.close()

    @property
    def log(self) -> str:
        """What ffmpeg reported; wait for its end before."""
        self._log.seek(0)
        return self._log.read(_LOG_BYTES).decode("utf-8", "replace")

    def read_line(self) -> bytes:
        """Return the next line of its output; empty at the end."""
        return self._timed(lambda output: output.readline(_LOG_BYTES))

    def read_into(self, data: bytearray) -> int:
        """Fill `data` from its output; return how many bytes there were."""
        return self._timed(lambda output: int(cast("Any", output).readinto(data)))

    def read_some(self) -> bytes:
        """Return the next bytes of its output; empty at the end."""
        return self._timed(lambda output: output.read(_LOG_BYTES))

    def _timed(self, read: Callable[[IO[bytes]], Result]) -> Result:
        """Read within the limit of time, which does not run while frames are used."""
        self._reads_since = time.monotonic()
        try:
            return read(self._output)
        finally:
            self._reads_since = None

    def wait(self) -> int:
        """Wait for ffmpeg's end; return its exit code.

        Raises:
            InvalidRequestError: if it was ended at a limit.
        """
        code = self._timed(lambda _: self._end())
        if self._error is not None:
            raise self._error
        return code

    def _end(self) -> int:
        code = self._process.wait()
        self._ended.set()
        self._guard.join()
        return code

    def _watch(self) -> None:
        """Kill ffmpeg at a limit."""
        try:
            while not self._ended.wait(_POLL_SECONDS) and self._process.poll() is None:
                self._check()
                self._check_limits()
        except BaseException as error:  # raised on the reading thread
            self._error = error
            self._process.kill()

    def _check_limits(self) -> None:
        now, since = time.monotonic(), self._reads_since
        if since is not None and now - since > _WAIT_SECONDS:
            raise InvalidRequestError(self._field, "source.slow", file=self._path.name, seconds=_WAIT_SECONDS)
        if self._end_at is not None and now > self._end_at:
            raise InvalidRequestError(self._field, "source.slow", file=self._path.name, seconds=self._most_seconds)
        try:
            used = psutil.Process(self._process.pid).memory_info().rss
        except psutil.Error:  # it has ended
            return
        if used > _MEMORY_BYTES:
            raise InvalidRequestError(self._field, "source.memory", file=self._path.name, most=_MEMORY_BYTES)


def read_info(path: Path, field: str = "file", check: Callable[[], None] = never) -> VideoInfo:
    """Decode the first frame of a video; return what it has.

    Args:
        field: the argument that names the file, for errors.
        check: called many times a second, by another thread; an exception that it raises ends the reading.

    Raises:
        InvalidRequestError: if the file cannot be read, is no video, has no frames, is HDR, has too large frames, or
            takes too much time or memory.
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
    options = ["-vf", square_filters(""), "-frames:v", "1", "-fps_mode", "cfr", "-c:v", "rawvideo", "-pix_fmt", "rgb24"]
    with _Decoder(path, field, [*options, "-f", "framecrc", "-"], check, level="info") as decoder:
        out = b"".join(iter(decoder.read_line, b"")).decode("utf-8", "replace")
        decoder.wait()
        return _info(path, field, decoder.log, out)


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
    unit, configuration, packets, times = Fraction(1), "", 0, (0, 0)
    with _Decoder(info.path, "file", ["-c", "copy", "-f", "framecrc", "-"], never) as decoder:
        for line in map(bytes.decode, iter(decoder.read_line, b"")):
            if packet := _PACKET.match(line):
                start, end = int(packet[1]), int(packet[1]) + int(packet[2])
                times = (min(times[0], start), max(times[1], end)) if packets else (start, end)
                packets += 1
            elif header := _HEADER.match(line):
                configuration = header[1] or configuration
                unit = Fraction(int(header[2]), int(header[3])) if header[2] else unit
        decoder.wait()
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


def count_frames(
    info: VideoInfo,
    rate: Fraction,
    most: int,
    field: str = "file",
    check: Callable[[], None] = never,
    start: float = 0.0,
) -> int:
    """Return how many frames a video has at a rate, at most `most`; `read_video` reads as many.

    Args:
        field, check: see `read_info`.
        start: see `read_video`.

    Raises:
        InvalidRequestError: if it has none, or takes too much time or memory.
    """
    # Without flushing, hundreds of frames may pass before a line is written.
    options = ["-vf", _nearest(rate, start), "-fps_mode", "passthrough", "-frames:v", str(most)]
    options += ["-f", "framecrc", "-flush_packets", "1", "-"]
    with _Decoder(info.path, field, options, check, seconds=_COUNT_SECONDS) as decoder:
        frames = sum(not line.startswith(b"#") for line in iter(decoder.read_line, b""))
        decoder.wait()
    if not frames:
        if start:
            raise InvalidRequestError("control_start", "control.starts_after_end", file=info.path.name, start=start)
        raise InvalidRequestError(field, "source.no_frames", file=info.path.name)
    return frames


def read_video(
    info: VideoInfo,
    count: int,
    *,
    rate: Fraction | None = None,
    most: int | None = None,
    field: str = "file",
    check: Callable[[], None] = never,
    start: float = 0.0,
) -> "Generator[np.ndarray, None, str]":
    """Yield the frames of a video, at most `count` at a time: (n, height, width, 3) uint8.

    Args:
        rate: frames per second, those nearest in time; by default, the video's own.
        most: the most frames; by default, all.
        field, check: see `read_info`.
        start: the second of the first frame, for frames at a rate of their own.

    Returns:
        What ffmpeg reported; empty unless a part of the file is damaged.

    Raises:
        InvalidRequestError: if no frame can be read, or it takes too much time or memory.
        MachineError: if there is no ffmpeg.
    """
    import numpy as np

    if rate is None:
        options = ["-vf", square_filters(info.matrix), "-fps_mode", "cfr", "-r", str(info.rate)]
    else:
        options = ["-vf", f"{_nearest(rate, start)},{square_filters(info.matrix)}", "-fps_mode", "passthrough"]
    options += [] if most is None else ["-frames:v", str(most)]
    size = info.width * info.height * COLORS
    any_frames = False
    with _Decoder(info.path, field, [*options, "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"], check) as decoder:
        while True:
            data = bytearray(size * count)
            whole = decoder.read_into(data) // size
            if not whole:
                break
            any_frames = True
            frames = np.frombuffer(data, np.uint8, whole * size)
            yield frames.reshape(whole, info.height, info.width, COLORS)
        code = decoder.wait()
        lines = decoder.log.strip().splitlines()
    if not any_frames:
        raise InvalidRequestError(field, "source.no_frames", file=info.path.name)
    if lines:
        return _PART_OF_FFMPEG.sub("", lines[-1])
    return "" if code == 0 else f"ffmpeg ended with {code}"


def read_sound(
    info: VideoInfo,
    seconds: Fraction,
    *,
    rate: int | None = None,
    channels: int | None = None,
    field: str = "file",
    check: Callable[[], None] = never,
) -> "Sound | None":
    """Return the first stream of sound of a video, from the start on; `None` if it has none.

    Args:
        seconds: the most that is read.
        rate, channels: of the samples; by default, those nearest to the stream's own, at most 48 kHz and two channels.
        field, check: see `read_info`.

    Raises:
        InvalidRequestError: if it takes too much time or memory.
        MachineError: if there is no ffmpeg.
    """
    import numpy as np

    from runtime.core.sound import Sound

    if not info.sound:
        return None
    layouts = _LAYOUTS if channels is None else _LAYOUTS[channels - 1 : channels]
    rates = "|".join(map(str, _SOUND_RATES if rate is None else [rate]))
    samples_of = f"aformat=channel_layouts={'|'.join(layouts)}:sample_rates={rates}"
    # Sound that starts later than the frames follows silence, and what is before them is left out.
    filters = f"aresample=async=1:first_pts=0,{samples_of},atrim=duration={float(seconds):.6f}"
    options = ["-af", filters, "-c:a", "pcm_f32be", "-f", "au", "pipe:1"]
    data = bytearray()
    with _Decoder(info.path, field, options, check, seconds=_COUNT_SECONDS, stream="0:a:0") as decoder:
        while part := decoder.read_some():
            data += part
        decoder.wait()
    if len(data) < _AU.size:
        return None
    # The header states the size of nothing that is written to a pipe.
    _, offset, _, _, own_rate, count = _AU.unpack_from(data)
    samples = np.frombuffer(data, ">f4", (len(data) - offset) // (4 * count) * count, offset)
    return Sound(np.ascontiguousarray(samples.reshape(-1, count).T, np.float32), own_rate)


def _nearest(rate: Fraction, start: float) -> str:
    """Return the filter that gives a video another constant rate from a second on, with the frames nearest in time.

    All is decoded from the beginning on: ffmpeg does not find times in transport streams and raw streams exactly.
    """
    return f"fps={rate}:start_time={start:.6f}" if start else f"fps={rate}"
