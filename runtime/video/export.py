"""Exports finished videos: in another format, a part of one, or several in a row.

ffmpeg reads the files, so that an hour takes as much memory as a second. No partial file survives; see `mp4`.
"""

import itertools
import json
import math
import os
import shutil
import subprocess
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError, OutputError
from runtime.core.facts import Fact, shortened
from runtime.core.files import move_over, sync_folder
from runtime.core.plan import default_crf
from runtime.core.untrusted_files import open_file
from runtime.video.export_formats import LAST_FRAME, MP4, ExportFormat
from runtime.video.image_metadata import add_metadata
from runtime.video.mp4 import (
    TO_BT709,
    cannot_write,
    check_writable,
    ffmpeg_error,
    find_ffmpeg,
    find_metadata,
    to_ffmetadata,
    video_scratch,
)
from runtime.video.reader import VideoInfo, input_options, read_info, read_packets, square_filters

# The most clips of one file: each is an input of ffmpeg.
MOST_CLIPS = 50
_HIGHEST_CRF = 51
_LOG_LINES = 20
# How often ffmpeg reports its progress, and a request to stop is noticed.
_REPORT_SECONDS = "0.2"
_THREADS = "2"
# Of frames.
ZIP = ".zip"
_FRAMES, _FRAME = "frames", "frame-%05d.png"
# A list of MP4 files, each of which is checked to be one.
_ONLY_MP4S = ("-protocol_whitelist", "file", "-format_whitelist", "concat,mov")
_SRGB = "setparams=color_primaries=bt709:color_trc=iec61966-2-1"
# An encoder that ends all frames at once.
_WITHOUT_PROGRESS = "libwebp_anim"
_DITHER = "sierra2_4a:diff_mode=rectangle"
# Codecs of sound without loss, besides all whose names begin with "pcm_"; about the bytes of a second of it.
_LOSSLESS, _PCM = frozenset({"flac", "alac", "wavpack", "tta", "truehd", "mlp"}), "pcm_"
_LOSSLESS_BYTES = 150_000

Report = Callable[[float], None]


def no_report(_share: float) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Clip:
    """A video, or a part of one.

    Attributes:
        frames: of the whole video.
        first, last: the frames of the part, without `last`.
        configuration: of its decoder; videos in which it is equal can be joined without encoding.
        metadata: Tandem's; empty without any.
    """

    info: VideoInfo
    frames: int
    first: int
    last: int
    configuration: str
    metadata: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Clip":
        """Return a whole video.

        Raises: see `reader.read_info`.
        """
        info = read_info(path)
        frames, configuration = read_packets(info)
        return cls(info, frames, 0, frames, configuration, find_metadata(path))

    @property
    def count(self) -> int:
        """The number of frames of the part."""
        return self.last - self.first

    @property
    def is_whole(self) -> bool:
        """Whether no frame is left out."""
        return self.count == self.frames

    @property
    def has_lossless_sound(self) -> bool:
        """Whether its sound was encoded without loss."""
        return any(codec in _LOSSLESS or codec.startswith(_PCM) for codec in self.info.sound[:1])

    @property
    def start(self) -> float:
        """Where the part starts, in seconds."""
        return float(self.first / self.info.rate)

    @property
    def end(self) -> float:
        """Where the part ends, in seconds."""
        return float(self.last / self.info.rate)

    @property
    def request(self) -> Mapping[str, Any]:
        """The request that the video was made by; empty if it is not known."""
        request = self.metadata.get("request")
        return request if isinstance(request, Mapping) else {}

    @property
    def crf(self) -> int:
        """The constant rate factor that H.264 needs for the same quality; an upscaled video has another request."""
        size, crf = (self.info.width, self.info.height), self.request.get("crf")
        is_own = (self.request.get("width"), self.request.get("height")) == size
        return crf if is_own and isinstance(crf, int) and 0 <= crf <= _HIGHEST_CRF else default_crf(*size)

    @property
    def bits(self) -> float | None:
        """Bits per pixel without the metadata, if the video is H.264."""
        size = max(self.info.path.stat().st_size - _json_bytes(self.metadata), 1)
        pixels = self.info.width * self.info.height * self.frames
        return 8 * size / pixels if self.info.codec == "h264" else None

    def cut(self, start: float | None, end: float | None) -> "Clip":
        """Return the part between two times in seconds, each at the nearest frame.

        Raises:
            InvalidRequestError: if a time is not within the video, or there is no frame between them.
        """
        rate, seconds = self.info.rate, float(self.frames / self.info.rate)
        for field, value in (("start", start), ("end", end)):
            if value is not None and not (math.isfinite(value) and value >= 0 and round(value * rate) <= self.frames):
                data = {"value": shortened(value), "file": self.info.path.name, "most": seconds}
                raise InvalidRequestError(field, "export.time_outside", **data)
        first = 0 if start is None else round(start * rate)
        last = self.frames if end is None else round(end * rate)
        if first >= last:
            times = {"start": start or 0.0, "end": seconds if end is None else end}
            raise InvalidRequestError("end", "export.no_frames", **times, frame=float(1 / rate))
        return replace(self, first=first, last=last)


