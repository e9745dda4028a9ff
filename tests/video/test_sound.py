"""Sound of written, exported and joined videos: codec, length, start, pitch, channels, and what disks and files do."""

import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from runtime.core.errors import InvalidRequestError, MachineError, OutputError
from runtime.core.plan import SoundFormat
from runtime.core.sound import Sound
from runtime.video.export import Clip, ExportPlan, default_target, export
from runtime.video.export_formats import FORMATS, find_format
from runtime.video.mp4 import (
    NewSound,
    VideoWriter,
    check_output,
    copy_without_metadata,
    find_ffmpeg,
    read_metadata,
    sweep,
)
from runtime.video.reader import read_info, read_packets, read_sound
from runtime.video.sound_samples import continued, fitted, looped, sample_at
from tests.sounds import AAC_FRAME, frames, heard, largest_step, loudness, onset, pitch, sound_in, tone, write_clip
from tests.waiting import until

SOUND_FORMATS: tuple[SoundFormat, ...] = get_args(SoundFormat)
COUNT, FPS = 12, 8
SECONDS = COUNT / FPS


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("rate", [24_000, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_written_video_has_the_sound(rate: int, channels: int, lossless: bool, tmp_path: Path) -> None:
    sound = tone(SECONDS, rate, (440.0, 1_200.0)[:channels], start=0.5)
    path = write_clip(tmp_path / "x.mp4", sound, lossless=lossless)
    found = sound_in(path)
    assert found is not None
    codec, played = found
    assert (codec, played.rate, played.samples.shape) == ("flac" if lossless else "aac", rate, sound.samples.shape)
    assert read_packets(read_info(path))[0] == COUNT
    for channel, hz in enumerate((440.0, 1_200.0)[:channels]):
        assert abs(pitch(played, 0.6, SECONDS, channel) - hz) < 1
    assert abs(onset(played) - onset(sound)) < (0.001 if lossless else AAC_FRAME / rate)
    error = np.abs(played.samples - sound.samples).max()
    assert error < (1e-6 if lossless else 0.2)
    # The level is not changed.
    assert abs(loudness(played, 0.6, SECONDS) / loudness(sound, 0.6, SECONDS) - 1) < 0.03


@pytest.mark.parametrize("seconds", [0.0, 0.3, SECONDS - 0.001, SECONDS + 0.001, 5.0])
def test_sound_is_as_long_as_the_frames(seconds: float, tmp_path: Path) -> None:
    path = write_clip(tmp_path / "x.mp4", tone(seconds), lossless=True)
    played = heard(path)
    assert played.samples.shape == (1, round(SECONDS * 48_000))
    assert abs((read_info(path).seconds or 0) - SECONDS) < 0.011
    if seconds == 0.3:
        assert loudness(played, 0, 0.3) > 0.3 and loudness(played, 0.3, SECONDS) == 0


def test_samples_are_limited_and_not_scaled(tmp_path: Path) -> None:
    loud = tone(SECONDS, level=3.0)
    played = heard(write_clip(tmp_path / "x.mp4", loud, lossless=True))
    assert np.abs(played.samples - loud.samples.clip(-1, 1)).max() < 1e-6
    # AAC could hold more.
    assert np.abs(heard(write_clip(tmp_path / "y.mp4", loud)).samples).max() < 1.5


def test_a_full_disk_leaves_no_video(small_disk: Path) -> None:
    with pytest.raises(OutputError) as failed:
        write_clip(small_disk / "x.mp4", tone(25), count=200)
    assert failed.value.code == "video.disk_full"
    assert not list(small_disk.iterdir())


def test_a_death_while_sound_is_saved_leaves_no_video(tmp_path: Path) -> None:
    code = "from pathlib import Path; import sys; from tests.sounds import tone, write_clip\n"
    code += "write_clip(Path(sys.argv[1]), tone(1_000), count=8_000)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x.mp4")]) as writing:
        until(lambda: list(tmp_path.glob(".tandem*/sound.f32")))
        writing.kill()
    assert not (tmp_path / "x.mp4").exists()

    def swept() -> bool:
        sweep(tmp_path)
        return not list(tmp_path.iterdir())

    until(swept)  # ffmpeg may still run


