"""Jobs on several processes: the same video, and an error that names the process that fails."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from runtime.core.cancel import Cancel
from runtime.core.events import (
    Cancelled,
    Event,
    Failed,
    OutOfMemory,
    Paused,
    Resumed,
    StageStarted,
    StepDone,
    VideoSaved,
)
from runtime.core.facts import Fact
from runtime.core.locks import remove_scratch_folders
from runtime.core.loras import Lora
from runtime.core.plan import ExecutionPlan, Split
from runtime.execution.residency import Residency
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.run import run_job
from tests.lora_files import factors, peft
from tests.pipeline.test_parity import sample
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan, with_strategy

Tiny = Callable[[str], ModelSpec]
TWO = Split(devices=("cpu", "cpu"), guidance=2, sequence=1, decode=True)
SECONDS = 60.0


@pytest.fixture(scope="module")
def residency() -> Iterator[Residency]:
    """Loaded components and processes that these tests share."""
    with Residency() as residency:
        yield residency


@pytest.fixture
def spec(tiny: Tiny) -> ModelSpec:
    """A model with two experts."""
    return tiny("wan2.2-a14b")


def shared(spec: ModelSpec, output: Path, **values: object) -> ExecutionPlan:
    """Plan a tiny clip for two processes."""
    plan = tiny_plan(spec, output, negative_prompt="blue ball", **values)
    return with_strategy(plan, keep_loaded=True).replace(split=TWO)


def run(
    plan: ExecutionPlan,
    spec: ModelSpec,
    residency: Residency,
    folder: Path | None = None,
    at: Callable[[Event, Cancel], None] = lambda *_: None,
) -> list[Event]:
    """Run a job; `at` is called with each event."""
    events: list[Event] = []
    cancel = Cancel()

    def emit(event: Event) -> None:
        events.append(event)
        at(event, cancel)

    run_job(plan, spec, emit, cancel, residency, checkpoints=CheckpointFolder(folder) if folder else None)
    return events


def processes(residency: Residency) -> list[psutil.Process]:
    """Return the processes that share the work, in order."""
    group = residency.group_manager.group
    assert group is not None
    return [psutil.Process(process.pid) for process in group.processes]


def apart(one: Path, other: bytes) -> float:
    """Return how far a video's frames are apart from others on average, of 255."""
    first, second = (np.frombuffer(frames, np.uint8).astype(float) for frames in (frames_of(one), other))
    return float(np.abs(first - second).mean())


@pytest.mark.slow
def test_latents_equal_those_of_one_process(spec: ModelSpec, residency: Residency, tmp_path: Path) -> None:
    plan = shared(spec, tmp_path / "x.mp4")
    with Residency() as alone:
        wanted = sample(spec, plan.replace(split=None), alone)
    made = sample(spec, plan, residency)
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-4)
    assert all(residency.is_loaded(spec, plan, name) for name in ("transformer", "transformer_2"))
    assert len(processes(residency)) == 2


@pytest.mark.slow
def test_each_process_adds_the_loras(spec: ModelSpec, residency: Residency, tmp_path: Path) -> None:
    save_file(peft(factors(spec.transformer)), tmp_path / "style.safetensors")
    changed = with_loras(spec, [Lora(str(tmp_path / "style.safetensors"), 0.5)], tmp_path)
    plan = shared(spec, tmp_path / "x.mp4")
    with Residency() as alone:
        wanted = sample(changed, plan.replace(split=None), alone)
    made = sample(changed, plan, residency)
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-4)
    assert not torch.allclose(made, sample(spec, plan, residency), atol=1e-2)


