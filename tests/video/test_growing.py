"""An MP4 of finished parts has their frames in order, and is not encoded again."""

from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import OutputError
from runtime.video.growing import join_parts, write_part
from tests.pipeline.test_run import frames_of

WIDTH, HEIGHT, FPS = 48, 32, 12


def part(folder: Path, shade: int, count: int) -> Path:
    """Write a part of frames of one shade of gray."""
    path = folder / f"{shade}.h264"
    write_part(path, [np.full((count, HEIGHT, WIDTH, 3), shade, np.uint8)], WIDTH, HEIGHT, FPS)
    return path


def shades(video: Path) -> list[int]:
    """Return the mean shade of each frame."""
    frames = np.frombuffer(frames_of(video), np.uint8).reshape(-1, HEIGHT, WIDTH, 3)
    return [round(float(frame.mean())) for frame in frames]


@pytest.mark.parametrize("reverse", [False, True])
def test_parts_are_joined_in_any_order(tmp_path: Path, reverse: bool) -> None:
    parts = [(40, 4), (100, 36), (180, 33), (220, 1)][:: -1 if reverse else 1]
    files = [part(tmp_path, *one) for one in parts]
    join_parts(tmp_path / "x.mp4", files, FPS)
    wanted = np.concatenate([np.full(count, shade) for shade, count in parts])
    found = np.array(shades(tmp_path / "x.mp4"))
    assert found.shape == wanted.shape
    assert abs(found - wanted).max() <= 2
    assert not list(tmp_path.glob("*.tmp"))


def test_a_part_that_is_no_video_leaves_the_earlier_clip(tmp_path: Path) -> None:
    clip, damaged = tmp_path / "x.mp4", tmp_path / "0.h264"
    join_parts(clip, [part(tmp_path, 40, 4)], FPS)
    before = clip.read_bytes()
    damaged.write_bytes(b"no stream" * 100)
    with pytest.raises(OutputError) as caught:
        join_parts(clip, [damaged], FPS)
    assert caught.value.code == "video.ffmpeg_failed"
    with pytest.raises(OutputError):
        join_parts(clip, [tmp_path / "missing.h264"], FPS)
    assert clip.read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
