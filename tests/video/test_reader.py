"""Videos of people: any container, upright, square pixels, constant rate; wrong, HDR and hostile files are refused."""

import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import InvalidRequestError
from runtime.video.mp4 import VideoWriter, find_ffmpeg
from runtime.video.reader import VideoInfo, count_frames, read_info, read_video

PICTURE = ("-f", "lavfi", "-i", "testsrc=size=32x24:rate=30000/1001:duration=1")
TONE = ("-f", "lavfi", "-i", "sine=duration=1")
THIN = ("-f", "lavfi", "-i", "color=size=1x8:duration=0.1")
H264 = ("-c:v", "libx264", "-pix_fmt", "yuv420p")


def make(path: Path, *options: str, inputs: tuple[str, ...] = PICTURE) -> Path:
    """Make a video with ffmpeg."""
    subprocess.run([find_ffmpeg(), "-v", "error", "-y", *inputs, *options, str(path)], check=True, capture_output=True)
    return path


def frames_of(info: VideoInfo, count: int = 7) -> tuple[np.ndarray, str]:
    """Return all frames of a video, and what ffmpeg reported."""
    chunks, reading = [], read_video(info, count)
    while True:
        try:
            chunks.append(next(reading))
        except StopIteration as end:
            assert all(len(chunk) == count for chunk in chunks[:-1])
            return np.concatenate(chunks), end.value


def test_videos_of_all_kinds_are_read(tmp_path: Path, subtests: pytest.Subtests) -> None:
    rate, both = Fraction(30000, 1001), (*PICTURE, *TONE)
    turned = make(tmp_path / "h264.mp4", *H264, inputs=both)
    cases = [
        (turned, (32, 24), rate, 30, ("aac",)),
        (
            make(tmp_path / "vp8.webm", "-c:v", "libvpx", "-c:a", "libvorbis", inputs=both),
            (32, 24),
            rate,
            30,
            ("vorbis",),
        ),
        (make(tmp_path / "any.gif"), (32, 24), rate, 30, ()),
        (make(tmp_path / "-minus.avi", "-c:v", "mjpeg"), (32, 24), rate, 30, ()),
        (make(tmp_path / "wide.mkv", "-vf", "setsar=2", *H264), (64, 24), rate, 30, ()),
        (make(tmp_path / "10bit.mkv", "-c:v", "libx264", "-pix_fmt", "yuv444p10"), (32, 24), rate, 30, ()),
        # The second half at half the rate.
        (
            make(
                tmp_path / "vfr.mkv", "-vf", "setpts='if(lt(N,15),N,2*N-15)*1001/30000/TB'", "-fps_mode", "vfr", *H264
            ),
            (32, 24),
            rate,
            44,
            (),
        ),
    ]
    inputs = ("-display_rotation", "90", "-i", str(turned))
    cases.append((make(tmp_path / "turned.mp4", "-c", "copy", "-an", inputs=inputs), (24, 32), rate, 30, ()))
    for path, (width, height), wanted, count, sound in cases:
        with subtests.test(path.name):
            info = read_info(path)
            assert (info.width, info.height, info.rate, info.sound) == (width, height, wanted, sound)
            frames, damage = frames_of(info)
            assert frames.shape[1:] == (height, width, 3)
            assert abs(len(frames) - count) <= 1
            assert info.frames is not None
            assert abs(len(frames) - info.frames) <= 1
            assert damage == ""
            # At another rate, the frames nearest in time.
            ten = list(read_video(info, 7, rate=Fraction(10)))
            assert sum(map(len, ten)) == count_frames(info, Fraction(10), 1000)
            assert abs(sum(map(len, ten)) - count / wanted * 10) <= 1
            assert count_frames(info, Fraction(10), 4) == sum(map(len, read_video(info, 3, rate=Fraction(10), most=4)))


