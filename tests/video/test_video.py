"""The writer, the metadata and the preview, without a model."""

import io
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageSequence

from runtime.core.errors import MachineError, OutputError
from runtime.core.facts import Fact
from runtime.video.mp4 import VideoWriter, find_ffmpeg, read_metadata, to_ffmetadata
from runtime.video.preview import encode_preview

ROOT = Path(__file__).parents[2]


def write(target: Path, frames: np.ndarray, facts: dict[str, object] | None = None, crf: int = 10) -> None:
    """Write frames as one video."""
    with VideoWriter(target, frames.shape[2], frames.shape[1], 16, crf) as writer:
        for start in range(0, len(frames), 4):
            writer.write(frames[start : start + 4])
        writer.close_stream()
        writer.finish("title", {"tandem": facts or {}})


def read(video: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return a video's frames, RGB."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(video), "-f", "rawvideo", "-pix_fmt", "rgb24"]
    data = subprocess.run([*command, "-"], check=True, capture_output=True).stdout
    return np.frombuffer(data, np.uint8).reshape(shape)


def test_colors_are_preserved(tmp_path: Path) -> None:
    colours = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200], [230, 230, 230], [20, 20, 20]], np.uint8)
    frames = np.broadcast_to(colours[:, None, None, :], (5, 32, 48, 3)).copy()
    write(tmp_path / "x.mp4", frames)
    got = read(tmp_path / "x.mp4", frames.shape)
    assert np.abs(got.astype(int) - frames.astype(int)).max() <= 4


def test_a_higher_crf_gives_a_smaller_file(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), np.uint8)
    for name, crf in (("high", 10), ("again", 10), ("low", 40)):
        write(tmp_path / f"{name}.mp4", frames, crf=crf)
    high, again, low = ((tmp_path / f"{name}.mp4").read_bytes() for name in ("high", "again", "low"))
    assert high == again
    assert len(low) < len(high) / 2


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=60)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(["a\\"])
@given(st.lists(TEXTS, min_size=5, max_size=5))
def test_metadata_round_trips_any_text(video: Path, texts: list[str]) -> None:
    notes, copy = video.with_name("notes.txt"), video.with_name("copy.mp4")
    notes.write_text(to_ffmetadata(texts[0] or "x", {"tandem": {"texts": texts}}), encoding="utf-8", newline="")
    command = [find_ffmpeg(), "-v", "error", "-y", "-i", str(video), "-i", str(notes), "-map_metadata", "1"]
    subprocess.run([*command, "-c", "copy", str(copy)], check=True, capture_output=True)
    assert read_metadata(copy) == {"texts": texts}


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small video."""
    path = tmp_path_factory.mktemp("video") / "x.mp4"
    write(path, np.zeros((5, 32, 32, 3), np.uint8), {"seed": 7})
    return path


def test_a_foreign_or_damaged_video_has_no_metadata(video: Path, tmp_path: Path) -> None:
    assert read_metadata(video) == {"seed": 7}
    (tmp_path / "cut.mp4").write_bytes(video.read_bytes()[:200])
    (tmp_path / "text.mp4").write_text("not a video")
    for name in ("cut.mp4", "text.mp4", "none.mp4"):
        with pytest.raises(OutputError) as refused:
            read_metadata(tmp_path / name)
        assert refused.value.fact == Fact("video.no_metadata", {"file": name})


def test_leaving_early_leaves_no_files(tmp_path: Path) -> None:
    target = tmp_path / "x.mp4"
    target.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), VideoWriter(target, 32, 32, 16, 10) as writer:
        for _ in range(20):
            writer.write(np.zeros((4, 32, 32, 3), np.uint8))
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]
    assert target.read_bytes() == b"old"


def test_a_dead_ffmpeg_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as failed, VideoWriter(tmp_path / "x.mp4", 32, 32, 16, 10) as writer:
        writer._encoder._process.kill()
        for _ in range(1000):
            writer.write(np.zeros((4, 32, 32, 3), np.uint8))
    assert (failed.value.code, failed.value.data["file"]) == ("video.ffmpeg_failed", str(tmp_path / "x.mp4"))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_ffmpeg_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/no/such/ffmpeg")
    with pytest.raises(MachineError) as missing:
        find_ffmpeg()
    assert missing.value.fact == Fact("video.no_ffmpeg")


def test_a_preview_is_an_animation_of_the_clip() -> None:
    rgb = np.random.default_rng(0).uniform(-2, 2, (9, 14, 24, 3))
    with Image.open(io.BytesIO(encode_preview(rgb, 200))) as image:
        assert (image.format, image.size) == ("WEBP", (192, 112))
        assert len(list(ImageSequence.Iterator(image))) == 9


def test_sweep_removes_scratch_folders_of_killed_writers_only(tmp_path: Path) -> None:
    code = (
        "import sys, time, numpy as np; from pathlib import Path; from runtime.video.mp4 import VideoWriter\n"
        "with VideoWriter(Path(sys.argv[1]), 32, 32, 16, 10) as writer:\n"
        "    writer.write(np.zeros((4, 32, 32, 3), np.uint8)); print('on', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "killed.mp4")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        other.stdout.readline()
        write(tmp_path / "other.mp4", np.zeros((5, 32, 32, 3), np.uint8))
        assert len(list(tmp_path.glob(".tandem-*"))) == 1
        other.kill()
    write(tmp_path / "after.mp4", np.zeros((5, 32, 32, 3), np.uint8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after.mp4", "other.mp4"]
