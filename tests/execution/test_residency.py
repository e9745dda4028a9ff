"""Offloaded weights: bit-identical video, loaded once, and freed."""

import gc
import shutil
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import MachineError, ModelError
from runtime.core.events import Event, Failed, StageStarted, VideoSaved, Warned
from runtime.core.plan import ComponentPlan, EngineRef, ExecutionPlan
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.execution.attention import attention, problem
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.folder import weight_files
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import NeedsLibraryError, beside_others, load_module
from runtime.pipeline.run import run_job
from tests.pipeline.test_parity import sample
from tests.pipeline.test_run import frames_of
from tests.plans import Alone, tiny_plan, with_strategy
from tests.tiny_models import IN_JOBS

Tiny = Callable[[str], ModelSpec]
OFFLOADS = ("model", "group", "sequential")


def offloaded(spec: ModelSpec, output: Path, offload: str, *, keep: bool = False) -> ExecutionPlan:
    """Return a tiny plan of two steps, one for each expert, whose weights wait as `offload` says."""
    return with_strategy(
        tiny_plan(spec, output, negative_prompt="blue ball", steps=2), offload=offload, keep_loaded=keep
    )


def with_flash4(plan: ExecutionPlan) -> ExecutionPlan:
    """Return a plan with FlashAttention 4."""
    return plan.replace(speed=plan.speed.replace(attention="flash4"))


