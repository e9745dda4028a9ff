"""Jobs with a shift on tiny models: steps per transformer, resuming, and plans stored before the field existed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from runtime.core.errors import InvalidRequestError
from runtime.core.events import Resumed, StepDone, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.checkpoint import CheckpointFolder, identity
from runtime.pipeline.files import stamps
from runtime.pipeline.rerun_low_noise import plan_rerun, prepare_rerun
from runtime.video.mp4 import read_metadata
from tests.pipeline.test_resume import run, steps_of, stream_of, whole
from tests.pipeline.test_run import frames_of
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]
# Of a plan from before there was a shift: what a checkpoint of its clip was called then.
STAMPS = {"transformer": [["a.safetensors", 1, 2]], "transformer_2": [["b.safetensors", 1, 2]]}
WHOLE = "57352a1ee004e4597832bdb5f4417f0075203b209a1f8d81bff7bb08e1f8d229"
HALF = "ff9b163fb0321b7fbc3a9230dd7441d1a5159db468a44d6e29b9c66ca7477786"


def _with_euler(spec: ModelSpec, folder: Path) -> ModelSpec:
    shutil.copytree(spec.directory, folder)
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    return read_spec(folder, "euler")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "shifts"), [("unipc", (None, 3.0, 5.0, 12.0, 100.0)), ("euler", (None, 3.0, 12.0))]
)
def test_each_transformer_runs_the_planned_steps(
    scheduler: str, shifts: tuple[float | None, ...], tiny: Tiny, tmp_path: Path
) -> None:
    spec = tiny("wan2.2-a14b")
    if scheduler == "euler":
        spec = _with_euler(spec, tmp_path / "model")
    made: dict[float | None, bytes] = {}
    shares = set()
    for shift in shifts:
        out = tmp_path / f"{shift}.mp4"
        plan = tiny_plan(spec, out, steps=6, frames=5, shift=shift)
        events = run(plan, spec, None)
        saved = events[-1]
        assert isinstance(saved, VideoSaved), saved
        parts = [event.part for event in events if isinstance(event, StepDone)]
        assert {name: parts.count(name) for name in ("transformer", "transformer_2")} == plan.expert_steps
        shares.add(tuple(plan.expert_steps.values()))
        facts = read_metadata(out)
        assert facts["request"]["shift"] == facts["plan"]["shift"] == (None if shift == 3.0 else shift)
        assert GenerationRequest.from_mapping(facts["request"]).shift == plan.shift
        made[shift] = frames_of(out)
    # The folder's shift, given explicitly, makes the same video; another shift makes another one.
    assert made[3.0] == made[None]
    assert len(set(made.values())) == len(shifts) - 1 and len(shares) > len(shifts) // 2


def test_only_the_shift_of_the_scheduler_changes(tiny: Tiny, tmp_path: Path) -> None:
    for spec, name in ((tiny("wan2.2-a14b"), "flow_shift"), (_with_euler(tiny("wan2.1"), tmp_path / "m"), "shift")):
        own, moved = load_scheduler(spec), load_scheduler(spec, 7.5)
        assert own.config[name] == 3.0 and dict(moved.config) == {**own.config, name: 7.5}


def test_a_job_resumes_with_its_own_shift_only(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    out = tmp_path / "x.mp4"
    plan = tiny_plan(spec, out, shift=12.0)
    run(plan, spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone) and event.step == 2)
    again = run(plan, spec, tmp_path / "job")
    assert Resumed(step=2, of=4) in again and steps_of(again) == [3, 4]
    assert (frames_of(out), stream_of(out)) == whole(plan, spec)
    files = stamps(spec)
    others = [plan, *(tiny_plan(spec, out, shift=shift) for shift in (None, 5.0))]
    for half in (False, True):
        assert len({identity(files, one, half=half) for one in others}) == 3


def test_a_rerun_keeps_the_shift_of_the_high_noise_steps(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    made = tiny_plan(spec, tmp_path / "x.mp4", shift=12.0)
    run(made, spec, tmp_path / "job")
    source, target = tmp_path / "job", tmp_path / "redone"

    def redo(plan: ExecutionPlan, **changes: object) -> ExecutionPlan:
        again = plan_rerun(plan, changes, spec, source, target, machine(), tmp_path / "new.mp4")
        prepare_rerun(CheckpointFolder(target), again, spec)
        return again

    with pytest.raises(InvalidRequestError) as refused:
        redo(made, shift=5.0)
    assert (refused.value.field, refused.value.code) == ("shift", "rerun.schedule_fixed")
    plan = redo(made, guidance_scale_2=3.0)
    assert plan.shift == 12.0
    assert steps_of(run(plan, spec, tmp_path / "redone")) == [4]
    assert stream_of(tmp_path / "new.mp4") == stream_of(tmp_path / "x.mp4")
    with pytest.raises(InvalidRequestError) as refused:
        redo(tiny_plan(spec, tmp_path / "x.mp4", shift=100.0))
    assert (refused.value.code, refused.value.data) == ("rerun.no_low_noise_steps", {"field": "model", "steps": 4})


def test_plans_stored_before_the_shift_are_read(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    for one in (plan, tiny_plan(spec, tmp_path / "x.mp4", shift=3.0)):
        assert (identity(STAMPS, one, half=False), identity(STAMPS, one, half=True)) == (WHOLE, HALF)
    asked = GenerationRequest(prompt="a boat").to_json()
    del asked["shift"]
    assert GenerationRequest.from_mapping(asked).shift is None
