"""`interpolate`: any video to an MP4 with more frames and its sound, or slower; bad arguments; Ctrl-C."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.cli.main import run
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.events import Event, FramesDecoded
from runtime.machine.probe import probe
from runtime.models.catalogue import EMBEDDED
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.interpolate import interpolate_file
from runtime.pipeline.interpolate_plan import InterpolationPlan
from runtime.video.mp4 import find_ffmpeg, read_metadata
from runtime.video.reader import read_info
from tests.cli.refusals import check_refusals
from tests.cli.test_upscale import FRAMES, frames, luma, read, save

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a video of 12 frames a second, an odd size, with sound, a chapter and Tandem's metadata."""
    silent = save(tmp_path / "silent.mp4", frames(), {"tandem": {"request": {"prompt": "a boat"}}})
    chapter = tmp_path / "chapter.txt"
    chapter.write_text(";FFMETADATA1\n[CHAPTER]\nTIMEBASE=1/10\nSTART=0\nEND=2\ntitle=one\n", "utf-8")
    path, padded = tmp_path / "clip.mp4", ("-vf", "pad=21:15", "-c:v", "libx264", "-pix_fmt", "yuv444p", "-qp", "0")
    inputs = ("-i", str(silent), "-f", "lavfi", "-i", "sine=duration=0.4", "-i", str(chapter))
    kept = ("-map", "0:v", "-map", "1:a", "-map_metadata", "0", "-map_chapters", "2")
    subprocess.run([find_ffmpeg(), "-v", "error", *inputs, *kept, *padded, str(path)], check=True)
    return path


def chapters(path: Path) -> int:
    """Return the number of chapters of a file."""
    command = [find_ffmpeg(), "-v", "error", "-i", str(path), "-f", "ffmetadata", "-"]
    return subprocess.run(command, capture_output=True, check=True).stdout.count(b"[CHAPTER]")


def test_a_video_gets_more_frames_and_keeps_its_sound(
    source: Path, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "smooth.mp4"
    arguments = ["interpolate", str(source), "--factor", "4", "--crf", "0"]
    assert run([*arguments, "--out", str(out), "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (done["video"], done["frames"], done["fps"], done["factor"]) == (str(out), 4 * FRAMES, 48, 4)
    assert (done["width"], done["height"], done["backend"], done["slow"]) == (20, 14, "ffmpeg", False)
    before, after = read_info(source), read_info(out)
    assert (str(after.rate), after.sound) == ("48", ("aac",))
    # As long as before, to a hundredth of a second, in which ffmpeg states it.
    assert before.frames == FRAMES
    assert after.frames == 4 * FRAMES
    original = read(source)[:, :14, :20]
    assert np.abs(luma(read(out)[::4]) - luma(original)).mean() < 2
    metadata = read_metadata(out)
    assert (metadata["request"], metadata["interpolate"]["source"]) == ({"prompt": "a boat"}, "clip.mp4")
    assert chapters(out) == 1
    # In the outputs folder, and with a forecast from the first run.
    assert len(HistoryFile(cache_dir, probe()).read()) == 1
    assert run(arguments) == 0
    assert [path.name for path in (cache_dir / "outputs").glob("*.mp4")]


def test_the_network_interpolates_videos_of_the_shipped_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"diorama": "pytorch", "other": "ffmpeg", str(EMBEDDED / "diorama"): "ffmpeg"}
    for model, backend in models.items():
        made = save(tmp_path / "made.mp4", frames(), {"tandem": {"request": {"model": model}}})
        assert run(["interpolate", str(made), "--out", str(tmp_path / f"{backend}.mp4"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["backend"] == backend


def test_a_slow_video_has_the_rate_of_its_source_and_no_sound(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "slow.mp4"
    assert run(["interpolate", str(source), "--slow", "--out", str(out)]) == 0
    info = read_info(out)
    assert (str(info.rate), info.frames, len(info.sound), chapters(out)) == ("12", 2 * FRAMES, 0, 0)
    assert "clip.mp4" in next(line for line in capsys.readouterr().err.splitlines() if "sound" in line.lower())


def test_bad_arguments_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    """The rules of files are tested in `tests.video.test_reader`."""
    fast = tmp_path / "fast.mkv"
    command = [find_ffmpeg(), "-v", "error", "-f", "lavfi", "-i", "testsrc=size=32x32:rate=100:duration=0.1"]
    subprocess.run([*command, "-c:v", "ffv1", str(fast)], check=True)
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        ([str(source), "--factor", "3"], "request.not_a_choice", {"field": "factor", "choices": [2, 4]}),
        ([str(source), "--crf", "99"], "request.out_of_range", {"field": "crf", "nearest": 51}),
        ([str(source), "--out", "video.avi"], "video.not_mp4", {}),
        ([str(source), "--out", str(source)], "source.same_file", {"file": "clip.mp4"}),
        ([""], "source.path_unreadable", {"field": "file"}),
        ([str(fast), "--factor", "4"], "interpolate.too_fast", {"fps": 100.0, "nearest": ["factor", "2"]}),
    ]
    check_refusals(cases, capsys, subtests, ["interpolate", "--out", str(tmp_path / "y.mp4")])
    assert not (tmp_path / "y.mp4").exists()


def test_cancelling_leaves_nothing(tmp_path: Path) -> None:
    source = read_info(save(tmp_path / "x.mp4", frames(count=60)))
    cancel, events, out = Cancel(), [], tmp_path / "y.mp4"

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, FramesDecoded):
            cancel.request()

    plan = InterpolationPlan(source=source, factor=2, output=out)
    with pytest.raises(CancelledError):
        interpolate_file(plan, HistoryFile(tmp_path, probe()), emit, cancel)
    assert sum(isinstance(event, FramesDecoded) for event in events) < 12
    assert not out.exists()
    assert not list(tmp_path.glob(".tandem*"))
