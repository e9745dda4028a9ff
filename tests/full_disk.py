"""A full disk, for tests with the fixture `small_disk`."""

from pathlib import Path

import pytest


def fill(disk: Path) -> Path:
    """Fill a disk; return the file that takes the space, which a test can delete."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return filler