def test_the_encoder_of_sound_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sound in SOUND_FORMATS:
        check_output(tmp_path / "x.mp4", 64, 32, COUNT, 10, sound)
    # An ffmpeg that has no encoders of sound.
    program = tmp_path / "ffmpeg"
    program.write_text(f'#!/bin/sh\ncase "$*" in *-c:a*) echo "Unknown encoder" >&2; exit 8;; esac\n'
                       f'exec "{find_ffmpeg()}" "$@"\n')  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    check_output(tmp_path / "x.mp4", 64, 32, COUNT, 10)
    for sound in SOUND_FORMATS:
        with pytest.raises(MachineError) as refused:
            check_output(tmp_path / "x.mp4", 64, 32, COUNT, 10, sound)
        assert refused.value.code == "video.no_sound_encoder"


def test_a_copy_without_metadata_has_the_sound(tmp_path: Path) -> None:
    video = write_clip(tmp_path / "x.mp4", tone(SECONDS))
    with copy_without_metadata(video) as copy:
        assert (heard(copy).samples == heard(video).samples).all()


# Loops and continuations, as samples.


@pytest.mark.parametrize("fps", [8, Fraction(30_000, 1_001), 25])
@pytest.mark.parametrize("rate", [24_000, 44_100])
def test_a_loop_that_is_played_backwards_has_no_jump(fps: int | Fraction, rate: int) -> None:
    sound = tone(COUNT / float(fps), rate, (300.0, 700.0))
    loop = looped(sound, "backwards", COUNT, fps)
    assert loop.samples.shape == (2, sample_at(2 * COUNT - 2, fps, rate))
    again = Sound(np.tile(loop.samples, 2), rate)
    assert largest_step(again) <= largest_step(sound) + 1e-6
    # The middle of each frame has the sound of its picture.
    for number in range(2 * COUNT - 2):
        shown = number if number < COUNT else 2 * COUNT - 2 - number
        here, there = (sample_at(Fraction(2 * one + 1, 2), fps, rate) for one in (number, shown))
        near = sound.samples[:, max(there - 2, 0) : there + 3]
        assert np.abs(near - loop.samples[:, here : here + 1]).min(axis=1).max() < 0.05


def test_a_loop_that_ends_on_its_first_frame_has_no_jump() -> None:
    sound = tone(SECONDS, hz=(437.3,), level=0.9)
    loop = looped(sound, "same frame", COUNT, FPS)
    count = sample_at(COUNT - 1, FPS, sound.rate)
    assert loop.samples.shape == (1, count)
    one = sound.rate // FPS
    assert (loop.samples[:, one:] == sound.samples[:, one:count]).all()
    again = Sound(np.tile(loop.samples, 2), sound.rate)
    assert largest_step(again) <= 1.01 * largest_step(sound)
    assert largest_step(Sound(np.tile(sound.samples[:, :count], 2), sound.rate)) > 5 * largest_step(sound)


@pytest.mark.parametrize("looping", [None, "backwards", "same frame"])
@pytest.mark.parametrize("frames_", [1, 2, 3])
def test_loops_of_few_frames(looping: str | None, frames_: int) -> None:
    count = {None: frames_, "backwards": max(2 * frames_ - 2, 1), "same frame": max(frames_ - 1, 1)}[looping]
    loop = looped(tone(1), looping, frames_, FPS)  # type: ignore[arg-type]
    assert loop.samples.shape == (1, sample_at(count, FPS, 48_000))


def test_a_part_follows_at_its_time() -> None:
    earlier, new = tone(COUNT / FPS, hz=(400.0,)), tone(9 / FPS, hz=(1_000.0,))
    both = continued(earlier, new, COUNT, FPS)
    assert both is not None and both.samples.shape[1] == sample_at(COUNT + 8, FPS, 48_000)
    joint, start = sample_at(COUNT, FPS, 48_000), sample_at(COUNT - 1, FPS, 48_000)
    assert (both.samples[:, :start] == earlier.samples[:, :start]).all()
    assert (both.samples[:, joint:] == new.samples[:, joint - start :]).all()
    assert largest_step(both) <= 1.5 * largest_step(new)
    alone, silent = continued(None, new, COUNT, FPS), continued(earlier, None, COUNT, FPS)
    assert alone is not None and silent is not None
    assert not alone.samples[:, :joint].any() and (alone.samples[:, joint:] == both.samples[:, joint:]).all()
    assert (silent.samples == earlier.samples).all()
    assert fitted(silent, COUNT + 8, FPS).samples.shape == both.samples.shape
    assert continued(None, None, COUNT, FPS) is None