@dataclass(frozen=True)
class ExportPlan:
    """What is written.

    Attributes:
        clips: one after the other; of the same size and rate.
        width, height: of the frames that are written.
        encoder: ffmpeg's.
        frames: the number of frames that are written.
        copies: whether the encoded frames are copied.
        notes: what differs from the clips.
        bytes, seconds: about how large the file becomes, and how long it takes.
        sound: ffmpeg's options of the sound that is encoded; empty if the file has none.
    """

    format: ExportFormat
    clips: Sequence[Clip]
    encoder: str
    width: int
    height: int
    frames: int
    copies: bool
    notes: Sequence[Fact]
    bytes: int
    seconds: float
    sound: Sequence[str] = ()

    @classmethod
    def of(
        cls, clips: Sequence[Clip], kind: ExportFormat, width: int | None = None, *, lossless_sound: bool = False
    ) -> "ExportPlan":
        """Plan to write clips in a format.

        Args:
            width: of the frames, in pixels; `None` for the usual one.
            lossless_sound: whether sound is encoded without loss. Sound without loss in all clips stays so anyway,
                where the format can.

        Raises:
            InvalidRequestError: if the clips differ in size or rate, if the frames cannot have that width, or the
                format has no sound without loss.
            MachineError: if ffmpeg cannot write the format.
        """
        if lossless_sound:
            kind.check_lossless()
        info, encoder = clips[0].info, kind.encoder
        for clip in clips[1:]:
            check_equal(info, clip.info)
        out_width, out_height = kind.size(info.width, info.height, width)
        copies = (
            kind.name == MP4
            and (out_width, out_height) == (info.width, info.height)
            and len({clip.configuration for clip in clips}) == 1
            and all(clip.is_whole and (clip.info.codec, clip.info.pixels) == ("h264", kind.pixels) for clip in clips)
            # Streams of sound may differ in more than their codec.
            and not (len(clips) > 1 and any(clip.info.sound for clip in clips))
            and all(_is_mp4(clip.info.path) for clip in clips)
        )
        frames = kind.frames(sum(clip.count for clip in clips), info.rate)
        pixels = out_width * out_height * frames
        size, seconds = kind.estimate_bytes(pixels, clips[0].bits, clips[0].crf), kind.estimate_seconds(pixels)
        if copies:
            size, seconds = sum(clip.info.path.stat().st_size for clip in clips), kind.estimate_seconds(0)
        size += _json_bytes(clips[0].metadata) if not copies else 0
        loud = [clip for clip in clips if clip.info.sound]
        sound: Sequence[str] = ()
        if loud:
            keeps = lossless_sound or all(clip.has_lossless_sound for clip in loud)
            sound = kind.lossless if keeps and kind.lossless else kind.sound
        if sound and sound == kind.lossless and not copies:
            size += round(_LOSSLESS_BYTES * frames / info.rate)
        notes = kind.notes(info.width, out_width, info.rate, sound=bool(loud))
        notes += [Fact("export.copied")] if copies else []
        return cls(kind, clips, encoder, out_width, out_height, frames, copies, notes, size, seconds, sound)

    @property
    def rate(self) -> Fraction:
        """Frames per second of the file."""
        rate, most = self.clips[0].info.rate, self.format.rate
        return rate if most is None else min(rate, Fraction(most))

    def metadata(self) -> dict[str, Any]:
        """Return Tandem's metadata of the file: that of the first clip, and what was exported."""
        export: dict[str, Any] = {"format": self.format.name}
        if len(self.clips) == 1:
            clip = self.clips[0]
            export |= {"source": clip.info.path.name, "start": clip.start, "end": clip.end}
        else:
            export["parts"] = [
                {"source": clip.info.path.name, "frames": clip.count, "request": dict(clip.request)}
                for clip in self.clips
            ]
        return {"tandem": {**self.clips[0].metadata, "sound": bool(self.sound), "export": export}}


