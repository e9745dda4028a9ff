"""Files that are replaced as a whole: on a full disk, and after a kill."""

import os
import threading
import time
from pathlib import Path

import pytest

from runtime.core.files import is_no_file_on_windows, move_over, remove_partial_files, replace_file
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


def test_a_file_that_another_program_reads_is_replaced_after_that(tmp_path: Path) -> None:
    source, target = tmp_path / "new", tmp_path / "old"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    opened = threading.Event()

    def read() -> None:
        with target.open("rb"):
            opened.set()
            time.sleep(0.3)

    reader = threading.Thread(target=read)
    reader.start()
    opened.wait()
    move_over(source, target)  # Windows refuses this while the file is open
    reader.join()
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_names_that_are_no_files_on_windows(subtests: pytest.Subtests) -> None:
    names = {
        True: (
            "con",
            "CON.mp4",
            "nul.tar.gz",
            "com1.mp4",
            "LPT\u00b9.txt",
            "aux .mp4",
            "a: b.mp4",
            "conout$",
            "what?.mp4",
            "a\nb.mp4",
            256 * "x",
            128 * "\U0001f6a2",
        ),
        False: (
            "console.mp4",
            "com.mp4",
            "com10.mp4",
            "a con.mp4",
            "null.mp4",
            ".mp4",
            "\u7ea2\u8239.mp4",
            255 * "\u7ea2",
        ),
    }
    for expected, tried in names.items():
        for name in tried:
            with subtests.test(msg=name):
                assert is_no_file_on_windows(name) is expected
