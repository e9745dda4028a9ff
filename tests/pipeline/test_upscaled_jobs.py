"""Jobs that upscale their frames: both videos, events, metadata, less memory, a cancellation and a death."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from runtime.core.events import (
    Cancelled,
    Event,
    Failed,
    FramesDecoded,
    FramesUpscaled,
    OutOfMemory,
    Resumed,
    StageStarted,
    StepDone,
    VideoSaved,
)
from runtime.core.plan import ExecutionPlan, plain_output
from runtime.core.progress import Progress
from runtime.core.request import UPSCALER
from runtime.execution.residency import Residency
from runtime.families.dcae.batched import BatchedDecoder
from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.upscalers import find_upscaler
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.history_file import HistoryFile
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info
from tests.cli.test_upscale import luma
from tests.families.esrgan.networks import COMPACT_CONFIG, save_safetensors
from tests.pipeline.killing import killed
from tests.pipeline.runs import Choice, events_of, never
from tests.pipeline.test_run import frames_of
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]
HEIGHT, WIDTH, FRAMES = 32, 64, 9


class Clip(NamedTuple):
    """A tiny clip that is upscaled twice."""

    spec: ModelSpec
    plan: ExecutionPlan

    @property
    def plain(self) -> Path:
        return plain_output(self.plan.output)

    def run(self, cancel_at: Choice = never, **options: Any) -> list[Event]:
        """Make it; `options` are those of `run_job`."""
        with Residency() as residency:
            return events_of(self.plan, self.spec, residency, cancel_at=cancel_at, **options)


@pytest.fixture
def clip(tiny: Tiny, tmp_path: Path) -> Clip:
    """Return the clip, saved without loss."""
    save_safetensors(tmp_path / "weights" / "small.safetensors", COMPACT_CONFIG)
    (tmp_path / "videos").mkdir()
    upscaler = find_upscaler(str(tmp_path / "weights" / "small.safetensors"), 2, tmp_path)
    spec = replace(tiny("wan2.1"), upscaler=upscaler)
    return Clip(spec, tiny_plan(spec, tmp_path / "videos" / "x.mp4", upscale=2, crf=0))


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
    counts = [(type(event), event.frames) for event in events if isinstance(event, FramesDecoded | FramesUpscaled)]
    assert [frames for kind, frames in counts if kind is FramesUpscaled] == list(range(1, FRAMES + 1))
    # Frames are enlarged while others are still to be decoded.
    assert counts.index((FramesUpscaled, 1)) < counts.index((FramesDecoded, FRAMES))
    progress, shares = Progress(), []
    for moment, event in enumerate(events):
        progress = progress.after(event, float(moment))
        shares.append(progress.fraction)
        if isinstance(event, FramesUpscaled):
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


def test_a_cancelled_job_leaves_no_video(clip: Clip) -> None:
    events = clip.run(cancel_at=lambda event: isinstance(event, FramesUpscaled) and event.frames == 3)
    assert events[-1] == Cancelled()
    assert max(event.frames for event in events if isinstance(event, FramesUpscaled)) <= 4
    assert not list(clip.plan.output.parent.iterdir())


def test_a_killed_job_makes_the_same_videos(clip: Clip, tmp_path: Path) -> None:
    clip.run()
    whole = [path.read_bytes() and frames_of(path) for path in (clip.plan.output, clip.plain)]
    for path in (clip.plan.output, clip.plain):
        path.unlink()
    assert killed(clip.spec, clip.plan, tmp_path / "job", event="FramesUpscaled", count=4) == -9
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
def test_too_little_memory(lasting: bool, clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert read_info(clip.plan.output).frames == FRAMES
