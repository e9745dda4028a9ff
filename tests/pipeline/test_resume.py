"""Interrupted jobs on tiny real models give the same video when resumed."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from runtime.core.cancel import Cancel
from runtime.core.events import (
    Cancelled,
    CheckpointSaved,
    Event,
    Failed,
    FramesDecoded,
    Paused,
    Resumed,
    StageStarted,
    StepDone,
    VideoSaved,
)
from runtime.core.plan import ExecutionPlan
from runtime.execution.components import PROMPTED
from runtime.execution.residency import Residency
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.catalogue import find
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.run import run_job
from runtime.video.mp4 import read_metadata
from tests.pipeline.runs import Choice, events_of, never
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan, with_strategy
from tests.tiny_models import ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
STAGES = ("encode", "denoise", "decode", "mux")


def run(plan: ExecutionPlan, spec: ModelSpec, folder: Path | None, stop: Choice = never) -> list[Event]:
    """Run a job with checkpoints in `folder`; `stop` returns whether to pause at an event."""
    checkpoints = CheckpointFolder(folder) if folder else None
    with Residency() as residency:
        return events_of(plan, spec, residency, pause_at=stop, checkpoints=checkpoints)


def stream_of(video: Path) -> str:
    """Return the digest of a video's encoded stream."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(video), "-c", "copy", "-f", "md5", "-"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def steps_of(events: list[Event]) -> list[int]:
    """Return the steps that a run took."""
    return [event.step for event in events if isinstance(event, StepDone)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pause_after_any_step_gives_the_same_video(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(architecture)
    out = tmp_path / "x.mp4"
    plan = tiny_plan(spec, out)
    run(plan, spec, None)
    wanted = frames_of(out), stream_of(out)
    for step in range(1, 5):
        out.unlink()
        folder = tmp_path / f"job-{step}"
        first = run(plan, spec, folder, stop=lambda e, step=step: isinstance(e, StepDone) and e.step == step)  # type: ignore[misc]  # bound now
        assert first[-1] == Paused(step=step, of=4)
        assert CheckpointSaved(step=step) in first
        assert not out.exists()
        second = run(plan, spec, folder)
        assert Resumed(step=step, of=4) in second
        assert steps_of(second) == list(range(step + 1, 5))
        assert isinstance(second[-1], VideoSaved)
        assert (frames_of(out), stream_of(out)) == wanted
    out.unlink()
    first = run(plan, spec, tmp_path / "decode", stop=lambda event: isinstance(event, FramesDecoded))
    assert first[-1] == Paused(step=4, of=4)
    second = run(plan, spec, tmp_path / "decode")
    assert steps_of(second) == []
    assert (frames_of(out), stream_of(out)) == wanted


def test_a_pause_with_another_scheduler(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "model")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(tmp_path / "model" / "scheduler")
    spec = read_spec(tmp_path / "model", "euler")
    assert spec.scheduler == "FlowMatchEulerDiscreteScheduler"
    out = tmp_path / "x.mp4"
    plan = tiny_plan(spec, out)
    run(plan, spec, None)
    wanted = stream_of(out)
    for step in range(1, 5):
        out.unlink()
        run(plan, spec, tmp_path / str(step), stop=lambda e, step=step: isinstance(e, StepDone) and e.step == step)  # type: ignore[misc]  # bound now
        assert steps_of(run(plan, spec, tmp_path / str(step))) == list(range(step + 1, 5))
        assert stream_of(out) == wanted


@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "UniPCMultistepScheduler"])
def test_an_unsuitable_scheduler_is_named(scheduler: str, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "model")
    config = {"_class_name": scheduler, "prediction_type": "none of these", "use_flow_sigmas": True}
    (tmp_path / "model" / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path / "model", "other")
    failed = run(tiny_plan(spec, tmp_path / "x.mp4"), spec, None)[-1]
    assert isinstance(failed, Failed) and not failed.internal
    assert (failed.fact.code, failed.fact.data["scheduler"]) == ("pipeline.scheduler_failed", scheduler)
    assert "scheduler folder" in failed.remedy


