"""New frames between those of a video: how many, where, cuts, and an ffmpeg that fails, waits or is killed."""

import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import MachineError, OutputError
from runtime.video.interpolation import FrameInterpolator, check_interpolator
from tests.waiting import until

ROOT = Path(__file__).parents[2]
HEIGHT, WIDTH = 64, 96
MOVES = 8


def square(count: int, moves: int = MOVES) -> np.ndarray:
    """Return frames with a textured square that moves right over a gradient."""
    texture = np.random.default_rng(1).integers(0, 80, (24, 24, 3), np.uint8) + 160
    frames = np.zeros((count, HEIGHT, WIDTH, 3), np.uint8)
    frames += np.linspace(0, 60, WIDTH).astype(np.uint8)[:, None]
    for index in range(count):
        start = 8 + index * moves
        frames[index, 16:40, start : start + 24] = texture
    return frames


def interpolated(frames: np.ndarray, factor: int, at_once: int = 4, by: type = FrameInterpolator) -> np.ndarray:
    """Return frames with those between them."""
    with by(frames.shape[2], frames.shape[1], factor) as interpolator:
        parts = [
            part for start in range(0, len(frames), at_once) for part in interpolator.add(frames[start:][:at_once])
        ]
        return np.concatenate([*parts, *interpolator.finish(), frames[:0]])


def test_every_frame_is_kept_and_followed_by_new_ones(subtests: pytest.Subtests) -> None:
    generator = np.random.default_rng(0)
    for count, factor, (height, width) in product((0, 1, 2, 3, 33, 81), (2, 4), ((32, 48), (15, 21), (2, 2))):
        with subtests.test(count=count, factor=factor, height=height):
            frames = generator.integers(0, 256, (count, height, width, 3), np.uint8)
            result = interpolated(frames, factor)
            assert result.shape == (count * factor, height, width, 3)
            assert (result[::factor] == frames).all()
            # The last frame is shown as long as before.
            assert (result[-factor:] == frames[-1:]).all()


@pytest.mark.parametrize("factor", [2, 4])
def test_new_frames_follow_the_motion(factor: int) -> None:
    every = square(4 * factor + 1, MOVES // factor)
    frames = every[::factor]
    result = interpolated(frames, factor)[: len(every)].astype(float)
    new = [index for index in range(len(every)) if index % factor]
    shares = np.array([index % factor / factor for index in new])[:, None, None, None]
    before = np.array([index // factor for index in new])
    blended = frames[before] * (1 - shares) + frames[before + 1] * shares
    error, of_blending = (np.square(made - every[new]).mean() for made in (result[new], blended))
    assert error < of_blending / 10


def test_two_scenes_are_not_mixed() -> None:
    frames = np.concatenate([square(3), 255 - square(3)])
    result = interpolated(frames, 4)
    # The new frames at the cut show one scene or the other, as exactly as YUV has them.
    for frame in result[9:12].astype(int):
        assert min(np.abs(frame - scene).max() for scene in frames[2:4]) <= 3


def test_a_dead_ffmpeg_is_reported() -> None:
    frames = square(2)
    with FrameInterpolator(WIDTH, HEIGHT, 2) as interpolator, pytest.raises(OutputError) as caught:
        interpolator._process.kill()
        for _ in range(100):
            list(interpolator.add(frames))
        list(interpolator.finish())
    assert caught.value.fact.code == "interpolate.failed"


def test_an_ffmpeg_that_hangs_can_be_cancelled() -> None:
    cancel, frames = Cancel(), square(2)
    with FrameInterpolator(WIDTH, HEIGHT, 2, cancel.check) as interpolator:
        process = psutil.Process(interpolator._process.pid)
        process.suspend()
        list(interpolator.add(frames))
        cancel.request()
        with pytest.raises(CancelledError):
            list(interpolator.finish())
    assert not process.is_running()


def test_an_ffmpeg_without_the_filter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ffmpeg = tmp_path / "ffmpeg"
    ffmpeg.write_text("#!/bin/sh\n[ $1 = -version ] || { echo No such filter >&2; exit 8; }\n", "utf-8")
    ffmpeg.chmod(0o755)
    for program, code in ((ffmpeg, "interpolate.no_filter"), (tmp_path / "none", "video.no_ffmpeg")):
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
        with pytest.raises(MachineError) as caught:
            check_interpolator()
        assert caught.value.fact.code == code


def test_ffmpeg_ends_with_a_killed_process() -> None:
    code = (
        "import numpy as np\nfrom runtime.video.interpolation import FrameInterpolator\n"
        f"with FrameInterpolator({WIDTH}, {HEIGHT}, 2) as interpolator:\n"
        f"    list(interpolator.add(np.zeros((2, {HEIGHT}, {WIDTH}, 3), 'uint8')))\n"
        "    print(interpolator._process.pid, flush=True)\n    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ffmpeg = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not ffmpeg.is_running() or ffmpeg.status() == psutil.STATUS_ZOMBIE)
