"""Checkpoint files: complete or refused with a reason; their cost."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.core.errors import DEVICE_LOST, CheckpointError, DeviceLostError
from runtime.core.events import Event, Failed, Paused, Resumed, StepDone, VideoSaved, Warned
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import Checkpoint, CheckpointFolder, due, estimated_cost
from runtime.pipeline.files import LATEST
from runtime.pipeline.sampling import Conditioning, SamplingState
from tests.full_disk import fill
from tests.pipeline.test_resume import run
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]
FELL_BACK = Fact("execution.engine_not_finite")


def checkpoint_of(spec: ModelSpec, output: Path, **values: Any) -> Checkpoint:
    """Return a checkpoint with values and tensors of every supported type."""
    torch.manual_seed(1)
    plan = tiny_plan(spec, output, **values)
    memory = {
        "model_outputs": [None, torch.randn(3, 4)],
        "pair": (1, 2.5),
        "nested": {"text": "x", "yes": True, "scalar": torch.tensor(7), "half": torch.randn(3).bfloat16()},
        "infinite": float("inf"),
    }
    memory["again"] = memory["model_outputs"][1][1:]  # type: ignore[index]  # a part of another tensor
    return Checkpoint(
        planned=plan,
        plan=plan.with_component("vae", plan.components["vae"].replace(reasons=(FELL_BACK,))),
        of=4,
        conditioning=Conditioning(torch.randn(1, 5, 8).half(), torch.randn(1, 5, 8).half()),
        sampling=SamplingState(2, torch.randn(1, 16, 3, 4, 8), memory),
        warnings=(Fact("pipeline.text_cut", {"field": "prompt"}),),
        timings={"encode": 0.1, "denoise": 1 / 3},
        load_seconds=0.7,
    )


def test_a_checkpoint_survives_a_round_trip(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    written = checkpoint_of(spec, tmp_path / "x.mp4")
    folder = CheckpointFolder(tmp_path / "job")
    assert folder.load(spec, written.planned) is None
    folder.save(written, spec)
    read = folder.load(spec, written.planned)
    assert read is not None
    assert read.sampling is not None and written.sampling is not None
    assert (read.planned, read.plan, read.of, read.step) == (written.planned, written.plan, 4, 2)
    assert (read.warnings, read.timings, read.load_seconds) == (written.warnings, written.timings, 0.7)
    assert str(read.sampling) == str(written.sampling)
    assert torch.equal(read.sampling.latents, written.sampling.latents)
    assert torch.equal(read.conditioning.positive, written.conditioning.positive)
    assert read.conditioning.positive.dtype == torch.float16
    assert os.listdir(tmp_path / "job") == ["checkpoint.safetensors"]  # noqa: PTH208 - names, hidden ones too
    folder.clear()
    assert folder.load(spec, written.planned) is None


def test_a_plan_survives_json(tiny: Tiny, tmp_path: Path) -> None:
    plan = tiny_plan(tiny("wan2.2-a14b"), tmp_path / "x.mp4")
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_in_tensors(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def flip_in_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2000] ^= 4
    path.write_bytes(data)


def replace_by_weights(path: Path) -> None:
    save_file({"a": torch.zeros(3)}, path)


def raise_version(path: Path) -> None:
    save_file(load_file(path), path, metadata={"tandem": json.dumps({"version": 99})})


def claim_a_huge_header(path: Path) -> None:
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def nest_deeply(path: Path) -> None:
    save_file(load_file(path), path, metadata={"tandem": "[" * 100_000})


def count_no_steps(path: Path) -> None:
    save_file(load_file(path), path, metadata={"tandem": '{"version": 3, "step": 1e400}'})


DAMAGES: dict[Callable[[Path], None], str] = {
    claim_a_huge_header: "checkpoint.damaged",
    nest_deeply: "checkpoint.damaged",
    count_no_steps: "checkpoint.damaged",
    cut: "checkpoint.damaged",
    empty: "checkpoint.damaged",
    flip_in_tensors: "checkpoint.damaged",
    flip_in_header: "checkpoint.damaged",
    replace_by_weights: "checkpoint.damaged",
    raise_version: "checkpoint.other_version",
}


def test_a_damaged_checkpoint_is_refused(tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests) -> None:
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4", steps=2)
    first = run(plan, spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone))
    assert isinstance(first[-1], Paused)
    for damage, reason in DAMAGES.items():
        with subtests.test(damage=damage.__name__):
            folder = shutil.copytree(tmp_path / "job", tmp_path / damage.__name__)
            damage(folder / LATEST)
            with pytest.raises(CheckpointError) as refused:
                CheckpointFolder(folder).load(spec, plan)
            assert refused.value.code == reason


@pytest.mark.parametrize("damage", [flip_in_tensors, raise_version])
def test_a_damaged_checkpoint_is_reported_and_the_job_starts_over(
    damage: Callable[[Path], None], tiny: Tiny, tmp_path: Path
) -> None:
    spec, reason = tiny("wan2.1"), DAMAGES[damage]
    plan = tiny_plan(spec, tmp_path / "x.mp4", steps=2)
    run(plan, spec, tmp_path / "job", stop=lambda event: isinstance(event, StepDone))
    damage(tmp_path / "job" / LATEST)
    second = run(plan, spec, tmp_path / "job")
    warned = [event.fact for event in second if isinstance(event, Warned)]
    assert Fact("pipeline.checkpoint_unusable", {"cause": Fact(reason)}) in warned
    assert not any(isinstance(event, Resumed) for event in second)
    assert isinstance(second[-1], VideoSaved)


@pytest.mark.parametrize(
    ("values", "serves"),
    [
        ({"seed": 4}, False),
        ({"prompt": "a blue boat"}, False),
        ({"negative_prompt": "night"}, False),
        ({"steps": 5}, False),
        ({"width": 96}, False),
        ({"guidance_scale": 2.0}, False),
        ({"guidance_scale_2": 2.0}, False),
        ({"fps": 12}, True),
        ({"crf": 30}, True),
        ({"offload": "none"}, True),
        ({"on_out_of_memory": "ask"}, True),
        ({"backends": {"all": "pytorch"}}, True),
        ({"gpus": "auto"}, True),
    ],
)
def test_a_checkpoint_serves_the_same_clip_computed_differently(
    values: dict[str, Any], serves: bool, tiny: Tiny, tmp_path: Path
) -> None:
    spec = tiny("wan2.2-a14b")
    scales = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}
    folder = CheckpointFolder(tmp_path / "job")
    folder.save(checkpoint_of(spec, tmp_path / "x.mp4", **scales), spec)
    other = tiny_plan(spec, tmp_path / "other.mp4", **(scales | values))
    if serves:
        assert folder.load(spec, other) is not None
    else:
        with pytest.raises(CheckpointError) as refused:
            folder.load(spec, other)
        assert refused.value.fact == Fact("checkpoint.other_clip")


@pytest.mark.parametrize(("part", "serves"), [("transformer_2", False), ("text_encoder", False), ("vae", True)])
def test_a_checkpoint_of_other_weights_is_refused(part: str, serves: bool, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "model")
    spec = read_spec(tmp_path / "model", "model")
    written = checkpoint_of(spec, tmp_path / "x.mp4")
    folder = CheckpointFolder(tmp_path / "job")
    folder.save(written, spec)
    weights = next((tmp_path / "model" / part).glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(1, 1))
    folder = CheckpointFolder(tmp_path / "job")
    if serves:
        assert folder.load(spec, written.planned) is not None
    else:
        with pytest.raises(CheckpointError) as refused:
            folder.load(spec, written.planned)
        assert refused.value.fact == Fact("checkpoint.other_clip")


def test_partial_files_of_a_killed_writer_are_removed(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "checkpoint.safetensors.123.tmp").write_bytes(b"half")
    assert CheckpointFolder(tmp_path / "job").load(spec, tiny_plan(spec, tmp_path / "x.mp4")) is None
    assert list((tmp_path / "job").iterdir()) == []


def test_a_full_disk_is_reported_and_keeps_the_last_checkpoint(tiny: Tiny, small_disk: Path) -> None:
    spec = tiny("wan2.1")
    folder = CheckpointFolder(small_disk / "job")
    checkpoint = checkpoint_of(spec, small_disk / "x.mp4")
    folder.save(checkpoint, spec)
    (kept,) = folder.path.iterdir()
    fill(small_disk)
    with pytest.raises(CheckpointError) as error:
        folder.save(checkpoint, spec)
    assert error.value.code == "checkpoint.not_writable"
    assert list(folder.path.iterdir()) == [kept]
    assert folder.load(spec, checkpoint.plan) is not None


def test_a_job_in_an_unwritable_folder_makes_its_video_without_checkpoints(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    (tmp_path / "job").write_text("a file is in the way")
    events: list[Event] = run(tiny_plan(spec, tmp_path / "x.mp4", steps=3), spec, tmp_path / "job")
    stopped = [
        event.fact
        for event in events
        if isinstance(event, Warned) and event.fact.code == "pipeline.checkpoints_stopped"
    ]
    assert len(stopped) == 1
    assert stopped[0].data["cause"].code == "checkpoint.not_writable"
    assert isinstance(events[-1], VideoSaved)
    assert stopped[0] in events[-1].warnings


def test_an_internal_error_keeps_the_progress(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4", steps=3)

    def broken(event: Event) -> bool:
        if isinstance(event, StepDone) and event.step == 2:
            raise ZeroDivisionError("oops")
        return False

    first = run(plan, spec, tmp_path / "job", stop=broken)
    assert isinstance(first[-1], Failed)
    assert Resumed(step=2, of=3) in run(plan, spec, tmp_path / "job")


def test_a_lost_device_is_the_reported_error(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4", steps=3)

    def copy(_: torch.Tensor) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def lose_device(event: Event) -> bool:
        if isinstance(event, StepDone) and event.step == 2:
            monkeypatch.setattr(torch.Tensor, "cpu", copy)
            raise DeviceLostError(error="CUDA error: unspecified launch failure")
        return False

    failed = run(plan, spec, tmp_path / "job", stop=lose_device)[-1]
    monkeypatch.undo()
    assert isinstance(failed, Failed)
    assert failed.fact == Fact(DEVICE_LOST, {"error": "CUDA error: unspecified launch failure"})
    assert isinstance(run(plan, spec, tmp_path / "job")[-1], VideoSaved)


@pytest.mark.parametrize(
    ("step_seconds", "cost", "steps"),
    [(0.01, 0.005, 400), (0.17, 0.006, 200), (23.4, 0.3, 40), (2.0, 5.0, 1000), (0.001, 0.01, 50)],
)
def test_checkpoints_cost_less_than_one_percent(step_seconds: float, cost: float, steps: int) -> None:
    seconds, spent, since, longest = 0.0, 0.0, 0.0, 0.0
    for _ in range(steps):
        seconds += step_seconds
        since += step_seconds
        if due(seconds, spent, cost):
            spent, since = spent + cost, 0.0
        longest = max(longest, since)
    assert spent <= 0.01 * seconds
    # At most a hundred times the cost of a checkpoint is lost.
    assert longest <= 100 * cost + step_seconds


def test_the_first_cost_is_estimated_conservatively() -> None:
    assert estimated_cost(0) == 0.01
    assert estimated_cost(100_000_000) == pytest.approx(1.01)
