"""Digests of files, and the file that stores them."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core import digests
from runtime.core.digests import file_digests, known_digests, read_stored


def written(folder: Path, count: int = 3) -> list[Path]:
    """Return small files of different content."""
    paths = [folder / f"{number}.bin" for number in range(count)]
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)
    return paths


def test_digests_are_those_of_the_contents_in_order(tmp_path: Path) -> None:
    paths = written(tmp_path, 20)
    wanted = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert file_digests([*paths, paths[0]], None) == [*wanted, wanted[0]]


def test_only_new_and_changed_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = written(tmp_path)
    before = file_digests(paths[:2], tmp_path)
    paths[1].write_bytes(b"changed")
    read: list[Path] = []
    real = digests.sha256

    def counted(path: Path, check: Callable[[], None]) -> str:
        read.append(path)
        return real(path, check)

    monkeypatch.setattr(digests, "sha256", counted)
    after = file_digests(paths, tmp_path)
    assert sorted(read) == paths[1:]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_digests_that_another_process_stored_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = written(tmp_path)
    real = digests.sha256

    def slow(path: Path, check: Callable[[], None]) -> str:
        if path == first:
            file_digests([second], tmp_path)
        return real(path, check)

    monkeypatch.setattr(digests, "sha256", slow)
    file_digests([first], tmp_path)
    assert known_digests([first, second], tmp_path) is not None
    assert known_digests([first, third], tmp_path) is None


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = written(tmp_path, 1)
    real = digests.sha256

    def changing(path: Path, check: Callable[[], None]) -> str:
        found = real(path, check)
        path.write_bytes(b"other content")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(digests, "sha256", changing)
        file_digests([path], tmp_path)
    assert file_digests([path], tmp_path) == [hashlib.sha256(b"other content").hexdigest()]


def test_a_missing_file_is_an_error_and_stores_nothing(tmp_path: Path) -> None:
    (path,) = written(tmp_path, 1)
    with pytest.raises(FileNotFoundError):
        file_digests([path, tmp_path / "missing"], tmp_path)
    assert read_stored(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    path, other = written(tmp_path, 2)
    assert file_digests([path], other / "folder") == file_digests([path], None)
