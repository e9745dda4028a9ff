"""MP4 files: write frames as H.264 with ffmpeg, with sound and metadata; read the metadata; copy a file without it.

No partial file survives. A writer works in a hidden scratch folder next to its target: first the stream, then a copy of
it with the index in front (faststart) and the metadata, which includes timings that are known only at the end. The copy
is renamed to the target. `sweep` removes scratch folders of killed processes.
"""

import contextlib
import functools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imageio_ffmpeg
from typing_extensions import Self

from runtime.core.cancel import never
from runtime.core.errors import MachineError, OutputError
from runtime.core.files import is_no_file_on_windows, move_over
from runtime.core.locks import remove_scratch_folders, scratch_folder
from runtime.core.plan import SoundFormat
from runtime.core.untrusted_files import MAX_JSON_BYTES, open_file, parse_json

if TYPE_CHECKING:  # commands that read metadata need no frames
    import numpy as np

    from runtime.core.sound import Sound

_QUEUED_CHUNKS = 4
_LOG_LINES = 50
# Codecs of sound that MP4 files have, by ffmpeg's names; others become AAC.
_SOUND_IN_MP4 = frozenset({"aac", "mp3", "ac3", "eac3", "alac", "opus", "flac"})
# ffmpeg's options of encoders of sound. FLAC has samples of 24 bits; browsers play it in MP4 files, unlike ALAC.
AAC = ("-c:a", "aac", "-b:a", "192k")
FLAC = ("-c:a", "flac", "-sample_fmt", "s32")
_SOUND_ENCODERS: Mapping[SoundFormat, Sequence[str]] = {"aac": AAC, "flac": FLAC}
_SCRATCH = ".tandem-"
# Limited-range BT.709 is what players assume; the stream declares it, so that colors are preserved.
TO_BT709 = (
    "scale=out_color_matrix=bt709:out_range=tv,"
    "setparams=range=tv:color_primaries=bt709:color_trc=bt709:colorspace=bt709"
)
_ENCODER = ("-c:v", "libx264", "-preset", "medium", "-pix_fmt", "yuv420p")
# Bytes per pixel of small encoded videos, and of lossless ones. A stream and its copy with metadata exist at the end.
_LEAST_RATE, _LOSSLESS_RATE = 0.02, 0.3
_SMALLEST_BYTES = 1 << 14
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "=;#\\\n"})
# Without these, ffmpeg would read a playlist of that name and the files that it lists.
_ONLY_MP4 = ("-protocol_whitelist", "file", "-f", "mov")
# ffmpeg's formats of other files that have metadata, by their first bytes.
OTHER_FORMATS = {b"\x1aE\xdf\xa3": "matroska", b"GIF8": "gif"}
_METADATA_SECONDS = 20.0
_FRAME_SECONDS = 120.0
# Matroska has names in upper case.
_COMMENT = re.compile(r"^(?:comment|COMMENT)=((?:[^\\\n]|\\.)*)", re.MULTILINE | re.DOTALL)


@functools.cache
def _check_once(program: str, changed: int) -> None:
    """Run ffmpeg, once in this process for each version of the file; a failure is not kept."""
    del changed
    subprocess.run([program, "-version"], check=True, capture_output=True)


def find_ffmpeg() -> str:
    """Return the path of an ffmpeg program: the one of imageio-ffmpeg, or `IMAGEIO_FFMPEG_EXE`.

    Raises:
        MachineError: if there is none that runs.
    """
    try:
        program: str = imageio_ffmpeg.get_ffmpeg_exe()
        _check_once(program, Path(shutil.which(program) or program).stat().st_mtime_ns)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise MachineError("video.no_ffmpeg") from error
    return program


