"""Videos of requests: found, counted, copied under their digest, and refused with one line and a remedy."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import InvalidRequestError
from runtime.core.images import referenced
from runtime.core.request import GenerationRequest
from runtime.models import videos
from runtime.models.catalogue import find
from runtime.models.images import images_dir, remove_unused
from runtime.models.spec import VAE_ENCODER, ModelSpec
from runtime.models.videos import find_video, keep_video, open_picture, open_video, with_video
from runtime.video import reader
from tests.video.test_reader import H264, make

Tiny = Callable[[str], ModelSpec]
UNKNOWN_DIGEST = "0123456789abcdef" * 4
TWO_SECONDS = ("-f", "lavfi", "-i", "testsrc=size=64x48:rate=30:duration=2")


def request(**values: Any) -> GenerationRequest:
    return GenerationRequest.from_mapping({"prompt": "a boat", **values})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of two seconds."""
    return make(tmp_path_factory.mktemp("video") / "boat.mp4", *H264, inputs=TWO_SECONDS)


def test_a_video_is_counted_at_the_requested_rate_and_copied(source: Path, tmp_path: Path) -> None:
    spec = find("diorama", tmp_path)  # 33 frames at 16 per second
    for asked, fps, frames in (
        ({}, 16, 32),
        ({"fps": 8}, 8, 16),
        ({"frames": 17}, 16, 17),
        ({"seconds": 0.5}, 16, 12),
        ({"frames": 49}, 16, 32),
    ):
        use = with_video(spec, request(video=str(source), **asked), tmp_path, tmp_path).video
        assert use is not None
        assert (use.name, use.width, use.height, use.fps) == ("boat.mp4", 64, 48, fps)
        assert abs(use.frames - frames) <= 1, asked
        assert use.path == images_dir(tmp_path) / use.digest and use.path.read_bytes() == source.read_bytes()
    assert use is not None and open_picture(use).size == (64, 48)