def test_a_job_resumes_with_another_number_of_gpus(spec: ModelSpec, residency: Residency, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole.mp4", tmp_path / "halves.mp4"
    together, alone = shared(spec, whole), shared(spec, halves).replace(split=None)
    saved = run(together, spec, residency)[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.request["gpus"] == 2
    assert saved.plan["split"]["devices"] == ["cpu", "cpu"]

    def pause(event: Event, cancel: Cancel) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            cancel.pause()

    there = processes(residency)
    events = run(together.replace(output=halves), spec, residency, tmp_path / "job", pause)
    assert events[-1] == Paused(step=2, of=4)
    # Both experts are loaded already.
    assert [event.part for event in events if isinstance(event, StageStarted) and event.stage == "load"] == []
    assert processes(residency) == there
    with Residency() as one:
        events = run(alone, spec, one, tmp_path / "job")
    assert Resumed(step=2, of=4) in events
    assert isinstance(events[-1], VideoSaved)
    assert events[-1].request["gpus"] == 1
    assert apart(whole, frames_of(halves)) < 0.5


def test_a_cancelled_job_leaves_the_group_ready(spec: ModelSpec, residency: Residency, tmp_path: Path) -> None:
    plan = shared(spec, tmp_path / "x.mp4")

    def cancel_at_first(event: Event, cancel: Cancel) -> None:
        if isinstance(event, StepDone):
            cancel.request()

    assert run(plan, spec, residency, at=cancel_at_first)[-1] == Cancelled()
    there = processes(residency)
    assert isinstance(run(plan, spec, residency)[-1], VideoSaved)
    assert processes(residency) == there


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's memory")
def test_out_of_memory_in_one_process_is_reported(spec: ModelSpec, residency: Residency, tmp_path: Path) -> None:
    plan = shared(spec, tmp_path / "x.mp4", on_out_of_memory="ask", width=768, height=512, frames=5, steps=1)

    def starve(event: Event, _: Cancel) -> None:
        if event == StageStarted(stage="denoise", part="transformer"):
            rank = processes(residency)[1]
            # Enough for libraries to start, not for a frame.
            rank.rlimit(psutil.RLIMIT_AS, (rank.memory_info().vms + (32 << 20),) * 2)

    events = run(plan, spec, residency, at=starve)
    (out,) = [event for event in events if isinstance(event, OutOfMemory)]
    # Memory that was allocated before is reused first.
    assert (out.memory, out.stage) in {("RAM", "denoise"), ("RAM", "decode")}
    assert isinstance(events[-1], Failed)
    assert residency.group_manager.group is None


def test_a_killed_process_fails_the_job_with_a_reason(spec: ModelSpec, residency: Residency, tmp_path: Path) -> None:
    plan = shared(spec, tmp_path / "x.mp4")
    there: list[psutil.Process] = []
    killed_at = 0.0

    def kill(event: Event, _: Cancel) -> None:
        nonlocal killed_at
        if isinstance(event, StepDone) and event.step == 1:
            there.extend(processes(residency))
            there[1].kill()
            killed_at = time.monotonic()

    events = run(plan, spec, residency, tmp_path / "job", kill)
    failed = events[-1]
    assert isinstance(failed, Failed), failed
    assert time.monotonic() - killed_at < SECONDS
    assert not failed.internal
    cause = Fact("parallel.process_ended", {"exit": "signal 9, SIGKILL"})
    assert failed.fact.data | {"last": ""} == {"gpu": 2, "gpus": 2, "device": "cpu", "cause": cause, "last": ""}
    assert not any(process.is_running() for process in there)
    assert not plan.output.exists()
    # The job resumes on one GPU.
    with Residency() as alone:
        events = run(plan.replace(split=None), spec, alone, tmp_path / "job")
    assert isinstance(events[-1], VideoSaved)
    assert any(isinstance(event, Resumed) for event in events)


LEADER = """
import sys
from runtime.execution.parallel.group import Group
from runtime.core.plan import Split
group = Group(Split(devices=("cpu",) * 2, guidance=2, sequence=1, decode=True), lambda: None)
print(*(process.pid for process in group.processes), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_process_outlives_the_coordinator(tmp_path: Path) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert leader.stdin is not None
    assert leader.stdout is not None
    with leader, leader.stdin, leader.stdout:
        ranks = set(map(int, leader.stdout.readline().split()))
        descendants = psutil.Process(leader.pid).children(recursive=True)
        assert len(ranks) == 2
        assert ranks < {process.pid for process in descendants}
        leader.kill()
        ended, left = psutil.wait_procs(descendants, timeout=SECONDS)
        assert not left, ended
    # Nor does their folder outlive the next start of the app.
    assert len(list(tmp_path.glob("tandem-*"))) == 1
    remove_scratch_folders(tmp_path)
    assert not list(tmp_path.glob("tandem-*"))