class FrameProcess:
    """ffmpeg in a process of its own that takes frames while they arrive.

    Use as a context manager, which ends ffmpeg if it still runs: `write` chunks of frames, then `close`. If this
    process dies, ffmpeg reads the end of its input and ends too.

    Args:
        width, height: of the frames, in pixels.
        fps: frames per second, a fraction such as 30000/1001 if it is not whole.
        options: ffmpeg's, of what it makes of the frames.
        check: called while it waits for ffmpeg to take frames; may raise.

    Attributes:
        program: the path of ffmpeg.

    Raises:
        MachineError: if there is no ffmpeg.
    """

    # What ffmpeg writes to its standard output is for a subclass.
    _stdout = subprocess.DEVNULL

    def __init__(
        self,
        width: int,
        height: int,
        fps: int | Fraction,
        options: Sequence[str],
        check: Callable[[], None] = never,
    ) -> None:
        self.program = find_ffmpeg()
        self._command = [self.program, "-v", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"]
        self._command += ["-s", f"{width}x{height}", "-r", str(fps), "-i", "pipe:0", *options]
        self._check = check
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED_CHUNKS)
        self._error: OutputError | None = None
        # In memory, because the disk may be full.
        self._log: deque[str] = deque(maxlen=_LOG_LINES)

    def __enter__(self) -> Self:
        """Start ffmpeg."""
        # In its own process group, so that Ctrl-C reaches only this process.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=self._stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._log_reader = threading.Thread(target=self._read_log, name="video-log", daemon=True)
        self._log_reader.start()
        self._feeder = threading.Thread(target=self._feed, name="video-writer", daemon=True)
        self._feeder.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop ffmpeg if it is still running."""
        self._process.kill()
        self._process.wait()
        while self._feeder.is_alive():  # its next write fails; if it waits for frames, `None` ends it
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._feeder.join(0.05)
        self._log_reader.join()

    def write(self, frames: "np.ndarray") -> None:
        """Queue frames, (n, height, width, 3) uint8; waits while the queue is full.

        Raises:
            OutputError: if ffmpeg failed on an earlier chunk.
        """
        self._put(frames.tobytes())

    def close(self) -> None:
        """Wait until every frame is encoded.

        Raises:
            OutputError: if ffmpeg failed.
        """
        self._put(None)
        self._feeder.join()
        if self._error is not None:
            raise self._error
        if self._process.wait() != 0:
            raise self._failure()

    def _put(self, item: bytes | None) -> None:
        while True:
            if self._error is not None:
                raise self._error
            self._check()
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return

    def _feed(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            with pipe:
                while (data := self._queue.get()) is not None:
                    pipe.write(data)
        except OSError:
            self._process.wait()
            self._error = self._failure()

    def _read_log(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        with pipe:
            self._log.extend(line.decode("utf-8", "replace") for line in pipe)

    def _failure(self) -> OutputError:
        self._log_reader.join()
        return self._error_of("\n".join(self._log))

    def _error_of(self, log: str) -> OutputError:
        """Return the error of an ffmpeg that failed, by what it printed."""
        raise NotImplementedError


class FrameEncoder(FrameProcess):
    """Encodes frames while they arrive; see `FrameProcess`.

    Args:
        file: the file that ffmpeg writes.
        options: ffmpeg's, of encoder and format.
        target: the file that errors name.
    """

    def __init__(
        self, file: Path, width: int, height: int, fps: int | Fraction, options: Sequence[str], target: Path
    ) -> None:
        super().__init__(width, height, fps, ["-vf", TO_BT709, *options, str(file)])
        self._target = target

    def _error_of(self, log: str) -> OutputError:
        return ffmpeg_error(log, self._target)


@dataclass(frozen=True)
class SourceSound:
    """The sound of another file, and what describes that file.

    Attributes:
        inputs: ffmpeg's options that open the file.
        codecs: of each stream of sound, by ffmpeg's names.
        chapters: whether its chapters are kept: not if the video has another length.
    """

    inputs: Sequence[str]
    codecs: Sequence[str]
    chapters: bool = True

    def outputs(self, number: int) -> list[str]:
        """Return ffmpeg's options that add sound, tags and chapters of an input to an MP4; tags of others come first.

        Args:
            number: of the input.
        """
        options = ["-map_metadata", str(number), "-map_chapters", str(number) if self.chapters else "-1"]
        for index, codec in enumerate(self.codecs):
            options += ["-map", f"{number}:a:{index}"]
            options += [] if codec in _SOUND_IN_MP4 else [f"-c:a:{index}", "aac", f"-b:a:{index}", "192k"]
        return options


@dataclass(frozen=True)
class NewSound:
    """Sound that was made with the frames of a file.

    Attributes:
        sound: its length is that of the frames: the end is cut off, or silence follows.
        format: see `SoundFormat`.
    """

    sound: "Sound"
    format: SoundFormat


class VideoWriter:
    """Writes one MP4.

    Use as a context manager: `write` chunks of frames, then `close_stream` and `finish`. Leaving without `finish`
    removes everything that was written.

    Args:
        target: the MP4 to write, replaced only when the new one is complete.
        width, height: of the frames, in pixels.
        fps: see `FrameEncoder`.
        crf: H.264 constant rate factor, 0 to 51.
    """

    def __init__(self, target: Path, width: int, height: int, fps: int | Fraction, crf: int) -> None:
        self._target = target
        self._video = (width, height, fps)
        self._options = (*_ENCODER, "-crf", str(crf))
        self._exit = contextlib.ExitStack()
        self._frames = 0

    def __enter__(self) -> "VideoWriter":
        """Start ffmpeg.

        Raises:
            OutputError: if the target's folder cannot be written.
            MachineError: if there is no ffmpeg.
        """
        check_target(self._target)
        sweep(self._target.parent)
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(video_scratch(self._target))
            encoder = FrameEncoder(self._folder / "stream.mp4", *self._video, self._options, self._target)
            self._encoder = stack.enter_context(encoder)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop ffmpeg if it is still running and remove everything but the finished video."""
        self._exit.close()

    def write(self, frames: "np.ndarray") -> None:
        """See `FrameEncoder.write`."""
        self._encoder.write(frames)
        self._frames += len(frames)

    def close_stream(self) -> None:
        """See `FrameEncoder.close`."""
        self._encoder.close()

    def finish(self, title: str, metadata: Mapping[str, Any], sound: SourceSound | NewSound | None = None) -> None:
        """Write the metadata and the sound, and move the video to its target; call `close_stream` first.

        Raises:
            OutputError: if the disk is full or the target cannot be replaced.
        """
        complete = self._folder / "complete.mp4"
        stream, tags = self._folder / "stream.mp4", self._folder / "metadata.txt"
        try:
            tags.write_text(to_ffmetadata(title, metadata), encoding="utf-8")
            command = [self._encoder.program, "-v", "error", "-nostdin", "-y", "-i", str(stream), "-i", str(tags)]
            inputs, outputs = self._sound(sound)
            command += [*inputs, "-map", "0:v", "-map_metadata", "1", "-c", "copy", *outputs]
            command += ["-movflags", "+faststart", str(complete)]
            _run(command, self._target)
            with complete.open("r+b") as file:
                os.fsync(file.fileno())
            move_over(complete, self._target)
        except OSError as error:
            raise cannot_write(self._target, error) from error

    def _sound(self, sound: SourceSound | NewSound | None) -> tuple[Sequence[str], Sequence[str]]:
        """Return ffmpeg's options of sound: those of its input, the third one, and those of the MP4."""
        if sound is None:
            return (), ()
        if isinstance(sound, SourceSound):
            return sound.inputs, sound.outputs(2)
        from runtime.video.sound_samples import fitted, write_samples

        samples = fitted(sound.sound, self._frames, self._video[2])
        inputs = write_samples(samples, self._folder / "sound.f32")
        return inputs, ["-map", "2:a", *_SOUND_ENCODERS[sound.format]]


