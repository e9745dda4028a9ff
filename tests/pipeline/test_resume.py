"""Interrupted jobs on tiny real models give the same video when resumed."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.tiny_models import IN_JOBS

Tiny = Callable[[str], ModelSpec]
STAGES = ("encode", "denoise", "decode", "mux")
# Videos of jobs that nothing interrupted, by model and plan.
_WHOLE: dict[tuple[Path, str], tuple[bytes, str]] = {}


def run(plan: ExecutionPlan, spec: ModelSpec, folder: Path | None, stop: Choice = never) -> list[Event]:
    """Run a job with checkpoints in `folder`; `stop` returns whether to pause at an event."""
    checkpoints = CheckpointFolder(folder) if folder else None
    with Residency() as residency:
        return events_of(plan, spec, residency, pause_at=stop, checkpoints=checkpoints)


def stream_of(video: Path) -> str:
    """Return the digest of a video's encoded stream."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(video), "-c", "copy", "-f", "md5", "-"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def whole(plan: ExecutionPlan, spec: ModelSpec) -> tuple[bytes, str]:
    """Return the frames, and the digest of the stream, of a job that nothing interrupts. Equal jobs run once."""
    key = spec.directory, plan.model_dump_json(exclude={"output"})
    if key not in _WHOLE:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "x.mp4"
            assert isinstance(run(plan.replace(output=out), spec, None)[-1], VideoSaved)
            _WHOLE[key] = frames_of(out), stream_of(out)
    return _WHOLE[key]


def at_step(number: int) -> Choice:
    """Choose the end of a step."""
    return lambda event: isinstance(event, StepDone) and event.step == number


def steps_of(events: list[Event]) -> list[int]:
    """Return the steps that a run took."""
    return [event.step for event in events if isinstance(event, StepDone)]


def check_pauses(plan: ExecutionPlan, spec: ModelSpec, folder: Path) -> None:
    """Pause a job of four steps after each of them and while it decodes, and compare its video."""
    for step in range(1, 5):
        events = run(plan, spec, folder, stop=at_step(step))
        assert events[-1] == Paused(step=step, of=4)
        assert CheckpointSaved(step=step) in events
        assert steps_of(events) == [step]
        assert step == 1 or Resumed(step=step - 1, of=4) in events
        assert not plan.output.exists()
    decoding = run(plan, spec, folder, stop=lambda event: isinstance(event, FramesDecoded))
    assert decoding[-1] == Paused(step=4, of=4)
    last = run(plan, spec, folder)
    for events in (decoding, last):
        assert Resumed(step=4, of=4) in events
        assert steps_of(events) == []
    assert isinstance(last[-1], VideoSaved)
    assert (frames_of(plan.output), stream_of(plan.output)) == whole(plan, spec)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", IN_JOBS)
def test_a_pause_after_any_step_gives_the_same_video(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(architecture)
    check_pauses(tiny_plan(spec, tmp_path / "x.mp4"), spec, tmp_path / "job")


@pytest.mark.slow
def test_a_pause_after_one_step_of_each_transformer_gives_the_same_video(tiny: Tiny, tmp_path: Path) -> None:
    """The second run takes several steps."""
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    for step in (1, 3):
        folder = tmp_path / f"job-{step}"
        assert run(plan, spec, folder, stop=at_step(step))[-1] == Paused(step=step, of=4)
        second = run(plan, spec, folder)
        assert Resumed(step=step, of=4) in second
        assert steps_of(second) == list(range(step + 1, 5))
        assert (frames_of(plan.output), stream_of(plan.output)) == whole(plan, spec)


@pytest.mark.slow
def test_a_pause_with_another_scheduler(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "model")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(tmp_path / "model" / "scheduler")
    spec = read_spec(tmp_path / "model", "euler")
    assert spec.scheduler == "FlowMatchEulerDiscreteScheduler"
    check_pauses(tiny_plan(spec, tmp_path / "x.mp4"), spec, tmp_path / "job")


@pytest.mark.parametrize("values", [{"solver_order": 0}, {"predict_x0": False}])
def test_an_unsuitable_scheduler_is_named(values: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "model")
    scheduler = "UniPCMultistepScheduler"
    config = {"_class_name": scheduler, "prediction_type": "flow_prediction", "use_flow_sigmas": True, **values}
    (tmp_path / "model" / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path / "model", "other")
    failed = run(tiny_plan(spec, tmp_path / "x.mp4"), spec, None)[-1]
    assert isinstance(failed, Failed) and not failed.internal
    assert (failed.fact.code, failed.fact.data["scheduler"]) == ("pipeline.scheduler_failed", scheduler)


@pytest.mark.slow
def test_a_pause_with_the_shipped_model(tmp_path: Path) -> None:
    spec = find("diorama", tmp_path)
    values = {"prompt": "a red boat sails left", "negative_prompt": "rain", "steps": 6}
    plan = tiny_plan(spec, tmp_path / "x.mp4", **values)
    for step in (3, 4):
        assert run(plan, spec, tmp_path / "job", stop=at_step(step))[-1] == Paused(step=step, of=6)
    assert Resumed(step=4, of=6) in run(plan, spec, tmp_path / "job")
    assert (frames_of(plan.output), stream_of(plan.output)) == whole(plan, spec)


def test_cancelling_within_a_step_loses_only_that_step(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    wanted = whole(plan, spec)
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
    assert (frames_of(plan.output), stream_of(plan.output)) == wanted


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