def _is_mp4(path: Path) -> bool:
    with open_file(path) as file:
        return file.read(8)[4:] == b"ftyp"


def _json_bytes(metadata: Mapping[str, Any]) -> int:
    return len(json.dumps(metadata))


def check_equal(first: VideoInfo, other: VideoInfo) -> None:
    """Check that two videos can follow each other.

    Raises:
        InvalidRequestError: if their sizes or rates differ.
    """
    if (first.width, first.height, first.rate) != (other.width, other.height, other.rate):
        names = {"file": other.path.name, "first": first.path.name}
        sizes = {"size": f"{other.width}×{other.height}", "first_size": f"{first.width}×{first.height}"}
        rates = {"rate": float(other.rate), "first_rate": float(first.rate)}
        raise InvalidRequestError("files", "export.clips_differ", **names, **sizes, **rates)


def default_target(plan: ExportPlan, folder: Path) -> Path:
    """Return a path in a folder at which there is nothing, named after the first clip."""
    source, suffix = plan.clips[0].info.path, plan.format.suffix
    kind = "joined" if len(plan.clips) > 1 else plan.format.name
    name = f"{source.stem}-{kind}" if len(plan.clips) > 1 or suffix in {"", source.suffix} else source.stem
    paths = (
        folder / f"{name}{number}{suffix}"
        for number in itertools.chain([""], (f"-{count}" for count in itertools.count(2)))
    )
    return next(path for path in paths if not path.exists())


def check_export_target(plan: ExportPlan, path: Path) -> None:
    """Check that a plan can be written to `path`: a file, or for frames a new folder or a ZIP.

    Raises:
        OutputError: if the name does not fit the format, there is something that cannot be replaced, the folder is
            missing or not writable, or its disk is too small.
        InvalidRequestError: if it is one of the clips.
    """
    suffix, actual = plan.format.suffix, path.suffix.lower()
    if actual != suffix and not (not suffix and actual == ZIP):
        raise OutputError("export.suffix", file=path, format=plan.format.name, suffix=suffix or ZIP)
    if not suffix and not actual and os.path.lexists(path):
        raise OutputError("export.folder_exists", folder=path)
    check_writable(path)
    for clip in plan.clips:
        if path.exists() and path.samefile(clip.info.path):
            raise InvalidRequestError("out", "source.same_file", file=path.name)
    free = shutil.disk_usage(path.parent).free
    if free < plan.bytes // 2:  # an estimate
        raise OutputError("video.disk_too_small", folder=path.parent, needs=plan.bytes, free=free)


def export(plan: ExportPlan, output: Path, report: Report = no_report, check: Callable[[], None] = never) -> str:
    """Write the file of a plan.

    Args:
        output: see `check_export_target`; an existing file is replaced only when the new one is complete.
        report: called with the share that is done, 0 to 1.
        check: called several times a second; an exception that it raises ends ffmpeg.

    Returns:
        What ffmpeg reported; empty unless a part of a clip is damaged.

    Raises:
        OutputError: if the disk is full or the file cannot be written.
        MachineError: if there is no ffmpeg.
    """
    with video_scratch(output) as folder:
        writer = _Writer(plan, folder, output, report, check)
        try:
            log = writer.copy() if plan.copies else None
            log = writer.encode() if log is None else log
            result = writer.pack()
            if result.is_file():
                with result.open("r+b") as file:
                    os.fsync(file.fileno())
            move_over(result, output)
            sync_folder(output.parent)
        except OSError as error:
            raise cannot_write(output, error) from error
    return log


