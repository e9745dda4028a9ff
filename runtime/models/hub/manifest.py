"""Which files a fetched model has, with their sizes and hashes: written beside them, read with trust in nothing."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from runtime.core.cancel import Cancel
from runtime.core.errors import ModelError
from runtime.models.hub.listing import COMMIT, Listing, RemoteFile

MANIFEST = "tandem-files.json"
_READ_BYTES = 1 << 20


class Hasher(Protocol):
    """What hashlib hands out."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A model as it was fetched: from which repository and commit, and its files by path."""

    repository: str
    commit: str
    license: str
    files: dict[str, RemoteFile] = field(default_factory=dict)

    @classmethod
    def of(cls, listing: Listing) -> "Manifest":
        """Return the manifest of a model of which nothing is here yet."""
        return cls(repository=listing.repository, commit=listing.commit, license=listing.license)

    def with_file(self, file: RemoteFile) -> "Manifest":
        """Return it with one more file."""
        return replace(self, files={**self.files, file.path: file})

    def write(self, folder: Path, *, lasting: bool = True) -> None:
        """Write it into `folder`, whole or not at all; onto the disk itself if it is to be `lasting`."""
        files = {file.path: {"size": file.size, "digest": file.digest} for file in self.files.values()}
        values = {"repository": self.repository, "commit": self.commit, "license": self.license, "files": files}
        beside = folder / f"{MANIFEST}.new"
        with beside.open("w", encoding="utf-8") as stream:
            json.dump(values, stream, indent=1)
            stream.flush()
            if lasting:
                os.fsync(stream.fileno())
        beside.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; `None` where there is none.

    Raises:
        ModelError: if it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        files = [_file(name, entry) for name, entry in values["files"].items()]
        found = Manifest(
            repository=_text(values["repository"]),
            commit=_text(values["commit"]),
            license=_text(values["license"]),
            files={file.path: file for file in files},
        )
        if not COMMIT.fullmatch(found.commit):
            raise ValueError(found.commit)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{folder.name}/{MANIFEST} is damaged, so that the model cannot be compared with it.",
            "Move the folder away and fetch the model again, or delete that file to use the model as it is.",
        ) from error
    return found


def hasher_of(file: RemoteFile) -> Hasher:
    """Return what hashes a file as its hub does; git's objects begin with their size."""
    if file.digest.startswith("git:"):
        hasher = hashlib.sha1(usedforsecurity=False)
        hasher.update(f"blob {file.size}\0".encode())
        return hasher
    return hashlib.sha256()


def is_right(hasher: Hasher, file: RemoteFile) -> bool:
    """Whether what was hashed is the file."""
    return hasher.hexdigest() == file.digest.partition(":")[2]


def difference(path: Path, file: RemoteFile, cancel: Cancel, tell: Callable[[int], None]) -> str:
    """Read a file through; return what is wrong with it in a few words, empty where nothing is.

    Args:
        tell: is given the bytes that were read, piece by piece.

    Raises:
        CancelledError: when asked to cancel.
    """
    try:
        size = path.stat().st_size if path.is_file() else -1
        if size != file.size:
            return "missing" if size < 0 else f"{size:,} bytes instead of {file.size:,}"
        hasher = hasher_of(file)
        for piece in pieces(path, cancel):
            hasher.update(piece)
            tell(len(piece))
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return "" if is_right(hasher, file) else "of another content"


def pieces(path: Path, cancel: Cancel) -> Iterable[bytes]:
    """Yield a file's content, a megabyte at a time.

    Raises:
        CancelledError: when asked to cancel.
    """
    with path.open("rb") as stream:
        while piece := stream.read(_READ_BYTES):
            cancel.check()
            yield piece


def _file(path: str, entry: Any) -> RemoteFile:
    size = entry["size"]
    inside = path and not path.startswith("/") and "\\" not in path and ".." not in path.split("/") and ":" not in path
    if not inside or not isinstance(size, int) or size < 0:
        raise ValueError(path)
    return RemoteFile(path, size, _text(entry["digest"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
