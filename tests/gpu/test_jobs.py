"""Jobs on a GPU: a resumed job gives a bit-identical video, and jobs survive running out of video memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runtime.core.events import Event, FramesDecoded, OutOfMemory, Resumed, StageStarted, StepDone, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests.pipeline.test_resume import run, steps_of, stream_of
from tests.pipeline.test_run import frames_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"),
]
STEPS = 6


def planned(output: Path, **values: object) -> tuple[ModelSpec, ExecutionPlan]:
    """Return the shipped model and a short clip's plan for the GPU."""
    spec = find("diorama", Path("none"))
    wanted = {"prompt": "a red boat sails left", "seed": 7, "frames": 9, "steps": STEPS} | values
    plan = resolve(GenerationRequest.from_mapping(wanted), spec, PlanningContext(probe(), output))
    assert plan.components["transformer"].device == "cuda:0"
    return spec, plan


@pytest.mark.parametrize("offload", ["none", "group"])
def test_a_job_paused_after_any_step_gives_the_same_video(offload: str, tmp_path: Path) -> None:
    out = tmp_path / "x.mp4"
    spec, plan = planned(out, offload=offload)
    run(plan, spec, None)
    wanted = frames_of(out), stream_of(out)
    stops: list[Callable[[Event], bool]] = [
        *(lambda event, step=step: isinstance(event, StepDone) and event.step == step for step in range(1, STEPS + 1)),
        lambda event: isinstance(event, FramesDecoded),
    ]
    for number, stop in enumerate(stops, 1):
        out.unlink()
        folder = tmp_path / f"job-{number}"
        run(plan, spec, folder, stop=stop)
        assert not out.exists()
        second = run(plan, spec, folder)
        done = min(number, STEPS)
        assert Resumed(step=done, of=STEPS) in second
        assert steps_of(second) == list(range(done + 1, STEPS + 1))
        assert isinstance(second[-1], VideoSaved), second[-1]
        assert (frames_of(out), stream_of(out)) == wanted


@pytest.fixture
def hoard() -> Iterator[Callable[[int], None]]:
    """Return what leaves this process so many bytes of video memory and no more; given back afterwards."""

    def take(left: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        assert free > left, "there is less already"
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + left) / total)

    yield take
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_while_decoding_is_retried(hoard: Callable[[int], None], tmp_path: Path) -> None:
    out = tmp_path / "x.mp4"
    spec, plan = planned(out, width=1024, height=1024, steps=1, on_out_of_memory="any")
    assert isinstance(run(plan, spec, None)[-1], VideoSaved)
    needed = next(stage.working_bytes for stage in plan.memory if stage.component == "vae")

    def squeeze(event: Event) -> bool:
        if isinstance(event, StageStarted) and event.stage == "decode" and not limited:
            limited.append(event)
            hoard(needed // 3)
        return False

    limited: list[Event] = []
    out.unlink()
    events = run(plan, spec, tmp_path / "job", stop=squeeze)
    exhausted = [event for event in events if isinstance(event, OutOfMemory)]
    assert exhausted, "no OutOfMemory event"
    assert {(event.stage, event.component, event.memory, event.retried) for event in exhausted} == {
        ("decode", "vae", "VRAM", True)
    }
    saved = events[-1]
    assert isinstance(saved, VideoSaved), saved
    assert all(event.fact in saved.warnings for event in exhausted)
    assert len(frames_of(out)) == 9 * 1024 * 1024 * 3
