"""Jobs with a shift on tiny models: steps per transformer, resuming, and plans stored before the field existed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from runtime.core.events import Resumed, StepDone, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.checkpoint import identity
from runtime.pipeline.files import stamps
from runtime.video.mp4 import read_metadata
from tests.pipeline.test_resume import run, steps_of, stream_of, whole
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]
STAMPS = {"transformer": [["a.safetensors", 1, 2]], "transformer_2": [["b.safetensors", 1, 2]]}


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
    assert len({identity(files, one) for one in others}) == 3


def test_plans_stored_before_the_shift_are_read(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    assert identity(STAMPS, plan) == identity(STAMPS, tiny_plan(spec, tmp_path / "x.mp4", shift=3.0))
    asked = GenerationRequest(prompt="a boat").to_json()
    del asked["shift"]
    assert GenerationRequest.from_mapping(asked).shift is None