@contextmanager
def flash4_is(attend: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a function stand for FlashAttention 4."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cast("Any", SimpleNamespace(flash_attn_func=attend)))
    problem.cache_clear()
    yield
    problem.cache_clear()


def cancel_once(begun: threading.Event, residency: Residency, spec: ModelSpec, plan: ExecutionPlan) -> None:
    """Cancel a job that waits for what has begun to be loaded ahead."""
    job = Alone(plan)
    residency.load_ahead(spec, job, ["transformer"])
    assert begun.wait(60)
    threading.Timer(0.3, job.cancel.request).start()
    with pytest.raises(CancelledError), residency.denoiser(spec, job, "transformer"):
        pass


def parameters() -> int:
    """Return how many weights' tensors are alive."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    return sum(count for kind, count in kinds.items() if issubclass(kind, torch.nn.Parameter))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", IN_JOBS)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_latents_are_bit_identical(architecture: str, offload: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(architecture)
    with Residency() as residency:
        wanted = sample(spec, offloaded(spec, tmp_path / "x.mp4", "none"), residency)
        plan = offloaded(spec, tmp_path / "x.mp4", offload)
        for _ in range(2):
            assert torch.equal(sample(spec, plan, residency), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_weights_are_read_from_disk_once(offload: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = offloaded(spec, tmp_path / "x.mp4", offload)
    events: list[Event] = []
    with Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        held = {name: residency.is_loaded(spec, plan, name) for name in plan.components}
        assert all(held.values()), held
        alive = parameters()
        run_job(plan, spec, events.append, Cancel(), residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        assert parameters() == alive
    loads = [event.part for event in events if isinstance(event, StageStarted) and event.stage == "load"]
    assert loads[:4] == list(plan.components)
    # Each stage then tells of what is brought for it; what goes block by block is there.
    assert set(loads[4:]) == (set(plan.components) if offload == "model" else {"vae"})


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["wan2.2-a14b", "ltx-2.3"])
def test_a_text_encoder_that_is_freed_is_alone_in_ram(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(architecture)
    freed = tuple(name for name in spec.component_names if name in {"text_encoder", "connectors"})
    plan = with_strategy(offloaded(spec, tmp_path / "x.mp4", "group"), freed=freed)
    beside: list[tuple[str | None, list[str]]] = []
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, StageStarted) and event.stage == "load":
            loaded = [name for name in plan.components if residency.is_loaded(spec, plan, name)]
            beside.append((event.part, loaded))

    with Residency() as residency:
        wanted = offloaded(spec, tmp_path / "wanted.mp4", "none")
        run_job(wanted, spec, events.append, Cancel(), residency)
        for _ in range(2):
            beside.clear()
            run_job(plan, spec, emit, Cancel(), residency)
            assert isinstance(events[-1], VideoSaved), events[-1]
            assert frames_of(Path(events[-1].video)) == frames_of(tmp_path / "wanted.mp4")
            assert dict(beside).items() >= {name: [] for name in freed}.items()
            held = [name for name in plan.components if residency.is_loaded(spec, plan, name)]
            assert held == [name for name in plan.components if name not in freed]


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", *OFFLOADS])
def test_freeing_leaves_no_weights(offload: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    plan = offloaded(spec, tmp_path / "x.mp4", offload, keep=True)
    before = parameters()
    with Residency() as residency:
        sample(spec, plan, residency)
        with residency.denoiser(spec, Alone(plan), "transformer") as denoiser:
            module = weakref.ref(denoiser._module)  # type: ignore[attr-defined]
            del denoiser
        assert module() is not None
        assert parameters() > before
    assert module() is None
    assert parameters() == before


@pytest.mark.slow
def test_at_most_one_component_is_on_the_device(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = offloaded(spec, tmp_path / "x.mp4", "none")
    before, alive = parameters(), {}

    def emit(event: Event) -> None:
        if isinstance(event, StageStarted) and event.stage == "load":
            alive[event.part] = parameters() - before

    with Residency() as residency:
        run_job(plan, spec, emit, Cancel(), residency)
        assert alive == dict.fromkeys(plan.components, 0)
        # Nor does it matter that whom a part was lent to still knows it.
        with residency.denoiser(spec, Alone(plan), "transformer") as denoiser:
            assert parameters() > before
        assert parameters() == before
        del denoiser


def test_components_that_a_new_plan_does_not_use_are_freed_first(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    old = offloaded(spec, tmp_path / "x.mp4", "none", keep=True)
    new = offloaded(spec, tmp_path / "x.mp4", "group")
    with Residency() as residency:
        sample(spec, old, residency)
        assert residency.is_loaded(spec, old, "transformer")
        with residency.text_encoder(spec, Alone(new)):
            assert not any(residency.is_loaded(spec, old, name) for name in old.components)


def test_only_one_expert_is_moved_to_the_device(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = offloaded(spec, tmp_path / "x.mp4", "model")
    with Residency() as residency:
        for name in ("transformer", "transformer_2"):
            with residency.denoiser(spec, Alone(plan), name):
                waiting = {key.name: held.placed.waits_elsewhere for key, held in residency._loaded.items()}
                assert [other for other, waits in waiting.items() if not waits] == [name]
        assert all(held.placed.waits_elsewhere for held in residency._loaded.values())


def test_an_impossible_plan_is_refused_before_loading(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    plan = offloaded(spec, tmp_path / "x.mp4", "group")
    plan = plan.with_component("transformer", plan.components["transformer"].replace(quantization="bnb-8bit"))
    events: list[Event] = []
    with Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency)
        assert not residency._loaded
    assert isinstance(events[-1], Failed)
    assert events[-1].fact.code == "planner.8bit_offloaded"
    assert (events[-1].fact.data["component"], events[-1].fact.data["offload"]) == ("transformer", "group")
    assert not any(isinstance(event, StageStarted) for event in events)


def test_quantization_without_a_gpu_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    plan = offloaded(spec, tmp_path / "x.mp4", "none")
    plan = plan.with_component("transformer", plan.components["transformer"].replace(quantization="fp8"))
    with (
        Residency() as residency,
        pytest.raises(MachineError) as refused,
        residency.denoiser(spec, Alone(plan), "transformer"),
    ):
        pass
    assert refused.value.code == "quantization.needs_gpu"


def loading_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("load-ahead")}


def test_components_that_stay_loaded_are_loaded_while_the_prompt_is_encoded(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    plan = offloaded(spec, tmp_path / "x.mp4", "none", keep=True)
    loads: list[tuple[str, str]] = []

    def load(spec: ModelSpec, name: str, part: ComponentPlan, device: str | None) -> torch.nn.Module:
        first = name not in dict(loads)
        loads.append((name, threading.current_thread().name.rpartition("_")[0]))
        if name == "transformer_2" and first:
            raise RuntimeError("No memory left beside the others")
        return load_module(spec, name, part, device)

    videos = [tmp_path / "x.mp4", tmp_path / "y.mp4"]
    others = loading_threads()
    for video in videos:
        ahead = video == videos[0]
        events: list[Event] = []
        with Residency(load=load) as residency:
            if not ahead:
                vars(residency)["load_ahead"] = lambda *_: None
            run_job(plan.replace(output=video), spec, events.append, Cancel(), residency)
            assert isinstance(events[-1], VideoSaved), events[-1]
        if ahead:
            # A part that could not be loaded there is loaded when it is used.
            on_thread = [(name, "load-ahead") for name in ("transformer", "transformer_2", "vae")]
            assert sorted(loads) == sorted([("text_encoder", ""), *on_thread, ("transformer_2", "")])
    assert frames_of(videos[0]) == frames_of(videos[1])
    assert loading_threads() <= others


@pytest.mark.parametrize("fails", [False, True])
def test_a_package_for_attention_is_imported_while_weights_are_loaded(
    fails: bool, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.1")
    plan = with_flash4(offloaded(spec, tmp_path / "x.mp4", "none", keep=True))
    threads: list[str] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        if fails:
            raise RuntimeError("No kernel for this GPU")
        return attention("native")(q, k, v)

    events: list[Event] = []
    with flash4_is(attend, monkeypatch), Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency)
    assert isinstance(events[-1], VideoSaved), events[-1]
    # Once before the first step, and in every step if it runs.
    assert threads[0] == "preparation"
    assert threads.count("preparation") == 1
    assert (len(threads) == 1) is fails
    assert [event.fact.code for event in events if isinstance(event, Warned)].count("pipeline.degraded") == fails


@pytest.mark.timeout(60)
def test_a_cancelled_job_does_not_wait_for_a_part_that_is_loaded_ahead(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    plan = offloaded(spec, tmp_path / "x.mp4", "none", keep=True)
    begun, go_on, others = threading.Event(), threading.Event(), loading_threads()

    def load(spec: ModelSpec, name: str, part: ComponentPlan, device: str | None) -> torch.nn.Module:
        begun.set()
        assert go_on.wait(60)
        return load_module(spec, name, part, device)

    with Residency(load=load) as residency:
        cancel_once(begun, residency, spec, plan)
        # It is loaded on, for the next job, and freed at the end.
        assert residency.is_loaded(spec, plan, "transformer")
        go_on.set()
    assert loading_threads() <= others


@pytest.mark.timeout(60)
def test_a_cancelled_job_does_not_wait_for_what_its_first_step_needs(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.1")
    plan = with_flash4(offloaded(spec, tmp_path / "x.mp4", "none", keep=True))
    begun, go_on = threading.Event(), threading.Event()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go_on.wait(60)
        return attention("native")(q, k, v)

    with flash4_is(attend, monkeypatch), Residency() as residency:
        cancel_once(begun, residency, spec, plan)
        go_on.set()
        with residency.denoiser(spec, Alone(plan), "transformer"):
            assert not [thread for thread in threading.enumerate() if thread.name == "preparation"]


def test_parts_loaded_ahead_for_another_plan_are_freed(tiny: Tiny, tmp_path: Path) -> None:
    spec, other = tiny("wan2.2-a14b"), tiny("wan2.1")
    plan = offloaded(spec, tmp_path / "x.mp4", "none", keep=True)
    before = parameters()
    with Residency() as residency:
        residency.load_ahead(spec, Alone(plan), list(plan.components))
        assert residency.is_loaded(spec, plan, "transformer")
        next_plan = offloaded(other, tmp_path / "x.mp4", "none")
        with residency.video_decoder(other, Alone(next_plan)):
            assert not residency.is_loaded(spec, plan, "transformer")
    assert parameters() == before


def test_what_only_a_library_loads_is_not_loaded_beside_other_threads(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("wan2.1").directory, tmp_path / "model")
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    spec = read_spec(folder, "model")
    # Replaced after it was recognised.
    save_file({name: tensor for name, tensor in state.items() if name != "encoder.conv_in.bias"}, path)
    part = tiny_plan(spec, tmp_path / "x.mp4").components["vae"]
    with beside_others(), pytest.raises(NeedsLibraryError):
        load_module(spec, "vae", part)
    with pytest.raises(ModelError):  # the library's findings
        load_module(spec, "vae", part)


def test_an_error_while_an_engine_is_replaced_is_not_hidden(tiny: Tiny, tmp_path: Path) -> None:
    """The engine is gone; then the weights for PyTorch, too; then it cannot be freed."""
    spec = tiny("wan2.1")
    folder = Path(shutil.copytree(spec.directory, tmp_path / "model"))
    spec = read_spec(folder, "model")
    plan = offloaded(spec, tmp_path / "x.mp4", "none", keep=True)
    use = EngineRef(
        id="0" * 16, builder="onnxruntime", program="denoiser", precision="float32", profile=((1, 4, 4),) * 3
    )
    part = plan.components["transformer"].replace(backend="onnxruntime", engines=(use,))
    service = EngineService(EngineStore(tmp_path / "engines", 10**9), probe(), tmp_path)

    job = Alone(plan.with_component("transformer", part))
    with Residency(service) as residency:
        with residency.denoiser(spec, job, "transformer"):
            assert [name for name, _ in job.fallen] == ["transformer"]
        residency.free()
        (path,) = weight_files(folder / "transformer")
        path.unlink()
        with pytest.raises(ModelError) as missing:  # noqa: SIM117
            with residency.denoiser(spec, Alone(job.plan.with_component("transformer", part)), "transformer"):
                pass
        assert missing.value.code == "model.weights_missing"
        residency._drop = Mock(side_effect=RuntimeError("CUDA error"))  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="CUDA error"):  # noqa: SIM117
            with residency.denoiser(spec, Alone(job.plan.with_component("transformer", part)), "transformer"):
                pass
        del residency._drop
