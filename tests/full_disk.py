"""A small file system on a folder, and a full one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    """Mount a file system in memory on a folder in a `with` block; yield whether that is possible.

    Args:
        options: of `mount`, such as "size=2m".
    """
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk; return the file that takes the space, which a test can delete."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return filler
