"""The manifest of a downloaded model: its files with sizes and hashes, and verification against them."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from runtime.core.cancel import Cancel
from runtime.core.errors import ModelError
from runtime.core.facts import Fact
from runtime.models.hub.listing import Commit, Listing, RemoteFile

MANIFEST = "tandem-files.json"
_READ_BYTES = 1 << 20


class Hasher(Protocol):
    """A hashlib object."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class Manifest(BaseModel):
    """A model as it was downloaded: repository, commit, licence, and files by path. Stored in the model's folder."""

    model_config = ConfigDict(frozen=True, strict=True)

    repository: str
    commit: Commit
    license: str
    files: dict[str, RemoteFile] = Field(default_factory=dict)

    @field_validator("files", mode="before")
    @classmethod
    def _with_paths(cls, files: Any) -> Any:
        """Accept files as they are stored, where the key is the path."""
        return {path: file if isinstance(file, RemoteFile) else {**file, "path": path} for path, file in files.items()}

    @classmethod
    def of(cls, listing: Listing) -> "Manifest":
        """Return the manifest of a model of which no file is complete yet."""
        return cls(repository=listing.repository, commit=listing.commit, license=listing.license)

    def with_file(self, file: RemoteFile) -> "Manifest":
        """Return the manifest with one more file."""
        return self.model_copy(update={"files": {**self.files, file.path: file}})

    def write(self, folder: Path, *, sync: bool = True) -> None:
        """Write atomically into `folder`; with `sync`, wait until it is on the disk."""
        new = folder / f"{MANIFEST}.new"
        with new.open("w", encoding="utf-8") as stream:
            stream.write(self.model_dump_json(indent=1, exclude={"files": {"__all__": {"path"}}}))
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        new.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; `None` if it has none.

    Raises:
        ModelError: if it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, AttributeError, TypeError) as error:
        raise ModelError("hub.manifest_damaged", file=f"{folder.name}/{MANIFEST}") from error


def hasher_of(file: RemoteFile) -> Hasher:
    """Return a hasher that hashes a file as its hub does; git prefixes an object with its size."""
    if file.digest.startswith("git:"):
        hasher = hashlib.sha1(usedforsecurity=False)
        hasher.update(f"blob {file.size}\0".encode())
        return hasher
    return hashlib.sha256()


def matches(hasher: Hasher, file: RemoteFile) -> bool:
    """Return whether the hashed content is the file's."""
    return hasher.hexdigest() == file.digest.partition(":")[2]


def chunks(path: Path, cancel: Cancel) -> Iterator[bytes]:
    """Yield a file's content, a megabyte at a time.

    Raises:
        CancelledError: on cancel.
    """
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            cancel.check()
            yield chunk


def difference(
    path: Path, file: RemoteFile, cancel: Cancel, on_bytes: Callable[[int], None] = lambda _: None
) -> Fact | None:
    """Read a file and return how it differs from the downloaded one; `None` if it does not.

    Args:
        on_bytes: called with the bytes of each chunk that was read.

    Raises:
        CancelledError: on cancel.
    """
    try:
        if not path.is_file():
            return Fact("hub.file_missing", {"file": file.path})
        if (size := path.stat().st_size) != file.size:
            return Fact("hub.file_size", {"file": file.path, "size": size, "expected": file.size})
        hasher = hasher_of(file)
        for chunk in chunks(path, cancel):
            hasher.update(chunk)
            on_bytes(len(chunk))
    except OSError as error:
        return Fact("hub.file_unreadable", {"file": file.path, "reason": error.strerror or str(error)})
    return None if matches(hasher, file) else Fact("hub.file_hash", {"file": file.path})


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of verifying a model: the files that differ, with the difference."""

    folder: Path
    manifest: Manifest
    wrong: dict[str, Fact]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, if they are complete."""
        return sum(file.size for file in self.manifest.files.values())


def verify(folder: Path, cancel: Cancel, on_progress: Callable[[str, int, int], None]) -> Verification:
    """Compare a folder's files with the sizes and hashes of its manifest.

    Args:
        on_progress: called with the current file, the bytes read, and the bytes to read in all.

    Raises:
        ModelError: if there is no manifest, or it is damaged.
        CancelledError: on cancel.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ModelError("hub.no_manifest", model=folder.name)
    before, wrong = 0, {}
    total = sum(file.size for file in manifest.files.values())
    for path, file in manifest.files.items():
        done = before

        def read(count: int, path: str = path) -> None:
            nonlocal done
            done += count
            on_progress(path, done, total)

        if found := difference(folder / path, file, cancel, read):
            wrong[path] = found
        before += file.size
        on_progress(path, before, total)
    return Verification(folder=folder, manifest=manifest, wrong=wrong)
