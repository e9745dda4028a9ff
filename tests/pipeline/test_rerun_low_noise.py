"""Reruns of the low-noise steps: only the low-noise transformer and the decoder run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import CheckpointError, InvalidRequestError
from runtime.core.events import Resumed, StageStarted, StepDone, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.rerun_low_noise import plan_rerun, prepare_rerun
from tests.pipeline.test_resume import run, steps_of, stream_of, whole
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]
SCALES = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}


def redo(made: ExecutionPlan, spec: ModelSpec, folder: Path, output: Path, **changes: Any) -> ExecutionPlan:
    """Plan a rerun of the low-noise steps of folder/job in folder/redone, and prepare it as the worker does."""
    target = folder / "redone"
    plan = plan_rerun(made, changes, spec, folder / "job", target, machine(), output)
    prepare_rerun(CheckpointFolder(target), plan, spec)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(("high", "low", "changed"), [(4.0, 3.0, [5.0, 1.0, 3.0]), (1.0, 1.0, [3.0])])
def test_a_rerun_equals_a_full_run_with_its_settings(
    high: float, low: float, changed: list[float], tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    spec = tiny("wan2.2-a14b")
    made = tiny_plan(spec, tmp_path / "x.mp4", guidance_scale=high, guidance_scale_2=low)
    run(made, spec, tmp_path / "job")
    for new in changed:
        with subtests.test(new=new):
            check_rerun(made, new, spec, tmp_path)
            shutil.rmtree(tmp_path / "redone")


def check_rerun(made: ExecutionPlan, new: float, spec: ModelSpec, tmp_path: Path) -> None:
    """Run the low-noise steps of a job again, and compare the video with that of a full run."""
    assert made.guidance_scale_2 is not None
    high, low = made.guidance_scale, made.guidance_scale_2
    first = stream_of(tmp_path / "x.mp4")
    wanted = tiny_plan(spec, tmp_path / "wanted.mp4", guidance_scale=high, guidance_scale_2=new)
    plan = redo(made, spec, tmp_path, tmp_path / "new.mp4", guidance_scale_2=new)
    assert (plan.seed, plan.guidance_scale, plan.guidance_scale_2) == (3, high, new)
    events = run(plan, spec, tmp_path / "redone")
    assert Resumed(step=2, of=4) in events
    assert steps_of(events) == [3, 4]
    loaded = {event.part for event in events if isinstance(event, StageStarted) and event.stage == "load"}
    # The negative prompt is encoded if the high-noise steps did not need it.
    assert loaded == {"transformer_2", "vae"} | ({"text_encoder"} if high <= 1 < new else set())
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.request["guidance_scale_2"] == new
    assert saved.earlier["step"] == 2
    assert stream_of(tmp_path / "new.mp4") == whole(wanted, spec)[1]
    assert (stream_of(tmp_path / "new.mp4") == first) == (new == low)
    assert stream_of(tmp_path / "x.mp4") == first


def test_a_rerun_can_be_interrupted_and_rerun(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    made = tiny_plan(spec, tmp_path / "x.mp4", **SCALES)
    # The source job was interrupted in its low-noise steps.
    run(made, spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone) and event.step == 3)
    plan = redo(made, spec, tmp_path, tmp_path / "new.mp4", guidance_scale_2=1.0)
    run(plan, spec, tmp_path / "redone", stop=lambda event: isinstance(event, StepDone) and event.step == 3)
    assert Resumed(step=3, of=4) in run(plan, spec, tmp_path / "redone")
    source, target = tmp_path / "redone", tmp_path / "again"
    again = plan_rerun(plan, {"guidance_scale_2": 2.0}, spec, source, target, machine(), tmp_path / "again.mp4")
    prepare_rerun(CheckpointFolder(target), again, spec)
    assert steps_of(run(again, spec, tmp_path / "again")) == [3, 4]


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"steps": 9}, "steps", "rerun.schedule_fixed"),
        ({"seed": 9}, "seed", "rerun.not_changeable"),
        ({"prompt": "a ball"}, "prompt", "rerun.not_changeable"),
        ({"guidance_scale": 2.0}, "guidance_scale", "rerun.not_changeable"),
        ({"guidance_scale_2": 999.0}, "guidance_scale_2", ""),
        ({"backends": "fast"}, "backends", ""),
    ],
)
def test_fields_of_the_high_noise_steps_are_refused(
    changes: dict[str, Any], field: str, code: str, tiny: Tiny, tmp_path: Path
) -> None:
    spec = tiny("wan2.2-a14b")
    with pytest.raises(InvalidRequestError) as caught:
        redo(tiny_plan(spec, tmp_path / "x.mp4", **SCALES), spec, tmp_path, tmp_path / "new.mp4", **changes)
    assert caught.value.field == field
    assert code in {"", caught.value.code}
    assert not (tmp_path / "redone").exists()


def test_a_model_with_one_transformer_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    with pytest.raises(InvalidRequestError) as caught:
        redo(tiny_plan(spec, tmp_path / "x.mp4"), spec, tmp_path, tmp_path / "new.mp4")
    assert caught.value.code == "rerun.one_transformer"


def test_a_missing_or_damaged_boundary_checkpoint_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    made = tiny_plan(spec, tmp_path / "x.mp4", **SCALES)
    run(made, spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone))
    with pytest.raises(CheckpointError) as missing:
        redo(made, spec, tmp_path, tmp_path / "new.mp4", guidance_scale_2=1.0)
    assert missing.value.code == "checkpoint.boundary_missing"
    (tmp_path / "job" / "boundary.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError) as damaged:
        redo(made, spec, tmp_path, tmp_path / "new.mp4", guidance_scale_2=1.0)
    assert damaged.value.fact == Fact("checkpoint.boundary_unusable", {"cause": Fact("checkpoint.damaged")})