@dataclass(frozen=True)
class _Writer:
    """The files of an export in a scratch folder, and ffmpeg's commands, which run there."""

    plan: ExportPlan
    folder: Path
    output: Path
    report: Report
    check: Callable[[], None]

    @property
    def file(self) -> str:
        """What ffmpeg writes."""
        return f"complete{self.plan.format.suffix}" if self.plan.format.suffix else f"{_FRAMES}/{_FRAME}"

    def copy(self) -> str | None:
        """Write the encoded frames of the clips; return ffmpeg's log, or `None` if frames would be missing."""
        clips = self.plan.clips
        inputs = input_options(clips[0].info.path)
        if len(clips) > 1:
            paths = (str(clip.info.path.absolute()).replace("'", "'\\''") for clip in clips)
            text = "".join(f"file '{path}'\n" for path in paths)
            (self.folder / "clips.txt").write_text(text, encoding="utf-8")
            inputs = [*_ONLY_MP4S, "-f", "concat", "-safe", "0", "-i", "clips.txt"]
        maps = [*self._tags(1), "-map", "0:V:0", "-map", "0:a?", "-c", "copy", "-movflags", "+faststart"]
        log = self._run([*inputs, *self._tags_input(), *maps, self.file])
        frames, _ = read_packets(read_info(self.folder / self.file))
        return log if frames == self.plan.frames else None

    def encode(self) -> str:
        """Encode the frames; return ffmpeg's log."""
        plan, graph = self.plan, self._graph()
        (self.folder / _FRAMES).mkdir()
        inputs = [option for clip in plan.clips for option in ("-threads", _THREADS, *input_options(clip.info.path))]
        output = ["-map", "[out]", "-c:v", plan.encoder, *plan.format.encoders[plan.encoder]]
        output += ["-pix_fmt", plan.format.pixels]
        if plan.format.name == MP4:
            output += ["-crf", str(plan.clips[0].crf)]
        if plan.format.kind == "video":
            inputs += self._tags_input()
            output += self._tags(len(plan.clips))
        if plan.sound:
            output += ["-map", "[sound]", *plan.sound]
        if plan.format.suffix != ".gif":
            return self._run([*inputs, "-filter_complex", graph, *output, self.file])
        # The palette is of all frames, which would wait in memory for it.
        palette = f"{graph};[out]palettegen=stats_mode=diff[palette]"
        self._run([*inputs, "-filter_complex", palette, "-map", "[palette]", "-update", "1", "palette.png"], 0, 2)
        with_palette = f"{graph.removesuffix('[out]')}[frames];[frames][{len(plan.clips)}]paletteuse={_DITHER}[out]"
        inputs += ["-i", "palette.png"]
        return self._run([*inputs, "-filter_complex", with_palette, "-map", "[out]", "-loop", "0", self.file], 1, 2)

    def pack(self) -> Path:
        """Add metadata to images, and make a ZIP of frames if the output is one; return the result."""
        file, kind = self.folder / self.file, self.plan.format
        if kind.suffix:
            if kind.kind != "video":
                add_metadata(file, self.plan.metadata())
            return file
        frames = sorted(file.parent.iterdir())
        add_metadata(frames[0], self.plan.metadata())
        if self.output.suffix.lower() != ZIP:
            return file.parent
        archive_file = self.folder / f"complete{ZIP}"
        with zipfile.ZipFile(archive_file, "w") as archive:  # PNGs do not become smaller
            for frame in frames:
                self.check()
                archive.write(frame, f"{self.output.stem}/{frame.name}")
        return archive_file

    def _tags_input(self) -> list[str]:
        prompt = self.plan.clips[0].request.get("prompt")
        text = to_ffmetadata(str(prompt or self.plan.clips[0].info.path.name), self.plan.metadata())
        (self.folder / "metadata.txt").write_text(text, encoding="utf-8")
        return ["-f", "ffmetadata", "-i", "metadata.txt"]

    def _tags(self, number: int) -> list[str]:
        """Return the options that take the tags of an input, and nothing else of the clips'."""
        return ["-map_metadata", str(number), "-map_metadata:s", "-1", "-map_chapters", "-1"]

    def _graph(self) -> str:
        """Return the filters from the clips to `[out]`, and to `[sound]` if there is any."""
        plan, chains, labels = self.plan, [], ""
        for number, clip in enumerate(plan.clips):
            part = "" if clip.is_whole else f",trim=start_frame={clip.first}:end_frame={clip.last}"
            square = square_filters(clip.info.matrix)
            chains.append(f"[{number}:V:0]fps={clip.info.rate}{part},setpts=PTS-STARTPTS,{square}[v{number}]")
            labels += f"[v{number}]"
            if plan.sound:
                chains.append(f"{_sound_of(number, clip)}[s{number}]")
                labels += f"[s{number}]"
        has_sound = bool(plan.sound)
        chains.append(f"{labels}concat=n={len(plan.clips)}:v=1:a={has_sound:d}[joined]{'[sound]' * has_sound}")
        info, kind = plan.clips[0].info, plan.format
        filters = []
        if kind.name == LAST_FRAME:
            last = sum(clip.count for clip in plan.clips)
            filters.append(f"trim=start_frame={last - 1}")
        if plan.rate != info.rate:
            filters.append(f"fps={plan.rate}")
        if plan.width < info.width - 1:
            filters.append(f"scale={plan.width}:{plan.height}:flags=lanczos+accurate_rnd+full_chroma_int")
        elif (plan.width, plan.height) != (info.width, info.height):
            filters.append(f"crop={plan.width}:{plan.height}:0:0")
        if kind.pixels.startswith("yuv"):
            filters.append(TO_BT709)
        else:
            # Images are sRGB, which players take videos for.
            filters += ["scale=flags=accurate_rnd+full_chroma_int", f"format={kind.pixels}", _SRGB]
        chains.append(f"[joined]{','.join(filters)}[out]")
        return ";".join(chains)

    def _run(self, arguments: Sequence[str], part: int = 0, parts: int = 1) -> str:
        """Run ffmpeg in the scratch folder; return what it reported.

        Args:
            part, parts: of the work, for the progress.
        """
        command = [find_ffmpeg(), "-v", "error", "-nostdin", "-y", "-nostats", "-progress", "pipe:1"]
        command += ["-stats_period", _REPORT_SECONDS, *arguments]
        began = time.monotonic()
        log: deque[bytes] = deque(maxlen=_LOG_LINES)
        # In its own process group, so that Ctrl-C reaches only this process.
        with subprocess.Popen(
            command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, env={**os.environ, "SVT_LOG": "1"},
        ) as process:  # fmt: skip
            reader = threading.Thread(target=log.extend, args=(process.stderr,), name="export-log", daemon=True)
            reader.start()
            try:
                for line in cast("Any", process.stdout):
                    self.check()
                    name, _, value = line.decode().strip().partition("=")
                    if name == "frame":
                        share = min(int(value) / self.plan.frames, 1.0)
                        if self.plan.encoder == _WITHOUT_PROGRESS:
                            seconds = time.monotonic() - began
                            share = seconds / (seconds + self.plan.seconds)
                        self.report((part + share) / parts)
            except BaseException:
                process.kill()
                raise
            finally:
                reader.join()
        lines = b"".join(log).decode("utf-8", "replace")
        if process.returncode != 0:
            raise ffmpeg_error(lines, self.output)
        return lines.strip().rpartition("\n")[2]


def _sound_of(number: int, clip: Clip) -> str:
    """Return the filters of a clip's sound, which is as long as its frames; silence if it has none."""
    if not clip.info.sound:
        return f"anullsrc=r=48000:cl=stereo,atrim=duration={clip.end - clip.start:.6f}"
    # Sound may start after the frames, or end before them.
    whole = f"aresample=async=1:first_pts=0,apad=whole_dur={clip.end:.6f}"
    return f"[{number}:a:0]{whole},atrim=start={clip.start:.6f}:end={clip.end:.6f},asetpts=PTS-STARTPTS"