@pytest.mark.parametrize("stop_at", [3, 4])
def test_a_pause_with_the_shipped_model(stop_at: int, tmp_path: Path) -> None:
    spec = find("diorama", tmp_path)
    out = tmp_path / "x.mp4"
    values = {"prompt": "a red boat sails left", "negative_prompt": "rain", "width": 96, "height": 64, "steps": 6}
    plan = tiny_plan(spec, out, **values)
    run(plan, spec, None)
    wanted = frames_of(out), stream_of(out)
    out.unlink()
    run(plan, spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone) and event.step == stop_at)
    assert Resumed(step=stop_at, of=6) in run(plan, spec, tmp_path / "job")
    assert (frames_of(out), stream_of(out)) == wanted


def test_cancelling_within_a_step_loses_only_that_step(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    run(plan, spec, None)
    wanted = stream_of(tmp_path / "x.mp4")
    (tmp_path / "x.mp4").unlink()
    events: list[Event] = []
    cancel = Cancel()
    calls = 0

    class CancellingDenoiser(PyTorchDenoiser):
        def __call__(
            self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
        ) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:  # the second step's first of two
                cancel.request()
            return super().__call__(latents, timestep, text_embeds, which)

    with pytest.MonkeyPatch.context() as patched, Residency() as residency:
        patched.setattr("runtime.families.wan.transformer.PyTorchDenoiser", CancellingDenoiser)
        run_job(plan, spec, events.append, cancel, residency, checkpoints=CheckpointFolder(tmp_path / "job"))
    assert events[-1] == Cancelled()
    assert calls == 3
    assert events[-2] == CheckpointSaved(step=1)
    second = run(plan, spec, tmp_path / "job")
    assert steps_of(second) == [2, 3, 4]
    assert stream_of(tmp_path / "x.mp4") == wanted


def test_a_prompt_is_encoded_once_and_its_warnings_stay(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4", prompt="a red zeppelin")
    first = run(plan, spec, tmp_path / "job", stop=lambda e: isinstance(e, StageStarted) and e.stage == "encode")
    assert first[-1] == Paused(step=0, of=4)
    second = run(plan, spec, tmp_path / "job")
    assert Resumed(step=0, of=4) in second
    assert not any(isinstance(event, StageStarted) and event.part == "text_encoder" for event in second)
    saved = second[-1]
    assert isinstance(saved, VideoSaved)
    assert any(warning.data.get("words") == ["zeppelin"] for warning in saved.warnings)
    assert len(set(saved.warnings)) == len(saved.warnings)


def test_timings_include_earlier_runs(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    whole = run(plan, spec, None)[-1]
    assert isinstance(whole, VideoSaved)
    assert whole.earlier == {}
    run(plan, spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone) and event.step == 2)
    saved = run(plan, spec, tmp_path / "job")[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.earlier["step"] == 2
    before = saved.earlier["timings"]
    assert before["encode"] > 0.0 and before["denoise"] > 0.0 and before["decode"] == 0.0
    assert saved.timings["encode"] == before["encode"]
    assert saved.timings["denoise"] > before["denoise"]
    assert saved.timings["total"] == pytest.approx(sum(saved.timings[stage] for stage in STAGES), abs=0.01)
    assert saved.load_seconds > saved.earlier["load_seconds"]
    facts = read_metadata(tmp_path / "x.mp4")
    assert facts["earlier"] == saved.earlier


def test_a_resumed_job_uses_the_new_preferences(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    run(plan, spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone) and event.step == 2)
    saved = run(with_strategy(plan, keep_loaded=False).replace(fps=12), spec, tmp_path / "job")[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.plan["keep_loaded"] is False
    assert saved.request["fps"] == 12
    assert saved.earlier["step"] == 2
