"""Image files: find and check them, keep a copy of each, and add them to a model's spec. Imports no torch.

A copy has the content of the file, and its SHA-256 as its name, so that a job runs and resumes after the file has
changed or is gone. `queue.storage` removes the copies that no job needs.
"""

import contextlib
import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

from PIL import Image

from runtime.core.cancel import never
from runtime.core.errors import InvalidRequestError, OutputError, TandemError
from runtime.core.files import remove_partial_files, replace_file
from runtime.core.images import ImageUse, InputFile, parse_reference
from runtime.core.locks import held
from runtime.core.request import OFF, GenerationRequest
from runtime.models.catalogue import add_usable, not_downloaded
from runtime.models.spec import ModelSpec
from runtime.video.images import check_image, decode_image, read_bytes

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_KEYFRAMES = "keyframes"
# Videos are there too, see `models.videos`.
_FOLDER = "images"
# Held while a copy is written, found or removed.
LOCK = "lock"
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Copies that no job uses stay for a day: a form may show them, or a question wait for its answer.
KEPT_SECONDS = 24 * 3600.0
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Sizes of images that were decoded without an error, by digest: a form asks for a plan with each change.
_DECODED: dict[str, tuple[int, int]] = {}
_MOST_ENTRIES = 256


def images_dir(cache_dir: Path) -> Path:
    """Return the folder of the copies."""
    return cache_dir / _FOLDER


def with_images(
    spec: ModelSpec,
    request: GenerationRequest,
    weights_dir: Path,
    cache_dir: Path | None,
    *,
    needs_image: bool = True,
    keep: bool = True,
    check: Callable[[], None] = never,
) -> ModelSpec:
    """Return a model with the images of a request, checked and copied.

    Args:
        cache_dir: the cache folder; `None` for none, so that nothing is copied.
        needs_image: whether an image must be given for a model that makes no video without one.
        keep: whether the images are copied to the cache; otherwise the files themselves are used.
        check: called many times a second while images are decoded; an exception that it raises ends that.

    Raises:
        InvalidRequestError: if an image cannot be read, the model does not start from an image, ends with none or takes
            no keyframes, or the number of their times is another.
        MachineError: if the process that decodes images does not start.
        OutputError: if the disk is too full for a copy.
    """
    check_images(spec, request, weights_dir, needs_image=needs_image)
    image, last_image = (
        None if file is None else find_image(file, field, cache_dir, keep=keep, check=check)
        for field, file in (("image", request.image), ("last_image", request.last_image))
    )
    ends = "none" if spec.image_input is None else spec.image_input.last
    # A video does not end on exactly its keyframe: as a loop it would jump.
    if request.loop != OFF and last_image is None and request.join is None and ends not in {"none", "keyframe"}:
        last_image = image
    keyframes = tuple(find_image(file, _KEYFRAMES, cache_dir, keep=keep, check=check) for file in request.keyframes)
    return replace(spec, image=image, last_image=last_image, keyframes=keyframes)


def find_image(
    file: str, field: str, cache_dir: Path | None, *, keep: bool = True, check: Callable[[], None] = never
) -> ImageUse:
    """Return an image that a request names, checked; see `with_images`.

    Args:
        field: the request's field, for errors.
    """
    reference = parse_reference(file)
    if reference is not None:
        path = images_dir(cache_dir or Path()) / reference.digest
        name, data = reference.name, None if cache_dir is None else _copied(path, reference.digest)
        if data is None:
            raise InvalidRequestError(field, "image.copy_missing", file=name)
    else:
        path, name = named_file(file)
        data = read_bytes(path, field)
    use = _checked(data, name, field, path, check)
    return use.replace(path=_kept(path, data, use.digest, cache_dir)) if keep and cache_dir is not None else use


def named_file(file: str) -> tuple[Path, str]:
    """Return the path of a file that a request names, and its name for people."""
    path = Path(file)
    with contextlib.suppress(RuntimeError):  # the home folder of an unknown user
        path = path.expanduser()
    path = path.absolute()
    # Backslashes separate folders in names of other systems.
    return path, path.name.replace("\\", "_")


def remember(entries: dict[Key, Value], key: Key, value: Value, most: int = _MOST_ENTRIES) -> None:
    """Add an entry to what was read of files, at most `most`: a form asks for a plan with each change."""
    if len(entries) >= most:
        entries.clear()
    entries[key] = value


def keep_image(data: bytes, name: str, field: str, cache_dir: Path, *, check: Callable[[], None] = never) -> ImageUse:
    """Check the content of an image's file, and keep it in the cache folder; see `find_image`.

    Raises:
        InvalidRequestError: if it cannot be used.
        MachineError: if the process that decodes images does not start.
        OutputError: if it cannot be written.
    """
    use = _checked(data, name, field, Path(), check)
    path = _kept(Path(), data, use.digest, cache_dir)
    if path == Path():
        raise OutputError("image.not_kept", folder=images_dir(cache_dir))
    return use.replace(path=path)


def _checked(data: bytes, name: str, field: str, path: Path, check: Callable[[], None]) -> ImageUse:
    digest = hashlib.sha256(data).hexdigest()
    width, height = _decoded_size(data, digest, name, field, check)
    return ImageUse(name=name, path=path, digest=digest, width=width, height=height)


