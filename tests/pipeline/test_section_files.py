"""Finished sections on disk: joined in the order of time, and kept or made again after a crash."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import OutputError
from runtime.pipeline.section_files import SectionFiles

WIDTH, HEIGHT = 32, 16
COUNTS = (5, 4, 6)


def section(number: int) -> np.ndarray:
    """Return the frames of a section, (frames, height, width, 3) uint8."""
    size = (COUNTS[number], HEIGHT, WIDTH, 3)
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def files(folder: Path, done: int = 0) -> SectionFiles:
    """Return the files of a job that begins, or resumes after `done` sections."""
    made = SectionFiles(folder, WIDTH, HEIGHT, 30)
    made.begin(done)
    return made


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 1), (1, 0)])
def test_sections_are_joined_in_the_order_of_time(tmp_path: Path, order: tuple[int, ...]) -> None:
    stored = files(tmp_path / "job")
    for number in range(len(COUNTS)):
        stored.write(number, iter(section(number)))
    joined = list(stored.joined((number, COUNTS[number]) for number in order))
    assert np.array_equal(joined, np.concatenate([section(number) for number in order]))


def test_after_a_crash_counted_sections_stay_and_others_go(tmp_path: Path) -> None:
    stored = files(tmp_path)
    for number in range(3):
        stored.write(number, [section(number)])
    # The process was killed before the checkpoint that counts the third section, and while it wrote a fourth.
    (stored.folder / "0003.mkv.99.tmp").write_bytes(b"partial")
    (stored.folder / "notes.txt").write_text("not a section")
    again = files(tmp_path, done=2)
    assert sorted(path.name for path in stored.folder.iterdir()) == ["0000.mkv", "0001.mkv", "notes.txt"]
    again.write(2, [section(2)])
    joined = list(again.joined(enumerate(COUNTS)))
    assert np.array_equal(joined, np.concatenate([section(number) for number in range(3)]))


def test_a_job_that_starts_over_keeps_no_section(tmp_path: Path) -> None:
    files(tmp_path).write(0, [section(0)])
    assert list(files(tmp_path).folder.iterdir()) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_section_is_found_before_the_job_resumes(tmp_path: Path, lost: int) -> None:
    stored = files(tmp_path)
    for number in range(2):
        stored.write(number, [section(number)])
    (stored.folder / f"{lost:04d}.mkv").unlink()
    with pytest.raises(OutputError) as caught:
        files(tmp_path, done=2)
    assert (caught.value.fact.code, caught.value.fact.data["file"]) == ("video.part_damaged", f"{lost:04d}.mkv")


def test_a_folder_that_cannot_be_made_is_an_error_of_the_output(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file")
    with pytest.raises(OutputError):
        files(tmp_path / "job").write(0, [section(0)])


def test_a_disk_without_space_for_the_frames_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = files(tmp_path)
    made.check_disk(1)
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OutputError) as caught:
        made.check_disk(1000)
    assert caught.value.fact.code == "video.disk_too_small"
    assert caught.value.fact.data["needs"] > 1000
