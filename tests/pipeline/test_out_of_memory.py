"""Out-of-memory in every stage: retried with the next strategy, or failed with that strategy named."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.events import Event, Failed, OutOfMemory, Resumed, StageStarted, StepDone, VideoSaved, Warned
from runtime.core.facts import Fact
from runtime.execution.components import PROMPTED
from runtime.execution.residency import Residency
from runtime.execution.text_encoder import PyTorchTextModel
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module, load_scheduler
from runtime.pipeline.run import run_job
from tests.facts import fact, states
from tests.pipeline.test_resume import run, steps_of, stream_of, whole
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]
# Two calls a step: with guidance.
PLACES = [
    ("PyTorchTextModel", 2, "encode", "text_encoder", 0),
    ("PyTorchDenoiser", 1, "denoise", "transformer", 0),
    ("PyTorchDenoiser", 4, "denoise", "transformer", 1),
    ("PyTorchDenoiser", 6, "denoise", "transformer_2", 2),
    ("PyTorchVideoDecoder", 1, "decode", "vae", 4),
]
FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
]
ONE_AT_A_TIME = Fact("strategy.one_at_a_time")


class Starving:
    """Makes components that run out of memory in chosen calls, counted over all of a class."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self._monkeypatch = monkeypatch
        self._error = error
        self.calls = 0

    def at(self, name: str, fails: Callable[[int], bool]) -> None:
        """Let class `name` fail in the calls for which `fails`."""
        outer = self

        def hit() -> None:
            outer.calls += 1
            if fails(outer.calls):
                raise outer._error

        class StarvingTextModel(PyTorchTextModel):
            def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                hit()
                return super().__call__(ids, mask)

        class StarvingDenoiser(PyTorchDenoiser):
            def __call__(
                self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, which: str = PROMPTED
            ) -> torch.Tensor:
                hit()
                return super().__call__(latents, timestep, text, which)

        class StarvingVideoDecoder(PyTorchVideoDecoder):
            def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
                for frames in super().frames(latents, chunk, tile):
                    yield frames
                    hit()

        kinds: list[type] = [StarvingTextModel, StarvingDenoiser, StarvingVideoDecoder]
        found = next(kind for kind in kinds if kind.__mro__[1].__name__ == name)
        module = {
            "PyTorchTextModel": "execution.residency",
            "PyTorchDenoiser": "families.wan.transformer",
            "PyTorchVideoDecoder": "families.wan.components",
        }[name]
        self._monkeypatch.setattr(f"runtime.{module}.{name}", found)


def outs(events: list[Event]) -> list[OutOfMemory]:
    """Return the out-of-memory events."""
    return [event for event in events if isinstance(event, OutOfMemory)]


