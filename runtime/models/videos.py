"""Video files that a video is made from: find and check them, keep a copy, and add one to a model's spec. No torch.

Copies are in the folder of images' copies (`models.images`), and are found, sent and removed as those are.
"""

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from PIL import Image

from runtime.core.cancel import never
from runtime.core.digests import sha256
from runtime.core.errors import InvalidRequestError, OutputError
from runtime.core.facts import Fact
from runtime.core.files import replace_file
from runtime.core.images import CROP, MIDDLE, ImageUse, InputFile, VideoUse, parse_reference
from runtime.core.locks import held
from runtime.core.plan import ResolvedRequest
from runtime.core.request import AUTO, CONTROL_FIELDS, MAX_FPS, GenerationRequest
from runtime.core.untrusted_files import NotRegularFileError, open_file
from runtime.models.images import (
    DISK_FULL,
    LOCK,
    all_models,
    find_image,
    images_dir,
    keep_image,
    named_file,
    open_image,
    remember,
)
from runtime.models.spec import ModelSpec
from runtime.video.image_messages import MAX_LINE_BYTES, announced_format
from runtime.video.images import fitted
from runtime.video.reader import VideoInfo, count_frames, read_info, read_video

FIELD = "video"
MAX_FILE_BYTES = 1 << 30
# A copy that is used again is new again, but not each time: its digest is known by its time.
_TOUCHED_SECONDS = 3600.0
_PART_BYTES = 1 << 20
# Formats of files that are images; a GIF is read as a video.
_STILL = frozenset({"JPEG", "PNG", "WEBP", "AVIF", "HEIC", "BMP", "TIFF"})
# Refusals that name the whole path.
_OF_PATHS = frozenset({"source.unreadable", "source.not_a_file"})


class _Stamp(NamedTuple):
    """A file as it was when it was read."""

    path: Path
    inode: int
    size: int
    modified: int


class _Counted(NamedTuple):
    """The frames of a video at a rate in frames per second, counted up to `most`."""

    info: VideoInfo
    fps: int
    frames: int
    most: int


# What was read of files: a form asks for a plan with each change.
_DIGESTS: dict[_Stamp, str] = {}
_COUNTED: dict[tuple[str, int | None, float], _Counted] = {}


def with_video(
    spec: ModelSpec,
    request: GenerationRequest,
    weights_dir: Path,
    cache_dir: Path | None,
    *,
    keep: bool = True,
    check: Callable[[], None] = never,
) -> ModelSpec:
    """Return a model with the video of a request, checked and copied; the same model if the request has none.

    Args:
        cache_dir, keep, check: see `models.images.with_images`.

    Raises:
        InvalidRequestError: if the video cannot be read, the model does not start from one, or there is an image too.
        MachineError: if there is no ffmpeg.
        OutputError: if the disk is too full for a copy.
    """
    check_video(spec, request, weights_dir)
    if request.video is None:
        return spec
    fps, most = frames_taken(request, spec)
    return spec.from_video(find_video(request.video, cache_dir, fps, most, keep=keep, check=check))


def check_video(spec: ModelSpec, request: GenerationRequest, weights_dir: Path) -> None:
    """Check that a model starts from the video of a request, without reading its file; see `with_video`.

    Raises:
        InvalidRequestError: if it does not, or there is an image too.
    """
    if request.video is None:
        return
    if request.image is not None or request.last_image is not None or request.keyframes:
        raise InvalidRequestError(FIELD, "source.with_image")
    if spec.video_input is None:
        able = [model.name for model in all_models(weights_dir) if model.video_input is not None]
        code = "source.model_without" if able else "source.no_model"
        raise InvalidRequestError(FIELD, code, model=spec.title, models=able)


def frames_taken(request: GenerationRequest, spec: ModelSpec) -> tuple[int, int]:
    """Return the rate at which a request reads a video, in frames per second, and the most frames that it can take."""
    fps = spec.defaults.fps if request.fps == AUTO else int(request.fps)
    if request.frames != AUTO:
        return fps, int(request.frames)
    if request.seconds != AUTO:
        return fps, round(float(request.seconds) * fps) + spec.frame_stride
    return fps, spec.defaults.frames


