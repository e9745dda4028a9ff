"""Stored parts of a video have the bits that were written, and are complete or absent."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import OutputError
from runtime.video.lossless import read_frames, sweep_parts, write_frames
from tests.waiting import until

WIDTH, HEIGHT = 46, 34


def noise(count: int, seed: int = 0) -> np.ndarray:
    """Return random frames, (count, height, width, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, HEIGHT, WIDTH, 3), dtype=np.uint8)


@pytest.mark.parametrize("fps", [1, 30, 60])
@pytest.mark.parametrize("count", [1, 37])
def test_frames_come_back_bit_for_bit(tmp_path: Path, count: int, fps: int) -> None:
    frames, part = noise(count), tmp_path / "part.mkv"
    write_frames(part, np.array_split(frames, 3), WIDTH, HEIGHT, fps)
    assert np.array_equal(list(read_frames(part, WIDTH, HEIGHT, count)), frames)
    assert list(tmp_path.iterdir()) == [part]


def test_a_part_is_replaced(tmp_path: Path) -> None:
    part = tmp_path / "part.mkv"
    for seed in (1, 2):
        write_frames(part, [noise(3, seed)], WIDTH, HEIGHT, 30)
    assert np.array_equal(list(read_frames(part, WIDTH, HEIGHT, 3)), noise(3, 2))


def test_frames_that_cannot_be_made_leave_the_earlier_part(tmp_path: Path) -> None:
    part = tmp_path / "part.mkv"
    write_frames(part, [noise(3)], WIDTH, HEIGHT, 30)

    def failing() -> Iterator[np.ndarray]:
        yield noise(2, seed=1)
        raise MemoryError

    with pytest.raises(MemoryError):
        write_frames(part, failing(), WIDTH, HEIGHT, 30)
    assert list(tmp_path.iterdir()) == [part]
    assert np.array_equal(list(read_frames(part, WIDTH, HEIGHT, 3)), noise(3))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_frames_is_refused(tmp_path: Path, count: int) -> None:
    part = tmp_path / "part.mkv"
    write_frames(part, [noise(3)], WIDTH, HEIGHT, 30)
    with pytest.raises(OutputError) as caught:
        list(read_frames(part, WIDTH, HEIGHT, count))
    assert caught.value.fact.code == "video.part_damaged"


@pytest.mark.parametrize("place", [0.1, 0.4, 0.9])
def test_a_changed_byte_is_found(tmp_path: Path, place: float) -> None:
    part = tmp_path / "part.mkv"
    write_frames(part, [noise(5)], WIDTH, HEIGHT, 30)
    data = bytearray(part.read_bytes())
    data[int(place * len(data))] ^= 0x55
    part.write_bytes(data)
    with pytest.raises(OutputError) as caught:
        list(read_frames(part, WIDTH, HEIGHT, 5))
    assert caught.value.fact.code == "video.part_damaged"


@pytest.mark.parametrize("content", [None, b"", b"ffconcat version 1.0\nfile /etc/passwd\n"])
def test_what_is_no_part_is_refused(tmp_path: Path, content: bytes | None) -> None:
    part = tmp_path / "part.mkv"
    if content is not None:
        part.write_bytes(content)
    with pytest.raises(OutputError) as caught:
        list(read_frames(part, WIDTH, HEIGHT, 1))
    assert caught.value.fact.code == "video.part_damaged"


def test_reading_may_stop_early(tmp_path: Path) -> None:
    part = tmp_path / "part.mkv"
    write_frames(part, [noise(40)], WIDTH, HEIGHT, 30)
    before = threading.active_count()
    frames = read_frames(part, WIDTH, HEIGHT, 40)
    assert np.array_equal(next(frames), noise(40)[0])
    frames.close()
    assert threading.active_count() == before


def test_a_missing_folder_is_an_error_of_the_output(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        write_frames(tmp_path / "none" / "part.mkv", [noise(1)], WIDTH, HEIGHT, 30)


def test_a_killed_writer_leaves_no_part(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
import numpy as np
from runtime.video.lossless import write_frames

def frames():
    while True:
        yield np.zeros((8, {HEIGHT}, {WIDTH}, 3), np.uint8)
        time.sleep(0.01)

write_frames(Path({str(tmp_path / "part.mkv")!r}), frames(), {WIDTH}, {HEIGHT}, 30)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as writer:
        until(lambda: any(tmp_path.iterdir()))
        os.kill(writer.pid, signal.SIGKILL)
    assert not (tmp_path / "part.mkv").exists()
    # ffmpeg ends by itself when its input does.
    sweep_parts(tmp_path)
    assert not any(tmp_path.iterdir())