def test_the_copy_is_used_kept_and_removed_as_that_of_an_image(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "boat.mp4"
    file.write_bytes(source.read_bytes())
    use = find_video(str(file), tmp_path, 16, 33)
    file.unlink()
    assert use.reference == f"sha256:{use.digest}/boat.mp4" and referenced(use.reference) == {use.digest}
    assert find_video(use.reference, tmp_path, 16, 33) == use
    # A copy that is used again is new again.
    os.utime(use.path, (0, 0))
    find_video(use.reference, tmp_path, 16, 33)
    assert remove_unused(tmp_path, (), older_than=3600) == 0 and use.path.exists()
    content = use.path.read_bytes()
    use.path.write_bytes(content[:-1])
    for read, code in (
        (lambda: find_video(use.reference, tmp_path, 16, 33), "source.copy_missing"),
        (lambda: open_video(use), "source.changed"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            read()
        assert refused.value.code == code
    file.write_bytes(content)
    assert find_video(str(file), tmp_path, 16, 33).path.read_bytes() == content
    assert remove_unused(tmp_path, (), older_than=-1) == len(content)
    with pytest.raises(InvalidRequestError) as gone:
        open_video(use)
    assert gone.value.code == "source.gone"
    # Nothing is copied for a plan, or where nothing can be written.
    assert find_video(str(file), tmp_path, 16, 33, keep=False).path == file
    (tmp_path / "file").write_text("in the folder's place")
    assert find_video(str(file), tmp_path / "file", 16, 33).reference == str(file)


def test_uploads_of_less_than_half_a_second_are_kept(tmp_path: Path) -> None:
    for frames in (1, 3):
        inputs = ("-f", "lavfi", "-i", f"testsrc=size=64x48:rate=16:duration={frames / 16}")
        path = make(tmp_path / f"{frames}.mp4", *H264, inputs=inputs)
        use = keep_video(path.read_bytes(), path.name, tmp_path)
        assert (use.name, use.width, use.height) == (path.name, 64, 48)
        assert find_video(use.reference, tmp_path, 16, 9).frames == frames


def test_only_models_that_denoise_plain_latents_take_a_video(source: Path, tiny: Tiny, tmp_path: Path) -> None:
    for name in ("wan2.1", "wan2.2-a14b", "wan2.2-ti2v-5b"):
        spec = with_video(tiny(name), request(video=str(source)), tmp_path, tmp_path)
        assert spec.component_names[1] == VAE_ENCODER and spec.inputs == (spec.video,)
        assert spec.parameters[VAE_ENCODER] > 0
        assert VAE_ENCODER not in spec.for_text().component_names
    image = tmp_path / "boat.png"
    for model, values, code in (
        ("wan2.2-i2v-a14b", {}, "source.model_without"),
        ("wan2.1-i2v", {}, "source.model_without"),
        ("hunyuan-video", {}, "source.model_without"),
        ("wan2.2-ti2v-5b", {"image": str(image)}, "source.with_image"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            with_video(tiny(model), request(video=str(source), **values), tmp_path, tmp_path)
        assert (refused.value.field, refused.value.code) == ("video", code)
        assert code != "source.model_without" or "diorama" in refused.value.data["models"]
    decodes_only = replace(tiny("wan2.1"), video_input=None)
    with pytest.raises(InvalidRequestError):
        with_video(decodes_only, request(video=str(source)), tmp_path, tmp_path)
    assert with_video(decodes_only, request(), tmp_path, tmp_path) is decodes_only


def test_files_that_cannot_be_used(source: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    data = source.read_bytes()
    for name, content in (("empty", b""), ("text", b"a boat"), ("cut", data[:900])):
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(videos.MAX_FILE_BYTES + 1)
    os.mkfifo(tmp_path / "fifo")
    make(tmp_path / "sound.m4a", "-vn", inputs=("-f", "lavfi", "-i", "sine=duration=1"))
    pq = "format=yuv420p10,setparams=color_trc=smpte2084:color_primaries=bt2020:colorspace=bt2020nc"
    make(tmp_path / "hdr.mkv", "-vf", pq, "-c:v", "libx264", inputs=TWO_SECONDS)
    codes = {
        "empty": "source.empty",
        "text": "source.no_video",
        "cut": "source.no_video",
        "large": "source.file_too_large",
        "fifo": "source.not_a_file",
        "sound.m4a": "source.only_sound",
        "hdr.mkv": "source.hdr",
        "missing": "source.unreadable",
        "": "source.not_a_file",
    }
    cache = tmp_path / "cache"
    for name, code in codes.items():
        with subtests.test(name):
            with pytest.raises(InvalidRequestError) as refused:
                find_video(str(tmp_path / name), cache, 16, 33)
            assert (refused.value.field, refused.value.code) == ("video", code)
            assert refused.value.remedy and "\n" not in refused.value.what + refused.value.remedy
    for reference in (f"sha256:{UNKNOWN_DIGEST}", f"sha256:{UNKNOWN_DIGEST}/boat.mp4"):
        with pytest.raises(InvalidRequestError) as refused:
            find_video(reference, cache, 16, 33)
        assert refused.value.code == "source.copy_missing"
    assert not images_dir(cache).exists()


@pytest.mark.slow
def test_reading_is_cancelled_and_limited(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_color = ("-f", "lavfi", "-i", "color=size=640x480:rate=30:duration=90")  # which is encoded in a second
    long = make(tmp_path / "long.mkv", *H264, "-preset", "ultrafast", inputs=one_color)
    info, cancel = reader.read_info(long), Cancel()
    timer = threading.Timer(0.3, cancel.request)
    timer.start()
    started = time.monotonic()
    with pytest.raises(CancelledError):
        find_video(str(long), tmp_path, 120, 4001, check=cancel.check)
    assert time.monotonic() - started < 30
    timer.join()
    for limit, value, code in (("_MEMORY_BYTES", 1, "source.memory"), ("_WAIT_SECONDS", 0.0, "source.slow")):
        with monkeypatch.context() as patched:
            patched.setattr(reader, limit, value)
            with pytest.raises(InvalidRequestError) as refused:
                list(reader.read_video(info, 500))
        assert refused.value.code == code
    assert sum(map(len, reader.read_video(info, 7, rate=info.rate / 10, most=20))) == 20
