"""Jobs that interpolate and upscale frames: both videos, events, metadata, less memory, a cancellation, a death."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from runtime.core.events import (
    Cancelled,
    Event,
    Failed,
    FramesDecoded,
    FramesFinished,
    OutOfMemory,
    Resumed,
    StageStarted,
    StepDone,
    VideoSaved,
)
from runtime.core.plan import ExecutionPlan, plain_output
from runtime.core.progress import Progress
from runtime.core.request import INTERPOLATOR, UPSCALER, GenerationRequest
from runtime.execution.residency import Residency
from runtime.families.dcae.batched import BatchedDecoder
from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.upscalers import find_upscaler
from runtime.models.images import with_images
from runtime.models.registry import find_interpolator
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.loop import Loop
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info
from tests.cli.test_upscale import luma
from tests.families.esrgan.networks import COMPACT_CONFIG, save_safetensors
from tests.image_files import taking_images
from tests.pipeline.killing import killed
from tests.pipeline.runs import Choice, events_of, never
from tests.pipeline.test_run import frames_of
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]
HEIGHT, WIDTH, FRAMES = 32, 64, 9
CLIP = {"width": WIDTH, "height": HEIGHT, "frames": FRAMES, "steps": 2}


class Clip(NamedTuple):
    """A tiny clip that is interpolated or upscaled."""

    spec: ModelSpec
    plan: ExecutionPlan

    @property
    def plain(self) -> Path:
        return plain_output(self.plan.output)

    def run(self, cancel_at: Choice = never, **options: Any) -> list[Event]:
        """Make it; `options` are those of `run_job`."""
        with Residency() as residency:
            return events_of(self.plan, self.spec, residency, cancel_at=cancel_at, **options)


Make = Callable[..., Clip]


@pytest.fixture
def make(tiny: Tiny, tmp_path: Path) -> Make:
    """Return what plans a clip that is saved without loss."""

    def made(**values: Any) -> Clip:
        network = find_interpolator() if values.pop("interpolates", False) else None
        spec = replace(tiny("wan2.1"), interpolates=network is not None, interpolator=network)
        if "upscale" in values:
            save_safetensors(tmp_path / "weights" / "small.safetensors", COMPACT_CONFIG)
            upscaler = find_upscaler(str(tmp_path / "weights" / "small.safetensors"), 2, tmp_path)
            spec = replace(spec, upscaler=upscaler)
        (tmp_path / "videos").mkdir()
        return Clip(spec, tiny_plan(spec, tmp_path / "videos" / "x.mp4", crf=0, **values))

    return made


@pytest.fixture
def clip(make: Make) -> Clip:
    """Return a clip that is enlarged twice."""
    return make(upscale=2)


def pixels(video: Path, scale: int = 1) -> np.ndarray:
    """Return the frames of a video, (n, height, width, 3)."""
    return np.frombuffer(frames_of(video), "uint8").reshape(-1, HEIGHT * scale, WIDTH * scale, 3)


def test_a_job_saves_both_videos(clip: Clip, tmp_path: Path) -> None:
    history = HistoryFile(tmp_path, machine())
    decoded: list[np.ndarray] = []
    events = clip.run(history=history, on_frames=decoded.append)
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    stages = [event.stage for event in events if isinstance(event, StageStarted)]
    assert [stage for i, stage in enumerate(stages) if stage not in stages[:i]][-3:] == ["decode", "upscale", "save"]
    counts = [(type(event), event.frames) for event in events if isinstance(event, FramesDecoded | FramesFinished)]
    assert [frames for kind, frames in counts if kind is FramesFinished] == list(range(1, FRAMES + 1))
    # Frames are enlarged while others are still to be decoded.
    assert counts.index((FramesFinished, 1)) < counts.index((FramesDecoded, FRAMES))
    progress, shares = Progress(), []
    for moment, event in enumerate(events):
        progress = progress.after(event, float(moment))
        shares.append(progress.fraction)
        if isinstance(event, FramesFinished):
            assert (progress.stage, progress.frames, progress.frame_count) == ("upscale", event.frames, FRAMES)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    plain = np.concatenate(decoded)
    assert clip.spec.upscaler is not None
    with torch.inference_mode():
        colors = torch.from_numpy(plain).permute(0, 3, 1, 2).float() / 255
        larger = load_upscaler(clip.spec.upscaler)(colors).clamp(0, 1).permute(0, 2, 3, 1).numpy() * 255
    for video, expected, scale in ((clip.plain, plain, 1), (clip.plan.output, larger, 2)):
        assert np.abs(luma(pixels(video, scale)) - luma(expected)).mean() < 2
    assert {path.name for path in clip.plan.output.parent.iterdir()} == {"x.mp4", "x.plain.mp4"}
    assert saved.size == (2 * WIDTH, 2 * HEIGHT)
    assert {"decode", "upscale"} < {*saved.timings}
    assert saved.plan["components"][UPSCALER]["backend"] == "pytorch"
    for video in (clip.plan.output, clip.plain):
        metadata = read_metadata(video)
        assert (metadata["request"]["upscale"], metadata["plan"]["upscaling"]["width"]) == ("2", 2 * WIDTH)
    assert [run.kind.component for run in history.read()].count(UPSCALER) == 1


@pytest.mark.parametrize(
    "values", [{"interpolate": 2}, {"interpolate": 4, "upscale": 2}, {"interpolate": 2, "interpolates": True}]
)
def test_an_interpolated_job_saves_both_videos(values: dict[str, Any], make: Make, tmp_path: Path) -> None:
    clip, history = make(**values), HistoryFile(tmp_path, machine())
    decoded: list[np.ndarray] = []
    factor, scale = values["interpolate"], values.get("upscale", 1)
    events = clip.run(history=history, on_frames=decoded.append)
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    stages = [event.stage for event in events if isinstance(event, StageStarted)]
    order = ["decode", "interpolate", *(["upscale"] if scale > 1 else []), "save"]
    assert list(dict.fromkeys(stages))[-len(order) :] == order
    progress, shares = Progress(), []
    for moment, event in enumerate(events):
        progress = progress.after(event, float(moment))
        shares.append(progress.fraction)
        if isinstance(event, FramesFinished):
            assert (progress.stage, progress.frames, progress.frame_count) == (order[-2], event.frames, FRAMES * factor)
    assert progress.frames == FRAMES * factor
    assert shares == sorted(shares)
    # Decoded frames are kept; the new ones are between them.
    frames, plain = pixels(clip.plan.output, scale), np.concatenate(decoded)
    assert len(frames) == FRAMES * factor
    assert np.abs(luma(pixels(clip.plain)) - luma(plain)).mean() < 2
    if scale == 1:
        assert np.abs(luma(frames[::factor]) - luma(plain)).mean() < 2
    videos = [read_info(video) for video in (clip.plan.output, clip.plain)]
    assert [info.rate for info in videos] == [8 * factor, 8]
    assert videos[0].seconds == videos[1].seconds
    assert (saved.frames, saved.fps, saved.size) == (FRAMES * factor, 8 * factor, (scale * WIDTH, scale * HEIGHT))
    assert saved.timings["interpolate"] > 0
    metadata = read_metadata(clip.plain)
    assert (metadata["request"]["interpolate"], metadata["request"]["frames"]) == (str(factor), FRAMES)
    by = "network" if clip.spec.interpolates else "minterpolate"
    made = {"factor": factor, "frames": FRAMES * factor, "fps": 8 * factor, "by": by}
    assert metadata["plan"]["interpolation"] == made
    (run,) = [run for run in history.read() if run.kind.component == INTERPOLATOR]
    assert run.seconds == saved.timings["interpolate"]


@pytest.mark.parametrize("values", [{"upscale": 2}, {"interpolate": 2}])
def test_a_cancelled_job_leaves_no_video(values: dict[str, Any], make: Make) -> None:
    clip = make(**values)
    events = clip.run(cancel_at=lambda event: isinstance(event, FramesFinished) and event.frames >= 3)
    assert events[-1] == Cancelled()
    assert max(event.frames for event in events if isinstance(event, FramesFinished)) <= 4
    assert not [child for child in psutil.Process().children() if "ffmpeg" in child.name()]
    assert not list(clip.plan.output.parent.iterdir())


@pytest.mark.parametrize("values", [{"upscale": 2}, {"interpolate": 4}])
def test_a_killed_job_makes_the_same_videos(values: dict[str, Any], make: Make, tmp_path: Path) -> None:
    clip = make(**values)
    clip.run()
    whole = [path.read_bytes() and frames_of(path) for path in (clip.plan.output, clip.plain)]
    for path in (clip.plan.output, clip.plain):
        path.unlink()
    assert killed(clip.spec, clip.plan, tmp_path / "job", event="FramesFinished", count=4) == -9
    assert not clip.plan.output.exists()
    events = clip.run(checkpoints=CheckpointFolder(tmp_path / "job"))
    assert Resumed(step=4, of=4) in events
    assert not any(isinstance(event, StepDone) for event in events)
    assert [frames_of(path) for path in (clip.plan.output, clip.plain)] == whole


def test_a_video_that_cannot_be_saved_leaves_no_plain_one(clip: Clip) -> None:
    def block(event: Event) -> bool:
        if isinstance(event, StageStarted) and event.stage == "save":
            clip.plan.output.mkdir()
        return False

    assert isinstance(clip.run(cancel_at=block)[-1], Failed)
    assert not clip.plain.exists()


@pytest.mark.parametrize("lasting", [False, True])
def test_too_little_memory(lasting: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = make(interpolate=2, upscale=2)
    real, calls = BatchedDecoder.__call__, 0

    def call(decoder: BatchedDecoder, latents: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if lasting or calls == 2:
            raise torch.OutOfMemoryError("full")
        return real(decoder, latents)

    monkeypatch.setattr(BatchedDecoder, "__call__", call)
    events = clip.run()
    retries = [event for event in events if isinstance(event, OutOfMemory)]
    assert {(event.stage, event.component) for event in retries} == {("upscale", UPSCALER)}
    assert isinstance(events[-1], VideoSaved) != lasting
    assert [event.retried for event in retries][-1] != lasting
    if not lasting:
        assert read_info(clip.plan.output).frames == 2 * FRAMES


def test_a_loop_is_played_backwards(make: Make) -> None:
    clip, count = make(loop="on", interpolate=2), 2 * FRAMES - 2
    decoded: list[np.ndarray] = []
    saved = clip.run(on_frames=decoded.append)[-1]
    assert isinstance(saved, VideoSaved)
    frames = np.concatenate(decoded)
    assert (len(frames), saved.frames, len(pixels(clip.plan.output))) == (count, 2 * count, 2 * count)
    for number in range(1, FRAMES):
        assert (frames[-number] == frames[number]).all()
    assert len(pixels(clip.plain)) == count
    assert (frames[0] != frames[FRAMES - 1]).any()


def test_a_loop_from_an_image_ends_on_it(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "square.png"
    Image.fromarray(np.arange(HEIGHT * WIDTH * 3, dtype="uint32").reshape(HEIGHT, WIDTH, 3).astype("uint8")).save(file)
    base = taking_images(tiny("wan2.1"), last="optional")
    request = GenerationRequest.from_mapping({"prompt": "x", "image": str(file), "loop": "on", **CLIP})
    spec = with_images(base, request, tmp_path, tmp_path)
    plan = resolve(request, spec, PlanningContext(machine(), tmp_path / "x.mp4"))
    assert plan.last_image == plan.image and plan.image is not None
    assert (plan.looping, plan.video_frames) == ("same frame", FRAMES - 1)
    again = GenerationRequest.from_mapping(plan.request_json())
    assert (again.loop, again.last_image) == ("on", plan.image.reference)
    frames = np.arange(FRAMES * 12, dtype="uint8").reshape(FRAMES, 2, 2, 3)
    with Loop(plan.output, plays_back=False) as loop:
        shown = np.concatenate([loop.add(frames[:1]), loop.add(frames[1:4]), loop.add(frames[4:])])
        assert (shown == frames[:-1]).all() and not [*loop.back()]
    with Loop(plan.output, plays_back=True) as loop:
        assert len(loop.add(frames[:1])) == 1 and not [*loop.back()]
