"""`upscale`: any video to a larger MP4 with its sound; tiles; bad videos and arguments; Ctrl-C; metadata."""

import json
import subprocess
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.cli.main import run
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.events import Event, FramesDecoded, Warned
from runtime.core.request import AUTO
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.families.dcae.batched import BatchedDecoder
from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.upscalers import find_upscaler
from runtime.machine.probe import probe
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.upscale import FrameUpscaler, upscale_file
from runtime.pipeline.upscale_plan import UpscalePlan, UpscaleRequest
from runtime.video.mp4 import VideoWriter, find_ffmpeg, read_metadata
from runtime.video.reader import VideoInfo, read_info, read_video
from tests.cli.refusals import check_refusals, refused
from tests.families.esrgan.networks import COMPACT_CONFIG, RRDB_CONFIG, picture, save_safetensors

pytestmark = pytest.mark.usefixtures("cache_dir")
HEIGHT, WIDTH, FRAMES = 14, 20, 5


def frames(height: int = HEIGHT, width: int = WIDTH, count: int = FRAMES) -> np.ndarray:
    """Return frames of a moving picture, (n, height, width, 3) uint8."""
    still = (picture(height, width + count) * 255).round().astype("uint8").transpose(1, 2, 0)
    return np.stack([still[:, index : index + width] for index in range(count)])


def save(path: Path, clip: np.ndarray, metadata: dict[str, Any] | None = None) -> Path:
    """Store frames without loss, at 12 frames a second."""
    with VideoWriter(path, clip.shape[2], clip.shape[1], 12, 0) as writer:
        writer.write(clip)
        writer.close_stream()
        writer.finish("a boat", metadata or {})
    return path


def read(path: Path) -> np.ndarray:
    """Return the frames of a video."""
    return np.concatenate(list(read_video(read_info(path), 4)))


@pytest.fixture
def upscaler(tmp_path: Path) -> str:
    """Return the file of a small upscaler for a factor of 4."""
    save_safetensors(tmp_path / "small.safetensors", COMPACT_CONFIG)
    return str(tmp_path / "small.safetensors")