def test_sound_is_read_as_it_is_or_as_it_is_wanted(tmp_path: Path) -> None:
    info = read_info(write_clip(tmp_path / "x.mp4", tone(SECONDS, 24_000, start=0.5), lossless=True))
    own = read_sound(info, Fraction(SECONDS))
    assert own is not None and (own.rate, own.samples.shape) == (24_000, (1, 36_000))
    other = read_sound(info, Fraction(1), rate=48_000, channels=2)
    assert other is not None and (other.rate, other.samples.shape) == (48_000, (2, 48_000))
    assert abs(onset(other) - onset(own)) < 0.001 and abs(pitch(other, 0.6, 1) - 440) < 1
    assert read_sound(read_info(write_clip(tmp_path / "y.mp4", None)), Fraction(1)) is None
    # Six channels at 96 kHz would take much memory.
    large = tmp_path / "large.mkv"
    tones = ["-f", "lavfi", "-i", "sine=frequency=500:sample_rate=96000:duration=5"]
    command = [find_ffmpeg(), "-v", "error", "-i", str(info.path), *tones, "-map", "0:v", "-map", "1:a"]
    subprocess.run([*command, "-c:v", "copy", "-c:a", "pcm_s16le", "-ac", "6", str(large)], check=True)
    smaller = read_sound(read_info(large), Fraction(1))
    assert smaller is not None and (smaller.rate, smaller.samples.shape) == (48_000, (2, 48_000))
    assert abs(pitch(smaller, 0.1, 0.9) - 500) < 1


def test_sound_that_starts_late_keeps_its_time(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "x.mp4", None)
    late = tmp_path / "late.mkv"
    tones = ["-itsoffset", "0.5", "-f", "lavfi", "-i", "sine=frequency=500:sample_rate=48000:duration=0.5"]
    command = [find_ffmpeg(), "-v", "error", "-i", str(clip), *tones, "-map", "0:v", "-map", "1:a", "-c:v", "copy"]
    subprocess.run([*command, "-c:a", "flac", str(late)], check=True)
    sound = read_sound(read_info(late), Fraction(SECONDS))
    assert sound is not None and abs(onset(sound) - 0.5) < 0.002
    _, path = exported([Clip.read(late).cut(0.25, None)], "prores", tmp_path)
    played = heard(path)
    assert abs(onset(played) - 0.25) < 0.002
    assert played.samples.shape[1] == round((SECONDS - 0.25) * 48_000)
    assert loudness(played, 0.8, 1.25) < 1e-3


# Exports and joined videos.


def exported(clips: list[Clip], name: str, folder: Path, *, lossless: bool = False) -> tuple[ExportPlan, Path]:
    plan = ExportPlan.of(clips, find_format(name), lossless_sound=lossless)
    target = default_target(plan, folder)
    assert export(plan, target) == ""
    return plan, target


def test_each_format_has_the_sound_or_says_that_it_has_none(tmp_path: Path, subtests: pytest.Subtests) -> None:
    clip = Clip.read(write_clip(tmp_path / "x.mp4", tone(SECONDS, hz=(440.0, 1_200.0), start=0.5)))
    for name, kind in FORMATS.items():
        with subtests.test(name):
            plan, path = exported([clip], name, tmp_path)
            assert ("export.no_sound" in [note.code for note in plan.notes]) == (not plan.sound)
            assert bool(plan.sound) == (kind.kind == "video")
            if not plan.sound:
                continue
            played = heard(path)
            assert abs(played.samples.shape[1] - SECONDS * 48_000) <= (0 if name != "webm" else 960)
            assert abs(onset(played) - 0.5) < AAC_FRAME / 48_000
            assert [round(pitch(played, 0.7, 1.4, channel) / 10) for channel in range(2)] == [44, 120]
            assert read_metadata(path)["sound"]


@pytest.mark.parametrize(("start", "end"), [(0.25, 1.0), (0.125, None), (None, 0.875)])
def test_a_part_is_cut_at_the_sample(start: float | None, end: float | None, tmp_path: Path) -> None:
    sound = tone(SECONDS, hz=(440.0,), start=0.4)
    clip = Clip.read(write_clip(tmp_path / "x.mp4", sound, lossless=True))
    plan, path = exported([clip.cut(start, end)], "mp4", tmp_path)
    codec, played = sound_in(path) or ("", sound)
    # Sound without loss stays so.
    assert (codec, plan.copies) == ("flac", False)
    first, last = round((start or 0) * 48_000), round((end or SECONDS) * 48_000)
    assert played.samples.shape == (1, last - first)
    assert np.abs(played.samples - sound.samples[:, first:last]).max() < 1e-6


