"""Copies without metadata, similarity of two clips, and stills, on real files."""

import io
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from runtime.core.errors import OutputError
from runtime.core.facts import Fact
from runtime.video.mp4 import copy_without_metadata, find_ffmpeg, read_metadata
from runtime.video.preview import encode_frames, still
from runtime.video.similarity import similarity
from tests.video.test_video import read, write

SHAPE = (9, 48, 64, 3)


def noise(seed: int, low: int = 40, high: int = 200) -> np.ndarray:
    """Return frames of coarse noise, which compresses without much loss."""
    small = np.random.default_rng(seed).integers(low, high, (SHAPE[0], 6, 8, 3), np.uint8)
    return small.repeat(8, 1).repeat(8, 2)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a clip, a brighter one, a shorter one, another one and one of another size."""
    folder = tmp_path_factory.mktemp("clips")
    one = noise(1)
    write(folder / "one.mp4", one, {"request": {"prompt": "a secret boat"}})
    write(folder / "brighter.mp4", one + 10)
    write(folder / "short.mp4", one[:5])
    write(folder / "other.mp4", noise(2))
    write(folder / "wide.mp4", one[:, :32])
    return folder


def test_similarity_matches_the_pixels(clips: Path) -> None:
    found = similarity(clips / "one.mp4", clips / "brighter.mp4")
    one, other = (read(clips / name, SHAPE).astype(float) for name in ("one.mp4", "brighter.mp4"))
    assert found.psnr == pytest.approx(10 * math.log10(255**2 / np.square(one - other).mean()), abs=0.2)
    assert 0.95 < found.ssim < 1 and not found.identical
    assert similarity(clips / "one.mp4", clips / "other.mp4").ssim < 0.7


def test_a_clip_is_identical_to_itself(clips: Path) -> None:
    found = similarity(clips / "one.mp4", clips / "one.mp4")
    assert found.identical and found.ssim == 1


def test_only_common_frames_are_compared(clips: Path, tmp_path: Path) -> None:
    # The frame rate does not matter: frames are compared by number.
    slow = tmp_path / "slow.mp4"
    command = [find_ffmpeg(), "-v", "error", "-itsscale", "2", "-i", str(clips / "short.mp4"), "-c", "copy", str(slow)]
    subprocess.run(command, check=True)
    assert similarity(clips / "one.mp4", slow).psnr == similarity(clips / "one.mp4", clips / "short.mp4").psnr > 30


@pytest.mark.parametrize("name", ["wide.mp4", "missing.mp4", "notes.mp4"])
def test_clips_that_cannot_be_compared_are_refused(clips: Path, name: str) -> None:
    (clips / "notes.mp4").write_text("no video")
    with pytest.raises(OutputError) as refused:
        similarity(clips / "one.mp4", clips / name)
    assert refused.value.fact == Fact("video.not_comparable")


def test_a_copy_has_no_metadata_and_the_same_frames(clips: Path) -> None:
    with copy_without_metadata(clips / "one.mp4") as copy:
        data = copy.read_bytes()
        assert b"secret boat" not in data and b"Lavf" not in data and b"tandem" not in data
        with pytest.raises(OutputError) as refused:
            read_metadata(copy)
        assert refused.value.code == "video.no_metadata"
        assert (read(copy, SHAPE) == read(clips / "one.mp4", SHAPE)).all()
    assert read_metadata(clips / "one.mp4")["request"] == {"prompt": "a secret boat"}
    assert list(clips.glob(".*")) == []


def test_a_failed_copy_leaves_no_files(clips: Path) -> None:
    (clips / "notes.mp4").write_text("no video")
    with pytest.raises(OutputError), copy_without_metadata(clips / "notes.mp4"):
        pass
    assert list(clips.glob(".*")) == []


def test_a_still_is_the_middle_frame() -> None:
    frames = [np.full((16, 16, 3), shade, np.uint8) for shade in (10, 120, 240)]
    with Image.open(io.BytesIO(still(encode_frames(frames, 100)))) as image:
        assert getattr(image, "n_frames", 1) == 1
        assert abs(np.asarray(image.convert("RGB")).astype(int) - 120).max() < 6


@pytest.mark.parametrize("data", [b"", b"RIFF", b"\x00" * 100, b"RIFF\x10\x00\x00\x00WEBPVP8 "])
def test_a_still_of_another_format_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="WebP"):
        still(data)
