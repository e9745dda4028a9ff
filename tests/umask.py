"""The umask of a user whose processes make private files, in this process."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from runtime.core import files


@contextlib.contextmanager
def users_umask(mask: int) -> Iterator[None]:
    """Run as a process that called `make_private_files` and was started with this umask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_users_umask", [])
        before = os.umask(mask)
        try:
            files.make_private_files()
            yield
        finally:
            os.umask(before)


def usual_modes(folders: int, files: int) -> list[int]:
    """Return the permissions of folders and files with the umask 022; Windows has one kind of each."""
    return [0o755] * folders + [0o644] * files if os.name == "posix" else [0o777] * folders + [0o666] * files