def enlarged(upscaler: str, scale: int, clip: np.ndarray) -> np.ndarray:
    """Return frames as the network alone enlarges them."""
    module = load_upscaler(find_upscaler(upscaler, scale, Path("none")))
    with torch.inference_mode():
        larger = module(torch.from_numpy(clip).permute(0, 3, 1, 2).float() / 255)
    result: np.ndarray = (larger.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return result


def luma(clip: np.ndarray) -> np.ndarray:
    """Return the brightness of frames, which the file has for each pixel; colors are shared by four."""
    values: np.ndarray = clip @ np.array([0.2126, 0.7152, 0.0722])
    return values


def test_a_video_is_enlarged_with_its_sound_and_its_settings(
    upscaler: str, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = save(tmp_path / "silent.mp4", frames(15, 21)[:, :14, :20], {"tandem": {"request": {"prompt": "a boat"}}})
    source, out = tmp_path / "clip.mp4", tmp_path / "large.mp4"
    tone = ("-f", "lavfi", "-i", "sine=duration=0.4", "-map_metadata", "0", "-metadata", "artist=me", "-c:v", "copy")
    subprocess.run([find_ffmpeg(), "-v", "error", "-i", str(silent), *tone, str(source)], check=True)
    arguments = ["upscale", str(source), "--upscaler", upscaler, "--scale", "3", "--crf", "0"]
    assert run([*arguments, "--out", str(out), "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (done["video"], done["frames"], done["fps"], done["scale"]) == (str(out), FRAMES, 12, 3)
    assert (done["width"], done["height"], done["backend"], done["fallbacks"]) == (60, 42, "pytorch", [])
    expected = enlarged(upscaler, 3, read(source))
    assert np.abs(luma(read(out)) - luma(expected)).mean() < 2
    metadata = read_metadata(out)
    assert metadata["request"] == {"prompt": "a boat"}
    assert (metadata["upscale"]["source"], metadata["upscale"]["upscaler"]) == ("clip.mp4", "small 3x")
    info = read_info(out)
    assert info.sound == ("aac",)
    command = [find_ffmpeg(), "-v", "error", "-i", str(out), "-f", "ffmetadata", "-"]
    tags = subprocess.run(command, capture_output=True, check=True)
    assert b"title=a boat" in tags.stdout
    assert b"artist=me" in tags.stdout
    # In the outputs folder, and with a forecast from the first run.
    assert len(HistoryFile(cache_dir, probe()).read()) == 1
    assert run(arguments) == 0
    assert [path.name for path in (cache_dir / "outputs").glob("*.mp4")]


def test_an_odd_size_loses_a_row_and_a_column(upscaler: str, tmp_path: Path) -> None:
    command = [find_ffmpeg(), "-v", "error", "-f", "lavfi", "-i", "testsrc=size=21x15:rate=30000/1001:duration=0.1"]
    subprocess.run([*command, "-c:v", "ffv1", str(tmp_path / "odd.mkv")], check=True)
    out = tmp_path / "large.mp4"
    arguments = ["--upscaler", upscaler, "--scale", "3", "--crf", "0", "--out", str(out)]
    assert run(["upscale", str(tmp_path / "odd.mkv"), *arguments]) == 0
    expected = enlarged(upscaler, 3, read(tmp_path / "odd.mkv"))[:, :44, :62]
    assert np.abs(luma(read(out)) - luma(expected)).mean() < 2
    assert str(read_info(out).rate) == "30000/1001"


def request(upscaler: str, source: VideoInfo, out: Path, scale: int = 2) -> UpscaleRequest:
    """Return a request."""
    return UpscaleRequest(source=source, spec=find_upscaler(upscaler, scale, Path("none")), output=out)


@pytest.mark.parametrize("short", [True, False])
def test_tiles_make_the_same_frames_where_memory_is_short(
    short: bool, upscaler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = frames(30, 230, 2)
    expected = enlarged(upscaler, 2, clip)
    engines = EngineService.from_settings(Settings(cache_dir=tmp_path), probe())
    machine = replace(engines.machine, ram_free_bytes=1) if short else engines.machine
    source = VideoInfo(tmp_path / "x", 230, 30, Fraction(12), 1.0, (), "")
    plan = UpscalePlan.of(request(upscaler, source, tmp_path / "x.mp4"), machine)
    assert plan.calls.tile == (192 if short else None)
    real, sizes = BatchedDecoder.__call__, []

    def call(decoder: BatchedDecoder, latents: torch.Tensor) -> torch.Tensor:
        sizes.append(tuple(latents.shape[1:]))
        if latents.shape[-1] > 192:
            raise torch.OutOfMemoryError("full")
        return real(decoder, latents)

    monkeypatch.setattr(BatchedDecoder, "__call__", call)
    events: list[Event] = []
    with FrameUpscaler(plan.calls, AUTO, Settings(cache_dir=tmp_path), engines, events.append, Cancel()) as larger:
        result = torch.cat([larger(torch.from_numpy(frame[None])) for frame in clip]).numpy()
        assert [fact.code for fact in larger.outcome["fallbacks"]] == ["upscale.tiles"]
    assert set(sizes[not short :]) == {(1, 3, 30, 192)}
    assert sum(isinstance(event, Warned) for event in events) == 1
    assert np.abs(result.astype(int) - expected).max() <= 1


def test_an_rrdbnet_needs_larger_tiles(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "rrdb.safetensors", RRDB_CONFIG)
    source = VideoInfo(tmp_path / "x", 1000, 600, Fraction(12), None, (), "")
    plan = UpscalePlan.of(request(str(tmp_path / "rrdb.safetensors"), source, tmp_path / "x.mp4"), probe())
    sides = []
    smaller = replace(plan.calls, tile=None, batch=1).smaller()
    while smaller is not None:
        sides.append(smaller.tile)
        smaller = smaller.smaller()
    assert sides == [512, 384, 256]
    assert plan.seconds(probe(), ()) is None  # its length is not known


def test_bad_videos_and_arguments_are_refused(
    upscaler: str,
    tmp_path: Path,
    cache_dir: Path,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    """The rules of files are tested in `tests.video.test_reader` and `tests.families.esrgan`."""
    source = save(tmp_path / "x.mp4", frames())
    large = save(tmp_path / "large.mp4", np.zeros((1, 16, 2060, 3), np.uint8))
    (tmp_path / "empty.mp4").touch()
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        ([str(tmp_path / "empty.mp4")], "source.empty", {"field": "file"}),
        ([""], "source.path_unreadable", {"field": "file"}),
        ([str(source), "--scale", "5"], "request.out_of_range", {"field": "scale", "nearest": 4}),
        ([str(source), "--crf", "99"], "request.out_of_range", {"field": "crf", "nearest": 51}),
        ([str(source), "--backend", "fast"], "request.not_a_choice", {"field": "backend"}),
        ([str(source), "--upscaler", "no-such"], "upscaler.unknown", {"name": "'no-such'"}),
        ([str(source), "--upscaler", str(source)], "model.file_no_format", {"file": "x.mp4"}),
        ([str(source), "--out", "video.avi"], "video.not_mp4", {}),
        ([str(source), "--out", str(source)], "source.same_file", {"file": "x.mp4"}),
        ([str(large)], "upscale.too_large", {"width": 2060, "most": 8192}),
    ]
    save_safetensors(cache_dir / "weights" / "upscalers" / "other.safetensors", COMPACT_CONFIG)
    check_refusals(cases, capsys, subtests, ["upscale", "--upscaler", upscaler, "--out", str(tmp_path / "y.mp4")])
    assert refused(["generate", "a boat", "--model", upscaler], capsys).code == "model.file_is_part"
    assert not (tmp_path / "y.mp4").exists()


def test_cancelling_leaves_nothing(upscaler: str, tmp_path: Path) -> None:
    source = read_info(save(tmp_path / "x.mp4", frames(count=60)))
    cancel, events, out = Cancel(), [], tmp_path / "y.mp4"

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, FramesDecoded):
            cancel.request()

    settings = Settings(cache_dir=tmp_path)
    engines = EngineService.from_settings(settings, probe())
    with pytest.raises(CancelledError):
        upscale_file(UpscalePlan.of(request(upscaler, source, out), engines.machine), settings, engines, emit, cancel)
    assert sum(isinstance(event, FramesDecoded) for event in events) < 12
    assert not out.exists()
    assert not list(tmp_path.glob(".tandem*"))