@contextlib.contextmanager
def copy_without_metadata(video: Path) -> Iterator[Path]:
    """Make a copy of a video with identical frames and sound, and no metadata; remove it on exit.

    Raises:
        OutputError: if the video cannot be read, or its folder cannot be written.
    """
    with video_scratch(video) as folder:
        copy = folder / "copy.mp4"
        command = [find_ffmpeg(), "-v", "error", "-y", *_ONLY_MP4, "-i", str(video)]
        command += ["-map", "0:v", "-map", "0:a?", "-map_metadata", "-1"]
        command += ["-map_metadata:s", "-1", "-bitexact", "-c", "copy", "-movflags", "+faststart", str(copy)]
        _run(command, video.name)
        yield copy


def to_ffmetadata(title: str, metadata: Mapping[str, Any]) -> str:
    """Return an ffmetadata file's text with `metadata` as JSON in the comment tag.

    Format: https://ffmpeg.org/ffmpeg-formats.html#Metadata-2
    """
    comment = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
    title = title.rstrip("\\").translate(_SPECIAL)  # ffmpeg joins the next line to a value that ends in a backslash
    return f";FFMETADATA1\ntitle={title}\ncomment={comment.translate(_SPECIAL)}\n"


def read_metadata(video: Path) -> dict[str, Any]:
    """Return the metadata of an MP4, MOV, WebM or GIF that Tandem made: how the video was generated.

    Raises:
        OutputError: if the file has none.
    """
    try:
        with open_file(video) as file:  # a FIFO or a device would let ffmpeg wait
            container = OTHER_FORMATS.get(file.read(4), "mov")
        comment = _COMMENT.search(metadata_text(video, container))
        unescaped = re.sub(r"\\(.)", r"\1", comment[1] if comment else "", flags=re.DOTALL)
        return dict(parse_json(unescaped.encode())["tandem"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise OutputError("video.no_metadata", file=video.name) from error


def find_metadata(video: Path) -> dict[str, Any]:
    """Return the metadata as `read_metadata` does; empty for a video that has none."""
    try:
        return read_metadata(video)
    except OutputError:
        return {}


def read_frame(video: Path, number: int) -> bytes:
    """Return one frame of a video as a PNG.

    Args:
        number: from 0.

    Raises:
        OutputError: if it cannot be read.
    """
    chosen = ("-vf", rf"select=eq(n\,{number}),scale=in_color_matrix=bt709:flags=accurate_rnd+full_chroma_int")
    command = [find_ffmpeg(), "-v", "error", *_ONLY_MP4, "-i", str(video), *chosen, "-frames:v", "1"]
    command += ["-pix_fmt", "rgb24", "-c:v", "png", "-f", "image2pipe", "-"]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_FRAME_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise OutputError("video.frame_unreadable", file=video.name) from error
    if run.returncode != 0 or not run.stdout:
        raise OutputError("video.frame_unreadable", file=video.name)
    return run.stdout


def metadata_text(video: Path, container: str) -> str:
    """Return a video's metadata in ffmpeg's own format; what exceeds the limits of size and time is left out."""
    only = ("-protocol_whitelist", "file", "-f", container)
    command = [find_ffmpeg(), "-v", "error", *only, "-i", str(video), "-f", "ffmetadata", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(_METADATA_SECONDS, process.kill)
        timer.start()
        try:
            return process.stdout.read(MAX_JSON_BYTES).decode("utf-8", "replace")
        finally:
            timer.cancel()
            process.kill()


def sweep(folder: Path) -> None:
    """Remove the scratch folders of killed processes."""
    remove_scratch_folders(folder, _SCRATCH)


def check_output(path: Path, width: int, height: int, frames: int, crf: int, sound: SoundFormat | None = None) -> None:
    """Check that a video of this size can be encoded and saved at `path`, before it is computed.

    Args:
        sound: the format of its sound; `None` without sound.

    Raises:
        MachineError: if there is no ffmpeg, or it cannot encode H.264 or the sound.
        OutputError: as `check_target`, or if its disk is too small.
    """
    check_target(path)
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "16x16"]
    _check_encoder("video.no_encoder", [*raw, "-i", "pipe:0", "-vf", TO_BT709, *_ENCODER])
    if sound is not None:
        raw = ["-f", "f32le", "-ar", "48000", "-ac", "2"]
        _check_encoder("video.no_sound_encoder", [*raw, "-i", "pipe:0", *_SOUND_ENCODERS[sound]])
    needs = _SMALLEST_BYTES + round(2 * width * height * frames * (_LOSSLESS_RATE if crf == 0 else _LEAST_RATE))
    free = shutil.disk_usage(path.parent).free
    if free < needs:
        raise OutputError("video.disk_too_small", folder=path.parent, needs=needs, free=free)


def _check_encoder(code: str, options: Sequence[str]) -> None:
    """Check that ffmpeg can encode one frame of zeros; raise the error `code` if it cannot."""
    command = [find_ffmpeg(), "-v", "error", *options, "-f", "null", "-"]
    # In its own process group, so that Ctrl-C reaches only this process.
    done = subprocess.run(command, input=bytes(16 * 16 * 3), capture_output=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise MachineError(code, program=command[0], line=last_line(done.stderr.decode("utf-8", "replace")))


def check_target(path: Path) -> None:
    """Check that an MP4 can be written at `path`.

    Raises:
        OutputError: if it is not an .mp4, its folder is missing or not writable, or it is something else than a file.
    """
    if path.suffix.lower() != ".mp4":
        raise OutputError("video.not_mp4", file=path)
    check_writable(path)


def check_writable(path: Path) -> None:
    """Check that a file can be written at `path`.

    Raises:
        OutputError: if its folder is missing or not writable, it is something else than a file, or no name of one.
    """
    if sys.platform == "win32" and is_no_file_on_windows(path.name):
        raise OutputError("video.no_file_name", file=path.name)
    try:
        if not path.parent.is_dir():
            raise OutputError("video.folder_missing", folder=path.parent)
        if path.exists() and not path.is_file():
            raise OutputError("video.not_a_file", file=path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def video_scratch(video: Path) -> Iterator[Path]:
    """Make a locked scratch folder next to a video; remove it on exit."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(video.parent, _SCRATCH))
        except OSError as error:
            raise cannot_write(video, error) from error
        yield folder


def _run(command: list[str], file: object) -> None:
    """Run ffmpeg in its own process group; raise the error for `file` if it fails."""
    run = subprocess.run(command, capture_output=True, check=False, start_new_session=True)
    if run.returncode != 0:
        raise ffmpeg_error(run.stderr.decode("utf-8", "replace"), file)


def ffmpeg_error(log: str, file: object) -> OutputError:
    """Return the error of an ffmpeg that could not write a file, by what it printed."""
    if "No space left on device" in log:
        return OutputError("video.disk_full", file=file)
    return OutputError("video.ffmpeg_failed", file=file, line=last_line(log))


def last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "no message"


def cannot_write(path: Path, error: Exception) -> OutputError:
    """Return the error of a file that could not be written or replaced."""
    reason = getattr(error, "strerror", None) or str(error)
    if "No space left" in reason:
        return OutputError("video.disk_full", file=path)
    return OutputError("video.not_writable", file=path, reason=reason)