def open_image(use: InputFile, field: str = "image", check: Callable[[], None] = never) -> Image.Image:
    """Return an image as RGB, 8 bits, upright, in sRGB; see `video.images.decode_image`.

    Raises:
        InvalidRequestError: if its file is gone or has changed.
        MachineError: if the process that decodes images does not start.
    """
    try:
        data = read_bytes(use.path, field)
    except InvalidRequestError as error:
        raise InvalidRequestError(field, "image.gone", file=use.name, cause=error.fact) from error
    if hashlib.sha256(data).hexdigest() != use.digest:
        raise InvalidRequestError(field, "image.changed", file=use.name)
    return decode_image(data, use.name, field, check)


def check_images(spec: ModelSpec, request: GenerationRequest, weights_dir: Path, *, needs_image: bool = True) -> None:
    """Check that a model takes the images of a request, without reading a file; see `with_images`.

    Raises:
        InvalidRequestError: if it does not, or needs others.
    """
    image_input = spec.image_input
    times = len(request.keyframe_seconds)
    if (request.keyframes or times) and not spec.takes_keyframes:
        raise InvalidRequestError(_KEYFRAMES, "image.model_without_keyframes", model=spec.title)
    if len(request.keyframes) != times:
        raise InvalidRequestError("keyframe_seconds", "image.keyframe_times", count=len(request.keyframes), times=times)
    files = {"image": request.image, "last_image": request.last_image}
    for field, file in files.items():
        if file is not None and image_input is None:
            able = [spec.name for spec in image_models(weights_dir)]
            code = "image.model_without" if able else "image.no_model"
            raise InvalidRequestError(field, code, model=spec.title, models=able)
    if image_input is None:
        return
    first = request.image or request.extend
    if request.last_image is not None and first is None and image_input.last not in {"keyframe", "alone"}:
        raise InvalidRequestError("image", "image.only_last")
    if request.last_image is not None and image_input.last == "none":
        raise InvalidRequestError("last_image", "image.model_without_last", model=spec.title)
    if image_input.required and needs_image and first is None:
        raise InvalidRequestError("image", "image.required", model=spec.title)
    has_last = request.last_image is not None or request.loop != OFF
    if image_input.last == "required" and first is not None and not has_last:
        raise InvalidRequestError("last_image", "image.last_required", model=spec.title)


def image_models(weights_dir: Path) -> list[ModelSpec]:
    """Return the models that start from an image, installed ones first."""
    return [spec for spec in all_models(weights_dir) if spec.starts_from_images]


def all_models(weights_dir: Path) -> list[ModelSpec]:
    """Return the installed models, then those to download; none if the weights folder cannot be read."""
    try:
        return [*add_usable({}, weights_dir).values(), *not_downloaded(weights_dir)]
    except TandemError:
        return []


def _decoded_size(data: bytes, digest: str, name: str, field: str, check: Callable[[], None]) -> tuple[int, int]:
    if digest not in _DECODED:
        remember(_DECODED, digest, check_image(data, name, field, check))
    return _DECODED[digest]


def _copied(path: Path, digest: str) -> bytes | None:
    """Return the content of a copy; `None` if it is missing or damaged."""
    try:
        data = read_bytes(path)
    except InvalidRequestError:
        return None
    return data if hashlib.sha256(data).hexdigest() == digest else None


def _kept(path: Path, data: bytes, digest: str, cache_dir: Path) -> Path:
    """Copy an image to the cache, or find its copy; return its path, or `path` if nothing can be written there."""
    folder = images_dir(cache_dir)
    copy = folder / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / LOCK):
            if _copied(copy, digest) is None:
                replace_file(copy, data, sync=True)
            else:
                # It is new again, so that `remove_unused` does not take it for one that is no longer used.
                os.utime(copy)
    except OSError as error:
        if _copied(copy, digest) is not None:
            return copy
        if error.errno in DISK_FULL:
            raise OutputError("image.disk_full", folder=folder) from error
        return path
    return copy


def copy_bytes(digests: Iterable[str], cache_dir: Path) -> int:
    """Return the size of the copies of images that exist, each counted once."""
    total = 0
    for digest in set(digests):
        with contextlib.suppress(OSError):
            total += (images_dir(cache_dir) / digest).stat().st_size
    return total


def remove_unused(cache_dir: Path, used: Collection[str], older_than: float = KEPT_SECONDS) -> int:
    """Remove copies of images that are not in `used`; return the freed bytes.

    A copy that was made or used less than `older_than` seconds ago stays: its job may be about to be stored.
    """
    freed, folder = 0, images_dir(cache_dir)
    copies = [path for path in folder.iterdir() if _DIGEST.fullmatch(path.name)] if folder.is_dir() else []
    for copy in copies:
        if copy.name not in used:
            with contextlib.suppress(OSError), held(folder / LOCK):
                stat = copy.stat()
                if S_ISREG(stat.st_mode) and time.time() - stat.st_mtime > older_than:
                    copy.unlink()
                    freed += stat.st_size
    remove_partial_files(folder)
    return freed