def find_video(
    file: str,
    cache_dir: Path | None,
    fps: int | None,
    most: int,
    *,
    field: str = FIELD,
    keep: bool = True,
    check: Callable[[], None] = never,
    start: float = 0.0,
) -> VideoUse:
    """Return a video that a request names, checked; see `with_video`.

    Args:
        fps: the rate at which its frames are read; `None` for its own, in whole frames per second.
        most: the most frames to count.
        field: the request's field, for errors.
        start: the second of its first frame that is used.
    """
    reference = parse_reference(file)
    if reference is None:
        path, name = named_file(file)
    else:
        path, name = images_dir(cache_dir or Path()) / reference.digest, reference.name
        if cache_dir is None or not path.is_file() or _digest(path, name, field, check) != reference.digest:
            raise InvalidRequestError(field, "source.copy_missing", file=name)
    with _named(name):
        counted = _count(path, name, field, fps, most, check, start)
    info, digest = counted.info, _digest(path, name, field, check)
    kept = _kept(path, name, field, digest, cache_dir, check) if keep and cache_dir is not None else path
    return VideoUse(
        name=name,
        path=kept,
        digest=digest,
        width=info.width,
        height=info.height,
        fps=counted.fps,
        frames=min(counted.frames, most),
        seconds=info.seconds,
    )


def find_picture(
    file: str,
    cache_dir: Path | None,
    fps: int | None,
    most: int,
    *,
    field: str,
    keep: bool = True,
    check: Callable[[], None] = never,
    start: float = 0.0,
) -> ImageUse | VideoUse:
    """Return an image or a video that a request names, checked; see `find_video` and `models.images.find_image`."""
    reference = parse_reference(file)
    path = named_file(file)[0] if reference is None else images_dir(cache_dir or Path()) / reference.digest
    if _is_image(path):
        with _unless_animated():
            return find_image(file, field, cache_dir, keep=keep, check=check)
    return find_video(file, cache_dir, fps, most, field=field, keep=keep, check=check, start=start)


def keep_picture(
    data: bytes, name: str, cache_dir: Path, *, field: str, check: Callable[[], None] = never
) -> ImageUse | VideoUse:
    """Check the content of an image's or a video's file, and keep it; see `keep_video`."""
    if announced_format(data) in _STILL:
        with _unless_animated():
            return keep_image(data, name, field, cache_dir, check=check)
    return keep_video(data, name, cache_dir, field=field, check=check)


@contextlib.contextmanager
def _unless_animated() -> Iterator[None]:
    """Ignore that a picture is animated: it is a video then."""
    try:
        yield
    except InvalidRequestError as error:
        if error.code != "image.animated":
            raise


def _is_image(path: Path) -> bool:
    """Return whether a file is an image by its first bytes; what cannot be read is not."""
    try:
        with open_file(path) as file:
            return announced_format(file.read(MAX_LINE_BYTES)) in _STILL
    except (NotRegularFileError, OSError, ValueError):
        return False


def keep_video(
    data: bytes, name: str, cache_dir: Path, *, field: str = FIELD, check: Callable[[], None] = never
) -> VideoUse:
    """Check the content of a video's file, and keep it in the cache folder; see `find_video`.

    Raises:
        InvalidRequestError: if it cannot be used.
        MachineError: if there is no ffmpeg.
        OutputError: if it cannot be written.
    """
    folder = images_dir(cache_dir)
    partial = folder / f"{hashlib.sha256(data).hexdigest()}.{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        with _named(name):
            use = find_video(str(partial), cache_dir, None, 1, field=field, check=check)
    except OSError as error:
        code = "source.disk_full" if error.errno in DISK_FULL else "source.not_kept"
        raise OutputError(code, folder=folder) from error
    finally:
        partial.unlink(missing_ok=True)
    if use.path == partial:
        raise OutputError("source.not_kept", folder=folder)
    return use.replace(name=name)


def open_video(use: VideoUse, check: Callable[[], None] = never, field: str = FIELD) -> VideoInfo:
    """Return what is needed to read a video.

    Raises:
        InvalidRequestError: if its file is gone or has changed.
        MachineError: if there is no ffmpeg.
    """
    if not use.path.is_file():
        raise InvalidRequestError(field, "source.gone", file=use.name)
    if _digest(use.path, use.name, field, check) != use.digest:
        raise InvalidRequestError(field, "source.changed", file=use.name)
    with _named(use.name):
        return read_info(use.path, field, check)