def test_parts_at_broken_rates_are_in_step(tmp_path: Path) -> None:
    sound = tone(SECONDS, 44_100, start=0.4)
    pictures = frames(36)
    path = tmp_path / "x.mp4"
    rate = Fraction(24_000, 1_001)
    with VideoWriter(path, 64, 32, rate, 10) as writer:
        writer.write(pictures)
        writer.close_stream()
        writer.finish("a boat", {"tandem": {}}, NewSound(sound, "flac"))
    clip = Clip.read(path)
    part = clip.cut(0.2, 1.2)
    _, cut = exported([part], "mp4", tmp_path)
    played, first = heard(cut), sample_at(part.first, rate, 44_100)
    assert abs(played.samples.shape[1] - sample_at(part.count, rate, 44_100)) <= 1
    count = min(played.samples.shape[1], sound.samples.shape[1] - first)
    expected = fitted(sound, 36, rate).samples[:, first : first + count]
    assert np.abs(played.samples[:, :count] - expected).max() < 1e-6


def test_lossless_sound_on_request(tmp_path: Path) -> None:
    clip = Clip.read(write_clip(tmp_path / "x.mp4", tone(SECONDS)))
    part = clip.cut(0.25, None)
    for name, codec in (("mp4", "flac"), ("av1", "flac"), ("prores", "pcm_s24le")):
        plan, path = exported([part], name, tmp_path, lossless=True)
        assert read_info(path).sound == (codec,)
        assert plan.bytes > ExportPlan.of([part], find_format(name)).bytes
    # A copy loses nothing.
    plan, path = exported([clip], "mp4", tmp_path, lossless=True)
    assert plan.copies and read_info(path).sound == ("aac",)
    assert (heard(path).samples == heard(clip.info.path).samples).all()
    for name in ("webm", "gif", "png"):
        with pytest.raises(InvalidRequestError) as refused:
            ExportPlan.of([clip], find_format(name), lossless_sound=True)
        assert (refused.value.code, refused.value.field) == ("export.no_lossless", "lossless_sound")
        assert "mp4" in refused.value.data["usable"]


def test_joined_clips_have_their_sound_at_their_time(tmp_path: Path) -> None:
    parts = [
        write_clip(tmp_path / "a.mp4", tone(SECONDS, hz=(400.0, 600.0)), lossless=True),
        write_clip(tmp_path / "b.mp4", None),
        write_clip(tmp_path / "c.mp4", tone(5, 24_000, hz=(1_000.0,)), count=9),
        write_clip(tmp_path / "d.mp4", tone(0.2, hz=(2_000.0,)), lossless=True),
    ]
    plan, path = exported([Clip.read(part) for part in parts], "mp4", tmp_path)
    assert not plan.copies and read_packets(read_info(path))[0] == 3 * COUNT + 9
    played = heard(path)
    begins = [0, SECONDS, 2 * SECONDS, 2 * SECONDS + 9 / FPS]
    assert abs(played.samples.shape[1] / played.rate - (3 * COUNT + 9) / FPS) < 2 / played.rate
    assert abs(pitch(played, 0.1, SECONDS - 0.1) - 400) < 1
    assert loudness(played, begins[1] + 0.05, begins[2] - 0.05) < 1e-3
    assert abs(pitch(played, begins[2] + 0.1, begins[3] - 0.1) - 1_000) < 2
    third = played.samples[0, round((begins[2] - 0.1) * played.rate) :]
    assert abs(np.argmax(np.abs(third) > 0.05) / played.rate - 0.1) < AAC_FRAME / 24_000
    assert abs(pitch(played, begins[3] + 0.02, begins[3] + 0.18) - 2_000) < 10
    assert loudness(played, begins[3] + 0.25, begins[3] + SECONDS) < 1e-3
    # All silent: no stream of sound.
    _, silent = exported([Clip.read(parts[1]), Clip.read(parts[1])], "mp4", tmp_path)
    assert sound_in(silent) is None and read_metadata(silent)["sound"] is False
