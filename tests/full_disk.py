"""A small file system on a folder, a full one, and one that becomes read-only while its files are open."""

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


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Yield a new folder with a file system in memory in a `with` block; skip the test where that is not possible.

    Args:
        options: see `mounted`.
    """
    folder.mkdir()
    with mounted(folder, options) as done:
        if not done:
            pytest.skip("mounting a small disk needs root on Linux")
        yield folder


def fill(disk: Path) -> Path:
    """Fill a disk; return the file that takes the space, which a test can delete."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return filler


@contextmanager
def failing(folder: Path, image: Path, size: int = 64 << 20) -> Iterator[bool]:
    """Mount a file system on a folder in a `with` block; yield whether that is possible.

    Args:
        image: a new file for its content.
        size: bytes; few of them are written.
    """
    with image.open("wb") as file:
        file.truncate(size)
    try:
        done = sys.platform == "linux" and os.geteuid() == 0
        done = done and not subprocess.run(["mkfs.ext4", "-q", image], check=False).returncode
        done = done and not subprocess.run(["mount", "-o", "loop", image, folder], check=False).returncode
    except FileNotFoundError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fail(folder: Path) -> None:
    """Let a `failing` file system become read-only, as after an error of its disk."""
    subprocess.run(["mount", "-o", "remount,abort", folder], check=True)


def repair(folder: Path, image: Path) -> None:
    """Check and mount a file system again that failed; no file may be open."""
    subprocess.run(["umount", folder], check=True)
    assert subprocess.run(["e2fsck", "-p", image], check=False).returncode in {0, 1}
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
