"""Files that are replaced as a whole, and permissions of new files.

Readers see the old or the new content, and a full disk leaves no part behind.
"""

import contextlib
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_SUFFIX = ".tmp"
# Partial files of this age were left by killed processes.
_OLD_SECONDS = 3600.0
# On Windows, how long to wait for a file that is open elsewhere before it is replaced: programs that read settings, and
# virus scanners, have files open for milliseconds.
_OPEN_SECONDS, _POLL_SECONDS = 2.0, 0.02
# Names of devices on Windows, with any ending, and names with characters that it does not allow. A colon is among them:
# the data would go to a stream of the file that is named before it.
_NO_FILE = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?|.*[\x00-\x1f<>:\"|?*].*", re.IGNORECASE | re.DOTALL
)

# The umask that this process was started with, once it has another one.
_users_umask: list[int] = []


def make_private_files() -> None:
    """Create files and folders that only this user can open, in this process and all that it starts from now on."""
    _users_umask.append(os.umask(0o077))


def give_usual_permissions(path: Path) -> None:
    """Give a file or folder that the user named the permissions that other programs would give it, if possible."""
    if _users_umask and os.name == "posix":
        with contextlib.suppress(OSError):  # a file system without permissions; the content is complete
            path.chmod((0o777 if path.is_dir() else 0o666) & ~_users_umask[0])


def make_named_folder(folder: Path) -> None:
    """Make a folder that the user named, and its parents, with the usual permissions; an existing one is not changed.

    Raises:
        OSError: if it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        give_usual_permissions(path)


def replace_file(path: Path, data: bytes | Iterable[bytes], *, sync: bool = False) -> None:
    """Write a file, or replace it.

    Args:
        data: the content, whole or in parts.
        sync: whether the content is on the disk when this returns.

    Raises:
        OSError: as `move_over`, or if it cannot be written; the old file stays, and nothing else is left.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
    try:
        with partial.open("wb") as file:
            for part in [data] if isinstance(data, bytes) else data:
                file.write(part)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        move_over(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def move_over(source: Path, target: Path) -> None:
    """Rename a file or folder, also over an existing one.

    On Windows, wait for up to two seconds while another program has the existing one open.

    Raises:
        OSError: if it cannot be renamed; both files stay.
    """
    end = time.monotonic() + _OPEN_SECONDS
    while True:
        try:
            source.replace(target)
            return
        except PermissionError:
            if sys.platform == "win32" and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            else:
                raise


def is_no_file_on_windows(name: str) -> bool:
    """Return whether Windows allows no file or folder of this name.

    "con.mp4" is a device, "?" is not allowed, and 255 UTF-16 code units are the limit.
    """
    return _NO_FILE.fullmatch(name) is not None or len(name.encode("utf-16-le", "surrogatepass")) > 2 * 255


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it survives a power failure; Windows syncs it itself."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove_partial_files(folder: Path) -> None:
    """Remove the partial files that killed processes left in a folder; those of running ones are younger."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                    path.unlink()