def clip_frames(
    use: VideoUse,
    settings: ResolvedRequest,
    field: str,
    check: Callable[[], None] = never,
    warn: Callable[[Fact], None] | None = None,
    *,
    first: int = 0,
    end: int | None = None,
    side: int | None = None,
) -> Iterator[Image.Image]:
    """Yield the frames of a video that a clip is made from, one for each frame of the clip, RGB and of its size.

    Args:
        settings: of the clip.
        field: the request's field of the video.
        check: see `with_video`.
        warn: called at the end if a part of the file is damaged.
        first, end: of the clip's frames, the number of the first one to yield and of the one after the last; `None` for
            all.
        side: width and height of the frames, which show the middle of the video's; `None` for the clip's size.

    Raises:
        InvalidRequestError: if it cannot be read, or has fewer frames by now.
        MachineError: if there is no ffmpeg.
    """
    info, count, damage = open_video(use, check, field), 0, ""
    start = settings.control_start if field in CONTROL_FIELDS else 0.0
    rate, most = Fraction(settings.fps), settings.frames if end is None else end
    size = (settings.width, settings.height) if side is None else (side, side)
    fit, position = (settings.image_fit, settings.image_position) if side is None else (CROP, MIDDLE)
    frames = read_video(info, 1, rate=rate, most=most, field=field, check=check, start=start)
    with contextlib.closing(frames) as reading:
        while True:
            try:
                (frame,) = next(reading)
            except StopIteration as stop:
                damage = stop.value
                break
            if count >= first:
                yield fitted(Image.fromarray(frame), *size, fit, position)
            count += 1
    if count < most:
        raise InvalidRequestError(field, "source.shorter", file=use.name, frames=count, planned=most)
    if damage and warn is not None:
        warn(Fact("source.damaged", {"file": use.name, "line": damage}))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Name a video in errors as people know it, not by the name of its copy."""
    try:
        yield
    except InvalidRequestError as error:
        if error.code in _OF_PATHS:
            raise
        raise InvalidRequestError(error.field, error.code, **{**error.data, "file": name}) from error


def open_picture(use: InputFile, start: float = 0.0) -> Image.Image:
    """Return an image, or the frame of a video at a second, by default the first one, as RGB with 8 bits.

    Raises:
        InvalidRequestError: if its file is gone or has changed.
        MachineError: if a program that reads it does not start.
    """
    if not isinstance(use, VideoUse):
        return open_image(use)
    rate = Fraction(MAX_FPS) if start else None
    frames = next(read_video(open_video(use), 1, rate=rate, most=1, field=FIELD, start=start))
    return Image.fromarray(frames[0])


def _count(
    path: Path, name: str, field: str, fps: int | None, most: int, check: Callable[[], None], start: float
) -> _Counted:
    """Return what a video has, and at least `most` of its frames counted if there are so many."""
    digest = _DIGESTS.get(_stamp(path, name, field))
    counted = None if digest is None else _COUNTED.get((digest, fps, start))
    if counted is None or counted.frames == counted.most < most:
        # What is no video is refused before all of it is read for its digest.
        info = read_info(path, field, check)
        rate = min(max(round(info.rate), 1), MAX_FPS) if fps is None else fps
        counted = _Counted(info, rate, count_frames(info, Fraction(rate), most, field, check, start), most)
        remember(_COUNTED, (_digest(path, name, field, check), fps, start), counted)
    return counted


def _digest(path: Path, name: str, field: str, check: Callable[[], None]) -> str:
    """Return the SHA-256 of a file, which is read once for each time of modification."""
    stamp = _stamp(path, name, field)
    digest = _DIGESTS.get(stamp)
    if digest is None:
        try:
            digest = sha256(path, check)
        except OSError as error:
            raise _unreadable(path, field, error) from error
        remember(_DIGESTS, stamp, digest)
    return digest


def _stamp(path: Path, name: str, field: str) -> _Stamp:
    """Return what changes with a file.

    Raises:
        InvalidRequestError: if it is too large, or is not there.
    """
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, field, error) from error
    if stat.st_size > MAX_FILE_BYTES and S_ISREG(stat.st_mode):
        raise InvalidRequestError(field, "source.file_too_large", file=name, most=MAX_FILE_BYTES)
    return _Stamp(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _unreadable(path: Path, field: str, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(
        field, "source.unreadable", file=path, reason=getattr(error, "strerror", None) or str(error)
    )


def _kept(path: Path, name: str, field: str, digest: str, cache_dir: Path, check: Callable[[], None]) -> Path:
    """Copy a video to the cache, or find its copy; return its path, or `path` if nothing can be written there."""
    folder = images_dir(cache_dir)
    copy = folder / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / LOCK):
            if not copy.is_file() or _digest(copy, name, field, check) != digest:
                replace_file(copy, _content(path, name, field, digest, check), sync=True)
            elif time.time() - copy.stat().st_mtime > _TOUCHED_SECONDS:
                # It is new again, so that `images.remove_unused` does not take it for one that is no longer used.
                os.utime(copy)
                remember(_DIGESTS, _stamp(copy, name, field), digest)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise OutputError("source.disk_full", folder=folder) from error
        return path
    return copy


def _content(path: Path, name: str, field: str, digest: str, check: Callable[[], None]) -> Iterator[bytes]:
    """Yield the content of a file.

    Raises:
        InvalidRequestError: after the last part, if it has another digest by now.
    """
    content = hashlib.sha256()
    with open_file(path) as file:
        while part := file.read(_PART_BYTES):
            check()
            content.update(part)
            yield part
    if content.hexdigest() != digest:
        raise InvalidRequestError(field, "source.changed", file=name)
