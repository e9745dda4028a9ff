"""One file from a hub into place: going on where it broke off, and kept only if it is what the hub's hash says."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from runtime.core.cancel import Cancel
from runtime.core.errors import DownloadError
from runtime.models.hub.http_stream import BrokenError, RangeError
from runtime.models.hub.listing import Listing, RemoteFile
from runtime.models.hub.manifest import Hasher, hasher_of, is_right, pieces
from runtime.models.hub.remote import Hub

_ATTEMPTS = 2


def fetch(
    hub: Hub,
    listing: Listing,
    file: RemoteFile,
    part: Path,
    cancel: Cancel,
    held: Callable[[int], None],
    tell: Callable[[str], None],
) -> None:
    """Fetch a file into `part`, from where that ends, until it is whole and right, and on the disk.

    Args:
        held: is told how much of it is here, whenever that changes.
        tell: is told what is waited for.

    Raises:
        DownloadError: if the hub lies twice, refuses or does not answer; what came stays, unless it was a lie.
        OSError: if it cannot be written.
        CancelledError: when asked to cancel; what came stays.
    """
    why = ""
    for _ in range(_ATTEMPTS):
        with _opened(part) as stream:
            why = _fill(hub, listing, file, part, stream, cancel, held, tell)
            if not why:
                os.fsync(stream.fileno())
                return
        part.unlink()
        held(0)
        tell(f"{file.path} is {why}; fetching it once more")
    raise DownloadError(
        f"The hub's {file.path} is {why}, twice: it is not the file that the hub says it has.",
        "Fetch the model from another hub; nothing of that file was kept.",
    )


def _opened(part: Path) -> BinaryIO:
    """Open for adding at the end; what somebody put there as a link is not followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(part, flags, 0o666), "ab")


def _fill(
    hub: Hub,
    listing: Listing,
    file: RemoteFile,
    part: Path,
    stream: BinaryIO,
    cancel: Cancel,
    held: Callable[[int], None],
    tell: Callable[[str], None],
) -> str:
    """Bring a file to its size; return what is wrong with it then, in a few words."""
    size, hasher = _what_is_here(file, part, stream, cancel)
    held(size)
    # The furthest it ever came: a hub that begins anew and breaks off at the same place is not tried for ever.
    furthest, again = size, 0
    while size < file.size:
        try:
            with hub.file(listing, file, size, cancel) as (start, coming):
                if start < size:  # the hub does not go on in the middle
                    stream.truncate(0)
                    size, hasher = 0, hasher_of(file)
                for piece in coming:
                    size += len(piece)
                    if size > file.size:
                        return f"longer than the {file.size:,} bytes that it should have"
                    stream.write(piece)
                    # Whoever is killed keeps all but what is on its way.
                    stream.flush()
                    hasher.update(piece)
                    held(size)
            if size < file.size:
                raise BrokenError("the connection broke")
        except RangeError:
            return f"shorter than the {file.size:,} bytes that it should have"
        except BrokenError as error:
            again = 1 if size > furthest else again + 1
            furthest = max(furthest, size)
            hub.rest(error, again, cancel, tell)
    return "" if is_right(hasher, file) else "of another content than its hash says"


def _what_is_here(file: RemoteFile, part: Path, stream: BinaryIO, cancel: Cancel) -> tuple[int, Hasher]:
    """Return how much is here, hashed; what is longer than the file is thrown away."""
    hasher, size = hasher_of(file), 0
    if part.stat().st_size > file.size:
        stream.truncate(0)
    for piece in pieces(part, cancel):
        hasher.update(piece)
        size += len(piece)
    return size, hasher