# Each place with one kind of error, and each kind in a place of each stage.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call", "stage", "component", "step", "error"),
    [
        *((*place, FULL[number % 2]) for number, place in enumerate(PLACES)),
        (*PLACES[0], FULL[1]),
        (*PLACES[-1], FULL[1]),
    ],
)
def test_out_of_memory_is_retried_with_the_same_video(
    name: str,
    call: int,
    stage: str,
    component: str,
    step: int,
    error: Exception,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    assert plan.strategy.keep_loaded
    wanted = whole(plan, spec)
    Starving(monkeypatch, error).at(name, lambda calls: calls == call)
    events = run(plan, spec, tmp_path / "job")
    (out,) = outs(events)
    assert (out.stage, out.component, out.memory, out.retried) == (stage, component, "RAM", True)
    assert (out.strategy, out.lossless, out.changes) == (
        ONE_AT_A_TIME,
        True,
        {"on_out_of_memory": "retry"},
    )
    assert out.fact.code in {"event.out_of_memory_retried", "event.out_of_memory_repeated"}
    assert sum(isinstance(event, StepDone) for event in events[: events.index(out)]) == step
    assert steps_of(events) == [1, 2, 3, 4], "no step is done twice"
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    assert out.fact in saved.warnings
    assert saved.plan["keep_loaded"] is False
    taken = [strategy["title"] for strategy in saved.plan["ladder"] if strategy["taken"]]
    assert taken == [str(ONE_AT_A_TIME).rstrip(".")]
    assert (frames_of(plan.output), stream_of(plan.output)) == wanted


def test_a_retry_with_a_step_cache_repeats_its_steps(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4", step_cache="first-block:0.001")
    wanted = whole(plan, spec)
    read: list[ModelSpec] = []

    def counted(spec: ModelSpec, *rest: Any) -> Any:
        read.append(spec)
        return load_scheduler(spec, *rest)

    monkeypatch.setattr("runtime.pipeline.run_context.load_scheduler", counted)
    Starving(monkeypatch, MemoryError()).at("PyTorchDenoiser", lambda calls: calls == 6)
    events = run(plan, spec, tmp_path / "job")
    # What the scheduler remembered of steps 1 and 2 is forgotten with them.
    assert len(outs(events)) == 1 and steps_of(events) == [1, 2, 1, 2, 3, 4]
    assert (frames_of(plan.output), stream_of(plan.output)) == wanted
    assert len(read) == 1, "the scheduler's configuration is read once a job"


def test_out_of_memory_while_loading_is_retried(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny("wan2.2-a14b")
    seen: list[str] = []

    def starving(spec: ModelSpec, name: str, *rest: Any) -> torch.nn.Module:
        seen.append(name)
        # Ahead on a thread, and when it is used.
        if seen.count("transformer_2") <= 2 and name == "transformer_2":
            raise MemoryError
        return load_module(spec, name, *rest)

    monkeypatch.setattr("runtime.execution.residency.load_module", starving)
    events = run(tiny_plan(spec, tmp_path / "x.mp4"), spec, None)
    (out,) = outs(events)
    assert (out.stage, out.component, out.retried) == ("load", "transformer_2", True)
    assert steps_of(events) == [1, 2, 3, 4]
    assert isinstance(events[-1], VideoSaved)


def test_ask_fails_with_the_next_strategy_and_a_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4", on_out_of_memory="ask")
    with monkeypatch.context() as patched:
        Starving(patched, FULL[0]).at("PyTorchDenoiser", lambda calls: calls == 6)
        events = run(plan, spec, tmp_path / "job")
    (out,) = outs(events)
    assert (out.retried, out.strategy) == (False, ONE_AT_A_TIME)
    end = events[-1]
    assert isinstance(end, Failed)
    assert end.fact == Fact(
        "pipeline.out_of_memory_resumable_strategy",
        {"stage": "denoise", "component": "transformer_2", "memory": "RAM", "changes": {"on_out_of_memory": "retry"}}
        | {"effects": out.effects, "step": 2, "of": 4},
    )
    again = run(tiny_plan(spec, tmp_path / "x.mp4", on_out_of_memory="retry"), spec, tmp_path / "job")
    assert Resumed(step=2, of=4) in again
    assert steps_of(again) == [3, 4]
    assert isinstance(again[-1], VideoSaved)


def test_without_another_strategy_the_job_fails_and_frees_everything(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.2-a14b")
    Starving(monkeypatch, FULL[0]).at("PyTorchDenoiser", lambda calls: calls >= 3)
    events: list[Event] = []
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    with Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency)
        assert not any(residency.is_loaded(spec, plan, name) for name in plan.components)
    assert [out.retried for out in outs(events)] == [True, False]
    end = events[-1]
    assert isinstance(end, Failed)
    assert not end.internal
    assert end.fact.code == "pipeline.out_of_memory"


def test_a_resumed_job_keeps_the_strategy_of_its_retry(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    with monkeypatch.context() as patched:
        Starving(patched, FULL[0]).at("PyTorchDenoiser", lambda calls: calls == 3)
        first = run(plan, spec, tmp_path / "job", stop=lambda e: isinstance(e, StepDone) and e.step == 2)
    (out,) = outs(first)
    second = run(plan, spec, tmp_path / "job")
    assert steps_of(second) == [3, 4]
    saved = second[-1]
    assert isinstance(saved, VideoSaved)
    assert saved.plan["keep_loaded"] is False
    assert out.fact in saved.warnings
    assert Warned(fact=out.fact) in second


def _decode_with_little_memory(directory: Path, output: Path, end: Any) -> None:
    """Run a job whose decoder really runs out of memory: the process may have little more than decoding in tiles takes.

    Runs in its own process, which computes nothing before.
    """
    from runtime.models.registry import read_spec
    from runtime.planner import memory_model

    spec = read_spec(directory, "tiny")
    plan = tiny_plan(spec, output, width=512, height=256, frames=5, steps=1, on_out_of_memory="any")
    load = memory_model.Workload.of(plan, spec)
    whole, tiled = (memory_model.decode_bytes(load, 1, tile) for tile in (None, memory_model.tile_sides(load)[0]))
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, StageStarted) and event.stage == "decode" and not outs(events):
            status = Path("/proc/self/status").read_text()
            used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmSize"))
            limit = used + (tiled + whole) // 2
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    torch.set_num_threads(1)
    with Residency() as residency:
        run_job(plan, spec, emit, Cancel(), residency)
    reported = [(out.stage, out.memory, out.strategy, out.retried) for out in outs(events)]
    final = events[-1]
    end.send((reported, type(final).__name__, getattr(final, "what", ""), getattr(final, "warnings", ())))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_real_out_of_memory_while_decoding(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    directory = tiny("wan2.1").directory
    # Else each thread reserves 64 MiB that it does not use.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    # The limit is one of addresses, and what is allocated in larger pieces gives its own back.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_decode_with_little_memory, args=(directory, tmp_path / "x.mp4", theirs))
    process.start()
    assert ours.poll(240), "no answer"
    reported, final, what, warnings = ours.recv()
    process.join(20)
    assert final == "VideoSaved", (what, reported)
    assert [(stage, memory, retried) for stage, memory, _, retried in reported] == [("decode", "RAM", True)] * len(
        reported
    )
    assert states(reported[-1][2], fact("strategy.tiles", how=ONE_AT_A_TIME))
    assert states(warnings, "event.less_exact")
    assert len(frames_of(tmp_path / "x.mp4")) == 5 * 256 * 512 * 3
