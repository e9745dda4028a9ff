"""Files that are replaced as a whole: on a full disk, and after a kill."""

import os
import time
from pathlib import Path

import pytest

from runtime.core.files import remove_partial_files, replace_file
from tests.full_disk import fill


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for data in (b"old", b"new"):
        replace_file(path, data, sync=True)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_no_part(small_disk: Path) -> None:
    path = small_disk / "file"
    replace_file(path, b"old")
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, bytes(1 << 20))
    assert path.read_bytes() == b"old"
    assert set(small_disk.iterdir()) == {path, filler}


def test_only_old_partial_files_are_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("a.safetensors.0123abcd.tmp", "b.tmp", "c.safetensors"))
    for path in (old, new, other):
        path.write_bytes(b"x")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    remove_partial_files(tmp_path)
    assert set(tmp_path.iterdir()) == {new, other}
    remove_partial_files(tmp_path / "missing")
