"""Jobs whose transformers run on real block engines (ONNX Runtime, tiny models): results, failures, resuming."""

import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.core.errors import EngineError
from runtime.core.events import Event, FellBack, OutOfMemory, Resumed, StageStarted, StepDone, VideoSaved
from runtime.core.facts import Fact
from runtime.core.loras import Lora
from runtime.core.plan import ExecutionPlan, Speed
from runtime.core.request import GenerationRequest
from runtime.engines import service as engines_service
from runtime.engines.builders import onnxruntime
from runtime.engines.service import EngineService, OpenEngines
from runtime.engines.store import EngineStore
from runtime.execution.block_engines import BlockEngines
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import read_metadata
from tests.block_engine_files import BUILDER, in_blocks, stock
from tests.engines.engine_files import refusal
from tests.execution.test_offload import Reading, reading
from tests.lora_files import factors, peft
from tests.pipeline.killing import killed
from tests.pipeline.runs import events_of
from tests.pipeline.test_parity import sample
from tests.pipeline.test_run import frames_of
from tests.plans import Alone, machine, tiny_plan, with_strategy
from tests.tiny_models import IN_JOBS

pytestmark = pytest.mark.usefixtures("forked_children")

__all__ = ["reading"]

Tiny = Callable[[str], ModelSpec]
Calls = list[tuple[str, int]]
# 96 tokens are two chunks of a pass, 24 are one.
LARGE = {"width": 128, "height": 64, "frames": 9}
SMALL = {"width": 64, "height": 32, "frames": 9}
EXPERTS = ["transformer", "transformer_2"]
# Of one block, with two chunks: one program runs before attention, the others after it.
CALLS_OF_A_PASS = 2 * (2 + 2 * 2)


@pytest.fixture(scope="module")
def spec(tiny: Tiny) -> ModelSpec:
    """A model with two experts."""
    return tiny("wan2.2-a14b")