@pytest.mark.parametrize("name", ["a.mp4", "a.ts", "a.h264"])
def test_a_part_is_read_from_its_second_on(name: str, tmp_path: Path) -> None:
    source = ("-f", "lavfi", "-i", "testsrc2=size=32x24:rate=25:duration=3")
    info = read_info(make(tmp_path / name, "-c:v", "libx264", "-g", "50", inputs=source))
    rate = Fraction(10)
    every, part = (np.concatenate([*read_video(info, 7, rate=rate, start=start)]) for start in (0.0, 1.2))
    assert (part[:15] == every[12:27]).all() and len(part) == count_frames(info, rate, 99, start=1.2)


def test_frames_have_the_colors_that_were_written(tmp_path: Path) -> None:
    colors = np.array([[200, 40, 40], [30, 160, 60], [40, 60, 220], [128, 128, 128]], np.uint8)
    frames = np.repeat(np.repeat(colors.reshape(1, 2, 2, 3), 16, 1), 16, 2).repeat(5, 0)
    with VideoWriter(tmp_path / "x.mp4", 32, 32, 16, 0) as writer:
        writer.write(frames)
        writer.close_stream()
        writer.finish("", {})
    read, _ = frames_of(read_info(tmp_path / "x.mp4"))
    assert read.shape == frames.shape
    assert np.abs(read[:, 4::16, 4::16].astype(int) - frames[:, 4::16, 4::16]).max() <= 3


def test_a_truncated_video_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = make(tmp_path / "x.webm", "-c:v", "libvpx", "-g", "5")
    cut = tmp_path / "cut.webm"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    frames, damage = frames_of(read_info(cut))
    assert 5 < len(frames) < 30
    assert damage


def test_other_files_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    mp4 = make(tmp_path / "x.mp4", *H264)
    files = {name: tmp_path / name for name in ("empty.mp4", "noise.mp4", "list.mp4", "cut.mp4", "text.m3u8")}
    files["empty.mp4"].touch()
    files["noise.mp4"].write_bytes(np.random.default_rng(1).bytes(50_000))
    files["list.mp4"].write_text(f"ffconcat version 1.0\nfile {mp4}\n")
    files["text.m3u8"].write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{mp4}\n#EXT-X-ENDLIST\n")
    files["cut.mp4"].write_bytes(mp4.read_bytes()[:900])
    pq = "setparams=color_trc=smpte2084:color_primaries=bt2020:colorspace=bt2020nc"
    cases = [
        (tmp_path / "none.mp4", "source.unreadable"),
        (tmp_path, "source.not_a_file"),
        (files["empty.mp4"], "source.empty"),
        (files["noise.mp4"], "source.no_video"),
        (files["list.mp4"], "source.no_video"),
        (files["text.m3u8"], "source.no_video"),
        (files["cut.mp4"], "source.no_video"),
        (make(tmp_path / "x.png", "-frames:v", "1"), "source.no_video"),
        (make(tmp_path / "x.m4a", "-vn", inputs=TONE), "source.only_sound"),
        (make(tmp_path / "hdr.mkv", "-vf", f"format=yuv420p10,{pq}", "-c:v", "libx264"), "source.hdr"),
        (
            make(tmp_path / "wide.mkv", "-vf", "scale=8200:2,setsar=1", "-c:v", "ffv1", "-frames:v", "1"),
            "source.too_large",
        ),
        (
            make(tmp_path / "sar.mkv", "-vf", "scale=4200:2,setsar=2", *H264, "-frames:v", "1"),
            "source.too_large",
        ),
        (make(tmp_path / "huge.mkv", "-vf", "scale=8000:6000", "-c:v", "mjpeg", "-frames:v", "1"), "source.too_large"),
        (make(tmp_path / "thin.mkv", "-c:v", "png", inputs=THIN), "source.too_small"),
    ]
    for path, code in cases:
        with subtests.test(path.name):
            with pytest.raises(InvalidRequestError) as caught:
                read_info(path)
            assert caught.value.code == code
