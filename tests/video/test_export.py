"""Exports: every format with its frames, rate, colors and metadata; parts, joined clips, sound; what is refused."""

import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import InvalidRequestError, MachineError, OutputError, TandemError
from runtime.video.export import Clip, ExportPlan, check_export_target, default_target, export
from runtime.video.export_formats import FORMATS, find_format
from runtime.video.mp4 import VideoWriter, find_ffmpeg, read_metadata
from runtime.video.reader import read_info, read_packets, read_video
from tests import full_disk

WIDTH, HEIGHT, FRAMES, RATE = 64, 48, 13, 12
REQUEST = {"prompt": "a red boat “at” night\n🚤 <&>", "seed": 7, "crf": 12, "width": 64, "height": 48}
CODECS = {
    "mp4": ("h264", "yuv420p"), "h264-10bit": ("h264", "yuv420p10le"), "h265": ("hevc", "yuv420p"),
    "h265-10bit": ("hevc", "yuv420p10le"), "av1": ("av1", "yuv420p"), "av1-10bit": ("av1", "yuv420p10le"),
    "webm": ("vp9", "yuv420p"), "prores": ("prores", "yuv422p10le"),
}  # fmt: skip


def picture(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Return frame `number` of a clip whose frames differ clearly: a bar that moves over a smooth color."""
    frame = np.empty((height, width, 3), np.uint8)
    frame[..., 0], frame[..., 1] = np.linspace(40, 200, width), np.linspace(60, 160, height)[:, None]
    frame[..., 2] = 90
    frame[:, number * 4 : number * 4 + 4] = (230, 220, 40)
    return frame


def make(path: Path, *, first: int = 0, count: int = FRAMES, crf: int = 12, fps: int = RATE, **sides: int) -> Path:
    """Write a clip as Tandem does."""
    frames = np.stack([picture(first + number, **sides) for number in range(count)])
    with VideoWriter(path, frames.shape[2], frames.shape[1], fps, crf) as writer:
        writer.write(frames)
        writer.close_stream()
        writer.finish("a boat", {"tandem": {"request": REQUEST, "seed": 7}})
    return path


def with_sound(path: Path, clip: Path) -> Path:
    """Copy a clip, with a tone that is longer than it."""
    command = [find_ffmpeg(), "-v", "error", "-i", str(clip), "-f", "lavfi", "-i", "sine=duration=3", "-c:v", "copy"]
    subprocess.run([*command, "-map_metadata", "0", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("clips") / "it's 100% boat.mp4")


def exported(clips: list[Clip], name: str, folder: Path, width: int | None = None) -> tuple[ExportPlan, Path]:
    """Export clips; return the plan and the file."""
    plan = ExportPlan.of(clips, find_format(name), width)
    target = default_target(plan, folder)
    check_export_target(plan, target)
    shares: list[float] = []
    assert export(plan, target, shares.append) == ""
    assert shares == sorted(shares) and shares[-1] > 0
    assert not list(folder.glob(".tandem*"))
    return plan, target


def frames_of(path: Path) -> np.ndarray:
    """Return the frames of a video, an image or a folder of frames."""
    if path.is_dir():
        return np.stack([np.asarray(Image.open(file)) for file in sorted(path.iterdir())])
    if path.suffix in {".gif", ".webp", ".png"}:
        with Image.open(path) as image:
            return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
    return np.concatenate(list(read_video(read_info(path), 4)))


def durations_of(path: Path) -> list[int]:
    """Return how long each frame of a moving image lasts, in milliseconds."""
    with Image.open(path) as image:
        durations = []
        for frame in ImageSequence.Iterator(image):
            frame.load()
            durations.append(frame.info["duration"])
    return durations


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_the_frames_the_rate_and_the_settings(name: str, source: Path, tmp_path: Path) -> None:
    clip = Clip.read(source)
    plan, path = exported([clip], name, tmp_path)
    original, frames = frames_of(source), frames_of(path)
    count = 1 if name == "last-frame" else FRAMES
    assert frames.shape == (count, HEIGHT, WIDTH, 3) and plan.frames == count
    difference = np.abs(frames.astype(int) - original[-count:].astype(int))
    assert difference.mean() < (8 if name == "gif" else 0.1 if name in {"png", "last-frame", "mp4"} else 5), name
    if name in CODECS:
        info = read_info(path)
        assert (int(info.rate), info.codec, info.pixels) == (RATE, *CODECS[name])
        assert abs((info.seconds or 0) - FRAMES / RATE) < 0.02
    elif plan.format.kind == "animation":
        with Image.open(path) as image:
            assert image.info["loop"] == 0
        seconds = sum(durations_of(path)) / 1000
        assert abs(seconds - FRAMES / RATE) < 0.02
    assert clip.bits is not None and plan.bytes > 0 and plan.seconds > 0
    if plan.format.suffix not in {"", ".png", ".webp"}:  # the page reads those
        metadata = read_metadata(path)
        assert (metadata["request"], metadata["seed"]) == (REQUEST, 7)
        assert metadata["export"] == {"format": name, "source": source.name, "start": 0, "end": FRAMES / RATE}


def test_a_part_has_exactly_its_frames(source: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    clip, original = Clip.read(source), frames_of(source)
    for start, end, first, last in (
        (None, 0.5, 0, 6),
        (0.25, None, 3, 13),
        (2 / 12, 5 / 12, 2, 5),
        (0.17, 0.41, 2, 5),  # the nearest frames
        (12 / 12, 13 / 12, 12, 13),
    ):
        with subtests.test(f"{start} to {end}"):
            part = clip.cut(start, end)
            assert (part.first, part.last) == (first, last)
            _, path = exported([part], "png", tmp_path)
            assert np.array_equal(frames_of(path), original[first:last])
    # Of a video, without the frames before the start.
    plan, path = exported([clip.cut(0.25, 0.5)], "mp4", tmp_path)
    assert not plan.copies and plan.clips[0].crf == 12
    assert np.abs(frames_of(path).astype(int) - original[3:6].astype(int)).mean() < 2
    assert read_metadata(path)["export"]["start"] == 0.25
    assert Clip.read(path).cut(0, 0.08).count == 1


def test_times_outside_the_clip_are_refused(source: Path, subtests: pytest.Subtests) -> None:
    clip = Clip.read(source)
    nan, infinite = float("nan"), float("inf")
    cases: list[tuple[float | None, float | None, str, str]] = [
        (-0.01, None, "export.time_outside", "start"), (nan, None, "export.time_outside", "start"),
        (None, infinite, "export.time_outside", "end"), (None, 1.2, "export.time_outside", "end"),
        (5.0, None, "export.time_outside", "start"), (0.5, 0.5, "export.no_frames", "end"),
        (0.6, 0.2, "export.no_frames", "end"), (13 / 12, None, "export.no_frames", "end"),
        (0.5, 0.52, "export.no_frames", "end"),
    ]  # fmt: skip
    for start, end, code, field in cases:
        with subtests.test(f"{start} to {end}"), pytest.raises(InvalidRequestError) as refused:
            clip.cut(start, end)
        assert (refused.value.code, refused.value.field) == (code, field)


def test_equal_clips_are_joined_without_encoding(source: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.mp4", first=3, count=5)
    clips = [Clip.read(path) for path in (other, source, other)]
    plan, path = exported(clips, "mp4", tmp_path)
    assert plan.copies and plan.frames == 5 + FRAMES + 5
    expected = np.concatenate([frames_of(other), frames_of(source), frames_of(other)])
    assert np.array_equal(frames_of(path), expected)
    metadata = read_metadata(path)
    assert metadata["request"] == REQUEST
    parts = metadata["export"]["parts"]
    assert [(part["source"], part["frames"], part["request"] == REQUEST) for part in parts] == [
        ("other.mp4", 5, True), (source.name, FRAMES, True), ("other.mp4", 5, True),
    ]  # fmt: skip
    # Another encoding, and a part, are encoded, with the quality of the first clip.
    subprocess.run(
        [find_ffmpeg(), "-v", "error", "-i", str(other), "-c:v", "libx264", "-profile:v", "baseline", "-crf", "10",
         str(tmp_path / "baseline.mp4")], check=True,
    )  # fmt: skip
    mixed, path = exported([clips[1], Clip.read(tmp_path / "baseline.mp4")], "mp4", tmp_path)
    assert not mixed.copies and mixed.clips[0].crf == 12
    assert np.abs(frames_of(path).astype(int) - expected[5:].astype(int)).mean() < 3
    _, path = exported([clips[0], clips[1].cut(0.5, None)], "webp", tmp_path)
    assert len(frames_of(path)) == 5 + FRAMES - 6


def test_clips_of_another_size_or_rate_are_not_joined(source: Path, tmp_path: Path) -> None:
    first = Clip.read(source)
    for other in (make(tmp_path / "wide.mp4", width=80, count=2), make(tmp_path / "slow.mp4", fps=8, count=2)):
        with pytest.raises(InvalidRequestError) as refused:
            ExportPlan.of([first, Clip.read(other)], FORMATS["mp4"])
        assert refused.value.code == "export.clips_differ" and refused.value.data["file"] == other.name


def test_sound_is_kept_where_the_format_has_it(source: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    loud = Clip.read(with_sound(tmp_path / "loud.mp4", source))
    assert loud.frames == FRAMES  # and not as long as the sound
    silent = Clip.read(source)
    for clips, name, codec in (
        ([loud], "mp4", "aac"),  # copied
        ([loud.cut(0.25, 0.75)], "mp4", "aac"),
        ([loud.cut(0.25, 0.75)], "webm", "opus"),
        ([loud, silent], "mp4", "aac"),
        ([silent, loud], "prores", "pcm_s16le"),
    ):
        with subtests.test(f"{len(clips)} clips, {name}"):
            plan, path = exported(clips, name, tmp_path)
            info = read_info(path)
            assert (info.sound, read_packets(info)[0]) == ((codec,), plan.frames)
            if not plan.copies:
                assert abs((info.seconds or 0) - plan.frames / RATE) < 0.1
    notes = [note.code for note in ExportPlan.of([loud], FORMATS["gif"]).notes]
    assert notes == ["export.gif_delays", "export.no_sound"][::-1]


def test_moving_images_of_large_and_fast_videos_are_smaller_and_slower(tmp_path: Path) -> None:
    large = tmp_path / "large.mkv"
    command = [find_ffmpeg(), "-v", "error", "-f", "lavfi", "-i", "testsrc=size=1001x601:rate=60:duration=0.2"]
    subprocess.run([*command, "-c:v", "ffv1", str(large)], check=True)
    clip = Clip.read(large)
    plan, path = exported([clip], "gif", tmp_path)
    with Image.open(path) as image:
        assert (image.size, getattr(image, "n_frames", 1)) == ((480, 288), 10) and plan.frames == 10
    assert set(durations_of(path)) == {20}
    assert {note.code for note in plan.notes} == {"export.smaller", "export.gif_rate"}
    assert ExportPlan.of([clip], FORMATS["webp"]).width == 720
    # Pairs of pixels share colors: a video loses an odd row and column.
    plan, path = exported([clip], "h265", tmp_path)
    assert frames_of(path).shape[:3] == (12, 600, 1000) and not plan.notes
    assert exported([clip], "last-frame", tmp_path, 100)[0].height == 60
    for width in (15, 1002):
        with pytest.raises(InvalidRequestError) as refused:
            ExportPlan.of([clip], FORMATS["gif"], width)
        assert (refused.value.code, refused.value.field) == ("request.out_of_range", "width")


def test_a_single_frame_is_a_webp_with_settings(source: Path, tmp_path: Path) -> None:
    _, path = exported([Clip.read(source).cut(0, 1 / 12)], "webp", tmp_path)
    with Image.open(path) as image:
        image.load()
        assert image.size == (WIDTH, HEIGHT) and b"a red boat" in image.info["xmp"]


def test_targets_that_do_not_fit_are_refused(source: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    clip = Clip.read(source)
    (tmp_path / "frames").mkdir()
    (tmp_path / "folder.gif").mkdir()
    video = make(tmp_path / "video.mp4")
    os.link(video, tmp_path / "hard.mp4")
    cases: list[tuple[Clip, str, Path, str]] = [
        (clip, "gif", tmp_path / "a.mp4", "export.suffix"),
        (clip, "png", tmp_path / "a.png", "export.suffix"),
        (clip, "png", tmp_path / "frames", "export.folder_exists"),
        (clip, "gif", tmp_path / "folder.gif", "video.not_a_file"),
        (clip, "mp4", tmp_path / "none" / "a.mp4", "video.folder_missing"),
        (clip, "mp4", tmp_path / f"{'a' * 300}.mp4", "video.not_writable"),
        (Clip.read(video), "mp4", video, "source.same_file"),
        (Clip.read(video), "mp4", tmp_path / "hard.mp4", "source.same_file"),
    ]
    for part, name, path, code in cases:
        with subtests.test(path.name[:20]), pytest.raises(TandemError) as refused:
            check_export_target(ExportPlan.of([part], FORMATS[name]), path)
        assert refused.value.code == code
    plan = replace(ExportPlan.of([clip], FORMATS["png"]), bytes=1 << 60)
    with pytest.raises(OutputError) as refused_disk:
        check_export_target(plan, tmp_path / "x.zip")
    assert refused_disk.value.code == "video.disk_too_small"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell script as ffmpeg")
def test_a_format_whose_encoder_is_missing_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text(f'#!/bin/sh\n"{find_ffmpeg()}" "$@" | grep -av -e libx265 -e svtav1\n', encoding="utf-8")
    program.chmod(0o755)
    clip = Clip.read(source)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    with pytest.raises(MachineError) as refused:
        ExportPlan.of([clip], FORMATS["h265"])
    data: dict[str, Any] = refused.value.data
    assert (refused.value.code, data["format"], data["encoders"]) == ("export.no_encoder", "h265", ["libx265"])
    assert "webm" in data["usable"] and "h265-10bit" not in data["usable"]
    assert ExportPlan.of([clip], FORMATS["av1"]).encoder == "libaom-av1"


def test_cancelling_and_a_full_disk_leave_nothing(source: Path, small_disk: Path) -> None:
    clip, cancel = Clip.read(source), Cancel()
    plan = ExportPlan.of([clip], FORMATS["prores"])
    full_disk.fill(small_disk)
    with pytest.raises(OutputError) as full:
        export(plan, small_disk / "x.mov")
    assert full.value.code == "video.disk_full"
    (small_disk / "filler").unlink()
    cancel.request()
    with pytest.raises(CancelledError):
        export(plan, small_disk / "x.mov", check=cancel.check)
    assert not list(small_disk.iterdir())


def test_a_damaged_clip_is_exported_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    damaged_file = tmp_path / "damaged.mp4"
    data = bytearray(make(tmp_path / "whole.mp4", crf=1).read_bytes())
    middle = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2
    data[middle : middle + 400] = bytes(400)
    damaged_file.write_bytes(data)
    plan = ExportPlan.of([Clip.read(damaged_file)], FORMATS["webm"])
    assert export(plan, tmp_path / "x.webm")
    assert len(frames_of(tmp_path / "x.webm")) >= FRAMES - 2
    assert Clip.read(damaged_file).info.rate == Fraction(RATE)
