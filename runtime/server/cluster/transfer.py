"""Files that are sent between head and nodes: their names, their content's SHA-256, and parts of them.

A file is written under another name in its folder, and renamed once it is complete and its digest matches.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from runtime.core.cancel import never
from runtime.core.digests import file_digests, sha256
from runtime.core.errors import ModelError, OutputError
from runtime.core.files import move_over
from runtime.core.frozen import FrozenModel
from runtime.core.plan import plain_output
from runtime.models.spec import ModelSpec, folder_of, is_transformer
from runtime.pipeline.files import CLIP, LATEST, SECTIONS

PART_BYTES = 4 << 20
VIDEO = "video.mp4"
# The same before it was interpolated or upscaled.
PLAIN = plain_output(Path(VIDEO)).name
VIDEOS = frozenset({VIDEO, PLAIN})
_PARTIAL = ".part"
# Files of a model; others are not read when it is loaded, or could run code.
_MODEL_SUFFIXES = frozenset({".safetensors", ".json", ".txt", ".model", ".gguf", ".sft", ".md"})
# In the weights folder of a node: models whose transformers are in single files, each in a folder with its components.
BUNDLES = ".cluster"
_JOB_FILE = re.compile(rf"{re.escape(LATEST)}|{SECTIONS}/[a-z0-9]+\.mkv|{CLIP}/[a-z0-9]+\.(?:mp4|h264)")
# As of `EngineFile.name`: no path, nothing hidden.
_NAME = r"[^./\\:\x00-\x1f][^/\\:\x00-\x1f]*"
_MODEL_FILE = re.compile(rf"(?:{_NAME}/)*{_NAME}")
_ENGINE_FILE = re.compile(_NAME)
_IMAGE_FILE = re.compile(r"[0-9a-f]{64}")


class FileEntry(FrozenModel):
    """One file: its name relative to its folder, with slashes, bytes, and SHA-256 in hexadecimal."""

    name: str
    size: int
    digest: str


def entries(files: Mapping[str, Path], folder: Path | None, check: Callable[[], None] = never) -> dict[FileEntry, Path]:
    """Return the entries of files, which are given by name.

    Args:
        folder, check: see `file_digests`.

    Raises:
        OSError: if a file cannot be read.
    """
    digests = file_digests(list(files.values()), folder, check)
    return {
        FileEntry(name=name, size=path.stat().st_size, digest=digest): path
        for (name, path), digest in zip(files.items(), digests, strict=True)
    }


def model_files(folder: Path) -> dict[str, Path]:
    """Return the files of a model by name."""
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in names.items() if _is_model_file(name)}


def bundle_files(spec: ModelSpec) -> dict[str, Path]:
    """Return the files of a model whose transformers are in single files, by their names in one folder.

    Transformers are beside each other as `single_file.other_expert` finds them. Text encoder and VAE in single files
    are beside them, where `catalogue.from_file` looks first. Their names begin with the component's: two may be equal.
    """
    single = spec.single_files
    transformers = {name: path for name, path in single.items() if is_transformer(name)}
    apart = len({path.parent for path in transformers.values()}) > 1
    components = model_files(spec.directory)
    # The configuration of a VAE tells sizes that its weights do not.
    files = {name: path for name, path in components.items() if name.partition("/")[0] not in transformers}
    for name, path in sorted(single.items(), key=lambda item: item[0] not in transformers):
        if path in files.values():
            continue  # has several components
        file = path.name if name in transformers else f"{folder_of(name)}.{path.name}"
        place = path.parent if name in transformers else spec.location.parent
        files[f"{place.name}/{file}" if apart else file] = path
    return files


def check_model_name(name: str) -> None:
    """Check that a file that a head sends belongs into a model's folder.

    Raises:
        ModelError: if not.
    """
    if not _is_model_file(name):
        raise ModelError("server.cluster_file_refused", name=name)


def check_image_name(name: str) -> None:
    """Check that a file that a head sends is named as the copy of an image.

    Raises:
        ModelError: if not.
    """
    if not _IMAGE_FILE.fullmatch(name):
        raise ModelError("server.cluster_file_refused", name=name)


def check_engine_name(name: str) -> None:
    """Check that a file that a head sends belongs into an engine's folder.

    Raises:
        ModelError: if not.
    """
    if not _ENGINE_FILE.fullmatch(name):
        raise ModelError("server.cluster_file_refused", name=name)


def _is_model_file(name: str) -> bool:
    return _MODEL_FILE.fullmatch(name) is not None and Path(name).suffix in _MODEL_SUFFIXES


def job_files(folder: Path | None) -> dict[str, Path]:
    """Return the checkpoints, sections and clips in a job's folder, by the names that they are sent with."""
    if folder is None or not folder.is_dir():
        return {}
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if _JOB_FILE.fullmatch(name)}


def check_job_name(name: str) -> None:
    """Check that a file that is sent with a job belongs into its folder.

    Raises:
        OutputError: if not.
    """
    if name not in VIDEOS and not _JOB_FILE.fullmatch(name):
        raise OutputError("server.cluster_file_refused", name=name)


def parts(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the parts of a file; an empty file has one.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        file.seek(offset)
        yield file.read(PART_BYTES)
        while part := file.read(PART_BYTES):
            yield part


def partial(target: Path) -> Path:
    """Return where a file is written until it is complete."""
    return target.with_name(target.name + _PARTIAL)


def append(target: Path, offset: int, data: bytes) -> None:
    """Write one part of a file at its offset; what lies behind it is removed.

    Raises:
        OSError: if it cannot be written.
        OutputError: if parts before it are missing.
    """
    path = partial(target)
    if not 0 <= offset <= received(target):
        raise OutputError("server.cluster_file_damaged", name=target.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(data)


def received(target: Path) -> int:
    """Return how many bytes of a file have been written so far."""
    with suppress(OSError):
        return partial(target).stat().st_size
    return 0


def complete(target: Path, digest: str) -> None:
    """Rename a file into its place if its content is right; it is removed otherwise.

    Raises:
        OutputError: if the content has another digest.
        OSError: if it cannot be read or renamed.
    """
    path = partial(target)
    try:
        if sha256(path) != digest:
            raise OutputError("server.cluster_file_damaged", name=target.name)
        move_over(path, target)
    finally:
        path.unlink(missing_ok=True)


def changed(before: Mapping[str, tuple[int, int]], folder: Path) -> tuple[dict[str, Path], dict[str, tuple[int, int]]]:
    """Return the files of a job's folder that differ from `before`, and the size and time of all by name."""
    files = job_files(folder)
    now = {}
    for name, path in files.items():
        with suppress(FileNotFoundError):
            stat = path.stat()
            now[name] = (stat.st_size, stat.st_mtime_ns)
    return {name: files[name] for name in now if before.get(name) != now[name]}, now