@pytest.fixture(scope="module")
def service(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> EngineService:
    """A library with its block engines."""
    return stock(spec, tmp_path_factory.mktemp("library"), tmp_path_factory)


@pytest.fixture
def residency(service: EngineService) -> Iterator[Residency]:
    """A residency with that library."""
    with Residency(service, keep_prompts=False) as residency:
        yield residency


def planned(spec: ModelSpec, tmp_path: Path, **values: object) -> tuple[ExecutionPlan, ExecutionPlan]:
    """Return the plan of a tiny clip in PyTorch, and on block engines."""
    plan = tiny_plan(spec, tmp_path / "x.mp4", **{"negative_prompt": "blue ball", **LARGE, **values})
    return plan, in_blocks(plan, spec)


def apart(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative difference of two latents; rounding in float32 gives less than 1e-5 in a few steps."""
    return float((made - wanted).norm() / wanted.norm())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the engines were called with: program and tokens."""
    found: Calls = []
    write = OpenEngines.write

    def watch(self: OpenEngines, program: str, inputs: Mapping[str, torch.Tensor], outputs: Any) -> None:
        found.append((program, len(inputs["x"])))
        write(self, program, inputs, outputs)

    monkeypatch.setattr(OpenEngines, "write", watch)
    return found


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, end: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
    """Run real engines, and call `end` with the outputs of call `number`."""
    write, seen = OpenEngines.write, 0

    def failing(self: OpenEngines, program: str, inputs: Mapping[str, torch.Tensor], outputs: Any) -> None:
        nonlocal seen
        seen += 1
        write(self, program, inputs, outputs)
        if seen == number:
            end(outputs)

    monkeypatch.setattr(OpenEngines, "write", failing)


def broken(outputs: Mapping[str, torch.Tensor]) -> None:
    """Fail as an engine does, after writing nonsense."""
    for output in outputs.values():
        output.fill_(1e9)
    raise EngineError("engine.failed", error="on purpose")


def cuda_error(_: Mapping[str, torch.Tensor]) -> None:
    """Fail as CUDA does."""
    raise RuntimeError("CUDA error: on purpose")


def starving(_: Mapping[str, torch.Tensor]) -> None:
    """Run out of memory."""
    raise torch.OutOfMemoryError("CUDA out of memory, on purpose")


def not_numbers(outputs: Mapping[str, torch.Tensor]) -> None:
    """Return NaN."""
    for output in outputs.values():
        output.fill_(math.nan)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", IN_JOBS)
def test_every_size_equals_pytorch(
    architecture: str, tiny: Tiny, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, calls: Calls
) -> None:
    spec = tiny(architecture)
    with Residency(stock(spec, tmp_path, tmp_path_factory)) as residency:
        for size in (LARGE, SMALL, {"width": 96, "height": 160, "frames": 5}):
            pytorch, blocks = planned(spec, tmp_path, steps=2, **size)
            wanted = sample(spec, pytorch, residency)
            assert not calls
            assert 0 < apart(sample(spec, blocks, residency), wanted) < 1e-4
            assert {program for program, _ in calls} == set(spec.block_programs)
            calls.clear()


@pytest.mark.slow
def test_tokens_come_in_full_chunks_and_a_rest(
    spec: ModelSpec, residency: Residency, tmp_path: Path, calls: Calls
) -> None:
    pytorch, blocks = planned(spec, tmp_path, width=160, height=96, steps=1)
    assert pytorch.tokens == 180
    assert apart(sample(spec, blocks, residency), sample(spec, pytorch, residency)) < 1e-4
    assert [tokens for program, tokens in calls if program == "block_qkv"][:3] == [64, 64, 52]


@pytest.mark.parametrize(
    ("tokens", "most", "sizes"),
    [
        (32760, 8192, [8192, 8192, 8192, 8184]),
        (75600, 8192, [8192] * 9 + [1872]),
        (8193, 8192, [8192, 1]),
        (1, 8192, [1]),
        (40, 32, [32, 8]),
        (300, 200, [192, 108]),
    ],
)
def test_chunks_are_full_and_aligned(tokens: int, most: int, sizes: list[int], spec: ModelSpec) -> None:
    class Opened(OpenEngines):
        most_tokens = most

    engines = BlockEngines(Opened({}, None, "cpu"), spec, "transformer", (), print, print)  # type: ignore[arg-type]
    found = engines.chunks(tokens)
    assert [one.stop - one.start for one in found] == sizes
    assert [one.start for one in found] == [sum(sizes[:number]) for number in range(len(sizes))]
    assert all(one.start % min(64, most) == 0 for one in found)


@pytest.mark.slow
def test_both_experts_use_the_engines_once_opened(
    spec: ModelSpec, service: EngineService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, blocks = planned(spec, tmp_path)
    opened: list[OpenEngines] = []
    open_engines = engines_service.open_engines

    def watch(*given: Any) -> OpenEngines:
        opened.append(open_engines(*given))
        return opened[-1]

    monkeypatch.setattr(engines_service, "open_engines", watch)
    ids = {use.id for use in blocks.components["transformer"].engines}
    with Residency(service) as residency:
        sample(spec, with_strategy(blocks, keep_loaded=False), residency)
        assert len(opened) == 1
        assert not residency._loaded
        kept = with_strategy(blocks, keep_loaded=True)
        sample(spec, kept, residency)
        sample(spec, kept, residency)
        assert len(opened) == 2
        assert all(residency.is_loaded(spec, kept, name) for name in EXPERTS)
        for one in ids:
            with refusal("engine.in_use"):
                service.store.delete(one)
        # A job without engines frees them, and uses the same modules.
        sample(spec, with_strategy(planned(spec, tmp_path)[0], keep_loaded=True), residency)
        assert not any(residency.is_loaded(spec, kept, name) for name in EXPERTS)


@pytest.mark.slow
def test_a_lora_needs_no_other_engine(spec: ModelSpec, residency: Residency, tmp_path: Path, calls: Calls) -> None:
    save_file(peft(factors(spec.transformer)), tmp_path / "style.safetensors")
    changed = with_loras(spec, [Lora(str(tmp_path / "style.safetensors"), 0.5)], tmp_path)
    asked = {"loras": [f"{tmp_path / 'style.safetensors'}:0.5"]}
    pytorch, blocks = planned(changed, tmp_path, **asked)
    assert blocks.components["transformer"].engines == planned(spec, tmp_path)[1].components["transformer"].engines
    wanted = sample(changed, pytorch, residency)
    assert apart(sample(changed, blocks, residency), wanted) < 1e-4
    assert calls
    assert apart(sample(spec, blocks, residency), wanted) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["model", "group"])
def test_offloaded_weights_are_on_the_device_when_engines_read_them(
    offload: str,
    spec: ModelSpec,
    residency: Residency,
    tmp_path: Path,
    reading: Reading,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, blocks = planned(spec, tmp_path, steps=2)
    wanted = sample(spec, blocks.replace(speed=Speed()), residency)
    write, read = OpenEngines.write, 0

    def watch(self: OpenEngines, program: str, inputs: Mapping[str, torch.Tensor], outputs: Any) -> None:
        nonlocal read
        weights = {one for one in inputs.values() if isinstance(one, torch.nn.Parameter)}
        assert not weights & reading.away
        read += len(weights)
        write(self, program, inputs, outputs)

    monkeypatch.setattr(OpenEngines, "write", watch)
    plan = with_strategy(blocks.replace(speed=Speed()), offload=offload)
    for _ in range(2):
        assert torch.equal(sample(spec, plan, residency), wanted)
    assert read
    assert bool(reading.away) == (offload == "group")


def test_a_step_cache_works_on_engines(spec: ModelSpec, residency: Residency, tmp_path: Path, calls: Calls) -> None:
    pytorch, blocks = planned(spec, tmp_path, steps=8, step_cache="first-block:0.9")
    assert apart(sample(spec, blocks, residency), sample(spec, pytorch, residency)) < 1e-4
    assert 0 < len(calls) < 8 * 2 * CALLS_OF_A_PASS


@pytest.mark.parametrize("speed", [Speed(text_kept=True, fused=True), Speed(paired=True, compiled=True)])
def test_options_for_pytorch_do_no_harm(speed: Speed, spec: ModelSpec, residency: Residency, tmp_path: Path) -> None:
    pytorch, blocks = planned(spec, tmp_path)
    wanted = sample(spec, pytorch, residency)
    with residency.denoiser(spec, Alone(blocks.replace(speed=speed)), "transformer") as denoiser:
        assert not denoiser.pairs
    assert apart(sample(spec, blocks.replace(speed=speed), residency), wanted) < 1e-4


def test_weights_that_change_while_running_are_used(spec: ModelSpec, residency: Residency, tmp_path: Path) -> None:
    _, blocks = planned(spec, tmp_path)
    random = torch.Generator().manual_seed(0)
    latents = torch.randn(blocks.latent_shape, generator=random)
    text = torch.randn(1, spec.max_sequence_length, spec.transformer.text_dim, generator=random)
    time = torch.tensor(500.0)
    job = Alone(blocks)
    with residency.denoiser(spec, job, "transformer") as denoiser:
        module = denoiser._module  # type: ignore[attr-defined]

        def in_pytorch() -> torch.Tensor:
            other = type(denoiser)(module)  # type: ignore[call-arg]
            wanted: torch.Tensor = other(latents, time, text)
            return wanted

        def on_engines() -> torch.Tensor:
            denoiser.compute(Speed(), None, engines)  # type: ignore[attr-defined]
            return denoiser(latents, time, text)

        engines = denoiser._engines  # type: ignore[attr-defined]
        before = on_engines()
        module.blocks[0].attn1.to_q.weight.data = module.blocks[0].attn1.to_q.weight.data * 2
        changed = on_engines()
        assert apart(changed, before) > 1e-3
        assert apart(changed, in_pytorch()) < 1e-5
        # An adapter around a layer: its block runs in PyTorch, and the others on engines.
        inner = module.blocks[0].attn1.to_k
        module.blocks[0].attn1.to_k = torch.nn.Sequential(inner, torch.nn.Linear(24, 24)).requires_grad_(False)
        adapted = on_engines()
        assert apart(adapted, changed) > 1e-3
        assert apart(adapted, in_pytorch()) < 1e-5
        assert job.warnings == [Fact("execution.block_not_on_engine", {"weight": "attn1.to_k.weight"})]
        module.blocks[1].ffn.net[2].weight.data = module.blocks[1].ffn.net[2].weight.data.double()
        engines.weights(module.blocks[1], torch.device("cpu"))
        assert len(job.warnings) == 1
    assert job.fallen == []


def run(plan: ExecutionPlan, spec: ModelSpec, residency: Residency, folder: Path | None = None) -> list[Event]:
    """Run a job to its video."""
    events = events_of(plan, spec, residency, checkpoints=CheckpointFolder(folder) if folder else None)
    assert isinstance(events[-1], VideoSaved), events[-1]
    return events


def backends(events: list[Event]) -> list[str]:
    """Return what ran the experts, as the result says."""
    saved = events[-1]
    assert isinstance(saved, VideoSaved), saved
    return [saved.plan["components"][name]["backend"] for name in EXPERTS]


def fallen(events: list[Event]) -> list[str]:
    """Return the components that fell back."""
    return [event.component for event in events if isinstance(event, FellBack)]


# In the second pass: in the second block's first part, and in the last part of its second chunk.
FIRST_PART, LAST_PART = CALLS_OF_A_PASS + 8, 2 * CALLS_OF_A_PASS


@pytest.fixture(scope="module")
def in_pytorch(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The latents of the tiny clip that PyTorch makes."""
    with Residency() as residency:
        return sample(spec, planned(spec, tmp_path_factory.mktemp("in-pytorch"))[0], residency)


def latents_of(plan: ExecutionPlan, spec: ModelSpec, folder: Path) -> torch.Tensor:
    """Return the latents of a finished job."""
    found = CheckpointFolder(folder).load(spec, plan)
    assert found is not None and found.sampling is not None and found.step == plan.steps
    return found.sampling.latents


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "end", "reason"),
    [
        (FIRST_PART, broken, Fact("engine.failed", {"error": "on purpose"})),
        (LAST_PART, broken, Fact("engine.failed", {"error": "on purpose"})),
        (LAST_PART, cuda_error, Fact("execution.engine_failed", {"error": "CUDA error: on purpose"})),
        (FIRST_PART, starving, Fact("execution.engine_out_of_memory")),
    ],
)
def test_an_engine_that_fails_within_a_step(
    number: int,
    end: Any,
    reason: Fact,
    spec: ModelSpec,
    residency: Residency,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: Calls,
    in_pytorch: torch.Tensor,
) -> None:
    _, blocks = planned(spec, tmp_path)
    fail_at(monkeypatch, number, end)
    events = run(blocks, spec, residency, tmp_path / "job")
    assert backends(events) == ["pytorch", "pytorch"]
    assert len(calls) == number
    found = [event for event in events if isinstance(event, FellBack)]
    assert [(event.component, event.backend, event.reason) for event in found] == [
        (name, "onnxruntime", reason) for name in EXPERTS
    ]
    facts = read_metadata(tmp_path / "x.mp4")
    assert facts is not None
    assert facts["plan"]["components"]["transformer"]["backend"] == "pytorch"
    assert sum("PyTorch" in text for text in facts["warnings"]) >= 2
    # Nothing was loaded again.
    loads = [event.part for event in events if isinstance(event, StageStarted) and event.stage == "load"]
    assert loads == ["text_encoder", *EXPERTS, "vae"]
    assert apart(latents_of(blocks, spec, tmp_path / "job"), in_pytorch) < 1e-4


def test_the_low_noise_expert_falls_back_alone(
    spec: ModelSpec, residency: Residency, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, blocks = planned(spec, tmp_path)
    fail_at(monkeypatch, 3 * 2 * CALLS_OF_A_PASS, broken)
    events = run(blocks, spec, residency)
    assert fallen(events) == ["transformer_2"]
    assert backends(events) == ["onnxruntime", "pytorch"]


@pytest.mark.parametrize("step_cache", ["none", "first-block:0.9"])
def test_a_pass_with_nan_is_computed_again(
    step_cache: str,
    spec: ModelSpec,
    residency: Residency,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: Calls,
) -> None:
    pytorch, blocks = planned(spec, tmp_path, step_cache=step_cache)
    # In the first pass, after which a step cache is as empty as before it.
    fail_at(monkeypatch, 3, not_numbers)
    job = Alone(blocks)
    monkeypatch.setattr("tests.pipeline.test_parity.Alone", lambda _: job)
    made = sample(spec, blocks, residency)
    assert [(name, reason.code) for name, reason in job.fallen] == [
        (name, "execution.engine_not_finite") for name in EXPERTS
    ]
    assert len(calls) <= CALLS_OF_A_PASS
    monkeypatch.undo()
    assert apart(made, sample(spec, pytorch, residency)) < 1e-4


def test_memory_that_pytorch_lacks_is_the_jobs_out_of_memory(
    spec: ModelSpec, residency: Residency, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, blocks = planned(spec, tmp_path)
    outputs, seen = BlockEngines.outputs, 0

    def full(self: BlockEngines, program: str, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal seen
        seen += 1
        if seen == 20:
            raise torch.OutOfMemoryError("on purpose")
        return outputs(self, program, like)

    monkeypatch.setattr(BlockEngines, "outputs", full)
    events = events_of(blocks, spec, residency)
    assert any(isinstance(event, OutOfMemory) for event in events)
    assert fallen(events) == []


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_engines_that_cannot_be_opened(
    damage: str, spec: ModelSpec, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    service = stock(spec, tmp_path, tmp_path_factory)
    pytorch, blocks = planned(spec, tmp_path)
    job = Alone(blocks)
    with Residency(service) as residency:
        wanted = sample(spec, pytorch, residency)
        engine = service.store.path(blocks.components["transformer"].engines[1].id)
        if damage == "cut":
            (engine / BUILDER.file_name).write_bytes(b"")
        else:
            shutil.rmtree(engine)
        for name in EXPERTS:
            with residency.denoiser(spec, job, name):
                pass
        assert [name for name, _ in job.fallen] == EXPERTS
        assert apart(sample(spec, job.plan, residency), wanted) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_job_resumes_on_engines(
    spec: ModelSpec, service: EngineService, residency: Residency, tmp_path: Path
) -> None:
    _, blocks = planned(spec, tmp_path)
    run(blocks, spec, residency)
    wanted = frames_of(tmp_path / "x.mp4")
    (tmp_path / "x.mp4").unlink()
    assert killed(spec, blocks, tmp_path / "job", event="StepDone", count=3, engines=service.store.folder) == -9
    events = run(blocks, spec, residency, tmp_path / "job")
    (resumed,) = [event for event in events if isinstance(event, Resumed)]
    assert 0 < resumed.step < 4
    assert fallen(events) == []
    assert [event.step for event in events if isinstance(event, StepDone)] == list(range(resumed.step + 1, 5))
    assert frames_of(tmp_path / "x.mp4") == wanted


def test_a_resumed_job_stays_in_pytorch(
    spec: ModelSpec, residency: Residency, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    _, blocks = planned(spec, tmp_path)
    with monkeypatch.context() as planted:
        fail_at(planted, 3, broken)
        run(blocks, spec, residency)
    wanted = frames_of(tmp_path / "x.mp4")
    calls.clear()
    folder = CheckpointFolder(tmp_path / "job")
    fail_at(monkeypatch, 3, broken)

    def second(event: Event) -> bool:
        return isinstance(event, StepDone) and event.step == 2

    events_of(blocks, spec, residency, pause_at=second, checkpoints=folder)
    assert len(calls) == 3
    chunks, divided = BlockEngines.chunks, []

    def watch(self: BlockEngines, tokens: int) -> list[slice]:
        divided.append(tokens)
        return chunks(self, tokens)

    monkeypatch.setattr(BlockEngines, "chunks", watch)
    events = run(blocks, spec, residency, tmp_path / "job")
    assert len(calls) == 3
    assert set(divided) == {96}
    assert fallen(events) == []
    assert backends(events) == ["pytorch", "pytorch"]
    # In chunks and with the same precision as in the first run.
    assert frames_of(tmp_path / "x.mp4") == wanted


def test_a_build_that_fails_is_tried_once(
    spec: ModelSpec, residency: Residency, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, blocks = planned(spec, tmp_path)
    tried: list[str] = []

    def build(_: EngineService, __: ModelSpec, component: str, *___: Any, **____: Any) -> None:
        tried.append(component)
        raise EngineError("engine.failed", error="on purpose")

    monkeypatch.setattr(EngineService, "build", build)
    missing = tuple(use.replace(build=True) for use in blocks.components["transformer"].engines)
    for name in EXPERTS:
        blocks = blocks.with_component(name, blocks.components[name].replace(engines=missing))
    events = run(blocks, spec, residency)
    assert tried == ["transformer"]
    assert fallen(events) == EXPERTS


@pytest.mark.slow
def test_a_job_builds_block_engines_once_for_both_experts(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step cache needs block engines; the planner offers them, and the job builds them."""
    # Of few tokens: each is measured with calls of as many as it takes.
    monkeypatch.setattr(onnxruntime, "OnnxRuntimeBlocks", lambda: BUILDER)
    service = EngineService(EngineStore(tmp_path / "engines", 10**10), probe(), tmp_path)
    asked = {"prompt": "a red boat", "steps": 8, "seed": 3, "fps": 8, "step_cache": "first-block:0.9", **LARGE}
    with Residency(service) as residency:
        for build, size in ((True, {}), (False, SMALL)):
            request = {**asked, **size, "backends": dict.fromkeys(EXPERTS, "onnxruntime")}
            plan = resolve(
                GenerationRequest.from_mapping(request),
                spec,
                PlanningContext(machine(), tmp_path / "x.mp4", service.offers(spec)),
            )
            assert all(plan.components[name].in_blocks for name in EXPERTS)
            events = run(plan, spec, residency)
            assert fallen(events) == []
            assert backends(events) == ["onnxruntime", "onnxruntime"]
            built = [event.part for event in events if isinstance(event, StageStarted) and event.stage == "build"]
            assert built == (["transformer"] * 3 if build else [])
        assert len(service.store.index()) == 3
